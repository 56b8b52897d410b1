"""The modules of the package `exogym`, made of this one's classes, and how a script finds them."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import vecgym.records.loggers
from vecgym.compat.exogym import communicate, demo, logger, strategies, strict, trainer, utils
from vecgym.compat.exogym.options import checked
from vecgym.core.errors import warn

_COMMUNICATE = {
    name: getattr(communicate, name)
    for name in ("all_reduce", "broadcast", "all_gather", "broadcast_object_list", "mps_compatible")
}
_OPTIM = {"OptimSpec": strategies.OptimSpec, "ensure_optim_spec": strategies.ensure_optim_spec}
_MODULE = {
    "CommunicateOptimizeStrategy": strategies.CommunicateOptimizeStrategy,
    "CommunicationModule": strategies.CommunicationModule,
}
_LOGGERS = {name: getattr(logger, name) for name in ("Logger", "CSVLogger", "WandbLogger")}
_UTILS = {
    name: getattr(utils, name)
    for name in (
        "LogModule", "extract_config", "create_config", "log_model_summary", "safe_log_dict", "print_dataset_size",
        "get_device",
    )
}  # fmt: skip
_TRAINERS = {"Trainer": trainer.Trainer, "LocalTrainer": trainer.LocalTrainer}
_SELECTORS = {
    name: getattr(strategies, name)
    for name in (
        "SPARTAStrategy", "SparseCommunicator", "IndexSelector", "RandomIndexSelector",
        "ShuffledSequentialIndexSelector", "PartitionedIndexSelector",
    )
}  # fmt: skip

# Path -> what is there.
CONTENTS: dict[str, dict[str, Any]] = {
    "exogym": {**_TRAINERS, "TrainNode": strict.TrainNode},
    "exogym.trainer": {**_TRAINERS, "TrainConfig": strict.TrainConfig, "TrainNode": strict.TrainNode},
    "exogym.train_node": {"TrainNode": strict.TrainNode},
    "exogym.common": {"TrainConfig": strict.TrainConfig},
    "exogym.utils": {},
    "exogym.minibatch_probe": {},
    "exogym.logger": {},
    "exogym.aux": {**_LOGGERS, **_UTILS},
    "exogym.aux.utils": _UTILS,
    "exogym.aux.logger": _LOGGERS,
    "exogym.aux.checkpointing": {},
    "exogym.aux.correlation": {},
    "exogym.strategy": {
        **_OPTIM, **_MODULE, **_COMMUNICATE,
        "Strategy": strategies.Strategy,
        "SimpleReduceStrategy": strategies.SimpleReduceStrategy,
        "DiLoCoStrategy": strategies.DiLoCoStrategy,
        "DiLoCoCommunicator": strategies.DiLoCoCommunicator,
        "SPARTAStrategy": strategies.SPARTAStrategy,
        "FedAvgStrategy": strategies.FedAvgStrategy,
        "SPARTADiLoCoStrategy": strategies.SPARTADiLoCoStrategy,
        "DeMoStrategy": demo.DeMoStrategy,
    },
    "exogym.strategy.optim": _OPTIM,
    "exogym.strategy.strategy": {
        "Strategy": strategies.Strategy, "SimpleReduceStrategy": strategies.SimpleReduceStrategy, **_OPTIM,
        "LogModule": utils.LogModule, "all_reduce": communicate.all_reduce,
    },
    "exogym.strategy.communicate": _COMMUNICATE,
    "exogym.strategy.communicate_optimize_strategy": _MODULE,
    "exogym.strategy.diloco": {
        "DiLoCoStrategy": strategies.DiLoCoStrategy, "DiLoCoCommunicator": strategies.DiLoCoCommunicator,
    },
    "exogym.strategy.federated_averaging": {
        "FedAvgStrategy": strategies.FedAvgStrategy, "AveragingCommunicator": strategies.AveragingCommunicator,
    },
    "exogym.strategy.sparta": _SELECTORS,
    "exogym.strategy.sparta_diloco": {"SPARTADiLoCoStrategy": strategies.SPARTADiLoCoStrategy},
    "exogym.strategy.demo": {"DeMoStrategy": demo.DeMoStrategy},
}  # fmt: skip

# (path, name) -> why it is not there.
ABSENT = {
    ("exogym.utils", "init_process_group_portsafe"): "there are no processes",
    ("exogym.minibatch_probe", "find_minibatch_size_isolated"): "nothing is probed",
    ("exogym.aux", "CheckpointMixin"): "EXO Gym's checkpoints cannot be written: use vecgym.Trainer's",
    ("exogym.aux.checkpointing", "CheckpointMixin"): "EXO Gym's checkpoints cannot be written: use vecgym.Trainer's",
    ("exogym.aux", "CorrelationMixin"): "give correlation_interval to fit()",
    ("exogym.aux.correlation", "CorrelationMixin"): "give correlation_interval to fit()",
}


@checked
def install(strict_timing: bool = False) -> None:
    """Make `import exogym...` find vecgym's classes, in this process, from now on. More calls change only the mode.

    Args:
        strict_timing: trainers that are not told otherwise train exactly as EXO Gym's processes do.

    Warns where a real exogym is installed: it stays hidden until `uninstall()`.

    Raises:
        ImportError: where the real one has been imported already: its classes may be in use.

    >>> install()
    >>> from exogym.strategy.diloco import DiLoCoStrategy
    >>> DiLoCoStrategy.__module__
    'vecgym.compat.exogym.strategies'
    >>> uninstall()
    """
    present = sys.modules.get("exogym")
    if present is not None and not isinstance(present, _Module):
        raise ImportError(
            f"exogym is imported already, from {getattr(present, '__file__', 'somewhere')}: call install() before "
            "anything imports it."
        )
    if present is None:
        real = importlib.util.find_spec("exogym")
        if real is not None:
            warn(f"the exogym that is installed in {real.origin} is hidden: `import exogym` finds vecgym's classes.")
        for path, content in CONTENTS.items():
            sys.modules[path] = _Module(path, content)
        for path in CONTENTS:
            parent, _, name = path.rpartition(".")
            if parent:
                setattr(sys.modules[parent], name, sys.modules[path])
    trainer.set_strict_timing(strict_timing)


def uninstall() -> None:
    """Undo `install`: `import exogym` finds what is installed, if anything is."""
    for path in CONTENTS:
        if isinstance(sys.modules.get(path), _Module):
            del sys.modules[path]
    trainer.set_strict_timing(False)


class _Module(ModuleType):
    """A module of the package; says why a name is not in it."""

    def __init__(self, path: str, content: dict[str, Any]) -> None:
        super().__init__(path, f"{path} of EXO Gym, made of vecgym's classes.")
        self.__path__: list[str] = []  # a package, with no other modules than those that are there
        self.__spec__ = importlib.machinery.ModuleSpec(path, None, origin=__file__, is_package=True)
        self.__all__ = list(content)
        vars(self).update(content)

    def __getattr__(self, name: str) -> Any:
        if self.__name__ == "exogym.logger" and not name.startswith("_"):  # of the documents: vecgym's own loggers
            return getattr(vecgym.records.loggers, name)
        reason = ABSENT.get((self.__name__, name))
        if reason is not None:
            raise ImportError(f"{self.__name__}.{name} is not there: {reason}.")
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


@checked
def run_script(path: str | os.PathLike[str], args: Sequence[str] = (), strict_timing: bool = False) -> None:
    """Run a script as `python path args` would, with `exogym` being vecgym's. What it raises comes out.

    Args:
        path: of the script; its directory is where it imports from first.
        args: its command line.
        strict_timing: see `install`.
    """
    before = sys.argv, list(sys.path)
    sys.argv = [str(path), *args]
    sys.path[0:1] = [os.path.dirname(os.path.abspath(path))]
    install(strict_timing)
    try:
        runpy.run_path(os.fspath(path), run_name="__main__")
    finally:
        uninstall()
        sys.argv, sys.path[:] = before
