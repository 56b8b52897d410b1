"""A CUDA graph on a CPU: operations that are recorded once, and done again with the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Operation = tuple[Callable, Any, Any, list[Any]]  # with its arguments and results

WAITING = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero")  # for values


class Recorder(TorchDispatchMode):
    """Notes operations, refuses those that wait for values, and undoes at the end what they have written."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # place -> (what is written, its values before)
        self._made: list[Any] = []  # kept, so that no place is used twice
        self._random = torch.get_rng_state()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.split(".")[0] in WAITING:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        kwargs = kwargs or {}
        silent = "batch_norm" in func.__name__  # which writes running statistics that its schema does not name
        for given, x in zip(func._schema.arguments, args):
            if silent or (given.alias_info is not None and given.alias_info.is_write):
                for each in tree_leaves(x):
                    if isinstance(each, Tensor):
                        self._before.setdefault(each.data_ptr(), (each, each.clone()))
        results = func(*args, **kwargs)
        self._made.append(results)
        self.operations.append((func, args, kwargs, tree_leaves(results)))
        return results

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for x, before in self._before.values():
            x.copy_(before)
        torch.set_rng_state(self._random)


class Replayed:
    """In place of `vecgym.engine.recorded.CUDAGraph`.

    As there, nothing but the recorded operations is done again, on the memory of the recording: what Python has
    computed in between stays as it was, and results are written over.

    Attributes:
        made: all of them.
        replays: how often this one was replayed.
    """

    made: ClassVar[list[Replayed]] = []

    def __init__(self, fn: Callable[[], Any], device: torch.device, pool: Any) -> None:
        with Recorder() as recorder:
            self.result = fn()
        self._operations = recorder.operations
        self.replays = 0
        self.made.append(self)

    def replay(self) -> None:
        self.replays += 1
        with torch.no_grad():
            for func, args, kwargs, kept in self._operations:
                for old, new in zip(kept, tree_leaves(func(*args, **kwargs))):
                    if isinstance(new, Tensor) and new.data_ptr() != old.data_ptr():
                        old.copy_(new)
