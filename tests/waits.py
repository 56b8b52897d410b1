"""Operations that would wait for a device, counted on a machine that has none.

What needs a device's value on the host (`.item()`, a branch, a shape that depends on values) waits until the device has
caught up, and so does a copy to it that is not `non_blocking`: `x[[0, 1]]` and `torch.tensor(list, device=...)` make
one. (`_assert_async` makes the device check by itself, and nobody waits for it.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "nonzero_numpy", "argwhere",
    "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "bincount",
    "repeat_interleave.Tensor", "_linalg_check_errors", "_assert_scalar",
}  # fmt: skip
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class Waits(TorchDispatchMode):
    """Collect in `found` the operations of a block that would wait.

    Args:
        given: nested tensors that are taken to be on a device, and all that is computed from them with them, so that a
            block runs on the CPU, with values. (`tolist` and `numpy` of a tensor on the CPU, and copies, are not seen.)
            None: tensors on the device "meta" are; whatever reads one there raises an error besides.
    """

    def __init__(self, given: Any = None) -> None:
        super().__init__()
        self.found: list[str] = []
        self._kept: dict[int, torch.UntypedStorage] | None = None if given is None else {}
        self._lists = _Lists(self)
        self.mark(given)

    def __enter__(self) -> Waits:
        self._lists.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._lists.__exit__(*error)

    def mark(self, values: Any) -> None:
        """Take these to be on the device, too."""
        if self._kept is not None:
            for storage in (x.untyped_storage() for x in _tensors_in(values)):
                self._kept[storage._cdata] = storage  # kept, so that no other one gets its place

    def has(self, x: Tensor) -> bool:
        """Whether a tensor is on the device."""
        return x.is_meta if self._kept is None else x.untyped_storage()._cdata in self._kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__.split(".")[0]
        there = any(self.has(x) for x in _tensors_in((args, kwargs)))
        if there and (
            name in READS or func.__name__ in READS or (name in INDEXING and self._moves_indices(*args[1:3]))
        ):
            self.found.append(str(func))
        if name == "copy_" and self._kept is None and self.has(args[0]) != self.has(args[1]):
            self._copied(args[1], kwargs.get("non_blocking") or args[2:3] == (True,), func)
        result = func(*args, **kwargs)
        if name == "_to_copy" and self._kept is None and self.has(result) and not there:
            self._copied(args[0], kwargs.get("non_blocking"), func)
        if there:
            self.mark(result)
        return result

    def _moves_indices(self, indices: Any, value: Tensor | None = None) -> bool:
        """Whether an index is a mask, of which the device must count the places, or still on the host."""
        each = list(_tensors_in(indices))
        masks = any(x.dtype in (torch.bool, torch.uint8) for x in each)
        masks = masks and (value is None or value.dim() > 0)  # of `x[mask] = 0`, torch makes a masked_fill_
        return masks or (self._kept is None and not all(self.has(x) for x in each))

    def _copied(self, source: Tensor, non_blocking: Any, func: Any) -> None:
        if self.has(source) or (source.dim() > 0 and not non_blocking):
            self.found.append(f"{func} of {list(source.shape)}")


class _Lists(TorchFunctionMode):
    """Note lists of numbers that are sent to the device, which no dispatch mode sees."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        makes = func in (torch.tensor, torch.as_tensor, torch.asarray) and not isinstance(args[0], Tensor)
        if makes and torch.device(kwargs.get("device") or "cpu").type == "meta":
            self.waits.found.append(f"torch.{func.__name__} of a list")
        if func in (Tensor.__getitem__, Tensor.__setitem__) and self.waits.has(args[0]):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(part, list) for part in index):
                self.waits.found.append("an index that is a list")
        return func(*args, **kwargs)


def _tensors_in(values: Any) -> Iterator[Tensor]:
    return (x for x in tree_leaves(values) if isinstance(x, Tensor))
