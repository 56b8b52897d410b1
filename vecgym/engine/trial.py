"""Try a backend on the first batch of a run."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

from vecgym.core import tree
from vecgym.core.nodes import expand
from vecgym.engine.backend import Backend, Keys, Local, NodeSlice, sizes_of
from vecgym.engine.stateless import StatelessModel


class Trial(NamedTuple):
    """The result of a trial: `refusal`, why the backend is not used, or else a `report` in words."""

    refusal: str
    report: str


def first_part(model: StatelessModel, batch: Any, mean: bool) -> NodeSlice:
    """Return the inputs of a first step; buffers are copies.

    Args:
        batch: of the nodes in one call, leaves `[n, B, ...]`.
        mean: for the gradient of the mean loss instead of each node's.
    """
    size, _ = sizes_of(batch)
    params = {name: p.detach()[None] for name, p in model.params.items()}
    buffers = {name: b[None].clone() for name, b in model.buffers.items()}
    params = params if mean else expand(params, size)
    return NodeSlice(params, model.own_buffers(buffers, size, False), batch, Keys([0] * size, 0, range(size)))


def turned(batch: Any) -> Any:
    """Return another batch of the same shapes.

    >>> turned((torch.tensor([[1, 2], [3, 4]]),))
    (tensor([[4, 3],
            [2, 1]]),)
    """
    return tree.map_leaves(lambda x: x.flip(0, *([1] if x.dim() > 1 else [])), batch)


def timed(backend: Backend, part: NodeSlice, mean: bool) -> tuple[Local, float]:
    """Compute one pass; return its result and the seconds that it took."""
    start = time.perf_counter()
    if mean:
        ((grads, losses),) = backend.mean_gradients(part, part.size)
        local = Local(grads, losses, part.buffers)
    else:
        local = backend.gradients(part, dict)
    if local.losses.device.type == "cuda":
        torch.cuda.synchronize(local.losses.device)
    return local, time.perf_counter() - start
