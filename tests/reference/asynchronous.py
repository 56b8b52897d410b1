"""Asynchronous local SGD: nodes of different speeds and one server, event by event (arXiv 2401.09135 and its kin).

    every node begins round 0 at time 0 from the server's parameters of version 0
    for each event in the order of time
        a round ends:      its movement Delta = start - end is sent to the server
        a message arrives: the server takes w Delta into account; the node waits
        a window closes:   everybody who waits begins the next round from the server's parameters

**Rounds.** Times are seconds. Node i begins a round at time b from the server's parameters of some version. A round
is `num_steps[i]` local steps of the node's own optimizer, whose state stays on the node from round to round (as do
buffers, e.g. batch-norm statistics), on `batch(node, own_step)`; own_step counts the node's own local steps from 0.
It ends at b + (s_0 + s_1 + ...), the sum of its `step_seconds(node, own_step)` taken from left to right. What it
sends is its movement Delta = start - end. The first round of all nodes begins at 0 from version 0: the initial
parameters are everywhere before the clock starts, they are not downloaded.

**Messages.** A pace is seconds per byte. An upload is ready when the round ends. It takes the node's up link, from when
it is ready and that is free, for num_bytes * up_pace[i] seconds, and the server's in link, from when it is ready and
that is free, for num_bytes * server_pace seconds: each end for its own time. It arrives latency[i] after the later of
both. A download is ready when it is sent, takes the server's out link and the node's down link likewise, and arrives
latency[i] after the later of both; the node then begins its round. What it carries is the server's
parameters, and their version, of the time at which it was *sent*. A link serves its messages in the order in which
they became ready, ties by node. Latency is on the way: it takes no link. By default all of it is 0: no network.

**Arrivals.** Events happen in the order of time. At one time: first ends of rounds, then arrivals, then windows
close; among equals the smaller node is first. So a message without a network arrives in order with all others of
that time. The server handles an arrival at once:

    staleness = the server's version now - the version from which the round began      (before its own update)
    w         = staleness_function(staleness): "none" is 1, "inverse_sqrt" is (1 + staleness)^(-1/2)

and hands Delta and w to its rule, one of the classes below, which may take an update: then the version grows by 1.
A rule with a buffer of M takes one update per M arrivals, on sum_i w_i Delta_i / M with the weights of the time of
arrival (it divides by M, not by the sum of the weights); what is in the buffer at the end of a run is lost.

**Grace** says when nodes begin again, and has nothing to do with the buffer. The first arrival, at time s, when
nobody is waiting opens a window; arrivals up to and including s + max_wait join it. Everybody in it waits and begins
the next round when it closes, from the parameters that the server has then:

    grace = "full":        at s + max_wait, or earlier as soon as all K nodes are waiting
    grace = "until_last":  at the time of the last arrival that is in the window. Nothing is waited for in vain, which
                           nobody can know in advance: it is the rule of a simulation.

"The last arrival": the others' messages arrive when they arrive if those who wait go on waiting. Once it has closed,
a node of the window may well arrive again before s + max_wait: that opens a new window. max_wait = 0: each arrival
begins again at once, after *all* arrivals of exactly its time have been handled; those begin together. Who begins
together is sent its download in the order of nodes. max_wait = inf waits for all K: with a buffer of K that is the
synchronous algorithm, and both graces are one.

**Delay threshold.** (Ringmaster ASGD, arXiv 2501.16168.) With a threshold R an arrival whose staleness is R or more is
dropped: the rule does not see it, and it is none of its update's. Its node waits and begins again as all do.

**Unequal rounds (DyLU).** num_steps[i] = max(1, floor(H v_i / max v)), v_i = 1 / (the node's seconds per step).
"""

from __future__ import annotations

import copy
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.reference import common
from tests.reference.common import Batch, OptimizerSpec, Schedule

Params = dict[str, Tensor]
Staleness = Literal["none", "inverse_sqrt"] | Callable[[int], float]
Grace = Literal["full", "until_last"]

END, ARRIVAL = 0, 1  # kinds of events, in their order at one time


# ------------------------------------------------------------------------------------------- what a run leaves behind


@dataclass(frozen=True)
class Arrival:
    """One round's message as the server received it."""

    node: int
    round: int  # the node's own count of rounds, from 0
    staleness: int
    weight: float
    loss: float  # mean over the round's steps of the loss before each step
    num_steps: int
    time: float


@dataclass(frozen=True)
class Update:
    """One update of the server."""

    time: float
    version: int  # after it: the first update makes version 1
    arrivals: list[Arrival]  # those that it is made of
    params: Params  # the server's after it
    total_steps: int  # local steps of all rounds that have arrived by now, and were not dropped
    dropped: list[Arrival] = field(default_factory=list, kw_only=True)  # since the last update


# ------------------------------------------------------------------------------------------------- the server's rules


class OuterOptimizer:
    """Any optimizer of torch on the server's parameters; the mean movement of `buffer` arrivals is its gradient.

    g = sum_i w_i Delta_i / M;  theta <- outer(theta, g)
    """

    def __init__(self, outer: OptimizerSpec, buffer: int = 1) -> None:
        self.outer = outer
        self.buffer = buffer
        self.held: list[Params] = []  # w_i Delta_i

    def start(self, theta: Params) -> None:
        self.theta = theta
        self.optimizer = common.make_optimizer(list(theta.values()), self.outer)

    def receive(self, Delta: Params, weight: float) -> bool:
        """Take one arrival; return whether the server's parameters were updated."""
        self.held.append({name: weight * Delta[name] for name in self.theta})
        if len(self.held) < self.buffer:
            return False
        for name, param in self.theta.items():
            param.grad = common.mean([movement[name] for movement in self.held])
        self.optimizer.step()
        self.held = []
        return True

    def sent(self) -> Params:
        """The model from which a node begins."""
        return self.theta


def fedbuff(lr: float, buffer: int) -> dict[str, Any]:
    """FedBuff (arXiv 2106.06639): theta <- theta - lr sum_i (1 + staleness_i)^(-1/2) Delta_i / M. Keywords of a run."""
    server = OuterOptimizer((torch.optim.SGD, {"lr": lr}), buffer)
    return {"server": server, "staleness_function": "inverse_sqrt"}


class DelayedNesterov:
    """Delayed Nesterov (arXiv 2401.09135, algorithm 3): momentum changes with every N-th arrival only.

    g = w Delta;  D <- D + g
    at every N-th arrival:  m <- beta m + D / N;  theta <- theta - eta [(1 - cN + c) beta m + g / N];  D = 0
    at every other one:     theta <- theta - eta [c beta m + g / N]

    0 <= c <= 1 / N. Every arrival is an update of the server: version + 1.
    """

    def __init__(self, lr: float, momentum: float, buffer: int, c: float = 0.0) -> None:
        self.lr, self.momentum, self.N, self.c = lr, momentum, buffer, c
        self.count = 0

    def start(self, theta: Params) -> None:
        self.theta = theta
        self.m = {name: torch.zeros_like(param) for name, param in theta.items()}
        self.D = {name: torch.zeros_like(param) for name, param in theta.items()}

    def sent(self) -> Params:
        return self.theta

    def receive(self, Delta: Params, weight: float) -> bool:
        self.count += 1
        last = self.count % self.N == 0
        for name, param in self.theta.items():
            g = weight * Delta[name]
            self.D[name] += g
            factor = self.c
            if last:
                self.m[name] = self.momentum * self.m[name] + self.D[name] / self.N
                self.D[name] = torch.zeros_like(param)
                factor = 1 - self.c * self.N + self.c
            param -= self.lr * (factor * self.momentum * self.m[name] + g / self.N)
        return True


class MLA:
    """Momentum look-ahead (PanocularAI/panofabric-engine, mla.py): the momentum is a mean of movements.

    An update, with G the movement or, of a buffer, the mean of the movements:
        m <- mu m + (1 - mu) G;  theta <- theta - eta (mu m + G)
    """

    def __init__(self, lr: float, momentum: float, buffer: int = 1) -> None:
        self.lr, self.momentum, self.buffer = lr, momentum, buffer
        self.held: list[Params] = []

    def start(self, theta: Params) -> None:
        self.theta = theta
        self.m = {name: torch.zeros_like(param) for name, param in theta.items()}

    def sent(self) -> Params:
        return self.theta

    def receive(self, Delta: Params, weight: float) -> bool:
        self.held.append({name: weight * Delta[name] for name in self.theta})
        if len(self.held) < self.buffer:
            return False
        for name, param in self.theta.items():
            G = common.mean([movement[name] for movement in self.held])
            self.m[name] = self.momentum * self.m[name] + (1 - self.momentum) * G
            param -= self.lr * self.momentum * self.m[name]
            param -= self.lr * G
        self.held = []
        return True


class HeLoCo:
    """HeLoCo (arXiv 2606.00271, as PanocularAI/panofabric-engine has it): corrected movements, a damped momentum.

    What is sent to a node:   theta - eta mu m: where the momentum would take theta if nothing else came
    An arrival, tensor by tensor, m being the server's momentum of before the update that it is part of:
        cos = cosine(Delta, m);  conf = |Delta| / (|Delta| + 3 |m| + 1e-8);  v = m / |m|
        cos >= 0.2:       Delta as it is
        cos < 0:          Delta - min(0.5 (-cos) conf, 0.5) cos |Delta| v     (some of what goes against m is taken out)
        0 <= cos < 0.2:   |Delta| unit((1 - l) unit(Delta) + l v),  l = min((1 - cos) conf, 1)    (turned towards m)
        |m| or |Delta| below 1e-8: as it is
        G = w rho corrected,  rho = 1 / sqrt(K): weighted *after* it is corrected
    An update, with G or, of a buffer, the mean of its G:
        m <- mu m + (1 - mu) G;  theta <- theta - eta (G + mu m)

    The momentum is a mean of movements, not their sum: with G = Delta for ever m goes to Delta, and theta moves by
    (1 + mu) eta Delta a step.
    """

    def __init__(self, lr: float, momentum: float, num_nodes: int, buffer: int = 1) -> None:
        self.lr, self.momentum, self.rho, self.buffer = lr, momentum, 1 / math.sqrt(num_nodes), buffer
        self.held: list[Params] = []

    def start(self, theta: Params) -> None:
        self.theta = theta
        self.m = {name: torch.zeros_like(param) for name, param in theta.items()}

    def sent(self) -> Params:
        return {name: param - self.lr * self.momentum * self.m[name] for name, param in self.theta.items()}

    def receive(self, Delta: Params, weight: float) -> bool:
        self.held.append({n: weight * self.rho * heloco_correction(Delta[n], m) for n, m in self.m.items()})
        if len(self.held) < self.buffer:
            return False
        for name, param in self.theta.items():
            G = common.mean([movement[name] for movement in self.held])
            self.m[name] = self.momentum * self.m[name] + (1 - self.momentum) * G
            param -= self.lr * (G + self.momentum * self.m[name])
        self.held = []
        return True


def heloco_correction(Delta: Tensor, m: Tensor) -> Tensor:
    size = Delta.norm()
    if size < 1e-8 or m.norm() < 1e-8:
        return Delta
    u, v = Delta / size, m / m.norm()
    cosine = (u * v).sum()
    confidence = size / (size + 3 * m.norm() + 1e-8)
    if cosine >= 0.2:
        return Delta
    if cosine < 0:
        strength = torch.clamp(0.5 * -cosine * confidence, max=0.5)
        return Delta - strength * cosine * size * v
    turn = torch.clamp((1 - cosine) * confidence, max=1)
    direction = (1 - turn) * u + turn * v
    return size * direction / direction.norm()


Server = OuterOptimizer | DelayedNesterov | HeLoCo | MLA


# ------------------------------------------------------------------------------------------------------------ network


@dataclass
class Network:
    """Paces in seconds per byte, latencies in seconds; per node, or one for all."""

    num_bytes: float = 0.0  # of one message, in either direction
    up_pace: Sequence[float] | float = 0.0
    down_pace: Sequence[float] | float = 0.0
    server_pace: float = 0.0
    latency: Sequence[float] | float = 0.0


def of_node(values: Sequence[float] | float, node: int) -> float:
    return values[node] if isinstance(values, Sequence) else values


class Links:
    """The times at which links are free. Messages, of a share of num_bytes, are queued in the order of the calls."""

    def __init__(self, network: Network, num_nodes: int) -> None:
        self.network = network
        self.server_in = self.server_out = 0.0
        self.node_up = [0.0] * num_nodes
        self.node_down = [0.0] * num_nodes

    def upload(self, node: int, ready: float, share: float = 1.0) -> float:
        """The arrival at the server of node's message, ready at this time."""
        size, network = share * self.network.num_bytes, self.network
        self.node_up[node] = max(ready, self.node_up[node]) + size * of_node(network.up_pace, node)
        self.server_in = max(ready, self.server_in) + size * network.server_pace
        return max(self.node_up[node], self.server_in) + of_node(network.latency, node)

    def download(self, node: int, ready: float, share: float = 1.0) -> float:
        """The arrival at node of the server's message, ready at this time."""
        size, network = share * self.network.num_bytes, self.network
        self.node_down[node] = max(ready, self.node_down[node]) + size * of_node(network.down_pace, node)
        self.server_out = max(ready, self.server_out) + size * network.server_pace
        return max(self.node_down[node], self.server_out) + of_node(network.latency, node)


# -------------------------------------------------------------------------------------------------------------- nodes


@dataclass
class Node:
    model: nn.Module
    optimizer: Optimizer
    own_step: int = 0  # local steps so far
    round: int = 0  # of the round that is under way
    version: int = 0  # from which it began
    Delta: Params = field(default_factory=dict)
    loss: float = math.nan


def make_nodes(model: nn.Module, num_nodes: int, inner: OptimizerSpec) -> list[Node]:
    models = common.copy_model(model, num_nodes)
    return [Node(model_i, opt) for model_i, opt in zip(models, common.make_optimizers(models, inner))]


def clone(theta: dict[str, Any]) -> Params:
    return {name: param.detach().clone() for name, param in theta.items()}


@torch.no_grad()
def write(theta: dict[str, Any], values: Params) -> None:
    for name, param in theta.items():
        param.copy_(values[name])


def train_round(
    node: Node, start: Params, batches: Sequence[Batch], max_norm: float | None, schedule: Schedule | None
) -> None:
    """The local steps of one round from `start`: sets Delta and the mean loss."""
    theta = common.parameters(node.model)
    write(theta, start)
    losses = []
    for h, batch in enumerate(batches):
        losses.append(float(common.backward(node.model, batch)))
        common.clip(node.model, max_norm)
        common.set_rate(node.optimizer, schedule, node.own_step + h)
        node.optimizer.step()
    node.Delta = {name: start[name] - theta[name].detach() for name in theta}
    node.loss = sum(losses) / len(losses)
    node.own_step += len(batches)


def round_seconds(step_seconds: Callable[[int, int], float], node: int, own_step: int, num_steps: int) -> float:
    """From left to right: Python's `sum` adds floats differently from version to version."""
    seconds = 0.0
    for step in range(own_step, own_step + num_steps):
        seconds += step_seconds(node, step)
    return seconds


Begins = Callable[[int, float], float]  # (node, time) -> when a step begins that would begin then


def round_end(
    step_seconds: Callable[[int, int], float], begins: Begins | None, node: int, own_step: int, num_steps: int,
    time: float,
) -> float:  # fmt: skip
    """The end of a round that begins at `time`. `begins`: nodes that are absent begin no step before they are back."""
    if begins is None:
        return time + round_seconds(step_seconds, node, own_step, num_steps)
    for step in range(own_step, own_step + num_steps):
        time = begins(node, time) + step_seconds(node, step)
    return time


def dylu(H: int, seconds: Sequence[float]) -> list[int]:
    """Local steps in inverse proportion to the seconds per step, at least 1; the fastest node takes H.

    H v_i / max v is H min(s) / s_i. What is an integer on paper stays one: no rounding error takes a step away.
    """
    return [max(1, math.floor(H * min(seconds) / s * (1 + 1e-12))) for s in seconds]


def staleness_weight(function: Staleness, staleness: int) -> float:
    if function == "none":
        return 1.0
    if function == "inverse_sqrt":
        return (1 + staleness) ** -0.5
    assert callable(function)
    return function(staleness)


# ------------------------------------------------------------------------------------------------------------ the run


@dataclass
class Queue:
    """The events to come: (time, kind, node), and the times at which links are free."""

    links: Links
    events: list[tuple[float, int, int]] = field(default_factory=list)

    def push(self, time: float, kind: int, node: int) -> None:
        heapq.heappush(self.events, (time, kind, node))

    def next_time(self) -> float:
        return self.events[0][0] if self.events else math.inf

    def pop_arrival(self) -> tuple[float, int]:
        """Let rounds end and send their messages until one arrives: its time and node."""
        while True:
            time, kind, node = heapq.heappop(self.events)
            if kind == ARRIVAL:
                return time, node
            self.push(self.links.upload(node, time), ARRIVAL, node)

    def next_arrival(self) -> float:
        """The arrival of the next message if the waiting nodes go on waiting; inf if all wait."""
        return copy.deepcopy(self).pop_arrival()[0] if self.events else math.inf


def closing_time(queue: Queue, grace: Grace, opened: float, now: float, max_wait: float) -> float | None:
    """The end of the window, if nothing else arrives before; else None."""
    upcoming = queue.next_arrival()
    if upcoming <= opened + max_wait and upcoming < math.inf:
        return None
    if upcoming == math.inf:  # all wait
        return now
    return opened + max_wait if grace == "full" else now


def asynchronous(
    model: nn.Module,
    batch: Callable[[int, int], Batch],
    num_nodes: int,
    *,
    num_updates: int,
    server: Server,
    num_steps: Sequence[int],
    step_seconds: Callable[[int, int], float],
    inner: OptimizerSpec = (torch.optim.AdamW, {"lr": 1e-3}),
    staleness_function: Staleness = "none",
    max_wait: float = 0.0,
    grace: Grace = "full",
    network: Network | None = None,
    max_norm: float | None = None,
    schedule: Schedule | None = None,
    begins: Begins | None = None,
    delay_threshold: int | None = None,
) -> list[Update]:
    """Run until the server has taken `num_updates` updates. `server` starts afresh: give each run its own."""
    nodes = make_nodes(model, num_nodes, inner)
    queue = Queue(Links(network or Network(), num_nodes))
    theta = clone(common.parameters(model))  # the server's
    server.start(theta)
    version, total_steps = 0, 0

    def begin(i: int, time: float) -> None:
        """Node i has the server's parameters at `time`; the numbers of its round do not depend on time."""
        first = nodes[i].own_step
        nodes[i].version = version
        batches = [batch(i, step) for step in range(first, first + num_steps[i])]
        train_round(nodes[i], server.sent(), batches, max_norm, schedule)
        queue.push(round_end(step_seconds, begins, i, first, num_steps[i], time), END, i)

    for i in range(num_nodes):
        begin(i, 0.0)

    updates: list[Update] = []
    arrivals: list[Arrival] = []  # since the last update
    dropped: list[Arrival] = []  # likewise
    waiting: list[int] = []
    opened = math.nan
    while len(updates) < num_updates:
        now, i = queue.pop_arrival()
        if not waiting:
            opened = now
        waiting.append(i)

        staleness = version - nodes[i].version
        weight = staleness_weight(staleness_function, staleness)
        arrival = Arrival(i, nodes[i].round, staleness, weight, nodes[i].loss, num_steps[i], now)
        nodes[i].round += 1
        if delay_threshold is not None and staleness >= delay_threshold:
            dropped.append(arrival)
        else:
            updated = server.receive(nodes[i].Delta, weight)
            arrivals.append(arrival)
            total_steps += num_steps[i]
            if updated:
                version += 1
                updates.append(Update(now, version, arrivals, clone(theta), total_steps, dropped=dropped))
                arrivals, dropped = [], []

        closes = closing_time(queue, grace, opened, now, max_wait)
        if closes is not None:
            for i in sorted(waiting):
                begin(i, queue.links.download(i, closes))
            waiting = []

    return updates
