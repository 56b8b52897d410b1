"""A sweep on an executor: its stacks as jobs, which are sent, awaited, and sent again if their worker dies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch

from vecgym.core.errors import warn
from vecgym.engine import hooks
from vecgym.records.rows import counted, label
from vecgym.runs.multiprocess import check_importable
from vecgym.runs.options import resolve_device
from vecgym.sweeps.configurations import Configuration
from vecgym.sweeps.curves import PARTIAL
from vecgym.sweeps.jobs import Job, Lease, outcome, packed, sent, shared_parts
from vecgym.sweeps.options import SweepOptions
from vecgym.sweeps.stack import Work

ASK_EVERY_S = 0.2  # whether Ctrl-C was pressed
GRACE_S = 10.0  # that jobs under way have to come back, once the sweep is stopped
TRIES = 2


@dataclass
class Sent:
    """A job that was sent."""

    work: Work
    job: Job
    lost: BaseException | None = None  # what the executor says of it: no worker has done it


class Dispatch:
    """The jobs of a sweep under way.

    Args:
        options: of the sweep; its executor stays the caller's, and is not shut down.
        works: the stacks, in order.
        record: called with what each job returns, as it ends.

    Raises:
        ValueError: for what cannot be sent to workers.
    """

    def __init__(
        self, options: SweepOptions, works: Sequence[Work], record: Callable[[Work, dict[str, Any]], None]
    ) -> None:
        assert options.executor is not None
        self.executor: Executor = options.executor
        self.record = record
        self.waiting: dict[Future[bytes], Sent] = {}
        self.failed: list[tuple[int, Exception, str]] = []  # (which stack, its error, where)
        self.lost: list[Sent] = []
        self.stopped = False
        self._told: set[str] = set()
        _check(options, [config for work in works for config in work.configs])
        self.lease = Lease()
        try:
            shared = self._as_sent(shared_parts(options), "the data or the options")
            jobs = [Job(shared, self._as_sent(sent(work), "a model or a strategy"), self.lease) for work in works]
        except BaseException:
            self.lease.end()
            raise
        self.sent = [Sent(work, job) for work, job in zip(works, jobs)]

    def _as_sent(self, value: Any, what: str) -> Any:
        if not _pickles_plainly(self.executor):
            return value
        try:
            return packed(value)
        except Exception as error:  # pickle's own, and whatever the user's objects raise
            raise ValueError(
                f"{what} cannot be sent to the workers of a {type(self.executor).__name__}: {error}. Fix: define "
                "classes and functions at the top of a module, not in a function and not as a lambda; or give an "
                "executor that sends those too (Dask's, loky's); or sweep without executor."
            ) from error

    def run(self, interrupted: Sequence[Any]) -> bool:
        """Send all jobs and await them; return whether all came to their ends.

        Raises:
            Exception: the error of the first stack that raised one, as in one process; the others are recorded.
            RuntimeError: when the executor has lost a job twice.
        """
        try:
            for one in self.sent:
                self._send(one)
            while self.waiting and not self._must_stop(interrupted):
                self._await(ASK_EVERY_S)
        finally:
            self._stop()
        if self.failed:
            _, error, where = min(self.failed, key=lambda each: each[0])
            raise error from RuntimeError(f"in a worker:\n{where}")
        if self.lost and not interrupted:
            raise RuntimeError(_lost(self.executor, self.lost)) from self.lost[0].lost
        return not self.stopped

    def _must_stop(self, interrupted: Sequence[Any]) -> bool:
        self.stopped = self.stopped or bool(interrupted or self.failed or self.lost)
        return self.stopped

    def _stop(self) -> None:
        """Cancel what has not begun, and have what is under way end after its present step; record what comes."""
        self.lease.end()
        if not self.waiting:
            return
        self.stopped = True
        if not any(future.running() for future in self.waiting):  # Dask does not say what has begun
            self._await(GRACE_S, all_of_them=True)
        for future in list(self.waiting):
            if future.cancel():
                del self.waiting[future]
        self._await(GRACE_S, all_of_them=True)
        self.waiting.clear()

    def _send(self, one: Sent) -> None:
        try:
            future = self.executor.submit(one.job)
        except Exception as error:  # a broken or closed executor
            one.lost = one.lost or error
            self.lost.append(one)
            return
        if not isinstance(future, Future):
            raise TypeError(
                f"{type(self.executor).__name__}.submit returned {future!r}; an executor returns a "
                "concurrent.futures.Future."
            )
        self.waiting[future] = one

    def _await(self, seconds: float, all_of_them: bool = False) -> None:
        """Wait for some jobs, or for all, and record what they return."""
        if all_of_them:
            done, _ = wait(self.waiting, seconds)
        else:
            done, _ = wait(self.waiting, seconds, FIRST_COMPLETED)
        for future in done:
            one = self.waiting.pop(future)
            error = CancelledError() if future.cancelled() else future.exception()
            if error is None:
                self._received(one, outcome(future.result()))
            else:
                one.lost = error
                self._again(one)

    def _again(self, one: Sent) -> None:
        """Send a job again that the executor has lost: its worker died, perhaps; but only once."""
        if self.stopped or one.job.tries == TRIES:
            self.lost.append(one)
        else:
            one.job.tries += 1
            self._send(one)

    def _received(self, one: Sent, found: dict[str, Any]) -> None:
        if found["error"] is not None:
            self.failed.append((self.sent.index(one), *found["error"]))
        else:
            self.record(one.work, found)
            ended = [found["curves"][i].status for i in one.work.indices if i in found["curves"]]
            if len(ended) < len(one.work.indices) or PARTIAL in ended:
                self.stopped = True  # after the sweep, or by a Ctrl-C that came to the worker
        for message in found["messages"]:
            if message not in self._told:
                self._told.add(message)
                warn(message)


# ------------------------------------------------------------------------------------------------- kinds of executors


def _pickles_plainly(executor: Executor) -> bool:
    """Whether an executor sends by the rules of pickle, or of mpi4py, which are the same."""
    return isinstance(executor, ProcessPoolExecutor) or type(executor).__module__.startswith("mpi4py")


def _check(options: SweepOptions, configs: Sequence[Configuration]) -> None:
    """Raise a ValueError where workers would hang, or would lack something."""
    models = list({id(config.model): config.model for config in configs}.values())
    for model in models:
        hooks.check_pickled(model, "sweep without executor, where nothing is sent")
    if not isinstance(options.executor, ProcessPoolExecutor):
        return
    context = getattr(options.executor, "_mp_context", None)
    if context is None or context.get_start_method() != "fork":
        strategies = [config.strategy for config in configs]
        check_importable(*models, *strategies, options.train_dataset, options.val_dataset)
    elif torch.get_num_threads() > 1 or resolve_device(options.device).type != "cpu":
        raise ValueError(
            "the workers of this ProcessPoolExecutor are forked, which neither OpenMP's threads nor a GPU's driver "
            f"survive; here torch has {counted(torch.get_num_threads(), 'thread')}, on {options.device}. Fix: "
            'ProcessPoolExecutor(4, mp_context=multiprocessing.get_context("spawn")); or, on a CPU, '
            "torch.set_num_threads(1) before the sweep."
        )


def _lost(executor: Executor, lost: Sequence[Sent]) -> str:
    """Say which configurations have no result."""
    configs = [config for one in lost for config in one.work.configs if config.index in one.work.indices]
    points = [
        f"{config.index} ({', '.join(f'{name}={label(value)}' for name, value in config.point.items())})"
        for config in sorted(configs, key=lambda config: config.index)
    ]
    shown = ", ".join(points[:8]) + (f" and {len(points) - 8} more" if len(points) > 8 else "")
    error = lost[0].lost
    return (
        f"{type(executor).__name__} has lost {counted(len(lost), 'stack')}, also when sent again, with configurations "
        f"{shown}: {type(error).__name__}: {error} A worker may have run out of memory (max_memory_bytes makes stacks "
        "smaller), or could not start or import what it was sent (a script keeps what it does under "
        'if __name__ == "__main__":). With resume=path, a new sweep continues from the stacks that ended.'
    )
