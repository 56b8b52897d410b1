"""Asynchronous runs as differentiable functions: the order of events is fixed, so each is one more rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vecgym.clock.asynchronous import rules_of
from vecgym.collectives.base import payload_bytes
from vecgym.core import tree
from vecgym.core.devices import placed
from vecgym.core.transforms import readable
from vecgym.core.tree import Tree
from vecgym.engine import Engine
from vecgym.engine.asynchronous import updates_of
from vecgym.engine.events import Arrival, Event, Stop, schedule
from vecgym.engine.kinds import simulation_of
from vecgym.engine.state import Result, State
from vecgym.runs.rollout_options import RolloutOptions
from vecgym.runs.segments import Record
from vecgym.strategy.asynchronous import EventDriven


def run_async(
    options: RolloutOptions, engine: Engine, initial: Tree | None, steps: Sequence[Any]
) -> tuple[State, Record, Result]:
    """Make the updates for which there are batches; node i takes row i of batch t as its own step t."""
    strategy, K = options.strategy, options.num_nodes
    assert isinstance(strategy, EventDriven)
    assert options.compute is not None
    sizes = {name: payload_bytes(p[None]) for name, p in engine.params.items()}
    rules, seconds = rules_of(strategy, K, options.compute, options.network, sizes, options.seed)
    most = K * len(steps) if options.max_updates is None else options.max_updates
    updates = _with_batches(updates_of(schedule(rules, seconds, Stop(updates=most))), len(steps))
    if not updates:
        raise ValueError(
            f"{len(steps)} batches are too few for a first update, of rounds of {max(rules.num_steps)} steps."
        )

    def read(here: Sequence[int], counts: Sequence[int]) -> tuple[Any, list[int]]:
        batches = [tree.map_leaves(lambda x: x[node], steps[count]) for node, count in zip(here, counts)]  # noqa: B023
        sizes = [len(next(tree.leaves(batch))) for batch in batches]
        # The examples of a smaller batch fill the first places, and repeat.
        places = [torch.arange(max(sizes)) % size for size in sizes]
        wide = [tree.map_leaves(lambda x: x[placed(at, x.device)], b) for b, at in zip(batches, places)]  # noqa: B023
        return tree.map_leaves(lambda *rows: torch.stack(rows), *wide), sizes

    with readable():
        simulation = simulation_of(strategy)(
            options.model, strategy, read, [event for part in updates for event in part], K, engine=engine,
            seed=options.seed, num_examples=options.num_examples,
        )  # fmt: skip
        strategy.inner_optim.check_steps(K, simulation.max_steps, "inner optimizer")
        strategy.check_updates(K, len(updates))
        state = simulation.init(initial)
    losses, sent = [], []
    for events in updates:
        with readable():
            state, updated = simulation.update(state, events, differentiable=True)
        losses.append(updated.metrics.losses)
        sent.append(sum(transfer.sent_bytes for transfer in updated.metrics.transfers))
    record = torch.stack(losses), losses[0].new_zeros(len(updates)), torch.tensor(sent, dtype=torch.float64)
    return state, record, simulation.result(state)


def _with_batches(updates: list[list[Event]], num_batches: int) -> list[list[Event]]:
    """Return the updates before the first in which a node needs more batches than there are."""
    for number, events in enumerate(updates):
        arrivals = (event for event in events if isinstance(event, Arrival))
        if any(arrival.first_step + arrival.num_steps > num_batches for arrival in arrivals):
            return updates[:number]
    return updates
