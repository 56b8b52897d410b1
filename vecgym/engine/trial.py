"""Trials of a backend before training: whether it computes what `vmap` does, and how long both take."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vecgym.core import tree
from vecgym.core.nodes import expand
from vecgym.engine.backend import Keys, Local, Part
from vecgym.engine.minibatches import sizes_of
from vecgym.engine.stateless import StatelessModel
from vecgym.engine.vmap import Vmap

# How far gradients may be from those of vmap, where sums are taken in another order: as a part of the largest value
# of the tensor, and of that of all tensors (a gradient that is 0 in exact arithmetic is nothing but rounding). A model
# that is traced wrongly is off by far more.
TOLERANCE = {torch.float64: (1e-10, 1e-13), torch.float32: (1e-3, 1e-6)}
LOW_PRECISION = (0.1, 1e-2)  # also autocast: fused operations keep float32 where vmap rounds between them


class Trial(NamedTuple):
    """What a trial has shown: `refusal`, why the backend is not taken, or how it went, in words."""

    refusal: str
    report: str


class Tried(Vmap):
    """A backend that is not for every model: it is tried before training.

    Attributes:
        name: of the backend.
        option: what asks for it.
        otherwise: how a model runs that it refuses.
    """

    name: str
    option: str
    otherwise: str

    def tried(self, batch: Any, mean: bool, autocast: bool) -> Trial:
        """Compare with `vmap`, and time both.

        Args:
            batch: of the nodes in one call, leaves `[n, B, ...]`.
            mean: try the gradient of the mean loss instead of those of each node.
        """
        raise NotImplementedError


def first_part(model: StatelessModel, batch: Any, mean: bool) -> Part:
    """Return the work of a first step; buffers are copies.

    Args:
        batch: of the nodes in one call, leaves `[n, B, ...]`.
        mean: what is computed is the gradient of the mean loss instead of those of each node.
    """
    size, _ = sizes_of(batch)
    params = {name: p.detach()[None] for name, p in model.params.items()}
    buffers = {name: b[None].clone() for name, b in model.buffers.items()}
    params = params if mean else expand(params, size)
    return Part(params, model.own_buffers(buffers, size, False), batch, Keys([0] * size, 0, range(size)))


def turned(batch: Any) -> Any:
    """Return another batch of the same shapes.

    >>> turned((torch.tensor([[1, 2], [3, 4]]),))
    (tensor([[4, 3],
            [2, 1]]),)
    """
    return tree.map_leaves(lambda x: x.flip(0, *([1] if x.dim() > 1 else [])), batch)


def timed(backend: Vmap, part: Part, mean: bool) -> tuple[Local, float]:
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


def difference(expected: Local, found: Local, autocast: bool) -> str:
    """Say which tensor `found` has wrong; "" if none is."""
    largest = max([_largest(g) for g in expected.grads.values()], default=0.0)
    for name, a, b in [
        ("the loss", expected.losses, found.losses),
        *((f"the gradient of {name}", g, found.grads[name]) for name, g in expected.grads.items()),
        *((f"the buffer {name}", x, found.buffers[name]) for name, x in expected.buffers.items()),
    ]:
        of_own, of_all = LOW_PRECISION if autocast else TOLERANCE.get(a.dtype, LOW_PRECISION)
        allowed = of_own * _largest(a) + of_all * largest if a.is_floating_point() else 0
        if not torch.allclose(a.double(), b.double(), rtol=0, atol=allowed, equal_nan=True):
            off = _largest(a.double() - b.double())
            return f"{name} is off by {off:.1e}, where rounding explains at most {allowed:.1e}"
    return ""


def _largest(x: Tensor) -> float:
    return x.abs().nan_to_num().amax().item() if x.numel() else 0.0


def first_line(text: str, otherwise: str) -> str:
    """Return the first line of a text that says something.

    >>> first_line("\\n  no\\nreally", "no reason")
    'no'
    """
    return next((line.strip() for line in text.splitlines() if line.strip()), otherwise)
