"""Figures of recorded histories."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter

from vecgym.core import check
from vecgym.plot.style import (
    COLOURS,
    LIGHT,
    MAX_RUNS_INSIDE,
    NotebookFigure,
    check_shared,
    done,
    every_few,
    finish,
    line_styles,
    scale_bytes,
    span,
)
from vecgym.records.columns import X_AXES, column_label
from vecgym.records.history import History

MANY_NODES = 16  # from here on the band of the nodes is between percentiles


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
    check_shared(path=path, title=title, window=window)
    _check(histories)
    figure = NotebookFigure(figsize=(11, 4.6), dpi=120, layout="constrained")
    by_step, by_bytes = figure.subplots(1, 2, sharey=True)
    for (name, history), style in zip(histories.items(), line_styles(list(histories))):
        _draw_losses(by_step, history, "step", style, window)
        _draw_losses(by_bytes, history, "bytes_total", style, window)
        if not history.last("bytes_total"):
            _draw_silent(by_bytes, name, history, style["color"])
    finish(by_step, "loss against steps", column_label("step"), loss_label)
    finish(by_bytes, "loss against communication", column_label("bytes_total"), "")
    if any(history.last("bytes_total") for history in histories.values()):
        scale_bytes(by_bytes)
    else:
        by_bytes.set_xticks([])
    _legend(by_step, list(histories))
    return done(figure, title, path)


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
    check_shared(path=path, title=title, window=window)
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
        low, high = span(each)
        label = f"training, lowest to highest of {each.shape[1]} nodes"
        axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0, label=label)
    if "val_loss" in history.columns:
        steps, losses = history.series("val_loss")
        axes.plot(steps, losses, color=other, marker="o", markersize=5, label="validation, averaged model")
    if "val_losses" in history.columns:
        steps, _ = history.series("val_losses")
        low, high = span(history.node_array("val_losses"))
        label = "validation, best to worst node"
        axes.vlines(steps, low, high, color=other, alpha=0.5, linewidth=4, label=label)
    finish(axes, title or "", column_label("step"), loss_label)
    axes.legend(frameon=False)
    return done(figure, None, path)


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
    check_shared(path=path, title=title, window=window)
    _check(histories)
    column = X_AXES[check.choice("x", x, X_AXES)]
    apart = {n: h for n, h in histories.items() if _recorded(h, "consensus_distance")}
    figure = NotebookFigure(figsize=(11 if apart else 7, 4.6), dpi=120, layout="constrained")
    panels = figure.subplots(1, 2 if apart else 1, squeeze=False, sharex=True)[0]
    each = {n: h.node_array("train_losses") for n, h in histories.items() if _recorded(h, "train_losses")}
    many = any(losses.shape[1] >= MANY_NODES for losses in each.values())
    for (name, history), style in zip(histories.items(), line_styles(list(histories))):
        if name in each:
            at = np.array(history.series("train_losses", column)[0], dtype=np.float64)
            _draw_spread(panels[0], at, smooth(each[name], window or default_window(history)), many, style["color"])
        _draw_losses(panels[0], history, column, style, window)
        if x == "bytes" and not history.last("bytes_total"):
            _draw_silent(panels[0], name, history, style["color"])
        if name in apart:
            panels[1].plot(*_curve(history, "consensus_distance", column, 1), **style, markersize=5.5, label=name)
    finish(panels[0], f"loss against {x}s" if x == "step" else f"loss against {x}", column_label(column), loss_label)
    if apart:
        finish(panels[1], "consensus distance", column_label(column), "RMS distance of a node to the average")
        panels[1].set_ylim(bottom=0)
    _scale_x(panels[0], x, histories)
    band = "10 % to 90 % of the nodes" if many else "lowest to highest node"
    _legend(panels[0], list(histories), band if each else "")
    return done(figure, title, path)


def _recorded(history: History, column: str) -> bool:
    return column in history.columns


def _draw_spread(axes: Axes, at: np.ndarray, each: np.ndarray, many: bool, colour: str) -> None:
    """A band over the nodes' losses `[steps, K]`; between two equal places the last counts."""
    if many:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a step in which no node has a finite loss
            low, high = np.nanpercentile(np.where(np.isfinite(each), each, np.nan), [10, 90], axis=1)
    else:
        low, high = span(each)
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


def _draw_silent(axes: Axes, name: str, history: History, colour: str) -> None:
    """A run that sends nothing has no place on an axis of bytes: a line across it at its last loss."""
    last = history.last("val_loss") if "val_loss" in history.columns else history.last("train_loss")
    axes.axhline(last, color=colour, linestyle=":")
    axes.annotate(
        f"{name}: sends nothing", (0.02, last), (0, 3), xycoords=("axes fraction", "data"),
        textcoords="offset points", color=colour, fontsize=9,
    )  # fmt: skip


def _legend(axes: Axes, names: list[str], spread: str = "") -> None:
    """The runs by colour, and what line and marker mean."""
    keep = every_few(len(names))
    styles = line_styles(names)
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


def _check(histories: Mapping[str, History]) -> None:
    check.instance("histories", histories, Mapping, 'a dict: {"name": trainer.history, ...}')
    if not histories:
        raise ValueError('there is no history to plot; give histories={"name": trainer.history, ...}.')
    for name, history in histories.items():
        check.instance(f"histories[{name!r}]", history, History, "a History such as trainer.history")
        if not any(row.get("train_loss") is not None for row in history):
            raise ValueError(f"the history of {name!r} has no step to plot.")
