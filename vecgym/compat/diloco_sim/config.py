"""diloco-sim's arguments, whose types say how each is checked, what its hooks are given, and when it exchanges."""

from __future__ import annotations

import os
from collections.abc import Callable, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from vecgym.core import check
from vecgym.core.errors import warn
from vecgym.core.options import checks_of
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec
from vecgym.runs.options import Count, Flag, OptionalCount, Seed, optional_number
from vecgym.strategy import (
    CommunicateOptimizeStrategy,
    CommunicationModule,
    Context,
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


Keywords = Annotated[dict[str, Any], partial(check.instance, kind=dict, give="a dict of keyword arguments")]
CountFrom0 = Annotated[int, partial(check.integer, least=0)]
MaxNorm = Annotated[float | None, partial(optional_number, within="(0, inf]", what="the norm of a node's gradient")]
Path = Annotated[str | os.PathLike[str] | None, lambda name, value: value if value is None else check.path(name, value)]

# What may be None, where 0 means None, as in the original.
OR_0 = ("ckpt_interval", "corr_interval", "max_local_step", "max_minibatch_size", "max_norm")
FUNCTIONS = {
    "loss_fn": "(output, y) -> loss, such as F.cross_entropy",
    "train_loss_hook": "of one argument, a TrainStats, or None",
    "eval_loss_hook": "of one argument, an EvalStats, or None",
}


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

    model_cls: type[nn.Module]
    model_kwargs: Keywords = field(default_factory=dict)
    loss_fn: Callable[..., Tensor] | None = None  # this and train_dataset are needed, in the original's order
    train_dataset: Any = None
    optimizer_kwargs: Keywords = field(default_factory=lambda: {"lr": 0.001})
    optimizer_cls: type[torch.optim.Optimizer] = torch.optim.AdamW
    batch_size: Count = 16
    eval_dataset: Any = None
    ckpt_interval: OptionalCount = None
    corr_interval: OptionalCount = None
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
    max_local_step: OptionalCount = None
    wandb_project: str | None = None
    max_minibatch_size: OptionalCount = None
    port: CountFrom0 = PORT
    devices: list[int] | None = None
    max_norm: MaxNorm = None
    async_sparta_delay: CountFrom0 = 0
    wandb_name: str | None = None
    train_loss_hook: Callable[[TrainStats], None] | None = None
    eval_loss_hook: Callable[[EvalStats], None] | None = None
    seed: Seed = 0
    progress: Flag = True

    def __post_init__(self) -> None:
        self._check_task()
        for name in OR_0:
            if check.is_number(vars(self)[name]) and vars(self)[name] == 0:
                setattr(self, name, None)
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

    def _check_task(self) -> None:
        """Raise a TypeError for what is no model, dataset, function or list of GPUs."""
        if not (isinstance(self.model_cls, type) and issubclass(self.model_cls, nn.Module)):
            given = check.kind_of(self.model_cls)
            raise TypeError(f"model_cls is {given}; give a subclass of nn.Module, not an object of it.")
        if not isinstance(self.train_dataset, Sized):
            given = "missing" if self.train_dataset is None else f"{check.kind_of(self.train_dataset)}, without length"
            raise TypeError(f"train_dataset is {given}: give a dataset of (x, y).")
        for name, what in FUNCTIONS.items():
            value = getattr(self, name)
            if not callable(value) and (value is not None or name == "loss_fn"):
                raise TypeError(f"{name}={value!r}: give a function {what}.")
        if self.devices is not None:
            for index in check.instance("devices", self.devices, (list, tuple), "a list of GPUs' indices"):
                check.integer("devices", index, 0)

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


class BeforeSteps(CommunicationModule):
    """Exchange before each step, not after the one before it.

    This differs only at the two ends of a run: nothing follows the last step, and sparse values that are exchanged
    before the first, when all nodes are equal, are written when their delay is over.
    """

    def __init__(self, module: CommunicationModule, name: str, interval: int) -> None:
        self.module = module
        self._interval = (name, interval)

    def check(self, num_nodes: int, max_steps: int) -> None:
        name, interval = self._interval
        if interval >= max_steps:
            warn(f"{name}={interval} in a run of {max_steps} steps: it never exchanges anything.")
        else:
            self.module.check(num_nodes, max_steps - 1)

    def init(self, params: Tree, ctx: Context) -> dict[str, Any]:
        state = self.module.init(params, ctx)
        if not isinstance(self.module, SparseCommunicator):
            return state  # the outer step needs a local one before it
        return self.module.exchange_parameters(params, state, ctx.replace(step=-1))[1]

    def exchange_parameters(self, params: Tree, state: dict[str, Any], ctx: Context) -> tuple[Tree, dict[str, Any]]:
        if ctx.step + 1 == ctx.max_steps:
            return params, state
        return self.module.exchange_parameters(params, state, ctx)
