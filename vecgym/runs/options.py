"""The options of a run, defined once: types, defaults, checks and documentation.

`Trainer.fit` takes them by name. An option's check is part of its type.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from vecgym import strategy as strategies
from vecgym.availability import Availability, Facts, Presence, as_availability
from vecgym.clock import Compute, Network
from vecgym.collectives.distributed import check_divides
from vecgym.core import check, tree
from vecgym.core.check import Options
from vecgym.core.nodes import LOSS_FN
from vecgym.core.objects import Settings, public, reachable
from vecgym.core.tree import Tree, differentiated
from vecgym.engine import Engine, EngineName
from vecgym.engine.contract import with_loss
from vecgym.engine.plan import check_engine, check_settings
from vecgym.logger import Logger, as_loggers
from vecgym.optim import OptimSpec
from vecgym.strategy import Strategy
from vecgym.strategy.base import StepOptions
from vecgym.strategy.per_rank import as_strategy


def check_strategy(strategy: Any, num_nodes: Any = None) -> None:
    """Raise a TypeError for anything but a strategy, and suggest what the user may have meant.

    >>> check_strategy("diloco")
    Traceback (most recent call last):
    ...
    TypeError: strategy='diloco' is of type str; did you mean DiLoCoStrategy()? Give a Strategy object such as \
DiLoCoStrategy('adamw', H=100).
    """
    if isinstance(strategy, Strategy):
        return
    problem, fix = f"strategy is {check.kind_of(strategy)}", "."
    if isinstance(num_nodes, Strategy):
        fix = " and num_nodes is a Strategy: swap them, fit(strategy, num_nodes)."
    elif isinstance(strategy, type) and issubclass(strategy, Strategy):
        fix = f"; did you mean an object of it, {strategy.__name__}()?"
    elif isinstance(strategy, str):
        names = [name.removesuffix("Strategy") for name in strategies.__all__ if name.endswith("Strategy")]
        close = check.closest(strategy, names)
        problem = f"strategy={strategy!r} is of type str"
        fix = f"; did you mean {close}Strategy()?" if close else "."
    raise TypeError(f"{problem}{fix} Give a Strategy object such as DiLoCoStrategy('adamw', H=100).")


def check_constant(strategy: Strategy) -> None:
    """Raise a ValueError if a setting of an optimizer requires grad.

    >>> check_constant(strategies.AllReduceStrategy("sgd", lr=0.1))
    """
    for spec in reachable(strategy):
        for name, value in spec.kwargs.items() if isinstance(spec, OptimSpec) else ():
            if any(map(differentiated, tree.leaves(value))):
                raise ValueError(
                    f"{name} of {spec} requires grad, and fit() has no derivatives: give {name}.detach(), or "
                    "differentiate vecgym.rollout(model, strategy, batches, ...)."
                )


def check_parts(batch_size: int, parts: int | None, name: str = "minibatch_size") -> None:
    """Raise a ValueError unless `parts`, if it is given, divides the batch."""
    if parts is not None and batch_size % parts != 0:
        divisors = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
        raise ValueError(f"{name}={parts} must divide batch_size={batch_size}: one of {divisors}.")


def accumulated(batch_size: int, minibatch_size: int | None, gradient_accumulation: int | None) -> int | None:
    """Return the `minibatch_size` of a batch that is computed in `gradient_accumulation` equal parts.

    >>> accumulated(32, None, gradient_accumulation=4), accumulated(32, 16, gradient_accumulation=None)
    (8, 16)
    """
    if gradient_accumulation is None:
        return minibatch_size
    if minibatch_size is not None:
        raise ValueError(
            f"gradient_accumulation={gradient_accumulation} and minibatch_size={minibatch_size} both divide "
            "a batch: give one of them."
        )
    check_parts(batch_size, gradient_accumulation, "gradient_accumulation")
    return batch_size // gradient_accumulation


def check_compute(strategy: Strategy, compute: Any) -> None:
    """Raise a ValueError for an asynchronous strategy without `compute`.

    >>> from vecgym.clock import Compute
    >>> from vecgym.strategy import AsyncStrategy
    >>> check_compute(AsyncStrategy(), Compute(0.4))
    """
    if compute is None:
        raise ValueError(
            f"{type(strategy).__name__} needs compute=: which node meets which version of the server depends on how "
            "long each computes. Give compute=vecgym.clock.Compute([1.0, 2.0, ...]), the seconds of each node's step."
        )


def check_clocks(num_nodes: int, network: Any, compute: Any) -> None:
    """Raise an error unless the network and compute, if any, fit this number of nodes.

    >>> check_clocks(2, None, Compute([0.4, 0.5]))
    """
    if network is not None:
        check.instance("network", network, Network, "a vecgym.clock.Network, such as Network(1e9, 0.05)")
        network.check(num_nodes)
    if compute is not None:
        check.instance("compute", compute, Compute, "a vecgym.clock.Compute, such as Compute(0.4)")
        compute.check(num_nodes)


def check_left_out(strategy: Strategy, option: str, value: Any, default: Any) -> None:
    """Raise a ValueError for an option that this strategy does not support."""
    if value != default:
        raise ValueError(f"{type(strategy).__name__} does not support {option}={value!r} here: leave it out.")


def check_asynchronous(options: Any, only: Sequence[str], refused: Mapping[str, Any]) -> None:
    """Raise a ValueError for what an asynchronous run needs or does not support, or what only it supports.

    Args:
        only: the options that only it supports.
        refused: those that it does not support, with their defaults.
    """
    strategy = options.strategy
    if strategy.asynchronous:
        check_compute(strategy, options.compute)
        for option, default in refused.items():
            check_left_out(strategy, option, vars(options)[option], default)
    elif names := [option for option in only if vars(options)[option] is not None]:
        raise ValueError(
            f"{names[0]} is for asynchronous runs, and {type(strategy).__name__} is synchronous: leave it out (a "
            "synchronous fit has max_steps and val_interval), or give AsyncStrategy(...)."
        )


def checked_folder(name: str, value: Any) -> Path | None:
    """Return the folder as an absolute path, or None.

    >>> checked_folder("save_dir", None) is None
    True
    """
    if value is None:
        return None
    folder = check.path(name, value, "the path of a folder, or None").absolute()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{name}={str(value)!r} is a file; give a folder.")
    return folder


TIMEOUT_S = 600.0  # without any progress in any process
Backend = Literal["stacked", "processes", "distributed"]
OnDivergence = Literal["raise", "warn", "ignore"]


def resolve_device(device: str | torch.device | None) -> torch.device:
    """Return the device if it is present; for None cuda, else mps, else cpu.

    >>> resolve_device("cpu")
    device(type='cpu')
    """
    present = ["cpu"]
    if torch.backends.mps.is_available():
        present.insert(0, "mps")
    if torch.cuda.is_available():
        present.insert(0, "cuda")
    if device is None:
        return torch.device(present[0])
    with contextlib.suppress(RuntimeError, TypeError, ValueError):  # there is no such device
        resolved = torch.device(device)
        count = torch.cuda.device_count() if resolved.type == "cuda" else 1
        if resolved.type in present and (resolved.index or 0) < count:
            return resolved
    name = str(device) if isinstance(device, torch.device) else device
    raise ValueError(f"device={name!r} is not available; present: {', '.join(present)}. None takes the best.")


def optional_number(name: str, value: Any, within: str, what: str) -> float | None:
    """Return a number in an interval, or None."""
    return None if value is None else check.number(name, value, within, what)


# The type of an option, and the function `(name, value) -> value` that checks it.
Count = Annotated[int, check.integer]
OptionalCount = Annotated[int | None, check.optional_integer]
Chosen = Annotated[int | None, partial(check.optional_integer, what="None lets vecgym choose")]
Flag = Annotated[bool, check.flag]
Seed = Annotated[int, check.seed]
Seconds = Annotated[float, partial(check.number, within="(0, inf]", what="seconds")]
FRACTION = "the fraction of the device's memory that the run may use, such as 0.8"
Fraction = Annotated[float | None, partial(optional_number, within="(0, 1]", what=FRACTION)]
SimulatedSeconds = Annotated[float | None, partial(optional_number, within="(0, inf)", what="simulated seconds")]
MaxBytes = Annotated[float | None, partial(optional_number, within="(0, inf)", what="bytes that a node sends")]
FUNCTIONS: Any = (Callable, type(None))
OF_STOP = 'a function of a row: lambda row: row["train_loss"] < 2'
StopFunction = Annotated[Callable[[dict[str, Any]], Any] | None, partial(check.instance, kind=FUNCTIONS, give=OF_STOP)]
NumExamples = Annotated[
    int | None, partial(check.optional_integer, least=0, what="0 never evaluates, None uses all examples")
]
RESUMES, OF_RESUME = (bool, str, os.PathLike), "True, False, or the path of a checkpoint or a folder of them"
Device = Annotated[str | torch.device | None, lambda name, value: resolve_device(value)]
Present = Annotated[Availability | Callable[[int], Any] | None, as_availability]
OneOrMoreLoggers = Annotated[Logger | Sequence[Logger] | None, lambda name, value: as_loggers(value)]


# ------------------------------------------------------------------------------------------------------ the options


@dataclass(frozen=True)
class Modelled(Options):
    """A model that is given with its loss.

    Args:
        loss_fn: a function (module, batch) -> the mean loss, or a dict of it, as "loss", and metrics for validation:
            it replaces the model's `forward(batch)`, and `val_metrics`. None: the model returns its loss. A "weight" in
            the dict says of how many tokens, or other things, these are means: parts and batches count by it.
    """

    _: KW_ONLY
    loss_fn: Callable[[nn.Module, Any], Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.settle(model=with_loss(vars(self)["model"], self.loss_fn))


@dataclass(frozen=True)
class Simulated(Options):
    """The strategy and the nodes.

    Args:
        strategy: what the nodes do and exchange, e.g. `DiLoCoStrategy(H=100)`.
        num_nodes: K.
    """

    strategy: Strategy
    num_nodes: Count

    def __post_init__(self) -> None:
        check_strategy(self.strategy, self.num_nodes)
        check_constant(self.strategy)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class Training(Options):
    """The length of a run, its batches, and its evaluation.

    Args:
        num_epochs: passes over the data, unless `max_steps` is given.
        max_steps: optimizer steps; the data repeats as needed.
        batch_size: examples per node and step; a node that has fewer uses all of them. Each node's loss is the mean
            over its own examples. All nodes take equally many steps, except with `availability`, `local_steps`.
        minibatch_size: examples computed at a time, with gradients accumulated; must divide `batch_size`. The parts
            count by their examples, or by the "weight" that `loss_fn` returns.
        shuffle: a new order in each epoch.
        seed: of data order, dropout and everything else that is random.
        device: "cpu", "cuda" or "mps"; None: the best one present.
        val_size: validation examples; None: all; 0: never evaluate.
        val_interval: steps between evaluations, besides those at the start and the end; None: only those.
        dataloader_kwargs: for `torch.utils.data.DataLoader` (workers, collate_fn, drop_last ...).
        progress: show a progress bar.
    """

    num_epochs: Count = 1
    max_steps: OptionalCount = None
    batch_size: Count = 16
    minibatch_size: OptionalCount = None
    shuffle: Flag = True
    seed: Seed = 42
    device: Device = None
    val_size: NumExamples = None
    val_interval: OptionalCount = 100
    dataloader_kwargs: Mapping[str, Any] | None = None
    progress: Flag = True


@dataclass(frozen=True, kw_only=True)
class EngineOptions(Options):
    """The computation of the nodes.

    Args:
        engine: "auto", "vmap" or "loop"; see `vecgym.engine`. The choice is in `history.settings`.
        chunk_size: maximum number of nodes computed in one call, to bound memory.
        node_threads: CPU threads that share the nodes; None: chosen automatically.
        compile: compile the gradients of all nodes with `torch.compile`, which takes some seconds at the start:
            `history.settings["engine_reason"]` says how many, and after how many steps that pays off. A model that
            cannot be compiled runs uncompiled, with a warning that says why. With engine="auto" on a CPU, steps of less
            than 30 MFLOP keep the recorded list of their operations, if it is short, which is as fast.
    """

    engine: Annotated[EngineName, check_engine] = "auto"
    chunk_size: Chosen = None
    node_threads: Chosen = None
    compile: Flag = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self.engine, self.chunk_size, self.node_threads, self.compile)


@dataclass(frozen=True, kw_only=True)
class FitOptions(EngineOptions, Training, Simulated):
    """The arguments of `Trainer.fit`.

    Args:
        autocast: mixed precision in the forward passes.
        max_memory_usage: a fraction of the device's memory, such as 0.8: `chunk_size`, and then `minibatch_size` unless
            you set it, are chosen so that the run fits; see `vecgym.runs.memory.fitting_sizes`. Measured on CUDA,
            estimated elsewhere; the result is in `history.settings["memory"]`.
        backend: "stacked": all nodes in this process; "processes": in `num_processes` processes started
            for this run (see `vecgym.runs.multiprocess`); "distributed": in the processes of the existing
            torch.distributed group, or of torchrun, each of which calls `fit`. The first process logs;
            all return the same.
        num_processes: W, which divides `num_nodes`; each process holds K / W nodes, stacked.
        exact: on a CPU, give the same bits with any backend and any W: node by node, in one thread, and each
            collective on all nodes in one place. Slow: meant for verification. Otherwise results differ by rounding.
        timeout_s: with "processes", seconds without any exchange or record after which the run is ended.
        save_dir: a folder for checkpoints, files `step-000000100.pt` from which the run can be resumed as if it had
            never stopped; see `vecgym.runs.checkpoint`. One is written at the start, one at the end, and one on
            Ctrl-C. Only one run at a time may use the folder.
        checkpoint_interval: steps between further checkpoints; None: no further ones.
        resume: True: resume from the newest intact checkpoint in `save_dir`, or start anew if there is none. Or
            the path of a checkpoint, or of another folder of them.
        keep_checkpoints: number of checkpoints to keep; older ones are removed.
        gradient_accumulation: another way to set `minibatch_size`: N means `minibatch_size=batch_size / N`.
        correlation_interval: steps between measurements of the nodes' correlation; None: never.
        on_divergence: when a loss is NaN or infinite, "raise" a `DivergenceError`, "warn" once, or "ignore" it.
        logger: one or several `Logger`s.
        live: in a notebook, a figure of loss and bytes below the cell, drawn anew from time to time.
        log_interval: steps between the rows that loggers receive; the history has every step. On a device (CUDA, MPS)
            losses are fetched only at these steps, at evaluations and at checkpoints, so that no other step waits for
            the device: rows of the history arrive then, and divergence is noticed no earlier. (A trainer that overrides
            `after_step` fetches them at every step.) On a CPU rows of the history arrive several at a time if there is
            no logger, `after_step` or `stop`; divergence is noticed in its step.
        network: a `vecgym.clock.Network`, with `compute`: the history then says how long the run takes on it, and bytes
            follow the network's routes. Training does not depend on it; `Trainer.timeline` computes the same later. An
            asynchronous run's order of events does depend on both; without a network its messages take no time.
        compute: how long the nodes compute on that network, a `vecgym.clock.Compute`.
        availability: which nodes are present in which steps: `vecgym.availability.Dropout(0.1)` or another, or a
            function of the step that returns the ids of the present nodes. The others neither train nor exchange.
            None: all, always. In an asynchronous run a step is an interval of simulated time: the duration of a step,
            averaged over the nodes.
        max_updates: of an asynchronous run: updates of the server, instead of `max_steps`, which then counts local
            steps, averaged over the nodes. The first limit reached ends the run; `val_interval`, `log_interval` and
            `checkpoint_interval` count updates.
        max_seconds: simulated seconds. A synchronous run needs `network`, `compute` and `max_steps` for it, and ends
            with the step that reaches them, an asynchronous one before the update that exceeds them.
        max_bytes: bytes that a node sends, the column `bytes_total`. The run ends with the step that reaches them; it
            needs `max_steps` too, over which learning rates are laid out.
        stop: a function of the row of each step, `trainer.history`'s columns by name: the run ends after the first for
            which it is true, or raises StopIteration. That step is evaluated and saved as the last one, and
            `resume=True` with a wider limit goes on from there; the function then gets the earlier rows first.
        val_seconds: of an asynchronous run: simulated seconds between evaluations, instead of `val_interval`.

    >>> from vecgym.strategy import AllReduceStrategy
    >>> options = FitOptions(AllReduceStrategy(), 4, gradient_accumulation=2, engine="loop")
    >>> options.minibatch_size, options.engine
    (8, 'loop')
    """

    autocast: Flag = False
    max_memory_usage: Fraction = None
    backend: Annotated[Backend, partial(check.choice, allowed=get_args(Backend))] = "stacked"
    num_processes: OptionalCount = None
    exact: Flag = False
    timeout_s: Seconds = TIMEOUT_S
    save_dir: Annotated[str | os.PathLike[str] | None, checked_folder] = None
    checkpoint_interval: OptionalCount = None
    resume: Annotated[bool | str | os.PathLike[str], partial(check.instance, kind=RESUMES, give=OF_RESUME)] = False
    keep_checkpoints: Count = 2
    gradient_accumulation: OptionalCount = None
    correlation_interval: OptionalCount = None
    on_divergence: Annotated[OnDivergence, partial(check.choice, allowed=get_args(OnDivergence))] = "raise"
    logger: OneOrMoreLoggers = None
    live: Flag = False
    log_interval: Count = 1
    network: Network | None = None
    compute: Compute | None = None
    availability: Present = None
    max_updates: OptionalCount = None
    max_seconds: SimulatedSeconds = None
    max_bytes: MaxBytes = None
    stop: StopFunction = None
    val_seconds: SimulatedSeconds = None

    def __post_init__(self) -> None:
        super().__post_init__()
        minibatch_size = accumulated(self.batch_size, self.minibatch_size, self.gradient_accumulation)
        self.settle(minibatch_size=minibatch_size, gradient_accumulation=None)
        self._check_needs()
        check_clocks(self.num_nodes, self.network, self.compute)
        refused = {"backend": "stacked", "exact": False, "compile": False}
        refused |= {"correlation_interval": None, "max_memory_usage": None}
        check_asynchronous(self, ("max_updates", "val_seconds"), refused)
        self._check_limits()
        check_parts(self.batch_size, self.minibatch_size)
        if self.num_processes is not None:
            check_divides(self.num_processes, self.num_nodes)
        if self.live:
            from vecgym.plot.runs import LiveFigure  # matplotlib takes a while to import

            self.settle(logger=[*as_loggers(self.logger), LiveFigure()], live=False)

    def _check_needs(self) -> None:
        """Raise a ValueError for an option without another that it needs, or with one that excludes it."""
        if self.backend == "processes" and self.num_processes is None:
            raise ValueError('backend="processes" needs num_processes=W, a divisor of num_nodes.')
        if self.backend != "processes" and self.num_processes is not None:
            raise ValueError(
                f"num_processes={self.num_processes} with backend={self.backend!r} has no effect: give "
                'backend="processes"; torchrun takes the number as --nproc-per-node.'
            )
        if self.save_dir is None and self.resume is True:
            raise ValueError("resume=True needs save_dir, the folder with the run's checkpoints.")
        if self.save_dir is None and self.checkpoint_interval is not None:
            raise ValueError(
                f"checkpoint_interval={self.checkpoint_interval} needs save_dir, the folder to save them in."
            )
        if self.exact and self.compile:
            raise ValueError("exact=True computes node by node, and compile=True all at once: leave one of them out.")
        alone = self.strategy.asynchronous or (self.network is None and self.availability is not None)
        if (self.network is None) != (self.compute is None) and not alone:
            present, missing = ("network", "compute") if self.compute is None else ("compute", "network")
            example = "Compute(0.4)" if missing == "compute" else "Network(1e9, 0.05)"
            raise ValueError(f"{present} without {missing} gives no seconds: add {missing}=vecgym.clock.{example}.")

    def _check_limits(self) -> None:
        """Raise a ValueError for a limit without what it needs."""
        asynchronous = self.strategy.asynchronous
        if self.max_seconds is not None and self.network is None and not asynchronous:
            raise ValueError(
                f"max_seconds={self.max_seconds:g} are simulated seconds: give network= and compute= too, such as "
                'network=vecgym.clock.Network("1 Gbit/s", "50 ms"), compute=vecgym.clock.Compute(0.4).'
            )
        limit = next((name for name in ("max_seconds", "max_bytes") if vars(self)[name] is not None), None)
        planned = asynchronous and (self.max_seconds, self.max_updates) != (None, None)
        if limit is not None and self.max_steps is None and not planned:
            raise ValueError(
                f"{limit}={vars(self)[limit]:g} needs max_steps: the run ends with the first limit reached, and "
                "its learning rates are laid out over max_steps."
            )

    def ends(self, row: dict[str, Any], evaluates: bool = True) -> bool:
        """Return whether a run, which evaluates or never does, ends after the step of this row."""
        max_seconds = None if self.strategy.asynchronous else self.max_seconds  # else known when the run is planned
        limits = {"sim_seconds": max_seconds, "bytes_total": self.max_bytes}
        if any(limit is not None and row.get(name, 0.0) >= limit for name, limit in limits.items()):
            return True
        try:
            return self.stop is not None and bool(self.stop(row))
        except StopIteration:
            return True
        except KeyError as error:
            name = str(error.args[0])
            hint = check.did_you_mean(name, [*row, "val_loss"])
            if name.startswith("val_"):
                hint = (
                    f": validation columns exist only every val_interval={self.val_interval} steps. Ask for "
                    f"row.get({name!r}, math.inf), or give val_interval=1."
                    if evaluates else ": the run has no validation. Give Trainer a val_dataset, and no val_size=0."
                )  # fmt: skip
            raise ValueError(
                f"stop asks for {name!r}, which the row of step {row['step']} lacks{hint} It has {', '.join(row)}."
            ) from error

    @property
    def recorded(self) -> dict[str, Any]:
        """The options that are recorded in a run's settings."""
        names = ("batch_size", "minibatch_size", "shuffle", "seed", "autocast", "exact")
        on = {} if self.network is None else {"network": repr(self.network), "compute": repr(self.compute)}
        on |= {} if self.availability is None else {"availability": repr(self.availability)}
        on |= {name: limit for name in ("max_seconds", "max_bytes") if (limit := vars(self)[name]) is not None}
        return {**{name: vars(self)[name] for name in names}, **on}


MAX_VALUES = 64  # of a tensor: a larger one is described by its shape
MAX_DEPTH = 8


def described(value: Any, around: tuple[int, ...] = ()) -> Any:
    """Describe settings as nested dicts and lists of plain values, which `json.dumps` takes.

    Args:
        around: the ids of the objects that hold it: none of them is described again within itself.

    >>> from vecgym.strategy import DiLoCoStrategy
    >>> found = described(DiLoCoStrategy("sgd", H=20, lr=0.1, max_norm=1.0))
    >>> found["class"], found["inner_optim"]["lr"], found["exchanges"][0]["every"], found["max_norm"]
    ('DiLoCoStrategy', 0.1, 20, 1.0)
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        x = torch.as_tensor(value)
        return x.tolist() if x.numel() <= MAX_VALUES else f"{x.dtype} {list(x.shape)}"
    if id(value) in around or len(around) == MAX_DEPTH:
        return f"{type(value).__name__} ..."
    inside = partial(described, around=(*around, id(value)))
    if isinstance(value, dict):
        return {str(key): inside(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [inside(x) for x in value]
    if isinstance(value, OptimSpec):
        groups = {} if value.param_groups is None else {"param_groups": inside(value.param_groups)}
        return {"class": value.cls.__name__, **{name: inside(x) for name, x in value.hyper.items()}, **groups}
    if isinstance(value, (Strategy, Settings)) or type(value).__module__.startswith("vecgym."):
        own = public(value) if hasattr(value, "__dict__") else {}
        if isinstance(value, Strategy):  # as its arguments are named
            inner: Any = own.pop("inner")
            steps = {name: getattr(inner, name) for name in StepOptions.__annotations__}
            own = {"inner_optim": inner.spec, **steps, **own}
        return {"class": type(value).__name__, **{name: inside(x) for name, x in own.items()}}
    return getattr(value, "__qualname__", None) or re.sub(r" at 0x[0-9a-f]+", "", repr(value))[:200]


# ----------------------------------------------------------------------------------------------------- checks


def checked_examples(num_examples: Any, num_nodes: int, name: str = "num_examples") -> tuple[int, ...] | None:
    """Return the numbers of examples of all nodes, each checked, or None.

    >>> checked_examples([3, 4], num_nodes=2)
    (3, 4)
    """
    if num_examples is None:
        return None
    if not isinstance(num_examples, (tuple, list)) or len(num_examples) != num_nodes:
        raise ValueError(f"{name}={num_examples!r} must be a tuple of {num_nodes} integers, the examples of each node.")
    return tuple(check.integer(f"{name}[{i}]", count) for i, count in enumerate(num_examples))


# ---------------------------------------------------------------------------------------------- differentiable runs


Segments = Annotated[int | None, partial(check.optional_integer, what="None stores every step")]
OF_PRIMALS = "rollout_jvp takes a function of the primals, such as lambda outer_lr: DiLoCoStrategy(outer_lr=outer_lr)"


def _tensors(name: str, values: Any) -> tuple[Tensor, ...]:
    """Return the tensors in a list: at least one, all floating-point."""
    check.instance(name, values, (list, tuple), "a list of tensors")
    for x in values:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"{name} has {x!r}; give a list of floating tensors, such as [torch.tensor(0.1)].")
    if not values:
        raise ValueError(f"{name} is empty: give at least one tensor, such as [torch.tensor(0.1)].")
    return tuple(values)


def _maker(name: str, value: Any) -> Any:
    """Return a function that makes a strategy."""
    if isinstance(value, (Strategy, nn.Module)) or not callable(value):
        raise TypeError(f"{name} is {check.kind_of(value)}; {OF_PRIMALS}.")
    return value


def check_eval_batch(name: str, batch: Any) -> None:
    """Raise a ValueError for a batch without a tensor, or without an example.

    >>> check_eval_batch("eval_batch", (torch.ones(3, 2), torch.ones(3)))
    """
    sizes = [len(x) if x.dim() else 1 for x in tree.leaves(batch)]
    if not sizes or 0 in sizes:
        what = "holds no tensor" if not sizes else "has no example"
        raise ValueError(f"{name} {what}: give one ordinary batch [B, ...], as the model takes it.")


def _check_one_run(batches: Any, eval_batch: Any) -> None:
    """Raise a ValueError for a list of runs, each with its own batches, and as many batches for evaluation."""
    if not (isinstance(batches, (list, tuple)) and isinstance(eval_batch, (list, tuple))):
        return
    forms = [_form(batch) for batch in eval_batch]
    of_runs = [isinstance(run, (list, tuple)) and len(run) > 0 and _form(run[0]) for run in batches]
    if of_runs == forms and _form(eval_batch) not in map(_form, batches):
        raise ValueError(
            f"batches and eval_batch are lists of {len(forms)} runs, and this is one run: give "
            f"rollout(..., num_runs={len(forms)}), one program of all, and follow the gradient of outcome.loss.mean()."
        )


def _form(batch: Any) -> Any:
    """Return the form of a batch, without its numbers."""
    if isinstance(batch, Mapping):
        return {key: _form(x) for key, x in batch.items()}
    return [_form(x) for x in batch] if isinstance(batch, (list, tuple)) else "tensor"


@dataclass(frozen=True)
class DifferentiableRun(Modelled):
    """The model of a differentiable run, its batches, and its evaluation.

    Args:
        model: as for `Trainer`; its own parameters are the initial ones, and it is never changed.
        batches: a list of T batches, leaves `[K, B, ...]`; or a tensor, a dict or a tuple whose leaves have a leading
            T, `[T, K, B, ...]`. All B examples count, even those that `vecgym.data.Batches` repeats for a node that
            has fewer: choose a B that every node has.
        num_nodes: K.
        eval_batch: one ordinary batch `[B, ...]`.
        params: initial parameters, `[1 or K, *]`, instead of the model's.
        seed: of dropout, masks and everything else that is random.
        num_examples: of each node, for `weighting="examples"`.
        engine: "auto", "vmap" or "loop"; or a prepared `Engine`, so that the model is not inspected in every call.
        availability: which nodes are present in which steps; see `Trainer.fit`. Node i takes row i of batch t as its
            own step t.
    """

    model: nn.Module
    strategy: Any
    batches: Any
    _: KW_ONLY
    num_nodes: Count
    eval_batch: Any
    params: Tree | None = None
    seed: Seed = 42
    num_examples: tuple[int, ...] | None = None
    engine: EngineName | Engine = "auto"
    availability: Present = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_fn is not None and isinstance(self.engine, Engine) and LOSS_FN not in vars(self.engine.model):
            raise ValueError('the engine was made without loss_fn: give engine="auto", which makes one with it.')
        if self.params is not None:
            check.instance("params", self.params, Mapping, "{name: tensor [1 or K, *]}, or None")
        self.settle(num_examples=checked_examples(self.num_examples, self.num_nodes))
        _check_one_run(self.batches, self.eval_batch)
        check_eval_batch("eval_batch", self.eval_batch)

    @property
    def common(self) -> dict[str, Any]:
        """The options that all three functions have, by name."""
        return {field.name: vars(self)[field.name] for field in fields(DifferentiableRun)}


@dataclass(frozen=True)
class RolloutOptions(DifferentiableRun):
    """The arguments of `rollout`.

    Args:
        segments: the number of parts to cut the run into. Only the states between them are stored, and each part is
            recomputed in the backward pass: memory O(T / segments + segments) for less than twice the time; about
            sqrt(T) parts need the least. For reverse mode through `torch.autograd`. None: everything is stored.
        compute, network: of an asynchronous run; see `Trainer.fit`. Node i takes row i of batch t as its own step t.
        max_updates: of an asynchronous run: updates of the server; None: as many as the batches allow.
        limits: of nodes that have fewer examples than B: how many of each batch are each node's own, from the first on,
            such as `Batches.limits`. The others fill the batch and do not count. None: all are.
        num_runs: M, to train M runs as one program. Each of model, strategy, batches, eval_batch, params, seed,
            num_examples and limits is then one for all runs, a list of M, or a function of the run. A list is never a
            batch: of `eval_batch` it is M batches, and of `batches` M lists of T batches, or T batches for all runs.
            None: one.
    """

    model: Any
    strategy: Any
    _: KW_ONLY
    seed: Any = 42
    num_examples: Any = None
    limits: Any = None
    segments: Segments = None
    compute: Compute | None = None
    network: Network | None = None
    max_updates: OptionalCount = None
    num_runs: OptionalCount = None

    def __post_init__(self) -> None:
        num_runs = check.optional_integer("num_runs", self.num_runs, what="None is one run, without a dimension of it")
        if num_runs is not None:
            self.settle(_runs=_each_run(self, num_runs))
            return
        self.settle(_runs=(self,), seed=check.seed("seed", self.seed))
        self.settle(limits=checked_examples(self.limits, self.num_nodes, "limits"))
        super().__post_init__()
        check_strategy(self.strategy)
        check_clocks(self.num_nodes, self.network, self.compute)
        check_asynchronous(self, ("compute", "network", "max_updates"), {"segments": None, "availability": None})
        if not as_strategy(self.strategy, self.model).pure:
            raise ValueError(
                f"{type(self.strategy).__name__} is written for one rank and runs on threads, which cannot be "
                "differentiated: write it with exchanges, on [K, *] tensors."
            )
        if self.availability is not None and any(x.roster.sampled for x in self.strategy.exchanges):
            raise ValueError(
                f"availability={self.availability!r} and {self.strategy!r} both say who sits out: in a rollout give "
                "one, such as availability=Sampled(0.5, H) instead of participation=0.5."
            )

    @property
    def runs(self) -> tuple[RolloutOptions, ...]:
        """The options of each run."""
        return vars(self)["_runs"]


def _each_run(options: RolloutOptions, num_runs: int) -> tuple[RolloutOptions, ...]:
    """Return the options of each of many runs."""
    each = {name: _of_runs(name, vars(options)[name], num_runs) for name in OF_RUNS}
    batches = options.batches
    if isinstance(batches, list) and batches and _form(batches[0]) == _form(each["eval_batch"][0]):
        each["batches"] = [batches] * num_runs  # T batches
    else:
        each["batches"] = _of_runs("batches", batches, num_runs)
    runs = tuple(replace(options, num_runs=None, **dict(zip(each, values))) for values in zip(*each.values()))
    for run in runs:
        if run.strategy.asynchronous:
            raise ValueError(
                f"{type(run.strategy).__name__} is asynchronous, and its runs have events of their own: leave out "
                f"num_runs={num_runs}, and call rollout for each run."
            )
    return runs


# These may differ from run to run, as `batches` may.
OF_RUNS = ("model", "strategy", "eval_batch", "params", "seed", "num_examples", "limits")


def _of_runs(name: str, value: Any, num_runs: int) -> list[Any]:
    """Return the value of an option in each run.

    >>> _of_runs("seed", 42, 2), _of_runs("seed", [3, 4], 2), _of_runs("seed", lambda run: 10 + run, 2)
    ([42, 42], [3, 4], [10, 11])
    """
    if callable(value) and not isinstance(value, (nn.Module, Strategy, type)):
        return [check.called(name, value, run) for run in range(num_runs)]
    if not isinstance(value, (list, range)):
        return [value] * num_runs
    if len(value) != num_runs:
        raise ValueError(
            f"{name} is a list of {len(value)}, and num_runs={num_runs}: give one for each run, or {name}=lambda run: "
            "...; with num_runs a list is never a single batch, which may be a tuple."
        )
    return list(value)


@dataclass(frozen=True)
class JvpOptions(DifferentiableRun):
    """The arguments of `rollout_jvp`.

    Args:
        primals, tangents: the point and the direction of the derivative.
    """

    strategy: Annotated[Callable[..., Strategy], _maker]
    primals: Annotated[Sequence[Tensor], _tensors]
    tangents: Annotated[Sequence[Tensor], _tensors]

    def __post_init__(self) -> None:
        super().__post_init__()
        shapes = [[list(x.shape) for x in values] for values in (self.primals, self.tangents)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"primals have the shapes {shapes[0]} and tangents {shapes[1]}: give one tangent for each."
            )


def presence_of(options: Any, num_steps: int, num_examples: tuple[int, ...] | None) -> Presence | None:
    """Return which nodes are present when in a run with these options, for all steps; None: all, always.

    >>> from types import SimpleNamespace
    >>> presence_of(SimpleNamespace(availability=None), 10, None) is None
    True
    """
    if options.availability is None:
        return None
    batch_size = getattr(options, "batch_size", None)
    drop_last = (getattr(options, "dataloader_kwargs", None) or {}).get("drop_last", False)
    facts = Facts(options.num_nodes, num_steps, options.seed, options.compute, num_examples, batch_size, drop_last)
    return Presence(options.availability, facts)
