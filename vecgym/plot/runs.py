"""Figures of recorded histories."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter

from vecgym.collectives.ledger import readable_bytes
from vecgym.core import check
from vecgym.core.check import Options, function_of
from vecgym.logger import Logger
from vecgym.plot import style
from vecgym.plot.style import Curves
from vecgym.records.columns import X_AXES, column_label, is_per_node
from vecgym.records.history import History

AMOUNTS = ("bytes_total", "bytes_payload_total")  # columns of bytes, which are constant between exchanges
DISTANCES = ("consensus_distance_before", "consensus_distance")  # of which one is drawn unless all are zero
LEGENDS = ("inside", "outside")
LINES = "lines"  # the kinds of lines of losses, in a legend
MANY_NODES = 16  # with so many nodes or more, their band is between percentiles
PERCENTILES = "10 % to 90 % of the nodes"


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
    was sent, and shows a run that never sends anything as a horizontal line at its last loss. Of several runs
    the vertical axis fits what follows the first fifth, in which all losses fall, so that it shows where they differ.

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
    for axes, x in ((by_step, "step"), (by_bytes, "bytes_total")):
        curves: Curves = []
        for (name, history), look in zip(histories.items(), style.line_styles(list(histories))):
            curves += _draw_losses(axes, name, history, x, look, window)
        style.finish(axes, f"loss against {column_label(x)}", column_label(x), loss_label if x == "step" else "")
        if x == "bytes_total":
            style.scale_bytes(axes, _ends(histories, x))
        if len(histories) > 1:
            style.begin_where_curves_differ(axes, curves)
    _legend(by_step, list(histories), [LINES])
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
    label = "training, mean of the nodes (smoothed)"
    axes.plot(*_curve(history, "train_loss", "step", window), color=colour, label=label)
    if "train_losses" in history.columns:
        steps, losses = _curve(history, "train_losses", "step", window)  # [steps, K]
        label = f"training, lowest to highest of {losses.shape[1]} nodes"
        style.draw_band(axes, steps, *style.span(losses), colour=colour, alpha=0.2, label=label)
    if "val_loss" in history.columns:
        label = "validation, averaged model"
        axes.plot(*history.series("val_loss"), color=other, marker="o", markersize=5, label=label)
    if "val_losses" in history.columns:
        steps, losses = _curve(history, "val_losses", "step", 1)
        label = "validation, best to worst node"
        axes.vlines(steps, *style.span(losses), color=other, alpha=0.5, linewidth=4, label=label)
    style.finish(axes, title or "", column_label("step"), loss_label)
    axes.legend(frameon=False)
    return style.done(figure, None, path)


def _if_given(checked: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: None if value is None else checked(name, value)


@dataclass(frozen=True)
class RunsFigure(Options):
    """The figure of `plot_runs`.

    Args:
        histories: {name: history}, in the order of the legend.
        path, title, loss_label, window: as for `plot_comparison`.
        x: "step", "examples", "bytes" (sent per node) or "payload" (as papers report), "seconds" (on this machine) or
            "sim_seconds" (on the run's network).
        panels: what to draw, side by side: "loss", or columns of the histories, such as ["loss", "val_accuracy"]. Of a
            column with a number for each node it draws the median, and a band from the 10th to the 90th percentile.
            None: the loss and, unless they are all zero, the distances between the nodes before they exchange.
        log_x: whether the horizontal axis is logarithmic; None: bytes of several runs are, and simulated seconds if
            the runs differ in them by more than ten times.
        xlim: (first, last) of the horizontal axis, as it is labelled: optimizer steps, bytes, seconds ...
        legend: "inside" the first panel, or "outside", below all of them; None: inside if it has up to five lines and
            hides no curve.
    """

    histories: Mapping[str, History]
    path: str | os.PathLike[str] | None = None
    _: KW_ONLY
    x: Annotated[str, partial(check.choice, allowed=X_AXES)] = "step"
    title: str | None = None
    loss_label: str = "loss"
    window: int | None = None
    panels: Sequence[str] | None = None
    log_x: Annotated[bool | None, _if_given(check.flag)] = None
    xlim: Annotated[tuple[float, float] | None, _if_given(style.checked_limits)] = None
    legend: Annotated[str | None, _if_given(partial(check.choice, allowed=LEGENDS, otherwise="None"))] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.histories, self.path, self.title, self.window)
        if all(history.last(self.column) is None for history in self.histories.values()):
            raise ValueError(f"x={self.x!r} was not recorded: give another x, or for seconds fit(network=, compute=).")
        columns = dict.fromkeys(["loss", *(name for history in self.histories.values() for name in history.columns)])
        panels = self._panels() if self.panels is None else self.panels
        if isinstance(panels, str) or not isinstance(panels, Sequence) or not panels:
            raise TypeError(f'panels={panels!r} must be a list of names, such as ["loss", "val_loss"].')
        self.settle(panels=[check.choice("panels", name, columns) for name in panels])
        if self.log_x is None:
            ends, amount = _ends(self.histories, self.column), self.column in AMOUNTS
            far_apart = self.x == "sim_seconds" and bool(ends) and max(ends) > 10 * min(ends)
            self.settle(log_x=far_apart or (amount and len(self.histories) > 1))
        if self.xlim is not None:
            self._check_limits(*self.xlim)

    def _check_limits(self, first: float, last: float) -> None:
        """Raise a ValueError for an axis that shows nothing, or that begins where it cannot."""
        end = max(_ends(self.histories, self.column), default=0.0)
        if first > end:
            raise ValueError(f"xlim=({first:g}, {last:g}) is beyond the runs, which end at {end:g}: begin before that.")
        if self.log_x and first <= 0:
            raise ValueError(f"xlim=({first:g}, {last:g}) begins at {first:g} on a logarithmic axis: begin above 0.")

    @property
    def column(self) -> str:
        """The column of the horizontal axis."""
        return X_AXES[self.x]

    def _panels(self) -> list[str]:
        """Return the loss, and the first of the distances with anything to show."""
        histories = self.histories.values()
        return ["loss", *[name for name in DISTANCES if any(any(h.series(name)[1]) for h in histories)][:1]]


@function_of(RunsFigure)
def plot_runs(options: RunsFigure) -> Figure:
    """Draw runs: the losses with their spread over the nodes, and other columns, against one of six axes.

    A light line is the training loss, the mean over the nodes, smoothed over `window` steps. Its band ranges from the
    lowest to the highest node or, if a run has 16 nodes or more, from the 10th to the 90th percentile. Markers are the
    validation loss of the averaged model. Beside it are the nodes' distances: the root mean square distance of their
    parameters to the average, at the evaluations. Of several runs the vertical axis fits what follows the first
    fifth, in which all losses fall, so that it shows where they differ.

    Args:
        {arguments}

    Raises:
        ValueError: if there are no histories, or one has no step, or for an unknown x, panel or legend.
        TypeError: for anything but `History` objects.

    >>> run = History()
    >>> for step in range(1, 9):
    ...     run.append({"step": step, "train_loss": 1 / step, "seconds": 0.1 * step, "consensus_distance": 0.5})
    >>> [axes.get_title() for axes in plot_runs({"diloco": run}, x="seconds", xlim=(0.2, 0.8)).axes]
    ['loss against seconds on this machine', 'consensus distance']
    >>> plot_runs({"diloco": run}, panels=["train_loss"], log_x=True, legend="outside").axes[0].get_xscale()
    'log'
    """
    histories, panels = options.histories, options.panels or []
    figure, all_axes = style.new_figure(max(7, 5.5 * len(panels)), 4.6, columns=len(panels), sharex=True)
    label, curves = column_label(options.column), {panel: Curves() for panel in panels}
    for axes, panel in zip(all_axes, panels):
        for (name, history), look in zip(histories.items(), style.line_styles(list(histories))):
            curves[panel] += _draw(axes, panel, name, history, look, options)
        away = "RMS distance of a node to the average" if panel in DISTANCES else ""
        title = f"loss against {label}" if panel == "loss" else column_label(panel)
        style.finish(axes, title, label, options.loss_label if panel == "loss" else away)
        if panel in DISTANCES:
            axes.set_ylim(bottom=0)
    if options.column in AMOUNTS:
        style.scale_bytes(all_axes[0], _ends(histories, options.column), logarithmic=bool(options.log_x))
    elif options.log_x:
        all_axes[0].set_xscale("log", nonpositive="mask")
    if options.x == "examples":
        all_axes[0].xaxis.set_major_formatter(EngFormatter())
    for axes, panel in zip(all_axes, panels):
        if options.xlim or (panel not in DISTANCES and len(histories) > 1):
            style.begin_where_curves_differ(axes, curves[panel], options.xlim)
    kinds = [LINES] if "loss" in panels else []
    if kinds and (num_nodes := _num_nodes(histories)):
        kinds.append(f"training, {PERCENTILES if num_nodes >= MANY_NODES else 'lowest to highest node'}")
    kinds += [PERCENTILES] * any(map(is_per_node, panels))
    _legend(all_axes[0], list(histories), kinds, options.legend)
    return style.done(figure, options.title, options.path)


def _draw(axes: Axes, panel: str, name: str, history: History, look: dict[str, Any], options: RunsFigure) -> Curves:
    """Draw one run in a panel; return the curves to which the axes are fitted."""
    x, window = options.column, options.window or default_window(history)
    if panel == "loss":
        if history.series("train_losses")[1]:
            at, losses = _curve(history, "train_losses", x, window)
            low, high = _percentiles(losses)[::2] if _num_nodes(options.histories) >= MANY_NODES else style.span(losses)
            style.draw_band(axes, at, low, high, look["color"])
        return _draw_losses(axes, name, history, x, look, window)
    if panel not in history.columns or not history.series(panel, x)[1]:
        return []
    at, values = _curve(history, panel, x, 1)
    curves = [(at, values)]
    if values.ndim > 1:
        low, middle, high = _percentiles(values)
        style.draw_band(axes, at, low, high, look["color"])
        curves = [(at, middle), (at, low), (at, high)]
    axes.plot(*curves[0], **look, markersize=5.5, markevery=default_window(history), label=name)
    if panel in AMOUNTS:
        axes.yaxis.set_major_formatter(EngFormatter(unit="B"))
    return curves


def _num_nodes(histories: Mapping[str, History]) -> int:
    """Return the most nodes of which a run has the training losses; 0: there are none."""
    arrays = [history.node_array() for history in histories.values() if "train_losses" in history.columns]
    return max((losses.shape[1] for losses in arrays), default=0)


def _ends(histories: Mapping[str, History], column: str) -> list[float]:
    """Return the last entry of each run, such as the bytes that it sent, where there is one above zero."""
    return [end for history in histories.values() if (end := history.last(column))]


def _percentiles(rows: np.ndarray) -> np.ndarray:
    """Return the 10th, 50th and 90th percentile of each row's finite entries, `[3, T]`; nan if there are none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a step in which no node has a finite loss
        return np.nanpercentile(np.where(np.isfinite(rows), rows, np.nan), [10, 50, 90], axis=1)


def smooth(values: np.ndarray | list[float], window: int) -> np.ndarray:
    """Return the mean of the finite ones of `window` entries around each entry, along dimension 0.

    Near the end the window has fewer entries. Near the start it is symmetric, since losses fall steeply there. The
    result is nan if no entry is finite.

    >>> smooth([1.0, 2.0, 6.0, np.nan, 4.0], window=3)
    array([1., 3., 4., 5., 4.])
    """
    window = check.integer("window", window, what="entries around each entry")
    x = check.real("values", values)
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
    return max(1, len(check.instance("history", history, History, "trainer.history")) // 40)


def _draw_losses(axes: Axes, name: str, history: History, x: str, look: dict[str, Any], window: int | None) -> Curves:
    """Draw training losses as a light line and validation losses as markers, against the column `x`."""
    curves = [_curve(history, "train_loss", x, window or default_window(history))]
    axes.plot(*curves[0], color=look["color"], alpha=style.LIGHT, linewidth=1.8)
    validated = "val_loss" in history.columns
    if validated:
        curves.append(_curve(history, "val_loss", x, 1))
        axes.plot(*curves[1], **look, markersize=5.5, markeredgecolor="white", markeredgewidth=0.6, linewidth=1.0)
    if x in AMOUNTS and not history.last(x):  # it has no place on the axis: draw a line across
        last = history.last("val_loss" if validated else "train_loss")
        axes.axhline(last, color=look["color"], linestyle=":")
        axes.annotate(
            f"{name}: sends nothing", (0.02, last), (0, 3), xycoords=("axes fraction", "data"),
            textcoords="offset points", color=look["color"], fontsize=9,
        )  # fmt: skip
    return curves


def _curve(history: History, column: str, x: str, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a smoothed column against `x`; against bytes, the last point of each amount > 0."""
    at, values = map(np.array, history.series(column, x))
    keep = np.append(at[1:] != at[:-1], True) & (at > 0) if x in AMOUNTS else slice(None)
    return at[keep], smooth(values, window)[keep]


def _legend(axes: Axes, names: list[str], kinds: Sequence[str], where: str | None = None) -> None:
    """Add a legend of the runs' colours, and of the kinds of lines and bands."""
    keep = style.every_few(len(names))
    looks = style.line_styles(names)
    handles: list[Artist] = [Line2D([], [], **looks[i], linewidth=2, label=names[i]) for i in keep]
    if len(keep) < len(names):
        handles.append(Line2D([], [], linestyle="", label=f"... of {len(names)} runs"))
    if LINES in kinds:
        handles.append(Line2D([], [], color="0.3", marker="o", linewidth=1, label="validation, averaged model"))
        handles.append(Line2D([], [], color="0.3", alpha=style.LIGHT, linewidth=2, label="training (smoothed)"))
    handles += [Patch(color="0.3", alpha=0.15, linewidth=0, label=kind) for kind in kinds if kind != LINES]
    if where == "inside" or (where is None and len(handles) <= style.MAX_RUNS_INSIDE):
        axes.legend(handles=handles, loc="best", framealpha=0.8, edgecolor="none")
        if where == "inside" or not style.legend_hides_a_curve(axes):
            return
        axes.get_legend().remove()  # type: ignore[union-attr]
    columns = min(4, 2 * len(axes.figure.axes))  # names are long
    axes.figure.legend(handles=handles, frameon=False, loc="outside lower center", ncols=columns)


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
