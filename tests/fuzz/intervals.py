"""Intervals of `compare` against a truth that is known: how often do those of 95 % contain it?

values   of separate runs, `vecgym.compare`: losses are drawn, of which each run's true mean is known
missing  the same, where some seeds are not shared, or some runs diverged at random
held out of a sweep, `SweepResult.compare(holdout=)`: the best of several configurations is chosen by other seeds than
         those by which it is compared; the truth is that of the one that was chosen
trained  of a sweep that trains, with a model and an order of the data for each seed; the truth is the mean of so many
         seeds that its own error is small

A case makes `EXPERIMENTS` comparisons, and fails if so few contain the truth as happens to intervals of 95 % once in
1e7 cases. That is much; so `tally` has the sums of all cases, which a person compares with 95 %.
"""

from __future__ import annotations

import math
import pprint
import warnings
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import torch
from torch import nn

import vecgym
from tests.fuzz import problems
from tests.fuzz.common import Case, Failure, Outcome
from tests.fuzz.settings import Settings, simpler
from vecgym import History
from vecgym.records.rows import compared
from vecgym.strategy import DiLoCoStrategy, FedAvgStrategy

NAME = "intervals"
EXPERIMENTS = 40
RARE = 1e-7
MANY = 240  # seeds that make a truth
KINDS = ("values", "missing", "held out")
tally: Counter[str] = Counter()
DEFAULTS: Settings = {"kind": "values", "seeds": 5, "paired": True, "together": 1.0, "spreads": (1.0, 1.0), "gap": 0.0}


def cases(seed: int, count: int) -> Iterator[Case]:
    """Every kind in turn; one in 40 trains."""
    for i in range(count):
        draw = Random(f"interval {seed} {i}")
        yield Case(draw_case(draw, "trained" if i % 40 == 39 else KINDS[i % len(KINDS)]), draw.randrange(10**6))


def draw_case(draw: Random, kind: str) -> Settings:
    s: Settings = {"kind": kind, "seeds": draw.choice([2, 3, 4, 5, 8]), "paired": draw.random() < 0.7}
    if kind == "trained":
        return {**s, "seeds": draw.choice([4, 6, 8]), "H": draw.choice([(1, 4), (2, 5), (1, 8)]), "paired": True,
                "strategy": draw.choice(["diloco", "fedavg"]), "num_nodes": draw.choice([2, 4])}  # fmt: skip
    s |= {"together": draw.choice([0.0, 1.0, 5.0]), "gap": draw.choice([0.0, 0.3, -2.0])}
    s["spreads"] = (1.0, 1.0) if draw.random() < 0.5 else (1.0, draw.choice([0.5, 2.0]))
    if not s["paired"]:
        s["seeds"] = max(4, s["seeds"])  # Welch's interval is an approximation
    return s


def smaller(case: Case) -> Iterator[Case]:
    for settings in simpler(case.settings):
        if "kind" in settings and (settings["kind"] != "trained" or "H" in settings):
            yield Case(settings, case.seed)


def run(case: Case) -> Outcome:
    s = {**DEFAULTS, **case.settings}
    covered, total = (trained if s["kind"] == "trained" else drawn)(s, case.seed)
    tally[f"{s['kind']}: cases"] += 1
    tally[f"{s['kind']}: intervals"] += total
    tally[f"{s['kind']}: intervals with the truth"] += covered
    if at_most(covered, total, 0.95) < RARE:
        return Failure(f"{s['kind']}: intervals of 95 %", f"{covered} of {total} contain the truth")
    return None


def at_most(k: int, n: int, p: float) -> float:
    """The probability of at most k of n."""
    return sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))


def drawn(s: Settings, seed: int) -> tuple[int, int]:
    """Losses that are drawn: what a seed does to all, and what it does to each."""
    random = np.random.default_rng(seed)
    covered = total = 0
    for _ in range(EXPERIMENTS):
        common = s["together"] * random.normal(size=3 * s["seeds"])
        own = [spread * random.normal(size=3 * s["seeds"]) for spread in s["spreads"]]
        losses = [10.0 + gap + common + x for gap, x in zip((0.0, s["gap"]), own)]
        row, truth = comparison(s, losses, random)
        covered += row["low"] <= truth <= row["high"]
        total += 1
    return covered, total


def comparison(s: Settings, losses: list[Any], random: Any) -> tuple[Any, float]:
    """The row of one comparison, and its truth."""
    if s["kind"] == "held out":
        return held_out(s, losses, random)
    shown = [list(range(s["seeds"])), list(range(s["seeds"]))]
    if s["kind"] == "missing":  # one more seed each, of which one run diverges
        shown = [list(range(s["seeds"] + 1)), list(range(s["seeds"] + 2))]
        losses[1][s["seeds"]] = math.nan
    runs = {name: [history(seed, x[seed]) for seed in seeds] for name, seeds, x in zip("ab", shown, losses)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return vecgym.compare(runs, paired=s["paired"])[1], s["gap"]


def held_out(s: Settings, losses: list[Any], random: Any) -> tuple[Any, float]:
    """The best of three learning rates for each of two strategies, chosen by some seeds and compared by the others."""
    count, rates = s["seeds"], (0.1, 0.2, 0.3)
    offsets = {(name, lr): 0.2 * random.normal() for name in "ab" for lr in rates}
    rows = [
        {"strategy": name, "lr": lr, "seed": seed, "val_loss": x[seed] + offsets[name, lr] + 0.5 * random.normal()}
        for name, x in zip("ab", losses) for lr in rates for seed in range(2 * count)
    ]  # fmt: skip
    chosen = compared(
        rows, "strategy", "val_loss", "a", over="seed", holdout=range(count, 2 * count), paired=s["paired"]
    )
    rate = {row["strategy"]: row["lr"] for row in chosen}
    return chosen[1], s["gap"] + offsets["b", rate["b"]] - offsets["a", rate["a"]]


def history(seed: int, loss: float) -> History:
    rows = [{"step": 0, "train_loss": 20.0, "val_loss": 20.0 + seed}, {"step": 9, "train_loss": loss, "val_loss": loss}]
    return History({"seed": seed}, rows)


def trained(s: Settings, seed: int) -> tuple[int, int]:
    """Small runs, MANY of them, whose mean is the truth; so many at a time are compared."""
    make: Any = DiLoCoStrategy if s["strategy"] == "diloco" else FedAvgStrategy
    torch.manual_seed(seed)
    first = seed * MANY

    def model(seed: int) -> nn.Module:
        return problems.make_model("perceptron", seed)

    data, val = (problems.dataset("perceptron", "tensor", count, seed + count) for count in (64, 32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = vecgym.sweep(
            model, data, val, strategy=lambda H: make("sgd", H=H, lr=0.3),
            grid={"H": list(s["H"]), "seed": range(first, first + MANY)}, num_nodes=s["num_nodes"], max_steps=12,
            batch_size=4, device="cpu", progress=False,
        )  # fmt: skip
        truth = result.compare("H")[1]["difference"]
        places = range(first, first + MANY - s["seeds"] + 1, s["seeds"])
        rows = [
            result.compare("H", where={"seed": lambda seed: place <= seed < place + s["seeds"]})[1]  # noqa: B023
            for place in places
        ]
    return sum(row["low"] <= truth <= row["high"] for row in rows), len(rows)


def reproducer(case: Case) -> str:
    settings = pprint.pformat(dict(case.settings), width=100, sort_dicts=False)
    call = f"print(intervals.run(Case(settings, {case.seed})))"
    return f"from tests.fuzz import Case, intervals\n\nsettings = {settings}\n{call}"
