"""What happens when in an asynchronous run: all of it is known before its first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vecgym.clock.asynchronous import AsyncTimeline, rules_of, timeline_of
from vecgym.clock.compute import Compute
from vecgym.clock.network import Network
from vecgym.data import Batches
from vecgym.engine.asynchronous import total_steps, updates_of
from vecgym.engine.events import Arrival, Closed, Delivered, Event, Rules, Stop, arrivals_of, schedule, trained_in
from vecgym.strategy.asynchronous import EventDriven


@dataclass(frozen=True, eq=False)
class AsyncPlan:
    """The events of an asynchronous run, and what follows from them alone.

    Attributes:
        rules: how the nodes and the server work together.
        updates: the events of each update of the server.
        timeline: what every node does when.

    >>> from vecgym.strategy import AsyncStrategy
    >>> plan = AsyncPlan.of(AsyncStrategy(H=2), 2, Compute([1.0, 3.0]), None, {"w": 4}, seed=0, stop=Stop(updates=3))
    >>> len(plan.updates), plan.max_steps, plan.columns(3)["sim_seconds"], plan.columns(3)["staleness"]
    (3, 6, 6.0, 0.0)
    """

    rules: Rules
    updates: list[list[Event]]
    timeline: AsyncTimeline

    @classmethod
    def of(
        cls, strategy: EventDriven, num_nodes: int, compute: Compute, network: Network | None, sizes: Mapping[str, int],
        seed: int, stop: Stop,
    ) -> AsyncPlan:  # fmt: skip
        """Return the plan of a run.

        Args:
            sizes: the bytes of each parameter.
            seed: of the run.

        Raises:
            ValueError: for a run that ends before its first update.
        """
        rules, seconds = rules_of(strategy, num_nodes, compute, network, sizes, seed)
        events = schedule(rules, seconds, stop)
        if not events:
            raise ValueError(
                f"max_seconds={stop.seconds} ends the run before the first update of the server: give more."
            )
        return cls(rules, updates_of(events), timeline_of(events, rules, seconds, network, compute))

    @property
    def events(self) -> list[Event]:
        """All of them, in order."""
        return [event for part in self.updates for event in part]

    @cached_property
    def max_steps(self) -> int:
        """The most steps that a node makes."""
        return max(1, *total_steps(self.events, len(self.rules.num_steps)))

    def arrivals(self, update: int) -> list[Arrival]:
        """Return those in an update, counted from 1."""
        return list(arrivals_of(self.updates[update - 1]))

    @cached_property
    def local_steps(self) -> list[int]:
        """The local steps in the first updates, from none to all of them."""
        totals = [0]
        for update in range(1, len(self.updates) + 1):
            totals.append(totals[-1] + sum(part.num_steps for part in trained_in(self.updates[update - 1])))
        return totals

    def columns(self, update: int) -> dict[str, Any]:
        """Return what the history says of an update, besides its losses; see `vecgym.records.columns`."""
        stale = [arrival.staleness for arrival in self.arrivals(update)]
        return {
            "sim_seconds": float(self.timeline.update_seconds[update - 1]), "version": update,
            "num_arrived": len(stale), "staleness": sum(stale) / len(stale), "staleness_max": max(stale),
            "local_steps_total": self.local_steps[update], **_columns_of(self.updates[update - 1]),
        }  # fmt: skip

    def epoch(self, update: int, data: Batches) -> float:
        """Return the passes over the data up to an update, the mean over the nodes."""
        return self.local_steps[update] / data.num_nodes / data.steps_per_epoch

    def seen(self, update: int, data: Batches) -> int:
        """Return how many examples the rounds in an update have seen."""
        own = data.limits or [data.batch_size] * data.num_nodes
        return sum(
            min(own[arrival.node], data.width(step))
            for arrival in trained_in(self.updates[update - 1])
            for step in range(arrival.first_step, arrival.first_step + arrival.num_steps)
        )


def _columns_of(events: Sequence[Event]) -> dict[str, Any]:
    """Return the columns of an update that only some strategies have."""
    for event in events:
        if isinstance(event, Delivered):
            return {"region": event.region, "region_staleness": event.staleness}
        if isinstance(event, Closed):
            return {"fragment": event.fragment}
    return {}


def stop_of(
    num_steps: int, num_nodes: int, max_updates: int | None, max_seconds: float | None, max_steps: int | None
) -> Stop:
    """Return when a run ends; without anything said, after the `num_steps` of its epochs, the mean over the nodes.

    >>> stop_of(10, 2, max_updates=None, max_seconds=None, max_steps=None)
    Stop(updates=None, seconds=None, steps=20)
    """
    given = max_updates is not None or max_seconds is not None
    return Stop(max_updates, max_seconds, None if given and max_steps is None else num_steps * num_nodes)
