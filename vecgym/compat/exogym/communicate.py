"""Collectives of one rank, under EXO Gym's names and torch.distributed's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from vecgym.strategy import per_rank

_OPS = {name: name.lower() for name in ("SUM", "MAX", "MIN", "PRODUCT")} | {"AVG": "mean"}


class Done:
    """The handle that `async_op=True` returns, of a completed collective."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Done | None:
    """Replace `tensor` with its sum over all nodes, in place; `op` may also be AVG, MAX, MIN or PRODUCT."""
    handle = _handle(group, async_op)
    name = str(op).rsplit(".", 1)[-1]  # an enum member, or an object that prints like one
    if name not in _OPS:
        raise ValueError(f"op={op} is not supported; allowed: {', '.join(_OPS)} of torch.distributed.ReduceOp.")
    per_rank.all_reduce(tensor, _OPS[name])
    return handle


def average_(tensor: Tensor, num_nodes: int) -> None:
    """Replace `tensor` with its mean over all nodes, in place."""
    all_reduce(tensor)
    tensor.div_(num_nodes)


def broadcast(tensor: Tensor, src: int = 0, group: Any = None, async_op: bool = False) -> Done | None:
    """Replace `tensor` with that of node `src`, in place."""
    handle = _handle(group, async_op)
    per_rank.broadcast(tensor, src)
    return handle


def all_gather(tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Done | None:
    """Write every node's tensor into `tensor_list`, in node order."""
    handle = _handle(group, async_op)
    for place, value in zip(tensor_list, per_rank.all_gather(tensor)):
        place.data.copy_(value)
    return handle


def broadcast_object_list(object_list: list[Any], src: int = 0, group: Any = None, device: Any = None) -> None:
    """Replace the objects in the list with those in node `src`'s. The ledger does not record objects."""
    _handle(group)
    meeting, node = per_rank.here()
    object_list[:] = meeting.share(node, f"broadcast_object_list from {src}", list(object_list))[src]


def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """Write every node's object into the list. The ledger does not record objects."""
    _handle(group)
    meeting, node = per_rank.here()
    object_list[:] = meeting.share(node, "all_gather_object", obj)


def barrier(group: Any = None, async_op: bool = False, device_ids: Sequence[int] | None = None) -> Done | None:
    """Wait for all nodes."""
    handle = _handle(group, async_op)
    per_rank.barrier()
    return handle


def mps_compatible(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` unchanged: no backend is involved that could lack MPS."""
    return function


def _handle(group: Any, async_op: bool = False) -> Done | None:
    if group is not None and group is not getattr(dist.group, "WORLD", None):
        raise ValueError("only the group of all nodes is supported: omit group.")
    return Done() if async_op else None


_COLLECTIVES = (all_reduce, broadcast, all_gather, broadcast_object_list, all_gather_object, barrier)
_REPLACED: dict[str, Callable[..., Any]] = {
    **{function.__name__: function for function in _COLLECTIVES},
    "get_rank": lambda group=None: per_rank.here()[1],
    "get_world_size": lambda group=None: per_rank.here()[0].num_nodes,
    "is_initialized": lambda: True,
    "get_backend": lambda group=None: "gloo",
}


def torch_distributed_calls() -> AbstractContextManager[Any]:
    """Redirect a node's calls of torch.distributed to this module; those of other threads are unchanged."""
    calls: Any = {name: _for_nodes(function, getattr(dist, name)) for name, function in _REPLACED.items()}
    return mock.patch.multiple(dist, **calls)


def _for_nodes(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (replacement if per_rank.is_rank() else original)(*args, **kwargs)

    return call
