"""Figures of the rows of a sweep: against an axis, as a heat map, and against their cost."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullLocator

from vecgym.core import check
from vecgym.plot import style
from vecgym.records.columns import column_label, larger_is_better
from vecgym.records.rows import Rows, as_rows, averaged, check_over, compared, counted, groups

Span = tuple[float, float, float]  # the middle, the lowest and the highest
NO_SPAN = (np.nan, np.nan, np.nan)


class PlotData(NamedTuple):
    """The rows of a figure.

    Attributes:
        rows: all rows.
        value: the column to draw.
        over: the axis of the seeds, unless it is an axis of the figure.
        finite: the rows whose value is a finite number.
    """

    rows: Rows
    value: str
    over: str | None
    finite: Rows

    def title(self, title: str) -> str:
        """Return the title with the number of rows that are left out."""
        omitted = len(self.rows) - len(self.finite)
        return title + (f"\n{omitted} of {len(self.rows)} runs left out: no finite number" if omitted else "")


@check.strict
def plot_axis(
    rows: Rows, x: str, column: str = "val_loss", hue: str | None = None, path: str | os.PathLike[str] | None = None, *,
    title: str | None = None, best: bool = False, over: str | None = "seed",
) -> Figure:  # fmt: skip
    """Draw a column of a sweep against one of its axes, a line for each value of `hue`.

    A line is the mean over all configurations that share x and hue. Its band ranges from the lowest to the highest
    mean of a seed or, without seeds, from the lowest to the highest configuration. Rows without a finite number, such
    as diverged ones, are left out and counted in the title. The axis is logarithmic if the numbers span a factor of 20
    or more; other values are placed side by side.

    Args:
        rows: of a `SweepResult`.
        x, hue: axes of the sweep.
        column: to draw.
        path, title: as for `plot_comparison`.
        best: draw the best configuration instead of the mean: the values of all other axes with the best mean over
            the seeds, the lowest loss or the highest accuracy. A configuration with a diverged seed is never the best.
        over: the axis of the seeds; None: none, so that each row is a configuration.

    Raises:
        ValueError: for an unknown column, or one without a finite number.

    >>> rows = [{"lr": lr, "seed": seed, "val_loss": lr + seed} for lr in (0.1, 0.2) for seed in (0, 1)]
    >>> [[round(float(v), 3) for v in line.get_ydata()] for line in plot_axis(rows, "lr").axes[0].lines]
    [[0.6, 0.7]]
    """
    style.check_shared(path, title)
    check.flag("best", best)
    data = _plot_data(rows, column, over, x=x, hue=hue)
    points: dict[Any, list[Mapping[str, Any]]] = {}
    for row in data.rows:
        points.setdefault((row[x], hue and row[hue]), []).append(row)
    spans = {point: _summary(of_point, data, best) for point, of_point in points.items()}
    figure = _draw_lines(data, x, hue, column_label(data.value), spans, band=not (best and data.over is None))
    what = f"{'the best' if best else 'mean'} of the configurations that share {x}{f' and {hue}' if hue else ''}"
    spread = f", and the range of {data.over}s" if data.over is not None else "" if best else ", and their range"
    return style.done(figure, data.title(title or f"{column_label(data.value)}:\n{what}{spread}"), path)


@check.strict
def plot_differences(
    rows: Rows, x: str, column: str = "val_loss", hue: str | None = None, path: str | os.PathLike[str] | None = None, *,
    baseline: Any, title: str | None = None, over: str = "seed",
) -> Figure:  # fmt: skip
    """Draw how far a column is from that of a baseline, at each value of an axis: at 0 there is no difference.

    A line is the mean over the seeds of the difference at the same seed, and its band the 95 % interval; each value has
    the best of the other axes, see `SweepResult.compare`. Where a band does not reach 0, the difference is hardly
    chance.

    Args:
        rows, x, column, hue, path, title, over: as for `plot_axis`.
        baseline: a value of `hue`, to which the others are compared at the same x; without hue, a value of x.

    Raises:
        ValueError: for an unknown column, or a baseline that is no value of the axis.

    >>> rows = [{"lr": lr, "seed": seed, "val_loss": lr + seed} for lr in (0.1, 0.2) for seed in (0, 1)]
    >>> line = plot_differences(rows, "lr", baseline=0.1).axes[0].lines[0]
    >>> [round(float(v), 3) for v in line.get_ydata()]
    [0.0, 0.1]
    """
    style.check_shared(path, title)
    data = _plot_data(rows, column, over, x=x, hue=hue)
    if data.over is None:
        raise ValueError(f"over={over!r} is not an axis besides x and hue: differences are over the seeds of an axis.")
    axis = hue or x
    if baseline not in (there := _values(data.rows, axis)):
        raise ValueError(f"baseline={baseline!r} is not a value of {axis!r}, which has {', '.join(map(_text, there))}.")
    parts = [data.rows] if hue is None else [[row for row in data.rows if row[x] == v] for v in _values(data.finite, x)]
    settings: dict[str, Any] = {"over": data.over, "choose": max if larger_is_better(column) else min}
    differences = [row for part in parts for row in compared(part, axis, column, baseline, **settings)]
    spans = {
        (row[x], hue and row[hue]):
        (0.0, 0.0, 0.0) if row[axis] == baseline else (row["difference"], row["low"], row["high"])
        for row in differences
    }  # fmt: skip
    figure = _draw_lines(data, x, hue, f"{column_label(column)}: difference", spans)
    figure.axes[0].axhline(0, color="0.4", linewidth=0.8, zorder=0)
    what = f"{column_label(column)} less that of {axis} = {_text(baseline)} at the same {over}"
    seeds = counted(len(_values(data.rows, over)), over)
    return style.done(figure, data.title(title or f"{what},\nmean and 95 % interval over {seeds}"), path)


def _draw_lines(
    data: PlotData, x: str, hue: str | None, label: str, spans: Mapping[Any, Span], band: bool = True
) -> Figure:
    """Draw the spans at each (x, hue): a line with its band for each value of `hue`; of categories, points and bars."""
    figure, (axes,) = style.new_figure(7, 4.4)
    places, values = _places(axes, data.finite, x), _values(data.finite, hue)
    is_number = all(map(check.is_number, places))
    for value, look in zip(values, style.line_styles(values)):
        of_line = {place: spans.get((v, value), NO_SPAN) for v, place in places.items()}
        shown = {place: span for place, span in of_line.items() if check.is_finite(span[0])}
        middle, low, high = zip(*shown.values()) if shown else ((), (), ())
        look |= {"label": _label(hue, value), "markersize": 5.5, "linestyle": "-" if is_number else ""}
        axes.plot([*shown], middle, **look)
        if band and low != high and is_number:
            style.draw_band(axes, [*shown], low, high, look["color"])
        elif band and low != high:
            axes.vlines([*shown], low, high, color=look["color"])
    style.finish(axes, "", x, label)
    if hue is not None:
        _legend_of_values(axes, hue, values)
    return figure


def _summary(rows: Rows, data: PlotData, best: bool) -> Span:
    """Return the mean, minimum and maximum of some rows; nan if they have no finite number."""
    y, over = data.value, data.over
    finite = [row for row in rows if check.is_finite(row[y])]
    if best:
        choose = max if larger_is_better(y) else min
        values = choose(([row[y] for row in group] for group in _complete(rows, data)), key=np.mean, default=[])
    elif over is None:
        values = [row[y] for row in finite]
    else:
        values = [np.mean([row[y] for row in finite if row[over] == v]) for v in _values(finite, over)]
    return (float(np.mean(values)), min(values), max(values)) if values else NO_SPAN


def _complete(rows: Rows, data: PlotData) -> list[list[Mapping[str, Any]]]:
    """Return the configurations with a finite number for every seed."""
    return [group for group in groups(rows, data.over) if all(check.is_finite(row[data.value]) for row in group)]


@check.strict
def plot_heatmap(
    rows: Rows, x: str, y: str, column: str = "val_loss", path: str | os.PathLike[str] | None = None, *,
    title: str | None = None, best: bool = False, over: str | None = "seed",
) -> Figure:  # fmt: skip
    """Draw a column of a sweep against two of its axes; each cell is the mean over the others.

    The lowest cell is framed, the highest of a column such as "val_accuracy"; cells without a finite number are empty.
    For the arguments, see `plot_axis`.

    >>> rows = [{"lr": lr, "H": H, "val_loss": lr * H} for lr in (0.1, 0.2) for H in (1, 5)]
    >>> plot_heatmap(rows, "lr", "H").axes[0].images[0].get_array().tolist()
    [[0.1, 0.2], [0.5, 1.0]]
    """
    style.check_shared(path, title)
    check.flag("best", best)
    data = _plot_data(rows, column, over, x=x, y=y)
    columns, lines = _values(data.rows, x), _values(data.rows, y)
    of_cells = [[[row for row in data.rows if row[x] == v and row[y] == w] for v in columns] for w in lines]
    cells = np.array([[_summary(rows, data, best)[0] for rows in line] for line in of_cells])
    if np.isnan(cells).all():
        raise _incomplete(data)
    figure, (axes,) = style.new_figure(2.2 + 0.9 * len(columns), 1.8 + 0.6 * len(lines))
    image = axes.imshow(cells, cmap="viridis", origin="lower", aspect="auto")
    middle = (np.nanmin(cells) + np.nanmax(cells)) / 2
    for i, j in zip(*np.nonzero(np.isfinite(cells))):
        colour = "white" if cells[i, j] <= middle else "black"
        axes.text(j, i, f"{cells[i, j]:.4g}", ha="center", va="center", color=colour, fontsize=9)
    best_cell = np.nanargmax(cells) if larger_is_better(column) else np.nanargmin(cells)
    i, j = divmod(int(best_cell), len(columns))
    axes.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, edgecolor=style.COLOURS[1], linewidth=2.5))
    axes.set_xticks(range(len(columns)), [_text(v) for v in columns])
    axes.set_yticks(range(len(lines)), [_text(v) for v in lines])
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    label = column_label(data.value)
    figure.colorbar(image, label=label)
    title = title or f"{label}, {'the best' if best else 'mean'} of each cell"
    return style.done(figure, data.title(title), path)


@check.strict
def plot_pareto(
    rows: Rows, column: str = "val_loss", hue: str | None = None, path: str | os.PathLike[str] | None = None, *,
    title: str | None = None, over: str | None = "seed", x: str = "bytes_total",
) -> Figure:  # fmt: skip
    """Draw a column of a sweep against the bytes sent per node: a point for each configuration, and the Pareto front.

    Another column `x` to be minimised, such as "sim_seconds", can take the place of the bytes.

    A point is the mean over the seeds; its bar ranges from the lowest to the highest seed. The line connects the
    configurations on the front, which no other beats in both respects; of a column such as "val_accuracy" the highest
    values are the best. For the arguments, see `plot_axis`.

    >>> rows = [{"H": H, "bytes_total": 1e6 / H, "val_loss": 1.0 + 0.1 * H} for H in (1, 2, 4)]
    >>> [round(float(v), 2) for v in plot_pareto(rows).axes[0].lines[0].get_ydata()]
    [1.4, 1.2, 1.1]
    """
    style.check_shared(path, title)
    data = _plot_data(rows, column, over, x=x, hue=hue)
    complete = _complete(data.rows, data)
    if not complete:
        raise _incomplete(data)
    means = [averaged(group, data.over)[0] for group in complete]
    points = [(row[x], row[data.value]) for row in means]
    figure, (axes,) = style.new_figure(7, 4.4)
    sign = -1 if larger_is_better(column) else 1
    sent, front = zip(*[points[i] for i in pareto_front([(spent, sign * y) for spent, y in points])])
    axes.plot(sent, front, color="0.4", zorder=1, label="Pareto front")
    values = _values(means, hue)
    for value, look in zip(values, style.line_styles(values)):
        members = [i for i, row in enumerate(means) if hue is None or row[hue] == value]
        at, middle = zip(*[points[i] for i in members])
        axes.scatter(at, middle, s=24, zorder=2, label=_label(hue, value), **look)
        if data.over is not None:
            low, high = ([end(row[data.value] for row in complete[i]) for i in members] for end in (min, max))
            axes.vlines(at, low, high, color=look["color"], alpha=0.6, linewidth=1.6, zorder=1)
    axes.scatter(sent, front, s=90, facecolors="none", edgecolors="0.2")
    style.finish(axes, "", column_label(x), column_label(data.value))
    if x == "bytes_total" and any(row[x] for row in means):
        style.scale_bytes(axes, [row[x] for row in means])
    _legend_of_values(axes, hue, values)
    seeds = "" if data.over is None else f": mean and range of {len(complete[0])} {data.over}s"
    return style.done(figure, data.title(title or f"{column_label(data.value)} and its cost{seeds}"), path)


def _incomplete(data: PlotData) -> ValueError:
    value, over = data.value, data.over
    return ValueError(f"no configuration has a finite {value!r} for every {over}: give over=None.")


def _label(hue: str | None, value: Any) -> str | None:
    return None if hue is None else f"{hue} = {_text(value)}"


def _legend_of_values(axes: Axes, hue: str | None, values: list[Any]) -> None:
    """Put a short legend inside the axes, and a long one beside them."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) <= style.MAX_RUNS_INSIDE:
        axes.legend(handles, labels, frameon=False)
    else:
        style.legend_beside(axes, handles, labels, f"{len(values)} values of {hue}")


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the points on the Pareto front, where both coordinates are to be small.

    No other point is lower in one coordinate and at most equal in the other. They are ordered by the first coordinate.

    >>> pareto_front([(1.0, 5.0), (2.0, 6.0), (3.0, 1.0), (3.0, 2.0)])
    [0, 2]
    """
    array = check.real("points", points, give := "pairs of numbers, [N, 2]")
    if array.shape[1:] != (2,) and array.size:
        raise TypeError(f"points has shape {list(array.shape)}; give {give}.")
    pairs = array.tolist()
    order = sorted(range(len(pairs)), key=pairs.__getitem__)
    front: list[int] = []
    for i in order:
        if not front or pairs[i][1] < pairs[front[-1]][1]:
            front.append(i)
    return front


def _plot_data(rows: Rows, value: str, over: str | None, **axes: str | None) -> PlotData:
    """Check the rows and columns of a figure. `axes`: {argument: column}."""
    rows = as_rows(rows)
    if not rows:
        raise ValueError("there is no row to plot: give the rows of a SweepResult.")
    for argument, column in {"column": value, **axes}.items():
        if argument != "hue" or column is not None:
            check.column(argument, column, rows[0])
    finite = [row for row in rows if check.is_finite(row[value])]
    if not finite:
        raise ValueError(f"no row has a finite {value!r}: give another column.")
    is_axis = isinstance(over, str) and over in axes.values()
    return PlotData(rows, value, None if is_axis else check_over(rows, over), finite)


def _values(rows: Rows, name: str | None) -> list[Any]:
    """Return the distinct values of an axis: numbers sorted, others in order of appearance."""
    if name is None:
        return [None]
    values = list(dict.fromkeys(row[name] for row in rows))
    return sorted(values) if all(map(check.is_number, values)) else values


def _places(axes: Axes, rows: Rows, name: str) -> dict[Any, float]:
    """Return the position of each value on the axis of a figure."""
    values = _values(rows, name)
    if not all(map(check.is_number, values)):
        axes.set_xticks(range(len(values)), [_text(v) for v in values])
        axes.set_xlim(-0.5, len(values) - 0.5)
        return {v: float(i) for i, v in enumerate(values)}
    if values[0] > 0 and values[-1] / values[0] >= 20:
        axes.set_xscale("log")
        axes.set_xticks(values, [_text(v) for v in values])
        axes.xaxis.set_minor_locator(NullLocator())
    return {v: float(v) for v in values}


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
