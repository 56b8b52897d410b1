"""PowerSGD: two thin matrices instead of one, through two averages."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from vecgym.compress.codecs import Draw
from vecgym.core import check
from vecgym.core.devices import on_host, placed
from vecgym.core.objects import Steady
from vecgym.core.tree import Tree, wider


class PowerSGD(Steady, steady=True):
    """Two matrices of r columns instead of one: M ~ P Q^T, by one power iteration from the last exchange's Q.

    P <- orthonormalise(mean_i M_i Q);  Q_i <- M_i^T P;  Q <- mean_i Q_i;  the mean of the M_i is decoded to P Q^T, and
    node i's own part of it to P Q_i^T.

    A tensor of more than two dimensions is reshaped to `[shape[0], rest]`. A tensor of fewer than two dimensions, or
    for which r (rows + columns) is not less than rows * columns, is averaged exactly: that includes r >= rows or
    columns. Payload: r (rows + columns) b, and n b for the exact ones.

    There are two averages for any number of tensors: P and the exact tensors, then Q. A column of Q that has vanished,
    because the matrix once had a lower rank than r, is redrawn; Q is first drawn at random, too.

    Args:
        rank: r.
        warm_start: start the power iteration from the last exchange's Q; otherwise Q is redrawn each time.

    >>> M = torch.outer(torch.tensor([1.0, 2.0, 2.0, 0.0]), torch.tensor([3.0, 0.0, 4.0]))[None]
    >>> codec, draw = PowerSGD(rank=1), Draw(lambda: torch.Generator().manual_seed(0), torch.arange(1))
    >>> average, parts, state = codec.reduce({"w": M}, codec.init({"w": M}), mean=lambda x: x, draw=lambda name: draw)
    >>> torch.allclose(average["w"], M, atol=1e-5)  # M has rank 1
    True

    Reference: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization", arXiv 1905.13727. Deviations: the residual of a node is relative to its own P Q_i^T, as in algorithm
    2 and github.com/epfml/powersgd (relative to the mean in that repository's paper-code and torch's hook; the averages
    are the same, but then the residual grows with the differences between the nodes), which updates P and Q in turn and
    compresses from step 100 on; Householder QR instead of Gram-Schmidt, for the same span; columns that have vanished
    are redrawn.
    """

    contractive = True  # as of `Codec`

    def __init__(self, rank: int = 4, warm_start: bool = True) -> None:
        self.rank = check.integer("rank", rank, what="the number of columns of the two matrices that are sent")
        self.warm_start = check.flag("warm_start", warm_start)

    def init(self, values: Tree) -> Tree:
        """Return Q of every matrix, `[1, columns, r]`: zeros, which means that it will be drawn."""
        shapes = {name: _matrix_shape(x) for name, x in values.items() if self.compresses(x)}
        return {name: values[name].new_zeros(1, columns, self.rank) for name, (_, columns) in shapes.items()}

    def compresses(self, x: Tensor) -> bool:
        """Whether two matrices are smaller than the tensor of one node, `x[0]`.

        >>> PowerSGD(rank=2).compresses(torch.zeros(1, 10, 10)), PowerSGD(rank=2).compresses(torch.zeros(1, 10))
        (True, False)
        """
        rows, columns = _matrix_shape(x)
        return x.dim() > 2 and self.rank * (rows + columns) < rows * columns

    def reduce(
        self, values: Tree, state: Tree, mean: Callable[[Tree], Tree], draw: Callable[[str], Draw]
    ) -> tuple[Tree, Tree, Tree]:
        """Return the average `[1, *]`, each node's own part of it `[L, *]`, and the new state."""
        M = {name: x.reshape(-1, *_matrix_shape(x)) for name, x in values.items() if self.compresses(x)}
        exact = {name: x for name, x in values.items() if name not in M}
        first = mean({**exact, **{name: _products(m, self._alive(state[name], draw(name))) for name, m in M.items()}})
        # Clone a mean of equal values that is the tensor itself: the caller may overwrite it.
        average = {name: first[name].clone() if first[name] is x else first[name] for name, x in exact.items()}
        parts = dict(exact)
        if M:
            P = {name: _orthonormalise(first[name]) for name in M}
            Q_local = {name: _products(m.mT, P[name]) for name, m in M.items()}
            Q = mean(Q_local)
            average |= {name: (P[name] @ Q[name].mT).view(-1, *values[name].shape[1:]) for name in M}
            parts |= {name: _products(P[name], Q_local[name].mT).view_as(values[name]) for name in M}
            state = {**state, **Q}
        return {name: average[name] for name in values}, {name: parts[name] for name in values}, state

    def _alive(self, Q: Tensor, draw: Draw) -> Tensor:
        """Redraw the columns of Q that are only rounding errors, or all columns without a warm start."""
        if not self.warm_start:
            return placed(draw.normal(Q.shape[1:], Q.dtype), Q.device)[None]
        size = torch.linalg.vector_norm(Q, dim=-2, keepdim=True)  # [1, 1, r]
        dead = size <= torch.finfo(Q.dtype).eps ** 0.75 * size.amax(-1, keepdim=True)
        if on_host(Q) and not dead.any():  # on a device, checking takes longer than drawing
            return Q
        return torch.where(dead, placed(draw.normal(Q.shape[1:], Q.dtype), Q.device), Q)

    def __repr__(self) -> str:
        return f"PowerSGD(rank={self.rank}{'' if self.warm_start else ', warm_start=False'})"


def _matrix_shape(x: Tensor) -> tuple[int, int]:
    """Return the shape of one node's tensor as a matrix: `[L, rows, *rest]` -> (rows, columns)."""
    return (x.shape[1], math.prod(x.shape[2:])) if x.dim() > 2 else (1, math.prod(x.shape[1:]))


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Multiply the matrices of each node, `[1 or L, n, m]` and `[1 or L, m, r]`, with bits that do not depend on L.

    A batch of one matrix uses another kernel, with other rounding, than a batch of several.
    """
    num_nodes = max(len(a), len(b))
    if not len(a) or not len(b):  # no node is in this process
        return a.new_zeros(0, a.shape[1], b.shape[2])
    size = max(2, num_nodes)
    return torch.bmm(a.expand(size, -1, -1), b.expand(size, -1, -1))[:num_nodes]


def _orthonormalise(P: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns, `[..., rows, r]`; half precision is computed in float32."""
    return torch.linalg.qr(P.to(wider(P.dtype))).Q.to(P.dtype)
