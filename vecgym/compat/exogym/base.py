"""The base classes of EXO Gym's strategies: a node's step, and its communication modules.

Each class is written for one rank, and a user's classes derive from it. Its method `_vectorised` returns the equivalent
for all nodes at once, which a run uses if a user's class overrides nothing (`vectorised`, `as_written`).

Before them stand the functions of `exogym.aux.utils`, which describe objects as plain data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from vecgym import optim as vecgym_optim
from vecgym import strategy as native
from vecgym.core import check
from vecgym.core.errors import warn
from vecgym.core.objects import public
from vecgym.optim.schedule import NAMES as SCHEDULES
from vecgym.optim.schedule import Schedule, lambda_cosine
from vecgym.runs.options import MAX_DEPTH, described, optional_number, resolve_device


class LogModule:
    """An object that describes its settings: `__config__()` is a dict of its attributes as plain data."""

    def __config__(self, remove_keys: Sequence[str] | None = None) -> dict[str, Any]:
        return {name: described(x) for name, x in public(self).items() if name not in (remove_keys or ())}


def extract_config(obj: Any, max_depth: int = MAX_DEPTH) -> Any:
    """Describe `obj` as plain data for JSON.

    >>> extract_config({"lr": 0.1, "shape": (2, 3), "model": nn.Linear(1, 1), "x": torch.zeros(2)})
    {'lr': 0.1, 'shape': [2, 3], 'model': 'Linear(in_features=1, out_features=1, bias=True)', 'x': [0.0, 0.0]}
    """
    return described(obj, around=(0,) * max(0, MAX_DEPTH - max_depth))


def create_config(
    model: nn.Module | None, strategy: Any, train_node: Any, extra_config: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Describe the settings of a run as plain data."""
    config: dict[str, Any] = {}
    if strategy is not None and hasattr(strategy, "__config__"):
        config["strategy"] = strategy.__config__()
    if train_node is not None and hasattr(train_node, "__config__"):
        config.update(train_node.__config__())
    if model is not None:
        config.update(model_name=type(model).__name__, model_parameters=_count(model) / 1e6)  # in millions
    return {**config, **{key: described(value) for key, value in (extra_config or {}).items()}}


def get_device() -> str:
    """Return the best available device: "cuda", else "mps", else "cpu"."""
    return resolve_device(None).type


def _count(model: nn.Module) -> int:
    count = getattr(model, "get_num_params", None)
    return int(count()) if callable(count) else sum(p.numel() for p in model.parameters())


Spec = vecgym_optim.OptimSpec
AnySpec = str | Spec | type[torch.optim.Optimizer] | None

PACKAGE = __name__.rsplit(".", 1)[0]  # the package of the classes that are not a user's

# EXO Gym's strategies accept any option, and its examples pass some options to all strategies.
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
    "optim_spec": "this strategy has its own optimizer",
    "communication_modules": "this strategy has its own modules",
}


# ------------------------------------------------------------- optimizers, under the several names that scripts use


class OptimSpec(Spec):
    """`vecgym.OptimSpec` whose first argument is named `cls`."""

    def __init__(self, cls: str | type[torch.optim.Optimizer] = torch.optim.AdamW, **kwargs: Any) -> None:
        super().__init__(cls, **kwargs)


def ensure_optim_spec(optim: AnySpec, default: Spec | None = None, **kwargs: Any) -> Spec:
    """Make an `OptimSpec` from a name, a spec, a class or None; `kwargs` override the settings of a spec."""
    if optim is None:
        return Spec(torch.optim.AdamW, **kwargs) if default is None else default
    if isinstance(optim, Spec):
        return optim.replace(**kwargs) if kwargs else optim
    return vecgym_optim.ensure_optim_spec(optim, **kwargs)


def inner_spec(whose: str, optim_spec: AnySpec, options: dict[str, Any]) -> Spec:
    """Return the inner optimizer, under any of its names, and remove these from `options`."""
    others = pop_options(options, "inner_optim", "inner_optim_spec")
    rates = pop_options(options, "lr", "inner_lr")
    specs = [x for x in (optim_spec, *others.values()) if x is not None]
    if len(specs) > 1 or len(rates) > 1:
        raise TypeError(f"{whose} got its inner optimizer or learning rate twice: {specs}, {rates}.")
    spec, lr = ensure_optim_spec(specs[0] if specs else None), next(iter(rates.values()), None)
    return spec if lr is None else spec.replace(lr=lr)


def pop_options(options: dict[str, Any], *names: str) -> dict[str, Any]:
    """Remove the named options, and return them."""
    return {name: options.pop(name) for name in names if name in options}


# ---------------------------------------------------------------------------------------------------------- classes


def warn_without_effect(whose: str, options: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Warn about each option that is not None and has a reason to have no effect."""
    for name, value in options.items():
        if value is not None and name in reasons:
            warn(f"{whose}: {name}={value!r} has no effect: {reasons[name]}.")


def as_written(x: Any) -> type | None:
    """Return EXO Gym's class that `x` behaves as, or None if its class overrides a method of it or has no such base."""
    methods: set[str] = set()
    for cls in type(x).__mro__:
        if cls.__module__.startswith(PACKAGE):
            return None if any(hasattr(cls, name) for name in methods) else cls
        methods |= {name for name, value in vars(cls).items() if callable(value) or isinstance(value, property)}
        methods -= {name for name in methods if name.startswith("__")}
    return None


class Strategy(ABC, LogModule):
    """One node's step. Subclasses override `step` and end it with `super().step()`.

    Args:
        lr_scheduler: "lambda_cosine", "cosine" (the same with `cosine_anneal`), a class of
            `torch.optim.lr_scheduler`, or None.
        lr_scheduler_kwargs: `warmup_steps` (1), `cosine_anneal` (False), `max_steps`; for a class, its arguments.
        options: those of a user's class become attributes. For EXO Gym's own classes, an option without effect warns,
            and an unknown one raises a TypeError.
    """

    def __init__(
        self,
        lr_scheduler: str | Callable[..., Any] | None = None,
        lr_scheduler_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        kwargs = dict(check.instance("lr_scheduler_kwargs", lr_scheduler_kwargs or {}, Mapping, "a dict"))
        if isinstance(lr_scheduler, str):
            for name in ("warmup_steps", "cosine_anneal"):  # the documentation passes them here
                if name in options:
                    kwargs.setdefault(name, options.pop(name))
            check.choice("lr_scheduler", lr_scheduler, SCHEDULES, "a class of torch.optim.lr_scheduler, or None")
            check.keywords("lr_scheduler_kwargs", kwargs, ("warmup_steps", "cosine_anneal", "max_steps"))
        self.lr_scheduler = lr_scheduler
        self.lr_scheduler_kwargs = kwargs
        if type(self).__module__.startswith(PACKAGE):
            takes = {name for cls in type(self).__mro__ for name in signature(cls.__init__).parameters}  # type: ignore[misc]
            takes = takes - {"self", "args", "kwargs", "options"} | {"inner_optim", "lr"}
            check.keywords(type(self).__name__, [name for name in options if name not in WITHOUT_EFFECT], sorted(takes))
            warn_without_effect(type(self).__name__, options, WITHOUT_EFFECT)
        self.kwargs = options
        for name, value in options.items():
            setattr(self, name, value)
        self.scheduler: Any = None
        self.lr_callbacks: list[Callable[[float], None]] = []
        self.max_steps = 1  # set when the run begins

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        """Start on a node; called once, with the node's own model."""
        self.model, self.rank, self.num_nodes, self.local_step = model, rank, num_nodes, 0
        spec = getattr(self, "optim_spec", None)
        if spec is not None:
            self.optim = ensure_optim_spec(spec).build(list(model.parameters()))

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
        """The arguments of `lambda_cosine` for the named schedule."""
        kwargs = self.lr_scheduler_kwargs
        anneal = kwargs.get("cosine_anneal", False) or self.lr_scheduler == "cosine"
        return {"warmup_steps": kwargs.get("warmup_steps", 1), "cosine_anneal": anneal}

    def _vectorised(self, num_nodes: int, **common: Any) -> native.Strategy | None:
        """Return the equivalent for all nodes at once, or None to run rank by rank."""
        return None

    def __config__(self, remove_keys: Sequence[str] | None = None) -> dict[str, Any]:
        hidden = ("iteration", "local_step", "lr_callbacks", "model", "optim", "scheduler", *(remove_keys or ()))
        return {**super().__config__(hidden), "strategy": type(self).__name__}


class OptimizingStrategy(Strategy):
    """A strategy with an inner optimizer, whose gradients may be clipped."""

    def __init__(self, optim_spec: AnySpec = None, max_norm: float | None = None, **options: Any) -> None:
        """Set the inner optimizer, the norm to which each node clips its gradient, and every strategy's options."""
        self.optim_spec = inner_spec(type(self).__name__, optim_spec, options)
        self.max_norm = optional_number(
            "max_norm", max_norm, "[0, inf]", "the norm of a node's gradient; 0: no clipping"
        )
        super().__init__(**options)

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        super()._init_node(model, rank, num_nodes)
        self._setup_scheduler()

    def _optimize(self) -> None:
        if self.max_norm:
            clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optim.step()


class CommunicationModule(ABC):
    """One exchange of a node, after the optimizer's step."""

    strategy: Any = None  # the strategy that it belongs to

    @abstractmethod
    def communicate(self, model: nn.Module, rank: int, num_nodes: int, local_step: int) -> None:
        """Exchange with the other nodes. `local_step`: the number of optimizer steps before this one."""

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:  # noqa: B027 - few modules need it
        """Start on a node; called once, with the node's own model."""

    def _vectorised(self, num_nodes: int, every: int) -> native.Exchange | None:
        """Return the equivalent for all nodes at once, every so many steps, or None to run rank by rank."""
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
        """Run the modules that are due in this step; override it for another timing."""
        for module in self.communication_modules:
            if (self.local_step + 1) % self._interval(module) == 0:
                module.communicate(self.model, self.rank, self.num_nodes, self.local_step)

    def _interval(self, module: CommunicationModule) -> int:
        """Return the number of steps from one call of a module to the next."""
        return 1

    def _vectorised(self, num_nodes: int, **common: Any) -> native.Strategy | None:
        exchanges: list[Any] = [
            module._vectorised(num_nodes, self._interval(module)) if as_written(module) else None
            for module in self.communication_modules
        ]
        return None if None in exchanges else native.CommunicateOptimizeStrategy(exchanges, self.optim_spec, **common)


# ------------------------------------------------------------------------------------------------- a run's strategy


def vectorised(strategy: Strategy, num_nodes: int, max_steps: int | None) -> native.Strategy:
    """Return vecgym's strategy for a run of `max_steps`, or of the steps of its epochs if None.

    A strategy without an equivalent for all nodes at once, such as one with a user's own `step`, runs rank by rank.

    >>> from vecgym.compat.exogym import DiLoCoStrategy
    >>> vectorised(DiLoCoStrategy(OptimSpec(lr=0.1), H=5), num_nodes=2, max_steps=10)
    CommunicateOptimizeStrategy(OptimSpec(AdamW, lr=0.1), Exchange(Outer(Mean()), every=5))
    """
    schedule = _schedule(strategy, max_steps)
    equivalent = None
    if schedule is not None and as_written(strategy) is not None:
        equivalent = strategy._vectorised(num_nodes, max_norm=getattr(strategy, "max_norm", None) or None, **schedule)
    return PerRank(strategy) if equivalent is None else equivalent


def _schedule(strategy: Strategy, max_steps: int | None) -> dict[str, Any] | None:
    """Return vecgym's arguments for the same learning rates, or None if there are none."""
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
        elif type(self.theirs).zero_grad is Strategy.zero_grad:
            name = type(self.theirs).__name__
            raise TypeError(f"{name} has no optimizer: give it optim_spec=, or set self.optim in its _init_node.")
        if self.theirs.scheduler is None:  # the documents promise it of `super().step()`
            self.theirs._setup_scheduler()
        self._left: dict[str, Any] = {}

    def step(self) -> None:
        """Add this step's gradients to those that `zero_grad` has left of the last step, then run the user's step."""
        params = dict(self.model.named_parameters())
        fresh = {name: p.grad for name, p in params.items() if p.requires_grad}
        for name in fresh:
            params[name].grad = self._left.get(name)
        self.theirs.zero_grad()
        for name, grad in fresh.items():
            previous = params[name].grad
            params[name].grad = grad if previous is None or grad is None else previous.add_(grad)
        self.theirs.step()
        self._left = {name: p.grad for name, p in params.items()}

    def __repr__(self) -> str:
        settings = {name: x for name, x in self.theirs.__config__().items() if name not in ("kwargs", "strategy")}
        return f"{type(self.theirs).__name__}({', '.join(f'{name}={x!r}' for name, x in settings.items())})"
