"""The catalogue of strategies: what it says is so, and all that is made of it knows every row."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

import vecgym.strategy
from tests.fitting import fit
from tests.test_authors import AUTHORS
from vecgym import guide
from vecgym.cli import compare
from vecgym.runs.verification import STRATEGIES
from vecgym.strategy import CommunicateOptimizeStrategy, RankStrategy, Strategy
from vecgym.strategy.catalogue import CATALOGUE, Sent

README = (Path(__file__).parent.parent / "README.md").read_text()
PUBLIC = {cls for cls in vars(vecgym.strategy).values() if inspect.isclass(cls) and issubclass(cls, Strategy)}


def test_every_public_strategy_is_in_it_and_in_the_readmes_table() -> None:
    composed = {Strategy, CommunicateOptimizeStrategy, RankStrategy}
    made = {type(row.make(inner_optim="adamw", lr=0.01)) for row in CATALOGUE.values()}
    asynchronous = {
        cls for cls in PUBLIC if cls.asynchronous
    }  # in tests/test_asynchronous.py, tests/test_async_more.py
    assert made | composed == PUBLIC - asynchronous
    table = README.partition("\n## Strategies")[2].partition("\n## ")[0]
    first_cells = "\n".join(re.findall(r"^\| ([^|]*)", table, re.MULTILINE))
    shown = set(re.findall(r"`(\w+Strategy)\(", first_cells))
    listed = made | asynchronous | {CommunicateOptimizeStrategy}
    assert {cls.__name__ for cls in listed - {Strategy}} == shown


def test_the_guide_says_of_each_what_is_certain() -> None:
    """Every strategy, every server, and each has a rule, a comparison and defaults; what claims numbers has them."""
    table = str(guide.strategies.__doc__).partition("\n## What is certain")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")][
        1:
    ]
    assert all(len(row) == 4 and all(row) for row in rows)
    named = set(re.findall(r"`(\w+)`", " ".join(row[0] for row in rows)))
    servers = {"DelayedNesterov", "FedBuff", "HeLoCo"}
    assert {cls.__name__ for cls in PUBLIC - {Strategy, CommunicateOptimizeStrategy, RankStrategy}} | servers <= named
    claimed = {row[0] for row in rows if "numbers" in row[2] and "`verify`" not in row[2]}
    assert len(claimed) == len(AUTHORS) + 1  # HALoS's are Delayed Nesterov's, too


@pytest.mark.parametrize("name", CATALOGUE)
def test_its_twin_exists(name: str) -> None:
    assert importlib.import_module(f"tests.reference.{CATALOGUE[name].twin}").__doc__


def test_the_commands_know_it() -> None:
    assert list(STRATEGIES) == list(CATALOGUE)
    assert compare.offered() == [name for name, row in CATALOGUE.items() if row.compared]
    assert set(compare.STRATEGIES) <= set(compare.offered())


@pytest.mark.parametrize("name", CATALOGUE)
def test_bytes_are_those_of_its_closed_form(name: str) -> None:
    trainer, model = fit("MLP", CATALOGUE[name].make(inner_optim="adamw", lr=0.01), num_nodes=4, max_steps=7)
    sent = Sent(dict(model.named_parameters()), num_nodes=4, steps=7)
    assert trainer.ledger.total_bytes == pytest.approx(CATALOGUE[name].sends(sent), rel=1e-12)


def test_every_strategy_has_what_it_is_given_of_the_knobs() -> None:
    for name, row in CATALOGUE.items():
        strategy = row.make(H=17, p=0.25, inner_optim="adamw", lr=0.06, warmup_steps=5, max_norm=0.5)
        assert (strategy.warmup_steps, strategy.max_norm) == (5, 0.5), name
        assert strategy.inner_optim.lr == pytest.approx(0.01 if name == "demo" else 0.06)
        assert ("H=17" in repr(strategy)) == ("every H" in row.about), name
