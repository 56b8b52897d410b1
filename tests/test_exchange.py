"""Exchanges: who meets when, in plain Python; and what they compute, against the strategies that make them."""

from __future__ import annotations

import inspect
import io
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vecgym import rollout
from vecgym.availability import Facts, Presence, Trace
from vecgym.collectives import StackedCollectives
from vecgym.collectives.ledger import Transfer
from vecgym.collectives.stacked import DryCollectives, GroupCollectives
from vecgym.compress import Codec, PowerSGD, Quantise, TopK
from vecgym.core import tree
from vecgym.core.objects import altered
from vecgym.core.tree import Tree
from vecgym.engine import Engine
from vecgym.models import Classifier, Line
from vecgym.optim import OptimSpec
from vecgym.simulation import RunFacts, Simulation, State, run
from vecgym.simulation.simulation import Part
from vecgym.simulation.stack import Stack, groups_of
from vecgym.simulation.state import StateView, put_back
from vecgym.simulation.when import Rounds, SyncWeight
from vecgym.strategy import (
    AllToAll,
    Corrupted,
    FedAvgStrategy,
    QuantisedRing,
    Ring,
    Robust,
    ServerOptimizer,
    SparseLoCoStrategy,
    Strategy,
    StreamingDiLoCoStrategy,
)
from vecgym.strategy.averages import (
    Eager,
    Mean,
    NoLoCo,
    Outer,
    Private,
    ServerMean,
)
from vecgym.strategy.base import every
from vecgym.strategy.coded import EF21, Compressed
from vecgym.strategy.decentralised.gossip import Mix
from vecgym.strategy.exchange import Exchange
from vecgym.strategy.servers import Server
from vecgym.strategy.simulated import simulation_of
from vecgym.strategy.sparta import MostMoved, PartitionedSelector, ScheduledSelector, Sparse
from vecgym.strategy.stages import Average, Memory, Stage, Stages

K, T, B = 6, 20, 4
NAMES = ("net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias")
FRAGMENTS = [["net.0"], ["net.2"]]
EXAMPLES = (10, 20, 30, 40, 50, 60)
TABLE = torch.rand(T, K, generator=torch.Generator().manual_seed(5)) < 0.6
TABLE[:, 2] |= ~TABLE.any(1)


def run_facts(num_steps: int = T, table: Tensor | None = None, rejoin: str = "own", num_nodes: int = K) -> RunFacts:
    presence = None
    if table is not None:
        presence = Presence(Trace(table, rejoin=rejoin), Facts(num_nodes, num_steps, seed=42))  # type: ignore[arg-type]
    return RunFacts(num_nodes, num_steps, 42, presence, EXAMPLES[:num_nodes], names=NAMES)


# ---------------------------------------------------------------------------------------------------- marks and rows


def happens(exchanges: Sequence[Exchange], facts: RunFacts) -> list[list[tuple[str, tuple[int, ...] | None]]]:
    """The events of each step, but for training, and their rows."""
    table = Strategy("sgd", exchanges, lr=0.1).timetable(facts)
    return [[(event.what, event.rows) for event in events if not event.reads] for events in table.ticks()]


def test_a_plain_exchange_is_one_event_of_all() -> None:
    found = happens([Exchange(Mean(), every=3)], run_facts(7))
    assert found == [[], [], [("meet", None)], [], [], [("meet", None)], []]


def test_the_number_of_an_exchange_counts_those_before() -> None:
    table = Strategy("sgd", [Exchange(Mean(), every=lambda step: 1 + step // 2)], lr=0.1).timetable(run_facts(12))
    due = [event.info for events in table.ticks() for event in events if event.what == "meet"]
    assert [(info.number, info.step) for info in due] == [(0, 0), (1, 1), (2, 3), (3, 6), (4, 10)]


def test_a_delay_makes_two_events() -> None:
    found = happens([Exchange(Mean(), every=2, delay=3)], run_facts(7))
    assert [[what for what, _ in events] for events in found] == [
        [], ["agree"], [], ["agree"], ["write"], ["agree"], ["write"],
    ]  # fmt: skip


def test_those_who_write_were_present_when_they_agreed() -> None:
    table = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 1, 1], [0, 0, 1]]).bool()
    found = happens([Exchange(Mean(), delay=1)], run_facts(4, table, num_nodes=3))
    assert found == [
        [("agree", (0, 1))],
        [("agree", (1, 2)), ("write", (1,))],
        [("agree", None), ("write", (1, 2))],
        [("agree", (2,)), ("write", (2,))],
    ]


def test_what_all_share_changes_even_if_nobody_is_left_of_those_who_agreed() -> None:
    table = torch.tensor([[1, 0], [0, 1], [1, 1], [1, 1]]).bool()
    found = happens([Exchange(Outer(Mean()), every=3, delay=1, offsets=[1])], run_facts(4, table, num_nodes=2))
    assert found == [[("agree", (0,))], [("write", ())], [], [("agree", None)]]


def test_fragments_have_steps_of_their_own() -> None:
    exchange = Exchange(Outer(Mean()), every=4, fragments=FRAGMENTS, delay=1)
    table = Strategy("sgd", [exchange], lr=0.1).timetable(run_facts(8))
    found = [(t, event.what, event.info.of.fragment, event.info.number)
             for t, events in enumerate(table.ticks()) for event in events if not event.reads]  # fmt: skip
    assert found == [
        (1, "agree", 0, 0), (2, "write", 0, 0), (3, "agree", 1, 0), (4, "write", 1, 0),
        (5, "agree", 0, 1), (6, "write", 0, 1), (7, "agree", 1, 1),
    ]  # fmt: skip


def test_a_rate_for_each_exchange_of_fragments() -> None:
    """Of how many exchanges is known with the model's names: in ten steps one of these fragments has four."""
    found: list[dict[str, Tensor]] = []
    for lr in (0.5, torch.full((4, 1), 0.5), torch.full((3, 1), 0.5)):
        exchange = Exchange(Outer(Mean(), OptimSpec("sgd", lr=lr)), every=3, fragments=FRAGMENTS)
        strategy = Strategy("sgd", [exchange], lr=0.1)
        strategy.check(K, 10)
        if len(found) == 2:
            with pytest.raises(ValueError, match=r"lr of the outer optimizer has shape \[3, 1\]; give \[4, 1\]"):
                simulation_with(strategy, num_steps=10)
        else:
            simulation = simulation_with(strategy, num_steps=10)
            found.append(run(simulation, simulation.init()).params)
    assert all(map(torch.equal, found[0].values(), found[1].values()))


def test_nodes_with_longer_delays_write_later() -> None:
    found = happens([Exchange(Outer(Mean()), every=4, delay=[0, 1, 0, 2, 1, 0])], run_facts(6))
    assert found[3:] == [
        [("agree", None), ("write", (0, 2, 5))],
        [("write", (1, 4))],
        [("write", (3,))],
    ]


@pytest.mark.parametrize(
    "how", [NoLoCo(), Eager(Mean(), OptimSpec("sgd", lr=0.5)), Outer(Mean(island_size=3))], ids=repr
)
def test_nodes_with_longer_delays_have_an_outer_state_that_moves(how: Average) -> None:
    """Nodes that have outer parameters of their own go on with these, as late as it may be."""
    found = []
    for delay in (1, [0, 1, 0, 2, 1, 0]):
        simulation = simulation_with(Strategy("sgd", [Exchange(how, every=4, delay=delay)], lr=0.1), num_steps=7)
        found.append(run(simulation, simulation.init()))
    for name, x in found[0].own["0.0/params"].items():
        assert torch.equal(found[1].own["0.0/params"][name], x)  # of what all had at the first exchange


@pytest.mark.parametrize("seed", range(12))
def test_the_outer_step_is_made_by_whoever_was_heard(seed: int) -> None:
    """Of two nodes with targets 1 and 3 perhaps only the one with the longer delay is heard."""
    exchange = Exchange(Outer(Mean(), SGD), every=2, delay=[0, 1], lost=0.5)
    strategy = Strategy("sgd", [exchange], lr=0.25)
    simulation = simulation_of(Line(), strategy, StackedCollectives(2), max_steps=3, seed=seed)
    state = simulation.init()
    for _ in range(3):
        state, _ = simulation.step(state, torch.tensor([[1.0], [3.0]]))
    agreed = [event.rows or (0, 1) for event in simulation.timetable.events(1) if event.what == "agree"]
    trained = [[0.75, 2.25][node] for rows in agreed for node in rows]  # after two steps half of the way each
    assert state.shared["0.0/params"]["w"].tolist() == [sum(trained) / max(1, len(trained))]
    assert under_way(state) == []


def test_of_twelve_seeds_some_hear_nobody_of_the_shortest_delay() -> None:
    strategy = Strategy("sgd", [Exchange(Outer(Mean(), SGD), every=2, delay=[0, 1], lost=0.5)], lr=0.25)
    tables: list[Any] = [strategy.timetable(RunFacts(2, 3, seed=seed, names=("w",))) for seed in range(12)]
    heard = [tuple(event.rows or (0, 1) for event in table.events(1) if event.what == "agree") for table in tables]
    assert set(heard) == {(), ((0,),), ((1,),), ((0, 1),)}


@pytest.mark.parametrize("resting", ["keep", "take"])
def test_those_who_sit_out_keep_or_take(resting: str) -> None:
    how = Mean() if resting == "keep" else ServerMean()
    strategy = Strategy("sgd", [Exchange(how, every=2, participation=0.5)], lr=0.1)
    events = [event for events in strategy.timetable(run_facts(4)).ticks() for event in events]
    trained = [event.rows for event in events if event.reads]
    assert trained[0] == trained[1] != trained[2] == trained[3]
    assert all(rows is not None and len(rows) == 3 for rows in trained)
    others = [(event.what, event.rows) for event in events if not event.reads]
    if resting == "keep":
        assert others == [("meet", trained[0]), ("meet", trained[2])]
    else:
        assert others == [("agree", trained[0]), ("write", None), ("agree", trained[2]), ("write", None)]


def test_late_values_go_to_those_who_took_part() -> None:
    found = happens([Exchange(Mean(), every=2, participation=0.5, delay=1)], run_facts(4))
    assert found[1][0][0] == "agree"
    assert found[2] == [("write", found[1][0][1])]


def test_lost_messages_leave_out_their_nodes_and_perhaps_all() -> None:
    found = happens([Exchange(Outer(Mean()), lost=0.7)], run_facts(T))
    rows = [events[0][1] if events else () for events in found]
    assert () in rows
    assert any(some is not None and 0 < len(some) < K for some in rows)


def test_units_count_for_steps() -> None:
    found = happens([every(2, Exchange(Mean(), every=3, delay=1))], run_facts(12))
    assert [(t, events[0][0]) for t, events in enumerate(found) if events] == [
        (5, "agree"),
        (7, "write"),
        (11, "agree"),
    ]


def test_a_schedule_of_zeros_and_ones_is_a_timetable() -> None:
    assert [bool(events) for events in happens([Exchange(Mean(), SyncWeight([0, 1, 0, 1]))], run_facts(4))] == [
        False, True, False, True,
    ]  # fmt: skip


def test_gradients_are_exchanged_within_the_step() -> None:
    table = Strategy("sgd", [Exchange(Mean(), of="gradients")], lr=0.1).timetable(run_facts(2))
    assert [[event.what for event in events] for events in table.ticks()] == [["train_jointly"], ["train_jointly"]]


# ------------------------------------------------------------------------------------------- settings and their checks


def test_settings_are_compared_by_value_and_shown_as_they_are_made() -> None:
    made: list[Callable[[], Any]] = [
        lambda: Exchange(Outer(Compressed(Mean(2), TopK(0.1)), OptimSpec("sgd", lr=0.5)), every=5),
        lambda: Exchange(Sparse(PartitionedSelector(0.2), Mean()), delay=2, late="change"),
        lambda: Exchange(Mix("torus"), SyncWeight([0, 1])),
        lambda: Exchange(Outer(Mean()), Rounds(6, offset=2), keep=torch.tensor([0.1, 0.2])),
        lambda: Exchange(NoLoCo(gamma=0.7), 3),
    ]
    for i, make in enumerate(made):
        assert make() == make()
        assert all(make() != other() for other in made[:i])
    assert repr(made[0]()) == (
        "Exchange(Outer(Compressed(Mean(island_size=2), TopK(fraction=0.1, k=None)), optim=OptimSpec(SGD, lr=0.5)), "
        "every=5)"
    )
    assert repr(made[1]()) == "Exchange(Sparse(PartitionedSelector(p=0.2), Mean()), delay=2, late='change')"


WRONG: dict[str, Callable[[], Any]] = {
    "how is the class": lambda: Exchange(Mean),  # type: ignore[arg-type]
    "every=0 must be an integer >= 1": lambda: Exchange(Mean(), every=0),
    "keep=1.5 must be a number in": lambda: Exchange(Mean(), keep=1.5),
    "says when all exchange": lambda: Exchange(Mean(), SyncWeight([0, 1]), fragments=2),
    "is applied in part": lambda: Exchange(Compressed(Mean(), "int8"), SyncWeight([0.5, 1])),
    "by all nodes, as a whole": lambda: Exchange(Mean(), of="gradients", participation=0.5),
    "used at once": lambda: Exchange(Mean(), of="gradients", delay=1),
    "has no effect": lambda: Exchange(Mean(), late="change"),
    "of which all is added": lambda: Exchange(Mean(), delay=1, late="change", keep=0.5),
    "a change is each node's own": lambda: Exchange(ServerMean(), delay=1, late="change", participation=0.5),
    "is no When": lambda: Exchange(Mean(), type("Often", (), {"due": lambda self, step: True})()),
    "needs a server": lambda: Exchange(Mean(), participation=0.5, resting="take"),
    "is never lost": lambda: Exchange(ServerMean(), lost=0.5, participation=0.5),
    "must be smaller than every=2": lambda: Exchange(Mean(), lambda t: 3 - (t > 6), delay=[0] * 5 + [2]).check(
        run_facts()
    ),
    "a delay for each node, .* need rounds": lambda: Exchange(Mean(), SyncWeight([1] * T), delay=[0] * 5 + [2]),
    "must be smaller than every=3": lambda: Exchange(Outer(Mean()), 3, delay=[0, 3]),
    "offsets=\\[1\\]: give a list": lambda: Exchange(Mean(), 3, fragments=2, offsets=[1]),
    "messages that take a round to arrive, need rounds": lambda: Exchange(Eager(Mean()), SyncWeight([0, 1])),
    "the same on all: average over all": lambda: Exchange(
        Compressed(Mean(), "topk", reference=True), participation=0.5
    ),
    "median over all nodes": lambda: Exchange(Outer(Mean(), correct="median_norm"), participation=0.5),
    "needs the outer momentum": lambda: Outer(Mean(), OptimSpec("sgd", lr=1.0), correct="heloco"),
    "one outer step within another": lambda: Outer(Eager(Mean())),
    "trim goes with": lambda: Robust("median", trim=1),
    "leaves out all values": lambda: Exchange(Robust("trimmed_mean", trim=1), participation=0.3).check(run_facts()),
    "is larger than the 3 nodes": lambda: Exchange(Mean(4), participation=0.5).check(run_facts()),
    "those of absent nodes": lambda: Exchange(EF21(Mean(), "topk")).check(run_facts(T, TABLE)),
    "not smaller than the run's": lambda: Exchange(Mean(), delay=T).check(run_facts()),
    "delay is for 3 nodes": lambda: Exchange(Outer(Mean()), 5, delay=[0, 1, 2]).check(run_facts()),
    "cut into 1 fragments": lambda: Exchange(Mean(), 5, fragments=None, offsets=[1, 2, 3]).check_present(run_facts()),
    "sync_weight has 2 weights": lambda: Exchange(Mean(), SyncWeight([0, 1])).check(run_facts()),
    "not symmetric": lambda: Exchange(Mix(torch.eye(K).roll(1, 0))).check(run_facts(T, TABLE)),
    "has state for each slot": lambda: Exchange(Compressed(Mean(), "topk"), of="moments").init(
        {name: torch.zeros(1, 2) for name in NAMES}, run_facts()
    ),
    "keeps state that is not one": lambda: Exchange(Sparse(0.1, Compressed(Mean(), "powersgd"))).init(
        {name: torch.zeros(1, 40, 40) for name in NAMES}, run_facts()
    ),
    "exchanges the gradients of all": lambda: Strategy(
        "sgd", [Exchange(Mean(), of="gradients"), Exchange(Mean(), participation=0.5)], lr=0.1
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_mistakes_are_refused(message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        WRONG[message]()


def test_exchanges_that_draw_nodes_need_equal_rounds() -> None:
    def both(*offsets: int) -> Strategy:
        how = [Exchange(Mean(), Rounds(4, offset=offset), participation=0.5) for offset in offsets]
        return Strategy("sgd", how, lr=0.1)

    assert len(both(2, 2).exchanges) == 2
    with pytest.raises(ValueError, match="sample nodes in different rounds"):
        both(2, 3)


def test_the_length_of_a_round_is_asked_once() -> None:
    """Of fragments, whose times are made anew in each step, too."""
    begins: list[int] = []
    exchange = Exchange(Mean(), lambda step: begins.append(step) or 3, fragments=2)  # type: ignore[func-returns-value]
    names = ["h.0.w", "h.1.w"]
    due = [[when.due(step) for when in exchange.times(names)] for step in range(9)]
    assert due == [[True, False], [False, False], [False, True]] * 3
    assert begins == [0, 3, 6]


# ----------------------------------------------------------------------------------------------- what they compute


def make_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return Classifier(nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))).to(dtype)


def batch_of(node: int, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1000 * node + count)
    return torch.randn(B, 12, generator=g, dtype=dtype), torch.randint(0, 4, (B,), generator=g)


def reading(dtype: torch.dtype) -> Callable[[Iterator[Any]], Iterator[Any]]:
    def read(requests: Iterator[Any]) -> Iterator[Any]:
        for rows, counts in requests:
            each = [counts] * len(rows) if isinstance(counts, int) else counts
            batches = [batch_of(row, count, dtype) for row, count in zip(rows, each)]
            yield tuple(torch.stack(x) for x in zip(*batches)), None

    return read


def outcome(simulation: Simulation, pure: bool = False) -> tuple[Tree, list[Any]]:
    rows: list[Any] = []
    state = run(simulation, simulation.init(), [lambda state, row: rows.append(row)], pure=pure)
    params = simulation.result(state).params
    simulation.close()
    return {name: x.expand(K, *x.shape[1:]) for name, x in params.items()}, [x for row in rows for x in row.transfers]


def engine_of(dtype: torch.dtype) -> Engine:
    engine = Engine(make_model(dtype), engine="vmap", node_threads=1)
    engine.prepare(next(reading(dtype)(iter([(list(range(K)), 0)])))[0])
    return engine


def ours(strategy: Any, dtype: torch.dtype, table: Tensor | None = None, pure: bool = False) -> tuple[Tree, list[Any]]:
    facts, comm = run_facts(T, table), StackedCollectives(K)
    return outcome(Simulation(engine_of(dtype), strategy, facts, comm, reading(dtype)), pure)


SGD = OptimSpec("sgd", lr=1.0)
WEIGHTS = torch.linspace(0, 1, T, dtype=torch.float64) * (torch.arange(T) % 3 == 2)
PER_STEP = torch.linspace(0.2, 0.9, 4, dtype=torch.float64)[:, None]  # a rate for each of four exchanges


def adamw(*exchanges: Exchange) -> Callable[[], Strategy]:
    return lambda: Strategy("adamw", exchanges, lr=1e-2)


def streaming(how: Any, **options: Any) -> Callable[[], Strategy]:
    outer = OptimSpec("sgd", lr=0.4, momentum=0.9, nesterov=True)
    return adamw(Exchange(Outer(how, outer), 6, **{"delay": 2, "keep": 0.5, "fragments": FRAGMENTS, **options}))


def sent_as(*args: Any, **options: Any) -> Compressed:
    return Compressed(*args, purpose="compress parameters", **options)


E3M0 = StreamingDiLoCoStrategy(bits=4).exchanges[0].how.inner.codec
SPARSELOCO = SparseLoCoStrategy(k=4, chunk=16).exchanges[0].how.inner.codec
DELAYS = [1, 2, 1, 3, 1, 2]

EXPRESSIONS: dict[str, Callable[[], Strategy]] = {
    "AllReduce": adamw(Exchange(Mean(), of="gradients")),
    "AllReduce, clipped": lambda: Strategy(
        "adamw", [Exchange(Mean(), of="gradients")], lr=1e-2, max_norm=0.5, warmup_steps=3
    ),
    "AllReduce, weighted": adamw(Exchange(Mean(weighting="examples"), of="gradients")),
    "AllReduce, top-k": adamw(Exchange(Compressed(Mean(), TopK(0.1), purpose="compress gradients"), of="gradients")),
    "AllReduce, top-k with momentum": adamw(
        Exchange(Compressed(Mean(), TopK(0.1), momentum=0.9, decay=0.9), of="gradients")
    ),
    "AllReduce, every second step": adamw(Exchange(Mean(), every=2, of="gradients")),
    "gradients in islands, then FedAvg": adamw(Exchange(Mean(2), of="gradients"), Exchange(Mean(), 4)),
    "FedAvg": adamw(Exchange(Mean(), 3)),
    "FedAvg, weighted": adamw(Exchange(Mean(weighting="examples"), 3)),
    "FedAvg, islands of 2": adamw(Exchange(Mean(2), 3)),
    "FedAvg, islands of 4": adamw(Exchange(Mean(4), 3)),
    "FedAvg, H a function": adamw(Exchange(Mean(), lambda step: 1 + step // 4)),
    "FedAvg, half take part, keep": adamw(Exchange(Mean(), 3, participation=0.5)),
    "FedAvg, half take part, islands": adamw(Exchange(Mean(2), 3, participation=0.5)),
    "FedAvg, half take part, weighted": adamw(Exchange(Mean(weighting="examples"), 3, participation=0.5)),
    "FedAvg, half take part, server": adamw(Exchange(ServerMean(), 3, participation=0.5)),
    "FedAdam, half take part": adamw(
        Exchange(Outer(ServerMean(), ServerOptimizer("adam", lr=0.01).spec), 3, participation=0.5)
    ),
    "FedAdam": adamw(Exchange(Outer(ServerMean(), ServerOptimizer("adam", lr=0.01).spec), 3)),
    "outer steps of half": adamw(Exchange(Outer(Mean()), 3, participation=0.5)),
    "outer steps of half, a server, int8": adamw(
        Exchange(Outer(Compressed(ServerMean(), "int8"), SGD), 3, participation=0.5)
    ),
    "FedAvg, sync_weight": adamw(Exchange(Mean(), SyncWeight(WEIGHTS))),
    "FedAvg, top-k of differences": adamw(Exchange(sent_as(Mean(), TopK(0.1), reference=True), 3)),
    "DiLoCo": adamw(Exchange(Outer(Mean()), 5)),
    "DiLoCo, a rate for each exchange": adamw(Exchange(Outer(Mean(), OptimSpec("sgd", lr=PER_STEP)), 5)),
    "DiLoCo, AdamW": adamw(Exchange(Outer(Mean(), OptimSpec("adamw", lr=0.01)), 5)),
    "DiLoCo, int8": adamw(Exchange(Outer(sent_as(Mean(), "int8")), 5)),
    "DiLoCo, int8 at random": adamw(Exchange(Outer(sent_as(Mean(), Quantise(8, stochastic=True))), 5)),
    "DiLoCo, top-k": adamw(Exchange(Outer(sent_as(Mean(), TopK(0.1))), 5)),
    "DiLoCo, PowerSGD": adamw(Exchange(Outer(sent_as(Mean(), PowerSGD(2))), 5)),
    "DiLoCo, EF21": adamw(Exchange(Outer(EF21(Mean(), TopK(0.1))), 5)),
    "DiLoCo, heloco": adamw(Exchange(Outer(Mean(), correct="heloco"), 5)),
    "DiLoCo, bfloat16 in a ring": adamw(Exchange(Outer(Ring("bfloat16")), 5)),
    "gradients, eight bits all to all": adamw(Exchange(AllToAll(), of="gradients")),
    "DiLoCo, median norm": adamw(Exchange(Outer(Mean(), correct="median_norm"), 5)),
    "DiLoCo, trimmed mean": adamw(Exchange(Outer(Robust("trimmed_mean", trim=1)), 5)),
    "DiLoCo, median of codes": adamw(Exchange(Outer(Compressed(Robust("median"), TopK(0.5))), 5)),
    "DiLoCo in islands": adamw(Exchange(Outer(Mean(2)), 5)),
    "DiLoCo in islands, top-k": adamw(Exchange(Outer(Compressed(Mean(2), TopK(0.1))), 5)),
    "DiLoCo, messages lost": adamw(Exchange(Outer(Mean()), 3, lost=0.6)),
    "DiLoCo, messages lost, top-k": adamw(Exchange(Outer(Compressed(Mean(), TopK(0.1))), 3, lost=0.4)),
    "DiLoCo in islands, messages lost": adamw(Exchange(Outer(Mean(2)), 3, lost=0.4)),
    "half take part, messages lost": adamw(Exchange(Mean(), 3, participation=0.5, lost=0.4)),
    "SPARTA, delay 3, messages lost": adamw(Exchange(Sparse(0.1, Mean()), delay=3, lost=0.5)),
    "gossip, 2 late as a change, messages lost": adamw(Exchange(Mix("ring"), delay=2, late="change", lost=0.4)),
    "DiLoCo, two lie": adamw(Exchange(Outer(Corrupted(Robust("median"), [1, 4], torch.neg)), 5)),
    "DiLoCo, private": adamw(Exchange(Outer(Private(Mean(), clip=0.5, noise=0.1)), 5)),
    "gradients, private": adamw(Exchange(Private(Mean(), clip=0.5, noise=0.1), of="gradients")),
    "gradients, two lie": adamw(Exchange(Corrupted(Robust("trimmed_mean", trim=1), [1]), of="gradients")),
    "a median in islands": adamw(Exchange(Robust("median", island_size=3), 3)),
    "DiLoCo, sync_weight": adamw(Exchange(Outer(Mean()), SyncWeight(WEIGHTS))),
    "DiLoCo, sync_weight, 2 late": adamw(Exchange(Outer(Mean()), SyncWeight(WEIGHTS), delay=2)),
    "SPARTA, sync_weight, a late change": adamw(
        Exchange(Sparse(0.3, Mean()), SyncWeight(WEIGHTS), delay=2, late="change")
    ),
    "DiLoCo, AdamW, some steps": adamw(
        Exchange(Outer(Mean(), OptimSpec("adamw", lr=0.01)), SyncWeight([0, 0, 0, 1] * 5))
    ),
    "DiLoCo, AdamW, sync_weight": adamw(Exchange(Outer(Mean(), OptimSpec("adamw", lr=0.01)), SyncWeight(WEIGHTS))),
    "DiLoCo, 4 late": adamw(Exchange(Outer(Mean()), 3, delay=4)),
    "DiLoCo, 2 late as a change": adamw(Exchange(Outer(Mean()), 3, delay=2, late="change")),
    "SparseLoCo": adamw(Exchange(Outer(Compressed(Mean(), SPARSELOCO, decay=0.95), SGD), 5)),
    "Streaming DiLoCo": streaming(Mean()),
    "Streaming DiLoCo, 4 bits": streaming(Compressed(Mean(), E3M0, error_feedback=False)),
    "Streaming DiLoCo, a delay for each node": streaming(Mean(), delay=DELAYS),
    "Streaming DiLoCo, alpha for each node": streaming(Mean(), keep=torch.linspace(0, 1, K)),
    "Streaming DiLoCo, offsets": streaming(Mean(), offsets=[2, 5]),
    "Streaming DiLoCo, H a function": adamw(
        Exchange(Outer(Mean()), lambda step: 4 + step // 4, delay=2, keep=0.5, fragments=FRAGMENTS)
    ),
    "Eager DiLoCo": adamw(Exchange(Eager(Mean()), 5)),
    "Eager DiLoCo, H a function": adamw(Exchange(Eager(Mean()), lambda step: 2 + step // 4)),
    "NoLoCo": adamw(Exchange(NoLoCo(), 5)),
    "NoLoCo, groups of 4, a rate for each node": adamw(Exchange(NoLoCo(4, lr=torch.linspace(0.1, 0.9, K)), 5)),
    "SPARTA": adamw(Exchange(Sparse(0.1, Mean()))),
    "SPARTA, partitioned": adamw(Exchange(Sparse(PartitionedSelector(0.2), Mean()))),
    "SPARTA, scheduled, every second step": adamw(Exchange(Sparse(ScheduledSelector(0.2, 5), Mean()), unit=2)),
    "SPARTA, 8 bits": adamw(Exchange(Sparse(0.1, Compressed(Mean(), Quantise(8), error_feedback=False)))),
    "SPARTA, int8 with error feedback": adamw(Exchange(Sparse(0.1, Compressed(Mean(), Quantise(8))))),
    "SPARTA of differences": adamw(Exchange(Sparse(0.1, Compressed(Mean(), TopK(0.5), reference=True)))),
    "SPARTA, delay 3": adamw(Exchange(Sparse(0.1, Mean()), delay=3)),
    "LOSCAR": adamw(Exchange(Sparse(0.1, Mean()), delay=2, late="change")),
    "SPARTA, top-k": adamw(Exchange(MostMoved(0.1))),
    "SPARTA, top-k, 8 bits, late": adamw(Exchange(MostMoved(0.1, bits=8), 2, delay=3)),
    "SPARTA in islands, late": adamw(Exchange(Sparse(0.1, Mean(2)), delay=2)),
    "SPARTA + DiLoCo": adamw(Exchange(Sparse(0.1, Mean())), Exchange(Outer(Mean()), 5)),
    "late SPARTA + DiLoCo": adamw(Exchange(Sparse(0.1, Mean()), 2, delay=3), Exchange(Outer(Mean()), 5)),
    "gossip, ring": adamw(Exchange(Mix("ring"))),
    "gossip, random pairs": adamw(Exchange(Mix("random_matching"), 2)),
    "gossip, one peer, exponential": adamw(Exchange(Mix("one_peer_exponential"))),
    "gossip, int8": adamw(Exchange(sent_as(Mix("ring"), "int8", error_feedback=False))),
    "gossip, 2 late as a change": adamw(Exchange(Mix("ring"), delay=2, late="change")),
    "gossip, 2 late": adamw(Exchange(Mix("ring"), delay=2)),
    "averaging, 3 late, every 2": adamw(Exchange(Mean(), 2, delay=3)),
    "averaging, in units of 2, 1 late": adamw(every(2, Exchange(Mean(2), 3, delay=1))),
    "gossip, late SPARTA and DiLoCo": adamw(
        Exchange(Mix("ring"), 2), Exchange(Sparse(0.1, Mean()), 3, delay=4), Exchange(Outer(Mean()), 5)
    ),
    "LocalAdam": adamw(Exchange(Mean(), 4, of="moments"), Exchange(Mean(), 4)),
    "DES-LOC": adamw(Exchange(Mean(), 6, of="exp_avg"), Exchange(Mean(), 12, of="exp_avg_sq"), Exchange(Mean(), 2)),
    "moments, top-k": adamw(Exchange(Compressed(Mean(), TopK(0.2)), 3, of=["exp_avg", "exp_avg_sq"])),
}

# What differs in the last bits, and why.


def gap(a: Tree, b: Tree) -> float:
    return max(float((x.double() - b[name].double()).abs().max()) for name, x in a.items())


SAME: dict[str, tuple[Exchange, Exchange]] = {
    "Eager DiLoCo": (Exchange(Eager(Mean()), 3), Exchange(Eager(Mean()), lambda step: 3)),
    "fragments": (
        Exchange(Outer(Mean()), 4, fragments=FRAGMENTS, delay=2),
        Exchange(Outer(Mean()), lambda step: 4, fragments=FRAGMENTS, delay=2),
    ),
    "weights of 1, late": (
        Exchange(Mean(), delay=2), Exchange(Mean(), SyncWeight(torch.ones(T, requires_grad=True)), delay=2),
    ),
    "weights of 1, a late change": (
        Exchange(Outer(Mean()), delay=2, late="change"),
        Exchange(Outer(Mean()), SyncWeight(torch.ones(T, requires_grad=True)), delay=2, late="change"),
    ),
    "in part, an outer optimizer without a state": (
        Exchange(Mean(), SyncWeight(WEIGHTS)), Exchange(Outer(Mean(), OptimSpec("sgd", lr=1.0)), SyncWeight(WEIGHTS)),
    ),
    "some steps, late": (
        Exchange(Outer(Mean()), 2, delay=3), Exchange(Outer(Mean()), SyncWeight([0, 1] * 10), delay=3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("name", SAME)
def test_said_in_another_way(name: str, absent: bool) -> None:
    table = TABLE if absent else None
    (a, sent), (b, sent_too) = (ours(adamw(exchange)(), torch.float64, table) for exchange in SAME[name])
    assert gap(a, b) < 1e-12
    assert [(x.lag, x.payload_bytes) for x in sent] == [(x.lag, x.payload_bytes) for x in sent_too]


def test_fragments_have_their_turns_in_rounds_of_any_length() -> None:
    exchange = Exchange(Mean(), lambda step: 4 if step < 8 else 6, fragments=FRAGMENTS)
    first, second = exchange.times(NAMES)
    assert [step for step in range(20) if first.due(step)] == [1, 5, 10, 16]
    assert [step for step in range(20) if second.due(step)] == [3, 7, 13, 19]
    assert [first.count(step) for step in (0, 1, 2, 5, 6, 9, 10, 11)] == [0, 0, 1, 1, 2, 2, 2, 3]


@pytest.mark.parametrize("late", ["value", "change"])
def test_a_late_exchange_in_part(late: str) -> None:
    """By hand: x <- (1 - a) x + a m, with the mean m of two steps before; or x <- x + a (m - y) of that time."""
    weights = torch.linspace(0, 1, 6, dtype=torch.float64).roll(3)
    strategy = Strategy("sgd", [Exchange(Mean(), SyncWeight(weights), delay=2, late=late)], lr=0.1)
    params = {name: p.detach().expand(K, *p.shape) for name, p in make_model(torch.float64).named_parameters()}
    messages = []
    for step in range(6):
        for i in range(K):
            own = {name: x[i].clone().requires_grad_() for name, x in params.items()}
            loss = torch.func.functional_call(make_model(torch.float64), own, (batch_of(i, step, torch.float64),))
            grads = torch.autograd.grad(loss, list(own.values()))
            for (name, x), grad in zip(own.items(), grads):
                params[name] = params[name].clone()
                params[name][i] = x.detach() - 0.1 * grad
        messages.append({name: (x.mean(0), x) for name, x in params.items()})
        if step >= 2 and weights[step - 2]:
            a = weights[step - 2]
            for name, (mean, old) in messages[step - 2].items():
                x = params[name]
                params[name] = (1 - a) * x + a * mean if late == "value" else x + a * (mean - old)
    simulation = simulation_with(strategy, num_steps=6)
    found = run(simulation, simulation.init()).params
    assert gap(found, params) < 1e-12


def test_where_all_are_present_an_exchange_in_part_does_not_know_of_availability() -> None:
    strategy = Strategy("sgd", [Exchange(Outer(Mean()), SyncWeight(WEIGHTS / 2), delay=1)], lr=0.1)
    with_presence, without = (ours(strategy, torch.float64, table)[0] for table in (torch.ones(T, K).bool(), None))
    assert gap(with_presence, without) == 0.0


REFUSED_ABSENT = ("DiLoCo, EF21", "DiLoCo, trimmed mean", "gradients, two lie")  # by both


# ------------------------------------------------------------------------------------ what no strategy of today shows


def simulation_with(strategy: Any, table: Tensor | None = None, num_steps: int = T) -> Simulation:
    facts = run_facts(num_steps, table)
    return Simulation(engine_of(torch.float64), strategy, facts, StackedCollectives(K), reading(torch.float64))


@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_a_run_goes_on_from_a_file(name: str, absent: bool) -> None:
    """Messages, residuals and selectors under way are in the state, and nothing else is."""
    if absent and name in REFUSED_ABSENT:
        return
    ends = []
    for half in (None, 11):
        simulation = simulation_with(EXPRESSIONS[name](), TABLE if absent else None)
        state = run(simulation, simulation.init(), stop=lambda state: state.tick == half)  # noqa: B023
        if half is not None:
            torch.save(vars(state), file := io.BytesIO())
            saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
            simulation = simulation_with(EXPRESSIONS[name](), TABLE if absent else None)
            state = run(simulation, State(**saved))
        ends.append(list(tree.leaves([state.own, state.shared])))
    assert len(ends[0]) == len(ends[1])
    assert all(map(torch.equal, *ends))


OVERWRITING: dict[str, Callable[[], Strategy]] = {  # what could overwrite what is still needed
    "eager gossip": adamw(Exchange(Eager(Mix("ring")), 3)),
    "outer gossip": adamw(Exchange(Outer(Mix("ring")), 3)),
    "outer steps of differences": adamw(
        Exchange(Outer(Compressed(Mean(), TopK(0.3), reference=True), OptimSpec("sgd", lr=0.5, weight_decay=0.1)), 3)
    ),
    "gossip, a part is kept": adamw(Exchange(Mix("ring"), 2, keep=0.3)),
    "gossip, late, a part is kept": adamw(Exchange(Mix("ring"), 2, delay=1, keep=0.3)),
    "SPARTA, a part is kept": adamw(Exchange(Sparse(0.3, Mean()), keep=0.4)),
    "SPARTA, late, a part is kept": adamw(Exchange(Sparse(0.3, Mean()), delay=1, keep=0.4)),
    "gossip of lies": adamw(Exchange(Corrupted(Mix("ring"), [1]), 2)),
    "a centre": adamw(Exchange(Robust("centred_clipping", tau=0.1), 2)),
    "a centre of some coordinates, late": adamw(Exchange(Sparse(0.3, Robust("centred_clipping", tau=0.1)), 2, delay=1)),
    "lies of those who know": adamw(Exchange(Outer(Corrupted(Robust("krum", f=2), [1, 3], "mimic")), 2)),
    "lies about some coordinates": adamw(Exchange(Corrupted(Sparse(0.3, Mean()), [1]), 2)),
    "private gossip of moments": adamw(Exchange(Private(Mix("ring"), clip=1.0, noise=0.0), 2, of="exp_avg")),
    "fragments of SPARTA": adamw(Exchange(Sparse(0.3, Mean()), 4, fragments=2, delay=1)),
}


def bytes_sent(transfers: Sequence[Transfer]) -> float:
    return float(sum(transfer.per_node[0] for transfer in transfers))


@pytest.mark.parametrize("name", [*EXPRESSIONS, *OVERWRITING])
def test_out_of_place_the_same(name: str) -> None:
    strategy = OVERWRITING[name] if name in OVERWRITING else EXPRESSIONS[name]
    (found, sent), (wanted, before) = ours(strategy(), torch.float64, pure=True), ours(strategy(), torch.float64)
    # Of second moments the code leaves out most, and Adam divides by them.
    assert gap(found, wanted) < (1e-9 if name == "moments, top-k" else 1e-12)
    assert bytes_sent(sent) == pytest.approx(bytes_sent(before)) or "sync_weight" in name


@pytest.mark.parametrize("outer", [Outer, Eager])
def test_gossip_with_everyone_is_a_mean(outer: Any) -> None:
    (found, _), (wanted, _) = (
        ours(adamw(Exchange(outer(how), 3))(), torch.float64) for how in (Mix("complete"), Mean())
    )
    assert gap(found, wanted) < 1e-12


def test_messages_that_nobody_can_take_are_forgotten_when_they_are_due() -> None:
    present = torch.ones(8, 2).bool()
    present[0], present[1] = torch.tensor([True, False]), torch.tensor([False, True])
    presence = Presence(Trace(present), Facts(2, 8, seed=42))
    facts = RunFacts(2, 8, 42, presence, None, names=NAMES)
    for how in (Mean(), Mix("complete"), Sparse(0.5, Mean())):
        strategy = Strategy("sgd", [Exchange(how, every=3, offsets=[1], delay=1)], lr=0.1)
        simulation = Simulation(
            engine_of(torch.float64), strategy, facts, StackedCollectives(2), reading(torch.float64)
        )
        left = []
        run(simulation, simulation.init(), [lambda state, row: left.append(under_way(state))])  # noqa: B023
        assert [bool(names) for names in left] == [True, False, False, True, False, False, True, False]


def under_way(state: State) -> list[str]:
    return [name for name in (*state.own, *state.shared) if "message" in name or "notes" in name]


def test_what_all_share_changes_when_nobody_can_take_it() -> None:
    """The outer step of nodes that have left is taken all the same, and they are not moved."""
    present = torch.tensor([[1, 0], [0, 1], [1, 1]]).bool()
    facts = RunFacts(2, 3, 42, Presence(Trace(present), Facts(2, 3, seed=42)), None, names=NAMES)
    strategy = Strategy("sgd", [Exchange(Outer(Mean(), SGD), every=3, offsets=[1], delay=1)], lr=0.1)
    simulation = Simulation(engine_of(torch.float64), strategy, facts, StackedCollectives(2), reading(torch.float64))
    first = simulation.init()
    begin = {name: x.clone() for name, x in first.params.items()}
    states = []
    run(simulation, first, [lambda state, row: states.append(tree.map_leaves(torch.clone, vars(state)))])
    outer = states[1]["shared"]["0.0/params"]["net.0.weight"][0]
    moved = states[0]["own"]["params"]["net.0.weight"]
    assert torch.equal(moved[1], begin["net.0.weight"][1])
    assert torch.allclose(outer, moved[0])  # of the only node that was there
    assert torch.equal(states[1]["own"]["params"]["net.0.weight"][0], moved[0])


# ------------------------------------------------------------------------------------------------------- derivatives


def final_loss(make: Callable[[Tensor], Strategy], number: Tensor, num_steps: int = 6) -> Tensor:
    """The loss on a batch after a few steps, as a function of a setting."""
    dtype, facts = torch.float64, run_facts(num_steps)
    engine = engine_of(dtype)
    simulation = Simulation(engine, make(number), facts, StackedCollectives(K), reading(dtype))
    state = run(simulation, simulation.init(), pure=True)
    mean = {name: x.mean(0) for name, x in simulation.result(state).params.items()}
    loss: Tensor = torch.func.functional_call(make_model(dtype), mean, (batch_of(99, 0, dtype),))
    simulation.close()
    return loss


def nesterov(lr: Any) -> OptimSpec:
    return OptimSpec("sgd", lr=lr, momentum=0.9, nesterov=True)


SETTINGS: dict[str, tuple[Any, Callable[[Tensor], Strategy]]] = {
    "outer rate": (0.5, lambda lr: Strategy("adamw", [Exchange(Outer(Mean(), nesterov(lr)), 2)], lr=1e-2)),
    "outer rate, late": (
        0.5, lambda lr: Strategy("adamw", [Exchange(Outer(Mean(), nesterov(lr)), 2, delay=1)], lr=1e-2),
    ),
    "outer rates of each exchange": (
        [[0.5], [0.4], [0.3]], lambda lr: Strategy("adamw", [Exchange(Outer(Mean(), nesterov(lr)), 2)], lr=1e-2),
    ),
    "sync_weight": (
        [0.1, 0.9, 0.3, 0.5, 0.8, 0.2],
        lambda w: Strategy("adamw", [Exchange(Mean(), SyncWeight(w))], lr=1e-2),
    ),
    "sync_weight of outer steps": (
        [0.1, 0.9, 0.3, 0.5, 0.9, 0.2], lambda w: Strategy("adamw", [Exchange(Outer(Mean()), SyncWeight(w))], lr=1e-2),
    ),
    "sync_weight, late": (
        [0.1, 0.9, 0.3, 0.5, 0.8, 0.2],
        lambda w: Strategy("adamw", [Exchange(Outer(Mean()), SyncWeight(w), delay=2)], lr=1e-2),
    ),
    "sync_weight, a late change": (
        [0.1, 0.9, 0.3, 0.5, 0.8, 0.2],
        lambda w: Strategy("adamw", [Exchange(Mean(), SyncWeight(w), delay=1, late="change")], lr=1e-2),
    ),
    "what each node keeps": (
        [0.1, 0.3, 0.5, 0.6, 0.7, 0.8],
        lambda keep: Strategy("sgd", [Exchange(Mean(), 2, keep=keep)], lr=0.1),
    ),
    "gamma": (0.8, lambda gamma: Strategy("sgd", [Exchange(NoLoCo(gamma=gamma), 2)], lr=0.1)),
    "inner rate, through late SPARTA": (
        0.1,
        lambda lr: Strategy("sgd", [Exchange(Sparse(0.3, Mean()), delay=2)], lr=lr),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_derivatives_are_those_of_differences(name: str) -> None:
    value, make = SETTINGS[name]
    number = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(final_loss(make, number), number)
    for i in range(number.numel()):
        step = torch.zeros_like(number).flatten().index_fill(0, torch.tensor(i), 1e-6).view_as(number)
        difference = (final_loss(make, (number + step).detach()) - final_loss(make, (number - step).detach())) / 2e-6
        assert float(slope.flatten()[i]) == pytest.approx(float(difference), rel=1e-4, abs=1e-9)


class Rounded(Codec):
    """Values in float32: a code of which all derivatives would be lost, and nearly nothing else."""

    def encode(self, x: Tensor, draw: Any = None) -> Tree:
        return {"values": x.detach().float()}

    def decode(self, code: Tree, like: Tensor) -> Tensor:
        return code["values"].to(like.dtype)


@pytest.mark.parametrize("coded", [Compressed, EF21])
@pytest.mark.parametrize("of", ["parameters", "gradients"])
def test_a_code_passes_derivatives_straight_through(coded: Any, of: str) -> None:
    number = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    exact, told = (
        torch.autograd.grad(final_loss(lambda lr: Strategy("sgd", [Exchange(how, 2, of)], lr=lr), number), number)[0]  # noqa: B023
        for how in (Mean(), coded(Mean(), Rounded()))
    )
    assert float(told) == pytest.approx(float(exact), rel=1e-5)


# ------------------------------------------------------------------------------------------- groups of configurations


C = 3
RATES = torch.tensor([0.3, 0.5, 0.7], dtype=torch.float64)
OF_GROUPS: dict[str, Callable[[Any], Average]] = {  # of the rates of the configurations, or the rate of one
    "mean": lambda lr: Mean(),
    "weighted mean": lambda lr: Mean(weighting="examples"),
    "islands": lambda lr: Mean(2),
    "server": lambda lr: ServerMean(),
    "ring": lambda lr: Mix("ring"),
    "median": lambda lr: Robust("median"),
    "median in islands": lambda lr: Robust("median", island_size=4),
    "lies": lambda lr: Corrupted(Robust("trimmed_mean", trim=1), [1]),
    "krum in islands": lambda lr: Robust("krum", f=1, island_size=4),
    "nearest neighbours of buckets": lambda lr: Robust("multi_krum", f=1, m=1, nnm=True, bucketing=2),
    "smallest diameter": lambda lr: Robust("mda", f=2),
    "majority at a server": lambda lr: Robust("sign_majority", server=True),
    "geometric median": lambda lr: altered(Robust("geometric_median"), nu=4 * lr),
    "geometric median in islands": lambda lr: altered(Robust("geometric_median", island_size=2), nu=4 * lr),
    "clipped around a centre": lambda lr: Outer(altered(Robust("centred_clipping"), tau=4 * lr), nesterov(0.7)),
    "clipped median": lambda lr: altered(Robust("median", clip=1.0), clip=4 * lr),
    "clipped": lambda lr: altered(Robust("norm_clipping"), clip=4 * lr),
    "inner products": lambda lr: altered(Corrupted(Robust("median"), [1, 2], "ipm", strength=1.0), strength=lr),
    "a little": lambda lr: altered(Corrupted(Mean(), [4], "alie", strength=1.0), strength=lr),
    "noise": lambda lr: altered(Corrupted(Mean(), [4], "gaussian", strength=1.0), strength=lr),
    "a lie of one's own": lambda lr: Corrupted(Mean(), [0], lambda x, honest: -x[honest].sum(0)),
    "private": lambda lr: Private(Mean(), clip=1.0, noise=0.3),
    "top-k": lambda lr: Compressed(Mean(), TopK(0.3), momentum=0.5),
    "top-k of differences": lambda lr: Compressed(Mean(), TopK(0.3), reference=True),
    "top-k to a server, weighted": lambda lr: Compressed(ServerMean("examples"), TopK(0.3)),
    "8 bits at random": lambda lr: Compressed(Mean(), Quantise(8, stochastic=True)),
    "median of codes": lambda lr: Compressed(Robust("median"), TopK(0.5)),
    "EF21": lambda lr: EF21(Mean(), TopK(0.3)),
    "outer": lambda lr: Outer(Mean(), nesterov(lr)),
    "outer in islands": lambda lr: Outer(Mean(2), nesterov(lr)),
    "outer, AdamW": lambda lr: Outer(Mean(), OptimSpec("adamw", lr=lr)),
    "outer of codes": lambda lr: Outer(Compressed(Mean(), TopK(0.3)), nesterov(lr)),
    "eager": lambda lr: Eager(Mean(), nesterov(lr)),
    "noloco": lambda lr: NoLoCo(lr=lr),
    "ring of codes": lambda lr: Ring(Quantise(8, stochastic=True)),
    "outer of a ring": lambda lr: Outer(QuantisedRing(), nesterov(lr)),
    "all to all": lambda lr: AllToAll(),
    "sparse": lambda lr: Sparse(PartitionedSelector(0.3), Mean()),
    "sparse codes": lambda lr: Sparse(0.5, Compressed(Mean(), Quantise(8))),
    "sparse gossip": lambda lr: Sparse(0.5, Mix("ring")),
    "most moved": lambda lr: MostMoved(0.3),
    "most moved, 8 bits": lambda lr: MostMoved(0.3, bits=8),
}


def values_of(seed: int, num_rows: int = K) -> Tree:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(num_rows, *shape, generator=g, dtype=torch.float64) for name, shape in SHAPES.items()}


SHAPES = {"w": (3, 4), "b": (5,)}


def first(how: Average, values: Tree, inplace: bool) -> Memory:
    """The memory of an average before its first exchange, `[1, *]`."""
    memory = Memory(common=Stages(how).common, inplace=inplace)
    Stages(how).init(values, run_facts(), memory)
    return memory


def result(how: Average, x: Tree, part: Part, memory: Memory, change: bool) -> Tree:
    """The result of an average of values, or the change that it makes."""
    if not change:
        return how(x, part, memory)
    stages = Stages(how)
    y = stages.receive(stages.agree(x, part, memory), part, memory)
    return tree.map(torch.sub, y, stages.read(x, part, memory))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("change", [False, True])
@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize("name", OF_GROUPS)
def test_a_group_is_each_of_its_configurations(name: str, common: bool, change: bool, inplace: bool) -> None:
    """Three exchanges of `[C, K, *]`, or of `[C, 1, *]`, beside those of each configuration by itself."""
    values = [values_of(100 + c, 1) for c in range(C)]
    whole = OF_GROUPS[name](RATES)
    assert Exchange(whole).batched is not None
    memory = first(whole, tree.map(lambda *x: torch.cat(x), *values), inplace)  # what is `[1, *]` is each one's
    memory.shared = tree.map_leaves(lambda x: x.expand(C, *x.shape[1:]).unsqueeze(1).clone(), memory.shared)
    memory.own = tree.map_leaves(lambda x: x.unsqueeze(1).repeat_interleave(K, 1), memory.own)
    comm: Any = GroupCollectives(StackedCollectives(K), C)
    each = [OF_GROUPS[name](float(lr)) for lr in RATES]
    alone = [first(average, x, inplace) for average, x in zip(each, values)]
    comms = [StackedCollectives(K) for _ in each]
    for of_one in alone:
        of_one.shared = tree.map_leaves(torch.clone, of_one.shared)
        of_one.own = tree.map_leaves(lambda x: x.repeat_interleave(K, 0), of_one.own)
    for exchange in range(3):
        given = [values_of(10 * exchange + c, 1 if common else K) for c in range(C)]
        stacked = tree.map(lambda *x: torch.stack(x), *given)
        told: dict[str, Any] = {"number": exchange, "step": 2 * exchange + 1, "seed": 42, "num_examples": EXAMPLES}
        found = result(whole, stacked, Part.alone(comm, size=C, **told), memory, change)
        for c in range(C):
            wanted = result(each[c], given[c], Part.alone(comms[c], **told), alone[c], change)
            for of_group, y in zip(tree.leaves(found), tree.leaves(wanted), strict=True):
                z, y = torch.broadcast_tensors(of_group[c], y)
                assert torch.allclose(z, y, rtol=1e-12, atol=1e-14)
    assert comm.ledger.total_bytes == comms[0].ledger.total_bytes


@pytest.mark.parametrize("name", OF_GROUPS)
def test_without_values_the_same_is_sent(name: str) -> None:
    sent = []
    for device, comm in (("cpu", StackedCollectives(K)), ("meta", DryCollectives(K))):
        values = tree.map(lambda x: x.to(device), values_of(0))  # noqa: B023
        average = OF_GROUPS[name](0.5)
        memory = first(average, tree.map(lambda x: x[:1], values), inplace=device == "cpu")
        found = average(values, Part.alone(comm, num_examples=EXAMPLES), memory)
        assert {name: x.shape[1:] for name, x in found.items()} == {name: x.shape[1:] for name, x in values.items()}
        sent.append(comm.ledger.total_bytes)
    assert sent[0] == sent[1] > 0


@pytest.mark.parametrize(
    "average",
    [Compressed(Mean(), "powersgd"), Compressed(Mean(2), "int8"), Outer(Mean(), correct="median_norm"),
     Outer(Mean(), OptimSpec("muon", lr=0.1)), Sparse(0.1, Compressed(Mix(), "int8"))],
)  # fmt: skip
def test_what_cannot_be_in_a_group_says_so(average: Average) -> None:
    assert Exchange(average).batched is None
    assert (Exchange(Mean()).batched, Exchange(Mean()).delivery.batched) == ((), ("keep",))


# -------------------------------------------------------------------------------------------------------------- stacks


NODES_KEEP = torch.linspace(0, 1, K, dtype=torch.float64)
CODEC, SELECTOR = TopK(0.1), PartitionedSelector(0.2)  # compared as objects
HALVES = SyncWeight(torch.linspace(0, 1, T, dtype=torch.float64))
STACKED: dict[str, Callable[[float], list[Exchange]]] = {  # of a rate
    "AllReduce": lambda lr: [Exchange(Mean(), of="gradients")],
    "AllReduce, top-k": lambda lr: [Exchange(Compressed(Mean(), CODEC), of="gradients")],
    "islands": lambda lr: [Exchange(Mean(2), 3)],
    "a server, half take part": lambda lr: [Exchange(ServerMean(), 3, participation=0.5)],
    "outer steps of half": lambda lr: [Exchange(Outer(Mean(), nesterov(lr)), 3, participation=0.5)],
    "DiLoCo": lambda lr: [Exchange(Outer(Mean(), nesterov(lr)), 5)],
    "DiLoCo, a part is kept": lambda lr: [Exchange(Outer(Mean(), nesterov(lr)), 5, keep=lr / 2)],
    "DiLoCo, each node keeps a part": lambda lr: [Exchange(Outer(Mean(), nesterov(lr)), 5, keep=lr * NODES_KEEP)],
    "DiLoCo, top-k": lambda lr: [Exchange(Outer(Compressed(Mean(), CODEC), nesterov(lr)), 5)],
    "DiLoCo, PowerSGD": lambda lr: [Exchange(Outer(Compressed(Mean(), "powersgd"), nesterov(lr)), 5)],
    "DiLoCo, lost": lambda lr: [Exchange(Outer(Mean(), nesterov(lr)), 3, lost=0.5)],
    "DiLoCo, sync_weight": lambda lr: [Exchange(Outer(Mean(), nesterov(lr)), HALVES)],
    "streaming": lambda lr: [Exchange(Outer(Mean(), nesterov(lr)), 6, delay=2, fragments=FRAGMENTS, keep=0.5)],
    "streaming, delays": lambda lr: [Exchange(Outer(Mean(), nesterov(lr)), 6, delay=DELAYS, fragments=FRAGMENTS)],
    "eager": lambda lr: [Exchange(Eager(Mean(), nesterov(lr)), 5)],
    "NoLoCo": lambda lr: [Exchange(NoLoCo(lr=lr), 5)],
    "late SPARTA": lambda lr: [Exchange(Sparse(SELECTOR, Mean()), delay=3)],
    "LOSCAR": lambda lr: [Exchange(Sparse(SELECTOR, Mean()), delay=2, late="change")],
    "late top-k": lambda lr: [Exchange(MostMoved(0.1), delay=1)],
    "SPARTA + DiLoCo": lambda lr: [Exchange(Sparse(SELECTOR, Mean())), Exchange(Outer(Mean(), nesterov(lr)), 5)],
    "late gossip": lambda lr: [Exchange(Mix("ring"), 2, delay=2, late="change")],
    "moments": lambda lr: [Exchange(Mean(), 4, of="moments"), Exchange(Mean(), 4)],
}


@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("name", STACKED)
def test_a_stack_is_each_of_its_runs(name: str, absent: bool) -> None:
    table = TABLE if absent else None
    facts, make = (
        run_facts(T, table),
        lambda: [Strategy("adamw", STACKED[name](lr), lr=lr / 50) for lr in (0.3, 0.5, 0.7)],
    )
    order, groups = groups_of(make(), [facts] * 3)
    assert len(groups) == (3 if name == "DiLoCo, PowerSGD" else 1)

    def read(requests: Iterator[Any]) -> Iterator[Any]:
        for rows, counts in requests:
            each = [counts] * len(rows) if isinstance(counts, int) else counts
            batches = [batch_of(row % K, count, torch.float64) for row, count in zip(rows, each)]
            yield tuple(torch.stack(x) for x in zip(*batches)), None

    stack = Stack(engine_of(torch.float64), groups, StackedCollectives(K), read)
    state = run(stack, stack.init())
    for place, c in enumerate(order):
        wanted, _ = ours(make()[c], torch.float64, table)
        number, group = next((n, g) for n, g in enumerate(groups) if 0 <= place - g.first // K < g.size)
        held = state.shared[str(number)].get("params")
        first = place - group.first // K if held else place * K
        found = {n: x[first : first + (1 if held else K)] for n, x in (held or state.own["params"]).items()}
        assert gap({n: x.expand(K, *x.shape[1:]) for n, x in found.items()}, wanted) < 1e-13


# --------------------------------------------------------------------------------------------------- what a class says


def kind_of(base: type, body: dict[str, Any], **said: Any) -> Callable[[], Any]:
    return lambda: type(base)("Mine", (base,), body, **said)


def taking(*names: str) -> Callable[..., None]:
    """A method with these arguments."""
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *names)]

    def method(*args: Any) -> None: ...

    method.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return method


@pytest.mark.parametrize(
    ("base", "name", "arguments", "wanted"),
    [
        (Average, "agree", ("values", "at"), "agree(self, x, part, memory) instead of agree(self, values, at)"),
        (Average, "init", ("values", "run"), "init(self, values, run, memory) instead of init(self, values, run)"),
        (
            Average,
            "agree",
            ("x", "memory", "part"),
            "agree(self, x, part, memory) instead of agree(self, x, memory, part)",
        ),
        (Stage, "send", ("values", "at"), "send(self, x, part, memory) instead of send(self, values, at)"),
        (Stage, "write", ("y", "at"), "write(self, y, x, part, memory) instead of write(self, y, at)"),
        (Outer, "receive", ("y",), "receive(self, y, part, memory) instead of receive(self, y)"),
    ],
)
def test_methods_with_other_arguments_are_refused(base: type, name: str, arguments: Any, wanted: str) -> None:
    with pytest.raises(
        TypeError, match=re.escape(f"class Mine: give {wanted}") + ".*An average remembers in memory.own"
    ):
        kind_of(base, {name: taking(*arguments)})()


def test_any_method_that_can_be_called_is_taken() -> None:
    def agree(self: Any, *args: Any) -> Any: ...

    def receive(self: Any, y: Any, part: Any, memory: Any, more: int = 1) -> Any: ...

    own = {"settled": taking(), "ends": taking("x"), "sent": taking("x", "part", "memory")}  # near, and its own
    assert kind_of(Average, {"agree": agree, "receive": receive, **own})().batched is None


@pytest.mark.parametrize(("name", "arguments", "meant"), [("recieve", "y", "receive"), ("agere", "x", "agree")])
def test_a_method_that_is_misspelt_is_refused(name: str, arguments: str, meant: str) -> None:
    wanted = f"class Mine: {name}(self, {arguments}, part, memory) is never called; did you mean {meant!r}?"
    with pytest.raises(TypeError, match=re.escape(wanted)):
        kind_of(Stage, {name: taking(arguments, "part", "memory")})()


def test_only_a_stage_sends() -> None:
    """An average of its own would never be asked."""
    send = {"send": taking("x", "part", "memory")}
    assert kind_of(Stage, send)().batched is None
    for base in (Average, Mean):
        wanted = "class Mine: only a Stage sends: give class Mine(Stage), or use agree."
        with pytest.raises(TypeError, match=re.escape(wanted)):
            kind_of(base, send)()


@pytest.mark.parametrize(
    ("base", "body", "said", "message"),
    [
        (
            FedAvgStrategy,
            {},
            {"batched": ("mu",)},
            "batched=('mu',) names 'mu', which is no argument of its constructor: ",
        ),
        (
            FedAvgStrategy,
            {"batched": ("mu",)},
            {},
            "batched=('mu',) names 'mu', which is no argument of its constructor: ",
        ),
        (FedAvgStrategy, {"of_nodes": ("mu",)}, {}, "of_nodes=('mu',) names 'mu', which is no argument of its "),
        (FedAvgStrategy, {}, {"batched": "proximal_mu"}, "batched='proximal_mu' must be a tuple of names"),
        (
            Average,
            {"__init__": taking("lr")},
            {"batched": ("rate",)},
            "names 'rate', which is no argument of its constr",
        ),
        (Server, {}, {"batched": ("lr",)}, "batched=('lr',) names 'lr', which is no argument"),
        (Average, {}, {"random": None}, "random=None must be True or False"),
        (
            Server,
            {"update": taking("params", "movement", "state", "update")},
            {},
            "give update(self, params, movement, ",
        ),
    ],
)
def test_what_a_class_says_is_checked_when_it_is_made(base: type, body: Any, said: Any, message: str) -> None:
    with pytest.raises(TypeError, match=re.escape("class Mine: ") + ".*" + re.escape(message)):
        kind_of(base, body, **said)()


def test_what_a_class_says_of_itself_and_inherits() -> None:
    """Expressions alone, such as an __init__, are what the base is; other methods are for one configuration."""
    agree = taking("x", "part", "memory")
    said = {"batched": ["lr"], "random": False}
    each = [kind_of(NoLoCo, {}), kind_of(NoLoCo, {"__init__": taking()}), kind_of(NoLoCo, {"agree": agree}),
            kind_of(NoLoCo, {"agree": agree}, **said), kind_of(NoLoCo, {"agree": agree, **said})]  # fmt: skip
    found = [(cls.batched, cls.random) for cls in (make() for make in each)]
    of_base = ("lr", "momentum", "gamma"), True
    assert found == [of_base, of_base, (None, True), (("lr",), False), (("lr",), False)]


class Unheld(Average, batched=("factor",), random=False):
    def __init__(self, factor: float) -> None:
        self._factor = factor


def test_what_may_differ_is_held_under_its_name() -> None:
    strategies = [Strategy("sgd", [Exchange(Unheld(factor))], lr=0.1) for factor in (0.5, 0.6)]
    with pytest.raises(TypeError, match=r"class Unheld: .* names 'factor', .*: assign self\.factor in __init__"):
        groups_of(strategies, [run_facts()] * 2)


class Weighted(Average, batched=(), random=False):
    def __init__(self, weights: list[float]) -> None:
        self._weights = torch.tensor(weights)


def test_private_tensors_that_differ_are_two_groups() -> None:
    """The merged one would have the first one's."""
    strategies = [Strategy("sgd", [Exchange(Weighted(weights))], lr=0.1) for weights in ([1.0], [2.0], [1.0])]
    assert [group.size for group in groups_of(strategies, [run_facts()] * 3)[1]] == [2, 1]


@pytest.mark.parametrize("method", ["gradients", "optimize"])
@pytest.mark.parametrize("of", ["parameters", "gradients"])
def test_a_stage_does_not_train(method: str, of: str) -> None:
    """It has a copy of the event's part: what it trained would not be counted."""

    class Training(Stage):
        def send(self, x: Tree, part: Part, memory: Memory) -> Tree:
            getattr(part, method)(x)
            return x

    message = rf"part\.{method} in a stage or an average, .*: override `train` or `train_jointly`"
    with pytest.raises(TypeError, match=message):
        ours(Strategy("sgd", [Exchange(Training(Mean()), 2, of)], lr=0.1), torch.float64)
    with pytest.raises(TypeError, match=message):
        Training(Mean())({"w": torch.zeros(2, 1)}, Part.alone(StackedCollectives(2)))


# ---------------------------------------------------------------------------------------------- what a handler assigns


def rows_of(num_rows: int | None, whole: dict[str, Any] | None = None) -> StateView:
    """A view of four rows, of which an event has some; None: all."""
    held = {"params": {"w": torch.zeros(4, 3), "n": torch.zeros(4, dtype=torch.long)}, "seen": torch.zeros(4)}
    rows = StateView({**held, **(whole or {})}, None if num_rows is None else slice(0, num_rows), 4)
    rows.handler = "Mine.pull"
    return rows


FIT: dict[str, Callable[[StateView], tuple[str, Any]]] = {
    "as it was": lambda rows: ("params", rows["params"]),
    "common to all": lambda rows: ("params", {"w": torch.ones(1, 3), "n": rows["params"]["n"]}),
    "of integers": lambda rows: ("params", {"w": rows["params"]["w"], "n": rows["params"]["n"] + 1}),
    "a view": lambda rows: ("params", {**rows["params"], "w": rows["params"]["w"][:1].expand(rows.num_rows, 3)}),
    "a new tree": lambda rows: (
        "other",
        {"x": torch.zeros(rows.num_rows, 2), "more": {"count": torch.ones(1), "none": None}},
    ),
    "a new tensor": lambda rows: ("other", torch.zeros(rows.num_rows)),
    "what was none": lambda rows: ("kept", {"x": torch.zeros(1, 2)}),
    "nothing of it": lambda rows: ("kept", {}),
}


@pytest.mark.parametrize("num_rows", [1, 2, None])
@pytest.mark.parametrize("name", FIT)
def test_what_a_handler_may_assign(name: str, num_rows: int | None) -> None:
    rows = rows_of(num_rows, {"kept": {"x": None}})
    where, value = FIT[name](rows)
    rows[where] = value
    put_back([rows], pure=False)


UNFIT: dict[str, tuple[str, Any, type[Exception], str]] = {
    "no parameters": ("params", None, TypeError, "assigned None to 'params'"),
    "a function's result": (
        "other",
        None,
        TypeError,
        "assigned None to 'other'; expected tensors. To remove a name, use `del`",
    ),
    "a tensor for a tree": ("params", torch.zeros(2, 3), TypeError, "assigned a Tensor to 'params'; expected a dict"),
    "a list for a tree": ("params", [torch.zeros(2, 3)], TypeError, "assigned a list to 'params'; expected a dict"),
    "a number": ("other", 3, TypeError, "assigned 3 to 'other'; expected a tensor"),
    "a number in a tree": ("other", {"count": 0.5}, TypeError, "assigned 0.5 to 'other.count'; expected a tensor"),
    "a number for a tensor": ("seen", 1.0, TypeError, "assigned a float to 'seen'; expected a tensor"),
    "a tree for a tensor": ("seen", {"w": torch.zeros(2)}, TypeError, "assigned a dict to 'seen'; expected a tensor"),
    "fewer names": ("params", {"w": torch.zeros(2, 3)}, ValueError, "parameters with other names than the model's: n"),
    "other names": ("buffers", {"v": torch.zeros(2)}, ValueError, "buffers with other names than the model's: b, v"),
    "another dtype": (
        "seen",
        torch.zeros(2, dtype=torch.bfloat16),
        ValueError,
        "as bfloat16 [2]; expected [2 or 1] of",
    ),
    "another shape": ("seen", torch.zeros(2, 1), ValueError, "'seen' as float32 [2, 1]; expected [2 or 1] of"),
    "other rows": ("seen", torch.zeros(4), ValueError, "'seen' as float32 [4]; expected [2 or 1] of torch.float32"),
    "new, of other rows": (
        "other",
        {"x": torch.zeros(4, 2)},
        ValueError,
        "'other.x' as float32 [4, 2]; expected [2 or 1",
    ),
    "new, without rows": ("other", torch.tensor(1.0), ValueError, "'other' as float32 []; expected [2 or 1]"),
    "without values": ("seen", torch.zeros(2, device="meta"), ValueError, "expected [2 or 1] of torch.float32 on cpu"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_a_handler_must_not_assign(name: str) -> None:
    where, value, error, message = UNFIT[name]
    rows = rows_of(2, {"buffers": {"b": torch.zeros(4)}})
    with pytest.raises(error, match=r"Mine\.pull assigned .*") as caught:
        rows[where] = value
    assert message in str(caught.value)
    assert not rows.assigned


def test_a_view_of_another_name_is_copied() -> None:
    rows = rows_of(2)
    rows["other"] = rows["params"]["w"][:, 0]
    put_back([rows], pure=False)
    rows.whole["params"]["w"].fill_(1.0)
    assert rows.whole["other"].tolist() == [0.0] * 4


LATE_SHARED = {
    "outer": [Exchange(Outer(Mean(), SGD), 2, delay=1)],
    "with a reference": [Exchange(Outer(Compressed(Mean(), "topk", reference=True)), 2, delay=1)],
    "EF21 of gradients": [Exchange(EF21(Mean(), "topk"), of="gradients")],
}


@pytest.mark.parametrize("name", LATE_SHARED)
def test_initial_parameters_of_each_node_are_rows_of_what_is_shared(name: str) -> None:
    """With equal rows the rollout is the one of one row."""
    model = make_model(torch.float32)
    each = [[batch_of(node, step, torch.float32) for node in range(K)] for step in range(5)]
    batches = [(torch.stack(x), torch.stack(y)) for x, y in (zip(*of_nodes) for of_nodes in each)]
    params = {name: p.detach()[None] for name, p in model.named_parameters()}
    wide = {name: p.repeat(K, *[1] * (p.dim() - 1)) for name, p in params.items()}
    found = [
        rollout(
            model, Strategy("sgd", LATE_SHARED[name], lr=0.1), batches, num_nodes=K, params=start,
            eval_batch=batch_of(99, 0, torch.float32),
        ).params
        for start in (params, wide)
    ]  # fmt: skip
    assert gap(found[0], found[1]) < 1e-6
