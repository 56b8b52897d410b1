"""The types of arguments of EXO Gym's classes, which say how each is checked, and the options without effect."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ParamSpec, TypeVar, get_type_hints

from vecgym.core import check
from vecgym.core.errors import warn
from vecgym.core.options import checks_of

P = ParamSpec("P")
R = TypeVar("R")

_SEQUENCE = (list, tuple)
_fraction = partial(
    check.number, within="[0, 1]", what="the fraction of the parameters that is exchanged, such as 0.005"
)

# The type of an argument, and the function `(name, value) -> value` that checks it.
Count = Annotated[int, check.integer]
CountFrom0 = Annotated[int, partial(check.integer, least=0)]
Interval = Annotated[int, partial(check.integer, what="the number of optimizer steps between two exchanges")]
IslandSize = Annotated[int | None, partial(check.integer, what="the nodes of an island; None: all")]
Fraction = Annotated[float, _fraction]
OptionalFraction = Annotated[float | None, _fraction]
Part = Annotated[float, partial(check.number, within="[0, 1]", what="the part of the momentum that a step keeps")]
TopK = Annotated[int, partial(check.integer, what="the coefficients sent of each chunk")]
Chunk = Annotated[int, partial(check.integer, what="the longest side of a chunk")]
NotNegative = Annotated[float, partial(check.number, within="[0, inf)")]
MaxNorm = Annotated[
    float | None,
    partial(check.number, within="[0, inf]", what="the largest norm of a node's gradient; 0 and None do not clip"),
]
Flag = Annotated[bool, check.flag]
OptionalPort = Annotated[int | None, partial(check.integer, least=0)]
PathLike = Annotated[str | os.PathLike[str], check.path]
CommandLine = Annotated[
    Sequence[str], partial(check.instance, kind=_SEQUENCE, give="the command line as a list of str")
]
Modules = Annotated[Sequence[Any], partial(check.instance, kind=_SEQUENCE, give="a list of communication modules")]
Keywords = Annotated[Mapping[str, Any] | None, partial(check.instance, kind=Mapping, give="a dict")]


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Check the arguments of `function` as their types say. Where None is the default, it may be given.

    >>> @checked
    ... def exchange(H: Interval = 100, island_size: IslandSize = None) -> int:
    ...     return H
    >>> exchange(H=0)
    Traceback (most recent call last):
    ...
    ValueError: H=0 must be an integer >= 1: the number of optimizer steps between two exchanges.
    """
    checks, types, signature = checks_of(function), get_type_hints(function), inspect.signature(function)
    names = list(signature.parameters)

    def passed(name: str, value: Any) -> Any:
        if name not in checks or (value is None and signature.parameters[name].default is None):
            return value
        return checks[name](name, value)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        positional: Any = [*map(passed, names, args), *args[len(names) :]]
        named: Any = {name: passed(name, value) for name, value in kwargs.items()}
        return function(*positional, **named)

    shown = [
        p.replace(annotation=inspect.formatannotation(types[name])) if name in checks else p
        for name, p in signature.parameters.items()
    ]
    call.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return call


# EXO Gym's strategies store whatever they are given, and its examples give some options to all of them.
OF_STRATEGIES = {
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

# Of `fit` and `Trainer`.
OF_RUNS = {
    **dict.fromkeys(("start_port", "port"), "there are no processes, and so no ports"),
    "devices": "all nodes are on one device; give device='cuda:1', say",
    "force_minibatch_recalculate": "nothing is probed: batches are computed whole unless minibatch_size is given",
}


def warn_without_effect(whose: str, given: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Warn about each option given (not None) that has a reason to do nothing."""
    for name, value in given.items():
        if value is not None and name in reasons:
            warn(f"{whose}: {name}={value!r} has no effect: {reasons[name]}.")
