"""Every strategy of the library by name, in small: those of its catalogue, variants of them, and asynchronous ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tests.cards import CARDS
from vecgym import OptimSpec
from vecgym.compress import PowerSGD, RandomK
from vecgym.strategy import (
    EF21,
    MLA,
    ADPSGDStrategy,
    AsyncStrategy,
    AveragingCommunicator,
    CommunicateOptimizeStrategy,
    Compressed,
    DecoupledDiLoCoStrategy,
    DelayedNesterov,
    DiLoCoStrategy,
    Eager,
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
from vecgym.strategy.catalogue import CATALOGUE, Knobs


@dataclass(frozen=True)
class Kind:
    """A strategy, and which relations it has.

    Attributes:
        make: of H, p and the inner optimizer's settings.
        nameless: nodes are alike: nothing is drawn for one of them, and none has a place in a graph.
        server: a server takes part, so that nodes need not send what they receive.
        choosy: it takes the largest of many values, or signs, so that rounding may choose.
        shared: the run's model is not the mean of the nodes.
        late: nodes do not wait for one another.
        resting: some nodes leave out steps. With an availability they count their own from then on.
    """

    make: Callable[..., Strategy]
    nameless: bool = True
    server: bool = False
    choosy: bool = False
    shared: bool = False
    resting: bool = False
    late: bool = False


Late = partial(Kind, late=True)


def composed(*modules: Any) -> Callable[..., Strategy]:
    """A strategy of modules, each a function of H and p."""

    def make(H: int, p: float, **inner: Any) -> Strategy:
        return CommunicateOptimizeStrategy([module(H, p) for module in modules], **inner)

    return make


def plain(strategy: Callable[..., Strategy], **options: Any) -> Callable[..., Strategy]:
    return lambda H, p, **inner: strategy(H=H, **options, **inner)


def nesterov() -> OptimSpec:
    return OptimSpec("sgd", lr=0.4, momentum=0.6, nesterov=True)


NAMED = {
    "fedavg-islands", "fedavg-participation", "palsgd", "noloco", "gossip", "gossip-matching", "streaming-4-bits",
    "gradient-tracking", "exact-diffusion", "qgm", "sgp", "choco", "relaysum", "matcha",
}  # fmt: skip
RESTING = {"fedavg-participation", "palsgd"}
CHOOSY = {"demo", "dsm", "diloco-topk", "sparseloco", "streaming-4-bits", "choco"}

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
    **{
        f"{name}-sampled": Kind(
            lambda H, p, name=name, **inner: CATALOGUE[name].build(Knobs(H=H), participation=0.6, **inner),
            nameless=False, server=True, resting=True,
        )
        for name in ("fednova", "feddyn")
    },
    "scaffold-sampled": Kind(
        lambda H, p, **inner: CATALOGUE["scaffold"].build(Knobs(H=H), participation=0.6, **inner),
        nameless=False, server=True, resting=True,
    ),
    "mime-lite-sampled": Kind(
        lambda H, p, **inner: CATALOGUE["mime"].build(Knobs(H=H), participation=0.6, lite=True, **inner),
        nameless=False, server=True, resting=True,
    ),
    "diloco-adam": Kind(plain(DiLoCoStrategy, outer_optim=OptimSpec("adam", lr=0.05, eps=1e-3))),
    "diloco-int8": Kind(plain(DiLoCoStrategy, compression="int8"), choosy=True),
    "diloco-sign": Kind(plain(DiLoCoStrategy, compression="sign"), choosy=True),
    "diloco-randomk": Kind(plain(DiLoCoStrategy, compression=RandomK(0.3))),
    "diloco-powersgd": Kind(plain(DiLoCoStrategy, compression=PowerSGD(1))),
    "diloco-restarts": Kind(plain(DiLoCoStrategy, restart=2)),
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
    "geometric-median": Kind(composed(lambda H, p: Exchange(Outer(Robust("geometric_median"), nesterov()), every=H))),
    "clipping": Kind(composed(lambda H, p: Exchange(Robust("centred_clipping", tau=1.0), every=H))),
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
    "async": Late(lambda H, p, **inner: AsyncStrategy(server=OuterOptimizer(lr=0.2), H=H, **inner)),
    "async-waiting": Late(
        lambda H, p, **inner: AsyncStrategy(
            server=OuterOptimizer(lr=0.2), H=H, buffer=2, max_wait=1.0, staleness="inverse_sqrt", **inner
        )
    ),
    "async-delayed": Late(lambda H, p, **inner: AsyncStrategy(server=DelayedNesterov(0.3, 0.8, 2), H=H, **inner)),
    "async-fedbuff": Late(lambda H, p, **inner: AsyncStrategy(server=FedBuff(2, lr=0.7), H=H, **inner)),
    "async-mla": Late(lambda H, p, **inner: AsyncStrategy(server=MLA(0.3, 0.8), H=H, **inner)),
    "async-heloco": Late(lambda H, p, **inner: AsyncStrategy(server=HeLoCo(0.3, 0.8), H=H, **inner), choosy=True),
    "halos": Late(lambda H, p, **inner: HALoSStrategy(regions=2, local_updates=2, H=H, **inner), nameless=False),
    "ad-psgd": Late(lambda H, p, **inner: ADPSGDStrategy(**inner), nameless=False),
    "decoupled": Late(lambda H, p, **inner: DecoupledDiLoCoStrategy(fragments=2, quorum=1, H=H, **inner)),
}  # fmt: skip
ASYNCHRONOUS = tuple(name for name, kind in KINDS.items() if kind.late)
SYNCHRONOUS = tuple(name for name in KINDS if name not in ASYNCHRONOUS)


def make(name: str, H: int, p: float, **inner: Any) -> Strategy:
    return KINDS[name].make(H=H, p=p, **inner)


def needs_moments(name: str) -> bool:
    return name in CARDS and CARDS[name].needs_moments


def needs_even(name: str) -> bool:
    return name in CARDS and CARDS[name].even


# ------------------------------------------------------------------------------------- exchanges that settings say


def adam() -> OptimSpec:
    return OptimSpec("adam", lr=0.05, eps=1e-3)


HOWS: dict[str, Callable[[], Any]] = {
    "mean": Mean,
    "weighted": lambda: Mean(weighting="examples"),
    "islands": lambda: Mean(island_size=2),
    "server": ServerMean,
    "outer": lambda: Outer(Mean(), nesterov()),
    "outer adam": lambda: Outer(Mean(), adam()),
    "outer server": lambda: Outer(ServerMean(), nesterov()),
    "outer median": lambda: Outer(Robust("median"), nesterov()),
    "outer codes": lambda: Outer(Compressed(Mean(), "int8"), nesterov()),
    "outer islands": lambda: Outer(Mean(island_size=2), nesterov()),
    "eager": lambda: Eager(Mean(), nesterov()),
    "mix": lambda: Mix("one_peer_exponential"),
    "mix all": lambda: Mix("complete"),
    "sparse": lambda: Sparse(0.3, Mean()),
    "most moved": lambda: MostMoved(0.3),
}
OF_NAMES = {"islands", "outer islands", "mix"}  # nodes have places, or are drawn
OF_SERVERS = {"server", "outer server"}
CHOOSES = {"outer codes", "most moved"}


def exchange(s: Mapping[str, Any], order: Sequence[int], spelling: int = 0) -> Exchange:
    """An exchange for these nodes of a case; `each` has settings of the nodes of the case."""
    options = {key: value for key, value in s.items() if key not in ("kind", "each")}
    for key, values in s.get("each", {}).items():
        own = [values[node % len(values)] for node in order]
        options[key] = torch.tensor(own) if key == "keep" else own
    if spelling:
        options = spelled_out(options, len(order))
    return Exchange(HOWS[s["kind"]](), **options)


def spelled_out(options: dict[str, Any], num_nodes: int) -> dict[str, Any]:
    """The same in other words."""
    every = options.get("every", 1)
    for key, default in (("delay", 0), ("keep", 0.0)):
        value = options.get(key, default)
        if isinstance(value, (int, float)) and (value or key == "delay") and value < every and "of" not in options:
            options[key] = [value] * num_nodes if key == "delay" else torch.full((num_nodes,), value)
    if "offsets" not in options and options.get("fragments", 1) == 1:
        options["offsets"] = [every]
    if options.get("of") == "parameters" or "of" not in options:
        options |= {"of": "parameters", "lost": options.get("lost", 0.0)}
    return options


def product_kind(exchanges: Sequence[Mapping[str, Any]]) -> Kind:
    kinds = {s["kind"] for s in exchanges}
    drawn = any("participation" in s or "lost" in s or "each" in s for s in exchanges)
    return Kind(
        CommunicateOptimizeStrategy, nameless=not drawn and not kinds & OF_NAMES, server=bool(kinds & OF_SERVERS),
        choosy=bool(kinds & CHOOSES), resting=any("participation" in s for s in exchanges),
    )  # fmt: skip
