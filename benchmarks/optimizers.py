"""Optimizers with formulas of vecgym's own on stacked nodes, against the same optimizers of torch node by node.

K nodes with 8 matrices of 64 x 64 each, random gradients, nothing else of a step. "node by node": K `torch.optim`
optimizers that are built once, each stepped with the gradients of its node. Muon's target is a quarter of that time.
FullPrecisionMuon is compared with torch's Muon, too. AdamW stands beside them. A run takes 10 to 20 seconds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from workloads import header, machine, markdown

from vecgym.optim import OptimSpec

NUM_MATRICES, SIZE = 8, 64
AGAINST = {"fullprecisionmuon": "muon"}  # others are compared with themselves, node by node
TARGETS = {"muon": 4.0, "fullprecisionmuon": 4.0}  # times faster than node by node, at least


def seconds(step: Callable[[], object], repeats: int) -> float:
    """The shortest of several steps, after one that warms up."""
    times = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def measure(name: str, num_nodes: int, repeats: int) -> dict[str, float]:
    """Seconds of a step of all nodes, stacked and node by node."""
    torch.manual_seed(0)
    params = {f"w{i}": torch.randn(num_nodes, SIZE, SIZE) for i in range(NUM_MATRICES)}
    grads = {key: torch.randn_like(p) for key, p in params.items()}
    spec = OptimSpec(name)
    rule = spec.rule()
    stacked = {key: p.clone() for key, p in params.items()}
    state = rule.init(stacked)

    def step_stacked() -> None:
        nonlocal stacked, state
        stacked, state = rule.update(stacked, grads, state)

    optimizers = []
    for node in range(num_nodes):
        model = {key: torch.nn.Parameter(p[node].clone()) for key, p in params.items()}
        for key, p in model.items():
            p.grad = grads[key][node]
        optimizers.append(OptimSpec(AGAINST.get(name, name)).build(model.items()))

    def step_each() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return {"stacked_s": seconds(step_stacked, repeats), "each_s": seconds(step_each, repeats)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=32, help="K (default 32)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument("--repeats", type=int, default=20, help="steps (default 20)")
    parser.add_argument("--quick", action="store_true", help="4 nodes, two steps: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(header())
    num_nodes, repeats = (4, 2) if args.quick else (args.nodes, args.repeats)
    results = {name: measure(name, num_nodes, repeats) for name in ("muon", "fullprecisionmuon", "lion", "adamw")}
    rows = []
    for name, result in results.items():
        ratio = result["each_s"] / result["stacked_s"]
        target = TARGETS.get(name)
        met = "" if target is None else "yes" if ratio >= target else "no"
        times = [f"{1e3 * result[key]:.2f}" for key in ("each_s", "stacked_s")]
        rows.append([name, *times, f"{ratio:.1f}", "" if target is None else f"{target:g}", met])
    columns = [f"K = {num_nodes}, {NUM_MATRICES} x [{SIZE}, {SIZE}]", "ms node by node", "ms stacked", "ratio"]
    print(markdown([*columns, "target", "met"], rows))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "optimizers": results}, indent=1))


if __name__ == "__main__":
    main()
