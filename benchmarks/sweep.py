"""A sweep in one program against `Trainer.fit` of every configuration, one after the other.

Both train the same configurations of the same workload, in one process; set-up, evaluation and recording count. They
take turns (sweep, fits, sweep, fits ...), and the ratio is that of the medians over the rounds. A few configurations
are fitted alone where all of them would take long, and their time is multiplied.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset
from workloads import WORKLOADS, header, machine, markdown

from vecgym import SweepResult, Trainer, sweep
from vecgym.core.errors import VecgymWarning
from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy, FedAvgStrategy, SPARTAStrategy, Strategy

K = 8
STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "diloco": lambda H, lr, outer_lr: DiLoCoStrategy("adamw", H=H, lr=lr, outer_lr=outer_lr),
    "fedavg": lambda H, lr, outer_lr: FedAvgStrategy("adamw", H=H, lr=lr, server_optim="avg", server_lr=outer_lr),
    "allreduce": lambda H, lr, outer_lr: AllReduceStrategy("adamw", lr=lr * outer_lr / H),
    "sparta": lambda H, lr, outer_lr: SPARTAStrategy(outer_lr / H, "adamw", lr=lr),
}
GRID: dict[str, list[Any]] = {
    "H": [5, 10, 20, 50], "lr": [1e-3, 3e-3], "outer_lr": [0.4, 0.7], "seed": [0, 1],
}  # fmt: skip  # 32 configurations
SMALL: dict[str, list[Any]] = {"H": [5, 10], "lr": [1e-3, 3e-3], "outer_lr": [0.7], "seed": [0]}
EXAMPLES = (4096, 256)  # to train on, and to validate on


@dataclass(frozen=True)
class Case:
    """One comparison: a workload, a strategy, a grid, the steps, and the least ratio that was asked for."""

    workload: str
    strategy: str
    grid: dict[str, list[Any]]
    max_steps: int
    fitted: int  # configurations that are fitted alone in a round
    target: float


CASES = {
    "tiny": Case("tiny", "diloco", GRID, 300, 4, 15.0),
    "tiny fedavg": Case("tiny", "fedavg", GRID, 300, 4, 1.0),
    "tiny allreduce": Case("tiny", "allreduce", GRID, 300, 4, 1.0),
    "tiny sparta": Case("tiny", "sparta", GRID, 300, 4, 1.0),
    "mlp": Case("mlp", "diloco", GRID, 100, 4, 1.5),
    "mlp allreduce": Case("mlp", "allreduce", GRID, 100, 4, 1.0),
    "gpt": Case("gpt", "diloco", SMALL, 20, 4, 1.0),
}


class Setting:
    """What both sides are given."""

    def __init__(self, case: Case, quick: bool) -> None:
        workload = WORKLOADS[case.workload]
        self.case = case
        self.model = workload.model()
        self.data = TensorDataset(*workload.data(EXAMPLES[0]))
        self.val_data = TensorDataset(*workload.data(EXAMPLES[1], seed=1))
        self.grid = {name: values[:1] for name, values in case.grid.items()} | {"seed": [0, 1]} if quick else case.grid
        self.common: dict[str, Any] = {"batch_size": workload.batch_size, "max_steps": 4 if quick else case.max_steps,
                       "device": "cpu", "progress": False}  # fmt: skip

    def sweep(self) -> tuple[float, SweepResult]:
        """Seconds of the sweep, and what it found."""
        make = STRATEGIES[self.case.strategy]
        start = time.perf_counter()
        result = sweep(self.model, self.data, self.val_data, strategy=make, grid=self.grid, num_nodes=K, **self.common)
        return time.perf_counter() - start, result

    def fits(self, rows: list[dict[str, Any]]) -> tuple[float, list[float]]:
        """Seconds of a fit of each of these rows, and their last validation losses."""
        make = STRATEGIES[self.case.strategy]
        losses = []
        start = time.perf_counter()
        for row in rows:
            trainer = Trainer(self.model, self.data, self.val_data)
            strategy = make(row["H"], row["lr"], row["outer_lr"])
            trainer.fit(strategy, K, seed=row["seed"], **self.common)
            losses.append(trainer.history.last("val_loss"))
        return time.perf_counter() - start, losses


def measure(case: Case, repeats: int, quick: bool) -> dict[str, Any]:
    """Seconds of the sweep and of the fits, and how far their losses are apart."""
    setting = Setting(case, quick)
    swept, fitted, gaps = [], [], []
    explained = ""
    for repeat in range(repeats + 1):  # the first round is not measured
        seconds, result = setting.sweep()
        explained = result.explain()
        rows = result.rows
        some = rows[:: max(1, len(rows) // case.fitted)]
        alone, losses = setting.fits(some)
        gaps += [abs(row["val_loss"] - loss) / loss for row, loss in zip(some, losses)]
        if repeat > 0:
            swept.append(seconds)
            fitted.append(alone * len(rows) / len(some))
    return {
        "num_configs": len(rows),
        "steps": setting.common["max_steps"],
        "sweep_s": statistics.median(swept),
        "fits_s": statistics.median(fitted),
        "ratio": statistics.median(fitted) / statistics.median(swept),
        "val_loss_gap": max(gaps),
        "explained": explained,
    }


def report(results: dict[str, dict[str, Any]]) -> str:
    rows = [
        [name, CASES[name].strategy, str(found["num_configs"]), str(found["steps"]), f"{found['sweep_s']:.2f}",
         f"{found['fits_s']:.2f}", f"{found['ratio']:.2f}", f">= {CASES[name].target:g}",
         "yes" if found["ratio"] >= CASES[name].target else "**no**", f"{found['val_loss_gap']:.1e}"]
        for name, found in results.items()
    ]  # fmt: skip
    columns = ["case", "strategy", "C", "steps", "sweep s", "fits s", "fits / sweep", "target", "met", "val loss gap"]
    return "\n\n".join([markdown(columns, rows), *[found["explained"] for found in results.values()]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME",
                        help=f"any of {', '.join(map(repr, CASES))}; default: all")  # fmt: skip
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default 2)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--quick", action="store_true", help="two configurations, four steps: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore", VecgymWarning)  # short runs, in which a large H never exchanges
    print(header(), flush=True)
    results = {}
    for name in args.cases:
        results[name] = measure(CASES[name], 1 if args.quick else args.repeats, args.quick)
        print(f"{name} done: {results[name]['ratio']:.2f}", flush=True)
        if args.json:
            args.json.write_text(json.dumps({"machine": machine(), "cases": results}, indent=1))
    print("\n" + report(results))


if __name__ == "__main__":
    main()
