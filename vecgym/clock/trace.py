"""What every node did when, as bars: for figures, and for Perfetto and Chrome's chrome://tracing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch

from vecgym.clock.clock import Need, Record, Sent
from vecgym.clock.exchange import NEVER, Meeting, Mesh
from vecgym.clock.plan import Part
from vecgym.collectives.ledger import Transfer
from vecgym.core import check, files

LEAST = 1e-12  # of the time that has passed: shorter waits are rounding


class Recorded(Protocol):
    """What figures and traces take: a `Timeline` or an `AsyncTimeline`."""

    @property
    def seconds(self) -> Any: ...
    @property
    def utilization(self) -> Any: ...
    @property
    def num_nodes(self) -> int: ...
    @property
    def num_steps(self) -> int: ...
    def bars(self, first: int = 0, last: int | None = None) -> list[Bar]: ...


class Priced(Protocol):
    """What `bars` takes: a `Timeline`."""

    @property
    def transfers(self) -> list[Transfer]: ...
    def records(self, first: int = 0, last: int | None = None) -> list[Record]: ...


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


def bars(timeline: Priced, first: int = 0, last: int | None = None) -> list[Bar]:
    """What every node did in the steps from `first` to before `last`.

    A wait is shown before the forward pass, where nearly all of it is; a message from when its node's link was taken.

    >>> from vecgym.clock import Compute, Network, price
    >>> from vecgym.collectives.ledger import Transfer
    >>> step = [Transfer("mean", payload_bytes=10**9, num_nodes=2)]
    >>> for bar in bars(price([step] * 2, Network("8 Gbit/s"), Compute([1.0, 3.0])), first=1)[:3]:
    ...     print(bar.node, bar.kind, round(bar.begin, 2), round(bar.end, 2), bar.name)
    0 wait 1.0 4.0 waits for node 1
    0 forward 4.0 4.33 forward 1
    0 backward 4.33 5.0 backward 1
    """
    first = check.integer("first", first, 0, "the first step, counted from 0")
    before = max(0, first - _longest_lag(timeline))
    records = timeline.records(before, last)
    known = {record.step: record for record in records}
    found: list[Bar] = []
    for record in records[first - before :]:
        found += _computing(record, known)
        for sent in record.sent:
            found += _sending(record.step, sent)
    return found


def save_trace(timeline: Recorded, path: str | os.PathLike[str], first: int = 0, last: int | None = None) -> None:
    """Write a trace for https://ui.perfetto.dev and chrome://tracing: a process for each node, with two threads."""
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


def _longest_lag(timeline: Priced) -> int:
    lags = [kind.lag for kind in timeline.transfers]
    return 1 + max((lag if isinstance(lag, int) else max(lag) for lag in lags), default=0)


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
    others = _others(exchange, node)
    if not others:
        return None
    last = max(others, key=lambda i: float(ready[i]))
    return last if last != node and float(ready[last]) > float(ready[node]) else None


def _others(exchange: object, node: int) -> list[int]:
    """The nodes that `node` meets."""
    if isinstance(exchange, Meeting):
        group = int(exchange.heard[node])
        return [i for i in exchange.groups[group] if i < exchange.num_nodes] if group < len(exchange.groups) else []
    assert isinstance(exchange, Mesh)
    return sorted({j for j, i in zip(exchange.senders, exchange.receivers) if i == node})


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
