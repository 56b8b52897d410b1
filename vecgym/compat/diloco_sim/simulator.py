"""diloco-sim's simulator, by `vecgym.Trainer`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vecgym.collectives.ledger import Ledger
from vecgym.compat import perplexity
from vecgym.compat.diloco_sim.config import PORT, DilocoSimulatorConfig, EvalStats, TrainStats
from vecgym.core import check, nodes
from vecgym.core.errors import warn
from vecgym.core.files import is_regular, write_atomically
from vecgym.records.history import History
from vecgym.records.loggers import WandbLogger
from vecgym.runs.trainer import Trainer


class DilocoSimulator:
    """Train one model on K nodes with DiLoCo, SPARTA or both, as diloco-sim does.

    Args:
        config: a `DilocoSimulatorConfig`, or its arguments as keywords.

    Attributes:
        config: the arguments.
        max_local_step: the local steps of the run.
        local_step: how many of them are done.
        master_model: what the nodes start from; after `train`, their average.
        history, ledger, trainer: of the run; see `vecgym.Trainer`.

    Raises:
        TypeError: for an unknown keyword, and for a subclass that overrides a method that only the original has.

    >>> class Line(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = nn.Parameter(torch.zeros(1))
    ...     def forward(self, x):
    ...         return self.w * x
    >>> x = torch.arange(1.0, 9.0)
    >>> simulator = DilocoSimulator(
    ...     model_cls=Line, loss_fn=nn.functional.mse_loss, train_dataset=torch.utils.data.TensorDataset(x, 2 * x),
    ...     optimizer_kwargs={"lr": 0.1}, num_nodes=2, batch_size=2, num_epochs=10, diloco_interval=5, progress=False,
    ... )
    >>> model = simulator.train()
    >>> simulator.local_step, [entry.step for entry in simulator.ledger], simulator.history["lr"][-1]
    (20, [4, 9, 14], 0.1)
    """

    def __init__(self, config: DilocoSimulatorConfig | None = None, **arguments: Any) -> None:
        _check_overridden(type(self))
        if config is None:
            check.keywords("DilocoSimulator", arguments, [f.name for f in fields(DilocoSimulatorConfig)])
            if "model_cls" not in arguments:
                raise TypeError("model_cls is missing: give a config, or model_cls=a subclass of nn.Module.")
            config = DilocoSimulatorConfig(**arguments)
        elif arguments:
            raise TypeError(f"give a config or keywords, not both: {', '.join(arguments)} can be in the config.")
        give = "a DilocoSimulatorConfig, or its arguments as keywords"
        check.instance("config", config, DilocoSimulatorConfig, give)
        self.config = replace(config)  # checked once more: its fields may have been set
        self.max_local_step = config.num_local_steps
        self.local_step = 0
        self.master_model = config.model_cls(**config.model_kwargs)
        self.trainer: Trainer | None = None
        _warn_without_effect(config)
        if config.model_path is not None:
            self.load_model(config.model_path)

    def load_model(self, path: str | os.PathLike[str]) -> None:
        """Start from a checkpoint, a file with the model's `state_dict`. Call this before `train`.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: for a damaged file, or another model's; the message names it.

        >>> import tempfile
        >>> x = torch.ones(64, 1)
        >>> simulator = DilocoSimulator(
        ...     model_cls=nn.Linear, model_kwargs={"in_features": 1, "out_features": 1}, num_nodes=2,
        ...     loss_fn=nn.functional.mse_loss, train_dataset=torch.utils.data.TensorDataset(x, x),
        ... )
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"weight": torch.ones(1, 1), "bias": torch.zeros(1)}, f"{folder}/500.pt")
        ...     simulator.load_model(f"{folder}/500.pt")
        >>> simulator.master_model.weight
        Parameter containing:
        tensor([[1.]], requires_grad=True)
        """
        file = check.path("path", path)
        if not file.exists():
            raise FileNotFoundError(f"there is no file {file}.")
        if not is_regular(file):
            raise ValueError(f"{file} is no file, but a folder, a pipe, a socket or a device.")
        try:
            self.master_model.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        except Exception as error:  # damage shows in many ways
            reason = " ".join(str(error).split())[:400] or type(error).__name__
            raise ValueError(f"{file} is damaged, or holds no state_dict of this model: {reason}") from error

    def train(self) -> nn.Module:
        """Train, and return the average of the nodes (the original returns nothing)."""
        config = self.config
        model = _WithLoss(self.master_model, config.loss_fn)
        evaluated = config.train_dataset if config.eval_dataset is None else config.eval_dataset
        logger = WandbLogger(config.wandb_project, config.wandb_name) if config.wandb_project else None
        self.trainer = _Trainer(self, model, config.train_dataset, evaluated)
        averaged: Any = self.trainer.fit(
            config.strategy(), config.num_nodes, max_steps=self.max_local_step, batch_size=config.batch_size,
            minibatch_size=_minibatch_size(config), val_size=config.eval_iters * config.batch_size,
            val_interval=config.eval_interval, correlation_interval=config.corr_interval, seed=config.seed,
            device=_device(config.devices), logger=logger, progress=config.progress,
        )  # fmt: skip
        self.master_model = averaged.model
        if config.save_dir is not None:
            self._save(self.master_model)
        return self.master_model

    @property
    def history(self) -> History:
        """What the run recorded, as columns."""
        return self._trained().history

    @property
    def ledger(self) -> Ledger:
        """Every collective of the run, with its bytes."""
        return self._trained().ledger

    def _trained(self) -> Trainer:
        if self.trainer is None:
            raise AttributeError("history and ledger are there once train() has begun.")
        return self.trainer

    def _after_step(self, row: dict[str, Any], averaged: Callable[[], nn.Module]) -> None:
        """Call hooks and save as the original does between two local steps; row 0 is before the first."""
        config, self.local_step = self.config, row["step"]
        if "train_loss" in row and config.train_loss_hook is not None:
            config.train_loss_hook(TrainStats(row["train_loss"], perplexity(row["train_loss"])))
        if self.local_step == self.max_local_step:
            return
        if "val_loss" in row and config.eval_loss_hook is not None:
            own, average = row["val_loss_local"], row["val_loss"]
            config.eval_loss_hook(EvalStats(own, perplexity(own), glob=False))
            if config.num_nodes > 1:
                config.eval_loss_hook(EvalStats(average, perplexity(average), glob=True))
        between = (config.ckpt_interval or 0) * config.diloco_interval
        if between and self.local_step > 0 and self.local_step % between == 0:
            self._save(averaged())

    def _save(self, model: nn.Module) -> None:
        """Write its `state_dict`; the file appears whole or not at all."""
        assert self.config.save_dir is not None
        with write_atomically(Path(self.config.save_dir) / f"{self.local_step}.pt") as file:
            torch.save(model.state_dict(), file)


class _WithLoss(nn.Module):
    """The model and `loss_fn` as vecgym's kind of model, which maps a batch to its loss."""

    loss_metrics: ClassVar[dict[str, Any]] = {"perplexity": torch.exp}

    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        super().__init__()
        self.model = model
        self._loss_fn = (loss_fn,)  # in a tuple: a loss that is a module is not trained

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        return self._loss_fn[0](self.model(x), y)


class _Trainer(Trainer):
    """Tells the simulator of every step."""

    def __init__(self, simulator: DilocoSimulator, *args: Any) -> None:
        super().__init__(*args)
        self.simulator = simulator

    def after_step(self, row: dict[str, Any]) -> None:
        self.simulator._after_step(row, self._average)

    def _average(self) -> nn.Module:
        """A copy of the user's own model, with the average of the nodes."""
        assert self.state is not None
        averaged: Any = nodes.fill(self.model, {**nodes.mean(self.state.params), **nodes.mean(self.state.buffers)})
        return averaged.model


def _check_overridden(cls: type) -> None:
    for name in ("_train", "_train_loop", "_train_step", "_outer_step", "_get_batch", "_evaluate", "_eval_model"):
        if hasattr(cls, name):
            raise TypeError(
                f"{cls.__name__}.{name} would never be called: vecgym steps all nodes at once. "
                "Use train_loss_hook and eval_loss_hook, or a strategy of vecgym."
            )


def _warn_without_effect(config: DilocoSimulatorConfig) -> None:
    if config.port != PORT:
        warn(f"port={config.port} has no effect: all nodes are in this process.")
    if config.devices is not None and len(config.devices) > 1:
        warn(f"devices={config.devices}: all nodes are on the first of them.")
    for name, default in (("sparta_interval", 1), ("async_sparta_delay", 0)):
        if config.p_sparta == 0 and getattr(config, name) != default:
            warn(f"{name}={getattr(config, name)} has no effect without p_sparta: give p_sparta=0.005.")


def _device(devices: list[int] | None) -> str | None:
    if devices is None:
        return None
    return f"cuda:{devices[0]}" if devices and torch.cuda.is_available() else "cpu"


def _minibatch_size(config: DilocoSimulatorConfig) -> int | None:
    most = config.max_minibatch_size
    if most is None or most >= config.batch_size:
        return None
    return max(n for n in range(1, most + 1) if config.batch_size % n == 0)
