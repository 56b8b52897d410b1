"""Settings: objects that are compared by value, and shown as the expression that makes them."""

from __future__ import annotations

import inspect
from typing import Any

from vecgym.core.objects import public, same
from vecgym.optim.optimizer import Optimizer


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
