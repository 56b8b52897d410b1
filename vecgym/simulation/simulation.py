"""The one place in which a state changes: an event takes its rows, a handler changes them, they are put back."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from vecgym.collectives import Collectives
from vecgym.collectives.base import payload_bytes
from vecgym.collectives.ledger import Transfer
from vecgym.core import nodes, rng, tree
from vecgym.core.devices import placed
from vecgym.core.tree import Tree
from vecgym.engine import Engine, Local
from vecgym.simulation.state import Index, Result, Rows, State, put_back
from vecgym.simulation.timetable import Event, RunFacts, Timetable

Request = tuple[list[int], "int | list[int]"]  # rows of this process, and which of its own batches each reads
Batches = Iterator[tuple[Any, "list[int] | None"]]  # a batch, and how many of the examples are each row's own
Before = Callable[["Event", "Draft"], None]
CACHED_PLACES = 64  # sets of rows whose collectives are cached


class Algorithm(Protocol):
    """Settings, a timetable, and a method for each kind of event."""

    def timetable(self, run: RunFacts) -> Timetable:
        """Return what happens when."""

    def init(self, run: RunFacts, params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what each node has of its own, `[1 or K, *]`, and what all nodes share, `[1, *]`."""


@dataclass
class Draft:
    """The state within a tick."""

    tick: int
    own: dict[str, Any]
    shared: dict[str, Any]
    batches: Batches
    pure: bool
    reports: list[tuple[list[int], Tensor]] = field(default_factory=list)
    columns: dict[str, Any] = field(default_factory=dict)
    memo: dict[str, Any] = field(default_factory=dict)

    @property
    def home(self) -> dict[str, Any]:
        """The one of the two trees that holds parameters and optimizer."""
        return self.shared if "params" in self.shared else self.own

    @property
    def params(self) -> Tree:
        """The parameters, `[1 or rows, *]`."""
        params: Tree = self.home["params"]
        return params


class Place(NamedTuple):
    """Where the rows of an event are, the same for every event of these rows.

    Attributes:
        rows: those in this process.
        at: their index among all rows of the process.
        comm: the collectives among the rows of the event, in all processes.
    """

    rows: list[int]
    at: Index
    comm: Collectives


class Part:
    """The rows of an event. What is assigned to `own` and `shared` is put back after the event's handler.

    Attributes:
        own: what these nodes have of their own, `part.own["params"]` for instance, `[rows, *]`.
        shared: what all nodes share, `[1, *]`.
        home: the one of the two that holds parameters and optimizer.
        comm: the collectives among these nodes.
        counts: step counts that index data, rates and random numbers: one number, or one for each row.
        made: optimizer steps that the nodes have taken, likewise.
        losses: of the last `gradients`, `[rows]`.
        memo: what handlers keep within a tick.
    """

    def __init__(self, simulation: Simulation, draft: Draft, event: Event) -> None:
        self.simulation, self.event = simulation, event
        self._draft = draft
        self.rows, index, self.comm = simulation.place(event.rows)
        self.own, self.shared = Rows(draft.own, index, len(simulation.here)), Rows(draft.shared, None, 1)
        self.home = self.shared if "params" in draft.shared else self.own
        self.counts = self._here(event.counts)
        self.made = self.counts if event.made is None else self._here(event.made)
        self.losses: Tensor | None = None
        self.memo = draft.memo
        self._num_read = self._num_steps = 0

    @property
    def tick(self) -> int:
        """Number of ticks before this one."""
        return self._draft.tick

    @property
    def inplace(self) -> bool:
        """Whether tensors may be overwritten if they are assigned afterwards; not under differentiation."""
        return not self._draft.pure

    @property
    def params(self) -> Tree:
        """The parameters of these rows, in whichever tree; `[1, *]` stands for every row."""
        params: Tree = self.home["params"]
        return params

    @params.setter
    def params(self, new: Tree) -> None:
        self.home["params"] = new

    def gradients(self, at: Tree | None = None, mean: bool = False) -> Tree:
        """Compute the gradients of these rows on their next batches, at their parameters or elsewhere.

        The next call may overwrite them: clone what you need longer.

        Args:
            at: other parameters, `[1 or rows, *]`.
            mean: only the mean of the gradients is used. If the nodes share their parameters, it alone may be
                computed, `[1, *]`.
        """
        local = self.simulation.gradients(self, at, mean)
        self.losses = local.losses
        return local.grads

    @property
    def lr(self) -> Any:
        """The inner learning rate of the next step, schedule included: a number, `[]` or `[rows]`."""
        own, inner = self.home is self.own, self.simulation.algorithm.inner
        counts = _later(self.counts if own else self.tick, self._num_steps)
        return inner.lr(counts, self.simulation.timetable.max_steps, self._ids if own else None)

    def optimize(self, grads: Tree, lr: Any = None) -> None:
        """Take the inner optimizer's step of these rows.

        Args:
            grads: `[1 or rows, *]`; may be overwritten.
            lr: another learning rate than `lr`.
        """
        own, simulation = self.home is self.own, self.simulation
        if self.rows or not own:
            made, exact = _later(self.made if own else self.tick, self._num_steps), simulation.exact
            new = simulation.algorithm.inner.step(
                self.params, grads, self.home["optimizer"], made, self.lr if lr is None else lr,
                inplace=self.inplace, nodes=self._ids if own else None, exact=exact,
            )  # fmt: skip
            self.params, self.home["optimizer"] = new
        self._num_steps += 1

    @property
    def _ids(self) -> list[int] | None:
        """The node ids of these rows; None: all nodes."""
        return None if len(self.rows) == self.simulation.run.num_nodes else self.rows

    def report(self, losses: Tensor | None = None, **columns: Any) -> None:
        """Add the losses of these rows, and other measurements, to the tick's row of the history."""
        if losses is not None:
            self._draft.reports.append((self.rows, losses.clone()))
        self._draft.columns.update(columns)

    def generator(self, purpose: str, *ids: int) -> torch.Generator:
        """Return a generator keyed by the run's seed, the purpose and the ids, the same in every process.

        Include `part.tick` in the ids to draw anew in every tick.
        """
        return rng.generator(self.simulation.run.seed, purpose, *ids)

    def next_batch(self) -> tuple[Any, list[int] | None]:
        """Return the next batch of these rows, and how many of its examples are each row's own; None: all."""
        self._num_read += 1
        self.check_reads(at_end=False)
        batch = next(self._draft.batches, None)
        if batch is None:
            raise ValueError(f"no batch is left for {self.event.what!r} in tick {self.tick}: `read` yields too few.")
        return batch

    @property
    def read_at(self) -> int | list[int]:
        """The step count at which these rows read next: one number, or one for each row."""
        return _later(self.counts, self._num_read)

    def check_reads(self, *, at_end: bool) -> None:
        """Raise a ValueError if these rows have read more batches than their event declares, or fewer at its end."""
        done, reads = self._num_read, self.event.reads if self.rows else 0
        if done > reads or (at_end and done < reads):
            raise ValueError(
                f"{self.event.what!r} in tick {self.tick} reads {done} batches, but its event has reads={reads}: the "
                "timetable must declare all reads in advance."
            )

    def put(self) -> None:
        """Write what was assigned into the tick's state."""
        put_back([self.own, self.shared], pure=self._draft.pure)

    def _here(self, counts: int | tuple[int, ...]) -> int | list[int]:
        """Return the counts of the rows in this process; one number if all are equal."""
        if isinstance(counts, int):
            return counts
        rows = range(self.simulation.run.num_nodes) if self.event.rows is None else self.event.rows
        count_of = dict(zip(rows, counts))
        local = [count_of[row] for row in self.rows]
        return local[0] if len(set(local)) == 1 else local


class Row(NamedTuple):
    """All measurements of a tick.

    Attributes:
        tick: counted from 1.
        losses: of the rows of this process; nan where a node did not train.
        columns: what else handlers reported.
    """

    tick: int
    losses: Tensor
    transfers: tuple[Transfer, ...]
    events: Sequence[Event]
    columns: dict[str, Any]

    @property
    def active(self) -> list[int] | None:
        """The nodes that trained, in all processes; None: all.

        >>> Row(1, torch.zeros(3), (), [Event("train", (0, 2), reads=1)], {}).active
        [0, 2]
        """
        rows = [event.rows for event in self.events if event.reads]
        return None if None in rows else sorted({row for some in rows for row in some or ()})


class Simulation:
    """K nodes that an algorithm trains, or those of them that are in this process.

    Args:
        engine: computes gradients.
        algorithm: settings, a timetable, and handlers.
        run: what is known about the run in advance.
        comm: the collectives of all nodes.
        read: a stream of requests -> a stream of batches. It is known in advance which rows read what, so workers can
            read ahead in every kind of run.
        here: the rows of this process, consecutive; None: all.
        minibatch_size: examples at a time.
        exact: each row takes its optimizer step by itself, so that its bits do not depend on which other rows are here.
    """

    def __init__(
        self, engine: Engine, algorithm: Any, run: RunFacts, comm: Collectives,
        read: Callable[[Iterator[Request]], Batches], *, here: range | None = None, minibatch_size: int | None = None,
        exact: bool = False,
    ) -> None:  # fmt: skip
        self.engine, self.algorithm, self.run, self.comm, self.read = engine, algorithm, run, comm, read
        self.here = range(run.num_nodes) if here is None else here
        self.minibatch_size, self.exact = minibatch_size, exact
        self.timetable = algorithm.timetable(run)
        self.place = functools.lru_cache(CACHED_PLACES)(self._place)

    def of(self, algorithm: Algorithm, read: Callable[[Iterator[Request]], Batches]) -> Simulation:
        """Return the same run with other settings of the algorithm, on other data."""
        twin = copy.copy(self)
        twin.algorithm, twin.read = algorithm, read
        return twin

    def init(self, params: Tree | None = None) -> State:
        """Return the state before the first tick, with the model's own parameters or with others, `[1, *]`."""
        if params is None:
            params = {name: p.detach()[None].clone() for name, p in self.engine.params.items()}
        self.comm.ledger.announce(self.run.num_nodes, {name: payload_bytes(p) for name, p in params.items()})
        own, shared = self.algorithm.init(self.run, params)
        buffers: list[Tree] = [{}, {}]
        for name, b in self.engine.buffers.items():
            buffers[self.engine.changes(name)][name] = b[None]
        return State(
            0,
            tree.map_leaves(self._rows_here, {"buffers": buffers[True], **own}),
            tree.map_leaves(torch.clone, {"buffers": buffers[False], **shared}),
        )

    def result(self, state: State) -> Result:
        """Return what the run's model is the mean of: the one rule for what is evaluated, returned and saved."""
        rule = getattr(self.algorithm, "result", None)
        return Result(state.params if rule is None else rule(state), self.members(state.tick - 1))

    def members(self, tick: int) -> tuple[int, ...] | None:
        """Return the nodes that are present in a tick; None: all, as before the first tick."""
        return None if tick < 0 else self.run.there(tick)

    def close(self) -> None:
        """End the threads of the engine and the algorithm; a later tick starts them again."""
        self.engine.close()
        if hasattr(self.algorithm, "close"):
            self.algorithm.close()

    def step(
        self, state: State, batch: Any, *, limits: list[int] | None = None, pure: bool = False,
        before: Before | None = None,
    ) -> tuple[State, Row]:  # fmt: skip
        """Take a single step by hand: handle the next tick's events with one batch.

        Args:
            state: must not be used afterwards, unless `pure`.
            batch: of all nodes of this process, `[L, B, ...]`, including those that do not train.
            limits: how many of the examples are each node's own; None: all.
            before: see `tick`.
        """
        events = next(iter(self.timetable.ticks(state.tick)), None)
        if events is None:
            raise ValueError(f"all {self.timetable.length} ticks of the run are done: give the run more steps.")
        return self.tick(state, events, self._rows_of(batch, limits, events), pure=pure, before=before)

    def _rows_of(self, batch: Any, limits: list[int] | None, events: Sequence[Event]) -> Batches:
        for rows, _ in self.requests(iter([events])):
            at = [row - self.here.start for row in rows]
            if len(at) == len(self.here):
                yield batch, limits
            else:
                limits_at = None if limits is None else [limits[i] for i in at]
                yield nodes.take_rows(batch, torch.tensor(at)) if len(self.here) > 1 else batch, limits_at

    def _rows_here(self, x: Tensor) -> Tensor:
        wide = x[self.here.start : self.here.stop] if len(x) > 1 else x.expand(len(self.here), *x.shape[1:])
        return wide.clone(memory_format=torch.contiguous_format)

    def requests(self, ticks: Iterator[Sequence[Event]]) -> Iterator[Request]:
        """Yield which rows read which of their own batches, in order."""
        for events in ticks:
            for event in events:
                pairs = [(row, count) for row, count in event.each(self.run.num_nodes) if row in self.here]
                counts = [count for _, count in pairs]
                same = bool(counts) and counts.count(counts[0]) == len(counts)
                for k in range(event.reads if pairs else 0):
                    yield [row for row, _ in pairs], counts[0] + k if same else [count + k for count in counts]

    def tick(
        self, state: State, events: Sequence[Event], batches: Batches, *, pure: bool = False,
        before: Before | None = None,
    ) -> tuple[State, Row]:  # fmt: skip
        """Handle the events of a tick one after the other.

        Args:
            state: must not be used afterwards, unless `pure`.
            before: called before each event.
        """
        draft = Draft(state.tick, dict(state.own), dict(state.shared), batches, pure)
        self.comm.step = state.tick
        with self.comm.ledger.recording() as transfers:
            for event in events:
                if before is not None:
                    before(event, draft)
                self.handle(draft, event)
        row = Row(state.tick + 1, self._losses(draft), tuple(transfers), events, draft.columns)
        return State(state.tick + 1, draft.own, draft.shared), row

    def handle(self, draft: Draft, event: Event) -> None:
        """Take the event's rows, let its method change them, and put them back."""
        part = Part(self, draft, event)
        part.comm.step = draft.tick
        handler = getattr(self.algorithm, event.what, None)
        if handler is None:
            raise TypeError(f"{type(self.algorithm).__name__} has no method {event.what!r}, named by its timetable.")
        handler(part)
        part.check_reads(at_end=True)
        part.put()

    def gradients(self, part: Part, at: Tree | None, mean: bool) -> Local:
        """Compute the gradients of some rows on their next batches: the one place that calls the engine for them."""
        params = part.params if at is None else at
        if not part.rows:
            return Local(tree.map(lambda p: p[:0], params), next(iter(params.values())).new_empty(0), {})
        step, shared = part.read_at, part.shared["buffers"]
        buffers, (batch, limits) = {**shared, **part.own["buffers"]}, part.next_batch()
        mean = mean and part.inplace and all(len(p) == 1 for p in params.values())
        if self.engine.written:  # each node writes to its own copy
            params = nodes.widened(params, len(part.rows))
        local = self.engine.gradients(
            params, buffers, batch, seed=self.run.seed, step=step, node_ids=part.rows, limits=limits,
            minibatch_size=self.minibatch_size, mean=mean, differentiable=not part.inplace,
        )  # fmt: skip
        if mean and len(self.here) < self.run.num_nodes:  # averaged with other processes' means, as if each row's
            local = local._replace(grads=nodes.expand(local.grads, len(part.rows)))
        if self.engine.written and at is None:
            part.params = {**part.params, **{name: params[name] for name in self.engine.written}}
        if changed := {name: x for name, x in local.buffers.items() if name not in shared}:
            part.own["buffers"] = changed
        return local

    def _place(self, rows: tuple[int, ...] | None) -> Place:
        K = self.run.num_nodes
        if rows is not None and not (rows == tuple(sorted(set(rows))) and set(rows) <= set(range(K))):
            raise ValueError(f"an event has rows {rows}; they must be distinct, ascending and from 0 to {K - 1}.")
        comm = self.comm if rows is None or len(rows) == K else self.comm.among(rows)
        here = [row for row in (range(K) if rows is None else rows) if row in self.here]
        return Place(here, _index([row - self.here.start for row in here], len(self.here)), comm)

    def _losses(self, draft: Draft) -> Tensor:
        """Return the mean of the losses reported for each row."""
        reports = draft.reports
        if len(reports) == 1 and len(reports[0][0]) == len(self.here):
            return reports[0][1]
        if not reports:
            return torch.full((len(self.here),), torch.nan)
        sums = reports[0][1].new_zeros(len(self.here))
        times = torch.zeros_like(sums)
        for rows, losses in reports:
            places = torch.tensor([row - self.here.start for row in rows], dtype=torch.long)
            index = placed(places, sums.device)
            sums, times = sums.index_add(0, index, losses), times.index_add(0, index, torch.ones_like(losses))
        return (sums / times).masked_fill(times == 0, torch.nan)  # 0 / 0 is a different nan on some processors


def _later(counts: int | list[int], steps: int) -> int | list[int]:
    return counts + steps if isinstance(counts, int) else [count + steps for count in counts]


def _index(rows: list[int], size: int) -> Index:
    """Return an index of these rows: None for all, a slice for consecutive rows."""
    if len(rows) == size:
        return None
    consecutive = bool(rows) and rows[-1] - rows[0] + 1 == len(rows)
    return slice(rows[0], rows[-1] + 1) if consecutive else torch.tensor(rows, dtype=torch.long)
