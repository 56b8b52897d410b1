"""Schedules that are learned over many runs: `learn`, of numbers `Curve`, `Exchanges` and `Mixing`.

See `vecgym.guide.meta`.
"""

from vecgym.meta.curves import Curve, Exchanges, Mixing
from vecgym.meta.learning import Learned, learn
from vecgym.meta.rivals import Gain, Report

__all__ = ["Curve", "Exchanges", "Gain", "Learned", "Mixing", "Report", "learn"]
