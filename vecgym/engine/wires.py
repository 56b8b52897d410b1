"""The links between nodes and a server, and until when each is taken.

>>> wires = Wires(num_bytes=1.0, up=[2.0, 2.0], down=[1.0, 1.0], latency=[0.5, 0.5], server=3.0)
>>> links = Links(wires, num_nodes=2)
>>> links.up(0, ready=0.0), links.up(1, ready=0.0), links.down(0, ready=4.0)
(3.5, 6.5, 7.5)
"""

from __future__ import annotations

import copy
from collections import ChainMap
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Wires:
    """The links between the nodes and a server: each end serves one message at a time in each direction.

    Each end is taken for its own time, the message's bytes times its own seconds a byte, from when the message is ready
    and that end is free: who sends slowly holds up nobody else. The message is there a latency after the later of both.

    Attributes:
        num_bytes: of a message, up and down.
        up, down: seconds a byte of each node's link.
        latency: seconds, of each node's.
        server: seconds a byte of the server's link.
    """

    num_bytes: float
    up: Sequence[float]
    down: Sequence[float]
    latency: Sequence[float]
    server: float = 0.0

    def sending(self, node: int, share: float = 1.0) -> float:
        """Return how long a node's link is taken by a message, or a share of it, up."""
        return share * self.num_bytes * self.up[node]

    def receiving(self, node: int, share: float = 1.0) -> float:
        """Return how long it is, down."""
        return share * self.num_bytes * self.down[node]

    def serving(self, share: float = 1.0) -> float:
        """Return how long the server's is, in either direction."""
        return share * self.num_bytes * self.server

    def swapping(self, node: int, other: int) -> float:
        """Return how long the links of two nodes are when they swap messages: as long as the slowest end needs."""
        return max(*map(self.sending, (node, other)), *map(self.receiving, (node, other)))

    @classmethod
    def none(cls, num_nodes: int) -> Wires:
        """Links on which messages take no time."""
        none = (0.0,) * num_nodes
        return cls(0.0, none, none, none)


@dataclass
class Links:
    """Until when each end of the wires is taken."""

    wires: Wires
    num_nodes: int
    node_up: MutableMapping[int, float] = field(init=False)
    node_down: MutableMapping[int, float] = field(init=False)
    server_in: float = 0.0
    server_out: float = 0.0

    def __post_init__(self) -> None:
        self.node_up, self.node_down = (dict.fromkeys(range(self.num_nodes), 0.0) for _ in range(2))

    def ahead(self) -> Links:
        """Return links on which messages can be tried: what these send leaves the links themselves as they are.

        >>> links = Links(Wires(1.0, up=[2.0], down=[1.0], latency=[0.0]), num_nodes=1)
        >>> links.ahead().up(0, ready=0.0), links.up(0, ready=0.0)
        (2.0, 2.0)
        """
        tried = copy.copy(self)
        tried.node_up, tried.node_down = ChainMap({}, self.node_up), ChainMap({}, self.node_down)
        return tried

    def up(self, node: int, ready: float, share: float = 1.0) -> float:
        """Send a movement, or a share of it; return when it is at the server."""
        wires = self.wires
        self.node_up[node] = max(ready, self.node_up[node]) + wires.sending(node, share)
        self.server_in = max(ready, self.server_in) + wires.serving(share)
        return max(self.node_up[node], self.server_in) + wires.latency[node]

    def swap(self, node: int, other: int, ready: float) -> float:
        """Let two nodes send each other a message of `num_bytes`; return when both are there.

        Both directions go at once, at the pace of the slowest of the four ends, when all of these are free.

        >>> Links(Wires(1.0, up=[2.0, 1.0], down=[1.0, 3.0], latency=[0.5, 0.1]), num_nodes=2).swap(0, 1, ready=1.0)
        4.5
        """
        wires, ends = self.wires, (self.node_up, self.node_down)
        end = max(ready, *(taken[i] for taken in ends for i in (node, other))) + wires.swapping(node, other)
        for taken in ends:
            taken[node] = taken[other] = end
        return end + max(wires.latency[node], wires.latency[other])

    def down(self, node: int, ready: float, share: float = 1.0) -> float:
        """Send the server's parameters, or a share of them; return when they are at the node."""
        wires = self.wires
        self.node_down[node] = max(ready, self.node_down[node]) + wires.receiving(node, share)
        self.server_out = max(ready, self.server_out) + wires.serving(share)
        return max(self.node_down[node], self.server_out) + wires.latency[node]
