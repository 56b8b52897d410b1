"""Nodes that average with one other after each step, and do not wait: events without any tensors.

>>> from vecgym.engine.events import Stop, schedule
>>> rules = PairRules(num_steps=(1, 1), buffer=2, neighbour=lambda node, step: 1 - node)
>>> for event in schedule(rules, lambda node, step: [1.0, 1.5][node], Stop(updates=1)):
...     print(event)
Arrival(time=1.0, node=0, round=0, version=0, staleness=0, first_step=0, num_steps=1, begin=0.0, end=1.0)
Averaged(time=1.0, node=0, neighbour=1)
Restart(time=1.0, nodes=(0,), version=0, begins=(1.0,))
Arrival(time=1.5, node=1, round=0, version=0, staleness=1, first_step=0, num_steps=1, begin=0.0, end=1.5)
Averaged(time=1.5, node=1, neighbour=0)
Update(time=1.5, version=1, num_arrivals=2)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vecgym.engine.events import Arrival, Averaged, Event, Restart, Rules, StepSeconds
from vecgym.engine.wires import Links, Wires


def _itself(node: int, step: int) -> int:
    return node


@dataclass(frozen=True)
class PairRules(Rules):
    """How nodes work that end each step with an average; `num_steps` is 1 for each, and `buffer` the steps of a row.

    The staleness of an `Arrival` counts the averages that have changed the node's parameters since it began.

    Attributes:
        neighbour: (node, its own count of steps) -> with whom it averages; itself: with nobody.
        average_first: whether a node averages before its step.
    """

    neighbour: Callable[[int, int], int] = _itself
    average_first: bool = False

    def arrives(self, links: Links, node: int, end: float, first_step: int) -> float:
        """Let a node and its neighbour send each other their parameters."""
        other = self.neighbour(node, first_step)
        return end if other == node else links.swap(node, other, end)

    def begins(self, links: Links, node: int, time: float) -> float:
        return time

    def taken(self, event: Event, wires: Wires) -> tuple[dict[int, float], dict[int, float]]:
        if not isinstance(event, Averaged):
            return {}, {}
        pair = dict.fromkeys((event.node, event.neighbour), wires.swapping(event.node, event.neighbour))
        return pair, pair

    def events(self, step_seconds: StepSeconds) -> Iterator[Event]:
        changed = [0] * len(self.num_steps)
        for event in super().events(step_seconds):
            if isinstance(event, Restart):
                for node in event.nodes:
                    changed[node] = 0
            if isinstance(event, Arrival):
                yield from self._ended(event, changed)
            else:
                yield event

    def _ended(self, event: Arrival, changed: list[int]) -> list[Event]:
        other = self.neighbour(event.node, event.first_step)
        step = event._replace(staleness=changed[event.node])
        if other == event.node:
            return [step]
        changed[other] += 1
        average = Averaged(event.time, event.node, other)
        return [average, step] if self.average_first else [step, average]
