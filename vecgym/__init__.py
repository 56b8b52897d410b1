"""vecgym: distributed training of one model on K nodes, simulated as one vectorised PyTorch program.

A model is a module that returns the mean loss of a batch; a strategy says what its K copies exchange, and when:

>>> import torch
>>> from vecgym import Trainer
>>> from vecgym.strategy import DiLoCoStrategy
>>> from vecgym.models import Line
>>> trainer = Trainer(Line(), torch.ones(64))
>>> averaged = trainer.fit(
...     DiLoCoStrategy("sgd", H=2, lr=0.1), num_nodes=4, max_steps=8, batch_size=2, device="cpu", progress=False
... )
>>> trainer.nodes, trainer.ledger
(Nodes(4 x Line, 1 parameters each), Ledger(4 collectives, 24 bytes sent per node))
>>> [round(loss, 2) for loss in trainer.history["train_loss"]]
[1.0, 0.64, 0.27, 0.17, 0.0, 0.0, 0.06, 0.04]

`vecgym.guide` is the manual, one page per subject: `help(vecgym.guide.sweeps)`. The public interface follows, by theme;
`help(name)` shows each name with an example. Per-node tensors are `[K, *]`, and a node dimension of size 1 means "the
same on every node". What needs torch is imported when it is first used.

- Training: `Trainer` (`LocalTrainer`), `Nodes`, `History`, `Ledger`
- Strategies: `vecgym.strategy`, with `AllReduceStrategy`, `FedAvgStrategy`, `DiLoCoStrategy`,
  `CommunicateOptimizeStrategy` and others
- Availability: `availability`, with `Dropout`, `Sampled`, `Trace` and others: which nodes are there in which step
- Optimizers: `OptimSpec`, an optimizer with its settings; `vecgym.optim`
- Data: `vecgym.data`, with `partition_iid`, `partition_dirichlet`, `partition_shards` and others
- Models: `vecgym.models`, with `GPT` and `Classifier`; `vecgym.data.text`, text without a download
- Gradients: `rollout`, `rollout_jvp`, `Outcome`: whole runs as differentiable functions
- Learned numbers and schedules: `vecgym.meta`, with `learn`, from many runs or from one
- Influence: `influence`, `Influence`: what each exchange, node or message of a run was worth
- Sweeps: `sweep`, `SweepResult`, `Uniform`, `LogUniform`; `compare`, of separate runs
- Files: `Trainer.fit(save_dir=..., resume=True)`, `Trainer.save`, `load`, `Saved`
- Time: `vecgym.clock`, with `Network` and `price`: how long a run takes on your network; `dry_run`, a run's ledger
  without training
- Memory: `estimate_memory`, `MemoryEstimate`; `Trainer.fit(max_memory_usage=...)`
- Logging: `CSVLogger`, `WandbLogger`, `TensorBoardLogger`, `Logger`
- Figures: `vecgym.plot`, with `plot_runs` (`Trainer.plot`), `plot_comparison`, `plot_history`, `plot_sensitivity`,
  `plot_numbers` and others
- Processes: `Trainer.fit(backend="processes", num_processes=W)`, `verify`
- Underneath: `vecgym.simulation`, timetables and handlers; `vecgym.engine`, the gradients of all nodes;
  `vecgym.collectives`, exchanges, topologies and the ledger; `vecgym.compress`, codecs;
  `vecgym.records`, `vecgym.runs`, `vecgym.sweeps`, `vecgym.core`
- Errors: `DivergenceError`, `ProcessError`, `VecgymWarning`; all others are `ValueError` and `TypeError`, with the fix
- Other interfaces: `vecgym.compat.exogym`, `vecgym.compat.diloco_sim`
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what `_HOMES` says, for type checkers and editors
    from vecgym import availability as availability
    from vecgym import clock as clock
    from vecgym import collectives as collectives
    from vecgym import compat as compat
    from vecgym import compress as compress
    from vecgym import core as core
    from vecgym import data as data
    from vecgym import engine as engine
    from vecgym import guide
    from vecgym import logger as logger
    from vecgym import meta as meta
    from vecgym import models as models
    from vecgym import optim as optim
    from vecgym import plot as plot
    from vecgym import records as records
    from vecgym import runs as runs
    from vecgym import simulation as simulation
    from vecgym import strategy as strategy
    from vecgym import sweeps as sweeps
    from vecgym.clock import dry_run
    from vecgym.collectives.ledger import Ledger
    from vecgym.core.errors import DivergenceError, ProcessError, VecgymWarning
    from vecgym.core.nodes import Nodes
    from vecgym.logger import CSVLogger, Logger, TensorBoardLogger, WandbLogger
    from vecgym.optim import OptimSpec
    from vecgym.records.history import History
    from vecgym.records.runfile import Saved, load
    from vecgym.runs.influence import Influence, influence
    from vecgym.runs.memory import MemoryEstimate, estimate_memory
    from vecgym.runs.rollout import Outcome, rollout, rollout_jvp
    from vecgym.runs.trainer import LocalTrainer, Trainer
    from vecgym.runs.verification import verify
    from vecgym.sweeps import LogUniform, SweepResult, Uniform, compare, sweep

__version__ = "0.3.0"

__all__ = [
    "CSVLogger", "DivergenceError", "History", "Influence", "Ledger", "LocalTrainer", "LogUniform", "Logger",
    "MemoryEstimate", "Nodes", "OptimSpec", "Outcome", "ProcessError", "Saved", "SweepResult",
    "TensorBoardLogger", "Trainer", "Uniform", "VecgymWarning", "WandbLogger", "availability", "compare", "dry_run",
    "estimate_memory", "guide", "influence", "load", "rollout", "rollout_jvp", "sweep", "verify",
]  # fmt: skip

# Where each public name is. It is imported when it is first used, so that `vecgym --help` need not wait for torch.
_HOMES = {
    "clock": ("dry_run",),
    "collectives.ledger": ("Ledger",),
    "core.errors": ("DivergenceError", "ProcessError", "VecgymWarning"),
    "core.nodes": ("Nodes",),
    "optim": ("OptimSpec",),
    "records.history": ("History",),
    "logger": ("CSVLogger", "Logger", "TensorBoardLogger", "WandbLogger"),
    "records.runfile": ("Saved", "load"),
    "runs.influence": ("Influence", "influence"),
    "runs.memory": ("MemoryEstimate", "estimate_memory"),
    "runs.rollout": ("Outcome", "rollout", "rollout_jvp"),
    "runs.trainer": ("LocalTrainer", "Trainer"),
    "runs.verification": ("verify",),
    "sweeps": ("LogUniform", "SweepResult", "Uniform", "compare", "sweep"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
_PACKAGES = {
    "availability", "clock", "collectives", "compat", "compress", "core", "data", "engine", "guide", "logger",
    "meta", "models", "optim", "plot", "records", "runs", "simulation", "strategy", "sweeps",
}  # fmt: skip

if not TYPE_CHECKING:  # to type checkers, an unknown name would be there

    def __getattr__(name: str) -> Any:
        if name in _PACKAGES:
            return importlib.import_module(f"{__name__}.{name}")  # which makes it an attribute
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_PACKAGES})


# By default, torch's threads spin for 3 ms while they wait for one another, which slows everything down many times over
# when other programs want the same cores. Spinning for a thirtieth of that is as fast on an idle machine; on a busy one
# they sleep. torch reads this when it is loaded; `vecgym.engine.plan.settle_threads` is for where that was before.
if "torch" not in sys.modules and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
    try:
        busy = os.getloadavg()[0] >= (os.cpu_count() or 1) / 2
    except (AttributeError, OSError):  # not on Windows, nor in every container
        busy = False
    if busy or sys.platform != "linux":  # others than GNU's OpenMP know sleeping alone
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    else:
        os.environ["GOMP_SPINCOUNT"] = "10000"
    del busy
