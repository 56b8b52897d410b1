"""HALoS, AD-PSGD and Decoupled DiLoCo against naive twins, event by event; identities, resumption, derivatives."""

from __future__ import annotations

import math
import os
import pathlib
import random
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models import make_data, make_model
from tests.reference import ad_psgd as ad_psgd_twin
from tests.reference import asynchronous as twin
from tests.reference import decoupled as decoupled_twin
from tests.reference import halos as halos_twin
from tests.test_asynchronous import F64, SGD, B, K, absences_of, data, fit, largest_gap, server_of
from vecgym import Logger, ProcessError, Trainer, rollout
from vecgym.availability import Dropout, LocalSteps, Sampled, Trace
from vecgym.clock import AsyncTimeline, Compute, Network
from vecgym.collectives.ledger import Entry
from vecgym.collectives.topology import Links
from vecgym.core import tree
from vecgym.data import Batches
from vecgym.runs import multiprocess
from vecgym.simulation.events import Arrival, Restart, Stop, Update, Wires, schedule, settled
from vecgym.strategy import (
    ADPSGDStrategy,
    AsyncStrategy,
    CommunicateOptimizeStrategy,
    DecoupledDiLoCoStrategy,
    DelayedNesterov,
    DiLoCoStrategy,
    FedBuff,
    HALoSStrategy,
    HeLoCo,
    OptimSpec,
    OuterOptimizer,
    Server,
    Strategy,
)
from vecgym.strategy.decentralised.ad_psgd import Averaged, Neighbours, PairRules
from vecgym.strategy.decoupled import Closed, Forgotten, FragmentRules, OfFragment
from vecgym.strategy.halos import RegionMessage, RegionRules, delivered

pytestmark = pytest.mark.filterwarnings("ignore:.*give a unit")  # toy models on links of a few bits per second
Halos: Any = HALoSStrategy  # any, since some tests give what they do not take
InPairs: Any = ADPSGDStrategy
Decoupled: Any = DecoupledDiLoCoStrategy

PACES = [2.0**-16, 2.0**-13, 2.0**-14, 2.0**-16]  # the same from bandwidths, to the last bit
LATENCY = [0.1, 0.0, 0.3, 0.2]


def num_bytes() -> int:
    return sum(p.numel() * p.element_size() for p in make_model("MLP", dtype=F64).parameters())


def pairs_of(entry: Entry) -> list[tuple[int, int]]:
    assert isinstance(entry.transfer.who, Links)
    return entry.transfer.who.pairs


def batch_of(batches: Batches) -> Callable[[int, int], Any]:
    return lambda node, step: [x[node] for x in batches[step]]


def inner_of(rng: random.Random) -> tuple[OptimSpec, tuple[Any, dict[str, float]]]:
    sgd: Any = "sgd", torch.optim.SGD, {"lr": 0.05}
    adamw: Any = "adamw", torch.optim.AdamW, {"lr": 0.01}
    name, kind, hyper = rng.choice([sgd, adamw])
    return OptimSpec(name, **hyper), (kind, hyper)


def compute_of(rng: random.Random, case: int) -> tuple[Compute, list[float], Callable[[int, int], float]]:
    median = [rng.choice([0.5, 1.0, 1.0, 2.5]) for _ in range(K)]
    compute = Compute.lognormal(median, sigma=0.4, seed=case) if rng.random() < 0.5 else Compute(median)
    seconds = compute.of_steps(3000, K).tolist()
    return compute, median, lambda node, step: seconds[step][node]


# ------------------------------------------------------------------------------------------------------------ HALoS


def servers_of(rng: random.Random) -> tuple[Server, Callable[[], Any]]:
    lr, momentum, N = rng.choice([0.2, 0.5]), rng.choice([0.5, 0.9]), rng.choice([1, 2, 5])
    kind = rng.random()
    if kind < 0.2:
        return HeLoCo(lr, momentum, rho=0.5), lambda: twin.HeLoCo(lr, momentum, num_nodes=4)
    if kind < 0.6:
        c = rng.choice([0.0, 0.5 / N])
        return DelayedNesterov(lr, momentum, N, c), lambda: twin.DelayedNesterov(lr, momentum, N, c)
    spec = OptimSpec("sgd", lr=lr, momentum=momentum, nesterov=True)
    other = torch.optim.SGD, {"lr": lr, "momentum": momentum, "nesterov": True}
    return OuterOptimizer(spec), lambda: twin.OuterOptimizer(other)


@pytest.mark.parametrize("case", range(12))
@pytest.mark.parametrize("absent", [False, True])
def test_halos_is_its_twin(case: int, absent: bool) -> None:
    rng = random.Random(f"halos {case}")
    regions = rng.choice([[[0, 1], [2, 3]], [[3, 1], [0], [2]], [[0, 1, 2, 3]], [[2], [0, 1, 3]]])
    R = len(regions)
    (local, make_local), (central, make_central) = servers_of(rng), servers_of(rng)
    inner, other_inner = inner_of(rng)
    compute, median, seconds = compute_of(rng, case)
    given, begins = absences_of(case, median)
    there = given if absent else {}
    linked, far = rng.random() < 0.5, rng.random() < 0.7
    network = Network([8 / p for p in PACES], latency=LATENCY, server_bandwidth=8 * 2.0**17)
    between = Network([8 / p for p in PACES[:R]], latency=[4.0, 0.0, 2.0][:R])
    every, a = rng.choice([1, 3, 5]), rng.choice([0.0, 0.25, 1.0])
    how = rng.choice(["H", "dylu", "each"])
    steps = {"H": [4] * K, "dylu": halos_twin.halos_steps(4, median), "each": [3, 1, 2, 4]}[how]
    settings: dict[str, dict[str, Any]] = {"H": {"dylu": False}, "dylu": {}, "each": {"local_steps": steps}}
    staleness: Any = rng.choice(["none", "inverse_sqrt", lambda s: 0.9**s])
    scheduled = (lambda step: 0.98**step) if rng.random() < 0.5 else None

    strategy = Halos(
        inner, regions, local, central, H=4, local_updates=every, alpha=a, staleness=staleness, max_norm=1.0,
        between=between if far else None, lr_scheduler=scheduled, **settings[how],
    )  # fmt: skip
    updates = 200 // every
    trainer = fit(
        strategy, compute=compute, network=network if linked else None, max_updates=updates, val_interval=None, **there,
    )  # fmt: skip
    expected, locals_ = halos_twin.halos(
        make_model("MLP", dtype=F64), batch_of(Batches(data(), K, B, seed=3)), regions, num_updates=updates,
        num_steps=steps, step_seconds=seconds, inner=other_inner, make_local=make_local,
        global_server=make_central(), local_updates=every, merge=a, staleness_function=staleness, max_norm=1.0,
        network=twin.Network(num_bytes(), PACES, PACES, 2.0**-17, LATENCY) if linked else None,
        global_network=twin.Network(num_bytes(), PACES[:R], PACES[:R], 0.0, [4.0, 0.0, 2.0][:R]) if far else None,
        schedule=scheduled, begins=begins if absent else None,
    )  # fmt: skip

    rows = trainer.history.rows[1:]
    assert len(rows) == len(expected) == updates
    timeline = trainer.timeline()
    assert isinstance(timeline, AsyncTimeline)
    messages = delivered(timeline.events)
    for row, message, update in zip(rows, messages, expected):
        assert [(x.node, x.round, x.staleness, x.num_steps) for x in message.arrivals] == [
            (x.node, x.round, x.staleness, x.num_steps) for x in update.arrivals
        ]
        assert [x.time for x in message.arrivals] == pytest.approx([x.time for x in update.arrivals], rel=1e-12)
        assert row["sim_seconds"] == pytest.approx(update.time, rel=1e-12)
        assert (row["region"], row["region_staleness"]) == (update.region, update.staleness)
        assert row["local_steps_total"] == update.total_steps
        of_node: dict[int, list[float]] = {}
        for arrival in update.arrivals:
            of_node.setdefault(arrival.node, []).append(arrival.loss)
        for node in range(K):
            losses = of_node.get(node, [math.nan])
            mean = sum(losses) / len(losses)
            assert row["train_losses"][node] == pytest.approx(mean, rel=1e-9, nan_ok=True)
    assert largest_gap({name: x[0] for name, x in server_of(trainer).items()}, expected[-1].params) < 1e-10
    state: Any = trainer.state
    for r, theta in enumerate(locals_):
        found = state.shared["regions"][str(r)]["params"]
        assert largest_gap({name: x[0] for name, x in found.items()}, theta) < 1e-10


HALOS: dict[str, Any] = {
    "regions": [[0, 2], [1, 3]], "local_server": DelayedNesterov(0.3, 0.9, 2), "local_updates": 3, "H": 3,
    "between": (1e5, 1.0), "lr": 0.02,
}  # fmt: skip


def more(strategy: str, inner: Any = "adamw", **settings: Any) -> Strategy:
    makes: dict[str, Callable[[], Strategy]] = {
        "halos": lambda: Halos(inner, **{**HALOS, **settings}),
        "decoupled": lambda: Decoupled(
            inner, **{"quorum": 2, "fragments": 3, "grace": 0.5, "H": 4, "lr": 0.02, **settings}
        ),
        "async": lambda: AsyncStrategy(inner, OuterOptimizer(lr=0.3), **{"H": 2, "lr": 0.02, **settings}),
        "ad_psgd": lambda: InPairs(inner, **{"topology": "ring", "lr": 0.02, **settings}),
    }
    return makes[strategy]()


STRATEGIES = ["halos", "ad_psgd", "decoupled"]


def test_regions_that_never_listen_are_apart() -> None:
    """With alpha = 0 a region is an `AsyncStrategy` of its own."""
    settings: dict[str, Any] = {"H": 3, "lr": 0.02}
    options: dict[str, Any] = {
        "compute": Compute([1.0, 2.03, 1.51, 4.07])
    }  # no ties: of one time, all arrivals come before messages
    found = fit(Halos("adamw", 1, OuterOptimizer(lr=0.1), local_updates=1, alpha=0.0, dylu=False, **settings),
                max_updates=20, **options)  # fmt: skip
    expected = fit(AsyncStrategy("adamw", OuterOptimizer(lr=0.1), **settings), max_updates=20, **options)
    state: Any = found.state
    assert largest_gap(state.shared["regions"]["0"]["params"], server_of(expected)) < 1e-14


def test_a_region_that_follows_is_one_server() -> None:
    """One region that goes to a global model which takes each of its movements whole."""
    settings: dict[str, Any] = {"H": 3, "lr": 0.02}
    whole = OuterOptimizer(OptimSpec("sgd", lr=1.0))
    found = fit(Halos("adamw", 1, OuterOptimizer(lr=0.1), whole, local_updates=1, alpha=1.0, dylu=False,
                              **settings), max_updates=20)  # fmt: skip
    expected = fit(AsyncStrategy("adamw", OuterOptimizer(lr=0.1), **settings), max_updates=20)
    assert largest_gap(server_of(found), server_of(expected)) < 1e-14
    assert found.history["val_loss"][-1] == pytest.approx(expected.history["val_loss"][-1], rel=1e-12)


@pytest.mark.parametrize("seed", range(60))
def test_laws_of_regions(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randint(1, 6)
    cut = sorted(rng.sample(range(1, n), rng.randint(0, min(2, n - 1))))
    order = rng.sample(range(n), n)
    regions = tuple(tuple(order[a:b]) for a, b in zip([0, *cut], [*cut, n]))
    wires = Wires(2.0, [0.1] * n, [0.3] * n, [0.3] * n, rng.choice([0.0, 0.2])) if rng.random() < 0.5 else None
    far = Wires(2.0, [1.0] * 3, [0.5] * 3, [2.0] * 3, 0.1) if rng.random() < 0.5 else None
    rules = RegionRules(
        tuple(rng.randint(1, 3) for _ in range(n)), rng.randint(1, 4), wires=wires, regions=regions, between=far
    )  # fmt: skip
    seconds = [rng.choice([0.25, 0.5, 1.0, 1.7]) for _ in range(n)]
    events = schedule(rules, lambda node, step: seconds[node], Stop(updates=20))
    times = [event.time for event in events]
    assert times == sorted(times), "time never runs backwards"
    assert [event.version for event in events if isinstance(event, Update)] == list(range(1, 21))
    versions = [0] * len(regions)
    region_of = {node: r for r, members in enumerate(regions) for node in members}
    begun = dict.fromkeys(range(n), 0)
    at_region: list[list[Arrival]] = [[] for _ in regions]
    there: list[list[Arrival]] = [[] for _ in regions]
    for event in events:
        if isinstance(event, Arrival):
            r = region_of[event.node]
            assert (event.version, event.staleness) == (begun[event.node], versions[r] - begun[event.node])
            versions[r] += 1
            at_region[r].append(event)
        elif isinstance(event, Restart):
            assert event.version == versions[region_of[event.nodes[0]]]
            begun[event.nodes[0]] = event.version
        elif isinstance(event, RegionMessage) and event.what == "deliver":
            assert len(event.arrivals) == rules.buffer
            there[event.region] += event.arrivals
    for came, went in zip(at_region, there):
        assert came[: len(went)] == went, "each movement is in one message, in order"


def test_rows_ledger_and_timeline_of_halos() -> None:
    trainer = fit(more("halos"), network=Network("1 Mbit/s", 0.25), max_updates=9)
    timeline, counts = trainer.timeline(), trainer.ledger.summary()
    assert isinstance(timeline, AsyncTimeline)
    arrived = sum(isinstance(event, Arrival) for event in timeline.events)
    assert counts["server_gather"] == (arrived, num_bytes() * arrived / K)
    sent = [pairs_of(entry)[0] for entry in trainer.ledger if entry.operation == "region_send"]
    assert set(sent) == {(K, K + 2), (K + 1, K + 2)}
    assert len(sent) >= 9
    replies = [pairs_of(entry)[0] for entry in trainer.ledger if entry.operation == "region_reply"]
    assert set(replies) == {(K + 2, K), (K + 2, K + 1)}
    assert trainer.history["num_arrived"][1:] == [3] * 9
    assert 0 < timeline.utilization < 1
    assert timeline.plot().axes[0].get_xlabel() == "seconds"
    assert len(trainer.nodes) == K


def test_a_slow_node_of_a_region_holds_up_nobody_else() -> None:
    """A movement of the others takes 0.074 s; node 1, the second to end, takes 22.322 s for it."""
    bits, compute = 8 * num_bytes(), Compute([7.6, 7.65, 7.805, 8.072])
    network = Network(up=[bits / 0.074, bits / 22.322, bits / 0.074, bits / 0.074], down=math.inf)
    trainer = fit(more("halos", regions=1, H=1, local_updates=1, dylu=False), compute=compute, network=network,
                  max_updates=3)  # fmt: skip
    timeline = trainer.timeline()
    assert isinstance(timeline, AsyncTimeline)
    arrivals = [event for event in timeline.events if isinstance(event, Arrival)][:3]
    assert [event.time for event in arrivals] == pytest.approx([7.674, 7.879, 8.146])
    assert [event.node for event in arrivals] == [0, 2, 3]


def test_a_matrix_of_links_is_looked_at_within_regions() -> None:
    """Nodes reach their region's server by links within the region, however slow those between regions are."""
    near = fit(more("halos", regions=2), network=Network.regions([2, 2], (1e5, 0.1), (1e5, 0.1)), max_updates=4)
    far = fit(more("halos", regions=2), network=Network.regions([2, 2], (1e5, 0.1), (10.0, 9.0)), max_updates=4)
    assert near.history["sim_seconds"] == far.history["sim_seconds"]
    alone = fit(more("halos", regions=[[0], [1, 2, 3]]), network=Network.regions([1, 3], (1e5, 0.1), (10.0, 9.0)),
                max_updates=4)  # fmt: skip
    assert alone.history.last("step") == 4


# ---------------------------------------------------------------------------------------------------------- AD-PSGD


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("case", range(8))
@pytest.mark.parametrize("absent", [False, True])
def test_ad_psgd_is_its_twin(case: int, linked: bool, absent: bool) -> None:
    rng = random.Random(f"ad_psgd {case}")
    inner, other_inner = inner_of(rng)
    compute, median, seconds = compute_of(rng, case)
    given, begins = absences_of(case, median)
    there = given if absent else {}
    topology = rng.choice(["complete", "ring", torch.tensor([[0, 2, 1, 0], [1, 0, 0, 1], [3, 0, 0, 0], [0, 0, 0, 0]])])
    mix: Any = rng.choice(["after", "before"])
    scheduled = (lambda step: 0.98**step) if rng.random() < 0.5 else None
    strategy = InPairs(inner, topology, mix=mix, lr_scheduler=scheduled, max_norm=1.0)
    network = Network([8 / p for p in PACES], latency=LATENCY) if linked else None
    swap = ad_psgd_twin.Swap([pace * num_bytes() for pace in PACES], LATENCY)
    trainer = fit(strategy, compute=compute, network=network, max_updates=50, val_interval=10, **there)
    expected, models = ad_psgd_twin.ad_psgd(
        make_model("MLP", dtype=F64), batch_of(Batches(data(), K, B, seed=3)), K, total_steps=50 * K,
        neighbour=Neighbours(strategy.weights(K), seed=3), step_seconds=seconds, mix=mix, inner=other_inner,
        max_norm=1.0, schedule=scheduled, swap=swap if linked else None, begins=begins if absent else None,
    )  # fmt: skip
    timeline = trainer.timeline()
    assert isinstance(timeline, AsyncTimeline)
    arrivals = [event for event in timeline.events if isinstance(event, Arrival)]
    assert [(x.node, x.first_step) for x in arrivals] == [(x.node, x.own_step) for x in expected]
    assert [x.time for x in arrivals] == pytest.approx([x.time for x in expected], rel=1e-12)
    rows = trainer.history.rows[1:]
    assert [row["local_steps_total"] for row in rows] == [K * (i + 1) for i in range(50)]
    for i, row in enumerate(rows):
        for node in range(K):
            losses = [x.loss for x in expected[K * i : K * (i + 1)] if x.node == node] or [math.nan]
            assert row["train_losses"][node] == pytest.approx(sum(losses) / len(losses), rel=1e-9, nan_ok=True)
    for node, model in enumerate(models):
        found = {name: x[node] for name, x in server_of(trainer).items()}
        assert largest_gap(found, {name: p.detach() for name, p in model.named_parameters()}) < 1e-10
    assert trainer.nodes.consensus_distance() == pytest.approx(trainer.history.last("consensus_distance"))
    assert sum(x is not None and x > 0 for x in trainer.history["consensus_distance"]) == 5


@pytest.mark.parametrize("seed", range(60))
def test_laws_of_pairs(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randint(1, 6)
    wires = Wires(2.0, [rng.choice([0.1, 0.4]) for _ in range(n)], [0.2] * n, [rng.choice([0.0, 0.3])] * n)
    linked, first = rng.random() < 0.5, rng.random() < 0.5
    neighbour = Neighbours(torch.ones(n, n), seed)
    rules = PairRules((1,) * n, n, wires=wires if linked else None, neighbour=neighbour, average_first=first)
    seconds = [rng.choice([0.25, 0.5, 1.0, 1.7]) for _ in range(n)]
    events = schedule(rules, lambda node, step: seconds[node], Stop(updates=20))
    times = [event.time for event in events]
    assert times == sorted(times), "time never runs backwards"
    assert [event.version for event in events if isinstance(event, Update)] == list(range(1, 21))
    changed, steps, begun, free = [0] * n, [0] * n, [0.0] * n, [0.0] * n
    arrivals = [(i, event) for i, event in enumerate(events) if isinstance(event, Arrival)]
    assert len(arrivals) == 20 * n
    for i, event in enumerate(events):
        if isinstance(event, Restart):
            for node, begin in zip(event.nodes, event.begins):
                assert begin == event.time, "who has averaged begins at once"
                changed[node], begun[node] = 0, begin
        elif isinstance(event, Arrival):
            assert (event.first_step, event.num_steps, event.begin) == (steps[event.node], 1, begun[event.node])
            assert event.end == event.begin + seconds[event.node]
            assert event.staleness == changed[event.node], "the averages that others have made with it"
            steps[event.node] += 1
            other = neighbour(event.node, event.first_step)
            pair = events[i - 1 if first else i + 1]
            if other == event.node:
                assert event.time == event.end
            else:
                assert pair == Averaged(event.time, event.node, other)
        elif isinstance(event, Averaged):
            changed[event.neighbour] += 1
    if linked:  # one exchange at a time at each node, as long as its slowest end takes
        swaps = sorted((e.time, i, e) for i, e in arrivals if neighbour(e.node, e.first_step) != e.node)
        for time, _, event in sorted(swaps, key=lambda swap: (settled(swap[2].end), swap[2].node)):
            pair_ = (event.node, neighbour(event.node, event.first_step))
            over = time - wires.latency[0]
            begin = over - 2.0 * max(*(wires.up[i] for i in pair_), 0.2)
            assert begin >= max(event.end, *(free[i] for i in pair_)) - 1e-9
            for i in pair_:
                free[i] = over


def test_neighbours() -> None:
    """By their weights, never oneself, by the seed and each node's own count."""
    neighbour = Neighbours(torch.tensor([[9.0, 3.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]), seed=0)
    drawn = [neighbour(0, step) for step in range(4000)]
    assert set(drawn) == {1, 2}
    assert drawn.count(1) / 4000 == pytest.approx(0.75, abs=0.03)
    assert (neighbour(1, 5), neighbour(2, 5)) == (0, 2)
    assert drawn != [Neighbours(torch.ones(3, 3), seed=1)(0, step) for step in range(4000)]


def test_alone_each_node_trains_by_itself() -> None:
    found = fit(InPairs("adamw", torch.zeros(K, K), lr=0.02), compute=Compute(1.0), max_steps=12)
    expected = fit(CommunicateOptimizeStrategy([], "adamw", lr=0.02), max_steps=12)
    assert largest_gap(server_of(found), server_of(expected)) < 1e-14
    assert found.history["staleness"][1:] == [0.0] * 12


def test_rows_and_ledger_of_ad_psgd() -> None:
    """Equal speeds, a pair of nodes: both end, average twice, and begin again from the same parameters."""
    trainer = fit(InPairs("sgd", lr=0.1), num_nodes=2, compute=Compute(1.0), max_updates=5)
    assert trainer.history["sim_seconds"] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert trainer.history["staleness_max"][1:] == [1] * 5
    assert trainer.ledger.summary()["average"] == (10, 10 * num_bytes())
    assert [pairs_of(entry) for entry in trainer.ledger][:2] == [[(0, 1), (1, 0)], [(1, 0), (0, 1)]]
    assert 0 < trainer.timeline().utilization <= 1


def test_derivatives_of_ad_psgd() -> None:
    slopes_are_finite_differences(
        lambda lr, decay: InPairs(OptimSpec("adamw", lr=lr, weight_decay=decay), "ring"), (0.01, 0.1), updates=6
    )


# ------------------------------------------------------------------------------------------------- Decoupled DiLoCo


@pytest.mark.parametrize("case", range(10))
@pytest.mark.parametrize("absent", [False, True])
def test_decoupled_is_its_twin(case: int, absent: bool) -> None:
    rng, updates = random.Random(f"decoupled {case}"), 200 if case < 2 else 40
    inner, other_inner = inner_of(rng)
    compute, median, seconds = compute_of(rng, case)
    given, begins = absences_of(case, median)
    there = given if absent else {}
    names = [name for name, _ in make_model("MLP", dtype=F64).named_parameters()]
    fragments = rng.choice([[names], [names[:1], names[1:]], [[name] for name in names[::-1]]])
    tokens = rng.choice([1.0, [1.0, 2.0, 3.0, 0.5]])
    network = Network([8 / p for p in PACES], latency=LATENCY, server_bandwidth=8 * 2.0**17)
    linked = rng.random() < 0.6
    settings: dict[str, Any] = {
        "quorum": rng.choice([1, 2, 3, 4]), "H": rng.choice([2, 4, 5]), "alpha": rng.choice([0.0, 0.3]),
        "merging": rng.choice(["mean", "radial"]), "plain": rng.choice([(), tuple(names[:2])]),
    }  # fmt: skip
    overlap, gamma, step = rng.choice([0, 1, 2]), rng.choice([0.0, 0.5, 2.0]), rng.choice([None, 1.5])
    outer: dict[str, Any] = {"lr": 0.5, "momentum": 0.8, "nesterov": True}
    scheduled = (lambda step: 0.98**step) if rng.random() < 0.5 else None
    strategy = Decoupled(
        inner, OuterOptimizer(OptimSpec("sgd", **outer)), fragments=fragments, grace=gamma, overlap=overlap,
        step_seconds=step, sync_seconds=0.1, tokens=tokens, lr_scheduler=scheduled, max_norm=1.0, **settings,
    )  # fmt: skip
    trainer = fit(
        strategy, compute=compute, network=network if linked else None, max_updates=updates, val_interval=None, **there,
    )  # fmt: skip
    expected = decoupled_twin.decoupled(
        make_model("MLP", dtype=F64), batch_of(Batches(data(), K, B, seed=3)), K, num_updates=updates,
        fragments=fragments, step_seconds=seconds, tau=overlap, gamma=gamma, step=step or sum(median) / K, sync=0.1,
        tokens_per_step=tokens if isinstance(tokens, list) else None, inner=other_inner,
        outer=(torch.optim.SGD, outer), max_norm=1.0, schedule=scheduled, begins=begins if absent else None, **settings,
        network=twin.Network(num_bytes(), PACES, PACES, 2.0**-17, LATENCY) if linked else None,
    )  # fmt: skip
    rows, timeline = trainer.history.rows[1:], trainer.timeline()
    assert isinstance(timeline, AsyncTimeline)
    closed = [event for event in timeline.events if isinstance(event, Closed)]
    assert len(rows) == len(expected) == len(closed) == updates
    for row, event, update in zip(rows, closed, expected):
        assert (row["fragment"], row["local_steps_total"]) == (update.fragment, update.total_steps)
        assert row["sim_seconds"] == pytest.approx(update.time, rel=1e-12)
        assert [(x.node, x.round, x.num_steps) for x in event.arrivals] == [
            (x.node, x.round, x.num_steps) for x in update.arrivals
        ]
        assert list(event.weights) == pytest.approx([x.weight for x in update.arrivals])
        losses = {x.node: x.loss for x in update.arrivals}
        for node in range(K):
            assert row["train_losses"][node] == pytest.approx(losses.get(node, math.nan), rel=1e-9, nan_ok=True)
    assert largest_gap({name: x[0] for name, x in server_of(trainer).items()}, expected[-1].params) < 1e-10


@pytest.mark.parametrize("seed", range(60))
def test_laws_of_fragments(seed: int) -> None:
    rng = random.Random(seed)
    n, F = rng.randint(1, 5), rng.randint(1, 3)
    wires = Wires(2.0, [0.1] * n, [0.3] * n, [0.3] * n, rng.choice([0.0, 0.2])) if rng.random() < 0.5 else None
    H = rng.randint(F, 4)
    rules = FragmentRules(
        (1,) * n, wires=wires, H=H, shares=(1 / F,) * F, quorum=rng.randint(1, n), overlap=rng.randint(0, H - 1),
        gamma=rng.choice([0.0, 1.0]), nominal=1.0, tokens=(1.0,) * n,
    )  # fmt: skip
    seconds = [rng.choice([0.25, 0.5, 1.0, 1.7]) for _ in range(n)]
    events = schedule(rules, lambda node, step: seconds[node], Stop(updates=25))
    times = [event.time for event in events]
    assert times == sorted(times), "time never runs backwards"
    assert [event.version for event in events if isinstance(event, Update)] == list(range(1, 26))
    sent: set[tuple[int, int, int]] = set()
    used: set[tuple[int, int, int]] = set()
    versions, steps, held = [0] * F, [0] * n, [[0] * F for _ in range(n)]
    for event in events:
        if isinstance(event, Arrival):
            assert event.first_step == steps[event.node], "learners never stop, and skip nothing"
            steps[event.node] += 1
        elif isinstance(event, OfFragment) and event.what == "upload":
            assert (event.node, event.fragment, event.number) not in sent
            assert steps[event.node] % H == rules.offset(event.fragment)
            sent.add((event.node, event.fragment, event.number))
        elif isinstance(event, Closed):
            assert event.version == versions[event.fragment]
            versions[event.fragment] += 1
            assert len(event.arrivals) >= rules.quorum
            came = {(x.node, event.fragment, x.round) for x in event.arrivals}
            assert came <= sent - used, "each message arrives once"
            used |= came
            assert all(x.version == event.version for x in event.arrivals), "from the version that it replaces"
        elif isinstance(event, Forgotten) and event.label.startswith("sent"):
            node, p, number = map(int, event.label.removeprefix("sent ").split("."))
            late = (node, p, number)
            assert late in sent - used
            used.add(late)
        elif isinstance(event, OfFragment):
            assert held[event.node][event.fragment] < event.number <= versions[event.fragment]
            held[event.node][event.fragment] = event.number


def test_one_fragment_of_all_nodes_is_diloco() -> None:
    found = fit(Decoupled(SGD, fragments=1, H=3, overlap=0, merging="mean"), compute=Compute(1.0),
                max_updates=5)  # fmt: skip
    expected = fit(DiLoCoStrategy(SGD, H=3), max_steps=15)
    assert largest_gap(server_of(found), server_of(expected)) < 1e-14


def test_rows_and_ledger_of_decoupled() -> None:
    trainer = fit(more("decoupled"), network=Network("1 Mbit/s", 0.25), max_updates=9)
    timeline, counts = trainer.timeline(), trainer.ledger.summary()
    assert isinstance(timeline, AsyncTimeline)
    uploads = sum(event.what == "upload" for event in timeline.events)
    assert counts["server_gather"][0] == uploads
    assert counts["server_send"][0] == 9 * K
    assert timeline.utilization == pytest.approx(1)
    assert float(timeline.per_node.sent.sum()) > 0


def test_derivatives_of_decoupled() -> None:
    slopes_are_finite_differences(
        lambda lr, momentum, alpha, inner_lr: Decoupled(
            OptimSpec("adamw", lr=inner_lr), OuterOptimizer(OptimSpec("sgd", lr=lr, momentum=momentum)), 2, 2,
            alpha=alpha, H=3,
        ),
        (0.3, 0.8, 0.25, 0.01), updates=6,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------ all of them


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("inner", ["sgd", "adamw", "lion"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_together_is_one_by_one(strategy: str, engine: str, inner: str) -> None:
    compute, network = Compute.lognormal([1.0, 2.0, 1.5, 4.0], sigma=0.4), Network(1e6, 0.1)
    options: dict[str, Any] = {"engine": engine, "compute": compute, "network": network, "max_updates": 10}
    together, apart = (fit(more(strategy, inner, together=flag), **options) for flag in (True, False))
    gap = largest_gap(server_of(together), server_of(apart))
    assert gap == 0 if engine == "loop" else gap < 1e-12
    assert max(n for n in together.history["nodes_per_call"] if n) > 1
    assert {n for n in apart.history["nodes_per_call"] if n} == {1.0}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["MLP", "CNN"])
def test_a_resumed_run_is_an_uninterrupted_one(strategy: str, kind: str, tmp_path: pathlib.Path) -> None:
    """From any update: the same bits, rows and bytes."""

    def run(updates: int, folder: str, **options: Any) -> Trainer[nn.Module]:
        return fit(
            more(strategy), kind, max_updates=updates, network=Network(1e6, 0.1), save_dir=tmp_path / folder,
            val_interval=4, checkpoint_interval=1, keep_checkpoints=100, **options,
        )  # fmt: skip

    whole = run(11, "whole")
    for update in (1, 4, 10):
        resumed = run(11, f"from {update}", resume=tmp_path / "whole" / f"step-{update:09d}.pt")
        assert largest_gap(server_of(resumed), server_of(whole)) == 0
        timed = ("seconds", "steps_per_s", "examples_per_s", "bytes_per_s", "nodes_per_call", "memory_bytes")
        for a, b in zip(resumed.history.rows, whole.history.rows):
            assert str({name: a[name] for name in sorted(a) if name not in timed}) == str(
                {name: b[name] for name in sorted(b) if name not in timed}
            )
        assert list(resumed.ledger) == list(whole.ledger)


class PartlyEmpty(nn.Module):
    """Has parameters without elements, as of a layer of width 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.none, self.wide = (nn.Parameter(torch.ones(*shape)) for shape in ((2,), (0,), (3, 0)))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight.sum() - x).square().mean() + self.none.sum() + self.wide.sum()


@pytest.mark.parametrize("strategy", ["async", *STRATEGIES])
def test_a_run_of_a_model_with_empty_parameters_resumes(strategy: str, tmp_path: pathlib.Path) -> None:
    def run(folder: str, **options: Any) -> Trainer[nn.Module]:
        trainer: Trainer[nn.Module] = Trainer(PartlyEmpty(), torch.arange(64.0) / 64)
        trainer.fit(more(strategy), 4, max_updates=7, batch_size=2, compute=Compute([1.0, 1.5, 2.0, 1.1]),
                    save_dir=tmp_path / folder, checkpoint_interval=1, keep_checkpoints=100, device="cpu",
                    progress=False, **options)  # fmt: skip
        return trainer

    whole = run("whole")
    resumed = run("again", resume=tmp_path / "whole" / "step-000000004.pt")
    assert torch.equal(resumed.nodes.params["weight"], whole.nodes.params["weight"])
    assert [tuple(p.shape) for p in resumed.nodes.params.values()] == [(4, 2), (4, 0), (4, 3, 0)]


class Killer(Logger):
    """Ends its process by SIGKILL after some updates."""

    def __init__(self, update: int) -> None:
        self.update = update

    def log(self, row: dict[str, Any]) -> None:
        if row["step"] == self.update:
            os.kill(os.getpid(), signal.SIGKILL)


def train_here(link: Any, strategy: str, folder: pathlib.Path, update: int) -> None:
    fit(more(strategy), max_updates=9, network=Network(1e6, 0.1), save_dir=folder, checkpoint_interval=1,
        resume=True, logger=Killer(update))  # fmt: skip


@pytest.mark.parametrize("strategy", ["async", *STRATEGIES])
def test_a_killed_run_goes_on(strategy: str, tmp_path: pathlib.Path) -> None:
    """Twice, by SIGKILL; nothing that was saved is lost, and the end is that of a run that was not killed."""
    for update in (3, 6):
        with pytest.raises(ProcessError, match="was killed by signal SIGKILL"):
            multiprocess.run(train_here, 1, (strategy, tmp_path, update))
        assert max(int(path.stem.removeprefix("step-")) for path in tmp_path.glob("step-*.pt")) >= update - 1
    options: dict[str, Any] = {"max_updates": 9, "network": Network(1e6, 0.1)}
    resumed = fit(more(strategy), save_dir=tmp_path, checkpoint_interval=1, resume=True, **options)
    whole = fit(more(strategy), **options)
    assert largest_gap(server_of(resumed), server_of(whole)) == 0
    assert resumed.history["train_loss"] == whole.history["train_loss"]
    assert list(resumed.ledger) == list(whole.ledger)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rollout_is_what_fit_does(strategy: str) -> None:
    trainer = fit(more(strategy), max_updates=6)
    batches = Batches(data(), K, B, seed=3)
    outcome = rollout(
        make_model("MLP", dtype=F64), more(strategy), [batches[step] for step in range(40)], num_nodes=K, seed=3,
        eval_batch=make_data("MLP", 12, 1, F64), compute=Compute([1.0, 2.0, 1.5, 4.0]), max_updates=6,
    )  # fmt: skip
    assert largest_gap(outcome.params, server_of(trainer)) < 1e-13
    assert outcome.loss.item() == pytest.approx(trainer.history.last("val_loss"), rel=1e-12)
    assert outcome.bytes.tolist() == trainer.history["bytes_step"][1:]


def slopes_are_finite_differences(make: Callable[..., Strategy], at: tuple[float, ...], updates: int) -> None:
    """Of the loss after a rollout, by each number that the strategy is made of."""
    x, y = make_data("MLP", 20 * 3 * 4, 0, F64)
    assert isinstance(x, Tensor)
    assert isinstance(y, Tensor)
    batches, model = (x.view(20, 3, 4, -1), y.view(20, 3, 4, *y.shape[1:])), make_model("MLP", dtype=F64)

    def loss(*values: Tensor) -> Tensor:
        return rollout(
            model, make(*values), batches, num_nodes=3, eval_batch=make_data("MLP", 8, 1, F64),
            compute=Compute([1.0, 2.0, 2.9]), max_updates=updates,
        ).loss  # fmt: skip

    values = [torch.tensor(v, dtype=F64, requires_grad=True) for v in at]
    slopes = torch.autograd.grad(loss(*values), values)
    for i, slope in enumerate(slopes):
        up, down = ([v.detach() + sign * 1e-6 * (i == j) for j, v in enumerate(values)] for sign in (1, -1))
        assert slope.item() == pytest.approx((loss(*up) - loss(*down)).item() / 2e-6, rel=1e-5, abs=1e-9)
        assert slope.item() != 0


@pytest.mark.parametrize("inner", ["sgd", "adamw"])
def test_derivatives_of_halos(inner: str) -> None:
    slopes_are_finite_differences(
        lambda discount, lr, momentum, alpha, central, inner_lr: Halos(
            OptimSpec(inner, lr=inner_lr), [[0, 2], [1]], DelayedNesterov(lr, momentum, 2),
            DelayedNesterov(central, 0.5), H=2, local_updates=2, alpha=alpha, between=(1e9, 0.5),
            staleness=lambda s: (1.0 + s) ** -discount,
        ),
        (0.5, 0.3, 0.8, 0.25, 0.4, 0.01), updates=6,
    )  # fmt: skip


class Misspelt(OuterOptimizer):
    staleness = "inverse_sqr"  # type: ignore[assignment]


class Decaying(Server):
    """A server with an attribute that one of ours has for its learning rate."""

    def __init__(self) -> None:
        self.lr = "fast"

    def update(self, params: Any, movement: Any, state: Any, update: int, inplace: bool = False) -> Any:
        return tree.map(torch.sub, params, movement), state


def test_a_servers_own_attributes_are_not_recorded() -> None:
    history = fit(AsyncStrategy("sgd", Decaying(), H=2, lr=0.1), compute=Compute(1.0), max_updates=3).history
    assert [row.get("outer_lr") for row in history.rows] == [None] * 4


@pytest.mark.parametrize(("make", "match"), [
    (lambda: Halos(regions=0), "regions=0"),
    (lambda: Halos(regions="two"), "regions='two' must be a number"),
    (lambda: Halos(local_server="sgd"), "local_server is of type str; give a server such as"),
    (lambda: Halos(global_server=FedBuff(4)), "waits for 4 movements"),
    (lambda: Halos(alpha=1.5), "alpha=1.5"),
    (lambda: Halos(local_updates=0), "local_updates=0"),
    (lambda: Decoupled(quorum=0), "quorum=0"),
    (lambda: Decoupled(server=FedBuff(4)), "waits for 4 movements, and here the quorum says how many"),
    (lambda: Decoupled(server=FedBuff(1)), "weighs each arrival.*give OuterOptimizer or DelayedNesterov"),
    (lambda: Decoupled(server=HeLoCo()), "corrects or weighs each arrival"),
    (lambda: Halos(local_server=Misspelt()), "staleness='inverse_sqr' is not known; did you mean 'inverse_sqrt'"),
    (lambda: Halos(global_server=Misspelt()), "staleness='inverse_sqr' is not known; did you mean 'inverse_sqrt'"),
    (lambda: AsyncStrategy(server=Misspelt()), "staleness='inverse_sqr' is not known; did you mean 'inverse_sqrt'"),
    (lambda: Decoupled(fragments="all"), "fragments='all' must be"),
    (lambda: Decoupled(merging="sum"), "merging='sum'"),
    (lambda: Decoupled(tokens=[1.0, 0.0]), "tokens=0.0"),
    (lambda: InPairs(topology="star"), "topology='star'"),
    (lambda: InPairs(topology=[[1.0, 2.0]]), "or a matrix"),
    (lambda: InPairs(topology=3.0), "or a matrix"),
    (lambda: InPairs(topology=[[0.0, -1.0], [1.0, 0.0]]), "weights >= 0"),
    (lambda: InPairs(mix="never"), "mix='never'"),
    (lambda: Halos(localupdates=3), "did you mean 'local_updates'"),
])  # fmt: skip
def test_wrong_settings(make: Callable[[], Any], match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        make()


def test_the_buffer_of_decoupled_is_the_number_of_nodes_if_not_given() -> None:
    of_nodes, given = (
        fit(Decoupled(SGD, DelayedNesterov(0.4, 0.6, buffer), quorum=2, fragments=2, H=2), max_updates=10)
        for buffer in (None, K)
    )
    assert len(of_nodes.history) == 11
    assert largest_gap(server_of(of_nodes), server_of(given)) == 0


@pytest.mark.parametrize(("make", "options", "match"), [
    (lambda: Halos(SGD, [[0, 1], [3]]), {}, "put every node into one region"),
    (lambda: Halos(SGD, 5), {}, "give at most 4"),
    (lambda: Halos(SGD, 2, between=Network([1e9] * 3)), {}, "there are 2 regions"),
    (lambda: Halos(SGD, 2, between="fast"), {}, "between is of type str"),
    (lambda: Halos(SGD, local_steps=[1, 2]), {}, "local_steps is for 2 nodes"),
    (lambda: Halos(SGD, local_server=DelayedNesterov(buffer=None, c=0.9)), {}, "c=0.9 must be in"),
    (lambda: Decoupled(SGD, quorum=5), {}, "quorum=5 is more than the 4 nodes"),
    (lambda: Decoupled(SGD, tokens=[1.0, 2.0]), {}, "tokens is for 2 nodes"),
    (lambda: Decoupled(SGD, fragments=[["w"]]), {}, "is not in the model"),
    (lambda: InPairs(SGD, torch.ones(3, 3)), {}, "topology is for 3 nodes"),
    (lambda: Halos(SGD), {"compute": None}, "HALoSStrategy needs compute="),
    (lambda: Halos(SGD), {"max_seconds": 0.1, "max_steps": None}, "before the first update"),
])  # fmt: skip
def test_wrong_options(make: Callable[[], Strategy], options: dict[str, Any], match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        fit(make(), **{"max_steps": 4, **options})


@pytest.mark.parametrize("name", [*STRATEGIES, "async"])
def test_only_nodes_without_a_server_begin_with_parameters_of_their_own(name: str) -> None:
    model, batches = make_model("MLP", dtype=F64), list(Batches(data(), K, B).iterate(0, 12))
    given = {name: torch.stack([p.detach()] * K) for name, p in model.named_parameters()}
    options: dict[str, Any] = {"num_nodes": K, "eval_batch": data()[:B], "compute": Compute(1.0), "max_updates": 1}
    if name == "ad_psgd":
        assert math.isfinite(float(rollout(model, more(name), batches, params=given, **options).loss))
    else:
        with pytest.raises(ValueError, match=r"start from the server's: give \[1, \*\]"):
            rollout(model, more(name), batches, params=given, **options)


# --------------------------------------------------------------------------------------------------------- absences


def away(node: int, first: int, last: int) -> Callable[[int], list[int]]:
    """A node is absent from a step to before another."""
    return lambda step: [other for other in range(K) if other != node or not first <= step < last]


@pytest.mark.parametrize("name", [*STRATEGIES, "async"])
def test_who_is_absent_begins_nothing(name: str) -> None:
    """Steps of a second; node 2 is away from 3 to 11, and computes that much less, and what it began before it ends."""
    options: dict[str, Any] = {"compute": Compute(1.0), "max_seconds": 24.0}
    found, usual = fit(more(name), availability=away(2, 3, 11), **options), fit(more(name), **options)
    timeline, before = found.timeline(), usual.timeline()
    assert isinstance(timeline, AsyncTimeline)
    end = timeline.seconds
    assert timeline.per_node.computed.tolist() == pytest.approx([end, end, end - 8.0, end])
    assert before.per_node.computed.tolist() == pytest.approx([before.seconds] * K)
    of_node = [event for event in timeline.events if isinstance(event, Arrival) and event.node == 2]
    assert not [event for event in of_node if 3 <= event.begin < 11]
    others = [[(e.node, e.first_step, e.end) for e in x.events if isinstance(e, Arrival) and e.node != 2]
              for x in (timeline, before)]  # fmt: skip
    if name != "halos":  # whose run may end with another message
        assert others[0] == others[1][: len(others[0])]
    assert largest_gap(server_of(found), server_of(usual)) > 1e-6


def test_decoupled_goes_on_without_who_is_absent() -> None:
    """A quorum of all waits for it, one of three does not: the goodput that the algorithm is for."""
    given: dict[str, Any] = {"compute": Compute(1.0), "availability": away(2, 4, 40), "max_seconds": 44.0}
    updates = [fit(more("decoupled", fragments=1, quorum=quorum), **given).history.last("step") for quorum in (3, 4)]
    assert updates[0] >= 3 * updates[1]


@pytest.mark.parametrize("name", [*STRATEGIES, "async", "of fragments"])
def test_goodput_is_the_time_of_the_steps_that_the_evaluated_model_has_merged(name: str) -> None:
    """A step in a fragment counts by the fragment's bytes."""
    options = (
        {"fragments": [["first.weight"], ["first.bias", "second.weight"], ["second.bias"]]}
        if name == "of fragments"
        else {}
    )
    strategy = more("decoupled" if options else name, **options)
    compute = Compute.lognormal([1.0, 1.3, 2.0, 0.7], sigma=0.2)
    trainer = fit(strategy, compute=compute, max_seconds=40.0, availability=Dropout(0.2, 3))
    timeline, seconds, sizes = trainer.timeline(), compute.of_steps(99, K), trainer.ledger.sizes
    assert isinstance(timeline, AsyncTimeline)
    parts = strategy.fragments_of(sizes) if isinstance(strategy, DecoupledDiLoCoStrategy) else ()
    merged = 0.0
    for event in timeline.events:
        share, arrivals = 1.0, tuple[Arrival, ...]()
        if isinstance(event, Closed):
            share = sum(sizes[x] for x in parts[event.fragment]) / sum(sizes.values())
            arrivals = event.arrivals
        elif isinstance(event, RegionMessage) and event.what == "deliver":
            arrivals = event.arrivals
        elif isinstance(event, Arrival) and name in ("async", "ad_psgd"):
            arrivals = (event,)
        for x in arrivals:
            merged += share * float(seconds[x.first_step : x.first_step + x.num_steps, x.node].sum())
    assert timeline.goodput == pytest.approx(merged / (K * timeline.seconds), rel=1e-12)
    assert 0 < timeline.goodput <= timeline.utilization < 1


def test_who_returns_merges_what_has_come_in_the_meantime() -> None:
    """The newest version, before its first step."""
    found = fit(more("decoupled", fragments=1, quorum=2, overlap=0), compute=Compute(1.0), availability=away(2, 4, 20),
                max_seconds=30.0)  # fmt: skip
    timeline = found.timeline()
    assert isinstance(timeline, AsyncTimeline)
    own = [event for event in timeline.events if getattr(event, "node", None) == 2 or
           (isinstance(event, Restart) and event.nodes == (2,))]  # fmt: skip
    back = next(i for i, event in enumerate(own) if isinstance(event, Restart) and event.time >= 20)
    merge = own[back - 1]
    assert isinstance(merge, OfFragment)
    versions = [event.version + 1 for event in timeline.events if isinstance(event, Closed) and event.time <= 20]
    assert (own[back].time, merge.time, merge.number) == (20.0, 20.0, versions[-1])


@pytest.mark.parametrize(("availability", "said"), [
    (Sampled(0.5, 2), "go on with what they have when they return"),
    (Trace([[True] * K] * 90, rejoin="neighbour"), 'with rejoin="own"'),
    (LocalSteps([1, 2, 2, 2], H=2), "wait for nobody"),
    (lambda step: [] if step == 7 else [0, 1], "no node is there in step 7"),
    (Trace([[True] * K] * 5), "the trace has 5 steps of 4 nodes"),
    (away(0, 5, 10**9), "no update in the last 100000 events"),
])  # fmt: skip
def test_what_absences_cannot_be_is_said(availability: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        fit(more("decoupled", quorum=K), availability=availability, compute=Compute(1.0), max_updates=30)


def test_a_run_with_absences_resumes(tmp_path: pathlib.Path) -> None:
    """With the same, to the bit; with others it is another run."""
    given: dict[str, Any] = {"compute": Compute([1.0, 1.3, 2.0, 0.7]), "save_dir": tmp_path / "a", "max_updates": 9}
    whole = fit(more("decoupled"), availability=Dropout(0.4, 3), checkpoint_interval=1, keep_checkpoints=99, **given)
    given |= {"resume": tmp_path / "a" / "step-000000004.pt"}
    again = fit(more("decoupled"), availability=Dropout(0.4, 3), **{**given, "save_dir": tmp_path / "b"})
    assert largest_gap(server_of(whole), server_of(again)) == 0
    with pytest.raises(ValueError, match="availability"):
        fit(more("decoupled"), availability=Dropout(0.3, 3), **{**given, "save_dir": tmp_path / "c"})
