"""The clock of a run, finished or in progress: when each node begins and ends each step, given what was sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vecgym.clock.compute import BLOCK, FORWARD, Compute
from vecgym.clock.messages import NEVER, MessagePlan, Passage, Planner
from vecgym.clock.network import Network, Routes
from vecgym.collectives.ledger import Ledger, Transfer

ROUNDING = 2e-15  # relative


class Delivery(NamedTuple):
    """The messages of a plan and their times in one step, for figures and traces.

    Attributes:
        plan: the messages.
        ready: when each node was ready for each message, `[K, M]`.
        up, down: until when the links were busy beforehand, `[K + 1]`.
        arrival: when each message arrived, `[K or 1, M]`.
    """

    plan: MessagePlan
    ready: Tensor
    up: Tensor
    down: Tensor
    arrival: Tensor


class StepRecord(NamedTuple):
    """What the nodes did in one step, `[K]` seconds each.

    Attributes:
        step: counted from 0.
        begin: when they could have begun, had all messages arrived.
        forward: when the forward pass ended.
        end: when the backward pass ended.
        seconds: how long they computed.
        needs: what the forward pass waited for.
        deliveries: what was sent.
    """

    step: int
    begin: Tensor
    forward: Tensor
    end: Tensor
    seconds: Tensor
    needs: tuple[Need, ...]
    deliveries: tuple[Delivery, ...]


class Need(NamedTuple):
    """What a forward pass waits for: the last of the messages that it needs.

    Attributes:
        arrival: when the message arrives, `[K or 1]`.
        rest: the fraction of the forward pass that needs it.
        step, plan, place: the step that sent it, the index of the plan in that step, and of the message in that plan.
    """

    arrival: Tensor
    rest: float
    step: int
    plan: int
    place: int


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
        self._planner = Planner(Routes(network, num_nodes), sizes, compute)
        self._plans: dict[tuple[Transfer, ...], tuple[MessagePlan, ...]] = {}
        self.step = 0
        zero = torch.zeros(num_nodes, dtype=torch.float64)
        self.begin, self.computed, self.sent, self.received = zero, zero, zero, zero
        self._up = self._down = torch.zeros(num_nodes + 1, dtype=torch.float64)
        self._due: dict[int, list[Need]] = {}
        self.records: list[StepRecord] | None = None

    def plans(self, transfers: Sequence[Transfer]) -> tuple[MessagePlan, ...]:
        """Return the messages of these transfers, computed once for all steps with the same transfers."""
        key = tuple(transfers)
        if key not in self._plans:
            self._plans[key] = self._planner.plans(key)
        return self._plans[key]

    @property
    def ends(self) -> Tensor:
        """When each node had ended the last step and received what the next one needs, `[K]`."""
        ends = self.begin
        for need in self._due.get(self.step, ()):
            ends = torch.maximum(ends, need.arrival)
        return ends

    @property
    def next_due(self) -> int | None:
        """The next step whose forward pass waits for a message; None if there is none."""
        return min(self._due, default=None)

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
        steady = bool((seconds == seconds[0]).all())
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
        due = [(step - self.step, need) for step, needs in sorted(self._due.items()) for need in needs]
        arrivals = [need.arrival.expand(self.num_nodes) for _, need in due]
        return [(steps, need.rest) for steps, need in due], torch.cat([self.begin, self._up, self._down, *arrivals])

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
        self._due = {
            at + count: [need._replace(arrival=later(need.arrival), step=need.step + count) for need in needs]
            for at, needs in self._due.items()
        }
        self.step += count
        self.computed = self.computed + count * seconds
        for plan in plans:
            self.sent, self.received = (x + count * y for x, y in zip((self.sent, self.received), plan.busy))
        return ends

    def advance(self, seconds: Tensor, plans: tuple[MessagePlan, ...] = ()) -> None:
        """Make one step in which the nodes compute for `seconds`, `[K]`, and send the messages of `plans`."""
        needs = self._due.pop(self.step, [])
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
        ready = forward[:, None] + backward[:, None] * plan.done  # [K, M]
        before = self._up, self._down
        arrival, up, down = self._pass(plan, ready)
        w = plan.weight
        if isinstance(w, Tensor) or w != 1:
            up, down = (old + w * (new - old) for old, new in zip(before, (up, down)))
            is_sent = arrival > NEVER
            arrival = torch.where(is_sent, ready + w * (arrival.where(is_sent, ready) - ready), NEVER)
        self._up, self._down = up, down
        for lag, place, rest, nodes in plan.needs:
            due = arrival[:, place] if nodes is None else arrival[:, place].where(nodes, NEVER)
            need = Need(due, rest, self.step, which, place)
            self._due.setdefault(self.step + 1 + lag, []).append(need)
        self.sent, self.received = self.sent + plan.busy[0], self.received + plan.busy[1]
        return Delivery(plan, ready, *before, arrival)

    def _pass(self, plan: MessagePlan, ready: Tensor) -> Passage:
        up, down, arrivals = self._up, self._down, []
        for exchange, places, amounts in plan.bursts:
            arrival, up, down = exchange.run(ready[:, places], amounts, up, down)
            arrivals.append(arrival)
        if len(arrivals) == 1:  # a column for all nodes, if it arrives everywhere at once
            return Passage(arrivals[0], up, down)
        return Passage(torch.cat([x.expand(self.num_nodes, -1) for x in arrivals], 1), up, down)


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
        self._step_seconds: Tensor | None = None
        kinds, steps = ledger.by_step()
        computing = ledger.computing()
        for i, step in enumerate(steps):
            self.step([kinds[kind] for kind in step], None if computing is None else computing[i])

    def step(self, transfers: Sequence[Transfer], computing: Tensor | None = None) -> tuple[float, float]:
        """Make a step; `computing`, bool `[K]`: which nodes compute, None: all. Return seconds and utilization."""
        clock = self._clock
        seconds = self._seconds(clock.step)
        clock.advance(seconds if computing is None else seconds.where(computing, 0.0), clock.plans(transfers))
        ends = clock.ends
        utilization = (clock.computed / ends).where(ends > 0, 1.0)
        return float(ends.max()), float(utilization.mean())

    def _seconds(self, step: int) -> Tensor:
        """Return how long the nodes compute in a step, `[K]`; times are drawn for many steps at once."""
        if self._step_seconds is None or step >= len(self._step_seconds):
            self._step_seconds = self.compute.of_steps((step // BLOCK + 1) * BLOCK, self._clock.num_nodes)
        return self._step_seconds[step]
