"""Shards and batches: what a node reads at a step is a pure function of (seed, step, node).

`Batches` gives trees of `[L, B, ...]` for training, `EvalBatches` ordinary batches `[B, ...]` for evaluation.
Nothing depends on which other nodes are in this process, on the number of workers, or on what was read
before, so a run resumes at any step without reading the steps before it. `partition_dirichlet` and its like
say which node holds which examples, where they are not simply dealt.

Three ways to read, fastest first:

1. `TensorDataset`, `TokenWindows`, a bare tensor, and `Subset`s of them: one gather for all nodes, no Python
   per example.
2. A dataset with `__getitems__(indices)`: one call for all nodes. A returned `list` holds examples, which are
   collated as `DataLoader` does; anything else (tensor, tuple, dict ...) is taken as the batch already, its
   leaves `[len(indices), ...]`. The second form is vecgym's extension of the protocol.
3. Any other dataset: one `dataset[i]` per example, then `default_collate`.

A custom `collate_fn` always gets the list of examples of one node's batch. Containers come out as
`DataLoader` gives them (examples that are tuples make a list); any mapping comes out as a plain dict.

Random numbers that a dataset or `collate_fn` draws from the global generators of `random`, `numpy` and
`torch` (CPU) are seeded by (seed, step, node), and the global states are put back afterwards. Only inside one
`__getitems__` call for several nodes does a draw depend on which nodes share the call.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import numbers
import operator
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from vecgym.core import check, rng, tree
from vecgym.core.errors import warn

CACHE_BYTES = 256 * 2**20  # an evaluation set up to this size stays in memory once it was read

Batch = Any  # a tensor, or nested dicts, lists and (named) tuples of tensors


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


# ---------------------------------------------------------------------------------------------- training


class Batches:
    """The training batches of `L` of the `K` nodes: step -> a tree of `[L, B, ...]`.

    `dataset` is either one map-style dataset, dealt to the nodes exactly as `DistributedSampler(dataset,
    num_nodes, node, shuffle, seed)` with `set_epoch(epoch)` deals it, or a factory `(rank, num_nodes, train)
    -> Dataset`, called once per node here; each node then reads its own whole dataset, shuffled by
    `rng.key(seed, "data", epoch, node)`.

    A batch is never larger than a node's shard: with `B` beyond the shards that one dataset is dealt into, a batch is
    the whole shard of each node; a node of a factory that has fewer than `B` examples sees all of them in each step,
    and its loss is their mean. They fill the first of the `B` places, and repeat up to the last; `limits` says how many
    count. (All nodes make the same number of steps: a node with little data sees it more often. Steps of its own, as
    many as its data gives, there are none yet.)

    An epoch is `ceil(longest / B)` steps, `longest` being the longest shard. Shorter shards repeat cyclically
    (in their shuffled order) up to it, as DistributedSampler pads. If `B` does not divide `longest`, the last
    batch of an epoch is smaller, on all nodes alike; `dataloader_kwargs={"drop_last": True}` drops it.

    Arguments: `num_nodes` K; `batch_size` B, examples per node and step; `node_ids` the global ids of the
    nodes here (default all); `dataloader_kwargs` goes to `DataLoader` (workers, `collate_fn` ...), where a
    worker makes the batch of all L nodes of a step; `device` where the leaves go (a `TensorDataset` that is
    there already is gathered there); `agree` maps the longest shard in this process to the longest anywhere,
    which only a run of several processes with a factory needs (a max all-reduce).

    Errors, all at construction: `TypeError` for what is not a map-style dataset and for unknown
    `dataloader_kwargs`; `ValueError` for an empty dataset, `drop_last` that leaves no batch, and keys that
    vecgym owns.

    >>> batches = Batches(torch.arange(8), num_nodes=2, batch_size=2, shuffle=False)
    >>> batches[0], batches.steps_per_epoch
    (tensor([[0, 2],
            [1, 3]]), 2)
    """

    def __init__(
        self,
        dataset: Examples | Dataset[Any] | Factory,
        num_nodes: int,
        batch_size: int,
        *,
        seed: int = 42,
        shuffle: bool = True,
        train: bool = True,
        node_ids: Iterable[int] | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
        agree: Callable[[int], int] | None = None,
        name: str = "train_dataset",
    ):
        self.dataset = dataset
        self.num_nodes = check.integer("num_nodes", num_nodes, 1)
        self.node_ids = _node_ids(node_ids, self.num_nodes)
        self.batch_size = check.integer("batch_size", batch_size, 1)
        self.seed = check.seed("seed", seed)
        self.shuffle = check.flag("shuffle", shuffle)
        self._source = _Source(
            dataset,
            self.num_nodes,
            self.node_ids,
            check.flag("train", train),
            self.seed,
            device,
            dataloader_kwargs,
            name,
        )
        lengths, shared = self._source.lengths, self._source.shared
        # examples of each node here, before padding
        self.shard_sizes = _dealt_sizes(lengths[0], self.num_nodes, self.node_ids) if shared else lengths
        longest = -(-lengths[0] // self.num_nodes) if shared else max(lengths)
        if agree is not None and not callable(agree):
            raise TypeError(f"agree is {check.kind_of(agree)}; give a function of the longest shard, or None.")
        self._longest = agree(longest) if agree and not shared else longest
        self.epoch_length = self._longest  # examples of each node in an epoch, padding counted
        whole, rest = divmod(self._longest, self.batch_size)
        self.steps_per_epoch = whole if self._source.drop_last else whole + (rest > 0)
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"drop_last leaves no batch: batch_size={self.batch_size}, and {name} has at most {self._longest} "
                f"examples for each of {self.num_nodes} nodes. Fix: batch_size={self._longest}, or no drop_last"
            )
        self._orders: dict[int, Tensor] = {}  # epoch -> [L, longest]

    def batch(self, step: int) -> Batch:
        """The batch of any step >= 0, leaves `[L, B, ...]`; without workers.

        >>> Batches(torch.arange(8), num_nodes=2, batch_size=2, shuffle=False).batch(1)
        tensor([[4, 6],
                [5, 7]])
        """
        return self._source.read(*self._request(check.integer("step", step, 0)))

    __getitem__ = batch

    @property
    def limits(self) -> tuple[int, ...] | None:
        """The most examples of a batch that are a node's own, of each node here; None where all always are.

        >>> Batches(lambda rank, num_nodes, train: torch.arange(5 - 3 * rank), num_nodes=2, batch_size=4).limits
        (5, 2)
        """
        return self.limits_of(self.shard_sizes)

    def limits_of(self, shard_sizes: tuple[int, ...]) -> tuple[int, ...] | None:
        """Likewise of nodes with these shards, which may be in other processes.

        >>> Batches(lambda rank, num_nodes, train: torch.arange(5), num_nodes=2, batch_size=4).limits_of((5, 2))
        (5, 2)
        """
        return None if self._source.shared or min(shard_sizes) >= self.batch_size else shard_sizes

    def width(self, step: int) -> int:
        """B at a step: the last batch of an epoch may be smaller.

        >>> [Batches(torch.arange(10), num_nodes=2, batch_size=3).width(step) for step in range(3)]
        [3, 2, 3]
        """
        return min(self.batch_size, self.epoch_length - step % self.steps_per_epoch * self.batch_size)

    def iterate(self, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """The batches of the steps `start` up to `stop`, without end when None; with workers if asked for.

        >>> [x.tolist() for x in Batches(torch.arange(3), 1, 2, shuffle=False).iterate(1, 4)]
        [[[2]], [[0, 1]], [[2]]]
        """
        start = check.integer("start", start, 0)
        steps = itertools.count(start) if stop is None else range(start, check.integer("stop", stop, 0))
        return self._source.stream(map(self._request, steps))

    def __iter__(self) -> Iterator[Batch]:
        """All batches from step 0 on, without end."""
        return self.iterate()

    def _request(self, step: int) -> tuple[int, Tensor]:
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        first = step_of_epoch * self.batch_size
        return step, self._order(epoch)[:, first : first + self.batch_size]

    def _order(self, epoch: int) -> Tensor:
        """Which example of its dataset each node reads at each place of the epoch, `[L, longest]`."""
        if epoch not in self._orders:
            while len(self._orders) > 1:  # workers run ahead into the next epoch: keep two
                self._orders.pop(next(iter(self._orders)))
            make = self._dealt if self._source.shared else self._own
            self._orders[epoch] = self._source.locate(make(epoch))
        return self._orders[epoch]

    def _dealt(self, epoch: int) -> Tensor:
        """One dataset dealt to the nodes in turn, as DistributedSampler does."""
        length = self._source.lengths[0]
        shuffled = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(length, generator=shuffled) if self.shuffle else torch.arange(length)
        total = self._longest * self.num_nodes
        rounds = order.repeat(-(-total // length))[:total].view(self._longest, self.num_nodes)
        return rounds.t().index_select(0, torch.tensor(self.node_ids))

    def _own(self, epoch: int) -> Tensor:
        """Each node's own dataset in its own order."""
        rows, places = [], torch.arange(self._longest)
        for node, length in zip(self.node_ids, self._source.lengths):
            shuffled = rng.generator(self.seed, "data", epoch, node)
            order = torch.randperm(length, generator=shuffled) if self.shuffle else torch.arange(length)
            rows.append(order[places % length])
        return torch.stack(rows)


def _dealt_sizes(length: int, num_nodes: int, node_ids: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(len(range(node, length, num_nodes)) for node in node_ids)


def num_steps(batches: Batches, num_epochs: int = 1, max_steps: int | None = None) -> int:
    """How many steps a run takes: `max_steps` when given (the data repeats as needed), else whole epochs.

    >>> batches = Batches(torch.arange(10), num_nodes=1, batch_size=4)
    >>> num_steps(batches, num_epochs=2), num_steps(batches, max_steps=100)
    (6, 100)
    """
    if max_steps is not None:
        return check.integer("max_steps", max_steps, 0)
    return check.integer("num_epochs", num_epochs, 0) * batches.steps_per_epoch


# -------------------------------------------------------------------------------------------- evaluation


class EvalBatches:
    """The validation set in batches: an iterable of `(batch, number of examples)`, the same at every pass.

    One dataset is the same for all nodes: leaves are `[B, ...]`, without a node dimension. A factory is
    called as `factory(rank, num_nodes, False)` for each node here: leaves are `[L, B, ...]`, and the shortest
    node's length is the number of examples of every node, so that each node's mean has the same weight.

    Examples come in a fixed order that depends on the seed alone; `val_size` takes the first so many of it
    (all when None or larger than the dataset). The last batch may be smaller: weight means by the number of
    examples. Batches of up to `CACHE_BYTES` in all are kept after the first full pass; do not write into
    them. `drop_last` among `dataloader_kwargs` is for training and has no effect here. `agree` maps the
    shortest length in this process to the shortest anywhere (a min all-reduce). Errors as in `Batches`.

    >>> [(x.tolist(), count) for x, count in EvalBatches(torch.arange(3), 2, seed=1)]
    [([0, 2], 2), ([1], 1)]
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
        agree: Callable[[int], int] | None = None,
        name: str = "val_dataset",
    ):
        self.batch_size = check.integer("batch_size", batch_size, 1)
        num_nodes = check.integer("num_nodes", num_nodes, 1)
        self.per_node = _is_factory(dataset)  # leaves [L, B, ...] instead of [B, ...]
        self.node_ids = _node_ids(node_ids, num_nodes)
        rows = self.node_ids if self.per_node else (0,)
        seed = check.seed("seed", seed)
        self._source = _Source(dataset, num_nodes, rows, False, seed, device, dataloader_kwargs, name)
        length = min(self._source.lengths)
        length = agree(length) if agree and self.per_node else length
        self.num_examples = length if val_size is None else min(length, check.integer("val_size", val_size, 1))
        self._order = self._source.locate(self._fixed_order(rows, seed))  # [L or 1, num_examples]
        self._cache: list[tuple[Batch, int]] | None = None

    def __len__(self) -> int:
        """The number of batches."""
        return -(-self.num_examples // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Batch, int]]:
        if self._cache is not None:
            yield from self._cache
            return
        kept, kept_bytes = [], 0
        for item in self._read():
            kept_bytes += tree.num_bytes(item[0])
            if kept_bytes <= CACHE_BYTES:
                kept.append(item)
            else:
                kept.clear()
            yield item
        self._cache = kept if kept_bytes <= CACHE_BYTES else None

    def _read(self) -> Iterator[tuple[Batch, int]]:
        parts = self._order.split(self.batch_size, dim=1)
        for part, batch in zip(parts, self._source.stream(enumerate(parts))):
            yield (batch if self.per_node else tree.map_leaves(_drop_node_dim, batch)), part.shape[1]

    def _fixed_order(self, rows: tuple[int, ...], seed: int) -> Tensor:
        orders = [
            torch.randperm(length, generator=rng.generator(seed, "eval", row))[: self.num_examples]
            for row, length in zip(rows, self._source.lengths)
        ]
        return torch.stack(orders)


def _drop_node_dim(x: Tensor) -> Tensor:
    return x[0]


# ----------------------------------------------------------------------------------------- text, tokens


class TokenWindows(Dataset[tuple[Tensor, Tensor]]):
    """All windows of a text: item i is `(tokens[i:i+context], tokens[i+1:i+context+1])`.

    `tokens` is a 1-D integer tensor `[n]`; the length is `n - context`, the windows are int64. A whole batch
    is two gathers from strided views. Errors: `ValueError` for a text shorter than `context + 1` tokens.

    >>> TokenWindows(torch.arange(10), context=3)[4]
    (tensor([4, 5, 6]), tensor([5, 6, 7]))
    """

    def __init__(self, tokens: Tensor, context: int):
        self.context = check.integer("context", context, 1)
        _check_tokens(tokens)
        if len(tokens) <= self.context:
            raise ValueError(
                f"tokens has {len(tokens)} tokens, too few for one window with context={context}. "
                f"Allowed: at least context + 1 = {context + 1}. Fix: a longer text or a smaller context"
            )
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens) - self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index % len(self)
        window = self.tokens[start : start + self.context + 1].long()
        return window[:-1], window[1:]

    def __getitems__(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """The windows of many indices at once: two tensors `[len(indices), context]`."""
        index = torch.as_tensor(indices, dtype=torch.long, device=self.tokens.device)
        inputs = self.tokens[:-1].unfold(0, self.context, 1)  # a view [n - context, context], nothing copied
        targets = self.tokens[1:].unfold(0, self.context, 1)
        return inputs.index_select(0, index).long(), targets.index_select(0, index).long()


def encode_text(text: str, vocabulary: str | None = None) -> tuple[Tensor, str]:
    """Characters as tokens: int64 `[len(text)]`, and the vocabulary (default: the text's characters, sorted).

    Errors: `ValueError` for an empty text or a character that a given vocabulary lacks.

    >>> encode_text("hello")
    (tensor([1, 0, 2, 2, 3]), 'ehlo')
    """
    check.instance("text", text, str, "a str")
    check.instance("vocabulary", vocabulary, (str, type(None)), "a str of all characters, or None")
    if not text:
        raise ValueError("text is empty. Allowed: at least one character")
    known = "".join(sorted(set(text))) if vocabulary is None else vocabulary
    number = {character: i for i, character in enumerate(known)}
    missing = sorted(set(text) - set(known))
    if missing:
        raise ValueError(
            f"text has characters that the vocabulary lacks: {missing[:10]}. "
            "Fix: encode the whole text first, and split its tokens into training and validation"
        )
    return torch.tensor([number[character] for character in text]), known


def decode_text(tokens: Tensor, vocabulary: str) -> str:
    """The text of tokens `[n]`.

    Errors: `TypeError` for what is no integer tensor `[n]`; `ValueError` for tokens that the vocabulary lacks.

    >>> decode_text(torch.tensor([1, 0, 2, 2, 3]), "ehlo")
    'hello'
    """
    size = len(check.instance("vocabulary", vocabulary, str, "the vocabulary of encode_text, a str"))
    _check_tokens(tokens)
    missing = sorted({token for token in tokens.tolist() if not 0 <= token < size})
    if missing:
        raise ValueError(f"tokens has {missing[:10]}, and the vocabulary only 0 to {size - 1}")
    return "".join(vocabulary[token] for token in tokens.tolist())


def _check_tokens(tokens: Any) -> None:
    whole = (torch.uint8, torch.int16, torch.int32, torch.int64)
    if not isinstance(tokens, Tensor) or tokens.dim() != 1 or tokens.dtype not in whole:
        raise TypeError(f"tokens is {_describe(tokens)}. Allowed: a 1-D integer tensor. Fix: torch.tensor(ids)")
    if tokens.device.type == "meta":
        raise ValueError("tokens is on the device meta, where tensors have no values: create it on the CPU")


# ----------------------------------------------------------------------------------- reading the examples


class _Source:
    """The datasets of the nodes here, and how the examples of a step are read from them."""

    def __init__(
        self,
        dataset: Any,
        num_nodes: int,
        node_ids: tuple[int, ...],
        train: bool,
        seed: int,
        device: torch.device | str | None,
        dataloader_kwargs: Mapping[str, Any] | None,
        name: str,
    ):
        self.shared = not _is_factory(dataset)
        if not self.shared:
            check_dataset(dataset, name)
        datasets = [dataset] if self.shared else [dataset(node, num_nodes, train) for node in node_ids]
        for node, own in zip(node_ids, datasets):
            _check_examples(own, name if self.shared else f"{name} of node {node}")
        self.lengths = tuple(len(own) for own in datasets)
        self.device = device
        self.drop_last, collate_fn, self._loader_kwargs = _split_loader_kwargs(dataloader_kwargs)
        unwrapped = [_unwrap(own) for own in datasets]
        self._positions = [positions for _, positions in unwrapped]
        bases = [base for base, _ in unwrapped]
        one = all(base is bases[0] for base in bases)
        self._reader = _Reader(
            datasets=tuple(bases[:1] if one else bases),
            node_ids=node_ids,
            collate_fn=collate_fn,
            gathers=collate_fn is None and all(_can_gather(base) for base in bases),
            seed=seed,
            purpose="train examples" if train else "eval examples",
            name=name,
        )
        self._loader([])  # torch checks the values of dataloader_kwargs: now, not at the first step

    def locate(self, order: Tensor) -> Tensor:
        """Places in the nodes' datasets `[L, n]` -> places in the datasets below their `Subset`s, there."""
        if self.shared and self._positions[0] is not None:
            order = self._positions[0][order]
        elif not self.shared:
            rows = [row if at is None else at[row] for at, row in zip(self._positions, order)]
            order = torch.stack(rows)
        return order.to(_index_device(self._reader.datasets[0]))

    def read(self, step: int, indices: Tensor) -> Batch:
        return _move(self._reader(step, indices), self.device)

    def stream(self, requests: Iterable[tuple[int, Tensor]]) -> Iterator[Batch]:
        """One batch per request, in order; workers read ahead if there are any."""
        if not (self._loader_kwargs.get("num_workers") or self._loader_kwargs.get("pin_memory")):
            return (self.read(*request) for request in requests)
        # numpy: a tensor would reach the workers through shared memory, one file descriptor each
        orders = ((step, indices.numpy(force=True)) for step, indices in requests)
        return (_move(carried.batch, self.device) for carried in self._loader(orders))

    def _loader(self, orders: Iterable[tuple[int, np.ndarray]]) -> DataLoader[_Carried]:
        return DataLoader(
            _Steps(self._reader),
            batch_size=None,  # one item is the batch of all nodes
            sampler=orders,
            collate_fn=_identity,
            generator=rng.generator(self._reader.seed, "workers"),  # else torch draws from the global one
            **self._loader_kwargs,
        )


@dataclass(frozen=True)
class _Reader:
    """`(step, indices [L, B])` -> a tree of `[L, B, ...]`; workers get a copy of it."""

    datasets: tuple[Any, ...]  # one per node, or a single one that all nodes read
    node_ids: tuple[int, ...]
    collate_fn: Callable[[list[Any]], Any] | None
    gathers: bool  # nothing but `_gather` is needed
    seed: int
    purpose: str
    name: str

    def __call__(self, step: int, indices: Tensor) -> Batch:
        with contextlib.nullcontext() if self.gathers else _private_random_state():
            if self.collate_fn is None:
                batch = self._read_all(step, indices)
                return self._map(lambda leaves, path: _fold(leaves[0], path, indices.shape), [batch])
            return self._map(self._stack, self._read_each(step, indices))

    def _read_all(self, step: int, indices: Tensor) -> Batch:
        """Leaves `[L * B, ...]`."""
        if len(self.datasets) == 1:
            return self._read(self.datasets[0], step, self.node_ids, indices)
        return self._map(self._concatenate, self._read_each(step, indices))

    def _read_each(self, step: int, indices: Tensor) -> list[Batch]:
        """L batches with leaves `[B, ...]`."""
        datasets = self.datasets if len(self.datasets) > 1 else self.datasets * len(self.node_ids)
        rows = zip(datasets, self.node_ids, indices.split(1))
        return [self._read(dataset, step, (node,), row) for dataset, node, row in rows]

    def _read(self, dataset: Any, step: int, nodes: tuple[int, ...], indices: Tensor) -> Batch:
        """The examples `[l, B]` of `nodes` out of one dataset, leaves `[l * B, ...]`."""
        if self.gathers:
            return _gather(dataset, indices.reshape(-1))
        examples = self._examples(dataset, step, nodes, indices)
        if self.collate_fn is not None:
            return self.collate_fn(_as_list(examples, indices.numel()))
        return self._collate(examples) if isinstance(examples, list) else examples

    def _examples(self, dataset: Any, step: int, nodes: tuple[int, ...], indices: Tensor) -> Any:
        """A list of examples, or what else `__getitems__` gives."""
        if callable(getattr(dataset, "__getitems__", None)):
            _seed_everything(rng.key(self.seed, self.purpose, step, nodes[0]))
            examples = dataset.__getitems__(indices.reshape(-1).tolist())
            if isinstance(examples, list) and len(examples) != indices.numel():
                raise ValueError(
                    f"{self.name}: __getitems__ of {type(dataset).__name__} returned a list of length "
                    f"{len(examples)} for {indices.numel()} indices. Allowed: a list with one example per "
                    "index, or a tuple or dict that is the batch. Fix: return tuple(...) if it is the batch"
                )
            return examples
        examples = []
        for node, row in zip(nodes, indices.tolist()):
            _seed_everything(rng.key(self.seed, self.purpose, step, node))
            examples += [dataset[i] for i in row]
        return examples

    def _collate(self, examples: list[Any]) -> Batch:
        try:
            return default_collate(examples)
        except (TypeError, RuntimeError, ValueError, KeyError):
            self._map(_explain, examples)  # raises an error that names the leaf, if it finds one
            raise

    def _concatenate(self, leaves: list[Any], path: str) -> Tensor:
        return torch.cat(self._alike(leaves, path))

    def _stack(self, leaves: list[Any], path: str) -> Tensor:
        tensors = self._alike(leaves, path)
        return torch.stack(tensors) if len(tensors) > 1 else tensors[0][None]  # no copy for one node

    def _alike(self, leaves: list[Any], path: str) -> list[Tensor]:
        tensors = [_tensor(leaf, path) for leaf in leaves]
        _check_shapes([x.shape for x in tensors], path, lambda i: f"the batch of node {self.node_ids[i]}")
        return tensors

    def _map(self, fn: Callable[[list[Any], str], Any], trees: Sequence[Batch]) -> Batch:
        return _map_together(fn, trees, f"{self.name}: batch")


def _fold(leaf: Any, path: str, size: torch.Size) -> Tensor:
    """`[L * B, ...]` -> `[L, B, ...]`."""
    tensor = _tensor(leaf, path)
    if tensor.dim() == 0 or tensor.shape[0] != size.numel():
        raise ValueError(
            f"{path} has shape {tuple(tensor.shape)} for {size.numel()} indices. Allowed: leaves "
            f"[{size.numel()}, ...] from a __getitems__ that returns a batch. Fix: one row per index, "
            "or return a list of examples"
        )
    return tensor.reshape(size + tensor.shape[1:])


def _explain(leaves: list[Any], path: str) -> None:
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, np.ndarray, np.generic, numbers.Number, str, bytes)):
            raise _not_a_tensor(leaf, path)
    _check_shapes([getattr(leaf, "shape", ()) for leaf in leaves], path, lambda i: f"example {i}")


def _check_shapes(shapes: Sequence[tuple[int, ...]], path: str, label: Callable[[int], str]) -> None:
    for i, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise ValueError(
                f"{path} has shape {tuple(shapes[0])} in {label(0)} and {tuple(shape)} in {label(i)}. "
                "Allowed: one shape, since the batches of all nodes make one tensor [L, B, ...]. "
                'Fix: pad to a fixed shape, dataloader_kwargs={"collate_fn": one_that_pads}'
            )


def _tensor(leaf: Any, path: str) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf
    if isinstance(leaf, (np.ndarray, np.generic, numbers.Number)):
        with contextlib.suppress(TypeError):  # an array of objects or strings
            return torch.as_tensor(leaf)
    raise _not_a_tensor(leaf, path)


def _not_a_tensor(leaf: Any, path: str) -> TypeError:
    return TypeError(
        f"{path} is {_describe(leaf)}. Allowed: tensors, numpy arrays, numbers. Fix: a transform in the "
        'dataset, or dataloader_kwargs={"collate_fn": one_that_returns_tensors}'
    )


class _Steps(Dataset["_Carried"]):
    """What the DataLoader sees: a request `(step, indices [L, B])` in, the batch of all nodes out."""

    def __init__(self, reader: _Reader):
        self.reader = reader

    def __getitem__(self, request: tuple[int, np.ndarray]) -> _Carried:
        step, indices = request
        return _Carried(self.reader(step, torch.from_numpy(indices)))


@dataclass(frozen=True)
class _Carried:
    """Brings a batch through the DataLoader, whose own pinning makes lists of tuples in some versions."""

    batch: Batch

    def pin_memory(self) -> _Carried:
        return _Carried(tree.map_leaves(Tensor.pin_memory, self.batch))


def _identity(carried: Any) -> Any:
    return carried


def _unwrap(dataset: Any) -> tuple[Any, Tensor | None]:
    """A `Subset` as the dataset below it and the places there, so that one gather reads through it."""
    positions: Tensor | None = None
    while type(dataset) is Subset:
        places = np.asarray(dataset.indices)
        if places.ndim != 1 or places.dtype.kind not in "iu" or (places < 0).any():
            break  # keys of another kind: the Subset itself knows what to do with them
        inner = torch.from_numpy(places.astype(np.int64))
        positions = inner if positions is None else inner[positions]
        dataset = dataset.dataset
    return dataset, positions


def _can_gather(dataset: Any) -> bool:
    """Whether `_gather` gives just what `dataset[i]` and collating would."""
    if isinstance(dataset, TensorDataset):  # a subclass may read in its own way
        return all(
            getattr(type(dataset), name, None) is getattr(TensorDataset, name, None)
            for name in ("__getitem__", "__getitems__")
        )
    return isinstance(dataset, Tensor) or type(dataset) is TokenWindows


def _gather(dataset: Any, index: Tensor) -> Batch:
    """The examples at `index` `[n]`, leaves `[n, ...]`."""
    if isinstance(dataset, Tensor):
        return dataset.index_select(0, index)
    if isinstance(dataset, TokenWindows):
        return dataset.__getitems__(index)
    # on CPU, index_select takes a third to a sixth of the time of x[index]
    return [x.index_select(0, index.to(x.device)) for x in dataset.tensors]


def _index_device(dataset: Any) -> torch.device:
    if not _can_gather(dataset):
        return torch.device("cpu")
    if isinstance(dataset, TensorDataset):
        return dataset.tensors[0].device
    return dataset.device if isinstance(dataset, Tensor) else dataset.tokens.device


def _as_list(examples: Any, count: int) -> list[Any]:
    """The examples one by one, for a `collate_fn`, also when `__getitems__` gave a whole batch."""
    if isinstance(examples, list):
        return examples
    return [tree.map_leaves(operator.itemgetter(i), examples) for i in range(count)]


def _map_together(fn: Callable[[list[Any], str], Any], trees: Sequence[Any], path: str = "batch") -> Any:
    """`fn(leaves, path)` for the corresponding leaves of trees of the same form, in a tree of that form."""
    first = trees[0]
    if any(_outline(other) != _outline(first) for other in trees[1:]):
        forms = sorted({str(_outline(other)) for other in trees})
        raise ValueError(
            f"{path} does not have the same form everywhere: {' and '.join(forms)}. Allowed: the same keys "
            "and lengths in every example of every node. Fix: a collate_fn that makes them so"
        )
    if isinstance(first, Mapping):
        return {key: _map_together(fn, [x[key] for x in trees], f"{path}[{key!r}]") for key in first}
    if not _is_sequence(first):
        return fn(list(trees), path)
    parts = [_map_together(fn, [x[i] for x in trees], f"{path}[{i}]") for i in range(len(first))]
    if hasattr(first, "_fields"):
        return type(first)(*parts)
    return tuple(parts) if isinstance(first, tuple) else parts


def _is_sequence(value: Any) -> bool:
    # a list of strings is what default_collate makes of strings: one leaf, and a wrong one
    return isinstance(value, (list, tuple)) and not (value and isinstance(value[0], (str, bytes)))


def _outline(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"keys {sorted(map(str, value))}"
    return f"length {len(value)}" if _is_sequence(value) else "a leaf"


def _move(batch: Batch, device: torch.device | str | None) -> Batch:
    if device is None:
        return batch
    return tree.map_leaves(lambda x: x.to(device, non_blocking=x.is_pinned()), batch)


@contextlib.contextmanager
def _private_random_state() -> Iterator[None]:
    """Put the global random states back as they were: a dataset's random transforms draw from them."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])


def _seed_everything(key: int) -> None:
    torch.default_generator.manual_seed(key)  # not torch.manual_seed, which seeds the accelerators too
    np.random.seed(key % 2**32)  # noqa: NPY002
    random.seed(key)


# --------------------------------------------------------------------------------- what may be asked for

_LOADER_KEYS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "pin_memory_device",
    "drop_last",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)
_OWNED_KEYS = {
    "dataset": "pass it as the first argument",
    "batch_size": "use the argument batch_size",
    "shuffle": "use the argument shuffle",
    "sampler": "let a dataset factory (rank, num_nodes, train) -> Dataset say what each node reads",
    "batch_sampler": "let a dataset factory (rank, num_nodes, train) -> Dataset say what each node reads",
    "generator": "use the argument seed",
    "in_order": "leave it out, batches always come in order",
}


_LOADER_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("drop_last", "pin_memory", "persistent_workers"), check.flag),
    "num_workers": partial(check.integer, least=0),
    "prefetch_factor": check.optional_integer,
    "timeout": partial(check.number, within="[0, inf)", what="seconds"),
}


def _split_loader_kwargs(
    kwargs: Mapping[str, Any] | None,
) -> tuple[bool, Callable[[list[Any]], Any] | None, dict[str, Any]]:
    """`drop_last` and `collate_fn`, which vecgym applies itself, and the DataLoader's part."""
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"dataloader_kwargs is {check.kind_of(kwargs)}; give a dict such as {{'num_workers': 2}}.")
    given = dict(kwargs or {})
    for key in given:
        if key in _OWNED_KEYS:
            raise ValueError(f"dataloader_kwargs has {key!r}, which vecgym sets itself. Fix: {_OWNED_KEYS[key]}")
    check.keywords("dataloader_kwargs", given, _LOADER_KEYS)
    rest = {key: _LOADER_CHECKS[key](key, value) if key in _LOADER_CHECKS else value for key, value in given.items()}
    if not rest.get("num_workers"):
        if rest.get("timeout"):
            raise ValueError(f"timeout={rest['timeout']} needs workers. Fix: num_workers=1 or more, or no timeout")
        if rest.get("worker_init_fn") is not None:
            warn("worker_init_fn has no effect with num_workers=0")
    collate_fn = rest.pop("collate_fn", None)
    if collate_fn is not None and not callable(collate_fn):
        raise TypeError(f"collate_fn is {check.kind_of(collate_fn)}; give a function: list of examples -> batch.")
    return rest.pop("drop_last", False), collate_fn, rest


def _is_factory(dataset: Any) -> bool:
    if isinstance(dataset, nn.Module):  # it can be called, but with batches
        return False
    return callable(dataset) and (isinstance(dataset, type) or not hasattr(dataset, "__getitem__"))


def check_dataset(dataset: Any, name: str) -> None:
    """Raise an error for what is neither a map-style dataset, of at least one example, nor a factory.

    >>> check_dataset([], "train_dataset")
    Traceback (most recent call last):
    ...
    ValueError: train_dataset is empty. Allowed: at least one example
    """
    if not _is_factory(dataset):
        _check_examples(dataset, name)
        return
    try:
        inspect.signature(dataset).bind(0, 1, True)
    except ValueError:  # of a class written in C, which does not say what it takes
        pass
    except TypeError as error:
        raise TypeError(f"{name} is called as a factory (rank, num_nodes, train) -> Dataset: {error}") from None


def _check_examples(dataset: Any, name: str) -> None:
    if isinstance(dataset, nn.Module):
        raise TypeError(f"{name} is {_describe(dataset)}, a model. Fix: Trainer(model, train_dataset, val_dataset)")
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"{name} is {_describe(dataset)}, an IterableDataset, without random access to deal to nodes. "
            f"Allowed: a map-style dataset. Fix: read it first, {name}=list(dataset)"
        )
    if isinstance(dataset, (Mapping, str, bytes)) or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"{name} is {_describe(dataset)}, not a dataset. Allowed: anything with __len__ and "
            "__getitem__(int), or a factory (rank, num_nodes, train) -> Dataset. Fix: TensorDataset(x, y), "
            'or loader.dataset of a DataLoader, or one split such as splits["train"]'
        )
    if not hasattr(dataset, "__len__"):
        raise TypeError(f"{name} is {_describe(dataset)}, without length. Fix: define __len__ in its class")
    if _length(dataset, name) == 0:
        raise ValueError(f"{name} is empty. Allowed: at least one example")


def _length(dataset: Any, name: str) -> int:
    try:
        return len(dataset)
    except TypeError as error:  # of a tensor without dimensions, or a class that says it has none
        raise TypeError(f"{name} is {_describe(dataset)}, without length: {error}") from None


def _node_ids(node_ids: Iterable[int] | None, num_nodes: int) -> tuple[int, ...]:
    if node_ids is None:
        return tuple(range(num_nodes))
    given = node_ids.tolist() if isinstance(node_ids, Tensor) else node_ids
    check.instance("node_ids", given, Iterable, "the ids of nodes, such as [0, 1]")
    ids = tuple(check.integer("node_ids", node, 0) for node in given)
    if not ids or len(set(ids)) < len(ids) or max(ids) >= num_nodes:
        raise ValueError(f"node_ids={ids}. Allowed: different ids from 0 to {num_nodes - 1}, at least one")
    return ids


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dim()}-D tensor of {value.dtype}"
    inside = f" of {type(value[0]).__name__}" if isinstance(value, (list, tuple)) and value else ""
    return f"a {type(value).__name__}{inside}"
