"""Figures from recorded histories. Matplotlib's object interface only: no global state, no display needed."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator
from matplotlib.transforms import Transform
from torch import Tensor

from vecgym.metrics import History
from vecgym.optimize import OptimizedSchedule

# Okabe and Ito's colours, which people with any kind of colour vision tell apart, in the order of their contrast.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
LIGHT = 0.35  # opacity of training losses: validation losses are what counts


class NotebookFigure(Figure):
    """A matplotlib `Figure` that notebooks show even if pyplot was never imported."""

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
    ...     run.append({"step": step, "train_loss": 1 / step, "total_bytes": 100.0 * step})
    >>> figure = plot_comparison({"allreduce": run})
    >>> [axes.get_xlabel() for axes in figure.axes]
    ['optimizer steps', 'bytes sent per node']
    """
    _check(histories)
    figure = NotebookFigure(figsize=(11, 4.6), dpi=120, layout="constrained")
    by_step, by_bytes = figure.subplots(1, 2, sharey=True)
    for i, (name, history) in enumerate(histories.items()):
        style = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
        _draw_losses(by_step, history, "step", style, window)
        _draw_losses(by_bytes, history, "total_bytes", style, window)
        if not history.last("total_bytes"):
            _draw_silent(by_bytes, name, history, style["color"])
    _finish(by_step, "loss against steps", "optimizer steps", loss_label)
    _finish(by_bytes, "loss against communication", "bytes sent per node", "")
    if any(history.last("total_bytes") for history in histories.values()):
        by_bytes.set_xscale("log")
        by_bytes.xaxis.set_major_formatter(EngFormatter(unit="B"))
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
    _finish(axes, title or "", "optimizer steps", loss_label)
    axes.legend(frameon=False)
    return _done(figure, None, path)


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
    axes.legend(frameon=False)
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
    """
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
    """Steps to smooth over when nothing is given: a fortieth of the run."""
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
    if x != "total_bytes":
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
    found = values.detach().double().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values, np.float64)
    if found.ndim != 1 or len(found) == 0:
        raise ValueError(f"{name} has shape {list(found.shape)}; one number for each step, [T], is needed.")
    return found


def _legend(axes: Axes, names: list[str]) -> None:
    """The runs by colour, and what line and marker mean."""
    handles = [
        Line2D([], [], color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)], linewidth=2, label=name)
        for i, name in enumerate(names)
    ]
    handles.append(Line2D([], [], color="0.3", marker="o", linewidth=1, label="validation, averaged model"))
    handles.append(Line2D([], [], color="0.3", alpha=LIGHT, linewidth=2, label="training (smoothed)"))
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


def _check(histories: Mapping[str, History]) -> None:
    if not histories:
        raise ValueError('there is no history to plot; give {"name": trainer.history, ...}.')
    for name, history in histories.items():
        if not isinstance(history, History):
            raise TypeError(f"{name!r} is a {type(history).__name__}; give a History such as trainer.history.")
        if not any(row.get("train_loss") is not None for row in history):
            raise ValueError(f"the history of {name!r} has no step to plot.")
