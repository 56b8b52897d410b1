"""Collate the examples of all nodes into one tensor, with errors that name the leaf."""

from __future__ import annotations

import contextlib
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vecgym.core import check, tree
from vecgym.data.checks import describe

Batch = Any  # a tensor, or nested dicts, lists and (named) tuples of tensors


def fold(leaf: Any, path: str, size: torch.Size) -> Tensor:
    """Reshape `[L * B, ...]` to `[L, B, ...]`."""
    tensor = as_tensor(leaf, path)
    if tensor.dim() == 0 or tensor.shape[0] != size.numel():
        raise ValueError(
            f"{path} has shape {tuple(tensor.shape)} for {size.numel()} indices. Allowed: leaves "
            f"[{size.numel()}, ...] from a __getitems__ that returns a batch. Fix: one row per index, "
            "or return a list of examples"
        )
    return tensor.reshape(size + tensor.shape[1:])


def explain(leaves: list[Any], path: str) -> None:
    """Raise an error that explains why examples cannot be collated, if there is an obvious reason."""
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, np.ndarray, np.generic, numbers.Number, str, bytes)):
            raise _not_a_tensor(leaf, path)
    check_shapes([getattr(leaf, "shape", ()) for leaf in leaves], path, lambda i: f"example {i}")


def check_shapes(shapes: Sequence[tuple[int, ...]], path: str, label: Callable[[int], str]) -> None:
    """Raise a ValueError unless all shapes are equal; `label(i)` names what has shape i."""
    for i, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise ValueError(
                f"{path} has shape {tuple(shapes[0])} in {label(0)} and {tuple(shape)} in {label(i)}. "
                "Allowed: one shape, since the batches of all nodes form one tensor [L, B, ...]. "
                'Fix: pad to a fixed shape, dataloader_kwargs={"collate_fn": one_that_pads}'
            )


def as_tensor(leaf: Any, path: str) -> Tensor:
    """Convert a leaf of a batch to a tensor."""
    if isinstance(leaf, Tensor):
        return check.has_values(path, leaf)
    if isinstance(leaf, (np.ndarray, np.generic, numbers.Number)):
        with contextlib.suppress(TypeError):  # an array of objects or strings
            return torch.as_tensor(leaf)
    raise _not_a_tensor(leaf, path)


def _not_a_tensor(leaf: Any, path: str) -> TypeError:
    return TypeError(
        f"{path} is {describe(leaf)}. Allowed: tensors, numpy arrays, numbers. Fix: a transform in the "
        'dataset, or dataloader_kwargs={"collate_fn": one_that_returns_tensors}'
    )


def as_list(examples: Any, count: int) -> list[Any]:
    """Return the examples as a list, for a `collate_fn`, even if `__getitems__` returned a batch."""
    if isinstance(examples, list):
        return examples
    return [tree.map_leaves(operator.itemgetter(i), examples) for i in range(count)]


def map_together(fn: Callable[[list[Any], str], Any], trees: Sequence[Any], path: str = "batch") -> Any:
    """Apply `fn(leaves, path)` to the corresponding leaves of trees of the same form, and return such a tree."""
    first = trees[0]
    forms = sorted({_outline(x) for x in trees})
    if len(forms) > 1:
        raise ValueError(
            f"{path} does not have the same form everywhere: {' and '.join(forms)}. Allowed: the same keys "
            "and lengths in every example of every node. Fix: a collate_fn that makes them the same"
        )
    if isinstance(first, Mapping):
        return {key: map_together(fn, [x[key] for x in trees], f"{path}[{key!r}]") for key in first}
    if not _is_sequence(first):
        return fn(list(trees), path)
    parts = [map_together(fn, [x[i] for x in trees], f"{path}[{i}]") for i in range(len(first))]
    if hasattr(first, "_fields"):
        return type(first)(*parts)
    return tuple(parts) if isinstance(first, tuple) else parts


def _is_sequence(value: Any) -> bool:
    # default_collate turns strings into a list: one leaf, which is not allowed
    return isinstance(value, (list, tuple)) and not (value and isinstance(value[0], (str, bytes)))


def _outline(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"keys {sorted(map(str, value))}"
    return f"length {len(value)}" if _is_sequence(value) else "a leaf"
