"""The largest values of each chunk of a tensor, with their places in it in as few bits as they need."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from vecgym.compress.codecs import Code, Codec, Draw
from vecgym.compress.dct import Grid, from_chunks, grid, strongest, to_chunks
from vecgym.compress.packing import bits_for, pack, unpack
from vecgym.core import check

Averaged = Literal["all", "senders"]


class ChunkedTopK(Codec):
    """The k values of largest magnitude of each chunk, with their places in it; the others count as 0.

    A matrix is cut into chunks of `chunk` x `chunk`, a vector into chunks of chunk^2 values, and a side that is no
    multiple into parts of its largest divisor below. A tensor of more dimensions is folded into a matrix,
    `[shape[0], rest]`. Of equal magnitudes the first are sent.

    Bytes: k b per chunk, and k ceil(log2(values of a chunk)) / 8 for the places: 12 bits each in a chunk of 64 x 64.

    Args:
        k: values per chunk, at most all.
        chunk: the longest side of a chunk.
        over: whom a mean of nodes counts at a coordinate: "all" of them, with a 0 from those that did not send it, or
            only its "senders".

    >>> x = torch.tensor([[[1.0, 5.0, 0.0, 2.0], [0.0, 3.0, 0.0, -4.0]]])  # two chunks of 2 x 2
    >>> codec = ChunkedTopK(k=1, chunk=2)
    >>> code = codec.encode(x)
    >>> code  # places 1 and 3, two bits each
    {'values': tensor([[ 5., -4.]]), 'places': tensor([[13]], dtype=torch.uint8)}
    >>> codec.decode(code, like=x)
    tensor([[[ 0.,  5.,  0.,  0.],
             [ 0.,  0.,  0., -4.]]])

    Reference: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", arXiv 2508.15706. Deviation:
    the places in a small chunk take fewer than 12 bits.
    """

    def __init__(self, k: int = 64, chunk: int = 64, over: Averaged = "all") -> None:
        self.k = check.integer("k", k, what="the number of values sent of each chunk")
        self.chunk = check.integer("chunk", chunk, what="the longest side of a chunk, such as 64")
        self.over = check.choice("over", over, get_args(Averaged))

    def cut(self, like: Tensor) -> Grid:
        """Return how a tensor `[L, *]` is cut.

        >>> ChunkedTopK().cut(torch.zeros(1, 128, 784)), ChunkedTopK().cut(torch.zeros(1, 8192))
        (Grid(rows=2, columns=14, height=64, width=56), Grid(rows=1, columns=2, height=1, width=4096))
        """
        shape = tuple(like.shape[1:])
        return grid(shape, self.chunk if len(shape) > 1 else self.chunk**2)

    def num_values(self, n: int) -> int:
        return self.num_values_of(torch.empty(1, n, device="meta"))

    def num_values_of(self, like: Tensor) -> int:
        cut = self.cut(like)
        return cut.chunks * min(self.k, cut.area)

    def encode(self, x: Tensor, draw: Draw | None = None) -> Code:
        cut = self.cut(x)
        chunks = to_chunks(x, cut).flatten(2)  # [L, chunks, area]
        places = strongest(chunks, self.k)
        values = chunks.gather(-1, places).flatten(1)
        return {"values": values, "places": pack(places.flatten(1).to(torch.int32), bits_for(cut.area))}

    def decode(self, code: Code, like: Tensor) -> Tensor:
        cut, values = self.cut(like), code["values"]
        total = values.new_zeros(len(values), cut.chunks * cut.area)
        return self._joined(total.scatter(1, self._where(code["places"], cut), values), like)

    def average(self, codes: Code, like: Tensor, weights: Tensor | None = None) -> Tensor:
        """Add up the few values that were sent, and divide by the weight of all, or of those who sent."""
        values, cut = codes["values"], self.cut(like)  # [R, K, m]
        rows, num_senders = values.shape[:2]
        at = self._where(codes["places"].flatten(0, 1), cut).view(rows, values[0].numel())
        shares = values.new_full((1, num_senders), 1 / num_senders) if weights is None else weights.to(values)
        weighted = values * shares[..., None]
        zeros = values.new_zeros(len(weighted), cut.chunks * cut.area)
        at = at.expand(len(weighted), -1)
        total = zeros.scatter_add(1, at, weighted.flatten(1))
        if self.over == "senders":
            sent = zeros.scatter_add(1, at, shares[..., None].expand_as(weighted).flatten(1))
            total = torch.where(sent > 0, total / sent, 0.0)
        return self._joined(total, like)

    def _where(self, packed: Tensor, cut: Grid) -> Tensor:
        """Return the places in all chunks together, `[R, bytes]` -> `[R, chunks k]`."""
        k = min(self.k, cut.area)
        places = unpack(packed, bits_for(cut.area), cut.chunks * k).long().view(len(packed), cut.chunks, k)
        return (places + torch.arange(cut.chunks, device=packed.device)[:, None] * cut.area).flatten(1)

    def _joined(self, flat: Tensor, like: Tensor) -> Tensor:
        cut = self.cut(like)
        return from_chunks(flat.view(len(flat), cut.chunks, cut.height, cut.width), cut, like.shape[1:])
