"""Collectives of nodes in W processes: each process holds L = K / W nodes, and `torch.distributed` connects them.

`DistributedCollectives` selects the tensors that cross between processes for each collective; `Wire` hands them to
torch.distributed and counts them. `in_buckets` concatenates small tensors, so that a tree is one message.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vecgym.collectives.base import BUCKET_BYTES, Collectives, T, bucketed, factors_of, multiplied, payload_bytes
from vecgym.collectives.ledger import Ledger
from vecgym.collectives.stacked import StackedCollectives
from vecgym.collectives.topology import Groups
from vecgym.collectives.wire import Wire
from vecgym.core.devices import placed
from vecgym.core.tree import Tree, wider


class DistributedCollectives(Collectives):
    """Collectives among K nodes, L = K / W of them in each of W processes: `[L, *]` tensors.

    Process r holds the nodes r L to (r + 1) L - 1. Each process first reduces its own nodes in memory; only the result
    crosses. With islands, only the processes of an island communicate, in their own process group.

    Bytes handed to torch.distributed by each process (`wire.handed_bytes`), for a payload of b bytes per node in the
    ledger: `mean`, `sum`, `server_mean`: b for each group of nodes that it shares with other processes (2 b for
    bfloat16 and float16, whose partial sums are float32); `all_gather`: L b; `broadcast`: b at the source; `permute`,
    `mix`: b for each of its nodes' values and each other process that receives it. With one node per process this is
    the ledger's payload. With `exact`: L b.

    A value that is the same on every node, `[1, *]`, is not sent if L > 1. With L = 1 it cannot be distinguished from
    a node's own value and is sent.

    In collectives of some of the nodes (`among`), processes hold different numbers L of them: an `all_gather` pads to
    the largest. A process without participants sends nothing. It makes the same calls, with `[0, *]`, and receives the
    common results, so that values stored once for all nodes stay the same in all processes. These messages are not
    counted.

    Args:
        num_nodes: K, a multiple of W.
        wire: the connection to the other processes; None: the default process group.
        exact: gather `[K, *]` in every process and apply the operation of `StackedCollectives`: the same bits on a CPU,
            for verification. Otherwise torch.distributed reduces, in its own order.
        bucket_bytes: the tensors of a tree are grouped into messages of this size or slightly more; see `bucketed`.

    Raises:
        ValueError: if W does not divide K.
        RuntimeError: if there is no process group; for tensors that require grad, since gradients do not cross
            processes.
    """

    def __init__(
        self,
        num_nodes: int,
        wire: Wire | None = None,
        *,
        exact: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        ledger: Ledger | None = None,
    ) -> None:
        self.wire = wire or Wire()
        check_divides(self.wire.num_processes, num_nodes)
        self.exact, self.run_nodes = exact, num_nodes
        self.native = not exact and self.wire.num_processes > 1
        self.bucket_bytes = bucket_bytes
        self.ledger = Ledger() if ledger is None else ledger
        self._place([num_nodes // self.wire.num_processes] * self.wire.num_processes)

    def among(self, members: Sequence[int]) -> DistributedCollectives:
        subset = copy.copy(self)
        subset._count_among(self, members)
        subset._place([sum(node in part for node in members) for part in self.parts])
        return subset

    def _place(self, counts: Sequence[int]) -> None:
        """Set the number of nodes that each process holds."""
        ends = list(accumulate(counts))
        self.num_nodes = ends[-1]
        self.parts = [range(end - count, end) for end, count in zip(ends, counts)]
        self.ranks = [rank for rank, count in enumerate(counts) if count]  # the processes that hold nodes
        self.empty_ranks = [rank for rank, count in enumerate(counts) if not count]
        part = self.parts[self.wire.rank]
        self.num_local, self.first = len(part), part.start
        self.node_ids = torch.tensor(part, dtype=torch.long)
        self._all_hold_several = min(counts) > 1
        self._stacked = StackedCollectives(self.num_nodes)

    def _apply(self, x: T, operation: Any) -> T:
        if isinstance(x, Tensor):
            return self._apply({"": x}, operation)[""]
        if torch.is_grad_enabled() and any(y.requires_grad for y in x.values()):
            raise RuntimeError(
                "gradients do not cross processes: differentiate a run with all nodes in one process "
                "(StackedCollectives)."
            )
        of_all = operation(self._stacked)
        if not self.native:
            return {name: self._local_rows(of_all(y)) for name, y in self._everyone(x).items()}
        same, local = self._split(x)
        results = {name: self._local_rows(of_all(y)) for name, y in same.items()}
        results |= self._in_buckets(local, operation(self))
        return {name: results[name] for name in x}

    def _announce(self, operation: str, x: Any, who: Any = None) -> None:
        super()._announce(operation, x, who)
        if self.wire.num_processes > 1:
            # To report where a process keeps others waiting.
            self.wire.announce(f"{operation} at step {self.step} of {tensors_text(x)}")

    def everyone(self, x: Tree) -> Tree:
        """Give every process the values of all nodes, `[L, *] -> [K, *]`; `[1, *]` stays `[1, *]`.

        It only observes the run: no bytes are counted.
        """
        before = self.wire.handed_bytes
        values = self._everyone(x)
        self.wire.handed_bytes = before
        return values

    def _everyone(self, x: Tree) -> Tree:
        return x if self.wire.num_processes == 1 else {**x, **self._in_buckets(self._split(x)[1], self._gathered)}

    def _in_buckets(self, x: Tree, operation: Callable[[Tensor], Tensor]) -> Tree:
        return in_buckets(x, self.bucket_bytes, operation, self.ledger.gradients)

    def _split(self, x: Tree) -> tuple[Tree, Tree]:
        """Split a tree into values that are the same on every node, `[1, *]`, and the nodes' own, `[L, *]`.

        In a process without nodes, one row that is never read provides names, shapes and buckets.
        """
        rows = max(1, self.num_local)
        same = {name: y for name, y in x.items() if len(y) == 1 and self._all_hold_several}
        local = {name: y for name, y in x.items() if name not in same}
        local = {name: y if len(y) else y.new_zeros(1, *y.shape[1:]) for name, y in local.items()}
        return same, {name: y if len(y) == rows else y.expand(rows, *y.shape[1:]) for name, y in local.items()}

    def _local_rows(self, result: Tensor) -> Tensor:
        """Return this process's rows of a result of all nodes, `[K, *]`; `[1, *]` is returned unchanged."""
        return result if len(result) == 1 else result[self.first : self.first + self.num_local]

    # With torch.distributed, one bucket `[L, n]` at a time.

    def _sum(self, x: Tensor, groups: Groups | None, average: bool, weights: Tensor | None = None) -> Tensor:
        if groups is None:
            total, processes = self._partial(x, range(self.num_nodes), average, weights), self.wire.subgroup(self.ranks)
            if not self._sends_nothing:
                total = self.wire.all_reduce(total, processes)
            return self._relayed(total.to(x.dtype))
        result = x.clone()
        for group in groups:
            ranks = sorted({self.process_of(int(node)) for node in group})
            processes = self.wire.subgroup(ranks)
            if len(group) > 1 and self.wire.rank in ranks:
                total = self._partial(x, group, average, weights)
                total = self.wire.all_reduce(total, processes) if len(ranks) > 1 else total
                rows = torch.tensor([node - self.first for node in group if self._holds(node)], device=x.device)
                result.index_copy_(0, rows, total.to(x.dtype).expand(len(rows), -1))
        return result[: self.num_local]

    def _partial(self, x: Tensor, group: Sequence[int], average: bool, weights: Tensor | None) -> Tensor:
        """Return this process's part of a sum, or of an average over a group: `[L, n] -> [1, n]`, a new tensor.

        An average is divided before the processes add up their parts, as in DistributedDataParallel, so that the sum
        does not overflow.
        """
        counting, factors = torch.tensor(group), None
        if weights is not None:
            rows, factors = factors_of(weights[counting], average)
            counting = counting[rows]
        mine = (counting >= self.first) & (counting < self.first + self.num_local)
        if len(mine) < self.num_nodes or not self.num_local:
            x = x.index_select(0, placed(counting[mine] - self.first, x.device))
        values = x if factors is None else multiplied(x, factors[mine])
        part = values.sum(0, keepdim=True, dtype=wider(x.dtype))
        return part / len(counting) if average and len(counting) > 1 else part

    def _all_gather(self, x: Tensor) -> Tensor:
        return self._gathered(x)[None]

    def _gathered(self, x: Tensor) -> Tensor:
        members, counts = self.wire.subgroup(self.ranks), [len(self.parts[rank]) for rank in self.ranks]
        if self._sends_nothing:
            return self._relayed(x if self.num_local else x.new_empty(self.num_nodes, *x.shape[1:]))
        most = max(counts)
        rows = self.wire.all_gather(x if len(x) == most else F.pad(x, (0, 0, 0, most - len(x))), members)
        if min(counts) < most:
            rows = torch.cat([block[:count] for block, count in zip(rows.split(most), counts)])
        return self._relayed(rows)

    def _broadcast(self, x: Tensor, src: int) -> Tensor:
        row = src - self.first if self._holds(src) else 0
        return self.wire.broadcast(x[row : row + 1], self.process_of(src))

    def _permute(self, x: Tensor, source: Tensor) -> Tensor:
        if not self.num_local:
            return x[:0]
        rows = self._fetch(x, [[int(node)] for node in source])
        return torch.cat([rows[int(source[node])] for node in self.node_ids.tolist()])

    def _mix(self, x: Tensor, weights: Tensor) -> Tensor:
        if not self.num_local:
            return x[:0]
        rows = self._fetch(x, [row.nonzero()[:, 0].tolist() for row in weights.detach()])
        nodes = sorted(rows)
        local_weights = weights[self.first : self.first + self.num_local, nodes]
        values = torch.cat([x[:0], *(rows[node] for node in nodes)]).to(wider(x.dtype))  # perhaps of no node
        return (placed(local_weights, x.device, values.dtype) @ values).to(x.dtype)

    def _fetch(self, x: Tensor, sources: Sequence[Sequence[int]]) -> dict[int, Tensor]:
        """Fetch the rows `[1, n]` that this process's nodes need; node i needs those of the nodes `sources[i]`.

        Every process sends to each other process the rows that it needs, each once.
        """
        by_process = [sorted({j for i in part for j in sources[i]}) for part in self.parts]
        rank, others = self.wire.rank, [r for r in range(len(self.parts)) if r != self.wire.rank]
        sent = {r: [j - self.first for j in by_process[r] if self._holds(j)] for r in others}
        received = {r: [j for j in by_process[rank] if j in self.parts[r]] for r in others}
        arrived = self.wire.exchange(
            {r: x[rows] for r, rows in sent.items() if rows},
            {r: x.new_empty(len(nodes), x.shape[1]) for r, nodes in received.items() if nodes},
        )
        rows = {j: x[j - self.first : j - self.first + 1] for j in by_process[rank] if self._holds(j)}
        for r, block in arrived.items():
            rows.update(zip(received[r], block.split(1)))
        return rows

    def process_of(self, node: int) -> int:
        """Return the rank of the process that holds a node."""
        return next(rank for rank, part in enumerate(self.parts) if node in part)

    @property
    def _sends_nothing(self) -> bool:
        """Whether this process sends nothing in a collective of all participants."""
        return not self.num_local or len(self.ranks) == 1

    def _relayed(self, x: Tensor) -> Tensor:
        """Send a result to the processes without participants."""
        return self.wire.send(x, self.ranks[0], self.empty_ranks) if self.empty_ranks else x

    def _holds(self, node: int) -> bool:
        return node in self.parts[self.wire.rank]


def tensors_text(x: Tensor | Tree) -> str:
    """Describe one node's payload of a collective.

    >>> tensors_text({"weight": torch.ones(2, 5, 2), "bias": torch.ones(2, 5)})
    '2 tensors, 60 bytes a node: weight [5, 2], bias [5]'
    """
    tensors = {"": x} if isinstance(x, Tensor) else x
    shapes = ", ".join(f"{name} {list(y.shape[1:])}".strip() for name, y in tensors.items())
    return f"{len(tensors)} tensors, {payload_bytes(x)} bytes a node: {shapes}"


def check_divides(num_processes: int, num_nodes: int) -> None:
    """Raise a ValueError unless W divides K.

    >>> check_divides(3, 4)
    Traceback (most recent call last):
    ...
    ValueError: num_processes=3 must divide num_nodes=4, since all processes hold equally many nodes: one of [1, 2, 4].
    """
    if num_nodes % num_processes != 0:
        divisors = [n for n in range(1, num_nodes + 1) if num_nodes % n == 0]
        raise ValueError(
            f"num_processes={num_processes} must divide num_nodes={num_nodes}, since all processes hold equally many "
            f"nodes: one of {divisors}."
        )


def in_buckets(x: Tree, bucket_bytes: float, operation: Callable[[Tensor], Tensor], gradients: bool = False) -> Tree:
    """Apply `operation` to the concatenated tensors of `x`: it maps `[R, n]` to `[..., n]`, column by column.

    >>> values = {"a": torch.ones(2, 3), "b": torch.ones(2, 2, 2), "c": torch.ones(2)}
    >>> {name: y.shape for name, y in in_buckets(values, 40, lambda y: y.sum(0, keepdim=True)).items()}
    {'a': torch.Size([1, 3]), 'b': torch.Size([1, 2, 2]), 'c': torch.Size([1])}
    """
    results: Tree = {}
    for names in buckets(x, bucket_bytes, gradients):
        parts = [x[name].reshape(len(x[name]), math.prod(x[name].shape[1:])) for name in names]
        joined = operation(torch.cat(parts, 1) if len(parts) > 1 else parts[0])
        for name, part in zip(names, joined.split([part.shape[1] for part in parts], -1)):
            # A slice of rows would not be contiguous, and fused optimizers ignore strides.
            results[name] = part.contiguous().view(*joined.shape[:-1], *x[name].shape[1:])
    return {name: results[name] for name in x}


def buckets(x: Tree, bucket_bytes: float, gradients: bool = False) -> Iterator[list[str]]:
    """Group the names in `x` by dtype, device and number of rows, and then into messages; see `bucketed`.

    >>> list(buckets({"a": torch.ones(1, 4), "b": torch.ones(1, 4).int(), "c": torch.ones(1, 4)}, 32))
    [['c', 'a'], ['b']]
    >>> list(buckets({"a": torch.ones(1, 4), "b": torch.ones(1, 40), "c": torch.ones(1, 4)}, 32))
    [['c', 'b'], ['a']]
    """
    kinds: dict[tuple[Any, ...], list[str]] = {}
    for name, y in x.items():
        kinds.setdefault((y.dtype, y.device, len(y)), []).append(name)
    for names in kinds.values():
        for places in bucketed([x[name].numel() * x[name].element_size() for name in names], bucket_bytes, gradients):
            yield [names[i] for i in places]
