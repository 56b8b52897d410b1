"""Communication between processes: tensors handed to `torch.distributed`, and their bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MAX_SUBGROUPS = 64  # cached process groups of islands: each holds connections between all of its processes


class Disagreement(RuntimeError):
    """Raised if the processes do not make the same calls."""


class Wire:
    """The calls of torch.distributed, and the bytes handed to them.

    Args:
        process_group: a process group of torch.distributed; None: the default group, which must exist.
        watch: called before and after this process waits for others.

    Attributes:
        rank, num_processes: the rank of this process in the group, and W.
        announce: called with a line that describes the next exchange between nodes, before it starts.
        handed_bytes: bytes of the tensors that this process has handed over to be sent or reduced, however often a
            link then carries them: the tensor of an all-reduce, this process's part of an all-gather, the tensor of a
            broadcast at its source only, and the parts of an exchange for other processes.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, watch: Callable[[], None] = lambda: None
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "there is no process group. Start the script with torchrun, or use "
                'trainer.fit(..., backend="processes", num_processes=W), which starts the processes itself.'
            )
        self._group: dist.ProcessGroup | None = process_group or dist.group.WORLD
        self.ranks: list[int] = dist.get_process_group_ranks(self.group)  # global ranks
        self.rank = self.ranks.index(dist.get_rank())
        self.num_processes = len(self.ranks)
        self.handed_bytes = 0
        self.announce: Callable[[str], None] = lambda text: None
        self._watch = watch
        self._subgroups: dict[tuple[int, ...], Any] = {}

    @property
    def group(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError("this run has ended: its processes can no longer communicate.")
        return self._group

    def subgroup(self, ranks: Sequence[int]) -> Any:
        """Return the process group of these ranks, cached. All processes must call it, in the same order."""
        key = tuple(ranks)
        if len(key) == self.num_processes:
            return self.group
        if len(key) == 1:
            return None
        if key not in self._subgroups:
            if self.num_processes < dist.get_world_size():
                raise RuntimeError("islands need a wire with all processes: torch.distributed creates their groups.")
            if len(self._subgroups) == MAX_SUBGROUPS:
                self.finish()
            self._subgroups[key] = self._call(lambda: dist.new_group(list(key)))
        return self._subgroups[key]

    def finish(self) -> None:
        """Wait for all processes, and destroy the process groups of islands."""
        if self._subgroups:
            self._call(lambda: dist.barrier(self.group))
        while self._subgroups:
            _, group = self._subgroups.popitem()
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)

    def close(self) -> None:
        """Release all process groups; nothing can be exchanged afterwards.

        The threads of a group end with the last reference to it. Threads that outlive the interpreter abort the process
        at exit.
        """
        self._subgroups.clear()
        self._group = None

    def all_reduce(self, x: Tensor, group: Any = None) -> Tensor:
        """Sum the tensors of all processes, or of a subgroup; `x` may be overwritten."""
        group = group or self.group
        if dist.get_world_size(group) == 1 or x.numel() == 0:
            return x
        carried = self._staged(x.contiguous())
        self._count(carried)
        self._call(lambda: dist.all_reduce(carried, group=group))
        return carried.to(x.device)

    def all_gather(self, x: Tensor, group: Any = None) -> Tensor:
        """Gather the rows of all processes, or of a subgroup, in order of rank: `[L, n] -> [W L, n]`."""
        group = group or self.group
        num_processes = dist.get_world_size(group)
        if num_processes == 1 or x.numel() == 0:
            return x.new_empty(num_processes * len(x), *x.shape[1:]) if x.numel() == 0 else x
        carried = self._staged(_as_bytes(x))
        self._count(carried)
        gathered = carried.new_empty(num_processes * carried.numel())
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name in older versions
        self._call(lambda: gather(gathered, carried, group=group))
        return gathered.to(x.device).view(x.dtype).view(-1, *x.shape[1:])

    def send(self, x: Tensor, source: int, to: Sequence[int]) -> Tensor:
        """Send the tensor of the process `source` to the processes `to`, whose `x` gives the shape. Not counted."""
        before = self.handed_bytes
        sent = dict.fromkeys(to, x) if self.rank == source else {}
        received = self.exchange(sent, {source: x} if self.rank in to else {})
        self.handed_bytes = before
        return received.get(source, x)

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """Send the tensor of the process `src` to every process; in the others `x` only gives the shape."""
        if self.num_processes == 1 or x.numel() == 0:
            return x
        carried = self._staged(_as_bytes(x).clone())
        if self.rank == src:
            self._count(carried)
        self._call(lambda: dist.broadcast(carried, self.ranks[src], group=self.group))
        return _from_bytes(carried, x)

    def exchange(self, sent: dict[int, Tensor], received: dict[int, Tensor]) -> dict[int, Tensor]:
        """Send a tensor to each rank in `sent`; receive one from each rank in `received`, of the shape given there."""
        outgoing = {rank: self._staged(_as_bytes(x)) for rank, x in sent.items() if x.numel()}
        incoming = {rank: self._staged(torch.empty_like(_as_bytes(x))) for rank, x in received.items() if x.numel()}
        for x in outgoing.values():
            self._count(x)
        sends = [dist.P2POp(dist.isend, x, self.ranks[rank], group=self.group) for rank, x in outgoing.items()]
        receives = [dist.P2POp(dist.irecv, x, self.ranks[rank], group=self.group) for rank, x in incoming.items()]
        if sends or receives:
            self._call(lambda: [work.wait() for work in dist.batch_isend_irecv(sends + receives)])
        return {rank: _from_bytes(incoming[rank], x) if x.numel() else x for rank, x in received.items()}

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all processes, in order of rank. Not counted."""
        values = [value] * self.num_processes
        if self.num_processes > 1:
            self._call(lambda: dist.all_gather_object(values, value, group=self.group))
        return values

    def agree(self, text: str) -> None:
        """Raise a `Disagreement`, which shows every process's text, unless all are equal. Not counted."""
        texts = self.all_gather_object(text)
        if len(set(texts)) > 1:
            calls = "; ".join(f"process {rank}: {other}" for rank, other in enumerate(texts))
            raise Disagreement(
                f"the processes do not make the same calls of part.comm. {calls}. Fix: every process calls the same "
                "operations in the same order, whichever nodes it holds and whatever their values are."
            )

    def _count(self, x: Tensor) -> None:
        self.handed_bytes += x.numel() * x.element_size()

    def _call(self, communicate: Callable[[], Any]) -> Any:
        self._watch()
        result = communicate()
        self._watch()
        return result

    def _staged(self, x: Tensor) -> Tensor:
        """Move `x` to where the group's backend can read it: gloo only reads the CPU's memory."""
        return x.cpu() if x.device.type != "cpu" and dist.get_backend(self.group) == "gloo" else x


def _as_bytes(x: Tensor) -> Tensor:
    """View a tensor as uint8 `[bytes]`: backends do not support every dtype."""
    return x.contiguous().view(-1).view(torch.uint8)


def _from_bytes(carried: Tensor, like: Tensor) -> Tensor:
    """Invert `_as_bytes` for a tensor with the shape and dtype of `like`, on its device."""
    return carried.to(like.device).view(like.dtype).view(like.shape)
