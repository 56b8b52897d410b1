"""Exchanges with delays, losses, participation, parts kept, moments: the relations of `relations`, and a loop.

The exchanges are drawn, each with some of what `Exchange` offers, beside another one that may be of gradients. Nodes
may be absent. "in Python" is a loop over numbers in plain Python, that of `tests.test_products`.
"""

from __future__ import annotations

import pprint
from collections import Counter
from collections.abc import Iterator
from random import Random

from tests import test_products
from tests.fuzz import relations, strategies
from tests.fuzz.common import Case, Failure, Outcome, Refusal, crash, deliberate
from tests.fuzz.settings import Settings, optimizer, simpler, some

NAME = "products"
RELATIONS = [*relations.RELATIONS, *relations.FURTHER, "in Python"]
tally: Counter[str] = Counter()  # of the relations


def cases(seed: int, count: int) -> Iterator[Case]:
    """Every relation in turn."""
    for i in range(count):
        draw = Random(f"product {seed} {i}")
        relation = RELATIONS[i % len(RELATIONS)]
        drawn = {"relation": relation} if relation == "in Python" else draw_case(draw, relation)
        yield Case(drawn, draw.randrange(100_000 if relation == "in Python" else 1000))


def draw_case(draw: Random, relation: str) -> Settings:
    """A run that has the relation: exchanges are drawn until they do."""
    while True:
        exchanges = [exchange(draw) for _ in range(draw.choice([1, 2, 2, 2, 3]))]
        kind = strategies.product_kind(exchanges)
        if not (relation == "conserved" and kind.server) and not (relation == "permuted" and not kind.nameless):
            break
    s: Settings = {
        "relation": relation, "strategy": exchanges, "num_nodes": draw.choice([2, 3, 3, 4, 5]),
        "model": draw.choice(["perceptron", "quadratic", "idle", "partly", "tied", "turned"]),
        "inner": optimizer(draw, ("sgd", "adamw"), per_node=False),
        **some(draw, 0.6, max_steps=[7, 9, 12], batch_size=[2, 4], val_interval=[2, 3]),
        **some(draw, 0.2, uneven=True, decaying=True, max_norm=[0.5, 0.1], engine="loop"),
        **some(draw, 0.8 if relation == "priced" else 0.2, clock=["one", "each", "pairs"]),
        **some(draw, 0.4, availability=[0.5, 0.8], rejoin=["own", "shared"], overlap=False),
    }  # fmt: skip
    if any(x.get("of") not in (None, "parameters", "gradients") for x in exchanges):
        s["inner"] = {"name": "adamw", "lr": 0.05}
    elif kind.choosy:
        s["inner"] = {"name": "sgd", "lr": 0.1}
    if relation == "absent":
        s["never"] = draw.choice([1, 2])
    if relation == "permuted" and s.get("clock"):  # which node sends to one that returns is a matter of names
        s.pop("rejoin", None)
    if relation == "absent" and kind.server and s.get("clock") == "pairs":
        s["clock"] = "each"
    return s


def exchange(draw: Random) -> Settings:
    if draw.random() < 0.25:
        return {"kind": draw.choice(["mean", "weighted"]), "of": "gradients"}
    name = draw.choice(list(strategies.HOWS))
    s: Settings = {"kind": name, "every": draw.choice([1, 2, 2, 3, 3])}
    s |= some(draw, 0.3, delay=[1, 1, 2], lost=[0.3, 0.5], keep=[0.25, 0.5], fragments=[2])
    s |= some(draw, 0.2, participation=[0.4, 0.7])
    if "delay" in s and draw.random() < 0.4 and name != "eager":
        s["late"] = "change"
        s.pop("keep", None)
    if s["every"] > 1 and draw.random() < 0.3:
        s.pop("delay", None)
        s["each"] = {"delay": draw.sample(range(s["every"]), 2) + [0]}
    if "keep" in s and draw.random() < 0.4:
        s.pop("keep")
        s["each"] = {**s.get("each", {}), "keep": [0.0, 0.25, 0.6]}
    if "participation" in s and draw.random() < 0.3:
        s["resting"] = "keep"
    if name in ("mean", "weighted", "server", "mix all") and draw.random() < 0.3:
        s["of"] = draw.choice(["moments", "exp_avg", ["exp_avg", "exp_avg_sq"]])
    if s.get("fragments", 1) > s["every"]:
        s.pop("fragments")
    return s


def smaller(case: Case) -> Iterator[Case]:
    for settings in simpler(case.settings):
        needed = {"relation", "strategy"} | ({"never"} & case.settings.keys())
        if needed <= settings.keys() and all("kind" in x for x in settings["strategy"]):
            yield Case(settings, case.seed)


def run(case: Case) -> Outcome:
    relation = case.settings["relation"]
    tally[relation] += 1
    if relation != "in Python":
        return relations.run(case)
    try:
        test_products.assert_as_naive(case.seed)
    except AssertionError as error:
        return Failure("in Python", str(error)[:1000])
    except (ValueError, TypeError) as error:
        return Refusal(f"{type(error).__name__}: {error}") if deliberate(error) else crash(error)
    return None


def reproducer(case: Case) -> str:
    settings = pprint.pformat(dict(case.settings), width=100, sort_dicts=False)
    call = f"print(products.run(Case(settings, {case.seed})))"
    return f"from math import inf\nfrom tests.fuzz import Case, products\n\nsettings = {settings}\n{call}"
