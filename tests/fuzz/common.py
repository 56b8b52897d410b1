"""The common parts of campaigns and their report: a case, and its outcomes."""

from __future__ import annotations

import re
import signal
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

TRIES = 200  # smaller cases that are tried for one failure
PATIENCE = 6


@dataclass(frozen=True)
class Case:
    """One thing to try: options by name, and the seed of whatever it draws."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True)
class Failure:
    """The library did something wrong. Failures of one cause are reported together."""

    cause: str
    message: str


@dataclass(frozen=True)
class Refusal:
    """The library said no, with this message; the report lists the distinct ones, for a person to judge."""

    message: str


Outcome = Failure | Refusal | None


class Hangs(BaseException):
    """A case took longer than it may. Not an `Exception`, so that no handler in the library takes it."""


def attempt(campaign: ModuleType, case: Case, limit_s: float = 60.0) -> Outcome:
    """Run one case; an exception or a hang is a failure like any other."""
    try:
        with time_limit(limit_s):
            outcome: Outcome = campaign.run(case)
            return outcome
    except Hangs as error:
        return Failure(f"hangs in {_place(error)}", f"more than {limit_s:g} s")
    except Exception as error:
        return crash(error)


def crash(error: BaseException) -> Failure:
    """An exception that should not have been: its type and place are the cause."""
    return Failure(f"{type(error).__name__} in {_place(error)}", f"{type(error).__name__}: {error}")


def deliberate(error: BaseException) -> bool:
    """Whether vecgym itself raised it, by a `raise` statement: not what torch or a slip in the code gives."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = bool(frames) and "/vecgym/" in frames[-1].filename.replace("\\", "/")
    return inside and (frames[-1].line or "").startswith("raise")


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `Hangs` in the main thread after so long; for the place, its traceback.

    A busy machine gives a process little of its time: one that has not worked for half as long has up to `PATIENCE`
    times the seconds.
    """
    start, worked = time.monotonic(), time.process_time()

    def stop(number: int, frame: Any) -> None:
        if time.process_time() - worked >= seconds / 2 or time.monotonic() - start >= PATIENCE * seconds:
            raise Hangs

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def shrink(campaign: ModuleType, case: Case, failure: Failure, tries: int = TRIES) -> Case:
    """The simplest case found that still fails for the same cause."""
    simpler = getattr(campaign, "smaller", None)
    if simpler is None:
        return case
    again = True
    while again:
        again = False
        for candidate in simpler(case):
            tries -= 1
            if tries < 0:
                return case
            outcome = attempt(campaign, candidate)
            if isinstance(outcome, Failure) and outcome.cause == failure.cause:
                case, again = candidate, True
                break
    return case


def reproducer(campaign: ModuleType, case: Case) -> str:
    """A script that shows the case; at worst one that runs it by its settings."""
    write = getattr(campaign, "reproducer", None)
    if write is not None:
        return str(write(case))
    module = campaign.__name__
    return f"from tests.fuzz import Case\nimport {module}\n\nprint({module}.run({case!r}))"


def kind(message: str) -> str:
    """A message without numbers and what stands in brackets and quotes: equal ones say the same."""
    inner = r"""\([^()]*\)|\[[^][]*\]|\{[^{}]*\}|'[^']*'|"[^"]*"|\d+"""
    while (shorter := re.sub(inner, "", message)) != message:
        message = shorter
    return message


def _place(error: BaseException) -> str:
    """The innermost line of vecgym in a traceback, or the innermost of all."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if "/vecgym/" in frame.filename.replace("\\", "/")]
    if not frames:
        return "?"
    frame = (inside or list(frames))[-1]
    return f"{Path(frame.filename).name}:{frame.name}"
