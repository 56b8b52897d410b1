"""Who is present in a run, and which batches they then take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vecgym.collectives import Collectives
from vecgym.collectives.distributed import DistributedCollectives
from vecgym.core import tree
from vecgym.data import Batches
from vecgym.engine.apart import PartSimulation
from vecgym.engine.availability import Facts
from vecgym.engine.presence import Presence
from vecgym.engine.simulation import MOST, Simulation
from vecgym.engine.state import State
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


def own_batch(train: Batches, presence: Presence, state: State, beside: bool = True) -> tuple[Any, list[int] | None]:
    """Return the batch of a step, each node's at its own count, and how many examples of each row are its own.

    Where few of the nodes here are present it has their rows only, and where none is, it is None. None in place of the
    numbers: as in every step of the run.

    Args:
        beside: whether the others may train too; see `Simulation.beside`. Without it they never have rows.

    >>> from vecgym.engine.availability import Trace
    >>> presence = Presence(Trace([[True, False, False]]), Facts(3, 1, seed=0))
    >>> state = State(0, {}, {}, {}, {}, node_steps=torch.tensor([0, 0, 0]))
    >>> own_batch(Batches(torch.arange(6), 3, batch_size=2, shuffle=False), presence, state)
    (tensor([[0, 3]]), [2])
    """
    step, counts = state.step, state.node_steps.tolist()
    here = presence.row(step)[list(train.node_ids)].nonzero().flatten().tolist()
    if len(here) == len(counts) and all(count == step for count in counts):
        return train.batch(step), None
    if not here:
        return None, None
    there = list(range(len(counts))) if beside and len(here) >= MOST * len(counts) else here
    return train.at([counts[node] for node in there], there)


def simulation_of(presence: Presence | None, comm: Collectives) -> type[Simulation]:
    """Return the class of the simulation of the nodes of `comm`, where some may be absent.

    >>> from vecgym.collectives import StackedCollectives
    >>> simulation_of(None, StackedCollectives(4)).__name__
    'Simulation'
    """
    apart = presence is not None and isinstance(comm, DistributedCollectives) and comm.wire.num_processes > 1
    return PartSimulation if apart else Simulation


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
