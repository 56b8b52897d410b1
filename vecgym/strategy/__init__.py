"""Training algorithms, one file each, and the parts they are made of.

Algorithms:  AllReduceStrategy (SimpleReduceStrategy), FedAvgStrategy, DiLoCoStrategy, StreamingDiLoCoStrategy,
             EagerDiLoCoStrategy, SPARTAStrategy, SPARTADiLoCoStrategy, GossipStrategy, DeMoStrategy, NoLoCoStrategy,
             LocalAdamStrategy, DESLOCStrategy, MuLoCoStrategy, GPAStrategy, PALSGDStrategy, SparseLoCoStrategy
Asynchronous: AsyncStrategy, with a Server, the base: OuterOptimizer, DelayedNesterov, FedBuff, HeLoCo;
             HALoSStrategy, a server in each region and a global one; ADPSGDStrategy, averages in pairs;
             DecoupledDiLoCoStrategy, a server of fragments that merges those of a quorum
Your own:    CommunicateOptimizeStrategy([module, ...], inner_optim); a Strategy, the base of all; RankStrategy, whose
             `step` is that of one rank and calls all_reduce, broadcast, all_gather
Bricks:      Gradients(average), Parameters(average, every), OuterStep(average, outer_optim, H), CorrectedOuterStep:
             what is agreed on, and when (Rounds, RoundsOf or SyncWeight; When, the base); Average, the base: Mean,
             ServerMean, Mix, Robust, MostMoved, StrongestCosines; around one: Sparse, Compressed, EF21, Corrupted,
             Private: how the nodes agree
Modules:     CommunicationModule, the base, which is told by a Context where it is; GradientAveraging,
             AveragingCommunicator, ServerCommunicator (with a ServerOptimizer), ProximalTerm, DiLoCoCommunicator,
             StreamingCommunicator, EagerCommunicator, NoLoCoCommunicator, PALSGDCommunicator, GossipCommunicator,
             SparseCommunicator, TopKSparseCommunicator, DeMoCommunicator, Moments
Around one:  every(n, module), delayed(module, d), compressed(module, method)
Coordinates: Selector, the base; RandomSelector, ScheduledSelector, ShuffledSequentialSelector, PartitionedSelector
Optimizers:  OptimSpec

>>> DiLoCoStrategy("adamw", H=100, lr=1e-3, compression="int8").communication_modules[0]
compressed(DiLoCoCommunicator(outer_optim=OptimSpec(SGD, lr=0.7, momentum=0.9, nesterov=True), H=100), \
Quantise(bits=8, stochastic=False), error_feedback=True)
>>> CommunicateOptimizeStrategy([OuterStep(Compressed(Mean(island_size=4, participation=0.5), "topk"), H=50)], "adamw")
CommunicateOptimizeStrategy(OptimSpec(AdamW), OuterStep(Compressed(Mean(island_size=4, participation=0.5), \
TopK(fraction=0.01, k=None)), outer_optim=OptimSpec(SGD, lr=0.7, momentum=0.9, nesterov=True), H=50))
>>> CommunicateOptimizeStrategy([every(10, AveragingCommunicator(island_size=4))], "adamw", lr=1e-3)
CommunicateOptimizeStrategy(OptimSpec(AdamW, lr=0.001), every(10, AveragingCommunicator(island_size=4, H=1, \
participation=1.0, weighting='equal')))
"""

from vecgym.optim import OptimSpec
from vecgym.strategy.ad_psgd import ADPSGDStrategy
from vecgym.strategy.allreduce import AllReduceStrategy, GradientAveraging, SimpleReduceStrategy
from vecgym.strategy.asynchronous import AsyncStrategy
from vecgym.strategy.average import Average, Mean, ServerMean
from vecgym.strategy.base import CommunicateOptimizeStrategy, CommunicationModule, Context, Strategy
from vecgym.strategy.codes import Compressed
from vecgym.strategy.compose import delayed, every
from vecgym.strategy.compression import compressed
from vecgym.strategy.corrections import CorrectedOuterStep
from vecgym.strategy.decoupled import DecoupledDiLoCoStrategy
from vecgym.strategy.demo import DeMoCommunicator, DeMoStrategy, StrongestCosines
from vecgym.strategy.diloco import DiLoCoCommunicator, DiLoCoStrategy
from vecgym.strategy.eager import EagerCommunicator, EagerDiLoCoStrategy
from vecgym.strategy.ef21 import EF21
from vecgym.strategy.fedavg import AveragingCommunicator, FedAvgStrategy, ProximalTerm, ServerCommunicator
from vecgym.strategy.fedopt import ServerOptimizer
from vecgym.strategy.gossip import GossipCommunicator, GossipStrategy, Mix
from vecgym.strategy.gpa import GPAStrategy
from vecgym.strategy.halos import HALoSStrategy
from vecgym.strategy.local_adam import DESLOCStrategy, LocalAdamStrategy
from vecgym.strategy.modules import Gradients, OuterStep, Parameters
from vecgym.strategy.moments import Moments
from vecgym.strategy.most_moved import MostMoved, TopKSparseCommunicator
from vecgym.strategy.muloco import MuLoCoStrategy
from vecgym.strategy.noloco import NoLoCoCommunicator, NoLoCoStrategy
from vecgym.strategy.palsgd import PALSGDCommunicator, PALSGDStrategy
from vecgym.strategy.per_rank import RankStrategy, all_gather, all_reduce, broadcast
from vecgym.strategy.robust import Corrupted, Private, Robust
from vecgym.strategy.selectors import (
    PartitionedSelector,
    RandomSelector,
    ScheduledSelector,
    Selector,
    ShuffledSequentialSelector,
)
from vecgym.strategy.servers import DelayedNesterov, FedBuff, HeLoCo, OuterOptimizer, Server
from vecgym.strategy.sparse import Sparse
from vecgym.strategy.sparseloco import SparseLoCoStrategy
from vecgym.strategy.sparta import SparseCommunicator, SPARTADiLoCoStrategy, SPARTAStrategy
from vecgym.strategy.streaming import StreamingCommunicator, StreamingDiLoCoStrategy
from vecgym.strategy.when import Rounds, RoundsOf, SyncWeight, When

__all__ = [
    "EF21",
    "ADPSGDStrategy",
    "AllReduceStrategy",
    "AsyncStrategy",
    "Average",
    "AveragingCommunicator",
    "CommunicateOptimizeStrategy",
    "CommunicationModule",
    "Compressed",
    "Context",
    "CorrectedOuterStep",
    "Corrupted",
    "DESLOCStrategy",
    "DeMoCommunicator",
    "DeMoStrategy",
    "DecoupledDiLoCoStrategy",
    "DelayedNesterov",
    "DiLoCoCommunicator",
    "DiLoCoStrategy",
    "EagerCommunicator",
    "EagerDiLoCoStrategy",
    "FedAvgStrategy",
    "FedBuff",
    "GPAStrategy",
    "GossipCommunicator",
    "GossipStrategy",
    "GradientAveraging",
    "Gradients",
    "HALoSStrategy",
    "HeLoCo",
    "LocalAdamStrategy",
    "Mean",
    "Mix",
    "Moments",
    "MostMoved",
    "MuLoCoStrategy",
    "NoLoCoCommunicator",
    "NoLoCoStrategy",
    "OptimSpec",
    "OuterOptimizer",
    "OuterStep",
    "PALSGDCommunicator",
    "PALSGDStrategy",
    "Parameters",
    "PartitionedSelector",
    "Private",
    "ProximalTerm",
    "RandomSelector",
    "RankStrategy",
    "Robust",
    "Rounds",
    "RoundsOf",
    "SPARTADiLoCoStrategy",
    "SPARTAStrategy",
    "ScheduledSelector",
    "Selector",
    "Server",
    "ServerCommunicator",
    "ServerMean",
    "ServerOptimizer",
    "ShuffledSequentialSelector",
    "SimpleReduceStrategy",
    "Sparse",
    "SparseCommunicator",
    "SparseLoCoStrategy",
    "Strategy",
    "StreamingCommunicator",
    "StreamingDiLoCoStrategy",
    "StrongestCosines",
    "SyncWeight",
    "TopKSparseCommunicator",
    "When",
    "all_gather",
    "all_reduce",
    "broadcast",
    "compressed",
    "delayed",
    "every",
]
