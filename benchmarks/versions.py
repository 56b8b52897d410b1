"""Two checkouts of vecgym, step against step: does a change cost time?

    git worktree add ../before HEAD~20
    python benchmarks/versions.py ../before .

Each checkout runs in a process of its own, with its own copy of the package; the two take turns, a block of 20 steps
each, so that what else the machine does meets both alike. A ratio is that of the medians, second checkout to first.
`--workloads` and the strategies are those of `step_time.py`. All together take about six minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from turns import Turns, serve, take_turns

BLOCK = 20  # steps
STRATEGIES = ("diloco", "allreduce")
SIMULATIONS = [  # where it has been, the newest first
    ("vecgym.strategy.simulated", "simulation_of"),
    ("vecgym.simulation.adapted", "simulation_of"),  # of strategies that were modules with hooks
    ("vecgym.engine.simulation", "Simulation"),  # before the kernel
]


def simulation_maker() -> Any:
    """The maker of a simulation from a model, a strategy and collectives, in whichever version this process has."""
    for module, name in SIMULATIONS:
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(module), name)
    raise ImportError(f"this vecgym has none of {', '.join('.'.join(place) for place in SIMULATIONS)}")


def serve_steps(name: str, strategy_name: str, quick: bool) -> None:
    """In a process of its own: blocks of steps."""
    import torch
    from workloads import WORKLOADS

    from vecgym import strategy as strategies
    from vecgym.collectives import StackedCollectives

    make = simulation_maker()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    workload = WORKLOADS[name]
    num_nodes = min(workload.num_nodes, 4) if quick else workload.num_nodes
    if strategy_name == "diloco":
        strategy: Any = strategies.DiLoCoStrategy("adamw", H=BLOCK, lr=1e-3)
    else:
        strategy = strategies.AllReduceStrategy("adamw", lr=1e-3)
    simulation = make(workload.model(), strategy, StackedCollectives(num_nodes), max_steps=10**6)
    batches = [workload.batch(num_nodes, seed) for seed in range(BLOCK)]
    simulation.engine.prepare(batches[0])
    state = simulation.init()

    def work() -> None:
        nonlocal state
        for batch in batches:
            state, _ = simulation.step(state, batch)

    serve(work)


def measure(checkouts: list[Path], name: str, strategy: str, args: argparse.Namespace) -> Turns:
    """Blocks of both checkouts, "first" and "second"."""
    command = [str(Path(__file__).resolve()), "--serve", name, strategy, *(["--quick"] if args.quick else [])]
    paths = {which: {"PYTHONPATH": str(checkout.resolve())} for which, checkout in zip(("first", "second"), checkouts)}
    return take_turns(dict.fromkeys(paths, command), 0 if args.quick else args.seconds, args.threads, paths)


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        return serve_steps(sys.argv[2], sys.argv[3], quick="--quick" in sys.argv)
    from workloads import WORKLOADS, header, machine, markdown

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs=2, type=Path, metavar="CHECKOUT", help="folders that hold a vecgym")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default 2)")
    parser.add_argument("--seconds", type=float, default=30, help="about how long for each row (default 30)")
    parser.add_argument("--quick", action="store_true", help="few nodes, one round: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    args = parser.parse_args()

    print(header(), flush=True)
    rows, figures = [], {}
    for name in args.workloads:
        for strategy in STRATEGIES:
            turns = measure(args.checkouts, name, strategy, args)
            first, second = (1e3 * turns.median(which) / BLOCK for which in ("first", "second"))
            figures[f"{name} {strategy}"] = {"ms": [first, second], "ratio": second / first, "notes": turns.notes()}
            rows.append([f"{name} {strategy}", f"{first:.2f}", f"{second:.2f}", f"{second / first:.3f}"])
            print(rows[-1], turns.notes(), file=sys.stderr, flush=True)
    print(markdown(["workload", "first, ms per step", "second", "ratio"], rows))
    if args.json:
        threads = {"threads": str(args.threads)}
        args.json.write_text(json.dumps({"machine": machine() | threads, "rows": figures}, indent=1))


if __name__ == "__main__":
    main()
