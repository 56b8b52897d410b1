"""What the processes of a run tell one another to stay in step, beside what the strategy exchanges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from vecgym.collectives import Collectives
from vecgym.collectives.distributed import DistributedCollectives
from vecgym.core import tree
from vecgym.engine import ModelFacts
from vecgym.engine.simulation import Metrics
from vecgym.records.runfile import plain
from vecgym.runs.evaluation import everyone

T = TypeVar("T")


class Together:
    """What the processes of a run tell one another to stay in step; with one process, nothing."""

    def __init__(self, comm: Collectives) -> None:
        self.comm = comm
        self.wire = comm.wire if isinstance(comm, DistributedCollectives) else None
        self.num_processes = self.wire.num_processes if self.wire is not None else 1
        self.rank = self.wire.rank if self.wire is not None else 0
        self._interrupted = False

    def largest(self, count: int) -> int:
        return max(self.each(count))

    def smallest(self, count: int) -> int:
        return min(self.each(count))

    def joined(self, counts: Sequence[int]) -> tuple[int, ...]:
        """A number of each node here -> of each of all nodes."""
        return tuple(count for part in self.each(list(counts)) for count in part)

    def facts(self, facts: ModelFacts) -> ModelFacts:
        """What the first process has seen of the model, as in one process: which parameters are trained, say."""
        if self.wire is None:
            return facts
        seen = self.wire.broadcast_object(
            {"unused": sorted(facts.unused), "mutated": sorted(facts.mutated), "random": facts.random}
        )
        unused, mutated = frozenset(seen["unused"]), frozenset(seen["mutated"])
        return replace(facts, unused=unused, mutated=mutated, random=seen["random"])

    def observed(self, metrics: Metrics, interrupted: list[int]) -> Metrics:
        """The losses of all nodes; with them go the processes' interrupts, so that all stop after the same step."""
        if self.num_processes == 1:
            return metrics
        losses = metrics.losses
        flags = torch.full_like(losses, float(bool(interrupted)))
        found = everyone(torch.stack([losses, flags], 1).double(), self.comm, losses.device)  # [K, 2]
        self._interrupted = bool(found[:, 1].any())
        return metrics._replace(losses=found[:, 0].to(losses.dtype))

    def stop(self, interrupted: list[int]) -> bool:
        """Whether the run ends after this step."""
        return bool(interrupted) if self.num_processes == 1 else self._interrupted

    def each(self, value: Any) -> list[Any]:
        """Every process's value, in the order of their ranks."""
        return [value] if self.wire is None else self.wire.all_gather_object(value)

    def first(self, find: Callable[[], T]) -> T:
        """What the first process finds, in all of them; an error of its is raised in all."""
        if self.wire is None:
            return find()
        found: tuple[Any, Exception | None] = None, None
        if self.rank == 0:
            try:
                found = find(), None
            except (OSError, ValueError, TypeError) as error:
                found = None, error
        value, wrong = self.wire.broadcast_object(found)
        if wrong is not None:
            raise wrong
        return value

    def gathered(self, values: Any, device: torch.device) -> Any:
        """Nested values of the nodes here -> of all nodes, in the first process and on the CPU; elsewhere None.

        What is the same on every node is `[1, *]`, as it would be in one process. What a process lacks, since none
        of its nodes has trained yet, is 0 there.
        """
        if self.wire is None or self.num_processes == 1:
            return plain(values, "state")
        here = dict(_flat(values))
        forms = self.each({path: self._form(x) for path, x in here.items()})
        whole = {}
        for path in dict.fromkeys(path for form in forms for path in form):
            of_each = [form.get(path) for form in forms]
            found = self._whole(here.get(path), of_each, device)
            if self.rank == 0:
                whole[path] = plain(found, "state")
        return _nested(whole) if self.rank == 0 else None

    def own(self, values: Any) -> Any:
        """The rows of the nodes here in nested values of all nodes."""
        if self.num_processes == 1:
            return values
        first, last, K = int(self.comm.node_ids[0]), int(self.comm.node_ids[-1]) + 1, self.comm.num_nodes
        return tree.map_leaves(lambda x: x[first:last] if x.dim() > 0 and len(x) == K > 1 else x, values)

    def _form(self, x: Any) -> Any:
        """What other processes must know of a value: of a tensor of nodes its shape and type, else the value."""
        if isinstance(x, Tensor) and x.dim() > 0 and len(x) in (1, len(self.comm.node_ids)):
            return _Form(len(x), x.shape[1:], x.dtype)
        return x

    def _whole(self, x: Any, forms: Sequence[Any], device: torch.device) -> Any:
        known = next(form for form in forms if form is not None) if any(f is not None for f in forms) else None
        if not isinstance(known, _Form):
            return known
        num_local = len(self.comm.node_ids)
        if num_local > 1 and all(form is not None and form.rows == 1 for form in forms):
            return x
        x = torch.zeros(1, *known.shape, dtype=known.dtype) if x is None else x
        assert self.wire is not None
        rows = self.wire.all_gather(x.to(device).expand(num_local, *known.shape).contiguous()).cpu()  # [K, *]
        return rows[:1].clone() if num_local == 1 and _rows_equal(rows) else rows


class _Form(NamedTuple):
    """Of a tensor `[rows, *shape]`."""

    rows: int
    shape: torch.Size
    dtype: torch.dtype


Path = tuple[tuple[type, Any], ...]  # to a leaf of nested values: (dict, key), (list, index) ...


def _flat(values: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The leaves of nested dicts, lists and tuples; empty ones are leaves themselves."""
    if isinstance(values, dict) and values:
        for key, x in values.items():
            yield from _flat(x, (*path, (dict, key)))
    elif isinstance(values, (list, tuple)) and values:
        for i, x in enumerate(values):
            yield from _flat(x, (*path, (type(values), i)))
    else:
        yield path, values


def _nested(leaves: dict[Path, Any]) -> Any:
    """The inverse of `_flat`."""
    if () in leaves:
        return leaves[()]
    parts: dict[Any, dict[Path, Any]] = {}
    for path, x in leaves.items():
        parts.setdefault(path[0], {})[path[1:]] = x
    (kind, _), *_ = parts
    found = {key: _nested(part) for (_, key), part in parts.items()}
    return found if kind is dict else kind(found.values())


def _rows_equal(x: Tensor) -> bool:
    """To the bit: 0 is not -0."""
    if x.numel() == 0:
        return True
    rows = x.contiguous().view(-1).view(torch.uint8).view(len(x), -1)
    return bool((rows == rows[:1]).all())


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread within operations: sums that several share depend on how many they are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
