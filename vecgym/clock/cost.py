"""The seconds of one collective, in closed form.

With S bytes of payload, n participants, latency a and a bandwidth of B bytes per second:

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

Where links differ, each round takes as long as its slowest link. A ring is built from nearest neighbours and improved
by 2-opt, which reverses a stretch of it where that makes its slowest link faster. Each group of nodes has one order,
chosen for the median size of the first messages that it exchanges.

"gloo" is the ring of `torch.distributed` on CPUs: its n chunks are sent in k = max(2, ceil(S / n / 1 MiB)) segments,
s = S / (n k B) seconds each, m = (n - 1) k - 1 after the first in each of both phases. Two are in flight at a time, and
the sender waits until the receiver has requested each, so that a latency counts twice. The ring follows the order of
the nodes. A payload of fewer than n k values takes less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

GLOO_SEGMENT = 2**20  # bytes, at most
Pairs = list[tuple[int, int]]  # senders and receivers


@dataclass(eq=False)
class Team:
    """The links between the participants of a collective: x bytes from i to j take `latency[i, j] + x * pace[i, j]`.

    Args:
        latency, pace: `[n, n]`, seconds, and seconds per byte; 0 on the diagonal.
        up, down: seconds per byte of each participant's link to a server, and back, `[n]`.
        server_latency: the largest latency to the server, in seconds.
        server_pace: seconds per byte of the server's own link.
        by_pair: whether each pair has a link of its own, so that a node sends to several others in parallel.

    >>> from vecgym.clock.network import Network, Routes
    >>> team = Routes(Network(8e9, latency=0.5), 4).team((0, 1, 2, 3))
    >>> ALL_REDUCE["ring"](team, torch.tensor([8e9]))  # 6 * 0.5 s, and 1.5 * 8 s
    tensor([15.], dtype=torch.float64)
    >>> team.ring(torch.tensor([0.0, 8e9]))
    tensor([0.5000, 8.5000], dtype=torch.float64)
    """

    latency: Tensor
    pace: Tensor
    up: Tensor
    down: Tensor
    server_latency: float
    server_pace: float
    by_pair: bool
    _ring: Pairs = field(default_factory=list, init=False)

    @property
    def n(self) -> int:
        """The number of participants."""
        return len(self.up)

    def ring(self, size: Tensor) -> Tensor:
        """Return the seconds of messages of these sizes, `[M]`, over the slowest link of the ring."""
        if not self._ring:
            order = ring_order(self.latency + size.median() * self.pace)
            self._ring = list(zip(order.tolist(), order.roll(-1).tolist()))
        return self.round(self._ring, size)

    def round(self, pairs: Pairs, size: Tensor) -> Tensor:
        """Return the seconds of messages of these sizes, `[M]`, over all of these links at once."""
        senders, receivers = map(list, zip(*pairs))
        return (self.latency[senders, receivers] + size[:, None] * self.pace[senders, receivers]).amax(1)

    def rounds(self, rounds: list[tuple[Pairs, float]], size: Tensor) -> Tensor:
        """Return the seconds of successive rounds, each given by its links and how many times `size` they carry."""
        return sum((self.round(pairs, times * size) for pairs, times in rounds), torch.zeros_like(size))

    def to_server(self, size: Tensor, paces: Tensor) -> Tensor:
        """Return the seconds until all participants' messages reach the server, or the server's reach them."""
        return self.server_latency + size * max(float(paces.max()), len(paces) * self.server_pace)


def ring_order(cost: Tensor) -> Tensor:
    """Order the nodes around a ring so that its most expensive link is cheap: nearest neighbours, then 2-opt.

    Start with the best of the n nearest-neighbour rings. Reverse stretches of it as long as that makes its most
    expensive link cheaper.

    Args:
        cost: `[n, n]`, of the link from i to j.

    Returns:
        The nodes in the order of the ring, `[n]`.

    >>> ring_order(torch.tensor([[0.0, 9.0, 1.0], [1.0, 0.0, 9.0], [9.0, 1.0, 0.0]]))
    tensor([2, 1, 0])
    """
    apart = cost[~torch.eye(len(cost), dtype=torch.bool)]
    if (apart == apart[:1]).all():
        return torch.arange(len(cost))
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
    """Return the costs of the links of rings, `[..., n]`."""
    return cost[rings, rings.roll(-1, -1)]


def _nearest_neighbours(cost: Tensor) -> Tensor:
    starts = torch.arange(len(cost))
    nearest, unvisited = starts, torch.ones_like(cost, dtype=torch.bool)
    steps = [starts]
    for _ in starts[1:]:
        unvisited[starts, nearest] = False
        nearest = cost[nearest].masked_fill(~unvisited, torch.inf).argmin(1)
        steps.append(nearest)
    rings = torch.stack(steps, 1)
    return rings[int(_around(cost, rings).amax(1).argmin())]


Formula = Callable[[Team, Tensor], Tensor]  # -> the seconds of messages of these sizes, [M]


def _tree(n: int, values: bool = False) -> list[tuple[Pairs, float]]:
    """Return the rounds of a binomial tree towards node 0: senders pass on their sum or, with `values`, all values."""
    rounds: list[tuple[Pairs, float]] = []
    for k in range((n - 1).bit_length()):
        pairs = [(i, i - 2**k) for i in range(2**k, n, 2 ** (k + 1))]
        rounds.append((pairs, min(2**k, n - 2**k) if values else 1))
    return rounds


def _from_root(n: int, times: int = 1) -> list[tuple[Pairs, float]]:
    """Return the rounds of the same tree, from node 0 outwards."""
    return [([(j, i) for i, j in pairs], times) for pairs, _ in _tree(n)]


def _ring_all_reduce(team: Team, size: Tensor) -> Tensor:
    return 2 * (team.n - 1) * team.ring(size / team.n)


def _halving_doubling(team: Team, size: Tensor) -> Tensor:
    """Reduce-scatter with partners at distance 1, 2, 4 ..., then back; surplus nodes send before, receive after."""
    core = 2 ** (team.n.bit_length() - 1)
    halves = [([(i, i ^ 2**k) for i in range(core)], 0.5 ** (k + 1)) for k in range(core.bit_length() - 1)]
    total = 2 * team.rounds(halves, size)
    if team.n > core:
        total = total + team.round([(i, i - core) for i in range(core, team.n)], size)
        total = total + team.round([(i - core, i) for i in range(core, team.n)], size)
    return total


def _gloo_all_reduce(team: Team, size: Tensor) -> Tensor:
    """Reduce-scatter and all-gather: segment i leaves after i - 1, once its receiver has i - 2 and has requested i."""
    receivers = torch.arange(team.n)
    senders = receivers.roll(-1)
    segments = (size / (team.n * GLOO_SEGMENT)).ceil().clamp(min=2)  # of each chunk
    carry = size[:, None] / (team.n * segments[:, None]) * team.pace[senders, receivers]
    request = carry + team.latency[senders, receivers] + team.latency[receivers, senders]
    carry, request = carry.amax(1), request.amax(1)
    later = (team.n - 1) * segments - 1
    return 2 * (request + later.div(2, rounding_mode="floor") * torch.maximum(request, 2 * carry) + later % 2 * carry)


def _direct_all_gather(team: Team, size: Tensor) -> Tensor:
    """Every node sends to all others at once."""
    if team.by_pair:
        return team.round([(i, j) for i in range(team.n) for j in range(team.n) if i != j], size)
    return team.latency.max() + (team.n - 1) * size * torch.maximum(team.up, team.down).max()


def _bruck(team: Team, size: Tensor) -> Tensor:
    """In round k each node sends all that it has, or what is still missing, to the node 2^k before it."""
    n, ks = team.n, range((team.n - 1).bit_length())
    return team.rounds([([(i, (i - 2**k) % n) for i in range(n)], min(2**k, n - 2**k)) for k in ks], size)


def _chain_broadcast(team: Team, size: Tensor) -> Tensor:
    whole = team.ring(size)  # first, since it determines the order of the ring
    return (team.n - 2) * team.ring(torch.zeros_like(size)) + whole


def _server(team: Team, size: Tensor) -> Tensor:
    return team.to_server(size, team.up) + team.to_server(size, team.down)


ALL_REDUCE: dict[str, Formula] = {
    "ring": _ring_all_reduce,
    "halving_doubling": _halving_doubling,
    "tree": lambda team, size: team.rounds(_from_root(team.n) + _tree(team.n), size),
    "server": _server,
    "gloo": _gloo_all_reduce,
}
ALL_GATHER: dict[str, Formula] = {
    "ring": lambda team, size: (team.n - 1) * team.ring(size),
    "direct": _direct_all_gather,
    "halving_doubling": _bruck,
    "tree": lambda team, size: team.rounds(_from_root(team.n, team.n) + _tree(team.n, values=True), size),
    "server": lambda team, size: team.to_server(size, team.up) + team.to_server(size * (team.n - 1), team.down),
}
BROADCAST: dict[str, Formula] = {
    **dict.fromkeys(ALL_REDUCE, lambda team, size: team.rounds(_from_root(team.n), size)),
    "ring": _chain_broadcast,
    "server": lambda team, size: team.to_server(size, team.up[:1]) + team.to_server(size, team.down[1:]),
}
# The seconds of each collective, operation -> algorithm -> formula, for two participants or more.
FORMULAS: dict[str, dict[str, Formula]] = {
    "mean": ALL_REDUCE,
    "sum": ALL_REDUCE,
    "all_gather": ALL_GATHER,
    "reduce_scatter": dict.fromkeys(ALL_REDUCE, lambda team, size: _ring_all_reduce(team, size) / 2),
    "broadcast": BROADCAST,
    "server_mean": dict.fromkeys(ALL_REDUCE, _server),
    "server_sum": dict.fromkeys(ALL_REDUCE, _server),
    "server_gather": dict.fromkeys(ALL_REDUCE, lambda team, size: team.to_server(size, team.up)),
    "server_send": dict.fromkeys(ALL_REDUCE, lambda team, size: team.to_server(size, team.down)),
}
