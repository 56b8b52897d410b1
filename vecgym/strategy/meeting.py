"""What an average is told: who meets, which exchange it is, and what it remembers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vecgym.collectives import Collectives
from vecgym.core import check, rng, tree
from vecgym.core.devices import placed, readable, spread
from vecgym.core.objects import altered
from vecgym.core.tree import Tree, differentiated
from vecgym.simulation.timetable import RunFacts


class Member:
    """What stands in a strategy's list, an exchange or a module with hooks, and knows its place there.

    Attributes:
        unit: steps that count as one.
    """

    unit: int
    _index = 0

    def numbered(self, index: int) -> Any:
        """Return the same at this place among a strategy's exchanges."""
        return altered(self, _index=index)

    def in_units(self, n: int) -> Any:
        """Return the same, which counts in units of n steps."""
        n = check.integer("n", n, what="the number of optimizer steps between two exchanges")
        return altered(self, unit=self.unit * n)

    def _check_waits(self, presence: Any) -> None:
        """Raise a ValueError where nodes wait for others: for what exchanges gradients."""
        if getattr(presence, "waits", False):
            raise ValueError(
                f"availability={presence.availability!r} makes nodes wait for others, but {self!r} exchanges gradients "
                "in every step: use a strategy that exchanges parameters every H steps."
            )

    def _steps(self, run: RunFacts) -> int:
        return max(1, run.num_steps // self.unit)


class Of(NamedTuple):
    """What a mark of an exchange is about.

    Attributes:
        exchange: its place among those of the strategy.
        fragment: the number of the fragment.
        settles: whether the event changes what all share.
        last: whether the message is used for the last time.
    """

    exchange: int
    fragment: int = 0
    settles: bool = True
    last: bool = True


class Held:
    """What an exchange remembers, by name: some of what an event's rows hold, or of what all share.

    Args:
        rows: all that they hold, by label and name.
        label: of the exchange, and the fragment.
    """

    def __init__(self, rows: Any, label: str) -> None:
        self.rows, self.label = rows, label

    def __contains__(self, name: str) -> bool:
        return f"{self.label}/{name}" in self.rows

    def __getitem__(self, name: str) -> Any:
        return self.rows[f"{self.label}/{name}"]

    def __setitem__(self, name: str, value: Any) -> None:
        self.rows[f"{self.label}/{name}"] = value

    def __delitem__(self, name: str) -> None:
        del self.rows[f"{self.label}/{name}"]


class HeldOf:
    """The same of some coordinates: read from them, and written to them."""

    def __init__(self, held: Any, index: Tree, at: Meeting) -> None:
        self.held, self.index, self.at = held, index, at

    def __contains__(self, name: str) -> bool:
        return name in self.held

    def __getitem__(self, name: str) -> Any:
        return self.at.taken(self.held[name], self.index)

    def __setitem__(self, name: str, value: Tree) -> None:
        whole = self.held[name]
        self.held[name] = {**whole, **self.at.written(whole, self.index, value, inplace=self.at.inplace_state)}


@dataclass(eq=False)
class Meeting:
    """All that an average is told: who meets, which exchange it is, and what it remembers.

    Values are `[K, *]` and what is common `[1, *]`; of a group of C configurations `[C, K, *]` and `[C, 1, *]`.
    Arithmetic and collectives work on both. What goes row by row, such as a code, takes `rows(x)`, `[C K, *]`, and
    `apart` leads back; what goes by coordinate takes `flat(x)`, `[.., K, n]`.

    Attributes:
        comm: the collectives among those who meet, the only way to other nodes.
        own, shared: what the exchange remembers of each node and of all, by name.
        exchange: exchanges before this one, by the exchange's own count; with a `SyncWeight` the step.
        made: exchanges made before this one: with a `SyncWeight` the sum of the weights, else `exchange`.
        step: steps before the one after which the nodes agree.
        nodes: the ids of the nodes in this process, of one configuration.
        size: C.
        inplace: the values may be overwritten.
        inplace_state: what is remembered may be overwritten, if it is assigned afterwards; not under differentiation.
        exact: the bits of a node's own work must not depend on which other nodes are in this process.
        last: whether the message is used for the last time.

    >>> from vecgym.collectives import StackedCollectives
    >>> at = Meeting(StackedCollectives(2), step=7)
    >>> at.ids, at.lead, at.flat(torch.zeros(2, 3, 4)).shape, at.replace(step=8).step
    (tensor([0, 1]), 1, torch.Size([2, 12]), 8)
    >>> at.made, at.lr, at.home(common=True) is at.shared  # without a run
    (0, 0.0, True)
    >>> at.generator("mask", at.step).initial_seed() == at.generator("mask", at.step).initial_seed()
    True

    A setting of each node; coordinates; what is common to all:

    >>> x, index = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, {"w": torch.tensor([1])}
    >>> at.scaled(torch.tensor([10.0, 100.0]), x["w"]), at.here(0.5), at.each(torch.ones(2), x["w"]).shape
    (tensor([[ 10.,  20.],
            [300., 400.]]), 0.5, torch.Size([2, 1]))
    >>> at.taken(x, index)["w"].tolist(), at.written(x, index, {"w": torch.zeros(2, 1)})["w"].tolist()
    ([[2.0], [4.0]], [[1.0, 0.0], [3.0, 0.0]])
    >>> part = at.of(index)  # what is remembered is read and written at these coordinates
    >>> at.shapes(x), at.wide({"w": torch.zeros(1, 2)})["w"].shape
    ({'w': torch.Size([2])}, torch.Size([2, 2]))

    A group of three configurations, and what is the same in each of them:

    >>> group, values = at.replace(size=3), {"w": torch.zeros(3, 2, 5)}
    >>> group.rows(values)["w"].shape, group.apart(group.rows(values))["w"].shape
    (torch.Size([6, 5]), torch.Size([3, 2, 5]))
    >>> group.of_one(group.for_all(index))
    {'w': tensor([1])}
    """

    comm: Collectives
    own: Any = field(default_factory=dict)
    shared: Any = field(default_factory=dict)
    _: KW_ONLY
    exchange: int = 0
    step: int = 0
    seed: int = 0
    nodes: Sequence[int] = ()  # until __post_init__
    size: int = 1
    weights_before: Tensor | None = None  # of a `SyncWeight`
    inplace: bool = False
    inplace_state: bool = False
    exact: bool = False
    last: bool = True
    examples: tuple[int, ...] | None = None  # of all who meet
    rate: Callable[[], Any] = float

    def __post_init__(self) -> None:
        self.nodes = self.nodes or self.comm.ids.tolist()

    def replace(self, **changes: Any) -> Meeting:
        """Return a copy in which some attributes are others."""
        check.keywords("a Meeting", changes, vars(self))
        twin = copy.copy(self)
        vars(twin).update(changes)
        return twin

    @property
    def lead(self) -> int:
        """Dimensions before those of a parameter: 2 in a group, else 1."""
        return 2 if self.size > 1 else 1

    @property
    def made(self) -> int | Tensor:
        """Exchanges made before this one; of those in part the sum of their weights, float64, with its derivative."""
        if self.weights_before is None:
            return self.exchange
        made = self.weights_before.sum(dtype=torch.float64)
        with readable():
            whole = float(made.detach())
        return int(whole) if whole == int(whole) and not differentiated(made) else made

    @property
    def ids(self) -> Tensor:
        """The ids of the nodes in this process, of one configuration, `[K]`."""
        return torch.tensor(self.nodes, dtype=torch.long)

    @property
    def lr(self) -> Any:
        """The inner learning rate, schedule included; see `Part.lr`."""
        return self.rate()

    def generator(self, purpose: str, *ids: int) -> torch.Generator:
        """Return a generator keyed by (seed, purpose, ids): the same on every node and in every process."""
        return rng.generator(self.seed, purpose, *ids)

    def weights(self, weighting: str | Sequence[float]) -> tuple[float, ...] | None:
        """Return the weight of each node that meets, by name or from those of all nodes; None: all alike.

        >>> from vecgym.collectives import StackedCollectives
        >>> Meeting(StackedCollectives(2), examples=(30, 10)).weights("examples")
        (30.0, 10.0)
        >>> Meeting(StackedCollectives(3).among([0, 2])).weights((7.0, 5.0, 3.0))
        (7.0, 3.0)
        """
        if weighting == "equal":
            return None
        if not isinstance(weighting, str):
            members = self.comm.members
            return tuple(weighting if members is None else [weighting[node] for node in members])
        assert self.examples is not None
        return tuple(map(float, self.examples))

    def home(self, common: bool) -> Any:
        """Return where something is remembered that is common to all, or not."""
        return self.shared if common else self.own

    # ------------------------------------------------------------------------------------------------------- shapes

    def rows(self, values: Tree) -> Tree:
        """Show `[C, K, *]` as `[C K, *]`."""
        return values if self.size == 1 else tree.map(lambda x: x.flatten(0, 1), values)

    def apart(self, values: Tree) -> Tree:
        """Show `[C K, *]` as `[C, K, *]`."""
        return values if self.size == 1 else tree.map(lambda x: x.unflatten(0, (self.size, -1)), values)

    def wide(self, values: Tree) -> Tree:
        """Expand what is common, `[.., 1, *]`, to `[.., K, *]`."""
        K, before = len(self.nodes), self.lead - 1
        return tree.map(lambda x: x.expand(*x.shape[:before], K, *x.shape[self.lead :]), values)

    def shapes(self, values: Tree) -> dict[str, torch.Size]:
        """Return the shapes of one node's values."""
        return {name: x.shape[self.lead :] for name, x in values.items()}

    def flat(self, x: Tensor) -> Tensor:
        """Show `[.., K, *shape]` as `[.., K, n]`."""
        return x.reshape(*x.shape[: self.lead], math.prod(x.shape[self.lead :]))

    def each(self, of_nodes: Tensor, like: Tensor) -> Tensor:
        """Shape one value for each node in this process, `[K]`, to broadcast with `like`, `[.., K, *]`."""
        return placed(of_nodes, like.device).reshape(-1, *[1] * (like.dim() - self.lead))

    def scaled(self, number: Any, x: Tensor) -> Tensor:
        """Multiply by a setting: a number, one for each node of the run, or one for each configuration."""
        return spread(self.here(number), x) * x

    def here(self, number: Any) -> Any:
        """Return a setting of the nodes in this process: of `[K]` or `[C, K]` their values, else as it is."""
        of_nodes = isinstance(number, Tensor) and number.dim() > self.lead - 1 and number.shape[-1] > 1
        return number[..., placed(self.ids, number.device)] if of_nodes else number

    # -------------------------------------------------------------------------------------------------- coordinates

    def taken(self, values: Tree, index: Tree) -> Tree:
        """Take the flat coordinates `index`, `[m]`, of each tensor `[.., K, *]`: `[.., K, m]`."""
        return {name: self.flat(values[name]).index_select(-1, where) for name, where in index.items()}

    def written(self, values: Tree, index: Tree, new: Tree, inplace: bool | None = None) -> Tree:
        """Write `new`, `[.., K, m]`, into tensors `[.., K, *]` at the flat coordinates `index`, `[m]`."""
        inplace = self.inplace if inplace is None else inplace
        return {name: self._written(values[name], where, new[name], inplace) for name, where in index.items()}

    def _written(self, x: Tensor, where: Tensor, new: Tensor, inplace: bool) -> Tensor:
        shape = torch.broadcast_shapes(x.shape[: self.lead], new.shape[: self.lead])
        new = new.expand(*shape, -1)
        if inplace and x.shape[: self.lead] == shape and x.is_contiguous():
            self.flat(x).index_copy_(-1, where, new)
            return x
        wide = x.expand(*shape, *x.shape[self.lead :])
        return self.flat(wide).index_copy(-1, where, new).view(wide.shape)

    def of(self, index: Tree) -> Meeting:
        """Return the same meeting about some coordinates: what is remembered is read and written there only."""
        return self.replace(own=HeldOf(self.own, index, self), shared=HeldOf(self.shared, index, self))

    def of_one(self, drawn: Any) -> Any:
        """Return what is the same in all configurations as it is in one."""
        return drawn if self.size == 1 else tree.map_leaves(lambda x: x[0], drawn)

    def for_all(self, drawn: Any) -> Any:
        """Return what is the same in all configurations for each of them."""
        return drawn if self.size == 1 else tree.map_leaves(lambda x: x.expand(self.size, *x.shape), drawn)


def check_values(
    new: Any, old: Tree, num_rows: int, who: object, hook: str = "", what: str = "values", lead: int = 1
) -> Tree:
    """Return what a user's code has made of values, if it has their names and shapes, or `[.., 1, *]`.

    Args:
        new, old: what it returned, and what it was given.
        num_rows: the nodes here.
        who, hook: what has made them, for messages: the `repr` of an object, and the name of its method, ".mine".
        what: what the values are, for messages.
        lead: dimensions before those of a parameter.

    >>> check_values({}, {"w": torch.zeros(2, 3)}, 2, int)
    Traceback (most recent call last):
    ...
    ValueError: <class 'int'> returned values that leaves out w; expected the names it was given: w.
    """
    if new is old:
        return old
    if not isinstance(new, dict):
        raise TypeError(f"{who!r}{hook} returned {a_kind(new)} as {what}; expected a dict, name -> tensor.")
    if new.keys() != old.keys():
        odd = "leaves out" if (missing := old.keys() - new.keys()) else "adds"
        names = ", ".join(sorted(map(str, missing or new.keys() - old.keys())))
        raise ValueError(
            f"{who!r}{hook} returned {what} that {odd} {names}; expected the names it was given: {', '.join(old)}."
        )
    for name, x in new.items():
        y = old[name]
        if x is y:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{who!r}{hook} returned {a_kind(x)} for {name!r} of the {what}; expected tensors.")
        if x.shape[lead:] != y.shape[lead:] or x.dim() != y.dim() or x.shape[lead - 1] not in (1, num_rows):
            shape = [f"1 or {num_rows}" if num_rows > 1 else "1", *map(str, y.shape[lead:])]
            raise ValueError(
                f"{who!r}{hook} returned {name!r} of the {what} in shape {list(x.shape)}; expected "
                f"[{', '.join(shape)}]: the nodes first, or 1 for what is the same on all."
            )
    return new


def a_kind(value: Any) -> str:
    """Describe what a user's code has returned, for a message.

    >>> a_kind(None), a_kind([])
    ('None', 'a list')
    """
    return "None" if value is None else f"a {type(value).__name__}"
