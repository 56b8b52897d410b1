"""The bytes that a process must hand to torch.distributed, from payloads and partitions alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vecgym.collectives.base import T, payload_bytes
from vecgym.collectives.distributed import DistributedCollectives, Wire
from vecgym.collectives.topology import Groups, Mixing


class AccountedCollectives(DistributedCollectives):
    """Says, from payloads and partitions alone, how many bytes this process must hand to torch.distributed."""

    def __init__(self, num_nodes: int, wire: Wire, *, exact: bool) -> None:
        super().__init__(num_nodes, wire, exact=exact)
        self.expected_bytes = 0
        self.handed_before = wire.handed_bytes

    def _say(self, text: str) -> None:
        """Every process must be about to exchange the same: torch.distributed would wait, or mix it up, or abort."""
        super()._say(text)
        self.wire.agree(text)

    def _expect(self, x: Any, times: int, wide: bool = False) -> None:
        """The payload of what is not the same on every node, so often; with `exact`, that of each node here."""
        tensors = [x] if isinstance(x, Tensor) else list(x.values())
        own = {str(i): y for i, y in enumerate(tensors) if wide or not self._same_on_all(y)}
        if self.wire.num_processes > 1:
            self.expected_bytes += payload_bytes(own) * (self.num_local if self.exact else times)

    def _islands(self, groups: Groups | None) -> int:
        """The groups that have members here and elsewhere."""
        if groups is None:
            return 1
        here = [[self._is_here(int(node)) for node in group] for group in groups]
        return sum(any(members) and not all(members) for members in here)

    def mean(
        self, x: T, groups: Groups | None = None, weights: Sequence[float] | None = None, *, inplace: bool = False
    ) -> T:
        self._expect(x, self._islands(groups), wide=weights is not None)
        return super().mean(x, groups, weights, inplace=inplace)

    def server_mean(self, x: T, participants: Sequence[int], weights: Sequence[float] | None = None) -> T:
        self._expect(x, 1, wide=weights is not None or len(participants) < self.num_nodes)
        return super().server_mean(x, participants, weights)

    def server_sum(self, x: T, participants: Sequence[int], weights: Sequence[float] | None = None) -> T:
        self._expect(x, 1, wide=weights is not None or len(participants) < self.num_nodes)
        return super().server_sum(x, participants, weights)

    def server_gather(self, x: T, participants: Sequence[int] | None = None) -> T:
        self._expect(x, self.num_local)
        return super().server_gather(x, participants)

    def sum(self, x: T, groups: Groups | None = None) -> T:
        self._expect(x, self._islands(groups))
        return super().sum(x, groups)

    def all_gather(self, x: T, *, inplace: bool = False) -> T:
        self._expect(x, self.num_local)
        return super().all_gather(x, inplace=inplace)

    def broadcast(self, x: T, src: int) -> T:
        self._expect(x, int(self._is_here(src)))
        return super().broadcast(x, src)

    def permute(self, x: T, source: Sequence[int] | Tensor) -> T:
        order = torch.as_tensor(source).tolist()
        self._expect(x, sum(self._is_here(j) and not self._is_here(i) for i, j in enumerate(order)))
        return super().permute(x, source)

    def mix(self, x: T, weights: Tensor | Mixing, inplace: bool = False) -> T:
        matrix = weights.weights if isinstance(weights, Mixing) else weights
        takers = {(j, i // self.num_local) for i, j in matrix.nonzero().tolist() if not self._is_here(i)}
        self._expect(x, sum(self._is_here(j) for j, _ in takers))
        return super().mix(x, weights, inplace)
