"""Which nodes are present, step by step: an `Availability` in a run, evaluated before the run begins."""

from __future__ import annotations

import torch
from torch import Tensor

from vecgym.core.errors import warn
from vecgym.simulation.availability import Availability, Facts

BLOCK = 1024  # steps evaluated together


class Presence:
    """Which nodes are present, and which train, in each step of a run.

    Attributes:
        availability: the rule.
        rejoin: see `vecgym.simulation.availability`.
        server: whether a server holds what the nodes share.
        counts: the numbers of present nodes that occur in the run.
        waits: whether a node may be present and not train.

    Raises:
        ValueError: if no node is present in some step.

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
        self.first = torch.full((run.num_nodes,), run.num_steps)  # the first step in which each node is present
        for number in range(-(-run.num_steps // BLOCK)):
            present = self._block(number)[0]
            counts = present.sum(1)
            if bool((counts == 0).any()):
                step = number * BLOCK + int((counts == 0).nonzero()[0])
                raise ValueError(
                    f"availability={availability!r}: no node is present in step {step} (counted from 0), and at least "
                    "one must be: give more nodes, another seed, or fewer absences."
                )
            self.counts.update(counts.unique().tolist())
            first = torch.where(present.any(0), number * BLOCK + present.int().argmax(0), run.num_steps)
            self.first = torch.minimum(self.first, first)

    def present(self, step: int) -> tuple[int, ...] | None:
        """Return the ids of the present nodes; None: all."""
        row = self.row(step)
        return None if bool(row.all()) else tuple(row.nonzero().flatten().tolist())

    def training(self, step: int) -> tuple[int, ...] | None:
        """Return the ids of the present nodes that train; None: all of them."""
        present, training = self._block(step // BLOCK)
        if training is None:
            return None
        all_present, row = present[step % BLOCK], (present & training)[step % BLOCK]
        return None if torch.equal(all_present, row) else tuple(row.nonzero().flatten().tolist())

    def returning(self, step: int) -> tuple[int, ...]:
        """Return the ids of the present nodes that were absent in the step before."""
        if step == 0:
            return ()
        return tuple((self.row(step) & ~self.row(step - 1)).nonzero().flatten().tolist())

    def row(self, step: int) -> Tensor:
        """Return which nodes are present, bool `[K]`.

        >>> from vecgym.simulation.availability import Trace
        >>> Presence(Trace([[True, False]]), Facts(2, 1, seed=0)).row(0)
        tensor([ True, False])
        """
        return self._block(step // BLOCK)[0][step % BLOCK]

    def never_present(self, step: int) -> int:
        """Count the nodes that have not been present in any step so far, this one included.

        >>> from vecgym.simulation.availability import Trace
        >>> presence = Presence(Trace([[True, False, False], [True, False, True]]), Facts(3, 2, seed=0))
        >>> presence.never_present(0), presence.never_present(1)
        (2, 1)
        """
        return int((self.first > step).sum())

    def tell(self) -> None:
        """Warn about nodes that are absent in every step of the run."""
        if absent := (self.first == self.run.num_steps).nonzero().flatten().tolist():
            names = f"{absent}" if len(absent) <= 10 else f"{absent[:10]} ..."
            warn(
                f"availability={self.availability!r}: {len(absent)} of {self.run.num_nodes} nodes are never present, "
                f"{names}, and no average counts them."
            )

    def computing(self, step: int) -> Tensor:
        """Return which nodes train, bool `[K]`: all that are present, or fewer.

        >>> from vecgym.simulation.availability import LocalSteps
        >>> Presence(LocalSteps([1, 2], H=2), Facts(2, 2, seed=0)).computing(1)
        tensor([False,  True])
        """
        present, training = self._block(step // BLOCK)
        return present[step % BLOCK] if training is None else (present & training)[step % BLOCK]

    def _block(self, number: int) -> tuple[Tensor, Tensor | None]:
        """Return the tables of `BLOCK` steps; keep the last two."""
        if number not in self._blocks:
            while len(self._blocks) > 1:
                self._blocks.pop(next(iter(self._blocks)))
            first, last = number * BLOCK, min((number + 1) * BLOCK, self.run.num_steps)
            training = None if self._training is None else self._checked(self._training(first, last), last - first)
            self._blocks[number] = self._checked(self._present(first, last), last - first), training
        return self._blocks[number]

    def _checked(self, table: Tensor, num_steps: int) -> Tensor:
        shape = [num_steps, self.run.num_nodes]
        if not isinstance(table, Tensor) or list(table.shape) != shape or table.dtype != torch.bool:
            raise ValueError(f"{self.availability!r} returned {table!r}; expected a bool tensor of shape {shape}.")
        return table


def missed(presence: Presence, rows: Tensor | None, step: int) -> Tensor | None:
    """Return which nodes, of `rows` or of all, were absent in a step; None: none."""
    absent = ~presence.row(step)
    absent = absent if rows is None else absent[rows]
    return absent if bool(absent.any()) else None
