"""When nodes meet a server that does not wait for all of them: a simulation of events, without any tensors.

Nodes differ in speed, and none waits for all others. Which of them meets which version of the server's parameters
depends on times alone, never on a number that is trained, so the order of events is known before the first gradient.

A node begins a *round* from the server's parameters, makes its local steps, and sends its movement. The server takes
arrivals in the order of time, ties by node; of every `buffer` of them it makes one update, a new *version*. Who has
arrived begins again at once, or waits up to `max_wait` seconds for others; see `Rules`.

>>> events = schedule(Rules(num_steps=(2, 2), max_wait=0.0), lambda node, step: [1.0, 2.5][node], Stop(updates=3))
>>> for event in events:
...     print(event)
Arrival(time=2.0, node=0, round=0, version=0, staleness=0, first_step=0, num_steps=2, begin=0.0, end=2.0)
Update(time=2.0, version=1, num_arrivals=1)
Restart(time=2.0, nodes=(0,), version=1, begins=(2.0,))
Arrival(time=4.0, node=0, round=1, version=1, staleness=0, first_step=2, num_steps=2, begin=2.0, end=4.0)
Update(time=4.0, version=2, num_arrivals=1)
Restart(time=4.0, nodes=(0,), version=2, begins=(4.0,))
Arrival(time=5.0, node=1, round=0, version=0, staleness=2, first_step=0, num_steps=2, begin=0.0, end=5.0)
Update(time=5.0, version=3, num_arrivals=1)
"""

from __future__ import annotations

import copy
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from vecgym.engine.wires import Links, Wires

Grace = Literal["full", "until_last"]
StepSeconds = Callable[[int, int], float]  # (node, its own count of steps) -> seconds of that step


class Arrival(NamedTuple):
    """The movement of a round is at the server.

    Attributes:
        time: of the arrival.
        node, round: whose, and its how many-th, from 0.
        version: of the server's parameters from which the round began.
        staleness: how many versions the server is ahead of that.
        first_step, num_steps: the node's own count of steps at its begin, and how many it made.
        begin, end: of its computing.
    """

    time: float
    node: int
    round: int
    version: int
    staleness: int
    first_step: int
    num_steps: int
    begin: float
    end: float


class Update(NamedTuple):
    """The server makes a new version of the last arrivals."""

    time: float
    version: int
    num_arrivals: int


class Restart(NamedTuple):
    """Nodes are sent the server's parameters, and begin their next rounds when they have them."""

    time: float
    nodes: tuple[int, ...]
    version: int
    begins: tuple[float, ...]


class Sent(NamedTuple):
    """A region's server has collected what it sends to the global one; see `vecgym.engine.regions`.

    Attributes:
        time: when that is so.
        region, number: whose message, and its how many-th, from 0.
    """

    time: float
    region: int
    number: int


class Delivered(NamedTuple):
    """A region's message is at the global server, which makes its next version of it.

    Attributes:
        staleness: how many versions the global server is ahead of the one that the region had when it sent.
        arrivals: of the movements in the message.
    """

    time: float
    region: int
    number: int
    staleness: int
    arrivals: tuple[Arrival, ...]


class Replied(NamedTuple):
    """The global server's reply to a region's message is at the region's server."""

    time: float
    region: int
    number: int


class Averaged(NamedTuple):
    """A node that ends a step averages with another; see `vecgym.engine.pairs`."""

    time: float
    node: int
    neighbour: int


class Uploaded(NamedTuple):
    """A node sends what it has moved of a fragment, in so many steps; see `vecgym.engine.fragments`."""

    time: float
    node: int
    fragment: int
    number: int
    num_steps: int


class Merged(NamedTuple):
    """A node merges a version of a fragment of the server's, before its next step."""

    time: float
    node: int
    fragment: int
    version: int


class Closed(NamedTuple):
    """The server makes a version of a fragment, whose version it was, of these movements with these weights."""

    time: float
    fragment: int
    version: int
    arrivals: tuple[Arrival, ...]
    weights: tuple[float, ...]


class Forgotten(NamedTuple):
    """Nobody needs a version of a fragment any more, or a message of it, (node, number), which has come too late."""

    time: float
    fragment: int
    version: int | None
    message: tuple[int, int] | None


Event = Arrival | Update | Restart | Sent | Delivered | Replied | Averaged | Uploaded | Merged | Closed | Forgotten


def arrivals_of(events: Sequence[Event]) -> tuple[Arrival, ...]:
    """Return the arrivals of which an update is made; `events`: all after the update before, up to it."""
    messages = [event for event in events if isinstance(event, (Delivered, Closed))]
    if messages:
        return tuple(arrival for message in messages for arrival in message.arrivals)
    return tuple(event for event in events if isinstance(event, Arrival))


def trained_in(events: Sequence[Event]) -> tuple[Arrival, ...]:
    """Return the arrivals whose local steps are counted with an update: each step once."""
    if any(isinstance(event, Closed) for event in events):  # movements of fragments share their steps
        return tuple(event for event in events if isinstance(event, Arrival))
    return arrivals_of(events)


@dataclass(frozen=True)
class Rules:
    """How the nodes and the server work together.

    Attributes:
        num_steps: local steps of each node's rounds.
        buffer: arrivals of which the server makes one update.
        max_wait: the first to arrive when nobody waits opens a window of so many seconds. Who arrives in it waits, and
            all of them begin again together when it closes.
        grace: when it closes: "full": when its time is over, or all nodes wait; "until_last": with the last arrival in
            it, known in hindsight, so that nobody waits in vain.
        wires: None: messages take no time.
    """

    num_steps: tuple[int, ...]
    buffer: int = 1
    max_wait: float = 0.0
    grace: Grace = "full"
    wires: Wires | None = None

    def events(self, step_seconds: StepSeconds) -> Iterator[Event]:
        """Yield what happens, without an end."""
        return _Run(self, step_seconds).events()

    def taken(self, event: Event, wires: Wires) -> tuple[dict[int, float], dict[int, float]]:
        """Return for how long the messages of an event take nodes' links, up and down: seconds by node."""
        if isinstance(event, Arrival):
            return {event.node: wires.sending(event.node)}, {}
        return {}, {node: wires.receiving(node) for node in event.nodes} if isinstance(event, Restart) else {}

    def arrives(self, links: Links, node: int, end: float, first_step: int) -> float:
        """Send what a node's round has moved; return when it is there."""
        return links.up(node, end)

    def begins(self, links: Links, node: int, time: float) -> float:
        """Send what a node's next round begins with; return when it is there."""
        return links.down(node, time)

    def seconds_of_round(self, node: int, first_step: int, step_seconds: StepSeconds) -> float:
        """Return how long a round takes, summed from left to right."""
        took = 0.0
        for step in range(first_step, first_step + self.num_steps[node]):
            took += step_seconds(node, step)
        return took


@dataclass(frozen=True)
class Stop:
    """When a run ends: with the first of these that comes true; at least one is given.

    Attributes:
        updates: versions that the server makes.
        seconds: simulated; an update after that is not made.
        steps: local steps in the updates, of all nodes together.
    """

    updates: int | None = None
    seconds: float | None = None
    steps: int | None = None


def schedule(rules: Rules, step_seconds: StepSeconds, stop: Stop) -> list[Event]:
    """Return all events of a run in their order, up to its last update.

    Raises:
        ValueError: where time does not go on, so that a run of `Stop(seconds=...)` would never end; and for a run of
            more events than can be planned.
    """
    events: list[Event] = []
    last, steps, version = 0, 0, 0  # the place after the last update; the steps of the rounds in it; its version
    since = (0.0, 0)
    for event in rules.events(step_seconds):
        if stop.seconds is not None and event.time > stop.seconds:
            break
        events.append(event)
        if isinstance(event, Update):
            steps += sum(arrival.num_steps for arrival in trained_in(events[last:]))
            last, version = len(events), event.version
            if version == stop.updates or (stop.steps is not None and steps >= stop.steps):
                break
        since = _moving(since, event, len(events), rules)
        if len(events) == SOME:
            _check_end(stop, Stop(version, event.time, steps))
    return events[:last]


def _moving(since: tuple[float, int], event: Event, count: int, rules: Rules) -> tuple[float, int]:
    """Return when time went on last, and at which event."""
    time, place = since
    if event.time > time:
        return event.time, count
    if count - place > 1000 * (len(rules.num_steps) + rules.buffer):
        raise ValueError(
            f"{count - place} events at {time} s: rounds that take no time never end. Give compute= positive seconds."
        )
    return since


SOME, MOST = 4096, 10**7  # events


def _check_end(stop: Stop, now: Stop) -> None:
    """Raise a ValueError if the end is further than can be planned, given where `SOME` events have led."""
    ends = {name: (end, getattr(now, name)) for name, end in vars(stop).items() if end is not None}
    rounds = min(end / reached if reached else 1.0 for end, reached in ends.values())
    if SOME * rounds > MOST:
        told = ", ".join(f"{end:.3g} {name}" for name, (end, _) in ends.items())
        raise ValueError(
            f"a run of {told} has {SOME * rounds:.1g} events, of which the first {SOME} take {now.seconds:.3g} s: its "
            f"order is planned beforehand, of at most {MOST:.0e} events. Give fewer, or longer steps in compute=."
        )


class _Run:
    """The state of the simulation.

    Two heaps of what is under way: messages that leave, in the order in which they are ready, and those that arrive.
    """

    def __init__(self, rules: Rules, step_seconds: StepSeconds) -> None:
        self.rules, self.step_seconds = rules, step_seconds
        K = len(rules.num_steps)
        self.version = 0
        self.rounds = [0] * K
        self.steps = [0] * K  # done by each node
        self.began = [Begun(0.0, 0.0, 0)] * K
        self.ready: list[tuple[float, int]] = []  # (end of a round, node)
        self.arriving: list[tuple[float, int]] = []
        self.links = Links(rules.wires, K) if rules.wires is not None else None
        self.waiting: list[int] = []
        self.closes = math.inf  # when the window does
        self.buffered = 0
        for node in range(K):
            self._begin(node, 0.0)

    def events(self) -> Iterator[Event]:
        while True:
            time, node = self._next()
            if self.closes < time:
                yield self._restart(self.closes)
                continue
            if not self.waiting:
                self.closes = time + self.rules.max_wait
            yield from self._arrive(time, node)
            if self._closed(time):
                yield self._restart(time)

    def _next(self) -> tuple[float, int]:
        """Return the next arrival: (time, node); it stays where it is.

        What is sent after the window closes may have to queue behind what those send who begin again then.
        """
        while self.ready and self.ready[0][0] <= self.closes and self.ready[:1] <= (self.arriving[:1] or self.ready):
            end, node = heapq.heappop(self.ready)
            first_step = self.steps[node] - self.rules.num_steps[node]
            time = end if self.links is None else self.rules.arrives(self.links, node, end, first_step)
            heapq.heappush(self.arriving, (time, node))
        return self.arriving[0] if self.arriving else (math.inf, -1)

    def _arrive(self, time: float, node: int) -> Iterator[Event]:
        heapq.heappop(self.arriving)
        self.waiting.append(node)
        begun, count = self.began[node], self.rules.num_steps[node]
        staleness = self.version - begun.version
        first = self.steps[node] - count
        yield Arrival(
            time, node, self.rounds[node], begun.version, staleness, first, count, begun.begin, begun.end
        )  # fmt: skip
        self.rounds[node] += 1
        self.buffered += 1
        if self.buffered == self.rules.buffer:
            self.version += 1
            yield Update(time, self.version, self.buffered)
            self.buffered = 0

    def _following(self) -> float:
        """Return when the next arrival is if those who wait go on waiting, as far as that is before the window closes.

        Nothing is sent: if they do begin again now, what they send may come first.
        """
        if not self.ready or self.ready[0][0] > self.closes:
            return self.arriving[0][0] if self.arriving else math.inf
        if self.links is None:
            return min([self.ready[0], *self.arriving[:1]])[0]
        ahead = copy.copy(self)
        ahead.ready, ahead.arriving, ahead.links = self.ready[:], self.arriving[:], self.links.ahead()
        return ahead._next()[0]

    def _closed(self, time: float) -> bool:
        """Whether those who wait begin again now: the window is over, or nobody else comes before it is."""
        if len(self.waiting) == len(self.rounds):
            return True
        following = self._following()
        if self.rules.grace == "until_last" or self.rules.max_wait == 0:
            return following > self.closes
        return self.closes == time and following > time

    def _restart(self, time: float) -> Restart:
        nodes = tuple(sorted(self.waiting))
        self.waiting, self.closes = [], math.inf
        links, rules = self.links, self.rules
        begins = tuple(time if links is None else rules.begins(links, node, time) for node in nodes)
        for node, begin in zip(nodes, begins):
            self._begin(node, begin)
        return Restart(time, nodes, self.version, begins)

    def _begin(self, node: int, begin: float) -> None:
        end = begin + self.rules.seconds_of_round(node, self.steps[node], self.step_seconds)
        self.steps[node] += self.rules.num_steps[node]
        self.began[node] = Begun(begin, end, self.version)
        heapq.heappush(self.ready, (end, node))


class Begun(NamedTuple):
    """A round under way."""

    begin: float
    end: float
    version: int
