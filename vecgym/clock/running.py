"""The clock of a run that is under way: a step at a time."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from vecgym.clock.clock import Clock
from vecgym.clock.compute import BLOCK, Compute
from vecgym.clock.network import Network
from vecgym.clock.plan import Plan
from vecgym.collectives.ledger import Ledger, Transfer


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
        self._plans: dict[tuple[Transfer, ...], tuple[Plan, ...]] = {}
        self._drawn: Tensor | None = None
        kinds, steps = ledger.by_step()
        computing = ledger.computing()
        for i, step in enumerate(steps):
            self.step([kinds[kind] for kind in step], None if computing is None else computing[i])

    def step(self, transfers: Sequence[Transfer], computing: Tensor | None = None) -> tuple[float, float]:
        """Make a step in which some nodes compute, bool `[K]`, None: all; return seconds and utilization so far."""
        clock, key = self._clock, tuple(transfers)
        if key not in self._plans:
            self._plans[key] = clock.plans(key)
        seconds = self._seconds(clock.step)
        clock.advance(seconds if computing is None else seconds.where(computing, 0.0), self._plans[key])
        ends = clock.ends
        used = (clock.computed / ends).where(ends > 0, 1.0)
        return float(ends.max()), float(used.mean())

    def _seconds(self, step: int) -> Tensor:
        """What the nodes compute in a step, `[K]`, drawn for many steps at a time."""
        if self._drawn is None or step >= len(self._drawn):
            self._drawn = self.compute.of_steps((step // BLOCK + 1) * BLOCK, self._clock.num_nodes)
        return self._drawn[step]
