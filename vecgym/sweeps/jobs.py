"""A stack as a job of an executor: what it carries, what the worker does, and what comes back.

A job carries its configurations as they are (models, strategies, settings), the data sets and the options, and the
settings of torch on which bits depend; no function of axes, and no value of an axis that is not a part of these. It
returns bytes: the curves, as plain arrays, or the error that was raised. So an exception that an executor raises is its
own: a worker that died, something that could not be sent.

Executors with pickle's own rules (`ProcessPoolExecutor`, mpi4py's) get a job as bytes, too: what cannot be pickled is
found before anything begins, and torch's file descriptors, which a `multiprocessing` queue uses for tensors, are left
out of it. Others, such as Dask's, get the object, and pickle it by their own rules.
"""

from __future__ import annotations

import contextlib
import io
import os
import platform
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from vecgym.core.errors import VecgymWarning
from vecgym.runs.interrupts import interrupts
from vecgym.sweeps.configurations import Data
from vecgym.sweeps.curves import Curve
from vecgym.sweeps.options import SweepOptions
from vecgym.sweeps.stack import Stack, Work, prepared_engine

ASK_EVERY_S = 0.2  # whether the sweep goes on
_alone = threading.Lock()  # what jobs set of torch is set for the whole process: its threads take turns


class Job:
    """A stack to be trained somewhere: `job()` does it, and returns what `outcome` reads.

    Args:
        shared: what all jobs of a sweep share, or its bytes; see `shared_parts`.
        work: what this one has to do, or its bytes.
    """

    def __init__(self, shared: Any, work: Any, lease: Lease) -> None:
        self.shared, self.work, self.lease = shared, work, lease
        self.tries = 1  # with Dask, what is sent again must differ from what was lost

    def __call__(self) -> bytes:
        ended = self.lease.watch()
        with _alone, _recorded() as messages:
            curves: dict[int, Curve] = {}
            found: dict[str, Any] = {"curves": {}, "partial": None, "error": None, "messages": messages}
            try:
                if not ended():
                    found["partial"] = self._train(ended, curves)
            except Exception as error:
                found["error"] = _sendable(error), traceback.format_exc()
            found["curves"] = {index: curve.state() for index, curve in curves.items()}
            return packed(found)

    def _train(self, ended: Callable[[], bool], curves: dict[int, Curve]) -> Any:
        options, settings = _unpacked(self.shared)
        work: Work = _unpacked(self.work)
        data = Data(options)  # made here: a `Data` holds batches
        configs = [replace(config, data=data) for config in work.configs]
        with (
            _as_in(settings), torch.enable_grad(), interrupts() as interrupted,
            contextlib.closing(prepared_engine(configs, options)) as engine,
        ):  # fmt: skip
            stack = Stack(replace(work, configs=configs), options, engine, curves)
            with contextlib.closing(stack):
                for _ in stack.steps():
                    if interrupted or ended():
                        break
            stack.end()
        return stack.partial


def shared_parts(options: SweepOptions) -> tuple[SweepOptions, dict[str, Any]]:
    """Return what all jobs of a sweep carry."""
    bare = replace(options, model=nn.Module(), strategy=None, grid={}, resume=None, executor=None, network=None,
                   compute=None)  # fmt: skip
    return bare, {name: get() for name, (get, _) in SETTINGS.items()}


def sent(work: Work) -> Work:
    """Return what a job carries of its configurations: not their points, nor the batches that they share here."""
    return replace(work, configs=[replace(config, point={}, data=cast(Any, None)) for config in work.configs])


def outcome(returned: bytes) -> dict[str, Any]:
    """Read what a job has returned: `curves`, `partial`, `error` (with its traceback as text, or None), `messages`."""
    found = _unpacked(returned)
    found["curves"] = {index: Curve.of(state) for index, state in found["curves"].items()}
    return found


# --------------------------------------------------------------------------------------------- whether it goes on


class Lease:
    """A file that is there as long as the sweep goes on: a job that can see it stops soon after the sweep.

    One that begins where the file cannot be seen, on another machine say, does not stop with the sweep.
    """

    def __init__(self) -> None:
        handle, name = tempfile.mkstemp(prefix="vecgym-sweep-")
        os.close(handle)
        self.path = Path(name)
        self.place = _place(self.path.parent)

    def end(self) -> None:
        """End the sweep for all jobs."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def watch(self) -> Callable[[], bool]:
        """Return a function that says whether the sweep has ended; it looks a few times per second."""
        seen = self.path.exists() or self.place == _place(self.path.parent)
        asked, ended = float("-inf"), False

        def look() -> bool:
            nonlocal asked, ended
            if seen and not ended and time.monotonic() - asked > ASK_EVERY_S:
                asked, ended = time.monotonic(), not self.path.exists()
            return ended

        return look


def _place(folder: Path) -> tuple[str, int, int] | None:
    """Return what tells a folder from all others, also from those of containers on this machine; None: not there."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return platform.node(), found.st_dev, found.st_ino


# ------------------------------------------------------------------------------------- what bits and messages depend on

SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "matmul": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda both: torch.use_deterministic_algorithms(both[0], warn_only=both[1]),
    ),
}


@contextlib.contextmanager
def _as_in(settings: dict[str, Any]) -> Iterator[None]:
    """Compute with the settings of the process that calls `sweep`."""
    before = {name: get() for name, (get, _) in SETTINGS.items()}
    try:
        for name, value in settings.items():
            if value != before[name]:
                SETTINGS[name][1](value)
        yield
    finally:
        for name, value in before.items():
            if value != settings[name]:
                SETTINGS[name][1](value)


@contextlib.contextmanager
def _recorded() -> Iterator[list[str]]:
    """Collect vecgym's own warnings, which are shown where `sweep` was called, and let others pass."""
    messages: list[str] = []
    with warnings.catch_warnings():
        show = warnings.showwarning
        warnings.simplefilter("always", VecgymWarning)

        def keep(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, VecgymWarning):
                messages.append(str(message))
            else:
                show(message, category, *where, **more)

        warnings.showwarning = keep
        yield messages


# ------------------------------------------------------------------------------------------------- to bytes, and back


class _Plain(ForkingPickler):
    """What a `multiprocessing` queue would send, but tensors by their values, not as shared memory."""

    _extra_reducers: dict[Any, Any] = {}  # noqa: RUF012 - as in the base


def packed(value: Any) -> bytes:
    """Return the bytes of a value, by the standard rules: functions and classes by the name of their module."""
    buffer = io.BytesIO()
    _Plain(buffer, 5).dump(value)
    return buffer.getvalue()


def _unpacked(value: Any) -> Any:
    return ForkingPickler.loads(value) if isinstance(value, bytes) else value


def _sendable(error: Exception) -> Exception:
    """Return the error, if it survives the way back; else one with its text."""
    try:
        again = _unpacked(packed(error))
        if type(again) is type(error) and str(again) == str(error):
            return error
    except Exception:  # whatever the user's class does
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")
