"""Bandwidths, times and counts as people write them: "1 Gbit/s", "100 MB/s", "50 ms", "150M"."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vecgym.collectives.ledger import with_prefix
from vecgym.core import check
from vecgym.core.errors import warn

PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
BINARY = {"Ki": 2.0**10, "ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
COUNTS = {**PREFIXES, "B": 1e9}
PARTS_OF_A_SECOND = {"ns": 1e9, "us": 1e6, "µs": 1e6, "μs": 1e6, "ms": 1e3, "s": 1.0, "min": 1 / 60, "h": 1 / 3600}

_NUMBER = r"\s*((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*"
_COUNT = re.compile(_NUMBER + r"([kKMGBT]?)\s*")
_BANDWIDTH = re.compile(_NUMBER + r"([kKMGT]i?|)(bit|bits|b|B|byte|bytes)(?:/s|ps)\s*")
_TIME = re.compile(_NUMBER + f"({'|'.join(PARTS_OF_A_SECOND)})\\s*")


def _parts(name: str, text: str, pattern: re.Pattern[str], kind: str, give: str) -> tuple[Any, ...]:
    """Return the number at the beginning of a text, and the other groups of the pattern."""
    match = pattern.fullmatch(text)
    if match is None:
        raise ValueError(f"{name}={text!r} is not {kind}: give {give}.")
    return float(match[1]), *match.groups()[1:]


def bits_per_second(name: str, value: Any) -> float:
    """Return a bandwidth in bits per second, from a number > 0 or a text such as "1 Gbit/s" or "100 MB/s" (bytes).

    k, M, G and T stand for powers of 1000, Ki, Mi, Gi and Ti of 1024.

    Raises:
        ValueError: for anything else.

    >>> bits_per_second("bandwidth", "1 Gbit/s"), bits_per_second("bandwidth", "100 MB/s")
    (1000000000.0, 800000000.0)
    >>> bits_per_second("bandwidth", "1 Gb")
    Traceback (most recent call last):
    ...
    ValueError: bandwidth='1 Gb' is not a bandwidth: give bits per second as a number > 0, or as a text such as \
"1 Gbit/s" or "100 MB/s" (b: bits, B: bytes).
    """
    if isinstance(value, str):
        give = 'bits per second as a number > 0, or as a text such as "1 Gbit/s" or "100 MB/s" (b: bits, B: bytes)'
        number, prefix, unit = _parts(name, value, _BANDWIDTH, "a bandwidth", give)
        bits = number * {**PREFIXES, **BINARY}[prefix] * (8.0 if unit in ("B", "byte", "bytes") else 1.0)
        return check.number(name, bits, "(0, inf)", f"bits per second, and {value!r} is not")
    return check.number(name, value, "(0, inf]", 'bits per second, or a text such as "1 Gbit/s"')


def count(name: str, value: Any) -> int:
    """Return a whole number >= 1, from a number or a text such as "150M" or "1.5B" (k, M, B or G, T).

    Raises:
        ValueError: for anything else.

    >>> count("parameters", "150M"), count("parameters", "1.5B"), count("parameters", 1000)
    (150000000, 1500000000, 1000)
    """
    give = 'a whole number >= 1, or a text such as "150M" or "1.5B"'
    if isinstance(value, str):
        number, prefix = _parts(name, value, _COUNT, "a count", give)
        value = round(number * COUNTS[prefix])
    return check.integer(name, value, what=give)


LONGEST_LATENCY = 10.0  # seconds: a larger number is probably one of milliseconds


def seconds(name: str, value: Any) -> float:
    """Return a time in seconds, from a number >= 0 or a text with a unit, such as "50 ms".

    Raises:
        ValueError: for anything else.

    >>> seconds("latency", 0.05), seconds("latency", "50 ms"), seconds("latency", "20us")
    (0.05, 0.05, 2e-05)
    """
    if isinstance(value, str):
        give = 'seconds as a number, or as a text with a unit, such as "50 ms" or "0.4 s"'
        number, unit = _parts(name, value, _TIME, "a time", give)
        value = number / PARTS_OF_A_SECOND[unit]
    return check.number(name, value, "[0, inf)", 'seconds, or a text such as "50 ms"')


def latency(name: str, value: Any) -> float:
    """Return a latency in seconds, at most 10.

    Raises:
        ValueError: for anything else.

    >>> latency("latency", "80 ms")
    0.08
    >>> latency("latency", 80)
    Traceback (most recent call last):
    ...
    ValueError: latency=80 is 80 s for every message; give at most 10 s. For milliseconds, give "80 ms".
    """
    delay = seconds(name, value)
    if delay > LONGEST_LATENCY:
        raise ValueError(
            f"{name}={value!r} is {readable_time(delay)} for every message; give at most {LONGEST_LATENCY:g} s. For "
            f'milliseconds, give "{delay:g} ms".'
        )
    return delay


def step_seconds(name: str, value: Any) -> float:
    """Return the seconds of a step.

    >>> step_seconds("seconds", 0.4), step_seconds("seconds", "1100 ms"), step_seconds("seconds", "20 min")
    (0.4, 1.1, 1200.0)
    """
    return seconds(name, value)


def numbers(name: str, value: Any, parse: Callable[[str, Any], float], dims: int = 1, diagonal: float = 0.0) -> Tensor:
    """Return a number, `[K]` or, with `dims=2`, `[K, K]` numbers as a float64 tensor.

    Args:
        parse: (name, value) -> number.
        diagonal: replaces the diagonal of a matrix, which may hold anything: nodes send nothing to themselves.

    Warns:
        VecgymWarning: once, for numbers without a unit that are probably in another one: bandwidths below 100,000
            bit/s, latencies from 1 s on, and steps above 600 s.

    Raises:
        ValueError: for anything else.

    >>> numbers("latency", ["50 ms", 0.1], latency)
    tensor([0.0500, 0.1000], dtype=torch.float64)
    """
    plain = check.has_values(name, value).tolist() if hasattr(value, "tolist") else value
    bare: list[float] = []  # numbers without a unit

    def parsed_of(x: Any) -> float:
        y = parse(name, x)
        bare.extend([] if isinstance(x, str) else [y])
        return y

    if not isinstance(plain, (list, tuple)):
        plain = parsed_of(plain)
    elif plain and all(isinstance(row, (list, tuple)) for row in plain):
        if len({len(row) for row in plain}) > 1:
            raise ValueError(f"{name} has rows of {sorted({len(row) for row in plain})} numbers; give [K, K].")
        plain = [[diagonal if i == j else parsed_of(x) for j, x in enumerate(row)] for i, row in enumerate(plain)]
    else:
        plain = [parsed_of(x) for x in plain]
    parsed = torch.tensor(plain, dtype=torch.float64)
    if parsed.dim() > dims or parsed.numel() == 0 or len(set(parsed.shape)) > 1:
        shapes = ("a number", "a number or [K]", "a number, [K] or [K, K]")[dims]
        raise ValueError(f"{name} has shape {list(parsed.shape)}; give {shapes}.")
    worst, limit, readable, of, unit = UNUSUAL.get(parse, (max, math.inf, str, "", ""))
    if (number := worst([limit, *bare])) != limit:
        warn(f'{name}={number:g} is {readable(number)}{of}: give a unit, such as "{number:g} {unit}".')
    return parsed


def readable_bandwidth(bits: float) -> str:
    """Format a bandwidth in bits per second.

    >>> readable_bandwidth(1e9), readable_bandwidth(2.5e6)
    ('1 Gbit/s', '2.5 Mbit/s')
    """
    return with_prefix(bits, "bit/s")


def readable_time(value: float) -> str:
    """Format a time in seconds.

    >>> [readable_time(x) for x in (0.0, 2e-6, 0.05, 12.345, 754.0, 9000.0, 200000.0)]
    ['0 s', '2 us', '50 ms', '12.3 s', '12.6 min', '2.5 h', '2.31 days']
    """
    if value == 0:
        return "0 s"
    for limit, unit, name in ((1e-3, 1e-6, "us"), (1.0, 1e-3, "ms"), (120.0, 1.0, "s"), (7200.0, 60.0, "min")):
        if value < limit:
            return f"{value / unit:.3g} {name}"
    return f"{value / 3600:.3g} h" if value < 48 * 3600 else f"{value / 86400:.3g} days"


def readable_span(values: Tensor, readable: Callable[[float], str]) -> str:
    """Format a number, or the shape, minimum and maximum of several; of a matrix, without its diagonal.

    >>> readable_span(torch.tensor(2.0), readable_time), readable_span(torch.tensor([0.5, 2.0]), readable_time)
    ('2 s', '[2] of 500 ms to 2 s')
    """
    entries = values[~torch.eye(len(values), dtype=torch.bool)] if values.dim() == 2 and len(values) > 1 else values
    low, high = float(entries.min()), float(entries.max())
    span = readable(low) if low == high else f"{readable(low)} to {readable(high)}"
    return span if values.dim() == 0 else f"{list(values.shape)} of {span}"


# Numbers without a unit beyond these limits are probably in another unit: (the worst of them, limit, ...).
UNUSUAL: dict[Any, tuple[Any, float, Callable[[float], str], str, str]] = {
    bits_per_second: (min, 1e5, readable_bandwidth, "", "Mbit/s"),
    latency: (max, math.nextafter(1.0, 0.0), readable_time, " for every message", "ms"),
    step_seconds: (max, 600.0, readable_time, " for every step", "ms"),
}
