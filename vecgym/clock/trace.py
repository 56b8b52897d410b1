"""What every node did when, as bars: for Perfetto and Chrome's chrome://tracing, and as figures.

matplotlib, which takes a while to import, is imported by the functions that draw.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from vecgym.clock.clock import Need, Record, Sent
from vecgym.clock.compute import Compute
from vecgym.clock.messages import NEVER, Part
from vecgym.clock.units import readable_time
from vecgym.core import check, files

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAST = 1e-12  # of the time that has passed: shorter waits are rounding
KINDS = {  # what a legend says, and which of the colours is taken
    "forward": ("forward", 5),
    "backward": ("backward and optimizer", 0),
    "round": ("a round of local steps", 0),
    "wait": ("waits", 1),
    "send": ("link is taken", 2),
}
MAX_NODES = 16
MAX_STEPS = 12  # shown when nothing is said


class Bar(NamedTuple):
    """What a node did from one time to another.

    Attributes:
        node: its id.
        kind: "forward", "backward", "wait" or "send"; of asynchronous runs "round", some steps.
        step: counted from 0.
        begin, end: seconds.
        name: what it did, for a person: of a wait for whom it waited, of a message what it carries.
        waits_for: of a wait, the node that was the last to be there; None: the node's own link.
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
    """Where the seconds of each node went, `[K]`.

    >>> from vecgym.clock import Compute, Network, price
    >>> from vecgym.collectives.ledger import Transfer
    >>> timeline = price([[Transfer("mean", payload_bytes=10**9, num_nodes=2)]], Network(8e9), Compute([1.0, 3.0]))
    >>> timeline.per_node.waited, timeline.per_node.sent
    (tensor([3., 1.], dtype=torch.float64), tensor([1., 1.], dtype=torch.float64))

    Attributes:
        computed: in forward and backward passes and optimizer steps.
        waited: for others, or for its link.
        sent, received: that its link was taken, up and down; much of it beside computing. A collective takes both.
    """

    computed: Tensor
    waited: Tensor
    sent: Tensor
    received: Tensor


@dataclass(frozen=True)
class Recorded:
    """What every node did when, in a run of any kind.

    Attributes:
        seconds: that the run took.
        utilization: computed / (computed + waited), the mean over the nodes.
        per_node: where the seconds of each node went.
        compute: how long nodes compute.
    """

    seconds: Any
    utilization: Any
    per_node: PerNode
    compute: Compute

    @property
    def num_nodes(self) -> int:
        """K."""
        return len(self.per_node.computed)

    @property
    def num_steps(self) -> int:
        """T: steps, or updates."""
        raise NotImplementedError

    def bars(self, first: int = 0, last: int | None = None) -> list[Bar]:
        """What every node did in the steps from `first` to before `last`, for figures and traces."""
        raise NotImplementedError

    def _within(self, first: int, last: int | None) -> tuple[int, int]:
        """Check `first` and `last`, and return them, at most `num_steps`."""
        end = self.num_steps if last is None else check.integer("last", last, 0)
        first = check.integer("first", first, 0, "the first step, or update, counted from 0")
        return min(first, self.num_steps), min(end, self.num_steps)

    def _shown(self, what: str) -> str:
        return (
            f"{type(self).__name__}({self.num_steps} {what} {self.num_nodes} nodes: "
            f"{readable_time(float(self.seconds))}, {100 * float(self.utilization):.1f} % computing)"
        )


def bars(records: Sequence[Record], first: int = 0) -> list[Bar]:
    """What every node did in the steps from `first` on; those before it say for whom nodes waited then.

    A wait is shown before the forward pass, where nearly all of it is; a message from when its node's link was taken.

    >>> from vecgym.clock import Compute, Network, price
    >>> from vecgym.collectives.ledger import Transfer
    >>> step = [Transfer("mean", payload_bytes=10**9, num_nodes=2)]
    >>> for bar in bars(price([step] * 2, Network("8 Gbit/s"), Compute([1.0, 3.0])).records(), first=1)[:3]:
    ...     print(bar.node, bar.kind, round(bar.begin, 2), round(bar.end, 2), bar.name)
    0 wait 1.0 4.0 waits for node 1
    0 forward 4.0 4.33 forward 1
    0 backward 4.33 5.0 backward 1
    """
    known = {record.step: record for record in records}
    found: list[Bar] = []
    for record in records:
        if record.step >= first:
            found += _computing(record, known)
            for sent in record.sent:
                found += _sending(record.step, sent)
    return found


def save_trace(timeline: Recorded, path: str | os.PathLike[str], first: int = 0, last: int | None = None) -> None:
    """Write a trace of the steps from `first` to before `last`, for https://ui.perfetto.dev and chrome://tracing.

    Each node is a process, with two threads: it computes, and its link is taken.

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
        events.append({"ph": "M", "pid": node, "name": "process_name", "args": {"name": f"node {node}"}})
        for thread, name in enumerate(("compute", "link")):
            about = {"ph": "M", "pid": node, "tid": thread, "name": "thread_name", "args": {"name": name}}
            events.append(about)
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


def _computing(record: Record, known: dict[int, Record]) -> Iterator[Bar]:
    for node in range(len(record.end)):
        begin, forward, end = (float(x[node]) for x in (record.begin, record.forward, record.end))
        start = max(begin, forward - float(record.seconds[node]) / 3)
        if start - begin > LEAST * end:
            for_whom = _blocked_by(node, record, known)
            name = "waits for its link" if for_whom is None else f"waits for node {for_whom}"
            yield Bar(node, "wait", record.step, begin, start, name, for_whom)
        yield Bar(node, "forward", record.step, start, forward, f"forward {record.step}")
        yield Bar(node, "backward", record.step, forward, end, f"backward {record.step}")


def _blocked_by(node: int, record: Record, known: dict[int, Record]) -> int | None:
    """The node that was the last to be there for what `node` waited for; None: itself, or a link."""
    took = record.seconds[node] / 3

    def until(need: Need) -> float:
        return float(need.arrival.expand(len(record.end))[node] + took * need.rest)

    need = max(record.needed, key=until)
    if need.step not in known:
        return None
    sent = known[need.step].sent[need.plan]
    q, _ = sent.plan.order[need.place]
    exchange = sent.plan.parts[q].exchange
    ready = sent.ready[:, 0]  # of the first message: if the link was never empty after it, it decided
    others = exchange.met_by(node)
    if not others:
        return None
    last = max(others, key=lambda i: float(ready[i]))
    return last if last != node and float(ready[last]) > float(ready[node]) else None


def _sending(step: int, sent: Sent) -> Iterator[Bar]:
    """When each node's link was taken by each message that it is sent."""
    num_nodes = len(sent.ready)
    arrival = sent.arrival.expand(num_nodes, -1)
    free = torch.maximum(sent.up, sent.down)[:num_nodes]
    for place, (q, m) in enumerate(sent.plan.order):
        part = sent.plan.parts[q]
        took = part.exchange.seconds_of(part.amounts[..., m])
        for node in range(num_nodes):
            end = float(arrival[node, place])
            if took[node] > 0 and end > NEVER and end > float(free[node]):
                begin = end - float(took[node])
                yield Bar(node, "send", step, begin, end, f"{part.transfer.operation} {_carried(part, m)}")


def _carried(part: Part, m: int) -> str:
    first, last = int(part.layers[m]), int(part.last[m])
    which = f"parameter {first}" if first == last else f"parameters {first} to {last}"
    return f"of {which}, {float(part.sizes[m]):,.0f} bytes"


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
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

    from vecgym.plot.style import COLOURS, check_shared, done, finish, new_figure

    check_shared(path, title)
    first = check.integer("first", first, 0, "the first step, counted from 0")
    last = min(timeline.num_steps, first + MAX_STEPS) if last is None else check.integer("last", last)
    if not first < min(last, timeline.num_steps):
        raise ValueError(f"first={first} to before last={last} shows nothing of a run of {timeline.num_steps} steps.")
    if axes is not None:
        check.instance("axes", axes, Axes, "the axes of a figure, or None")
    shown = min(timeline.num_nodes, MAX_NODES)
    figure = None
    if axes is None:
        figure, (axes,) = new_figure(9, 1.3 + 0.45 * shown)
    found = [bar for bar in timeline.bars(first, last) if bar.node < shown]
    begin, end = min(bar.begin for bar in found), max(bar.end for bar in found)
    for bar in found:
        _draw(axes, bar, COLOURS[KINDS[bar.kind][1]], 0.03 * (end - begin))
    axes.set_xlim(begin, end)
    axes.set_ylim(shown - 0.5, -0.5)
    more = "" if shown == timeline.num_nodes else f" (of {timeline.num_nodes})"
    axes.set_yticks(range(shown), [f"node {node}{more if node == shown - 1 else ''}" for node in range(shown)])
    finish(axes, "", "seconds", "")
    axes.grid(False, axis="y")
    used = {bar.kind for bar in found}
    legend = [Patch(facecolor=COLOURS[i], label=label) for kind, (label, i) in KINDS.items() if kind in used]
    axes.legend(handles=legend, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=8)
    return axes.figure if figure is None else done(figure, title, path)  # type: ignore[return-value]


def _draw(axes: Axes, bar: Bar, colour: str, least: float) -> None:
    """Draw a bar; if it is a wait for longer than `least`, say for whom."""
    link = bar.kind == "send"
    axes.broken_barh(
        [(bar.begin, bar.end - bar.begin)],
        (bar.node + 0.2, 0.18) if link else (bar.node - 0.35, 0.5),
        facecolor=colour,
        edgecolor="white",
        linewidth=0.3,
    )
    if bar.kind == "wait" and bar.waits_for is not None and bar.end - bar.begin > least:
        middle = (bar.begin + bar.end) / 2
        axes.text(middle, bar.node - 0.12, f"node {bar.waits_for}", ha="center", va="center", fontsize=7)


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
    from matplotlib.ticker import EngFormatter

    from vecgym.plot.style import COLOURS, check_shared, done, finish, new_figure

    check_shared(path, title)
    figure, (left, right) = new_figure(9, 3.8, columns=2)
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
