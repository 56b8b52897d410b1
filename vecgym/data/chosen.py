"""Batches of several configurations as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vecgym.core import tree


def combined(fn: Callable[[Sequence[Tensor]], Tensor], trees: Sequence[Any]) -> Any:
    """Return `fn` of the corresponding tensors of trees of one form.

    >>> combined(torch.cat, [{"x": torch.tensor([1])}, {"x": torch.tensor([2])}])
    {'x': tensor([1, 2])}
    """
    columns = zip(*[list(tree.leaves(x)) for x in trees])
    return tree.map_leaves(lambda _: fn(next(columns)), trees[0])


def chosen_batches(batches: Sequence[Any], which: Sequence[int]) -> Any:
    """S different batches `[K, B, ...]` -> that of each of C configurations, `[C * K, B, ...]`.

    >>> chosen_batches([torch.tensor([[1]]), torch.tensor([[2]])], [0, 1, 1]).T
    tensor([[1, 2, 2]])
    """
    if len(which) == 1:
        return batches[which[0]]
    if len(batches) == 1:
        return tree.map_leaves(lambda x: x.repeat(len(which), *[1] * (x.dim() - 1)), batches[0])
    index = torch.tensor(which)
    return combined(lambda x: torch.stack(list(x))[index.to(x[0].device)].flatten(0, 1), batches)


def places(each: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """The distinct objects among these, and which of them each is.

    >>> places(["a", "b", "a"])
    (['a', 'b'], [0, 1, 0])
    """
    distinct = list({id(x): x for x in each}.values())
    place = {id(x): i for i, x in enumerate(distinct)}
    return distinct, [place[id(x)] for x in each]
