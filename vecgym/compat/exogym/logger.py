"""Where a run is written as EXO Gym writes it: `logs/<run_name>/` with two tables, or a run of Weights & Biases."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

from vecgym.records.loggers import Logger as BaseLogger

TRAIN = ("step", "examples_trained", "train_loss", "train_perplexity", "lr")
VALIDATION = ("step", "local_loss", "local_perplexity", "global_loss", "global_perplexity")


class Logger(BaseLogger):
    """What rows mean in EXO Gym's names.

    `train`: after each step, whose number counts from 0. `validation`: `local_loss` is node 0's, `global_loss` that of
    the average of the nodes.

    Args:
        config: settings of the run, besides those that the trainer knows.
        run_name: None: the time at which it begins.
    """

    def __init__(self, run_name: str | None = None, config: dict[str, Any] | None = None) -> None:
        self.run_name = run_name
        self.config = dict(config or {})

    def log(self, row: dict[str, Any]) -> None:
        if row.get("train_loss") is not None:
            loss = float(row["train_loss"])
            self.log_train({
                "step": row["step"] - 1, "examples_trained": row["examples"],
                "train_loss": loss, "train_perplexity": perplexity(loss), "lr": row["lr"],
            })  # fmt: skip
        if row.get("val_loss") is not None:
            found: dict[str, Any] = {"step": row["step"], "examples_trained": row["examples"]}
            for name, loss in (("local", float(row["val_losses"][0])), ("global", float(row["val_loss"]))):
                found |= {f"{name}_loss": loss, f"{name}_perplexity": perplexity(loss)}
            self.log_validation(found)

    def log_train(self, row: dict[str, Any]) -> None:
        """One row of `TRAIN`."""

    def log_validation(self, row: dict[str, Any]) -> None:
        """One row of `VALIDATION`."""


class CSVLogger(Logger):
    """`train.csv`, `validation.csv` and `config.json` in `log_dir/run_name`; files of an earlier run are replaced."""

    def __init__(self, run_name: str, config: dict[str, Any] | None = None, log_dir: str = "logs") -> None:
        super().__init__(run_name, config)
        self.directory = Path(log_dir, run_name)

    def start(self, settings: dict[str, Any]) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**settings, **self.config}, indent=2, default=str)
        (self.directory / "config.json").write_text(text + "\n")
        for name, columns in (("train", TRAIN), ("validation", VALIDATION)):
            self._write("w", name, columns)

    def log_train(self, row: dict[str, Any]) -> None:
        self._write("a", "train", [row[column] for column in TRAIN])

    def log_validation(self, row: dict[str, Any]) -> None:
        self._write("a", "validation", [row[column] for column in VALIDATION])

    def _write(self, mode: str, name: str, values: Any) -> None:
        with (self.directory / f"{name}.csv").open(mode, newline="") as file:
            csv.writer(file).writerow(values)


class WandbLogger(Logger):
    """The same columns to a run of the `wandb` package, over steps or over examples.

    Raises:
        ModuleNotFoundError: where that is not installed.
    """

    def __init__(
        self, wandb_project: str, run_name: str | None, config: dict[str, Any] | None = None, x_axis: str = "step"
    ) -> None:
        super().__init__(run_name, config)
        if x_axis not in ("step", "examples"):
            raise ValueError(f"log_x_axis={x_axis!r} is not known; allowed: 'step', 'examples'.")
        import wandb

        self._wandb = wandb
        self.wandb_project = wandb_project
        self.x_axis = x_axis

    def start(self, settings: dict[str, Any]) -> None:
        config = json.loads(json.dumps({**settings, **self.config}, default=str))
        self._run = self._wandb.init(project=self.wandb_project, name=self.run_name, config=config)

    def log_train(self, row: dict[str, Any]) -> None:
        self._log(row)

    def log_validation(self, row: dict[str, Any]) -> None:
        self._log(row)

    def finish(self) -> None:
        if getattr(self, "_run", None) is not None:
            self._run.finish()

    def _log(self, row: dict[str, Any]) -> None:
        at = {"step": row.pop("step"), "examples": row.pop("examples_trained")}[self.x_axis]
        self._run.log(row, step=int(at))


def perplexity(loss: float) -> float:
    """exp(loss), or infinity.

    >>> perplexity(0.0), perplexity(1e4)
    (1.0, inf)
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
