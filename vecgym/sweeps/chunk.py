"""The configurations that are trained together: one simulation, and what it shows of each of them."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vecgym.collectives import StackedCollectives
from vecgym.collectives.ledger import Ledger, bytes_of
from vecgym.core import nodes, tree
from vecgym.core.devices import fetched, placed_as
from vecgym.core.tree import Tree
from vecgym.data import Batches
from vecgym.data.batches import chosen_batches
from vecgym.engine import Engine
from vecgym.records import runfile
from vecgym.records.columns import START
from vecgym.records.history import History
from vecgym.records.rows import Row
from vecgym.runs.evaluation import distance_of, distances_of, evaluated_columns
from vecgym.runs.recorder import StepRows, add_losses, mean_rate
from vecgym.simulation import Event, RunFacts, State
from vecgym.simulation.simulation import Draft, Request
from vecgym.simulation.stack import Stack
from vecgym.simulation.state import Metrics, Result
from vecgym.strategy.base import Strategy
from vecgym.strategy.per_rank import as_strategy
from vecgym.sweeps.configurations import Configuration
from vecgym.sweeps.groups import groups_of

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
            metrics = [name for name in row if name.startswith("val_") and isinstance(row[name], float)]
            self.last |= {name: row[name] for name in (*NOTHING, *metrics) if name in row}

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
        facts = RunFacts(config.num_nodes, config.num_steps, config.settings["seed"], presence)
        sent, lrs, seconds = (self.columns[name].tolist() for name in ("bytes", "lr", "seconds"))
        total = self.totals.tolist()
        for t, (losses, active) in enumerate(zip(self.columns["train_losses"], self.columns["active"])):
            trained = None if bool(active.all()) else active.nonzero().flatten().tolist()
            metrics, num_bytes = Metrics(losses, lrs[t], trained), (sent[t][0], *total[t])
            if plan is None:
                metrics = metrics._replace(outer_lr=config.strategy.outer_lr(facts, t))
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
        self._start, self._before = 0.0, 0.0  # the clock at the start, and the seconds before that
        self._begin()

    def _initial(self) -> Tree:
        """Return the initial parameters of the configurations' models, `[C, *]`."""
        models = [dict(config.model.named_parameters()) for config in self.configs]
        device = self.engine.device
        return {name: torch.stack([m[name].detach().to(device) for m in models]) for name in self.engine.params}

    def _observed(self, num_nodes: int) -> Observed:
        return Observed(self.num_steps, len(self.configs), num_nodes)

    def _begin(self) -> None:
        """Make the simulation of all configurations, those of a group next to one another, and its state."""
        strategies, runs, presences = [], [], []
        for config in self.configs:
            strategy = as_strategy(config.strategy, copy.deepcopy(config.model).to(self.engine.device))
            presence = config.presence() if config.plan is None else None  # a plan knows who is absent
            if presence is not None:
                presence.tell()
                strategy = strategy.through_server() if presence.server else strategy
            facts = RunFacts(
                config.num_nodes, self.num_steps, config.settings["seed"], presence, tuple(config.train.shard_sizes),
                config.plan,
            )  # fmt: skip
            strategies.append(strategy)
            runs.append(facts)
            presences.append(presence)
        order, groups = groups_of(strategies, runs)
        self._some_rest = [strategies[c].trains(runs[c]) is not None for c in order]
        self.configs = [self.configs[c] for c in order]
        self.presences = [presences[c] for c in order]
        self.ledgers = [Ledger() for _ in order]
        self._steady: dict[int, list[float]] = {}  # the learning rates of groups whose rates never change
        self.pure = all(strategy.pure for strategy in strategies)
        self._groups = [number for number, group in enumerate(groups) for _ in range(group.size)]
        self.simulation: Any = Stack(
            self.engine, groups, StackedCollectives(self.configs[0].num_nodes), self._read(),
            minibatch_size=self.configs[0].settings["minibatch_size"],
        )  # fmt: skip
        self.state: Any = self.simulation.init(self._initial())
        told = self.simulation.comm.ledger
        for ledger in self.ledgers:
            ledger.announce(self.configs[0].num_nodes, told.sizes)

    def _read(self) -> Reading:
        """Return what reads for all rows; configurations of which the same nodes read the same data share a stream."""
        alike = [
            (id(config.train), self._groups[c] if self._waits(c) else None) for c, config in enumerate(self.configs)
        ]
        streams = list(dict.fromkeys(alike))
        sources = [self.configs[alike.index(key)].train for key in streams]
        return Reading(sources, [streams.index(key) for key in alike], self.configs[0].num_nodes)

    def _waits(self, c: int) -> bool:
        """Whether some nodes of a configuration may not train in some steps."""
        return self.presences[c] is not None or self._some_rest[c]

    def ticks(self) -> Iterator[Sequence[Event]]:
        """Start the clock, and return the events of each remaining step; see `step`."""
        self._start = time.perf_counter() - self._before
        ticks, ahead = itertools.tee(self.simulation.timetable.ticks(self.state.tick))
        self._batches = self.simulation.read(self.simulation.requests(ahead))
        return ticks

    def step(self, events: Sequence[Event], measured: bool) -> list[int]:
        """Train one step, and return which configurations have diverged in it.

        Args:
            events: those of the step.
            measured: whether to measure how far the nodes are apart before they exchange parameters.
        """
        distances: list[float] = []

        def measure(event: Event, draft: Draft) -> None:
            if not (distances or event.reads or event.what == "rejoin"):
                distances.extend(self._distances(draft.own, draft.shared, draft.tick))

        step = self.state.tick
        self.state, row = self.simulation.tick(self.state, events, self._batches, before=measure if measured else None)
        if measured and not distances:
            distances = self._distances(self.state.own, self.state.shared, step)
        losses = row.losses.cpu().double().view(len(self.configs), -1).numpy()  # [C, K]
        active: np.ndarray = np.full(losses.shape, row.active is None)
        if row.active is not None:
            active.flat[row.active] = True
        self.observed.put(
            step, train_losses=losses, active=active, lr=self._rates(step), bytes=self._sent(step, row),
            seconds=time.perf_counter() - self._start,
        )  # fmt: skip
        diverged = self._diverged(losses, active)
        for c in self.left if distances else []:
            self.observed.evaluated(c, step + 1, consensus_distance_before=distances[c])
        return diverged

    def _rates(self, step: int) -> list[float]:
        """Return the inner learning rate of each configuration; where nodes differ, their mean."""
        rates: list[float] = []
        for number, group in enumerate(self.simulation.groups):
            found = self._steady.get(number)
            if found is None:
                found = self._rates_of(group, self.simulation.tables[number], step)
                if not group.algorithm.inner.changes and type(group.algorithm).rates is Strategy.rates:
                    self._steady[number] = found
            rates += found
        return rates

    def _rates_of(self, group: Any, table: Any, step: int) -> list[float]:
        presence, there = group.run.presence, group.run.there(step)
        own = None if presence is None else list(range(group.run.num_nodes) if there is None else there)
        lr, _ = group.algorithm.rates(table, step, own)
        several = group.size > 1 and isinstance(lr, Tensor) and lr.dim() > 0
        each: list[float] = lr.reshape(group.size, -1).double().mean(1).tolist() if several else []
        return each or [mean_rate(lr)] * group.size

    def _sent(self, step: int, row: Any) -> list[tuple[float, float, float]]:
        """Return what a node of each configuration has sent, received and handed over."""
        each = [row.sent_by(number) for number in range(len(self.simulation.groups))]
        sums = [bytes_of(transfers) for transfers in each]
        for c, presence in enumerate(self.presences):
            if presence is not None:
                self.ledgers[c].add(step, each[self._groups[c]], presence.computing(step))
        return [sums[number] for number in self._groups]

    def _distances(self, own: Any, shared: Any, tick: int) -> list[float]:
        """Return how far the nodes of each configuration are apart."""
        comm, params = self.simulation.comm, self.simulation.parameters(own, shared)
        if not any(self.presences):
            return list(map(float, fetched(distances_of(params, len(self.configs), comm))))
        parts = zip(*[x.chunk(len(self.configs)) for x in params.values()])
        among = [None if presence is None else presence.present(tick) for presence in self.presences]
        found = [distance_of(dict(zip(params, part)), comm, some) for part, some in zip(parts, among)]
        return list(map(float, fetched(found)))

    def _diverged(self, losses: np.ndarray, active: np.ndarray) -> list[int]:
        """Take those that diverge in this step from those that are left."""
        finite = np.isfinite(np.where(active, losses, 0.0).sum(1))  # where no node trains, nothing diverges
        diverged = [c for c in self.left if not finite[c]]
        self.left = [c for c in self.left if finite[c]]
        return diverged

    def evaluate(self) -> None:
        """Add columns to the rows of the present step."""
        found: dict[int, dict[str, Any]] = {}
        if len(self.configs) == 1 or any(self.presences):  # each model is the mean of the nodes that were there
            for c in self.left:
                measured, result = self.simulation.alone(self.state, c), self.simulation.result(self.state, c)
                found[c] = self._evaluated([self.configs[c]], measured, result)[0]
        else:
            found = dict(enumerate(self._evaluated(self.configs, *self._measured())))
        for c in self.left:
            if shown := self._shown(found[c]):
                self.observed.evaluated(c, self.state.step, **shown)

    def _evaluated(self, configs: Sequence[Configuration], measured: Any, result: Result) -> list[dict[str, Any]]:
        comm = StackedCollectives(len(configs) * configs[0].num_nodes)
        return evaluated_columns(self.engine, measured, [config.val for config in configs], comm, result)

    def _measured(self) -> tuple[Any, Any]:
        """Return all nodes' parameters and buffers, and what the models of the configurations are the means of."""
        params, buffers = (each(self.state.own, self.state.shared)
                           for each in (self.simulation.parameters, self.simulation.buffers))  # fmt: skip
        return Measured(self.state.tick, params, buffers), Result(params)

    def _shown(self, columns: dict[str, Any]) -> dict[str, Any]:
        return columns

    def curve(self, c: int, status: str, keep_model: bool = False) -> Curve:
        """Return what a configuration has recorded so far."""
        average = None
        if keep_model:
            result = self.simulation.result(self.state, c)
            values = {**result.params, **self.simulation.alone(self.state, c).buffers}
            average = {n: x.detach().to("cpu", copy=True) for n, x in nodes.mean(values, result.members).items()}
        curve = self.observed.curve(c, self.state.step, status, average)
        if self.presences[c] is not None:
            curve.ledger = self.ledgers[c].state()
        return curve

    @property
    def can_be_saved(self) -> bool:
        """Whether `state` is all that evolves: strategies written for one rank keep theirs to themselves."""
        return self.pure

    def load(self, state: dict[str, Any], curves: dict[int, Curve]) -> None:
        """Continue from a saved state, and from what those that are left had recorded up to it, by their places."""
        self.left = list(curves)
        self._load_state(state, curves)
        for c, curve in curves.items():
            self.observed.load(c, curve)
        if self.state.step > 0:
            self._before = float(curves[self.left[0]].columns["seconds"][-1])

    def _load_state(self, state: dict[str, Any], curves: dict[int, Curve]) -> None:
        placed = placed_as(state, vars(self.state), self.engine.device)
        self.state = State(state["tick"], placed["own"], placed["shared"])
        for c, curve in curves.items():
            if curve.ledger is not None:
                self.ledgers[c].load(curve.ledger)


class Measured(NamedTuple):
    """What an evaluation measures: all nodes of several configurations, `[C, *]` or `[C K, *]`."""

    step: int
    params: Tree
    buffers: Tree


class Reading:
    """A stream of requests -> a stream of batches of all configurations.

    Args:
        sources: the distinct data.
        which: the place among these of each configuration's.
        num_nodes: K.

    Of groups that read one after the other, the same rows of the same data are read once.

    >>> from vecgym.data import Batches
    >>> batches = [Batches(torch.arange(8) + 10 * s, num_nodes=2, batch_size=1, shuffle=False) for s in range(2)]
    >>> [batch.T for batch, _ in Reading(batches, [0, 1, 0], num_nodes=2)(iter([([0, 1, 2, 3, 4, 5], 0), ([1, 3], 1)]))]
    [tensor([[ 0,  1, 10, 11,  0,  1]]), tensor([[ 3, 13]])]
    """

    def __init__(self, sources: Sequence[Batches], which: Sequence[int], num_nodes: int) -> None:
        self.sources, self.which, self.num_nodes = list(sources), list(which), num_nodes

    def __call__(self, requests: Iterator[Request]) -> Iterator[tuple[Any, list[int] | None]]:
        *own, all_requests = itertools.tee(requests, len(self.sources) + 1)
        streams = [source.read(self._of(s, own[s])) for s, source in enumerate(self.sources)]
        whole = len(self.which) * self.num_nodes
        parts: list[Any] = [None] * len(streams)
        read: list[Request | None] = [None] * len(streams)
        for rows, counts in all_requests:
            everyone = len(rows) == whole
            configs = range(len(self.which)) if everyone else sorted({row // self.num_nodes for row in rows})
            for s in {self.which[c] for c in configs}:
                if (request := self._request(s, rows, counts)) != read[s]:
                    parts[s], read[s] = next(streams[s]), request
            yield self._joined([parts[self.which[c]] for c in configs], parts, everyone)

    def _of(self, source: int, requests: Iterator[Request]) -> Iterator[Request]:
        """Yield what is to be read of one of the distinct data."""
        last = None
        for rows, counts in requests:
            if (request := self._request(source, rows, counts)) not in (None, last):
                last = request
                yield request

    def _request(self, source: int, rows: Sequence[int], counts: int | Sequence[int]) -> Request | None:
        """Return the part of a request that is for the first configuration in it that has this data."""
        K = self.num_nodes
        first = next((row - row % K for row in rows if self.which[row // K] == source), None)
        if first is None:
            return None
        if isinstance(counts, int):
            return [row - first for row in rows if first <= row < first + K], counts
        pairs = [(row - first, count) for row, count in zip(rows, counts) if first <= row < first + K]
        return [row for row, _ in pairs], [count for _, count in pairs]

    def _joined(self, of_configs: list[Any], parts: list[Any], everyone: bool) -> tuple[Any, list[int] | None]:
        distinct = {id(batch): batch for batch, _ in of_configs}
        limits, widths = None, {_width(batch) for batch in distinct.values()}
        if len(widths) > 1 or any(limit is not None for _, limit in of_configs):
            limits = [x for batch, limit in of_configs for x in (limit or _full(batch))]
        chosen = [_widened(batch, max(widths)) for batch, _ in (parts if everyone else of_configs)]
        return (chosen_batches(chosen, self.which) if everyone else nodes.join_rows(chosen)), limits


def _width(batch: Any) -> int:
    """Return the number of examples of the rows of a batch `[n, B, ...]`, of which some may be repeated."""
    first = next(iter(tree.leaves(batch)))
    return first.shape[1] if first.dim() > 1 else 0


def _widened(batch: Any, width: int) -> Any:
    """Repeat the last examples of a batch `[n, B, ...]` up to so many; `limits` say how many are its own.

    >>> _widened(torch.tensor([[1, 2]]), 4)
    tensor([[1, 2, 2, 2]])
    """
    missing = width - _width(batch)
    return tree.map_leaves(lambda x: torch.cat([x, *[x[:, -1:]] * missing], 1), batch) if missing else batch


def _full(batch: Any) -> list[int]:
    """Return the number of examples of each row of a batch `[n, B, ...]`."""
    return [_width(batch)] * len(next(iter(tree.leaves(batch))))
