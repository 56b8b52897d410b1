"""Collectives without values: who sends how much to whom, and of what shape the results are."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vecgym.collectives.stacked import StackedCollectives
from vecgym.collectives.topology import Groups


class Announced(StackedCollectives):
    """Collectives that say what they send, and give back tensors of the right shape: no values are needed for that.

    >>> import torch
    >>> comm = Announced(4)
    >>> comm.mean(torch.empty(4, 3, device="meta")).shape, comm.ledger
    (torch.Size([1, 3]), Ledger(1 collectives, 18 bytes sent per node))
    """

    shapes_only = True

    def _sum(self, x: Tensor, groups: Groups | None, average: bool) -> Tensor:
        return x[:1] if groups is None else x

    def _all_gather(self, x: Tensor) -> Tensor:
        return self._expanded(x)[None]

    def _broadcast(self, x: Tensor, src: int) -> Tensor:
        return x[:1]

    def _permute(self, x: Tensor, source: Tensor) -> Tensor:
        return x

    def _mix(self, x: Tensor, weights: Tensor) -> Tensor:
        return self._expanded(x)

    def _own_storage(self, result: Any, x: Any, inplace: bool = False) -> Any:
        return result  # nothing is ever written into it
