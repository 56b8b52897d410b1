"""The strategies by name, and how each is made.

`vecgym verify` and `vecgym compare`, the tests of every strategy's properties and equivalence, and the benchmarks take
their strategies from here: a new one is its class, its naive twin in `tests/reference`, a row here, and a card in
`tests/cards.py` of what is known about it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vecgym.compress import TopK
from vecgym.optim import OptimSpec
from vecgym.strategy.allreduce import AllReduceStrategy, GPAStrategy
from vecgym.strategy.base import Strategy
from vecgym.strategy.demo import DeMoStrategy
from vecgym.strategy.diloco import (
    DESLOCStrategy,
    DiLoCoStrategy,
    EagerDiLoCoStrategy,
    LocalAdamStrategy,
    MuLoCoStrategy,
    NoLoCoStrategy,
    PALSGDStrategy,
    SparseLoCoStrategy,
    StreamingDiLoCoStrategy,
)
from vecgym.strategy.federated_averaging import FedAvgStrategy
from vecgym.strategy.gossip import GossipStrategy
from vecgym.strategy.sparta import SPARTADiLoCoStrategy, SPARTAStrategy


class Knobs(NamedTuple):
    """What strategies are made with, each as far as it has it.

    Attributes:
        H: optimizer steps between two exchanges.
        p: the fraction of the coordinates that is exchanged.
        outer_optim: DiLoCo's; None: its default.
        delay: steps that a fragment of Streaming DiLoCo may take, less than H.
        fragments: of Streaming DiLoCo; None: its default.
        inner: the arguments that all strategies share (`inner_optim`, `lr`, `max_norm`, ...).
    """

    H: int = 3
    p: float = 0.1
    outer_optim: OptimSpec | None = None
    delay: int = 1
    fragments: int | None = 2
    inner: Mapping[str, Any] = {}


class Item(NamedTuple):
    """A strategy.

    Attributes:
        build: how it is made.
        compared: `vecgym compare` offers it.
    """

    build: Callable[[Knobs], Strategy]
    compared: bool = False

    def make(
        self, H: int = 3, p: float = 0.1, outer_optim: OptimSpec | None = None, delay: int = 1,
        fragments: int | None = 2, **inner: Any,
    ) -> Strategy:  # fmt: skip
        """Make the strategy with those of these settings that it has; see `Knobs`.

        >>> CATALOGUE["fedavg"].make(H=5, p=0.01, inner_optim="sgd", lr=0.1)
        FedAvgStrategy(OptimSpec(SGD, lr=0.1), Exchange(Mean(), every=5))
        """
        return self.build(Knobs(H, p, outer_optim, delay, fragments, inner))


def _demo(knobs: Knobs) -> Strategy:
    """Make DeMo, an optimizer of its own: its steps are signs, and a sixth of AdamW's learning rate suits them."""
    lr, inner = _own_rate(knobs, 6e-3)
    return DeMoStrategy(lr=lr / 6, **inner)


def _muloco(knobs: Knobs) -> Strategy:
    """Make MuLoCo, whose inner optimizers are its own; both take the learning rate that is given."""
    lr, inner = _own_rate(knobs, 0.02)
    return MuLoCoStrategy(knobs.outer_optim, H=knobs.H, lr=lr, adamw_lr=lr, **inner)


def _own_rate(knobs: Knobs, usual: float) -> tuple[Any, dict[str, Any]]:
    """Return the learning rate of a strategy with an inner optimizer of its own, and what else is given."""
    inner = dict(knobs.inner)
    spec, lr = inner.pop("inner_optim", None), inner.pop("lr", None)
    return (spec.lr if isinstance(spec, OptimSpec) else usual) if lr is None else lr, inner


def _streaming(knobs: Knobs, **more: Any) -> Strategy:
    return StreamingDiLoCoStrategy(
        H=knobs.H, outer_optim=knobs.outer_optim, num_fragments=knobs.fragments, delay=min(knobs.delay, knobs.H - 1),
        **more, **knobs.inner,
    )  # fmt: skip


def _sparseloco(knobs: Knobs) -> Strategy:
    """Make SparseLoCo with a fraction p of each chunk of 8 x 8, which small models have too."""
    return SparseLoCoStrategy(H=knobs.H, k=max(1, round(64 * knobs.p)), chunk=8, **knobs.inner)


CATALOGUE: dict[str, Item] = {
    "independent": Item(lambda knobs: Strategy(**knobs.inner)),
    "allreduce": Item(lambda knobs: AllReduceStrategy(**knobs.inner), compared=True),
    "gpa": Item(lambda knobs: GPAStrategy(mu_x=0.9 ** (1 / knobs.H), **knobs.inner), compared=True),
    "fedavg": Item(lambda knobs: FedAvgStrategy(H=knobs.H, **knobs.inner), compared=True),
    "fedavg-islands": Item(lambda knobs: FedAvgStrategy(H=knobs.H, island_size=2, **knobs.inner)),
    "fedavg-participation": Item(lambda knobs: FedAvgStrategy(H=knobs.H, participation=0.6, **knobs.inner)),
    "fedavg-server": Item(
        lambda knobs: FedAvgStrategy(
            H=knobs.H, server_optim="adam", server_lr=0.05, server_betas=(0.8, 0.9), server_tau=0.01, **knobs.inner
        )
    ),
    "local-adam": Item(lambda knobs: LocalAdamStrategy(H=knobs.H, **knobs.inner)),
    "des-loc": Item(lambda knobs: DESLOCStrategy(H=knobs.H, Hu=knobs.H + 1, Hv=knobs.H + 2, **knobs.inner)),
    "diloco": Item(
        lambda knobs: DiLoCoStrategy(H=knobs.H, outer_optim=knobs.outer_optim, **knobs.inner), compared=True
    ),
    "streaming": Item(_streaming),
    "streaming-4-bits": Item(lambda knobs: _streaming(knobs, bits=4)),
    "eager": Item(lambda knobs: EagerDiLoCoStrategy(H=knobs.H, outer_optim=knobs.outer_optim, **knobs.inner)),
    "diloco-topk": Item(
        lambda knobs: DiLoCoStrategy(H=knobs.H, outer_optim=knobs.outer_optim, compression=TopK(knobs.p), **knobs.inner)
    ),
    "sparseloco": Item(_sparseloco),
    "muloco": Item(_muloco, compared=True),
    "palsgd": Item(
        lambda knobs: PALSGDStrategy(p=0.3, H=knobs.H, outer_optim=knobs.outer_optim, **knobs.inner), compared=True
    ),
    "noloco": Item(lambda knobs: NoLoCoStrategy(H=knobs.H, **knobs.inner), compared=True),
    "sparta": Item(lambda knobs: SPARTAStrategy(knobs.p, **knobs.inner), compared=True),
    "loscar": Item(lambda knobs: SPARTAStrategy(knobs.p, delay=2, correct_delay=True, **knobs.inner)),
    "sparta-diloco": Item(
        lambda knobs: SPARTADiLoCoStrategy(knobs.p, 1, knobs.H, outer_optim=knobs.outer_optim, **knobs.inner),
        compared=True,
    ),
    "gossip": Item(lambda knobs: GossipStrategy("ring", **knobs.inner), compared=True),
    "gossip-matching": Item(lambda knobs: GossipStrategy("random_matching", **knobs.inner)),
    "demo": Item(_demo, compared=True),
}
