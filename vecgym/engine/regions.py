"""Two levels of servers that do not wait: nodes, a server in each region, a global one. Events without any tensors.

A node's movement goes to the server of its region, which makes a version of it, and of every `buffer` of them sends a
message to the global server, which makes a version of that, an `Update`, and replies.

At one time: ends of rounds, arrivals, begins of rounds (all three by node), messages that leave the regions, arrivals
at the global server, replies (all three by region). So a node whose arrival makes its region send begins its next round
before the reply, as in the paper's code, also where messages between servers take no time.

>>> from vecgym.engine.events import Stop, schedule
>>> rules = RegionRules(num_steps=(1, 1), buffer=2, regions=((0,), (1,)))
>>> for event in schedule(rules, lambda node, step: [1.0, 4.0][node], Stop(updates=1)):
...     print(event if not isinstance(event, Delivered) else event._replace(arrivals=()))
Arrival(time=1.0, node=0, round=0, version=0, staleness=0, first_step=0, num_steps=1, begin=0.0, end=1.0)
Restart(time=1.0, nodes=(0,), version=1, begins=(1.0,))
Arrival(time=2.0, node=0, round=1, version=1, staleness=0, first_step=1, num_steps=1, begin=1.0, end=2.0)
Sent(time=2.0, region=0, number=0)
Restart(time=2.0, nodes=(0,), version=2, begins=(2.0,))
Delivered(time=2.0, region=0, number=0, staleness=0, arrivals=())
Update(time=2.0, version=1, num_arrivals=2)
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from vecgym.engine.events import (
    Arrival,
    Begun,
    Delivered,
    Event,
    Links,
    Replied,
    Restart,
    Rules,
    Sent,
    StepSeconds,
    Update,
    Wires,
)

ENDED, ARRIVES, BEGINS, LEAVES, DELIVERED, REPLIED = range(6)  # in their order at one time


@dataclass(frozen=True)
class RegionRules(Rules):
    """How nodes, the servers of regions and a global one work together.

    Attributes:
        buffer: arrivals at a region's server of which it sends a message.
        wires: of each node and its region's server; each of these has a link of its own.
        regions: the nodes of each.
        between: of each region's server and the global one; None: messages take no time.
    """

    regions: tuple[tuple[int, ...], ...] = ()
    between: Wires | None = None

    def events(self, step_seconds: StepSeconds) -> Iterator[Event]:
        return _Run(self, step_seconds).events()


class _Message(NamedTuple):
    number: int
    version: int  # of the global server, that the region has had last
    arrivals: tuple[Arrival, ...]


@dataclass
class _Region:
    links: Links
    version: int = 0
    of_global: int = 0  # the version that it has had last
    arrivals: list[Arrival] = field(default_factory=list)  # since the last message
    number: int = 0  # messages so far
    leaving: list[_Message] = field(default_factory=list)  # on their way, oldest first
    returning: list[tuple[int, int]] = field(default_factory=list)  # (number, version) of replies on their way


class _Run:
    """The state of the simulation: what will happen, as a heap of (time, kind, node or region)."""

    def __init__(self, rules: RegionRules, step_seconds: StepSeconds) -> None:
        self.rules, self.step_seconds = rules, step_seconds
        K, R = len(rules.num_steps), len(rules.regions)
        self.regions = [_Region(Links(rules.wires or Wires.none(K), K)) for _ in range(R)]
        self.region_of = {node: r for r, members in enumerate(rules.regions) for node in members}
        self.between = Links(rules.between or Wires.none(R), R)
        self.version = 0
        self.rounds, self.steps = [0] * K, [0] * K
        self.began = [Begun(0.0, 0.0, 0)] * K
        self.queue: list[tuple[float, int, int]] = []
        for node in range(K):
            self._begin(node, 0.0)

    def events(self) -> Iterator[Event]:
        handlers = [self._ended, self._arrives, self._begins, self._leaves, self._delivered, self._replied]
        while True:
            time, kind, who = heapq.heappop(self.queue)
            yield from handlers[kind](time, who)

    def _push(self, time: float, kind: int, who: int) -> None:
        heapq.heappush(self.queue, (time, kind, who))

    def _ended(self, time: float, node: int) -> list[Event]:
        self._push(self.regions[self.region_of[node]].links.up(node, time), ARRIVES, node)
        return []

    def _arrives(self, time: float, node: int) -> list[Event]:
        r, begun, count = self.region_of[node], self.began[node], self.rules.num_steps[node]
        region = self.regions[r]
        arrival = Arrival(
            time, node, self.rounds[node], begun.version, region.version - begun.version, self.steps[node] - count,
            count, begun.begin, begun.end,
        )  # fmt: skip
        self.rounds[node] += 1
        region.version += 1
        region.arrivals.append(arrival)
        self._push(time, BEGINS, node)
        if len(region.arrivals) < self.rules.buffer:
            return [arrival]
        region.leaving.append(_Message(region.number, region.of_global, tuple(region.arrivals)))
        region.arrivals, region.number = [], region.number + 1
        self._push(time, LEAVES, r)
        return [arrival, Sent(time, r, region.number - 1)]

    def _leaves(self, time: float, r: int) -> list[Event]:
        self._push(self.between.up(r, time), DELIVERED, r)
        return []

    def _delivered(self, time: float, r: int) -> list[Event]:
        message = self.regions[r].leaving.pop(0)
        staleness = self.version - message.version
        self.version += 1
        self.regions[r].returning.append((message.number, self.version))
        self._push(self.between.down(r, time), REPLIED, r)
        return [
            Delivered(time, r, message.number, staleness, message.arrivals),
            Update(time, self.version, len(message.arrivals)),
        ]

    def _replied(self, time: float, r: int) -> list[Event]:
        number, self.regions[r].of_global = self.regions[r].returning.pop(0)
        return [Replied(time, r, number)]

    def _begins(self, time: float, node: int) -> list[Event]:
        region = self.regions[self.region_of[node]]
        begin = region.links.down(node, time)
        self._begin(node, begin)
        return [Restart(time, (node,), region.version, (begin,))]

    def _begin(self, node: int, begin: float) -> None:
        end = begin + self.rules.seconds_of_round(node, self.steps[node], self.step_seconds)
        self.steps[node] += self.rules.num_steps[node]
        self.began[node] = Begun(begin, end, self.regions[self.region_of[node]].version)
        self._push(end, ENDED, node)
