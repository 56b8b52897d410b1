"""Checks of arguments. Each returns the value as a plain Python one, or names it and the allowed values in an error.

A value that is not a number, not finite or out of range raises a `ValueError`; a flag that is neither True nor False
and an unknown keyword raise a `TypeError`. `Options` are dataclasses whose annotations hold the checks; `takes` and
`function_of` make functions that accept such options by name.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

P = ParamSpec("P")
OptionsT = TypeVar("OptionsT")
Owner = TypeVar("Owner")
Result = TypeVar("Result")


def integer(name: str, value: Any, least: int = 1, what: str = "", otherwise: str = "") -> int:
    """Return `value` as an int if it is an integer >= `least`, of Python or numpy; True and 2.0 are not integers.

    Args:
        name: the argument's name.
        value: the argument's value.
        least: the smallest value allowed.
        what: the meaning of the argument, for the message.
        otherwise: other allowed values, for the message.

    Raises:
        ValueError: otherwise.

    >>> integer("seed", np.int64(3), 0)
    3
    >>> integer("H", 0, what="optimizer steps between two exchanges")
    Traceback (most recent call last):
    ...
    ValueError: H=0 must be an integer >= 1: optimizer steps between two exchanges.
    """
    if is_integer(value) and least <= value < MOST:
        return int(value)
    below = " and < 2**63" if is_integer(value) and value >= MOST else ""
    raise ValueError(f"{name}={_formatted(value)} must be an integer >= {least}{below}{otherwise}{_about(what)}.")


def optional_integer(name: str, value: Any, least: int = 1, what: str = "") -> int | None:
    """Check like `integer`, but allow None.

    >>> optional_integer("max_steps", None), optional_integer("max_steps", 3)
    (None, 3)
    >>> optional_integer("chunk_size", 0, what="None lets vecgym choose")
    Traceback (most recent call last):
    ...
    ValueError: chunk_size=0 must be an integer >= 1, or None: None lets vecgym choose.
    """
    return None if value is None else integer(name, value, least, what, otherwise=", or None")


def seed(name: str, value: Any) -> int:
    """Return `value` as an int if it is a signed 64-bit integer, of Python or numpy.

    Raises:
        TypeError: if it is not an integer.
        ValueError: if it is out of range.

    >>> seed("seed", np.int64(3))
    3
    >>> seed("seed", 1.5)
    Traceback (most recent call last):
    ...
    TypeError: seed=1.5 must be an integer.
    """
    if not is_integer(value):
        raise TypeError(f"{name}={value!r} must be an integer.")
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name}={value} must be an integer from -2**63 to 2**63 - 1.")
    return int(value)


def number(name: str, value: Any, within: str = "(-inf, inf)", what: str = "") -> float:
    """Return `value` if it is a number in an interval, of Python or numpy; True and tensors are not numbers.

    Args:
        name: the argument's name.
        value: the argument's value.
        within: the interval, in mathematical notation: "(0, 1]" is 0 < value <= 1, "[0, inf)" is 0 <= value < inf.
        what: the meaning of the argument, for the message.

    Raises:
        ValueError: otherwise.

    >>> number("lr", 1e-3, "[0, inf)")
    0.001
    >>> number("p", float("nan"), "(0, 1]", "the part that is sent, such as 0.01")
    Traceback (most recent call last):
    ...
    ValueError: p=nan must be a number in (0, 1]: the part that is sent, such as 0.01.
    """
    low, high = (float(end) for end in within[1:-1].split(","))
    if is_number(value):
        x = plain(value)
        above = x >= low if within[0] == "[" else x > low
        below = x <= high if within[-1] == "]" else x < high
        if above and below:
            return x
    names = {"(-inf, inf)": "a finite number", "(0, inf)": "a number > 0", "[0, inf)": "a number >= 0"}
    raise ValueError(f"{name}={_formatted(value)} must be {names.get(within, f'a number in {within}')}{_about(what)}.")


def per_node(
    name: str, value: Any, within: str = "(-inf, inf)", what: str = "", num_nodes: int | None = None
) -> float | Tensor:
    """Return `value` if it is a number in an interval, or a tensor `[]` or `[K]` of such numbers, one per node.

    Args:
        name: the argument's name.
        value: the argument's value. Inside a transform of `torch.func` only a tensor's shape is checked.
        within: the interval, as in `number`.
        what: the meaning of the argument, for the message.
        num_nodes: K, or None if it is not known yet.

    Raises:
        ValueError: otherwise.

    >>> per_node("proximal_mu", 0.1, "[0, inf)"), per_node("proximal_mu", torch.tensor([0.1, 0.2]), num_nodes=2)
    (0.1, tensor([0.1000, 0.2000]))
    >>> per_node("max_norm", torch.ones(3), num_nodes=2)
    Traceback (most recent call last):
    ...
    ValueError: max_norm has shape [3], but the run has num_nodes=2: give a number, or [2], one per node.
    """
    if not isinstance(value, Tensor):
        return number(name, value, within, what)
    size = "K" if num_nodes is None else num_nodes
    if value.dim() > 1 or value.numel() == 0 or (num_nodes is not None and value.numel() not in (1, num_nodes)):
        run = "" if num_nodes is None else f", but the run has num_nodes={num_nodes}"
        raise ValueError(
            f"{name} has shape {list(value.shape)}{run}: give a number, or [{size}], one per node{_about(what)}."
        )
    has_values(name, value)
    if num_nodes is None and not torch._C._functorch.is_functorch_wrapped_tensor(value):
        for x in value.detach().flatten().tolist():
            number(name, x, within, what)
    return value


def has_values(name: str, value: Any) -> Any:
    """Return `value` unless it is a tensor on the device meta, which has no values.

    >>> has_values("seconds", torch.ones(2, device="meta"))
    Traceback (most recent call last):
    ...
    ValueError: seconds is on the device meta, where tensors have no values: create it on the CPU.
    """
    if isinstance(value, Tensor) and value.device.type == "meta":
        raise ValueError(f"{name} is on the device meta, where tensors have no values: create it on the CPU.")
    return value


def real(name: str, values: Any, give: str = "a list of numbers") -> np.ndarray:
    """Return a list of numbers, or of such lists, as an array of float64.

    Raises:
        TypeError: for anything else.

    >>> real("points", [(1.0, 2.0), (3, 4)]).shape
    (2, 2)
    >>> real("values", "abc")
    Traceback (most recent call last):
    ...
    TypeError: values is of type str; give a list of numbers.
    """
    try:
        array = values.detach().double().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
        if array.dtype.kind in "biuf" and array.ndim > 0:
            return array.astype(np.float64)
    except (TypeError, ValueError, NotImplementedError):  # ragged, complex, or without values
        pass
    raise TypeError(f"{name} is {kind_of(values)}; give {give}.")


def flag(name: str, value: Any) -> bool:
    """Return `value` if it is True or False, of Python or numpy. 0 and None are not; "no" would count as True.

    Raises:
        TypeError: otherwise.

    >>> flag("shuffle", "no")
    Traceback (most recent call last):
    ...
    TypeError: shuffle='no' must be True or False.
    """
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise TypeError(f"{name}={value!r} must be True or False.")


def choice(name: str, value: Any, allowed: Iterable[str], otherwise: str = "") -> str:
    """Return `value` if it is one of the names in `allowed`.

    Args:
        name: the argument's name.
        value: the argument's value.
        allowed: the names.
        otherwise: other allowed values, for the message, such as "a function, or None".

    Raises:
        ValueError: otherwise.

    >>> choice("engine", "vamp", ("auto", "vmap", "loop"))
    Traceback (most recent call last):
    ...
    ValueError: engine='vamp' is not known; did you mean 'vmap'? Allowed: 'auto', 'vmap', 'loop'.
    """
    names = list(allowed)
    if isinstance(value, str) and value in names:
        return value
    possible = ", ".join([*map(repr, names), *([otherwise] if otherwise else [])])
    raise ValueError(f"{name}={value!r} is not known{did_you_mean(value, names)} Allowed: {possible}.")


def index(name: str, value: Any, size: int) -> int:
    """Return `value` if it is an index into `size` items; a negative one counts from the end.

    Raises:
        TypeError: if it is not an integer.
        IndexError: if it is out of range.

    >>> index("node", -1, 4)
    -1
    >>> index("node", 4, 4)
    Traceback (most recent call last):
    ...
    IndexError: node 4 of 4: give 0 to 3.
    """
    if not is_integer(value):
        raise TypeError(f"{name}={value!r} must be an integer.")
    if not -size <= value < size:
        raise IndexError(f"{name} {value} of {size}: give 0 to {size - 1}.")
    return int(value)


def instance(name: str, value: Any, kind: type | tuple[type, ...], give: str) -> Any:
    """Return `value` if it is an instance of a type.

    Args:
        name: the argument's name.
        value: the argument's value.
        kind: the type, or several of them.
        give: the expected value, for the message.

    Raises:
        TypeError: otherwise.

    >>> instance("text", "abc", str, "a str")
    'abc'
    >>> instance("text", 3, str, "a str")
    Traceback (most recent call last):
    ...
    TypeError: text is of type int; give a str.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {kind_of(value)}; give {give}.")
    return value


def called(name: str, function: Any, *args: Any) -> Any:
    """Call a user's function.

    Args:
        name: the name of the argument that holds the function.
        function: the function.
        args: its arguments.

    Raises:
        TypeError: if the call raises one, for example because of the number of arguments.

    >>> called("topology", lambda: 1, 3)
    Traceback (most recent call last):
    ...
    TypeError: topology(3) fails: <lambda>() takes 0 positional arguments but 1 was given
    """
    try:
        return function(*args)
    except TypeError as error:
        arguments = ", ".join(f"a tensor {list(x.shape)}" if isinstance(x, Tensor) else repr(x) for x in args)
        raise TypeError(f"{name}({arguments}) fails: {error}") from error


def misfit(function: Any, *args: Any, **kwargs: Any) -> str:
    """Describe why a function cannot be called with these arguments; "" if it can, or has no signature in Python.

    >>> misfit(lambda batch: 0, 1), misfit(lambda: 0, 1)
    ('', 'too many positional arguments')
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return ""


def column(name: str, value: Any, columns: Iterable[str]) -> str:
    """Return `value` if it is the name of a column.

    Args:
        name: the argument's name.
        value: the argument's value.
        columns: the names of the columns.

    Raises:
        TypeError: if it is not a str.
        ValueError: if there is no such column.

    >>> column("y", "val_los", ["train_loss", "val_loss"])
    Traceback (most recent call last):
    ...
    ValueError: y='val_los' is not a column; did you mean 'val_loss'? There are train_loss, val_loss.
    """
    names = list(columns)
    if instance(name, value, str, "the name of a column") not in names:
        raise ValueError(f"{name}={value!r} is not a column{did_you_mean(value, names)} There are {', '.join(names)}.")
    return value


def path(name: str, value: Any, allowed: str = "a path: a str or a pathlib.Path") -> Path:
    """Return `value` as a path if it is a str or a path; `allowed` describes the expected value, for the message.

    Raises:
        TypeError: if it is neither.
        ValueError: if no file can have that name.

    >>> path("directory", "runs").name
    'runs'
    >>> path("directory", 3)
    Traceback (most recent call last):
    ...
    TypeError: directory=3 must be a path: a str or a pathlib.Path.
    """
    if not isinstance(value, (str, os.PathLike)) or isinstance(os.fspath(value), bytes):
        raise TypeError(f"{name}={value!r} must be {allowed}.")
    if "\0" in os.fspath(value) or os.fspath(value) == "":
        wrong = "contains a null character" if value else "is empty"
        raise ValueError(f"{name}={value!r} is not a path: it {wrong}.")
    return Path(value)


def keywords(whose: str, keys: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise an error unless every key is an allowed keyword.

    Raises:
        TypeError: otherwise, naming the first key that is not.

    >>> keywords("fit()", ["max_step"], ["batch_size", "max_steps"])
    Traceback (most recent call last):
    ...
    TypeError: fit() has no argument 'max_step'; did you mean 'max_steps'? It has: batch_size, max_steps.
    """
    allowed_names = list(allowed)
    for key in keys:
        if key not in allowed_names:
            has = ", ".join(allowed_names) or "none"
            raise TypeError(f"{whose} has no argument {key!r}{did_you_mean(key, allowed_names)} It has: {has}.")


def strict(function: Callable[P, Result]) -> Callable[P, Result]:
    """Let a function or an `__init__` refuse keywords that it does not take, and list the others.

    >>> @strict
    ... def load(path, device=None): ...
    >>> load("run.pt", devise="cpu")
    Traceback (most recent call last):
    ...
    TypeError: load() has no argument 'devise'; did you mean 'device'? It has: path, device.
    """
    takes, method = list(inspect.signature(function).parameters.values()), function.__name__ == "__init__"
    if any(p.kind is p.VAR_KEYWORD for p in takes):
        return function
    names = [p.name for p in takes[method:]]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        keywords(type(args[0]).__name__ if method else f"{function.__name__}()", kwargs, names)
        return function(*args, **kwargs)

    return call


def fits(what_has: str, num_nodes: int | None, of_the_run: int, give: str) -> None:
    """Raise a ValueError unless values for so many nodes fit the run; None fits any.

    >>> fits("Compute has seconds for", 2, 3, "one number, or [3]")
    Traceback (most recent call last):
    ...
    ValueError: Compute has seconds for 2 nodes and the run has 3: give one number, or [3].
    """
    if num_nodes not in (None, of_the_run):
        raise ValueError(f"{what_has} {num_nodes} nodes and the run has {of_the_run}: give {give}.")


def did_you_mean(value: Any, names: Iterable[str]) -> str:
    """End a message's first sentence, suggesting the name closest to `value` if one is close.

    >>> did_you_mean("cosin", ["constant", "cosine"]), did_you_mean("x", ["cosine"])
    ("; did you mean 'cosine'?", '.')
    """
    close = closest(value, names)
    return "." if close is None else f"; did you mean {close!r}?"


def closest(value: Any, names: Iterable[str]) -> str | None:
    """Return the name closest to `value`, ignoring case, if one is close.

    >>> closest("ADAMM", ["sgd", "adam"]), closest("x", ["sgd", "adam"])
    ('adam', None)
    """
    lower = {str(name).lower(): str(name) for name in names}
    close = difflib.get_close_matches(str(value).lower(), lower, 1, cutoff=0.5)
    return lower[close[0]] if close else None


def kind_of(value: Any) -> str:
    """Describe a wrong argument, for a message.

    >>> kind_of(3), kind_of(int)
    ('of type int', 'the class int')
    """
    return f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"


def is_integer(value: Any) -> bool:
    """Whether `value` is an integer, of Python or numpy; True is not.

    >>> is_integer(3), is_integer(np.int64(3)), is_integer(True), is_integer(3.0)
    (True, True, False, False)
    """
    return isinstance(value, numbers.Integral) and not isinstance(value, (bool, Tensor))


def is_number(value: Any) -> bool:
    """Whether `value` is a real number, of Python or numpy; True and tensors are not.

    >>> is_number(0.5), is_number(float("nan")), is_number(True), is_number("0.5")
    (True, True, False, False)
    """
    return isinstance(value, numbers.Real) and not isinstance(value, (bool, Tensor))


def is_finite(value: Any) -> bool:
    """Whether `value` is a number that is neither infinite nor nan.

    >>> is_finite(0.5), is_finite(float("nan")), is_finite(None)
    (True, False, False)
    """
    return is_number(value) and math.isfinite(value)


MOST = 2**63  # the smallest integer that is too large for torch and for files


def plain(value: Any) -> Any:
    """Convert a number to a plain Python one; an integer too large for torch becomes a float.

    >>> plain(np.float32(0.5)), plain(10**30), plain("sgd")
    (0.5, 1e+30, 'sgd')
    """
    value = value.item() if isinstance(value, np.generic) else value
    try:
        return float(value) if isinstance(value, int) and not -MOST <= value < MOST else value
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _formatted(value: Any) -> str:
    """Format a value for a message; an integer too large for torch is rounded."""
    return f"{plain(value):.3g}" if is_integer(value) and not -MOST <= value < MOST else repr(value)


def _about(what: str) -> str:
    return f": {what}" if what else ""


# ---------------------------------------------------------------------------------------------------- options


@dataclass(frozen=True)
class Options:
    """Base of frozen dataclasses: every field of type `Annotated[..., check]` becomes `check(name, value)`.

    >>> @dataclass(frozen=True)
    ... class Sizes(Options):
    ...     rows: Annotated[int, integer] = 1
    >>> Sizes(rows=0)
    Traceback (most recent call last):
    ...
    ValueError: rows=0 must be an integer >= 1.
    """

    def __post_init__(self) -> None:
        cls: Any = type(self)
        checks = checks_of(cls)
        self.settle(**{name: checks[name](name, value) for name, value in vars(self).items() if name in checks})

    def settle(self, **values: Any) -> None:
        """Set fields while the object is created; afterwards it is frozen."""
        for name, value in values.items():
            object.__setattr__(self, name, value)


@functools.cache
def checks_of(options: Any) -> dict[str, Callable[[str, Any], Any]]:
    """Return the checks of a class of options, by field name."""
    hints = get_type_hints(options, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if get_origin(hint) is Annotated}


def takes(
    options: Callable[P, OptionsT],
) -> Callable[[Callable[[Owner, OptionsT], Result]], Callable[Concatenate[Owner, P], Result]]:
    """Let a method that takes an options object be called with the options by name.

    Type checkers and `help` see all options; `{arguments}` in the docstring is replaced with their documentation.

    >>> @dataclass(frozen=True)
    ... class Sizes(Options):
    ...     rows: Annotated[int, integer] = 1
    >>> class Table:
    ...     @takes(Sizes)
    ...     def make(self, options):
    ...         return options.rows
    >>> Table().make(rows=3), str(inspect.signature(Table.make))
    (3, "(self, rows: 'int' = 1)")
    >>> Table().make(row=3)
    Traceback (most recent call last):
    ...
    TypeError: make() has no argument 'row'; did you mean 'rows'? It has: rows.
    """

    owner = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return functools.partial(_by_name, options, (owner,))


def function_of(options: Callable[P, OptionsT]) -> Callable[[Callable[[OptionsT], Result]], Callable[P, Result]]:
    """Let a function that takes an options object be called with the options by name; see `takes`."""

    return functools.partial(_by_name, options, ())


def _by_name(options: Any, first: Sequence[inspect.Parameter], function: Callable[..., Any]) -> Any:
    """Return a function that accepts the options by name after the `first` parameters, in its signature too."""
    signature, hints, name = inspect.signature(options), get_type_hints(options), function.__name__

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        positional = args[len(first) :]
        keywords(f"{name}()", kwargs, signature.parameters)
        if wrong := misfit(options, *positional, **kwargs):
            raise TypeError(f"{name}(): {wrong}.")
        return function(*args[: len(first)], options(*positional, **kwargs))

    annotated = [p.replace(annotation=inspect.formatannotation(hints[p.name])) for p in signature.parameters.values()]
    call.__signature__ = inspect.Signature([*first, *annotated])  # type: ignore[attr-defined]
    call.__doc__ = inspect.cleandoc(function.__doc__ or "").replace("    {arguments}", _arguments(options))
    return call


def _arguments(options: Any) -> str:
    """Return the text below "Args:" in the docstrings of options, base classes first."""
    texts = [inspect.cleandoc(cls.__doc__ or "") for cls in reversed(options.__mro__)]
    matches = [re.search(r"^Args:\n(.*?)(\n\n|\Z)", text, re.DOTALL | re.MULTILINE) for text in texts]
    return "\n".join(match[1] for match in matches if match)
