"""The links between nodes and a server, and until when each is taken.

>>> wires = Wires(num_bytes=1.0, up=[2.0, 2.0], down=[1.0, 1.0], latency=[0.5, 0.5], server=3.0)
>>> links = Links(wires, num_nodes=2)
>>> links.up(0, ready=0.0), links.up(1, ready=0.0), links.down(0, ready=4.0)
(3.5, 6.5, 7.5)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Wires:
    """The links between the nodes and a server: each end serves one message at a time in each direction.

    A message takes its bytes times the slower of the two ends' seconds a byte, and is there a latency later.

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
    node_up: list[float] = field(init=False)
    node_down: list[float] = field(init=False)
    server_in: float = 0.0
    server_out: float = 0.0

    def __post_init__(self) -> None:
        self.node_up, self.node_down = [0.0] * self.num_nodes, [0.0] * self.num_nodes

    def up(self, node: int, ready: float, share: float = 1.0) -> float:
        """Send a movement, or a share of it; return when it is at the server."""
        wires = self.wires
        took = share * wires.num_bytes * max(wires.up[node], wires.server)
        end = max(ready, self.node_up[node], self.server_in) + took
        self.node_up[node] = self.server_in = end
        return end + wires.latency[node]

    def swap(self, node: int, other: int, ready: float) -> float:
        """Let two nodes send each other a message of `num_bytes`; return when both are there.

        Both directions go at once, at the pace of the slowest of the four ends, when all of these are free.

        >>> Links(Wires(1.0, up=[2.0, 1.0], down=[1.0, 3.0], latency=[0.5, 0.1]), num_nodes=2).swap(0, 1, ready=1.0)
        4.5
        """
        wires, ends = self.wires, (self.node_up, self.node_down)
        took = wires.num_bytes * max(wires.up[node], wires.up[other], wires.down[node], wires.down[other])
        end = max(ready, *(taken[i] for taken in ends for i in (node, other))) + took
        for taken in ends:
            taken[node] = taken[other] = end
        return end + max(wires.latency[node], wires.latency[other])

    def down(self, node: int, ready: float, share: float = 1.0) -> float:
        """Send the server's parameters, or a share of them; return when they are at the node."""
        wires = self.wires
        took = share * wires.num_bytes * max(wires.down[node], wires.server)
        end = max(ready, self.server_out, self.node_down[node]) + took
        self.node_down[node] = self.server_out = end
        return end + wires.latency[node]
