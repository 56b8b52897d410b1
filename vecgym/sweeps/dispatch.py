"""A sweep on an executor: a job for each stack.

A job carries its configurations as they are (models, strategies, settings), the data sets and the options, and the
settings of torch on which bits depend; no function of axes, and no value of an axis that is not a part of these.

Executors with pickle's own rules (`ProcessPoolExecutor`, mpi4py's) get it as bytes: a `multiprocessing` queue would
send tensors as file descriptors. Others, such as Dask's, get the object, and pickle it by their own rules. What comes
back are bytes.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn, cast

import torch
from torch import nn

from vecgym.core.errors import VecgymWarning, warn
from vecgym.engine import hooks
from vecgym.records.rows import counted, label
from vecgym.runs.multiprocess import interrupts, torch_set, torch_settings
from vecgym.runs.options import resolve_device
from vecgym.sweeps.chunk import PARTIAL, Curve
from vecgym.sweeps.configurations import Configuration, Data
from vecgym.sweeps.options import SweepOptions
from vecgym.sweeps.stack import Stack, Work, prepared_engine

ASK_EVERY_S = 0.2  # whether Ctrl-C was pressed
GRACE_S = 10.0  # that jobs under way have to come back, once the sweep is stopped


class Dispatch:
    """The jobs of a sweep under way.

    Args:
        options: of the sweep; its executor stays the caller's, and is not shut down.
        works: the stacks, in order.
        record: called with what each job returns, as it ends.

    Raises:
        ValueError: for what workers would compute otherwise, or hang with.
    """

    def __init__(
        self, options: SweepOptions, works: Sequence[Work], record: Callable[[Work, dict[str, Any]], None]
    ) -> None:
        assert options.executor is not None
        self.executor: Executor = options.executor
        self.works, self.record = works, record
        self.waiting: dict[Future[bytes], Work] = {}
        self.complete = True
        self._told: set[str] = set()
        _check(options, [config for work in works for config in work.configs])
        self.sweep, self.shared = uuid.uuid4().hex, self._sent(_shared(options))

    def _sent(self, value: Any) -> Any:
        plain = isinstance(self.executor, ProcessPoolExecutor) or type(self.executor).__module__.startswith("mpi4py")
        return _packed(value) if plain else value

    def run(self, interrupted: Sequence[Any]) -> bool:
        """Submit all jobs and await them; return whether all came to their ends.

        Raises:
            Exception: the first error, of a job or of the executor; its cause names the configurations.
        """
        try:
            for work in self.works:
                try:
                    job = self.executor.submit(train, self.sweep, self.shared, self._sent(_bare(work)))
                except Exception as error:  # it cannot be pickled; a broken or closed executor
                    _raise(error, work)
                self.waiting[job] = work
            while self.waiting and self.complete and not interrupted:
                wait(self.waiting, ASK_EVERY_S, FIRST_COMPLETED)
                for work, failure in self._returned():
                    _raise(failure, work)
        finally:
            _ended.add(self.sweep)
            if self.waiting:
                self._stop()
        return self.complete

    def _stop(self) -> None:
        """Cancel what has not begun, and record what else comes in a while."""
        self.complete = False
        for future in list(self.waiting):
            if future.cancel():
                del self.waiting[future]
        wait(self.waiting, GRACE_S)
        list(self._returned())

    def _returned(self) -> Iterator[tuple[Work, BaseException]]:
        """Record what has come back, in the order of the stacks, and yield the errors."""
        for future in [future for future in self.waiting if future.done()]:
            work = self.waiting.pop(future)
            error = CancelledError() if future.cancelled() else future.exception()
            if error is None:
                self._record(work, _read(future.result()))
            else:
                yield work, error

    def _record(self, work: Work, found: dict[str, Any]) -> None:
        found["curves"] = {index: Curve(**state) for index, state in found["curves"].items()}
        self.record(work, found)
        ended = [found["curves"][i].status for i in work.indices if i in found["curves"]]
        if len(ended) < len(work.indices) or PARTIAL in ended:  # Ctrl-C came to the worker
            self.complete = False
        for message in found["messages"]:
            if message not in self._told:
                self._told.add(message)
                warn(message)


def _check(options: SweepOptions, configs: Sequence[Configuration]) -> None:
    """Raise a ValueError where workers would hang, or would compute something else."""
    for model in {id(config.model): config.model for config in configs}.values():
        hooks.check_pickled(model, "sweep without executor, where nothing is sent")
    context = getattr(options.executor, "_mp_context", None)
    forked = context is not None and context.get_start_method() == "fork"
    if forked and (torch.get_num_threads() > 1 or resolve_device(options.device).type != "cpu"):
        raise ValueError(
            "the workers of this ProcessPoolExecutor are forked, which neither OpenMP's threads nor a GPU's driver "
            f"survive; here torch has {counted(torch.get_num_threads(), 'thread')}, on {options.device}. Fix: "
            'ProcessPoolExecutor(4, mp_context=multiprocessing.get_context("spawn")); or, on a CPU, '
            "torch.set_num_threads(1) before the sweep."
        )


def _raise(error: BaseException, work: Work) -> NoReturn:
    """Raise an error of a job, or of the executor, with the configurations of the stack."""
    points = [
        f"{config.index} ({', '.join(f'{name}={label(value)}' for name, value in config.point.items())})"
        for config in work.configs
        if config.index in work.indices
    ]
    more = f" and {len(points) - 8} more" if len(points) > 8 else ""
    where = RuntimeError(f"in the stack of configurations {', '.join(points[:8])}{more}")
    where.__cause__ = error.__cause__  # with some executors, where it was in the worker
    raise error from where


# ----------------------------------------------------------------------------------------------------- in the worker

_alone = threading.Lock()  # what jobs set of torch is set for the whole process: its threads take turns
_ended: set[str] = set()  # sweeps that have ended, in this process: jobs of theirs may still begin


def train(sweep: str, shared: Any, work: Any) -> bytes:
    """Train a stack; return its curves, where it was left, and vecgym's warnings, which are shown by `sweep`.

    Args:
        sweep: its own name.
        shared: see `_shared`.
        work: what this job has to do.
    """
    with _alone, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", VecgymWarning)
        curves: dict[int, Curve] = {}
        try:
            partial, engine = (None, "") if sweep in _ended else _train(sweep, _read(shared), _read(work), curves)
        except Exception as error:
            if not _can_be_sent(error):
                raise RuntimeError(f"{type(error).__name__}: {error}") from error
            raise
    for other in caught:
        if not issubclass(other.category, VecgymWarning):
            warnings.showwarning(other.message, other.category, other.filename, other.lineno)
    messages = [str(each.message) for each in caught if issubclass(each.category, VecgymWarning)]
    found = {index: curve.state() for index, curve in curves.items()}
    return _packed({"curves": found, "partial": partial, "engine": engine, "messages": messages})


def _train(sweep: str, shared: tuple[SweepOptions, dict[str, Any]], work: Work, curves: dict[int, Curve]) -> Any:
    options, settings = shared
    data = Data(options)  # made here: a `Data` holds batches
    configs = [replace(config, data=data) for config in work.configs]
    with (
        torch_set(**settings), torch.enable_grad(), interrupts() as interrupted,
        contextlib.closing(prepared_engine(configs, options)) as engine,
    ):  # fmt: skip
        stack = Stack(replace(work, configs=configs), options, engine, curves)
        with contextlib.closing(stack):
            for _ in stack.steps():
                if interrupted:
                    _ended.add(sweep)
                if sweep in _ended:
                    break
        stack.end()
        return stack.partial, str(engine.plan)


def _shared(options: SweepOptions) -> tuple[SweepOptions, dict[str, Any]]:
    """Return what all jobs of a sweep carry: options, and settings of torch."""
    bare = replace(options, model=nn.Module(), strategy=None, grid={}, points=None, resume=None, executor=None,
                   network=None, compute=None)  # fmt: skip
    return bare, torch_settings()


def _bare(work: Work) -> Work:
    """Return what a job carries of its configurations: not their points, nor the batches that they share here."""
    return replace(work, configs=[replace(config, point={}, data=cast(Any, None)) for config in work.configs])


class _ByValue(ForkingPickler):
    """What a `multiprocessing` queue would send, but tensors by their values, not as shared memory."""

    _extra_reducers: dict[Any, Any] = {}  # noqa: RUF012 - as in the base


def _packed(value: Any) -> bytes:
    return bytes(_ByValue.dumps(value))


def _read(value: Any) -> Any:
    return ForkingPickler.loads(value) if isinstance(value, bytes) else value


def _can_be_sent(error: Exception) -> bool:
    """Whether the error survives the way back: one that cannot be unpickled would break a pool."""
    try:
        again = _read(_packed(error))
    except Exception:  # whatever the user's class does
        return False
    return type(again) is type(error) and str(again) == str(error)
