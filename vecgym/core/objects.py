"""Python objects and everything they hold: compare it, show it, visit it, replace tensors in it.

An object holds the values of its attributes and containers; a function holds the variables that it closes over, its
defaults, and the globals that it reads.
"""

from __future__ import annotations

import copy
import dis
import functools
import inspect
import random
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from vecgym.core import check

T = TypeVar("T")

PLAIN = (bool, int, float, str, type(None))
CONSTANT = (*PLAIN, complex, bytes, type, types.ModuleType)  # objects of these types hold no others


# ------------------------------------------------------------------------------------------------------- compare


def public(x: object) -> dict[str, Any]:
    """Return an object's settings, by name."""
    return {name: value for name, value in vars(x).items() if not name.startswith("_")}


def altered(x: T, /, **attributes: Any) -> T:
    """Return a copy of an object in which some attributes are others.

    >>> altered(types.SimpleNamespace(unit=1, of=3), unit=2)
    namespace(unit=2, of=3)
    """
    twin = copy.copy(x)
    vars(twin).update(attributes)
    return twin


def same(a: Any, b: Any, whole: bool = False) -> bool:
    """Whether two settings are equal: numbers and tensors by value, functions if they are the same object.

    Args:
        whole: compare private attributes too, which settings only derive from the others, and the types of numbers.

    >>> same([torch.ones(1), "sgd"], [torch.ones(1), "sgd"]), same(torch.ones(1), torch.zeros(1)), same(1, 1.0)
    (True, False, True)
    """
    if a is b:
        return True
    if not whole and check.is_number(a) and check.is_number(b):
        return bool(a == b)
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and a.requires_grad == b.requires_grad and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key], whole) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y, whole) for x, y in zip(a, b))
    if isinstance(a, functools.partial):
        return same([a.func, a.args, a.keywords], [b.func, b.args, b.keywords], whole)
    if type(a).__eq__ is object.__eq__ and hasattr(a, "__dict__") and not inspect.isroutine(a):
        return same(vars(a), vars(b), whole) if whole else same(public(a), public(b))
    return bool(a == b)


# ------------------------------------------------------------------------------------------------------ settings


class Strict:
    """An object whose constructor, also of a subclass, lists its arguments where a keyword is none of them."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        init: Any = vars(cls).get("__init__")
        if init is not None and not hasattr(init, "__wrapped__"):
            cls.__init__ = check.strict(init)  # type: ignore[method-assign]


class Settings(Strict):
    """An object that holds settings only: equal to another of its class with equal settings.

    Attributes whose names begin with "_" are derived from the others, and not compared.

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
    """Show the arguments that an object holds by their names, except those at their defaults; see `shown`.

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
        if parameter.default is parameter.empty and parameter.kind is not parameter.KEYWORD_ONLY:
            parts.append(_text(values[name]))
        elif not same(values[name], parameter.default):
            parts.append(f"{name}={_text(values[name])}")
    return parts


def _text(value: Any) -> str:
    return getattr(value, "__name__", None) or repr(getattr(value, "spec", value))  # an optimizer's


# ------------------------------------------------------------------------------------------------------- sweeps


UNSAID: Any = object()
CONSTRUCTED = {"__init__", "__init_subclass__", "__repr__", "check"}  # methods that see one configuration only


def declare(cls: type, batched: Any, random: Any = UNSAID) -> None:
    """Let a class say how a sweep trains its configurations: `class C(Base, batched=..., random=...)`.

    A class that defines methods and says nothing is not batched, and is taken to draw random numbers.

    >>> class Base:
    ...     batched, random = (), False
    ...     def __init_subclass__(cls, batched=UNSAID, random=UNSAID):
    ...         declare(cls, batched, random)
    >>> class Scaled(Base, batched=("factors",)):
    ...     def __init__(self, factor): ...
    Traceback (most recent call last):
    ...
    TypeError: class Scaled: batched=('factors',) names 'factors', which is no argument of its constructor: factor.
    """
    body = vars(cls)
    methods = {name for name, x in body.items() if inspect.isfunction(x)} - CONSTRUCTED
    if batched is UNSAID:
        batched = body.get("batched", None if methods else UNSAID)
    if random is UNSAID:
        random = body.get("random", True if methods else UNSAID)
    if batched is not UNSAID:
        cls.batched = _argument_names(cls, "batched", batched)  # type: ignore[attr-defined]
    if "of_nodes" in body:
        _argument_names(cls, "of_nodes", body["of_nodes"])
    if random is not UNSAID and not isinstance(random, (bool, property)):
        raise TypeError(f"class {cls.__name__}: random={random!r} must be True or False.")
    if random is not UNSAID:
        cls.random = random  # type: ignore[attr-defined]


class Steady(Strict):
    """An object whose class may say that it always sends the same: `class C(Base, steady=True)`.

    That is: in each exchange among the same nodes as many bytes, by the same collectives, whatever the values, the step
    and H are. A dry run then makes one such exchange for all. A subclass that says nothing is not steady.

    >>> class Fixed(Steady, steady=True): ...
    >>> class Mine(Fixed): ...
    >>> Fixed.steady, Mine.steady
    (True, False)
    """

    steady: bool = False

    def __init_subclass__(cls, steady: Any = False, **more: Any) -> None:
        super().__init_subclass__(**more)
        steady = vars(cls).get("steady", steady)
        if not isinstance(steady, (bool, property)):
            raise TypeError(f"class {cls.__name__}: steady={steady!r} must be True or False.")
        cls.steady = steady  # type: ignore[assignment]


def is_steady(*each: Any) -> bool:
    """Whether all of these are steady, and no function stands in place of a method of their classes."""
    replaced = any(callable(getattr(type(x), name, None)) for x in each for name in vars(x))
    return not replaced and all(x.steady for x in each)


def _argument_names(cls: type, word: str, names: Any) -> Any:
    """Return names of arguments of a class's constructor as a tuple, or None or a property as it is."""
    if names is None or isinstance(names, property):
        return names
    if not isinstance(names, (tuple, list)):
        raise TypeError(f'class {cls.__name__}: {word}={names!r} must be a tuple of names, such as ("lr",).')
    arguments = list(inspect.signature(cls).parameters)
    if unknown := [name for name in names if name not in arguments]:
        raise TypeError(
            f"class {cls.__name__}: {word}={names!r} names {unknown[0]!r}, which is no argument of its constructor: "
            f"{', '.join(arguments)}."
        )
    return tuple(names)


# ----------------------------------------------------------------------------------------------------- functions


def _closed_over(f: types.FunctionType) -> dict[str, Any]:
    """Return the variables that a function closes over, by name, unless they are not set yet."""
    cells = zip(f.__code__.co_freevars, f.__closure__ or ())
    return {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}  # equal: both are empty


def _global_tensors(f: types.FunctionType) -> dict[str, Tensor]:
    """Return the tensors among the globals that a function, and the functions in it, read."""
    return {name: x for name in _globals_read(f.__code__) if isinstance(x := f.__globals__.get(name), Tensor)}


@functools.cache
def _globals_read(code: types.CodeType) -> frozenset[str]:
    """Return the names of the globals that code, and the functions in it, read, unless it sets them.

    >>> sorted(_globals_read((lambda: [torch.ones(n) for n in range(2)]).__code__))
    ['range', 'torch']
    """
    instructions = [(i.opname, i.argval) for i in dis.get_instructions(code)]
    read = {name for op, name in instructions if op in ("LOAD_GLOBAL", "LOAD_NAME")}
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    written = {name for op, name in instructions if op in ("STORE_GLOBAL", "DELETE_GLOBAL")}
    return frozenset(read.union(*map(_globals_read, inner)) - written)


# ----------------------------------------------------------------------------------------------- visit and replace


def reachable(root: Any) -> Iterator[Any]:
    """Visit `root` and then every object that it holds; of the globals that a function reads, only tensors.

    >>> lr = torch.tensor(0.5)
    >>> [x for x in reachable({"schedule": lambda step: lr * step}) if isinstance(x, Tensor)]
    [tensor(0.5000)]
    """
    visited: set[int] = set()
    todo = [root]
    while todo:
        x = todo.pop()
        if id(x) not in visited and not isinstance(x, CONSTANT):
            visited.add(id(x))
            yield x
            todo += reversed(_parts(x))


def replaced(x: Any, new: dict[int, Any]) -> Any:
    """Return a copy of an object with other tensors: `new` maps the id of a part to its replacement.

    Parts are the objects that `reachable` visits; afterwards `new` also maps their ids to the copies.

    >>> lr = torch.tensor(0.5)
    >>> replaced(lambda step: lr * step, {id(lr): torch.tensor(0.1)})(2)
    tensor(0.2000)
    """
    if id(x) in new:
        return new[id(x)]
    if isinstance(x, CONSTANT) or not _parts(x):
        return x
    if isinstance(x, functools.partial):
        func, args, keywords = replaced((x.func, x.args, x.keywords), new)
        y: Any = functools.partial(func, *args, **keywords)
    elif isinstance(x, types.MethodType):
        y = types.MethodType(x.__func__, replaced(x.__self__, new))
    elif isinstance(x, types.FunctionType):
        y = _replaced_in_function(x, new)
    elif isinstance(x, (list, tuple, set, frozenset)):
        items = [replaced(value, new) for value in x]
        y = type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
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
    values = _closed_over(f)
    for name, cell in zip(f.__code__.co_freevars, cells):
        if name in values:
            cell.cell_contents = replaced(values[name], new)
    return y


def _parts(x: Any) -> list[Any]:
    """Return the objects that an object holds directly."""
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
        defaults = [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
        return [*_closed_over(x).values(), *defaults, *_global_tensors(x).values()]
    return list(vars(x).values()) if hasattr(x, "__dict__") else []


# ------------------------------------------------------------------------------------------------ random numbers


_GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {  # how to get a state, and set it
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.Generator: (lambda x: x.bit_generator.state, lambda x, state: setattr(x.bit_generator, "state", state)),
    np.random.RandomState: (lambda x: x.get_state(legacy=False), np.random.RandomState.set_state),
}
GENERATORS = tuple(_GENERATORS)


def generator_state(x: Any) -> Any:
    """Return the state of a random number generator, one of `GENERATORS`.

    >>> generator_state(random.Random(0)) == generator_state(random.Random(0))
    True
    """
    return next(get(x) for kind, (get, _) in _GENERATORS.items() if isinstance(x, kind))


def set_generator_state(x: Any, state: Any) -> None:
    """Set the state of a random number generator to that of another of its kind."""
    next(put for kind, (_, put) in _GENERATORS.items() if isinstance(x, kind))(x, state)
