"""Decentralised algorithms: each node exchanges with its neighbours in a graph, on `vecgym.strategy.Mix`."""

from vecgym.strategy.decentralised.choco import CHOCOStrategy
from vecgym.strategy.decentralised.matcha import MATCHAStrategy
from vecgym.strategy.decentralised.push_sum import SGPStrategy
from vecgym.strategy.decentralised.quasi_global import QGMStrategy
from vecgym.strategy.decentralised.relay import RelaySumStrategy
from vecgym.strategy.decentralised.unbiased import D2Strategy, ExactDiffusionStrategy, GradientTrackingStrategy

__all__ = [
    "CHOCOStrategy", "D2Strategy", "ExactDiffusionStrategy", "GradientTrackingStrategy", "MATCHAStrategy",
    "QGMStrategy", "RelaySumStrategy", "SGPStrategy",
]  # fmt: skip
