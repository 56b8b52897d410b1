"""The record of a run's settings: the same for the same script, wherever it is; something else for others."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from vecgym.runs.checkpoint import settings_of


class Callable:
    def __init__(self, power: float) -> None:
        self.power = power

    def __call__(self, step: int) -> float:
        return self.power**step

    def other(self, step: int) -> float:
        return self.power * step


def scaled(step: int, by: float = 1.0) -> float:
    return by * step


LARGE = torch.arange(5000.0)
OTHER = LARGE.index_fill(0, torch.tensor([2500]), 0.0)  # which prints as LARGE does


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (LARGE, OTHER),
        (LARGE.numpy(), OTHER.numpy()),
        (LARGE, LARGE.double()),
        (LARGE.bfloat16(), OTHER.bfloat16()),
        (functools.partial(scaled, by=1.0), functools.partial(scaled, by=2.0)),
        (functools.partial(scaled, 1), functools.partial(Callable(1.0), 1)),
        (Callable(0.5), Callable(0.6)),
        (Callable(0.5).other, Callable(0.6).other),
        (Callable(0.5).other, Callable(0.5).__call__),
        (Callable, scaled),
        ({"a", "b"}, {"a", "c"}),
        ({1: [2]}, {1: (2,)}),
        (1, 1.0),
        (True, 1),
        (list(range(100)), [*range(99), 100]),
        ("a" * 300, "a" * 299 + "b"),
        (torch.float32, torch.float64),
        (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
        (torch.sin, torch.cos),
        (max, min),
        (nn.Linear, nn.Conv1d),
        (nn.Sequential(nn.Dropout(0.1)), nn.Sequential(nn.Dropout(0.2))),
    ],
)  # fmt: skip
def test_what_differs_is_seen(one: Any, other: Any) -> None:
    found = [repr(settings_of(x, "x")) for x in (one, one, other)]  # True equals 1
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("make", "use"),
    [
        (lambda: random.Random(3), lambda x: x.random()),
        (lambda: np.random.default_rng(3), lambda x: x.random()),
        (lambda: torch.Generator().manual_seed(3), lambda x: torch.rand(1, generator=x)),
        (lambda: Path("/a/data.txt"), lambda x: None),
        (lambda: {"b": 1, "a": {2, 3}}, lambda x: None),
        (object, lambda x: None),
    ],
)
def test_what_changes_by_use_or_place_does_not_matter(make: Any, use: Any) -> None:
    x = make()
    before = settings_of(x, "x")
    use(x)
    assert settings_of(x, "x") == before == settings_of(make(), "x")
    assert settings_of(Path("/a/data.txt"), "x") == settings_of(Path("/b/data.txt"), "x")


def test_circles_and_what_is_deep_end() -> None:
    holder: list[Any] = [1]
    holder.append(holder)
    assert settings_of(holder, "x") == {"x": "list of 2", "x[0]": 1, "x[1]": "see above"}
    deep: list[Any] = []
    for _ in range(1000):
        deep = [deep]
    assert len(settings_of(deep, "x")) < 30
    node = Callable(0.5)
    node.power = node  # type: ignore[assignment]
    assert settings_of(node, "x")["x.power"] == "see above"
