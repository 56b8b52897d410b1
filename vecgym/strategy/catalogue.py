"""The strategies by name, and how each is made.

`vecgym verify` and `vecgym compare`, the tests of every strategy's properties and equivalence, and the benchmarks take
their strategies from here. A new strategy needs its class, its naive twin in `tests/reference`, a row here, and a card
in `tests/cards.py` with its known properties.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from vecgym.compress import TopK
from vecgym.optim import OptimSpec
from vecgym.strategy.allreduce import AllReduceStrategy, GPAStrategy
from vecgym.strategy.base import Strategy
from vecgym.strategy.decentralised import (
    CHOCOStrategy,
    D2Strategy,
    ExactDiffusionStrategy,
    GradientTrackingStrategy,
    MATCHAStrategy,
    QGMStrategy,
    RelaySumStrategy,
    SGPStrategy,
)
from vecgym.strategy.decentralised.gossip import GossipStrategy
from vecgym.strategy.demo import DeMoStrategy
from vecgym.strategy.diloco import DiLoCoStrategy, EagerDiLoCoStrategy, StreamingDiLoCoStrategy
from vecgym.strategy.federated import FedDynStrategy, FedNovaStrategy, MimeStrategy, ScaffnewStrategy, SCAFFOLDStrategy
from vecgym.strategy.federated_averaging import FedAvgStrategy
from vecgym.strategy.local_steps import (
    DESLOCStrategy,
    LocalAdamStrategy,
    MuLoCoStrategy,
    NoLoCoStrategy,
    PALSGDStrategy,
    SparseLoCoStrategy,
)
from vecgym.strategy.penalty import EDiTStrategy
from vecgym.strategy.sign_momentum import DSMStrategy
from vecgym.strategy.sparta import SPARTADiLoCoStrategy, SPARTAStrategy


class Knobs(NamedTuple):
    """Settings to build strategies with; each strategy takes those that it has.

    Attributes:
        H: optimizer steps between two exchanges.
        p: the fraction of the coordinates that is exchanged.
        outer_optim: DiLoCo's; None: its default.
        delay: steps that a fragment of Streaming DiLoCo may take, less than H.
        fragments: the number of fragments of Streaming DiLoCo; None: its default.
    """

    H: int = 3
    p: float = 0.1
    outer_optim: OptimSpec | None = None
    delay: int = 1
    fragments: int | None = 2

    @property
    def rounds(self) -> dict[str, Any]:
        """The arguments for rounds of H steps with an outer optimizer."""
        return {"H": self.H, "outer_optim": self.outer_optim}


class Item(NamedTuple):
    """A strategy.

    Attributes:
        build: a function of `Knobs` and the arguments that all strategies share.
        compared: whether `vecgym compare` offers it.
    """

    build: Callable[..., Strategy]
    compared: bool = False

    def make(self, **settings: Any) -> Strategy:
        """Make the strategy from the settings of `Knobs` that it has, and `inner_optim`, `lr`, `max_norm`, ...

        >>> CATALOGUE["fedavg"].make(H=5, p=0.01, inner_optim="sgd", lr=0.1)
        FedAvgStrategy(OptimSpec(SGD, lr=0.1), Exchange(Mean(), every=5))
        """
        knobs = Knobs(**{name: settings.pop(name) for name in Knobs._fields if name in settings})
        return self.build(knobs, **settings)


def _edit(knobs: Knobs, **inner: Any) -> Strategy:
    """Make EDiT with DiLoCo's outer optimizer, and anomalies that are looked for after the second exchange."""
    outer = "sgd" if knobs.outer_optim is None else knobs.outer_optim
    return EDiTStrategy(H=knobs.H, outer_optim=outer, clip=10.0, skip_anomalies=True, warmup=2, **inner)


def _muloco(knobs: Knobs, **inner: Any) -> Strategy:
    """Make MuLoCo, which has its own inner optimizers; both get the given learning rate."""
    lr = _own_rate(inner, 0.02)
    return MuLoCoStrategy(lr=lr, adamw_lr=lr, **knobs.rounds, **inner)


def _plain(inner: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a strategy that takes plain steps of SGD only, which are not clipped."""
    return {"lr": _own_rate(inner, 0.1), **_unclipped(inner)}


def _unclipped(inner: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a strategy that does not clip gradients."""
    return {name: x for name, x in inner.items() if name != "max_norm"}


def _fednova(knobs: Knobs, **inner: Any) -> Strategy:
    """Make FedNova, whose nodes have SGD with a momentum."""
    spec = OptimSpec("sgd", lr=_own_rate(inner, 0.1), momentum=0.5)
    return FedNovaStrategy(spec, knobs.H, server_momentum=0.5, **inner)


def _own_rate(inner: dict[str, Any], usual: float) -> Any:
    """Remove inner optimizer and learning rate from the arguments; return the rate, for the strategy's optimizer."""
    spec, lr = inner.pop("inner_optim", None), inner.pop("lr", None)
    return (spec.lr if isinstance(spec, OptimSpec) else usual) if lr is None else lr


def _streaming(knobs: Knobs, **more: Any) -> Strategy:
    delay = min(knobs.delay, knobs.H - 1)
    return StreamingDiLoCoStrategy(num_fragments=knobs.fragments, delay=delay, **knobs.rounds, **more)


def _sparseloco(knobs: Knobs, **inner: Any) -> Strategy:
    """Make SparseLoCo with a fraction p of each chunk of 8 x 8, which fits small models."""
    return SparseLoCoStrategy(H=knobs.H, k=max(1, round(64 * knobs.p)), chunk=8, **inner)


CATALOGUE: dict[str, Item] = {
    "independent": Item(lambda knobs, **inner: Strategy(**inner)),
    "allreduce": Item(lambda knobs, **inner: AllReduceStrategy(**inner), compared=True),
    "gpa": Item(lambda knobs, **inner: GPAStrategy(mu_x=0.9 ** (1 / knobs.H), **inner), compared=True),
    "fedavg": Item(lambda knobs, **inner: FedAvgStrategy(H=knobs.H, **inner), compared=True),
    "fedavg-islands": Item(lambda knobs, **inner: FedAvgStrategy(H=knobs.H, island_size=2, **inner)),
    "fedavg-participation": Item(lambda knobs, **inner: FedAvgStrategy(H=knobs.H, participation=0.6, **inner)),
    "fedavg-server": Item(
        lambda knobs, **inner: FedAvgStrategy(
            H=knobs.H, server_optim="adam", server_lr=0.05, server_betas=(0.8, 0.9), server_tau=0.01, **inner
        )
    ),
    "scaffold": Item(lambda knobs, **inner: SCAFFOLDStrategy(H=knobs.H, **_plain(inner))),
    "mime": Item(lambda knobs, **inner: MimeStrategy(H=knobs.H, **_unclipped(inner))),
    "fednova": Item(_fednova),
    "feddyn": Item(lambda knobs, **inner: FedDynStrategy(H=knobs.H, alpha=0.3, **inner)),
    # It has SGD inside, and rounds of H steps in the mean.
    "scaffnew": Item(lambda knobs, **inner: ScaffnewStrategy(p=1 / knobs.H, lr=_own_rate(inner, 0.1), **inner)),
    "local-adam": Item(lambda knobs, **inner: LocalAdamStrategy(H=knobs.H, **inner)),
    "des-loc": Item(lambda knobs, **inner: DESLOCStrategy(H=knobs.H, Hu=knobs.H + 1, Hv=knobs.H + 2, **inner)),
    "diloco": Item(lambda knobs, **inner: DiLoCoStrategy(**knobs.rounds, **inner), compared=True),
    "streaming": Item(_streaming),
    "streaming-4-bits": Item(lambda knobs, **inner: _streaming(knobs, bits=4, **inner)),
    "eager": Item(lambda knobs, **inner: EagerDiLoCoStrategy(**knobs.rounds, **inner)),
    "edit": Item(_edit, compared=True),
    "diloco-topk": Item(lambda knobs, **inner: DiLoCoStrategy(compression=TopK(knobs.p), **knobs.rounds, **inner)),
    "sparseloco": Item(_sparseloco),
    "muloco": Item(_muloco, compared=True),
    "palsgd": Item(lambda knobs, **inner: PALSGDStrategy(p=0.3, **knobs.rounds, **inner), compared=True),
    "dsm": Item(lambda knobs, **inner: DSMStrategy(H=knobs.H, **inner)),
    "noloco": Item(lambda knobs, **inner: NoLoCoStrategy(H=knobs.H, **inner), compared=True),
    "sparta": Item(lambda knobs, **inner: SPARTAStrategy(knobs.p, **inner), compared=True),
    "loscar": Item(lambda knobs, **inner: SPARTAStrategy(knobs.p, delay=2, correct_delay=True, **inner)),
    "sparta-diloco": Item(lambda knobs, **inner: SPARTADiLoCoStrategy(knobs.p, **knobs.rounds, **inner), compared=True),
    "gossip": Item(lambda knobs, **inner: GossipStrategy("ring", **inner), compared=True),
    "gossip-matching": Item(lambda knobs, **inner: GossipStrategy("random_matching", **inner)),
    "gradient-tracking": Item(lambda knobs, **inner: GradientTrackingStrategy("ring", **inner), compared=True),
    "d2": Item(lambda knobs, **inner: D2Strategy("complete", **inner)),  # with rings of an even number it diverges
    "exact-diffusion": Item(lambda knobs, **inner: ExactDiffusionStrategy("ring", **inner), compared=True),
    "qgm": Item(lambda knobs, **inner: QGMStrategy("ring", lr=_own_rate(inner, 0.1), **inner)),  # SGD is inside
    "sgp": Item(lambda knobs, **inner: SGPStrategy(**inner), compared=True),
    "choco": Item(lambda knobs, **inner: CHOCOStrategy("ring", codec=TopK(knobs.p), consensus=0.4, **inner)),
    "relaysum": Item(lambda knobs, **inner: RelaySumStrategy("binary_tree", **inner), compared=True),
    "matcha": Item(lambda knobs, **inner: MATCHAStrategy("ring", **inner)),
    # It has its own optimizer: its steps are signs, and a sixth of AdamW's learning rate suits them.
    "demo": Item(lambda knobs, **inner: DeMoStrategy(lr=_own_rate(inner, 6e-3) / 6, **inner), compared=True),
}
