"""Codes that round at random, so that their expectation is the tensor: QSGD, TernGrad, natural compression.

Random numbers are keyed by the run's seed, the step and the node: they are the same in every process.
"""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor
from torch.nn import functional as F

from vecgym.compress.codecs import (
    Code,
    Codec,
    Draw,
    _needed,
    _shaped,
    bits_for,
    never_zero,
    pack,
    pack_trits,
    size_of,
    unpack,
    unpack_trits,
)
from vecgym.core import check
from vecgym.core.devices import placed
from vecgym.core.tree import wider


class Levels(Codec):
    """x ~ scale q with integers |q| <= s, rounded up or down at random; the base of `QSGD` and `Ternary`.

    With `unbiased` E[scale q] = x. Otherwise the scale is multiplied by |x|^2 / E|scale q|^2 of its bucket: the
    multiple nearest to x in the mean square. Its error is always less than |x|^2, as error feedback needs.
    """

    levels: int
    bucket: int | None = None
    unbiased: bool = False

    @abstractmethod
    def _scale(self, x: Tensor) -> Tensor:
        """Return the distance between levels in each bucket, `[L, buckets, size]` -> `[L, buckets]`."""

    def _pack(self, q: Tensor) -> Tensor:
        """Pack integers from 0 to 2 s: `[L, n]` -> `[L, bytes]`."""
        return pack(q, bits_for(2 * self.levels + 1))

    def _unpack(self, packed: Tensor, n: int) -> Tensor:
        return unpack(packed, bits_for(2 * self.levels + 1), n)

    def _buckets(self, flat: Tensor) -> Tensor:
        """Cut `[L, n]` into `[L, buckets, size]`, and pad the last bucket with zeros."""
        n = flat.shape[1]
        size = max(1, n if self.bucket is None else min(n, self.bucket))
        padded = F.pad(flat, (0, -n % size if n else 1))  # of an empty tensor: one bucket with a zero
        return padded.view(len(flat), padded.shape[1] // size, size)

    def encode(self, x: Tensor, draw: Draw | None = None) -> Code:
        n = size_of(x)
        flat = x.reshape(len(x), n).to(wider(x.dtype))
        drawn = placed(_needed(draw, self).uniform(n, flat.dtype), x.device)
        flat = flat.expand(len(drawn), n)
        cut = self._buckets(flat)
        scale = never_zero(self._scale(cut))
        exact = cut / scale[..., None].to(cut.dtype)
        q = (exact.flatten(1)[:, :n] + drawn).floor_().clamp_(-self.levels, self.levels)  # the scale was rounded
        if not self.unbiased:
            square, up = exact.square(), exact - exact.floor()
            power = square.sum(-1)
            scale = scale * (power / (power + (up * (1 - up)).sum(-1)).clamp(min=torch.finfo(power.dtype).tiny)).float()
        return {"values": self._pack(q.nan_to_num_(0.0).to(torch.int32) + self.levels), "scale": scale}

    def decode(self, code: Code, like: Tensor) -> Tensor:
        n, scale = size_of(like), code["scale"]
        q = self._unpack(code["values"], n).to(torch.int32) - self.levels
        cut = self._buckets(q.to(like.dtype))
        return _shaped((cut * scale[..., None].to(like.dtype)).flatten(1)[:, :n].contiguous(), like)


class QSGD(Levels, steady=True):
    """Integers from -s to s, rounded at random, in units of the bucket's 2-norm: x ~ |x| q / s.

    q_j = floor(s x_j / |x| + u_j), u_j uniform in [0, 1): the expectation of |x| q / s is x, and its variance at most
    min(n / s^2, sqrt(n) / s) |x|^2 in a bucket of n values.

    The scale is sent in float32 whatever the tensor's dtype. Bytes: ceil(n bits / 8) + 4 per bucket, with
    bits = ceil(log2(2 s + 1)): 2 for s = 1, 3 for 3, 4 for 7, 8 for 127.

    Args:
        levels: s, at most 32767. s = sqrt(n) makes the variance at most |x|^2.
        bucket: the number of values that share a norm; None: all of a tensor.
        unbiased: send the unbiased code. Otherwise send q / (1 + w), with w = E|C(x) - x|^2 / |x|^2 of the bucket,
            which is contractive, as error feedback needs.

    >>> x, draw = torch.tensor([[3.0, 0.0, -4.0]]), Draw(lambda *ids: torch.Generator(), torch.arange(1))
    >>> codec = QSGD(levels=5, unbiased=True)
    >>> code = codec.encode(x, draw)
    >>> code["values"].nbytes, code["scale"]  # 3 values of 4 bits; |x| / s
    (2, tensor([[1.]]))
    >>> codec.decode(code, like=x)
    tensor([[ 3.,  0., -4.]])

    Reference: Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", arXiv
    1610.02132. Deviations: all levels take the same number of bits, while the paper uses Elias codes, which are shorter
    if most levels are 0; contractive by default.
    """

    def __init__(self, levels: int = 7, bucket: int | None = None, unbiased: bool = False) -> None:
        self.levels = check.integer("levels", levels, what="the number of levels above 0")
        if self.levels > 32767:
            raise ValueError(f"levels={levels} must be at most 32767, where each value takes 16 bits.")
        self.bucket = check.optional_integer("bucket", bucket, what="the number of values that share a norm; None: all")
        self.unbiased = check.flag("unbiased", unbiased)

    @property
    def contractive(self) -> bool:  # type: ignore[override]
        return not self.unbiased

    def _scale(self, x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, dim=-1) / self.levels


class Ternary(Levels, steady=True):
    """-1, 0 or 1 times the largest magnitude of the tensor: x ~ max|x| q, five values per byte.

    q_j is sign(x_j) with probability |x_j| / max|x|, else 0: the expectation of max|x| q is x.

    The scale is sent in float32 whatever the tensor's dtype. Bytes: ceil(n / 5) + 4.

    Args:
        unbiased: see `QSGD`. Error feedback works with both, since no error exceeds the largest value.
        clip: first clip |x_j| to this many standard deviations of the tensor, 2.5 in the paper's experiments. Outliers
            then do not coarsen the other values, and the expectation is the clipped tensor. None: no clipping.

    >>> x, draw = torch.tensor([[2.0, 0.0, -2.0, 2.0]]), Draw(lambda *ids: torch.Generator(), torch.arange(1))
    >>> code = Ternary().encode(x, draw)
    >>> code
    {'values': tensor([[59]], dtype=torch.uint8), 'scale': tensor([[2.]])}
    >>> Ternary().decode(code, like=x)
    tensor([[ 2.,  0., -2.,  2.]])

    Reference: Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning", arXiv
    1705.07878. Deviations: each node has its own scale, not the largest of all; contractive, and without clipping, by
    default.
    """

    levels = 1

    def __init__(self, unbiased: bool = False, clip: float | None = None) -> None:
        self.unbiased = check.flag("unbiased", unbiased)
        what = "standard deviations, such as 2.5; None: no limit"
        self.clip = None if clip is None else check.number("clip", clip, "(0, inf)", what)

    def encode(self, x: Tensor, draw: Draw | None = None) -> Code:
        if self.clip is not None and x.numel():
            limit = self.clip * x.flatten(1).std(1, correction=0) if x.dim() > 1 else torch.zeros_like(x)
            limit = limit.view(-1, *[1] * (x.dim() - 1))
            x = torch.where(limit > 0, x.clamp(-limit, limit), x)
        return super().encode(x, draw)

    def _scale(self, x: Tensor) -> Tensor:
        return x.abs().amax(-1)

    def _pack(self, q: Tensor) -> Tensor:
        return pack_trits(q.to(torch.uint8))

    def _unpack(self, packed: Tensor, n: int) -> Tensor:
        return unpack_trits(packed, n)


class Natural(Codec, steady=True):
    """A sign and a power of two, rounded up or down at random: the expectation is the tensor.

    2^e <= |x| <= 2^(e+1) becomes 2^(e+1) with probability |x| / 2^e - 1, else 2^e. The variance is at most |x|^2 / 8.
    Subnormal numbers become the smallest normal number, or 0.

    Bytes: ceil(n / 8) + ceil(n e / 8), with an exponent of e = 8 bits for float32 and bfloat16, 11 for float64, 5 for
    float16. Values that are not finite are decoded to nan.

    >>> x, draw = torch.tensor([[4.0, -0.5, 0.0]]), Draw(lambda *ids: torch.Generator(), torch.arange(1))
    >>> code = Natural().encode(x, draw)
    >>> code  # 4 = 2^(129 - 127); the second one is negative
    {'exponents': tensor([[129, 126,   0]], dtype=torch.uint8), 'negative': tensor([[2]], dtype=torch.uint8)}
    >>> Natural().decode(code, like=x)
    tensor([[ 4.0000, -0.5000,  0.0000]])

    Reference: Horvath et al., "Natural Compression for Distributed Deep Learning", arXiv 1905.10988. No deviation.
    """

    def encode(self, x: Tensor, draw: Draw | None = None) -> Code:
        flat = x.reshape(len(x), size_of(x))
        drawn = placed(_needed(draw, self).uniform(flat.shape[1], flat.dtype), x.device)
        mantissa, exponent = _fields(flat.dtype)
        bits = flat.abs().view(_integers(flat.dtype)).expand(len(drawn), -1)
        above = (bits & (2**mantissa - 1)).to(flat.dtype) / 2**mantissa  # |x| / 2^e - 1, from 0 to 1
        power = ((bits >> mantissa).to(torch.int32) + (drawn < above)).clamp_(max=2**exponent - 1)
        negative = (flat < 0).expand(len(drawn), -1)
        return {"exponents": pack(power, exponent), "negative": pack(negative, 1)}

    def decode(self, code: Code, like: Tensor) -> Tensor:
        mantissa, exponent = _fields(like.dtype)
        power = unpack(code["exponents"], exponent, size_of(like))
        size = (power.to(_integers(like.dtype)) << mantissa).view(like.dtype)
        size = torch.where(power == 2**exponent - 1, math.nan, size)
        return _shaped(torch.where(unpack(code["negative"], 1, size_of(like)) > 0, -size, size), like)


def _fields(dtype: torch.dtype) -> tuple[int, int]:
    """Return the number of bits of mantissa and exponent."""
    info = torch.finfo(dtype)
    mantissa = -int(math.log2(info.eps))
    return mantissa, info.bits - 1 - mantissa


def _integers(dtype: torch.dtype) -> torch.dtype:
    return {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
