"""FedNova against its naive twin, its weights in closed form, its fixed point on quadratics, and its identities."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from tests.fitting import fit
from tests.helpers import assert_close, assert_same_bits, difference, run, stacked
from tests.models import make_batches, make_model
from tests.reference import common
from tests.reference.fednova import fednova
from tests.test_availability import Taken
from tests.test_decentralised import Valley, Valleys
from vecgym.availability import Dropout, LocalSteps, Trace
from vecgym.simulation.timetable import RunFacts
from vecgym.strategy import FedAvgStrategy, FedNovaStrategy, OptimSpec

F64 = torch.float64
K, STEPS = 5, 24
UNEQUAL = [1, 4, 2, 3, 4]


def schedule(step: int) -> float:
    return 0.2 + 0.8 * math.cos(0.05 * step)


@functools.cache
def data() -> list[list[Any]]:
    return make_batches("MLP", STEPS, K, 3, dtype=F64)


HEAVY = OptimSpec(SGD, momentum=0.7, weight_decay=0.05)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # for vecgym, for the twin
    "plain": ({}, {}),
    "equal": ({"local_steps": [3] * K}, {"local_steps": [3] * K}),
    "clipped, of examples": (
        {"max_norm": 0.3, "weighting": [3, 1, 4, 1, 5]}, {"max_norm": 0.3, "weights": [3, 1, 4, 1, 5]},
    ),
    "momentum, a schedule": (
        {"inner_optim": HEAVY, "lr_scheduler": schedule}, {"momentum": 0.7, "weight_decay": 0.05, "schedule": schedule},
    ),
    "equal, momentum": ({"inner_optim": HEAVY, "local_steps": [4] * K},
                        {"momentum": 0.7, "weight_decay": 0.05, "local_steps": [4] * K}),
    "proximal": ({"proximal_mu": 0.8}, {"mu": 0.8}),
    "proximal, too far, of each node": (
        {"proximal_mu": torch.tensor([0.5, 12.0, 25.0, 1.0, 0.0], dtype=F64)}, {"mu": [0.5, 12.0, 25.0, 1.0, 0.0]},
    ),
    "equal, proximal, a schedule": (
        {"proximal_mu": 0.8, "local_steps": [4] * K, "lr_scheduler": schedule},
        {"mu": 0.8, "local_steps": [4] * K, "schedule": schedule},
    ),
    "momentum of the server": ({"server_momentum": 0.6}, {"server_momentum": 0.6}),
    "equal, momentum of the server": (
        {"server_momentum": 0.6, "local_steps": [4] * K}, {"server_momentum": 0.6, "local_steps": [4] * K},
    ),
}  # fmt: skip


@pytest.mark.parametrize("participation", [1.0, 0.6])
@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("case", CASES)
def test_it_equals_its_twin(case: str, engine: str, participation: float) -> None:
    """Losses and parameters of all nodes, 24 steps in float64."""
    start, (ours, theirs) = make_model("MLP", dtype=F64), CASES[case]
    strategy = FedNovaStrategy(**{"local_steps": UNEQUAL, "lr": 0.1, "participation": participation, **ours})
    strategy.check(K, STEPS)
    result = run(start, strategy, stacked(data()), engine=engine)
    drawn = strategy.exchanges[0].who_trains(RunFacts(K, STEPS, seed=42))
    who = None if drawn is None else lambda step: list(drawn(step, range(K)) or ())
    twin = fednova(start, data(), K, **{"local_steps": UNEQUAL, "lr": 0.1, "participants": who, **theirs})
    assert_close(result.losses, twin.losses, 1e-10, "losses")
    params = [common.parameters(m) for m in twin.models]
    assert_close(result.params, {name: torch.stack([p[name] for p in params]) for name in params[0]}, 1e-10, "params")


def work(strategy: FedNovaStrategy, steps: int) -> Tensor:
    """a / gamma of each node after these steps, before the exchange."""
    return run(Valley(), strategy, valleys(steps)).state.own["work"]["weight"] / strategy.inner_optim.lr


def valleys(steps: int) -> list[Any]:
    nodes = Valleys()
    return [(nodes.A[:, None], nodes.b[:, None])] * steps


def test_weights_are_those_of_the_paper() -> None:
    """Of a node that has done its H_i steps: in closed form, for SGD, with momentum, with a proximal term."""
    H, gamma, rho, mu = torch.tensor([1.0, 3.0, 7.0, 8.0, 2.0], dtype=F64), 0.1, 0.6, 0.5
    given: dict[str, Any] = {"local_steps": [1, 3, 7, 9, 2], "lr": gamma}
    assert_close(work(FedNovaStrategy("sgd", **given), 8), H, 1e-12)
    heavy = (H - rho * (1 - rho**H) / (1 - rho)) / (1 - rho)
    assert_close(work(FedNovaStrategy(OptimSpec(SGD, momentum=rho), **given), 8), heavy, 1e-12)
    near = (1 - (1 - gamma * mu) ** H) / (gamma * mu)
    assert_close(work(FedNovaStrategy("sgd", proximal_mu=mu, **given), 8), near, 1e-12)
    assert float(work(FedNovaStrategy("sgd", **given), 9).sum()) == 0  # anew in each round


def test_it_stops_where_the_means_of_gradients_cancel() -> None:
    """sum_i (I - (I - gamma A_i)^H_i) (theta - A_i^-1 b_i) / H_i = 0: near the optimum, where FedAvg is not."""
    nodes, gamma, eye = Valleys(), 0.06, torch.eye(3, dtype=F64)
    M, v = torch.zeros(3, 3, dtype=F64), torch.zeros(3, dtype=F64)
    for A, b, H in zip(nodes.A, nodes.b, UNEQUAL):
        part = (eye - torch.linalg.matrix_power(eye - gamma * A, H)) / H
        M, v = M + part, v + part @ torch.linalg.solve(A, b)
    result = nodes.train(FedNovaStrategy("sgd", local_steps=UNEQUAL, lr=gamma), 1200)
    assert_close(result.params["x"], torch.linalg.solve(M, v).expand(K, -1), 1e-9)
    away = difference(result.params, {"x": nodes.optimum})
    fedavg = Taken(FedAvgStrategy("sgd", 4, lr=gamma), valleys(600), LocalSteps(UNEQUAL, H=4), model=Valley())
    assert 3 * away < difference(fedavg.run(600).state.params, {"x": nodes.optimum})


# ---------------------------------------------------------------------------------------------------------- identities


@pytest.mark.parametrize("options", [{}, {"participation": 0.6}, {"weighting": "examples"}, {"max_norm": 0.2}])
def test_of_equally_many_steps_it_is_fedavg_to_the_bit(options: dict[str, Any]) -> None:
    start, batches = make_model("MLP", dtype=F64), stacked(data())
    given: dict[str, Any] = {"lr": 0.1, **options}
    fedavg = run(start, FedAvgStrategy("sgd", 3, **given), batches, num_examples=(3, 1, 4, 1, 5))
    for form in ({"H": 3}, {"local_steps": [3] * K}):
        nova = run(start, FedNovaStrategy("sgd", **form, **given), batches, num_examples=(3, 1, 4, 1, 5))
        assert_same_bits(nova.params, fedavg.params)
        assert_same_bits(nova.losses, fedavg.losses)
        assert nova.comm.ledger.total_bytes == fedavg.comm.ledger.total_bytes


def test_with_a_servers_momentum_it_is_fedavgm() -> None:
    start, batches = make_model("MLP", dtype=F64), stacked(data())
    nova = run(start, FedNovaStrategy("sgd", 3, server_momentum=0.7, lr=0.1), batches)
    fedavg = FedAvgStrategy("sgd", 3, server_optim="avgm", server_betas=(0.7, 0.9), server_lr=1.0, lr=0.1)
    assert_close(nova.params, run(start, fedavg, batches).params, 1e-12)


def test_steps_of_the_strategy_are_those_of_the_availability() -> None:
    """Nodes that rest because the strategy says so, or the run."""
    own = Taken(FedNovaStrategy("sgd", local_steps=UNEQUAL, lr=0.1), valleys(20), None, model=Valley()).run(20)
    runs = LocalSteps(UNEQUAL, H=4)
    of_run = Taken(FedNovaStrategy("sgd", 4, lr=0.1), valleys(20), runs, model=Valley()).run(20)
    assert_close(own.state.params, of_run.state.params, 1e-13)
    assert [row.active for row in own.rows] == [row.active for row in of_run.rows]
    assert own.rows[1].active == [1, 2, 3, 4]


def test_bytes_are_those_of_fedavg_and_of_one_number() -> None:
    nodes = Valleys()
    for participation, factor in ((1.0, 2 * (K - 1) / K), (0.6, 3 / K)):
        strategy = FedNovaStrategy("sgd", local_steps=UNEQUAL, participation=participation, lr=0.1)
        assert nodes.train(strategy, 8).comm.ledger.total_bytes == pytest.approx(2 * factor * (3 + 1) * 8, rel=1e-12)


def test_a_round_in_which_nobody_is_left_to_train_goes_on() -> None:
    """The nodes that are drawn may all have fewer steps than the longest."""
    steps = [1, 1, 1, 1, 9]
    strategy = FedNovaStrategy("sgd", local_steps=steps, participation=0.2, lr=0.1)
    trainer, _ = fit("MLP", strategy, num_nodes=K, max_steps=45)
    losses = trainer.history["train_loss"]
    assert any(math.isnan(x) for x in losses)
    assert not math.isnan(losses[0])


# ------------------------------------------------------------------------------------------------------- absent nodes


def test_absent_nodes_are_normalised_by_what_they_did() -> None:
    """A node that is there for one of three steps counts one; all equally many, the fixed point is that of twins."""
    nodes, gamma = Valleys(), 0.1
    table = torch.ones(1200, K, dtype=torch.bool)
    table[1::3, 0] = False  # node 0 misses the second step of each round
    taken = Taken(FedNovaStrategy("sgd", 3, lr=gamma), valleys(1200), Trace(table), model=Valley()).run(1200)
    eye = torch.eye(3, dtype=F64)
    M, v = torch.zeros(3, 3, dtype=F64), torch.zeros(3, dtype=F64)
    for A, b, H in zip(nodes.A, nodes.b, (2, 3, 3, 3, 3)):
        part = (eye - torch.linalg.matrix_power(eye - gamma * A, H)) / H
        M, v = M + part, v + part @ torch.linalg.solve(A, b)
    assert_close(taken.state.params["x"], torch.linalg.solve(M, v).expand(K, -1), 1e-9)


def test_it_survives_nodes_that_come_and_go() -> None:
    strategy = FedNovaStrategy(OptimSpec(SGD, momentum=0.5), local_steps=[1, 3, 3, 2, 3], lr=0.02)
    state = Taken(strategy, valleys(300), Dropout(0.2, mean_steps=3), model=Valley()).run(300).state
    assert bool(state.params["x"].isfinite().all())
    assert difference({"x": state.params["x"].mean(0)}, {"x": Valleys().optimum}) < 0.5


# ------------------------------------------------------------------------------------------------------ what is refused


def test_it_refuses_what_its_weights_do_not_cover() -> None:
    changing = OptimSpec(SGD, momentum=torch.full((10, 1), 0.9))
    nesterov, damped = OptimSpec(SGD, momentum=0.9, nesterov=True), OptimSpec(SGD, momentum=0.9, dampening=0.1)
    for spec in ("adam", nesterov, damped, changing):
        with pytest.raises(ValueError, match="FedNova divides by the weights of SGD's gradients"):
            FedNovaStrategy(spec)
    with pytest.raises(ValueError, match=r"momentum=0\.9 and proximal_mu=0\.1.*Leave out"):
        FedNovaStrategy(OptimSpec(SGD, momentum=0.9), proximal_mu=0.1)
    with pytest.raises(ValueError, match=r"max_norm=1\.0 and proximal_mu=0\.1"):
        FedNovaStrategy(proximal_mu=0.1, max_norm=1.0)
    with pytest.raises(ValueError, match="Leave out H"):
        FedNovaStrategy(H=3, local_steps=[1, 2])
    with pytest.raises(ValueError, match=r"local_steps has numbers for 2.*5"):
        FedNovaStrategy(local_steps=[1, 2]).check(5, 10)
    with pytest.raises(TypeError, match="local_steps=3 must be"):
        FedNovaStrategy(local_steps=3)  # type: ignore[arg-type]
