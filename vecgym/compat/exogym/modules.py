"""EXO Gym's module paths, filled with this package's classes, and how a script finds them."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys

from vecgym.compat import imports
from vecgym.compat.exogym import communicate, config, demo, logger, strategies, strict, trainer, utils
from vecgym.compat.exogym.options import CommandLine, Flag, PathLike, checked
from vecgym.core.errors import warn
from vecgym.records import loggers

_TRAINERS = "Trainer LocalTrainer"
_COMMUNICATE = "all_reduce broadcast all_gather broadcast_object_list mps_compatible"
_OPTIM = "OptimSpec ensure_optim_spec"
_MODULE = "CommunicateOptimizeStrategy CommunicationModule"
_LOGGERS = "Logger CSVLogger WandbLogger"
_UTILS = "LogModule extract_config create_config log_model_summary safe_log_dict print_dataset_size get_device"
_STRATEGIES = (
    "Strategy SimpleReduceStrategy DiLoCoStrategy DiLoCoCommunicator SPARTAStrategy FedAvgStrategy "
    "SPARTADiLoCoStrategy DeMoStrategy"
)

# Path -> the names in it.
NAMES = {
    "exogym": f"{_TRAINERS} TrainNode",
    "exogym.trainer": f"{_TRAINERS} TrainConfig TrainNode",
    "exogym.train_node": "TrainNode",
    "exogym.common": "TrainConfig",
    "exogym.utils": "",
    "exogym.minibatch_probe": "",
    "exogym.aux": f"{_LOGGERS} {_UTILS}",
    "exogym.aux.utils": _UTILS,
    "exogym.aux.logger": _LOGGERS,
    "exogym.aux.checkpointing": "",
    "exogym.aux.correlation": "",
    "exogym.strategy": f"{_OPTIM} {_MODULE} {_COMMUNICATE} {_STRATEGIES}",
    "exogym.strategy.optim": _OPTIM,
    "exogym.strategy.strategy": f"Strategy SimpleReduceStrategy {_OPTIM} LogModule all_reduce",
    "exogym.strategy.communicate": _COMMUNICATE,
    "exogym.strategy.communicate_optimize_strategy": _MODULE,
    "exogym.strategy.diloco": "DiLoCoStrategy DiLoCoCommunicator",
    "exogym.strategy.federated_averaging": "FedAvgStrategy AveragingCommunicator",
    "exogym.strategy.sparta": (
        "SPARTAStrategy SparseCommunicator IndexSelector RandomIndexSelector ShuffledSequentialIndexSelector "
        "PartitionedIndexSelector"
    ),
    "exogym.strategy.sparta_diloco": "SPARTADiLoCoStrategy",
    "exogym.strategy.demo": "DeMoStrategy",
}
_MEMBERS = {
    name: value
    for module in (communicate, utils, strategies, demo, strict, config, trainer, logger)
    for name, value in vars(module).items()
}
CONTENTS = {path: {name: _MEMBERS[name] for name in names.split()} for path, names in NAMES.items()}
# A path of the documents, which show vecgym's own loggers there.
CONTENTS["exogym.logger"] = {name: getattr(loggers, name) for name in (*_LOGGERS.split(), "TensorBoardLogger")}

# What EXO Gym has and these modules have not, and why.
ABSENT = {
    "init_process_group_portsafe": "there are no processes",
    "find_minibatch_size_isolated": "nothing is probed",
    "CheckpointMixin": "EXO Gym's checkpoints cannot be written: use vecgym.Trainer's",
    "CorrelationMixin": "give correlation_interval to fit()",
}


@checked
def install(strict_timing: Flag = False, device: str | None = None) -> None:
    """Make `import exogym...` find vecgym's classes in this process. Calling it again only changes the mode.

    Warns if a real exogym is installed, which stays hidden until `uninstall()`.

    Args:
        strict_timing: the default of trainers: train exactly as EXO Gym's processes do.
        device: that trainers use in place of the one that they are given; None: that.

    Raises:
        ImportError: if the real one has been imported already, as its classes may be in use.

    >>> install()
    >>> from exogym.strategy.diloco import DiLoCoStrategy
    >>> DiLoCoStrategy.__module__
    'vecgym.compat.exogym.strategies'
    >>> uninstall()
    """
    if not imports.is_installed("exogym"):
        real = importlib.util.find_spec("exogym")
        if real is not None:
            warn(f"the exogym that is installed in {real.origin} is hidden: `import exogym` finds vecgym's classes.")
        imports.install(CONTENTS, ABSENT)
    trainer.set_defaults(strict_timing, device)


def uninstall() -> None:
    """Undo `install`: `import exogym` finds the real one again, if it is installed."""
    imports.uninstall("exogym")
    trainer.set_defaults(False)


@checked
def run_script(path: PathLike, args: CommandLine = (), strict_timing: Flag = False, device: str | None = None) -> None:
    """Run a script as `python path args` would, with vecgym's `exogym`. Its exceptions are passed on.

    Args:
        path: the script; it imports from its own directory first.
        args: its command line.
        strict_timing, device: see `install`.
    """
    before = sys.argv, list(sys.path)
    sys.argv = [str(path), *args]
    sys.path[0:1] = [os.path.dirname(os.path.abspath(path))]
    install(strict_timing, device)
    try:
        runpy.run_path(os.fspath(path), run_name="__main__")
    finally:
        uninstall()
        sys.argv, sys.path[:] = before
