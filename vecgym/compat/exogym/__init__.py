"""Run scripts written for EXO Gym.

`install()` makes `import exogym...` find the classes of this package, under EXO Gym's module paths and with its
argument names; `vecgym exogym script.py` runs a script that way. EXO Gym's own strategies are translated to vecgym's,
which train all nodes at once; a user's class, written for one rank, runs rank by rank.

Reference: exo-explore/gym at 9fa323c. `vecgym.guide.compat` lists its quirks and how each is handled.
"""

from vecgym.compat.exogym.base import (
    CommunicateOptimizeStrategy,
    CommunicationModule,
    OptimSpec,
    Strategy,
    ensure_optim_spec,
)
from vecgym.compat.exogym.communicate import all_gather, all_reduce, barrier, broadcast
from vecgym.compat.exogym.modules import install, run_script, uninstall
from vecgym.compat.exogym.strategies import (
    AveragingCommunicator,
    DeMoStrategy,
    DiLoCoCommunicator,
    DiLoCoStrategy,
    FedAvgStrategy,
    SimpleReduceStrategy,
    SparseCommunicator,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
)
from vecgym.compat.exogym.trainer import LocalTrainer, Trainer

__all__ = [
    "AveragingCommunicator", "CommunicateOptimizeStrategy", "CommunicationModule", "DeMoStrategy",
    "DiLoCoCommunicator", "DiLoCoStrategy", "FedAvgStrategy", "LocalTrainer", "OptimSpec", "SPARTADiLoCoStrategy",
    "SPARTAStrategy", "SimpleReduceStrategy", "SparseCommunicator", "Strategy", "Trainer", "all_gather", "all_reduce",
    "barrier", "broadcast", "ensure_optim_spec", "install", "run_script", "uninstall",
]  # fmt: skip
