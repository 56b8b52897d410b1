"""EDiT's penalty: weights by norms, anomalies, the clip; against its twin, DiLoCo, closed forms, and on processes."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam

import vecgym
from tests.helpers import Run, advance, assert_close, assert_same_bits, run, saved, simulation, stacked
from tests.reference import common
from tests.reference.common import Result
from tests.reference.edit import edit
from tests.test_availability import Taken
from tests.test_average import Two
from vecgym.availability import Trace
from vecgym.collectives import StackedCollectives
from vecgym.compress import TopK
from vecgym.core import tree
from vecgym.models import Line
from vecgym.optim import OptimSpec
from vecgym.simulation import Part
from vecgym.strategy import (
    Compressed,
    DiLoCoStrategy,
    EDiTStrategy,
    Exchange,
    Mean,
    MovementPenalty,
    Outer,
    ServerMean,
    Strategy,
    SyncWeight,
)

K, STEPS, H, F64 = 4, 50, 2, torch.float64
ROUND_OF_ONE, ROUND_OF_ALL = 12, 18  # those in which the data of one node, and of all, are wrong
FOUND: dict[str, Any] = {"skip_anomalies": True, "warmup": 6, "threshold": 2.0, "alpha": 0.1}


@functools.cache
def batches() -> list[list[Any]]:
    """Random targets of `Two`, 100 times as far where they are wrong."""
    g = torch.Generator().manual_seed(1)
    made = torch.randn(STEPS, K, 2, 7, generator=g, dtype=F64)
    made[ROUND_OF_ONE * H : (ROUND_OF_ONE + 1) * H, 1] *= 100
    made[ROUND_OF_ALL * H : (ROUND_OF_ALL + 1) * H] *= 100
    return [[(x,) for x in row] for row in made]


CASES: dict[str, dict[str, Any]] = {
    "weights": {"temperature": 0.05},
    "one decides": {"temperature": 1e-4},
    "clip": {"clip": 0.02},
    "anomalies": {**FOUND, "temperature": 0.5},
    "anomalies, clip": {**FOUND, "clip": 0.05},
    # A mean that begins far below the norms: scores fall from large ones, and their deviation is above 1.
    "a slow mean": {**FOUND, "threshold": 1.0, "alpha": 0.02},
}
OUTERS: dict[str, tuple[Any, Any]] = {
    "default": (None, (SGD, {"lr": 0.7, "momentum": 0.8, "nesterov": True})),
    "adam": (OptimSpec(Adam, lr=0.01), (Adam, {"lr": 0.01})),
    "of torch alone": (OptimSpec(torch.optim.Rprop, lr=0.01), (torch.optim.Rprop, {"lr": 0.01})),
}


def check(ours: Run, theirs: Result, outer_state: bool = True) -> None:
    assert_close(ours.losses, theirs.losses, 1e-10, "losses")
    params = [common.parameters(model) for model in theirs.models]
    held = {name: x[0] for name, x in ours.state.shared["0.0/params"].items()}
    assert_close(held, theirs.outer, 1e-10, "outer parameters")
    assert_close(ours.params, {name: torch.stack([p[name] for p in params]) for name in params[0]}, 1e-10, "params")
    assert theirs.outer_optimizer is not None
    for slot, values in ours.state.shared["0.0/outer"].items() if outer_state else ():
        expected = {name: theirs.outer_optimizer.state[p][slot] for name, p in theirs.outer.items()}
        assert_close({name: x[0] for name, x in values.items()}, expected, 1e-10, slot)


@pytest.mark.parametrize("outer", ["default", "adam"])
@pytest.mark.parametrize("case", CASES)
def test_edit_equals_its_twin(case: str, outer: str) -> None:
    spec, of_twin = OUTERS[outer]
    if outer == "adam" and "skip_anomalies" in CASES[case]:
        spec, of_twin = OptimSpec(SGD, lr=0.9), (SGD, {"lr": 0.9})  # Adam counts the steps that it leaves out
    found: list[tuple[int, str, int]] = []
    model = Two()
    ours = run(model, EDiTStrategy("sgd", spec, H, lr=0.05, **CASES[case]), stacked(batches()))
    settings: dict[str, Any] = {"inner": (SGD, {"lr": 0.05}), "outer": of_twin, **CASES[case]}
    theirs = edit(model, batches(), K, H=H, found=found, **settings)
    check(ours, theirs)
    if "anomalies" in case:
        names = common.parameters(model).keys()
        assert {(ROUND_OF_ONE, name, 1) for name in names} <= set(found)
        assert {(ROUND_OF_ALL, name, node) for name in names for node in range(K)} <= set(found)
    assert bool(found) == ("skip_anomalies" in CASES[case])


@pytest.mark.parametrize("outer", OUTERS)
def test_there_is_no_outer_step_where_all_are_anomalies(outer: str) -> None:
    """Neither of the parameters nor of what the outer optimizer keeps of them."""
    model, sequence = Two(), stacked(batches())
    last = (ROUND_OF_ALL + 1) * H
    sim = simulation(model, EDiTStrategy("sgd", OUTERS[outer][0], H, lr=0.05, **FOUND), sequence)
    before = advance(sim, sim.init(), sequence[: last - H]).state
    kept = saved(before)
    after = advance(sim, before, sequence[last - H : last]).state
    for name in ("0.0/params", "0.0/outer"):
        assert_same_bits(kept.shared[name], after.shared[name], name)
    assert_same_bits(kept.own["0.0/norms"], after.own["0.0/norms"], "anomalies are not remembered")
    assert_close(after.params, {n: x.expand(K, *x.shape[1:]) for n, x in after.shared["0.0/params"].items()}, 0.0)


def test_a_temperature_without_end_is_diloco() -> None:
    """Of four nodes, with weights of exactly 1 / 4, to the last bit."""
    model, sequence = Two(), stacked(batches()[:10])
    ours = run(model, EDiTStrategy("adamw", "sgd", H, temperature=math.inf, lr=0.01), sequence)
    theirs = run(model, DiLoCoStrategy("adamw", "sgd", H, lr=0.01), sequence)
    assert_same_bits(ours.params, theirs.params)
    assert_same_bits(ours.state.shared, theirs.state.shared)
    warm = run(model, EDiTStrategy("adamw", "sgd", H, temperature=1e9, lr=0.01), sequence)
    assert_close(warm.params, theirs.params, 1e-9)


def naive(moved: Sequence[Tensor], temperature: float) -> Tensor:
    """sum_i w_i Delta_i of one tensor."""
    powers = [math.exp(-float(x.norm()) / temperature) for x in moved]
    return sum((p / sum(powers) * x for p, x in zip(powers, moved)), torch.zeros_like(moved[0]))


@pytest.mark.parametrize("inner", [Mean(), ServerMean(), Compressed(Mean(), TopK(1.0))])
def test_absent_nodes_have_no_weight(inner: Any) -> None:
    part = Part.alone(StackedCollectives(5).among([0, 2, 3]))
    moved = {"a": torch.randn(3, 4, 2, dtype=F64), "b": torch.randn(3, dtype=F64)}
    how = MovementPenalty(inner, temperature=0.7)
    memory = how.memory(tree.map(lambda x: torch.zeros_like(x[:1]), moved), part)
    expected = {name: naive(list(x), 0.7)[None] for name, x in moved.items()}
    assert_close(how(moved, part, memory), expected, 1e-12)


def test_runs_with_absences_equal_the_twin() -> None:
    """Each node's norms are those of the exchanges for which it was there."""
    there = [[node for node in range(K) if (step // H) % 5 != 2 or node != 3] for step in range(STEPS)]
    table = [[node in row for node in range(K)] for row in there]
    strategy = EDiTStrategy("sgd", H=H, lr=0.05, **FOUND)
    model, data = Two(), batches()
    found: list[tuple[int, str, int]] = []
    theirs = edit(
        model, data, K, H=H, inner=(SGD, {"lr": 0.05}), present=lambda step: there[step], found=found, **FOUND
    )
    assert {node for _, _, node in found} == set(range(K))
    taken = Taken(strategy, stacked(data), Trace(table, rejoin="shared"), model=model).run(STEPS)
    held = {name: x[0] for name, x in taken.state.shared["0.0/params"].items()}
    assert_close(held, theirs.outer, 1e-10, "outer parameters")


def test_anomalies_outlast_a_checkpoint() -> None:
    model, sequence = Two(), stacked(batches())
    whole = run(model, EDiTStrategy("sgd", H=H, lr=0.05, **FOUND), sequence)
    sim = simulation(model, EDiTStrategy("sgd", H=H, lr=0.05, **FOUND), sequence)
    middle = saved(advance(sim, sim.init(), sequence[: 2 * ROUND_OF_ONE - 1]).state)
    assert middle.own["0.0/norms"]["scores"].count_nonzero() > 0
    resumed = simulation(model, EDiTStrategy("sgd", H=H, lr=0.05, **FOUND), sequence)
    resumed.init()
    rest = advance(resumed, middle, sequence[2 * ROUND_OF_ONE - 1 :])
    assert_same_bits(rest.params, whole.params)


def test_processes_agree_on_anomalies() -> None:
    data = torch.ones(4096, dtype=F64)
    data[1500:1600] = 1e4
    strategy = EDiTStrategy("sgd", H=2, lr=0.1, clip=1.0, skip_anomalies=True, warmup=3, threshold=1.0)
    report = vecgym.verify(strategy, Line(), data, num_nodes=4, num_processes=2, steps=24, dtype=F64)
    assert report.passed, report


def test_a_late_result_leaves_out_what_was_still_when_it_was_sent() -> None:
    """The note of it travels with the message."""
    model, sequence = Two(), stacked(batches())
    last = (ROUND_OF_ALL + 1) * H
    strategy = Strategy("sgd", [Exchange(Outer(MovementPenalty(Mean(), **FOUND)), H, delay=1)], lr=0.05)
    sim = simulation(model, strategy, sequence)
    before = advance(sim, sim.init(), sequence[:last]).state
    kept = saved(before)
    assert kept.shared[f"0.0/notes {last - 1}"]["still"]
    after = advance(sim, before, sequence[last : last + 1]).state
    assert_same_bits(kept.shared["0.0/params"], after.shared["0.0/params"])


def test_an_exchange_in_part_takes_no_anomalies() -> None:
    when = SyncWeight([0.5, 1.0])
    Exchange(Outer(MovementPenalty(Mean())), when)
    with pytest.raises(ValueError, match="applied in part"):
        Exchange(Outer(MovementPenalty(Mean(), skip_anomalies=True)), when)
