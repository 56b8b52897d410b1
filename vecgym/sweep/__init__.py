"""Sweeps: many configurations of one training, as few stacked programs; see `sweep`."""

from vecgym.sweep.axes import LogUniform, Uniform
from vecgym.sweep.result import SweepResult
from vecgym.sweep.run import sweep

__all__ = ["LogUniform", "SweepResult", "Uniform", "sweep"]
