"""The plan of an asynchronous run: what happens when is known before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vecgym.clock.asynchronous import AsyncTimeline, TimesOf, timeline_of
from vecgym.clock.compute import Compute
from vecgym.clock.network import Network
from vecgym.collectives import StackedCollectives
from vecgym.data import Batches
from vecgym.engine import Engine
from vecgym.simulation import Row, RunFacts, Simulation
from vecgym.simulation.events import Schedule, Stop, schedule, updates_of
from vecgym.simulation.state import Metrics
from vecgym.strategy.asynchronous import EventDriven


@dataclass(frozen=True, eq=False)
class AsyncPlan(Schedule):
    """The schedule of an asynchronous run, and what every node does when.

    >>> from vecgym.strategy import AsyncStrategy
    >>> plan = AsyncPlan.of(AsyncStrategy(H=2), 2, Compute([1.0, 3.0]), None, {"w": 4}, seed=0, stop=Stop(updates=3))
    >>> len(plan.updates), plan.max_steps, plan.columns(3)["sim_seconds"], plan.columns(3)["staleness"]
    (3, 6, 6.0, 0.0)
    """

    timeline: AsyncTimeline

    @classmethod
    def of(
        cls, strategy: EventDriven, num_nodes: int, compute: Compute, network: Network | None, sizes: Mapping[str, int],
        seed: int, stop: Stop, availability: Any = None,
    ) -> AsyncPlan:  # fmt: skip
        """Return the plan of a run.

        Args:
            sizes: the bytes of each parameter.
            seed: of the run.
            availability: which nodes are present when; None: all, always.

        Raises:
            ValueError: if the run ends before its first update.
        """
        times = TimesOf(num_nodes, compute, network, sizes, seed, availability)
        rules, seconds = strategy.rules(times), times.seconds
        events = schedule(rules, seconds, stop)
        if not events:
            raise ValueError(f"max_seconds={stop.seconds} ends the run before the first update: give more.")
        return cls(rules, updates_of(events), timeline_of(events, rules, seconds, network, compute))

    def epoch(self, update: int, data: Batches) -> float:
        """Return the passes over the data up to an update, averaged over the nodes."""
        return self.local_steps[update] / data.num_nodes / data.steps_per_epoch

    def seen(self, update: int, data: Batches) -> int:
        """Count the examples of the rounds in an update."""
        limits = data.limits or [data.batch_size] * data.num_nodes
        return sum(
            min(limits[arrival.node], data.width(step))
            for arrival in self.rules.trained(self.updates[update - 1])
            for step in range(arrival.first_step, arrival.first_step + arrival.num_steps)
        )


def stop_of(
    num_steps: int, num_nodes: int, max_updates: int | None, max_seconds: float | None, max_steps: int | None
) -> Stop:
    """Return when a run ends; by default after the `num_steps` of its epochs, averaged over the nodes.

    >>> stop_of(10, 2, max_updates=None, max_seconds=None, max_steps=None)
    Stop(updates=None, seconds=None, steps=20)
    """
    limited = max_updates is not None or max_seconds is not None
    return Stop(max_updates, max_seconds, None if limited and max_steps is None else num_steps * num_nodes)


class Updates(Simulation):
    """The asynchronous training of one model, with the metrics that a run records.

    Args:
        schedule: all that happens.
        read, minibatch_size: see `vecgym.simulation.Simulation`.
    """

    timetable: Any  # `vecgym.simulation.timetable.Scheduled`

    def __init__(
        self, engine: Engine, strategy: EventDriven, schedule: Schedule, read: Any, *, seed: int,
        num_examples: tuple[int, ...] | None = None, minibatch_size: int | None = None,
    ) -> None:  # fmt: skip
        K = len(schedule.rules.num_steps)
        run = RunFacts(K, len(schedule.updates), seed, num_examples=num_examples, schedule=schedule)
        super().__init__(engine, strategy, run, StackedCollectives(K), read, minibatch_size=minibatch_size)
        self.comm.ledger.asynchronous = True
        self.strategy, self.schedule = strategy, schedule
        strategy.inner_optim.check_steps(K, self.timetable.max_steps, "inner optimizer")
        strategy.check_updates(K, self.timetable.length)

    def metrics(self, row: Row) -> Metrics:
        """Return the metrics of an update."""
        return metrics_of(self.strategy, self.schedule, row.tick, row.losses)._replace(transfers=row.transfers)


def metrics_of(strategy: EventDriven, schedule: Schedule, update: int, losses: Tensor) -> Metrics:
    """Return the metrics of an update, counted from 1: a node's loss is the mean over its round, nan without one."""
    arrivals = schedule.arrivals(update)
    outer_lr = strategy.server_rate(schedule.updates[update - 1], len(schedule.rules.num_steps))
    last, nodes = [x.first_step + x.num_steps - 1 for x in arrivals], [x.node for x in arrivals]
    lr = strategy.inner.lr(last, schedule.max_steps, nodes)  # a number, or one for each arrival
    return Metrics(losses, lr, sorted(set(nodes)), outer_lr)


OF_NODES = ("val_losses", "consensus_distance", "consensus_distance_before")


def recorded_of(strategy: Any, num_nodes: int, columns: dict[str, Any]) -> dict[str, Any]:
    """Return the recorded columns of an evaluation: with a server, none of each node, since all have its parameters.

    >>> from vecgym.strategy import ADPSGDStrategy, AsyncStrategy
    >>> columns = {"val_loss": 1.0, "val_loss_local": 1.0, "val_losses": [1.0, 1.0], "consensus_distance_before": 0.0}
    >>> recorded_of(AsyncStrategy(), 2, columns), list(recorded_of(ADPSGDStrategy(), 2, columns))
    ({'val_loss': 1.0}, ['val_loss', 'val_loss_local', 'val_losses'])
    """
    if strategy.server_of(num_nodes) is None:
        return {name: x for name, x in columns.items() if name != "consensus_distance_before"}
    return {name: x for name, x in columns.items() if not name.endswith("_local") and name not in OF_NODES}
