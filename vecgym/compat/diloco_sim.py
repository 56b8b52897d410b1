"""Run scripts written for diloco-sim (github.com/MattBeton/diloco-sim): `DilocoSimulator(config).train()`.

After `install()`, an unmodified script can `from diloco_sim import DilocoSimulator, DilocoSimulatorConfig`.

Timing is the original's. Before each local step except the first, in this order: SPARTA every `sparta_interval` steps,
the outer step every `diloco_interval`, evaluation every `eval_interval` (also before the first), a checkpoint every
`ckpt_interval` outer steps. Nothing is exchanged after the last step. Where the original's documentation and code
differ, this follows the documentation. The differences from its code:

| diloco-sim | here |
|---|---|
| the outer optimizer gets no gradients, so only the nodes' mean is taken (FedAvg) | the outer step; \
`outer_optimizer_kwargs={"lr": 1.0}` gives the mean |
| SPARTA's delayed values go through one queue for all tensors, and end up in the wrong ones | one queue per tensor |
| masks and initial models are drawn without the script's seed, which the processes never see; dropout is the same on \
all nodes | one `seed`; the model is built in the script's process, where `torch.manual_seed` has an effect |
| every epoch has the same order; examples left over when dealing to the nodes are dropped | a new order in each \
epoch, the first one that of the original; some examples are repeated so that all nodes have equally many |
| `max_minibatch_size`: gradients of the parts are summed, which enlarges the step; the last part's loss is \
reported | their mean; the largest divisor of `batch_size` up to it |
| `eval_iters` are examples (400), reshuffled | batches (50), the same examples each time |
| node 1 evaluates the average on training batches, which are then lost to training; without `eval_dataset` so does \
node 0 | both on `eval_dataset`, or without it on the first training examples, which are still trained on |
| the reported losses are those of node 0 | means over the nodes |
| `cosine_anneal` needs `max_local_step` | anneals over the steps of the run |
| `ckpt_interval` counts local steps; files need wandb, one per node: SAVE_DIR/PROJECT/RUN/NODE/STEP.pt | outer steps; \
the average: SAVE_DIR/STEP.pt |
| `load_model` fails; `model_path` is not read | the nodes start from that file |
| `corr_interval` needs `save_dir`, and logs only to wandb | column "correlation" of `history` |
| wandb is required, and every node starts a run | only with `wandb_project`; one run |
| `train_loss_hook` and `eval_loss_hook` are only documented | called, in the script's process |
| `devices`: the nodes' GPUs in turn; `port` | the first of `devices`; no port: other values warn |
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from vecgym import compat
from vecgym import strategy as native
from vecgym.compat import perplexity
from vecgym.core import check
from vecgym.core.check import checks_of
from vecgym.core.errors import warn
from vecgym.core.files import write_atomically
from vecgym.data.checks import size_of
from vecgym.logger import WandbLogger
from vecgym.optim import OptimSpec
from vecgym.runs.options import Count, Flag, OptionalCount, Seed, optional_number
from vecgym.runs.trainer import Trainer
from vecgym.simulation.simulation import Part
from vecgym.simulation.timetable import Due, Event, Lockstep, RunFacts, Timetable

__all__ = ["DilocoSimulator", "DilocoSimulatorConfig", "EvalStats", "TrainStats", "install"]

PORT = 12355  # the original's default


@dataclass(frozen=True)
class TrainStats:
    """The argument of `train_loss_hook` after a local step: the mean of the nodes' losses, and its exp.

    >>> TrainStats(loss=0.0, perplexity=1.0)
    TrainStats(loss=0.0, perplexity=1.0)
    """

    loss: float
    perplexity: float


@dataclass(frozen=True)
class EvalStats:
    """The argument of `eval_loss_hook`: with `glob` the loss of the nodes' average, else the mean of their own losses.

    >>> EvalStats(loss=0.0, perplexity=1.0, glob=True).glob
    True
    """

    loss: float
    perplexity: float
    glob: bool


Keywords = Annotated[dict[str, Any], partial(check.instance, kind=dict, give="a dict of keyword arguments")]
CountFrom0 = Annotated[int, partial(check.integer, least=0)]
MaxNorm = Annotated[float | None, partial(optional_number, within="(0, inf]", what="the norm of a node's gradient")]
File = Annotated[str | os.PathLike[str] | None, lambda name, value: value if value is None else check.path(name, value)]

# Arguments for which 0 means None, as in the original.
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
        model_cls: a subclass of `nn.Module` that maps a batch of inputs x to the first argument of `loss_fn`.
        model_kwargs: the arguments of `model_cls`.
        loss_fn: (output, y) -> scalar mean loss of the batch.
        train_dataset: a dataset of (x, y).
        optimizer_kwargs: the inner optimizer's arguments.
        optimizer_cls: the inner optimizer.
        batch_size: examples per node and local step.
        eval_dataset: a dataset of (x, y); None: the first training examples.
        ckpt_interval: outer steps between checkpoints; the last one is always written at the end.
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
        max_local_step: the maximum number of local steps, even if `num_epochs` has more.
        wandb_project, wandb_name: log to Weights & Biases.
        max_minibatch_size: the maximum number of examples per pass; gradients are accumulated over a batch.
        port: has no effect.
        devices: indices of GPUs; the first is used. An empty list: the CPU; None: the best available device.
        max_norm: clip each node's gradient to this 2-norm.
        async_sparta_delay: the number of sparse exchanges after which the averaged values are written.
        train_loss_hook: called with `TrainStats` after each local step.
        eval_loss_hook: called with `EvalStats` after each evaluation, for the nodes' own models, then their average.
        seed: the seed of data order, masks and dropout. Not in the original.
        progress: show a progress bar. Not in the original.

    Raises:
        TypeError, ValueError: for invalid arguments.

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
    loss_fn: Callable[..., Tensor] | None = None  # this and train_dataset are required, in the original's order
    train_dataset: Any = None
    optimizer_kwargs: Keywords = field(default_factory=lambda: {"lr": 0.001})
    optimizer_cls: type[torch.optim.Optimizer] = torch.optim.AdamW
    batch_size: Count = 16
    eval_dataset: Any = None
    ckpt_interval: OptionalCount = None
    corr_interval: OptionalCount = None
    eval_iters: Count = 50
    eval_interval: Count = 1000
    save_dir: File = None
    num_epochs: Count = 1
    p_sparta: Annotated[float, partial(check.number, within="[0, 1]")] = 0.0
    sparta_interval: Count = 1
    cosine_anneal: Flag = False
    warmup_steps: CountFrom0 = 0
    model_path: File = None
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
        cls: Any = type(self)
        for name, checked in checks_of(cls).items():
            setattr(self, name, checked(name, getattr(self, name)))
        if self.ckpt_interval is not None and self.save_dir is None:
            raise ValueError(f"ckpt_interval={self.ckpt_interval} needs a directory: give save_dir='checkpoints'.")
        if self.num_local_steps < 1:
            raise ValueError(
                f"train_dataset has {len(self.train_dataset)} examples, too few for one step of num_nodes="
                f"{self.num_nodes} with batch_size={self.batch_size}: use fewer nodes, or smaller batches."
            )
        self.strategy()  # makes further checks, for example of the optimizers

    def _check_task(self) -> None:
        """Raise a TypeError unless the model, dataset, functions and list of GPUs are valid."""
        if not (isinstance(self.model_cls, type) and issubclass(self.model_cls, nn.Module)):
            kind = check.kind_of(self.model_cls)
            raise TypeError(f"model_cls is {kind}; give a subclass of nn.Module, not an instance of one.")
        size_of("train_dataset", self.train_dataset, "give a dataset of (x, y).")
        for name, signature in FUNCTIONS.items():
            value = getattr(self, name)
            if not callable(value) and (value is not None or name == "loss_fn"):
                raise TypeError(f"{name}={value!r}: give a function {signature}.")
        if self.devices is not None:
            for index in check.instance("devices", self.devices, (list, tuple), "a list of GPUs' indices"):
                check.integer("devices", index, 0)

    @property
    def num_local_steps(self) -> int:
        """The local steps of the run: num_epochs * examples // (batch_size * num_nodes), at most `max_local_step`."""
        steps = self.num_epochs * len(self.train_dataset) // (self.batch_size * self.num_nodes)
        return steps if self.max_local_step is None else min(steps, self.max_local_step)

    def strategy(self) -> native.Strategy:
        """Return the strategy that these arguments describe."""
        rounds = native.Rounds(self.diloco_interval, name="diloco_interval")
        often = native.Rounds(self.sparta_interval, name="sparta_interval")
        delay = self.async_sparta_delay * self.sparta_interval
        outer_optim = OptimSpec(self.outer_optimizer_cls, **self.outer_optimizer_kwargs)
        outer = native.Exchange(native.Outer(native.Mean(), outer_optim), rounds)
        sparse = native.Sparse(native.RandomSelector(self.p_sparta), native.Mean())
        exchanges = [native.Exchange(sparse, often, delay=delay), outer] if self.p_sparta > 0 else [outer]
        return BeforeStepsStrategy(
            OptimSpec(self.optimizer_cls, **self.optimizer_kwargs), exchanges, max_norm=self.max_norm,
            warmup_steps=self.warmup_steps, cosine_anneal=self.cosine_anneal,
        )  # fmt: skip


class BeforeStepsStrategy(native.Strategy):
    """A strategy that exchanges before each step, not after the previous one.

    This differs only at the start and end of a run: nothing follows the last step; and the first sparse exchange is
    before the first step, when all nodes are equal. Its values are written after their delay.
    """

    def timetable(self, run: RunFacts) -> Timetable:
        return _FromBeforeTheFirst(run, *self.marks(run))

    def before_first(self, part: Part) -> None:
        """Exchange what is equal on all nodes, to be written after the delay; without one they keep what they have."""
        params, sparse = part.params, self.exchanges[0]
        part.params = {name: p[:1] for name, p in params.items()}  # whose mean is exact
        (sparse.agree if sparse.delivery.delay else sparse.meet)(part)
        part.params = params


class _FromBeforeTheFirst(Lockstep):
    """A timetable whose sparse exchanges, if there are any, begin before the first step; after the last comes none."""

    first = -1

    def events(self, step: int) -> list[Event]:
        training, *exchanges = super().events(step)
        is_sparse = len(self.marks) > 1
        begin = [Event("before_first", info=Due(-1, -1, self.marks[0].of))] if step == 0 and is_sparse else []
        return [*begin, training, *([] if step == self.length - 1 else exchanges)]


class DilocoSimulator(Trainer[nn.Module]):
    """Train one model on K nodes with DiLoCo, SPARTA or both, as diloco-sim does. It is a `vecgym.Trainer`.

    Args:
        config: a `DilocoSimulatorConfig`, or its arguments as keywords.

    Attributes:
        config: the arguments.
        max_local_step: the local steps of the run.
        local_step: the number of local steps done.
        master_model: the nodes' initial model; after `train`, their average.
        history, ledger, nodes, state: those of the run; see `vecgym.Trainer`.

    Raises:
        TypeError: for an unknown keyword, or if a subclass overrides a method that only the original has.

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
    >>> simulator.local_step, [entry.step for entry in simulator.trainer.ledger], simulator.history["lr"][-1]
    (20, [4, 9, 14], 0.1)
    """

    def __init__(self, config: DilocoSimulatorConfig | None = None, **arguments: Any) -> None:
        for name in ("_train", "_train_loop", "_train_step", "_outer_step", "_get_batch", "_evaluate", "_eval_model"):
            if hasattr(self, name):
                raise TypeError(
                    f"{type(self).__name__}.{name} would never be called: vecgym trains all nodes at once. "
                    "Use train_loss_hook and eval_loss_hook, or a strategy of vecgym."
                )
        if config is None:
            check.keywords("DilocoSimulator", arguments, [f.name for f in fields(DilocoSimulatorConfig)])
            if "model_cls" not in arguments:
                raise TypeError("model_cls is missing: give a config, or model_cls=a subclass of nn.Module.")
            config = DilocoSimulatorConfig(**arguments)
        elif arguments:
            raise TypeError(f"give a config or keywords, not both: {', '.join(arguments)} can be set in the config.")
        give = "a DilocoSimulatorConfig, or its arguments as keywords"
        check.instance("config", config, DilocoSimulatorConfig, give)
        self.config = replace(config)  # check again: its fields may have been set
        self.max_local_step = config.num_local_steps
        self.local_step = 0
        self.master_model = config.model_cls(**config.model_kwargs)
        evaluated = config.train_dataset if config.eval_dataset is None else config.eval_dataset
        loss_fn: Any = partial(_loss, config.loss_fn)
        loss_fn.loss_metrics = {"perplexity": torch.exp}
        super().__init__(self.master_model, config.train_dataset, evaluated, loss_fn=loss_fn)
        _warn_without_effect(config)
        if config.model_path is not None:
            self.load_model(config.model_path)

    def load_model(self, path: str | os.PathLike[str]) -> None:
        """Start from a checkpoint, a file with the model's `state_dict`. Call this before `train`.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if the file is damaged or of another model; the message names it.

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
        if not os.path.isfile(file):
            raise ValueError(f"{file} is not a file, but a folder, a pipe, a socket or a device.")
        try:
            self.master_model.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        except Exception as error:  # damage raises many kinds of errors
            reason = " ".join(str(error).split())[:400] or type(error).__name__
            raise ValueError(f"{file} is damaged, or holds no state_dict of this model: {reason}") from error

    def train(self) -> nn.Module:
        """Train, and return the nodes' average (the original returns nothing)."""
        config = self.config
        for name in ("diloco_interval", "sparta_interval") if config.p_sparta > 0 else ("diloco_interval",):
            if getattr(config, name) == self.max_local_step:  # the exchange itself warns of a longer one
                warn(f"{name}={getattr(config, name)} in a run of {self.max_local_step} steps: nothing is exchanged.")
        self.model = self.master_model
        device = None if config.devices is None else "cpu"
        if config.devices and torch.cuda.is_available():
            device = f"cuda:{config.devices[0]}"
        logger = WandbLogger(config.wandb_project, config.wandb_name) if config.wandb_project else None
        self.master_model = self.fit(
            config.strategy(), config.num_nodes, max_steps=self.max_local_step, batch_size=config.batch_size,
            minibatch_size=_minibatch_size(config), val_size=config.eval_iters * config.batch_size,
            val_interval=config.eval_interval, correlation_interval=config.corr_interval, seed=config.seed,
            device=device, logger=logger, progress=config.progress,
        )  # fmt: skip
        self._save(self.master_model)
        return self.master_model

    @property
    def trainer(self) -> DilocoSimulator:
        """The simulator itself, a `vecgym.Trainer`."""
        return self

    def after_step(self, row: dict[str, Any]) -> None:
        """Call hooks and save checkpoints between local steps, as in the original; row 0 is before the first step."""
        config, self.local_step = self.config, row["step"]
        if "train_loss" in row and config.train_loss_hook is not None:
            config.train_loss_hook(TrainStats(row["train_loss"], perplexity(row["train_loss"])))
        if self.local_step == self.max_local_step:
            return
        if "val_loss" in row and config.eval_loss_hook is not None:
            local, average = row["val_loss_local"], row["val_loss"]
            config.eval_loss_hook(EvalStats(local, perplexity(local), glob=False))
            if config.num_nodes > 1:
                config.eval_loss_hook(EvalStats(average, perplexity(average), glob=True))
        interval = (config.ckpt_interval or 0) * config.diloco_interval
        if interval and self.local_step > 0 and self.local_step % interval == 0:
            run: Any = self.run
            self._save(run.average())

    def _save(self, model: nn.Module) -> None:
        """Save the `state_dict` if there is a folder for it; the file appears complete or not at all."""
        if self.config.save_dir is not None:
            with write_atomically(Path(self.config.save_dir) / f"{self.local_step}.pt") as file:
                torch.save(model.state_dict(), file)


def _loss(loss_fn: Any, model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return loss_fn(model(x), y)


def _warn_without_effect(config: DilocoSimulatorConfig) -> None:
    if config.port != PORT:
        warn(f"port={config.port} has no effect: all nodes are in this process.")
    if config.devices is not None and len(config.devices) > 1:
        warn(f"devices={config.devices}: all nodes use the first one.")
    for name, default in (("sparta_interval", 1), ("async_sparta_delay", 0)):
        if config.p_sparta == 0 and getattr(config, name) != default:
            warn(f"{name}={getattr(config, name)} has no effect without p_sparta: give p_sparta=0.005.")


def _minibatch_size(config: DilocoSimulatorConfig) -> int | None:
    limit = config.max_minibatch_size
    if limit is None or limit >= config.batch_size:
        return None
    return max(n for n in range(1, limit + 1) if config.batch_size % n == 0)


# The modules of the original, and the names in them.
_MODULES: dict[str, tuple[type, ...]] = {
    "diloco_sim": (DilocoSimulator, DilocoSimulatorConfig),
    "diloco_sim.diloco": (DilocoSimulator, DilocoSimulatorConfig, TrainStats),
    "diloco_sim.config": (DilocoSimulatorConfig,),
    "diloco_sim.eval": (EvalStats,),
}


def install() -> None:
    """Make `import diloco_sim` find vecgym's classes in this process.

    Warns if a real diloco_sim is installed, which is then hidden.

    Raises:
        ImportError: if another diloco_sim has already been imported.

    >>> install()
    >>> from diloco_sim import DilocoSimulator as imported
    >>> imported is DilocoSimulator
    True
    """
    compat.install({path: {cls.__name__: cls for cls in classes} for path, classes in _MODULES.items()})
