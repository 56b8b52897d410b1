"""A sweep of tiny asynchronous configurations with the same events: in one stack against one after the other.

Both train the same configurations, in one process and one thread; set-up, evaluation and recording count. They take
turns, and what counts is CPU time, so that other programs disturb little. The ratio is that of the medians.

    python benchmarks/async_sweep.py --rounds 5
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from vecgym import SweepResult, sweep
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


def run(server: str, num_nodes: int, updates: int, chunk: int | None) -> SweepResult:
    """Sweep, in stacks of `chunk`."""
    torch.manual_seed(0)
    x = torch.randn(2048, 16)
    data = TensorDataset(x, x[:, :4].argmax(1))
    model = Classifier(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)))
    made = SERVERS[server]

    def strategy(lr: float, outer_lr: float) -> AsyncStrategy:
        return AsyncStrategy("sgd", made(outer_lr), H=10, lr=lr)

    return sweep(
        model, data, data, strategy=strategy, grid=GRID, num_nodes=num_nodes, max_updates=updates, batch_size=16,
        compute=Compute.lognormal(torch.linspace(1.0, 3.0, num_nodes).tolist(), 0.3), val_size=256, val_interval=None,
        device="cpu", progress=False, chunk_configs=chunk,
    )  # fmt: skip


def main() -> None:
    """Print a line for each server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured")
    parser.add_argument("--nodes", type=int, default=8, help="K")
    parser.add_argument("--updates", type=int, default=80, help="of each server")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for server in SERVERS:
        seconds: dict[int | None, list[float]] = {None: [], 1: []}
        for _ in range(given.rounds):
            for chunk, times in seconds.items():
                start = time.process_time()
                run(server, given.nodes, given.updates, chunk)
                times.append(time.process_time() - start)
        together, apart = (statistics.median(seconds[chunk]) for chunk in (None, 1))
        print(
            f"{server}: {together:.2f} s in one stack, {apart:.2f} s one after the other: {apart / together:.1f} times"
        )


if __name__ == "__main__":
    main()
