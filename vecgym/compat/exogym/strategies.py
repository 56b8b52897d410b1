"""EXO Gym's strategies, written for one rank as its own are: bases for a user's classes, and for its exact timing.

Where nothing in a strategy is a user's own code, `vecgym.compat.exogym.vectorised` finds the strategy of vecgym that
does the same for all nodes at once, and this code does not run.

Every class has two ways. By default it does what its arguments say, with vecgym's timing: after every H steps. With
`strict_timing` it does what EXO Gym does with them; what that ignores is in `ignored`.
"""

from __future__ import annotations

import copy
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from vecgym import optim as vecgym_optim
from vecgym.compat.exogym.communicate import all_gather, all_reduce, broadcast, broadcast_object_list
from vecgym.compat.exogym.options import OF_STRATEGIES, checked, warn_without_effect
from vecgym.compat.exogym.utils import LogModule
from vecgym.core import check
from vecgym.optim.schedule import NAMES as SCHEDULES

Spec = vecgym_optim.OptimSpec
AnySpec = str | Spec | type[torch.optim.Optimizer] | None

OUTER_SGD: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
MODULE = __name__.rsplit(".", 1)[0]  # where the classes that are not a user's live


class OptimSpec(Spec):
    """`vecgym.OptimSpec`, whose first argument has the name `cls`."""

    def __init__(self, cls: str | type[torch.optim.Optimizer] = torch.optim.AdamW, **kwargs: Any) -> None:
        super().__init__(cls, **kwargs)


def ensure_optim_spec(optim: AnySpec, default: Spec | None = None, **kwargs: Any) -> Spec:
    """An `OptimSpec` from a name, a spec, a class or None; `kwargs` win over what a spec has."""
    if optim is None:
        return Spec(torch.optim.AdamW, **kwargs) if default is None else default
    if isinstance(optim, Spec):
        return optim.replace(**kwargs) if kwargs else optim
    return vecgym_optim.ensure_optim_spec(optim, **kwargs)


def due(local_step: int, H: int, strict: bool) -> bool:
    """Whether the nodes exchange after the step that `local_step` counts from 0.

    After every H steps; in EXO Gym, whose counter is tested before it is advanced, first after H + 1.

    >>> [t for t in range(12) if due(t, 4, strict=False)], [t for t in range(12) if due(t, 4, strict=True)]
    ([3, 7, 11], [4, 8])
    """
    return local_step > 0 and local_step % H == 0 if strict else (local_step + 1) % H == 0


# --------------------------------------------------------------------------------------------------- strategies


class Strategy(ABC, LogModule):
    """What one node does in a step. Subclasses override `step`, and end it with `super().step()`.

    Args:
        lr_scheduler: "lambda_cosine", "cosine" (the same with `cosine_anneal`), a class of
            `torch.optim.lr_scheduler`, or None.
        lr_scheduler_kwargs: `warmup_steps` (1), `cosine_anneal` (False), `max_steps`; of a class: its arguments.
        options: a user's class may give any, and finds them as attributes; for EXO Gym's own classes, one without
            effect warns, an unknown one is a TypeError.
    """

    strict_timing = False  # of the run; the trainer sets it

    @checked
    def __init__(
        self,
        lr_scheduler: str | Callable[..., Any] | None = None,
        lr_scheduler_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        kwargs = dict(lr_scheduler_kwargs or {})
        for name in ("warmup_steps", "cosine_anneal"):  # the documents give them here
            if isinstance(lr_scheduler, str) and name in options:
                kwargs.setdefault(name, options.pop(name))
        if isinstance(lr_scheduler, str):
            check.choice("lr_scheduler", lr_scheduler, SCHEDULES, "a class of torch.optim.lr_scheduler, or None")
            check.keywords("lr_scheduler_kwargs", kwargs, ("warmup_steps", "cosine_anneal", "max_steps"))
        self.lr_scheduler = lr_scheduler
        self.lr_scheduler_kwargs = kwargs
        if type(self).__module__.startswith(MODULE):
            whose = type(self).__name__
            check.keywords(whose, options, OF_STRATEGIES)
            warn_without_effect(whose, options, OF_STRATEGIES)
        self.kwargs = options
        for name, value in options.items():
            setattr(self, name, value)
        self.scheduler: Any = None
        self.lr_callbacks: list[Callable[[float], None]] = []
        self.max_steps: float = 1  # known when the run begins

    ignored: tuple[str, ...] = ()  # what was asked for, and EXO Gym does not do

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        """Called once, with the node's own model."""
        self.model, self.rank, self.num_nodes, self.local_step = model, rank, num_nodes, 0
        spec = self._inner_spec()
        if spec is not None:
            self.optim = spec.build(list(model.parameters()))

    def _inner_spec(self) -> Spec | None:
        return getattr(self, "optim_spec", None)

    @abstractmethod
    def step(self) -> None:
        """The end of every step: the learning-rate schedule, and the count."""
        self.nbytes = 0
        if self.scheduler is not None:
            self.scheduler.step()
            if self.rank == 0:
                for callback in self.lr_callbacks:
                    callback(self.scheduler.get_last_lr()[0])
        self.local_step += 1

    def zero_grad(self) -> None:
        """Before the gradients of a step."""
        self.optim.zero_grad()

    def _setup_scheduler(self) -> None:
        if isinstance(self.lr_scheduler, str):
            self.scheduler = LambdaLR(self.optim, self._lr_factor)
        elif self.lr_scheduler is not None:
            self.scheduler = self.lr_scheduler(self.optim, **self.lr_scheduler_kwargs)

    def _lr_factor(self, step: int) -> float:
        """A linear warm-up from 0, then 1, or a cosine down to 0.1."""
        kwargs = self.lr_scheduler_kwargs
        warmup = kwargs.get("warmup_steps", 1)
        if step < warmup:
            return step / warmup
        if not (kwargs.get("cosine_anneal", False) or self.lr_scheduler == "cosine"):
            return 1.0
        end = min(kwargs.get("max_steps", math.inf), self.max_steps)
        progress = (step - warmup) / max(1, end - warmup)
        return 0.9 * (0.5 * (1 + math.cos(math.pi * (progress if self.strict_timing else min(1.0, progress))))) + 0.1

    def __config__(self, remove_keys: Sequence[str] | None = None) -> dict[str, Any]:
        hidden = ("iteration", "local_step", "lr_callbacks", "model", "optim", "scheduler", *(remove_keys or ()))
        return {**super().__config__(hidden), "strategy": type(self).__name__}


class SimpleReduceStrategy(Strategy):
    """AllReduce: the optimizer's step on the mean gradient."""

    @checked
    def __init__(self, optim_spec: AnySpec = None, max_norm: float | None = None, **options: Any) -> None:
        self.optim_spec = take_inner_spec(self, optim_spec, options)
        self.max_norm = max_norm
        super().__init__(**options)

    def _inner_spec(self) -> Spec:
        return _strict_spec(self) if self.strict_timing else self.optim_spec

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        super()._init_node(model, rank, num_nodes)
        self._setup_scheduler()

    def step(self) -> None:
        for p in self.model.parameters():
            if p.grad is not None:
                all_reduce(p.grad)
                p.grad.div_(self.num_nodes)
        if self.max_norm:
            clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optim.step()
        super().step()


class CommunicationModule(ABC):
    """One thing that a node exchanges, after the optimizer's step."""

    strategy: Any = None  # the strategy that it belongs to

    @abstractmethod
    def __init__(self) -> None: ...

    @abstractmethod
    def communicate(self, model: nn.Module, rank: int, num_nodes: int, local_step: int) -> None:
        """Exchange. `local_step`: optimizer steps before this one."""

    @abstractmethod
    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        """Called once, with the node's own model."""

    @property
    def strict_timing(self) -> bool:
        return bool(getattr(self.strategy, "strict_timing", False))


class CommunicateOptimizeStrategy(Strategy):
    """The optimizer's step, then each communication module in turn."""

    @checked
    def __init__(
        self,
        communication_modules: Sequence[CommunicationModule],
        optim_spec: AnySpec = None,
        max_norm: float | None = None,
        **options: Any,
    ) -> None:
        self.optim_spec = take_inner_spec(self, optim_spec, options)
        self.communication_modules = [
            check.instance(
                f"communication_modules[{i}]", module, CommunicationModule, "a communication module of exogym"
            )
            for i, module in enumerate(communication_modules)
        ]
        self.max_norm = max_norm
        super().__init__(**options)
        for module in self.communication_modules:
            module.strategy = self

    def _inner_spec(self) -> Spec:
        return _strict_spec(self) if self.strict_timing else self.optim_spec

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        super()._init_node(model, rank, num_nodes)
        for module in self.communication_modules:
            module._init_node(model, rank, num_nodes)
        self._setup_scheduler()

    def step(self) -> None:
        if self.max_norm:
            clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optim.step()
        self._communicate()
        super().step()

    def _communicate(self) -> None:
        """What is exchanged in this step; override it for another timing."""
        for module in self.communication_modules:
            module.communicate(self.model, self.rank, self.num_nodes, self.local_step)


# ------------------------------------------------------------------------------------------------------- DiLoCo


class DiLoCoCommunicator(CommunicationModule):
    """Every H steps, node 0 takes a step of the outer optimizer on the nodes' mean movement, and sends the result.

    One deviation from EXO Gym, also with `strict_timing`: node 0 gets a copy of the outer parameters. There, on a CPU,
    it gets the outer parameters themselves, which its inner steps then change, so that every outer gradient after the
    first is 0.
    """

    @checked
    def __init__(self, H: int = 100, outer_optim_spec: AnySpec = None, **options: Any) -> None:
        check.keywords(type(self).__name__, options, ())
        self.H = H
        default = Spec(torch.optim.SGD, **OUTER_SGD)
        by_name = isinstance(outer_optim_spec, str) and outer_optim_spec.lower() == "sgd"
        self.outer_optim_spec = default if by_name else ensure_optim_spec(outer_optim_spec, default)
        self._asked, self._exogym_spec = self.outer_optim_spec, ensure_optim_spec(outer_optim_spec, default)
        self.ignored: tuple[str, ...] = (
            (f"'sgd' as the outer optimizer is there {self._exogym_spec!r}",) if by_name else ()
        )
        self.master_model: nn.Module | None = None
        self.outer_optimizer: torch.optim.Optimizer | None = None

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        if rank == 0:
            self.master_model = copy.deepcopy(model).cpu().requires_grad_(True)
            as_asked = not self.strict_timing or self.outer_optim_spec is not self._asked
            spec = self.outer_optim_spec if as_asked else self._exogym_spec
            self.outer_optimizer = spec.build(list(self.master_model.parameters()))

    def communicate(self, model: nn.Module, rank: int, num_nodes: int, local_step: int) -> None:
        if not due(local_step, self.H, self.strict_timing) or (self.strict_timing and num_nodes == 1):
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
        self.diloco_comm = _outer(H, outer_optim_spec, options)
        super().__init__([self.diloco_comm], optim_spec, **options)
        self.ignored += self.diloco_comm.ignored


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
        if due(self.local_step, self.H, self.strict_timing):
            super()._communicate()

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        super()._init_node(model, rank, num_nodes)
        self.island_size = self.island_size or num_nodes


# ------------------------------------------------------------------------------------------------------- SPARTA


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
        if async_sparta_delay:
            self.ignored += (f"async_sparta_delay={async_sparta_delay}",)


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
        self.diloco_comm = _outer(H, outer_optim_spec, options)
        if inner_optim_spec is not None:
            options["optim_spec"] = inner_optim_spec
        super().__init__([self.sparse_comm, self.diloco_comm], **options)
        self.ignored += self.diloco_comm.ignored
        if sparta_interval != 1:
            self.ignored += (f"sparta_interval={sparta_interval}: SPARTA acts at every step",)

    def _communicate(self) -> None:
        for module in self.communication_modules:
            sparse = module is self.sparse_comm
            if not sparse or self.strict_timing or due(self.local_step, self.sparta_interval, strict=False):
                module.communicate(self.model, self.rank, self.num_nodes, self.local_step)


# ------------------------------------------------------------------------------------------- names of optimizers

_INNER_NAMES = ("inner_optim", "inner_optim_spec")
_LR_NAMES = ("lr", "inner_lr")


def take_inner_spec(strategy: Any, optim_spec: AnySpec, options: dict[str, Any]) -> Spec:
    """The inner optimizer that was asked for, under whichever of its names; takes them out of `options`.

    EXO Gym reads `optim_spec` alone: what it would train with is kept for `strict_timing`.
    """
    others = {name: options.pop(name) for name in _INNER_NAMES if name in options}
    rates = {name: options.pop(name) for name in _LR_NAMES if name in options}
    given = [x for x in (optim_spec, *others.values()) if x is not None]
    if len(given) > 1 or len(rates) > 1:
        raise TypeError(f"{type(strategy).__name__} got its inner optimizer or learning rate twice: {given}, {rates}.")
    strategy._exogym_spec = ensure_optim_spec(optim_spec)
    unread = [f"{name}={value!r}" for name, value in {**others, **rates}.items() if value is not None]
    strategy.ignored = tuple(f"{text}: it trains with {strategy._exogym_spec!r}" for text in unread)
    spec = ensure_optim_spec(given[0] if given else None)
    lr = next(iter(rates.values()), None)
    strategy._asked = spec if lr is None else spec.replace(lr=lr)
    return strategy._asked


def _strict_spec(strategy: Any) -> Spec:
    """What EXO Gym trains with, unless somebody has set another `optim_spec` since."""
    return strategy._exogym_spec if strategy.optim_spec is strategy._asked else strategy.optim_spec


def _outer(H: int, outer_optim_spec: AnySpec, options: dict[str, Any]) -> DiLoCoCommunicator:
    """DiLoCo with the outer optimizer that was asked for, under whichever of its names."""
    other, lr = options.pop("outer_optim", None), options.pop("outer_lr", None)
    if other is not None and outer_optim_spec is not None:
        raise TypeError(f"the outer optimizer is given twice: {outer_optim_spec!r} and {other!r}.")
    if other is None and lr is None:
        return DiLoCoCommunicator(H, outer_optim_spec)
    asked = DiLoCoCommunicator(H, other if outer_optim_spec is None else outer_optim_spec).outer_optim_spec
    module = DiLoCoCommunicator(H, asked if lr is None else asked.replace(lr=lr))
    unread = [f"{name}={value!r}" for name, value in (("outer_optim", other), ("outer_lr", lr)) if value is not None]
    module._exogym_spec = DiLoCoCommunicator(H, outer_optim_spec)._exogym_spec
    module.ignored = tuple(f"{text}: the outer optimizer is {module._exogym_spec!r}" for text in unread)
    return module
