"""Schedules of exchanges: rounds that follow the learning rate, and windows at the end of a run."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import Run, assert_same_bits, run, stacked
from tests.models import make_batches, make_model
from tests.reference.qsr import qsr
from vecgym import dry_run
from vecgym.optim import Optimizer, OptimSpec
from vecgym.simulation import RunFacts
from vecgym.strategy import (
    QSR,
    AllReduceStrategy,
    DiLoCoStrategy,
    Exchange,
    FedAvgStrategy,
    LateWindow,
    Mean,
    Rounds,
    RoundsOf,
    Strategy,
    When,
    every,
)

K, STEPS = 3, 12


def due(when: When, steps: int) -> list[int]:
    return [step for step in range(steps) if when.due(step)]


def due_of(strategy: Strategy, steps: int) -> list[int]:
    (mark,) = strategy.marks(RunFacts(num_nodes=2, num_steps=steps))
    assert isinstance(mark.when, When)
    return due(mark.when, steps)


def after(strategy: Strategy, **settings: Any) -> Run:
    batches = stacked(make_batches("MLP", STEPS, K, 3, dtype=torch.float64))
    return run(make_model("MLP", dtype=torch.float64), strategy, batches, **settings)


# -------------------------------------------------------------------------------------------- rounds of the rate


@pytest.mark.parametrize("case", range(40))
def test_the_rounds_are_those_of_the_program(case: int) -> None:
    rng = random.Random(case)
    T, warmup, peak = rng.choice([37, 200, 1000]), rng.choice([0, 0, 5, 60]), rng.choice([0.008, 0.3])
    low = rng.choice([1e-6, 1e-2, 0.1]) * peak

    def cosine(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        return low + 0.5 * (peak - low) * (1 + math.cos(math.pi * (step - warmup) / max(1, T - warmup)))

    def falling(step: int) -> float:
        return peak * 0.1 ** (step // (T // 3))

    lr = rng.choice([cosine, falling])
    settings: dict[str, Any] = {
        "alpha": rng.choice([0.0, 0.0175, 0.4, 2.2 * peak]), "H": rng.choice([1, 2, 4, 50]), "warmup_steps": warmup,
        "power": rng.choice([1, 2, 2, 2, 3]),
    }  # fmt: skip
    expected = qsr(lr, T, **settings)
    of_numbers: Any = [lr(step) for step in range(T)]
    for given in (lr, of_numbers, torch.tensor(of_numbers, dtype=torch.float64, requires_grad=True)):
        when = QSR(lr=given, max_steps=T, **settings)
        if expected:  # else it warns
            when.check(T)
        assert due(when, T) == expected
        assert [when.count(t) for t in range(T)] == [sum(d < t for d in expected) for t in range(T)]
    if settings["alpha"] == 0:
        assert expected == due(Rounds(settings["H"]), T)
    elif warmup + settings["H"] < T:
        assert expected[-1] == T - 1 or expected[-1] < warmup + settings["H"]


def test_it_follows_the_strategys_own_schedule() -> None:
    """The same object in two strategies is two schedules; a round of a warm-up from 0 has H steps."""
    when = QSR(0.2, 2, max_steps=40)
    for lr, warmup in ((0.1, 0), (0.05, 0), (0.1, 6)):
        strategy = DiLoCoStrategy("sgd", H=when, lr=lr, warmup_steps=warmup, cosine_anneal=True)
        inner = Optimizer(OptimSpec("sgd", lr=lr), warmup_steps=warmup, cosine_anneal=True)
        assert due_of(strategy, 40) == qsr(lambda t: inner.lr(t, 40), 40, alpha=0.2, H=2, warmup_steps=warmup)  # noqa: B023
    assert when.lr is None
    with pytest.raises(ValueError, match="has no learning rate: give it to a strategy's exchange, or give lr"):
        when.due(3)


def test_in_units_it_follows_the_rate_of_their_first_step() -> None:
    strategy = Strategy("sgd", [every(5, Exchange(Mean(), QSR(0.2, max_steps=20)))], lr=0.2, lr_scheduler="cosine")
    inner = Optimizer(OptimSpec("sgd", lr=0.2), lr_scheduler="cosine")
    units = qsr(lambda unit: inner.lr(5 * unit, 100), 20, alpha=0.2, H=1)
    assert due_of(strategy, 100) == [5 * unit + 4 for unit in units]
    assert 3 < len(units) < 20


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1, dtype=torch.float64, requires_grad=True)])
def test_a_run_is_that_with_its_steps_written_out(lr: Any) -> None:
    """Derivatives pass by the choice of the steps."""
    strategy = DiLoCoStrategy("sgd", H=QSR(0.17, 2, max_steps=STEPS), lr=lr, lr_scheduler="cosine")
    steps = due_of(strategy, STEPS)
    assert [b - a for a, b in zip([-1, *steps], steps)] == [2, 3, 6, 1]
    weights = [float(step in steps) for step in range(STEPS)]
    written = DiLoCoStrategy("sgd", sync_weight=weights, lr=0.1, lr_scheduler="cosine")
    differentiable = isinstance(lr, Tensor)
    found = after(strategy, differentiable=differentiable).params
    assert_same_bits(found, after(written, differentiable=differentiable).params)


def test_fragments_have_their_turns() -> None:
    exchange = Exchange(Mean(), QSR(0.2, 4, lambda t: 0.1 if t < 4 else 0.05, max_steps=20), fragments=2)
    assert [due(when, 20) for when in exchange.times(["h.0.w", "h.1.w"])] == [[1, 11], [3, 19]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: QSR(-1.0, max_steps=3), "alpha=-1.0 must be a number"),
        (lambda: QSR(1.0, 0, max_steps=3), "H=0 must be an integer >= 1"),
        (lambda: QSR(1.0, max_steps=0), "max_steps=0"),
        (lambda: QSR(1.0, max_steps=3, warmup_steps=-1), "warmup_steps=-1"),
        (lambda: QSR(1.0, max_steps=3, power=0), "power=0"),
        (lambda: QSR(1.0, lr=[0.1] * 3, max_steps=4), r"lr has shape \[3\], and max_steps=4: give a function"),
        (lambda: QSR(1.0, lr=torch.ones(3, 2), max_steps=3), r"lr has shape \[3, 2\]"),
        (lambda: QSR(1.0, lr=lambda t: 0.1, max_steps=4).check(5), "rounds of 4 steps, and the run has 5: give max_st"),
        (lambda: QSR(1.0, lr=lambda t: 0.0, max_steps=4).check(4), r"lr\(0\)=0.0 must be .* or give warmup_steps"),
        (
            lambda: DiLoCoStrategy("sgd", H=QSR(1.0, max_steps=4), lr=torch.tensor([0.1, 0.2])).check(2, 4),
            "one learning rate for all nodes",
        ),
        (lambda: DiLoCoStrategy("sgd", H=QSR(1.0, max_steps=4), lr=0.1).check(2, 5), "the run has 5"),
    ],
)
def test_mistakes_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_rate_that_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match=r"lr.*a function of the step, \[T\] numbers"):
        QSR(1.0, lr="cosine", max_steps=3)  # type: ignore[arg-type]


def test_a_tiny_rate_is_a_round_to_the_end() -> None:
    """Its power is no number."""
    assert due(QSR(1.0, lr=lambda t: 1e-300, max_steps=9), 9) == [8]


# ------------------------------------------------------------------------------------------------- late windows


@pytest.mark.parametrize(("H", "start"), [(1, 0), (4, 0), (1, 5), (3, 5), (4, 9)])
def test_a_late_window_is_rounds_after_its_start(H: int, start: int) -> None:
    window = LateWindow(H, start)
    assert due(window, 20) == [start + step for step in due(Rounds(H), 20 - start)]
    assert [window.count(t) for t in range(20)] == [sum(d < t for d in due(window, 20)) for t in range(20)]
    shifted = RoundsOf(lambda step: start + H if step == 0 else H)
    assert due(window, 20) == due(shifted, 20)


@pytest.mark.parametrize("make", [DiLoCoStrategy, FedAvgStrategy])
def test_before_the_window_nodes_are_alone(make: Any) -> None:
    weights = [0.0] * 6 + [0, 1, 0, 1, 0, 1]
    late = after(make("adamw", H=LateWindow(2, start=6), lr=0.01))
    assert_same_bits(late.params, after(make("adamw", sync_weight=weights, lr=0.01)).params)
    once = after(make("adamw", H=LateWindow(2, start=STEPS - 2), lr=0.01))
    assert [entry.step for entry in once.comm.ledger] == [STEPS - 1]


def test_fragments_take_turns_within_the_window() -> None:
    exchange = Exchange(Mean(), LateWindow(4, start=10), fragments=2)
    assert [due(when, 20) for when in exchange.times(["h.0.w", "h.1.w"])] == [[11, 15, 19], [13, 17]]


@pytest.mark.parametrize("when", [LateWindow(1, start=4), Rounds(1, offset=5)])
def test_gradients_are_each_nodes_own_before_the_window(when: When) -> None:
    """Every step of it is not every step of the run."""
    late = Strategy("sgd", [Exchange(Mean(), when, of="gradients")], lr=0.1)
    assert not late.exchanges[0].always
    assert not late.mean_gradient
    assert AllReduceStrategy("sgd", lr=0.1).mean_gradient
    found, alone, together = (
        after(x).params["first.weight"] for x in (late, Strategy("sgd", lr=0.1), AllReduceStrategy("sgd", lr=0.1))
    )
    assert 1e-6 < spread_of(found) < spread_of(alone)
    assert not torch.equal(found.mean(0), together.mean(0))


def spread_of(x: Tensor) -> float:
    return float((x - x.mean(0)).norm())


@pytest.mark.parametrize(
    "H", [LateWindow(2, start=5), QSR(0.17, 2, max_steps=STEPS), Rounds(3, offset=8)], ids=["late", "rate", "offset"]
)
def test_a_dry_run_sends_what_the_run_sends(H: When) -> None:
    strategy = DiLoCoStrategy("sgd", H=H, lr=0.1, lr_scheduler="cosine")
    dry, real = dry_run(make_model("MLP", dtype=torch.float64), strategy, K, STEPS), after(strategy).comm.ledger
    assert list(dry) == list(real)
    assert [entry.step for entry in dry] == due_of(strategy, STEPS)


@pytest.mark.parametrize(("H", "start", "message"), [(0, 3, "H=0"), (3, -1, "start=-1"), (2.5, 0, "H=2.5")])
def test_windows_that_are_none(H: Any, start: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LateWindow(H, start)


def test_how_they_are_shown() -> None:
    assert repr(Exchange(Mean(), LateWindow(2, start=6))) == "Exchange(Mean(), every=LateWindow(2, start=6))"
    strategy = DiLoCoStrategy("sgd", H=QSR(0.2, 2, max_steps=9), lr=0.1)
    assert "every=QSR(0.2, H=2, max_steps=9)" in repr(strategy)
    assert strategy.exchanges[0] == DiLoCoStrategy("sgd", H=QSR(0.2, 2, max_steps=9), lr=0.1).exchanges[0]
    assert strategy.exchanges[0] != DiLoCoStrategy("sgd", H=QSR(0.2, 2, max_steps=9), lr=0.2).exchanges[0]
