"""What a run would send and need: dry runs, the required bandwidth, and how many exchanges fit into a time."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from vecgym.clock.compute import Compute
from vecgym.clock.cost import ALL_REDUCE
from vecgym.clock.network import Network
from vecgym.clock.timeline import Timeline, price
from vecgym.clock.units import latency as seconds
from vecgym.clock.units import readable_bandwidth, readable_time
from vecgym.collectives.ledger import Ledger, Transfer
from vecgym.collectives.stacked import Announced
from vecgym.core import check
from vecgym.core.errors import warn
from vecgym.core.tree import Tree
from vecgym.engine import Engine
from vecgym.simulation import RunFacts, Simulation
from vecgym.strategy import Strategy
from vecgym.strategy.asynchronous import check_synchronous
from vecgym.strategy.per_rank import as_strategy
from vecgym.strategy.simulated import nothing_to_read

LOWEST, HIGHEST = 1.0, 1e18  # bit/s
PRECISION = 1e-4  # relative


def dry_run(
    model: nn.Module, strategy: Strategy, num_nodes: int, max_steps: int, *, seed: int = 42,
    unused: Collection[str] = (),
) -> Ledger:  # fmt: skip
    """Return the ledger of a run without training: make the exchanges only, on tensors with shapes but no values.

    It equals the ledger of `Trainer.fit` with this `seed`. Nothing is computed or stored, so the model may have any
    size, and may be on the device "meta".

    Args:
        model: nodes exchange its trainable parameters.
        strategy: must not depend on the values that it exchanges; no built-in strategy does. A strategy written for one
            rank is not supported.
        num_nodes: K.
        max_steps: the number of steps.
        seed: of the run; it determines which nodes meet and which coordinates are drawn.
        unused: names of parameters that do not influence the loss; a run detects and skips them.

    Raises:
        ValueError, TypeError: for arguments that no run accepts, and for strategies that depend on values.

    >>> from vecgym.strategy import DiLoCoStrategy
    >>> with torch.device("meta"):
    ...     model = torch.nn.Linear(100_000, 100_000, dtype=torch.bfloat16)  # 10 billion parameters
    >>> dry_run(model, DiLoCoStrategy("adamw", H=100), num_nodes=8, max_steps=500)
    Ledger(5 collectives, 175,001,750,000 bytes sent per node)
    """
    check.instance("model", model, nn.Module, "an nn.Module")
    check.instance("strategy", strategy, Strategy, "a Strategy object such as DiLoCoStrategy('adamw', H=100)")
    strategy = as_strategy(strategy, model)
    K, T = check.integer("num_nodes", num_nodes), check.integer("max_steps", max_steps)
    if not strategy.pure:
        raise ValueError(
            f"{type(strategy).__name__} is written for one rank, which a dry run does not support: its step needs "
            "values. Train a few steps, and price trainer.ledger."
        )
    check_synchronous(strategy)
    strategy.check(K, T)
    comm, seed = Announced(K), check.seed("seed", seed)
    params = {
        name: torch.empty_like(p, device="meta", requires_grad=False)
        for name, p in model.named_parameters()
        if p.requires_grad and name not in unused
    }
    run = RunFacts(K, T, seed, num_examples=(1,) * K)  # weights change no bytes
    simulation = DrySimulation(cast(Engine, Shapes(params)), strategy, run, comm, nothing_to_read)
    try:
        state = simulation.init()
        for events in simulation.timetable.ticks():
            step = state.tick
            state, row = simulation.tick(state, events, iter(()), pure=True)
            comm.ledger.add(step, row.transfers)
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error):
            raise
        raise ValueError(
            f"{strategy!r} depends on the values that it exchanges, and a dry run has none: train a few steps, and "
            "price trainer.ledger."
        ) from error
    return comm.ledger


class DrySimulation(Simulation):
    """A simulation in which nothing has values."""

    dry = True


class Shapes:
    """A stand-in for an engine: parameters that have shapes and no values.

    >>> Shapes({"w": torch.empty(3, device="meta")}).buffers
    {}
    """

    written: frozenset[str] = frozenset()

    def __init__(self, params: Tree) -> None:
        self.params, self.buffers = params, Tree()


def required_bandwidth(
    transfers: Ledger | Sequence[Sequence[Transfer]],
    compute: Compute,
    utilization: float = 0.95,
    *,
    latency: Any = 0.0,
    sizes: Mapping[str, float] | None = None,
    **options: Any,
) -> float:
    """Return the least bandwidth of every node's link, in bit/s, at which nodes compute for this fraction of the time.

    It is accurate to 0.01 %. It is `math.inf` if no bandwidth is enough, because of the latency or of stragglers; a
    warning tells which, and what would help.

    Args:
        transfers, compute, sizes: see `price`.
        utilization: computed / (computed + waited), in (0, 1).
        latency: seconds, or a text such as "50 ms".
        options: of `Network`: `all_reduce`, `all_gather`, `bucket_bytes`, `server_bandwidth`.

    >>> from vecgym.collectives.ledger import Transfer
    >>> steps = [[Transfer("mean", payload_bytes=10**9, num_nodes=2)]] * 10
    >>> bandwidth = required_bandwidth(steps, Compute(1.0), utilization=0.5)  # 1 s for 8 Gbit
    >>> round(bandwidth / 1e9, 3)
    8.0
    """
    check.number("utilization", utilization, "(0, 1)", "the fraction of the time in which nodes compute")
    question = Question(transfers, compute, utilization, seconds("latency", latency), sizes, options)
    needed = question.bandwidth()
    if needed == math.inf:
        warn(question.why_none())
    return needed


@dataclass(frozen=True)
class Question:
    """Which bandwidth a run needs; see `required_bandwidth`.

    >>> step = [Transfer("mean", payload_bytes=10**9, num_nodes=2, tensors=("a", "b"))]
    >>> sizes = {"a": 5e8, "b": 5e8}
    >>> question = Question([step] * 10, Compute(1.0, overlap=False), 0.8, latency=0.1, sizes=sizes)
    >>> question.bandwidth(), question.why_none()[:90]
    (inf, 'No bandwidth is enough for 80 % computing: the latency of 100 ms alone takes 4 s of 14 s. ')
    >>> question.why_none()[90:]
    'Possible remedies: 2 times fewer exchanges (H); one message per exchange, bucket_bytes=math.inf: 160 Gbit/s; \
overlap, Compute(overlap=True).'
    """

    transfers: Ledger | Sequence[Sequence[Transfer]]
    compute: Compute
    utilization: float
    latency: float
    sizes: Mapping[str, float] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def on(self, bandwidth: float) -> Timeline:
        """Price the run with this bandwidth on every link."""
        network = Network(bandwidth, self.latency, **self.options)
        return price(self.transfers, network, self.compute, sizes=self.sizes)

    def reached(self, bandwidth: float = math.inf) -> bool:
        """Return whether nodes compute for the required fraction of the time."""
        return float(self.on(bandwidth).utilization) >= self.utilization

    def bandwidth(self) -> float:
        """Return the least bandwidth, in bit/s, to 0.01 %; `math.inf` if none is enough."""
        if not self.reached():
            return math.inf
        if self.reached(LOWEST):
            return LOWEST
        low, high = LOWEST, HIGHEST
        while high > low * (1 + PRECISION):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if self.reached(middle) else (middle, high)
        return high

    def why_none(self) -> str:
        """Explain why no bandwidth is enough, and what would help."""
        best, free = self.on(math.inf), replace(self, latency=0.0).on(math.inf)
        total, alone = float(best.seconds), float(free.seconds)
        problem = f"No bandwidth is enough for {100 * self.utilization:g} % computing: "
        slack = alone * (float(free.utilization) / self.utilization - 1)  # seconds that messages may take
        if slack <= 0:
            used = 100 * float(free.utilization)
            return f"{problem}nodes wait for the slowest, and compute for {used:.3g} % of the time without any network."
        remedies = "; ".join(self._remedies(math.ceil((total - alone) / slack)))
        latency, lost = readable_time(self.latency), f"{readable_time(total - alone)} of {readable_time(total)}"
        return f"{problem}the latency of {latency} alone takes {lost}. Possible remedies: {remedies}."

    def _remedies(self, rarer: int) -> Iterator[str]:
        """Yield the changes of which each one makes some bandwidth enough."""
        yield f"{rarer} times fewer exchanges (H)"
        if self.options.get("bucket_bytes") != math.inf:
            needed = self._with(bucket_bytes=math.inf).bandwidth()
            figure = readable_bandwidth(needed) if needed < math.inf else "not enough by itself"
            yield f"one message per exchange, bucket_bytes=math.inf: {figure}"
        for name in sorted(ALL_REDUCE.keys() - {"gloo", "server"}):
            if name != self.options.get("all_reduce", "ring") and self._with(all_reduce=name).reached():
                yield f"all_reduce={name!r}"
        overlapping = copy.copy(self.compute)
        overlapping.overlap = True
        if not self.compute.overlap and replace(self, compute=overlapping).reached():
            yield "overlap, Compute(overlap=True)"

    def _with(self, **options: Any) -> Question:
        return replace(self, options={**self.options, **options})


@dataclass(frozen=True)
class Schedules:
    """The seconds of runs that differ only in their schedules of exchanges: dry runs, priced on one network.

    Attributes:
        model, num_nodes, max_steps, unused: as for `vecgym.dry_run`.
        strategy: weights `[T]` or mixing matrices -> a strategy, such as `lambda w: DiLoCoStrategy(sync_weight=w)`.
        network, compute: see `price`.

    >>> from vecgym.models import Line
    >>> from vecgym.strategy import FedAvgStrategy
    >>> schedules = Schedules(
    ...     Line(), lambda w: FedAvgStrategy("sgd", lr=0.1, sync_weight=w), num_nodes=2, max_steps=10,
    ...     network=Network(1e9, latency=0.25), compute=Compute(1.0),
    ... )  # an exchange takes half a second
    >>> round(schedules.seconds(spread(10, 2)), 6), schedules.exchanges_within(12.1)
    (11.0, 4)
    """

    model: nn.Module
    strategy: Callable[[Tensor], Strategy]
    num_nodes: int
    max_steps: int
    network: Network
    compute: Compute
    unused: Collection[str] = ()

    def seconds(self, weights: Tensor) -> float:
        """Return the seconds of the run with these weights."""
        ledger = dry_run(self.model, self.strategy(weights), self.num_nodes, self.max_steps, unused=self.unused)
        return float(price(ledger, self.network, self.compute).seconds)

    def exchanges_within(self, budget_seconds: float) -> int:
        """Return how many exchanges, spread evenly over the steps, fit into the time.

        Raises:
            ValueError: if there is no time for a single exchange.
        """
        low, high = 0, self.max_steps + 1  # `low` exchanges fit, `high` do not
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.seconds(spread(self.max_steps, middle)) <= budget_seconds
            low, high = (middle, high) if fits else (low, middle)
        if low == 0:
            raise ValueError(
                f"budget_seconds={budget_seconds!r} leaves no time for an exchange: a run with one exchange takes "
                f"{self.seconds(spread(self.max_steps, 1)):.4g} s."
            )
        return low


def spread(num_steps: int, count: int) -> Tensor:
    """Spread `count` exchanges evenly over the steps, the last at the end: every H steps if H divides their number.

    >>> spread(6, 3).tolist()
    [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    """
    schedule = torch.zeros(num_steps, dtype=torch.float64)
    schedule[[(i + 1) * num_steps // count - 1 for i in range(count)]] = 1.0
    return schedule
