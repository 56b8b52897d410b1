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

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

GLOO_SEGMENT = 2**20  # bytes, at most
Pairs = list[tuple[int, int]]  # senders and receivers


@dataclass(eq=False)
class Team:
    """The participants of a collective, by their links: x bytes from i to j take `latency[i, j] + x * pace[i, j]`.

    Args:
        latency, pace: `[n, n]`, seconds, and seconds a byte; 0 on the diagonal.
        up, down: seconds a byte of each one's link to a server, and back, `[n]`.
        server_latency: seconds, of the slowest way to the server.
        server_pace: seconds a byte of the server's own link.
        by_pair: whether each pair has a link of its own, so that what a node sends to several goes side by side.

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
        """How many they are."""
        return len(self.up)

    def ring(self, size: Tensor) -> Tensor:
        """The seconds of messages of so many bytes, `[M]`, over the slowest link of the ring."""
        if not self._ring:
            order = ring_order(self.latency + size.median() * self.pace)
            self._ring = list(zip(order.tolist(), order.roll(-1).tolist()))
        return self.round(self._ring, size)

    def round(self, pairs: Pairs, size: Tensor) -> Tensor:
        """The seconds of messages of so many bytes, `[M]`, over all of these links at once."""
        senders, receivers = map(list, zip(*pairs))
        return (self.latency[senders, receivers] + size[:, None] * self.pace[senders, receivers]).amax(1)

    def rounds(self, rounds: list[tuple[Pairs, float]], size: Tensor) -> Tensor:
        """The seconds of one round after the other: over which links, and how many times `size` goes over each."""
        return sum((self.round(pairs, times * size) for pairs, times in rounds), torch.zeros_like(size))

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


Form = Callable[[Team, Tensor], Tensor]  # the seconds of messages of so many bytes, [M]


def _tree(n: int, whole: bool = False) -> list[tuple[Pairs, float]]:
    """The rounds of a binomial tree towards node 0: who has the values of 2^k nodes hands on their sum, or all."""
    rounds: list[tuple[Pairs, float]] = []
    for k in range((n - 1).bit_length()):
        pairs = [(i, i - 2**k) for i in range(2**k, n, 2 ** (k + 1))]
        rounds.append((pairs, min(2**k, n - 2**k) if whole else 1))
    return rounds


def _from_root(n: int, times: int = 1) -> list[tuple[Pairs, float]]:
    """The rounds of the same tree from node 0 on."""
    return [([(j, i) for i, j in pairs], times) for pairs, _ in _tree(n)]


def _tree_broadcast(team: Team, size: Tensor) -> Tensor:
    return team.rounds(_from_root(team.n), size)


def _ring_all_reduce(team: Team, size: Tensor) -> Tensor:
    return 2 * (team.n - 1) * team.ring(size / team.n)


def _halving_doubling(team: Team, size: Tensor) -> Tensor:
    """Reduce-scatter with partners at distance 1, 2, 4 ..., and back; who is left over joins before, leaves after."""
    core = 2 ** (team.n.bit_length() - 1)
    halves = [([(i, i ^ 2**k) for i in range(core)], 0.5 ** (k + 1)) for k in range(core.bit_length() - 1)]
    total = 2 * team.rounds(halves, size)
    if team.n > core:
        total = total + team.round([(i, i - core) for i in range(core, team.n)], size)
        total = total + team.round([(i - core, i) for i in range(core, team.n)], size)
    return total


def _tree_all_reduce(team: Team, size: Tensor) -> Tensor:
    return team.rounds(_from_root(team.n) + _tree(team.n), size)


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


def _ring_all_gather(team: Team, size: Tensor) -> Tensor:
    return (team.n - 1) * team.ring(size)


def _direct_all_gather(team: Team, size: Tensor) -> Tensor:
    """Each sends to all others at once."""
    if team.by_pair:
        return team.round([(i, j) for i in range(team.n) for j in range(team.n) if i != j], size)
    return team.latency.max() + (team.n - 1) * size * torch.maximum(team.up, team.down).max()


def _bruck(team: Team, size: Tensor) -> Tensor:
    """In round k each passes on all that it has, at most what is missing, to the node 2^k before it."""
    n, ks = team.n, range((team.n - 1).bit_length())
    return team.rounds([([(i, (i - 2**k) % n) for i in range(n)], min(2**k, n - 2**k)) for k in ks], size)


def _tree_all_gather(team: Team, size: Tensor) -> Tensor:
    return team.rounds(_from_root(team.n, times=team.n) + _tree(team.n, whole=True), size)


def _chain_broadcast(team: Team, size: Tensor) -> Tensor:
    whole = team.ring(size)  # first, as it settles the order
    return (team.n - 2) * team.ring(torch.zeros_like(size)) + whole


def _server(team: Team, size: Tensor) -> Tensor:
    return team.to_server(size, team.up) + team.to_server(size, team.down)


ALL_REDUCE: dict[str, Form] = {
    "ring": _ring_all_reduce,
    "halving_doubling": _halving_doubling,
    "tree": _tree_all_reduce,
    "server": _server,
    "gloo": _gloo_all_reduce,
}
ALL_GATHER: dict[str, Form] = {
    "ring": _ring_all_gather,
    "direct": _direct_all_gather,
    "halving_doubling": _bruck,
    "tree": _tree_all_gather,
    "server": lambda team, size: team.to_server(size, team.up) + team.to_server(size * (team.n - 1), team.down),
}
BROADCAST: dict[str, Form] = {
    "ring": _chain_broadcast,
    "halving_doubling": _tree_broadcast,
    "tree": _tree_broadcast,
    "server": lambda team, size: team.to_server(size, team.up[:1]) + team.to_server(size, team.down[1:]),
    "gloo": _tree_broadcast,
}
# The seconds of each collective, operation -> algorithm -> form; one participant has nothing to send to others.
FORMS: dict[str, dict[str, Form]] = {
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
