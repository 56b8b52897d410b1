"""The catalogue of strategies: what it says is so, and all that is made of it knows every row."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vecgym.strategy
from tests.cards import CARDS, Sent
from tests.fitting import dataset, fit
from tests.models import make_model
from tests.test_authors import AUTHORS
from vecgym import availability, dry_run, guide, sweep
from vecgym.cli import compare
from vecgym.clock import Compute, Network
from vecgym.collectives import StackedCollectives
from vecgym.collectives.topology import ServerLinks
from vecgym.runs.verification import STRATEGIES
from vecgym.strategy import (
    ADPSGDStrategy,
    AllReduceStrategy,
    CommunicateOptimizeStrategy,
    DeMoStrategy,
    DiLoCoStrategy,
    RankStrategy,
    Strategy,
)
from vecgym.strategy.catalogue import CATALOGUE

README = (Path(__file__).parent.parent / "README.md").read_text()
PUBLIC = {cls for cls in vars(vecgym.strategy).values() if inspect.isclass(cls) and issubclass(cls, Strategy)}


def test_every_public_strategy_is_in_it_and_in_the_guides_table() -> None:
    composed = {Strategy, CommunicateOptimizeStrategy, RankStrategy}
    made = {type(row.make(inner_optim="adamw", lr=0.01)) for row in CATALOGUE.values()}
    asynchronous = {
        cls for cls in PUBLIC if cls.asynchronous
    }  # in tests/test_asynchronous.py, tests/test_async_more.py
    assert made | composed == PUBLIC - asynchronous
    table = str(guide.strategies.__doc__).partition("\n## The built-in strategies")[2].partition("\n## ")[0]
    listed = made | asynchronous | {CommunicateOptimizeStrategy}
    assert {cls.__name__ for cls in listed - {Strategy}} == named_in(table)
    assert named_in(README.partition("\n## Strategies")[2].partition("\n## ")[0]) < {cls.__name__ for cls in listed}


def named_in(table: str) -> set[str]:
    """The strategies that the first cells of a table name, but for another name of one in brackets."""
    cells = re.findall(r"^\| ([^|]*)", table, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+Strategy)`", cell.partition("(")[0])}


def test_the_guide_says_of_each_what_is_certain() -> None:
    """Every strategy, every server, and each has a rule, a comparison and defaults; what claims numbers has them."""
    table = str(guide.strategies.__doc__).partition("\n## What is certain")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")][
        1:
    ]
    assert all(len(row) == 4 and all(row) for row in rows)
    named = set(re.findall(r"`(\w+)`", " ".join(row[0] for row in rows)))
    servers = {"DelayedNesterov", "FedBuff", "HeLoCo", "MLA"}
    assert {cls.__name__ for cls in PUBLIC - {Strategy, CommunicateOptimizeStrategy, RankStrategy}} | servers <= named
    claimed = {row[0] for row in rows if "numbers" in row[2] and "test_ddp" not in row[2]}
    assert len(claimed) == len(AUTHORS) + 1  # HALoS's are Delayed Nesterov's, too


def test_each_has_a_card() -> None:
    assert list(CARDS) == list(CATALOGUE)


@pytest.mark.parametrize("name", CATALOGUE)
def test_its_twin_exists(name: str) -> None:
    assert importlib.import_module(f"tests.reference.{CARDS[name].twin}").__doc__


def test_the_commands_know_it() -> None:
    assert list(STRATEGIES) == list(CATALOGUE)
    assert compare.strategy_names() == [name for name, row in CATALOGUE.items() if row.compared]
    assert set(compare.STRATEGIES) <= set(compare.strategy_names())


@pytest.mark.parametrize("name", CATALOGUE)
def test_bytes_are_those_of_its_closed_form(name: str) -> None:
    trainer, model = fit("MLP", CATALOGUE[name].make(inner_optim="adamw", lr=0.01), num_nodes=4, max_steps=7)
    sent = Sent(dict(model.named_parameters()), num_nodes=4, steps=7)
    assert trainer.ledger.total_bytes == pytest.approx(CARDS[name].sends(sent), rel=1e-12)


DECENTRALISED = {
    "gossip",
    "gossip-matching",
    "gradient-tracking",
    "d2",
    "exact-diffusion",
    "qgm",
    "sgp",
    "choco",
    "relaysum",
    "matcha",
}
WITHOUT_ROUNDS = DECENTRALISED | {"scaffnew", "independent", "allreduce", "gpa", "sparta", "loscar", "demo"}


def test_every_strategy_has_what_it_is_given_of_the_knobs() -> None:
    for name, row in CATALOGUE.items():
        strategy = row.make(H=17, p=0.25, inner_optim="adamw", lr=0.06, warmup_steps=5, max_norm=0.5)
        clips = vars(strategy).get("max_norm", strategy.inner.max_norm)
        assert (strategy.inner.warmup_steps, clips) == (5, None if CARDS[name].plain else 0.5), name
        assert strategy.inner_optim.lr == pytest.approx(0.01 if name == "demo" else 0.06)
        assert ("every=17" in repr(strategy)) == (name not in WITHOUT_ROUNDS), name


@pytest.mark.parametrize("absent", [None, "own", "shared", "neighbour"])
@pytest.mark.parametrize("num_nodes", [1, 4, 6])
@pytest.mark.parametrize("name", CATALOGUE)
def test_sent_is_received_without_a_server(name: str, num_nodes: int, absent: Any) -> None:
    """Summed over the nodes, in every step, also of those of whom some are absent."""
    there = None if absent is None else availability.Dropout(0.3, rejoin=absent)
    strategy = CATALOGUE[name].make(inner_optim="adamw", lr=0.01)
    try:
        trainer, _ = fit("MLP", strategy, num_nodes=num_nodes, max_steps=7, availability=there)
    except ValueError:  # what cannot lose a node says so, and one node is no island of two
        assert there is not None or num_nodes == 1
        return
    for entry in trainer.ledger:
        if isinstance(entry.transfer.who, ServerLinks):
            assert CARDS[name].server
        else:
            assert entry.sent_bytes == entry.received_bytes
    if not CARDS[name].server:
        assert trainer.ledger.total_bytes == trainer.ledger.total_received_bytes
        assert trainer.history["bytes_total"] == trainer.history["bytes_received_total"]
    assert trainer.history.last("bytes_payload_total") == trainer.ledger.total_payload_bytes
    assert (trainer.ledger.total_payload_bytes > 0) == (trainer.ledger.total_bytes > 0)


def test_sent_is_received_by_partners_that_do_not_wait() -> None:
    trainer, _ = fit("MLP", ADPSGDStrategy("sgd", lr=0.1), num_nodes=4, max_steps=7, compute=Compute([1.0, 2, 3, 4]))
    assert trainer.ledger.total_bytes == trainer.ledger.total_received_bytes > 0


class Forty(nn.Module):
    """16,040 parameters in 40 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList([torch.zeros(401) for _ in range(40)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([w.sum() for w in self.w]).sum() * x.sum()


# Of a step of 64 nodes: what a node's link sends, and as much received; and the payload, the count of papers.
OF_64_NODES: dict[str, tuple[Strategy, float, float]] = {
    "DDP": (AllReduceStrategy("sgd"), 126_315, 64_160),
    "DiLoCo": (DiLoCoStrategy("sgd", H=10), 12_631.5, 6_416),
    "int8 DiLoCo": (DiLoCoStrategy("sgd", H=10, compression="int8"), 102_060, 1_620),
    "DeMo": (DeMoStrategy(compression_topk=25, compression_chunk=512), 756_000, 12_000),
}


@pytest.mark.parametrize("name", OF_64_NODES)
def test_bytes_of_64_nodes(name: str) -> None:
    """A code goes to each of the 63 others: int8 DiLoCo's takes 8 times as much of a link as DiLoCo's floats."""
    strategy, link, payload = OF_64_NODES[name]
    ledger = dry_run(Forty(), strategy, 64, max_steps=10)
    assert [total / 10 for total in ledger.totals] == pytest.approx([link, link, payload], rel=1e-12)


ROUTES: list[tuple[dict[str, str], str, tuple[float, float]]] = [
    ({}, "all_gather", (3, 3)),
    ({"all_gather": "direct"}, "all_gather", (3, 3)),
    ({"all_gather": "halving_doubling"}, "all_gather", (3, 3)),
    ({"all_gather": "server"}, "all_gather", (1, 3)),
    ({"all_gather": "tree"}, "all_gather", ((3 * 4 + 1 + 1 + 2) / 4,) * 2),
    ({}, "mean", (1.5, 1.5)),
    ({"all_reduce": "tree"}, "mean", (1.5, 1.5)),
    ({"all_reduce": "gloo"}, "mean", (1.5, 1.5)),
    ({"all_reduce": "server"}, "mean", (1, 1)),
    ({}, "broadcast", (0.75, 0.75)),
    ({"all_reduce": "server"}, "broadcast", (0.25, 0.75)),
]


@pytest.mark.parametrize(("options", "operation", "payloads"), ROUTES)
def test_bytes_by_the_route_of_the_network(
    options: dict[str, Any], operation: str, payloads: tuple[float, float]
) -> None:
    """Four nodes. The ledger of a run goes by its network, and one that there is can be told another."""
    routes = Network(1e9, **options).routes
    comm = StackedCollectives(4)
    comm.ledger.routes = routes
    call = {"broadcast": lambda x: comm.broadcast(x, 2)}.get(operation, getattr(comm, operation))
    call(torch.ones(4, 10))
    assert comm.ledger.totals == (40 * payloads[0], 40 * payloads[1], 10 if operation == "broadcast" else 40)
    plain = comm.ledger.routed({})
    assert plain.total_bytes == plain.total_received_bytes
    assert list(plain.routed(routes)) == list(comm.ledger)
    assert plain.routed(routes).totals == comm.ledger.totals


def test_a_run_counts_what_its_network_carries(tmp_path: Path) -> None:
    """Through a store codes go up once: in the ledger, the history, a resumed run and a priced sweep alike."""
    make = lambda: DiLoCoStrategy("sgd", H=2, lr=0.1, compression="int8")  # noqa: E731
    settings: dict[str, Any] = {"num_nodes": 4, "data": dataset("MLP", 48), "batch_size": 4}
    there: dict[str, Any] = {"network": Network(1e9, all_gather="server"), "compute": Compute(0.1)}
    ring, _ = fit("MLP", make(), max_steps=6, **settings)
    stored, _ = fit("MLP", make(), max_steps=6, **settings, **there)
    code = ring.ledger.total_payload_bytes
    assert code > 0
    assert ring.ledger.totals == (3 * code, 3 * code, code)
    assert stored.ledger.totals == (code, 3 * code, code)
    columns = ("bytes_total", "bytes_received_total", "bytes_payload_total")
    assert tuple(stored.history.last(name) for name in columns) == stored.ledger.totals
    folder = str(tmp_path / "run")
    fit("MLP", make(), max_steps=4, save_dir=folder, checkpoint_interval=4, **settings, **there)
    resumed, _ = fit("MLP", make(), max_steps=6, resume=folder, **settings, **there)
    assert resumed.ledger.totals == stored.ledger.totals
    swept = sweep(
        make_model("MLP"), settings["data"], strategy=make, grid={"seed": [42]}, num_nodes=4, max_steps=6, batch_size=4,
        device="cpu", progress=False,
    )  # fmt: skip
    assert swept.rows[0]["bytes_total"] == 3 * code
    assert swept.price(**there).rows[0]["bytes_total"] == code
    assert swept.history(0)["bytes_payload_total"] == ring.history["bytes_payload_total"]
