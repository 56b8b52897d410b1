"""What a Python object holds: everything it can reach, and a copy of it that holds other tensors."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def reachable(root: Any) -> Iterator[Any]:
    """Every object that `root` holds: in attributes, containers, and what its functions close over.

    Of the globals that a function reads, only tensors.

    >>> lr = torch.tensor(0.5)
    >>> [x for x in reachable({"schedule": lambda step: lr * step}) if isinstance(x, Tensor)]
    [tensor(0.5000)]
    """
    seen: set[int] = set()
    todo = [root]
    while todo:
        x = todo.pop()
        if id(x) in seen or x is None or isinstance(x, (str, bytes, int, float, type, types.ModuleType)):
            continue
        seen.add(id(x))
        yield x
        todo += reversed(_parts_of(x))


def _parts_of(x: Any) -> list[Any]:
    if isinstance(x, (Tensor, torch.Generator)):
        return []
    if isinstance(x, dict):
        return list(x.values())
    if isinstance(x, (list, tuple, set, frozenset)):
        return list(x)
    if isinstance(x, functools.partial):
        return [x.func, *x.args, *x.keywords.values()]
    if isinstance(x, types.MethodType):
        return [x.__self__, x.__func__]
    if isinstance(x, types.FunctionType):
        cells = [cell.cell_contents for cell in x.__closure__ or () if not _is_empty(cell)]
        return [*cells, *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values(), *_global_tensors(x).values()]
    return list(vars(x).values()) if hasattr(x, "__dict__") else []


def _global_tensors(f: types.FunctionType) -> dict[str, Tensor]:
    found = {name: f.__globals__.get(name) for name in f.__code__.co_names}
    return {name: x for name, x in found.items() if isinstance(x, Tensor)}


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def replaced(x: Any, new: dict[int, Any]) -> Any:
    """A copy of an object that holds other tensors: `new`, from the id of what it holds to what stands in its place.

    What it holds is what `reachable` finds; `new` then has the copies, too.

    >>> lr = torch.tensor(0.5)
    >>> replaced(lambda step: lr * step, {id(lr): torch.tensor(0.1)})(2)
    tensor(0.2000)
    """
    if id(x) in new:
        return new[id(x)]
    if not _parts_of(x) or isinstance(x, (str, bytes, int, float, type, types.ModuleType)):
        return x
    if isinstance(x, functools.partial):
        func, args, keywords = replaced((x.func, x.args, x.keywords), new)
        y: Any = functools.partial(func, *args, **keywords)
    elif isinstance(x, types.MethodType):
        y = types.MethodType(x.__func__, replaced(x.__self__, new))
    elif isinstance(x, types.FunctionType):
        y = _function(x, new)
    elif isinstance(x, tuple) and hasattr(x, "_fields"):
        y = type(x)(*[replaced(value, new) for value in x])
    elif isinstance(x, (list, tuple, set, frozenset)):
        y = type(x)([replaced(value, new) for value in x])
    else:
        y = new[id(x)] = copy.copy(x)
        values = y if isinstance(y, dict) else vars(y)
        if y is not x:
            values.update({key: replaced(value, new) for key, value in values.items()})
    new[id(x)] = y
    return y


def _function(f: types.FunctionType, new: dict[int, Any]) -> types.FunctionType:
    cells = tuple(types.CellType() for _ in f.__closure__ or ())
    read = {name: replaced(x, new) for name, x in _global_tensors(f).items()}
    copied = types.FunctionType(
        f.__code__, {**f.__globals__, **read} if read else f.__globals__, f.__name__, None, cells
    )
    new[id(f)] = copied  # it may close over itself
    copied.__defaults__, copied.__kwdefaults__ = replaced((f.__defaults__, f.__kwdefaults__), new)
    for cell, own in zip(f.__closure__ or (), cells):
        if not _is_empty(cell):
            own.cell_contents = replaced(cell.cell_contents, new)
    return copied
