"""The bases of strategies written for EXO Gym: what one node does in a step, and one thing that it exchanges.

What a class does with its arguments is its `behaviour`: what they say (`AsAsked`), or what EXO Gym does with them
(`vecgym.compat.exogym.strict`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from vecgym.compat.exogym.behaviour import AsAsked, Choice
from vecgym.compat.exogym.optimizers import AnySpec, Spec, inner_choice
from vecgym.compat.exogym.options import OF_STRATEGIES, checked, warn_without_effect
from vecgym.compat.exogym.utils import LogModule
from vecgym.core import check
from vecgym.optim.schedule import NAMES as SCHEDULES

MODULE = __name__.rsplit(".", 1)[0]  # where the classes that are not a user's live


class Strategy(ABC, LogModule):
    """What one node does in a step. Subclasses override `step`, and end it with `super().step()`.

    Args:
        lr_scheduler: "lambda_cosine", "cosine" (the same with `cosine_anneal`), a class of
            `torch.optim.lr_scheduler`, or None.
        lr_scheduler_kwargs: `warmup_steps` (1), `cosine_anneal` (False), `max_steps`; of a class: its arguments.
        options: a user's class may give any, and finds them as attributes; for EXO Gym's own classes, one without
            effect warns, an unknown one is a TypeError.
    """

    behaviour: AsAsked = AsAsked()  # of the run

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
        return 0.9 * (0.5 * (1 + math.cos(math.pi * (self.behaviour.annealed(progress))))) + 0.1

    def __config__(self, remove_keys: Sequence[str] | None = None) -> dict[str, Any]:
        hidden = ("iteration", "local_step", "lr_callbacks", "model", "optim", "scheduler", *(remove_keys or ()))
        return {**super().__config__(hidden), "strategy": type(self).__name__}


class OptimizingStrategy(Strategy):
    """A strategy with an inner optimizer, whose gradients may be clipped."""

    @checked
    def __init__(self, optim_spec: AnySpec = None, max_norm: float | None = None, **options: Any) -> None:
        """Take the inner optimizer, the norm to clip each node's gradients to, and the options of every strategy."""
        self._choice = inner_choice(type(self).__name__, optim_spec, options)
        self.optim_spec, self.max_norm = self._choice.asked, max_norm
        super().__init__(**options)

    @property
    def choice(self) -> Choice:
        """The inner optimizer that the arguments name."""
        return self._choice

    def _inner_spec(self) -> Spec:
        return self.behaviour.spec(self.optim_spec, self._choice)

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        super()._init_node(model, rank, num_nodes)
        self._setup_scheduler()


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
    def behaviour(self) -> AsAsked:
        return AsAsked() if self.strategy is None else self.strategy.behaviour


class CommunicateOptimizeStrategy(OptimizingStrategy):
    """The optimizer's step, then each communication module in turn."""

    @checked
    def __init__(
        self,
        communication_modules: Sequence[CommunicationModule],
        optim_spec: AnySpec = None,
        max_norm: float | None = None,
        **options: Any,
    ) -> None:
        self.communication_modules = [
            check.instance(
                f"communication_modules[{i}]", module, CommunicationModule, "a communication module of exogym"
            )
            for i, module in enumerate(communication_modules)
        ]
        super().__init__(optim_spec, max_norm, **options)
        for module in self.communication_modules:
            module.strategy = self

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        super()._init_node(model, rank, num_nodes)
        for module in self.communication_modules:
            module._init_node(model, rank, num_nodes)

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
