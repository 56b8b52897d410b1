"""Shared by several commands: values of options, and tables."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

ENGINES = ("auto", "vmap", "loop")  # as in vecgym.engine, whose import would import torch


def _above_0(kind: Callable[[str], float], what: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return parse


count = _above_0(int, "a whole number >= 1")
positive = _above_0(float, "a number > 0")


def add_output(parser: argparse.ArgumentParser, default: str, metavar: str = "DIR") -> None:
    """Add --output; its default is None if it depends on a NAME."""
    path = None if "NAME" in default else Path(default)
    about = f"where the results go ({default})"
    parser.add_argument("--output", type=Path, default=path, metavar=metavar, help=about)


def table(rows: list[list[str]]) -> str:
    """Format a table: the first column flush left, the others flush right.

    >>> print(table([["step", "4"], ["val_loss", "1.25"]]))
    step         4
    val_loss  1.25
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths)))
        for row in rows
    )
