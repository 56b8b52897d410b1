"""Scripts written for EXO Gym, on vecgym.

`install()` makes `import exogym...` find the classes of this package, under EXO Gym's module paths and argument
names; `vecgym exogym script.py` does it for a script. EXO Gym's own strategies become vecgym's, which train all nodes
at once; a class of the user's, written for one rank, runs rank by rank.

With `strict_timing` a run is EXO Gym's to the last step: which batches a node sees (the sampler never shuffles anew),
which random numbers (all nodes are seeded alike, node 0 evaluates and stays in eval() mode), when it exchanges (DiLoCo
and FedAvg first after H + 1 steps), and what EXO Gym ignores. One thing is mended: DiLoCo's outer parameters are node
0's own there on a CPU. It runs rank by rank, node after node: for comparison with old results.

Reference: exo-explore/gym at 9fa323c. The quirks, and what becomes of each, are a table in `vecgym.guide.compat`.
"""

from vecgym.compat.exogym.communicate import all_gather, all_reduce, barrier, broadcast
from vecgym.compat.exogym.demo import DeMoStrategy
from vecgym.compat.exogym.modules import install, run_script, uninstall
from vecgym.compat.exogym.strategies import (
    AveragingCommunicator,
    CommunicateOptimizeStrategy,
    CommunicationModule,
    DiLoCoCommunicator,
    DiLoCoStrategy,
    FedAvgStrategy,
    OptimSpec,
    SimpleReduceStrategy,
    SparseCommunicator,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
    Strategy,
    ensure_optim_spec,
)
from vecgym.compat.exogym.trainer import LocalTrainer, Trainer

__all__ = [
    "AveragingCommunicator",
    "CommunicateOptimizeStrategy",
    "CommunicationModule",
    "DeMoStrategy",
    "DiLoCoCommunicator",
    "DiLoCoStrategy",
    "FedAvgStrategy",
    "LocalTrainer",
    "OptimSpec",
    "SPARTADiLoCoStrategy",
    "SPARTAStrategy",
    "SimpleReduceStrategy",
    "SparseCommunicator",
    "Strategy",
    "Trainer",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "ensure_optim_spec",
    "install",
    "run_script",
    "uninstall",
]
