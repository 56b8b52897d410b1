"""The configurations of a sweep on networks: seconds without training anything again."""

from __future__ import annotations

from typing import Any

from vecgym.clock import dry_run, price
from vecgym.collectives.ledger import Ledger
from vecgym.sweeps.clocks import check_clock, clocks
from vecgym.sweeps.configurations import Configuration


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
        self._found: dict[tuple[int, int], dict[str, Any]] = {}

    def row(self, config: Configuration, place: int) -> dict[str, Any]:
        """The columns of a configuration at one of the points."""
        if (config.index, place) not in self._found:
            self._found[config.index, place] = self._priced(config, place)
        return self._found[config.index, place]

    def _priced(self, config: Configuration, place: int) -> dict[str, Any]:
        if config.settings["availability"] is not None:
            raise ValueError(
                "where nodes may be absent, a configuration's seconds are not known without training: leave network "
                "and compute out, or run it with Trainer.fit(availability=..., network=..., compute=...)."
            )
        if config.index not in self._ledgers:
            self._ledgers[config.index] = dry_run(
                config.model, config.strategy, config.num_nodes, config.num_steps, seed=config.settings["seed"]
            )
        network, compute = self._clocks[place][1:]
        assert network is not None
        assert compute is not None
        ledger = self._ledgers[config.index]
        timeline = price(ledger, network, compute)
        # Where the network takes another route than a ring, a node's link carries other bytes than in training.
        sent = {"bytes_total": ledger.routed(network.routes).total_bytes} if network.routes else {}
        priced = {"sim_seconds": timeline.seconds, "sim_utilization": timeline.utilization}
        return {**self.points[place], **sent, **priced}
