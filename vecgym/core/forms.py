"""Operations on tensors of the device "meta", which have a form and no values, without torch's kernels for them.

Those are in Python: each takes a tenth of a millisecond or more, and the first imports torch's compiler, which takes
more than a second.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# Operations whose result has the form of their first argument.
LIKE = {getattr(aten, name).default for name in ("zeros_like", "ones_like", "empty_like", "clone", "index_copy")}
# Reductions, and the place of their dimensions among the arguments.
REDUCTIONS = {aten.sum.dim_IntList: 1, aten.mean.dim: 1, aten.amax.default: 1, aten.linalg_vector_norm.default: 2}


class Forms(TorchDispatchMode):
    """Compute the form of elementwise operations and of sums: the dtype by the operation itself, on a single number.

    Other operations are torch's.

    >>> x = torch.empty(4, 1, dtype=torch.bfloat16, device="meta")
    >>> with Forms():
    ...     y = (x + torch.empty(3, device="meta")).sum(0, keepdim=True)
    >>> y.shape, y.dtype
    (torch.Size([1, 3]), torch.float32)
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # with True, torch imports its compiler here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        form = _form(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if form is None else form


def _form(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operation; None: let torch say."""
    found = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    whole = func.overloadpacket is aten.arange and all(isinstance(x, int) for x in args)
    if whole and "meta" in str(kwargs.get("device")):
        return _empty([len(range(*args))], kwargs.get("dtype") or torch.int64)
    if not any(x.is_meta for x in found):
        return None
    if func in LIKE:
        return _empty(args[0].shape, kwargs.get("dtype") or args[0].dtype)
    if func in REDUCTIONS and len(args) > REDUCTIONS[func] and args[REDUCTIONS[func]]:
        x, dims = args[0], {dim % args[0].dim() for dim in args[REDUCTIONS[func]]}
        out, sizes = func(_number(x), *args[1:], **kwargs), enumerate(x.shape)
        return _empty([1 if i in dims else n for i, n in sizes if out.dim() == x.dim() or i not in dims], out.dtype)
    inplace = func._schema.is_mutable
    if torch.Tag.pointwise not in func.tags and not (inplace and len(found) == 1):
        return None
    shape = np.broadcast_shapes(*(x.shape for x in found))
    if inplace:  # neither of another shape, nor into `out=`
        same = func._schema.name.endswith("_") and torch.Tag.inplace_view not in func.tags and shape == args[0].shape
        return args[0] if same else None
    out = func(*map(_number, args), **{name: _number(x) for name, x in kwargs.items()})
    return tuple(_empty(shape, x.dtype) for x in out) if isinstance(out, tuple) else _empty(shape, out.dtype)


def _empty(shape: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _number(x: Any) -> Any:
    """Return a tensor of one number, with the dtype of x and as many dimensions: both decide on the result's dtype."""
    return torch.ones([1] * x.dim(), dtype=x.dtype) if isinstance(x, Tensor) else x
