"""A chunk, the configurations that are trained together as one simulation, and the curve of each."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vecgym.collectives import StackedCollectives
from vecgym.collectives.ledger import Ledger
from vecgym.core import nodes
from vecgym.core.devices import fetched, placed_as
from vecgym.core.tree import Tree
from vecgym.engine import Engine
from vecgym.engine.constancy import copied
from vecgym.engine.contract import warn_of_parts
from vecgym.records import runfile
from vecgym.records.columns import START
from vecgym.records.history import History
from vecgym.records.rows import Row, is_measure
from vecgym.runs.evaluation import distances_of, evaluated_columns, recorded_of
from vecgym.runs.recorder import StepRows, add_losses, mean_rate, rates_of
from vecgym.runs.run import is_due
from vecgym.simulation import Event, State
from vecgym.simulation.simulation import Draft, warn_of_untrained, without_gradient
from vecgym.simulation.stack import BatchReader, Stack, groups_of
from vecgym.simulation.state import Metrics, Result
from vecgym.strategy.base import Strategy
from vecgym.strategy.per_rank import as_strategy
from vecgym.strategy.simulated import metrics_of
from vecgym.sweeps.configurations import Configuration
from vecgym.sweeps.options import SweepOptions

PENDING, PARTIAL, FINISHED, DIVERGED = "pending", "interrupted", "finished", "diverged"
# The columns of a configuration that has recorded nothing, besides its point.
EMPTY_ROW: dict[str, Any] = {
    "steps": 0, "train_loss": None, "val_loss": None, "val_loss_local": None, "consensus_distance": None,
    "bytes_total": 0.0,
}  # fmt: skip


@dataclass
class Curve:
    """The records of one configuration over T steps.

    Attributes:
        status: "finished", "diverged" or "interrupted".
        columns: `train_losses` and `active` `[T, K]`, `lr` and `seconds` `[T]`, `bytes` `[T, 4]`: sent in the step,
            and sent, received and handed over so far.
        evaluations: the columns of evaluations, with the step of each, packed as the rows of a file.
        average: the parameters and buffers of the averaged model, if they are kept.
        ledger: `Ledger.state`, if nodes may be absent: the transfers are then not known without training.
        last: its columns in a row of the result.
    """

    status: str
    columns: dict[str, Tensor]
    evaluations: dict[str, Any]
    average: Tree | None
    ledger: dict[str, Any] | None = None
    last: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        losses, active = (self.columns[name].numpy() for name in ("train_losses", "active"))
        self.last = {**EMPTY_ROW, "steps": len(losses)}
        if len(losses):
            self.last["train_loss"] = float(losses[-1][active[-1]].mean()) if active[-1].any() else np.nan
            self.last["bytes_total"] = float(self.columns["bytes"][-1, 1])
        for row in runfile.unpacked_rows(self.evaluations):
            metrics = [name for name in row if is_measure(name) and isinstance(row[name], float)]
            self.last |= {name: row[name] for name in (*EMPTY_ROW, *metrics) if name in row}

    def history(self, settings: dict[str, Any], config: Configuration) -> History:
        """Return the history that `Trainer.fit` would have recorded for it alone."""
        history = History(settings)
        evaluations = {row.pop("step"): row for row in runfile.unpacked_rows(self.evaluations)}
        updates = config.plan is not None
        if 0 in evaluations or updates:
            history.append({**START, **({"sim_seconds": 0.0} if updates else {}), **evaluations.get(0, {})})
        for row in self._rows(config):
            history.append({**row, **evaluations.get(row["step"], {})})
        return history

    def _rows(self, config: Configuration) -> Iterator[Row]:
        """Yield the row of each step, or of each update of a server, without evaluations."""
        strategy: Any = config.strategy
        plan, facts = config.plan, config.facts()
        rows = StepRows(config.train, facts, None if plan is None else strategy.timetable(facts))
        num_bytes, lrs, seconds = (self.columns[name].tolist() for name in ("bytes", "lr", "seconds"))
        everybody = self.columns["active"].all(1).tolist()
        for t, losses in enumerate(self.columns["train_losses"]):
            trained = None if everybody[t] else self.columns["active"][t].nonzero().flatten().tolist()
            if plan is None:
                metrics = Metrics(losses, lrs[t], trained, strategy.outer_rate(facts, t))
            else:
                metrics = metrics_of(strategy, plan, t + 1, losses)
            row = rows.of_step(t + 1, metrics, num_bytes[t], seconds[t])
            add_losses(row, losses, trained)
            yield row

    def state(self) -> dict[str, Any]:
        """Return the fields as plain values, for a file: `Curve(**state)` inverts it."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.init}


class Records:
    """The records of C configurations in T steps, in arrays `[T, C, *]`; see `Curve`."""

    def __init__(self, num_steps: int, num_configs: int, num_nodes: int) -> None:
        shape = (num_steps, num_configs)
        self.arrays = {
            "train_losses": np.full((*shape, num_nodes), np.nan), "active": np.ones((*shape, num_nodes), dtype=bool),
            "bytes": np.zeros((*shape, 4)), "seconds": np.full(shape, np.nan), "lr": np.full(shape, np.nan),
        }  # fmt: skip
        self.evaluations: list[dict[int, dict[str, Any]]] = [{} for _ in range(num_configs)]  # step -> columns

    def put(self, t: int, **values: Any) -> None:
        """Record step t, counting from 0."""
        for name, value in values.items():
            self.arrays[name][t] = value

    def add_columns(self, c: int, step: int, **columns: Any) -> None:
        """Record measurements of a configuration after `step` steps."""
        self.evaluations[c].setdefault(step, {"step": step}).update(columns)

    def curve(self, c: int, num_steps: int, status: str, average: Tree | None, ledger: dict[str, Any] | None) -> Curve:
        """Return the records of a configuration over its first `num_steps` steps."""
        columns = {name: torch.from_numpy(x[:num_steps, c].copy()) for name, x in self.arrays.items()}
        return Curve(status, columns, runfile.packed_rows(list(self.evaluations[c].values())), average, ledger)

    def load(self, c: int, curve: Curve) -> None:
        """Restore the records of a configuration."""
        for name, x in curve.columns.items():
            self.arrays[name][: len(x), c] = x.numpy()
        self.evaluations[c] = {row["step"]: row for row in runfile.unpacked_rows(curve.evaluations)}


@dataclass
class Work:
    """The training of a chunk, or the rest of it after an interruption.

    Attributes:
        configs: all configurations at the start of the chunk.
        partial: the state at its interruption; None: it was not interrupted.
        curves: index of a configuration -> its curve up to the interruption.
    """

    configs: list[Configuration]
    partial: dict[str, Any] | None = None
    curves: dict[int, Curve] = field(default_factory=dict)

    @property
    def indices(self) -> list[int]:
        """The configurations to train."""
        return [config.index for config in self.configs] if self.partial is None else list(self.partial["left"])

    @property
    def steps_left(self) -> int:
        """The number of steps left, over all configurations to train."""
        done = 0 if self.partial is None else self.partial["steps"]
        return len(self.indices) * (self.configs[0].num_steps - done)


class Chunk:
    """C configurations with equal numbers of nodes and steps, trained from the start or after an interruption.

    Asynchronous configurations share a plan: they have the same events at the same time. Their steps are updates of the
    server, and the distance between the nodes before an exchange is not measured.

    Args:
        work: the configurations to train.
        engine: see `prepared_engine`.
        curves: index of a configuration -> its curve; filled by the chunk.

    Attributes:
        running: the places of the configurations that have not diverged. The rows of the others stay in the stack, as
            nan, and are not recorded.
        partial: the state in which it was interrupted, if it can be continued.
    """

    def __init__(self, work: Work, options: SweepOptions, engine: Engine, curves: dict[int, Curve]) -> None:
        self.configs, self.options, self.engine, self.curves = work.configs, options, engine, curves
        self.running = list(range(len(self.configs)))
        self.num_steps = self.configs[0].num_steps
        self.plan = self.configs[0].plan
        self.records = Records(self.num_steps, len(self.configs), self.configs[0].num_nodes)
        self._start, self._before = 0.0, 0.0  # the clock at the start, and the seconds before that
        self._begin()
        self.partial = work.partial
        if work.partial is not None:
            self._load(work.partial, work.curves)

    def steps(self) -> Iterator[int]:
        """Train, and yield after each step the number of steps, over all configurations, that are done or not needed.

        It ends after the last step, or when all configurations have diverged. Call `end` afterwards, and in any case
        `simulation.close`.
        """
        self._start = time.perf_counter() - self._before
        ticks, ahead = itertools.tee(self.simulation.timetable.ticks(self.state.tick))
        self._batches = self.simulation.read(self.simulation.requests(ahead))
        if self.state.step == 0:
            self.evaluate()
        for events in ticks:
            step, count = self.state.step + 1, len(self.running)
            evaluated = step == self.num_steps or is_due(step, self.options.val_interval)
            diverged = self.step(events, measured=evaluated and self.plan is None)
            for c in diverged:
                self.curves[self.configs[c].index] = self.curve(c, DIVERGED)
            if self.running and evaluated:
                self.evaluate()
            yield count + len(diverged) * (self.num_steps - step)
            if not self.running:
                return

    def end(self) -> None:
        """Record the running configurations as finished or interrupted."""
        if self.running and self.state.step < self.num_steps:
            self.keep()
            return
        for c in self.running:
            self.curves[self.configs[c].index] = self.curve(c, FINISHED)
        each = ((self.simulation.alone(self.state, c), self._groups[c]) for c in self.running)
        warn_of_untrained(without_gradient(state, self.simulation.tables[group]) for state, group in each)
        self.partial = None

    def keep(self) -> None:
        """Store curves and state so far; strategies written for one rank are not pure, and cannot be continued."""
        for c in self.running:
            self.curves[self.configs[c].index] = self.curve(c, PARTIAL)
        begun = [config.index for config in self.configs]
        partial = {
            "begun": begun, "left": [begun[c] for c in self.running], "steps": self.state.step,
            "state": vars(self.state), "ledgers": [ledger.state() for ledger in self.ledgers],
        }  # fmt: skip
        self.partial = partial if self.pure else None

    def _initial(self) -> Tree:
        """Return the initial parameters of the configurations' models, `[C, *]`."""
        models = [dict(config.model.named_parameters()) for config in self.configs]
        device = self.engine.device
        return {name: torch.stack([m[name].detach().to(device) for m in models]) for name in self.engine.params}

    def _begin(self) -> None:
        """Create the simulation of all configurations, sorted by group, and its state."""
        strategies, runs = [], []
        models = {id(config.model): config.model for config in self.configs}
        copies = {key: copy.deepcopy(model).to(self.engine.device) for key, model in models.items()}
        for config in self.configs:
            strategy = as_strategy(config.strategy, copies[id(config.model)])
            facts = config.facts()
            if facts.presence is not None:
                facts.presence.warn_never_present()
                strategy = strategy.through_server() if facts.presence.server else strategy
            strategies.append(strategy)
            runs.append(facts)
        order, groups = groups_of(strategies, runs)
        self.configs = [self.configs[c] for c in order]
        self.presences: list[Any] = [runs[c].presence for c in order]
        waits = [runs[c].presence is not None or strategies[c].who_trains(runs[c]) is not None for c in order]
        self._steady: dict[int, list[float]] = {}  # the learning rates of groups whose rates never change
        self.pure = all(strategy.pure for strategy in strategies)
        self._groups = [number for number, group in enumerate(groups) for _ in range(group.size)]
        num_nodes = self.configs[0].num_nodes
        self.simulation: Any = Stack(
            self.engine, groups, StackedCollectives(num_nodes), self._read(waits),
            minibatch_size=self.configs[0].settings["minibatch_size"],
        )  # fmt: skip
        self.state: Any = self.simulation.init(self._initial())
        self.ledgers = [Ledger() for _ in groups]
        for ledger in self.ledgers:
            ledger.announce(num_nodes, self.simulation.comm.ledger.sizes)

    def _read(self, waits: Sequence[bool]) -> BatchReader:
        """Return the reader of all rows. Configurations share a stream if the same nodes always read the same data.

        Args:
            waits: for each configuration, whether some nodes do not train in some steps.
        """
        alike = [(id(config.train), self._groups[c] if waits[c] else None) for c, config in enumerate(self.configs)]
        streams = list(dict.fromkeys(alike))
        sources = [self.configs[alike.index(key)].train for key in streams]
        return BatchReader(sources, [streams.index(key) for key in alike], self.configs[0].num_nodes)

    def step(self, events: Sequence[Event], measured: bool) -> list[int]:
        """Train one step, and return the configurations that have diverged in it.

        Args:
            events: of this step.
            measured: whether to measure the distance between the nodes before they exchange parameters.
        """
        latest: list[float] = []  # of all configurations, after the last step or return of a node
        distances: dict[int | None, list[float]] = {}  # the same, before the first exchange of each group

        def measure(event: Event, draft: Draft) -> None:
            if event.reads or event.what == "rejoin":
                latest.clear()
            elif event.group not in distances:
                latest[:] = latest or self._distances(draft.own, draft.shared, draft.tick)
                distances[event.group] = latest[:]

        step = self.state.tick
        self.state, row = self.simulation.tick(self.state, events, self._batches, before=measure if measured else None)
        if measured and not latest:
            latest = self._distances(self.state.own, self.state.shared, step)
        losses = row.losses.cpu().double().view(len(self.configs), -1).numpy()  # [C, K]
        active, seconds = self._active(row), time.perf_counter() - self._start
        lr, num_bytes = self._rates(step) if self.plan is None else np.nan, self._num_bytes(step, row)
        self.records.put(step, train_losses=losses, active=active, lr=lr, bytes=num_bytes, seconds=seconds)
        diverged = self._diverged(losses, active)
        for c in self.running if measured else []:
            before = distances.get(self._groups[c], latest)[c]
            self.records.add_columns(c, step + 1, consensus_distance_before=before)
        return diverged

    def _active(self, row: Any) -> np.ndarray | bool:
        """Return a mask of the nodes that have trained, or that arrived for an update, `[C, K]`; True: all."""
        rows = row.active if self.plan is None else [arrival.node for arrival in self.plan.arrivals(row.tick)]
        if rows is None:
            return True
        active: np.ndarray = np.zeros((len(self.configs), self.configs[0].num_nodes), dtype=bool)
        (active.reshape(-1) if self.plan is None else active.T)[rows] = True
        return active

    def _rates(self, step: int) -> list[float]:
        """Return the inner learning rate of each configuration, averaged over nodes with different rates."""
        rates: list[float] = []
        for number, group in enumerate(self.simulation.groups):
            of_group = self._steady.get(number)
            if of_group is None:
                of_group = self._rates_of(number, step)
                steady = not group.algorithm.inner.changes and type(group.algorithm).rates is Strategy.rates
                if steady and group.run.presence is None:
                    self._steady[number] = of_group
            rates += of_group
        return rates

    def _rates_of(self, number: int, step: int) -> list[float]:
        group, table = self.simulation.groups[number], self.simulation.tables[number]
        once = "params" in self.state.shared[str(number)]
        lr, _ = rates_of(group.algorithm, group.run, table, step, once)
        if group.size > 1 and isinstance(lr, Tensor) and lr.numel() > 1:
            return lr.detach().reshape(group.size, -1).double().mean(1).tolist()
        return [mean_rate(lr)] * group.size

    def _num_bytes(self, step: int, row: Any) -> Any:
        """Return the bytes per node of each configuration: sent in the step; sent, received, handed over so far."""
        for number, (group, ledger) in enumerate(zip(self.simulation.groups, self.ledgers)):
            presence, sent = group.run.presence, row.sent_by(number) if row.transfers else ()
            ledger.add(step, sent, None if presence is None else presence.is_training(step))
        return np.array([(ledger.step_bytes, *ledger.totals) for ledger in self.ledgers])[self._groups]

    def _distances(self, own: Any, shared: Any, tick: int) -> list[float]:
        """Return the distance between the nodes of each configuration."""
        comm, params = self.simulation.comm, self.simulation.parameters(own, shared)
        members = [self.simulation.members(tick, group) for group in self._groups]
        return list(map(float, fetched(distances_of(params, comm, members))))

    def _diverged(self, losses: np.ndarray, active: np.ndarray | bool) -> list[int]:
        """Remove the configurations that diverge in this step from `running`, and return them."""
        finite = np.isfinite(np.where(active, losses, 0.0).sum(1))  # if no node trains, nothing diverges
        diverged = [c for c in self.running if not finite[c]]
        self.running = [c for c in self.running if finite[c]]
        return diverged

    def evaluate(self) -> None:
        """Evaluate the running configurations after the present step."""
        columns: dict[int, dict[str, Any]] = {}
        unlike = len({config.val and config.val.sizes for config in self.configs}) > 1
        # A model is the mean of some of the nodes, or whatever its strategy says.
        other = any(any(self.simulation.averaged(self.state.tick, group)) for group in {*self._groups})
        other |= any(type(config.strategy).result is not Strategy.result for config in self.configs)
        if len(self.configs) == 1 or unlike or any(self.presences) or other:
            for c in self.running:
                measured = self.simulation.alone(self.state, c)
                columns[c] = self._evaluated([self.configs[c]], measured, self.simulation.result(measured, c))[0]
        else:
            own, shared = self.state.own, self.state.shared
            params, buffers = self.simulation.parameters(own, shared), self.simulation.buffers(own, shared)
            measured = State(self.state.tick, {"params": params, "buffers": buffers}, {})
            columns = dict(enumerate(self._evaluated(self.configs, measured, Result(params))))
        for c in self.running:
            strategy, run = self.configs[c].strategy, self.simulation.groups[self._groups[c]].run
            if recorded := recorded_of(strategy, run, self.state.step, columns[c]):
                self.records.add_columns(c, self.state.step, **recorded)

    def _evaluated(self, configs: Sequence[Configuration], measured: Any, result: Result) -> list[dict[str, Any]]:
        comm = StackedCollectives(len(configs) * configs[0].num_nodes)
        return evaluated_columns(self.engine, measured, [config.val for config in configs], comm, result)

    def curve(self, c: int, status: str) -> Curve:
        """Return the curve of a configuration so far."""
        average = None
        if status == FINISHED and self.options.keep_models:
            alone = self.simulation.alone(self.state, c)
            result = self.simulation.result(alone, c)
            values = nodes.mean(result.params, result.members) | nodes.mean(alone.buffers, result.of_buffers)
            average = {n: x.detach().to("cpu", copy=True) for n, x in values.items()}
        ledger = None if self.presences[c] is None else self.ledgers[self._groups[c]].state()
        return self.records.curve(c, self.state.step, status, average, ledger)

    def _load(self, partial: dict[str, Any], curves: dict[int, Curve]) -> None:
        """Restore a saved state, and the curves of the configurations that were running."""
        self.running = [c for c, config in enumerate(self.configs) if config.index in partial["left"]]
        state = placed_as(partial["state"], vars(self.state), self.engine.device)
        self.state = State(state["tick"], state["own"], state["shared"])
        for ledger, saved in zip(self.ledgers, partial["ledgers"]):
            ledger.load(saved)
        for c in self.running:
            curve = curves[self.configs[c].index]
            self.records.load(c, curve)
            self._before = float(curve.columns["seconds"][-1]) if self.state.step > 0 else 0.0


def prepared_engine(configs: list[Configuration], options: SweepOptions) -> Engine:
    """Return an engine that fits all chunks with the same number of similar configurations."""
    model = copied(configs[0].model).to(options.device)
    engine = Engine(
        model, engine=options.engine, chunk_size=options.chunk_size, node_threads=options.node_threads,
        compile=options.compile,
    )  # fmt: skip
    mean = len(configs) == 1 and configs[0].strategy.mean_gradient
    batch = nodes.join_rows([config.train.batch(0) for config in configs])
    engine.prepare(batch, mean=mean, num_passes=configs[0].num_steps)
    warn_of_parts(batch, configs[0].settings["minibatch_size"], engine.weighted)
    return engine
