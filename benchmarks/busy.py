"""A training step on a machine that has other things to do: how torch's threads wait, and how many there are.

Threads of OpenMP wait for one another at the end of every operation, by default in a loop that keeps the core busy.
Where other programs want the cores too, a thread that all others wait for may not run meanwhile.
`OMP_WAIT_POLICY=PASSIVE` makes them sleep instead; it is read when torch is imported. Node threads compute whole nodes,
and wait once in a step.

Each row is a fresh process: the small GPT on 8 nodes with DiLoCo, alone and beside `--load` processes that only count.
"ms per step" is the median of blocks; a fair share of the cores is what the load leaves to a program with as many
threads. Takes about two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from workloads import WORKLOADS, header, machine, markdown

H = 20
SETTINGS = {  # name: (environment, torch's threads, node threads)
    "1 thread": ({}, 1, 1),
    "2 threads": ({}, 2, 1),
    "2 threads, passive": ({"OMP_WAIT_POLICY": "PASSIVE"}, 2, 1),
    "2 node threads": ({}, 2, 2),
}


def measure_here(name: str, threads: int, node_threads: int, blocks: int, steps: int) -> float:
    """Seconds per step in this process."""
    from vecgym.collectives import StackedCollectives
    from vecgym.engine import Engine
    from vecgym.engine.simulation import Simulation
    from vecgym.strategy import DiLoCoStrategy

    torch.set_num_threads(threads)
    workload = WORKLOADS[name]
    batch = workload.batch(8)
    engine = Engine(workload.model(), node_threads=node_threads)
    engine.prepare(batch)
    strategy = DiLoCoStrategy("adamw", H=H, lr=1e-3)
    simulation = Simulation(workload.model(), strategy, StackedCollectives(8), engine=engine)
    state, seconds = simulation.init(), []
    for _ in range(blocks + 1):  # the first warms up
        start = time.perf_counter()
        for _ in range(steps):
            state, _ = simulation.step(state, batch)
        seconds.append((time.perf_counter() - start) / steps)
    engine.close()
    return statistics.median(seconds[1:])


def measure(name: str, setting: str, blocks: int, steps: int) -> float:
    """The same in a fresh process, whose OpenMP has the setting's environment."""
    environment, threads, node_threads = SETTINGS[setting]
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_", "KMP_"))}
    command = [sys.executable, __file__, "--one", name, *map(str, (threads, node_threads, blocks, steps))]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=600, env={**plain, **environment}
    )
    return float(json.loads(done.stdout))


@contextmanager
def load(num_processes: int) -> Iterator[None]:
    """So many processes that keep a core busy; they end with the block, or with this program."""
    loop = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n for _ in range(10**5): pass"
    busy = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(num_processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="gpt", choices=list(WORKLOADS), help="default: gpt")
    parser.add_argument("--load", type=int, default=4, help="busy processes (default 4)")
    parser.add_argument("--threads", type=int, default=1, help="of this process, which only waits (default 1)")
    parser.add_argument("--repeats", type=int, default=3, help="blocks of 5 steps (default 3)")
    parser.add_argument("--quick", action="store_true", help="the tiny MLP, one block of two steps: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        name, *numbers = args.one
        print(json.dumps(measure_here(name, *map(int, numbers))))
        return

    torch.set_num_threads(args.threads)
    print(header())
    name, blocks, steps = ("tiny", 1, 2) if args.quick else (args.workload, args.repeats, 5)
    before = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    print(f"load before: {before}; beside: {args.load} busy processes", flush=True)
    found: dict[str, dict[str, float]] = {}
    for setting in SETTINGS:
        alone = measure(name, setting, blocks, steps)
        with load(args.load):
            beside = measure(name, setting, blocks, steps)
        found[setting] = {"alone_s": alone, "busy_s": beside}
        print(f"{setting}: {1e3 * alone:.1f} ms a step, busy {1e3 * beside:.1f}", flush=True)
    rows = [
        [setting, f"{1e3 * row['alone_s']:.1f}", f"{1e3 * row['busy_s']:.1f}", f"{row['busy_s'] / row['alone_s']:.1f}"]
        for setting, row in found.items()
    ]
    print("\n" + markdown([f"{name}, K = 8", "ms per step alone", "busy", "ratio"], rows))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "load": args.load, "settings": found}, indent=1))


if __name__ == "__main__":
    main()
