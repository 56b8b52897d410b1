"""What a forward reads that is no tensor: whether that could change unseen, and whether it has changed.

A list of operations (`vecgym.engine.recorded`) does what a forward did when it was written down. That stays right while
everything else that the forward reads is as it was then. So its Python code is read: what it reaches must be of a kind
whose changes show, and `Watch.changed` compares that before every pass.
"""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import itertools
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all_modules

# Whose functions return the same for the same arguments and modes, but for those of IMPURE.
TRUSTED = {"torch", "math", "einops", "functools", "itertools", "operator", "collections", "dataclasses", "typing",
           "enum", "abc"}  # fmt: skip
IMPURE = ("torch.random", "torch.distributed", "torch.cuda", "torch.backends", "torch.jit", "torch._dynamo")
BUILTINS = {
    "abs", "all", "any", "bool", "callable", "complex", "dict", "divmod", "enumerate", "filter", "float", "frozenset",
    "getattr", "hasattr", "int", "isinstance", "issubclass", "iter", "len", "list", "map", "max", "min", "next",
    "object", "pow", "range", "repr", "reversed", "round", "set", "slice", "sorted", "str", "sum", "super", "tuple",
    "type", "zip", "Ellipsis", "NotImplemented",
}  # fmt: skip
CONSTANTS = {bool, int, float, complex, str, bytes, type(None), type(...), range, torch.dtype, torch.device,
             torch.layout, torch.memory_format}  # fmt: skip
COMPILED = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
            types.ClassMethodDescriptorType, types.GetSetDescriptorType)  # fmt: skip
ACTS = {"IMPORT_NAME": "imports", "STORE_GLOBAL": "sets", "DELETE_GLOBAL": "deletes", "STORE_ATTR": "sets",
        "DELETE_ATTR": "deletes"}  # fmt: skip
READS = ("LOAD_ATTR", "LOAD_METHOD")  # an attribute of what was loaded before
VALUES = {"tolist", "numpy", "data_ptr", "__array__"}  # read a tensor in Python, with no operation that would show it
MAKING = {"__init__", "__new__", "__post_init__"}  # a forward calls them only of a class whose objects it makes
ASIDE = MAKING | {"__repr__", "__str__", "__del__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__",
                  "__deepcopy__"}  # fmt: skip
FIXED = (nn.Module, type, enum.Enum, types.FunctionType, types.MethodType, functools.partial, staticmethod,
         classmethod, property, *COMPILED)  # fmt: skip
OF_ANY_MODULE = vars(nn.Module()).keys() - {"training"}


class Uncertain(Exception):
    """Something that a forward reads could change unseen; the message says what."""


class Watch:
    """What a model's forward reads that is no input of its list.

    Raises:
        Uncertain: if a change of it would not show.

    >>> model = nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.5))
    >>> watch = Watch(model)
    >>> watch.changed()
    ''
    >>> model[1].p = 0.1
    >>> watch.changed()
    "'p' has changed"
    """

    def __init__(self, model: nn.Module) -> None:
        self._sizes: list[tuple[Any, int]] = []  # container, length
        self._items: list[tuple[Any, Any, Any]] = []  # container, key, value
        self._cells: list[tuple[types.CellType, str, Any]] = []  # of closures
        self._seen: dict[int, Any] = {}  # by id, which no other object has while this one is kept
        self._names: set[str] = set()  # all that the code mentions
        self._classes: set[type] = set()  # of objects that it meets
        self._contents(of_all_modules._global_forward_hooks, "a hook of all modules")
        self._contents(of_all_modules._global_forward_pre_hooks, "a hook of all modules")
        self._value(model, "the model")
        done: set[tuple[type, str]] = set()
        while todo := {(kind, name) for kind in self._classes for name in self._used(kind)} - done:
            for kind, name in todo:
                self._member(kind, name)
            done |= todo

    def changed(self) -> str:
        """Say what is not as it was; "" if everything is."""
        for container, size in self._sizes:
            if len(container) != size:
                return "an attribute or an entry was added or removed"
        try:
            for container, key, value in self._items:
                if container[key] is not value:
                    return f"{key!r} has changed"
            for cell, name, value in self._cells:
                if cell.cell_contents is not value:
                    return f"{name!r} has changed"
        except (LookupError, ValueError):
            return "a value is gone"
        return ""

    # ------------------------------------------------------------------------------------------------ values

    def _value(self, value: Any, where: str) -> None:
        """Follow what a value holds; `where` says what the forward reads, for a message."""
        if type(value) in CONSTANTS or isinstance(value, enum.Enum) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            self._module(value)
        elif isinstance(value, type):
            self._class(value, where)
        elif isinstance(value, types.FunctionType):
            self._function(value, where)
        elif isinstance(value, (list, dict)) and type(value).__module__ in ("builtins", "collections"):
            self._contents(value, where)
        elif isinstance(value, COMPILED):
            _check_compiled(value, where)
        elif (parts := _parts(value)) is not None:
            for part in parts:
                self._value(part, where)
            self._meets(type(value))
        else:
            self._object(value, where)

    def _outer(self, value: Any, where: str) -> None:
        """Follow a value outside the model, which only its binding may change."""
        if isinstance(value, (tuple, frozenset)):
            for part in value:
                self._outer(part, where)
        elif type(value) in CONSTANTS or isinstance(value, FIXED):
            self._value(value, where)
        else:
            raise Uncertain(f"{where} is a {type(value).__name__}, which could change unseen")

    def _contents(self, container: Any, where: str, tensors: bool = False) -> None:
        """Follow a list or a dict: which values it holds, and theirs; with `tensors`, those may be among them."""
        self._sizes.append((container, len(container)))
        for key, value in list(container.items() if isinstance(container, dict) else enumerate(container)):
            self._item(container, key, value, where, tensors)

    def _item(self, container: Any, key: Any, value: Any, where: str, tensors: bool = False) -> None:
        self._items.append((container, key, value))
        if not (tensors and isinstance(value, Tensor)):  # those are read from where they are
            self._value(value, where)

    def _module(self, module: nn.Module) -> None:
        attributes, name = vars(module), type(module).__name__
        self._sizes.append((attributes, len(attributes)))
        for kind in ("_modules", "_parameters", "_buffers", "_forward_pre_hooks", "_forward_hooks"):
            self._contents(attributes[kind], f"a hook of {name}", tensors=True)
        for key in attributes.keys() - OF_ANY_MODULE:
            self._item(attributes, key, attributes[key], f"the attribute {key!r} of {name}", tensors=True)
        self._meets(type(module))

    def _object(self, value: Any, where: str) -> None:
        """Follow an object of classes that are written in Python."""
        written = all(kind.__flags__ & 1 << 9 for kind in type(value).__mro__[:-1])
        if isinstance(value, Tensor) or not written or not hasattr(value, "__dict__"):
            raise Uncertain(f"{where} is a {type(value).__name__}, which could change unseen")
        self._contents(vars(value), where)
        self._meets(type(value))

    # --------------------------------------------------------------------------------------- functions and classes

    def _function(self, function: types.FunctionType, where: str) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            if cell == types.CellType():  # not set yet
                continue
            self._cells.append((cell, name, cell.cell_contents))
            if name == "__class__":  # of super()
                self._meets(cell.cell_contents)
            else:
                self._outer(cell.cell_contents, f"the outer variable {name!r}")
        defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
        self._outer(defaults, f"a default of {function.__name__}")
        if not _is_trusted(function.__globals__.get("__name__", ""), where):
            self._sizes.append((vars(function), len(vars(function))))
            for name in vars(function):
                self._member(function, name)
            self._code(function.__code__, function.__globals__)

    def _code(self, code: types.CodeType, scope: dict[str, Any]) -> None:
        """Follow the global names that code looks up, and the code within it."""
        self._names.update(code.co_names)
        if read := VALUES.intersection(code.co_names):
            raise Uncertain(f"{code.co_name} hands values of tensors to Python ({min(read)})")
        instructions = [i for i in dis.get_instructions(code) if i.opname != "EXTENDED_ARG"]
        for at, instruction in enumerate(instructions):
            if (verb := ACTS.get(instruction.opname)) and code.co_name not in MAKING:
                raise Uncertain(f"{code.co_name} {verb} {instruction.argval!r}")
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
                read_of_it = itertools.takewhile(lambda i: i.opname in READS, instructions[at + 1 :])
                self._name(instruction.argval, scope, (i.argval for i in read_of_it))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant, scope)

    def _name(self, name: str, scope: dict[str, Any], attributes: Iterator[str]) -> None:
        """Follow a global name, and the attributes that are read of it, while it is a Python module or a class."""
        if name not in scope:
            value = getattr(builtins, name, None)
            if name not in BUILTINS and not (isinstance(value, type) and issubclass(value, BaseException)):
                raise Uncertain(f"it uses {name!r}")
            return
        value, where = scope[name], name
        self._items.append((scope, name, value))
        while isinstance(value, (types.ModuleType, type)) and (name := next(attributes, "")):
            holders = [vars(kind) for kind in (value.__mro__ if isinstance(value, type) else [value])]
            holder, where = next((holder for holder in holders if name in holder), None), f"{where}.{name}"
            if holder is None:
                raise Uncertain(f"the global {where!r} is made up when it is read")
            value = holder[name]
            self._items.append((holder, name, value))
        if not (isinstance(value, types.ModuleType) and _is_trusted(value.__name__, where)):
            self._outer(value, f"the global {where!r}")

    def _class(self, kind: type, where: str) -> None:
        """Follow a class, of which the forward may make objects."""
        if kind.__module__ == "builtins" or _is_trusted(kind.__module__, where):
            return
        self._meets(kind)
        for name in MAKING & vars(kind).keys():
            self._member(kind, name)

    def _meets(self, kind: type) -> None:
        """Note a class whose objects the forward meets; what it uses of it is followed at the end."""
        kinds = [base for base in kind.__mro__ if base.__module__ != "builtins"]
        new = {base for base in kinds if not _is_trusted(base.__module__, base.__name__)} - self._classes
        self._sizes += [(vars(base), len(vars(base))) for base in new]  # a class may get what one above it has
        self._classes |= new

    def _used(self, kind: type) -> set[str]:
        """Return the names that the forward may use of a class."""
        names = vars(kind).keys() - ASIDE
        if self._names & {"getattr", "attrgetter", "methodcaller"}:  # names made up when it runs
            return {name for name in names if callable(vars(kind)[name]) or not name.startswith("__")}
        special = {name for name in names if name.startswith("__") and callable(vars(kind)[name])}
        return special | (names & (self._names | {"forward"}))

    def _member(self, holder: type | types.FunctionType, name: str) -> None:
        self._items.append((vars(holder), name, vars(holder)[name]))
        self._outer(vars(holder)[name], f"{holder.__name__}.{name}")


def _is_trusted(module: str, where: str) -> bool:
    """Whether the code of a Python module need not be read.

    Raises:
        Uncertain: if it may do something else each time.
    """
    root = module.partition(".")[0].removeprefix("_")
    if module.startswith(IMPURE) or (root in sys.stdlib_module_names and root not in TRUSTED):
        raise Uncertain(f"{where} is of the Python module {module!r}, which may do something else each time")
    return root in TRUSTED


def _check_compiled(function: Any, where: str) -> None:
    """Raise `Uncertain` for a compiled function that may do something else each time."""
    owner = getattr(function, "__self__", None)
    if owner is builtins and function.__name__ in BUILTINS:
        return
    kind = getattr(function, "__objclass__", owner)
    home = str(getattr(function, "__module__", None) or getattr(kind, "__module__", ""))
    is_bound = not isinstance(owner, (type, types.ModuleType, type(None)))
    if owner is builtins or is_bound or not (home == "builtins" or _is_trusted(home, where)):
        raise Uncertain(f"{where} is {function.__qualname__!r}, which may do something else each time")


def _parts(value: Any) -> tuple[Any, ...] | None:
    """Return what an immutable value consists of; None: it is not one of them."""
    if isinstance(value, (tuple, frozenset)):
        return tuple(value)
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, (staticmethod, classmethod)):
        return (value.__func__,)
    return (value.fget,) if isinstance(value, property) else None
