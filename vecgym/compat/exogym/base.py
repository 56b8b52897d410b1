"""The bases of EXO Gym's strategies: what one node does in a step, and one thing that it exchanges.

Each class is written for one rank, and a user's classes derive from it. It also says what does the same for all nodes
at once, `_vectorised`, which a run takes where a user's class overrides nothing of it (`vectorised`, `as_written`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from vecgym import optim as vecgym_optim
from vecgym import strategy as native
from vecgym.compat.exogym.utils import LogModule
from vecgym.core import check
from vecgym.core.errors import warn
from vecgym.optim.schedule import NAMES as SCHEDULES
from vecgym.optim.schedule import Schedule, lambda_cosine
from vecgym.runs.options import optional_number

Spec = vecgym_optim.OptimSpec
AnySpec = str | Spec | type[torch.optim.Optimizer] | None

PACKAGE = __name__.rsplit(".", 1)[0]  # of the classes that are not a user's

# EXO Gym's strategies store whatever they are given, and its examples give some options to all of them.
WITHOUT_EFFECT = {
    "H": "this strategy exchanges at every step",
    "p": "EXO Gym never reads it; SPARTA's fraction is p_sparta",
    **dict.fromkeys(("p_sparta", "async_sparta_delay"), "this strategy is not SPARTA"),
    "sparta_interval": "this strategy is not SPARTA with DiLoCo",
    "island_size": "this strategy has no islands",
    **dict.fromkeys(("outer_optim", "outer_optim_spec", "outer_lr"), "this strategy has no outer optimizer"),
    **dict.fromkeys(("compression_decay", "compression_topk", "compression_chunk"), "this strategy is not DeMo"),
    "weight_decay": "give it to the OptimSpec",
    "max_norm": "this strategy does not clip",
    "optim_spec": "this strategy has no optimizer of its own",
    "communication_modules": "this strategy has modules of its own",
}


# ------------------------------------------------------------- optimizers, under the several names that scripts use


class OptimSpec(Spec):
    """`vecgym.OptimSpec`, with `cls` as the name of its first argument."""

    def __init__(self, cls: str | type[torch.optim.Optimizer] = torch.optim.AdamW, **kwargs: Any) -> None:
        super().__init__(cls, **kwargs)


def ensure_optim_spec(optim: AnySpec, default: Spec | None = None, **kwargs: Any) -> Spec:
    """Make an `OptimSpec` of a name, a spec, a class or None; `kwargs` override what a spec has."""
    if optim is None:
        return Spec(torch.optim.AdamW, **kwargs) if default is None else default
    if isinstance(optim, Spec):
        return optim.replace(**kwargs) if kwargs else optim
    return vecgym_optim.ensure_optim_spec(optim, **kwargs)


def inner_spec(whose: str, optim_spec: AnySpec, options: dict[str, Any]) -> Spec:
    """Return the inner optimizer asked for, under whichever of its names, and take these out of `options`."""
    others = taken(options, "inner_optim", "inner_optim_spec")
    rates = taken(options, "lr", "inner_lr")
    given = [x for x in (optim_spec, *others.values()) if x is not None]
    if len(given) > 1 or len(rates) > 1:
        raise TypeError(f"{whose} got its inner optimizer or learning rate twice: {given}, {rates}.")
    asked, lr = ensure_optim_spec(given[0] if given else None), next(iter(rates.values()), None)
    return asked if lr is None else asked.replace(lr=lr)


def taken(options: dict[str, Any], *names: str) -> dict[str, Any]:
    """Remove the named options, and return them."""
    return {name: options.pop(name) for name in names if name in options}


# ---------------------------------------------------------------------------------------------------------- classes


def warn_without_effect(whose: str, given: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Warn about each option given (not None) that has a reason to do nothing."""
    for name, value in given.items():
        if value is not None and name in reasons:
            warn(f"{whose}: {name}={value!r} has no effect: {reasons[name]}.")


def as_written(x: Any) -> type | None:
    """Return the class of EXO Gym that `x` behaves as; None: its own class overrides something of it, or is no such."""
    own: set[str] = set()
    for cls in type(x).__mro__:
        if cls.__module__.startswith(PACKAGE):
            return None if any(hasattr(cls, name) for name in own) else cls
        own |= {name for name, value in vars(cls).items() if callable(value) or isinstance(value, property)}
        own -= {name for name in own if name.startswith("__")}
    return None


class Strategy(ABC, LogModule):
    """What one node does in a step. Subclasses override `step` and end it with `super().step()`.

    Args:
        lr_scheduler: "lambda_cosine", "cosine" (the same with `cosine_anneal`), a class of
            `torch.optim.lr_scheduler`, or None.
        lr_scheduler_kwargs: `warmup_steps` (1), `cosine_anneal` (False), `max_steps`; for a class, its arguments.
        options: of a user's class, become attributes. Of EXO Gym's own classes, one without effect warns, and an
            unknown one is a TypeError.
    """

    def __init__(
        self,
        lr_scheduler: str | Callable[..., Any] | None = None,
        lr_scheduler_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        kwargs = dict(check.instance("lr_scheduler_kwargs", lr_scheduler_kwargs or {}, Mapping, "a dict"))
        if isinstance(lr_scheduler, str):
            for name in ("warmup_steps", "cosine_anneal"):  # the documents give them here
                if name in options:
                    kwargs.setdefault(name, options.pop(name))
            check.choice("lr_scheduler", lr_scheduler, SCHEDULES, "a class of torch.optim.lr_scheduler, or None")
            check.keywords("lr_scheduler_kwargs", kwargs, ("warmup_steps", "cosine_anneal", "max_steps"))
        self.lr_scheduler = lr_scheduler
        self.lr_scheduler_kwargs = kwargs
        if type(self).__module__.startswith(PACKAGE):
            check.keywords(type(self).__name__, options, WITHOUT_EFFECT)
            warn_without_effect(type(self).__name__, options, WITHOUT_EFFECT)
        self.kwargs = options
        for name, value in options.items():
            setattr(self, name, value)
        self.scheduler: Any = None
        self.lr_callbacks: list[Callable[[float], None]] = []
        self.max_steps = 1  # known when the run begins

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        """Start on a node; called once, with the node's own model."""
        self.model, self.rank, self.num_nodes, self.local_step = model, rank, num_nodes, 0
        spec = getattr(self, "optim_spec", None)
        if spec is not None:
            self.optim = spec.build(list(model.parameters()))

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
            self.scheduler = LambdaLR(self.optim, self._schedule(self.max_steps))
        elif self.lr_scheduler is not None:
            self.scheduler = self.lr_scheduler(self.optim, **self.lr_scheduler_kwargs)

    def _schedule(self, max_steps: int) -> Schedule:
        """Return the named schedule: a linear warm-up from 0, then 1, or a cosine down to 0.1."""
        end = self.lr_scheduler_kwargs.get("max_steps")
        return lambda_cosine(max_steps if end is None else min(end, max_steps), **self._form)

    @property
    def _form(self) -> dict[str, Any]:
        """The form of the named schedule, in the words of `lambda_cosine`."""
        given = self.lr_scheduler_kwargs
        anneal = given.get("cosine_anneal", False) or self.lr_scheduler == "cosine"
        return {"warmup_steps": given.get("warmup_steps", 1), "cosine_anneal": anneal}

    def _vectorised(self, num_nodes: int, **common: Any) -> native.Strategy | None:
        """Return what does the same for all nodes at once; None: this runs rank by rank."""
        return None

    def __config__(self, remove_keys: Sequence[str] | None = None) -> dict[str, Any]:
        hidden = ("iteration", "local_step", "lr_callbacks", "model", "optim", "scheduler", *(remove_keys or ()))
        return {**super().__config__(hidden), "strategy": type(self).__name__}


class OptimizingStrategy(Strategy):
    """A strategy with an inner optimizer, whose gradients may be clipped."""

    def __init__(self, optim_spec: AnySpec = None, max_norm: float | None = None, **options: Any) -> None:
        """Take the inner optimizer, the norm to which each node clips its gradient, and every strategy's options."""
        self.optim_spec = inner_spec(type(self).__name__, optim_spec, options)
        self.max_norm = optional_number("max_norm", max_norm, "[0, inf]", "the norm of a node's gradient; 0: any")
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

    def _vectorised(self, num_nodes: int) -> native.CommunicationModule | None:
        """Return what does the same for all nodes at once; None: this runs rank by rank."""
        return None


class CommunicateOptimizeStrategy(OptimizingStrategy):
    """The optimizer's step, then each communication module in turn."""

    def __init__(
        self,
        communication_modules: Sequence[Any],
        optim_spec: AnySpec = None,
        max_norm: float | None = None,
        **options: Any,
    ) -> None:
        check.instance("communication_modules", communication_modules, (list, tuple), "a list of communication modules")
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

    def _has(self, *classes: type) -> bool:
        """Whether these are the modules: a user may have put in others than the constructor."""
        return [as_written(module) for module in self.communication_modules] == list(classes)

    def _vectorised(self, num_nodes: int, **common: Any) -> native.Strategy | None:
        modules: list[Any] = [
            module._vectorised(num_nodes) if as_written(module) else None for module in self.communication_modules
        ]
        return None if None in modules else native.CommunicateOptimizeStrategy(modules, self.optim_spec, **common)


# ------------------------------------------------------------------------------------------------- a run's strategy


def vectorised(strategy: Strategy, num_nodes: int, max_steps: int | None) -> native.Strategy:
    """Return vecgym's strategy for a run of `max_steps`; None: as many as the epochs have.

    What cannot be written for all nodes at once, such as a user's own `step`, runs rank by rank.

    >>> from vecgym.compat.exogym import DiLoCoStrategy
    >>> vectorised(DiLoCoStrategy(OptimSpec(lr=0.1), H=5), num_nodes=2, max_steps=10)
    DiLoCoStrategy(OptimSpec(AdamW, lr=0.1), \
DiLoCoCommunicator(outer_optim=OptimSpec(SGD, lr=0.7, momentum=0.9, nesterov=True), H=5))
    """
    schedule = _schedule(strategy, max_steps)
    found = None
    if schedule is not None and as_written(strategy) is not None:
        found = strategy._vectorised(num_nodes, max_norm=getattr(strategy, "max_norm", None) or None, **schedule)
    return PerRank(strategy) if found is None else found


def _schedule(strategy: Strategy, max_steps: int | None) -> dict[str, Any] | None:
    """Return the arguments of vecgym that give the same learning rates; None: there are none."""
    if strategy.lr_scheduler is None:
        return {}
    if not isinstance(strategy.lr_scheduler, str):
        return None
    if strategy.lr_scheduler_kwargs.get("max_steps") is None:
        return {"lr_scheduler": "lambda_cosine", **strategy._form}
    return None if max_steps is None else {"lr_scheduler": strategy._schedule(max_steps)}


class PerRank(native.RankStrategy):
    """Runs a strategy written for EXO Gym on every rank; see `vecgym.strategy.per_rank`."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__()
        self.theirs = strategy

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        self.model = model
        self.theirs.max_steps = self.max_steps
        self.theirs._init_node(model, rank, num_nodes)
        if hasattr(self.theirs, "optim"):
            self.optim = self.theirs.optim  # whose learning rate is recorded
        self._left: dict[str, Any] = {}

    def step(self) -> None:
        """Add this step's gradients to what `zero_grad` leaves of the last step's, then run the user's step."""
        params = dict(self.model.named_parameters())
        fresh = {name: p.grad for name, p in params.items() if p.requires_grad}
        for name in fresh:
            params[name].grad = self._left.get(name)
        self.theirs.zero_grad()
        for name, grad in fresh.items():
            kept = params[name].grad
            params[name].grad = grad if kept is None or grad is None else kept.add_(grad)
        self.theirs.step()
        self._left = {name: p.grad for name, p in params.items()}

    def __repr__(self) -> str:
        settings = {name: x for name, x in self.theirs.__config__().items() if name not in ("kwargs", "strategy")}
        return f"{type(self.theirs).__name__}({', '.join(f'{name}={x!r}' for name, x in settings.items())})"
