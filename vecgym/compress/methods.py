"""Codecs by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from vecgym.compress.codecs import ChunkedTopK, Codec, Quantise, RandomK, Sign, StatQuantise, TopK
from vecgym.compress.powersgd import PowerSGD
from vecgym.compress.stochastic import QSGD, Natural, Ternary
from vecgym.core import check

Compressor: TypeAlias = Codec | PowerSGD

METHODS: dict[str, Callable[..., Compressor]] = {
    "topk": TopK,
    "randomk": RandomK,
    "int8": functools.partial(Quantise, 8),
    "int4": functools.partial(Quantise, 4),
    "int2": functools.partial(Quantise, 2),
    "stat8": functools.partial(StatQuantise, 8),
    "stat4": functools.partial(StatQuantise, 4),
    "stat2": functools.partial(StatQuantise, 2),
    "qsgd": QSGD,
    "natural": Natural,
    "ternary": Ternary,
    "sign": Sign,
    "chunktopk": ChunkedTopK,
    "powersgd": PowerSGD,
}


def make_codec(method: str | Compressor, **options: Any) -> Compressor:
    """Make a codec from its name and options, or return the codec itself.

    >>> make_codec("topk", fraction=0.1), make_codec("int4")
    (TopK(fraction=0.1, k=None), Quantise(bits=4, stochastic=False))
    """
    if isinstance(method, (Codec, PowerSGD)):
        if options:
            raise TypeError(
                f"{method!r} already has its options: give {', '.join(options)} with a name such as 'topk'."
            )
        return method
    if not isinstance(method, str):
        raise TypeError(f"method={method!r} must be one of {', '.join(METHODS)}, or a codec such as TopK(0.01).")
    check.choice("method", method, METHODS)
    check.keywords(repr(method), options, inspect.signature(METHODS[method]).parameters)
    return METHODS[method](**options)
