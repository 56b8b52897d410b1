"""The cost of each strategy's exchange, as a share of a training step, and the state that it keeps.

Every strategy trains the same workload in a process of its own, and they take turns (A B C, B C A, ...), H = 20 steps
at a time, which holds one synchronisation of FedAvg and DiLoCo. Within a step two public calls are timed, the gradients
and the inner optimizer; the exchange is all the rest of the step: collectives, masks, codes, book-keeping, and writing
the result into the parameters. A share is that of the medians over the rounds.

For DeMo, the optimizer is SGD on a sign, and the exchange is compared with the gradients, and with the same exchange
written as a loop over nodes and parameters, without vecgym. The arithmetic of its transforms is counted, not measured.

All strategies together take some 15 GB of memory, and five minutes a workload; `--strategies` measures some of them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from turns import serve, take_turns
from workloads import WORKLOADS, Batch, Workload, header, machine, markdown

from vecgym.collectives import StackedCollectives
from vecgym.compress.dct import grid
from vecgym.core import tree
from vecgym.engine import Engine
from vecgym.simulation import State
from vecgym.strategy import DiLoCoStrategy, GossipStrategy, SPARTAStrategy, Strategy
from vecgym.strategy.catalogue import CATALOGUE
from vecgym.strategy.simulated import simulation_of

LR = 1e-3
H = 20
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    **{name: partial(row.make, H=H, p=0.005, inner_optim="adamw", lr=LR) for name, row in CATALOGUE.items()},
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
        self._watch(strategy.inner, "step", "optimizer")
        self.simulation = simulation_of(model, strategy, self.comm, engine=self.engine, max_steps=10**6)
        # Plain steps take the place of both calls, where they can.
        self._watch(self.simulation.plain, "gradients", "gradients")
        self._watch(self.simulation.plain, "step", "optimizer")
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

    def block(self, batches: list[Batch]) -> dict[str, Any]:
        """Milliseconds per step of each phase, over one step for each batch; and bytes, kept and sent."""
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        start = time.perf_counter()
        for batch in batches:
            self.state, row = self.simulation.step(self.state, batch)
            self.comm.ledger.add(self.state.step - 1, row.transfers)
        whole = time.perf_counter() - start
        found = {**self.seconds, "exchange": whole - sum(self.seconds.values()), "step": whole}
        return {
            **{what: 1e3 * seconds / len(batches) for what, seconds in found.items()},
            "state_bytes": self.state_bytes(),
            "sent_bytes": self.comm.ledger.total_bytes / self.state.step,
        }

    def state_bytes(self) -> dict[str, int]:
        """The state that evolves, beyond a model's buffers."""
        found = {name: self.state.home[name] for name in ("params", "optimizer")}
        others = [
            held for of in (self.state.own, self.state.shared) for name, held in of.items()
            if name not in (*found, "buffers")
        ]  # fmt: skip
        return {**{name: tree.num_bytes(held) for name, held in found.items()}, "strategy": tree.num_bytes(others)}


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


PHASES = ("gradients", "optimizer", "exchange", "step")
LOOP = "demo as a loop"


def serve_one(name: str, workload: Workload, num_nodes: int, steps: int) -> None:
    """In a process of its own: blocks of a strategy."""
    batches = [workload.batch(num_nodes, seed) for seed in range(steps)]
    timed = Timed(workload, num_nodes, STRATEGIES[name]())
    serve(partial(timed.block, batches))


def measure(workload: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds per step of each phase, of each strategy, and the bytes of its state."""
    num_nodes, steps = (min(workload.num_nodes, 4), 2) if args.quick else (workload.num_nodes, H)
    command = [str(Path(__file__).resolve()), "--serve", workload.name, str(num_nodes), str(steps)]
    commands = {name: [*command, name] for name in args.strategies}
    commands[LOOP] = [str(Path(__file__).with_name("plain.py")), workload.name, str(num_nodes)]
    rounds = args.repeats, args.repeats
    turns = take_turns(commands, 0 if args.quick else None, args.threads, rounds=rounds)
    assert not turns.info[LOOP]["vecgym"]
    last = {name: turns.figures[name][-1] for name in args.strategies}
    return {
        "num_nodes": num_nodes,
        "ms": {name: {phase: turns.median(name, phase) for phase in PHASES} for name in args.strategies},
        "demo_loop_ms": 1e3 * turns.median(LOOP),
        "demo_flop": demo_flop(workload),
        "state_bytes": {name: figures["state_bytes"] for name, figures in last.items()},
        "model_bytes": sum(p.numel() * p.element_size() for p in workload.model().parameters()),
        "sent_bytes": {name: figures["sent_bytes"] for name, figures in last.items()},
        "notes": turns.notes(),
    }


def checks(results: dict[str, dict[str, Any]]) -> list[tuple[str, float, float]]:
    """(what, measured, largest allowed), of the strategies that were measured."""
    found = []
    for workload, result in results.items():
        ms = result["ms"]
        for name in TARGETS.keys() & ms.keys():
            share = ms[name]["exchange"] / ms[name]["step"]
            found.append((f"{workload}: {name}, exchange / step", share, TARGETS[name]))
        if "demo" in ms and workload in DEMO_TO_LOOP:
            ratio = ms["demo"]["exchange"] / result["demo_loop_ms"]
            found.append((f"{workload}: demo, exchange / loop", ratio, DEMO_TO_LOOP[workload]))
        if {"demo", "independent"} <= ms.keys() and workload in DEMO_TO_GRADIENT:
            ratio = ms["demo"]["exchange"] / ms["independent"]["gradients"]
            found.append((f"{workload}: demo, exchange / gradients", ratio, DEMO_TO_GRADIENT[workload]))
    return sorted(found)


def report(results: dict[str, dict[str, Any]]) -> str:
    """The settings, and every figure."""
    rows = [
        [what, f"<= {target:.3g}", f"{value:.3f}", "yes" if value <= target else "**no**"]
        for what, value, target in checks(results)
    ]
    parts = [markdown(["share", "target", "measured", "met"], rows)]
    for workload, result in results.items():
        ms, size = result["ms"], result["model_bytes"] * result["num_nodes"]
        table = [
            [name, *[f"{ms[name][phase]:.2f}" for phase in PHASES],
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
            result["notes"],
        ]
    return "\n\n".join(parts)


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        workload, num_nodes, steps, name = sys.argv[2:]
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        return serve_one(name, WORKLOADS[workload], int(num_nodes), int(steps))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=["mlp", "gpt"], choices=list(WORKLOADS), metavar="NAME",
                        help=f"any of {', '.join(WORKLOADS)}; default: mlp gpt")  # fmt: skip
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=list(STRATEGIES), metavar="NAME",
                        help=f"any of {', '.join(map(repr, STRATEGIES))}; default: all")  # fmt: skip
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default 2)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds (default 5)")
    parser.add_argument("--quick", action="store_true", help="few nodes, short blocks, one round: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    print(header(), flush=True)
    results = {}
    for name in args.workloads:
        results[name] = measure(WORKLOADS[name], args)
        print(f"{name} done; {results[name]['notes']}", flush=True)
        if args.json:
            args.json.write_text(json.dumps({"machine": machine(), "workloads": results}, indent=1))
    print("\n" + report(results))


if __name__ == "__main__":
    main()
