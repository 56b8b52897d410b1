"""Asynchronous runs: what happens when, on given nodes and links, is known before the first step."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vecgym.availability import Availability, Facts
from vecgym.clock.compute import BLOCK, Compute
from vecgym.clock.network import Network, Routes
from vecgym.clock.trace import Bar, PerNode, TimelineBase
from vecgym.collectives.base import bucketed
from vecgym.core import check
from vecgym.data import Batches
from vecgym.simulation.events import (
    Absences,
    Arrival,
    Happening,
    Restart,
    Rules,
    Schedule,
    StepSeconds,
    Stop,
    Update,
    Wires,
    schedule,
    updates_of,
)
from vecgym.strategy.asynchronous import EventDriven


@dataclass(frozen=True)
class TimesOf:
    """The times of steps and messages on given nodes and links; see `vecgym.simulation.events.Times`.

    >>> times = TimesOf(2, Compute([1.0, 2.0]), None, sizes={"w": 8}, seed=0)
    >>> times.nominal, times.seconds(1, 0), times.wires(), times.num_messages([8])
    ([1.0, 2.0], 2.0, None, 1)
    """

    num_nodes: int
    compute: Compute
    network: Network | None
    sizes: Mapping[str, int]
    seed: int
    availability: Availability | None = None

    @cached_property
    def absences(self) -> Absences | None:
        """The absences of nodes: row t of an availability's table is of the t-th step, averaged over the nodes."""
        if self.availability is None:
            return None
        return absences_of(self.availability, self.nominal, self.compute, self.seed)

    @property
    def nominal(self) -> list[float]:
        return self.compute.seconds.expand(self.num_nodes).tolist()

    @property
    def seconds(self) -> StepSeconds:
        """The seconds of each step of each node."""
        nominal, compute = self.nominal, self.compute
        if compute.sigma == 0:
            return lambda node, step: nominal[node]

        @functools.cache
        def factors(node: int, block: int) -> list[float]:
            return (compute.sigma * compute.drawn(node, block)).exp().tolist()

        return lambda node, step: nominal[node] * factors(node, step // BLOCK)[step % BLOCK]

    def wires(self, sizes: Sequence[int] | None = None) -> Wires | None:
        if self.network is None:
            return None
        return wires_of(self.network, self.num_nodes, list(self.sizes.values()) if sizes is None else sizes)

    def wires_within(self, regions: Sequence[Sequence[int]]) -> Wires | None:
        if self.network is None:
            return None
        sizes = list(self.sizes.values())
        outside = wires_of(self.network, self.num_nodes, sizes)
        up, down, latency = list(outside.up), list(outside.down), list(outside.latency)
        for members in regions:
            inside = wires_of(self.network.within(members), len(members), sizes)
            for i, node in enumerate(members):
                up[node], down[node], latency[node] = inside.up[i], inside.down[i], inside.latency[i]
        return Wires(outside.num_bytes, up, down, latency, outside.server)

    def wires_between(self, network: Any, num_regions: int) -> Wires | None:
        """Return the links from the regions' servers to the global one: a `Network`, or (bandwidth, latency)."""
        if network is None:
            return None
        if isinstance(network, (tuple, list)) and len(network) == 2:
            network = Network(*network)
        check.instance("between", network, Network, "a vecgym.clock.Network, or a pair such as (1e9, 0.05)")
        if network.num_nodes not in (None, num_regions):
            raise ValueError(
                f"between is a network of {network.num_nodes} nodes, but there are {num_regions} regions: give one "
                f"bandwidth and one latency, or [{num_regions}]."
            )
        return wires_of(network, num_regions, list(self.sizes.values()))

    def num_messages(self, sizes: Sequence[int]) -> int:
        return 1 if self.network is None else len(bucketed(sizes, self.network.bucket_bytes))


def absences_of(availability: Availability, nominal: Sequence[float], compute: Compute, seed: int) -> Absences:
    """Return when the nodes of an asynchronous run are not there, looked at as far as its time goes.

    Raises:
        ValueError: for one that says what nodes that return take from others, or who only exchanges; and for a time in
            which nobody is there.

    >>> from vecgym.availability import Trace
    >>> absences = absences_of(Trace([[True, False], [True, True]]), [1.0, 2.0], Compute([1.0, 2.0]), seed=0)
    >>> absences.seconds, absences.is_there(1, 1.0), absences.begins(1, 1.0)
    (1.5, False, 1.5)
    """
    facts = Facts(len(nominal), BLOCK, seed, compute)
    if availability.rejoin != "own" or availability.training(facts) is not None:
        raise ValueError(
            f"availability={availability!r}: nodes of an asynchronous strategy go on with what they have when they "
            'return, and wait for nobody: give Dropout, Trace or a function of the step, with rejoin="own".'
        )
    seconds, rows = sum(nominal) / len(nominal), list[list[bool]]()
    if seconds <= 0:
        raise ValueError("availability goes by steps, and these take no time: give compute= positive seconds.")

    def there(node: int, interval: int) -> bool:
        if interval >= len(rows):
            rows.extend(_table(availability, facts, len(rows), interval).tolist())
        if not any(rows[interval]):
            raise ValueError(
                f"availability={availability!r}: no node is there in step {interval} (counted from 0), of "
                f"{seconds:.4g} s each. At least one must be."
            )
        return rows[interval][node]

    return Absences(seconds, there)


def _table(availability: Availability, facts: Facts, first: int, interval: int) -> Tensor:
    """Return who is there from `first` on up to an interval, and further if it is known."""
    further = facts._replace(num_steps=max(BLOCK, 2 * interval + 2))
    try:
        availability.check(further)
    except ValueError:  # a trace that ends
        further = facts._replace(num_steps=interval + 1)
        availability.check(further)
    return availability.present(further)(first, further.num_steps)


def wires_of(network: Network, num_nodes: int, sizes: Sequence[float]) -> Wires:
    """Return the links between the nodes and a server, for messages that carry tensors of these sizes in bytes.

    A message leaves once the previous one has arrived, so each adds a latency. With a matrix, a node uses its slowest
    link.

    >>> network = Network("8 Mbit/s", latency=0.5, bucket_bytes=0)
    >>> wires_of(network, 1, [1000.0]).up, wires_of(network, 1, [300.0, 700.0]).latency
    ([1e-06], [1.0])
    """
    routes = Routes(network, num_nodes)
    lags = routes.lags * len(bucketed(sizes, network.bucket_bytes))
    return Wires(sum(sizes), routes.up.tolist(), routes.down.tolist(), lags.tolist(), routes.server_pace)


@dataclass(frozen=True, repr=False)
class AsyncTimeline(TimelineBase):
    """The timeline of every node in an asynchronous run.

    The order of events depends on the network and the compute times, so the run cannot be priced on another network:
    train again.

    Attributes:
        seconds: when the last update was made.
        utilization: computed / seconds, averaged over the nodes.
        goodput: the same of the steps that the evaluated model has merged; of a step that is merged in some fragments
            only, their part of the bytes.
        update_seconds: when each update was made, `[T]`.
        per_node: how each node spent its time.
        events: arrivals, updates and restarts, in order; see `vecgym.simulation.events`.
        network, compute: of the run. Without a network, messages take no time.
        absences: whether nodes may be absent.

    >>> from vecgym import Trainer
    >>> from vecgym.models import Line
    >>> from vecgym.strategy import AsyncStrategy
    >>> trainer, compute = Trainer(Line(), torch.ones(64)), Compute([1.0, 3.0])
    >>> model = trainer.fit(AsyncStrategy(H=2), 2, max_updates=4, compute=compute, device="cpu", progress=False)
    >>> trainer.timeline()
    AsyncTimeline(4 updates by 2 nodes: 6 s, 100.0 % computing)
    >>> trainer.timeline().bars()[0].kind
    'round'
    >>> trainer.timeline().plot().axes[0].get_xlabel()
    'seconds'
    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     trainer.timeline().save_trace(Path(folder, "run.json"))
    >>> trainer.timeline().update_seconds, trainer.timeline().num_nodes, trainer.timeline().num_steps
    (tensor([2., 4., 6., 6.], dtype=torch.float64), 2, 4)
    """

    update_seconds: Tensor
    events: Sequence[Happening]
    network: Network | None
    absences: bool = False
    goodput: float = 1.0
    _counted = "updates by"

    @property
    def num_steps(self) -> int:
        """T, the number of updates."""
        return len(self.update_seconds)

    def bars(self, first: int = 0, last: int | None = None) -> list[Bar]:
        """Return what every node did in the updates from `first` to before `last`, as bars."""
        first, last = self._within(first, last)
        times = [0.0, *self.update_seconds.tolist()]
        bars: list[Bar] = []
        idle = [0.0] * self.num_nodes  # when each node became idle
        version = 0
        for event in self.events:
            if isinstance(event, Update):
                version = event.version
            if not isinstance(event, Arrival):
                continue
            node, begin, end = event.node, event.begin, event.end
            if end > times[first] and begin < times[last]:
                if begin > idle[node]:
                    why = "waits, or is absent" if self.absences else f"waits for version {event.version}"
                    bars.append(Bar(node, "wait", version, idle[node], begin, why))
                steps = f"round {event.round}, {event.num_steps} steps from version {event.version}"
                bars.append(Bar(node, "round", version, begin, end, steps))
                if event.time > end:
                    bars.append(Bar(node, "send", version, end, event.time, f"movement of round {event.round}"))
            idle[node] = end
        return bars


def timeline_of(
    events: Sequence[Happening], rules: Rules, seconds: StepSeconds, network: Network | None, compute: Compute
) -> AsyncTimeline:
    """Return the timeline of a run from its events.

    >>> from vecgym.simulation.events import Stop, schedule
    >>> rules, seconds = Rules((1, 1)), lambda node, step: [1.0, 3.0][node]
    >>> timeline_of(schedule(rules, seconds, Stop(updates=2)), rules, seconds, None, Compute([1.0, 3.0])).bars()[0].kind
    'round'
    """
    times = [event.time for event in events if isinstance(event, Update)]
    end = times[-1] if times else 0.0
    K = len(rules.num_steps)
    computed = torch.tensor(_computed(events, rules, seconds, end), dtype=torch.float64)
    sent, received = torch.zeros(2, K, dtype=torch.float64)
    if rules.wires is not None:
        for event in events:
            for total, busy in zip((sent, received), rules.taken(event, rules.wires)):
                for node, link_seconds in busy.items():
                    total[node] += link_seconds
    utilization = float((computed / end).mean()) if end > 0 else 1.0
    goodput = _merged(events, rules, seconds) / (K * end) if end > 0 else 1.0
    per_node = PerNode(computed, end - computed, sent, received)
    ends = torch.tensor(times, dtype=torch.float64)
    absences = rules.absences is not None
    return AsyncTimeline(end, utilization, per_node, compute, ends, events, network, absences, goodput)


def _merged(events: Sequence[Happening], rules: Rules, seconds: StepSeconds) -> float:
    """Return how long the nodes have computed the steps that the updates merge."""
    ends: list[list[float]] = [[0.0] for _ in rules.num_steps]  # seconds of each node's first n steps
    total = 0.0
    for update in updates_of(events):
        for arrival in rules.arrivals(update):
            done, last = ends[arrival.node], arrival.first_step + arrival.num_steps
            while len(done) <= last:
                done.append(done[-1] + seconds(arrival.node, len(done) - 1))
            total += rules.share(update) * (done[last] - done[arrival.first_step])
    return total


def _computed(events: Sequence[Happening], rules: Rules, seconds: StepSeconds, end: float) -> list[float]:
    """Return how long each node has computed by the end, in rounds that have arrived and in those in progress."""
    K = len(rules.num_steps)
    computed, begins, steps = [0.0] * K, [0.0] * K, [0] * K
    for event in events:
        if isinstance(event, Arrival):
            round_seconds = event.end - event.begin
            if rules.absences is not None:
                round_seconds = rules.computed(event.node, event.begin, event.first_step, event.end, seconds)
            computed[event.node] += round_seconds
            begins[event.node], steps[event.node] = float("inf"), event.first_step + event.num_steps
        elif isinstance(event, Restart):
            for node, begin in zip(event.nodes, event.begins):
                begins[node] = begin
    for node in range(K):
        if begins[node] < end:
            computed[node] += rules.computed(node, begins[node], steps[node], end, seconds)
    return computed


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
