"""Operations that vmap runs badly, computed on all nodes at once.

The classes are torch function modes: while one is entered, all calls of torch's functions go through it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.overrides import TorchFunctionMode

from vecgym.core.devices import unwrapped

_is_batched = _functorch.is_batchedtensor


class Folding(TorchFunctionMode):
    """Under vmap: attention, cross-entropy and linear layers on the rows of all nodes, and embeddings whose
    `padding_idx` gets no gradient (vmap forgets it).
    """

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _FOLDED.get(func, func)(*args, **(kwargs or {}))


class TwiceDifferentiable(TorchFunctionMode):
    """For a gradient that is itself differentiated: embeddings as in `Folding`, and normalisations made of elementary
    operations. Under vmap, second derivatives of torch's own normalisations lose the terms through the mean and the
    variance; those of its weight norm are always wrong.
    """

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _ELEMENTARY.get(func, func)(*args, **(kwargs or {}))


# ------------------------------------------------------------------------------- inside and outside of vmap


class _Opened(NamedTuple):
    """The arguments of a function under vmap, as they are outside it."""

    level: int  # of the vmap
    size: int  # L
    tensors: list[Tensor | None]
    dims: list[int | None]  # where each has the node dimension; None: the same on every node

    def front(self, i: int) -> Tensor:
        """Return tensor i with the node dimension first, `[L, *]`."""
        x, dim = self.tensors[i], self.dims[i]
        assert x is not None
        if dim is None:
            return x.expand(self.size, *x.shape)
        return x.movedim(dim, 0) if dim else x

    def close(self, out: Tensor) -> Tensor:
        """Return `[L, *]` as a result inside vmap."""
        return _functorch._add_batch_dim(out, 0, self.level)


def _open(*values: Tensor | None) -> _Opened | None:
    """Unwrap tensors from vmap; None if none of them differs between the nodes.

    Of nested vmaps it is the innermost over which any of them differs.

    An `autograd.Function` with a rule for vmap does the same with torch's documented interface, but takes about 0.3 ms
    per call: as much as the arithmetic of a small model.
    """
    levels = [_functorch.maybe_get_level(x) if x is not None and _is_batched(x) else 0 for x in values]
    level = max(levels)
    if not level:
        return None
    tensors, size = list(values), 0
    dims: list[int | None] = [None] * len(values)
    for i, x in enumerate(values):
        if x is not None and levels[i] == level:
            tensors[i] = raw = _functorch.get_unwrapped(x)
            dims[i] = dim = _functorch.maybe_get_bdim(x)
            size = raw.shape[dim]
    return _Opened(level, size, tensors, dims)


def _check_tokens(tokens: Tensor, num_rows: int) -> None:
    """Raise an IndexError for a token that is out of range; on CUDA the device raises it, as for any embedding.

    vmap looks all nodes up in one table, in which such a token would find the row of another node.
    """
    try:
        torch._assert_async((tokens.clamp(0, num_rows - 1) == tokens).all())
    except RuntimeError:
        raise IndexError(f"index out of range: the embedding has {num_rows} rows") from None


def _embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
    if padding_idx is not None:
        row = torch.arange(weight.shape[0], device=weight.device) == padding_idx % weight.shape[0]
        weight = torch.where(row[:, None], weight.detach(), weight)
    if _is_batched(input):
        _check_tokens(unwrapped(input), weight.shape[0])
    return F.embedding(input, weight, None, *args, **kwargs)


# ------------------------------------------------------------------------------------------------ attention


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, **options: Any,
) -> Tensor:  # fmt: skip
    """Scaled dot-product attention has no weights, so the node dimension folds into the batch.

    Without this, vmap would run it node by node on CPU.
    """
    if query.dim() == key.dim() == value.dim() < 4:  # [T, D], or [heads, T, D]
        added = 4 - query.dim()
        q, k, v = (x[(None,) * added] for x in (query, key, value))
        return _attention(q, k, v, attn_mask, dropout_p, is_causal, **options)[(0,) * added]
    options.update(dropout_p=dropout_p, is_causal=is_causal)
    foldable = query.dim() == 4 and query.shape[0] == key.shape[0] == value.shape[0]  # [B, H, T, D]
    opened = _open(query, key, value, attn_mask) if foldable else None
    if opened is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, **options)
    n, mask = opened.size, opened.tensors[3]
    if mask is not None and opened.dims[3] is not None:
        mask = opened.front(3)
        shape = [1] * (5 - mask.dim()) + list(mask.shape[1:])  # a node's mask broadcasts to [B, H, T, S]
        mask = mask.reshape(n, *shape).expand(n, query.shape[0], *shape[1:]).flatten(0, 1)
    elif mask is not None and mask.dim() == 4 and mask.shape[0] > 1:
        mask = mask.repeat(n, 1, 1, 1)
    with temporarily_pop_interpreter_stack():
        q, k, v = (opened.front(i).flatten(0, 1) for i in range(3))
        out = _attention(q, k, v, mask, **options).unflatten(0, (n, -1))
    return opened.close(out)


# -------------------------------------------------------------------------------------------- cross-entropy


def _cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute the mean cross-entropy of logits `[N, C]` and classes `[N]` in one call over the rows of all nodes.

    vmap decomposes it, in Python.
    """
    is_plain = weight is None and size_average is None and reduce is None and label_smoothing == 0
    foldable = is_plain and reduction == "mean" and input.dim() == 2 and target.dim() == 1
    opened = _open(input, target) if foldable else None
    if opened is None:
        return F.cross_entropy(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    with temporarily_pop_interpreter_stack():
        logits, classes = opened.front(0), opened.front(1)  # [L, N, C], [L, N]
        rows = _of_rows(logits.flatten(0, 1), classes.flatten(), ignore_index)
        loss = rows.view(opened.size, -1).sum(1) / (classes != ignore_index).sum(1)
    return opened.close(loss)


def _of_rows(logits: Tensor, classes: Tensor, ignore_index: int) -> Tensor:
    """Compute the cross-entropy of each row, `[N]`, in one call even under an outer vmap."""
    opened = _open(logits, classes)
    if opened is None:
        return F.cross_entropy(logits, classes, ignore_index=ignore_index, reduction="none")
    logits, classes = opened.front(0), opened.front(1)
    rows = _of_rows(logits.flatten(0, 1), classes.flatten(), ignore_index)
    return opened.close(rows.view(opened.size, -1))


# --------------------------------------------------------------------------------------------------- linear


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a shared weight to the rows of all nodes at once, and each node's own weights by `_StackedLinear`."""
    # Under autocast the operation itself must see which precision to take.
    casting = weight.device.type != "meta" and torch.is_autocast_enabled(weight.device.type)
    foldable = weight.dim() == 2 and input.dtype == weight.dtype and not casting
    opened = _open(input, weight, bias) if foldable else None
    if opened is None or any(x is not None and _is_batched(x) for x in opened.tensors):
        return F.linear(input, weight, bias)
    with temporarily_pop_interpreter_stack():
        x = opened.front(0)
        if opened.dims[1] is None and opened.dims[2] is None:
            return opened.close(F.linear(x, weight, bias))
        own_bias = None if bias is None else opened.front(2)
        out = _StackedLinear.apply(x.reshape(opened.size, -1, x.shape[-1]), opened.front(1), own_bias)
        return opened.close(out.view(*x.shape[:-1], -1))


class _StackedLinear(torch.autograd.Function):
    """`[L, N, in]` x `[L, out, in]` -> `[L, N, out]`; the weight's gradient comes out contiguous.

    vmap's gradient of the weight is a transposed view, which the optimizer would have to copy into the weight's
    layout: a pass over memory that costs as much as AdamW itself.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        if x.device.type == "cpu" and 16 <= x.shape[1] <= 64 and x.shape[2] >= 512:
            # For few rows and long sums the CPU's kernel is two to three times faster the other way around.
            out = torch.bmm(weight, x.mT) if bias is None else torch.baddbmm(bias[:, :, None], weight, x.mT)
            return out.mT.contiguous()
        return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias[:, None], x, weight.mT)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        return (
            torch.bmm(grad, weight) if for_x else None,
            torch.bmm(grad.mT, x) if for_weight else None,
            grad.sum(1) if for_bias else None,
        )


# -------------------------------------------------------------------------------------------- normalisations


def _layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    dims = tuple(range(-len(normalized_shape), 0))
    return _affine(_normalised(input, dims, eps), weight, bias)


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    groups = input.unflatten(1, (num_groups, -1))  # [B, G, C / G, ...]
    dims = tuple(range(2, groups.dim()))
    return _affine(_normalised(groups, dims, eps).flatten(1, 2), *_by_channel(input, weight, bias))


def _batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    dims = (0, *range(2, input.dim()))
    normalised = _tracked(input, dims, (running_mean, running_var), training, momentum, eps)
    return _affine(normalised, *_by_channel(input, weight, bias))


def _instance_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    dims = tuple(range(2, input.dim()))
    normalised = _tracked(input, dims, (running_mean, running_var), use_input_stats, momentum, eps)
    return _affine(normalised, *_by_channel(input, weight, bias))


def _tracked(
    x: Tensor, dims: tuple[int, ...], running: tuple[Tensor | None, Tensor | None], by_batch: bool, momentum: float,
    eps: float,
) -> Tensor:  # fmt: skip
    """Normalise by the batch's statistics and track them, or by the tracked ones, `running`."""
    running_mean, running_var = running
    if not by_batch:
        mean, var = _by_channel(x, running_mean, running_var)
        assert mean is not None
        assert var is not None
        return (x - mean) * (var + eps).rsqrt()
    if running_mean is not None and running_var is not None:
        # The unbiased variance, as torch tracks it; unlike torch's, these statistics can be differentiated.
        for tracked, now in ((running_mean, x.mean(dims)), (running_var, x.var(dims))):
            tracked.mul_(1 - momentum).add_(momentum * (now.mean(0) if now.dim() > 1 else now))  # [B, C], or [C]
    return _normalised(x, dims, eps)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Return `g v / |v|`, the norm over all dimensions but `dim`, as `torch._weight_norm`; -1: over all."""
    over = [i for i in range(v.dim()) if dim == -1 or i != dim % v.dim()]
    return v * (g / v.square().sum(over, keepdim=True).sqrt())


def _normalised(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    centred = x - x.mean(dims, keepdim=True)
    return centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()


def _by_channel(input: Tensor, *values: Tensor | None) -> list[Tensor | None]:
    """Shape `[C]` to multiply `[B, C, ...]`."""
    return [None if x is None else x.view(-1, *[1] * (input.dim() - 2)) for x in values]


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


_FOLDED: dict[Callable, Callable] = {
    F.scaled_dot_product_attention: _attention,
    F.cross_entropy: _cross_entropy,
    F.linear: _linear,
    F.embedding: _embedding,
}
_ELEMENTARY: dict[Callable, Callable] = {
    F.embedding: _embedding,
    F.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
    F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
    torch._weight_norm: _weight_norm,
}
