"""Mime and MimeLite against their naive twin, their fixed points on quadratics, their identities and bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam

from tests.helpers import assert_close, difference, stacked
from tests.models import make_batches, make_model
from tests.reference import common
from tests.reference.mime import mime
from tests.test_decentralised import Valley, Valleys, schedule
from vecgym.availability import Availability, Dropout, Facts, Presence, drawn
from vecgym.collectives import StackedCollectives
from vecgym.core import nodes, tree
from vecgym.engine import Engine
from vecgym.runs.rollout import batches_at
from vecgym.simulation import State
from vecgym.simulation.simulation import Simulation
from vecgym.simulation.simulation import run as run_all
from vecgym.strategy import AllReduceStrategy, FedAvgStrategy, MimeStrategy, OptimSpec, Strategy
from vecgym.strategy.simulated import simulation_of

F64 = torch.float64
K, STEPS, H = 5, 30, 4
WEIGHTS = [1.0, 4.0, 2.0, 0.5, 3.0]


def sample(step: int) -> list[int]:
    return list(drawn(0.6, range(K), 42, step // H))


def as_read(batches: list[list[Any]]) -> list[list[Any]]:
    """The batches of a sample: a node goes on where it has stopped."""
    made, read = [0] * K, []
    for step in range(STEPS):
        read.append([batches[made[i]][i] for i in range(K)])
        made = [n + (i in sample(step)) for i, n in enumerate(made)]
    return read


@functools.cache
def data(num_nodes: int = K) -> list[list[Any]]:
    return make_batches("MLP", STEPS, num_nodes, 3, dtype=F64)


def trained(
    model: Any, strategy: Strategy, batches: Sequence[Any], engine: str = "vmap", there: Availability | None = None
) -> tuple[Simulation, State, Tensor]:
    """A run whose nodes read batches ahead."""
    K, local = len(tree.leaves(batches[0])[0]), Engine(model, engine=engine, node_threads=1)
    local.prepare(batches[0])
    strategy.check(K, len(batches))
    presence = None if there is None else Presence(there, Facts(K, len(batches), 42))
    simulation = simulation_of(
        model, strategy, StackedCollectives(K), engine=local, max_steps=len(batches), presence=presence,
        read=partial(batches_at, batches),
    )  # fmt: skip
    losses: list[Tensor] = []

    def listen(state: State, row: Any) -> None:
        losses.append(row.losses)
        simulation.comm.ledger.add(row.tick - 1, row.transfers)

    return simulation, run_all(simulation, simulation.init(), [listen]), torch.stack(losses)


MOMENTUM = OptimSpec(SGD, lr=0.1, momentum=0.8, weight_decay=0.1)
# name -> (for vecgym, for the twin)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sgd": ({"inner_optim": "sgd", "lr": 0.1}, {"inner": (SGD, {"lr": 0.1})}),
    "momentum, a sample": (
        {"inner_optim": MOMENTUM, "participation": 0.6},
        {"inner": (SGD, {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.1}), "participants": sample},
    ),
    "adam, a sample, weighted, a rate of the server": (
        {"inner_optim": "adam", "lr": 0.01, "participation": 0.6, "weighting": WEIGHTS, "server_lr": 0.7},
        {"inner": (Adam, {"lr": 0.01}), "participants": sample, "weights": WEIGHTS, "eta": 0.7},
    ),
    "nesterov, decay, a schedule": (
        {
            "inner_optim": OptimSpec(SGD, momentum=0.8, nesterov=True, weight_decay=0.3),
            "lr": 0.1,
            "lr_scheduler": schedule,
        },
        {"inner": (SGD, {"lr": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 0.3}), "schedule": schedule},
    ),
}


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("lite", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_it_equals_its_twin(case: str, lite: bool, engine: str) -> None:
    """Losses, the parameters of all nodes, c and the server's state, 30 steps in float64; the last round is short."""
    ours, theirs = CASES[case]
    start = make_model("MLP", dtype=F64)
    _, state, losses = trained(start, MimeStrategy(H=H, lite=lite, **ours), stacked(data()), engine)
    batches = as_read(data()) if "participants" in theirs else data()
    twin = mime(start, batches, K, H=H, lite=lite, **theirs)
    assert_close(losses, twin.losses, 1e-10, "losses")
    params = [common.parameters(model) for model in twin.models]
    expected = {name: torch.stack([p[name] for p in params]) for name in params[0]}
    assert_close(nodes.expand(state.params, K), expected, 1e-10, "params")
    assert_close(state.shared["control"], tree.map(lambda x: x[None], twin.c), 1e-10, "c")
    of_server = twin.server.state[twin.server.param_groups[0]["params"][0]]
    for slot, values in state.shared["frozen"].items():
        assert_close(next(iter(values.values()))[0], of_server[slot], 1e-10, slot)
    assert state.shared["frozen"].keys() == of_server.keys() - {"step"}


# ------------------------------------------------------------------------------------------ fixed points on quadratics


def in_valleys(strategy: Strategy, steps: int = 800, there: Availability | None = None) -> tuple[Tensor, Tensor]:
    valleys = Valleys()
    _, state, _ = trained(Valley(), strategy, [(valleys.A[:, None], valleys.b[:, None])] * steps, there=there)
    return nodes.expand(state.params, K)["x"], valleys.optimum.expand(K, -1)


EXACT: dict[str, Callable[[], MimeStrategy]] = {
    "sgd": lambda: MimeStrategy("sgd", H, lr=0.1),
    "momentum": lambda: MimeStrategy(OptimSpec(SGD, lr=0.05, momentum=0.5), H),
    "rounds that grow": lambda: MimeStrategy("sgd", lambda step: 1 + step // 200, lr=0.1),
    "rates of the nodes": lambda: MimeStrategy("sgd", H, lr=torch.linspace(0.04, 0.12, K, dtype=F64)),
}


@pytest.mark.parametrize("name", EXACT)
def test_it_reaches_the_optimum_of_unlike_quadratics(name: str) -> None:
    found, optimum = in_valleys(EXACT[name]())
    assert_close(found, optimum, 1e-9)


def test_lite_stops_where_fedavg_does() -> None:
    """With plain SGD there is no state, and it is FedAvg."""
    found, optimum = in_valleys(MimeStrategy("sgd", H, lr=0.1, lite=True), 400)
    fedavg, _ = in_valleys(FedAvgStrategy("sgd", H, lr=0.1), 400)
    assert_close(found, fedavg, 1e-12)
    assert difference(found, optimum) > 1e-2


def test_a_sample_stops_near_the_optimum_of_its_nodes() -> None:
    """c is the mean of the participants alone, as in SVRG with a sample: no state of the others corrects it."""
    found, optimum = in_valleys(MimeStrategy("sgd", H, participation=0.4, lr=0.1), 100)
    assert difference(found, optimum) > 1e-2


# ---------------------------------------------------------------------------------------------------------- identities


@pytest.mark.parametrize("inner", [OptimSpec(SGD, lr=0.1, momentum=0.9), OptimSpec("adamw", lr=0.01)])
@pytest.mark.parametrize("lite", [False, True])
def test_one_step_of_everyone_is_data_parallel_training(lite: bool, inner: OptimSpec) -> None:
    start, batches, options = make_model("MLP", dtype=F64), stacked(data()), {"warmup_steps": 6, "cosine_anneal": True}
    _, one, _ = trained(start, MimeStrategy(inner, 1, lite=lite, **options), batches)  # type: ignore[arg-type]
    _, parallel, _ = trained(start, AllReduceStrategy(inner, **options), batches)  # type: ignore[arg-type]
    if lite:  # with a second moment, the mean of steps is not the step of the mean
        assert difference(one.params, parallel.params) < (1e-12 if inner.cls is SGD else torch.inf)
    else:
        assert_close(nodes.expand(one.params, K), nodes.expand(parallel.params, K), 1e-12)
        assert_close(one.shared["frozen"], parallel.home["optimizer"], 1e-12)


@pytest.mark.parametrize("lite", [False, True])
def test_bytes(lite: bool) -> None:
    """Up the movement and a gradient; down theta, the momentum and, unless lite, c."""
    simulation, _, _ = trained(
        make_model("MLP", dtype=F64), MimeStrategy(MOMENTUM, H, participation=0.6, lite=lite), stacked(data())
    )
    model_bytes = 8 * sum(p.numel() for p in make_model("MLP").parameters())
    up, down = 0, 0
    rounds = 0
    for entry in simulation.comm.ledger:
        links: Any = entry.transfer.who
        up += len(links.up) * entry.transfer.payload_bytes
        down += len(links.down) * entry.transfer.payload_bytes
        rounds += entry.transfer.operation == "server_mean"
    surveys = rounds + 1  # of the round that the run cuts short
    assert up == 3 * model_bytes * (rounds + surveys)
    assert down == 3 * model_bytes * (rounds + surveys * (1 if lite else 2))


@pytest.mark.parametrize("rejoin", ["own", "shared"])
def test_absent_nodes_do_not_move_the_optimum_of_equal_ones(rejoin: Any) -> None:
    """The nodes that are there agree; with one kind of data the optimum is that of all."""
    valleys = Valleys()
    valleys.A[:], valleys.b[:] = valleys.A[0].clone(), valleys.b[0].clone()
    batches = [(valleys.A[:, None], valleys.b[:, None])] * 900
    strategy = MimeStrategy("sgd", H, participation=0.6, lr=0.1)
    _, state, _ = trained(Valley(), strategy, batches, there=Dropout(0.1, 4, rejoin=rejoin))
    assert_close(state.params["x"], valleys.optimum.expand(K, -1), 1e-9)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MimeStrategy("muon"), "elementwise"),
        (lambda: MimeStrategy(torch.optim.ASGD), "elementwise"),
        (lambda: MimeStrategy("rprop"), "which no rate changes"),
        (lambda: MimeStrategy(OptimSpec("sgd", momentum=torch.ones(3))), "equal settings for all nodes"),
        (lambda: MimeStrategy(max_norm=1.0), "max_norm=1.0.*leave it out"),
        (lambda: MimeStrategy(server_lr=-1.0), "server_lr=-1.0"),
    ],
)
def test_it_refuses(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
