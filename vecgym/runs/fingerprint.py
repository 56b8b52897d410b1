"""Describe what an object holds and computes as plain values, to compare two runs and to say what differs.

- A function is described by its code (instructions, constants, arguments, the names that it uses; no comments, line
  numbers or names of variables), its defaults, what it closes over, and the globals that it reads, including the
  functions that it calls.
- An object is described by its class and what it holds, a class by its own methods. Those from an installed package
  are known by their names, those from a script or module of the user's by their code.
- A tensor or array is described by a checksum; beyond `MAX_BYTES`, by one of evenly spaced parts of that size in all.
- A dataset is described by its class, its length and its tensors: whatever it counts or caches does not matter.
- A generator of random numbers is described by its kind, torch's also by its seed: its state changes with every use.
- A path is described by its last part: files may move.

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
import re
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from vecgym.core import tree
from vecgym.core.objects import GENERATORS, closed_over, defaults, globals_read, names_in
from vecgym.data import TokenWindows
from vecgym.data.partition import Shards

CODE = "code "  # the start of the value of anything that is compared by its code
LONG = 32  # entries; longer containers become a checksum
LONG_TEXT = 200  # characters; longer texts do too
MAX_BYTES = 2**30  # read of a tensor
CHUNK_BYTES = 2**18
MAX_DEPTH = 16

Parts = Iterable[tuple[str, Any]]
_PLAIN = (bool, int, float, str, type(None))
_UNREAD = {  # methods that create or show an object: its contents are compared anyway
    "__init__", "__new__", "__post_init__", "__init_subclass__", "__repr__", "__str__", "__del__", "__eq__", "__hash__",
    "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__replace__", "__class_getitem__",
}  # fmt: skip
_MODULE_STATE = set(vars(nn.Module()))
_HOOKS = [name for name in sorted(_MODULE_STATE) if name.endswith("_hooks") and "forward" in name]
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)


def fingerprint_of(x: Any, name: str, *, weights: bool = True) -> dict[str, Any]:
    """Return everything that an object holds and computes: name -> plain value.

    Args:
        weights: include the values of parameters and buffers, if `x` is a module.

    >>> class Spec:
    ...     def __init__(self):
    ...         self.H, self.lr = 3, [0.1, None]
    >>> fingerprint_of(Spec(), "spec")
    {'spec': 'Spec', 'spec.H': 3, 'spec.lr': 'list of 2', 'spec.lr[0]': 0.1, 'spec.lr[1]': None}
    >>> fingerprint_of(torch.zeros(2), "x") == fingerprint_of(torch.ones(2), "x")
    False
    """
    result = _Fingerprint(weights)
    result.add(x, name)
    return result.values


def fingerprint_of_data(data: Any, name: str) -> dict[str, Any]:
    """Return the fingerprint of a dataset of any class, or of a function that makes the nodes' datasets.

    >>> fingerprint_of_data(TensorDataset(torch.zeros(2, 1)), "data")["data.tensors[0]"]
    'float32 [2, 1] with checksum 66df8a530b2e5a'
    """
    result = _Fingerprint()
    if hasattr(data, "__getitem__") and not isinstance(data, (Tensor, np.ndarray, list, tuple, type)):
        result.add_parts(result.dataset(data), name)
    else:
        result.add(data, name)
    return result.values


def checksum(values: Mapping[str, Any]) -> str:
    """Return a checksum of a fingerprint that holds for any version of Python: without code.

    >>> checksum({"a": 1, "b": 2.0}) == checksum({"b": 2.0, "a": 1}) != checksum({"a": 1, "b": 3.0})
    True
    """
    plain = {name: value for name, value in values.items() if not is_code(value)}
    return _hashed(repr(sorted(plain.items())).encode())


def is_code(value: Any) -> bool:
    """Whether a value of a fingerprint is the checksum of code.

    >>> is_code("code 49e5bd1ad6c082"), is_code(0.1)
    (True, False)
    """
    return isinstance(value, str) and value.startswith(CODE)


def digest(values: Any) -> str:
    """Return a checksum of all tensors in nested dicts, lists and tuples.

    >>> digest(torch.ones(2)) == digest([torch.ones(2)]), digest(torch.ones(2)) == digest(torch.zeros(2))
    (True, False)
    """
    return _hashed(*itertools.chain.from_iterable(map(_bytes_of, tree.leaves(values))))


def is_in_memory(data: Any) -> bool:
    """Whether `fingerprint_of` reads all examples of a dataset: they are tensors or lists in memory.

    >>> is_in_memory(TensorDataset(torch.ones(3))), is_in_memory(lambda rank, num_nodes, train: torch.ones(3))
    (True, False)
    """
    if type(data) is Subset:
        return is_in_memory(data.dataset)
    if type(data) is ConcatDataset:
        return all(map(is_in_memory, data.datasets))
    if isinstance(data, Shards):
        return is_in_memory(data.dataset)
    return data is None or isinstance(data, (Tensor, np.ndarray, list, tuple)) or type(data) in _IN_MEMORY


class _Fingerprint:
    """Collect name -> plain value of an object and of everything that it reaches."""

    def __init__(self, weights: bool = True) -> None:
        self.values: dict[str, Any] = {}
        self.weights = weights
        self.seen: dict[int, Any] = {}  # id -> the object, which stays alive: no other gets its id
        self.depth = 0

    def add(self, x: Any, name: str) -> None:
        if type(x) in _PLAIN:
            self.values[name] = _short(x)
        elif id(x) in self.seen or self.depth > MAX_DEPTH:
            self.values[name] = "see above" if id(x) in self.seen else type(x).__name__
        else:
            self.seen[id(x)] = x
            self.add_parts(self._kind(x)(x), name)
            if isinstance(x, (dict, list, tuple, types.MethodType)):  # shared or equal: no matter
                del self.seen[id(x)]

    def add_parts(self, parts: Parts, name: str) -> None:
        self.depth += 1
        for part, value in parts:
            self.add(value, name + part)
        self.depth -= 1

    def _kind(self, x: Any) -> Callable[[Any], Parts]:
        """Return the function that yields the parts of `x`: the end of each name, "" for `x` itself, and its value."""
        kinds: list[tuple[Any, Callable[[Any], Parts]]] = [
            ((Tensor, np.ndarray, np.generic), self._array), (GENERATORS, self._generator), (type, self._class),
            (types.FunctionType, self._function), (types.MethodType, self._method), (functools.partial, self._partial),
            ((Mapping, list, tuple, deque), self._entries), ((set, frozenset), self._set),
            ((property, staticmethod, classmethod), self._descriptor), (nn.Module, self._module),
            (Dataset, self.dataset), (_NAMESPACES, self._object),
        ]  # fmt: skip
        for kind, parts in kinds:
            if isinstance(x, kind):
                return parts
        if callable(getattr(x, "__wrapped__", None)):  # functools.cache
            return lambda x: [("", x.__wrapped__)]
        has_parts = hasattr(x, "__dict__") or len(getattr(type(x), "__slots__", ())) > 0
        words = not has_parts or isinstance(x, (types.ModuleType, PurePath, enum.Enum, types.BuiltinFunctionType))
        return self._words if words or _is_standard(type(x).__module__) else self._object

    def _array(self, x: Any) -> Parts:
        if isinstance(x, np.ndarray) and x.dtype.hasobject:
            return self._entries(x.tolist())
        form = tree.form(x)
        if isinstance(x, Tensor) and (x.layout != torch.strided or x.device.type == "meta"):
            return [("", form)]
        one = math.prod(x.shape) == 1
        return [("", f"{x.item()}, {form}" if one else f"{form} with checksum {_hashed(*_bytes_of(x))}")]

    def _generator(self, x: Any) -> Parts:
        return [("", type(x).__name__ + (f" of seed {x.initial_seed()}" if isinstance(x, torch.Generator) else ""))]

    def _words(self, x: Any) -> Parts:
        shown = x.name if isinstance(x, PurePath) else getattr(x, "__name__", None) or repr(x)
        return [("", re.sub(r" at 0x[0-9a-f]+", "", str(shown)))]

    def _set(self, x: Any) -> Parts:
        each = sorted(repr(sorted(fingerprint_of(value, "").items())).encode() for value in x)
        return [("", f"{type(x).__name__} of {len(x)} with checksum {_hashed(*each)}")]

    def _entries(self, x: Any) -> Parts:
        head, entries = f"{type(x).__name__} of {len(x)}", x.items() if isinstance(x, Mapping) else enumerate(x)
        parts = [(f"[{key!r}]", value) for key, value in entries]
        if len(parts) <= LONG:
            return [("", head), *parts]
        inner = _Fingerprint()
        inner.seen, inner.depth = dict(self.seen), self.depth
        inner.add_parts(parts, "")
        return [("", f"{head} with checksum {_hashed(repr(sorted(inner.values.items())).encode())}")]

    def _function(self, f: types.FunctionType) -> Parts:
        library = _is_library(f.__globals__.get("__name__") or f.__module__)
        yield "", f.__qualname__ if library else "function"
        if not library:
            yield "()", CODE + _code(f.__code__)
        yield from _named(_held_by(f, library))

    def _method(self, x: types.MethodType) -> Parts:
        return [("", x.__func__), (".self", x.__self__)]

    def _partial(self, x: Any) -> Parts:
        held = {"func": x.func, **dict(enumerate(x.args)), **x.keywords}
        return [("", "partial"), *((f".{key}", value) for key, value in held.items())]

    def _descriptor(self, x: Any) -> Parts:
        return [(".fget", x.fget), (".fset", x.fset)] if isinstance(x, property) else [("", x.__func__)]

    def _class(self, x: type) -> Parts:
        library = _is_library(x.__module__)
        yield "", x.__qualname__ if library else x.__name__
        yield from self._methods(x)
        if not library and "__init__" in vars(x):
            yield ".__init__", vars(x)["__init__"]

    def _methods(self, cls: type) -> Parts:
        """Yield the methods and attributes that the user's classes among a class and its bases define."""
        for base in cls.__mro__:
            if _is_library(base.__module__) or (base is not cls and id(base) in self.seen):
                continue
            self.seen[id(base)] = base
            where = "" if base is cls else f".{base.__name__}"
            bases = ", ".join(b.__name__ for b in base.__bases__ if b is not object)
            if bases:
                yield f"{where} bases", bases
            for key, value in sorted(vars(base).items()):
                value = _as_written(value)
                if any(_as_written(vars(other).get(key)) is value for other in base.__mro__[1:]):
                    continue  # torch adds hooks to a class that inherits `step` when it is first used
                read = key not in _UNREAD if isinstance(value, types.FunctionType) else not key.startswith("__")
                if read and key != "_abc_impl":
                    yield f"{where}.{key}", value

    def _head(self, x: Any, more: str = "") -> Parts:
        yield "", type(x).__name__ + more
        if id(type(x)) not in self.seen:
            yield from self._methods(type(x))

    def _object(self, x: Any) -> Parts:
        yield from self._head(x)
        library = _is_library(type(x).__module__)
        slots = [key for cls in type(x).__mro__ for key in getattr(cls, "__slots__", ())]
        values = {key: getattr(x, key) for key in slots if hasattr(x, key) and not key.startswith("__")}
        for key, value in _named({**values, **getattr(x, "__dict__", {})}):
            if not key.startswith("._") or not (library or type(value).__module__.startswith("vecgym.")):
                yield key, value

    def _module(self, x: nn.Module) -> Parts:
        yield from self._head(x)
        library = _is_library(type(x).__module__)
        settings = {key: value for key, value in vars(x).items() if key not in _MODULE_STATE}
        yield from _named({key: value for key, value in settings.items() if not (library and key.startswith("_"))})
        for key in _HOOKS:
            yield from ((f".{key}[{i}]", hook) for i, hook in enumerate(getattr(x, key, {}).values()))
        for key, value in _named({**x._parameters, **x._buffers} if self.weights else {}):
            yield key, value
            if isinstance(value, nn.Parameter) and not value.requires_grad:
                yield f"{key}.requires_grad", False
        self.depth -= 1  # nested modules do not count: models may be deep
        yield from _named(x._modules)
        self.depth += 1

    def dataset(self, x: Any) -> Parts:
        yield from self._head(x, f" of {len(x)}" if hasattr(x, "__len__") else "")
        parts = _PARTS.get(type(x), ())
        yield from _named({k: v for k, v in getattr(x, "__dict__", {}).items() if k in parts or _is_data(v)})


_IN_MEMORY = (TensorDataset, TokenWindows)
_PARTS: dict[type, tuple[str, ...]] = {
    Subset: ("dataset", "indices"), ConcatDataset: ("datasets",), TokenWindows: ("context",),
}  # fmt: skip


def _as_written(value: Any) -> Any:
    """Return a function without a library's wrappers, such as torch's hooks of an optimizer's `step`."""
    while isinstance(value, types.FunctionType) and hasattr(value, "__wrapped__"):
        if not _is_library(value.__globals__.get("__name__")):
            break
        value = value.__wrapped__
    return value


def _is_data(x: Any) -> bool:
    """Whether an attribute of a dataset is part of its data, and no cache that fills as it is read."""
    kinds = (Tensor, np.ndarray, Dataset)
    several = list(x.values()) if isinstance(x, dict) and all(isinstance(key, str) for key in x) else x
    is_tuple = isinstance(several, tuple) or several is not x
    return isinstance(x, kinds) or bool(is_tuple and several and all(isinstance(y, kinds) for y in several))


def _named(values: Mapping[str, Any]) -> Parts:
    return [(f".{key}", value) for key, value in sorted(values.items())]


def _held_by(f: types.FunctionType, library: bool) -> dict[str, Any]:
    """Return what a function closes over and, unless it is a library's, its defaults and the globals that it reads."""
    values = {name: value for name, value in closed_over(f).items() if name != "__class__"}
    if library:
        return values
    values |= defaults(f)
    for name, value in globals_read(f).items():
        if isinstance(value, types.ModuleType) and not _is_library(value.__name__):
            used = names_in(f.__code__).attributes & vars(value).keys()
            values |= {f"{name}.{key}": vars(value)[key] for key in used}
        elif not name.startswith("__"):
            values[name] = value
    return values


@functools.cache
def _code(code: types.CodeType) -> str:
    """Return a checksum of what code does. Constants that nothing loads, such as docstrings, do not matter."""
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
    """Return a constant as something whose `repr` is the same in every process."""
    if isinstance(x, types.CodeType):
        return _code(x)
    if isinstance(x, (tuple, frozenset)):
        parts = [_constant(y) for y in x]
        return type(x).__name__, sorted(parts, key=repr) if isinstance(x, frozenset) else parts
    return type(x).__name__, x


@functools.cache
def _is_library(module: str | None) -> bool:
    """Whether a module is installed, and so known by its name, and not the user's own."""
    root = (module or "").partition(".")[0]
    if root in ("vecgym", "torch", "numpy") or _is_standard(root):
        return True
    imported = sys.modules.get(module or "") or sys.modules.get(root)
    parts = Path(getattr(imported, "__file__", None) or "").parts
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
    checksum = hashlib.blake2b(digest_size=7)
    for part in parts:
        checksum.update(part)
    return checksum.hexdigest()


def _bytes_of(x: Any) -> Iterator[Any]:
    """Yield the bytes of a tensor or array; of a large one parts, evenly spaced from the first to the last."""
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
