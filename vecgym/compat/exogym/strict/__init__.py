"""EXO Gym's own runs, re-enacted to the last step in one process: its arithmetic, moments, batches and quirks."""

from vecgym.compat.exogym.strict.behaviour import AsExoGym, ignored
from vecgym.compat.exogym.strict.training import StrictRun, TrainConfig, TrainNode, run

__all__ = ["AsExoGym", "StrictRun", "TrainConfig", "TrainNode", "ignored", "run"]
