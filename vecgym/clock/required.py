"""The bandwidth, H and delay with which nodes compute for a given fraction of the time."""

from __future__ import annotations

import bisect
import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from vecgym.clock.compute import Compute
from vecgym.clock.cost import ALL_REDUCE
from vecgym.clock.dry import DryRuns
from vecgym.clock.network import Network
from vecgym.clock.timeline import price
from vecgym.clock.units import readable_bandwidth, readable_span, readable_time
from vecgym.collectives.ledger import Ledger, Transfer
from vecgym.core import check
from vecgym.core.errors import warn
from vecgym.core.objects import altered
from vecgym.strategy import Strategy
from vecgym.strategy.catalogue import CATALOGUE

LOWEST, HIGHEST = 1.0, 1e18  # bit/s
PRECISION = 1e-4  # relative
CLOSE, MOST_GUESSES = PRECISION / 16, 6

P_SPARTA, DELAY = 0.005, 5  # the fraction that SPARTA exchanges, and the steps that Streaming DiLoCo's fragments take
LEAST_STEPS = 4  # before a run is taken to repeat itself, and of what is repeated
DRAWN_STEPS = 1024  # that are priced where the times of steps are drawn
LONG = 256  # steps of a round from which on a longer one waits no longer
MOST_ROUNDS = 256  # in which what is late may queue
LONGEST = 2**14
ROUNDING = 1e-9  # relative


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
    """The search for the bandwidth that a run needs; see `required_bandwidth`.

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
        free, computing = self.pace()
        if computing < self.utilization:
            return math.inf
        slowest, computing_slowest = self.pace(LOWEST)
        if computing_slowest >= self.utilization:
            return LOWEST
        missed, enough = self._around(free * computing / self.utilization, slowest)
        low, high = LOWEST, HIGHEST
        while high > low * (1 + PRECISION):
            middle = math.sqrt(low * high)
            reached = middle >= enough or (middle > missed and self.reached(middle))
            low, high = (low, middle) if reached else (middle, high)
        return high

    def _around(self, goal: float, slowest: float) -> tuple[float, float]:
        """Return a bandwidth that is not enough and one that is, close to one another if a few guesses find them.

        Seconds are a convex, piecewise linear function of the time of a bit, 1 / bandwidth. So the line through two
        points where they are above the goal meets it at a time that is too long or right; each guess is one such.

        Args:
            goal: seconds that are enough.
            slowest: seconds at the lowest bandwidth.
        """
        missed = 1 / LOWEST
        (a, s), (b, t) = (1 / LOWEST, slowest), (2 / LOWEST, self.pace(LOWEST / 2)[0])
        for _ in range(MOST_GUESSES):
            guess = a - (s - goal) * (b - a) / (t - s) if t != s else 0.0
            if not 0 < guess * (1 + CLOSE) < missed:
                break
            b, a = guess * (1 + CLOSE), guess * (1 - CLOSE)
            (t, more), (s, less) = self.pace(1 / b), self.pace(1 / a)
            if less >= self.utilization:
                return 1 / (missed if more >= self.utilization else b), 1 / a
            missed = a
        return 1 / missed, HIGHEST

    def answer(self) -> tuple[float, str | None]:
        """Return the bandwidth, and the reason if none is enough."""
        bandwidth = self.bandwidth()
        return bandwidth, self.why_none() if bandwidth == math.inf else None

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

    >>> ledger = DryRuns("1M", 2).ledger(CATALOGUE["fedavg"].make(H=2), 8)
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

    >>> latest(DryRuns("1M", 2).ledger(CATALOGUE["streaming"].make(H=5, delay=3), 5))
    3
    """
    lags = [kind.lag for kind in ledger.by_step()[0]]
    return max((lag if isinstance(lag, int) else max(lag) for lag in lags), default=0)


def lengthened(ledger: Ledger, period: int, num_steps: int) -> Ledger:
    """Return a ledger of more steps, each of which sends what the one `period` steps before it does.

    >>> lengthened(DryRuns("1M", 2).ledger(CATALOGUE["fedavg"].make(H=2), 2), 2, 10)
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

    >>> ledger = DryRuns("1M", 2).ledger(CATALOGUE["streaming"].make(H=5), 20)
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

    >>> latest(delayed(DryRuns("1M", 2).ledger(CATALOGUE["streaming"].make(H=5), 5), 4))
    4
    """
    later = Ledger()
    later.announce(cast(int, ledger.num_nodes), ledger.sizes)
    kinds, steps = ledger.by_step()
    kinds = [kind._replace(lag=tau) if kind.lag else kind for kind in kinds]
    for step, indices in enumerate(steps):
        if indices or step == len(steps) - 1:
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
        self.runs, self.make = DryRuns(model, num_nodes), maker(strategy)
        self.compute = check.instance("compute", compute, Compute, "a Compute, such as Compute(0.4)")
        if not torch.as_tensor(compute.seconds).max() > 0:
            raise ValueError(f"compute={compute}: a step that takes no time has no utilization; give more than 0 s.")
        self._dry_runs = functools.cache(self._dry_run)
        self._ledgers: dict[Any, Ledger] = {}  # one for all strategies and H that send the same
        self._pace, self._answer = functools.cache(pace), functools.cache(Question.answer)

    def beside(self, strategy: str | Callable[[int], Strategy]) -> Family:
        """Return the family of another strategy, which shares ledgers and answers.

        >>> fedavg = Family("1M", "fedavg", num_nodes=2, compute=Compute(1.0))
        >>> fedavg.beside("diloco").ledger(4) == fedavg.ledger(4)  # one ledger
        True
        """
        return altered(self, make=maker(strategy))

    def has(self, H: int) -> bool:
        """Return whether H makes a difference to the strategy."""
        return repr(self.make(H)) != repr(self.make(H + 1))

    def ledger(self, H: int, least: int = LEAST_STEPS) -> tuple[Ledger, int]:
        """Return what a run sends, and its first step from which on it repeats itself: rounds of at least `least` steps
        before that, and as many from there on."""
        return self._dry_runs(self.make, H, math.ceil(least / H))

    def pace(self, H: int, network: Network, least: int = LEAST_STEPS) -> tuple[float, float]:
        """Return the seconds of a step once it repeats itself, and the fraction of them in which nodes compute."""
        return self._pace(*self.ledger(H, least), network, self.compute)

    def bytes_per_step(self, H: int, network: Network) -> float:
        """Return the bytes that a node's link sends in a step, on average over the nodes."""
        ledger, first = self.ledger(H)
        entries = [entry for entry in ledger.routed(network.routes) if entry.step >= first]
        return sum(entry.sent_bytes for entry in entries) / (ledger.num_steps - first)

    def required_bandwidth(self, H: int, network: Network, utilization: float) -> tuple[float, str | None]:
        """Return the bandwidth that this H needs in place of the network's; if none is enough, inf and the reason."""
        ledger, first = self.ledger(H)
        return self._answer(Question(ledger, self.compute, utilization, network, first=first))

    def late(self, H: int, network: Network, utilization: float) -> dict[str, Any]:
        """Return tau, the number of fragments, and the least tau that this network needs; None without a tau."""
        ledger, first = self.ledger(H)
        parts = {kind.tensors for kind in ledger.by_step()[0] if kind.lag}

        def enough(later: Ledger) -> bool:
            return self._pace(later, first, network, self.compute)[1] >= utilization * (1 - ROUNDING)

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

    def _dry_run(self, make: Callable[[int], Strategy], H: int, rounds: int) -> tuple[Ledger, int]:
        strategy = make(H)
        exchanges = getattr(strategy, "exchanges", ())
        longest = max((exchange.delivery.longest for exchange in exchanges), default=0)  # a run must be longer
        first = H * max(rounds, longest // H + 1)
        ledger = self.runs.ledger(strategy, 2 * first)
        if (lag := latest(ledger)) >= first:
            return self._dry_runs(make, H, math.ceil((lag + 1) / H))
        ledger = lengthened(ledger, first, DRAWN_STEPS if self.compute.sigma else 0)
        kinds, steps = ledger.by_step()
        return self._ledgers.setdefault((*kinds, *steps), ledger), first


def maker(strategy: Any, **settings: Any) -> Callable[[int], Strategy]:
    """Return a function of H that makes a strategy: of the catalogue by its name, or such a function itself.

    >>> maker("fedavg")(5)
    FedAvgStrategy(OptimSpec(AdamW), Exchange(Mean(), every=5))
    """
    if callable(strategy):
        return strategy
    make = CATALOGUE[check.choice("strategy", strategy, CATALOGUE, "a function of H that makes a strategy")].make
    given = {name: value for name, value in settings.items() if value is not None}
    return lambda H: make(H=H, **{"p": P_SPARTA, "delay": DELAY, "fragments": None, **given})


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
