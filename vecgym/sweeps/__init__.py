"""Sweeps: many configurations of one training, in as few stacked programs as possible; see `sweep`."""

from __future__ import annotations

import math
from collections.abc import Iterable

from vecgym.core.check import function_of
from vecgym.core.errors import warn
from vecgym.runs import multiprocess
from vecgym.sweeps.configurations import check_axes, make_configurations, warn_of_equal_weights
from vecgym.sweeps.options import LogUniform, Point, SweepOptions, Uniform, checked_axes, checked_points, clocks, points
from vecgym.sweeps.result import SweepResult, compare
from vecgym.sweeps.runner import Runner
from vecgym.sweeps.saving import ResultsFile

__all__ = ["LogUniform", "SweepResult", "Uniform", "compare", "sweep"]


@function_of(SweepOptions)
def sweep(options: SweepOptions) -> SweepResult:
    """Train every configuration of a grid, a random choice or a list, in as few stacked programs as possible.

    Each configuration has the curve of `Trainer.fit` for it alone, up to rounding (and dropout masks). Configurations
    with equal `num_nodes`, batch sizes, number of steps and model structure are stacked, whatever their strategies.
    Strategies that store the parameters once for all nodes, such as AllReduce, have separate stacks, and so do
    asynchronous configurations with the same events.

    Args:
        {arguments}

    Returns:
        A `SweepResult`. A configuration whose loss becomes NaN or infinite ends there, marked "diverged". On Ctrl-C
        all end after the step in progress, marked "interrupted" or "pending"; the result holds their records so far.

    Raises:
        ValueError, TypeError: for invalid options, before training starts.

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
    chosen: Iterable[Point]
    if options.points is None:
        axes, source = checked_axes(options.grid, options.samples), "grid"
        chosen = points(axes, options.samples, options.sample_seed)
        count = options.samples or math.prod(map(len, axes.values()))
    else:
        chosen, source = checked_points(options.points), "points[i]"
        axes, count = dict.fromkeys(chosen[0]), len(chosen)
    check_axes(options, axes, source)
    if ("num_nodes" in axes) == (options.num_nodes is not None):
        raise ValueError(f'give the number of nodes once: num_nodes=8, or an axis {source}["num_nodes"]=...')
    if count > options.max_configs:
        raise ValueError(
            f"the sweep has {count:,} configurations, more than max_configs={options.max_configs:,}: give samples=100 "
            f"for a random choice of a grid, shorter axes, or max_configs={count}."
        )
    configs = make_configurations(chosen, options)
    warn_of_equal_weights(configs, options.model)
    runner = Runner(options, axes, configs)
    both = options.network is not None and options.compute is not None
    result = SweepResult(runner, clocks(options.network, options.compute) if both else ())
    file = ResultsFile(runner) if options.resume is not None else None
    if file is not None:
        file.load()
    if options.dry_run:
        return result
    save = (lambda: None) if file is None else file.save
    try:
        finished = runner.run(save)
    finally:
        save()
    if not finished:
        hint = " With resume=path, it could continue from here." if file is None else ""
        warn(f"interrupted: {result!r}.{hint}")
    return result
