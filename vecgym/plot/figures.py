"""Figures of recorded histories, sweeps and schedules. Matplotlib's object interface only: no global state."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator
from matplotlib.transforms import Transform
from torch import Tensor

from vecgym.core import check
from vecgym.data.partition import Partition
from vecgym.records.columns import X_AXES, column_label
from vecgym.records.history import History
from vecgym.records.optimized import OptimizedSchedule
from vecgym.records.rows import Rows, averaged, check_over, groups, present_name, renewed

# Okabe and Ito's colours, which people with any kind of colour vision tell apart, in the order of their contrast.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
MANY_NODES = 16  # from here on the band of the nodes is between percentiles
MAX_LEGEND = 16  # entries
MAX_RUNS_INSIDE = 5  # of a legend among the curves: a longer one would hide them
LIGHT = 0.35  # opacity of training losses: validation losses are what counts


class NotebookFigure(Figure):
    """A matplotlib `Figure` that notebooks show even if pyplot was never imported.

    >>> NotebookFigure(figsize=(1, 1))._repr_png_()[1:4]
    b'PNG'
    """

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


def plot_comparison(
    histories: Mapping[str, History],
    path: str | os.PathLike[str] | None = None,
    *,
    title: str | None = None,
    loss_label: str = "loss",
    window: int | None = None,
) -> Figure:
    """The losses of several runs, against optimizer steps and against bytes sent.

    A light line is the training loss, the mean over the nodes smoothed over `window` steps; markers are the
    validation loss of the averaged model. The axis of bytes is logarithmic: what was recorded before anything was
    sent is not on it, and a run that never sends anything is a horizontal line at its last loss.

    Args:
        histories: name -> history, in the order of the legend.
        path: where to save the figure as well, such as "comparison.png"; its directory is made if need be.
        title: above both panels.
        loss_label: of the vertical axis; name the unit, such as "loss (nats per character)".
        window: steps to average training losses over; None: a fortieth of the run.

    Raises:
        ValueError: for no histories, or one without a step; TypeError for what is no `History`.

    >>> run = History()
    >>> for step in range(1, 9):
    ...     run.append({"step": step, "train_loss": 1 / step, "bytes_total": 100.0 * step})
    >>> figure = plot_comparison({"allreduce": run})
    >>> [axes.get_xlabel() for axes in figure.axes]
    ['optimizer steps', 'bytes sent per node']
    """
    _check_shared(path=path, title=title, window=window)
    _check(histories)
    figure = NotebookFigure(figsize=(11, 4.6), dpi=120, layout="constrained")
    by_step, by_bytes = figure.subplots(1, 2, sharey=True)
    for (name, history), style in zip(histories.items(), _styles(list(histories))):
        _draw_losses(by_step, history, "step", style, window)
        _draw_losses(by_bytes, history, "bytes_total", style, window)
        if not history.last("bytes_total"):
            _draw_silent(by_bytes, name, history, style["color"])
    _finish(by_step, "loss against steps", column_label("step"), loss_label)
    _finish(by_bytes, "loss against communication", column_label("bytes_total"), "")
    if any(history.last("bytes_total") for history in histories.values()):
        _scale_bytes(by_bytes)
    else:
        by_bytes.set_xticks([])
    _legend(by_step, list(histories))
    return _done(figure, title, path)


def plot_history(
    history: History,
    path: str | os.PathLike[str] | None = None,
    *,
    title: str | None = None,
    loss_label: str = "loss",
    window: int | None = None,
) -> Figure:
    """The losses of one run against steps: their mean over the nodes, and how far the nodes are apart.

    The band reaches from the lowest to the highest of the nodes' training losses, each smoothed over `window`
    steps. Markers are the validation loss of the averaged model; their bars reach from the best node to the worst.

    Args:
        history, path, title, loss_label, window: as for `plot_comparison`.

    >>> run = History()
    >>> for step in range(1, 9):
    ...     run.append({"step": step, "train_loss": 1 / step, "train_losses": np.array([0.9, 1.1]) / step})
    >>> plot_history(run).axes[0].get_xlabel()
    'optimizer steps'
    """
    _check_shared(path=path, title=title, window=window)
    _check({"history": history})
    figure = NotebookFigure(figsize=(7, 4.4), dpi=120, layout="constrained")
    axes = figure.subplots()
    colour, other = COLOURS[0], COLOURS[1]
    steps, losses = history.series("train_loss")
    smoothed = smooth(losses, window or default_window(history))
    axes.plot(steps, smoothed, color=colour, label="training, mean of the nodes (smoothed)")
    if "train_losses" in history.columns:
        steps, _ = history.series("train_losses")
        each = smooth(history.node_array("train_losses"), window or default_window(history))  # [steps, K]
        low, high = _span(each)
        label = f"training, lowest to highest of {each.shape[1]} nodes"
        axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0, label=label)
    if "val_loss" in history.columns:
        steps, losses = history.series("val_loss")
        axes.plot(steps, losses, color=other, marker="o", markersize=5, label="validation, averaged model")
    if "val_losses" in history.columns:
        steps, _ = history.series("val_losses")
        low, high = _span(history.node_array("val_losses"))
        label = "validation, best to worst node"
        axes.vlines(steps, low, high, color=other, alpha=0.5, linewidth=4, label=label)
    _finish(axes, title or "", column_label("step"), loss_label)
    axes.legend(frameon=False)
    return _done(figure, None, path)


def plot_runs(
    histories: Mapping[str, History],
    path: str | os.PathLike[str] | None = None,
    *,
    x: str = "step",
    title: str | None = None,
    loss_label: str = "loss",
    window: int | None = None,
) -> Figure:
    """One run or several: losses with the nodes' spread, and how far the nodes are apart, against any of four axes.

    Left, a light line is the training loss, the mean over the nodes smoothed over `window` steps; its band reaches
    from the lowest to the highest node, or if a run has 16 nodes or more from the tenth to the ninetieth percentile.
    Markers are the validation loss of the averaged model. Right, the consensus distance, if it was recorded: the root
    mean square distance of the nodes' parameters to their average, at the evaluations.

    Args:
        histories: name -> history, in the order of the legend.
        path, title, loss_label, window: as for `plot_comparison`.
        x: "step", "examples", "bytes" (per node; logarithmic with several runs) or "seconds" (of the simulation).

    Raises:
        ValueError: for no histories, one without a step, an x that is not known; TypeError for what is no `History`.

    >>> run = History()
    >>> for step in range(1, 9):
    ...     run.append({"step": step, "train_loss": 1 / step, "seconds": 0.1 * step, "consensus_distance": 0.5})
    >>> [axes.get_xlabel() for axes in plot_runs({"diloco": run}, x="seconds").axes]
    ['seconds of simulation', 'seconds of simulation']
    """
    _check_shared(path=path, title=title, window=window)
    _check(histories)
    column = X_AXES[check.choice("x", x, X_AXES)]
    apart = {n: h for n, h in histories.items() if _recorded(h, "consensus_distance")}
    figure = NotebookFigure(figsize=(11 if apart else 7, 4.6), dpi=120, layout="constrained")
    panels = figure.subplots(1, 2 if apart else 1, squeeze=False, sharex=True)[0]
    each = {n: h.node_array("train_losses") for n, h in histories.items() if _recorded(h, "train_losses")}
    many = any(losses.shape[1] >= MANY_NODES for losses in each.values())
    for (name, history), style in zip(histories.items(), _styles(list(histories))):
        if name in each:
            at = np.array(history.series("train_losses", column)[0], dtype=np.float64)
            _draw_spread(panels[0], at, smooth(each[name], window or default_window(history)), many, style["color"])
        _draw_losses(panels[0], history, column, style, window)
        if x == "bytes" and not history.last("bytes_total"):
            _draw_silent(panels[0], name, history, style["color"])
        if name in apart:
            panels[1].plot(*_curve(history, "consensus_distance", column, 1), **style, markersize=5.5, label=name)
    _finish(panels[0], f"loss against {x}s" if x == "step" else f"loss against {x}", column_label(column), loss_label)
    if apart:
        _finish(panels[1], "consensus distance", column_label(column), "RMS distance of a node to the average")
        panels[1].set_ylim(bottom=0)
    _scale_x(panels[0], x, histories)
    band = "10 % to 90 % of the nodes" if many else "lowest to highest node"
    _legend(panels[0], list(histories), band if each else "")
    return _done(figure, title, path)


def _recorded(history: History, column: str) -> bool:
    return column in history.columns


def _draw_spread(axes: Axes, at: np.ndarray, each: np.ndarray, many: bool, colour: str) -> None:
    """A band over the nodes' losses `[steps, K]`; between two equal places the last counts."""
    if many:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a step in which no node has a finite loss
            low, high = np.nanpercentile(np.where(np.isfinite(each), each, np.nan), [10, 90], axis=1)
    else:
        low, high = _span(each)
    keep = np.append(at[1:] != at[:-1], True) & (at > 0)  # a logarithmic axis has no place for 0
    axes.fill_between(at[keep], low[keep], high[keep], color=colour, alpha=0.15, linewidth=0)


def _scale_x(axes: Axes, x: str, histories: Mapping[str, History]) -> None:
    if x == "bytes":
        if not any(history.last("bytes_total") for history in histories.values()):
            axes.set_xticks([])
            return
        if len(histories) > 1:
            axes.set_xscale("log")
        axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    elif x == "examples":
        axes.xaxis.set_major_formatter(EngFormatter())


def plot_sensitivity(
    gradient: Tensor | np.ndarray | Sequence[float],
    schedule: Tensor | np.ndarray | Sequence[float] | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    title: str | None = None,
) -> Figure:
    """How much the final loss changes with each step's exchange: d loss / d a_t of a rollout, as bars.

    Below 0: to exchange there, or more there, lowers the loss.

    Args:
        gradient: of the loss by `sync_weight`, `[T]`.
        schedule: `sync_weight` itself, `[T]`; steps that exchange (a_t > 0) are marked under the bars.
        path, title: as for `plot_comparison`.

    Raises:
        ValueError: for what is not `[T]`, or two lengths.

    >>> plot_sensitivity([-0.5, 0.1, -0.2], schedule=[0, 0, 1]).axes[0].get_ylabel()
    'd final loss / d weight of the exchange'
    """
    _check_shared(path=path, title=title)
    slope = _vector("gradient", gradient)
    figure = NotebookFigure(figsize=(9, 3.8), dpi=120, layout="constrained")
    axes = figure.subplots()
    steps = np.arange(1, len(slope) + 1)
    helps = slope < 0
    for there, colour, label in ((helps, COLOURS[0], "more lowers the loss"), (~helps, COLOURS[1], "more raises it")):
        if there.any():
            axes.bar(steps[there], slope[there], width=0.85, color=colour, label=label)
    axes.axhline(0, color="0.3", linewidth=0.8)
    if schedule is not None:
        weights = _vector("schedule", schedule)
        if len(weights) != len(slope):
            raise ValueError(f"gradient has {len(slope)} steps and schedule {len(weights)}: give those of one run.")
        _draw_exchanges(axes, weights, 0.03, "0.2", "exchanges of the run", axes.get_xaxis_transform())
    _finish(axes, title or "where an exchange matters", "optimizer steps", "d final loss / d weight of the exchange")
    figure.legend(frameon=False, loc="outside lower center", ncols=3)  # bars leave no room among them
    return _done(figure, None, path)


def plot_schedule(
    found: OptimizedSchedule, path: str | os.PathLike[str] | None = None, *, title: str | None = None
) -> Figure:
    """An optimized schedule beside the uniform one (or mixing matrices beside those of the start), and the descent.

    Left: the relaxed weights as bars, and under them when each schedule exchanges. Right: the loss of each step of the
    descent, with that of the schedule that came out and of the one that sends the same without being optimized.

    Args:
        found: what `optimize_schedule` returned.
        path, title: as for `plot_comparison`. Without a title: the bytes.

    >>> import torch
    >>> from vecgym.records.optimized import OptimizedSchedule
    >>> late, uniform = torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.tensor([0.0, 1.0, 0.0, 1.0])
    >>> found = OptimizedSchedule(late, late, uniform, 1.0, 1.0, uniform_loss=1.5, total_bytes=800.0, losses=(1.5, 1.0))
    >>> [axes.get_xlabel() for axes in plot_schedule(found).axes]
    ['optimizer steps', 'accepted steps of the descent']
    """
    _check_shared(path=path, title=title)
    check.instance("found", found, OptimizedSchedule, "what optimize_schedule returned")
    figure = NotebookFigure(figsize=(11, 4.2), dpi=120, layout="constrained")
    if found.schedule.ndim == 1:
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        _draw_times(left, found)
        names = "optimized, rounded", "every H"
    else:
        *panels, right = figure.subplots(1, 3)
        names = "optimized", "start"
        for axes, name, matrices in zip(panels, names, (found.schedule, found.uniform)):
            _draw_matrix(axes, name, matrices)
    right.plot(
        range(1, len(found.losses) + 1), found.losses, color=COLOURS[2], marker="o", markersize=4, label="descent"
    )
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.axhline(found.loss, color=COLOURS[0], label=names[0])
    right.axhline(found.uniform_loss, color=COLOURS[1], linestyle="--", label=names[1])
    _finish(right, "final loss at equal bytes", "accepted steps of the descent", "loss")
    right.legend(frameon=False)
    return _done(figure, title or f"{EngFormatter(unit='B')(found.total_bytes)} sent per node", path)


def plot_partition(
    partition: Partition, path: str | os.PathLike[str] | None = None, *, title: str | None = None
) -> Figure:
    """How many examples of each class each node has, as stacked bars: a bar for each node, a colour for each class.

    Args:
        partition: one with labels, such as `vecgym.data.partition_dirichlet` makes; without, one bar in one colour.
        path, title: as for `plot_comparison`. Without a title: the partition in a line.

    >>> from vecgym.data import partition_shards
    >>> partition = partition_shards([0] * 6 + [1] * 6, num_nodes=4, shards_per_node=1)
    >>> heights = [int(bar.get_height()) for bar in plot_partition(partition).axes[0].patches]
    >>> sorted(heights)  # each node has one of the two classes
    [0, 0, 0, 0, 3, 3, 3, 3]
    """
    _check_shared(path=path, title=title)
    check.instance("partition", partition, Partition, "a Partition such as partition_iid(labels, 8)")
    nodes, each = range(partition.num_nodes), np.array(partition.sizes)[:, None]
    labels: Sequence[int | str] = ["examples"]
    if partition.labels is not None:
        each, labels = partition.counts.numpy(), partition.classes
    figure = NotebookFigure(figsize=(9, 3.8), dpi=120, layout="constrained")
    axes = figure.subplots()
    shades = colormaps["viridis"](np.linspace(0, 1, len(labels)))
    width = 0.85 if len(each) <= 50 else 1.0  # no gaps where bars are thin
    for c, (label, top) in enumerate(zip(labels, each.cumsum(1).T)):
        colour = COLOURS[c] if len(labels) <= len(COLOURS) else shades[c]
        axes.bar(nodes, each[:, c], bottom=top - each[:, c], width=width, color=colour, label=str(label))
    axes.set_xlim(-0.6, len(each) - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _finish(axes, "", "node", "examples")
    if len(labels) > 1:
        handles, names = axes.get_legend_handles_labels()
        of = "class" if len(labels) <= MAX_LEGEND else f"{len(labels)} classes"
        _legend_beside(axes, handles[::-1], names[::-1], of)
    return _done(figure, title or repr(partition)[len("Partition(") : -1], path)


# -------------------------------------------------------------------------------------------------- sweeps


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
    _check_shared(path=path, title=title, best=best)
    rows, y = renewed(rows), present_name(y)
    there = _finite_rows(rows, y, y=y, x=x, hue=hue)
    over = _averaged_over(rows, over, x, hue)
    figure = NotebookFigure(figsize=(7, 4.4), dpi=120, layout="constrained")
    axes = figure.subplots()
    places = _places(axes, [row[x] for row in there])
    values = _values(there, hue)
    for value, style in zip(values, _styles(values)):
        mine = [row for row in rows if hue is None or row[hue] == value]
        found = {v: _summary([row for row in mine if row[x] == v], y, over, best) for v in places}
        at = [v for v in places if found[v] is not None]
        middle, low, high = zip(*[found[v] for v in at]) if at else ((), (), ())
        label = None if hue is None else f"{hue} = {_shown(value)}"
        axes.plot([places[v] for v in at], middle, label=label, markersize=5.5, **style)
        if low != high and not (best and over is None):
            axes.fill_between([places[v] for v in at], low, high, color=style["color"], alpha=0.15, linewidth=0)
    _finish(axes, "", x, column_label(y))
    if hue is not None:
        _legend_of_values(axes, hue, values)
    what = f"{'the best' if best else 'mean'} of the configurations that share {x}{f' and {hue}' if hue else ''}"
    spread = f", and the range of {over}s" if over is not None else "" if best else ", and their range"
    return _done(figure, _with_left_out(title or f"{column_label(y)}:\n{what}{spread}", rows, there), path)


def _summary(rows: Rows, y: str, over: str | None, best: bool) -> tuple[float, float, float] | None:
    """Middle, lowest and highest of some rows; None: they have no finite number."""
    finite = [row for row in rows if _is_finite(row[y])]
    if best:
        whole = [group for group in groups(rows, over) if all(_is_finite(row[y]) for row in group)]
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
    _check_shared(path=path, title=title, best=best)
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
    return _done(figure, _with_left_out(title, rows, there), path)


def plot_pareto(
    rows: Rows,
    y: str = "val_loss",
    hue: str | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    title: str | None = None,
    over: str | None = "seed",
) -> Figure:
    """A column of a sweep against the bytes sent per node: a point per configuration, and the Pareto front.

    A point is the mean over the seeds, and a bar reaches from the lowest to the highest of them. On the front are those
    that no other beats in both; a line connects them. Args: as for `plot_axis`.

    >>> rows = [{"H": H, "bytes_total": 1e6 / H, "val_loss": 1.0 + 0.1 * H} for H in (1, 2, 4)]
    >>> [round(float(v), 2) for v in plot_pareto(rows).axes[0].lines[0].get_ydata()]
    [1.4, 1.2, 1.1]
    """
    _check_shared(path=path, title=title)
    rows, y = renewed(rows), present_name(y)
    there = _finite_rows(rows, y, y=y, x="bytes_total", hue=hue)
    over = _averaged_over(rows, over, hue)
    whole = [group for group in groups(rows, over) if all(_is_finite(row[y]) for row in group)]
    if not whole:
        raise ValueError(f"no configuration has a finite number as {y!r} for every {over}: give over=None.")
    means = [averaged(group, over)[0] for group in whole]
    figure = NotebookFigure(figsize=(7, 4.4), dpi=120, layout="constrained")
    axes = figure.subplots()
    front = [means[i] for i in pareto_front([(row["bytes_total"], row[y]) for row in means])]
    sent, lowest = ([row[name] for row in front] for name in ("bytes_total", y))
    axes.plot(sent, lowest, color="0.4", zorder=1, label="Pareto front")
    values = _values(means, hue)
    for value, style in zip(values, _styles(values)):
        mine = [i for i, row in enumerate(means) if hue is None or row[hue] == value]
        label = None if hue is None else f"{hue} = {_shown(value)}"
        at, middle = [means[i]["bytes_total"] for i in mine], [means[i][y] for i in mine]
        axes.scatter(at, middle, s=24, zorder=2, label=label, **style)
        if over is not None:
            low, high = ([f(row[y] for row in whole[i]) for i in mine] for f in (min, max))
            axes.vlines(at, low, high, color=style["color"], alpha=0.6, linewidth=1.6, zorder=1)
    axes.scatter(sent, lowest, s=90, facecolors="none", edgecolors="0.2")
    _finish(axes, "", column_label("bytes_total"), column_label(y))
    _scale_sent(axes, [row["bytes_total"] for row in means])
    _legend_of_values(axes, hue, values)
    seeds = "" if over is None else f": mean and range of {len(whole[0])} {over}s"
    return _done(figure, _with_left_out(title or f"{column_label(y)} and what it costs{seeds}", rows, there), path)


def _scale_sent(axes: Axes, sent: list[float]) -> None:
    """A logarithmic axis of bytes, which may have configurations at 0."""
    if not any(sent):
        return
    if not all(sent):  # a logarithmic axis has no place for 0
        axes.set_xscale("symlog", linthresh=min(x for x in sent if x > 0))
    else:
        _scale_bytes(axes)
    axes.xaxis.set_major_formatter(EngFormatter(unit="B"))


def _styles(values: list[Any]) -> list[dict[str, Any]]:
    """Colours that are told apart; of more values than there are, shades in their order."""
    if len(values) <= len(COLOURS):
        return [{"color": colour, "marker": marker} for colour, marker in zip(COLOURS, MARKERS)]
    shades = map(to_hex, colormaps["viridis"](np.linspace(0, 0.95, len(values))))
    return [{"color": shade, "marker": MARKERS[i % len(MARKERS)]} for i, shade in enumerate(shades)]


def _legend_of_values(axes: Axes, hue: str | None, values: list[Any]) -> None:
    """Among the curves while it is short, beside them when it is not; of very many values some."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) <= MAX_RUNS_INSIDE:
        axes.legend(handles, labels, frameon=False)
        return
    _legend_beside(axes, handles, labels, f"{len(values)} values of {hue}")


def _legend_beside(axes: Axes, handles: Sequence[Any], labels: Sequence[str], title: str) -> None:
    keep = _some(len(handles))
    axes.legend(
        [handles[i] for i in keep], [labels[i] for i in keep], title=title, frameon=False, loc="center left",
        bbox_to_anchor=(1, 0.5), fontsize=8,
    )  # fmt: skip


def _some(number: int) -> list[int]:
    """The places of at most MAX_LEGEND of so many entries, evenly spaced, with the first and the last.

    >>> _some(3), len(_some(200)), _some(200)[-1]
    ([0, 1, 2], 16, 199)
    """
    if number <= MAX_LEGEND:
        return list(range(number))
    return [round(i * (number - 1) / (MAX_LEGEND - 1)) for i in range(MAX_LEGEND)]


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
    there = [row for row in rows if _is_finite(row[value])]
    if not there:
        raise ValueError(f"no row has a finite number as {value!r}.")
    return there


def _values(rows: Rows, name: str | None) -> list[Any]:
    """The values of an axis: numbers ascending, others as they come."""
    if name is None:
        return [None]
    found = list(dict.fromkeys(row[name] for row in rows))
    return sorted(found) if all(map(_is_number, found)) else found


def _places(axes: Axes, values: list[Any]) -> dict[Any, float]:
    """Where each value is drawn."""
    found = list(dict.fromkeys(values))
    if not all(map(_is_number, found)):
        axes.set_xticks(range(len(found)), [_shown(v) for v in found])
        return {v: float(i) for i, v in enumerate(found)}
    found = sorted(found)
    if found[0] > 0 and found[-1] / found[0] >= 20:
        axes.set_xscale("log")
        axes.set_xticks(found, [_shown(v) for v in found])
        axes.xaxis.set_minor_locator(NullLocator())
    return {v: float(v) for v in found}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and bool(np.isfinite(value))


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _with_left_out(title: str | None, rows: Rows, there: Rows) -> str | None:
    if len(there) == len(rows):
        return title
    left_out = f"{len(rows) - len(there)} of {len(rows)} runs left out: no finite number"
    return left_out if title is None else f"{title}\n{left_out}"


# ------------------------------------------------------------------------------------------------- helpers


def smooth(values: np.ndarray | list[float], window: int) -> np.ndarray:
    """The mean of the `window` entries around each entry along dimension 0, over those that are finite.

    Near the end there are fewer entries, and near the start as many before as after: losses fall steeply there. Where
    none is finite the result is nan.

    >>> smooth([1.0, 2.0, 6.0, np.nan, 4.0], window=3)
    array([1., 3., 4., 5., 4.])
    """
    x = np.asarray(values, dtype=np.float64)
    there = np.isfinite(x)
    zero = np.zeros((1, *x.shape[1:]))
    sums = np.concatenate([zero, np.cumsum(np.where(there, x, 0.0), axis=0)])
    counts = np.concatenate([zero, np.cumsum(there, axis=0)])
    index = np.arange(len(x))
    first = np.maximum(index - (window - 1) // 2, 0)
    stop = np.minimum(index + np.minimum(window // 2, index) + 1, len(x))
    count = counts[stop] - counts[first]
    return np.where(count > 0, (sums[stop] - sums[first]) / np.maximum(count, 1), np.nan)


def default_window(history: History) -> int:
    """Steps to smooth over when nothing is given: a fortieth of the run.

    >>> history = History()
    >>> for step in range(200):
    ...     history.append({"step": step, "train_loss": 1.0})
    >>> default_window(history)
    5
    """
    return max(1, len(history) // 40)


def _draw_losses(axes: Axes, history: History, x: str, style: dict[str, str], window: int | None) -> None:
    """Training losses as a light line, validation losses as markers, against the column `x`."""
    at, losses = _curve(history, "train_loss", x, window or default_window(history))
    axes.plot(at, losses, color=style["color"], alpha=LIGHT, linewidth=1.8)
    if "val_loss" in history.columns:
        at, losses = _curve(history, "val_loss", x, 1)
        axes.plot(at, losses, **style, markersize=5.5, markeredgecolor="white", markeredgewidth=0.6, linewidth=1.0)  # type: ignore[arg-type]


def _curve(history: History, column: str, x: str, window: int) -> tuple[np.ndarray, np.ndarray]:
    """A smoothed column against `x`.

    Against bytes there is one point per amount sent, the last one with it, and none at 0 bytes, where a logarithmic
    axis has no place.
    """
    at, values = map(np.array, history.series(column, x))
    values = smooth(values, window)
    if x != "bytes_total":
        return at, values
    keep = np.append(at[1:] != at[:-1], True) & (at > 0)
    return at[keep], values[keep]


def _scale_bytes(axes: Axes) -> None:
    """A logarithmic axis of bytes, labelled in kB, MB ..., also where it spans less than two powers of ten."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    if high < 100 * low:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.xaxis.set_minor_formatter(NullFormatter())  # numbers between the labels would overlap them


def _draw_silent(axes: Axes, name: str, history: History, colour: str) -> None:
    """A run that sends nothing has no place on an axis of bytes: a line across it at its last loss."""
    last = history.last("val_loss") if "val_loss" in history.columns else history.last("train_loss")
    axes.axhline(last, color=colour, linestyle=":")
    axes.annotate(
        f"{name}: sends nothing", (0.02, last), (0, 3), xycoords=("axes fraction", "data"),
        textcoords="offset points", color=colour, fontsize=9,
    )  # fmt: skip


def _draw_times(axes: Axes, found: OptimizedSchedule) -> None:
    weights = _vector("weights", found.weights)
    axes.bar(
        np.arange(1, len(weights) + 1), weights, width=0.85, color=COLOURS[2], alpha=LIGHT, label="relaxed weights"
    )
    _draw_exchanges(axes, _vector("schedule", found.schedule), -0.06, COLOURS[0], "optimized, rounded")
    _draw_exchanges(axes, _vector("uniform", found.uniform), -0.14, COLOURS[1], "every H")
    axes.set_ylim(-0.2, 1.05)
    _finish(axes, "when to exchange", "optimizer steps", "weight of the exchange")
    axes.legend(frameon=False, loc="upper left")


def _draw_exchanges(
    axes: Axes, weights: np.ndarray, y: float, colour: str, label: str, transform: Transform | None = None
) -> None:
    """A mark for each step that exchanges."""
    at = np.flatnonzero(weights > 0) + 1
    style = {"markersize": 9, "markeredgewidth": 1.8, "color": colour, "label": label}
    axes.plot(at, np.full(len(at), y), "|", transform=transform or axes.transData, **style)  # type: ignore[arg-type]


def _draw_matrix(axes: Axes, name: str, matrices: Tensor) -> None:
    """One matrix, or the mean of several."""
    several = matrices.ndim == 3
    values = matrices.detach().double().cpu().numpy()
    image = axes.imshow(values.mean(0) if several else values, vmin=0, vmax=1, cmap="viridis")
    _finish(axes, f"{name}, mean of {len(values)}" if several else name, "from node", "to node")
    axes.grid(False)
    axes.figure.colorbar(image, ax=axes, shrink=0.7)


def _vector(name: str, values: Any) -> np.ndarray:
    try:
        found = values.detach().double().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values, np.float64)
    except (TypeError, ValueError, NotImplementedError):  # the last: of a tensor on the device meta
        raise TypeError(f"{name} is {check.kind_of(values)} without numbers; give one for each step, [T].") from None
    if found.ndim != 1 or len(found) == 0:
        raise ValueError(f"{name} has shape {list(found.shape)}; one number for each step, [T], is needed.")
    return found


def _legend(axes: Axes, names: list[str], spread: str = "") -> None:
    """The runs by colour, and what line and marker mean."""
    keep = _some(len(names))
    styles = _styles(names)
    handles: list[Artist] = [Line2D([], [], **styles[i], linewidth=2, label=names[i]) for i in keep]
    if len(keep) < len(names):
        handles.append(Line2D([], [], linestyle="", label=f"... of {len(names)} runs"))
    handles.append(Line2D([], [], color="0.3", marker="o", linewidth=1, label="validation, averaged model"))
    handles.append(Line2D([], [], color="0.3", alpha=LIGHT, linewidth=2, label="training (smoothed)"))
    if spread:
        handles.append(Patch(color="0.3", alpha=0.15, linewidth=0, label=f"training, {spread}"))
    if len(names) > MAX_RUNS_INSIDE:
        axes.figure.legend(handles=handles, frameon=False, loc="outside lower center", ncols=4)
    else:
        axes.legend(handles=handles, frameon=False)


def _finish(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(True, which="major", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _done(figure: Figure, title: str | None, path: str | os.PathLike[str] | None) -> Figure:
    if title:
        figure.suptitle(title, fontsize=12)
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return figure


def _span(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest finite entry of each row; nan where there is none."""
    there = np.isfinite(values)
    low = np.where(there, values, np.inf).min(axis=1)
    high = np.where(there, values, -np.inf).max(axis=1)
    some = there.any(axis=1)
    return np.where(some, low, np.nan), np.where(some, high, np.nan)


def _check_shared(path: Any, title: Any, window: Any = None, best: Any = False) -> None:
    """What several figures are given, before anything is drawn."""
    if path is not None:
        check.path("path", path)
    check.instance("title", title, (str, type(None)), "a str, or None")
    check.optional_integer("window", window, what="steps to average over")
    check.flag("best", best)


def _check(histories: Mapping[str, History]) -> None:
    check.instance("histories", histories, Mapping, 'a dict: {"name": trainer.history, ...}')
    if not histories:
        raise ValueError('there is no history to plot; give histories={"name": trainer.history, ...}.')
    for name, history in histories.items():
        check.instance(f"histories[{name!r}]", history, History, "a History such as trainer.history")
        if not any(row.get("train_loss") is not None for row in history):
            raise ValueError(f"the history of {name!r} has no step to plot.")
