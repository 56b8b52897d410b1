"""Asynchronous configurations of a sweep, each by itself: from update to update of its server."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vecgym.collectives.ledger import bytes_of
from vecgym.core.devices import placed_as
from vecgym.runs.async_plan import Updates, reading
from vecgym.runs.asynchronous import shown_of
from vecgym.runs.recorder import mean_rate
from vecgym.simulation import Event, State
from vecgym.strategy.asynchronous import EventDriven
from vecgym.sweeps.chunk import Chunk
from vecgym.sweeps.curves import Curve, Observed


class AsyncChunk(Chunk):
    """One asynchronous configuration; see `Chunk`. Its steps are updates of the server."""

    simulation: Any  # `Updates`
    state: Any
    presence = None

    def _observed(self, num_nodes: int) -> Observed:
        return Observed(self.num_steps, len(self.configs), num_nodes, updates=True)

    def _begin(self, num_elements: int) -> Any:
        (config,) = self.configs
        assert isinstance(config.strategy, EventDriven)
        assert config.plan is not None
        return Updates(
            self.engine, config.strategy, config.plan, reading(config.train), seed=config.settings["seed"],
            num_examples=tuple(config.train.shard_sizes), minibatch_size=config.settings["minibatch_size"],
        )  # fmt: skip

    def batches(self) -> Iterator[Sequence[Event]]:
        """Start the clock, and return the events of each remaining update; see `step`."""
        self._start = time.perf_counter() - self._before
        ticks, ahead = itertools.tee(self.simulation.timetable.ticks(self.state.step))
        self._batches = self.simulation.read(self.simulation.requests(ahead))
        return ticks

    def step(self, batches: Sequence[Event], measured: bool) -> list[int]:
        """Let the server make an update, and return which configurations have diverged in it.

        Args:
            batches: the events up to it.
            measured: has no meaning here: all nodes are measured with the server's parameters.
        """
        self.state, row = self.simulation.tick(self.state, batches, self._batches)
        ledger, metrics = self.simulation.comm.ledger, self.simulation.metrics(row)
        ledger.add(row.tick - 1, row.transfers)
        losses = row.losses.cpu().double()[None].numpy()
        active: np.ndarray = np.zeros(losses.shape, dtype=bool)
        active[:, metrics.active] = True
        per_call = self.simulation.timetable.columns(row.tick)["nodes_per_call"]
        self.observed.put(
            row.tick - 1, train_losses=losses, active=active, bytes=bytes_of(row.transfers),
            totals=ledger.totals, seconds=time.perf_counter() - self._start,
            nodes_per_call=np.nan if per_call is None else per_call, lr=mean_rate(metrics.lr),
            outer_lr=np.nan if metrics.outer_lr is None else mean_rate(metrics.outer_lr),
        )  # fmt: skip
        return self._diverged(losses, active)

    def _shown(self, columns: dict[str, Any]) -> dict[str, Any]:
        return shown_of(self.configs[0].strategy, self.configs[0].num_nodes, columns)

    @property
    def can_be_saved(self) -> bool:
        return True

    def load(self, state: dict[str, Any], curves: dict[int, Curve]) -> None:
        """Continue from a saved state, and from what was recorded up to it."""
        self.left = list(curves)
        self.state = State(**placed_as(state, vars(self.state), self.engine.device))
        for c, curve in curves.items():
            self.observed.load(c, curve)
        ledger, curve = self.simulation.comm.ledger, curves[0]
        if len(curve.totals):
            ledger.total_bytes, ledger.total_received_bytes, ledger.total_payload_bytes = map(float, curve.totals[-1])
        if self.state.step > 0:
            self._before = float(curve.columns["seconds"][-1])
