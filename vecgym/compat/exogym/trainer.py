"""EXO Gym's trainer: its arguments, vecgym's training."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields, replace
from datetime import datetime
from typing import Any

import torch
from torch import nn

from vecgym.collectives.ledger import Ledger
from vecgym.compat.exogym import strict
from vecgym.compat.exogym.communicate import torch_distributed_calls
from vecgym.compat.exogym.config import FitOptions, TrainConfig
from vecgym.compat.exogym.logger import CSVLogger, WandbLogger
from vecgym.compat.exogym.options import (
    OF_RUNS,
    Count,
    Flag,
    OptionalFlag,
    OptionalPort,
    checked,
    warn_without_effect,
)
from vecgym.compat.exogym.utils import create_config
from vecgym.compat.exogym.vectorised import vectorised
from vecgym.core.errors import warn
from vecgym.core.nodes import Nodes
from vecgym.core.options import takes
from vecgym.records.history import History
from vecgym.records.loggers import Logger, as_loggers
from vecgym.runs import options as vecgym_options
from vecgym.runs import trainer as vecgym_trainer
from vecgym.runs.recorder import Loggers

# What the documents give to `fit`, and EXO Gym does not read.
IGNORED_BY_FIT = dict.fromkeys(
    ("gradient_accumulation", "max_memory_usage"), "EXO Gym ignores it, and so does strict timing"
)

_defaults: dict[str, Any] = {"strict_timing": False, "device": None}


def set_defaults(strict_timing: bool, device: str | None = None) -> None:
    """Set what trainers do by default, and the device that they use in place of their own; see `install`."""
    _defaults.update(strict_timing=strict_timing, device=device)


class Trainer:
    """Train one model on K simulated nodes, with the arguments of EXO Gym's trainer.

    Args:
        model: `model(batch)` returns the mean loss.
        train_dataset, val_dataset: datasets, or factories `(rank, num_nodes, train_dataset=...) -> Dataset`.
        start_port, devices: without effect, with a warning.
        device: "cpu", "cuda", "mps"; None or "": the best one present.
        strict_timing: train exactly as EXO Gym's processes do, see `vecgym.compat.exogym`; None: as `install` was told.

    Attributes, after `fit`: `history`, `ledger` and `nodes`, as in `vecgym.Trainer`.

    >>> from vecgym.compat.exogym import OptimSpec, SimpleReduceStrategy
    >>> from vecgym.models import Line
    >>> trainer = Trainer(Line(), torch.arange(8.0), None)
    >>> strategy = SimpleReduceStrategy(OptimSpec(torch.optim.SGD, lr=0.1))
    >>> model = trainer.fit(1, strategy, num_nodes=2, batch_size=4, disable_logging=True)
    >>> model.w  # 0.1 of the gradient 2 * 3.5
    Parameter containing:
    tensor(0.7000, requires_grad=True)
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        train_dataset: Any,
        val_dataset: Any,
        start_port: OptionalPort = None,
        device: str | torch.device | None = None,
        devices: Sequence[int] | None = None,
        *,
        strict_timing: OptionalFlag = None,
    ) -> None:
        warn_without_effect("Trainer", {"start_port": start_port, "devices": devices}, OF_RUNS)
        self.model_orig = model
        self.train_dataset = train_dataset
        self.val_dataset = val_dataset
        self.device = device
        self.strict_timing = strict_timing
        self.history = History()
        self.ledger = Ledger()
        self.nodes: Nodes | None = None

    @takes(FitOptions)
    def fit(self, options: FitOptions) -> nn.Module:
        """Train, and return a model that holds the average of the nodes.

        Args:
            {arguments}

        Raises:
            TypeError: for an unknown option, and for what is missing.
            ValueError: for what cannot work.
        """
        warn_without_effect("fit()", vars(options), OF_RUNS)
        asked = (_defaults["device"], options.device, self.device)
        devices = [device for device in asked if device is not None and str(device)]
        try:
            device = vecgym_options.resolve_device(devices[0] if devices else None)
        except ValueError as error:
            raise ValueError(f"{error} A script as it stands: vecgym exogym --device cpu SCRIPT.") from None
        options = replace(options, device=device, run_name=options.run_name or f"{datetime.now():%Y%m%d_%H%M%S}")
        is_strict = _defaults["strict_timing"] if self.strict_timing is None else self.strict_timing
        return self._fit_strict(options) if is_strict else self._fit(options)

    def _fit(self, options: FitOptions) -> nn.Module:
        trainer = vecgym_trainer.Trainer(self.model_orig, self.train_dataset, self.val_dataset)
        known = {field.name for field in fields(vecgym_options.FitOptions)}
        arguments = {
            **{name: value for name, value in vars(options).items() if name in known},
            **_sizes(options),
            "strategy": vectorised(options.strategy, options.num_nodes, options.max_steps),
            "logger": self._loggers(options),
            "progress": not options.disable_logging,
            "save_dir": None,
        }
        if options.checkpoint_interval is not None:
            arguments["save_dir"] = os.path.join(options.save_dir, options.run_name or "")
        try:
            with torch_distributed_calls():
                return trainer.fit(**arguments)
        finally:
            self.history, self.ledger = trainer.history, trainer.ledger
            self.nodes = None if trainer.run is None else trainer.run.nodes

    def _fit_strict(self, options: FitOptions) -> nn.Module:
        if options.checkpoint_interval is not None:
            warn("fit(): checkpoint_interval has no effect with strict timing; in EXO Gym it ends in an error.")
        warn_without_effect("fit()", vars(options), IGNORED_BY_FIT)
        for text in dict.fromkeys(strict.ignored(options.strategy)):
            warn(f"EXO Gym ignores, and so does strict timing: {text}.")
        if self.val_dataset is not None and 0 < options.val_size < options.batch_size:
            raise ValueError(
                f"val_size={options.val_size} is less than batch_size={options.batch_size}: EXO Gym divides by zero. "
                "Fix: val_size=0, or at least batch_size."
            )
        task = {"model": self.model_orig, "train_dataset": self.train_dataset, "val_dataset": self.val_dataset}
        loggers = Loggers(self._loggers(options), options.log_interval)
        run = strict.StrictRun(TrainConfig(**vars(options), **task), loggers, not options.disable_logging)
        self.history, self.ledger, self.nodes = run.history, run.ledger, run.nodes
        run.loop()
        return run.nodes.average()

    def _loggers(self, options: FitOptions) -> list[Logger]:
        if options.disable_logging:
            return []
        if options.logger is not None:
            return as_loggers(options.logger)
        kwargs = {} if options.kwargs is None else options.kwargs
        extra = {"num_nodes": options.num_nodes, "batch_size": options.batch_size, "kwargs": kwargs}
        name, config = str(options.run_name), create_config(self.model_orig, options.strategy, None, extra)
        if options.wandb_project is not None:
            try:
                return [WandbLogger(options.wandb_project, name, config, options.log_x_axis or "step")]
            except ModuleNotFoundError:
                project = f"wandb_project={options.wandb_project!r}"
                warn(f"{project}, but wandb is not installed: logging to logs/{name}/ instead.")
        elif options.log_x_axis == "examples":
            warn("fit(): log_x_axis='examples' has no effect without wandb_project: train.csv has both columns.")
        return [CSVLogger(name, config)]

    @checked
    def find_minibatch_size(self, num_nodes: Count, batch_size: Count, force_recalculate: Flag = False) -> int:
        """Return `batch_size`: nothing is probed here."""
        return batch_size

    def clear_minibatch_cache(self) -> None:
        """Do nothing: there is no cache."""


def _sizes(options: FitOptions) -> dict[str, Any]:
    """Return the sizes of a batch and of its parts; as in EXO Gym, examples that fill no part are left out."""
    size, accumulation = options.batch_size, options.gradient_accumulation
    part = vecgym_options.accumulated(size, options.minibatch_size, accumulation)
    used = size if part is None else size - size % part
    if used < size:
        warn(f"fit(): of batch_size={size}, minibatches of {part} leave {used} examples a step.")
    return {"batch_size": used, "minibatch_size": part, "gradient_accumulation": None}


LocalTrainer = Trainer
