"""Training algorithms, one file each, and the parts they are made of."""

from vecgym.optim import OptimSpec
from vecgym.strategy.allreduce import AllReduceStrategy, GradientAveraging, SimpleReduceStrategy
from vecgym.strategy.base import CommunicateOptimizeStrategy, CommunicationModule, Context, Strategy
from vecgym.strategy.compose import delayed, every
from vecgym.strategy.compression import TopKSparseCommunicator, compressed
from vecgym.strategy.demo import DeMoCommunicator, DeMoStrategy
from vecgym.strategy.diloco import DiLoCoCommunicator, DiLoCoStrategy
from vecgym.strategy.fedavg import AveragingCommunicator, FedAvgStrategy, ProximalTerm, ServerCommunicator
from vecgym.strategy.fedopt import ServerOptimizer
from vecgym.strategy.gossip import GossipCommunicator, GossipStrategy
from vecgym.strategy.per_rank import all_gather, all_reduce, broadcast
from vecgym.strategy.relaxed import SyncWeight
from vecgym.strategy.sparta import (
    PartitionedSelector,
    RandomSelector,
    ScheduledSelector,
    Selector,
    ShuffledSequentialSelector,
    SparseCommunicator,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
)

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
    "GossipCommunicator",
    "GossipStrategy",
    "GradientAveraging",
    "OptimSpec",
    "PartitionedSelector",
    "ProximalTerm",
    "RandomSelector",
    "SPARTADiLoCoStrategy",
    "SPARTAStrategy",
    "ScheduledSelector",
    "Selector",
    "ServerCommunicator",
    "ServerOptimizer",
    "ShuffledSequentialSelector",
    "SimpleReduceStrategy",
    "SparseCommunicator",
    "Strategy",
    "SyncWeight",
    "TopKSparseCommunicator",
    "all_gather",
    "all_reduce",
    "broadcast",
    "compressed",
    "delayed",
    "every",
]
