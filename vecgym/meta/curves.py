"""The numbers of a strategy as functions of coordinates: curves over the run, times of exchanges, and matrices.

Coordinates are columns `[n, M]`, one for each of M runs. A number is `[T, M]`: its value in each step and run.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vecgym.collectives.topology import check_doubly_stochastic
from vecgym.core import check
from vecgym.core.objects import Settings, altered
from vecgym.simulation.when import SyncWeight

KNOTS = 4


class Length(NamedTuple):
    """The length of a run, as curves see it.

    Attributes:
        steps: T.
        scale: log T, less its mean over the lengths that are learned from, and not beyond the longest or the shortest.
        seeds: of each run, for schedules that are drawn.
    """

    steps: int
    scale: float = 0.0
    seeds: Sequence[int] = (0,)


class Learnable(Settings):
    """A number, or the times of exchanges, over a run: knots at equal distances, linear in between. Or a matrix.

    With several lengths of runs, each knot is a + b log T, two coordinates.
    """

    knots: int
    drawn = False  # whether runs differ in it whose coordinates are the same
    _level = 0.0  # of the knots, before anything is learned

    def first(self, several: bool) -> Tensor:
        """Return the initial coordinates, `[n]`, for runs of one length or of several."""
        levels = torch.full((self.knots,), self._level, dtype=torch.float64)
        return torch.cat([levels, torch.zeros_like(levels)]) if several else levels

    def over_run(self, z: Tensor, length: Length) -> Tensor:
        """Return the curves through the knots, `[n, M]` -> `[T, M]`.

        >>> Curve(1.0, knots=2).over_run(torch.tensor([[0.0], [2.0]]), Length(3)).T
        tensor([[0., 1., 2.]])
        """
        knots = z[: self.knots] + length.scale * z[self.knots :] if len(z) > self.knots else z
        last = self.knots - 1
        place = torch.linspace(0, last, length.steps, dtype=z.dtype)
        left = place.long().clamp(max=max(0, last - 1))
        return torch.lerp(knots[left], knots[(left + 1).clamp(max=last)], (place - left)[:, None])

    @abstractmethod
    def values(self, z: Tensor, length: Length) -> Tensor:
        """Return the values in each step and run, `[T, M]`, for coordinates `[n, M]`."""

    def holds(self, num_steps: int, num_nodes: int) -> bool:
        """Whether it has a value in runs of so many steps and nodes."""
        return True

    def argument(self, values: Tensor) -> Any:
        """Return a strategy's argument, for the values of one run, `[T]`."""
        return values[:, None]

    def constant(self) -> Learnable:
        """Return the same number without a change over the run."""
        return altered(self, knots=0)


class Curve(Learnable):
    """A number that changes over the run: a strategy gets it as `[T, 1]`, one for each step.

    Knots at equal distances, linear in between, of the logarithm of its distance to a bound, of the logit between two
    bounds, and of the number itself without bounds.

    Args:
        start: the number before anything is learned, in every step.
        within: the interval that it cannot leave, without its ends.
        knots: their number; 1: a constant.

    Raises:
        ValueError: unless `start` is inside of the interval.

    >>> momentum = Curve(0.5, within=(0, 1))
    >>> momentum.values(momentum.first(several=False)[:, None], Length(3)).T
    tensor([[0.5000, 0.5000, 0.5000]], dtype=torch.float64)
    >>> Curve(1.5, within=(0, 1))
    Traceback (most recent call last):
    ...
    ValueError: start=1.5 must be a number in (0.0, 1.0): the number before anything is learned.
    """

    def __init__(self, start: float, within: tuple[float, float] = (0.0, math.inf), knots: int = KNOTS) -> None:
        pair = isinstance(within, (tuple, list)) and len(within) == 2 and all(map(check.is_number, within))
        if not pair or not within[0] < within[1]:
            raise ValueError(f"within={within!r} must be two numbers of which the first is smaller, such as (0, 1).")
        low, high = self.within = float(within[0]), float(within[1])
        self.start = check.number("start", start, f"({low}, {high})", "the number before anything is learned")
        self.knots = check.integer("knots", knots)
        below, above = self.start - low, high - self.start
        if math.isfinite(low) and math.isfinite(high):
            self._level = math.log(below / above)
        elif math.isfinite(low) or math.isfinite(high):
            self._level = math.log(below if math.isfinite(low) else above)
        else:
            self._level = self.start

    def values(self, z: Tensor, length: Length) -> Tensor:
        (low, high), z = self.within, self.over_run(z, length)
        if math.isfinite(low) and math.isfinite(high):
            return low + (high - low) * z.sigmoid()
        if math.isfinite(low):
            return low + z.exp()
        return high - z.exp() if math.isfinite(high) else z

    def constant(self) -> Curve:
        return altered(self, knots=1)


class Exchanges(Learnable):
    """The times of exchanges: T // `every` of them in T steps, whole ones, as densely as a learned density says.

    The density's logarithm has knots at equal distances. Exchange j of n follows the step in which the integral of the
    density reaches j / n of the whole, the last one the last step. So bytes never change, and there is nothing to round
    in the end. The derivative by the density in a step is that by the weight of an exchange after it; see `SyncWeight`.

    Args:
        every: T / n, the mean distance.
        knots: their number; 0: exchanges are spread evenly.
        at_end: whether the last one follows the last step. False: exchange j follows (j - 1/2) / n of the whole. The
            loss is that of the mean of the nodes anyway.

    >>> when, z = Exchanges(every=3), torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 9.0]])
    >>> weights = when.values(z, Length(6))
    >>> when.argument(weights[:, 0]), when.argument(weights[:, 1])  # a strategy's `H`, or its `sync_weight`
    (SyncWeight([0, 0, 1, 0, 0, 1]), SyncWeight([0, 0, 0, 0, 1, 1]))
    """

    def __init__(self, every: int, knots: int = KNOTS, at_end: bool = True) -> None:
        self.every = check.integer("every", every, what="optimizer steps between two exchanges, in the mean")
        self.knots, self.at_end = check.integer("knots", knots, 0), check.flag("at_end", at_end)

    def density(self, z: Tensor, length: Length) -> Tensor:
        """Return a density, `[T, M]`, up to a factor."""
        return self.over_run(z, length).exp() if self.knots else z.new_ones(length.steps, z.shape[1])

    def values(self, z: Tensor, length: Length) -> Tensor:
        return whole(self.density(z, length), length.steps // self.every, self.at_end)

    def argument(self, values: Tensor) -> SyncWeight:
        return SyncWeight(values)


class Mixing(Learnable):
    """The mixing matrices of a gossip strategy: doubly stochastic, with the links of the start.

    They are those to which Sinkhorn's alternate division by the sums of rows and columns brings exp(Z); what is learned
    is Z at the links. 0 stays 0, so that bytes never change.

    Args:
        start: the matrix before anything is learned, `[K, K]`, or one for each step, `[T, K, K]`.

    Raises:
        ValueError: for matrices that are not doubly stochastic.

    >>> mixing, z = Mixing(torch.tensor([[0.5, 0.5], [0.5, 0.5]])), torch.tensor([[0.0], [1.0], [1.0], [0.0]])
    >>> mixing.values(z, Length(6))[..., 0]
    tensor([[0.2689, 0.7311],
            [0.7311, 0.2689]], dtype=torch.float64)
    """

    def __init__(self, start: Tensor) -> None:
        if not isinstance(start, Tensor) or start.dim() not in (2, 3) or not len(start):
            raise ValueError("start takes a tensor [K, K] or [T, K, K], such as vecgym.collectives.topology.ring(K).")
        for i, matrix in enumerate(start if start.dim() == 3 else start[None]):
            check_doubly_stochastic(matrix, f"start[{i}]" if start.dim() == 3 else "start")
        self.start = start.detach().double()
        self.knots = int((self.start > 0).sum())  # 0: a constant

    def first(self, several: bool) -> Tensor:
        return torch.zeros(self.knots, dtype=torch.float64)

    def values(self, z: Tensor, length: Length) -> Tensor:
        logs = self.start.log().expand(z.shape[1], *self.start.shape)
        if self.knots:
            logs = logs.masked_scatter(logs > -math.inf, logs[logs > -math.inf] + z.T.flatten())
        return sinkhorn(logs).movedim(0, -1)

    def holds(self, num_steps: int, num_nodes: int) -> bool:
        return self.start.shape[-1] == num_nodes and self.start.shape[:-2] in ((), (num_steps,))

    def argument(self, values: Tensor) -> Tensor:
        return values


def sinkhorn(z: Tensor, tolerance: float = 1e-12, max_rounds: int = 10_000) -> Tensor:
    """Make exp(z), `[..., K, K]`, doubly stochastic by dividing rows and columns by their sums, in turn.

    Entries exp(-inf) = 0 stay 0.

    Raises:
        ValueError: if this does not converge, since no doubly stochastic matrix has these zeros, say.

    >>> sinkhorn(torch.tensor([[0.0, 0.0], [-math.inf, 0.0]])).round(decimals=2)
    Traceback (most recent call last):
    ...
    ValueError: no doubly stochastic matrix was found with these zeros and ratios: begin with a doubly stochastic one.
    >>> sinkhorn(torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64))
    tensor([[0.7311, 0.2689],
            [0.2689, 0.7311]], dtype=torch.float64)
    """
    linked = z > -math.inf
    w = torch.where(linked, torch.where(linked, z, 0.0).exp(), 0.0)
    for _ in range(max_rounds):
        w = w / w.sum(-1, keepdim=True)
        w = w / w.sum(-2, keepdim=True)
        if float((w.detach().sum(-1) - 1).abs().max()) <= tolerance:
            return w
    raise ValueError(
        "no doubly stochastic matrix was found with these zeros and ratios: begin with a doubly stochastic one."
    )


def whole(density: Tensor, count: int, at_end: bool = True) -> Tensor:
    """Return weights of 0 and 1, `[T, M]`, of which `count` in each column are 1, with the derivative of the density.

    >>> whole(torch.tensor([[1.0], [1.0], [1.0], [3.0]]), 2).T
    tensor([[0., 0., 1., 1.]])
    >>> whole(torch.ones(8, 1), 2, at_end=False).T
    tensor([[0., 1., 0., 0., 0., 1., 0., 0.]])
    """
    num_steps, num_runs = density.shape
    share = count * density / density.sum(0)  # of the exchanges, in each step
    with torch.no_grad():
        j = torch.arange(count)
        due = torch.where(j + 1 < count, j + 1 - 1e-6, math.inf) if at_end else j + 0.5 - 1e-6
        reached = torch.searchsorted(share.cumsum(0).T.contiguous(), due.to(share).repeat(num_runs, 1))
        # One exchange in a step: those that come too close to one another are moved on, or back from the end.
        after = ((reached - j).cummax(1).values.clamp(max=num_steps - count) + j).T
        weights = torch.zeros_like(share).scatter_(0, after, 1.0)
    return weights + (share - share.detach())


class NoSuchNumber(AttributeError, ValueError):
    """A function of numbers asks for one that is not among them."""


class Named(SimpleNamespace):
    """Numbers by name, as a function of them sees them.

    >>> Named(lr=0.1).rate
    Traceback (most recent call last):
    ...
    vecgym.meta.curves.NoSuchNumber: there is no number 'rate': numbers has lr.
    """

    def __getattr__(self, name: str) -> Any:
        raise NoSuchNumber(f"there is no number {name!r}: numbers has {', '.join(vars(self))}.")


class Family:
    """Strategies with numbers that are learned: coordinates -> the arguments of a strategy.

    Args:
        numbers: name -> `Curve`, `Exchanges` or `Mixing`.
        lengths: of the runs that they are learned from, in steps.

    Attributes:
        start: the initial coordinates, `[n]`.

    >>> family = Family({"lr": Curve(0.5), "when": Exchanges(2)}, [4])
    >>> (arguments,) = family.arguments(family.start[:, None], 4)
    >>> arguments.lr.T, arguments.when
    (tensor([[0.5000, 0.5000, 0.5000, 0.5000]], dtype=torch.float64), SyncWeight([0, 1, 0, 1]))
    """

    def __init__(self, numbers: Mapping[str, Learnable], lengths: Sequence[int]) -> None:
        self.numbers = dict(numbers)
        logs = [math.log(length) for length in lengths]
        self._low, self._mean, self._high = min(logs), sum(logs) / len(logs), max(logs)
        each = [number.first(len(set(lengths)) > 1) for number in self.numbers.values()]
        self._sizes = list(map(len, each))
        self.start = torch.cat(each)

    def arguments(self, z: Tensor, steps: int, seeds: Sequence[int] = (0,)) -> list[Named]:
        """Return the numbers of each run by name, for coordinates `[n, M]` and runs of so many steps.

        Args:
            seeds: of each run, for schedules that are drawn.
        """
        if any(number.drawn for number in self.numbers.values()):
            z = z.expand(-1, len(seeds))
        length = Length(steps, min(max(math.log(steps), self._low), self._high) - self._mean, seeds)
        values = [x.values(part, length).unbind(-1) for x, part in zip(self.numbers.values(), z.split(self._sizes))]
        return [
            Named(**{name: x.argument(own) for (name, x), own in zip(self.numbers.items(), of_run)})
            for of_run in zip(*values)
        ]
