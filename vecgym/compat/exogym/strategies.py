"""EXO Gym's strategies, written for one rank, each with its equivalent for all nodes at once (`_vectorised`)."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from vecgym import strategy as native
from vecgym.compat.exogym.base import (
    AnySpec,
    CommunicateOptimizeStrategy,
    CommunicationModule,
    OptimizingStrategy,
    Spec,
    as_written,
    pop_options,
)
from vecgym.compat.exogym.communicate import all_gather, average_, broadcast, broadcast_object_list
from vecgym.compress.dct import dct, from_chunks, grid, inverse_dct, mean_of_senders, strongest, to_chunks
from vecgym.core import check
from vecgym.simulation.when import check_interval
from vecgym.strategy import per_rank
from vecgym.strategy.averages import outer_spec
from vecgym.strategy.sparta import check_rate


class SimpleReduceStrategy(OptimizingStrategy):
    """AllReduce: the optimizer's step on the mean gradient."""

    def step(self) -> None:
        for p in self.model.parameters():
            if p.grad is not None:
                average_(p.grad, self.num_nodes)
        self._optimize()
        super().step()

    def _vectorised(self, num_nodes: int, **common: Any) -> native.Strategy:
        return native.AllReduceStrategy(self.optim_spec, **common)


# ------------------------------------------------------------------------------------------------------- DiLoCo


class DiLoCoCommunicator(CommunicationModule):
    """Every H steps, node 0 takes an outer step on the nodes' mean movement and broadcasts the result."""

    master_model: nn.Module
    outer_optimizer: torch.optim.Optimizer

    def __init__(
        self, H: int = 100, outer_optim_spec: AnySpec = None, outer_optim: AnySpec = None, outer_lr: Any = None
    ) -> None:
        self.H = check_interval("H", H)
        if outer_optim_spec is not None and outer_optim is not None:
            raise TypeError(f"the outer optimizer is given twice: {outer_optim_spec!r} and {outer_optim!r}.")
        self.outer_optim_spec = outer_spec(outer_optim if outer_optim_spec is None else outer_optim_spec, outer_lr)

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
            p.data = outer.detach().clone().to(p.device)  # clone(), so that it is not the outer parameter itself

    def _vectorised(self, num_nodes: int, every: int) -> native.Exchange:
        when = native.Rounds(math.lcm(every, self.H), name="H")
        return native.Exchange(native.Outer(native.Mean(), self.outer_optim_spec), when)


class DiLoCoStrategy(CommunicateOptimizeStrategy):
    """H local steps, then one step of an outer optimizer on the nodes' mean movement."""

    def __init__(
        self, optim_spec: AnySpec = None, outer_optim_spec: AnySpec = None, H: int = 100, **options: Any
    ) -> None:
        self.diloco_comm = DiLoCoCommunicator(H, outer_optim_spec, **pop_options(options, "outer_optim", "outer_lr"))
        self.H = self.diloco_comm.H
        super().__init__([self.diloco_comm], optim_spec, **options)


# ------------------------------------------------------------------------------------------------------- FedAvg


class AveragingCommunicator(CommunicationModule):
    """The mean of the parameters over all nodes, or over random islands that node 0 draws and broadcasts."""

    def __init__(self, island_size: int | None = None) -> None:
        self.island_size = check.optional_integer("island_size", island_size, what="the number of nodes of an island")

    def communicate(self, model: nn.Module, rank: int, num_nodes: int, local_step: int) -> None:
        if num_nodes == 1:
            return
        members = self._select_partners(rank, num_nodes) if self._islands(num_nodes) else set(range(num_nodes))
        self._average_models(model, members, num_nodes)

    def _islands(self, num_nodes: int) -> int | None:
        """Return the number of nodes of an island, or None if all nodes form one."""
        return None if self.island_size is None or self.island_size >= num_nodes else self.island_size

    def _select_partners(self, rank: int, num_nodes: int) -> set[int]:
        """Return the nodes of this node's island."""
        order: list[int] = list(range(num_nodes))
        if rank == 0:
            random.shuffle(order)  # from the node's own generator, which is seeded here but not in EXO Gym
        broadcast_object_list(order, src=0)
        size = self.island_size or num_nodes
        first = order.index(rank) // size * size
        return set(order[first : first + size])

    def _average_models(self, model: nn.Module, island_members: set[int], num_nodes: int) -> None:
        for p in model.parameters():
            if len(island_members) == num_nodes:
                average_(p.data, num_nodes)
            else:
                gathered = [torch.zeros_like(p.data) for _ in range(num_nodes)]
                all_gather(gathered, p.data)
                members = [gathered[i] for i in island_members]
                p.data = sum(members[1:], start=members[0]) / len(members)

    def _vectorised(self, num_nodes: int, every: int) -> native.Exchange:
        return native.AveragingCommunicator(self._islands(num_nodes), every)


class FedAvgStrategy(CommunicateOptimizeStrategy):
    """H local steps, then the mean of the parameters, over all nodes or random islands."""

    def __init__(
        self,
        inner_optim: AnySpec = None,
        island_size: int | None = None,
        H: int = 1,
        max_norm: float | None = None,
        **options: Any,
    ) -> None:
        modules = [AveragingCommunicator(island_size)]
        super().__init__(modules, max_norm=max_norm, inner_optim=inner_optim, **options)
        self.island_size = island_size
        self.H = check_interval("H", H)

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        super()._init_node(model, rank, num_nodes)
        self.island_size = self.island_size or num_nodes

    def _interval(self, module: CommunicationModule) -> int:
        return self.H


# ------------------------------------------------------------------------------------------------------- SPARTA


class IndexSelector:
    """Select the coordinates of a tensor that are exchanged: here all of them. Node 0's selection is used."""

    vectorised: Any = None  # vecgym's equivalent selector, for all nodes at once

    def __init__(self, p: float) -> None:
        self.p = check_rate("p", p)
        self.state: dict[Tensor, Any] = {}

    def get_indices(self, param: Tensor, iteration: int) -> Tensor:
        """Return a mask of `param`'s shape."""
        return torch.ones_like(param, dtype=torch.bool)

    @property
    def num_parts(self) -> int:
        return math.ceil(1 / self.p)


class RandomIndexSelector(IndexSelector):
    """Select each coordinate with probability p."""

    vectorised = native.RandomSelector

    def get_indices(self, param: Tensor, iteration: int) -> Tensor:
        return torch.bernoulli(torch.full(param.shape, self.p, device=param.device)).bool()


class ShuffledSequentialIndexSelector(IndexSelector):
    """Select the ceil(1/p) chunks of one random order of each tensor, in turn."""

    vectorised = native.ShuffledSequentialSelector

    def get_indices(self, param: Tensor, iteration: int) -> Tensor:
        count = param.numel()
        if param not in self.state:
            self.state[param] = torch.randperm(count, device=param.device)
        turn, (size, longer) = iteration % self.num_parts, divmod(count, self.num_parts)
        start = turn * size + min(turn, longer)  # the first `longer` chunks have one more
        mask = torch.zeros(count, dtype=torch.bool, device=param.device)
        mask[self.state[param][start : start + size + (turn < longer)]] = True
        return mask.view(param.shape)


class PartitionedIndexSelector(IndexSelector):
    """Select the ceil(1/p) parts of a random partition of each tensor, in turn; then draw another partition."""

    vectorised = native.PartitionedSelector

    def get_indices(self, param: Tensor, iteration: int) -> Tensor:
        count = param.numel()
        num_parts = min(self.num_parts, count)
        part, turn = self.state.get(param, (None, num_parts))
        if turn == num_parts:
            part, turn = torch.rand(count, device=param.device).argsort() % num_parts, 0
        self.state[param] = (part, turn + 1)
        return (part == turn).view(param.shape)


class SparseCommunicator(CommunicationModule):
    """The mean of the coordinates that a selector draws on node 0, which broadcasts the mask.

    Attributes:
        delay: steps until it is written, if all nodes are computed at once; rank by rank it is written at once.
    """

    delay = 0

    def __init__(
        self, index_selector: IndexSelector | float | None = None, sparsification_rate: float | None = None
    ) -> None:
        rate = 0.01 if sparsification_rate is None else check_rate("sparsification_rate", sparsification_rate)
        selector = rate if index_selector is None else index_selector
        self.index_selector: Any = RandomIndexSelector(selector) if isinstance(selector, (int, float)) else selector
        self.iteration = 0

    def communicate(self, model: nn.Module, rank: int, num_nodes: int, local_step: int) -> None:
        for p in model.parameters() if num_nodes > 1 else ():
            if p.requires_grad and p.grad is not None:
                mask = self.index_selector.get_indices(p, self.iteration)
                broadcast(mask, src=0)
                values = p.data[mask]
                average_(values, num_nodes)
                p.data.masked_scatter_(mask, values)
        self.iteration += 1

    def _vectorised(self, num_nodes: int, every: int) -> native.Exchange | None:
        cls: Any = as_written(self.index_selector)
        if not (cls and cls.vectorised):
            return None
        return native.SparseCommunicator(cls.vectorised(self.index_selector.p), interval=every, delay=self.delay)


class SPARTAStrategy(CommunicateOptimizeStrategy):
    """After every step, the mean of a random subset of the parameters.

    EXO Gym's documents, not its code, have `compression_method` and `quantization_bits`: see
    `vecgym.strategy.SPARTAStrategy`. Like a delay, they need all nodes at once.
    """

    def __init__(
        self, optim_spec: AnySpec = None, p_sparta: float = 0.005, async_sparta_delay: int = 0, *,
        compression_method: str | None = None, quantization_bits: int | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.p_sparta = check_rate("p_sparta", p_sparta)
        self.async_sparta_delay = check.integer("async_sparta_delay", async_sparta_delay, 0)
        self.index_selector = RandomIndexSelector(p_sparta)
        sparse = SparseCommunicator(self.index_selector)
        sparse.delay = self.async_sparta_delay
        self.compression_method, self.quantization_bits = compression_method, quantization_bits
        self._coded()  # checks
        super().__init__([sparse], optim_spec, **options)

    def _coded(self, **common: Any) -> native.Strategy | None:
        coding: Any = {"compression_method": self.compression_method, "quantization_bits": self.quantization_bits}
        if all(x is None for x in coding.values()):
            return None
        return native.SPARTAStrategy(self.p_sparta, delay=self.async_sparta_delay, **coding, **common)

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        if self.async_sparta_delay or self._coded() is not None:
            raise ValueError(
                f"{type(self).__name__} runs rank by rank, since it has methods of its own or lr_scheduler is a class; "
                "async_sparta_delay, compression_method and quantization_bits need all nodes at once: leave them out, "
                'or use SPARTAStrategy with lr_scheduler="cosine" or None.'
            )
        super()._init_node(model, rank, num_nodes)

    def _vectorised(self, num_nodes: int, **common: Any) -> native.Strategy | None:
        coded = self._coded(inner_optim=self.optim_spec, **common)
        return super()._vectorised(num_nodes, **common) if coded is None else coded


class SPARTADiLoCoStrategy(CommunicateOptimizeStrategy):
    """SPARTA every `sparta_interval` steps, and DiLoCo every H."""

    def __init__(
        self,
        inner_optim_spec: AnySpec = None,
        outer_optim_spec: AnySpec = None,
        p_sparta: float = 0.005,
        sparta_interval: int = 1,
        H: int = 100,
        **options: Any,
    ) -> None:
        self.p_sparta, self.H = check_rate("p_sparta", p_sparta), check_interval("H", H)
        self.sparta_interval = check_interval("sparta_interval", sparta_interval)
        self.index_selector = RandomIndexSelector(p_sparta)
        self.sparse_comm = SparseCommunicator(self.index_selector)
        self.diloco_comm = DiLoCoCommunicator(H, outer_optim_spec, **pop_options(options, "outer_optim", "outer_lr"))
        super().__init__([self.sparse_comm, self.diloco_comm], inner_optim_spec=inner_optim_spec, **options)

    def _interval(self, module: CommunicationModule) -> int:
        return self.sparta_interval if module is self.sparse_comm else 1


# --------------------------------------------------------------------------------------------------------- DeMo


class DeMoStrategy(OptimizingStrategy):
    """The k strongest cosine components of a local momentum, every step; the sign of their mean is the update.

    The learning rate is that of `optim_spec`, and `max_norm` clips each node's gradient; EXO Gym ignores both and
    uses 0.001.
    """

    def __init__(
        self,
        compression_decay: float = 0.999,
        compression_topk: int = 32,
        compression_chunk: int = 64,
        weight_decay: float = 0.0,
        optim_spec: AnySpec = None,
        max_norm: float | None = None,
        **options: Any,
    ) -> None:
        self.compression_decay = check.number("compression_decay", compression_decay, "[0, 1)")
        self.compression_topk = check.integer("compression_topk", compression_topk)
        self.compression_chunk = check.integer("compression_chunk", compression_chunk)
        self.weight_decay = check.number("weight_decay", weight_decay, "[0, inf)")
        super().__init__(optim_spec, max_norm, **options)
        self.optim_spec = Spec(torch.optim.SGD, lr=self.optim_spec.lr, weight_decay=self.weight_decay)
        self._residuals: dict[str, Tensor] = {}  # cosine components, [1, chunks, area]

    @torch.no_grad()
    def step(self) -> None:
        if self.max_norm:
            clip_grad_norm_(self.model.parameters(), self.max_norm)
        lr = self.optim.param_groups[0]["lr"]
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                gradient = torch.zeros_like(p) if p.grad is None else p.grad
                p.grad = self._exchanged(name, lr * gradient).sign_()
        self.optim.step()
        super().step()

    def _exchanged(self, name: str, x: Tensor) -> Tensor:
        """Accumulate x, send the strongest components, keep the others, and return the mean over the senders."""
        cut = grid(tuple(x.shape), self.compression_chunk)
        components = dct(to_chunks(x[None], cut)).flatten(2)
        if name in self._residuals:
            components += self.compression_decay * self._residuals[name]
        index = strongest(components, self.compression_topk)
        value = components.gather(-1, index)
        self._residuals[name] = components.scatter(-1, index, 0.0)
        indices, values = (per_rank.all_gather(sent[0])[None] for sent in (index, value))  # [1, K, chunks, k]
        mean = mean_of_senders(indices, values, cut.area).unflatten(-1, (cut.height, cut.width))
        return from_chunks(inverse_dct(mean), cut, x.shape)[0]

    def _vectorised(self, num_nodes: int, **common: Any) -> native.Strategy:
        compression = (self.compression_decay, self.compression_topk, self.compression_chunk)
        return native.DeMoStrategy(*compression, self.weight_decay, lr=self.optim_spec.lr, **common)
