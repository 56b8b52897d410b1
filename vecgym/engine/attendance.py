"""What an availability is: who is present in which steps, as a function of the run and the step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from vecgym.core import check

Rejoin = Literal["own", "shared", "neighbour"]
Table = Callable[[int, int], Tensor]  # of the steps from the first to before the last: bool [last - first, K]


class Facts(NamedTuple):
    """What an availability may know of a run.

    Attributes:
        num_nodes: K.
        num_steps: T.
        seed: of the run.
        compute: how long the nodes compute, a `vecgym.clock.Compute`; None where not given.
        num_examples: of each node's shard, `[K]`; None where not known.
        batch_size: examples per node and step; None where not known.

    >>> Facts(num_nodes=4, num_steps=10, seed=42).compute is None
    True
    """

    num_nodes: int
    num_steps: int
    seed: int
    compute: Any = None
    num_examples: tuple[int, ...] | None = None
    batch_size: int | None = None


class Availability(ABC):
    """Which nodes are present in which steps. Override `present`; or give `fit` a function of the step instead.

    Attributes:
        rejoin: what a node begins with when it returns: "own", "shared" or "neighbour".

    >>> class Halves(Availability):
    ...     rejoin = "shared"
    ...     def present(self, run):
    ...         half = torch.arange(run.num_nodes) < run.num_nodes // 2
    ...         return lambda first, last: torch.stack([half if t % 2 else ~half for t in range(first, last)])
    >>> halves, run = Halves(), Facts(num_nodes=4, num_steps=2, seed=0)
    >>> halves.check(run)
    >>> halves.present(run)(0, 2), halves.training(run)
    (tensor([[False, False,  True,  True],
            [ True,  True, False, False]]), None)
    """

    rejoin: Rejoin = "own"

    @property
    def server(self) -> bool:
        """Whether a server holds what the nodes share.

        Means over all of their parameters or movements then go through it, and what it sends after an exchange is for
        those who begin next.

        >>> from vecgym.engine.availability import Dropout, Sampled
        >>> Sampled(0.5).server, Sampled(0.5, rejoin="own").server, Dropout(0.1).server
        (True, False, False)
        """
        return False

    def check(self, run: Facts) -> None:
        """Raise a ValueError if this cannot be meant for the run."""
        return

    @abstractmethod
    def present(self, run: Facts) -> Table:
        """Return the function of two steps that says who is present from the first to before the last, `[n, K]`."""

    def training(self, run: Facts) -> Table | None:
        """Return the same for those who train, where some only exchange; None: all who are present."""
        return None

    def __and__(self, other: Availability) -> Availability:
        """Return what is present, and trains, in both; `rejoin` is that of the first."""
        return Both(self, check.instance("other", other, Availability, "another Availability"))

    def __repr__(self) -> str:
        shown = (f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({', '.join(shown)})"


class Both(Availability):
    """What is present, and trains, in both of two availabilities; `a & b` makes it.

    >>> from vecgym.engine.availability import Dropout, LocalSteps
    >>> Dropout(0.1) & LocalSteps([1, 2], H=2)
    (Dropout(rate=0.1, mean_steps=20, rejoin='own') & LocalSteps(H=2, steps=[1, 2], epochs=None))
    """

    def __init__(self, first: Availability, second: Availability) -> None:
        self.first, self.second, self.rejoin = first, second, first.rejoin

    @property
    def server(self) -> bool:
        return self.rejoin == "shared" and (self.first.server or self.second.server)

    def check(self, run: Facts) -> None:
        self.first.check(run)
        self.second.check(run)

    def present(self, run: Facts) -> Table:
        a, b = self.first.present(run), self.second.present(run)
        return lambda first, last: a(first, last) & b(first, last)

    def training(self, run: Facts) -> Table | None:
        given = [table for table in (self.first.training(run), self.second.training(run)) if table is not None]
        if len(given) < 2:
            return given[0] if given else None
        return lambda first, last: given[0](first, last) & given[1](first, last)

    def __repr__(self) -> str:
        return f"({self.first!r} & {self.second!r})"


def by_rounds(of_round: Callable[[int], Tensor], H: int) -> Table:
    """Return the table of what is the same in each round of H steps.

    >>> by_rounds(lambda number: torch.tensor([number == 1]), H=2)(1, 4).flatten()
    tensor([False,  True,  True])
    """

    def table(first: int, last: int) -> Tensor:
        rounds = range(first // H, -(-last // H))
        wide = torch.stack([of_round(number) for number in rounds]).repeat_interleave(H, 0)
        return wide[first - rounds.start * H :][: last - first]

    return table


def checked_rejoin(rejoin: Any) -> Rejoin:
    """Return what a node that returns begins with, if it is known.

    >>> checked_rejoin("own")
    'own'
    """
    check.choice("rejoin", rejoin, get_args(Rejoin))
    found: Rejoin = rejoin
    return found
