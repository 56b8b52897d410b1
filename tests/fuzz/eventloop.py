"""Asynchronous training, event by event, in plain Python and torch: what the library must compute.

It imports nothing from vecgym. Every node is a module and an optimizer of torch; what happens next is the first entry
of an agenda; a message to or from a server occupies each of its two ends for that end's own time. It is written from
the papers', the authors' programs and what the strategies' docstrings promise, not from the library's code: nothing is
put off, nothing is computed together, no version is looked up.

At one time things happen in the order of their ranks, and those of one rank by node, then by fragment.
"""

from __future__ import annotations

import copy
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Values = dict[str, Tensor]
End = tuple[str, int]
MakeOptimizer = Callable[[int, Mapping[str, Tensor]], Optimizer]


# ------------------------------------------------------------------------------------------------ time and messages


class Agenda:
    """The events to come: (time, rank, who, kind)."""

    def __init__(self) -> None:
        self.heap: list[Any] = []
        self.serial = itertools.count()

    def add(self, time: float, rank: int, who: int, action: Callable[[float], None]) -> None:
        heapq.heappush(self.heap, (time, rank, who, next(self.serial), action))

    def first(self) -> float:
        return self.heap[0][0] if self.heap else math.inf

    def go_on(self) -> float:
        """Let the first thing happen; return when."""
        time, *_, action = heapq.heappop(self.heap)
        action(time)
        return float(time)


@dataclass
class Lines:
    """The lines between nodes and one server: seconds a byte, and of latency. A node's line has two directions.

    What is sent goes in `messages` that follow one another, each when the one before is there: so many latencies.
    """

    num_bytes: float
    up: Sequence[float]
    down: Sequence[float]
    latency: Sequence[float]
    server: float = 0.0
    messages: int = 1
    free: dict[End, float] = field(default_factory=dict)  # until when each end is busy

    def carry(self, ready: float, ends: Sequence[tuple[End, float]], latency: float, share: float = 1.0) -> float:
        """Send a message over some ends, each busy for its own time and in the order of the calls; when is it there?"""
        for end, pace in ends:
            self.free[end] = max(ready, self.free.get(end, 0.0)) + share * self.num_bytes * pace
        return max(self.free[end] for end, _ in ends) + latency

    def to_server(self, node: int, ready: float, share: float = 1.0, messages: int | None = None) -> float:
        ends = [(("up", node), self.up[node]), (("in", 0), self.server)]
        return self.carry(ready, ends, (self.messages if messages is None else messages) * self.latency[node], share)

    def to_node(self, node: int, ready: float, share: float = 1.0, messages: int | None = None) -> float:
        ends = [(("down", node), self.down[node]), (("out", 0), self.server)]
        return self.carry(ready, ends, (self.messages if messages is None else messages) * self.latency[node], share)

    def swap(self, i: int, j: int, ready: float) -> float:
        """Two nodes send each other a message, both at once: from when all four ends are free, as fast as all can."""
        ends = [("up", i), ("down", j), ("up", j), ("down", i)]
        pace = max(self.up[i], self.up[j], self.down[i], self.down[j])
        start = max(ready, *(self.free.get(end, 0.0) for end in ends))
        latency = self.messages * max(self.latency[i], self.latency[j])
        return self.carry(start, [(end, pace) for end in ends], latency)


def no_lines(num_nodes: int) -> Lines:
    none = [0.0] * num_nodes
    return Lines(0.0, none, none, none)


# ------------------------------------------------------------------------------------------------------------- nodes


@dataclass
class Training:
    """The work of every node between two exchanges."""

    model: nn.Module
    optimizer: MakeOptimizer
    batch: Callable[[int, int], Any]  # (node, its own step)
    seconds: Callable[[int, int], float]  # likewise
    rate: Callable[[int], float] = lambda step: 1.0  # of a node's own step, in units of the learning rate
    max_norm: float | None = None
    nudge: float = 0.0  # how far from the model the parameters begin, relatively

    def start(self) -> Values:
        g = torch.Generator().manual_seed(1)
        params = trained(self.model)
        noise = {name: torch.randn(p.shape, generator=g, dtype=p.dtype) for name, p in params.items()}
        return {name: p.detach() * (1 + self.nudge * noise[name]) for name, p in params.items()}


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


class Node:
    """A module with its optimizer, whose state stays here, and a count of its own steps."""

    def __init__(self, number: int, training: Training) -> None:
        self.number, self.training = number, training
        self.model = copy.deepcopy(training.model).train()
        self.params = trained(self.model)
        self.set(training.start())
        self.optimizer = training.optimizer(number, self.params)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.steps = 0

    @torch.no_grad()
    def set(self, values: Values) -> None:
        for name, value in values.items():
            self.params[name].copy_(value)

    def get(self, names: Sequence[str] | None = None) -> Values:
        return {name: self.params[name].detach().clone() for name in names or self.params}

    def seconds(self, count: int = 1) -> float:
        total = 0.0  # from left to right
        for step in range(self.steps, self.steps + count):
            total += self.training.seconds(self.number, step)
        return total

    def gradient(self) -> float:
        """Leave the gradient of the next step where the optimizer finds it; return the loss."""
        self.model.zero_grad()
        loss = self.model(self.training.batch(self.number, self.steps))
        loss.backward()
        if self.training.max_norm is not None:
            nn.utils.clip_grad_norm_(list(self.params.values()), self.training.max_norm)
        return float(loss.detach())

    def move(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates):
            group["lr"] = rate * self.training.rate(self.steps)
        self.optimizer.step()
        self.steps += 1

    def train(self, start: Values, count: int) -> tuple[Values, float]:
        """Make a round from some parameters: its movement, and its mean loss."""
        self.set(start)
        total = 0.0
        for _ in range(count):
            total += self.gradient()
            self.move()
        return {name: start[name] - p for name, p in self.get().items()}, total / count


# ----------------------------------------------------------------------------------------------------------- servers


class Center:
    """A server's parameters, and what it makes of the mean of some movements."""

    def start(self, theta: Values, num_nodes: int) -> None:
        self.theta = {name: x.clone() for name, x in theta.items()}
        self.num_nodes = num_nodes

    def arrives(self, movement: Values) -> Values:
        """The server's view of one movement when it arrives, before it is weighted."""
        return movement

    def update(self, mean: Values) -> None:
        raise NotImplementedError

    def sends(self) -> Values:
        """The model from which a node begins a round."""
        return {name: x.detach().clone() for name, x in self.theta.items()}


class Optimized(Center):
    """An optimizer of torch, with the movement as its gradient."""

    def __init__(self, make: Callable[[list[Tensor]], Optimizer]) -> None:
        self.make = make

    def start(self, theta: Values, num_nodes: int) -> None:
        super().start(theta, num_nodes)
        # torch has no optimizer of nothing, which a fragment may be: there may be more of them than tensors.
        self.optimizer = self.make(list(self.theta.values()) or [torch.zeros(0, requires_grad=True)])

    def update(self, mean: Values) -> None:
        for name, theta in self.theta.items():
            theta.grad = mean[name]
        self.optimizer.step()


class DelayedNesterov(Center):
    """Algorithm 3 of arXiv 2401.09135; a buffer of None is as many as there are nodes."""

    def __init__(self, lr: float, momentum: float, size: int | None, c: float = 0.0) -> None:
        self.lr, self.momentum, self.size, self.c = lr, momentum, size, c

    def start(self, theta: Values, num_nodes: int) -> None:
        super().start(theta, num_nodes)
        self.N, self.count = self.size or num_nodes, 0
        self.m = {name: torch.zeros_like(x) for name, x in theta.items()}
        self.sum = {name: torch.zeros_like(x) for name, x in theta.items()}

    def update(self, mean: Values) -> None:
        self.count += 1
        full = self.count % self.N == 0
        for name, g in mean.items():
            self.sum[name] = self.sum[name] + g
            if full:
                self.m[name] = self.momentum * self.m[name] + self.sum[name] / self.N
                self.sum[name] = torch.zeros_like(g)
            share = 1 - self.c * self.N + self.c if full else self.c
            self.theta[name] = self.theta[name] - self.lr * (share * self.momentum * self.m[name] + g / self.N)


class HeLoCo(Center):
    """arXiv 2606.00271, as PanocularAI/panofabric-engine has it, panoengine/decentralized/heloco.py.

    Each tensor of a movement is corrected by the momentum m, and weighted by 1 / sqrt(K) then;
    m <- mu m + (1 - mu) G, theta <- theta - lr (G + mu m); a round begins from theta - lr mu m.
    """

    def __init__(self, lr: float, momentum: float) -> None:
        self.lr, self.mu = lr, momentum

    def start(self, theta: Values, num_nodes: int) -> None:
        super().start(theta, num_nodes)
        self.m = {name: torch.zeros_like(x) for name, x in theta.items()}

    def arrives(self, movement: Values) -> Values:
        return {name: corrected(x, self.m[name]) / math.sqrt(self.num_nodes) for name, x in movement.items()}

    def update(self, mean: Values) -> None:
        for name, g in mean.items():
            self.m[name] = self.mu * self.m[name] + (1 - self.mu) * g
            self.theta[name] = self.theta[name] - self.lr * (g + self.mu * self.m[name])

    def sends(self) -> Values:
        return {name: x - self.lr * self.mu * self.m[name] for name, x in self.theta.items()}


def corrected(x: Tensor, m: Tensor) -> Tensor:
    """HeLoCo's algorithm 2."""
    size, pull = float(x.norm()), float(m.norm())
    if size < 1e-8 or pull < 1e-8:
        return x
    cosine = float((x * m).sum()) / (size * pull)
    confidence = size / (size + 3 * pull + 1e-8)
    if cosine >= 0.2:
        return x
    if cosine < 0:
        return x - min(0.5 * -cosine * confidence, 0.5) * cosine * size / pull * m
    turn = min((1 - cosine) * confidence, 1.0)
    mixed = (1 - turn) * x / size + turn * m / pull
    return size * mixed / mixed.norm()


# ------------------------------------------------------------------------------------------------- what is remembered


@dataclass(frozen=True)
class Taken:
    """A movement that is part of an update."""

    node: int
    time: float  # of its arrival
    staleness: int
    num_steps: int
    loss: float


@dataclass(frozen=True)
class Version:
    """An update of the run's server; of AD-PSGD, as many steps as there are nodes."""

    time: float
    taken: list[Taken]
    params: Values  # of the run's model after it
    steps: int  # of all nodes, in the updates so far
    sent: int  # messages of nodes that have arrived by then
    received: int  # messages to nodes that have left by then
    more: dict[str, int]


class Loop:
    """The common part of all loops: nodes, an agenda, and the versions that are made."""

    def __init__(self, training: Training, num_nodes: int) -> None:
        self.agenda = Agenda()
        self.nodes = [Node(i, training) for i in range(num_nodes)]
        self.start = training.start()
        self.steps = self.sent = self.received = 0
        self.made: list[Version] = []

    def begin(self, i: int, now: float) -> None:
        """A node begins what it does."""
        raise NotImplementedError

    def versions(self) -> Iterator[Version]:
        """All of them, without an end."""
        for i in range(len(self.nodes)):
            self.begin(i, 0.0)
        while True:
            self.agenda.go_on()
            yield from self.made
            self.made.clear()

    def make(self, now: float, taken: list[Taken], params: Values, **more: int) -> None:
        self.made.append(Version(now, taken, params, self.steps, self.sent, self.received, more))


def copied(values: Values) -> Values:
    return {name: x.detach().clone() for name, x in values.items()}


def weighted(weight: float, movement: Values) -> Values:
    return {name: weight * x for name, x in movement.items()}


def zeros(like: Values) -> Values:
    return {name: torch.zeros_like(x) for name, x in like.items()}


# ------------------------------------------------------------------------------------------- one server, many rounds


@dataclass
class Round:
    """The present work of a node."""

    version: int  # from which it began
    movement: Values
    loss: float


class Rounds(Loop):
    """Rounds of local steps, and a server that takes each movement when it arrives.

    An update is of the mean of `size` movements, each weighted by its staleness. The first that arrives while nobody
    waits opens a window. Who arrives up to `max_wait` later, the last moment included, waits too; they begin again
    together, in the order of their numbers. The window closes when its time is over or all wait, "full"; or
    "until_last", with the last that arrives in it.
    """

    ENDS, ARRIVES, CLOSES = range(3)

    def __init__(
        self, training: Training, num_steps: Sequence[int], center: Center, weight: Callable[[int], float],
        size: int = 1, max_wait: float = 0.0, grace: str = "full", lines: Lines | None = None,
    ) -> None:  # fmt: skip
        super().__init__(training, len(num_steps))
        self.num_steps, self.center, self.weight, self.size = num_steps, center, weight, size
        self.max_wait, self.grace, self.lines = max_wait, grace, lines or no_lines(len(num_steps))
        center.start(self.start, len(num_steps))
        self.version = 0
        self.rounds: dict[int, Round] = {}
        self.computing: dict[int, float] = {}  # node -> when its round ends
        self.on_the_way: dict[int, float] = {}  # node -> when its movement is there
        self.waiting: list[int] = []
        self.window, self.closes_at = 0, math.inf
        self.taken: list[Taken] = []
        self.held: list[Values] = []

    def begin(self, i: int, now: float) -> None:
        took = self.nodes[i].seconds(self.num_steps[i])
        self.rounds[i] = Round(self.version, *self.nodes[i].train(self.center.sends(), self.num_steps[i]))
        self.computing[i] = now + took
        self.agenda.add(now + took, self.ENDS, i, lambda then: self.ends(i, then))

    def ends(self, i: int, now: float) -> None:
        del self.computing[i]
        self.on_the_way[i] = self.lines.to_server(i, now)
        self.agenda.add(self.on_the_way[i], self.ARRIVES, i, lambda then: self.arrives(i, then))

    def arrives(self, i: int, now: float) -> None:
        del self.on_the_way[i]
        if not self.waiting:
            self.closes_at = now + self.max_wait
            if self.grace == "full" and self.closes_at < math.inf:
                self.close_at(self.closes_at)
        self.waiting.append(i)
        self.sent += 1
        self.take(i, now)
        if len(self.waiting) == len(self.nodes) or (self.grace == "until_last" and self.upcoming() > self.closes_at):
            self.close_at(now)

    def take(self, i: int, now: float) -> None:
        mine = self.rounds[i]
        stale = self.version - mine.version
        self.taken.append(Taken(i, now, stale, self.num_steps[i], mine.loss))
        self.held.append(weighted(self.weight(stale), self.center.arrives(mine.movement)))
        if len(self.held) < self.size:
            return
        self.center.update({name: torch.stack([x[name] for x in self.held]).sum(0) / self.size for name in self.start})
        self.version += 1
        self.steps += sum(one.num_steps for one in self.taken)
        self.make(now, self.taken, copied(self.center.theta))
        self.taken, self.held = [], []

    def upcoming(self) -> float:
        """The arrival of the next movement if the waiting nodes go on waiting."""
        trial, found = copy.deepcopy(self.lines), min(self.on_the_way.values(), default=math.inf)
        for end, i in sorted((end, i) for i, end in self.computing.items()):
            found = min(found, trial.to_server(i, end))
        return found

    def close_at(self, time: float) -> None:
        """Close the present window then, if it is open still."""
        number = self.window
        self.agenda.add(time, self.CLOSES, 0, lambda now: self.close(now) if number == self.window else None)

    def close(self, now: float) -> None:
        self.window += 1
        everybody, self.waiting = sorted(self.waiting), []
        for i in everybody:
            self.received += 1
            self.begin(i, self.lines.to_node(i, now))


# -------------------------------------------------------------------------------------------------------- two levels


@dataclass
class Region:
    center: Center
    lines: Lines
    moved: Values  # since its last message
    taken: list[Taken] = field(default_factory=list)  # likewise
    version: int = 0
    of_top: int = 0  # the version that it has merged last


class TwoLevels(Loop):
    """HALoS (arXiv 2506.04531): a server in each region, and one above them. Nobody waits for anybody.

    What a region moves goes to the top after every `local_updates` arrivals; what comes back is merged, and is no
    movement of the region's. A node begins its next round before a reply of the same time is merged, as in the authors'
    program (utnslab/halos), whose region sends its message and lets the node begin at once.
    """

    ENDS, ARRIVES, BEGINS, LEAVES, THERE, BACK = range(6)

    def __init__(
        self, training: Training, num_steps: Sequence[int], regions: Mapping[tuple[int, ...], tuple[Center, Lines]],
        top: Center, weight: Callable[[int], float], local_updates: int, alpha: float, between: Lines | None,
    ) -> None:  # fmt: skip
        super().__init__(training, len(num_steps))
        self.num_steps, self.top, self.weight = num_steps, top, weight
        self.local_updates, self.alpha, self.between = local_updates, alpha, between or no_lines(len(regions))
        top.start(self.start, len(regions))
        self.top_version = 0
        self.regions: list[Region] = []
        self.home: dict[int, int] = {}
        for r, (members, (center, lines)) in enumerate(regions.items()):
            center.start(self.start, len(members))
            self.regions.append(Region(center, lines, zeros(self.start)))
            self.home |= dict.fromkeys(members, r)
        self.rounds: dict[int, Round] = {}

    def begin(self, i: int, now: float) -> None:
        region, took = self.regions[self.home[i]], self.nodes[i].seconds(self.num_steps[i])
        self.rounds[i] = Round(region.version, *self.nodes[i].train(region.center.sends(), self.num_steps[i]))
        self.agenda.add(now + took, self.ENDS, i, lambda then: self.ends(i, then))

    def ends(self, i: int, now: float) -> None:
        there = self.regions[self.home[i]].lines.to_server(i, now)
        self.agenda.add(there, self.ARRIVES, i, lambda then: self.arrives(i, then))

    def arrives(self, i: int, now: float) -> None:
        r, mine = self.home[i], self.rounds[i]
        region, stale = self.regions[r], self.regions[r].version - mine.version
        before = copied(region.center.theta)
        region.center.update(weighted(self.weight(stale), region.center.arrives(mine.movement)))
        after = region.center.theta
        region.moved = {name: x + before[name] - after[name].detach() for name, x in region.moved.items()}
        region.version += 1
        region.taken.append(Taken(i, now, stale, self.num_steps[i], mine.loss))
        self.sent += 1
        if len(region.taken) == self.local_updates:
            message = region.moved, region.taken, region.of_top
            region.moved, region.taken = zeros(self.start), []
            self.agenda.add(now, self.LEAVES, r, lambda then: self.leaves(r, message, then))
        self.agenda.add(now, self.BEGINS, i, lambda then: self.begins(i, then))

    def begins(self, i: int, now: float) -> None:
        self.received += 1
        self.begin(i, self.regions[self.home[i]].lines.to_node(i, now))

    def leaves(self, r: int, message: Any, now: float) -> None:
        self.agenda.add(self.between.to_server(r, now), self.THERE, r, lambda then: self.there(r, message, then))

    def there(self, r: int, message: Any, now: float) -> None:
        movement, taken, version = message
        stale = self.top_version - version
        self.top.update(self.top.arrives(movement))
        self.top_version += 1
        self.steps += sum(one.num_steps for one in taken)
        self.make(now, taken, copied(self.top.theta), region=r, region_staleness=stale)
        reply = self.top.sends(), self.top_version
        self.agenda.add(self.between.to_node(r, now), self.BACK, r, lambda then: self.back(r, reply))

    def back(self, r: int, reply: tuple[Values, int]) -> None:
        theta, self.regions[r].of_top = reply
        for name, x in self.regions[r].center.theta.items():
            x.copy_((1 - self.alpha) * x + self.alpha * theta[name])  # in place: it may be an optimizer's


# -------------------------------------------------------------------------------------------------------------- pairs


class Pairs(Loop):
    """AD-PSGD (arXiv 1710.06952): after each step a node averages with another one, which is in the midst of its own.

    The gradient is of the parameters with which the step began. With lines the two first send each other what they
    have, and the step and the average happen when both are there. All that end at one time end before any begins.
    """

    COMPUTED, ENDS, BEGINS = range(3)

    def __init__(
        self, training: Training, num_nodes: int, neighbour: Callable[[int, int], int], average_first: bool,
        lines: Lines | None,
    ) -> None:  # fmt: skip
        super().__init__(training, num_nodes)
        self.neighbour, self.average_first, self.lines = neighbour, average_first, lines
        self.losses = [0.0] * num_nodes
        self.changed = [0] * num_nodes  # by averages, since the node began its step
        self.taken: list[Taken] = []

    def begin(self, i: int, now: float) -> None:
        self.changed[i] = 0
        self.losses[i] = self.nodes[i].gradient()
        self.agenda.add(now + self.nodes[i].seconds(), self.COMPUTED, i, lambda then: self.computed(i, then))

    def computed(self, i: int, now: float) -> None:
        j = self.neighbour(i, self.nodes[i].steps)
        there = now if self.lines is None or j == i else self.lines.swap(i, j, now)
        self.agenda.add(there, self.ENDS, i, lambda then: self.ends(i, j, then))

    def ends(self, i: int, j: int, now: float) -> None:
        self.taken.append(Taken(i, now, self.changed[i], 1, self.losses[i]))
        if self.average_first:
            self.average(i, j)
        self.nodes[i].move()
        if not self.average_first:
            self.average(i, j)
        self.steps += 1
        if len(self.taken) == len(self.nodes):
            params = [node.get() for node in self.nodes]
            self.make(now, self.taken, {name: torch.stack([x[name] for x in params]).mean(0) for name in self.start})
            self.taken = []
        self.agenda.add(now, self.BEGINS, i, lambda then: self.begin(i, then))

    def average(self, i: int, j: int) -> None:
        if i == j:
            return
        x, y = self.nodes[i].get(), self.nodes[j].get()
        for node in (self.nodes[i], self.nodes[j]):
            node.set({name: (x[name] + y[name]) / 2 for name in x})
        self.changed[j] += 1
        self.sent, self.received = self.sent + 2, self.received + 2


# ----------------------------------------------------------------------------------------------------------- fragments


@dataclass
class Held:
    """A learner's part of a fragment."""

    base: Values
    version: int = 0
    losses: list[float] = field(default_factory=list)  # since it was merged
    sent_at: int | None = None  # own steps
    arrived: tuple[int, Values] | None = None  # and not merged yet


@dataclass
class Fragment:
    """The server's part of a fragment."""

    names: list[str]
    share: float  # of all bytes
    cuts: int  # messages in which it is sent
    offset: int
    center: Center
    version: int = 0
    messages: dict[int, tuple[float, Values, list[float]]] = field(default_factory=dict)  # node -> time, movement ...


@dataclass(frozen=True)
class Merging:
    """The loop of learners and the server of fragments; `grace` is of the seconds in which a quorum came."""

    parts: Sequence[Sequence[str]]
    cuts: Sequence[int]  # messages in which each is sent
    make: Callable[[], Center]
    quorum: int
    H: int
    overlap: int
    alpha: float
    grace: Callable[[float], float]
    tokens: Sequence[float]
    how: str
    plain: Sequence[str]


class Fragments(Loop):
    """Decoupled DiLoCo (arXiv 2604.21428): learners never stop, a server merges fragments of those who are there."""

    ENDS, ARRIVES, CLOSES, COMES, BEGINS = range(5)

    def __init__(self, training: Training, num_nodes: int, rules: Merging, lines: Lines | None) -> None:
        super().__init__(training, num_nodes)
        self.rules, self.lines = rules, lines or no_lines(num_nodes)
        total, F, self.pieces = sum(map(size_of, self.start.values())), len(rules.parts), []
        for p, names in enumerate(rules.parts):
            share = sum(size_of(self.start[name]) for name in names) / total
            offset = (p + 1) * rules.H // F % rules.H
            self.pieces.append(Fragment(list(names), share, rules.cuts[p], offset, rules.make()))
            self.pieces[p].center.start({name: self.start[name] for name in names}, num_nodes)
        self.held = [[Held(piece.center.sends()) for piece in self.pieces] for _ in self.nodes]

    def begin(self, i: int, now: float) -> None:
        node = self.nodes[i]
        for piece, mine in zip(self.pieces, self.held[i]):
            if mine.arrived and (mine.sent_at is None or node.steps - mine.sent_at >= self.rules.overlap):
                mine.version, mine.base = mine.arrived
                own, a = node.get(piece.names), self.rules.alpha
                node.set({name: a * own[name] + (1 - a) * x for name, x in mine.base.items()})
                mine.arrived, mine.sent_at, mine.losses = None, None, []
        self.agenda.add(now + node.seconds(), self.ENDS, i, lambda then: self.ends(i, then))

    def ends(self, i: int, now: float) -> None:
        node = self.nodes[i]
        loss = node.gradient()
        node.move()
        self.steps += 1
        for p, (piece, mine) in enumerate(zip(self.pieces, self.held[i])):
            mine.losses.append(loss)
            if node.steps % self.rules.H == piece.offset and mine.sent_at is None:
                mine.sent_at = node.steps
                self.send(i, p, now)
        self.agenda.add(now, self.BEGINS, i, lambda then: self.begin(i, then))

    def send(self, i: int, p: int, now: float) -> None:
        piece, mine = self.pieces[p], self.held[i][p]
        own = self.nodes[i].get(piece.names)
        message = mine.version, {name: x - own[name] for name, x in mine.base.items()}, list(mine.losses)
        there = self.lines.to_server(i, now, piece.share, piece.cuts)
        who = i * len(self.pieces) + p
        self.agenda.add(there, self.ARRIVES, who, lambda then: self.arrives(i, p, message, then))

    def arrives(self, i: int, p: int, message: Any, now: float) -> None:
        version, movement, losses = message
        piece = self.pieces[p]
        if version != piece.version:
            return
        piece.messages[i] = now, movement, losses
        if len(piece.messages) == self.rules.quorum:
            wait = now - min(time for time, *_ in piece.messages.values())
            self.close_at(now + self.rules.grace(wait), p)
        if len(piece.messages) == len(self.nodes):
            self.close_at(now, p)

    def close_at(self, time: float, p: int) -> None:
        """Close the present version then, if that has not been done."""
        piece, version = self.pieces[p], self.pieces[p].version
        self.agenda.add(time, self.CLOSES, p, lambda now: self.close(p, now) if version == piece.version else None)

    def close(self, p: int, now: float) -> None:
        piece, rules = self.pieces[p], self.rules
        messages, piece.messages = sorted(piece.messages.items()), {}
        weights = [(len(losses) * rules.tokens[i]) ** 2 / len(losses) for i, (_, _, losses) in messages]
        movements = [movement for _, (_, movement, _) in messages]
        piece.center.update({
            name: merged([x[name] for x in movements], weights, "mean" if name in rules.plain else rules.how)
            for name in piece.names
        })  # fmt: skip
        piece.version += 1
        taken = [Taken(i, time, 0, len(x), sum(x) / len(x)) for i, (time, _, x) in messages]
        self.make(now, taken, {n: x for one in self.pieces for n, x in copied(one.center.theta).items()}, fragment=p)
        for i in range(len(self.nodes)):
            self.reply(i, p, now)

    def reply(self, i: int, p: int, now: float) -> None:
        piece, mine = self.pieces[p], self.held[i][p]
        news, who = (piece.version, copied(piece.center.theta)), i * len(self.pieces) + p
        there = self.lines.to_node(i, now, piece.share, piece.cuts)
        self.agenda.add(there, self.COMES, who, lambda then: setattr(mine, "arrived", news))


def size_of(x: Tensor) -> int:
    return x.numel() * x.element_size()


def merged(movements: Sequence[Tensor], weights: Sequence[float], how: str) -> Tensor:
    """The weighted mean; "radial": the weighted mean length, in the direction of the weighted mean direction."""
    shares = [w / sum(weights) for w in weights]
    if how == "mean":
        return torch.stack([w * x for w, x in zip(shares, movements)]).sum(0)
    length = sum(w * float(x.norm()) for w, x in zip(shares, movements))
    return length * unit(torch.stack([w * unit(x) for w, x in zip(shares, movements)]).sum(0))


def unit(x: Tensor) -> Tensor:
    return x / x.norm() if float(x.norm()) > 0 else torch.zeros_like(x)
