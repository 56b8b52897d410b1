"""Processes: W of them on this machine, started for one function, and ended together.

`run(function, num_processes, args)` calls `function(link, *args)` in each process, within a process group of
torch.distributed, and returns what they return. Whatever happens to one of them ends all, with one error.

How they are started. On Linux without a GPU they are *forked*: each begins as a copy of this process, in milliseconds,
and knows all that is defined here, in a notebook's cells too; nothing is pickled; each has one thread within its
operations, since OpenMP's threads do not survive a fork. Where there is a GPU, whose driver does not survive it either,
and on macOS they are *spawned*: new interpreters that import what they need. What they are given must then be
importable: a class or function of a notebook has to move to a file (`%%writefile models.py`, `from models import Net`),
lambdas and local functions cannot be given, and a script must keep what it does under `if __name__ == "__main__":`.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vecgym.core import tree
from vecgym.core.errors import Damaged, ProcessError, VecgymWarning

__all__ = ["Link", "check_alone", "choose_start_method", "joined", "run"]

TIMEOUT_S = 600.0  # the longest that no process may get anywhere
GRACE_S = 2.0  # after a first error: others may tell more, such as who caused it
POLL_S = 0.1
# What was given is wrong: raised here as it was raised there.
GIVEN_BACK = {error.__name__: error for error in (ValueError, TypeError, FileNotFoundError, Damaged)}

Labels = Callable[[int], str]  # rank -> what it holds, for errors


class Failure(NamedTuple):
    """What ended a process."""

    rank: int
    text: str  # the traceback
    kind: str  # the class of the error, "" for a process that died
    message: str
    inside: bool  # while it waited for other processes: rarely the cause
    began: bool  # after its first message


class Link:
    """A process's way to the one that started it.

    Attributes:
        rank, num_processes: of this process, and W.

    >>> def work(link):
    ...     link.announce("nothing")  # what the error would say if it hung now
    ...     link.watch(inside=False)  # it gets on
    ...     link.send({"rank": link.rank})
    >>> run(work, 1, start_method="fork", on_message=print)
    0 {'rank': 0}
    [None]
    """

    def __init__(self, rank: int, num_processes: int, pipe: Any, progress: _Progress) -> None:
        self.rank = rank
        self.num_processes = num_processes
        self._pipe = pipe
        self._progress = progress
        self._lock = threading.Lock()
        self.began = False
        self.inside = False

    def send(self, message: Any) -> None:
        """Hand nested dicts, lists and tuples of tensors, numpy arrays and plain values to `on_message`."""
        self.began = True
        self._put("message", message)

    def watch(self, inside: bool) -> None:
        """Say that this process gets on, and whether it now waits for others."""
        self.inside = inside
        self._progress.counts[2 * self.rank] += 1
        self._progress.counts[2 * self.rank + 1] = int(inside)

    def announce(self, text: str) -> None:
        """Say what this process is about to do together with others, for the error if it comes to one."""
        self._progress.say(self.rank, text)

    def _put(self, kind: str, value: Any) -> None:
        with self._lock:  # warnings may come from other threads
            self._pipe.send((kind, packed(value)))


_link: Link | None = None  # of this process, where `run` has started it


def watch(inside: bool) -> None:
    """`Link.watch` of this process; nothing where `run` has not started it."""
    if _link is not None:
        _link.watch(inside)


def announce(text: str) -> None:
    """`Link.announce` of this process; nothing where `run` has not started it."""
    if _link is not None:
        _link.announce(text)


class _Progress:
    """What the processes say of themselves, in memory that they share with the one that has started them."""

    LENGTH = 200  # bytes of a text

    def __init__(self, context: Any, num_processes: int) -> None:
        self.num_processes = num_processes
        self.counts = context.RawArray("q", 2 * num_processes)  # how often each got on; whether it waits for others
        self._texts = context.RawArray(ctypes.c_char, self.LENGTH * num_processes)

    def say(self, rank: int, text: str) -> None:
        self._texts[self._at(rank)] = text.encode()[: self.LENGTH].ljust(self.LENGTH, b"\0")

    def said(self) -> str:
        """Who was about to do what, where that differs between the processes; else ""."""
        found = [self._texts[self._at(rank)].rstrip(b"\0") for rank in range(self.num_processes)]
        if len(set(found)) == 1:
            return ""
        each = [f"process {rank}: {text.decode(errors='ignore') or 'nothing yet'}" for rank, text in enumerate(found)]
        return f". The last exchange of {'; of '.join(each)}"

    def _at(self, rank: int) -> slice:
        return slice(rank * self.LENGTH, (rank + 1) * self.LENGTH)


# ---------------------------------------------------------------------------------------------- the parent's side


def run(
    function: Callable[..., Any],
    num_processes: int,
    args: Sequence[Any] = (),
    *,
    device: torch.device | str = "cpu",
    labels: Labels = lambda rank: "",
    on_message: Callable[[int, Any], None] = lambda rank, message: None,
    timeout_s: float = TIMEOUT_S,
    start_method: str | None = None,
) -> list[Any]:
    """Call `function(link, *args)` in each of W new processes; the list of what they return.

    Args:
        function: of a module, where processes are spawned.
        device: a CUDA device gives each process a GPU, in turn.
        labels: rank -> what this process holds, for errors: "nodes 2-3".
        on_message: called here with (rank, message) for every `link.send(message)`, in order.
        timeout_s: when no process has communicated or sent anything for so long, one hangs.
        start_method: "fork" or "spawn"; None: `start_method(device)`.

    Raises:
        ProcessError: when a process raises, dies or hangs; all are ended.
        ValueError, TypeError, FileNotFoundError, Damaged: those that the function raises before its first message.
        ValueError: where torchrun has started this process as one of several.
        KeyboardInterrupt: on Ctrl-C: the processes get it, and may return something first.

    >>> def work(link, x):
    ...     total = torch.tensor(x + link.rank)
    ...     dist.all_reduce(total)
    ...     link.send(f"process {link.rank} of {link.num_processes}")
    ...     return int(total)
    >>> said = []
    >>> run(work, 2, (10,), start_method="fork", on_message=lambda rank, message: said.append(message))
    [21, 21]
    >>> sorted(said)
    ['process 0 of 2', 'process 1 of 2']
    """
    check_alone(f"a run of {num_processes} processes of its own")
    method = start_method or choose_start_method(device)
    context: Any = multiprocessing.get_context(method)
    if method == "spawn":
        check_importable(function, *args)
    with tempfile.TemporaryDirectory(prefix="vecgym-") as folder, contextlib.ExitStack() as stack:
        progress = _Progress(context, num_processes)
        pipes: list[Any] = []
        processes: list[Any] = []
        stack.callback(_end, processes, pipes)
        threads = 1 if method == "fork" else max(1, torch.get_num_threads() // num_processes)
        settings = _Settings(num_processes, folder, str(device), timeout_s, threads)
        for rank in range(num_processes):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_main, args=(rank, settings, theirs, progress, function, tuple(args)), name=f"vecgym-{rank}"
            )
            pipes.append(mine)
            with _readable_start_errors(method), _sleeping_threads():
                process.start()
            processes.append(process)
            theirs.close()
        return _Watch(processes, pipes, progress, folder, labels, on_message, timeout_s, method).wait()


def choose_start_method(device: torch.device | str = "cpu") -> str:
    """ "fork" on Linux without a GPU, else "spawn"; see the module.

    >>> choose_start_method("cuda")
    'spawn'
    """
    gpu = torch.device(device).type != "cpu" or torch.cuda.device_count() > 0
    return "fork" if sys.platform == "linux" and not gpu else "spawn"


def check_importable(*values: Any) -> None:
    """Raise a ValueError for what a spawned process could not import: definitions of a notebook or of `python -c`."""
    main = sys.modules["__main__"]
    if hasattr(main, "__file__"):
        return
    for value in values:
        cls = value if hasattr(value, "__name__") else type(value)
        if getattr(cls, "__module__", None) == "__main__":
            raise ValueError(
                f"{cls.__name__} is defined in a notebook cell, which new processes cannot import. Fix: write the cell "
                f"to a file, %%writefile definitions.py, and from definitions import {cls.__name__}."
            )


@contextlib.contextmanager
def _readable_start_errors(method: str) -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of forks of programs with threads: here the child starts with one of its own.
            warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
            yield
    except (AttributeError, TypeError, OSError, ImportError) as error:
        if method != "spawn":
            raise
        raise ValueError(
            f"something given cannot be sent to a new process: {error}. Fix: define models, datasets, collate "
            "functions and schedules at the top of a module, not in a function, and not as a lambda."
        ) from error


@contextlib.contextmanager
def _sleeping_threads() -> Iterator[None]:
    """Start new interpreters so that OpenMP's threads sleep while they wait: they share the cores with one another."""
    if "OMP_WAIT_POLICY" in os.environ:
        yield
        return
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    try:
        yield
    finally:
        del os.environ["OMP_WAIT_POLICY"]


class _Settings(NamedTuple):
    """What every process is told."""

    num_processes: int
    folder: str
    device: str
    timeout_s: float
    num_threads: int


class _Watch:
    """Waits for the processes, and finds the one that is to blame."""

    def __init__(
        self,
        processes: list[Any],
        pipes: list[Any],
        progress: _Progress,
        folder: str,
        labels: Labels,
        on_message: Callable[[int, Any], None],
        timeout_s: float,
        method: str,
    ) -> None:
        self.processes = processes
        self.pipes: dict[int, Any] = dict(enumerate(pipes))
        self.progress = progress
        self.folder = folder
        self.labels = labels
        self.on_message = on_message
        self.timeout_s = timeout_s
        self.method = method
        self.results: dict[int, Any] = {}
        self.failures: list[Failure] = []

    def wait(self) -> list[Any]:
        idle = _Clock()
        failing: _Clock | None = None  # since a first failure
        seen = list(self.progress.counts)
        with _interrupts() as interrupts:
            told = 0
            while len(self.results) < len(self.processes):
                if self._receive() or list(self.progress.counts) != seen:
                    seen, idle = list(self.progress.counts), _Clock()
                if len(interrupts) > 1:
                    raise KeyboardInterrupt
                if len(interrupts) > told:
                    told, idle = len(interrupts), _Clock()
                    self._interrupt()
                if self.failures:
                    failing = failing or _Clock()
                    if failing.passed() > GRACE_S or not self.pipes:
                        raise self._error(bool(interrupts))
                if idle.passed() > self.timeout_s:
                    raise self._hanging()
        for process in self.processes:
            process.join(10)
        return [self.results[rank] for rank in range(len(self.processes))]

    def _receive(self) -> bool:
        """Read what has come; whether anything has."""
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
        """One error of several: who fails while it waits for others mostly fails because of them."""
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
        """The process that others wait for: the one that waits for nobody, or that has got least far."""
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


class _Clock:
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


def _end(processes: list[Any], pipes: list[Any]) -> None:
    """Leave no process behind, whatever state it is in."""
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()
        process.close()
    for pipe in pipes:
        pipe.close()


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Collect Ctrl-C, in the main thread; elsewhere no handler can be set and the list stays empty."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    before = signal.signal(signal.SIGINT, lambda signum, frame: seen.append(signum))
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


# ----------------------------------------------------------------------------------------------- the child's side


def _main(
    rank: int, settings: _Settings, pipe: Any, progress: _Progress, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """The life of a process."""
    global _link
    _link = link = Link(rank, settings.num_processes, pipe, progress)
    _settle(link, settings)
    try:
        link.watch(False)
        with _process_group(link, settings):
            result = function(link, *args)
        link._put("return", result)
        code = 0
    except BaseException as error:
        link._put("error", (traceback.format_exc(), type(error).__name__, str(error), link.inside, link.began))
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)  # at once: a normal end would wait for threads and connections, of processes that may be gone


def _settle(link: Link, settings: _Settings) -> None:
    """Signals, threads and warnings of a new process."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)  # Ctrl-C reaches the parent alone, which passes it on once
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGUSR1"):
        with contextlib.suppress(OSError):  # a full disk: it says where a process hangs, and is no reason to end
            trace = Path(settings.folder, f"trace-{link.rank}").open("w")  # noqa: SIM115 - open as long as the process
            faulthandler.register(signal.SIGUSR1, trace)
    threading.Thread(target=_follow_parent, args=(settings.folder,), daemon=True).start()
    torch.set_num_threads(settings.num_threads)
    warnings.simplefilter("ignore" if link.rank else "default")

    def show(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, UserWarning):
            link._put("warning", (str(message), issubclass(category, VecgymWarning)))

    warnings.showwarning = show


def _follow_parent(folder: str) -> None:
    """End with the parent, also when that is killed, and clean up in its place."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


@contextlib.contextmanager
def _process_group(link: Link, settings: _Settings) -> Iterator[None]:
    """The process group of all processes of a `run`: no port that another program could take, no environment."""
    device = torch.device(settings.device)
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if num_gpus:
        torch.cuda.set_device(link.rank % num_gpus)
    os.environ["LOCAL_RANK"] = str(link.rank)
    # Without it gloo looks the host's own name up, which fails on machines that are not in any name service.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
    dist.init_process_group(
        "nccl" if num_gpus >= settings.num_processes else "gloo",  # NCCL wants a GPU for each process
        store=dist.FileStore(str(Path(settings.folder, "store")), settings.num_processes),
        rank=link.rank,
        world_size=settings.num_processes,
        # Later than the parent, which knows who is to blame.
        timeout=datetime.timedelta(seconds=min(settings.timeout_s, 1e9) + 60),  # which must be finite
    )
    try:
        yield
    finally:
        if sys.exc_info()[0] is None:
            dist.barrier()  # one that is done at once must not close while another still connects
            dist.destroy_process_group()


def loopback() -> str:
    """The name of this machine's loopback interface.

    >>> loopback()[:2]
    'lo'
    """
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), names[0] if names else "lo")


# ------------------------------------------------------------------------------------------------- under torchrun


def check_alone(what: str, ways_out: str = "") -> None:
    """Raise a ValueError in one of several processes that run the same script: each would do the whole of `what`.

    >>> check_alone("a sweep")  # here there is one
    """
    if _link is not None:  # started here, by one that is alone
        return
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE", "1")
    if dist.is_available() and dist.is_initialized():
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
    if rank is not None and size.isdecimal() and int(size) > 1:
        raise ValueError(
            f"this is process {rank} of {size}, started by torchrun or the like (RANK, WORLD_SIZE), and each of them "
            f"would do the whole of {what} and write the same files. Fix: {ways_out}start the script without torchrun."
        )


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[torch.device]:
    """The process group that exists, or that of torchrun; yields this process's device: GPUs in turn.

    Raises:
        ValueError: where there is neither.

    >>> try:
    ...     with joined(torch.device("cpu")) as device:
    ...         print(device)
    ... except ValueError as error:
    ...     print(str(error).split(". ")[0])
    backend="distributed" needs a process group
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device.type == "cuda":
        if device.index is None:
            device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if dist.is_initialized():
        yield device
        return
    if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        raise ValueError(
            'backend="distributed" needs a process group. Start the script by torchrun --nproc-per-node W script.py, '
            'or take backend="processes", num_processes=W, which starts the processes itself.'
        )
    crowded = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > max(1, torch.cuda.device_count())
    dist.init_process_group("nccl" if device.type == "cuda" and not crowded else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


# --------------------------------------------------------------------------------------------- what crosses a pipe


class _Packed(NamedTuple):
    """A tensor as bytes: torch's own way through a pipe is shared memory, which is small in containers."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: np.ndarray


def packed(value: Any) -> Any:
    """`value` with its tensors as numpy arrays of bytes.

    >>> found = packed({"a": torch.ones(2), "b": 3})
    >>> found["a"].data.nbytes, found["b"]
    (8, 3)
    """

    def pack(x: Tensor) -> Any:
        flat = x.detach().cpu().contiguous().view(-1)
        return _Packed(x.dtype, tuple(x.shape), flat.view(torch.uint8).numpy())

    return tree.map_leaves(pack, value)


def unpacked(value: Any) -> Any:
    """The inverse of `packed`.

    >>> unpacked(packed({"a": torch.tensor([1.5, 2.0], dtype=torch.bfloat16), "b": (3, "text")}))
    {'a': tensor([1.5000, 2.0000], dtype=torch.bfloat16), 'b': (3, 'text')}
    """
    if isinstance(value, _Packed):
        if not value.data.size:  # no view of another type is taken of nothing
            return torch.empty(value.shape, dtype=value.dtype)
        # A copy: what came through the pipe cannot be written to.
        return torch.from_numpy(value.data.copy()).view(value.dtype).view(value.shape)
    if isinstance(value, dict):
        return {key: unpacked(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [unpacked(x) for x in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
