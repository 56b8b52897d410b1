"""Turn steps into rows, for the history, the loggers and the progress bar."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from vecgym.clock.timeline import RunningClock
from vecgym.clock.units import readable_time
from vecgym.collectives.ledger import readable_bytes
from vecgym.core import tree
from vecgym.core.devices import fetched, on_host
from vecgym.core.errors import DivergenceError, warn
from vecgym.data import Batches
from vecgym.logger import Logger, as_loggers
from vecgym.records.columns import START
from vecgym.records.history import History
from vecgym.records.rows import Row
from vecgym.runs.options import FitOptions
from vecgym.simulation import RunFacts, Simulation, Timetable
from vecgym.simulation.state import Metrics

ROWS_AT_ONCE = 32  # that get their losses together, on the host, if nobody waits for them


class StepRows:
    """Make the rows of a history from the metrics of steps, one after the other.

    Args:
        data: of the training.
        run: what was known of it in advance.
        table: of an asynchronous run its timetable, which has further columns.

    Attributes:
        examples: number processed so far, by all nodes together.
        seconds: from the start to the last row.
        made: steps that each node has taken; None: all as many as the run.
    """

    def __init__(self, data: Batches, run: RunFacts, table: Any) -> None:
        self.data, self.presence, self.table = data, run.presence, table
        self.made: list[int] | None = [0] * run.num_nodes if data.own_epochs else None
        self.plan: Any = run.schedule  # if nodes do not wait for one another
        self.limits = None if run.num_examples is None else data.limits_of(run.num_examples)
        self.examples = 0
        self.seconds = 0.0

    def of_step(self, step: int, metrics: Metrics, num_bytes: tuple[float, float, float, float], seconds: float) -> Row:
        """Return the row after `step` steps, with None for the losses, which may still be on a device.

        Args:
            num_bytes: sent in this step, sent in all, received in all, handed to collectives in all.
            seconds: since the start.
        """
        examples = self._num_examples(step, metrics)
        self.examples += examples
        elapsed = max(seconds - self.seconds, 1e-9)
        self.seconds = seconds
        row: Row = {
            "step": step,
            "epoch": step / self.data.steps_per_epoch if self.plan is None else self.plan.epoch(step, self.data),
            "examples": self.examples,
            "train_loss": None,
            "train_losses": None,
            "lr": mean_rate(metrics.lr),
            "bytes_step": num_bytes[0],
            "bytes_total": num_bytes[1],
            "bytes_received_total": num_bytes[2],
            "bytes_payload_total": num_bytes[3],
            "seconds": seconds,
            "steps_per_s": 1 / elapsed,
            "examples_per_s": examples / elapsed,
            "bytes_per_s": num_bytes[0] / elapsed,
        }
        if self.presence is not None:
            row["num_present"] = int(self.presence.is_present(step - 1).sum())
            row["num_never_present"] = self.presence.never_present(step - 1)
        if metrics.outer_lr is not None:
            row["outer_lr"] = mean_rate(metrics.outer_lr)
        return row if self.plan is None else {**row, **self.table.columns(step)}

    def _num_examples(self, step: int, metrics: Metrics) -> int:
        """Count the examples of all nodes together in a step."""
        if self.plan is not None:
            return self.plan.seen(step, self.data)
        num_nodes, active = metrics.losses.shape[0], metrics.active
        if self.made is None and active is not None:
            self.made = [step - 1] * num_nodes
        if self.made is None and self.limits is None:
            return self.data.width(step - 1) * num_nodes
        made, limits = self.made or [step - 1] * num_nodes, self.limits or [None] * num_nodes
        trained = range(num_nodes) if active is None else active
        examples = sum(self.data.width(made[node], limits[node]) for node in trained)
        if self.made is not None:
            for node in trained:
                self.made[node] += 1
        return examples


def add_losses(row: Row, losses: Tensor, active: Sequence[int] | None) -> None:
    """Add the losses of the nodes `active` to a row, `[K]` on the host; None: all have trained."""
    precision = torch.promote_types(losses.dtype, torch.float32)  # numpy has no bfloat16
    values = losses.to(precision).numpy()
    trained = values if active is None else values[active]
    row["train_loss"] = float(trained.mean(dtype=np.float64)) if len(trained) else math.nan  # no node has trained
    row["train_losses"] = values


class Recorder:
    """Turn steps into rows. A row is handed on when the next one begins, so that evaluations can join it.

    Losses on a device stay there, and their rows wait for them, until all are fetched together: every `log_interval`
    steps, and whenever rows are needed. On the host, too, rows wait if nobody reads them, but not a loss that is not
    finite.

    Attributes:
        options: of the run.
        interval: steps between two fetches; `log_interval`, or less if the rows are needed earlier.
        at_once: rows on the host that get their losses together.
    """

    def __init__(
        self, history: History, data: Batches, options: FitOptions, loggers: Loggers, simulation: Simulation
    ) -> None:
        self.options = options
        self.interval = options.log_interval
        self.at_once = 1 if loggers.alive else ROWS_AT_ONCE
        self.clock: RunningClock | None = None
        self.history = history
        self.ledger = simulation.comm.ledger
        self.data = data
        self.presence = simulation.run.presence
        self.on_divergence = options.on_divergence
        self.loggers = loggers
        self._open: list[Row] = []  # not handed on yet; the last is that of the current step
        self._unread: list[tuple[Row, Tensor, Sequence[int] | None]] = []  # those of them without their losses
        self._rows = StepRows(data, simulation.run, simulation.timetable)
        self._made = getattr(simulation.timetable, "made", None)  # by each node before a step
        self._seconds = 0.0  # spent before the run was resumed

    def start(self, settings: Mapping[str, Any], bar: tqdm, reopen: bool = False) -> None:
        """Begin the run, or resume it after the rows in the history; `reopen`: the last of these gets more columns."""
        if reopen:
            self._open = [self.history.rows.pop()]
        self.loggers.start(dict(settings), self.history.rows)
        self._bar = bar
        self._start = time.perf_counter() - self._seconds
        network, compute = self.options.network, self.options.compute
        if network is not None and compute is not None and not self.options.strategy.asynchronous:
            self.clock = RunningClock(network, compute, self.ledger)

    def state(self) -> dict[str, Any]:
        """Return the counts that are not in the history."""
        return {"examples": self._rows.examples, "seconds": time.perf_counter() - self._start}

    def load(self, state: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> None:
        """Continue after `rows`, with the counts up to there."""
        for row in rows:
            self.history.append(row)
        self._rows.examples = state["examples"]
        step = self.history.rows[-1]["step"] if len(self.history) else 0
        made = [step] if self._made is None else self._made(step)
        if set(made) != {step} or self._rows.made is not None:
            self._rows.made = made
        self._seconds = self._rows.seconds = state["seconds"]

    def step(self, step: int, metrics: Metrics, fetch: bool) -> None:
        """Begin the row of a step, or of an update of a server.

        Args:
            fetch: whether its losses are needed now.

        Raises:
            DivergenceError: see `on_divergence`.
        """
        if not self._unread:
            self._hand_on()
        computing = None if self.presence is None else self.presence.is_training(step - 1)
        self.ledger.add(step - 1, metrics.transfers, computing)
        counts = self.ledger.step_bytes, *self.ledger.totals
        row = self._rows.of_step(step, metrics, counts, time.perf_counter() - self._start)
        if self.clock is not None:
            row["sim_seconds"], row["sim_utilization"] = self.clock.step(metrics.transfers, computing)
        self._open.append(row)
        self._unread.append((row, metrics.losses, metrics.active))
        here = on_host(metrics.losses)
        if fetch or (self._is_needed(metrics) if here else step % self.interval == 0):
            self._fetch()
        advance(self._bar, row, self._fetch if here else None)

    def add(self, **values: Any) -> None:
        """Add columns to the current row; before the first step, to a row of its own."""
        if not self._open:
            self._open = [dict(START) if self.clock is None else {**START, "sim_seconds": 0.0}]
        self._open[-1].update(values)

    @property
    def row(self) -> dict[str, Any]:
        """The row of the current step so far; before the first step, that of the start."""
        return self._open[-1] if self._open else {"step": 0}

    def flush(self) -> None:
        """Hand on all rows, with their losses.

        Raises:
            DivergenceError: see `on_divergence`.
        """
        self._fetch()
        self._hand_on()

    def finish(self) -> None:
        """Finish, however the run ended; if a broken device does not return losses, their rows have none."""
        with contextlib.suppress(RuntimeError, DivergenceError):
            self._fetch()
        self._hand_on()
        self.loggers.finish()

    def _is_needed(self, metrics: Metrics) -> bool:
        """Whether losses on the host must be read after this step."""
        if len(self._unread) >= self.at_once or metrics.active is not None:
            return True
        return self.on_divergence != "ignore" and not math.isfinite(metrics.losses.sum().item())

    def _hand_on(self) -> None:
        rows, self._open, self._unread = self._open, [], []
        for row in rows:
            self.history.append(row)
            self.loggers.log(row)

    def _fetch(self) -> None:
        """Complete the rows without losses, and look for the first step that diverged."""
        losses = [x for _, x, _ in self._unread]
        if not all(map(on_host, losses)):
            losses = fetched(losses)
        unread, self._unread = self._unread, []
        for (row, _, active), x in zip(unread, losses):
            add_losses(row, x, active)
        for row, _, active in unread:
            if not math.isfinite(row["train_loss"]) and self.on_divergence != "ignore":
                self._diverged(row, active, last_read=unread[-1][0]["step"])

    def _diverged(self, row: Row, active: Sequence[int] | None, last_read: int) -> None:
        step, losses = row["step"], row["train_losses"]
        trained = range(len(losses)) if active is None else active
        bad = [node for node in trained if not math.isfinite(losses[node])]
        if not bad:  # no node has trained
            return
        noticed = last_read if last_read > step else None
        error = DivergenceError(step - 1, bad, float(losses[bad[0]]), noticed, self._in_data(step - 1))
        if self.on_divergence == "raise":
            raise error
        warn(f"{error} Further losses are not checked.")
        self.on_divergence = "ignore"

    def _in_data(self, step: int) -> bool:
        """Whether a step's batches hold values that are not finite; False if nodes take steps of their own."""
        if self._rows.made is not None or self.options.strategy.asynchronous:
            return False
        with contextlib.suppress(Exception):  # of the user's dataset: that the loss is not finite is to be told
            leaves = [x for x in tree.leaves(self.data.batch(step)) if x.is_floating_point()]
            return not all(bool(torch.isfinite(x).all()) for x in leaves)
        return False


def advance(bar: tqdm, row: Mapping[str, Any], complete: Callable[[], None] | None = None) -> None:
    """Advance a progress bar to the step of a row, and show its loss and bytes.

    Args:
        complete: gives the row its loss, if it may have none yet.
    """
    redrawn = bar.update(row["step"] - bar.n)  # it redraws itself a few times a second, and at the end
    if not (redrawn or bar.n == bar.total):
        return
    if complete is not None:
        complete()
    if row.get("train_loss") is not None:
        sent = readable_bytes(row["bytes_total"])
        network_time = f", {readable_time(row['sim_seconds'])} on the network" if "sim_seconds" in row else ""
        bar.set_postfix_str(f"loss {row['train_loss']:.4f}, {sent} per node{network_time}", refresh=False)


def rates_of(algorithm: Any, run: RunFacts, timetable: Timetable, step: int, once: bool) -> tuple[Any, Any]:
    """Return the inner learning rate of a step and the outer one, as `Strategy.rates` does.

    Args:
        once: whether the parameters are stored once for all nodes: their rate follows the run's steps, not a node's.
    """
    nodes = None if run.presence is None or once else list(run.there(step) or range(run.num_nodes))
    return algorithm.rates(timetable, step, nodes)


def mean_rate(lr: float | Tensor) -> float:
    """Return a learning rate; where nodes differ, their mean.

    >>> round(mean_rate(torch.tensor([0.1, 0.3])), 6)
    0.2
    """
    return float(lr.detach().double().mean()) if isinstance(lr, Tensor) else float(lr)


class Loggers:
    """The user's loggers; one that fails is reported once and dropped.

    Attributes:
        alive: those that have not failed.
        stopped: whether one of them has raised StopIteration, which asks for the end of the run.
    """

    def __init__(self, logger: Logger | Sequence[Logger] | None, interval: int) -> None:
        self.alive = list(as_loggers(logger))
        self._interval = interval
        self.stopped = False

    def start(self, settings: dict[str, Any], before: Sequence[dict[str, Any]] = ()) -> None:
        """Begin the run, or resume it after the rows `before`."""
        if before:
            self._each("resume", settings, [row for row in before if self._is_due(row)])
        else:
            self._each("start", settings)

    def log(self, row: dict[str, Any]) -> None:
        """Log a row, if it is due."""
        if self._is_due(row):
            self._each("log", row)

    def finish(self) -> None:
        """Finish, however the run ended."""
        self._each("finish")

    def _is_due(self, row: dict[str, Any]) -> bool:
        return row["step"] % self._interval == 0 or "val_loss" in row

    def _each(self, method: str, *args: Any) -> None:
        for logger in list(self.alive):
            try:
                getattr(logger, method)(*args)
            except StopIteration:  # noqa: PERF203
                self.stopped = True
            except Exception as error:  # whatever a logger does, the training continues
                self.alive.remove(logger)
                warn(f"{type(logger).__name__} failed and is dropped: {error!r}")
