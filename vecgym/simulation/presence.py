"""Who is present, step by step: an `Availability` in a run, looked at before the run begins."""

from __future__ import annotations

import torch
from torch import Tensor

from vecgym.core.errors import warn
from vecgym.simulation.availability import Availability, Facts

BLOCK = 1024  # steps looked at together


class Presence:
    """Who is present, and who trains, in each step of a run.

    Attributes:
        availability: it.
        rejoin: see `vecgym.simulation.availability`.
        server: whether what the nodes share goes through a server.
        counts: how many nodes are present in the steps of the run.
        waits: whether some of those present may not train.

    Raises:
        ValueError: for a step in which nobody is present.

    >>> from vecgym.simulation.availability import Trace
    >>> presence = Presence(Trace([[True, False, True], [True, True, True]]), Facts(3, 2, seed=0))
    >>> presence.present(0), presence.present(1), presence.returning(1), presence.training(0)
    ((0, 2), None, (1,), None)
    """

    def __init__(self, availability: Availability, run: Facts) -> None:
        availability.check(run)
        self.availability, self.rejoin, self.run = availability, availability.rejoin, run
        self.server = availability.server
        self._present, self._training = availability.present(run), availability.training(run)
        self.waits = self._training is not None
        self._blocks: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.counts: set[int] = set()
        self.first = torch.full((run.num_nodes,), run.num_steps)  # the step in which each node is there first
        for number in range(-(-run.num_steps // BLOCK)):
            there = self._block(number)[0]
            counts = there.sum(1)
            if bool((counts == 0).any()):
                step = number * BLOCK + int((counts == 0).nonzero()[0])
                raise ValueError(
                    f"availability={availability!r}: no node is present in step {step} (counted from 0). At least one "
                    "must be: give more nodes, another seed, or let fewer of them be absent."
                )
            self.counts.update(counts.unique().tolist())
            begun = torch.where(there.any(0), number * BLOCK + there.int().argmax(0), run.num_steps)
            self.first = torch.minimum(self.first, begun)

    def present(self, step: int) -> tuple[int, ...] | None:
        """Return the ids of those present; None: all."""
        row = self.row(step)
        return None if bool(row.all()) else tuple(row.nonzero().flatten().tolist())

    def training(self, step: int) -> tuple[int, ...] | None:
        """Return the ids of those present who train; None: all of these."""
        there, training = self._block(step // BLOCK)
        if training is None:
            return None
        present, row = there[step % BLOCK], (there & training)[step % BLOCK]
        return None if torch.equal(present, row) else tuple(row.nonzero().flatten().tolist())

    def returning(self, step: int) -> tuple[int, ...]:
        """Return the ids of those present who were not in the step before."""
        if step == 0:
            return ()
        return tuple((self.row(step) & ~self.row(step - 1)).nonzero().flatten().tolist())

    def row(self, step: int) -> Tensor:
        """Return who is present, bool `[K]`.

        >>> from vecgym.simulation.availability import Trace
        >>> Presence(Trace([[True, False]]), Facts(2, 1, seed=0)).row(0)
        tensor([ True, False])
        """
        return self._block(step // BLOCK)[0][step % BLOCK]

    def never_present(self, step: int) -> int:
        """Count the nodes that are not there in this step, nor in any before it.

        >>> from vecgym.simulation.availability import Trace
        >>> presence = Presence(Trace([[True, False, False], [True, False, True]]), Facts(3, 2, seed=0))
        >>> presence.never_present(0), presence.never_present(1)
        (2, 1)
        """
        return int((self.first > step).sum())

    def tell(self) -> None:
        """Warn of nodes that are not there in any step of the run."""
        if absent := (self.first == self.run.num_steps).nonzero().flatten().tolist():
            shown = f"{absent}" if len(absent) <= 10 else f"{absent[:10]} ..."
            warn(
                f"availability={self.availability!r}: {len(absent)} of {self.run.num_nodes} nodes are never there, "
                f"{shown}, and no average counts them."
            )

    def computing(self, step: int) -> Tensor:
        """Return who trains, bool `[K]`: all that are present, or fewer.

        >>> from vecgym.simulation.availability import LocalSteps
        >>> Presence(LocalSteps([1, 2], H=2), Facts(2, 2, seed=0)).computing(1)
        tensor([False,  True])
        """
        there, training = self._block(step // BLOCK)
        return there[step % BLOCK] if training is None else (there & training)[step % BLOCK]

    def _block(self, number: int) -> tuple[Tensor, Tensor | None]:
        """Return the tables of `BLOCK` steps; the last two are kept."""
        if number not in self._blocks:
            while len(self._blocks) > 1:
                self._blocks.pop(next(iter(self._blocks)))
            first, last = number * BLOCK, min((number + 1) * BLOCK, self.run.num_steps)
            training = None if self._training is None else self._checked(self._training(first, last), last - first)
            self._blocks[number] = self._checked(self._present(first, last), last - first), training
        return self._blocks[number]

    def _checked(self, table: Tensor, num_steps: int) -> Tensor:
        wanted = [num_steps, self.run.num_nodes]
        if not isinstance(table, Tensor) or list(table.shape) != wanted or table.dtype != torch.bool:
            raise ValueError(f"{self.availability!r} gave {table!r}; expected truth values, a bool tensor {wanted}.")
        return table


def missed(presence: Presence, rows: Tensor | None, step: int) -> Tensor | None:
    """Return which nodes, those in `rows` or all, were absent in a step; None: none was."""
    absent = ~presence.row(step)
    absent = absent if rows is None else absent[rows]
    return absent if bool(absent.any()) else None
