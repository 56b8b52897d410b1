"""Options as dataclasses whose annotations hold the checks, and functions that accept options by name."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar, get_origin, get_type_hints

from vecgym.core import check

P = ParamSpec("P")
OptionsT = TypeVar("OptionsT")
Owner = TypeVar("Owner")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Options:
    """Base of frozen dataclasses: every field of type `Annotated[..., check]` becomes `check(name, value)`.

    >>> @dataclass(frozen=True)
    ... class Sizes(Options):
    ...     rows: Annotated[int, check.integer] = 1
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
    ...     rows: Annotated[int, check.integer] = 1
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
    """Do for a function what `takes` does for a method."""

    return functools.partial(_by_name, options, ())


def _by_name(options: Any, first: Sequence[inspect.Parameter], function: Callable[..., Any]) -> Any:
    """Return a function that accepts the options by name after the `first` parameters, in its signature too."""
    signature, hints, name = inspect.signature(options), get_type_hints(options), function.__name__

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        positional = args[len(first) :]
        check.keywords(f"{name}()", kwargs, signature.parameters)
        try:
            signature.bind(*positional, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}(): {error}.") from None
        return function(*args[: len(first)], options(*positional, **kwargs))

    annotated = [p.replace(annotation=inspect.formatannotation(hints[p.name])) for p in signature.parameters.values()]
    call.__signature__ = inspect.Signature([*first, *annotated])  # type: ignore[attr-defined]
    call.__doc__ = inspect.cleandoc(function.__doc__ or "").replace("    {arguments}", _arguments(options))
    return call


def _arguments(options: Any) -> str:
    """Return what the docstrings of options say below "Args:", base classes first."""
    texts = [inspect.cleandoc(cls.__doc__ or "") for cls in reversed(options.__mro__)]
    matches = [re.search(r"^Args:\n(.*?)(\n\n|\Z)", text, re.DOTALL | re.MULTILINE) for text in texts]
    return "\n".join(match[1] for match in matches if match)
