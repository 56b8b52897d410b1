"""vecgym: distributed training of one model on K nodes, simulated as one vectorised PyTorch program.

Training:    Trainer (LocalTrainer), Nodes, History, Ledger
Strategies:  vecgym.strategy: AllReduceStrategy, FedAvgStrategy, DiLoCoStrategy, CommunicateOptimizeStrategy ...
Sweeps:      sweep, SweepResult, Uniform, LogUniform
Logging:     CSVLogger, Logger
Underneath:  vecgym.simulate.Simulation, the pure step; vecgym.collectives; vecgym.local.Engine; vecgym.optim
"""

from vecgym.errors import DivergenceError, VecgymWarning
from vecgym.ledger import Ledger
from vecgym.logger import CSVLogger, Logger
from vecgym.metrics import History
from vecgym.nodes import Nodes
from vecgym.optim import OptimSpec
from vecgym.sweep import LogUniform, SweepResult, Uniform, sweep
from vecgym.trainer import LocalTrainer, Trainer

__version__ = "0.1.0"

__all__ = [
    "CSVLogger",
    "DivergenceError",
    "History",
    "Ledger",
    "LocalTrainer",
    "LogUniform",
    "Logger",
    "Nodes",
    "OptimSpec",
    "SweepResult",
    "Trainer",
    "Uniform",
    "VecgymWarning",
    "sweep",
]
