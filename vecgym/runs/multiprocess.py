"""Processes: run one function in W of them on this machine, and keep those of a run in step.

`run(function, num_processes, args)` calls `function(link, *args)` in each process, within a process group of
torch.distributed, and returns what they return. They are started for it and ended together: an error in one of them
ends all, with one error. A `Session` handles what the processes of a training exchange besides what the strategy
exchanges, however they were started.

How they are started: on Linux without a GPU they are *forked*. Each begins as a copy of this process, in milliseconds,
and has everything that is defined here, including a notebook's cells. Nothing is pickled. Each uses one thread within
its operations, since OpenMP's threads do not survive a fork. With a GPU, whose driver does not survive it either, and
on macOS they are *spawned*: new interpreters, which receive what they need. With cloudpickle
(`pip install vecgym[processes]`) that may be anything a notebook or a function defines. Without it, models, datasets,
functions and strategies must be defined at the top level of an importable module. In either case a script must keep its
work under `if __name__ == "__main__":`.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import pickle
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
from dataclasses import replace
from multiprocessing import connection
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from vecgym.collectives import Collectives, StackedCollectives
from vecgym.collectives.distributed import DistributedCollectives
from vecgym.collectives.wire import Wire
from vecgym.core import tree
from vecgym.core.errors import Damaged, ProcessError, VecgymWarning, warn
from vecgym.engine import ModelFacts
from vecgym.records.runfile import plain
from vecgym.runs.evaluation import everyone
from vecgym.runs.options import TIMEOUT_S, FitOptions, resolve_device
from vecgym.simulation.state import Metrics

__all__ = ["Link", "check_alone", "choose_start_method", "joined", "run"]

GRACE_S = 2.0  # to wait after a first error, for others that may say more, such as who caused it
POLL_S = 0.1
STOP = 1  # why a run ends early: somebody asks for it; otherwise the number of a signal, which is greater
# Errors of the user: raised here as they were raised there.
USER_ERRORS = {error.__name__: error for error in (ValueError, TypeError, FileNotFoundError, Damaged)}


class _Shared(NamedTuple):
    """The data that all processes of a run receive.

    Attributes:
        beats: of each process, in memory that all share; see `Link.beat`.
        store: the file by which they find one another.
        num_threads: of each process.
        call: the function and its arguments; pickled for a new interpreter.
    """

    beats: Any
    store: str
    device: str
    timeout_s: float
    num_threads: int
    call: Any


class Link:
    """The connection of a process to the one that started it.

    Attributes:
        rank, num_processes: of this process, and W.
        interrupted: empty until the process that started this one passes on a Ctrl-C, or `STOP`; see `interrupts`.

    >>> def work(link):
    ...     link.beat()  # it makes progress
    ...     link.send({"rank": link.rank})
    >>> run(work, 1, start_method="fork", on_message=print)
    {'rank': 0}
    [None]
    """

    def __init__(self, rank: int, pipe: Any, shared: _Shared) -> None:
        self.rank, self.num_processes = rank, len(shared.beats)
        self.interrupted: list[int] = []
        self.pipe = pipe
        self._beats = shared.beats
        self._lock = threading.Lock()

    def send(self, message: Any) -> None:
        """Send tensors on the CPU, arrays, plain values, or anything else that can be pickled to `on_message`."""
        self._put("message", message)

    def beat(self) -> None:
        """Report progress: call it before this process waits for others, and after."""
        self._beats[self.rank] += 1

    def _put(self, kind: str, value: Any) -> None:
        """Send a "message", a "warning", the function's "return" value, or its "error"."""
        data = pickle.dumps((kind, value))  # tensors by value: torch's shared memory is small in containers
        with self._lock:  # warnings may come from other threads
            self.pipe.send_bytes(data)


# ---------------------------------------------------------------------------------------------- the parent's side


def run(
    function: Callable[..., Any], num_processes: int, args: Sequence[Any] = (), *, device: torch.device | str = "cpu",
    num_nodes: int | None = None, on_message: Callable[[Any], None] = lambda message: None,
    timeout_s: float = TIMEOUT_S, start_method: str | None = None,
) -> list[Any]:  # fmt: skip
    """Call `function(link, *args)` in each of W new processes, and return the list of what they return.

    Args:
        device: with a CUDA device each process gets a GPU, in turn.
        num_nodes: held by the processes in equal parts; names them in errors: "process 1 (nodes 2-3)".
        on_message: called here with each message of `link.send(message)`, in order. If it raises StopIteration, `STOP`
            is passed on to `link.interrupted`.
        timeout_s: if no process communicates or sends anything for this long, one of them hangs.
        start_method: "fork" or "spawn"; None: `choose_start_method(device)`.

    Raises:
        ProcessError: if a process raises, dies or hangs; all are ended, after what they sent has been delivered.
        ValueError, TypeError, FileNotFoundError, Damaged: if the function raises them before the first message.
        ValueError: if something cannot be sent to a new interpreter.
        ValueError: if torchrun started this process as one of several.
        KeyboardInterrupt: on Ctrl-C before the first message, and on a second one. Later, the first is passed on to
            `link.interrupted`, and the processes may return something.

    >>> def work(link, x):
    ...     total = torch.tensor(x + link.rank)
    ...     dist.all_reduce(total)
    ...     link.send(f"process {link.rank} of {link.num_processes}")
    ...     return int(total)
    >>> messages = []
    >>> run(work, 2, (10,), start_method="fork", on_message=messages.append)
    [21, 21]
    >>> sorted(messages)
    ['process 0 of 2', 'process 1 of 2']
    """
    check_alone(f"a run of {num_processes} processes of its own")
    method = start_method or choose_start_method(device)
    context: Any = multiprocessing.get_context(method)
    call: Any = (function, tuple(args))
    threads = 1 if method == "fork" else max(1, torch.get_num_threads() // num_processes)
    with tempfile.TemporaryDirectory(prefix="vecgym-") as folder, interrupts() as interrupted:
        shared = _Shared(
            context.RawArray("q", num_processes), os.path.join(folder, "store"), str(device), timeout_s,
            threads, call if method == "fork" else _pickled(call),
        )  # fmt: skip
        children = _Children(shared, on_message, num_nodes)
        try:
            children.start(context)
            return children.wait(interrupted)
        finally:
            children.end()
            for pipe in children.pipes.values():
                pipe.close()


def choose_start_method(device: torch.device | str = "cpu") -> str:
    """Return "fork" on Linux without a GPU, else "spawn"; see the module.

    >>> choose_start_method("cuda")
    'spawn'
    """
    gpu = torch.device(device).type != "cpu" or torch.cuda.device_count() > 0
    return "fork" if sys.platform == "linux" and not gpu else "spawn"


def _pickled(call: tuple[Callable[..., Any], tuple[Any, ...]]) -> bytes:
    """Pickle a call for a new interpreter; with cloudpickle, including definitions in a notebook."""
    try:
        from cloudpickle import dumps
    except ImportError:
        from pickle import dumps
    try:
        return dumps(call)
    except Exception as error:
        raise ValueError(
            f"an argument cannot be sent to a new process: {error}. Fix: pip install vecgym[processes], which adds "
            "cloudpickle; or define models, datasets, collate functions and schedules at the top of a module, not in a "
            "function, and not as a lambda. Open files, locks and connections cannot be sent."
        ) from error


def _unpickled(call: bytes) -> Any:
    """Invert `_pickled` in a new interpreter."""
    try:
        return pickle.loads(call)
    except AttributeError as error:
        raise ValueError(
            "new processes cannot import what a notebook cell, `python -c`, or the part of a script under `if __name__ "
            f'== "__main__"` defines: {error}. Fix: define it at the top of a file, in a notebook %%writefile '
            'definitions.py, and import it from there. With backend="processes", pip install vecgym[processes] is '
            "enough."
        ) from None


class _Children:
    """The processes of a run, seen from the one that started them."""

    def __init__(self, shared: _Shared, on_message: Callable[[Any], None], num_nodes: int | None) -> None:
        self.shared = shared
        self.on_message = on_message
        self.num_nodes = num_nodes
        self.processes: list[Any] = []
        self.pipes: dict[int, Any] = {}  # by rank; those that are still open
        self.began = False  # a message has come
        self.results: dict[int, Any] = {}
        self.errors: dict[int, tuple[float, str, str, str]] = {}  # when, the class, the message, the traceback

    def start(self, context: Any) -> None:
        forked = context.get_start_method() == "fork"
        for rank in range(len(self.shared.beats)):
            self.pipes[rank], theirs = context.Pipe()
            inherited = list(self.pipes.values()) if forked else []
            process = context.Process(target=_main, args=(rank, theirs, inherited, self.shared))
            process.start()
            self.processes.append(process)
            theirs.close()  # so that reading from it ends with the process

    def end(self) -> None:
        """End all processes, whatever state they are in."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def wait(self, interrupted: list[int]) -> list[Any]:
        """Return what the processes return, in the order of their ranks."""
        passed_on, last_beats, quiet = False, list(self.shared.beats), 0
        while len(self.results) < len(self.processes):
            ended = self._ended()
            came, beats = self._receive(POLL_S), list(self.shared.beats)
            # Counted, not measured: while the whole program is stopped, for example by Ctrl-Z, no process hangs.
            quiet, last_beats = (0 if came or beats != last_beats else quiet + 1), beats
            if interrupted and not passed_on:
                if not self.began:
                    raise KeyboardInterrupt
                passed_on, quiet = True, 0
                self._pass_on(signal.SIGINT)
            if ended - self.results.keys() or quiet * POLL_S > self.shared.timeout_s:
                raise self._failure()
        return [self.results[rank] for rank in range(len(self.processes))]

    def _pass_on(self, why: int) -> None:
        for pipe in self.pipes.values():
            with contextlib.suppress(OSError):
                pipe.send_bytes(bytes([why]))

    def _ended(self) -> set[int]:
        return {rank for rank, process in enumerate(self.processes) if process.exitcode is not None}

    def _receive(self, seconds: float) -> bool:
        """Wait for messages, take one from each process, and return whether there was any."""
        ready, came = connection.wait(list(self.pipes.values()), seconds), False
        for rank, pipe in list(self.pipes.items()):
            if pipe in ready:
                try:
                    data = pipe.recv_bytes()
                except (EOFError, OSError):  # it has ended, perhaps in the middle of a message
                    del self.pipes[rank]
                else:
                    self._take(rank, *pickle.loads(data))
                    came = True
        return came

    def _take(self, rank: int, kind: str, value: Any) -> None:
        if kind == "message":
            self.began = True
            try:
                self.on_message(value)
            except StopIteration:
                self._pass_on(STOP)
        elif kind == "warning":
            text, ours = value
            warn(text, VecgymWarning if ours else UserWarning)
        else:
            (self.results if kind == "return" else self.errors)[rank] = value

    def _failure(self) -> Exception:
        """Choose one error, of a process that has ended, or else of one that hangs, after receiving all they sent."""
        if self._ended() - self.results.keys():
            deadline = time.monotonic() + GRACE_S
            for process in self.processes:
                process.join(max(0.0, deadline - time.monotonic()))
        ended = self._ended()
        self.end()
        while self._receive(0):
            pass
        if silent := ended - self.errors.keys():  # the others fail because it died: none of them ends silently
            code = self.processes[min(silent)].exitcode
            how = f"was killed by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return self._error(min(silent), how)
        if not self.errors:  # one hangs: one that waits for nobody, or else the one furthest behind
            beats = list(self.shared.beats)
            rank = min(range(len(beats)), key=lambda rank: (beats[rank] % 2, beats[rank]))
            return self._error(rank, f"hangs: it made no progress for {self.shared.timeout_s:g} s (timeout_s)")
        first = min(self.errors, key=self.errors.__getitem__)  # the others fail because of it
        _, kind, message, where = self.errors[first]
        if kind in USER_ERRORS and not self.began:
            return USER_ERRORS[kind](message)
        return self._error(first, f"{kind}: {message}", where)

    def _error(self, rank: int, what: str, where: str = "") -> ProcessError:
        nodes = ""
        if self.num_nodes is not None:
            first, end = (i * self.num_nodes // len(self.processes) for i in (rank, rank + 1))
            nodes = f"node {first}" if end == first + 1 else f"nodes {first}-{end - 1}"
        return ProcessError(rank, nodes, what, where)


# ----------------------------------------------------------------------------------------------- the child's side


def _main(rank: int, pipe: Any, inherited: list[Any], shared: _Shared) -> None:
    """Run the function in a new process, and report what it returns or raises."""
    for end in inherited:  # so that each pipe ends with the process at its other end
        end.close()
    link = Link(rank, pipe, shared)
    try:
        _settle(link, shared)
        function, args = _unpickled(shared.call) if isinstance(shared.call, bytes) else shared.call
        _join_group(link, shared)
        result = function(link, *args)
        sys.stdout.flush()
        link._put("return", result)
        threading.Event().wait()  # until all are ended: another process may still be connecting to this one
    except BaseException as error:
        link._put("error", (time.monotonic(), type(error).__name__, str(error), traceback.format_exc()))
        sys.stdout.flush()
    finally:
        os._exit(1)  # at once: a normal exit would wait for threads, and for connections to processes that may be gone


def _settle(link: Link, shared: _Shared) -> None:
    """Set up the signals, threads and warnings of a new process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches all processes: the parent passes it on
    threading.Thread(target=_follow_parent, args=(link, shared.store), daemon=True).start()
    torch.set_num_threads(shared.num_threads)
    warnings.simplefilter("ignore" if link.rank else "default")

    def show(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, UserWarning):
            link._put("warning", (str(message), issubclass(category, VecgymWarning)))

    warnings.showwarning = show


def _follow_parent(link: Link, store: str) -> None:
    """Record what the parent passes on, a Ctrl-C or `STOP`; exit when the parent does, even if it is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    with contextlib.suppress(EOFError, OSError):
        while parent.sentinel not in connection.wait([link.pipe, parent.sentinel]):
            link.interrupted += link.pipe.recv_bytes()
    shutil.rmtree(os.path.dirname(store), ignore_errors=True)  # if the parent was killed
    os._exit(1)


def _join_group(link: Link, shared: _Shared) -> None:
    """Join the process group of a `run`."""
    num_gpus = torch.cuda.device_count() if torch.device(shared.device).type == "cuda" else 0
    os.environ["LOCAL_RANK"] = str(link.rank)
    # Otherwise gloo looks up the host's own name, which fails on machines that are not in any name service.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
    dist.init_process_group(
        "nccl" if num_gpus >= link.num_processes else "gloo",  # NCCL needs a GPU for each process
        store=dist.FileStore(shared.store, link.num_processes),
        rank=link.rank,
        world_size=link.num_processes,
        # Later than the parent's timeout, since the parent knows which process is to blame; it must be finite.
        timeout=datetime.timedelta(seconds=min(shared.timeout_s, 1e9) + 60),
    )


def loopback() -> str:
    """Return the name of this machine's loopback interface.

    >>> loopback()[:2]
    'lo'
    """
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), names[0] if names else "lo")


@contextlib.contextmanager
def interrupts() -> Iterator[list[int]]:
    """Collect Ctrl-C instead of raising it in the middle of a step; a second one raises at once.

    Yields a list that is empty until the first Ctrl-C. It stays empty if no handler can be set: outside the main
    thread, and in a sub-interpreter.
    """
    signals: list[int] = []

    def handler(signum: int, frame: Any) -> None:
        if signum in signals:
            raise KeyboardInterrupt
        signals.append(signum)

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ValueError):
            stack.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, handler))
        yield signals


# ------------------------------------------------------------------------------------------------- under torchrun


def check_alone(what: str, ways_out: str = "") -> None:
    """Raise a ValueError if several processes run this script: each would do all of `what`.

    >>> check_alone("a sweep")  # here there is one
    """
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
        ValueError: if there is neither.

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
    with contextlib.ExitStack() as stack:
        if not dist.is_initialized():
            if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
                raise ValueError(
                    'backend="distributed" needs a process group. Start the script by torchrun --nproc-per-node W '
                    'script.py, or give backend="processes", num_processes=W, which starts the processes itself.'
                )
            crowded = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > max(1, torch.cuda.device_count())
            dist.init_process_group("nccl" if device.type == "cuda" and not crowded else "gloo")
            stack.callback(dist.destroy_process_group)
        yield device


# ------------------------------------------------------------------------------------------------ keeping them in step


T = TypeVar("T")


@contextlib.contextmanager
def joined_nodes(
    options: FitOptions, watch: Callable[[], None] = lambda: None
) -> Iterator[tuple[Collectives, torch.device]]:
    """Yield the collectives and the device of the nodes in this process: all nodes, or its part if "distributed".

    Args:
        watch: see `Wire`.
    """
    device = resolve_device(options.device)
    with torch_set(threads=1) if options.exact else contextlib.nullcontext():
        if options.backend == "stacked":
            yield StackedCollectives(options.num_nodes), device
            return
        with joined(device) as device, contextlib.closing(Wire(watch=watch)) as wire:
            yield DistributedCollectives(options.num_nodes, wire, exact=options.exact), device
            wire.finish()


class Session:
    """Keep the processes of a run in step; with one process, nothing is exchanged."""

    def __init__(self, comm: Collectives) -> None:
        self.comm = comm
        self.wire = comm.wire if isinstance(comm, DistributedCollectives) else None
        self.num_processes = self.wire.num_processes if self.wire is not None else 1
        self.rank = self.wire.rank if self.wire is not None else 0
        self._asked = 0  # why the run ends, as all processes know

    def joined(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Join the numbers of all nodes, from one for each node here."""
        return tuple(count for part in self.each(list(counts)) for count in part)

    def facts(self, facts: ModelFacts) -> ModelFacts:
        """Return the first process's facts about the model, such as which buffers it changes."""
        names = ("unused", "mutated", "random", "host_random", "written", "chooses")
        shared = {name: vars(facts)[name] for name in names}
        return replace(facts, **self.first(lambda: shared))

    def observed(self, metrics: Metrics, interrupted: list[int]) -> Metrics:
        """Return the losses of all nodes; interrupts travel with them, so that all stop after the same step."""
        if self.num_processes == 1:
            return metrics
        losses = metrics.losses.double()
        columns = torch.stack([losses, torch.full_like(losses, max(interrupted, default=0))], 1)
        losses, signals = everyone(columns, self.comm, losses.device).unbind(1)  # [K]
        self._asked = int(signals.max())
        return metrics._replace(losses=losses.to(metrics.losses.dtype))

    def agree(self, stop: bool) -> bool:
        """End the run after this step if any process asks for it, and return whether; all processes call this."""
        asked = any(self.each(stop))
        self._asked = max(self._asked, int(asked))
        return asked

    def stop(self, interrupted: list[int]) -> int:
        """Return why the run ends after this step: `STOP`, a signal, or 0."""
        return max(self._asked, *(interrupted if self.num_processes == 1 else ()), 0)

    def each(self, value: Any) -> list[Any]:
        """Return every process's value, in the order of their ranks."""
        return [value] if self.wire is None else self.wire.all_gather_object(value)

    def first(self, find: Callable[[], T]) -> T:
        """Return the first process's result of `find` in all processes; raise its error in all of them."""
        if self.wire is None:
            return find()
        outcome: tuple[Any, Exception | None] = None, None
        if self.rank == 0:
            try:
                outcome = find(), None
            except (OSError, ValueError, TypeError) as error:
                outcome = None, error
        value, failure = self.each(outcome)[0]
        if failure is not None:
            raise failure
        return value

    def gathered(self, values: Any) -> Any:
        """Gather nested values of the nodes from all processes, on the CPU of the first; elsewhere return None.

        A value that is the same on every node is `[1, *]`, as it would be in one process. A value that a process
        lacks, because none of its nodes has trained yet, is 0 there.
        """
        if self.num_processes == 1:
            return plain(values, "state")
        leaves = dict(tree.flatten(values))
        paths = dict.fromkeys(path for process in self.each(list(leaves)) for path in process)
        gathered = {}
        for path in paths:
            parts = self.each(plain(leaves.get(path), f"state{tree.path_name(path)}"))
            if self.rank == 0:
                gathered[path] = _joined_rows(parts, len(self.comm.node_ids))
        return tree.unflatten(gathered) if self.rank == 0 else None

    def rows_here(self, values: Any) -> Any:
        """Take the rows of the nodes here from nested values of all nodes."""
        if self.num_processes == 1:
            return values
        first, last, K = int(self.comm.node_ids[0]), int(self.comm.node_ids[-1]) + 1, self.comm.num_nodes
        return tree.map_leaves(lambda x: x[first:last] if x.dim() > 0 and len(x) == K > 1 else x, values)


def _joined_rows(parts: Sequence[Any], num_local: int) -> Any:
    """Join the values of all processes: tensors `[1 or L, *]` to `[1 or K, *]`; of anything else return the first.

    The value is None for a process that lacks it.
    """
    first = next((x for x in parts if x is not None), None)
    if not isinstance(first, Tensor) or first.dim() == 0 or len(first) not in (1, num_local):
        return first
    if num_local > 1 and all(x is not None and len(x) == 1 for x in parts):
        return first
    present = [torch.zeros_like(first[:1]) if x is None else x for x in parts]
    rows = torch.cat([x.expand(num_local, *first.shape[1:]) for x in present])  # [K, *]
    if num_local > 1:
        return rows
    bits = rows[:, None].flatten(1).view(torch.uint8)  # in which 0 and -0 differ
    return rows[:1].clone() if (bits == bits[:1]).all() else rows


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {  # of torch, on which bits depend
    "threads": (torch.get_num_threads, torch.set_num_threads),  # within operations: sums depend on how many share them
    "dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "matmul": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda both: torch.use_deterministic_algorithms(both[0], warn_only=both[1]),
    ),
}


def torch_settings() -> dict[str, Any]:
    """Return torch's settings in this process, by name."""
    return {name: get() for name, (get, _) in SETTINGS.items()}


@contextlib.contextmanager
def torch_set(**settings: Any) -> Iterator[None]:
    """Compute with other settings of torch.

    >>> with torch_set(dtype=torch.float64):
    ...     torch.zeros(()).dtype
    torch.float64
    """
    with contextlib.ExitStack() as stack:
        for name, value in settings.items():
            get, put = SETTINGS[name]
            if value != (before := get()):
                stack.callback(put, before)
                put(value)
        yield
