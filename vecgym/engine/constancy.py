"""The state of a model besides its tensors: watch the values that its forward reads, note those that a pass changes.

A list of operations (`vecgym.engine.recorded`) repeats one forward pass. It stays valid as long as all other values
that the forward reads stay the same. `Watch` therefore reads the forward's Python code, and refuses values that could
change unseen; `Watch.changed` compares the others before every pass.

`Snapshot` works for any model: it notes attributes of the model, and variables outside it, that a pass may change.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import dis
import enum
import functools
import itertools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all_modules

from vecgym.core.nodes import LOSS_FN
from vecgym.core.objects import GENERATORS, generator_state, same
from vecgym.engine import hooks

M = TypeVar("M", bound=nn.Module)

# Packages whose functions return the same for the same arguments and modes, except those in IMPURE.
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
OF_A_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL")
READS = ("LOAD_ATTR", "LOAD_METHOD")  # an attribute of the value loaded before
VALUES = {"tolist", "numpy", "data_ptr", "__array__"}  # read a tensor in Python, without a visible operation
MAKING = {"__init__", "__new__", "__post_init__"}  # called only where the forward creates objects
ASIDE = MAKING | {"__repr__", "__str__", "__del__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__",
                  "__deepcopy__"}  # fmt: skip
FIXED = (nn.Module, type, enum.Enum, types.FunctionType, types.MethodType, functools.partial, staticmethod,
         classmethod, property, *COMPILED)  # fmt: skip
OF_ANY_MODULE = vars(nn.Module()).keys() - {"training"}


class Uncertain(Exception):
    """A forward reads a value that could change unseen; the message names it."""


class Watch:
    """All values that a model's forward reads besides the inputs of its list of operations.

    Raises:
        Uncertain: if one of them could change unseen.

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
        self._names: set[str] = set()  # mentioned in the code
        self._classes: set[type] = set()  # of the objects that it uses
        self._contents(of_all_modules._global_forward_hooks, "a hook of all modules")
        self._contents(of_all_modules._global_forward_pre_hooks, "a hook of all modules")
        self._value(model, "the model")
        done: set[tuple[type, str]] = set()
        while todo := {(kind, name) for kind in self._classes for name in self._used(kind)} - done:
            for kind, name in todo:
                self._member(kind, name)
            done |= todo

    def changed(self) -> str:
        """Describe the first value that has changed; "" if none has."""
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
        """Follow the contents of a value; `where` names it in messages."""
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
            self._note_class(type(value))
        else:
            self._object(value, where)

    def _outer(self, value: Any, where: str) -> None:
        """Follow a value outside the model: it must be immutable, so that only its binding can change."""
        if isinstance(value, (tuple, frozenset)):
            for part in value:
                self._outer(part, where)
        elif type(value) in CONSTANTS or isinstance(value, FIXED):
            self._value(value, where)
        else:
            raise Uncertain(f"{where} is a {type(value).__name__}, which could change unseen")

    def _contents(self, container: Any, where: str, tensors: bool = False) -> None:
        """Follow a list or a dict, and its values; `tensors`: these may be among them."""
        self._sizes.append((container, len(container)))
        for key, value in list(container.items() if isinstance(container, dict) else enumerate(container)):
            self._item(container, key, value, where, tensors)

    def _item(self, container: Any, key: Any, value: Any, where: str, tensors: bool = False) -> None:
        self._items.append((container, key, value))
        if not (tensors and isinstance(value, Tensor)):  # the list of operations reads the tensor itself
            self._value(value, where)

    def _module(self, module: nn.Module) -> None:
        attributes, name = vars(module), type(module).__name__
        self._sizes.append((attributes, len(attributes)))
        for kind in ("_modules", "_parameters", "_buffers", "_forward_pre_hooks", "_forward_hooks"):
            self._contents(attributes[kind], f"a hook of {name}", tensors=True)
        for key in attributes.keys() - OF_ANY_MODULE:
            self._item(attributes, key, attributes[key], f"the attribute {key!r} of {name}", tensors=True)
        self._note_class(type(module))

    def _object(self, value: Any, where: str) -> None:
        """Follow an object whose classes are written in Python."""
        written = all(kind.__flags__ & 1 << 9 for kind in type(value).__mro__[:-1])
        if isinstance(value, Tensor) or not written or not hasattr(value, "__dict__"):
            raise Uncertain(f"{where} is a {type(value).__name__}, which could change unseen")
        self._contents(vars(value), where)
        self._note_class(type(value))

    # --------------------------------------------------------------------------------------- functions and classes

    def _function(self, function: types.FunctionType, where: str) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            if cell == types.CellType():  # not set yet
                continue
            self._cells.append((cell, name, cell.cell_contents))
            if name == "__class__":  # of super()
                self._note_class(cell.cell_contents)
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
        """Follow the globals that code reads, and nested code."""
        self._names.update(code.co_names)
        if read := VALUES.intersection(code.co_names):
            raise Uncertain(f"{code.co_name} hands values of tensors to Python ({min(read)})")
        instructions = [i for i in dis.get_instructions(code) if i.opname != "EXTENDED_ARG"]
        for at, instruction in enumerate(instructions):
            if (verb := ACTS.get(instruction.opname)) and code.co_name not in MAKING:
                raise Uncertain(f"{code.co_name} {verb} {instruction.argval!r}")
            if instruction.opname in OF_A_GLOBAL:  # "STORE_GLOBAL" is refused before
                read_of_it = itertools.takewhile(lambda i: i.opname in READS, instructions[at + 1 :])
                self._name(instruction.argval, scope, (i.argval for i in read_of_it))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant, scope)

    def _name(self, name: str, scope: dict[str, Any], attributes: Iterator[str]) -> None:
        """Follow a global and, if it is a Python module or a class, the attributes that are read from it."""
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
        """Follow a class whose objects the forward may create."""
        if kind.__module__ == "builtins" or _is_trusted(kind.__module__, where):
            return
        self._note_class(kind)
        for name in MAKING & vars(kind).keys():
            self._member(kind, name)

    def _note_class(self, kind: type) -> None:
        """Note a class whose objects the forward uses; its members are followed at the end."""
        kinds = [base for base in kind.__mro__ if base.__module__ != "builtins"]
        new = {base for base in kinds if not _is_trusted(base.__module__, base.__name__)} - self._classes
        self._sizes += [(vars(base), len(vars(base))) for base in new]  # an attribute may be added
        self._classes |= new

    def _used(self, kind: type) -> set[str]:
        """Return the names of the members of a class that the forward may use."""
        names = vars(kind).keys() - ASIDE
        if self._names & {"getattr", "attrgetter", "methodcaller"}:  # names made up when it runs
            return {name for name in names if callable(vars(kind)[name]) or not name.startswith("__")}
        special = {name for name in names if name.startswith("__") and callable(vars(kind)[name])}
        return special | (names & (self._names | {"forward"}))

    def _member(self, holder: type | types.FunctionType, name: str) -> None:
        self._items.append((vars(holder), name, vars(holder)[name]))
        self._outer(vars(holder)[name], f"{holder.__name__}.{name}")


def _is_trusted(module: str, where: str) -> bool:
    """Whether the code of a Python module is trusted, and not read.

    Raises:
        Uncertain: if its functions may return another result at each call.
    """
    root = module.partition(".")[0].removeprefix("_")
    if module.startswith(IMPURE) or (root in sys.stdlib_module_names and root not in TRUSTED):
        raise Uncertain(f"{where} is of the Python module {module!r}, which may do something else each time")
    return root in TRUSTED


def _check_compiled(function: Any, where: str) -> None:
    """Raise `Uncertain` for a compiled function that may return another result at each call."""
    owner = getattr(function, "__self__", None)
    if owner is builtins and function.__name__ in BUILTINS:
        return
    kind = getattr(function, "__objclass__", owner)
    home = str(getattr(function, "__module__", None) or getattr(kind, "__module__", ""))
    is_bound = not isinstance(owner, (type, types.ModuleType, type(None)))
    if owner is builtins or is_bound or not (home == "builtins" or _is_trusted(home, where)):
        raise Uncertain(f"{where} is {function.__qualname__!r}, which may do something else each time")


def _parts(value: Any) -> tuple[Any, ...] | None:
    """Return the parts of an immutable value; None for other values."""
    if isinstance(value, (tuple, frozenset)):
        return tuple(value)
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, (staticmethod, classmethod)):
        return (value.__func__,)
    return (value.fget,) if isinstance(value, property) else None


# ------------------------------------------------------------------------------------------- changes by a pass


LONG, MOST = 1000, 100_000  # only the length of a longer list or dict is noted; the most places
MOST_NUMBERS = 2**22  # only some numbers of a larger array, such as a file of tokens, are noted
BOUND = (types.BuiltinMethodType, types.MethodType)
GLOBAL_GENERATORS = {id(getattr(draw, "__self__", draw)) for draw in (random.random, np.random.rand)}
# Outside the model: in a variable, class or function of the user; or there, held by a module or a package.
OUTSIDE, HELD = 1, 2
MUTABLE = (dict, list, deque, set, np.ndarray, *GENERATORS)


class Place(NamedTuple):
    """An attribute, an entry or a variable: its value and its location."""

    value: Any
    holder: Any  # a dict, a list, a class or a cell; None: it cannot be put there
    key: Any
    outer: int  # 0: within the model

    def put(self, value: Any) -> None:
        """Put a value in this place, if it still exists."""
        if isinstance(self.holder, types.CellType):
            self.holder.cell_contents = value
        elif isinstance(self.holder, type):
            setattr(self.holder, self.key, value)
        else:
            with contextlib.suppress(LookupError):
                self.holder[self.key] = value


class Snapshot:
    """The state of a model and its `loss_fn` besides parameters and buffers, at one time.

    It consists of the attributes of the modules, with the objects in them, and of the values outside the model that the
    user's functions (not those of installed packages) reach: outer variables, globals, defaults, class attributes.

    Attributes:
        places: description -> place, such as "the model's encoder.calls".
        shared: describes an object outside the model that code could change, and node threads would share; "": none.
        outside: these objects, by id.
        draws: whether the code mentions the random numbers of numpy or Python.
        sets: whether the code sets attributes or entries.

    >>> model = nn.Linear(2, 1)
    >>> model.calls = 0
    >>> before, model.calls = Snapshot(model), 1
    >>> Snapshot(model).changed(before), before.shared
    (["the model's calls"], '')
    """

    def __init__(self, model: nn.Module) -> None:
        self.places: dict[str, Place] = {}
        self.shared = ""
        self.outside: dict[int, Any] = {}
        self.draws = self.sets = False
        self._lengths: list[tuple[list[Any], int]] = []  # of lists outside
        self._own = {id(x): x for x in (*model.parameters(), *model.buffers())}
        self._seen: dict[int, Any] = {}
        self._names = {id(module): name for name, module in model.named_modules()}
        self._todo: tuple[deque[Any], deque[Any]] = deque([(model, "the model", 0, None, None)]), deque()
        while any(self._todo) and len(self.places) < MOST:
            self._visit(*(self._todo[0] or self._todo[1]).popleft())  # first within the model

    def changed(self, before: Snapshot) -> list[str]:
        """Return the names of the places that differ from an earlier snapshot."""
        names = [*before.places, *(name for name in self.places if name not in before.places)]
        pairs = ((name, self.places.get(name), before.places.get(name)) for name in names)
        return [name for name, here, there in pairs if not (here and there and _same(here.value, there.value))]

    def restore(self, names: Collection[str]) -> None:
        """Restore plain values and tensors at these places outside the model, and the length of each list there."""
        for x, length in self._lengths:
            del x[length:]
        for place in (place for name, place in self.places.items() if name in names and place.outer):
            value = place.value[0] if isinstance(place.value, tuple) else place.value
            if place.holder is not None and (type(value) in CONSTANTS or isinstance(value, Tensor)):
                place.put(value)

    def move(self, names: Collection[str], far: int, before: Snapshot) -> None:
        """Set all numbers at these places to `far`, also in tensors; lengthen lists that have grown to it."""
        for name, place in ((name, place) for name, place in self.places.items() if name in names):
            if isinstance(place.holder, list) and name not in before.places:
                place.holder.extend(place.holder[-1:] * (far - len(place.holder)))
                continue
            value = place.value[0].detach() if isinstance(place.value, tuple) else place.value
            array = isinstance(value, np.ndarray) and value.dtype.kind in "iuf" and value.size < MOST
            tensor = isinstance(value, Tensor) and value.dtype != torch.bool
            if place.holder is not None and (type(value) in (int, float) or array or tensor):
                place.put(type(value)(far) if type(value) in (int, float) else value * 0 + far)

    def _visit(self, x: Any, where: str, outer: int, holder: Any, key: Any) -> None:
        """Note a value, and follow its contents."""
        if outer == OUTSIDE and _is_mutable(x):
            self.shared, self.outside[id(x)] = self.shared or where, x
        self.draws |= x is random or x is np.random or (isinstance(x, BOUND) and id(x.__self__) in GLOBAL_GENERATORS)
        value = x
        if isinstance(x, Tensor):
            value = x, 0 if x.is_inference() else x._version
        elif isinstance(x, np.ndarray):
            value = x.copy() if x.size <= MOST_NUMBERS else x.flat[:: x.size // MOST]
        elif isinstance(x, GENERATORS):
            state = generator_state(x)
            value = state.tolist() if isinstance(state, Tensor) else repr(state)
        elif id(x) not in self._seen and not _is_constant(x):
            self._seen[id(x)] = x
            value = self._followed(x, where, outer)
        if id(x) not in self._own:
            self.places[where] = Place(value, holder, key, outer)

    def _followed(self, x: Any, where: str, outer: int) -> Any:
        """Follow the contents of an object; return the value to note for the object itself."""
        if outer and isinstance(x, list):
            self._lengths.append((x, len(x)))
        if isinstance(x, (set, frozenset)) or (isinstance(x, (dict, list, tuple, deque)) and len(x) > LONG):
            return frozenset(x) if len(x) <= LONG else range(len(x))
        if isinstance(x, (dict, list, tuple, deque)):
            for key, value in list(x.items() if isinstance(x, dict) else enumerate(x)):
                name = f"{where}[{key!r}]" if type(key) in CONSTANTS else f"{where}[...]"
                self._add(value, name, outer, None if isinstance(x, tuple) else x, key)
        elif isinstance(x, nn.Module):
            self._module(x, where, outer)
        elif isinstance(x, types.FunctionType):
            self._function(x)
        elif isinstance(x, type):
            self._class(x)
        elif isinstance(x, COMPILED):
            self._add(getattr(x, "__self__", None), where, outer)
        elif (parts := _parts(x)) is not None:
            for part in parts:
                self._add(part, where, outer)
        elif _is_standard(type(x)):
            return object() if hasattr(type(x), "__next__") else x  # an iterator may have moved
        else:
            self._object(x, where, outer)
        return type(x)

    def _module(self, module: nn.Module, where: str, outer: int) -> None:
        name = self._names.get(id(module))
        where = where if name is None else f"the model's {name}" if name else "the model's"
        point = " " if name == "" else "."
        for key, x in vars(module).items():
            if key in ("_parameters", "_buffers", "_modules", *hooks.OF_A_MODULE):
                for name, y in x.items():
                    of = f"{where}{point}{key}[{name}]" if key in hooks.OF_A_MODULE else f"{where}{point}{name}"
                    self._add(y, of, outer and HELD, x, name)
            elif key not in OF_ANY_MODULE:
                of = "loss_fn" if key == LOSS_FN else f"{where}{point}{key}"
                self._add(x, of, outer and HELD, vars(module), key)
        self._add(type(module), type(module).__name__, OUTSIDE)

    def _object(self, x: Any, where: str, outer: int) -> None:
        for key, value in getattr(x, "__dict__", {}).items():
            self._add(value, f"{where}.{key}", outer, vars(x), key)
        for key in (key for base in type(x).__mro__ for key in vars(base).get("__slots__", ())):
            self._add(getattr(x, key, None), f"{where}.{key}", outer)
        self._add(type(x), type(x).__name__, OUTSIDE)

    def _class(self, kind: type) -> None:
        for base in (base for base in kind.__mro__ if not _is_installed(base.__module__)):
            aside = ASIDE if issubclass(base, nn.Module) else ()  # a forward makes no modules
            for key, x in ((key, x) for key, x in vars(base).items() if key not in aside):
                x = x.fget if isinstance(x, property) else getattr(x, "__func__", x)
                if not key.startswith("__") or isinstance(x, types.FunctionType):
                    self._add(x, f"the class attribute {base.__name__}.{key}", OUTSIDE, base, key)

    def _function(self, function: types.FunctionType) -> None:
        """Follow the variables that a function reads outside itself.

        Of a function of an installed package these are the immutable ones that it closes over, such as the function
        that it wraps: the caches of a package (of torch's `checkpoint`, of a dataclass's `__repr__`) are no state.
        """
        code, name = function.__code__, function.__name__
        own = not _is_installed(function.__globals__.get("__name__", ""))
        outer = OUTSIDE if own else HELD
        for key, cell in zip(code.co_freevars, function.__closure__ or ()):
            if cell != types.CellType() and key != "__class__" and (own or not isinstance(cell.cell_contents, MUTABLE)):
                self._add(cell.cell_contents, f"the outer variable {key}", outer, cell, "")
        for x in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._add(x, f"a default of {name}", outer)
        if own:
            for key, x in vars(function).items():
                self._add(x, f"the function's attribute {name}.{key}", outer, vars(function), key)
            self._code(code, function.__globals__, code.co_freevars)

    def _code(self, code: types.CodeType, scope: dict[str, Any], free: tuple[str, ...]) -> None:
        """Follow the globals that code reads, also those of other Python modules of the user."""
        instructions = [(i.opname, i.argval) for i in dis.get_instructions(code)]
        for kind, name in instructions:
            self.sets |= kind in ("STORE_ATTR", "STORE_SUBSCR") and code.co_name not in MAKING
            self.draws |= kind == "IMPORT_NAME" and name in ("random", "numpy", "numpy.random")
            if kind == "STORE_GLOBAL" or (kind == "STORE_DEREF" and name in free):
                self.shared = self.shared or f"the outer variable {name}"
        for name in dict.fromkeys(name for kind, name in instructions if kind in OF_A_GLOBAL and name in scope):
            x = scope[name]
            self.draws |= x is np and "random" in code.co_names
            self._add(x, f"the outer variable {name}", OUTSIDE, scope, name)
            if isinstance(x, types.ModuleType) and not _is_installed(x.__name__):
                for key in sorted(vars(x).keys() & set(code.co_names)):
                    self._add(vars(x)[key], f"{name}.{key}", OUTSIDE, vars(x), key)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant, scope, free)

    def _add(self, x: Any, where: str, outer: int, holder: Any = None, key: Any = None) -> None:
        self._todo[outer > 0].append((x, where, outer, holder, key))


def shared(model: nn.Module) -> dict[int, Any]:
    """Return the objects that all copies of a model share, by id: its functions reach them outside the model.

    A hook may be a method of such an object: the hook of a copy and its `loss_fn` must refer to the same one.
    """
    return {**hooks.computed(model), **Snapshot(model).outside}


def copied(model: M) -> M:
    """Copy a model deeply, with the parameters' hooks, which torch's own copy omits.

    >>> model = nn.Linear(2, 1)
    >>> handle = model.weight.register_hook(lambda grad: grad.clamp(-1, 1))
    >>> list(hooks.of_parameters(copied(model))), list(hooks.of_parameters(copy.deepcopy(model)))
    (['weight'], [])
    """
    hooks.check_hooks(model)
    hooks.check_ties(model)
    outside = shared(model)
    expanded = {id(b): b.contiguous() for b in model.buffers() if hooks.is_expanded(b)}  # results are written to it
    new = copy.deepcopy(model, outside | expanded)
    hooks.rebind(new, model)
    params = dict(new.named_parameters())
    for called in (getattr(module, kind) for module in new.modules() for kind in hooks.OF_A_MODULE):
        for key, hook in called.items():
            if isinstance(hook, types.MethodType) and id(hook.__self__) in outside:
                called[key] = _fixed(hook)
    for name, of_it in hooks.of_parameters(model).items():
        for hook in of_it:
            params[name].register_hook(hook)
    return new


def _fixed(method: types.MethodType) -> Callable[..., Any]:
    """Wrap a method in a function, so that copies of a model share the object of the method."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return call


def _same(a: Any, b: Any) -> bool:
    if a is b or type(a) is not type(b):
        return a is b
    try:
        if isinstance(a, tuple):  # tensors, with their versions
            (x, _), (y, _) = a, b
            return a[1] == b[1] if x is y else x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y)
        if isinstance(a, np.ndarray):
            return a.dtype == b.dtype and np.array_equal(a, b)
        return bool(a == b or (a != a and b != b))
    except Exception:  # whatever comparing the user's objects raises
        return False


def _is_constant(x: Any) -> bool:
    return type(x) in CONSTANTS or isinstance(x, (np.generic, enum.Enum, types.ModuleType))


def _is_mutable(x: Any) -> bool:
    """Whether a value outside the model can change in place unseen; changes of modules and tensors show."""
    if isinstance(x, MUTABLE) or type(x) in CONSTANTS or isinstance(x, (Tensor, *FIXED)):
        return isinstance(x, MUTABLE)
    kind = type(x)
    frozen = getattr(getattr(kind, "__dataclass_params__", None), "frozen", False)
    return hasattr(x, "__dict__") and not (frozen or _is_standard(kind) or _is_installed(kind.__module__))


def _is_standard(kind: type) -> bool:
    """Whether a class is of the standard library, except classes whose objects hold values of the user."""
    root = kind.__module__.partition(".")[0]
    return root in sys.stdlib_module_names - {"types", "argparse", "collections"}


@functools.cache
def _is_installed(module: str) -> bool:
    """Whether a Python module belongs to an installed package, whose functions are not read."""
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names or root == "vecgym":
        return True
    home = sys.modules.get(root) if root != "__main__" else None
    paths = [getattr(home, "__file__", None) or "", *getattr(home, "__path__", [])]
    return any("-packages" in path for path in paths)


def equal_but_weights(a: Any, b: Any) -> bool:
    """Whether two objects are equal; two models may differ in the values of their trainable parameters."""
    try:
        return a is b or same(_structure(a), _structure(b), whole=True)
    except Exception:  # whatever comparing the user's objects raises
        return False


def _structure(model: Any) -> Any:
    """Return all parts of a model except the values of its trainable parameters; anything else is returned as is."""
    if not isinstance(model, nn.Module):
        return model
    apart = ("_parameters", "_buffers", "_modules")
    modules = [
        (name, type(module), {key: value for key, value in vars(module).items() if key not in apart})
        for name, module in model.named_modules()
    ]
    tensors = {
        name: (x.shape, x.dtype, x.requires_grad, None if x.requires_grad else x)
        for name, x in [*model.named_parameters(), *model.named_buffers()]
    }
    return [modules, tensors, hooks.of_parameters(model)]
