"""Gradient clipping, per node."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from vecgym.core import check
from vecgym.core.tree import Tree, per_node
from vecgym.optim.by_hand import root


def check_max_norm(max_norm: float | Tensor) -> float | Tensor:
    """Return `max_norm`, or raise a ValueError unless it is positive (`[L]`: on every node).

    >>> check_max_norm(1.0)
    1.0
    """
    what = "the largest norm of a node's gradient, such as 1.0; None, if allowed, does not clip"
    return check.per_node("max_norm", max_norm, "(0, inf]", what)


def clip_grad_norm(grads: Tree, max_norm: float | Tensor, inplace: bool = True) -> tuple[Tree, Tensor]:
    """Scale each node's gradient to a norm of at most `max_norm`: g <- g min(1, max_norm / (||g|| + 1e-6)).

    `grads`: `[1 or L, *shape]` per name, with ||g|| the 2-norm over a node's whole tree; `max_norm`: a number,
    `[]` or `[L]`. Returns the gradients, and the norms before clipping, `[1 or L]`. `inplace=True` may overwrite
    `grads`; `inplace=False` is pure and differentiable, with derivative 0 of the norm at 0.

    Errors: ValueError unless `max_norm` > 0.

    >>> clip_grad_norm({"w": torch.tensor([[3.0, 4.0], [0.3, 0.4]])}, max_norm=1.0)
    ({'w': tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])}, tensor([5.0000, 0.5000]))

    Pascanu et al., arXiv 1211.5063; as `torch.nn.utils.clip_grad_norm_` on each node.
    """
    check_max_norm(max_norm)
    check.flag("inplace", inplace)
    flat = [g.reshape(len(g), math.prod(g.shape[1:])) for g in grads.values()]
    if not flat:
        return grads, torch.zeros(1)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inplace):
        if inplace:  # one pass, no copy of the gradient's size
            parts = torch.broadcast_tensors(*[torch.linalg.vector_norm(g, dim=1) for g in flat])
            norms = torch.linalg.vector_norm(torch.stack(parts), dim=0)
        else:
            norms = root(functools.reduce(torch.add, [(g * g).sum(dim=1) for g in flat]))
        if len(norms) > 1:
            check.per_node("max_norm", max_norm, num_nodes=len(norms))
        factor = (max_norm / (norms + 1e-6)).clamp(max=1.0)
        return {name: _scaled(g, factor, inplace) for name, g in grads.items()}, norms


def _scaled(g: Tensor, factor: Tensor, inplace: bool) -> Tensor:
    factor = factor.to(g.dtype)
    fits = inplace and g.is_contiguous() and factor.shape[0] in (1, g.shape[0])
    return g.mul_(per_node(factor, g)) if fits else g * per_node(factor, g)
