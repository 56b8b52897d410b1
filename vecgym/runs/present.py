"""Who is present in a run, and which batches they then take."""

from __future__ import annotations

from typing import Any

from vecgym.simulation.availability import Facts
from vecgym.simulation.presence import Presence
from vecgym.strategy import Strategy
from vecgym.strategy.base import lets_rest


def presence_of(options: Any, num_steps: int, num_examples: tuple[int, ...] | None) -> Presence | None:
    """Return who is present when in a run with these options, looked at for all steps; None: all, always.

    >>> from types import SimpleNamespace
    >>> presence_of(SimpleNamespace(availability=None), 10, None) is None
    True
    """
    if options.availability is None:
        return None
    batch_size = getattr(options, "batch_size", None)
    facts = Facts(options.num_nodes, num_steps, options.seed, options.compute, num_examples, batch_size)
    return Presence(options.availability, facts)


def check_rollout(availability: Any, strategy: Strategy) -> None:
    """Raise a ValueError for a rollout in which it is not known beforehand who takes which batch.

    >>> check_rollout(None, Strategy("sgd", lr=0.1))
    """
    if availability is None:
        return
    if strategy.asynchronous:
        raise ValueError(f"availability is not there for {type(strategy).__name__}: leave it out.")
    modules = strategy.communication_modules
    if any(map(lets_rest, modules)):
        raise ValueError(
            f"availability={availability!r} and {strategy!r} both say who sits out: in a rollout give one, such "
            "as availability=Sampled(0.5, H) in place of participation=0.5."
        )
