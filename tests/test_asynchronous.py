"""Asynchronous runs against a naive twin, event by event; identities, resumption, derivatives, errors."""

from __future__ import annotations

import math
import pathlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.models import make_data, make_model
from tests.reference import asynchronous as twin
from vecgym import (
    DivergenceError,
    Trainer,
    dry_run,
    estimate_memory,
    rollout,
    sweep,
    verify,
)
from vecgym.clock import AsyncTimeline, Compute, Network, price
from vecgym.data import Batches
from vecgym.meta import Curve, learn
from vecgym.simulation.events import Arrival
from vecgym.strategy import (
    MLA,
    ADPSGDStrategy,
    AsyncStrategy,
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

pytestmark = pytest.mark.filterwarnings("ignore:.*give a unit")  # toy models on links of a few bits per second
F64 = torch.float64
K, B = 4, 4
SGD = OptimSpec("sgd", lr=0.05)


def untyped(value: Any) -> Any:
    """Arguments that a type checker would refuse."""
    return value


def data(kind: str = "MLP", num_examples: int = 90, seed: int = 0) -> Any:
    made = make_data(kind, num_examples, seed, F64)
    return TensorDataset(*made) if isinstance(made, tuple) else made


def fit(strategy: Strategy, kind: str = "MLP", num_nodes: int = K, **options: Any) -> Trainer[nn.Module]:
    trainer = Trainer(make_model(kind, dtype=F64), data(kind), data(kind, 12, seed=1))
    defaults: dict[str, Any] = {"batch_size": B, "device": "cpu", "progress": False, "seed": 3}
    if strategy.asynchronous:
        defaults["compute"] = Compute([1.0, 2.0, 1.5, 4.0][:num_nodes])
    trainer.fit(strategy, num_nodes, **{**defaults, **options})
    return trainer


def server_of(trainer: Trainer[nn.Module]) -> dict[str, Tensor]:
    assert trainer.state is not None
    return trainer.state.params


def largest_gap(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


# ------------------------------------------------------------------------------------------------------------ twins

Make = Callable[[random.Random], tuple[Server, Any, dict[str, Any]]]  # a server, its twin, settings of the strategy


def outer_sgd(rng: random.Random) -> tuple[Server, Any, dict[str, Any]]:
    lr, momentum, buffer = rng.choice([0.1, 0.3]), rng.choice([0.5, 0.9]), rng.choice([1, 1, 2, 3])
    spec = OptimSpec("sgd", lr=lr, momentum=momentum, nesterov=True)
    other = twin.OuterOptimizer((torch.optim.SGD, {"lr": lr, "momentum": momentum, "nesterov": True}), buffer)
    return OuterOptimizer(spec), other, {"buffer": buffer}


def outer_adam(rng: random.Random) -> tuple[Server, Any, dict[str, Any]]:
    buffer = rng.choice([1, 4])
    return OuterOptimizer(OptimSpec("adam", lr=0.01)), twin.OuterOptimizer((torch.optim.Adam, {"lr": 0.01}), buffer), {
        "buffer": buffer
    }  # fmt: skip


def delayed_nesterov(rng: random.Random) -> tuple[Server, Any, dict[str, Any]]:
    N = rng.choice([1, 3, K])
    c = rng.choice([0.0, 0.5 / N, 1 / N])
    return DelayedNesterov(0.3, 0.8, N, c), twin.DelayedNesterov(0.3, 0.8, N, c), {}


def fedbuff(rng: random.Random) -> tuple[Server, Any, dict[str, Any]]:
    M = rng.choice([1, 2, 5])
    return FedBuff(M, lr=0.7), twin.fedbuff(0.7, M)["server"], {"staleness": "inverse_sqrt"}


def heloco(rng: random.Random) -> tuple[Server, Any, dict[str, Any]]:
    buffer = rng.choice([1, 2])
    return HeLoCo(0.2, 0.9), twin.HeLoCo(0.2, 0.9, K, buffer), {"buffer": buffer}


def mla(rng: random.Random) -> tuple[Server, Any, dict[str, Any]]:
    buffer = rng.choice([1, 2])
    return MLA(0.2, 0.9), twin.MLA(0.2, 0.9, buffer), {"buffer": buffer}


def absences_of(case: int, median: Sequence[float]) -> tuple[dict[str, Any], Callable[[int, float], float]]:
    """Nodes that come and go, one of them for long: options of `fit`, and what a twin takes."""
    rng, seconds = random.Random(f"absent {case}"), sum(median) / K
    table = [[rng.random() < 0.7 for _ in range(K)] for _ in range(400)]
    table = [[there and not (node == 1 and 10 <= t < 30) for node, there in enumerate(x)] for t, x in enumerate(table)]
    table = [row if any(row) else [True] * K for row in table]

    def begins(node: int, time: float) -> float:
        interval = int(time / seconds + 1e-9)
        while interval < len(table) and not table[interval][node]:
            interval += 1
            time = interval * seconds
        return time

    return {"availability": lambda step: table[step] if step < len(table) else [True] * K}, begins


@pytest.mark.parametrize("make", [outer_sgd, outer_adam, delayed_nesterov, fedbuff, heloco, mla])
@pytest.mark.parametrize("case", range(9))
@pytest.mark.parametrize("absent", [False, True])
def test_twins(make: Make, case: int, absent: bool) -> None:
    rng = random.Random(f"{make.__name__} {case}")
    server, other, settings = make(rng)
    inner: Any = rng.choice([("sgd", torch.optim.SGD, {"lr": 0.05}), ("adamw", torch.optim.AdamW, {"lr": 0.01})])
    median = [rng.choice([0.5, 1.0, 1.0, 2.5]) for _ in range(K)]
    compute = Compute.lognormal(median, sigma=0.4, seed=case) if rng.random() < 0.5 else Compute(median)
    seconds = compute.of_steps(2000, K).tolist()
    given, begins = absences_of(case, median)
    pace = [2.0 ** rng.choice([-16, -13]) for _ in range(K)]  # the same from bandwidths, to the last bit
    network = Network([8 / p for p in pace], latency=[0.1, 0.0, 0.3, 0.2], server_bandwidth=8 * 2.0**17)
    linked = rng.random() < 0.5
    window: dict[str, Any] = {"max_wait": rng.choice([0.0, 0.7, 3.0, math.inf])}
    window["grace"] = rng.choice(["full", "until_last"])
    how = rng.choice(["H", "dylu", "each"])
    steps = {"H": [4] * K, "dylu": twin.dylu(4, median), "each": [3, 1, 2, 4]}[how]
    ways: dict[str, dict[str, Any]] = {"H": {"H": 4}, "dylu": {"H": 4, "dylu": True}, "each": {"local_steps": steps}}
    staleness = settings.get("staleness", rng.choice(["none", "inverse_sqrt", lambda s: 0.9**s]))
    schedule = (lambda step: 0.98**step) if rng.random() < 0.5 else None
    window["delay_threshold"] = {6: 1, 7: 1, 8: 2}.get(case)

    strategy = AsyncStrategy(
        OptimSpec(inner[0], **inner[2]), server, staleness=staleness, lr_scheduler=schedule, max_norm=1.0, **ways[how],
        **window, **({} if server.buffer else settings),
    )  # fmt: skip
    updates = 100 // getattr(other, "buffer", 1)
    trainer = fit(
        strategy, compute=compute, network=network if linked else None, max_updates=updates, val_interval=None,
        **given if absent else {},
    )  # fmt: skip

    batches = Batches(data(), K, B, seed=3)
    model = make_model("MLP", dtype=F64)
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    expected = twin.asynchronous(
        model, lambda node, step: [x[node] for x in batches[step]], K, num_updates=updates, server=other,
        num_steps=steps, step_seconds=lambda node, step: seconds[step][node], inner=(inner[1], inner[2]),
        staleness_function=staleness, max_norm=1.0, schedule=schedule, begins=begins if absent else None, **window,
        network=twin.Network(num_bytes, pace, pace, 2.0**-17, [0.1, 0.0, 0.3, 0.2]) if linked else None,
    )  # fmt: skip

    rows = trainer.history.rows[1:]
    assert len(rows) == len(expected) == updates
    timeline = trainer.timeline()
    assert isinstance(timeline, AsyncTimeline)
    events = [event for event in timeline.events if isinstance(event, Arrival)]
    late = [window["delay_threshold"] is not None and event.staleness >= window["delay_threshold"] for event in events]
    for is_late, kind in ((False, "arrivals"), (True, "dropped")):
        arrivals = [event for event, x in zip(events, late) if x == is_late]
        reference = [arrival for update in expected for arrival in getattr(update, kind)]
        assert [(a.node, a.round, a.staleness) for a in arrivals] == [(a.node, a.round, a.staleness) for a in reference]
        assert [a.time for a in arrivals] == pytest.approx([a.time for a in reference], rel=1e-12)
    assert any(late) or window["delay_threshold"] != 1
    assert [row["local_steps_total"] for row in rows] == [update.total_steps for update in expected]
    for row, update in zip(rows, expected):
        assert row.get("num_dropped", 0) == len(update.dropped)
        assert row["num_arrived"] == len(update.arrivals)
        of_node: dict[int, list[float]] = {}
        for arrival in update.arrivals:
            of_node.setdefault(arrival.node, []).append(arrival.loss)
        for node, losses in of_node.items():
            assert row["train_losses"][node] == pytest.approx(sum(losses) / len(losses), rel=1e-9)
        assert math.isnan(row["train_losses"].sum()) == (len(of_node) < K)
    assert largest_gap({name: x[0] for name, x in server_of(trainer).items()}, expected[-1].params) < 1e-10


# -------------------------------------------------------------------------------------------------------- identities


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("kind", ["MLP", "CNN", "Dropout", "GPT", "LSTM", "WithFrozen"])
@pytest.mark.parametrize("outer", [None, OptimSpec("adam", lr=0.01)])
def test_waiting_for_all_with_a_full_buffer_is_diloco(engine: str, kind: str, outer: OptimSpec | None) -> None:
    """Bit for bit, whatever the speeds."""
    if (engine == "vmap") == (kind == "LSTM"):
        pytest.skip("vmap cannot run the LSTM; the loop takes longer, and one model says it")
    waiting = AsyncStrategy("adamw", OuterOptimizer(outer), H=3, buffer=K, max_wait=math.inf, lr=0.02)
    synchronous = DiLoCoStrategy("adamw", outer, H=3, lr=0.02)
    found = fit(waiting, kind, max_updates=5, engine=engine)
    expected = fit(synchronous, kind, max_steps=15, engine=engine, exact=engine == "loop")
    for name, p in server_of(expected).items():
        assert torch.equal(server_of(found)[name].expand_as(p), p), name
    assert found.history["val_loss"][-1] == expected.history["val_loss"][-1]
    assert found.history["sim_seconds"] == [12.0 * update for update in range(6)]
    assert [row["staleness"] for row in found.history.rows[1:]] == [0.0] * 5


@pytest.mark.parametrize("up", [[80.0] * K, [80.0, 20.0, 1000.0, 1000.0]])
def test_waiting_for_all_takes_as_long_as_diloco_through_the_same_server(up: list[float]) -> None:
    """Nodes of one speed, messages of one tensor: however slowly some send, they are no burden to the others."""
    network = Network(up=up, down=1000.0, latency=0.25, all_reduce="server")
    options: dict[str, Any] = {"compute": Compute(2.0), "network": network, "val_interval": None}
    waiting = AsyncStrategy("sgd", H=3, buffer=K, max_wait=math.inf, lr=0.02)
    arrived = fit(waiting, "Quadratic", max_updates=4, **options).history["sim_seconds"][1:]
    ended = fit(DiLoCoStrategy("sgd", H=3, lr=0.02), "Quadratic", max_steps=12, **options).history["sim_seconds"][3::3]
    bits = 8 * 8 * sum(p.numel() for p in make_model("Quadratic").parameters())
    a_round = 6.0 + bits / min(up) + bits / 1000 + 2 * 0.25
    assert ended == pytest.approx([a_round * i for i in range(1, 5)], rel=1e-12)
    down = bits / 1000 + 0.25  # a movement has arrived before anybody has what comes of it
    assert arrived == pytest.approx([end - down for end in ended], rel=1e-12)


def test_a_nodes_link_is_taken_for_its_own_time() -> None:
    """However narrow the server's link is."""
    network = Network(up=[80.0, 20.0, 1000.0, 1000.0], down=1000.0, server_bandwidth=10.0)
    trainer = fit(AsyncStrategy("sgd", H=3, lr=0.02), "Quadratic", network=network, max_updates=9)
    timeline = trainer.timeline()
    assert isinstance(timeline, AsyncTimeline)
    counts = [sum(isinstance(x, Arrival) and x.node == node for x in timeline.events) for node in range(K)]
    bits = 8 * 8 * sum(p.numel() for p in make_model("Quadratic").parameters())
    sent = [count * bits / bandwidth for count, bandwidth in zip(counts, [80.0, 20.0, 1000.0, 1000.0])]
    assert timeline.per_node.sent.tolist() == pytest.approx(sent)


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("inner", ["sgd", "adamw", "lion"])
@pytest.mark.parametrize("settings", [
    {}, {"buffer": 3, "staleness": "inverse_sqrt"}, {"server": DelayedNesterov(0.1)}, {"dylu": True},
    {"delay_threshold": 2, "buffer": 2},
    {"local_steps": [3, 1, 4, 2], "max_wait": 3.0, "grace": "until_last", "lr_scheduler": "cosine"},
])  # fmt: skip
def test_together_is_one_by_one(engine: str, inner: str, settings: dict[str, Any]) -> None:
    given = {"server": OuterOptimizer(lr=0.1), "H": 4, "lr": 0.02, **settings}
    compute, network = Compute.lognormal([1.0, 2.0, 1.5, 4.0], sigma=0.4), Network(1e6, 0.1)
    options: dict[str, Any] = {"engine": engine, "compute": compute, "network": network, "max_updates": 20}
    together, apart = (fit(AsyncStrategy(inner, together=flag, **given), **options) for flag in (True, False))
    gap = largest_gap(server_of(together), server_of(apart))
    assert gap == 0 if engine == "loop" else gap < 1e-12
    assert max(n for n in together.history["nodes_per_call"] if n) > 1
    assert {n for n in apart.history["nodes_per_call"] if n} == {1.0}


def test_a_threshold_that_nothing_reaches_changes_no_bit() -> None:
    options: dict[str, Any] = {"compute": Compute.lognormal([1.0, 2.0, 1.5, 4.0], sigma=0.4), "max_updates": 20}
    given: dict[str, Any] = {"server": OuterOptimizer(lr=0.1), "H": 3, "lr": 0.02}
    plain, limited = (fit(AsyncStrategy("adamw", **given, delay_threshold=R), **options) for R in (None, 99))
    assert largest_gap(server_of(plain), server_of(limited)) == 0
    assert plain.history["val_loss"] == limited.history["val_loss"]
    assert list(plain.ledger) == list(limited.ledger)
    assert "num_dropped" not in plain.history.rows[1]
    assert limited.history["num_dropped"][1:] == [0] * 20


@pytest.mark.parametrize("H", [1, 3])
def test_a_threshold_of_one_takes_the_newest_only(H: int) -> None:
    """Plain SGD: the server follows the movements from its newest version, as if there were no other."""
    strategy = AsyncStrategy("sgd", OuterOptimizer(OptimSpec("sgd", lr=1.0)), H=H, lr=0.05, delay_threshold=1)
    trainer = fit(strategy, compute=Compute([1.0, 1.7, 2.3, 9.0]), max_updates=12)
    timeline = trainer.timeline()
    assert isinstance(timeline, AsyncTimeline)
    batches, model = Batches(data(), K, B, seed=3), make_model("MLP", dtype=F64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    arrivals = [event for event in timeline.events if isinstance(event, Arrival)]
    fresh = [event for event in arrivals if event.staleness == 0]
    for event in fresh:
        for step in range(event.first_step, event.first_step + H):
            optimizer.zero_grad()
            model([x[event.node] for x in batches[step]]).backward()
            optimizer.step()
    expected = {name: p.detach() for name, p in model.named_parameters()}
    assert largest_gap({name: x[0] for name, x in server_of(trainer).items()}, expected) < 1e-12
    rows = trainer.history.rows[1:]
    assert len(fresh) == len(rows) == 12 < len(arrivals)
    assert {row["staleness_max"] for row in rows} == {0}
    assert sum(row["num_dropped"] for row in rows) == len(arrivals) - 12
    assert rows[-1]["local_steps_total"] == 12 * H
    sent = [entry for entry in trainer.ledger if entry.transfer.operation == "server_gather"]
    assert len(sent) == len(arrivals)  # those that are dropped were sent
    assert timeline.goodput < timeline.utilization == pytest.approx(1.0)


ODD: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "no kernel": (OptimSpec(torch.optim.ASGD, lr=0.01), {}, {}),
    "matrices": (
        OptimSpec("muon", lr=0.01, param_groups=lambda name, p: {} if p.dim() == 2 else {"optim": "adamw", "lr": 1e-3}),
        {}, {},
    ),
    "rates of nodes": (OptimSpec("adamw", lr=torch.tensor([0.1, 0.02, 0.03, 0.04])), {}, {}),
    "rates of steps": (OptimSpec("adam", lr=torch.linspace(0.1, 0.01, 12)[:, None]), {}, {}),
    "norms of nodes": (SGD, {"max_norm": torch.tensor([0.1, 0.2, 0.3, 0.4])}, {}),
    "micro-batches": (SGD, {}, {"minibatch_size": 2}),
    "chunks": (SGD, {}, {"chunk_size": 2}),
    "node threads": (SGD, {}, {"node_threads": 2}),
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_together_is_one_by_one_whatever_the_settings(odd: str) -> None:
    inner, settings, options = ODD[odd]
    together, apart = (
        fit(
            AsyncStrategy(inner, OuterOptimizer(lr=0.1), local_steps=[3, 1, 4, 2], together=flag, **settings),
            max_updates=14, **options,
        )
        for flag in (True, False)
    )  # fmt: skip
    assert largest_gap(server_of(together), server_of(apart)) < 1e-12


@pytest.mark.parametrize("kind", ["CNN", "GPT", "LSTM", "WithFrozen", "Checkpointed", "DataDependent"])
@pytest.mark.filterwarnings("ignore:vmap cannot run this model")
def test_together_is_one_by_one_whatever_the_model(kind: str) -> None:
    settings: dict[str, Any] = {"local_steps": [3, 1, 4, 2], "lr": 0.01}
    together, apart = (
        fit(AsyncStrategy("adamw", OuterOptimizer(lr=0.1), together=flag, **settings), kind, max_updates=8)
        for flag in (True, False)
    )
    assert largest_gap(server_of(together), server_of(apart)) < 1e-12


def test_nodes_of_unequal_data() -> None:
    """A batch is what a node has: of 3, 20, 7 and 11 examples."""

    def of_node(rank: int, num_nodes: int, train: bool) -> Any:
        return data(num_examples=[3, 20, 7, 11][rank], seed=rank)

    trainer = Trainer(make_model("MLP", dtype=F64), of_node)
    losses = []
    for flag in (True, False):
        strategy = AsyncStrategy(SGD, OuterOptimizer(lr=0.1), local_steps=[3, 1, 4, 2], together=flag)
        trainer.fit(
            strategy, K, compute=Compute([1.0, 2.0, 1.5, 4.0]), max_updates=14, batch_size=4, device="cpu",
            progress=False,
        )  # fmt: skip
        losses.append(trainer.history["train_loss"][1:])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    timeline = trainer.timeline()
    arrivals = [event for event in timeline.events if isinstance(event, Arrival)]
    assert trainer.history["examples"][-1] == sum([3, 4, 4, 4][event.node] * event.num_steps for event in arrivals)


def test_delayed_nesterov_of_one_version_is_one_synchronous_step() -> None:
    """c = 0, and N = K arrivals of one version: Nesterov's step on the mean."""
    settings: dict[str, Any] = {"H": 2, "max_wait": math.inf}
    found = fit(AsyncStrategy(SGD, DelayedNesterov(0.5, 0.9), **settings), max_updates=3 * K)
    outer = OptimSpec("sgd", lr=0.5, momentum=0.9, nesterov=True)
    expected = fit(DiLoCoStrategy(SGD, outer, H=2), max_steps=6)
    assert largest_gap(server_of(found), server_of(expected)) < 1e-14


@pytest.mark.parametrize("c", [0.0, 0.4, 1.0])
def test_delayed_nesterov_with_a_buffer_of_one_is_nesterov_at_each_arrival(c: float) -> None:
    outer = OptimSpec("sgd", lr=0.3, momentum=0.9, nesterov=True)
    found = fit(AsyncStrategy(SGD, DelayedNesterov(0.3, 0.9, buffer=1, c=c), H=2), max_updates=20)
    expected = fit(AsyncStrategy(SGD, OuterOptimizer(outer), H=2), max_updates=20)
    assert largest_gap(server_of(found), server_of(expected)) < 1e-14


def test_one_node_is_plain_training() -> None:
    server = OuterOptimizer(OptimSpec("sgd", lr=1.0))
    found = fit(AsyncStrategy("adamw", server, H=3, lr=0.01), num_nodes=1, max_steps=15)
    expected = fit(Strategy("adamw", lr=0.01), num_nodes=1, max_steps=15)
    assert largest_gap(server_of(found), server_of(expected)) < 1e-14
    assert found.history.last("local_steps_total") == 15


def test_equal_speeds_have_every_staleness_in_order() -> None:
    trainer = fit(AsyncStrategy(SGD, OuterOptimizer(lr=0.1), H=2), compute=Compute(1.0), max_updates=12)
    assert [row["staleness"] for row in trainer.history.rows[1:]] == [0, 1, 2, 3] * 3


def test_all_updates_at_the_last_second_are_made() -> None:
    """Four nodes arrive at 2 s."""
    trainer = fit(AsyncStrategy(SGD, OuterOptimizer(lr=0.1), H=1), compute=Compute(1.0), max_seconds=2.0)
    assert trainer.history["sim_seconds"] == [0.0, *[1.0] * 4, *[2.0] * 4]
    assert "val_loss" in trainer.history.rows[-1]
    assert trainer.timeline().seconds == 2.0


def test_dylu_makes_rounds_end_together() -> None:
    trainer = fit(
        AsyncStrategy(SGD, OuterOptimizer(lr=0.1), H=8, dylu=True), compute=Compute([1.0, 2.0, 4.0, 8.0]), max_updates=8
    )  # fmt: skip
    assert [row["sim_seconds"] for row in trainer.history.rows[1:]] == [8.0] * 4 + [16.0] * 4
    assert trainer.history["local_steps_total"][1:] == [8, 12, 14, 15, 23, 27, 29, 30]


@pytest.mark.parametrize("num_nodes", [2, 300])
def test_many_and_few_nodes(num_nodes: int) -> None:
    compute = Compute([1.0 + 0.01 * node for node in range(num_nodes)])
    trainer = Trainer(make_model("MLP", dtype=F64), data(num_examples=600))
    strategy = AsyncStrategy(SGD, OuterOptimizer(OptimSpec("sgd", lr=1 / num_nodes)), H=1)
    trainer.fit(
        strategy, num_nodes, compute=compute, max_updates=2 * num_nodes, batch_size=1, device="cpu", progress=False
    )  # fmt: skip
    assert trainer.history["train_loss"][-1] < trainer.history["train_loss"][1]
    assert len(trainer.nodes) == num_nodes


# ------------------------------------------------------------------------------------------------ what a run records


def test_rows_ledger_and_timeline() -> None:
    trainer = fit(
        AsyncStrategy(SGD, OuterOptimizer(lr=0.1), H=2, buffer=2), network=Network("1 Mbit/s", 0.25), max_seconds=30.0,
        val_seconds=10.0,
    )  # fmt: skip
    history, timeline = trainer.history, trainer.timeline()
    assert isinstance(timeline, AsyncTimeline)
    assert all(a <= b for a, b in zip(history["sim_seconds"], history["sim_seconds"][1:]))
    assert history.last("sim_seconds") == timeline.seconds <= 30
    rows = history.rows[1:]
    assert [row["version"] for row in rows] == [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert {row["num_arrived"] for row in rows} == {2}
    first = [next(row["step"] for row in rows if row["sim_seconds"] >= bound) for bound in (10, 20)]
    assert [row["step"] for row in rows if "val_loss" in row] == [*first, len(rows)]

    num_bytes = sum(p[0].numel() * p.element_size() for p in server_of(trainer).values())
    counts = trainer.ledger.summary()
    arrivals = 2 * len(rows)
    assert counts["server_gather"] == (arrivals, num_bytes * arrivals / K)
    ups = [getattr(entry.transfer.who, "up", None) for entry in trainer.ledger if entry.operation == "server_gather"]
    assert ups == [(event.node,) for event in timeline.events if isinstance(event, Arrival)]
    assert trainer.ledger.total_bytes == num_bytes * arrivals / K
    assert trainer.ledger.total_received_bytes == pytest.approx(num_bytes * counts["server_send"][0] / K)

    per_node = timeline.per_node
    assert bool((per_node.computed <= timeline.seconds).all())
    assert torch.allclose(per_node.computed + per_node.waited, torch.full((K,), timeline.seconds, dtype=F64))
    assert 0 < timeline.utilization < 1
    bars = timeline.bars()
    assert sum(bar.end - bar.begin for bar in bars if bar.kind == "round") <= float(per_node.computed.sum())
    assert timeline.plot().axes[0].get_xlabel() == "seconds"
    with pytest.raises(ValueError, match="order of an asynchronous run depends on its network"):
        trainer.timeline(Network(1e9), Compute(1.0))
    with pytest.raises(ValueError, match="asynchronous run"):
        price(trainer.ledger, Network(1e9), Compute(1.0))


def test_utilization_is_the_part_of_the_time_that_nodes_compute() -> None:
    """Without a network and without waiting, all of it."""
    timeline = fit(AsyncStrategy(SGD, OuterOptimizer(lr=0.1), H=3), max_updates=17).timeline()
    assert timeline.utilization == pytest.approx(1)
    waits = fit(AsyncStrategy(SGD, OuterOptimizer(lr=0.1), H=2, buffer=K, max_wait=math.inf), max_updates=3).timeline()
    assert waits.utilization == pytest.approx((1 + 2 + 1.5 + 4) / 4 / 4)


# ------------------------------------------------------------------------------------------------------- resumption


@pytest.mark.parametrize("settings", [
    {}, {"buffer": 3, "max_wait": 1.0}, {"server": DelayedNesterov(0.1, 0.9, 3, 0.1), "dylu": True},
])  # fmt: skip
def test_a_resumed_run_is_an_uninterrupted_one(settings: dict[str, Any], tmp_path: pathlib.Path) -> None:
    """From any update: the same bits, rows and bytes."""

    def run(updates: int, folder: str, **more: Any) -> Trainer[nn.Module]:
        strategy = AsyncStrategy("adamw", **{"server": OuterOptimizer(lr=0.1), "H": 3, "lr": 0.01, **settings})
        return fit(
            strategy, max_updates=updates, network=Network(1e6, 0.1), save_dir=tmp_path / folder, val_interval=4,
            checkpoint_interval=1, keep_checkpoints=100, **more,
        )  # fmt: skip

    whole = run(11, "whole")
    for update in (1, 4, 10):
        file = tmp_path / "whole" / f"step-{update:09d}.pt"
        resumed = run(11, f"from {update}", resume=file)
        assert largest_gap(server_of(resumed), server_of(whole)) == 0
        timed = ("seconds", "steps_per_s", "examples_per_s", "bytes_per_s", "nodes_per_call", "memory_bytes")
        for a, b in zip(resumed.history.rows, whole.history.rows):
            assert str({name: a[name] for name in sorted(a) if name not in timed}) == str(
                {name: b[name] for name in sorted(b) if name not in timed}
            )
        assert list(resumed.ledger) == list(whole.ledger)
    run(7, "shorter")
    longer = run(11, "longer", resume=tmp_path / "shorter")
    # It computes rounds that the shorter one left out, since they would not have arrived, in other calls.
    assert largest_gap(server_of(longer), server_of(whole)) < 1e-14


def test_ctrl_c_keeps_the_run_so_far(tmp_path: pathlib.Path) -> None:
    class Stopped(Trainer[nn.Module]):
        def after_step(self, row: dict[str, Any]) -> None:
            if row["step"] == 5:
                raise KeyboardInterrupt

    trainer = Stopped(make_model("MLP", dtype=F64), data())
    strategy = AsyncStrategy(SGD, OuterOptimizer(lr=0.1), H=2)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(strategy, K, compute=Compute(1.0), max_updates=9, batch_size=B, device="cpu", progress=False)
    assert trainer.history.last("step") == 5
    assert len(trainer.nodes) == K


def test_another_network_is_another_run(tmp_path: pathlib.Path) -> None:
    strategy = AsyncStrategy(SGD, OuterOptimizer(lr=0.1), H=2)
    fit(strategy, max_updates=4, save_dir=tmp_path)
    for changed in ({"network": Network(1e6, 0.1)}, {"compute": Compute([1.0, 2.0, 1.5, 4.1])}):
        with pytest.raises(ValueError, match="belongs to another run"):
            fit(strategy, max_updates=8, save_dir=tmp_path, resume=True, **changed)


# ------------------------------------------------------------------------------------------------------- derivatives


@pytest.mark.parametrize("settings", [{}, {"buffer": 2}, {"max_wait": 1.0, "dylu": True}])
@pytest.mark.parametrize("inner", ["sgd", "adamw"])
def test_derivatives_equal_finite_differences(settings: dict[str, Any], inner: str) -> None:
    """By the discount of staleness, the server's rate and momentum, and the nodes' rate."""
    x, y = make_data("MLP", 12 * 3 * 4, 0, F64)
    assert isinstance(x, Tensor)
    assert isinstance(y, Tensor)
    batches = (x.view(12, 3, 4, -1), y.view(12, 3, 4, *y.shape[1:]))
    model = make_model("MLP", dtype=F64)

    def loss(discount: Tensor, lr: Tensor, momentum: Tensor, inner_lr: Tensor) -> Tensor:
        server = OuterOptimizer(OptimSpec("sgd", lr=lr, momentum=momentum))
        strategy = AsyncStrategy(
            OptimSpec(inner, lr=inner_lr), server, H=2, staleness=lambda s: (1.0 + s) ** -discount, **settings
        )
        outcome = rollout(
            model, strategy, batches, num_nodes=3, eval_batch=make_data("MLP", 8, 1, F64),
            compute=Compute([1.0, 2.0, 2.9]), max_updates=8,
        )  # fmt: skip
        return outcome.loss

    values = [torch.tensor(v, dtype=F64, requires_grad=True) for v in (0.5, 0.3, 0.8, 0.01)]
    slopes = torch.autograd.grad(loss(*values), values)
    for i, slope in enumerate(slopes):
        up, down = ([v.detach() + sign * 1e-6 * (i == j) for j, v in enumerate(values)] for sign in (1, -1))
        assert slope.item() == pytest.approx((loss(*up) - loss(*down)).item() / 2e-6, rel=1e-5)
        assert slope.item() != 0


def test_a_rollout_is_what_fit_does() -> None:
    strategy = AsyncStrategy("adamw", DelayedNesterov(0.2, 0.9), H=2, lr=0.01)
    trainer = fit(strategy, max_updates=15)
    batches = Batches(data(), K, B, seed=3)
    outcome = rollout(
        make_model("MLP", dtype=F64), strategy, [batches[step] for step in range(14)], num_nodes=K, seed=3,
        eval_batch=make_data("MLP", 12, 1, F64), compute=Compute([1.0, 2.0, 1.5, 4.0]), max_updates=15,
    )  # fmt: skip
    assert largest_gap(outcome.params, server_of(trainer)) < 1e-13
    assert outcome.loss.item() == pytest.approx(trainer.history.last("val_loss"), rel=1e-12)
    assert outcome.bytes.tolist() == trainer.history["bytes_step"][1:]


# ------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(("make", "match"), [
    (lambda: AsyncStrategy(server=untyped("sgd")), "server is of type str; give a server such as OuterOptimizer"),
    (lambda: AsyncStrategy(H=0), "H=0 must be an integer >= 1"),
    (lambda: AsyncStrategy(server=FedBuff(4), buffer=3), "buffer=3, and the server has buffer=4"),
    (lambda: AsyncStrategy(server=FedBuff(4), staleness=lambda s: 1.0), "leave out staleness"),
    (lambda: AsyncStrategy(max_wait=-1.0), "max_wait=-1.0"),
    (lambda: AsyncStrategy(delay_threshold=0), "delay_threshold=0 must be an integer >= 1, or None"),
    (lambda: AsyncStrategy(grace=untyped("half")), "grace='half'.*full.*until_last"),
    (lambda: AsyncStrategy(staleness=untyped("sqrt")), "staleness='sqrt'.*inverse_sqrt"),
    (lambda: AsyncStrategy(dylu=True, local_steps=[1, 2]), "dylu=True and local_steps"),
    (lambda: AsyncStrategy(local_steps=untyped(3)), "local_steps=3 must be a list"),
    (lambda: AsyncStrategy(local_steps=[3, 0]), "local_steps=0 must be an integer >= 1"),
    (lambda: AsyncStrategy(**{"bufer": untyped(3)}), "did you mean 'buffer'"),
    (lambda: DelayedNesterov(buffer=4, c=0.5), r"c=0.5 must be in \[0, 1 / buffer\] = \[0, 0.25\]"),
    (lambda: DelayedNesterov(lr=torch.ones(2)), "there is one server"),
    (lambda: HeLoCo(momentum=1.0), "momentum=1.0"),
    (lambda: FedBuff(buffer=0), "buffer=0"),
])  # fmt: skip
def test_wrong_settings(make: Callable[[], Any], match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        make()


@pytest.mark.parametrize(("options", "match"), [
    ({"compute": None}, "AsyncStrategy needs compute="),
    ({"compute": Compute([1.0, 2.0])}, "Compute has seconds for 2 nodes"),
    ({"backend": "processes", "num_processes": 2}, "AsyncStrategy does not support backend='processes'"),
    ({"exact": True}, "does not support exact=True"),
    ({"compile": True}, "does not support compile=True"),
    ({"max_seconds": 0.5}, "max_seconds=0.5 ends the run before the first update"),
    ({"max_updates": 0}, "max_updates=0"),
    ({"max_seconds": 5.0, "compute": Compute(0.0)}, "rounds that take no time never end"),
])  # fmt: skip
def test_wrong_options(options: dict[str, Any], match: str) -> None:
    steps: dict[str, Any] = {} if "max_seconds" in options else {"max_steps": 4}
    with pytest.raises(ValueError, match=match):
        fit(AsyncStrategy(SGD, H=2), **steps, **options)


@pytest.mark.parametrize("option", ["max_updates", "val_seconds"])
def test_options_of_asynchronous_runs_alone(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} is for asynchronous runs"):
        fit(DiLoCoStrategy(H=2), **{"max_steps": 4, option: untyped(5)})


def test_divergence_is_told() -> None:
    with pytest.raises(DivergenceError):
        fit(AsyncStrategy(OptimSpec("sgd", lr=1e200), OuterOptimizer(lr=1.0), H=2), max_updates=20)


@pytest.mark.parametrize("function", ["sweep", "verify", "dry_run", "estimate_memory", "learn"])
def test_what_needs_steps_of_all_nodes_says_so(function: str) -> None:
    strategy, model = AsyncStrategy(SGD, OuterOptimizer(lr=0.1), H=2), make_model("MLP", dtype=F64)
    calls: dict[str, Callable[[], Any]] = {
        "sweep": lambda: sweep(model, data(), strategy=strategy, grid={"seed": [0]}, num_nodes=2, max_steps=2),
        "verify": lambda: verify(strategy, model, data()),
        "dry_run": lambda: dry_run(model, strategy, num_nodes=2, max_steps=2),
        "estimate_memory": lambda: estimate_memory(model, strategy, 2, 4),
        "learn": lambda: learn(
            lambda n: strategy,
            {"lr": Curve(0.1)},
            runs=lambda seed: (model, data()),
            num_nodes=2,
            max_steps=2,
            steps=1,
            device="cpu",
        ),
    }
    with pytest.raises(ValueError, match=r"AsyncStrategy (has no steps that all nodes take together|needs compute=)"):
        calls[function]()


@pytest.mark.parametrize("strategy", [
    AsyncStrategy(SGD, OuterOptimizer(OptimSpec("sgd", lr=0.5)), H=2), HALoSStrategy(SGD, 2, H=2, local_updates=2),
    ADPSGDStrategy(SGD), DecoupledDiLoCoStrategy(SGD, H=2),
])  # fmt: skip
def test_arrivals_at_one_time_whatever_the_unit(strategy: Any) -> None:
    """In seconds, tenths and thirds of them, and where everybody is always there."""

    def order(unit: float, **settings: Any) -> list[Any]:
        trainer = Trainer(make_model("MLP", dtype=F64), data())
        trainer.fit(
            strategy, 3, max_updates=12, compute=Compute([1.0 * unit, 3.0 * unit, 6.0 * unit]), val_size=0,
            batch_size=B, progress=False, device="cpu", **settings,
        )  # fmt: skip
        names = ("staleness", "train_loss")
        return [[row.get(name) for name in names] for row in trainer.history.rows[1:]]

    expected = order(1.0)
    assert order(0.1) == expected
    assert order(1 / 3) == expected
    assert order(0.1, availability=lambda step: [0, 1, 2]) == expected
