"""The nodes of W processes: each holds L = K / W of them, and `torch.distributed` carries what crosses.

`DistributedCollectives` says which tensors cross, for each collective; `Wire` hands them to torch.distributed and
counts them. `in_buckets` joins small tensors, so that a tree is one message.
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

from vecgym.collectives.base import BUCKET_BYTES, Collectives, T, bucketed, payload_bytes
from vecgym.collectives.ledger import Ledger
from vecgym.collectives.stacked import StackedCollectives
from vecgym.collectives.topology import Groups
from vecgym.collectives.wire import Wire
from vecgym.core.tree import Tree


class DistributedCollectives(Collectives):
    """Collectives among K nodes, L = K / W of them in each of W processes: `[L, *]` tensors.

    Process r holds the nodes r L to (r + 1) L - 1. Nodes of one process are reduced in its memory first; only the
    result crosses. With islands, only the processes of an island meet, in a process group of their own.

    Bytes handed to torch.distributed by each process (`wire.handed_bytes`), for a payload of b bytes per node as the
    ledger has it: `mean`, `sum`, `server_mean`: b for each group of nodes that it shares with other processes;
    `all_gather`: L b; `broadcast`: b at its source; `permute`, `mix`: b for each of its nodes' values and each other
    process that takes it. So with a node per process, it is the ledger's payload itself. With `exact`: L b.

    What is the same on every node, `[1, *]`, crosses nothing if L > 1. With L = 1 it cannot be told from a node's own
    value and is treated like one.

    Where some of the nodes meet (`among`), processes hold different numbers L of them: an `all_gather` pads to the
    largest. A process that holds none hands over nothing. It makes the same calls, with one row that nobody reads, and
    is told what all members get alike: so what the nodes store once stays the same in all processes. What it is told is
    not counted.

    Args:
        num_nodes: K, a multiple of W.
        wire: how to reach the other processes; None: the default process group.
        exact: gather `[K, *]` in every process and apply the very operation of `StackedCollectives`: the same bits on a
            CPU, for proof. Otherwise torch.distributed reduces, in an order of its own.
        bucket_bytes: tensors of a tree are joined into messages that end at this size or beyond; see `bucketed`.

    Raises:
        ValueError: for a K that W does not divide.
        RuntimeError: where there is no process group; for tensors that require grad, since derivatives do not cross.
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
        self.exact = exact
        self.native = not exact and self.wire.num_processes > 1
        self.bucket_bytes = bucket_bytes
        self.ledger = Ledger() if ledger is None else ledger
        self._place([num_nodes // self.wire.num_processes] * self.wire.num_processes)

    def among(self, members: Sequence[int]) -> DistributedCollectives:
        some = copy.copy(self)
        some._count_among(self, members)
        some._place([sum(node in part for node in members) for part in self.parts])
        return some

    def _place(self, counts: Sequence[int]) -> None:
        """Say how many of the nodes each process holds."""
        ends = list(accumulate(counts))
        self.num_nodes = ends[-1]
        self.parts = [range(end - count, end) for end, count in zip(ends, counts)]
        self.ranks = [rank for rank, count in enumerate(counts) if count]  # of the processes that hold nodes
        self.onlookers = [rank for rank, count in enumerate(counts) if not count]
        part = self.parts[self.wire.rank]
        self.looks_on = not part
        self.num_local, self.first = max(1, len(part)), part.start
        self.node_ids = torch.tensor(part or [0])
        self._several = min(counts) > 1
        self._stacked = StackedCollectives(self.num_nodes)

    def _apply(self, x: T, operation: Callable[[Collectives, Tensor], Tensor]) -> T:
        if isinstance(x, Tensor):
            return self._apply({"": x}, operation)[""]
        if torch.is_grad_enabled() and any(y.requires_grad for y in x.values()):
            raise RuntimeError(
                "derivatives do not cross processes: differentiate a run with all nodes in one process "
                "(StackedCollectives)."
            )
        if not self.native:
            return {name: self._rows_here(operation(self._stacked, y)) for name, y in self.everyone(x).items()}
        same, own = self._split(x)
        results = {name: self._rows_here(operation(self._stacked, y)) for name, y in same.items()}
        results |= self._in_buckets(own, lambda y: operation(self, y))
        return {name: results[name] for name in x}

    def _announce(self, operation: str, x: Any, who: Any = None) -> None:
        super()._announce(operation, x, who)
        if self.wire.num_processes > 1:
            # So that one can tell where a process keeps others waiting.
            self.wire.announce(f"{operation} at step {self.step} of {tensors_text(x)}")

    def everyone(self, x: Tree) -> Tree:
        """Give every process the values of all nodes, `[L, *] -> [K, *]`; what is the same on every node stays so."""
        if self.wire.num_processes == 1:
            return x
        return {**x, **self._in_buckets(self._split(x)[1], self._gathered)}

    def _in_buckets(self, x: Tree, operation: Callable[[Tensor], Tensor]) -> Tree:
        return in_buckets(x, self.bucket_bytes, operation, self.ledger.gradients)

    def _split(self, x: Tree) -> tuple[Tree, Tree]:
        """Split a tree into what is the same on every node, and the nodes' own values, `[L, *]`."""
        rows = self.num_local
        same = {name: y for name, y in x.items() if len(y) == 1 and self._several}
        own = {name: y for name, y in x.items() if name not in same}
        return same, {name: y if len(y) == rows else y.expand(rows, *y.shape[1:]) for name, y in own.items()}

    def _rows_here(self, result: Tensor) -> Tensor:
        """Return this process's rows of a result of all nodes, `[K, *]`; `[1, *]` is everyone's."""
        if self.looks_on:
            return result[:1]
        return result if len(result) == 1 else result[self.first : self.first + self.num_local]

    # One bucket `[L, n]` at a time, when torch.distributed reduces.

    def _sum(self, x: Tensor, groups: Groups | None, average: bool) -> Tensor:
        if groups is None:
            part, members = _partial(x, self.num_nodes if average else 1), self.wire.subgroup(self.ranks)
            return self._told(part if self._alone else self.wire.all_reduce(part, members))
        result = x.clone()
        for group in groups:
            ranks = sorted({self.process_of(int(node)) for node in group})
            processes = self.wire.subgroup(ranks)
            if len(group) > 1 and self.wire.rank in ranks:
                rows = torch.tensor([node - self.first for node in group if self._is_here(node)], device=x.device)
                part = _partial(x.index_select(0, rows), len(group) if average else 1)
                total = self.wire.all_reduce(part, processes) if len(ranks) > 1 else part
                result.index_copy_(0, rows, total.expand(len(rows), -1))
        return result

    def _all_gather(self, x: Tensor) -> Tensor:
        return self._gathered(x)[None]

    def _gathered(self, x: Tensor) -> Tensor:
        members, counts = self.wire.subgroup(self.ranks), [len(self.parts[rank]) for rank in self.ranks]
        if self._alone:
            return self._told(x.new_empty(self.num_nodes, *x.shape[1:]) if self.looks_on else x)
        most = max(counts)
        rows = self.wire.all_gather(x if len(x) == most else F.pad(x, (0, 0, 0, most - len(x))), members)
        if min(counts) < most:
            rows = torch.cat([block[:count] for block, count in zip(rows.split(most), counts)])
        return self._told(rows)

    def _broadcast(self, x: Tensor, src: int) -> Tensor:
        row = src - self.first if self._is_here(src) else 0
        return self.wire.broadcast(x[row : row + 1], self.process_of(src))

    def _permute(self, x: Tensor, source: Tensor) -> Tensor:
        if self.looks_on:
            return x
        rows = self._fetch(x, [[int(node)] for node in source])
        return torch.cat([rows[int(source[node])] for node in self.node_ids.tolist()])

    def _mix(self, x: Tensor, weights: Tensor) -> Tensor:
        if self.looks_on:
            return x
        rows = self._fetch(x, [row.nonzero()[:, 0].tolist() for row in weights.detach()])
        nodes = sorted(rows)
        own_weights = weights[self.first : self.first + self.num_local, nodes]
        return own_weights.to(device=x.device, dtype=x.dtype) @ torch.cat([rows[node] for node in nodes])

    def _fetch(self, x: Tensor, wanted: Sequence[Sequence[int]]) -> dict[int, Tensor]:
        """Fetch the rows `[1, n]` that this process's nodes want, where node i wants those of the nodes `wanted[i]`.

        Every process sends to each other process the rows that it wants, each once.
        """
        by_process = [sorted({j for i in part for j in wanted[i]}) for part in self.parts]
        here, others = self.wire.rank, [r for r in range(len(self.parts)) if r != self.wire.rank]
        sent = {r: [j - self.first for j in by_process[r] if self._is_here(j)] for r in others}
        received = {r: [j for j in by_process[here] if j in self.parts[r]] for r in others}
        arrived = self.wire.exchange(
            {r: x[rows] for r, rows in sent.items() if rows},
            {r: x.new_empty(len(nodes), x.shape[1]) for r, nodes in received.items() if nodes},
        )
        rows = {j: x[j - self.first : j - self.first + 1] for j in by_process[here] if self._is_here(j)}
        for r, block in arrived.items():
            rows.update(zip(received[r], block.split(1)))
        return rows

    def process_of(self, node: int) -> int:
        """Return the rank of the process that holds a node."""
        return next(rank for rank, part in enumerate(self.parts) if node in part)

    @property
    def _alone(self) -> bool:
        """Whether this process hands over nothing when all nodes meet."""
        return self.looks_on or len(self.ranks) == 1

    def _told(self, x: Tensor) -> Tensor:
        """Tell those who hold none of the nodes what all of them get."""
        return self.wire.tell(x, self.ranks[0], self.onlookers) if self.onlookers else x

    def _is_here(self, node: int) -> bool:
        return node in self.parts[self.wire.rank]


def tensors_text(x: Tensor | Tree) -> str:
    """Describe what one node hands to a collective.

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
    ValueError: num_processes=3 must divide num_nodes=4, so that each process holds as many nodes: one of [1, 2, 4].
    """
    if num_nodes % num_processes != 0:
        divisors = [n for n in range(1, num_nodes + 1) if num_nodes % n == 0]
        raise ValueError(
            f"num_processes={num_processes} must divide num_nodes={num_nodes}, so that each process holds as many "
            f"nodes: one of {divisors}."
        )


def in_buckets(x: Tree, bucket_bytes: float, operation: Callable[[Tensor], Tensor], gradients: bool = False) -> Tree:
    """Apply `operation` to the tensors of `x`, joined: it maps `[R, n]` to `[..., n]`, each column by itself.

    >>> values = {"a": torch.ones(2, 3), "b": torch.ones(2, 2, 2), "c": torch.ones(2)}
    >>> {name: y.shape for name, y in in_buckets(values, 40, lambda y: y.sum(0, keepdim=True)).items()}
    {'a': torch.Size([1, 3]), 'b': torch.Size([1, 2, 2]), 'c': torch.Size([1])}
    """
    results: Tree = {}
    for names in buckets(x, bucket_bytes, gradients):
        parts = [x[name].reshape(len(x[name]), math.prod(x[name].shape[1:])) for name in names]
        joined = operation(torch.cat(parts, 1) if len(parts) > 1 else parts[0])
        for name, part in zip(names, joined.split([part.shape[1] for part in parts], -1)):
            # A tensor of its own where it would be a slice of rows: fused optimizers ignore strides.
            results[name] = part.contiguous().view(*joined.shape[:-1], *x[name].shape[1:])
    return {name: results[name] for name in x}


def buckets(x: Tree, bucket_bytes: float, gradients: bool = False) -> Iterator[list[str]]:
    """Group the names in `x` by type and number of rows, and these into messages, last first; see `bucketed`.

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


def _partial(x: Tensor, count: int) -> Tensor:
    """Return this process's part of a sum, or of an average over `count` nodes: `[L, n] -> [1, n]`, a new tensor.

    Divided before the processes add up, as DistributedDataParallel does: the sum of halves fits where that of the
    whole might not.
    """
    part = x.sum(0, keepdim=True, dtype=x.dtype)
    return part / count if count > 1 else part
