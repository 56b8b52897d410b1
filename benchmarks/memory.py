"""How far off the estimate of memory is: `vecgym.estimate_memory` against the peak of a process that trains.

Each row is a fresh process that takes three steps with `Simulation.step`. Measured is its peak resident memory less
what it was just before the simulation was made, when model, batch and torch were there already, plus the batch; the
estimate is that of `vecgym.estimate_memory`, which counts tensors. On a GPU both are of the allocator.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from workloads import WORKLOADS, header, machine, markdown

STRATEGIES = ("allreduce", "diloco", "demo")
CASES = [
    ("tiny", 512, None), ("mlp", 16, None), ("mlp", 64, None), ("mlp", 64, 8), ("cnn", 16, None), ("cnn", 16, 2),
    ("gpt", 16, None), ("gpt", 16, 4),
]  # fmt: skip
QUICK = [("mlp", 8, None)]


def measure_here(name: str, strategy_name: str, num_nodes: int, chunk_size: int | None, device: str) -> dict[str, int]:
    """Estimated and measured bytes of one configuration, in this process."""
    from vecgym import estimate_memory
    from vecgym.collectives import StackedCollectives
    from vecgym.engine import Engine
    from vecgym.engine.simulation import Simulation
    from vecgym.runs.memory import peak_bytes
    from vecgym.strategy import AllReduceStrategy, DeMoStrategy, DiLoCoStrategy

    torch.set_num_threads(1)
    made: dict[str, Any] = {"allreduce": AllReduceStrategy, "diloco": lambda: DiLoCoStrategy(H=2), "demo": DeMoStrategy}
    workload, strategy, where = WORKLOADS[name], made[strategy_name](), torch.device(device)
    warm = WORKLOADS["tiny"]  # torch imports much of itself when it is first used
    Engine(warm.model()).prepare(warm.batch(2))
    x, y = workload.batch(num_nodes)
    one = x[0], y[0]
    estimate = estimate_memory(
        workload.model(), strategy, num_nodes, workload.batch_size, one, chunk_size=chunk_size, device=device
    )
    model, batch = workload.model().to(where), (x.to(where), y.to(where))
    batch_bytes = estimate.parts["batch"].total_bytes
    before = torch.cuda.memory_allocated() if where.type == "cuda" else current_bytes()
    engine = Engine(model, chunk_size=chunk_size)
    engine.prepare(batch)
    simulation = Simulation(model, strategy, StackedCollectives(num_nodes), engine=engine, max_steps=4)
    state = simulation.init()
    for _ in range(3):
        state, _ = simulation.step(state, batch)
    engine.close()
    return {"estimated": estimate.total_bytes, "measured": peak_bytes(where) - before + batch_bytes}


def current_bytes() -> int:
    """Resident memory now (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def measure(name: str, strategy: str, num_nodes: int, chunk_size: int | None, device: str) -> dict[str, Any]:
    """The same in a process of its own."""
    arguments = [name, strategy, str(num_nodes), str(chunk_size or 0), device]
    done = subprocess.run([sys.executable, __file__, "--case", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    found = json.loads(done.stdout.splitlines()[-1])
    return {"workload": name, "strategy": strategy, "num_nodes": num_nodes, "chunk_size": chunk_size, **found}


def table(rows: list[dict[str, Any]]) -> str:
    """One line for each configuration."""
    cells = [
        [
            f"{row['workload']}, {row['strategy']}", str(row["num_nodes"]), str(row["chunk_size"] or "all"),
            f"{row['estimated'] / 1e6:.1f}", f"{row['measured'] / 1e6:.1f}",
            f"{row['estimated'] / max(1, row['measured']):.2f}",
        ]
        for row in rows
    ]  # fmt: skip
    return markdown(["run", "K", "chunk", "estimated MB", "measured MB", "estimated / measured"], cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small configuration: does it work?")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (cpu)")
    parser.add_argument("--threads", type=int, default=1, help="ignored: one thread, so that nothing is spread")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--case", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        name, strategy, num_nodes, chunk_size, device = args.case
        print(json.dumps(measure_here(name, strategy, int(num_nodes), int(chunk_size) or None, device)))
        return
    torch.set_num_threads(1)
    print(header() + "\n", flush=True)
    cases = QUICK if args.quick else CASES
    strategies = STRATEGIES[1:2] if args.quick else STRATEGIES
    rows = [measure(name, s, n, chunk, args.device) for name, n, chunk in cases for s in strategies]
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
