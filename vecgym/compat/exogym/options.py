"""The arguments of EXO Gym's classes: what each may be, and which do nothing in the place where they stand."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from vecgym.core import check
from vecgym.core.errors import warn

P = ParamSpec("P")
R = TypeVar("R")


def _count(least: int = 1, what: str = "") -> Callable[[str, Any], int]:
    return lambda name, value: check.integer(name, value, least, what)


def _number(within: str, what: str = "") -> Callable[[str, Any], float]:
    return lambda name, value: check.number(name, value, within, what)


def _kind(kind: type | tuple[type, ...], give: str) -> Callable[[str, Any], Any]:
    return lambda name, value: check.instance(name, value, kind, give)


_FRACTION = _number("[0, 1]", "the fraction of the parameters that is exchanged, such as 0.005")
_INTERVAL = _count(what="the number of optimizer steps between two exchanges")

# What an argument of this name may be, wherever it stands.
CHECKS: dict[str, Callable[[str, Any], Any]] = {
    # of strategies
    "H": _INTERVAL,
    "p": _FRACTION,
    "p_sparta": _FRACTION,
    "sparsification_rate": _FRACTION,
    "sparta_interval": _INTERVAL,
    "async_sparta_delay": _count(0),
    "island_size": _count(what="the nodes of an island; None: all"),
    "max_norm": _number("[0, inf]", "the largest norm of a node's gradient; 0 and None do not clip"),
    "compression_decay": _number("[0, 1]", "the part of the momentum that a step keeps"),
    "compression_topk": _count(what="the coefficients sent of each chunk"),
    "compression_chunk": _count(what="the longest side of a chunk"),
    "weight_decay": _number("[0, inf)"),
    "communication_modules": _kind((list, tuple), "a list of communication modules"),
    "lr_scheduler_kwargs": _kind(Mapping, "a dict"),
    # of runs
    "num_nodes": _count(),
    "num_epochs": _count(),
    "max_steps": _count(),
    "batch_size": _count(),
    "minibatch_size": _count(),
    "shuffle": check.flag,
    "val_size": _count(0),
    "val_interval": _count(),
    "autocast": check.flag,
    "checkpoint_interval": _count(),
    "correlation_interval": _count(),
    "save_dir": lambda name, value: os.fspath(check.path(name, value)),
    "dataloader_kwargs": _kind(Mapping, "a dict of arguments of torch's DataLoader"),
    "force_recalculate": check.flag,
    "start_port": _count(0),
    "strict_timing": check.flag,
    # of scripts
    "path": check.path,
    "args": _kind((list, tuple), "the command line as a list of str"),
}


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, whose arguments are looked at by `CHECKS` first. Where None is the default, it may be given.

    >>> @checked
    ... def exchange(H: int = 100, island_size: int | None = None) -> int:
    ...     return H
    >>> exchange(H=0)
    Traceback (most recent call last):
    ...
    ValueError: H=0 must be an integer >= 1: the number of optimizer steps between two exchanges.
    """
    parameters = inspect.signature(function).parameters
    names = list(parameters)

    def looked_at(name: str, value: Any) -> Any:
        optional = name in parameters and parameters[name].default is None
        if name not in parameters or name not in CHECKS or (value is None and optional):
            return value
        return CHECKS[name](name, value)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        positional: Any = [*map(looked_at, names, args), *args[len(names) :]]
        named: Any = {name: looked_at(name, value) for name, value in kwargs.items()}
        return function(*positional, **named)

    return call


# Of a strategy: EXO Gym stores whatever it is given, so that its own examples give some options to all strategies.
OF_STRATEGIES = {
    "H": "this strategy exchanges at every step",
    "p": "EXO Gym never reads it; SPARTA's fraction is p_sparta",
    "p_sparta": "this strategy is not SPARTA",
    "sparta_interval": "this strategy is not SPARTA with DiLoCo",
    "async_sparta_delay": "this strategy is not SPARTA",
    "island_size": "this strategy has no islands",
    "outer_optim": "this strategy has no outer optimizer",
    "outer_optim_spec": "this strategy has no outer optimizer",
    "outer_lr": "this strategy has no outer optimizer",
    "compression_decay": "this strategy is not DeMo",
    "compression_topk": "this strategy is not DeMo",
    "compression_chunk": "this strategy is not DeMo",
    "weight_decay": "give it to the OptimSpec",
    "max_norm": "this strategy does not clip",
    "optim_spec": "this strategy has no optimizer of its own",
    "communication_modules": "this strategy has modules of its own",
}

# Of `fit` and `Trainer`.
OF_RUNS = {
    "start_port": "there are no processes, and so no ports",
    "port": "there are no processes, and so no ports",
    "devices": "all nodes are on one device; give device='cuda:1', say",
    "force_minibatch_recalculate": "nothing is probed: batches are computed whole unless minibatch_size is given",
}


def warn_without_effect(whose: str, given: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Warn for each option given (not None) that has a reason to do nothing."""
    for name, value in given.items():
        if value is not None and name in reasons:
            warn(f"{whose}: {name}={value!r} has no effect: {reasons[name]}.")
