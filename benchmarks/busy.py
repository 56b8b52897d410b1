"""A training step on a machine that has other things to do: how torch's threads wait, and how many there are.

Threads of OpenMP wait for one another at the end of every operation, by default in a loop of 3 ms that keeps the core
busy ("spinning"). Where other programs want the cores too, a thread that all others wait for may not run meanwhile.
`import vecgym` makes the loop shorter, or lets the threads sleep ("passive") where the machine is busy already; torch
reads that when it is imported. Where that was before, as here ("2 threads"), vecgym starts idle threads on a busy
machine, with the effect of sleeping.
Node threads compute whole nodes, and wait once in a step.

Each setting is a process of its own: the small GPT on 8 nodes with DiLoCo. They take turns, alone and then beside
`--load` processes that only count. "ms per step" is the median of blocks; a fair share of the cores is what the load
leaves to a program with as many threads. Takes about two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from turns import Turns, serve, take_turns
from workloads import WORKLOADS, header, machine, markdown

H = 20
SETTINGS = {  # name: (environment, torch's threads, node threads)
    "1 thread": ({}, 1, 1),
    "2 threads": ({}, 2, 1),
    "2 threads, spinning": ({"GOMP_SPINCOUNT": "300000"}, 2, 1),  # GNU's default
    "2 threads, short": ({"GOMP_SPINCOUNT": "10000"}, 2, 1),  # vecgym's
    "2 threads, passive": ({"OMP_WAIT_POLICY": "PASSIVE"}, 2, 1),
    "2 node threads": ({}, 2, 2),
}


def serve_steps(name: str, steps: int, threads: int, node_threads: int) -> None:
    """In a process of its own: blocks of steps."""
    from vecgym.collectives import StackedCollectives
    from vecgym.engine import Engine
    from vecgym.strategy import DiLoCoStrategy
    from vecgym.strategy.simulated import simulation_of

    torch.set_num_threads(threads)
    workload = WORKLOADS[name]
    batch = workload.batch(8)
    engine = Engine(workload.model(), node_threads=node_threads)
    engine.prepare(batch)
    strategy = DiLoCoStrategy("adamw", H=H, lr=1e-3)
    simulation = simulation_of(workload.model(), strategy, StackedCollectives(8), engine=engine, max_steps=10**6)
    state = simulation.init()

    def work() -> None:
        nonlocal state
        for _ in range(steps):
            state, _ = simulation.step(state, batch)

    serve(work)


def measure(name: str, steps: int, args: argparse.Namespace) -> Turns:
    """Blocks of all settings."""
    command = [str(Path(__file__).resolve()), "--serve", name, str(steps)]
    commands = {
        setting: [*command, str(threads), str(node_threads)] for setting, (_, threads, node_threads) in SETTINGS.items()
    }
    environments = {
        setting: {"OMP_NUM_THREADS": str(threads), **environment}
        for setting, (environment, threads, _) in SETTINGS.items()
    }
    rounds = args.repeats, args.repeats
    return take_turns(commands, 0 if args.quick else None, args.threads, environments, rounds)


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
    if sys.argv[1:2] == ["--serve"]:
        return serve_steps(sys.argv[2], *map(int, sys.argv[3:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="gpt", choices=list(WORKLOADS), help="default: gpt")
    parser.add_argument("--load", type=int, default=2, help="busy processes (default 2)")
    parser.add_argument("--threads", type=int, default=1, help="of this process, which only waits (default 1)")
    parser.add_argument("--repeats", type=int, default=5, help="blocks of 20 steps (default 5)")
    parser.add_argument("--quick", action="store_true", help="the tiny MLP, one block of two steps: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    args = parser.parse_args()

    for key in [key for key in os.environ if key.startswith(("OMP_", "GOMP_", "KMP_"))]:
        del os.environ[key]  # a setting's process has its own
    torch.set_num_threads(args.threads)
    print(header())
    name, steps = ("tiny", 2) if args.quick else (args.workload, H)
    before = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    print(f"load before: {before}; beside: {args.load} busy processes", flush=True)
    alone = measure(name, steps, args)
    with load(args.load):
        busy = measure(name, steps, args)
    found = {
        setting: {"alone_s": alone.median(setting) / steps, "busy_s": busy.median(setting) / steps}
        for setting in SETTINGS
    }
    rows = [
        [setting, f"{1e3 * row['alone_s']:.1f}", f"{1e3 * row['busy_s']:.1f}", f"{row['busy_s'] / row['alone_s']:.1f}"]
        for setting, row in found.items()
    ]
    print("\n" + markdown([f"{name}, K = 8", "ms per step alone", "busy", "ratio"], rows))
    print(f"\nAlone: {alone.notes()}.\nBusy: {busy.notes()}.")
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "load": args.load, "settings": found}, indent=1))


if __name__ == "__main__":
    main()
