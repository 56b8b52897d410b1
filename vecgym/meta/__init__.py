"""Schedules that are learned over many runs: `learn`, of numbers `Curve` and `Exchanges`.

See `vecgym.guide.meta`.
"""

from vecgym.meta.curves import Curve, Exchanges
from vecgym.meta.learning import Learned, learn
from vecgym.meta.rivals import Gain, Report

__all__ = ["Curve", "Exchanges", "Gain", "Learned", "Report", "learn"]
