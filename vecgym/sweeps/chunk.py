"""The configurations that are trained together: one simulation, and what it shows of each of them."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from vecgym.collectives import StackedCollectives
from vecgym.core import nodes
from vecgym.core.devices import fetched, placed_as
from vecgym.core.tree import Tree
from vecgym.data.batches import chosen_batches, places
from vecgym.engine import Engine
from vecgym.runs.evaluation import distances_of, evaluated_columns
from vecgym.strategy.per_rank import as_strategy
from vecgym.sweeps.configurations import Configuration
from vecgym.sweeps.curves import Curve, Observed
from vecgym.sweeps.merged import Merged, Simulation, State
from vecgym.sweeps.parts import Member


class Chunk:
    """C configurations of equal number of nodes and steps, as one simulation.

    Args:
        configs: those next to one another that can do something in one call; see `vecgym.sweeps.merged`.
        engine: prepared, of a model that is built like theirs.

    Attributes:
        left: the places of those that have not diverged. The rows of the others stay, as nan, and are not recorded.
    """

    def __init__(self, configs: Sequence[Configuration], engine: Engine) -> None:
        self.configs, self.engine = list(configs), engine
        self.left = list(range(len(configs)))
        self.num_steps = configs[0].num_steps
        self.observed = self._observed(configs[0].num_nodes)
        self._sources, self._which = places([config.train for config in configs])
        self._start, self._before = 0.0, 0.0  # the clock at the start, and the seconds before that
        models = [dict(config.model.named_parameters()) for config in configs]
        params = {name: torch.stack([m[name].detach().to(engine.device) for m in models]) for name in engine.params}
        self._begin(params)

    def _observed(self, num_nodes: int) -> Observed:
        return Observed(self.num_steps, len(self.configs), num_nodes)

    def _begin(self, params: Tree) -> None:
        """Make the simulation of all configurations, and its state with these parameters, `[C, *]`."""
        num_elements = self.configs[0].num_nodes * sum(p[0].numel() for p in params.values())
        self.merged = merged = Merged([self._member(config) for config in self.configs], num_elements)
        limits = [c.train.limits or [c.train.batch_size] * c.num_nodes for c in self.configs]
        self.simulation: Any = Simulation(
            self.engine.model, merged, StackedCollectives(merged.num_rows), engine=self.engine,
            max_steps=self.num_steps, minibatch_size=self.configs[0].settings["minibatch_size"],
            limits=tuple(limit for each in limits for limit in each),
            keys=[(config.settings["seed"], node) for config in self.configs for node in range(config.num_nodes)],
        )  # fmt: skip
        self.state: Any = self.simulation.init(params)

    def _member(self, config: Configuration) -> Member:
        strategy = as_strategy(config.strategy, copy.deepcopy(config.model).to(self.engine.device))
        comm = StackedCollectives(config.num_nodes)
        return Member(strategy, config.settings["seed"], comm, tuple(config.train.shard_sizes))

    def batches(self) -> Iterator[Sequence[Any]]:
        """Start the clock, and return the distinct batches of each remaining step; see `step`."""
        self._start = time.perf_counter() - self._before
        return zip(*[source.iterate(self.state.step, self.num_steps) for source in self._sources])

    def step(self, batches: Sequence[Any], measured: bool) -> list[int]:
        """Train one step, and return which configurations have diverged in it.

        Args:
            batches: the distinct ones.
            measured: whether to measure how far the nodes are apart before they exchange parameters.
        """
        distances: list[float] = []

        def measure(params: Tree) -> None:
            each = distances_of(params, len(self.configs), self.simulation.comm)
            distances.extend(map(float, fetched(each)))

        with self.merged.recording() as transfers:
            batch, observe = chosen_batches(batches, self._which), measure if measured else None
            self.state, metrics = self.simulation.step(self.state, batch, observe=observe)
        losses = metrics.losses.cpu().double().view(len(self.configs), -1).numpy()  # [C, K]
        active: np.ndarray = np.full(losses.shape, metrics.active is None)
        if metrics.active is not None:
            active.flat[metrics.active] = True
        self.observed.put(
            self.state.step - 1, train_losses=losses, active=active, lr=self.merged.rates(),
            bytes=self.merged.num_bytes(transfers), seconds=time.perf_counter() - self._start,
        )  # fmt: skip
        diverged = self._diverged(losses, active)
        for c in self.left if distances else []:
            self.observed.evaluated(c, self.state.step, consensus_distance_before=distances[c])
        return diverged

    def _diverged(self, losses: np.ndarray, active: np.ndarray) -> list[int]:
        """Take those that diverge in this step from those that are left."""
        finite = np.isfinite(np.where(active, losses, 0.0).sum(1))  # where no node trains, nothing diverges
        diverged = [c for c in self.left if not finite[c]]
        self.left = [c for c in self.left if finite[c]]
        return diverged

    def evaluate(self) -> None:
        """Add columns to the rows of the present step."""
        validation, result = [config.val for config in self.configs], self.simulation.result(self.state)
        found = evaluated_columns(self.engine, self.state, validation, self.simulation.comm, result)
        for c in self.left:
            if shown := self._shown(found[c]):
                self.observed.evaluated(c, self.state.step, **shown)

    def _shown(self, columns: dict[str, Any]) -> dict[str, Any]:
        return columns

    def curve(self, c: int, status: str, keep_model: bool = False) -> Curve:
        """Return what a configuration has recorded so far."""
        average = None
        if keep_model:
            result = self.simulation.result(self.state)
            values = {**result.params, **self.state.buffers}
            own = {n: x if len(x) == 1 else x.chunk(len(self.configs))[c] for n, x in values.items()}
            average = {n: x.detach().to("cpu", copy=True) for n, x in nodes.mean(own, result.members).items()}
        return self.observed.curve(c, self.state.step, status, average)

    @property
    def can_be_saved(self) -> bool:
        """Whether `state` is all that evolves: strategies written for one rank keep theirs to themselves."""
        return all(member.strategy.pure for member in self.merged.members)

    def load(self, state: dict[str, Any], curves: dict[int, Curve]) -> None:
        """Continue from a saved state, and from what those that are left had recorded up to it, by their places."""
        self.left = list(curves)
        self._load_state(state, curves[self.left[0]])
        for c, curve in curves.items():
            self.observed.load(c, curve)
        if self.state.step > 0:
            self._before = float(curves[self.left[0]].columns["seconds"][-1])

    def _load_state(self, state: dict[str, Any], first: Curve) -> None:
        placed = placed_as(state, vars(self.state), self.engine.device)
        self.state = State(**{**placed, "node_steps": state["node_steps"]})
