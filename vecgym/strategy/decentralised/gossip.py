"""Gossip: each node averages with its neighbours in a graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vecgym.collectives import StackedCollectives
from vecgym.collectives import topology as graphs
from vecgym.collectives.topology import Mixing
from vecgym.core import check
from vecgym.core.errors import warn
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec
from vecgym.simulation.simulation import Part
from vecgym.strategy.averages import Reduction
from vecgym.strategy.base import InnerOptions, Strategy, Unpack, takes_options
from vecgym.strategy.exchange import Exchange
from vecgym.strategy.stages import ExchangeFacts, Memory

FIXED = {rule.__name__: rule for rule in (graphs.ring, graphs.torus, graphs.exponential, graphs.complete)}
NAMES = (*FIXED, "one_peer_exponential", "random_matching")

Topology = str | Tensor | Sequence[Sequence[float]] | Callable[[int], Tensor]


class Mix(Reduction, batched=()):
    """Each node averages with its neighbours in a graph: x_i <- sum_j W_ij x_j.

    Args:
        topology: W, the weights of the nodes' exchange; doubly stochastic.

            - a name: "ring", "torus", "exponential", "complete", "one_peer_exponential" (another matrix each
              exchange, in a cycle) or "random_matching" (drawn anew for each exchange); see `collectives.topology`;
            - a matrix `[K, K]`, or matrices `[T, K, K]` taken in turn, one per exchange. A tensor with
              `requires_grad` gets derivatives in a differentiable run;
            - a function that takes the step, counted from 0, after which the nodes exchange, and returns `[K, K]`.

    Bytes sent per node: degree times those of the values.

    Raises:
        ValueError: for an unknown name, a matrix that is not doubly stochastic; before the first step for a matrix of
            another size than the number of nodes, and a number of nodes that the topology cannot connect.

    >>> Mix("ring")({"w": torch.tensor([3.0, 0.0, 0.0, 0.0])}, Part.alone(StackedCollectives(4)))
    {'w': tensor([1., 1., 0., 1.])}
    """

    linear = True
    common = False
    doubly = True  # False in classes whose matrices need columns that sum to 1 only

    def __init__(self, topology: Topology = "ring") -> None:
        self.topology = _checked_topology(topology, self.check_matrix)
        # Constant matrices are checked once. One with derivatives is checked each time: it may have been trained since.
        self._constant: list[Mixing] | None = None
        if isinstance(self.topology, Tensor) and not self.topology.requires_grad:
            self._constant = [Mixing.of(weights) for weights in _cycle(self.topology)]

    @property
    def random(self) -> bool:  # type: ignore[override]
        return not isinstance(self.topology, str) or self.topology == "random_matching"

    @property
    def steady(self) -> bool:  # type: ignore[override]
        return self.topology in FIXED if isinstance(self.topology, str) else len(self._constant or ()) == 1

    def check(self, run: ExchangeFacts) -> None:
        K = run.num_nodes
        matrices = list(_cycle(self.topology)) if isinstance(self.topology, Tensor) else []
        if 0 < run.num_exchanges < len(matrices):
            warn(
                f"topology has {len(matrices)} matrices and the run {run.num_exchanges} exchanges: the matrices from "
                f"{run.num_exchanges} on are never used."
            )
        size = len(self._mixing(K, Part.alone(StackedCollectives(K), step=run.first)).weights)
        if size != K:
            raise ValueError(
                f"topology mixes {size} nodes, and the run has num_nodes={K}: give num_nodes={size}, a matrix "
                f'[{K}, {K}], or a name such as "ring".'
            )
        if run.fewest < K and self.doubly:
            for weights in matrices:
                _check_keeps_mean(weights)

    def matrices(self, num_nodes: int) -> list[Tensor]:
        """Return the matrices that are known before the run; of a function and random ones, the first.

        >>> [len(W) for W in Mix("one_peer_exponential").matrices(4)]
        [4, 4]
        """
        count = len(_cycle(self.topology)) if isinstance(self.topology, Tensor) else 1
        if isinstance(self.topology, str) and self.topology == "one_peer_exponential":
            count = max(1, graphs.ceil_log2(num_nodes))
        comm = StackedCollectives(num_nodes)
        return [self._mixing(num_nodes, Part.alone(comm, number=t)).weights for t in range(count)]

    def check_matrix(self, weights: Tensor, name: str) -> None:
        """Raise a ValueError unless the nodes may exchange with these weights."""
        (graphs.check_doubly_stochastic if self.doubly else graphs.check_column_stochastic)(weights, name)

    def mixing(self, part: Part) -> Mixing:
        """Return the matrix of this exchange.

        >>> Mix("ring").mixing(Part.alone(StackedCollectives(5))).weights[0]
        tensor([0.3333, 0.3333, 0.0000, 0.0000, 0.3333], dtype=torch.float64)
        """
        if part.comm.members is None:
            return self._mixing(part.comm.num_nodes, part)
        if isinstance(self.topology, str):
            return self._mixing_of_some(self.topology, part.comm.num_nodes, part)
        weights = self._mixing(part.comm.run_nodes, part).weights
        return Mixing.of(among(weights, part.comm.members, self.doubly))

    def agree(self, x: Tree, part: Part, memory: Memory) -> Tree:
        return part.comm.mix(x, self.mixing(part), inplace=part.inplace)

    def shares(self, part: Part) -> Tensor:
        return self.mixing(part).weights[part.comm.node_ids]

    def gather(self, codes: Tree, part: Part) -> Tree:
        return part.comm.all_gather(codes, inplace=True, readers=self.mixing(part).links)

    def _mixing_of_some(self, topology: str, num_nodes: int, part: Part) -> Mixing:
        """Return the matrix of a topology by name among the nodes present, whatever their number."""
        if topology == "random_matching" and num_nodes % 2 and num_nodes > 1:  # one node has no partner
            order = torch.randperm(num_nodes, generator=part.generator("matching", part.due.number)).sort().indices
            weights = torch.eye(num_nodes, dtype=torch.float64)
            weights[1:, 1:] = graphs.random_matching(num_nodes - 1, part.generator("matching", part.due.number))
            return Mixing.of(weights[order][:, order])
        try:
            return self._mixing(num_nodes, part)
        except ValueError:  # a torus of a prime number of nodes: a grid of one row, in which each is its own neighbour
            eye = torch.eye(num_nodes, dtype=torch.float64)
            return Mixing.of((3 * eye + eye.roll(1, 0) + eye.roll(-1, 0)) / 5)

    def _mixing(self, num_nodes: int, part: Part) -> Mixing:
        if self._constant is not None:
            return self._constant[part.due.number % len(self._constant)]
        if isinstance(self.topology, Tensor):
            matrices = _cycle(self.topology)
            return Mixing.of(matrices[part.due.number % len(matrices)])
        if not isinstance(self.topology, str):
            weights = as_matrix(check.called("topology", self.topology, part.due.step), f"topology({part.due.step})")
            self.check_matrix(weights, f"topology({part.due.step})")
            return Mixing.of(weights)
        if self.topology == "random_matching":
            return Mixing.of(graphs.random_matching(num_nodes, part.generator("matching", part.due.number)))
        if self.topology == "one_peer_exponential":
            turn = part.due.number % max(1, graphs.ceil_log2(num_nodes))
            return _mixing_of(graphs.one_peer_exponential, num_nodes, turn)
        return _mixing_of(FIXED[self.topology], num_nodes)


def among(weights: Tensor, members: Sequence[int], doubly: bool = True) -> Tensor:
    """Return the mixing matrix of some of the nodes: each node adds the weights of absent nodes to its own.

    Args:
        doubly: False if it is enough that each column sums to 1; else the matrix must be symmetric.

    >>> among(graphs.ring(4), [0, 1, 2])
    tensor([[0.6667, 0.3333, 0.0000],
            [0.3333, 0.3333, 0.3333],
            [0.0000, 0.3333, 0.6667]], dtype=torch.float64)
    """
    if doubly:
        _check_keeps_mean(weights)
    ids = torch.tensor(members, device=weights.device)
    inside = weights[ids][:, ids]
    dim = 1 if doubly else 0  # of a symmetric matrix both are the same, but for rounding
    return inside + torch.diag((weights[ids] if doubly else weights[:, ids]).sum(dim) - inside.sum(dim))


def is_symmetric(weights: Tensor) -> bool:
    """Whether each two nodes give the same weight to each other.

    >>> is_symmetric(graphs.ring(4)), is_symmetric(graphs.exponential(4))
    (True, False)
    """
    return torch.allclose(weights.detach(), weights.detach().mT, atol=1e-6)


def _check_keeps_mean(weights: Tensor) -> None:
    if not is_symmetric(weights):
        raise ValueError(
            "topology is a matrix that is not symmetric, and some of its nodes may be absent: the weights of the other "
            'nodes would not keep the mean. Give a symmetric one, or the name of a topology, such as "exponential".'
        )


@functools.lru_cache(maxsize=16)  # a whole cycle of "one_peer_exponential"
def _mixing_of(rule: Callable[..., Tensor], *args: int) -> Mixing:
    return Mixing.of(rule(*args))


def _cycle(matrices: Tensor) -> Tensor:
    """Return `[K, K]` or `[T, K, K]` as `[T, K, K]`."""
    return matrices if matrices.dim() == 3 else matrices[None]


def _checked_topology(
    topology: Any, check_matrix: Callable[[Tensor, str], None]
) -> str | Tensor | Callable[[int], Tensor]:
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
    matrices = as_matrix(topology, "topology", allowed)
    if matrices.dim() not in (2, 3) or len(matrices) == 0:
        raise ValueError(f"topology has shape {list(matrices.shape)}. {allowed}")
    for t, weights in enumerate(_cycle(matrices)):
        check_matrix(weights, f"topology[{t}]" if matrices.dim() == 3 else "topology")
    return matrices if matrices.requires_grad else matrices.clone()


def as_matrix(weights: Any, name: str, allowed: str = "Allowed: a matrix [K, K] of numbers.") -> Tensor:
    """Return a tensor unchanged, and Python's numbers in float64, not in torch's default type."""
    try:
        matrix = weights if isinstance(weights, Tensor) else torch.as_tensor(weights, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}={weights!r}: {allowed}") from error
    if matrix.is_complex():
        raise ValueError(f"{name} is a tensor of complex numbers. {allowed}")
    return matrix


class GossipStrategy(Strategy, steady=True):
    """D-PSGD: a local step on every node, then a weighted average with its neighbours in a graph.

    theta_i <- inner(theta_i, g_i); then, after every `every`-th step, theta_i <- sum_j W_ij theta_j.

    W `[K, K]` is doubly stochastic, so that the mean of the nodes moves by the mean of their updates. The nodes'
    distance to it shrinks in each exchange at least by the second largest |eigenvalue| of W
    (`vecgym.collectives.topology.second_eigenvalue`):

    | topology               | neighbours       | speed                                                  |
    |------------------------|------------------|--------------------------------------------------------|
    | "ring"                 | 2                | eigenvalues 1/3 + 2/3 cos(2 pi k / K)                  |
    | "torus"                | 4                | 1/5 + 2/5 cos(2 pi k / a) + 2/5 cos(2 pi l / b), ab = K |
    | "exponential"          | m = ceil(log2 K) | spectral gap 2 / (1 + m), K even                       |
    | "one_peer_exponential" | 1                | exact average after log2 K exchanges, K a power of two |
    | "random_matching"      | 1                | squared distance x (K - 2) / (2 (K - 1)) on average    |
    | "complete"             | K - 1            | exact average at once: FedAvg                          |

    No state but the inner optimizer's, which stays on its node. Bytes sent per node and exchange: degree * b * P, with
    degree the number of neighbours that a node sends to.

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
    Decentralized Parallel Stochastic Gradient Descent", arXiv 1705.09056. Deviations: the nodes mix the parameters
    after the local step ("adapt, then combine"), while algorithm 1 mixes first and then applies the gradient taken
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
