"""Averages, and the exchanges that hold them: named strategies out of bricks, and what only bricks can say."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.helpers import Recording, assert_close, begun, run, stacked
from tests.models import make_batches, make_model
from vecgym import OptimSpec, Trainer, sweep, verify
from vecgym.availability import Trace
from vecgym.collectives import StackedCollectives
from vecgym.compress import QSGD, Chain, ChunkedTopK, PowerSGD, Quantise, RandomK, StatQuantise, TopK
from vecgym.compress.codecs import Draw
from vecgym.core import tree
from vecgym.core.errors import VecgymWarning
from vecgym.core.tree import Tree
from vecgym.simulation.simulation import Part
from vecgym.simulation.state import Labelled
from vecgym.simulation.timetable import Mark, RunFacts
from vecgym.strategy import (
    EF21,
    AllReduceStrategy,
    Average,
    CommunicateOptimizeStrategy,
    Compressed,
    Corrupted,
    DiLoCoStrategy,
    Eager,
    Exchange,
    FedAvgStrategy,
    GossipStrategy,
    Mean,
    Mix,
    MostMoved,
    Outer,
    PartitionedSelector,
    Private,
    RandomSelector,
    Robust,
    Rounds,
    ServerMean,
    Sparse,
    SPARTAStrategy,
    Stage,
    Strategy,
    StrongestCosines,
    SyncWeight,
)
from vecgym.strategy.robust import median
from vecgym.strategy.stages import ExchangeFacts, Memory, Stages

K, LR, SEED = 5, 0.1, 42
NESTEROV = OptimSpec("sgd", lr=0.7, momentum=0.9, nesterov=True)
SLOW = OptimSpec("sgd", lr=0.5, momentum=0.6)


def lie(x: Tensor) -> Tensor:
    return -20 * x


def of(*exchanges: Exchange) -> Strategy:
    return CommunicateOptimizeStrategy(list(exchanges), "sgd", lr=LR)


# ----------------------------------------------------------------------------------------- named strategies

PAIRS: dict[str, tuple[Callable[[], Exchange], Callable[[], Strategy]]] = {
    "AllReduce": (lambda: Exchange(Mean(), of="gradients"), lambda: AllReduceStrategy("sgd", lr=LR)),
    "FedAvg": (lambda: Exchange(Mean(), every=4), lambda: FedAvgStrategy("sgd", H=4, lr=LR)),
    "FedAvg in islands": (
        lambda: Exchange(Mean(2), every=4),
        lambda: FedAvgStrategy("sgd", H=4, island_size=2, lr=LR),
    ),
    "FedAvg at a server": (
        lambda: Exchange(ServerMean(), every=4, participation=0.4),
        lambda: FedAvgStrategy("sgd", H=4, participation=0.4, lr=LR),
    ),
    "FedAvg in part": (
        lambda: Exchange(Mean(), SyncWeight([0.5] * 12)),
        lambda: FedAvgStrategy("sgd", sync_weight=[0.5] * 12, lr=LR),
    ),
    "SPARTA": (lambda: Exchange(Sparse(0.2, Mean())), lambda: SPARTAStrategy(0.2, "sgd", lr=LR)),
    "SPARTA, late": (
        lambda: Exchange(Sparse(RandomSelector(0.2), Mean()), delay=2),
        lambda: SPARTAStrategy(0.2, "sgd", delay=2, lr=LR),
    ),
    "gossip": (lambda: Exchange(Mix("ring"), every=2), lambda: GossipStrategy("ring", 2, "sgd", lr=LR)),
    "DiLoCo": (lambda: Exchange(Outer(Mean(), NESTEROV), every=4), lambda: DiLoCoStrategy("sgd", NESTEROV, H=4, lr=LR)),
    "DiLoCo, top-k": (
        lambda: Exchange(Outer(Compressed(Mean(), TopK(0.2)), NESTEROV), every=4),
        lambda: DiLoCoStrategy("sgd", NESTEROV, H=4, lr=LR, compression=TopK(0.2)),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_named_strategies_are_bricks(name: str) -> None:
    brick, today = PAIRS[name]
    model, batches = make_model("MLP", dtype=torch.float64), stacked(make_batches("MLP", 12, K, 3, dtype=torch.float64))
    ours, theirs = run(model, of(brick()), batches), run(model, today(), batches)
    assert_close(ours.params, theirs.params, 1e-15)
    assert ours.comm.ledger.total_bytes == theirs.comm.ledger.total_bytes > 0


# ----------------------------------------------------------------------------------------- against naive twins


class Two(nn.Module):
    """1/2 |a - c[:4]|^2 + 1/2 |b - c[4:]|^2: the gradient of a node is its parameters minus the mean of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.arange(4.0, dtype=torch.float64))
        self.b = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, batch: Tensor | tuple[Tensor]) -> Tensor:
        c = batch if isinstance(batch, Tensor) else batch[0]
        return ((self.a - c[:, :4]).square().sum(-1) + (self.b - c[:, 4:]).square().sum(-1)).mean() / 2


def batches(steps: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(K, 2, 7, generator=g, dtype=torch.float64) for _ in range(steps)]


class Node:
    """One node of the twins: named tensors, and a plain SGD step."""

    def __init__(self) -> None:
        self.theta = {name: p.detach().clone() for name, p in Two().named_parameters()}
        self.outer = {name: p.clone() for name, p in self.theta.items()}
        self.m = {name: torch.zeros_like(p) for name, p in self.theta.items()}
        self.e = {name: torch.zeros_like(p) for name, p in self.theta.items()}

    def train(self, c: Tensor, names: str = "ab") -> None:
        target = {"a": c[:, :4].mean(0), "b": c[:, 4:].mean(0)}
        self.theta |= {name: self.theta[name] - LR * (self.theta[name] - target[name]) for name in names}

    def step_outer(self, name: str, delta: Tensor) -> None:
        """SLOW, a torch SGD with momentum."""
        self.m[name] = 0.6 * self.m[name] + delta
        self.outer[name] = self.outer[name] - 0.5 * self.m[name]


def check(nodes: Sequence[Node], found: dict[str, Tensor]) -> None:
    for name in ("a", "b"):
        expected = torch.stack([node.theta[name] for node in nodes])
        assert_close({name: found[name].expand(K, -1)}, {name: expected}, 1e-12)


def strongest(x: Tensor, k: int) -> Tensor:
    kept = torch.zeros_like(x)
    chosen = x.abs().argsort(descending=True)[:k]
    kept[chosen] = x[chosen]
    return kept


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_topk_diloco_in_islands_of_those_who_take_part(decay: float, differentiable: bool) -> None:
    """One expression. Who takes part, and with whom, is asked of the library; all else is the twin's."""
    H, steps = 3, 14
    how = Outer(Compressed(Mean(island_size=2), TopK(k=2), decay=decay), SLOW)
    ours = run(Two(), of(Exchange(how, H, participation=0.8)), batches(steps), differentiable=differentiable, seed=SEED)
    nodes, sizes = [Node() for _ in range(K)], set()
    for t, c in enumerate(batches(steps)):
        active = ours.active[t] or ()
        assert len(active) == 4
        assert active == ours.active[t - t % H]
        for i in active:
            nodes[i].train(c[i])
        if (t + 1) % H:
            continue
        part = Part.alone(StackedCollectives(K).among(active), step=t, seed=SEED)
        for members in Mean(island_size=2).groups(part) or ():
            island = [active[i] for i in members]
            sizes.add(len(island))
            for name in ("a", "b"):
                sent = []
                for i in island:
                    p = nodes[i].outer[name] - nodes[i].theta[name] + decay * nodes[i].e[name]
                    sent.append(strongest(p, 2))
                    nodes[i].e[name] = p - sent[-1]
                for i in island:
                    nodes[i].step_outer(name, torch.stack(sent).mean(0))
                    nodes[i].theta[name] = nodes[i].outer[name].clone()
    assert sizes == {2}
    check(nodes, ours.params)


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize(("delay", "alpha"), [(0, 0.0), (2, 0.5), (4, 0.25), (6, 0.5)])
def test_streaming_diloco(delay: int, alpha: float, differentiable: bool) -> None:
    """Two fragments, a and b; a delay may be longer than a round."""
    H, steps = 4, 19
    exchange = Exchange(Outer(Mean(), SLOW), H, fragments=2, offsets=[4, 6], delay=delay, keep=alpha)
    ours = run(Two(), of(exchange), batches(steps), differentiable=differentiable)
    nodes = [Node() for _ in range(K)]
    under_way: dict[tuple[str, int], Tensor] = {}
    for t, c in enumerate(batches(steps)):
        for i, node in enumerate(nodes):
            node.train(c[i])
        for name, offset in (("a", 4), ("b", 6)):
            if t + 1 >= offset and (t + 1 - offset) % H == 0:
                moved = [node.outer[name] - node.theta[name] for node in nodes]
                under_way[name, t + delay] = torch.stack(moved).mean(0)
            if (name, t) in under_way:
                delta = under_way.pop((name, t))
                for node in nodes:
                    node.step_outer(name, delta)
                    node.theta[name] = alpha * node.theta[name] + (1 - alpha) * node.outer[name]
    check(nodes, ours.params)
    lags = {entry.transfer.lag for entry in ours.comm.ledger}
    assert lags == {delay}


@pytest.mark.parametrize("delay", [0, 3])
def test_streaming_diloco_of_those_who_take_part(delay: int) -> None:
    """A node that trains when a fragment is sent takes part, and takes the step later; others keep their values."""
    H, steps = 4, 19
    exchange = Exchange(Outer(Mean(), SLOW), H, fragments=2, offsets=[4, 6], delay=delay, keep=0.5, participation=0.6)
    ours = run(Two(), of(exchange), batches(steps), seed=SEED)
    nodes, under_way = [Node() for _ in range(K)], {}
    for t, c in enumerate(batches(steps)):
        active = ours.active[t] or ()
        assert len(active) == 3
        assert active == ours.active[t - t % H]
        for i in active:
            nodes[i].train(c[i])
        for name, offset in (("a", 4), ("b", 6)):
            if t + 1 >= offset and (t + 1 - offset) % H == 0:
                moved = [nodes[i].outer[name] - nodes[i].theta[name] for i in active]
                under_way[name, t + delay] = active, torch.stack(moved).mean(0)
            members, delta = under_way.get((name, t), ([], torch.zeros(())))
            for i in members:
                nodes[i].step_outer(name, delta)
                nodes[i].theta[name] = 0.5 * nodes[i].theta[name] + 0.5 * nodes[i].outer[name]
    check(nodes, ours.params)


@pytest.mark.parametrize("offsets", [[1, 3], [4, 2]])
def test_offsets(offsets: list[int]) -> None:
    exchange = Exchange(Outer(Mean(), SLOW), every=4, fragments=2, offsets=offsets)
    ours = run(Two(), of(exchange), batches(9))
    sent: dict[int, list[int]] = {}
    for entry in ours.comm.ledger:
        sent.setdefault(entry.payload_bytes // 8, []).append(entry.step + 1)
    assert sent == {size: [t for t in range(1, 10) if t >= o and (t - o) % 4 == 0] for size, o in zip((4, 3), offsets)}


@pytest.mark.parametrize("rule", ["mean", "median", "trimmed"])
def test_a_liar(rule: str) -> None:
    """The mean follows it; the median and the trimmed mean are those of a naive loop, near the honest ones."""
    how = {"mean": Mean(), "median": Robust("median"), "trimmed": Robust("trimmed_mean", trim=1)}[rule]
    steps = 8
    ours = run(Two(), of(Exchange(Corrupted(how, [1], lie), of="gradients")), batches(steps))
    node = Node()
    for c in batches(steps):
        target = torch.cat([node.theta["a"], node.theta["b"]]) - c.mean(1)  # [K, 7], the gradients
        g = torch.stack([lie(x) if i == 1 else x for i, x in enumerate(target)]).sort(0).values
        if rule == "mean":
            g = g.mean(0)
        else:
            g = g[2] if rule == "median" else g[1:-1].mean(0)
        node.theta = {"a": node.theta["a"] - LR * g[:4], "b": node.theta["b"] - LR * g[4:]}
    check([node] * K, ours.params)
    honest = run(Two(), of(Exchange(Mean(), of="gradients")), batches(steps))
    far = max(float((ours.params[name] - honest.params[name]).abs().max()) for name in ("a", "b"))
    assert (far > 5) == (rule == "mean"), far


@pytest.mark.parametrize(
    "around", [lambda inner: Corrupted(inner, list(range(K)), lie), lambda inner: Private(inner, 1e-3, 1.0)]
)
def test_who_takes_no_part_keeps_what_it_has(around: Callable[[Average], Average]) -> None:
    ours = run(Two(), of(Exchange(around(Mean()), participation=0.5)), batches(1), seed=SEED)
    alone = run(Two(), of(), batches(1)).params
    start = Two()
    for i in range(K):
        for name, p in start.named_parameters():
            rests = i not in (ours.active[0] or ())
            assert torch.equal(ours.params[name][i], p) == rests
            assert rests or not torch.equal(ours.params[name][i], alone[name][i])


@pytest.mark.parametrize("how", [Mean(), Sparse(1.0, Mean())])
def test_late_averages_of_those_who_took_part(how: Average) -> None:
    """Values that some nodes agreed on are written by these nodes, whoever takes part by then."""
    H, delay, steps = 2, 3, 11
    ours = run(Two(), of(Exchange(how, every=H, delay=delay, participation=0.6)), batches(steps), seed=SEED)
    nodes, under_way = [Node() for _ in range(K)], {}
    for t, c in enumerate(batches(steps)):
        active = ours.active[t] or ()
        assert len(active) == 3
        for i in active:
            nodes[i].train(c[i])
        if (t + 1) % H == 0:
            mean = {name: torch.stack([nodes[i].theta[name] for i in active]).mean(0) for name in ("a", "b")}
            under_way[t + delay] = active, mean
        for i in under_way.get(t, ([], {}))[0]:
            nodes[i].theta = dict(under_way[t][1])
    check(nodes, ours.params)


def test_the_median_in_islands() -> None:
    comm, x = Recording(6), {"w": torch.arange(6.0)[:, None] ** 2}
    how, part = Robust("median", island_size=3), Part.alone(comm, seed=3)
    found = how(x, part)
    for island in how.groups(part) or ():
        expected = x["w"][list(island)].median(0).values
        assert all(torch.equal(found["w"][i], expected) for i in island)


def exchanges(how: Average, inplace: bool, num_exchanges: int = 6) -> Iterator[tuple[Tensor, Tensor, Part]]:
    """The nodes' inputs, [K, 7], and their results, in one exchange after the other."""
    g = torch.Generator().manual_seed(2)
    memory = begun(how, {"w": torch.zeros(1, 7, dtype=torch.float64)}, K, inplace)
    for i in range(num_exchanges):
        x = torch.randn(K, 7, generator=g, dtype=torch.float64)
        part = Part.alone(StackedCollectives(K), number=i, step=i, seed=SEED, inplace=inplace)
        yield x, how({"w": x.clone()}, part, memory)["w"].expand(K, -1), part


@pytest.mark.parametrize("inplace", [True, False])
def test_the_residuals_of_drawn_coordinates(inplace: bool) -> None:
    """A coordinate that is not drawn keeps its residual, which is sent when it is drawn again."""
    selector, e = PartitionedSelector(0.4), torch.zeros(K, 7, dtype=torch.float64)
    shapes = {"w": torch.Size([7])}
    drawn = selector.init(shapes, Part.alone(StackedCollectives(K), seed=SEED))
    for x, found, part in exchanges(Sparse(selector, Compressed(Mean(), TopK(k=1), decay=0.5)), inplace):
        index, drawn = selector.select(shapes, drawn, part.due.number, part)
        at, expected = index["w"], x.clone()
        p = x[:, at] + 0.5 * e[:, at]
        sent = torch.stack([strongest(row, 1) for row in p])
        e[:, at], expected[:, at] = p - sent, sent.mean(0)
        assert_close({"w": found}, {"w": expected}, 1e-14)


@pytest.mark.parametrize("differentiable", [False, True])
def test_codes_to_a_server_and_the_residuals_of_those_who_send_none(differentiable: bool) -> None:
    steps, exchange = 9, Exchange(Compressed(ServerMean(), TopK(k=2)), participation=0.4)
    ours = run(Two(), of(exchange), batches(steps), seed=SEED, differentiable=differentiable)
    nodes = [Node() for _ in range(K)]
    for t, c in enumerate(batches(steps)):
        senders = ours.active[t] or ()
        assert len(senders) == 2
        for name in ("a", "b"):
            sent = []
            for i in senders:
                nodes[i].train(c[i], name)
                p = nodes[i].theta[name] + nodes[i].e[name]
                sent.append(strongest(p, 2))
                nodes[i].e[name] = p - sent[-1]
            for node in nodes:
                node.theta[name] = torch.stack(sent).mean(0)
    check(nodes, ours.params)
    for name in ("a", "b"):
        assert_close(ours.state.own["0.0/residual"][name], torch.stack([node.e[name] for node in nodes]), 1e-12)
    assert any(i not in (ours.active[-1] or ()) and bool(node.e["a"].any()) for i, node in enumerate(nodes))


@pytest.mark.parametrize("inplace", [True, False])
def test_codes_to_neighbours(inplace: bool) -> None:
    how, e = Compressed(Mix("ring"), TopK(k=2)), torch.zeros(K, 7, dtype=torch.float64)
    for x, found, part in exchanges(how, inplace):
        p = x + e
        sent = torch.stack([strongest(row, 2) for row in p])
        e = p - sent
        assert_close({"w": found}, {"w": (sent.roll(1, 0) + sent + sent.roll(-1, 0)) / 3}, 1e-14)
        (entry,) = part.comm.ledger
        assert (entry.operation, entry.sent_bytes) == ("all_gather", 2 * 2 * (8 + 4))  # to both neighbours


@pytest.mark.parametrize(
    ("inner", "members", "pairs"),
    [(Mean(island_size=2), 5, 2 * 2), (Mean(island_size=2), 2, 2), (Robust(island_size=3), 5, 3 * 2 + 2 * 1),
     (Mean(), 3, 3 * 2)],
)  # fmt: skip
def test_codes_go_to_the_nodes_of_an_island(inner: Any, members: int, pairs: int) -> None:
    """A node that is alone, or sits out, sends nothing."""
    comm, senders = StackedCollectives(5), members - (inner == Mean(island_size=2) and members % 2)
    among = comm.among(list(range(members)))
    Compressed(inner, TopK(k=2), error_feedback=False)({"w": torch.ones(members, 7)}, Part.alone(among))
    (entry,) = comm.ledger
    assert entry.sent_bytes == entry.received_bytes == pairs * 2 * (4 + 4) / 5
    assert comm.ledger.total_payload_bytes == senders * 2 * (4 + 4) / 5


class Pushed(nn.Module):
    """Its gradient is what the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4))

    def forward(self, batch: Tensor) -> Tensor:
        return -(self.w * batch).sum(-1).mean()


def test_what_moved_most_is_written_late_where_it_was_sent() -> None:
    """The other coordinates stay as the nodes have them by then."""
    strategy = CommunicateOptimizeStrategy([Exchange(MostMoved(fraction=0.25), delay=2)], "sgd", lr=1.0)
    moved = [[8.0, 0, 0, 0], [0, 0, 1.0, 0], [0, 1.0, 0, 0]]
    pushes = [torch.tensor([[push], [[0.0] * 4]]) for push in moved]
    seen = [run(Pushed(), strategy, pushes[:t], max_steps=3).params["w"].tolist() for t in (1, 2, 3)]
    assert seen[1] == [[8, 0, 1, 0], [0, 0, 0, 0]]
    assert seen[2] == [[4, 1, 1, 0], [4, 0, 0, 0]]  # node 1 sent its first coordinate too: of equals the first


def test_what_is_private_is_clipped_and_blurred_as_much_as_it_says() -> None:
    comm, x = StackedCollectives(4), {"a": torch.full((4, 30_000), 3.0), "b": torch.full((4, 10_000), 3.0)}
    found = Private(Mean(), clip=2.0, noise=0.5)(x, Part.alone(comm))
    clipped = Private(Mean(), clip=2.0, noise=0.0)(x, Part.alone(comm))
    norm = torch.cat([clipped["a"], clipped["b"]], 1).norm().item()
    assert norm == pytest.approx(2.0, rel=1e-4)
    noise = torch.cat([found["a"] - clipped["a"], found["b"] - clipped["b"]], 1)
    assert noise.std().item() == pytest.approx(0.5 * 2.0 / 4**0.5, rel=0.02)
    assert abs(noise.mean().item()) < 0.02


# ------------------------------------------------------------------------------------ the same on real processes

CHUNKS = Compressed(Mean(), Chain(ChunkedTopK(2, 2, "senders"), StatQuantise(2)), decay=0.9, momentum=0.5)
PROCESSES: dict[str, Callable[[], Exchange]] = {
    "top-k, islands, participation": lambda: Exchange(
        Outer(Compressed(Mean(island_size=2), TopK(0.3), decay=0.9), NESTEROV), every=3, participation=0.75
    ),
    "streaming": lambda: Exchange(Outer(Mean(), NESTEROV), every=4, fragments=2, delay=2, keep=0.5),
    "streaming, sparse": lambda: Exchange(Outer(Sparse(0.5, Mean(2)), NESTEROV), every=4, fragments=2, delay=3),
    "top-k in two bits": lambda: Exchange(
        Outer(Compressed(Mean(), Chain(TopK(0.4), Quantise(2)), decay=0.95), NESTEROV), every=3
    ),
    "chunks in bins, momentum": lambda: Exchange(Outer(CHUNKS, NESTEROV), every=3),
    "qsgd, estimates": lambda: Exchange(EF21(Mean(), QSGD(3, bucket=2)), of="gradients"),
    "powers of two, islands": lambda: Exchange(Outer(Compressed(Mean(2), "natural"), NESTEROV), every=2),
    "ternary to a server": lambda: Exchange(
        Compressed(ServerMean(), "ternary", reference=True), every=2, participation=0.5
    ),
    "a liar, mean": lambda: Exchange(Corrupted(Mean(), [1], lie), of="gradients"),
    "a liar, median": lambda: Exchange(Outer(Corrupted(Robust("median"), [1], lie), NESTEROV), every=3),
    "inner products, krum": lambda: Exchange(
        Outer(Corrupted(Robust("krum", f=1, nnm=True), [1], "ipm"), NESTEROV), every=3
    ),
    "a little is enough, a centre": lambda: Exchange(
        Corrupted(Robust("centred_clipping", tau=0.1), [3], "alie"), every=2, participation=0.75
    ),
    "noise, buckets of islands": lambda: Exchange(
        Corrupted(Robust("geometric_median", bucketing=2, island_size=3), [3], "gaussian"), every=2
    ),
    "a lie of one's own, at a server": lambda: Exchange(
        Corrupted(Robust("mda", f=1, server=True), [3], lambda x, honest: -x[honest].sum(0)), every=2, delay=1
    ),
    "codes to a server": lambda: Exchange(
        Compressed(ServerMean(), TopK(0.3), reference=True), every=2, participation=0.5
    ),
    "codes to neighbours": lambda: Exchange(Compressed(Mix("ring"), Chain(TopK(0.4), Quantise(2))), every=2),
    "codes of drawn coordinates, late": lambda: Exchange(
        Sparse(PartitionedSelector(0.5), Compressed(Mean(), "int8", reference=True)), every=2, delay=1
    ),
    "what moved most, late": lambda: Exchange(MostMoved(0.3, bits=8), every=2, delay=1),
    "strongest cosines": lambda: Exchange(Outer(StrongestCosines(0.9, 2, 4), NESTEROV), every=3),
    "codes, median, private": lambda: Exchange(
        Outer(Private(Compressed(Robust("median", island_size=3), "int8"), clip=1.0, noise=0.1), NESTEROV), every=2
    ),
}


@pytest.mark.parametrize("name", PROCESSES)
def test_real_processes_compute_the_same(name: str) -> None:
    x = torch.randn(64, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    report = verify(of(PROCESSES[name]()), Two(), TensorDataset(x), num_nodes=4, num_processes=2, steps=9)
    assert report.passed, report


HELOCO = Outer(Mean(), NESTEROV, correct="heloco")
FOR_SWEEPS: dict[str, Average] = {
    "mean": Outer(Mean(), NESTEROV), "islands": Outer(Mean(2), NESTEROV), "median": Outer(Robust("median"), NESTEROV),
    "top-k": Outer(Compressed(Mean(), TopK(0.3)), NESTEROV), "eager": Eager(Mean(), NESTEROV), "heloco": HELOCO,
}  # fmt: skip


@pytest.mark.parametrize("how", FOR_SWEEPS)
def test_configurations_of_which_some_nodes_take_part(how: str) -> None:
    """Each computes what it computes alone."""
    x = TensorDataset(torch.randn(64, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    settings: dict[str, Any] = {"num_nodes": K, "max_steps": 7, "batch_size": 4, "device": "cpu", "progress": False}

    def strategy(lr: float) -> Strategy:
        return Strategy("adam", [Exchange(FOR_SWEEPS[how], every=2, participation=0.5)], lr=lr)

    result = sweep(Two(), x, strategy=strategy, grid={"lr": [0.02, 0.03]}, **settings)
    for i, lr in enumerate((0.02, 0.03)):
        trainer = Trainer(Two(), x)
        trainer.fit(strategy(lr), **settings)
        alone = torch.tensor(trainer.history.series("train_loss")[1])
        assert_close({"loss": torch.tensor(result.history(i).series("train_loss")[1])}, {"loss": alone}, 1e-12)


def test_of_a_state_that_is_a_tensor_a_part_is_made() -> None:
    class Counted(Average):
        def init(self, values: Any, run: Any, memory: Memory) -> None:
            memory.shared["count"] = torch.zeros(1)

        def agree(self, x: Any, part: Part, memory: Memory) -> Any:
            memory.shared["count"] = memory.shared["count"] + 1
            return part.comm.mean(x)

    ours = run(Two(), of(Exchange(Counted(), every=SyncWeight([0.5, 0.0, 1.0]))), batches(3))
    assert ours.state.shared["0.0/count"].item() == 1.5


def test_heloco_in_a_process_without_participants() -> None:
    x = TensorDataset(torch.randn(64, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    present = [[True, True], [True, False], [True, True]]
    report = verify(of(Exchange(HELOCO)), Two(), x, num_nodes=2, num_processes=2, steps=3, availability=Trace(present))
    assert report.passed, report


def test_derivatives_through_an_average_in_islands() -> None:
    def loss(lr: Tensor) -> Tensor:
        outer = Outer(Mean(2), OptimSpec("sgd", lr=lr, momentum=0.6))
        exchange = Exchange(outer, every=2, delay=1, keep=0.3, participation=0.8)
        return run(Two(), of(exchange), batches(8), differentiable=True, seed=SEED).losses[-1].nansum()

    lr = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(loss(lr), lr)
    by_differences = (loss(lr.detach() + 1e-5) - loss(lr.detach() - 1e-5)) / 2e-5
    assert slope.item() == pytest.approx(by_differences.item(), rel=1e-6)


# ------------------------------------------------------------------------------------------------ what is refused

REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "gradients of some": (
        lambda: Exchange(Mean(), of="gradients", participation=0.5),
        ValueError,
        "by all nodes, as a whole",
    ),
    "no average": (lambda: Exchange(Mean), TypeError, r"give an Average, such as Mean\(\)"),  # type: ignore[arg-type]
    "offsets": (lambda: Exchange(Outer(Mean()), 100, offsets=[1, 2]), ValueError, "one number for each of the 1 frag"),
    "keep": (lambda: Exchange(Outer(Mean()), keep=1.5), ValueError, r"keep=1.5 must be a number in \[0, 1\]"),
    "fragments of a SyncWeight": (
        lambda: Exchange(Outer(Mean()), SyncWeight([1]), fragments=2),
        ValueError,
        "leave out fragments",
    ),
    "codes of codes": (lambda: Compressed(MostMoved(), "int8"), TypeError, "give Mean"),
    "a reference of neighbours": (
        lambda: Compressed(Mix("ring"), "int8", reference=True),
        ValueError,
        "only an average of all",
    ),
    "PowerSGD of neighbours": (lambda: Compressed(Mix("ring"), PowerSGD(1)), ValueError, "do not share"),
    "a reference of islands": (
        lambda: Compressed(Mean(2), "int8", reference=True),
        ValueError,
        "only an average of all",
    ),
    "PowerSGD of islands": (lambda: Compressed(Mean(2), PowerSGD(1)), ValueError, "do not share"),
    "PowerSGD of a median": (lambda: Compressed(Robust(), PowerSGD(1)), ValueError, "must be a mean"),
    "decay of nothing": (
        lambda: Compressed(Mean(), "int8", error_feedback=False, decay=0.9),
        ValueError,
        "has no effect",
    ),
    "matrices for other coordinates": (
        lambda: begun(
            Sparse(PartitionedSelector(0.5), Compressed(Mean(), PowerSGD(1))), {"w": torch.zeros(1, 4, 4)}, 2
        ),
        ValueError,
        "not one value per coordinate",
    ),
    "trim": (lambda: Robust("trimmed_mean"), ValueError, "trim=1"),
    "too much trimmed": (
        lambda: Robust("trimmed_mean", 2).check(ExchangeFacts(4)),
        ValueError,
        "leaves out all values of 4 nodes",
    ),
    "a liar who is not there": (
        lambda: Corrupted(Mean(), [4]).check(ExchangeFacts(4)),
        ValueError,
        r"nodes=\[4\] of a run of 4 nodes",
    ),
    "too many liars": (lambda: Robust("krum", f=2).check(ExchangeFacts(4)), ValueError, "which needs 5"),
    "too many liars, by the paper": (
        lambda: Robust("krum", f=1, neighbours="n-f-2").check(ExchangeFacts(4)),
        ValueError,
        "which needs 5",
    ),
    "too many liars in an island": (
        lambda: Robust("krum", f=1, island_size=3).check(ExchangeFacts(5)),
        ValueError,
        "f=1 liars of 2 nodes",
    ),
    "too many liars in buckets": (
        lambda: Robust("median", f=1, bucketing=2).check(ExchangeFacts(4)),
        ValueError,
        "f=1 liars of 2 buckets of 4 nodes",
    ),
    "too large an m": (
        lambda: Robust("multi_krum", f=1, m=5).check(ExchangeFacts(4)),
        ValueError,
        "m=5 is larger than the 4 nodes",
    ),
    "too many sets": (lambda: Robust("mda", f=20).check(ExchangeFacts(64)), ValueError, "give a smaller f, or 'mul"),
    "krum of no f": (lambda: Robust("krum"), ValueError, "needs the number of liars: give f=1"),
    "neighbours of no f": (lambda: Robust("median", nnm=True), ValueError, "nnm=True needs the number of liars"),
    "two names": (lambda: Robust("trimmed_mean", trim=1, f=2), ValueError, "two names of one number"),
    "tau of a median": (lambda: Robust(tau=1.0), ValueError, "tau goes with centred_clipping"),
    "m of krum": (lambda: Robust("krum", f=1, m=2), ValueError, "m goes with multi_krum"),
    "whole of a name": (lambda: Robust("krum", f=1, whole=True), ValueError, "sees the whole vector anyway"),
    "a centre of islands": (
        lambda: Robust("centred_clipping", island_size=2),
        ValueError,
        "one for all nodes: leave out island_size=2",
    ),
    "a server of islands": (lambda: Robust(island_size=2, server=True), ValueError, "leave out island_size=2"),
    "an unknown rule": (lambda: Robust("crum", f=1), ValueError, "did you mean 'krum'"),
    "codes of a centre": (
        lambda: Compressed(Robust("centred_clipping"), "int8"),
        ValueError,
        "has a state, which codes do not update",
    ),
    "rows": (lambda: Robust().aggregate(torch.zeros(3)), TypeError, r"\[n, d\], a row for each node"),
    "an unknown attack": (lambda: Corrupted(Mean(), [1], "ipn"), ValueError, "did you mean 'ipm'"),
    "strength of a sign": (lambda: Corrupted(Mean(), [1], "sign_flip", 2.0), ValueError, "has no strength"),
    "strength of a function": (lambda: Corrupted(Mean(), [1], lie, 2.0), ValueError, "has no strength"),
    "twice the same liar": (lambda: Corrupted(Mean(), [1, 1]), ValueError, "different node ids"),
    "no attack": (lambda: Corrupted(Mean(), [1], 3), TypeError, "a function of a tensor"),
    "islands too large": (
        lambda: Exchange(Mean(4)).check(RunFacts(3, 10)),
        ValueError,
        "island_size=4 is larger than the 3",
    ),
}


@pytest.mark.parametrize("setting", REFUSED)
def test_what_cannot_work_is_refused(setting: str) -> None:
    call, error, message = REFUSED[setting]
    with pytest.raises(error, match=message):
        call()


def test_what_never_happens_warns() -> None:
    with pytest.warns(VecgymWarning, match="every=11 is larger than the run's 10 steps"):
        Exchange(Mean(), every=11).check(RunFacts(4, 10))
    with pytest.raises(ValueError, match=r"delay=10 .* no result is used before the run ends"):
        Exchange(Outer(Mean()), every=2, delay=10).check(RunFacts(4, 10))


def test_a_run_that_ends_before_a_fragment_has_its_turn_is_not_warned_of() -> None:
    """Of the first one: the others may come too late."""

    def told(steps: int, every: Any = 8, **settings: Any) -> list[str]:
        strategy = Strategy("sgd", [Exchange(Mean(), every=every, **settings)], lr=0.1)
        run = RunFacts(2, steps, names=("h.0.w", "h.1.w"))
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            strategy.check(2, steps)
            strategy.check_run(run)
        events = [event.what for tick in strategy.timetable(run).ticks() for event in tick]
        assert bool(found) is ("meet" not in events)
        return [str(one.message) for one in found]

    assert [len(told(steps, fragments=2)) for steps in (3, 4, 7, 8)] == [1, 0, 0, 0]
    assert [len(told(steps, lambda step: 8, fragments=2)) for steps in (3, 4, 7)] == [1, 0, 0]
    assert [len(told(steps, fragments=2, offsets=[6, 5])) for steps in (4, 5)] == [1, 0]
    assert [len(told(steps, 4, fragments=2, unit=2)) for steps in (3, 4, 7)] == [1, 0, 0]
    (message,) = told(7)
    assert message.startswith("every=8 is larger than the run's 7 steps: ")


def test_times() -> None:
    for rounds in (Rounds(3), Rounds(3, offset=1), Rounds(2, offset=5), Rounds(1)):
        due = [t for t in range(12) if rounds.due(t)]
        assert [rounds.count(t) for t in range(12)] == [sum(d < t for d in due) for t in range(12)]


def test_a_users_average() -> None:
    class Largest(Average):
        def agree(self, x: Any, part: Part, memory: Memory) -> Any:
            memory.shared["count"] = memory.shared["count"] + 1
            return {name: y.amax(1) for name, y in part.comm.all_gather(x).items()}

        def init(self, values: Any, run: Any, memory: Memory) -> None:
            memory.shared["count"] = torch.zeros(1)

    ours = run(Two(), of(Exchange(Largest(), every=2)), batches(5))
    assert ours.state.shared["0.0/count"].item() == 2
    assert ours.params["a"].shape[0] == K
    assert torch.equal(median(torch.tensor([[[3.0], [1.0], [2.0]]])), torch.tensor([[2.0]]))


# ---------------------------------------------------------------------------- averages in a user's own strategy


class OwnStrategy(Strategy):
    def marks(self, run: RunFacts) -> Any:
        return [Mark("meet")]

    def meet(self, part: Part) -> None:
        part.params = Mix("one_peer_exponential")(part.params, part)


NODES = 8  # in an odd number of rounds each has met three others


def same(own: Strategy, known: Strategy) -> None:
    found, expected = (
        run(Two(), strategy, [torch.cat([x, x])[:NODES] for x in batches(12)], seed=SEED) for strategy in (own, known)
    )
    assert found.comm.ledger.total_bytes == expected.comm.ledger.total_bytes
    for name, p in expected.params.items():
        assert torch.equal(found.params[name], p)


def test_a_users_strategy_counts_its_steps() -> None:
    same(OwnStrategy("sgd", lr=LR), of(Exchange(Mix("one_peer_exponential"))))


def test_other_coordinates_each_time() -> None:
    """Four steps, four sets of them."""
    sparse, x = Sparse(0.1, Mean()), {"w": torch.randn(2, 1000)}
    memory, seen = begun(sparse, x, 2), set()
    for step in range(4):
        after = sparse(x, Part.alone(StackedCollectives(2), number=step, step=step), memory)["w"]
        seen.add(tuple((after[0] == after[1]).nonzero().flatten().tolist()))
    assert len(seen) == 4
    assert 4 * 70 < sum(map(len, seen)) < 4 * 130


# ------------------------------------------------------------------------------------------------- codes of codes


@pytest.mark.parametrize("k", [1, 3, 40])
@pytest.mark.parametrize("first", ["topk", "randomk"])
def test_a_few_values_in_two_bits(first: str, k: int) -> None:
    """The values read are those of the second codec, given the values of the first, in their places."""
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one = TopK(k=k) if first == "topk" else RandomK(k / 40)
    draw = Draw(lambda *ids: torch.Generator().manual_seed(sum(ids)), torch.arange(3))
    codec = Chain(one, Quantise(2))
    code = codec.encode(x, draw)
    sent = one.decode(one.encode(x, draw), x)
    largest = sent.flatten(1).abs().amax(1)[:, None, None]
    expected = (sent / largest).round() * largest
    assert_close({"x": codec.decode(code, x)}, {"x": expected}, 1e-6)
    num_bytes = sum(y[0].nbytes for part, y in code.items() if part not in codec.shared)
    assert num_bytes == -(-k // 4) + 4 + (4 * k if first == "topk" else 0)
    gathered = {part: y[None] if part not in codec.shared else y[:, None] for part, y in code.items()}
    for weights in (None, torch.tensor([[0.5, 0.2, 0.3]])):
        shares = torch.full((3,), 1 / 3) if weights is None else weights[0]
        mean = torch.tensordot(shares.double(), expected, 1)[None]
        assert_close({"x": codec.average(gathered, x, weights)}, {"x": mean}, 1e-6)


def test_a_chain_keeps_the_books() -> None:
    """The rest that was not sent is kept, and a part of it comes back."""
    codec = Chain(TopK(k=2), Quantise(2))
    average = Compressed(Mean(), codec, decay=0.5)
    g = torch.Generator().manual_seed(3)
    values = [{"w": torch.randn(2, 6, generator=g, dtype=torch.float64)} for _ in range(4)]
    memory = begun(average, values[0], 2)
    e = torch.zeros(2, 6, dtype=torch.float64)
    for x in values:
        mean = average(x, Part.alone(StackedCollectives(2)), memory)
        p = x["w"] + 0.5 * e
        sent = codec.decode(codec.encode(p), p)
        e = p - sent
        assert_close({"w": mean["w"]}, {"w": sent.mean(0, keepdim=True)}, 1e-14)
        assert_close(memory.own["residual"], {"w": e}, 1e-14)


def test_what_a_chain_refuses() -> None:
    with pytest.raises(TypeError, match="sends no values that another codec"):
        Chain(Quantise(8), TopK())
    with pytest.raises(TypeError, match="give a codec"):
        Chain(TopK(), "int8")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------ by hand


@pytest.mark.parametrize("inner", [Mean(), Mean(2), Compressed(Mean(), "int8"), Compressed(Mean(2), TopK(k=1))])
@pytest.mark.parametrize("inplace", [False, True])
def test_by_hand_is_what_a_run_does(inner: Average, inplace: bool) -> None:
    """Of all stages: with a residual, and outer parameters of each node where the nodes do not agree."""
    how, start = Outer(inner, OptimSpec("sgd", lr=1.0)), torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64)
    kept, K = start.clone(), 4
    moves = torch.randn(3, K, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    strategy = Strategy("sgd", [Exchange(how)], lr=0.1)
    shared, own = strategy.init(RunFacts(K, 3, SEED), {"w": start.clone()})[::-1]
    own = {name: tree.map_leaves(lambda x: x.expand(K, *x.shape[1:]).clone(), held) for name, held in own.items()}
    memory = how.memory({"w": start}, Part.alone(StackedCollectives(K), inplace=inplace))
    assert memory.common is Stages(how).common
    assert memory.own.keys() | memory.shared.keys() == {name[4:] for name in (*own, *shared) if name.startswith("0.0/")}
    held = Memory(Labelled(own, "0.0/"), Labelled(shared, "0.0/"), Stages(how).common)
    for i, move in enumerate(moves):
        here, there = (
            Part.alone(StackedCollectives(K), number=i, step=i, seed=SEED, inplace=may) for may in (inplace, False)
        )
        x = {"w": start + move}
        found, wanted = how({"w": x["w"].clone()}, here, memory), how(x, there, held)
        assert torch.equal(found["w"], wanted["w"])
    assert torch.equal(start, kept), "the values given are not overwritten"
    for name, tensors in memory.own.items():
        assert all(x.shape[0] == K for x in tree.leaves(tensors)), name


@pytest.mark.parametrize("how", [Outer(Mean()), Compressed(Mean(), "int8"), Eager(Mean())])
def test_what_remembers_asks_for_a_memory(how: Average) -> None:
    part, x = Part.alone(StackedCollectives(2)), {"w": torch.ones(2, 3)}
    with pytest.raises(ValueError, match=re.escape(f"{how!r} remembers something: give a memory, ")):
        how(x, part)
    how(x, part, how.memory({"w": torch.ones(1, 3)}, part))


def test_what_only_begins_with_less_needs_no_memory() -> None:
    class Rest(Stage):
        def init(self, values: Tree, run: RunFacts, memory: Memory) -> Tree:
            return {name: y for name, y in values.items() if name != "own"}

        def send(self, x: Tree, part: Part, memory: Memory) -> Tree:
            return {name: y for name, y in x.items() if name != "own"}

        def write(self, y: Tree, x: Tree, part: Part, memory: Memory) -> Tree:
            return {**x, **y}

    x = {"w": torch.tensor([1.0, 3.0]), "own": torch.tensor([1.0, 3.0])}
    found = Rest(Mean())(x, Part.alone(StackedCollectives(2)))
    assert found["w"].tolist() == [2.0]
    assert found["own"].tolist() == [1.0, 3.0]


def test_shapes_are_checked_by_hand_too() -> None:
    class Wrong(Average):
        def agree(self, x: Tree, part: Part, memory: Memory) -> Tree:
            return tree.map(lambda y: y.mean(0), x)

    with pytest.raises(
        ValueError, match=re.escape("Wrong() returned 'w' of the values in shape []; expected [1 or 2]")
    ):
        Wrong()({"w": torch.tensor([1.0, 3.0])}, Part.alone(StackedCollectives(2)))


@pytest.mark.parametrize(("method", "wrong"), [
    ("send", "Silent(Mean()).send returned None; return the values that the average gets."),
    ("receive", "Silent(Mean()) returned None as values; expected a dict, name -> tensor."),
    ("write", "Silent(Mean()) returned None as values; expected a dict, name -> tensor."),
])  # fmt: skip
def test_a_stage_that_returns_nothing_is_told_so(method: str, wrong: str) -> None:
    silent = type("Silent", (Stage,), {method: lambda self, *_: None})(Mean())
    with pytest.raises(TypeError, match=f"^{re.escape(wrong)}"):
        silent({"w": torch.tensor([1.0, 3.0])}, Part.alone(StackedCollectives(2)))
