"""Lossy codes of tensors, for all nodes at once: encode a tensor for sending, decode it, average codes.

A `Codec` turns `[L, *shape]` into a code, a few tensors `[L, ...]` that every node sends to all others; its bytes
are the bytes of these tensors. `PowerSGD` does not gather: it takes two averages.

The bytes of the code of a tensor of n values of b bytes, a node's payload, which it sends to each other node:

| method    | code                                        | bytes                    |
|-----------|---------------------------------------------|--------------------------|
| `topk`    | k values, k indices                         | k (b + 4)                |
| `randomk` | m values, on coordinates drawn from a seed  | m b                      |
| `int8`    | n bytes, one scale                          | n + 4                    |
| `int4`    | two values to a byte, one scale             | ceil(n / 2) + 4          |
| `int2`    | four values to a byte, one scale            | ceil(n / 4) + 4          |
| `sign`    | eight values to a byte, one scale           | ceil(n / 8) + 4          |
| `qsgd`    | integers from -s to s, a scale per bucket   | ceil(n bits / 8) + 4, bits = ceil(log2(2 s + 1)) |
| `natural` | sign and exponent                           | ceil(n / 8) + ceil(n e / 8), e = 8 (float32), 11 (float64) |
| `ternary` | five values to a byte, one scale            | ceil(n / 5) + 4          |
| `stat2`   | index of a bin, the means of the bins       | ceil(n / 4) + 16; `stat4` and `stat8` likewise |
| `bfloat16`| n values of two bytes; `float16` likewise, `float32` of four | 2 n |
| `float8_e4m3fn` | n values of one byte, one scale; `float8_e5m2` likewise | n + 4 |
| `chunktopk` | k values of each chunk, their places in it | k (b + bits / 8) per chunk, bits = 12 for 4096 |
| `powersgd`| two matrices of r columns                   | r (rows + columns) b     |

Codecs that round at random are in `stochastic`, and `powersgd` in the module of that name; the others are here. Indices
of `topk` take 8 bytes in tensors of more than 2^31 values. The payload of `powersgd` goes through averages (ring
all-reduces), that of the others through an all-gather.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from vecgym.compress.dct import Grid, from_chunks, grid, strongest, to_chunks
from vecgym.core import check
from vecgym.core.devices import placed, spread
from vecgym.core.objects import Steady, is_steady
from vecgym.core.tree import wider

Code = dict[str, Tensor]  # the parts of the code of one tensor, `[L, ...]` each
Codes = dict[str, Code]  # of several tensors, by name
Averaged = Literal["all", "senders"]

DEFAULT_FRACTION = 0.01
E3M0_LARGEST = 64  # 2^6: one of the eight exponents stands for zero
E3M0_SIGN = 8  # the fourth bit
TRITS = 5  # per byte: 3^5 = 243
CASTS = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")


class Draw(NamedTuple):
    """Random numbers for one tensor in one exchange: the same in every process, whichever nodes it holds.

    Attributes:
        generator: ids -> a generator keyed by them.
        node_ids: the global ids of the nodes in this process, `[L]`.
    """

    generator: Callable[..., torch.Generator]
    node_ids: Tensor

    def subset(self, n: int, m: int) -> Tensor:
        """Draw m of n coordinates uniformly, the same on every node: `[m]`."""
        return torch.randperm(n, generator=self.generator())[:m]

    def uniform(self, n: int, dtype: torch.dtype) -> Tensor:
        """Draw n numbers in [0, 1) for each node, keyed by the node: `[L, n]`."""
        nodes, rows = self.node_ids.unique(return_inverse=True)
        drawn = [torch.rand(n, generator=self.generator(node), dtype=dtype) for node in nodes.tolist()]
        return torch.stack(drawn)[rows]

    def normal(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Draw standard normal numbers, the same on every node: `[*shape]`."""
        return torch.randn(shape, generator=self.generator(), dtype=dtype)


class Codec(Steady, ABC):
    """A lossy code that a node sends instead of a tensor. Override `encode` and `decode`.

    Attributes:
        shared: parts of the code, `[1, ...]`, that every node knows and that are not sent.
        contractive: whether it works with error feedback; False if C(x) may be further from x than 0 is.
        steady: whether codes of tensors of one shape always have the same shapes; see `Steady`.

    >>> class Half(Codec):
    ...     def encode(self, x, draw=None):
    ...         return {"values": x.bfloat16()}
    ...     def decode(self, code, like):
    ...         return code["values"].to(like.dtype)
    >>> x = torch.tensor([[1.0, 0.1], [3.0, 0.3]])
    >>> code = Half().encode(x)
    >>> Half().decode(code, like=x)
    tensor([[1.0000, 0.1001],
            [3.0000, 0.3008]])
    >>> Half().average({"values": code["values"][None]}, like=x)  # of the K = 2 senders
    tensor([[2.0000, 0.2004]])
    """

    shared: tuple[str, ...] = ()
    contractive: bool = True

    @abstractmethod
    def encode(self, x: Tensor, draw: Draw | None = None) -> Code:
        """Encode each node's tensor: `[L, *]` -> parts `[L, ...]`."""

    @abstractmethod
    def decode(self, code: Code, like: Tensor) -> Tensor:
        """Decode R rows of code to `[R, *shape]`; `like`, `[L, *shape]`, gives shape and dtype."""

    def num_values(self, like: Tensor) -> int:
        """Return how many values of a tensor `[L, *]` the part `values` holds, if that is a shorter one of its kind.

        >>> TopK(0.1).num_values(torch.zeros(2, 5, 10)), RandomK(0.2).num_values(torch.zeros(2, 50))
        (5, 10)
        """
        raise TypeError(f"{self!r} sends no values that another codec can compress: TopK, ChunkedTopK and RandomK do.")

    def average(self, codes: Code, like: Tensor, weights: Tensor | None = None) -> Tensor:
        """Average over the K senders, or return sum_k w_k decode(code_k): parts `[R, K, ...]` -> `[R, *shape]`.

        bfloat16 and float16 are summed in float32 and rounded once.

        Args:
            codes: the codes of all senders; shared parts are `[1, 1, ...]`.
            like: gives shape and dtype.
            weights: `[1 or L, K]`; the result has as many rows.
        """
        rows, num_senders = next(y.shape[:2] for part, y in codes.items() if part not in self.shared)
        dtype, like = like.dtype, like.to(wider(like.dtype))
        if rows == 1:
            decoded = self.decode({part: y.flatten(0, 1) for part, y in codes.items()}, like).to(like.dtype)  # [K, *]
            if weights is None:
                return decoded.mean(0, keepdim=True).to(dtype)
            return torch.tensordot(weights.to(decoded), decoded, 1).to(dtype)
        # One sender at a time: all at once would take K times the memory of the result.
        total = torch.zeros((), dtype=like.dtype, device=like.device)
        for k in range(num_senders):
            code = {part: y[:, min(k, y.shape[1] - 1)] for part, y in codes.items()}
            decoded = self.decode(code, like).to(like.dtype)
            share = 1 / num_senders if weights is None else spread(weights[:, k], decoded)
            total = total + share * decoded
        return total.to(dtype)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class TopK(Codec, steady=True):
    """The k values of largest magnitude of each tensor, with their indices; the others count as 0.

    Among equal magnitudes the first are sent. Bytes: k (b + 4), with 32-bit indices.

    Args:
        fraction: k / n, in (0, 1]; 0.01 if neither is given. At least one value per tensor is sent.
        k: values per tensor, at most all, instead of `fraction`.

    >>> code = TopK(k=1).encode(torch.tensor([[1.0, -3.0, 2.0]]))
    >>> code
    {'values': tensor([[-3.]]), 'indices': tensor([[1]], dtype=torch.int32)}
    >>> TopK(k=1).decode(code, like=torch.zeros(1, 3))
    tensor([[ 0., -3.,  0.]])
    """

    def __init__(self, fraction: float | None = None, k: int | None = None) -> None:
        if fraction is not None and k is not None:
            raise ValueError(f"fraction={fraction!r} and k={k!r} both set how many values are sent: give one of them.")
        fraction = DEFAULT_FRACTION if fraction is None and k is None else fraction
        self.fraction = fraction if fraction is None else check_fraction("fraction", fraction)
        self.k = check.optional_integer("k", k, what="the number of values sent per tensor")

    def num_values(self, like: Tensor) -> int:
        n = size_of(like)
        return min(n, self.k) if self.k is not None else part_of(n, self.fraction or DEFAULT_FRACTION)

    def encode(self, x: Tensor, draw: Draw | None = None) -> Code:
        flat = x.reshape(len(x), size_of(x))
        indices = strongest(flat, self.num_values(x))
        return {"values": flat.gather(1, indices), "indices": indices.to(index_dtype(flat.shape[1]))}

    def decode(self, code: Code, like: Tensor) -> Tensor:
        values, indices = code["values"], code["indices"].long()
        return _shaped(values.new_zeros(len(values), size_of(like)).scatter(1, indices, values), like)

    def average(self, codes: Code, like: Tensor, weights: Tensor | None = None) -> Tensor:
        """Sum only the few values that were sent."""
        values, indices = codes["values"].to(wider(like.dtype)), codes["indices"].long()  # [R, K, k]
        values = values / values.shape[1] if weights is None else values * weights.to(values)[..., None]
        total = values.new_zeros(len(values), size_of(like))
        total.scatter_add_(1, indices.expand_as(values).flatten(1), values.flatten(1))
        return _shaped(total, like).to(like.dtype)


class RandomK(Codec, steady=True):
    """The values of each tensor on randomly drawn coordinates, the same on every node; the others count as 0.

    The coordinates come from a seed that all nodes share and are not sent. Bytes: m b, m = max(1, round(fraction n)).

    Args:
        fraction: the fraction of the values of each tensor, in (0, 1].
        unbiased: multiply the values sent by n / m, so that their expectation is the tensor. Do not combine it with
            error feedback, which sends the omitted values later and would then diverge.

    >>> RandomK(fraction=0.1).encode(torch.ones(2, 30), Draw(torch.Generator, torch.arange(2)))["values"].shape
    torch.Size([2, 3])
    """

    shared = ("indices",)

    def __init__(self, fraction: float = DEFAULT_FRACTION, unbiased: bool = False) -> None:
        self.fraction = check_fraction("fraction", fraction)
        self.unbiased = check.flag("unbiased", unbiased)

    @property
    def contractive(self) -> bool:  # type: ignore[override]
        return not self.unbiased

    def num_values(self, like: Tensor) -> int:
        return part_of(size_of(like), self.fraction)

    def encode(self, x: Tensor, draw: Draw | None = None) -> Code:
        flat = x.reshape(len(x), size_of(x))
        n, m = flat.shape[1], self.num_values(x)
        indices = placed(_needed(draw, self).subset(n, m), x.device)
        values = flat.index_select(1, indices)
        return {"values": values * (n / max(1, m)) if self.unbiased else values, "indices": indices[None]}

    def decode(self, code: Code, like: Tensor) -> Tensor:
        values = code["values"]
        flat = values.new_zeros(len(values), size_of(like)).index_copy_(1, code["indices"][0], values)
        return _shaped(flat, like)

    def average(self, codes: Code, like: Tensor, weights: Tensor | None = None) -> Tensor:
        """Decode the mean of the values sent, once, since all senders have the same coordinates."""
        values = codes["values"].to(wider(like.dtype))  # [R, K, m]
        mean = values.mean(1) if weights is None else (weights.to(values)[:, None] @ values)[:, 0]
        return self.decode({"values": mean, "indices": codes["indices"][0]}, like).to(like.dtype)


class ChunkedTopK(Codec, steady=True):
    """The k values of largest magnitude of each chunk, with their indices in it; the others count as 0.

    A matrix is cut into chunks of `chunk` x `chunk`, a vector into chunks of chunk^2 values, and a side that is not a
    multiple into parts of its largest divisor below that. A tensor of more dimensions is reshaped to a matrix,
    `[shape[0], rest]`. Among equal magnitudes the first are sent.

    Bytes: k b per chunk, and k ceil(log2(values of a chunk)) / 8 for the indices: 12 bits each in a chunk of 64 x 64.

    Args:
        k: values per chunk, at most all.
        chunk: the longest side of a chunk.
        over: the nodes over which a coordinate is averaged: "all", with a 0 from those that did not send it, or only
            its "senders".

    >>> x = torch.tensor([[[1.0, 5.0, 0.0, 2.0], [0.0, 3.0, 0.0, -4.0]]])  # two chunks of 2 x 2
    >>> codec = ChunkedTopK(k=1, chunk=2)
    >>> code = codec.encode(x)
    >>> code  # places 1 and 3, two bits each
    {'values': tensor([[ 5., -4.]]), 'places': tensor([[13]], dtype=torch.uint8)}
    >>> codec.decode(code, like=x)
    tensor([[[ 0.,  5.,  0.,  0.],
             [ 0.,  0.,  0., -4.]]])

    Reference: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", arXiv 2508.15706. Deviation:
    the indices into a small chunk take fewer than 12 bits.
    """

    def __init__(self, k: int = 64, chunk: int = 64, over: Averaged = "all") -> None:
        self.k = check.integer("k", k, what="the number of values sent per chunk")
        self.chunk = check.integer("chunk", chunk, what="the longest side of a chunk, such as 64")
        self.over = check.choice("over", over, get_args(Averaged))

    def cut(self, like: Tensor) -> Grid:
        """Return the grid of chunks of a tensor `[L, *]`.

        >>> ChunkedTopK().cut(torch.zeros(1, 128, 784)), ChunkedTopK().cut(torch.zeros(1, 8192))
        (Grid(rows=2, columns=14, height=64, width=56), Grid(rows=1, columns=2, height=1, width=4096))
        """
        shape = tuple(like.shape[1:])
        return grid(shape, self.chunk if len(shape) > 1 else self.chunk**2)

    def num_values(self, like: Tensor) -> int:
        cut = self.cut(like)
        return cut.chunks * min(self.k, cut.area)

    def encode(self, x: Tensor, draw: Draw | None = None) -> Code:
        cut = self.cut(x)
        chunks = to_chunks(x, cut).flatten(2)  # [L, chunks, area]
        places = strongest(chunks, self.k)
        values = chunks.gather(-1, places).flatten(1)
        return {"values": values, "places": pack(places.flatten(1), bits_for(cut.area))}

    def decode(self, code: Code, like: Tensor) -> Tensor:
        cut, values = self.cut(like), code["values"]
        total = values.new_zeros(len(values), cut.chunks * cut.area)
        return self._joined(total.scatter(1, self._where(code["places"], cut), values), like)

    def average(self, codes: Code, like: Tensor, weights: Tensor | None = None) -> Tensor:
        """Sum only the few values that were sent, and divide by the weight of all nodes, or of their senders."""
        values, cut = codes["values"].to(wider(like.dtype)), self.cut(like)  # [R, K, m]
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
        return self._joined(total, like).to(like.dtype)

    def _where(self, packed: Tensor, cut: Grid) -> Tensor:
        """Return the indices into all chunks together, `[R, bytes]` -> `[R, chunks k]`."""
        k = min(self.k, cut.area)
        places = unpack(packed, bits_for(cut.area), cut.chunks * k).long().view(len(packed), cut.chunks, k)
        return (places + torch.arange(cut.chunks, device=packed.device)[:, None] * cut.area).flatten(1)

    def _joined(self, flat: Tensor, like: Tensor) -> Tensor:
        cut = self.cut(like)
        return from_chunks(flat.view(len(flat), cut.chunks, cut.height, cut.width), cut, like.shape[1:])


class Chain(Codec):
    """Two codecs in sequence: the second encodes the values that the first sends.

    Bytes: those of the first without its values, plus those of the second for these values.

    Args:
        first: TopK, ChunkedTopK or RandomK.
        second: any other codec.

    Raises:
        TypeError: if the first codec sends no values, or an argument is not a codec.

    >>> import torch
    >>> from vecgym.compress import Quantise, TopK
    >>> codec, x = Chain(TopK(k=2), Quantise(2)), torch.tensor([[1.0, -3.0, 2.0, 3.0]])
    >>> code = codec.encode(x)
    >>> sum(part.nbytes for part in code.values())  # two indices, two values in one byte, a scale
    13
    >>> codec.decode(code, like=x)
    tensor([[ 0., -3.,  0.,  3.]])

    Reference: top-k, then 2 bits: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", arXiv
    2508.15706. Deviation: with `TopK` the k largest values are those of a tensor; `ChunkedTopK` takes each chunk's.
    """

    def __init__(self, first: Codec, second: Codec) -> None:
        for name, codec in {"first": first, "second": second}.items():
            check.instance(name, codec, Codec, "a codec such as TopK(0.01), Quantise(2)")
        first.num_values(torch.empty(1, 1, device="meta"))  # a TypeError if there are none
        self.first, self.second = first, second

    @property
    def shared(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*self.first.shared, *(f"values {part}" for part in self.second.shared))

    @property
    def contractive(self) -> bool:  # type: ignore[override]
        return self.first.contractive and self.second.contractive

    @property
    def steady(self) -> bool:  # type: ignore[override]
        return is_steady(self.first, self.second)

    def encode(self, x: Tensor, draw: Draw | None = None) -> Code:
        code = self.first.encode(x, draw)
        values = self.second.encode(code.pop("values"), draw)
        return {**code, **{f"values {part}": y for part, y in values.items()}}

    def decode(self, code: Code, like: Tensor) -> Tensor:
        return self.first.decode(self._read(code, like), like)

    def average(self, codes: Code, like: Tensor, weights: Tensor | None = None) -> Tensor:
        senders = next(y.shape[:2] for part, y in codes.items() if part not in self.shared)
        rows = {part: y.expand(*senders, *y.shape[2:]).flatten(0, 1) for part, y in codes.items()}
        values = self._read(rows, like)["values"].unflatten(0, senders)
        rest = {part: y for part, y in codes.items() if not part.startswith("values ")}
        return self.first.average({**rest, "values": values}, like, weights)

    def _read(self, code: Code, like: Tensor) -> Code:
        """Return the code of the first codec, parts `[R, ...]`."""
        parts = {name.removeprefix("values "): y for name, y in code.items() if name.startswith("values ")}
        rest = {name: y for name, y in code.items() if not name.startswith("values ")}
        return {**rest, "values": self.second.decode(parts, like.new_empty(1, self.first.num_values(like)))}


class Quantise(Codec, steady=True):
    """Integers of a few bits, and one scale per tensor and node: x ~ scale q, scale = max |x| / (2^(bits-1) - 1).

    The scale is sent in float32 whatever the tensor's dtype. Bytes: ceil(n bits / 8) + 4, with two or four values per
    byte.

    Args:
        bits: 8, 4 or 2; two bits encode -1, 0 and 1.
        stochastic: round up with the probability that makes the expectation exact, keyed by the node; otherwise round
            to the nearest integer, ties to even.

    >>> code = Quantise(8).encode(torch.tensor([[127.0, -20.4, 0.0]]))
    >>> code
    {'values': tensor([[127, -20,   0]], dtype=torch.int8), 'scale': tensor([1.])}
    >>> Quantise(8).decode(code, like=torch.zeros(1, 3))
    tensor([[127., -20.,   0.]])
    """

    def __init__(self, bits: int = 8, stochastic: bool = False) -> None:
        self.bits = check_bits("bits", bits)
        self.stochastic = check.flag("stochastic", stochastic)

    @property
    def limit(self) -> int:
        """The largest integer.

        >>> Quantise(8).limit, Quantise(4).limit, Quantise(2).limit
        (127, 7, 1)
        """
        return 2 ** (self.bits - 1) - 1

    def encode(self, x: Tensor, draw: Draw | None = None) -> Code:
        flat = x.reshape(len(x), size_of(x))
        scale = _unit(flat, self.limit)
        level = flat / scale[:, None].to(flat.dtype)
        if self.stochastic:
            drawn = _needed(draw, self).uniform(flat.shape[1], flat.dtype)
            level = (level + placed(drawn, x.device)).floor_()
        else:
            level.round_()
        integers = level.clamp_(-self.limit, self.limit).to(torch.int8)  # the scale was rounded: 127.00001 is 127
        values = integers if self.bits == 8 else pack(integers + (self.limit + 1), self.bits)
        return {"values": values, "scale": scale}

    def decode(self, code: Code, like: Tensor) -> Tensor:
        values = code["values"]
        if self.bits < 8:
            values = unpack(values, self.bits, size_of(like)).to(torch.int8) - (self.limit + 1)
        flat = values.to(like.dtype) * code["scale"][:, None].to(like.dtype)
        return _shaped(flat, like)


class E3M0(Codec, steady=True):
    """Four-bit floats with a sign, 3 bits of exponent and no mantissa: x ~ scale s, s in {0, +-1, +-2, +-4, ... +-64}.

    scale = max |x| / 64 per tensor and node, sent in float32. Values are rounded to the nearest level, ties to the
    smaller one.

    Error: |x - C(x)| <= max(|x| / 3, max |x| / 128), and at most |x|. Bytes: ceil(n / 2) + 4, two values per byte.

    >>> code = E3M0().encode(torch.tensor([[64.0, -20.0, 5.0, 0.4]]))
    >>> code
    {'values': tensor([[215,   3]], dtype=torch.uint8), 'scale': tensor([1.])}
    >>> E3M0().decode(code, like=torch.zeros(1, 4))
    tensor([[ 64., -16.,   4.,   0.]])

    Reference: Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512. The paper only
    names the format; the scale per tensor and the exponent that stands for zero are our choice.
    """

    def encode(self, x: Tensor, draw: Draw | None = None) -> Code:
        flat = x.reshape(len(x), size_of(x)).to(wider(x.dtype))
        scale = _unit(flat, E3M0_LARGEST)
        level = (flat / scale[:, None].to(flat.dtype)).abs_()
        mantissa, exponent = torch.frexp(level)  # mantissa in [0.5, 1): the next power of two is nearer above 0.75
        exponent = (exponent + (mantissa > 0.75)).clamp_(1, 7) * (level > 0.5)
        return {"values": pack(exponent + (flat < 0) * E3M0_SIGN, 4), "scale": scale}

    def decode(self, code: Code, like: Tensor) -> Tensor:
        bits = unpack(code["values"], 4, size_of(like))
        exponent, negative = bits & (E3M0_SIGN - 1), bits >= E3M0_SIGN
        level = (torch.ones_like(bits) << exponent) >> 1  # 0, 1, 2, 4, ... 64
        scale = code["scale"].to(wider(like.dtype))
        decoded = torch.where(negative, -scale[:, None], scale[:, None]) * level
        return _shaped(decoded.to(like.dtype), like)


class Cast(Codec, steady=True):
    """Values in another floating-point type, rounded to the nearest, ties to even.

    The types of eight bits have a scale per tensor and node, sent in float32: scale = m / max |x|, with the largest
    number m of the type, 448 or 57344, and x ~ q / scale. The others have none: in "float16" values beyond 65504 become
    infinite.

    Bytes: those of the type, and 4 for a scale.

    Args:
        dtype: "bfloat16", "float16", "float32" (of float64 values), "float8_e4m3fn" or "float8_e5m2", or torch's type.

    >>> x = torch.tensor([[257.0, 1.01, -448.0]])
    >>> Cast("bfloat16").decode(Cast("bfloat16").encode(x), like=x)
    tensor([[ 256.0000,    1.0078, -448.0000]])
    >>> Cast("float8_e4m3fn").decode(Cast("float8_e4m3fn").encode(x), like=x)
    tensor([[ 256.,    1., -448.]])

    Reference: the scale is that of torchft (github.com/meta-pytorch/torchft, torchft/quantization.py).
    """

    def __init__(self, dtype: str | torch.dtype = "bfloat16") -> None:
        self.dtype = check.choice("dtype", str(dtype).removeprefix("torch."), CASTS)

    @property
    def type(self) -> torch.dtype:
        """The type of torch.

        >>> Cast().type
        torch.bfloat16
        """
        return getattr(torch, self.dtype)

    def encode(self, x: Tensor, draw: Draw | None = None) -> Code:
        flat = x.reshape(len(x), size_of(x))
        if self.type.itemsize > 1:
            return {"values": flat.to(self.type)}
        scale = torch.finfo(self.type).max / _largest(flat).float()
        scale = torch.where(scale.isinf(), 1.0, scale)  # of zeros
        # As bytes, since torch can hardly do more with the types of eight bits than convert them.
        return {"values": (flat * scale[:, None].to(flat.dtype)).to(self.type).view(torch.uint8), "scale": scale}

    def decode(self, code: Code, like: Tensor) -> Tensor:
        values = code["values"]
        if "scale" in code:
            values = values.view(self.type).to(wider(like.dtype)) / code["scale"][:, None].to(wider(like.dtype))
        return _shaped(values.to(like.dtype), like)


class StatQuantise(Codec, steady=True):
    """The index of a bin for each value, and the mean of the values in each bin.

    B = 2^bits bins of equal width w = sigmas std / B are centred on the mean m of the tensor: x is in bin
    round((x - m) / w) + B / 2, the first and the last bin being unbounded. It is decoded to the mean of its bin, so the
    mean of a tensor is preserved, and the only error is the spread within the bins: |x - C(x)|^2 <= |x|^2.

    The means of the bins are sent in float32 whatever the tensor's dtype. Bytes: ceil(n bits / 8) + 4 * 2^bits.

    Args:
        bits: 8, 4 or 2.
        sigmas: the width of all bins together, in standard deviations: 6 covers 3 on either side.

    >>> x = torch.tensor([[-2.0, -2.2, 2.0, 2.4]])
    >>> code = StatQuantise(2).encode(x)
    >>> code
    {'values': tensor([[245]], dtype=torch.uint8), 'means': tensor([[ 0.0000, -2.1000,  0.0000,  2.2000]])}
    >>> StatQuantise(2).decode(code, like=x)
    tensor([[-2.1000, -2.1000,  2.2000,  2.2000]])

    Reference: hivemind's uniform quantisation (github.com/learning-at-home/hivemind), with 8 bits as in OpenDiLoCo
    (arXiv 2407.07852), with 2 as in SparseLoCo (arXiv 2508.15706; github.com/tplr-ai/templar). No deviation from the
    latter's code, which covers 6 standard deviations in total. With 6 on either side, sigmas=12, all but the largest
    values would be in one of the four bins.
    """

    def __init__(self, bits: int = 8, sigmas: float = 6.0) -> None:
        self.bits = check_bits("bits", bits)
        self.sigmas = check.number("sigmas", sigmas, "(0, inf)", "the width of all bins in standard deviations")

    def encode(self, x: Tensor, draw: Draw | None = None) -> Code:
        n, count = size_of(x), 2**self.bits
        flat = x.reshape(len(x), n).to(wider(x.dtype))
        bins = self._places(flat).nan_to_num_(0.0).clamp_(0, count - 1).long()
        total = flat.new_zeros(len(x), count).scatter_add_(1, bins, flat)
        number = flat.new_zeros(len(x), count).scatter_add_(1, bins, torch.ones_like(flat))
        return {"values": pack(bins, self.bits), "means": (total / number.clamp_(min=1)).float()}

    def _places(self, flat: Tensor) -> Tensor:
        """Return the number of each value's bin, in an endless row of them: `[L, n]`."""
        n, count = flat.shape[1], 2**self.bits
        centred = flat - flat.sum(1, keepdim=True) / max(1, n)
        std = (centred.square().sum(1, keepdim=True) / max(1, n - 1)).sqrt()
        width = (self.sigmas * std / count).clamp(min=torch.finfo(flat.dtype).tiny)
        return (centred / width + count // 2).round_()

    def decode(self, code: Code, like: Tensor) -> Tensor:
        bins = unpack(code["values"], self.bits, size_of(like)).long()
        return _shaped(code["means"].to(like.dtype).gather(1, bins), like)


class CentralBins(StatQuantise, steady=True):
    """`StatQuantise` with bins around 0: m = 0 and std = sqrt(|x|^2 / (n - 1)), x in bin round(x / w) + B / 2.

    >>> x = torch.tensor([[-2.0, -2.2, 2.0, 2.4]])
    >>> CentralBins(8).decode(CentralBins(8).encode(x), like=x)
    tensor([[-2.0000, -2.2000,  2.0000,  2.4000]])

    Reference: github.com/PrimeIntellect-ai/prime, src/zeroband/C/csrc/compression.cpp. Deviation: a value half-way
    between two bins goes to the even one.
    """

    def _places(self, flat: Tensor) -> Tensor:
        n, count = flat.shape[1], 2**self.bits
        norm = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
        width = (norm * (self.sigmas / count / max(1, n - 1) ** 0.5)).clamp(min=torch.finfo(flat.dtype).tiny)
        return (flat * (1 / width)).round_() + count // 2  # rounded before it is moved, as in the program


class Sign(Codec, steady=True):
    """The sign of each value, and the mean magnitude per tensor and node: x ~ mean|x| sign(x).

    A 0 is sent as positive. The mean is sent in float32 whatever the tensor's dtype. Bytes: ceil(n / 8) + 4.

    >>> code = Sign().encode(torch.tensor([[1.0, -2.0, 3.0]]))
    >>> code
    {'values': tensor([[5]], dtype=torch.uint8), 'scale': tensor([2.])}
    >>> Sign().decode(code, like=torch.zeros(1, 3))
    tensor([[ 2., -2.,  2.]])
    """

    def encode(self, x: Tensor, draw: Draw | None = None) -> Code:
        flat = x.reshape(len(x), size_of(x))
        scale = flat.abs().mean(1) if flat.shape[1] else flat.sum(1)  # of an empty tensor: 0
        return {"values": pack(flat >= 0, 1), "scale": scale.float()}

    def decode(self, code: Code, like: Tensor) -> Tensor:
        sign = unpack(code["values"], 1, size_of(like)).to(like.dtype).mul_(2).sub_(1)
        return _shaped(sign.mul_(code["scale"][:, None].to(like.dtype)), like)


# ---------------------------------------------------------------------------------------------------- small parts


def gathered_codes(codes: Codes, codec: Codec, gather: Callable[[Code], Code]) -> Codes:
    """Gather every node's codes, `[1, K, ...]`, in one collective; shared parts, `[1, 1, ...]`, are not sent."""
    sent = {f"{name}/{part}": y for name, code in codes.items() for part, y in code.items() if part not in codec.shared}
    received = gather(sent)
    return {
        name: {part: received.get(f"{name}/{part}", y[:, None]) for part, y in code.items()}
        for name, code in codes.items()
    }


def decode_all(code: Code, codec: Codec, like: Tensor) -> Tensor:
    """Decode the codes of K nodes: `[R, K, ...]` -> `[R, K, *]`."""
    sent = next(y for part, y in code.items() if part not in codec.shared)
    wide = {part: y.expand(sent.shape[0], sent.shape[1], *y.shape[2:]) for part, y in code.items()}
    return codec.decode({part: wide[part].flatten(0, 1) for part in wide}, like).unflatten(0, sent.shape[:2])


def part_of(n: int, fraction: float) -> int:
    """Return a fraction of n, rounded, and at least one.

    >>> part_of(1000, 0.0105), part_of(10, 0.01)
    (10, 1)
    """
    return min(n, max(1, round(fraction * n)))


def index_dtype(n: int) -> torch.dtype:
    """Return the integer dtype of indices into n values."""
    return torch.int32 if n <= 2**31 else torch.int64


def check_fraction(name: str, value: Any) -> float:
    """Return `value` if it is a number in (0, 1].

    >>> check_fraction("fraction", 2)
    Traceback (most recent call last):
    ...
    ValueError: fraction=2 must be a number in (0, 1]: the fraction of the values that is sent, such as 0.01.
    """
    return check.number(name, value, "(0, 1]", "the fraction of the values that is sent, such as 0.01")


def check_bits(name: str, value: Any) -> int:
    """Return `value` if it is 2, 4 or 8.

    >>> check_bits("quantization_bits", 16)
    Traceback (most recent call last):
    ...
    ValueError: quantization_bits=16 must be 8, 4 or 2: the bits per value.
    """
    if not check.is_integer(value) or value not in (2, 4, 8):
        raise ValueError(f"{name}={value!r} must be 8, 4 or 2: the bits per value.")
    return int(value)


def size_of(x: Tensor) -> int:
    """Count the values of one node."""
    return math.prod(x.shape[1:])


def _shaped(flat: Tensor, like: Tensor) -> Tensor:
    """Reshape `[R, n]` to `[R, *shape]` of `like`, which may have no elements."""
    return flat.view(len(flat), *like.shape[1:])


def never_zero(scale: Tensor) -> Tensor:
    """Return a scale in float32 that is never 0, so that a tensor can be divided by it; nan stays nan."""
    return scale.float().clamp(min=torch.finfo(torch.float32).tiny)


def _unit(flat: Tensor, levels: int) -> Tensor:
    """Return the scale at which the largest magnitude of each row is `levels`: `[L, n]` -> `[L]`."""
    return never_zero(_largest(flat) / levels)


def _largest(flat: Tensor) -> Tensor:
    """Return the largest magnitude of each row, `[L, n]` -> `[L]`; 0 of an empty one."""
    return torch.linalg.vector_norm(flat, math.inf, dim=1) if flat.shape[1] else flat.sum(1)


def _needed(draw: Draw | None, codec: Codec) -> Draw:
    if draw is None:
        raise ValueError(f"{codec!r} draws random numbers: call encode(x, draw).")
    return draw


# --------------------------------------------------------------------------------- small integers in bytes


def pack(values: Tensor, bits: int) -> Tensor:
    """Pack integers of `bits` bits into bytes, the first in the lowest bits: `[L, n]` -> uint8 `[L, bytes]`.

    Rows of n values take ceil(n bits / 8) bytes.

    >>> pack(torch.tensor([[1, 2, 15]], dtype=torch.uint8), 4)  # 1 + 2 * 16, 15
    tensor([[33, 15]], dtype=torch.uint8)
    >>> pack(torch.tensor([[4095, 1]]), 12)  # 255, 15 + 1 * 16, 0
    tensor([[255,  31,   0]], dtype=torch.uint8)
    """
    values = values.to(torch.uint8 if bits <= 8 else torch.int32)
    if 8 % bits:  # values cross byte boundaries: bit by bit
        shifts = torch.arange(bits, dtype=values.dtype, device=values.device)
        return pack(((values[..., None] >> shifts) & 1).flatten(1), 1)
    to_byte = 8 // bits
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % to_byte))
    shifted = padded.view(len(values), padded.shape[1] // to_byte, to_byte) << _shifts(bits, values.device)
    return shifted.sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int, n: int) -> Tensor:
    """Invert `pack` for n values: uint8 `[L, bytes]` -> uint8 `[L, n]`, int32 above 8 bits.

    >>> unpack(torch.tensor([[255, 31, 0]], dtype=torch.uint8), 12, 2)
    tensor([[4095,    1]], dtype=torch.int32)
    """
    if 8 % bits:
        dtype = torch.uint8 if bits < 8 else torch.int32
        single = unpack(packed, 1, n * bits).to(dtype).unflatten(1, (n, bits))
        return (single << torch.arange(bits, dtype=dtype, device=packed.device)).sum(-1, dtype=dtype)
    values = (packed[..., None] >> _shifts(bits, packed.device)) & (2**bits - 1)
    return values.flatten(1)[:, :n]


def pack_trits(values: Tensor) -> Tensor:
    """Pack values 0, 1 and 2, five per byte: uint8 `[L, n]` -> `[L, ceil(n / 5)]`.

    >>> pack_trits(torch.tensor([[2, 2, 2, 2, 2, 1]], dtype=torch.uint8))
    tensor([[242,   1]], dtype=torch.uint8)
    """
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % TRITS))
    digits = padded.view(len(values), padded.shape[1] // TRITS, TRITS)
    return (digits * _powers(values.device)).sum(-1, dtype=torch.uint8)


def unpack_trits(packed: Tensor, n: int) -> Tensor:
    """Invert `pack_trits` for n values: uint8 `[L, bytes]` -> `[L, n]`.

    >>> unpack_trits(torch.tensor([[242, 1]], dtype=torch.uint8), 6)
    tensor([[2, 2, 2, 2, 2, 1]], dtype=torch.uint8)
    """
    digits = torch.div(packed[..., None], _powers(packed.device), rounding_mode="floor") % 3
    return digits.flatten(1)[:, :n]


def bits_for(n: int) -> int:
    """Return the number of bits of an integer from 0 to n - 1, at least one.

    >>> bits_for(4096), bits_for(4097), bits_for(1)
    (12, 13, 1)
    """
    return max(1, (n - 1).bit_length())


def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=device)


def _powers(device: torch.device) -> Tensor:
    return 3 ** torch.arange(TRITS, dtype=torch.uint8, device=device)
