"""Stochastic gradient push: nodes share out what they have along the links of a directed graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vecgym.collectives.topology import check_doubly_stochastic
from vecgym.core import tree
from vecgym.core.devices import spread
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec
from vecgym.simulation.simulation import Part
from vecgym.simulation.timetable import RunFacts
from vecgym.strategy.base import InnerOptions, Unpack, takes_options
from vecgym.strategy.decentralised.base import Decentralised
from vecgym.strategy.decentralised.gossip import Mix, Topology

WEIGHT = "push-sum weight"  # no name of a parameter


class Push(Mix, batched=()):
    """Each node shares out its values: x_i <- sum_j A_ij x_j, where column j of A sums to 1.

    Attributes:
        regular: whether every A is known to be doubly stochastic, so that equal values stay equal.

    >>> Push([[0.5, 0.0], [0.5, 1.0]]).regular, Push("ring").regular
    (False, True)
    """

    doubly = False

    def __init__(self, topology: Topology = "one_peer_exponential") -> None:
        super().__init__(topology)
        self.regular = isinstance(self.topology, str)
        if isinstance(self.topology, Tensor) and not self.topology.requires_grad:
            self.regular = all(map(_is_doubly_stochastic, self.topology.reshape(-1, *self.topology.shape[-2:])))


class SGPStrategy(Decentralised, batched=(), random=False):
    """Stochastic gradient push: push-sum in a directed graph, with a gradient step at the ratio of sum and weight.

    With u_j the step of the inner optimizer at z_j, -gamma g_j for SGD, x_j = z_j and w_j = 1 at first:
    x_i <- sum_j A_ij (x_j + u_j);  w_i <- sum_j A_ij w_j;  z_i = x_i / w_i.

    A_ij is the share of its values that node j sends to node i, or keeps: the columns of A sum to 1, and a node needs
    to know only how many it sends to. The node's parameters are z_i; sum_i w_i = K and sum_i x_i are kept by the
    exchange. In doubly stochastic graphs w_i stays 1 and is neither computed nor sent: that is `GossipStrategy`. With a
    constant rate nodes with non-IID data stop near the optimum, as in D-PSGD. The step at z_i is u_i / w_i: a
    node of little weight needs a small rate.

    Memory per node: w_i and, if it is needed, the parameters before the step: b P. Bytes sent per node and step:
    out-degree * b * P, and b for each w_i that is sent. An absent node keeps x_i and w_i; the share that others would
    have sent to it stays with them.

    Args:
        topology: a name, a matrix `[K, K]`, matrices `[T, K, K]` or a function, as in `Mix`, but for their sums.
            Uniform weights are A_ij = 1 / (1 + out-degree of j). "one_peer_exponential" is the authors' graph, with
            messages to the node 2^k *before* a node, in place of that after it.
        inner_optim: the local optimizer, AdamW when not given.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: see `Strategy`.

    Raises:
        ValueError: see `Mix`; for a matrix whose columns do not sum to 1.

    >>> SGPStrategy("one_peer_exponential", "sgd", lr=0.1)
    SGPStrategy(OptimSpec(SGD, lr=0.1), Exchange(Push()))

    Reference: Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", arXiv 1811.10792, algorithm 1,
    and github.com/facebookresearch/stochastic_gradient_push. Deviations: any optimizer in place of SGD; no overlap of
    messages and gradients.
    """

    remembered = ("before",)

    @takes_options(InnerOptions)
    def __init__(
        self,
        topology: Topology = "one_peer_exponential",
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        **inner: Unpack[InnerOptions],
    ) -> None:
        super().__init__(Push(topology), inner_optim, **inner)

    def init(self, run: RunFacts, params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
        own, shared = super().init(run, params)
        like = next(iter(params.values()))
        return {**own, "weight": torch.ones(1, dtype=like.dtype, device=like.device)}, shared

    def meet(self, part: Part) -> None:
        graph: Any = self.graph
        if graph.regular and (part.run.presence is None or isinstance(graph.topology, str)):
            return super().meet(part)
        w = part.own["weight"]
        x = tree.map(lambda z, old: z + spread(w - 1, old) * old, part.params, part.own["before"])  # w old + z - old
        mixed = self.neighbours({**x, WEIGHT: w}, part)
        w = part.own["weight"] = mixed.pop(WEIGHT)
        part.params = tree.map(lambda y: y / spread(w, y), mixed)


def _is_doubly_stochastic(weights: Tensor) -> bool:
    try:
        check_doubly_stochastic(weights)
    except ValueError:
        return False
    return True
