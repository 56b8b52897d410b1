"""The file that a sweep keeps its results in."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vecgym import saved
from vecgym.errors import warn
from vecgym.sweep.runner import Runner


def _fingerprint(runner: Runner) -> str:
    """What must be the same for a file of results to be this sweep's."""
    parts: list[Any] = [list(runner.axes), runner.val_size, runner.val_interval]
    for config in runner.configs:
        shapes = [(name, tuple(p.shape)) for name, p in config.model.named_parameters()]
        parts.append([config.point, config.settings, config.num_steps, config.strategy, shapes])
    return hashlib.sha256(re.sub(r" at 0x[0-9a-f]+", "", repr(parts)).encode()).hexdigest()


def saver(runner: Runner, path: Path) -> Callable[[], None]:
    """A function that writes what there is; a full disk warns, and what was written before stays."""
    fingerprint = _fingerprint(runner)

    def save() -> None:
        try:
            saved.write(path, {"fingerprint": fingerprint, "sweep": runner.state()})
        except OSError as error:
            warn(f"{path} could not be written: {error}. The sweep goes on; what is in the file stays.")

    return save


def load_results(runner: Runner, path: Path) -> None:
    """Go on from what is in the file; a ValueError if that is another sweep's, or damaged."""
    held = saved.read(path)
    if held.get("fingerprint") != _fingerprint(runner):
        raise ValueError(
            f"{path} holds another sweep: its grid, strategies, settings or model differ from those given. Give "
            "resume another path, or remove the file to start anew."
        )
    runner.load(held["sweep"])
