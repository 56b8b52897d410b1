"""EXO Gym's own runs, re-enacted in one process to the last step: its arithmetic, moments, batches and quirks."""

from vecgym.compat.exogym.strict.behaviour import AsExoGym, ignored
from vecgym.compat.exogym.strict.training import StrictRun, TrainNode

__all__ = ["AsExoGym", "StrictRun", "TrainNode", "ignored"]
