"""The cost of the gradient of a whole run: time and memory of loss + gradient over T steps, against T plain steps.

DiLoCo (H = 10) on 8 nodes; the gradient is that of the final loss of the average by the inner and the outer learning
rate. Each of these is a process of its own, fresh for each row, and they take turns:

- plain: T steps of `Simulation.step`, which overwrite their state;
- stored: `rollout` and its gradient, with every step stored;
- segments: the same in about sqrt(T) parts, each computed again in the backward pass;
- forward mode: `rollout_jvp` by one of the two numbers; no memory grows with T, and there is no backward pass;
- many: 16 runs with numbers and batches of their own as one program, `num_runs=16`, and the gradient of their mean
  loss; its row is in units of 16 times the stored one.

Time is the median over the rounds, in units of that of the plain steps. "forward" is the part of it that the rollout
itself takes; the rest is the backward pass. Memory is the peak resident memory less what it was before, after a rollout
of two steps had made torch import what it needs. A row that would take more than `--memory` GB, by what the row before
took per step, is left out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from turns import serve, take_turns
from workloads import WORKLOADS, header, machine, markdown

NUM_NODES, H = 8, 10
STEPS = [10, 100, 1000]
MODES = ["stored", "segments", "forward mode"]
RATES = {"sgd": 0.05, "adamw": 1e-3}  # of the inner optimizers
TARGETS = {"stored": 5.0, "segments": 8.0}  # times the plain steps
NUM_RUNS, TARGET_MANY = 16, 1 / 6  # of the time of as many calls, where no arithmetic, but Python takes the time: tiny
TARGET_BYTES = 2e9  # of 1000 steps in segments


def peak_bytes() -> int:
    """The most resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def serve_mode(name: str, inner: str, num_steps: int, mode: str) -> None:
    """In a process of its own: T plain steps, or a rollout and its gradient, for each block."""
    from vecgym import rollout, rollout_jvp
    from vecgym.collectives import StackedCollectives
    from vecgym.engine import Engine
    from vecgym.strategy import DiLoCoStrategy
    from vecgym.strategy.simulated import simulation_of

    workload = WORKLOADS[name]
    model = workload.model()
    batches = [workload.batch(NUM_NODES, seed % 20) for seed in range(num_steps)]
    data: dict[str, Any] = {"num_nodes": NUM_NODES, "eval_batch": workload.data(64, seed=100)}
    engine = Engine(model, engine="vmap", node_threads=1)
    engine.prepare(batches[0])
    segments = min(num_steps, round(math.sqrt(num_steps))) if mode == "segments" else None

    def strategy(lr: Any, outer_lr: Any = 0.7) -> DiLoCoStrategy:
        return DiLoCoStrategy(inner, H=min(H, num_steps), lr=lr, outer_lr=outer_lr)

    def plain(batches: list[Any], segments: int | None) -> float:
        simulation = simulation_of(
            model, strategy(RATES[inner]), StackedCollectives(NUM_NODES), engine=engine, max_steps=10**6
        )
        state = simulation.init()
        start = time.perf_counter()
        for batch in batches:
            state, _ = simulation.step(state, batch)
        return time.perf_counter() - start

    def gradient(batches: list[Any], segments: int | None) -> float:
        numbers = [torch.tensor(x, requires_grad=True) for x in (RATES[inner], 0.7)]
        start = time.perf_counter()
        loss = rollout(model, strategy(*numbers), batches, segments=segments, engine=engine, **data).loss
        forward = time.perf_counter() - start
        torch.autograd.grad(loss, numbers)
        return forward

    def forward_mode(batches: list[Any], segments: int | None) -> float:
        start = time.perf_counter()
        lr: list[Tensor] = [torch.tensor(RATES[inner])]
        rollout_jvp(model, strategy, batches, lr, [torch.tensor(1.0)], engine=engine, **data)
        return time.perf_counter() - start

    def many(batches: list[Any], segments: int | None) -> float:
        numbers = [torch.full((NUM_RUNS,), x, requires_grad=True) for x in (RATES[inner], 0.7)]
        of_runs = [batches[i % len(batches) :] + batches[: i % len(batches)] for i in range(NUM_RUNS)]
        start = time.perf_counter()
        outcome = rollout(
            model, lambda i: strategy(numbers[0][i], numbers[1][i]), of_runs, num_runs=NUM_RUNS, engine=engine, **data
        )
        forward = time.perf_counter() - start
        torch.autograd.grad(outcome.loss.mean(), numbers)
        return forward

    modes = {"plain": plain, "forward mode": forward_mode, "many": many}
    once: Callable[[list[Any], int | None], float] = modes.get(mode, gradient)
    once(batches[:H], segments and 2)  # imports and first calls
    before = peak_bytes()

    def work() -> dict[str, float]:
        return {"forward": once(batches, segments), "peak_bytes": peak_bytes() - before}

    serve(work)


def rows_of(name: str, inner: str, steps: list[int], args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each mode and number of steps, where the memory allows it."""
    rows = []
    per_step: dict[str, float] = {}
    for num_steps in steps:
        # The memory of a stored run grows with T, of one in segments with its root.
        growth = {"stored": num_steps, "segments": math.sqrt(num_steps), "forward mode": 1}
        modes = [mode for mode in MODES if per_step.get(mode, 0.0) * growth[mode] <= args.memory * 1e9]
        command = [str(Path(__file__).resolve()), "--serve", name, inner, str(num_steps)]
        rounds = args.repeats if num_steps < 1000 else 1
        turns = take_turns(
            {mode: [*command, mode] for mode in ("plain", *modes)}, 0 if args.quick else None, args.threads,
            rounds=(rounds, rounds), warm_up=rounds > 1,
        )  # fmt: skip
        for mode in modes:
            found = {
                "all": turns.median(mode),
                "plain": turns.median("plain"),
                "forward": turns.median(mode, "forward"),
            }
            found["peak_bytes"] = max(turns.all(mode, "peak_bytes"))
            per_step[mode] = max(found["peak_bytes"] / growth[mode], per_step.get(mode, 0.0))
            rows.append({"workload": name, "inner": inner, "mode": mode, "num_steps": num_steps, **found})
            ratio = found["all"] / found["plain"]
            line = f"{name}, {inner}, {mode}, T = {num_steps}: {ratio:.1f} times the plain steps"
            print(f"{line}, {found['peak_bytes'] / 1e6:.0f} MB", file=sys.stderr, flush=True)
        print(f"{name}, {inner}, T = {num_steps}: {turns.notes()}", flush=True)
    return sorted(rows, key=lambda row: MODES.index(row["mode"]))


def many_of(name: str, inner: str, args: argparse.Namespace) -> list[str]:
    """The time of many runs as one program, and of as many calls."""
    num_steps = 10 if args.quick else 100
    command = [str(Path(__file__).resolve()), "--serve", name, inner, str(num_steps)]
    turns = take_turns(
        {mode: [*command, mode] for mode in ("stored", "many")}, 0 if args.quick else None, args.threads,
        rounds=(args.repeats, args.repeats), warm_up=args.repeats > 1,
    )  # fmt: skip
    calls, many = NUM_RUNS * turns.median("stored"), turns.median("many")
    met = "" if name != "tiny" else "yes" if many <= TARGET_MANY * calls else "**no**"
    return [f"{name}, {inner}, T = {num_steps}", f"{calls:.2f}", f"{many:.2f}", f"{many / calls:.3f}", met]


def report(rows: list[dict[str, Any]]) -> str:
    """All rows, then the targets."""
    cells = [
        [
            f"{row['workload']}, {row['inner']}, {row['mode']}",
            str(row["num_steps"]),
            f"{1e3 * row['plain'] / row['num_steps']:.2f}",
            f"{row['forward'] / row['plain']:.1f}",
            f"{row['all'] / row['plain']:.1f}",
            f"{row['peak_bytes'] / 1e6:.0f}",
        ]
        for row in rows
    ]
    columns = ["loss + gradient", "T", "plain ms / step", "forward / plain", "all / plain", "peak MB"]
    checks = []
    for row in rows:
        title = f"{row['workload']}, {row['inner']}, {row['mode']}, T = {row['num_steps']}"
        if row["mode"] in TARGETS:
            ratio, target = row["all"] / row["plain"], TARGETS[row["mode"]]
            met = "yes" if ratio <= target else "**no**"
            checks.append([f"{title}: time / plain", f"<= {target:g}", f"{ratio:.1f}", met])
            if row["mode"] == "segments" and row["inner"] == "sgd" and row["num_steps"] == 1000:
                peak = row["peak_bytes"]
                met = "yes" if peak < TARGET_BYTES else "**no**"
                checks.append([f"{title}: GB", f"< {TARGET_BYTES / 1e9:g}", f"{peak / 1e9:.2f}", met])
    return markdown(columns, cells) + "\n\n" + markdown(["target", "", "measured", "met"], checks)


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        name, inner, num_steps, mode = sys.argv[2:]
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        return serve_mode(name, inner, int(num_steps), mode)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=["tiny", "mlp"], choices=list(WORKLOADS), metavar="NAME",
                        help=f"any of {', '.join(WORKLOADS)}; default: tiny mlp")  # fmt: skip
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default 2)")
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement; 1000 steps: once (default 3)")
    parser.add_argument("--memory", type=float, default=4.0, help="GB that a row may take (default 4)")
    parser.add_argument("--quick", action="store_true", help="few steps of a small model: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(header(), flush=True)
    steps, inners = STEPS, list(RATES)
    if args.quick:
        steps, inners, args.workloads, args.repeats = [10], ["sgd"], args.workloads[:1], 1
    rows = [row for name in args.workloads for inner in inners for row in rows_of(name, inner, steps, args)]
    print("\n" + report(rows))
    many = [many_of(name, inner, args) for name in args.workloads for inner in inners]
    columns = ["loss + gradient", f"{NUM_RUNS} calls, s", "one program, s", "ratio", f"<= {TARGET_MANY:.3f}"]
    print("\n" + markdown(columns, many))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
