"""Two checkouts of vecgym, step against step: does a change cost time?

    git worktree add ../before HEAD~20
    python benchmarks/versions.py ../before .

Each checkout runs in a process of its own, with its own copy of the package; the two take turns, a block of 20 steps
each, so that what else the machine does meets both alike. A ratio is that of the medians, second checkout to first.
`--workloads` and the strategies are those of `step_time.py`. All together take about six minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

BLOCK = 20  # steps
STRATEGIES = ("diloco", "allreduce")


def serve(name: str, strategy_name: str, quick: bool) -> None:
    """In a process of its own: take a block of steps for each line that is read, and print its seconds."""
    import torch
    from workloads import WORKLOADS

    from vecgym import strategy as strategies
    from vecgym.collectives import StackedCollectives

    try:
        from vecgym.engine.simulation import Simulation
    except ImportError:  # 0.1
        from vecgym.simulate import Simulation  # type: ignore[no-redef]

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    workload = WORKLOADS[name]
    num_nodes = min(workload.num_nodes, 4) if quick else workload.num_nodes
    if strategy_name == "diloco":
        strategy: Any = strategies.DiLoCoStrategy("adamw", H=BLOCK, lr=1e-3)
    else:
        strategy = strategies.AllReduceStrategy("adamw", lr=1e-3)
    simulation = Simulation(workload.model(), strategy, StackedCollectives(num_nodes))
    batches = [workload.batch(num_nodes, seed) for seed in range(BLOCK)]
    simulation.engine.prepare(batches[0])
    state = simulation.init()
    for _ in sys.stdin:
        before = time.perf_counter()
        for batch in batches:
            state, _ = simulation.step(state, batch)
        print(time.perf_counter() - before, flush=True)


def start(checkout: Path, arguments: list[str], threads: int) -> subprocess.Popen[str]:
    """Start the process of a checkout. Closing its standard input ends it."""
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, str(Path(__file__).resolve()), "--serve", *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def block(process: subprocess.Popen[str]) -> float:
    """Have a process take a block of steps; return its seconds."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("the process of a checkout ended; see its message above")
    return float(line)


def measure(checkouts: list[Path], name: str, strategy: str, budget_s: float, threads: int, quick: bool) -> list[float]:
    """The seconds per step of each checkout, medians."""
    arguments = [name, strategy, *(["--quick"] if quick else [])]
    with ExitStack() as stack:
        processes = [stack.enter_context(start(checkout, arguments, threads)) for checkout in checkouts]
        round_s = sum([block(process) for process in processes])  # the first block is not measured
        seconds: list[list[float]] = [[] for _ in processes]
        for i in range(1 if quick else max(5, min(60, round(budget_s / round_s)))):
            for j in (0, 1) if i % 2 else (1, 0):
                seconds[j].append(block(processes[j]))
    return [statistics.median(each) / BLOCK for each in seconds]


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        return serve(sys.argv[2], sys.argv[3], quick="--quick" in sys.argv)
    from workloads import WORKLOADS, header, machine, markdown

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs=2, type=Path, metavar="CHECKOUT", help="folders that hold a vecgym")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default 2)")
    parser.add_argument("--seconds", type=float, default=30, help="about how long for each row (default 30)")
    parser.add_argument("--quick", action="store_true", help="few nodes, one round: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    args = parser.parse_args()

    print(header(), flush=True)
    print(f"load {os.getloadavg()[0]:.1f}, {args.threads} threads in each process\n", flush=True)
    rows, figures = [], {}
    for name in args.workloads:
        for strategy in STRATEGIES:
            first, second = measure(args.checkouts, name, strategy, args.seconds, args.threads, args.quick)
            figures[f"{name} {strategy}"] = {"ms": [1e3 * first, 1e3 * second], "ratio": second / first}
            rows.append([f"{name} {strategy}", f"{1e3 * first:.2f}", f"{1e3 * second:.2f}", f"{second / first:.3f}"])
            print(rows[-1], file=sys.stderr, flush=True)
    print(markdown(["workload", "first, ms per step", "second", "ratio"], rows))
    if args.json:
        threads = {"threads": str(args.threads)}
        args.json.write_text(json.dumps({"machine": machine() | threads, "rows": figures}, indent=1))


if __name__ == "__main__":
    main()
