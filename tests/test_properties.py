"""Properties of every strategy: one table of strategies x properties. A new strategy joins by adding rows.

STRATEGIES: name -> how to make a small one and what its paper says of it.
ARGUMENTS: class -> a value for each constructor argument that must change a run.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import vecgym.strategy
from tests import helpers
from tests.cards import CARDS, Card, Sent
from tests.helpers import (
    NEEDS_LOOP,
    Run,
    advance,
    assert_close,
    assert_same_bits,
    difference,
    flat,
    reordered,
    rows,
    saved,
    stacked,
)
from tests.models import MODELS, make_batches, make_model
from tests.reference import common
from tests.reference.demo import fold, make_chunks
from vecgym import Trainer, VecgymWarning
from vecgym.collectives import StackedCollectives
from vecgym.collectives.base import T
from vecgym.collectives.topology import Groups, Mixing
from vecgym.compress import PowerSGD, Quantise, RandomK, TopK
from vecgym.core import tree
from vecgym.optim import OptimSpec
from vecgym.simulation import Simulation
from vecgym.simulation.simulation import Part
from vecgym.simulation.timetable import RunFacts, Who
from vecgym.simulation.when import When
from vecgym.strategy import (
    EF21,
    QSR,
    AllReduceStrategy,
    AllToAll,
    Average,
    AveragingCommunicator,
    CHOCOStrategy,
    CommunicateOptimizeStrategy,
    Compressed,
    Corrupted,
    D2Strategy,
    DeMoStrategy,
    DESLOCStrategy,
    DiLoCoStrategy,
    DSMStrategy,
    Eager,
    EagerDiLoCoStrategy,
    EDiTStrategy,
    ExactDiffusionStrategy,
    Exchange,
    FedAvgStrategy,
    FedDynStrategy,
    FedNovaStrategy,
    GossipStrategy,
    GPAStrategy,
    GradientTrackingStrategy,
    LateWindow,
    LocalAdamStrategy,
    MATCHAStrategy,
    Mean,
    MimeStrategy,
    Mix,
    MostMoved,
    MovementPenalty,
    MuLoCoStrategy,
    NoLoCo,
    NoLoCoStrategy,
    Outer,
    PALSGDStrategy,
    PartitionedSelector,
    Private,
    QGMStrategy,
    QuantisedRing,
    RandomSelector,
    RankStrategy,
    RelaySumStrategy,
    Ring,
    Robust,
    ScaffnewStrategy,
    SCAFFOLDStrategy,
    ServerMean,
    SGPStrategy,
    Sparse,
    SparseCommunicator,
    SparseLoCoStrategy,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
    Stage,
    Strategy,
    StreamingDiLoCoStrategy,
    StrongestCosines,
)
from vecgym.strategy.catalogue import CATALOGUE, Knobs
from vecgym.strategy.delivery import Participation

K = 5
STEPS = 7  # not a multiple of H: the run ends in the middle of a round
H = 3
MOMENTUM = OptimSpec(SGD, lr=0.1, momentum=0.9)
EXAMPLES = (3, 1, 4, 1, 5, 9, 2, 6)  # what each node's shard is said to hold

# ------------------------------------------------------------------------------------------- the table

OuterRule = Callable[[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]], None]


def stay(slow: dict[str, Tensor], fast: dict[str, Tensor], memory: dict[str, Tensor]) -> None:
    """Averaging with oneself changes nothing."""
    for name in slow:
        slow[name] = fast[name].clone()


def lookahead(slow: dict[str, Tensor], fast: dict[str, Tensor], memory: dict[str, Tensor]) -> None:
    """Zhang et al., arXiv 1907.08610: phi <- phi + alpha (theta - phi); theta <- phi."""
    for name in slow:
        slow[name] = slow[name] + 0.6 * (fast[name] - slow[name])
        fast[name].copy_(slow[name])


def nesterov(slow: dict[str, Tensor], fast: dict[str, Tensor], memory: dict[str, Tensor]) -> None:
    """m <- mu m + Delta; phi <- phi - eta (Delta + mu m); theta <- phi."""
    for name in slow:
        delta = slow[name] - fast[name]
        memory[name] = 0.9 * memory.get(name, 0.0) + delta
        slow[name] = slow[name] - 0.7 * (delta + 0.9 * memory[name])
        fast[name].copy_(slow[name])


def server_momentum(slow: dict[str, Tensor], fast: dict[str, Tensor], memory: dict[str, Tensor]) -> None:
    """FedAvgM: m <- beta m + Delta; phi <- phi + m; theta <- phi."""
    for name in slow:
        memory[name] = 0.9 * memory.get(name, 0.0) + (fast[name] - slow[name])
        slow[name] = slow[name] + memory[name]
        fast[name].copy_(slow[name])


def server_adam(slow: dict[str, Tensor], fast: dict[str, Tensor], memory: dict[str, Tensor]) -> None:
    """FedAdam: m <- .8 m + .2 Delta; v <- .9 v + .1 Delta^2 from tau^2; phi <- phi + eta m / (sqrt v + tau)."""
    for name in slow:
        delta = fast[name] - slow[name]
        m = memory[f"m {name}"] = 0.8 * memory.get(f"m {name}", 0.0) + 0.2 * delta
        v = memory[f"v {name}"] = 0.9 * memory.get(f"v {name}", torch.full_like(delta, 1e-4)) + 0.1 * delta**2
        slow[name] = slow[name] + 0.05 * m / (v**0.5 + 0.01)
        fast[name].copy_(slow[name])


def heavy_ball(slow: dict[str, Tensor], fast: dict[str, Tensor], memory: dict[str, Tensor]) -> None:
    """NoLoCo: delta <- 0.5 delta + 0.7 (theta - phi); phi <- phi + delta; theta <- phi."""
    for name in slow:
        memory[name] = 0.5 * memory.get(name, 0.0) + 0.7 * (fast[name] - slow[name])
        slow[name] = slow[name] + memory[name]
        fast[name].copy_(slow[name])


ALONE = {"nothing": stay, "nesterov": nesterov, "heavy ball": heavy_ball, "server adam": server_adam}


def ring(*sizes: int) -> float:
    """Payloads that a node sends in one exchange, averaged over K, when rings of these sizes reduce."""
    return sum(n * 2 * (n - 1) / n for n in sizes) / K


def chosen(params: dict[str, Tensor], steps: Sequence[int], p: float = 0.3) -> float:
    """Bytes of SPARTA's random coordinates, averaged in a ring, at these exchanges of a run with seed 42."""
    shapes = {name: x.shape for name, x in params.items()}
    told = [Part.alone(StackedCollectives(1), step=t, seed=42) for t in steps]
    index = [RandomSelector(p).select(shapes, {}, part.due.step, part)[0] for part in told]
    return ring(K) * sum(len(i) * params[name].element_size() for drawn in index for name, i in drawn.items())


def thirds(params: dict[str, Tensor]) -> float:
    """Bytes of a partition of every tensor into three parts, one of them averaged at each step."""
    parts = [x.numel() * (t % 3 + 1) // 3 - x.numel() * (t % 3) // 3 for x in params.values() for t in range(STEPS)]
    return ring(K) * sum(parts) * next(iter(params.values())).element_size()


def strongest(params: dict[str, Tensor], fraction: float, value_bytes: int, scale_bytes: int) -> float:
    """Bytes of the largest `fraction` of every tensor: value and index."""
    return sum(max(1, round(fraction * x.numel())) * (value_bytes + 4) + scale_bytes for x in params.values())


def low_rank(params: dict[str, Tensor]) -> float:
    """Bytes of PowerSGD with rank 1: a row and a column of each matrix, vectors as they are."""
    sides = [min(x.numel(), len(x) + x[0].numel()) if x.dim() > 1 else x.numel() for x in params.values()]
    return ring(K) * sum(sides) * next(iter(params.values())).element_size()


@dataclass(frozen=True)
class Row:
    """A strategy, and what is known of it.

    Attributes:
        make: takes the arguments that all strategies share on top of its own.
        sends: what a node sends in STEPS steps, averaged over K nodes: in units of b * P, or bytes from the parameters.
        outer: what happens to a single node after every H steps; None: what it exchanges with itself is late or lossy.
        averages: nodes with identical shards stay identical, and do what one node alone does.
        proximal_mu: FedProx's.
        server: each participant sends to a server, even if there is only one.
        replicated: the parameters stay the same on every node.
        per_node: parts of the strategy's state that each node has its own of.
    """

    make: Callable[..., Strategy]
    sends: float | Callable[[dict[str, Tensor]], float]
    outer: OuterRule | None = stay
    averages: bool = True
    proximal_mu: float = 0.0
    server: bool = False
    replicated: bool = False
    per_node: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, card: Card) -> Row:
        """The row of the catalogue, which the commands and the benchmarks know too."""
        knobs = Knobs(H=H)
        return cls(
            functools.partial(CATALOGUE[name].make, H=H),
            lambda params: card.sends(Sent(params, K, STEPS, knobs)),
            None if card.alone is None else ALONE[card.alone],
            card.averages,
            server=card.server,
            replicated=card.replicated,
            per_node=card.per_node,
        )

    def bytes(self, params: Mapping[str, Tensor]) -> float:
        if callable(self.sends):
            return self.sends({name: p for name, p in params.items() if p.requires_grad})
        return self.sends * sum(p.numel() * p.element_size() for p in params.values())


def one_of(params: dict[str, Tensor]) -> Tensor:
    """A number of a parameter."""
    return next(iter(params.values())).flatten()[0]


def averaging_then_diloco(**settings: Any) -> Strategy:
    exchanges = [Exchange(Mean(island_size=2), every=2), Exchange(Outer(Mean(), OptimSpec(SGD, lr=0.6)), every=H)]
    return CommunicateOptimizeStrategy(exchanges, **settings)


def composed(*exchanges: Exchange) -> Callable[..., Strategy]:
    return lambda **settings: CommunicateOptimizeStrategy(exchanges, **settings)


def with_adam(make: Callable[..., Strategy], **own: Any) -> Callable[..., Strategy]:
    """An algorithm that needs moments, with AdamW where it is given an optimizer of another kind."""

    def made(inner_optim: Any = None, **settings: Any) -> Strategy:
        adam = inner_optim == "adamw" or (isinstance(inner_optim, OptimSpec) and inner_optim.cls is AdamW)
        return make(inner_optim if adam else OptimSpec(AdamW, lr=0.01), **own, **settings)

    return made


def muloco(inner_optim: Any = None, **settings: Any) -> Strategy:
    """Of its own two optimizers; a rate of 0 is refused."""
    still = isinstance(inner_optim, OptimSpec) and not isinstance(inner_optim.lr, Tensor) and inner_optim.lr == 0
    return CATALOGUE["muloco"].make(H=H, inner_optim=None if still else inner_optim, **settings)


DEMO: dict[str, Any] = {"compression_topk": 4, "compression_chunk": 8}


def demo(inner_optim: Any = None, **settings: Any) -> Strategy:
    """DeMo is an optimizer of its own."""
    return DeMoStrategy(**DEMO, lr=0.01, **settings)


def pairs(params: dict[str, Tensor]) -> float:
    """Of each chunk of at most 8 x 8, 4 pairs of a value and an index of 8 bytes; at most one for each element."""
    folded = [torch.zeros(fold(x.shape), dtype=x.dtype) for x in params.values()]
    pieces = [x[piece] for x in folded for piece in make_chunks(x.shape, 8)]
    return sum(min(4, piece.numel()) * (8 + piece.itemsize) for piece in pieces)


ROUNDS = STEPS // H
OTHERS = K - 1  # nodes to which each sends what goes through an all-gather
STRATEGIES: dict[str, Row] = {
    **{name: Row.of(name, card) for name, card in CARDS.items() if not (card.needs_moments or card.even)},
    "local-adam": Row(with_adam(LocalAdamStrategy, H=H), 3 * ROUNDS * ring(K), outer=None),
    "des-loc": Row(
        with_adam(DESLOCStrategy, H=H, Hu=2, Hv=4), (ROUNDS + STEPS // 2 + STEPS // 4) * ring(K), outer=None
    ),
    "muloco": Row(muloco, ROUNDS * ring(K), outer=None),
    "fedavg-participation-kept": Row(
        lambda **kw: FedAvgStrategy(H=H, participation=0.6, resting="keep", **kw), ROUNDS * ring(3), averages=False
    ),
    "fedprox-participation": Row(
        lambda **kw: FedAvgStrategy(H=H, participation=0.6, proximal_mu=0.5, **kw),
        ROUNDS * 3 / K,
        averages=False,
        proximal_mu=0.5,
        server=True,
    ),
    "fedavg-participants-in-islands": Row(
        lambda **kw: FedAvgStrategy(H=H, participation=0.8, island_size=2, **kw), ROUNDS * ring(2, 2), averages=False
    ),
    "fednova-participation": Row(
        lambda **kw: CATALOGUE["fednova"].build(Knobs(H=H), participation=0.6, **kw),
        lambda params: ROUNDS * 3 / K * sum(x.numel() * x.itemsize for x in [*params.values(), one_of(params)]),
        outer=None,
        averages=False,
        server=True,
        per_node=("work",),
    ),
    "feddyn-participation": Row(
        lambda **kw: FedDynStrategy(H=H, alpha=0.3, participation=0.6, **kw),
        ROUNDS * 3 / K,
        outer=None,
        averages=False,
        server=True,
        per_node=("gradient",),
    ),
    "fedavg-weighted": Row(lambda **kw: FedAvgStrategy(H=H, weighting="examples", **kw), ROUNDS * ring(K)),
    "fedprox": Row(lambda **kw: FedAvgStrategy(H=H, proximal_mu=0.5, **kw), ROUNDS * ring(K), proximal_mu=0.5),
    "fedavg-server-participation": Row(
        lambda **kw: FedAvgStrategy(H=H, participation=0.6, server_optim="avgm", weighting="examples", **kw),
        ROUNDS * 3 / K,
        outer=server_momentum,
        averages=False,
        server=True,
    ),
    "scaffold-participation": Row(
        lambda **kw: CATALOGUE["scaffold"].build(Knobs(H=H), participation=0.6, weighting="examples", **kw),
        2 * ROUNDS * 3 / K,
        outer=None,
        averages=False,
        server=True,
        per_node=("control", "gradients", "rates"),
    ),
    "mime-lite-participation": Row(
        lambda inner_optim=None, **kw: CATALOGUE["mime"].build(
            Knobs(H=H), inner_optim=inner_optim, participation=0.6, lite=True, **kw
        ),
        (ROUNDS + ROUNDS + 1) * 3 / K,
        outer=None,
        averages=False,
        server=True,
    ),
    "diloco-lookahead": Row(
        lambda **kw: DiLoCoStrategy(H=H, outer_optim=OptimSpec(SGD, lr=0.6), **kw), ROUNDS * ring(K), outer=lookahead
    ),
    "diloco-restarts": Row(lambda **kw: DiLoCoStrategy(H=1, restart=2, **kw), STEPS * ring(K), outer=None),
    "diloco-qsr": Row(  # a round of 4 steps, and one of the 3 that are left
        lambda **kw: DiLoCoStrategy(H=QSR(0.4, 2, lambda step: 0.2 / (1 + step), max_steps=STEPS), **kw),
        2 * ring(K),
        outer=None,
    ),
    "diloco-late": Row(lambda **kw: DiLoCoStrategy(H=LateWindow(2, start=1), **kw), 3 * ring(K), outer=None),
    "diloco-heloco": Row(lambda **kw: DiLoCoStrategy(H=2, correction="heloco", **kw), STEPS // 2 * ring(K), outer=None),
    "diloco-median-norm": Row(
        lambda **kw: DiLoCoStrategy(H=H, correction="median_norm", **kw),
        lambda params: (
            ROUNDS
            * (
                ring(K) * sum(x.numel() * x.itemsize for x in params.values())
                + OTHERS * sum(x.itemsize for x in params.values())
            )
        ),
        outer=nesterov,
    ),
    "averaging-then-diloco": Row(averaging_then_diloco, STEPS // 2 * ring(2, 2, 1) + ROUNDS * ring(K), outer=lookahead),
    "sparta-partitioned-late": Row(
        lambda **kw: SPARTAStrategy(index_selector=PartitionedSelector(1 / 3), delay=2, **kw), thirds, outer=None
    ),
    "sparta-partitioned-late-corrected": Row(
        lambda **kw: SPARTAStrategy(index_selector=PartitionedSelector(1 / 3), delay=2, correct_delay=True, **kw),
        thirds,
        per_node=("message",),
    ),
    "sparta-int4": Row(
        lambda **kw: SPARTAStrategy(index_selector=PartitionedSelector(1.0), quantization_bits=4, **kw),
        lambda params: OTHERS * STEPS * sum(-(-x.numel() // 2) + 4 for x in params.values()),
        outer=None,
    ),
    "sparta-topk-int8": Row(
        lambda **kw: SPARTAStrategy(0.3, compression_method="topk", quantization_bits=8, **kw),
        lambda params: OTHERS * STEPS * strongest(params, 0.3, 1, 4),
        outer=None,
    ),
    "sparta-diloco-rare": Row(
        lambda **kw: SPARTADiLoCoStrategy(0.3, 2, H, outer_optim=OptimSpec(SGD, lr=0.6), **kw),
        lambda params: (
            chosen(params, range(STEPS // 2)) + ROUNDS * ring(K) * sum(x.numel() * x.itemsize for x in params.values())
        ),
        outer=lookahead,
    ),
    "gossip-one-peer": Row(lambda **kw: GossipStrategy("one_peer_exponential", every=2, **kw), STEPS // 2 * 1.0),
    "gossip-exponential": Row(lambda **kw: GossipStrategy("exponential", **kw), STEPS * 3.0),
    "fedavg-growing-rounds": Row(  # they end after steps 1, 3 and 7
        lambda **kw: FedAvgStrategy(H=lambda step: 1 + step, **kw), 3 * ring(K)
    ),
    "diloco-growing-rounds": Row(
        lambda **kw: DiLoCoStrategy(H=lambda step: 1 if step < 2 else 3, **kw), 3 * ring(K), outer=None
    ),
    "diloco-scheduled": Row(
        lambda **kw: DiLoCoStrategy(sync_weight=[0, 0, 1, 0, 0, 1, 0], **kw), ROUNDS * ring(K), outer=nesterov
    ),
    "averaging-rare-and-late": Row(
        composed(Exchange(Mean(), every=2, delay=2, late="change")),
        STEPS // 2 * ring(K),
        per_node=("message",),
    ),
    "allreduce-int8": Row(
        composed(Exchange(Compressed(Mean(), "int8"), of="gradients")),
        lambda params: OTHERS * STEPS * sum(x.numel() + 4 for x in params.values()),
        outer=None,
        replicated=True,
        per_node=("residual",),
    ),
    "allreduce-sign": Row(
        composed(Exchange(Compressed(Mean(), "sign", error_feedback=False), of="gradients")),
        lambda params: OTHERS * STEPS * sum(-(-x.numel() // 8) + 4 for x in params.values()),
        outer=None,
        replicated=True,
    ),
    "fedavg-powersgd": Row(
        composed(Exchange(Compressed(Mean(), PowerSGD(1), reference=True), every=H)),
        lambda params: ROUNDS * low_rank(params),
        outer=None,
        per_node=("residual",),
    ),
    "fedavg-randomk": Row(
        composed(Exchange(Compressed(Mean(), RandomK(0.3), reference=True), every=H)),
        lambda params: OTHERS * ROUNDS * sum(max(1, round(0.3 * x.numel())) * x.itemsize for x in params.values()),
        outer=None,
        per_node=("residual",),
    ),
    # In place of that of the catalogue, whose chunks are whole tensors here: where a gradient is 0, a sign is that of
    # a rounding error.
    "demo": Row(
        demo, lambda params: OTHERS * STEPS * pairs(params), outer=None, replicated=True, per_node=("residual",)
    ),
    "demo-momentum": Row(
        composed(Exchange(StrongestCosines(**DEMO), of="gradients")),
        lambda params: OTHERS * STEPS * pairs(params),
        outer=None,
        replicated=True,
        per_node=("residual",),
    ),
}
NAMES = list(STRATEGIES)


def make(name: str, **settings: Any) -> Strategy:
    return STRATEGIES[name].make(**{"inner_optim": MOMENTUM, **settings})


def make_per_node(name: str, num_nodes: int, spread: float = 0.5) -> Strategy:
    """The same strategy with a value of its own for each node, wherever a number may be `[K]`."""

    def each(value: float) -> Tensor:
        return value * torch.linspace(1 - spread, 1 + spread, num_nodes, dtype=torch.float64)

    sgd = OptimSpec(SGD, lr=each(0.1), momentum=each(0.6), weight_decay=each(0.1))
    inner: dict[str, Any] = {"inner_optim": sgd, "max_norm": each(0.5), "warmup_steps": 2}
    if name == "demo":
        return DeMoStrategy(**DEMO, lr=each(0.01), weight_decay=each(0.1), max_norm=each(0.5), warmup_steps=2)
    if name.startswith("fedprox"):
        participation = 0.6 if name == "fedprox-participation" else 1.0
        return FedAvgStrategy(H=H, proximal_mu=each(0.5), participation=participation, **inner)
    if name == "diloco":
        outer = OptimSpec(SGD, lr=each(0.5), momentum=each(0.6), nesterov=True)
        return DiLoCoStrategy(H=H, outer_optim=outer, **inner)
    if name == "gpa":
        return GPAStrategy(mu_x=each(0.6), mu_y=each(0.5), **inner)
    if name == "palsgd":
        return PALSGDStrategy(p=0.3, H=H, pull=each(1.0), **inner)
    if name.startswith("mime"):  # the server has one state
        inner["inner_optim"] = OptimSpec(SGD, lr=each(0.1), momentum=0.6, weight_decay=0.1)
    if name == "noloco":
        return NoLoCoStrategy(H=H, outer_lr=each(0.5), momentum=each(0.6), gamma=each(0.8), **inner)
    return STRATEGIES[name].make(**inner)


def setup(model: str = "MLP", num_nodes: int = K, steps: int = STEPS, seed: int = 0) -> tuple[nn.Module, list[Any]]:
    return make_model(model, dtype=torch.float64), stacked(
        make_batches(model, steps, num_nodes, seed=seed, dtype=torch.float64)
    )


def simulation(model: nn.Module, strategy: Strategy, batches: list[Any], **settings: Any) -> Simulation:
    num_nodes = next(iter(tree.leaves(batches[0]))).shape[0]
    return helpers.simulation(model, strategy, batches, **{"num_examples": EXAMPLES[:num_nodes], **settings})


def run(model: nn.Module, strategy: Strategy, batches: list[Any], **settings: Any) -> Run:
    num_nodes = next(iter(tree.leaves(batches[0]))).shape[0]
    return helpers.run(model, strategy, batches, **{"num_examples": EXAMPLES[:num_nodes], **settings})


def test_every_strategy_has_a_row() -> None:
    public = [getattr(vecgym.strategy, name) for name in vecgym.strategy.__all__]
    strategies: set[type] = {cls for cls in public if isinstance(cls, type) and issubclass(cls, Strategy)}
    strategies -= {RankStrategy}  # of one rank: tests/test_per_rank.py
    strategies = {cls for cls in strategies if not cls.asynchronous}  # type: ignore[attr-defined]  # test_asynchronous.py
    missing = strategies - {type(make(name)) for name in NAMES}
    assert not missing, f"add {missing} to STRATEGIES"
    averages: set[type] = {cls for cls in public if isinstance(cls, type) and issubclass(cls, Average)}
    missing = (strategies | averages | {Exchange}) - {Average, Stage} - ARGUMENTS.keys()
    assert not missing, f"add {missing} to ARGUMENTS"


# --------------------------------------------------------------------------------- one node, equal nodes


def train_alone(
    model: nn.Module, batches: list[Any], outer: OuterRule, **settings: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """One ordinary module with one ordinary optimizer, and `outer` after every H steps."""
    (model,) = common.copy_model(model, 1)
    fast = common.parameters(model)
    slow = {name: p.detach().clone() for name, p in fast.items()}
    memory: dict[str, Tensor] = {}
    optimizer = settings["optimizer"](list(fast.values()))
    losses = []
    for step, batch in enumerate(batches):
        losses.append(common.backward(model, tree.map_leaves(lambda x: x[0], batch)))
        for name, p in fast.items():
            common.gradient(p).add_(settings.get("proximal_mu", 0.0) * (p.detach() - slow[name]))
        common.clip(model, settings.get("max_norm"))
        optimizer.param_groups[0]["lr"] = 0.1 * settings.get("schedule", lambda step: 1.0)(step)
        optimizer.step()
        if (step + 1) % H == 0:
            with torch.no_grad():
                outer(slow, {name: p.detach() for name, p in fast.items()}, memory)
    return torch.stack(losses), {name: p.detach() for name, p in fast.items()}


def for_one_node(strategy: Strategy) -> Strategy:
    """The same strategy with islands that one node can fill."""
    for exchange in strategy.exchanges:
        if isinstance(exchange.how, Mean) and exchange.how.island_size is not None:
            exchange.how = Mean(1, exchange.how.weighting)  # type: ignore[arg-type]
    return strategy


@pytest.mark.parametrize("model", ["MLP", "CNN"])
@pytest.mark.parametrize("inner", ["momentum", "adamw, clipped and warmed up"])
@pytest.mark.parametrize("name", [name for name in NAMES if STRATEGIES[name].outer is not None])
def test_a_single_node_is_plain_training(name: str, inner: str, model: str) -> None:
    """With DiLoCo's outer SGD: Lookahead."""
    ours: dict[str, Any] = {"inner_optim": MOMENTUM}
    plain: dict[str, Any] = {"optimizer": lambda p: SGD(p, lr=0.1, momentum=0.9)}
    if inner != "momentum":
        ours = {"inner_optim": OptimSpec(AdamW, lr=0.1), "max_norm": 0.5, "warmup_steps": 4}
        plain = {"optimizer": AdamW, "max_norm": 0.5, "schedule": lambda step: min(1.0, step / 4)}
    start, batches = setup(model, 1)
    result = run(start, for_one_node(STRATEGIES[name].make(**ours)), batches)
    row = STRATEGIES[name]
    assert row.outer is not None
    losses, params = train_alone(start, batches, row.outer, proximal_mu=row.proximal_mu, **plain)
    assert_close(result.losses[:, 0], losses, 1e-12, "losses")
    assert_close(rows(result.params, [0]), {n: p[None] for n, p in params.items()}, 1e-12, "params")
    assert (result.comm.ledger.total_bytes > 0) == row.server


@pytest.mark.parametrize("model", ["MLP", "CNN"])
@pytest.mark.parametrize("name", [name for name in NAMES if STRATEGIES[name].averages])
def test_identical_shards_keep_nodes_identical(name: str, model: str) -> None:
    """... and equal to one node alone."""
    start, batches = setup(model)
    batches = reordered(batches, [0] * K)
    result = run(start, make(name), batches)
    alone = run(start, for_one_node(make(name)), reordered(batches, [0]))
    for values in (result.params, result.buffers):
        assert_close(values, rows(values, [0] * K), 1e-13, "nodes")
    assert_close(result.losses, alone.losses.expand(STEPS, K), 1e-12, "losses")
    assert_close(result.params, alone.params, 1e-12, "params")
    assert_close(result.buffers, alone.buffers, 1e-12, "buffers")


@pytest.mark.parametrize("engine", ["vmap", "loop, exact"])
@pytest.mark.parametrize("name", NAMES)
def test_a_value_for_each_node_is_that_nodes_number(name: str, engine: str) -> None:
    """Equal ones are the number; unlike ones are not. `test_distributed` has them in many processes."""
    start, batches = setup()
    exact = {"engine": "loop", "exact": True} if engine == "loop, exact" else {"engine": engine}
    equal = run(start, make_per_node(name, K, spread=0.0), batches, **exact)
    number = run(start, make_per_node(name, 1, spread=0.0), batches, **exact)
    assert_close(equal.params, number.params, 1e-12, "equal")
    unlike = run(start, make_per_node(name, K), batches, **exact)
    assert difference(unlike.params, number.params) > 1e-4


# ------------------------------------------------------------------------------------------ permutation


class Relabelled(StackedCollectives):
    """Collectives in which node `order[i]` bears the name i: groups that were drawn mean other rows."""

    def __init__(self, num_nodes: int, order: list[int]) -> None:
        super().__init__(num_nodes)
        self.order = order

    def among(self, members: Sequence[int]) -> StackedCollectives:
        some = Relabelled(len(members), [])
        some.ledger = self.ledger
        some._count_among(self, members)
        names = sorted(self.order.index(node) for node in members)
        some.order = [list(members).index(self.order[name]) for name in names]
        return some

    def mean(
        self, x: T, groups: Groups | None = None, weights: Sequence[float] | None = None, *, inplace: bool = False
    ) -> T:
        if groups is not None:
            groups = [sorted(self.order[i] for i in group) for group in groups]
        return super().mean(x, groups, weights, inplace=inplace)

    def server_mean(self, x: T, participants: Sequence[int], weights: Sequence[float] | None = None) -> T:
        return super().server_mean(x, sorted(self.order[i] for i in participants), weights)

    def mix(self, x: T, weights: Tensor | Mixing, inplace: bool = False) -> T:
        matrix = weights.weights if isinstance(weights, Mixing) else weights
        renamed = torch.empty_like(matrix)
        rows = torch.tensor(self.order)
        renamed[rows[:, None], rows] = matrix
        return super().mix(x, renamed, inplace)


# In a tree a node has its place; CHOCO-SGD gathers codes by the matrix, which `Relabelled` does not see.
PLACED = {"relaysum", "choco"}


@pytest.mark.parametrize("num_nodes", [2, 5, 8])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in PLACED])
def test_permuting_the_nodes_permutes_the_results(name: str, num_nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random draws (islands, participants) are permuted along: their law does not know the nodes' names."""
    order = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(num_nodes)).tolist()
    where = [order.index(i) for i in range(num_nodes)]  # node i of the first run is row where[i] of the second
    start, batches = setup("CNN", num_nodes)
    first = run(start, make(name), batches)
    strategy = make(name)
    draw = Participation.who_trains

    def who_trains(who: Participation, run: RunFacts, rounds: When) -> Who | None:
        drawn = draw(who, run, rounds)
        return None if drawn is None else lambda step, rows: sorted(where[i] for i in drawn(step, rows) or ())

    monkeypatch.setattr(Participation, "who_trains", who_trains)
    if isinstance(strategy, PALSGDStrategy):  # it draws for itself who trains
        pulled = strategy.drawn
        monkeypatch.setattr(strategy, "drawn", lambda *given: [pulled(*given)[i] for i in order])
    examples = tuple(EXAMPLES[i] for i in order)
    relabelled = Relabelled(num_nodes, where)
    second = run(start, strategy, reordered(batches, order), comm=relabelled, num_examples=examples)
    assert_close(second.losses, first.losses[:, order], 1e-12, "losses")
    assert_close(second.params, rows(first.params, order), 1e-12, "params")
    assert_close(second.buffers, rows(first.buffers, order), 1e-12, "buffers")
    assert num_nodes == 2 or difference(second.buffers, first.buffers) > 1e-6  # the order was not the identity


@pytest.mark.parametrize("name", ["fedavg-islands", "fedavg-participation-kept"])
def test_draws_favour_no_node(name: str) -> None:
    """Every pair of nodes shares an island equally often, and every node takes part equally often."""
    together, present = torch.zeros(K, K), torch.zeros(K)
    rounds = 1000
    strategy, run, comm = make(name), RunFacts(K, rounds * H), Recorded(K)
    for events in strategy.timetable(run).ticks():
        for event in events:
            if event.what != "meet":
                continue
            members = list(range(K) if event.rows is None else event.rows)
            present[members] += 1
            some = comm if event.rows is None else comm.among(members)
            part = Part.alone(some, number=event.info.number, step=event.info.step)
            strategy.exchanges[0].how({"x": torch.zeros(len(members))}, part)
            for island in some.groups or (range(len(members)),):
                nodes = torch.tensor([members[i] for i in island])
                together[nodes[:, None], nodes] += 1
    share = present.mean() / rounds
    pairs = together[~torch.eye(K, dtype=torch.bool)] / rounds
    expected = 2 * 2 / (K * (K - 1)) if name == "fedavg-islands" else 3 * 2 / (K * (K - 1))
    deviation = (expected * (1 - expected) / rounds) ** 0.5
    assert float((pairs - expected).abs().max()) < 4 * deviation
    assert float((present / rounds - share).abs().max()) < 4 * (0.25 / rounds) ** 0.5
    assert float(share) == pytest.approx(1.0 if name == "fedavg-islands" else 0.6)


class Recorded(StackedCollectives):
    groups: Groups = ()

    def among(self, members: Sequence[int]) -> Recorded:
        return Recorded(len(members))

    def mean(
        self, x: T, groups: Groups | None = None, weights: Sequence[float] | None = None, *, inplace: bool = False
    ) -> T:
        self.groups = groups or ()
        return super().mean(x, groups, weights, inplace=inplace)


# ------------------------------------------------------------------------------ repeating and continuing


@pytest.mark.parametrize(("model", "engine"), [("Dropout", "vmap"), ("Dropout", "loop"), ("CNN", "vmap")])
@pytest.mark.parametrize("name", NAMES)
def test_running_twice_gives_the_same_bits(name: str, model: str, engine: str) -> None:
    start, batches = setup(model)
    first = run(start, make(name), batches, engine=engine)
    torch.rand(3)  # whatever else the program draws
    second = run(start, make(name), batches, engine=engine)
    assert torch.equal(first.losses.nan_to_num(), second.losses.nan_to_num())
    assert_same_bits(first.state, second.state)
    assert list(first.comm.ledger) == list(second.comm.ledger)
    if model == "Dropout":
        other = run(start, make(name), batches, engine=engine, seed=43)
        assert difference(first.params, other.params) > 1e-6


@pytest.mark.parametrize(
    ("model", "engine", "cut"),
    [("Dropout", "vmap", H - 1), ("Dropout", "loop", H + 1), ("CNN", "vmap", H)],
)
@pytest.mark.parametrize("name", NAMES)
def test_a_saved_state_continues_as_if_nothing_had_happened(name: str, model: str, engine: str, cut: int) -> None:
    """Bit for bit, in a new simulation, before, at and after an exchange; the run it was saved from goes on too."""
    start, batches = setup(model)
    settings: dict[str, Any] = {"warmup_steps": 2, "cosine_anneal": True, "max_norm": 0.5}
    whole = run(start, make(name, **settings), batches, engine=engine)
    sim = simulation(start, make(name, **settings), batches, engine=engine)
    first = advance(sim, sim.init(), batches[:cut])
    kept = saved(first.state)
    rest = advance(sim, first.state, batches[cut:])
    torch.rand(3)
    resumed = run(start, make(name, **settings), batches[cut:], engine=engine, state=kept, max_steps=STEPS)
    for again in (rest, resumed):
        assert torch.equal(again.losses.nan_to_num(), whole.losses[cut:].nan_to_num())
        assert_same_bits(again.state, whole.state)
        assert again.state.step == whole.state.step == STEPS


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_leaves_what_is_not_its_own(name: str, differentiable: bool, engine: str) -> None:
    """The global random states, the model, the batch and grad mode."""
    start, batches = setup("Dropout")
    weights, data = clones(start.state_dict()), [clones(parts(batch)) for batch in batches]
    torch.manual_seed(1)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # type: ignore[index]  # noqa: NPY002
    run(start, make(name), batches, engine=engine, differentiable=differentiable)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert np.array_equal(states[2], np.random.get_state()[1])  # type: ignore[index]  # noqa: NPY002
    assert_same_bits(dict(start.state_dict()), weights, "model")
    assert all(p.grad is None for p in start.parameters())
    for batch, before in zip(batches, data):
        assert_same_bits(parts(batch), before, "batch")
    assert start.training
    assert torch.is_grad_enabled()


def parts(batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return {str(i): x for i, x in enumerate(batch)}


def clones(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in values.items()}


@pytest.mark.parametrize("name", NAMES)
def test_init_shares_nothing_with_the_model(name: str) -> None:
    start, batches = setup("CNN")
    own = {x.data_ptr() for x in (*start.parameters(), *start.buffers())}
    state = simulation(start, make(name), batches).init()
    pointers = [x.data_ptr() for x in flat(state).values() if x.numel()]
    assert not own & set(pointers)
    assert len(set(pointers)) == len(pointers)  # the outer parameters are not the inner ones


# --------------------------------------------------------------------------------- pure against donating


@pytest.mark.parametrize("model", ["MLP", "CNN", "Dropout"])
@pytest.mark.parametrize("name", NAMES)
def test_the_pure_step_equals_the_donating_one(name: str, model: str) -> None:
    """... to rounding, and leaves the state that it was given as it was."""
    start, batches = setup(model, steps=5)
    settings: dict[str, Any] = {"inner_optim": OptimSpec(AdamW, lr=0.01), "max_norm": 0.5, "warmup_steps": 2}
    donating = run(start, make(name, **settings), batches)
    sim = simulation(start, make(name, **settings), batches)
    state = sim.init()
    for batch in batches:
        before, given = saved(state), state
        state, metrics = sim.step(given, batch, pure=True)
        sim.comm.ledger.add(given.step, metrics.transfers)
        assert given.step == before.step
        assert_same_bits(given, before, "given state")
    assert_close(state, donating.state, 1e-12)
    assert list(sim.comm.ledger) == list(donating.comm.ledger)


# -------------------------------------------------------------------------------------------- engines


@pytest.mark.parametrize("name", NAMES)
def test_engines_agree(name: str) -> None:
    start, batches = setup("CNN", steps=H + 1)
    settings: list[dict[str, Any]] = [
        {"engine": "loop"},
        {"engine": "loop", "node_threads": 2},
        {"engine": "vmap", "chunk_size": 1},
        {"engine": "vmap", "chunk_size": 2, "node_threads": 2},
        {"engine": "auto", "node_threads": None},
    ]
    expected = run(start, make(name), batches)
    for how in settings:
        result = run(start, make(name), batches, **how)
        assert_close(result.losses, expected.losses, 1e-12, f"{how} losses")
        assert_close(result.state, expected.state, 1e-12, f"{how}")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_compiled_engine_agrees(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced and differentiated as `torch.compile` does it; without generating code, which takes ten times as long."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    start, batches = setup("MLP", steps=H + 1)
    expected, found = (run(start, make(name), batches, engine="vmap", compile=compile) for compile in (False, True))
    assert_close(found.losses, expected.losses, 1e-10, "losses")
    assert_close(found.state, expected.state, 1e-10, "state")


class Overwriting:
    """Computes into the same memory at every call, as a CUDA graph does."""

    def __init__(self, fn: Callable[..., Any], **settings: Any) -> None:
        self.fn = fn
        self.memory: dict[Any, Any] = {}

    def __call__(self, *given: Any) -> Any:
        result = self.fn(*given)
        kept = self.memory.setdefault(str([x.shape for x in tree.leaves(result)]), tree.map_leaves(torch.clone, result))
        tree.map_leaves(torch.Tensor.copy_, kept, result)
        return kept


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_kept_of_memory_that_the_next_gradients_are_written_to(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA the compiled gradients are those of a graph, whose results are always in the same place."""
    monkeypatch.setattr(torch, "compile", Overwriting)
    start, batches = setup("MLP", steps=H + 2)
    expected, found = (run(start, make(name), batches, engine="vmap", compile=compile) for compile in (False, True))
    assert_close(found.losses, expected.losses, 1e-10, "losses")
    assert_close(found.state, expected.state, 1e-10, "state")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["fedavg-participation", "diloco"])
def test_every_model_trains_with_the_chosen_engine(name: str, model: str) -> None:
    start, batches = setup(model, steps=H + 1)
    engine = "loop" if model in NEEDS_LOOP else "auto"
    result = run(start, make(name), batches, engine=engine)
    assert all(bool(p.isfinite().all()) for p in result.params.values())
    initial = common.parameters(start)
    assert result.params.keys() == initial.keys()
    assert all(difference(result.params[n], p.detach()[None]) > 0 for n, p in initial.items())


# ---------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("name", NAMES)
def test_bytes_equal_the_closed_form(name: str) -> None:
    for model, dtype in (("CNN", torch.float64), ("WithFrozen", torch.float32)):
        start = make_model(model, dtype=dtype)
        result = run(start, make(name), stacked(make_batches(model, STEPS, K, dtype=dtype)))
        expected = STRATEGIES[name].bytes(common.parameters(start))
        assert result.comm.ledger.total_bytes == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_do_not_depend_on_the_values(name: str) -> None:
    start, batches = setup()
    expected = list(run(start, make(name), batches).comm.ledger)
    _, other_batches = setup(seed=1)
    with torch.no_grad():
        for p in start.parameters():
            p.zero_()
    others: list[dict[str, Any]] = [{"inner_optim": OptimSpec(SGD, lr=0.0)}, {"inner_optim": "adamw"}]
    if name.startswith("mime"):  # the server sends the optimizer's state
        others = [{"inner_optim": OptimSpec(SGD, lr=0.0, momentum=0.9)}]
    for settings in (*others, {"max_norm": 1e-3}):
        assert list(run(start, make(name, **settings), other_batches).comm.ledger) == expected
        assert list(run(start, make(name, **settings), batches, engine="loop").comm.ledger) == expected
        assert list(run(start, make(name, **settings), batches, differentiable=True).comm.ledger) == expected


# ------------------------------------------------------------------------- unused and frozen parameters


class Partly(nn.Module):
    """One layer is frozen, one is trained, and a parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(16, 8).requires_grad_(False)
        self.used = nn.Linear(8, 10)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.used(self.frozen(x)), y)


def assert_stays(strategy: str, found: Tensor, given: Tensor) -> None:
    """A value that all nodes share is their mean to the bit, unless it is sent in codes of few bits."""
    tolerance = 1e-6 if "-int" in strategy else 0  # scales are float32
    torch.testing.assert_close(found, given, rtol=tolerance, atol=tolerance)


# FedProx's proximal term and the corrections of SCAFFOLD, Mime, FedDyn and Scaffnew depend on every parameter, so each
# has a gradient, and decays. DSM's outer step decays all.
WITHOUT_GRADIENT = [n for n in NAMES if not n.startswith(("fedprox", "scaffold", "mime", "feddyn", "scaffnew", "dsm"))]


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_unused_and_frozen_parameters_stay(name: str, engine: str) -> None:
    """Even with weight decay. Only what is frozen is not sent."""
    torch.manual_seed(0)
    model = Partly().double()
    _, batches = setup()
    strategy = make(name, inner_optim=OptimSpec(AdamW, lr=0.1, weight_decay=0.5))
    result = run(model, strategy, batches, engine=engine)
    sent = {"unused": model.unused, **dict(model.used.named_parameters("used"))}
    assert set(result.state.params) == set(sent)
    unused = result.state.params["unused"]
    assert_stays(name, unused, torch.ones(1, 3, dtype=torch.float64).expand_as(unused))
    assert result.comm.ledger.total_bytes == pytest.approx(STRATEGIES[name].bytes(sent), rel=1e-12)


def test_the_proximal_term_is_a_gradient_of_every_parameter() -> None:
    """In plain torch, too, where it is a part of the loss. At the start it is 0, and the step is AdamW's decay."""
    strategy = make("fedprox", inner_optim=OptimSpec(AdamW, lr=0.1, weight_decay=0.5))
    unused = run(Partly().double(), strategy, setup()[1][:1]).state.params["unused"]
    torch.testing.assert_close(unused, torch.full_like(unused, 1 - 0.1 * 0.5))


def test_sign_momentum_decays_every_parameter() -> None:
    """As its authors' program does, in units of the inner rate; a movement of 0 has no sign."""
    strategy = make("dsm", inner_optim=OptimSpec(AdamW, lr=0.1, weight_decay=0.5))
    unused = run(Partly().double(), strategy, setup()[1]).state.params["unused"]
    torch.testing.assert_close(unused, torch.full_like(unused, (1 - 0.2 * 0.1) ** ROUNDS))


@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_unused_and_frozen_parameters_come_back_from_the_trainer(name: str) -> None:
    torch.manual_seed(0)
    model = Partly().double()
    x, y = torch.randn(40, 16, dtype=torch.float64), torch.randint(10, (40,))
    trainer = Trainer(model, torch.utils.data.TensorDataset(x, y))
    strategy = make(name, inner_optim=OptimSpec(AdamW, lr=0.1, weight_decay=0.5))
    with pytest.warns(VecgymWarning, match=r"1 of the model's parameters never had a gradient.*: unused\."):
        averaged = trainer.fit(strategy, K, batch_size=2, max_steps=STEPS, device="cpu", progress=False)
    assert trainer.history.settings["without_gradient"] == ["unused"]
    for key in ("unused", "frozen.weight", "frozen.bias"):
        before = model.get_parameter(key)
        of_strategy = name if key == "unused" else ""
        assert_stays(of_strategy, averaged.get_parameter(key), before)
        assert_stays(of_strategy, trainer.nodes.params[key], before.expand(K, *before.shape))
        assert averaged.get_parameter(key).requires_grad == before.requires_grad
    assert not torch.equal(averaged.get_parameter("used.bias"), model.get_parameter("used.bias"))


class WithEmpty(nn.Module):
    """A model, and parameters without elements."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        shapes = {"flat": (0,), "rows": (0, 3), "columns": (3, 0), "cube": (2, 0, 3)}
        self.empty = nn.ParameterDict({name: torch.zeros(shape).double() for name, shape in shapes.items()})

    def forward(self, batch: Any) -> Tensor:
        return self.model(batch) + sum(p.sum() for p in self.empty.values())


@pytest.mark.parametrize("name", NAMES)
def test_parameters_without_elements_change_nothing(name: str) -> None:
    start, batches = setup()
    plain = run(start, make(name, max_norm=0.5), batches[: H + 1])
    for settings in ({"engine": "vmap"}, {"engine": "loop"}, {"differentiable": True}):
        ours = run(WithEmpty(start), make(name, max_norm=0.5), batches[: H + 1], **settings)
        for key, p in plain.params.items():
            # What is drawn for a tensor of this name differs with the name, and so does what is sent of it.
            if "sparta-partitioned-late" not in name and name != "fedavg-randomk" and "powersgd" not in name:
                assert_close({key: ours.params[f"model.{key}"]}, {key: p}, 1e-12)
            assert ours.params[f"model.{key}"].isfinite().all()


# -------------------------------------------------------------------------------- constructor arguments

# What differs from the base when this argument, and it alone, gets this value.
COMMON: dict[str, Any] = {
    "inner_optim": "adamw",
    "lr": 0.3,
    "max_norm": 0.05,
    "lr_scheduler": "cosine",
    "warmup_steps": 3,
    "cosine_anneal": True,
}
EXCHANGES = [Exchange(Mean(), every=2)]
DEMO_VALUES: dict[str, Any] = {"compression_decay": 0.1, "compression_topk": 2, "compression_chunk": 4}


def with_exchange(make: Callable[..., Exchange]) -> Callable[..., Strategy]:
    return lambda **kw: CommunicateOptimizeStrategy([make(**kw)], inner_optim="sgd", lr=0.1)


def with_average(make: Callable[..., Average], **exchange: Any) -> Callable[..., Strategy]:
    return with_exchange(lambda **kw: Exchange(make(**kw), **{"every": 2, **exchange}))


@dataclass(frozen=True)
class Changes:
    """A recipe for a strategy of a class, the arguments of the base, and for each argument the value to try.

    `also`: what else the base needs for an argument to have a meaning; `models`: where that is not the MLP's;
    `refused`: arguments that all strategies have, and this one refuses.
    """

    build: Callable[..., Strategy]
    base: dict[str, Any]
    values: dict[str, Any]
    also: dict[str, dict[str, Any]] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)
    refused: tuple[str, ...] = ()


WEIGHTS = [0.0, 0.5, 1.0, 0.0, 0.25, 0.0, 1.0]  # of exchanges, in place of H, which is then left at its default

STREAMING: dict[str, Any] = {
    "H": 3,
    "outer_optim": OptimSpec(SGD, lr=0.7),
    "pattern": "sequential",
    "offsets": [1],
    "delay": 0,
    "alpha": 0.25,
}

PENALTY = {
    "clip": 1e-5,
    "skip_anomalies": True,
    "warmup": 4,
    "threshold": 1.0,
    "alpha": 0.9,
    "temperature": 0.1,
}
# A threshold that every other norm is above, so that a run of seven steps has anomalies.
SKIPPING = {"skip_anomalies": True, "warmup": 2, "threshold": 0.01}
PENALTY_ALSO = {
    "skip_anomalies": {"warmup": 2, "threshold": 0.01},
    **dict.fromkeys(("warmup", "threshold", "alpha"), SKIPPING),
}

ARGUMENTS: dict[Any, Changes] = {
    Strategy: Changes(Strategy, {"inner_optim": "sgd"}, {**COMMON, "exchanges": EXCHANGES}),
    CommunicateOptimizeStrategy: Changes(
        CommunicateOptimizeStrategy,
        {"communication_modules": [], "inner_optim": "sgd"},
        {**COMMON, "communication_modules": EXCHANGES},
    ),
    AllReduceStrategy: Changes(
        AllReduceStrategy, {"inner_optim": "sgd"}, {**COMMON, "weighting": "examples", "average": Ring("int8")}
    ),
    FedAvgStrategy: Changes(
        FedAvgStrategy,
        {"inner_optim": "sgd", "H": 2},
        {
            **COMMON,
            "H": 3,
            "island_size": 2,
            "participation": 0.6,
            "weighting": "examples",
            "resting": "keep",
            "private": "second",
            "sampling": "bernoulli",
            "proximal_mu": 0.5,
            "server_optim": "avgm",
            "server_lr": 0.5,
            "server_betas": (0.1, 0.2),
            "server_tau": 0.1,
            "sync_weight": WEIGHTS,
        },
        also={
            **{name: {"server_optim": "yogi"} for name in ("server_lr", "server_betas", "server_tau")},
            "sync_weight": {"H": 1},
            "resting": {"participation": 0.6},
            "sampling": {"participation": 0.6},
        },
    ),
    MimeStrategy: Changes(
        MimeStrategy,
        {"inner_optim": "sgd", "H": 2},
        {
            **{name: COMMON[name] for name in COMMON if name != "max_norm"},
            "H": 3,
            "participation": 0.6,
            "weighting": "examples",
            "server_lr": 0.5,
            "lite": True,
        },
        refused=("max_norm",),
    ),
    SCAFFOLDStrategy: Changes(
        SCAFFOLDStrategy,
        {"H": 2},
        {
            **{name: COMMON[name] for name in COMMON if name != "max_norm"},
            "inner_optim": OptimSpec(SGD, weight_decay=0.1),
            "H": 3,
            "participation": 0.6,
            "weighting": "examples",
            "server_lr": 0.5,
            "local_steps": [2, 1, 2, 1, 2],
        },
        refused=("max_norm",),
    ),
    DiLoCoStrategy: Changes(
        DiLoCoStrategy,
        {"inner_optim": "sgd", "H": 2},
        {
            **COMMON,
            "H": 3,
            "inner_lr": 0.3,
            "outer_optim": "adam",
            "outer_lr": 0.3,
            "compression": "topk",
            "sync_weight": WEIGHTS,
            "average": Robust("median"),
            "correction": "heloco",
            "private": "second",
            "restart": 2,
        },
        also={"sync_weight": {"H": 100}},
    ),
    DSMStrategy: Changes(
        DSMStrategy,
        {"inner_optim": "sgd", "H": 2},
        {**COMMON, "H": 3, "outer_lr": 0.3, "betas": (0.5, 0.6), "weight_decay": 0.1},
    ),
    EDiTStrategy: Changes(
        EDiTStrategy,
        {"inner_optim": "sgd", "H": 1},
        {**COMMON, **PENALTY, "H": 3, "inner_lr": 0.3, "outer_optim": "adam", "outer_lr": 0.3},
        also=PENALTY_ALSO,
    ),
    FedNovaStrategy: Changes(
        FedNovaStrategy,
        {"H": 2},
        {
            **COMMON,
            "inner_optim": OptimSpec(SGD, weight_decay=0.1),
            "H": 3,
            "participation": 0.6,
            "local_steps": [1, 2, 2, 1, 2],
            "proximal_mu": 0.5,
            "server_momentum": 0.5,
            "weighting": "examples",
        },
    ),
    FedDynStrategy: Changes(
        FedDynStrategy,
        {"inner_optim": "sgd", "H": 2, "alpha": 0.5},
        {**COMMON, "H": 3, "participation": 0.6, "alpha": 0.2, "evaluated": "participants"},
    ),
    ScaffnewStrategy: Changes(
        ScaffnewStrategy, {"p": 0.3}, {**COMMON, "inner_optim": OptimSpec(SGD, weight_decay=0.1), "p": 0.9}
    ),
    LocalAdamStrategy: Changes(LocalAdamStrategy, {"inner_optim": "adam", "H": 2}, {**COMMON, "H": 3}),
    DESLOCStrategy: Changes(
        DESLOCStrategy, {"inner_optim": "adam", "H": 2, "Hv": 4}, {**COMMON, "H": 3, "Hu": 2, "Hv": 3}
    ),
    MuLoCoStrategy: Changes(
        MuLoCoStrategy,
        {"H": 2},
        {
            **{name: COMMON[name] for name in COMMON if name != "inner_optim"},
            "H": 3,
            "adamw_lr": 0.1,
            "momentum": 0.5,
            "weight_decay": 0.1,
            "full_precision": True,
            "muon": "torch",
            "matrices": lambda name, p: False,
            "outer_optim": "adam",
            "outer_lr": 0.3,
            "compression": "topk",
        },
    ),
    GPAStrategy: Changes(
        GPAStrategy,
        {"inner_optim": "sgd", "mu_x": 0.9},
        {**COMMON, "mu_x": 0.5, "mu_y": 0.3, "decay": "code"},
        also={"decay": {"inner_optim": "adamw"}},
    ),
    PALSGDStrategy: Changes(
        PALSGDStrategy,
        {"inner_optim": "sgd", "H": 2, "p": 0.3},
        {**COMMON, "p": 0.6, "H": 3, "outer_optim": "adam", "pull": 0.5, "outer_lr": 0.3},
    ),
    NoLoCoStrategy: Changes(
        NoLoCoStrategy,
        {"inner_optim": "sgd", "H": 2},
        {**COMMON, "H": 3, "group_size": 3, "outer_lr": 0.3, "momentum": 0.9, "gamma": 0.6},
    ),
    StreamingDiLoCoStrategy: Changes(
        StreamingDiLoCoStrategy,
        {"inner_optim": "sgd", "H": 2},
        {
            **COMMON,
            **STREAMING,
            "inner_lr": 0.3,
            "outer_lr": 0.3,
            "num_fragments": 2,
            "fragments": [["second"], ["first"]],
            "bits": 4,
        },
        also={"pattern": {"num_fragments": 2}},
        models={"pattern": "CNN"},
    ),
    SparseLoCoStrategy: Changes(
        SparseLoCoStrategy,
        {"inner_optim": "sgd", "H": 2, "k": 3, "chunk": 4},
        {**COMMON, "H": 3, "k": 5, "chunk": 3, "bits": 4, "decay": 0.5, "outer_lr": 0.3, "average": "senders"},
    ),
    EagerDiLoCoStrategy: Changes(
        EagerDiLoCoStrategy,
        {"inner_optim": "sgd", "H": 2},
        {**COMMON, "H": 3, "inner_lr": 0.3, "outer_optim": "adam", "outer_lr": 0.3, "compression": "topk"},
    ),
    SPARTAStrategy: Changes(
        SPARTAStrategy,
        {"inner_optim": "sgd", "p_sparta": 0.3},
        {
            **COMMON,
            "p_sparta": 0.5,
            "index_selector": PartitionedSelector(0.3),
            "delay": 2,
            "correct_delay": True,
            "compression_method": "topk",
            "quantization_bits": 8,
        },
        also={"correct_delay": {"delay": 2}},
    ),
    SPARTADiLoCoStrategy: Changes(
        SPARTADiLoCoStrategy,
        {"inner_optim": "sgd", "p_sparta": 0.3, "H": 2},
        {
            **COMMON,
            "p_sparta": 0.5,
            "sparta_interval": 3,
            "H": 3,
            "outer_optim": "adam",
            "outer_lr": 0.3,
            "index_selector": PartitionedSelector(0.3),
            "delay": 2,
            "correct_delay": True,
        },
        also={"correct_delay": {"delay": 1}},
    ),
    GossipStrategy: Changes(GossipStrategy, {"inner_optim": "sgd"}, {**COMMON, "topology": "complete", "every": 2}),
    GradientTrackingStrategy: Changes(
        GradientTrackingStrategy,
        {"inner_optim": "sgd"},
        {**COMMON, "topology": "complete", "order": "combine_then_adapt"},
    ),
    QGMStrategy: Changes(
        QGMStrategy,
        {},
        {
            **COMMON,
            "inner_optim": OptimSpec(SGD, weight_decay=0.1),
            "topology": "complete",
            "momentum": 0.5,
            "nesterov": True,
        },
    ),
    RelaySumStrategy: Changes(RelaySumStrategy, {"inner_optim": "sgd"}, {**COMMON, "topology": "star"}),
    MATCHAStrategy: Changes(
        MATCHAStrategy,
        {"inner_optim": "sgd"},
        {**COMMON, "topology": "complete", "budget": 0.9, "matchings": [[(0, 1), (2, 3)], [(1, 2), (3, 4)]]},
    ),
    SGPStrategy: Changes(SGPStrategy, {"inner_optim": "sgd"}, {**COMMON, "topology": "ring"}),
    CHOCOStrategy: Changes(
        CHOCOStrategy,
        {"inner_optim": "sgd"},
        {**COMMON, "topology": "complete", "codec": "sign", "consensus": 0.5, "order": "consensus_first"},
    ),
    **{
        cls: Changes(cls, {"inner_optim": "sgd"}, {**COMMON, "topology": "complete"})
        for cls in (D2Strategy, ExactDiffusionStrategy)
    },
    SparseCommunicator: Changes(
        with_exchange(SparseCommunicator),
        {},
        {
            "index_selector": PartitionedSelector(0.3),
            "sparsification_rate": 0.5,
            "delay": 2,
            "correct_delay": True,
            "interval": 2,
            "quantization_bits": 8,
        },
        also={
            **{name: {"sparsification_rate": 0.3} for name in ("delay", "interval", "quantization_bits")},
            "correct_delay": {"sparsification_rate": 0.3, "delay": 2},
        },
    ),
    DeMoStrategy: Changes(
        DeMoStrategy,
        {**DEMO, "lr": 0.01},
        {**{name: COMMON[name] for name in COMMON if name != "inner_optim"}, **DEMO_VALUES, "weight_decay": 0.5},
    ),
    AveragingCommunicator: Changes(
        with_exchange(AveragingCommunicator),
        {"H": 2},
        {
            "H": 3,
            "island_size": 2,
            "participation": 0.6,
            "weighting": "examples",
            "sync_weight": WEIGHTS,
            "resting": "keep",
            "private": "second",
            "sampling": "bernoulli",
        },
        also={"sync_weight": {"H": 1}, "resting": {"participation": 0.6}, "sampling": {"participation": 0.6}},
    ),
    Exchange: Changes(
        with_exchange(Exchange),
        {"how": Mean(), "every": 2},
        {
            "how": Outer(Mean()),
            "every": 3,
            "of": "gradients",
            "delay": 1,
            "late": "change",
            "keep": 0.25,
            "fragments": 2,
            "offsets": [1],
            "pattern": "sequential",
            "private": "second",
            "participation": 0.6,
            "resting": "keep",
            "lost": 0.5,
            "sampling": "bernoulli",
            "unit": 2,
        },
        also={
            "late": {"delay": 1},
            "pattern": {"fragments": 2},
            "participation": {"how": ServerMean()},
            "sampling": {"how": ServerMean(), "participation": 0.6},
            "resting": {"how": ServerMean(), "participation": 0.6},
        },
        models={"pattern": "CNN"},
    ),
    Mean: Changes(with_average(Mean), {}, {"island_size": 2, "weighting": "examples"}),
    ServerMean: Changes(with_average(ServerMean), {}, {"weighting": "examples"}),
    Mix: Changes(with_average(Mix), {}, {"topology": torch.eye(K)}),
    Robust: Changes(
        with_average(Robust),
        {},
        {
            "rule": lambda x: x.amax(1),
            "trim": 2,
            "island_size": 3,
            "f": 2,
            "m": 1,
            "neighbours": "n-f-2",
            "nu": 1e3,
            "tau": 1e-3,
            "iterations": 7,
            "clip": 0.1,
            "bucketing": 2,
            "nnm": True,
            "whole": True,
            "server": True,
        },
        also={
            "trim": {"rule": "trimmed_mean", "trim": 1},
            "f": {"rule": "multi_krum", "f": 1},
            "m": {"rule": "multi_krum", "f": 1},
            "neighbours": {"rule": "multi_krum", "f": 0, "m": 2},
            "nu": {"rule": "geometric_median"},
            "tau": {"rule": "centred_clipping"},
            "iterations": {"rule": "geometric_median"},
            "nnm": {"f": 1},
            "whole": {"rule": lambda x: x[:, 0] / x.shape[-1]},
        },
    ),
    Corrupted: Changes(
        with_average(Corrupted),
        {"inner": Mean(), "nodes": [1]},
        {"inner": Robust("median"), "nodes": [2], "attack": torch.zeros_like, "strength": 9.0},
        also={"strength": {"attack": "ipm"}},
    ),
    Private: Changes(
        with_average(lambda **kw: Outer(Private(**kw))),
        {"inner": Mean(), "clip": 0.1, "noise": 0.1},
        {"inner": Robust("median"), "clip": 0.2, "noise": 0.2, "noise_by": "server", "nodes": 2.5, "delta": 1e-5},
        also={"nodes": {"noise_by": "server"}, "delta": {"noise_by": "server"}},
    ),
    MovementPenalty: Changes(
        with_exchange(lambda **kw: Exchange(Outer(MovementPenalty(**kw)))),
        {"inner": Mean()},
        {**PENALTY, "inner": Mean(weighting="examples")},
        also=PENALTY_ALSO,
    ),
    Outer: Changes(
        with_average(Outer),
        {"inner": Mean()},
        {"inner": Compressed(Mean(), "topk"), "optim": OptimSpec(SGD, lr=0.7), "correct": "median_norm", "restart": 1},
    ),
    Eager: Changes(with_average(Eager), {"inner": Mean()}, {"inner": Mean(2), "optim": OptimSpec(SGD, lr=0.7)}),
    NoLoCo: Changes(with_average(NoLoCo), {}, {"group_size": 3, "lr": 0.3, "momentum": 0.9, "gamma": 0.6}),
    Sparse: Changes(
        with_average(Sparse),
        {"selector": 0.3, "inner": Mean()},
        {"selector": PartitionedSelector(0.3), "inner": Compressed(Mean(), "int8")},
    ),
    MostMoved: Changes(with_average(MostMoved), {"fraction": 0.3}, {"fraction": 0.5, "bits": 8}),
    Compressed: Changes(
        with_average(lambda **kw: Outer(Compressed(**kw))),
        {"inner": Mean(), "codec": TopK(0.3)},
        {
            "inner": Mean(2),
            "codec": "int8",
            "error_feedback": False,
            "decay": 0.5,
            "momentum": 0.5,
            "masking": False,
            "reference": True,
            "purpose": "other",
        },
        also={"masking": {"momentum": 0.5}, "purpose": {"codec": RandomK(0.3)}},
    ),
    EF21: Changes(
        with_average(EF21, of="gradients", every=1),
        {"inner": Mean(), "codec": TopK(0.3)},
        {"inner": ServerMean(), "codec": "int8", "purpose": "other"},
        also={"purpose": {"codec": RandomK(0.3)}},
    ),
    Ring: Changes(with_average(Ring), {"codec": "int8"}, {"codec": "int4"}),
    QuantisedRing: Changes(with_average(QuantisedRing), {}, {"codec": "int8"}),
    AllToAll: Changes(with_average(AllToAll), {}, {"codec": "int8"}),
    StrongestCosines: Changes(with_average(StrongestCosines, of="gradients", every=1), DEMO, DEMO_VALUES),
}
SETTINGS = [
    (cls, name) for cls, of in ARGUMENTS.items() for name in inspect.signature(cls).parameters if name not in of.refused
]


@functools.cache
def run_of_base(cls: Any, model: str, also: str) -> Run:
    """The run with a class's `base`, and with what an argument needs beside it: the same for most arguments."""
    start, batches = setup(model)
    changes = ARGUMENTS[cls]
    return run(start, changes.build(**{**changes.base, **changes.also.get(also, {})}), batches)


@pytest.mark.parametrize(("cls", "argument"), SETTINGS, ids=[f"{cls.__name__}-{name}" for cls, name in SETTINGS])
def test_every_constructor_argument_changes_something(cls: Any, argument: str) -> None:
    changes = ARGUMENTS[cls]
    if (cls, argument) == (Private, "delta"):
        pytest.importorskip("dp_accounting", reason="needs dp-accounting: pip install vecgym[privacy]")
    assert argument in changes.values, f"add a value of {argument} to ARGUMENTS[{cls.__name__}]"
    model = changes.models.get(argument, "MLP")
    start, batches = setup(model)
    base = {**changes.base, **changes.also.get(argument, {})}
    first, second = changes.build(**base), changes.build(**{**base, argument: changes.values[argument]})
    one = run_of_base(cls, model, argument if argument in changes.also else "")
    other = run(start, second, batches)
    if (cls, argument) in ((EF21, "inner"), (Robust, "server")):  # the same average, sent in another way
        assert list(one.comm.ledger) != list(other.comm.ledger)
    elif argument == "evaluated":
        models = [x.simulation.result(x.state).params for x in (one, other)]
        assert difference(*models) > 1e-8
    elif (cls, argument) == (Private, "delta"):  # counts
        assert_same_bits(one.params, other.params)
    else:
        assert difference(one.params, other.params) > 1e-8
    assert repr(first) != repr(second)  # what a log keeps of a run


def test_no_change_is_listed_that_the_class_does_not_have() -> None:
    for cls, changes in ARGUMENTS.items():
        assert {*changes.base, *changes.values} <= inspect.signature(cls).parameters.keys()


class Unchecked(SGD):
    """A user's optimizer that takes any number."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=abs(lr))


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "two inner learning rates": (lambda: DiLoCoStrategy(lr=0.1, inner_lr=0.1), ValueError, "two names"),
    "lr twice": (lambda: FedAvgStrategy(OptimSpec(SGD, lr=0.1), lr=0.2), ValueError, "given twice"),
    "outer lr twice": (lambda: DiLoCoStrategy("sgd", OptimSpec(SGD, lr=0.1), outer_lr=0.2), ValueError, "given twice"),
    "warm-up of a function": (lambda: Strategy(lr_scheduler=lambda t: 1.0, warmup_steps=2), ValueError, "no effect"),
    "cosine of a function": (lambda: Strategy(lr_scheduler=lambda t: 1.0, cosine_anneal=True), ValueError, "no effect"),
    "unknown keyword": (lambda: FedAvgStrategy(inner_optimizer="sgd"), TypeError, "inner_optimizer"),  # type: ignore[call-arg]
    "unknown schedule": (lambda: AllReduceStrategy(lr_scheduler="cosin"), ValueError, "did you mean 'cosine'"),
    "schedule of a wrong type": (lambda: AllReduceStrategy(lr_scheduler=3), TypeError, "int"),  # type: ignore[arg-type]
    "negative warm-up": (lambda: AllReduceStrategy(warmup_steps=-1), ValueError, "warmup_steps=-1"),
    "max_norm": (lambda: DiLoCoStrategy(max_norm=0.0), ValueError, "max_norm=0.0"),
    "H": (lambda: FedAvgStrategy(H=0), ValueError, "H=0"),
    "Hu": (lambda: DESLOCStrategy(Hu=0), ValueError, "Hu=0 must be an integer >= 1"),
    "Hv of a wrong type": (lambda: DESLOCStrategy(Hv=2.0), ValueError, "Hv=2.0 must be an integer"),  # type: ignore[arg-type]
    "H of Local Adam": (lambda: LocalAdamStrategy(H=0), ValueError, "H=0"),
    "matrices": (lambda: MuLoCoStrategy(matrices="all"), TypeError, "matrices='all' must be a function"),  # type: ignore[arg-type]
    "matrices that are none": (
        lambda: run(setup()[0], MuLoCoStrategy(H=1, matrices=lambda name, p: True), setup()[1]),
        ValueError,
        "Muon takes matrices, but parameter",
    ),
    "Muon's kind": (lambda: MuLoCoStrategy(muon="keller"), ValueError, "muon='keller'"),  # type: ignore[arg-type]
    "Muon's rate": (lambda: MuLoCoStrategy(lr=0.0), ValueError, "lr=0.0 must be a number > 0: Muon's rate"),
    "AdamW's rate": (lambda: MuLoCoStrategy(adamw_lr=-1.0), ValueError, "lr"),
    "mu_x": (lambda: GPAStrategy(mu_x=1.0), ValueError, r"mu_x=1.0 must be a number in \[0, 1\)"),
    "mu_y": (lambda: GPAStrategy(mu_y=0.0), ValueError, r"mu_y=0.0 must be a number in \(0, 1\]"),
    "mu_x of other nodes": (
        lambda: GPAStrategy(mu_x=torch.full((3,), 0.5)).check(5, 10),
        ValueError,
        r"mu_x has shape \[3\], but the run has num_nodes=5",
    ),
    "p": (lambda: PALSGDStrategy(p=1.0), ValueError, r"p=1.0 must be a number in \[0, 1\)"),
    "pull": (lambda: PALSGDStrategy(pull=-0.5), ValueError, "pull=-0.5"),
    "pull of other nodes": (
        lambda: PALSGDStrategy(H=2, pull=torch.ones(3)).check(5, 10),
        ValueError,
        r"pull has shape \[3\], but the run has num_nodes=5",
    ),
    "a correction of no delay": (
        lambda: SPARTAStrategy(0.1, correct_delay=True),
        ValueError,
        "correct_delay=True without a delay has no effect: give delay=1",
    ),
    "a correction that is no flag": (
        lambda: SPARTAStrategy(0.1, delay=1, correct_delay="yes"),  # type: ignore[arg-type]
        TypeError,
        "correct_delay='yes' must be True or False",
    ),
    "a correction of the most moved": (
        lambda: SPARTAStrategy(0.1, compression_method="topk", correct_delay=True),
        ValueError,
        "leave out index_selector and delay, and so correct_delay",
    ),
    "another correction": (lambda: DiLoCoStrategy(correction="helico"), ValueError, "did you mean 'heloco'"),
    "HeLoCo without momentum": (
        lambda: DiLoCoStrategy("sgd", OptimSpec(SGD, lr=1.0), correction="heloco"),
        ValueError,
        "needs the outer momentum, and OptimSpec",
    ),
    "the median norm of islands": (
        lambda: Outer(Mean(2), correct="median_norm"),
        ValueError,
        "leave out islands and participation",
    ),
    "a group of more than all": (
        lambda: NoLoCoStrategy(group_size=6).check(5, 100),
        ValueError,
        "group_size=6 is larger than the 5 nodes",
    ),
    "gamma of other nodes": (
        lambda: NoLoCoStrategy(gamma=torch.ones(3)).check(5, 100),
        ValueError,
        r"gamma has shape \[3\], but the run has num_nodes=5",
    ),
    "a momentum of 1": (lambda: NoLoCoStrategy(momentum=1.0), ValueError, "momentum=1.0"),
    "H of a function": (lambda: FedAvgStrategy(H=lambda step: 0).check(5, 10), ValueError, r"H\(0\)=0 must be"),
    "H of a function, later": (
        lambda: DiLoCoStrategy(H=lambda step: 4 if step < 8 else 0.5).check(5, 10),  # type: ignore[arg-type,return-value]
        ValueError,
        r"H\(8\)=0.5 must be an integer >= 1",
    ),
    "H of a function and weights": (
        lambda: FedAvgStrategy(H=lambda step: 2, sync_weight=[0, 1]),
        ValueError,
        "both say when the nodes exchange",
    ),
    "periods of a function": (lambda: DESLOCStrategy(H=lambda step: 2), ValueError, "give both"),
    "never an exchange of a function": (
        lambda: FedAvgStrategy(H=lambda step: 11).check(5, 10),
        vecgym.VecgymWarning,
        r"H\(0\)=11 is larger",
    ),
    "H of a wrong type": (lambda: DiLoCoStrategy(H=2.0), ValueError, "H=2.0"),  # type: ignore[arg-type]
    "island_size": (lambda: FedAvgStrategy(island_size=0), ValueError, "island_size=0"),
    "participation": (lambda: FedAvgStrategy(participation=0.0), ValueError, "participation=0.0"),
    "participation above 1": (lambda: FedAvgStrategy(participation=1.5), ValueError, "participation=1.5"),
    "too large an island": (lambda: FedAvgStrategy(island_size=6).check(5, 10), ValueError, "island_size=6"),
    "island of absent nodes": (
        lambda: FedAvgStrategy(island_size=4, participation=0.6).check(5, 10),
        ValueError,
        "3 nodes that take part",
    ),
    "exchanges that are no list": (
        lambda: Strategy(exchanges=Exchange(Mean())),  # type: ignore[arg-type]
        TypeError,
        "list",
    ),
    "a class as an exchange": (
        lambda: CommunicateOptimizeStrategy([Exchange]),
        TypeError,
        "is the class Exchange; give an Exchange",
    ),
    "unknown optimizer": (lambda: AllReduceStrategy("adamv"), ValueError, "did you mean"),
    "all gradients of some nodes": (
        lambda: CommunicateOptimizeStrategy(
            [AveragingCommunicator(participation=0.5), Exchange(StrongestCosines(), of="gradients")]
        ),
        ValueError,
        r"sit out, and Exchange\(StrongestCosines",
    ),
    "lr nan": (lambda: AllReduceStrategy("sgd", lr=float("nan")), ValueError, "lr=nan must be finite"),
    "lr inf": (lambda: DiLoCoStrategy("adamw", outer_lr=float("inf")), ValueError, "lr=inf must be finite"),
    "lr nan of a node": (lambda: DeMoStrategy(lr=torch.tensor([0.1, torch.nan])), ValueError, "lr=nan must be finite"),
    "lr negative": (lambda: GossipStrategy(inner_optim="adam", lr=-0.1), ValueError, "lr"),
    "order": (lambda: GradientTrackingStrategy(order="combine"), ValueError, "order='combine'"),  # type: ignore[arg-type]
    "QGM of Adam": (lambda: QGMStrategy("ring", "adam"), ValueError, "takes the place of SGD's"),
    "QGM's momentum": (lambda: QGMStrategy(momentum=1.0), ValueError, r"momentum=1.0 must be a number in \[0, 1\)"),
    "QGM's flag": (lambda: QGMStrategy(nesterov=1), TypeError, "nesterov=1 must be True"),  # type: ignore[arg-type]
    "Mime of Muon": (lambda: MimeStrategy("muon"), ValueError, "elementwise"),
    "Mime's flag": (lambda: MimeStrategy(lite=1), TypeError, "lite=1 must be True"),  # type: ignore[arg-type]
    "SCAFFOLD of Adam": (lambda: SCAFFOLDStrategy("adam"), ValueError, "plain steps"),
    "SCAFFOLD's clipping": (lambda: SCAFFOLDStrategy(max_norm=1.0), ValueError, "max_norm=1.0"),
    "a ring of relays": (lambda: RelaySumStrategy("ring"), ValueError, "topology='ring'"),
    "no tree": (lambda: RelaySumStrategy([(0, 1), (1, 2), (2, 0)]), ValueError, "is no tree of 4 nodes"),
    "budget": (lambda: MATCHAStrategy(budget=0.0), ValueError, r"budget=0.0 must be a number in \(0, 1\]"),
    "links that meet": (lambda: MATCHAStrategy(matchings=[[(0, 1), (1, 2)]]), ValueError, "is no matching"),
    "links that do not connect": (
        lambda: MATCHAStrategy(matchings=[[(0, 1), (2, 3)]]),
        ValueError,
        "do not connect all 4 nodes",
    ),
    "matchings of fewer nodes": (
        lambda: MATCHAStrategy(matchings=[[(0, 1)]]).check(3, 10),
        ValueError,
        "matchings are of",
    ),
    "shares": (lambda: SGPStrategy([[0.5, 0.5], [0.0, 1.0]]), ValueError, "column 0 sums to 0.5.*transpose"),
    "a clip of movements": (lambda: EDiTStrategy(clip=0.0), ValueError, "clip=0.0 must be a number in"),
    "a short warm-up of norms": (lambda: EDiTStrategy(warmup=1), ValueError, "warmup=1 must be an integer >= 2"),
    "a threshold of norms": (lambda: EDiTStrategy(threshold=0.0), ValueError, "threshold=0.0"),
    "a weight of norms": (lambda: EDiTStrategy(alpha=1.5), ValueError, r"alpha=1.5 must be a number in \(0, 1\]"),
    "a temperature": (lambda: EDiTStrategy(temperature=0.0), ValueError, "temperature=0.0"),
    "a temperature of each node": (
        lambda: EDiTStrategy(temperature=torch.ones(3)),
        ValueError,
        r"temperature has shape \[3\]",
    ),
    "anomalies that are no flag": (
        lambda: EDiTStrategy(skip_anomalies=1),  # type: ignore[arg-type]
        TypeError,
        "skip_anomalies=1 must be True or False",
    ),
    "a penalty of islands": (lambda: MovementPenalty(Mean(2)), ValueError, "leave out islands and graphs"),
    "consensus": (lambda: CHOCOStrategy(consensus=0.0), ValueError, r"consensus=0.0 must be a number in \(0, 1\]"),
    "CHOCO's codec": (lambda: CHOCOStrategy(codec="powersgd"), TypeError, "codec"),
    "CHOCO's graph": (lambda: CHOCOStrategy("random_matching"), ValueError, "changes from step to step"),
    "CHOCO's order": (lambda: CHOCOStrategy(order="first"), ValueError, "order='first'"),  # type: ignore[arg-type]
    "D^2 that diverges": (lambda: D2Strategy("ring").check(4, 10), ValueError, "eigenvalue -0.3333"),
    "exact diffusion, not symmetric": (
        lambda: ExactDiffusionStrategy("exponential").check(4, 10),
        ValueError,
        "not symmetric, and ExactDiffusionStrategy may diverge",
    ),
    "lr negative, of one's own": (lambda: Strategy(Unchecked, lr=-0.1), ValueError, "lr=-0.1 must be a number >= 0"),
    "beta nan": (lambda: Strategy(OptimSpec("adam", betas=(torch.nan, 0.9))), ValueError, "must be finite"),
    "a flag of an optimizer": (lambda: Strategy(OptimSpec("sgd", nesterov="no")), TypeError, "nesterov='no'"),
    "fused": (lambda: Strategy(OptimSpec("adam", fused=1)), TypeError, "fused=1 must be True or False"),
    "cosine_anneal": (lambda: Strategy("sgd", cosine_anneal="no"), TypeError, "cosine_anneal='no'"),  # type: ignore[arg-type]
    "stochastic": (lambda: Quantise(8, stochastic="no"), TypeError, "stochastic='no'"),  # type: ignore[arg-type]
    "unbiased": (lambda: RandomK(0.1, unbiased=0), TypeError, "unbiased=0 must be True"),  # type: ignore[arg-type]
    "error_feedback": (
        lambda: Compressed(Mean(), "int8", error_feedback="no"),  # type: ignore[arg-type]
        TypeError,
        "error_feedback='no'",
    ),
    "reference": (
        lambda: Compressed(Mean(), "int8", reference=0),  # type: ignore[arg-type]
        TypeError,
        "reference=0",
    ),
    "max_norm of a wrong type": (lambda: Strategy(max_norm={}), ValueError, "max_norm={} must be a number"),  # type: ignore[arg-type]
    "max_norm nan": (lambda: Strategy(max_norm=float("nan")), ValueError, "max_norm=nan must be a number"),
    "max_norm of other nodes": (
        lambda: Strategy(max_norm=torch.ones(3)).check(5, 10),
        ValueError,
        r"max_norm has shape \[3\], but the run has num_nodes=5: give a number, or \[5\]",
    ),
    "lr of other nodes": (
        lambda: AllReduceStrategy("sgd", lr=torch.ones(3)).check(5, 10),
        ValueError,
        r"lr of the inner optimizer has shape \[3\], but the run has num_nodes=5",
    ),
    "outer lr of other nodes": (
        lambda: DiLoCoStrategy("sgd", H=2, outer_lr=torch.ones(3)).check(5, 10),
        ValueError,
        r"lr of the outer optimizer has shape \[3\]",
    ),
    "proximal_mu of other nodes": (
        lambda: FedAvgStrategy(proximal_mu=torch.ones(3)).check(5, 10),
        ValueError,
        r"proximal_mu has shape \[3\], but the run has num_nodes=5",
    ),
    "p of Scaffnew": (lambda: ScaffnewStrategy(p=0.0), ValueError, r"p=0.0 must be a number in \(0, 1\]"),
    "alpha of FedDyn": (lambda: FedDynStrategy(alpha=0.0), ValueError, "alpha=0.0"),
    "local steps of other nodes": (
        lambda: FedNovaStrategy(local_steps=[1, 2]).check(5, 10),
        ValueError,
        "local_steps has numbers for",
    ),
    "never an exchange": (lambda: FedAvgStrategy(H=11).check(5, 10), vecgym.VecgymWarning, "never exchange"),
}


@pytest.mark.parametrize("setting", REFUSED)
def test_what_cannot_work_is_refused(setting: str) -> None:
    call, error, message = REFUSED[setting]
    with pytest.raises(error, match=message):
        call()


# ------------------------------------------------------------------------------------ the storage itself


@pytest.mark.parametrize("name", NAMES)
def test_what_is_the_same_on_every_node_is_stored_once(name: str) -> None:
    start, batches = setup()
    row, state = STRATEGIES[name], run(start, make(name), batches).state
    assert all(len(x) == 1 for x in flat(state.shared).values())
    assert all(len(x) == K for x in flat(state.own).values())
    assert ("params" in state.shared) == ("optimizer" in state.shared) == row.replicated
    held = {key for key in flat(state.own) if key.split(".")[0] not in ("params", "optimizer", "buffers")}
    assert held == {key for key in held if any(part in key for part in row.per_node)}
    assert not [key for key in flat(state.shared) if any(f"/{part}" in key for part in row.per_node)]


def test_the_first_state_is_the_models() -> None:
    """Also when other initial parameters are given, `[1, *]` or `[K, *]`."""
    start, batches = setup()
    sim = simulation(start, make("fedavg"), batches)
    own = {name: p.detach().expand(K, *p.shape) for name, p in start.named_parameters()}
    assert_same_bits(sim.init().params, own)
    other = {name: torch.randn(K, *p.shape, dtype=p.dtype) for name, p in start.named_parameters()}
    before = {name: p.clone() for name, p in other.items()}
    result: Run = advance(sim, sim.init(other), batches[:H])
    assert difference(result.params, rows(result.params, [0] * K)) == 0
    separate = [
        run(filled(start, before, i), make("independent"), reordered(batches[:H], [i])).params for i in range(K)
    ]
    mean = {name: torch.stack([x[name] for x in separate]).mean(0) for name in own}
    assert_close(result.params, mean, 1e-12)


def filled(model: nn.Module, params: dict[str, Tensor], node: int) -> nn.Module:
    (copy,) = common.copy_model(model, 1)
    copy.load_state_dict({name: x[node] for name, x in params.items()})
    return copy
