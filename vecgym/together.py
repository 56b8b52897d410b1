"""What the processes of a run tell one another to stay in step, beside what the strategy exchanges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from vecgym.collectives import Collectives
from vecgym.collectives.distributed import DistributedCollectives
from vecgym.evaluate import everyone
from vecgym.local import ModelFacts
from vecgym.simulate import Metrics


class Together:
    """What the processes of a run tell one another to stay in step; with one process, nothing."""

    def __init__(self, comm: Collectives) -> None:
        self.comm = comm
        self.wire = comm.wire if isinstance(comm, DistributedCollectives) else None
        self.num_processes = self.wire.num_processes if self.wire is not None else 1
        self._interrupted = False

    def largest(self, count: int) -> int:
        return max(self._each(count))

    def smallest(self, count: int) -> int:
        return min(self._each(count))

    def joined(self, counts: Sequence[int]) -> tuple[int, ...]:
        """A number of each node here -> of each of all nodes."""
        return tuple(count for part in self._each(list(counts)) for count in part)

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

    def _each(self, value: Any) -> list[Any]:
        return [value] if self.wire is None else self.wire.all_gather_object(value)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread within operations: sums that several share depend on how many they are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
