"""Restarts of an outer momentum, and the outer step of sign momentum; `test_twins` has their plain loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD

from tests.helpers import Run, assert_close, assert_same_bits, run, stacked
from tests.models import make_batches, make_model
from vecgym.strategy import (
    Compressed,
    DiLoCoStrategy,
    DSMStrategy,
    Exchange,
    Mean,
    OptimSpec,
    Outer,
    Strategy,
    SyncWeight,
)
from vecgym.strategy.sign_momentum import InInnerSteps

K, STEPS = 4, 12
ADAMW = OptimSpec("adamw", lr=0.02)


def after(strategy: Strategy, steps: int = STEPS, **settings: Any) -> Run:
    batches = stacked(make_batches("MLP", STEPS, K, 3, dtype=torch.float64))
    return run(make_model("MLP", dtype=torch.float64), strategy, batches[:steps], **settings)


def outer(**hyper: Any) -> OptimSpec:
    return OptimSpec(SGD, **hyper)


# --------------------------------------------------------------------------------------------------------- restarts


@pytest.mark.parametrize(("nesterov", "factor"), [(True, 1.6), (False, 1.0)])
def test_a_restart_in_every_round_is_the_first_step_of_the_momentum(nesterov: bool, factor: float) -> None:
    mine = DiLoCoStrategy(ADAMW, outer(lr=0.5, momentum=0.6, nesterov=nesterov), 2, restart=1)
    assert_close(after(mine).params, after(DiLoCoStrategy(ADAMW, outer(lr=0.5 * factor), 2)).params, 1e-12)


def test_before_the_first_restart_all_bits_are_those_without() -> None:
    last, plain = (after(DiLoCoStrategy(ADAMW, H=1, restart=S), STEPS - 1) for S in (STEPS, None))
    assert_same_bits(last.state, plain.state)


@pytest.mark.parametrize("island_size", [None, 2])
def test_only_the_momentum_is_forgotten(island_size: int | None) -> None:
    """The shared value, or each node's where islands differ."""
    now, plain = (
        after(Strategy(ADAMW, [Exchange(Outer(Mean(island_size), restart=S), every=2)]), 6) for S in (3, None)
    )
    forgotten, held = (state.shared if island_size is None else state.own for state in (now.state, plain.state))
    assert all(m.count_nonzero() == 0 for m in forgotten.pop("0.0/outer")["momentum_buffer"].values())
    assert all(m.count_nonzero() > 0 for m in held.pop("0.0/outer")["momentum_buffer"].values())
    assert_same_bits(now.state, plain.state)


def test_outer_steps_are_counted_and_not_the_steps_of_a_schedule() -> None:
    weights = [0, 1] * 6
    scheduled = after(DiLoCoStrategy(ADAMW, sync_weight=weights, restart=2))
    assert_same_bits(scheduled.params, after(DiLoCoStrategy(ADAMW, H=2, restart=2)).params)
    assert not torch.equal(
        next(iter(scheduled.params.values())), next(iter(after(DiLoCoStrategy(ADAMW, H=2)).params.values()))
    )


def test_each_fragment_counts_its_own() -> None:
    """After five inner steps the first of two has made three outer ones, and the second two."""
    found = after(Strategy(ADAMW, [Exchange(Outer(Mean(), restart=3), every=2, fragments=2)]), 5).state.shared
    zero = [all(m.count_nonzero() == 0 for m in found[f"0.{p}/outer"]["momentum_buffer"].values()) for p in range(2)]
    assert zero == [True, False]


def test_a_late_step_restarts_when_it_is_made() -> None:
    late = Strategy(ADAMW, [Exchange(Outer(Mean(), restart=1), every=3, delay=2)])
    plain = Strategy(ADAMW, [Exchange(Outer(Mean(), outer(lr=0.7 * 1.9)), every=3, delay=2)])
    assert_close(after(late).params, after(plain).params, 1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DiLoCoStrategy(restart=0), "restart=0 must be an integer >= 1, or None"),
        (lambda: DiLoCoStrategy(outer_optim="adam", restart=2), "restart=2 needs the outer momentum.*give SGD"),
        (lambda: DiLoCoStrategy(outer_optim=outer(lr=0.7), restart=2), "restart=2 needs the outer momentum"),
        (
            lambda: DiLoCoStrategy(outer_optim=outer(lr=1.0, momentum=0.9, dampening=0.1), restart=2),
            "has none, or dampens it",
        ),
        (lambda: DiLoCoStrategy(sync_weight=[0.5, 1.0], restart=2), "is applied in part, and a restart"),
        (
            lambda: DiLoCoStrategy(sync_weight=SyncWeight(torch.ones(2, requires_grad=True)), restart=2),
            "does not require grad",
        ),
    ],
)
def test_restarts_that_have_no_meaning_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# --------------------------------------------------------------------------------------------------- sign momentum


@pytest.mark.parametrize("H", [1, 3])
def test_sign_momentum_at_a_constant_rate_is_lion_outside(H: int) -> None:
    """The sign does not see the unit of the movement; the step and the decay are in units of the rate."""
    lion = OptimSpec("lion", lr=0.5 * 0.02, betas=(0.8, 0.9), weight_decay=0.3)
    mine = after(DSMStrategy(ADAMW, H, outer_lr=0.5, betas=(0.8, 0.9), weight_decay=0.3))
    assert_close(mine.params, after(DiLoCoStrategy(ADAMW, lion, H)).params, 1e-12)


def test_each_coordinate_moves_by_the_rate_of_the_last_step() -> None:
    start = make_model("MLP", dtype=torch.float64)
    rates = [0.01, 0.03, 0.002]
    moved = after(DSMStrategy("sgd", 3, lr=1.0, lr_scheduler=lambda t: rates[t], weight_decay=0.0), 3)
    for name, p in start.named_parameters():
        assert_close((moved.params[name][0] - p.detach()).abs(), torch.full_like(p, 0.002), 1e-12, name)


@pytest.mark.parametrize("differentiable", [False, True])
def test_at_rate_zero_nothing_moves(differentiable: bool) -> None:
    """In the first step of a warm-up, and where a schedule ends at 0 after a movement."""
    start = dict(make_model("MLP", dtype=torch.float64).named_parameters())
    warm = after(DSMStrategy(ADAMW, 1, warmup_steps=4), 1, differentiable=differentiable)
    falling = DSMStrategy("sgd", 2, lr=0.1, lr_scheduler=lambda t: 1.0 - t)
    ended = after(falling, 2, differentiable=differentiable)
    for found in (warm, ended):
        assert_same_bits({n: p[0] for n, p in found.params.items()}, {n: p.detach() for n, p in start.items()})
        assert all(m.count_nonzero() == 0 for m in found.state.shared["0.0/outer"]["exp_avg"].values())


def test_codes_and_islands_fit_inside() -> None:
    lion = OptimSpec("lion", lr=1.0, weight_decay=0.1)
    at_rate = OptimSpec("lion", lr=0.02, weight_decay=0.1)
    for inner in (Mean(2), Compressed(Mean(), "int8")):
        mine = after(Strategy(ADAMW, [Exchange(InInnerSteps(inner, lion), every=3)]))
        assert_close(mine.params, after(Strategy(ADAMW, [Exchange(Outer(inner, at_rate), every=3)])).params, 1e-12)
