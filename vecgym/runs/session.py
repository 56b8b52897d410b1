"""Keep the processes of a run in step: what they tell one another besides what the strategy exchanges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from vecgym.collectives import Collectives, StackedCollectives
from vecgym.collectives.distributed import DistributedCollectives
from vecgym.collectives.wire import Wire
from vecgym.core import tree
from vecgym.engine import ModelFacts
from vecgym.engine.simulation import Metrics
from vecgym.records.runfile import plain
from vecgym.runs import multiprocess
from vecgym.runs.evaluation import everyone
from vecgym.runs.options import FitOptions, resolve_device

T = TypeVar("T")


@contextmanager
def joined_nodes(
    options: FitOptions, watch: Callable[[], None] = lambda: None
) -> Iterator[tuple[Collectives, torch.device]]:
    """Yield the collectives and the device of the nodes in this process: all nodes, or its part if "distributed".

    Args:
        watch: see `Wire`.
    """
    device = resolve_device(options.device)
    with torch_set(threads=1) if options.exact else nullcontext():
        if options.backend == "stacked":
            yield StackedCollectives(options.num_nodes), device
            return
        with multiprocess.joined(device) as device, closing(Wire(watch=watch)) as wire:
            yield DistributedCollectives(options.num_nodes, wire, exact=options.exact), device
            wire.finish()


class Session:
    """Keep the processes of a run in step; with one process, nothing is exchanged."""

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
        """Return the numbers of all nodes, given one for each node here."""
        return tuple(count for part in self.each(list(counts)) for count in part)

    def facts(self, facts: ModelFacts) -> ModelFacts:
        """Return what the first process knows of the model: which parameters are trained, say."""
        known = {name: vars(facts)[name] for name in ("unused", "mutated", "random", "written")}
        return replace(facts, **self.first(lambda: known))

    def observed(self, metrics: Metrics, interrupted: list[int]) -> Metrics:
        """Return the losses of all nodes; interrupts travel with them, so that all stop after the same step.

        Where nodes may be absent, so do the rates of those present.
        """
        if self.num_processes == 1:
            return metrics
        losses, own_rates = metrics.losses, metrics.num_present is not None
        columns = [losses, torch.full_like(losses, float(bool(interrupted)))]
        columns += [torch.as_tensor(metrics.lr, device=losses.device)] if own_rates else []
        of_all = everyone(torch.stack([x.double() for x in columns], 1), self.comm, losses.device)  # [K, 2 or 3]
        self._interrupted = bool(of_all[:, 1].any())
        lr: Any = metrics.lr
        if own_rates:
            rates = of_all[:, 2][~of_all[:, 2].isnan()]
            lr = float(rates[0]) if bool((rates == rates[0]).all()) else rates
        return metrics._replace(losses=of_all[:, 0].to(losses.dtype), lr=lr)

    def stop(self, interrupted: list[int]) -> bool:
        """Return whether the run ends after this step."""
        return bool(interrupted) if self.num_processes == 1 else self._interrupted

    def each(self, value: Any) -> list[Any]:
        """Return every process's value, in the order of their ranks."""
        return [value] if self.wire is None else self.wire.all_gather_object(value)

    def first(self, find: Callable[[], T]) -> T:
        """Return in all processes what the first one finds; raise its error in all of them."""
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

    def gathered(self, values: Any) -> Any:
        """Gather nested values of the nodes from all processes, on the CPU of the first; elsewhere return None.

        A value that is the same on every node is `[1, *]`, as it would be in one process. A value that a process
        lacks, because none of its nodes has trained yet, is 0 there.
        """
        if self.wire is None or self.num_processes == 1:
            return plain(values, "state")
        leaves = dict(tree.flatten(values))
        paths = dict.fromkeys(path for process in self.each(list(leaves)) for path in process)
        gathered = {}
        for path in paths:
            parts = self.each(plain(leaves.get(path), f"state{tree.path_name(path)}"))
            if self.rank == 0:
                gathered[path] = _joined_rows(parts, len(self.comm.node_ids))
        return tree.unflatten(gathered) if self.rank == 0 else None

    def rows_here(self, values: Any) -> Any:
        """Return the rows of the nodes here, given nested values of all nodes."""
        if self.num_processes == 1:
            return values
        first, last, K = int(self.comm.node_ids[0]), int(self.comm.node_ids[-1]) + 1, self.comm.num_nodes
        return tree.map_leaves(lambda x: x[first:last] if x.dim() > 0 and len(x) == K > 1 else x, values)


def _joined_rows(parts: Sequence[Any], num_local: int) -> Any:
    """Join the values of all processes: tensors `[1 or L, *]` to `[1 or K, *]`; of anything else return the first.

    A process that lacks the value gives None.
    """
    first = next((x for x in parts if x is not None), None)
    if not isinstance(first, Tensor) or first.dim() == 0 or len(first) not in (1, num_local):
        return first
    if num_local > 1 and all(x is not None and len(x) == 1 for x in parts):
        return first
    present = [torch.zeros_like(first[:1]) if x is None else x for x in parts]
    rows = torch.cat([x.expand(num_local, *first.shape[1:]) for x in present])  # [K, *]
    return rows[:1].clone() if num_local == 1 and _rows_equal(rows) else rows


def _rows_equal(x: Tensor) -> bool:
    """Whether all rows have the same bits: 0 is not -0."""
    if x.numel() == 0:
        return True
    rows = x.contiguous().view(-1).view(torch.uint8).view(len(x), -1)
    return bool((rows == rows[:1]).all())


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {  # of torch, on which bits depend
    "threads": (torch.get_num_threads, torch.set_num_threads),  # within operations: sums depend on how many share them
    "dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "matmul": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda both: torch.use_deterministic_algorithms(both[0], warn_only=both[1]),
    ),
}


def torch_settings() -> dict[str, Any]:
    """Return torch's settings in this process, by name."""
    return {name: get() for name, (get, _) in SETTINGS.items()}


@contextmanager
def torch_set(**settings: Any) -> Iterator[None]:
    """Compute with other settings of torch.

    >>> with torch_set(dtype=torch.float64):
    ...     torch.zeros(()).dtype
    torch.float64
    """
    before = torch_settings()
    changed = [name for name, value in settings.items() if value != before[name]]
    try:
        for name in changed:
            SETTINGS[name][1](settings[name])
        yield
    finally:
        for name in changed:
            SETTINGS[name][1](before[name])
