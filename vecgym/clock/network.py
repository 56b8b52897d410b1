"""The links between nodes: how much they carry, and how long a message is under way."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vecgym.clock import cost
from vecgym.clock.cost import Team
from vecgym.clock.units import bits_per_second, numbers, readable_bandwidth, readable_span, readable_time
from vecgym.clock.units import latency as seconds
from vecgym.collectives.base import BUCKET_BYTES
from vecgym.core import check

BITS_PER_BYTE = 8
BUCKET = "bytes of a message; 0: one for each tensor, math.inf: one for each exchange"


class Network:
    """Bandwidths and latencies, and which algorithms carry the collectives.

    Every node has one link, a queue in each direction. A message from node i to node j goes at the slower of i's way up
    and j's way down, and is there a latency after it has left. With a matrix `[K, K]` each pair has a link of its own:
    what a node sends to several others at once goes side by side.

    Args:
        bandwidth: bits per second, or a text such as "1 Gbit/s" or "100 MB/s": one for all links; `[K]`, of each node's
            link, up and down; or `[K, K]`, from the node of the row to that of the column. `math.inf` is allowed.
        latency: seconds that a message is under way, half of what a ping takes, at most 10, or a text with its unit,
            such as "50 ms": one number; `[K]`, where of the two ends of a link the slower counts; or `[K, K]`.
        up, down: `[K]` or a number, in place of `bandwidth`, where they differ.
        all_reduce: how means and sums are taken: "ring", "halving_doubling", "tree", "server", or "gloo", as by
            `torch.distributed` on CPUs; `vecgym.clock.cost` has the formulas. With a matrix, the ring takes a good
            order, not always the best: nearest neighbours, then 2-opt, once for each group of nodes.
        all_gather: likewise, but for "gloo"; or "direct", from each node to each at once. "server" is through a store,
            as Templar's nodes do it: a payload of b bytes goes up once, and (n - 1) b come down, where in a ring, or
            directly, (n - 1) b go up too. `routes` says so to the ledger of a run.
        bucket_bytes: tensors of an exchange are joined into messages, from the last on, each complete with the tensor
            that takes it to this size or beyond. 0: a message for each tensor, as EXO Gym, diloco-sim and torchft send
            by themselves; `math.inf`: one for each exchange, the best case. See `vecgym.guide.clock`.
        server_bandwidth: of a server's own link, if it may become too narrow. A node reaches the server over its own
            link, with a matrix as it does the node that is hardest to reach.

    Raises:
        ValueError, TypeError: saying what is allowed.

    >>> Network(1e9, 0.05), Network(up="100 Mbit/s", down="1 Gbit/s")
    (Network(1 Gbit/s, latency=50 ms), Network(up=100 Mbit/s, down=1 Gbit/s))
    >>> Network(1e9, 0.5).seconds("mean", 125e6, num_nodes=4)  # 2 * 3 * 0.5 s, and 2 * 3 / 4 * 1 s
    4.5
    """

    def __init__(
        self,
        bandwidth: Any = None,
        latency: Any = 0.0,
        *,
        up: Any = None,
        down: Any = None,
        all_reduce: str = "ring",
        all_gather: str = "ring",
        bucket_bytes: float = BUCKET_BYTES,
        server_bandwidth: Any = math.inf,
    ) -> None:
        if (bandwidth is None) == (up is None and down is None) or (up is None) != (down is None):
            raise ValueError("give bandwidth, in bits per second, or both up and down.")
        self.bandwidth, self.up, self.down = (
            None if x is None else numbers(name, x, bits_per_second, dims, diagonal=math.inf)
            for name, x, dims in (("bandwidth", bandwidth, 2), ("up", up, 1), ("down", down, 1))
        )
        self.latency = numbers("latency", latency, seconds, dims=2)
        self.all_reduce = check.choice("all_reduce", all_reduce, tuple(cost.ALL_REDUCE))
        self.all_gather = check.choice("all_gather", all_gather, tuple(cost.ALL_GATHER))
        self.bucket_bytes = check.number("bucket_bytes", bucket_bytes, "[0, inf]", BUCKET)
        self.server_bandwidth = bits_per_second("server_bandwidth", server_bandwidth)
        self.num_nodes = self._size()

    @classmethod
    def regions(cls, sizes: Sequence[int], inside: Any, between: tuple[Any, Any], **options: Any) -> Network:
        """Regions of nodes: fast links within each, slow ones from each to the others.

        Args:
            sizes: nodes in each region; the first region has the first nodes.
            inside: (bandwidth, latency) of the links within a region, or a list of such pairs, one for each region.
            between: (bandwidth, latency) of a link between nodes of two regions.
            options: `all_reduce`, `all_gather`, `bucket_bytes`, `server_bandwidth`.

        >>> Network.regions([2, 1], inside=("400 Gbit/s", 1e-4), between=(1e9, 0.05)).latency.tolist()
        [[0.0, 0.0001, 0.05], [0.0001, 0.0, 0.05], [0.05, 0.05, 0.0]]
        """
        if not isinstance(sizes, (list, tuple)) or not sizes:
            raise TypeError(f"sizes={sizes!r} must be a list of the nodes in each region, such as [4, 4].")
        counts = torch.tensor([check.integer("sizes", size, what="nodes in a region") for size in sizes])
        pairs = inside if isinstance(inside, list) else [inside] * len(sizes)
        if len(pairs) != len(sizes):
            raise ValueError(f"inside has {len(pairs)} pairs and there are {len(sizes)} regions: give one for each.")
        far = _pair("between", between)
        within = torch.tensor([_pair("inside", pair) for pair in pairs], dtype=torch.float64)
        region = torch.arange(len(sizes)).repeat_interleave(counts)
        same = region[:, None] == region[None, :]
        bandwidth, latency = (torch.where(same, within[region, i, None], far[i]) for i in (0, 1))
        return cls(bandwidth, latency, **options)

    def seconds(self, operation: str, payload_bytes: float, num_nodes: int) -> float:
        """How long one collective of the first `num_nodes` nodes takes.

        Args:
            operation: "mean", "sum", "all_gather", "reduce_scatter", "broadcast" (of the first), "server_mean",
                "server_sum", "server_gather" or "server_send".
            payload_bytes: what one participant hands to it.
            num_nodes: n.

        >>> Network(8e9, 0.5).seconds("all_gather", 1e9, num_nodes=3)
        3.0
        """
        size = torch.tensor([check.number("payload_bytes", payload_bytes, "[0, inf)")], dtype=torch.float64)
        n = check.integer("num_nodes", num_nodes)
        routes = Routes(self, n if self.num_nodes is None else self.num_nodes)
        return float(routes.seconds(operation, routes.team(tuple(range(n))), size))

    @property
    def routes(self) -> dict[str, str]:
        """{operation: route} of what a node's link carries other bytes of than in a ring; see `Transfer`.

        >>> Network(1e9, all_gather="server").routes
        {'all_gather': 'server'}
        """
        reduced = {"mean": self.all_reduce, "sum": self.all_reduce, "broadcast": self.all_reduce}
        found = {name: route for name, route in reduced.items() if route == "server"}
        return found | ({"all_gather": self.all_gather} if self.all_gather in ("server", "tree") else {})

    def within(self, members: Sequence[int]) -> Network:
        """Return the network of some of the nodes.

        >>> Network([1e9, 1e8, 1e7], 0.05).within([0, 2])
        Network([2] of 10 Mbit/s to 1 Gbit/s, latency=50 ms)
        """
        check.instance("members", members, (list, tuple, range), "the ids of nodes, such as [0, 2]")
        known = 2**31 if self.num_nodes is None else self.num_nodes
        at = torch.tensor([check.index("members", node, known) for node in members], dtype=torch.long)
        found = copy.copy(self)
        for name, x in self._given().items():
            if x.dim() > 0:
                setattr(found, name, x[at] if x.dim() == 1 else x[at[:, None], at])
        found.num_nodes = found._size()
        return found

    def check(self, num_nodes: int) -> None:
        """Raise a ValueError unless it is a network of that many nodes.

        >>> Network([1e9, 1e8]).check(3)
        Traceback (most recent call last):
        ...
        ValueError: the network has 2 nodes and the run 3: give one bandwidth and one latency, or [3].
        """
        if self.num_nodes not in (None, num_nodes):
            raise ValueError(
                f"the network has {self.num_nodes} nodes and the run {num_nodes}: give one bandwidth and one latency, "
                f"or [{num_nodes}]."
            )

    def _given(self) -> dict[str, Tensor]:
        links = {"bandwidth": self.bandwidth, "up": self.up, "down": self.down, "latency": self.latency}
        return {name: x for name, x in links.items() if x is not None}

    def _size(self) -> int | None:
        sizes = {name: len(x) for name, x in self._given().items() if x.dim() > 0}
        if len(set(sizes.values())) > 1:
            said = ", ".join(f"{name} of {size} nodes" for name, size in sizes.items())
            raise ValueError(f"{said}: give all of them for the same number of nodes.")
        return next(iter(sizes.values()), None)

    def __repr__(self) -> str:
        parts = [
            ("" if name == "bandwidth" else f"{name}=") + readable_span(x, readable_bandwidth)
            for name, x in self._given().items()
            if name != "latency"
        ]
        parts += [f"latency={readable_span(self.latency, readable_time)}"] if bool((self.latency > 0).any()) else []
        parts += [f"{name}={x!r}" for name, x in (("all_reduce", self.all_reduce), ("all_gather", self.all_gather))
                  if x != "ring"]  # fmt: skip
        if self.bucket_bytes != BUCKET_BYTES:
            parts.append(f"bucket_bytes={self.bucket_bytes:g}")
        if self.server_bandwidth != math.inf:
            parts.append(f"server_bandwidth={readable_bandwidth(self.server_bandwidth)}")
        return f"Network({', '.join(parts)})"


class Routes:
    """A network of K nodes, and what collectives take on it, remembered.

    Attributes:
        up, down: seconds a byte of each node's link, `[K]`.
        lags: seconds of latency of each node's link, `[K]`.
        latency, pace: of each pair, `[K, K]`; None where they follow from the nodes'. If not, the above are those of
            a node's slowest pair.
    """

    def __init__(self, network: Network, num_nodes: int) -> None:
        network.check(num_nodes)
        self.network, self.num_nodes = network, num_nodes
        given = network.bandwidth
        self.latency = network.latency if network.latency.dim() == 2 else None
        self.lags = network.latency.expand(num_nodes) if self.latency is None else self.latency.amax(1)
        self.pace = None if given is None or given.dim() < 2 else BITS_PER_BYTE / given
        if self.pace is None:
            ends = (given, given) if given is not None else (network.up, network.down)
            self.up, self.down = ((BITS_PER_BYTE / x).expand(num_nodes) for x in ends if x is not None)
        else:
            self.up, self.down = self.pace.amax(1), self.pace.amax(0)  # of the slowest pair; the diagonal is 0
        self.server_pace = BITS_PER_BYTE / network.server_bandwidth
        self._teams: dict[object, Team] = {}

    def links(self, senders: Tensor, receivers: Tensor) -> tuple[Tensor, Tensor]:
        """(latency, seconds a byte) of the link between each of these pairs."""
        if self.latency is not None:
            latency = self.latency[senders, receivers]
        else:
            latency = torch.maximum(self.lags[senders], self.lags[receivers])
        if self.pace is not None:
            return latency, self.pace[senders, receivers]
        return latency, torch.maximum(self.up[senders], self.down[receivers])

    def team(self, members: tuple[int, ...]) -> Team:
        """These nodes as participants of a collective."""
        key: object = len(members) if self.network.num_nodes is None else members
        if key not in self._teams:
            at = torch.tensor(members)
            latency, pace = self.links(at[:, None], at[None, :])
            for matrix in (latency, pace):
                matrix.fill_diagonal_(0)
            self._teams[key] = Team(
                latency, pace, self.up[at], self.down[at], server_latency=float(self.lags[at].max()),
                server_pace=self.server_pace, by_pair=self.pace is not None,
            )  # fmt: skip
        return self._teams[key]

    def seconds(self, operation: str, team: Team, size: Tensor) -> Tensor:
        """How long a collective of a team takes, for payloads of so many bytes, `[M]`."""
        forms = cost.FORMS[check.choice("operation", operation, cost.FORMS)]
        if team.n == 1 and not operation.startswith("server"):
            return torch.zeros_like(size)
        algorithm = self.network.all_gather if operation == "all_gather" else self.network.all_reduce
        return forms[algorithm](team, size)


def _pair(name: str, pair: Any) -> tuple[float, float]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"{name}={pair!r} must be a pair (bandwidth, latency), such as (1e9, 0.05).")
    return bits_per_second(name, pair[0]), seconds(name, pair[1])
