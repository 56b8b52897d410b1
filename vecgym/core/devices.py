"""Copies between host and device, and values inside the transforms of `torch.func`.

A device runs asynchronously, and nothing in a step may wait for it.

Reading a value on the host (`.item()`, `if x.any()`, `.cpu()`) waits until the device has finished all earlier work,
and so does a copy to the device that is not `non_blocking`. The few places of a run that must read values call
`fetched`, once for many steps.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.overrides import TorchFunctionMode

from vecgym.core import tree

T = TypeVar("T")


def environment() -> dict[str, str]:
    """Return the environment of a run: versions, and the devices that are present.

    >>> list(environment())
    ['vecgym', 'python', 'torch', 'devices']
    """
    devices = [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
    devices += ["mps"] * torch.backends.mps.is_available() + [f"cpu ({os.cpu_count()} logical cores)"]
    return {
        "vecgym": sys.modules["vecgym"].__version__,  # which is above this floor
        "python": f"{platform.python_version()} on {platform.platform()}",
        "torch": str(torch.__version__),
        "devices": ", ".join(devices),
    }


def on_host(x: Tensor) -> bool:
    """Whether a value can be read without waiting, because it is in the host's memory.

    >>> on_host(torch.ones(2)), on_host(torch.ones(2, device="meta"))
    (True, False)
    """
    return x.is_cpu


def placed(x: Tensor, device: torch.device | str | None, dtype: torch.dtype | None = None) -> Tensor:
    """Return `x` on a device; a copy from the host does not wait for the device.

    >>> placed(torch.ones(2), "meta", torch.float64)
    tensor(..., device='meta', size=(2,), dtype=torch.float64)
    """
    device = x.device if device is None else torch.device(device)
    # CUDA copies pageable memory to a buffer before the call returns; MPS would read it later.
    return x.to(device, x.dtype if dtype is None else dtype, non_blocking=x.is_cpu and device.type != "mps")


def spread(value: Any, like: Tensor) -> Any:
    """Shape numbers of configurations and nodes, `[C]`, `[K]` or `[C, K]`, to multiply a tensor of theirs.

    >>> spread(torch.tensor([0.1, 0.2]), torch.ones(2, 4, 3)).shape, spread(0.1, torch.ones(4, 3))
    (torch.Size([2, 1, 1]), 0.1)
    """
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    return placed(value, like.device, like.dtype).reshape(*value.shape, *[1] * (like.dim() - value.dim()))


def fetched(values: Any) -> Any:
    """Return nested values with all tensors on the host. This waits for the device, once for all of them.

    >>> fetched({"loss": torch.ones(2)})
    {'loss': tensor([1., 1.])}
    """
    return tree.map_leaves(lambda x: x if on_host(x) else x.to("cpu"), values)


def placed_as(values: Any, template: Any, device: torch.device) -> Any:
    """Copy tensors from a file to the devices of a run; `template` is its initial state, which may hold fewer.

    >>> placed_as({"step": torch.tensor([3])}, {}, torch.device("cpu"))
    {'step': tensor([3])}
    """

    def place(x: Tensor, like: Any) -> Tensor:
        return x.to(like.device if isinstance(like, Tensor) else device, copy=True)

    return tree.map_leaves(place, values, template)


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
            return outside(lambda: func(unwrapped(args[0]), *args[1:], **(kwargs or {})))
        return func(*args, **(kwargs or {}))


def plain(x: Tensor) -> Tensor:
    """Return the plain values, without a transform's wrapper or a graph."""
    return unwrapped(x).detach()


def outside(fn: Callable[[], T]) -> T:
    """Call `fn` outside of all transforms."""
    if _functorch.peek_interpreter_stack() is None:
        return fn()
    with temporarily_pop_interpreter_stack():
        return outside(fn)


def unwrapped(x: Tensor) -> Tensor:
    """Return the tensor inside the wrappers of all transforms."""
    while _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return x
