"""The configurations of a sweep on networks: seconds without training anything again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from vecgym.clock import Compute, Network, dry_run, price
from vecgym.collectives.ledger import Ledger
from vecgym.core import check
from vecgym.sweeps.configurations import Configuration

T = TypeVar("T", Network, Compute)


class Prices:
    """Seconds of configurations, for each network and each compute; remembered.

    Args:
        network, compute: one, or {name: one}: an axis of the rows.

    >>> prices = Prices({"fast": Network(1e9), "slow": Network(1e6)}, Compute(0.4))
    >>> prices.points
    [{'network': 'fast'}, {'network': 'slow'}]
    """

    def __init__(self, network: Any, compute: Any) -> None:
        self._networks = _named("network", network, Network, "Network(1e9, 0.05)")
        self._computes = _named("compute", compute, Compute, "Compute(0.4)")
        self.points: list[dict[str, str]] = [
            {name: key for name, key in (("network", n), ("compute", c)) if key is not None}
            for n in self._networks
            for c in self._computes
        ]
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
        n, c = divmod(place, len(self._computes))
        network, compute = list(self._networks.values())[n], list(self._computes.values())[c]
        timeline = price(self._ledgers[config.index], network, compute)
        return {**self.points[place], "sim_seconds": timeline.seconds, "sim_utilization": timeline.utilization}


def _named(name: str, value: Any, kind: type[T], example: str) -> dict[str | None, T]:
    """{name: value}; {None: value} for one alone."""
    give = f"a vecgym.clock.{example}, or a dict of some by name"
    if not isinstance(value, Mapping):
        return {None: check.instance(name, value, kind, give)}
    if not value:
        raise ValueError(f"{name} is an empty dict; give {give}.")
    return {str(key): check.instance(f"{name}[{key!r}]", one, kind, give) for key, one in value.items()}
