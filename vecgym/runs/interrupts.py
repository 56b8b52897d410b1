"""Ctrl-C ends a run between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Collect Ctrl-C instead of raising it in the middle of a step; a second one raises at once.

    Yields a list that is empty until the first Ctrl-C. Outside the main thread, where no handler can be set, it
    stays empty.
    """
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return

    def handler(signum: int, frame: Any) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(signum)

    try:
        before = signal.signal(signal.SIGINT, handler)
    except ValueError:  # a sub-interpreter
        yield seen
        return
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
