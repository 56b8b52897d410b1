"""How long one collective takes: closed forms, one table.

With S bytes of payload, n participants, latency a and a bandwidth of B bytes a second:

| operation, algorithm                       | seconds                                                  |
|--------------------------------------------|----------------------------------------------------------|
| `mean`, `sum`, "ring"                      | 2 (n - 1) a + 2 (n - 1) / n S / B                        |
| "halving_doubling", n a power of 2         | 2 log2(n) a + 2 (n - 1) / n S / B                        |
| "halving_doubling", others                 | that of the next smaller power of 2, and 2 (a + S / B)   |
| "tree"                                     | 2 ceil(log2 n) (a + S / B)                               |
| "server"                                   | 2 (a + max(max_i S / B_i, n S / B_server))               |
| "gloo", in segments of s seconds           | 2 (T + (m // 2) max(T, 2 s) + (m % 2) s), T = 2 a + s    |
| `all_gather`, "ring"                       | (n - 1) (a + S / B)                                      |
| "direct"                                   | a + (n - 1) S / B                                        |
| "halving_doubling" (Bruck)                 | ceil(log2 n) a + (n - 1) S / B                           |
| "tree": to the root, and from there        | 2 ceil(log2 n) a + (n - 1 + n ceil(log2 n)) S / B        |
| "server"                                   | 2 a + max(S, n S B / B_server) / B + n - 1 times as much |
| `reduce_scatter`, "ring"                   | (n - 1) a + (n - 1) / n S / B                            |
| `broadcast`, "ring": along a chain, in parts | (n - 1) a + S / B                                      |
| others                                     | half an all-reduce without the sum: tree, or server      |
| `server_mean`, `server_sum`                | up: a + max(max_i S / B_i, n S / B_server); down as much |
| `server_gather`, `server_send`             | one half of it                                           |
| `permute`                                  | a + S / B_ij                                             |
| `mix`, d neighbours                        | one link for all: a + d S / B; one for each: a + max_j S / B_ij |

Where links differ, each round takes as long as its slowest link. A ring goes from each node on to the nearest that is
left, stretches of it turned round where that makes its slowest link faster: one order for each group of nodes, settled
for the median of the messages that it first exchanges.

"gloo" is the ring of `torch.distributed` on CPUs: its n chunks are sent in k = max(2, ceil(S / n / 1 MiB)) segments,
s = S / (n k B) seconds each, m = (n - 1) k - 1 after the first in each of both phases. Two are under way at a time, and
the sender waits until the receiver has asked for each, so that a latency counts twice. It goes around in the order of
the nodes. A payload of fewer than n k values takes less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

import torch
from torch import Tensor

GLOO_SEGMENT = 2**20  # bytes, at most


class Team:
    """The participants of a collective, by their links: x bytes from i to j take `latency[i, j] + x * pace[i, j]`.

    Args:
        latency, pace: `[n, n]`, seconds, and seconds a byte.
        up, down: seconds a byte of each one's link to a server, and back, `[n]`.
        server_pace: seconds a byte of the server's own link.

    Attributes:
        by_pair: whether each pair has a link of its own, so that what a node sends to several goes side by side.

    >>> team = Team.alike(4, latency=0.5, pace=1e-9)
    >>> all_reduce_seconds("ring", team, torch.tensor([8e9]))  # 6 * 0.5 s, and 1.5 * 8 s
    tensor([15.], dtype=torch.float64)
    """

    def __init__(self, latency: Tensor, pace: Tensor, up: Tensor, down: Tensor, server_pace: float = 0.0) -> None:
        self.latency, self.pace, self.up, self.down = latency, pace, up, down
        self.server_pace = server_pace
        self.n = len(up)
        self.by_pair = False
        self._ring: list[tuple[int, int]] = []

    @classmethod
    def alike(cls, num_nodes: int, latency: float, pace: float, server_pace: float = 0.0) -> Team:
        """Participants whose links are all alike."""
        lags, paces = (torch.full((num_nodes, num_nodes), x, dtype=torch.float64) for x in (latency, pace))
        for matrix in (lags, paces):
            matrix.fill_diagonal_(0)
        nodes = torch.full((num_nodes,), pace, dtype=torch.float64)
        return cls(lags, paces, nodes, nodes, server_pace)

    @cached_property
    def without_latency(self) -> Team:
        """The same participants, whose messages take only what their bytes do."""
        found = Team(torch.zeros_like(self.latency), self.pace, self.up, self.down, self.server_pace)
        found.server_latency = 0.0
        return found

    def ring(self, size: Tensor) -> Tensor:
        """The seconds of messages of so many bytes, `[M]`, over the slowest link of the ring.

        >>> team = Team.alike(2, latency=0.5, pace=1e-9)
        >>> team.ring(torch.tensor([0.0, 8e9]))
        tensor([0.5000, 8.5000], dtype=torch.float64)
        """
        if not self._ring:
            order = ring_order(self.latency + size.median() * self.pace)
            self._ring = list(zip(order.tolist(), order.roll(-1).tolist()))
        return self.round(self._ring, size)

    @cached_property
    def server_latency(self) -> float:
        """Of the slowest way to the server."""
        return float(self.latency.max())

    def round(self, pairs: list[tuple[int, int]], size: Tensor) -> Tensor:
        """The seconds of messages of so many bytes, `[M]`, over all of these links at once."""
        senders, receivers = map(list, zip(*pairs))
        return (self.latency[senders, receivers] + size[:, None] * self.pace[senders, receivers]).amax(1)

    def to_server(self, size: Tensor, paces: Tensor) -> Tensor:
        """The seconds until each participant's message is at the server, or the server's at each."""
        return self.server_latency + size * max(float(paces.max()), len(paces) * self.server_pace)


def ring_order(cost: Tensor) -> Tensor:
    """An order of the nodes around a ring whose most expensive link is cheap: nearest neighbours, and then 2-opt.

    Of the rings that go from a node on to the nearest that is left, the best; stretches of it are turned round as long
    as that makes its most expensive link cheaper.

    Args:
        cost: `[n, n]`, of the link from i to j.

    Returns:
        `[n]`.

    >>> ring_order(torch.tensor([[0.0, 9.0, 1.0], [1.0, 0.0, 9.0], [9.0, 1.0, 0.0]]))
    tensor([2, 1, 0])
    """
    order = _nearest_neighbours(cost)
    while True:
        links = _around(cost, order)
        order = order.roll(-1 - int(links.argmax()))  # the most expensive link leads from the last node to the first
        cuts = [(order[:i], order[i:]) for i in range(1, len(order))]
        trials = torch.stack([torch.cat(x) for a, b in cuts for x in ((a.flip(0), b), (a, b.flip(0)))])
        worst = _around(cost, trials).amax(1)
        best = int(worst.argmin())
        if not worst[best] < links.max():
            return order
        order = trials[best]


def _around(cost: Tensor, rings: Tensor) -> Tensor:
    """What the links of rings cost, `[..., n]`."""
    return cost[rings, rings.roll(-1, -1)]


def _nearest_neighbours(cost: Tensor) -> Tensor:
    starts = torch.arange(len(cost))
    nearest, left = starts, torch.ones_like(cost, dtype=torch.bool)
    steps = [starts]
    for _ in starts[1:]:
        left[starts, nearest] = False
        nearest = cost[nearest].masked_fill(~left, torch.inf).argmin(1)
        steps.append(nearest)
    rings = torch.stack(steps, 1)
    return rings[int(_around(cost, rings).amax(1).argmin())]


# ------------------------------------------------------------------------------------------------------ all-reduce


def _ring_all_reduce(team: Team, size: Tensor) -> Tensor:
    return 2 * (team.n - 1) * team.ring(size / team.n)


def _halving_doubling(team: Team, size: Tensor) -> Tensor:
    """Reduce-scatter with partners at distance 1, 2, 4 ..., and back; who is left over joins before, leaves after."""
    core = 2 ** (team.n.bit_length() - 1)
    total = torch.zeros_like(size)
    for k in range(core.bit_length() - 1):
        pairs = [(i, i ^ 2**k) for i in range(core)]
        total = total + 2 * team.round(pairs, size / 2 ** (k + 1))
    if team.n > core:
        total = total + team.round([(i, i - core) for i in range(core, team.n)], size)
        total = total + team.round([(i - core, i) for i in range(core, team.n)], size)
    return total


def _tree_rounds(n: int) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """(k, pairs) of a binomial tree towards node 0: in round k, who has 2^k values sends them on."""
    for k in range((n - 1).bit_length()):
        yield k, [(i, i - 2**k) for i in range(2**k, n, 2 ** (k + 1))]


def _tree_broadcast(team: Team, size: Tensor) -> Tensor:
    total = torch.zeros_like(size)
    for _, pairs in _tree_rounds(team.n):
        total = total + team.round([(j, i) for i, j in pairs], size)
    return total


def _tree_all_reduce(team: Team, size: Tensor) -> Tensor:
    total = _tree_broadcast(team, size)
    for _, pairs in _tree_rounds(team.n):
        total = total + team.round(pairs, size)
    return total


def _server_all_reduce(team: Team, size: Tensor) -> Tensor:
    return team.to_server(size, team.up) + team.to_server(size, team.down)


def _gloo_all_reduce(team: Team, size: Tensor) -> Tensor:
    """Reduce-scatter and all-gather: segment i leaves when its receiver has i - 2 and has asked, and i - 1 has left."""
    receivers = torch.arange(team.n)
    senders = receivers.roll(-1)
    segments = (size / (team.n * GLOO_SEGMENT)).ceil().clamp(min=2)  # of each chunk
    took = size[:, None] / (team.n * segments[:, None]) * team.pace[senders, receivers]
    asked = took + team.latency[senders, receivers] + team.latency[receivers, senders]
    took, asked = took.amax(1), asked.amax(1)
    later = (team.n - 1) * segments - 1
    return 2 * (asked + later.div(2, rounding_mode="floor") * torch.maximum(asked, 2 * took) + later % 2 * took)


# ------------------------------------------------------------------------------------------------------ all-gather


def _ring_all_gather(team: Team, size: Tensor) -> Tensor:
    return (team.n - 1) * team.ring(size)


def _direct_all_gather(team: Team, size: Tensor) -> Tensor:
    """Each sends to all others at once."""
    if team.by_pair:
        return team.round([(i, j) for i in range(team.n) for j in range(team.n) if i != j], size)
    return team.latency.max() + (team.n - 1) * size * torch.maximum(team.up, team.down).max()


def _bruck(team: Team, size: Tensor) -> Tensor:
    """In round k each passes on all that it has, at most what is missing, to the node 2^k before it."""
    total = torch.zeros_like(size)
    for k in range((team.n - 1).bit_length()):
        pairs = [(i, (i - 2**k) % team.n) for i in range(team.n)]
        total = total + team.round(pairs, size * min(2**k, team.n - 2**k))
    return total


def _tree_all_gather(team: Team, size: Tensor) -> Tensor:
    total = _tree_broadcast(team, size * team.n)
    for k, pairs in _tree_rounds(team.n):
        total = total + team.round(pairs, size * min(2**k, team.n - 2**k))
    return total


def _server_all_gather(team: Team, size: Tensor) -> Tensor:
    return team.to_server(size, team.up) + team.to_server(size * (team.n - 1), team.down)


# ------------------------------------------------------------------------------------------------------- broadcast


def _chain_broadcast(team: Team, size: Tensor) -> Tensor:
    whole = team.ring(size)  # first, as it settles the order
    return (team.n - 2) * team.ring(torch.zeros_like(size)) + whole


def _server_broadcast(team: Team, size: Tensor) -> Tensor:
    return team.to_server(size, team.up[:1]) + team.to_server(size, team.down[1:])


# ---------------------------------------------------------------------------------------------------- the tables

Form = Callable[[Team, Tensor], Tensor]  # the seconds of messages of so many bytes, [M]

ALL_REDUCE: dict[str, Form] = {
    "ring": _ring_all_reduce,
    "halving_doubling": _halving_doubling,
    "tree": _tree_all_reduce,
    "server": _server_all_reduce,
    "gloo": _gloo_all_reduce,
}
ALL_GATHER: dict[str, Form] = {
    "ring": _ring_all_gather,
    "direct": _direct_all_gather,
    "halving_doubling": _bruck,
    "tree": _tree_all_gather,
    "server": _server_all_gather,
}
BROADCAST: dict[str, Form] = {
    "ring": _chain_broadcast,
    "halving_doubling": _tree_broadcast,
    "tree": _tree_broadcast,
    "server": _server_broadcast,
    "gloo": _tree_broadcast,
}


def all_reduce_seconds(algorithm: str, team: Team, size: Tensor) -> Tensor:
    """The seconds of a mean or a sum of payloads of so many bytes, `[M]`."""
    return _of(ALL_REDUCE[algorithm], team, size)


def all_gather_seconds(algorithm: str, team: Team, size: Tensor) -> Tensor:
    """The seconds until everyone has everyone's payload of so many bytes, `[M]`."""
    return _of(ALL_GATHER[algorithm], team, size)


def broadcast_seconds(algorithm: str, team: Team, size: Tensor) -> Tensor:
    """The seconds until everyone has what the first participant sends."""
    return _of(BROADCAST[algorithm], team, size)


def reduce_scatter_seconds(team: Team, size: Tensor) -> Tensor:
    """The seconds until each participant has its part of the sum: half a ring all-reduce."""
    return _of(ALL_REDUCE["ring"], team, size) / 2


def server_seconds(team: Team, size: Tensor, up: bool = True, down: bool = True) -> Tensor:
    """The seconds until the server has the participants' payloads, and until they have what it sends."""
    total = torch.zeros_like(size)
    for there, paces in ((up, team.up), (down, team.down)):
        total = total + team.to_server(size, paces) if there else total
    return total


def _of(form: Form, team: Team, size: Tensor) -> Tensor:
    return form(team, size) if team.n > 1 else torch.zeros_like(size)
