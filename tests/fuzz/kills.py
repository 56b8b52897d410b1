"""Runs that are killed, and disks that fail: then the run goes on, and must end as if nothing had happened.

A child is forked from this warm process and trains; at one of its events (it opens, writes, syncs, renames or removes a
file, or logs a row) something happens to it:

* a signal: SIGKILL, SIGTERM, SIGINT; or SIGKILL in the middle of a write;
* the power fails: SIGKILL, and of what had not been synced an arbitrary part is lost: contents of files, and changes of
  names, each by itself;
* the disk is full, or breaks, for some events; or files may not become larger.

Afterwards a run with `resume` must end with the bits of one that was never interrupted; what was reported as saved must
be there; no file may be damaged, and no partial file or process left.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import random
import resource
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import vecgym
from tests.fuzz import files
from tests.fuzz.common import Case, Failure, Outcome, Refusal
from tests.fuzz.place import a_new_folder, as_it_was
from vecgym import Logger
from vecgym.logger import CSVLogger, read_csv
from vecgym.records import runfile
from vecgym.runs.checkpoint import checkpoints_in
from vecgym.sweeps import runner

NAME = "kills"
EVENTS = {"open": 12, "write": 1200, "sync": 14, "rename": 8, "remove": 6, "log": 5}  # of each kind in a run, about
GONE_S = 20.0  # until the processes of a killed run must have ended

SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
HOW = (*SIGNALS, "torn write", "power", "full", "broken", "limit")
ERRORS = {"full": (errno.ENOSPC, errno.EDQUOT), "broken": (errno.EIO, errno.EROFS)}


# --------------------------------------------------------------------------------------------------- what is run


def trained(folder: Path, run: str, keep: int = 2, **settings: Any) -> vecgym.Trainer:
    return files.train(
        run, save_dir=folder / "saved", resume=True, checkpoint_interval=1, keep_checkpoints=keep,
        logger=[_Tick(), CSVLogger(folder / "log")], **settings,
    )  # fmt: skip


def _fit(folder: Path, run: str) -> vecgym.Trainer:
    return trained(folder, run)


def _keep_one(folder: Path, run: str) -> vecgym.Trainer:
    return trained(folder, run, keep=1)


def _processes(folder: Path, run: str) -> vecgym.Trainer:
    return trained(folder, "DiLoCo", backend="processes", num_processes=2, exact=True, timeout_s=60.0)


def _sweep(folder: Path, run: str) -> vecgym.SweepResult:
    return files.sweep(folder / "saved" / "sweep.pt")


def _save(folder: Path, run: str) -> vecgym.Saved:
    path = folder / "saved" / "run.pt"
    for _ in range(3):
        files.calls.trained().save(path)
    return vecgym.load(path)


WHAT: dict[str, Callable[[Path, str], Any]] = {
    "fit": _fit, "keep one": _keep_one, "sweep": _sweep, "save": _save, "processes": _processes,
}  # fmt: skip


def whole(what: str, run: str) -> Any:
    """The numbers of a run that nothing happens to."""
    if what == "sweep":
        return files.expected("sweep", run)
    if what == "save":
        return None
    return files.expected("resume in processes", "DiLoCo") if what == "processes" else files.expected("resume", run)


class _Tick(Logger):
    def log(self, row: dict[str, Any]) -> None:
        if _disk is not None:
            _disk.event("log", "")


# ------------------------------------------------------------------------------------------------ a disk that fails

_disk: Disk | None = None  # of this process, if it is a child


@dataclass
class Disk:
    """Sees what the process does with files, and makes something of it happen.

    Attributes:
        report: a descriptor; the names of files that were saved whole are written to it.
        at: the kind of event at which something begins to happen, and which of them.
        length: how many events that lasts.
        counts: events so far, by kind.
        begun: events since it began.
        unsynced: files with contents that are not on the disk: inode -> path.
        renamed: changes of names that are not: (path, a link to what had the name before or None, old name or None).
    """

    how: str
    at: tuple[str, int]
    length: int
    draw: random.Random
    report: int
    aside: Path
    counts: Counter[str] = field(default_factory=Counter)
    begun: int = 0
    unsynced: dict[int, str] = field(default_factory=dict)
    renamed: list[tuple[str, str | None, str | None]] = field(default_factory=list)

    def event(self, kind: str, path: str) -> None:
        if path.startswith("/dev/shm/"):  # what Python shares with its processes is memory, and no disk
            return
        self.counts[kind] += 1
        if self.begun == 0 and (kind, self.counts[kind]) != self.at:
            return
        self.begun += 1
        if self.begun == 1 and self.how in SIGNALS:
            os.kill(os.getpid(), SIGNALS[self.how])
        elif self.begun == 1 and self.how == "power":
            self.fail()
        elif self.how == "limit" and self.begun in (1, self.length):
            free = self.draw.choice([0, 100, 4096, 5000]) if self.begun < self.length else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (free, resource.RLIM_INFINITY))
        elif self.how in ERRORS and self.begun <= self.length and kind != "log":
            number = self.draw.choice(ERRORS[self.how])
            raise OSError(number, os.strerror(number), path)

    def fail(self) -> None:
        """The power fails."""
        for inode, path in self.unsynced.items():
            with contextlib.suppress(OSError):
                if os.stat(path).st_ino == inode and self.draw.random() < 0.8:
                    os.truncate(path, self.draw.randrange(os.stat(path).st_size + 1))
        for path, before, old in reversed(self.renamed):
            if self.draw.random() < 0.8:
                with contextlib.suppress(OSError):
                    if old is not None:
                        os.rename(path, old)
                    if before is not None:
                        os.replace(before, path)
        os.kill(os.getpid(), signal.SIGKILL)

    def link(self, path: Any) -> str | None:
        """Another name of a file, by which it can be put back."""
        name = str(self.aside / str(self.counts.total()))
        try:
            os.link(path, name)
        except OSError:
            return None
        return name


class _File:
    """A file that is written to, whose writes are events."""

    def __init__(self, file: Any, path: str, disk: Disk) -> None:
        self.file, self.path, self.disk = file, path, disk

    def write(self, data: Any) -> Any:
        disk = self.disk
        disk.unsynced[os.fstat(self.file.fileno()).st_ino] = self.path
        if disk.how == "torn write" and ("write", disk.counts["write"] + 1) == disk.at:
            self.file.write(data[: len(data) // 2])
            self.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        disk.event("write", self.path)
        return self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: Any) -> None:
        self.file.close()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.file)


def install(disk: Disk) -> None:
    """Let all that this process does with files pass through `disk`."""
    global _disk
    _disk = disk
    real_open, fsync, replace, unlink, write = pathlib.Path.open, os.fsync, os.replace, os.unlink, runfile.write

    def opened(path: Path, mode: str = "r", *args: Any, **more: Any) -> Any:
        if not set(mode) & set("wxa"):
            return real_open(path, mode, *args, **more)
        disk.event("open", str(path))
        return _File(real_open(path, mode, *args, **more), str(path), disk)

    def synced(descriptor: Any) -> None:
        disk.event("sync", "")
        fsync(descriptor)
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        disk.unsynced.pop(os.fstat(number).st_ino, None)
        if os.path.isdir(f"/proc/self/fd/{number}"):
            disk.renamed.clear()

    def replaced(source: Any, target: Any, **more: Any) -> None:
        before = disk.link(target)
        disk.event("rename", str(target))
        replace(source, target, **more)
        disk.renamed.append((str(target), before, str(source)))
        for inode, path in list(disk.unsynced.items()):
            if path == str(source):
                disk.unsynced[inode] = str(target)

    def unlinked(path: Any, **more: Any) -> None:
        before = disk.link(path)
        disk.event("remove", str(path))
        unlink(path, **more)
        disk.renamed.append((str(path), before, None))

    def written(path: Any, contents: Any) -> None:
        write(path, contents)
        done = len(contents["sweep"]["curves"]) if "sweep" in contents else contents["step"]
        os.write(disk.report, f"{done}\n".encode())

    pathlib.Path.open = opened  # type: ignore[method-assign, assignment]
    os.fsync, os.replace, os.unlink = synced, replaced, unlinked  # type: ignore[assignment]
    runfile.write = written
    runner.SAVE_INTERVAL_S = 0.0  # sweeps save after every step


# ------------------------------------------------------------------------------------------------------ the child


@dataclass
class Ended:
    """The end of a child: its exit code or -signal, what it reported as saved (steps or curves), and its error."""

    code: int
    reported: list[int]
    error: str


def in_a_child(work: Callable[[], Any], folder: Path, plan: dict[str, Any]) -> Ended:
    """Fork; train there, on a disk with `plan`; wait until it and all that it started have ended."""
    aside = Path(tempfile.mkdtemp(prefix="aside-", dir=folder))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        _live(work, aside, write, plan)
    os.close(write)
    with os.fdopen(read) as reports:
        _, status = os.waitpid(child, 0)
        left = _wait_for(child)
        reported = [int(line) for line in reports]
    error = (aside / "error").read_text() if (aside / "error").exists() else ""
    shutil.rmtree(aside)
    if left:
        raise AssertionError(f"processes are left: {left}")
    return Ended(os.waitstatus_to_exitcode(status), reported, error)


def _live(work: Callable[[], Any], aside: Path, report: int, plan: dict[str, Any]) -> None:
    """The child's life, which ends here."""
    code = 1
    try:
        os.setsid()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        tempfile.tempdir = str(aside)
        warnings.simplefilter("ignore")
        install(Disk(**plan, report=report, aside=aside))
        work()
        code = 0
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        with contextlib.suppress(BaseException):
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            descriptor = os.open(aside / "error", os.O_CREAT | os.O_WRONLY)
            os.write(descriptor, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _wait_for(session: int) -> list[int]:
    """The processes of a session that have not ended after a while."""
    end = time.monotonic() + GONE_S
    while (left := _alive_in(session)) and time.monotonic() < end:
        time.sleep(0.02)
    for process in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return left


def _alive_in(session: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                state, _, _, number = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:4]
                if int(number) == session and state != "Z":
                    found.append(int(entry))
    return found


# ------------------------------------------------------------------------------------------------------- the cases


def cases(seed: int, count: int) -> Iterator[Case]:
    draw = random.Random(f"kills {seed}")
    for i in range(count):
        what = draw.choice(["fit", "fit", "fit", "keep one", "keep one", "sweep", "sweep", "save"])
        if draw.random() < 0.05:
            what = "processes"
        times = draw.choice([1, 1, 1, 2, 3]) if what != "processes" else 1
        happens = [_drawn(draw) for _ in range(times)]
        yield Case({"what": what, "run": draw.choice(list(files.RUNS)), "happens": happens}, seed * 1_000_003 + i)


def _drawn(draw: random.Random) -> tuple[str, tuple[str, int], int]:
    """An accident, its event, and the number of its victims."""
    how = draw.choice(HOW)
    kind = "write" if how == "torn write" else draw.choice(list(EVENTS))
    return how, (kind, draw.randrange(1, EVENTS[kind])), draw.choice([1, 3, 30, 300, 5000])


def smaller(case: Case) -> Iterator[Case]:
    happens = case.settings["happens"]
    for i in range(len(happens) if len(happens) > 1 else 0):
        yield Case({**case.settings, "happens": happens[:i] + happens[i + 1 :]}, case.seed)


def run(case: Case) -> Outcome:
    what, name = case.settings["what"], case.settings["run"]
    good, draw = whole(what, name), random.Random(case.seed)
    with a_new_folder() as folder, as_it_was():
        refused = None
        for how, at, length in case.settings["happens"]:
            plan = {"how": how, "at": at, "length": length, "draw": random.Random(draw.random())}
            (folder / "saved").mkdir(exist_ok=True)
            ended = in_a_child(lambda: WHAT[what](folder, name), folder, plan)
            outcome = _after(what, how, ended, folder)
            if isinstance(outcome, Failure):
                return outcome
            refused = outcome or refused
        return _at_the_end(what, name, folder, good) or refused


def _after(what: str, how: str, ended: Ended, folder: Path) -> Outcome:
    """The outcome of a child that has ended."""
    if ended.code == 1 and not _may_refuse(what, how, ended.error):
        return Failure(f"{what}, {how}: {_last_line(ended.error)}", ended.error[-1500:])
    lost = _lost(what, ended, folder)
    if lost:
        return Failure(f"{what}, {how}: what was saved is lost", lost)
    return Refusal(f"{what}, {how}: {_last_line(ended.error)}"[:200]) if ended.code == 1 else None


def _may_refuse(what: str, how: str, error: str) -> bool:
    """A disk that fails may be an error where nothing has begun, and where a user saves."""
    if what == "processes" and _last_line(error).startswith("vecgym.core.errors.ProcessError"):
        return True
    failing = how in ERRORS or how == "limit"
    before = "cannot be written to" in error and "ValueError" in _last_line(error)
    before |= "pytorch-errorfile" in _last_line(error)  # torch makes and removes one for each process that it starts
    return failing and (before or (what == "save" and "OSError" in _last_line(error)))


def _last_line(error: str) -> str:
    lines = [line for line in error.strip().splitlines() if line and not line.startswith(" ")]
    return lines[-1] if lines else "no error"


def _lost(what: str, ended: Ended, folder: Path) -> str:
    """Items that were reported as saved, and are not there."""
    if not ended.reported:
        return ""
    newest = max(ended.reported)
    try:
        if what == "sweep":
            found = len(runfile.read(folder / "saved" / "sweep.pt")["sweep"]["curves"])
        elif what == "save":
            found = vecgym.load(folder / "saved" / "run.pt").step
        else:
            found = max(vecgym.load(path).step for path in checkpoints_in(folder / "saved"))
    except (ValueError, OSError) as error:
        return f"{newest} was saved, and now: {error}"
    return f"{newest} was saved, and {found} is there" if found < newest else ""


def _at_the_end(what: str, name: str, folder: Path, good: Any) -> Outcome:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = WHAT[what](folder, name)
    for warning in caught:
        if issubclass(warning.category, vecgym.VecgymWarning):
            return Failure(f"{what}: a warning when it goes on", str(warning.message)[:500])
    if good is not None and files.numbers(found) != good:
        return Failure(f"{what}: not the numbers of the run that was never interrupted", "")
    if what in ("fit", "keep one", "processes"):
        logged, recorded = files.numbers(read_csv(folder / "log"))[-1], files.numbers(found.history)[-1]
        if any(logged.get(key) != recorded.get(key) for key in ("step", "train_loss", "val_loss")):
            return Failure(f"{what}: the logged history is not that of the run", f"{logged} {recorded}")
    left = [path.name for path in (folder / "saved").iterdir() if path.name.startswith(".") or path.suffix != ".pt"]
    return Failure(f"{what}: files are left", ", ".join(left)) if left else None
