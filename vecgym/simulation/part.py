"""The rows that an event is about: what its handler sees, and all that it may touch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from vecgym.collectives import Collectives
from vecgym.core import rng
from vecgym.core.tree import Tree
from vecgym.simulation.state import Index, Rows, put_back
from vecgym.simulation.timetable import Event

if TYPE_CHECKING:
    from vecgym.simulation.simulation import Draft, Simulation


class Place(NamedTuple):
    """Where the rows of an event are; the same for every event of these rows.

    Attributes:
        rows: those in this process.
        index: of these among all rows of this process.
        comm: the collectives among the rows of the event, in all processes.
    """

    rows: list[int]
    index: Index
    comm: Collectives


class Part:
    """The rows of an event. What is assigned to `own` and `shared` is put back when the event has been handled.

    Attributes:
        own: what these nodes have of their own, `part.own["params"]` for instance, `[rows, *]`.
        shared: what all nodes have together, `[1, *]`.
        home: the one of the two in which parameters and optimizer are.
        comm: the collectives among these nodes.
        counts: what data, rates and random numbers go by: one number, or one for each row.
        made: optimizer steps that the nodes have made, likewise.
        losses: of the last `gradients`, `[rows]`.
        memo: what handlers keep within a tick.
    """

    def __init__(self, simulation: Simulation, draft: Draft, event: Event) -> None:
        self.simulation, self.event = simulation, event
        self._draft = draft
        self.rows, index, self.comm = simulation.place(event.rows)
        self.own, self.shared = Rows(draft.own, index, len(simulation.here)), Rows(draft.shared, None, 1)
        self.home = self.shared if "params" in draft.shared else self.own
        self.counts = self._here(event.counts)
        self.made = self.counts if event.made is None else self._here(event.made)
        self.losses: Tensor | None = None
        self.memo = draft.memo

    @property
    def tick(self) -> int:
        """Ticks done before this one."""
        return self._draft.tick

    @property
    def inplace(self) -> bool:
        """Whether tensors that were taken may be written to; not under differentiation."""
        return not self._draft.pure

    @property
    def params(self) -> Tree:
        """The parameters of these rows, wherever they are; what is `[1, *]` is given to every row."""
        params: Tree = self.home["params"]
        return params

    @params.setter
    def params(self, new: Tree) -> None:
        self.home["params"] = new

    def gradients(self, at: Tree | None = None, mean: bool = False) -> Tree:
        """Compute the gradients of these rows on their next batches, at their parameters or elsewhere.

        Args:
            at: other parameters, `[1 or rows, *]`.
            mean: only the mean of the gradients is needed, `[1, *]`.
        """
        local = self.simulation.gradients(self, self.params if at is None else at, mean)
        self.losses = local.losses
        return local.grads

    def report(self, losses: Tensor) -> None:
        """Give the losses of these rows to the tick's row of the history."""
        self._draft.reports.append((self.rows, losses.clone() if losses._is_view() else losses))

    def generator(self, purpose: str, *ids: int) -> torch.Generator:
        """Return a generator keyed by the run's seed, the purpose and the ids: the same in every process."""
        return rng.generator(self.simulation.run.seed, purpose, *ids)

    def next_batch(self) -> tuple[Any, list[int] | None]:
        """Return the batch that these rows read next, and of each how many examples are its own; None: all."""
        batch, limits = next(self._draft.batches)
        return batch, limits

    def put(self) -> None:
        """Write what was assigned into the state of the tick."""
        put_back([self.own, self.shared], pure=self._draft.pure)

    def _here(self, counts: int | tuple[int, ...]) -> int | list[int]:
        """Return the counts of the rows in this process; one number where all are equal."""
        if isinstance(counts, int):
            return counts
        rows = range(self.simulation.run.num_nodes) if self.event.rows is None else self.event.rows
        of = dict(zip(rows, counts))
        each = [of[row] for row in self.rows]
        return each[0] if len(set(each)) == 1 else each
