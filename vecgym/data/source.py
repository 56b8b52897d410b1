"""Read the examples of a step from the datasets of the nodes, in the fastest way each dataset supports.

The examples of all nodes are collated into one tree; errors name the leaf.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import numbers
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from vecgym.core import check, nodes, rng, tree
from vecgym.core.devices import placed
from vecgym.data.checks import check_dataset, check_examples, describe, is_factory, split_loader_kwargs
from vecgym.data.text import TokenWindows

Batch = Any  # a tensor, or nested dicts, lists and (named) tuples of tensors

MOST_TOGETHER, MOST_VALUES = 32, 1 << 18  # steps whose batches are gathered by one call, and values in these
ALIGNMENT = 64  # bytes, of torch's memory

Steps = int | Sequence[int]  # one for all nodes, or one per node
Request = tuple[Steps, Tensor] | tuple[Steps, Tensor, Sequence[int]]  # (step, indices) or (step, indices, rows)


class Source:
    """The datasets of the nodes in this process; reads the examples of a step from them."""

    def __init__(
        self, dataset: Any, num_nodes: int, node_ids: tuple[int, ...], train: bool, seed: int,
        device: torch.device | str | None, dataloader_kwargs: Mapping[str, Any] | None, name: str,
    ) -> None:  # fmt: skip
        self.shared = not is_factory(dataset)
        if not self.shared:
            check_dataset(dataset, name)
        of_node = functools.partial(check.called, name, dataset)
        datasets = [dataset] if self.shared else [of_node(node, num_nodes, train) for node in node_ids]
        for node, examples in zip(node_ids, datasets):
            check_examples(examples, name if self.shared else f"{name} of node {node}")
        self.lengths = tuple(len(examples) for examples in datasets)
        self.device = device
        self.drop_last, collate_fn, self._loader_kwargs = split_loader_kwargs(dataloader_kwargs)
        bases, self._positions = zip(*map(_unwrap, datasets))
        same = all(base is bases[0] for base in bases)
        self._reader = _Reader(
            datasets=bases[:1] if same else bases,
            node_ids=node_ids,
            collate_fn=collate_fn,
            gathers=collate_fn is None and all(_tensors(base) for base in bases),
            seed=seed,
            purpose="train examples" if train else "eval examples",
            name=name,
        )
        self._loader([])  # so that torch checks the values of dataloader_kwargs now, not at the first step

    def locate(self, order: Tensor) -> Tensor:
        """Map indices into the nodes' datasets, `[L, n]`, to indices below their `Subset`s, on the data's device."""
        if self.shared and self._positions[0] is not None:
            order = self._positions[0][order]
        elif not self.shared:
            order = torch.stack([row if at is None else at[row] for at, row in zip(self._positions, order)])
        return placed(order, next((x.device for x in _tensors(self._reader.datasets[0])), "cpu"))

    def read(self, step: Steps, indices: Tensor, rows: Sequence[int] | None = None) -> Batch:
        """Read the batch of a step, or that of the nodes at `rows`, each at its own step."""
        return self._placed(self._reader.read(step, indices, rows))

    def stream(self, requests: Iterable[Request]) -> Iterator[Batch]:
        """Yield one batch per request, in order.

        Workers, if any, read ahead. Tensors are read up to `MOST_TOGETHER` steps ahead, and again if they have changed.
        """
        if not (self._loader_kwargs.get("num_workers") or self._loader_kwargs.get("pin_memory")):
            together = self._reader.gathers and len(self._reader.datasets) == 1
            return self._in_blocks(iter(requests)) if together else (self.read(*request) for request in requests)
        # As numpy arrays: each tensor would reach the workers through shared memory, with its own file descriptor.
        orders = ((step, indices.numpy(force=True), *rows) for step, indices, *rows in requests)
        return (self._placed(carried.batch) for carried in self._loader(orders))

    def _in_blocks(self, requests: Iterator[Request]) -> Iterator[Batch]:
        """Yield one batch per request; small ones of several steps are gathered by one call."""
        count = 1
        while block := list(itertools.islice(requests, count)):
            for form, alike in itertools.groupby(block, lambda request: (len(request), request[1].shape)):
                for batch in self._gathered(list(alike)) if form[0] == 2 else itertools.starmap(self.read, alike):
                    yield batch
            values = sum(x.numel() for x in tree.leaves(batch))
            count = max(1, min(MOST_TOGETHER, MOST_VALUES // max(1, values)))

    def _gathered(self, block: Sequence[Request]) -> Iterator[Batch]:
        """Yield the batches of requests of one shape; if the dataset changes meanwhile, read the rest again."""
        before, first = list[tuple[int, int]](), 0
        for i in range(len(block)):
            tensors = _tensors(self._reader.datasets[0])
            if before != (now := [(id(x), 0 if x.is_inference() else x._version) for x in tensors]):
                batches = self.read(0, torch.stack([request[1] for request in block[i:]]))
                before, first = now, i
            yield tree.map_leaves(lambda x: _aligned(x[i - first]), batches)  # noqa: B023

    def _placed(self, batch: Batch) -> Batch:
        return tree.map_leaves(functools.partial(placed, device=self.device), batch)

    def _loader(self, orders: Iterable[tuple[Any, ...]]) -> DataLoader[_Carried]:
        return DataLoader(
            self._reader,
            batch_size=None,  # one item is the batch of all nodes
            sampler=orders,
            generator=rng.generator(self._reader.seed, "workers"),  # otherwise torch draws from the global generator
            **self._loader_kwargs,
        )


@dataclass(frozen=True)
class _Reader(Dataset["_Carried"]):
    """Reads a `Request`: a tree of `[L, B, ...]`. It is the DataLoader's dataset, and workers get a copy."""

    datasets: tuple[Any, ...]  # one per node, or a single one that all nodes read
    node_ids: tuple[int, ...]
    collate_fn: Callable[[list[Any]], Any] | None
    gathers: bool  # all datasets can be read by `_gather`
    seed: int
    purpose: str
    name: str

    def of(self, rows: Sequence[int]) -> _Reader:
        """Return a reader of the nodes at `rows`."""
        datasets = self.datasets if len(self.datasets) == 1 else tuple(self.datasets[row] for row in rows)
        return replace(self, datasets=datasets, node_ids=tuple(self.node_ids[row] for row in rows))

    def __getitem__(self, request: tuple[Any, ...]) -> _Carried:
        step, indices, *rows = request
        return _Carried(self.read(step, torch.from_numpy(indices), *rows))

    def read(self, step: Steps, indices: Tensor, rows: Sequence[int] | None = None) -> Batch:
        if rows is None:
            assert isinstance(step, int)
            return self(step, indices)
        if self.gathers:
            return self.of(rows)(0, indices)
        # Node by node, since random numbers that a dataset draws are seeded by the step.
        steps = [step] * len(rows) if isinstance(step, int) else step
        batches = [self.of([row])(step, index) for step, row, index in zip(steps, rows, indices.split(1))]
        return nodes.join_rows(batches)

    def __call__(self, step: int, indices: Tensor) -> Batch:
        one = len(self.datasets) == 1 and self.collate_fn is None
        if one and self.gathers:
            gathered = _gather(self.datasets[0], indices.reshape(-1))
            if not any(x.is_meta for x in tree.leaves(gathered)):  # else the error names the leaf
                return tree.map_leaves(lambda x: x.view(indices.shape + x.shape[1:]), gathered)
        with contextlib.nullcontext() if self.gathers else rng.private():
            if one:
                batch = self._read(self.datasets[0], step, self.node_ids, indices)
                return self._map(lambda leaves, path: fold(leaves[0], path, indices.shape), [batch])
            datasets = self.datasets if len(self.datasets) > 1 else self.datasets * len(self.node_ids)
            rows = zip(datasets, self.node_ids, indices.split(1))
            batches = [self._read(dataset, step, (node,), row) for dataset, node, row in rows]
            return self._map(lambda leaves, path: self._stack(leaves, path, indices.shape[1:]), batches)

    def _read(self, dataset: Any, step: int, nodes: tuple[int, ...], indices: Tensor) -> Batch:
        """Read the examples `[l, B]` of `nodes` from one dataset, with leaves `[l * B, ...]`."""
        if self.gathers:
            return _gather(dataset, indices.reshape(-1))
        examples = self._examples(dataset, step, nodes, indices)
        if self.collate_fn is not None:
            return self.collate_fn(as_list(examples, indices.numel()))
        return self._collate(examples) if isinstance(examples, list) else examples

    def _examples(self, dataset: Any, step: int, nodes: tuple[int, ...], indices: Tensor) -> Any:
        """Return a list of examples, or whatever else `__getitems__` returns."""
        if callable(getattr(dataset, "__getitems__", None)):
            rng.seed_cpu(rng.key(self.seed, self.purpose, step, nodes[0]))
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
            rng.seed_cpu(rng.key(self.seed, self.purpose, step, node))
            examples += [dataset[i] for i in row]
        return examples

    def _collate(self, examples: list[Any]) -> Batch:
        try:
            return default_collate(examples)
        except (TypeError, RuntimeError, ValueError, KeyError):
            self._map(explain, examples)  # raises an error that names the leaf, if it finds the cause
            raise

    def _stack(self, leaves: list[Any], path: str, size: torch.Size) -> Tensor:
        """Stack the nodes' leaves `[B, ...]`; the leaves of a `collate_fn` may have any shape."""
        convert = as_tensor if self.collate_fn is not None else functools.partial(fold, size=size)
        tensors = [convert(leaf, path) for leaf in leaves]
        check_shapes([x.shape for x in tensors], path, lambda i: f"the batch of node {self.node_ids[i]}")
        return torch.stack(tensors) if len(tensors) > 1 else tensors[0][None]  # no copy for one node

    def _map(self, fn: Callable[[list[Any], str], Any], trees: Sequence[Batch]) -> Batch:
        return map_together(fn, trees, f"{self.name}: batch")


@dataclass(frozen=True)
class _Carried:
    """Carries a batch through the DataLoader, whose own pinning turns tuples into lists in some versions."""

    batch: Batch

    def pin_memory(self) -> _Carried:
        return _Carried(tree.map_leaves(Tensor.pin_memory, self.batch))


def _unwrap(dataset: Any) -> tuple[Any, Tensor | None]:
    """Split a `Subset` into the dataset below it and the indices there, so that one gather reads through it."""
    positions: Tensor | None = None
    while type(dataset) is Subset:
        indices = np.asarray(dataset.indices)
        if indices.ndim != 1 or indices.dtype.kind not in "iu" or (indices < 0).any():
            break  # other keys, which only the Subset itself can look up
        inner = torch.from_numpy(indices.astype(np.int64))
        positions = inner if positions is None else inner[positions]
        dataset = dataset.dataset
    return dataset, positions


def _tensors(dataset: Any) -> Sequence[Tensor]:
    """Return the tensors that `_gather` reads, if that equals reading and collating `dataset[i]`; otherwise none."""
    if isinstance(dataset, TensorDataset):  # a subclass may override how it is read
        methods = ("__getitem__", "__getitems__")
        overrides = [getattr(type(dataset), name, None) is not getattr(TensorDataset, name, None) for name in methods]
        return () if any(overrides) else dataset.tensors
    if type(dataset) is TokenWindows:
        return (dataset.tokens,)
    return (dataset,) if isinstance(dataset, Tensor) else ()


def _aligned(x: Tensor) -> Tensor:
    """Copy a tensor unless it begins where a new one could: sums may depend on that in their last bits."""
    return x if x.storage_offset() * x.element_size() % ALIGNMENT == 0 else x.clone()


def _gather(dataset: Any, index: Tensor) -> Batch:
    """Gather the examples at `index`, `[n]`, with leaves `[n, ...]`."""
    if isinstance(dataset, Tensor):
        return dataset.index_select(0, index)
    if isinstance(dataset, TokenWindows):
        return dataset.__getitems__(index)
    # On the CPU, index_select is three to six times as fast as x[index].
    return [x.index_select(0, placed(index, x.device)) for x in dataset.tensors]


# ---------------------------------------------------------------------------------------------------- collate


def fold(leaf: Any, path: str, size: torch.Size) -> Tensor:
    """Reshape `[L * B, ...]` to `[L, B, ...]`."""
    tensor = as_tensor(leaf, path)
    if tensor.dim() == 0 or tensor.shape[0] != size.numel():
        raise ValueError(
            f"{path} has shape {tuple(tensor.shape)} for {size.numel()} indices. Allowed: leaves "
            f"[{size.numel()}, ...] from a __getitems__ that returns a batch. Fix: one row per index, "
            "or return a list of examples"
        )
    return tensor.reshape(size + tensor.shape[1:])


def explain(leaves: list[Any], path: str) -> None:
    """Raise an error that explains why examples cannot be collated, if there is an obvious reason."""
    for leaf in leaves:
        of_others = isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind not in "biufc"
        if of_others or not isinstance(leaf, (Tensor, np.ndarray, np.generic, numbers.Number, str, bytes)):
            raise _not_a_tensor(leaf, path)
    check_shapes([getattr(leaf, "shape", ()) for leaf in leaves], path, lambda i: f"example {i}")


def check_shapes(shapes: Sequence[tuple[int, ...]], path: str, label: Callable[[int], str]) -> None:
    """Raise a ValueError unless all shapes are equal; `label(i)` names the tensor with shape i."""
    for i, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise ValueError(
                f"{path} has shape {tuple(shapes[0])} in {label(0)} and {tuple(shape)} in {label(i)}. "
                "Allowed: one shape, since the batches of all nodes form one tensor [L, B, ...]. "
                'Fix: pad to a fixed shape, dataloader_kwargs={"collate_fn": one_that_pads}'
            )


def as_tensor(leaf: Any, path: str) -> Tensor:
    """Convert a leaf of a batch to a tensor."""
    if isinstance(leaf, Tensor):
        return check.has_values(path, leaf)
    if isinstance(leaf, (np.ndarray, np.generic, numbers.Number)):
        with contextlib.suppress(TypeError):  # an array of objects or strings
            return torch.as_tensor(leaf)
    raise _not_a_tensor(leaf, path)


def _not_a_tensor(leaf: Any, path: str) -> TypeError:
    return TypeError(
        f"{path} is {describe(leaf)}. Allowed: tensors, numpy arrays, numbers. Fix: a transform in the "
        'dataset, or dataloader_kwargs={"collate_fn": one_that_returns_tensors}'
    )


def as_list(examples: Any, count: int) -> list[Any]:
    """Return the examples as a list, for a `collate_fn`, even if `__getitems__` returned a batch."""
    if isinstance(examples, list):
        return examples
    return [tree.map_leaves(operator.itemgetter(i), examples) for i in range(count)]


def map_together(fn: Callable[[list[Any], str], Any], trees: Sequence[Any], path: str = "batch") -> Any:
    """Apply `fn(leaves, path)` to the corresponding leaves of trees of the same form, and return such a tree."""
    first = trees[0]
    forms = sorted({_outline(x) for x in trees})
    if len(forms) > 1:
        raise ValueError(
            f"{path} does not have the same form everywhere: {' and '.join(forms)}. Allowed: the same keys "
            "and lengths in every example of every node. Fix: a collate_fn that makes them the same"
        )
    if isinstance(first, Mapping):
        return {key: map_together(fn, [x[key] for x in trees], f"{path}[{key!r}]") for key in first}
    if not _is_sequence(first):
        return fn(list(trees), path)
    parts = [map_together(fn, [x[i] for x in trees], f"{path}[{i}]") for i in range(len(first))]
    if hasattr(first, "_fields"):
        return type(first)(*parts)
    return tuple(parts) if isinstance(first, tuple) else parts


def _is_sequence(value: Any) -> bool:
    # default_collate turns strings into a list: one leaf, which is not allowed
    return isinstance(value, (list, tuple)) and not (value and isinstance(value[0], (str, bytes)))


def _outline(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"keys {sorted(map(str, value))}"
    return f"length {len(value)}" if _is_sequence(value) else "a leaf"
