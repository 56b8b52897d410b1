"""Training algorithms, one file each, and the parts they are made of."""

from vecgym.optim import OptimSpec
from vecgym.strategy.allreduce import AllReduceStrategy, GradientAveraging, SimpleReduceStrategy
from vecgym.strategy.base import CommunicateOptimizeStrategy, CommunicationModule, Context, Strategy
from vecgym.strategy.demo import DeMoCommunicator, DeMoStrategy
from vecgym.strategy.diloco import DiLoCoCommunicator, DiLoCoStrategy
from vecgym.strategy.fedavg import AveragingCommunicator, FedAvgStrategy, ProximalTerm, ServerCommunicator
from vecgym.strategy.fedopt import ServerOptimizer

__all__ = [
    "AllReduceStrategy",
    "AveragingCommunicator",
    "CommunicateOptimizeStrategy",
    "CommunicationModule",
    "Context",
    "DeMoCommunicator",
    "DeMoStrategy",
    "DiLoCoCommunicator",
    "DiLoCoStrategy",
    "FedAvgStrategy",
    "GradientAveraging",
    "OptimSpec",
    "ProximalTerm",
    "ServerCommunicator",
    "ServerOptimizer",
    "SimpleReduceStrategy",
    "Strategy",
]
