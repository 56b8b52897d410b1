"""What evolves in the rounds of nodes that train at different times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vecgym.core import nodes, tree
from vecgym.core.tree import Tree


class LocalState(NamedTuple):
    """What evolves in the rounds of n nodes, `[n, *]`."""

    params: Tree
    buffers: Tree
    optimizer: dict[str, Any]
    losses: Tensor  # summed over the steps

    def nodes(self, a: int, b: int) -> LocalState:
        """View nodes a to b."""
        found: LocalState = tree.map_leaves(lambda x: x[a:b], self)
        return found

    @classmethod
    def joined(cls, parts: Sequence[LocalState]) -> LocalState:
        """Put the nodes of several together again."""
        parts = [part for part in parts if len(part.losses)]
        if len(parts) == 1:
            return parts[0]
        found: LocalState = tree.map_leaves(lambda *each: torch.cat(each), *parts)
        return found


def weighted(movement: Tree, weight: Any) -> Tree:
    """Return a movement times its weight; as it is where that is 1."""
    if isinstance(weight, (int, float)) and weight == 1:
        return movement
    return tree.map(lambda x: weight * x, movement)


def of_each(values: Any, num_nodes: int) -> Any:
    """Copy what is the same on every node, `[1, *]`, for each of them.

    >>> of_each(torch.tensor([1.0]), 2)
    tensor([1., 1.])
    """
    return tree.map_leaves(lambda x: nodes.expanded(x, num_nodes).clone(), values)
