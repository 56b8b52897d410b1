"""Alternatives that take turns, each in a process of its own.

A process makes one alternative ready, and then does a block of work for each line that it reads (`serve`). The parent
starts the processes and has them take turns, A B C, B C A, ... (`take_turns`), so that what else happens on the machine
meets all alike, and no alternative's threads, memory or imports slow another one down. A ratio is that of the medians.

On Linux the parent also reads how much processor time went to anybody else meanwhile.
"""

from __future__ import annotations

import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

BUSY = 0.1  # of a core: more than this for others, in the median of the blocks, is a busy machine
MEASURABLE_S = 0.1  # of a block: the system counts what processors do in hundredths of a second


# ------------------------------------------------------------------------------------------------- the alternative


def serve(work: Callable[[], Mapping[str, Any] | None], **info: Any) -> None:
    """In a process of its own: print `info`, then call `work` for each line that is read, and print what it took.

    `work` may return figures of its own, "seconds" and "cpu" among them or not; what it does not say is measured here.
    Processes that it starts and waits for count in "cpu".
    """
    print(json.dumps({**info, "vecgym": "vecgym" in sys.modules}), flush=True)
    for _ in sys.stdin:
        start, cpu = time.perf_counter(), cpu_seconds()
        figures = dict(work() or {})
        wall = time.perf_counter() - start
        measured = {"seconds": wall, "cpu": cpu_seconds() - cpu}
        print(json.dumps({**measured, **figures, "wall": wall}), flush=True)


def cpu_seconds() -> float:
    """Return the processor time of this process and of those that it has waited for."""
    of_both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(used.ru_utime + used.ru_stime for used in of_both)


# ---------------------------------------------------------------------------------------------------- the parent


class Alternative:
    """A process that serves. Closing its standard input ends it.

    Args:
        command: of the process.
        threads: for torch, in the process.
        environment: variables that differ from this process's.
        python: the interpreter.
    """

    def __init__(
        self, command: Sequence[str], threads: int, environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **(environment or {})}
        self.command = list(command)
        self.process = subprocess.Popen(
            [python, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.info = self._read()

    def block(self) -> dict[str, Any]:
        """Have it do a block of work; return its figures, and in "others" the cores that somebody else used."""
        assert self.process.stdin is not None
        before, own = used_by_all(), time.process_time()
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        figures: dict[str, Any] = self._read()
        if before is not None and figures["wall"] >= MEASURABLE_S:
            used = (used_by_all() or 0) - before - (time.process_time() - own) - figures["cpu"]
            figures["others"] = max(0.0, used / figures["wall"])
        return figures

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            raise RuntimeError(f"{' '.join(self.command)} ended with status {status}; see its message above")
        return json.loads(line)

    def __enter__(self) -> Alternative:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.process.__exit__(kind, error, traceback)


@dataclass(frozen=True)
class Turns:
    """The reports of alternatives, and their figures, block after block."""

    info: dict[str, dict[str, Any]]
    figures: dict[str, list[dict[str, Any]]]

    def median(self, name: str, figure: str = "seconds") -> float:
        return statistics.median(self.all(name, figure))

    def all(self, name: str, figure: str = "seconds") -> list[Any]:
        return [block[figure] for block in self.figures[name]]

    def spread(self, name: str, figure: str = "seconds") -> float:
        """Half the distance between the quartiles, as a part of the median."""
        values = sorted(self.all(name, figure))
        low, high = values[len(values) // 4], values[-1 - len(values) // 4]
        return (high - low) / 2 / statistics.median(values)

    def notes(self, figure: str = "seconds") -> str:
        """The rounds, the spread of every alternative, and the load by others, in words."""
        rounds = len(next(iter(self.figures.values())))
        if rounds == 1:
            return f"1 round; {self.load}"
        spreads = ", ".join(f"{name} {100 * self.spread(name, figure):.0f} %" for name in self.figures)
        return f"{rounds} rounds; half the distance of the quartiles: {spreads}; {self.load}"

    @property
    def others(self) -> float | None:
        """The cores that others used, a median over all blocks; None: not known here."""
        used = [block["others"] for blocks in self.figures.values() for block in blocks if "others" in block]
        return statistics.median(used) if used else None

    @property
    def load(self) -> str:
        """The load by others, in words."""
        if self.others is None:
            return "load by others: not known (no /proc/stat, or blocks that are too short)"
        return f"load by others: {self.others:.2f} cores{', BUSY' if self.others > BUSY else ''}"


def take_turns(
    commands: Mapping[str, Sequence[str]],
    budget_s: float | None,
    threads: int,
    environments: Mapping[str, Mapping[str, str]] | None = None,
    rounds: tuple[int, int] = (5, 60),
    warm_up: bool = True,
    pythons: Mapping[str, str] | None = None,
) -> Turns:
    """Start all alternatives; after one block each that is not counted, as many rounds as the budget allows.

    Args:
        commands: of each alternative, without the interpreter.
        budget_s: seconds for all rounds together; 0: one round; None: the fewest rounds.
        threads: of each process.
        environments: variables of some alternatives that differ from this process's.
        rounds: the fewest and the most.
        warm_up: False: no block before them, since alternatives warm up before they serve, or begin anew each time. The
            length of a round is not known then: `budget_s` is None or 0.
        pythons: interpreters of some alternatives that are not this process's.
    """
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(
                Alternative(command, threads, (environments or {}).get(name), (pythons or {}).get(name, sys.executable))
            )
            for name, command in commands.items()
        }
        round_s = sum(one.block()["wall"] for one in started.values()) if warm_up else math.nan
        figures: dict[str, list[dict[str, Any]]] = {name: [] for name in started}
        if budget_s:
            count = max(rounds[0], min(rounds[1], round(budget_s / round_s)))
        else:
            count = rounds[0] if budget_s is None else 1
        names = list(started)
        for i in range(count):
            first = i % len(names)
            for name in names[first:] + names[:first]:
                figures[name].append(started[name].block())
        return Turns({name: one.info for name, one in started.items()}, figures)


def used_by_all() -> float | None:
    """The seconds that all processors together have been in use since the machine started; None: not known here."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, stat.read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
