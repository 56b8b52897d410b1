"""One training run stacked in one process, and in W processes that hold K / W stacked nodes each.

"First" is the time from the call to the end of the first step on every node, in a program that runs already: of
processes that are started for it, this is their start. "ms / step" is the median over blocks of 20 steps, of DiLoCo
(H = 20: one exchange a block) and of AllReduce (one at every step), all nodes together. Stacked: `--threads` threads.
Processes that are forked have one each; with more processes than cores they share the cores. Each alternative is
measured from a process of its own, and they take turns, a whole run each.

Start-up: 2 processes that do nothing but meet once, forked and spawned, against two interpreters one after the other
that do nothing but import torch. These take turns as well.

With `--device cuda` processes take the GPUs in turn; where there are fewer GPUs than processes, what they exchange goes
through the CPU's memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from turns import Turns, serve, take_turns
from workloads import WORKLOADS, header, machine, markdown

from vecgym.collectives import Collectives, StackedCollectives
from vecgym.collectives.distributed import DistributedCollectives
from vecgym.collectives.wire import Wire
from vecgym.core import tree
from vecgym.engine import Engine
from vecgym.runs import multiprocess
from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy, Strategy
from vecgym.strategy.simulated import simulation_of

H = 20
LR = 1e-3
HERE = str(Path(__file__).resolve())
TARGET = 1.5  # start-up of 2 processes: at most so many times that of importing torch twice

Result = dict[str, float]  # first_s, diloco_s, allreduce_s


def train(
    comm: Collectives, name: str, blocks: int, device: torch.device, wait: Callable[[], object], start: float
) -> Result:
    """Seconds to the end of the first step since `start`, and seconds per step."""
    workload = WORKLOADS[name]
    nodes = comm.node_ids
    batch = tree.map_leaves(lambda x: x[nodes].to(device), workload.batch(comm.num_nodes))
    result: Result = {}
    strategies: dict[str, Strategy] = {
        "diloco": DiLoCoStrategy("adamw", H=H, lr=LR),
        "allreduce": AllReduceStrategy("adamw", lr=LR),
    }
    for kind, strategy in strategies.items():
        model = workload.model().to(device)
        engine = Engine(model)
        engine.prepare(batch)
        simulation = simulation_of(model, strategy, comm, engine=engine, max_steps=10**6)
        state, _ = simulation.step(simulation.init(), batch)
        wait()
        if kind == "diloco":
            result["first_s"] = time.time() - start
        seconds = []
        for _ in range(blocks):
            begin = time.perf_counter()
            for _ in range(H):
                state, _ = simulation.step(state, batch)
            wait()
            seconds.append((time.perf_counter() - begin) / H)
        result[f"{kind}_s"] = statistics.median(seconds)
        engine.close()
    return result


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def in_process(
    link: multiprocess.Link, name: str, num_nodes: int, blocks: int, device_name: str, start: float
) -> Result:
    """The work of each process; the first one's figures count."""
    device = torch.device(device_name)
    if device.type == "cuda":
        device = torch.device("cuda", link.rank % torch.cuda.device_count())
    comm = DistributedCollectives(num_nodes, Wire(watch=link.beat))

    def wait() -> None:
        _finish(device)
        dist.barrier()

    return train(comm, name, blocks, device, wait, start)


def serve_runs(name: str, num_nodes: int, num_processes: int, blocks: int, device_name: str, timeout_s: float) -> None:
    """In a process of its own: a whole run for each block; 0 processes: stacked."""
    device = torch.device(device_name)

    def work() -> Result:
        if num_processes == 0:
            return train(StackedCollectives(num_nodes), name, blocks, device, lambda: _finish(device), time.time())
        given = (name, num_nodes, blocks, device_name, time.time())
        return multiprocess.run(in_process, num_processes, given, device=device, timeout_s=timeout_s)[0]

    serve(work)


def measure(name: str, num_nodes: int, args: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    """The rows of a number of nodes, and what is to be said of them."""
    counts = sorted({0, *[W for W in (1, 2, 4) if num_nodes % W == 0], num_nodes})
    blocks = "1" if args.quick else "3"
    command = [HERE, "--serve", "runs", name, str(num_nodes)]
    commands = {str(W): [*command, str(W), blocks, args.device, str(args.timeout)] for W in counts}
    turns = turns_of(commands, args)
    keys = ("first_s", "diloco_s", "allreduce_s")
    found = [
        {
            "workload": name,
            "num_nodes": num_nodes,
            "num_processes": W,
            **{key: turns.median(str(W), key) for key in keys},
        }
        for W in counts
    ]
    return found, turns.notes()


def turns_of(commands: dict[str, list[str]], args: argparse.Namespace) -> Turns:
    return take_turns(commands, 0 if args.quick else None, args.threads, rounds=(args.repeats, args.repeats))


# ------------------------------------------------------------------------------------------------------- start-up


def meet(link: multiprocess.Link) -> None:
    dist.all_reduce(torch.ones(1))


IMPORTS = "import torch, twice"


def serve_start(kind: str) -> None:
    """In a process of its own: two processes meet, or two interpreters import torch."""

    def imports() -> None:
        for _ in range(2):
            subprocess.run([sys.executable, "-c", "import torch"], check=True)

    def meeting() -> None:
        multiprocess.run(meet, 2, start_method=kind)

    serve(imports if kind == IMPORTS else meeting)


def start_up(args: argparse.Namespace) -> tuple[dict[str, float], str]:
    """Median seconds, and what is to be said of them."""
    methods = ["spawn"] if multiprocess.choose_start_method() == "spawn" else ["fork", "spawn"]
    turns = turns_of({kind: [HERE, "--serve", "start", kind] for kind in (IMPORTS, *methods)}, args)
    return {kind: turns.median(kind) for kind in turns.figures}, turns.notes()


# --------------------------------------------------------------------------------------------------------- report


def report(rows: list[dict[str, Any]]) -> str:
    """One row per number of nodes and of processes."""
    columns = ["workload", "K", "processes", "first, s", "DiLoCo, ms / step", "AllReduce, ms / step"]
    cells = []
    for row in rows:
        numbers = [f"{row['first_s']:.2f}", f"{1e3 * row['diloco_s']:.2f}", f"{1e3 * row['allreduce_s']:.2f}"]
        processes = str(row["num_processes"]) if row["num_processes"] else "stacked"
        cells.append([row["workload"], str(row["num_nodes"]), processes, *numbers])
    return markdown(columns, cells)


def start_report(seconds: dict[str, float]) -> str:
    """Against the target."""
    reference = seconds[IMPORTS]
    rows = [[IMPORTS, f"{reference:.2f}", "", "", ""]]
    for method in ("fork", "spawn"):
        if method in seconds:
            ratio = seconds[method] / reference
            met = "yes" if ratio <= TARGET else "no"
            rows.append([f"2 processes, {method}", f"{seconds[method]:.2f}", f"{ratio:.2f}", f"{TARGET}", met])
    return markdown(["start-up", "s", "ratio", "target", "met"], rows)


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        if sys.argv[2] == "start":
            return serve_start(sys.argv[3])
        name, num_nodes, num_processes, blocks, device, timeout_s = sys.argv[3:]
        return serve_runs(name, int(num_nodes), int(num_processes), int(blocks), device, float(timeout_s))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="mlp", choices=sorted(WORKLOADS), help="default: mlp")
    parser.add_argument("--nodes", nargs="+", type=int, default=[4, 8, 16], metavar="K", help="default: 4 8 16")
    parser.add_argument("--threads", type=int, default=2, help="of the stacked run (default 2)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds, a run of 3 blocks each (default 5)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds without any progress (default 300)")
    parser.add_argument("--quick", action="store_true", help="the tiny MLP on two nodes, one block: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    print(header(), flush=True)
    name, nodes = ("tiny", [2]) if args.quick else (args.workload, args.nodes)
    rows = []
    for K in nodes:
        found, notes = measure(name, K, args)
        rows += found
        print(f"K = {K}: {notes}", flush=True)
    print("\n" + report(rows))
    seconds, notes = start_up(args)
    print("\n" + start_report(seconds) + f"\n\n{notes}")
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "runs": rows, "start_up_s": seconds}, indent=1))


if __name__ == "__main__":
    main()
