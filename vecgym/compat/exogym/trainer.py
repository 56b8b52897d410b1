"""EXO Gym's trainer: its arguments, vecgym's training."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import torch
from torch import nn

from vecgym.collectives.ledger import Ledger
from vecgym.compat.exogym import strict
from vecgym.compat.exogym.communicate import torch_distributed_calls
from vecgym.compat.exogym.logger import CSVLogger, WandbLogger
from vecgym.compat.exogym.options import OF_RUNS, checked, warn_without_effect
from vecgym.compat.exogym.strategies import Strategy
from vecgym.compat.exogym.utils import create_config
from vecgym.compat.exogym.vectorised import vectorised
from vecgym.core import check, nodes
from vecgym.core.errors import warn
from vecgym.core.nodes import Nodes
from vecgym.records.history import History
from vecgym.records.loggers import Logger, as_loggers
from vecgym.runs import trainer as vecgym_trainer
from vecgym.runs.options import accumulated, resolve_device
from vecgym.runs.recorder import Loggers

# What `fit` takes besides the arguments in its signature.
FIT_OPTIONS = (
    "seed", "device", "devices", "start_port", "port", "wandb_project", "run_name", "log_x_axis", "kwargs", "logger",
    "log_interval", "disable_logging", "force_minibatch_recalculate", "gradient_accumulation", "max_memory_usage",
)  # fmt: skip

# What the documents give to `fit`, and EXO Gym does not read.
IGNORED_BY_FIT = dict.fromkeys(
    ("gradient_accumulation", "max_memory_usage"), "EXO Gym ignores it, and so does strict timing"
)

_defaults = {"strict_timing": False}


def set_strict_timing(strict_timing: bool) -> None:
    """What trainers do that are not told: see `vecgym.compat.exogym.install`."""
    _defaults["strict_timing"] = strict_timing


class Trainer:
    """Train one model on K simulated nodes, with the arguments of EXO Gym's trainer.

    Args:
        model: `model(batch)` returns the mean loss.
        train_dataset, val_dataset: datasets, or factories `(rank, num_nodes, train_dataset=...) -> Dataset`.
        start_port, devices: without effect, with a warning.
        device: "cpu", "cuda", "mps"; None or "": the best one present.
        strict_timing: train exactly as EXO Gym's processes do, see `vecgym.compat.exogym`; None: as `install` was told.

    Attributes, after `fit`: `history`, `ledger`, `nodes`, as of `vecgym.Trainer`.

    >>> from vecgym.compat.exogym import OptimSpec, SimpleReduceStrategy
    >>> class Line(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = nn.Parameter(torch.zeros(()))
    ...     def forward(self, x):
    ...         return (self.w - x).square().mean()
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
        start_port: int | None = None,
        device: str | torch.device | None = None,
        devices: Sequence[int] | None = None,
        *,
        strict_timing: bool | None = None,
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

    @checked
    def fit(
        self,
        num_epochs: int = 1,
        strategy: Strategy | None = None,
        num_nodes: int | None = None,
        max_steps: int | None = None,
        batch_size: int = 16,
        minibatch_size: int | None = None,
        shuffle: bool = True,
        val_size: int = 64,
        val_interval: int = 100,
        autocast: bool = False,
        checkpoint_interval: int | None = None,
        correlation_interval: int | None = None,
        save_dir: str = "./checkpoints",
        dataloader_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> nn.Module:
        """Train, and return a model that holds the average of the nodes.

        Args, besides `vecgym.Trainer.fit`'s:
            wandb_project: log to Weights & Biases, else to `logs/<run_name>/` (`train.csv`, `validation.csv`).
            run_name: None: the time.
            log_x_axis: "step" or "examples", for Weights & Biases.
            kwargs: anything, for the record: it goes into the logged settings.
            logger, log_interval: vecgym's own loggers, instead.
            gradient_accumulation, max_memory_usage: see `vecgym.Trainer.fit`; without effect with strict timing.
            disable_logging: neither files nor a progress bar.
            checkpoint_interval: checkpoints go to `save_dir/run_name`; without it there are none.
            start_port, port, devices, force_minibatch_recalculate: without effect, with a warning.

        Raises:
            TypeError: for an unknown option, and for what is missing.
            ValueError: for what cannot work.
        """
        check.keywords("fit()", options, [*FIT_OPTIONS, *SIGNATURE])
        warn_without_effect("fit()", options, OF_RUNS)
        if not isinstance(strategy, Strategy):
            raise TypeError(
                f"strategy is {check.kind_of(strategy)}; give a strategy of exogym.strategy, or of a class made of one."
            )
        if num_nodes is None:
            raise TypeError("fit() needs num_nodes=K.")
        if minibatch_size is not None and minibatch_size > batch_size:
            raise ValueError(f"minibatch_size={minibatch_size} must not be larger than batch_size={batch_size}.")
        device = resolve_device(options.get("device") or self.device or None)
        name = options.get("run_name") or datetime.now().strftime("%Y%m%d_%H%M%S")
        loggers = self._loggers(strategy, name, options, num_nodes=num_nodes, batch_size=batch_size)
        progress = not options.get("disable_logging", False)
        strict_timing = _defaults["strict_timing"] if self.strict_timing is None else self.strict_timing
        if strict_timing:
            if checkpoint_interval is not None:
                warn("fit(): checkpoint_interval has no effect with strict timing; in EXO Gym it ends in an error.")
            warn_without_effect("fit()", options, IGNORED_BY_FIT)
            config = strict.TrainConfig(
                self.model_orig, self.train_dataset, self.val_dataset, strategy, num_nodes, device=device,
                num_epochs=num_epochs, max_steps=max_steps, batch_size=batch_size,
                minibatch_size=minibatch_size or batch_size, shuffle=shuffle, val_size=val_size,
                val_interval=val_interval, autocast=autocast, correlation_interval=correlation_interval,
                dataloader_kwargs=dict(dataloader_kwargs or {}), kwargs=options,
            )  # fmt: skip
            return self._fit_strict(config, Loggers(loggers, options.get("log_interval", 1)), progress)
        minibatch_size = accumulated(batch_size, minibatch_size, options.get("gradient_accumulation"))
        if minibatch_size is not None and batch_size % minibatch_size:
            used = batch_size - batch_size % minibatch_size
            warn(f"fit(): of batch_size={batch_size}, minibatches of {minibatch_size} leave {used} examples a step.")
            batch_size = used
        trainer = vecgym_trainer.Trainer(self.model_orig, self.train_dataset, self.val_dataset)
        try:
            with torch_distributed_calls():
                return trainer.fit(
                    vectorised(strategy, num_nodes, max_steps), num_nodes, num_epochs=num_epochs, max_steps=max_steps,
                    batch_size=batch_size, minibatch_size=minibatch_size, shuffle=shuffle, device=device,
                    seed=options.get("seed", 42), val_size=val_size, val_interval=val_interval, autocast=autocast,
                    correlation_interval=correlation_interval, logger=loggers,
                    log_interval=options.get("log_interval", 1), dataloader_kwargs=dataloader_kwargs,
                    progress=progress, max_memory_usage=options.get("max_memory_usage"),
                    checkpoint_interval=checkpoint_interval,
                    save_dir=None if checkpoint_interval is None else os.path.join(save_dir, name),
                )  # fmt: skip
        finally:
            self.history, self.ledger = trainer.history, trainer.ledger
            self.nodes = None if trainer.run is None else trainer.run.nodes

    def _fit_strict(self, config: strict.TrainConfig, loggers: Loggers, progress: bool) -> nn.Module:
        for text in (*config.strategy.ignored, *self._ignored_modules(config.strategy)):
            warn(f"EXO Gym ignores, and so does strict timing: {text}.")
        if self.val_dataset is not None and 0 < config.val_size < config.batch_size:
            raise ValueError(
                f"val_size={config.val_size} is less than batch_size={config.batch_size}: EXO Gym divides by zero. "
                "Fix: val_size=0, or at least batch_size."
            )
        settings = {"num_nodes": config.num_nodes, "batch_size": config.batch_size, "strict_timing": True}
        self.history, self.ledger = History(settings), Ledger()
        self.nodes = Nodes(copy.deepcopy(self.model_orig), config.num_nodes, {}, {})
        strict.run(config, loggers, settings, progress, strict.StrictRun(self.history, self.ledger, self.nodes))
        average = {**nodes.mean(self.nodes.params), **nodes.mean(self.nodes.buffers)}
        return nodes.fill(self.model_orig, average)

    def _ignored_modules(self, strategy: Strategy) -> list[str]:
        """What is ignored of modules that the user has composed; a strategy knows what its own ignore."""
        own = {
            text for module in getattr(strategy, "communication_modules", ()) for text in getattr(module, "ignored", ())
        }
        return sorted(own - set(strategy.ignored))

    def _loggers(self, strategy: Strategy, name: str, options: Mapping[str, Any], **settings: Any) -> list[Logger]:
        """Where the run is logged."""
        if options.get("disable_logging", False):
            return []
        given = options.get("logger")
        if given is not None:
            return as_loggers(given)
        extra = {**settings, "kwargs": options.get("kwargs") or {}}
        config = create_config(self.model_orig, strategy, None, extra)
        project = options.get("wandb_project")
        if project is not None:
            try:
                return [WandbLogger(project, name, config, options.get("log_x_axis") or "step")]
            except ModuleNotFoundError:
                warn(f"wandb_project={project!r}, but wandb is not installed: logging to logs/{name}/ instead.")
        elif options.get("log_x_axis") == "examples":
            warn("fit(): log_x_axis='examples' has no effect without wandb_project: train.csv has both columns.")
        return [CSVLogger(name, config)]

    @checked
    def find_minibatch_size(self, num_nodes: int, batch_size: int, force_recalculate: bool = False) -> int:
        """`batch_size`: nothing is probed here."""
        return batch_size

    def clear_minibatch_cache(self) -> None:
        """Nothing to do: there is none."""


LocalTrainer = Trainer
SIGNATURE = [name for name in inspect.signature(Trainer.fit).parameters if name not in ("self", "options")]
