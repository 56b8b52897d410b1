"""vecgym: distributed training of one model on K nodes, simulated as one vectorised PyTorch program.

Training:    Trainer (LocalTrainer), Nodes, History, Ledger
Strategies:  vecgym.strategy: AllReduceStrategy, FedAvgStrategy, DiLoCoStrategy, CommunicateOptimizeStrategy ...
Data:        vecgym.data: partition_iid, partition_dirichlet, partition_shards ...: who holds which examples
Gradients:   rollout, rollout_jvp, Outcome: whole runs as differentiable functions; optimize_schedule
Sweeps:      sweep, SweepResult, Uniform, LogUniform
Files:       Trainer.fit(save_dir=..., resume=True), Trainer.save, load
Logging:     CSVLogger, WandbLogger, TensorBoardLogger, Logger
Processes:   Trainer.fit(backend="processes", num_processes=W), verify
Underneath:  vecgym.simulate.Simulation, the pure step; vecgym.collectives; vecgym.local.Engine; vecgym.optim
"""

from vecgym.errors import DivergenceError, ProcessError, VecgymWarning
from vecgym.ledger import Ledger
from vecgym.logger import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from vecgym.memory import MemoryEstimate, estimate_memory
from vecgym.metrics import History
from vecgym.nodes import Nodes
from vecgym.optim import OptimSpec
from vecgym.optimize import OptimizedSchedule, optimize_schedule
from vecgym.rollout import Outcome, rollout, rollout_jvp
from vecgym.saved import Saved, load
from vecgym.sweep import LogUniform, SweepResult, Uniform, sweep
from vecgym.trainer import LocalTrainer, Trainer
from vecgym.verify import verify

__version__ = "0.1.0"

__all__ = [
    "CSVLogger",
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
    "Saved",
    "SweepResult",
    "TensorBoardLogger",
    "Trainer",
    "Uniform",
    "VecgymWarning",
    "WandbLogger",
    "estimate_memory",
    "load",
    "optimize_schedule",
    "rollout",
    "rollout_jvp",
    "sweep",
    "verify",
]
