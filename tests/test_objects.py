"""The state of an object, saved and restored; what functions hold; the global generators, lent and put back."""

from __future__ import annotations

import collections
import contextlib
import random
from typing import Any

import numpy as np
import pytest
import torch

from vecgym.core import rng
from vecgym.core.objects import closed_over, defaults, globals_read, reachable, restore, state_of

GLOBAL = torch.tensor(2.0)


class Holder:
    def __init__(self) -> None:
        self.made: Any = None


@pytest.mark.parametrize(
    "made",
    [
        [1, [2]],
        (1, (2,)),
        collections.deque([1, 2]),
        {1, 2},
        frozenset({1, 2}),
        {"a": [1, {"b": None}]},
        np.arange(3),
        np.float32(0.5),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_was_made_while_an_object_worked_is_made_again(made: Any) -> None:
    one, two = Holder(), Holder()
    one.made = made
    restore(two, state_of(one, {}), {})
    assert type(two.made) is type(made)
    assert repr(two.made) == repr(made)
    assert two.made is not made or isinstance(made, tuple)


def test_what_two_places_shared_they_share_again() -> None:
    one, two = Holder(), Holder()
    shared = [torch.ones(2)]
    shared.append(shared)  # type: ignore[arg-type]
    one.made = {"a": shared, "b": shared}
    restore(two, state_of(one, {}), {})
    assert two.made["a"] is two.made["b"] is two.made["a"][1] is not shared


def test_what_a_function_holds() -> None:
    closed, unused = torch.tensor(1.0), torch.tensor(3.0)

    def function(x: float, scale: Any = unused) -> Any:
        return [closed * GLOBAL * y for y in [x]]

    f: Any = function
    assert closed_over(f)["closed"] is closed
    assert defaults(f) == {"scale": unused}
    assert globals_read(f)["GLOBAL"] is GLOBAL
    tensors = {id(x) for x in reachable(f) if isinstance(x, torch.Tensor)}
    assert tensors == {id(closed), id(unused), id(GLOBAL)}


def drawn() -> tuple[float, float, float]:
    return float(torch.rand(1)), float(np.random.rand()), random.random()  # noqa: NPY002


@pytest.mark.parametrize("seed", [None, 3])
def test_a_block_with_random_states_of_its_own(seed: int | None) -> None:
    with rng.private(0):
        before = rng.GlobalStates.now()
        first = drawn()
        before.restore()
        inside = []
        with contextlib.suppress(KeyError), rng.private(seed):
            inside.append(drawn())
            raise KeyError  # however the block ends
        assert (inside == [first]) == (seed is None)
        assert drawn() == first
