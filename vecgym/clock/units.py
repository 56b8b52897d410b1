"""Bandwidths and times as people write them: "1 Gbit/s", "100 MB/s", "50 ms"."""

from __future__ import annotations

import re
from typing import Any

from vecgym.core import check

PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
BINARY = {"Ki": 2.0**10, "ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
PARTS_OF_A_SECOND = {
    "ns": 1e9,
    "us": 1e6,
    "µs": 1e6,
    "μs": 1e6,
    "ms": 1e3,
    "s": 1.0,
    "min": 1 / 60,
    "h": 1 / 3600,
}

_NUMBER = r"\s*((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*"
_BANDWIDTH = re.compile(_NUMBER + r"([kKMGT]i?|)(bit|bits|b|B|byte|bytes)(?:/s|ps)\s*")
_TIME = re.compile(_NUMBER + f"({'|'.join(PARTS_OF_A_SECOND)})\\s*")


def bits_per_second(name: str, value: Any, what: str = "bits per second") -> float:
    """`value` if it is a number > 0, or the number of a text such as "1 Gbit/s" (bits) or "100 MB/s" (bytes).

    k, M, G and T stand for powers of 1000, Ki, Mi, Gi and Ti of 1024.

    Raises:
        ValueError: for anything else.

    >>> bits_per_second("bandwidth", "1 Gbit/s"), bits_per_second("bandwidth", "100 MB/s")
    (1000000000.0, 800000000.0)
    >>> bits_per_second("bandwidth", "1 Gb")
    Traceback (most recent call last):
    ...
    ValueError: bandwidth='1 Gb' is not a bandwidth: give bits per second as a number > 0, or as a text such as \
"1 Gbit/s" or "100 MB/s" (b and bit: bits, B: bytes).
    """
    if isinstance(value, str):
        found = _BANDWIDTH.fullmatch(value)
        if found is None or float(found[1]) == 0:
            raise ValueError(
                f"{name}={value!r} is not a bandwidth: give {what} as a number > 0, or as a text such as "
                '"1 Gbit/s" or "100 MB/s" (b and bit: bits, B: bytes).'
            )
        bits = 8.0 if found[3] in ("B", "byte", "bytes") else 1.0
        return float(found[1]) * {**PREFIXES, **BINARY}[found[2]] * bits
    return float(check.number(name, value, "(0, inf]", f'{what}, or a text such as "1 Gbit/s"'))


LONGEST_LATENCY = 10.0  # seconds: what is more is a number of milliseconds


def seconds(name: str, value: Any, what: str = "seconds", within: str = "[0, inf)") -> float:
    """`value` if it is a number in an interval, or the number of a text with its unit, such as "50 ms".

    Raises:
        ValueError: for anything else.

    >>> seconds("latency", 0.05), seconds("latency", "50 ms"), seconds("latency", "20us")
    (0.05, 0.05, 2e-05)
    """
    if isinstance(value, str):
        found = _TIME.fullmatch(value)
        if found is None:
            raise ValueError(
                f"{name}={value!r} is not a time: give {what} as a number, or as a text with its unit, such as "
                '"50 ms" or "0.4 s".'
            )
        value = float(found[1]) / PARTS_OF_A_SECOND[found[2]]
    return float(check.number(name, value, within, f'{what}, or a text such as "50 ms"'))


def latency(name: str, value: Any) -> float:
    """The seconds of a latency, at most 10.

    Raises:
        ValueError: for anything else.

    >>> latency("latency", "80 ms")
    0.08
    >>> latency("latency", 80)
    Traceback (most recent call last):
    ...
    ValueError: latency=80 is 80 s for every message; give at most 10 s. Are milliseconds meant? Give "80 ms".
    """
    found = seconds(name, value)
    if found > LONGEST_LATENCY:
        raise ValueError(
            f"{name}={value!r} is {readable_time(found)} for every message; give at most {LONGEST_LATENCY:g} s. Are "
            f'milliseconds meant? Give "{found:g} ms".'
        )
    return found


def readable_bandwidth(bits: float) -> str:
    """Bits per second as a person reads them.

    >>> readable_bandwidth(1e9), readable_bandwidth(2.5e6)
    ('1 Gbit/s', '2.5 Mbit/s')
    """
    for prefix in ("", "k", "M", "G"):
        if bits < 1000:
            return f"{bits:.3g} {prefix}bit/s"
        bits /= 1000
    return f"{bits:.3g} Tbit/s"


def readable_time(value: float) -> str:
    """Seconds as a person reads them.

    >>> [readable_time(x) for x in (0.0, 2e-6, 0.05, 12.345, 754.0, 9000.0, 200000.0)]
    ['0 s', '2 us', '50 ms', '12.3 s', '12.6 min', '2.5 h', '2.31 days']
    """
    if value == 0:
        return "0 s"
    for limit, unit, name in ((1e-3, 1e-6, "us"), (1.0, 1e-3, "ms"), (120.0, 1.0, "s"), (7200.0, 60.0, "min")):
        if value < limit:
            return f"{value / unit:.3g} {name}"
    return f"{value / 3600:.3g} h" if value < 48 * 3600 else f"{value / 86400:.3g} days"
