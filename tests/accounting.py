"""The bytes that a process must hand to torch.distributed, derived from payloads and participants alone.

`accounted` is `vecgym.runs.verification.compare`, which fails at the first collective before which these bytes are not
those that the wire has counted.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from torch import Tensor

from vecgym.collectives.base import T, payload_bytes
from vecgym.collectives.distributed import DistributedCollectives, tensors_text
from vecgym.collectives.topology import Links
from vecgym.collectives.wire import Wire
from vecgym.runs import verification
from vecgym.runs.verification import Check, VerifyOptions


def accounted(options: VerifyOptions, wire: Wire, *, exact: bool) -> Check:
    made: list[AccountedCollectives] = []

    def collectives(num_nodes: int, wire: Wire, *, exact: bool) -> AccountedCollectives:
        made.append(AccountedCollectives(num_nodes, wire, exact=exact))
        return made[-1]

    with mock.patch.object(verification, "DistributedCollectives", collectives):
        check = verification.compare(options, wire, exact=exact)
    assert [comm.bytes_apart for comm in made] == [0], "after the last collective"
    return check


class AccountedCollectives(DistributedCollectives):
    """Count the bytes that this process must hand to torch.distributed: the payload, for each time that it crosses."""

    def __init__(self, num_nodes: int, wire: Wire, *, exact: bool) -> None:
        super().__init__(num_nodes, wire, exact=exact)
        self.expected_bytes = 0
        self.handed_before = wire.handed_bytes
        self._crossings = 0  # of the operation that was announced last
        self._whole = self  # which counts for those of some of its nodes too, copies of it

    @property
    def bytes_apart(self) -> int:
        """The bytes that this process has handed over beyond those it must."""
        return self.wire.handed_bytes - self.handed_before - self.expected_bytes

    def _announce(self, operation: str, x: Any, who: Any = None) -> None:
        super()._announce(operation, x, who)
        # Every process is about to do the same: torch.distributed would wait, or mix it up.
        self.wire.agree(f"{operation} at step {self.step} of {tensors_text(x)}")
        apart = self._whole.bytes_apart
        assert apart == 0, f"before {operation} at step {self.step}: {apart} bytes"
        self._crossings = self._rows_gathered() if self.exact else self._crossings_of(operation, who)

    def _apply(self, x: T, operation: Any) -> T:
        if not isinstance(x, Tensor) and self.wire.num_processes > 1:  # a tensor comes back as a tree of one
            _, per_node = self._split(x)
            self._whole.expected_bytes += self._crossings * payload_bytes(per_node)
        return super()._apply(x, operation)

    def _rows_gathered(self) -> int:
        """Return how many rows this process hands over to be gathered."""
        return 0 if self._sends_nothing else max(map(len, self.parts))

    def _crossings_of(self, operation: str, who: Any) -> int:
        """Return how often a node's payload leaves this process when torch.distributed reduces."""
        if operation in ("all_gather", "server_gather"):
            return self._rows_gathered()
        if operation == "broadcast":
            source = who[0][0]
            return int(self._holds(source))
        if isinstance(who, Links):  # once for each other process that takes a node's value
            pairs = [(sender, receiver) for sender, receiver in who.pairs if self._holds(sender)]
            return len({(s, self.process_of(r)) for s, r in pairs if not self._holds(r)})
        if isinstance(who, tuple) and operation in ("mean", "sum"):  # once for each island with members elsewhere
            here = [[self._holds(node) for node in island] for island in who]
            return sum(any(members) and not all(members) for members in here)
        return 0 if self._sends_nothing else 1
