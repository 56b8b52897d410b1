"""What SPARTA exchanges: the mean of some coordinates, and who chooses them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from vecgym.compat.exogym.base import CommunicationModule
from vecgym.compat.exogym.communicate import all_reduce, broadcast
from vecgym.compat.exogym.options import checked
from vecgym.core import check


class IndexSelector:
    """Which coordinates of a tensor are exchanged: here all. Node 0's answer counts."""

    @checked
    def __init__(self, p: float) -> None:
        self.p = p
        self.state: dict[Tensor, Any] = {}

    def get_indices(self, param: Tensor, iteration: int) -> Tensor:
        """A mask of `param`'s shape."""
        return torch.ones_like(param, dtype=torch.bool)

    @property
    def num_parts(self) -> int:
        return max(1, math.ceil(1 / self.p))


class RandomIndexSelector(IndexSelector):
    """Each coordinate with probability p."""

    def get_indices(self, param: Tensor, iteration: int) -> Tensor:
        return torch.bernoulli(torch.full(param.shape, self.p, device=param.device)).bool()


class ShuffledSequentialIndexSelector(IndexSelector):
    """One random order of each tensor, cut into ceil(1/p) chunks that are taken in turn."""

    def get_indices(self, param: Tensor, iteration: int) -> Tensor:
        count = param.numel()
        if param not in self.state and count:
            self.state[param] = torch.randperm(count, device=param.device)
        turn, (size, longer) = iteration % self.num_parts, divmod(count, self.num_parts)
        start = turn * size + min(turn, longer)  # the first `longer` chunks have one more
        mask = torch.zeros(count, dtype=torch.bool, device=param.device)
        if count:
            mask[self.state[param][start : start + size + (turn < longer)]] = True
        return mask.view(param.shape)


class PartitionedIndexSelector(IndexSelector):
    """A random partition of each tensor into ceil(1/p) parts, taken in turn; then another partition."""

    def get_indices(self, param: Tensor, iteration: int) -> Tensor:
        count = param.numel()
        if not count:
            return torch.zeros_like(param, dtype=torch.bool)
        num_parts = min(self.num_parts, count)
        part, turn = self.state.get(param, (None, num_parts))
        if turn == num_parts:
            part, turn = torch.rand(count, device=param.device).argsort() % num_parts, 0
        self.state[param] = (part, turn + 1)
        return (part == turn).view(param.shape)


class SparseCommunicator(CommunicationModule):
    """The mean of the coordinates that a selector draws on node 0, which sends the mask."""

    @checked
    def __init__(
        self,
        index_selector: IndexSelector | float | None = None,
        sparsification_rate: float | None = None,
        **options: Any,
    ) -> None:
        check.keywords(type(self).__name__, options, ())
        if index_selector is None:
            index_selector = 0.01 if sparsification_rate is None else sparsification_rate
        number = isinstance(index_selector, (int, float))
        self.index_selector: Any = RandomIndexSelector(index_selector) if number else index_selector  # type: ignore[arg-type]
        self.iteration = 0

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        pass

    def communicate(self, model: nn.Module, rank: int, num_nodes: int, local_step: int) -> None:
        for p in model.parameters() if num_nodes > 1 else ():
            if not p.requires_grad or p.grad is None:
                continue
            mask = self.index_selector.get_indices(p, self.iteration)
            broadcast(mask, src=0)
            chosen = p.data[mask]
            all_reduce(chosen)
            p.data.masked_scatter_(mask, chosen / num_nodes)
        self.iteration += 1
