"""Communication modules with hooks, the context that they are told, and the exchange that calls them in every step.

What a hook returns is checked: an error says what came, from whom, and what is expected. That is cheap enough for every
step: what a module leaves as it was is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from vecgym.collectives import Collectives, StackedCollectives
from vecgym.core import check, nodes, rng, tree
from vecgym.core.devices import placed
from vecgym.core.objects import altered, public
from vecgym.core.tree import Tree
from vecgym.simulation.simulation import Part, Place
from vecgym.simulation.timetable import Mark, RunFacts, Who
from vecgym.strategy.meeting import Member, Of, a_kind, check_values

State = dict[str, Any]  # nested dicts of tensors: all that a module or strategy carries from step to step
Slots = dict[str, Tree]  # slot -> parameter -> [1 or L, *]: what an inner optimizer keeps of each parameter


@dataclass(frozen=True)
class Context:
    """What a strategy may know at a step.

    Attributes:
        comm: the collectives, the only way to other nodes.
        step: steps of the run done before this one, so 0 in the first.
        node_steps: optimizer steps that each node here has done before this one, `[L]` integers: fewer than `step`
            for a node that sat some out. When not given, `step` for all.
        active: the ids of the nodes that train in this step, ascending; None: all, or not yet decided
            (`active_nodes` decides).
        max_steps: the length of the run.
        seed: the run's seed; random numbers come from `generator`.
        num_examples: of each node's shard, [K]; None where not known.
        differentiable: derivatives are taken through the run.
        inplace: the tensors given may be overwritten. False under differentiation, where every operation must
            be pure.
        rows: where only some nodes train, or are in this process, which of all nodes these are; see `own`.
        exact: the bits of a node's own work must not depend on which other nodes are in this process. Elementwise
            operations and reductions of each node by itself never do; a matrix product over all nodes may.
        lr: the inner learning rate of this step, schedule and warm-up included: a number, or a tensor `[]` or `[K]`, of
            which `own` gives the rows of the nodes that train here. A strategy tells its modules; None without one.
        exchange: exchanges done before this one: as many as the module's `when` counts, `step` without one.

    >>> from vecgym.collectives import StackedCollectives
    >>> ctx = Context(StackedCollectives(4), step=3, seed=7)
    >>> a, b = (torch.rand(3, generator=ctx.generator("mask", ctx.step)) for _ in range(2))
    >>> torch.equal(a, b)  # the same (seed, purpose, ids), the same numbers
    True
    >>> ctx.replace(rows=torch.tensor([1, 3])).own(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    tensor([0.2000, 0.4000])
    >>> ctx.node_steps
    tensor([3, 3, 3, 3])
    """

    comm: Collectives
    _: KW_ONLY
    step: int = 0
    node_steps: Tensor = None  # type: ignore[assignment]  # until __post_init__
    active: tuple[int, ...] | None = None
    max_steps: int = 1
    seed: int = 0
    inplace: bool = False
    differentiable: bool = False
    num_examples: tuple[int, ...] | None = None
    rows: Tensor | None = None
    exact: bool = False
    lr: float | Tensor | None = None
    exchange: int = None  # type: ignore[assignment]  # until __post_init__

    def __post_init__(self) -> None:
        if self.node_steps is None:
            object.__setattr__(self, "node_steps", torch.full((len(self.comm.node_ids),), self.step))
        if self.exchange is None:
            object.__setattr__(self, "exchange", self.step)

    def replace(self, **changes: Any) -> Context:
        """Return a copy in which some values are others.

        >>> from vecgym.collectives import StackedCollectives
        >>> Context(StackedCollectives(3)).replace(step=5, lr=0.1).step
        5
        """
        check.keywords("a Context", changes, vars(self))
        return altered(self, **changes)

    def own(self, value: Any) -> Any:
        """Return a hyperparameter for the nodes that train here: of `[K]` their rows; what all nodes share as it is."""
        per_node = isinstance(value, Tensor) and value.dim() > 0 and value.numel() > 1
        return value[placed(self.rows, value.device)] if per_node and self.rows is not None else value

    def generator(self, purpose: str, *ids: int) -> torch.Generator:
        """Return a generator keyed by (seed, purpose, ids): the same on every node and in every process."""
        return rng.generator(self.seed, purpose, *ids)


class CommunicationModule:
    """One thing that nodes exchange. Override what you need; everything is `[L, *]` trees.

    A module holds hyperparameters only. What evolves is its state, nested dicts of tensors `[1, *]` or `[L, *]`, which
    `init` makes and the exchanges take and give back. What a method returns is checked: names and shapes are those that
    it was given. With `ctx.inplace` an exchange may overwrite what it was given. It may keep any tensor in
    its state, also one that it was given or that a collective returned.

    Where nodes may be absent, what is `[1, *]` goes on with those that are there, and a row of `[L, *]` with its node:
    a count of each node's own steps has a row for each, `torch.zeros(len(ctx.node_steps))`.

    Example: every step, the nodes average a version of their parameters rounded to 8 bits.

    >>> from vecgym.core import tree
    >>> class RoundedAverage(CommunicationModule):
    ...     def exchange_parameters(self, params, state, ctx):
    ...         return ctx.comm.mean(tree.map(lambda x: (x * 128).round() / 128, params)), state
    """

    # False where `active_nodes` never leaves out a node.
    lets_rest = True
    # When it exchanges, a `vecgym.strategy.When` such as `Rounds(10)`: `ctx.exchange` counts by it. None: every step.
    when: Any = None

    def check(self, num_nodes: int, max_steps: int) -> None:
        """Raise a ValueError if the module cannot work for this run.

        >>> class Pairs(CommunicationModule):
        ...     def check(self, num_nodes, max_steps):
        ...         if num_nodes % 2:
        ...             raise ValueError(f"{num_nodes} nodes are not pairs: give an even number.")
        >>> Pairs().check(num_nodes=3, max_steps=100)
        Traceback (most recent call last):
        ...
        ValueError: 3 nodes are not pairs: give an even number.
        """

    def check_present(self, counts: Sequence[int], num_nodes: int) -> None:
        """Raise a ValueError if the module cannot work while only so many of the nodes are present.

        >>> CommunicationModule().check_present([1, 2], num_nodes=2)
        """

    def init(self, params: Tree, ctx: Context) -> State:
        """Return the first state. `params` are a copy that the module may keep.

        >>> class Start(CommunicationModule):
        ...     def init(self, params, ctx):
        ...         return {"start": params}
        >>> from vecgym.collectives import StackedCollectives
        >>> Start().init({"w": torch.zeros(1)}, Context(StackedCollectives(2)))
        {'start': {'w': tensor([0.])}}
        """
        return {}

    def active_nodes(self, ctx: Context) -> list[int] | None:
        """Return the ids of the nodes that train in this step, a list that may be empty; None: all.

        The others keep parameters, buffers and optimizer state, and their losses are nan. Gradients are then
        not exchanged: such a module cannot be combined with one that has `exchange_gradients`.

        >>> class Turns(CommunicationModule):
        ...     def active_nodes(self, ctx):
        ...         return [ctx.step % ctx.comm.num_nodes]
        >>> from vecgym.collectives import StackedCollectives
        >>> Turns().active_nodes(Context(StackedCollectives(8), step=11))
        [3]
        """
        return None

    def local_gradients(self, grads: Tree, params: Tree, state: State, ctx: Context) -> Tree:
        """Add to each node's own gradient, before anything is exchanged; all are `[1 or L, *]` trees.

        Where only some nodes train, L counts these, in the order of `ctx.rows`, and nobody may communicate.

        >>> class Decay(CommunicationModule):
        ...     def local_gradients(self, grads, params, state, ctx):
        ...         return {name: g + 0.1 * params[name] for name, g in grads.items()}
        >>> from vecgym.collectives import StackedCollectives
        >>> grads, params = {"w": torch.zeros(2)}, {"w": torch.tensor([1.0, 3.0])}
        >>> Decay().local_gradients(grads, params, {}, Context(StackedCollectives(2)))
        {'w': tensor([0.1000, 0.3000])}
        """
        return grads

    def exchange_gradients(self, grads: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        """Exchange gradients, before the optimizer: `[L, *]` -> those that the optimizer takes.

        >>> class Averaged(CommunicationModule):
        ...     def exchange_gradients(self, grads, state, ctx):
        ...         return ctx.comm.mean(grads), state
        >>> from vecgym.collectives import StackedCollectives
        >>> grads, ctx = {"w": torch.tensor([1.0, 3.0])}, Context(StackedCollectives(2))
        >>> Averaged().exchange_gradients(grads, {}, ctx)[0]
        {'w': tensor([2.])}
        """
        return grads, state

    def exchange_parameters(self, params: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        """Exchange parameters, after the optimizer: `[L, *]` -> those of the next step, `[1, *]` if all are equal."""
        return params, state

    def exchange_moments(self, moments: Slots, state: State, ctx: Context) -> tuple[Slots, State]:
        """Exchange what the optimizer keeps, `{slot: {parameter: [1 or L, *]}}`, before `exchange_parameters`.

        The slots are torch's, such as AdamW's "exp_avg" and "exp_avg_sq"; there are none if the optimizer keeps
        nothing. Only tensors of the shape of their parameter are shown.

        >>> class Averaged(CommunicationModule):
        ...     def exchange_moments(self, moments, state, ctx):
        ...         return {slot: ctx.comm.mean(values) for slot, values in moments.items()}, state
        >>> from vecgym.collectives import StackedCollectives
        >>> moments, ctx = {"exp_avg": {"w": torch.tensor([1.0, 3.0])}}, Context(StackedCollectives(2))
        >>> Averaged().exchange_moments(moments, {}, ctx)[0]
        {'exp_avg': {'w': tensor([2.])}}
        """
        return moments, state

    def outer_parameters(self, state: State) -> Tree:
        """Return the parameters `[1, *]` that the state holds once for all nodes: a node that returns may begin there.

        >>> class Outer(CommunicationModule):
        ...     def outer_parameters(self, state):
        ...         return state["params"]
        >>> Outer().outer_parameters({"params": {"w": torch.zeros(1)}}), CommunicationModule().outer_parameters({})
        ({'w': tensor([0.])}, {})
        """
        return {}

    def outer_learning_rate(self, ctx: Context) -> float | Tensor | None:
        """Return the learning rate of the module's own optimizer at this step, to be recorded; None: it has none.

        >>> class Outer(CommunicationModule):
        ...     def outer_learning_rate(self, ctx):
        ...         return 0.5 / (1 + ctx.step)
        >>> from vecgym.collectives import StackedCollectives
        >>> Outer().outer_learning_rate(Context(StackedCollectives(2), step=4))
        0.1
        """
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in public(self).items())})"


A_STATE = "a state is a dict of tensors, [1, *] or [L, *], of plain values, or of such dicts"
SILENT = (
    "in a step in which some nodes sit out, so that not all would answer: communicate in exchange_parameters, or let "
    "all nodes train (participation=1)."
)


class Hooks(Member):
    """A communication module with hooks as an exchange; see `Exchange` for the methods.

    The module's state is in `shared`, `[1 or K, *]` as the module likes: what it returns as `[1, *]` is the same for
    all nodes. With absences it must stay so.

    Args:
        module: whose hooks are called.
        unit: steps between two calls of those that exchange; they see a time that counts these.

    >>> from vecgym.strategy import Strategy
    >>> class Halve(CommunicationModule):
    ...     def exchange_parameters(self, params, state, ctx):
    ...         return {name: x / 2 for name, x in params.items()}, state
    >>> Strategy("sgd", [Halve()], lr=0.1).exchanges
    (Halve(),)
    """

    numbers = None
    common = plain = always = False
    draws = True

    def __init__(self, module: CommunicationModule, unit: int = 1) -> None:
        self.module, self.unit = module, unit
        self.of = "gradients" if self._has("local_gradients") or self._has("exchange_gradients") else "hooks"
        self.of_all = self._has("exchange_gradients")
        self.lets_rest = self._has("active_nodes") and module.lets_rest

    def _has(self, hook: str) -> bool:
        """Whether the module has a hook of its own."""
        return getattr(type(self.module), hook) is not getattr(CommunicationModule, hook)

    def through_server(self) -> Hooks:
        """Return itself: what a module with hooks averages is its own affair."""
        return self

    def check(self, run: RunFacts) -> None:
        """Let the module check the run."""
        self.module.check(run.num_nodes, self._steps(run))

    def check_present(self, run: RunFacts) -> None:
        """Let the module check how many nodes are present."""
        if run.presence is not None:
            if self.of_all:
                self._check_waits(run.presence)
            self.module.check_present(sorted(run.presence.counts), run.num_nodes)

    def check_optimizer(self, optimizer: Mapping[str, Any], params: Tree) -> None:
        """Take the slots of any optimizer."""

    def marks(self, run: RunFacts) -> Iterator[Mark]:
        """Yield when its hooks after the optimizer's step are called."""
        if self._has("exchange_parameters") or self._has("exchange_moments"):
            yield Mark("meet", self.unit, of=Of(self._index))

    def trains(self, run: RunFacts) -> Who | None:
        """Return who trains."""
        if not self._has("active_nodes"):
            return None
        comm = StackedCollectives(run.num_nodes)

        def active(step: int, rows: Sequence[int]) -> list[int] | None:
            among = comm if len(rows) == run.num_nodes else comm.among(list(rows))
            places = self.module.active_nodes(self._told(among, run, step, lr=0.0))
            if places is None:
                return None
            ids = isinstance(places, Sequence) and all(check.is_integer(place) for place in places)
            if not ids or len(set(places)) != len(places) or any(not 0 <= place < len(rows) for place in places):
                raise ValueError(
                    f"{self.module!r}.active_nodes returned {places!r}; expected None (all nodes train) or a list of "
                    f"different node ids, 0 to {len(rows) - 1}."
                )
            return [rows[i] for i in places]

        return active

    def init(self, params: Tree, run: RunFacts) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the module's state as what all nodes share."""
        ctx = self._told(StackedCollectives(run.num_nodes), run, num_examples=run.num_examples, lr=0.0)
        state = self.module.init(tree.map(torch.clone, params), ctx)
        self._check_state(state, "init", ctx)
        return {}, {self._name: state}

    # ------------------------------------------------------------------------------------------------------- handlers

    def now(self, part: Part, grads: Tree) -> Tree:
        """Call the hooks between gradients and the optimizer's step."""
        ctx, state = self._context(part), self._state(part)
        if self._has("local_gradients"):
            resting = len(part.rows) < len(_place(part, part.run.there(part.tick)).rows)
            grads = self._local_gradients(grads, part.params, state, ctx, silent=resting)
        if self.of_all and (part.tick + 1) % self.unit == 0:
            with ctx.comm.ledger.of_gradients():
                returned = self.module.exchange_gradients(grads, state, ctx)
            grads, new = self._exchanged(returned, "gradients", grads, state, ctx)
            if new is not state and part.inplace:  # the optimizer may write to the gradients, which a module may keep
                new = nodes.unshared(new, grads)
            self._put(part, new)
            part.share_missing()
        return grads

    def meet(self, part: Part) -> None:
        """Call the hooks after the optimizer's step."""
        ctx, state, params = self._context(part), self._state(part), part.params
        with part.comm.ledger.stretched(self.unit):
            if self._has("exchange_moments"):
                moments = moments_in(part.home["optimizer"], params)
                of_moments = self.module.exchange_moments(moments, state, ctx)
                moments, state = self._exchanged(of_moments, "moments", moments, state, ctx)
                for slot, values in moments.items():
                    part.home["optimizer"] = with_moment(part.home["optimizer"], slot, values)
            if self._has("exchange_parameters"):
                returned = self.module.exchange_parameters(params, state, ctx)
                part.params, state = self._exchanged(returned, "parameters", params, state, ctx)
        self._put(part, state)

    def _local_gradients(self, grads: Tree, params: Tree, state: State, ctx: Context, silent: bool) -> Tree:
        """Call the hook; `silent`: some nodes sit out, so that nobody may communicate."""

        def refuse(operation: str, *what: Any) -> None:
            raise ValueError(f"{self.module!r}.local_gradients calls ctx.comm.{operation} {SILENT}")

        if silent:  # every collective is announced first, but `everyone`, which is none
            comm = altered(ctx.comm, _announce=refuse, everyone=lambda values: refuse("everyone"))
            ctx = ctx.replace(comm=comm)
        new = self.module.local_gradients(grads, params, state, ctx)
        num_rows = len(ctx.comm.node_ids) if ctx.rows is None else len(ctx.rows)
        return check_values(new, grads, num_rows, self.module, ".local_gradients", "gradients")

    # ------------------------------------------------------------------------------------------------- what it tells

    def outer_lr(self, step: int, run: RunFacts) -> Any:
        """Return the learning rate of the module's own optimizer; None: it has none."""
        return self.module.outer_learning_rate(self._told(StackedCollectives(1), run, step))

    def outer(self, shared: Any, names: Sequence[str]) -> Tree:
        """Return the parameters that the module keeps once for all nodes."""
        return self.module.outer_parameters(shared[self._name])

    def agreed(self, run: RunFacts, names: Sequence[str], tick: int) -> tuple[set[str], set[str]]:
        """Return which parameters are equal on all nodes after a step, none known, and which may have changed."""
        return set(), set(names) if self._has("exchange_parameters") else set()

    def __repr__(self) -> str:
        return repr(self.module) if self.unit == 1 else f"every({self.unit}, {self.module!r})"

    # -------------------------------------------------------------------------------------------------------- checks

    def _exchanged(self, returned: Any, what: str, old: Any, state: State, ctx: Context) -> tuple[Any, State]:
        """Return what `exchange_<what>` returned: values like the old ones, moments by slot, and a state."""
        hook = f"exchange_{what}"
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise TypeError(
                f"{self.module!r}.{hook} returned {a_kind(returned)}; expected a tuple of two: ({what}, state)."
            )
        new, new_state = returned
        if what != "moments":
            new, old = {what: new}, {what: old}
        elif not isinstance(new, dict) or new.keys() != old.keys():
            raise ValueError(
                f"{self.module!r}.{hook} returned {list(new) if isinstance(new, dict) else a_kind(new)} as moments; "
                f"expected a dict of the slots that it was given: {', '.join(old) or 'none'}."
            )
        for name, values in new.items():
            check_values(values, old[name], len(ctx.comm.node_ids), self.module, f".{hook}", name)
        if new_state is not state:
            self._check_state(new_state, hook, ctx)
        return new if what == "moments" else new[what], new_state

    def _check_state(self, state: Any, hook: str, ctx: Context) -> None:
        if not isinstance(state, dict):
            raise TypeError(f"{self.module!r}.{hook} returned {a_kind(state)} as state; {A_STATE}.")
        L = len(ctx.comm.node_ids)
        for path, x in tree.flatten(state):  # a number or a text is kept in checkpoints too
            if isinstance(x, Tensor) and (x.dim() == 0 or len(x) not in (1, L)):
                raise ValueError(
                    f"{self.module!r}.{hook} returned state{tree.path_name(path)} in shape {list(x.shape)} with "
                    f"L = {L} nodes; {A_STATE}."
                )

    # -------------------------------------------------------------------------------------------------------- helpers

    @property
    def _name(self) -> str:
        return f"{self._index}/state"

    def _told(self, comm: Collectives, run: RunFacts, step: int = 0, **more: Any) -> Context:
        """Return what a hook is told in a step of the run; its time and its exchanges are counted in `every` steps."""
        step, when = step // self.unit, self.module.when
        exchange = when.count(step) if hasattr(when, "due") else step
        return Context(comm, step=step, exchange=exchange, max_steps=self._steps(run), seed=run.seed, **more)

    def _context(self, part: Part) -> Context:
        """Return what the hooks are told: about the nodes that are present, or of these about those that train."""
        run, made, step = part.run, part.made, part.tick
        there, counts = run.there(step), [made] * len(part.nodes) if isinstance(made, int) else made
        nodes_there = range(run.num_nodes) if there is None else there
        ids = None if len(part.nodes) == run.num_nodes else torch.tensor(part.nodes)
        ctx = self._told(
            _place(part, there).comm, run, step, node_steps=torch.tensor(counts), inplace=part.inplace,
            differentiable=not part.inplace, rows=ids, exact=part.simulation.exact,
            num_examples=None if run.num_examples is None else tuple(run.num_examples[node] for node in nodes_there),
            lr=self._lr(part),
        )  # fmt: skip
        training = part.simulation.table_of(part.event.group).training(step)  # type: ignore[attr-defined]  # of Lockstep
        if training is not None and training != there:
            ctx = ctx.replace(active=tuple(i for i, node in enumerate(nodes_there) if node in set(training)))
        return ctx

    def _lr(self, part: Part) -> Any:
        """Return the inner learning rate as hooks are told it: one for all, or `[K]`."""
        lr = part.lr
        if not isinstance(lr, Tensor) or lr.dim() == 0 or len(part.nodes) == part.run.num_nodes:
            return lr
        ids = placed(torch.tensor(part.nodes), lr.device)
        return lr.new_zeros(part.run.num_nodes).index_copy(0, ids, lr.expand(len(ids)))

    def _state(self, part: Part) -> State:
        """Return the module's state, of the event's rows."""
        state: State = part.shared[self._name]
        rows, _ = _rows(part)
        return state if rows is None else nodes.take_rows(state, rows)

    def _put(self, part: Part, new: State) -> None:
        """Put the module's state back, beside that of the other nodes."""
        old, (rows, num_rows) = part.shared[self._name], _rows(part)
        if rows is None:
            part.shared[self._name] = new
            return

        def put(x: Tensor, was: Any) -> Any:
            if len(x) == 1 and (len(part.rows) > 1 or was is None or len(was) == 1):
                return x
            return nodes.put_rows(was, rows, x, num_rows, inplace=False)

        part.shared[self._name] = tree.map_leaves(put, new, old)


def _place(part: Part, rows: tuple[int, ...] | None) -> Place:
    """Return the place of some of the nodes of a part's run; None: of all of them."""
    return part.simulation.place(rows, part.event.group)


def _rows(part: Part) -> tuple[Tensor | None, int]:
    """Return where a part's rows are among those of its run in this process, and how many these are; None: all."""
    here = _place(part, None).nodes
    return None if len(part.nodes) == len(here) else torch.tensor([here.index(node) for node in part.nodes]), len(here)


def moments_in(optimizer: Mapping[str, Any], params: Tree) -> dict[str, Tree]:
    """Return what an inner optimizer keeps in the shape of the parameters, by slot.

    >>> from vecgym.optim import OptimSpec
    >>> params = {"w": torch.zeros(1, 3)}
    >>> sorted(moments_in(OptimSpec("adamw").rule().init(params), params))
    ['exp_avg', 'exp_avg_sq']
    """
    slots = {
        slot: {
            name: x
            for name, x in values.items()
            if name in params and x.is_floating_point() and x.shape[1:] == params[name].shape[1:]  # and no counts
        }
        for slot, values in optimizer.get("tensors", optimizer).items()  # some rules keep what is no tensor apart
        if isinstance(values, dict)
    }
    return {slot: values for slot, values in slots.items() if values}


def with_moment(optimizer: Mapping[str, Any], slot: str, new: Tree) -> dict[str, Any]:
    """Return an inner optimizer's state with new values in a slot.

    >>> with_moment({"exp_avg": {"w": torch.zeros(1)}}, "exp_avg", {"w": torch.ones(1)})
    {'exp_avg': {'w': tensor([1.])}}
    """
    held = optimizer.get("tensors", optimizer)
    changed = {**held, slot: {**held[slot], **new}}
    return {**optimizer, "tensors": changed} if "tensors" in optimizer else changed
