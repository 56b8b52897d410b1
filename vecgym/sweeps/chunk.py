"""The configurations that are trained together: one simulation, and a recorder for each of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vecgym.collectives import StackedCollectives
from vecgym.collectives.ledger import Ledger
from vecgym.core import nodes, tree
from vecgym.core.errors import DivergenceError
from vecgym.core.tree import Tree
from vecgym.data import Batches, EvalBatches
from vecgym.data.chosen import chosen_batches, places
from vecgym.engine.local import Engine
from vecgym.engine.simulation import Simulation, State
from vecgym.records import runfile
from vecgym.records.history import History
from vecgym.runs.evaluation import consensus_distances, evaluated_columns
from vecgym.runs.recorder import Loggers, Recorder
from vecgym.strategy.per_rank import PerRankStrategy, is_per_rank
from vecgym.sweeps.configurations import Configuration
from vecgym.sweeps.merged import Merged
from vecgym.sweeps.parts import Member

PENDING, PARTIAL, FINISHED, DIVERGED = "pending", "interrupted", "finished", "diverged"
# What a result shows of a configuration beside its point, where it has recorded nothing.
NOTHING: dict[str, Any] = {
    "steps": 0, "train_loss": None, "val_loss": None, "val_loss_local": None, "consensus_distance": None,
    "bytes_total": 0.0,
}  # fmt: skip


@dataclass
class Curve:
    """What one configuration recorded, in few bytes.

    Attributes:
        status: how it ended.
        rows: of its history, packed as in a file.
        counts: of the ledger and the recorder, to go on from.
        average: the parameters and buffers of the averaged model, where they are kept.
        last: the last entry of each column that a result shows.
    """

    status: str
    rows: dict[str, Any]
    counts: dict[str, Any] = field(default_factory=dict)
    average: Tree | None = None
    last: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.last = dict(NOTHING)
        for row in runfile.unpacked_rows(self.rows):
            self.last |= {name: row[name] for name in NOTHING if name in row}
            self.last["steps"] = row["step"]

    def history(self, settings: dict[str, Any]) -> History:
        """The rows that `Trainer.fit` alone would have recorded."""
        history = History(settings)
        history.rows = runfile.unpacked_rows(self.rows)
        return history

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SAVED}

    @classmethod
    def of(cls, state: dict[str, Any]) -> Curve:
        return cls(*[state[name] for name in SAVED])


SAVED = ("status", "rows", "counts", "average")


class Chunk:
    """C configurations of equal number of nodes and steps under way.

    Args:
        configs: those next to one another that can do something in one call; see `vecgym.sweeps.merged`.
        engine: prepared, of a model that is built like theirs.
        train: the batches of each.
        val: the validation data of each.
    """

    def __init__(
        self,
        configs: Sequence[Configuration],
        engine: Engine,
        train: Sequence[Batches],
        val: Sequence[EvalBatches | None],
    ) -> None:
        self.configs, self.engine, self.train, self.val = list(configs), engine, list(train), list(val)
        self.begun = [config.index for config in configs]
        self.num_steps = configs[0].num_steps
        self.recorders = [Recorder(History(), Ledger(), x, "raise", Loggers(None, 1), x.limits) for x in train]
        self._sources = places(train)[0]
        each = [dict(config.model.named_parameters()) for config in configs]
        params = {name: torch.stack([own[name].detach().to(engine.device) for own in each]) for name in engine.params}
        num_elements = configs[0].num_nodes * sum(p[0].numel() for p in params.values())
        self.simulation = self._simulation(Merged([self._member(c) for c in range(len(configs))], num_elements))
        self.state = self.simulation.init(params)

    def _member(self, c: int) -> Member:
        config, strategy = self.configs[c], self.configs[c].strategy
        if is_per_rank(strategy):
            strategy = PerRankStrategy(strategy, copy.deepcopy(config.model).to(self.engine.device))
        comm = StackedCollectives(config.num_nodes)
        return Member(strategy, config.settings["seed"], comm, tuple(self.train[c].shard_sizes))

    def _simulation(self, merged: Merged) -> Simulation:
        """Of the configurations that are here."""
        self.merged = merged
        settings = self.configs[0].settings
        sizes = [data.limits or [data.batch_size] * data.num_nodes for data in self.train]
        return Simulation(
            self.engine.model, merged, StackedCollectives(merged.num_rows), engine=self.engine,
            max_steps=self.num_steps, minibatch_size=settings["minibatch_size"],
            limits=tuple(limit for own in sizes for limit in own),
            keys=[(config.settings["seed"], i) for config in self.configs for i in range(config.num_nodes)],
        )  # fmt: skip

    def start(self) -> None:
        """Just before the first step, or the next."""
        for recorder in self.recorders:
            recorder.start({})

    def batches(self) -> Iterator[Sequence[Any]]:
        """The different batches of each step from here on; see `step`."""
        return zip(*[source.iterate(self.state.step, self.num_steps) for source in self._sources])

    def step(self, batches: Sequence[Any], measured: bool) -> list[int]:
        """Train one step, and return which configurations have diverged in it.

        Args:
            batches: of each of the different data.
            measured: how far the nodes are apart before they exchange parameters.
        """
        which = [next(i for i, source in enumerate(self._sources) if source is data) for data in self.train]
        distances: list[float] = []

        def measure(params: Tree) -> None:
            distances.extend(consensus_distances(params, len(self.configs), self.simulation.comm))

        with self.merged.recording() as sent:
            batch = chosen_batches(batches, which)
            self.state, metrics = self.simulation.step(self.state, batch, observe=measure if measured else None)
        diverged = []
        for c, own in enumerate(self.merged.metrics_of_each(metrics, sent)):
            try:
                self.recorders[c].step(self.state, own)
            except DivergenceError:
                diverged.append(c)
                continue
            if measured:
                self.recorders[c].add(consensus_distance_before=distances[c])
        return diverged

    def evaluate(self) -> None:
        """Add columns to the rows of the present step."""
        found = evaluated_columns(self.engine, self.state, self.val, self.simulation.comm)
        for recorder, columns in zip(self.recorders, found):
            if columns:
                recorder.add(**columns)

    def keep(self, chosen: Sequence[int]) -> None:
        """Go on with some of the configurations only."""
        self.configs = [self.configs[c] for c in chosen]
        self.train, self.val = [self.train[c] for c in chosen], [self.val[c] for c in chosen]
        self.recorders = [self.recorders[c] for c in chosen]
        if chosen:
            merged, self.state = self.merged.select(self.state, chosen)
            self.simulation = self._simulation(merged)

    def curve(self, c: int, status: str, keep_model: bool = False) -> Curve:
        """What a configuration has recorded so far."""
        recorder, average = self.recorders[c], None
        recorder.flush()
        counts = {"ledger": recorder.ledger.state(), "recorder": recorder.state()} if status == PARTIAL else {}
        if keep_model:
            values = {**self.state.params, **self.state.buffers}
            own = {n: x if len(x) == 1 else x.chunk(len(self.configs))[c] for n, x in values.items()}
            average = {n: x.detach().to("cpu", copy=True) for n, x in nodes.mean(own).items()}
        return Curve(status, runfile.packed_rows(recorder.history.rows), counts, average)

    # ------------------------------------------------------------------------------------------- saving

    @property
    def can_be_saved(self) -> bool:
        """Whether `state` is all that evolves: strategies written for one rank keep theirs to themselves."""
        return not any(isinstance(member.strategy, PerRankStrategy) for member in self.merged.members)

    def load(self, state: dict[str, Any], curves: Sequence[Curve]) -> None:
        """Go on from a saved state, and from what was recorded up to it."""
        self.state = State(**tree.map_leaves(lambda x: x.to(self.engine.device), state))
        for recorder, curve in zip(self.recorders, curves):
            recorder.history.rows = runfile.unpacked_rows(curve.rows)
            recorder.ledger.load(curve.counts["ledger"])
            recorder.load(curve.counts["recorder"])
