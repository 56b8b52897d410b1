"""The timetable of a run: its events and their rows, in plain Python, before the first gradient.

It never depends on a trained number. The nodes that are present, train and exchange, and the batches that they read,
are known in advance, so a timetable can be tested without tensors, and a run can read its data ahead.

>>> run = RunFacts(num_nodes=3, num_steps=4)
>>> for events in Lockstep(run, Mark("meet", 2)).ticks():
...     print([event.what for event in events])
['train']
['train', 'meet']
['train']
['train', 'meet']
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, cast

from vecgym.availability import Presence
from vecgym.simulation.events import Arrival, Happening, Restart, Schedule, Update
from vecgym.simulation.when import When, as_when

# (step, present nodes) -> some of these; None: all of them
Who = Callable[[int, Sequence[int]], "Sequence[int] | None"]
CACHED_COUNTS = 128  # steps whose counts are cached: reading runs ahead


class Event(NamedTuple):
    """Something that happens to some rows of the state.

    Attributes:
        what: the name of the algorithm's method that handles it.
        rows: ascending; None: all.
        counts: step counts that index learning rates, data and random numbers: one for all rows, or one for each.
        reads: batches that each row reads.
        info: further information for the method, such as a `Due`.
        made: optimizer steps that the rows have taken before; None: as many as `counts`.
        group: in a stack, the group whose nodes these are, in each of its configurations; None: rows of the whole
            stack, with the groups' own events in `info`.
        own: step counts that index data and random numbers; None: `counts`.

    >>> Event("train", (0, 2), counts=(5, 4), reads=1).rows
    (0, 2)
    """

    what: str
    rows: tuple[int, ...] | None = None
    counts: int | tuple[int, ...] = 0
    reads: int = 0
    info: Any = None
    made: int | tuple[int, ...] | None = None
    group: int | None = 0
    own: int | tuple[int, ...] | None = None

    @property
    def reads_at(self) -> int | tuple[int, ...]:
        """Step counts that index data and random numbers.

        >>> Event("train", (0, 2), counts=7, own=(3, 4)).reads_at
        (3, 4)
        """
        return self.counts if self.own is None else self.own


class Mark(NamedTuple):
    """A kind of event that is due in some ticks of a `Lockstep`, and its nodes.

    Attributes:
        what: the name of the algorithm's method that handles it.
        when: the steps in which it is due: a `When`, or a number H: every H steps.
        lag: steps from the due step to the event, for nodes that are present at both.
        who: a choice among the nodes that are present in the due step; None: all of them.
        of: its subject, such as a fragment.
        always: whether it also happens, to no rows, if none of its nodes is present.

    >>> Mark("write", 10, lag=2).who is None
    True
    """

    what: str
    when: When | int = 1
    lag: int = 0
    who: Who | None = None
    of: Any = None
    always: bool = False


class Due(NamedTuple):
    """The due step of a marked event: its index, its time and its subject.

    Attributes:
        number: its index among the mark's due steps, the count of selectors, topologies and outer optimizers.
        step: the due step; the event is `lag` steps later.
        of: the subject of the mark.
        made: the sum of the weights of its events so far, if these happen in part.

    >>> Due(number=0, step=9).of is None
    True
    """

    number: int
    step: int
    of: Any = None
    made: Any = None


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run that an algorithm and its timetable may know before the first step.

    Attributes:
        presence: the nodes that are present in each step; None: all, always.
        num_examples: the size of each node's shard, `[K]`; None: unknown.
        schedule: all events, if nodes do not wait for one another.
        names: of the trained parameters, in the model's order; a `Simulation` fills them in.

    >>> RunFacts(num_nodes=4, num_steps=10).presence is None
    True
    """

    num_nodes: int
    num_steps: int = 1
    seed: int = 42
    presence: Presence | None = None
    num_examples: tuple[int, ...] | None = None
    schedule: Schedule | None = None
    names: tuple[str, ...] = ()

    def there(self, step: int) -> tuple[int, ...] | None:
        """Return the nodes that are present in a step; None: all, as before the first step.

        >>> RunFacts(num_nodes=4).there(0) is None
        True
        """
        return None if self.presence is None or step < 0 else self.presence.present(step)


class Timetable(Protocol):
    """The events of a run, tick by tick. A tick ends with a row of the history.

    Attributes:
        length: number of ticks.
        max_steps: most steps of a node: the length of a learning rate schedule.
    """

    length: int
    max_steps: int

    def ticks(self, start: int = 0) -> Iterator[list[Event]]:
        """Return the events of each tick from `start` on."""


class Lockstep:
    """In each tick all present nodes train, or those that `trains` selects; then the marked events that are due follow.

    A node that does not train in every step has its own step count; see `vecgym.availability` for its data and rates.

    Args:
        marks: in the order in which they happen within a tick.
        trains: a function (step, present nodes) -> the nodes that train; None: all do.
        train: the name of the method; not "train" if nodes exchange something before the optimizer's step.
        resting: if `trains` draws nodes for rounds: the others "take" the parameters that a server sends, or "keep"
            their own.

    >>> half = Lockstep(RunFacts(num_nodes=4, num_steps=3), trains=lambda step, rows: rows[step % 2 :: 2])
    >>> for (event,) in half.ticks():
    ...     print(event.rows, event.counts, event.made)
    (0, 2) 0 (0, 0)
    (1, 3) 1 (0, 0)
    (0, 2) 2 (1, 1)
    """

    first = 0  # the first step after which a mark may be due; -1 is before the first step
    reads_ahead = False  # whether nodes read batches of later steps

    def __init__(
        self, run: RunFacts, *marks: Mark, trains: Who | None = None, train: str = "train", resting: str | None = None
    ) -> None:
        self.run, self.trains, self.train, self.resting = run, trains, train, resting
        self.all_train = trains is None and run.presence is None  # in every step
        self.sampled = resting is not None or (run.presence is not None and run.presence.sampled)
        for mark in marks:
            if not isinstance(mark, Mark) or mark.lag < 0:
                raise TypeError(f"{mark!r} among the marks; expected a Mark(what, when) with lag >= 0.")
        self.marks = [mark._replace(when=as_when(mark.when, "H")) for mark in marks]
        self.length = self.max_steps = run.num_steps
        self._made = {0: [0] * run.num_nodes}  # by step

    def ticks(self, start: int = 0) -> Iterator[list[Event]]:
        return map(self.events, range(start, self.length))

    def events(self, step: int) -> list[Event]:
        """Return the events of one step."""
        present, training = self.run.there(step), self.nodes_that_train(step)
        counts, made = self.counts(step, training)
        presence = self.run.presence
        back = () if presence is None or presence.rejoin == "own" else presence.returning(step)
        events = [Event("rejoin", info=back)] if back else []
        if training != ():
            events.append(Event(self.train, training, counts, 1, made=made, own=made if self.sampled else None))
        for mark in self.marks:
            begun, when = step - mark.lag, cast(When, mark.when)
            if begun >= self.first and when.due(begun):
                rows = _both(self._selected(mark.who, begun, self.run.there(begun)), present)
                if rows != () or mark.always:
                    due = Due(when.count(begun), begun, mark.of)
                    counts, made = self.counts(step, rows)
                    events.append(Event(mark.what, rows, counts, info=due, made=made))
        return events

    def nodes_that_train(self, step: int) -> tuple[int, ...] | None:
        """Return the nodes that train; None: all."""
        presence = self.run.presence
        rows = self._selected(self.trains, step, self.run.there(step))
        return rows if presence is None else _both(rows, presence.training(step))

    def made(self, step: int) -> list[int]:
        """Count the steps in which each node has trained before this one."""
        if self.all_train:
            return [step] * self.run.num_nodes
        if step not in self._made:
            begin = max((before for before in self._made if before < step), default=0)
            counts = list(self._made.get(begin, [0] * self.run.num_nodes))
            for before in range(begin, step):
                training = self.nodes_that_train(before)
                for node in range(self.run.num_nodes) if training is None else training:
                    counts[node] += 1
                self._made[before + 1] = list(counts)
                if len(self._made) > CACHED_COUNTS:
                    del self._made[next(iter(self._made))]
        return list(self._made[step])

    def members(self, step: int) -> tuple[int, ...] | None:
        """Return the nodes whose parameters' mean is the run's model after a step; None: all.

        They were present in it and, if nodes that are not drawn keep their values, have trained.
        """
        there = self.run.there(step)
        return there if self.resting != "keep" or step < 0 else _both(self._every(step), there) or there

    def trained(self, step: int) -> tuple[int, ...] | None:
        """Return the nodes whose buffers' mean is in the run's model after a step; None: all.

        They have trained, and are members; if nodes are drawn for rounds, all nodes that have trained.
        """
        every, members = self._every(step), self.members(step)
        return (every if self.sampled else _both(members, every)) or every or members

    def _every(self, step: int) -> tuple[int, ...]:
        """Return the nodes that have trained by the end of a step."""
        return tuple(node for node, count in enumerate(self.made(step + 1)) if count)

    def counts(self, step: int, rows: tuple[int, ...] | None) -> tuple[Any, Any]:
        """Return the counts that index the rates of these rows, and the rows' own step counts if these differ.

        >>> Lockstep(RunFacts(num_nodes=2), trains=lambda step, rows: rows[step % 2 :]).counts(3, (1,))
        (3, (3,))
        """
        if self.all_train:
            return step, None
        steps = self.made(step)
        made = tuple(steps) if rows is None else tuple(steps[row] for row in rows)
        return (step, made) if self.run.presence is None or self.sampled else (made, None)

    def _selected(self, who: Who | None, step: int, rows: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if who is None:
            return rows
        present = range(self.run.num_nodes) if rows is None else rows
        nodes = who(step, present)
        if nodes is None or len(nodes) == self.run.num_nodes:
            return rows
        if strangers := set(nodes).difference(present):
            raise ValueError(f"step {step}: {who!r} names {sorted(strangers)}, which are not among {list(present)}.")
        return tuple(sorted(set(nodes)))


def _both(a: tuple[int, ...] | None, b: Iterable[int] | None) -> tuple[int, ...] | None:
    """Return the rows that are in both; None stands for all."""
    if a is None or b is None:
        return a if b is None else tuple(b)
    second = set(b)
    return tuple(row for row in a if row in second)


Pending = tuple[int, ...]  # nodes


class Scheduled:
    """The events of an asynchronous run whose nodes train in rounds. A tick ends with an update of the server.

    The times at which nodes begin are known before any gradient, so a round can be computed later: events come in the
    order of time, and a `train` for all rows that have begun and are not computed yet is inserted where a result is
    first needed. Neither the order of events nor any number depends on that.

    A happening's `what` names the method that handles it: `arrive`, `restart`, `update` or another. The happening is
    the event's `info`; the `info` of a `train` is the number of steps of the round before it.

    Args:
        schedule: all events of the run; None is an error.
        together: compute all rows that can be computed in one call; False: only the rows that are needed.

    Attributes:
        length: the number of ticks.
        max_steps: the largest number of steps of a node.

    >>> from vecgym.simulation.events import Rules, Stop, schedule, updates_of
    >>> rules = Rules(num_steps=(1, 2))
    >>> updates = updates_of(schedule(rules, lambda node, step: 1.0, Stop(updates=3)))
    >>> for events in Scheduled(Schedule(rules, updates)).ticks():
    ...     print([(event.what, event.rows, event.reads) for event in events])
    [('train', (0, 1), 1), ('train', (1,), 1), ('arrive', (0,), 0), ('update', None, 0)]
    [('restart', (0,), 0), ('train', (0,), 1), ('arrive', (0,), 0), ('update', None, 0)]
    [('arrive', (1,), 0), ('update', None, 0)]
    """

    def __init__(self, schedule: Schedule | None, together: bool = True) -> None:
        if schedule is None:
            raise ValueError("nodes that do not wait for each other need a schedule: give RunFacts(schedule=).")
        self.schedule, self.together = schedule, together
        self.length, self.max_steps = len(schedule.updates), schedule.max_steps

    def ticks(self, start: int = 0) -> Iterator[list[Event]]:
        return (events for events, _ in self._planned[start:])

    def columns(self, tick: int) -> dict[str, Any]:
        """Return the history's columns of a tick, counted from 1, except its losses."""
        events, _ = self._planned[tick - 1]
        calls = [len(event.rows or ()) for event in events if event.what == "train" and not event.info]
        per_call = sum(calls) / len(calls) if calls else None
        return {**self.schedule.columns(tick), "nodes_per_call": per_call}

    def pending(self, tick: int) -> Pending:
        """Return the nodes that have begun and are not computed yet after this many ticks."""
        return self._planned[tick - 1][1] if tick else tuple(range(len(self.schedule.total_steps)))

    def trained(self, tick: int) -> tuple[int, ...] | None:
        """Return the nodes with a result that is used up to a tick, counted from 0; None: all."""
        return tuple(node for node, first in enumerate(self._first) if first <= tick) or None

    @cached_property
    def _first(self) -> list[float]:
        """The tick of each node's first arrival."""
        first = [math.inf] * len(self.schedule.total_steps)
        for tick, happenings in enumerate(self.schedule.updates):
            for happening in happenings:
                if isinstance(happening, Arrival):
                    first[happening.node] = min(first[happening.node], tick)
        return first

    def resume(self, tick: int, pending: Sequence[int]) -> None:
        """Continue after a run that may have been shorter, and skipped rounds that it did not need."""
        if tuple(pending) != self.pending(tick):
            self._planned[tick:] = self._plan(tick, pending)

    @cached_property
    def _planned(self) -> list[tuple[list[Event], Pending]]:
        """The events of each tick, and the nodes that are pending after it."""
        return list(self._plan())

    def _plan(self, start: int = 0, pending: Sequence[int] | None = None) -> Iterator[tuple[list[Event], Pending]]:
        """Yield the events of each tick from `start` on, and the nodes that are pending after it."""
        totals = self.schedule.total_steps
        arrived, begun = [0] * len(totals), set(range(len(totals)))  # begun, not computed yet
        for tick, happenings in enumerate(self.schedule.updates):
            if tick == start and pending is not None:
                begun = set(pending)
            events: list[Event] = []
            for happening in happenings:
                if isinstance(happening, Arrival):
                    if happening.node in begun:
                        ready = [node for node in sorted(begun) if arrived[node] < totals[node]]
                        rows = ready if self.together else [happening.node]
                        events += _round(rows, arrived, self.schedule.rules.num_steps)
                        begun.difference_update(rows)
                    arrived[happening.node] += happening.num_steps
                elif isinstance(happening, Restart):
                    begun.update(happening.nodes)
                events.append(event_of(happening))
            if tick >= start:
                yield events, tuple(sorted(begun))


def _round(rows: Sequence[int], steps: Sequence[int], num_steps: Sequence[int]) -> Iterator[Event]:
    """Let nodes train a round after `steps` steps. Nodes with a shorter round are left out of the later events."""
    trained = 0
    for until in sorted({num_steps[node] for node in rows}):
        here = tuple(node for node in rows if num_steps[node] >= until)
        yield Event("train", here, tuple(steps[node] + trained for node in here), until - trained, info=trained)
        trained = until


def event_of(happening: Happening) -> Event:
    """Return the event that changes the rows of a happening.

    >>> event_of(Restart(time=1.0, nodes=(2,), version=0, begins=(1.0,)))[:2]
    ('restart', (2,))
    """
    return Event(happening.what, getattr(happening, "rows", None), getattr(happening, "first_step", 0), info=happening)


class Waves(Scheduled):
    """The events of nodes that never stop: single steps, deferred until the server needs their result.

    Each node's happenings stay in order; nodes that are due for a step take it together.

    Args:
        schedule: all events. An event with a `node` follows that node's earlier steps; one with `arrivals` is the
            server's, and follows all earlier steps of the nodes; others come at the end of a tick.
    """

    def _plan(self, start: int = 0, pending: Sequence[int] | None = None) -> Iterator[tuple[list[Event], Pending]]:
        K = len(self.schedule.total_steps)
        steps, waiting = [0] * K, [deque[Happening]() for _ in range(K)]
        for happenings in self.schedule.updates:
            events, last = list[Event](), list[Event]()
            for happening in happenings:
                if isinstance(happening, Arrival) or hasattr(happening, "node"):
                    waiting[happening.node].append(happening)
                elif hasattr(happening, "arrivals"):
                    events += self._caught_up(steps, waiting)
                    events.append(event_of(happening))
                elif not isinstance(happening, (Restart, Update)):
                    last.append(event_of(happening))
            yield events + last, ()  # nothing is pending when the server has what it needs

    def _caught_up(self, steps: list[int], waiting: list[deque[Happening]]) -> Iterator[Event]:
        """Yield the events of the nodes up to this time."""
        while any(waiting):
            for node, queue in enumerate(waiting):
                while queue and not isinstance(queue[0], Arrival):
                    yield event_of(queue.popleft())._replace(counts=steps[node])
            ready = [node for node, queue in enumerate(waiting) if queue]
            for rows in [ready] if self.together else [[node] for node in ready]:
                if rows:
                    yield Event("train", tuple(rows), tuple(steps[node] for node in rows), 1, info=0)
            for node in ready:
                waiting[node].popleft()
                steps[node] += 1
