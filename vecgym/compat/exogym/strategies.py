"""EXO Gym's strategies, written for one rank as its own are: bases for a user's classes, and for its exact timing.

Where nothing in a strategy is a user's own code, `vecgym.compat.exogym.vectorised` finds the strategy of vecgym that
does the same for all nodes at once, and this code does not run.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from vecgym.compat.exogym.base import (
    CommunicateOptimizeStrategy,
    CommunicationModule,
    OptimizingStrategy,
    Strategy,
)
from vecgym.compat.exogym.behaviour import Choice
from vecgym.compat.exogym.communicate import all_gather, all_reduce, broadcast, broadcast_object_list
from vecgym.compat.exogym.optimizers import OUTER_NAMES, AnySpec, OptimSpec, ensure_optim_spec, outer_choice, taken
from vecgym.compat.exogym.options import checked
from vecgym.compat.exogym.sparse import (
    IndexSelector,
    PartitionedIndexSelector,
    RandomIndexSelector,
    ShuffledSequentialIndexSelector,
    SparseCommunicator,
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
                all_reduce(p.grad)
                p.grad.div_(self.num_nodes)
        if self.max_norm:
            clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optim.step()
        super().step()


# ------------------------------------------------------------------------------------------------------- DiLoCo


class DiLoCoCommunicator(CommunicationModule):
    """Every H steps, node 0 takes a step of the outer optimizer on the nodes' mean movement, and sends the result.

    One deviation from EXO Gym, also with `strict_timing`: node 0 gets a copy of the outer parameters. There, on a CPU,
    it gets the outer parameters themselves, which its inner steps then change, so that every outer gradient after the
    first is 0.
    """

    @checked
    def __init__(self, H: int = 100, outer_optim_spec: AnySpec = None, **options: Any) -> None:
        self.H = H
        self._choice = outer_choice(outer_optim_spec, options)
        check.keywords(type(self).__name__, options, ())
        self.outer_optim_spec = self._choice.asked
        self.master_model: nn.Module | None = None
        self.outer_optimizer: torch.optim.Optimizer | None = None

    @property
    def choice(self) -> Choice:
        """The outer optimizer that the arguments name."""
        return self._choice

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        if rank == 0:
            self.master_model = copy.deepcopy(model).cpu().requires_grad_(True)
            spec = self.behaviour.spec(self.outer_optim_spec, self._choice)
            self.outer_optimizer = spec.build(list(self.master_model.parameters()))

    def communicate(self, model: nn.Module, rank: int, num_nodes: int, local_step: int) -> None:
        if not self.behaviour.is_due(local_step, self.H) or (num_nodes == 1 and not self.behaviour.steps_alone()):
            return
        for p in model.parameters():
            all_reduce(p.data)
            p.data /= num_nodes
        if rank == 0:
            self._outer_step(model)
        for p in model.parameters():
            broadcast(p.data, src=0)

    def _outer_step(self, model: nn.Module) -> None:
        assert self.master_model is not None
        assert self.outer_optimizer is not None
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
        self, optim_spec: AnySpec = None, outer_optim_spec: AnySpec = None, H: int = 100, **options: Any
    ) -> None:
        self.H = H
        self.diloco_comm = DiLoCoCommunicator(H, outer_optim_spec, **taken(options, *OUTER_NAMES))
        super().__init__([self.diloco_comm], optim_spec, **options)


# ------------------------------------------------------------------------------------------------------- FedAvg


class AveragingCommunicator(CommunicationModule):
    """The mean of the parameters over all nodes, or over random islands that node 0 draws and sends."""

    @checked
    def __init__(self, island_size: int | None = None, **options: Any) -> None:
        check.keywords(type(self).__name__, options, ())
        self.island_size = island_size

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        pass

    def communicate(self, model: nn.Module, rank: int, num_nodes: int, local_step: int) -> None:
        if num_nodes == 1:
            return
        whole = self.island_size is None or self.island_size >= num_nodes
        members = set(range(num_nodes)) if whole else self._select_partners(rank, num_nodes)
        self._average_models(model, members, num_nodes)

    def _select_partners(self, rank: int, num_nodes: int) -> set[int]:
        """The nodes of this node's island."""
        order: list[int] = list(range(num_nodes))
        if rank == 0:
            random.shuffle(order)  # from the node's own state: seeded here, not in EXO Gym
        broadcast_object_list(order, src=0)
        size = self.island_size or num_nodes
        islands = [set(order[i : i + size]) for i in range(0, num_nodes, size)]
        return next(island for island in islands if rank in island)

    def _average_models(self, model: nn.Module, island_members: set[int], num_nodes: int) -> None:
        for p in model.parameters():
            if len(island_members) == num_nodes:
                all_reduce(p.data)
                p.data /= num_nodes
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
        island_size: int | None = None,
        H: int = 1,
        max_norm: float | None = None,
        **options: Any,
    ) -> None:
        if inner_optim is not None:
            options["inner_optim"] = inner_optim
        super().__init__([AveragingCommunicator(island_size)], options.pop("optim_spec", None), max_norm, **options)
        self.island_size = island_size
        self.H = H

    def _communicate(self) -> None:
        if self.behaviour.is_due(self.local_step, self.H):
            super()._communicate()

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        super()._init_node(model, rank, num_nodes)
        self.island_size = self.island_size or num_nodes


# ------------------------------------------------------------------------------------------------------- SPARTA


class SPARTAStrategy(CommunicateOptimizeStrategy):
    """After every step, the mean of a random part of the parameters."""

    @checked
    def __init__(
        self, optim_spec: AnySpec = None, p_sparta: float = 0.005, async_sparta_delay: int = 0, **options: Any
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
        p_sparta: float = 0.005,
        sparta_interval: int = 1,
        H: int = 100,
        **options: Any,
    ) -> None:
        self.p_sparta, self.sparta_interval, self.H = p_sparta, sparta_interval, H
        self.index_selector = RandomIndexSelector(p_sparta)
        self.sparse_comm = SparseCommunicator(self.index_selector)
        self.diloco_comm = DiLoCoCommunicator(H, outer_optim_spec, **taken(options, *OUTER_NAMES))
        if inner_optim_spec is not None:
            options["optim_spec"] = inner_optim_spec
        super().__init__([self.sparse_comm, self.diloco_comm], **options)

    def _communicate(self) -> None:
        for module in self.communication_modules:
            sparse = module is self.sparse_comm
            if not sparse or self.behaviour.is_sparta_due(self.local_step, self.sparta_interval):
                module.communicate(self.model, self.rank, self.num_nodes, self.local_step)
