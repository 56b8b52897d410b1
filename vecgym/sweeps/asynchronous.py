"""Asynchronous configurations of a sweep, each by itself: from update to update of its server."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vecgym.collectives.ledger import bytes_of
from vecgym.core.tree import Tree
from vecgym.engine.asynchronous import AsyncSimulation, Updated
from vecgym.engine.events import Event
from vecgym.engine.kinds import simulation_of
from vecgym.engine.simulation import State
from vecgym.runs.asynchronous import of_server
from vecgym.runs.recorder import mean_rate
from vecgym.strategy.asynchronous import EventDriven
from vecgym.sweeps.chunk import Chunk
from vecgym.sweeps.curves import Curve, Observed


class AsyncChunk(Chunk):
    """One asynchronous configuration; see `Chunk`. Its steps are updates of the server."""

    simulation: AsyncSimulation

    def _observed(self, num_nodes: int) -> Observed:
        return Observed(self.num_steps, len(self.configs), num_nodes, updates=True)

    def _begin(self, params: Tree) -> None:
        (config,) = self.configs
        assert isinstance(config.strategy, EventDriven)
        assert config.plan is not None
        self.simulation = simulation_of(config.strategy)(
            self.engine.model, config.strategy, self._read, config.plan.events, config.num_nodes, engine=self.engine,
            seed=config.settings["seed"], minibatch_size=config.settings["minibatch_size"],
            num_examples=tuple(config.train.shard_sizes),
        )  # fmt: skip
        self.state = self.simulation.init(params)

    def _read(self, here: Sequence[int], steps: Sequence[int]) -> tuple[Any, list[int]]:
        return self.configs[0].train.at(steps, here)

    def batches(self) -> Iterator[Sequence[Event]]:
        """Start the clock, and return the events of each remaining update; see `step`."""
        self._start = time.perf_counter() - self._before
        assert self.configs[0].plan is not None
        return iter(self.configs[0].plan.updates[self.state.step :])

    def step(self, batches: Sequence[Event], measured: bool) -> list[int]:
        """Let the server make an update, and return which configurations have diverged in it.

        Args:
            batches: the events up to it.
            measured: has no meaning here: all nodes are measured with the server's parameters.
        """
        self.state, updated = self.simulation.update(self.state, batches)
        self.simulation.comm.ledger.add(self.state.step - 1, updated.metrics.transfers)
        return self._record(updated)

    def _record(self, updated: Updated) -> list[int]:
        ledger, metrics, computed = self.simulation.comm.ledger, updated.metrics, updated.computed
        losses = metrics.losses.cpu().double()[None].numpy()
        active: np.ndarray = np.zeros(losses.shape, dtype=bool)
        active[:, metrics.active] = True
        self.observed.put(
            self.state.step - 1, train_losses=losses, active=active, bytes=bytes_of(metrics.transfers),
            totals=ledger.totals, seconds=time.perf_counter() - self._start,
            nodes_per_call=sum(computed) / len(computed) if computed else np.nan, lr=mean_rate(metrics.lr),
            outer_lr=np.nan if metrics.outer_lr is None else mean_rate(metrics.outer_lr),
        )  # fmt: skip
        return self._diverged(losses, active)

    def _shown(self, columns: dict[str, Any]) -> dict[str, Any]:
        if self.simulation.server is not None:
            return of_server(columns)
        columns.pop("consensus_distance_before", None)
        return columns

    @property
    def can_be_saved(self) -> bool:
        return True

    def load(self, state: dict[str, Any], curves: dict[int, Curve]) -> None:
        """Continue from a saved state, and from what was recorded up to it."""
        super().load(state, curves)
        asked = {name: x for name, x in state["strategy"].items() if name == "done"}  # at every event: on the host
        self.state = State(**{**vars(self.state), "strategy": {**self.state.strategy, **asked}})
        ledger, totals = self.simulation.comm.ledger, curves[0].totals
        if len(totals):
            ledger.total_bytes, ledger.total_received_bytes, ledger.total_payload_bytes = map(float, totals[-1])
