"""Figures of schedules of exchanges, and of who holds which examples."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator
from matplotlib.transforms import Transform
from torch import Tensor

from vecgym.core import check
from vecgym.data.partition import Partition
from vecgym.plot.style import (
    COLOURS,
    LIGHT,
    MAX_LEGEND,
    NotebookFigure,
    check_shared,
    done,
    finish,
    legend_beside,
    vector,
)
from vecgym.records.optimized import OptimizedSchedule


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
    check_shared(path=path, title=title)
    slope = vector("gradient", gradient)
    figure = NotebookFigure(figsize=(9, 3.8), dpi=120, layout="constrained")
    axes = figure.subplots()
    steps = np.arange(1, len(slope) + 1)
    helps = slope < 0
    for there, colour, label in ((helps, COLOURS[0], "more lowers the loss"), (~helps, COLOURS[1], "more raises it")):
        if there.any():
            axes.bar(steps[there], slope[there], width=0.85, color=colour, label=label)
    axes.axhline(0, color="0.3", linewidth=0.8)
    if schedule is not None:
        weights = vector("schedule", schedule)
        if len(weights) != len(slope):
            raise ValueError(f"gradient has {len(slope)} steps and schedule {len(weights)}: give those of one run.")
        _draw_exchanges(axes, weights, 0.03, "0.2", "exchanges of the run", axes.get_xaxis_transform())
    finish(axes, title or "where an exchange matters", "optimizer steps", "d final loss / d weight of the exchange")
    figure.legend(frameon=False, loc="outside lower center", ncols=3)  # bars leave no room among them
    return done(figure, None, path)


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
    check_shared(path=path, title=title)
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
    finish(right, "final loss at equal bytes", "accepted steps of the descent", "loss")
    right.legend(frameon=False)
    return done(figure, title or f"{EngFormatter(unit='B')(found.total_bytes)} sent per node", path)


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
    check_shared(path=path, title=title)
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
    finish(axes, "", "node", "examples")
    if len(labels) > 1:
        handles, names = axes.get_legend_handles_labels()
        of = "class" if len(labels) <= MAX_LEGEND else f"{len(labels)} classes"
        legend_beside(axes, handles[::-1], names[::-1], of)
    return done(figure, title or repr(partition)[len("Partition(") : -1], path)


def _draw_times(axes: Axes, found: OptimizedSchedule) -> None:
    weights = vector("weights", found.weights)
    axes.bar(
        np.arange(1, len(weights) + 1), weights, width=0.85, color=COLOURS[2], alpha=LIGHT, label="relaxed weights"
    )
    _draw_exchanges(axes, vector("schedule", found.schedule), -0.06, COLOURS[0], "optimized, rounded")
    _draw_exchanges(axes, vector("uniform", found.uniform), -0.14, COLOURS[1], "every H")
    axes.set_ylim(-0.2, 1.05)
    finish(axes, "when to exchange", "optimizer steps", "weight of the exchange")
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
    finish(axes, f"{name}, mean of {len(values)}" if several else name, "from node", "to node")
    axes.grid(False)
    axes.figure.colorbar(image, ax=axes, shrink=0.7)
