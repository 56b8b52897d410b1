"""Time and memory of a step as the number of nodes grows, and the time of a whole run.

Each row is a fresh process that takes blocks of 20 steps (one synchronisation of DiLoCo in each) with
`Simulation.step`: the median time per step, and the peak resident memory less what it was before the simulation
was made (so without Python, torch and the batch). The number of nodes grows until about `--memory` GB are used.

The whole run is timed from outside: from the start of `python` to the end of a script that trains the MLP
784-128-10 with DiLoCo on 16 nodes, batch 32, for 420 steps with `Trainer.fit`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from workloads import WORKLOADS, header, machine, markdown

NODES = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
H = 20
WHOLE_NODES, WHOLE_STEPS = 16, 420
WHOLE_TARGET_S, EXO_GYM_S = 5.0, 45.0
WHOLE = f"""
import sys
import torch
from torch.utils.data import TensorDataset
from workloads import WORKLOADS
from vecgym import Trainer
from vecgym.strategy import DiLoCoStrategy

torch.set_num_threads(int(sys.argv[2]))
mlp = WORKLOADS["mlp"]
trainer = Trainer(mlp.model(), TensorDataset(*mlp.data(20 * {WHOLE_NODES} * mlp.batch_size)))
strategy = DiLoCoStrategy("adamw", H={H}, lr=1e-3)
trainer.fit(strategy, {WHOLE_NODES}, batch_size=mlp.batch_size, max_steps=int(sys.argv[1]), device="cpu")
"""


def peak_bytes() -> int:
    """The most resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def measure_here(name: str, strategy_name: str, num_nodes: int, threads: int, repeats: int) -> dict[str, float]:
    """Seconds per step and peak bytes of one configuration, in this process."""
    from vecgym.collectives import StackedCollectives
    from vecgym.engine import Engine
    from vecgym.engine.simulation import Simulation
    from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy

    torch.set_num_threads(threads)
    first = WORKLOADS["tiny"]
    Engine(first.model()).prepare(first.batch(2))  # torch imports much of itself when it is first used
    workload = WORKLOADS[name]
    model, batch = workload.model(), workload.batch(num_nodes)
    before = peak_bytes()
    engine = Engine(model)
    engine.prepare(batch)
    strategy = AllReduceStrategy() if strategy_name == "allreduce" else DiLoCoStrategy(H=H)
    simulation = Simulation(model, strategy, StackedCollectives(num_nodes), engine=engine)
    state = simulation.init()
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        for _ in range(H):
            state, _ = simulation.step(state, batch)
        seconds.append((time.perf_counter() - start) / H)
    engine.close()
    return {"seconds": statistics.median(seconds[1:]), "peak_bytes": peak_bytes() - before}


def measure(name: str, strategy: str, num_nodes: int, threads: int, repeats: int) -> dict[str, float]:
    """The same in a fresh process."""
    numbers = [str(x) for x in (num_nodes, threads, repeats)]
    command = [sys.executable, __file__, "--one", name, strategy, *numbers]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=900).stdout)


def scale(name: str, strategy: str, nodes: list[int], args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per number of nodes, until the next one would take more than the memory allowed."""
    rows: list[dict[str, Any]] = []
    for i, num_nodes in enumerate(nodes):
        row = {"num_nodes": num_nodes, **measure(name, strategy, num_nodes, args.threads, args.repeats)}
        rows.append(row)
        if i + 1 < len(nodes) and row["peak_bytes"] * nodes[i + 1] / num_nodes > args.memory * 1e9:
            break
    return rows


def whole_seconds(threads: int, num_steps: int) -> float:
    """From the start of `python` to the end of a run."""
    command = [sys.executable, "-c", WHOLE, str(num_steps), str(threads)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=environment, timeout=900)
    return time.perf_counter() - start


def report(scaling: dict[str, list[dict[str, Any]]], whole: list[float], num_steps: int) -> str:
    """One table per workload and strategy, then the whole run."""
    parts = []
    for title, found in scaling.items():
        rows = [
            [
                str(row["num_nodes"]),
                f"{1e3 * row['seconds']:.2f}",
                f"{1e6 * row['seconds'] / row['num_nodes']:.1f}",
                f"{row['peak_bytes'] / 1e6:.0f}",
                f"{row['peak_bytes'] / 1e6 / row['num_nodes']:.2f}",
            ]
            for row in found
        ]
        parts.append(f"{title}\n\n" + markdown(["K", "ms / step", "us / node", "peak MB", "MB / node"], rows))
    seconds = statistics.median(whole)
    row = [f"{num_steps} steps, MLP, {WHOLE_NODES} nodes", f"< {WHOLE_TARGET_S:g} s (EXO Gym {EXO_GYM_S:g} s)"]
    table = [[*row, f"{seconds:.2f} s", "yes" if seconds < WHOLE_TARGET_S else "**no**"]]
    parts.append(markdown(["from the start of python to the end", "target", "measured", "met"], table))
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=["tiny", "mlp"], choices=list(WORKLOADS), metavar="NAME",
                        help=f"any of {', '.join(WORKLOADS)}; default: tiny mlp")  # fmt: skip
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default 2)")
    parser.add_argument("--repeats", type=int, default=5, help="blocks of 20 steps (default 5)")
    parser.add_argument("--memory", type=float, default=4.0, help="GB that a row may take (default 4)")
    parser.add_argument("--quick", action="store_true", help="one small row and a short run: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        name, strategy, *numbers = args.one
        print(json.dumps(measure_here(name, strategy, *map(int, numbers))))
        return

    torch.set_num_threads(args.threads)
    print(header(), flush=True)
    nodes, strategies, num_steps, runs = NODES, ["diloco", "allreduce"], WHOLE_STEPS, 3
    if args.quick:
        nodes, strategies, num_steps, runs, args.repeats = [4], ["diloco"], H, 1, 1
    scaling = {f"{name}, {s}": scale(name, s, nodes, args) for name in args.workloads for s in strategies}
    whole = [whole_seconds(args.threads, num_steps) for _ in range(runs)]
    print("\n" + report(scaling, whole, num_steps))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "scaling": scaling, "whole_s": whole}, indent=1))


if __name__ == "__main__":
    main()
