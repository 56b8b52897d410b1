"""Gossip, D-PSGD: each node averages with its neighbours only (Lian et al., arXiv 1705.09056)."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vecgym.collectives import topology as graphs
from vecgym.collectives.topology import Mixing
from vecgym.core import check
from vecgym.core.errors import VecgymWarning
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec
from vecgym.optim.schedule import Schedule
from vecgym.strategy.base import CommunicationModule, Context, State, Strategy, check_interval

FIXED: dict[str, Callable[[int], Tensor]] = {
    "ring": graphs.ring,
    "torus": graphs.torus,
    "exponential": graphs.exponential,
    "complete": graphs.complete,
}
NAMES = (*FIXED, "one_peer_exponential", "random_matching")

Topology = str | Tensor | Sequence[Sequence[float]] | Callable[[int], Tensor]


class GossipCommunicator(CommunicationModule):
    """Every `every` steps: theta_i <- sum_j W_ij theta_j.

    Args:
        topology: W, the weights of the nodes' exchange; doubly stochastic.

            - a name: "ring", "torus", "exponential", "complete", "one_peer_exponential" (another matrix each
              exchange, in a cycle) or "random_matching" (drawn anew for each exchange); see `collectives.topology`;
            - a matrix `[K, K]`, or matrices `[T, K, K]` taken in turn, one per exchange. A tensor with
              `requires_grad` gets derivatives in a differentiable run;
            - a function that takes the step, counted from 0, after which the nodes exchange, and returns `[K, K]`.
        every: optimizer steps between two exchanges.

    Raises:
        ValueError: for an unknown name, a matrix that is not doubly stochastic, `every` < 1; at `fit` for a matrix
            of another size than the number of nodes, and a number of nodes that the topology cannot connect.

    >>> GossipCommunicator("ring", every=2)
    GossipCommunicator(topology='ring', every=2)
    """

    def __init__(self, topology: Topology = "ring", every: int = 1) -> None:
        self.topology = _checked_topology(topology)
        self.every = check_interval("every", every)
        # A constant is looked at once. One that takes derivatives is looked at anew: it may have been trained since.
        self._constant: list[Mixing] | None = None
        if isinstance(self.topology, Tensor) and not self.topology.requires_grad:
            self._constant = [Mixing.of(weights) for weights in _cycle(self.topology)]

    def check(self, num_nodes: int, max_steps: int) -> None:
        num_exchanges = max_steps // self.every
        if num_exchanges == 0:
            _warn(f"every={self.every} is larger than the run's {max_steps} steps: the nodes never exchange anything.")
        elif isinstance(self.topology, Tensor) and len(_cycle(self.topology)) > num_exchanges:
            _warn(
                f"topology has {len(self.topology)} matrices and the run {num_exchanges} exchanges: those from "
                f"{num_exchanges} on are never used."
            )
        size = len(self._mixing(num_nodes, self.every - 1, lambda exchange: torch.Generator()).weights)
        if size != num_nodes:
            raise ValueError(
                f"topology mixes {size} nodes, and the run has num_nodes={num_nodes}: give num_nodes={size}, a matrix "
                f'[{num_nodes}, {num_nodes}], or a name such as "ring".'
            )

    def mixing(self, ctx: Context) -> Mixing:
        """The matrix of the exchange after this step.

        >>> from vecgym.collectives import StackedCollectives
        >>> GossipCommunicator("ring").mixing(Context(StackedCollectives(5))).weights[0]
        tensor([0.3333, 0.3333, 0.0000, 0.0000, 0.3333], dtype=torch.float64)
        """
        return self._mixing(ctx.comm.num_nodes, ctx.step, lambda exchange: ctx.generator("matching", exchange))

    def exchange_parameters(self, params: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        if (ctx.step + 1) % self.every != 0:
            return params, state
        return ctx.comm.mix(params, self.mixing(ctx), inplace=ctx.inplace), state

    def _mixing(self, num_nodes: int, step: int, generator: Callable[[int], torch.Generator]) -> Mixing:
        exchange = step // self.every
        if self._constant is not None:
            return self._constant[exchange % len(self._constant)]
        if isinstance(self.topology, Tensor):
            matrices = _cycle(self.topology)
            return Mixing.of(matrices[exchange % len(matrices)])
        if not isinstance(self.topology, str):
            weights = _as_matrix(check.called("topology", self.topology, step), f"topology({step})")
            graphs.check_doubly_stochastic(weights, f"topology({step})")
            return Mixing.of(weights)
        if self.topology == "random_matching":
            return Mixing.of(graphs.random_matching(num_nodes, generator(exchange)))
        if self.topology == "one_peer_exponential":
            return _one_peer_exponential(num_nodes, exchange % max(1, graphs.ceil_log2(num_nodes)))
        return _fixed(self.topology, num_nodes)


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
            `GossipCommunicator`.
        every: local steps per exchange.
        inner_optim: the local optimizer, AdamW when not given.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: see `Strategy`.

    Raises:
        ValueError: see `GossipCommunicator`.

    >>> GossipStrategy("torus", every=2, inner_optim="sgd", lr=0.1)
    GossipStrategy(OptimSpec(SGD, lr=0.1), GossipCommunicator(topology='torus', every=2))

    Reference: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms? A Case Study for
    Decentralized Parallel Stochastic Gradient Descent", arXiv 1705.09056. Deviations: the nodes mix what the local
    step gave ("adapt, then combine"), while algorithm 1 mixes first and then applies the gradient that was taken
    before; any optimizer in place of SGD; W may change from exchange to exchange. Exponential graphs: Ying et al.,
    arXiv 2110.13363; random matchings: Boyd et al., "Randomized Gossip Algorithms", 2006.
    """

    def __init__(
        self,
        topology: Topology = "ring",
        every: int = 1,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        *,
        lr: float | Tensor | None = None,
        max_norm: float | Tensor | None = None,
        lr_scheduler: str | Schedule | None = None,
        warmup_steps: int = 0,
        cosine_anneal: bool = False,
    ) -> None:
        super().__init__(
            inner_optim,
            communication_modules=[GossipCommunicator(topology, every)],
            lr=lr,
            max_norm=max_norm,
            lr_scheduler=lr_scheduler,
            warmup_steps=warmup_steps,
            cosine_anneal=cosine_anneal,
        )


@functools.lru_cache(maxsize=4)
def _fixed(name: str, num_nodes: int) -> Mixing:
    return Mixing.of(FIXED[name](num_nodes))


@functools.lru_cache(maxsize=16)  # a whole cycle
def _one_peer_exponential(num_nodes: int, round: int) -> Mixing:
    return Mixing.of(graphs.one_peer_exponential(num_nodes, round))


def _cycle(matrices: Tensor) -> Tensor:
    """`[K, K]` or `[T, K, K]` -> `[T, K, K]`."""
    return matrices if matrices.dim() == 3 else matrices[None]


def _checked_topology(topology: Any) -> str | Tensor | Callable[[int], Tensor]:
    allowed = (
        f"topology takes one of {', '.join(map(repr, NAMES))}; a matrix [K, K] or matrices [T, K, K]; or a function "
        "step -> matrix."
    )
    if isinstance(topology, str) and topology in NAMES:
        return topology
    if isinstance(topology, (str, type, OptimSpec)):
        raise ValueError(f"topology={topology!r}: {allowed} An optimizer goes by name: inner_optim={topology!r}.")
    if callable(topology):
        return topology
    matrices = _as_matrix(topology, "topology", allowed)
    if matrices.dim() not in (2, 3) or len(matrices) == 0:
        raise ValueError(f"topology has shape {list(matrices.shape)}. {allowed}")
    for t, weights in enumerate(_cycle(matrices)):
        graphs.check_doubly_stochastic(weights, f"topology[{t}]" if matrices.dim() == 3 else "topology")
    return matrices if matrices.requires_grad else matrices.clone()


def _as_matrix(weights: Any, name: str, allowed: str = "Allowed: a matrix [K, K] of numbers.") -> Tensor:
    """A tensor as it is; Python's numbers in float64, as they are, not in torch's default type."""
    try:
        return weights if isinstance(weights, Tensor) else torch.as_tensor(weights, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}={weights!r}: {allowed}") from error


def _warn(message: str) -> None:
    warnings.warn(message, VecgymWarning, stacklevel=3)
