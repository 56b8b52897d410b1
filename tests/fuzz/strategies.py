"""Every strategy of the library by name, in small: those of its catalogue, variants of them, and asynchronous ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.cards import CARDS
from vecgym import OptimSpec
from vecgym.compress import PowerSGD, RandomK
from vecgym.strategy import (
    EF21,
    ADPSGDStrategy,
    AsyncStrategy,
    AveragingCommunicator,
    CommunicateOptimizeStrategy,
    Compressed,
    DecoupledDiLoCoStrategy,
    DelayedNesterov,
    DiLoCoStrategy,
    Exchange,
    FedAvgStrategy,
    FedBuff,
    GossipStrategy,
    HALoSStrategy,
    HeLoCo,
    Mean,
    Mix,
    MostMoved,
    Outer,
    OuterOptimizer,
    PartitionedSelector,
    Robust,
    ServerMean,
    Sparse,
    SPARTAStrategy,
    Strategy,
    every,
)
from vecgym.strategy.catalogue import CATALOGUE


@dataclass(frozen=True)
class Kind:
    """A strategy, and which relations it has.

    Attributes:
        make: of H, p and the inner optimizer's settings.
        nameless: nodes are alike: nothing is drawn for one of them, and none has a place in a graph.
        server: a server takes part, so that nodes need not send what they receive.
        choosy: it takes the largest of many values, or signs, so that rounding may choose.
        shared: the run's model is not the mean of the nodes.
        resting: some nodes leave out steps. With an availability they count their own from then on.
    """

    make: Callable[..., Strategy]
    nameless: bool = True
    server: bool = False
    choosy: bool = False
    shared: bool = False
    resting: bool = False


def composed(*modules: Any) -> Callable[..., Strategy]:
    """A strategy of modules, each a function of H and p."""

    def make(H: int, p: float, **inner: Any) -> Strategy:
        return CommunicateOptimizeStrategy([module(H, p) for module in modules], **inner)

    return make


def plain(strategy: Callable[..., Strategy], **options: Any) -> Callable[..., Strategy]:
    return lambda H, p, **inner: strategy(H=H, **options, **inner)


def nesterov() -> OptimSpec:
    return OptimSpec("sgd", lr=0.4, momentum=0.6, nesterov=True)


NAMED = {"fedavg-islands", "fedavg-participation", "palsgd", "noloco", "gossip", "gossip-matching", "streaming-4-bits"}
RESTING = {"fedavg-participation", "palsgd"}
CHOOSY = {"demo", "diloco-topk", "sparseloco", "streaming-4-bits"}

KINDS: dict[str, Kind] = {
    name: Kind(
        row.make, nameless=name not in NAMED, server=CARDS[name].server, choosy=name in CHOOSY, shared=name == "gpa",
        resting=name in RESTING,
    )
    for name, row in CATALOGUE.items()
} | {
    "fedavg-kept": Kind(plain(FedAvgStrategy, participation=0.6, resting="keep"), nameless=False, resting=True),
    "fedavg-weighted": Kind(plain(FedAvgStrategy, weighting="examples")),
    "fedprox": Kind(plain(FedAvgStrategy, proximal_mu=0.3)),
    "diloco-adam": Kind(plain(DiLoCoStrategy, outer_optim=OptimSpec("adam", lr=0.05, eps=1e-3))),
    "diloco-int8": Kind(plain(DiLoCoStrategy, compression="int8"), choosy=True),
    "diloco-sign": Kind(plain(DiLoCoStrategy, compression="sign"), choosy=True),
    "diloco-randomk": Kind(plain(DiLoCoStrategy, compression=RandomK(0.3))),
    "diloco-powersgd": Kind(plain(DiLoCoStrategy, compression=PowerSGD(1))),
    "diloco-heloco": Kind(plain(DiLoCoStrategy, correction="heloco"), choosy=True),
    "diloco-median-norm": Kind(plain(DiLoCoStrategy, correction="median_norm"), choosy=True),
    "diloco-late": Kind(composed(lambda H, p: Exchange(Outer(Mean(), nesterov()), every=H, delay=1, late="change"))),
    "diloco-islands": Kind(
        composed(lambda H, p: Exchange(Outer(Mean(island_size=2), nesterov()), every=H)), nameless=False
    ),
    "diloco-islands-adam": Kind(
        composed(lambda H, p: Exchange(Outer(Mean(island_size=2), OptimSpec("adam", lr=0.05, eps=1e-3)), every=H)),
        nameless=False,
    ),
    "corrected": Kind(
        composed(lambda H, p: Exchange(Outer(Mean(), nesterov(), correct="heloco"), every=H)), choosy=True
    ),
    "diloco-server": Kind(composed(lambda H, p: Exchange(Outer(ServerMean(), nesterov()), every=H)), server=True),
    "ef21": Kind(composed(lambda H, p: Exchange(Outer(EF21(Mean(), "topk"), nesterov()), every=H)), choosy=True),
    "median": Kind(composed(lambda H, p: Exchange(Outer(Robust("median"), nesterov()), every=H))),
    "robust-codes": Kind(
        composed(lambda H, p: Exchange(Outer(Compressed(Robust("median"), "int8"), nesterov()), every=H)), choosy=True
    ),
    "mixed-steps": Kind(composed(lambda H, p: Exchange(Mix("one_peer_exponential"), every=H)), nameless=False),
    "sparse-steps": Kind(composed(lambda H, p: Exchange(Sparse(p, Mean()), every=H))),
    "most-moved": Kind(composed(lambda H, p: Exchange(MostMoved(p))), choosy=True),
    "sparta-late": Kind(lambda H, p, **inner: SPARTAStrategy(index_selector=PartitionedSelector(p), delay=2, **inner)),
    "sparta-int4": Kind(
        lambda H, p, **inner: SPARTAStrategy(p, quantization_bits=4, **inner), nameless=False, choosy=True
    ),
    "gossip-complete": Kind(lambda H, p, **inner: GossipStrategy("complete", **inner)),
    "gossip-late": Kind(composed(lambda H, p: Exchange(Mix("exponential"), delay=1, late="change")), nameless=False),
    "averages-then-diloco": Kind(
        composed(
            lambda H, p: every(2, AveragingCommunicator(island_size=2)),
            lambda H, p: Exchange(Outer(Mean(), nesterov()), every=H),
        ),
        nameless=False,
    ),
    "async": Kind(lambda H, p, **inner: AsyncStrategy(server=OuterOptimizer(lr=0.2), H=H, **inner)),
    "async-waiting": Kind(
        lambda H, p, **inner: AsyncStrategy(
            server=OuterOptimizer(lr=0.2), H=H, buffer=2, max_wait=1.0, staleness="inverse_sqrt", **inner
        )
    ),
    "async-delayed": Kind(lambda H, p, **inner: AsyncStrategy(server=DelayedNesterov(0.3, 0.8, 2), H=H, **inner)),
    "async-fedbuff": Kind(lambda H, p, **inner: AsyncStrategy(server=FedBuff(2, lr=0.7), H=H, **inner)),
    "async-heloco": Kind(lambda H, p, **inner: AsyncStrategy(server=HeLoCo(0.3, 0.8), H=H, **inner), choosy=True),
    "halos": Kind(lambda H, p, **inner: HALoSStrategy(regions=2, local_updates=2, H=H, **inner), nameless=False),
    "ad-psgd": Kind(lambda H, p, **inner: ADPSGDStrategy(**inner), nameless=False),
    "decoupled": Kind(lambda H, p, **inner: DecoupledDiLoCoStrategy(fragments=2, quorum=1, H=H, **inner)),
}  # fmt: skip
ASYNCHRONOUS = tuple(name for name in KINDS if name.startswith("async") or name in ("halos", "ad-psgd", "decoupled"))
SYNCHRONOUS = tuple(name for name in KINDS if name not in ASYNCHRONOUS)


def make(name: str, H: int, p: float, **inner: Any) -> Strategy:
    return KINDS[name].make(H=H, p=p, **inner)


def needs_moments(name: str) -> bool:
    return name in CARDS and CARDS[name].needs_moments


def needs_even(name: str) -> bool:
    return name in CARDS and CARDS[name].even
