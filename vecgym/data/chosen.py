"""The batches of several configurations as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vecgym.core import tree
from vecgym.core.devices import placed


def chosen_batches(batches: Sequence[Any], which: Sequence[int]) -> Any:
    """Join the batch of each of C configurations, out of S different ones: `[K, B, ...]` -> `[C * K, B, ...]`.

    >>> chosen_batches([torch.tensor([[1]]), torch.tensor([[2]])], [0, 1, 1]).T
    tensor([[1, 2, 2]])
    """
    if len(which) == 1:
        return batches[which[0]]
    if len(batches) == 1:
        return tree.map_leaves(lambda x: x.repeat(len(which), *[1] * (x.dim() - 1)), batches[0])
    index = torch.tensor(which)

    def chosen(*each: Tensor) -> Tensor:
        return torch.stack(each)[placed(index, each[0].device)].flatten(0, 1)

    return tree.map_leaves(chosen, *batches)


def places(each: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Return the distinct objects among these, and which of them each is.

    >>> places(["a", "b", "a"])
    (['a', 'b'], [0, 1, 0])
    """
    distinct = list({id(x): x for x in each}.values())
    place = {id(x): i for i, x in enumerate(distinct)}
    return distinct, [place[id(x)] for x in each]
