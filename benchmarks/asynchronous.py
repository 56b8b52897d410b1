"""Asynchronous local SGD: rounds computed together against one by one, and against a plain event loop.

Whole runs of the same updates: `together` and `one by one` are `Trainer.fit` of `AsyncStrategy(together=...)`, which
give the same numbers; `plain` is an event loop as a careful user writes it, a heap, one module, `torch.optim.SGD`, and
vecgym not imported. Each is in a process of its own; they take turns. Nodes' speeds are log-normal, with s the standard
deviation of their logarithm. A run takes some minutes.

    python benchmarks/asynchronous.py --seconds 60
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from turns import Turns, serve, take_turns

BATCH, EXAMPLES, INNER_LR, OUTER_LR, MOMENTUM = 16, 8192, 0.05, 0.3, 0.9


@dataclass(frozen=True)
class Case:
    """A workload: the sizes of an MLP's layers, K nodes, H steps a round, and how unequal they are."""

    sizes: tuple[int, ...]
    num_nodes: int
    spread: float
    target: float  # times faster than one by one
    H: int = 10
    rounds: int = 10  # updates for each node, on average

    @property
    def updates(self) -> int:
        return self.rounds * self.num_nodes


CASES = {
    "MLP 32-64-10, K=64, equal": Case((32, 64, 10), 64, 0.0, 14),
    "MLP 32-64-10, K=64, s=0.5": Case((32, 64, 10), 64, 0.5, 14),
    "MLP 32-64-10, K=64, s=1": Case((32, 64, 10), 64, 1.0, 8),
    "MLP 784-128-10, K=64, s=0.5": Case((784, 128, 10), 64, 0.5, 3, rounds=4),
    "MLP 16-32-2, K=512, s=0.5": Case((16, 32, 2), 512, 0.5, 60, rounds=1),
    "quick": Case((4, 4, 2), 3, 0.5, 1, H=2, rounds=2),
}
ALTERNATIVES = ("together", "one by one", "plain")


def seconds_of_nodes(case: Case) -> list[float]:
    rng = random.Random(1)
    for _ in range(128):  # the speeds of a first trial, kept so that figures can be compared
        rng.random()
    return [rng.lognormvariate(0, case.spread) + (0.001 * node if case.spread == 0 else 0)
            for node in range(case.num_nodes)]  # fmt: skip


def data(case: Case) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(EXAMPLES, case.sizes[0], generator=generator)
    return x, torch.randint(0, case.sizes[-1], (EXAMPLES,), generator=generator)


def network(case: Case) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in zip(case.sizes, case.sizes[1:]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


# ------------------------------------------------------------------------------------------------ the alternatives


def plain(case: Case) -> Callable[[], dict[str, float]]:
    """An event loop without vecgym: every round is computed when its node begins it."""
    x, y = data(case)
    model, server = network(case), network(case)
    inner = torch.optim.SGD(model.parameters(), lr=INNER_LR)
    outer = torch.optim.SGD(server.parameters(), lr=OUTER_LR / case.num_nodes, momentum=MOMENTUM, nesterov=True)
    per_step = seconds_of_nodes(case)

    def movement(node: int, step: int) -> list[Tensor]:
        with torch.no_grad():
            for p, q in zip(model.parameters(), server.parameters()):
                p.copy_(q)
        for own in range(step, step + case.H):
            first = (node * 977 + own * BATCH) % (EXAMPLES - BATCH)
            inner.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(model(x[first : first + BATCH]), y[first : first + BATCH])
            loss.backward()
            inner.step()
        with torch.no_grad():
            return [q - p for p, q in zip(model.parameters(), server.parameters())]

    def run() -> dict[str, float]:
        moved = [movement(node, 0) for node in range(case.num_nodes)]
        counts = [case.H] * case.num_nodes
        events = [(per_step[node] * case.H, node) for node in range(case.num_nodes)]
        heapq.heapify(events)
        for _ in range(case.updates):
            now, node = heapq.heappop(events)
            for p, g in zip(server.parameters(), moved[node]):
                p.grad = g
            outer.step()
            moved[node] = movement(node, counts[node])
            counts[node] += case.H
            heapq.heappush(events, (now + per_step[node] * case.H, node))
        return {}

    return run


def fit(case: Case, together: bool) -> Callable[[], dict[str, float]]:
    from torch.utils.data import TensorDataset

    from vecgym import OptimSpec, Trainer
    from vecgym.clock import Compute
    from vecgym.models import Classifier
    from vecgym.strategy import AsyncStrategy, OuterOptimizer

    trainer = Trainer(Classifier(network(case)), TensorDataset(*data(case)))
    outer = OptimSpec("sgd", lr=OUTER_LR / case.num_nodes, momentum=MOMENTUM, nesterov=True)
    strategy = AsyncStrategy("sgd", OuterOptimizer(outer), H=case.H, lr=INNER_LR, together=together)
    compute = Compute(seconds_of_nodes(case))

    def run() -> dict[str, float]:
        trainer.fit(
            strategy, case.num_nodes, compute=compute, max_updates=case.updates, batch_size=BATCH, device="cpu",
            progress=False,
        )  # fmt: skip
        calls = [count for count in trainer.history["nodes_per_call"] if count]
        return {"nodes_per_call": sum(calls) / len(calls)}

    return run


def events_per_second() -> float:
    """Of the scheduler alone: K = 64, each arrival an update."""
    from vecgym.simulation.events import Rules, Stop, schedule

    per_step = seconds_of_nodes(CASES["MLP 32-64-10, K=64, s=0.5"])
    start = time.perf_counter()
    events = schedule(Rules((10,) * 64), lambda node, step: per_step[node], Stop(updates=50_000))
    return len(events) / (time.perf_counter() - start)


# ------------------------------------------------------------------------------------------------------- the parent


def row(name: str, case: Case, turns: Turns) -> list[str]:
    ratio = turns.median("one by one") / turns.median("together")
    return [
        name, f"{turns.median('together', 'nodes_per_call'):.1f}", f"{turns.median('together'):.2f}",
        f"{turns.median('one by one'):.2f}", f"{turns.median('plain'):.2f}", f"{ratio:.1f}",
        f"{turns.median('plain') / turns.median('together'):.1f}", f"{case.target:g}",
        "yes" if ratio >= case.target else "no",
    ]  # fmt: skip


COLUMNS = ["workload", "nodes per call", "together s", "one by one s", "plain s", "one by one / together",
           "plain / together", "target", "met"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of measuring, for each workload (60)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of each process")
    parser.add_argument("--workloads", nargs="+", choices=CASES, default=[name for name in CASES if name != "quick"])
    parser.add_argument("--quick", action="store_true", help="a small workload, one round: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--serve", nargs=2, metavar=("ALTERNATIVE", "WORKLOAD"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.serve:
        name, case = args.serve[0], CASES[args.serve[1]]
        serve(plain(case) if name == "plain" else fit(case, together=name == "together"))
        return
    from workloads import header, machine, markdown

    print(header(), flush=True)
    rows, figures = [], {}
    for name in ["quick"] if args.quick else args.workloads:
        commands = {
            one: [__file__, "--serve", one, name, "--threads", str(args.threads)] for one in ALTERNATIVES
        }  # fmt: skip
        turns = take_turns(commands, 0 if args.quick else args.seconds, args.threads, rounds=(3, 20))
        rows.append(row(name, CASES[name], turns))
        figures[name] = turns.figures
        print(f"{' | '.join(rows[-1])}; {turns.notes()}", file=sys.stderr, flush=True)
    print(markdown(COLUMNS, rows))
    rate = events_per_second()
    print(f"\nThe scheduler alone: {rate:,.0f} events a second (100,000 asked).")
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "events_per_s": rate, "workloads": figures}, indent=1))


if __name__ == "__main__":
    main()
