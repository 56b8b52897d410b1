"""The options of `sweep`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Annotated, Any

from torch import nn

from vecgym.core import check
from vecgym.core.options import Options
from vecgym.runs.options import (
    Count,
    EngineOptions,
    Flag,
    OptionalCount,
    Present,
    SimulatedSeconds,
    Training,
    check_availability,
)
from vecgym.strategy import Strategy
from vecgym.sweeps.axes import Uniform


def _executor(name: str, value: Any) -> Executor | None:
    if value is None or isinstance(value, Executor):
        return value
    raise TypeError(
        f"{name} is {check.kind_of(value)}; give a concurrent.futures.Executor, such as ProcessPoolExecutor(4) or "
        "Dask's client.get_executor(), or None. vecgym.guide.sweeps says how to make one of submitit's and of Ray."
    )


@dataclass(frozen=True)
class Swept(Options):
    """What is trained, and on what.

    Args:
        model: an `nn.Module`, or a function of axes that returns one, such as `lambda seed: make(seed)`.
        train_dataset, val_dataset: see `vecgym.Trainer`.
    """

    model: nn.Module | Callable[..., nn.Module]
    train_dataset: Any
    val_dataset: Any = None


@dataclass(frozen=True, kw_only=True)
class SweepOptions(EngineOptions, Training, Swept):
    """All that `sweep` takes; options of `Trainer.fit` are the same.

    Args:
        strategy: a function of axes that returns a `Strategy`; or a `Strategy`; None: the grid has an axis
            "strategy" of strategies.
        grid: axis -> its values. Axes are arguments of `strategy` and `model`, and the settings "num_nodes",
            "batch_size", "minibatch_size", "max_steps", "num_epochs", "max_updates", "max_seconds", "seed" and
            "shuffle".
        num_nodes: K, unless it is an axis.
        samples: draw so many random points, each axis by itself, from its values or from a `Uniform` or
            `LogUniform` range; None: all points of the grid.
        sample_seed: of these draws.
        chunk_configs: the most configurations in one stack; None: chosen by memory and arithmetic.
        max_memory_bytes: what a stack may take, roughly; None: half of what is free. A larger one is split.
        max_configs: refuse a grid of more.
        keep_models: keep each configuration's averaged model: `result.model(i)`.
        resume: a file in which results are kept (written whole, every minute and at the end of each stack); if it is
            there already, the sweep resumes from it.
        executor: a `concurrent.futures.Executor`: its workers train the stacks, each by itself, to the same bits; None:
            this process does. It is not shut down. See `vecgym.guide.sweeps` for what workers must have.
        availability: who is present in which steps; see `Trainer.fit`. It may be an axis too, of such objects. Where
            nodes may be absent, each configuration is trained by itself, and on each `compute`.
        dry_run: train nothing: look at `result.explain()`.
        network, compute: a `vecgym.clock.Network` and a `vecgym.clock.Compute`, or {name: one}: the rows say how long
            each configuration takes; see `SweepResult.price`, which does so afterwards. Asynchronous strategies need
            `compute`, and are trained on each of both: the order of their events depends on them. A `Deadline` needs
            `compute` alone.
        max_updates, max_seconds: of asynchronous strategies, in place of `max_steps`; see `Trainer.fit`.
    """

    strategy: Strategy | Callable[..., Strategy] | None = None
    grid: Mapping[str, Iterable[Any] | Uniform]
    num_nodes: OptionalCount = None
    samples: OptionalCount = None
    sample_seed: Annotated[int, check.seed] = 0
    chunk_configs: OptionalCount = None
    max_memory_bytes: OptionalCount = None
    max_configs: Count = 10_000
    keep_models: Flag = False
    resume: str | os.PathLike[str] | None = None
    executor: Annotated[Executor | None, _executor] = None
    availability: Present = None
    dry_run: Flag = False
    network: Any = None
    compute: Any = None
    max_updates: OptionalCount = None
    max_seconds: SimulatedSeconds = None

    def __post_init__(self) -> None:
        if self.availability is not None:
            check_availability(self.dataloader_kwargs)
        super().__post_init__()
        for name in ("train_dataset", "val_dataset"):
            data = vars(self)[name]
            if isinstance(data, (nn.Module, Strategy)):
                raise TypeError(
                    f"{name} is {check.kind_of(data)}; the order is sweep(model, train_dataset, val_dataset)."
                )
