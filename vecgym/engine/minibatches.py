"""Batches taken in parts, and nodes whose batches differ in size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from vecgym.core import nodes, tree
from vecgym.core.devices import placed
from vecgym.engine.backend import Local, Part

Compute = Callable[[Part], Local]


def sizes_of(batch: Any) -> tuple[int, int]:
    """Return (L, B) of a batch whose leaves are `[L, B, ...]`.

    >>> sizes_of({"x": torch.zeros(4, 8, 3)})
    (4, 8)
    """
    shape = next(iter(tree.leaves(batch))).shape
    return shape[0], shape[1] if len(shape) > 1 else 1


def in_minibatches(part: Part, size: int | None, compute: Compute) -> Local:
    """Accumulate the gradient of the batch from `size` examples at a time, weighted by their number."""
    batch_size = sizes_of(part.batch)[1]
    size = size or batch_size
    total: Local | None = None
    for start in range(0, batch_size, size):
        stop = min(batch_size, start + size)
        local = compute(part.examples(start, stop, batch_size))
        part = part._replace(buffers=local.buffers)
        total = _added(total, local, (stop - start) / batch_size)
    assert total is not None
    return total


def _added(total: Local | None, part: Local, weight: float) -> Local:
    if weight == 1:
        return part
    grads = tree.map(lambda g: g * weight, part.grads)
    losses = part.losses * weight
    if total is None:
        return Local(grads, losses, part.buffers)
    return Local(tree.map(torch.add, total.grads, grads), total.losses + losses, part.buffers)


def by_batch_size(
    part: Part, limits: Sequence[int], compute: Compute, mean: bool, inplace: bool, written: Collection[str] = ()
) -> Local:
    """Compute the gradients of nodes that have only `limits` examples each, nodes with equally many at a time.

    Args:
        written: parameters, `[n, *]`, that the passes change.

    Raises:
        ValueError: for a batch that cannot be cut.
    """
    batch_size = sizes_of(part.batch)[1]
    if any(x.dim() < 2 or x.shape[1] != batch_size for x in tree.leaves(part.batch)):
        raise ValueError(
            f"a node has {min(limits)} examples, fewer than the {batch_size} of a batch, which cannot be cut: its "
            f"tensors are not all [nodes, {batch_size}, ...]. Give batch_size={min(limits)}, or another collate_fn."
        )
    sizes = [min(limit, batch_size) for limit in limits]
    groups = [torch.tensor([i for i, s in enumerate(sizes) if s == size]) for size in sorted(set(sizes))]
    results = []
    for group in groups:
        taken = part.take(group, sizes[group[0]])
        local = compute(taken)
        for name in written:
            part.params[name].index_copy_(0, placed(group, taken.params[name].device), taken.params[name])
        part = part._replace(buffers=nodes.put_rows(part.buffers, group, local.buffers, part.size, inplace))
        share = len(group) / part.size if mean else 1.0
        results.append(Local(tree.map(lambda g: g * share, local.grads), local.losses, {}))  # noqa: B023
    back = torch.cat(groups).argsort()
    losses = torch.cat([local.losses for local in results])

    def joined(*grads: Tensor) -> Tensor:
        return functools.reduce(torch.add, grads) if mean else torch.cat(grads)[placed(back, grads[0].device)]

    return Local(
        tree.map(joined, *[local.grads for local in results]), losses[placed(back, losses.device)], part.buffers
    )
