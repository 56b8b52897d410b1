"""The arguments of a run, under EXO Gym's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Annotated, Any

import torch
from torch import nn

from vecgym.compat.exogym.base import Strategy
from vecgym.compat.exogym.options import Count, CountFrom0, Flag, PathLike
from vecgym.core import check
from vecgym.core.options import Options


def _keywords(name: str, value: Any) -> Any:
    return value if value is None else check.instance(name, value, Mapping, "a dict of arguments of torch's DataLoader")


def _axis(name: str, value: Any) -> Any:
    return value if value is None else check.choice(name, value, ("step", "examples"))


OptionalCount = Annotated[int | None, check.optional_integer]
Name = Annotated[str | None, partial(check.instance, kind=(str, type(None)), give="a str, or None")]


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
    val_size: CountFrom0 = 64
    val_interval: Count = 100
    autocast: Flag = False
    checkpoint_interval: OptionalCount = None
    correlation_interval: OptionalCount = None
    save_dir: PathLike = "./checkpoints"
    dataloader_kwargs: Annotated[Mapping[str, Any] | None, _keywords] = None
    _: KW_ONLY
    seed: Annotated[int, check.seed] = 42
    device: str | torch.device | None = None
    run_name: Name = None
    wandb_project: Name = None
    log_x_axis: Annotated[str | None, _axis] = None
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
