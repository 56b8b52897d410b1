"""The configurations that are trained together: one simulation, and what it shows of each of them."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vecgym.collectives import StackedCollectives
from vecgym.core import nodes
from vecgym.core.devices import fetched, placed_as
from vecgym.core.tree import Tree
from vecgym.data.batches import chosen_batches, places
from vecgym.engine import Engine
from vecgym.records import runfile
from vecgym.records.columns import START
from vecgym.records.history import History
from vecgym.records.rows import Row
from vecgym.runs.evaluation import distances_of, evaluated_columns
from vecgym.runs.recorder import StepRows, add_losses
from vecgym.simulation.state import HookState, Metrics
from vecgym.strategy import Context
from vecgym.strategy.per_rank import as_strategy
from vecgym.sweeps.configurations import Configuration
from vecgym.sweeps.merged import Merged, StackSimulation
from vecgym.sweeps.parts import Member

PENDING, PARTIAL, FINISHED, DIVERGED = "pending", "interrupted", "finished", "diverged"
# What a result shows of a configuration that has recorded nothing, besides its point.
NOTHING: dict[str, Any] = {
    "steps": 0, "train_loss": None, "val_loss": None, "val_loss_local": None, "consensus_distance": None,
    "bytes_total": 0.0,
}  # fmt: skip


@dataclass
class Curve:
    """What one configuration recorded in T steps.

    Attributes:
        status: how it ended.
        columns: `train_losses` and `active` `[T, K]`, `lr` and `seconds` `[T]`, `bytes` `[T, 3]`, sent, received and
            handed over. Of asynchronous runs also `outer_lr`, nan where there is none, `nodes_per_call`, and `totals`
            `[T, 3]`, all bytes up to there.
        evaluations: the columns of evaluations, with the step of each, packed as the rows of a file.
        average: the parameters and buffers of the averaged model, where they are kept.
        ledger: what was sent, as `Ledger.state`, where nodes may be absent: it is not known without training.
        last: what a result shows of it.
    """

    status: str
    columns: dict[str, Tensor]
    evaluations: dict[str, Any]
    average: Tree | None
    ledger: dict[str, Any] | None = None
    last: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        losses, active = (self.columns[name].numpy() for name in ("train_losses", "active"))
        self.last = {**NOTHING, "steps": len(losses)}
        if len(losses):
            self.last["train_loss"] = float(losses[-1][active[-1]].mean()) if active[-1].any() else np.nan
            self.last["bytes_total"] = float(self.totals[-1, 0])
        for row in runfile.unpacked_rows(self.evaluations):
            self.last |= {name: row[name] for name in NOTHING if name in row}

    @property
    def totals(self) -> np.ndarray:
        """All bytes up to each step, sent, received and handed over, `[T, 3]`."""
        return self.columns["totals"].numpy() if "totals" in self.columns else self.columns["bytes"].numpy().cumsum(0)

    def history(self, settings: dict[str, Any], config: Configuration) -> History:
        """Return the rows that `Trainer.fit` alone would have recorded."""
        history, rows = History(settings), StepRows(config.train, config.train.limits)
        evaluations = {row.pop("step"): row for row in runfile.unpacked_rows(self.evaluations)}
        updates = config.plan is not None
        if 0 in evaluations or updates:
            history.append({**START, **({"sim_seconds": 0.0} if updates else {}), **evaluations.get(0, {})})
        for row in self._rows(config, rows):
            history.append({**row, **evaluations.get(row["step"], {})})
        return history

    def _rows(self, config: Configuration, rows: StepRows) -> Iterator[Row]:
        """Yield the rows of steps of all nodes, or of updates of a server, without their evaluations."""
        plan, presence = config.plan, config.presence()
        comm, examples = StackedCollectives(config.num_nodes), tuple(config.train.shard_sizes)
        sent, lrs, seconds = (self.columns[name].tolist() for name in ("bytes", "lr", "seconds"))
        total = self.totals.tolist()
        for t, (losses, active) in enumerate(zip(self.columns["train_losses"], self.columns["active"])):
            trained = None if bool(active.all()) else active.nonzero().flatten().tolist()
            metrics, num_bytes = Metrics(losses, lrs[t], trained), (sent[t][0], *total[t])
            if plan is None:
                ctx = Context(
                    comm, step=t, max_steps=config.num_steps, seed=config.settings["seed"], num_examples=examples
                )
                metrics = metrics._replace(outer_lr=config.strategy.outer_learning_rate(ctx))
                if presence is not None:
                    there, never = int(presence.row(t).sum()), presence.never_present(t)
                    metrics = metrics._replace(num_present=there, num_never_present=never)
                row = rows.of_step(t + 1, metrics, num_bytes, seconds[t])
            else:
                outer_lr, per_call = (float(self.columns[name][t]) for name in ("outer_lr", "nodes_per_call"))
                metrics = metrics._replace(outer_lr=None if np.isnan(outer_lr) else outer_lr)
                epoch, seen = plan.epoch(t + 1, config.train), plan.seen(t + 1, config.train)
                row = rows.of_step(t + 1, metrics, num_bytes, seconds[t], epoch, seen)
                row.update(plan.columns(t + 1), nodes_per_call=None if np.isnan(per_call) else per_call)
            add_losses(row, losses, trained)
            yield row

    def state(self) -> dict[str, Any]:
        """Return the same as plain values, for a file: `Curve(**state)` inverts it."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.init}


class Observed:
    """The records of C configurations in T steps, in arrays `[T, C, *]`; see `Curve`."""

    def __init__(self, num_steps: int, num_configs: int, num_nodes: int, updates: bool = False) -> None:
        shape = (num_steps, num_configs)
        three, one = ["bytes"], ["seconds", "lr"]  # numbers of each step
        if updates:
            three, one = [*three, "totals"], [*one, "nodes_per_call", "outer_lr"]
        self.arrays = {
            "train_losses": np.full((*shape, num_nodes), np.nan), "active": np.ones((*shape, num_nodes), dtype=bool),
            **{name: np.zeros((*shape, 3)) for name in three}, **{name: np.full(shape, np.nan) for name in one},
        }  # fmt: skip
        self.evaluations: list[dict[int, dict[str, Any]]] = [{} for _ in range(num_configs)]  # step -> columns

    def put(self, t: int, **values: Any) -> None:
        """Record step t, counting from 0."""
        for name, value in values.items():
            self.arrays[name][t] = value

    def evaluated(self, c: int, step: int, **columns: Any) -> None:
        """Record what was measured of a configuration after `step` steps."""
        self.evaluations[c].setdefault(step, {"step": step}).update(columns)

    def curve(self, c: int, num_steps: int, status: str, average: Tree | None) -> Curve:
        """Return what a configuration has recorded in its first steps."""
        columns = {name: torch.from_numpy(x[:num_steps, c].copy()) for name, x in self.arrays.items()}
        return Curve(status, columns, runfile.packed_rows(list(self.evaluations[c].values())), average)

    def load(self, c: int, curve: Curve) -> None:
        """Continue after what a configuration has recorded."""
        for name, x in curve.columns.items():
            self.arrays[name][: len(x), c] = x.numpy()
        self.evaluations[c] = {row["step"]: row for row in runfile.unpacked_rows(curve.evaluations)}


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
        self.simulation: Any = StackSimulation(
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
        self.state = HookState(**{**placed, "node_steps": state["node_steps"]})
