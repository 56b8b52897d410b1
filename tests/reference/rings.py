"""All-reduces that round or encode sums, message by message, as their programs make them.

gloo (gloo/allreduce.cc, `ring`): K chunks
    for i = 0 .. K - 2:  every rank r sends its chunk r + 1 + i to r - 1, which adds its own values to it
    rank r then holds the sum of chunk r, and sends it on to all

PRIME (zeroband/C/csrc/collectives.cpp): 2 K chunks, two of a rank under way
    for step = 1 .. 2 K:  rank r adds the message of step - 2 to its chunk 2 r - step, if there is one;
                          and while step <= 2 K - 2 it sends a code of that chunk to r + 1
    rank r divides its chunks 2 r and 2 r + 1 by K, and sends codes of them on to all

torchft (torchft/collectives.py): every rank sends codes of the i-th ceil(rows / K) rows of a tensor to rank i, which
    adds up what they stand for, divides by K, and sends codes of these rows to all

A code is a function from values `[n]` to what is read of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Code = Callable[[Tensor], Tensor]


class Exact:
    """An average that keeps no residuals, in the form that the algorithms of `tests.reference.compression` take."""

    def __init__(self, reduce: Callable[[list[Tensor]], Tensor]) -> None:
        self.reduce = reduce
        self.residuals: dict[str, list[Tensor]] = {}

    def __call__(self, step: int, name: str, tensors: Sequence[Tensor]) -> Tensor:
        return self.reduce(list(tensors))


def pieces(x: Tensor, size: int, count: int) -> list[Tensor]:
    """Cut `[n]` into `count` chunks, the last of which may be shorter, or empty."""
    return [x[i * size : (i + 1) * size].clone() for i in range(count)]


def coded(x: Tensor, code: Code) -> Tensor:
    return code(x) if x.numel() else x


def gloo(tensors: Sequence[Tensor], code: Code) -> Tensor:
    K, n = len(tensors), tensors[0].numel()
    size = 2 * math.ceil(n / (2 * K))  # two segments to a chunk
    held = [pieces(x.flatten(), size, K) for x in tensors]
    for i in range(K - 1):
        messages = {}
        for rank in range(K):
            chunk = (rank + 1 + i) % K
            messages[(rank - 1) % K, chunk] = coded(held[rank][chunk], code)
        for (rank, chunk), message in messages.items():
            held[rank][chunk] = held[rank][chunk] + message
    return torch.cat([coded(held[rank][rank] / K, code) for rank in range(K)]).view(tensors[0].shape)


def gloo_of(tensors: Sequence[Tensor], code: Code) -> Tensor:
    """The same of tensors of a type to which `code` rounds: all that a rank holds is of that type."""
    K, n = len(tensors), tensors[0].numel()
    size = 2 * math.ceil(n / (2 * K))
    held = [[coded(piece, code) for piece in pieces(x.flatten(), size, K)] for x in tensors]
    for i in range(K - 1):
        messages = {((rank - 1) % K, (rank + 1 + i) % K): held[rank][(rank + 1 + i) % K] for rank in range(K)}
        for (rank, chunk), message in messages.items():
            held[rank][chunk] = coded(held[rank][chunk] + message, code)
    return torch.cat([coded(held[rank][rank] / K, code) for rank in range(K)]).view(tensors[0].shape)


def prime(tensors: Sequence[Tensor], code: Code) -> Tensor:
    K, n = len(tensors), tensors[0].numel()
    count = 2 * K
    held = [pieces(x.flatten(), math.ceil(n / count), count) for x in tensors]
    under_way: dict[tuple[int, int], Tensor] = {}  # (step, receiver)
    for step in range(1, count + 1):
        for rank in range(K):
            chunk = (2 * rank - step) % count
            if step > 2:
                held[rank][chunk] = held[rank][chunk] + under_way.pop((step - 2, rank))
        for rank in range(K):
            if step <= count - 2:
                under_way[step, (rank + 1) % K] = coded(held[rank][(2 * rank - step) % count], code)
    assert not under_way
    return torch.cat([coded(held[c // 2][c] / K, code) for c in range(count)]).view(tensors[0].shape)


def torchft(tensors: Sequence[Tensor], code: Code) -> Tensor:
    K, shape = len(tensors), tensors[0].shape
    rows = [x.reshape(shape[0], -1) if len(shape) > 1 else x.reshape(-1, 1) for x in tensors]
    each = math.ceil(len(rows[0]) / K)
    result = []
    for i in range(len(rows[0])):
        rank, total = i // each, torch.zeros_like(rows[0][0])
        for k in range(K):
            total = total + code(rows[(rank + k) % K][i])
        result.append(code(total / K))
    return torch.cat(result).view(shape)


def cast(dtype: torch.dtype) -> Code:
    return lambda x: x.to(dtype).to(x.dtype)


def eight_bits(x: Tensor) -> Tensor:
    """Integers up to 127 times a scale in float32."""
    scale = (x.abs().max() / 127).to(torch.float32).to(x.dtype)
    return x if scale == 0 else scale * torch.round(x / scale)


def scaled_floats(x: Tensor) -> Tensor:
    """Floats of eight bits, 448 the largest, with a scale in float32."""
    scale = (448 / x.abs().max().to(torch.float32)).to(x.dtype)
    scale = torch.ones_like(scale) if scale.isinf() else scale
    return (x * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale


def bins(x: Tensor) -> Tensor:
    """256 bins of 6 / 256 standard deviations around 0, and the mean of each, in float32."""
    std = math.sqrt(sum(v * v for v in x.tolist()) / max(1, len(x) - 1))
    width = 6 * std / 256
    of_bin: dict[int, list[int]] = {}
    for i, v in enumerate(x.tolist()):
        place = 128 + round(v / width) if width > 0 else 128
        of_bin.setdefault(min(255, max(0, place)), []).append(i)
    read = torch.zeros_like(x)
    for members in of_bin.values():
        read[members] = x[members].mean().to(torch.float32).to(x.dtype)
    return read
