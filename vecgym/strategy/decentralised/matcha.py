"""MATCHA: in each step some of the matchings that a graph is cut into, drawn with the best probabilities."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vecgym.collectives.topology import Mixing
from vecgym.core import check
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec
from vecgym.simulation.simulation import Part
from vecgym.strategy.base import InnerOptions, Strategy, Unpack, takes_options
from vecgym.strategy.decentralised.gossip import FIXED, among, as_matrix
from vecgym.strategy.exchange import Exchange
from vecgym.strategy.stages import Average, ExchangeFacts, Memory

Graph = str | Tensor | Sequence[Sequence[float]]
Links = Sequence[tuple[int, int]]
Matching = tuple[tuple[int, int], ...]
SOFTNESS = tuple(10 ** (-k / 2) for k in range(2, 13))  # of the smallest eigenvalue: 0.1, ..., 1e-6
ROUNDS = 300  # ascents with each of them, at most
SETTLED = 1e-8  # a smaller movement ends them
CONNECTED = 1e-9  # second eigenvalue of a connected graph, at least
GOLDEN = (5**0.5 - 1) / 2


class Plan(NamedTuple):
    """The matchings of a graph: how often each is used, and with which weight.

    Attributes:
        laplacians: of the matchings, `[M, K, K]`.
        probabilities: of the matchings, `[M]`.
        alpha: the weight of a link.

    >>> plan = Plan.of((((0, 1), (2, 3)), ((1, 2),)), num_nodes=4, budget=0.5)
    >>> plan.probabilities, round(plan.alpha, 4)
    (tensor([0.5000, 0.5000], dtype=torch.float64), 0.6667)
    """

    laplacians: Tensor
    probabilities: Tensor
    alpha: float

    @classmethod
    @functools.lru_cache(maxsize=16)
    def of(cls, matchings: tuple[Matching, ...], num_nodes: int, budget: float) -> Plan:
        """Find the probabilities with the largest second eigenvalue of the mean Laplacian, and the best weight."""
        laplacians = torch.zeros(len(matchings), num_nodes, num_nodes, dtype=torch.float64)
        for L, matching in zip(laplacians, matchings):
            for i, j in matching:
                L[i, i] = L[j, j] = 1
                L[i, j] = L[j, i] = -1
        if num_nodes > 1 and float(torch.linalg.eigvalsh(laplacians.sum(0))[1]) < CONNECTED:
            raise ValueError(f"matchings={list(map(list, matchings))} do not connect all {num_nodes} nodes: add links.")
        probabilities = _probabilities(laplacians, budget)
        return cls(laplacians, probabilities, _weight(laplacians, probabilities))


def _probabilities(laplacians: Tensor, budget: float) -> Tensor:
    """Maximise lambda_2(sum p_j L_j) over 0 <= p_j <= 1, sum p_j <= budget M: concave, by ascents of a soft minimum."""
    count = len(laplacians)
    p = y = torch.full((count,), budget, dtype=torch.float64)
    for softness in SOFTNESS if budget < 1 and count > 1 else ():
        y, momentum = p, 1.0
        for _ in range(ROUNDS):
            values, vectors = torch.linalg.eigh(torch.tensordot(y, laplacians, 1))
            weights = (-values[1:] / softness).softmax(0)  # the first vector is constant
            slope = torch.einsum("ki,jkl,li,i->j", vectors[:, 1:], laplacians, vectors[:, 1:], weights)
            new = _projected(y + softness / (4 * count) * slope, budget * count)
            after = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
            moved = new - p
            y, p, momentum = new + (momentum - 1) / after * moved, new, after
            if float(moved.abs().max()) < SETTLED:
                break
    return p


def _projected(p: Tensor, total: float) -> Tensor:
    """Return the nearest point of 0 <= p_j <= 1 with a sum of at most `total`: p - tau, cut off at 0 and 1."""
    knots = torch.cat([p, p - 1, p.new_zeros(1)]).clamp(min=0).sort().values  # of the sum, linear in tau in between
    sums = (p - knots[:, None]).clamp(0, 1).sum(1)
    if sums[0] <= total:
        return p.clamp(0, 1)
    k = int((sums >= total).sum()) - 1
    tau = knots[k] + (sums[k] - total) / (sums[k] - sums[k + 1]) * (knots[k + 1] - knots[k])
    return (p - tau).clamp(0, 1)


def _weight(laplacians: Tensor, p: Tensor) -> float:
    """Minimise the norm of E[W^2] - J, W = I - alpha sum of those drawn: convex in alpha, by the golden section."""
    num_nodes = laplacians.shape[-1]
    mean, spread = torch.tensordot(p, laplacians, 1), torch.tensordot(p * (1 - p), laplacians, 1)
    base = torch.eye(num_nodes, dtype=torch.float64) - 1 / num_nodes

    def norm(alpha: float) -> float:
        return float(torch.linalg.eigvalsh(base - 2 * alpha * mean + alpha**2 * (mean @ mean + 2 * spread))[-1])

    low, high = 0.0, 1.0
    for _ in range(60):
        left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        low, high = (low, right) if norm(left) <= norm(right) else (left, high)
    return (low + high) / 2


def cut(weights: Tensor) -> tuple[Matching, ...]:
    """Cut a graph into matchings: each link goes to the first one in which both nodes are free.

    >>> from vecgym.collectives.topology import ring
    >>> cut(ring(5))
    (((0, 1), (2, 3)), ((0, 4), (1, 2)), ((3, 4),))
    """
    found: list[list[tuple[int, int]]] = []
    for i, j in ((weights + weights.mT) != 0).triu(1).nonzero().tolist():
        free = (m for m in found if not any({i, j} & set(link) for link in m))
        matching = next(free, None)
        if matching is None:
            found.append(matching := [])
        matching.append((i, j))
    return tuple(map(tuple, found))


class Matchings(Average, batched=(), random=True):
    """x_i <- x_i + alpha sum_j (x_j - x_i) over the neighbours j in the matchings that are drawn in an exchange."""

    common = False

    def __init__(
        self,
        topology: Graph = "ring",
        budget: float = 0.5,
        matchings: Sequence[Links] | None = None,
    ) -> None:
        if isinstance(topology, str):
            check.choice(
                "topology", topology, tuple(FIXED), "a matrix [K, K], or matchings=[[(0, 1), (2, 3)], [(1, 2)]]"
            )
        self.topology = topology if isinstance(topology, str) else as_matrix(topology, "topology")
        self.budget = check.number("budget", budget, "(0, 1]", "the mean part of the matchings that is used")
        self.matchings = None if matchings is None else _checked(matchings)
        if self.matchings is not None or isinstance(self.topology, Tensor):
            self.plan()

    def plan(self, num_nodes: int | None = None) -> Plan:
        """Return how the graph of so many nodes is used; if the matchings were given, they say how many."""
        if self.matchings is None:
            links = self.topology
            if isinstance(links, str):
                size = check.integer("num_nodes", num_nodes, what="known before the run if matchings are given")
                links = FIXED[links](size)
            return Plan.of(cut(links), len(links), self.budget)
        size = 1 + max((i for matching in self.matchings for link in matching for i in link), default=0)
        return Plan.of(self.matchings, size, self.budget)

    def check(self, run: ExchangeFacts) -> None:
        size = self.plan(run.num_nodes).laplacians.shape[-1]
        check.fits("matchings are of", size, run.num_nodes, "matchings of all nodes")

    def agree(self, x: Tree, part: Part, memory: Memory) -> Tree:
        plan = self.plan(part.comm.run_nodes)
        generator = part.generator("matchings", part.due.number)
        drawn = torch.rand(len(plan.probabilities), generator=generator, dtype=torch.float64) < plan.probabilities
        if not drawn.any():
            return x
        weights = torch.eye(len(plan.laplacians[0]), dtype=torch.float64) - plan.alpha * plan.laplacians[drawn].sum(0)
        if part.comm.members is not None:
            weights = among(weights, part.comm.members)
        return part.comm.mix(x, Mixing.of(weights), inplace=part.inplace)


class MATCHAStrategy(Strategy):
    """MATCHA: a local step, then an average along the links of some matchings of a graph, drawn anew in each step.

    theta_i <- inner(theta_i, g_i);  theta <- (I - alpha sum_{j drawn} L_j) theta, L_j the Laplacian of matching j.

    A matching is a set of links of which no two meet in a node, so that all its messages go at once. Matching j is
    drawn with probability p_j, the same draws on all nodes. The p_j maximise the second eigenvalue of sum_j p_j L_j,
    the connection of the mean graph, with sum_j p_j <= budget M of M matchings: links that hold the graph together are
    used more often. alpha minimises the norm of E[W^T W] - 11^T / K. With budget=1 each step uses the whole graph with
    alpha = 2 / (lambda_2 + lambda_K): D-PSGD. As D-PSGD, it stops near the optimum of non-IID data, not at it.

    No state but the inner optimizer's. Bytes sent per node and step: 2 b P sum_j p_j |M_j| / K on average, |M_j| the
    number of links. The budget is one of matchings: where these have unlike numbers of links, it is not that part of
    the bytes. Steps without a drawn matching send nothing.

    Args:
        topology: the graph: "ring", "torus", "exponential", "complete", or a matrix `[K, K]` whose entries that are not
            0 are links. They are dealt out to matchings, each to the first in which both its nodes are free.
        inner_optim: the local optimizer, AdamW when not given.
        budget: the mean part of the matchings that is used, in (0, 1].
        matchings: lists of links (i, j), in place of a topology; of all nodes of the run.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: see `Strategy`.

    Attributes:
        probabilities: p_j, `[M]`, if matchings were given; else see `plan`.
        alpha: the weight of a link, likewise.

    Raises:
        ValueError: for another topology, a budget outside (0, 1], links of a matching that meet, matchings that do not
            connect all nodes; before the first step for matchings of another number of nodes.

    >>> matchings = [[(0, 1), (2, 3)], [(1, 2), (0, 3)], [(3, 4)]]  # a ring, and node 4 at its end
    >>> strategy = MATCHAStrategy(inner_optim="sgd", lr=0.1, matchings=matchings, budget=0.5)
    >>> strategy.probabilities, round(strategy.alpha, 4)
    (tensor([0.4436, 0.4436, 0.6128], dtype=torch.float64), 0.5209)
    >>> MATCHAStrategy("ring", budget=0.5).plan(num_nodes=6).probabilities
    tensor([0.5000, 0.5000], dtype=torch.float64)

    Reference: Wang et al., "MATCHA: Speeding Up Decentralized SGD via Matching Decomposition Sampling", arXiv
    1905.09435, and github.com/JYWa/MATCHA, graph_manager.py. Deviations: any optimizer in place of SGD; matchings are
    found greedily, at most 2 d - 1 for d neighbours, the paper's at most d + 1; both problems are solved by ascents,
    to about 1e-5, in place of semidefinite programs.
    """

    @takes_options(InnerOptions)
    def __init__(
        self,
        topology: Graph = "ring",
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        *,
        budget: float = 0.5,
        matchings: Sequence[Links] | None = None,
        **inner: Unpack[InnerOptions],
    ) -> None:
        super().__init__(inner_optim, [Exchange(Matchings(topology, budget, matchings))], **inner)

    def plan(self, num_nodes: int | None = None) -> Plan:
        """Return Laplacians, probabilities and alpha for a number of nodes, which given matchings tell."""
        return self.exchanges[0].how.plan(num_nodes)

    @property
    def probabilities(self) -> Tensor:
        """The probability of each matching, `[M]`."""
        return self.plan().probabilities

    @property
    def alpha(self) -> float:
        """The weight of a link."""
        return self.plan().alpha


def _checked(matchings: Sequence[Links]) -> tuple[Matching, ...]:
    """Return matchings as tuples; a ValueError says which links meet."""
    found, several = [], (list, tuple)
    if not isinstance(matchings, several) or not all(isinstance(m, several) for m in matchings):
        raise TypeError(f"matchings={matchings!r} must be lists of links, such as [[(0, 1), (2, 3)], [(1, 2)]].")
    for matching in matchings:
        if not all(isinstance(link, several) for link in matching):
            raise TypeError(f"matchings: {matching!r} must be a list of links (i, j), such as [(0, 1), (2, 3)].")
        links = [tuple(check.integer("matchings", i, 0, "ids of nodes") for i in link) for link in matching]
        ends = [i for link in links for i in link]
        if len(set(ends)) < len(ends) or any(len(link) != 2 for link in links):
            raise ValueError(
                f"matchings: {list(matching)} is no matching, in which a link (i, j) joins two nodes, and no node has "
                "two links: put links that meet in different matchings."
            )
        found.append(tuple((min(link), max(link)) for link in links))
    return tuple(found)
