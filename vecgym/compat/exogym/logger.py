"""Loggers in EXO Gym's format: `logs/<run_name>/` with two tables, or a run of Weights & Biases."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from vecgym.compat import perplexity
from vecgym.core import check
from vecgym.records import loggers

# Table -> its columns.
TABLES = {
    "train": ("step", "examples_trained", "train_loss", "train_perplexity", "lr"),
    "validation": ("step", "local_loss", "local_perplexity", "global_loss", "global_perplexity"),
}
AXES = {"step": "step", "examples": "examples_trained"}  # axis of wandb -> column


class Logger(loggers.Logger):
    """Translate rows into EXO Gym's tables; a subclass writes them.

    `train` has a row for each step, counted from 0. In `validation`, `local_loss` is node 0's and `global_loss` that of
    the nodes' average.

    Args:
        config: settings of the run, in addition to those of the trainer.
        run_name: the name of the run; None: its start time.
    """

    def __init__(self, run_name: str | None = None, config: dict[str, Any] | None = None) -> None:
        self.run_name = run_name
        self.config = dict(config or {})

    def log(self, row: dict[str, Any]) -> None:
        if row.get("train_loss") is not None:
            self._write("train", row["step"] - 1, row, train=row["train_loss"])
        if row.get("val_loss") is not None:
            self._write("validation", row["step"], row, **{"local": row["val_losses"][0], "global": row["val_loss"]})

    def _write(self, table: str, step: int, row: dict[str, Any], **losses: Any) -> None:
        values = {"step": step, "examples_trained": row["examples"], "lr": row.get("lr")}
        for name, loss in losses.items():
            values |= {f"{name}_loss": float(loss), f"{name}_perplexity": perplexity(float(loss))}
        self.write(table, values)

    def write(self, table: str, row: dict[str, Any]) -> None:
        """Write a row of `TABLES[table]`, and the number of examples trained on."""


class CSVLogger(Logger):
    """`train.csv`, `validation.csv` and `config.json` in `log_dir/run_name`; files of an earlier run are replaced."""

    def __init__(self, run_name: str, config: dict[str, Any] | None = None, log_dir: str = "logs") -> None:
        super().__init__(run_name, config)
        self.directory = Path(log_dir, run_name)

    def start(self, settings: dict[str, Any]) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**settings, **self.config}, indent=2, default=str)
        (self.directory / "config.json").write_text(text + "\n")
        for table, columns in TABLES.items():
            self._line("w", table, columns)

    def write(self, table: str, row: dict[str, Any]) -> None:
        self._line("a", table, [row[column] for column in TABLES[table]])

    def _line(self, mode: str, table: str, values: Any) -> None:
        with (self.directory / f"{table}.csv").open(mode, newline="") as file:
            csv.writer(file).writerow(values)


class WandbLogger(Logger):
    """The same columns in a run of the package `wandb`, started by vecgym's logger, against steps or examples.

    Raises:
        ImportError: if that package is not installed.
    """

    def __init__(
        self, wandb_project: str, run_name: str | None, config: dict[str, Any] | None = None, x_axis: str = "step"
    ) -> None:
        super().__init__(run_name, config)
        self.wandb_project = wandb_project
        self.x_axis = check.choice("log_x_axis", x_axis, AXES)
        self._wandb = loggers.WandbLogger(wandb_project, run_name)

    def start(self, settings: dict[str, Any]) -> None:
        self._wandb.start({**settings, **self.config})

    def write(self, table: str, row: dict[str, Any]) -> None:
        values = {column: row[column] for column in TABLES[table] if column not in AXES.values()}
        self._wandb.run.log(values, step=int(row[AXES[self.x_axis]]))

    def finish(self) -> None:
        self._wandb.finish()
