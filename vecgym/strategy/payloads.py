"""The bytes that a node's link sends in a run, by closed forms; see `vecgym.strategy.catalogue`.

A mean goes through a ring, codes through an all-gather, which takes them once to each of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from vecgym.collectives import StackedCollectives
from vecgym.compress.dct import grid
from vecgym.compress.packing import bits_for
from vecgym.optim import OptimSpec
from vecgym.strategy.base import Context
from vecgym.strategy.fragments import cut
from vecgym.strategy.selectors import RandomSelector
from vecgym.strategy.streaming import first_offsets


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

    @property
    def others(self) -> int:
        return self.num_nodes - 1

    def ring(self, *sizes: int) -> float:
        """Return the payloads that a node sends, on average, when rings of these sizes, or one of all, reduce one.

        >>> Sent({}, num_nodes=4, steps=1).ring(), Sent({}, num_nodes=5, steps=1).ring(2, 2, 1)
        (1.5, 0.8)
        """
        return sum(2 * (n - 1) for n in sizes or (self.num_nodes,)) / self.num_nodes


def islands_of_two(sent: Sent) -> float:
    whole, rest = divmod(sent.num_nodes, 2)
    return sent.rounds * sent.ring(*[2] * whole, *[1] * rest) * sent.model_bytes


def participants(sent: Sent) -> float:
    return sent.rounds * round(0.6 * sent.num_nodes) / sent.num_nodes * sent.model_bytes


def strongest(sent: Sent) -> float:
    """Return the bytes of the largest part of every tensor: values and indices."""
    sizes = [(max(1, round(sent.knobs.p * x.numel())), x.element_size()) for x in sent.params.values()]
    return sent.others * sent.rounds * sum(count * (size + 4) for count, size in sizes)


def drawn(sent: Sent) -> float:
    """Return the bytes of SPARTA's random coordinates, which the seed draws anew in every exchange."""
    shapes = {name: x.shape for name, x in sent.params.items()}
    selector, comm, total = RandomSelector(sent.knobs.p), StackedCollectives(sent.num_nodes), 0
    for step in range(sent.steps):
        indices, _ = selector.select(shapes, {}, step, Context(comm, step=step, seed=sent.seed))
        total += sum(len(index) * sent.params[name].element_size() for name, index in indices.items())
    return sent.ring() * total


def rounds(sent: Sent) -> float:
    return sent.rounds * sent.ring() * sent.model_bytes


def des_loc_periods(H: int) -> dict[str, Any]:
    """Choose periods that are apart and still short: the default ones are 3 and 6 H."""
    return {"Hu": H + 1, "Hv": H + 2}


def desynced(sent: Sent) -> float:
    exchanges = sent.rounds + sum(sent.steps // period for period in des_loc_periods(sent.knobs.H).values())
    return exchanges * sent.ring() * sent.model_bytes


def fragments(sent: Sent, payload: Callable[[Tensor], float]) -> float:
    """Return the bytes of two fragments in turn; `payload` are those of one tensor."""
    H, total = sent.knobs.H, 0.0
    parts = cut(list(sent.params), 2)
    for names, first in zip(parts, first_offsets(H, len(parts))):
        times = max(0, (sent.steps - first) // H + 1)
        total += times * sum(payload(sent.params[name]) for name in names)
    return total


def pairs(sent: Sent) -> float:
    """Return the bytes of 32 values and 8-byte indices of each chunk of 64 x 64, or of all where it is smaller."""
    cuts = [(grid(tuple(x.shape), 64), x.element_size()) for x in sent.params.values()]
    return sent.others * sent.steps * sum(cut.chunks * min(32, cut.area) * (8 + size) for cut, size in cuts)


def packed(sent: Sent) -> float:
    """Return the bytes of values of two bits, of their places, in as few bits as a chunk needs, and of four bins."""
    total = 0
    for x in sent.params.values():
        cut = grid(tuple(x.shape), 8 if x.dim() > 1 else 64)
        count = cut.chunks * min(max(1, round(64 * sent.knobs.p)), cut.area)
        total += -(-count * 2 // 8) + 16 + -(-count * bits_for(cut.area) // 8)
    return float(sent.others * sent.rounds * total)
