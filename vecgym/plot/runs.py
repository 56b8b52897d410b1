"""Figures of recorded histories."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter

from vecgym.collectives.ledger import readable_bytes
from vecgym.core import check
from vecgym.plot import style
from vecgym.records.columns import X_AXES, column_label
from vecgym.records.history import History
from vecgym.records.loggers import Logger

AMOUNTS = ("bytes_total", "bytes_payload_total")  # columns of bytes, which are constant between exchanges
MANY_NODES = 16  # with so many nodes or more, their band is between percentiles


def plot_comparison(
    histories: Mapping[str, History],
    path: str | os.PathLike[str] | None = None,
    *,
    title: str | None = None,
    loss_label: str = "loss",
    window: int | None = None,
) -> Figure:
    """Draw the losses of several runs, against optimizer steps and against bytes sent.

    A light line is the training loss: the mean over the nodes, smoothed over `window` steps. Markers are the
    validation loss of the averaged model. The axis of bytes is logarithmic: it omits what was recorded before anything
    was sent, and shows a run that never sends anything as a horizontal line at its last loss.

    Args:
        histories: {name: history}, in the order of the legend.
        path: a file to save the figure to, such as "comparison.png"; missing directories are created.
        title: above both panels.
        loss_label: the label of the vertical axis, with the unit, such as "loss (nats per character)".
        window: the number of steps to average training losses over; None: a fortieth of the run.

    Raises:
        ValueError: if there are no histories, or one has no step.
        TypeError: for anything but `History` objects.

    >>> run = History()
    >>> for step in range(1, 9):
    ...     run.append({"step": step, "train_loss": 1 / step, "bytes_total": 100.0 * step})
    >>> figure = plot_comparison({"allreduce": run})
    >>> [axes.get_xlabel() for axes in figure.axes]
    ['optimizer steps', 'bytes sent per node']
    """
    _check(histories, path, title, window)
    figure, (by_step, by_bytes) = style.new_figure(11, 4.6, columns=2, sharey=True)
    for (name, history), look in zip(histories.items(), style.line_styles(list(histories))):
        _draw_losses(by_step, name, history, "step", look, window)
        _draw_losses(by_bytes, name, history, "bytes_total", look, window)
    style.finish(by_step, "loss against steps", column_label("step"), loss_label)
    style.finish(by_bytes, "loss against communication", column_label("bytes_total"), "")
    style.scale_bytes(by_bytes, _sent(histories))
    _legend(by_step, list(histories))
    return style.done(figure, title, path)


def plot_history(
    history: History,
    path: str | os.PathLike[str] | None = None,
    *,
    title: str | None = None,
    loss_label: str = "loss",
    window: int | None = None,
) -> Figure:
    """Draw the losses of one run against steps: their mean over the nodes, and their spread.

    The band spans the nodes' training losses, each smoothed over `window` steps. Markers are the validation loss of
    the averaged model; their bars range from the best node to the worst.

    Args:
        history, path, title, loss_label, window: as for `plot_comparison`.

    >>> run = History()
    >>> for step in range(1, 9):
    ...     run.append({"step": step, "train_loss": 1 / step, "train_losses": np.array([0.9, 1.1]) / step})
    >>> plot_history(run).axes[0].get_xlabel()
    'optimizer steps'
    """
    _check({"history": history}, path, title, window)
    figure, (axes,) = style.new_figure(7, 4.4)
    (colour, other), window = style.COLOURS[:2], window or default_window(history)
    steps, losses = history.series("train_loss")
    axes.plot(steps, smooth(losses, window), color=colour, label="training, mean of the nodes (smoothed)")
    if "train_losses" in history.columns:
        node_losses = smooth(history.node_array("train_losses"), window)  # [steps, K]
        label = f"training, lowest to highest of {node_losses.shape[1]} nodes"
        style.draw_band(
            axes, history.series("train_losses")[0], *style.span(node_losses), colour=colour, alpha=0.2, label=label
        )
    if "val_loss" in history.columns:
        label = "validation, averaged model"
        axes.plot(*history.series("val_loss"), color=other, marker="o", markersize=5, label=label)
    if "val_losses" in history.columns:
        low, high = style.span(history.node_array("val_losses"))
        label = "validation, best to worst node"
        axes.vlines(history.series("val_losses")[0], low, high, color=other, alpha=0.5, linewidth=4, label=label)
    style.finish(axes, title or "", column_label("step"), loss_label)
    axes.legend(frameon=False)
    return style.done(figure, None, path)


def plot_runs(
    histories: Mapping[str, History],
    path: str | os.PathLike[str] | None = None,
    *,
    x: str = "step",
    title: str | None = None,
    loss_label: str = "loss",
    window: int | None = None,
) -> Figure:
    """Draw runs: the losses with their spread over the nodes, and the consensus distance, against one of six axes.

    Left: a light line is the training loss, the mean over the nodes, smoothed over `window` steps. Its band ranges from
    the lowest to the highest node or, if a run has 16 nodes or more, from the 10th to the 90th percentile. Markers are
    the validation loss of the averaged model. Right: the consensus distance, if it was recorded: the root mean square
    distance of the nodes' parameters to their average, at the evaluations.

    Args:
        histories: {name: history}, in the order of the legend.
        path, title, loss_label, window: as for `plot_comparison`.
        x: "step", "examples", "bytes" (sent per node) or "payload" (as papers report), which are logarithmic for
            several runs, "seconds" (of the simulation) or "sim_seconds" (on the run's network).

    Raises:
        ValueError: if there are no histories, or one has no step, or for an unknown x.
        TypeError: for anything but `History` objects.

    >>> run = History()
    >>> for step in range(1, 9):
    ...     run.append({"step": step, "train_loss": 1 / step, "seconds": 0.1 * step, "consensus_distance": 0.5})
    >>> [axes.get_xlabel() for axes in plot_runs({"diloco": run}, x="seconds").axes]
    ['seconds of simulation', 'seconds of simulation']
    """
    _check(histories, path, title, window)
    column = X_AXES[check.choice("x", x, X_AXES)]
    apart = {n: h for n, h in histories.items() if "consensus_distance" in h.columns}
    figure, panels = style.new_figure(11 if apart else 7, 4.6, columns=2 if apart else 1, sharex=True)
    node_losses = {n: h.node_array("train_losses") for n, h in histories.items() if "train_losses" in h.columns}
    many = any(losses.shape[1] >= MANY_NODES for losses in node_losses.values())
    for (name, history), look in zip(histories.items(), style.line_styles(list(histories))):
        if name in node_losses:
            at = np.array(history.series("train_losses", column)[0], dtype=np.float64)
            losses = smooth(node_losses[name], window or default_window(history))
            low, high = _percentiles(losses) if many else style.span(losses)
            keep = _last_at_place(at)
            style.draw_band(panels[0], at[keep], low[keep], high[keep], look["color"])
        _draw_losses(panels[0], name, history, column, look, window)
        if name in apart:
            panels[1].plot(*_curve(history, "consensus_distance", column, 1), **look, markersize=5.5, label=name)
    style.finish(panels[0], f"loss against {'steps' if x == 'step' else x}", column_label(column), loss_label)
    if apart:
        style.finish(panels[1], "consensus distance", column_label(column), "RMS distance of a node to the average")
        panels[1].set_ylim(bottom=0)
    if column in AMOUNTS:
        style.scale_bytes(panels[0], _sent(histories, column), logarithmic=len(histories) > 1)
    elif x == "examples":
        panels[0].xaxis.set_major_formatter(EngFormatter())
    band = "10 % to 90 % of the nodes" if many else "lowest to highest node"
    _legend(panels[0], list(histories), band if node_losses else "")
    return style.done(figure, title, path)


def _sent(histories: Mapping[str, History], column: str = "bytes_total") -> list[float]:
    """Return the bytes of the runs that sent any."""
    return [sent for history in histories.values() if (sent := history.last(column))]


def _percentiles(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the 10th and the 90th percentile of each row's finite entries; nan if there are none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a step in which no node has a finite loss
        low, high = np.nanpercentile(np.where(np.isfinite(rows), rows, np.nan), [10, 90], axis=1)
    return low, high


def _last_at_place(at: np.ndarray) -> np.ndarray:
    """Return a mask of the last entry at each place > 0, since a logarithmic axis cannot show 0."""
    return np.append(at[1:] != at[:-1], True) & (at > 0)


def smooth(values: np.ndarray | list[float], window: int) -> np.ndarray:
    """Return the mean of the finite ones of `window` entries around each entry, along dimension 0.

    Near the end the window has fewer entries. Near the start it is symmetric, since losses fall steeply there. The
    result is nan if no entry is finite.

    >>> smooth([1.0, 2.0, 6.0, np.nan, 4.0], window=3)
    array([1., 3., 4., 5., 4.])
    """
    x = np.asarray(values, dtype=np.float64)
    is_finite = np.isfinite(x)
    zero = np.zeros((1, *x.shape[1:]))
    sums = np.concatenate([zero, np.cumsum(np.where(is_finite, x, 0.0), axis=0)])
    counts = np.concatenate([zero, np.cumsum(is_finite, axis=0)])
    index = np.arange(len(x))
    first = np.maximum(index - (window - 1) // 2, 0)
    stop = np.minimum(index + np.minimum(window // 2, index) + 1, len(x))
    count = counts[stop] - counts[first]
    return np.where(count > 0, (sums[stop] - sums[first]) / np.maximum(count, 1), np.nan)


def default_window(history: History) -> int:
    """Return the number of steps to smooth over by default: a fortieth of the run.

    >>> history = History()
    >>> for step in range(200):
    ...     history.append({"step": step, "train_loss": 1.0})
    >>> default_window(history)
    5
    """
    return max(1, len(history) // 40)


def _draw_losses(axes: Axes, name: str, history: History, x: str, look: dict[str, str], window: int | None) -> None:
    """Draw training losses as a light line and validation losses as markers, against the column `x`."""
    axes.plot(
        *_curve(history, "train_loss", x, window or default_window(history)), color=look["color"], alpha=style.LIGHT,
        linewidth=1.8,
    )  # fmt: skip
    validated = "val_loss" in history.columns
    if validated:
        at, losses = _curve(history, "val_loss", x, 1)
        axes.plot(at, losses, **look, markersize=5.5, markeredgecolor="white", markeredgewidth=0.6, linewidth=1.0)  # type: ignore[arg-type]
    if x in AMOUNTS and not history.last(x):  # it has no place on the axis: draw a line across
        last = history.last("val_loss" if validated else "train_loss")
        axes.axhline(last, color=look["color"], linestyle=":")
        axes.annotate(
            f"{name}: sends nothing", (0.02, last), (0, 3), xycoords=("axes fraction", "data"),
            textcoords="offset points", color=look["color"], fontsize=9,
        )  # fmt: skip


def _curve(history: History, column: str, x: str, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a smoothed column against `x`; against bytes, with one point for each amount."""
    at, values = map(np.array, history.series(column, x))
    values = smooth(values, window)
    keep = _last_at_place(at) if x in AMOUNTS else slice(None)
    return at[keep], values[keep]


def _legend(axes: Axes, names: list[str], spread: str = "") -> None:
    """Add a legend of the runs' colours, and of lines and markers."""
    keep = style.every_few(len(names))
    looks = style.line_styles(names)
    handles: list[Artist] = [Line2D([], [], **looks[i], linewidth=2, label=names[i]) for i in keep]
    if len(keep) < len(names):
        handles.append(Line2D([], [], linestyle="", label=f"... of {len(names)} runs"))
    handles.append(Line2D([], [], color="0.3", marker="o", linewidth=1, label="validation, averaged model"))
    handles.append(Line2D([], [], color="0.3", alpha=style.LIGHT, linewidth=2, label="training (smoothed)"))
    if spread:
        handles.append(Patch(color="0.3", alpha=0.15, linewidth=0, label=f"training, {spread}"))
    if len(names) > style.MAX_RUNS_INSIDE:
        axes.figure.legend(handles=handles, frameon=False, loc="outside lower center", ncols=4)
    else:
        axes.legend(handles=handles, frameon=False)


def _check(histories: Mapping[str, History], path: Any, title: Any, window: Any) -> None:
    style.check_shared(path, title)
    check.optional_integer("window", window, what="steps to average over")
    check.instance("histories", histories, Mapping, 'a dict: {"name": trainer.history, ...}')
    if not histories:
        raise ValueError('there is no history to plot: give histories={"name": trainer.history, ...}.')
    for name, history in histories.items():
        check.instance(f"histories[{name!r}]", history, History, "a History such as trainer.history")
        if not any(row.get("train_loss") is not None for row in history):
            raise ValueError(f"histories[{name!r}] has no step to plot: train at least one.")


class LiveFigure(Logger):
    """The loss of a run in progress against steps and against bytes, drawn anew below the cell of a notebook.

    Drawing stops the run meanwhile. So it takes at most a twentieth of the time, beside the first figure, after a
    second, and the last, at the end.

    Raises:
        ValueError: at construction, outside of a notebook.

    >>> LiveFigure()
    Traceback (most recent call last):
    ...
    ValueError: live=True draws in a notebook, and this is none: leave it out. progress=True shows loss and bytes in a \
terminal, and trainer.plot("run.png") draws the run.
    """

    SHARE = 0.05  # of the time may pass with drawing
    LEAST = 1.0  # seconds between two figures

    def __init__(self) -> None:
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        if getattr(shell, "kernel", None) is None:  # a terminal's IPython has none
            raise ValueError(
                "live=True draws in a notebook, and this is none: leave it out. progress=True shows loss and bytes in "
                'a terminal, and trainer.plot("run.png") draws the run.'
            )

    def start(self, settings: dict[str, Any]) -> None:
        self.resume(settings, [])

    def resume(self, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        self._history, self._place = History(settings, rows), None
        self._due = time.perf_counter() + self.LEAST

    def log(self, row: dict[str, Any]) -> None:
        self._history.append(row)
        if time.perf_counter() >= self._due:
            self._draw()

    def finish(self) -> None:
        self._draw()

    def _draw(self) -> None:
        from IPython.display import display

        if self._history.last("train_loss") is None:
            return
        begin = time.perf_counter()
        step, sent = self._history.last("step"), readable_bytes(self._history.last("bytes_total") or 0.0)
        title = f"step {step} of {self._history.settings['max_steps']}, {sent} sent per node"
        figure = plot_comparison({"run": self._history}, title=title)
        if self._place is None:
            self._place = display(figure, display_id=True)
        else:
            self._place.update(figure)
        end = time.perf_counter()
        self._due = end + max(self.LEAST, (end - begin) * (1 / self.SHARE - 1))
