"""Settings: objects that are compared by value, and shown as the expression that makes them."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar, cast

from torch import Tensor

from vecgym.core import check
from vecgym.core.objects import public, same
from vecgym.optim.optimizer import Optimizer
from vecgym.optim.schedule import Schedule

if sys.version_info >= (3, 11):  # of every constructor's `**inner`
    from typing import Unpack as Unpack
else:
    from typing_extensions import Unpack as Unpack  # torch depends on it


class Settings:
    """An object that holds settings only: equal to another of its class with equal settings.

    Attributes whose names begin with "_" are derived from the others, and not compared.

    >>> import torch
    >>> class Pair(Settings):
    ...     def __init__(self, left, right=0):
    ...         self.left, self.right = left, right
    >>> Pair(torch.ones(2)) == Pair(torch.ones(2)), Pair(1) == Pair(2), Pair(3, right=1)
    (True, False, Pair(3, right=1))
    """

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and same(public(self), public(other))

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return shown(self)


def shown(x: object, **instead: Any) -> str:
    """Show an object as `Class(argument, ...)`, with the arguments that are not their defaults.

    Args:
        instead: values to show in place of the attributes of the same names.
    """
    return f"{type(x).__name__}({', '.join(own_settings(x, **instead))})"


def own_settings(x: object, **instead: Any) -> list[str]:
    """Show the arguments of an object that it holds by the same names, and that are not their defaults; see `shown`.

    >>> class Named:
    ...     def __init__(self, name, **inner):
    ...         self.name, self.inner = name, "made of the rest"
    >>> own_settings(Named("a", lr=0.1))
    ["'a'"]
    """
    values, parts = {**vars(x), **instead}, []
    for name, parameter in inspect.signature(type(x)).parameters.items():
        if name not in values or parameter.kind is parameter.VAR_KEYWORD:
            continue
        if parameter.default is parameter.empty:
            parts.append(_text(values[name]))
        elif not same(values[name], parameter.default):
            parts.append(f"{name}={_text(values[name])}")
    return parts


def _text(value: Any) -> str:
    if isinstance(value, Optimizer):
        return repr(value.spec)
    return getattr(value, "__name__", None) or repr(value)


Constructor = TypeVar("Constructor", bound=Callable[..., None])


class StepOptions(TypedDict, total=False):
    """How the inner optimizer takes its steps; see `Strategy`."""

    max_norm: float | Tensor | None
    lr_scheduler: str | Schedule | None
    warmup_steps: int
    cosine_anneal: bool


class InnerOptions(StepOptions, total=False):
    """What all strategies take for their inner optimizer by keyword; see `Strategy`."""

    lr: float | Tensor | None


def takes_options(options: type) -> Callable[[Constructor], Constructor]:
    """Let a constructor take `**inner: Unpack[options]`, where `help` and editors see each option.

    >>> class Mine:
    ...     @takes_options(InnerOptions)
    ...     def __init__(self, H, **inner):
    ...         print(H, inner)
    >>> list(inspect.signature(Mine).parameters)
    ['H', 'lr', 'max_norm', 'lr_scheduler', 'warmup_steps', 'cosine_anneal']
    >>> Mine(3, warmup_step=5)
    Traceback (most recent call last):
    ...
    TypeError: Mine has no argument 'warmup_step'; did you mean 'warmup_steps'? It has: H, lr, max_norm, \
lr_scheduler, warmup_steps, cosine_anneal.
    """
    defaults = {"lr": None, "max_norm": None, "lr_scheduler": None, "warmup_steps": 0, "cosine_anneal": False}
    kinds = {name: kind.__forward_arg__ for name, kind in options.__annotations__.items()}
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kinds[name])
        for name, default in defaults.items()
        if name in kinds
    ]

    def decorate(init: Constructor) -> Constructor:
        signature = inspect.signature(init)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        names = [p.name for p in (*own[1:], *shared)]

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            check.keywords(type(self).__name__, kwargs, names)
            init(self, *args, **kwargs)

        checked.__signature__ = signature.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
        return cast(Constructor, checked)

    return decorate


def inner_rate(lr: float | Tensor | None, inner_lr: float | Tensor | None) -> float | Tensor | None:
    """Return the inner learning rate of a strategy that takes it by two names.

    >>> inner_rate(None, 0.1)
    0.1
    >>> inner_rate(0.1, 0.1)
    Traceback (most recent call last):
    ...
    ValueError: lr and inner_lr are two names for the inner learning rate: give one of them.
    """
    if lr is not None and inner_lr is not None:
        raise ValueError("lr and inner_lr are two names for the inner learning rate: give one of them.")
    return lr if inner_lr is None else inner_lr
