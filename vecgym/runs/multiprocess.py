"""Run one function in W processes on this machine, which are started for it and ended together.

`run(function, num_processes, args)` calls `function(link, *args)` in each process, within a process group of
torch.distributed, and returns what they return. Whatever goes wrong in one of them ends all, with one error.

How they are started. On Linux without a GPU they are *forked*: each begins as a copy of this process, in milliseconds,
and has everything that is defined here, including a notebook's cells. Nothing is pickled. Each uses one thread within
its operations, since OpenMP's threads do not survive a fork. Where there is a GPU, whose driver does not survive it
either, and on macOS they are *spawned*: new interpreters that import what they need. What they are given must then be
importable: a class or function of a notebook has to move to a file (`%%writefile models.py`, `from models import Net`),
lambdas and local functions cannot be given, and a script must keep what it does under `if __name__ == "__main__":`.
"""

from __future__ import annotations

import contextlib
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
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from vecgym.core.errors import VecgymWarning
from vecgym.runs import links
from vecgym.runs.links import Link, Progress
from vecgym.runs.supervisor import Labels, Started, Supervisor

__all__ = ["Link", "check_alone", "choose_start_method", "joined", "run"]

TIMEOUT_S = 600.0  # without any progress in any process


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
    """Call `function(link, *args)` in each of W new processes, and return the list of what they return.

    Args:
        function: of a module, where processes are spawned.
        device: a CUDA device gives each process a GPU, in turn.
        labels: rank -> what this process holds, for errors: "nodes 2-3".
        on_message: called here with (rank, message) for every `link.send(message)`, in order.
        timeout_s: when no process has communicated or sent anything for this long, one of them hangs.
        start_method: "fork" or "spawn"; None: `choose_start_method(device)`.

    Raises:
        ProcessError: when a process raises, dies or hangs; all are ended.
        ValueError, TypeError, FileNotFoundError, Damaged: as the function raises them before its first message.
        ValueError: where torchrun has started this process as one of several.
        KeyboardInterrupt: on Ctrl-C: it is passed on to the processes, which may return something first.

    >>> def work(link, x):
    ...     total = torch.tensor(x + link.rank)
    ...     dist.all_reduce(total)
    ...     link.send(f"process {link.rank} of {link.num_processes}")
    ...     return int(total)
    >>> messages = []
    >>> run(work, 2, (10,), start_method="fork", on_message=lambda rank, message: messages.append(message))
    [21, 21]
    >>> sorted(messages)
    ['process 0 of 2', 'process 1 of 2']
    """
    check_alone(f"a run of {num_processes} processes of its own")
    method = start_method or choose_start_method(device)
    context: Any = multiprocessing.get_context(method)
    if method == "spawn":
        check_importable(function, *args)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="vecgym-", ignore_cleanup_errors=True))
        progress = Progress(context, num_processes)
        started = Started([], [], progress, folder, method)
        stack.callback(_end, started)
        threads = 1 if method == "fork" else max(1, torch.get_num_threads() // num_processes)
        settings = _Settings(num_processes, folder, str(device), timeout_s, threads)
        for rank in range(num_processes):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_main, args=(rank, settings, theirs, progress, function, tuple(args)), name=f"vecgym-{rank}"
            )
            started.pipes.append(mine)
            with _starting(method):
                process.start()
            started.processes.append(process)
            theirs.close()
        return Supervisor(started, labels, on_message, timeout_s).wait()


def choose_start_method(device: torch.device | str = "cpu") -> str:
    """Return "fork" on Linux without a GPU, else "spawn"; see the module.

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
    parts = [part for value in values if is_dataclass(value) for part in vars(value).values()]
    for value in (*values, *parts):
        cls = value if hasattr(value, "__name__") else type(value)
        if getattr(cls, "__module__", None) == "__main__":
            raise ValueError(
                f"{cls.__name__} is defined in a notebook cell, which new processes cannot import. Fix: write the cell "
                f"to a file, %%writefile definitions.py, and from definitions import {cls.__name__}."
            )


@contextlib.contextmanager
def _starting(method: str) -> Iterator[None]:
    """Start processes within this block: their idle OpenMP threads sleep, and what cannot be sent to them is named."""
    policy = os.environ.get("OMP_WAIT_POLICY")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # the processes share the cores with one another
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
    finally:
        if policy is None:
            del os.environ["OMP_WAIT_POLICY"]


class _Settings(NamedTuple):
    """Settings that all processes share."""

    num_processes: int
    folder: str
    device: str
    timeout_s: float
    num_threads: int


def _end(started: Started) -> None:
    """Leave no process behind, whatever state it is in."""
    for process in started.processes:
        if process.is_alive():
            process.kill()
    for process in started.processes:
        process.join()
        process.close()
    for pipe in started.pipes:
        pipe.close()


# ----------------------------------------------------------------------------------------------- the child's side


def _main(
    rank: int, settings: _Settings, pipe: Any, progress: Progress, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Run the function in a new process, and report what it returns or raises."""
    link = Link(rank, settings.num_processes, pipe, progress)
    links.enter(link)
    _settle(link, settings)
    try:
        link.watch(False)
        with _process_group(link, settings):
            result = function(link, *args)
        link.put("return", result)
        code = 0
    except BaseException as error:
        link.put("error", (traceback.format_exc(), type(error).__name__, str(error), link.inside, link.began))
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)  # at once: a normal exit would wait for threads, and for connections to processes that may be gone


def _settle(link: Link, settings: _Settings) -> None:
    """Set up the signals, threads and warnings of a new process."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)  # so that Ctrl-C reaches the parent alone, which passes it on once
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGUSR1"):
        with contextlib.suppress(OSError):  # a full disk: the trace only shows where a process hangs
            trace = Path(settings.folder, f"trace-{link.rank}").open("w")  # noqa: SIM115 - open as long as the process
            faulthandler.register(signal.SIGUSR1, trace)
    threading.Thread(target=_follow_parent, args=(settings.folder,), daemon=True).start()
    torch.set_num_threads(settings.num_threads)
    warnings.simplefilter("ignore" if link.rank else "default")

    def show(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, UserWarning):
            link.put("warning", (str(message), issubclass(category, VecgymWarning)))

    warnings.showwarning = show


def _follow_parent(folder: str) -> None:
    """Exit when the parent does, even if it is killed, and clean up in its place."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


@contextlib.contextmanager
def _process_group(link: Link, settings: _Settings) -> Iterator[None]:
    """Join the process group of a `run`, through a file: no port that another program could take."""
    device = torch.device(settings.device)
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if num_gpus:
        torch.cuda.set_device(link.rank % num_gpus)
    os.environ["LOCAL_RANK"] = str(link.rank)
    # Otherwise gloo looks up the host's own name, which fails on machines that are not in any name service.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
    dist.init_process_group(
        "nccl" if num_gpus >= settings.num_processes else "gloo",  # NCCL needs a GPU for each process
        store=dist.FileStore(str(Path(settings.folder, "store")), settings.num_processes),
        rank=link.rank,
        world_size=settings.num_processes,
        # Later than the parent's, which knows who is to blame; it must be finite.
        timeout=datetime.timedelta(seconds=min(settings.timeout_s, 1e9) + 60),
    )
    try:
        yield
    finally:
        if sys.exc_info()[0] is None:
            dist.barrier()  # a process that is done at once must not close while another is still connecting
            dist.destroy_process_group()


def loopback() -> str:
    """Return the name of this machine's loopback interface.

    >>> loopback()[:2]
    'lo'
    """
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), names[0] if names else "lo")


# ------------------------------------------------------------------------------------------------- under torchrun


def check_alone(what: str, ways_out: str = "") -> None:
    """Raise a ValueError in one of several processes that run the same script: each would do all of `what`.

    >>> check_alone("a sweep")  # here there is one
    """
    if links.current() is not None:  # started by `run`, in a process that was alone
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
    """Join the process group that exists, or that of torchrun; yield this process's device: GPUs in turn.

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
