"""diloco-sim's arguments, whose types say how each is checked, and what its hooks are given."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from vecgym.compat.diloco_sim.timing import BeforeSteps
from vecgym.core import check
from vecgym.core.options import checks_of
from vecgym.optim import OptimSpec
from vecgym.runs.options import Count, Flag
from vecgym.strategy import (
    CommunicateOptimizeStrategy,
    CommunicationModule,
    DiLoCoCommunicator,
    RandomSelector,
    SparseCommunicator,
)

PORT = 12355  # the original's default


@dataclass(frozen=True)
class TrainStats:
    """What `train_loss_hook` is given after a local step: the mean of the nodes' losses, and exp of it.

    >>> TrainStats(loss=0.0, perplexity=1.0)
    TrainStats(loss=0.0, perplexity=1.0)
    """

    loss: float
    perplexity: float


@dataclass(frozen=True)
class EvalStats:
    """What `eval_loss_hook` is given: with `glob` of the average of the nodes, else the mean of their own losses.

    >>> EvalStats(loss=0.0, perplexity=1.0, glob=True).glob
    True
    """

    loss: float
    perplexity: float
    glob: bool


def _model_class(name: str, value: Any) -> type[nn.Module]:
    if isinstance(value, type) and issubclass(value, nn.Module):
        return value
    raise TypeError(f"{name} is {check.kind_of(value)}; give a subclass of nn.Module, not an object of it.")


def _sized(name: str, value: Any) -> Any:
    if value is None:
        raise TypeError(f"{name} is missing: give a dataset of (x, y).")
    try:
        len(value)
    except TypeError as error:
        raise TypeError(f"{name} is {check.kind_of(value)}, without length; give a dataset of (x, y).") from error
    return value


def _function(name: str, value: Any, what: str = "(output, y) -> loss, such as F.cross_entropy") -> Any:
    if not callable(value):
        raise TypeError(f"{name}={value!r}: give a function {what}.")
    return value


def _or_none(passed: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    """Let None pass, and let 0 mean it, as in the original."""
    return lambda name, value: None if value is None else passed(name, value) or None


def _indices(name: str, value: Any) -> list[int] | None:
    if value is None:
        return None
    return [check.integer(name, x, 0) for x in check.instance(name, value, (list, tuple), "a list of GPUs' indices")]


Function = Annotated[Callable[..., Tensor] | None, _function]
_hook = _or_none(partial(_function, what="of one argument, or None"))
Keywords = Annotated[dict[str, Any], partial(check.instance, kind=dict, give="a dict of keyword arguments")]
CountFrom0 = Annotated[int, partial(check.integer, least=0)]
CountOr0 = Annotated[int | None, _or_none(partial(check.integer, least=0))]
MaxNorm = Annotated[float | None, _or_none(partial(check.number, within="[0, inf]"))]
Path = Annotated[str | os.PathLike[str] | None, _or_none(check.path)]


@dataclass
class DilocoSimulatorConfig:
    """Every argument of diloco-sim, with its default.

    Args:
        model_cls: a subclass of `nn.Module` that maps a batch of inputs x to what `loss_fn` takes.
        model_kwargs: its arguments.
        loss_fn: (output, y) -> scalar mean loss of the batch.
        train_dataset: a dataset of (x, y).
        optimizer_kwargs: the inner optimizer's arguments.
        optimizer_cls: the inner optimizer.
        batch_size: examples per node and local step.
        eval_dataset: a dataset of (x, y); None: the first training examples.
        ckpt_interval: outer steps between checkpoints; one is written at the end in any case.
        corr_interval: local steps between measurements of the nodes' correlation; None: never.
        eval_iters: batches per evaluation.
        eval_interval: local steps between evaluations.
        save_dir: a folder for checkpoints, STEP.pt, with the averaged model's `state_dict`; None: none are written.
        num_epochs: passes over the data.
        p_sparta: the probability that a parameter is averaged in a sparse exchange; 0: no such exchanges.
        sparta_interval: local steps between sparse exchanges.
        cosine_anneal: decay the inner learning rate along a cosine to 10 %.
        warmup_steps: local steps of linear warm-up from 0.
        model_path: a checkpoint to start from; see `DilocoSimulator.load_model`.
        num_nodes: K.
        diloco_interval: local steps between outer steps.
        outer_optimizer_cls, outer_optimizer_kwargs: the outer optimizer.
        max_local_step: the most local steps, however many `num_epochs` would give.
        wandb_project, wandb_name: log to Weights & Biases.
        max_minibatch_size: the most examples in one pass; gradients are accumulated over the parts of a batch.
        port: has no effect.
        devices: indices of GPUs; the first is used. An empty list: the CPU; None: the best device present.
        max_norm: clip each node's gradient to this 2-norm.
        async_sparta_delay: how many sparse exchanges later the averaged values are written.
        train_loss_hook: called with `TrainStats` after each local step.
        eval_loss_hook: called with `EvalStats` after each evaluation, for the nodes' own models, then their average.
        seed: of data order, masks and dropout. Not in the original.
        progress: show a progress bar. Not in the original.

    Raises:
        TypeError, ValueError: for arguments that cannot work.

    >>> config = DilocoSimulatorConfig(
    ...     model_cls=nn.Linear, model_kwargs={"in_features": 2, "out_features": 1}, loss_fn=nn.functional.mse_loss,
    ...     train_dataset=torch.utils.data.TensorDataset(torch.zeros(64, 2), torch.zeros(64, 1)), num_nodes=2,
    ... )
    >>> config.num_local_steps  # 64 examples, 2 * 16 at a time
    2
    >>> config.strategy().inner_optim
    OptimSpec(AdamW, lr=0.001)
    """

    model_cls: Annotated[type[nn.Module], _model_class]
    model_kwargs: Keywords = field(default_factory=dict)
    loss_fn: Function = None  # this and train_dataset are needed, in the original's order
    train_dataset: Annotated[Any, _sized] = None
    optimizer_kwargs: Keywords = field(default_factory=lambda: {"lr": 0.001})
    optimizer_cls: type[torch.optim.Optimizer] = torch.optim.AdamW
    batch_size: Count = 16
    eval_dataset: Any = None
    ckpt_interval: CountOr0 = None
    corr_interval: CountOr0 = None
    eval_iters: Count = 50
    eval_interval: Count = 1000
    save_dir: Path = None
    num_epochs: Count = 1
    p_sparta: Annotated[float, partial(check.number, within="[0, 1]")] = 0.0
    sparta_interval: Count = 1
    cosine_anneal: Flag = False
    warmup_steps: CountFrom0 = 0
    model_path: Path = None
    num_nodes: Count = 4
    diloco_interval: Count = 500
    outer_optimizer_cls: type[torch.optim.Optimizer] = torch.optim.SGD
    outer_optimizer_kwargs: Keywords = field(default_factory=lambda: {"lr": 0.7, "nesterov": True, "momentum": 0.9})
    max_local_step: CountOr0 = None
    wandb_project: str | None = None
    max_minibatch_size: CountOr0 = None
    port: CountFrom0 = PORT
    devices: Annotated[list[int] | None, _indices] = None
    max_norm: MaxNorm = None
    async_sparta_delay: CountFrom0 = 0
    wandb_name: str | None = None
    train_loss_hook: Annotated[Callable[[TrainStats], None] | None, _hook] = None
    eval_loss_hook: Annotated[Callable[[EvalStats], None] | None, _hook] = None
    seed: Annotated[int, check.seed] = 0
    progress: Flag = True

    def __post_init__(self) -> None:
        own: Any = type(self)
        for name, passed in checks_of(own).items():
            setattr(self, name, passed(name, getattr(self, name)))
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
        """The local steps of the run: num_epochs * examples // (batch_size * num_nodes), at most `max_local_step`."""
        steps = self.num_epochs * len(self.train_dataset) // (self.batch_size * self.num_nodes)
        return steps if self.max_local_step is None else min(steps, self.max_local_step)

    def strategy(self) -> CommunicateOptimizeStrategy:
        """The strategy that these arguments describe."""
        every, delay = self.sparta_interval, self.async_sparta_delay * self.sparta_interval
        outer_optim = OptimSpec(self.outer_optimizer_cls, **self.outer_optimizer_kwargs)
        modules: list[CommunicationModule] = []
        if self.p_sparta > 0:
            sparse = SparseCommunicator(RandomSelector(self.p_sparta), interval=every, delay=delay)
            modules.append(BeforeSteps(sparse, "sparta_interval", every))
        outer = DiLoCoCommunicator(outer_optim, H=self.diloco_interval)
        modules.append(BeforeSteps(outer, "diloco_interval", self.diloco_interval))
        return CommunicateOptimizeStrategy(
            modules, OptimSpec(self.optimizer_cls, **self.optimizer_kwargs), max_norm=self.max_norm,
            warmup_steps=self.warmup_steps, cosine_anneal=self.cosine_anneal,
        )  # fmt: skip
