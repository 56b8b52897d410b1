"""The loop of every kind of run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence

from vecgym.simulation.simulation import Before, Row, Simulation
from vecgym.simulation.state import State

Listener = Callable[[State, Row], None]


def run(
    simulation: Simulation, state: State, listeners: Sequence[Listener] = (), *, pure: bool = False,
    before: Before | None = None, stop: Callable[[State], bool] | None = None,
) -> State:  # fmt: skip
    """Run the timetable from the state's tick to its end, or until `stop`; return the last state.

    Args:
        state: must not be used afterwards, unless `pure`.
        listeners: called after each tick with the state and its measurements.
        pure: the run can be differentiated. In the state that it returns, names may share memory: only a pure run can
            continue from it.
        before: called before each event; see `Simulation.tick`.
    """
    ticks, ahead = itertools.tee(simulation.timetable.ticks(state.tick))
    batches = simulation.read(simulation.requests(ahead))
    try:
        for events in ticks:
            state, row = simulation.tick(state, events, batches, pure=pure, before=before)
            for listener in listeners:
                listener(state, row)
            if stop is not None and stop(state):
                break
    finally:
        if isinstance(batches, Generator):
            batches.close()
    return state
