"""Figures of the rows of a sweep: an axis, a heat map, what a loss costs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import EngFormatter, NullLocator

from vecgym.core import check
from vecgym.plot.style import (
    COLOURS,
    MAX_RUNS_INSIDE,
    NotebookFigure,
    check_shared,
    done,
    finish,
    legend_beside,
    line_styles,
    scale_bytes,
)
from vecgym.records.columns import column_label
from vecgym.records.rows import Rows, averaged, check_over, groups, present_name, renewed


def plot_axis(
    rows: Rows,
    x: str,
    y: str = "val_loss",
    hue: str | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    title: str | None = None,
    best: bool = False,
    over: str | None = "seed",
) -> Figure:
    """A column of a sweep against one of its axes, a line for each value of `hue`.

    A line is the mean over all configurations that share x and hue; the band reaches from the lowest to the highest
    seed, of each of which the mean is taken. Without seeds, it reaches from the lowest to the highest configuration.
    Rows without a finite number, such as those that diverged, are left out and counted in the title. Numbers that span
    a factor of 20 and more are on a logarithmic axis, others than numbers side by side.

    Args:
        rows: of a `SweepResult`.
        x, hue: axes; y: a column.
        path, title: see `plot_comparison`.
        best: draw the best of the configurations instead of their mean: every other axis at the value with the lowest
            mean over the seeds. One of whose seeds some diverged is not the best.
        over: the axis of the seeds; None: there is none, and each row counts by itself.

    Raises:
        ValueError: for a column that is not there, or without a finite number.

    >>> rows = [{"lr": lr, "seed": seed, "val_loss": lr + seed} for lr in (0.1, 0.2) for seed in (0, 1)]
    >>> [[round(float(v), 3) for v in line.get_ydata()] for line in plot_axis(rows, "lr").axes[0].lines]
    [[0.6, 0.7]]
    """
    check_shared(path=path, title=title, best=best)
    rows, y = renewed(rows), present_name(y)
    there = _finite_rows(rows, y, y=y, x=x, hue=hue)
    over = _averaged_over(rows, over, x, hue)
    figure = NotebookFigure(figsize=(7, 4.4), dpi=120, layout="constrained")
    axes = figure.subplots()
    places = _places(axes, [row[x] for row in there])
    values = _values(there, hue)
    for value, style in zip(values, line_styles(values)):
        mine = [row for row in rows if hue is None or row[hue] == value]
        found = {v: _summary([row for row in mine if row[x] == v], y, over, best) for v in places}
        at = [v for v in places if found[v] is not None]
        middle, low, high = zip(*[found[v] for v in at]) if at else ((), (), ())
        label = None if hue is None else f"{hue} = {_shown(value)}"
        axes.plot([places[v] for v in at], middle, label=label, markersize=5.5, **style)
        if low != high and not (best and over is None):
            axes.fill_between([places[v] for v in at], low, high, color=style["color"], alpha=0.15, linewidth=0)
    finish(axes, "", x, column_label(y))
    if hue is not None:
        _legend_of_values(axes, hue, values)
    what = f"{'the best' if best else 'mean'} of the configurations that share {x}{f' and {hue}' if hue else ''}"
    spread = f", and the range of {over}s" if over is not None else "" if best else ", and their range"
    return done(figure, _with_left_out(title or f"{column_label(y)}:\n{what}{spread}", rows, there), path)


def _summary(rows: Rows, y: str, over: str | None, best: bool) -> tuple[float, float, float] | None:
    """Middle, lowest and highest of some rows; None: they have no finite number."""
    finite = [row for row in rows if check.is_finite(row[y])]
    if best:
        whole = [group for group in groups(rows, over) if all(check.is_finite(row[y]) for row in group)]
        if not whole:
            return None
        each = min(([row[y] for row in group] for group in whole), key=np.mean)
    elif over is None:
        each = [row[y] for row in finite]
    else:
        each = [np.mean([row[y] for row in finite if row[over] == v]) for v in _values(finite, over)]
    return (float(np.mean(each)), min(each), max(each)) if each else None


def plot_heatmap(
    rows: Rows,
    x: str,
    y: str,
    value: str = "val_loss",
    path: str | os.PathLike[str] | None = None,
    *,
    title: str | None = None,
    best: bool = False,
    over: str | None = "seed",
) -> Figure:
    """A column of a sweep against two of its axes, the mean over the others written into each cell.

    The lowest cell has a frame; cells without a finite number are empty. Args: as for `plot_axis`.

    >>> rows = [{"lr": lr, "H": H, "val_loss": lr * H} for lr in (0.1, 0.2) for H in (1, 5)]
    >>> plot_heatmap(rows, "lr", "H").axes[0].images[0].get_array().tolist()
    [[0.1, 0.2], [0.5, 1.0]]
    """
    check_shared(path=path, title=title, best=best)
    rows, value = renewed(rows), present_name(value)
    there = _finite_rows(rows, value, value=value, x=x, y=y)
    over = _averaged_over(rows, over, x, y)
    columns, lines = _values(rows, x), _values(rows, y)
    cells = np.full((len(lines), len(columns)), np.nan)
    for i, of_y in enumerate(lines):
        for j, of_x in enumerate(columns):
            found = _summary([row for row in rows if row[x] == of_x and row[y] == of_y], value, over, best)
            cells[i, j] = np.nan if found is None else found[0]
    if np.isnan(cells).all():
        raise ValueError(f"no configuration has a finite number as {value!r} for every {over}: give over=None.")
    figure = NotebookFigure(figsize=(2.2 + 0.9 * len(columns), 1.8 + 0.6 * len(lines)), dpi=120, layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(cells, cmap="viridis", origin="lower", aspect="auto")
    middle = (np.nanmin(cells) + np.nanmax(cells)) / 2
    for i, j in zip(*np.nonzero(np.isfinite(cells))):
        colour = "white" if cells[i, j] <= middle else "black"
        axes.text(j, i, f"{cells[i, j]:.4g}", ha="center", va="center", color=colour, fontsize=9)
    i, j = divmod(int(np.nanargmin(cells)), len(columns))
    axes.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, edgecolor=COLOURS[1], linewidth=2.5))
    axes.set_xticks(range(len(columns)), [_shown(v) for v in columns])
    axes.set_yticks(range(len(lines)), [_shown(v) for v in lines])
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    figure.colorbar(image, label=column_label(value))
    title = title or f"{column_label(value)}, {'the best' if best else 'mean'} of each cell"
    return done(figure, _with_left_out(title, rows, there), path)


def plot_pareto(
    rows: Rows,
    y: str = "val_loss",
    hue: str | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    title: str | None = None,
    over: str | None = "seed",
    x: str = "bytes_total",
) -> Figure:
    """A column of a sweep against the bytes sent per node: a point per configuration, and the Pareto front.

    Or against another column that should be small, such as "sim_seconds".

    A point is the mean over the seeds, and a bar reaches from the lowest to the highest of them. On the front are those
    that no other beats in both; a line connects them. Args: as for `plot_axis`.

    >>> rows = [{"H": H, "bytes_total": 1e6 / H, "val_loss": 1.0 + 0.1 * H} for H in (1, 2, 4)]
    >>> [round(float(v), 2) for v in plot_pareto(rows).axes[0].lines[0].get_ydata()]
    [1.4, 1.2, 1.1]
    """
    check_shared(path=path, title=title)
    rows, y = renewed(rows), present_name(y)
    there = _finite_rows(rows, y, y=y, x=x, hue=hue)
    over = _averaged_over(rows, over, hue)
    whole = [group for group in groups(rows, over) if all(check.is_finite(row[y]) for row in group)]
    if not whole:
        raise ValueError(f"no configuration has a finite number as {y!r} for every {over}: give over=None.")
    means = [averaged(group, over)[0] for group in whole]
    figure = NotebookFigure(figsize=(7, 4.4), dpi=120, layout="constrained")
    axes = figure.subplots()
    front = [means[i] for i in pareto_front([(row[x], row[y]) for row in means])]
    sent, lowest = ([row[name] for row in front] for name in (x, y))
    axes.plot(sent, lowest, color="0.4", zorder=1, label="Pareto front")
    values = _values(means, hue)
    for value, style in zip(values, line_styles(values)):
        mine = [i for i, row in enumerate(means) if hue is None or row[hue] == value]
        label = None if hue is None else f"{hue} = {_shown(value)}"
        at, middle = [means[i][x] for i in mine], [means[i][y] for i in mine]
        axes.scatter(at, middle, s=24, zorder=2, label=label, **style)
        if over is not None:
            low, high = ([f(row[y] for row in whole[i]) for i in mine] for f in (min, max))
            axes.vlines(at, low, high, color=style["color"], alpha=0.6, linewidth=1.6, zorder=1)
    axes.scatter(sent, lowest, s=90, facecolors="none", edgecolors="0.2")
    finish(axes, "", column_label(x), column_label(y))
    if x == "bytes_total":
        _scale_sent(axes, [row[x] for row in means])
    _legend_of_values(axes, hue, values)
    seeds = "" if over is None else f": mean and range of {len(whole[0])} {over}s"
    return done(figure, _with_left_out(title or f"{column_label(y)} and what it costs{seeds}", rows, there), path)


def _scale_sent(axes: Axes, sent: list[float]) -> None:
    """A logarithmic axis of bytes, which may have configurations at 0."""
    if not any(sent):
        return
    if not all(sent):  # a logarithmic axis has no place for 0
        axes.set_xscale("symlog", linthresh=min(x for x in sent if x > 0))
    else:
        scale_bytes(axes)
    axes.xaxis.set_major_formatter(EngFormatter(unit="B"))


def _legend_of_values(axes: Axes, hue: str | None, values: list[Any]) -> None:
    """Among the curves while it is short, beside them when it is not; of very many values some."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) <= MAX_RUNS_INSIDE:
        axes.legend(handles, labels, frameon=False)
        return
    legend_beside(axes, handles, labels, f"{len(values)} values of {hue}")


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """The points that no other one beats in one coordinate and matches in the other, by the first coordinate.

    >>> pareto_front([(1.0, 5.0), (2.0, 6.0), (3.0, 1.0), (3.0, 2.0)])
    [0, 2]
    """
    order = sorted(range(len(points)), key=lambda i: points[i])
    front: list[int] = []
    for i in order:
        if not front or points[i][1] < points[front[-1]][1]:
            front.append(i)
    return front


def _averaged_over(rows: Rows, over: str | None, *drawn: str | None) -> str | None:
    """`over`, unless it is itself one of the axes that are drawn."""
    return None if isinstance(over, str) and over in drawn else check_over(rows, over)


def _finite_rows(rows: Rows, value: str, /, **columns: str | None) -> list[Mapping[str, Any]]:
    """The rows whose `value` is a finite number. `columns`: argument -> column; `hue` alone may be None."""
    if not rows:
        raise ValueError("there is no row to plot.")
    for name, column in columns.items():
        if name != "hue" or column is not None:
            check.column(name, column, rows[0])
    there = [row for row in rows if check.is_finite(row[value])]
    if not there:
        raise ValueError(f"no row has a finite number as {value!r}.")
    return there


def _values(rows: Rows, name: str | None) -> list[Any]:
    """The values of an axis: numbers ascending, others as they come."""
    if name is None:
        return [None]
    found = list(dict.fromkeys(row[name] for row in rows))
    return sorted(found) if all(map(check.is_number, found)) else found


def _places(axes: Axes, values: list[Any]) -> dict[Any, float]:
    """Where each value is drawn."""
    found = list(dict.fromkeys(values))
    if not all(map(check.is_number, found)):
        axes.set_xticks(range(len(found)), [_shown(v) for v in found])
        return {v: float(i) for i, v in enumerate(found)}
    found = sorted(found)
    if found[0] > 0 and found[-1] / found[0] >= 20:
        axes.set_xscale("log")
        axes.set_xticks(found, [_shown(v) for v in found])
        axes.xaxis.set_minor_locator(NullLocator())
    return {v: float(v) for v in found}


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _with_left_out(title: str | None, rows: Rows, there: Rows) -> str | None:
    if len(there) == len(rows):
        return title
    left_out = f"{len(rows) - len(there)} of {len(rows)} runs left out: no finite number"
    return left_out if title is None else f"{title}\n{left_out}"
