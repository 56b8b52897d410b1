"""FedAvg beyond the plain average: server optimizers, FedProx, weights, participation. Float64, to 1e-10."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.helpers import run, stack
from tests.models import Quadratic, make_batches, make_model
from vecgym import OptimSpec, Trainer
from vecgym.collectives import StackedCollectives
from vecgym.collectives.topology import random_islands, sample_nodes
from vecgym.core import rng
from vecgym.engine import Engine
from vecgym.simulation import State
from vecgym.simulation.timetable import RunFacts
from vecgym.strategy import FedAvgStrategy, GossipStrategy, ServerOptimizer, Strategy
from vecgym.strategy.averages import Weighting
from vecgym.strategy.simulated import simulation_of

STEPS, H = 24, 4
SGD = OptimSpec(torch.optim.SGD, lr=0.05, momentum=0.9)


def simulate(
    strategy: FedAvgStrategy, num_nodes: int, engine: str = "vmap", num_examples: tuple[int, ...] | None = None
) -> tuple[State, StackedCollectives]:
    model, batches = make_model("MLP", dtype=torch.float64), make_batches("MLP", STEPS, num_nodes, dtype=torch.float64)
    comm = StackedCollectives(num_nodes)
    simulation = simulation_of(
        model, strategy, comm, engine=Engine(model, engine=engine), max_steps=STEPS, num_examples=num_examples
    )
    simulation.engine.prepare(stack(batches[0]))
    state = simulation.init()
    for batch in batches:
        state, row = simulation.step(state, stack(batch))
        simulation.comm.ledger.add(state.tick - 1, row.transfers)
    return state, comm


def server_twin(
    num_nodes: int, server: Any, chosen: Any, weights: list[float], mu: float = 0.0
) -> list[dict[str, Tensor]]:
    """Federated optimization, one module after the other; `server(theta, delta, memory)` moves one tensor."""
    model, batches = make_model("MLP", dtype=torch.float64), make_batches("MLP", STEPS, num_nodes, dtype=torch.float64)
    models = [copy.deepcopy(model) for _ in range(num_nodes)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in models]
    theta = {name: p.detach().clone() for name, p in model.named_parameters()}
    memory: dict[str, dict[str, Tensor]] = {name: {} for name in theta}
    for step, batch in enumerate(batches):
        active = chosen(step)
        for i in active:
            loss = models[i](batch[i])
            for name, p in models[i].named_parameters():
                loss = loss + mu / 2 * (p - theta[name]).square().sum()
            optimizers[i].zero_grad()
            loss.backward()
            optimizers[i].step()
        if (step + 1) % H == 0:
            total = sum(weights[i] for i in active)
            for name in theta:
                delta = sum(weights[i] * (param(models[i], name) - theta[name]) for i in active) / total
                theta[name] = server(theta[name], delta, memory[name])
            for m in models:
                m.load_state_dict(theta)
    return [{name: param(m, name) for name in theta} for m in models]


def param(model: nn.Module, name: str) -> Tensor:
    return model.get_parameter(name).detach().clone()


def adaptive(kind: str, lr: float = 0.1, b1: float = 0.9, b2: float = 0.99, tau: float = 1e-3) -> Any:
    """Algorithm 2 of arXiv 2003.00295, for one tensor."""

    def server(theta: Tensor, delta: Tensor, memory: dict[str, Tensor]) -> Tensor:
        m = b1 * memory.get("m", torch.zeros_like(theta)) + (1 - b1) * delta
        v = memory.get("v", torch.full_like(theta, tau**2))
        if kind == "adagrad":
            v = v + delta**2
        elif kind == "adam":
            v = b2 * v + (1 - b2) * delta**2
        else:
            v = v - (1 - b2) * delta**2 * torch.sign(v - delta**2)
        memory["m"], memory["v"] = m, v
        return theta + lr * m / (torch.sqrt(v) + tau)

    return server


def momentum(theta: Tensor, delta: Tensor, memory: dict[str, Tensor]) -> Tensor:
    memory["m"] = 0.9 * memory.get("m", torch.zeros_like(theta)) + delta
    return theta + 0.5 * memory["m"]


SERVERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "avg": (lambda theta, delta, memory: theta + delta, {}),
    "avgm": (momentum, {"server_lr": 0.5}),
    "adam": (adaptive("adam"), {"server_lr": 0.1}),
    "yogi": (adaptive("yogi"), {"server_lr": 0.1}),
    "adagrad": (adaptive("adagrad"), {"server_lr": 0.1}),
}


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("num_nodes", [1, 2, 5])
@pytest.mark.parametrize("name", SERVERS)
def test_server_optimizers_follow_the_paper(name: str, num_nodes: int, engine: str) -> None:
    server, options = SERVERS[name]
    state, _ = simulate(FedAvgStrategy(SGD, H=H, server_optim=name, **options), num_nodes, engine)
    expected = server_twin(num_nodes, server, lambda step: range(num_nodes), [1.0] * num_nodes)
    compare(state, expected)


def drawn(step: int) -> list[int]:
    """Two nodes of five, anew for each round."""
    return sample_nodes(5, 2, rng.generator(42, "participants", step // H))


@pytest.mark.parametrize("weighting", ["equal", "examples"])
def test_a_server_averages_the_participants_and_hands_theta_to_all(weighting: Weighting) -> None:
    examples = (10, 20, 30, 40, 50)
    strategy = FedAvgStrategy(SGD, H=H, participation=0.4, server_optim="avgm", server_lr=0.5, weighting=weighting)

    state, comm = simulate(strategy, 5, num_examples=examples)
    weights = [1.0] * 5 if weighting == "equal" else [float(n) for n in examples]
    compare(state, server_twin(5, momentum, drawn, weights))
    assert {len(drawn(step)) for step in range(STEPS)} == {2}
    assert {tuple(drawn(step)) for step in range(0, STEPS, H)} != {tuple(drawn(0))}
    payload = sum(x[0].numel() for x in state.params.values()) * 8
    assert comm.ledger.total_bytes == pytest.approx(payload * 2 / 5 * (STEPS // H), rel=1e-12)


def test_nodes_that_rest_hold_the_servers_parameters() -> None:
    """After an exchange all nodes do; within a round those that sit out still do, and FedProx pulls towards them."""

    plain = SERVERS["avg"][0]
    for mu in (0.0, 0.3):
        state, comm = simulate(FedAvgStrategy(SGD, H=H, participation=0.4, proximal_mu=mu), 5)
        compare(state, server_twin(5, plain, drawn, [1.0] * 5, mu=mu))
        payload = sum(x[0].numel() for x in state.params.values()) * 8
        for sent in (comm.ledger.total_bytes, comm.ledger.total_received_bytes):  # up, and down
            assert sent == pytest.approx(payload * 2 / 5 * (STEPS // H), rel=1e-12)
    model, batches = make_model("MLP", dtype=torch.float64), make_batches("MLP", H + 1, 5, dtype=torch.float64)
    strategy = FedAvgStrategy(SGD, H=H, participation=0.4)
    simulation = simulation_of(model, strategy, StackedCollectives(5), max_steps=STEPS)
    simulation.engine.prepare(stack(batches[0]))
    held, seen = simulation.init(), []
    for batch in batches:
        held, _ = simulation.step(held, stack(batch))
        seen.append({name: x.expand(5, *x.shape[1:]).clone() for name, x in held.params.items()})
    for name, theta in seen[H - 1].items():
        assert torch.equal(theta, theta[:1].expand_as(theta))
        moved = [i for i in range(5) if not torch.equal(seen[H][name][i], theta[0])]
        assert moved == drawn(H)


def test_a_servers_model_learns_where_stale_ones_do_not() -> None:
    """On f_i = 1/2 (x - c_i)^2 with mean(c) = 10, from 0, two nodes of 20 at a time."""
    centers = torch.linspace(-1.0, 1.0, 20, dtype=torch.float64)[:, None] + 10.0
    batches = [centers[:, None]] * 60
    far = {}
    for resting in ("server", "keep"):
        torch.manual_seed(0)
        model = Quadratic(1, 1.0).double()
        strategy = FedAvgStrategy("sgd", H=2, participation=0.1, lr=0.1, resting=resting)
        state = run(model, strategy, batches).params["x"]
        far[resting] = float((state.mean() - 10.0).abs())
    assert far["server"] < 0.5 < 4.0 < far["keep"]


@pytest.mark.parametrize("num_nodes", [1, 3])
def test_fedprox_adds_the_gradient_of_the_proximal_term(num_nodes: int) -> None:
    state, _ = simulate(FedAvgStrategy(SGD, H=H, proximal_mu=0.3), num_nodes)
    plain = SERVERS["avg"][0]
    compare(state, server_twin(num_nodes, plain, lambda step: range(num_nodes), [1.0] * num_nodes, mu=0.3))
    without, _ = simulate(FedAvgStrategy(SGD, H=H), num_nodes)
    assert not torch.allclose(without.params["first.weight"], state.params["first.weight"])


def test_weights_by_examples_within_islands() -> None:
    examples = (1, 2, 3, 4, 5)
    islands = random_islands(range(5), 2, rng.generator(42, "islands", 0))
    model, batches = make_model("MLP", dtype=torch.float64), make_batches("MLP", 1, 5, dtype=torch.float64)
    states = {}
    for size, weighting in ((None, "none"), (2, "examples")):
        strategy = FedAvgStrategy(SGD, H=2 if size is None else 1, island_size=size, weighting="examples")
        simulation = simulation_of(model, strategy, StackedCollectives(5), num_examples=examples, max_steps=2)
        simulation.engine.prepare(stack(batches[0]))
        states[weighting], _ = simulation.step(simulation.init(), stack(batches[0]))
    for name, before in states["none"].params.items():
        for island in islands:
            total = sum(examples[i] for i in island)
            mean = sum(examples[i] * before[i] for i in island) / total
            for i in island:
                torch.testing.assert_close(states["examples"].params[name][i], mean, rtol=1e-12, atol=1e-14)


def test_equal_weights_change_nothing() -> None:
    plain, _ = simulate(FedAvgStrategy(SGD, H=H), 3)
    weighted, _ = simulate(FedAvgStrategy(SGD, H=H, weighting="examples"), 3, num_examples=(7, 7, 7))
    for name, x in plain.params.items():
        torch.testing.assert_close(weighted.params[name], x, rtol=0, atol=0)


def test_server_avg_is_fedavg() -> None:
    plain, _ = simulate(FedAvgStrategy(SGD, H=H), 3)
    server, _ = simulate(FedAvgStrategy(SGD, H=H, server_optim="avg"), 3)
    for name, x in plain.params.items():
        torch.testing.assert_close(server.params[name], x, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server_optim": "adm"}, "did you mean 'adam'"),
        ({"server_lr": 0.1}, "server_lr without server_optim"),
        ({"server_optim": "adam", "island_size": 2}, "a server has no islands"),
        ({"server_optim": "adam", "server_betas": (0.9, 1.0)}, r"=1.0 must be a number in \[0, 1\)"),
        ({"server_optim": "adam", "server_tau": 0.0}, "must be a number > 0"),
        ({"server_optim": "avgm", "server_lr": -1.0}, "must be a number >= 0"),
        ({"proximal_mu": -0.1}, "must be a number >= 0"),
        ({"proximal_mu": float("nan")}, "must be a number >= 0"),
        ({"proximal_mu": torch.tensor([0.1, -0.1])}, "must be a number >= 0"),
        ({"proximal_mu": torch.ones(2, 2)}, r"has shape \[2, 2\]: give a number, or \[K\]"),
        ({"server_optim": "avgm", "server_lr": torch.ones(3)}, "one server, give one number"),
        ({"server_optim": "adam", "server_tau": float("inf")}, "must be a number > 0"),
        ({"server_optim": "adam", "server_betas": 0.9}, r"two numbers in \[0, 1\)"),
        ({"weighting": "size"}, "Allowed: 'equal', 'examples'"),
        ({"participation": 0.0}, r"must be a number in \(0, 1\]"),
        ({"participation": 0.5, "resting": "stay"}, "Allowed: 'server', 'keep'"),
        ({"participation": 0.5, "resting": "server", "island_size": 2}, "leave out island_size and sync_weight"),
        ({"participation": 0.5, "resting": "server", "sync_weight": [1.0]}, "leave out island_size and sync_weight"),
        ({"participation": 0.5, "resting": "keep", "server_optim": "adam"}, "all nodes begin a round"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FedAvgStrategy("sgd", **options).check(4, 10)


def test_examples_must_be_known() -> None:
    with pytest.raises(ValueError, match="num_examples"):
        simulate(FedAvgStrategy(SGD, H=H, weighting="examples"), 2)


def test_second_moment_starts_at_tau_squared() -> None:
    slots = ServerOptimizer("yogi", tau=0.1).spec.rule().init({"w": torch.zeros(1, 2, dtype=torch.float64)})
    assert slots["second_moment"]["w"].tolist() == [[pytest.approx(0.01)] * 2]


def compare(state: State, expected: list[dict[str, Tensor]]) -> None:
    for i, values in enumerate(expected):
        for name, value in values.items():
            held = state.params[name].expand(len(expected), *value.shape)
            torch.testing.assert_close(held[i], value, rtol=1e-10, atol=1e-12)


class PlainAdam(torch.optim.Adam):
    """An optimizer that vecgym does not know: it runs node by node, and makes its state at its first step."""


@pytest.mark.parametrize("num_nodes", [2, 5])
def test_an_optimizer_run_node_by_node_starts_when_its_node_first_takes_part(num_nodes: int) -> None:
    strategy = FedAvgStrategy(OptimSpec(torch.optim.Adam, lr=0.05), H=H, participation=0.4)
    ours, _ = simulate(FedAvgStrategy(OptimSpec(PlainAdam, lr=0.05), H=H, participation=0.4), num_nodes)
    known, _ = simulate(strategy, num_nodes)
    made = strategy.timetable(RunFacts(num_nodes, STEPS)).made(STEPS)  # type: ignore[attr-defined]
    assert len(set(made)) > 1  # some nodes have made more steps than others
    for name, p in known.params.items():
        torch.testing.assert_close(ours.params[name], p, rtol=1e-12, atol=1e-12)


EQUAL: dict[str, Callable[..., Strategy]] = {
    "examples": partial(FedAvgStrategy, weighting="examples"),
    "tokens in islands": partial(FedAvgStrategy, weighting=list(range(7, 18)), island_size=3),
    "participants": partial(FedAvgStrategy, weighting="examples", participation=0.6),
    "a server": partial(FedAvgStrategy, weighting="examples", server_optim="avg"),
    "in part": partial(FedAvgStrategy, sync_weight=[0.3] * 12),
    "gossip": partial(GossipStrategy, "ring"),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", EQUAL)
def test_nodes_that_are_equal_and_learn_nothing_stay_as_they_are(name: str, dtype: torch.dtype) -> None:
    """Shares that are rounded before they multiply would move them, round after round."""
    K = 11
    net = nn.Linear(64, 1, bias=False)
    net.weight.data = torch.linspace(0.5, 2.0, 64)[None]
    net = net.to(dtype)
    shards = lambda rank, num_nodes, train: TensorDataset(torch.ones(240 if rank == 10 else 251, 64).to(dtype))  # noqa: E731
    trainer = Trainer(net, shards, loss_fn=lambda module, batch: module(batch[0]).float().mean())
    averaged = trainer.fit(EQUAL[name](inner_optim="sgd", lr=0.0), K, max_steps=12, batch_size=2, progress=False)
    assert torch.equal(averaged.weight, net.weight)
    assert torch.equal(trainer.nodes.params["weight"], net.weight.expand(K, 1, 64))
