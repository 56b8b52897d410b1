"""Whole vectors of n nodes: values `[R, n, p]` by name, whose norms and distances are over all tensors together.

Each of the R sets of nodes is an island, or all nodes of a configuration, and is apart from the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vecgym.core import tree
from vecgym.core.tree import Tree, differentiated, root, wider

CACHED_ELEMENTS = 1 << 17  # of a block of columns that is computed at once on a CPU: 0.5 MiB in float32
HELD_ELEMENTS = 1 << 26  # on another device
LARGE = 1 << 13  # elements, from which on other functions than torch's own are faster
PRODUCT_ROWS = 64  # of a block of a product that is computed above the diagonal, too


def blocks(x: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield neighbouring columns of tensors `[R, .., p]`, few enough to stay in a CPU's cache.

    >>> [block.shape[-1] for (block,) in blocks(torch.zeros(1, 256, 1200))]
    [512, 512, 176]
    """
    held = CACHED_ELEMENTS if x.is_cpu and type(x) is Tensor else HELD_ELEMENTS
    width = max(64, held // max(1, x.shape[0] * x.shape[1]))
    return zip(*(y.split(width, -1) for y in (x, *others)))


def _is_large(x: Tensor) -> bool:
    """Whether a tensor has many values, in the host's memory (a FakeTensor has none), and takes no derivatives."""
    return x.is_cpu and type(x) is Tensor and x.numel() >= LARGE and not differentiated(x)


def norms(values: Tree, around: Tree | None = None) -> Tensor:
    """Return the 2-norm of each node's vector, or of its difference to another one, `[R, n]`; infinite in place of nan.

    >>> norms({"w": torch.tensor([[[3.0], [1.0]]]), "b": torch.tensor([[[4.0], [torch.nan]]])})
    tensor([[5., inf]])
    """
    total: Any = 0.0
    for name, x in values.items():
        each: Iterable[Tensor] = [x] if around is None else (y - centre for y, centre in blocks(x, around[name]))
        for d in each:
            total = total + _squares(d.to(wider(x.dtype)))
    return root(total).nan_to_num(torch.inf, torch.inf)


def _squares(x: Tensor) -> Tensor:
    """Return the squared norms of the last dimension; torch's norm has no second derivative at 0."""
    return (x * x).sum(-1) if differentiated(x) else torch.linalg.vector_norm(x, dim=-1).square()


def distances(values: Tree) -> Tensor:
    """Return the squared distances between the nodes, `[R, n, n]`, in float64, as constants under differentiation.

    A node whose values are not all finite is infinitely far from all nodes, itself included. A distance depends on its
    two nodes only, so that no liar can blur those between others.

    >>> distances({"w": torch.tensor([[[0.0], [3.0], [torch.nan]]]), "b": torch.tensor([[[0.0], [4.0], [0.0]]])})
    tensor([[[ 0., 25., inf],
             [25.,  0., inf],
             [inf, inf, inf]]], dtype=torch.float64)
    """
    products: list[Tensor] = []
    for x in values.values():
        dtype = torch.float32 if x.device.type == "mps" else torch.float64  # which has no float64
        for (block,) in blocks(x.detach()):
            rows, starts = block.to(dtype), range(0, x.shape[1], PRODUCT_ROWS)
            new = [rows[:, i:] @ rows[:, i : i + PRODUCT_ROWS].mT for i in starts]
            products = [old + y for old, y in zip(products, new)] if products else new
    lower = torch.cat([F.pad(y, (0, 0, i * PRODUCT_ROWS, 0)) for i, y in enumerate(products)], -1)
    gram = lower.tril() + lower.tril(-1).mT  # symmetric to the last bit: of equal distances the first one counts
    own = gram.diagonal(dim1=-2, dim2=-1)
    return (own[:, :, None] + own[:, None] - 2 * gram).clamp_min(0).nan_to_num(torch.inf, torch.inf)


def combined(weights: Tensor, values: Tree) -> Tree:
    """Return sums of the nodes' vectors, with weights `[R, m, n]`: `[R, m, p]`. A number that is not finite is 0.

    >>> combined(torch.tensor([[[0.5, 0.5, 0.0]]]), {"w": torch.tensor([[[2.0], [4.0], [torch.nan]]])})
    {'w': tensor([[[3.]]])}
    """

    def of_tensor(x: Tensor) -> Tensor:
        w = weights.to(wider(x.dtype))
        if w.shape[1] > 1 or w.dtype != x.dtype or not _is_large(x) or differentiated(w):
            return torch.cat([w @ y.to(w.dtype).nan_to_num(0, 0, 0) for (y,) in blocks(x)], -1).to(x.dtype)
        # One pass without a copy, in which a row of weight 0 is replaced by one that is finite.
        read = torch.where(w != 0, torch.arange(x.shape[1]), w.argmax(-1, keepdim=True))[:, 0]
        rows = read + x.shape[1] * torch.arange(len(x))[:, None]
        return F.embedding_bag(rows, x.flatten(0, 1), mode="sum", per_sample_weights=w[:, 0])[:, None]

    return tree.map(of_tensor, values)


def by_coordinate(fn: Callable[[Tensor], Tensor], values: Tree) -> Tree:
    """Apply a function from `[R, n, p]` to `[R, p]`, coordinate by coordinate.

    >>> by_coordinate(lambda x: x.amax(1), {"w": torch.tensor([[[1.0, 5.0], [2.0, 4.0]]])})
    {'w': tensor([[2., 5.]])}
    """
    return tree.map(lambda x: torch.cat([fn(block) for (block,) in blocks(x)], -1), values)


def ordered(x: Tensor) -> Tensor:
    """Sort each coordinate over the nodes, `[R, n, p]`; nan counts as the largest value.

    numpy sorts rows of float32 and float64 with vector instructions, some 20 times as fast as torch does.

    >>> ordered(torch.tensor([[[3.0, 1.0], [2.0, torch.nan], [1.0, 0.0]]]))
    tensor([[[1., 0.],
             [2., 1.],
             [3., nan]]])
    """
    if x.dtype not in (torch.float32, torch.float64) or not _is_large(x):
        return x.sort(1).values
    rows = x.mT.clone(memory_format=torch.contiguous_format).numpy()  # a copy, which is sorted in place
    rows.sort(-1)
    return torch.from_numpy(rows).mT
