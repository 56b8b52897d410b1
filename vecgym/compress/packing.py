"""Pack small integers into bytes."""

from __future__ import annotations

import torch
from torch import Tensor

TRITS = 5  # per byte: 3^5 = 243


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
