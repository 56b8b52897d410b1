"""The networks and computes of a sweep: one, or an axis of several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from vecgym.clock import Compute, Network
from vecgym.core import check

T = TypeVar("T", Network, Compute)


class Clock(NamedTuple):
    """A network and a compute, with their names where they are axes."""

    point: dict[str, str]
    network: Network | None
    compute: Compute | None


def clocks(network: Any, compute: Any) -> list[Clock]:
    """Return each network with each compute, of one or {name: one} of both; None: there is none.

    >>> [clock.point for clock in clocks({"near": Network(1e9), "far": Network(1e6)}, Compute(0.4))]
    [{'network': 'near'}, {'network': 'far'}]
    """
    none: dict[str | None, Any] = {None: None}
    networks = none if network is None else _named("network", network, Network, "Network(1e9, 0.05)")
    computes = none if compute is None else _named("compute", compute, Compute, "Compute(0.4)")
    return [
        Clock({axis: key for axis, key in (("network", n), ("compute", c)) if key is not None}, network, one)
        for n, network in networks.items()
        for c, one in computes.items()
    ]


def check_clock(network: Any, compute: Any) -> None:
    """Raise a ValueError unless both are given."""
    if network is None or compute is None:
        raise ValueError("network and compute together say how long a configuration takes: give both.")


def _named(name: str, value: Any, kind: type[T], example: str) -> dict[str | None, T]:
    """{name: value}; {None: value} for one alone."""
    give = f"a vecgym.clock.{example}, or a dict of some by name"
    if not isinstance(value, Mapping):
        return {None: check.instance(name, value, kind, give)}
    if not value:
        raise ValueError(f"{name} is an empty dict; give {give}.")
    return {str(key): check.instance(f"{name}[{key!r}]", one, kind, give) for key, one in value.items()}
