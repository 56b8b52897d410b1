"""The common parts of the questions in `atlas/` and `reproductions/`: data, tuned arms, paired differences, verdicts.

Every arm is tuned over one grid by its mean loss over the seeds `TUNED`, and compared on others, `COMPARED`. A seed
varies the initial weights, the order of the data and its partition. A best value at the edge of a list lengthens the
list, up to `MOST_LONGER` times; a tuple has natural ends and stays. A large model walks the grid instead of training
all of its points, see `Study._walked`. Losses are those of the averaged model on data that was held out.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from comparison import seeded, whole
from images import digits, mlp
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from vecgym import History, sweep
from vecgym.core import files
from vecgym.data import partition_dirichlet, partition_iid, partition_shards
from vecgym.data.text import TokenWindows, encode_text, standard_library_text
from vecgym.models import GPT
from vecgym.strategy import Strategy

TUNED, COMPARED = (100, 101), tuple(range(8))
MOST_LONGER = 4
BLOWN_UP = 100.0  # nats; a run that ends above counts as diverged
VERDICTS = ("AGREES", "ORDER ONLY", "DISAGREES", "UNDECIDED")

Point = dict[str, Any]
Grid = Mapping[str, Sequence[Any]]
Trained = Callable[[list[Point], Sequence[int]], list[list[list[float]]]]  # points, seeds -> [points][seeds][measures]


@dataclass(frozen=True)
class Scale:
    """A model and its data; K, batch size and steps unless a question has its own.

    Args:
        data: the number of nodes, a kind and a seed -> the sets to train on. Kinds are "like", "shards" (2 shards of
            sorted classes, or a stretch of the text) and the alpha of a Dirichlet distribution, of classes or of the
            lengths of the stretches.
        walks: tune by a walk on the grid.
    """

    name: str
    model: Callable[[int], nn.Module]
    data: Callable[[int, Any, int], Any]
    held_out: Callable[[], Any]
    num_nodes: int
    batch_size: int
    steps: int
    walks: bool = False


class Arm(NamedTuple):
    """The measures of an arm on the compared seeds, `values[seed][i]` the i-th, at its best point of the grid."""

    name: str
    best: Point
    values: list[list[float]]
    edge: str = ""  # the axis whose best value is the last that was tried

    def column(self, i: int = -1) -> list[float]:
        return [row[i] for row in self.values]

    def mean(self, i: int = -1) -> float:
        return statistics.fmean(self.column(i))


class Difference(NamedTuple):
    """Mean and standard error over paired seeds; a seed in which either diverged is left out and counted.

    `lost` is the number of seeds in which the first alone diverged, minus those in which the second alone did.
    """

    mean: float
    error: float
    seeds: int
    diverged: int = 0
    lost: int = 0

    def __str__(self) -> str:
        more = f" ({self.diverged} of {self.seeds + self.diverged} diverged)" if self.diverged else ""
        return f"{self.mean:+.3f} ± {self.error:.3f}{more}"

    @property
    def sign(self) -> int:
        """1 or -1 if the mean is more than two standard errors from 0, or most seeds diverged on one side; else 0."""
        if 2 * abs(self.lost) > self.seeds + self.diverged:
            return int(math.copysign(1, self.lost))
        return 0 if not abs(self.mean) > 2 * self.error else int(math.copysign(1, self.mean))


def difference(a: Arm | Sequence[float], b: Arm | Sequence[float], i: int = -1) -> Difference:
    """a - b, seed by seed, of the i-th measure.

    >>> difference([2.0, 3.0, 4.0], [1.0, 1.5, 2.0])
    Difference(mean=1.5, error=0.2886751345948129, seeds=3, diverged=0, lost=0)
    """
    first, second = (arm.column(i) if isinstance(arm, Arm) else arm for arm in (a, b))
    found = [x - y for x, y in zip(first, second, strict=True) if math.isfinite(x) and math.isfinite(y)]
    lost = sum(map(math.isfinite, second)) - sum(map(math.isfinite, first))
    counts = len(found), len(first) - len(found), lost
    if len(found) < 2:
        return Difference(math.nan, math.nan, *counts)
    return Difference(statistics.fmean(found), statistics.stdev(found) / len(found) ** 0.5, *counts)


@dataclass
class Answer:
    """A verdict, why, and the rows that a figure shows: label -> the difference that decides."""

    verdict: str
    why: str
    rows: dict[str, Difference] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict={self.verdict!r}; allowed: {', '.join(VERDICTS)}.")


@dataclass
class Study:
    """One question at one scale. Measures of its arms are kept in `file`, where an interrupted run continues."""

    scale: Scale
    file: Path | None = None
    quick: bool = False
    arms: dict[str, Arm] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._ends: dict[tuple[str, str], Any] = {}  # of walks: an axis and its list -> the best value
        self._kept = json.loads(self.file.read_text()) if self.file is not None and self.file.exists() else {}

    @property
    def steps(self) -> int:
        return 8 if self.quick else self.scale.steps

    def arm(
        self, name: str, strategy: Callable[..., Strategy], grid: Grid | None = None,
        measure: Callable[[History], Iterable[float]] | None = None, **settings: Any,
    ) -> Arm:  # fmt: skip
        """Tune an arm over the grid, and train it at the best point with the compared seeds.

        Args:
            strategy: a function of the grid's axes.
            measure: a history -> numbers, of which the last is minimised; None: the last validation loss.
            settings: those of `sweep`, and `data`, the kind; `model`, a function of the seed. Their defaults are the
                scale's; `val_interval` is None, an evaluation at the end.
        """
        measure = measure or (lambda history: [history.last("val_loss")])
        tuned, compared = (TUNED[:1], COMPARED[:2]) if self.quick else (TUNED, COMPARED)
        axes = {axis: tuple(values[:2]) if self.quick else values for axis, values in (grid or {}).items()}
        trained = partial(self._trained, name, strategy, measure=measure, settings=settings)
        tune = self._walked if self.scale.walks and not self.quick else self._tuned
        best, edge = tune(axes, tuned, trained) if axes else ({}, "")
        values = self._trained(name, strategy, [best], compared, measure, settings)[0]
        self.arms[name] = Arm(name, best, values, edge)
        return self.arms[name]

    def points(
        self, name: str, strategy: Callable[..., Strategy], points: list[Point],
        measure: Callable[[History], Iterable[float]] | None = None, **settings: Any,
    ) -> list[list[list[float]]]:  # fmt: skip
        """Train all points with the compared seeds, untuned: [points][seeds][measures]. For settings see `arm`."""
        measure = measure or (lambda history: [history.last("val_loss")])
        return self._trained(name, strategy, points, COMPARED[:2] if self.quick else COMPARED, measure, settings)

    def _tuned(self, axes: Grid, seeds: Sequence[int], trained: Trained) -> tuple[Point, str]:
        """Return the best point of the whole grid, and the axes on which it is still at the edge."""
        for _ in range(1 if self.quick else 1 + MOST_LONGER):
            points = [dict(zip(axes, values)) for values in itertools.product(*axes.values())]
            found = trained(points, seeds)
            means = [statistics.fmean(row[-1] for row in rows) for rows in found]
            best = points[min(range(len(points)), key=means.__getitem__)]
            at_edge = _at_edge(axes, best)
            if not at_edge:
                return best, ""
            axes = {**axes, **{axis: _longer(axes[axis], best[axis]) for axis in at_edge}}
        return best, ", ".join(at_edge)

    def _walked(self, axes: Grid, seeds: Sequence[int], trained: Trained) -> tuple[Point, str]:
        """Return the end of a walk on the grid, and the axes on which it is still at the edge.

        The end is no worse than every point near it, see `_near`. The walk begins at the end of the last one that had
        the same list. Else it begins at the lowest value of a list, since high rates make losses so noisy that it could
        end there, and in the middle of a tuple. It has the first seed, and goes on from its end with all of them. Where
        all diverge it goes down on the first axis, the inner rate.
        """
        lists = {axis: (axis, str(values)) for axis, values in axes.items()}
        places = {axis: 0 if isinstance(values, list) else (len(values) - 1) // 2 for axis, values in axes.items()}
        at = {axis: self._ends.get(lists[axis], values[places[axis]]) for axis, values in axes.items()}
        axes = {axis: _up_to(values, at[axis]) for axis, values in axes.items()}
        left, first = dict.fromkeys(axes, MOST_LONGER), next(iter(axes))
        for some in (seeds[:1], seeds):
            before = None
            while at != before:
                before = at
                longer = [axis for axis in _at_edge(axes, at) if left[axis]]
                axes = {**axes, **{axis: _longer(axes[axis], at[axis]) for axis in longer}}
                left |= {axis: left[axis] - 1 for axis in longer}
                near = _near(axes, at)
                means = [statistics.fmean(row[-1] for row in rows) for rows in trained(near, some)]
                ranks = [(mean, at[first] if math.isinf(mean) else 0) for mean, at in zip(means, near)]
                at = near[min(range(len(near)), key=ranks.__getitem__)]
        self._ends |= {lists[axis]: value for axis, value in at.items()}
        return at, ", ".join(_at_edge(axes, at))

    def _trained(
        self, name: str, strategy: Any, points: list[Point], seeds: Sequence[int], measure: Any, settings: Any
    ) -> list[list[list[float]]]:  # fmt: skip
        """[points][seeds][measures]; those that were trained before are not trained again."""
        wanted = {(i, seed): f"{name} {point} {seed}" for i, point in enumerate(points) for seed in seeds}
        missing = [at for at, key in wanted.items() if key not in self._kept]
        if missing:
            new = self._sweep(strategy, [{**points[i], "seed": seed} for i, seed in missing], measure, dict(settings))
            self._kept |= {wanted[at]: values for at, values in zip(missing, new)}
            self._save()
        return [[self._kept[wanted[i, seed]] for seed in seeds] for i in range(len(points))]

    def _sweep(self, strategy: Any, points: list[Point], measure: Any, settings: dict[str, Any]) -> list[list[float]]:
        scale, kind = self.scale, settings.pop("data", "like")
        num_nodes = settings.pop("num_nodes", scale.num_nodes)
        result = sweep(
            settings.pop("model", scale.model),
            lambda seed: scale.data(num_nodes, kind, seed), settings.pop("held_out", scale.held_out()),
            strategy=strategy, points=points, num_nodes=num_nodes, progress=False, device="cpu",
            **{"max_steps": self.steps, "batch_size": scale.batch_size, "val_interval": None, **settings},
        )  # fmt: skip
        ended = [row["status"] != "diverged" for row in whole(result).rows]
        found = [[float(x) for x in measure(result.history(i))] if ok else [] for i, ok in enumerate(ended)]
        failed = [math.inf] * max(1, *map(len, found))
        return [values if values and abs(values[-1]) < BLOWN_UP else failed for values in found]

    def _save(self) -> None:
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with files.write_atomically(self.file, "w") as file:
                json.dump(self._kept, file)


def _at_edge(axes: Grid, point: Point) -> list[str]:
    """Name the axes, lists of several values, of which a point has the first or the last.

    >>> _at_edge({"lr": [0.1, 0.2], "H": [2, 4, 8], "momentum": (0.5, 0.8)}, {"lr": 0.1, "H": 4, "momentum": 0.8})
    ['lr']
    """
    lists = {axis: values for axis, values in axes.items() if isinstance(values, list) and len(values) > 1}
    return [axis for axis, values in lists.items() if point[axis] in (values[0], values[-1])]


def _near(axes: Grid, point: Point) -> list[Point]:
    """Return a point, and all that differ by one value on one axis, or on two lists, on one up and on the other down.

    (An outer rate makes up for an inner one, so that the best of one axis depends on the other.)

    >>> _near({"lr": [0.1, 0.2, 0.4], "H": (2, 4)}, {"lr": 0.2, "H": 2})
    [{'lr': 0.2, 'H': 2}, {'lr': 0.1, 'H': 2}, {'lr': 0.4, 'H': 2}, {'lr': 0.2, 'H': 4}]
    >>> _near({"lr": [0.1, 0.2], "outer_lr": [0.4, 0.8]}, {"lr": 0.1, "outer_lr": 0.8})[3:]
    [{'lr': 0.2, 'outer_lr': 0.4}]
    """

    def moved(**steps: int) -> Point | None:
        places = {axis: axes[axis].index(point[axis]) + step for axis, step in steps.items()}
        inside = all(0 <= place < len(axes[axis]) for axis, place in places.items())
        return {**point, **{axis: axes[axis][place] for axis, place in places.items()}} if inside else None

    pairs = itertools.combinations([axis for axis, values in axes.items() if isinstance(values, list)], 2)
    ways = [{axis: step} for axis in axes for step in (-1, 1)]
    ways += [{a: step, b: -step} for a, b in pairs for step in (-1, 1)]
    return [point, *(near for way in ways if (near := moved(**way)) is not None)]


def _longer(values: Sequence[Any], at: Any) -> list[Any]:
    """One more value beyond the end that was the best, by the same factor.

    >>> _longer([0.01, 0.1], 0.1), _longer([4, 8], 4)
    ([0.01, 0.1, 1.0], [2, 4, 8])
    """
    low, high = (values[0], values[1]), (values[-2], values[-1])
    new = low[0] * low[0] / low[1] if at == values[0] else high[1] * high[1] / high[0]
    new = max(1, round(new)) if isinstance(at, int) else float(f"{new:.6g}")
    return [*dict.fromkeys([new, *values] if at == values[0] else [*values, new])]


def _up_to(values: Sequence[Any], value: Any) -> Sequence[Any]:
    """The values, longer up to one that they once reached.

    >>> _up_to([0.1, 0.2], 0.05), _up_to(("a", "b"), "b")
    ([0.05, 0.1, 0.2], ('a', 'b'))
    """
    while value not in values:
        values = _longer(values, values[0] if value < values[0] else values[-1])
    return values


# ------------------------------------------------------------------------------------------------ scales

BLOCK = 1000  # characters; every tenth block of the text is held out


def _digits_of(num_nodes: int, kind: Any, seed: int) -> Any:
    train = digits().train
    if kind == "like":
        return partition_iid(train, num_nodes, seed=seed).datasets(train)
    if kind == "shards":
        return partition_shards(train, num_nodes, seed=seed).datasets(train)
    return partition_dirichlet(train, num_nodes, kind, min_size=16, seed=seed).datasets(train)


@functools.cache
def _text(num_chars: int) -> tuple[Tensor, Tensor, int]:
    """Tokens to train on, tokens held out, and the size of the vocabulary."""
    tokens, vocabulary = encode_text(standard_library_text(num_chars))
    blocks = tokens[: len(tokens) // BLOCK * BLOCK].unflatten(0, (-1, BLOCK))
    held = torch.arange(len(blocks)) % 10 == 9
    return blocks[~held].flatten(), blocks[held].flatten(), len(vocabulary)


def _cuts(length: int, num_nodes: int, alpha: float, least: int, seed: int) -> list[int]:
    """The places of the cuts between stretches of at least `least`, whose shares of the rest are Dirichlet(alpha).

    >>> _cuts(100, num_nodes=3, alpha=0.1, least=10, seed=0)
    [15, 25]
    """
    shares = np.random.default_rng(seed).dirichlet([alpha] * num_nodes)
    lengths = least + (shares * (length - num_nodes * least)).astype(int)
    return lengths.cumsum()[:-1].tolist()


def _text_scale(name: str, num_chars: int, layers: int, width: int, context: int, **sizes: Any) -> Scale:
    def data(num_nodes: int, kind: Any, seed: int) -> Any:
        tokens = _text(num_chars)[0]
        if kind == "like":
            return TokenWindows(tokens, context)
        if isinstance(kind, str) and kind != "shards":
            raise ValueError(f'data={kind!r}; allowed: "like", "shards", or the alpha of a Dirichlet distribution.')
        cuts = num_nodes if kind == "shards" else _cuts(len(tokens), num_nodes, kind, 16 * context, seed)
        parts = tokens.roll(1009 * seed).tensor_split(cuts)
        return lambda rank, num_nodes, train: TokenWindows(parts[rank], context)

    def held_out() -> TensorDataset:
        windows = _text(num_chars)[1].unfold(0, context + 1, context + 1)[:256]
        return TensorDataset(windows[:, :-1], windows[:, 1:])

    def model(seed: int) -> nn.Module:
        size = _text(num_chars)[2]
        return seeded(seed, lambda: GPT(size, context, num_layers=layers, num_heads=width // 16, width=width))

    return Scale(name, model, data, held_out, **sizes)


SCALES = {
    scale.name: scale
    for scale in [
        Scale(
            "tiny", lambda seed: seeded(seed, lambda: mlp(digits(), 32)), _digits_of, lambda: digits().test,
            num_nodes=8, batch_size=16, steps=200,
        ),
        _text_scale("text", 300_000, layers=1, width=32, context=32, num_nodes=8, batch_size=2, steps=200),
        _text_scale("gpt", 1_000_000, layers=4, width=128, context=64, num_nodes=8, batch_size=2, steps=200,
                     walks=True),
    ]
}  # fmt: skip
"""2,400, 17,000 and 800,000 parameters: a network on scikit-learn's digits, and character GPTs on Python's source."""
