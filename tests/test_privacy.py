"""Noise for privacy: DP-FedAvg against its naive twin, clients that are drawn by themselves, and the epsilon spent."""

from __future__ import annotations

import importlib.util
import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim import SGD

import vecgym
from tests.fitting import dataset, fit
from tests.helpers import assert_close, run, stacked
from tests.models import make_batches, make_model
from tests.reference import common
from tests.reference.dp_fedavg import dp_fedavg
from vecgym import OptimSpec, sweep
from vecgym.availability import Dropout, drawn
from vecgym.collectives import StackedCollectives
from vecgym.core import rng
from vecgym.simulation.simulation import Part
from vecgym.simulation.timetable import RunFacts
from vecgym.simulation.when import Rounds
from vecgym.strategy import (
    Average,
    DiLoCoStrategy,
    Exchange,
    FedAvgStrategy,
    Mean,
    Outer,
    Private,
    Robust,
    ServerMean,
    Sparse,
    Strategy,
)
from vecgym.strategy.delivery import Participation

K, T, H, F64 = 5, 60, 3, torch.float64
LOCAL, WHOLE = OptimSpec(SGD, lr=0.1, momentum=0.9), OptimSpec(SGD, lr=1.0)
needs_accountants = pytest.mark.skipif(
    importlib.util.find_spec("dp_accounting") is None, reason="needs dp-accounting: pip install vecgym[privacy]"
)


def served(noise: float = 0.3, nodes: float | None = 2.0, mean: Average | None = None, **more: Any) -> Private:
    return Private(ServerMean() if mean is None else mean, 0.2, noise, noise_by="server", nodes=nodes, **more)


def some(how: Average, sampling: str = "bernoulli", q: float = 0.4, **more: Any) -> Strategy:
    exchange = Exchange(Outer(how, WHOLE), every=H, participation=q, sampling=sampling, **more)
    return Strategy(LOCAL, [exchange])


# ------------------------------------------------------------------------------------------------------- the twin


@pytest.mark.parametrize("sampling", ["bernoulli", "fixed"])
@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_dp_fedavg_equals_its_twin(engine: str, sampling: str) -> None:
    """Losses and parameters, 60 steps in float64; in some rounds no client is drawn, and the noise still is."""
    start, batches = make_model("MLP", dtype=F64), make_batches("MLP", T, K, 3, dtype=F64)
    seed = 7
    result = run(start, some(served(), sampling), stacked(batches), engine=engine, seed=seed)
    active = [result.active[step] for step in range(0, T, H)]
    rounds = [tuple(range(K)) if nodes is None else nodes for nodes in active]
    assert (() in rounds) == (sampling == "bernoulli")
    sent = {entry.step // H for entry in result.comm.ledger}
    assert sent == {number for number, nodes in enumerate(rounds) if nodes}, "nobody sends what the server draws"

    def normal(name: str, step: int) -> Tensor:  # a movement is theta - theta_k: the sign is the other one
        shape = common.parameters(start)[name].shape
        return -torch.randn(shape, generator=rng.generator(seed, f"private {name}", step), dtype=F64)

    twin = dp_fedavg(
        start, batches, K, H=H, inner=(LOCAL.cls, LOCAL.kwargs), S=0.2, sigma=0.3, n=2.0,
        clients=lambda step: rounds[step // H], normal=normal,
    )  # fmt: skip
    theta = {name: p.detach() for name, p in common.parameters(twin.models[0]).items()}
    outer = {name: x[0] for name, x in result.state.shared["0.0/params"].items()}
    assert_close(outer, theta, 1e-10)
    assert_close(result.losses, twin.losses, 1e-10, "losses")
    assert_close(result.params, {name: x.expand(K, *x.shape) for name, x in theta.items()}, 1e-10)


def test_the_servers_noise_is_that_of_the_sum_over_n() -> None:
    x = {"a": torch.full((4, 30_000), 3.0), "b": torch.full((4, 10_000), 3.0)}
    part = Part.alone(StackedCollectives(4))
    for n in (None, 8.0):
        found, clipped = (Private(Mean(), 2.0, z, noise_by="server", nodes=n)(x, part) for z in (0.5, 0.0))
        assert torch.cat([*clipped.values()], 1).norm().item() == pytest.approx(2.0 * 4 / (n or 4), rel=1e-4)
        noise = torch.cat([found[name] - clipped[name] for name in x], 1)
        assert noise.std().item() == pytest.approx(0.5 * 2.0 / (n or 4), rel=0.02)
        assert abs(noise.mean().item()) < 0.02
    of_nodes = Private(Mean(), 2.0, 0.5)(x, part)["a"] - Private(Mean(), 2.0, 0.0)(x, part)["a"]
    of_server = Private(Mean(), 2.0, 0.5, noise_by="server")(x, part)["a"] - Private(Mean(), 2.0, 0.0)(x, part)["a"]
    assert (of_nodes.std() / of_server.std()).item() == pytest.approx(4**0.5, rel=0.02)


def test_a_shift_in_what_one_node_sends_moves_the_result_by_at_most_clip_over_n() -> None:
    part, x = Part.alone(StackedCollectives(4)), torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    other = x.clone()
    other[2] = 1e6
    a, b = (Private(Mean(), 0.5, 1.0, noise_by="server")({"w": y}, part)["w"] for y in (x, other))
    assert 0.1 < (a - b).norm().item() <= 2 * 0.5 / 4 + 1e-6


# ------------------------------------------------------------------------------------------- nodes drawn by themselves


def test_each_node_is_drawn_by_itself() -> None:
    rounds = [drawn(0.3, range(6), 42, number, "bernoulli") for number in range(4000)]
    there = np.array([[node in chosen for node in range(6)] for chosen in rounds])
    assert there.mean(0) == pytest.approx([0.3] * 6, abs=0.03)
    assert there.sum(1).var() == pytest.approx(6 * 0.3 * 0.7, rel=0.1)  # 0 if their number is fixed
    assert (there.sum(1) == 0).mean() == pytest.approx(0.7**6, abs=0.02)
    correlations = np.corrcoef(there.T) - np.eye(6)
    assert abs(correlations).max() < 0.06


def test_a_round_without_nodes_trains_nobody_and_sends_nothing() -> None:
    trainer, _ = fit("MLP", FedAvgStrategy("sgd", H=2, lr=0.1, participation=0.3, sampling="bernoulli"), num_nodes=3,
                     max_steps=24)  # fmt: skip
    trains = Participation(0.3, sampling="bernoulli").who_trains(RunFacts(3, 24), Rounds(2))
    assert trains is not None
    empty = [step for step in range(24) if not trains(step, range(3))]
    assert 2 <= len(empty) < 24
    rows = [row for row in trainer.history.rows if row["step"] > 0]
    assert [row["step"] - 1 for row in rows if np.isnan(row["train_losses"]).all()] == empty
    assert not {entry.step for entry in trainer.ledger} & set(empty)


def test_lost_messages_of_nobody_are_nobodys() -> None:
    senders = Participation(0.3, lost=0.2, sampling="bernoulli").senders(RunFacts(3, 40), Rounds(1), 1, "w")
    trains = Participation(0.3, sampling="bernoulli").who_trains(RunFacts(3, 40), Rounds(1))
    assert senders is not None
    assert trains is not None
    each = [(senders(step, range(3)), trains(step, range(3))) for step in range(40)]
    assert all(set(sent or ()) <= set(there or ()) for sent, there in each)
    assert any(not there for _, there in each)


@pytest.mark.parametrize("how", [served(mean=Mean()), served()], ids=["ring", "server"])
def test_real_processes_and_stacks_give_the_same_numbers(how: Private) -> None:
    who: dict[str, Any] = {"participation": 0.3, "sampling": "bernoulli"}
    who |= {"lost": 0.1} if isinstance(how.inner, Mean) else {}
    strategy = Strategy("sgd", [Exchange(Outer(how, WHOLE), every=2, **who)], lr=0.1)
    report = vecgym.verify(
        strategy, make_model("MLP"), dataset("MLP", dtype=F64), num_nodes=4, num_processes=2, steps=16, dtype=F64
    )
    assert report.passed, report


def test_gradients_of_all_are_noised_once() -> None:
    exchange = Exchange(Private(Mean(), 0.5, 0.2, noise_by="server"), of="gradients")
    start, batches = make_model("MLP", dtype=F64), stacked(make_batches("MLP", 6, K, dtype=F64))
    result = run(start, Strategy("sgd", [exchange], lr=0.1), batches)
    assert all(len(x) == 1 for x in result.state.shared["params"].values()), "stored once"


# ------------------------------------------------------------------------------------------------------------ epsilon


def spent(noise: float, number: int, q: float, num_nodes: int = 4, sampling: str = "bernoulli") -> float:
    """The epsilon of so many rounds at delta 1e-5."""
    found = some(served(noise, delta=1e-5), sampling, q).epsilon(RunFacts(num_nodes, number * H), number * H)
    assert found is not None
    return found


@needs_accountants
def test_a_fixed_number_costs_more_than_the_poisson_formula_says() -> None:
    """100 of 10,000, 1000 rounds: 1.7 times as much at the same noise for what a node can change, 10 times at noise 1.

    The event of `dp_accounting` has noise in units of the sensitivity: clip, or 2 clip with another in a node's place.
    """
    alone = spent(1.0, 1000, 0.01, 10_000)
    assert alone == pytest.approx(2.10, abs=0.01)
    assert spent(2.0, 1000, 0.01, 10_000, "fixed") / alone == pytest.approx(1.70, abs=0.01)
    assert spent(1.0, 1000, 0.01, 10_000, "fixed") / alone == pytest.approx(9.99, abs=0.05)


@needs_accountants
@pytest.mark.parametrize(("noise", "number"), [(1.0, 1), (0.5, 8), (5.0, 100)])
def test_epsilon_without_sampling_is_that_of_the_gaussian_mechanism(noise: float, number: int) -> None:
    """Composed Gaussians are one with noise / sqrt(number), of which delta(epsilon) is known exactly (1805.06530)."""
    sigma = noise / math.sqrt(number)

    def phi(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    def delta(eps: float) -> float:
        return phi(1 / (2 * sigma) - eps * sigma) - math.exp(eps) * phi(-1 / (2 * sigma) - eps * sigma)

    for found in spent(noise, number, 1.0), spent(2 * noise, number, 1.0, sampling="fixed"):
        assert 1e-8 < delta(found) < 1e-5, "the accountant's is larger, and not by much"


@needs_accountants
def test_the_history_has_the_privacy_that_is_spent() -> None:
    strategy = some(served(1.5, delta=1e-5, mean=Mean()))
    trainer, _ = fit("MLP", strategy, num_nodes=4, max_steps=9, val=dataset("MLP"), val_interval=2)
    steps, found = trainer.history.series("epsilon")
    assert steps == [0, 2, 4, 6, 8, 9]
    assert found == [0.0, 0.0] + [spent(1.5, number, 0.4) for number in (1, 2, 2, 3)]
    assert 0 < found[2] < found[3] < found[5]
    parts = some(served(1.5, delta=1e-5), q=1.0, fragments=[["first"], ["second"]])
    assert parts.epsilon(RunFacts(4, 9, names=("first.weight", "second.weight")), 9) == spent(1.5, 6, 1.0)
    assert spent(0.0, 3, 0.4) == math.inf
    assert some(served(1.0)).epsilon(RunFacts(4, 9), 9) is None


@needs_accountants
def test_a_sweep_has_the_epsilon_of_each_configuration() -> None:
    result = sweep(
        make_model("MLP"), dataset("MLP"), dataset("MLP"), strategy=lambda noise: some(served(noise, delta=1e-5)),
        grid={"noise": [0.5, 2.0]}, num_nodes=4, max_steps=6, batch_size=4, progress=False,
    )  # fmt: skip
    assert [row["epsilon"] for row in result.rows] == [spent(noise, 2, 0.4) for noise in (0.5, 2.0)]


def test_a_delta_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ImportError, match=r"pip install vecgym\[privacy\]"):
        fit("MLP", some(served(delta=1e-5)), max_steps=6)


# --------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Private(Mean(), 1.0, 1.0, noise_by="clients"), r"noise_by='clients' is not known"),
        (lambda: served(mean=Mean(2)), r"a plain mean of all, not Mean\(island_size=2\)"),
        (lambda: served(mean=Mean(weighting="examples")), "a plain mean of all"),
        (lambda: served(mean=Robust("median")), "a plain mean of all"),
        (lambda: served(mean=Sparse(0.5, Mean())), "a plain mean of all"),
        (lambda: Private(Mean(), 1.0, 1.0, delta=1e-5), 'nodes=None and delta=1e-05 are for noise_by="server"'),
        (lambda: Private(Mean(), 1.0, 1.0, nodes=3), 'nodes=3 and delta=None are for noise_by="server"'),
        (lambda: served(delta=1.0), r"delta=1.0 must be a number in \(0, 1\)"),
        (lambda: served(nodes=0), "nodes=0 must be a number > 0"),
        (lambda: Participation(0.5, sampling="poisson"), r"sampling='poisson' is not known.*'fixed', 'bernoulli'"),
        (
            lambda: Strategy("sgd", [Exchange(served(delta=1e-5)), Exchange(Mean(), every=2)]),
            "there are 2 exchanges that send something",
        ),
        (lambda: some(served(nodes=None)).check(K, T), r"expected one, nodes=2\."),
        (lambda: some(served(nodes=None, mean=Mean()), "fixed", lost=0.5).check(K, T), r"expected one, nodes=2\."),
    ],
)
def test_settings_that_exclude_one_another(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


@needs_accountants
def test_epsilon_is_not_known_with_absences() -> None:
    strategy = DiLoCoStrategy("sgd", H=2, lr=0.1, average=served(mean=Mean(), delta=1e-5))
    with pytest.raises(ValueError, match="not known with absences"):
        fit("MLP", strategy, max_steps=6, availability=Dropout(0.2, mean_steps=3))
