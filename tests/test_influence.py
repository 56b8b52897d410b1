"""The worth of each message: closed forms, and whether what is known to matter is found."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import Dataset, TensorDataset

import vecgym
from vecgym import Trainer, VecgymWarning
from vecgym.compress import TopK
from vecgym.data import Batches
from vecgym.models import Classifier, Line
from vecgym.plot import plot_influence
from vecgym.runs.influence import Influence
from vecgym.runs.rollout import rollout
from vecgym.strategy import (
    AllReduceStrategy,
    AsyncStrategy,
    CommunicateOptimizeStrategy,
    Compressed,
    DiLoCoStrategy,
    EagerDiLoCoStrategy,
    Exchange,
    FedAvgStrategy,
    Mean,
    ServerMean,
    Strategy,
    StreamingDiLoCoStrategy,
    SyncWeight,
)
from vecgym.strategy.catalogue import CATALOGUE

F64 = torch.float64
K, H, R, LR = 4, 3, 5, 0.05
TARGETS = np.array([1.0, -0.5, 2.0, 0.25])
GOAL = 1.5


def constant(rank: int, num_nodes: int, train: bool) -> Dataset[Any]:
    return TensorDataset(torch.full((32, 1), TARGETS[rank], dtype=F64))


class Square(nn.Module):
    """(w - x)^2, from w = 0."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=F64))

    def forward(self, batch: Any) -> Tensor:
        return (self.w - batch[0]).square().mean()


def of_square(strategy: Strategy, goal: float = GOAL, **settings: Any) -> Influence:
    options: dict[str, Any] = {"num_nodes": K, "max_steps": H * R, "batch_size": 2, **settings}
    return vecgym.influence(Square(), strategy, constant, eval_batch=(torch.full((1,), goal, dtype=F64),), **options)


def by_hand(weights: np.ndarray, rate: float, momentum: float, goal: float = GOAL) -> float:
    """The final loss if message k of round r has weight `weights[r, k]`: each node moves to its target by a factor."""
    theta = m = 0.0
    for heard in weights:
        nodes = TARGETS + (theta - TARGETS) * (1 - 2 * LR) ** H
        delta = theta - (heard * nodes).sum() / heard.sum()
        m = momentum * m + delta
        theta -= rate * (delta + momentum * m)
    return (theta - goal) ** 2


DILOCO = (lambda: DiLoCoStrategy("sgd", H=H, lr=LR), 0.7, 0.9)
FEDAVG = (lambda: FedAvgStrategy("sgd", H=H, lr=LR), 1.0, 0.0)
SERVER = (lambda: CommunicateOptimizeStrategy([Exchange(ServerMean(), every=H)], "sgd", lr=LR), 1.0, 0.0)


@pytest.mark.parametrize("case", [DILOCO, FEDAVG, SERVER], ids=["diloco", "fedavg", "server"])
@pytest.mark.parametrize("of", ["messages", "nodes"])
def test_a_closed_form_on_a_quadratic(case: Any, of: Any) -> None:
    make, rate, momentum = case
    whole = by_hand(np.ones((R, K)), rate, momentum)
    exact, slopes = np.zeros((R, K) if of == "messages" else K), np.zeros((R, K))
    for i in np.ndindex(exact.shape):
        weights = np.ones((R, K))
        weights[i if of == "messages" else (slice(None), *i)] = 0.0
        exact[i] = by_hand(weights, rate, momentum) - whole
    for i in np.ndindex(R, K):
        up, down = np.ones((R, K)), np.ones((R, K))
        up[i], down[i] = 1 + 1e-5, 1 - 1e-5
        slopes[i] = (by_hand(down, rate, momentum) - by_hand(up, rate, momentum)) / 2e-5
    found, derived = (of_square(make(), of=of, method=method) for method in ("exact", "derivative"))
    assert_close(found.values, torch.from_numpy(exact), rtol=1e-10, atol=1e-12)
    assert_close(derived.values, torch.from_numpy(slopes if of == "messages" else slopes.sum(0)), rtol=1e-6, atol=1e-9)
    assert found.loss == pytest.approx(whole)
    assert found.agreement is None
    assert (derived.agreement or 0.0) > 0.9
    assert found.steps == tuple(range(H, H * R + 1, H))


# ------------------------------------------------------------------------------------------------- a classifier


def data(seed: int, size: int = 96) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 8, dtype=F64, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :3].argmax(1)


def shards(rank: int, num_nodes: int, train: bool) -> Dataset[Any]:
    """Nodes 0 and 1 have a class each, nodes 3 and 4 the same examples of the third, and node 2 wrong labels."""
    x, y = data(3 if rank == 4 else rank, 256)
    if rank == 2:
        return TensorDataset(x[:64], (y[:64] + 1) % 3)
    mine = (y == min(rank, 2)).nonzero().flatten()[:64]
    return TensorDataset(x[mine], y[mine])


def classifier(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Classifier(nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))).double()


def of_classifier(strategy: Strategy, **settings: Any) -> Influence:
    options: dict[str, Any] = {"num_nodes": 5, "max_steps": 24, "batch_size": 8, "eval_batch": data(100, 256)}
    return vecgym.influence(classifier, strategy, shards, **{**options, **settings})


def test_a_poisoned_node_and_a_duplicated_shard_are_found() -> None:
    found = of_classifier(FedAvgStrategy("sgd", H=4, lr=0.5), of="nodes", seeds=4)
    values, errors = found.values, found.errors
    assert values.argmin() == 2
    assert values[2] + 3 * errors[2] < 0  # the loss is lower without it
    assert values[[0, 1]].min() > 3 * values[[3, 4]].max()  # what either of the two says, the other says too
    messages = of_classifier(FedAvgStrategy("sgd", H=4, lr=0.5), of="messages", seeds=2)
    assert messages.values.shape == (6, 5)
    assert messages.values.sum(0).argmin() == 2


@pytest.mark.parametrize("name", ["fedavg", "diloco", "diloco-outer-adam", "codes", "delayed", "islands"])
def test_leaving_out_an_exchange_is_a_run_without_it(name: str) -> None:
    make: dict[str, Any] = {
        "fedavg": lambda when: FedAvgStrategy("adamw", lr=0.02, **when),
        "diloco": lambda when: DiLoCoStrategy("adamw", lr=0.02, **when),
        "diloco-outer-adam": lambda when: DiLoCoStrategy("sgd", "adam", lr=0.3, outer_lr=0.05, **when),
        "codes": lambda when: DiLoCoStrategy("sgd", lr=0.3, compression=TopK(0.3), **when),
        "islands": lambda when: FedAvgStrategy("sgd", lr=0.3, island_size=2, **when),  # drawn from the seed of the run
        "delayed": lambda when: CommunicateOptimizeStrategy(
            [Exchange(Mean(), every=when.get("H") or SyncWeight(when["sync_weight"]), delay=2)], "sgd", lr=0.3
        ),
    }
    found = of_classifier(make[name]({"H": 4}), seeds=[7, 8])
    losses = []
    for seed in (7, 8):
        batches = Batches(shards, 5, 8, seed=seed, device="cpu")
        for r in [*range(6), None]:
            weights = torch.zeros(24)
            weights[3::4] = 1.0
            weights[[] if r is None else [4 * r + 3]] = 0.0
            outcome = rollout(
                classifier(seed), make[name]({"sync_weight": weights}), list(batches.iterate(0, 24)), num_nodes=5,
                eval_batch=data(100, 256), seed=seed,
            )  # fmt: skip
            losses.append(outcome.loss.detach())
    by_run = torch.stack(losses).view(2, 7)
    assert_close(found.each, by_run[:, :6] - by_run[:, 6:], rtol=1e-9, atol=1e-11)
    assert_close(found.values, found.each.mean(0))
    assert_close(found.errors, found.each.std(0) / math.sqrt(2))
    assert found.loss == pytest.approx(by_run[:, 6].mean().item())
    assert found.steps == (4, 8, 12, 16, 20, 24)


@pytest.mark.parametrize("strategy", [FedAvgStrategy("sgd", H=6, lr=0.5), DiLoCoStrategy("adamw", H=6, lr=0.02)])
def test_integrated_gradients_add_up_to_the_gain_of_communicating(strategy: Strategy) -> None:
    found = of_classifier(strategy, method="integrated", seeds=2)
    silent = altered_schedule(strategy, torch.zeros(4))
    gains = []
    for seed in (0, 1):
        batches = list(Batches(shards, 5, 8, seed=seed, device="cpu").iterate(0, 24))
        with_all, without = (
            rollout(classifier(seed), each, batches, num_nodes=5, eval_batch=data(100, 256), seed=seed).loss.detach()
            for each in (strategy, silent)
        )
        gains.append(without - with_all)
    assert_close(found.each.sum(1), torch.stack(gains), rtol=1e-4, atol=1e-6)
    assert found.each.sum(1).abs().min() > 1e-3


def altered_schedule(strategy: Strategy, weights: Tensor) -> Strategy:
    return CommunicateOptimizeStrategy([strategy.exchanges[0].weighted(weights)], strategy.inner_optim)


def test_segments_and_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, settings = DiLoCoStrategy("adamw", H=4, lr=0.02), {"of": "messages", "seeds": 2}
    exact, derived = (of_classifier(strategy, method=method, **settings) for method in ("exact", "derivative"))
    monkeypatch.setattr("vecgym.runs.influence.MAX_ROWS", 35)
    assert_close(of_classifier(strategy, method="exact", **settings).each, exact.each, rtol=1e-8, atol=1e-12)
    again = of_classifier(strategy, method="derivative", segments=4, **settings)
    assert_close(again.each, derived.each, rtol=1e-8, atol=1e-12)
    assert again.agreement == derived.agreement


def test_many_messages_take_the_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vecgym.runs.influence.MANY", 5)
    assert of_square(FEDAVG[0](), of="messages").method == "derivative"
    assert of_square(FEDAVG[0](), of="nodes").method == "exact"


def test_a_warning_where_the_derivative_ranks_otherwise() -> None:
    """Near the minimum of the loss its slope is small, and each message that is missing makes it higher."""
    theta = GOAL - math.sqrt(by_hand(np.ones((R, K)), 1.0, 0.0))  # the loss is (theta - goal)^2
    with pytest.warns(VecgymWarning, match=r'ranks messages otherwise .*method="exact"'):
        found = of_square(FEDAVG[0](), goal=theta + 1e-3, of="messages", method="derivative")
    assert (found.agreement or 0.0) < 0.5


# ------------------------------------------------------------------------------------------------------- results


def test_the_thinned_strategy_leaves_out_the_least() -> None:
    found = of_classifier(DiLoCoStrategy("adamw", H=4, lr=0.02), seeds=2)
    thin = found.thin(2)
    weights = thin.exchanges[0].every.weights
    assert weights.sum() == 4
    assert set((weights == 0).nonzero().flatten().tolist()) == set(found.values.argsort()[:2].tolist())
    trainer = Trainer(classifier(), shards)
    trainer.fit(thin, num_nodes=5, max_steps=24, batch_size=8, device="cpu", progress=False)
    assert sorted({entry.step + 1 for entry in trainer.ledger}) == [s for s, w in zip(found.steps, weights) if w]
    again = of_classifier(thin)  # of a schedule of 0 and 1
    assert again.steps == tuple(s for s, w in zip(found.steps, weights) if w)
    assert again.thin(1).exchanges[0]._when.count(24) == 6
    assert found.thin(0).exchanges[0].every.weights.sum() == 6
    with pytest.raises(ValueError, match="leave none of the 6 exchanges"):
        found.thin(6)
    with pytest.raises(ValueError, match='of="exchanges"'):
        of_square(FEDAVG[0](), of="nodes").thin(1)


@pytest.mark.parametrize("of", ["exchanges", "nodes", "messages"])
def test_figures(of: Any, tmp_path: Path) -> None:
    found = of_square(DILOCO[0](), of=of, seeds=2)
    figure = found.plot(tmp_path / "influence.png", title="mine")
    assert isinstance(figure, Figure)
    assert (tmp_path / "influence.png").stat().st_size > 1000
    axes = figure.axes[0]
    assert len(axes.images) == (of == "messages")
    assert len(axes.patches) == (0 if of == "messages" else len(found.values))
    assert str(found).startswith("the final loss, ")
    assert plot_influence(found.values.numpy(), None if of == "nodes" else found.steps).axes


def test_a_schedule_with_a_weight_for_each_exchange() -> None:
    """A weight for each exchange is the weight of its step, of which the others have none."""
    w = torch.tensor([0.3, 1.0, 0.0, 0.7], dtype=F64, requires_grad=True)
    of_steps = torch.zeros(12, dtype=F64).index_put((torch.tensor([2, 5, 8, 11]),), w)
    batches = list(Batches(shards, 5, 8, seed=0, device="cpu").iterate(0, 12))
    both = []
    for when in (SyncWeight(w, every=3), SyncWeight(of_steps)):
        strategy = DiLoCoStrategy("adamw", "adam", lr=0.02, outer_lr=0.05, sync_weight=when)
        outcome = rollout(classifier(), strategy, batches, num_nodes=5, eval_batch=data(100))
        both.append((outcome.loss, outcome.bytes, *torch.autograd.grad(outcome.loss, w, retain_graph=True)))
    for x, y in zip(*both):
        assert_close(x, y, rtol=1e-12, atol=1e-14)
    with pytest.raises(ValueError, match="3 makes 5 exchanges in the run's 15 steps"):
        SyncWeight(w, every=3).check(15)


# ------------------------------------------------------------------------------------------------------ mistakes

ISLANDS = Exchange(Mean(island_size=2), every=3)
WRONG: dict[str, tuple[Strategy, dict[str, Any], str]] = {
    "no exchange": (CommunicateOptimizeStrategy([], "sgd"), {}, "has 0 exchanges"),
    "two": (CommunicateOptimizeStrategy([Exchange(Mean()), ISLANDS], "sgd"), {}, "has 2 exchanges"),
    "asynchronous": (AsyncStrategy(), {}, "exchanges"),
    "gradients": (AllReduceStrategy("sgd"), {}, 'give .*strategy that exchanges parameters|of="nodes"'),
    "fragments": (StreamingDiLoCoStrategy("sgd", H=6), {}, "without fragments"),
    "islands": (CommunicateOptimizeStrategy([ISLANDS], "sgd"), {"of": "nodes"}, 'of="exchanges"'),
    "codes": (
        CommunicateOptimizeStrategy([Exchange(Compressed(Mean(), TopK(0.5)), every=3)], "sgd"), {"of": "messages"},
        "without a code",
    ),
    "eager": (EagerDiLoCoStrategy("sgd", H=3), {"of": "messages"}, "delay of a round"),
    "weights": (FedAvgStrategy("sgd", sync_weight=[0.5] * 15), {}, "has weights already"),
    "proximal": (FedAvgStrategy("sgd", H=3, proximal_mu=0.1), {}, 'a round has no start. Give of="nodes"'),
    "integrated": (FedAvgStrategy("sgd", H=3), {"of": "nodes", "method": "integrated"}, 'of="exchanges"'),
    "seeds": (FedAvgStrategy("sgd", H=3), {"seeds": []}, "seeds is empty"),
    "no seeds": (FedAvgStrategy("sgd", H=3), {"seeds": 0}, "seeds=0 must be an integer >= 1"),
    "never": (FedAvgStrategy("sgd", H=100), {}, "never exchanges anything in 15 steps"),
    "of": (FedAvgStrategy("sgd", H=3), {"of": "rounds"}, "of='rounds' is not known"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_mistakes(case: str) -> None:
    strategy, settings, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        of_square(strategy, **settings)


def test_runs_are_those_of_fit_where_a_node_has_fewer_examples_than_a_batch() -> None:
    def few(rank: int, num_nodes: int, train: bool) -> Tensor:
        return torch.tensor([[0.0, 1.0, 2.0, 5.0], [0.0, 0.0, 9.0]][rank], dtype=F64)[: 4 - rank]

    strategy = FedAvgStrategy("sgd", H=2, lr=0.1)
    average = Trainer(Line().double(), few).fit(
        strategy, 2, max_steps=4, batch_size=4, device="cpu", progress=False)  # fmt: skip
    found = vecgym.influence(
        Line().double(), strategy, few, num_nodes=2, max_steps=4, batch_size=4, eval_batch=torch.zeros(1, dtype=F64)
    )
    assert found.loss == pytest.approx(next(average.parameters()).item() ** 2, abs=1e-12)


def test_a_gradient_exchange_has_nodes_and_messages() -> None:
    found = of_classifier(AllReduceStrategy("sgd", lr=0.5), of="nodes", max_steps=12)
    assert found.values.argmin() == 2
    assert found.values[2] < 0
    assert isinstance(vecgym.influence(
        Line(), FedAvgStrategy("sgd", H=2, lr=0.1), torch.ones(64), num_nodes=2, max_steps=4, batch_size=2,
        eval_batch=torch.ones(4), loss_fn=lambda module, batch: module(batch)), Influence)  # fmt: skip


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_exchanges_of_every_strategy_have_a_worth_or_the_reason_is_said(name: str) -> None:
    """Exchanges that send: of gradients, in fragments, of a round before, or of several kinds it says what to give."""
    strategy = CATALOGUE[name].make(H=2, inner_optim="adamw", lr=0.01)
    exchanges = strategy.exchanges
    plain = len(exchanges) == 1 and exchanges[0].of == "parameters" and not name.startswith(("streaming", "eager"))
    data = TensorDataset(torch.randn(64, 3, dtype=F64), torch.randint(0, 2, (64,)))
    given: dict[str, Any] = {"num_nodes": K, "max_steps": 4, "batch_size": 4, "eval_batch": data[:16]}
    model = Classifier(nn.Linear(3, 2)).double()
    if plain:
        found = vecgym.influence(model, strategy, data, **given)
        assert found.values.shape == (len(found.steps),)
        assert found.values.isfinite().all()
    else:
        with pytest.raises(ValueError, match=r"[Gg]ive |needs? rounds"):
            vecgym.influence(model, strategy, data, **given)
