"""The parent of a run's processes: it waits for them, and when one fails it says which, and why."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

from vecgym.core.errors import Damaged, ProcessError, VecgymWarning, warn
from vecgym.runs.interrupts import interrupts
from vecgym.runs.links import Progress, unpacked

GRACE_S = 2.0  # to wait after a first error, for others that may tell more, such as who caused it
POLL_S = 0.1
# Errors in what was given: raised here as they were raised there.
GIVEN_BACK = {error.__name__: error for error in (ValueError, TypeError, FileNotFoundError, Damaged)}

Labels = Callable[[int], str]  # rank -> what it holds, for errors


def node_labels(num_nodes: int, num_processes: int) -> Labels:
    """Return the labels of processes with equal numbers of nodes.

    >>> node_labels(4, 2)(1), node_labels(2, 2)(1)
    ('nodes 2-3', 'node 1')
    """

    def label(rank: int) -> str:
        first, end = (i * num_nodes // num_processes for i in (rank, rank + 1))
        return f"node {first}" if end == first + 1 else f"nodes {first}-{end - 1}"

    return label


class Started(NamedTuple):
    """Processes that were started together, and what they share."""

    processes: list[Any]
    pipes: list[Any]
    progress: Progress
    folder: str
    method: str  # "fork" or "spawn"


class Failure(NamedTuple):
    """What ended a process."""

    rank: int
    text: str  # the traceback
    kind: str  # the class of the error; "" for a process that died
    message: str
    inside: bool  # it was waiting for other processes: rarely the cause
    began: bool  # it had sent its first message


class Supervisor:
    """Wait for processes, pass on what they send, and find the one to blame for a failure."""

    def __init__(
        self, started: Started, labels: Labels, on_message: Callable[[int, Any], None], timeout_s: float
    ) -> None:
        self.started = started
        self.labels = labels
        self.on_message = on_message
        self.timeout_s = timeout_s
        self.pipes: dict[int, Any] = dict(enumerate(started.pipes))  # of the processes that have not ended
        self.results: dict[int, Any] = {}
        self.failures: list[Failure] = []

    def wait(self) -> list[Any]:
        """Return what the processes return, in the order of their ranks; a second Ctrl-C raises at once."""
        idle = Clock()
        failing: Clock | None = None  # since the first failure
        seen = list(self.started.progress.counts)
        with interrupts() as interrupted:
            told = False
            while len(self.results) < len(self.started.processes):
                if self._receive() or list(self.started.progress.counts) != seen:
                    seen, idle = list(self.started.progress.counts), Clock()
                if interrupted and not told:
                    told, idle = True, Clock()
                    self._interrupt()
                if self.failures:
                    failing = failing or Clock()
                    if failing.passed() > GRACE_S or not self.pipes:
                        raise self._error(bool(interrupted))
                if idle.passed() > self.timeout_s:
                    raise self._hanging()
        for process in self.started.processes:
            process.join(10)
        return [self.results[rank] for rank in range(len(self.started.processes))]

    def _receive(self) -> bool:
        """Read the messages that have arrived, and return whether there were any."""
        active = dict(self.pipes)
        sentinels = [self.started.processes[rank].sentinel for rank in active]
        ready = connection.wait([*active.values(), *sentinels], POLL_S)
        came = False
        for rank, pipe in active.items():
            process = self.started.processes[rank]
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
            warn(text, VecgymWarning if ours else UserWarning)
        elif kind == "return":
            self.results[rank] = value
        else:
            self.failures.append(Failure(rank, *value))

    def _death(self, rank: int) -> Failure:
        code = self.started.processes[rank].exitcode
        how = (
            f"was killed by signal {signal.Signals(-code).name}" if (code or 0) < 0 else f"ended with exit code {code}"
        )
        hint = ""
        if self.started.method == "spawn" and self.started.progress.counts[2 * rank] == 0:
            hint = (
                " before it began. What it has printed says why; often a script that does not keep what it does under "
                'if __name__ == "__main__":, or a definition that cannot be imported.'
            )
        return Failure(rank, "", "", f"{how}{hint}", False, True)

    def _interrupt(self) -> None:
        for process in self.started.processes:
            if process.is_alive() and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGINT)

    def _error(self, interrupted: bool) -> BaseException:
        """Choose one error of several: a process that fails while it waits for others mostly fails because of them."""
        causes = [f for f in self.failures if not f.inside] or self.failures
        first = next((f for f in causes if not f.kind), causes[0])  # a process that died cannot report
        if first.kind == "KeyboardInterrupt" or (interrupted and first.inside):
            return KeyboardInterrupt()
        if first.kind in GIVEN_BACK and not first.began:
            return GIVEN_BACK[first.kind](first.message)
        text = f"{first.kind}: {first.message}" if first.kind else first.message
        if first.inside or not first.kind:  # perhaps because the processes did not make the same calls
            text += self.started.progress.said()
        return ProcessError(first.rank, self.labels(first.rank), text, first.text)

    def _hanging(self) -> ProcessError:
        """Blame the process that the others wait for: one that waits for nobody, or else the one furthest behind."""
        alive = list(self.pipes)
        outside = [rank for rank in alive if not self.started.progress.counts[2 * rank + 1]]
        rank = min(outside or alive, key=lambda r: self.started.progress.counts[2 * r])
        trace = ""
        process = self.started.processes[rank]
        if hasattr(signal, "SIGUSR1") and process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)  # faulthandler then writes where it is
                time.sleep(0.5)
            file = Path(self.started.folder, f"trace-{rank}")
            trace = file.read_text() if file.exists() else ""
        text = f"hangs: it got nowhere for {self.timeout_s:g} s (timeout_s){self.started.progress.said()}"
        return ProcessError(rank, self.labels(rank), text, trace)


class Clock:
    """Count the seconds that this program could run: while all of it is stopped, by Ctrl-Z say, no process hangs."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._last = time.monotonic()

    def passed(self) -> float:
        """Return the seconds up to this call; call it often."""
        now = time.monotonic()
        self._seconds += min(now - self._last, 10 * POLL_S)
        self._last = now
        return self._seconds
