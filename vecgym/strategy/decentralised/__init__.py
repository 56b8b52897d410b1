"""Decentralised algorithms: each node exchanges with its neighbours in a graph.

`base` has the base class, `gossip` the average `Mix` and plain gossip; `ad_psgd` averages in pairs at any time.
"""

from vecgym.strategy.decentralised.ad_psgd import ADPSGDStrategy
from vecgym.strategy.decentralised.choco import CHOCOStrategy
from vecgym.strategy.decentralised.gossip import GossipStrategy, Mix
from vecgym.strategy.decentralised.matcha import MATCHAStrategy
from vecgym.strategy.decentralised.push_sum import SGPStrategy
from vecgym.strategy.decentralised.quasi_global import QGMStrategy
from vecgym.strategy.decentralised.relay import RelaySumStrategy
from vecgym.strategy.decentralised.unbiased import D2Strategy, ExactDiffusionStrategy, GradientTrackingStrategy

__all__ = [
    "ADPSGDStrategy", "CHOCOStrategy", "D2Strategy", "ExactDiffusionStrategy", "GossipStrategy",
    "GradientTrackingStrategy", "MATCHAStrategy", "Mix", "QGMStrategy", "RelaySumStrategy", "SGPStrategy",
]  # fmt: skip
