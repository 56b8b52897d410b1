"""Adam's step with a hand-written backward pass, for gradients through whole runs.

Autograd saves a tensor for each operation of the formula. This saves only what exists anyway (the gradient, and the
state before and after), and takes half the passes over memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad

Scalar = Any  # a number, or a tensor [] or [L, 1, ...]


def adam_step(
    tensors: Sequence[Tensor], w1: Scalar, b2: Scalar, w2: Scalar, c2: Scalar, a: Scalar, eps: Scalar
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute m' = m + w1 (g - m);  v' = b2 v + w2 g^2;  p' = p - a m' / (sqrt(v') / c2 + eps).

    The order of operations is the formula's, and so are the bits. If the gradient is itself differentiated, it is
    computed by the formula, operation by operation.

    Args:
        tensors: p, g, m, v, for which `applies` is true.

    >>> g, zero = torch.tensor([2.0], requires_grad=True), torch.zeros(1)
    >>> p, m, v = adam_step([torch.tensor([1.0]), g, zero, zero], w1=0.5, b2=0.5, w2=0.5, c2=1.0, a=0.1, eps=0.0)
    >>> p.item(), torch.autograd.grad((p + m + v).sum(), g)[0]  # m' / sqrt(v') does not depend on g here
    (0.9292893409729004, tensor([2.5000]))
    """
    updated: tuple[Tensor, Tensor, Tensor] = _AdamStep.apply(*tensors, w1, b2, w2, c2, a, eps)
    return updated


def adam_moments(g: Tensor, m: Tensor, v: Tensor, w1: Scalar, b2: Scalar, w2: Scalar) -> tuple[Tensor, Tensor]:
    """Return m' and v' of `adam_step`, operation by operation."""
    return m + w1 * (g - m), b2 * v + w2 * g * g


def adam_moved(p: Tensor, m: Tensor, v: Tensor, c2: Scalar, a: Scalar, eps: Scalar) -> Tensor:
    """Return p' of `adam_step`, given m' and v'."""
    return p - a * m / (root(v) / c2 + eps)


def root(v: Scalar) -> Scalar:
    """Take the square root, with derivative 0 at 0."""
    if not isinstance(v, Tensor):
        return v**0.5
    zero = v == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, v).sqrt())


class _AdamStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, p: Tensor, g: Tensor, m: Tensor, v: Tensor, *scalars: Scalar) -> tuple[Tensor, ...]:
        w1, b2, w2, c2, a, eps = scalars
        new_m = (g - m).mul_(w1).add_(m)
        new_v = (b2 * v).add_((w2 * g).mul_(g))
        new_p = p - (a * new_m).div_(new_v.sqrt().div_(c2).add_(eps))
        tensors = [x for x in scalars if isinstance(x, Tensor)]
        ctx.numbers = [None if isinstance(x, Tensor) else x for x in scalars]
        ctx.save_for_backward(p, g, m, v, new_m, new_v, *tensors)
        ctx.set_materialize_grads(False)
        return new_p, new_m, new_v

    @staticmethod
    def backward(ctx: Any, *by: Tensor | None) -> Any:
        p, g, m, v, new_m, new_v, *tensors = ctx.saved_tensors
        tensor_scalars = iter(tensors)
        scalars = [next(tensor_scalars) if x is None else x for x in ctx.numbers]
        if torch.is_grad_enabled():  # the backward pass will be differentiated, too
            return _by_the_formula([p, g, m, v, *scalars], ctx.needs_input_grad, by)
        return _slopes((g, m, v, new_m, new_v), scalars, ctx.needs_input_grad, by)


def applies(tensors: list[Tensor]) -> bool:
    """Whether `adam_step` supports these tensors: all of one shape, outside of forward mode and of `torch.func`."""
    plain = _functorch.peek_interpreter_stack() is None and forward_ad._current_level < 0
    return plain and torch.is_grad_enabled() and len({x.shape for x in tensors}) == 1


def _slopes(saved: tuple[Tensor, ...], scalars: list[Scalar], needed: Any, by: Any) -> tuple[Tensor | None, ...]:
    """Return the derivatives with respect to p, g, m, v and the scalars, given those with respect to p', m', v'."""
    g, m, v, new_m, new_v = saved
    w1, b2, w2, c2, a, eps = scalars
    by_p, by_m, by_v = (torch.zeros_like(g) if x is None else x for x in by)
    root_v = new_v.sqrt()
    denominator = (root_v / c2).add_(eps)
    over = by_p / denominator
    by_m = by_m - a * over
    by_denominator = (over * new_m).div_(denominator).mul_(a)
    # The root has derivative 0 at 0, as in the formula.
    by_v = by_v + (by_denominator / (2 * c2)).div_(root_v).masked_fill_(new_v == 0, 0)
    slopes: list[Tensor | None] = [
        by[0],
        (w1 * by_m).addcmul_(w2 * g, by_v, value=2) if needed[1] else None,
        by_m - w1 * by_m if needed[2] else None,
        b2 * by_v if needed[3] else None,
    ]
    of_scalars = (
        lambda: by_m * (g - m),
        lambda: by_v * v,
        lambda: by_v * g * g,
        lambda: by_denominator * root_v / (-c2 * c2),
        lambda: -over * new_m,
        lambda: by_denominator,
    )
    for x, is_needed, slope in zip(scalars, needed[4:], of_scalars):
        slopes.append(slope().sum_to_size(_wide(x, g)).view_as(x).to(x.dtype) if is_needed else None)
    return tuple(slopes)


def _wide(x: Tensor, like: Tensor) -> list[int]:
    """Return the shape of x, with leading ones up to the dimensions of `like`."""
    return [1] * (like.dim() - x.dim()) + list(x.shape)


@torch.enable_grad()
def _by_the_formula(inputs: list[Any], needed: Any, by: Any) -> tuple[Tensor | None, ...]:
    # Views, since one input may depend on another, as g does on p, which is not part of this step.
    inputs = [x.view_as(x) if isinstance(x, Tensor) else x for x in inputs]
    p, g, m, v, w1, b2, w2, c2, a, eps = inputs
    new_m, new_v = adam_moments(g, m, v, w1, b2, w2)
    after = adam_moved(p, new_m, new_v, c2, a, eps), new_m, new_v
    # In a first step perhaps only the learning rate requires grad: then the moments do not.
    outputs = [(out, x) for out, x in zip(after, by) if x is not None and out.requires_grad]
    if not outputs:
        return (None,) * len(inputs)
    variables = [x for x, is_needed in zip(inputs, needed) if is_needed]
    outs, grads = zip(*outputs)
    slopes = iter(torch.autograd.grad(outs, variables, grads, create_graph=True, allow_unused=True))
    return tuple(next(slopes) if is_needed else None for is_needed in needed)
