"""Bins around the mean, as wide as the standard deviation says."""

from __future__ import annotations

import torch
from torch import Tensor

from vecgym.compress.codecs import Code, Codec, Draw, _shaped, check_bits, size_of
from vecgym.compress.packing import pack, unpack
from vecgym.core import check


class StatQuantise(Codec):
    """The number of a bin for each value, and the mean of the values in each bin.

    B = 2^bits bins of equal width w = sigmas std / B lie around the mean m of the tensor: x is in bin
    round((x - m) / w) + B / 2, the first and the last being open to the outside. It is read as the mean of its bin, so
    the mean of a tensor is kept, and a bin has no error but the spread in it: |x - C(x)|^2 <= |x|^2.

    The means of the bins are sent in float32 whatever the tensor's type. Bytes: ceil(n bits / 8) + 4 * 2^bits.

    Args:
        bits: 8, 4 or 2.
        sigmas: the width of all bins together, in standard deviations: 6 reaches 3 to either side.

    >>> x = torch.tensor([[-2.0, -2.2, 2.0, 2.4]])
    >>> code = StatQuantise(2).encode(x)
    >>> code
    {'values': tensor([[245]], dtype=torch.uint8), 'means': tensor([[ 0.0000, -2.1000,  0.0000,  2.2000]])}
    >>> StatQuantise(2).decode(code, like=x)
    tensor([[-2.1000, -2.1000,  2.2000,  2.2000]])

    Reference: hivemind's uniform quantisation (github.com/learning-at-home/hivemind), in 8 bits as in OpenDiLoCo (arXiv
    2407.07852), in 2 as in SparseLoCo (arXiv 2508.15706; github.com/tplr-ai/templar). No deviation from the latter's
    code, which has 6 standard deviations in all. 6 to either side, sigmas=12, would put all but the largest values into
    one bin of the four.
    """

    def __init__(self, bits: int = 8, sigmas: float = 6.0) -> None:
        self.bits = check_bits("bits", bits)
        self.sigmas = check.number("sigmas", sigmas, "(0, inf)", "the width of all bins in standard deviations")

    def encode(self, x: Tensor, draw: Draw | None = None) -> Code:
        n, count = size_of(x), 2**self.bits
        flat = x.reshape(len(x), n).to(torch.promote_types(x.dtype, torch.float32))
        centred = flat - flat.sum(1, keepdim=True) / max(1, n)
        std = (centred.square().sum(1, keepdim=True) / max(1, n - 1)).sqrt()
        width = (self.sigmas * std / count).clamp(min=torch.finfo(flat.dtype).tiny)
        bins = (centred / width + count // 2).round_().nan_to_num_(0.0).clamp_(0, count - 1).long()
        total = flat.new_zeros(len(x), count).scatter_add_(1, bins, flat)
        number = flat.new_zeros(len(x), count).scatter_add_(1, bins, torch.ones_like(flat))
        return {"values": pack(bins.to(torch.uint8), self.bits), "means": (total / number.clamp_(min=1)).float()}

    def decode(self, code: Code, like: Tensor) -> Tensor:
        bins = unpack(code["values"], self.bits, size_of(like)).long()
        return _shaped(code["means"].to(like.dtype).gather(1, bins), like)
