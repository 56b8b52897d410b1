"""Compression of the messages of nodes, and its bytes.

- Codecs: Codec, the base; TopK, ChunkedTopK, RandomK; Cast, to another type; Quantise, StatQuantise, CentralBins;
  E3M0, four-bit floats; QSGD, Natural, Ternary, Sign; Chain, two in sequence; PowerSGD, through two averages; a
  Compressor is one of these
- By name: make_codec("topk"); check_fraction, check_bits

Properties of the codes of n values, measured by `benchmarks/compression.py`:

| code                          | unbiased, E C(x) = x | squared error over squared norm, on average at most|
|-------------------------------|----------------------|----------------------------------------------------|
| `TopK`                        | no                   | 1 - k / n                                          |
| `ChunkedTopK`                 | no                   | 1 - k / values of a chunk                          |
| `RandomK`; `unbiased=True`    | no; yes              | 1 - m / n; n / m - 1                               |
| `Quantise`; `stochastic=True` | no; yes              | n / (4 (2^(bits - 1) - 1)^2), both                 |
| `StatQuantise`                | no                   | 1                                                  |
| `Cast("bfloat16")`            | no                   | 2^-16                                              |
| `Cast("float8_e4m3fn")`       | no                   | 2^-8 + n / (2^10 448)^2                            |
| `E3M0`                        | no                   | min(1, 1 / 9 + n / 128^2)                          |
| `QSGD`; `unbiased=True`       | no; yes              | 1 - 1 / (1 + w); w = min(n / s^2, sqrt(n) / s)     |
| `Ternary`; `unbiased=True`    | no; yes              | 1 - 1 / (1 + w); w = (sqrt(n) - 1) / 2             |
| `Natural`                     | yes                  | 1 / 8                                              |
| `Sign`                        | no                   | 1 - (sum of the magnitudes)^2 / (n squared norm)   |

Error feedback needs less than 1 (or errors below the largest value, as with `Quantise` and `Ternary`): otherwise
residuals grow without bound. Codes with an argument `unbiased` are by default the multiple of the unbiased code that is
nearest to x in the mean square, and so *contractive*: always less than 1.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from vecgym.compress.codecs import (
    CASTS,
    E3M0,
    Cast,
    CentralBins,
    Chain,
    ChunkedTopK,
    Codec,
    Quantise,
    RandomK,
    Sign,
    StatQuantise,
    TopK,
    check_bits,
    check_fraction,
)
from vecgym.compress.powersgd import PowerSGD
from vecgym.compress.stochastic import QSGD, Natural, Ternary
from vecgym.core import check

__all__ = [
    "E3M0", "QSGD", "Cast", "CentralBins", "Chain", "ChunkedTopK", "Codec", "Compressor", "Natural", "PowerSGD",
    "Quantise", "RandomK", "Sign", "StatQuantise", "Ternary", "TopK", "check_bits", "check_fraction", "make_codec",
]  # fmt: skip

Compressor: TypeAlias = Codec | PowerSGD

METHODS: dict[str, Callable[..., Compressor]] = {
    "topk": TopK,
    "randomk": RandomK,
    **{f"int{bits}": functools.partial(Quantise, bits) for bits in (8, 4, 2)},
    **{f"stat{bits}": functools.partial(StatQuantise, bits) for bits in (8, 4, 2)},
    **{dtype: functools.partial(Cast, dtype) for dtype in CASTS},
    "qsgd": QSGD,
    "natural": Natural,
    "ternary": Ternary,
    "sign": Sign,
    "chunktopk": ChunkedTopK,
    "powersgd": PowerSGD,
}


def make_codec(codec: str | Compressor, **options: Any) -> Compressor:
    """Make a codec from its name and options, or return the codec itself.

    >>> make_codec("topk", fraction=0.1), make_codec("int4")
    (TopK(fraction=0.1, k=None), Quantise(bits=4, stochastic=False))
    """
    if isinstance(codec, (Codec, PowerSGD)):
        if options:
            raise TypeError(f"{codec!r} already has its options: give {', '.join(options)} with a name such as 'topk'.")
        return codec
    if not isinstance(codec, str):
        raise TypeError(f"codec={codec!r} must be one of {', '.join(METHODS)}, or a codec such as TopK(0.01).")
    check.choice("codec", codec, METHODS)
    check.keywords(repr(codec), options, inspect.signature(METHODS[codec]).parameters)
    return METHODS[codec](**options)
