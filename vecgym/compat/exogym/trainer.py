"""EXO Gym's trainer: its arguments, vecgym's training."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields, replace
from datetime import datetime
from functools import partial
from typing import Annotated, Any

import torch
from torch import nn

from vecgym.compat.exogym.base import Strategy, vectorised, warn_without_effect
from vecgym.compat.exogym.communicate import torch_distributed_calls
from vecgym.compat.exogym.logger import AXES, CSVLogger, WandbLogger
from vecgym.compat.exogym.utils import create_config
from vecgym.core import check
from vecgym.core.errors import warn
from vecgym.core.options import Options, takes
from vecgym.records.loggers import Logger, as_loggers
from vecgym.runs import options as vecgym_options
from vecgym.runs import trainer as vecgym_trainer
from vecgym.runs.options import Count, Flag, NumExamples, OptionalCount, Seed

# Of `fit` and `Trainer`.
WITHOUT_EFFECT = {
    **dict.fromkeys(("start_port", "port"), "there are no processes, and so no ports"),
    "devices": "all nodes are on one device; give device='cuda:1', say",
    "force_minibatch_recalculate": "nothing is probed: batches are computed whole unless minibatch_size is given",
}

Name = Annotated[str | None, partial(check.instance, kind=(str, type(None)), give="a str, or None")]
Axis = Annotated[str | None, lambda name, value: value if value is None else check.choice(name, value, AXES, "None")]


@dataclass(frozen=True)
class FitOptions(Options):
    """What `Trainer.fit` takes: EXO Gym's arguments, and by name those of its `**kwargs`.

    Args:
        num_epochs, ...: as for `vecgym.Trainer.fit`, unless they are below.
        checkpoint_interval: steps between checkpoints, in `save_dir/run_name`; None: there are none.
        save_dir: see there.
        run_name: None: the time.
        wandb_project: log to Weights & Biases, else to `logs/<run_name>/` (`train.csv`, `validation.csv`).
        log_x_axis: "step" or "examples", for Weights & Biases.
        kwargs: anything; it is added to the logged settings.
        logger, log_interval: vecgym's own loggers instead.
        disable_logging: neither files nor a progress bar.
        gradient_accumulation, max_memory_usage: see `vecgym.Trainer.fit`.
        start_port, port, devices, force_minibatch_recalculate: without effect, with a warning.
    """

    num_epochs: Count = 1
    strategy: Strategy = None  # type: ignore[assignment]  # this and num_nodes are needed, in EXO Gym's order
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
        check.instance("strategy", self.strategy, Strategy, "a strategy of exogym.strategy, or of a class made of one")
        if self.num_nodes is None:
            raise TypeError("fit() needs num_nodes=K.")
        super().__post_init__()
        if self.minibatch_size is not None and self.minibatch_size > self.batch_size:
            raise ValueError(
                f"minibatch_size={self.minibatch_size} must not be larger than batch_size={self.batch_size}."
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(FitOptions):
    """What EXO Gym gives to its processes. Nothing here takes it; it is there to be imported."""

    model: nn.Module
    train_dataset: Any
    val_dataset: Any
    rank: int | None = None


class TrainNode:
    """A process of EXO Gym's. Here are none; this class is there to be imported.

    Raises:
        TypeError: whenever one is made.
    """

    def __init__(self, config: TrainConfig) -> None:
        raise TypeError(
            "there is no TrainNode: after fit(), trainer.nodes has the nodes, and nodes.module(i) is one's."
        )


_device: str | None = None  # that trainers use in place of their own


def use_device(device: str | None) -> None:
    """Set the device that trainers use in place of their own; see `install`."""
    global _device
    _device = check.instance("device", device, (str, type(None)), 'a device such as "cpu", or None')


class Trainer(vecgym_trainer.Trainer[nn.Module]):
    """Train one model on K simulated nodes, with the arguments of EXO Gym's trainer. All else is `vecgym.Trainer`'s.

    Args:
        model: `model(batch)` returns the mean loss.
        train_dataset, val_dataset: datasets, or factories `(rank, num_nodes, train_dataset=...) -> Dataset`.
        start_port, devices: without effect, with a warning.
        device: "cpu", "cuda", "mps"; None or "": the best one present.

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
        super().__init__(model, train_dataset, val_dataset)
        self.model_orig = model  # EXO Gym's name for it
        self.device = device

    @takes(FitOptions)
    def fit(self, options: FitOptions) -> nn.Module:  # type: ignore[override]  # EXO Gym's order
        """Train, and return a model that holds the average of the nodes.

        Args:
            {arguments}

        Raises:
            TypeError: for an unknown option, and for what is missing.
            ValueError: for what cannot work.
        """
        warn_without_effect("fit()", vars(options), WITHOUT_EFFECT)
        asked = (_device, options.device, self.device)
        try:
            device = vecgym_options.resolve_device(next((x for x in asked if x is not None and str(x)), None))
        except ValueError as error:
            raise ValueError(f"{error} A script as it stands: vecgym exogym --device cpu SCRIPT.") from None
        options = replace(options, device=device, run_name=options.run_name or f"{datetime.now():%Y%m%d_%H%M%S}")
        known = {field.name for field in fields(vecgym_options.FitOptions)}
        folder = None if options.checkpoint_interval is None else os.path.join(options.save_dir, str(options.run_name))
        arguments = {
            **{name: value for name, value in vars(options).items() if name in known},
            **_sizes(options),
            "strategy": vectorised(options.strategy, options.num_nodes, options.max_steps),
            "logger": self._loggers(options),
            "progress": not options.disable_logging,
            "save_dir": folder,
        }
        with torch_distributed_calls():
            return super().fit(**arguments)

    def _loggers(self, options: FitOptions) -> list[Logger]:
        if options.disable_logging:
            return []
        if options.logger is not None:
            return as_loggers(options.logger)
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
    """Return the sizes of a batch and of its parts; as in EXO Gym, examples that fill no part are left out."""
    size, accumulation = options.batch_size, options.gradient_accumulation
    part = vecgym_options.accumulated(size, options.minibatch_size, accumulation)
    used = size if part is None else size - size % part
    if used < size:
        warn(f"fit(): of batch_size={size}, minibatches of {part} leave {used} examples a step.")
    return {"batch_size": used, "minibatch_size": part, "gradient_accumulation": None}


LocalTrainer = Trainer
