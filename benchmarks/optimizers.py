"""Optimizers with formulas of vecgym's own on stacked nodes, against the same optimizers of torch node by node.

K nodes with 8 matrices of 64 x 64 each, random gradients, nothing else of a step. "node by node": K `torch.optim`
optimizers that are built once, each stepped with the gradients of its node, in a process that does not import vecgym
(but for Lion, which torch has not). Muon's target is a quarter of that time. FullPrecisionMuon is compared with torch's
Muon, too. Both are in processes of their own and take turns, a block of steps each. A run takes about a minute.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from turns import serve, take_turns
from workloads import header, machine, markdown

NUM_MATRICES, SIZE = 8, 64
STEPS = {"muon": 5, "fullprecisionmuon": 5, "lion": 100, "adamw": 100}  # of a block
LR = 1e-3
TORCH: dict[str, tuple[str, dict[str, Any]]] = {
    "muon": ("Muon", {}), "lion": ("Lion", {}), "adamw": ("AdamW", {"fused": True}),
}  # fmt: skip
AGAINST = {"fullprecisionmuon": "muon"}  # others are compared with themselves, node by node
TARGETS = {"muon": 4.0, "fullprecisionmuon": 4.0}  # times faster than node by node, at least


def values(num_nodes: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Stacked parameters and gradients, `[K, 64, 64]`."""
    torch.manual_seed(0)
    params = {f"w{i}": torch.randn(num_nodes, SIZE, SIZE) for i in range(NUM_MATRICES)}
    return params, {key: torch.randn_like(p) for key, p in params.items()}


def serve_stacked(name: str, num_nodes: int, steps: int) -> None:
    from vecgym.optim import OptimSpec

    params, grads = values(num_nodes)
    rule = OptimSpec(name, lr=LR).rule()
    state = rule.init(params)

    def work() -> None:
        nonlocal params, state
        for _ in range(steps):
            params, state = rule.update(params, grads, state)

    serve(work)


def serve_each(name: str, num_nodes: int, steps: int) -> None:
    """Torch's own, node by node."""
    params, grads = values(num_nodes)
    kind, settings = TORCH[AGAINST.get(name, name)]
    where = torch.optim if hasattr(torch.optim, kind) else importlib.import_module("vecgym.optim")
    make = getattr(where, kind)
    optimizers = []
    for node in range(num_nodes):
        own = [torch.nn.Parameter(p[node].clone()) for p in params.values()]
        for p, grad in zip(own, grads.values()):
            p.grad = grad[node]
        optimizers.append(make(own, lr=LR, **settings))

    def work() -> None:
        for _ in range(steps):
            for optimizer in optimizers:
                optimizer.step()

    serve(work)


SERVERS = {"stacked": serve_stacked, "each": serve_each}


def measure(name: str, num_nodes: int, steps: int, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step of all nodes, stacked and node by node."""
    command = [str(Path(__file__).resolve()), "--serve", name, str(num_nodes), str(steps)]
    turns = take_turns({side: [*command, side] for side in SERVERS}, 0 if args.quick else args.seconds, args.threads)
    assert turns.info["each"]["vecgym"] == (name == "lion" or not hasattr(torch.optim, "Muon"))
    return {f"{side}_s": turns.median(side) / steps for side in SERVERS} | {"notes": turns.notes()}


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        return SERVERS[sys.argv[5]](sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=32, help="K (default 32)")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default 2)")
    parser.add_argument("--seconds", type=float, default=15, help="about how long for each optimizer (default 15)")
    parser.add_argument("--quick", action="store_true", help="4 nodes, two steps: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(header(), flush=True)
    num_nodes = 4 if args.quick else args.nodes
    results = {}
    for name, steps in STEPS.items():
        results[name] = measure(name, num_nodes, 2 if args.quick else steps, args)
        print(f"{name} done; {results[name]['notes']}", flush=True)
    rows = []
    for name, result in results.items():
        ratio = result["each_s"] / result["stacked_s"]
        target = TARGETS.get(name)
        met = "" if target is None else "yes" if ratio >= target else "no"
        times = [f"{1e3 * result[key]:.2f}" for key in ("each_s", "stacked_s")]
        rows.append([name, *times, f"{ratio:.1f}", "" if target is None else f"{target:g}", met])
    columns = [f"K = {num_nodes}, {NUM_MATRICES} x [{SIZE}, {SIZE}]", "ms node by node", "ms stacked", "ratio"]
    print("\n" + markdown([*columns, "target", "met"], rows))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "optimizers": results}, indent=1))


if __name__ == "__main__":
    main()
