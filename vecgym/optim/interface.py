"""What a rule is made from, what it offers, and what it evolves: the interfaces between specs and rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from vecgym.core.tree import Tree

OptState = dict[str, Any]  # {"step": int64 [1 or L], slot: Tree, ...}: nested dicts of tensors
ParamGroups = Callable[[str, Tensor], dict[str, Any]]


class Spec(Protocol):
    """An optimizer class with its hyperparameters; `OptimSpec` is one."""

    cls: type[Optimizer]
    kwargs: dict[str, Any]
    param_groups: ParamGroups | None

    @property
    def hyper(self) -> dict[str, Any]: ...

    @property
    def lr(self) -> Any: ...

    def groups(self, params: Tree) -> Iterator[tuple[Spec, list[str], Any]]: ...

    def build(self, model_or_params: Iterable[Any], node: int | None = None) -> Optimizer: ...


def same_values(a: Any, b: Any) -> bool:
    """Whether two settings are equal, tensors by value."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_values(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(same_values(x, y) for x, y in zip(a, b))
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b or (isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b))
    return bool(a == b)
