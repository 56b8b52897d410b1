"""What nodes exchange: communication modules, and the context that they are told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from vecgym.collectives import Collectives
from vecgym.core import rng
from vecgym.core.devices import placed
from vecgym.core.tree import Tree

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
        own_time: learning rates, other values given for each step, and the model's random numbers go by `node_steps`:
            where nodes train at different times, each has done its own number of steps.
        exchange: exchanges done before this one: as many as the module's `when` counts, `step` without one.
        missed: where nodes may be absent: step -> which of the nodes here were absent in it; see `missing`.

    >>> from vecgym.collectives import StackedCollectives
    >>> ctx = Context(StackedCollectives(4), step=3, seed=7)
    >>> a, b = (torch.rand(3, generator=ctx.generator("mask", ctx.step)) for _ in range(2))
    >>> torch.equal(a, b)  # the same (seed, purpose, ids), the same numbers
    True
    >>> ctx.replace(rows=torch.tensor([1, 3])).own(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    tensor([0.2000, 0.4000])
    >>> ctx.node_steps, ctx.missing(2)
    (tensor([3, 3, 3, 3]), None)
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
    own_time: bool = False
    exchange: int = None  # type: ignore[assignment]  # until __post_init__
    missed: Callable[[int], Tensor | None] | None = None

    def __post_init__(self) -> None:
        if self.node_steps is None:
            object.__setattr__(self, "node_steps", torch.full((len(self.comm.node_ids),), self.step))
        if self.exchange is None:
            object.__setattr__(self, "exchange", self.step)

    def replace(self, **changes: Any) -> Context:
        """Return a copy in which some values are others, as `dataclasses.replace` does in ten times the time.

        >>> from vecgym.collectives import StackedCollectives
        >>> Context(StackedCollectives(3)).replace(step=5, lr=0.1).step
        5
        """
        if unknown := changes.keys() - vars(self).keys():
            raise TypeError(f"a Context has no {', '.join(sorted(unknown))}; it has {', '.join(vars(self))}.")
        new = object.__new__(Context)
        vars(new).update(vars(self), **changes)
        return new

    def of_rows(self, rows: Tensor) -> Context:
        """Return the context of some of the nodes here, given by their places among these.

        >>> from vecgym.collectives import StackedCollectives
        >>> ctx = Context(StackedCollectives(3), node_steps=torch.tensor([5, 0, 2])).of_rows(torch.tensor([0, 2]))
        >>> ctx.rows, ctx.node_steps
        (tensor([0, 2]), tensor([5, 2]))
        """
        ids = rows if self.rows is None else self.rows[rows]
        return self.replace(rows=ids, node_steps=self.node_steps[rows])

    def by_count(self, of_step: Callable[[int], Any]) -> Any:
        """Return what a function of the step, or with `own_time` of a node's own count, gives: for all nodes, or `[K]`.

        Args:
            of_step: gives a number, or a tensor `[]` or `[K]`. Where the nodes here differ, so does each one's entry of
                the result, and nodes elsewhere have 0.

        >>> from vecgym.collectives import StackedCollectives
        >>> ctx = Context(StackedCollectives(3), step=4, node_steps=torch.tensor([4, 0, 2]), own_time=True)
        >>> ctx.by_count(lambda step: 10 * step)
        tensor([40.,  0., 20.], dtype=torch.float64)
        """
        counts = self.node_steps.tolist() if self.own_time else [self.step]
        found = {count: of_step(count) for count in dict.fromkeys(counts)}
        first = found[counts[0]]
        if len(found) == 1 or all(x is first or (isinstance(x, (int, float)) and x == first) for x in found.values()):
            return first
        ids = self.comm.ids if self.rows is None else self.rows
        tensors = {count: torch.as_tensor(x, dtype=None if isinstance(x, Tensor) else torch.float64)
                   for count, x in found.items()}  # fmt: skip
        own = [x if x.dim() == 0 else x[node] for x, node in zip(map(tensors.__getitem__, counts), ids.tolist())]
        values = torch.stack(own)
        return values.new_zeros(self.comm.run_nodes).index_copy(0, placed(ids, values.device), values)

    def missing(self, step: int) -> Tensor | None:
        """Return which of the nodes here were absent in an earlier step, bool `[L]`; None: none was."""
        return None if self.missed is None or step < 0 else self.missed(step)

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
        return

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
        shown = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def counted(module: CommunicationModule, ctx: Context) -> Context:
    """Return the context that a module is told, in which its exchanges are counted.

    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.strategy import Rounds
    >>> class Rare(CommunicationModule):
    ...     when = Rounds(5)
    >>> counted(Rare(), Context(StackedCollectives(2), step=13)).exchange
    2
    """
    exchange = module.when.count(ctx.step) if hasattr(module.when, "due") else ctx.step
    return ctx if exchange == ctx.exchange else ctx.replace(exchange=exchange)


def overrides(module: CommunicationModule, method: str) -> bool:
    """Whether a module has a `method` of its own.

    >>> overrides(CommunicationModule(), "active_nodes")
    False
    """
    return getattr(type(module), method) is not getattr(CommunicationModule, method)
