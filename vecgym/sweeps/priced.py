"""The configurations of a sweep on networks: seconds without training anything again."""

from __future__ import annotations

from typing import Any

from vecgym.clock import dry_run, price
from vecgym.collectives.ledger import Ledger
from vecgym.sweeps.clocks import check_clock, clocks
from vecgym.sweeps.configurations import Configuration
from vecgym.sweeps.curves import Curve


class Prices:
    """Seconds of configurations, for each network and each compute; remembered.

    Args:
        network, compute: one, or {name: one}: an axis of the rows.

    >>> from vecgym.clock import Compute, Network
    >>> prices = Prices({"fast": Network(1e9), "slow": Network(1e6)}, Compute(0.4))
    >>> prices.points
    [{'network': 'fast'}, {'network': 'slow'}]
    """

    def __init__(self, network: Any, compute: Any) -> None:
        check_clock(network, compute)
        self._clocks = clocks(network, compute)
        self.points = [clock.point for clock in self._clocks]
        self.axes = list(self.points[0])
        self._ledgers: dict[int, Ledger] = {}
        self._found: dict[tuple[int, int, int], dict[str, Any]] = {}

    def places(self, config: Configuration) -> list[int]:
        """The points that a configuration is priced at: all; of its own compute, if that is among them."""
        own = [place for place, clock in enumerate(self._clocks) if clock.compute is config.compute]
        return own or list(range(len(self._clocks)))

    def row(self, config: Configuration, place: int, curve: Curve | None) -> dict[str, Any]:
        """The columns of a configuration at one of the points, and what it has recorded so far."""
        ledger = self._ledger(config, curve)
        if ledger is None:
            return {**self.points[place], "sim_seconds": None, "sim_utilization": None}
        key = config.index, place, ledger.num_steps
        if key not in self._found:
            network, compute = self._clocks[place][1:]
            assert network is not None
            assert compute is not None
            timeline = price(ledger, network, compute)
            columns = {"sim_seconds": timeline.seconds, "sim_utilization": timeline.utilization}
            # Where the network takes another route than a ring, a node's link carries other bytes than in training.
            sent = {"bytes_total": ledger.routed(network.routes).total_bytes} if network.routes else {}
            self._found[key] = {**self.points[place], **sent, **columns}
        return self._found[key]

    def _ledger(self, config: Configuration, curve: Curve | None) -> Ledger | None:
        """What a configuration sends in all; where nodes may be absent, what it has sent: nobody knows it before."""
        if config.settings["availability"] is not None:
            if curve is None or curve.ledger is None:
                return None
            ledger = Ledger()
            ledger.load(curve.ledger)
            return ledger
        if config.index not in self._ledgers:
            self._ledgers[config.index] = dry_run(
                config.model, config.strategy, config.num_nodes, config.num_steps, seed=config.settings["seed"],
                unused=config.unused,
            )  # fmt: skip
        return self._ledgers[config.index]
