"""Asynchronous strategies as algorithms of the kernel: their timetables, without a tensor, and their handlers."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import each_row, stacked
from tests.models import make_batches, make_model
from vecgym.clock import Compute
from vecgym.clock.asynchronous import TimesOf
from vecgym.collectives import StackedCollectives
from vecgym.core import tree
from vecgym.engine import Engine
from vecgym.simulation import Event, RunFacts, Simulation, State, TickRecord, run
from vecgym.simulation.events import Arrival, Restart, Schedule, Stop, schedule, updates_of
from vecgym.simulation.timetable import Scheduled
from vecgym.strategy import (
    ADPSGDStrategy,
    AsyncStrategy,
    DecoupledDiLoCoStrategy,
    DelayedNesterov,
    HALoSStrategy,
    OuterOptimizer,
)
from vecgym.strategy.asynchronous import EventDriven

K, T, F64 = 4, 60, torch.float64
COMPUTE = Compute([1.0, 1.3, 1.9, 4.4])
Server = OuterOptimizer("adamw", lr=0.01)
MADE: dict[str, Callable[..., EventDriven]] = {
    "async": lambda **more: AsyncStrategy("adamw", Server, H=3, lr=0.01, warmup_steps=3, **more),
    "buffered": lambda **more: AsyncStrategy("adamw", H=3, buffer=3, max_wait=1.5, dylu=True, lr=0.01, **more),
    "halos": lambda **more: HALoSStrategy("adamw", 2, DelayedNesterov(0.3, 0.9, 2), local_updates=3, lr=0.01, **more),
    "ad-psgd": lambda **more: ADPSGDStrategy("adamw", lr=0.01, warmup_steps=3, **more),
    "decoupled": lambda **more: DecoupledDiLoCoStrategy(
        "adamw", Server, quorum=2, fragments=2, H=4, alpha=0.25, grace=0.5, lr=0.01, **more
    ),
}


def scheduled(strategy: EventDriven, updates: int = 12) -> Schedule:
    times = TimesOf(K, COMPUTE, None, {"first.weight": 800, "last.weight": 400}, seed=42)
    rules = strategy.rules(times)
    return Schedule(rules, updates_of(schedule(rules, times.seconds, Stop(updates=updates))))


def timetable_of(strategy: EventDriven, updates: int = 12) -> Scheduled:
    found = strategy.timetable(RunFacts(K, schedule=scheduled(strategy, updates)))
    assert isinstance(found, Scheduled)
    return found


# -------------------------------------------------------------------------------------------------------- timetables


def steps_in(event: Event) -> list[tuple[int, int]]:
    """(node, its own step) of each step of a `train`."""
    return [(node, count + k) for node, count in each_row(event, K) for k in range(event.reads)]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("name", MADE)
def test_every_step_is_trained_once_and_before_it_is_needed(name: str, together: bool) -> None:
    strategy = MADE[name](together=together)
    trained: list[tuple[int, int]] = []
    for events, happenings in zip(timetable_of(strategy).ticks(), scheduled(strategy).updates, strict=True):
        for event in events:
            if event.what == "train":
                trained += steps_in(event)
                assert together or len(each_row(event, K)) == 1
            if isinstance(event.info, Arrival):
                last = event.info.first_step + event.info.num_steps
                assert [step for node, step in trained if node == event.info.node][:last] == list(range(last))
        happened = [event.info for event in events if event.what != "train"]
        if name != "decoupled":  # where nodes' own events are put off, in their order
            assert happened == happenings
        else:
            for node in range(K):
                own = lambda x: getattr(x, "node", None) == node and not isinstance(x, Arrival)  # noqa: B023, E731
                assert [x for x in happened if own(x)] == [x for x in happenings if own(x)]
    totals = scheduled(strategy).total_steps
    assert sorted(trained) == [(node, step) for node in range(K) for step in range(totals[node])]


def test_what_can_be_trained_together_is() -> None:
    """All begin at once; later those who have begun again by the time of the first who is needed."""
    strategy = AsyncStrategy("sgd", H=2, lr=0.1)
    calls = [event.rows for events in timetable_of(strategy).ticks() for event in events if event.what == "train"]
    assert calls[0] == (0, 1, 2, 3)
    assert (0,) in calls[1:]
    assert max(map(len, (rows or () for rows in calls[1:]))) > 1
    ones = [event.rows for events in timetable_of(AsyncStrategy("sgd", H=2, lr=0.1, together=False)).ticks()
            for event in events if event.what == "train"]  # fmt: skip
    assert len(ones) > len(calls)


def test_rounds_that_would_not_arrive_are_left_out_and_made_up_for() -> None:
    """A longer run goes on from a shorter one: each step is trained once all the same."""
    strategy = MADE["async"]()
    short, long = timetable_of(strategy, 5), timetable_of(strategy, 12)
    before = [event for events in short.ticks() for event in events]
    long.resume(5, short.pending(5))
    after = [event for events in long.ticks(5) for event in events]
    trained = [step for event in before + after if event.what == "train" for step in steps_in(event)]
    totals = long.schedule.total_steps
    assert sorted(trained) == [(node, step) for node in range(K) for step in range(totals[node])]
    assert short.pending(5) != timetable_of(strategy, 12).pending(5)
    same = timetable_of(strategy, 12)
    same.resume(5, same.pending(5))
    assert list(same.ticks()) == list(timetable_of(strategy, 12).ticks())


def test_a_run_without_a_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"give RunFacts\(schedule=\)"):
        AsyncStrategy("sgd", lr=0.1).timetable(RunFacts(K))


@pytest.mark.parametrize("name", MADE)
def test_columns_are_counts_of_what_happens(name: str) -> None:
    strategy = MADE[name]()
    found, plan = timetable_of(strategy), scheduled(strategy)
    for tick, (events, happenings) in enumerate(zip(found.ticks(), plan.updates, strict=True), 1):
        columns = found.columns(tick)
        assert columns["sim_seconds"] == happenings[-1].time
        assert columns["num_arrived"] == len(plan.arrivals(tick))
        assert columns["staleness_max"] == max(arrival.staleness for arrival in plan.arrivals(tick))
        begun = [len(each_row(event, K)) for event in events if event.what == "train" and not event.info]
        assert columns["nodes_per_call"] == (sum(begun) / len(begun) if begun else None)
        assert any(isinstance(x, Restart) for x in happenings) or tick > 0


# ---------------------------------------------------------------------------------------------------------- handlers


def on_the_kernel(name: str, engine: Any = "auto", model: str = "MLP", **more: Any) -> Simulation:
    strategy = MADE[name](**more)
    batches = stacked(make_batches(model, T, K, batch_size=4, dtype=F64))

    def read(requests: Iterator[tuple[list[int], Any]]) -> Iterator[tuple[Any, None]]:
        for rows, counts in requests:
            each = [counts] * len(rows) if isinstance(counts, int) else counts
            own = [tree.map_leaves(lambda x: x[row], batches[n % T]) for row, n in zip(rows, each)]  # noqa: B023
            yield tree.map_leaves(lambda *x: torch.stack(x), *own), None

    prepared = Engine(make_model(model, dtype=F64), engine=engine, node_threads=1)
    prepared.prepare(batches[0])
    facts = RunFacts(K, schedule=scheduled(strategy))
    return Simulation(prepared, strategy, facts, StackedCollectives(K), read)


def same_bits(a: State, b: State) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tree.leaves(vars(a)), tree.leaves(vars(b)), strict=True))


@pytest.mark.parametrize("name", MADE)
def test_a_run_goes_on_where_it_was(name: str) -> None:
    """To the bit, from a file of its state, with messages under way."""
    simulation = on_the_kernel(name)
    whole = run(simulation, simulation.init())
    for tick in (1, 7, 11):
        torch.save(vars(run(simulation, simulation.init(), stop=lambda s: s.tick == tick)), file := io.BytesIO())  # noqa: B023
        again = run(simulation, State(**torch.load(io.BytesIO(file.getvalue()), weights_only=True)))
        assert same_bits(whole, again)


@pytest.mark.parametrize("name", MADE)
def test_a_state_holds_no_count_and_its_tensors_stay(name: str) -> None:
    simulation = on_the_kernel(name)
    state = simulation.init()
    assert all(x.is_floating_point() for x in tree.leaves([state.own, state.shared]))
    places = lambda s: {p: x.data_ptr() for p, x in tree.flatten([s.own, s.shared]) if isinstance(x, Tensor)}  # noqa: E731
    before = places(state)
    assert before.items() <= places(run(simulation, state)).items()


@pytest.mark.parametrize("name", MADE)
def test_a_pure_run_is_the_same_and_changes_nothing(name: str) -> None:
    simulation = on_the_kernel(name)
    start = simulation.init()
    kept = copy.deepcopy(start)
    pure = run(simulation, start, pure=True)
    assert same_bits(start, kept)
    in_place = run(simulation, start)
    for x, y in zip(tree.leaves(vars(pure)), tree.leaves(vars(in_place)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", MADE)
def test_together_is_one_by_one(name: str) -> None:
    """To the bit with the loop, losses and messages too, with a model that draws random numbers."""

    def found(together: bool) -> tuple[State, list[Tensor], list[Any]]:
        simulation, rows = on_the_kernel(name, "loop", "Dropout", together=together), list[TickRecord]()
        state = run(simulation, simulation.init(), [lambda state, row: rows.append(row)])
        return state, [row.losses.nan_to_num(-1.0) for row in rows], [row.transfers for row in rows]

    (a, losses, sent), (b, of_ones, sent_by_ones) = found(True), found(False)
    assert torch.equal(torch.stack(losses), torch.stack(of_ones))
    assert str(sent) == str(sent_by_ones)
    for x, y in zip(a.params.values(), b.params.values()):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", MADE)
def test_what_is_read_is_known_beforehand(name: str) -> None:
    """Each node reads its own batches in their order, each once."""
    simulation = on_the_kernel(name)
    requests = list(simulation.requests(simulation.timetable.ticks()))
    own: dict[int, list[int]] = {node: [] for node in range(K)}
    for rows, counts in requests:
        for row, count in zip(rows, [counts] * len(rows) if isinstance(counts, int) else counts):
            own[row].append(count)
    assert own == {node: list(range(total)) for node, total in enumerate(scheduled(MADE[name]()).total_steps)}
