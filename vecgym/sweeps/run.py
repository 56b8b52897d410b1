"""`sweep`: train every configuration of a grid."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from torch import nn

from vecgym.collectives.ledger import readable_bytes
from vecgym.core import check
from vecgym.core.errors import warn
from vecgym.core.options import Options, function_of
from vecgym.runs import multiprocess
from vecgym.runs.memory import available_bytes
from vecgym.runs.options import Computation, Count, Flag, OptionalCount, Training, resolve_device
from vecgym.strategy import Strategy
from vecgym.sweeps.axes import Point, Uniform, checked_axes, count_points, points
from vecgym.sweeps.configurations import SETTINGS, check_axes, make_configurations
from vecgym.sweeps.priced import Prices
from vecgym.sweeps.result import SweepResult
from vecgym.sweeps.runner import Runner
from vecgym.sweeps.saving import ResultsFile


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
class SweepOptions(Computation, Training, Swept):
    """All that `sweep` takes; options of `Trainer.fit` are the same.

    Args:
        strategy: a function of axes that returns a `Strategy`; or a `Strategy`; None: the grid has an axis
            "strategy" of strategies.
        grid: axis -> its values. Axes are arguments of `strategy` and `model`, and the settings "num_nodes",
            "batch_size", "minibatch_size", "max_steps", "num_epochs", "seed" and "shuffle".
        num_nodes: K, unless it is an axis.
        samples: draw so many random points, each axis by itself, from its values or from a `Uniform` or
            `LogUniform` range; None: all points of the grid.
        sample_seed: of these draws.
        chunk_configs: the most configurations in one stack; None: chosen by memory and arithmetic.
        max_memory_bytes: what a stack may take, roughly; None: half of what is free. A larger one is split.
        max_configs: refuse a grid of more.
        keep_models: keep each configuration's averaged model: `result.model(i)`.
        resume: a file in which results are kept (written whole, every minute and at the end of each stack); if it is
            there already, the sweep goes on from it.
        dry_run: train nothing: look at `result.explain()`.
        network, compute: a `vecgym.clock.Network` and a `vecgym.clock.Compute`, or {name: one}: the rows say how long
            each configuration takes; see `SweepResult.price`, which does so afterwards.
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
    dry_run: Flag = False
    network: Any = None
    compute: Any = None

    def __post_init__(self) -> None:
        if (self.network is None) != (self.compute is None):
            raise ValueError("network and compute together say how long a configuration takes: give both.")
        super().__post_init__()
        for name in ("train_dataset", "val_dataset"):
            data = vars(self)[name]
            if isinstance(data, (nn.Module, Strategy)):
                raise TypeError(
                    f"{name} is {check.kind_of(data)}; the order is sweep(model, train_dataset, val_dataset)."
                )


@function_of(SweepOptions)
def sweep(options: SweepOptions) -> SweepResult:
    """Train every configuration of a grid, or a random choice, in as few stacked programs as possible.

    Each configuration's curve is that of `Trainer.fit` for it alone, up to rounding (and dropout masks). All those
    with equal `num_nodes`, batch sizes, number of steps and model structure are stacked, whatever their strategies;
    those whose parameters are one copy for all nodes, as in AllReduce, are stacked apart from the others.

    Args:
        {arguments}

    Returns:
        A `SweepResult`. A configuration whose loss becomes NaN or infinite ends there, marked "diverged". On Ctrl-C
        all end after the step in progress, and the result holds what there is.

    Raises:
        ValueError, TypeError: for what cannot work, before training starts.

    >>> import torch
    >>> from vecgym.strategy import DiLoCoStrategy
    >>> from vecgym.models import Line
    >>> result = sweep(
    ...     Line(), torch.arange(8.0), torch.arange(8.0), strategy=lambda H, lr: DiLoCoStrategy("sgd", H=H, lr=lr),
    ...     grid={"H": [1, 2], "lr": [0.01, 0.1]}, num_nodes=2, max_steps=4, batch_size=2, device="cpu", progress=False,
    ... )
    >>> len(result.rows), result.best("val_loss")["H"], result.history(0)["step"]
    (4, 2, [0, 1, 2, 3, 4])
    """
    multiprocess.check_alone("the sweep")
    axes = checked_axes(options.grid, options.samples)
    check_axes(axes, options.strategy, options.model)
    if ("num_nodes" in axes) == (options.num_nodes is not None):
        raise ValueError('give the number of nodes once: num_nodes=8, or an axis grid["num_nodes"]=[4, 8].')
    count = count_points(axes, options.samples)
    if count > options.max_configs:
        few = _runner(options, axes, itertools.islice(points(axes, options.samples, options.sample_seed), 8))
        seconds, needed = few.estimate(count)
        raise ValueError(
            f"the grid has {count:,} configurations, more than max_configs={options.max_configs:,}: about "
            f"{duration(seconds)} and {readable_bytes(needed)} here, going by a few steps of the first ones. Give "
            f"samples=100 for a random choice, shorter axes, or max_configs={count}."
        )
    runner = _runner(options, axes, points(axes, options.samples, options.sample_seed))
    save = None
    if options.resume is not None:
        file = ResultsFile(runner, options.resume)
        file.load()
        save = file.save
    result = SweepResult(runner, None if options.network is None else Prices(options.network, options.compute))
    if options.dry_run:
        return result
    try:
        finished = runner.run(save, options.progress)
    finally:
        if save is not None:
            save()
    if not finished:
        on = "" if options.resume is not None else " With resume=path it would go on from here."
        warn(f"interrupted: {result!r}.{on}")
    return result


def _runner(options: SweepOptions, axes: dict[str, Any], chosen: Iterable[Point]) -> Runner:
    device = resolve_device(options.device)
    memory = options.max_memory_bytes
    settings = {name: vars(options)[name] for name in SETTINGS}
    return Runner(
        options.train_dataset, options.val_dataset, axes,
        make_configurations(chosen, options.strategy, options.model, settings),
        device=device, val_size=options.val_size, val_interval=options.val_interval,
        engine=(options.engine, options.chunk_size, options.node_threads),
        dataloader_kwargs=options.dataloader_kwargs, chunk_configs=options.chunk_configs,
        max_memory_bytes=available_bytes(device) if memory is None else memory, keep_models=options.keep_models,
    )  # fmt: skip


def duration(seconds: float) -> str:
    """A time as a person reads it.

    >>> duration(5400.0)
    '1.5 hours'
    """
    for size, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} seconds"
