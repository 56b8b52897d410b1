"""Learners that never stop, and a server that merges fragments of whoever is there: events without any tensors.

Every step of a node is an `Arrival` at its end and a `Restart` at its begin. At one time: ends of steps, messages at
the server (both by node, then fragment), fragments that close, what the server sends at the nodes, begins of steps.

>>> from vecgym.engine.events import Stop, schedule
>>> rules = FragmentRules(num_steps=(1, 1), H=1, shares=(1.0,), quorum=1, tokens=(1.0, 1.0))
>>> events = schedule(rules, lambda node, step: [1.0, 4.0][node], Stop(updates=2))
>>> [type(event).__name__ for event in events]
['Arrival', 'Uploaded', 'Closed', 'Update', 'Merged', 'Restart', 'Arrival', 'Uploaded', 'Closed', 'Update']
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from vecgym.engine.events import (
    Arrival,
    Closed,
    Event,
    Forgotten,
    Links,
    Merged,
    Restart,
    Rules,
    StepSeconds,
    Update,
    Uploaded,
    Wires,
)

ENDED, DELIVERED, CLOSES, RECEIVED, BEGINS = range(5)  # in their order at one time


@dataclass(frozen=True)
class FragmentRules(Rules):
    """How learners and the server of fragments work together; `num_steps` is 1 for each.

    Attributes:
        H: steps between two messages of a fragment.
        shares: of each fragment, of the bytes of all.
        messages: in which each fragment is sent, one after the other; (): one.
        quorum: messages of which an update may be made.
        overlap: steps after its message before which a node does not merge what it gets.
        gamma: the grace; and `nominal`, the seconds of a step, and `sync`: see
            `vecgym.strategy.DecoupledDiLoCoStrategy`.
        tokens: of a step of each node.
    """

    H: int = 1
    shares: tuple[float, ...] = ()
    messages: tuple[int, ...] = ()
    quorum: int = 1
    overlap: int = 0
    gamma: float = 0.0
    nominal: float = 0.0
    sync: float = 0.0
    tokens: tuple[float, ...] = ()

    def events(self, step_seconds: StepSeconds) -> Iterator[Event]:
        return _Run(self, step_seconds).events()

    def taken(self, event: Event, wires: Wires) -> tuple[dict[int, float], dict[int, float]]:
        if isinstance(event, Uploaded):
            return {event.node: wires.sending(event.node, self.shares[event.fragment])}, {}
        if isinstance(event, Closed):
            share = self.shares[event.fragment]
            return {}, {node: wires.receiving(node, share) for node in range(len(self.num_steps))}
        return {}, {}

    def offset(self, fragment: int) -> int:
        """Return after which own steps, modulo H, a node sends a fragment."""
        return (fragment + 1) * self.H // len(self.shares) % self.H


@dataclass
class _Copy:
    """What a node knows of a fragment."""

    version: int = 0
    merged_at: int = 0  # own step
    sent_at: int | None = None  # own step, if it has sent since it merged
    number: int = 0  # messages so far
    way: list[Arrival] = field(default_factory=list)  # messages under way, oldest first
    coming: list[int] = field(default_factory=list)  # versions under way, oldest first
    arrived: int | None = None  # a version that is not merged yet


@dataclass
class _Fragment:
    """The server's side of a fragment."""

    version: int = 0
    messages: dict[int, Arrival] = field(default_factory=dict)  # by node
    users: dict[int, int] = field(default_factory=dict)  # version -> nodes that may still merge it


class _Run:
    """The state of the simulation, with a heap of (time, kind, node or fragment, fragment or version)."""

    def __init__(self, rules: FragmentRules, step_seconds: StepSeconds) -> None:
        self.rules, self.step_seconds = rules, step_seconds
        K, F = len(rules.num_steps), len(rules.shares)
        self.links = Links(rules.wires or Wires.none(K), K)
        self.copies = [[_Copy() for _ in range(F)] for _ in range(K)]
        self.fragments = [_Fragment() for _ in range(F)]
        self.version = 0
        self.steps, self.begins = [0] * K, [0.0] * K
        self.queue: list[tuple[float, int, int, int]] = []
        for node in range(K):
            self._begin(node, 0.0)

    def events(self) -> Iterator[Event]:
        handlers = [self._ended, self._delivered, self._closes, self._received, self._begins]
        while True:
            time, kind, who, what = heapq.heappop(self.queue)
            yield from handlers[kind](time, who, what)

    def _push(self, time: float, kind: int, who: int, what: int) -> None:
        heapq.heappush(self.queue, (time, kind, who, what))

    def _more_latency(self, node: int, p: int) -> float:
        """Return how much later a fragment of several messages is there than one of a single message."""
        messages = self.rules.messages
        return (messages[p] - 1) * self.links.wires.latency[node] if messages else 0.0

    def _begin(self, node: int, time: float) -> None:
        self.begins[node] = time
        self._push(time + self.step_seconds(node, self.steps[node]), ENDED, node, 0)

    def _ended(self, time: float, node: int, _: int) -> Iterator[Event]:
        step, begin = self.steps[node], self.begins[node]
        yield Arrival(time, node, step, 0, 0, step, 1, begin, time)
        self.steps[node] += 1
        for p, copy in enumerate(self.copies[node]):
            if self.steps[node] % self.rules.H == self.rules.offset(p) and copy.sent_at is None:
                first, count = copy.merged_at, self.steps[node] - copy.merged_at
                copy.way.append(Arrival(time, node, copy.number, copy.version, 0, first, count, begin, time))
                copy.sent_at = self.steps[node]
                there = self.links.up(node, time, self.rules.shares[p]) + self._more_latency(node, p)
                self._push(there, DELIVERED, node, p)
                yield Uploaded(time, node, p, copy.number, count)
                copy.number += 1
        self._push(time, BEGINS, node, 0)

    def _delivered(self, time: float, node: int, p: int) -> list[Event]:
        message, fragment, rules = self.copies[node][p].way.pop(0)._replace(time=time), self.fragments[p], self.rules
        if message.version != fragment.version:  # too late
            return [Forgotten(time, p, None, (node, message.round))]
        fragment.messages[node] = message
        if len(fragment.messages) == rules.quorum:
            wait = time - min(other.time for other in fragment.messages.values())
            grace = rules.gamma * max(0.0, rules.overlap * rules.nominal - wait - rules.sync)
            self._push(time + grace, CLOSES, p, fragment.version)
        if len(fragment.messages) == len(rules.num_steps):
            self._push(time, CLOSES, p, fragment.version)
        return []

    def _closes(self, time: float, p: int, version: int) -> list[Event]:
        fragment, rules = self.fragments[p], self.rules
        if version != fragment.version:  # it has been closed already
            return []
        arrivals = tuple(fragment.messages[node] for node in sorted(fragment.messages))
        weights = tuple((x.num_steps * rules.tokens[x.node]) ** 2 / x.num_steps for x in arrivals)
        fragment.version, fragment.messages = version + 1, {}
        fragment.users[version + 1] = len(rules.num_steps)
        self.version += 1
        for node in range(len(rules.num_steps)):
            self.copies[node][p].coming.append(version + 1)
            there = self.links.down(node, time, rules.shares[p]) + self._more_latency(node, p)
            self._push(there, RECEIVED, node, p)
        return [Closed(time, p, version, arrivals, weights), Update(time, self.version, len(arrivals))]

    def _received(self, time: float, node: int, p: int) -> list[Event]:
        copy = self.copies[node][p]
        older, copy.arrived = copy.arrived, copy.coming.pop(0)
        return [] if older is None else self._released(time, p, older)

    def _begins(self, time: float, node: int, _: int) -> Iterator[Event]:
        for p, copy in enumerate(self.copies[node]):
            waited = copy.sent_at is None or self.steps[node] - copy.sent_at >= self.rules.overlap
            if copy.arrived is not None and waited:
                yield Merged(time, node, p, copy.arrived)
                yield from self._released(time, p, copy.arrived)
                copy.version, copy.merged_at = copy.arrived, self.steps[node]
                copy.arrived = copy.sent_at = None
        yield Restart(time, (node,), self.version, (time,))
        self._begin(node, time)

    def _released(self, time: float, p: int, version: int) -> list[Event]:
        """A node will not merge a version, any more."""
        users = self.fragments[p].users
        users[version] -= 1
        if users[version]:
            return []
        del users[version]
        return [Forgotten(time, p, version, None)]
