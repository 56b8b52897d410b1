"""Configurations of a sweep that are trained by themselves, from tick to tick of their timetables.

Nodes may be absent in them, or do not wait for one another.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from vecgym.collectives.ledger import bytes_of
from vecgym.core.devices import fetched, placed_as
from vecgym.core.tree import Tree
from vecgym.runs.async_plan import Updates
from vecgym.runs.asynchronous import recorded_of
from vecgym.runs.evaluation import distance_of
from vecgym.runs.recorder import mean_rate
from vecgym.simulation import Event, State
from vecgym.simulation.adapted import simulation_of
from vecgym.simulation.simulation import Draft
from vecgym.strategy.asynchronous import EventDriven
from vecgym.sweeps.chunk import Chunk, Curve, Observed


class Alone(Chunk):
    """One configuration in which nodes may be absent; see `Chunk`. Its batches are the events of a tick."""

    def _begin(self, params: Tree) -> None:
        (config,) = self.configs
        presence, member = config.presence(), self._member(config)
        assert presence is not None
        presence.tell()
        self.presence, self._pure = presence, member.strategy.pure
        self.simulation: Any = simulation_of(
            self.engine.model, member.strategy, member.comm, engine=self.engine, max_steps=self.num_steps,
            seed=config.settings["seed"], minibatch_size=config.settings["minibatch_size"],
            num_examples=member.num_examples, presence=presence,
            read=partial(config.train.read, shard_sizes=tuple(config.train.shard_sizes)),
        )  # fmt: skip
        self.state = self.simulation.init(params)

    def batches(self) -> Iterator[Sequence[Event]]:
        """Start the clock, and return the events of each remaining step; see `step`."""
        self._start = time.perf_counter() - self._before
        ticks, ahead = itertools.tee(self.simulation.timetable.ticks(self.state.tick))
        self._read = self.simulation.read(self.simulation.requests(ahead))
        return ticks

    def step(self, batches: Sequence[Event], measured: bool) -> list[int]:
        """Handle the events of a step, and return which configurations have diverged in it."""
        distances: list[float] = []

        def measure(event: Event, draft: Draft) -> None:
            if measured and not distances and not event.reads and event.what != "rejoin":
                members = self.simulation.members(draft.tick)
                distances.append(float(fetched(distance_of(draft.params, self.simulation.comm, members))))

        step = self.state.tick
        self.state, row = self.simulation.tick(self.state, batches, self._read, before=measure)
        self.simulation.comm.ledger.add(step, row.transfers, self.presence.computing(step))
        losses = row.losses.cpu().double()[None].numpy()
        active: np.ndarray = np.full(losses.shape, row.active is None)
        active[:, row.active or []] = True
        self.observed.put(
            step, train_losses=losses, active=active, lr=[mean_rate(row.columns["lr"])],
            bytes=[bytes_of(row.transfers)], seconds=time.perf_counter() - self._start,
        )  # fmt: skip
        diverged = self._diverged(losses, active)
        for c in self.left if distances else []:
            self.observed.evaluated(c, step + 1, consensus_distance_before=distances[c])
        return diverged

    def curve(self, c: int, status: str, keep_model: bool = False) -> Curve:
        curve = super().curve(c, status, keep_model)
        curve.ledger = self.simulation.comm.ledger.state()
        return curve

    @property
    def can_be_saved(self) -> bool:
        return self._pure

    def _load_state(self, state: dict[str, Any], first: Curve) -> None:
        placed = placed_as(state, vars(self.state), self.engine.device)
        self.state = State(state["tick"], placed["own"], placed["shared"])
        if first.ledger is not None:
            self.simulation.comm.ledger.load(first.ledger)


class AsyncChunk(Alone):
    """One asynchronous configuration; see `Chunk`. Its steps are updates of the server."""

    def _observed(self, num_nodes: int) -> Observed:
        return Observed(self.num_steps, len(self.configs), num_nodes, updates=True)

    def _begin(self, params: Tree) -> None:
        (config,) = self.configs
        assert isinstance(config.strategy, EventDriven)
        assert config.plan is not None
        self.simulation: Any = Updates(
            self.engine, config.strategy, config.plan, config.train.read, seed=config.settings["seed"],
            num_examples=tuple(config.train.shard_sizes), minibatch_size=config.settings["minibatch_size"],
        )  # fmt: skip
        self.state = self.simulation.init(params)

    def step(self, batches: Sequence[Event], measured: bool) -> list[int]:
        """Let the server make an update, and return which configurations have diverged in it.

        Args:
            batches: the events up to it.
            measured: has no meaning here: all nodes are measured with the server's parameters.
        """
        self.state, row = self.simulation.tick(self.state, batches, self._read)
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

    @property
    def can_be_saved(self) -> bool:
        return True

    def curve(self, c: int, status: str, keep_model: bool = False) -> Curve:
        return Chunk.curve(self, c, status, keep_model)  # what was sent follows from the plan

    def _load_state(self, state: dict[str, Any], first: Curve) -> None:
        super()._load_state(state, first)
        if len(first.totals):
            ledger, last = self.simulation.comm.ledger, first.totals[-1]
            ledger.total_bytes, ledger.total_received_bytes, ledger.total_payload_bytes = map(float, last)
