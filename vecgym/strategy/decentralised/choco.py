"""CHOCO-SGD: neighbours exchange codes of the change of their parameters, and average estimates of each other."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from vecgym.compress import Codec, TopK, make_codec
from vecgym.core import check, tree
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec
from vecgym.simulation.simulation import Part
from vecgym.strategy.base import InnerOptions, Unpack, takes_options
from vecgym.strategy.coded import Compressed, constant, draws, straight_through
from vecgym.strategy.decentralised.base import Decentralised
from vecgym.strategy.decentralised.gossip import Topology
from vecgym.strategy.stages import Memory

Order = Literal["estimates_first", "consensus_first"]
CHANGING = ("one_peer_exponential", "random_matching")  # topologies


class CHOCOStrategy(Decentralised, batched=None, random=True):
    """CHOCO-SGD: each node sends a code of its parameters' distance to an estimate of them that its neighbours keep.

    With u_i the step of the inner optimizer at theta_i, and h_i = 0 at first:
    x_i = theta_i + u_i;  q_i = Q(x_i - h_i);  h_j <- h_j + q_j for all j;  theta_i <- x_i + c sum_j W_ij (h_j - h_i).

    A node keeps h_i and s_i = sum_j W_ij h_j, to which it adds the codes of its neighbours. Hence W is the same at all
    times, and all nodes are there. Where x_i settles h_i becomes x_i, however coarse the code. Codes that leave out
    more need a smaller c, 0.01 to 0.5 with 1 % of the values. With a code that keeps all, theta_i <- (1 - c) x_i +
    c sum_j W_ij x_j: c = 1 is D-PSGD.

    Under differentiation the code passes derivatives straight through, as in `Compressed`.

    Memory per node: h_i and s_i, 2 b P. Bytes sent per node and step: degree times those of the code. Configurations
    of a sweep are trained one by one: the codes of each are averaged with its own neighbours.

    Args:
        topology: a name but "one_peer_exponential" and "random_matching", or a matrix `[K, K]`; see `Mix`.
        inner_optim: the local optimizer, AdamW when not given.
        codec: Q, a codec of `vecgym.compress` or its name, tensor by tensor; a tenth of the values when not given.
        consensus: c, in (0, 1].
        order: "estimates_first", as above; or "consensus_first": theta_i <- x_i + c sum_j W_ij (h_j - h_i), then
            q_i = Q(theta_i - h_i), so that messages may be under way while the next gradient is computed.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: see `Strategy`.

    Raises:
        ValueError, TypeError: see `Mix`; for a graph that changes, PowerSGD, a codec that is not contractive, c outside
            (0, 1]; before the first step if nodes may be absent.

    >>> CHOCOStrategy("ring", "sgd", codec="sign", consensus=0.5, lr=0.1)
    CHOCOStrategy(OptimSpec(SGD, lr=0.1), Exchange(Mix()), codec=Sign(), consensus=0.5)

    References: Koloskova, Stich and Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
    Communication", arXiv 1902.00340, algorithm 2; order="consensus_first" is Koloskova, Lin, Stich and Jaggi,
    "Decentralized Deep Learning with Arbitrary Communication Compression", arXiv 1907.09356, and
    github.com/epfml/ChocoSGD, dl_code, whose c is 0.9. Deviation: any optimizer in place of SGD.
    """

    remembered = ("estimate", "average")
    needs_everyone = (
        "each adds up the codes of all its neighbours, and an absent one would miss some. Leave out availability, or "
        "give GossipStrategy, which sends the parameters themselves."
    )

    @takes_options(InnerOptions)
    def __init__(
        self,
        topology: Topology = "ring",
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        *,
        codec: str | Codec = TopK(0.1),  # noqa: B008  # settings, which nobody changes
        consensus: float = 0.9,
        order: Order = "estimates_first",
        **inner: Unpack[InnerOptions],
    ) -> None:
        super().__init__(topology, inner_optim, **inner)
        self.codec = check.instance("codec", make_codec(codec), Codec, 'a codec of single tensors, such as "topk"')
        if not self.codec.contractive:
            raise ValueError(f"codec={codec!r} scales values up, and estimates would diverge: give unbiased=False.")
        self.consensus = check.number("consensus", consensus, "(0, 1]", "the part of the way to the average")
        self.order = check.choice("order", order, get_args(Order))
        given = self.graph.topology
        several = given.dim() == 3 and len(given) > 1 if isinstance(given, Tensor) else given in CHANGING
        if several or callable(given):
            raise ValueError(
                f"topology={given!r} changes from step to step, and CHOCO-SGD adds up the codes of one set of "
                'neighbours: give a matrix [K, K], or a name such as "ring".'
            )

    steady = Compressed.steady

    def meet(self, part: Part) -> None:
        first = self.order == "estimates_first"
        if first:
            self._send(part.params, part)
        c, h, s = self.consensus, part.own["estimate"], part.own["average"]
        part.params = tree.map(lambda x, h, s: x + c * (s - h), part.params, h, s)
        if not first:
            self._send(part.params, part)

    def _send(self, x: Tree, part: Part) -> None:
        """Send the codes of x - h, and add them to the estimates and to their averages."""
        h, s = part.own["estimate"], part.own["average"]
        change = tree.map(torch.sub, x, h)
        with torch.no_grad():
            exact, draw = constant(change), draws("choco", part)
            codes = {name: self.codec.encode(y, draw(name)) for name, y in exact.items()}
            mixed = self.graph.of_codes(codes, self.codec, exact, part)
            sent = {name: self.codec.decode(codes[name], y) for name, y in exact.items()}
        memory = Memory(inplace=part.inplace)
        sent = straight_through(sent, change, part, memory, lambda unrecorded: change)
        mixed = straight_through(mixed, change, part, memory, lambda part: self.graph.agree(change, part, memory))
        part.own["estimate"] = tree.map(torch.add, h, sent)
        part.own["average"] = tree.map(torch.add, s, mixed)
