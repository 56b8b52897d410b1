"""The arguments of diloco-sim, checked, and what its hooks are given."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from vecgym.compat.diloco_sim.timing import BeforeSteps
from vecgym.core import check
from vecgym.optim import OptimSpec
from vecgym.strategy import (
    CommunicateOptimizeStrategy,
    DiLoCoCommunicator,
    RandomSelector,
    SparseCommunicator,
)

PORT = 12355  # the original's default


@dataclass(frozen=True)
class TrainStats:
    """What `train_loss_hook` is given after a local step: the mean over the nodes of their loss; exp of it.

    >>> TrainStats(loss=0.0, perplexity=1.0)
    TrainStats(loss=0.0, perplexity=1.0)
    """

    loss: float
    perplexity: float


@dataclass(frozen=True)
class EvalStats:
    """What `eval_loss_hook` is given: `glob`, of the average of the nodes; not `glob`, the mean of their own losses.

    >>> EvalStats(loss=0.0, perplexity=1.0, glob=True).glob
    True
    """

    loss: float
    perplexity: float
    glob: bool


@dataclass
class DilocoSimulatorConfig:
    """Every argument of diloco-sim, with its default.

    Args:
        model_cls: an `nn.Module` class, whose objects map a batch of inputs x to what `loss_fn` takes.
        model_kwargs: what it is made with.
        loss_fn: (output, y) -> scalar mean loss of the batch.
        train_dataset: of (x, y).
        optimizer_kwargs: of the inner optimizer.
        optimizer_cls: the inner optimizer.
        batch_size: examples per node and local step.
        eval_dataset: of (x, y); None: evaluates on the first of the training examples.
        ckpt_interval: outer steps between checkpoints, besides one at the end; None: that one only.
        corr_interval: local steps between measurements of the nodes' correlation; None: never.
        eval_iters: batches of an evaluation.
        eval_interval: local steps between evaluations.
        save_dir: where checkpoints go, as STEP.pt: the averaged model's `state_dict`; None: none are written.
        num_epochs: passes over the data.
        p_sparta: the probability of a parameter to be averaged in a sparse exchange; 0: none.
        sparta_interval: local steps between sparse exchanges.
        cosine_anneal: decay the inner learning rate along a cosine to 10 %.
        warmup_steps: local steps of linear warm-up from 0.
        model_path: a checkpoint to start from; see `DilocoSimulator.load_model`.
        num_nodes: K.
        diloco_interval: local steps between outer steps.
        outer_optimizer_cls, outer_optimizer_kwargs: the outer optimizer.
        max_local_step: ends the run before `num_epochs`.
        wandb_project, wandb_name: log to Weights & Biases.
        max_minibatch_size: the most examples at a time, whose gradients are accumulated.
        port: has no effect.
        devices: indices of GPUs, of which the first is used; an empty list: the CPU; None: the best device present.
        max_norm: clip each node's gradient to this 2-norm.
        async_sparta_delay: sparse exchanges until the averaged values are written.
        train_loss_hook: called with `TrainStats` after each local step.
        eval_loss_hook: called with `EvalStats` after each evaluation: of the nodes' own models, then of their average.
        seed: of the order of the data, masks, and dropout. Not in the original.
        progress: show a progress bar. Not in the original.

    Raises:
        TypeError, ValueError: at construction, for what cannot work.

    >>> config = DilocoSimulatorConfig(
    ...     model_cls=nn.Linear, model_kwargs={"in_features": 2, "out_features": 1}, loss_fn=nn.functional.mse_loss,
    ...     train_dataset=torch.utils.data.TensorDataset(torch.zeros(64, 2), torch.zeros(64, 1)), num_nodes=2,
    ... )
    >>> config.num_local_steps  # 64 examples, 2 * 16 at a time
    2
    >>> config.strategy().inner_optim
    OptimSpec(AdamW, lr=0.001)
    """

    model_cls: type[nn.Module]
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    loss_fn: Callable[..., Tensor] | None = None  # this and train_dataset are needed, in the original's order
    train_dataset: Any = None
    optimizer_kwargs: dict[str, Any] = field(default_factory=lambda: {"lr": 0.001})
    optimizer_cls: type[torch.optim.Optimizer] = torch.optim.AdamW
    batch_size: int = 16
    eval_dataset: Any = None
    ckpt_interval: int | None = None
    corr_interval: int | None = None
    eval_iters: int = 50
    eval_interval: int = 1000
    save_dir: str | os.PathLike[str] | None = None
    num_epochs: int = 1
    p_sparta: float = 0.0
    sparta_interval: int = 1
    cosine_anneal: bool = False
    warmup_steps: int = 0
    model_path: str | os.PathLike[str] | None = None
    num_nodes: int = 4
    diloco_interval: int = 500
    outer_optimizer_cls: type[torch.optim.Optimizer] = torch.optim.SGD
    outer_optimizer_kwargs: dict[str, Any] = field(
        default_factory=lambda: {"lr": 0.7, "nesterov": True, "momentum": 0.9}
    )
    max_local_step: int | None = None
    wandb_project: str | None = None
    max_minibatch_size: int | None = None
    port: int = PORT
    devices: list[int] | None = None
    max_norm: float | None = None
    async_sparta_delay: int = 0
    wandb_name: str | None = None
    train_loss_hook: Callable[[TrainStats], None] | None = None
    eval_loss_hook: Callable[[EvalStats], None] | None = None
    seed: int = 0
    progress: bool = True

    def __post_init__(self) -> None:
        _sized("train_dataset", self.train_dataset)
        _function("(output, y) -> loss, such as F.cross_entropy")("loss_fn", self.loss_fn)
        for argument in fields(self):
            value = getattr(self, argument.name)
            if argument.name in _CHECKS and (value is not None or argument.default is not None):
                setattr(self, argument.name, _CHECKS[argument.name](argument.name, value))
        if self.ckpt_interval is not None and self.save_dir is None:
            raise ValueError(f"ckpt_interval={self.ckpt_interval} needs a directory: give save_dir='checkpoints'.")
        if self.num_local_steps < 1:
            raise ValueError(
                f"train_dataset has {len(self.train_dataset)} examples, too few for one step of num_nodes="
                f"{self.num_nodes} with batch_size={self.batch_size}: fewer nodes, or smaller batches."
            )
        self.strategy()  # has checks of its own, of the optimizers among them

    @property
    def num_local_steps(self) -> int:
        """Local steps of the run: num_epochs * examples // (batch_size * num_nodes), at most `max_local_step`."""
        steps = self.num_epochs * len(self.train_dataset) // (self.batch_size * self.num_nodes)
        return steps if self.max_local_step is None else min(steps, self.max_local_step)

    def strategy(self) -> CommunicateOptimizeStrategy:
        """The strategy that these arguments describe."""
        sparse = SparseCommunicator(
            RandomSelector(self.p_sparta),
            interval=self.sparta_interval,
            delay=self.async_sparta_delay * self.sparta_interval,
        )
        outer = DiLoCoCommunicator(
            OptimSpec(self.outer_optimizer_cls, **self.outer_optimizer_kwargs), H=self.diloco_interval
        )
        modules = [BeforeSteps(sparse, "sparta_interval", self.sparta_interval)] if self.p_sparta > 0 else []
        return CommunicateOptimizeStrategy(
            [*modules, BeforeSteps(outer, "diloco_interval", self.diloco_interval)],
            OptimSpec(self.optimizer_cls, **self.optimizer_kwargs),
            max_norm=self.max_norm,
            warmup_steps=self.warmup_steps,
            cosine_anneal=self.cosine_anneal,
        )


def _model_class(name: str, value: Any) -> type[nn.Module]:
    if isinstance(value, type) and issubclass(value, nn.Module):
        return value
    raise TypeError(f"{name} is {check.kind_of(value)}; give a subclass of nn.Module, not an object of it.")


def _sized(name: str, value: Any) -> None:
    if value is None:
        raise TypeError(f"{name} is missing: give a dataset of (x, y).")
    try:
        len(value)
    except TypeError as error:
        raise TypeError(f"{name} is {check.kind_of(value)}, without length; give a dataset of (x, y).") from error


def _function(what: str) -> Callable[[str, Any], Any]:
    def looked_at(name: str, value: Any) -> Any:
        if callable(value):
            return value
        raise TypeError(f"{name}={value!r}: give a function {what}.")

    return looked_at


def _count(least: int = 1) -> Callable[[str, Any], int]:
    return lambda name, value: check.integer(name, value, least)


def _or_none(name: str, value: Any) -> int | None:
    """0 means none, as in the original."""
    return check.integer(name, value, 0) or None


def _keywords(name: str, value: Any) -> dict[str, Any]:
    keywords: dict[str, Any] = check.instance(name, value, dict, "a dict of keyword arguments")
    return keywords


def _indices(name: str, value: Any) -> list[int]:
    return [check.integer(name, x, 0) for x in check.instance(name, value, (list, tuple), "a list of GPUs' indices")]


# What each argument may be; where None is the default, that too.
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "model_cls": _model_class,
    **dict.fromkeys(("model_kwargs", "optimizer_kwargs", "outer_optimizer_kwargs"), _keywords),
    **dict.fromkeys(("train_loss_hook", "eval_loss_hook"), _function("of one argument, or None")),
    **dict.fromkeys(("batch_size", "eval_iters", "eval_interval", "num_epochs", "sparta_interval"), _count()),
    **dict.fromkeys(("num_nodes", "diloco_interval"), _count()),
    **dict.fromkeys(("warmup_steps", "async_sparta_delay", "port"), _count(0)),
    **dict.fromkeys(("ckpt_interval", "corr_interval", "max_local_step", "max_minibatch_size"), _or_none),
    **dict.fromkeys(("save_dir", "model_path"), check.path),
    **dict.fromkeys(("cosine_anneal", "progress"), check.flag),
    "devices": _indices,
    "p_sparta": lambda name, value: check.number(name, value, "[0, 1]"),
    "max_norm": lambda name, value: check.number(name, value, "[0, inf]") or None,  # 0 means none here too
    "seed": check.seed,
}  # fmt: skip
