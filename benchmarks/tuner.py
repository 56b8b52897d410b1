"""A tuner that asks for many trials, has them trained as one stack and tells all results, against one trial at a time.

Optuna's sampler (TPE) looks for the learning rates and the period of DiLoCo on 8 nodes with a tiny MLP: 96 trials, in
rounds of 32 or one by one. One by one, each trial knows the results of all before it; of a stack, those of the rounds
before. What the sampler takes counts. A trial that diverges is a failed one. Each side is in a process of its own, and
they take turns; the ratio is that of the medians. It takes about two minutes, and needs Optuna: pip install optuna.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset
from turns import serve, take_turns
from workloads import header, machine, markdown

from vecgym import Trainer, sweep
from vecgym.core.errors import DivergenceError, VecgymWarning
from vecgym.models import Classifier
from vecgym.strategy import DiLoCoStrategy

SIDES = ("stacked", "one by one")


class Tuning:
    """The task of both sides: a study of so many trials, asked for in rounds of so many."""

    def __init__(self, quick: bool) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.optuna, self.failed = optuna, optuna.trial.TrialState.FAIL
        self.trials, self.at_once = (4, 2) if quick else (96, 32)
        x = torch.randn(1280, 16, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(x, x[:, :4].argmax(1))
        self.data = torch.utils.data.Subset(data, range(1024)), torch.utils.data.Subset(data, range(1024, 1280))
        torch.manual_seed(0)
        self.model = Classifier(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
        self.common: dict[str, Any] = {
            "num_nodes": 8, "max_steps": 4 if quick else 300, "batch_size": 8, "device": "cpu", "progress": False,
        }  # fmt: skip

    @staticmethod
    def point(trial: Any) -> dict[str, Any]:
        """The configuration of a trial; the largest learning rates diverge."""
        return {
            "lr": trial.suggest_float("lr", 1e-3, 1e3, log=True),
            "outer_lr": trial.suggest_float("outer_lr", 0.1, 2.0),
            "H": trial.suggest_int("H", 2, 50),
        }

    @staticmethod
    def strategy(lr: float, outer_lr: float, H: int) -> DiLoCoStrategy:
        return DiLoCoStrategy("sgd", H=H, lr=lr, outer_lr=outer_lr)

    def study(self, side: str) -> dict[str, Any]:
        """Seconds of a study, its best loss, and how many of its trials have failed."""
        study = self.optuna.create_study(sampler=self.optuna.samplers.TPESampler(seed=0))
        start = time.perf_counter()
        while len(study.trials) < self.trials:
            (self.round if side == SIDES[0] else self.one)(study)
        seconds = time.perf_counter() - start
        states = [trial.state for trial in study.trials]
        return {
            "seconds": seconds,
            "best": study.best_value,
            "failed": states.count(self.failed),
            "trials": len(states),
        }

    def round(self, study: Any) -> None:
        """Ask for a round, train it as a stack, and tell all results."""
        trials = [study.ask() for _ in range(self.at_once)]
        points = [self.point(trial) for trial in trials]
        result = sweep(self.model, *self.data, strategy=self.strategy, points=points, **self.common)
        for trial, row in zip(trials, result.rows):
            if row["status"] == "finished":
                study.tell(trial, row["val_loss"])
            else:
                study.tell(trial, state=self.failed)

    def one(self, study: Any) -> None:
        """Ask for one trial, train it, and tell its result."""
        trial, trainer = study.ask(), Trainer(self.model, *self.data)
        try:
            trainer.fit(self.strategy(**self.point(trial)), **self.common)
            study.tell(trial, trainer.history.last("val_loss"))
        except DivergenceError:
            study.tell(trial, state=self.failed)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The figures of both sides, and the ratio of their medians."""
    quick = ["--quick"] if args.quick else []
    commands = {side: [str(Path(__file__).resolve()), "--serve", side, *quick] for side in SIDES}
    turns = take_turns(commands, 0 if args.quick else None, args.threads, rounds=(args.repeats, args.repeats))
    last = {side: {**turns.figures[side][-1], "seconds": turns.median(side)} for side in SIDES}
    return {"sides": last, "ratio": last[SIDES[1]]["seconds"] / last[SIDES[0]]["seconds"], "notes": turns.notes()}


def report(found: dict[str, Any]) -> str:
    rows = [
        [side, str(one["trials"]), str(one["failed"]), f"{one['seconds']:.2f}", f"{one['best']:.4f}"]
        for side, one in found["sides"].items()
    ]
    table = markdown(["trials are trained", "trials", "of them failed", "seconds", "best val loss"], rows)
    return f"{table}\n\none by one / stacked: {found['ratio']:.1f}\n- {found['notes']}"


def main() -> None:
    warnings.simplefilter("ignore", VecgymWarning)
    if sys.argv[1:2] == ["--serve"]:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        tuning = Tuning(quick="--quick" in sys.argv)
        return serve(lambda: tuning.study(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default 2)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of both sides (default 3)")
    parser.add_argument("--quick", action="store_true", help="four trials of four steps: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    print(header(), flush=True)
    found = measure(args)
    print("\n" + report(found))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), **found}, indent=1))


if __name__ == "__main__":
    main()
