"""Figures of schedules of exchanges, and of partitions of a dataset."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from vecgym.core import check
from vecgym.data.partition import Partition
from vecgym.plot import style

MAX_COUNTS = 30  # of bars with a number above them


def plot_sensitivity(
    gradient: Tensor | np.ndarray | Sequence[float],
    schedule: Tensor | np.ndarray | Sequence[float] | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    title: str | None = None,
) -> Figure:
    """Draw the sensitivity of the final loss to each step's exchange, d loss / d a_t of a rollout, as bars.

    At a bar below 0, exchanging more lowers the loss.

    Args:
        gradient: the gradient of the loss with respect to `sync_weight`, `[T]`.
        schedule: `sync_weight` itself, `[T]`; steps that exchange (a_t > 0) are marked below the bars.
        path, title: as for `plot_comparison`.

    Raises:
        ValueError: for shapes other than `[T]`, or different lengths.

    >>> plot_sensitivity([-0.5, 0.1, -0.2], schedule=[0, 0, 1]).axes[0].get_ylabel()
    'd final loss / d weight of the exchange'
    """
    style.check_shared(path, title)
    slope = style.vector("gradient", gradient)
    figure, (axes,) = style.new_figure(9, 3.8)
    steps = np.arange(1, len(slope) + 1)
    helps = slope < 0
    for mask, colour, label in zip((helps, ~helps), style.COLOURS, ("more lowers the loss", "more raises it")):
        if mask.any():
            axes.bar(steps[mask], slope[mask], width=0.85, color=colour, label=label)
    axes.axhline(0, color="0.3", linewidth=0.8)
    if schedule is not None:
        weights = style.vector("schedule", schedule)
        if len(weights) != len(slope):
            raise ValueError(f"gradient has {len(slope)} steps and schedule {len(weights)}: give both of the same run.")
        _draw_exchanges(axes, weights, "exchanges of the run")
    title = title or "where an exchange matters"
    style.finish(axes, title, "optimizer steps", "d final loss / d weight of the exchange")
    figure.legend(frameon=False, loc="outside lower center", ncols=3)  # bars leave no room inside
    return style.done(figure, None, path)


def plot_influence(
    values: Tensor | np.ndarray,
    steps: Sequence[int] | None = None,
    errors: Tensor | np.ndarray | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    title: str | None = None,
) -> Figure:
    """Draw how much higher the final loss is without each exchange, node or message, as `vecgym.influence` finds it.

    Args:
        values: `[R]` of exchanges or `[K]` of nodes, as bars; `[R, K]` of messages, as a heat map.
        steps: the optimizer step of each exchange; None: the values are of nodes.
        errors: the standard errors of bars.
        path, title: as for `plot_comparison`.

    >>> plot_influence(np.array([0.5, -0.1]), steps=[4, 8]).axes[0].get_xlabel()
    'optimizer step of the exchange'
    """
    style.check_shared(path, title)
    array, where = np.asarray(values, dtype=float), "optimizer step of the exchange" if steps is not None else "node"
    label = "final loss without it, less that with all"
    figure, (axes,) = style.new_figure(9, 3.8)
    if array.ndim == 2:
        largest = float(np.nanmax(np.abs(array))) or 1.0
        image = axes.imshow(array.T, cmap="RdBu_r", vmin=-largest, vmax=largest, origin="lower", aspect="auto")
        figure.colorbar(image, label=label)
        shown = style.every_few(len(array))
        axes.set_xticks(shown, [str((steps or range(len(array)))[i]) for i in shown])
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel=where, ylabel="node", title="worth of each message")
        return style.done(figure, title, path)
    heights = style.vector("values", array)
    at = np.arange(len(heights)) if steps is None else np.asarray(steps)
    width = 0.8 * float(np.diff(at).min()) if len(at) > 1 else 0.8
    spread = None if errors is None or not np.isfinite(np.asarray(errors)).all() else np.asarray(errors, dtype=float)
    axes.bar(at, heights, width=width, yerr=spread, color=style.COLOURS[0], capsize=2)
    axes.axhline(0, color="0.3", linewidth=0.8)
    style.finish(axes, f"worth of each {'exchange' if steps is not None else 'node'}", where, label)
    return style.done(figure, title, path)


def plot_numbers(
    curves: Mapping[str, Tensor | np.ndarray | Sequence[float]],
    start: Mapping[str, Tensor | np.ndarray | Sequence[float]] | None = None,
    exchanges: Mapping[str, Tensor | np.ndarray | Sequence[float]] | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    matrices: Mapping[str, Tensor | np.ndarray] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw numbers of a strategy over a run, a panel for each, and its exchanges as ticks below the curves.

    Args:
        curves: name -> a number for each step, `[T]`.
        start: name -> another curve to compare with, dashed, such as the numbers before they were learned.
        exchanges: name -> weights of the exchanges after each step, `[T]`: a panel for each, of their distances.
        matrices: name -> a mixing matrix, `[K, K]`, or one for each step, `[T, K, K]`, of which the mean is drawn.
        path, title: as for `plot_comparison`.

    Raises:
        ValueError: for shapes other than these, or nothing to draw.

    >>> figure = plot_numbers({"lr": [0.1, 0.2, 0.1, 0.05]}, exchanges={"when": [0, 1, 0, 1]})
    >>> [axes.get_title() for axes in figure.axes]
    ['lr', 'when: 2 exchanges']
    """
    style.check_shared(path, title)
    for name, given in (("curves", curves), ("start", start), ("exchanges", exchanges), ("matrices", matrices)):
        if given is not None or name == "curves":
            check.instance(name, given, Mapping, "numbers by name, {'lr': [0.1, 0.05]}")
    others, times, mixing = start or {}, exchanges or {}, matrices or {}
    if not curves and not times and not mixing:
        raise ValueError("curves, exchanges and matrices are empty: give a number for each step, {'lr': [0.1, 0.05]}.")
    columns = len(curves) + len(times) + len(mixing)
    figure, panels = style.new_figure(3.4 * columns, 3.2, columns=columns)
    for axes, (name, values) in zip(panels, curves.items()):
        for label, each, look in (("learned", values, "-"), ("start", others.get(name), "--")):
            if each is not None:
                y = style.vector(name, each)
                axes.plot(np.arange(1, len(y) + 1), y, look, color=style.COLOURS[look == "--"], label=label)
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        style.finish(axes, name, "optimizer steps", "")
    for axes, (name, values) in zip(panels[len(curves) :], times.items()):
        weights = style.vector(name, values)
        at = np.flatnonzero(weights > 0) + 1
        axes.plot(at, np.diff(at, prepend=0), color=style.COLOURS[0], marker="o", markersize=4)
        _draw_exchanges(axes, weights, "exchanges")
        axes.set_xlim(0, len(weights) + 1)
        axes.set_ylim(bottom=0)
        style.finish(axes, f"{name}: {len(at)} exchanges", "optimizer steps", "steps since the last one")
    for axes, (name, values) in zip(panels[len(curves) + len(times) :], mixing.items()):
        _draw_matrix(axes, name, values)
    if others and curves:
        panels[0].legend(frameon=False)
    return style.done(figure, title, path)


def plot_partition(
    partition: Partition, path: str | os.PathLike[str] | None = None, *, title: str | None = None
) -> Figure:
    """Draw the number of examples of each class on each node: a stacked bar per node, a colour per class.

    Above the bars of up to 30 nodes stands how many examples each has.

    Args:
        partition: with labels, as from `vecgym.data.partition_dirichlet`; without labels, all bars have one colour.
        path, title: as for `plot_comparison`. The default title describes the partition.

    >>> from vecgym.data import partition_shards
    >>> partition = partition_shards([0] * 6 + [1] * 6, num_nodes=4, shards_per_node=1)
    >>> heights = [int(bar.get_height()) for bar in plot_partition(partition).axes[0].patches]
    >>> sorted(heights)  # each node has one of the two classes
    [0, 0, 0, 0, 3, 3, 3, 3]
    """
    style.check_shared(path, title)
    check.instance("partition", partition, Partition, "a Partition such as partition_iid(labels, 8)")
    nodes, counts = range(partition.num_nodes), np.array(partition.sizes)[:, None]
    labels: Sequence[int | str] = ["examples"]
    if partition.labels is not None:
        counts, labels = partition.counts.numpy(), partition.classes
    figure, (axes,) = style.new_figure(9, 3.8)
    colours = style.colours_of(labels, categories=True)
    width = 0.85 if len(counts) <= 50 else 1.0  # no gaps where bars are thin
    for c, (label, top) in enumerate(zip(labels, counts.cumsum(1).T)):
        axes.bar(nodes, counts[:, c], bottom=top - counts[:, c], width=width, color=colours[c], label=str(label))
    if len(counts) <= MAX_COUNTS:
        for node, size in zip(nodes, partition.sizes):
            axes.annotate(str(size), (node, size), (0, 2), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xlim(-0.6, len(counts) - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    style.finish(axes, "", "node", "examples")
    if len(labels) > 1:
        handles, names = axes.get_legend_handles_labels()
        of = "class" if len(labels) <= style.MAX_LEGEND else f"{len(labels)} classes"
        style.legend_beside(axes, handles[::-1], names[::-1], of)
    return style.done(figure, title or repr(partition)[len("Partition(") : -1], path)


def _draw_exchanges(axes: Axes, weights: np.ndarray, label: str) -> None:
    """Draw a tick for each step that exchanges, at the lower edge."""
    at, edge = np.flatnonzero(weights > 0) + 1, axes.get_xaxis_transform()
    axes.plot(at, np.full(len(at), 0.03), "|", ms=9, mew=1.8, color="0.2", label=label, transform=edge)


def _draw_matrix(axes: Axes, name: str, matrices: Any) -> None:
    """Draw one matrix, or the mean of several."""
    values = check.real(name, matrices, "a mixing matrix, [K, K] or [T, K, K]")
    if values.ndim not in (2, 3) or 0 in values.shape:
        raise ValueError(f"{name} has shape {list(values.shape)}; give a mixing matrix, [K, K] or [T, K, K].")
    several = values.ndim == 3
    image = axes.imshow(values.mean(0) if several else values, vmin=0, vmax=1, cmap="viridis")
    style.finish(axes, f"{name}, mean of {len(values)}" if several else name, "from node", "to node")
    axes.grid(False)
    axes.figure.colorbar(image, ax=axes, shrink=0.7)
