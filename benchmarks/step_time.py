"""Time of one training step: vecgym against what one would write instead.

For every workload these alternatives run interleaved in one process (A B C A B C ...), and a ratio is that of the
medians over the rounds. The unit is a block of H = 20 steps, which holds one synchronisation of DiLoCo.

- loop: K plain modules, each with fused AdamW, one after the other; every H steps DiLoCo's outer step in the
  obvious way (mean over the modules, torch's SGD with Nesterov momentum, copy back).
- vecgym: `Simulation.step` with `DiLoCoStrategy(H)`, `engine="auto"`; with `--engines`, also each engine with 1 and
  with all threads: the figures by which `vecgym.engine.choose_plan` is calibrated.
- big: one model with fused AdamW on the K batches together; the floor for AllReduce.
- allreduce: `Simulation.step` with `AllReduceStrategy`.
- fit: `Trainer.fit` with a progress bar (into nothing) on a `TensorDataset`, without validation. What it costs to
  start is not counted: the time is that of a fit of 2n steps less that of a fit of n.

Every alternative cycles through the same few synthetic batches. All workloads together take about eight minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset
from workloads import WORKLOADS, Batch, Workload, header, machine, markdown

from vecgym import Trainer
from vecgym.collectives import StackedCollectives
from vecgym.core import tree
from vecgym.engine import Engine
from vecgym.engine.simulation import Simulation, State
from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy, Strategy

LR = 1e-3
NUM_BATCHES = 20
# Upper bounds for ratios of step times, measured with 2 threads.
TO_LOOP = {"tiny": 1 / 50, "mlp": 1 / 3, "cnn": 1 / 1.25, "gpt": 1 / 1.35, "gpt256": 1 / 1.08}
TO_BIG = 1.15
TO_BARE_STEP = 1.15

Block = Callable[[], object]


class Loop:
    """DiLoCo over K plain modules."""

    def __init__(self, workload: Workload, num_nodes: int, H: int) -> None:
        self.models = [workload.model() for _ in range(num_nodes)]
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=LR, fused=True) for model in self.models]
        self.outer = list(workload.model().parameters())
        self.outer_optimizer = torch.optim.SGD(self.outer, lr=0.7, momentum=0.9, nesterov=True)
        self.H = H
        self.step = 0

    def __call__(self, batch: Batch) -> None:
        for model, optimizer, x, y in zip(self.models, self.optimizers, *batch):
            model((x, y)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        if self.step % self.H == 0:
            self.synchronize()

    @torch.no_grad()
    def synchronize(self) -> None:
        for outer, *inner in zip(self.outer, *[model.parameters() for model in self.models]):
            outer.grad = outer - torch.stack(inner).mean(0)
        self.outer_optimizer.step()
        for outer, *inner in zip(self.outer, *[model.parameters() for model in self.models]):
            for p in inner:
                p.copy_(outer)


class Big:
    """One plain module on the batches of all nodes together."""

    def __init__(self, workload: Workload) -> None:
        self.model = workload.model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=True)

    def __call__(self, batch: Batch) -> None:
        x, y = batch
        self.model((x.flatten(0, 1), y.flatten(0, 1))).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class Bare:
    """vecgym's own step."""

    def __init__(self, workload: Workload, num_nodes: int, strategy: Strategy, **engine: Any) -> None:
        model = workload.model()
        self.engine = Engine(model, **engine)
        self.plan = self.engine.prepare(workload.batch(num_nodes))
        self.simulation = Simulation(model, strategy, StackedCollectives(num_nodes), engine=self.engine)
        self.state: State = self.simulation.init()

    def __call__(self, batch: Batch) -> None:
        self.state, _ = self.simulation.step(self.state, batch)

    def state_bytes(self) -> int:
        """What all that evolves takes, including DiLoCo's outer parameters."""
        return tree.num_bytes([self.state.params, self.state.buffers, self.state.optimizer, self.state.strategy])


def block(step: Callable[[Batch], object], batches: list[Batch], num_steps: int) -> Block:
    """A call that takes `num_steps` steps."""

    def run() -> None:
        for batch in itertools.islice(itertools.cycle(batches), num_steps):
            step(batch)

    return run


def fit(workload: Workload, num_nodes: int, strategy: Strategy, data: tuple[Tensor, ...], num_steps: int) -> Block:
    """A call that trains for `num_steps` steps from the start."""
    trainer = Trainer(workload.model(), TensorDataset(*data))

    def run() -> None:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            trainer.fit(strategy, num_nodes, max_steps=num_steps, batch_size=workload.batch_size, device="cpu")

    return run


def interleave(alternatives: dict[str, Block], budget_s: float) -> dict[str, list[float]]:
    """Seconds of each call, in turn, after one unmeasured round: as many rounds as the budget allows, 3 to 25."""
    seconds: dict[str, list[float]] = {name: [] for name in alternatives}
    start = time.perf_counter()
    for run in alternatives.values():
        run()
    round_s = time.perf_counter() - start
    for _ in range(max(3, min(25, round(budget_s / round_s))) if budget_s > 0 else 1):
        for name, run in alternatives.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def measure(
    workload: Workload, num_nodes: int, H: int, budget_s: float, fit_s: float, with_engines: bool
) -> dict[str, Any]:
    """Every alternative on one workload: milliseconds per step, ratios, plan, bytes."""

    def diloco() -> Strategy:
        return DiLoCoStrategy("adamw", H=H, lr=LR)

    threads = sorted({1, torch.get_num_threads()})
    engines = {
        f"{engine} x{count}": Bare(workload, num_nodes, diloco(), engine=engine, node_threads=count)
        for engine in ("vmap", "loop")
        for count in threads
        if with_engines
    }
    auto = Bare(workload, num_nodes, diloco())
    allreduce = Bare(workload, num_nodes, AllReduceStrategy("adamw", lr=LR))
    steps: dict[str, Callable[[Batch], object]] = {
        "loop": Loop(workload, num_nodes, H),
        "vecgym": auto,
        "big": Big(workload),
        "allreduce": allreduce,
        **{f"vecgym {name}": one for name, one in engines.items()},
    }
    batches = [workload.batch(num_nodes, seed) for seed in range(NUM_BATCHES)]
    alternatives: dict[str, Block] = {name: block(step, batches, H) for name, step in steps.items()}
    seconds = interleave(alternatives, budget_s)

    # The fits are long enough, `fit_s` seconds, to be told from the cost of their start, which varies.
    n = H * max(1, round(fit_s / statistics.median(seconds["vecgym"])))
    data = workload.data(num_nodes * workload.batch_size * 20)
    fits = {
        "fit n": fit(workload, num_nodes, diloco(), data, n),
        "fit 2n": fit(workload, num_nodes, diloco(), data, 2 * n),
        "bare n": block(auto, batches, n),
    }
    fit_seconds = interleave(fits, budget_s / 2)
    per_step = {name: [s / H for s in values] for name, values in seconds.items()}
    per_step["fit"] = [(long - short) / n for short, long in zip(fit_seconds["fit n"], fit_seconds["fit 2n"])]
    per_step["bare"] = [s / n for s in fit_seconds["bare n"]]
    ms = {name: 1e3 * statistics.median(values) for name, values in per_step.items()}

    twice = Bare(workload, 2 * num_nodes, AllReduceStrategy("adamw", lr=LR))
    twice(workload.batch(2 * num_nodes))
    for one in (auto, allreduce, twice, *engines.values()):
        one.engine.close()
    return {
        "num_nodes": num_nodes,
        "plan": str(auto.plan),
        "ms": ms,
        "ratios": {
            "vecgym / loop": ms["vecgym"] / ms["loop"],
            "allreduce / big": ms["allreduce"] / ms["big"],
            "fit / bare": ms["fit"] / ms["bare"],
        },
        "state_bytes": {
            "diloco": auto.state_bytes(),
            "allreduce K": allreduce.state_bytes(),
            "allreduce 2K": twice.state_bytes(),
        },
        "seconds_per_step": per_step,
    }


def checks(results: dict[str, dict[str, Any]]) -> list[tuple[str, float, float]]:
    """(what, measured ratio, largest allowed)."""
    found = []
    for name, result in results.items():
        ratios, state_bytes = result["ratios"], result["state_bytes"]
        found += [
            (f"{name}: vecgym / loop", ratios["vecgym / loop"], TO_LOOP[name]),
            (f"{name}: allreduce / big", ratios["allreduce / big"], TO_BIG),
            (f"{name}: fit / bare step", ratios["fit / bare"], TO_BARE_STEP),
            (f"{name}: allreduce state, 2K / K", state_bytes["allreduce 2K"] / state_bytes["allreduce K"], 1.0),
        ]
    return found


def report(results: dict[str, dict[str, Any]]) -> str:
    """Two tables: what was asked for, and every figure."""
    rows = [
        [what, f"<= {target:.3g}", f"{ratio:.3f}", "yes" if ratio <= target else "**no**"]
        for what, ratio, target in checks(results)
    ]
    names = list(next(iter(results.values()))["ms"])
    figures = [
        [f"{workload} K={result['num_nodes']}", *[f"{result['ms'][name]:.2f}" for name in names]]
        for workload, result in results.items()
    ]
    plans = [f"- {workload}: {result['plan']}" for workload, result in results.items()]
    return "\n\n".join(
        [
            markdown(["ratio", "target", "measured", "met"], rows),
            "ms per step (median):\n\n" + markdown(["workload", *names], figures),
            'Plans of engine="auto":\n\n' + "\n".join(plans),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS), metavar="NAME",
                        help=f"any of {', '.join(WORKLOADS)}; default: all")  # fmt: skip
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default 2)")
    parser.add_argument("--engines", action="store_true", help="measure each engine, not only the chosen one")
    parser.add_argument("--seconds", type=float, default=60, help="about how long for each workload (default 60)")
    parser.add_argument("--quick", action="store_true", help="few nodes, short blocks, one round: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    print(header(), flush=True)
    results = {}
    for name in args.workloads:
        workload = WORKLOADS[name]
        if args.quick:
            results[name] = measure(workload, min(workload.num_nodes, 4), 2, 0, 0.05, args.engines)
        else:
            results[name] = measure(workload, workload.num_nodes, 20, args.seconds, 0.5, args.engines)
        shown = ", ".join(f"{what} {value:.2f}" for what, value in results[name]["ms"].items())
        print(f"{name}: ms per step: {shown}", flush=True)
        if args.json:
            args.json.write_text(json.dumps({"machine": machine(), "workloads": results}, indent=1))
    print("\n" + report(results))


if __name__ == "__main__":
    main()
