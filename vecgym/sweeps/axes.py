"""The axes of a grid and its points; and the networks and computes of a sweep: one, or an axis of several."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from vecgym.clock import Compute, Network
from vecgym.core import check, rng
from vecgym.core.check import kind_of
from vecgym.records.rows import label

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
        for name in ("low", "high"):
            check.number(name, getattr(self, name))
        if not self.low < self.high:
            raise ValueError(f"low={self.low!r} must be smaller than high={self.high!r}.")

    def draw(self, u: float) -> float:
        """Return the value at a random number in [0, 1)."""
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


def checked_axes(grid: Any, samples: int | None) -> dict[str, Any]:
    """Return the axes, each a `Uniform` or a list of values."""
    if not isinstance(grid, Mapping):
        raise TypeError(
            f'grid is {kind_of(grid)}; give a dict of axes such as {{"lr": [1e-3, 3e-3], "seed": range(3)}}.'
        )
    if not grid:
        raise ValueError('grid is empty: give an axis such as {"seed": range(4)}; one run by itself is `Trainer.fit`.')
    return {name: _checked_axis(name, values, samples) for name, values in grid.items()}


def _checked_axis(name: Any, values: Any, samples: int | None) -> list[Any] | Uniform:
    if not isinstance(name, str):
        raise TypeError(f"grid has an axis {name!r} {kind_of(name)}; its name is a text, such as 'lr'.")
    if isinstance(values, Uniform):
        if samples is None:
            raise ValueError(f"grid[{name!r}]={values!r} has no end: say how many to draw, samples=50.")
        return values
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"grid[{name!r}]={values!r} is {kind_of(values)}; an axis is a list of values: [{values!r}].")
    values = list(values)
    if not values:
        raise ValueError(f"grid[{name!r}] is empty: give at least one value, or leave the axis out.")
    seen = set()
    for value in values:
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"grid[{name!r}] has nan among its values: leave it out.")
        plain = isinstance(value, (bool, int, float, str))
        key = (isinstance(value, bool), value) if plain else id(value)
        if key in seen:  # its run would count twice
            shown = value if plain else label(value)
            raise ValueError(f"grid[{name!r}] has {shown!r} twice: give each value once.")
        seen.add(key)
    return values


def count_points(axes: Mapping[str, Any], samples: int | None) -> int:
    """Count what `points` yields."""
    return math.prod(map(len, axes.values())) if samples is None else samples


def points(axes: Mapping[str, Any], samples: int | None, sample_seed: int) -> Iterator[Point]:
    """Yield every point of the grid, in the order of `itertools.product`; or random ones."""
    if samples is None:
        yield from (dict(zip(axes, values)) for values in itertools.product(*axes.values()))
        return
    for i in range(samples):
        point = {}
        for name, values in axes.items():
            u = float(torch.rand((), dtype=torch.float64, generator=rng.generator(sample_seed, f"sweep {name}", i)))
            point[name] = values.draw(u) if isinstance(values, Uniform) else values[int(u * len(values))]
        yield point


T = TypeVar("T", Network, Compute)


class Clock(NamedTuple):
    """A network and a compute, with their names where they are axes."""

    point: dict[str, str]
    network: Network | None
    compute: Compute | None


def clocks(network: Any, compute: Any) -> list[Clock]:
    """Return each network with each compute, of one or {name: one} of both; None: there is none.

    >>> [clock.point for clock in clocks({"near": Network(1e9), "far": Network(1e6)}, Compute(0.4))]
    [{'network': 'near'}, {'network': 'far'}]
    """
    none: dict[str | None, Any] = {None: None}
    networks = none if network is None else _named("network", network, Network, "Network(1e9, 0.05)")
    computes = none if compute is None else _named("compute", compute, Compute, "Compute(0.4)")
    return [
        Clock({axis: key for axis, key in (("network", n), ("compute", c)) if key is not None}, network, one)
        for n, network in networks.items()
        for c, one in computes.items()
    ]


def check_clock(network: Any, compute: Any) -> None:
    """Raise a ValueError unless both are given."""
    if network is None or compute is None:
        raise ValueError("network and compute together say how long a configuration takes: give both.")


def _named(name: str, value: Any, kind: type[T], example: str) -> dict[str | None, T]:
    """{name: value}; {None: value} for one alone."""
    give = f"a vecgym.clock.{example}, or a dict of some by name"
    if not isinstance(value, Mapping):
        return {None: check.instance(name, value, kind, give)}
    if not value:
        raise ValueError(f"{name} is an empty dict; give {give}.")
    return {str(key): check.instance(f"{name}[{key!r}]", one, kind, give) for key, one in value.items()}
