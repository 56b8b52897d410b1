"""What an object holds and what it computes, as plain values: to compare two runs, and to say what differs.

- A function is its code (instructions, constants, arguments, the names that it uses; no comments, no line numbers, no
  names of its variables), its defaults, what it closes over, and the globals that it reads: also the functions that
  it calls.
- An object is its class and what it holds, a class its own methods. Those that come from an installed package are
  known by their names, those of a script or a module of the user's by their code.
- A tensor or array is a checksum of what is in it; of more than `MAX_BYTES`, of parts of that size in all.
- A dataset is its class, length, and the tensors in it: what else it counts or keeps while it is read does not matter.
- A generator of random numbers is its kind, torch's also the seed: its state changes whenever it is used.
- A path is its last part: files may move.

Nothing depends on addresses, the order of names in dicts and classes, or the seed of Python's hashes. Code depends on
the version of Python.
"""

from __future__ import annotations

import argparse
import dis
import enum
import functools
import hashlib
import itertools
import math
import random
import re
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from vecgym.core import tree
from vecgym.data import TokenWindows
from vecgym.data.partition import Shards

CODE = "code "  # begins the value of what is compared by its code
LONG = 32  # entries of a container from which on it is a checksum
LONG_TEXT = 200  # characters
MAX_BYTES = 2**30  # of a tensor, that are read
CHUNK_BYTES = 2**18
MAX_DEPTH = 16

_PLAIN = (bool, int, float, str, type(None))
_UNREAD = {  # methods that make or show an object: what it holds is compared itself
    "__init__", "__new__", "__post_init__", "__init_subclass__", "__repr__", "__str__", "__del__", "__eq__", "__hash__",
    "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__replace__", "__class_getitem__",
}  # fmt: skip
_MODULE_STATE = set(vars(nn.Module()))
_HOOKS = [name for name in sorted(_MODULE_STATE) if name.endswith("_hooks") and "forward" in name]
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)


def described(x: Any, name: str, *, weights: bool = True) -> dict[str, Any]:
    """Everything that an object holds and computes: name -> plain value.

    Args:
        weights: with the values of parameters and buffers, if `x` is a module; else only what else it is.

    >>> class Spec:
    ...     def __init__(self):
    ...         self.H, self.lr = 3, [0.1, None]
    >>> described(Spec(), "spec")
    {'spec': 'Spec', 'spec.H': 3, 'spec.lr': 'list of 2', 'spec.lr[0]': 0.1, 'spec.lr[1]': None}
    >>> described(torch.zeros(2), "x") == described(torch.ones(2), "x")
    False
    """
    found = _Description(weights)
    found.add(x, name)
    return found.values


def described_data(data: Any, name: str) -> dict[str, Any]:
    """As `described`, of what is given as a dataset: one of any class, or a function that makes those of the nodes.

    >>> described_data(TensorDataset(torch.zeros(2, 1)), "data")["data.tensors[0]"]
    'float32 [2, 1] with checksum 66df8a530b2e5a'
    """
    found = _Description()
    is_dataset = hasattr(data, "__getitem__") and not isinstance(data, (Tensor, np.ndarray, list, tuple, type))
    (found._dataset if is_dataset else found.add)(data, name, 0)
    return found.values


def checksum(values: Mapping[str, Any]) -> str:
    """Of what was described, in any version of Python: without code.

    >>> checksum({"a": 1, "b": 2.0}) == checksum({"b": 2.0, "a": 1}) != checksum({"a": 1, "b": 3.0})
    True
    """
    plain = {name: value for name, value in values.items() if not is_code(value)}
    return _hashed(repr(sorted(plain.items())).encode())


def is_code(value: Any) -> bool:
    """Whether a value of what was described is the checksum of code.

    >>> is_code("code 49e5bd1ad6c082"), is_code(0.1)
    (True, False)
    """
    return isinstance(value, str) and value.startswith(CODE)


def digest(values: Any) -> str:
    """A checksum of all tensors in nested dicts, lists and tuples.

    >>> digest(torch.ones(2)) == digest([torch.ones(2)]), digest(torch.ones(2)) == digest(torch.zeros(2))
    (True, False)
    """
    return _hashed(*itertools.chain.from_iterable(map(_contents, tree.leaves(values))))


def is_held(data: Any) -> bool:
    """Whether `described` reads all examples of a dataset, since they are tensors or lists in memory.

    >>> is_held(TensorDataset(torch.ones(3))), is_held(lambda rank, num_nodes, train: torch.ones(3))
    (True, False)
    """
    if type(data) is Subset:
        return is_held(data.dataset)
    if type(data) is ConcatDataset:
        return all(map(is_held, data.datasets))
    if isinstance(data, Shards):
        return is_held(data.dataset)
    return data is None or isinstance(data, (Tensor, np.ndarray, list, tuple)) or type(data) in _HELD


class _Description:
    """Collects name -> plain value of an object and of what it reaches."""

    def __init__(self, weights: bool = True) -> None:
        self.values: dict[str, Any] = {}
        self.weights = weights
        self.seen: dict[int, Any] = {}  # id -> the object, which lives as long: no other one has its id

    def add(self, x: Any, name: str, depth: int = 0) -> None:
        if type(x) in _PLAIN:
            self.values[name] = _short(x)
        elif id(x) in self.seen or depth > MAX_DEPTH:
            self.values[name] = "see above" if id(x) in self.seen else type(x).__name__
        else:
            self.seen[id(x)] = x
            self._adder(x)(x, name, depth + 1)
            if isinstance(x, (dict, list, tuple, types.MethodType)):  # what is shared there may as well be equal
                del self.seen[id(x)]

    def _adder(self, x: Any) -> Any:
        kinds: list[tuple[Any, Any]] = [
            ((Tensor, np.ndarray, np.generic), self._array),
            ((torch.Generator, random.Random, np.random.Generator, np.random.RandomState), self._generator),
            (type, self._class), (types.FunctionType, self._function), (types.MethodType, self._method),
            (functools.partial, self._partial), (Mapping, self._mapping), ((list, tuple, deque), self._sequence),
            ((set, frozenset), self._set), ((property, staticmethod, classmethod), self._descriptor),
            (nn.Module, self._module), (Dataset, self._dataset), (_NAMESPACES, self._object),
        ]  # fmt: skip
        found = next((adder for kind, adder in kinds if isinstance(x, kind)), None)
        if found is not None:
            return found
        if callable(getattr(x, "__wrapped__", None)):  # functools.cache
            return lambda x, name, depth: self.add(x.__wrapped__, name, depth)
        has_parts = hasattr(x, "__dict__") or len(getattr(type(x), "__slots__", ())) > 0
        words = not has_parts or isinstance(x, (types.ModuleType, PurePath, enum.Enum, types.BuiltinFunctionType))
        return self._words if words or _is_standard(type(x).__module__) else self._object

    # plain values

    def _array(self, x: Any, name: str, depth: int) -> None:
        if isinstance(x, np.ndarray) and x.dtype.hasobject:
            return self._sequence(x.tolist(), name, depth)
        form = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
        whole = not isinstance(x, Tensor) or (x.layout == torch.strided and x.device.type != "meta")
        one = f"{x.item()}, {form}" if whole and math.prod(x.shape) == 1 else ""
        self.values[name] = one or (f"{form} with checksum {_hashed(*_contents(x))}" if whole else form)

    def _generator(self, x: Any, name: str, depth: int) -> None:
        seed = f" of seed {x.initial_seed()}" if isinstance(x, torch.Generator) else ""
        self.values[name] = type(x).__name__ + seed

    def _words(self, x: Any, name: str, depth: int) -> None:
        shown = x.name if isinstance(x, PurePath) else getattr(x, "__name__", None) or repr(x)
        self.values[name] = _short(re.sub(r" at 0x[0-9a-f]+", "", str(shown)))

    # containers

    def _mapping(self, x: Mapping[Any, Any], name: str, depth: int) -> None:
        self._parts(x, name, depth, [(f"[{key!r}]", value) for key, value in x.items()])

    def _sequence(self, x: Any, name: str, depth: int) -> None:
        self._parts(x, name, depth, [(f"[{i}]", value) for i, value in enumerate(x)])

    def _set(self, x: Any, name: str, depth: int) -> None:
        each = sorted(repr(sorted(described(value, "").items())).encode() for value in x)
        self.values[name] = f"{type(x).__name__} of {len(x)} with checksum {_hashed(*each)}"

    def _parts(self, x: Any, name: str, depth: int, parts: list[tuple[str, Any]]) -> None:
        self.values[name] = f"{type(x).__name__} of {len(x)}"
        if len(parts) > LONG:
            inner = _Description()
            inner.seen.update(self.seen)
            for part, value in parts:
                inner.add(value, part, depth)
            self.values[name] += f" with checksum {_hashed(repr(sorted(inner.values.items())).encode())}"
            return
        for part, value in parts:
            self.add(value, name + part, depth)

    # functions and classes

    def _function(self, f: types.FunctionType, name: str, depth: int) -> None:
        own = not _is_library(f.__globals__.get("__name__") or f.__module__)
        self.values[name] = "function" if own else f.__qualname__
        if own:
            self.values[f"{name}()"] = CODE + _code(f.__code__)
        for key, value in sorted(_held_by(f, own).items()):
            self.add(value, f"{name}.{key}", depth)

    def _method(self, x: types.MethodType, name: str, depth: int) -> None:
        self.add(x.__func__, name, depth)
        self.add(x.__self__, f"{name}.self", depth)

    def _partial(self, x: Any, name: str, depth: int) -> None:
        self.values[name] = "partial"
        for key, value in {"func": x.func, **dict(enumerate(x.args)), **x.keywords}.items():
            self.add(value, f"{name}.{key}", depth)

    def _descriptor(self, x: Any, name: str, depth: int) -> None:
        parts = {".fget": x.fget, ".fset": x.fset} if isinstance(x, property) else {"": x.__func__}
        for part, function in parts.items():
            self.add(function, name + part, depth)

    def _class(self, x: type, name: str, depth: int) -> None:
        self.values[name] = x.__qualname__ if _is_library(x.__module__) else x.__name__
        self._methods(x, name, depth)
        made = None if _is_library(x.__module__) else vars(x).get("__init__")
        if made is not None:
            self.add(made, f"{name}.__init__", depth)

    def _methods(self, cls: type, name: str, depth: int) -> None:
        """Own methods and attributes of the user's classes among a class and its bases."""
        for base in cls.__mro__:
            if _is_library(base.__module__) or (base is not cls and id(base) in self.seen):
                continue
            self.seen[id(base)] = base
            where = name if base is cls else f"{name}.{base.__name__}"
            bases = ", ".join(b.__name__ for b in base.__bases__ if b is not object)
            if bases:
                self.values[f"{where} bases"] = bases
            for key, value in sorted(vars(base).items()):
                value = _as_written(value)
                if any(_as_written(vars(other).get(key)) is value for other in base.__mro__[1:]):
                    continue  # torch hangs hooks on a class that inherits `step` when it is first used
                read = key not in _UNREAD if isinstance(value, types.FunctionType) else not key.startswith("__")
                if read and key != "_abc_impl":
                    self.add(value, f"{where}.{key}", depth)

    # objects

    def _object(self, x: Any, name: str, depth: int) -> None:
        self.values[name] = type(x).__name__
        if id(type(x)) not in self.seen:
            self._methods(type(x), name, depth)
        own = not _is_library(type(x).__module__)
        slots = [key for cls in type(x).__mro__ for key in getattr(cls, "__slots__", ())]
        held = {key: getattr(x, key) for key in slots if hasattr(x, key) and not key.startswith("__")}
        for key, value in sorted({**held, **getattr(x, "__dict__", {})}.items()):
            inner = key.startswith("_") and (not own or type(value).__module__.startswith("vecgym."))
            if not inner:
                self.add(value, f"{name}.{key}", depth)

    def _module(self, x: nn.Module, name: str, depth: int) -> None:
        self.values[name] = type(x).__name__
        if id(type(x)) not in self.seen:
            self._methods(type(x), name, depth)
        own = not _is_library(type(x).__module__)
        for key, value in sorted(vars(x).items()):
            if key not in _MODULE_STATE and (own or not key.startswith("_")):
                self.add(value, f"{name}.{key}", depth)
        for key in _HOOKS:
            for i, hook in enumerate(getattr(x, key, {}).values()):
                self.add(hook, f"{name}.{key}[{i}]", depth)
        if self.weights:
            for key, value in sorted({**x._parameters, **x._buffers}.items()):
                self.add(value, f"{name}.{key}", depth)
                if isinstance(value, nn.Parameter) and not value.requires_grad:
                    self.values[f"{name}.{key}.requires_grad"] = False
        for key, child in sorted(x._modules.items()):
            self.add(child, f"{name}.{key}", depth - 1)  # models may be deep

    def _dataset(self, x: Any, name: str, depth: int) -> None:
        length = f" of {len(x)}" if hasattr(x, "__len__") else ""
        self.values[name] = type(x).__name__ + length
        if id(type(x)) not in self.seen:
            self._methods(type(x), name, depth)
        for key, value in sorted(getattr(x, "__dict__", {}).items()):
            if key in _PARTS.get(type(x), ()) or _is_data(value):
                self.add(value, f"{name}.{key}", depth)


_HELD = (TensorDataset, TokenWindows)
_PARTS: dict[type, tuple[str, ...]] = {
    Subset: ("dataset", "indices"), ConcatDataset: ("datasets",), TokenWindows: ("context",),
}  # fmt: skip


def _as_written(value: Any) -> Any:
    """A function without what a library has wrapped around it, such as torch's hooks of an optimizer's `step`."""
    while isinstance(value, types.FunctionType) and hasattr(value, "__wrapped__"):
        if not _is_library(value.__globals__.get("__name__")):
            break
        value = value.__wrapped__
    return value


def _is_data(x: Any) -> bool:
    """Whether an attribute of a dataset is what it is made of: a cache that fills as it is read is none."""
    kinds = (Tensor, np.ndarray, Dataset)
    several = list(x.values()) if isinstance(x, dict) and all(isinstance(key, str) for key in x) else x
    is_tuple = isinstance(several, tuple) or several is not x
    return isinstance(x, kinds) or bool(is_tuple and several and all(isinstance(y, kinds) for y in several))


def _held_by(f: types.FunctionType, own: bool) -> dict[str, Any]:
    """Defaults, what a function closes over, and the globals that it reads; of a library's, what it closes over."""
    cells = zip(f.__code__.co_freevars, f.__closure__ or ())
    held = {key: _closed_over(cell) for key, cell in cells if key != "__class__"}
    if not own:
        return held
    names = f.__code__.co_varnames[: f.__code__.co_argcount]
    held |= dict(zip(names[::-1], (f.__defaults__ or ())[::-1]))
    held |= f.__kwdefaults__ or {}
    read, attributes = _names(f.__code__)
    for name in read & f.__globals__.keys():
        value = f.__globals__[name]
        if isinstance(value, types.ModuleType) and not _is_library(value.__name__):
            held |= {f"{name}.{key}": vars(value)[key] for key in attributes & vars(value).keys()}
        elif not name.startswith("__"):
            held[name] = value
    return held


def _closed_over(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


@functools.cache
def _names(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The globals that code reads and does not set, and the names of attributes; inner functions' too."""
    instructions = [i for inner in _all_codes(code) for i in dis.get_instructions(inner)]
    globals_read = {i.argval for i in instructions if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    globals_set = {i.argval for i in instructions if i.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")}
    attributes = {i.argval for i in instructions if i.opcode in dis.hasname}
    return frozenset(globals_read - globals_set), frozenset(attributes)


def _all_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _all_codes(constant)


@functools.cache
def _code(code: types.CodeType) -> str:
    """A checksum of what code does. Constants that nothing loads, such as docstrings, do not matter."""
    arguments = code.co_argcount + code.co_kwonlyargcount
    flags = code.co_flags & (0x04 | 0x08 | 0x20 | 0x80 | 0x100 | 0x200)  # *args, **kwargs, generators, coroutines
    parts: list[Any] = [code.co_varnames[:arguments], code.co_argcount, code.co_posonlyargcount, flags]
    for i in dis.get_instructions(code):
        if i.opname == "EXTENDED_ARG":
            continue
        value = _constant(i.argval) if i.opcode in dis.hasconst else i.argval if i.opcode in dis.hasname else i.arg
        parts.append((i.opname, value))
    parts.append(getattr(code, "co_exceptiontable", b""))
    return _hashed(repr(parts).encode())


def _constant(x: Any) -> Any:
    """A constant as something whose `repr` is the same in every process."""
    if isinstance(x, types.CodeType):
        return _code(x)
    if isinstance(x, (tuple, frozenset)):
        parts = [_constant(y) for y in x]
        return type(x).__name__, sorted(parts, key=repr) if isinstance(x, frozenset) else parts
    return type(x).__name__, x


@functools.cache
def _is_library(module: str | None) -> bool:
    """Whether a module is an installed one, known by its name, and not a script's or one of the user's."""
    root = (module or "").partition(".")[0]
    if root in ("vecgym", "torch", "numpy") or _is_standard(root):
        return True
    found = sys.modules.get(module or "") or sys.modules.get(root)
    parts = Path(getattr(found, "__file__", None) or "").parts
    return "site-packages" in parts or "dist-packages" in parts


@functools.cache
def _is_standard(module: str) -> bool:
    root = module.partition(".")[0]
    file = getattr(sys.modules.get(root), "__file__", None)
    inside = file is None or Path(file).is_relative_to(sysconfig.get_path("stdlib"))
    return root in sys.stdlib_module_names and inside  # a user's file may have such a name


def _short(x: Any) -> Any:
    if isinstance(x, str) and len(x) > LONG_TEXT:
        return f"text of {len(x)} characters with checksum {_hashed(x.encode())}"
    return x


def _hashed(*parts: Any) -> str:
    found = hashlib.blake2b(digest_size=7)
    for part in parts:
        found.update(part)
    return found.hexdigest()


def _contents(x: Any) -> Iterator[Any]:
    """The bytes of a tensor or array, or of parts of it, evenly spaced from the first to the last."""
    if isinstance(x, Tensor):
        x = x.detach().resolve_conj().resolve_neg().cpu().contiguous().flatten().view(torch.uint8).numpy()
    flat = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    if flat.nbytes <= MAX_BYTES:
        yield flat
        return
    number = MAX_BYTES // CHUNK_BYTES
    for i in range(number):
        start = i * (flat.nbytes - CHUNK_BYTES) // (number - 1)
        yield flat[start : start + CHUNK_BYTES]
