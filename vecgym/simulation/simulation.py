"""The simulation of a run, where all changes of its state happen: a handler changes the rows of each event."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from vecgym.collectives import Collectives
from vecgym.collectives.base import payload_bytes
from vecgym.collectives.ledger import Transfer
from vecgym.core import check, nodes, rng, tree
from vecgym.core.devices import placed, spread
from vecgym.core.errors import warn
from vecgym.core.tree import Tree
from vecgym.engine import Engine, Local
from vecgym.engine.backend import Missing, missing_within, sizes_of
from vecgym.optim.optimizer import SKIPPED
from vecgym.simulation.plain import Plain
from vecgym.simulation.state import Index, Result, SplitView, State, StateView, a_kind, check_values, put_back
from vecgym.simulation.timetable import Due, Event, Lockstep, RunFacts, Timetable

Request = tuple[list[int], "int | list[int]"]  # rows of this process, and the index of the batch that each reads
Batches = Iterator[tuple[Any, "list[int] | None"]]  # a batch, and the number of each row's own examples in it
Before = Callable[["Event", "Draft"], None]
LARGE = 1 << 14  # parameters of a node, from which on copies cost more than a call of the optimizer for each run
CACHED_PLACES = 64  # sets of rows whose collectives are cached


class Algorithm(Protocol):
    """Settings, a timetable, and a method for each kind of event."""

    def timetable(self, run: RunFacts) -> Timetable:
        """Return the events of a run."""

    def init(self, run: RunFacts, params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the initial state by name: each node's own trees, `[1 or K, *]`, and the shared ones, `[1, *]`."""


class LocalTraining:
    """An algorithm whose nodes train independently, with `inner`, a `vecgym.optim.Optimizer`.

    All groups of a stack share one gradient call for their `train` events, at the parameters with which these begin. A
    handler that needs gradients at other parameters must have another name.
    """

    inner: Any

    def train(self, part: Part) -> None:
        """Let each node take a step of the inner optimizer."""
        part.optimize(part.gradients())
        part.report(part.losses)


class Group(NamedTuple):
    """Configurations that differ in numbers only: neighbouring rows with one timetable and one call of each handler.

    Attributes:
        algorithm: its numbers are `[C]` if they differ between the configurations.
        run: the facts about each of their runs.
        first: the first row. Node i of configuration c is row `first + c K + i`.
        size: C, the number of configurations.
        members: in a stack, the algorithm of each configuration alone, which makes its initial state.
        seeds: in a stack, the seed of each configuration.

    >>> Group(None, RunFacts(num_nodes=3), first=6, size=2).rows((0, 2))
    [6, 8, 9, 11]
    """

    algorithm: Any
    run: RunFacts
    first: int = 0
    size: int = 1
    members: tuple[Any, ...] = ()
    seeds: tuple[int, ...] = ()

    def rows(self, nodes: Sequence[int] | None = None) -> list[int]:
        """Return the rows of some nodes; None: of all."""
        K = self.run.num_nodes
        return [self.first + c * K + i for c in range(self.size) for i in (range(K) if nodes is None else nodes)]


@dataclass(frozen=True)
class Draft(State):
    """The state within a tick."""

    batches: Batches
    pure: bool
    transfers: Sequence[Transfer]
    reports: list[tuple[list[int], Tensor]] = field(default_factory=list)
    memo: dict[int | None, dict[Any, Any]] = field(default_factory=dict)  # of each group
    groups: list[int | None] = field(default_factory=list)  # in a stack: the group of each transfer


class Place(NamedTuple):
    """The cached indices and collectives of a set of rows.

    Attributes:
        rows: the rows in this process.
        at: their index among all rows of the process.
        comm: the collectives among the rows of the event, in all processes; in each configuration of a group.
        nodes: the node id of each row.
        seeds: the seed of each row.
        size: number of configurations.
        within: their index among the rows of their group.
    """

    rows: list[int]
    at: Index
    comm: Collectives
    nodes: list[int]
    seeds: list[int]
    size: int = 1
    within: Index = None


class Part:
    """The rows of an event. Trees that are assigned to `own` and `shared` are stored after the event's handler.

    Attributes:
        algorithm: the settings of these configurations.
        run: the facts about the run.
        tick: number of ticks before this one.
        inplace: whether tensors may be overwritten if they are assigned afterwards; not under differentiation.
        own: these nodes' own trees, such as `part.own["params"]`, `[rows, *]`.
        shared: the trees that all nodes share, `[1, *]`.
        home: the one of the two that holds parameters and optimizer.
        size: the number C of configurations. If there are several, their nodes are in dimension 1: own `[C, K, *]`,
            shared `[C, 1, *]`, likewise gradients, losses, and values of `comm`. `spread` shapes settings.
        comm: the collectives among these nodes.
        counts: step counts that index learning rates: one number, or one for each row.
        made: optimizer steps that the nodes have taken, likewise.
        losses: of the last `gradients`, `[rows]`.
        loss_weights: likewise, such as numbers of tokens; None: the model's loss has no "weight".
        missing: the parameters on which the loss of some rows does not depend, and these rows: their gradients are 0,
            and `optimize` does not change them, as torch does for a gradient of None.
        memo: a dict for handlers, which lasts for a tick.
        due: a `Due`, the index and the step of a marked event.
        exact: whether the bits of a node's work must not depend on the other nodes in this process. Elementwise
            operations and reductions within a node never do; a matrix product over all nodes may.

    Settings of the nodes, and shapes:

    >>> from vecgym.collectives import StackedCollectives
    >>> part, x = Part.alone(StackedCollectives(2), number=3), torch.ones(2, 5)
    >>> part.scaled(torch.tensor([10.0, 100.0]), x)[:, 0], part.here(0.5), part.ids
    (tensor([ 10., 100.]), 0.5, tensor([0, 1]))
    >>> group, values = Part.alone(StackedCollectives(2), size=3), {"w": torch.zeros(3, 2, 5)}
    >>> group.flat(values)["w"].shape, group.apart(group.flat(values))["w"].shape, group.lead
    (torch.Size([6, 5]), torch.Size([3, 2, 5]), 2)
    """

    algorithm: Any
    run: RunFacts
    due: Any  # a `Due`; None for an event without a mark
    losses: Tensor | None
    loss_weights: Tensor | None = None
    precomputed: Local | None  # gradients that were computed together with other groups'
    _reported = False  # whether the handler has reported losses
    _trains = True  # False for the parts of stages and averages

    def __init__(self, simulation: Simulation, draft: Draft, event: Event) -> None:
        self.simulation, self.event = simulation, event
        self._draft = draft
        self.place = place = simulation.place(event.rows, event.group)
        self.rows, self.comm, self.size = place.rows, place.comm, place.size
        whole = simulation.whole if event.group is None else None
        self.algorithm, self.run = (whole or simulation.groups[event.group or 0])[:2]
        self.tick, self.inplace = draft.tick, not draft.pure
        self.own, self.shared = simulation.trees(draft, event, place)
        self.own.handler = self.shared.handler = f"{type(self.algorithm).__name__}.{event.what}"
        self.memo = draft.memo.setdefault(event.group, {})
        self.home: StateView | SplitView = self.shared if "params" in self.shared.whole else self.own
        self.counts = simulation.counts_here(event, event.counts)
        self.made = self.counts if event.made is None else simulation.counts_here(event, event.made)
        self.losses = self.precomputed = None
        self.missing: Missing = {}
        self._is_shared = False  # whether `missing` is of exchanged gradients
        self.due = event.info if isinstance(event.info, Due) else None
        self.exact = simulation.exact
        self.num_read = self._num_steps = 0

    @classmethod
    def alone(
        cls, comm: Collectives, own: Any = None, shared: Any = None, *, number: int = 0, step: int = 0, seed: int = 0,
        size: int = 1, inplace: bool = False, exact: bool = False, num_examples: tuple[int, ...] | None = None,
    ) -> Part:  # fmt: skip
        """Return a part without a simulation, to try averages and stages by hand.

        >>> from vecgym.collectives import StackedCollectives
        >>> part = Part.alone(StackedCollectives(3), step=7)
        >>> part.due.step, part.weights("equal"), part.comm.mean({"w": torch.tensor([1.0, 2.0, 6.0])})
        (7, None, {'w': tensor([3.])})
        """
        part = cls.__new__(cls)
        nodes, due = comm.ids.tolist(), Due(number, step)
        part.run = RunFacts(comm.run_nodes, seed=seed, num_examples=num_examples)
        part.event = Event("meet", comm.members, info=due)
        part.place = Place(nodes, None, comm, nodes * size, [seed] * len(nodes) * size, size)
        part.rows, part.comm, part.size, part.tick = nodes * size, comm, size, step
        part.due, part.inplace, part.exact, part.memo, part._trains = due, inplace, exact, {}, False
        part.own, part.shared = {} if own is None else own, {} if shared is None else shared  # type: ignore[assignment]
        return part

    @property
    def nodes(self) -> list[int]:
        """The node ids of these rows, in each configuration."""
        return self.place.nodes[: len(self.rows) // self.size]

    @property
    def params(self) -> Tree:
        """The parameters of these rows, from `own` or `shared`; `[1, *]` stands for every row."""
        return self.home["params"]

    @params.setter
    def params(self, new: Tree) -> None:
        self.home["params"] = new

    def gradients(self, at: Tree | None = None, mean: bool = False) -> Tree:
        """Compute the gradients of these rows on their next batches, at their parameters or elsewhere.

        The next call may overwrite them: clone gradients that you need longer.

        Args:
            at: other parameters, `[1 or rows, *]`.
            mean: whether the mean of the gradients is sufficient: if the nodes share their parameters, it alone may be
                computed, `[1, *]`.
        """
        if not self._trains:
            raise self._refusal("gradients")
        local = self.simulation.gradients(self, at, mean) if self.precomputed is None else self._precomputed(at)
        self.losses, grads, self.missing, self._is_shared = local.losses, local.grads, local.missing, False
        self.loss_weights = local.weights if local.weights is None or self.size == 1 else self._apart(local.weights)
        if self.size > 1:
            self.losses, grads = self._apart(self.losses), tree.map(self._apart, grads)
        return grads

    def _refusal(self, method: str) -> TypeError:
        return TypeError(
            f"part.{method} in a stage or an average, which exchange values and do not train: override `train` "
            "or `train_jointly` of the strategy, which call it; see vecgym.guide.writing_a_strategy."
        )

    def _precomputed(self, at: Tree | None) -> Local:
        self.num_read += 1
        self.check_reads(at_end=False)
        if at is not None or "params" in self.home.of("params").assigned:
            raise TypeError(
                f"{type(self.algorithm).__name__}.train takes gradients at other parameters than those with which it "
                "begins, but in a stack the events `train` of all groups share one call: give the method another "
                'name, such as `local`, and set train_method = "local" in the class.'
            )
        assert self.precomputed is not None
        return self.precomputed

    @property
    def lr(self) -> Any:
        """The inner learning rate of the next step, schedule included.

        A number, `[]` or `[rows]`; of several configurations a number, `[C]` or `[C, rows]`.
        """
        own, inner = self.home is self.own, self.algorithm.inner
        counts, max_steps = self._later(self.counts), self.simulation.tables[self.event.group or 0].max_steps
        if self.size > 1 and not isinstance(counts, int):
            lr = inner.wide(len(self.rows) // self.size).lr(counts, max_steps)
            return self._apart(lr) if isinstance(lr, Tensor) and lr.dim() else lr
        return inner.lr(counts, max_steps, self._ids if own else None)

    def optimize(self, grads: Tree, lr: Any = None) -> None:
        """Take the inner optimizer's step of these rows.

        Args:
            grads: `[1 or rows, *]`, `[C, 1 or rows, *]`; may be overwritten.
            lr: another learning rate than `lr`.
        """
        if not self._trains:
            raise self._refusal("optimize")
        own, simulation, home = self.home is self.own, self.simulation, self.home
        if self._steps_on_views:
            self._optimize_runs(grads, lr)
        elif (self.rows or not own) and not simulation.dry:
            inner = self.algorithm.inner
            if self.size == 1:
                lr = self.lr if lr is None else lr
            else:
                num_rows = len(self.rows) // self.size if own else 1
                inner, grads = inner.wide(num_rows), tree.map(lambda g: _flat(g, self.size, num_rows), grads)
                max_steps = simulation.tables[self.event.group or 0].max_steps
                lr = inner.lr(self._later(self.counts), max_steps) if lr is None else _each_row(lr, self.size, num_rows)
            held, made = (home.flat("params"), home.flat("optimizer")), self._later(self.made)
            # torch's fused kernels trust the shapes: they would read beyond a gradient that is smaller.
            most = max(map(len, held[0].values()), default=1)
            check_values(grads, held[0], most, self.algorithm, f".{self.event.what}", "gradients")
            if self.missing or not (self.stays and simulation.plain.step(inner, held, grads, made, lr)):
                params, slots = inner.step(
                    held[0], grads, held[1], made, lr, inplace=self.inplace, nodes=self._ids if own else None,
                    exact=simulation.exact, missing=self.missing,
                )  # fmt: skip
                home.put_flat("params", params)
                home.put_flat("optimizer", slots)
        self._num_steps += 1

    def share_missing(self, home: Collection[str] = ()) -> None:
        """After an exchange of gradients, count a parameter as `missing` only if no node has a gradient.

        Args:
            home: names of parameters whose gradients were not exchanged.
        """
        apart = len(self.simulation.here) < self.run.num_nodes and self.simulation.engine.chooses
        if self._is_shared or not (self.missing or apart):  # there may be several exchanges of gradients in a step
            return
        self._is_shared = True
        num_rows = len(self.rows) // self.size
        width = num_rows if self.home is self.own else 1
        configs = {name: [c for c in range(self.size) if some.issuperset(range(c * num_rows, (c + 1) * num_rows))]
                   for name, some in self.missing.items()}  # fmt: skip
        if apart:
            here = torch.tensor([[bool(configs.get(name)) for name in self.params]]).expand(num_rows, -1)
            everywhere = self.comm.everyone({"missing": here})["missing"].all(0).tolist()
            configs = {name: [0] for name, lacking in zip(self.params, everywhere) if lacking}
        own = {name: some for name, some in self.missing.items() if name in home}
        self.missing = {name: frozenset(c * width + i for c in some for i in range(width))
                        for name, some in configs.items() if some} | own  # fmt: skip

    @property
    def _steps_on_views(self) -> bool:
        """Whether rows with gaps step in views of the state: for a large model copies cost more than calls."""
        home, simulation = self.home, self.simulation
        if not (isinstance(home, StateView) and isinstance(home.index, Tensor) and self.inplace and simulation.large):
            return False
        return not (simulation.exact or {"params", "optimizer"} & home.assigned.keys())

    def _optimize_runs(self, grads: Tree, lr: Any) -> None:
        """Take one step for each run of consecutive rows."""
        rows, lr = self.rows, self.lr if lr is None else lr
        several = isinstance(lr, Tensor) and lr.dim() > 0 and len(lr) > 1
        starts = [i for i, row in enumerate(rows) if i == 0 or row != rows[i - 1] + 1]
        for a, b in zip(starts, [*starts[1:], len(rows)]):
            counts, made = (_some(self._later(x), a, b) for x in (self.counts, self.made))
            event = self.event._replace(rows=tuple(rows[a:b]), counts=counts, made=made)
            part = Part(self.simulation, self._draft, event)
            part.missing = missing_within(self.missing, a, b)
            part.optimize(tree.map(lambda g: g[a:b] if len(g) > 1 else g, grads), lr[a:b] if several else lr)  # noqa: B023
            part.put()
        assert isinstance(self.home, StateView)
        self.home.forget()

    def _later(self, counts: int | list[int]) -> int | list[int]:
        """Return the counts after the steps of this event; shared state counts ticks."""
        return _later(counts if self.home is self.own else self.tick, self._num_steps)

    @property
    def stays(self) -> bool:
        """Whether the tensors of these rows are the state's own, which keep their place in memory for the whole run."""
        return self.inplace and not self.exact and (self.place.at is None or self.home is self.shared)

    @property
    def _ids(self) -> list[int] | None:
        """The node ids of these rows, which select per-node settings; None: all nodes."""
        if self.event.group is None:  # each row has its own
            return None if self.event.rows is None else self.rows
        return None if len(self.rows) == self.simulation.run.num_nodes or self.size > 1 else self.place.nodes

    def _apart(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.size, -1))

    def flat(self, values: Tree) -> Tree:
        """Return `[C, rows, *]` of several configurations as `[C rows, *]`."""
        return values if self.size == 1 else tree.map(lambda x: x.flatten(0, 1), values)

    def apart(self, values: Tree) -> Tree:
        """Return `[C rows, *]` as `[C, rows, *]`, the form for handlers of several configurations."""
        return values if self.size == 1 else tree.map(self._apart, values)

    def here(self, number: Any) -> Any:
        """Return a setting for the nodes in this process: their values of `[K]` or `[C, K]`, others unchanged."""
        of_nodes = isinstance(number, Tensor) and number.dim() > int(self.size > 1) and number.shape[-1] > 1
        if not of_nodes or len(self.nodes) == self.run.num_nodes:
            return number
        return number[..., placed(self.ids, number.device)]

    def each(self, number: Any, like: Tensor) -> Any:
        """Shape a setting, a number or one for each node of the run, `[K]`, to multiply a tensor of these rows."""
        return spread(self.here(number), like)

    def scaled(self, number: Any, x: Tensor) -> Tensor:
        """Multiply a tensor of these rows by a setting, a number or one for each node of the run, `[K]`."""
        return self.each(number, x) * x

    @property
    def ids(self) -> Tensor:
        """The node ids of these rows, in each configuration, `[rows]`."""
        return torch.tensor(self.nodes, dtype=torch.long)

    @property
    def lead(self) -> int:
        """Dimensions before those of a parameter: 2 for several configurations, else 1."""
        return 2 if self.size > 1 else 1

    def coordinates(self, x: Tensor) -> Tensor:
        """Return `[.., rows, *shape]` as `[.., rows, n]`."""
        return x.reshape(*x.shape[: self.lead], math.prod(x.shape[self.lead :]))

    def wide(self, values: Tree) -> Tree:
        """Expand values that are the same on all nodes, `[.., 1, *]`, to `[.., rows, *]`."""
        num_rows, lead = len(self.rows) // self.size, self.lead
        return tree.map(lambda x: x.expand(*x.shape[: lead - 1], num_rows, *x.shape[lead:]), values)

    def weights(self, weighting: str | Sequence[float]) -> tuple[float, ...] | None:
        """Return the weight of each node of the event, from a name or from all nodes' weights; None: equal ones.

        >>> from vecgym.collectives import StackedCollectives
        >>> Part.alone(StackedCollectives(2), num_examples=(30, 10)).weights("examples")
        (30.0, 10.0)
        >>> Part.alone(StackedCollectives(3).among([0, 2])).weights((7.0, 5.0, 3.0))
        (7.0, 3.0)
        """
        of_all = self.run.num_examples if isinstance(weighting, str) else weighting
        if weighting == "equal" or of_all is None:
            return None
        return tuple(float(of_all[node]) for node in (self.event.rows or range(self.run.num_nodes)))

    def report(self, losses: Tensor | None) -> None:
        """Add the losses of these rows to the tick's row of the history."""
        self._reported = True
        if losses is not None:
            self._draft.reports.append((self.rows, (losses if self.size == 1 else losses.flatten()).clone()))

    def generator(self, purpose: str, *ids: int) -> torch.Generator:
        """Return a generator keyed by the run's seed, the purpose and the ids, the same in every process.

        Include `part.tick` in the ids to draw anew in every tick.
        """
        return rng.generator(self.run.seed, purpose, *ids)

    def next_batch(self) -> tuple[Any, list[int] | None]:
        """Return the next batch of these rows, and the number of each row's own examples; None: all."""
        self.num_read += 1
        self.check_reads(at_end=False)
        batch = next(self._draft.batches, None)
        if batch is None:
            raise ValueError(f"no batch is left for {self.event.what!r} in tick {self.tick}: `read` yielded too few.")
        return batch

    @property
    def read_at(self) -> int | list[int]:
        """The step count at which these rows read next: one number, or one for each row."""
        own = self.event.own
        return _later(self.counts if own is None else self.simulation.counts_here(self.event, own), self.num_read)

    def check_reads(self, *, at_end: bool) -> None:
        """Raise a ValueError if these rows have read more batches than their event declares, or fewer at its end."""
        reads = self.event.reads if self.rows else 0
        if self.num_read > reads or (at_end and self.num_read < reads):
            raise ValueError(
                f"{self.event.what!r} in tick {self.tick} reads {self.num_read} batches, but its event has "
                f"reads={reads}: take gradients in `train`, or declare all reads in the timetable."
            )

    def put(self) -> None:
        """Store the assigned trees in the tick's state."""
        own = [self.own.common, self.own.others] if isinstance(self.own, SplitView) else [self.own]
        put_back([*own, self.shared], pure=self._draft.pure)


class TickRecord(NamedTuple):
    """All measurements of a tick.

    Attributes:
        tick: counted from 1.
        losses: of the rows of this process; nan where a node did not train.
        groups: in a stack, the group of each transfer, which each of its configurations has sent.
        stack: the groups of a stack.
    """

    tick: int
    losses: Tensor
    transfers: tuple[Transfer, ...]
    events: Sequence[Event]
    groups: Sequence[int | None] = ()
    stack: Sequence[Group] = ()

    @property
    def active(self) -> list[int] | None:
        """The nodes that trained, in all processes, or the rows of a stack; None: all.

        >>> TickRecord(1, torch.zeros(3), (), [Event("train", (0, 2), reads=1)]).active
        [0, 2]
        """
        training = [event for event in self.events if event.reads]
        rows = [e.rows if e.group is None or not self.stack else self.stack[e.group].rows(e.rows) for e in training]
        active = None if None in rows else sorted({row for some in rows for row in some or ()})
        return None if self.stack and active is not None and len(active) == len(self.losses) else active

    def sent_by(self, group: int) -> tuple[Transfer, ...]:
        """Return the transfers of each configuration of a group.

        >>> TickRecord(1, torch.zeros(2), ("a", "b"), [], groups=(0, 1)).sent_by(1)
        ('b',)
        """
        return tuple(transfer for transfer, whose in zip(self.transfers, self.groups) if whose == group)


class Simulation:
    """The training of K nodes by an algorithm, or of those nodes that are in this process.

    Args:
        engine: computes gradients.
        algorithm: settings, a timetable, and handlers.
        run: the facts about the run.
        comm: the collectives of all nodes; the rows of this process are its `node_ids`, which are consecutive.
        read: a stream of requests -> a stream of batches. All requests are known in advance, so workers can read ahead
            in every kind of run.
        minibatch_size: examples at a time.
        exact: whether each row takes its own optimizer step, so that its bits do not depend on the other rows here.
    """

    def __init__(
        self, engine: Engine, algorithm: Any, run: RunFacts, comm: Collectives,
        read: Callable[[Iterator[Request]], Batches], *, minibatch_size: int | None = None, exact: bool = False,
    ) -> None:  # fmt: skip
        run = replace(run, names=tuple(engine.params))
        self.engine, self.algorithm, self.run, self.comm, self.read = engine, algorithm, run, comm, read
        self.groups = [Group(algorithm, run)]
        first, last = comm.node_ids[[0, -1]].tolist()
        self.here = range(first, last + 1)
        self.minibatch_size, self.exact = minibatch_size, exact
        self.large = sum(p.numel() for p in engine.params.values()) > LARGE
        check_run(algorithm, run)
        self.timetable = timetable_of(algorithm, run)
        self.tables: Sequence[Timetable] = [self.timetable]
        self.place, self.plain = functools.lru_cache(CACHED_PLACES)(self._place), Plain(engine)

    large = False
    whole: Group | None = None  # all rows of a stack, if they can train as one group
    stacked: Sequence[Group] = ()  # the groups, if there are several
    dry = False  # a dry simulation has no values: gradients are shapes, and the optimizer takes no step

    @property
    def settings(self) -> list[Any]:
        """The settings that handlers use: the algorithm's; in a stack, those of each group, and of all rows."""
        return [group.algorithm for group in self.groups] + ([] if self.whole is None else [self.whole.algorithm])

    def of(self, settings: Sequence[Any], read: Callable[[Iterator[Request]], Batches]) -> Simulation:
        """Return the same run with other `settings`, on other data."""
        twin = copy.copy(self)
        twin.algorithm, twin.read = settings[0], read
        twin.groups = [group._replace(algorithm=new) for group, new in zip(self.groups, settings)]
        twin.whole = None if self.whole is None else self.whole._replace(algorithm=settings[-1])
        return twin

    def init(self, params: Tree | None = None) -> State:
        """Return the state before the first tick, with the model's own parameters or with others, `[1, *]`."""
        params, constant, changing = self._initial(params)
        own, shared = initial(self.algorithm, self.run, params)
        return State(
            0,
            tree.map_leaves(self._rows_here, {"buffers": changing, **own}),
            tree.map_leaves(torch.clone, {"buffers": constant, **shared}),
        )

    def _initial(self, params: Tree | None) -> tuple[Tree, Tree, Tree]:
        """Return the initial parameters, constant buffers, and other buffers; announce sizes to the ledger."""
        if params is None:
            params = {name: p.detach()[None].clone() for name, p in self.engine.params.items()}
        self.comm.ledger.announce(self.run.num_nodes, {name: payload_bytes(p) for name, p in params.items()})
        buffers: list[Tree] = [{}, {}]
        for name, b in self.engine.buffers.items():
            buffers[self.engine.changes(name)][name] = b[None]
        return params, buffers[False], buffers[True]

    def result(self, state: State) -> Result:
        """Return the parameters, and the nodes, whose mean is the run's model: it is evaluated, returned and saved."""
        return self._result(0, state, self.algorithm)

    def _result(self, group: int, state: State, algorithm: Any) -> Result:
        rule = getattr(algorithm, "result", None)
        params = state.params if rule is None else rule(state)
        if params is not state.params:
            whole = {**state.params, **params} if isinstance(params, dict) else params  # it may leave out names
            num_rows = min(len(self.here), self.run.num_nodes)
            params = check_values(whole, state.params, num_rows, algorithm, ".result", "parameters")
        return Result(params, *self.averaged(state.tick, group))

    def averaged(self, tick: int, group: int = 0) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
        """Return the nodes whose parameters' and whose buffers' means are the run's model before a tick.

        None: all, and the same.
        """
        table = self.tables[group]
        members = trained = self.members(tick - 1, group)
        if tick and hasattr(table, "trained") and any(map(self.engine.changes, self.engine.buffers)):
            trained = table.trained(tick - 1)
        same = trained == members or (members is None and len(trained or ()) == self.run.num_nodes)
        return members, None if same else trained

    def members(self, tick: int, group: int = 0) -> tuple[int, ...] | None:
        """Return the nodes whose parameters' mean is the run's model after a tick, counted from 0; None: all."""
        table = self.tables[group]
        return table.members(tick) if hasattr(table, "members") else self.groups[group].run.there(tick)

    def close(self) -> None:
        """End the threads of the engine and the algorithms; a later tick starts them again."""
        self.engine.close()
        for group in self.groups:
            if hasattr(group.algorithm, "close"):
                group.algorithm.close()

    def step(
        self, state: State, batch: Any, *, limits: list[int] | None = None, pure: bool = False,
        before: Before | None = None,
    ) -> tuple[State, TickRecord]:  # fmt: skip
        """Take a single step by hand: handle the next tick's events with one batch.

        Args:
            state: must not be used afterwards, unless `pure`.
            batch: of all nodes of this process, `[L, B, ...]`, including those that do not train.
            limits: the number of each node's own examples; None: all.
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
                yield nodes.take_rows(batch, torch.tensor(at)), limits_at

    def _rows_here(self, x: Tensor) -> Tensor:
        wide = x[self.here.start : self.here.stop] if len(x) > 1 else x.expand(len(self.here), *x.shape[1:])
        return wide.clone(memory_format=torch.contiguous_format)

    def requests(self, ticks: Iterator[Sequence[Event]]) -> Iterator[Request]:
        """Yield the requests of batches, (rows, index of each row's own batches), in order."""
        for events in ticks:
            for event in events:
                rows = self.place(event.rows, event.group).rows if event.reads else []
                for k in range(event.reads if rows else 0):
                    counts = event.counts if event.own is None else event.own
                    yield rows, _later(self.counts_here(event, counts), k)

    def counts_here(self, event: Event, counts: int | tuple[int, ...]) -> int | list[int]:
        """Return some counts of an event's rows for those in this process: one number if all are equal."""
        if isinstance(counts, int):
            return counts
        place = self.place(event.rows, event.group)
        count_of = dict(zip(range(len(counts)) if event.rows is None else event.rows, counts))
        each = [count_of[row] for row in (place.rows if event.group is None else place.nodes)]
        return each[0] if len(set(each)) == 1 else each

    def tick(
        self, state: State, events: Sequence[Event], batches: Batches, *, pure: bool = False,
        before: Before | None = None,
    ) -> tuple[State, TickRecord]:  # fmt: skip
        """Handle the events of a tick one after the other.

        Args:
            state: must not be used afterwards, unless `pure`.
            before: called before each event.
        """
        self.comm.step = state.tick
        with self.comm.ledger.recording() as transfers:
            draft = self.draft(state, batches, pure, transfers)
            for event in events:
                if before is not None:
                    before(event, draft)
                self.handle(draft, event)
        record = TickRecord(state.tick + 1, self._losses(draft), tuple(transfers), events, draft.groups, self.stacked)
        return State(state.tick + 1, draft.own, draft.shared), record

    def draft(self, state: State, *settings: Any) -> Draft:
        """Return the draft that a tick changes: it has the state's trees, in new dicts of names."""
        return Draft(state.tick, dict(state.own), dict(state.shared), *settings)

    def trees(self, draft: Draft, event: Event, place: Place) -> tuple[StateView | SplitView, StateView]:
        """Return an event's rows of `own` and `shared`."""
        return StateView(draft.own, place.at, len(self.here)), StateView(draft.shared, None, 1)

    def handle(self, draft: Draft, event: Event, precomputed: Local | None = None) -> None:
        """Take the event's rows, let its method change them, and put them back.

        Args:
            precomputed: their gradients, if these are known already.
        """
        part = Part(self, draft, event)
        part.comm.step, part.precomputed = draft.tick, precomputed
        handler = getattr(part.algorithm, event.what, None)
        if handler is None:
            raise TypeError(f"{type(part.algorithm).__name__} has no method {event.what!r}, named by its timetable.")
        handler(part)
        part.check_reads(at_end=True)
        table = self.tables[event.group or 0]
        if isinstance(table, Lockstep) and event.what == table.train and not part._reported:
            name = f"{type(part.algorithm).__name__}.{event.what}"
            raise ValueError(f"{name} reports no losses: call part.report(part.losses) in it.")
        part.put()

    def gradients(self, part: Part, at: Tree | None, mean: bool) -> Local:
        """Compute the gradients of some rows on their next batches: the one place that calls the engine for them."""
        num_rows, size = len(part.rows), part.size
        params = part.home.flat("params") if at is None else at
        if self.dry or not num_rows:
            part.num_read += num_rows > 0
            wide = tree.map(lambda p: p if len(p) == num_rows > 0 else p[:1].expand(num_rows, *p.shape[1:]), params)
            facts = None if self.dry else self.engine.facts  # without rows, no gradient says what is unused
            unused = dict.fromkeys(() if facts is None else facts.unused, frozenset[int]())
            losses = next(iter(params.values())).new_empty(num_rows)
            return Local(wide, losses, {}, unused, losses if not self.dry and self.engine.weighted else None)
        step, (batch, limits) = part.read_at, part.next_batch()
        mean = mean and part.inplace and all(len(p) == 1 for p in params.values())
        local, every = None, limits is None or min(limits) >= sizes_of(batch)[1]
        if every and at is None and self.minibatch_size is None and part.stays and size == 1:
            local = self.plain.gradients(part.event.group, params, batch, num_rows, mean)
        if local is None:
            local = self._computed(part, params, (batch, limits), step, mean, at is None)
        if mean and len(self.here) < self.run.num_nodes:  # averaged with other processes' means, as if each row's
            local = local._replace(grads=nodes.expand(local.grads, num_rows))
        if mean and local.missing:
            local = local._replace(missing=dict.fromkeys(local.missing, frozenset(range(num_rows))))
        return local

    def _computed(
        self, part: Part, params: Tree, read: tuple[Any, list[int] | None], step: int | list[int], mean: bool, own: bool
    ) -> Local:
        """Call the engine for the gradients of a batch; `own`: at the parameters of these rows."""
        num_rows, size, shared = len(part.rows), part.size, part.shared.flat("buffers")
        if size > 1:  # nodes of a configuration may share theirs, `[C, *]`
            params = params if own else tree.map(lambda p: _flat(p, size, num_rows // size), params)
            params = nodes.expand(params, num_rows)
            shared = tree.map(lambda b: b[:1] if b.stride(0) == 0 else nodes.expanded(b, num_rows), shared)
        if self.engine.written:  # each node writes to its own copy
            params = nodes.widened(params, num_rows)
        local = self.engine.gradients(
            params, {**shared, **part.own.flat("buffers")}, read[0], seed=part.place.seeds, step=step,
            node_ids=part.place.nodes, limits=read[1], minibatch_size=self.minibatch_size, mean=mean,
            differentiable=not part.inplace,
        )  # fmt: skip
        if self.engine.written and own:
            written = {name: params[name] for name in self.engine.written}
            if part.home is part.shared:
                written = tree.map(lambda x: x.unflatten(0, (size, -1))[:, 0], self._same_on_all(written, size))
            part.home.put_flat("params", {**part.home.flat("params"), **written})
        if changed := {name: x for name, x in local.buffers.items() if name not in shared}:
            part.own.put_flat("buffers", changed)
        return local

    def _same_on_all(self, written: Tree, size: int) -> Tree:
        """Return parameters that a forward pass has written, `[rows, *]`, if they are the same on all nodes."""
        for name, x in written.items():
            of_each = x.unflatten(0, (size, -1))
            if not torch.allclose(of_each, of_each[:, :1], 0, 0, equal_nan=True):
                raise ValueError(
                    f"the model's forward writes to its parameter {name!r}, and what it writes depends on the batch. "
                    f"{self.algorithm!r} exchanges gradients, which needs the same parameters on all nodes: they would "
                    "drift apart, as they do in DDP. Use a strategy that exchanges parameters (DiLoCo, FedAvg), or "
                    "write nothing that depends on the batch."
                )
        return written

    def _place(self, rows: tuple[int, ...] | None, group: int | None = 0) -> Place:
        K, chosen = self.run.num_nodes, self._chosen(rows)
        comm = self.comm if len(chosen) in (0, K) else self.comm.among(chosen)
        here = [row for row in chosen if row in self.here]
        at = index_of([row - self.here.start for row in here], len(self.here))
        return Place(here, at, comm, here, [self.run.seed] * len(here))

    def _chosen(self, rows: tuple[int, ...] | None) -> Sequence[int]:
        """Return the nodes of an event."""
        K = self.run.num_nodes
        if rows is None:
            return range(K)
        if rows != tuple(sorted(set(rows))) or not set(rows) <= set(range(K)):
            raise ValueError(f"an event has rows {rows}; they must be distinct, ascending and from 0 to {K - 1}.")
        return rows

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


def without_gradient(state: State, timetable: Any, first: int = 0) -> list[str]:
    """Return the parameters that had no gradient in any step of any row here.

    Args:
        state: of one configuration.
        first: the node of the first row.

    >>> skipped = {"v": torch.tensor([-1, 0]), "w": torch.tensor([-1, -1])}
    >>> without_gradient(State(1, {"params": {}, "optimizer": {"skipped": skipped}}, {}), None)
    ['w']
    """
    names = []
    for name, x in state.home.get("optimizer", {}).get(SKIPPED, {}).items():
        made = None if len(x) == 1 or not hasattr(timetable, "made") else timetable.made(state.tick)[first:][: len(x)]
        trained = x if made is None else x[torch.tensor(made) > 0]  # nodes that have not trained skipped no step
        if bool((trained < 0).all()):
            names.append(name)
    return names


def warn_of_untrained(each: Iterable[list[str]]) -> list[str]:
    """Warn of parameters that never had a gradient, in any of several parts of a run, and return them.

    It asks for no further parts once there is no such parameter.

    >>> warn_of_untrained([["v", "w"], ["u"]])
    []
    """
    names = next(parts := iter(each), [])
    while names and (some := next(parts, None)) is not None:
        names = [name for name in names if name in some]
    if names:
        warn(
            f"{len(names)} of the model's parameters never had a gradient, on no node, and have not been trained: "
            f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}. Does the forward use them? To freeze them, "
            "set requires_grad_(False): then they are not sent, either."
        )
    return names


def run(
    simulation: Simulation, state: State, listeners: Sequence[Callable[[State, TickRecord], None]] = (), *,
    pure: bool = False, before: Before | None = None, stop: Callable[[State], bool] | None = None,
) -> State:  # fmt: skip
    """Run the timetable from the state's tick to its end, or until `stop`; return the last state.

    Args:
        state: must not be used afterwards, unless `pure`.
        listeners: called after each tick with the state and its measurements.
        pure: whether the run can be differentiated. In the state that it returns, names may share memory: only a pure
            run can continue from it.
        before: called before each event; see `Simulation.tick`.
    """
    ticks, ahead = itertools.tee(simulation.timetable.ticks(state.tick))
    batches = simulation.read(simulation.requests(ahead))
    try:
        for events in ticks:
            state, row = simulation.tick(state, events, batches, pure=pure, before=before)
            for listener in listeners:
                listener(state, row)
            if stop is not None and stop(state):
                break
    finally:
        if isinstance(batches, Generator):
            batches.close()
    return state


def _some(counts: int | list[int], a: int, b: int) -> int | tuple[int, ...]:
    return counts if isinstance(counts, int) else tuple(counts[a:b])


def _later(counts: int | list[int], steps: int) -> int | list[int]:
    return counts + steps if isinstance(counts, int) else [count + steps for count in counts]


def check_run(algorithm: Any, run: RunFacts) -> None:
    """Raise a ValueError if an algorithm cannot work for this run, by its own `check_run`."""
    if hasattr(algorithm, "check_run"):
        algorithm.check_run(run)


def timetable_of(algorithm: Any, run: RunFacts) -> Any:
    """Return an algorithm's timetable, for whose marks it has methods."""
    timetable = algorithm.timetable(run)
    for mark in getattr(timetable, "marks", ()):
        if not callable(getattr(algorithm, mark.what, None)):
            raise TypeError(f"{type(algorithm).__name__} has no method {mark.what!r}, named by its marks.")
    return timetable


def initial(algorithm: Any, run: RunFacts, params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an algorithm's initial state, if its tensors are `[1 or K, *]`, each node's, and `[1, *]`, shared ones.

    A number would be the same for all nodes and configurations, and is refused.
    """
    made, name = algorithm.init(run, params), f"{type(algorithm).__name__}.init"
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], dict) and isinstance(made[1], dict)):
        raise TypeError(f"{name} returned {a_kind(made)}; expected two dicts: each node's own trees, and shared ones.")
    for held, sizes in zip(made, ({1, run.num_nodes}, {1, *map(len, params.values())})):
        for path, x in tree.flatten(held):
            if check.is_number(x) if not isinstance(x, Tensor) else not (x.dim() and len(x) in sizes):
                what, rows = tree.form(x) if isinstance(x, Tensor) else x, " or ".join(map(str, sorted(sizes)))
                raise ValueError(f"{name} gave {what} for {tree.path_name(path)}; expected a tensor of {rows} rows.")
    return made


def index_of(rows: list[int], size: int) -> Index:
    """Return an index of these rows: None for all, a slice for consecutive rows.

    >>> index_of([0, 1], size=2), index_of([1, 2], size=4), index_of([0, 2], size=4)
    (None, slice(1, 3, None), tensor([0, 2]))
    """
    if len(rows) == size:
        return None
    consecutive = bool(rows) and rows[-1] - rows[0] + 1 == len(rows)
    return slice(rows[0], rows[-1] + 1) if consecutive else torch.tensor(rows, dtype=torch.long)


def _flat(x: Tensor, size: int, num_rows: int) -> Tensor:
    """Return a tensor `[1 or C, 1 or rows, *]` as `[C * rows, *]`."""
    return x.expand(size, num_rows, *x.shape[2:]).flatten(0, 1)


def _each_row(lr: Any, size: int, num_rows: int) -> Any:
    """Return the learning rate of each row, from rates of configurations, `[C]`, or of their rows, `[C, rows]`."""
    if not isinstance(lr, Tensor) or lr.dim() == 0:
        return lr
    return lr.reshape(size, -1).expand(size, num_rows).flatten() if num_rows > 1 else lr.flatten()
