"""Which nodes are present, step by step: an `Availability` in a run, evaluated before the run begins.

Further below: what returning nodes begin with, and who sends it; see `vecgym.simulation.availability`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vecgym.collectives import Collectives
from vecgym.collectives.topology import Links
from vecgym.core import nodes, rng
from vecgym.core.errors import warn
from vecgym.core.tree import Tree
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
        self._block = functools.lru_cache(2)(self._make_block)
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
        return None if bool(row.all()) else tuple(_ids(row))

    def training(self, step: int) -> tuple[int, ...] | None:
        """Return the ids of the present nodes that train; None: all of them."""
        computing = self.computing(step)
        return None if torch.equal(self.row(step), computing) else tuple(_ids(computing))

    def returning(self, step: int) -> tuple[int, ...]:
        """Return the ids of the present nodes that were absent in the step before."""
        if step == 0:
            return ()
        return tuple(_ids(self.row(step) & ~self.row(step - 1)))

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
        if absent := _ids(self.first == self.run.num_steps):
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
        return self._block(step // BLOCK)[1][step % BLOCK]

    def _make_block(self, number: int) -> tuple[Tensor, Tensor]:
        """Return who is present in `BLOCK` steps, and who trains."""
        first, last = number * BLOCK, min((number + 1) * BLOCK, self.run.num_steps)
        present = self._checked(self._present(first, last), last - first)
        if self._training is None:
            return present, present
        return present, present & self._checked(self._training(first, last), last - first)

    def _checked(self, table: Tensor, num_steps: int) -> Tensor:
        shape = [num_steps, self.run.num_nodes]
        if not isinstance(table, Tensor) or list(table.shape) != shape or table.dtype != torch.bool:
            raise ValueError(f"{self.availability!r} returned {table!r}; expected a bool tensor of shape {shape}.")
        return table


# --------------------------------------------------------------------------------------------------- returning nodes


class Shared(NamedTuple):
    """What the nodes that were present in the step before share.

    Attributes:
        outer: parameters that are stored once for all, `[1, *]`.
        agreed: names of the parameters that are equal on all of these nodes, which have just exchanged them.
    """

    outer: Tree
    agreed: set[str]


def sent(
    params: Tree, presence: Presence, shared: Shared, comm: Collectives, step: int, once: Sequence[str]
) -> Tree:  # fmt: skip
    """Return the parameters that returning nodes begin a step with, `[1 or n, *]`, and record what is sent.

    What a server sends after an exchange is for the nodes that are present next: as many of them as have left need
    nothing more.

    Args:
        params: of the nodes here, `[1 or L, *]`.
        once: the names of the parameters that all nodes share.

    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.simulation.availability import Facts, Trace
    >>> presence = Presence(Trace([[True, True, False], [True] * 3], rejoin="shared"), Facts(3, 2, seed=0))
    >>> sent({"w": torch.tensor([1.0, 3.0, 9.0])}, presence, Shared({}, set()), StackedCollectives(3), 1, once=[])
    {'w': tensor([2.])}
    """
    back = presence.returning(step)
    sources, common = sources_of(back, presence, step), Tree()
    if presence.rejoin == "shared":
        wide = {name: x for name, x in params.items() if name not in {*shared.outer, *shared.agreed, *once}}
        common = shared.outer | _mean(wide, _ids(presence.row(step - 1)), comm)
    num_left = int((presence.row(step - 1) & ~presence.row(step)).sum())
    on_server = shared.agreed if presence.server else set()
    for served, first in ((False, 0), (True, num_left)):
        message = {name: x for name, x in params.items() if (name in on_server) is served}
        if message and back[first:]:
            comm._announce("permute", message, Links.of(torch.tensor(sources[first:]), torch.tensor(back[first:])))
    rest = {name: x for name, x in params.items() if name not in common}
    values = {**common, **(comm.fetched(rest, sources, back) if rest else {})}
    return {name: values[name] for name in params}  # in the model's order, by which fragments are cut


def sources_of(back: Sequence[int], presence: Presence, step: int) -> list[int]:
    """Return the node that sends parameters to each returning node: with "shared" one, else one drawn for each.

    >>> from vecgym.simulation.availability import Facts, Trace
    >>> presence = Presence(Trace([[False, True, True], [True, True, True]], rejoin="shared"), Facts(3, 2, seed=0))
    >>> sources_of([0], presence, step=1)
    [1]
    """
    present, before = presence.row(step), presence.row(step - 1)
    staying = _ids(present & before) or _ids(before)
    if presence.rejoin == "shared":
        return [staying[0]] * len(back)
    draws = [rng.generator(presence.run.seed, "neighbour", step, node) for node in back]
    return [staying[int(torch.randint(len(staying), (), generator=draw))] for draw in draws]


def _mean(wide: Tree, members: list[int], comm: Collectives) -> Tree:
    """Average over some nodes, `[1, *]`; the mean of equal values is exact. One node alone needs no mean: empty."""
    if not wide or len(members) == 1:
        return {}
    some, ids = comm.among(members), set(members)
    some.step = comm.step
    some._announce("mean", wide)
    here = [i for i, node in enumerate(comm.node_ids.tolist()) if node in ids]
    rows = nodes.take_rows(wide, torch.tensor(here or [0]))
    means = some._apply(rows, lambda among, x: among._sum(x, None, True) if among.native else nodes.means(x, 1))
    return {name: x[:1] for name, x in means.items()}


def _ids(present: Tensor) -> list[int]:
    ids: list[int] = present.nonzero().flatten().tolist()
    return ids
