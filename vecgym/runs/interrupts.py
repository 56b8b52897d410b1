"""Ctrl-C ends a run between two steps."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Collect Ctrl-C instead of raising it in the middle of a step; a second one raises at once.

    Yields a list that is empty until the first Ctrl-C. It stays empty where no handler can be set: outside the main
    thread, and in a sub-interpreter.
    """
    seen: list[int] = []

    def handler(signum: int, frame: Any) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(signum)

    try:
        before = signal.signal(signal.SIGINT, handler)
    except ValueError:
        yield seen
        return
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
