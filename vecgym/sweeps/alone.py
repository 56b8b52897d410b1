"""Configurations of a sweep that are trained by themselves, from tick to tick of their timetables.

Nodes may be absent in them, or do not wait for one another.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from vecgym.collectives.ledger import bytes_of
from vecgym.core import nodes
from vecgym.runs.async_plan import Updates
from vecgym.runs.asynchronous import recorded_of
from vecgym.runs.recorder import mean_rate
from vecgym.simulation import Event
from vecgym.strategy.asynchronous import EventDriven
from vecgym.sweeps.chunk import Chunk, Curve, Observed


class AsyncChunk(Chunk):
    """One asynchronous configuration; see `Chunk`. Its steps are updates of the server."""

    def _observed(self, num_nodes: int) -> Observed:
        return Observed(self.num_steps, len(self.configs), num_nodes, updates=True)

    def _begin(self) -> None:
        (config,) = self.configs
        assert isinstance(config.strategy, EventDriven)
        assert config.plan is not None
        self.simulation: Any = Updates(
            self.engine, config.strategy, config.plan, config.train.read, seed=config.settings["seed"],
            num_examples=tuple(config.train.shard_sizes), minibatch_size=config.settings["minibatch_size"],
        )  # fmt: skip
        self.presences, self.pure = [None], True
        self.state = self.simulation.init(self._initial())

    def step(self, events: Sequence[Event], measured: bool) -> list[int]:
        """Let the server make an update, and return which configurations have diverged in it.

        Args:
            events: those up to it.
            measured: has no meaning here: all nodes are measured with the server's parameters.
        """
        self.state, row = self.simulation.tick(self.state, events, self._batches)
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
        return recorded_of(self.configs[0].strategy, self.configs[0].num_nodes, columns)

    def _measured(self) -> tuple[Any, Any]:
        return self.state, self.simulation.result(self.state)

    def curve(self, c: int, status: str, keep_model: bool = False) -> Curve:
        average = None
        if keep_model:
            result = self.simulation.result(self.state)
            values = {**result.params, **self.state.buffers}
            average = {n: x.detach().to("cpu", copy=True) for n, x in nodes.mean(values, result.members).items()}
        return self.observed.curve(c, self.state.step, status, average)

    def _load_state(self, state: dict[str, Any], first: Curve) -> None:
        super()._load_state(state, first)
        if len(first.totals):
            ledger, last = self.simulation.comm.ledger, first.totals[-1]
            ledger.total_bytes, ledger.total_received_bytes, ledger.total_payload_bytes = map(float, last)
