"""Operations that vmap runs badly, done on the whole stack; and a look at which operations a model uses.

`Folding`, `TwiceDifferentiable` and `Observer` are torch function modes: while one is entered, the model's calls go
through it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

# From this size on, a linear layer's weight has its gradient computed in the weight's own layout, see `_Linear`.
# Measured: AdamW and gradient together take 24 % less time for 784 x 128 on 64 nodes, as much for 64 x 192 on 16,
# and 9 % more for 16 x 32 on 512.
LARGE_WEIGHT = 32768


class Folding(TorchFunctionMode):
    """Under vmap: attention with the node dimension folded into the batch, large linear layers by `bmm`, and
    embeddings whose `padding_idx` gets no gradient (vmap forgets it).
    """

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _FOLDED.get(func, func)(*args, **(kwargs or {}))


class TwiceDifferentiable(TorchFunctionMode):
    """Under vmap of a gradient that is itself differentiated: embeddings as in `Folding`, and normalisations made of
    elementary operations, since the second derivatives of torch's own lose, under vmap, what goes through the mean
    and the variance.
    """

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _ELEMENTARY.get(func, func)(*args, **(kwargs or {}))


class Observer(TorchFunctionMode):
    """Counts the arithmetic of matrix products and convolutions, and notes whether `Folding` would help.

    Attributes:
        flop: floating-point operations of the calls seen.
        folds: whether there was one that `Folding` does better.
        unsafe: what vmap would do wrong without a word; empty if nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flop = 0
        self.folds = False
        self.unsafe = ""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            self.folds = True
            query, key = args[:2] if len(args) > 1 else (kwargs["query"], kwargs["key"])
            self.flop += 4 * query.numel() * key.shape[-2]
        elif func is F.embedding:
            bound = _EMBEDDING.bind(*args, **(kwargs or {})).arguments
            self.folds |= bound.get("padding_idx") is not None
            for option in ("max_norm", "scale_grad_by_freq"):
                if bound.get(option):
                    self.unsafe = f"its gradient of an embedding with {option} would be wrong"
        elif isinstance(out, Tensor) and func in _PRODUCTS:
            self.flop += _PRODUCTS[func](out, [x for x in args if isinstance(x, Tensor)])
            self.folds |= func is F.linear and args[1].numel() >= LARGE_WEIGHT
        return out


def _contraction(out: Tensor, given: list[Tensor]) -> int:
    """2 M N K of a product [M, K] x [K, N] -> [M, N], from the numbers of elements."""
    if len(given) < 2 or out.numel() == 0:
        return 0
    a, b = given[-2:]
    return round(2 * math.sqrt(out.numel() * a.numel() * b.numel()))


def _weighted(out: Tensor, given: list[Tensor]) -> int:
    """Each output value is a product with one row of the weight `[out, ...]`."""
    return 2 * out.numel() * given[1][0].numel() if len(given) > 1 and given[1].dim() > 0 else 0


_PRODUCTS: dict[Callable, Callable[[Tensor, list[Tensor]], int]] = {
    **dict.fromkeys([F.linear, F.conv1d, F.conv2d, F.conv3d], _weighted),
    **dict.fromkeys([torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum], _contraction),
    **dict.fromkeys([Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__], _contraction),
    **dict.fromkeys([F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d], _contraction),
}


_EMBEDDING = inspect.signature(F.embedding)


def _embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
    if padding_idx is not None:
        row = torch.arange(weight.shape[0], device=weight.device) == padding_idx % weight.shape[0]
        weight = torch.where(row[:, None], weight.detach(), weight)
    return F.embedding(input, weight, None, *args, **kwargs)


# ------------------------------------------------------------------------------------------------ attention


class _Attention(torch.autograd.Function):
    """Scaled dot-product attention has no weights, so the node dimension folds into the batch.

    Without this, vmap would run it node by node on CPU. What `vmap` calls is differentiated as usual; `backward`
    is for a call none of whose tensors differs between the nodes.
    """

    generate_vmap_rule = False

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, **options)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.options = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.options["dropout_p"] > 0:
            raise RuntimeError("attention with dropout on inputs that are the same on every node")
        *tensors, mask = ctx.saved_tensors
        with torch.enable_grad():
            leaves = q, k, v = [x.detach().requires_grad_() for x in tensors]
            out = F.scaled_dot_product_attention(q, k, v, mask, **ctx.options)
        return *torch.autograd.grad(out, leaves, grad), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict) -> Any:
        n = info.batch_size
        q, k, v = (_fold(x, dim, n) for x, dim in zip((q, k, v), in_dims))
        if mask is not None and in_dims[3] is not None:
            mask = mask.movedim(in_dims[3], 0)
            size = q.shape[0] // n
            shape = [1] * (5 - mask.dim()) + list(mask.shape[1:])  # a node's mask broadcasts to [B, H, T, S]
            mask = mask.reshape(n, *shape).expand(n, size, *shape[1:]).flatten(0, 1)
        elif mask is not None and mask.dim() == 4 and mask.shape[0] > 1:
            mask = mask.repeat(n, 1, 1, 1)
        out = F.scaled_dot_product_attention(q, k, v, mask, **options)
        return out.unflatten(0, (n, -1)), 0


def _fold(x: Tensor, dim: int | None, n: int) -> Tensor:
    return (x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    options.update(dropout_p=dropout_p, is_causal=is_causal)
    if query.dim() == 4 and query.shape[0] == key.shape[0] == value.shape[0]:  # [B, H, T, D]
        return _Attention.apply(query, key, value, attn_mask, options)
    return F.scaled_dot_product_attention(query, key, value, attn_mask, **options)


# --------------------------------------------------------------------------------------------------- linear


class _Linear(torch.autograd.Function):
    """A linear layer with a weight of each node's own.

    vmap's gradient of the weight is a transposed view, which the optimizer would have to copy into the weight's
    layout: a pass over memory that costs as much as AdamW itself. `backward` is for a call none of whose tensors
    differs between the nodes.
    """

    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        return grad @ weight, rows.mT @ x.reshape(-1, x.shape[-1]), rows.sum(0)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        n = info.batch_size
        if in_dims[1] is None and in_dims[2] is None:  # the same weight for all
            return F.linear(x.movedim(in_dims[0], 0), weight, bias), 0
        x, weight = _front(x, in_dims[0], n), _front(weight, in_dims[1], n)
        bias = None if bias is None else _front(bias, in_dims[2], n)
        out = _StackedLinear.apply(x.reshape(n, -1, x.shape[-1]), weight, bias)
        return out.view(*x.shape[:-1], -1), 0


class _StackedLinear(torch.autograd.Function):
    """`[L, N, in]` x `[L, out, in]` -> `[L, N, out]`; the weight's gradient comes out contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
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


def _front(x: Tensor, dim: int | None, n: int) -> Tensor:
    return x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # Under autocast the operation itself must see which precision to take.
    if weight.numel() < LARGE_WEIGHT or weight.dim() != 2 or input.dtype != weight.dtype or _autocasting(weight):
        return F.linear(input, weight, bias)
    return _Linear.apply(input, weight, bias)


def _autocasting(x: Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type)


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
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    weight, bias = _by_channel(input, weight, bias)
    if not training:
        mean, var = _by_channel(input, running_mean, running_var)
        assert mean is not None
        assert var is not None
        return _affine((input - mean) * (var + eps).rsqrt(), weight, bias)
    dims = (0, *range(2, input.dim()))
    if running_mean is not None and running_var is not None:
        # The unbiased variance, as torch tracks it; unlike torch's, these statistics can be differentiated.
        running_mean.mul_(1 - momentum).add_(momentum * input.mean(dims))
        running_var.mul_(1 - momentum).add_(momentum * input.var(dims))
    return _affine(_normalised(input, dims, eps), weight, bias)


def _normalised(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    centred = x - x.mean(dims, keepdim=True)
    return centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()


def _by_channel(input: Tensor, *values: Tensor | None) -> list[Tensor | None]:
    """`[C]` to multiply `[B, C, ...]`."""
    return [None if x is None else x.view(-1, *[1] * (input.dim() - 2)) for x in values]


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


_FOLDED: dict[Callable, Callable] = {
    F.scaled_dot_product_attention: _attention,
    F.linear: _linear,
    F.embedding: _embedding,
}
_ELEMENTARY: dict[Callable, Callable] = {
    F.embedding: _embedding,
    F.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
    F.batch_norm: _batch_norm,
}
