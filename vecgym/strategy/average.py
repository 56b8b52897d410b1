"""How nodes agree on a value: a mean over all, over islands or over a sample of them, or a server's mean.

An `Average` takes what each node has, `[L, *]`, and gives what the nodes agree on, `[1, *]` where that is the same on
all. It does not know what the values are, gradients, parameters or movements, nor when it is asked: that is the
module's (`vecgym.strategy.modules`) that holds it.
"""

from __future__ import annotations

import copy
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from vecgym.collectives import Collectives
from vecgym.collectives.topology import Groups, random_islands, sample_nodes
from vecgym.compress.codecs import Codec
from vecgym.core import check
from vecgym.core.devices import placed
from vecgym.core.tree import Tree
from vecgym.strategy.base import Context, State
from vecgym.strategy.gathered import Codes, gathered_codes, shares_of
from vecgym.strategy.when import nothing

Weighting = Literal["equal", "examples"]  # of the nodes in a mean
OPTIONAL = ("sync_weight", "resting", "correction")  # not shown where they are None


class Average(ABC):
    """How nodes agree on a value. Override `__call__`, and `init` where something evolves.

    An average holds settings only; it is given to a module, `Parameters(Mean(), every=10)` say. Several modules may
    share one.

    Example: the value of another node at each exchange.

    >>> from vecgym.collectives import StackedCollectives
    >>> class Relay(Average):
    ...     def __call__(self, values, state, ctx):
    ...         return ctx.comm.broadcast(values, src=ctx.exchange % ctx.comm.num_nodes), state
    >>> relay, ctx, values = Relay(), Context(StackedCollectives(2), exchange=3), {"w": torch.tensor([1.0, 3.0])}
    >>> relay.check(num_nodes=2, max_steps=10)
    >>> relay.check_present([1], num_nodes=2)
    >>> relay(values, relay.init(values, ctx), ctx)[0]
    {'w': tensor([3.])}
    >>> relay.active_nodes(ctx), relay.everyone, relay.keeping(ctx)  # all take part
    (None, True, None)

    A module that writes late keeps what `agree` gives, or `empty`, and hands it to `write`:

    >>> agreed, _ = relay.agree(values, {}, ctx)
    >>> relay.write(agreed, values, ctx), relay.write(relay.empty(values), values, ctx)
    ({'w': tensor([3.])}, {'w': tensor([1., 3.])})
    """

    # True where it is `ctx.comm.mean` over all nodes and nothing else.
    plain = False
    # False where it never looks at `ctx.exchange`.
    by_exchange = True

    def check(self, num_nodes: int, max_steps: int) -> None:
        """Raise a ValueError if the average cannot work for this run."""
        return

    def check_present(self, counts: Sequence[int], num_nodes: int) -> None:
        """Raise a ValueError if the average cannot work while only so many of the nodes are present."""
        return

    def init(self, values: Tree, ctx: Context) -> State:
        """Return the first state, nested dicts of tensors.

        `values`, `[1 or L, *]`, are those before the first exchange: the initial parameters, or zeros.
        """
        return {}

    @abstractmethod
    def __call__(self, values: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        """Return what the nodes agree on, `[L, *]` -> `[1 or L, *]`, with the names and shapes of `values`.

        Args:
            values: of each node, `[1 or L, *]`.
            state: from `init` or the exchange before.
            ctx: `ctx.exchange` counts the exchanges of its module before this one, by the module's `when`. With
                `ctx.inplace` the values may be overwritten.
        """

    def active_nodes(self, ctx: Context) -> list[int] | None:
        """Return the nodes that take part in the exchange `ctx.exchange`, ascending; None: all."""
        return None

    @property
    def everyone(self) -> bool:
        """Whether all nodes take part in every exchange."""
        return True

    def keeping(self, ctx: Context) -> Tensor | None:
        """Return which of the nodes held here keep their values in this exchange, bool `[L]`; None: none."""
        return None

    # For values that are used later, when the nodes hold others.

    def agree(self, values: Tree, state: State, ctx: Context) -> tuple[State, State]:
        """Return what the nodes agree on, in the form in which it waits for `write`."""
        return self(values, state, ctx)

    def write(self, agreed: State, values: Tree, ctx: Context) -> Tree:
        """Return the values with what was agreed on written over them; where that is nothing, a value stays."""
        return {name: agreed[name] if agreed[name].numel() else x for name, x in values.items()}

    def empty(self, values: Tree) -> State:
        """Return what waits where nothing was agreed on."""
        return nothing(values)

    def __repr__(self) -> str:
        return shown(self)


def shown(x: object, every: bool = False) -> str:
    """Show an object as `Class(argument, ...)`, with the arguments that are not their defaults, or with every one.

    >>> shown(Mean(2)), shown(Mean(), every=True)
    ('Mean(island_size=2)', "Mean(island_size=None, weighting='equal', participation=1.0)")
    """
    values = vars(x)
    parts = []
    for name, parameter in inspect.signature(type(x)).parameters.items():
        if name not in values or (name in OPTIONAL and values[name] is None):
            continue
        if parameter.default is parameter.empty and not every:
            parts.append(repr(values[name]))
        elif every or repr(values[name]) != repr(parameter.default):
            parts.append(f"{name}={values[name]!r}")
    return f"{type(x).__name__}({', '.join(parts)})"


# ---------------------------------------------------------------------------------------- of what the nodes send


class Reduction(Average):
    """An average of what nodes send, which may also be codes in place of their values.

    Attributes:
        linear: whether the result is linear in what the nodes send, so that two matrices may be averaged in place of
            one.
        shared: whether it is the same on every node.
    """

    linear = False
    shared = True

    @abstractmethod
    def of_codes(self, codes: Codes, codec: Codec, like: Tree, ctx: Context) -> Tree:
        """Average what the codes of each node stand for, `[1 or L, *]`; `like` are the values, `[L, *]`."""

    def silent(self, ctx: Context) -> Tensor | None:
        """Return which of the nodes held here send nothing in this exchange, bool `[L]`; None: all send."""
        return self.keeping(ctx)


class OfParticipants(Reduction):
    """An average of all nodes, or of a sample of them.

    Args:
        weighting: "equal", or "examples": the weight of a node is the number of its examples.
        participation: the fraction of the nodes, drawn anew for each exchange (at least one), that trains before it and
            takes part in it.
    """

    def __init__(self, weighting: Weighting, participation: float) -> None:
        check.choice("weighting", weighting, get_args(Weighting))
        self.weighting = weighting
        self.participation = check.number(
            "participation", participation, "(0, 1]", "the fraction of nodes that trains in a round"
        )

    @property
    def everyone(self) -> bool:
        return self.participation == 1

    @property
    def by_exchange(self) -> bool:  # type: ignore[override]
        return not self.everyone

    def active_nodes(self, ctx: Context) -> list[int] | None:
        return None if self.everyone else participants(self.participation, ctx)

    def weights(self, ctx: Context) -> Sequence[float] | None:
        """Return the weight of each node; None: all alike."""
        return node_weights(self.weighting, ctx)


class Mean(OfParticipants):
    """The mean over all nodes, over islands of nodes, or over those that take part.

    x_i <- sum_k w_k x_k / sum_k w_k over the nodes k of i's island. A node that takes no part keeps its own.

    Bytes sent per node: 2 (n - 1) / n times those of the values, in islands of n nodes.

    Args:
        island_size: nodes per island; None: one island of all. The nodes are shuffled (seeded) at each exchange; when
            `island_size` does not divide their number, the last island is smaller.
        weighting: "equal", or "examples": w_k is the number of examples of node k.
        participation: the fraction of the nodes, drawn anew for each exchange (at least one), that trains before it and
            takes part in it. What the others have, they keep.

    Raises:
        ValueError: for island_size < 1, a participation outside (0, 1], another weighting; at `fit` for an island
            larger than the number of nodes that take part.

    >>> from vecgym.collectives import StackedCollectives
    >>> ctx, values = Context(StackedCollectives(4)), {"w": torch.tensor([1.0, 2.0, 3.0, 6.0])}
    >>> Mean()(values, {}, ctx)[0]["w"], Mean(island_size=2)(values, {}, ctx)[0]["w"]
    (tensor([3.]), tensor([1.5000, 1.5000, 4.5000, 4.5000]))
    >>> half = Mean(participation=0.5)
    >>> half(values, {}, ctx)[0]["w"], half.groups(ctx), half.weights(ctx)
    (tensor([1.0000, 2.0000, 4.5000, 4.5000]), [[2, 3]], None)
    """

    linear = True

    def __init__(
        self, island_size: int | None = None, weighting: Weighting = "equal", participation: float = 1.0
    ) -> None:
        super().__init__(weighting, participation)
        self.island_size = check.optional_integer("island_size", island_size, what="None is one island")

    @property
    def plain(self) -> bool:  # type: ignore[override]
        return self.shared and self.weighting == "equal"

    @property
    def shared(self) -> bool:  # type: ignore[override]
        return self.island_size is None and self.everyone

    def check(self, num_nodes: int, max_steps: int) -> None:
        count = num_participants(self.participation, num_nodes)
        if self.island_size is not None and self.island_size > count:
            raise ValueError(
                f"island_size={self.island_size} is larger than the {count} nodes that take part in a round: "
                f"give island_size <= {count}, or None for one island of all."
            )

    def keeping(self, ctx: Context) -> Tensor | None:
        return outside(self.groups(ctx), ctx.comm)

    def groups(self, ctx: Context) -> Groups | None:
        """Return the islands of this exchange; None: one of all."""
        if self.shared:
            return None
        nodes = participants(self.participation, ctx)
        return random_islands(nodes, self.island_size or len(nodes), ctx.generator("islands", ctx.step))

    def __call__(self, values: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        groups, weights = self.groups(ctx), self.weights(ctx)
        return ctx.comm.mean(values, groups=groups, weights=weights, inplace=ctx.inplace), state

    def of_codes(self, codes: Codes, codec: Codec, like: Tree, ctx: Context) -> Tree:
        groups = self.groups(ctx)
        shares = shares_of(groups, self.weights(ctx), ctx.comm)
        received = gathered_codes(codes, codec, lambda x: ctx.comm.all_gather(x, inplace=True, readers=groups))
        return {name: codec.average(received[name], x, shares) for name, x in like.items()}


class ServerMean(OfParticipants):
    """The mean of what the nodes that take part send to a server, which sends it to all: `[L, *]` -> `[1, *]`.

    Bytes sent per participant: those of the values up, and as many down from the server.

    Args:
        weighting, participation: see `Mean`.

    >>> from vecgym.collectives import StackedCollectives
    >>> ctx, values = Context(StackedCollectives(4)), {"w": torch.tensor([1.0, 2.0, 3.0, 6.0])}
    >>> ServerMean(participation=0.5)(values, {}, ctx)[0]  # of nodes 2 and 3
    {'w': tensor([4.5000])}
    """

    linear = True

    def __init__(self, weighting: Weighting = "equal", participation: float = 1.0) -> None:
        super().__init__(weighting, participation)

    def silent(self, ctx: Context) -> Tensor | None:
        return outside([participants(self.participation, ctx)], ctx.comm)

    def __call__(self, values: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        return ctx.comm.server_mean(values, participants(self.participation, ctx), self.weights(ctx)), state

    def of_codes(self, codes: Codes, codec: Codec, like: Tree, ctx: Context) -> Tree:
        senders = participants(self.participation, ctx)
        weights = self.weights(ctx)
        shares = None
        if weights is not None:
            given = torch.tensor([[weights[node] for node in senders]], dtype=torch.float64)
            shares = given / given.sum()
        received = gathered_codes(codes, codec, lambda x: ctx.comm.server_gather(x, senders))
        average = {name: codec.average(received[name], x, shares) for name, x in like.items()}
        return ctx.comm.server_send(average, senders)


# ------------------------------------------------------------------------------------------------ around another one


class Around(Average):
    """Hands something else than the values themselves to another average, `inner`."""

    def __init__(self, inner: Average) -> None:
        self.inner = check_average("inner", inner)

    @property
    def everyone(self) -> bool:
        return self.inner.everyone

    @property
    def by_exchange(self) -> bool:  # type: ignore[override]
        return self.inner.by_exchange

    def check(self, num_nodes: int, max_steps: int) -> None:
        self.inner.check(num_nodes, max_steps)

    def check_present(self, counts: Sequence[int], num_nodes: int) -> None:
        self.inner.check_present(counts, num_nodes)

    def init(self, values: Tree, ctx: Context) -> State:
        return self.inner.init(values, ctx)

    def active_nodes(self, ctx: Context) -> list[int] | None:
        return self.inner.active_nodes(ctx)

    def keeping(self, ctx: Context) -> Tensor | None:
        return self.inner.keeping(ctx)

    def around(self, inner: Average) -> Average:
        """Return the same around another average."""
        twin = copy.copy(self)
        twin.inner = inner
        return twin

    def _told(self, told: Tree, values: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        """Return what the nodes agree on if `inner` is told this; a node that takes no part keeps its value."""
        agreed, state = self.inner(told, state, ctx)
        return kept(self.keeping(ctx), values, agreed), state


# ------------------------------------------------------------------------------------------------------ small parts


def check_average(name: str, value: Any) -> Average:
    """Return `value` if it is an `Average`.

    >>> check_average("average", Mean)
    Traceback (most recent call last):
    ...
    TypeError: average is the class Mean; give an Average, such as Mean().
    """
    found: Average = check.instance(name, value, Average, "an Average, such as Mean()")
    return found


def num_participants(participation: float, num_nodes: int) -> int:
    """Return the number of nodes that train in a round, at least one."""
    return max(1, round(participation * num_nodes))


def participants(participation: float, ctx: Context) -> list[int]:
    """Return the nodes of the present round, ascending: all, or a sample drawn for the exchange that ends it."""
    count = num_participants(participation, ctx.comm.num_nodes)
    if participation == 1:
        return list(range(count))
    return sample_nodes(ctx.comm.num_nodes, count, ctx.generator("participants", ctx.exchange))


def node_weights(weighting: str, ctx: Context) -> tuple[float, ...] | None:
    """Return the weight of each node in an average; None: all alike."""
    if weighting == "equal":
        return None
    if ctx.num_examples is None:
        raise ValueError(
            'weighting="examples" needs the number of examples of each node: simulation_of(num_examples=...).'
        )
    return tuple(float(n) for n in ctx.num_examples)


def outside(groups: Groups | None, comm: Collectives) -> Tensor | None:
    """Return which of the nodes held here are in no group, bool `[L]`; None: all are in one."""
    inside = None if groups is None else [node for group in groups for node in group]
    if inside is None or len(inside) == comm.num_nodes:
        return None
    return ~torch.isin(comm.node_ids, torch.tensor(inside, dtype=torch.long))


def kept(keeping: Tensor | None, old: Tree, new: Tree) -> Tree:
    """Take the rows of `old` where a node keeps what it has, `[L]`, and the other rows of `new`."""
    if keeping is None:
        return new
    return {name: torch.where(per_row(keeping, x), old[name], x) for name, x in new.items()}


def per_row(values: Tensor, like: Tensor) -> Tensor:
    """Shape one value for each node, `[L]`, to broadcast with `like`, `[1 or L, *]`."""
    return placed(values, like.device).view(-1, *[1] * (like.dim() - 1))


def flat(x: Tensor) -> Tensor:
    """Flatten `[L, *shape]` to `[L, numel]`, a view where `x` is contiguous."""
    return x.reshape(len(x), math.prod(x.shape[1:]))
