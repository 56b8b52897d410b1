"""Whole vectors of n nodes: values `[R, n, p]` by name, whose norms and distances are over all tensors together.

Each of the R sets of nodes is an island, or all nodes of a configuration, and is apart from the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vecgym.core import tree
from vecgym.core.tree import Tree, differentiated, root, wider

CACHED_ELEMENTS = 1 << 17  # of a block of columns that is computed at once on a CPU: 0.5 MiB in float32
HELD_ELEMENTS = 1 << 26  # on another device
SMALL = 1 << 13  # elements that torch's sort orders faster than calls for each layer of a network
PRODUCT_ROWS = 64  # of a block of a product that is computed above the diagonal, too


def blocks(x: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield neighbouring columns of tensors `[R, .., p]`, few enough to stay in a CPU's cache.

    >>> [block.shape[-1] for (block,) in blocks(torch.zeros(1, 256, 1200))]
    [512, 512, 176]
    """
    held = CACHED_ELEMENTS if x.is_cpu else HELD_ELEMENTS
    width = max(64, held // max(1, x.shape[0] * x.shape[1]))
    return zip(*(y.split(width, -1) for y in (x, *others)))


def norms(values: Tree, around: Tree | None = None) -> Tensor:
    """Return the 2-norm of each node's vector, or of its difference to another one, `[R, n]`; infinite in place of nan.

    >>> norms({"w": torch.tensor([[[3.0], [1.0]]]), "b": torch.tensor([[[4.0], [torch.nan]]])})
    tensor([[5., inf]])
    """
    squares: Any = 0.0
    for name, x in values.items():
        for block, *centre in blocks(x, *([] if around is None else [around[name]])):
            d = (block - centre[0] if centre else block).to(wider(x.dtype))
            squares = squares + (d * d).sum(-1)
    found: Tensor = root(squares)
    return found.nan_to_num(torch.inf, torch.inf)


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
    """Return sums of the nodes' vectors, with weights `[R, m, n]`: `[R, m, p]`. Values of weight 0 are not read.

    >>> combined(torch.tensor([[[0.5, 0.5, 0.0]]]), {"w": torch.tensor([[[2.0], [4.0], [torch.nan]]])})
    {'w': tensor([[[3.]]])}
    """
    used = (weights != 0).any(1)[..., None]

    def of_tensor(x: Tensor) -> Tensor:
        w = weights.to(wider(x.dtype))
        return torch.cat([w @ torch.where(used, y.to(w.dtype), 0) for (y,) in blocks(x)], -1).to(x.dtype)

    return tree.map(of_tensor, values)


def by_coordinate(fn: Callable[[Tensor], Tensor], values: Tree) -> Tree:
    """Apply a function from `[R, n, p]` to `[R, p]`, coordinate by coordinate.

    >>> by_coordinate(lambda x: x.amax(1), {"w": torch.tensor([[[1.0, 5.0], [2.0, 4.0]]])})
    {'w': tensor([[2., 5.]])}
    """
    return tree.map(lambda x: torch.cat([fn(block) for (block,) in blocks(x)], -1), values)


def ordered(x: Tensor) -> Tensor:
    """Sort each coordinate over the nodes, `[R, n, p]`. A value that is nan counts as infinite.

    On a CPU this is Batcher's network of odd-even merges: neighbouring coordinates are compared in one instruction.

    >>> ordered(torch.tensor([[[3.0, 1.0], [2.0, torch.nan], [1.0, 0.0]]]))
    tensor([[[1., 0.],
             [2., 1.],
             [3., inf]]])
    """
    n, x = x.shape[1], torch.nan_to_num(x, torch.inf, torch.inf, -torch.inf)
    if not x.is_cpu or x.numel() < SMALL or differentiated(x):
        return x.sort(1).values
    size, half = 1 << (n - 1).bit_length(), 1
    y = F.pad(x, (0, 0, 0, size - n), value=torch.inf)
    while half < size:
        pairs = y.unflatten(1, (-1, 2 * half))  # of sorted runs, which become one
        _in_order(pairs[:, :, :half], pairs[:, :, half:])
        step = half // 2
        while step:
            inner = pairs[:, :, step : 2 * half - step].unflatten(2, (-1, 2, step))
            _in_order(inner[:, :, :, 0], inner[:, :, :, 1])
            step //= 2
        half *= 2
    return y[:, :n]


def _in_order(a: Tensor, b: Tensor) -> None:
    """Exchange values of `a` and `b` where a > b."""
    low = torch.minimum(a, b)
    torch.maximum(a, b, out=b)
    a.copy_(low)
