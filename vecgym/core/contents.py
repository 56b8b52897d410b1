"""Everything in a Python object that may change while it works, as a tree for a file, and back into an object like it.

For objects that keep their state to themselves, such as strategies written for one rank with their optimizers. The
second object was made as the first one had been, by the same code; it is filled in place, and what two places shared
they share again. Classes, functions and methods are taken to be the same in both.
"""

from __future__ import annotations

import collections
import random
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PLAIN = (bool, int, float, str, type(None))
_CONSTANT = (
    type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, torch.dtype,
    torch.device, torch.layout, torch.memory_format, type(Ellipsis),
)  # fmt: skip
_MISSING: Any = object()


def contents(root: Any, known: Mapping[str, Any], where: str = "self") -> dict[str, Any]:
    """What `root` holds: nested dicts and lists of tensors, arrays, numbers and strings.

    Args:
        known: objects that are kept elsewhere and that `root` may refer to, by name.
        where: what `root` is called in errors.

    Raises:
        TypeError: for something in it that cannot be saved, naming it: a lock, an iterator, an open file.

    >>> class Counter:
    ...     def __init__(self):
    ...         self.count, self.seen = 0, []
    >>> one, two = Counter(), Counter()
    >>> one.count, one.seen = 3, [torch.ones(2)]
    >>> fill(two, contents(one, {}), {})
    >>> two.count, two.seen
    (3, [tensor([1., 1.])])
    """
    return _Reader(known).read(root, where)


def fill(root: Any, held: Mapping[str, Any], known: Mapping[str, Any], where: str = "self") -> None:
    """Make an object hold what `contents` has found in another one of its kind.

    Raises:
        ValueError: for something that the saved object had and this one has nothing like.
    """
    _Writer(known).write(root, held, where)


class _Reader:
    def __init__(self, known: Mapping[str, Any]) -> None:
        self.names = {id(x): name for name, x in known.items()}
        self.numbers: dict[int, int] = {}
        self.kept: list[Any] = []  # as long as they live, no other object has their id

    def read(self, x: Any, where: str) -> dict[str, Any]:
        if type(x) in _PLAIN:
            return {"is": "value", "value": x}
        if isinstance(x, _CONSTANT):
            return {"is": "constant"}
        if id(x) in self.names:
            return {"is": "known", "name": self.names[id(x)]}
        if id(x) in self.numbers:
            return {"is": "again", "number": self.numbers[id(x)]}
        self.numbers[id(x)] = number = len(self.kept)
        self.kept.append(x)
        return {"number": number, **self._parts(x, where)}

    def _parts(self, x: Any, where: str) -> dict[str, Any]:
        if isinstance(x, Tensor):
            grad = None if x.grad_fn is not None or x.grad is None else x.grad.detach().clone()
            return {"is": "tensor", "value": x.detach().clone(), "grad": grad, "requires_grad": x.requires_grad}
        if isinstance(x, np.ndarray) and x.dtype != object:
            return {"is": "array", "value": x.copy()}
        if isinstance(x, np.generic):
            return {"is": "array", "value": np.asarray(x)}
        if _generator(x) is not None:
            return {"is": "generator", "value": _generator(x)}
        if isinstance(x, (list, tuple, collections.deque)):
            return {"is": "sequence", "items": [self.read(y, f"{where}[{i}]") for i, y in enumerate(x)],
                    "type": "list" if isinstance(x, list) else "tuple"}  # fmt: skip
        if isinstance(x, dict):
            keys = [self.read(key, f"a key of {where}") for key in x]
            return {"is": "dict", "keys": keys, "items": [self.read(y, f"{where}[{key!r}]") for key, y in x.items()]}
        if isinstance(x, (set, frozenset)):
            members = sorted(x, key=repr)
            return {"is": "set", "items": [self.read(y, f"a member of {where}") for y in members]}
        if hasattr(x, "__dict__"):
            parts = {name: vars(x)[name] for name in _ordered(vars(x))}
            return {"is": "object", "vars": {name: self.read(y, f"{where}.{name}") for name, y in parts.items()}}
        raise TypeError(
            f"{where} is a {type(x).__name__}, which cannot be saved: allowed are tensors, numbers, strings, lists, "
            "dicts, optimizers, modules, generators of random numbers, and objects of these."
        )


class _Writer:
    def __init__(self, known: Mapping[str, Any]) -> None:
        self.known = known
        self.made: dict[int, Any] = {}  # number -> the object in its place
        self.used: dict[int, Any] = {}  # objects that are in one place already: another one needs its own

    def write(self, x: Any, held: Mapping[str, Any], where: str) -> Any:
        """Fill `x` in place, if it can be, and return what belongs there."""
        kind = held["is"]
        if kind == "value":
            return held["value"]
        if kind == "known":
            return self.known[held["name"]]
        if kind == "again":
            return self.made[held["number"]]
        if id(x) in self.used:
            x = _MISSING
        y = x if kind == "constant" else self._filled(x, held, where)
        if y is _MISSING:
            raise ValueError(
                f"{where} of the saved object was made while it worked, and this new one has nothing like it: make it "
                "at the start, in _init_node."
            )
        if kind != "constant":
            self._place(held["number"], y)
        return y

    def _place(self, number: int, y: Any) -> None:
        self.made[number] = self.used[id(y)] = y

    def _filled(self, x: Any, held: Mapping[str, Any], where: str) -> Any:
        fillers: dict[str, Any] = {
            "tensor": self._tensor, "array": self._array, "generator": self._generator, "sequence": self._sequence,
            "dict": self._dict, "set": self._set, "object": self._object,
        }  # fmt: skip
        return fillers[held["is"]](x, held, where)

    def _tensor(self, x: Any, held: Mapping[str, Any], where: str) -> Any:
        value = held["value"]
        alike = isinstance(x, Tensor) and x.shape == value.shape and x.dtype == value.dtype
        with torch.no_grad():
            y = x.copy_(value) if alike else value.clone()
        if y.is_leaf and y.requires_grad != held["requires_grad"]:
            y.requires_grad_(held["requires_grad"])
        if y.is_leaf:
            y.grad = None if held["grad"] is None else held["grad"].to(y.device)
        return y

    def _array(self, x: Any, held: Mapping[str, Any], where: str) -> Any:
        value = held["value"]
        if isinstance(x, np.ndarray) and x.shape == value.shape and x.dtype == value.dtype:
            x[...] = value
            return x
        return value.copy() if value.ndim or isinstance(x, np.ndarray) else value[()]

    def _generator(self, x: Any, held: Mapping[str, Any], where: str) -> Any:
        if x is not _MISSING:
            _set_generator(x, held["value"])
        return x

    def _sequence(self, x: Any, held: Mapping[str, Any], where: str) -> Any:
        before = list(x) if isinstance(x, (list, tuple, collections.deque)) else []
        mutable = isinstance(x, (list, collections.deque))
        if mutable:
            self._place(held["number"], x)
        there = before + [_MISSING] * (len(held["items"]) - len(before))
        items = [self.write(y, part, f"{where}[{i}]") for i, (y, part) in enumerate(zip(there, held["items"]))]
        if mutable:
            x.clear()
            x.extend(items)
            return x
        if isinstance(x, tuple):
            return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
        return items if held["type"] == "list" else tuple(items)

    def _dict(self, x: Any, held: Mapping[str, Any], where: str) -> Any:
        x = x if isinstance(x, dict) else {}
        self._place(held["number"], x)
        before = dict(x)
        there = [*before, *[_MISSING] * len(held["keys"])]
        keys = [self.write(key, part, f"a key of {where}") for key, part in zip(there, held["keys"])]
        items = {
            key: self.write(before.get(key, _MISSING), part, f"{where}[{key!r}]")
            for key, part in zip(keys, held["items"])
        }
        x.clear()
        x.update(items)
        return x

    def _set(self, x: Any, held: Mapping[str, Any], where: str) -> Any:
        before = sorted(x, key=repr) if isinstance(x, (set, frozenset)) else []
        there = before + [_MISSING] * len(held["items"])
        items = [self.write(y, part, f"a member of {where}") for y, part in zip(there, held["items"])]
        if not isinstance(x, set):
            return type(x)(items) if isinstance(x, frozenset) else set(items)
        x.clear()
        x.update(items)
        return x

    def _object(self, x: Any, held: Mapping[str, Any], where: str) -> Any:
        if not hasattr(x, "__dict__") or x is _MISSING:
            return _MISSING
        self._place(held["number"], x)
        there = vars(x)
        for name in [name for name in there if name not in held["vars"]]:
            del there[name]
        for name, part in held["vars"].items():
            new = self.write(there.get(name, _MISSING), part, f"{where}.{name}")
            if name not in there or new is not there[name]:
                there[name] = new
        return x


def _ordered(names: Mapping[str, Any]) -> list[str]:
    """An optimizer's `state` has parameters as keys, which must have been met before."""
    return sorted(names, key=lambda name: name == "state")


def _generator(x: Any) -> Any:
    """The state of a generator of random numbers; None for anything else."""
    if isinstance(x, torch.Generator):
        return x.get_state()
    if isinstance(x, random.Random):
        return x.getstate()
    if isinstance(x, np.random.Generator):
        return x.bit_generator.state
    if isinstance(x, np.random.RandomState):
        return x.get_state(legacy=False)
    return None


def _set_generator(x: Any, state: Any) -> None:
    if isinstance(x, torch.Generator):
        x.set_state(state)
    elif isinstance(x, random.Random):
        x.setstate(state)
    elif isinstance(x, np.random.Generator):
        x.bit_generator.state = state
    else:
        x.set_state(state)
