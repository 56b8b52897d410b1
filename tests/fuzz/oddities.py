"""Runs that few would think of: odd models, values for each node, and many compiled models in one process.

Odd models have parameters without influence or elements, stored in another order, or written to in a forward pass; see
`problems.ODD`. They train in the settings of `configurations`, against the same twin of K plain modules, and often with
an optimizer that has values for each node. "compiled" models train one after the other in one process, and each is the
one that is not compiled; torch compiles a function anew only so many times.
"""

from __future__ import annotations

import logging
import pprint
import warnings
from collections.abc import Iterator
from functools import partial
from random import Random
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fuzz import configurations, problems
from tests.fuzz.common import Case, Failure, Outcome, Refusal, crash, deliberate
from tests.fuzz.configurations import difference
from tests.fuzz.settings import PER_NODE, Settings, draw_settings, simpler
from vecgym import Trainer
from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy

NAME = "oddities"
TOLERANCE = 1e-10
COMPILED = {"compiled": 10, "sizes": "own", "strategy": "diloco", "model": "perceptron"}


def cases(seed: int, count: int) -> Iterator[Case]:
    for i in range(count):
        draw = Random(f"odd {seed} {i}")
        yield Case(compiled(draw) if i % 20 == 19 else odd(draw), draw.randrange(1000))


def odd(draw: Random) -> Settings:
    settings = draw_settings(draw)
    models = [name for name in problems.ODD for _ in range(1 if name in problems.REFUSED else 3)]
    if "adafactor" in repr(settings):  # torch's own fails on a parameter without elements
        models = [name for name in models if name != "empty"]
    settings["model"] = draw.choice(models)
    if settings["inner"]["name"] in ("muon", "lbfgs", "asgd"):
        settings["inner"] = {"name": "adamw", "lr": 0.05}
    settings.pop("data", None)
    settings.pop("exact", None)
    if draw.random() < 0.6:
        own = [key for key in PER_NODE if key in settings["inner"]] or ["lr"]
        settings["inner"] = {"lr": 0.05, **settings["inner"], "per_node": draw.sample(own, draw.randint(1, len(own)))}
    if settings.get("max_norm") and draw.random() < 0.5:
        settings["max_norm_per_node"] = True
    return settings


def compiled(draw: Random) -> Settings:
    """More models than torch compiles one function for, of one structure or of several."""
    return {
        "compiled": draw.choice([9, 10, 12]), "sizes": draw.choice(["equal", "own"]),
        "strategy": draw.choice(["allreduce", "diloco"]), "model": draw.choice(["perceptron", "counting"]),
    }  # fmt: skip


def smaller(case: Case) -> Iterator[Case]:
    for settings in simpler(case.settings):
        if ("compiled" in case.settings) == ("compiled" in settings) and "model" in settings:
            yield Case(settings, case.seed)


def reproducer(case: Case) -> str:
    settings = pprint.pformat(dict(case.settings), width=100, sort_dicts=False)
    call = f"print(oddities.run(Case(settings, {case.seed})))"
    return f"from tests.fuzz import Case, oddities\n\nsettings = {settings}\n{call}"


def run(case: Case) -> Outcome:
    if "compiled" in case.settings:
        return run_compiled({**COMPILED, **case.settings}, case.seed)
    try:
        outcome = configurations.run(case)
    except RuntimeError as error:
        if case.settings.get("engine") == "vmap":  # which need not be able to
            return Refusal(f"{type(error).__name__}: {error}")
        raise
    if isinstance(outcome, Failure):
        return Failure(f"{outcome.cause} of {case.settings['model']}", outcome.message)
    return outcome


# --------------------------------------------------------------------------------------------------- many compiled


class Sized(nn.Module):
    """A perceptron of any width, which may count its calls in Python."""

    def __init__(self, width: int, counting: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, width), nn.Linear(width, problems.CLASSES)
        self.counting, self.calls = counting, 0

    def forward(self, batch: Any) -> Tensor:
        if self.counting:
            self.calls += 1
        x, y = batch
        return F.cross_entropy(self.second(self.first(x).tanh()), y)


def run_compiled(s: Settings, seed: int) -> Outcome:
    torch._dynamo.reset()
    logging.getLogger("torch._dynamo").setLevel(logging.CRITICAL)  # it says at length what is found here anyway
    # Not the compiler that makes machine code of what is traced: it takes seconds, and has no part in this.
    light = partial(compile_lightly, torch.compile)
    with mock.patch("torch.compile", light), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for i in range(s["compiled"]):
            try:
                gap, engine = compared(s, seed, 5 + i if s["sizes"] == "own" else 5)
            except (ValueError, TypeError) as error:
                return Refusal(f"{type(error).__name__}: {error}") if deliberate(error) else crash(error)
            if not gap <= TOLERANCE:
                return Failure(f"compiled: {s['model']}", f"model {i} differs by {gap:.2g}")
            if engine != "compiled" and s["model"] != "counting":  # which would be compiled anew in every step
                told = "; ".join(str(one.message) for one in said)
                return Failure(
                    f"not compiled: {s['model']}", f"model {i} of {s['compiled']} is run by {engine}: {told}"
                )
    return None


def compile_lightly(compile: Any, function: Any, **options: Any) -> Any:
    kept = {name: x for name, x in options.items() if name not in ("mode", "options", "backend")}
    return compile(function, backend="eager", **kept)


def compared(s: Settings, seed: int, width: int) -> tuple[float, str]:
    """The distance between the ends of the compiled run and the other, and the engine that ran it."""
    found = []
    for flag in (True, False):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = Sized(width, s["model"] == "counting").double()
        trainer = Trainer(model, problems.dataset("perceptron", "tensor", 24, seed))
        strategy = (
            AllReduceStrategy("sgd", lr=0.1) if s["strategy"] == "allreduce" else DiLoCoStrategy("sgd", H=2, lr=0.1)
        )
        average = trainer.fit(
            strategy, 2, max_steps=4, batch_size=3, seed=seed, device="cpu", progress=False, compile=flag
        )
        found.append((dict(average.state_dict()), str(trainer.history.settings["engine"])))
    return difference(found[0][0], found[1][0]), found[0][1]
