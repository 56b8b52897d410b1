"""Goodput when nodes fail: simulated seconds and losses of Decoupled DiLoCo, AsyncStrategy, DiLoCo and AllReduce.

Goodput is the part of the time of all K nodes, absent ones too, that goes into steps which some model has merged:
merged node-steps times the mean seconds of a step, divided by K times the run's simulated seconds. *relative* is that
divided by the goodput of the same algorithm where no node fails. What has been merged:

- AllReduce: the steps of those present.
- DiLoCo: of those present at the end of a round, their steps of the round, since they came back if they were away.
- AsyncStrategy: the steps of the rounds that have arrived.
- Decoupled DiLoCo: of each fragment, the steps in the messages that it was made of; a fragment counts by its bytes.

Nodes fail and come back as `Dropout` draws it, absences of 30 s on average, and each seed has the same ones, up to
rounding to steps, for all algorithms. Synchronous ones run in two ways. *elastic*: nobody waits for the absent, who
begin from the model when they return (`rejoin="shared"`). *waiting*: each node must do its H steps of a round
(AllReduce: one), and the exchange waits for all; nothing is lost, detecting and restarting take no time, and the losses
are those of the run without failures. Its seconds are computed from the table of who is there.

A character-level GPT of 1 layer, width 32, context 32 (16 thousand parameters) on the source text of Python's standard
library, 8 nodes, rounds of 20 steps, steps of 1 s, log-normal with sigma 0.1. The network has 10 Gbit/s and 10 ms,
scaled so that a message takes as long as that of a model with 100 million parameters. Each run ends when 3200
node-steps are merged. Three seeds, of parameters, data, seconds and failures; figures are means, and ± is the standard
deviation.

Eleven minutes on one core of a busy machine: python benchmarks/goodput.py
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from comparison import seeded
from torch import Tensor
from workloads import header, machine, markdown

from vecgym import History, OptimSpec, Trainer
from vecgym.availability import Dropout, Facts
from vecgym.clock import Compute, Network
from vecgym.clock.asynchronous import AsyncPlan
from vecgym.collectives.base import BUCKET_BYTES
from vecgym.data import TokenWindows, encode_text
from vecgym.data.text import split_text, standard_library_text
from vecgym.models import GPT
from vecgym.simulation.events import Schedule, Stop
from vecgym.strategy import (
    AllReduceStrategy,
    AsyncStrategy,
    DecoupledDiLoCoStrategy,
    DiLoCoStrategy,
    OuterOptimizer,
    Strategy,
)
from vecgym.strategy.decoupled import Closed

K, H, STEPS, OUTAGE, SIGMA = 8, 20, 400, 30.0, 0.1  # STEPS: merged of each node, on average; seconds of an absence
RATES, SEEDS, AFTER = (0.0, 0.05, 0.1, 0.2, 0.3), (1, 2, 3), 400.0
BATCH, VAL_SIZE, CONTEXT, WIDTH = 4, 256, 32, 32
BANDWIDTH, LATENCY, LIKE_PARAMETERS = 10e9, 0.01, 100e6
NESTEROV = OptimSpec("sgd", lr=0.7, momentum=0.9, nesterov=True)
ADAMW = OptimSpec("adamw", lr=6e-3, betas=(0.9, 0.95), weight_decay=0.1)
COLUMNS = [
    "algorithm", "absent", "seconds", "goodput", "relative", "computing", "loss at the end", f"loss after {AFTER:g} s",
]  # fmt: skip


def decoupled(quorum: int, **inner: Any) -> Strategy:
    """The grace is up to 5 s: without it, who is a little late is too late."""
    return DecoupledDiLoCoStrategy(
        server=OuterOptimizer(NESTEROV), quorum=quorum, fragments=4, grace=1.0, step_seconds=2.5, H=H, **inner
    )


CASES: dict[str, Callable[..., Strategy]] = {
    "AllReduce": AllReduceStrategy,
    "DiLoCo": lambda **inner: DiLoCoStrategy(outer_optim=NESTEROV, H=H, **inner),
    "AsyncStrategy": lambda **inner: AsyncStrategy(
        server=OuterOptimizer(OptimSpec("sgd", lr=1 / K)), H=H, **inner
    ),  # a mean of the nodes' movements
    "Decoupled, quorum 4": lambda **inner: decoupled(K // 2, **inner),
    "Decoupled, quorum 8": lambda **inner: decoupled(K, **inner),
}
SYNCHRONOUS = {"AllReduce": 1, "DiLoCo": H}  # steps of a round


@dataclass
class Outcome:
    """One run: simulated seconds, parts of all nodes' time, and validation losses."""

    seconds: float
    goodput: float
    computing: float
    loss: float
    loss_after: float


def merged_steps(there: Tensor, H: int) -> Tensor:
    """Node-steps merged by the ends of the rounds, when each merges what who is there has done since coming back.

    >>> merged_steps(torch.tensor([[1, 1], [1, 0], [0, 1], [1, 1]]).bool(), H=2)
    tensor([2, 5])
    """
    rounds = there[: len(there) // H * H].unflatten(0, (-1, H))
    return rounds.flip(1).cumprod(1).sum((1, 2)).cumsum(0)  # of each node, steps in a row up to the round's end


def waiting_ends(there: Tensor, H: int, num_rounds: int) -> list[int]:
    """Intervals until each round has ended, in which every node must be there for H of them.

    >>> waiting_ends(torch.tensor([[1, 1], [1, 0], [0, 1], [1, 1], [1, 1]]).bool(), H=2, num_rounds=2)
    [3, 5]
    """
    done, ends = there.cumsum(0), [0]  # [T, K]
    for _ in range(num_rounds):
        before = done[ends[-1] - 1] if ends[-1] else torch.zeros_like(done[0])
        enough = (done >= before + H).all(1).nonzero()
        if len(enough) == 0:
            raise SystemExit(f"In {len(there)} intervals the nodes have not done {num_rounds} rounds of {H} steps.")
        ends.append(int(enough[0]) + 1)
    return ends[1:]


def merged_updates(plan: Schedule, shares: Sequence[float]) -> list[float]:
    """Node-steps merged by Decoupled DiLoCo's updates, each fragment by its share of the bytes."""
    merged = [0.0]
    for event in plan.events:
        if isinstance(event, Closed):
            merged.append(merged[-1] + shares[event.fragment] * sum(x.num_steps for x in event.arrivals))
    return merged[1:]


class Bench:
    """The common settings of a seed's runs."""

    def __init__(self, seed: int, steps: int, data: tuple[Any, Any], vocabulary: int) -> None:
        self.seed, self.steps, self.data, self.vocabulary = seed, steps, data, vocabulary
        self.sizes = {name: 4 * p.numel() for name, p in self.model().named_parameters()}
        scale = sum(self.sizes.values()) / 4 / LIKE_PARAMETERS
        self.network = Network(BANDWIDTH * scale, latency=LATENCY, bucket_bytes=BUCKET_BYTES * scale)
        self.compute = Compute.lognormal(1.0, sigma=SIGMA, seed=seed)
        self.mean_seconds = math.exp(SIGMA**2 / 2)  # of a step

    def model(self) -> GPT:
        return seeded(self.seed, lambda: GPT(self.vocabulary, CONTEXT, 1, 2, WIDTH))  # type: ignore[return-value]

    def there(self, dropout: Dropout | None, num_steps: int) -> Tensor:
        """The nodes that are there, `[num_steps, K]`, as a run of this seed draws it."""
        if dropout is None:
            return torch.ones(num_steps, K, dtype=torch.bool)
        return dropout.present(Facts(K, num_steps, self.seed, self.compute))(0, num_steps)

    def goodput(self, merged: float, seconds: float) -> float:
        return merged * self.mean_seconds / (K * seconds)

    def trained(self, strategy: Strategy, **options: Any) -> Trainer:
        trainer = Trainer(self.model(), *self.data)
        trainer.fit(
            strategy, K, batch_size=BATCH, val_size=VAL_SIZE, compute=self.compute, network=self.network,
            seed=self.seed, device="cpu", progress=False, **options,
        )  # fmt: skip
        return trainer

    def synchronous(self, name: str, strategy: Strategy, dropout: Dropout | None) -> tuple[Outcome, History]:
        """Nobody waits for the absent."""
        length = SYNCHRONOUS[name]
        merged = merged_steps(self.there(dropout, 20 * self.steps), length)
        rounds = int((merged < self.steps * K).sum()) + 1
        trainer = self.trained(strategy, max_steps=rounds * length, val_interval=H, availability=dropout)
        timeline, history = trainer.timeline(self.network, self.compute), trainer.history
        seconds = timeline.seconds
        found = self.goodput(int(merged[rounds - 1]), seconds), timeline.utilization
        return Outcome(seconds, *found, history.last("val_loss"), after(curve(history))), history

    def waiting(self, name: str, dropout: Dropout | None, without: History) -> Outcome:
        """Exchanges wait for the absent: the losses of a run without failures, at other times."""
        length, per_step = SYNCHRONOUS[name], without.last("sim_seconds") / self.steps
        ends = waiting_ends(self.there(dropout, 200 * self.steps), length, self.steps // length)
        # A round without failures ends where it ended in `without`: only the intervals beside it come on top.
        late = {(i + 1) * length: (end - (i + 1) * length) * per_step for i, end in enumerate(ends)}
        seconds = without.last("sim_seconds") + late[self.steps]
        losses = [
            (row["sim_seconds"] + late.get(row["step"], 0.0), row["val_loss"])
            for row in without.rows if row.get("val_loss") is not None
        ]  # fmt: skip
        goodput = self.goodput(self.steps * K, seconds)
        return Outcome(seconds, goodput, goodput, without.last("val_loss"), after(losses))

    def merged(self, strategy: Any, dropout: Dropout | None, steps: int) -> Sequence[float]:
        """The node-steps merged by each update of an asynchronous run of so many local steps: nothing is trained."""
        stop = Stop(steps=steps)
        plan = AsyncPlan.of(strategy, K, self.compute, self.network, self.sizes, self.seed, stop, dropout)
        if not isinstance(strategy, DecoupledDiLoCoStrategy):
            return plan.local_steps[1:]
        whole, parts = sum(self.sizes.values()), strategy.fragments_of(self.sizes)
        return merged_updates(plan, [sum(self.sizes[name] for name in names) / whole for names in parts])

    def asynchronous(self, strategy: Any, dropout: Dropout | None) -> Outcome:
        planned = target = self.steps * K
        while (merged := self.merged(strategy, dropout, planned))[-1] < target:
            planned += target
        updates = sum(x < target for x in merged) + 1
        trainer = self.trained(strategy, max_updates=updates, val_seconds=H, availability=dropout)
        timeline, history = trainer.timeline(), trainer.history
        found = self.goodput(merged[updates - 1], timeline.seconds), timeline.utilization
        return Outcome(timeline.seconds, *found, history.last("val_loss"), after(curve(history)))


def curve(history: History) -> list[tuple[float, float]]:
    """Validation losses with their simulated seconds."""
    return [(row["sim_seconds"] or 0.0, row["val_loss"]) for row in history.rows if row.get("val_loss") is not None]


def after(losses: Sequence[tuple[float, float]]) -> float:
    """The last loss by then."""
    return [loss for seconds, loss in losses if seconds <= AFTER][-1]


def of_seed(bench: Bench, names: Sequence[str], rates: Sequence[float]) -> dict[str, dict[float, Outcome]]:
    """The runs of one seed, by name and rate."""
    inner: dict[str, Any] = {"inner_optim": ADAMW, "max_norm": 1.0, "warmup_steps": 20}
    found: dict[str, dict[float, Outcome]] = {}
    for name in names:
        make = CASES[name]
        if name not in SYNCHRONOUS:
            of_rates = {}
            for rate in rates:
                dropout = Dropout(rate, OUTAGE) if rate else None  # rows of the mean seconds of a step, 1 s
                of_rates[rate] = bench.asynchronous(make(**inner), dropout)
            found[name] = of_rates
            continue
        elastic, waiting, without, step = {}, {}, None, 1.0
        for rate in rates:
            dropout = Dropout(rate, OUTAGE / step, rejoin="shared") if rate else None  # a row is a step, as it lasts
            elastic[rate], history = bench.synchronous(name, make(**inner), dropout)
            if without is None:
                without, step = history, history.last("sim_seconds") / bench.steps
            waiting[rate] = bench.waiting(name, dropout, without)
        found[f"{name}, elastic"], found[f"{name}, waiting"] = elastic, waiting
    return found


def shown(values: Sequence[float], digits: int) -> str:
    """Mean and standard deviation."""
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def table(found: Sequence[dict[str, dict[float, Outcome]]]) -> str:
    rows = []
    for name, of_rates in found[0].items():
        for rate in of_rates:
            runs = [seed[name][rate] for seed in found]
            relative = [run.goodput / seed[name][0.0].goodput for run, seed in zip(runs, found)]
            rows.append([
                name, f"{rate:.0%}", shown([run.seconds for run in runs], 0), shown([run.goodput for run in runs], 2),
                f"{statistics.mean(relative):.2f}", f"{statistics.mean(run.computing for run in runs):.2f}",
                shown([run.loss for run in runs], 2), shown([run.loss_after for run in runs], 2),
            ])  # fmt: skip
    return markdown(COLUMNS, rows)


def draw(found: Sequence[dict[str, dict[float, Outcome]]], path: Path) -> None:
    """Goodput, and the loss after some time, against the part of the time that a node is absent."""
    from figures import WIDTH, save
    from matplotlib.figure import Figure

    from vecgym.plot.style import COLOURS, MARKERS

    figure = Figure(layout="constrained")
    left, right = figure.subplots(1, 2)
    families = list(dict.fromkeys(name.split(",")[0] for name in found[0]))
    for name, of_rates in found[0].items():
        family = families.index(name.split(",")[0])
        dashed = name.endswith(("waiting", "quorum 8"))
        style: dict[str, Any] = {
            "color": COLOURS[family], "marker": MARKERS[family], "markersize": 5, "linewidth": 1.2, "capsize": 3,
            "linestyle": "--" if dashed else "-", "markerfacecolor": "white" if dashed else COLOURS[family],
        }  # fmt: skip
        for axes, what in ((left, "goodput"), (right, "loss_after")):
            values = [[getattr(seed[name][rate], what) for seed in found] for rate in of_rates]
            spread = [statistics.stdev(x) if len(x) > 1 else 0.0 for x in values]
            axes.errorbar(list(of_rates), list(map(statistics.mean, values)), spread, label=name, **style)
    rates = list(next(iter(found[0].values())))
    left.plot(rates, [1 - rate for rate in rates], color="0.6", linewidth=1, linestyle=":", label="nodes present")
    left.set(title="Goodput", ylabel="part of all nodes' time", ylim=(0, 1.05))
    right.set(title=f"After {AFTER:g} s", ylabel="validation loss")
    right.set_ylim(top=min(3.0, right.get_ylim()[1]))  # one that has hardly begun would hide the others
    for axes in (left, right):
        axes.set_xlabel("part of the time that a node is absent")
        axes.grid(True, color="0.9", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*left.get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=4, fontsize=9)
    save(path, [(figure, (WIDTH, 440))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=CASES, metavar="NAME",
                        help=f"any of {', '.join(map(repr, CASES))}; default: all")  # fmt: skip
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default 2)")
    parser.add_argument("--quick", action="store_true", help="few steps, one seed, one rate: does it work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw goodput and loss against the rate there (PNG)")
    args = parser.parse_args()
    steps, seeds, rates = (40, SEEDS[:1], RATES[:3:2]) if args.quick else (STEPS, SEEDS, RATES)
    torch.set_num_threads(args.threads)
    print(header(), flush=True)
    start = time.perf_counter()
    text = standard_library_text()
    vocabulary = "".join(sorted(set(text)))
    train, val = (TokenWindows(encode_text(part, vocabulary)[0], CONTEXT) for part in split_text(text))
    found = []
    for seed in seeds:
        found.append(of_seed(Bench(seed, steps, (train, val), len(vocabulary)), args.only, rates))
        print(f"seed {seed}: {time.perf_counter() - start:.0f} s", flush=True)
    print(f"\nUntil {steps * K} node-steps are merged, {len(seeds)} seeds\n\n{table(found)}")
    if args.plot:
        draw(found, args.plot)
    if args.json:
        runs = [
            {"seed": seed, "algorithm": name, "rate": rate, **vars(run)}
            for seed, of_names in zip(seeds, found) for name, of_rates in of_names.items()
            for rate, run in of_rates.items()
        ]  # fmt: skip
        args.json.write_text(json.dumps({"machine": machine(), "runs": runs}, indent=1))
    print(f"\n{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
