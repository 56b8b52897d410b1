"""An average of some coordinates, which a selector draws."""

from __future__ import annotations

import torch
from torch import Tensor

from vecgym.core import check
from vecgym.core.devices import placed
from vecgym.core.tree import Tree
from vecgym.strategy.average import Around, Average, flat
from vecgym.strategy.base import Context, State
from vecgym.strategy.selectors import RandomSelector, Selector, Shapes
from vecgym.strategy.when import nothing


class Sparse(Around):
    """`inner` on the coordinates that a selector draws; all others stay each node's own.

    x_i[M] <- inner(x_j[M]). M is the same on every node and comes from the seed, so it costs no bytes.

    State: `selector`, the selector's; `inner`, the inner average's for all coordinates, of which those in M are used
    and changed.

    Args:
        selector: a `Selector`, such as `PartitionedSelector(0.01)`; a number is the p of a `RandomSelector`.
        inner: how the nodes agree on these coordinates. What it keeps must be a value for each coordinate, such as the
            residual of a code.

    Raises:
        ValueError: before the first step, for an average that keeps something else, such as PowerSGD's matrices.

    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.strategy import Mean
    >>> ctx, values = Context(StackedCollectives(2)), {"w": torch.tensor([[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]])}
    >>> sparse = Sparse(0.5, Mean())
    >>> sparse(values, sparse.init(values, ctx), ctx)[0]["w"]
    tensor([[1., 3., 3.],
            [3., 3., 5.]])
    """

    by_exchange = True

    def __init__(self, selector: Selector | float, inner: Average) -> None:
        super().__init__(inner)
        selector = RandomSelector(selector) if isinstance(selector, (int, float)) else selector
        self.selector = check.instance("selector", selector, Selector, "a Selector, such as PartitionedSelector(0.01)")

    def init(self, values: Tree, ctx: Context) -> State:
        inner, shapes = self.inner.init(values, ctx), _shapes(values)
        if any(not isinstance(slot, dict) or _shapes(slot) != shapes for slot in inner.values()):
            raise ValueError(
                f"{self!r} averages other coordinates each time, and {self.inner!r} keeps something that is not a "
                "value for each coordinate: give an average without a state, or a codec such as TopK or Quantise."
            )
        state = {"selector": self.selector.init(shapes, ctx)}
        return {**state, "inner": inner} if inner else state

    def __call__(self, values: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        agreed, state = self.agree(values, state, ctx)
        return self.write(agreed, values, ctx), state

    def agree(self, values: Tree, state: State, ctx: Context) -> tuple[State, State]:
        index, selector = self.selector.select(_shapes(values), state["selector"], ctx.exchange, ctx)
        index = {name: placed(where, values[name].device) for name, where in index.items()}
        held = state.get("inner", {})
        mean, changed = self.inner(_taken(values, index), {slot: _taken(x, index) for slot, x in held.items()}, ctx)
        state = {**state, "selector": selector}
        if held:
            state["inner"] = {slot: x | _put(x, index, changed[slot], ctx.inplace) for slot, x in held.items()}
        # `[1, m]`: as all state, with the node dimension first. Of a tensor left out: none.
        absent = {name: x for name, x in values.items() if name not in index}
        at = {name: where[None] for name, where in index.items()}
        return {"index": at | _no_index(absent), "mean": mean | nothing(absent)}, state

    def write(self, agreed: State, values: Tree, ctx: Context) -> Tree:
        index = {name: at[0] for name, at in agreed["index"].items() if at.numel()}
        return values | _put(values, index, agreed["mean"], ctx.inplace)

    def empty(self, values: Tree) -> State:
        return {"index": _no_index(values), "mean": nothing(values)}


class SparseChange(Sparse):
    """A `Sparse` that gives by how much each node's coordinates change, which is then added to what they are by then.

    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.strategy import Mean
    >>> ctx, values = Context(StackedCollectives(2)), {"w": torch.tensor([[1.0], [3.0]])}
    >>> change = SparseChange(1.0, Mean())
    >>> agreed, _ = change.agree(values, change.init(values, ctx), ctx)
    >>> change.write(agreed, {"w": torch.tensor([[1.5], [3.0]])}, ctx)["w"]  # the first node has moved on
    tensor([[2.5000],
            [2.0000]])
    """

    def agree(self, values: Tree, state: State, ctx: Context) -> tuple[State, State]:
        agreed, state = super().agree(values, state, ctx)
        # Of a tensor left out each node has nothing of its own, `[L, 0]`: it is not stored once.
        own = {name: x.new_empty(len(x), 0) for name, x in values.items()}
        drawn = {name: mean for name, mean in agreed["mean"].items() if mean.numel()}
        return _shifted({**agreed, "mean": own | drawn}, values, -1), state

    def write(self, agreed: State, values: Tree, ctx: Context) -> Tree:
        return super().write(_shifted(agreed, values, 1), values, ctx)


def _shifted(agreed: State, values: Tree, sign: int) -> State:
    """Add the nodes' own values, times `sign`, to what they agreed on: -1 makes it a change, and 1 undoes that."""
    index = {name: at[0] for name, at in agreed["index"].items() if at.numel()}
    own = _taken(values, index)
    return {**agreed, "mean": agreed["mean"] | {name: agreed["mean"][name] + sign * x for name, x in own.items()}}


def _taken(values: Tree, index: Tree) -> Tree:
    """Take the flat coordinates `index`, `[m]`, of each tensor `[1 or L, *]`: `[1 or L, m]`."""
    return {name: flat(values[name]).index_select(1, where) for name, where in index.items()}


def _put(values: Tree, index: Tree, new: Tree, inplace: bool) -> Tree:
    """Write `new`, `[1 or L, m]`, into tensors `[1 or L, *]` at the flat coordinates `index`, `[m]`."""
    return {name: _written(values[name], where, new[name], inplace) for name, where in index.items()}


def _written(param: Tensor, index: Tensor, values: Tensor, inplace: bool) -> Tensor:
    """Write `values`, `[1 or L, m]`, into `param`, `[1 or L, *]`, at the flat coordinates `index`, `[m]`."""
    num_rows = max(len(param), len(values))
    values = values.expand(num_rows, -1)
    if inplace and len(param) == num_rows and param.is_contiguous():
        flat(param).index_copy_(1, index, values)
        return param
    wide = param.expand(num_rows, *param.shape[1:])
    return flat(wide).index_copy(1, index, values).view(wide.shape)


def _shapes(values: Tree) -> Shapes:
    return {name: x.shape[1:] for name, x in values.items()}


def _no_index(values: Tree) -> Tree:
    return {name: torch.empty(1, 0, dtype=torch.int64, device=x.device) for name, x in values.items()}
