"""FedDyn and Scaffnew, which reach the optimum of unlike data: their twins, fixed points, identities, absent nodes."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from tests.helpers import assert_close, difference, run, stacked
from tests.models import make_batches, make_model
from tests.reference import common
from tests.reference.feddyn import feddyn
from tests.reference.scaffnew import scaffnew
from tests.test_availability import Taken
from tests.test_decentralised import Valley, Valleys
from vecgym.availability import Dropout
from vecgym.simulation.timetable import RunFacts
from vecgym.strategy import AllReduceStrategy, FedAvgStrategy, FedDynStrategy, OptimSpec, ScaffnewStrategy

F64 = torch.float64
K, STEPS = 5, 24


def schedule(step: int) -> float:
    return step / 6 if step < 6 else 0.2 + 0.8 * math.cos(0.05 * step)


@functools.cache
def data(num_nodes: int) -> list[list[Any]]:
    return make_batches("MLP", STEPS, num_nodes, 3, dtype=F64)


def assert_is(result: Any, twin: Any) -> None:
    assert_close(result.losses, twin.losses, 1e-10, "losses")
    params = [common.parameters(m) for m in twin.models]
    assert_close(result.params, {name: torch.stack([p[name] for p in params]) for name in params[0]}, 1e-10, "params")


INNER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # for vecgym, for the twin
    "momentum, clipped": (
        {"inner_optim": OptimSpec(SGD, lr=0.05, momentum=0.9), "max_norm": 0.3},
        {"inner": (SGD, {"lr": 0.05, "momentum": 0.9}), "max_norm": 0.3},
    ),
    "adamw, a schedule": (
        {"inner_optim": OptimSpec(AdamW, lr=0.01), "lr_scheduler": schedule},
        {"inner": (AdamW, {"lr": 0.01}), "schedule": schedule},
    ),
}


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("participation", [1.0, 0.6])
@pytest.mark.parametrize("num_nodes", [1, 5])
@pytest.mark.parametrize("inner", INNER)
def test_feddyn_equals_its_twin(inner: str, num_nodes: int, participation: float, engine: str) -> None:
    """Losses and parameters of all nodes, 24 steps in float64; what the nodes and the server remember."""
    start, (ours, theirs) = make_model("MLP", dtype=F64), INNER[inner]
    strategy = FedDynStrategy(H=4, alpha=0.2, participation=participation, **ours)
    result = run(start, strategy, stacked(data(num_nodes)), engine=engine)
    drawn = strategy.who_trains(RunFacts(num_nodes, STEPS, seed=42))
    who = None if drawn is None else lambda step: list(drawn(step, range(num_nodes)) or ())
    twin = feddyn(start, data(num_nodes), num_nodes, H=4, alpha=0.2, participants=who, **theirs)
    assert_is(result, twin)
    G = {name: -0.2 * torch.stack([past[name] for past in twin.residuals]) for name in twin.outer}
    assert_close(result.state.own["gradient"], G, 1e-10, "G")
    assert_close(result.state.shared["0.0/slope"], {name: x.mean(0, keepdim=True) for name, x in G.items()}, 1e-10, "h")


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize(("num_nodes", "p"), [(1, 0.5), (5, 1.0), (5, 0.3)])
def test_scaffnew_equals_its_twin(num_nodes: int, p: float, engine: str) -> None:
    """With a warm-up from rate 0 and a schedule."""
    start, strategy = make_model("MLP", dtype=F64), ScaffnewStrategy("sgd", p=p, lr=0.1, lr_scheduler=schedule)
    result = run(start, strategy, stacked(data(num_nodes)), engine=engine)
    coins = [strategy.averages(RunFacts(num_nodes, STEPS, seed=42), step) for step in range(STEPS)]
    assert p == 1 or 0 < sum(coins) < STEPS
    twin = scaffnew(start, data(num_nodes), num_nodes, p=p, coins=coins, lr=0.1, schedule=schedule)
    assert_is(result, twin)
    h = {name: torch.stack([node[name] for node in twin.residuals]) for name in twin.residuals[0]}
    assert_close(result.state.own["correction"], h, 1e-10, "h")


# ------------------------------------------------------------------------------------------ fixed points on quadratics


def valleys(steps: int) -> list[Any]:
    nodes = Valleys()
    return [(nodes.A[:, None], nodes.b[:, None])] * steps


EXACT: dict[str, Any] = {
    "FedDyn, one step": FedDynStrategy("sgd", H=1, alpha=0.5, lr=0.1),
    "FedDyn, three steps": FedDynStrategy("sgd", H=3, alpha=0.5, lr=0.1),
    "FedDyn, momentum": FedDynStrategy(OptimSpec(SGD, lr=0.05, momentum=0.5), H=4, alpha=0.5),
    "FedDyn, samples": FedDynStrategy("sgd", H=3, alpha=1.0, participation=0.6, lr=0.1),
    "FedDyn, a schedule": FedDynStrategy("sgd", H=3, alpha=0.5, lr=0.1, lr_scheduler=lambda t: 1 - 0.5 * (t > 300)),
    "Scaffnew": ScaffnewStrategy("sgd", p=0.2, lr=0.1),
    "Scaffnew, a schedule": ScaffnewStrategy("sgd", p=0.2, lr=0.1, lr_scheduler=lambda t: 1 - 0.5 * (t > 300)),
    "Scaffnew, a rate for each node": ScaffnewStrategy("sgd", p=0.2, lr=torch.linspace(0.06, 0.14, K, dtype=F64)),
}


@pytest.mark.parametrize("name", EXACT)
def test_it_reaches_the_optimum_of_unlike_quadratics(name: str) -> None:
    nodes = Valleys()
    result = nodes.train(EXACT[name], 900)
    x = result.simulation.result(result.state).params["x"]
    assert_close(x, nodes.optimum.expand_as(x), 1e-9)
    fedavg = nodes.train(FedAvgStrategy("sgd", 3, lr=0.1), 150)
    assert difference(fedavg.params, {"x": nodes.optimum}) > 1e-2  # the nodes are unlike


class Optional(nn.Module):
    """(x - b)^2 / 2 on the nodes that use x, of the batch (whether, b)."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros((), dtype=F64))
        self.y = nn.Parameter(torch.ones((), dtype=F64))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        used, b = batch
        return self.y**2 / 2 + (((self.x - b) ** 2 / 2).mean() if used.item() else 0)


@pytest.mark.parametrize("name", ["FedDyn, one step", "Scaffnew"])
def test_nodes_without_a_gradient_are_corrected_too(name: str) -> None:
    """Of three nodes two use x, which goes to the mean of their targets on all."""
    batch = (torch.tensor([[1], [1], [0]]), torch.tensor([[3.0], [1.0], [9.0]], dtype=F64))
    result = run(Optional(), EXACT[name], [batch] * 500, engine="loop")
    assert_close(result.params["x"], torch.full((3,), 2.0, dtype=F64), 1e-9)


@pytest.mark.parametrize("rejoin", ["own", "shared"])
@pytest.mark.parametrize("name", ["FedDyn, three steps", "Scaffnew"])
def test_it_reaches_it_with_absent_nodes(name: str, rejoin: Any) -> None:
    """The sum of the nodes' memories is that of the server: n h, and 0."""
    nodes = Valleys()
    taken = Taken(EXACT[name], valleys(1500), Dropout(0.2, rejoin=rejoin), model=Valley()).run(1500)
    state = taken.state
    if name == "Scaffnew":
        assert_close(state.own["correction"]["x"].sum(0), torch.zeros(3, dtype=F64), 1e-9)
    else:
        assert_close(state.own["gradient"]["x"].mean(0), state.shared["0.0/slope"]["x"][0], 1e-9)
    assert_close(state.params["x"], nodes.optimum.expand(K, -1), 1e-9)


def test_corrections_of_scaffnew_sum_to_0_at_all_times() -> None:
    taken = Taken(EXACT["Scaffnew"], valleys(60), Dropout(0.3), model=Valley())
    sizes = []
    for _ in range(60):
        h = taken.run(1).state.own["correction"]["x"]
        assert_close(h.sum(0), torch.zeros(3, dtype=F64), 1e-12)
        sizes.append(float(h.norm()))
    assert sizes[-1] > 1


def test_the_model_of_the_participants_is_their_mean() -> None:
    nodes = Valleys()
    strategy = FedDynStrategy("sgd", H=3, alpha=0.5, participation=0.6, lr=0.05, evaluated="participants")
    before = nodes.train(strategy, 5)  # the last round lacks its last step
    theta = run(Valley(), strategy, valleys(6)[:5]).state.shared["0.0/params"]["x"]
    G_before = before.state.own["gradient"]["x"]
    after = nodes.train(strategy, 6)
    moved = (G_before - after.state.own["gradient"]["x"]) / 0.5  # theta_i - theta of those who took part
    took = moved.abs().sum(1) > 0
    assert int(took.sum()) == 3
    mean = theta[0] + moved[took].mean(0)
    assert_close(after.simulation.result(after.state).params["x"], mean[None], 1e-12)
    assert difference(after.params, {"x": mean}) > 1e-3  # the nodes begin elsewhere


# ---------------------------------------------------------------------------------------------------------- identities


def test_scaffnew_that_always_averages_is_gradient_descent() -> None:
    start, batches = make_model("MLP", dtype=F64), stacked(data(K))
    ours = run(start, ScaffnewStrategy("sgd", p=1.0, lr=0.1), batches)
    together = run(start, AllReduceStrategy("sgd", lr=0.1), batches)
    assert_close(ours.params, together.params, 1e-12)
    assert_close(ours.losses, together.losses, 1e-12)
    assert ours.comm.ledger.total_bytes == together.comm.ledger.total_bytes


def test_scaffnew_exchanges_where_the_coin_says_so() -> None:
    strategy, steps = ScaffnewStrategy("sgd", p=0.2, lr=0.05), 1000
    times = len(Valleys().train(strategy, steps).comm.ledger)
    assert times == sum(strategy.averages(RunFacts(K, steps, seed=42), step) for step in range(steps))
    assert times == pytest.approx(200, abs=4 * (steps * 0.2 * 0.8) ** 0.5)
    taken = Taken(strategy, valleys(20), None, model=Valley())
    for step in range(20):
        x = taken.run(1).state.params["x"]
        equal = strategy.agreed(RunFacts(K, 20, seed=42), ["x"], step)
        assert equal == ({"x"} if strategy.averages(RunFacts(K, 20, seed=42), step) else set())
        assert bool((x == x[:1]).all()) == bool(equal)
    seeds = {tuple(strategy.averages(RunFacts(K, seed=s), t) for t in range(30)) for s in range(5)}
    assert len(seeds) == 5


def test_feddyn_of_equal_nodes_is_that_of_one() -> None:
    start, batches = make_model("MLP", dtype=F64), data(1)
    strategy = FedDynStrategy("sgd", H=3, alpha=0.3, lr=0.1)
    alone = run(start, strategy, stacked(batches))
    three = run(start, strategy, stacked([[batch[0]] * 3 for batch in batches]))
    assert_close(three.params, {name: x.expand(3, *x.shape[1:]) for name, x in alone.params.items()}, 1e-12)


# ------------------------------------------------------------------------------------------------------ what is refused


def test_what_the_rules_do_not_bear_is_refused() -> None:
    for spec in ("adam", OptimSpec(SGD, momentum=0.9)):
        with pytest.raises(ValueError, match="Scaffnew needs the mean"):
            ScaffnewStrategy(spec)
    for p in (0.0, 1.5):
        with pytest.raises(ValueError, match="the probability of an average"):
            ScaffnewStrategy(p=p)
    for alpha in (0.0, torch.ones(3)):
        with pytest.raises(ValueError, match="alpha"):
            FedDynStrategy(alpha=alpha)
    with pytest.raises(ValueError, match="evaluated='cloud'"):
        FedDynStrategy(evaluated="cloud")  # type: ignore[arg-type]
