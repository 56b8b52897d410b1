"""The process that has started others: it waits for them, and when one fails it says which, and why."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

from vecgym.core.errors import Damaged, ProcessError, VecgymWarning
from vecgym.runs.interrupts import interrupts
from vecgym.runs.links import Progress, unpacked

GRACE_S = 2.0  # after a first error: others may tell more, such as who caused it
POLL_S = 0.1
# What was given is wrong: raised here as it was raised there.
GIVEN_BACK = {error.__name__: error for error in (ValueError, TypeError, FileNotFoundError, Damaged)}

Labels = Callable[[int], str]  # rank -> what it holds, for errors


class Started(NamedTuple):
    """Processes that were started together."""

    processes: list[Any]
    pipes: list[Any]
    progress: Progress
    folder: str  # of what they share
    method: str  # how they were started


class Failure(NamedTuple):
    """What ended a process."""

    rank: int
    text: str  # the traceback
    kind: str  # the class of the error, "" for a process that died
    message: str
    inside: bool  # while it waited for other processes: rarely the cause
    began: bool  # after its first message


class Supervisor:
    """Wait for processes, pass on what they send, and find the one that is to blame for a failure."""

    def __init__(
        self, started: Started, labels: Labels, on_message: Callable[[int, Any], None], timeout_s: float
    ) -> None:
        self.processes = started.processes
        self.pipes: dict[int, Any] = dict(enumerate(started.pipes))
        self.progress = started.progress
        self.folder = started.folder
        self.method = started.method
        self.labels = labels
        self.on_message = on_message
        self.timeout_s = timeout_s
        self.results: dict[int, Any] = {}
        self.failures: list[Failure] = []

    def wait(self) -> list[Any]:
        """Return what the processes return, in the order of their ranks; a second Ctrl-C does not wait."""
        idle = Clock()
        failing: Clock | None = None  # since a first failure
        seen = list(self.progress.counts)
        with interrupts() as interrupted:
            told = False
            while len(self.results) < len(self.processes):
                if self._receive() or list(self.progress.counts) != seen:
                    seen, idle = list(self.progress.counts), Clock()
                if interrupted and not told:
                    told, idle = True, Clock()
                    self._interrupt()
                if self.failures:
                    failing = failing or Clock()
                    if failing.passed() > GRACE_S or not self.pipes:
                        raise self._error(bool(interrupted))
                if idle.passed() > self.timeout_s:
                    raise self._hanging()
        for process in self.processes:
            process.join(10)
        return [self.results[rank] for rank in range(len(self.processes))]

    def _receive(self) -> bool:
        """Read what has come, and return whether anything has."""
        active = dict(self.pipes)
        sentinels = [self.processes[rank].sentinel for rank in active]
        ready = connection.wait([*active.values(), *sentinels], POLL_S)
        came = False
        for rank, pipe in active.items():
            process = self.processes[rank]
            if pipe not in ready and process.sentinel not in ready:
                continue
            ended = not process.is_alive()
            try:
                while pipe.poll():
                    self._take(rank, *pipe.recv())
                    came = True
            except (EOFError, OSError):
                ended = True
                process.join(1)
            if ended:
                del self.pipes[rank]
                if rank not in self.results and all(failure.rank != rank for failure in self.failures):
                    self.failures.append(self._death(rank))
        return came

    def _take(self, rank: int, kind: str, value: Any) -> None:
        value = unpacked(value)
        if kind == "message":
            self.on_message(rank, value)
        elif kind == "warning":
            text, ours = value
            warnings.warn(text, VecgymWarning if ours else UserWarning, stacklevel=5)
        elif kind == "return":
            self.results[rank] = value
        else:
            self.failures.append(Failure(rank, *value))

    def _death(self, rank: int) -> Failure:
        code = self.processes[rank].exitcode
        how = (
            f"was killed by signal {signal.Signals(-code).name}" if (code or 0) < 0 else f"ended with exit code {code}"
        )
        hint = ""
        if self.method == "spawn" and self.progress.counts[2 * rank] == 0:
            hint = (
                " before it began. What it has printed says why; often a script that does not keep what it does under "
                'if __name__ == "__main__":, or a definition that cannot be imported.'
            )
        return Failure(rank, "", "", f"{how}{hint}", False, True)

    def _interrupt(self) -> None:
        for process in self.processes:
            if process.is_alive() and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGINT)

    def _error(self, interrupted: bool) -> BaseException:
        """Choose one error of several: who fails while it waits for others mostly fails because of them."""
        causes = [f for f in self.failures if not f.inside] or self.failures
        first = next((f for f in causes if not f.kind), causes[0])  # a process that died tells nothing itself
        if first.kind == "KeyboardInterrupt" or (interrupted and first.inside):
            return KeyboardInterrupt()
        if first.kind in GIVEN_BACK and not first.began:
            return GIVEN_BACK[first.kind](first.message)
        text = f"{first.kind}: {first.message}" if first.kind else first.message
        if first.inside or not first.kind:  # perhaps since the processes did not call the same
            text += self.progress.said()
        return ProcessError(first.rank, self.labels(first.rank), text, first.text)

    def _hanging(self) -> ProcessError:
        """Blame the process that others wait for: the one that waits for nobody, or that has got least far."""
        alive = list(self.pipes)
        outside = [rank for rank in alive if not self.progress.counts[2 * rank + 1]]
        rank = min(outside or alive, key=lambda r: self.progress.counts[2 * r])
        trace = ""
        process = self.processes[rank]
        if hasattr(signal, "SIGUSR1") and process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)  # faulthandler then writes where it is
                time.sleep(0.5)
            file = Path(self.folder, f"trace-{rank}")
            trace = file.read_text() if file.exists() else ""
        text = f"hangs: it got nowhere for {self.timeout_s:g} s (timeout_s){self.progress.said()}"
        return ProcessError(rank, self.labels(rank), text, trace)


class Clock:
    """Seconds that this program could run: while all of it is stopped, by Ctrl-Z say, no process hangs."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._last = time.monotonic()

    def passed(self) -> float:
        """Seconds up to this call; call it often."""
        now = time.monotonic()
        self._seconds += min(now - self._last, 10 * POLL_S)
        self._last = now
        return self._seconds
