"""Fragments of a model: groups of parameters that are exchanged together, and parameters that never are."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from vecgym.core import check

Pattern = Literal["strided", "sequential"]
Names = tuple[str, ...]
Fragments = int | Sequence[Sequence[str]] | Callable[[str], int]

BLOCKS_TOGETHER = 3  # blocks per fragment by default, as in Streaming DiLoCo
ALLOWED = "a number, lists of names of parameters or modules, or a function of a parameter's name that gives 0, 1, ..."


def blocks_of(names: Sequence[str]) -> dict[str, list[str]]:
    """Group parameters by their block, in the order of the model; "" has the parameters outside of all blocks.

    The name of a block ends in the first number of a parameter's name, such as `blocks.3`. Without any numbers, every
    module is a block.

    >>> blocks_of(["tokens.weight", "blocks.0.up.weight", "blocks.0.down.weight", "blocks.1.up.weight", "norm.weight"])
    {'': ['tokens.weight', 'norm.weight'], 'blocks.0': ['blocks.0.up.weight', 'blocks.0.down.weight'], \
'blocks.1': ['blocks.1.up.weight']}
    >>> blocks_of(["first.weight", "first.bias", "second.weight"])
    {'first': ['first.weight', 'first.bias'], 'second': ['second.weight']}
    """
    numbered = {name: match.group() for name in names if (match := re.match(r"(.*?\.)??\d+(?=\.|$)", name))}
    blocks: dict[str, list[str]] = {}
    for name in names:
        block = numbered.get(name, "") if numbered else name.rpartition(".")[0] or name
        blocks.setdefault(block, []).append(name)
    return blocks


def cut(names: Sequence[str], fragments: Fragments | None = None, pattern: str = "strided") -> tuple[Names, ...]:
    """Cut a model into fragments; return the names of the parameters in each.

    Args:
        names: of the parameters, in the order of the model.
        fragments: their number, or None: three blocks each. The first fragment then holds the parameters outside of the
            blocks (embedding, last norm, head), and the others share the blocks, at least one each; one fragment is the
            whole model. Or lists of names, of parameters or modules, or a function from a parameter's name to the
            number of its fragment; each parameter is in one.
        pattern: "strided" deals out the blocks in turn; "sequential" keeps neighbours together.

    Raises:
        ValueError: for lists that leave out a parameter, hold one twice or have an unknown name, and for a function
            whose numbers are not 0, 1, ...

    >>> names = ["tokens", "h.0.w", "h.1.w", "h.2.w", "h.3.w"]
    >>> cut(names, 3), cut(names, 3, "sequential")
    ((('tokens',), ('h.0.w', 'h.2.w'), ('h.1.w', 'h.3.w')), (('tokens',), ('h.0.w', 'h.1.w'), ('h.2.w', 'h.3.w')))
    >>> cut(names, [["h.0", "h.1"], ["h.2", "h.3.w", "tokens"]])
    (('h.0.w', 'h.1.w'), ('tokens', 'h.2.w', 'h.3.w'))
    >>> cut(names, lambda name: int("h" in name))
    (('tokens',), ('h.0.w', 'h.1.w', 'h.2.w', 'h.3.w'))
    """
    if callable(fragments):
        return _by_number(names, [check.called("fragments", fragments, name) for name in names])
    if fragments is None or isinstance(fragments, int):
        return _dealt(tuple(names), fragments, pattern)
    return _listed(tuple(names), tuple(map(tuple, fragments))) if names else ()  # before the model is known


@functools.lru_cache(maxsize=64)
def _dealt(names: Names, number: int | None, pattern: str) -> tuple[Names, ...]:
    blocks = blocks_of(names)
    outside = [tuple(blocks.pop(""))] if "" in blocks and len(blocks) > 1 else []
    if number is None:
        number = len(outside) + -(-len(blocks) // BLOCKS_TOGETHER)
    if number == 1 or (len(blocks) < 2 and not outside):
        return (names,)
    count = min(number - len(outside), len(blocks))
    parts: list[list[str]] = [[] for _ in range(count)]
    for i, held in enumerate(blocks.values()):
        parts[i % count if pattern == "strided" else i * count // len(blocks)].extend(held)
    return (*outside, *map(tuple, parts))


@functools.lru_cache(maxsize=64)
def _listed(names: Names, lists: tuple[Names, ...]) -> tuple[Names, ...]:
    number: dict[str, int] = {}
    for p, entries in enumerate(lists):
        for entry in entries:
            held = [name for name in names if name == entry or name.startswith(f"{entry}.")]
            twice = [name for name in held if name in number]
            if twice or not held:
                raise ValueError(
                    f"fragments: {entry!r} " + (f"holds {twice[0]} a second time" if twice else "is not in the model")
                    + f"; the model has {', '.join(names)}, and each must be in one fragment."
                )  # fmt: skip
            number |= dict.fromkeys(held, p)
    out = [name for name in names if name not in number]
    if out:
        raise ValueError(f"fragments leave out {', '.join(out)}: name each parameter, or its module, in one of them.")
    return _by_number(names, [number[name] for name in names])


def _by_number(names: Sequence[str], numbers: Sequence[Any]) -> tuple[Names, ...]:
    for name, number in zip(names, numbers):
        check.integer(f"fragments({name!r})", number, 0, "the number of the fragment that the parameter is in")
    parts = tuple(tuple(name for name, q in zip(names, numbers) if q == p) for p in sorted(set(numbers)))
    if max(numbers, default=-1) + 1 != len(parts):
        raise ValueError(f"fragments numbers them {sorted(set(numbers))}: give all of 0, 1, ... to the last.")
    return parts


@functools.lru_cache(maxsize=64)
def at_home(names: Names, private: Names) -> frozenset[str]:
    """Return the names of the parameters that stay on their node: those of patterns, of parameters or modules.

    Raises:
        ValueError: for a pattern that matches nothing, and for patterns that match everything.

    >>> sorted(at_home(("body.0.weight", "norm.bias", "norm.weight", "head.weight"), ("head", "norm.*")))
    ['head.weight', 'norm.bias', 'norm.weight']
    >>> at_home(("body.weight", "head.weight", "head.bias"), ("haed.*",))
    Traceback (most recent call last):
    ...
    ValueError: private='haed.*' matches no parameter of the model; near it are 'head', 'head.bias', 'head.weight'. \
Buffers, such as a batch norm's statistics, are never exchanged, and need no pattern.
    """
    home: set[str] = set()
    for pattern in private if names else ():  # there are none before the model is known
        held = {x for x in names if any(fnmatch.fnmatchcase(x, form) for form in (pattern, f"{pattern}.*"))}
        if not held:
            modules = {x[: match.start()] for x in names for match in re.finditer(r"\.", x)}
            near = difflib.get_close_matches(pattern.rstrip(".*"), [*names, *modules], 5, cutoff=0.3)
            known = f"near it are {', '.join(sorted(map(repr, near)))}" if near else f"it has {', '.join(names)}"
            raise ValueError(
                f"private={pattern!r} matches no parameter of the model; {known}. Buffers, such as a batch norm's "
                "statistics, are never exchanged, and need no pattern."
            )
        home |= held
    if names and home.issuperset(names):
        raise ValueError(f"private={list(private)} keeps all parameters at home: leave out some, or the exchange.")
    return frozenset(home)


def check_fragments(name: str, value: Any) -> Fragments | None:
    """Return `value` if it is a valid choice of fragments.

    >>> check_fragments("fragments", "layers")
    Traceback (most recent call last):
    ...
    TypeError: fragments='layers' must be a number, lists of names of parameters or modules, or a function of a \
parameter's name that gives 0, 1, ...
    """
    if value is None or (callable(value) and not isinstance(value, type)):
        return value
    if check.is_number(value) or isinstance(value, bool):
        return check.integer(name, value, what="the parts into which the parameters are cut")
    lists = isinstance(value, (list, tuple)) and len(value) > 0 and all(isinstance(x, (list, tuple)) for x in value)
    if not lists or not all(x and all(isinstance(entry, str) for entry in x) for x in value):
        raise TypeError(f"{name}={value!r} must be {ALLOWED}")
    return value


def check_offsets(offsets: Any, fragments: Any) -> list[int] | None:
    """Return the steps before the first exchange of each fragment, if there are as many as fragments.

    >>> check_offsets([1, 2], fragments=2), check_offsets(None, fragments=2)
    ([1, 2], None)
    """
    if offsets is None:
        return None
    number = len(fragments) if isinstance(fragments, (list, tuple)) else fragments if check.is_integer(fragments) else 0
    if not isinstance(offsets, (list, tuple)) or not offsets or (number and len(offsets) != number):
        raise ValueError(f"offsets={offsets!r}: give a list of one number for each of the {number or ''} fragments.")
    return [check.integer("offsets", offset, what="steps before a fragment is sent first") for offset in offsets]
