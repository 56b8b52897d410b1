"""Read the values inside the transforms of `torch.func`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.overrides import TorchFunctionMode

T = TypeVar("T")


def readable() -> contextlib.AbstractContextManager:
    """Allow tensors to be converted to lists and arrays within a block, even inside a transform of `torch.func`.

    Outside of a transform that is always allowed, and the mode would cost a microsecond per call of torch.
    """
    inside = _functorch.peek_interpreter_stack() is not None
    return Readable() if inside else contextlib.nullcontext()


class Readable(TorchFunctionMode):
    """Convert tensors to lists and arrays of their plain values."""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy):
            return outside(lambda: func(_unwrapped(args[0]), *args[1:], **(kwargs or {})))
        return func(*args, **(kwargs or {}))


def plain(x: Tensor) -> Tensor:
    """Return the plain values, without a transform's wrapper or a graph."""
    return _unwrapped(x).detach()


def outside(fn: Callable[[], T]) -> T:
    """Call `fn` outside of all transforms."""
    if _functorch.peek_interpreter_stack() is None:
        return fn()
    with temporarily_pop_interpreter_stack():
        return outside(fn)


def _unwrapped(x: Tensor) -> Tensor:
    while _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return x
