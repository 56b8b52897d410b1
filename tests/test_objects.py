"""The state of an object, saved and restored; what functions hold; the global generators, lent and put back."""

from __future__ import annotations

import contextlib
import enum
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from vecgym.core import rng
from vecgym.core.objects import reachable
from vecgym.strategy.per_rank import restore, state_of

GLOBAL = torch.tensor(2.0)


class Holder:
    def __init__(self) -> None:
        self.made: Any = None


@pytest.mark.parametrize(
    "made",
    [
        [1, [2]],
        (1, (2,)),
        {"a": [1, {"b": None}]},
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


def test_state_that_is_keyed_by_parameters() -> None:
    """EXO Gym's selectors of indices have such a state."""
    one, two = (nn.Linear(2, 1) for _ in range(2))
    first, second = Holder(), Holder()
    first.made = {p: (torch.arange(3), i) for i, p in enumerate(one.parameters())}
    restore(second, state_of(first, {id(p): n for n, p in one.named_parameters()}), dict(two.named_parameters()))
    assert [id(p) for p in second.made] == [id(p) for p in two.parameters()]
    assert [turn for _, turn in second.made.values()] == [0, 1]
    assert all(torch.equal(order, torch.arange(3)) for order, _ in second.made.values())


class Phase(enum.Enum):
    WARM = 1


@pytest.mark.parametrize(
    "made",
    [iter([1]), threading.Lock(), Phase.WARM, {torch.ones(1): 3}, 1j, [b"x"], np.arange(3), {1}],
    ids=lambda made: type(made).__name__,
)
def test_what_is_exotic_is_refused_by_its_name(made: Any) -> None:
    one = Holder()
    one.made = [made]
    with pytest.raises(TypeError, match=r"self\.made\[0\].* cannot be saved.*state_dict"):
        state_of(one, {})


def test_what_cannot_be_made_again_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(2))
    for made in (torch.optim.SGD([parameter], lr=0.1), torch.Generator(), max, Holder()):
        one, two = Holder(), Holder()
        one.made = made
        with pytest.raises(ValueError, match=r"self\.made of the saved object was created while it ran"):
            restore(two, state_of(one, {}), {})


class WithOptimizer:
    """A model whose optimizer alone holds its parameter, and keeps state of another dtype."""

    def __init__(self, value: float) -> None:
        self.last: Any = None
        self.optim = torch.optim.Adam([torch.full((2,), value, dtype=torch.bfloat16, requires_grad=True)])

    @property
    def parameter(self) -> Any:
        return self.optim.param_groups[0]["params"][0]


def test_the_parameters_of_an_optimizer_and_the_dtypes_of_its_state() -> None:
    one, two = WithOptimizer(1.0), WithOptimizer(2.0)
    one.parameter.grad = torch.ones_like(one.parameter)
    one.optim.step()
    one.optim.state[one.parameter]["exp_avg"] = torch.full((2,), 1 / 3)
    parameter = two.parameter
    restore(two, state_of(one, {}), {})
    assert two.parameter is parameter
    assert torch.equal(parameter, one.parameter)
    assert torch.equal(parameter.grad, one.parameter.grad)
    for name, x in one.optim.state[one.parameter].items():
        assert torch.equal(two.optim.state[parameter][name], x)
        assert two.optim.state[parameter][name].dtype == x.dtype


def test_a_tensor_that_two_places_came_to_share_is_not_torn_apart() -> None:
    one, two = WithOptimizer(1.0), WithOptimizer(2.0)
    one.last = one.parameter  # met before the optimizer, in which the new one has another tensor
    one.parameter.grad = torch.ones_like(one.parameter)
    one.optim.step()
    restore(two, state_of(one, {}), {})
    assert two.last is two.parameter is not one.parameter
    assert torch.equal(two.parameter, one.parameter)
    assert [*two.optim.state] == [two.parameter]
    module, other = Holder(), Holder()
    module.last, module.made = None, torch.nn.Linear(2, 1)  # type: ignore[attr-defined]
    other.last, other.made = None, torch.nn.Linear(2, 1)  # type: ignore[attr-defined]
    module.last = module.made.weight  # type: ignore[attr-defined]
    vars(module).update(made=vars(module).pop("made"))  # met after it
    with pytest.raises(ValueError, match=r"self\.made\['weight'\] of the saved object was created while it ran"):
        restore(other, state_of(module, {}), {})


def test_the_buffers_of_a_module() -> None:
    one, two = Holder(), Holder()
    one.made, two.made = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    one.made.running_mean.fill_(3.0)
    mean = two.made.running_mean
    restore(two, state_of(one, {}), {})
    assert two.made.running_mean is mean
    assert torch.equal(mean, torch.full((2,), 3.0))


def test_what_two_places_no_longer_share_is_two_tensors() -> None:
    one, two = Holder(), Holder()
    shared = torch.zeros(2)
    one.made, two.made = [torch.ones(2), torch.zeros(2)], [shared, shared]
    restore(two, state_of(one, {}), {})
    assert torch.equal(torch.stack(two.made), torch.stack(one.made))
    assert two.made[0] is shared


def test_what_a_function_holds() -> None:
    closed, unused = torch.tensor(1.0), torch.tensor(3.0)

    def function(x: float, scale: Any = unused) -> Any:
        return [closed * GLOBAL * y for y in [x]] + [unset]

    f: Any = function
    tensors = {id(x) for x in reachable(f) if isinstance(x, torch.Tensor)}
    assert tensors == {id(closed), id(unused), id(GLOBAL)}
    unset = torch.tensor(4.0)
    assert id(unset) in {id(x) for x in reachable(f)}


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


seen = torch.tensor(0.0)
weight = torch.tensor(1.0)
rate = torch.tensor(0.5)


def counts(module: Any) -> Any:
    """Sets a global, and has an attribute by the name of another."""
    global seen
    seen = seen + module.weight
    return [rate * n for n in range(2)]


def test_globals_that_a_function_reads() -> None:
    """Not those that it sets, nor attributes of the same name."""
    assert [x for x in reachable(counts) if isinstance(x, torch.Tensor)] == [rate]
