"""diloco-sim's interface: `DilocoSimulator(config).train()`, for scripts written for github MattBeton/diloco-sim.

`install()` lets an unmodified script `from diloco_sim import DilocoSimulator, DilocoSimulatorConfig`.

Timing is the original's. Before each local step but the first, in this order: SPARTA every `sparta_interval` steps,
the outer step every `diloco_interval`, evaluation every `eval_interval` (also before the first), a checkpoint every
`ckpt_interval` outer steps. Nothing is exchanged after the last step. Where its document and its code differ, the
document holds. What the code does, and what this does:

| diloco-sim | here |
|---|---|
| the outer optimizer is given no gradients, so that the nodes' mean is all that happens (FedAvg) | the outer step; \
`outer_optimizer_kwargs={"lr": 1.0}` gives the mean |
| the delayed values of SPARTA go through one queue for all tensors, and land in others | one queue per tensor |
| masks and initial models are drawn without the script's seed, which the processes never see; dropout is the same on \
all nodes | one `seed`; the model is built in the script's process, so that `torch.manual_seed` counts |
| every epoch has the same order; what does not divide by the nodes is dropped | a new order in each, the first one \
that of the original; the last examples are shared out by repetition |
| `max_minibatch_size`: gradients of the parts are added, so that the step grows; the last part's loss is reported | \
their mean; the largest divisor of `batch_size` up to it |
| `eval_iters` are examples (400), shuffled anew | batches (50), the same examples each time |
| node 1 evaluates the average on training batches, and uses them up; without `eval_dataset` node 0 too | both on \
`eval_dataset`, or without it on the first training examples, which stay there |
| losses reported are those of node 0 | means over the nodes |
| `cosine_anneal` needs `max_local_step` | anneals over the steps of the run |
| `ckpt_interval` counts local steps; files need wandb, one per node: SAVE_DIR/PROJECT/RUN/NODE/STEP.pt | outer steps; \
the average: SAVE_DIR/STEP.pt |
| `load_model` fails; `model_path` is not read | the nodes start from that file |
| `corr_interval` needs `save_dir`, and tells only wandb | column "correlation" of `history` |
| wandb is needed, and every node starts a run | only with `wandb_project`; one run |
| `train_loss_hook`, `eval_loss_hook` are in the document only | called, in the script's process |
| `devices`: the nodes' GPUs in turn; `port` | the first of `devices`; no port: other values warn |
"""

from __future__ import annotations

import math
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vecgym.collectives.ledger import Ledger
from vecgym.core import check, nodes
from vecgym.core.errors import warn
from vecgym.core.files import is_regular, write_atomically
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec
from vecgym.records.history import History
from vecgym.records.loggers import WandbLogger
from vecgym.runs.trainer import Trainer
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
        modules = [_BeforeSteps(sparse, "sparta_interval", self.sparta_interval)] if self.p_sparta > 0 else []
        return CommunicateOptimizeStrategy(
            [*modules, _BeforeSteps(outer, "diloco_interval", self.diloco_interval)],
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


class DilocoSimulator:
    """Train one model on K nodes with DiLoCo, SPARTA or both, as diloco-sim does.

    Args:
        config: a `DilocoSimulatorConfig`; or its arguments as keywords.

    Attributes:
        config: the arguments.
        max_local_step: local steps of the run.
        local_step: those done.
        master_model: the model: the average of the nodes after `train`, what they start from before.
        history, ledger, trainer: of the run; see `vecgym.Trainer`.

    Raises:
        TypeError: for an unknown keyword, and for a subclass that overrides what only the original has.

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
            config = DilocoSimulatorConfig(**_known(arguments))
        elif arguments:
            raise TypeError(f"give a config or keywords, not both: {', '.join(arguments)} can be in the config.")
        if not isinstance(config, DilocoSimulatorConfig):
            raise TypeError(
                f"config is {check.kind_of(config)}; give a DilocoSimulatorConfig, or its arguments as keywords."
            )
        self.config = replace(config)  # checked once more: its fields may have been set
        self.max_local_step = config.num_local_steps
        self.local_step = 0
        self.master_model = config.model_cls(**config.model_kwargs)
        self.trainer: Trainer | None = None
        _warn_without_effect(config)
        if config.model_path is not None:
            self.load_model(config.model_path)

    def load_model(self, path: str | os.PathLike[str]) -> None:
        """Start from a checkpoint: a file with the `state_dict` of the model. To be called before `train`.

        Raises:
            FileNotFoundError: where there is no such file.
            ValueError: for a damaged file, or one of another model, naming it.

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
        self.trainer = _Trainer(self, model, config.train_dataset, evaluated)
        averaged: Any = self.trainer.fit(
            config.strategy(),
            config.num_nodes,
            max_steps=self.max_local_step,
            batch_size=config.batch_size,
            minibatch_size=_minibatch_size(config),
            val_size=config.eval_iters * config.batch_size,
            val_interval=config.eval_interval,
            correlation_interval=config.corr_interval,
            seed=config.seed,
            device=_device(config.devices),
            logger=_logger(config),
            progress=config.progress,
        )
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
            raise AttributeError("this is there once train() has begun.")
        return self.trainer

    def _after_step(self, row: dict[str, Any], average: Callable[[], nn.Module]) -> None:
        """What the original does between two local steps, besides exchanging; `row` 0 is before the first."""
        config, self.local_step = self.config, row["step"]
        if "train_loss" in row and config.train_loss_hook is not None:
            config.train_loss_hook(TrainStats(row["train_loss"], _exp(row["train_loss"])))
        if self.local_step == self.max_local_step:
            return
        if "val_loss" in row and config.eval_loss_hook is not None:
            config.eval_loss_hook(EvalStats(row["val_loss_local"], _exp(row["val_loss_local"]), glob=False))
            if config.num_nodes > 1:
                config.eval_loss_hook(EvalStats(row["val_loss"], _exp(row["val_loss"]), glob=True))
        between = (config.ckpt_interval or 0) * config.diloco_interval
        if between and self.local_step > 0 and self.local_step % between == 0:
            self._save(average())

    def _save(self, model: nn.Module) -> None:
        """Write its `state_dict`; the file appears whole or not at all."""
        assert self.config.save_dir is not None
        with write_atomically(Path(self.config.save_dir) / f"{self.local_step}.pt") as file:
            torch.save(model.state_dict(), file)


def install() -> None:
    """Let `import diloco_sim` find this module, in this process.

    Raises:
        ImportError: if another diloco_sim is imported already.

    >>> install()
    >>> from diloco_sim import DilocoSimulator as found
    >>> found is DilocoSimulator
    True
    """
    present = sys.modules.get("diloco_sim")
    if present is not None and getattr(present, "DilocoSimulator", None) is not DilocoSimulator:
        raise ImportError("diloco_sim is imported already: call install() before anything imports it.")
    package = types.ModuleType("diloco_sim", __doc__)
    package.__path__ = []  # a package, of the modules that the original has
    for name, members in _MODULES.items():
        module = package if name == "" else types.ModuleType(f"diloco_sim.{name}")
        for member in members:
            setattr(module, member.__name__, member)
        sys.modules[module.__name__] = module
        if name:
            setattr(package, name, module)


_MODULES: dict[str, tuple[type, ...]] = {
    "": (DilocoSimulator, DilocoSimulatorConfig),
    "diloco": (DilocoSimulator, DilocoSimulatorConfig, TrainStats),
    "config": (DilocoSimulatorConfig,),
    "eval": (EvalStats,),
}


# --------------------------------------------------------------------------------------------------- underneath


class _BeforeSteps(CommunicationModule):
    """`module`, exchanging before a step instead of after the one before it: so before the first too, if it does at 0.

    The same, but for both ends of the run: nothing follows the last step, and what is exchanged before the first, on
    equal nodes, is written when its delay is over.
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
        return self.module.exchange_parameters(params, state, replace(ctx, step=-1))[1]

    def exchange_parameters(self, params: Tree, state: dict[str, Any], ctx: Context) -> tuple[Tree, dict[str, Any]]:
        if ctx.step + 1 == ctx.max_steps:
            return params, state
        return self.module.exchange_parameters(params, state, ctx)


class _WithLoss(nn.Module):
    """The model and `loss_fn` as vecgym wants a model: a batch in, its loss out."""

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


def _known(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments, if there is none that the configuration does not have."""
    check.keywords("DilocoSimulator", arguments, [f.name for f in fields(DilocoSimulatorConfig)])
    if "model_cls" not in arguments:
        raise TypeError("model_cls is missing: give a config, or model_cls=a subclass of nn.Module.")
    return arguments


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


def _logger(config: DilocoSimulatorConfig) -> WandbLogger | None:
    return WandbLogger(config.wandb_project, config.wandb_name) if config.wandb_project else None


def _exp(loss: float) -> float:
    """exp(loss), inf where a float cannot hold it."""
    return math.exp(loss) if not loss > 709 else math.inf
