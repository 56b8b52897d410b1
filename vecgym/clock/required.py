"""What runs would send, take and need: dry runs, strategies side by side, the required bandwidth and H."""

from __future__ import annotations

import bisect
import copy
import functools
import itertools
import math
import numbers
import os
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from vecgym.clock.compute import Compute
from vecgym.clock.cost import ALL_REDUCE
from vecgym.clock.network import Network
from vecgym.clock.timeline import price
from vecgym.clock.trace import plot_prices
from vecgym.clock.units import count, readable_bandwidth, readable_span, readable_time
from vecgym.collectives.ledger import Ledger, Transfer, readable_bytes
from vecgym.collectives.stacked import DryCollectives
from vecgym.core import check
from vecgym.core.errors import warn
from vecgym.core.objects import altered
from vecgym.core.tree import Tree
from vecgym.records.rows import aligned, counted
from vecgym.simulation import RunFacts, Simulation
from vecgym.strategy import Strategy
from vecgym.strategy.asynchronous import check_synchronous
from vecgym.strategy.catalogue import CATALOGUE
from vecgym.strategy.per_rank import as_strategy
from vecgym.strategy.simulated import nothing_to_read

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOWEST, HIGHEST = 1.0, 1e18  # bit/s
PRECISION = 1e-4  # relative

STRATEGIES = ("allreduce", "fedavg", "diloco", "streaming", "streaming-4-bits", "sparta", "demo")
P_SPARTA, DELAY = 0.005, 5  # the fraction that SPARTA exchanges, and the steps that Streaming DiLoCo's fragments take
LEAST_STEPS = 4  # before a run is taken to repeat itself, and of what is repeated
DRAWN_STEPS = 1024  # that are priced where the times of steps are drawn
LONG = 256  # steps of a round from which on a longer one waits no longer
MOST_ROUNDS = 256  # in which what is late may queue
LONGEST = 2**14
ROUNDING = 1e-9  # relative
META: dict[str, Any] = {"bias": False, "device": "meta"}
SECONDS_PER_DAY = 86_400


def dry_run(
    model: nn.Module | int | str, strategy: Strategy, num_nodes: int, max_steps: int, *, seed: int = 42
) -> Ledger:
    """Return the ledger of a run without training: make the exchanges only, on tensors with shapes but no values.

    It equals the ledger of `Trainer.fit` with this `seed`. Nothing is computed or stored, so the model may have any
    size, and may be on the device "meta".

    Args:
        model: nodes exchange its trainable parameters. Or their number, such as "150M": the matrices of a transformer
            of that size, in float32.
        strategy: must not depend on the values that it exchanges; no built-in strategy does. A strategy written for one
            rank is not supported.
        num_nodes: K.
        max_steps: the number of steps.
        seed: of the run; it determines which nodes meet and which coordinates are drawn.

    Raises:
        ValueError, TypeError: for arguments that no run accepts, and for strategies that depend on values.

    >>> from vecgym.strategy import DiLoCoStrategy
    >>> with torch.device("meta"):
    ...     model = torch.nn.Linear(100_000, 100_000, dtype=torch.bfloat16)  # 10 billion parameters
    >>> dry_run(model, DiLoCoStrategy("adamw", H=100), num_nodes=8, max_steps=500)
    Ledger(5 collectives, 175,001,750,000 bytes sent per node)
    """
    model = as_model(model)
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
    comm, seed = DryCollectives(K), check.seed("seed", seed)
    params = {
        name: torch.empty_like(p, device="meta", requires_grad=False)
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    run = RunFacts(K, T, seed, num_examples=(1,) * K)  # weights change no bytes
    engine: Any = types.SimpleNamespace(params=params, buffers=Tree(), written=frozenset())
    simulation = Simulation(engine, strategy, run, comm, nothing_to_read)
    simulation.dry = True
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


def as_model(model: nn.Module | int | str) -> nn.Module:
    """Return the model; for a number of parameters, the matrices of a transformer on the device "meta".

    A block has 12 d^2 parameters, as GPT's, and there are about d / 64 of them; what remains is the embedding.

    >>> [tuple(p.shape) for p in as_model("150k").parameters()]
    [(39, 64), (1, 48), (192, 64), (64, 64), (256, 64), (64, 256), (192, 64), (64, 64), (256, 64), (64, 256), \
(192, 64), (64, 64), (256, 64), (64, 256)]
    """
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, float) and model % 1 == 0:
        model = int(model)  # 150e6
    check.instance("model", model, (str, numbers.Integral), 'an nn.Module, or its number of parameters, "150M"')
    number = count("model", model)
    d = 64 * max(1, round((number / (12 * 64**2)) ** (1 / 3)))
    blocks, rest = divmod(number, 12 * d * d)
    outside = {name: nn.Linear(*shape, **META) for name, shape in
               {"embedding": (d, rest // d), "rest": (rest % d, 1)}.items() if math.prod(shape)}  # fmt: skip
    h = [nn.Sequential(*(nn.Linear(*shape, **META) for shape in ((d, 3 * d), (d, d), (d, 4 * d), (4 * d, d))))
         for _ in range(blocks)]  # fmt: skip
    return nn.ModuleDict({**outside, "h": nn.ModuleList(h)})


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
        utilization: the fraction of the time of all nodes in which they compute, in (0, 1).
        latency: seconds, or a text such as "50 ms".
        options: of `Network`: `all_reduce`, `all_gather`, `bucket_bytes`, `server_bandwidth`.

    >>> from vecgym.collectives.ledger import Transfer
    >>> steps = [[Transfer("mean", payload_bytes=10**9, num_nodes=2)]] * 10
    >>> bandwidth = required_bandwidth(steps, Compute(1.0), utilization=0.5)  # 1 s for 8 Gbit
    >>> round(bandwidth / 1e9, 3)
    8.0
    """
    check.number("utilization", utilization, "(0, 1)", "the fraction of the time in which nodes compute")
    question = Question(transfers, compute, utilization, Network(math.inf, latency, **options), sizes)
    bandwidth = question.bandwidth()
    if bandwidth == math.inf:
        warn(question.why_none())
    return bandwidth


@dataclass(frozen=True)
class Question:
    """Which bandwidth a run needs; see `required_bandwidth`.

    >>> step = [Transfer("mean", payload_bytes=10**9, num_nodes=2, tensors=("a", "b"))]
    >>> sizes = {"a": 5e8, "b": 5e8}
    >>> question = Question([step] * 10, Compute(1.0, overlap=False), 0.8, Network(1e9, latency=0.1), sizes)
    >>> question.bandwidth(), question.why_none()[:90]
    (inf, 'No bandwidth is enough for 80 % computing: the latency of 100 ms alone takes 4 s of 14 s. ')
    >>> question.why_none()[90:]
    'Possible remedies: 2 times fewer exchanges, given enough bandwidth; one message per exchange, \
bucket_bytes=math.inf: 160 Gbit/s; overlap, Compute(overlap=True).'
    """

    transfers: Ledger | Sequence[Sequence[Transfer]]
    compute: Compute
    utilization: float
    network: Network  # with any bandwidth
    sizes: Mapping[str, float] | None = None
    first: int = 0  # of a ledger, the step from which on the run repeats itself; 0: it ends

    def pace(self, bandwidth: float = math.inf) -> tuple[float, float]:
        """Return the seconds of the run, or of a step if it repeats itself, and the fraction in which nodes compute.

        Every link has this bandwidth.
        """
        bits = torch.tensor(bandwidth, dtype=torch.float64)
        network = self.network._changed(bandwidth=bits, up=None, down=None)
        if self.first:
            return pace(cast(Ledger, self.transfers), self.first, network, self.compute)
        timeline = price(self.transfers, network, self.compute, sizes=self.sizes)
        return float(timeline.seconds), float(timeline.utilization)

    def reached(self, bandwidth: float = math.inf) -> bool:
        """Return whether nodes compute for the required fraction of the time."""
        return self.pace(bandwidth)[1] >= self.utilization

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
        no_latency = torch.zeros((), dtype=torch.float64)
        (total, _), (alone, computing) = self.pace(), self._with(latency=no_latency).pace()
        problem = f"No bandwidth is enough for {100 * self.utilization:g} % computing: "
        slack = alone * (computing / self.utilization - 1)  # seconds that messages may take
        if slack <= 0:
            used = f"{100 * computing:.3g} %"
            return f"{problem}nodes wait for the slowest, and compute for {used} of the time without any network."
        remedies = "; ".join(self._remedies(math.ceil((total - alone) / slack)))
        latency = readable_span(self.network.latency, readable_time)
        lost = f"{readable_time(total - alone)} of {readable_time(total)}{' a step' if self.first else ''}"
        return f"{problem}the latency of {latency} alone takes {lost}. Possible remedies: {remedies}."

    def _remedies(self, rarer: int) -> Iterator[str]:
        """Yield the changes of which each one makes some bandwidth enough."""
        yield f"{rarer} times fewer exchanges, given enough bandwidth"
        tau = least_lag(self.transfers, lambda ledger: replace(self, transfers=ledger).reached())
        if tau is not None and tau < math.inf:
            yield f"tau = {tau} steps in place of {latest(cast(Ledger, self.transfers))}"
        if self.network.bucket_bytes != math.inf:
            least = self._with(bucket_bytes=math.inf).bandwidth()
            figure = readable_bandwidth(least) if least < math.inf else "not enough by itself"
            yield f"one message per exchange, bucket_bytes=math.inf: {figure}"
        for name in sorted(ALL_REDUCE.keys() - {"gloo", "server"}):
            if name != self.network.all_reduce and self._with(all_reduce=name).reached():
                yield f"all_reduce={name!r}"
        if not self.compute.overlap and replace(self, compute=altered(self.compute, overlap=True)).reached():
            yield "overlap, Compute(overlap=True)"

    def _with(self, **attributes: Any) -> Question:
        return replace(self, network=self.network._changed(**attributes))


def pace(ledger: Ledger, first: int, network: Network, compute: Compute) -> tuple[float, float]:
    """Return the seconds of a step, and the fraction of them in which nodes compute, once a run repeats itself.

    Args:
        ledger: of a run whose second half is repeated for ever.
        first: the step with which that begins.
        network, compute: see `price`.

    >>> ledger = dry_run("1M", CATALOGUE["fedavg"].make(H=2), num_nodes=2, max_steps=8)
    >>> pace(ledger, 4, Network("32 Mbit/s"), Compute(1.0, overlap=False))  # 1 s for 4 MB
    (1.5, 0.6666666666666666)
    """
    timeline = price(ledger, network, compute)
    computed = compute.of_steps(ledger.num_steps, timeline.num_nodes)[first:]
    seconds = float(timeline.seconds - timeline.step_seconds[first - 1]) / len(computed)
    # What is late may queue on a link for many rounds, until nodes wait for it.
    busy = float(timeline.per_node.sent.max()) / ledger.num_steps
    if busy > seconds * 1.001 and latest(ledger) > 0 and ledger.num_steps < MOST_ROUNDS * first:
        return pace(lengthened(ledger, first, 2 * ledger.num_steps), ledger.num_steps, network, compute)
    return seconds, min(1.0, float(computed.mean()) / seconds) if seconds > 0 else 1.0


def latest(ledger: Ledger) -> int:
    """Return after how many steps the last of what is sent is used.

    >>> latest(dry_run("1M", CATALOGUE["streaming"].make(H=5, delay=3), num_nodes=2, max_steps=5))
    3
    """
    lags = [kind.lag for kind in ledger.by_step()[0]]
    return max((lag if isinstance(lag, int) else max(lag) for lag in lags), default=0)


def lengthened(ledger: Ledger, period: int, num_steps: int) -> Ledger:
    """Return a ledger of more steps, each of which sends what the one `period` steps before it does.

    >>> lengthened(dry_run("1M", CATALOGUE["fedavg"].make(H=2), num_nodes=2, max_steps=2), 2, 10)
    Ledger(5 collectives, 20,000,000 bytes sent per node)
    """
    longer = copy.deepcopy(ledger)
    kinds, steps = ledger.by_step()
    for step in range(len(steps), num_steps):
        steps.append(steps[step - period])
        longer.add(step, [kinds[i] for i in steps[step]])
    return longer


def least_lag(ledger: Any, reached: Callable[[Ledger], bool]) -> float | None:
    """Return the fewest steps, more than now, that what is late must be allowed until `reached(ledger)`.

    It is `math.inf` if none is enough that ends before the same is sent again, and None if there is none, since nothing
    is late, or nodes differ in that.

    >>> ledger = dry_run("1M", CATALOGUE["streaming"].make(H=5), num_nodes=2, max_steps=20)
    >>> least_lag(ledger, lambda later: latest(later) >= 3), least_lag(ledger, lambda later: latest(later) >= 9)
    (3, inf)
    """
    kinds, steps = ledger.by_step() if isinstance(ledger, Ledger) else ([], [])
    sent: dict[Transfer, list[int]] = {kind: [] for kind in kinds if kind.lag}
    for step, indices in enumerate(steps):
        for kind in {kinds[i] for i in indices} & sent.keys():
            sent[kind].append(step)
    gaps = [later - earlier for at in sent.values() for earlier, later in itertools.pairwise(at)]
    lags = range(latest(ledger) + 1, min(gaps)) if gaps else range(0)
    if not lags or any(isinstance(kind.lag, tuple) for kind in sent):
        return None
    if not reached(delayed(ledger, lags[-1])):
        return math.inf
    return lags[bisect.bisect_left(lags[:-1], True, key=lambda lag: reached(delayed(ledger, lag)))]


def delayed(ledger: Ledger, tau: int) -> Ledger:
    """Return the ledger of a run that differs in the steps that its late exchanges may take.

    >>> latest(delayed(dry_run("1M", CATALOGUE["streaming"].make(H=5), num_nodes=2, max_steps=5), 4))
    4
    """
    later = Ledger()
    later.announce(cast(int, ledger.num_nodes), ledger.sizes)
    kinds, steps = ledger.by_step()
    kinds = [kind._replace(lag=tau) if kind.lag else kind for kind in kinds]
    for step, indices in enumerate(steps):
        later.add(step, [kinds[i] for i in indices])
    return later


class Family:
    """A strategy with any H: its dry runs, each made once, and what they take.

    >>> from vecgym.strategy import FedAvgStrategy
    >>> family = Family("1M", lambda H: FedAvgStrategy(H=H), num_nodes=2, compute=Compute(1.0, overlap=False))
    >>> family.pace(4, Network("32 Mbit/s"))  # 1 s for 4 MB in 4 steps
    (1.25, 0.8)
    >>> family.required_H(Network("32 Mbit/s"), utilization=0.9)
    (9, None)
    """

    def __init__(
        self, model: nn.Module | int | str, strategy: str | Callable[[int], Strategy], num_nodes: int, compute: Compute
    ) -> None:
        self.model, self.make, self.num_nodes = as_model(model), maker(strategy), check.integer("num_nodes", num_nodes)
        self.compute = check.instance("compute", compute, Compute, "a Compute, such as Compute(0.4)")
        if not torch.as_tensor(compute.seconds).max() > 0:
            raise ValueError(f"compute={compute}: a step that takes no time has no utilization; give more than 0 s.")
        self._dry_runs = functools.cache(self._dry_run)

    def has(self, H: int) -> bool:
        """Return whether H makes a difference to the strategy."""
        return repr(self.make(H)) != repr(self.make(H + 1))

    def ledger(self, H: int, least: int = LEAST_STEPS) -> tuple[Ledger, int]:
        """Return what a run sends, and its first step from which on it repeats itself: rounds of at least `least` steps
        before that, and as many from there on."""
        return self._dry_runs(H, math.ceil(least / H))

    def pace(self, H: int, network: Network, least: int = LEAST_STEPS) -> tuple[float, float]:
        """Return the seconds of a step once it repeats itself, and the fraction of them in which nodes compute."""
        return pace(*self.ledger(H, least), network, self.compute)

    def bytes_per_step(self, H: int, network: Network) -> float:
        """Return the bytes that a node's link sends in a step, on average over the nodes."""
        ledger, first = self.ledger(H)
        entries = [entry for entry in ledger.routed(network.routes) if entry.step >= first]
        return sum(entry.sent_bytes for entry in entries) / (ledger.num_steps - first)

    def required_bandwidth(self, H: int, network: Network, utilization: float) -> tuple[float, str | None]:
        """Return the bandwidth that this H needs in place of the network's; if none is enough, inf and the reason."""
        ledger, first = self.ledger(H)
        question = Question(ledger, self.compute, utilization, network, first=first)
        bandwidth = question.bandwidth()
        return bandwidth, question.why_none() if bandwidth == math.inf else None

    def late(self, H: int, network: Network, utilization: float) -> dict[str, Any]:
        """Return tau, the number of fragments, and the least tau that this network needs; None without a tau."""
        ledger, first = self.ledger(H)
        parts = {kind.tensors for kind in ledger.by_step()[0] if kind.lag}

        def enough(later: Ledger) -> bool:
            return pace(later, first, network, self.compute)[1] >= utilization * (1 - ROUNDING)

        need = least_lag(ledger, enough) if parts and not enough(ledger) else None
        return {"tau": latest(ledger) or None, "fragments": len(parts) or None, "required_tau": need}

    def required_H(self, network: Network, utilization: float) -> tuple[float, str | None]:
        """Return the least H; if none is enough, inf and the reason."""
        long = self._long()
        (half, _), (full, computing) = (self.pace(H, network, long) for H in (long // 2, long))
        wait = (half - full) * long  # for a long round: a step takes rest + wait / H
        rest, goal = full - wait / long, full * computing / utilization
        if rest > goal * (1 - ROUNDING):
            free, _ = self.pace(long, Network(math.inf), long)
            why, least = "what is exchanged in every step, with any H,", free
            if free > goal:
                why, least = "waiting for the slowest node", full * computing
            return math.inf, (
                f"No H is enough for {100 * utilization:g} % computing: {why} takes {readable_time(rest - least)} of "
                f"{readable_time(rest)} a step."
            )
        guess = math.ceil(wait / (goal - rest) * (1 - ROUNDING))
        if computing < utilization:
            return guess, None
        low, high, first = 0, long, [guess - 1, guess]
        while high - low > 1:
            middle = first.pop() if first else (low + high) // 2
            if low < middle < high:
                low, high = (low, middle) if self._reached(middle, network, utilization) else (middle, high)
        return high, None

    def _long(self) -> int:
        """Return a large H, half of which is possible too, with a delay for example."""
        long = LONG
        while long <= LONGEST and not self._possible(long // 2):
            long *= 2
        return long

    def _possible(self, H: int) -> bool:
        try:
            self.make(H)
        except ValueError:
            return False
        return True

    def _reached(self, H: int, network: Network, utilization: float) -> bool:
        try:
            return self.pace(H, network)[1] >= utilization * (1 - ROUNDING)
        except ValueError:  # a larger H was possible: this one is too small for a delay, or for fragments
            return False

    def _dry_run(self, H: int, rounds: int) -> tuple[Ledger, int]:
        strategy = self.make(H)
        delays = [exchange.delay for exchange in getattr(strategy, "exchanges", ())]  # which a run must be longer than
        latest_of_all = max((max(x) if isinstance(x, tuple) else x for x in delays), default=0)
        first = H * max(rounds, latest_of_all // H + 1)
        ledger = dry_run(self.model, strategy, self.num_nodes, 2 * first)
        if (lag := latest(ledger)) >= first:
            return self.ledger(H, lag + 1)
        return lengthened(ledger, first, DRAWN_STEPS if self.compute.sigma else 0), first


def maker(strategy: Any, **settings: Any) -> Callable[[int], Strategy]:
    """Return a function of H that makes a strategy: of the catalogue by its name, or such a function itself.

    >>> maker("fedavg")(5)
    FedAvgStrategy(OptimSpec(AdamW), Exchange(Mean(), every=5))
    """
    if callable(strategy):
        return strategy
    make = CATALOGUE[check.choice("strategy", strategy, CATALOGUE, "a function of H that makes a strategy")].make
    return lambda H: make(H=H, **{"p": P_SPARTA, "delay": DELAY, "fragments": None, **settings})


def required_H(
    model: nn.Module | int | str,
    strategy: str | Callable[[int], Strategy],
    num_nodes: int,
    network: Network,
    compute: Compute,
    utilization: float = 0.95,
) -> float:
    """Return the least H, steps between two exchanges, at which nodes compute for this fraction of the time.

    It is `math.inf` if no H is enough, since nodes wait for the slowest one, or for what is exchanged in every step; a
    warning tells which. Above 256 it follows from rounds of 128 and 256 steps: a step takes a + b / H seconds.

    Args:
        model: a module, also on the device "meta", or a number of parameters such as "150M"; see `vecgym.dry_run`.
        strategy: a function that makes a strategy of an H, or a name such as "diloco" or "streaming-4-bits".
        num_nodes: K.
        network, compute: see `price`.
        utilization: the fraction of the time of all nodes in which they compute, in (0, 1).

    Raises:
        ValueError, TypeError: for values that are not allowed.

    >>> network = Network("100 Mbit/s", latency="80 ms", bucket_bytes=math.inf)
    >>> required_H("150M", "diloco", 8, network, Compute(0.6), utilization=0.9)
    1277
    """
    check.instance("network", network, Network, "a Network, such as Network(1e9, 0.05)")
    check.number("utilization", utilization, "(0, 1)", "the fraction of the time in which nodes compute")
    least, why = Family(model, strategy, num_nodes, compute).required_H(network, utilization)
    if why is not None:
        warn(why)
    return least


class Prices(NamedTuple):
    """What strategies take on a network; see `price_strategies`.

    Attributes:
        rows: a dict for each way to send messages, strategy and H.
        title: what was asked.
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
    settings = {} if tau is None else {"delay": tau}
    makers = strategies if isinstance(strategies, Mapping) else {n: maker(n, **settings) for n in strategies}
    families = {name: Family(model, make, num_nodes, compute) for name, make in makers.items()}
    rows: list[dict[str, Any]] = []
    for bucket_bytes in dict.fromkeys((network.bucket_bytes, math.inf)):
        on = network._changed(bucket_bytes=bucket_bytes)
        priced = [row for name, family in families.items() for row in _rows(name, family, periods, on, utilization)]
        for row in priced:
            days = row["seconds_per_step"] * max_steps / SECONDS_PER_DAY
            faster = priced[0]["seconds_per_step"] / row["seconds_per_step"]
            rows.append({**row, "days": days, "faster": faster})
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


@dataclass(frozen=True)
class Schedules:
    """The seconds of runs that differ only in their schedules of exchanges: dry runs, priced on one network.

    Attributes:
        model, num_nodes, max_steps: as for `vecgym.dry_run`.
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

    def seconds(self, weights: Tensor) -> float:
        """Return the seconds of the run with these weights."""
        ledger = dry_run(self.model, self.strategy(weights), self.num_nodes, self.max_steps)
        return float(price(ledger, self.network, self.compute).seconds)

    def exchanges_within(self, budget_seconds: float) -> int:
        """Return how many exchanges, spread evenly over the steps, fit into the time.

        Raises:
            ValueError: if there is no time for a single exchange.
        """
        counts = range(1, self.max_steps + 1)
        most = bisect.bisect_right(counts, budget_seconds, key=lambda n: self.seconds(spread(self.max_steps, n)))
        if most == 0:
            raise ValueError(
                f"budget_seconds={budget_seconds!r} leaves no time for an exchange: a run with one exchange takes "
                f"{self.seconds(spread(self.max_steps, 1)):.4g} s."
            )
        return most


def spread(num_steps: int, count: int) -> Tensor:
    """Spread `count` exchanges evenly over the steps, the last at the end: every H steps if H divides their number.

    >>> spread(6, 3).tolist()
    [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    """
    schedule = torch.zeros(num_steps, dtype=torch.float64)
    schedule[[(i + 1) * num_steps // count - 1 for i in range(count)]] = 1.0
    return schedule
