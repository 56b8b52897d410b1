"""Nodes that are absent, on real processes: the same numbers, and nothing sent by those that are not there."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.accounting import accounted
from tests.cards import CARDS
from tests.fitting import dataset
from tests.models import make_model
from vecgym import OptimSpec, Trainer, verify
from vecgym.availability import Deadline, Dropout, LocalSteps, Sampled, Trace
from vecgym.clock import Compute
from vecgym.collectives import StackedCollectives
from vecgym.collectives.distributed import DistributedCollectives
from vecgym.collectives.wire import Wire
from vecgym.runs import multiprocess
from vecgym.runs.verification import Check, VerifyOptions, compare_stack
from vecgym.simulation.simulation import Part
from vecgym.simulation.when import SyncWeight
from vecgym.strategy import (
    EF21,
    AllReduceStrategy,
    CommunicateOptimizeStrategy,
    Compressed,
    Corrupted,
    DeMoStrategy,
    DiLoCoStrategy,
    Eager,
    Exchange,
    FedAvgStrategy,
    Mean,
    Mix,
    MostMoved,
    NoLoCo,
    Outer,
    Private,
    Ring,
    Robust,
    ServerMean,
    Sparse,
    Strategy,
    every,
)
from vecgym.strategy.catalogue import CATALOGUE
from vecgym.strategy.stages import Average, Memory

F64, STEPS, H = torch.float64, 7, 2
MADE: dict[str, Callable[..., Strategy]] = {
    name: partial(row.make, H=H, p=0.3, inner_optim="adamw", lr=0.01)
    for name, row in CATALOGUE.items()
    if not CARDS[name].everyone
}
MADE |= {
    "allreduce-own-rates": lambda: AllReduceStrategy("adamw", lr=torch.arange(1.0, 5.0) / 100, warmup_steps=3),
    "gossip-late": lambda: CommunicateOptimizeStrategy([Exchange(Mix("ring"), delay=2, late="change")], "sgd", lr=0.1),
    "adam-in-islands": lambda: CommunicateOptimizeStrategy(
        [Exchange(Outer(Mean(island_size=2), OptimSpec("adam", lr=0.1)), every=2)], "sgd", lr=0.1
    ),
}  # fmt: skip


def trace(num_nodes: int, rejoin: Any, seed: int = 0) -> Trace:
    """A run in which each process is without nodes at some steps, and once only one node is there."""
    table = torch.rand(STEPS, num_nodes, generator=torch.Generator().manual_seed(seed)) < 0.6
    table[1] = torch.arange(num_nodes) >= num_nodes // 2
    table[2] = True
    table[4] = torch.arange(num_nodes) < (num_nodes + 1) // 2
    table[5] = torch.arange(num_nodes) == 0
    table[:, 0] |= ~table.any(1)
    return Trace(table, rejoin)


def checks(link: Any, names: list[str], num_nodes: int, rejoin: Any) -> dict[str, list[Check]]:
    torch.set_num_threads(1)
    found, wire = {}, Wire(watch=link.beat)
    for name in names:
        strategy = MADE[name]()
        case = VerifyOptions(
            strategy, make_model("MLP", dtype=F64), dataset("MLP"), num_nodes, steps=STEPS,
            availability=trace(num_nodes, rejoin),
        )  # fmt: skip
        found[name] = [accounted(case, wire, exact=exact) for exact in (True, False)]
    return found


@pytest.mark.parametrize("rejoin", ["own", "shared", "neighbour"])
@pytest.mark.parametrize(("num_nodes", "num_processes"), [(4, 4), (4, 2)])
def test_every_strategy_is_what_it_is_in_one_process(num_nodes: int, num_processes: int, rejoin: Any) -> None:
    [found, *_] = multiprocess.run(checks, num_processes, (list(MADE), num_nodes, rejoin))
    failed = {
        f"{name}, {check.name}": check.first_failure
        for name, both in found.items()
        for check in both
        if not check.passed
    }
    assert not failed


# Products of delays, losses, fragments, codes and participation: who makes the outer step, when, and of whose values.
OUTER = OptimSpec("sgd", lr=0.5, momentum=0.6)
RISKY: dict[str, Exchange] = {
    "outer, delays of nodes": Exchange(Outer(Mean(), OUTER), every=4, delay=[0, 1, 2, 1]),
    "outer, delays, lost": Exchange(Outer(Mean(), OUTER), every=4, delay=[0, 1, 2, 1], lost=0.5),
    "outer late": Exchange(Outer(Mean(), OUTER), every=3, delay=2),
    "sparse codes late": Exchange(Sparse(0.3, Compressed(Mean(), "int8")), every=2, delay=1),
    "a late change of coordinates": Exchange(Sparse(0.3, Mean()), delay=2, late="change"),
    "most moved late": Exchange(MostMoved(0.3), delay=2),
    "most moved, a late change": Exchange(MostMoved(0.3), delay=2, late="change"),
    "pairs late": Exchange(NoLoCo(), every=2, delay=1),
    "islands": Exchange(Outer(Mean(2), OUTER), every=2),
    "eager": Exchange(Eager(Mean(), OUTER), every=2),
    "median of liars": Exchange(Outer(Corrupted(Private(Robust("median"), 1.0, 0.1), [1]), OUTER), every=2),
    "powersgd": Exchange(Outer(Compressed(Mean(), "powersgd"), OUTER), every=2),
    "in part": Exchange(Outer(Mean(), OUTER), every=SyncWeight(torch.linspace(0, 1, 12))),
    "fragments": Exchange(Outer(Mean(), OUTER), every=4, delay=1, keep=0.5, fragments=2, offsets=[4, 2]),
    "moments late": Exchange(Mean(), every=2, of="moments", delay=1),
    "gossip, a late change": Exchange(Mix("ring"), every=2, delay=2, late="change"),
    "a unit": every(2, Exchange(Sparse(0.3, Mean()), every=2, delay=1)),
    "half take part": Exchange(Outer(Compressed(ServerMean(), "topk"), OUTER), every=2, participation=0.5),
    "half, late": Exchange(Outer(Compressed(Mean(2), "int8"), OUTER), every=2, participation=0.5, delay=1),
    "ring": Exchange(Outer(Ring("int8"), OUTER), every=2),
    "EF21": Exchange(EF21(Mean(), "topk"), of="gradients"),
}


def risky(name: str, absent: bool) -> VerifyOptions:
    """One of them, in twelve steps; with absences of four in ten."""
    table = torch.rand(12, 4, generator=torch.Generator().manual_seed(3)) < 0.6
    table[:, 1] |= ~table.any(1)
    trace = Trace(table, rejoin="shared" if "outer" in name else "own") if absent else None
    strategy = Strategy("adamw", [RISKY[name]], lr=0.02)
    return VerifyOptions(strategy, make_model("MLP", dtype=F64), dataset("MLP"), 4, steps=12, availability=trace)


def risky_checks(link: Any, names: list[str], absent: bool) -> list[str]:
    torch.set_num_threads(1)
    wire, failed = Wire(watch=link.beat), []
    for name in names:
        for exact in (True, False):
            check = accounted(risky(name, absent), wire, exact=exact)
            if not check.passed:
                failed.append(f"{name}, {check.name}: {check.first_failure}")
    return failed


in_part = pytest.mark.parametrize(
    "part", [slice(1, None, 5), pytest.param(slice(None), marks=pytest.mark.slow)], ids=["some", "all"]
)


@pytest.mark.parametrize(("absent", "num_processes"), [(False, 2), (True, 4)])
@in_part
def test_products_of_exchanges_on_processes(part: slice, absent: bool, num_processes: int) -> None:
    names = [name for name in RISKY if name != "EF21" or not absent]
    [failed, *_] = multiprocess.run(risky_checks, num_processes, (names[part], absent))
    assert not failed


@pytest.mark.parametrize("absent", [False, True])
@in_part
def test_products_of_exchanges_in_a_stack(part: slice, absent: bool) -> None:
    names = [name for name in RISKY if name != "EF21" or not absent]
    found = {name: compare_stack(risky(name, absent)) for name in names[part]}
    assert {name: check.finding for name, check in found.items() if not check.passed} == {}


def test_what_all_know_of_absent_nodes_would_be_missing() -> None:
    with pytest.raises(ValueError, match="those of absent nodes would be missing"):
        compare_stack(risky("EF21", absent=True))


def random_case(seed: int, num_nodes: int) -> VerifyOptions:
    draw = random.Random(seed)
    name = draw.choice([name for name, card in CARDS.items() if not (card.everyone or (card.even and num_nodes % 2))])
    own_H = draw.randint(1, 3) + (3 if name.startswith("streaming") else 0)  # a step for each fragment
    inner = "adamw" if CARDS[name].needs_moments else draw.choice(["adamw", "sgd"])
    strategy = CATALOGUE[name].make(H=own_H, p=0.3, inner_optim=inner, lr=0.01, warmup_steps=draw.choice([0, 3]))
    table = torch.rand(6, num_nodes, generator=torch.Generator().manual_seed(seed)) < draw.choice([0.2, 0.5, 0.8])
    table[:, draw.randrange(num_nodes)] |= ~table.any(1)
    availability: Any = Trace(table, draw.choice(["own", "shared", "neighbour"]))
    if draw.random() < 0.3 and name.startswith(("fedavg", "diloco")):
        availability = availability & LocalSteps([draw.randint(1, own_H) for _ in range(num_nodes)], H=own_H)
    kind = draw.choice(["MLP", "CNN", "Dropout", "WithFrozen"])
    return VerifyOptions(
        strategy, make_model(kind, dtype=F64), dataset(kind), num_nodes, num_processes=1, steps=6, seed=seed,
        availability=availability,
    )  # fmt: skip


def random_checks(link: Any, seeds: range, num_nodes: int) -> list[str]:
    torch.set_num_threads(1)
    failed = []
    for seed in seeds:
        case = random_case(seed, num_nodes)
        # DeMo's steps are signs: one may flip with the rounding of another order of sums.
        for exact in (True,) if isinstance(case.strategy, DeMoStrategy) else (True, False):
            check = accounted(case, Wire(watch=link.beat), exact=exact)
            if not check.passed:
                failed.append(f"seed {seed}, {case.strategy!r}, {check.name}: {check.first_failure}")
    return failed


@pytest.mark.slow
@pytest.mark.parametrize(("num_nodes", "num_processes"), [(6, 3), (3, 3), (4, 2)])
def test_random_runs(num_nodes: int, num_processes: int) -> None:
    [failed, *_] = multiprocess.run(random_checks, num_processes, (range(40), num_nodes))
    assert not failed


def fitted(name: str, availability: Any, **more: Any) -> Trainer[nn.Module]:
    trainer = Trainer(make_model("MLP"), dataset("MLP"), dataset("MLP"))
    settings: dict[str, Any] = {"num_nodes": 4, "max_steps": STEPS, "batch_size": 4, "val_interval": 3}
    trainer.fit(
        MADE[name](), availability=availability, exact=True, device="cpu", progress=False, **{**settings, **more}
    )  # fmt: skip
    return trainer


def rows_of(trainer: Trainer[nn.Module]) -> list[dict[str, Any]]:
    timed = {"memory_bytes", "seconds", "steps_per_s", "examples_per_s", "bytes_per_s"}
    return [{name: x for name, x in row.items() if name not in timed} for row in trainer.history.rows]


def assert_same_rows(a: Trainer[nn.Module], b: Trainer[nn.Module]) -> None:
    for x, y in zip(rows_of(a), rows_of(b), strict=True):
        assert x.keys() == y.keys()
        for name, value in x.items():
            expected, found = (torch.as_tensor([] if v is None else v, dtype=F64) for v in (value, y[name]))
            assert torch.equal(expected.nan_to_num(-1.0), found.nan_to_num(-1.0)), (x["step"], name)
    assert a.ledger.summary() == b.ledger.summary()


APART: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "trace": ("diloco", trace(4, "shared"), {}),
    "dropout": ("allreduce", Dropout(0.4, 2, rejoin="neighbour"), {}),
    "sampled": ("diloco-topk", Sampled(0.5, H), {}),
    "sampled, in a round too": ("fedavg", Sampled(0.5, H=1), {}),
    "local steps": ("fedavg", LocalSteps([1, 2, 2, 1], H=H), {}),
    "deadline": ("diloco", Deadline(1.0, H) & LocalSteps([2, 1, 2, 2], H=H),
                 {"compute": Compute.lognormal([0.4, 0.5, 0.4, 0.45], sigma=0.3)}),
    "own rates": ("gossip", Dropout(0.4, 2), {}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*are never present")
@pytest.mark.parametrize("num_processes", [2, 4])
@pytest.mark.parametrize("which", APART)
def test_a_fit_on_processes_is_the_fit(which: str, num_processes: int) -> None:
    name, availability, more = APART[which]
    alone = fitted(name, availability, **more)
    apart = fitted(name, availability, backend="processes", num_processes=num_processes, **more)
    assert_same_rows(alone, apart)
    for key, p in alone.nodes.params.items():
        assert torch.equal(p, apart.nodes.params[key])
    assert any(x is not None and x < 4 for x in alone.history["num_present"]) == (which != "local steps")


def test_rates_of_nodes_at_different_times(tmp_path: Path) -> None:
    """The rate of a row is the mean over those present, wherever they are; and such a run is resumed to the bit."""
    MADE["warm"] = partial(DiLoCoStrategy, "adamw", H=H, warmup_steps=5, lr=0.01)
    try:
        given: dict[str, Any] = {"backend": "processes", "num_processes": 4}
        whole = fitted("warm", trace(4, "own"), **given)
        assert_same_rows(fitted("warm", trace(4, "own")), whole)
        counts = trace(4, "own").table.cumsum(0)
        assert whole.history["lr"][-1] == pytest.approx(
            0.01 * min(1.0, float((counts[-2][trace(4, "own").table[-1]] / 5).clamp(max=1).mean())), rel=1e-6
        )
        fitted("warm", trace(4, "own"), **given, save_dir=tmp_path, checkpoint_interval=1, max_steps=STEPS)
        assert_same_rows(
            fitted("warm", trace(4, "own"), **given, save_dir=tmp_path, checkpoint_interval=1, resume=True), whole
        )
    finally:
        del MADE["warm"]


def handed(link: Any) -> list[int]:
    """The bytes that each process hands over while the nodes of the second are absent, and when all are there."""
    comm = DistributedCollectives(4)
    some, found = comm.among([0, 1]), []
    x = torch.arange(2.0)[:, None] + 2 * link.rank
    for each in (some, comm):
        before, here = comm.wire.handed_bytes, x[: each.num_local]
        means = [each.mean(here), each.all_gather(here).mean(1), each.sum(here) / each.num_nodes]
        each.broadcast(here, 1)
        each.permute(here, [1, 0, 3, 2][: each.num_nodes])
        assert all(torch.equal(m, torch.full((1, 1), each.num_nodes / 2 - 0.5)) for m in means)
        found.append(comm.wire.handed_bytes - before)
    assert some.members == (0, 1)
    assert some.run_nodes == 4
    return found


def test_who_is_absent_hands_over_nothing_and_knows_what_all_get() -> None:
    first, second = multiprocess.run(handed, 2)
    # The first holds all members, so that only its broadcast leaves it.
    assert first[0] == 4
    assert second[0] == 0
    assert first[1] > 4
    assert second[1] > 0


def test_verify_takes_an_availability() -> None:
    report = verify(
        DiLoCoStrategy("adamw", H=H, lr=0.01), make_model("MLP"), dataset("MLP"), steps=STEPS, num_processes=4,
        availability=trace(4, "shared"),
    )  # fmt: skip
    assert report.passed
    assert [check.name for check in report.checks] == ["exact", "native", "stack"]


class Halfway(Average):
    """A user's own: each node goes half of the way to the mean, and remembers it."""

    common = False

    def agree(self, x: Any, part: Part, memory: Memory) -> Any:
        mean = part.comm.mean(x)
        memory.shared["mean"] = mean
        memory.own["before"] = x
        return {name: (p + mean[name]) / 2 for name, p in x.items()}


def test_a_users_average_with_absences_on_processes() -> None:
    MADE["halfway"] = partial(CommunicateOptimizeStrategy, [Exchange(Halfway())], "sgd", lr=0.1)
    try:
        alone, apart = (fitted("halfway", trace(4, "own"), **more) for more in ({}, {"backend": "processes",
                                                                                 "num_processes": 4}))  # fmt: skip
        assert_same_rows(alone, apart)
    finally:
        del MADE["halfway"]


@pytest.mark.parametrize("num_processes", [2, 4])
def test_lost_messages_are_those_of_one_process(num_processes: int) -> None:
    MADE["lossy"] = partial(CommunicateOptimizeStrategy, [Exchange(Outer(Mean()), every=2, lost=0.3)], "sgd", lr=0.1)
    try:
        alone, apart = (fitted("lossy", None, **more) for more in ({}, {"backend": "processes",
                                                                       "num_processes": num_processes}))  # fmt: skip
        assert_same_rows(alone, apart)
        assert {entry.participants for entry in alone.ledger} != {4}
    finally:
        del MADE["lossy"]


def test_some_of_some_nodes() -> None:
    whole = StackedCollectives(6).among([0, 2, 3, 5])
    assert whole.among([1, 3]).members == (2, 5)


@pytest.mark.parametrize("absent", [0, 2])
def test_a_process_without_nodes_makes_the_others_group_too(absent: int) -> None:
    """A process whose node is never in a sum of some others ended without them, and they waited for it."""
    table = torch.ones(2, 3, dtype=torch.bool)
    table[0, absent] = False
    ends = []
    several: dict[str, Any] = {"backend": "processes", "num_processes": 3, "timeout_s": 10.0}
    for options in ({}, several):
        trainer = Trainer(make_model("MLP"), dataset("MLP"))
        trainer.fit(
            FedAvgStrategy("sgd", lr=0.1), 3, max_steps=2, batch_size=2, device="cpu", progress=False,
            availability=Trace(table), **options,
        )  # fmt: skip
        ends.append(trainer.nodes.params)
    for name, p in ends[0].items():
        torch.testing.assert_close(ends[1][name], p, rtol=0, atol=1e-6)
