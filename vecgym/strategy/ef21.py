"""EF21: nodes send codes of what has changed since they last sent (Richtarik et al., arXiv 2106.05203)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vecgym.compress import Compressor
from vecgym.core import tree
from vecgym.core.tree import Tree
from vecgym.strategy.average import Average
from vecgym.strategy.base import Context, State
from vecgym.strategy.codes import Compressed, constant, plus, straight_through


class EF21(Compressed):
    """Each node keeps an estimate of its values that all know, and sends a code of the difference to it.

    With h_i the estimate of node i, at first 0:  node i sends C(x_i - h_i);  h_i <- h_i + C(x_i - h_i);
    the average is inner(h_1, ..., h_K), which all keep as h: h <- h + inner(C(x_1 - h_1), ..., C(x_K - h_K)).

    Where the x_i come to rest, h_i comes to x_i, and the average is exact, however coarse the code. Error feedback
    (`Compressed`) sends each value in the end; EF21 sends the present ones, of which it knows ever more.

    For gradients and movements: `Gradients(EF21(Mean(), TopK(0.01)))`, `OuterStep(EF21(Mean(), "sign"), H=20)`.

    Under differentiation the code passes derivatives straight through, as in `Compressed`; h_i and h are constants.

    State: `estimate`, h_i, `[L, *]` (`[1, *]` before the first exchange); `average`, h, `[1, *]`; `codec`, its own.
    Bytes: those of the code, as in `Compressed`.

    Args:
        inner: `Mean()` or `ServerMean()`, in which all nodes take part, with equal weights.
        codec: a codec that is contractive, or its name, as in `compressed`.
        purpose: names the random numbers: two averages of the same purpose draw the same.

    Raises:
        ValueError, TypeError: for another `inner`, an unknown codec or one that is not contractive; for nodes that may
            be absent.

    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.compress import TopK
    >>> from vecgym.strategy import Mean
    >>> average, ctx = EF21(Mean(), TopK(k=1)), Context(StackedCollectives(2))
    >>> x = {"w": torch.tensor([[1.0, 4.0], [8.0, 2.0]])}
    >>> state = average.init(x, ctx)
    >>> for _ in range(2):  # the largest of each row, then the other one
    ...     h, state = average(x, state, ctx)
    ...     print(h["w"])
    tensor([[4., 2.]])
    tensor([[4.5000, 3.0000]])

    Reference: Richtarik, Sokolov and Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and Practically Faster
    Error Feedback", arXiv 2106.05203. Deviation: h_i begins at 0, so that the first code is one of x_i itself.
    """

    def __init__(self, inner: Average, codec: str | Compressor, *, purpose: str = "compress") -> None:
        super().__init__(inner, codec, purpose=purpose)
        equal = getattr(self.inner, "weighting", "equal") == "equal"
        if not (self.inner.shared and self.inner.linear and self.inner.everyone and equal):
            raise ValueError(
                f"{self!r}: what all know is the mean of all nodes' estimates: give Mean() or ServerMean(), without "
                "islands, participation and weighting, or Compressed(...), which has none."
            )

    def check_present(self, counts: Sequence[int], num_nodes: int) -> None:
        if any(count < num_nodes for count in counts):
            raise ValueError(
                f"{self!r}: what all know is the mean of all nodes' estimates, and that of the absent ones would be "
                "missing: give Compressed(...) in its place, or leave out availability."
            )

    def init(self, values: Tree, ctx: Context) -> State:
        zeros = {name: tree.map(lambda x: torch.zeros_like(x[:1]), values) for name in ("estimate", "average")}
        codec = super().init(values, ctx).get("codec")
        return zeros if codec is None else {**zeros, "codec": codec}

    def __call__(self, values: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        estimate, average = constant(state["estimate"]), constant(state["average"])
        with torch.no_grad():
            change = {name: x - estimate[name] for name, x in constant(values).items()}
            agreed, sent, codec = self._average(change, state.get("codec", {}), ctx)
            new = {
                "estimate": {name: plus(x, sent[name], ctx.inplace) for name, x in estimate.items()},
                "average": {name: torch.add(x, agreed[name]) for name, x in average.items()},
            }
        told = tree.map(torch.clone, new["average"])  # the caller may overwrite it
        changed = {**new, "codec": codec} if "codec" in state else new
        return straight_through(told, values, ctx, lambda own: self.inner(values, {}, own)[0]), changed
