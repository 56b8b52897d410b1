"""In which order a ring goes around: the one whose slowest link is fastest."""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

MAX_EXACT = 9  # nodes: up to here all orders are tried
MAX_LINES = 100  # of different links: up to here the best order is found for every size of message


def best_ring(cost: Tensor) -> Tensor:
    """An order of the nodes around a ring that makes its most expensive link as cheap as can be found.

    Exact up to 9 nodes: all orders are tried. Above, a heuristic: from each node on to the nearest that is left; of the
    best of these rings, nodes are moved away from its most expensive link as long as that helps.

    Args:
        cost: `[n, n]`, of the link from i to j.

    Returns:
        `[n]`, node 0 first.

    >>> best_ring(torch.tensor([[0.0, 9.0, 1.0], [1.0, 0.0, 9.0], [9.0, 1.0, 0.0]]))
    tensor([0, 2, 1])
    """
    n = len(cost)
    if n <= MAX_EXACT:
        orders = _orders(n)
        return orders[int(_worst(cost, orders).argmin())]
    return _improved(cost, _nearest(cost))


@functools.lru_cache(maxsize=MAX_EXACT + 1)
def _orders(n: int) -> Tensor:
    """All orders of n nodes around a ring, `[(n - 1)!, n]`."""
    return torch.tensor([(0, *rest) for rest in itertools.permutations(range(1, n))])


def _worst(cost: Tensor, orders: Tensor) -> Tensor:
    """The most expensive link of each ring, `[..., n] -> [...]`; 0 for a single node."""
    if orders.shape[-1] == 1:
        return cost.new_zeros(orders.shape[:-1])
    return cost[orders, orders.roll(-1, -1)].amax(-1)


def _nearest(cost: Tensor) -> Tensor:
    """The best of the rings that go from each node on to the nearest that is left."""
    n = len(cost)
    starts = torch.arange(n)
    orders, left = [starts], torch.ones(n, n, dtype=torch.bool)
    left[starts, starts] = False
    for _ in range(n - 1):
        nearest = torch.where(left, cost[orders[-1]], torch.inf).argmin(1)
        left[starts, nearest] = False
        orders.append(nearest)
    rings = torch.stack(orders, 1)
    links = cost[rings, rings.roll(-1, 1)]
    best = min(range(n), key=lambda i: (float(links[i].max()), float(links[i].sum())))
    return rings[best].roll(-int((rings[best] == 0).nonzero()))


def _improved(cost: Tensor, ring: Tensor) -> Tensor:
    """Move a node at an end of the most expensive link, or turn a part of the ring round, while that helps."""
    n = len(ring)
    for _ in range(10 * n):
        links = cost[ring, ring.roll(-1)]
        at = int(links.argmax())
        turned = [torch.cat([ring[:i], ring[i : j + 1].flip(0), ring[j + 1 :]]) for i, j in _cuts(at, n)]
        moved = [_inserted(ring, end % n, place) for end in (at, at + 1) for place in range(n - 1)]
        trials = torch.stack([*turned, *moved])
        worst = _worst(cost, trials)
        best = int(worst.argmin())
        if not float(worst[best]) < float(links[at]):
            break
        ring = trials[best]
    return ring.roll(-int((ring == 0).nonzero()))


def _cuts(at: int, n: int) -> list[tuple[int, int]]:
    """The stretches i..j that begin after, or end before, the link from place `at` to the next."""
    return [(at + 1, j) for j in range(at + 2, n)] + [(i, at) for i in range(at)]


def _inserted(ring: Tensor, at: int, place: int) -> Tensor:
    """The ring with the node at one place moved to another."""
    rest = torch.cat([ring[:at], ring[at + 1 :]])
    return torch.cat([rest[:place], ring[at : at + 1], rest[place:]])


class Ring:
    """The best ring of some nodes, for messages of any size: x bytes over the link from i to j take a_ij + x c_ij.

    Args:
        latency: a, `[n, n]`, seconds.
        pace: c, `[n, n]`, seconds a byte.

    >>> ring = Ring(torch.tensor([[0.0, 2.0], [1.0, 0.0]]), torch.tensor([[0.0, 1.0], [3.0, 0.0]]))
    >>> ring.slowest(torch.tensor([0.0, 10.0]))  # its slowest link
    tensor([ 2., 31.])
    """

    def __init__(self, latency: Tensor, pace: Tensor) -> None:
        self.latency, self.pace = latency, pace
        self._bounds = _crossings(latency, pace)
        self._links: dict[int, tuple[Tensor, Tensor]] = {}

    def slowest(self, size: Tensor) -> Tensor:
        """The seconds of messages of so many bytes, `[M]`, over the slowest link of the ring that is best for each."""
        which = torch.searchsorted(self._bounds, size)
        result = torch.zeros_like(size)
        for part in which.unique().tolist():
            if part not in self._links:
                self._links[part] = self._best(part)
            latency, pace = self._links[part]
            seconds = (latency + size[:, None] * pace).amax(1)
            result = torch.where(which == part, seconds, result)
        return result

    def _best(self, part: int) -> tuple[Tensor, Tensor]:
        """The links of the best ring for sizes between two bounds."""
        low = float(self._bounds[part - 1]) if part > 0 else 0.0
        high = float(self._bounds[part]) if part < len(self._bounds) else 2 * low + 1
        ring = best_ring(self.latency + (low + high) / 2 * self.pace)
        if len(ring) == 1:
            return self.latency.new_zeros(1), self.pace.new_zeros(1)
        return self.latency[ring, ring.roll(-1)], self.pace[ring, ring.roll(-1)]


def _crossings(latency: Tensor, pace: Tensor) -> Tensor:
    """The sizes, ascending, between which the order of the links by cost, and so the best ring, is the same.

    With very many different links: powers of 2, between which one ring is taken for all sizes.
    """
    apart = ~torch.eye(len(latency), dtype=torch.bool)
    lines = torch.stack([latency[apart], pace[apart]], 1).unique(dim=0)
    if len(lines) > MAX_LINES:
        return 2.0 ** torch.arange(6, 50, dtype=latency.dtype)
    rise, run = (lines[:, None, i] - lines[None, :, i] for i in (0, 1))
    sizes = (-rise / run)[run != 0]
    return sizes[(sizes > 0) & sizes.isfinite()].unique()
