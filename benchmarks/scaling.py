"""Time and memory of a step as the number of nodes grows, and the time of a whole run.

Each row is a fresh process that takes blocks of `--H` steps (one synchronisation of DiLoCo in each) with
`Simulation.step`: the median time per step, the processor time of it (which says more on a busy machine), and the peak
resident memory less what it was before the simulation was made, plus the batch: so without Python and torch. Beside it
the estimate of `vecgym.estimate_memory`. The number of nodes grows until about `--memory` GB are used.

The whole run is timed from outside: from the start of `python` to the end of a script that trains the MLP
784-128-10 with DiLoCo on 16 nodes, batch 32, for 420 steps with `Trainer.fit`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from memory import Peak, observe
from workloads import WORKLOADS, Workload, header, machine, markdown

NODES = {"tiny": [1, 10, 100, 1000, 10_000], "mlp": [2, 20, 200, 2000]}
OTHER_NODES = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
COLUMNS = ["K", "ms / step", "CPU ms / step", "CPU us / node", "peak MB", "MB / node", "estimated MB"]
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


def measure_here(name: str, strategy_name: str, num_nodes: int, threads: int, repeats: int, H: int) -> dict[str, float]:
    """Seconds per step, peak and estimated bytes of one configuration, in this process."""
    from vecgym import estimate_memory
    from vecgym.collectives import StackedCollectives
    from vecgym.engine import Engine
    from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy
    from vecgym.strategy.simulated import simulation_of

    def make_strategy() -> Any:
        return AllReduceStrategy() if strategy_name == "allreduce" else DiLoCoStrategy(H=H)

    def take(workload: Workload, num_nodes: int, blocks: int) -> tuple[list[float], list[float], int]:
        model, batch = workload.model(), workload.batch(num_nodes)
        peak = Peak(torch.device("cpu"))
        engine = Engine(model)
        engine.prepare(batch, mean=strategy_name == "allreduce")
        simulation = simulation_of(
            model, make_strategy(), StackedCollectives(num_nodes), engine=engine, max_steps=10**6
        )
        state = simulation.init()
        wall, cpu = [], []
        for _ in range(blocks):
            start = time.perf_counter(), time.process_time()
            for _ in range(H):
                state, _ = simulation.step(state, batch)
            wall.append((time.perf_counter() - start[0]) / H)
            cpu.append((time.process_time() - start[1]) / H)
        state, _ = simulation.step(state, batch, before=observe)  # the peak of a run that evaluates; not timed
        engine.close()
        return wall, cpu, peak.bytes() + sum(x.nbytes for x in batch)

    torch.set_num_threads(threads)
    take(WORKLOADS["tiny"], 2, blocks=1)  # torch imports much of itself when it is first used
    workload = WORKLOADS[name]
    wall, cpu, peak_bytes = take(workload, num_nodes, repeats + 1)
    one = tuple(x[0] for x in workload.batch(1))
    estimate = estimate_memory(workload.model(), make_strategy(), num_nodes, workload.batch_size, one)
    return {
        "seconds": statistics.median(wall[1:]), "cpu_seconds": statistics.median(cpu[1:]),
        "peak_bytes": peak_bytes, "estimated_bytes": estimate.total_bytes,
    }  # fmt: skip


def measure(name: str, strategy: str, num_nodes: int, threads: int, repeats: int, H: int) -> dict[str, float]:
    """The same in a fresh process."""
    numbers = [str(x) for x in (num_nodes, threads, repeats, H)]
    command = [sys.executable, __file__, "--one", name, strategy, *numbers]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=900).stdout)


def scale(name: str, strategy: str, nodes: list[int], args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per number of nodes, until the next one would take more than the memory allowed."""
    rows: list[dict[str, Any]] = []
    for i, num_nodes in enumerate(nodes):
        found = measure(name, strategy, num_nodes, args.threads, args.repeats, args.H)
        row = {"num_nodes": num_nodes, **found}
        rows.append(row)
        if i + 1 < len(nodes) and row["peak_bytes"] * nodes[i + 1] / num_nodes > args.memory * 1e9:
            break
    return rows


def whole_seconds(threads: int, num_steps: int, runs: int) -> list[float]:
    """From the start of `python` to the end of a run, each time; modules are compiled, as after a first run."""
    command = [sys.executable, "-c", WHOLE, str(num_steps), str(threads)]
    seconds = []
    with tempfile.TemporaryDirectory() as compiled:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PYTHONPYCACHEPREFIX": compiled}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for _ in range(runs + 1):  # the first one compiles
            start = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True, env=environment, timeout=900)
            seconds.append(time.perf_counter() - start)
    return seconds[1:]


def report(scaling: dict[str, list[dict[str, Any]]], whole: list[float], num_steps: int) -> str:
    """One table per workload and strategy, then the whole run."""
    parts = []
    for title, found in scaling.items():
        rows = [
            [
                str(row["num_nodes"]),
                f"{1e3 * row['seconds']:.2f}",
                f"{1e3 * row['cpu_seconds']:.2f}",
                f"{1e6 * row['cpu_seconds'] / row['num_nodes']:.1f}",
                f"{row['peak_bytes'] / 1e6:.0f}",
                f"{row['peak_bytes'] / 1e6 / row['num_nodes']:.2f}",
                f"{row['estimated_bytes'] / 1e6:.0f}",
            ]
            for row in found
        ]
        parts.append(f"{title}\n\n" + markdown(COLUMNS, rows))
    seconds = statistics.median(whole)
    row = [f"{num_steps} steps, MLP, {WHOLE_NODES} nodes", f"< {WHOLE_TARGET_S:g} s (EXO Gym {EXO_GYM_S:g} s)"]
    table = [[*row, f"{seconds:.2f} s", "yes" if seconds < WHOLE_TARGET_S else "**no**"]]
    parts.append(markdown(["from the start of python to the end", "target", "measured", "met"], table))
    return "\n\n".join(parts)


def draw(scaling: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Time and memory against K, both axes logarithmic; the estimate of the memory as a dashed line."""
    from figures import WIDTH, save
    from matplotlib.figure import Figure

    from vecgym.plot.style import COLOURS, MARKERS

    figure = Figure(layout="constrained")
    left, right = figure.subplots(1, 2)
    for (title, rows), colour, marker in zip(scaling.items(), COLOURS, MARKERS):
        K = [row["num_nodes"] for row in rows]
        style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1.2}
        left.plot(K, [1e3 * row["cpu_seconds"] for row in rows], label=title, **style)
        right.plot(K, [row["peak_bytes"] / 1e6 for row in rows], **style)
        right.plot(K, [row["estimated_bytes"] / 1e6 for row in rows], color=colour, linewidth=1.2, linestyle="--")
    right.plot([], [], color="0.3", linewidth=1.2, linestyle="--", label="estimate_memory")
    left.set(title="Processor time of a step", ylabel="ms")
    right.set(title="Memory at the peak", ylabel="MB")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="nodes K")
        axes.grid(True, color="0.9", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="upper left")
    save(path, [(figure, (WIDTH, 380))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=["tiny", "mlp"], choices=list(WORKLOADS), metavar="NAME",
                        help=f"any of {', '.join(WORKLOADS)}; default: tiny mlp")  # fmt: skip
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default 2)")
    parser.add_argument("--repeats", type=int, default=5, help="blocks of steps (default 5)")
    parser.add_argument("--H", type=int, default=H, help="steps of a block (default 20)")
    parser.add_argument("--memory", type=float, default=6.0, help="GB that a row may take (default 6)")
    parser.add_argument("--quick", action="store_true", help="one small row and a short run: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw time and memory against K there (PNG)")
    parser.add_argument("--one", nargs=6, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        name, strategy, *numbers = args.one
        print(json.dumps(measure_here(name, strategy, *map(int, numbers))))
        return

    torch.set_num_threads(args.threads)
    print(header(), flush=True)
    strategies, num_steps, runs = ["diloco", "allreduce"], WHOLE_STEPS, 3
    nodes = {name: NODES.get(name, OTHER_NODES) for name in args.workloads}
    if args.quick:
        nodes, strategies = {name: [4, 8] for name in nodes}, ["diloco"]
        num_steps, runs, args.repeats = H, 1, 1
    scaling = {f"{name}, {s}": scale(name, s, nodes[name], args) for name in args.workloads for s in strategies}
    whole = whole_seconds(args.threads, num_steps, runs)
    print("\n" + report(scaling, whole, num_steps))
    if args.figure:
        draw(scaling, args.figure)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "scaling": scaling, "whole_s": whole}, indent=1))


if __name__ == "__main__":
    main()
