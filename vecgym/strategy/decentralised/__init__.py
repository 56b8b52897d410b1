"""Decentralised algorithms: each node exchanges with its neighbours in a graph, on `vecgym.strategy.Mix`."""

from vecgym.strategy.decentralised.unbiased import D2Strategy, ExactDiffusionStrategy, GradientTrackingStrategy

__all__ = ["D2Strategy", "ExactDiffusionStrategy", "GradientTrackingStrategy"]
