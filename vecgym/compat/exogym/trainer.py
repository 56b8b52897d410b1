"""EXO Gym's trainer and loggers: its arguments and files, with vecgym's training."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import nn

from vecgym import logger as vecgym_loggers
from vecgym.compat import perplexity
from vecgym.compat.exogym.base import Strategy, create_config, vectorised, warn_without_effect
from vecgym.compat.exogym.communicate import torch_distributed_calls
from vecgym.core import check
from vecgym.core.check import Options, takes
from vecgym.core.errors import warn
from vecgym.runs import options as vecgym_options
from vecgym.runs import trainer as vecgym_trainer
from vecgym.runs.options import Count, Flag, NumExamples, OptionalCount, Seed

# Table -> its columns.
TABLES = {
    "train": ("step", "examples_trained", "train_loss", "train_perplexity", "lr"),
    "validation": ("step", "local_loss", "local_perplexity", "global_loss", "global_perplexity"),
}
AXES = {"step": "step", "examples": "examples_trained"}  # axis of wandb -> column


class Logger(vecgym_loggers.Logger):
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
        self._wandb = vecgym_loggers.WandbLogger(wandb_project, run_name)

    def start(self, settings: dict[str, Any]) -> None:
        self._wandb.start({**settings, **self.config})

    def write(self, table: str, row: dict[str, Any]) -> None:
        values = {column: row[column] for column in TABLES[table] if column not in AXES.values()}
        self._wandb.run.log(values, step=int(row[AXES[self.x_axis]]))

    def finish(self) -> None:
        self._wandb.finish()


# Arguments of `fit` and `Trainer`.
WITHOUT_EFFECT = {
    **dict.fromkeys(("start_port", "port"), "there are no processes, and so no ports"),
    "devices": "all nodes are on one device; use device, such as 'cuda:1'",
    "force_minibatch_recalculate": "nothing is probed: batches are computed whole unless minibatch_size is given",
}

Name = Annotated[str | None, partial(check.instance, kind=(str, type(None)), give="a str, or None")]
Axis = Annotated[str | None, lambda name, value: value if value is None else check.choice(name, value, AXES, "None")]


@dataclass(frozen=True)
class FitOptions(Options):
    """The arguments of `Trainer.fit`: EXO Gym's, and those of its `**kwargs` by name.

    Args:
        num_epochs, ...: as in `vecgym.Trainer.fit`, unless listed below.
        checkpoint_interval: steps between checkpoints, in `save_dir/run_name`; None: no checkpoints.
        save_dir: the folder of checkpoints.
        run_name: the name of the run; None: its start time.
        wandb_project: log to Weights & Biases; None: to `logs/<run_name>/` (`train.csv`, `validation.csv`).
        log_x_axis: "step" or "examples", for Weights & Biases.
        kwargs: any value; it is added to the logged settings.
        logger, log_interval: vecgym's own loggers instead.
        disable_logging: write no files and show no progress bar.
        gradient_accumulation, max_memory_usage: see `vecgym.Trainer.fit`.
        start_port, port, devices, force_minibatch_recalculate: no effect, with a warning.
    """

    num_epochs: Count = 1
    strategy: Strategy = None  # type: ignore[assignment]  # this and num_nodes are required, in EXO Gym's order
    num_nodes: Count = None  # type: ignore[assignment]
    max_steps: OptionalCount = None
    batch_size: Count = 16
    minibatch_size: OptionalCount = None
    shuffle: Flag = True
    val_size: NumExamples = 64
    val_interval: OptionalCount = 100
    autocast: Flag = False
    checkpoint_interval: OptionalCount = None
    correlation_interval: OptionalCount = None
    save_dir: Annotated[str | os.PathLike[str], check.path] = "./checkpoints"
    dataloader_kwargs: Mapping[str, Any] | None = None
    _: KW_ONLY
    seed: Seed = 42
    device: str | torch.device | None = None
    run_name: Name = None
    wandb_project: Name = None
    log_x_axis: Axis = None
    kwargs: Any = None
    logger: Any = None
    log_interval: Count = 1
    disable_logging: Flag = False
    gradient_accumulation: OptionalCount = None
    max_memory_usage: Any = None
    start_port: Any = None
    port: Any = None
    devices: Any = None
    force_minibatch_recalculate: Any = None

    def __post_init__(self) -> None:
        check.instance("strategy", self.strategy, Strategy, "a strategy of exogym.strategy, or of a subclass of one")
        if self.num_nodes is None:
            raise TypeError("fit() needs num_nodes=K.")
        super().__post_init__()
        if self.minibatch_size is not None and self.minibatch_size > self.batch_size:
            raise ValueError(
                f"minibatch_size={self.minibatch_size} must not be larger than batch_size={self.batch_size}."
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(FitOptions):
    """The settings that EXO Gym passes to its processes. It only exists to be imported."""

    model: nn.Module
    train_dataset: Any
    val_dataset: Any
    rank: int | None = None


class TrainNode:
    """A process of EXO Gym. There are none here: the class only exists to be imported.

    Raises:
        TypeError: always.
    """

    def __init__(self, config: TrainConfig) -> None:
        raise TypeError(
            "there is no TrainNode: after fit(), trainer.nodes holds the nodes, and nodes.module(i) is node i's model."
        )


_device: str | None = None  # overrides the trainers' devices


def use_device(device: str | None) -> None:
    """Override the trainers' devices; see `install`."""
    global _device
    _device = check.instance("device", device, (str, type(None)), 'a device such as "cpu", or None')


class Trainer(vecgym_trainer.Trainer[nn.Module]):
    """Train one model on K simulated nodes: a `vecgym.Trainer` with the arguments of EXO Gym's.

    Args:
        model: `model(batch)` returns the mean loss.
        train_dataset, val_dataset: datasets, or factories `(rank, num_nodes, train_dataset=...) -> Dataset`.
        start_port, devices: no effect, with a warning.
        device: "cpu", "cuda", "mps"; None or "": the best available one.

    >>> from vecgym.compat.exogym import OptimSpec, SimpleReduceStrategy
    >>> from vecgym.models import Line
    >>> trainer = Trainer(Line(), torch.arange(8.0), None)
    >>> strategy = SimpleReduceStrategy(OptimSpec(torch.optim.SGD, lr=0.1))
    >>> model = trainer.fit(1, strategy, num_nodes=2, batch_size=4, disable_logging=True)
    >>> model.w  # 0.1 of the gradient 2 * 3.5
    Parameter containing:
    tensor(0.7000, requires_grad=True)
    """

    def __init__(
        self,
        model: nn.Module,
        train_dataset: Any,
        val_dataset: Any,
        start_port: Any = None,
        device: str | torch.device | None = None,
        devices: Any = None,
    ) -> None:
        warn_without_effect("Trainer", {"start_port": start_port, "devices": devices}, WITHOUT_EFFECT)
        if hasattr(type(self), "_build_connection"):
            warn(f"{type(self).__name__}._build_connection is never called: all nodes are in this process.")
        super().__init__(model, train_dataset, val_dataset)
        self.model_orig = model  # EXO Gym's name for it
        self.device = device

    @takes(FitOptions)
    def fit(self, options: FitOptions) -> nn.Module:  # type: ignore[override]  # EXO Gym's order
        """Train, and return a model that holds the average of the nodes.

        Args:
            {arguments}

        Raises:
            TypeError: for an unknown or missing option.
            ValueError: for an invalid value.
        """
        warn_without_effect("fit()", vars(options), WITHOUT_EFFECT)
        devices = (_device, options.device, self.device)
        try:
            device = vecgym_options.resolve_device(next((x for x in devices if x is not None and str(x)), None))
        except ValueError as error:
            raise ValueError(f"{error} For an unmodified script: vecgym exogym --device cpu SCRIPT.") from None
        name = options.run_name or f"{datetime.now():%Y%m%d_%H%M%S_%f}"  # runs may begin in the same second
        options = replace(options, device=device, run_name=name)
        shared = {field.name for field in fields(vecgym_options.FitOptions)}
        folder = None if options.checkpoint_interval is None else os.path.join(options.save_dir, str(options.run_name))
        arguments = {
            **{name: value for name, value in vars(options).items() if name in shared},
            **_sizes(options),
            "strategy": vectorised(options.strategy, options.num_nodes, options.max_steps),
            "logger": self._loggers(options),
            "progress": not options.disable_logging,
            "save_dir": folder,
        }
        with torch_distributed_calls():
            return super().fit(**arguments)

    def _loggers(self, options: FitOptions) -> list[vecgym_loggers.Logger]:
        if options.disable_logging:
            return []
        if options.logger is not None:
            return vecgym_loggers.as_loggers(options.logger)
        kwargs = {} if options.kwargs is None else options.kwargs
        extra = {"num_nodes": options.num_nodes, "batch_size": options.batch_size, "kwargs": kwargs}
        name, config = str(options.run_name), create_config(self.model, options.strategy, None, extra)
        if options.wandb_project is not None:
            try:
                return [WandbLogger(options.wandb_project, name, config, options.log_x_axis or "step")]
            except ImportError:
                project = f"wandb_project={options.wandb_project!r}"
                warn(f"{project}, but wandb is not installed: logging to logs/{name}/ instead.")
        elif options.log_x_axis == "examples":
            warn("fit(): log_x_axis='examples' has no effect without wandb_project: train.csv has both columns.")
        return [CSVLogger(name, config)]

    def find_minibatch_size(self, num_nodes: Any, batch_size: int, force_recalculate: Any = False) -> int:
        """Return `batch_size`: nothing is probed here."""
        return check.integer("batch_size", batch_size)

    def clear_minibatch_cache(self) -> None:
        """Do nothing: there is no cache."""


def _sizes(options: FitOptions) -> dict[str, Any]:
    """Return the sizes of a batch and of its parts; as in EXO Gym, examples that do not fill a part are dropped."""
    size, accumulation = options.batch_size, options.gradient_accumulation
    part = vecgym_options.accumulated(size, options.minibatch_size, accumulation)
    used = size if part is None else size - size % part
    if used < size:
        warn(f"fit(): with batch_size={size}, minibatches of {part} use only {used} examples per step.")
    return {"batch_size": used, "minibatch_size": part, "gradient_accumulation": None}


LocalTrainer = Trainer
