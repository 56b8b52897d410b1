"""vecgym against real processes: the same training with one `torch.distributed` (gloo) process per node.

Processes: each holds a plain module with fused AdamW and one torch thread. DiLoCo: every 20 steps one all-reduce of
the parameters' movement, then torch's SGD with Nesterov momentum on every process. AllReduce: one all-reduce of the
joined gradients at every step. vecgym: `Simulation.step` in one fresh process with `--threads` threads. They take
turns, a whole run with all its processes each.

"First step" is the time from starting the process(es) to the end of the first step of DiLoCo on every node. "ms per
step" is the median over blocks of 20 steps, all nodes together. With more processes than cores the processes
share the cores, as they do when one tries out a distributed program on one machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from turns import serve, take_turns
from workloads import WORKLOADS, header, machine, markdown

H = 20
LR = 1e-3
RUNS = [("mlp", 2), ("mlp", 4), ("mlp", 8), ("mlp", 16), ("cnn", 16), ("gpt", 16)]

BLOCKS = 3  # of H steps, in a run
FIGURES = ("first_step_s", "diloco_s", "allreduce_s")

Result = dict[str, float]  # of FIGURES


def time_blocks(step: Callable[[], None], blocks: int, barrier: Callable[[], object] = lambda: None) -> float:
    """Seconds per step, the median over blocks of H steps."""
    seconds = []
    for _ in range(blocks):
        barrier()
        start = time.perf_counter()
        for _ in range(H):
            step()
        barrier()
        seconds.append((time.perf_counter() - start) / H)
    return statistics.median(seconds)


# ------------------------------------------------------------------------------------ one process per node


class Node:
    """One node: a plain module, its optimizer, and what it exchanges."""

    def __init__(self, name: str, rank: int, num_nodes: int) -> None:
        workload = WORKLOADS[name]
        self.num_nodes = num_nodes
        self.model = workload.model()
        self.params = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.params, lr=LR, fused=True)
        self.outer = [p.detach().clone().requires_grad_() for p in self.params]
        self.outer_optimizer = torch.optim.SGD(self.outer, lr=0.7, momentum=0.9, nesterov=True)
        self.batch = workload.data(workload.batch_size, seed=rank)
        self.step = 0

    def diloco(self) -> None:
        self.model(self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        if self.step % H == 0:
            with torch.no_grad():
                deltas = self.mean([outer - p for outer, p in zip(self.outer, self.params)])
                for outer, delta in zip(self.outer, deltas):
                    outer.grad = delta
                self.outer_optimizer.step()
                for outer, p in zip(self.outer, self.params):
                    p.copy_(outer)

    def allreduce(self) -> None:
        self.model(self.batch).backward()
        for p, grad in zip(self.params, self.mean([p.grad for p in self.params if p.grad is not None])):
            p.grad = grad
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def mean(self, tensors: list[Tensor]) -> list[Tensor]:
        """The mean over the nodes, in one all-reduce."""
        joined = torch.cat([x.flatten() for x in tensors])
        dist.all_reduce(joined)
        joined /= self.num_nodes
        return [part.view_as(x) for part, x in zip(joined.split([x.numel() for x in tensors]), tensors)]


def run_node(rank: int, name: str, num_nodes: int, blocks: int, timeout_s: float, folder: str) -> None:
    """The life of one process; rank 0 writes the result."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",  # no port that another program could take
        rank=rank,
        world_size=num_nodes,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    node = Node(name, rank, num_nodes)
    node.diloco()
    dist.barrier()
    result = {"first_step_at": time.time()}
    result["diloco_s"] = time_blocks(node.diloco, blocks, dist.barrier)
    result["allreduce_s"] = time_blocks(node.allreduce, blocks, dist.barrier)
    if rank == 0:
        Path(folder, "result").write_text(json.dumps(result))
    os._exit(0)  # a thread of gloo may hold a tensor: a normal exit then aborts now and then (pytorch/pytorch#179291)


def measure_processes(name: str, num_nodes: int, blocks: int, timeout_s: float) -> Result:
    """Start the processes, wait for them, and leave none behind."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.time()
        arguments = (name, num_nodes, blocks, timeout_s, folder)
        context = mp.start_processes(run_node, arguments, num_nodes, join=False, start_method="spawn")
        try:
            while not context.join(timeout=5):  # raises when a process fails, and ends the others
                if time.time() - start > timeout_s:
                    raise TimeoutError(f"{name} with {num_nodes} processes took more than {timeout_s} s")
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        result = json.loads(Path(folder, "result").read_text())
    return {"first_step_s": result.pop("first_step_at") - start, **result}


# ------------------------------------------------------------------------------------------------- vecgym


def run_vecgym(name: str, num_nodes: int, blocks: int, threads: int) -> Result:
    """The same in this process."""
    from vecgym.collectives import StackedCollectives
    from vecgym.engine import Engine
    from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy, Strategy
    from vecgym.strategy.simulated import simulation_of

    torch.set_num_threads(threads)
    workload = WORKLOADS[name]
    batch = workload.batch(num_nodes)

    def stepper(strategy: Strategy) -> tuple[Engine, Callable[[], None]]:
        engine = Engine(workload.model())
        engine.prepare(batch)
        simulation = simulation_of(
            workload.model(), strategy, StackedCollectives(num_nodes), engine=engine, max_steps=10**6
        )
        state = simulation.init()

        def step() -> None:
            nonlocal state
            state, _ = simulation.step(state, batch)

        return engine, step

    diloco_engine, diloco = stepper(DiLoCoStrategy("adamw", H=H, lr=LR))
    diloco()
    result = {"first_step_at": time.time(), "diloco_s": time_blocks(diloco, blocks)}
    allreduce_engine, allreduce = stepper(AllReduceStrategy("adamw", lr=LR))
    allreduce()
    result["allreduce_s"] = time_blocks(allreduce, blocks)
    diloco_engine.close()
    allreduce_engine.close()
    return result


def measure_vecgym(name: str, num_nodes: int, blocks: int, threads: int, timeout_s: float) -> Result:
    """The same in a fresh process."""
    command = [sys.executable, __file__, "--vecgym", name, *map(str, (num_nodes, blocks, threads))]
    start = time.time()
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=timeout_s).stdout
    result = json.loads(output)
    return {"first_step_s": result.pop("first_step_at") - start, **result}


# ------------------------------------------------------------------------------------------------- turns


def serve_runs(side: str, name: str, num_nodes: int, blocks: int, threads: int, timeout_s: float) -> None:
    """In a process of its own, which only waits: a whole run of fresh processes for each block."""
    if side == "vecgym":
        serve(lambda: measure_vecgym(name, num_nodes, blocks, threads, timeout_s))
    else:
        serve(lambda: measure_processes(name, num_nodes, blocks, timeout_s))


def measure(name: str, num_nodes: int, args: argparse.Namespace) -> dict[str, Any]:
    """The medians of both sides, and what is to be said of them."""
    blocks = 1 if args.quick else BLOCKS
    numbers = [str(x) for x in (num_nodes, blocks, args.threads, args.timeout)]
    commands = {
        side: [str(Path(__file__).resolve()), "--serve", side, name, *numbers] for side in ("processes", "vecgym")
    }
    rounds = args.repeats, args.repeats
    turns = take_turns(commands, 0 if args.quick else None, args.threads, rounds=rounds, warm_up=False)
    found = {side: {key: turns.median(side, key) for key in FIGURES} for side in commands}
    return {"workload": name, "num_nodes": num_nodes, **found, "notes": turns.notes()}


# ------------------------------------------------------------------------------------------------- report


def report(results: list[dict[str, Any]]) -> str:
    """One row per workload and number of nodes."""
    columns = ["workload", "K", "first step, s: processes", "vecgym", "ratio"]
    columns += ["DiLoCo, ms / step: processes", "vecgym", "ratio", "AllReduce, ms / step: processes", "vecgym", "ratio"]
    rows = []
    for result in results:
        row = [result["workload"], str(result["num_nodes"])]
        for key, scale in (("first_step_s", 1), ("diloco_s", 1e3), ("allreduce_s", 1e3)):
            theirs, ours = result["processes"][key], result["vecgym"][key]
            row += [f"{scale * theirs:.2f}", f"{scale * ours:.2f}", f"{theirs / ours:.1f}"]
        rows.append(row)
    return markdown(columns, rows)


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        side, workload, *numbers, timeout_s = sys.argv[2:]
        K, blocks, threads = map(int, numbers)
        return serve_runs(side, workload, K, blocks, threads, float(timeout_s))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=["mlp", "cnn", "gpt"], choices=["mlp", "cnn", "gpt"],
                        metavar="NAME", help="any of mlp, cnn, gpt; default: all")  # fmt: skip
    parser.add_argument("--threads", type=int, default=2, help="vecgym's threads (default 2); a process has one")
    parser.add_argument("--repeats", type=int, default=3, help="rounds, a run of 3 blocks each (default 3)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one measurement (default 300)")
    parser.add_argument("--quick", action="store_true", help="the tiny MLP on two nodes, one block: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--vecgym", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.vecgym:
        name, *numbers = args.vecgym
        print(json.dumps(run_vecgym(name, *map(int, numbers))))
        return

    torch.set_num_threads(args.threads)
    print(header(), flush=True)
    results = []
    for name, num_nodes in [("tiny", 2)] if args.quick else [run for run in RUNS if run[0] in args.workloads]:
        results.append(measure(name, num_nodes, args))
        print(f"{name}, K = {num_nodes}: {results[-1]['notes']}", flush=True)
    print("\n" + report(results))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "runs": results}, indent=1))


if __name__ == "__main__":
    main()
