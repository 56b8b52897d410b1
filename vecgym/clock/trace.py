"""The timeline of every node as bars: traces for Perfetto and chrome://tracing, and figures.

matplotlib is slow to import, so only the functions that draw import it.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from vecgym.clock.compute import Compute
from vecgym.clock.messages import NEVER, MessagePlan, Messages
from vecgym.clock.units import readable_time
from vecgym.collectives.ledger import readable_bytes
from vecgym.core import check, files

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAST = 1e-12  # relative to the elapsed time: shorter waits are rounding errors
KINDS = {  # (label in a legend, index of the colour)
    "forward": ("forward", 5),
    "backward": ("backward and optimizer", 0),
    "round": ("a round of local steps", 0),
    "wait": ("waiting", 1),
    "send": ("link is busy", 2),
}
MAX_NODES = 16
MAX_STEPS = 12  # that a figure shows by default


class Delivery(NamedTuple):
    """The messages of a plan and their times in one step, for figures and traces.

    Attributes:
        plan: the messages.
        ready: when each node was ready for each message, `[K, M]`.
        up, down: until when the links were busy beforehand, `[K + 1]`.
        arrival: when each message arrived, `[K, M]`.
    """

    plan: MessagePlan
    ready: Tensor
    up: Tensor
    down: Tensor
    arrival: Tensor


class StepRecord(NamedTuple):
    """The activities of the nodes in one step, `[K]` seconds each.

    Attributes:
        step: counted from 0.
        begin: when they could have begun, had all messages arrived.
        forward: when the forward pass ended.
        end: when the backward pass ended.
        seconds: how long they computed.
        needs: what the forward pass waited for.
        deliveries: what was sent.
    """

    step: int
    begin: Tensor
    forward: Tensor
    end: Tensor
    seconds: Tensor
    needs: tuple[Need, ...]
    deliveries: tuple[Delivery, ...]


class Need(NamedTuple):
    """The message for which a forward pass waits, the last that it needs.

    Attributes:
        arrival: when the message arrives, `[K]`.
        rest: the fraction of the forward pass that needs it.
        step, plan, place: the step that sent it, the index of the plan in that step, and of the message in that plan.
    """

    arrival: Tensor
    rest: float
    step: int
    plan: int
    place: int


class Bar(NamedTuple):
    """An activity of a node, from one time to another.

    Attributes:
        node: its id.
        kind: "forward", "backward", "wait" or "send"; in asynchronous runs also "round", several steps.
        step: counted from 0.
        begin, end: seconds.
        name: a description: for a wait, what the node waited for; for a message, what it carries.
        waits_for: for a wait, the node that was last to be ready; None: the node's own link.
    """

    node: int
    kind: str
    step: int
    begin: float
    end: float
    name: str
    waits_for: int | None = None


@dataclass(frozen=True)
class PerNode:
    """The time that each node spent on each activity, in seconds, `[K]`.

    >>> from vecgym.clock import Compute, Network, price
    >>> from vecgym.collectives.ledger import Transfer
    >>> timeline = price([[Transfer("mean", payload_bytes=10**9, num_nodes=2)]], Network(8e9), Compute([1.0, 3.0]))
    >>> timeline.per_node.waited, timeline.per_node.sent
    (tensor([3., 1.], dtype=torch.float64), tensor([1., 1.], dtype=torch.float64))

    Attributes:
        computed: in forward and backward passes and optimizer steps.
        waited: for other nodes, or for its own link.
        sent, received: during which its link was busy, up and down, mostly while it computed. A collective occupies
            both directions.
    """

    computed: Tensor
    waited: Tensor
    sent: Tensor
    received: Tensor


def bars(records: Sequence[StepRecord], first: int = 0) -> list[Bar]:
    """Return what every node did in the steps from `first` on. Earlier records only tell what nodes waited for.

    A wait is drawn before the forward pass, where nearly all of it is; a message while it occupies its node's link.

    >>> from vecgym.clock import Compute, Network, price
    >>> from vecgym.collectives.ledger import Transfer
    >>> step = [Transfer("mean", payload_bytes=10**9, num_nodes=2)]
    >>> for bar in bars(price([step] * 2, Network("8 Gbit/s"), Compute([1.0, 3.0])).records(), first=1)[:3]:
    ...     print(bar.node, bar.kind, round(bar.begin, 2), round(bar.end, 2), bar.name)
    0 wait 1.0 4.0 waits for node 1
    0 forward 4.0 4.33 forward 1
    0 backward 4.33 5.0 backward 1
    """
    by_step = {record.step: record for record in records}
    bars: list[Bar] = []
    for record in records:
        if record.step >= first:
            bars += _computing(record, by_step)
            for delivery in record.deliveries:
                bars += _sending(record.step, delivery)
    return bars


def save_trace(timeline: TimelineBase, path: str | os.PathLike[str], first: int = 0, last: int | None = None) -> None:
    """Write a trace of the steps from `first` to before `last`, for https://ui.perfetto.dev and chrome://tracing.

    Each node is a process with two threads: its computation and its link.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from vecgym.clock import Compute, Network, price
    >>> from vecgym.collectives.ledger import Transfer
    >>> timeline = price([[Transfer("mean", payload_bytes=10**9, num_nodes=2)]] * 3, Network(8e9), Compute(1.0))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     timeline.save_trace(Path(folder, "run.json"))
    ...     Path(folder, "run.json").read_text()[:16]
    '{"traceEvents": '
    """
    events: list[dict[str, object]] = []
    for node in range(timeline.num_nodes):
        threads = (("process_name", 0, f"node {node}"), ("thread_name", 0, "compute"), ("thread_name", 1, "link"))
        for what, thread, name in threads:
            events.append({"ph": "M", "pid": node, "tid": thread, "name": what, "args": {"name": name}})
    for bar in timeline.bars(first, last):
        args: dict[str, object] = {"step": bar.step}
        if bar.kind == "wait":
            args["waits_for"] = "its link" if bar.waits_for is None else f"node {bar.waits_for}"
        events.append(
            {
                "ph": "X", "pid": bar.node, "tid": int(bar.kind == "send"), "name": bar.name, "cat": bar.kind,
                "ts": bar.begin * 1e6, "dur": (bar.end - bar.begin) * 1e6, "args": args,
            }
        )  # fmt: skip
    with files.write_atomically(check.path("path", path), "w") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


def _computing(record: StepRecord, by_step: dict[int, StepRecord]) -> Iterator[Bar]:
    for node in range(len(record.end)):
        begin, forward, end = (float(x[node]) for x in (record.begin, record.forward, record.end))
        start = max(begin, forward - float(record.seconds[node]) / 3)
        if start - begin > LEAST * end:
            other = _blocked_by(node, record, by_step)
            name = "waits for its link" if other is None else f"waits for node {other}"
            yield Bar(node, "wait", record.step, begin, start, name, other)
        yield Bar(node, "forward", record.step, start, forward, f"forward {record.step}")
        yield Bar(node, "backward", record.step, forward, end, f"backward {record.step}")


def _blocked_by(node: int, record: StepRecord, by_step: dict[int, StepRecord]) -> int | None:
    """Return the node that was last to be ready for what `node` waited for; None: itself, or a link."""
    forward = record.seconds[node] / 3

    def until(need: Need) -> float:
        return float(need.arrival[node] + forward * need.rest)

    need = max(record.needs, key=until)
    if need.step not in by_step:
        return None
    delivery = by_step[need.step].deliveries[need.plan]
    q, _ = delivery.plan.order[need.place]
    exchange = delivery.plan.transfers[q].exchange
    ready = delivery.ready[:, 0]  # for the first message, which decides if the link is busy from then on
    others = exchange.met_by(node)
    if not others:
        return None
    last = max(others, key=lambda i: float(ready[i]))
    return last if last != node and float(ready[last]) > float(ready[node]) else None


def _sending(step: int, delivery: Delivery) -> Iterator[Bar]:
    """Yield when each message of a delivery occupied each node's link."""
    num_nodes = len(delivery.ready)
    free = torch.maximum(delivery.up, delivery.down)[:num_nodes]
    for place, (q, m) in enumerate(delivery.plan.order):
        messages = delivery.plan.transfers[q]
        seconds = messages.exchange.seconds_of(messages.amounts[..., m])
        for node in range(num_nodes):
            end = float(delivery.arrival[node, place])
            if seconds[node] > 0 and end > NEVER and end > float(free[node]):
                begin = end - float(seconds[node])
                yield Bar(node, "send", step, begin, end, f"{messages.transfer.operation} {_contents(messages, m)}")


def _contents(messages: Messages, m: int) -> str:
    first, last = int(messages.layers[m]), int(messages.last[m])
    parameters = f"parameter {first}" if first == last else f"parameters {first} to {last}"
    return f"of {parameters}, {float(messages.sizes[m]):,.0f} bytes"


def plot_timeline(
    timeline: TimelineBase,
    path: str | os.PathLike[str] | None = None,
    *,
    first: int = 0,
    last: int | None = None,
    axes: Axes | None = None,
    title: str | None = None,
) -> Figure:
    """Draw a row for each node: when it computes and waits, and below that the messages on its link.

    A wait is labelled with the node that was waited for.

    Args:
        timeline: from `price`.
        path: a file to save the figure to.
        first, last: the steps from `first` to before `last`; by default 12 steps.
        axes: draw here instead of in a new figure.
        title: above the figure.

    >>> from vecgym.clock import Compute, Network, price
    >>> from vecgym.collectives.ledger import Transfer
    >>> timeline = price([[Transfer("mean", 10**9, 2)]] * 3, Network("8 Gbit/s"), Compute([1.0, 2.0]))
    >>> [label.get_text() for label in plot_timeline(timeline).axes[0].get_yticklabels()]
    ['node 0', 'node 1']
    """
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

    from vecgym.plot.style import COLOURS, check_shared, done, finish, new_figure

    check_shared(path, title)
    first = check.integer("first", first, 0, "the first step, counted from 0")
    last = min(timeline.num_steps, first + MAX_STEPS) if last is None else check.integer("last", last)
    if not first < min(last, timeline.num_steps):
        raise ValueError(f"first={first}, last={last}: give 0 <= first < last, with first < {timeline.num_steps}.")
    rows = min(timeline.num_nodes, MAX_NODES)
    if axes is None:
        _, (axes,) = new_figure(9, 1.3 + 0.45 * rows)
    check.instance("axes", axes, Axes, "the axes of a figure, or None")
    bars = [bar for bar in timeline.bars(first, last) if bar.node < rows]
    begin, end = min(bar.begin for bar in bars), max(bar.end for bar in bars)
    for bar in bars:
        _draw(axes, bar, COLOURS[KINDS[bar.kind][1]], 0.03 * (end - begin))
    axes.set_xlim(begin, end)
    axes.set_ylim(rows - 0.5, -0.5)
    total = "" if rows == timeline.num_nodes else f" (of {timeline.num_nodes})"
    axes.set_yticks(range(rows), [f"node {node}{total if node == rows - 1 else ''}" for node in range(rows)])
    finish(axes, "", "seconds", "")
    axes.grid(False, axis="y")
    kinds = {bar.kind for bar in bars}
    legend = [Patch(facecolor=COLOURS[i], label=label) for kind, (label, i) in KINDS.items() if kind in kinds]
    axes.legend(handles=legend, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=8)
    return done(axes.figure.figure, title, path)  # of a part of a figure, the whole


def _draw(axes: Axes, bar: Bar, colour: str, least: float) -> None:
    """Draw a bar; label a wait longer than `least` with the node that was waited for."""
    place = (bar.node + 0.2, 0.18) if bar.kind == "send" else (bar.node - 0.35, 0.5)
    axes.broken_barh([(bar.begin, bar.end - bar.begin)], place, facecolor=colour, edgecolor="white", linewidth=0.3)
    if bar.kind == "wait" and bar.waits_for is not None and bar.end - bar.begin > least:
        middle = (bar.begin + bar.end) / 2
        axes.text(middle, bar.node - 0.12, f"node {bar.waits_for}", ha="center", va="center", fontsize=7)


@dataclass(frozen=True, repr=False)
class TimelineBase:
    """The timeline of every node, in a synchronous or an asynchronous run.

    Attributes:
        seconds: how long the run took.
        utilization: computed / seconds, averaged over all nodes, absent ones too.
        per_node: how each node spent its time.
        compute: how long the nodes compute.
    """

    seconds: Any
    utilization: Any
    per_node: PerNode
    compute: Compute

    _counted: ClassVar[str]  # what `num_steps` counts
    plot = plot_timeline  # as methods: their first argument is a timeline
    save_trace = save_trace

    @property
    def num_nodes(self) -> int:
        """K, the number of nodes."""
        return len(self.per_node.computed)

    @property
    def num_steps(self) -> int:
        """T, the number of steps, or of updates."""
        raise NotImplementedError

    def bars(self, first: int = 0, last: int | None = None) -> list[Bar]:
        """Return what every node did in the steps from `first` to before `last`, for figures and traces."""
        raise NotImplementedError

    def _within(self, first: int, last: int | None) -> tuple[int, int]:
        """Check `first` and `last`, and return them, clipped to `num_steps`."""
        end = self.num_steps if last is None else check.integer("last", last, 0)
        first = check.integer("first", first, 0, "the first step, or update, counted from 0")
        return min(first, self.num_steps), min(end, self.num_steps)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.num_steps} {self._counted} {self.num_nodes} nodes: "
            f"{readable_time(float(self.seconds))}, {100 * float(self.utilization):.1f} % computing)"
        )


def plot_networks(
    timelines: Mapping[float, Mapping[float, TimelineBase]],
    path: str | os.PathLike[str] | None = None,
    *,
    title: str | None = None,
) -> Figure:
    """Draw seconds and utilization against bandwidth, a curve for each latency.

    Args:
        timelines: {latency in seconds: {bandwidth in bit/s: timeline}}.
        path, title: as for `plot_timeline`.

    >>> from vecgym.clock import Compute, Network, price
    >>> from vecgym.collectives.ledger import Transfer
    >>> steps = [[Transfer("mean", 10**9, 2)]] * 3
    >>> timelines = {0.0: {b: price(steps, Network(b), Compute(1.0)) for b in (1e8, 1e9)}}
    >>> [axes.get_ylabel() for axes in plot_networks(timelines).axes]
    ['seconds', 'computing, %']
    """
    from matplotlib.ticker import EngFormatter, LogFormatter

    from vecgym.plot.style import COLOURS, check_shared, done, finish, new_figure

    check_shared(path, title)
    figure, (left, right) = new_figure(9, 3.8, columns=2)
    for (latency, row), colour in zip(timelines.items(), itertools.cycle(COLOURS)):
        label = f"latency {readable_time(latency)}"
        left.plot(list(row), [float(t.seconds) for t in row.values()], "o-", color=colour, label=label)
        right.plot(list(row), [100 * float(t.utilization) for t in row.values()], "o-", color=colour, label=label)
    left.set_yscale("log")
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))  # numbers, no powers of ten
    for axes, name in ((left, "seconds"), (right, "computing, %")):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(EngFormatter("bit/s"))
        finish(axes, "", "bandwidth of a node's link", name)
    right.set_ylim(0, 103)
    left.legend(frameon=False, fontsize=9)
    return done(figure, title, path)


def plot_prices(
    rows: Sequence[Mapping[str, Any]], path: str | os.PathLike[str] | None = None, *, title: str | None = None
) -> Figure:
    """Draw days, and utilization as bars: for each strategy and H, one for each way to send messages.

    Args:
        rows: of `vecgym.clock.price_strategies`.
        path, title: as for `plot_timeline`.

    >>> row = {"strategy": "diloco", "H": 20, "bucket_bytes": math.inf, "days": 3.0, "faster": 9.0, "utilization": 0.4}
    >>> [label.get_text() for label in plot_prices([row]).axes[0].get_yticklabels()]
    ['diloco, H = 20']
    """
    from vecgym.plot.style import COLOURS, check_shared, done, finish, new_figure

    check_shared(path, title)
    names = list(dict.fromkeys(f"{r['strategy']}" + (f", H = {r['H']}" if r["H"] else "") for r in rows))
    ways = list(dict.fromkeys(r["bucket_bytes"] for r in rows))
    figure, (left, right) = new_figure(10, 1.5 + 0.27 * len(names), columns=2, sharey=True)
    for i, (way, colour) in enumerate(zip(ways, COLOURS)):
        of_way = [r for r in rows if r["bucket_bytes"] == way]
        places = [place + (i + 0.5) * 0.8 / len(ways) - 0.4 for place in range(len(of_way))]
        label = "one message per exchange" if way == math.inf else f"messages of {readable_bytes(way)}"
        left.plot([r["days"] for r in of_way], places, "o", color=colour)
        for place, r in zip(places, of_way):
            left.annotate(
                f"{r['days']:.3g} ({r['faster']:.3g}x)", (r["days"], place), (6, 0), textcoords="offset points",
                va="center", fontsize=7,
            )  # fmt: skip
        bars = right.barh(places, [100 * r["utilization"] for r in of_way], 0.8 / len(ways), color=colour, label=label)
        right.bar_label(bars, fmt="%.1f %%", padding=3, fontsize=7)
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    left.set_xscale("log")
    left.xaxis.set_major_formatter("{x:g}")
    left.set_xlim(right=left.get_xlim()[1] * 4)  # room for the texts
    right.set_xlim(0, 115)
    right.set_xticks(range(0, 101, 20))
    finish(left, "", f"days (times as fast as {rows[0]['strategy']})", "")
    finish(right, "", "computing, %", "")
    figure.legend(*right.get_legend_handles_labels(), ncols=2, loc="outside lower center", frameon=False, fontsize=9)
    return done(figure, title, path)
