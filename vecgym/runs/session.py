"""What the processes of a run tell one another to stay in step, beside what the strategy exchanges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from vecgym.collectives import Collectives, StackedCollectives
from vecgym.collectives.distributed import DistributedCollectives, Wire
from vecgym.core import tree
from vecgym.engine import ModelFacts
from vecgym.engine.simulation import Metrics
from vecgym.records.runfile import plain
from vecgym.runs import links, multiprocess
from vecgym.runs.evaluation import everyone
from vecgym.runs.options import FitOptions, resolve_device

T = TypeVar("T")


@contextmanager
def joined_nodes(options: FitOptions) -> Iterator[tuple[Collectives, torch.device]]:
    """Yield the collectives and the device of the nodes in this process: all, or with "distributed" its part."""
    device = resolve_device(options.device)
    with one_thread() if options.exact else nullcontext():
        if options.backend == "stacked":
            yield StackedCollectives(options.num_nodes), device
            return
        with multiprocess.joined(device) as device:
            wire = Wire(watch=links.watch, announce=links.announce)
            yield DistributedCollectives(options.num_nodes, wire, exact=options.exact), device


class Session:
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
        """Return a number of each node here as one of each of all nodes."""
        return tuple(count for part in self.each(list(counts)) for count in part)

    def facts(self, facts: ModelFacts) -> ModelFacts:
        """Return what the first process has seen of the model: which parameters are trained, say."""
        if self.wire is None:
            return facts
        shared = {name: vars(facts)[name] for name in ("unused", "mutated", "random")}
        return replace(facts, **self.wire.broadcast_object(shared))

    def observed(self, metrics: Metrics, interrupted: list[int]) -> Metrics:
        """Return the losses of all nodes; with them go the interrupts, so that all stop after the same step."""
        if self.num_processes == 1:
            return metrics
        losses = metrics.losses
        flags = torch.full_like(losses, float(bool(interrupted)))
        of_all = everyone(torch.stack([losses, flags], 1).double(), self.comm, losses.device)  # [K, 2]
        self._interrupted = bool(of_all[:, 1].any())
        return metrics._replace(losses=of_all[:, 0].to(losses.dtype))

    def stop(self, interrupted: list[int]) -> bool:
        """Return whether the run ends after this step."""
        return bool(interrupted) if self.num_processes == 1 else self._interrupted

    def each(self, value: Any) -> list[Any]:
        """Return every process's value, in the order of their ranks."""
        return [value] if self.wire is None else self.wire.all_gather_object(value)

    def first(self, find: Callable[[], T]) -> T:
        """Return in all processes what the first one finds; its error is raised in all."""
        if self.wire is None:
            return find()
        outcome: tuple[Any, Exception | None] = None, None
        if self.rank == 0:
            try:
                outcome = find(), None
            except (OSError, ValueError, TypeError) as error:
                outcome = None, error
        value, failure = self.wire.broadcast_object(outcome)
        if failure is not None:
            raise failure
        return value

    def gathered(self, values: Any, device: torch.device) -> Any:
        """Gather nested values of the nodes here from all nodes, in the first process and on the CPU; elsewhere None.

        What is the same on every node is `[1, *]`, as it would be in one process. What a process lacks, since none
        of its nodes has trained yet, is 0 there.
        """
        if self.wire is None or self.num_processes == 1:
            return plain(values, "state")
        here = dict(tree.flatten(values))
        forms = self.each({path: self._form(x) for path, x in here.items()})
        gathered = {}
        for path in dict.fromkeys(path for form in forms for path in form):
            value = self._gathered_leaf(here.get(path), [form.get(path) for form in forms], device)
            if self.rank == 0:
                gathered[path] = plain(value, "state")
        return tree.unflatten(gathered) if self.rank == 0 else None

    def rows_here(self, values: Any) -> Any:
        """Return the rows of the nodes here in nested values of all nodes."""
        if self.num_processes == 1:
            return values
        first, last, K = int(self.comm.node_ids[0]), int(self.comm.node_ids[-1]) + 1, self.comm.num_nodes
        return tree.map_leaves(lambda x: x[first:last] if x.dim() > 0 and len(x) == K > 1 else x, values)

    def _form(self, x: Any) -> Any:
        """Return what other processes must know of a value: of a tensor of nodes its shape and type, else itself."""
        if isinstance(x, Tensor) and x.dim() > 0 and len(x) in (1, len(self.comm.node_ids)):
            return _Form(len(x), x.shape[1:], x.dtype)
        return x

    def _gathered_leaf(self, x: Any, forms: Sequence[Any], device: torch.device) -> Any:
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


def _rows_equal(x: Tensor) -> bool:
    """Compare to the bit: 0 is not -0."""
    if x.numel() == 0:
        return True
    rows = x.contiguous().view(-1).view(torch.uint8).view(len(x), -1)
    return bool((rows == rows[:1]).all())


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread within operations: sums that several share depend on how many they are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
