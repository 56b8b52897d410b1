"""The options of `sweep`."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn

from vecgym.clock import Compute, Network
from vecgym.core import check, rng
from vecgym.core.check import kind_of
from vecgym.core.objects import PLAIN
from vecgym.records.rows import label
from vecgym.runs.options import Count, EngineOptions, Flag, Modelled, OptionalCount, Present, SimulatedSeconds, Training
from vecgym.strategy import Strategy

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
        """Return the value for a random number `u` in [0, 1)."""
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
    if isinstance(values, Uniform):
        if samples is None:
            raise ValueError(f"grid[{name!r}]={values!r} has no end: say how many to draw, samples=50.")
        return values
    alone = isinstance(values, (str, bytes)) or (isinstance(values, Tensor) and values.dim() == 0)
    if alone or not isinstance(values, Iterable):
        raise TypeError(f"grid[{name!r}]={values!r} is {kind_of(values)}; an axis is a list of values: [{values!r}].")
    values = list(values)
    if not values:
        raise ValueError(f"grid[{name!r}] is empty: give at least one value, or leave the axis out.")
    keys = set()
    for value in values:
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"grid[{name!r}] has nan among its values: leave it out.")
        if (key := point_key({name: value})) in keys:  # its run would count twice
            raise ValueError(f"grid[{name!r}] has {label(value)!r} twice: give each value once.")
        keys.add(key)
    return values


def point_key(point: Point) -> Any:
    """Return a key that is equal for equal points, which have equal plain values and tuples, and identical objects.

    >>> point_key({"lr": 1, "betas": (0.9, 0.95)}) == point_key({"betas": (0.9, 0.95), "lr": 1.0})
    True
    >>> [point_key({"x": a}) == point_key({"x": b}) for a, b in [(1, True), (torch.zeros(2), torch.zeros(2))]]
    [False, False]
    """

    def of(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(of, value))
        value = check.plain(value)
        return (isinstance(value, bool), value) if isinstance(value, PLAIN) else id(value)

    return frozenset((name, of(value)) for name, value in point.items())


def checked_points(points: Any) -> list[Point]:
    """Return the points as dicts, after checking that they have the same axes."""
    example = '{"lr": 1e-3, "seed": 0}'
    if isinstance(points, (Mapping, str, bytes, Tensor)) or not isinstance(points, Iterable):
        raise TypeError(f"points is {kind_of(points)}; give a list of configurations, such as [{example}].")
    rows = [check.instance(f"points[{i}]", p, Mapping, f"a dict such as {example}") for i, p in enumerate(points)]
    if not rows or not rows[0]:
        what = "points[0]" if rows else "points"
        raise ValueError(f"{what} is empty: give at least one configuration, with an axis, such as [{example}].")
    for i, point in enumerate(rows):
        if point.keys() != rows[0].keys():
            names = ", ".join(sorted(map(str, point.keys() ^ rows[0].keys())))
            raise ValueError(
                f"points[{i}] and points[0] differ in their axes: only one of them has {names}. Give every point a "
                "value of it, such as the default, or sweep these points separately."
            )
        for name, value in point.items():
            if isinstance(value, float) and math.isnan(value):
                raise ValueError(f"points[{i}][{name!r}] is nan: leave this configuration out.")
    return [dict(point) for point in rows]


def points(axes: Mapping[str, Any], samples: int | None, sample_seed: int) -> Iterator[Point]:
    """Yield every point of the grid, in the order of `itertools.product`, or `samples` random points."""
    if samples is None:
        yield from (dict(zip(axes, values)) for values in itertools.product(*axes.values()))
        return
    for i in range(samples):
        point = {}
        for name, values in axes.items():
            u = float(torch.rand((), dtype=torch.float64, generator=rng.generator(sample_seed, f"sweep {name}", i)))
            point[name] = values.draw(u) if isinstance(values, Uniform) else values[int(u * len(values))]
        yield point


class Clock(NamedTuple):
    """A network and a compute, and in `point` their names if they are axes."""

    point: dict[str, str]
    network: Any
    compute: Any


def clocks(network: Any, compute: Any) -> list[Clock]:
    """Return each network with each compute. Either is an object, {name: object} for an axis, or None.

    >>> [clock.point for clock in clocks({"near": Network(1e9), "far": Network(1e6)}, Compute(0.4))]
    [{'network': 'near'}, {'network': 'far'}]
    """
    networks = _named("network", network, Network, "Network(1e9, 0.05)")
    computes = _named("compute", compute, Compute, "Compute(0.4)")
    return [
        Clock({axis: key for axis, key in (("network", n), ("compute", c)) if key is not None}, network, one)
        for n, network in networks.items()
        for c, one in computes.items()
    ]


def check_clock(network: Any, compute: Any) -> None:
    """Raise a ValueError unless both are given."""
    if network is None or compute is None:
        raise ValueError("the time of a configuration depends on its network and its compute: give both.")


def _named(name: str, value: Any, kind: type, example: str) -> dict[str | None, Any]:
    """Return {name: value}, with the name None if there is only one value, or none."""
    give = f"a vecgym.clock.{example}, or a dict of some by name"
    if not isinstance(value, Mapping):
        return {None: check.instance(name, value, (kind, type(None)), give)}
    if not value:
        raise ValueError(f"{name} is an empty dict; give {give}.")
    return {str(key): check.instance(f"{name}[{key!r}]", one, kind, give) for key, one in value.items()}


EXECUTORS: Any = (Executor, type(None))
OF_EXECUTORS = (
    "a concurrent.futures.Executor, such as ProcessPoolExecutor(4) or Dask's client.get_executor(), or None. "
    "For submitit and Ray see vecgym.guide.sweeps"
)


@dataclass(frozen=True)
class SweepTask(Modelled):
    """The model and the datasets of a sweep.

    Args:
        model: an `nn.Module`, or a function of axes that returns one, such as `lambda seed: make(seed)`.
        train_dataset, val_dataset: see `vecgym.Trainer`; or a function of axes that returns one, such as
            `lambda alpha, seed: partition_dirichlet(labels, 8, alpha=alpha, seed=seed).datasets(dataset)`.
    """

    model: nn.Module | Callable[..., nn.Module]
    train_dataset: Any
    val_dataset: Any = None


@dataclass(frozen=True, kw_only=True)
class SweepOptions(EngineOptions, Training, SweepTask):
    """The options of `sweep`. Options that `Trainer.fit` has, too, have the same meaning.

    Args:
        strategy: a function of axes that returns a `Strategy`; or a `Strategy`; None: the grid has an axis
            "strategy" of strategies.
        grid: axis -> its values. Axes are arguments of `strategy`, `model` and the datasets, and the settings
            "num_nodes", "batch_size", "minibatch_size", "max_steps", "num_epochs", "max_updates", "max_seconds",
            "seed", "shuffle" and "availability".
        points: in place of a grid, a list of configurations with the same axes, {axis: value} each, such as the
            suggestions of a tuner. Rows are in this order; a point may occur twice.
        num_nodes: K, unless it is an axis.
        samples: the number of random points to draw, each axis independently, from its values or from a `Uniform` or
            `LogUniform` range; None: all points of the grid.
        sample_seed: the seed of these draws.
        chunk_configs: the most configurations in one stack; None: chosen by memory and arithmetic.
        max_memory_bytes: the approximate memory of a stack, above which it is split; None: half of the free memory.
        max_configs: refuse a sweep with more configurations.
        keep_models: keep each configuration's averaged model: `result.model(i)`.
        resume: a file for the results, rewritten every minute and at the end of each stack. If it exists, the sweep
            resumes from it, and trains the configurations that the file lacks: the grid may have grown.
        executor: a `concurrent.futures.Executor` whose workers train the stacks, to the same bits; None: this process
            trains them. It is not shut down. See `vecgym.guide.sweeps` for the requirements on workers.
        availability: the nodes that are present in each step; see `Trainer.fit`. It may be an axis. If nodes may be
            absent, each configuration is trained with each `compute`.
        dry_run: train nothing, for a look at `result.explain()`.
        network, compute: a `vecgym.clock.Network` and a `vecgym.clock.Compute`, or {name: one} of either, for columns
            with the time of each configuration; `SweepResult.price` adds them afterwards. Asynchronous strategies need
            `compute`, and are trained with each network and compute, on which the order of their events depends. A
            `Deadline` needs only `compute`.
        max_updates, max_seconds: for asynchronous strategies, in place of `max_steps`; see `Trainer.fit`.
    """

    strategy: Strategy | Callable[..., Strategy] | None = None
    grid: Mapping[str, Iterable[Any] | Uniform] | None = None
    points: Iterable[Mapping[str, Any]] | None = None
    num_nodes: OptionalCount = None
    samples: OptionalCount = None
    sample_seed: Annotated[int, check.seed] = 0
    chunk_configs: OptionalCount = None
    max_memory_bytes: OptionalCount = None
    max_configs: Count = 10_000
    keep_models: Flag = False
    resume: str | os.PathLike[str] | None = None
    executor: Annotated[Executor | None, partial(check.instance, kind=EXECUTORS, give=OF_EXECUTORS)] = None
    availability: Present = None
    dry_run: Flag = False
    network: Any = None
    compute: Any = None
    max_updates: OptionalCount = None
    max_seconds: SimulatedSeconds = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.grid is None) == (self.points is None):
            raise ValueError('give either grid={"lr": [1e-3, 3e-3]}, or points=[{"lr": 1e-3}, {"lr": 3e-3}].')
        if self.points is not None and self.samples is not None:
            raise ValueError(f"samples={self.samples} draws from a grid; points are taken as they are: leave one out.")
        for name in ("train_dataset", "val_dataset"):
            data = vars(self)[name]
            if isinstance(data, (nn.Module, Strategy)):
                raise TypeError(
                    f"{name} is {check.kind_of(data)}; the order is sweep(model, train_dataset, val_dataset)."
                )
