"""Checks of datasets and loader settings, whose errors name the given value, the allowed ones and the fix."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from vecgym.core import check
from vecgym.core.errors import warn

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
MOST_COLUMNS = 4
Collate = Callable[[list[Any]], Any]  # the examples of one node -> its batch

_FACTORY = "use a dataset factory (rank, num_nodes, train) -> Dataset to choose what each node reads"
_OWNED_KEYS = {
    "dataset": "pass it as the first argument",
    "batch_size": "use the argument batch_size",
    "shuffle": "use the argument shuffle",
    "sampler": _FACTORY,
    "batch_sampler": _FACTORY,
    "generator": "use the argument seed",
    "in_order": "omit it, batches always come in order",
}
_LOADER_KEYS = [key for key in inspect.signature(DataLoader).parameters if key not in _OWNED_KEYS]
_LOADER_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("drop_last", "pin_memory", "persistent_workers"), check.flag),
    "num_workers": partial(check.integer, least=0),
    "prefetch_factor": check.optional_integer,
    "timeout": partial(check.number, within="[0, inf)", what="seconds"),
}


def split_loader_kwargs(kwargs: Mapping[str, Any] | None) -> tuple[bool, Collate | None, dict[str, Any]]:
    """Return `drop_last` and `collate_fn`, which vecgym applies itself, and the keywords for the DataLoader."""
    give = "a dict such as {'num_workers': 2}"
    settings = {} if kwargs is None else dict(check.instance("dataloader_kwargs", kwargs, Mapping, give))
    for key in settings:
        if key in _OWNED_KEYS:
            raise ValueError(f"dataloader_kwargs has {key!r}, which vecgym sets itself. Fix: {_OWNED_KEYS[key]}")
    check.keywords("dataloader_kwargs", settings, _LOADER_KEYS)
    rest = {key: _LOADER_CHECKS[key](key, value) if key in _LOADER_CHECKS else value for key, value in settings.items()}
    if not rest.get("num_workers"):
        if rest.get("timeout"):
            raise ValueError(f"timeout={rest['timeout']} needs workers. Fix: num_workers=1 or more, or no timeout")
        if rest.get("worker_init_fn") is not None:
            warn("worker_init_fn has no effect with num_workers=0")
    collate_fn = rest.pop("collate_fn", None)
    if collate_fn is not None and not callable(collate_fn):
        raise TypeError(f"collate_fn is {check.kind_of(collate_fn)}; give a function: list of examples -> batch.")
    return rest.pop("drop_last", False), collate_fn, rest


def is_factory(dataset: Any) -> bool:
    """Whether `dataset` is a function or a class that creates the nodes' datasets."""
    if isinstance(dataset, nn.Module):  # callable, but with batches
        return False
    return callable(dataset) and (isinstance(dataset, type) or not hasattr(dataset, "__getitem__"))


def check_dataset(dataset: Any, name: str) -> None:
    """Raise an error unless `dataset` is a map-style dataset of at least one example, or a factory.

    >>> check_dataset([], "train_dataset")
    Traceback (most recent call last):
    ...
    ValueError: train_dataset is empty. Allowed: at least one example
    """
    if not is_factory(dataset):
        check_examples(dataset, name)
        return
    if wrong := check.misfit(dataset, 0, 1, True):
        raise TypeError(f"{name} is called as a factory (rank, num_nodes, train) -> Dataset: {wrong}")


def check_examples(dataset: Any, name: str) -> None:
    """Raise an error unless `dataset` is a map-style dataset of at least one example."""
    if isinstance(dataset, nn.Module):
        raise TypeError(f"{name} is {describe(dataset)}, a model. Fix: Trainer(model, train_dataset, val_dataset)")
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"{name} is {describe(dataset)}, an IterableDataset, whose examples cannot be dealt to nodes. "
            f"Allowed: a map-style dataset. Fix: read it first, {name}=list(dataset)"
        )
    if isinstance(dataset, (Mapping, str, bytes)) or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"{name} is {describe(dataset)}, not a dataset. Allowed: anything with __len__ and "
            "__getitem__(int), or a factory (rank, num_nodes, train) -> Dataset. Fix: TensorDataset(x, y), "
            'or loader.dataset of a DataLoader, or one split such as splits["train"]'
        )
    if (size := columns_of(dataset)) is not None:
        count = f"{len(dataset)} example{'s'[: len(dataset) - 1]}"
        raise TypeError(
            f"{name} is {describe(dataset)}: {count}, not {size}. Fix: torch.utils.data.TensorDataset"
            f"({', '.join('xyzabcde'[: len(dataset)])}) of tensors; for {count}, torch.stack(...)"
        )
    if size_of(name, dataset, "give one whose len() is the number of its examples") == 0:
        raise ValueError(f"{name} is empty. Allowed: at least one example")


def columns_of(dataset: Any) -> int | None:
    """Return the common length of a few tensors or arrays that look like the columns of a dataset, not its examples.

    >>> columns_of((torch.ones(512, 20), torch.ones(512))), columns_of([torch.ones(20)] * 512), columns_of((1, 2))
    (512, None, None)
    """
    if type(dataset) not in (tuple, list) or not 0 < len(dataset) <= MOST_COLUMNS:
        return None
    sizes = {x.shape[0] if isinstance(x, (Tensor, np.ndarray)) and x.ndim else 0 for x in dataset}
    return next(iter(sizes)) if len(sizes) == 1 and max(sizes) > MOST_COLUMNS else None


def size_of(name: str, dataset: Any, fix: str) -> int:
    """Return the number of examples.

    Raises:
        TypeError: if `dataset` has no length, with the fix.

    >>> size_of("data", iter([]), "give a list")
    Traceback (most recent call last):
    ...
    TypeError: data is a list_iterator, without length: object of type 'list_iterator' has no len(). Fix: give a list
    """
    try:
        return len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise TypeError(f"{name} is {describe(dataset)}, without length: {error}. Fix: {fix}") from None


def checked_node_ids(node_ids: Iterable[int] | None, num_nodes: int) -> tuple[int, ...]:
    """Return the ids of the nodes in this process; None: all."""
    if node_ids is None:
        return tuple(range(num_nodes))
    nodes = node_ids.tolist() if isinstance(node_ids, Tensor) else node_ids
    check.instance("node_ids", nodes, Iterable, "the ids of nodes, such as [0, 1]")
    ids = tuple(check.integer("node_ids", node, 0) for node in nodes)
    if not ids or len(set(ids)) < len(ids) or max(ids) >= num_nodes:
        raise ValueError(f"node_ids={ids}. Allowed: different ids from 0 to {num_nodes - 1}, at least one")
    return ids


def is_integers(x: Any) -> bool:
    """Whether `x` is a tensor `[n]` of integers.

    >>> is_integers(torch.tensor([1, 2])), is_integers(torch.ones(2)), is_integers([1, 2])
    (True, False, False)
    """
    return isinstance(x, Tensor) and x.dim() == 1 and x.dtype in INTEGERS and x.device.type != "meta"


def describe(value: Any) -> str:
    """Describe a wrong value, for a message."""
    if isinstance(value, Tensor):
        return f"a {value.dim()}-D tensor of {value.dtype}"
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}"
    inside = f" of {type(value[0]).__name__}" if isinstance(value, (list, tuple)) and value else ""
    return check.kind_of(value) if isinstance(value, type) else f"a {type(value).__name__}{inside}"
