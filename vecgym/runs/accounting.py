"""The bytes that a process must hand to torch.distributed, derived from payloads and participants alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from vecgym.collectives import Collectives
from vecgym.collectives.base import T, payload_bytes
from vecgym.collectives.distributed import DistributedCollectives, Wire
from vecgym.collectives.topology import Links


class AccountedCollectives(DistributedCollectives):
    """Count the bytes that this process must hand to torch.distributed: the payload, for each time that it crosses."""

    def __init__(self, num_nodes: int, wire: Wire, *, exact: bool) -> None:
        super().__init__(num_nodes, wire, exact=exact)
        self.expected_bytes = 0
        self.handed_before = wire.handed_bytes
        self._crossings = 0  # of the operation that was announced last

    def _announce(self, operation: str, x: Any, who: Any = None) -> None:
        super()._announce(operation, x, who)
        self._crossings = self.num_local if self.exact else self._crossings_of(operation, who)

    def _say(self, text: str) -> None:
        """Make sure that every process is about to do the same: torch.distributed would wait, or mix it up."""
        super()._say(text)
        self.wire.agree(text)

    def _apply(self, x: T, operation: Callable[[Collectives, Tensor], Tensor]) -> T:
        if not isinstance(x, Tensor) and self.wire.num_processes > 1:  # a tensor comes back as a tree of one
            per_node = {name: y for name, y in x.items() if not self._same_on_all(y)}
            self.expected_bytes += self._crossings * payload_bytes(per_node)
        return super()._apply(x, operation)

    def _crossings_of(self, operation: str, who: Any) -> int:
        """Return how often a node's payload leaves this process when torch.distributed reduces."""
        if operation in ("all_gather", "server_gather"):
            return self.num_local
        if operation == "broadcast":
            source = who[0][0]
            return int(self._is_here(source))
        if isinstance(who, Links):  # once for each other process that takes a node's value
            pairs = [(sender, receiver) for sender, receiver in who.pairs if self._is_here(sender)]
            return len({(s, r // self.num_local) for s, r in pairs if not self._is_here(r)})
        if isinstance(who, tuple) and operation in ("mean", "sum"):  # once for each island with members elsewhere
            here = [[self._is_here(node) for node in island] for island in who]
            return sum(any(members) and not all(members) for members in here)
        return 1
