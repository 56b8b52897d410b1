"""Exchanges of the inner optimizer's moments, and what averages are told of the nodes' own steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fitting import dataset, fit, params
from tests.helpers import assert_close, difference, run, stacked
from tests.models import make_batches, make_model
from vecgym import sweep
from vecgym.compress import Quantise, TopK
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec
from vecgym.runs.verification import verify
from vecgym.simulation.simulation import Part
from vecgym.strategy import (
    AllReduceStrategy,
    Average,
    AveragingCommunicator,
    CommunicateOptimizeStrategy,
    Compressed,
    Exchange,
    FedAvgStrategy,
    Mean,
    Robust,
    Strategy,
    SyncWeight,
)
from vecgym.strategy.stages import Memory

K, STEPS = 3, 6


def moments(how: Average | None = None, every: Any = 1, of: Any = "moments") -> Exchange:
    return Exchange(how or Mean(), every, of)


def trained(*modules: Exchange, inner: Any = "adamw", steps: int = STEPS, **settings: Any) -> Any:
    batches = stacked(make_batches("MLP", steps, K, dtype=torch.float64))
    strategy = CommunicateOptimizeStrategy(list(modules), inner, lr=0.01)
    return run(make_model("MLP", dtype=torch.float64), strategy, batches, **settings)


def spread(values: dict[str, Tensor]) -> float:
    """The distance between the nodes' values."""
    return max(float((x - x[:1]).abs().max()) for x in values.values())


# -------------------------------------------------------------------------------------------------- moments


def test_only_the_slots_that_are_asked_for_are_averaged() -> None:
    state = trained(moments(of="exp_avg")).state
    assert spread(state.home["optimizer"]["exp_avg"]) == 0
    assert spread(state.home["optimizer"]["exp_avg_sq"]) > 0
    assert spread(state.params) > 0


def test_bytes_are_those_of_an_average_of_each_moment() -> None:
    ours, both = trained(moments(every=2)).comm.ledger, trained(AveragingCommunicator(H=2)).comm.ledger
    assert ours.total_bytes > 0
    assert ours.total_bytes == pytest.approx(2 * both.total_bytes)


def test_an_optimizer_of_each_node_has_moments_too() -> None:
    """A user's Adam, of which each node has one, gives what torch's gives for all at once."""

    class Own(torch.optim.Adam):
        pass

    modules = AveragingCommunicator(H=3), moments(every=2)
    mine, native = trained(*modules, inner=Own), trained(*modules, inner="adam")
    assert_close(mine.params, native.params, 1e-12)
    theirs = native.state.home["optimizer"]["exp_avg"]
    assert_close(mine.state.home["optimizer"]["tensors"]["exp_avg"], theirs, 1e-12)


def test_a_run_that_is_differentiated_gives_the_same() -> None:
    modules = AveragingCommunicator(H=3), moments(every=2)
    assert_close(trained(*modules).state, trained(*modules, differentiable=True).state, 1e-12)


class Keeper(Average):
    """It keeps what it was given and what it has returned, and both must stay as they are."""

    def agree(self, x: Any, part: Part, memory: Memory) -> Any:
        memory.own["given"] = x
        memory.shared["new"] = part.comm.mean(x)
        return memory.shared["new"]


def test_an_average_may_keep_what_it_was_given_and_what_it_returned() -> None:
    exchange = moments(Keeper(), of="exp_avg")
    donated, pure = trained(exchange).state, trained(exchange, differentiable=True).state
    assert spread(donated.own["0.0.exp_avg/given"]) > 0
    for held, expected in ((donated.own, pure.own), (donated.shared, pure.shared)):
        for name in ("0.0.exp_avg/given", "0.0.exp_avg/new"):
            assert (name in held) == (name in expected)
            assert_close(held.get(name, {}), expected.get(name, {}), 1e-12)


def test_all_that_is_together_alike_stays_stored_once() -> None:
    batches = stacked(make_batches("MLP", STEPS, K, dtype=torch.float64))
    strategy = AllReduceStrategy("adamw", lr=0.01)
    plain = run(make_model("MLP", dtype=torch.float64), strategy, batches)
    both = CommunicateOptimizeStrategy([*strategy.exchanges, moments()], "adamw", lr=0.01)
    found = run(make_model("MLP", dtype=torch.float64), both, batches)
    assert {x.shape[0] for x in found.state.home["optimizer"]["exp_avg"].values()} == {1}
    assert_close(found.params, plain.params, 1e-14)


def test_sweeps_and_single_runs_agree() -> None:
    def make(H: int) -> Strategy:
        return CommunicateOptimizeStrategy([AveragingCommunicator(H=2), moments(every=H)], "adamw", lr=0.01)

    settings: dict[str, Any] = {"max_steps": 5, "batch_size": 4, "device": "cpu", "progress": False}
    data = dataset("MLP")
    grid: dict[str, Any] = {"strategy": [make(2), make(3), make(5)]}
    rows = sweep(make_model("MLP"), data, grid=grid, num_nodes=K, keep_models=True, **settings).rows
    losses = [row["train_loss"] for row in rows]
    single = [fit("MLP", make(H), num_nodes=K, max_steps=5)[0].history.last("train_loss") for H in (2, 3, 5)]
    assert losses == pytest.approx(single, rel=1e-5)
    assert len(set(losses)) == 3


def test_moments_may_be_sent_as_codes() -> None:
    """Of all values, that changes nothing; of 8 bits, the difference to the last average, little.

    Few bits are for first moments only: a small second moment that becomes 0 makes Adam's step huge.
    """
    batches = stacked(make_batches("MLP", 9, K, dtype=torch.float64))

    def params_with(exchange: Exchange) -> Tree:
        strategy = CommunicateOptimizeStrategy([AveragingCommunicator(H=2), exchange], "adamw", lr=0.01)
        return run(make_model("MLP", dtype=torch.float64), strategy, batches).params

    whole, bits = (Compressed(Mean(), codec, reference=True) for codec in (TopK(1.0), Quantise(8)))
    both, first = ["exp_avg", "exp_avg_sq"], ["exp_avg"]
    assert difference(params_with(moments(whole, 2, both)), params_with(moments(Mean(), 2, both))) < 1e-12
    assert 1e-12 < difference(params_with(moments(bits, 2, first)), params_with(moments(Mean(), 2, first))) < 0.02


def test_processes_agree() -> None:
    strategy = CommunicateOptimizeStrategy(
        [AveragingCommunicator(H=2), moments(every=3, of="exp_avg")], "adamw", lr=0.01
    )
    model, data = make_model("MLP", dtype=torch.float64), dataset("MLP")
    report = verify(strategy, model, data, num_nodes=4, num_processes=2, steps=6)
    assert report.passed, report


@pytest.mark.parametrize(
    ("module", "inner", "message"),
    [
        (moments(), "sgd", "which keeps none: give one with moments"),
        (moments(of="exp_avg"), OptimSpec("sgd", momentum=0.9), "of='exp_avg'.*momentum_buffer"),
        (moments(every=100, of="exp_avgs"), "adamw", "did you mean 'exp_avg'"),
    ],
    ids=["none", "another", "misspelt"],
)
def test_moments_that_are_not_there(module: Exchange, inner: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trained(module, inner=inner, steps=2)


@pytest.mark.parametrize("H", [0, 1.5, True])
def test_a_period_is_an_integer(H: Any) -> None:
    with pytest.raises(ValueError, match="every="):
        moments(every=H)


@pytest.mark.parametrize("slots", [3, [], [1], {"exp_avg": 1}])
def test_slots_are_names(slots: Any) -> None:
    with pytest.raises(TypeError, match=r"of=.* must be .* a slot of the inner optimizer"):
        moments(of=slots)


def test_any_average_will_do() -> None:
    """Islands, a median, codes with a residual for each slot; and in part, with a weight for each step."""
    median = trained(moments(Robust("median"))).state.home["optimizer"]
    assert spread(median["exp_avg"]) == 0
    coded = moments(Compressed(Mean(), "int8"), of=["exp_avg", "exp_avg_sq"], every=2)
    state = trained(coded).state
    assert {"0.0.exp_avg/residual", "0.0.exp_avg_sq/residual"} <= set(state.own)
    assert_close(state, trained(coded, differentiable=True).state, 1e-10)
    none, half, whole = (
        trained(*m).state.home["optimizer"]["exp_avg"]
        for m in ([], [moments(every=SyncWeight([0, 0, 0, 0, 0, 0.5]))], [moments(every=6)])
    )
    assert_close(half, {n: (x + whole[n]) / 2 for n, x in none.items()}, 1e-12)


def test_slots_must_be_named_where_an_average_keeps_something_for_each() -> None:
    with pytest.raises(ValueError, match="has state for each slot: name the slots"):
        trained(moments(Compressed(Mean(), "int8")))


# ------------------------------------------------------------------------------- who trains, and how often


class Watcher(Average):
    """It notes what it is told, and lets nodes that have trained more shrink more."""

    common = False

    def __init__(self) -> None:
        self._seen: list[list[int]] = []

    def agree(self, x: Any, part: Part, memory: Memory) -> Any:
        made = torch.tensor(part.made).expand(len(part.nodes))
        self._seen.append(made.tolist())
        factor = 1 - 0.01 * made.double()
        return {n: p * factor.to(p.dtype).view(-1, *[1] * (p.dim() - 1)) for n, p in x.items()}


def by_experience(watcher: Average | None = None) -> Strategy:
    """The participants change at every second step."""
    exchanges = [AveragingCommunicator(H=2, participation=0.6), Exchange(watcher or Watcher())]
    return CommunicateOptimizeStrategy(exchanges, "adamw", lr=0.01)


def test_averages_are_told_how_often_each_node_has_trained() -> None:
    watcher = Watcher()
    batches = stacked(make_batches("MLP", STEPS, 5, dtype=torch.float64))
    result = run(make_model("MLP", dtype=torch.float64), by_experience(watcher), batches)
    counts = torch.zeros(5, dtype=torch.long)
    for made, active in zip(watcher._seen, result.active, strict=True):
        assert made == counts.tolist()
        counts[list(active or [])] += 1
    assert result.simulation.timetable.made(STEPS) == counts.tolist()
    assert len(set(counts.tolist())) > 1


def test_everyone_has_done_as_many_steps_as_the_run_where_all_train() -> None:
    watcher = Watcher()
    trained(Exchange(watcher))
    assert watcher._seen == [[step] * K for step in range(STEPS)]


def test_steps_of_nodes_are_counted_the_same_on_processes() -> None:
    model, data = make_model("MLP", dtype=torch.float64), dataset("MLP")
    for num_processes in (2, 4):
        report = verify(by_experience(), model, data, num_nodes=4, num_processes=num_processes, steps=6)
        assert report.passed, report


def test_steps_of_nodes_go_on_after_a_resume(tmp_path: Path) -> None:
    whole, _ = fit("MLP", by_experience(), max_steps=8)
    fit("MLP", by_experience(), max_steps=5, save_dir=tmp_path)
    resumed, _ = fit("MLP", by_experience(), max_steps=8, save_dir=tmp_path, resume=True)
    assert torch.equal(params(resumed), params(whole))


def test_steps_of_nodes_are_counted_the_same_in_sweeps() -> None:
    lone, _ = fit("MLP", by_experience(), max_steps=6)
    for others in ([], [by_experience(), FedAvgStrategy("adamw", lr=0.01)]):
        settings: dict[str, Any] = {"max_steps": 6, "batch_size": 4, "device": "cpu", "progress": False}
        grid: dict[str, Any] = {"strategy": [by_experience(), *others]}
        rows = sweep(make_model("MLP"), dataset("MLP"), grid=grid, num_nodes=lone.nodes.num_nodes, **settings).rows
        assert rows[0]["train_loss"] == pytest.approx(lone.history.last("train_loss"), rel=1e-5)
