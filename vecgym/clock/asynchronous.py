"""The time of asynchronous runs: when rounds end on these nodes and links, and what every node did when."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vecgym.clock import trace
from vecgym.clock.compute import BLOCK, Compute
from vecgym.clock.network import Network, Routes
from vecgym.clock.trace import Bar, PerNode, Recorded
from vecgym.collectives.base import bucketed
from vecgym.core import check
from vecgym.engine.events import Arrival, Event, Restart, Rules, StepSeconds, Update
from vecgym.engine.fragments import FragmentRules
from vecgym.engine.pairs import PairRules
from vecgym.engine.regions import RegionRules
from vecgym.engine.wires import Wires
from vecgym.strategy.ad_psgd import ADPSGDStrategy, Neighbours
from vecgym.strategy.asynchronous import AsyncStrategy, EventDriven
from vecgym.strategy.decoupled import DecoupledDiLoCoStrategy
from vecgym.strategy.halos import HALoSStrategy


def rules_of(
    strategy: EventDriven, num_nodes: int, compute: Compute, network: Network | None,
    sizes: Mapping[str, int], seed: int,
) -> tuple[Rules, StepSeconds]:  # fmt: skip
    """Return the rules of a run, and how long each step of each node takes.

    Args:
        sizes: bytes of each parameter, by name.
        seed: of the run, by which neighbours are drawn.

    >>> rules, seconds = rules_of(AsyncStrategy(H=4, dylu=True), 2, Compute([1.0, 2.0]), None, sizes={"w": 8}, seed=0)
    >>> rules.num_steps, seconds(1, 0)
    ((4, 2), 2.0)
    """
    nominal = compute.seconds.expand(num_nodes).tolist()
    seconds, own = step_seconds_of(compute, num_nodes), list(sizes.values())
    if isinstance(strategy, DecoupledDiLoCoStrategy):
        return _of_fragments(strategy, nominal, network, sizes), seconds
    if isinstance(strategy, HALoSStrategy):
        return _of_regions(strategy, strategy.steps_of_rounds(nominal), network, own), seconds
    wires = None if network is None else wires_of(network, num_nodes, own)
    if isinstance(strategy, ADPSGDStrategy):
        neighbour = Neighbours(strategy.weights(num_nodes), seed)
        first = strategy.mix == "before"
        return PairRules((1,) * num_nodes, num_nodes, wires=wires, neighbour=neighbour, average_first=first), seconds
    assert isinstance(strategy, AsyncStrategy)
    steps = strategy.steps_of_rounds(nominal)
    return Rules(steps, strategy.buffer, strategy.max_wait, strategy.grace, wires), seconds


def _of_fragments(
    strategy: DecoupledDiLoCoStrategy, nominal: Sequence[float], network: Network | None, sizes: Mapping[str, int]
) -> FragmentRules:
    K, num_bytes = len(nominal), sum(sizes.values())
    fragments = [[sizes[name] for name in sizes if name in names] for names in strategy.fragments_of(sizes)]
    shares = [sum(own) / num_bytes for own in fragments]
    wires = None if network is None else wires_of(network, K, [num_bytes])
    messages = [1 if network is None else len(bucketed(own, network.bucket_bytes)) for own in fragments]
    step = sum(nominal) / K if strategy.step_seconds is None else strategy.step_seconds
    return FragmentRules(
        (1,) * K, wires=wires, H=strategy.H, shares=tuple(shares), messages=tuple(messages),
        quorum=strategy.quorum or K, overlap=strategy.overlap, gamma=strategy.grace, nominal=step,
        sync=strategy.sync_seconds, tokens=tuple(strategy.tokens_of(K)),
    )  # fmt: skip


def _of_regions(
    strategy: HALoSStrategy, num_steps: tuple[int, ...], network: Network | None, sizes: Sequence[float]
) -> RegionRules:
    regions = strategy.regions_of(len(num_steps))
    between = _between(strategy.between, len(regions))
    return RegionRules(
        num_steps, strategy.local_updates, regions=regions,
        wires=None if network is None else _wires_within(network, regions, sizes),
        between=None if between is None else wires_of(between, len(regions), sizes),
    )  # fmt: skip


def _between(given: Any, num_regions: int) -> Network | None:
    """Return the network of the regions' servers."""
    if given is None:
        return None
    if isinstance(given, (tuple, list)) and len(given) == 2:
        given = Network(*given)
    check.instance("between", given, Network, "a vecgym.clock.Network, or a pair such as (1e9, 0.05)")
    if given.num_nodes not in (None, num_regions):
        raise ValueError(
            f"between is a network of {given.num_nodes} and there are {num_regions} regions: give one bandwidth and "
            f"one latency, or [{num_regions}]."
        )
    found: Network = given
    return found


def _wires_within(network: Network, regions: Sequence[Sequence[int]], sizes: Sequence[float]) -> Wires:
    """Return the links between the nodes and the servers of their regions."""
    K = sum(map(len, regions))
    network.check(K)
    found = wires_of(network, K, sizes)
    up, down, latency = list(found.up), list(found.down), list(found.latency)
    for members in regions:
        own = wires_of(network.within(members), len(members), sizes)
        for i, node in enumerate(members):
            up[node], down[node], latency[node] = own.up[i], own.down[i], own.latency[i]
    return Wires(found.num_bytes, up, down, latency, found.server)


def step_seconds_of(compute: Compute, num_nodes: int) -> StepSeconds:
    """Return how long each node takes for each of its own steps, as a function of plain numbers.

    >>> step_seconds_of(Compute([0.5, 2.0]), num_nodes=2)(1, 7)
    2.0
    """
    nominal = compute.seconds.expand(num_nodes).tolist()
    if compute.sigma == 0:
        return lambda node, step: nominal[node]

    @functools.cache
    def factors(node: int, block: int) -> list[float]:
        drawn: list[float] = (compute.sigma * compute.drawn(node, block)).exp().tolist()
        return drawn

    return lambda node, step: nominal[node] * factors(node, step // BLOCK)[step % BLOCK]


def wires_of(network: Network, num_nodes: int, sizes: Sequence[float]) -> Wires:
    """Return the links between the nodes and a server, for all tensors of so many bytes.

    One message leaves when the one before it is there: so many latencies. With a matrix, a node's way is its slowest.

    >>> network = Network("8 Mbit/s", latency=0.5, bucket_bytes=0)
    >>> wires_of(network, 1, [1000.0]).up, wires_of(network, 1, [300.0, 700.0]).latency
    ([1e-06], [1.0])
    """
    routes = Routes(network, num_nodes)
    lags = routes.lags * len(bucketed(sizes, network.bucket_bytes))
    return Wires(sum(sizes), routes.up.tolist(), routes.down.tolist(), lags.tolist(), routes.server_pace)


@dataclass(frozen=True, repr=False)
class AsyncTimeline(Recorded):
    """What every node did when in an asynchronous run.

    The order of its events depends on the network and the compute times, so it is not priced on others: train again.

    Attributes:
        seconds: of the last update.
        utilization: computed / seconds, the mean over the nodes.
        update_seconds: of each update, `[T]`.
        per_node: where the seconds of each node went.
        events: arrivals, updates and restarts, in order; see `vecgym.engine.events`.
        network, compute: what it is for; without a network messages take no time.

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
    events: Sequence[Event]
    network: Network | None

    plot = trace.plot_timeline  # methods: they take a timeline first
    save_trace = trace.save_trace

    @property
    def num_steps(self) -> int:
        """T, the updates."""
        return len(self.update_seconds)

    def bars(self, first: int = 0, last: int | None = None) -> list[Bar]:
        """What every node did in the updates from `first` to before `last`, for figures and traces."""
        first, last = self._within(first, last)
        times = [0.0, *self.update_seconds.tolist()]
        found: list[Bar] = []
        idle = [0.0] * self.num_nodes  # since when each node has waited
        version = 0
        for event in self.events:
            if isinstance(event, Update):
                version = event.version
            if not isinstance(event, Arrival):
                continue
            node, begin, end = event.node, event.begin, event.end
            if end > times[first] and begin < times[last]:
                if begin > idle[node]:
                    found.append(Bar(node, "wait", version, idle[node], begin, f"waits for version {event.version}"))
                steps = f"round {event.round}, {event.num_steps} steps from version {event.version}"
                found.append(Bar(node, "round", version, begin, end, steps))
                if event.time > end:
                    found.append(Bar(node, "send", version, end, event.time, f"movement of round {event.round}"))
            idle[node] = end
        return found

    def __repr__(self) -> str:
        return self._shown("updates by")


def timeline_of(
    events: Sequence[Event], rules: Rules, seconds: StepSeconds, network: Network | None, compute: Compute
) -> AsyncTimeline:
    """Return the timeline of a run with these events.

    >>> from vecgym.engine.events import Stop, schedule
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
            for total, taken in zip((sent, received), rules.taken(event, rules.wires)):
                for node, took in taken.items():
                    total[node] += took
    used = float((computed / end).mean()) if end > 0 else 1.0
    per_node = PerNode(computed, end - computed, sent, received)
    ends = torch.tensor(times, dtype=torch.float64)
    return AsyncTimeline(end, used, per_node, compute, ends, events, network)


def _computed(events: Sequence[Event], rules: Rules, seconds: StepSeconds, end: float) -> list[float]:
    """How long each node has computed by the end, in rounds that have arrived and in those under way."""
    K = len(rules.num_steps)
    found, begins, steps = [0.0] * K, [0.0] * K, [0] * K
    for event in events:
        if isinstance(event, Arrival):
            found[event.node] += event.end - event.begin
            begins[event.node], steps[event.node] = float("inf"), event.first_step + event.num_steps
        elif isinstance(event, Restart):
            for node, begin in zip(event.nodes, event.begins):
                begins[node] = begin
    for node in range(K):
        if begins[node] < end:
            whole = sum(seconds(node, steps[node] + i) for i in range(rules.num_steps[node]))
            found[node] += min(whole, end - begins[node])
    return found
