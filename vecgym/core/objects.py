"""Python objects and everything that they hold: visit it, replace tensors in it, save its state and restore it.

An object holds what is in its attributes and containers; a function, what it closes over, its defaults, and the globals
that it reads.
"""

from __future__ import annotations

import collections
import copy
import dis
import functools
import random
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_ATOMS = (bool, int, float, complex, str, bytes, type(None))
_CONSTANTS = (
    type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, torch.dtype,
    torch.device, torch.layout, torch.memory_format, type(Ellipsis),
)  # fmt: skip
_SEQUENCES: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "deque": collections.deque,
    "set": set,
    "frozenset": frozenset,
}
_MISSING: Any = object()


# ----------------------------------------------------------------------------------------------------- functions


def closed_over(f: types.FunctionType) -> dict[str, Any]:
    """Return the variables of outer functions that a function uses, by name; one that is not set yet is left out."""
    values = {name: _contents(cell) for name, cell in zip(f.__code__.co_freevars, f.__closure__ or ())}
    return {name: x for name, x in values.items() if x is not _MISSING}


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def defaults(f: types.FunctionType) -> dict[str, Any]:
    """Return the defaults of a function's arguments, by name."""
    positional = f.__code__.co_varnames[: f.__code__.co_argcount]
    return {**dict(zip(positional[::-1], (f.__defaults__ or ())[::-1])), **(f.__kwdefaults__ or {})}


def globals_read(f: types.FunctionType) -> dict[str, Any]:
    """Return the globals that a function, and those in it, read and do not set, by name; no builtins."""
    return {name: f.__globals__[name] for name in _names_read(f.__code__) & f.__globals__.keys()}


@functools.cache
def _names_read(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals that code reads and does not set.

    >>> _names_read((lambda: torch.ones(2)).__code__)
    frozenset({'torch'})
    """
    instructions = [i for inner in _all_codes(code) for i in dis.get_instructions(inner)]
    read = {i.argval for i in instructions if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return frozenset(read - {i.argval for i in instructions if i.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")})


def _all_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _all_codes(constant)


# ----------------------------------------------------------------------------------------------- visit and replace


def reachable(root: Any) -> Iterator[Any]:
    """Visit every object that `root` holds, itself first. Of the globals that a function reads, only tensors.

    >>> lr = torch.tensor(0.5)
    >>> [x for x in reachable({"schedule": lambda step: lr * step}) if isinstance(x, Tensor)]
    [tensor(0.5000)]
    """
    seen: set[int] = set()
    todo = [root]
    while todo:
        x = todo.pop()
        if id(x) not in seen and not _is_constant(x):
            seen.add(id(x))
            yield x
            todo += reversed(_parts(x))


def replaced(x: Any, new: dict[int, Any]) -> Any:
    """Return a copy of an object that holds other tensors: `new` maps the id of a part to what takes its place.

    Parts are what `reachable` visits; afterwards `new` has the copies, too.

    >>> lr = torch.tensor(0.5)
    >>> replaced(lambda step: lr * step, {id(lr): torch.tensor(0.1)})(2)
    tensor(0.2000)
    """
    if id(x) in new:
        return new[id(x)]
    if _is_constant(x) or not _parts(x):
        return x
    if isinstance(x, functools.partial):
        func, args, keywords = replaced((x.func, x.args, x.keywords), new)
        y: Any = functools.partial(func, *args, **keywords)
    elif isinstance(x, types.MethodType):
        y = types.MethodType(x.__func__, replaced(x.__self__, new))
    elif isinstance(x, types.FunctionType):
        y = _replaced_in_function(x, new)
    elif isinstance(x, (list, tuple, set, frozenset)):
        y = _like(x, [replaced(value, new) for value in x])
    else:
        y = new[id(x)] = copy.copy(x)
        values = y if isinstance(y, dict) else vars(y)
        if y is not x:
            values.update({key: replaced(value, new) for key, value in values.items()})
    new[id(x)] = y
    return y


def _replaced_in_function(f: types.FunctionType, new: dict[int, Any]) -> types.FunctionType:
    cells = tuple(types.CellType() for _ in f.__closure__ or ())
    read = {name: replaced(x, new) for name, x in _global_tensors(f).items()}
    y = types.FunctionType(f.__code__, {**f.__globals__, **read} if read else f.__globals__, f.__name__, None, cells)
    new[id(f)] = y  # it may close over itself
    y.__defaults__, y.__kwdefaults__ = replaced((f.__defaults__, f.__kwdefaults__), new)
    values = closed_over(f)
    for name, cell in zip(f.__code__.co_freevars, cells):
        if name in values:
            cell.cell_contents = replaced(values[name], new)
    return y


def _parts(x: Any) -> list[Any]:
    """Return what an object holds directly."""
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
        return [*closed_over(x).values(), *defaults(x).values(), *_global_tensors(x).values()]
    return list(vars(x).values()) if hasattr(x, "__dict__") else []


def _is_constant(x: Any) -> bool:
    return isinstance(x, (*_ATOMS, type, types.ModuleType))


def _global_tensors(f: types.FunctionType) -> dict[str, Tensor]:
    return {name: x for name, x in globals_read(f).items() if isinstance(x, Tensor)}


def _like(x: Any, items: list[Any]) -> Any:
    """Return the items in a container of the type of `x`."""
    return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)


# ------------------------------------------------------------------------------------------------ save and restore


def state_of(root: Any, known: Mapping[str, Any], where: str = "self") -> dict[str, Any]:
    """Return everything in an object that may change while it works: nested dicts and lists for a file.

    For objects that keep their state to themselves, such as strategies written for one rank with their optimizers.
    Classes, functions and methods are taken to be the same in every object that is made by the same code.

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
    >>> restore(two, state_of(one, {}), {})
    >>> two.count, two.seen
    (3, [tensor([1., 1.])])
    """
    return _Reader(known).read(root, where)


def restore(root: Any, state: Mapping[str, Any], known: Mapping[str, Any], where: str = "self") -> None:
    """Fill an object, in place, with the `state_of` another one that the same code has made.

    What two places of the other object shared they share again.

    Raises:
        ValueError: for something that the saved object had and this one has nothing like.
    """
    _Writer(known).write(root, state, where)


class _Generator(NamedTuple):
    kind: type
    get: Any
    set: Any


_GENERATORS = (
    _Generator(torch.Generator, torch.Generator.get_state, torch.Generator.set_state),
    _Generator(random.Random, lambda x: x.getstate(), lambda x, state: x.setstate(state)),
    _Generator(
        np.random.Generator, lambda x: x.bit_generator.state, lambda x, state: setattr(x.bit_generator, "state", state)
    ),
    _Generator(np.random.RandomState, lambda x: x.get_state(legacy=False), np.random.RandomState.set_state),
)
GENERATORS = tuple(each.kind for each in _GENERATORS)


class _Reader:
    def __init__(self, known: Mapping[str, Any]) -> None:
        self.names = {id(x): name for name, x in known.items()}
        self.numbers: dict[int, int] = {}
        self.kept: list[Any] = []  # as long as they live, no other object has their id

    def read(self, x: Any, where: str) -> dict[str, Any]:
        if isinstance(x, _CONSTANTS):
            return {"is": "constant"}
        if type(x) in _ATOMS and not isinstance(x, (bytes, complex)):
            return {"is": "value", "value": x}
        if id(x) in self.names:
            return {"is": "known", "name": self.names[id(x)]}
        if id(x) in self.numbers:
            return {"is": "again", "number": self.numbers[id(x)]}
        self.numbers[id(x)] = number = len(self.kept)
        self.kept.append(x)
        return {"number": number, **self._state(x, where)}

    def _state(self, x: Any, where: str) -> dict[str, Any]:
        if isinstance(x, Tensor):
            grad = None if x.grad_fn is not None or x.grad is None else x.grad.detach().clone()
            return {"is": "tensor", "value": x.detach().clone(), "grad": grad, "requires_grad": x.requires_grad}
        if (isinstance(x, np.ndarray) and x.dtype != object) or isinstance(x, np.generic):
            return {"is": "array", "value": np.array(x)}
        for generator in _GENERATORS:
            if isinstance(x, generator.kind):
                return {"is": "generator", "value": generator.get(x)}
        if (members := _members(x)) is not None:
            kind = next(name for name, cls in _SEQUENCES.items() if isinstance(x, cls))
            return {"is": "sequence", "type": kind,
                    "items": [self.read(y, f"{where}[{i}]") for i, y in enumerate(members)]}  # fmt: skip
        if isinstance(x, dict):
            keys = [self.read(key, f"a key of {where}") for key in x]
            return {"is": "dict", "keys": keys, "items": [self.read(y, f"{where}[{key!r}]") for key, y in x.items()]}
        if hasattr(x, "__dict__"):
            # An optimizer's `state` has parameters as keys, which must have been met before.
            names = sorted(vars(x), key=lambda name: name == "state")
            return {"is": "object", "vars": {name: self.read(vars(x)[name], f"{where}.{name}") for name in names}}
        raise TypeError(
            f"{where} is a {type(x).__name__}, which cannot be saved: allowed are tensors, numbers, strings, lists, "
            "dicts, optimizers, modules, generators of random numbers, and objects of these."
        )


class _Writer:
    def __init__(self, known: Mapping[str, Any]) -> None:
        self.known = known
        self.made: dict[int, Any] = {}  # number -> the object in its place
        self.used: dict[int, Any] = {}  # objects that are in one place already: another one needs its own

    def write(self, x: Any, state: Mapping[str, Any], where: str) -> Any:
        """Fill `x` in place, if possible, and return what belongs there."""
        kind = state["is"]
        if kind == "value":
            return state["value"]
        if kind == "known":
            return self.known[state["name"]]
        if kind == "again":
            return self.made[state["number"]]
        if id(x) in self.used:
            x = _MISSING
        y = x if kind == "constant" else self._WRITERS[kind](self, x, state, where)
        if y is _MISSING:
            raise ValueError(
                f"{where} of the saved object was made while it worked, and this new one has nothing like it: make it "
                "at the start, in _init_node."
            )
        if kind != "constant":
            self._place(state, y)
        return y

    def _place(self, state: Mapping[str, Any], y: Any) -> None:
        self.made[state["number"]] = self.used[id(y)] = y

    def _tensor(self, x: Any, state: Mapping[str, Any], where: str) -> Any:
        value = state["value"]
        alike = isinstance(x, Tensor) and x.shape == value.shape and x.dtype == value.dtype
        with torch.no_grad():
            y = x.copy_(value) if alike else value.clone()
        if y.is_leaf:
            y.requires_grad_(state["requires_grad"])
            y.grad = None if state["grad"] is None else state["grad"].to(y.device)
        return y

    def _array(self, x: Any, state: Mapping[str, Any], where: str) -> Any:
        value = state["value"]
        if isinstance(x, np.ndarray) and x.shape == value.shape and x.dtype == value.dtype:
            x[...] = value
            return x
        return value.copy() if value.ndim or isinstance(x, np.ndarray) else value[()]

    def _generator(self, x: Any, state: Mapping[str, Any], where: str) -> Any:
        for generator in _GENERATORS:
            if isinstance(x, generator.kind):
                generator.set(x, state["value"])
        return x

    def _sequence(self, x: Any, state: Mapping[str, Any], where: str) -> Any:
        before = _members(x)
        x = _SEQUENCES[state["type"]]() if before is None else x
        is_mutable = not isinstance(x, (tuple, frozenset))
        if is_mutable:
            self._place(state, x)
        olds = [*(before or []), *[_MISSING] * len(state["items"])]
        items = [self.write(y, part, f"{where}[{i}]") for i, (y, part) in enumerate(zip(olds, state["items"]))]
        if not is_mutable:
            return _like(x, items)
        x.clear()
        (x.update if isinstance(x, set) else x.extend)(items)
        return x

    def _dict(self, x: Any, state: Mapping[str, Any], where: str) -> Any:
        x = x if isinstance(x, dict) else {}
        self._place(state, x)
        before = dict(x)
        olds = [*before, *[_MISSING] * len(state["keys"])]
        keys = [self.write(key, part, f"a key of {where}") for key, part in zip(olds, state["keys"])]
        items = {
            key: self.write(before.get(key, _MISSING), part, f"{where}[{key!r}]")
            for key, part in zip(keys, state["items"])
        }
        x.clear()
        x.update(items)
        return x

    def _object(self, x: Any, state: Mapping[str, Any], where: str) -> Any:
        if not hasattr(x, "__dict__") or x is _MISSING:
            return _MISSING
        self._place(state, x)
        values = vars(x)
        for name in values.keys() - state["vars"].keys():
            del values[name]
        for name, part in state["vars"].items():
            new = self.write(values.get(name, _MISSING), part, f"{where}.{name}")
            if name not in values or new is not values[name]:
                values[name] = new
        return x

    _WRITERS = types.MappingProxyType({
        "tensor": _tensor, "array": _array, "generator": _generator, "sequence": _sequence, "dict": _dict,
        "object": _object,
    })  # fmt: skip


def _members(x: Any) -> list[Any] | None:
    """Return what is in a list, tuple, deque or set, in a fixed order; None for anything else."""
    if isinstance(x, (set, frozenset)):
        return sorted(x, key=repr)
    return list(x) if isinstance(x, (list, tuple, collections.deque)) else None
