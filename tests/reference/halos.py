"""HALoS: nodes -> a local server per region -> a global server (arXiv 2506.04531).

    at a local server, when a node's movement Delta arrives
        x = local_rule(x, Delta)                               version + 1 if the rule took an update
        acc = acc + (x before - x after)
        after every `local_updates` arrivals:  send acc to the global server;  acc = 0
        the node begins its next round from x      once all arrivals of this time have happened, before any reply
    at the global server, when a region's acc arrives
        z = global_rule(z, acc);  send z back to that region
    at the local server, when z arrives:  x = (1 - a) x + a z

A region is a list of nodes; no node is in two. Rounds, nodes' messages and rules are those of `asynchronous`, each
local server with links of its own; max_wait is 0. Messages between the servers have links and latencies of their own
(`global_network`, in which a "node" is a region), and carry what was true when they were sent. Nobody waits for them:
between a message and its reply the region goes on, and what it moves meanwhile stays in acc, for the next message.
Merging is no movement of the region's own: it is not added to acc, and is no version.

since = "merge" is what the paper's code does instead: acc is set to 0 by the reply, not by the message, and the next
message is sent `local_updates` arrivals after the reply. What moves between message and reply never leaves the region.
Without a global network both are one.

Staleness of a node's message: versions of its local server since its round began. Of a region's: versions of the
global server since the one that the region last merged (0 at first), when it sent. Weights: `staleness_function` for
nodes; 1 for regions.

At one time: ends of rounds, arrivals at local servers, begins of rounds (all three by node), messages that get ready
(what they carry is of the arrival that made them ready), arrivals at the global server, replies (all three by region).
The paper's program (utnslab/halos, exec_halos.py: on_new_worker_pgrads) schedules a node's next round in the handler of
its arrival, and messages between servers come later even where they take no time.

The default rates are the paper's 0.2 and 0.15 times the buffers, as its script gives them: Delayed Nesterov divides a
movement by the buffer, so that an arrival moves a server by 0.2 or 0.15 of it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from tests.reference import common
from tests.reference.asynchronous import (
    Arrival,
    Begins,
    DelayedNesterov,
    Links,
    Network,
    Params,
    Server,
    Staleness,
    Update,
    clone,
    make_nodes,
    round_end,
    staleness_weight,
    train_round,
    write,
)
from tests.reference.common import Batch, OptimizerSpec, Schedule

END, LOCAL, BEGIN, SEND, GLOBAL, REPLY = range(6)  # in their order at one time


@dataclass(frozen=True)
class GlobalUpdate(Update):
    """One update of the global server: `arrivals` are those that the region's message is made of."""

    region: int
    staleness: int


@dataclass
class Message:
    acc: Params
    arrivals: list[Arrival]
    from_version: int  # of the global server, that the region had last merged


@dataclass
class Region:
    theta: Params
    server: Server
    links: Links
    acc: Params
    version: int = 0
    global_version: int = 0
    arrivals: list[Arrival] = field(default_factory=list)  # that acc is made of
    sent: list[Message] = field(default_factory=list)  # on their way, oldest first
    replies: list[tuple[Params, int]] = field(default_factory=list)  # on their way, oldest first


def halos_steps(H: int, seconds: Sequence[float]) -> list[int]:
    """max(1, ceil(H v_i / max v)); no rounding error adds a step to what is an integer on paper."""
    return [max(1, math.ceil(H * min(seconds) / s * (1 - 1e-12))) for s in seconds]


def zeros(theta: Params) -> Params:
    return {name: torch.zeros_like(param) for name, param in theta.items()}


def make_region(start: Params, server: Server, links: Links) -> Region:
    theta = clone(start)
    server.start(theta)
    return Region(theta, server, links, zeros(theta))


def halos(
    model: nn.Module,
    batch: Callable[[int, int], Batch],
    regions: Sequence[Sequence[int]],
    *,
    num_updates: int,
    num_steps: Sequence[int],
    step_seconds: Callable[[int, int], float],
    inner: OptimizerSpec = (torch.optim.AdamW, {"lr": 1e-3}),
    make_local: Callable[[], Server] = lambda: DelayedNesterov(0.2 * 16, 0.9, 16),
    global_server: Server | None = None,
    local_updates: int = 32,
    merge: float = 0.25,
    since: Literal["send", "merge"] = "send",
    staleness_function: Staleness = "none",
    network: Network | None = None,
    global_network: Network | None = None,
    max_norm: float | None = None,
    schedule: Schedule | None = None,
    begins: Begins | None = None,
) -> tuple[list[GlobalUpdate], list[Params]]:
    """Run until the global server has taken `num_updates` updates; return them, and the local servers' parameters."""
    region_of = {node: r for r, members in enumerate(regions) for node in members}
    num_nodes = len(region_of)
    nodes = make_nodes(model, num_nodes, inner)
    z = clone(common.parameters(model))
    global_server = global_server or DelayedNesterov(0.15 * 2, 0.5, 2)
    global_server.start(z)
    local = [make_region(z, make_local(), Links(network or Network(), num_nodes)) for _ in regions]
    global_links = Links(global_network or Network(), len(regions))
    events: list[tuple[float, int, int]] = []
    updates: list[GlobalUpdate] = []
    global_version = total_steps = 0

    def begin(i: int, time: float, region: Region) -> None:
        first = nodes[i].own_step
        nodes[i].version = region.version
        batches = [batch(i, step) for step in range(first, first + num_steps[i])]
        train_round(nodes[i], region.server.sent(), batches, max_norm, schedule)
        heapq.heappush(events, (round_end(step_seconds, begins, i, first, num_steps[i], time), END, i))

    def receive(i: int, time: float, region: Region) -> None:
        """Node i's movement has arrived at its local server."""
        staleness = region.version - nodes[i].version
        weight = staleness_weight(staleness_function, staleness)
        before = clone(region.theta)
        region.version += region.server.receive(nodes[i].Delta, weight)
        for name, param in region.theta.items():
            region.acc[name] += before[name] - param
        region.arrivals.append(Arrival(i, nodes[i].round, staleness, weight, nodes[i].loss, num_steps[i], time))
        nodes[i].round += 1
        if len(region.arrivals) == local_updates:  # more than that: since="merge", and its message is on its way
            region.sent.append(Message(clone(region.acc), list(region.arrivals), region.global_version))
            heapq.heappush(events, (time, SEND, region_of[i]))
            if since == "send":
                restart(region)

    def restart(region: Region) -> None:
        region.acc = zeros(region.theta)
        region.arrivals = []

    def receive_reply(region: Region) -> None:
        theta, region.global_version = region.replies.pop(0)
        write(region.theta, {name: (1 - merge) * x + merge * theta[name] for name, x in region.theta.items()})
        if since == "merge":
            restart(region)

    for i in sorted(region_of):
        begin(i, 0.0, local[region_of[i]])
    while len(updates) < num_updates:
        now, kind, who = heapq.heappop(events)
        r = region_of[who] if kind in (END, LOCAL, BEGIN) else who
        region = local[r]
        if kind == END:
            heapq.heappush(events, (region.links.upload(who, now), LOCAL, who))
        elif kind == LOCAL:
            receive(who, now, region)
            heapq.heappush(events, (now, BEGIN, who))
        elif kind == SEND:
            heapq.heappush(events, (global_links.upload(r, now), GLOBAL, r))
        elif kind == GLOBAL:
            message = region.sent.pop(0)
            staleness = global_version - message.from_version
            global_version += global_server.receive(message.acc, 1.0)
            total_steps += sum(arrival.num_steps for arrival in message.arrivals)
            updates.append(GlobalUpdate(now, global_version, message.arrivals, clone(z), total_steps, r, staleness))
            region.replies.append((clone(global_server.sent()), global_version))
            heapq.heappush(events, (global_links.download(r, now), REPLY, r))
        elif kind == REPLY:
            receive_reply(region)
        elif kind == BEGIN:
            begin(who, region.links.download(who, now), region)

    return updates, [region.theta for region in local]
