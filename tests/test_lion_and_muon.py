"""Lion and Muon wherever an optimizer can be: in runs of every kind, sweeps, rollouts, and as outer optimizers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fitting import fit, same_run
from vecgym import OptimSpec, Trainer, rollout, sweep
from vecgym.optim import optimizers
from vecgym.strategy import DiLoCoStrategy, FedAvgStrategy, Strategy

SPECS: dict[str, Callable[..., OptimSpec]] = {
    "lion": lambda lr=0.03, **settings: OptimSpec("lion", lr=lr, weight_decay=0.1, **settings),
    "muon": lambda lr=0.05, **settings: OptimSpec("muon", lr=lr, weight_decay=0.1, **settings),
    "full": lambda lr=0.05, **settings: OptimSpec("fullprecisionmuon", lr=lr, weight_decay=0.1, **settings),
    "dion": lambda lr=0.05, **settings: OptimSpec("dionmuon", lr=lr, weight_decay=0.1, **settings),
}
STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "participation": lambda spec: FedAvgStrategy(spec, H=2, participation=0.5),
    "DiLoCo": lambda spec: DiLoCoStrategy(OptimSpec("sgd", lr=0.1), H=2, outer_optim=spec),
}


class Matrices(nn.Module):
    """Two layers without biases: Muon takes all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6, bias=False), nn.Linear(6, 3, bias=False)
        generator = torch.Generator().manual_seed(0)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(self.first(x).tanh()) - x[..., :3]).square().mean()


def examples(num: int = 48, seed: int = 1) -> Tensor:
    return torch.randn(num, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def trained(strategy: Strategy, num_nodes: int = 4, **settings: Any) -> Trainer:
    settings = {"max_steps": 6, "data": examples(), **settings}
    return fit(Matrices(), strategy, num_nodes=num_nodes, **settings)[0]


@pytest.fixture
def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Muon's polynomial without its bfloat16, which makes much of a difference in the last digit."""
    monkeypatch.setattr(optimizers, "_newton_schulz", optimizers._smooth)


@pytest.mark.usefixtures("unrounded")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", SPECS)
def test_a_run_equals_one_whose_nodes_are_computed_one_by_one(name: str, strategy: str) -> None:
    run, expected = (trained(STRATEGIES[strategy](SPECS[name]()), engine=e) for e in ("vmap", "loop"))
    for key, p in run.nodes.params.items():
        torch.testing.assert_close(p, expected.nodes.params[key], rtol=0, atol=1e-10)
        assert not torch.equal(p[0], dict(Matrices().named_parameters())[key])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", SPECS)
def test_a_run_goes_on_from_a_checkpoint_to_the_bit(name: str, strategy: str, tmp_path: Path) -> None:
    whole = trained(STRATEGIES[strategy](SPECS[name]()))
    settings: dict[str, Any] = {"save_dir": tmp_path, "checkpoint_interval": 3}
    trained(STRATEGIES[strategy](SPECS[name]()), **settings)
    (tmp_path / "step-000000006.pt").unlink()
    assert (tmp_path / "step-000000003.pt").exists()
    resumed = trained(STRATEGIES[strategy](SPECS[name]()), **settings, resume=True)
    assert same_run(whole, resumed)


@pytest.mark.parametrize("name", SPECS)
def test_exact_runs_in_processes_are_the_stacked_one(name: str) -> None:
    """Inside and outside at once."""
    strategy = DiLoCoStrategy(SPECS[name](), H=2, outer_optim=SPECS[name](lr=0.02))
    backends: tuple[dict[str, Any], ...] = ({}, {"backend": "processes", "num_processes": 2})
    alone, parts = (trained(strategy, exact=True, **settings, max_steps=4) for settings in backends)
    assert same_run(alone, parts)


@pytest.mark.parametrize("name", SPECS)
def test_rows_of_a_sweep_are_single_runs(name: str) -> None:
    """Node by node, so that the gradients have the same bits: what Muon rounds to bfloat16 must be the same."""

    def made(lr: float) -> Strategy:
        return FedAvgStrategy(SPECS[name](lr=lr), H=2)

    lrs = [0.01, 0.02, 0.05]
    result = sweep(
        Matrices(), examples(), strategy=made, grid={"lr": lrs}, num_nodes=2, max_steps=5, batch_size=4,
        device="cpu", progress=False, keep_models=True, engine="loop",
    )  # fmt: skip
    for index, lr in enumerate(lrs):
        alone = trained(made(lr), num_nodes=2, max_steps=5, engine="loop")
        for key, p in result.model(index).named_parameters():
            torch.testing.assert_close(p.detach(), alone.nodes.params[key].mean(0), rtol=0, atol=1e-10)


def unrolled(spec: OptimSpec) -> Tensor:
    batches = examples(5 * 2 * 4).view(5, 2, 4, 4)
    return rollout(Matrices(), FedAvgStrategy(spec, H=2), batches, num_nodes=2, eval_batch=examples(8, seed=2)).loss


def test_a_rollouts_derivative_by_the_rate_of_lion_is_that_of_finite_differences() -> None:
    """The loss is smooth in it as long as no sign changes in between."""
    lr = torch.tensor(0.03, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(unrolled(SPECS["lion"](lr=lr)), lr)
    h = 1e-6
    above, below = (unrolled(SPECS["lion"](lr=0.03 + d)).item() for d in (h, -h))
    assert slope.item() == pytest.approx((above - below) / (2 * h), rel=1e-6)
    assert abs(slope.item()) > 1e-3


def test_a_rollouts_derivative_by_the_rate_of_muon_is_that_of_its_polynomial(monkeypatch: pytest.MonkeyPatch) -> None:
    """To bfloat16's digits; and exactly, against finite differences, where the polynomial is not rounded."""
    lr = torch.tensor(0.05, dtype=torch.float64, requires_grad=True)
    (rounded,) = torch.autograd.grad(unrolled(SPECS["muon"](lr=lr)), lr)
    monkeypatch.setattr(optimizers, "_newton_schulz", optimizers._smooth)
    (slope,) = torch.autograd.grad(unrolled(SPECS["muon"](lr=lr)), lr)
    h = 1e-6
    above, below = (unrolled(SPECS["muon"](lr=0.05 + d)).item() for d in (h, -h))
    assert slope.item() == pytest.approx((above - below) / (2 * h), rel=1e-6)
    assert rounded.item() == pytest.approx(slope.item(), rel=0.1)
