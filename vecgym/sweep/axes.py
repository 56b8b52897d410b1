"""The axes of a grid, and its points."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vecgym import rng
from vecgym.check import kind_of

Point = dict[str, Any]


@dataclass(frozen=True)
class Uniform:
    """An axis of a random search: numbers in [low, high], each as likely as any other.

    >>> Uniform(0.5, 1.0).draw(0.5)
    0.75
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"low={self.low!r} must be smaller than high={self.high!r}.")

    def draw(self, u: float) -> float:
        """The value at a random number in [0, 1)."""
        return self.low + (self.high - self.low) * u


@dataclass(frozen=True)
class LogUniform(Uniform):
    """An axis of a random search: numbers in [low, high] whose logarithms are uniform, as for learning rates.

    >>> LogUniform(1e-4, 1e-2).draw(0.5)
    0.001
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low <= 0:
            raise ValueError(f"low={self.low!r} must be > 0 for a logarithm.")

    def draw(self, u: float) -> float:
        return round(self.low ** (1 - u) * self.high**u, 15)


def checked_axes(grid: Any, samples: int | None) -> dict[str, list[Any] | Uniform]:
    """The axes with their values, checked."""
    if not isinstance(grid, Mapping):
        raise TypeError(
            f'grid is {kind_of(grid)}; give a dict of axes such as {{"lr": [1e-3, 3e-3], "seed": range(3)}}.'
        )
    axes: dict[str, list[Any] | Uniform] = {}
    for name, values in grid.items():
        if isinstance(values, Uniform):
            if samples is None:
                raise ValueError(f"grid[{name!r}]={values!r} has no end: say how many to draw, samples=50.")
            axes[name] = values
            continue
        if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
            raise TypeError(
                f"grid[{name!r}]={values!r} is {kind_of(values)}; an axis is a list of values: [{values!r}]."
            )
        axes[name] = list(values)
        if not axes[name]:
            raise ValueError(f"grid[{name!r}] is empty: give at least one value, or leave the axis out.")
    return axes


def count_points(axes: Mapping[str, list[Any] | Uniform], samples: int | None) -> int:
    return samples if samples is not None else math.prod([len(_values(values)) for values in axes.values()])


def _values(axis: list[Any] | Uniform) -> list[Any]:
    assert not isinstance(axis, Uniform), "without samples, every axis is a list"
    return axis


def points(axes: Mapping[str, list[Any] | Uniform], samples: int | None, sample_seed: int) -> Iterator[Point]:
    """Every point of the grid, as `itertools.product` orders them; or random ones."""
    if samples is None:
        yield from (dict(zip(axes, values)) for values in itertools.product(*map(_values, axes.values())))
        return
    for i in range(samples):
        point = {}
        for name, values in axes.items():
            u = float(torch.rand((), dtype=torch.float64, generator=rng.generator(sample_seed, f"sweep {name}", i)))
            point[name] = values.draw(u) if isinstance(values, Uniform) else values[int(u * len(values))]
        yield point


def label(value: Any) -> Any:
    """A value of an axis as a table shows it.

    >>> label(0.1), label(torch.nn.Linear)
    (0.1, 'Linear')
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return getattr(value, "__name__", None) or str(value)
