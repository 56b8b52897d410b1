"""Availability: which nodes are present in which steps of a run.

Pass an `Availability` to `Trainer.fit(availability=...)`, with any strategy. It is a pure function of the run's seed
and the step: nothing in it evolves, so a run can be resumed anywhere.

The present nodes train and exchange among themselves. The others keep all they have: parameters, buffers and the inner
optimizer's state. The present nodes also continue the state that a strategy stores once for all nodes, such as outer
parameters. `rejoin` chooses the parameters with which a node returns:

- "own": its own;
- "shared": the model that the other nodes share. These are the parameters if they are stored once for all, as in
  AllReduce, or the outer parameters, as in DiLoCo, or otherwise the mean over the nodes that were present in the step
  before. A present node sends them once; a mean takes a separate exchange, unless the nodes have just averaged. With
  `Sampled` a server holds them, and its messages at the end of a round are enough;
- "neighbour": those of one present node, drawn at random.

One rule holds wherever nodes are drawn for each round, by `Sampled` or by the `participation` of an exchange:

- `drawn` draws the nodes of round r.
- Data and random numbers follow a node's own steps: it goes on where its data ended.
- The learning rate follows the run's steps: a schedule is the server's, and the nodes of a round have the same rate.
- An optimizer's step count, such as Adam's, counts a node's own steps.
- The run's model has the mean of the buffers, such as batch norm's statistics, over all nodes that have trained so far.

With other absences, a learning rate follows the step count of the state that it trains, and so does an optimizer's
step count:

- The state of a single node follows the number of steps that this node has taken.
- State that is stored once for all nodes follows the run's steps. Parameters and the inner optimizer's state are stored
  once if all nodes exchange gradients, use the same rates, and return with "shared" or "neighbour"; a returning node
  takes both. With "own", with a rate for each node, or beside an exchange that is late or loses messages, each node has
  its own parameters, moments and count, and a returning node takes only the parameters.
- The rate of an outer optimizer follows the exchanges of the run. The nodes share its state; in islands each has its
  own, with a count of the exchanges in which it took part.
- Data and random numbers follow a node's own steps.
- The run's model has the mean of the buffers over the present nodes that have trained.

In an asynchronous run, whose nodes do not take steps together, row t stands for an interval of simulated time: the
duration of a step, averaged over the nodes. An absent node begins no step, and continues with its own parameters when
it returns ("own").

>>> import vecgym
>>> from vecgym.models import Line
>>> from vecgym.strategy import AllReduceStrategy
>>> trainer, strategy = vecgym.Trainer(Line(), torch.arange(8.0)), AllReduceStrategy("sgd", lr=0.1)
>>> averaged = trainer.fit(
...     strategy, num_nodes=4, max_steps=3, batch_size=2, device="cpu", progress=False,
...     availability=vecgym.availability.Trace([[True] * 4, [True, True, False, True], [True] * 4], rejoin="shared")
... )
>>> trainer.history["num_present"], trainer.run.simulation.timetable.made(3)  # steps that each node has done
([4, 3, 4], [3, 3, 2, 3])
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from vecgym.collectives.topology import sample_nodes
from vecgym.core import check, rng
from vecgym.core.errors import warn
from vecgym.data.batches import steps_of_pass

__all__ = [
    "Availability", "Deadline", "Dropout", "Facts", "Function", "LocalSteps", "Sampled", "Trace", "as_availability",
]  # fmt: skip

Rejoin = Literal["own", "shared", "neighbour"]
Table = Callable[[int, int], Tensor]  # (first, last) -> bool [last - first, K], for steps first to last - 1
BLOCK = 1024  # steps of a table that are evaluated together


class Facts(NamedTuple):
    """The facts of a run on which an availability may depend.

    Attributes:
        num_nodes: K.
        num_steps: T.
        seed: of the run.
        compute: how long the nodes compute, a `vecgym.clock.Compute`; None: not specified.
        num_examples: of each node's shard, `[K]`; None: unknown.
        batch_size: examples per node and step; None: unknown.
        drop_last: whether a smaller last batch is left out.

    >>> Facts(num_nodes=4, num_steps=10, seed=42).compute is None
    True
    """

    num_nodes: int
    num_steps: int
    seed: int
    compute: Any = None
    num_examples: tuple[int, ...] | None = None
    batch_size: int | None = None
    drop_last: bool = False


class Availability(ABC):
    """The rule for the presence of nodes. Override `present`, or pass a function of the step to `fit`.

    Attributes:
        rejoin: the parameters with which a node returns: "own", "shared" or "neighbour".
        sampled: whether nodes are drawn for each round; see the rule above.
        own_epochs: whether a node's epoch is one pass over its own examples; if not, epochs have the length of the
            longest shard.

    >>> from vecgym.availability import Dropout, LocalSteps, Sampled
    >>> Sampled(0.5).sampled, (Dropout(0.1) & Sampled(0.5)).sampled, Dropout(0.1).sampled
    (True, True, False)
    >>> (Sampled(0.5, H=10) & LocalSteps(epochs=1, H=10)).own_epochs, LocalSteps([5, 10], H=10).own_epochs
    (True, False)
    >>> class Halves(Availability):
    ...     rejoin = "shared"
    ...     def present(self, run):
    ...         half = torch.arange(run.num_nodes) < run.num_nodes // 2
    ...         return lambda first, last: torch.stack([half if t % 2 else ~half for t in range(first, last)])
    >>> halves, run = Halves(), Facts(num_nodes=4, num_steps=2, seed=0)
    >>> halves.present(run)(0, 2), halves.training(run)
    (tensor([[False, False,  True,  True],
            [ True,  True, False, False]]), None)
    """

    rejoin: Rejoin = "own"
    sampled: bool = False
    own_epochs: bool = False

    @property
    def server(self) -> bool:
        """Whether a server holds the parameters that the nodes share.

        Means over all parameters or movements then go through it, and it sends the result to the nodes of the next
        round.

        >>> from vecgym.availability import Dropout, Sampled
        >>> Sampled(0.5).server, Sampled(0.5, rejoin="own").server, Dropout(0.1).server
        (True, False, False)
        """
        return self.sampled and self.rejoin == "shared"

    def check(self, run: Facts) -> None:
        """Raise a ValueError if it does not fit the run."""
        return

    @abstractmethod
    def present(self, run: Facts) -> Table:
        """Return a function (first, last) -> the nodes present in steps first to last - 1, bool `[n, K]`."""

    def training(self, run: Facts) -> Table | None:
        """Return such a function for the nodes that train, if some only exchange; None: all present nodes train."""
        return None

    def __and__(self, other: Availability) -> Availability:
        """Return the nodes that are present, and train, in both; `rejoin` is that of the first."""
        return Both(self, check.instance("other", other, Availability, "another Availability"))

    def __repr__(self) -> str:
        settings = (f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({', '.join(settings)})"


class Both(Availability):
    """The nodes that are present, and train, in both of two availabilities: `a & b`.

    >>> from vecgym.availability import Dropout, LocalSteps
    >>> Dropout(0.1) & LocalSteps([1, 2], H=2)
    (Dropout(rate=0.1, mean_steps=20, rejoin='own') & LocalSteps(H=2, steps=[1, 2], epochs=None))
    """

    def __init__(self, first: Availability, second: Availability) -> None:
        self.first, self.second, self.rejoin = first, second, first.rejoin
        self.sampled = first.sampled or second.sampled
        self.own_epochs = first.own_epochs or second.own_epochs

    def check(self, run: Facts) -> None:
        self.first.check(run)
        self.second.check(run)

    def present(self, run: Facts) -> Table:
        a, b = self.first.present(run), self.second.present(run)
        return lambda first, last: a(first, last) & b(first, last)

    def training(self, run: Facts) -> Table | None:
        a, b = self.first.training(run), self.second.training(run)
        if a is None or b is None:
            return a or b
        return lambda first, last: a(first, last) & b(first, last)

    def __repr__(self) -> str:
        return f"({self.first!r} & {self.second!r})"


def by_rounds(of_round: Callable[[int], Tensor], H: int) -> Table:
    """Return a table that is constant within each round of H steps.

    >>> by_rounds(lambda number: torch.tensor([number == 1]), H=2)(1, 4).flatten()
    tensor([False,  True,  True])
    """
    of_round = functools.lru_cache(1)(of_round)
    return lambda first, last: torch.stack([of_round(step // H) for step in range(first, last)])


def checked_rejoin(rejoin: Any) -> Rejoin:
    """Return `rejoin`, or raise a ValueError if it is unknown.

    >>> checked_rejoin("own")
    'own'
    """
    return check.choice("rejoin", rejoin, get_args(Rejoin))  # type: ignore[return-value]


def num_drawn(fraction: float, num_nodes: int) -> int:
    """Return the number of nodes that are drawn for a round, at least one.

    >>> num_drawn(0.1, 6)
    1
    """
    return max(1, round(fraction * num_nodes))


def drawn(fraction: float, nodes: Sequence[int], seed: int, number: int, sampling: str = "fixed") -> list[int]:
    """Draw the participants of a round from `nodes`, ascending. All sampling of nodes uses this function.

    Args:
        sampling: "fixed": `num_drawn` of them; "bernoulli": each by itself, so perhaps none.

    >>> drawn(0.5, range(4), seed=42, number=0), drawn(0.5, range(4), seed=42, number=0, sampling="bernoulli")
    ([1, 2], [1])
    """
    generator = rng.generator(seed, "participants", number)
    if sampling == "bernoulli":
        luck = torch.rand(len(nodes), generator=generator, dtype=torch.float64).tolist()
        return [node for node, x in zip(nodes, luck) if x < fraction]
    return [nodes[i] for i in sample_nodes(len(nodes), num_drawn(fraction, len(nodes)), generator)]


SOJOURNS = 64  # periods of presence and absence of a node that are drawn together


class Sampled(Availability):
    """In each round of H steps a sample of the nodes, at least one: federated learning's participation.

    With `rejoin="shared"` there is a server, as with `FedAvgStrategy(participation=)`, which draws the same nodes.
    Present nodes send it their parameters or movements, and it sends the result to the nodes of the next round.

    Args:
        fraction: the share of the nodes in a round, in (0, 1].
        H: the number of steps in a round; give the strategy's.
        rejoin: the parameters with which a node begins a round; "shared": the model trained in the round before.

    Raises:
        ValueError: for a fraction outside (0, 1], H < 1, an unknown `rejoin`.

    >>> sampled = Sampled(0.5, H=2)
    >>> sampled, sampled.present(Facts(num_nodes=4, num_steps=4, seed=42))(0, 4).int()
    (Sampled(fraction=0.5, H=2, rejoin='shared'), tensor([[0, 1, 1, 0],
            [0, 1, 1, 0],
            [1, 0, 1, 0],
            [1, 0, 1, 0]], dtype=torch.int32))
    """

    sampled = True

    def __init__(self, fraction: float, H: int = 1, rejoin: Rejoin = "shared") -> None:
        self.fraction = check.number("fraction", fraction, "(0, 1]", "the share of the nodes in a round")
        self.H = check.integer("H", H, what="the steps of a round")
        self.rejoin = checked_rejoin(rejoin)

    def present(self, run: Facts) -> Table:
        def of_round(number: int) -> Tensor:
            present = torch.zeros(run.num_nodes, dtype=torch.bool)
            present[drawn(self.fraction, range(run.num_nodes), run.seed, number)] = True
            return present

        return by_rounds(of_round, self.H)


class Dropout(Availability):
    """Nodes fail and return independently, each as a two-state Markov chain. All are present in the first step.

    A present node is absent in the next step with probability rate / ((1 - rate) mean_steps), and an absent node is
    back with probability 1 / mean_steps.

    Args:
        rate: the fraction of the time that a node is absent in the long run, in [0, 1).
        mean_steps: the mean length of an absence, >= 1.
        rejoin: the parameters with which a node returns.

    Raises:
        ValueError: for values outside these ranges, and for a rate that such short absences cannot reach.

    >>> present = Dropout(0.3, mean_steps=5).present(Facts(num_nodes=3, num_steps=10, seed=1))(0, 10)
    >>> present.T.int()
    tensor([[1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
            [1, 1, 0, 0, 0, 0, 0, 0, 1, 1],
            [1, 1, 1, 1, 1, 1, 1, 1, 1, 0]], dtype=torch.int32)
    """

    def __init__(self, rate: float, mean_steps: float = 20, rejoin: Rejoin = "own") -> None:
        self.rate = check.number("rate", rate, "[0, 1)", "the fraction of the time that a node is absent")
        self.mean_steps = check.number("mean_steps", mean_steps, "[1, inf)", "of an absence")
        self.rejoin = checked_rejoin(rejoin)
        self._leaves = self.rate / ((1 - self.rate) * self.mean_steps)
        if self._leaves > 1 + 1e-9:  # so that the advice of the message is accepted
            least = self.rate / (1 - self.rate)
            raise ValueError(
                f"rate={rate} cannot be reached with absences as short as mean_steps={mean_steps}: give mean_steps >= "
                f"{least:.4g}, or a rate <= {mean_steps / (1 + mean_steps):.4g}."
            )

    def present(self, run: Facts) -> Table:
        changes = [self._changes(node, run) for node in range(run.num_nodes)]

        def table(first: int, last: int) -> Tensor:
            steps = torch.arange(first, last)
            # A node is present after an even number of changes.
            return torch.stack([torch.searchsorted(x, steps, right=True) % 2 == 0 for x in changes], 1)

        return table

    def _changes(self, node: int, run: Facts) -> Tensor:
        """Return the steps at which a node leaves, comes back, leaves ..., up to the end of the run."""
        chances = torch.tensor([min(1.0, self._leaves), 1 / self.mean_steps] * (SOJOURNS // 2), dtype=torch.float64)
        ends, block = torch.zeros(1), 0
        parts = [torch.zeros(0, dtype=torch.long)]
        while self.rate > 0 and ends[-1] < run.num_steps:
            generator = rng.generator(run.seed, "dropout", node, block)
            drawn = 1 - torch.rand(SOJOURNS, dtype=torch.float64, generator=generator)  # in (0, 1]
            # Geometric; a probability of 1 gives log 0 = -inf, and one step.
            lasts = 1 + (drawn.log() / (-chances).log1p()).floor().nan_to_num(0.0).clamp(0, run.num_steps)
            ends = ends[-1] + lasts.cumsum(0).long()
            parts.append(ends)
            block += 1
        return torch.cat(parts)


class Trace(Availability):
    """A table of the nodes that are present in each step, for instance from a measurement.

    Args:
        table: bool `[T, K]`, a row for each step of the run; extra rows are ignored.
        rejoin: the parameters with which a node returns.

    Raises:
        ValueError, TypeError: for anything but a table of truth values; at `fit`, for too few steps or another number
            of nodes.

    >>> Trace([[True, True], [False, True]])
    Trace(2 steps of 2 nodes, rejoin='own')
    """

    def __init__(self, table: Any, rejoin: Rejoin = "own") -> None:
        self.table = _checked_table(table)
        self.rejoin = checked_rejoin(rejoin)

    def check(self, run: Facts) -> None:
        num_steps, num_nodes = self.table.shape
        if num_nodes != run.num_nodes or num_steps < run.num_steps:
            raise ValueError(
                f"the trace has {num_steps} steps of {num_nodes} nodes, and the run has {run.num_steps} steps of "
                f"{run.num_nodes}: give a row for each step, [{run.num_steps}, {run.num_nodes}]."
            )

    def present(self, run: Facts) -> Table:
        return lambda first, last: self.table[first:last]

    def __repr__(self) -> str:
        num_steps, num_nodes = self.table.shape
        return f"Trace({num_steps} steps of {num_nodes} nodes, rejoin={self.rejoin!r})"


class Deadline(Availability):
    """No waiting for stragglers: a node that needs longer than the deadline for a round's H steps is absent from it.

    Args:
        seconds: for the computation of a round; see `fit(compute=...)`.
        H: the number of steps in a round; give the strategy's.
        rejoin: the parameters with which a node returns after a round that it missed.

    Raises:
        ValueError: for seconds <= 0, H < 1; at `fit` without `compute`.

    >>> from vecgym.clock import Compute
    >>> run = Facts(num_nodes=3, num_steps=2, seed=0, compute=Compute([0.4, 0.4, 1.2]))
    >>> Deadline(1.0).present(run)(0, 1)
    tensor([[ True,  True, False]])
    """

    def __init__(self, seconds: float, H: int = 1, rejoin: Rejoin = "shared") -> None:
        self.seconds = check.number("seconds", seconds, "(0, inf)", "that the computation of a round may take")
        self.H = check.integer("H", H, what="the steps of a round")
        self.rejoin = checked_rejoin(rejoin)

    def check(self, run: Facts) -> None:
        if run.compute is None:
            raise ValueError(f"{self!r} needs the nodes' compute times: give compute=vecgym.clock.Compute(...).")

    def present(self, run: Facts) -> Table:
        rounds = -(-run.num_steps // self.H)
        took = run.compute.of_steps(rounds * self.H, run.num_nodes).view(rounds, self.H, -1).sum(1)
        return by_rounds(lambda number: took[number] <= self.seconds, self.H)


class LocalSteps(Availability):
    """Unequal local work: in each round of H steps node i trains in the first n_i, then waits for the exchange.

    All nodes take part in the exchange at the round's end. For strategies that exchange parameters every H steps.

    Args:
        steps: n_i of each node, `[K]`, 1 to H; or None, with `epochs`.
        H: the number of steps in a round; give the strategy's.
        epochs: in place of `steps`, the number of passes that each node makes over its own examples in a round. A pass
            takes each example once, shuffled anew, in batches of `batch_size`; the last batch may be smaller. (If `fit`
            deals one dataset to the nodes, a pass is over the examples that the epoch's deal gives the node.)

    Raises:
        ValueError: for neither or both of steps and epochs; at `fit`, for another number of nodes and for n_i > H.

    >>> LocalSteps([1, 3], H=3).training(Facts(num_nodes=2, num_steps=4, seed=0))(0, 4)
    tensor([[ True,  True],
            [False,  True],
            [False,  True],
            [ True,  True]])
    """

    def __init__(self, steps: Sequence[int] | None = None, H: int = 1, epochs: int | None = None) -> None:
        if (steps is None) == (epochs is None):
            raise ValueError(f"steps={steps!r} and epochs={epochs!r}: give one of them, such as steps=[5, 10].")
        self.H = check.integer("H", H, what="the steps of a round")
        counts = check.has_values("steps", steps).tolist() if isinstance(steps, Tensor) else steps
        if counts is not None and not (isinstance(counts, (list, tuple)) and counts):
            raise TypeError(f"steps is {check.kind_of(steps)}; give a list of the local steps of each node, [K].")
        self.steps = None if counts is None else [check.integer(f"steps[{i}]", n) for i, n in enumerate(counts)]
        self.epochs = check.optional_integer("epochs", epochs, what="a node's passes over its examples in a round")

    @property
    def own_epochs(self) -> bool:  # type: ignore[override]
        return self.epochs is not None

    def check(self, run: Facts) -> None:
        counts = self._counts(run)
        if len(counts) != run.num_nodes:
            raise ValueError(f"steps has {len(counts)} numbers, and the run {run.num_nodes} nodes: give one for each.")
        if max(counts) > self.H:
            raise ValueError(
                f"node {counts.index(max(counts))} takes {max(counts)} steps in a round, and a round has only "
                f"H={self.H}: give H >= {max(counts)}, here and to the strategy."
            )

    def present(self, run: Facts) -> Table:
        return lambda first, last: torch.ones(last - first, run.num_nodes, dtype=torch.bool)

    def training(self, run: Facts) -> Table:
        counts = torch.tensor(self._counts(run))
        return lambda first, last: torch.arange(first, last)[:, None] % self.H < counts

    def _counts(self, run: Facts) -> list[int]:
        if self.steps is not None:
            return self.steps
        if run.num_examples is None or run.batch_size is None:
            raise ValueError(f"{self!r}: the number of examples of each node is unknown here; give steps=[...].")
        passes = [steps_of_pass(count, run.batch_size, run.drop_last) for count in run.num_examples]
        return [(self.epochs or 1) * count for count in passes]


class Function(Availability):
    """A function of the step, counted from 0, that returns the ids of the present nodes, or bool `[K]`.

    >>> run = Facts(num_nodes=3, num_steps=2, seed=0)
    >>> Function(lambda step: [0, 1] if step else [True, True, True]).present(run)(0, 2)
    tensor([[ True,  True,  True],
            [ True,  True, False]])
    """

    def __init__(self, function: Callable[[int], Any], rejoin: Rejoin = "own") -> None:
        if not callable(function):
            raise TypeError(f"function is {check.kind_of(function)}; give a function of the step.")
        self.function = function
        self.rejoin = checked_rejoin(rejoin)

    def present(self, run: Facts) -> Table:
        return lambda first, last: torch.stack([self._of_step(step, run.num_nodes) for step in range(first, last)])

    def _of_step(self, step: int, num_nodes: int) -> Tensor:
        value = check.called("availability", self.function, step)
        plain = value.tolist() if hasattr(value, "tolist") else value
        ids: list[Any] = list(plain) if isinstance(plain, (list, tuple, set, frozenset, range)) else [None]  # no id
        if len(ids) == num_nodes and all(isinstance(x, bool) for x in ids):
            return torch.tensor(ids, dtype=torch.bool)
        valid = all(check.is_integer(x) and 0 <= x < num_nodes for x in ids)
        if not valid or len(set(ids)) != len(ids):
            raise ValueError(
                f"availability({step}) returned {value!r}; expected distinct node ids, 0 to {num_nodes - 1}, or "
                f"{num_nodes} truth values."
            )
        present = torch.zeros(num_nodes, dtype=torch.bool)
        present[ids] = True
        return present


def as_availability(name: str, value: Any) -> Availability | None:
    """Return an `Availability`, or None; a function of the step becomes a `Function`.

    >>> as_availability("availability", None) is None
    True
    """
    if value is None or isinstance(value, Availability):
        return value
    if isinstance(value, type) or not callable(value):
        raise TypeError(
            f"{name} is {check.kind_of(value)}; give Dropout(0.1), Trace(table) or another of vecgym.availability, or "
            "a function of the step that returns the ids of the present nodes."
        )
    return Function(value)


def _checked_table(table: Any) -> Tensor:
    try:
        values = table.clone() if isinstance(table, Tensor) else torch.as_tensor(table)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"table is {check.kind_of(table)}; give truth values [T, K].") from None
    if values.dim() != 2 or values.numel() == 0 or values.dtype != torch.bool:
        raise ValueError(
            f"table has shape {list(values.shape)} and type {values.dtype}; give truth values [T, K], one row a step."
        )
    return values.cpu()


# ----------------------------------------------------------------------------------------------------------- in a run


class Presence:
    """The nodes that are present, and those that train, in each step of a run, evaluated before it begins.

    Attributes:
        availability: the rule.
        rejoin, server, sampled: attributes of the rule.
        counts: the numbers of present nodes that occur in the run.
        waits: whether some nodes are present in a step without training.

    Raises:
        ValueError: if no node is present in some step.

    >>> from vecgym.availability import Trace
    >>> presence = Presence(Trace([[True, False, True], [True, True, True]]), Facts(3, 2, seed=0))
    >>> presence.present(0), presence.present(1), presence.returning(1), presence.training(0)
    ((0, 2), None, (1,), None)
    """

    def __init__(self, availability: Availability, run: Facts) -> None:
        availability.check(run)
        self.availability, self.rejoin, self.run = availability, availability.rejoin, run
        self.server, self.sampled = availability.server, availability.sampled
        training = availability.training(run)
        self.waits = training is not None
        self._present = self._evaluated(availability.present(run))
        self._computing = self._present if training is None else self._present & self._evaluated(training)
        counts = [count for block in self._present.split(BLOCK) for count in block.sum(1).tolist()]  # `sum` takes int64
        if 0 in counts:
            raise ValueError(
                f"availability={availability!r}: no node is present in step {counts.index(0)} (counted from 0), and at "
                "least one must be: give more nodes, another seed, or fewer absences."
            )
        self.counts = set(counts)
        # The first step in which each node is present.
        self.first = torch.where(self._present.any(0), self._present.view(torch.uint8).argmax(0), run.num_steps)

    def present(self, step: int) -> tuple[int, ...] | None:
        """Return the ids of the present nodes; None: all."""
        present = self.is_present(step)
        return None if bool(present.all()) else tuple(ids_of(present))

    def training(self, step: int) -> tuple[int, ...] | None:
        """Return the ids of the present nodes that train; None: all of them."""
        training = self.is_training(step)
        return None if torch.equal(self.is_present(step), training) else tuple(ids_of(training))

    def returning(self, step: int) -> tuple[int, ...]:
        """Return the ids of the present nodes that were absent in the step before."""
        if step == 0:
            return ()
        return tuple(ids_of(self.is_present(step) & ~self.is_present(step - 1)))

    def is_present(self, step: int) -> Tensor:
        """Return a mask of the present nodes, bool `[K]`.

        >>> from vecgym.availability import Trace
        >>> Presence(Trace([[True, False]]), Facts(2, 1, seed=0)).is_present(0)
        tensor([ True, False])
        """
        return self._present[step]

    def never_present(self, step: int) -> int:
        """Count the nodes that have not been present in any step up to this one.

        >>> from vecgym.availability import Trace
        >>> presence = Presence(Trace([[True, False, False], [True, False, True]]), Facts(3, 2, seed=0))
        >>> presence.never_present(0), presence.never_present(1)
        (2, 1)
        """
        return int((self.first > step).sum())

    def warn_never_present(self) -> None:
        """Warn about nodes that are absent in every step of the run."""
        if absent := ids_of(self.first == self.run.num_steps):
            names = f"{absent}" if len(absent) <= 10 else f"{absent[:10]} ..."
            warn(
                f"availability={self.availability!r}: {len(absent)} of {self.run.num_nodes} nodes are never present, "
                f"{names}, and no average counts them."
            )

    def is_training(self, step: int) -> Tensor:
        """Return a mask of the nodes that train, all or some of the present ones, bool `[K]`.

        >>> from vecgym.availability import LocalSteps
        >>> Presence(LocalSteps([1, 2], H=2), Facts(2, 2, seed=0)).is_training(1)
        tensor([False,  True])
        """
        return self._computing[step]

    def _evaluated(self, table: Table) -> Tensor:
        """Evaluate a table for all steps of the run, bool `[T, K]`."""
        blocks = []
        for first in range(0, self.run.num_steps, BLOCK):
            last = min(first + BLOCK, self.run.num_steps)
            block, shape = table(first, last), [last - first, self.run.num_nodes]
            if not isinstance(block, Tensor) or list(block.shape) != shape or block.dtype != torch.bool:
                raise ValueError(f"{self.availability!r} returned {block!r}; expected a bool tensor of shape {shape}.")
            blocks.append(block)
        return torch.cat(blocks)


def ids_of(present: Tensor) -> list[int]:
    """Return the ids of the nodes in a mask, bool `[K]`.

    >>> ids_of(torch.tensor([True, False, True]))
    [0, 2]
    """
    return present.nonzero().flatten().tolist()
