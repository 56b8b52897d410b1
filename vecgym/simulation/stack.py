"""Several groups of configurations as one simulation: a sweep is rows.

The timetables of the groups run side by side. `train` events at the same time share one call of the engine, and one
optimizer step if their optimizers differ in numbers only; each group handles all other events alone.

A group is a set of configurations whose settings differ in numbers only. `batched` of an algorithm, or of a part of it,
names the settings that may differ within a group; all others must be equal. If `batched` is None, the code is for one
configuration, which is a group of one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from vecgym.collectives import StackedCollectives
from vecgym.collectives.stacked import GroupCollectives
from vecgym.core import check, nodes, tree
from vecgym.core.objects import altered, public
from vecgym.core.tree import Tree
from vecgym.data import batches as data
from vecgym.engine import Engine, Local
from vecgym.engine.backend import missing_within
from vecgym.engine.backend import rows as rows_of
from vecgym.optim import Optimizer, OptimSpec
from vecgym.optim.spec import merge_key as spec_key
from vecgym.optim.spec import merged_spec, per_configuration
from vecgym.simulation.plain import Plain
from vecgym.simulation.simulation import (
    CACHED_PLACES,
    Batches,
    Draft,
    Group,
    LocalTraining,
    Part,
    Place,
    Request,
    Simulation,
    check_run,
    index_of,
    initial,
    timetable_of,
)
from vecgym.simulation.state import GroupView, Result, SplitView, State, StateView
from vecgym.simulation.timetable import Event, RunFacts, Timetable

COMMON = ("params", "buffers", "optimizer")  # trees that all groups store together, so that they can train together


class Together:
    """The timetables of several groups as one. The next `train` events of all groups are one event.

    Args:
        groups: in the order of their rows.
        tables: the timetable of each group.

    >>> from vecgym.simulation.timetable import Lockstep, Mark, RunFacts
    >>> runs = [RunFacts(num_nodes=2, num_steps=2)] * 2
    >>> tables = [Lockstep(runs[0], Mark("meet", 1)), Lockstep(runs[1], Mark("meet", 2))]
    >>> for events in Together([Group(None, runs[0], 0), Group(None, runs[1], 2)], tables).ticks():
    ...     print([(event.what, event.group) for event in events])
    [('train', None), ('meet', 0)]
    [('train', None), ('meet', 0), ('meet', 1)]
    """

    def __init__(self, groups: Sequence[Group], tables: Sequence[Timetable]) -> None:
        self.groups, self.tables, self.length = groups, tables, tables[0].length
        self.max_steps = max(table.max_steps for table in tables)

    def ticks(self, start: int = 0) -> Iterator[list[Event]]:
        for each in zip(*[table.ticks(start) for table in self.tables], strict=True):
            yield list(self._side_by_side([[e._replace(group=g) for e in events] for g, events in enumerate(each)]))

    def _side_by_side(self, coming: list[list[Event]]) -> Iterator[Event]:
        while any(coming):
            for events in coming:  # events before the next step of all groups
                while events and not events[0].reads:
                    yield events.pop(0)
            heads = [events.pop(0) for events in coming if events]
            joined = [head for head in heads if head[:1] + head[3:5] == ("train", 1, None)]  # a step of nodes that wait
            if joined:
                yield self._joint(joined)
            yield from (head for head in heads if head not in joined)

    def _joint(self, heads: list[Event]) -> Event:
        """Return an event of the rows of these events."""
        first = heads[0]
        alike = all(head.rows is None and head.counts == first.counts and head.made is None for head in heads)
        if alike and isinstance(first.counts, int) and len(heads) == len(self.groups):
            return Event("train", None, first.counts, 1, heads, group=None)
        rows, counts, made, own = list[int](), list[int](), list[int](), list[int]()
        for head in heads:
            assert head.group is not None
            group = self.groups[head.group]
            rows += group.rows(head.rows)
            counts += _each(head, head.counts, group)
            made += _each(head, head.counts if head.made is None else head.made, group)
            own += _each(head, head.reads_at, group)
        everyone = len(rows) == sum(group.size * group.run.num_nodes for group in self.groups)
        each_made, each_own = (None if x == counts else tuple(x) for x in (made, own))
        return Event("train", None if everyone else tuple(rows), tuple(counts), 1, heads, each_made, None, each_own)


def _each(event: Event, counts: int | tuple[int, ...], group: Group) -> list[int]:
    """Return the counts of an event's rows in all configurations of its group."""
    num_nodes = group.run.num_nodes if event.rows is None else len(event.rows)
    return ([counts] * num_nodes if isinstance(counts, int) else list(counts)) * group.size


class Stack(Simulation):
    """The simulation of several groups. Row `c K + i` is node i of configuration c.

    Its state has `shared` by group, "0", "1", ..., each name -> tree `[C, *]`. In `own`, `COMMON` trees have the rows
    of all groups; the other trees of a group are in a dict by group, too, since groups have different names.

    Args:
        groups: in the order of their rows, with the same number of nodes and ticks.
        comm: the collectives of the nodes of one configuration.
        engine, read, minibatch_size: see `Simulation`.
    """

    def __init__(
        self, engine: Engine, groups: Sequence[Group], comm: StackedCollectives,
        read: Callable[[Iterator[Request]], Batches], *, minibatch_size: int | None = None,
    ) -> None:  # fmt: skip
        self.engine, self.comm, self.read, self.minibatch_size, self.exact = engine, comm, read, minibatch_size, False
        self.groups = [group._replace(run=replace(group.run, names=tuple(engine.params))) for group in groups]
        self.stacked = self.groups
        self._seeds = [seed for group in self.groups for seed in group.seeds]
        self.run, self.algorithm = self.groups[0].run, self.groups[0].algorithm
        self.here = range(sum(group.size for group in groups) * self.run.num_nodes)
        for group in self.groups:
            for member in group.members:
                check_run(member, group.run)
        self.tables = [timetable_of(group.algorithm, group.run) for group in self.groups]
        self.timetable = Together(self.groups, self.tables)
        self.whole = self._whole()
        self._common = COMMON[:2] if self.whole is None else COMMON
        self.place, self.plain = functools.lru_cache(CACHED_PLACES)(self._place), Plain(engine)

    def _whole(self) -> Group | None:
        """Return a group of all rows, each with its own numbers, if all can train by one step of one optimizer."""
        if any(getattr(type(group.algorithm), "train", None) is not LocalTraining.train for group in self.groups):
            return None
        each = [member.inner for group in self.groups for member in group.members]
        schedules = {table.max_steps for table in self.tables}
        keys = {inner.merge_key if isinstance(inner, Optimizer) else None for inner in each}
        if len(each) > 1 and (None in keys or len(keys) > 1 or len(schedules) > 1):
            return None
        whole = LocalTraining()
        whole.inner = Optimizer.merged(each).wide(self.run.num_nodes) if len(each) > 1 else each[0]
        return Group(whole, self.run)

    # ---------------------------------------------------------------------------------------------------------- state

    @property
    def num_configs(self) -> int:
        """The number of configurations."""
        return len(self._seeds)

    def init(self, params: Tree | Sequence[Tree] | None = None) -> State:
        """Return the state before the first tick.

        Args:
            params: `[1 or number of configurations, *]`, or a list of those of each, `[1 or K, *]`; None: the model's.
        """
        of_each: Sequence[Tree] = [] if params is None or isinstance(params, dict) else params
        one, constant, changing = self._initial(of_each[0] if of_each else cast("Tree | None", params))
        one, constant, changing = tree.map_leaves(torch.clone, (one, constant, changing))
        of_each = of_each or [rows_of(one, c, c + 1) for c in range(self.num_configs)]
        own: dict[str, Any] = {}
        shared, common = dict[str, Any](), list[dict[str, Any]]()
        for number, group in enumerate(self.groups):
            configs = enumerate(group.members, group.first // self.run.num_nodes)
            each = [initial(member, group.run, of_each[c]) for c, member in configs]
            on_nodes = functools.partial(nodes.expanded, num_nodes=self.run.num_nodes)
            rows = [tree.map_leaves(on_nodes, {"buffers": changing, **values}) for values, _ in each]
            common += [{name: row.pop(name) for name in self._common if name in row} for row in rows]
            own[str(number)] = nodes.join_rows(rows)
            buffers = tree.map(lambda b: b.expand(group.size, *b.shape[1:]), constant)  # noqa: B023
            shared[str(number)] = {"buffers": buffers, **nodes.join_rows([values for _, values in each])}
        sizes = [self.run.num_nodes] * len(common)  # joined once: a copy for each group would double the memory
        return State(0, {**nodes.join_rows(common, sizes), **own}, shared)

    def alone(self, state: State, config: int) -> State:
        """Return the state of one configuration in the form of a plain run; its tensors are views.

        Args:
            config: its index in the order of the rows.
        """
        K, number = self.run.num_nodes, self.group_with(config)
        group = self.groups[number]
        c = config - group.first // K
        of_group = lambda x: x.unflatten(0, (group.size, -1))[c]  # noqa: E731
        shared = tree.map_leaves(of_group, state.shared[str(number)])
        others = tree.map_leaves(of_group, state.own[str(number)])
        common = {n: state.own[n] for n in self._names(state.own, state.shared, number) if n in state.own}
        rows = slice(config * K, config * K + K)
        return State(state.tick, {**tree.map_leaves(lambda x: x[rows], common), **others}, shared)

    def parameters(self, own: dict[str, Any], shared: dict[str, Any]) -> Tree:
        """Return the parameters of all rows, `[rows, *]`; `[C, *]` if the nodes of every configuration share theirs."""
        once = [number for number, trees in shared.items() if "params" in trees]
        if not once:
            return own["params"]
        if len(once) == len(self.groups):
            return tree.map(lambda *parts: torch.cat(parts), *[shared[number]["params"] for number in once])
        whole = tree.map(torch.clone, own["params"])
        for number in once:
            group = self.groups[int(number)]
            rows = slice(group.first, group.first + len(group.rows()))
            for name, p in shared[number]["params"].items():
                whole[name][rows] = p.repeat_interleave(self.run.num_nodes, 0)
        return whole

    def buffers(self, own: dict[str, Any], shared: dict[str, Any]) -> Tree:
        """Return the model's buffers, `[rows, *]`, and those that never change, `[1, *]`."""
        constant = tree.map(lambda b: b[:1], shared["0"]["buffers"])
        return {**constant, **own["buffers"]}

    def group_with(self, config: int) -> int:
        """Return the number of the group of a configuration."""
        row = config * self.run.num_nodes
        return max(number for number, group in enumerate(self.groups) if group.first <= row)

    def result(self, state: State, config: int = 0) -> Result:
        """Return the parameters, and the nodes, whose mean is one configuration's model, from its state `alone`."""
        number, K = self.group_with(config), self.run.num_nodes
        group = self.groups[number]
        return self._result(number, state, group.members[config - group.first // K])

    # --------------------------------------------------------------------------------------------------------- events

    def draft(self, state: State, *settings: Any) -> Draft:
        own = {name: dict(x) if name not in COMMON else x for name, x in state.own.items()}
        return Draft(state.tick, own, {number: dict(x) for number, x in state.shared.items()}, *settings)

    def trees(self, draft: Draft, event: Event, place: Place) -> tuple[StateView | SplitView, StateView]:
        if event.group is None:
            constant = tree.map_leaves(lambda b: b[:1], draft.shared["0"]["buffers"])
            return StateView(draft.own, place.at, len(self.here)), StateView({"buffers": constant}, None, 1)
        group, number = self.groups[event.group], str(event.group)
        stores = [(draft.own, place.at, len(self.here), len(place.rows) // group.size),
                  (draft.own[number], place.within, len(group.rows()), len(place.rows) // group.size),
                  (draft.shared[number], None, group.size, 1)]  # fmt: skip
        common, others, shared = (
            StateView(whole, at, size) if group.size == 1 else GroupView(whole, at, size, group.size, num_rows)
            for whole, at, size, num_rows in stores
        )
        return SplitView(common, self._names(draft.own, draft.shared, event.group), others), shared

    def _names(self, own: dict[str, Any], shared: dict[str, Any], group: int) -> list[str]:
        """Return the names that a group stores in the trees of all rows."""
        here = {*own[str(group)], *shared[str(group)]} - {"buffers"}
        return ["buffers"] if "params" in here else [name for name in self._common if name not in here]

    def handle(self, draft: Draft, event: Event, precomputed: Local | None = None) -> None:
        if event.group is None:
            self._train(draft, event)
        else:
            super().handle(draft, event, precomputed)
        draft.groups.extend([event.group] * (len(draft.transfers) - len(draft.groups)))

    def _train(self, draft: Draft, event: Event) -> None:
        """Let several groups train: by one step, or each by its own with its part of the gradients."""
        heads = event.info
        sizes = [len(self.place(head.rows, head.group).rows) for head in heads]
        if not all("params" in self._names(draft.own, draft.shared, head.group) for head in heads):
            self._train_apart(draft, event, sizes)
        elif self.whole is not None:
            super().handle(draft, event)
        else:
            part = Part(self, draft, event)
            local = self.gradients(part, None, mean=False)
            part.put()  # buffers
            each = zip(*[g.split(sizes) for g in local.grads.values()])
            starts = itertools.accumulate(sizes, initial=0)
            for head, a, size, grads in zip(heads, starts, sizes, each):
                losses, weights = (x if x is None else x[a : a + size] for x in (local.losses, local.weights))
                assert losses is not None
                missing = missing_within(local.missing, a, a + size)
                self.handle(draft, head, Local(dict(zip(local.grads, grads)), losses, {}, missing, weights))

    def _train_apart(self, draft: Draft, event: Event, sizes: list[int]) -> None:
        """Let groups train one after the other, if nodes of some of them share their parameters."""
        (batch, limits), start = next(draft.batches), 0
        for head, size in zip(event.info, sizes):
            rows = torch.arange(start, start + size)
            some = None if limits is None else limits[start : start + size]
            batches = iter([(nodes.take_rows(batch, rows), some)])
            self.handle(replace(draft, batches=batches), head)
            start += size

    def _place(self, rows: tuple[int, ...] | None, group: int | None = 0) -> Place:
        K, comm = self.run.num_nodes, self.comm
        assert isinstance(comm, StackedCollectives)
        if group is None:
            every = list(self.here) if rows is None else list(rows)
            ids = [row % K for row in every]
            return Place(every, index_of(every, len(self.here)), comm, ids, [self._seeds[row // K] for row in every])
        first, size = self.groups[group].first, self.groups[group].size
        chosen = self._chosen(rows)
        comm = comm.among(chosen) if 0 < len(chosen) < K else comm
        every = self.groups[group].rows(rows)
        return Place(
            every, index_of(every, len(self.here)), comm if size == 1 else GroupCollectives(comm, size),
            list(chosen) * size, [self._seeds[row // K] for row in every], size,
            index_of([row - first for row in every], size * K),
        )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- reading


class BatchReader:
    """Turns a stream of requests into a stream of batches for all configurations.

    If consecutive groups request the same rows of the same data, these are read once.

    Args:
        sources: the distinct data.
        which: the index, in `sources`, of each configuration's data.
        num_nodes: K.

    >>> from vecgym.data import Batches
    >>> batches = [Batches(torch.arange(8) + 10 * s, num_nodes=2, batch_size=1, shuffle=False) for s in range(2)]
    >>> read = BatchReader(batches, [0, 1, 0], num_nodes=2)
    >>> [batch.T for batch, _ in read(iter([([0, 1, 2, 3, 4, 5], 0), ([1, 3], 1)]))]
    [tensor([[ 0,  1, 10, 11,  0,  1]]), tensor([[ 3, 13]])]
    """

    def __init__(self, sources: Sequence[data.Batches], which: Sequence[int], num_nodes: int) -> None:
        self.sources, self.which, self.num_nodes = list(sources), list(which), num_nodes

    def __call__(self, requests: Iterator[Request]) -> Iterator[tuple[Any, list[int] | None]]:
        *own, all_requests = itertools.tee(requests, len(self.sources) + 1)
        streams = [source.read(self._requests_of(s, own[s])) for s, source in enumerate(self.sources)]
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

    def _requests_of(self, source: int, requests: Iterator[Request]) -> Iterator[Request]:
        """Yield the requests to one source."""
        last = None
        for rows, counts in requests:
            if (request := self._request(source, rows, counts)) not in (None, last):
                last = request
                yield request

    def _request(self, source: int, rows: Sequence[int], counts: int | Sequence[int]) -> Request | None:
        """Return the part of a request that concerns the first configuration with this source."""
        K = self.num_nodes
        if isinstance(counts, int) and len(rows) == len(self.which) * K:
            return list(range(K)), counts
        first = next((row - row % K for row in rows if self.which[row // K] == source), None)
        if first is None:
            return None
        mine = [i for i, row in enumerate(rows) if first <= row < first + K]
        return [rows[i] - first for i in mine], counts if isinstance(counts, int) else [counts[i] for i in mine]

    def _joined(self, of_configs: list[Any], parts: list[Any], everyone: bool) -> tuple[Any, list[int] | None]:
        used = parts if everyone else of_configs
        limits, widths = list[int](), {_width(batch) for batch, _ in used}
        if len(widths) > 1 or any(limit is not None for _, limit in used):
            for batch, limit in of_configs:  # a limit may be a whole shard, more than a batch has
                of_each = limit or [_width(batch)] * len(tree.leaves(batch)[0])
                limits += [min(number, _width(batch)) for number in of_each]
        chosen = [_widened(batch, max(widths)) for batch, _ in used]
        return (data.chosen_batches(chosen, self.which) if everyone else nodes.join_rows(chosen)), limits or None


def _width(batch: Any) -> int:
    """Return B, the number of examples in each row of a batch `[n, B, ...]`, including repeated ones."""
    first = tree.leaves(batch)[0]
    return first.shape[1] if first.dim() > 1 else 0


def _widened(batch: Any, width: int) -> Any:
    """Repeat the last example of each row of a batch `[n, B, ...]`; `limits` hold the true numbers of examples.

    >>> _widened(torch.tensor([[1, 2]]), 4)
    tensor([[1, 2, 2, 2]])
    """
    missing = width - _width(batch)
    return tree.map_leaves(lambda x: torch.cat([x, *[x[:, -1:]] * missing], 1), batch) if missing else batch


# ------------------------------------------------------------------------------------------------------------ groups


def groups_of(algorithms: Sequence[Any], runs: Sequence[RunFacts]) -> tuple[list[int], list[Group]]:
    """Merge configurations into groups.

    Args:
        algorithms, runs: one for each configuration.

    Returns:
        The order of the configurations in the rows, and the groups.

    >>> from vecgym.optim import Optimizer, OptimSpec
    >>> class Local:
    ...     batched = ()
    ...     def __init__(self, lr, H):
    ...         self.inner, self.H = Optimizer(OptimSpec("sgd", lr=lr)), H
    >>> order, groups = groups_of([Local(0.1, 5), Local(0.1, 10), Local(0.2, 5)], [RunFacts(num_nodes=4)] * 3)
    >>> order, [(group.first, group.size, group.algorithm.H) for group in groups]
    ([0, 2, 1], [(0, 2, 5), (8, 1, 10)])
    >>> groups[0].algorithm.inner.spec
    OptimSpec(SGD, lr=tensor([0.1000, 0.2000], dtype=torch.float64))
    """
    alike: dict[Any, list[int]] = {}
    for c, (algorithm, run) in enumerate(zip(algorithms, runs, strict=True)):
        alone = getattr(algorithm, "batched", None) is None
        key = c if alone else (key_of(algorithm), *run_key(run, getattr(algorithm, "depends_on_seed", True)))
        alike.setdefault(key, []).append(c)
    groups, first = list[Group](), 0
    for chosen in alike.values():
        members = tuple(algorithms[c] for c in chosen)
        seeds = tuple(runs[c].seed for c in chosen)
        groups.append(Group(merged(members), runs[chosen[0]], first, len(chosen), members, seeds))
        first += len(chosen) * runs[chosen[0]].num_nodes
    return [c for chosen in alike.values() for c in chosen], groups


def run_key(run: RunFacts, draws: bool) -> tuple[Any, ...]:
    """Return a key; runs with equal keys can share a group: the same nodes are present, and draw the same numbers.

    Args:
        draws: whether the strategy draws random numbers.
    """
    seed = run.seed if draws else None
    return run.num_nodes, run.num_steps, seed, id(run.presence), run.num_examples, id(run.schedule), run.names


def key_of(setting: Any) -> Any:
    """Return a key; settings with equal keys differ only in numbers of optimizers and settings that `batched` names.

    >>> key_of(Optimizer(OptimSpec("sgd", lr=0.1))) == key_of(Optimizer(OptimSpec("sgd", lr=0.2)))
    True
    >>> key_of([1, "ring"]) == key_of([1, "star"]), key_of(torch.ones(2)) == key_of(torch.ones(2))
    (False, True)
    """
    if isinstance(setting, (Optimizer, OptimSpec)):
        key = setting.merge_key if isinstance(setting, Optimizer) else spec_key(setting)
        return (type(setting), *key) if key is not None else object()  # equal to nothing else: it cannot be merged
    if isinstance(setting, Tensor):
        same = tree.differentiated(setting) or setting.device.type == "meta"
        return id(setting) if same else (setting.dtype, tuple(setting.shape), tuple(setting.flatten().tolist()))
    if isinstance(setting, (list, tuple)):
        return type(setting), tuple(map(key_of, setting))
    if isinstance(setting, dict):
        return dict, tuple((name, key_of(value)) for name, value in setting.items())
    if not hasattr(setting, "batched"):
        return _value_key(setting)
    batched = setting.batched
    if batched is None:  # its code is for one configuration
        return object()
    settings = public(setting)
    if unknown := [name for name in batched if name not in settings]:
        raise TypeError(
            f"class {type(setting).__name__}: batched={batched!r} names {unknown[0]!r}, which it does not hold under "
            f"that name: assign self.{unknown[0]} in __init__."
        )
    values = {name: _form(x) if name in batched else key_of(x) for name, x in settings.items()}
    # Merged settings have the private values of the first ones, so these must be equal.
    private = {name: key_of(x) for name, x in vars(setting).items()
               if name[0] == "_" and isinstance(x, (int, float, str, Tensor))}  # fmt: skip
    return type(setting), *values.items(), *private.items()


def _value_key(value: Any) -> Any:
    """Return the key of a value that is compared as a whole; a codec or a selector by its settings.

    >>> from vecgym.compress import TopK
    >>> _value_key(TopK(0.1)) == _value_key(TopK(0.1)), _value_key(TopK(0.1)) == _value_key(TopK(0.2))
    (True, False)
    """
    plain = type(value).__eq__ is object.__eq__ and not callable(value) and hasattr(value, "__dict__")
    if plain and type(value).__module__.startswith("vecgym."):
        return type(value), *((name, key_of(x)) for name, x in sorted(vars(value).items()))
    try:
        hash(value)
    except TypeError:  # equal to itself only
        return id(value)
    return type(value), value


def merged(members: Sequence[Any]) -> Any:
    """Merge settings with equal keys into one, with values `[C]` for numbers that differ.

    >>> merged([Optimizer(OptimSpec("sgd", lr=lr)) for lr in (0.5, 0.5)])
    Optimizer(OptimSpec(SGD, lr=0.5))
    """
    first = members[0]
    if len(members) == 1:
        return first
    if isinstance(first, Optimizer):
        return Optimizer.merged(members)
    if isinstance(first, OptimSpec):
        return merged_spec(members)
    if isinstance(first, (list, tuple)) and not hasattr(first, "_fields"):
        return type(first)(merged(each) for each in zip(*members))
    if isinstance(first, dict):
        return {name: merged([x[name] for x in members]) for name in first}
    batched = getattr(first, "batched", None)
    if batched is None:
        return first
    each = {name: [vars(x)[name] for x in members] for name in public(first)}
    return _with(first, {name: _number(x) if name in batched else merged(x) for name, x in each.items()})


def _with(setting: Any, new: dict[str, Any]) -> Any:
    """Return a copy of a setting with other public ones, which may have private names, too."""
    aliases = {name: key for key, x in vars(setting).items() if key[0] == "_" and hasattr(x, "batched")
               for name in new if vars(setting)[name] is x}  # fmt: skip
    return altered(setting, **new, **{key: new[name] for name, key in aliases.items()})


def _form(number: Any) -> Any:
    """Return the key of a number that may differ: its form."""
    if isinstance(number, Tensor):
        return tuple(number.shape), number.dtype
    return "number" if check.is_number(number) else key_of(number)


def _number(values: Sequence[Any]) -> Any:
    """Return one number, or one for each configuration: `[C]`, or `[C, K]` for a per-node setting."""
    if isinstance(values[0], Tensor) and values[0].dim() > 0:
        return torch.stack(list(values))
    if isinstance(values[0], Tensor) or check.is_number(values[0]):
        return per_configuration(values)
    return merged(values)


def halved(setting: Any) -> Any:
    """Return a setting with the same key, with half of each learning rate and of each number that `batched` names.

    >>> halved([Optimizer(OptimSpec("sgd", lr=0.5)), "ring"])
    [Optimizer(OptimSpec(SGD, lr=0.25)), 'ring']
    """
    if isinstance(setting, Optimizer):
        return setting.replace(halved(setting.spec), setting.max_norm)
    if isinstance(setting, OptimSpec):
        return setting.replace(lr=_half(setting.hyper["lr"])) if "lr" in setting.hyper else setting
    if isinstance(setting, (list, tuple)) and not hasattr(setting, "_fields"):
        return type(setting)(map(halved, setting))
    batched = getattr(setting, "batched", None)
    if batched is None:
        return setting
    return _with(setting, {name: _half(x) if name in batched else halved(x) for name, x in public(setting).items()})


def _half(number: Any) -> Any:
    return number / 2 if check.is_number(number) or isinstance(number, Tensor) else number
