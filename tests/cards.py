"""The known facts of each strategy of the catalogue: a card each, beside its naive twin.

Bytes are closed forms: a mean goes through a ring, codes through an all-gather, which takes them once to each of the
others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from vecgym.collectives import StackedCollectives
from vecgym.collectives.topology import ring as ring_of
from vecgym.compress.codecs import bits_for
from vecgym.compress.dct import grid
from vecgym.core import rng
from vecgym.simulation.simulation import Part
from vecgym.strategy.catalogue import Knobs
from vecgym.strategy.decentralised.matcha import Plan
from vecgym.strategy.decentralised.matcha import cut as cut_graph
from vecgym.strategy.exchange import cut
from vecgym.strategy.sparta import RandomSelector


class Sent(NamedTuple):
    """The numbers that decide the bytes of a run: `params` are a node's trainable parameters, `[*]`."""

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
        """Return the payloads that a node sends, on average, when rings of these sizes, or one of all, reduce one."""
        return sum(2 * (n - 1) for n in sizes or (self.num_nodes,)) / self.num_nodes


def islands_of_two(sent: Sent) -> float:
    whole, rest = divmod(sent.num_nodes, 2)
    return sent.rounds * sent.ring(*[2] * whole, *[1] * rest) * sent.model_bytes


def participants(sent: Sent) -> float:
    return sent.rounds * round(0.6 * sent.num_nodes) / sent.num_nodes * sent.model_bytes


def strongest(sent: Sent, exchanges: int | None = None) -> float:
    """Return the bytes of the largest part of every tensor: values and indices."""
    sizes = [(max(1, round(sent.knobs.p * x.numel())), x.element_size()) for x in sent.params.values()]
    exchanges = sent.rounds if exchanges is None else exchanges
    return sent.others * exchanges * sum(count * (size + 4) for count, size in sizes)


def drawn(sent: Sent) -> float:
    """Return the bytes of SPARTA's random coordinates, which the seed draws anew in every exchange."""
    shapes = {name: x.shape for name, x in sent.params.items()}
    selector, total = RandomSelector(sent.knobs.p), 0
    for step in range(sent.steps):
        indices, _ = selector.select(shapes, {}, step, Part.alone(StackedCollectives(1), step=step, seed=sent.seed))
        total += sum(len(index) * sent.params[name].element_size() for name, index in indices.items())
    return sent.ring() * total


def rounds(sent: Sent) -> float:
    return sent.rounds * sent.ring() * sent.model_bytes


def penalised(sent: Sent) -> float:
    """Return the bytes of DiLoCo, and of the norm of each tensor, which goes to each of the others."""
    return rounds(sent) + sent.others * sent.rounds * sum(x.element_size() for x in sent.params.values())


def desynced(sent: Sent) -> float:
    exchanges = sent.rounds + sum(sent.steps // period for period in (sent.knobs.H + 1, sent.knobs.H + 2))  # Hu, Hv
    return exchanges * sent.ring() * sent.model_bytes


def fragments(sent: Sent, payload: Callable[[Tensor], float]) -> float:
    """Return the bytes of two fragments in turn; `payload` are those of one tensor."""
    H, total = sent.knobs.H, 0.0
    parts = cut(list(sent.params), 2)
    for names, first in zip(parts, [max(1, (p + 1) * H // len(parts)) for p in range(len(parts))]):
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


def matched(sent: Sent) -> float:
    """Return the bytes of MATCHA's matchings, of a ring, which the seed draws anew in every exchange."""
    matchings = cut_graph(ring_of(sent.num_nodes))
    plan = Plan.of(matchings, sent.num_nodes, 0.5)
    links = 0
    for step in range(sent.steps):
        draws = torch.rand(len(matchings), generator=rng.generator(sent.seed, "matchings", step), dtype=torch.float64)
        links += sum(len(m) for m, x, p in zip(matchings, draws.tolist(), plan.probabilities.tolist()) if x < p)
    return 2 * links / sent.num_nodes * sent.model_bytes


def tossed(sent: Sent) -> float:
    """Return the bytes of Scaffnew's means, each of which a coin says."""
    coins = [torch.rand((), generator=rng.generator(sent.seed, "coin", step)) for step in range(sent.steps)]
    return sum(float(coin) < 1 / sent.knobs.H for coin in coins) * sent.ring() * sent.model_bytes


def normalised(sent: Sent) -> float:
    """Return the bytes of FedNova's means, each with one number."""
    return sent.rounds * sent.ring() * (sent.model_bytes + next(iter(sent.params.values())).element_size())


class Card(NamedTuple):
    """The known facts about a strategy.

    Attributes:
        twin: the file in `tests/reference` that does the same in plain loops.
        sends: the bytes that a node's link sends in a run, on average, by a closed form.
        alone: what happens to a single node after every H steps: "nothing" (plain training), "nesterov" (an outer step
            of SGD with Nesterov momentum), "heavy ball", "server adam"; None where what it exchanges with itself is
            late or lossy.
        averages: nodes with identical shards stay identical, and do what one node alone does.
        server: each participant sends to a server, even if there is only one.
        replicated: the parameters stay the same on every node.
        per_node: parts of the strategy's state that each node has its own of.
        needs_moments: the inner optimizer must keep some, as AdamW does.
        even: the number of nodes must be.
        everyone: no node may be absent.
        plain: its gradients are corrected, and not clipped.
    """

    twin: str
    sends: Callable[[Sent], float]
    alone: str | None = "nothing"
    averages: bool = True
    server: bool = False
    replicated: bool = False
    per_node: tuple[str, ...] = ()
    needs_moments: bool = False
    even: bool = False
    everyone: bool = False
    plain: bool = False


CARDS: dict[str, Card] = {
    "independent": Card("fedavg", lambda sent: 0.0),
    "allreduce": Card("allreduce", lambda sent: sent.steps * sent.ring() * sent.model_bytes, replicated=True),
    "gpa": Card("gpa", lambda sent: sent.steps * sent.ring() * sent.model_bytes, alone=None, replicated=True),
    "fedavg": Card("fedavg", rounds),
    "fedavg-islands": Card("fedavg", islands_of_two),
    "fedavg-participation": Card("fedavg", participants, averages=False, server=True),
    "fedavg-server": Card("fedavg", lambda sent: sent.rounds * sent.model_bytes, alone="server adam", server=True),
    "scaffold": Card(
        "scaffold",
        lambda sent: 2.0 * sent.rounds * sent.model_bytes,
        alone=None,  # tests of single nodes have other optimizers
        server=True,
        per_node=("control", "gradients", "rates"),
        plain=True,
    ),
    "mime": Card(
        "mime",
        lambda sent: (sent.rounds + -(-sent.steps // sent.knobs.H)) * float(sent.model_bytes),  # the last is cut off
        alone=None,
        server=True,
        plain=True,
    ),
    "fednova": Card("fednova", normalised, alone=None, per_node=("work",)),
    "feddyn": Card("feddyn", rounds, alone=None, per_node=("gradient",)),
    "scaffnew": Card("scaffnew", tossed, alone=None, per_node=("correction",)),
    "local-adam": Card("local_adam", lambda sent: 3 * rounds(sent), needs_moments=True),
    "des-loc": Card("local_adam", desynced, needs_moments=True),
    "diloco": Card("diloco", rounds, alone="nesterov"),
    "streaming": Card(
        "streaming", lambda sent: sent.ring() * fragments(sent, lambda x: x.numel() * x.element_size()), alone=None
    ),
    "streaming-4-bits": Card(
        "streaming", lambda sent: sent.others * fragments(sent, lambda x: -(-x.numel() // 2) + 4), alone=None
    ),
    # Of several nodes, what one does is used in part a round later.
    "eager": Card("eager", rounds, alone="nesterov", averages=False, per_node=("params", "momentum", "others")),
    "edit": Card("edit", penalised, alone="nesterov", per_node=("norms",)),
    "diloco-topk": Card("compression", strongest, alone=None, per_node=("residual",)),
    "sparseloco": Card("sparseloco", packed, alone=None, per_node=("residual",)),
    "muloco": Card("muloco", rounds, alone=None),
    "palsgd": Card("palsgd", rounds, alone=None, averages=False),
    "dsm": Card("sign_momentum", rounds, alone=None),
    "noloco": Card(
        "noloco", lambda sent: 2 * islands_of_two(sent), alone="heavy ball", per_node=("params", "momentum")
    ),
    "sparta": Card("sparta", drawn),
    "loscar": Card("sparta", drawn, per_node=("message",)),
    "sparta-diloco": Card("sparta_diloco", lambda sent: drawn(sent) + rounds(sent), alone="nesterov"),
    "gossip": Card("gossip", lambda sent: sent.steps * 2.0 * sent.model_bytes),
    "gossip-matching": Card("gossip", lambda sent: sent.steps * sent.model_bytes, even=True),
    "gradient-tracking": Card(
        "decentralised", lambda sent: sent.steps * 4.0 * sent.model_bytes, per_node=("before", "correction")
    ),
    "d2": Card("decentralised", lambda sent: sent.steps * sent.others * sent.model_bytes, per_node=("correction",)),
    "exact-diffusion": Card(
        "decentralised", lambda sent: sent.steps * 2.0 * sent.model_bytes, per_node=("correction",)
    ),
    "qgm": Card(
        "decentralised", lambda sent: sent.steps * 2.0 * sent.model_bytes, alone=None, per_node=("before", "momentum")
    ),
    "sgp": Card("decentralised", lambda sent: sent.steps * sent.model_bytes, per_node=("before", "weight")),
    "choco": Card(
        "decentralised",
        lambda sent: 2.0 * strongest(sent, sent.steps) / sent.others,
        alone=None,
        per_node=("estimate", "average"),
        everyone=True,
    ),
    "relaysum": Card(  # values are late, also those of equal nodes
        "decentralised",
        lambda sent: sent.steps * sent.ring() * sent.model_bytes,
        averages=False,
        per_node=("heard",),
        everyone=True,
    ),
    "matcha": Card("decentralised", matched),
    "demo": Card("demo", pairs, alone=None, replicated=True, per_node=("residual",)),
}
