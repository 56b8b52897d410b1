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

`vecgym.guide` is the manual, one page per subject: `help(vecgym.guide.sweeps)`. Below is the whole surface by theme;
`help(name)` shows each name with an example. Per-node tensors are `[K, *]`, and a node dimension of size 1 means "the
same on every node".

- Training: `Trainer` (`LocalTrainer`), `Nodes`, `History`, `Ledger`
- Strategies: `vecgym.strategy`, with `AllReduceStrategy`, `FedAvgStrategy`, `DiLoCoStrategy`,
  `CommunicateOptimizeStrategy` and others
- Optimizers: `OptimSpec`, an optimizer with its settings; `vecgym.optim`
- Data: `vecgym.data`, with `partition_iid`, `partition_dirichlet`, `partition_shards` and others: who holds what
- Models: `vecgym.models`, with `GPT` and `Classifier`; `vecgym.data.text`, text without a download
- Gradients: `rollout`, `rollout_jvp`, `Outcome`: whole runs as differentiable functions; `optimize_schedule`,
  `OptimizedSchedule`
- Sweeps: `sweep`, `SweepResult`, `Uniform`, `LogUniform`
- Files: `Trainer.fit(save_dir=..., resume=True)`, `Trainer.save`, `load`, `Saved`
- Time: `vecgym.clock`, with `Network` and `price`: how long a run takes on your network; `dry_run`, a run's ledger
  without training
- Memory: `estimate_memory`, `MemoryEstimate`; `Trainer.fit(max_memory_usage=...)`
- Logging: `CSVLogger`, `WandbLogger`, `TensorBoardLogger`, `Logger`
- Figures: `vecgym.plot`, with `plot_runs` (`Trainer.plot`), `plot_comparison`, `plot_history`, `plot_sensitivity`,
  `plot_schedule` and others
- Options: `Compute`, `Processes`, `Checkpoints`: the rarer options of `Trainer.fit`, in groups
- Processes: `Trainer.fit(backend="processes", num_processes=W)`, `verify`
- Underneath: `vecgym.engine.simulation`, the pure step; `vecgym.engine`, the gradients of all nodes;
  `vecgym.collectives`, what they exchange, with topology and ledger; `vecgym.compress`, what is sent instead;
  `vecgym.records`, `vecgym.runs`, `vecgym.sweeps`, `vecgym.core`
- Errors: `DivergenceError`, `ProcessError`, `VecgymWarning`; all others are `ValueError` and `TypeError`, with the fix
- Other interfaces: `vecgym.compat.exogym`, `vecgym.compat.diloco_sim`
"""

import sys

from vecgym import guide
from vecgym.clock import dry_run
from vecgym.collectives.ledger import Ledger
from vecgym.core import moved
from vecgym.core.errors import DivergenceError, ProcessError, VecgymWarning
from vecgym.core.nodes import Nodes
from vecgym.optim import OptimSpec
from vecgym.records.history import History
from vecgym.records.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from vecgym.records.optimized import OptimizedSchedule
from vecgym.records.runfile import Saved, load
from vecgym.runs.memory import MemoryEstimate, estimate_memory
from vecgym.runs.optimize import optimize_schedule
from vecgym.runs.options import Checkpoints, Compute, Processes
from vecgym.runs.rollout import Outcome, rollout, rollout_jvp
from vecgym.runs.trainer import LocalTrainer, Trainer
from vecgym.runs.verification import verify
from vecgym.sweeps import LogUniform, SweepResult, Uniform, sweep

moved.install(sys.modules[__name__])

__version__ = "0.2.0"

__all__ = [
    "CSVLogger",
    "Checkpoints",
    "Compute",
    "DivergenceError",
    "History",
    "Ledger",
    "LocalTrainer",
    "LogUniform",
    "Logger",
    "MemoryEstimate",
    "Nodes",
    "OptimSpec",
    "OptimizedSchedule",
    "Outcome",
    "ProcessError",
    "Processes",
    "Saved",
    "SweepResult",
    "TensorBoardLogger",
    "Trainer",
    "Uniform",
    "VecgymWarning",
    "WandbLogger",
    "dry_run",
    "estimate_memory",
    "guide",
    "load",
    "optimize_schedule",
    "rollout",
    "rollout_jvp",
    "sweep",
    "verify",
]
