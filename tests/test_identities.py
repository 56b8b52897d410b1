"""Exact identities between strategies, and closed forms on quadratics, in float64.

Notation: gamma inner, eta outer learning rate; mu outer momentum; H local steps; d = 1 - (1 - gamma a)^H.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from tests.helpers import assert_close, difference, joined, reordered, run, simulation, stacked
from tests.models import Quadratic, make_batches, make_model
from tests.reference.common import copy_model, parameters
from vecgym.collectives import StackedCollectives
from vecgym.optim import OptimSpec
from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy, FedAvgStrategy, Strategy
from vecgym.strategy.simulated import simulation_of

TOLERANCE = 1e-11
K = 4
STEPS = 12

INNER: dict[str, OptimSpec] = {
    "sgd": OptimSpec(SGD, lr=0.1),
    "momentum": OptimSpec(SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": OptimSpec("adamw", lr=0.01),
    "rmsprop": OptimSpec("rmsprop", lr=0.003),
    "adagrad": OptimSpec("adagrad", lr=0.05),
    "nadam": OptimSpec("nadam", lr=0.01),
}
MODELS = ["MLP", "CNN", "GPT"]


def setup(model: str, num_nodes: int = K, steps: int = STEPS, batch_size: int = 3) -> tuple[nn.Module, list[Any]]:
    batches = make_batches(model, steps, num_nodes, batch_size, dtype=torch.float64)
    return make_model(model, dtype=torch.float64), stacked(batches)


def outer(lr: float, momentum: float = 0.0) -> OptimSpec:
    return OptimSpec(SGD, lr=lr, momentum=momentum, nesterov=momentum > 0)


def same(model: nn.Module, batches: list[Any], one: Strategy, other: Strategy, tolerance: float = TOLERANCE) -> None:
    """Both strategies give the same losses, parameters and buffers at every node."""
    a, b = run(model, one, batches), run(model, other, batches)
    assert_close(a.losses, b.losses, tolerance, "losses")
    assert_close(a.params, b.params, tolerance, "params")
    assert_close(a.buffers, b.buffers, tolerance, "buffers")


# ------------------------------------------------------------------------------ strategies on any model


@pytest.mark.parametrize("model", MODELS)
def test_1_fedavg_after_every_sgd_step_is_ddp(model: str) -> None:
    same(*setup(model), FedAvgStrategy("sgd", H=1, lr=0.1), AllReduceStrategy("sgd", lr=0.1))


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("H", [1, 3, 5])
def test_2_diloco_with_outer_sgd_of_1_is_fedavg(H: int, inner: str) -> None:
    same(*setup("CNN"), DiLoCoStrategy(INNER[inner], outer(1.0), H=H), FedAvgStrategy(INNER[inner], H=H))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("eta", "mu"), [(0.7, 0.0), (1.3, 0.0), (0.7, 0.9), (0.4, 0.5)])
def test_3_diloco_of_single_sgd_steps_is_ddp(eta: float, mu: float, model: str) -> None:
    """... with learning rate eta gamma, and with outer Nesterov momentum its own."""
    start, batches = setup(model)
    ddp = OptimSpec(SGD, lr=eta * 0.1, momentum=mu, nesterov=mu > 0)
    same(start, batches, DiLoCoStrategy("sgd", outer(eta, mu), H=1, lr=0.1), AllReduceStrategy(ddp))


def test_3_diloco_of_single_adamw_steps_is_ddp_only_on_identical_shards() -> None:
    start, batches = setup("MLP")
    diloco, ddp = DiLoCoStrategy(INNER["adamw"], outer(1.0), H=1), AllReduceStrategy(INNER["adamw"])
    assert difference(run(start, diloco, batches).params, run(start, ddp, batches).params) > 1e-3
    same(start, reordered(batches, [0] * K), diloco, ddp)


@pytest.mark.parametrize("inner", INNER)
def test_4_averaging_with_identical_nodes_is_training_alone(inner: str) -> None:
    start, batches = setup("CNN", steps=7)
    alone = Strategy(INNER[inner])
    spec = INNER[inner]
    equal = reordered(batches, [0] * K)
    for strategy in (AllReduceStrategy(spec), FedAvgStrategy(spec, H=3), FedAvgStrategy(spec, H=2, island_size=2)):
        same(start, equal, strategy, alone)
    same(start, equal, DiLoCoStrategy(spec, outer(1.0), H=3), alone)
    single: list[Strategy] = [AllReduceStrategy(spec), FedAvgStrategy(spec), DiLoCoStrategy(spec, outer(1.0), H=3)]
    for one in single:
        same(start, reordered(batches, [0]), one, alone)


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("model", ["MLP", "GPT", "DictBatch"])
def test_7_ddp_is_one_model_on_all_batches_is_gradient_accumulation(model: str, inner: str) -> None:
    """No batch norm, whose statistics are those of a batch."""
    B = 3
    batches = make_batches(model, 6, K, B, dtype=torch.float64)
    start, together = make_model(model, dtype=torch.float64), stacked(joined(batches))  # [1, K * B, ...]
    ddp = run(start, AllReduceStrategy(INNER[inner], max_norm=0.5), stacked(batches))
    alone = Strategy(INNER[inner], max_norm=0.5)
    big = run(start, alone, together)
    accumulated = run(start, alone, together, minibatch_size=B)
    assert_close(ddp.losses.mean(1, keepdim=True), big.losses, TOLERANCE, "losses")
    for other in (big, accumulated):
        assert_close(ddp.state.params, other.state.params, TOLERANCE, "params")

    if inner == "nadam":
        return  # torch keeps a product of its factors in float32
    (plain,) = copy_model(start, 1)  # the same in a few lines of torch
    optimizer = INNER[inner].build(plain)
    for of_nodes in batches:
        plain.zero_grad()
        for batch in of_nodes:
            (plain(batch) / K).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
    assert_close(ddp.state.params, {n: p[None] for n, p in parameters(plain).items()}, TOLERANCE, "plain")


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("inner", ["momentum", "adamw"])
def test_9_permuting_the_nodes_permutes_the_result(inner: str, num_nodes: int) -> None:
    """Here what is averaged does not change at all; `test_properties` has every strategy."""
    start, batches = setup("MLP", num_nodes, steps=6)
    order = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(0)).tolist()
    for strategy in (
        AllReduceStrategy(INNER[inner]),
        FedAvgStrategy(INNER[inner], H=3),
        DiLoCoStrategy(INNER[inner], H=3),
    ):
        a, b = run(start, strategy, batches), run(start, strategy, reordered(batches, order))
        assert_close(b.losses, a.losses[:, order], TOLERANCE, "losses")
        assert_close(b.params, a.params, TOLERANCE, "params")


# ------------------------------------------------------------------------------------------ quadratics


def quadratic(a: float, centers: Tensor, steps: int) -> tuple[Quadratic, list[Tensor]]:
    """f_i(x) = a/2 |x - c_i|^2 with c_i in `centers`, `[K, dim]`, the same batch at every step."""
    torch.manual_seed(0)
    return Quadratic(centers.shape[1], a).double(), [centers[:, None]] * steps


@pytest.mark.parametrize(("gamma", "a"), [(0.1, 1.0), (0.3, 2.5), (0.9, 2.0)])
@pytest.mark.parametrize("H", [1, 4, 9])
def test_10_one_local_round_on_quadratics(H: int, gamma: float, a: float) -> None:
    """x^H - c_i = (1 - gamma a)^H (x - c_i) at each node, and FedAvg's mean of these."""
    centers = torch.randn(K, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model, batches = quadratic(a, centers, H)
    x = model.x.detach()
    local = run(model, Strategy("sgd", lr=gamma), batches)
    expected = centers + (1 - gamma * a) ** H * (x - centers)
    assert_close(local.params["x"], expected, 1e-13)
    averaged = run(model, FedAvgStrategy("sgd", H=H, lr=gamma), batches)
    assert_close(averaged.params["x"], expected.mean(0).expand(K, 3), 1e-13)


def test_10_fedavg_converges_to_the_mean_of_the_centers_only_when_curvatures_agree() -> None:
    """At equal curvature the fixed point is the mean of the c_i, at the rate (1 - gamma a)^H a round."""
    centers = torch.randn(K, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model, batches = quadratic(2.0, centers, 15)
    x = model.x.detach()
    result = run(model, FedAvgStrategy("sgd", H=3, lr=0.1), batches).params["x"]
    assert_close(result, (centers.mean(0) + 0.8**15 * (x - centers.mean(0))).expand(K, 3), 1e-13)


def round_matrix(eta: Tensor | float, mu: Tensor | float, d: float) -> Tensor:
    """(theta, m) after a round of DiLoCo with Nesterov on f = a/2 theta^2, [2, 2]."""
    eta, mu = (torch.as_tensor(x, dtype=torch.float64) for x in (eta, mu))
    one = torch.ones((), dtype=torch.float64)
    return torch.stack([one - eta * d * (1 + mu), -eta * mu**2, d * one, mu]).view(2, 2)


A, GAMMA, H = 1.5, 0.2, 3
D = 1 - (1 - GAMMA * A) ** H


@pytest.mark.parametrize(("eta", "mu"), [(0.7, 0.9), (0.5, 0.3), (1.2, 0.0), (1.5, 0.99)])
def test_11_diloco_on_a_homogeneous_quadratic_is_a_linear_map(eta: float, mu: float) -> None:
    """(theta, m) <- [[1 - eta d (1 + mu), -eta mu^2], [d, mu]] (theta, m), each coordinate by itself."""
    model, batches = quadratic(A, torch.zeros(K, 4, dtype=torch.float64), H)
    sim = simulation(model, DiLoCoStrategy("sgd", outer(eta, mu), H=H, lr=GAMMA), batches, max_steps=1000)
    state = sim.init()
    expected = torch.stack([model.x.detach(), torch.zeros(4, dtype=torch.float64)])  # [2, dim]
    for _ in range(10):
        for batch in batches:
            state, _ = sim.step(state, batch)
        expected = round_matrix(eta, mu, D) @ expected
        assert_close(state.params["x"], expected[:1].expand(K, -1), 1e-12, "theta")
        assert_close(state.shared["0.0/params"]["x"], expected[:1], 1e-12, "outer theta")
        if mu > 0:
            assert_close(state.shared["0.0/outer"]["momentum_buffer"]["x"], expected[1:], 1e-12, "m")


@pytest.mark.parametrize("mu", [0.0, 0.5, 0.9])
def test_11_diloco_is_stable_iff_eta_d_is_below_the_bound(mu: float) -> None:
    """eta d < 2 (1 + mu) / (1 + 2 mu): 1 % inside, theta dies out; 1 % outside, it grows without end."""
    bound = 2 * (1 + mu) / ((1 + 2 * mu) * D)
    sizes = {}
    for factor in (0.99, 1.01):
        model, batches = quadratic(A, torch.zeros(2, 3, dtype=torch.float64), H)
        sim = simulation(
            model, DiLoCoStrategy("sgd", outer(factor * bound, mu), H=H, lr=GAMMA), batches, max_steps=1000
        )
        state = sim.init()
        size = []
        for _ in range(100):
            for batch in batches:
                state, _ = sim.step(state, batch)
            size.append(float(state.params["x"].norm()))
        sizes[factor] = size
        rate = float(torch.linalg.eigvals(round_matrix(factor * bound, mu, D)).abs().max())
        assert size[-1] / size[-21] == pytest.approx(rate**20, rel=1e-6)  # the spectral radius is the rate
        assert (rate < 1) == (factor < 1)
    assert sizes[0.99][-1] < sizes[0.99][-21] < sizes[0.99][-41]
    assert sizes[1.01][-1] > sizes[1.01][-21] > sizes[1.01][-41]


def unrolled(model: nn.Module, batches: list[Any], eta: Tensor, mu: Tensor, gamma: Tensor, rounds: int) -> Tensor:
    """theta `[dim]` after some rounds, differentiable in the hyperparameters."""
    spec = OptimSpec(SGD, lr=eta, momentum=mu, nesterov=True)
    strategy = DiLoCoStrategy(OptimSpec(SGD, lr=gamma), spec, H=H)
    sim = simulation_of(model, strategy, StackedCollectives(K), max_steps=rounds * H)
    state = sim.init()
    for _ in range(rounds):
        for batch in batches:
            state, _ = sim.step(state, batch, pure=True)
    return state.params["x"][0]


def test_11_derivatives_through_the_unrolled_run_equal_the_closed_form() -> None:
    """d theta_R / d(eta, mu, gamma): the derivative of a matrix power, sum_i M^(R-1-i) dM M^i, written out."""
    R, eta, mu = 5, 0.7, 0.9
    model, batches = quadratic(A, torch.zeros(K, 4, dtype=torch.float64), H)
    x = model.x.detach()
    hyper = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (eta, mu, GAMMA)]
    theta = unrolled(model, batches, hyper[0], hyper[1], hyper[2], R)
    found = torch.autograd.grad(theta.sum(), hyper, create_graph=True)

    M = round_matrix(eta, mu, D)
    assert_close(theta, torch.linalg.matrix_power(M, R)[0, 0] * x, 1e-13)
    dd = H * A * (1 - GAMMA * A) ** (H - 1)  # d / d gamma of d
    slopes = [
        torch.tensor([[-D * (1 + mu), -(mu**2)], [0, 0]], dtype=torch.float64),
        torch.tensor([[-eta * D, -2 * eta * mu], [0, 1]], dtype=torch.float64),
        dd * torch.tensor([[-eta * (1 + mu), 0], [1, 0]], dtype=torch.float64),
    ]
    power = torch.linalg.matrix_power
    for gradient, dM in zip(found, slopes):
        total = sum((power(M, R - 1 - i) @ dM @ power(M, i) for i in range(R)), torch.zeros_like(M))
        assert gradient.item() == pytest.approx(float(total[0, 0] * x.sum()), rel=1e-12)

    # second derivative with respect to eta: M is linear in eta, so twice the sum over pairs of positions
    (second,) = torch.autograd.grad(found[0], hyper[:1])
    dM = slopes[0]
    pairs = [power(M, R - 1 - j) @ dM @ power(M, j - 1 - i) @ dM @ power(M, i) for j in range(R) for i in range(j)]
    assert second.item() == pytest.approx(float(2 * sum(pairs)[0, 0] * x.sum()), rel=1e-11)


# ---------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("num_nodes", [1, 2, 5])
@pytest.mark.parametrize("H", [1, 3, 4])
def test_12_bytes_of_ddp_fedavg_and_diloco_are_as_H_1_1(H: int, num_nodes: int) -> None:
    start, batches = setup("MLP", num_nodes, steps=12)
    payload = sum(8 * p.numel() for p in start.parameters())
    ring = 2 * (num_nodes - 1) / num_nodes * payload

    def sent(strategy: Strategy) -> float:
        return run(start, strategy, batches).comm.ledger.total_bytes

    ddp, fedavg, diloco = sent(AllReduceStrategy()), sent(FedAvgStrategy(H=H)), sent(DiLoCoStrategy(H=H))
    assert fedavg == diloco
    assert ddp == pytest.approx(H * fedavg)
    assert ddp == pytest.approx(12 * ring)


@pytest.mark.parametrize("H", [1, 4])
def test_12_bytes_are_sent_at_the_end_of_each_round(H: int) -> None:
    start, batches = setup("MLP", steps=9)
    for make in (FedAvgStrategy, DiLoCoStrategy):
        ledger = run(start, make(H=H), batches).comm.ledger
        assert [entry.step + 1 for entry in ledger] == [step for step in range(1, 10) if step % H == 0]
        assert {entry.operation for entry in ledger} == {"mean"}


def test_12_nothing_but_the_sizes_decides_on_the_bytes() -> None:
    """Not even values that overflow."""
    start, batches = setup("MLP", steps=4)
    expected = list(run(start, DiLoCoStrategy("sgd", H=2), batches).comm.ledger)
    assert list(run(start, DiLoCoStrategy("sgd", H=2, lr=1e300), batches).comm.ledger) == expected
