"""The rows of a sweep, one dict for each run: select them, average and compare them over seeds, format their values."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from vecgym.core import check
from vecgym.core.errors import warn
from vecgym.core.objects import PLAIN
from vecgym.records.columns import COLUMNS, UPDATE_COLUMNS

Row = dict[str, Any]  # column -> value
Rows = Sequence[Mapping[str, Any]]

# The measures of a run of a sweep. All other names in a row are axes, except STATES.
MEASURES = tuple(name for name, column in {**COLUMNS, **UPDATE_COLUMNS}.items() if column.swept)
STATES = ("status", "steps", "runs")
MAX_LABEL = 40  # characters


def as_rows(rows: Rows) -> list[Row]:
    """Check that `rows` are rows, and return them as dicts.

    >>> as_rows([{"H": 1, "bytes_total": 3.0}])
    [{'H': 1, 'bytes_total': 3.0}]
    """
    give = "a list of dicts, such as the rows of a SweepResult"
    if isinstance(rows, (Tensor, np.ndarray)) or not isinstance(rows, Iterable):
        raise TypeError(f"rows is {check.kind_of(rows)}; give {give}.")
    return [dict(check.instance("one of rows", row, Mapping, give)) for row in rows]


def is_measure(name: str) -> bool:
    """Whether a column holds what was measured: also the metrics of a model, which begin with "val_".

    >>> is_measure("train_loss"), is_measure("val_accuracy"), is_measure("lr")
    (True, True, False)
    """
    return name in MEASURES or name.startswith("val_")


def axes_of(rows: Rows) -> list[str]:
    """Return the names of the axes.

    >>> axes_of([{"lr": 0.1, "seed": 0, "status": "finished", "val_loss": 2.0}])
    ['lr', 'seed']
    """
    return [name for name in rows[0] if not is_measure(name) and name not in STATES] if rows else []


def check_over(rows: Rows, over: str | None) -> str | None:
    """Return the axis to average over, or None. "seed" need not be an axis of the rows; any other name must be one."""
    axes = axes_of(rows)
    if over is None or (isinstance(over, str) and over == "seed" and over not in axes):
        return None
    return check.choice("over", over, axes, "or None")


def groups(rows: Rows, over: str | None) -> list[list[Mapping[str, Any]]]:
    """Group the rows that differ only in the axis `over`, in the order of the first row of each group.

    >>> rows = [{"lr": lr, "seed": seed, "val_loss": lr + seed} for seed in (0, 1) for lr in (0.1, 0.2)]
    >>> [[row["val_loss"] for row in group] for group in groups(rows, "seed")]
    [[0.1, 1.1], [0.2, 1.2]]
    """
    over = check_over(rows, over)
    if over is None:
        return [[row] for row in rows]
    by_point: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    others = [name for name in axes_of(rows) if name != over]
    for row, labels in zip(rows, labelled(rows)):
        by_point.setdefault(tuple(labels[name] for name in others), []).append(row)
    return list(by_point.values())


def averaged(rows: Rows, over: str | None) -> list[Row]:
    """Return a row for each of `groups`, with the means of the measures and, as "runs", the number of rows.

    A mean is None if a row has no number, and not finite if a row's number is not: no row is left out.

    >>> rows = [{"lr": 0.1, "seed": seed, "status": "finished", "val_loss": 1.0 + seed} for seed in (0, 1)]
    >>> averaged(rows, "seed")
    [{'lr': 0.1, 'status': 'finished', 'val_loss': 1.5, 'runs': 2}]
    """
    over = check_over(rows, over)
    return [Row(row) for row in rows] if over is None else [_mean(group, over) for group in groups(rows, over)]


def _mean(group: Sequence[Mapping[str, Any]], over: str) -> Row:
    mean = Row({name: value for name, value in group[0].items() if name != over})
    for name in group[0]:
        if is_measure(name):
            values = [row[name] for row in group]
            mean[name] = None if None in values else float(np.mean(values))
    if "status" in mean:
        mean["status"] = next((row["status"] for row in group if row["status"] != "finished"), "finished")
    if "steps" in mean:
        mean["steps"] = min(row["steps"] for row in group)
    mean["runs"] = len(group)
    return mean


class MeanDifference(NamedTuple):
    """The mean difference of two values over the seeds.

    Attributes:
        difference: its mean; nan without a seed.
        standard_error: of that mean; nan, as is the interval, with fewer than two seeds.
        low, high: the ends of the 95 % interval, by Student's t.
        seeds: the number of seeds.
        left_out: the number of common seeds for which one of the two has no number.
    """

    difference: float
    standard_error: float
    low: float
    high: float
    seeds: int
    left_out: int


def difference(
    values: Mapping[Any, float], others: Mapping[Any, float], paired: bool = True, name: str = "this"
) -> MeanDifference:
    """Return how far some values are from others.

    Paired, it is the mean of the differences at each seed, which lack what a seed does to both. If only some seeds are
    shared, it is over these, and if none is, it is not paired; both with a warning. Not paired, it is the difference of
    the means, with the standard error and the degrees of freedom of Welch.

    Args:
        values, others: seed -> number. One that is not finite leaves its seed out, with a warning.
        name: of what the values are, for warnings.

    >>> gap = difference({0: 1.25, 1: 2.0, 2: 3.25}, {0: 1.0, 1: 2.0, 2: 3.0})
    >>> [round(x, 4) for x in gap]
    [0.1667, 0.0833, -0.1919, 0.5252, 3, 0]
    >>> round(difference({0: 1.25, 1: 2.0, 2: 3.25}, {0: 1.0, 1: 2.0, 2: 3.0}, paired=False).standard_error, 4)
    0.8207
    """
    shared = [seed for seed in values if seed in others]
    missing = [seed for seed in shared if not (check.is_finite(values[seed]) and check.is_finite(others[seed]))]
    if paired and len(shared) < max(len(values), len(others)):
        then = "only these are compared" if shared else "the difference is not paired, and needs many more runs"
        of_both = f"{name} has {counted(len(values), 'seed')} and the baseline {len(others)}"
        warn(f"{of_both}, of which they share {len(shared)}: {then}. Give both the same seeds.")
    if missing:
        warn(
            f"{name} is compared without {len(missing)} of {counted(len(shared), 'seed')}, in which it or the baseline "
            "diverged or did not finish: the others flatter what diverges."
        )
    if paired and shared:
        samples = [np.array([values[seed] - others[seed] for seed in shared if seed not in missing])]
    else:
        samples = [np.array([x for x in each.values() if check.is_finite(x)]) for each in (values, others)]
    means = [float(x.mean()) if len(x) else math.nan for x in samples]
    errors = [float(x.var(ddof=1)) / len(x) if len(x) > 1 else math.nan for x in samples]  # squared
    squared = sum(errors)
    degrees = squared**2 / sum(e**2 / (len(x) - 1) for e, x in zip(errors, samples)) if squared > 0 else 1.0
    mean, error = means[0] - sum(means[1:]), math.sqrt(squared)
    half = error * t_quantile(degrees)
    return MeanDifference(mean, error, mean - half, mean + half, len(samples[0]), len(missing))


def t_quantile(degrees: float) -> float:
    """Return the 0.975 quantile of Student's t: how many standard errors a 95 % interval reaches to each side.

    >>> [round(t_quantile(degrees), 4) for degrees in (1, 2, 7.5, 1000)]
    [12.7062, 4.3027, 2.333, 1.9623]
    """
    log_peak = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - math.log(degrees * math.pi) / 2
    places, weights = np.polynomial.legendre.leggauss(100)  # for integrals over [-1, 1]

    def density(t: Any) -> Any:
        return np.exp(log_peak - (degrees + 1) / 2 * np.log1p(t**2 / degrees))

    t = 1.9  # below every quantile, from where Newton's method rises to it: the distribution is concave
    for _ in range(50):
        t += float((0.475 - t / 2 * weights @ density(t / 2 * (places + 1))) / density(t))
    return t


def rounded(value: float, error: float, sign: str = "") -> str:
    """Format a number with as many decimals as its error has with two digits.

    >>> rounded(1.23456, 0.0123), rounded(1.23456, 0.0), rounded(0.5, 0.25, sign="+")
    ('1.235', '1.23456', '+0.50')
    """
    decimals = 1 - math.floor(math.log10(error)) if check.is_finite(error) and error > 0 else 9
    return f"{value:{sign}.{max(decimals, 0)}f}" if -3 < decimals < 9 else f"{value:{sign}.6g}"


def with_spread(values: Sequence[float]) -> str:
    """Format the mean of numbers, with their standard deviation if they differ.

    >>> with_spread([1.25, 1.5, 1.75]), with_spread([2.0, 2.0])
    ('1.50 ± 0.25', '2')
    """
    spread = float(np.std(values, ddof=1)) if min(values) < max(values) else 0.0
    return rounded(float(np.mean(values)), spread) + (f" ± {rounded(spread, spread)}" if spread else "")


def by_seed(rows: Rows, column: str, over: str) -> dict[Any, float]:
    """Return seed -> the mean of a column over the runs that finished with a number; nan without one.

    >>> by_seed([{"seed": 0, "val_loss": 1.0}, {"seed": 1, "val_loss": 2.0, "status": "diverged"}], "val_loss", "seed")
    {0: 1.0, 1: nan}
    """
    of_seeds: dict[Any, list[float]] = {row[over]: [] for row in rows}
    for row in rows:
        if row.get("status", "finished") == "finished":
            of_seeds[row[over]].append(row[column])
    return {seed: _mean_of(values)[1] for seed, values in of_seeds.items()}


def compared(
    rows: Rows, axis: str, column: str, baseline: Any, *, over: str, choose: Any = min,
    holdout: Collection[Any] = (), paired: bool = True,
) -> list[Row]:  # fmt: skip
    """Return a row for each value of an axis, with the mean of a column and its `MeanDifference` from the baseline's.

    For the arguments, see `SweepResult.compare`; the values of the axes are labels. `choose`: `min` or `max`, the best
    mean; None: all configurations are compared.

    >>> rows = [{"H": H, "seed": seed, "val_loss": H + seed} for H in (1, 3) for seed in (0, 1)]
    >>> compared(rows, "H", "val_loss", 1, over="seed")[1]["difference"]
    2.0
    """
    others = [name for name in axes_of(rows) if name not in (axis, over)]
    points = [({name: g[0][name] for name in (axis, *others)}, by_seed(g, column, over)) for g in groups(rows, over)]
    if choose is not None:

        def rank(each: tuple[Row, dict[Any, float]]) -> tuple[int, float]:
            missing, mean = _mean_of([x for seed, x in each[1].items() if seed not in holdout])
            return missing, -mean if choose is max else mean

        values = dict.fromkeys(point[axis] for point, _ in points)
        points = [min((each for each in points if each[0][axis] == value), key=rank) for value in values]
    if holdout:
        points = [(point, {seed: x for seed, x in losses.items() if seed in holdout}) for point, losses in points]
    matching = others if choose is None else []  # what a configuration and that of the baseline have in common
    bases = {tuple(point[n] for n in matching): losses for point, losses in points if point[axis] == baseline}
    shown = []
    for point, losses in points:
        base = bases.get(tuple(point[name] for name in matching))
        missing, mean = _mean_of(losses.values())
        gap: Row = {**dict.fromkeys(MeanDifference._fields), "seeds": len(losses) - missing, "left_out": missing}
        if base is not None and point[axis] != baseline:
            gap = difference(losses, base, paired, f"{axis}={point[axis]}")._asdict()
        shown.append({**point, column: mean, **gap})
    return shown


def _mean_of(values: Collection[float]) -> tuple[int, float]:
    """Return how many values are no finite numbers, and the mean of the others."""
    finite = [x for x in values if check.is_finite(x)]
    return len(values) - len(finite), float(np.mean(finite)) if finite else math.nan


def select(rows: Rows, where: Mapping[str, Any] | None) -> list[Row]:
    """Select the rows with these values, or for which these functions of a value are true.

    Raises:
        ValueError: for an unknown column, or if no row is selected.

    >>> rows = [{"H": H, "lr": lr} for H in (1, 5) for lr in (0.1, 0.2)]
    >>> select(rows, {"H": 5, "lr": lambda lr: lr < 0.15})
    [{'H': 5, 'lr': 0.1}]
    """
    selection = [dict(row) for row in rows]
    where = {} if where is None else check.instance("where", where, Mapping, 'a dict of columns, such as {"H": 5}')
    for name, value in where.items():
        if rows:
            check.column("where", name, rows[0])
        matches = _matches(value, [row[name] for row in rows])
        selection = [row for row in selection if matches(row[name])]
    if rows and not selection:
        raise ValueError(f"there is no row where {', '.join(f'{n} is {label(x)}' for n, x in where.items())}.")
    return selection


def _matches(target: Any, values: list[Any]) -> Callable[[Any], bool]:
    """Return the condition on a value. A function is itself the condition, unless it is a value of the axis."""
    if callable(target) and not any(value is target for value in values):
        return lambda value: bool(target(value))
    return lambda value: value is target or (isinstance(value, PLAIN) and bool(value == target))


def label(value: Any) -> Any:
    """Return the label of a value in a table; plain values are their own labels.

    >>> label(0.1), label(Tensor), label(lambda step: step), label(np.ones((4, 4)))
    (0.1, 'Tensor', 'lambda', 'ndarray [4, 4]')
    >>> label(functools.partial(max, 3)), label([[0.5] * 4] * 4)
    ('partial(max)', 'list of 4')
    """
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, (Tensor, np.ndarray)):
        return f"{type(value).__name__} {list(value.shape)}"
    if isinstance(value, functools.partial):
        return f"partial({label(value.func)})"
    name = getattr(value, "__name__", None)
    if name is not None:
        return name.strip("<>")
    text = str(value)
    if len(text) <= MAX_LABEL and " at 0x" not in text:
        return text
    return f"{type(value).__name__} of {len(value)}" if hasattr(value, "__len__") else type(value).__name__


def labelled(rows: Rows) -> list[Row]:
    """Return the rows with labels for the values that are not plain; different values of an axis get different labels.

    >>> labelled([{"f": f} for f in (lambda x: x, lambda x: 2 * x, max)])
    [{'f': 'lambda 1'}, {'f': 'lambda 2'}, {'f': 'max'}]
    """
    if not rows:
        return []
    columns = {name: list(_labels([row[name] for row in rows])) for name in rows[0]}
    return [Row({name: column[i] for name, column in columns.items()}) for i in range(len(rows))]


def _labels(values: list[Any]) -> Iterator[Any]:
    objects = {id(x): x for x in values if not isinstance(x, PLAIN)}
    labels = {key: label(x) for key, x in objects.items()}
    same_label: dict[Any, list[int]] = {}
    for key, text in labels.items():
        same_label.setdefault(text, []).append(key)
    for keys in same_label.values():
        if len(keys) > 1:
            labels.update({key: f"{labels[key]} {i}" for i, key in enumerate(keys, start=1)})
    return (labels.get(id(x), x) for x in values)


def data_frame(rows: Rows) -> Any:
    """Return the rows as a `pandas.DataFrame`.

    Raises:
        ImportError: if pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise ImportError("to_pandas needs pandas, which is not installed: pip install pandas") from None
    return pandas.DataFrame([dict(row) for row in rows])


def counted(number: int, what: str, several: str | None = None) -> str:
    """Return a number with its noun, in the singular or the plural.

    >>> counted(1, "program"), counted(2, "stack"), counted(2, "process", "processes")
    ('1 program', '2 stacks', '2 processes')
    """
    return f"{number} {what}" if number == 1 else f"{number} {several or what + 's'}"


def listed(names: Sequence[Any], last: str = "and") -> str:
    """Return names as a list in a sentence.

    >>> listed(["a"]), listed(["a", "b", "c"], "or")
    ('a', 'a, b or c')
    """
    *others, end = map(str, names)
    return f"{', '.join(others)} {last} {end}" if others else end


def aligned(rows: Sequence[Sequence[str]], justify: Callable[[str, int], str] = str.rjust) -> list[str]:
    """Return the lines of a table, with the first column flush left.

    >>> aligned([["", "bytes"], ["mean", "8"]])
    ['      bytes', 'mean      8']
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [[first.ljust(widths[0]), *map(justify, rest, widths[1:])] for first, *rest in rows]
    return ["  ".join(line).rstrip() for line in lines]
