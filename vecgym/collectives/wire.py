"""What crosses between processes: tensors handed to `torch.distributed`, and how many bytes of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MAX_SUBGROUPS = 64  # process groups kept for islands: each holds connections between all of its processes


class Disagreement(RuntimeError):
    """Processes do not make the same calls."""


class Wire:
    """Everything that is handed to torch.distributed, and how many bytes of it.

    Args:
        process_group: of torch.distributed; None: the default one, which must exist.
        watch: called before and after this process waits for others.

    Attributes:
        rank, num_processes: of this process in the group, and W.
        announce: called with a line that says what follows, before the nodes exchange something.
        handed_bytes: bytes of tensors that this process has handed over to be sent or reduced, however often a link
            then carries them: of an all-reduce the
            tensor, of an all-gather this process's part, of a broadcast the tensor at its source only, of an exchange
            the parts for other processes.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "there is no process group. Start the script with torchrun, or take "
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
            raise RuntimeError("this run has ended, and so has the exchange between its processes.")
        return self._group

    def subgroup(self, ranks: Sequence[int]) -> Any:
        """Return the process group of these ranks. All processes call it, in the same order; the last ones are kept."""
        key = tuple(ranks)
        if len(key) == self.num_processes:
            return self.group
        if len(key) == 1:
            return None
        if key in self._subgroups:
            self._subgroups[key] = self._subgroups.pop(key)  # now the one used last
            return self._subgroups[key]
        if self.num_processes < dist.get_world_size():
            raise RuntimeError("islands need a wire between all processes: torch.distributed makes their groups.")
        self._subgroups[key] = self._call(lambda: dist.new_group(list(key)))
        if len(self._subgroups) > MAX_SUBGROUPS:  # all have met in new_group: no process uses another group now
            self._destroy_subgroups(1)
        return self._subgroups[key]

    def _destroy_subgroups(self, count: int | None = None) -> None:
        """Destroy the process groups of islands, which no process uses now; `count`: those used longest ago."""
        for key in list(self._subgroups)[:count]:
            group = self._subgroups.pop(key)
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)

    def finish(self) -> None:
        """Destroy the process groups of islands, once all processes have come here."""
        if self._subgroups:
            self._call(lambda: dist.barrier(self.group))
        self._destroy_subgroups()

    def close(self) -> None:
        """Let go of all process groups; nothing can be exchanged after that.

        Torch ends the threads of a destroyed group when nobody holds it any more. Threads that outlive the interpreter
        abort the process at its exit.
        """
        self._subgroups.clear()
        self._group = None

    def all_reduce(self, x: Tensor, group: Any = None) -> Tensor:
        """Sum the tensors of all processes, or of those of a subgroup; `x` may be overwritten."""
        group = group or self.group
        if dist.get_world_size(group) == 1 or x.numel() == 0:
            return x
        carried = self._staged(x.contiguous())
        self._count(carried)
        self._call(lambda: dist.all_reduce(carried, group=group))
        return carried.to(x.device)

    def all_gather(self, x: Tensor, group: Any = None) -> Tensor:
        """Gather the rows of all processes, or of a subgroup, in the order of their ranks: `[L, n] -> [W L, n]`."""
        group = group or self.group
        num_processes = dist.get_world_size(group)
        if num_processes == 1 or x.numel() == 0:
            return x.new_empty(num_processes * len(x), *x.shape[1:]) if x.numel() == 0 else x
        carried = self._staged(_as_bytes(x))
        self._count(carried)
        gathered = carried.new_empty(num_processes * carried.numel())
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the older name
        self._call(lambda: gather(gathered, carried, group=group))
        return gathered.to(x.device).view(x.dtype).view(-1, *x.shape[1:])

    def tell(self, x: Tensor, source: int, to: Sequence[int]) -> Tensor:
        """Give the processes `to` the tensor of the process `source`; theirs only has its shape. Not counted."""
        before = self.handed_bytes
        sent = dict.fromkeys(to, x) if self.rank == source else {}
        received = self.exchange(sent, {source: x} if self.rank in to else {})
        self.handed_bytes = before
        return received.get(source, x)

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """Give every process the tensor of the process `src`; those of the others only have its shape."""
        if self.num_processes == 1 or x.numel() == 0:
            return x
        carried = self._staged(_as_bytes(x).clone())
        if self.rank == src:
            self._count(carried)
        self._call(lambda: dist.broadcast(carried, self.ranks[src], group=self.group))
        return _from_bytes(carried, x)

    def exchange(self, sent: dict[int, Tensor], received: dict[int, Tensor]) -> dict[int, Tensor]:
        """Send a tensor to each rank in `sent`; receive one from each in `received`, of the shape given there."""
        outgoing = {rank: self._staged(_as_bytes(x)) for rank, x in sent.items() if x.numel()}
        incoming = {rank: self._staged(torch.empty_like(_as_bytes(x))) for rank, x in received.items() if x.numel()}
        for x in outgoing.values():
            self._count(x)
        sends = [dist.P2POp(dist.isend, x, self.ranks[rank], group=self.group) for rank, x in outgoing.items()]
        receives = [dist.P2POp(dist.irecv, x, self.ranks[rank], group=self.group) for rank, x in incoming.items()]
        if sends or receives:
            self._call(lambda: [work.wait() for work in dist.batch_isend_irecv(sends + receives)])
        return {rank: _from_bytes(incoming[rank], x) if x.numel() else x for rank, x in received.items()}

    def broadcast_object(self, value: Any) -> Any:
        """Return the first process's value: numbers, strings, and lists and dicts of them. Not counted."""
        values = [value]
        if self.num_processes > 1:
            self._call(lambda: dist.broadcast_object_list(values, src=self.ranks[0], group=self.group))
        return values[0]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every process's value, in the order of their ranks. Not counted."""
        values = [value] * self.num_processes
        if self.num_processes > 1:
            self._call(lambda: dist.all_gather_object(values, value, group=self.group))
        return values

    def agree(self, text: str) -> None:
        """Raise a `Disagreement`, which says who says what, unless all processes say the same. Not counted."""
        if self.num_processes == 1:
            return
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
        numbers = [torch.empty(1, dtype=torch.int64) for _ in range(self.num_processes)]
        self._call(lambda: dist.all_gather(numbers, torch.tensor([number]), group=self.group))
        if any(int(other) != number for other in numbers):
            said = "; ".join(f"process {rank}: {words}" for rank, words in enumerate(self.all_gather_object(text)))
            raise Disagreement(
                f"the processes do not make the same calls of ctx.comm. {said}. Fix: every process calls the same "
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
        """Move `x` to where the group's backend can read it: gloo reads the CPU's memory only."""
        return x.cpu() if x.device.type != "cpu" and dist.get_backend(self.group) == "gloo" else x


def _as_bytes(x: Tensor) -> Tensor:
    """View a tensor as uint8 `[bytes]`: backends do not know every type."""
    return x.contiguous().view(-1).view(torch.uint8)


def _from_bytes(carried: Tensor, like: Tensor) -> Tensor:
    """Invert `_as_bytes` for a tensor of the form of `like`, on its device."""
    return carried.to(like.device).view(like.dtype).view(like.shape)
