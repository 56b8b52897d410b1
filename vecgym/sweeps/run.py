"""`sweep`: train every configuration of a grid."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from vecgym.collectives.ledger import readable_bytes
from vecgym.core import check
from vecgym.core.errors import VecgymWarning
from vecgym.engine import EngineName, check_settings
from vecgym.runs import multiprocess
from vecgym.runs.memory import available_bytes
from vecgym.runs.options import checked, resolve_device
from vecgym.strategy import Strategy
from vecgym.sweeps.axes import Point, Uniform, checked_axes, count_points, points
from vecgym.sweeps.configurations import check_axes, make_configurations
from vecgym.sweeps.result import SweepResult
from vecgym.sweeps.runner import Runner
from vecgym.sweeps.saving import ResultsFile


def sweep(
    model: nn.Module | Callable[..., nn.Module],
    train_dataset: Any,
    val_dataset: Any = None,
    *,
    strategy: Strategy | Callable[..., Strategy] | None = None,
    grid: Mapping[str, Iterable[Any] | Uniform],
    num_nodes: int | None = None,
    samples: int | None = None,
    sample_seed: int = 0,
    num_epochs: int = 1,
    max_steps: int | None = None,
    batch_size: int = 16,
    minibatch_size: int | None = None,
    shuffle: bool = True,
    seed: int = 42,
    device: str | torch.device | None = None,
    val_size: int | None = None,
    val_interval: int | None = 100,
    engine: EngineName = "auto",
    chunk_size: int | None = None,
    node_threads: int | None = None,
    dataloader_kwargs: Mapping[str, Any] | None = None,
    chunk_configs: int | None = None,
    max_memory_bytes: int | None = None,
    max_configs: int = 10_000,
    keep_models: bool = False,
    resume: str | os.PathLike[str] | None = None,
    dry_run: bool = False,
    progress: bool = True,
) -> SweepResult:
    """Train every configuration of a grid, or a random choice, in as few stacked programs as possible.

    Each configuration's curve is that of `Trainer.fit` for it alone, up to rounding (and dropout masks). All those
    with equal `num_nodes`, batch sizes, number of steps and model structure are stacked, whatever their strategies;
    those whose parameters are one copy for all nodes, as in AllReduce, are stacked apart from the others.

    Args:
        model: an `nn.Module`, or a function of axes that returns one, such as `lambda seed: make(seed)`.
        train_dataset, val_dataset: see `vecgym.Trainer`.
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
        num_epochs, max_steps, batch_size, minibatch_size, shuffle, seed, device, val_size, val_interval, engine,
            chunk_size, node_threads, dataloader_kwargs, progress: see `Trainer.fit`.

    Returns:
        A `SweepResult`. A configuration whose loss becomes NaN or infinite ends there, marked "diverged". On Ctrl-C
        all end after the step in progress, and the result holds what there is.

    Raises:
        ValueError, TypeError: for what cannot work, before training starts.

    >>> from vecgym.strategy import DiLoCoStrategy
    >>> class Line(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = nn.Parameter(torch.zeros(()))
    ...     def forward(self, x):
    ...         return (self.w - x).square().mean()
    >>> result = sweep(
    ...     Line(), torch.arange(8.0), torch.arange(8.0), strategy=lambda H, lr: DiLoCoStrategy("sgd", H=H, lr=lr),
    ...     grid={"H": [1, 2], "lr": [0.01, 0.1]}, num_nodes=2, max_steps=4, batch_size=2, device="cpu", progress=False,
    ... )
    >>> len(result.rows), result.best("val_loss")["H"], result.history(0)["step"]
    (4, 2, [0, 1, 2, 3, 4])
    """
    multiprocess.check_alone("the sweep")
    axes = checked_axes(grid, samples)
    check_axes(axes, strategy, model)
    for name, data in (("train_dataset", train_dataset), ("val_dataset", val_dataset)):
        if isinstance(data, (nn.Module, Strategy)):
            raise TypeError(f"{name} is {check.kind_of(data)}; the order is sweep(model, train_dataset, val_dataset).")
    check_settings(engine, chunk_size, node_threads)
    checked({"val_size": val_size, "val_interval": val_interval, "progress": progress})
    for name, value in (("samples", samples), ("chunk_configs", chunk_configs), ("max_memory_bytes", max_memory_bytes)):
        check.optional_integer(name, value)
    check.integer("max_configs", max_configs)
    check.seed("sample_seed", sample_seed)
    for name, value in (("keep_models", keep_models), ("dry_run", dry_run)):
        check.flag(name, value)
    if ("num_nodes" in axes) == (num_nodes is not None):
        raise ValueError('give the number of nodes once: num_nodes=8, or an axis grid["num_nodes"]=[4, 8].')
    settings = {
        "num_nodes": num_nodes, "batch_size": batch_size, "minibatch_size": minibatch_size, "max_steps": max_steps,
        "num_epochs": num_epochs, "seed": seed, "shuffle": shuffle,
    }  # fmt: skip
    where = resolve_device(device)
    memory = available_bytes(where) if max_memory_bytes is None else max_memory_bytes

    def runner_of(points: Iterable[Point]) -> Runner:
        return Runner(
            train_dataset, val_dataset, axes, make_configurations(points, strategy, model, settings),
            device=where, val_size=val_size, val_interval=val_interval,
            engine=(engine, chunk_size, node_threads), dataloader_kwargs=dataloader_kwargs,
            chunk_configs=chunk_configs, max_memory_bytes=memory, keep_models=keep_models,
        )  # fmt: skip

    count = count_points(axes, samples)
    if count > max_configs:
        few = runner_of(itertools.islice(points(axes, samples, sample_seed), 8))
        seconds, needed = few.estimate(count)
        raise ValueError(
            f"the grid has {count:,} configurations, more than max_configs={max_configs:,}: about "
            f"{duration(seconds)} and {readable_bytes(needed)} here, going by a few steps of the first ones. Give "
            f"samples=100 for a random choice, shorter axes, or max_configs={count}."
        )
    runner = runner_of(points(axes, samples, sample_seed))
    save = None
    if resume is not None:
        file = ResultsFile(runner, resume)
        file.load()
        save = file.save
    result = SweepResult(runner)
    if dry_run:
        return result
    try:
        finished = runner.run(save, progress)
    finally:
        if save is not None:
            save()
    if not finished:
        on = "" if resume is not None else " With resume=path it would go on from here."
        warnings.warn(f"interrupted: {result!r}.{on}", VecgymWarning, stacklevel=2)
    return result


def duration(seconds: float) -> str:
    """A time as a person reads it.

    >>> duration(5400.0)
    '1.5 hours'
    """
    for size, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} seconds"
