"""Copies between host and device. A device runs asynchronously, and nothing in a step may wait for it.

Reading a value on the host (`.item()`, `if x.any()`, `.cpu()`) waits until the device has finished all earlier work,
and so does a copy to the device that is not `non_blocking`. The few places of a run that must read values call
`fetched`, once for many steps.
"""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

import torch
from torch import Tensor

from vecgym.core import tree


def environment() -> dict[str, str]:
    """Return what a run depends on beside its settings: versions, and the devices that are present.

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
    return x.to(device, x.dtype if dtype is None else dtype, non_blocking=on_host(x) and device.type != "mps")


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
