"""The backend `vmap`: all nodes of a part in one vectorised call. The only module that enters a vmap.

Operations that vmap runs badly are computed on all nodes at once, by function modes of torch: while one is entered, all
calls of torch's functions go through it.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _functorch
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch._functorch.vmap import lazy_load_decompositions
from torch.func import grad_and_value
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from vecgym.core import tree
from vecgym.core.nodes import expand
from vecgym.core.tree import Tree
from vecgym.engine.backend import Local, NodeSlice, apart, dense, settle
from vecgym.engine.stateless import (
    NORMALISATIONS,
    StatelessModel,
    TwiceDifferentiable,
    embedding,
    gradients_within_modes,
)

_load_decompositions = functools.cache(lazy_load_decompositions)  # vmap's decompositions of some operations


class Vmap:
    """All nodes at once. Their random numbers differ, and depend on which nodes are in the call."""

    def __init__(self, model: StatelessModel) -> None:
        self.model = model

    def gradients(self, part: NodeSlice, out: Callable[[], Tree], thread: int = 0) -> Local:
        with self.model.seeded(*part.keys.of(0)):
            grads, losses = self._computed(part, 0, thread)
        grads, missing = dense(grads, part.params, part.size)
        return Local(grads, losses, part.buffers, missing)

    def mean_gradients(self, part: NodeSlice, num_nodes: int) -> Iterator[tuple[Tree, Tensor]]:
        """Yield one piece, for parameters stored once: it costs as much as one model on all batches."""
        with self.model.seeded(*part.keys.of(0)):
            piece = self._computed(part, num_nodes)
        yield piece

    def _computed(self, part: NodeSlice, num_nodes: int, thread: int = 0) -> tuple[Tree, Tensor]:
        """Return the gradients, except of parameters without one, and the losses `[n]`; write the buffers.

        Args:
            num_nodes: of the mean loss whose gradient `[*]` is computed; 0: compute that of each node, `[n, *]`.
        """
        changed, shared = self.model.split(part.buffers)
        params = {name: p[0] for name, p in part.params.items()} if num_nodes else expand(part.params, part.size)
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        own_leaves, shared_leaves = ({}, leaves) if num_nodes else (leaves, {})
        grads: Tree = {}

        def backward(losses: Tensor) -> None:
            total = losses.sum() / num_nodes if num_nodes > 1 else losses.sum()
            slopes = gradients_within_modes(total, list(leaves.values()))
            grads.update({name: g for name, g in zip(leaves, slopes) if g is not None})

        def backward_within(loss: Tensor) -> None:
            level = _functorch.peek_interpreter_stack().level()
            with self.model.not_casting():
                backward(_functorch._remove_batch_dim(loss, level, part.size, 0))

        def loss_of_one(params: Tree, buffers: Tree, batch: Any) -> tuple[Tensor, Tree]:
            within = backward_within if self.model.recomputes else None
            return self.model.loss(params, buffers, {**shared, **shared_leaves}, batch, thread, within)

        with Folding(), self.model.casting():
            losses, after = on_all(loss_of_one, part.size, own_leaves, changed, part.batch)
        settle(changed, after)
        if not self.model.recomputes:
            backward(losses)
        return dict(zip(grads, apart(list(grads.values())))), losses.detach()

    def pure(self, part: NodeSlice) -> Local:
        changed, shared = self.model.split(part.buffers)
        own = {name: b.clone() for name, b in changed.items()}
        used: set[str] = set()

        def of_one(params: Tree, buffers: Tree, batch: Any) -> tuple[Tree, tuple[Tensor, Tree]]:
            return grad_and_value(self.model.noted_loss, has_aux=True)(params, buffers, shared, batch, used)

        with self.model.seeded(*part.keys.of(0)), TwiceDifferentiable(), self.model.casting():
            grads, (losses, after) = on_all(of_one, part.size, part.params, own, part.batch)
        _, missing = dense({name: g for name, g in grads.items() if name in used}, part.params, part.size)
        return Local(grads, losses, {**part.buffers, **after}, missing)

    def measures(self, tensors: Tree, batch: Any, own_batches: bool, size: int, several: bool) -> Tree:
        own = {name: x for name, x in tensors.items() if x.shape[0] == size > 1}
        shared = {name: x[0] for name, x in tensors.items() if name not in own}

        def of_one(own: Tree, batches: tuple[Any, ...]) -> Tree:
            examples = batches[0] if own_batches else batch
            measure = functools.partial(self.model.measure, {**shared, **own})
            return on_all(measure, len(tree.leaves(examples)[0]), examples) if several else measure(examples)

        batches = (batch,) if own_batches else ()
        with Folding(), self.model.casting():
            if size > 1:
                return on_all(of_one, size, own, batches)
            return tree.map(lambda x: x[None], of_one({}, tree.map_leaves(lambda x: x[0], batches)))


def on_all(fn: Callable[..., Any], size: int, *trees: Any) -> Any:
    """Call `fn` once for all nodes: `torch.func.vmap(fn, randomness="different")(*trees)`, with less overhead.

    torch's own inspects arguments and results so thoroughly that this takes as long as a small model.

    Args:
        fn: (the tensors of one node, in trees like these) -> tensors, in dicts and tuples.
        trees: of tensors `[size, *]`.

    >>> on_all(lambda x: {"sum": x["a"].sum()}, 2, {"a": torch.tensor([[1, 2], [3, 4]])})
    {'sum': tensor([3, 7])}
    """
    _load_decompositions()
    level = _functorch._vmap_increment_nesting(size, "different")
    try:
        inside = [tree.map_leaves(lambda x: _functorch._add_batch_dim(x, 0, level), values) for values in trees]
        return tree.map_leaves(lambda x: _functorch._remove_batch_dim(x, level, size, 0), fn(*inside))
    finally:
        _functorch._vmap_decrement_nesting()


# ------------------------------------------------------------------------------------- operations that vmap runs badly


class Folding(TorchFunctionMode):
    """Under vmap: attention, cross-entropy and linear layers on the rows of all nodes; embeddings whose `padding_idx`
    gets no gradient (vmap forgets it); normalisations that `torch.func.grad` may differentiate; the precision of
    autocast; and the properties of tensors outside of vmap.
    """

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = _FOLDED.get(func, func)
        if torch._C._is_any_autocast_enabled():
            return _autocast(func, call, args, kwargs or {})
        return call(*args, **(kwargs or {}))


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
    """Unwrap tensors from vmap; None if none of them differs between the nodes, or one is being differentiated within.

    Of nested vmaps it is the innermost over which any of them differs.

    An `autograd.Function` with a rule for vmap does the same with torch's documented interface, but takes about 0.3 ms
    per call: as much as the arithmetic of a small model.
    """
    levels = [_functorch.maybe_get_level(x) if x is not None and _functorch.is_batchedtensor(x) else 0 for x in values]
    level = max(levels)
    if not level or any(map(_functorch.is_gradtrackingtensor, [x for x in values if x is not None])):  # torch.func.grad
        return None
    tensors, size = list(values), 0
    dims: list[int | None] = [None] * len(values)
    for i, x in enumerate(values):
        if x is not None and levels[i] == level:
            tensors[i] = raw = _functorch.get_unwrapped(x)
            dims[i] = dim = _functorch.maybe_get_bdim(x)
            size = raw.shape[dim]
    return _Opened(level, size, tensors, dims)


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


# ------------------------------------------------------------------------------------------------ layer norm


def _layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Normalise, then apply each node's weight, as vmap does: with a weight of 1, for which torch's kernel is faster.

    The CPU's kernel without a weight is not vectorised; the bits are the same.
    """
    alike = weight is not None and weight.dtype == input.dtype in (torch.float32, torch.float64)
    if weight is None or not alike or not _functorch.is_batchedtensor(weight) or input.device.type != "cpu":
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
    one = torch.ones(weight.shape, dtype=input.dtype)
    out = F.layer_norm(input, normalized_shape, one, None, eps) * weight
    return out if bias is None else out + bias


# --------------------------------------------------------------------------------------------------- linear


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a shared weight to the rows of all nodes at once, and each node's own weights by `_StackedLinear`."""
    foldable = weight.dim() == 2 and input.dtype == weight.dtype
    opened = _open(input, weight, bias) if foldable else None
    if opened is None or any(map(_functorch.is_functorch_wrapped_tensor, [x for x in opened.tensors if x is not None])):
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


# ------------------------------------------------------------------------------------------ inside of other modes


def _within_grad(func: Callable, elementary: Callable) -> Callable:
    """Return a function that calls `elementary` within the forward's own `torch.func.grad`; see `TwiceDifferentiable`.

    Not within forward mode, of whose result torch has wrong gradients without vmap, too: they are the same here.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        within = {level.key() for level in _functorch.get_interpreter_stack() or ()}
        derived = TransformType.Grad in within and TransformType.Jvp not in within
        return (elementary if derived else func)(*args, **kwargs)

    return call


def _outside(getter: Callable) -> Callable:
    """Return a getter of a property that a tensor has outside of vmap: within, all seem to be leaves without gradients.

    It serves the model's code. The code of torch, such as activation checkpointing, expects the tensors within.
    """

    def get(x: Tensor, *args: Any) -> Any:
        asking: Any = sys._getframe(1)
        while asking.f_globals is globals():
            asking = asking.f_back
        while not asking.f_globals.get("__name__", "").startswith("torch.") and _functorch.is_batchedtensor(x):
            x = _functorch.get_unwrapped(x)
        return getter(x, *args)

    return get


def _autocast(func: Callable, call: Callable, args: Any, kwargs: Any) -> Any:
    """Call a function in the precision that autocast gives it outside of vmap.

    vmap is the first to see an operation, and may take it apart (a product, then a bias in float32) before autocast
    sees the parts.
    """
    if func is F.multi_head_attention_forward:
        with Folding():
            return _written_in_python(*args, **kwargs)
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    device = given[0].device.type if given else ""
    known = device not in ("", "meta") and torch.is_autocast_enabled(device)
    policy = _policy(func, device) if known else ""
    if not policy:
        return call(*args, **kwargs)
    to = {"low": torch.get_autocast_dtype(device), "as given": None}.get(policy, torch.float32)

    def cast(x: Tensor) -> Tensor:
        eligible = x.is_floating_point() and x.dtype != torch.float64 and x.device.type == device
        return x.to(to) if to is not None and eligible else x

    args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
    with torch._C._DisableAutocast():
        out = call(*args, **kwargs)
    return out.to(given[0].dtype) if policy == "inside" else out


# torch.nn.functional calls it without function modes; this is the same function, whose own calls go through them.
_written_in_python = types.FunctionType(
    F.multi_head_attention_forward.__code__, {**vars(F), "has_torch_function": lambda given: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)  # fmt: skip


@functools.cache
def _policy(func: Callable, device: str) -> str:
    """Return autocast's policy for a function: "low" precision, "full", "as given", or "inside"; "" if there is none.

    A function that is in full precision "inside" returns the type of its input.

    >>> _policy(F.linear, "cpu"), _policy(F.l1_loss, "cpu"), _policy(torch.mv, "cpu"), _policy(torch.add, "cpu")
    ('low', 'full', 'as given', '')
    """
    name = getattr(func, "__name__", "")
    name = name[2:-2] if name.startswith("__") else name
    name = {"rmatmul": "matmul", "cross_entropy": "cross_entropy_loss", "grid_sample": "grid_sampler"}.get(name, name)
    known = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{device.upper()}")
    if name in OF_ANY_TYPE or name not in {operation.split("::")[1].split(".")[0] for operation in known}:
        return WITHOUT_A_RULE.get(name, "")
    return "low" if name in IN_LOW_PRECISION or name.startswith("conv") else "full"


# The operations of autocast in low precision (all others are in float32), and the ones that it leaves in the widest
# type of their arguments, or refuses.
IN_LOW_PRECISION = {
    "linear", "matmul", "mm", "mv", "bmm", "addmm", "addmv", "addr", "addbmm", "baddbmm", "chain_matmul", "einsum",
    "linalg_multi_dot", "linalg_vecdot", "prelu", "scaled_dot_product_attention", "gru_cell", "lstm_cell",
    "rnn_tanh_cell", "rnn_relu_cell",
}  # fmt: skip
OF_ANY_TYPE = {
    "cat", "stack", "index_copy", "index_put", "scatter_add", "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot",
    "vdot", "tensordot", "binary_cross_entropy",
}  # fmt: skip
# Operations unknown to autocast that vmap takes apart, into products, or so that weights of another type widen results.
WITHOUT_A_RULE = {
    **dict.fromkeys(["mv", "dot", "vdot"], "as given"),
    **dict.fromkeys(["batch_norm", "instance_norm", "layer_norm", "group_norm"], "inside"),
}


_GETTERS = [getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "grad_fn")]
_FOLDED: dict[Callable, Callable] = {
    **{getter: _outside(getter) for getter in _GETTERS},
    F.scaled_dot_product_attention: _attention,
    F.cross_entropy: _cross_entropy,
    F.linear: _linear,
    F.embedding: embedding,
    **{func: _within_grad(func, elementary) for func, elementary in NORMALISATIONS.items()},
    F.layer_norm: _within_grad(_layer_norm, NORMALISATIONS[F.layer_norm]),
}
