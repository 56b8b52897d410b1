"""The clock of a run, or of one that is under way: when each node begins and ends each step, given what was sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vecgym.clock.compute import BLOCK, FORWARD, Compute
from vecgym.clock.messages import NEVER, Passed, Plan, Planner
from vecgym.clock.network import Network, Routes
from vecgym.collectives.ledger import Ledger, Transfer

ROUNDING = 2e-15  # relative


class Sent(NamedTuple):
    """The messages of a plan, as they passed in one step: for figures and traces.

    Attributes:
        plan: the messages.
        ready: when each node was ready for each, `[K, M]`.
        up, down: until when the links were taken before, `[K + 1]`.
        arrival: when each was there, `[K or 1, M]`.
    """

    plan: Plan
    ready: Tensor
    up: Tensor
    down: Tensor
    arrival: Tensor


class Record(NamedTuple):
    """What the nodes did in one step, `[K]` seconds each.

    Attributes:
        step: counted from 0.
        begin: when they could begin, had everything been there.
        forward: when the forward pass ended.
        end: when the backward pass did.
        seconds: that they computed.
        needed: what had to be there before the forward pass.
        sent: what left.
    """

    step: int
    begin: Tensor
    forward: Tensor
    end: Tensor
    seconds: Tensor
    needed: tuple[Need, ...]
    sent: tuple[Sent, ...]


class Need(NamedTuple):
    """What a forward pass waits for: the last message of those that are needed then.

    Attributes:
        arrival: when it is there, `[K or 1]`.
        rest: the part of the forward pass that needs it.
        step, plan, place: in which step, in which of its plans, and as which message, it left.
    """

    arrival: Tensor
    rest: float
    step: int
    plan: int
    place: int


class Clock:
    """The times of K nodes, advanced step by step.

    Args:
        network: the links.
        compute: of the nodes.
        num_nodes: K.
        sizes: the bytes of each parameter, by name and in order.

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
        self._plans: dict[tuple[Transfer, ...], tuple[Plan, ...]] = {}
        self.step = 0
        zero = torch.zeros(num_nodes, dtype=torch.float64)
        self.begin, self.computed, self.sent, self.received = zero, zero, zero, zero
        self._up = self._down = torch.zeros(num_nodes + 1, dtype=torch.float64)
        self._due: dict[int, list[Need]] = {}
        self.records: list[Record] | None = None

    def plans(self, transfers: Sequence[Transfer]) -> tuple[Plan, ...]:
        """The messages of these transfers: made once for all steps that have the same."""
        key = tuple(transfers)
        if key not in self._plans:
            self._plans[key] = self._planner.plans(key)
        return self._plans[key]

    @property
    def ends(self) -> Tensor:
        """When each node had ended the last step, and had what the next one needs, `[K]`."""
        found = self.begin
        for need in self._due.get(self.step, ()):
            found = torch.maximum(found, need.arrival)
        return found

    @property
    def next_due(self) -> int | None:
        """The next step whose forward pass needs something that was sent; None: no step does."""
        return min(self._due, default=None)

    def idle(self, seconds: Tensor) -> Tensor:
        """Make steps without any messages, `[n, K]` seconds; when each node ended each, `[n, K]`."""
        ends = self.begin + seconds.cumsum(0)
        self.begin, self.computed = ends[-1], self.computed + seconds.sum(0)
        self.step += len(seconds)
        return ends

    def repeat(self, seconds: Tensor, plans: tuple[Plan, ...]) -> Tensor:
        """Make steps that all send the same, `[n, K]` seconds; when each node ended each, with what it was sent.

        Times follow from one another by sums and maxima. So where a step has moved all of them by the same amount, the
        next one, if nodes compute for as long, does so too: the rest is multiplied.
        """
        alike = bool((seconds == seconds[0]).all())
        ends: list[Tensor] = []
        for row in seconds:
            before = self._times() if alike else None
            self.advance(row, plans)
            ends.append(self.ends)
            step = None if before is None else self._moved(*before)
            if step is not None:
                ends.append(self._multiply(len(seconds) - len(ends), step, row, plans))
                break
        return torch.vstack(ends)

    def _times(self) -> tuple[list[tuple[int, float]], Tensor]:
        """All that later steps depend on: what is needed when, and the times of nodes, links and arrivals."""
        due = [(step - self.step, need) for step, needs in sorted(self._due.items()) for need in needs]
        arrivals = [need.arrival.expand(self.num_nodes) for _, need in due]
        return [(steps, need.rest) for steps, need in due], torch.cat([self.begin, self._up, self._down, *arrivals])

    def _moved(self, form: list[tuple[int, float]], before: Tensor) -> float | None:
        """By how much the last step has moved all times; None: not all by the same.

        A link that has not moved and was free before any node began is one that nobody uses.
        """
        now, after = self._times()
        if now != form or after.requires_grad:
            return None
        step = float(after[0] - before[0])
        moved = (after - before - step).abs() <= ROUNDING * after[0]
        unused = (after == before) & (before <= before[: self.num_nodes].min())
        unused[: self.num_nodes] = False  # a node that is never there stays where it is
        return step if bool((moved | unused).all()) else None

    def _multiply(self, count: int, step: float, seconds: Tensor, plans: tuple[Plan, ...]) -> Tensor:
        """Make steps that each move all times by `step`; when each node ended each, `[count, K]`."""
        ends = self.ends + step * torch.arange(1, count + 1, dtype=torch.float64)[:, None]
        first = self.begin.min() - step  # what is earlier is of links that nobody uses

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

    def advance(self, seconds: Tensor, plans: tuple[Plan, ...] = ()) -> None:
        """Make one step in which the nodes compute for so many seconds, `[K]`, and send what is planned."""
        needed = self._due.pop(self.step, [])
        begin, forward = self.begin, self._forward(seconds, needed)
        self.begin = forward + seconds * (1 - FORWARD)
        self.computed = self.computed + seconds
        sent = tuple(self._send(i, plan, forward, seconds * (1 - FORWARD)) for i, plan in enumerate(plans))
        if self.records is not None:
            self.records.append(Record(self.step, begin, forward, self.begin, seconds, tuple(needed), sent))
        self.step += 1

    def _forward(self, seconds: Tensor, needed: list[Need]) -> Tensor:
        """When the forward pass ends: layer after layer, each as soon as what it needs is there."""
        took = seconds * FORWARD
        end = self.begin + took
        for need in needed:
            end = torch.maximum(end, need.arrival + took * need.rest)
        return end

    def _send(self, which: int, plan: Plan, forward: Tensor, took: Tensor) -> Sent:
        """Send the messages of a plan. What counts w times, 0 < w < 1, delays what it delays by that part of it."""
        ready = forward[:, None] + took[:, None] * plan.done  # [K, M]
        before = self._up, self._down
        arrival, up, down = self._pass(plan, ready)
        w = plan.weight
        if isinstance(w, Tensor) or w != 1:
            up, down = (old + w * (new - old) for old, new in zip(before, (up, down)))
            there = arrival > NEVER
            arrival = torch.where(there, ready + w * (arrival.where(there, ready) - ready), NEVER)
        self._up, self._down = up, down
        for lag, place, rest, nodes in plan.needs:
            there = arrival[:, place] if nodes is None else arrival[:, place].where(nodes, NEVER)
            need = Need(there, rest, self.step, which, place)
            self._due.setdefault(self.step + 1 + lag, []).append(need)
        self.sent, self.received = self.sent + plan.busy[0], self.received + plan.busy[1]
        return Sent(plan, ready, *before, arrival)

    def _pass(self, plan: Plan, ready: Tensor) -> Passed:
        up, down, arrivals = self._up, self._down, []
        for exchange, places, amounts in plan.runs:
            arrival, up, down = exchange.run(ready[:, places], amounts, up, down)
            arrivals.append(arrival)
        if len(arrivals) == 1:  # at all nodes at once, perhaps
            return Passed(arrivals[0], up, down)
        return Passed(torch.cat([x.expand(self.num_nodes, -1) for x in arrivals], 1), up, down)


class RunningClock:
    """Says after each step how long the run has taken so far on a network, as `price` would at its end.

    Args:
        network, compute: see `price`.
        ledger: of the run; steps that are in it already are made first, so a resumed run needs nothing else.

    >>> ledger, step = Ledger(), [Transfer("mean", payload_bytes=10**9, num_nodes=2)]
    >>> ledger.announce(2, {"w": 10**9})
    >>> clock = RunningClock(Network("8 Gbit/s"), Compute(1.0), ledger)
    >>> clock.step(step), clock.step([]), clock.step(step)
    ((2.0, 0.5), (3.0, 0.6666666666666666), (5.0, 0.6))
    """

    def __init__(self, network: Network, compute: Compute, ledger: Ledger) -> None:
        assert ledger.num_nodes is not None
        self.compute, self._clock = compute, Clock(network, compute, ledger.num_nodes, ledger.sizes)
        self._drawn: Tensor | None = None
        kinds, steps = ledger.by_step()
        computing = ledger.computing()
        for i, step in enumerate(steps):
            self.step([kinds[kind] for kind in step], None if computing is None else computing[i])

    def step(self, transfers: Sequence[Transfer], computing: Tensor | None = None) -> tuple[float, float]:
        """Make a step in which some nodes compute, bool `[K]`, None: all; return seconds and utilization so far."""
        clock = self._clock
        seconds = self._seconds(clock.step)
        clock.advance(seconds if computing is None else seconds.where(computing, 0.0), clock.plans(transfers))
        ends = clock.ends
        used = (clock.computed / ends).where(ends > 0, 1.0)
        return float(ends.max()), float(used.mean())

    def _seconds(self, step: int) -> Tensor:
        """What the nodes compute in a step, `[K]`, drawn for many steps at a time."""
        if self._drawn is None or step >= len(self._drawn):
            self._drawn = self.compute.of_steps((step // BLOCK + 1) * BLOCK, self._clock.num_nodes)
        return self._drawn[step]
