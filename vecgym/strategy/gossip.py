"""Gossip, D-PSGD: each node averages with its neighbours only (Lian et al., arXiv 1705.09056)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vecgym.optim import OptimSpec
from vecgym.strategy.base import Strategy
from vecgym.strategy.exchange import Exchange
from vecgym.strategy.inner import InnerOptions, takes_options
from vecgym.strategy.mixing import Mix, Topology

if TYPE_CHECKING:
    from typing_extensions import Unpack


class GossipStrategy(Strategy):
    """D-PSGD: a local step on every node, then a weighted average with its neighbours in a graph.

    theta_i <- inner(theta_i, g_i); then, after every `every`-th step, theta_i <- sum_j W_ij theta_j.

    W `[K, K]` is doubly stochastic, so that the mean of the nodes moves by the mean of their updates. The nodes'
    distance to it shrinks in each exchange at least by the second largest |eigenvalue| of W
    (`vecgym.collectives.topology.second_eigenvalue`):

    | topology               | neighbours       | what is known of its speed                             |
    |------------------------|------------------|--------------------------------------------------------|
    | "ring"                 | 2                | eigenvalues 1/3 + 2/3 cos(2 pi k / K)                  |
    | "torus"                | 4                | 1/5 + 2/5 cos(2 pi k / a) + 2/5 cos(2 pi l / b), ab = K |
    | "exponential"          | m = ceil(log2 K) | spectral gap 2 / (1 + m), K even                       |
    | "one_peer_exponential" | 1                | exact average after log2 K exchanges, K a power of two |
    | "random_matching"      | 1                | squared distance x (K - 2) / (2 (K - 1)) on average    |
    | "complete"             | K - 1            | exact average at once: FedAvg                          |

    No state. The inner optimizer's stays on its node. Bytes sent per node and exchange: degree * b * P, with degree
    the number of neighbours that a node sends to.

    Args:
        topology: a name from the table, a matrix `[K, K]`, matrices `[T, K, K]` or a function of the step; see
            `Mix`.
        every: local steps per exchange.
        inner_optim: the local optimizer, AdamW when not given.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: see `Strategy`.

    Raises:
        ValueError: see `Mix`.

    >>> GossipStrategy("torus", every=2, inner_optim="sgd", lr=0.1)
    GossipStrategy(OptimSpec(SGD, lr=0.1), Exchange(Mix(topology='torus'), every=2))

    Reference: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms? A Case Study for
    Decentralized Parallel Stochastic Gradient Descent", arXiv 1705.09056. Deviations: the nodes mix what the local
    step gave ("adapt, then combine"), while algorithm 1 mixes first and then applies the gradient that was taken
    before; any optimizer in place of SGD; W may change from exchange to exchange. Exponential graphs: Ying et al.,
    arXiv 2110.13363; random matchings: Boyd et al., "Randomized Gossip Algorithms", 2006.
    """

    @takes_options(InnerOptions)
    def __init__(
        self,
        topology: Topology = "ring",
        every: int = 1,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        **inner: Unpack[InnerOptions],
    ) -> None:
        super().__init__(inner_optim, [Exchange(Mix(topology), every=every)], **inner)
