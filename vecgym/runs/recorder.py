"""From steps to rows: in the history, at the loggers and on the progress bar."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from vecgym.collectives.ledger import Ledger, readable_bytes
from vecgym.core.errors import DivergenceError, warn
from vecgym.data import Batches
from vecgym.engine.simulation import Metrics, State
from vecgym.records.history import START, History, Row
from vecgym.records.loggers import Logger, as_loggers
from vecgym.runs.options import OnDivergence


class Recorder:
    """Turn steps into rows. A row is handed on when the next one begins, so that evaluations can join it."""

    def __init__(
        self, history: History, ledger: Ledger, data: Batches, on_divergence: OnDivergence, loggers: Loggers,
        limits: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.history = history
        self.ledger = ledger
        self.data = data
        self.on_divergence = on_divergence
        self.limits = limits
        self.loggers = loggers
        self._row: Row | None = None
        self._examples = 0
        self._seconds = 0.0  # before this program took the run over
        self._bar: tqdm | None = None

    def start(self, settings: Mapping[str, Any], bar: tqdm | None = None) -> None:
        """Begin the run, or resume it where it was when the history's rows were recorded."""
        self.loggers.start(dict(settings), self.history.rows)
        self._bar = bar
        self._last = time.perf_counter()
        self._start = self._last - self._seconds

    def state(self) -> dict[str, Any]:
        """Return what is counted beside the history."""
        return {"examples": self._examples, "seconds": time.perf_counter() - self._start}

    def load(self, state: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> None:
        """Continue after `rows`, with what was counted up to there."""
        for row in rows:
            self.history.append(row)
        self._examples, self._seconds = state["examples"], state["seconds"]

    def step(self, state: State, metrics: Metrics) -> None:
        """Begin the row of a step.

        Raises:
            DivergenceError: see `on_divergence`.
        """
        self.flush()
        self.ledger.add(state.step - 1, metrics.transfers)
        precision = torch.promote_types(metrics.losses.dtype, torch.float32)  # numpy has no bfloat16
        losses = metrics.losses.to("cpu", precision).numpy()
        trained = range(len(losses)) if metrics.active is None else metrics.active
        trained_losses = losses if metrics.active is None else losses[metrics.active]
        mean = float(trained_losses.mean(dtype=np.float64)) if len(trained_losses) else math.nan  # nobody has trained
        examples = self._examples_of(state.step - 1, trained)
        now = time.perf_counter()
        seconds = max(now - self._last, 1e-9)
        self._examples += examples
        self._last = now
        self._row = Row(
            {
                "step": state.step,
                "epoch": state.step / self.data.steps_per_epoch,
                "examples": self._examples,
                "train_loss": mean,
                "train_losses": losses,
                "lr": _mean(metrics.lr),
                "bytes_step": self.ledger.step_bytes,
                "bytes_total": self.ledger.total_bytes,
                "bytes_received_total": self.ledger.total_received_bytes,
                "seconds": now - self._start,
                "steps_per_s": 1 / seconds,
                "examples_per_s": examples / seconds,
                "bytes_per_s": self.ledger.step_bytes / seconds,
            }
        )
        if metrics.outer_lr is not None:
            self._row["outer_lr"] = _mean(metrics.outer_lr)
        if self._bar is not None:
            advance(self._bar, self._row)
        if len(trained_losses) and not math.isfinite(mean):
            self._diverged(state.step - 1, losses, trained)

    def add(self, **values: Any) -> None:
        """Add columns to the present row; before the first step, to a row of its own."""
        if self._row is None:
            self._row = Row(START)
        self._row.update(values)

    @property
    def row(self) -> dict[str, Any]:
        """What is known of the present step; before the first, of the start."""
        return {"step": 0} if self._row is None else self._row

    def flush(self) -> None:
        """Hand on the present row."""
        if self._row is not None:
            row, self._row = self._row, None
            self.history.append(row)
            self.loggers.log(row)

    def finish(self) -> None:
        """End the run, however it ended."""
        self.flush()
        self.loggers.finish()

    def _examples_of(self, step: int, nodes: Sequence[int]) -> int:
        """Count the examples of these nodes' batches."""
        size = self.data.width(step)
        return sum(size if self.limits is None else min(size, self.limits[node]) for node in nodes)

    def _diverged(self, step: int, losses: np.ndarray, trained: Sequence[int]) -> None:
        if self.on_divergence == "ignore":
            return
        bad = [node for node in trained if not math.isfinite(losses[node])]
        error = DivergenceError(step, bad, float(losses[bad[0]]))
        if self.on_divergence == "raise":
            raise error
        warn(f"{error} Further losses are not checked.")
        self.on_divergence = "ignore"


def advance(bar: tqdm, row: Mapping[str, Any]) -> None:
    """Advance a progress bar to the step of a row, and put its loss and bytes beside the steps per second."""
    redrawn = bar.update(row["step"] - bar.n)  # it redraws itself some times a second, and at the end
    if "train_loss" in row and (redrawn or bar.n == bar.total):
        sent = readable_bytes(row["bytes_total"])
        bar.set_postfix_str(f"loss {row['train_loss']:.4f}, {sent} per node", refresh=False)


def _mean(lr: float | Tensor) -> float:
    """Return the learning rate; where nodes differ, their mean."""
    return float(lr.detach().double().mean()) if isinstance(lr, Tensor) else float(lr)


class Loggers:
    """The user's loggers; one that fails is reported once and left out from then on."""

    def __init__(self, logger: Logger | Sequence[Logger] | None, interval: int) -> None:
        self._alive = list(as_loggers(logger))
        self._interval = interval

    def start(self, settings: dict[str, Any], before: Sequence[dict[str, Any]] = ()) -> None:
        """Begin; with rows from before, the run resumes after them."""
        if before:
            self._each("resume", settings, [row for row in before if self._is_due(row)])
        else:
            self._each("start", settings)

    def log(self, row: dict[str, Any]) -> None:
        """Log a row, if it is due."""
        if self._is_due(row):
            self._each("log", row)

    def finish(self) -> None:
        """End, however the run ended."""
        self._each("finish")

    def _is_due(self, row: dict[str, Any]) -> bool:
        return row["step"] % self._interval == 0 or "val_loss" in row

    def _each(self, method: str, *args: Any) -> None:
        for one in list(self._alive):
            try:
                getattr(one, method)(*args)
            except Exception as error:  # noqa: PERF203 - whatever a logger does, the training goes on
                self._alive.remove(one)
                warn(f"{type(one).__name__} failed and is left out: {error!r}")
