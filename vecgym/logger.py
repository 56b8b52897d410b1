"""Loggers: where the rows of a run go while it runs."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any, TextIO

from vecgym.metrics import PER_NODE, SCALARS


class Logger:
    """Receives the settings of a run at its start, then its rows, then its end.

    A logger that fails is reported once by a warning and not called again; it never ends the training.
    """

    def start(self, settings: dict[str, Any]) -> None:
        """The run begins."""

    def resume(self, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        """The run goes on from a checkpoint, in place of `start`; `rows` are those that were logged up to there.

        What a logger kept of steps after the checkpoint is to be dropped: they are logged again.
        """
        self.start(settings)

    def log(self, row: dict[str, Any]) -> None:
        """One row of `vecgym.metrics.SCALARS` and `PER_NODE`; not every row has every column."""

    def finish(self) -> None:
        """The run has ended, however it ended."""


class CSVLogger(Logger):
    """Write `history.csv`, `train_losses.csv`, `val_losses.csv` (a column per node) and `config.json`.

    Each row is on disk as soon as it was logged.

    Args:
        directory: made if it does not exist; files of an earlier run in it are replaced. A run that is resumed
            writes its rows anew, so that none is lost or there twice.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     logger = CSVLogger(directory)
    ...     logger.start({"num_nodes": 2}); logger.log({"step": 1, "train_loss": 0.5}); logger.finish()
    ...     print((Path(directory) / "history.csv").read_text().splitlines()[1])
    1,,,0.5,,,,,,,,,
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._files: dict[str, TextIO] = {}

    def start(self, settings: dict[str, Any]) -> None:
        self.finish()
        self.directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(settings, indent=2, default=str)
        (self.directory / "config.json").write_text(text + "\n")
        for name in PER_NODE:
            (self.directory / f"{name}.csv").unlink(missing_ok=True)
        self._write("history", list(SCALARS))

    def resume(self, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        self.start(settings)
        for row in rows:
            self.log(row)

    def log(self, row: dict[str, Any]) -> None:
        self._write("history", [row.get(name, "") for name in SCALARS])
        for name in PER_NODE:
            if row.get(name) is not None:
                if name not in self._files:
                    self._write(name, ["step", *(f"node_{i}" for i in range(len(row[name])))])
                self._write(name, [row["step"], *row[name]])

    def finish(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}

    def _write(self, name: str, values: list[Any]) -> None:
        if name not in self._files:
            self._files[name] = (self.directory / f"{name}.csv").open("w", newline="")
        csv.writer(self._files[name]).writerow(values)
        self._files[name].flush()
