"""A sweep of tiny asynchronous configurations with the same events: in one stack against one after the other.

Both train the same configurations; set-up, evaluation and recording count. Each is in a process of its own with one
thread, and they take turns. What counts is CPU time, so that other programs disturb little. The ratio is that of the
medians.

    python benchmarks/async_sweep.py --repeats 5
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset
from turns import serve, take_turns
from workloads import header, machine, markdown

from vecgym import sweep
from vecgym.clock import Compute
from vecgym.models import Classifier
from vecgym.strategy import AsyncStrategy, DelayedNesterov, HeLoCo, OuterOptimizer, Server

GRID: dict[str, list[Any]] = {
    "lr": [0.01, 0.02, 0.05, 0.1],
    "outer_lr": [0.1, 0.3],
    "seed": [0, 1],
}  # 16 configurations
SERVERS: dict[str, Callable[[float], Server]] = {
    "SGD": lambda lr: OuterOptimizer(lr=lr),
    "Nesterov": DelayedNesterov,
    "HeLoCo": HeLoCo,
}


CHUNKS = {"one stack": None, "one by one": 1}  # configurations that are trained together; None: all


def serve_sweep(server: str, num_nodes: int, updates: int, chunk: int | None) -> None:
    """In a process of its own: sweep, in stacks of `chunk`."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(2048, 16)
    data = TensorDataset(x, x[:, :4].argmax(1))
    model = Classifier(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)))
    made = SERVERS[server]

    def strategy(lr: float, outer_lr: float) -> AsyncStrategy:
        return AsyncStrategy("sgd", made(outer_lr), H=10, lr=lr)

    def work() -> None:
        sweep(
            model, data, data, strategy=strategy, grid=GRID, num_nodes=num_nodes, max_updates=updates, batch_size=16,
            compute=Compute.lognormal(torch.linspace(1.0, 3.0, num_nodes).tolist(), 0.3), val_size=256,
            val_interval=None, device="cpu", progress=False, chunk_configs=chunk,
        )  # fmt: skip

    serve(work)


def measure(server: str, num_nodes: int, updates: int, args: argparse.Namespace) -> dict[str, Any]:
    """Processor time of both, in seconds."""
    command = [str(Path(__file__).resolve()), "--serve", server, str(num_nodes), str(updates)]
    rounds = args.repeats, args.repeats
    turns = take_turns({name: [*command, name] for name in CHUNKS}, 0 if args.quick else None, 1, rounds=rounds)
    together, apart = (turns.median(name, "cpu") for name in CHUNKS)
    return {"together_s": together, "apart_s": apart, "ratio": apart / together, "notes": turns.notes("cpu")}


def main() -> None:
    """Print a row for each server."""
    if sys.argv[1:2] == ["--serve"]:
        return serve_sweep(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), CHUNKS[sys.argv[5]])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--nodes", type=int, default=8, help="K (default 8)")
    parser.add_argument("--updates", type=int, default=80, help="of each server (default 80)")
    parser.add_argument("--threads", type=int, default=1, choices=[1], help="one: what counts is CPU time")
    parser.add_argument("--quick", action="store_true", help="few nodes and updates, one round: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(header(), flush=True)
    num_nodes, updates = (2, 4) if args.quick else (args.nodes, args.updates)
    results = {}
    for server in SERVERS:
        results[server] = measure(server, num_nodes, updates, args)
        print(f"{server} done: {results[server]['ratio']:.1f}; {results[server]['notes']}", flush=True)
    rows = [
        [server, f"{found['together_s']:.2f}", f"{found['apart_s']:.2f}", f"{found['ratio']:.1f}"]
        for server, found in results.items()
    ]
    print("\n" + markdown(["server", "one stack, CPU s", "one by one, CPU s", "ratio"], rows))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "servers": results}, indent=1))


if __name__ == "__main__":
    main()
