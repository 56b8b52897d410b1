"""vecgym against EXO Gym itself: the same training through both trainers, in fresh processes that take turns.

    python benchmarks/against_exogym.py --exogym PATH    # a checkout of github.com/exo-explore/gym, at 9fa323c say

DiLoCo (H = 20, AdamW inside) on 16 nodes through `Trainer.fit`, data loading and logging included. EXO Gym starts one
process per node, with one torch thread each; vecgym is one process with `--threads`. "First step" is the time from
starting python to the end of the first step; "ms per step" is the mean over the other steps, all nodes together; both
are medians over the rounds, in each of which both sides train anew. With
more nodes than cores EXO Gym's processes share the cores, as they do when one tries out an idea on one machine. What
it needs (wandb and so on) must be installed. It names macOS's network interface; here that is Linux's in a copy of it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset
from turns import serve, take_turns
from workloads import WORKLOADS, header, machine, markdown

try:
    from exogym.strategy.diloco import DiLoCoStrategy as TheirDiLoCo
except ImportError:
    TheirDiLoCo = object

H = 20
LR = 1e-3
FIGURES = ("first_step_s", "step_s")


class Clock:
    """Writes down when the first and the last step have ended."""

    def __init__(self, file: str, num_steps: int) -> None:
        self.file, self.num_steps = file, num_steps
        self.done, self.first = 0, 0.0

    def tick(self) -> None:
        self.done += 1
        if self.done == 1:
            self.first = time.time()
        if self.done == self.num_steps:
            found = {"first": self.first, "step_s": (time.time() - self.first) / (self.num_steps - 1)}
            Path(self.file).write_text(json.dumps(found))


class Timed(TheirDiLoCo):
    """At the top of the module, where EXO Gym's processes look it up."""

    clock: Clock

    def step(self) -> None:
        super().step()
        if self.rank == 0:
            self.clock.tick()


def train_exogym(name: str, num_nodes: int, num_steps: int, file: str) -> None:
    """With EXO Gym, which must be importable."""
    from exogym.strategy.optim import OptimSpec
    from exogym.trainer import Trainer

    strategy = Timed(OptimSpec(torch.optim.AdamW, lr=LR), H=H)
    strategy.clock = Clock(file, num_steps)
    fit(Trainer, strategy, name, num_nodes, num_steps, minibatch=True)


def train_vecgym(name: str, num_nodes: int, num_steps: int, file: str) -> None:
    """With vecgym."""
    from vecgym import Logger, Trainer
    from vecgym.strategy import DiLoCoStrategy

    class Timed(Logger):
        """A row is handed on when the next step begins, and the last one at the end."""

        def log(self, row: dict[str, Any]) -> None:
            if row["step"] > 0:
                clock.tick()

    clock = Clock(file, num_steps)
    fit(Trainer, DiLoCoStrategy("adamw", H=H, lr=LR), name, num_nodes, num_steps, logger=Timed(), progress=False)


def fit(
    trainer: Callable[..., Any], strategy: Any, name: str, num_nodes: int, num_steps: int, minibatch: bool = False,
    **settings: Any,
) -> None:  # fmt: skip
    workload = WORKLOADS[name]
    data = TensorDataset(*workload.data(num_nodes * workload.batch_size * 8))
    if minibatch:  # EXO Gym's own name for a run, and its search for a micro-batch
        settings |= {"minibatch_size": workload.batch_size, "run_name": f"timed-{name}"}
    made = trainer(workload.model(), data, TensorDataset(*workload.data(32, seed=1)))
    made.fit(
        num_epochs=num_steps, strategy=strategy, num_nodes=num_nodes, max_steps=num_steps, val_size=32,
        batch_size=workload.batch_size, val_interval=10 * num_steps, device="cpu", **settings,
    )  # fmt: skip


def run(side: str, name: str, num_nodes: int, num_steps: int, threads: int, path: Path | None) -> dict[str, float]:
    """Seconds to the first step, and per step, of a fresh run."""
    with tempfile.TemporaryDirectory() as folder:
        places = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        if path is not None:
            places.insert(0, folder)
            shutil.copytree(path / "exogym", Path(folder, "exogym"))
            utils = Path(folder, "exogym", "utils.py")
            utils.write_text(utils.read_text().replace('"lo0"', '"lo"' if sys.platform == "linux" else '"lo0"'))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places)), "WANDB_MODE": "disabled"}
        environment["OMP_NUM_THREADS"] = str(threads if side == "vecgym" else 1)
        file = Path(folder, "found.json")
        command = [sys.executable, __file__, "--one", side, name, str(num_nodes), str(num_steps), str(file)]
        start = time.time()
        subprocess.run(command, check=True, cwd=folder, env=environment, timeout=900, stdout=subprocess.DEVNULL)
        found = json.loads(file.read_text())
    return {"first_step_s": found["first"] - start, "step_s": found["step_s"]}


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The medians of both sides, and what is to be said of them."""
    numbers = [str(x) for x in (args.num_nodes, args.steps, args.threads)]
    command = [str(Path(__file__).resolve()), "--serve", name, *numbers]
    commands = {"vecgym": [*command, "vecgym"]}
    if args.exogym:
        commands["exogym"] = [*command, "exogym", str(args.exogym.resolve())]
    rounds = args.repeats, args.repeats
    turns = take_turns(commands, 0 if args.quick else None, args.threads, rounds=rounds, warm_up=False)
    found = {side: {key: turns.median(side, key) for key in FIGURES} for side in commands}
    found.setdefault("exogym", dict.fromkeys(FIGURES, math.nan))
    return {"workload": name, "num_nodes": args.num_nodes, **found, "notes": turns.notes()}


def report(rows: list[dict[str, Any]]) -> str:
    cells = [
        [row["workload"], str(row["num_nodes"]), f"{row['exogym']['first_step_s']:.1f}",
         f"{row['vecgym']['first_step_s']:.1f}", f"{1e3 * row['exogym']['step_s']:.1f}",
         f"{1e3 * row['vecgym']['step_s']:.1f}", f"{row['exogym']['step_s'] / row['vecgym']['step_s']:.1f}"]
        for row in rows
    ]  # fmt: skip
    columns = ["workload", "K", "first step, s: EXO Gym", "vecgym", "ms / step: EXO Gym", "vecgym", "ratio"]
    return markdown(columns, cells)


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        name, num_nodes, num_steps, threads, side, *path = sys.argv[2:]
        of_run = (side, name, int(num_nodes), int(num_steps), int(threads), Path(path[0]) if path else None)
        return serve(lambda: run(*of_run))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exogym", type=Path, metavar="PATH", help="a checkout of EXO Gym; without: vecgym only")
    parser.add_argument("--workloads", nargs="+", default=["mlp", "cnn", "gpt"], choices=list(WORKLOADS),
                        metavar="NAME", help="any of tiny, mlp, cnn, gpt; default: mlp cnn gpt")  # fmt: skip
    parser.add_argument("--num-nodes", type=int, default=16, help="K (default 16)")
    parser.add_argument("--steps", type=int, default=60, help="steps of a run (default 60)")
    parser.add_argument("--threads", type=int, default=2, help="vecgym's threads (default 2); a process has one")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--quick", action="store_true", help="few steps of the tiny MLP on two nodes: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        side, name, num_nodes, num_steps, file = args.one
        train = {"exogym": train_exogym, "vecgym": train_vecgym}[side]
        train(name, int(num_nodes), int(num_steps), file)
        return
    if args.quick:
        args.workloads, args.num_nodes, args.steps = ["tiny"], 2, 3
    torch.set_num_threads(args.threads)
    print(header(), flush=True)
    rows = []
    for name in args.workloads:
        rows.append(measure(name, args))
        print(f"{name}: {rows[-1]['notes']}", flush=True)
    print("\n" + report(rows))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "runs": rows}, indent=1))


if __name__ == "__main__":
    main()
