"""Training algorithms, and the parts they are made of.

- Algorithms: AllReduceStrategy (SimpleReduceStrategy), FedAvgStrategy, DiLoCoStrategy, StreamingDiLoCoStrategy,
  EagerDiLoCoStrategy, SPARTAStrategy, SPARTADiLoCoStrategy, GossipStrategy, DeMoStrategy, NoLoCoStrategy,
  LocalAdamStrategy, DESLOCStrategy, MuLoCoStrategy, GPAStrategy, PALSGDStrategy, SparseLoCoStrategy, DSMStrategy,
  EDiTStrategy
- Decentralised, besides GossipStrategy: GradientTrackingStrategy, D2Strategy, ExactDiffusionStrategy, and in trees
  RelaySumStrategy, which reach the optimum of non-IID data; QGMStrategy, with a momentum; SGPStrategy, in directed
  graphs; CHOCOStrategy, with codes; MATCHAStrategy, along random matchings
- Federated, besides FedAvgStrategy: SCAFFOLDStrategy, MimeStrategy, FedDynStrategy and ScaffnewStrategy, whose clients
  with non-IID data reach the optimum; FedNovaStrategy, for unequally many local steps
- Asynchronous: AsyncStrategy, with a Server, the base: OuterOptimizer, DelayedNesterov, FedBuff, HeLoCo, MLA;
  HALoSStrategy, a server in each region and a global one; ADPSGDStrategy, averages in pairs;
  DecoupledDiLoCoStrategy, a server of fragments that merges those of a quorum
- Your own: Strategy(inner_optim, [Exchange(...), ...]), the base of all, whose methods handle the events of a run;
  CommunicateOptimizeStrategy, the same under EXO Gym's name; RankStrategy, whose `step` runs on one rank and
  calls all_reduce, broadcast, all_gather
- Exchanges: Exchange(how, every, of, delay, ...): how, when (Rounds, RoundsOf, LateWindow, QSR, SyncWeight; When, the
  base) and on which values the nodes agree; every(n, exchange): in units of n steps; AveragingCommunicator and
  SparseCommunicator make one
- Averages: Average, the base, with a Memory: Mean, ServerMean, Mix, Robust, MostMoved, NoLoCo, StrongestCosines;
  Compressed and EF21, of codes; Ring, QuantisedRing and AllToAll, which encode sums, too. Stages around an average:
  Stage, the base; Outer, Eager, Sparse, Corrupted, Private, MovementPenalty. ServerOptimizer: the optimizers of
  federated servers
- Coordinates: Selector, the base; RandomSelector, ScheduledSelector, ShuffledSequentialSelector, PartitionedSelector
- Optimizers: OptimSpec

>>> DiLoCoStrategy("adamw", H=100, lr=1e-3, compression="int8").exchanges[0]
Exchange(Outer(Compressed(Mean(), Quantise(bits=8, stochastic=False), purpose='compress parameters')), every=100)
>>> Strategy("adamw", [Exchange(Outer(Compressed(Mean(island_size=4), "topk")), every=50, participation=0.5)])
Strategy(OptimSpec(AdamW), Exchange(Outer(Compressed(Mean(island_size=4), TopK(fraction=0.01, k=None))), every=50, \
participation=0.5))
"""

from vecgym.optim import OptimSpec
from vecgym.simulation.when import QSR, LateWindow, Rounds, RoundsOf, SyncWeight, When
from vecgym.strategy.allreduce import AllReduceStrategy, GPAStrategy, SimpleReduceStrategy
from vecgym.strategy.asynchronous import AsyncStrategy
from vecgym.strategy.averages import (
    Eager,
    Mean,
    NoLoCo,
    Outer,
    Private,
    ServerMean,
)
from vecgym.strategy.base import CommunicateOptimizeStrategy, Strategy, every
from vecgym.strategy.coded import EF21, AllToAll, Compressed, QuantisedRing, Ring
from vecgym.strategy.decentralised import (
    ADPSGDStrategy,
    CHOCOStrategy,
    D2Strategy,
    ExactDiffusionStrategy,
    GossipStrategy,
    GradientTrackingStrategy,
    MATCHAStrategy,
    Mix,
    QGMStrategy,
    RelaySumStrategy,
    SGPStrategy,
)
from vecgym.strategy.decoupled import DecoupledDiLoCoStrategy
from vecgym.strategy.demo import DeMoStrategy, StrongestCosines
from vecgym.strategy.diloco import DiLoCoStrategy, EagerDiLoCoStrategy, StreamingDiLoCoStrategy
from vecgym.strategy.exchange import Exchange
from vecgym.strategy.federated import FedDynStrategy, FedNovaStrategy, MimeStrategy, ScaffnewStrategy, SCAFFOLDStrategy
from vecgym.strategy.federated_averaging import AveragingCommunicator, FedAvgStrategy, ServerOptimizer
from vecgym.strategy.halos import HALoSStrategy
from vecgym.strategy.local_steps import (
    DESLOCStrategy,
    LocalAdamStrategy,
    MuLoCoStrategy,
    NoLoCoStrategy,
    PALSGDStrategy,
    SparseLoCoStrategy,
)
from vecgym.strategy.penalty import EDiTStrategy, MovementPenalty
from vecgym.strategy.per_rank import RankStrategy, all_gather, all_reduce, broadcast
from vecgym.strategy.robust import Corrupted, Robust
from vecgym.strategy.servers import MLA, DelayedNesterov, FedBuff, HeLoCo, OuterOptimizer, Server
from vecgym.strategy.sign_momentum import DSMStrategy
from vecgym.strategy.sparta import (
    MostMoved,
    PartitionedSelector,
    RandomSelector,
    ScheduledSelector,
    Selector,
    ShuffledSequentialSelector,
    Sparse,
    SparseCommunicator,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
)
from vecgym.strategy.stages import Average, Memory, Stage

__all__ = [
    "EF21", "MLA", "QSR", "ADPSGDStrategy", "AllReduceStrategy", "AllToAll", "AsyncStrategy", "Average",
    "AveragingCommunicator", "CHOCOStrategy", "CommunicateOptimizeStrategy", "Compressed", "Corrupted", "D2Strategy",
    "DESLOCStrategy", "DSMStrategy", "DeMoStrategy", "DecoupledDiLoCoStrategy", "DelayedNesterov", "DiLoCoStrategy",
    "EDiTStrategy", "Eager", "EagerDiLoCoStrategy", "ExactDiffusionStrategy", "Exchange", "FedAvgStrategy", "FedBuff",
    "FedDynStrategy", "FedNovaStrategy", "GPAStrategy", "GossipStrategy", "GradientTrackingStrategy", "HALoSStrategy",
    "HeLoCo", "LateWindow", "LocalAdamStrategy", "MATCHAStrategy", "Mean", "Memory", "MimeStrategy", "Mix", "MostMoved",
    "MovementPenalty", "MuLoCoStrategy", "NoLoCo", "NoLoCoStrategy", "OptimSpec", "Outer", "OuterOptimizer",
    "PALSGDStrategy", "PartitionedSelector", "Private", "QGMStrategy", "QuantisedRing", "RandomSelector",
    "RankStrategy", "RelaySumStrategy", "Ring", "Robust", "Rounds", "RoundsOf", "SCAFFOLDStrategy", "SGPStrategy",
    "SPARTADiLoCoStrategy", "SPARTAStrategy", "ScaffnewStrategy", "ScheduledSelector", "Selector", "Server",
    "ServerMean", "ServerOptimizer", "ShuffledSequentialSelector", "SimpleReduceStrategy", "Sparse",
    "SparseCommunicator", "SparseLoCoStrategy", "Stage", "Strategy", "StreamingDiLoCoStrategy", "StrongestCosines",
    "SyncWeight", "When", "all_gather", "all_reduce", "broadcast", "every",
]  # fmt: skip
