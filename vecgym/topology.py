"""Who talks to whom: partitions of the nodes into islands."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Groups = Sequence[Sequence[int]]


def random_islands(nodes: Sequence[int], island_size: int, generator: torch.Generator) -> list[list[int]]:
    """Shuffle `nodes` into islands of `island_size`; a remainder forms one last, smaller island.

    The members of each island are in ascending order, so that a reduction over them has one fixed order.

    >>> islands = random_islands(range(10), 4, torch.Generator().manual_seed(0))
    >>> [len(island) for island in islands], sorted(sum(islands, []))
    ([4, 4, 2], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """
    order = [nodes[i] for i in torch.randperm(len(nodes), generator=generator).tolist()]
    return [sorted(order[i : i + island_size]) for i in range(0, len(order), island_size)]


def sample_nodes(num_nodes: int, count: int, generator: torch.Generator) -> list[int]:
    """`count` of `num_nodes` nodes without replacement, ascending.

    >>> len(sample_nodes(10, 3, torch.Generator().manual_seed(0)))
    3
    """
    return sorted(torch.randperm(num_nodes, generator=generator)[:count].tolist())
