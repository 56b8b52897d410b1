"""The events of nodes and a server that does not wait for all of them, without any tensors.

Nodes differ in speed, and none waits for all others. Which node meets which version of the server's parameters depends
on times alone, never on a trained number, so the order of events is known before the first gradient.

A node begins a *round* from the server's parameters, takes its local steps, and sends its movement. The server handles
arrivals in the order of time, ties by node, and makes one update, a new *version*, of every `buffer` of them. A node
that has arrived begins again at once, or waits up to `max_wait` seconds for others; see `Rules`.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

Grace = Literal["full", "until_last"]
StepSeconds = Callable[[int, int], float]  # (node, its own step count) -> seconds of that step


class Happening(Protocol):
    """An event of an asynchronous run; if it concerns certain nodes, these are its `rows`."""

    @property
    def time(self) -> float:
        """Simulated seconds."""

    @property
    def what(self) -> str:
        """The name of the algorithm's method that handles it."""


class Arrival(NamedTuple):
    """The movement of a round reaches the server.

    Attributes:
        time: of the arrival.
        node, round: the node, and the index of its round, from 0.
        version: the version of the server's parameters with which the round began.
        staleness: the number of versions by which the server is ahead of it.
        first_step, num_steps: the node's own step count when the round began, and the steps of the round.
        begin, end: the times of its computation.
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

    @property
    def what(self) -> str:
        return "arrive"

    @property
    def rows(self) -> tuple[int, ...]:
        return (self.node,)


class Update(NamedTuple):
    """The server makes a new version from the last arrivals."""

    time: float
    version: int
    num_arrivals: int

    @property
    def what(self) -> str:
        return "update"


class Restart(NamedTuple):
    """The server sends its parameters to nodes, which begin their next rounds when they have them."""

    time: float
    nodes: tuple[int, ...]
    version: int
    begins: tuple[float, ...]

    @property
    def what(self) -> str:
        return "restart"

    @property
    def rows(self) -> tuple[int, ...]:
        return self.nodes


@dataclass(frozen=True)
class Wires:
    """The links between the nodes and a server: each end serves one message at a time in each direction.

    Each end is busy for its own time, the message's bytes times its seconds per byte, once the message is ready and the
    end is free: a slow sender holds up nobody else. The message arrives a latency after the later of both ends.

    Attributes:
        num_bytes: of a message, up and down.
        up, down: seconds per byte of each node's link.
        latency: seconds, of each node's link.
        server: seconds per byte of the server's link.
    """

    num_bytes: float
    up: Sequence[float]
    down: Sequence[float]
    latency: Sequence[float]
    server: float = 0.0

    def sending(self, node: int, share: float = 1.0) -> float:
        """Return the seconds for which a message, or a share of it, occupies a node's link on the way up."""
        return share * self.num_bytes * self.up[node]

    def receiving(self, node: int, share: float = 1.0) -> float:
        """Return the seconds for which it occupies the link on the way down."""
        return share * self.num_bytes * self.down[node]

    def serving(self, share: float = 1.0) -> float:
        """Return the seconds for which it occupies the server's link, in either direction."""
        return share * self.num_bytes * self.server

    def swapping(self, node: int, other: int) -> float:
        """Return the seconds for which a swap of messages occupies the links of two nodes: those of the slowest end."""
        return max(*map(self.sending, (node, other)), *map(self.receiving, (node, other)))


class Traffic:
    """The messages on the wires: the time until which each end is busy.

    Args:
        wires: None: messages take no time.
        num_nodes: K.
    """

    def __init__(self, wires: Wires | None, num_nodes: int) -> None:
        at_once = (0.0,) * num_nodes
        self.wires = wires or Wires(0.0, at_once, at_once, at_once)
        self.node_up, self.node_down = [0.0] * num_nodes, [0.0] * num_nodes
        self.server_in = self.server_out = 0.0

    def ahead(self) -> Traffic:
        """Return a copy to try messages on, without an effect on the original.

        >>> links = Traffic(Wires(1.0, up=[2.0], down=[1.0], latency=[0.0]), num_nodes=1)
        >>> links.ahead().up(0, ready=0.0), links.up(0, ready=0.0)
        (2.0, 2.0)
        """
        trial = copy.copy(self)
        trial.node_up, trial.node_down = self.node_up[:], self.node_down[:]
        return trial

    def up(self, node: int, ready: float, share: float = 1.0) -> float:
        """Send a movement, or a share of it; return when it reaches the server."""
        wires = self.wires
        self.node_up[node] = max(ready, self.node_up[node]) + wires.sending(node, share)
        self.server_in = max(ready, self.server_in) + wires.serving(share)
        return max(self.node_up[node], self.server_in) + wires.latency[node]

    def swap(self, node: int, other: int, ready: float) -> float:
        """Let two nodes send each other a message of `num_bytes`; return when both have arrived.

        Both messages go at once, when all four ends are free, at the pace of the slowest.

        >>> Traffic(Wires(1.0, up=[2.0, 1.0], down=[1.0, 3.0], latency=[0.5, 0.1]), num_nodes=2).swap(0, 1, ready=1.0)
        4.5
        """
        wires, ends = self.wires, (self.node_up, self.node_down)
        end = max(ready, *(busy[i] for busy in ends for i in (node, other))) + wires.swapping(node, other)
        for busy in ends:
            busy[node] = busy[other] = end
        return end + max(wires.latency[node], wires.latency[other])

    def down(self, node: int, ready: float, share: float = 1.0) -> float:
        """Send the server's parameters, or a share of them; return when they reach the node."""
        wires = self.wires
        self.node_down[node] = max(ready, self.node_down[node]) + wires.receiving(node, share)
        self.server_out = max(ready, self.server_out) + wires.serving(share)
        return max(self.node_down[node], self.server_out) + wires.latency[node]


@dataclass(frozen=True)
class Absences:
    """The absences of nodes. A node that is absent when it would begin a step begins it on its return.

    Attributes:
        seconds: the length of an interval, throughout which a node is present or absent.
        there: (node, interval) -> whether the node is present.

    >>> absences = Absences(seconds=2.0, there=lambda node, interval: interval != 1)
    >>> absences.begins(node=0, time=1.5), absences.begins(node=0, time=2.5)
    (1.5, 4.0)
    """

    seconds: float
    there: Callable[[int, int], bool]

    def is_there(self, node: int, time: float) -> bool:
        """Whether a node is present at a time.

        >>> Absences(2.0, lambda node, interval: interval != 1).is_there(0, 3.9)
        False
        """
        return self.there(node, self._interval(time))

    def begins(self, node: int, time: float) -> float:
        """Return the time if the node is present then, else when it may be back: at the interval's end."""
        interval = self._interval(time)
        return time if self.there(node, interval) else (interval + 1) * self.seconds

    def _interval(self, time: float) -> int:
        return int(time / self.seconds * (1 + 1e-12) + 1e-9)  # an interval's end is in the next one, even if rounded


@dataclass(frozen=True)
class Rules:
    """The rules by which the nodes and the server work together.

    Attributes:
        num_steps: each node's local steps per round.
        buffer: arrivals per update of the server.
        max_wait: a node that arrives while no node waits opens a window of this many seconds. Nodes that arrive in it
            wait, and all of them begin again together when it closes.
        grace: the end of the window: "full": when its time is over, or all nodes wait; "until_last": with its last
            arrival, known in hindsight, so that no node waits in vain.
        wires: None: messages take no time.
        absences: None: all nodes are always present.
        delay_threshold: a movement of this staleness or a larger one is dropped: it makes no update. None: none is.

    >>> rules = Rules(num_steps=(1, 1), delay_threshold=2)
    >>> events = schedule(rules, lambda node, step: [1.0, 2.5][node], Stop(updates=3))
    >>> [(event.node, event.staleness, rules.drops(event)) for event in events if isinstance(event, Arrival)]
    [(0, 0, False), (0, 0, False), (1, 2, True), (0, 0, False)]
    """

    num_steps: tuple[int, ...]
    buffer: int = 1
    max_wait: float = 0.0
    grace: Grace = "full"
    wires: Wires | None = None
    absences: Absences | None = None
    delay_threshold: int | None = None

    def events(self, step_seconds: StepSeconds) -> Iterator[Happening]:
        """Yield the events of a run without an end."""
        return _Rounds(self, step_seconds).events()

    def arrivals(self, events: Sequence[Happening]) -> tuple[Arrival, ...]:
        """Return the arrivals in an update; `events`: all after the previous update, up to this one."""
        return tuple(event for event in events if isinstance(event, Arrival) and not self.drops(event))

    def drops(self, arrival: Arrival) -> bool:
        """Whether a movement is too old for an update."""
        return self.delay_threshold is not None and arrival.staleness >= self.delay_threshold

    def trained(self, events: Sequence[Happening]) -> tuple[Arrival, ...]:
        """Return the arrivals whose local steps count with an update, so that each step counts once."""
        return self.arrivals(events)

    def share(self, events: Sequence[Happening]) -> float:
        """Return the fraction of the model's bytes that an update concerns."""
        return 1.0

    def columns(self, events: Sequence[Happening]) -> dict[str, Any]:
        """Return the history's columns of an update that only these rules have."""
        if self.delay_threshold is None:
            return {}
        return {"num_dropped": sum(isinstance(event, Arrival) and self.drops(event) for event in events)}

    def taken(self, event: Happening, wires: Wires) -> tuple[dict[int, float], dict[int, float]]:
        """Return the seconds, by node, for which the messages of an event occupy the nodes' links, up and down."""
        if isinstance(event, Arrival):
            return {event.node: wires.sending(event.node)}, {}
        return {}, {node: wires.receiving(node) for node in event.nodes} if isinstance(event, Restart) else {}

    def arrives(self, links: Traffic, node: int, end: float, first_step: int) -> float:
        """Send the movement of a node's round; return when it arrives."""
        return links.up(node, end)

    def begins(self, links: Traffic, node: int, time: float) -> float:
        """Send a node the parameters of its next round; return when they arrive."""
        return links.down(node, time)

    def computed(self, node: int, begin: float, first_step: int, end: float, step_seconds: StepSeconds) -> float:
        """Return the seconds that a node has computed by `end` in its current round."""
        time, took = begin, 0.0
        for step in range(first_step, first_step + self.num_steps[node]):
            while self.absences is not None and time < end and (back := self.absences.begins(node, time)) > time:
                time = back
            seconds = step_seconds(node, step)
            took += max(0.0, min(seconds, end - time))
            time += seconds
        return took


class Times(Protocol):
    """The times of a run's steps and messages; `vecgym.clock.asynchronous.TimesOf` implements it for a network."""

    @property
    def nominal(self) -> list[float]:
        """Seconds of a step, of each node."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of each parameter, by name."""

    @property
    def seed(self) -> int:
        """The seed of the run."""

    @property
    def absences(self) -> Absences | None:
        """The absences of nodes; None: there are none."""

    def wires(self, sizes: Sequence[int] | None = None) -> Wires | None:
        """Return the links between nodes and server for messages of these tensors; None: messages take no time."""

    def wires_within(self, regions: Sequence[Sequence[int]]) -> Wires | None:
        """Return the links between the nodes and the servers of their regions."""

    def wires_between(self, network: Any, num_regions: int) -> Wires | None:
        """Return the links between the servers of regions and a global one, on a network of their own."""

    def num_messages(self, sizes: Sequence[int]) -> int:
        """Return the number of messages in which tensors are sent one after the other."""


@dataclass(frozen=True)
class Stop:
    """The end of a run: the first of these limits. At least one is set.

    Attributes:
        updates: the number of versions that the server makes.
        seconds: simulated; no update is made after that.
        steps: local steps in the updates, summed over the nodes.
    """

    updates: int | None = None
    seconds: float | None = None
    steps: int | None = None


def schedule(rules: Rules, step_seconds: StepSeconds, stop: Stop) -> list[Happening]:
    """Return all events of a run in order, up to its last update.

    Raises:
        ValueError: if no step takes any time, so that a run of `Stop(seconds=...)` would never end; if the run has more
            events than can be planned; and if it waits for absent nodes forever.
    """
    events: list[Happening] = []
    most = 1000 * len(rules.num_steps)  # events that can come at one time
    last, steps, version = 0, 0, 0  # index after the last update; steps in the updates; the last version
    for event in rules.events(step_seconds):
        if stop.seconds is not None and event.time > stop.seconds:
            break
        events.append(event)
        if stop.seconds is not None and len(events) > most and event.time == events[-most].time:
            raise ValueError(
                f"{most} events at {event.time} s: rounds that take no time never end. Give compute= positive seconds."
            )
        if isinstance(event, Update):
            steps += sum(arrival.num_steps for arrival in rules.trained(events[last:]))
            last, version = len(events), event.version
            if version == stop.updates or (stop.steps is not None and steps >= stop.steps):
                break
        if rules.absences is not None and len(events) - last > STALLED:
            raise ValueError(
                f"no update in the last {STALLED} events, up to {event.time:.3g} s: the server waits for absent nodes. "
                "Give another availability, or a smaller quorum or buffer."
            )
        if len(events) == SOME:
            _check_end(stop, Stop(version, event.time, steps))
    return events[:last]


SOME, MOST = 4096, 10**7  # events
STALLED = 10**5  # events


def _check_end(stop: Stop, so_far: Stop) -> None:
    """Raise a ValueError if the end is too far to plan, judging by the first `SOME` events."""
    ends = {name: (end, getattr(so_far, name)) for name, end in vars(stop).items() if end is not None}
    rounds = min(end / reached if reached else 1.0 for end, reached in ends.values())
    if SOME * rounds > MOST:
        limits = ", ".join(f"{end:.3g} {name}" for name, (end, _) in ends.items())
        raise ValueError(
            f"a run of {limits} has {SOME * rounds:.1g} events, the first {SOME} of them in {so_far.seconds:.3g} s: "
            f"at most {MOST:.0e} can be planned in advance. Give a shorter run, or longer steps in compute=."
        )


@dataclass(frozen=True, eq=False)
class Schedule:
    """All events of an asynchronous run.

    Attributes:
        rules: the rules by which the nodes and the server work together.
        updates: the events of each update of the server: all since the previous update, up to this one.

    >>> events = schedule(Rules((2, 2)), lambda node, step: 1.0 + node, Stop(updates=3))
    >>> plan = Schedule(Rules((2, 2)), updates_of(events))
    >>> plan.total_steps, plan.local_steps, plan.columns(3)["sim_seconds"]
    ([4, 2], [0, 2, 4, 6], 4.0)
    """

    rules: Rules
    updates: list[list[Happening]]

    @property
    def events(self) -> list[Happening]:
        """All events, in order."""
        return [event for part in self.updates for event in part]

    @cached_property
    def total_steps(self) -> list[int]:
        """The number of steps of each node that arrive."""
        totals = [0] * len(self.rules.num_steps)
        for event in self.events:
            if isinstance(event, Arrival):
                totals[event.node] = event.first_step + event.num_steps
        return totals

    @cached_property
    def max_steps(self) -> int:
        """The largest number of steps of a node."""
        return max(1, *self.total_steps)

    def arrivals(self, update: int) -> list[Arrival]:
        """Return the arrivals in an update, counted from 1."""
        return list(self.rules.arrivals(self.updates[update - 1]))

    @cached_property
    def local_steps(self) -> list[int]:
        """The local steps in the first n updates, for n from 0 to all."""
        totals = [0]
        for events in self.updates:
            totals.append(totals[-1] + sum(arrival.num_steps for arrival in self.rules.trained(events)))
        return totals

    def columns(self, update: int) -> dict[str, Any]:
        """Return the history's columns of an update, except its losses; see `vecgym.records.columns`."""
        events, stale = self.updates[update - 1], [arrival.staleness for arrival in self.arrivals(update)]
        return {
            "sim_seconds": float(events[-1].time), "version": update, "num_arrived": len(stale),
            "staleness": sum(stale) / len(stale), "staleness_max": max(stale),
            "local_steps_total": self.local_steps[update], **self.rules.columns(events),
        }  # fmt: skip


def updates_of(events: Sequence[Happening]) -> list[list[Happening]]:
    """Split events by update: each gets all since the previous update, up to itself.

    >>> [len(part) for part in updates_of(schedule(Rules((1, 1)), lambda node, step: 1.0 + node, Stop(updates=3)))]
    [2, 3, 2]
    """
    parts: list[list[Happening]] = [[]]
    for event in events:
        parts[-1].append(event)
        if isinstance(event, Update):
            parts.append([])
    return parts[:-1]


Entry = tuple[float, int, int, int]  # of an agenda: (time, kind, who, what)


def settled(time: float) -> float:
    """Round to 12 digits: times are equal if they are so on paper, however their sums were rounded.

    >>> 0.1 + 0.2 == 0.3, settled(0.1 + 0.2) == settled(0.3)
    (False, True)
    """
    return float(f"{time:.12g}")


class Agenda:
    """Future events in the order of time: a heap of (time, kind, who, what), with a handler for each kind.

    Events at equal times, to 12 digits, are ordered by kind, then by the index of the node, region or fragment. They
    happen at the time of the first of them.

    >>> class Ticks(Agenda):
    ...     def handlers(self):
    ...         return [self.tick]
    ...
    ...     def tick(self, time, who, what):
    ...         self.push(time + 1.0, 0, who)
    ...         return [(time, who)]
    >>> ticks = Ticks()
    >>> ticks.push(0.5, 0, 7)
    >>> events = ticks.events()
    >>> next(events), next(events)
    ((0.5, 7), (1.5, 7))
    """

    def __init__(self) -> None:
        self.queue: list[tuple[float, int, int, int, float]] = []

    def handlers(self) -> Sequence[Callable[[float, int, int], Iterable[Happening]]]:
        """Return the handlers by kind; each is called with (time, who, what)."""
        raise NotImplementedError

    def push(self, time: float, kind: int, who: int, what: int = 0) -> None:
        heapq.heappush(self.queue, (settled(time), kind, who, what, time))

    def events(self) -> Iterator[Happening]:
        handlers, now = self.handlers(), 0.0
        while True:
            key, kind, who, what, time = heapq.heappop(self.queue)
            now = now if key == settled(now) else time
            yield from handlers[kind](now, who, what)


class Begun(NamedTuple):
    """A round under way."""

    begin: float
    end: float
    version: int


STEPS = 0  # the first kind of a `RoundsAgenda`


class RoundsAgenda(Agenda):
    """An agenda of nodes that train in rounds. Nodes that may be absent take their steps one by one, when present."""

    def __init__(self, rules: Rules, step_seconds: StepSeconds) -> None:
        super().__init__()
        self.rules, self.step_seconds = rules, step_seconds
        K = len(rules.num_steps)
        self.rounds = [0] * K
        self.steps = [0] * K  # of each node, with its current round
        self.began = [Begun(0.0, 0.0, 0)] * K

    def ends(self, time: float, node: int) -> Entry:
        """Return the entry of the end of a node's round."""
        raise NotImplementedError

    def begin(self, node: int, time: float, version: int) -> None:
        """Let a node begin a round from a version."""
        first = self.steps[node]
        self.steps[node] += self.rules.num_steps[node]
        self.began[node] = Begun(time, time, version)
        if self.rules.absences is not None:
            self.push(time, STEPS, node)
            return
        end = time + math.fsum(self.step_seconds(node, step) for step in range(first, self.steps[node]))
        self.began[node] = Begun(time, end, version)
        self.push(*self.ends(end, node))

    def step(self, time: float, node: int, num_done: int) -> Iterable[Happening]:
        """Let a node begin its next step, end its round, or wait until it is back."""
        self.push(*self.next_step(time, node, num_done))
        begun = self.began[node]
        self.began[node] = begun._replace(begin=begun.begin if num_done else time, end=time)
        return ()

    def next_step(self, time: float, node: int, num_done: int) -> Entry:
        """Return a node's next entry after `num_done` steps of its round."""
        count, absences = self.rules.num_steps[node], self.rules.absences
        assert absences is not None
        if num_done == count:
            return self.ends(time, node)
        if (back := absences.begins(node, time)) > time:
            return back, STEPS, node, num_done
        return time + self.step_seconds(node, self.steps[node] - count + num_done), STEPS, node, num_done + 1

    def arrival(self, time: float, node: int, version: int) -> Arrival:
        """Return the arrival of a node's round at a server of this version."""
        begun, count = self.began[node], self.rules.num_steps[node]
        self.rounds[node] += 1
        return Arrival(
            time, node, self.rounds[node] - 1, begun.version, version - begun.version, self.steps[node] - count, count,
            begun.begin, min(begun.end, time),
        )  # fmt: skip


MOVES, CLOSES = range(STEPS + 1, STEPS + 3)  # in this order at equal times
ENDS, ARRIVES = range(2)  # of a round


class _Rounds(RoundsAgenda):
    """The agenda of nodes that train in rounds, a server, and the window in which arrived nodes wait."""

    def __init__(self, rules: Rules, step_seconds: StepSeconds) -> None:
        super().__init__(rules, step_seconds)
        K = len(rules.num_steps)
        self.version = 0
        self.links = Traffic(rules.wires, K)
        self.waiting: list[int] = []
        self.window, self.closes = 0, math.inf  # its number, and when it closes
        self.buffered = 0
        for node in range(K):
            self.begin(node, 0.0, 0)

    def ends(self, time: float, node: int) -> Entry:
        return time, MOVES, node, ENDS

    def handlers(self) -> list[Callable[[float, int, int], Iterable[Happening]]]:
        return [self.step, self._moves, self._closes]

    def _moves(self, time: float, node: int, what: int) -> Iterable[Happening]:
        if what == ENDS:
            self.push(self._send(self.links, node, time), MOVES, node, ARRIVES)
            return ()
        return self._arrives(time, node)

    def _send(self, links: Traffic, node: int, end: float) -> float:
        """Send the movement of a round; return when it arrives."""
        return self.rules.arrives(links, node, end, self.steps[node] - self.rules.num_steps[node])

    def _arrives(self, time: float, node: int) -> Iterator[Happening]:
        if not self.waiting:
            self.window, self.closes = self.window + 1, time + self.rules.max_wait
            self.push(self.closes, CLOSES, self.window)
        self.waiting.append(node)
        arrival = self.arrival(time, node, self.version)
        yield arrival
        self.buffered += not self.rules.drops(arrival)
        if self.buffered == self.rules.buffer:
            self.version += 1
            yield Update(time, self.version, self.buffered)
            self.buffered = 0
        if len(self.waiting) == len(self.rounds) or (
            self.rules.grace == "until_last" and settled(self._following()) > settled(self.closes)
        ):
            yield from self._closes(time, self.window, 0)

    def _following(self) -> float:
        """Return the time of the next arrival if the waiting nodes continue to wait.

        No message is sent: if they begin again now, their messages may come first.
        """
        trial, links = copy.copy(self), self.links.ahead()
        trial.queue = self.queue[:]
        while trial.queue:
            _, kind, node, what, time = heapq.heappop(trial.queue)
            if kind == CLOSES and node == self.window:
                return math.inf
            if kind == MOVES and what == ARRIVES:
                return time
            if kind == STEPS:
                trial.push(*self.next_step(time, node, what))
            elif kind == MOVES:
                trial.push(self._send(links, node, time), MOVES, node, ARRIVES)
        return math.inf

    def _closes(self, time: float, window: int, _: int) -> Iterator[Happening]:
        """Let the waiting nodes begin again."""
        if window != self.window or not self.waiting:  # it is closed already
            return
        nodes, self.waiting = tuple(sorted(self.waiting)), []
        begins = tuple(self.rules.begins(self.links, node, time) for node in nodes)
        for node, begin in zip(nodes, begins):
            self.begin(node, begin, self.version)
        yield Restart(time, nodes, self.version, begins)
