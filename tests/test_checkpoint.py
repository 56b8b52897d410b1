"""A run that was saved goes on as if it had never stopped, from whatever is whole of what was saved."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.fitting import dataset, fit, same_run
from tests.helpers import assert_same_bits
from tests.models import make_model
from tests.test_properties import NAMES, STEPS, make
from vecgym import Trainer
from vecgym.checkpoint import checkpoints_in

K = 4
TIMES = ("seconds", "steps_per_s")


def train(folder: Path | None = None, model: str = "MLP", strategy: Any = "diloco", **settings: Any) -> Trainer:
    """A run of STEPS steps, of a strategy of the table of properties; with a folder, saved after each of them."""
    if folder is not None:
        settings = {"save_dir": folder, "checkpoint_interval": 1, "keep_checkpoints": 99, **settings}
    chosen = make(strategy) if isinstance(strategy, str) else strategy
    given: dict[str, Any] = {"num_nodes": K, "max_steps": STEPS, "val_interval": 2, **settings}
    return fit(model, chosen, val=dataset(model, 6, seed=1), **given)[0]


def at(folder: Path, step: int) -> Path:
    return folder / f"step-{step:09d}.pt"


def timeless(trainer: Trainer) -> list[dict[str, Any]]:
    """The rows of the history, without what a clock says; arrays as lists."""
    rows = [{name: row[name] for name in sorted(row) if name not in TIMES} for row in trainer.history]
    return [{name: x.tolist() if isinstance(x, np.ndarray) else x for name, x in row.items()} for row in rows]


def assert_same(resumed: Trainer, whole: Trainer) -> None:
    """State, nodes, history and ledger, to the last bit."""
    assert resumed.state is not None
    assert whole.state is not None
    assert resumed.state.step == whole.state.step
    assert_same_bits(resumed.state, whole.state)
    assert same_run(resumed, whole)
    assert repr(timeless(resumed)) == repr(timeless(whole))  # as text, nan equals nan
    assert list(resumed.ledger) == list(whole.ledger)
    assert resumed.ledger.total_bytes == whole.ledger.total_bytes


# ------------------------------------------------------------------------------- resumed equals uninterrupted


@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_goes_on_as_if_it_had_never_stopped(name: str, tmp_path: Path) -> None:
    """From before and after an exchange (every 3 steps), in the middle of a queue of 2 steps, with saved runs unharmed."""
    train(tmp_path, strategy=name)
    whole = train(strategy=name)
    for step in (2, 4):
        assert_same(train(strategy=name, resume=at(tmp_path, step)), whole)
