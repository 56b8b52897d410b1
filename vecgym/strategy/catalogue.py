"""The strategies by name: how each is made, and what is known about it.

`vecgym verify`, `vecgym compare` and `vecgym info`, the tests of every strategy's properties and equivalence, and the
benchmarks take their strategies from here: a new one is its file, its naive twin in `tests/reference`, and a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from vecgym.collectives import StackedCollectives
from vecgym.compress import TopK, grid
from vecgym.compress.packing import bits_for
from vecgym.optim import OptimSpec
from vecgym.strategy.allreduce import AllReduceStrategy
from vecgym.strategy.base import Context, Strategy
from vecgym.strategy.demo import DeMoStrategy
from vecgym.strategy.diloco import DiLoCoStrategy
from vecgym.strategy.eager import EagerDiLoCoStrategy
from vecgym.strategy.fedavg import FedAvgStrategy
from vecgym.strategy.fragments import cut
from vecgym.strategy.gossip import GossipStrategy
from vecgym.strategy.gpa import GPAStrategy
from vecgym.strategy.local_adam import DESLOCStrategy, LocalAdamStrategy
from vecgym.strategy.muloco import MuLoCoStrategy
from vecgym.strategy.noloco import NoLoCoStrategy
from vecgym.strategy.palsgd import PALSGDStrategy
from vecgym.strategy.selectors import RandomSelector
from vecgym.strategy.sparseloco import SparseLoCoStrategy
from vecgym.strategy.sparta import SPARTADiLoCoStrategy, SPARTAStrategy
from vecgym.strategy.streaming import StreamingDiLoCoStrategy, first_offsets


class Knobs(NamedTuple):
    """What strategies are made with, each as far as it has it.

    Attributes:
        H: optimizer steps between two exchanges.
        p: the fraction of the coordinates that is exchanged.
        outer_optim: DiLoCo's; None: its default.
        inner: the arguments that all strategies share (`inner_optim`, `lr`, `max_norm`, ...).
    """

    H: int = 3
    p: float = 0.1
    outer_optim: OptimSpec | None = None
    inner: Mapping[str, Any] = {}


class Sent(NamedTuple):
    """What the bytes of a run depend on: `params` are a node's trainable parameters, `[*]`."""

    params: Mapping[str, Tensor]
    num_nodes: int
    steps: int
    knobs: Knobs = Knobs()
    seed: int = 42

    @property
    def model_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.params.values())

    @property
    def rounds(self) -> int:
        return self.steps // self.knobs.H

    def ring(self, *sizes: int) -> float:
        """Return the payloads that a node sends, on average, when rings of these sizes, or one of all, reduce one.

        >>> Sent({}, num_nodes=4, steps=1).ring(), Sent({}, num_nodes=5, steps=1).ring(2, 2, 1)
        (1.5, 0.8)
        """
        return sum(2 * (n - 1) for n in sizes or (self.num_nodes,)) / self.num_nodes


@dataclass(frozen=True)
class Row:
    """A strategy, and what is known about it.

    Attributes:
        build: how it is made.
        twin: the file in `tests/reference` that does the same in plain loops.
        about: one line on what the nodes exchange.
        sends: the bytes that a node sends, on average, in a run.
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


def _des_loc_periods(H: int) -> dict[str, Any]:
    """Choose periods that are apart and still short: the default ones are 3 and 6 H."""
    return {"Hu": H + 1, "Hv": H + 2}


def _islands_of_two(sent: Sent) -> float:
    whole, rest = divmod(sent.num_nodes, 2)
    return sent.rounds * sent.ring(*[2] * whole, *[1] * rest) * sent.model_bytes


def _participants(sent: Sent) -> float:
    return sent.rounds * round(0.6 * sent.num_nodes) / sent.num_nodes * sent.model_bytes


def _strongest(sent: Sent) -> float:
    """Return the bytes of the largest part of every tensor: values and indices."""
    sizes = [(max(1, round(sent.knobs.p * x.numel())), x.element_size()) for x in sent.params.values()]
    return sent.rounds * sum(count * (size + 4) for count, size in sizes)


def _drawn(sent: Sent) -> float:
    """Return the bytes of SPARTA's random coordinates, which the seed draws anew in every exchange."""
    shapes = {name: x.shape for name, x in sent.params.items()}
    selector, comm, total = RandomSelector(sent.knobs.p), StackedCollectives(sent.num_nodes), 0
    for step in range(sent.steps):
        indices, _ = selector.select(shapes, {}, step, Context(comm, step=step, seed=sent.seed))
        total += sum(len(index) * sent.params[name].element_size() for name, index in indices.items())
    return sent.ring() * total


def _rounds(sent: Sent) -> float:
    return sent.rounds * sent.ring() * sent.model_bytes


def _desynced(sent: Sent) -> float:
    exchanges = sent.rounds + sum(sent.steps // period for period in _des_loc_periods(sent.knobs.H).values())
    return exchanges * sent.ring() * sent.model_bytes


def _streaming(knobs: Knobs, **more: Any) -> Strategy:
    return StreamingDiLoCoStrategy(
        H=knobs.H, outer_optim=knobs.outer_optim, num_fragments=2, delay=min(1, knobs.H - 1),
        **more, **knobs.inner,
    )  # fmt: skip


def _fragments(sent: Sent, payload: Callable[[Tensor], float]) -> float:
    """Return the bytes of two fragments in turn; `payload` are those of one tensor."""
    H, total = sent.knobs.H, 0.0
    parts = cut(list(sent.params), 2)
    for names, first in zip(parts, first_offsets(H, len(parts))):
        times = max(0, (sent.steps - first) // H + 1)
        total += times * sum(payload(sent.params[name]) for name in names)
    return total


def _pairs(sent: Sent) -> float:
    """Return the bytes of 32 values and 8-byte indices of each chunk of 64 x 64, or of all where it is smaller."""
    cuts = [(grid(tuple(x.shape), 64), x.element_size()) for x in sent.params.values()]
    return sent.steps * sum(cut.chunks * min(32, cut.area) * (8 + size) for cut, size in cuts)


def _sparseloco(knobs: Knobs) -> Strategy:
    """Make SparseLoCo with a fraction p of each chunk of 8 x 8, which small models have too."""
    return SparseLoCoStrategy(H=knobs.H, k=max(1, round(64 * knobs.p)), chunk=8, **knobs.inner)


def _packed(sent: Sent) -> float:
    """Return the bytes of values of two bits, of their places, in as few bits as a chunk needs, and of four bins."""
    total = 0
    for x in sent.params.values():
        cut = grid(tuple(x.shape), 8 if x.dim() > 1 else 64)
        count = cut.chunks * min(max(1, round(64 * sent.knobs.p)), cut.area)
        total += -(-count * 2 // 8) + 16 + -(-count * bits_for(cut.area) // 8)
    return float(sent.rounds * total)


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
        sends=_rounds,
        compared=True,
    ),
    "fedavg-islands": Row(
        lambda knobs: FedAvgStrategy(H=knobs.H, island_size=2, **knobs.inner),
        twin="fedavg",
        about="the mean of the parameters over random pairs of nodes, every H steps",
        sends=_islands_of_two,
    ),
    "fedavg-participation": Row(
        lambda knobs: FedAvgStrategy(H=knobs.H, participation=0.6, **knobs.inner),
        twin="fedavg",
        about="the mean of the parameters of a sample of the nodes, at a server, every H steps",
        sends=_participants,
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
        sends=lambda sent: 3 * _rounds(sent),  # Adam's
        needs_moments=True,
    ),
    "des-loc": Row(
        lambda knobs: DESLOCStrategy(H=knobs.H, **_des_loc_periods(knobs.H), **knobs.inner),
        twin="local_adam",
        about="the mean of the parameters, every H steps, and of each moment at a period of its own",
        sends=_desynced,
        needs_moments=True,
    ),
    "diloco": Row(
        lambda knobs: DiLoCoStrategy(H=knobs.H, outer_optim=knobs.outer_optim, **knobs.inner),
        twin="diloco",
        about="a step of an outer optimizer on the mean movement, every H steps",
        sends=_rounds,
        alone="nesterov",
        compared=True,
    ),
    "streaming": Row(
        _streaming,
        twin="streaming",
        about="DiLoCo's outer step for a fragment of the model at a time, every H steps, one step late",
        sends=lambda sent: sent.ring() * _fragments(sent, lambda x: x.numel() * x.element_size()),
        alone=None,
    ),
    "streaming-4-bits": Row(
        lambda knobs: _streaming(knobs, bits=4),
        twin="streaming",
        about="the same with movements in four bits, every H steps",
        sends=lambda sent: _fragments(sent, lambda x: -(-x.numel() // 2) + 4),
        alone=None,
    ),
    "eager": Row(
        lambda knobs: EagerDiLoCoStrategy(H=knobs.H, outer_optim=knobs.outer_optim, **knobs.inner),
        twin="eager",
        about="the mean movement, every H steps, used a round late; a node's own at once",
        sends=_rounds,
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
        sends=_strongest,
        alone=None,
        per_node=("residual",),
    ),
    "sparseloco": Row(
        _sparseloco,
        twin="sparseloco",
        about="the largest movements of each chunk in two bits, with error feedback, every H steps",
        sends=_packed,
        alone=None,
        per_node=("residual",),
    ),
    "muloco": Row(
        _muloco,
        twin="muloco",
        about="DiLoCo with Muon: a step of an outer optimizer on the mean movement, every H steps",
        sends=_rounds,
        alone=None,
        compared=True,
    ),
    "palsgd": Row(
        lambda knobs: PALSGDStrategy(p=0.3, H=knobs.H, outer_optim=knobs.outer_optim, **knobs.inner),
        twin="palsgd",
        about="DiLoCo with random steps towards the outer parameters; an outer step every H steps",
        sends=_rounds,
        alone=None,
        averages=False,
        compared=True,
    ),
    "noloco": Row(
        lambda knobs: NoLoCoStrategy(H=knobs.H, **knobs.inner),
        twin="noloco",
        about="an outer step with a random partner, every H steps",
        sends=lambda sent: 2 * _islands_of_two(sent),
        alone="heavy ball",
        per_node=("params", "momentum"),
        compared=True,
    ),
    "sparta": Row(
        lambda knobs: SPARTAStrategy(knobs.p, **knobs.inner),
        twin="sparta",
        about="the mean of a random fraction p of the parameters, every step",
        sends=_drawn,
        compared=True,
    ),
    "loscar": Row(
        lambda knobs: SPARTAStrategy(knobs.p, delay=2, correct_delay=True, **knobs.inner),
        twin="sparta",
        about="SPARTA's mean two steps late, with what each node has moved since",
        sends=_drawn,
        per_node=("mean",),
    ),
    "sparta-diloco": Row(
        lambda knobs: SPARTADiLoCoStrategy(knobs.p, 1, knobs.H, outer_optim=knobs.outer_optim, **knobs.inner),
        twin="sparta_diloco",
        about="SPARTA at every step, and DiLoCo's outer step every H",
        sends=lambda sent: _drawn(sent) + _rounds(sent),
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
        sends=_pairs,
        alone=None,
        replicated=True,
        per_node=("residual",),
        compared=True,
    ),
}
