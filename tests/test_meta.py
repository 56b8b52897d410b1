"""Numbers that are learned over many runs: curves, times of exchanges, estimators, and the report on unseen runs."""

from __future__ import annotations

import math
import warnings
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

import vecgym
from vecgym import rollout
from vecgym.availability import Deadline
from vecgym.collectives.topology import ring
from vecgym.core.errors import VecgymWarning
from vecgym.core.objects import altered
from vecgym.meta import Curve, Exchanges, Learned, Mixing, learn
from vecgym.meta.curves import Family, Length, whole
from vecgym.meta.learning import ESTIMATORS, Estimate, Learner, LearnOptions, by_es, by_gradient
from vecgym.meta.rivals import Late, Quadratic, Random, annealed
from vecgym.meta.tasks import Tasks
from vecgym.models import Line
from vecgym.optim import OptimSpec
from vecgym.simulation.when import Rounds
from vecgym.strategy import DiLoCoStrategy, FedAvgStrategy, Strategy
from vecgym.strategy.catalogue import CATALOGUE
from vecgym.strategy.decentralised.gossip import GossipStrategy

K, T = 2, 8
NUMBERS = {"lr": Curve(0.05), "outer_lr": Curve(0.7), "momentum": Curve(0.5, within=(0, 1)), "when": Exchanges(every=4)}


def strategy_of(n: Any) -> DiLoCoStrategy:
    outer = OptimSpec("sgd", lr=n.outer_lr, momentum=n.momentum, nesterov=True)
    return DiLoCoStrategy("sgd", outer, lr=n.lr, H=n.when)


def squared(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0])[..., 0] - batch[1]).square().mean()


def runs(seed: int) -> tuple[Any, ...]:
    """A linear problem of each seed's own; the global generators are seeded with it."""
    w, x = torch.randn(3, dtype=torch.float64), torch.randn(60, 3, dtype=torch.float64)
    return nn.Linear(3, 1, dtype=torch.float64), TensorDataset(x, x @ w)


COMMON: dict[str, Any] = {
    "runs": runs, "loss_fn": squared, "num_nodes": K, "batch_size": 4, "max_steps": T, "runs_per_step": 3,
    "device": "cpu",
}  # fmt: skip


def options(**changed: Any) -> LearnOptions:
    values: dict[str, Any] = {**COMMON, "steps": 1, **changed}
    return LearnOptions(values.pop("strategy_of", strategy_of), values.pop("numbers", NUMBERS), **values)


def learned(**changed: Any) -> Learned:
    values: dict[str, Any] = {**COMMON, "steps": 3, "estimator": "gradient", **changed}
    return learn(values.pop("strategy_of", strategy_of), values.pop("numbers", NUMBERS), **values)


# ------------------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("within", [(0, math.inf), (0, 1), (-2, 3), (-math.inf, 1), (-math.inf, math.inf)])
def test_a_curve_starts_where_it_is_told_and_stays_within_its_bounds(within: tuple[float, float]) -> None:
    curve = Curve(0.25, within)
    start = curve.values(curve.first(several=False)[:, None], Length(7))
    assert torch.allclose(start, torch.full((7, 1), 0.25, dtype=torch.float64), atol=1e-12)
    values = curve.values(torch.linspace(-9, 9, 4, dtype=torch.float64)[:, None], Length(50))
    assert (values > within[0]).all()
    assert (values < within[1]).all()
    assert len(values.unique()) == 50


def test_the_knots_of_a_curve_lie_over_the_run_at_equal_distances() -> None:
    z = torch.tensor([0.0, 3.0, -1.0, 2.0], dtype=torch.float64)[:, None]
    curve = Curve(1.0, within=(-math.inf, math.inf))
    assert curve.values(z, Length(7)).flatten().tolist() == [0, 1.5, 3, 1, -1, 0.5, 2]
    assert curve.values(z, Length(4)).flatten().tolist() == [0, 3, -1, 2]
    assert curve.values(z, Length(1)).flatten().tolist() == [0]


def test_with_several_lengths_knots_are_linear_in_log_T_up_to_the_longest() -> None:
    family = Family({"x": Curve(0.0, within=(-math.inf, math.inf), knots=1)}, [10, 1000])
    at = {steps: family.arguments(torch.tensor([[2.0], [3.0]]), steps)[0].x[0, 0] for steps in (1, 10, 100, 1000, 9999)}
    gap = math.log(10.0)
    expected = {1: 2 - 3 * gap, 10: 2 - 3 * gap, 100: 2, 1000: 2 + 3 * gap, 9999: 2 + 3 * gap}
    assert {steps: pytest.approx(float(x), abs=1e-5) for steps, x in at.items()} == expected


@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("count", [1, 5, 39, 40])
def test_the_number_of_exchanges_is_always_the_same_and_the_last_is_at_the_end(count: int, at_end: bool) -> None:
    generator = torch.Generator().manual_seed(count)
    for sharpness in (0.0, 1.0, 10.0, 100.0):
        density = (sharpness * torch.randn(40, 6, generator=generator, dtype=torch.float64)).exp()
        weights = whole(density, count, at_end)
        assert weights.sum(0).tolist() == [count] * 6
        assert weights.unique().tolist() == ([0, 1] if count < 40 else [1])
        assert (weights[-1] == 1).all() or not at_end
    assert whole(torch.ones(40, 1), count, at_end)[-1].item() == (at_end or count >= 39)


@pytest.mark.parametrize("every", [1, 3, 8])
def test_an_even_density_is_every_H_steps(every: int) -> None:
    weights = Exchanges(every).values(torch.zeros(4, 1, dtype=torch.float64), Length(24))
    assert weights.flatten().tolist() == [float(Rounds(every).due(step)) for step in range(24)]


def test_the_derivative_of_an_exchange_is_that_of_its_share() -> None:
    density = torch.tensor([1.0, 2.0, 0.5, 1.5], dtype=torch.float64, requires_grad=True)
    slopes = torch.autograd.functional.jacobian(lambda x: whole(x[:, None], 2)[:, 0], density)
    expected = torch.autograd.functional.jacobian(lambda x: 2 * x / x.sum(), density)
    assert torch.allclose(slopes, expected)
    assert slopes.sum(0).abs().max() < 1e-15  # of moved exchanges, not of more of them


def test_dense_times_get_more_exchanges() -> None:
    late = Exchanges(4).values(torch.tensor([[-2.0], [-1.0], [1.0], [2.0]]), Length(40)).flatten()
    assert late[20:].sum() == 10
    assert late[20:30].sum() < late[30:].sum()


# ---------------------------------------------------------------------------------------------------------- estimators


def losses_at(tasks: Tasks, z: Tensor, drawn: Any) -> Tensor:
    with torch.no_grad():
        return tasks.losses(z[:, None], drawn)


def test_the_gradient_equals_finite_differences() -> None:
    """Of each run; without a density, whose derivative is that of weights, and not of times."""
    numbers = {**NUMBERS, "when": Exchanges(4, knots=0)}
    tasks = Tasks(options(numbers=numbers), family := Family(numbers, [T]))
    drawn = tasks.draw([1, 2, 3], T, K)
    estimate = by_gradient(tasks, family.start, drawn, seed=0)
    assert torch.allclose(estimate.losses, losses_at(tasks, family.start, drawn))
    for i, unit in enumerate(torch.eye(len(family.start), dtype=torch.float64)):
        up, down = (losses_at(tasks, family.start + h * unit, drawn) for h in (1e-5, -1e-5))
        assert torch.allclose(estimate.slopes[i], (up - down) / 2e-5, atol=1e-8)
    unseen = [i for i, slope in enumerate(estimate.slopes.abs().sum(1)) if slope == 0]
    assert unseen == [4, 8]  # the first knots of outer rate and momentum lie too long before the first exchange


def test_the_gradient_by_the_density_is_that_by_the_weights_of_exchanges() -> None:
    when = Exchanges(4)
    tasks = Tasks(options(), family := Family(NUMBERS, [T]))
    drawn = tasks.draw([5], T, K)
    estimate = by_gradient(tasks, family.start, drawn, seed=0)
    start = family.arguments(family.start[:, None], T)[0]
    z = torch.zeros(4, dtype=torch.float64)
    weights = when.values(z[:, None], Length(T))[:, 0].requires_grad_()
    numbers = SimpleNamespace(**{**vars(start), "when": when.argument(weights)})
    model = drawn.models[0]
    outcome = vecgym.rollout(
        model, strategy_of(numbers), drawn.batches[0], num_nodes=K, eval_batch=drawn.eval_batches[0]
    )
    by_weight = torch.autograd.grad(outcome.loss, weights)[0]
    shares = torch.autograd.functional.jacobian(
        lambda z: T // 4 * when.density(z[:, None], Length(T))[:, 0].div(when.density(z[:, None], Length(T)).sum()), z
    )
    assert torch.allclose(estimate.slopes[-4:, 0], by_weight @ shares, atol=1e-10)
    assert estimate.slopes[-4:].abs().max() > 1e-5


class Quadratics:
    """In place of runs: losses (z - target)^2, with noise, and more the rougher they are."""

    def __init__(self, rough: float) -> None:
        self.options, self.rough = SimpleNamespace(noise=0.1), rough

    def losses(self, z: Tensor, drawn: Any) -> Tensor:
        phase = torch.arange(len(drawn.models), dtype=torch.float64) % 32
        smooth = (z - torch.tensor([[1.0], [-1.0]])).square().sum(0) * (1 + 0.1 * phase.sin())
        return smooth + self.rough * (1e6 * z.sum(0) + phase).sin()

    def untrained(self, drawn: Any) -> float:
        return 1.0


class SomeRuns(SimpleNamespace):
    def times(self, n: int) -> SomeRuns:
        return SomeRuns(models=self.models * n, num_steps=self.num_steps)


def test_evolution_strategies_estimate_the_gradient() -> None:
    tasks: Any = Quadratics(rough=0.0)
    drawn: Any = SomeRuns(models=[None] * 32, num_steps=T)
    z = torch.zeros(2, dtype=torch.float64)
    each = torch.stack([by_es(tasks, z, drawn, seed).slopes.mean(1) for seed in range(100)])
    exact = by_gradient(tasks, z, drawn, 0).slopes.mean(1)
    assert torch.allclose(exact, torch.tensor([-2.0, 2.0], dtype=torch.float64), rtol=0.02)
    assert ((each.mean(0) - exact).abs() < 3 * each.std(0) / 10).all()
    assert each.std(0).tolist() == pytest.approx([(12 / 32) ** 0.5] * 2, rel=0.2)  # |g|^2 + g_i^2, of 32 pairs


def test_of_a_pair_the_run_that_diverges_is_worse_and_two_count_as_equal() -> None:
    class Cliff(Quadratics):
        def losses(self, z: Tensor, drawn: Any) -> Tensor:
            return torch.where(z[0] > 0, math.nan, super().losses(z, drawn))

    drawn: Any = SomeRuns(models=[None] * 32, num_steps=T)
    estimate = by_es(Cliff(0.0), torch.tensor([0.0, 0.0], dtype=torch.float64), drawn, 0)  # type: ignore[arg-type]
    assert estimate.slopes.isfinite().all()
    assert (estimate.slopes[0] > 0).all()
    both = by_es(Cliff(0.0), torch.tensor([9.0, 0.0], dtype=torch.float64), drawn, 0)  # type: ignore[arg-type]
    assert (both.slopes == 0).all()


@pytest.mark.parametrize(("rough", "expected"), [(0.0, "gradient"), (1e-3, "es")])
def test_auto_takes_the_estimator_with_less_variance_per_second(rough: float, expected: str) -> None:
    learner = Learner(options())
    learner.tasks = Quadratics(rough)  # type: ignore[assignment]
    learner.progress = learner.progress._replace(z=torch.zeros(2, dtype=torch.float64))
    drawn: Any = SomeRuns(models=[None] * 32, num_steps=T)
    assert learner._estimate(drawn, 0, 0)[0] == expected


def test_auto_counts_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slopes = torch.tensor([[1.0, 2.0, 3.0]])
    estimate = Estimate(torch.zeros(3), slopes)
    clock = [0.0]

    def taking(seconds: float) -> Any:
        def estimated(*_: Any) -> Estimate:
            clock[0] += seconds
            return estimate

        return estimated

    monkeypatch.setattr("vecgym.meta.learning.time.monotonic", lambda: clock[0])
    for seconds, expected in ((2.0, "es"), (0.5, "gradient")):
        monkeypatch.setitem(ESTIMATORS, "gradient", taking(seconds))
        monkeypatch.setitem(ESTIMATORS, "es", taking(1.0))
        learner = Learner(options(steps=None, seconds=100.0))
        drawn: Any = SomeRuns(models=[None] * 3, num_steps=T)
        assert learner._estimate(drawn, 0, 0)[0] == expected


class Falling:
    def __call__(self, step: int) -> float:
        return 1.0 / (step + 1)


def line(seed: int) -> tuple[Any, ...]:
    return Line().double(), torch.randn(64, dtype=torch.float64) + 1


OF_A_LINE: dict[str, Any] = {
    "runs": line, "loss_fn": None, "numbers": {"lr": Curve(0.1)}, "batch_size": 2, "estimator": "auto",
    "strategy_of": lambda n: FedAvgStrategy("sgd", lr=n.lr, H=1),
}  # fmt: skip


@pytest.mark.parametrize("seeds", [[0], [0, 1]])
@pytest.mark.parametrize(("rate", "expected"), [(0.01, "gradient"), (1.5, "es")])
def test_auto_sees_runs_that_explode_even_if_there_is_one(rate: float, expected: str, seeds: list[int]) -> None:
    """Each step of SGD multiplies the distance by 1 - 2 rate."""
    result = learned(**{**OF_A_LINE, "numbers": {"lr": Curve(rate)}}, max_steps=60, seeds=seeds, steps=1)
    assert result.rows[0]["estimator"] == expected


def test_a_step_measured_on_one_run_is_that_of_its_estimator() -> None:
    given = {**OF_A_LINE, "seeds": [0], "steps": 1}
    assert torch.equal(
        learned(**given).coordinates, learned(**{**given, "estimator": "gradient"}).coordinates
    )  # fmt: skip


@pytest.mark.parametrize("estimator", ["auto", "es"])
def test_the_unit_of_the_loss_is_of_no_importance(estimator: str) -> None:
    """Adam's path does not depend on it, either."""
    found = []
    for unit in (1.0, 1e4):
        adam = OptimSpec("adam", eps=1e-30, lr=0.1)
        given = {**OF_A_LINE, "strategy_of": lambda n: FedAvgStrategy(adam.replace(lr=n.lr), H=2)}  # noqa: B023
        given |= {"loss_fn": lambda m, x: unit * (next(m.parameters()) - x).square().mean()}  # noqa: B023
        result = learned(**{**given, "estimator": estimator}, max_steps=6, steps=2)
        found.append((result.coordinates, [row["estimator"] for row in result.rows]))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-9)
    assert found[0][1] == found[1][1]


def test_a_run_without_a_gradient_does_not_stop_learning_nor_does_a_steep_one_decide() -> None:
    slopes = torch.tensor([[1.0, math.nan, 1.0, 1e9, 1.0]])
    estimate = Estimate(torch.zeros(5), slopes)
    assert estimate.variance == math.inf
    assert estimate.mean.item() == pytest.approx((3 + 10) / 5)


# ------------------------------------------------------------------------------------------------------------ learning


def test_a_learned_rate_is_better_on_runs_never_seen() -> None:
    slow = {"lr": Curve(0.02)}
    result = learned(strategy_of=lambda n: FedAvgStrategy("sgd", lr=n.lr, H=4), numbers=slow, steps=6, lr=0.8)
    report = result.report(num_runs=6, rivals=["constants"])
    start, same = report.gains[0], report.gains[1]
    assert start.rival == "start"
    assert start.gain.low > 0.1 * start.rival_loss
    assert (same.rival, same.num_steps, same.num_nodes) == ("constants", T, K)
    assert [(gain.num_steps, gain.num_nodes) for gain in report.gains[::2]] == [(T, K), (3 * T, K), (T, 2 * K)]


def test_a_rival_with_the_same_freedom_learns_the_same() -> None:
    """It is tuned by as many steps, on the same runs, with the same estimator."""
    numbers = {"lr": Curve(0.02, knots=1), "when": Exchanges(4, knots=0)}
    result = learned(strategy_of=lambda n: FedAvgStrategy("sgd", lr=n.lr, H=n.when), numbers=numbers, max_steps=[4, T])
    report = result.report(num_runs=4, rivals=["constants", "random times"])
    by = {(gain.rival, gain.num_steps, gain.num_nodes): gain.gain.difference for gain in report.gains}
    assert {gap for (rival, *_), gap in by.items() if rival == "constants"} == {0.0}
    assert all(gap != 0 for (rival, steps, _), gap in by.items() if rival == "random times" and steps > 4)
    assert [key[1:] for key in by if key[0] == "start"] == [(4, K), (T, K), (3 * T, K), (T, 2 * K)]


def test_the_runs_of_the_report_are_never_those_of_learning() -> None:
    seen: list[int] = []

    def noted(seed: int) -> Any:
        seen.append(seed)
        return runs(seed)

    result = learned(runs=noted, steps=4)
    trained, seen[:] = set(seen), []
    assert len(trained) == 4 * 3
    result.report(num_runs=4, rivals=["constants"])
    rivals, unseen = seen[: 4 * 3], seen[4 * 3 :]
    assert set(rivals) == trained
    assert len(set(unseen)) == 4
    assert not trained & set(unseen)


@pytest.mark.parametrize("estimator", ["gradient", "es", "auto"])
def test_a_seed_gives_the_same_bits(estimator: str) -> None:
    first, again = (learned(estimator=estimator, seed=3) for _ in range(2))
    assert torch.equal(first.coordinates, again.coordinates)
    assert first.rows == again.rows
    assert not torch.equal(first.coordinates, learned(estimator=estimator, seed=4).coordinates)


def interrupting(at: int) -> Any:
    """Runs, with a Ctrl-C while those of a later step are made."""
    made = iter(range(10**6))

    def draw(seed: int) -> Any:
        if next(made) == at:
            raise KeyboardInterrupt
        return runs(seed)

    return draw


def test_on_ctrl_c_the_result_so_far_is_returned_and_a_checkpoint_goes_on_from_it(tmp_path: Path) -> None:
    path = tmp_path / "learned.pt"
    with pytest.warns(VecgymWarning, match="interrupted after 2 steps"):
        partly = learned(runs=interrupting(at=7), checkpoint=path, steps=4)
    assert torch.equal(partly.coordinates, learned(steps=2, lr=0.08).coordinates) is False  # its rate falls sooner
    assert len(partly.rows) == 2
    whole_run, resumed = learned(steps=4), learned(steps=4, checkpoint=path)
    assert torch.equal(resumed.coordinates, whole_run.coordinates)
    assert resumed.rows == whole_run.rows
    assert torch.equal(learned(steps=4, checkpoint=path).coordinates, whole_run.coordinates)  # nothing is left to do
    of_functions = {
        "strategy_of": lambda n: FedAvgStrategy("sgd", lr=n.lr, H=n.when, lr_scheduler=Falling()),
        "availability": lambda step: torch.tensor([True, step < 4]), "checkpoint": tmp_path / "functions.pt",
    }  # fmt: skip
    learned(steps=1, **of_functions)
    again = {**of_functions, "availability": lambda step: torch.tensor([True, step < 4])}  # as in another process
    assert len(learned(steps=2, **again).rows) == 2
    other: list[tuple[dict[str, Any], str]] = [
        ({"seed": 1}, "seed=42, not 1"), ({"lr": 0.5}, "lr=0.08, not 0.5"),
        ({"strategy_of": lambda n: FedAvgStrategy("sgd", lr=n.lr, H=n.when)}, r"strategy_of=DiLoCo(?s:.*)not FedAvg"),
        ({"strategy_of": lambda n: altered(strategy_of(n), max_norm=1.0)}, "strategy"),
    ]  # fmt: skip
    for changed, message in other:
        with pytest.raises(ValueError, match=rf"learned.pt is of learning with (?s:.*){message}"):
            learned(steps=4, checkpoint=path, **changed)


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_the_strategy_is_an_ordinary_one_and_trains_as_it_was_learned(participation: float) -> None:
    def drawing(n: Any) -> Strategy:
        """Make a strategy that draws its clients by the seed of the run."""
        return FedAvgStrategy("sgd", lr=n.lr, H=4, participation=participation)

    made = {} if participation == 1 else {"strategy_of": drawing, "numbers": {"lr": Curve(0.05)}}
    result = learned(steps=2, **made)
    tasks = result.tasks
    (seed,) = tasks.seeds("unseen", count=1)
    drawn = tasks.draw([seed], T, K)
    strategy = result.strategy(max_steps=T)
    with vecgym.core.rng.private(seed):
        model, dataset = runs(seed)
    kept = torch.utils.data.Subset(dataset, [i for i in range(60) if i % 10 != 9])
    held_out = torch.utils.data.Subset(dataset, [i for i in range(60) if i % 10 == 9])
    trainer = vecgym.Trainer(model, kept, val_dataset=held_out, loss_fn=squared)
    trainer.fit(strategy, K, max_steps=T, batch_size=4, seed=seed, device="cpu", progress=False)
    expected = losses_at(tasks, result.coordinates, drawn)
    assert trainer.history["val_loss"][-1] == pytest.approx(float(expected), rel=1e-10)
    assert len(list(trainer.ledger)) == T // 4
    result.strategy(max_steps=100).check(K, 100)


def test_one_given_run_is_a_case_of_many() -> None:
    """The same run in each step, in place of fresh ones; what is learned is told on others."""
    drawn: list[int] = []

    def noted(seed: int) -> Any:
        drawn.append(seed)
        return runs(seed)

    numbers = {"lr": Curve(0.02), "when": Exchanges(4, knots=T, at_end=False)}
    result = learned(
        strategy_of=lambda n: FedAvgStrategy("sgd", lr=n.lr, H=n.when), numbers=numbers, runs=noted, seeds=[7], steps=6,
        lr=0.3, estimator="auto",
    )  # fmt: skip
    assert drawn == [7] * 6
    assert repr(result).startswith("Learned(lr and when, from 6 steps of 1 run in ")
    losses = [row["loss"] for row in result.rows]
    assert losses == sorted(losses, reverse=True)
    tasks = result.tasks
    assert float(losses_at(tasks, result.coordinates, tasks.draw([7], T, K))) < losses[-1]
    assert result.numbers(T).when.weights.sum() == T // 4
    report = result.report(num_runs=3, rivals=["constants"], longer=None, more=None)
    assert [gain.rival for gain in report.gains] == ["start", "constants"]
    assert 7 not in tasks.seeds("unseen", count=3)


def test_nodes_may_be_absent() -> None:
    given: dict[str, Any] = {
        "strategy_of": lambda n: FedAvgStrategy("sgd", lr=n.lr, H=4),
        "numbers": {"lr": Curve(0.05)},
    }
    absent = learned(availability=vecgym.availability.Dropout(0.4), **given)
    assert not torch.equal(absent.coordinates, learned(**given).coordinates)


# ------------------------------------------------------------------------------------------------------ mixing matrices

SPARSE = torch.tensor([[0.6, 0.4, 0], [0.4, 0.3, 0.3], [0, 0.3, 0.7]], dtype=torch.float64)


def gossip(n: Any) -> Strategy:
    return GossipStrategy(n.W, inner_optim="sgd", lr=0.05)


@pytest.mark.parametrize("start", [SPARSE, torch.stack([SPARSE, ring(3)] * (T // 2))], ids=["one", "each step"])
def test_a_learned_matrix_stays_doubly_stochastic_and_keeps_its_links(start: Tensor) -> None:
    given: dict[str, Any] = {"strategy_of": gossip, "numbers": {"W": Mixing(start)}, "num_nodes": 3, "lr": 0.3}
    result = learned(**given, seeds=[1, 2], steps=5)
    W = result.numbers(T).W
    for dim in (-1, -2):
        assert torch.allclose(W.sum(dim), torch.ones(start.shape[:-1], dtype=torch.float64), atol=1e-10)
    assert torch.equal(W == 0, start == 0)
    assert result.rows[-1]["loss"] < result.rows[0]["loss"] - 1e-5
    before, after = (
        vecgym.dry_run(nn.Linear(3, 1), gossip(SimpleNamespace(W=x)), 3, T).total_bytes for x in (start, W)
    )
    assert before == after
    report = result.report(num_runs=2)  # not in runs of more nodes, nor, with one for each step, in longer ones
    kinds = {(gain.num_steps, gain.num_nodes) for gain in report.gains}
    assert kinds == ({(T, 3), (3 * T, 3)} if start.dim() == 2 else {(T, 3)})
    assert {gain.rival for gain in report.gains} == {"start", "constants"}
    assert result.plot().axes[0].get_title() == ("W" if start.dim() == 2 else f"W, mean of {T}")


def test_the_gradient_by_a_matrix_equals_finite_differences() -> None:
    """... of each run, though all train as one program."""
    numbers = {"W": Mixing(SPARSE)}
    tasks = Tasks(options(strategy_of=gossip, numbers=numbers, num_nodes=3), Family(numbers, [T]))
    drawn = tasks.draw([1, 2], T, 3)
    z = 0.3 * torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    estimate = by_gradient(tasks, z, drawn, seed=0)
    for i, unit in enumerate(torch.eye(7, dtype=torch.float64)):
        up, down = (losses_at(tasks, z + h * unit, drawn) for h in (1e-5, -1e-5))
        assert torch.allclose(estimate.slopes[i], (up - down) / 2e-5, atol=1e-8)
    assert (estimate.slopes.abs().sum(1) > 1e-4).sum() > 4


def test_factories_of_datasets_are_called_for_each_node_and_for_validation() -> None:
    def of_node(rank: int, num_nodes: int, train: bool) -> TensorDataset:
        x = torch.full((20 if train else 3, 3), float(rank + num_nodes * (not train)), dtype=torch.float64)
        return TensorDataset(x, x[:, 0])

    tasks = Tasks(options(runs=lambda seed: (nn.Linear(3, 1).double(), of_node)), Family(NUMBERS, [T]))
    drawn = tasks.draw([1, 2], 3, 4)
    assert drawn.batches[0][0][1].tolist() == [[float(node)] * 4 for node in range(4)]
    assert sorted(drawn.eval_batches[0][1].tolist()) == sorted([4.0, 5.0, 6.0, 7.0] * 3)


def of_unequal_nodes(rank: int, num_nodes: int, train: bool) -> Tensor:
    return torch.linspace(rank, 2 * rank + 1, [11, 4, 2][rank], dtype=torch.float64)


def test_the_loss_is_that_of_fit_where_nodes_have_unequally_many_examples() -> None:
    """For training, in which one node has fewer than a batch, and for validation."""
    strategy = FedAvgStrategy("sgd", H=2, lr=0.1)
    trainer = vecgym.Trainer(Line().double(), of_unequal_nodes, of_unequal_nodes)
    trainer.fit(strategy, 3, max_steps=6, batch_size=4, seed=7, device="cpu", progress=False, val_interval=None)
    given = {**OF_A_LINE, "runs": lambda seed: (Line().double(), of_unequal_nodes), "num_nodes": 3, "batch_size": 4}
    for segments in (None, 2):
        tasks = Tasks(options(**given, segments=segments), Family({"lr": Curve(0.1)}, [6]))
        found = tasks.losses(tasks.family.start[:, None], tasks.draw([7, 8], 6, 3))
        assert found[0].item() == pytest.approx(trainer.history.last("val_loss"), abs=1e-12)


def test_nodes_count_by_their_examples_in_each_run() -> None:
    def of_run(seed: int) -> Any:
        model, data = runs(seed)
        counts = (4 + 4 * seed, 20)
        return model, lambda rank, num_nodes, train: Subset(data, range(counts[rank])) if train else data

    given = {"runs": of_run, "num_nodes": 2, "strategy_of": lambda n: n}
    tasks = Tasks(options(**given), Family(NUMBERS, [T]))
    drawn = tasks.draw([1, 2], T, 2)
    assert drawn.sizes == [(8, 20), (12, 20)]
    found = []
    for weighting in ("examples", "equal"):
        strategy = FedAvgStrategy("sgd", H=3, lr=0.2, weighting=weighting)
        tasks = Tasks(options(**{**given, "strategy_of": lambda n: strategy}), Family(NUMBERS, [T]))  # noqa: B023
        losses = tasks.losses(tasks.family.start[:, None], drawn)
        alone = [
            rollout(model, strategy, batches, num_nodes=2, eval_batch=held_out, seed=seed, num_examples=sizes).loss
            for model, batches, held_out, sizes, _, seed in zip(*drawn[:6])
        ]
        assert torch.allclose(losses, torch.stack(alone), atol=1e-12)
        found.append(losses)
    assert not torch.allclose(found[0], found[1], atol=1e-6)


# --------------------------------------------------------------------------------------------------------------- rivals


@pytest.mark.parametrize("every", [2, 3, 10])
@pytest.mark.parametrize("kind", [Late, Quadratic, Random])
def test_rivals_exchange_as_often(kind: type[Exchanges], every: int) -> None:
    rival = kind(every, knots=1 if kind is Late else 0)
    for seed in range(5):
        z = torch.full((rival.knots, 3), seed - 2.0, dtype=torch.float64)
        weights = rival.values(z, Length(60, seeds=range(seed, seed + 3)))
        assert weights.sum(0).tolist() == [60 // every] * 3
        assert weights.unique().tolist() == [0, 1]
        assert (weights[-1] == 1).all()


def test_each_run_has_its_own_random_times_and_keeps_them_in_a_pair() -> None:
    family = Family({"when": Random(6, knots=0)}, [48])
    drawn = [tuple(n.when.weights.tolist()) for n in family.arguments(family.start[:, None], 48, seeds=[3, 4, 5, 3])]
    assert len({*drawn}) == 3
    assert drawn[0] == drawn[3]


def test_quadratic_rounds_grow_as_the_rule_says() -> None:
    weights = Quadratic(10).values(torch.zeros(0, 1, dtype=torch.float64), Length(400)).flatten()
    ends = [-1, *weights.nonzero()[:, 0].tolist()]
    rounds = [b - a for a, b in pairwise(ends)][1:-1]  # the first takes what is left over, and the last one ends
    assert min(rounds) == 5
    factor = vecgym.optim.schedule.lambda_cosine(400, cosine_anneal=True)
    roots = [math.sqrt(H) * factor(end + 1) for H, end in zip(rounds, ends[1:]) if H > 5]
    below = [math.sqrt(H + 1) * factor(end + 1) for H, end in zip(rounds, ends[1:]) if H > 5]
    assert len(roots) > 3
    assert max(roots) < min(below)  # a lies between them


def test_a_cosine_is_of_the_first_number() -> None:
    rival = annealed({"when": Exchanges(2), "lr": Curve(0.5), "outer_lr": Curve(0.7)})
    z = {name: x.first(several=False)[:, None] for name, x in rival.items()}
    lr, outer_lr = (rival[name].values(z[name], Length(10)).flatten() for name in ("lr", "outer_lr"))
    factor = vecgym.optim.schedule.lambda_cosine(10, cosine_anneal=True)
    assert torch.allclose(lr, torch.tensor([0.5 * factor(t) for t in range(10)], dtype=torch.float64))
    assert torch.allclose(outer_lr, torch.full((10,), 0.7, dtype=torch.float64))


def test_a_late_window_begins_later_with_its_coordinate() -> None:
    late = Late(4, knots=1)
    firsts = [int(late.values(torch.tensor([[z]]), Length(40)).flatten().nonzero()[0]) for z in (-2.0, 0.0, 2.0)]
    assert firsts[0] < 10
    assert firsts[0] < firsts[1] < firsts[2]
    assert firsts[2] > 29


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps": None}, "give one of them, the budget, such as seconds=60"),
        ({"seconds": 1.0}, "seconds=1.0 and steps=1: give one of them"),
        ({"numbers": {}}, "numbers takes names and what is learned"),
        ({"numbers": {"lr": 0.1}}, r"numbers\['lr'\] is 0.1; numbers takes names"),
        ({"numbers": {"a b": Curve(0.1)}}, "numbers takes names"),
        ({"numbers": {"when": Exchanges(9)}}, r"when=Exchanges\(9\) makes no exchange in 8 steps"),
        ({"numbers": {"W": Mixing(ring(3))}}, r"W has no value in runs of 2 nodes and 8 steps: give a matrix \[2, 2\]"),
        ({"numbers": {"W": Mixing(ring(2)[None])}}, "W has no value in runs of 2 nodes and 8 steps"),
        ({"seeds": []}, "seeds is of type list or empty; give a list of integers"),
        ({"seeds": [0.5]}, "seeds=0.5 must be an integer"),
        ({"max_steps": []}, "max_steps is empty"),
        ({"max_steps": [4, 0]}, "max_steps=0 must be an integer >= 1: the steps of a run"),
        ({"estimator": "pes"}, "estimator='pes' is not known; did you mean 'es'"),
        ({"strategy_of": DiLoCoStrategy()}, "strategy_of is of type DiLoCoStrategy; give a function of the numbers"),
        ({"runs": 3}, "runs is of type int; give lambda seed"),
        ({"lr": 0.0}, "lr=0.0 must be a number > 0"),
        ({"availability": Deadline(2.0, H=2)}, "needs the nodes' compute times, which these runs do not have"),
    ],
)
def test_invalid_options(changed: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        options(**changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"runs": lambda seed: nn.Linear(1, 1)}, "runs returned Linear.*; give runs=lambda seed: "),
        ({"runs": lambda seed: (nn.Linear(3, 1), torch.ones(3, 2))}, "a dataset of 3 examples is too small"),
        ({"strategy_of": lambda n: FedAvgStrategy("sgd", H=4)}, "the loss does not depend on the numbers"),
        ({"strategy_of": lambda n: 3}, "strategy is of type int"),
        ({"strategy_of": lambda n: FedAvgStrategy(lr=n.rate)}, "no number 'rate': numbers has lr, outer_lr, momentum"),
    ],
)
def test_mistakes_that_the_first_step_shows(changed: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        learned(**changed)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ([[1.0]], r"start takes a tensor \[K, K\]"),
        (ring(3) * 1.1, "start: row 0 sums to 1.1"),
        (torch.stack([ring(3), ring(3) * 1.1]), r"start\[1\]: row 0 sums to 1.1"),
    ],
)
def test_what_is_no_mixing_matrix(start: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mixing(start)


def test_an_unknown_rival() -> None:
    with pytest.raises(ValueError, match="rivals='constant' is not known; did you mean 'constants'"):
        learned(steps=1).report(rivals=["constant"])


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_rate_of_every_strategy_can_be_learned(name: str) -> None:
    def make(n: Any) -> Any:
        return CATALOGUE[name].make(H=2, inner_optim="adamw" if name in ("local-adam", "des-loc") else "sgd", lr=n.lr)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", VecgymWarning)  # of rounds longer than the run
        result = learned(strategy_of=make, numbers={"lr": Curve(0.02)}, steps=1)
    assert result.coordinates.isfinite().all()
    assert (result.coordinates != result.family.start).all()


def test_learning_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = learned(steps=1, estimator="auto")
    assert repr(result).startswith("Learned(lr, outer_lr, momentum and when, from 1 step of 3 runs in ")


def test_the_figure_has_a_panel_for_each_number(tmp_path: Path) -> None:
    figure = learned(steps=1).plot(path=tmp_path / "learned.png")
    assert [axes.get_title() for axes in figure.axes] == ["lr", "outer_lr", "momentum", "when: 2 exchanges"]
    assert [len(axes.lines) for axes in figure.axes] == [2, 2, 2, 2]
    assert (tmp_path / "learned.png").exists()
