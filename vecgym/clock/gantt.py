"""A figure of what every node did when, and who waited for whom."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter

from vecgym.clock.trace import Bar, Recorded
from vecgym.clock.units import readable_time
from vecgym.core import check
from vecgym.plot.style import COLOURS, NotebookFigure, check_shared, done, finish

KINDS = {
    "forward": ("forward", COLOURS[5]),
    "backward": ("backward and optimizer", COLOURS[0]),
    "round": ("a round of local steps", COLOURS[0]),
    "wait": ("waits", COLOURS[1]),
    "send": ("link is taken", COLOURS[2]),
}
MAX_NODES = 16
MAX_STEPS = 12  # shown when nothing is said


def plot_timeline(
    timeline: Recorded,
    path: str | os.PathLike[str] | None = None,
    *,
    first: int = 0,
    last: int | None = None,
    axes: Axes | None = None,
    title: str | None = None,
) -> Figure:
    """Draw a row for each node: its computing and waiting, and below the messages on its link.

    A wait shows the node that was waited for.

    Args:
        timeline: from `price`.
        path: where to save the figure as well.
        first, last: the steps from `first` to before `last`; when not given, the first 12.
        axes: draw here, in place of a figure of its own.
        title: above the figure.

    >>> from vecgym.clock import Compute, Network, price
    >>> from vecgym.collectives.ledger import Transfer
    >>> timeline = price([[Transfer("mean", 10**9, 2)]] * 3, Network("8 Gbit/s"), Compute([1.0, 2.0]))
    >>> [label.get_text() for label in plot_timeline(timeline).axes[0].get_yticklabels()]
    ['node 0', 'node 1']
    """
    check_shared(path=path, title=title)
    first = check.integer("first", first, 0, "the first step, counted from 0")
    last = min(timeline.num_steps, first + MAX_STEPS) if last is None else check.integer("last", last)
    if not first < min(last, timeline.num_steps):
        raise ValueError(f"first={first} to before last={last} shows nothing of a run of {timeline.num_steps} steps.")
    if axes is not None:
        check.instance("axes", axes, Axes, "the axes of a figure, or None")
    shown = min(timeline.num_nodes, MAX_NODES)
    figure = None
    if axes is None:
        figure = NotebookFigure(figsize=(9, 1.3 + 0.45 * shown), dpi=120, layout="constrained")
        axes = figure.subplots()
    found = [bar for bar in timeline.bars(first, last) if bar.node < shown]
    for bar in found:
        _draw(axes, bar)
    begin, end = (f(x) for f, x in ((min, [b.begin for b in found]), (max, [b.end for b in found])))
    axes.set_xlim(begin, end)
    axes.set_ylim(shown - 0.5, -0.5)
    more = "" if shown == timeline.num_nodes else f" (of {timeline.num_nodes})"
    axes.set_yticks(range(shown), [f"node {node}{more if node == shown - 1 else ''}" for node in range(shown)])
    for bar in found:
        if bar.kind == "wait" and bar.waits_for is not None and bar.end - bar.begin > 0.03 * (end - begin):
            middle = (bar.begin + bar.end) / 2
            axes.text(middle, bar.node - 0.12, f"node {bar.waits_for}", ha="center", va="center", fontsize=7)
    finish(axes, "", "seconds", "")
    axes.grid(False, axis="y")
    used = {bar.kind for bar in found}
    legend = [Patch(facecolor=colour, label=label) for kind, (label, colour) in KINDS.items() if kind in used]
    axes.legend(handles=legend, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=8)
    return axes.figure if figure is None else done(figure, title, path)  # type: ignore[return-value]


def _draw(axes: Axes, bar: Bar) -> None:
    link = bar.kind == "send"
    axes.broken_barh(
        [(bar.begin, bar.end - bar.begin)],
        (bar.node + 0.2, 0.18) if link else (bar.node - 0.35, 0.5),
        facecolor=KINDS[bar.kind][1],
        edgecolor="white",
        linewidth=0.3,
    )


def plot_networks(
    timelines: Mapping[float, Mapping[float, Recorded]],
    path: str | os.PathLike[str] | None = None,
    *,
    title: str | None = None,
) -> Figure:
    """Draw seconds and utilization over the bandwidth, a curve for each latency.

    Args:
        timelines: {latency in seconds: {bandwidth in bit/s: timeline}}.
        path, title: as for `plot_timeline`.

    >>> from vecgym.clock import Compute, Network, price
    >>> from vecgym.collectives.ledger import Transfer
    >>> steps = [[Transfer("mean", 10**9, 2)]] * 3
    >>> found = {0.0: {b: price(steps, Network(b), Compute(1.0)) for b in (1e8, 1e9)}}
    >>> [axes.get_ylabel() for axes in plot_networks(found).axes]
    ['seconds', 'computing, %']
    """
    check_shared(path=path, title=title)
    figure = NotebookFigure(figsize=(9, 3.8), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    for (latency, row), colour in zip(timelines.items(), itertools.cycle(COLOURS)):
        label = f"latency {readable_time(latency)}"
        left.plot(list(row), [float(t.seconds) for t in row.values()], "o-", color=colour, label=label)
        right.plot(list(row), [100 * float(t.utilization) for t in row.values()], "o-", color=colour, label=label)
    left.set_yscale("log")
    for axes, name in ((left, "seconds"), (right, "computing, %")):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(EngFormatter("bit/s"))
        finish(axes, "", "bandwidth of a node's link", name)
    right.set_ylim(0, 103)
    left.legend(frameon=False, fontsize=9)
    return done(figure, title, path)
