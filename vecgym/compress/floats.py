"""Codes of movements: floats of four bits, and codes that are averaged in float32 whatever the type of the values."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vecgym.compress.codecs import Code, Codec, Draw, Quantise, size_of
from vecgym.compress.packing import pack, unpack

LARGEST = 64  # 2^6: of the eight exponents one stands for zero
SIGN = 8  # the fourth bit


class InFloat32(Codec):
    def average(self, codes: Code, like: Tensor, weights: Tensor | None = None) -> Tensor:
        return super().average(codes, like.to(_wider(like.dtype)), weights).to(like.dtype)


class E3M0(InFloat32):
    """Four-bit floats with a sign, 3 bits of exponent and no mantissa: x ~ scale s, s in {0, +-1, +-2, +-4, ... +-64}.

    scale = max |x| / 64, for each tensor and node, sent in float32. Values go to the nearest level, half-way ones to
    the smaller. Averages are summed in float32, or in the type of the values where that is wider.

    Error: |x - C(x)| <= max(|x| / 3, max |x| / 128), and at most |x|. Bytes: ceil(n / 2) + 4, two values to a byte.

    >>> code = E3M0().encode(torch.tensor([[64.0, -20.0, 5.0, 0.4]]))
    >>> code
    {'values': tensor([[215,   3]], dtype=torch.uint8), 'scale': tensor([1.])}
    >>> E3M0().decode(code, like=torch.zeros(1, 4))
    tensor([[ 64., -16.,   4.,   0.]])

    Reference: Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512. The paper names
    the format; a scale per tensor, and one of the eight exponents for zero, are our choice.
    """

    def encode(self, x: Tensor, draw: Draw | None = None) -> Code:
        flat = x.reshape(len(x), size_of(x)).to(_wider(x.dtype))
        largest = torch.linalg.vector_norm(flat, math.inf, dim=1) if flat.shape[1] else flat.sum(1)  # of nothing: 0
        # Never 0, so that a tensor of zeros has a code; nan stays nan, and what is decoded is nan.
        scale = (largest / LARGEST).float().clamp(min=torch.finfo(torch.float32).tiny)
        level = (flat / scale[:, None].to(flat.dtype)).abs_()
        mantissa, exponent = torch.frexp(level)  # mantissa in [0.5, 1): the next power of two is nearer above 0.75
        exponent = (exponent + (mantissa > 0.75)).clamp_(1, 7) * (level > 0.5)
        return {"values": pack((exponent + (flat < 0) * SIGN).to(torch.uint8), 4), "scale": scale}

    def decode(self, code: Code, like: Tensor) -> Tensor:
        bits = unpack(code["values"], 4, size_of(like))
        exponent, negative = bits & (SIGN - 1), bits >= SIGN
        level = (torch.ones_like(bits) << exponent) >> 1  # 0, 1, 2, 4, ... 64
        scale = code["scale"].to(_wider(like.dtype))
        decoded = torch.where(negative, -scale[:, None], scale[:, None]) * level
        return decoded.to(like.dtype).view(len(bits), *like.shape[1:])


class WideQuantise(InFloat32, Quantise):
    """`Quantise`, with averages that are summed in float32, or in the type of the values where that is wider.

    >>> WideQuantise(8).encode(torch.tensor([[127.0, -20.4]]))["values"]
    tensor([[127, -20]], dtype=torch.int8)
    """


def _wider(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for narrower types, and others as they are."""
    return torch.promote_types(dtype, torch.float32)
