"""The strategies by name: how each is made, and what is known about it.

`vecgym verify`, `vecgym compare` and `vecgym info`, the tests of every strategy's properties and equivalence, and the
benchmarks take their strategies from here: a new one is its file, its naive twin in `tests/reference`, and a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vecgym.compress import TopK
from vecgym.optim import OptimSpec
from vecgym.strategy import payloads
from vecgym.strategy.allreduce import AllReduceStrategy
from vecgym.strategy.base import Strategy
from vecgym.strategy.demo import DeMoStrategy
from vecgym.strategy.diloco import DiLoCoStrategy
from vecgym.strategy.eager import EagerDiLoCoStrategy
from vecgym.strategy.fedavg import FedAvgStrategy
from vecgym.strategy.gossip import GossipStrategy
from vecgym.strategy.gpa import GPAStrategy
from vecgym.strategy.local_adam import DESLOCStrategy, LocalAdamStrategy
from vecgym.strategy.muloco import MuLoCoStrategy
from vecgym.strategy.noloco import NoLoCoStrategy
from vecgym.strategy.palsgd import PALSGDStrategy
from vecgym.strategy.payloads import Knobs, Sent
from vecgym.strategy.sparseloco import SparseLoCoStrategy
from vecgym.strategy.sparta import SPARTADiLoCoStrategy, SPARTAStrategy
from vecgym.strategy.streaming import StreamingDiLoCoStrategy


@dataclass(frozen=True)
class Row:
    """A strategy, and what is known about it.

    Attributes:
        build: how it is made.
        twin: the file in `tests/reference` that does the same in plain loops.
        about: one line on what the nodes exchange.
        sends: the bytes that a node's link sends in a run, on average.
        alone: what happens to a single node after every H steps: "nothing" (plain training), "nesterov" (an outer step
            of SGD with Nesterov momentum), "heavy ball", "server adam"; None where what it exchanges with itself is
            late or lossy.
        averages: nodes with identical shards stay identical, and do what one node alone does.
        server: each participant sends to a server, even if there is only one.
        replicated: the parameters stay the same on every node.
        per_node: parts of the strategy's state that each node has its own of.
        needs_moments: the inner optimizer must keep some, as AdamW does.
        even: the number of nodes must be.
        compared: `vecgym compare` offers it.
    """

    build: Callable[[Knobs], Strategy]
    twin: str
    about: str
    sends: Callable[[Sent], float]
    alone: str | None = "nothing"
    averages: bool = True
    server: bool = False
    replicated: bool = False
    per_node: tuple[str, ...] = ()
    needs_moments: bool = False
    even: bool = False
    compared: bool = False

    def make(self, H: int = 3, p: float = 0.1, outer_optim: OptimSpec | None = None, **inner: Any) -> Strategy:
        """Make the strategy with those of these settings that it has; see `Knobs`.

        >>> CATALOGUE["fedavg"].make(H=5, p=0.01, inner_optim="sgd", lr=0.1)
        FedAvgStrategy(OptimSpec(SGD, lr=0.1), AveragingCommunicator(island_size=None, H=5, participation=1.0, \
weighting='equal'))
        """
        return self.build(Knobs(H, p, outer_optim, inner))


def _demo(knobs: Knobs) -> Strategy:
    """Make DeMo, an optimizer of its own: its steps are signs, and a sixth of AdamW's learning rate suits them."""
    inner = dict(knobs.inner)
    spec = inner.pop("inner_optim", None)
    lr = inner.pop("lr", None)
    lr = (spec.lr if isinstance(spec, OptimSpec) else 6e-3) if lr is None else lr
    return DeMoStrategy(lr=lr / 6, **inner)


def _muloco(knobs: Knobs) -> Strategy:
    """Make MuLoCo, whose inner optimizers are its own; both take the learning rate that is given."""
    inner = dict(knobs.inner)
    spec = inner.pop("inner_optim", None)
    lr = inner.pop("lr", None)
    lr = (spec.lr if isinstance(spec, OptimSpec) else 0.02) if lr is None else lr
    return MuLoCoStrategy(knobs.outer_optim, H=knobs.H, lr=lr, adamw_lr=lr, **inner)


def _streaming(knobs: Knobs, **more: Any) -> Strategy:
    return StreamingDiLoCoStrategy(
        H=knobs.H, outer_optim=knobs.outer_optim, num_fragments=2, delay=min(1, knobs.H - 1),
        **more, **knobs.inner,
    )  # fmt: skip


def _sparseloco(knobs: Knobs) -> Strategy:
    """Make SparseLoCo with a fraction p of each chunk of 8 x 8, which small models have too."""
    return SparseLoCoStrategy(H=knobs.H, k=max(1, round(64 * knobs.p)), chunk=8, **knobs.inner)


CATALOGUE: dict[str, Row] = {
    "independent": Row(
        lambda knobs: Strategy(**knobs.inner),
        twin="fedavg",
        about="nothing: every node trains by itself",
        sends=lambda sent: 0.0,
    ),
    "allreduce": Row(
        lambda knobs: AllReduceStrategy(**knobs.inner),
        twin="allreduce",
        about="the mean gradient, every step",
        sends=lambda sent: sent.steps * sent.ring() * sent.model_bytes,
        replicated=True,
        compared=True,
    ),
    "gpa": Row(
        lambda knobs: GPAStrategy(mu_x=0.9 ** (1 / knobs.H), **knobs.inner),
        twin="gpa",
        about="the mean gradient, every step, at a point near a slow average of the parameters",
        sends=lambda sent: sent.steps * sent.ring() * sent.model_bytes,
        alone=None,
        replicated=True,
        compared=True,
    ),
    "fedavg": Row(
        lambda knobs: FedAvgStrategy(H=knobs.H, **knobs.inner),
        twin="fedavg",
        about="the mean of the parameters, every H steps",
        sends=payloads.rounds,
        compared=True,
    ),
    "fedavg-islands": Row(
        lambda knobs: FedAvgStrategy(H=knobs.H, island_size=2, **knobs.inner),
        twin="fedavg",
        about="the mean of the parameters over random pairs of nodes, every H steps",
        sends=payloads.islands_of_two,
    ),
    "fedavg-participation": Row(
        lambda knobs: FedAvgStrategy(H=knobs.H, participation=0.6, **knobs.inner),
        twin="fedavg",
        about="the mean of the parameters of a sample of the nodes, at a server, every H steps",
        sends=payloads.participants,
        averages=False,
        server=True,
    ),
    "fedavg-server": Row(
        lambda knobs: FedAvgStrategy(
            H=knobs.H, server_optim="adam", server_lr=0.05, server_betas=(0.8, 0.9), server_tau=0.01, **knobs.inner
        ),
        twin="fedavg",
        about="a step of a server's Adam on the mean movement, every H steps",
        sends=lambda sent: sent.rounds * sent.model_bytes,
        alone="server adam",
        server=True,
    ),
    "local-adam": Row(
        lambda knobs: LocalAdamStrategy(H=knobs.H, **knobs.inner),
        twin="local_adam",
        about="the mean of the parameters and of the optimizer's moments, every H steps",
        sends=lambda sent: 3 * payloads.rounds(sent),  # Adam's
        needs_moments=True,
    ),
    "des-loc": Row(
        lambda knobs: DESLOCStrategy(H=knobs.H, **payloads.des_loc_periods(knobs.H), **knobs.inner),
        twin="local_adam",
        about="the mean of the parameters, every H steps, and of each moment at a period of its own",
        sends=payloads.desynced,
        needs_moments=True,
    ),
    "diloco": Row(
        lambda knobs: DiLoCoStrategy(H=knobs.H, outer_optim=knobs.outer_optim, **knobs.inner),
        twin="diloco",
        about="a step of an outer optimizer on the mean movement, every H steps",
        sends=payloads.rounds,
        alone="nesterov",
        compared=True,
    ),
    "streaming": Row(
        _streaming,
        twin="streaming",
        about="DiLoCo's outer step for a fragment of the model at a time, every H steps, one step late",
        sends=lambda sent: sent.ring() * payloads.fragments(sent, lambda x: x.numel() * x.element_size()),
        alone=None,
    ),
    "streaming-4-bits": Row(
        lambda knobs: _streaming(knobs, bits=4),
        twin="streaming",
        about="the same with movements in four bits, every H steps",
        sends=lambda sent: sent.others * payloads.fragments(sent, lambda x: -(-x.numel() // 2) + 4),
        alone=None,
    ),
    "eager": Row(
        lambda knobs: EagerDiLoCoStrategy(H=knobs.H, outer_optim=knobs.outer_optim, **knobs.inner),
        twin="eager",
        about="the mean movement, every H steps, used a round late; a node's own at once",
        sends=payloads.rounds,
        alone="nesterov",
        averages=False,  # of several nodes, what one does is used in part a round later
        per_node=("params", "momentum", "others"),
    ),
    "diloco-topk": Row(
        lambda knobs: DiLoCoStrategy(
            H=knobs.H, outer_optim=knobs.outer_optim, compression=TopK(knobs.p), **knobs.inner
        ),
        twin="compression",
        about="a step of an outer optimizer on the largest movements, with error feedback, every H steps",
        sends=payloads.strongest,
        alone=None,
        per_node=("residual",),
    ),
    "sparseloco": Row(
        _sparseloco,
        twin="sparseloco",
        about="the largest movements of each chunk in two bits, with error feedback, every H steps",
        sends=payloads.packed,
        alone=None,
        per_node=("residual",),
    ),
    "muloco": Row(
        _muloco,
        twin="muloco",
        about="DiLoCo with Muon: a step of an outer optimizer on the mean movement, every H steps",
        sends=payloads.rounds,
        alone=None,
        compared=True,
    ),
    "palsgd": Row(
        lambda knobs: PALSGDStrategy(p=0.3, H=knobs.H, outer_optim=knobs.outer_optim, **knobs.inner),
        twin="palsgd",
        about="DiLoCo with random steps towards the outer parameters; an outer step every H steps",
        sends=payloads.rounds,
        alone=None,
        averages=False,
        compared=True,
    ),
    "noloco": Row(
        lambda knobs: NoLoCoStrategy(H=knobs.H, **knobs.inner),
        twin="noloco",
        about="an outer step with a random partner, every H steps",
        sends=lambda sent: 2 * payloads.islands_of_two(sent),
        alone="heavy ball",
        per_node=("params", "momentum"),
        compared=True,
    ),
    "sparta": Row(
        lambda knobs: SPARTAStrategy(knobs.p, **knobs.inner),
        twin="sparta",
        about="the mean of a random fraction p of the parameters, every step",
        sends=payloads.drawn,
        compared=True,
    ),
    "loscar": Row(
        lambda knobs: SPARTAStrategy(knobs.p, delay=2, correct_delay=True, **knobs.inner),
        twin="sparta",
        about="SPARTA's mean two steps late, with what each node has moved since",
        sends=payloads.drawn,
        per_node=("mean",),
    ),
    "sparta-diloco": Row(
        lambda knobs: SPARTADiLoCoStrategy(knobs.p, 1, knobs.H, outer_optim=knobs.outer_optim, **knobs.inner),
        twin="sparta_diloco",
        about="SPARTA at every step, and DiLoCo's outer step every H",
        sends=lambda sent: payloads.drawn(sent) + payloads.rounds(sent),
        alone="nesterov",
        compared=True,
    ),
    "gossip": Row(
        lambda knobs: GossipStrategy("ring", **knobs.inner),
        twin="gossip",
        about="the mean with both neighbours in a ring, every step",
        sends=lambda sent: sent.steps * 2.0 * sent.model_bytes,
        compared=True,
    ),
    "gossip-matching": Row(
        lambda knobs: GossipStrategy("random_matching", **knobs.inner),
        twin="gossip",
        about="the mean of random pairs of nodes, every step",
        sends=lambda sent: sent.steps * sent.model_bytes,
        even=True,
    ),
    "demo": Row(
        _demo,
        twin="demo",
        about="the strongest cosine components of a local momentum; the sign of their mean is the update",
        sends=payloads.pairs,
        alone=None,
        replicated=True,
        per_node=("residual",),
        compared=True,
    ),
}
