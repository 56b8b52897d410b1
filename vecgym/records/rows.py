"""The rows of a sweep, one dict for each run: select them, average them over seeds, and format their values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from vecgym.core import check
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


def axes_of(rows: Rows) -> list[str]:
    """Return the names of the axes.

    >>> axes_of([{"lr": 0.1, "seed": 0, "status": "finished", "val_loss": 2.0}])
    ['lr', 'seed']
    """
    return [name for name in rows[0] if name not in MEASURES and name not in STATES] if rows else []


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
    for name in MEASURES:
        if name in mean:
            values = [row[name] for row in group]
            mean[name] = None if None in values else float(np.mean(values))
    if "status" in mean:
        mean["status"] = next((row["status"] for row in group if row["status"] != "finished"), "finished")
    if "steps" in mean:
        mean["steps"] = min(row["steps"] for row in group)
    mean["runs"] = len(group)
    return mean


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
    return lambda value: value is target or (_is_plain(value) and bool(value == target))


def _is_plain(x: Any) -> bool:
    return x is None or isinstance(x, (bool, int, float, str))


def label(value: Any) -> Any:
    """Return the label of a value in a table; plain values are their own labels.

    >>> label(0.1), label(Tensor), label(lambda step: step), label(np.ones((4, 4)))
    (0.1, 'Tensor', 'lambda', 'ndarray [4, 4]')
    >>> label(functools.partial(max, 3)), label([[0.5] * 4] * 4)
    ('partial(max)', 'list of 4')
    """
    if _is_plain(value):
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
    objects = {id(x): x for x in values if not _is_plain(x)}
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


def aligned(rows: Sequence[Sequence[str]], justify: Callable[[str, int], str] = str.rjust) -> list[str]:
    """Return the lines of a table, with the first column flush left.

    >>> aligned([["", "bytes"], ["mean", "8"]])
    ['      bytes', 'mean      8']
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [[first.ljust(widths[0]), *map(justify, rest, widths[1:])] for first, *rest in rows]
    return ["  ".join(line).rstrip() for line in lines]
