"""An average of some coordinates, which a selector draws."""

from __future__ import annotations

import torch
from torch import Tensor

from vecgym.core import check, tree
from vecgym.core.tree import Tree
from vecgym.strategy.average import Around, Average, flat
from vecgym.strategy.base import Context, State
from vecgym.strategy.selectors import RandomSelector, Selector, Shapes
from vecgym.strategy.when import nothing


class Sparse(Around):
    """`inner` on the coordinates that a selector draws; all others stay each node's own.

    x_i[M] <- inner(x_j[M]). M is the same on every node and comes from the seed, so it costs no bytes.

    State: `selector`, the selector's.

    Args:
        selector: a `Selector`, such as `PartitionedSelector(0.01)`; a number is the p of a `RandomSelector`.
        inner: how the nodes agree on these coordinates. It must not keep a state for each of them, since they are
            others each time: `Compressed(Mean(), codec, error_feedback=False)`.

    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.strategy import Mean
    >>> ctx, values = Context(StackedCollectives(2)), {"w": torch.tensor([[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]])}
    >>> sparse = Sparse(0.5, Mean())
    >>> sparse(values, sparse.init(values, ctx), ctx)[0]["w"]
    tensor([[1., 3., 3.],
            [3., 3., 5.]])
    """

    def __init__(self, selector: Selector | float, inner: Average) -> None:
        super().__init__(inner)
        selector = RandomSelector(selector) if isinstance(selector, (int, float)) else selector
        self.selector = check.instance("selector", selector, Selector, "a Selector, such as PartitionedSelector(0.01)")

    def init(self, values: Tree, ctx: Context) -> State:
        if any(True for _ in tree.leaves(self.inner.init(values, ctx))):
            raise ValueError(
                f"{self!r} averages other coordinates each time, and {self.inner!r} keeps a state for each: "
                "give error_feedback=False, or an average without a state."
            )
        return {"selector": self.selector.init(_shapes(values), ctx)}

    def __call__(self, values: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        agreed, state = self.agree(values, state, ctx)
        return self.write(agreed, values, ctx), state

    def agree(self, values: Tree, state: State, ctx: Context) -> tuple[State, State]:
        index, selector = self.selector.select(_shapes(values), state["selector"], ctx.exchange, ctx)
        index = {name: where.to(values[name].device) for name, where in index.items()}
        chosen = {name: flat(values[name]).index_select(1, where) for name, where in index.items()}
        mean, _ = self.inner(chosen, {}, ctx)
        # `[1, m]`: as all state, with the node dimension first. Of a tensor left out: none.
        absent = {name: x for name, x in values.items() if name not in index}
        at = {name: where[None] for name, where in index.items()}
        return {"index": at | _no_index(absent), "mean": mean | nothing(absent)}, {**state, "selector": selector}

    def write(self, agreed: State, values: Tree, ctx: Context) -> Tree:
        at, mean = agreed["index"], agreed["mean"]
        return {
            name: _written(x, at[name][0], mean[name], ctx.inplace) if at[name].numel() else x
            for name, x in values.items()
        }

    def empty(self, values: Tree) -> State:
        return {"index": _no_index(values), "mean": nothing(values)}


def _written(param: Tensor, index: Tensor, values: Tensor, inplace: bool) -> Tensor:
    """`param`, `[1 or L, *]`, with `values`, `[1 or L, m]`, at the flat coordinates `index`, `[m]`."""
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
