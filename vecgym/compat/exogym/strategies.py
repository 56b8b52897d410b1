"""EXO Gym's strategies, written for one rank: they are the bases of users' classes.

Where a strategy has no code of the user's, `vecgym.compat.exogym.vectorised` finds the strategy of vecgym that does
the same for all nodes at once, and this code does not run.
"""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import torch
from torch import Tensor, nn

from vecgym.compat.exogym.base import (
    CommunicateOptimizeStrategy,
    CommunicationModule,
    OptimizingStrategy,
    Strategy,
)
from vecgym.compat.exogym.communicate import all_gather, average_, broadcast, broadcast_object_list
from vecgym.compat.exogym.optimizers import OUTER_NAMES, AnySpec, OptimSpec, ensure_optim_spec, outer_spec, taken
from vecgym.compat.exogym.options import (
    CountFrom0,
    Fraction,
    Interval,
    IslandSize,
    MaxNorm,
    OptionalFraction,
    checked,
)
from vecgym.core import check

__all__ = [
    "AveragingCommunicator", "CommunicateOptimizeStrategy", "CommunicationModule", "DiLoCoCommunicator",
    "DiLoCoStrategy", "FedAvgStrategy", "IndexSelector", "OptimSpec", "OptimizingStrategy", "PartitionedIndexSelector",
    "RandomIndexSelector", "SPARTADiLoCoStrategy", "SPARTAStrategy", "ShuffledSequentialIndexSelector",
    "SimpleReduceStrategy", "SparseCommunicator", "Strategy", "ensure_optim_spec",
]  # fmt: skip


class SimpleReduceStrategy(OptimizingStrategy):
    """AllReduce: the optimizer's step on the mean gradient."""

    def step(self) -> None:
        for p in self.model.parameters():
            if p.grad is not None:
                average_(p.grad, self.num_nodes)
        self._optimize()
        super().step()


# ------------------------------------------------------------------------------------------------------- DiLoCo


class DiLoCoCommunicator(CommunicationModule):
    """Every H steps, node 0 takes a step of the outer optimizer on the nodes' mean movement, and sends the result."""

    master_model: nn.Module
    outer_optimizer: torch.optim.Optimizer

    @checked
    def __init__(self, H: Interval = 100, outer_optim_spec: AnySpec = None, **options: Any) -> None:
        self.H = H
        self.outer_optim_spec = outer_spec(outer_optim_spec, options)
        check.keywords(type(self).__name__, options, ())

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        if rank == 0:
            self.master_model = copy.deepcopy(model).cpu().requires_grad_(True)
            self.outer_optimizer = self.outer_optim_spec.build(list(self.master_model.parameters()))

    def communicate(self, model: nn.Module, rank: int, num_nodes: int, local_step: int) -> None:
        if (local_step + 1) % self.H != 0:
            return
        for p in model.parameters():
            average_(p.data, num_nodes)
        if rank == 0:
            self._outer_step(model)
        for p in model.parameters():
            broadcast(p.data, src=0)

    def _outer_step(self, model: nn.Module) -> None:
        pairs = list(zip(self.master_model.parameters(), model.parameters()))
        for outer, mean in pairs:
            outer.grad = outer.detach() - mean.detach().to(outer.device)
        self.outer_optimizer.step()
        for outer, p in pairs:
            p.data = outer.detach().clone().to(p.device)  # without clone() it would be the outer parameter itself


class DiLoCoStrategy(CommunicateOptimizeStrategy):
    """H local steps, then one step of an outer optimizer on the nodes' mean movement."""

    @checked
    def __init__(
        self, optim_spec: AnySpec = None, outer_optim_spec: AnySpec = None, H: Interval = 100, **options: Any
    ) -> None:
        self.H = H
        self.diloco_comm = DiLoCoCommunicator(H, outer_optim_spec, **taken(options, *OUTER_NAMES))
        super().__init__([self.diloco_comm], optim_spec, **options)


# ------------------------------------------------------------------------------------------------------- FedAvg


class AveragingCommunicator(CommunicationModule):
    """The mean of the parameters over all nodes, or over random islands that node 0 draws and sends."""

    @checked
    def __init__(self, island_size: IslandSize = None, **options: Any) -> None:
        check.keywords(type(self).__name__, options, ())
        self.island_size = island_size

    def communicate(self, model: nn.Module, rank: int, num_nodes: int, local_step: int) -> None:
        if num_nodes == 1:
            return
        whole = self.island_size is None or self.island_size >= num_nodes
        members = set(range(num_nodes)) if whole else self._select_partners(rank, num_nodes)
        self._average_models(model, members, num_nodes)

    def _select_partners(self, rank: int, num_nodes: int) -> set[int]:
        """Return the nodes of this node's island."""
        order: list[int] = list(range(num_nodes))
        if rank == 0:
            random.shuffle(order)  # from the node's own state: seeded here, not in EXO Gym
        broadcast_object_list(order, src=0)
        size = self.island_size or num_nodes
        first = order.index(rank) // size * size
        return set(order[first : first + size])

    def _average_models(self, model: nn.Module, island_members: set[int], num_nodes: int) -> None:
        for p in model.parameters():
            if len(island_members) == num_nodes:
                average_(p.data, num_nodes)
            else:
                everyone = [torch.zeros_like(p.data) for _ in range(num_nodes)]
                all_gather(everyone, p.data)
                members = [everyone[i] for i in island_members]
                p.data = sum(members[1:], start=members[0]) / len(members)


class FedAvgStrategy(CommunicateOptimizeStrategy):
    """H local steps, then the mean of the parameters, over all nodes or random islands."""

    @checked
    def __init__(
        self,
        inner_optim: AnySpec = None,
        island_size: IslandSize = None,
        H: Interval = 1,
        max_norm: MaxNorm = None,
        **options: Any,
    ) -> None:
        if inner_optim is not None:
            options["inner_optim"] = inner_optim
        super().__init__([AveragingCommunicator(island_size)], options.pop("optim_spec", None), max_norm, **options)
        self.island_size = island_size
        self.H = H

    def _is_due(self, module: CommunicationModule) -> bool:
        return (self.local_step + 1) % self.H == 0

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        super()._init_node(model, rank, num_nodes)
        self.island_size = self.island_size or num_nodes


# ------------------------------------------------------------------------------------------------------- SPARTA


class IndexSelector:
    """Chooses the coordinates of a tensor that are exchanged: here all of them. Node 0's choice counts."""

    @checked
    def __init__(self, p: Fraction) -> None:
        self.p = p
        self.state: dict[Tensor, Any] = {}

    def get_indices(self, param: Tensor, iteration: int) -> Tensor:
        """Return a mask of `param`'s shape."""
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
        sparsification_rate: OptionalFraction = None,
        **options: Any,
    ) -> None:
        check.keywords(type(self).__name__, options, ())
        if index_selector is None:
            index_selector = 0.01 if sparsification_rate is None else sparsification_rate
        if isinstance(index_selector, (int, float)):
            index_selector = RandomIndexSelector(index_selector)
        self.index_selector = index_selector
        self.iteration = 0

    def communicate(self, model: nn.Module, rank: int, num_nodes: int, local_step: int) -> None:
        for p in model.parameters() if num_nodes > 1 else ():
            if p.requires_grad and p.grad is not None:
                mask = self.index_selector.get_indices(p, self.iteration)
                broadcast(mask, src=0)
                chosen = p.data[mask]
                average_(chosen, num_nodes)
                p.data.masked_scatter_(mask, chosen)
        self.iteration += 1


class SPARTAStrategy(CommunicateOptimizeStrategy):
    """After every step, the mean of a random part of the parameters."""

    @checked
    def __init__(
        self, optim_spec: AnySpec = None, p_sparta: Fraction = 0.005, async_sparta_delay: CountFrom0 = 0, **options: Any
    ) -> None:
        self.p_sparta = p_sparta
        self.async_sparta_delay = async_sparta_delay
        self.index_selector = RandomIndexSelector(p_sparta)
        super().__init__([SparseCommunicator(self.index_selector)], optim_spec, **options)


class SPARTADiLoCoStrategy(CommunicateOptimizeStrategy):
    """SPARTA every `sparta_interval` steps, and DiLoCo every H."""

    @checked
    def __init__(
        self,
        inner_optim_spec: AnySpec = None,
        outer_optim_spec: AnySpec = None,
        p_sparta: Fraction = 0.005,
        sparta_interval: Interval = 1,
        H: Interval = 100,
        **options: Any,
    ) -> None:
        self.p_sparta, self.sparta_interval, self.H = p_sparta, sparta_interval, H
        self.index_selector = RandomIndexSelector(p_sparta)
        self.sparse_comm = SparseCommunicator(self.index_selector)
        self.diloco_comm = DiLoCoCommunicator(H, outer_optim_spec, **taken(options, *OUTER_NAMES))
        if inner_optim_spec is not None:
            options["optim_spec"] = inner_optim_spec
        super().__init__([self.sparse_comm, self.diloco_comm], **options)

    def _is_due(self, module: CommunicationModule) -> bool:
        return module is not self.sparse_comm or (self.local_step + 1) % self.sparta_interval == 0
