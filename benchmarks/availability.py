"""The cost of nodes that may be absent: runs in which a tenth of them is, against runs of those that are present.

Each alternative is a process of its own that makes blocks of steps of whole `Trainer.fit`s; they take turns.

- without: K nodes, no `availability`.
- all present: K nodes, `Trace` of ones: what looking who is there costs.
- a tenth absent: K nodes, `Sampled(0.9, H)`, which are others in each round, or in each step for AllReduce.
- fewer: a run of 0.9 K nodes without `availability`: the arithmetic of those present, which a tenth absent is
  compared with.

    python benchmarks/availability.py --seconds 60
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset
from turns import serve, take_turns
from workloads import WORKLOADS, Workload, header, machine, markdown

H = 20
TARGET = 1.2  # a tenth absent / fewer
ALL_PRESENT = 1.01
ALTERNATIVES = ("without", "all present", "a tenth absent", "fewer")
STRATEGIES = ("diloco", "allreduce")
BLOCKS = {"tiny": 6, "mlp": 4, "cnn": 2, "gpt": 2, "gpt256": 2}  # of H steps, the first of which is not measured


def serve_fit(workload: Workload, num_nodes: int, strategy: str, alternative: str, steps: int) -> None:
    """Whole fits; the time per step from the end of the first round to that of the last."""
    from vecgym import Trainer
    from vecgym.availability import Sampled, Trace
    from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy

    class Timed(Trainer):
        def after_step(self, row: dict[str, Any]) -> None:
            if row["step"] in marks:
                marks[row["step"]] = time.perf_counter(), time.process_time()

    K = max(1, round(0.9 * num_nodes)) if alternative == "fewer" else num_nodes
    rounds = H if strategy == "diloco" else 1
    availability = {
        "all present": Trace(torch.ones(steps, K, dtype=torch.bool)),
        "a tenth absent": Sampled(0.9, rounds),
    }.get(alternative)
    marks = dict.fromkeys((H, steps), (0.0, 0.0))
    trainer = Timed(workload.model(), TensorDataset(*workload.data(num_nodes * workload.batch_size * 20)))

    def work() -> dict[str, float]:
        made = DiLoCoStrategy("adamw", H=H, lr=1e-3) if strategy == "diloco" else AllReduceStrategy("adamw", lr=1e-3)
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            trainer.fit(
                made, K, max_steps=steps, batch_size=workload.batch_size, device="cpu", availability=availability
            )  # fmt: skip
        (start, cpu), (end, cpu_end) = marks[H], marks[steps]
        return {"seconds": (end - start) / (steps - H), "cpu_per_step": (cpu_end - cpu) / (steps - H)}

    serve(work)


def measure(name: str, strategy: str, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds per step of each alternative, and the ratios."""
    num_nodes = 4 if args.quick else WORKLOADS[name].num_nodes
    steps = H * (2 if args.quick else BLOCKS[name])
    here = str(Path(__file__).resolve())
    commands = {
        each: [here, "--serve", name, str(num_nodes), strategy, each, str(steps)] for each in ALTERNATIVES
    }  # fmt: skip
    turns = take_turns(commands, 0 if args.quick else args.seconds, args.threads)
    ms = {each: 1e3 * turns.median(each) for each in ALTERNATIVES}
    return {
        "num_nodes": num_nodes,
        "ms": ms,
        "all present / without": ms["all present"] / ms["without"],
        "a tenth absent / fewer": ms["a tenth absent"] / ms["fewer"],
        "notes": turns.notes(),
    }


def report(results: dict[str, dict[str, Any]]) -> str:
    rows = [
        [
            f"{name}, K={x['num_nodes']}",
            *[f"{x['ms'][each]:.2f}" for each in ALTERNATIVES],
            f"{x['all present / without']:.2f}",
            f"{x['a tenth absent / fewer']:.2f}",
        ]
        for name, x in results.items()
    ]
    ratios = [f"all present / without (at most {ALL_PRESENT})", f"a tenth absent / fewer (at most {TARGET})"]
    notes = "\n".join(f"- {name}: {x['notes']}" for name, x in results.items())
    return markdown(["ms per step", *ALTERNATIVES, *ratios], rows) + "\n\n" + notes


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        name, num_nodes, strategy, alternative, steps = sys.argv[2:]
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        return serve_fit(WORKLOADS[name], int(num_nodes), strategy, alternative, int(steps))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=["tiny", "mlp", "gpt"], choices=list(WORKLOADS))
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default 2)")
    parser.add_argument("--seconds", type=float, default=60, help="about how long for each row (default 60)")
    parser.add_argument("--quick", action="store_true", help="few nodes, one round: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    args = parser.parse_args()
    print(header(), flush=True)
    results: dict[str, dict[str, Any]] = {}
    for name in args.workloads[:1] if args.quick else args.workloads:
        for strategy in STRATEGIES:
            results[f"{name}, {strategy}"] = measure(name, strategy, args)
            if args.json:
                args.json.write_text(json.dumps({"machine": machine(), "rows": results}, indent=1))
    print("\n" + report(results))


if __name__ == "__main__":
    main()
