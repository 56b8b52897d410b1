"""What the exchange of each strategy costs, as a share of a training step, and the state that it keeps.

Every strategy trains the same workload, interleaved in one process (A B C A B C ...), H = 20 steps at a time, which
holds one synchronisation of FedAvg and DiLoCo. Within a step two public calls are timed, the gradients and the inner
optimizer; the exchange is all the rest of the step: collectives, masks, codes, book-keeping, and writing the result
into the parameters. A share is that of the medians over the rounds.

For DeMo, the optimizer is SGD on a sign, and the exchange is compared with the gradients, and with the same exchange
written as a loop over nodes and parameters. The arithmetic of its transforms is counted, not measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from workloads import WORKLOADS, Batch, Workload, header, machine, markdown

from vecgym.collectives import StackedCollectives
from vecgym.compress import Grid, basis, grid
from vecgym.core import tree
from vecgym.engine import Engine
from vecgym.engine.simulation import Simulation, State
from vecgym.strategy import DiLoCoStrategy, GossipStrategy, SPARTAStrategy, Strategy
from vecgym.strategy.catalogue import CATALOGUE

LR = 1e-3
H = 20
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    **{name: partial(row.make, H, 0.005, inner_optim="adamw", lr=LR) for name, row in CATALOGUE.items()},
    "diloco int8": lambda: DiLoCoStrategy("adamw", H=H, lr=LR, compression="int8"),
    "sparta topk int8": lambda: SPARTAStrategy(0.005, "adamw", lr=LR, compression_method="topk", quantization_bits=8),
    "gossip one peer": lambda: GossipStrategy("one_peer_exponential", inner_optim="adamw", lr=LR),
    "gossip complete": lambda: GossipStrategy("complete", inner_optim="adamw", lr=LR),
}
# Largest shares of the step, measured with 2 threads.
TARGETS = {"fedavg": 0.05, "diloco": 0.05, "sparta": 0.25, "gossip": 0.5}
DEMO_TO_GRADIENT = {"gpt": 1.0}
DEMO_TO_LOOP = {"mlp": 0.5}


class Timed:
    """One strategy on one workload, with a stop-watch on the gradients and on the optimizer."""

    def __init__(self, workload: Workload, num_nodes: int, strategy: Strategy) -> None:
        model = workload.model()
        self.engine = Engine(model)
        self.engine.prepare(workload.batch(num_nodes))
        self.comm = StackedCollectives(num_nodes)
        self.seconds = dict.fromkeys(("gradients", "optimizer"), 0.0)
        self._watch(self.engine, "gradients", "gradients")
        self._watch(strategy, "optimize", "optimizer")
        self.simulation = Simulation(model, strategy, self.comm, engine=self.engine, max_steps=10**6)
        self.state: State = self.simulation.init()

    def _watch(self, owner: Any, method: str, what: str) -> None:
        call = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[what] += time.perf_counter() - start

        setattr(owner, method, timed)

    def block(self, batches: list[Batch]) -> dict[str, float]:
        """Seconds per step of each phase, over one step for each batch."""
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        start = time.perf_counter()
        for batch in batches:
            self.state, metrics = self.simulation.step(self.state, batch)
            self.comm.ledger.add(self.state.step - 1, metrics.transfers)
        whole = time.perf_counter() - start
        found = {**self.seconds, "exchange": whole - sum(self.seconds.values()), "step": whole}
        return {what: seconds / len(batches) for what, seconds in found.items()}

    def state_bytes(self) -> dict[str, int]:
        """What evolves, beyond a model's buffers."""
        parts = {"params": self.state.params, "optimizer": self.state.optimizer, "strategy": self.state.strategy}
        return {name: tree.num_bytes(values) for name, values in parts.items()}


class DeMoLoop:
    """DeMo's exchange, node after node and parameter after parameter: 2-D transforms by matrix products."""

    def __init__(self, workload: Workload, num_nodes: int) -> None:
        shapes = {name: p.shape for name, p in workload.model().named_parameters()}
        self.grids = {name: grid(tuple(shape), 64) for name, shape in shapes.items()}
        self.residuals = [{name: torch.zeros(shape) for name, shape in shapes.items()} for _ in range(num_nodes)]
        self.gradients = [{name: torch.randn(shape) for name, shape in shapes.items()} for _ in range(num_nodes)]

    @torch.no_grad()
    def __call__(self) -> None:
        total = {name: torch.zeros(cut.chunks, cut.area) for name, cut in self.grids.items()}
        count = {name: torch.zeros(cut.chunks, cut.area) for name, cut in self.grids.items()}
        for residual, gradient in zip(self.residuals, self.gradients):
            for name, cut in self.grids.items():
                delta = residual[name].mul_(0.999).add_(gradient[name], alpha=LR)
                coefficients = self._transform(self._chunks(delta, cut), cut, inverse=False).flatten(1)
                indices = coefficients.abs().topk(min(32, cut.area)).indices
                values = coefficients.gather(1, indices)
                sent = torch.zeros_like(coefficients).scatter_(1, indices, values)
                back = self._transform(sent.view(-1, cut.height, cut.width), cut, inverse=True)
                delta.sub_(self._tensor(back, cut, delta))
                total[name].scatter_add_(1, indices, values)
                count[name].scatter_add_(1, indices, torch.ones_like(values))
        for name, cut in self.grids.items():
            mean = (total[name] / count[name].clamp(min=1)).view(-1, cut.height, cut.width)
            self._tensor(self._transform(mean, cut, inverse=True), cut, self.residuals[0][name]).sign_()

    def _chunks(self, x: Tensor, cut: Grid) -> Tensor:
        parts = x.reshape(cut.rows, cut.height, cut.columns, cut.width)
        return parts.transpose(1, 2).reshape(-1, cut.height, cut.width)

    def _tensor(self, chunks: Tensor, cut: Grid, like: Tensor) -> Tensor:
        parts = chunks.reshape(cut.rows, cut.columns, cut.height, cut.width)
        return parts.transpose(1, 2).reshape(like.shape)

    def _transform(self, chunks: Tensor, cut: Grid, inverse: bool) -> Tensor:
        rows, columns = (basis(n, chunks.dtype, chunks.device) for n in (cut.height, cut.width))
        return rows.T @ chunks @ columns if inverse else rows @ chunks @ columns.T


def demo_flop(workload: Workload) -> dict[str, int]:
    """Arithmetic of one node's transform of its momentum, and of its gradient."""
    model = workload.model()
    cuts = [grid(tuple(p.shape), 64) for p in model.parameters()]
    transform = sum(
        2 * cut.chunks * cut.area * ((cut.height > 1) * cut.height + (cut.width > 1) * cut.width) for cut in cuts
    )
    engine = Engine(model)
    engine.prepare(workload.batch(2))
    assert engine.facts is not None
    return {"transform": transform, "gradient": engine.facts.flop}


def measure(workload: Workload, num_nodes: int, steps: int, repeats: int) -> dict[str, Any]:
    """Milliseconds per step of each phase, of each strategy, and the bytes of its state."""
    batches = [workload.batch(num_nodes, seed) for seed in range(steps)]
    timed = {name: Timed(workload, num_nodes, make()) for name, make in STRATEGIES.items()}
    loop = DeMoLoop(workload, num_nodes)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in timed}
    loops: list[float] = []
    for repeat in range(repeats + 1):  # the first round is not measured
        for name, one in timed.items():
            result = one.block(batches)
            if repeat > 0:
                found[name].append(result)
        start = time.perf_counter()
        loop()
        if repeat > 0:
            loops.append(time.perf_counter() - start)
    ms = {
        name: {what: 1e3 * statistics.median(row[what] for row in rows) for what in rows[0]}
        for name, rows in found.items()
    }
    for one in timed.values():
        one.engine.close()
    return {
        "num_nodes": num_nodes,
        "ms": ms,
        "demo_loop_ms": 1e3 * statistics.median(loops),
        "demo_flop": demo_flop(workload),
        "state_bytes": {name: one.state_bytes() for name, one in timed.items()},
        "model_bytes": sum(p.numel() * p.element_size() for p in workload.model().parameters()),
        "sent_bytes": {name: one.comm.ledger.total_bytes / one.state.step for name, one in timed.items()},
    }


def checks(results: dict[str, dict[str, Any]]) -> list[tuple[str, float, float]]:
    """(what, measured, largest allowed)."""
    found = []
    for workload, result in results.items():
        ms = result["ms"]
        for name, target in TARGETS.items():
            found.append((f"{workload}: {name}, exchange / step", ms[name]["exchange"] / ms[name]["step"], target))
        demo = ms["demo"]["exchange"]
        if workload in DEMO_TO_GRADIENT:
            found.append(
                (
                    f"{workload}: demo, exchange / gradients",
                    demo / ms["independent"]["gradients"],
                    DEMO_TO_GRADIENT[workload],
                )
            )
        if workload in DEMO_TO_LOOP:
            found.append((f"{workload}: demo, exchange / loop", demo / result["demo_loop_ms"], DEMO_TO_LOOP[workload]))
    return found


def report(results: dict[str, dict[str, Any]]) -> str:
    """What was asked for, and every figure."""
    rows = [
        [what, f"<= {target:.3g}", f"{value:.3f}", "yes" if value <= target else "**no**"]
        for what, value, target in checks(results)
    ]
    parts = [markdown(["share", "target", "measured", "met"], rows)]
    for workload, result in results.items():
        ms, size = result["ms"], result["model_bytes"] * result["num_nodes"]
        table = [
            [name, *[f"{ms[name][what]:.2f}" for what in ("gradients", "optimizer", "exchange", "step")],
             f"{100 * ms[name]['exchange'] / ms[name]['step']:.1f} %",
             *[f"{result['state_bytes'][name][part] / size:.3f}" for part in ("params", "optimizer", "strategy")],
             f"{result['sent_bytes'][name] / result['model_bytes']:.4f}"]
            for name in ms
        ]  # fmt: skip
        columns = ["strategy", "gradients", "optimizer", "exchange", "step", "share", "params", "opt. state",
                   "strategy state", "sent"]  # fmt: skip
        flop = result["demo_flop"]
        parts += [
            f"{workload}, K={result['num_nodes']}: ms per step (median); state in units of K models (K b P bytes); "
            "bytes sent per node and step in units of one model (b P):",
            markdown(columns, table),
            f"DeMo on {workload}: a node's transform takes {flop['transform'] / 1e6:.1f} MFLOP, its gradient "
            f"{flop['gradient'] / 1e6:.1f}; the exchange as a loop over nodes and parameters "
            f"{result['demo_loop_ms']:.1f} ms.",
        ]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=["mlp", "gpt"], choices=list(WORKLOADS), metavar="NAME",
                        help=f"any of {', '.join(WORKLOADS)}; default: mlp gpt")  # fmt: skip
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default 2)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds (default 5)")
    parser.add_argument("--quick", action="store_true", help="few nodes, short blocks, one round: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    print(header(), flush=True)
    results = {}
    for name in args.workloads:
        workload = WORKLOADS[name]
        if args.quick:
            results[name] = measure(workload, min(workload.num_nodes, 4), steps=2, repeats=1)
        else:
            results[name] = measure(workload, workload.num_nodes, steps=H, repeats=args.repeats)
        print(f"{name} done", flush=True)
        if args.json:
            args.json.write_text(json.dumps({"machine": machine(), "workloads": results}, indent=1))
    print("\n" + report(results))


if __name__ == "__main__":
    main()
