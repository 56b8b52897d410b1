"""Which operations would wait for a device, counted on a machine that has none.

A device runs behind the host: what needs one of its values on the host (`.item()`, a branch, a shape that depends on
values) waits until it has caught up, and so does a copy from the host's pageable memory unless it is `non_blocking`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "nonzero_numpy", "argwhere", "masked_select", "allclose",
    "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "bincount",
    "repeat_interleave", "_linalg_check_errors", "_assert_async", "_assert_scalar",
}  # fmt: skip
COPIES = {"_to_copy", "copy_", "copy"}


class Waits(TorchDispatchMode):
    """Collect in `found` the operations in a block that would wait.

    Args:
        given: tensors that are on the device. All that is computed from them is there too, whatever torch says: so
            it runs on the CPU, with values. (`tolist` and `numpy` of a CPU tensor are not seen.) None: those on the
            device "meta" are, where whatever reads a value raises an error.
    """

    def __init__(self, given: Any = None) -> None:
        super().__init__()
        self.found: list[str] = []
        self._kept: dict[int, torch.UntypedStorage] | None = None if given is None else {}
        self.mark(given)

    def mark(self, tensors: Any) -> None:
        """Take these to be on the device."""
        for x in tensors_in(tensors):
            if self._kept is not None:
                storage = x.untyped_storage()
                self._kept[storage._cdata] = storage

    def has(self, x: Tensor) -> bool:
        """Whether a tensor is on the device."""
        return x.is_meta if self._kept is None else x.untyped_storage()._cdata in self._kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__.split(".")[0]
        there = [self.has(x) for x in tensors_in((args, kwargs))]
        if any(there) and self._reads(name, args):
            self.found.append(f"{func}")
        if name == "copy_" and self.has(args[0]) != self.has(args[1]):
            waits = self.has(args[1]) or not (kwargs.get("non_blocking") or args[2:3] == (True,))
            self._note_copy(func, args[1], waits)
        result = func(*args, **kwargs)
        if name == "_to_copy" and not there[0] and self._kept is None and self.has(result):
            self._note_copy(func, args[0], not kwargs.get("non_blocking"))
        if name == "lift_fresh" and self._kept is None and self.has(result):
            self.found.append(f"{func} of {list(result.shape)}")
        if any(there) and name not in READS:
            self.mark(result)
        return result

    def _reads(self, name: str, args: Any) -> bool:
        if name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"):
            indices = [x for x in args[1] if isinstance(x, Tensor)]
            here = self._kept is None and any(not self.has(x) for x in indices)  # torch moves them, and waits
            return here or any(x.dtype in (torch.bool, torch.uint8) for x in indices)
        return name in READS

    def _note_copy(self, func: Any, x: Tensor, waits: bool) -> None:
        if waits and (x.dim() > 0 or self.has(x)):
            self.found.append(f"{func} of {list(x.shape)} {x.device}")


def tensors_in(values: Any) -> Iterator[Tensor]:
    return (x for x in tree_leaves(values) if isinstance(x, Tensor))
