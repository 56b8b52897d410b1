"""One run of K = 64 nodes under torchrun, on W = 1, 2 and 4 processes that hold K / W stacked nodes each.

A sweep spreads its stacks over the workers of an executor; one run spreads its nodes over the processes of torchrun,
and that is what is measured here: AllReduce, which exchanges the gradients at every step, and DiLoCo with H = 20, which
exchanges the parameters' movement once in 20 steps. "stacked" is the same in one process without a process group.

Each W is a job of its own, and they take turns, 20 steps of each strategy at a time (`turns.py`). All have `--threads`
threads together: a process has the W-th part of them, at least one. With more processes than cores they share the
cores. "MB" is what a process hands to torch.distributed in a step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from turns import Turns, serve, take_turns

H = 20  # steps in a block
STRATEGIES = ("allreduce", "diloco")
LAUNCHER = "import os; os.environ['OMP_NUM_THREADS'] = '{}'; from torch.distributed.run import main; main()"
Figures = dict[str, float]


# ---------------------------------------------------------------------------------------------------- the processes


def stepper(name: str, kind: str, comm: Any) -> Callable[[], None]:
    """A function that takes a step of the nodes in this process."""
    from workloads import WORKLOADS

    from vecgym.core import tree
    from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy
    from vecgym.strategy.simulated import simulation_of

    workload = WORKLOADS[name]
    strategy = AllReduceStrategy("adamw", lr=1e-3) if kind == "allreduce" else DiLoCoStrategy("adamw", H=H, lr=1e-3)
    batch = tree.map_leaves(lambda x: x[comm.node_ids], workload.batch(comm.num_nodes))
    simulation = simulation_of(workload.model(), strategy, comm, max_steps=10**6)
    simulation.engine.prepare(batch)
    state = simulation.init()

    def step() -> None:
        nonlocal state
        state, _ = simulation.step(state, batch)

    return step


def work_of(name: str, comm: Any) -> Callable[[], Figures]:
    """A block of both strategies in one process: the seconds, processor time and bytes of each."""
    steps = {kind: stepper(name, kind, comm) for kind in STRATEGIES}

    def block() -> Figures:
        figures: Figures = {}
        for kind, step in steps.items():
            start, cpu, before = time.perf_counter(), time.process_time(), handed(comm)
            for _ in range(H):
                step()
            used = total(time.process_time() - cpu, comm)  # all are done
            figures |= {f"{kind} s": time.perf_counter() - start, f"{kind} cpu": used}
            figures[f"{kind} bytes"] = handed(comm) - before
        return {**figures, "cpu": sum(figures[f"{kind} cpu"] for kind in STRATEGIES)}

    return block


def handed(comm: Any) -> int:
    """The bytes that a process has handed to torch.distributed."""
    return comm.wire.handed_bytes if hasattr(comm, "wire") else 0


def total(value: float, comm: Any) -> float:
    """The sum over the processes."""
    import torch
    import torch.distributed as dist

    if not hasattr(comm, "wire"):
        return value
    sums = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(sums)
    return float(sums)


def serve_stacked(name: str, num_nodes: int) -> None:
    """All nodes in this process."""
    from vecgym.collectives import StackedCollectives

    serve(work_of(name, StackedCollectives(num_nodes)))


def serve_distributed(name: str, num_nodes: int) -> None:
    """One of the processes of torchrun: the first is asked for blocks, and has the others do them too."""
    import torch
    import torch.distributed as dist

    from vecgym.collectives.distributed import DistributedCollectives
    from vecgym.collectives.wire import Wire

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    block = work_of(name, DistributedCollectives(num_nodes, Wire()))
    go = torch.ones(1)

    def asked() -> Figures:
        dist.broadcast(go, 0)
        return block()

    if dist.get_rank() == 0:
        serve(asked, processes=dist.get_world_size())
        dist.broadcast(go.zero_(), 0)
    else:
        dist.broadcast(go, 0)
        while go:
            block()
            dist.broadcast(go, 0)
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------------- the parent


def measure(args: argparse.Namespace) -> Turns:
    """Blocks of all jobs."""
    script = [str(Path(__file__).resolve()), "--serve", args.workload, str(args.nodes)]
    commands = {"stacked": [*script, "0"]}
    for W in args.processes:
        launcher = LAUNCHER.format(max(1, args.threads // W))
        commands[str(W)] = ["-c", launcher, "--standalone", "--nproc-per-node", str(W), *script, str(W)]
    return take_turns(commands, 0 if args.quick else args.seconds, args.threads)


def rows_of(turns: Turns) -> dict[str, dict[str, float]]:
    """The figures of each strategy and job."""
    rows = {}
    for kind in STRATEGIES:
        for name in turns.figures:
            seconds, cpu, sent = (turns.median(name, f"{kind} {figure}") / H for figure in ("s", "cpu", "bytes"))
            ratio = turns.median("stacked", f"{kind} s") / H / seconds
            rows[f"{kind} {name}"] = {"ms": 1e3 * seconds, "cpu_ms": 1e3 * cpu, "ratio": ratio, "bytes": sent}
    return rows


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        name, num_nodes, num_processes = sys.argv[2:]
        (serve_distributed if int(num_processes) else serve_stacked)(name, int(num_nodes))
        return
    from workloads import WORKLOADS, header, machine, markdown

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="mlp", choices=list(WORKLOADS), help="default: mlp")
    parser.add_argument("--nodes", type=int, default=64, metavar="K", help="default: 64")
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4], metavar="W", help="default: 1 2 4")
    parser.add_argument("--threads", type=int, default=2, help="of all processes together (default 2)")
    parser.add_argument("--seconds", type=float, default=120, help="about how long for all rounds (default 120)")
    parser.add_argument("--quick", action="store_true", help="the tiny MLP on 4 nodes, W = 2, one round: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    args = parser.parse_args()
    if args.quick:
        args.workload, args.nodes, args.processes = "tiny", 4, [2]

    print(header(), flush=True)
    turns = measure(args)
    rows = rows_of(turns)
    cells = []
    for name, row in rows.items():
        numbers = [f"{row['ms']:.2f}", f"{row['cpu_ms']:.2f}", f"{row['ratio']:.2f}", f"{row['bytes'] / 1e6:.3f}"]
        cells.append([*name.split(), *numbers])
    columns = ["strategy", "processes", "ms / step", "CPU ms / step", "stacked / this", "MB / step"]
    print(f"{args.workload}, K = {args.nodes}; {turns.notes()}\n\n{markdown(columns, cells)}")
    if args.json:
        about = {"machine": machine() | {"threads": str(args.threads)}, "num_nodes": args.nodes, "notes": turns.notes()}
        args.json.write_text(json.dumps({**about, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
