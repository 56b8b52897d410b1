"""Models as people write them, against the twin of K plain modules: `problems.WRITTEN`, kind by kind.

chooses      which parameters a pass uses depends on the data or on a count: what has no gradient in a step is skipped
keeps state  buffers that a pass writes to, and that the next one reads
draws        random numbers of numpy, Python and torch, which depend on the seed, the step and the node
modes        parts that are in eval mode while the model trains
weights      a loss that is a mean over tokens, of which there are more in some examples than in others

They train in the settings of `configurations`: over strategies, optimizers, engines, numbers of nodes, sizes of batches
and parts of them, and presence.
"""

from __future__ import annotations

import pprint
from collections import Counter
from collections.abc import Iterator
from random import Random

from tests.fuzz import configurations, problems
from tests.fuzz.common import Case, Failure, Outcome, Refusal
from tests.fuzz.settings import Settings, draw_settings, simpler

NAME = "behaviours"
KIND_OF = {name: kind for kind, models in problems.WRITTEN.items() for name in models}
ENGINES = {"chooses": ["loop"], "draws": ["loop"]}  # and "auto"
tally: Counter[str] = Counter()  # of the kinds


def cases(seed: int, count: int) -> Iterator[Case]:
    """Every kind in turn."""
    kinds = list(problems.WRITTEN)
    for i in range(count):
        draw = Random(f"behaviour {seed} {i}")
        yield Case(draw_case(draw, kinds[i % len(kinds)]), draw.randrange(1000))


def draw_case(draw: Random, kind: str) -> Settings:
    settings = draw_settings(draw)
    settings["model"] = name = draw.choice(list(problems.WRITTEN[kind]))
    settings.pop("engine", None)
    if draw.random() < 0.5:
        settings["engine"] = draw.choice(ENGINES.get(kind, ["loop", "vmap"]))
    if settings["inner"]["name"] in ("muon", "lbfgs"):  # for matrices only; one that has a rule of its own for None
        settings["inner"] = {"name": "adamw", "lr": 0.05}
    if kind == "weights" and draw.random() < 0.6:
        size, parts = draw.choice([1, 2, 3]), draw.choice([2, 3])
        settings |= {"minibatch_size": size, "batch_size": size * parts, "val_interval": draw.choice([1, 3])}
        settings.pop("drop_last", None)
    if name in problems.NORMED:  # every part of a batch must have two examples
        settings |= {"batch_size": draw.choice([2, 4]), "drop_last": True}
        settings |= {"minibatch_size": 2} if settings.pop("minibatch_size", None) else {}
        if settings.get("data") == "uneven":
            settings["data"] = "factory"
    return settings


def smaller(case: Case) -> Iterator[Case]:
    for settings in simpler(case.settings):
        if "model" in settings:
            yield Case(settings, case.seed)


def run(case: Case) -> Outcome:
    name = case.settings["model"]
    tally[KIND_OF[name]] += 1
    try:
        outcome = configurations.run(case)
    except RuntimeError as error:
        if case.settings.get("engine") == "vmap":  # which need not be able to
            return Refusal(f"{type(error).__name__}: {error}")
        raise
    if isinstance(outcome, Failure):
        return Failure(f"{outcome.cause} of {name}", outcome.message)
    return outcome


def reproducer(case: Case) -> str:
    settings = pprint.pformat(dict(case.settings), width=100, sort_dicts=False)
    call = f"print(behaviours.run(Case(settings, {case.seed})))"
    return f"from tests.fuzz import Case, behaviours\n\nsettings = {settings}\n{call}"
