"""Sweeps: many configurations of one training, as few stacked programs; see `sweep`."""

from vecgym.sweeps.options import LogUniform, Uniform
from vecgym.sweeps.result import SweepResult
from vecgym.sweeps.run import sweep

__all__ = ["LogUniform", "SweepResult", "Uniform", "sweep"]
