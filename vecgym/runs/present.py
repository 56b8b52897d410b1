"""Who is present in a rollout, and which batches they then take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vecgym.core import tree
from vecgym.engine.availability import Availability, Facts
from vecgym.engine.presence import Presence
from vecgym.strategy.communication import innermost, overrides


def presence_of(options: Any, steps: Sequence[Any]) -> Presence | None:
    """Return who is present when in the rollout of some `RolloutOptions`; None: all, always.

    >>> from types import SimpleNamespace
    >>> presence_of(SimpleNamespace(availability=None), []) is None
    True
    """
    availability, strategy = options.availability, options.strategy
    if availability is None:
        return None
    assert isinstance(availability, Availability)
    if strategy.asynchronous:
        raise ValueError(f"availability is not there for {type(strategy).__name__}: leave it out.")
    modules = strategy.communication_modules
    if any(overrides(module, "active_nodes") and innermost(module).lets_rest for module in modules):
        raise ValueError(
            f"availability={availability!r} and {strategy!r} both say who sits out: in a rollout give one, such "
            "as availability=Sampled(0.5, H) in place of participation=0.5."
        )
    facts = Facts(options.num_nodes, len(steps), options.seed, options.compute, options.num_examples)
    return Presence(availability, facts)


def at_own_counts(steps: Sequence[Any], presence: Presence) -> list[Any]:
    """Return the batches `[K, B, ...]` of a rollout such that row i of the next is that of node i's own next step.

    Raises:
        ValueError: for batches of different shapes.

    >>> from vecgym.engine.availability import Trace
    >>> presence = Presence(Trace([[True, False], [True, True]]), Facts(2, 2, seed=0))
    >>> at_own_counts([torch.tensor([[1], [2]]), torch.tensor([[3], [4]])], presence)[1]
    tensor([[3],
            [2]])
    """
    counts, found = torch.zeros(presence.run.num_nodes, dtype=torch.long), []
    for step in range(len(steps)):
        if bool((counts == step).all()):
            found.append(steps[step])
        else:
            shapes = {tuple(x.shape for x in tree.leaves(steps[count])) for count in counts.tolist()}
            if len(shapes) > 1:
                raise ValueError(
                    "availability: the batches have different shapes, and nodes that were absent are at another one "
                    "than the rest: give batches of one shape."
                )
            own = [tree.map_leaves(lambda x: x[i], steps[n]) for i, n in enumerate(counts.tolist())]  # noqa: B023
            found.append(tree.map_leaves(lambda *rows: torch.stack(rows), *own))
        counts = counts + presence.computing(step)
    return found
