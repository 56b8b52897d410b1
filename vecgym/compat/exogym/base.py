"""The bases of EXO Gym's strategies: what one node does in a step, and one thing that it exchanges."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from vecgym.compat.exogym.optimizers import AnySpec, Spec, inner_spec
from vecgym.compat.exogym.options import OF_STRATEGIES, Keywords, MaxNorm, Modules, checked, warn_without_effect
from vecgym.compat.exogym.utils import LogModule
from vecgym.core import check
from vecgym.optim.schedule import NAMES as SCHEDULES

PACKAGE = __name__.rsplit(".", 1)[0]  # of the classes that are not a user's


class Strategy(ABC, LogModule):
    """What one node does in a step. Subclasses override `step` and end it with `super().step()`.

    Args:
        lr_scheduler: "lambda_cosine", "cosine" (the same with `cosine_anneal`), a class of
            `torch.optim.lr_scheduler`, or None.
        lr_scheduler_kwargs: `warmup_steps` (1), `cosine_anneal` (False), `max_steps`; for a class, its arguments.
        options: of a user's class, become attributes. Of EXO Gym's own classes, one without effect warns, and an
            unknown one is a TypeError.
    """

    @checked
    def __init__(
        self,
        lr_scheduler: str | Callable[..., Any] | None = None,
        lr_scheduler_kwargs: Keywords = None,
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
        if type(self).__module__.startswith(PACKAGE):
            check.keywords(type(self).__name__, options, OF_STRATEGIES)
            warn_without_effect(type(self).__name__, options, OF_STRATEGIES)
        self.kwargs = options
        for name, value in options.items():
            setattr(self, name, value)
        self.scheduler: Any = None
        self.lr_callbacks: list[Callable[[float], None]] = []
        self.max_steps: float = 1  # known when the run begins

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        """Start on a node; called once, with the node's own model."""
        self.model, self.rank, self.num_nodes, self.local_step = model, rank, num_nodes, 0
        spec = self._inner_spec()
        if spec is not None:
            self.optim = spec.build(list(model.parameters()))

    def _inner_spec(self) -> Spec | None:
        return getattr(self, "optim_spec", None)

    @abstractmethod
    def step(self) -> None:
        """End a step: advance the learning-rate schedule and the count."""
        self.nbytes = 0
        if self.scheduler is not None:
            self.scheduler.step()
            if self.rank == 0:
                for callback in self.lr_callbacks:
                    callback(self.scheduler.get_last_lr()[0])
        self.local_step += 1

    def zero_grad(self) -> None:
        """Clear the gradients; called before each step's are computed."""
        self.optim.zero_grad()

    def _setup_scheduler(self) -> None:
        if isinstance(self.lr_scheduler, str):
            self.scheduler = LambdaLR(self.optim, self._lr_factor)
        elif self.lr_scheduler is not None:
            self.scheduler = self.lr_scheduler(self.optim, **self.lr_scheduler_kwargs)

    def _lr_factor(self, step: int) -> float:
        """Return the factor of the learning rate: a linear warm-up from 0, then 1, or a cosine down to 0.1."""
        kwargs = self.lr_scheduler_kwargs
        warmup = kwargs.get("warmup_steps", 1)
        if step < warmup:
            return step / warmup
        if not (kwargs.get("cosine_anneal", False) or self.lr_scheduler == "cosine"):
            return 1.0
        end = min(kwargs.get("max_steps", math.inf), self.max_steps)
        progress = (step - warmup) / max(1, end - warmup)
        return 0.9 * (0.5 * (1 + math.cos(math.pi * min(1.0, progress)))) + 0.1

    def __config__(self, remove_keys: Sequence[str] | None = None) -> dict[str, Any]:
        hidden = ("iteration", "local_step", "lr_callbacks", "model", "optim", "scheduler", *(remove_keys or ()))
        return {**super().__config__(hidden), "strategy": type(self).__name__}


class OptimizingStrategy(Strategy):
    """A strategy with an inner optimizer, whose gradients may be clipped."""

    @checked
    def __init__(self, optim_spec: AnySpec = None, max_norm: MaxNorm = None, **options: Any) -> None:
        """Take the inner optimizer, the norm to which each node clips its gradient, and every strategy's options."""
        self.optim_spec, self.max_norm = inner_spec(type(self).__name__, optim_spec, options), max_norm
        super().__init__(**options)

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        super()._init_node(model, rank, num_nodes)
        self._setup_scheduler()

    def _optimize(self) -> None:
        if self.max_norm:
            clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optim.step()


class CommunicationModule(ABC):
    """One thing that a node exchanges, after the optimizer's step."""

    strategy: Any = None  # the strategy that it belongs to

    @abstractmethod
    def communicate(self, model: nn.Module, rank: int, num_nodes: int, local_step: int) -> None:
        """Exchange. `local_step`: optimizer steps before this one."""

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:  # noqa: B027 - few have anything to do
        """Start on a node; called once, with the node's own model."""


class CommunicateOptimizeStrategy(OptimizingStrategy):
    """The optimizer's step, then each communication module in turn."""

    @checked
    def __init__(
        self, communication_modules: Modules, optim_spec: AnySpec = None, max_norm: MaxNorm = None, **options: Any
    ) -> None:
        for i, module in enumerate(communication_modules):
            name = f"communication_modules[{i}]"
            check.instance(name, module, CommunicationModule, "a communication module of exogym")
        self.communication_modules = list(communication_modules)
        super().__init__(optim_spec, max_norm, **options)
        for module in self.communication_modules:
            module.strategy = self

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        super()._init_node(model, rank, num_nodes)
        for module in self.communication_modules:
            module._init_node(model, rank, num_nodes)

    def step(self) -> None:
        self._optimize()
        self._communicate()
        super().step()

    def _communicate(self) -> None:
        """Exchange what is due in this step; override it for another timing."""
        for module in self.communication_modules:
            if self._is_due(module):
                module.communicate(self.model, self.rank, self.num_nodes, self.local_step)

    def _is_due(self, module: CommunicationModule) -> bool:
        return True
