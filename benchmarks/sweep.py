"""A sweep in one program against `Trainer.fit` of every configuration, one after the other.

Both train the same configurations of the same workload; set-up, evaluation and recording count. Each is in a process of
its own, and they take turns (sweep, fits, fits, sweep ...); the ratio is that of the medians over the rounds. A few
configurations are fitted alone where all of them would take long, and their time is multiplied. `--stacks 1 8` measures
the sweep in stacks of 1 and of 8 configurations, too. DiLoCo of a network with one hidden layer is also trained by
`by_hand.py`, a loop without a library, as the limit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from by_hand import Sweep as ByHand
from torch.utils.data import TensorDataset
from turns import serve, take_turns
from workloads import WORKLOADS, header, machine, markdown

from vecgym import Trainer, sweep
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


HUNDREDS: dict[str, list[Any]] = {
    "H": [2, 5, 10, 25, 50], "lr": [10 ** (-4 + i / 7) for i in range(15)], "outer_lr": [0.3, 0.5, 0.7, 0.9],
    "seed": [0, 1],
}  # fmt: skip  # 600 configurations

CASES = {
    "600 runs": Case("tiny", "diloco", HUNDREDS, 50, 6, 18.0),
    "tiny": Case("tiny", "diloco", GRID, 300, 4, 18.0),
    "tiny fedavg": Case("tiny", "fedavg", GRID, 300, 4, 1.0),
    "tiny allreduce": Case("tiny", "allreduce", GRID, 300, 4, 1.0),
    "tiny sparta": Case("tiny", "sparta", GRID, 300, 4, 1.0),
    "mlp": Case("mlp", "diloco", GRID, 100, 4, 1.5),
    "mlp allreduce": Case("mlp", "allreduce", GRID, 100, 4, 1.0),
    "gpt": Case("gpt", "diloco", SMALL, 20, 4, 1.0),
}


class Setting:
    """The common settings of both sides."""

    def __init__(self, case: Case, quick: bool) -> None:
        workload = WORKLOADS[case.workload]
        self.case = case
        self.model = workload.model()
        self.data = TensorDataset(*workload.data(EXAMPLES[0]))
        self.val_data = TensorDataset(*workload.data(EXAMPLES[1], seed=1))
        self.grid = {name: values[:1] for name, values in case.grid.items()} | {"seed": [0, 1]} if quick else case.grid
        self.common: dict[str, Any] = {"batch_size": workload.batch_size, "max_steps": 4 if quick else case.max_steps,
                       "device": "cpu", "progress": False}  # fmt: skip

    @property
    def configs(self) -> list[dict[str, Any]]:
        """The values of every configuration, in the order of the sweep's rows."""
        return [dict(zip(self.grid, values)) for values in itertools.product(*self.grid.values())]

    def sweep(self, stack: int | None = None) -> dict[str, Any]:
        """Seconds of the sweep, what was trained how, and the last validation losses."""
        make = STRATEGIES[self.case.strategy]
        start = time.perf_counter()
        result = sweep(self.model, self.data, self.val_data, strategy=make, grid=self.grid, num_nodes=K,
                       chunk_configs=stack, **self.common)  # fmt: skip
        seconds = time.perf_counter() - start
        found = [{name: row[name] for name in (*self.grid, "val_loss")} for row in result.rows]
        return {"seconds": seconds, "found": found, "explained": result.explain()}

    def by_hand(self) -> dict[str, Any]:
        """Seconds of a loop without a library, and the last validation losses."""
        start = time.perf_counter()
        common = self.common
        loop = ByHand(self.configs, self.model, self.data, self.val_data, K, common["batch_size"])
        losses = loop.train(common["max_steps"])
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "found": [{**c, "val_loss": losses[i]} for i, c in enumerate(self.configs)]}

    def fits(self) -> dict[str, Any]:
        """Seconds that fits of all configurations take, by those of a few, and their last validation losses."""
        make, configs = STRATEGIES[self.case.strategy], self.configs
        some = configs[:: max(1, len(configs) // self.case.fitted)]
        found = []
        start = time.perf_counter()
        for config in some:
            trainer = Trainer(self.model, self.data, self.val_data)
            strategy = make(config["H"], config["lr"], config["outer_lr"])
            trainer.fit(strategy, K, seed=config["seed"], **self.common)
            found.append({**config, "val_loss": trainer.history.last("val_loss")})
        return {"seconds": (time.perf_counter() - start) * len(configs) / len(some), "found": found}


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the sweep and of the fits, and how far their losses are apart."""
    quick = ["--quick"] if args.quick else []
    by_hand = ["by hand"] if (CASES[name].workload, CASES[name].strategy) == ("tiny", "diloco") else []
    sides = ["sweep", "fits", *by_hand, *[f"stacks of {size}" for size in args.stacks]]
    commands = {side: [str(Path(__file__).resolve()), "--serve", side, name, *quick] for side in sides}
    rounds = args.repeats, args.repeats
    turns = take_turns(commands, 0 if args.quick else None, args.threads, rounds=rounds)
    swept, fitted = (turns.figures[side][-1]["found"] for side in ("sweep", "fits"))
    setting = Setting(CASES[name], args.quick)
    assert [{**row, "val_loss": 0} for row in swept] == [{**config, "val_loss": 0} for config in setting.configs]
    losses = {tuple(row[name] for name in setting.grid): row["val_loss"] for row in swept}
    others = [row for side in by_hand for row in turns.figures[side][-1]["found"]]
    gaps = [
        abs(losses[tuple(row[name] for name in setting.grid)] - row["val_loss"]) / row["val_loss"]
        for row in [*fitted, *others]
    ]
    return {
        "num_configs": len(swept),
        "steps": setting.common["max_steps"],
        "sweep_s": turns.median("sweep"),
        "fits_s": turns.median("fits"),
        "by_hand_s": turns.median("by hand") if by_hand else None,
        "ratio": turns.median("fits") / turns.median("sweep"),
        "val_loss_gap": max(gaps),
        "explained": turns.figures["sweep"][-1]["explained"],
        "stacks_s": {side: turns.median(side) for side in sides[2 + len(by_hand) :]},
        "notes": turns.notes(),
    }


def hand(found: dict[str, Any]) -> str:
    """Return the seconds of the loop by hand, and how many times that the sweep takes."""
    seconds = found["by_hand_s"]
    return "" if seconds is None else f"{seconds:.2f} (sweep {found['sweep_s'] / seconds:.1f} x)"


def report(results: dict[str, dict[str, Any]]) -> str:
    rows = [
        [name, CASES[name].strategy, str(found["num_configs"]), str(found["steps"]), f"{found['sweep_s']:.2f}",
         f"{found['fits_s']:.2f}", f"{found['ratio']:.2f}", f">= {CASES[name].target:g}",
         "yes" if found["ratio"] >= CASES[name].target else "**no**", f"{found['val_loss_gap']:.1e}",
         hand(found)]
        for name, found in results.items()
    ]  # fmt: skip
    columns = ["case", "strategy", "C", "steps", "sweep s", "fits s", "fits / sweep", "target", "met", "val loss gap",
               "by hand s"]  # fmt: skip
    notes = "\n".join(f"- {name}: {found['notes']}" for name, found in results.items())
    return "\n\n".join([markdown(columns, rows), notes, *[found["explained"] for found in results.values()]])


def main() -> None:
    warnings.simplefilter("ignore", VecgymWarning)  # short runs, in which a large H never exchanges
    if sys.argv[1:2] == ["--serve"]:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        setting = Setting(CASES[sys.argv[3]], quick="--quick" in sys.argv)
        side, _, stack = sys.argv[2].partition(" of ")
        if side == "by hand":
            return serve(setting.by_hand)
        return serve(setting.fits if side == "fits" else lambda: setting.sweep(int(stack) if stack else None))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME",
                        help=f"any of {', '.join(map(repr, CASES))}; default: all")  # fmt: skip
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default 2)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--stacks", nargs="+", type=int, default=[], metavar="N", help="sizes of stacks to measure too")
    parser.add_argument("--quick", action="store_true", help="two configurations, four steps: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    print(header(), flush=True)
    results = {}
    for name in args.cases:
        results[name] = measure(name, args)
        print(f"{name} done: {results[name]['ratio']:.2f}; {results[name]['notes']}", flush=True)
        for side, seconds in results[name]["stacks_s"].items():
            print(f"  {side}: {seconds:.2f} s, fits / this {results[name]['fits_s'] / seconds:.2f}", flush=True)
        if args.json:
            args.json.write_text(json.dumps({"machine": machine(), "cases": results}, indent=1))
    print("\n" + report(results))


if __name__ == "__main__":
    main()
