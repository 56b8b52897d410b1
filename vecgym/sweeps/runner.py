"""The training of a sweep, chunk after chunk, in this process or on an executor.

On an executor each chunk is a job. It carries its configurations (models, strategies, settings), the datasets, the
options, and the settings of torch on which bits depend, but neither functions of axes nor the values of axes.

Executors that use plain pickle (`ProcessPoolExecutor`, mpi4py's) get a job as bytes, since a `multiprocessing` queue
would send tensors as file descriptors. Others, such as Dask's, get the object, and pickle it in their own way. Results
come back as bytes.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import nn
from tqdm.auto import tqdm

from vecgym.core.errors import VecgymWarning, warn
from vecgym.engine import Engine, hooks
from vecgym.records.rows import counted
from vecgym.runs.multiprocess import interrupts, torch_set, torch_settings
from vecgym.runs.options import resolve_device
from vecgym.sweeps.chunk import PARTIAL, Chunk, Curve, Work, prepared_engine
from vecgym.sweeps.configurations import Configuration, Data, named
from vecgym.sweeps.options import SweepOptions
from vecgym.sweeps.programs import make_programs

SAVE_INTERVAL_S = 60.0  # between two writes of the results
ASK_EVERY_S = 0.2  # between two checks for Ctrl-C
GRACE_S = 10.0  # for jobs under way to return, once the sweep is stopped


class Runner:
    """A sweep under way.

    Attributes:
        options: of the sweep.
        axes: name -> values.
        configs: one for each point, in order.
        programs: the configurations that can be stacked.
        curves: index of a configuration -> its curve.
    """

    def __init__(self, options: SweepOptions, axes: Mapping[str, Any], configs: list[Configuration]) -> None:
        self.options = options
        self.axes = axes
        self.configs = configs
        self.programs = make_programs(configs, options)
        self.curves: dict[int, Curve] = {}
        self._program_of = {config.index: program for program in self.programs for config in program.configs}
        self._engines: dict[tuple[int, int], Engine] = {}
        self._partials: list[dict[str, Any]] = []  # the states of interrupted chunks

    def run(self, save: Callable[[], None]) -> bool:
        """Train all unfinished configurations; return False if interrupted."""
        total = sum(config.num_steps for config in self.configs)
        shown = tqdm(total=total, disable=not self.options.progress, unit="step")
        try:
            with torch.enable_grad(), interrupts() as interrupted, shown as bar:
                works = [work for program in self.programs for chunk in program.chunks if (work := self._work(chunk))]
                bar.update(total - sum(work.steps_left for work in works))
                if works and self.options.executor is not None:
                    self._dispatch(works, interrupted, save, bar)
                    return not interrupted
                for work in works:
                    self._train(work, interrupted, save, bar)
                    if interrupted:
                        return False
                    save()
            return True
        finally:
            for engine in self._engines.values():
                engine.close()
            self._engines.clear()

    def _work(self, chunk: list[int]) -> Work | None:
        """Return the training that is left of a chunk; None: it is finished."""
        todo = [i for i in chunk if i not in self.curves or self.curves[i].status == PARTIAL]
        partial = next((each for each in self._partials if each["left"] == todo), None)
        if partial is None:
            return Work([self.configs[i] for i in todo]) if todo else None
        return Work([self.configs[i] for i in partial["begun"]], partial, {i: self.curves[i] for i in todo})

    def _train(self, work: Work, interrupted: list[int], save: Callable[[], None], bar: tqdm) -> None:
        """Train a chunk in this process."""
        chunk = Chunk(work, self.options, self._engine(work.configs), self.curves)
        saved = time.perf_counter()
        with contextlib.closing(chunk.simulation):
            for num_steps in chunk.steps():
                bar.update(num_steps)
                if interrupted:
                    break
                if time.perf_counter() - saved > SAVE_INTERVAL_S:
                    chunk.keep()
                    self._leave(work, chunk.partial)
                    save()
                    saved = time.perf_counter()
        chunk.end()
        self._leave(work, chunk.partial)

    def _dispatch(self, works: list[Work], interrupted: list[int], save: Callable[[], None], bar: tqdm) -> None:
        """Have the chunks trained by the workers of an executor."""
        messages: set[str] = set()

        def record(work: Work, trained: Trained) -> None:
            self.curves |= trained.curves
            self._program_of[work.configs[0].index].engine = trained.engine
            self._leave(work, trained.partial)
            bar.update(work.steps_left)
            save()
            if any(i not in trained.curves or trained.curves[i].status == PARTIAL for i in work.indices):
                interrupted.append(0)  # the worker received Ctrl-C
            for message in trained.messages:
                if message not in messages:
                    messages.add(message)
                    warn(message)

        dispatch(self.options, works, interrupted, record)

    def _leave(self, work: Work, partial: dict[str, Any] | None) -> None:
        """Keep the state of an interrupted chunk; None: it has ended, or cannot be continued."""
        others = [each for each in self._partials if not set(each["left"]) & set(work.indices)]
        self._partials = others if partial is None else [*others, partial]

    def _engine(self, chunk: list[Configuration]) -> Engine:
        """Return the engine of a chunk; chunks of equal size of a program share one."""
        program = self._program_of[chunk[0].index]
        key = id(program), len(chunk)
        if key not in self._engines:
            self._engines[key] = prepared_engine(chunk, self.options)
            program.engine = str(self._engines[key].plan)
        return self._engines[key]

    def joined(self, other: Runner) -> Runner:
        """Return a runner with the configurations of both, in this order."""
        both, first = copy.copy(self), len(self.configs)
        others = [replace(config, index=first + config.index) for config in other.configs]
        both.configs = [*self.configs, *others]
        both.curves = {**self.curves, **{first + i: curve for i, curve in other.curves.items()}}
        both.programs = self.programs + [
            replace(
                program, configs=[others[config.index] for config in program.configs],
                chunks=[[first + i for i in chunk] for chunk in program.chunks],
            )
            for program in other.programs
        ]  # fmt: skip
        return both

    def state(self) -> dict[str, Any]:
        """Return the results so far, for a file."""
        return {
            "chunks": [program.chunks for program in self.programs],
            "curves": {index: curve.state() for index, curve in self.curves.items()},
            "partial": self._partials,
        }

    def load(self, state: dict[str, Any], places: Sequence[int]) -> None:
        """Continue from a saved `state`, whose rows are now at `places`.

        Saved stacks are kept; the other configurations form new ones.
        """

        def moved(rows: Sequence[int]) -> list[int]:
            return [places[row] for row in rows]

        saved = [moved(chunk) for chunks in state["chunks"] for chunk in chunks]
        for program in self.programs:
            indices = [config.index for config in program.configs]
            kept = [chunk for chunk in saved if set(chunk) <= set(indices)]
            rest = [i for i in indices if not any(i in chunk for chunk in kept)]
            size = len(program.chunks[0])
            program.chunks = kept + [rest[i : i + size] for i in range(0, len(rest), size)]
        self.curves = {places[row]: Curve(**curve) for row, curve in state["curves"].items()}
        self._partials = [{**x, "begun": moved(x["begun"]), "left": moved(x["left"])} for x in state["partial"]]


# ----------------------------------------------------------------------------------------------------- on an executor


class Trained(NamedTuple):
    """The result of a job.

    Attributes:
        curves: index of a configuration -> its curve.
        partial: the state in which the chunk was interrupted; None: it has ended, or cannot be continued.
        engine: the engine, and the reason for it.
        messages: vecgym's warnings.
    """

    curves: dict[int, Curve]
    partial: dict[str, Any] | None
    engine: str
    messages: list[str]


def dispatch(
    options: SweepOptions, works: Sequence[Work], interrupted: list[int], record: Callable[[Work, Trained], None]
) -> None:
    """Have the chunks trained by the workers of an executor.

    Args:
        options: of the sweep; its executor stays the caller's, and is not shut down.
        works: the chunks, in order.
        interrupted: no longer empty once the sweep is to end.
        record: called with the result of each job as it ends.

    Raises:
        ValueError: if workers would hang, or would compute something else.
        Exception: the first error, of a job or of the executor; its cause names the configurations.
    """
    executor: Any = options.executor
    _check(options, [config for work in works for config in work.configs])
    plain = isinstance(executor, ProcessPoolExecutor) or type(executor).__module__.startswith("mpi4py")
    sent = _packed if plain else lambda value: value
    sweep, shared = uuid.uuid4().hex, sent(_shared(options, works[0].configs[0].datasets))
    waiting: dict[Future[bytes], Work] = {}

    def failures() -> Iterator[tuple[Work, BaseException]]:
        """Record finished jobs in the order of the chunks, and yield errors."""
        for future in [future for future in waiting if future.done()]:
            work = waiting.pop(future)
            error = CancelledError() if future.cancelled() else future.exception()
            if error is None:
                record(work, _read(future.result()))
            else:
                yield work, error

    try:
        for work in works:
            try:
                bare = [replace(config, point={}, data=cast(Any, None)) for config in work.configs]
                job = executor.submit(train, sweep, shared, sent(replace(work, configs=bare)))
            except Exception as error:  # it cannot be pickled; a broken or closed executor
                _raise(error, work)
            waiting[job] = work
        while waiting and not interrupted:
            wait(waiting, ASK_EVERY_S, FIRST_COMPLETED)
            for work, failure in failures():
                _raise(failure, work)
    finally:  # cancel waiting jobs, and record those that still return in time
        _ended.add(sweep)
        for future in list(waiting):
            if future.cancel():
                del waiting[future]
        wait(waiting, GRACE_S)
        list(failures())


def _check(options: SweepOptions, configs: Sequence[Configuration]) -> None:
    """Raise a ValueError if workers would hang, or would compute something else."""
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
    """Raise an error of a job, or of the executor, with the configurations of the chunk."""
    points = [f"{config.index} ({named(config.point)})" for config in work.configs if config.index in work.indices]
    more = f" and {len(points) - 8} more" if len(points) > 8 else ""
    where = RuntimeError(f"in the stack of configurations {', '.join(points[:8])}{more}")
    where.__cause__ = error.__cause__  # with some executors, the traceback in the worker
    raise error from where


# ----------------------------------------------------------------------------------------------------- in the worker

_one_job = threading.Lock()  # torch's settings hold for the whole process, so its threads take turns
_ended: set[str] = set()  # sweeps that have ended, whose jobs may still begin in this process


def train(sweep: str, shared: Any, work: Any) -> bytes:
    """Train a chunk in a worker; return a `Trained` as bytes. The process of the sweep shows its warnings.

    Args:
        sweep: the unique name of the sweep.
        shared: see `_shared`.
        work: without the points of its configurations and their shared batches.
    """
    with _one_job, warnings.catch_warnings(record=True) as caught:
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
    return _packed(Trained(curves, partial, engine, messages))


def _train(sweep: str, shared: tuple[SweepOptions, dict[str, Any]], work: Work, curves: dict[int, Curve]) -> Any:
    options, settings = shared
    data = Data(options)  # which is not sent, since it holds batches
    configs = [replace(config, data=data) for config in work.configs]
    with (
        torch_set(**settings), torch.enable_grad(), interrupts() as interrupted,
        contextlib.closing(prepared_engine(configs, options)) as engine,
    ):  # fmt: skip
        chunk = Chunk(replace(work, configs=configs), options, engine, curves)
        with contextlib.closing(chunk.simulation):
            for _ in chunk.steps():
                if interrupted:
                    _ended.add(sweep)
                if sweep in _ended:
                    break
        chunk.end()
        return chunk.partial, str(engine.plan)


def _shared(options: SweepOptions, datasets: Mapping[str, Any]) -> tuple[SweepOptions, dict[str, Any]]:
    """Return the options and settings of torch that all jobs carry; `datasets` come with the configurations."""
    names = ("strategy", "points", "resume", "executor", "network", "compute", *datasets)
    left_out: dict[str, Any] = dict.fromkeys(names)
    bare = replace(options, model=nn.Module(), grid={}, **left_out)
    return bare, torch_settings()


class _ByValue(ForkingPickler):
    """Pickles like a `multiprocessing` queue, but tensors by value, not as shared memory."""

    _extra_reducers: dict[Any, Any] = {}  # noqa: RUF012 - as in the base


def _packed(value: Any) -> bytes:
    return bytes(_ByValue.dumps(value))


def _read(value: Any) -> Any:
    return ForkingPickler.loads(value) if isinstance(value, bytes) else value


def _can_be_sent(error: Exception) -> bool:
    """Whether an error can be pickled and unpickled; others would break a process pool."""
    try:
        again = _read(_packed(error))
    except Exception:  # anything that the user's class raises
        return False
    return type(again) is type(error) and str(again) == str(error)
