"""A device runs behind the host, and nothing in a step may wait for it.

What reads a value on the host (`.item()`, `if x.any()`, `.cpu()`) waits until the device has done everything before,
and so does a copy to the device that is not `non_blocking`. The few places of a run that must read values do so by
`fetched`, once for many steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vecgym.core import tree


def on_host(x: Tensor) -> bool:
    """Whether a value can be read without waiting: it is in the memory of the host.

    >>> on_host(torch.ones(2)), on_host(torch.ones(2, device="meta"))
    (True, False)
    """
    return x.is_cpu


def placed(x: Tensor, device: torch.device | str | None, dtype: torch.dtype | None = None) -> Tensor:
    """Return `x` on a device; a copy from the host does not wait until the device has it.

    >>> placed(torch.ones(2), "meta", torch.float64)
    tensor(..., device='meta', size=(2,), dtype=torch.float64)
    """
    device = x.device if device is None else torch.device(device)
    # CUDA takes pageable memory over before the call returns. On MPS the copy would read it later.
    return x.to(device, x.dtype if dtype is None else dtype, non_blocking=on_host(x) and device.type != "mps")


def fetched(values: Any) -> Any:
    """Return nested values with all tensors on the host: this waits for the device, once for all of them.

    >>> fetched({"loss": torch.ones(2)})
    {'loss': tensor([1., 1.])}
    """
    return tree.map_leaves(lambda x: x if on_host(x) else x.to("cpu"), values)


def placed_as(values: Any, template: Any, device: torch.device) -> Any:
    """Copy tensors from a file to where a run has them; `template` is the state at its start, which may hold less.

    >>> placed_as({"step": torch.tensor([3])}, {}, torch.device("cpu"))
    {'step': tensor([3])}
    """

    def place(x: Tensor, like: Any) -> Tensor:
        return x.to(like.device if isinstance(like, Tensor) else device, copy=True)

    return tree.map_leaves(place, values, template)
