"""The links between nodes: their bandwidths and latencies."""

from __future__ import annotations

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
from vecgym.core.objects import altered

BITS_PER_BYTE = 8
BUCKET = "bytes of a message; 0: one per tensor, math.inf: one per exchange"


class Network:
    """Bandwidths and latencies of the links, and the algorithms of the collectives.

    Every node has one link, with a queue in each direction. A message from node i to node j is sent at the slower of
    i's uplink and j's downlink, and arrives a latency after it has left. With a matrix `[K, K]`, each pair has a link
    of its own, and a node sends to several others in parallel.

    Args:
        bandwidth: bits per second, or a text such as "1 Gbit/s" or "100 MB/s": one for all links; `[K]`, of each node's
            link, up and down; or `[K, K]`, from the node of the row to that of the column. `math.inf` is allowed.
        latency: one-way latency, half of a ping's time: seconds, at most 10, or a text with a unit, such as "50 ms".
            One number; `[K]`, where the larger of a link's two ends counts; or `[K, K]`.
        up, down: the bandwidths of uplinks and downlinks, if they differ, in place of `bandwidth`: a number or `[K]`.
        all_reduce: the algorithm of means and sums: "ring", "halving_doubling", "tree", "server", or "gloo", as in
            `torch.distributed` on CPUs; `vecgym.clock.cost` has the formulas. With a matrix, the ring has a good order,
            not always the best: nearest neighbours, then 2-opt, once for each group of nodes.
        all_gather: likewise, except "gloo"; or "direct", where every node sends to all others at once. "server" goes
            through a store, as in Templar: a payload of b bytes is uploaded once, and (n - 1) b are downloaded, where
            in a ring, or directly, (n - 1) b are uploaded too. `routes` tells this to the ledger of a run.
        bucket_bytes: tensors of an exchange are joined into messages, last tensor first; a message is complete once it
            reaches this size. 0: a message per tensor, as EXO Gym, diloco-sim and torchft send by default;
            `math.inf`: one per exchange, the best case. See `vecgym.guide.clock`.
        server_bandwidth: of a server's own link, which may be the bottleneck. A node reaches the server over its own
            link; with a matrix, as slowly as its slowest pair.

    Raises:
        ValueError, TypeError: for values that are not allowed.

    >>> Network(1e9, 0.05), Network(up="100 Mbit/s", down="1 Gbit/s")
    (Network(1 Gbit/s, latency=50 ms), Network(up=100 Mbit/s, down=1 Gbit/s))
    >>> Network(1e9, 0.5).seconds("mean", 125e6, num_nodes=4)  # 2 * 3 * 0.5 s, and 2 * 3 / 4 * 1 s
    4.5
    """

    @check.strict
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
        self.server_bandwidth = float(numbers("server_bandwidth", server_bandwidth, bits_per_second, dims=0))
        self.num_nodes = self._size()

    @classmethod
    def regions(cls, sizes: Sequence[int], inside: Any, between: tuple[Any, Any], **options: Any) -> Network:
        """Make a network of regions: fast links within each, slow ones between them.

        Args:
            sizes: nodes in each region; the first region has the first nodes.
            inside: (bandwidth, latency) of the links within a region, or a list of such pairs, one for each region.
            between: (bandwidth, latency) of a link between nodes of different regions.
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
        bandwidth.fill_diagonal_(math.inf)
        return cls(math.inf, **options)._changed(bandwidth=bandwidth, latency=latency.fill_diagonal_(0.0))

    def seconds(self, operation: str, payload_bytes: float, num_nodes: int) -> float:
        """Return the seconds of one collective among the first `num_nodes` nodes.

        Args:
            operation: "mean", "sum", "all_gather", "reduce_scatter", "broadcast" (from the first), "server_mean",
                "server_sum", "server_gather" or "server_send".
            payload_bytes: the payload of one participant.
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
        """{operation: route} of the collectives whose bytes on a node's link differ from a ring's; see `Transfer`.

        >>> Network(1e9, all_gather="server").routes
        {'all_gather': 'server'}
        """
        reduced = {"mean": self.all_reduce, "sum": self.all_reduce, "broadcast": self.all_reduce}
        routes = {name: route for name, route in reduced.items() if route == "server"}
        return routes | ({"all_gather": self.all_gather} if self.all_gather in ("server", "tree") else {})

    def within(self, members: Sequence[int]) -> Network:
        """Return the network between some of the nodes.

        >>> Network([1e9, 1e8, 1e7], 0.05).within([0, 2])
        Network([2] of 10 Mbit/s to 1 Gbit/s, latency=50 ms)
        """
        check.instance("members", members, (list, tuple, range), "the ids of nodes, such as [0, 2]")
        num_nodes = 2**31 if self.num_nodes is None else self.num_nodes
        at = torch.tensor([check.index("members", node, num_nodes) for node in members], dtype=torch.long)
        several = {name: x for name, x in self._links().items() if x.dim() > 0}
        return self._changed(**{name: x[at] if x.dim() == 1 else x[at[:, None], at] for name, x in several.items()})

    def _changed(self, **attributes: Any) -> Network:
        """Return a copy with other attributes.

        >>> Network(1e9, 0.05)._changed(all_reduce="tree")
        Network(1 Gbit/s, latency=50 ms, all_reduce='tree')
        """
        network = altered(self, **attributes)
        network.num_nodes = network._size()
        return network

    def check(self, num_nodes: int) -> None:
        """Raise a ValueError unless it fits this number of nodes.

        >>> Network([1e9, 1e8]).check(3)
        Traceback (most recent call last):
        ...
        ValueError: the network has 2 nodes and the run has 3: give one bandwidth and one latency, or [3].
        """
        check.fits("the network has", self.num_nodes, num_nodes, f"one bandwidth and one latency, or [{num_nodes}]")

    def _links(self) -> dict[str, Tensor]:
        return {name: x for name in ("bandwidth", "up", "down", "latency") if (x := vars(self)[name]) is not None}

    def _size(self) -> int | None:
        sizes = {name: len(x) for name, x in self._links().items() if x.dim() > 0}
        if len(set(sizes.values())) > 1:
            lengths = ", ".join(f"{name} of {size} nodes" for name, size in sizes.items())
            raise ValueError(f"{lengths}: give all of them for the same number of nodes.")
        return next(iter(sizes.values()), None)

    def __repr__(self) -> str:
        links = self._links()
        links.pop("latency")
        shown = {name: readable_span(x, readable_bandwidth) for name, x in links.items()}
        shown |= {"latency": readable_span(self.latency, readable_time)} if bool((self.latency > 0).any()) else {}
        shown |= {name: repr(x) for name, x in vars(self).items() if name.startswith("all_") and x != "ring"}
        shown |= {} if self.bucket_bytes == BUCKET_BYTES else {"bucket_bytes": f"{self.bucket_bytes:g}"}
        if self.server_bandwidth != math.inf:
            shown["server_bandwidth"] = readable_bandwidth(self.server_bandwidth)
        return f"Network({', '.join(f'{name}={text}' for name, text in shown.items()).removeprefix('bandwidth=')})"


class Routes:
    """A network of K nodes, and the seconds of collectives on it. Teams of nodes are computed once.

    Attributes:
        up, down: seconds per byte of each node's link, `[K]`.
        lags: the latency of each node's link in seconds, `[K]`.
        latency, pace: seconds, and seconds per byte, of each pair, `[K, K]`; None if they follow from those of the
            nodes. Otherwise `up`, `down` and `lags` are those of a node's slowest pair.
    """

    def __init__(self, network: Network, num_nodes: int) -> None:
        network.check(num_nodes)
        self.network, self.num_nodes = network, num_nodes
        bandwidth = network.bandwidth
        self.latency = network.latency if network.latency.dim() == 2 else None
        self.lags = network.latency.expand(num_nodes) if self.latency is None else self.latency.amax(1)
        self.pace = None if bandwidth is None or bandwidth.dim() < 2 else BITS_PER_BYTE / bandwidth
        if self.pace is None:
            ends = (bandwidth, bandwidth) if bandwidth is not None else (network.up, network.down)
            self.up, self.down = ((BITS_PER_BYTE / x).expand(num_nodes) for x in ends if x is not None)
        else:
            self.up, self.down = self.pace.amax(1), self.pace.amax(0)  # of the slowest pair; the diagonal is 0
        self.server_pace = BITS_PER_BYTE / network.server_bandwidth
        self._teams: dict[object, Team] = {}

    def links(self, senders: Tensor, receivers: Tensor) -> tuple[Tensor, Tensor]:
        """Return (latency, seconds per byte) of the link between each of these pairs."""
        if self.latency is not None:
            latency = self.latency[senders, receivers]
        else:
            latency = torch.maximum(self.lags[senders], self.lags[receivers])
        if self.pace is not None:
            return latency, self.pace[senders, receivers]
        return latency, torch.maximum(self.up[senders], self.down[receivers])

    def team(self, members: tuple[int, ...]) -> Team:
        """Return these nodes as the participants of a collective."""
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
        """Return the seconds of a collective of a team, for payloads of these sizes in bytes, `[M]`."""
        formulas = cost.FORMULAS[check.choice("operation", operation, cost.FORMULAS)]
        if team.n == 1 and not operation.startswith("server"):
            return torch.zeros_like(size)
        algorithm = self.network.all_gather if operation == "all_gather" else self.network.all_reduce
        return formulas[algorithm](team, size)


def _pair(name: str, pair: Any) -> tuple[float, float]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"{name}={pair!r} must be a pair (bandwidth, latency), such as (1e9, 0.05).")
    bandwidth, latency = (numbers(name, *each, dims=0) for each in zip(pair, (bits_per_second, seconds)))
    return float(bandwidth), float(latency)
