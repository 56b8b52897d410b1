"""The cosine transform of chunks of tensors, for all nodes at once, and its strongest coefficients.

A `[L, *shape]` tensor is cut into chunks, `[L, chunks, height, width]`; each chunk is transformed by two matrix
products; its k largest coefficients are sent as (index, value) pairs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from vecgym.core.devices import on_host, placed
from vecgym.core.tree import wider

INDEX_BYTES = 8  # torch indexes with int64


class Grid(NamedTuple):
    """The chunks of one node's tensor: `rows` x `columns` chunks of `height` x `width` elements.

    >>> cut = Grid(rows=2, columns=14, height=64, width=56)
    >>> cut.chunks, cut.area
    (28, 3584)
    """

    rows: int
    columns: int
    height: int
    width: int

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return self.rows * self.columns

    @property
    def area(self) -> int:
        """The number of elements of a chunk."""
        return self.height * self.width


def chunk_size(n: int, limit: int) -> int:
    """Return the largest divisor of n that is at most `limit`.

    >>> [chunk_size(n, 64) for n in (1, 64, 67, 96, 784)]
    [1, 64, 1, 48, 56]
    """
    return max(d for d in range(1, min(max(n, 1), limit) + 1) if n % d == 0)


@functools.cache
def grid(shape: tuple[int, ...], limit: int) -> Grid:
    """Cut one node's tensor into chunks with no side longer than `limit`.

    A matrix has two-dimensional chunks. A vector is one row, a scalar a row of one element; in a tensor of more
    dimensions all but the first are flattened.

    >>> grid((128, 784), limit=64)
    Grid(rows=2, columns=14, height=64, width=56)
    >>> grid((10,), limit=64), grid((8, 4, 3, 3), limit=64)
    (Grid(rows=1, columns=1, height=1, width=10), Grid(rows=1, columns=1, height=8, width=36))
    """
    rows, columns = (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))
    height, width = chunk_size(rows, limit), chunk_size(columns, limit)
    return Grid(rows // height, columns // width, height, width)


def to_chunks(x: Tensor, cut: Grid) -> Tensor:
    """Cut `[L, *shape]` into `[L, chunks, height, width]`, the chunks in row-major order.

    >>> to_chunks(torch.arange(8.0).view(1, 2, 4), grid((2, 4), limit=2)).tolist()
    [[[[0.0, 1.0], [4.0, 5.0]], [[2.0, 3.0], [6.0, 7.0]]]]
    """
    matrix = x.reshape(x.shape[0], cut.rows * cut.height, cut.columns * cut.width)
    return rearrange(matrix, "l (r h) (c w) -> l (r c) h w", h=cut.height, w=cut.width)


def from_chunks(chunks: Tensor, cut: Grid, shape: Sequence[int]) -> Tensor:
    """Invert `to_chunks`: `[L, chunks, height, width]` -> `[L, *shape]`.

    >>> x, cut = torch.arange(8.0).view(1, 2, 4), grid((2, 4), limit=2)
    >>> from_chunks(to_chunks(x, cut), cut, (2, 4))
    tensor([[[0., 1., 2., 3.],
             [4., 5., 6., 7.]]])
    """
    matrix = rearrange(chunks, "l (r c) h w -> l (r h) (c w)", r=cut.rows, c=cut.columns)
    return matrix.reshape(chunks.shape[0], *shape)


@functools.cache
def basis(n: int, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> Tensor:
    """Return the orthonormal cosine basis, one vector per row, `[n, n]`.

    C_kj = s_k cos(pi (j + 1/2) k / n) with s_0 = sqrt(1/n), s_k = sqrt(2/n) for k > 0. Where the cosine is 0, as in
    the middle of an odd wave, C_kj is exactly 0, so that the decoded value is 0 and not rounding noise, which has a
    sign.

    >>> basis(3)
    tensor([[ 0.5774,  0.5774,  0.5774],
            [ 0.7071,  0.0000, -0.7071],
            [ 0.4082, -0.8165,  0.4082]], dtype=torch.float64)
    """
    with torch.inference_mode(False):  # it is cached, and may be needed in a backward pass
        k = torch.arange(n)[:, None]
        angle = (2 * k.T + 1) * k % (4 * n)  # in units of pi / (2 n)
        angle = torch.minimum(angle, 4 * n - angle)  # the cosine is even: 0 to pi
        acute = torch.minimum(angle, 2 * n - angle)
        C = torch.cos(math.pi / (2 * n) * acute.double()).mul_(torch.sign(n - angle)).mul_(math.sqrt(2 / n))
        C[0] = math.sqrt(1 / n)
        return placed(C.to(dtype), device)


def dct(x: Tensor) -> Tensor:
    """Take the orthonormal DCT-II of each chunk `[..., height, width]`: X = C_height x C_width^T.

    >>> dct(torch.ones(1, 2, 2))
    tensor([[[2.0000, 0.0000],
             [0.0000, 0.0000]]])
    """
    height, width = _bases(x)
    return height @ x @ width.T


def accumulate_dct_(X: Tensor, x: Tensor, cut: Grid, decay: float) -> Tensor:
    """Compute X <- decay X + dct(to_chunks(x, cut)) in place, in fewer passes: `[S, chunks, area]` and `[S, *shape]`.

    >>> X, x, cut = torch.ones(1, 2, 4), torch.ones(1, 2, 4), grid((2, 4), limit=2)
    >>> accumulate_dct_(X, x, cut, decay=0.5)
    tensor([[[2.5000, 0.5000, 0.5000, 0.5000],
             [2.5000, 0.5000, 0.5000, 0.5000]]])
    """
    strips = x.reshape(x.shape[0] * cut.rows, cut.height, cut.columns * cut.width)
    height, width = basis(cut.height, x.dtype, x.device), basis(cut.width, x.dtype, x.device)
    half = torch.bmm(height.expand(len(strips), -1, -1), strips)
    X.view(-1, cut.width).addmm_(rearrange(half, "s h (c w) -> (s c h) w", w=cut.width), width.T, beta=decay)
    return X


def inverse_dct(X: Tensor) -> Tensor:
    """Return the chunks `[..., height, width]` of these coefficients: x = C_height^T X C_width.

    >>> x = torch.arange(6.0).view(1, 2, 3)
    >>> torch.allclose(inverse_dct(dct(x)), x, atol=1e-5)
    True
    """
    height, width = _bases(X)
    return height.T @ X @ width


def _bases(x: Tensor) -> tuple[Tensor, Tensor]:
    return basis(x.shape[-2], x.dtype, x.device), basis(x.shape[-1], x.dtype, x.device)


def strongest(x: Tensor, k: int) -> Tensor:
    """Find the k largest magnitudes along the last dimension, `[..., n]` -> indices `[..., min(k, n)]`.

    Among equal magnitudes the first are selected, on every device. The order of the indices is not specified.

    >>> strongest(torch.tensor([1.0, -3.0, 2.0, 2.0]), 2)
    tensor([1, 2])
    """
    n = x.shape[-1]
    if k >= n:
        return torch.arange(n, device=x.device).expand(*x.shape[:-1], n)
    magnitude = x.detach().abs()
    # One more than needed: there is a tie only if the last value selected equals the first one not selected.
    values, indices = _largest(magnitude, k + 1)
    indices, last = indices[..., :k], values[..., k - 1]
    tied = last == values[..., k]
    if not on_host(x):  # checking for ties would wait for the device
        return torch.where(tied[..., None], _first_strongest(magnitude, last, k), indices)
    if tied.any():
        indices[tied] = _first_strongest(magnitude[tied], last[tied], k)
    return indices


def _largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Compute `x.topk(k)`, in half the time for long rows: the k largest are in the k groups of largest maximum."""
    n = x.shape[-1]
    size = chunk_size(n, 8)
    if size == 1 or n < 2 * size * k:
        return x.topk(k)
    members = torch.arange(n, device=x.device).view(size, -1)  # group j: j, j + n / size, j + 2 n / size, ...
    groups = x.unflatten(-1, members.shape).amax(-2).topk(k, sorted=False).indices
    candidates = members.T[groups].flatten(-2)
    values, positions = x.gather(-1, candidates).topk(k)
    return values, candidates.gather(-1, positions)


def _first_strongest(magnitude: Tensor, last: Tensor, k: int) -> Tensor:
    """Find all values above `last` and the first ones equal to it: `[..., n]`, `[...]` -> indices `[..., k]`."""
    n = magnitude.shape[-1]
    above, equal = ~(magnitude <= last[..., None]), magnitude == last[..., None]  # nan is above
    rank = 2 * n * above + n * equal - torch.arange(n, device=magnitude.device)  # all distinct
    return rank.topk(k).indices


def mean_of_senders(indices: Tensor, values: Tensor, n: int) -> Tensor:
    """Average each coefficient over the nodes that sent it; 0 if none did: `[1, K, chunks, k] -> [1, chunks, n]`.

    A 0 that was sent counts like any other value.

    >>> indices, values = torch.tensor([[[[0, 1]], [[0, 2]]]]), torch.tensor([[[[4.0, 1.0]], [[2.0, 5.0]]]])
    >>> mean_of_senders(indices, values, 4)
    tensor([[[3., 1., 5., 0.]]])
    """
    at = rearrange(indices, "l node chunk k -> l chunk (node k)")
    sent = rearrange(values, "l node chunk k -> l chunk (node k)")
    sent = sent.to(wider(sent.dtype))
    total = sent.new_zeros(*at.shape[:-1], n).scatter_add(-1, at, sent)
    # Count in integers: bfloat16 cannot count beyond 256.
    senders = at.new_zeros(total.shape, dtype=torch.int32).scatter_add_(-1, at, torch.ones_like(at, dtype=torch.int32))
    return (total / senders.clamp_(min=1)).to(values.dtype)


def topk_bytes(shape: Sequence[int], k: int, limit: int, value_bytes: int) -> int:
    """Return the bytes of the k strongest coefficients of every chunk of a tensor: chunks * min(k, area) * (8 + b).

    >>> topk_bytes((287_296 * 64, 64), k=32, limit=64, value_bytes=4)  # 1,176,764,416 parameters
    110321664
    """
    cut = grid(tuple(shape), limit)
    return cut.chunks * min(k, cut.area) * (INDEX_BYTES + value_bytes)
