"""Training steps on a GPU: per second, TFLOP/s, share of what the GPU can do, and memory; against what one would write.

Each alternative runs in a process of its own, one after the other, on batches that are on the GPU already:

- loop: K plain modules, each with fused AdamW, one after the other; every H steps DiLoCo's outer step.
- big: one model with fused AdamW on the K batches together. These two do not import vecgym.
- eager: `Simulation.step` with `DiLoCoStrategy(H)`. compiled: the same with `Engine(compile=True)`, whose gradients
  are launched as a CUDA graph.

A block of H = 20 steps is timed until the GPU has done it. Arithmetic: the matrix products of a forward and a backward
pass, K times that of one node, as torch counts it; the GPU's rate is that of a product of two large matrices, measured
in the same precision. gpt2 computes in bfloat16, under autocast; the others in float32.

Without a GPU it says so, and ends; `--device cpu --quick` tells whether it works at all, but for the graph.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from plain import LR, Big, Loop
from torch.utils.flop_counter import FlopCounterMode
from turns import Alternative, serve
from workloads import GPT, WORKLOADS, Batch, Workload, _tokens, header, machine, markdown

GPUS: dict[str, Workload] = {
    "tiny": replace(WORKLOADS["tiny"], num_nodes=4096),
    "mlp": replace(WORKLOADS["mlp"], num_nodes=512),
    "gpt2": Workload("gpt2", lambda: GPT(1024, 12, 12, 768, 50_304), _tokens(1024, 50_304), batch_size=4, num_nodes=8),
}
# As small as a test on a CPU needs.
QUICK = {name: replace(workload, num_nodes=2) for name, workload in GPUS.items()} | {
    "gpt2": Workload("gpt2", lambda: GPT(16, 1, 2, 32), _tokens(16, 65), batch_size=2, num_nodes=2)
}
HALF = ("gpt2",)  # in bfloat16
ALTERNATIVES = ("loop", "big", "eager", "compiled")
TO_BIG = {"tiny": 0.6, "mlp": 0.6, "gpt2": 0.9}  # of big's throughput, at least
NUM_BATCHES, H = 4, 20

# --------------------------------------------------------------------------------------- in a process of its own


def bare(workload: Workload, device: str, half: bool, alternative: str) -> Callable[[Batch], object]:
    """vecgym's own step."""
    from vecgym.collectives import StackedCollectives
    from vecgym.engine import Engine
    from vecgym.strategy import DiLoCoStrategy
    from vecgym.strategy.simulated import simulation_of

    model = workload.model().to(device)
    engine = Engine(model, autocast=half, compile=alternative == "compiled")
    engine.prepare(tuple(x.to(device) for x in workload.batch(workload.num_nodes)))
    strategy = DiLoCoStrategy("adamw", H=H, lr=LR)
    simulation = simulation_of(model, strategy, StackedCollectives(workload.num_nodes), engine=engine, max_steps=10**6)
    state = simulation.init()

    def step(batch: Batch) -> None:
        nonlocal state
        state, _ = simulation.step(state, batch)

    return step


def serve_steps(name: str, alternative: str, device: str, quick: bool) -> None:
    """Time blocks of steps of one alternative."""
    workload, half = (QUICK if quick else GPUS)[name], name in HALF
    if half:
        torch.set_autocast_dtype(device, torch.bfloat16)
    if alternative == "loop":
        step: Callable[[Batch], object] = Loop(workload, workload.num_nodes, H, device)
    elif alternative == "big":
        step = Big(workload, device)
    else:
        step = bare(workload, device, half, alternative)
    casting = torch.autocast(device) if half and alternative in ("loop", "big") else contextlib.nullcontext()
    numbers = range(NUM_BATCHES)
    batches = [tuple(x.to(device) for x in workload.batch(workload.num_nodes, seed)) for seed in numbers]
    count = 2 if quick else H

    def work() -> dict[str, float]:
        start = time.perf_counter()
        with casting:
            for x, y in itertools.islice(itertools.cycle(batches), count):
                step((x, y))
        wait(device)
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
        return {"seconds": (time.perf_counter() - start) / count, "peak_bytes": peak}

    serve(work)


def wait(device: str) -> None:
    """Wait until the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


# ---------------------------------------------------------------------------------------------------- in the parent


def flop_of(workload: Workload) -> int:
    """The FLOP of a step of all nodes, counted without computing them."""
    model = workload.model().to("meta")
    x, y = workload.batch(1)
    with FlopCounterMode(display=False) as counter:
        model((x[0].to("meta"), y[0].to("meta"))).backward()
    return workload.num_nodes * counter.get_total_flops()


def rate_of(device: str, half: bool, quick: bool) -> float:
    """The FLOP/s of a product of two large matrices."""
    n = 256 if quick else 8192
    x, y = torch.randn(2, n, n, device=device, dtype=torch.bfloat16 if half else torch.float32).unbind()
    seconds = []
    for _ in range(10):
        wait(device)
        start = time.perf_counter()
        x @ y
        wait(device)
        seconds.append(time.perf_counter() - start)
    return 2 * n**3 / min(seconds)


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """All alternatives on one workload."""
    workload = (QUICK if args.quick else GPUS)[name]
    flop, rate = flop_of(workload), rate_of(args.device, name in HALF, args.quick)
    found: dict[str, Any] = {}
    for alternative in args.alternatives:
        command = [str(Path(__file__).resolve()), "--serve", name, alternative, args.device, str(int(args.quick))]
        with Alternative(command, args.threads) as one:
            blocks = [one.block() for _ in range(1 + (1 if args.quick else args.rounds))][1:]
        seconds = statistics.median(block["seconds"] for block in blocks)
        found[alternative] = {
            "steps_per_s": 1 / seconds, "flop_per_s": flop / seconds, "share": flop / seconds / rate,
            "peak_bytes": max(block["peak_bytes"] for block in blocks), "seconds": [b["seconds"] for b in blocks],
        }  # fmt: skip
    return {"num_nodes": workload.num_nodes, "flop": flop, "rate": rate, "alternatives": found}


def report(results: dict[str, dict[str, Any]]) -> str:
    """The table, and how much of big's throughput vecgym has."""
    rows, shares = [], []
    for name, result in results.items():
        of = result["alternatives"]
        for alternative, figures in of.items():
            rows.append([
                f"{name} K={result['num_nodes']}: {alternative}", f"{figures['steps_per_s']:.2f}",
                f"{figures['flop_per_s'] / 1e12:.3g}", f"{100 * figures['share']:.3g}",
                f"{figures['peak_bytes'] / 2**30:.2f}" if figures["peak_bytes"] else "",
            ])  # fmt: skip
        for alternative in sorted({"eager", "compiled"} & set(of) if "big" in of else ()):
            share = of[alternative]["steps_per_s"] / of["big"]["steps_per_s"]
            met = "met" if share >= TO_BIG[name] else "**missed**"
            shares.append(f"- {name}: {alternative} has {share:.2f} of big's throughput (target {TO_BIG[name]}: {met})")
    table = markdown(["workload", "steps/s", "TFLOP/s", "% of a large product", "peak GiB"], rows)
    return "\n\n".join([table, "\n".join(shares)])


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        name, alternative, device, quick = sys.argv[2:]
        return serve_steps(name, alternative, device, quick == "1")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=list(GPUS), choices=list(GPUS), metavar="NAME",
                        help=f"any of {', '.join(GPUS)}; default: all")  # fmt: skip
    parser.add_argument("--alternatives", nargs="+", default=list(ALTERNATIVES), choices=ALTERNATIVES, metavar="NAME",
                        help=f"any of {', '.join(ALTERNATIVES)}; default: all")  # fmt: skip
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="default: cuda")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads on the CPU (default 2)")
    parser.add_argument("--rounds", type=int, default=5, help="timed blocks of each alternative (default 5)")
    parser.add_argument("--quick", action="store_true", help="two nodes, short blocks, one round: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("There is no CUDA device here, and these figures are those of one: nothing is measured.")
    torch.set_num_threads(args.threads)
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    print(f"{header()}, device {device}", flush=True)
    results = {name: measure(name, args) for name in args.workloads}
    print("\n" + report(results))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine() | {"device": device}, "workloads": results}, indent=1))


if __name__ == "__main__":
    main()
