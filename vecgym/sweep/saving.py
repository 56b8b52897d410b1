"""The file that a sweep keeps its results in."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vecgym.sweep.runner import Runner


def _fingerprint(runner: Runner) -> str:
    """What must be the same for a file of results to be this sweep's."""
    parts: list[Any] = [list(runner.axes), runner.val_size, runner.val_interval]
    for config in runner.configs:
        shapes = [(name, tuple(p.shape)) for name, p in config.model.named_parameters()]
        parts.append([config.point, config.settings, config.num_steps, config.strategy, shapes])
    return hashlib.sha256(re.sub(r" at 0x[0-9a-f]+", "", repr(parts)).encode()).hexdigest()


def saver(runner: Runner, path: Path) -> Callable[[], None]:
    fingerprint = _fingerprint(runner)

    def save() -> None:
        with appearing(path, "wb") as file:
            torch.save(runner.state(fingerprint), file)

    return save


def load_results(runner: Runner, path: Path) -> None:
    held = torch.load(path, map_location=runner.device, weights_only=True)
    if held.get("format") != 2 or held.get("fingerprint") != _fingerprint(runner):
        raise ValueError(
            f"{path} holds another sweep: its grid, strategies, settings or model differ from those given. Give "
            "resume another path, or remove the file to start anew."
        )
    runner.load(held)


@contextmanager
def appearing(path: Path, mode: str) -> Iterator[Any]:
    """A file that appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    newline = "" if "b" not in mode else None
    with tempfile.NamedTemporaryFile(mode, dir=path.parent, newline=newline, delete=False) as file:
        try:
            yield file
        except BaseException:
            os.unlink(file.name)
            raise
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
