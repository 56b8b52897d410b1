"""Strategies side by side: what each would send on a network, and how long it would take."""

from __future__ import annotations

import itertools
import math
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch import nn
from tqdm.auto import tqdm

from vecgym.clock.compute import Compute
from vecgym.clock.dry import as_model
from vecgym.clock.network import Network
from vecgym.clock.required import Family, maker
from vecgym.clock.trace import plot_prices
from vecgym.clock.units import readable_bandwidth, readable_time
from vecgym.collectives.ledger import readable_bytes
from vecgym.core import check
from vecgym.records.rows import aligned, counted
from vecgym.strategy import Strategy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STRATEGIES = ("allreduce", "fedavg", "diloco", "streaming", "streaming-4-bits", "sparta", "demo")
SECONDS_PER_DAY = 86_400
SOON = 2.0  # seconds without any progress shown


class Prices(NamedTuple):
    """The costs of strategies on a network; see `price_strategies`.

    Attributes:
        rows: a dict for each way to send messages, strategy and H.
        title: the question, in words.
        utilization: the fraction of the time for which bandwidth and H are required.

    >>> prices = price_strategies("1M", 2, Network("1 Gbit/s"), Compute(0.1), H=[10], strategies=["allreduce"])
    >>> prices.title
    '1,000,000 parameters (4 MB) in 2 layers of width 192, 2 nodes, Network(1 Gbit/s), Compute(100 ms), 100,000 steps'
    >>> prices.rows[0]["bytes_per_step"]
    4000000.0
    """

    rows: list[dict[str, Any]]
    title: str
    utilization: float

    def plot(self, path: str | os.PathLike[str] | None = None, *, title: str | None = None) -> Figure:
        """Draw days, and utilization as bars; see `vecgym.clock.trace.plot_prices`.

        >>> prices = price_strategies("1M", 2, Network("1 Gbit/s"), Compute(0.1), strategies=["allreduce"])
        >>> prices.plot().axes[0].get_xlabel()
        'days (times as fast as allreduce)'
        """
        return plot_prices(self.rows, path, title=self.title if title is None else title)

    def __str__(self) -> str:
        """Return a table for each way to send messages, and why what is required is not possible."""
        goal = f"{100 * self.utilization:g} %"
        needs = (f"bandwidth for {goal}", f"H for {goal}")
        heads = ["strategy", "H", "sent/step", "time/step", "computing", "days", "faster", *needs]
        lines = textwrap.wrap(self.title, 115, subsequent_indent="  ")
        for bucket_bytes in dict.fromkeys(row["bucket_bytes"] for row in self.rows):
            rows = [row for row in self.rows if row["bucket_bytes"] == bucket_bytes]
            size = readable_bytes(bucket_bytes)
            how = "one message per exchange" if bucket_bytes == math.inf else f"messages of {size}"
            lines += ["", f"In {how}:", *aligned([heads, *map(_cells, rows)])]
            lines += _late(rows, goal)
            reasons: dict[str, list[str]] = {}
            for name, row in {row["strategy"]: row for row in rows if row["reason"]}.items():  # of the largest such H
                reasons.setdefault(row["reason"], []).append(name if row["H"] is None else f"{name} (H = {row['H']})")
            for reason, names in reasons.items():
                lines += textwrap.wrap(f"{', '.join(names)}: {reason}", 110, subsequent_indent="  ")
        return "\n".join(lines)


def _late(rows: Sequence[Mapping[str, Any]], goal: str) -> Iterator[str]:
    """Yield a line for each strategy with a tau: what was assumed, and the tau that would be enough."""
    for name in dict.fromkeys(row["strategy"] for row in rows if row["tau"]):
        late = [row for row in rows if row["strategy"] == name and row["tau"]]
        taus = " to ".join(f"{tau}" for tau in sorted({late[0]["tau"], late[-1]["tau"]}))
        needs = [(row["H"], row["required_tau"]) for row in late if row["required_tau"] is not None]
        enough = ", ".join(f"{'none' if tau == math.inf else tau} with H = {H}" for H, tau in needs)
        assumed = f"{name}: tau = {taus} steps, {counted(late[0]['fragments'], 'fragment')}"
        yield f"{assumed}; tau for {goal}: {enough}" if needs else assumed


def _cells(row: Mapping[str, Any]) -> list[str]:
    bandwidth, H = row["required_bandwidth"], row["required_H"]
    return [
        row["strategy"],
        "-" if row["H"] is None else f"{row['H']}",
        readable_bytes(row["bytes_per_step"]),
        readable_time(row["seconds_per_step"]),
        f"{100 * row['utilization']:.1f} %",
        f"{row['days']:.3g}",
        f"{row['faster']:.3g}x",
        "none" if bandwidth == math.inf else readable_bandwidth(bandwidth),
        "-" if H is None else "none" if math.inf == H else f"{H:,}",
    ]


@check.strict
def price_strategies(
    model: nn.Module | int | str,
    num_nodes: int,
    network: Network,
    compute: Compute,
    *,
    H: Sequence[int] = (20, 100, 500),
    strategies: Sequence[str] | Mapping[str, Callable[[int], Strategy]] = STRATEGIES,
    tau: int | None = None,
    max_steps: int = 100_000,
    utilization: float = 0.95,
) -> Prices:
    """Compare what strategies send and how long they take on a network, without a run; `vecgym price` prints it.

    Printed, it is a table for messages of the network's `bucket_bytes` and one for a single message per exchange. A row
    is priced once the run repeats itself, after its first rounds. Only time is compared, not what a step learns.

    Args:
        model: a module, also on the device "meta", or a number of parameters such as "150M"; see `vecgym.dry_run`.
        num_nodes: K.
        network, compute: see `price`.
        H: steps between two exchanges; strategies that have none are priced once.
        strategies: names of the catalogue, such as "diloco" ("sparta" exchanges p = 0.005); or {name: a function that
            makes a strategy of an H}. The first is the reference.
        tau: steps that an exchange of "streaming" may take, fewer than each H. None: 5, or H - 1.
        max_steps: the number of steps in `days`.
        utilization: the fraction of the time of all nodes in which they compute, in (0, 1), for which bandwidth and H
            are required.

    Returns:
        `rows` have strategy, H, bucket_bytes; `bytes_per_step`, sent by a node; `seconds_per_step`, `utilization`,
        `days`; `faster`, times as fast as the first strategy; `required_bandwidth` in bit/s with this H,
        `required_H` with this network, and the `reason` where one of them is `math.inf`. Where exchanges may take
        several steps: `tau`, the number of `fragments`, and `required_tau`, the least larger tau that is enough with
        this H and network, None if it is already. (What a larger tau costs in learning is not priced.)

    Raises:
        ValueError, TypeError: for values that are not allowed.

    >>> network = Network("100 Mbit/s", bucket_bytes=math.inf)
    >>> print(price_strategies("150M", 8, network, Compute(0.6), H=[500], strategies=["allreduce", "diloco"]))
    150,000,000 parameters (600 MB) in 13 layers of width 960, 8 nodes, Network(100 Mbit/s, bucket_bytes=inf),
      Compute(600 ms), 100,000 steps
    <BLANKLINE>
    In one message per exchange:
    strategy     H  sent/step  time/step  computing   days  faster  bandwidth for 95 %  H for 95 %
    allreduce    -    1.05 GB     84.6 s      0.7 %   97.9      1x          266 Gbit/s           -
    diloco     500     2.1 MB     768 ms     78.1 %  0.889    110x          532 Mbit/s       2,660
    """
    check.instance("network", network, Network, "a Network, such as Network(1e9, 0.05)")
    check.integer("max_steps", max_steps)
    check.number("utilization", utilization, "(0, 1)", "the fraction of the time in which nodes compute")
    check.instance("H", H, (list, tuple, range), "a list of steps between two exchanges, such as [20, 100, 500]")
    check.instance("strategies", strategies, (list, tuple, Mapping), "a list of names, or {name: H -> strategy}")
    periods = [check.integer("H", x, what="steps between two exchanges") for x in H]
    if not periods or not strategies:
        raise ValueError(f"H={list(H)} and strategies={list(strategies)}: give at least one of each.")
    given, model = model, as_model(model)
    if tau is not None and min(periods) <= check.integer("tau", tau, what="steps that an exchange may take"):
        raise ValueError(f"tau={tau} must be less than every H, and H={list(H)}: give a smaller tau, or larger H.")
    makers = strategies if isinstance(strategies, Mapping) else {n: maker(n, delay=tau) for n in strategies}
    one = Family(model, next(iter(makers.values())), num_nodes, compute)
    families = {name: one.beside(make) for name, make in makers.items()}
    on = [network._changed(bucket_bytes=x) for x in dict.fromkeys((network.bucket_bytes, math.inf))]
    shown = tqdm([*itertools.product(on, families)], "Prices", leave=False, disable=None, delay=SOON)  # on a terminal
    rows = [row for on, name in shown for row in _rows(name, families[name], periods, on, utilization)]
    for row in rows:
        first = next(other for other in rows if other["bucket_bytes"] == row["bucket_bytes"])
        row["days"] = row["seconds_per_step"] * max_steps / SECONDS_PER_DAY
        row["faster"] = first["seconds_per_step"] / row["seconds_per_step"]
    params = [p for p in model.parameters() if p.requires_grad]
    size = f"{sum(p.numel() for p in params):,} parameters ({readable_bytes(sum(p.nbytes for p in params))})"
    if model is not given and len(layers := list(cast(Any, model).h)):
        size += f" in {counted(len(layers), 'layer')} of width {layers[0][0].in_features}"
    title = f"{size}, {counted(num_nodes, 'node')}, {network}, {compute}, {max_steps:,} steps"
    return Prices(rows, title, utilization)


def _rows(
    name: str, family: Family, periods: Sequence[int], network: Network, utilization: float
) -> Iterator[dict[str, Any]]:
    """Yield what a strategy takes, for each H if that makes a difference."""
    several = family.has(periods[0])
    least, why_no_H = family.required_H(network, utilization) if several else (None, None)
    for H in periods if several else [1]:
        seconds, computing = family.pace(H, network)
        bandwidth, why = family.required_bandwidth(H, network, utilization)
        yield {
            "strategy": name, "H": H if several else None, "bucket_bytes": network.bucket_bytes,
            "bytes_per_step": family.bytes_per_step(H, network), "seconds_per_step": seconds,
            "utilization": computing, "required_bandwidth": bandwidth, "required_H": least,
            **family.late(H, network, utilization),
            "reason": " ".join(filter(None, (why, why_no_H))) or None,
        }  # fmt: skip
