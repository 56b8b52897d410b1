"""Outer steps whose movements are corrected before they are averaged: HeLoCo's rule, and the median norm."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from vecgym.core import check, tree
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec
from vecgym.strategy.average import Average, flat, per_row
from vecgym.strategy.base import Context, State
from vecgym.strategy.lost import is_shared
from vecgym.strategy.modules import DEFAULT_H, OuterStep
from vecgym.strategy.servers import corrected
from vecgym.strategy.when import When

Correction = Callable[[Tree, State, Context], Tree]  # (movements, the outer optimizer's state) -> movements


def heloco(moved: Tree, optimizer: State, ctx: Context, momentum: float | Tensor = 0.9) -> Tree:
    """Correct each node's movement, tensor by tensor, by the mean of past ones; see `vecgym.strategy.HeLoCo`.

    That mean is (1 - momentum) times torch's buffer, which is their sum.

    >>> from vecgym.collectives import StackedCollectives
    >>> moved, held = {"w": torch.tensor([[-1.0, 1.0], [1.0, 1.0]])}, {"w": torch.tensor([[2.0, 0.0]])}
    >>> heloco(moved, {"momentum_buffer": held}, Context(StackedCollectives(2)), momentum=0.5)["w"]
    tensor([[-0.8867,  1.0000],
            [ 1.0000,  1.0000]])
    """
    means = tree.map(lambda m: tree.per_node(1 - momentum, m) * m, optimizer["momentum_buffer"])
    return tree.map(corrected, moved, means)


def median_norm(moved: Tree, optimizer: State, ctx: Context) -> Tree:
    """Shrink each node's movement, tensor by tensor, to the median of the nodes' norms, if its own is larger.

    Of an even number of nodes the median is the lower of the middle two, as `torch.median` has it. A number of each
    tensor of each node is sent.

    >>> from vecgym.collectives import StackedCollectives
    >>> moved = {"w": torch.tensor([[3.0, 4.0], [6.0, 8.0], [0.0, 100.0]])}
    >>> median_norm(moved, {}, Context(StackedCollectives(3)))["w"]
    tensor([[ 3.,  4.],
            [ 6.,  8.],
            [ 0., 10.]])
    """
    squares = torch.stack([flat(x * x).sum(1) for x in moved.values()], 1)
    size = squares.where(squares > 0, 1.0).sqrt()  # where a tensor has not moved, its movement stays 0
    ordered = ctx.comm.all_gather(size * (squares > 0)).sort(1).values  # [1, K, tensors]
    factors = (ordered[:, (ordered.shape[1] - 1) // 2] / size).clamp(max=1)
    return {name: x * per_row(f.to(x.dtype), x) for (name, x), f in zip(moved.items(), factors.unbind(1))}


CORRECTIONS: dict[str, Correction] = {"heloco": heloco, "median_norm": median_norm}


class CorrectedOuterStep(OuterStep):
    """An outer step on the average of corrected movements.

    Delta_i = correct(outer - theta_i);  outer <- optimizer(outer, average_i Delta_i);  theta_i <- outer.

    State: as `OuterStep`'s. Bytes: the average's; with "median_norm" a number of each tensor and node more, in an
    all-gather.

    Args:
        average: how the nodes agree on the movement; with "median_norm" the same on all nodes.
        outer_optim, H: see `OuterStep`.
        correction: "heloco", which turns what points against the outer momentum, see `HeLoCo`; "median_norm", which
            shrinks each tensor of a node's movement to the median of the nodes' norms; a function of the movements, the
            outer optimizer's state and the `Context`; None: none.

    Raises:
        ValueError: for another name; for "heloco" with an outer optimizer other than SGD with momentum and without
            dampening; for "median_norm" with an average in which some nodes take no part.

    >>> from vecgym.strategy import Mean
    >>> CorrectedOuterStep(Mean(), H=30, correction="median_norm")
    CorrectedOuterStep(Mean(), outer_optim=OptimSpec(SGD, lr=0.7, momentum=0.9, nesterov=True), H=30, \
correction='median_norm')

    References: HeLoCo, arXiv 2606.00271, where a server that does not wait corrects each movement when it arrives: here
    all arrive together, are averaged without a weight, and the outer step is that of `outer_optim`, from where nodes
    begin. The median norm: Covenant-72B, arXiv 2603.08163, and github.com/tplr-ai/templar, src/tplr/compress.py, which
    shrinks what it has decoded: here it is shrunk before a code.
    """

    def __init__(
        self,
        average: Average,
        outer_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        H: int | When | Callable[[int], int] = DEFAULT_H,
        correction: str | Correction | None = None,
    ) -> None:
        super().__init__(average, outer_optim, H)
        self.correction = correction
        if correction is not None and not callable(correction):
            check.choice("correction", correction, CORRECTIONS, "a function, or None")
        self._correct: Any = CORRECTIONS.get(correction) if isinstance(correction, str) else correction
        if correction == "heloco":
            self._correct = functools.partial(heloco, momentum=_momentum(self.outer_optim))
        if correction == "median_norm" and not is_shared(average):
            raise ValueError(
                f'correction="median_norm" is the median of all nodes, and in {average!r} not all agree: leave out '
                "islands and participation."
            )

    def _movement(
        self, params: Tree, state: State, ctx: Context, heard: Tensor | None = None
    ) -> tuple[Tree, State]:  # fmt: skip
        if self._correct is None:
            return super()._movement(params, state, ctx, heard)
        moved = self._correct(tree.map(torch.sub, state["params"], params), state["optimizer"], ctx)
        delta, average = self.average(moved, state.get("average", {}), ctx)
        return delta, {**state, "average": average} if average else state

    def stack_key(self) -> Hashable:
        return super().stack_key() if self._correct is None else None


def _momentum(optim: OptimSpec) -> Any:
    hyper = optim.hyper
    found = hyper.get("momentum", 0)
    if optim.cls is not torch.optim.SGD or hyper["dampening"] != 0 or not (isinstance(found, Tensor) or found > 0):
        raise ValueError(
            f'correction="heloco" goes by the outer momentum, and {optim!r} has none, or dampens it: give SGD with '
            'momentum, such as OptimSpec("sgd", lr=0.7, momentum=0.9, nesterov=True).'
        )
    return found
