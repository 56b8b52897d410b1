"""Shards and batches: the examples of a node at a step are a pure function of (seed, step, node).

`Batches` gives trees of `[L, B, ...]` for training, `EvalBatches` ordinary batches `[B, ...]` for evaluation.
Nothing depends on which other nodes are in this process, on the number of workers, or on earlier
reads: a run resumes at any step without reading the steps before it. The functions `partition_*` assign
the examples to the nodes in other ways than dealing them in turn.

Three ways to read, fastest first:

1. `TensorDataset`, `TokenWindows`, a bare tensor, and `Subset`s of them: one gather for all nodes, no Python
   per example.
2. A dataset with `__getitems__(indices)`: one call for all nodes. A returned `list` holds examples, which are
   collated as `DataLoader` does; anything else (tensor, tuple, dict ...) is the collated batch, with leaves
   `[len(indices), ...]`. The second form is vecgym's extension of the protocol.
3. Any other dataset: one `dataset[i]` per example, then `default_collate`.

A custom `collate_fn` always gets the list of examples of one node's batch. Containers are those that
`DataLoader` returns (a list for examples that are tuples); any mapping becomes a plain dict.

Random numbers that a dataset or `collate_fn` draws from the global generators of `random`, `numpy` and
`torch` (CPU) are seeded by (seed, step, node), and the global states are restored afterwards. Only inside one
`__getitems__` call for several nodes does a draw depend on which nodes share the call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from vecgym.core import check, rng, tree
from vecgym.core.errors import warn
from vecgym.core.nodes import join_rows
from vecgym.data.checks import checked_node_ids, is_factory
from vecgym.data.partition import has_sorted_labels
from vecgym.data.source import Batch, Request, Source

USUAL_BATCH = 16  # of `Trainer.fit`, when no batch size is given: small data need not fill it
CACHED_INDICES = 2**20  # of the epochs' orders, beyond the epochs in use
CACHE_BYTES = 256 * 2**20  # an evaluation set up to this size stays in memory after the first pass


class Examples(Protocol):
    """A map-style dataset: anything with a length and random access.

    >>> class Squares:
    ...     def __len__(self):
    ...         return 8
    ...     def __getitem__(self, index):
    ...         return torch.tensor(index**2)
    >>> Batches(Squares(), num_nodes=2, batch_size=2, shuffle=False).batch(0)
    tensor([[0, 4],
            [1, 9]])
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


Factory = Callable[[int, int, bool], Any]  # (rank, num_nodes, train) -> one node's own dataset


class Batches:
    """The training batches of `L` of the `K` nodes: step -> a tree of `[L, B, ...]`.

    `dataset` is either one map-style dataset, dealt to the nodes exactly as `DistributedSampler(dataset,
    num_nodes, node, shuffle, seed)` with `set_epoch(epoch)` deals it, or a factory `(rank, num_nodes, train)
    -> Dataset`, called once per node in this process; each node then reads its own whole dataset, shuffled by
    `rng.key(seed, "data", epoch, node)`.

    A batch is never larger than a node's shard. If `B` exceeds the shards of one dealt dataset, a batch is the whole
    shard of each node. A node of a factory with fewer than `B` examples sees all of them in each step, and its loss
    is their mean: they fill the first of the `B` places and repeat up to the last, and `limits` is the number that
    counts. (A node with little data sees it more often.)

    An epoch is `ceil(longest / B)` steps, `longest` being the length of the longest shard. Shorter shards repeat
    cyclically (in their shuffled order) up to it, as DistributedSampler pads. If `B` does not divide `longest`, the
    last batch of an epoch is smaller on all nodes; `dataloader_kwargs={"drop_last": True}` drops it.

    With `own_epochs` a node's epoch is a pass over its own shard, each example once: `ceil(shard / B)` steps, the last
    batch smaller (with `drop_last` left out, unless it is the only one). Read nodes by `read`, each at its own step.

    Streams read tensors up to 32 steps ahead, and again if the dataset has changed since. Changes that torch does not
    see, by numpy or `.data`, reach the batches that late, as changes of any dataset do with workers.

    Arguments: `num_nodes` K; `batch_size` B, examples per node and step; `node_ids` the global ids of the
    nodes in this process (default all); `dataloader_kwargs` goes to `DataLoader` (workers, `collate_fn` ...), where
    a worker reads the batch of all L nodes of a step; `device` where the leaves go (a `TensorDataset` that is
    already there is gathered there); `agree` maps the longest shard in this process to the longest of all
    processes, which only a run of several processes with a factory needs (a max all-reduce).

    Errors, all at construction: `TypeError` if the dataset is not map-style and for unknown
    `dataloader_kwargs`; `ValueError` for an empty dataset, `drop_last` that leaves no batch, and keys that
    vecgym sets itself.

    >>> batches = Batches(torch.arange(8), num_nodes=2, batch_size=2, shuffle=False)
    >>> batches[0], batches.steps_per_epoch
    (tensor([[0, 2],
            [1, 3]]), 2)
    """

    def __init__(
        self, dataset: Examples | Dataset[Any] | Factory, num_nodes: int, batch_size: int, *, seed: int = 42,
        shuffle: bool = True, train: bool = True, node_ids: Iterable[int] | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None, device: torch.device | str | None = None,
        agree: Callable[[int], int] | None = None, own_epochs: bool = False, name: str = "train_dataset",
    ):  # fmt: skip
        self.dataset, self.own_epochs = dataset, check.flag("own_epochs", own_epochs)
        self.num_nodes = check.integer("num_nodes", num_nodes, 1)
        self.node_ids = checked_node_ids(node_ids, self.num_nodes)
        self.batch_size = check.integer("batch_size", batch_size, 1)
        self.seed = check.seed("seed", seed)
        self.shuffle = check.flag("shuffle", shuffle)
        train = check.flag("train", train)
        self._source = Source(dataset, self.num_nodes, self.node_ids, train, self.seed, device, dataloader_kwargs, name)
        lengths, shared = self._source.lengths, self._source.shared
        # Examples of each node in this process, before padding.
        dealt = tuple(len(range(node, lengths[0], self.num_nodes)) for node in self.node_ids)
        self.shard_sizes, longest = (dealt, -(-lengths[0] // self.num_nodes)) if shared else (lengths, max(lengths))
        # Examples per node and epoch, with padding.
        self.epoch_length = longest if shared or agree is None else int(check.called("agree", agree, longest))
        full, rest = divmod(self.epoch_length, self.batch_size)
        self.steps_per_epoch = full if self._source.drop_last else full + (rest > 0)
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"drop_last leaves no batch: batch_size={self.batch_size}, but {name} has at most {self.epoch_length} "
                f"examples for each of {self.num_nodes} nodes. Fix: batch_size={self.epoch_length}, or no drop_last"
            )
        if train and shared:
            self._warn(lengths[0], name)
        self._orders: dict[int, Tensor] = {}  # epoch -> [L, longest]

    def _warn(self, count: int, name: str) -> None:
        """Warn about data that are dealt in a way that is probably a mistake."""
        if count < self.num_nodes:
            warn(f"{name} has {count} examples for {self.num_nodes} nodes: several nodes train on the same ones.")
        if self.batch_size > max(count, USUAL_BATCH):
            warn(
                f"batch_size={self.batch_size}, but {name} has {count} examples: each of {self.num_nodes} nodes uses "
                f"its {self.epoch_length} in every step. Give batch_size={self.epoch_length}, or less."
            )
        if not self.shuffle and self.num_nodes > 1 and has_sorted_labels(self.dataset):
            warn(
                f"shuffle=False, and the labels of {name} are sorted: all nodes train on one class after the other. "
                "Leave shuffle out, or shuffle the dataset."
            )

    def batch(self, step: int) -> Batch:
        """Read the batch of any step >= 0, with leaves `[L, B, ...]`, without workers.

        >>> Batches(torch.arange(8), num_nodes=2, batch_size=2, shuffle=False).batch(1)
        tensor([[4, 6],
                [5, 7]])
        """
        return self._source.read(*self._request(check.integer("step", step, 0)))

    __getitem__ = batch

    @property
    def limits(self) -> tuple[int, ...] | None:
        """The most distinct examples in a batch of each node in this process; None: never fewer than B.

        >>> Batches(lambda rank, num_nodes, train: torch.arange(5 - 3 * rank), num_nodes=2, batch_size=4).limits
        (5, 2)
        """
        return self.limits_of(self.shard_sizes)

    def limits_of(self, shard_sizes: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the `limits` of nodes with shards of these sizes, which may be in other processes.

        >>> Batches(lambda rank, num_nodes, train: torch.arange(5), num_nodes=2, batch_size=4).limits_of((5, 2))
        (5, 2)
        """
        whole = not self.own_epochs and (self._source.shared or min(shard_sizes) >= self.batch_size)
        return None if whole else shard_sizes

    def width(self, step: int, shard_size: int | None = None) -> int:
        """Return the number of distinct examples in a node's batch at its own step, fewer in the last one of an epoch.

        Args:
            shard_size: the node's, where it counts: one of its `limits`.

        >>> [Batches(torch.arange(10), num_nodes=2, batch_size=3).width(step) for step in range(3)]
        [3, 2, 3]
        """
        width = self._spot(step, shard_size)[2]
        return width if shard_size is None else min(width, max(1, shard_size))

    def _spot(self, step: int, shard_size: int | None) -> tuple[int, int, int]:
        """Return the epoch of a node's step, the place of its first example in the epoch's order, and their number."""
        length, per_epoch = self.epoch_length, self.steps_per_epoch
        if self.own_epochs and shard_size is not None:
            length = max(1, shard_size)
            per_epoch = steps_of_pass(length, self.batch_size, self._source.drop_last)
        epoch, step_of_epoch = divmod(step, per_epoch)
        first = step_of_epoch * self.batch_size
        return epoch, first, min(self.batch_size, length - first)

    def read(
        self, requests: Iterable[tuple[Sequence[int], int | Sequence[int]]], shard_sizes: tuple[int, ...] | None = None
    ) -> Iterator[tuple[Batch, list[int] | None]]:
        """Yield the batch of each request and the number of distinct examples in each row, with workers if set.

        Where nodes are at different steps, B is that of the largest batch; the examples of a smaller one fill the first
        of the B places, and repeat.

        Args:
            requests: nodes in this process, ascending, and the number of the batch that they read: one for all of
                them, or one per node.
            shard_sizes: the shard sizes of all nodes of the run, if some are in other processes.

        >>> batches = Batches(torch.arange(6), num_nodes=2, batch_size=2, shuffle=False)
        >>> list(batches.read([([0, 1], 0), ([0, 1], [0, 1]), ([1], 1)]))[1:]
        [(tensor([[0, 2],
                [5, 5]]), [2, 1]), (tensor([[5]]), [1])]
        """
        limited = self.limits_of(self.shard_sizes if shard_sizes is None else shard_sizes) is not None
        local_limits: Sequence[int | None] = self.shard_sizes if limited else [None] * len(self.node_ids)
        places = {node: row for row, node in enumerate(self.node_ids)}

        def located() -> Iterator[tuple[Request, list[int] | None]]:
            for nodes, counts in requests:
                if isinstance(counts, int) and len(nodes) == len(self.node_ids) and not self.own_epochs:
                    yield self._request(counts), list(self.shard_sizes) if limited else None
                else:
                    rows = [places[node] for node in nodes]
                    steps = [counts] * len(rows) if isinstance(counts, int) else counts
                    indices, limits = self._located(steps, rows, local_limits)
                    yield (steps, indices, rows), limits

        ahead, limited_ahead = itertools.tee(located())  # workers read ahead
        batches = self._source.stream(request for request, _ in ahead)
        # a generator, whose close() ends the workers
        return ((batch, limits) for batch, (_, limits) in zip(batches, limited_ahead))

    def _located(
        self, steps: Sequence[int], rows: Sequence[int], local_limits: Sequence[int | None]
    ) -> tuple[Tensor, list[int]]:  # fmt: skip
        """Return the indices `[n, B]` that nodes read, each at its own step, and how many of them are distinct."""
        limits = [self.width(step, local_limits[row]) for step, row in zip(steps, rows)]
        epochs, first, widths = zip(*[self._spot(step, local_limits[row]) for step, row in zip(steps, rows)])
        different = dict.fromkeys(epochs)
        # Nodes at different steps return to an epoch: cache the orders if they are small.
        spare = CACHED_INDICES // (self.epoch_length * len(self.node_ids))
        orders = {epoch: self._order(epoch, keep=len(different) + spare) for epoch in different}
        indices = [orders[e][row, a : a + width] for e, row, a, width in zip(epochs, rows, first, widths)]
        if min(widths) < max(widths):
            indices = [x.repeat(-(-max(widths) // len(x)))[: max(widths)] for x in indices]
        return torch.stack(indices), limits

    def iterate(self, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """Yield the batches of the steps from `start` to `stop`, endlessly if `stop` is None, with workers if set.

        >>> [x.tolist() for x in Batches(torch.arange(3), 1, 2, shuffle=False).iterate(1, 4)]
        [[[2]], [[0, 1]], [[2]]]
        """
        start = check.integer("start", start, 0)
        steps = itertools.count(start) if stop is None else range(start, check.integer("stop", stop, 0))
        return self._source.stream(map(self._request, steps))

    def __iter__(self) -> Iterator[Batch]:
        """Yield all batches from step 0 on, endlessly."""
        return self.iterate()

    def _request(self, step: int) -> tuple[int, Tensor]:
        epoch, first, _ = self._spot(step, None)
        return step, self._order(epoch)[:, first : first + self.batch_size]

    def _order(self, epoch: int, keep: int = 1) -> Tensor:
        """Return the examples that each node reads in an epoch, in order: indices `[L, epoch_length]`."""
        if epoch not in self._orders:
            while len(self._orders) > keep:  # workers read ahead into the next epoch: keep two
                self._orders.pop(next(iter(self._orders)))
            order = self._dealt(epoch) if self._source.shared else self._separate(epoch)
            self._orders[epoch] = self._source.locate(order)
        return self._orders[epoch]

    def _dealt(self, epoch: int) -> Tensor:
        """Deal one dataset to the nodes in turn, as DistributedSampler does."""
        order = self._shuffled(self._source.lengths[0], torch.Generator().manual_seed(self.seed + epoch))
        total = self.epoch_length * self.num_nodes
        rounds = order.repeat(-(-total // len(order)))[:total].view(self.epoch_length, self.num_nodes)
        return rounds.t().index_select(0, torch.tensor(self.node_ids))

    def _separate(self, epoch: int) -> Tensor:
        """Order each node's own dataset independently."""
        rows, places = [], torch.arange(self.epoch_length)
        for node, length in zip(self.node_ids, self._source.lengths):
            order = self._shuffled(length, rng.generator(self.seed, "data", epoch, node))
            rows.append(order[places % length])
        return torch.stack(rows)

    def _shuffled(self, length: int, generator: torch.Generator) -> Tensor:
        return torch.randperm(length, generator=generator) if self.shuffle else torch.arange(length)


def steps_of_pass(num_examples: int, batch_size: int, drop_last: bool = False) -> int:
    """Count the batches of a pass over a node's examples, at least one.

    >>> steps_of_pass(20, 6), steps_of_pass(20, 6, drop_last=True), steps_of_pass(5, 6, drop_last=True)
    (4, 3, 1)
    """
    return max(1, num_examples // batch_size if drop_last else -(-num_examples // batch_size))


def num_steps(batches: Batches, num_epochs: int = 1, max_steps: int | None = None) -> int:
    """Count the steps of a run: `max_steps` if given (the data repeats as needed), else full epochs.

    >>> batches = Batches(torch.arange(10), num_nodes=1, batch_size=4)
    >>> num_steps(batches, num_epochs=2), num_steps(batches, max_steps=100)
    (6, 100)
    """
    num_epochs = check.integer("num_epochs", num_epochs, 0)
    max_steps = check.optional_integer("max_steps", max_steps, 0)
    return num_epochs * batches.steps_per_epoch if max_steps is None else max_steps


class EvalBatches:
    """The validation set in batches: an iterable of `(batch, number of examples)`, the same on every pass.

    One dataset is the same for all nodes: leaves are `[B, ...]`, without a node dimension. A factory is called
    as `factory(rank, num_nodes, False)` for each node in this process, and every node reads the whole of its own
    dataset: leaves are `[n, B, ...]`, of the nodes that have so many examples left. `places` says for each batch which
    of the L nodes in this process those are; None: all.

    Examples come in a fixed order that depends on the seed alone; `val_size` is how many of them are read (of each
    node), from the first on (all if None or larger than the dataset). `sizes` is how many that are, one number for
    each node in this process, or one for all, and `num_examples` the most of them. A batch may be smaller than B:
    weight means by the number of examples. Batches of up to `CACHE_BYTES` in total are cached after the first full
    pass; do not write into them. `drop_last` among `dataloader_kwargs` is for training and has no effect here. Errors
    as in `Batches`.

    >>> [(x.tolist(), count) for x, count in EvalBatches(torch.arange(3), 2, seed=1)]
    [([0, 2], 2), ([1], 1)]
    >>> batches = EvalBatches(lambda rank, num_nodes, train: torch.arange(2 + rank) + 10 * rank, 2, num_nodes=2, seed=1)
    >>> [(x.tolist(), count) for x, count in batches], batches.places, batches.sizes
    ([([[1, 0], [11, 12]], 2), ([[10]], 1)], [None, [1]], (2, 3))
    """

    def __init__(
        self,
        dataset: Examples | Dataset[Any] | Factory,
        batch_size: int,
        val_size: int | None = None,
        num_nodes: int = 1,
        *,
        seed: int = 42,
        node_ids: Iterable[int] | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
        name: str = "val_dataset",
    ):
        self.batch_size = check.integer("batch_size", batch_size, 1)
        num_nodes = check.integer("num_nodes", num_nodes, 1)
        self.per_node = is_factory(dataset)  # leaves [L, B, ...] instead of [B, ...]
        self.node_ids = checked_node_ids(node_ids, num_nodes)
        rows = self.node_ids if self.per_node else (0,)
        seed = check.seed("seed", seed)
        self._source = Source(dataset, num_nodes, rows, False, seed, device, dataloader_kwargs, name)
        most = max(self._source.lengths) if val_size is None else check.integer("val_size", val_size, 1)
        self.sizes = tuple(min(length, most) for length in self._source.lengths)
        self.num_examples = max(self.sizes)
        orders = [
            torch.randperm(length, generator=rng.generator(seed, "eval", row))[torch.arange(self.num_examples) % size]
            for row, length, size in zip(rows, self._source.lengths, self.sizes)
        ]
        self._order = self._source.locate(torch.stack(orders))  # [L or 1, longest], the shorter ones repeated
        self._cuts = list(self._cut())
        self.places: list[list[int] | None] = [None if len(at) == len(rows) else at for at, _, _ in self._cuts]
        self._cache: list[tuple[Batch, int]] | None = None

    def __len__(self) -> int:
        """Count the batches."""
        return len(self._cuts)

    def _cut(self) -> Iterator[tuple[list[int], int, int]]:
        """Yield the nodes of each batch, which all read as many examples, with the first one and their number."""
        for first in range(0, self.num_examples, self.batch_size):
            counts = [min(self.batch_size, size - first) for size in self.sizes]
            for count in sorted({count for count in counts if count > 0}, reverse=True):
                yield [node for node, own in enumerate(counts) if own == count], first, count

    def __iter__(self) -> Iterator[tuple[Batch, int]]:
        if self._cache is not None:
            yield from self._cache
            return
        cache, num_bytes = [], 0
        for item in self._read():
            num_bytes += tree.num_bytes(item[0])
            if num_bytes <= CACHE_BYTES:
                cache.append(item)
            else:
                cache.clear()
            yield item
        self._cache = cache if num_bytes <= CACHE_BYTES else None

    def _read(self) -> Iterator[tuple[Batch, int]]:
        def request(number: int) -> Request:
            (_, first, count), at = self._cuts[number], self.places[number]
            order = self._order[:, first : first + count]
            return (number, order) if at is None else (number, order[at], at)

        for (_, _, count), batch in zip(self._cuts, self._source.stream(map(request, range(len(self))))):
            yield (batch if self.per_node else tree.map_leaves(itemgetter(0), batch)), count


def chosen_batches(batches: Sequence[Any], which: Sequence[int]) -> Any:
    """Concatenate the batches of C configurations, out of S distinct ones: `[K, B, ...]` -> `[C * K, B, ...]`.

    >>> chosen_batches([torch.tensor([[1]]), torch.tensor([[2]])], [0, 1, 1]).T
    tensor([[1, 2, 2]])
    """
    if len(which) == 1:
        return batches[which[0]]
    if len(batches) == 1:
        return tree.map_leaves(lambda x: x.repeat(len(which), *[1] * (x.dim() - 1)), batches[0])
    return join_rows([batches[i] for i in which])


def places(objects: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Return the distinct objects of a sequence, and the index of each object among them.

    >>> places(["a", "b", "a"])
    (['a', 'b'], [0, 1, 0])
    """
    distinct = list({id(x): x for x in objects}.values())
    place = {id(x): i for i, x in enumerate(distinct)}
    return distinct, [place[id(x)] for x in objects]
