"""Which bandwidth a run needs, and how often nodes can exchange in a given time."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vecgym.clock.compute import Compute
from vecgym.clock.dry import dry_run
from vecgym.clock.network import Network
from vecgym.clock.timeline import price
from vecgym.clock.units import seconds
from vecgym.collectives.ledger import Ledger, Transfer
from vecgym.core import check
from vecgym.strategy import Strategy

LOWEST, HIGHEST = 1.0, 1e18  # bit/s
PRECISION = 1e-4  # relative


def required_bandwidth(
    transfers: Ledger | Sequence[Sequence[Transfer]],
    compute: Compute,
    utilization: float = 0.95,
    *,
    latency: Any = 0.0,
    sizes: Mapping[str, float] | None = None,
    **options: Any,
) -> float:
    """The bandwidth of every node's link, in bit/s, at which nodes compute for that part of their time.

    The least one, to 0.01 %. `math.inf` where no bandwidth is enough, because of the latency or of stragglers.

    Args:
        transfers, compute, sizes: see `price`.
        utilization: computed / (computed + waited), in (0, 1).
        latency: seconds, or a text such as "50 ms".
        options: of `Network`: `all_reduce`, `all_gather`, `server_bandwidth`.

    >>> from vecgym.collectives.ledger import Transfer
    >>> steps = [[Transfer("mean", payload_bytes=10**9, num_nodes=2)]] * 10
    >>> bandwidth = required_bandwidth(steps, Compute(1.0), utilization=0.5)  # 1 s for 8 Gbit
    >>> round(bandwidth / 1e9, 3)
    8.0
    """
    wanted = check.number("utilization", utilization, "(0, 1)", "the part of the time in which nodes compute")
    a = seconds("latency", latency)

    def reached(bandwidth: float) -> bool:
        network = Network(bandwidth, a, **options)
        return float(price(transfers, network, compute, sizes=sizes).utilization) >= wanted

    if not reached(math.inf):
        return math.inf
    if reached(LOWEST):
        return LOWEST
    low, high = LOWEST, HIGHEST
    while high > low * (1 + PRECISION):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


@dataclass(frozen=True)
class Schedules:
    """The seconds of runs that differ only in when their nodes exchange: dry runs, priced on one network.

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
        """Return how many exchanges, spread evenly over the steps, there is time for.

        Raises:
            ValueError: where there is no time for a single one.
        """
        low, high = 0, self.max_steps + 1  # there is time for `low` exchanges, not for `high`
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.seconds(spread(self.max_steps, middle)) <= budget_seconds
            low, high = (middle, high) if fits else (low, middle)
        if low == 0:
            raise ValueError(
                f"budget_seconds={budget_seconds!r} leaves no time for an exchange: a run with one takes "
                f"{self.seconds(spread(self.max_steps, 1)):.4g} s."
            )
        return low


def spread(num_steps: int, count: int) -> Tensor:
    """Spread `count` exchanges evenly over the steps, the last at the end: every H steps if H divides.

    >>> spread(6, 3).tolist()
    [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    """
    schedule = torch.zeros(num_steps, dtype=torch.float64)
    schedule[[(i + 1) * num_steps // count - 1 for i in range(count)]] = 1.0
    return schedule
