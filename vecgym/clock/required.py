"""Which bandwidth a run needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vecgym.clock.compute import Compute
from vecgym.clock.network import Network
from vecgym.clock.timeline import price
from vecgym.clock.units import seconds
from vecgym.collectives.ledger import Ledger, Transfer
from vecgym.core import check

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
