"""The clock of a run that is under way: a step at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
        computing: step -> which nodes compute in it, bool `[K]`; None: all, always.

    >>> ledger, step = Ledger(), [Transfer("mean", payload_bytes=10**9, num_nodes=2)]
    >>> ledger.announce(2, {"w": 10**9})
    >>> clock = RunningClock(Network("8 Gbit/s"), Compute(1.0), ledger)
    >>> clock.step(step), clock.step([]), clock.step(step)
    ((2.0, 0.5), (3.0, 0.6666666666666666), (5.0, 0.6))
    """

    def __init__(
        self, network: Network, compute: Compute, ledger: Ledger, computing: Callable[[int], Tensor] | None = None
    ) -> None:
        assert ledger.num_nodes is not None
        self.compute, self._clock = compute, Clock(network, compute, ledger.num_nodes, ledger.sizes)
        self._plans: dict[tuple[Transfer, ...], tuple[Plan, ...]] = {}
        self._drawn: Tensor | None = None
        self._computing = computing
        kinds, steps = ledger.by_step()
        for step in steps:
            self.step([kinds[kind] for kind in step])

    def step(self, transfers: Sequence[Transfer]) -> tuple[float, float]:
        """Make a step: seconds and utilization so far."""
        clock, key = self._clock, tuple(transfers)
        if key not in self._plans:
            self._plans[key] = clock.plans(key)
        clock.advance(self._seconds(clock.step), self._plans[key])
        ends = clock.ends
        used = (clock.computed / ends).where(ends > 0, 1.0)
        return float(ends.max()), float(used.mean())

    def _seconds(self, step: int) -> Tensor:
        """What the nodes compute in a step, `[K]`, drawn for many steps at a time."""
        if self._drawn is None or step >= len(self._drawn):
            self._drawn = self.compute.of_steps((step // BLOCK + 1) * BLOCK, self._clock.num_nodes)
        seconds = self._drawn[step]
        return seconds if self._computing is None else seconds.where(self._computing(step), 0.0)
