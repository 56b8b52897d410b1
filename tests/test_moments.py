"""What modules do with the inner optimizer's moments, and what they are told of the nodes' own steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fitting import dataset, fit, params
from tests.helpers import assert_close, difference, known, run, stacked
from tests.models import make_batches, make_model
from vecgym import sweep
from vecgym.collectives import StackedCollectives
from vecgym.compress import Quantise, TopK
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec
from vecgym.runs.verification import verify
from vecgym.strategy import (
    AllReduceStrategy,
    AveragingCommunicator,
    CommunicateOptimizeStrategy,
    CommunicationModule,
    Compressed,
    Context,
    FedAvgStrategy,
    Mean,
    Moments,
    Robust,
    Strategy,
    SyncWeight,
    compressed,
    delayed,
    every,
)

K, STEPS = 3, 6


def trained(*modules: CommunicationModule, inner: Any = "adamw", steps: int = STEPS, **settings: Any) -> Any:
    batches = stacked(make_batches("MLP", steps, K, dtype=torch.float64))
    strategy = CommunicateOptimizeStrategy(list(modules), inner, lr=0.01)
    return run(make_model("MLP", dtype=torch.float64), strategy, batches, **settings)


def spread(values: dict[str, Tensor]) -> float:
    """How far the nodes' values are apart."""
    return max(float((x - x[:1]).abs().max()) for x in values.values())


# -------------------------------------------------------------------------------------------------- moments


def test_only_the_slots_that_are_asked_for_are_averaged() -> None:
    state = trained(Moments(slots="exp_avg")).state
    assert spread(state.home["optimizer"]["exp_avg"]) == 0
    assert spread(state.home["optimizer"]["exp_avg_sq"]) > 0
    assert spread(state.params) > 0


def test_bytes_are_those_of_an_average_of_each_moment() -> None:
    moments, both = trained(Moments(every=2)).comm.ledger, trained(AveragingCommunicator(H=2)).comm.ledger
    assert moments.total_bytes > 0
    assert moments.total_bytes == pytest.approx(2 * both.total_bytes)


def test_an_optimizer_of_each_node_has_moments_too() -> None:
    """A user's Adam, of which each node has one, gives what torch's gives for all at once."""

    class Own(torch.optim.Adam):
        pass

    modules = AveragingCommunicator(H=3), Moments(every=2)
    mine, native = trained(*modules, inner=Own), trained(*modules, inner="adam")
    assert_close(mine.params, native.params, 1e-12)
    assert_close(known(mine).optimizer["tensors"]["exp_avg"], known(native).optimizer["exp_avg"], 1e-12)


def test_a_run_that_is_differentiated_gives_the_same() -> None:
    modules = AveragingCommunicator(H=3), Moments(every=2)
    assert_close(trained(*modules).state, trained(*modules, differentiable=True).state, 1e-12)


class Keeper(CommunicationModule):
    """It keeps what it was given and what it has returned, and both must stay as they are."""

    def init(self, params: Any, ctx: Any) -> Any:
        return {}

    def exchange_moments(self, moments: Any, state: Any, ctx: Context) -> Any:
        new = {slot: ctx.comm.mean(values) for slot, values in moments.items()}
        return new, {"given": moments["exp_avg"], "new": new["exp_avg"]}


def test_a_module_may_keep_what_it_was_given_and_what_it_returned() -> None:
    donated, pure = known(trained(Keeper())), known(trained(Keeper(), differentiable=True))
    assert_close(donated.strategy, pure.strategy, 1e-12)


def test_all_that_is_together_alike_stays_stored_once() -> None:
    batches = stacked(make_batches("MLP", STEPS, K, dtype=torch.float64))
    strategy = AllReduceStrategy("adamw", lr=0.01)
    plain = run(make_model("MLP", dtype=torch.float64), strategy, batches)
    both = CommunicateOptimizeStrategy([*strategy.communication_modules, Moments()], "adamw", lr=0.01)
    found = run(make_model("MLP", dtype=torch.float64), both, batches)
    assert {x.shape[0] for x in known(found).optimizer["exp_avg"].values()} == {1}
    assert_close(found.params, plain.params, 1e-14)


def test_sweeps_and_single_runs_agree() -> None:
    def make(H: int) -> Strategy:
        return CommunicateOptimizeStrategy([AveragingCommunicator(H=2), Moments(every=H)], "adamw", lr=0.01)

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

    def params_with(module: CommunicationModule) -> Tree:
        strategy = CommunicateOptimizeStrategy([AveragingCommunicator(H=2), module], "adamw", lr=0.01)
        return run(make_model("MLP", dtype=torch.float64), strategy, batches).params

    both, first = Moments(slots=["exp_avg", "exp_avg_sq"], every=2), Moments(slots=["exp_avg"], every=2)
    assert difference(params_with(compressed(both, TopK(1.0))), params_with(both)) < 1e-12
    assert 1e-12 < difference(params_with(compressed(first, Quantise(8))), params_with(first)) < 0.02


def test_processes_agree() -> None:
    strategy = CommunicateOptimizeStrategy(
        [AveragingCommunicator(H=2), Moments(slots="exp_avg", every=3)], "adamw", lr=0.01
    )
    model, data = make_model("MLP", dtype=torch.float64), dataset("MLP")
    report = verify(strategy, model, data, num_nodes=4, num_processes=2, steps=6)
    assert report.passed, report


@pytest.mark.parametrize(
    ("module", "inner", "message"),
    [
        (Moments(), "sgd", "it keeps nothing: give one with moments"),
        (Moments(slots="exp_avg"), OptimSpec("sgd", momentum=0.9), "slots='exp_avg'.*momentum_buffer"),
        (Moments(slots="exp_avgs", every=100), "adamw", "did you mean 'exp_avg'"),
    ],
    ids=["none", "another", "misspelt"],
)
def test_moments_that_are_not_there(module: CommunicationModule, inner: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trained(module, inner=inner, steps=2)


@pytest.mark.parametrize("H", [0, 1.5, True])
def test_a_period_is_an_integer(H: Any) -> None:
    with pytest.raises(ValueError, match="every="):
        Moments(every=H)


@pytest.mark.parametrize("slots", [3, [], [1], {"exp_avg": 1}])
def test_slots_are_names(slots: Any) -> None:
    with pytest.raises(TypeError, match=r"slots=.* must be a name"):
        Moments(slots=slots)


def test_any_average_will_do() -> None:
    """Islands, a median, codes with a residual for each slot; and in part, with a weight for each step."""
    median = known(trained(Moments(Robust("median"))))
    assert spread(median.optimizer["exp_avg"]) == 0
    coded = Moments(Compressed(Mean(), "int8"), slots=["exp_avg", "exp_avg_sq"], every=2)
    state = known(trained(coded))
    assert set(state.strategy["0"]) == {"exp_avg", "exp_avg_sq"}
    assert_close(state, known(trained(coded, differentiable=True)), 1e-10)
    half = known(trained(Moments(every=SyncWeight([0, 0, 0, 0, 0, 0.5])))).optimizer["exp_avg"]
    none, whole = (known(trained(*m)).optimizer["exp_avg"] for m in ([], [Moments(every=6)]))
    assert_close(half, {n: (x + whole[n]) / 2 for n, x in none.items()}, 1e-12)


def test_slots_must_be_named_where_an_average_keeps_something_for_each() -> None:
    with pytest.raises(ValueError, match="keeps something for each slot: name them"):
        trained(Moments(Compressed(Mean(), "int8")))


def test_a_wrapper_that_does_not_pass_them_on_is_refused() -> None:
    class Both(AveragingCommunicator):
        def exchange_moments(self, moments: Any, state: Any, ctx: Any) -> Any:
            return moments, state

    CommunicateOptimizeStrategy([every(2, Both())])
    for wrapped in (delayed(Both(), 1), compressed(Both(), "int8")):
        with pytest.raises(ValueError, match="does not pass on the moments"):
            CommunicateOptimizeStrategy([wrapped])


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda moments: None, "returned None; expected a tuple of two"),
        (lambda moments: ({}, {}), r"returned \[\] as moments; expected a dict of the slots"),
        (lambda moments: ({**moments, "exp_avg": {}}, {}), "exp_avg that leaves out"),
        (lambda moments: ({s: {n: x[0] for n, x in v.items()} for s, v in moments.items()}, {}), "in shape"),
    ],
)
def test_what_a_module_returns_is_checked(returned: Any, message: str) -> None:
    class Wrong(CommunicationModule):
        def exchange_moments(self, moments: Any, state: Any, ctx: Any) -> Any:
            return returned(moments)

    with pytest.raises((TypeError, ValueError), match=message):
        trained(Wrong())


# ------------------------------------------------------------------------------- who trains, and how often


class Watcher(CommunicationModule):
    """It notes what it is told, and lets nodes that have trained more shrink more."""

    def __init__(self) -> None:
        self._seen: list[tuple[Any, list[int]]] = []

    def exchange_parameters(self, params: Any, state: Any, ctx: Context) -> Any:
        self._seen.append((ctx.active, ctx.node_steps.tolist()))
        factor = 1 - 0.01 * ctx.node_steps.double()
        return {n: p * factor.to(p.dtype).view(-1, *[1] * (p.dim() - 1)) for n, p in params.items()}, state


def by_experience(watcher: CommunicationModule | None = None) -> Strategy:
    """Who takes part changes at every second step."""
    modules = [AveragingCommunicator(H=2, participation=0.6), watcher or Watcher()]
    return CommunicateOptimizeStrategy(modules, "adamw", lr=0.01)


def test_modules_are_told_who_trains_and_how_often_each_has() -> None:
    watcher = Watcher()
    batches = stacked(make_batches("MLP", STEPS, 5, dtype=torch.float64))
    result = run(make_model("MLP", dtype=torch.float64), by_experience(watcher), batches)
    counts = torch.zeros(5, dtype=torch.long)
    for (active, node_steps), expected in zip(watcher._seen, result.active):
        assert active == expected
        assert node_steps == counts.tolist()
        counts[list(expected or [])] += 1
    assert known(result).node_steps.tolist() == counts.tolist() == known(result).optimizer["step"].tolist()
    assert len(set(counts.tolist())) > 1


def test_everyone_has_done_as_many_steps_as_the_run_where_all_train() -> None:
    watcher = Watcher()
    trained(watcher)
    assert watcher._seen == [(None, [step] * K) for step in range(STEPS)]


def test_of_those_who_train_the_context_of_local_gradients_has_a_row_each() -> None:
    seen = []

    class Local(CommunicationModule):
        def local_gradients(self, grads: Any, params: Any, state: Any, ctx: Context) -> Any:
            assert ctx.rows is not None
            assert ctx.active == tuple(ctx.rows.tolist())
            seen.append(len(ctx.node_steps))
            return grads

    trained(AveragingCommunicator(participation=0.6), Local())
    assert seen == [2] * STEPS


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
    assert resumed.state is not None
    assert whole.state is not None
    assert known(resumed).node_steps.tolist() == known(whole).node_steps.tolist()
    assert len(set(known(whole).node_steps.tolist())) > 1


def test_steps_of_nodes_are_counted_the_same_in_sweeps() -> None:
    lone, _ = fit("MLP", by_experience(), max_steps=6)
    for others in ([], [by_experience(), FedAvgStrategy("adamw", lr=0.01)]):
        settings: dict[str, Any] = {"max_steps": 6, "batch_size": 4, "device": "cpu", "progress": False}
        grid: dict[str, Any] = {"strategy": [by_experience(), *others]}
        rows = sweep(make_model("MLP"), dataset("MLP"), grid=grid, num_nodes=lone.nodes.num_nodes, **settings).rows
        assert rows[0]["train_loss"] == pytest.approx(lone.history.last("train_loss"), rel=1e-5)


def test_a_context_is_built_by_keywords() -> None:
    comm = StackedCollectives(K)
    assert Context(comm, step=2).node_steps.tolist() == [2] * K
    with pytest.raises(TypeError):
        Context(comm, 2)  # type: ignore[call-arg]
