"""Many runs as one differentiable program: each is the run alone, its derivatives too."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from tests.test_rollout import CASES, F64, B, K, T, Tiny, draw, labels, points, slope
from vecgym.availability import Dropout
from vecgym.clock import Compute
from vecgym.collectives.topology import ring
from vecgym.core import tree
from vecgym.engine import Engine
from vecgym.models import Classifier
from vecgym.runs.rollout import Outcome, rollout
from vecgym.strategy import AllReduceStrategy, AsyncStrategy, DiLoCoStrategy, FedAvgStrategy, Strategy
from vecgym.strategy.decentralised.gossip import GossipStrategy
from vecgym.strategy.sparta import SPARTAStrategy

M = 3


@functools.cache
def runs() -> tuple[list[nn.Module], list[Any], list[Any], Engine]:
    """Model, batches and evaluation batch of each run, and an engine that has looked at one."""
    models, batches, eval_batches = list[nn.Module](), list[Any](), list[Any]()
    for i in range(M):
        with torch.random.fork_rng():
            torch.manual_seed(i)
            models.append(Tiny().double())
        x = draw(T, K, B, 4, seed=10 + i) + draw(1, K, 1, 4, seed=20 + i)
        batches.append([(x[t], labels(x[t])) for t in range(T)])
        held_out = draw(16, 4, seed=30 + i)
        eval_batches.append((held_out, labels(held_out)))
    engine = Engine(models[0], engine="vmap")
    engine.prepare(batches[0][0])
    return models, batches, eval_batches, engine


def many(strategy: Any, **settings: Any) -> Outcome:
    models, batches, eval_batches, engine = runs()
    options: dict[str, Any] = {"model": models, "batches": batches, "eval_batch": eval_batches, "engine": engine}
    options |= {"num_examples": (5, 2, 3), "num_nodes": K, "num_runs": M, **settings}
    return rollout(strategy=strategy, **options)


def alone(strategy: Strategy, i: int, **settings: Any) -> Outcome:
    models, batches, eval_batches, _ = runs()
    options: dict[str, Any] = {"batches": batches[i], "num_examples": (5, 2, 3), "num_nodes": K, "engine": "vmap"}
    return rollout(models[i], strategy, eval_batch=eval_batches[i], **{**options, **settings})


def numbers(case: str, i: int) -> dict[str, Tensor]:
    """The numbers of a case in run i."""
    return {name: (x.detach() * (1 - 0.07 * i)).requires_grad_() for name, x in points(CASES[case][1]).items()}


def assert_equal(found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y, rtol=1e-10, atol=1e-10, equal_nan=True)


def total(outcomes: Sequence[Outcome], name: str = "loss") -> Tensor:
    return torch.stack([getattr(outcome, name).sum() for outcome in outcomes]).sum()


def check_equal(together: Outcome, apart: list[Outcome]) -> None:
    """Every tensor of the outcome of many runs is that of the single ones."""
    for name in ("loss", "losses", "consensus_distance", "bytes"):
        assert_equal(
            getattr(together, name).detach().to(F64), [getattr(outcome, name).detach().to(F64) for outcome in apart]
        )
    for name, x in together.params.items():
        assert_equal(x.detach(), [outcome.params[name].detach().expand_as(x[0]) for outcome in apart])


@pytest.mark.parametrize("case", CASES)
def test_each_run_is_the_run_alone_and_so_are_its_derivatives(case: str) -> None:
    make, at = CASES[case][0], [numbers(case, i) for i in range(M)]
    together = many([make(**values) for values in at])
    inputs = [x for values in at for x in values.values()]
    found = torch.autograd.grad(together.loss.sum(), inputs)
    apart = [alone(make(**values), i) for i, values in enumerate(at)]
    check_equal(together, apart)
    assert_equal(found, torch.autograd.grad(total(apart), inputs))


def test_each_run_has_its_own_numbers_of_examples() -> None:
    sizes = [(5, 2, 3), (1, 1, 8), (5, 2, 3)]
    strategy = FedAvgStrategy("sgd", H=2, lr=0.2, weighting="examples")
    together = many(strategy, num_examples=sizes)
    check_equal(together, [alone(strategy, i, num_examples=of_run) for i, of_run in enumerate(sizes)])
    assert not torch.equal(together.loss[1], many(strategy).loss[1])


# ------------------------------------------------------------------------------------------ numbers of runs and steps


def test_the_gradient_equals_finite_differences() -> None:
    """Numbers of each run, and of each run and step: the sum of the losses has one derivative for each."""
    lr = (0.2 + 0.05 * draw(T, M, seed=3)).requires_grad_()
    outer_lr = torch.tensor([0.9, 0.7, 0.5], dtype=F64, requires_grad=True)

    def loss(lr: Tensor, outer_lr: Tensor) -> Tensor:
        return many(lambda i: DiLoCoStrategy("sgd", H=2, lr=lr[:, i, None], outer_lr=outer_lr[i])).loss.mean()

    found = torch.autograd.grad(loss(lr, outer_lr), [lr, outer_lr])
    for at, gradient in zip((lr, outer_lr), found):
        for j in range(at.numel()):

            def changed(step: float, at: Tensor = at, j: int = j) -> float:
                plain = [x.detach().clone() for x in (lr, outer_lr)]
                plain[0 if at is lr else 1].view(-1)[j] += step
                return float(loss(*plain))

            assert gradient.flatten()[j].item() == pytest.approx(slope(changed), rel=1e-6, abs=1e-11)
        assert gradient.abs().min() > 1e-5


@pytest.mark.parametrize("outer", ["sgd", "adam"])
@pytest.mark.parametrize("weights", ["relaxed", "relaxed in one", "constants", "0 and 1", "0 and 1, differentiated"])
def test_schedules_of_each_run(outer: str, weights: str) -> None:
    w = (draw(T, M, seed=5) > 0).to(F64) if weights.startswith("0") else draw(T, M, seed=4).sigmoid()
    if weights == "relaxed in one":
        w[:, 1:] = w[:, 1:].round()
    if weights == "constants":  # in each step one run makes no exchange
        w[torch.arange(T), torch.arange(T) % M] = 0.0
    w.requires_grad_(weights not in ("constants", "0 and 1"))
    lr = torch.tensor([0.3, 0.2, 0.1], dtype=F64, requires_grad=True)

    def strategy(i: int) -> Strategy:
        spec: dict[str, Any] = {"outer_lr": 0.05, "outer_optim": outer} if outer == "adam" else {}
        return DiLoCoStrategy("sgd", lr=lr[i], sync_weight=w[:, i], **spec)

    inputs = [lr, w] if w.requires_grad else [lr]
    together, apart = many(strategy), [alone(strategy(i), i) for i in range(M)]
    check_equal(together, apart)
    for name in ("loss", "bytes", "consensus_distance"):
        both = getattr(together, name).sum(), total(apart, name)
        assert_equal(*(torch.autograd.grad(x, inputs, retain_graph=True) for x in both))


def test_equal_numbers_of_runs_have_derivatives_of_their_own() -> None:
    """Runs may have equal values, which must not become one number."""
    lr = torch.full((M,), 0.3, dtype=F64, requires_grad=True)
    weight = torch.full((T, M), 0.5, dtype=F64, requires_grad=True)

    def strategy(i: int) -> Strategy:
        return DiLoCoStrategy("sgd", "adam", lr=lr[i], outer_lr=0.05, sync_weight=weight[:, i])

    found = torch.autograd.grad(many(strategy).loss.sum(), [lr, weight])
    assert_equal(found, torch.autograd.grad(total([alone(strategy(i), i) for i in range(M)]), [lr, weight]))
    assert len(set(found[0].tolist())) == M


def test_one_strategy_for_all_runs_and_unlike_ones() -> None:
    lr = torch.tensor(0.3, dtype=F64, requires_grad=True)
    shared = DiLoCoStrategy("sgd", H=2, lr=lr)
    unlike = [shared, FedAvgStrategy("adam", H=3, lr=lr), DiLoCoStrategy("sgd", H=2, lr=0.2)]  # 0 and 2 are one group
    apart_from_all = [AllReduceStrategy("sgd", lr=lr, max_norm=0.5), *unlike[:2]]
    for given in (shared, [shared] * M, unlike, apart_from_all):
        strategies = [given] * M if isinstance(given, Strategy) else given
        together, apart = many(given), [alone(strategy, i) for i, strategy in enumerate(strategies)]
        check_equal(together, apart)
        assert_equal(*(torch.autograd.grad(x, lr) for x in (together.loss.sum(), total(apart))))


def test_a_tensor_of_one_strategy_means_the_same_as_in_one_run() -> None:
    """[K] with K = M is one number for each node, and [T] one for each step, whatever M is."""
    assert K == M
    of_nodes = torch.tensor([0.1, 0.2, 0.3], dtype=F64, requires_grad=True)
    strategy = FedAvgStrategy("sgd", H=2, lr=of_nodes)
    together, apart = many(strategy), [alone(strategy, i) for i in range(M)]
    check_equal(together, apart)
    assert_equal(*(torch.autograd.grad(x, of_nodes) for x in (together.loss.sum(), total(apart))))


# ----------------------------------------------------------------------------------- models, data, seeds, absences


def test_the_gradient_by_initial_parameters_and_batches_of_each_run() -> None:
    models, batches, eval_batches, _ = runs()
    params = [{n: p.detach()[None].clone().requires_grad_() for n, p in model.named_parameters()} for model in models]
    x = [torch.stack([batch[0] for batch in of_run]).requires_grad_() for of_run in batches]
    y = [torch.stack([batch[1] for batch in of_run]) for of_run in batches]
    strategy = DiLoCoStrategy("adamw", H=2, lr=0.02)
    inputs = [*x, *tree.leaves(params)]
    together = many(strategy, params=params, batches=lambda i: (x[i], y[i]), eval_batch=lambda i: eval_batches[i])
    found = torch.autograd.grad(together.loss.sum(), inputs)
    apart = [alone(strategy, i, params=params[i], batches=(x[i], y[i])) for i in range(M)]
    assert_equal(found, torch.autograd.grad(total(apart), inputs))


def test_nodes_with_parameters_of_their_own() -> None:
    wide = [{n: p.detach() + 0.1 * draw(K, *p.shape, seed=i) for n, p in m.named_parameters()}
            for i, m in enumerate(runs()[0])]  # fmt: skip
    for strategy in (FedAvgStrategy("sgd", H=4, lr=0.3), DiLoCoStrategy("sgd", H=4, lr=0.3)):
        check_equal(many(strategy, params=wide), [alone(strategy, i, params=wide[i]) for i in range(M)])


def test_shared_data_and_models() -> None:
    models, batches, eval_batches, engine = runs()
    lr = torch.tensor([0.3, 0.2, 0.1], dtype=F64, requires_grad=True)
    common: dict[str, Any] = {"num_nodes": K, "eval_batch": eval_batches[0], "engine": engine}
    together = rollout(models[0], lambda i: FedAvgStrategy("sgd", H=2, lr=lr[i]), batches[0], num_runs=M, **common)
    apart = [rollout(models[0], FedAvgStrategy("sgd", H=2, lr=lr[i]), batches[0], **common) for i in range(M)]
    check_equal(together, apart)


class Dropping(Tiny):
    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.second(F.dropout(self.first(x).tanh(), 0.5, self.training)), y)


@pytest.mark.parametrize("availability", [None, Dropout(0.3)])
def test_seeds_of_each_run(availability: Any) -> None:
    """Dropout, masks and absences are drawn from the seed of each run."""
    torch.manual_seed(0)
    model, (_, batches, eval_batches, _) = Dropping().double(), runs()
    lr = torch.tensor([0.3, 0.2, 0.1], dtype=F64, requires_grad=True)
    common: dict[str, Any] = {"num_nodes": K, "engine": "loop", "availability": availability}

    def strategy(i: int) -> Strategy:
        return SPARTAStrategy(0.5, "sgd", lr=lr[i])

    together = rollout(model, strategy, batches, num_runs=M, eval_batch=eval_batches, seed=[5, 6, 5], **common)
    apart = [rollout(model, strategy(i), batches[i], eval_batch=eval_batches[i], seed=seed, **common)
             for i, seed in enumerate((5, 6, 5))]  # fmt: skip
    check_equal(together, apart)
    assert_equal(*(torch.autograd.grad(x, lr) for x in (together.loss.sum(), total(apart))))


def test_batch_norm_and_its_statistics() -> None:
    _, batches, eval_batches, _ = runs()
    models = []
    for i in range(M):
        torch.manual_seed(i)
        models.append(Classifier(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))).double())
    lr = torch.tensor([0.3, 0.2, 0.1], dtype=F64, requires_grad=True)
    together = rollout(
        models, lambda i: FedAvgStrategy("sgd", H=2, lr=lr[i]), batches, num_runs=M, num_nodes=K,
        eval_batch=eval_batches,
    )  # fmt: skip
    apart = [rollout(models[i], FedAvgStrategy("sgd", H=2, lr=lr[i]), batches[i], num_nodes=K,
                     eval_batch=eval_batches[i]) for i in range(M)]  # fmt: skip
    check_equal(together, apart)
    assert_equal(*(torch.autograd.grad(x, lr) for x in (together.loss.sum(), total(apart))))


# -------------------------------------------------------------------------------------------- memory and transforms


SEGMENTED = ["diloco-adamw", "fedavg-participation", "streaming", "clipping", "diloco-outer-adam-relaxed", "noloco"]


@pytest.mark.parametrize("case", SEGMENTED)
@pytest.mark.parametrize("segments", [1, 3])
def test_segments_change_nothing(case: str, segments: int) -> None:
    at = [numbers(case, i) for i in range(M)]
    inputs = [x for values in at for x in values.values()]
    whole, parts = (many([CASES[case][0](**values) for values in at], segments=n) for n in (None, segments))
    for x, y in zip(tree.leaves(tuple(whole)), tree.leaves(tuple(parts))):
        assert_close(x, y, rtol=0, atol=0, equal_nan=True)
    assert_equal(*(torch.autograd.grad(outcome.loss.sum(), inputs) for outcome in (whole, parts)))


def test_a_transform_of_torch_func() -> None:
    lr = torch.tensor([0.3, 0.3, 0.1], dtype=F64)

    def loss(lr: Tensor) -> Tensor:
        return many(lambda i: DiLoCoStrategy("sgd", H=2, lr=lr[i])).loss.mean()

    found, again = torch.func.grad(loss)(lr), torch.func.jacrev(torch.func.grad(loss))(lr)
    assert_equal([found], torch.autograd.grad(loss(at := lr.clone().requires_grad_()), at))
    assert (again - again.diag().diag()).abs().max() == 0  # runs do not depend on one another
    assert again.diag().abs().min() > 1e-6


def test_equal_matrices_of_runs_inside_a_transform() -> None:
    W = (0.5 * ring(K) + 0.5 * torch.eye(K, dtype=F64)).repeat(M, 1, 1)

    def loss(W: Tensor) -> Tensor:
        return many(lambda i: GossipStrategy(W[i], 2, "sgd", lr=0.3)).loss.sum()

    assert_equal([torch.func.grad(loss)(W)], torch.autograd.grad(loss(at := W.clone().requires_grad_()), at))


# --------------------------------------------------------------------------------------------------------- mistakes


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no runs": ({"num_runs": 0}, ValueError, "num_runs=0 must be an integer >= 1"),
    "models": ({"model": lambda: runs()[0][:2]}, ValueError, r"model is a list of 2, and num_runs=3: .*lambda run"),
    "strategies": ({"strategy": lambda: [FedAvgStrategy()] * 4}, ValueError, "strategy is a list of 4"),
    "a class": ({"strategy": lambda: FedAvgStrategy}, TypeError, "did you mean an object of it"),
    "seeds": ({"seed": lambda: [1, 2]}, ValueError, "seed is a list of 2"),
    "a seed": ({"seed": lambda: 1.5}, TypeError, "seed=1.5 must be an integer"),
    "batches": ({"batches": lambda: runs()[1][:2]}, ValueError, "batches is a list of 2"),
    "evaluation": ({"eval_batch": lambda: list(runs()[2][0])}, ValueError, "eval_batch is a list of 2"),
    "lengths": ({"batches": lambda: [*runs()[1][:2], runs()[1][2][:4]]}, ValueError, "run 2 has 4 batches and run 0"),
    "forms": (
        {"batches": lambda: [*runs()[1][:2], [(x[:, :2], y[:, :2]) for x, y in runs()[1][2]]]}, ValueError,
        r"run 2 has .*\[3, 2, 4\].* and run 0 has .*\[3, 4, 4\]",
    ),
    "other models": ({"model": lambda: [*runs()[0][:2], Dropping().double()]}, ValueError, "models of runs 0 and 2"),
    "asynchronous": ({"strategy": AsyncStrategy, "compute": lambda: Compute(1.0)}, ValueError, "for each run"),
    "a failing function": ({"strategy": lambda: lambda: FedAvgStrategy()}, TypeError, r"strategy\(0\) fails"),
    "numbers of nodes": (
        {"strategy": lambda: FedAvgStrategy("sgd", lr=torch.ones(2))}, ValueError, r"lr of the inner optimizer|\[2\]",
    ),
    "segments": ({"segments": 7}, ValueError, "segments=7 is more than the 6 steps"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_mistakes(case: str) -> None:
    settings, error, message = WRONG[case]
    given = {name: x() if callable(x) else x for name, x in settings.items()}
    with pytest.raises(error, match=message):
        many(given.pop("strategy", FedAvgStrategy("sgd", H=2, lr=0.1)), **given)


def test_lists_of_one_run_point_to_num_runs() -> None:
    models, batches, eval_batches, _ = runs()
    with pytest.raises(ValueError, match=r"num_runs=3"):
        rollout(models[0], FedAvgStrategy("sgd", lr=0.1), batches, num_nodes=K, eval_batch=eval_batches)
