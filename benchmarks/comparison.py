"""The common parts of the benchmarks of training itself: options, strategies, runs, the table and the figure."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from workloads import header, machine, markdown

from vecgym import History, SweepResult, Trainer
from vecgym.collectives.ledger import readable_bytes
from vecgym.optim import OptimSpec
from vecgym.plot import plot_comparison
from vecgym.strategy import (
    AllReduceStrategy,
    DeMoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
    Strategy,
)

EVALUATIONS = 10  # in a run, besides the one at the start


@dataclass
class Run:
    """One strategy trained: what was recorded, what came out, and how long it took."""

    name: str
    history: History
    model: nn.Module  # the average of the nodes
    seconds: float
    num_nodes: int
    batch_size: int
    steps: int
    scores: dict[str, float] = field(default_factory=dict)  # more columns of the table

    def row(self, most_bytes: float) -> list[str]:
        loss, of_nodes, sent = map(self.history.last, ("val_loss", "val_loss_local", "bytes_total"))
        cells = [self.name, str(self.num_nodes), str(self.batch_size), f"{loss:.3f}", f"{of_nodes:.3f}"]
        cells += [f"{score:.3f}" for score in self.scores.values()]
        less = f"{most_bytes / sent:.3g} x" if sent else "-"
        return [*cells, readable_bytes(sent), less, f"{1e3 * self.seconds / self.steps:.1f}"]


def parser(description: str | None, figure: str) -> argparse.ArgumentParser:
    """The options that all of them have."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--threads", type=int, default=2, help="torch's threads (default 2)")
    found.add_argument("--seed", type=int, default=0, help="of initialisation and data (default 0)")
    found.add_argument("--quick", action="store_true", help="few steps of a small model: does it work?")
    found.add_argument("--figure", type=Path, default=Path("vecgym-runs") / figure, help="default: %(default)s")
    found.add_argument("--json", type=Path, metavar="FILE", help="write every curve there")
    return found


def seeded(seed: int, build: Callable[[], nn.Module]) -> nn.Module:
    """A model whose initial parameters depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def whole(result: SweepResult) -> SweepResult:
    """Return the result of a sweep, unless it was interrupted.

    The last loss of an interrupted configuration may be the one before its first step.
    """
    if result.num_pending:
        raise KeyboardInterrupt
    return result


def strategies(
    inner: OptimSpec, demo_lr: float, H: int, p: float = 0.005, outer_momentum: float = 0.9, **settings: Any
) -> dict[str, Strategy]:
    """The six that the documents compare; `settings` of the inner optimizer: max_norm, warmup_steps ...

    DeMo has no inner optimizer: its steps are signs, and want a learning rate of their own.
    """
    outer = OptimSpec("sgd", lr=0.7, momentum=outer_momentum, nesterov=True)
    return {
        "AllReduce": AllReduceStrategy(inner, **settings),
        "FedAvg": FedAvgStrategy(inner, H=H, **settings),
        "DiLoCo": DiLoCoStrategy(inner, outer, H=H, **settings),
        "SPARTA": SPARTAStrategy(p, inner, **settings),
        "SPARTA + DiLoCo": SPARTADiLoCoStrategy(p, 1, H, inner, outer, **settings),
        "DeMo": DeMoStrategy(lr=demo_lr, **settings),
    }


def train(
    name: str,
    strategy: Strategy,
    model: nn.Module,
    data: tuple[Any, Any],
    num_nodes: int,
    *,
    steps: int,
    batch_size: int,
    seed: int,
    val_size: int | None = None,
    score: Callable[[nn.Module], dict[str, float]] = lambda model: {},
) -> Run:
    """Train on `data`, (to train on, to validate on), and say so in a line; `score` looks at the averaged model."""
    trainer = Trainer(model, *data)
    start = time.perf_counter()
    averaged = trainer.fit(
        strategy, num_nodes, max_steps=steps, batch_size=batch_size, val_size=val_size,
        val_interval=max(1, steps // EVALUATIONS), seed=seed, device="cpu", progress=False,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    run = Run(name, trainer.history, averaged, seconds, num_nodes, batch_size, steps, score(averaged.eval()))
    print(f"{seconds:.0f} s: {', '.join(run.row(math.nan)[:-2])}", flush=True)
    return run


def begin(args: argparse.Namespace) -> float:
    """Set the threads, print what figures depend on; the time now."""
    torch.set_num_threads(args.threads)
    print(header(), flush=True)
    return time.perf_counter()


def finish(runs: Sequence[Run], args: argparse.Namespace, start: float, title: str, loss_label: str) -> None:
    """The table, the figure, the file of all curves, and how long it took."""
    columns = ["strategy", "K", "batch", "val loss", "of the nodes", *runs[0].scores]
    columns += ["sent per node", "less", "ms / step"]
    most = max(run.history.last("bytes_total") for run in runs)
    print("\n" + markdown(columns, [run.row(most) for run in runs]) + "\n")
    print("val loss: of the average of the nodes; of the nodes: their mean; ms / step: with evaluation and recording")
    plot_comparison({run.name: run.history for run in runs}, args.figure, title=title, loss_label=loss_label)
    print(f"Figure: {args.figure}\n{time.perf_counter() - start:.0f} s in all")
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "runs": [_as_json(run) for run in runs]}, indent=1))


def _as_json(run: Run) -> dict[str, Any]:
    columns: dict[str, Any] = {
        name: dict(zip(("step", name), run.history.series(name)))
        for name in ("train_loss", "val_loss", "val_loss_local", "bytes_total", "consensus_distance")
        if name in run.history.columns
    }
    return {
        "name": run.name, "num_nodes": run.num_nodes, "batch_size": run.batch_size, "steps": run.steps,
        "seconds": run.seconds, "scores": run.scores, "strategy": run.history.settings["strategy"],
        "engine": run.history.settings["engine_reason"], **columns,
    }  # fmt: skip
