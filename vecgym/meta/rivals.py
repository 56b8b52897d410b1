"""The worth of learned numbers: on runs never seen, beside rivals that are tuned in the same way, for as long.

A rival is numbers with less freedom, which `learn` tunes on the same runs in as many steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from vecgym.core import check, rng
from vecgym.meta.curves import Curve, Exchanges, Learnable, Length
from vecgym.optim.schedule import lambda_cosine
from vecgym.records.rows import MeanDifference, aligned, difference, rounded
from vecgym.simulation.when import QSR

Numbers = Mapping[str, Learnable]


class Annealed(Curve):
    """A constant that falls to a tenth along a cosine; only the constant is learned.

    >>> Annealed(0.5, knots=1).values(torch.zeros(1, 1), Length(3)).T
    tensor([[1.0000, 0.7750, 0.3250]])
    """

    def values(self, z: Tensor, length: Length) -> Tensor:
        factor = lambda_cosine(length.steps, cosine_anneal=True)
        bound = self.within[0] if math.isfinite(self.within[0]) else 0.0
        return bound + (super().values(z, length) - bound) * z.new_tensor([[factor(t)] for t in range(length.steps)])


class Late(Exchanges):
    """Exchanges evenly in a window at the end of the run, whose beginning is learned.

    >>> Late(2, knots=1).values(torch.tensor([[0.0]]), Length(8)).T  # from the middle on
    tensor([[0., 0., 0., 0., 1., 1., 1., 1.]])
    """

    SHARPNESS = 20.0  # of the beginning, per run
    _level = -1.0  # after a quarter of the run

    def density(self, z: Tensor, length: Length) -> Tensor:
        begin = self.over_run(z, length).sigmoid()
        place = (torch.arange(length.steps, dtype=z.dtype) + 0.5) / length.steps
        return ((place[:, None] - begin) * self.SHARPNESS).sigmoid()


class Quadratic(Exchanges):
    """The rounds of `QSR` under a cosine, of at least `every` / 2 steps, with alpha for as many exchanges.

    >>> weights = Quadratic(4).values(torch.zeros(0, 1), Length(20))
    >>> weights.int().flatten().tolist()
    [0, 0, 1, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1]
    """

    def values(self, z: Tensor, length: Length) -> Tensor:
        weights = quadratic(length.steps, length.steps // self.every, max(1, self.every // 2))
        return weights[:, None].expand(-1, z.shape[1])


class Random(Exchanges):
    """Exchanges after random steps, drawn for each run, and after the last one.

    >>> Random(4).values(torch.zeros(0, 2), Length(8, seeds=(0, 1))).sum(0)
    tensor([2., 2.], dtype=torch.float64)
    """

    drawn = True

    def values(self, z: Tensor, length: Length) -> Tensor:
        count = length.steps // self.every
        weights = torch.zeros(length.steps, len(length.seeds), dtype=torch.float64)
        for run, seed in enumerate(length.seeds):
            order = torch.randperm(length.steps - 1, generator=rng.generator(seed, "meta times"))
            weights[order[: count - 1], run] = 1.0
        weights[-1] = 1.0
        return weights


@cache
def quadratic(num_steps: int, count: int, least: int) -> Tensor:
    """Return the schedule of QSR with so many exchanges, `[T]`, for rounds of at least so many steps."""
    factor = lambda_cosine(num_steps, cosine_anneal=True)

    def ends(alpha: float) -> list[int]:
        return list(filter(QSR(alpha, least, factor, max_steps=num_steps).due, range(num_steps)))

    low, high = 0.0, float(num_steps)  # too many exchanges, or just enough, and too few
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if len(ends(middle)) >= count else (low, middle)
    weights = torch.zeros(num_steps, dtype=torch.float64)
    weights[ends(low)[-count:]] = 1.0
    return weights


# ------------------------------------------------------------------------------------------------------- the report


def constants(numbers: Numbers) -> dict[str, Learnable]:
    """Return the numbers as constants, with exchanges spread evenly.

    >>> constants({"lr": Curve(0.5), "when": Exchanges(8)})
    {'lr': Curve(0.5, knots=1), 'when': Exchanges(8, knots=0)}
    """
    return {name: number.constant() for name, number in numbers.items()}


def annealed(numbers: Numbers) -> dict[str, Learnable]:
    """Return constants, of which the first, such as the inner rate, follows a cosine."""
    name, first = next((name, x) for name, x in numbers.items() if isinstance(x, Curve))
    return {**constants(numbers), name: Annealed(first.start, first.within, knots=1)}


def at_times(kind: Callable[..., Exchanges], numbers: Numbers, knots: int = 0) -> dict[str, Learnable]:
    """Return the numbers with exchanges at other times."""
    return {name: kind(x.every, knots=knots) if isinstance(x, Exchanges) else x for name, x in numbers.items()}


# Which numbers a rival may tune: those of Curves need a Curve, those of times an `Exchanges`.
RIVALS: dict[str, tuple[type[Learnable], Callable[[Numbers], dict[str, Learnable]]]] = {
    "constants": (Learnable, constants),
    "constants, cosine": (Curve, annealed),
    "QSR, cosine": (Exchanges, lambda numbers: at_times(Quadratic, _cosine_if_any(numbers))),
    "late window": (Exchanges, lambda numbers: at_times(Late, constants(numbers), knots=1)),
    "random times": (Exchanges, lambda numbers: at_times(Random, constants(numbers))),
}


def rivals_of(numbers: Numbers, rivals: Sequence[str] | Mapping[str, Numbers]) -> Mapping[str, Numbers]:
    """Return the numbers of the rivals of these names that numbers can have, or those that are given.

    >>> rivals_of({"lr": Curve(0.5)}, ["constants", "late window"])
    {'constants': {'lr': Curve(0.5, knots=1)}}
    """
    if isinstance(rivals, Mapping) and all(isinstance(own, Mapping) for own in rivals.values()):
        return rivals
    if not isinstance(rivals, (list, tuple)):
        raise TypeError(f"rivals={rivals!r} must be a list of {', '.join(RIVALS)}, or names with numbers as for learn.")
    chosen = {name: RIVALS[check.choice("rivals", name, RIVALS)] for name in rivals}
    kinds = list(numbers.values())
    return {name: of(numbers) for name, (kind, of) in chosen.items() if any(isinstance(x, kind) for x in kinds)}


def _cosine_if_any(numbers: Numbers) -> dict[str, Learnable]:
    return annealed(numbers) if any(isinstance(x, Curve) for x in numbers.values()) else constants(numbers)


class Gain(NamedTuple):
    """The loss of a rival less that of the learned numbers, on the same runs.

    Attributes:
        rival: its name, or "start" for the numbers before anything was learned.
        num_steps, num_nodes: of the runs.
        loss, rival_loss: their means over the runs.
        gain: the mean difference, with its standard error and its 95 % interval (Student's t).

    >>> gain = Gain("constants", 96, 4, 0.5, 0.512, difference({0: 0.51, 1: 0.514}, {0: 0.5, 1: 0.5}))
    >>> print(gain)
    +0.012 ± 0.025
    """

    rival: str
    num_steps: int
    num_nodes: int
    loss: float
    rival_loss: float
    gain: MeanDifference

    def __str__(self) -> str:
        half = (self.gain.high - self.gain.low) / 2
        return f"{rounded(self.gain.difference, half, '+')} ± {rounded(half, half)}"


@dataclass(frozen=True)
class Report:
    """The gains over all rivals, in runs like those of learning and unlike them; it prints as a table.

    Attributes:
        gains: a `Gain` for each rival and kind of runs.

    >>> gap = difference({0: 0.51, 1: 0.514}, {0: 0.5, 1: 0.5})
    >>> Report((Gain("constants", 96, 4, 0.5, 0.512, gap),))
    gain over            96 steps, K = 4
    constants             +0.012 ± 0.025
    (mean loss learned)              0.5
    """

    gains: tuple[Gain, ...]

    def __repr__(self) -> str:
        kinds = list(dict.fromkeys((gain.num_steps, gain.num_nodes) for gain in self.gains))
        by = {(gain.rival, gain.num_steps, gain.num_nodes): gain for gain in self.gains}
        lines = [["gain over", *(f"{steps} steps, K = {nodes}" for steps, nodes in kinds)]]
        for rival in dict.fromkeys(gain.rival for gain in self.gains):
            lines.append([rival, *(str(by[(rival, *kind)]) for kind in kinds)])
        loss = {(gain.num_steps, gain.num_nodes): gain.loss for gain in self.gains}
        return "\n".join(aligned([*lines, ["(mean loss learned)", *(f"{loss[kind]:.4g}" for kind in kinds)]]))


def gain_over(rival: str, kind: tuple[int, int], losses: Tensor, others: Tensor) -> Gain:
    """Return the gain over a rival, whose losses are `others`, in runs of one kind: (steps, nodes)."""
    own, theirs = (dict(enumerate(x.tolist())) for x in (losses, others))
    return Gain(rival, *kind, float(losses.mean()), float(others.mean()), difference(theirs, own, name=rival))
