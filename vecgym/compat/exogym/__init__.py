"""Run scripts written for EXO Gym.

`install()` makes `import exogym...` find the classes of this package, under EXO Gym's module paths and with its
argument names; `vecgym exogym script.py` runs a script that way. EXO Gym's own strategies are translated to vecgym's,
which train all nodes at once; a user's class, written for one rank, runs rank by rank.

Reference: exo-explore/gym at 9fa323c. `vecgym.guide.compat` lists its quirks and how each is handled.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from vecgym import compat, logger
from vecgym.compat.exogym import base, communicate, strategies, trainer
from vecgym.compat.exogym.base import (
    CommunicateOptimizeStrategy,
    CommunicationModule,
    OptimSpec,
    Strategy,
    ensure_optim_spec,
)
from vecgym.compat.exogym.communicate import all_gather, all_reduce, barrier, broadcast
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
from vecgym.core import check

__all__ = [
    "AveragingCommunicator", "CommunicateOptimizeStrategy", "CommunicationModule", "DeMoStrategy",
    "DiLoCoCommunicator", "DiLoCoStrategy", "FedAvgStrategy", "LocalTrainer", "OptimSpec", "SPARTADiLoCoStrategy",
    "SPARTAStrategy", "SimpleReduceStrategy", "SparseCommunicator", "Strategy", "Trainer", "all_gather", "all_reduce",
    "barrier", "broadcast", "ensure_optim_spec", "install", "run_script", "uninstall",
]  # fmt: skip

# What scripts import, and from where: each module has all of it, since EXO Gym's versions and documents differ in that.
_NAMES = (
    "Trainer LocalTrainer TrainConfig TrainNode Logger CSVLogger WandbLogger LogModule extract_config create_config "
    "get_device OptimSpec ensure_optim_spec CommunicateOptimizeStrategy CommunicationModule all_reduce broadcast "
    "all_gather broadcast_object_list mps_compatible Strategy SimpleReduceStrategy DiLoCoStrategy DiLoCoCommunicator "
    "SPARTAStrategy SparseCommunicator IndexSelector RandomIndexSelector ShuffledSequentialIndexSelector "
    "PartitionedIndexSelector FedAvgStrategy AveragingCommunicator SPARTADiLoCoStrategy DeMoStrategy"
)
_PATHS = (
    "exogym exogym.trainer exogym.train_node exogym.common exogym.aux exogym.aux.utils exogym.aux.logger "
    "exogym.strategy exogym.strategy.optim exogym.strategy.strategy exogym.strategy.communicate "
    "exogym.strategy.communicate_optimize_strategy exogym.strategy.diloco exogym.strategy.federated_averaging "
    "exogym.strategy.sparta exogym.strategy.sparta_diloco exogym.strategy.demo"
)
_MEMBERS = {name: value for home in (communicate, base, strategies, trainer) for name, value in vars(home).items()}
CONTENTS = {path: {name: _MEMBERS[name] for name in _NAMES.split()} for path in _PATHS.split()}
# A path from the documentation, with vecgym's own loggers.
CONTENTS["exogym.logger"] = {
    name: getattr(logger, name) for name in ("Logger", "CSVLogger", "WandbLogger", "TensorBoardLogger")
}


def install(device: str | None = None) -> None:
    """Make `import exogym...` find vecgym's classes in this process. Calling it again only changes the device.

    Warns if a real exogym is installed, which is then hidden until `uninstall()`.

    Args:
        device: a device that overrides those of the trainers; None: do not override.

    Raises:
        ImportError: if the real one has already been imported, since its classes may be in use.

    >>> install()
    >>> from exogym.strategy.diloco import DiLoCoStrategy
    >>> DiLoCoStrategy.__module__
    'vecgym.compat.exogym.strategies'
    >>> uninstall()
    """
    compat.install(CONTENTS)
    trainer.use_device(device)


def uninstall() -> None:
    """Undo `install`: `import exogym` finds the real one again, if it is installed."""
    compat.uninstall("exogym")
    trainer.use_device(None)


def run_script(path: str | os.PathLike[str], args: Sequence[str] = (), device: str | None = None) -> None:
    """Run a script like `python path args`, with vecgym's `exogym`. Its exceptions propagate.

    Args:
        path: the script; it imports from its own directory first.
        args: its command-line arguments.
        device: see `install`.
    """
    check.path("path", path)
    argv = [str(path), *check.instance("args", args, (list, tuple), "the command line as a list of str")]
    before = sys.argv, list(sys.path)
    sys.argv = argv
    sys.path[0:1] = [os.path.dirname(os.path.abspath(path))]
    try:
        install(device)
        runpy.run_path(os.fspath(path), run_name="__main__")
    finally:
        uninstall()
        sys.argv, sys.path[:] = before
