"""The arguments that all strategies share for their inner optimizer."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar, cast

from torch import Tensor

from vecgym.core import check
from vecgym.optim.schedule import Schedule

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
        given = inspect.signature(init)
        own = [p for p in given.parameters.values() if p.kind is not p.VAR_KEYWORD]
        names = [p.name for p in (*own[1:], *shared)]

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            check.keywords(type(self).__name__, kwargs, names)
            init(self, *args, **kwargs)

        checked.__signature__ = given.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
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
