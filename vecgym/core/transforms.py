"""Look through the transforms of `torch.func` at the values inside."""

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
    """Allow lists and arrays to be made of tensors within a block that may be inside a transform of `torch.func`.

    Outside of one that is allowed anyway, and the mode would cost a microsecond at every call of torch.
    """
    inside = _functorch.peek_interpreter_stack() is not None
    return Readable() if inside else contextlib.nullcontext()


class Readable(TorchFunctionMode):
    """Make lists and arrays of the plain values of tensors."""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy):
            return outside(lambda: func(_unwrapped(args[0]), *args[1:], **(kwargs or {})))
        return func(*args, **(kwargs or {}))


def plain(x: Tensor) -> Tensor:
    """Return the bare values, without a transform's wrapper or a graph."""
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
