"""The seconds that a run takes on any network, computed from what it sent.

A `Clock` advances step by step: when each node begins and ends each step, given what was sent. `price` goes through a
finished run, `RunningClock` through one in progress.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vecgym.clock.compute import BLOCK, FORWARD, Compute
from vecgym.clock.messages import NEVER, MessagePlan, Planner
from vecgym.clock.network import Network, Routes
from vecgym.clock.trace import Bar, Delivery, Need, PerNode, StepRecord, TimelineBase, bars
from vecgym.collectives.ledger import Ledger, Transfer
from vecgym.core import check

ROUNDING = 2e-15  # relative


class Clock:
    """The times of K nodes, advanced step by step.

    Args:
        network: the links between the nodes.
        compute: the compute times of the nodes.
        num_nodes: K.
        sizes: the bytes of each parameter, by name, in the model's order.

    >>> from vecgym.collectives.ledger import Transfer
    >>> clock = Clock(Network(8e9), Compute(3.0), num_nodes=2, sizes={"w": 10**9})
    >>> clock.advance(torch.full((2,), 3.0, dtype=torch.float64), clock.plans([Transfer("mean", 10**9, 2)]))
    >>> clock.ends
    tensor([4., 4.], dtype=torch.float64)
    """

    def __init__(self, network: Network, compute: Compute, num_nodes: int, sizes: Mapping[str, float]) -> None:
        compute.check(num_nodes)
        self.num_nodes = num_nodes
        self._plans = functools.cache(Planner(Routes(network, num_nodes), sizes, compute).plans)
        self.step = 0
        zero = torch.zeros(num_nodes, dtype=torch.float64)
        self.begin, self.computed, self.sent, self.received = zero, zero, zero, zero
        self._up = self._down = torch.zeros(num_nodes + 1, dtype=torch.float64)
        self.due: dict[int, list[Need]] = {}  # step -> the messages that its forward pass waits for
        self.records: list[StepRecord] | None = None

    def plans(self, transfers: Sequence[Transfer]) -> tuple[MessagePlan, ...]:
        """Return the messages of these transfers, computed once for all steps with the same transfers."""
        return self._plans(tuple(transfers))

    @property
    def ends(self) -> Tensor:
        """The time at which each node was ready for the next step: computed, with its messages received, `[K]`."""
        ends = self.begin
        for need in self.due.get(self.step, ()):
            ends = torch.maximum(ends, need.arrival)
        return ends

    def idle(self, seconds: Tensor) -> Tensor:
        """Make steps of `[n, K]` seconds without messages; return when each node ended each step, `[n, K]`."""
        ends = self.begin + seconds.cumsum(0)
        self.begin, self.computed = ends[-1], self.computed + seconds.sum(0)
        self.step += len(seconds)
        return ends

    def repeat(self, seconds: Tensor, plans: tuple[MessagePlan, ...]) -> Tensor:
        """Make steps of `[n, K]` seconds that all send the same; return when each node ended each, messages included.

        Times follow from one another by sums and maxima. So once a step has moved all of them by the same amount, each
        further step of equal compute time moves them by that amount too, and the rest is a multiplication.
        """
        steady = len(seconds) > 1 and bool((seconds == seconds[0]).all())
        ends: list[Tensor] = []
        for row in seconds:
            before = self._times() if steady else None
            self.advance(row, plans)
            ends.append(self.ends)
            step = None if before is None else self._moved(*before)
            if step is not None:
                ends.append(self._multiply(len(seconds) - len(ends), step, row, plans))
                break
        return torch.vstack(ends)

    def _times(self) -> tuple[list[tuple[int, float]], Tensor]:
        """Return all that later steps depend on: what is needed when, and the times of nodes, links and arrivals."""
        due = [(step - self.step, need) for step, needs in sorted(self.due.items()) for need in needs]
        times = torch.cat([self.begin, self._up, self._down, *[need.arrival for _, need in due]])
        return [(steps, need.rest) for steps, need in due], times

    def _moved(self, form: list[tuple[int, float]], before: Tensor) -> float | None:
        """Return by how much the last step moved all times; None if not all by the same amount.

        A link whose time did not move and that was free before any node began is unused.
        """
        now, after = self._times()
        if now != form or after.requires_grad:
            return None
        step = float(after[0] - before[0])
        moved = (after - before - step).abs() <= ROUNDING * after[0]
        unused = (after == before) & (before <= before[: self.num_nodes].min())
        unused[: self.num_nodes] = False  # the time of a node that is never present does not move
        return step if bool((moved | unused).all()) else None

    def _multiply(self, count: int, step: float, seconds: Tensor, plans: tuple[MessagePlan, ...]) -> Tensor:
        """Make steps that each move all times by `step`; return when each node ended each step, `[count, K]`."""
        ends = self.ends + step * torch.arange(1, count + 1, dtype=torch.float64)[:, None]
        first = self.begin.min() - step  # earlier times are those of unused links

        def later(x: Tensor) -> Tensor:
            return torch.where(x > first, x + count * step, x)

        self.begin, self._up, self._down = later(self.begin), later(self._up), later(self._down)
        self.due = {
            at + count: [need._replace(arrival=later(need.arrival), step=need.step + count) for need in needs]
            for at, needs in self.due.items()
        }
        self.step += count
        self.computed = self.computed + count * seconds
        for plan in plans:
            self.sent, self.received = (x + count * y for x, y in zip((self.sent, self.received), plan.busy))
        return ends

    def advance(self, seconds: Tensor, plans: tuple[MessagePlan, ...] = ()) -> None:
        """Make one step in which the nodes compute for `seconds`, `[K]`, and send the messages of `plans`."""
        needs = self.due.pop(self.step, [])
        begin, forward = self.begin, self._forward(seconds, needs)
        self.begin = forward + seconds * (1 - FORWARD)
        self.computed = self.computed + seconds
        deliveries = tuple(self._send(i, plan, forward, seconds * (1 - FORWARD)) for i, plan in enumerate(plans))
        if self.records is not None:
            self.records.append(StepRecord(self.step, begin, forward, self.begin, seconds, tuple(needs), deliveries))
        self.step += 1

    def _forward(self, seconds: Tensor, needs: list[Need]) -> Tensor:
        """Return when the forward pass ends: layer by layer, each begins once what it needs has arrived."""
        forward_seconds = seconds * FORWARD
        end = self.begin + forward_seconds
        for need in needs:
            end = torch.maximum(end, need.arrival + forward_seconds * need.rest)
        return end

    def _send(self, which: int, plan: MessagePlan, forward: Tensor, backward: Tensor) -> Delivery:
        """Send the messages of a plan. A weight w in (0, 1) scales every delay that they cause by w."""
        ready = forward[:, None] + backward[:, None] * plan.leaves  # [K, M]
        before = up, down = self._up, self._down
        arrivals = []
        for exchange, places, amounts in plan.bursts:
            arrival, up, down = exchange.run(ready[:, places], amounts, up, down)
            arrivals.append(arrival)
        arrival = torch.cat(arrivals, 1)
        w = plan.weight
        if isinstance(w, Tensor) or w != 1:
            up, down = (old + w * (new - old) for old, new in zip(before, (up, down)))
            is_sent = arrival > NEVER
            arrival = torch.where(is_sent, ready + w * (arrival.where(is_sent, ready) - ready), NEVER)
        self._up, self._down = up, down
        for lag, place, rest, nodes in plan.needs:
            due = arrival[:, place] if nodes is None else arrival[:, place].where(nodes, NEVER)
            need = Need(due, rest, self.step, which, place)
            self.due.setdefault(self.step + 1 + lag, []).append(need)
        self.sent, self.received = self.sent + plan.busy[0], self.received + plan.busy[1]
        return Delivery(plan, ready, *before, arrival)


@dataclass(frozen=True, repr=False)
class Timeline(TimelineBase):
    """The times at which the steps of a run ended on a network.

    Attributes:
        seconds: until every node had ended the last step and received its messages. A differentiable tensor if the
            transfers' weights are.
        utilization: computed / seconds, averaged over all nodes, absent ones too.
        step_seconds: when every node had ended each step, `[T]`.
        step_utilization: `utilization` up to the end of each step, `[T]`.
        per_node: how each node spent its time.
        network, compute: as given to `price`.

    >>> from vecgym.collectives.ledger import Transfer
    >>> steps = [[], [], [Transfer("mean", payload_bytes=10**9, num_nodes=2)]] * 2
    >>> timeline = price(steps, Network("8 Gbit/s"), Compute(1.0))
    >>> timeline
    Timeline(6 steps of 2 nodes: 8 s, 75.0 % computing)
    >>> timeline.num_nodes, timeline.num_steps, timeline.network
    (2, 6, Network(8 Gbit/s))
    >>> timeline.step_seconds, timeline.per_node.waited
    (tensor([1., 2., 4., 5., 6., 8.], dtype=torch.float64), tensor([2., 2.], dtype=torch.float64))
    """

    step_seconds: Tensor
    step_utilization: Tensor
    network: Network
    _run: PricedRun = field(compare=False)
    _counted = "steps of"

    @property
    def num_steps(self) -> int:
        """T, the number of steps."""
        return len(self.step_seconds)

    def bars(self, first: int = 0, last: int | None = None) -> list[Bar]:
        """Return what every node did in the steps from `first` to before `last`; see `vecgym.clock.trace.bars`.

        >>> timeline = price([[Transfer("mean", payload_bytes=10**9, num_nodes=2)]] * 3, Network(8e9), Compute(1.0))
        >>> [bar.kind for bar in timeline.bars(last=1)]
        ['forward', 'backward', 'forward', 'backward', 'send', 'send']
        """
        first, last = self._within(first, last)
        lags = [kind.lag if isinstance(kind.lag, int) else max(kind.lag) for kind in self._run.kinds]
        return bars(self.records(max(0, first - 1 - max(lags, default=0)), last), first)

    def records(self, first: int = 0, last: int | None = None) -> list[StepRecord]:
        """Return what the nodes did in the steps from `first` to before `last`, for figures and traces.

        >>> timeline = price([[Transfer("mean", payload_bytes=10**9, num_nodes=2)]] * 3, Network(8e9), Compute(1.0))
        >>> [float(record.end[0]) for record in timeline.records(1)]
        [3.0, 5.0]
        """
        return self._run.records(*self._within(first, last))


@check.strict
def price(
    transfers: Ledger | Sequence[Sequence[Transfer]],
    network: Network,
    compute: Compute,
    *,
    num_nodes: int | None = None,
    sizes: Mapping[str, float] | None = None,
) -> Timeline:
    """Compute how long a run takes on a network. Nothing is trained, so price a run on as many networks as you like.

    `vecgym.guide.clock` explains what overlaps with what.

    Args:
        transfers: the ledger of a run, `trainer.ledger` or `vecgym.dry_run(...)`, which also records absent nodes; or
            the transfers of each step.
        network: the links between the nodes.
        compute: how long the nodes compute.
        num_nodes: K; only needed if neither the transfers nor the network nor the compute times determine it.
        sizes: the bytes of each parameter, {name: bytes} in the model's order, which determine the messages; a ledger
            contains them. Without them, each transfer is one message at the end of the backward pass.

    Raises:
        ValueError, TypeError: for a network or compute times of another number of nodes.

    >>> import torch
    >>> from vecgym import Trainer
    >>> from vecgym.models import Line
    >>> from vecgym.strategy import AllReduceStrategy
    >>> trainer = Trainer(Line(), torch.ones(64))
    >>> averaged = trainer.fit(AllReduceStrategy("sgd", lr=0.1), num_nodes=4, max_steps=5, device="cpu", progress=False)
    >>> price(trainer.ledger, Network("1 Gbit/s", latency="50 ms"), Compute(0.4))
    Timeline(5 steps of 4 nodes: 3.5 s, 57.1 % computing)
    """
    check.instance("network", network, Network, "a Network, such as Network(1e9, 0.05)")
    check.instance("compute", compute, Compute, "a Compute, such as Compute(0.4)")
    check.optional_integer("num_nodes", num_nodes)
    computing = None
    if isinstance(transfers, Ledger):
        if transfers.asynchronous:
            raise ValueError(
                "price does not support asynchronous runs: their order of events depends on the network. Use "
                "trainer.timeline(), or train again with fit(network=, compute=)."
            )
        num_nodes, sizes = num_nodes or transfers.num_nodes, sizes or transfers.sizes
        kinds, steps = transfers.by_step()
        computing = transfers.computing()
    else:
        kinds, steps = _numbered(transfers)
    K = _num_nodes(kinds, network, compute, num_nodes)
    return PricedRun(network, compute, K, sizes or {}, kinds, steps, computing).timeline()


def used(computed: Tensor, seconds: Tensor) -> Tensor:
    """Return the part of the time of all K nodes in which they compute, `[*, K] -> [*]`; 1 if no time has passed.

    >>> used(torch.tensor([[3.0, 0.0], [6.0, 2.0]]), torch.tensor([[3.0], [8.0]]))
    tensor([0.5000, 0.5000])
    """
    return torch.where(seconds > 0, computed / seconds, 1.0).mean(-1)


@dataclass(frozen=True)
class PricedRun:
    """A run to be priced: its distinct transfers, those of each step, and which nodes compute in each step."""

    network: Network
    compute: Compute
    num_nodes: int
    sizes: Mapping[str, float]
    kinds: list[Transfer]
    steps: list[tuple[int, ...]]
    computing: Tensor | None

    def timeline(self) -> Timeline:
        """Advance the clock through all steps."""
        clock, computed = self._start(len(self.steps))
        ends = torch.cat([computed[:0], *self._ends(clock, computed)])  # [T, K]
        step_seconds = ends.amax(1)
        step_utilization = used(computed.cumsum(0), step_seconds[:, None])
        total = (step_seconds[-1], step_utilization[-1]) if len(ends) else (0.0, 1.0)
        seconds, utilization = total if ends.requires_grad else map(float, total)
        return Timeline(
            seconds, utilization, PerNode(clock.computed, clock.ends - clock.computed, clock.sent, clock.received),
            self.compute, step_seconds, step_utilization, self.network, self,
        )  # fmt: skip

    def records(self, first: int, last: int) -> list[StepRecord]:
        """Return what the nodes did in these steps."""
        clock, computed = self._start(last)
        for _ in self._ends(clock, computed[:first]):
            pass
        clock.records = []
        for step in range(first, last):
            clock.advance(computed[step], clock.plans(self._transfers(step)))
        return clock.records

    def _start(self, num_steps: int) -> tuple[Clock, Tensor]:
        """Return a new clock, and how long each node computes in each of the first steps, `[T, K]`."""
        computed = self.compute.of_steps(num_steps, self.num_nodes)
        if self.computing is not None:  # absent nodes do not compute
            computed = computed.where(self.computing[:num_steps], 0.0)
        return Clock(self.network, self.compute, self.num_nodes, self.sizes), computed

    def _ends(self, clock: Clock, computed: Tensor) -> Iterator[Tensor]:
        """Yield when each node ended each step, `[n, K]` for several steps at a time."""
        steps, num_steps = self.steps, len(computed)
        while (step := clock.step) < num_steps:
            # The first step that sends something else.
            until = next((t for t in range(step, num_steps) if steps[t] != steps[step]), num_steps)
            plans = clock.plans(self._transfers(step))
            if plans:
                yield clock.repeat(computed[step:until], plans)
                continue
            # The step before a message is due ends when the message arrives, so it is made by itself.
            until = min([until, *(due - 1 for due in clock.due)])
            if until > step:
                yield clock.idle(computed[step:until])
            else:
                clock.advance(computed[step])
                yield clock.ends[None]

    def _transfers(self, step: int) -> list[Transfer]:
        return [self.kinds[kind] for kind in self.steps[step]]


def _numbered(transfers: Sequence[Sequence[Transfer]]) -> tuple[list[Transfer], list[tuple[int, ...]]]:
    """Return the distinct transfers, and their indices for each step. Those whose weight is a tensor are distinct."""
    give = "a Ledger, or for each step a list of Transfers"
    kinds: list[Transfer] = []
    index: dict[object, int] = {}
    steps = []
    for step in check.instance("transfers", transfers, (list, tuple), give):
        numbers = []
        for transfer in check.instance("transfers", step, (list, tuple), give):
            check.instance("transfers", transfer, Transfer, give)
            key = id(transfer) if isinstance(transfer.weight, Tensor) else transfer
            numbers.append(index.setdefault(key, len(kinds)))
            if numbers[-1] == len(kinds):
                kinds.append(transfer)
        steps.append(tuple(numbers))
    return kinds, steps


def _num_nodes(kinds: list[Transfer], network: Network, compute: Compute, num_nodes: int | None) -> int:
    counts = {kind.num_nodes for kind in kinds} | ({num_nodes} if num_nodes is not None else set())
    if len(counts) > 1:
        raise ValueError(f"the transfers are of runs of {sorted(counts)} nodes: price one run at a time.")
    for count in (*counts, network.num_nodes, compute.num_nodes):
        if count is not None:
            return count
    raise ValueError("the number of nodes is unknown, since nothing was sent: give num_nodes.")


class RunningClock:
    """Tell after each step how long the run has taken so far on a network, as `price` would at its end.

    Args:
        network, compute: see `price`.
        ledger: of the run. The steps already in it are replayed first, so that a resumed run needs nothing else.

    >>> ledger, step = Ledger(), [Transfer("mean", payload_bytes=10**9, num_nodes=2)]
    >>> ledger.announce(2, {"w": 10**9})
    >>> clock = RunningClock(Network("8 Gbit/s"), Compute(1.0), ledger)
    >>> clock.step(step), clock.step([]), clock.step(step)
    ((2.0, 0.5), (3.0, 0.6666666666666666), (5.0, 0.6))
    """

    def __init__(self, network: Network, compute: Compute, ledger: Ledger) -> None:
        assert ledger.num_nodes is not None
        self.compute, self._clock = compute, Clock(network, compute, ledger.num_nodes, ledger.sizes)
        self._step_seconds = compute.of_steps(0, ledger.num_nodes)
        kinds, steps = ledger.by_step()
        computing = ledger.computing()
        for i, step in enumerate(steps):
            self.step([kinds[kind] for kind in step], None if computing is None else computing[i])

    def step(self, transfers: Sequence[Transfer], computing: Tensor | None = None) -> tuple[float, float]:
        """Make a step; `computing`, bool `[K]`: which nodes compute, None: all. Return seconds and utilization."""
        clock = self._clock
        if clock.step >= len(self._step_seconds):  # times are drawn for many steps at once
            self._step_seconds = self.compute.of_steps((clock.step // BLOCK + 1) * BLOCK, clock.num_nodes)
        seconds = self._step_seconds[clock.step]
        clock.advance(seconds if computing is None else seconds.where(computing, 0.0), clock.plans(transfers))
        seconds = clock.ends.max()
        return float(seconds), float(used(clock.computed, seconds))
