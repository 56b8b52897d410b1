"""vecgym: distributed training of one model on K nodes, simulated as one vectorised PyTorch program.

Training:    Trainer (LocalTrainer), Nodes, History, Ledger
Strategies:  vecgym.strategy: AllReduceStrategy, FedAvgStrategy, DiLoCoStrategy, CommunicateOptimizeStrategy ...
Logging:     CSVLogger, Logger
Processes:   Trainer.fit(backend="processes", num_processes=W), verify
Underneath:  vecgym.simulate.Simulation, the pure step; vecgym.collectives; vecgym.local.Engine; vecgym.optim
"""

from vecgym.errors import DivergenceError, ProcessError, VecgymWarning
from vecgym.ledger import Ledger
from vecgym.logger import CSVLogger, Logger
from vecgym.metrics import History
from vecgym.nodes import Nodes
from vecgym.optim import OptimSpec
from vecgym.trainer import LocalTrainer, Trainer
from vecgym.verify import verify

__version__ = "0.1.0"

__all__ = [
    "CSVLogger",
    "DivergenceError",
    "History",
    "Ledger",
    "LocalTrainer",
    "Logger",
    "Nodes",
    "OptimSpec",
    "ProcessError",
    "Trainer",
    "VecgymWarning",
    "verify",
]
