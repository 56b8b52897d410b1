"""Timetables of asynchronous runs: events in the order of time, computed late and together.

When a node begins is known before any gradient, so nothing has to be computed at that time. A `train` for all rows that
have begun and are not computed yet is inserted where a result is first needed. Neither the order of events nor any
number depends on that.

>>> from vecgym.simulation.events import Rules, Schedule, Stop, schedule, updates_of
>>> rules = Rules(num_steps=(1, 2))
>>> updates = updates_of(schedule(rules, lambda node, step: 1.0, Stop(updates=3)))
>>> for events in Scheduled(Schedule(rules, updates)).ticks():
...     print([(event.what, event.rows, event.reads) for event in events])
[('train', (0, 1), 1), ('train', (1,), 1), ('arrive', (0,), 0), ('update', None, 0)]
[('restart', (0,), 0), ('train', (0,), 1), ('arrive', (0,), 0), ('update', None, 0)]
[('arrive', (1,), 0), ('update', None, 0)]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from vecgym.simulation.events import Arrival, Happening, Restart, Schedule, Update
from vecgym.simulation.timetable import Event

Pending = tuple[int, ...]


class Scheduled:
    """The events of an asynchronous run whose nodes train in rounds. A tick ends with an update of the server.

    A happening's `what` names the method that handles it: `arrive`, `restart`, `update` or another. The happening is
    the event's `info`; that of a `train` is the number of steps of the round before it.

    Args:
        schedule: all that happens; None is an error.
        together: compute all rows that can be in one call; False: only those that are needed.

    Attributes:
        length: ticks.
        max_steps: most steps of a node.
    """

    def __init__(self, schedule: Schedule | None, together: bool = True) -> None:
        if schedule is None:
            raise ValueError("nodes that do not wait for each other need a schedule: give RunFacts(schedule=).")
        self.schedule, self.together = schedule, together
        self.length, self.max_steps = len(schedule.updates), schedule.max_steps
        self._planned: list[tuple[list[Event], Pending]] = []  # of each tick, what is pending after it

    def ticks(self, start: int = 0) -> Iterator[list[Event]]:
        return (events for events, _ in self._all[start:])

    def columns(self, tick: int) -> dict[str, Any]:
        """Return the history's columns of a tick, counted from 1, except its losses."""
        events, _ = self._all[tick - 1]
        calls = [len(event.rows or ()) for event in events if event.what == "train" and not event.info]
        per_call = sum(calls) / len(calls) if calls else None
        return {**self.schedule.columns(tick), "nodes_per_call": per_call}

    def pending(self, tick: int) -> Pending:
        """Return the nodes that have begun and are not computed yet after this many ticks."""
        return self._all[tick - 1][1] if tick else tuple(range(len(self.schedule.total_steps)))

    def resume(self, tick: int, pending: Sequence[int]) -> None:
        """Continue after a run that may have been shorter, and skipped rounds that it did not need."""
        if tuple(pending) != self.pending(tick):
            self._planned[tick:] = self._plan(tick, pending)

    @property
    def _all(self) -> list[tuple[list[Event], Pending]]:
        if not self._planned:
            self._planned = list(self._plan())
        return self._planned

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
        schedule: all that happens. A happening with a `node` follows that node's earlier steps; one with `arrivals` is
            the server's, and follows all that the nodes have done by then; others come at the end of a tick.
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
        """Yield all that the nodes have done by now."""
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
