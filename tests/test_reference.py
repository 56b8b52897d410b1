"""The naive twins against one another, against plain loops and against closed forms, in float64.

A twin is only worth comparing with if it is right itself: these are the identities that tie the twins
together (FedAvg = DDP at H = 1, DiLoCo = FedAvg with outer SGD(1), ...) and to formulas derived by hand.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from tests import models as zoo
from tests.models import MODELS, NO_VMAP, RANDOM, Quadratic, make_batches, make_data, make_model
from tests.reference import common, exogym_traces
from tests.reference.allreduce import allreduce
from tests.reference.common import OptimizerSpec, Result
from tests.reference.demo import basis, chunk_size, dct, demo, fold, inverse_dct, make_chunks
from tests.reference.diloco import diloco
from tests.reference.exogym import exogym, lambda_cosine
from tests.reference.fedavg import fedavg
from tests.reference.gossip import gossip, mix_parameters
from tests.reference.sparta import sparta

TOLERANCE = 1e-10
NEVER = 10**9  # an H that is never reached
K = 3
STEPS = 5

SGD: OptimizerSpec = (torch.optim.SGD, {"lr": 0.1})
MOMENTUM: OptimizerSpec = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01})
NESTEROV: OptimizerSpec = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True})
ADAMW: OptimizerSpec = (torch.optim.AdamW, {"lr": 0.01})
RMSPROP: OptimizerSpec = (torch.optim.RMSprop, {"lr": 0.01})

DETERMINISTIC = [name for name in MODELS if name not in RANDOM]


# ------------------------------------------------------------------------------------------- helpers


def setup(name: str, steps: int = STEPS, num_nodes: int = K) -> tuple[nn.Module, list[list[Any]]]:
    model = make_model(name, dtype=torch.float64)
    return model, make_batches(name, steps, num_nodes, dtype=torch.float64)


def vector(model: nn.Module) -> Tensor:
    """All trainable parameters of one model as one vector."""
    return torch.cat([param.detach().flatten() for param in common.parameters(model).values()])


def vectors(result: Result) -> Tensor:
    return torch.stack([vector(model) for model in result.models])  # [K, P]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def assert_same(actual: Result, expected: Result) -> None:
    """Equal losses, parameters and buffers on every node."""
    assert_close(actual.losses, expected.losses)
    assert_close(vectors(actual), vectors(expected))
    for a, b in zip(actual.models, expected.models):
        for x, y in zip(a.buffers(), b.buffers()):
            assert_close(x, y)


def plain(
    model: nn.Module,
    batches: list[Any],
    spec: OptimizerSpec,
    max_norm: float | None = None,
    schedule: Callable[[int], float] | None = None,
) -> tuple[Tensor, nn.Module]:
    """Ordinary training of one model, with torch's own scheduler: (losses [steps], model)."""
    (model,) = common.copy_model(model, 1)
    make, kwargs = spec
    optimizer = make([p for p in model.parameters() if p.requires_grad], **kwargs)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule or (lambda step: 1.0))
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())
    return torch.stack(losses), model


def warmup(step: int) -> float:
    return min(1.0, (step + 1) / 3)


def join(batches: list[Any]) -> Any:
    """The batches of all nodes as one large batch."""
    if isinstance(batches[0], dict):
        return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    return tuple(torch.cat(parts) for parts in zip(*batches))


def leaves(data: Any) -> list[Tensor]:
    return list(data.values()) if isinstance(data, dict) else list(data)


def all_of(step: int, name: str, shape: torch.Size) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


def none_of(step: int, name: str, shape: torch.Size) -> Tensor:
    return torch.zeros(shape, dtype=torch.bool)


def half_of(step: int, name: str, shape: torch.Size) -> Tensor:
    """A different half at every step, reproducible."""
    g = torch.Generator().manual_seed(1000 * step + len(name))
    return torch.rand(shape, generator=g) < 0.5


def ring(num_nodes: int) -> Tensor:
    """Self weight 1/3 and 1/3 to each neighbour."""
    eye = torch.eye(num_nodes, dtype=torch.float64)
    return (eye + eye.roll(1, 0) + eye.roll(-1, 0)) / 3


def complete(num_nodes: int) -> Tensor:
    return torch.full((num_nodes, num_nodes), 1 / num_nodes, dtype=torch.float64)


Run = Callable[[nn.Module, list[list[Any]], int], Result]

EVERY: dict[str, Run] = {
    "allreduce": lambda m, b, k: allreduce(m, b, k, inner=ADAMW, max_norm=0.5),
    "fedavg": lambda m, b, k: fedavg(m, b, k, H=2, inner=ADAMW),
    "diloco": lambda m, b, k: diloco(m, b, k, H=2, inner=ADAMW),
    "sparta": lambda m, b, k: sparta(m, b, k, mask=half_of, inner=ADAMW),
    "sparta-delayed": lambda m, b, k: sparta(m, b, k, mask=half_of, delay=2, inner=ADAMW),
    "gossip": lambda m, b, k: gossip(m, b, k, matrix=lambda step: ring(k), inner=ADAMW),
    "gossip-before": lambda m, b, k: gossip(m, b, k, matrix=lambda s: ring(k), mix="before", inner=ADAMW),
    "demo": lambda m, b, k: demo(m, b, k, lr=0.01, k=4, chunk=8),
}


# -------------------------------------------------------------------------------- the twins in general


def test_twins_import_nothing_from_vecgym() -> None:
    for path in sorted((Path(__file__).parent / "reference").glob("*.py")) + [Path(zoo.__file__)]:
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            assert not any(module.split(".")[0] == "vecgym" for module in modules), path


@pytest.mark.parametrize("name", EVERY)
def test_permuting_the_nodes_permutes_the_result(name: str) -> None:
    model, batches = setup("MLP")
    order = [2, 0, 1]
    result = EVERY[name](model, batches, K)
    permuted = EVERY[name](model, [[row[i] for i in order] for row in batches], K)
    assert_close(permuted.losses, result.losses[:, order])
    assert_close(vectors(permuted), vectors(result)[order])


@pytest.mark.parametrize("name", EVERY)
def test_identical_shards_equal_one_node_alone(name: str) -> None:
    model, batches = setup("GPT", num_nodes=1)
    alone = EVERY[name](model, batches, 1)
    together = EVERY[name](model, [row * K for row in batches], K)
    assert_close(together.losses, alone.losses.expand(STEPS, K))
    assert_close(vectors(together), vectors(alone).expand(K, -1))


@pytest.mark.parametrize("name", EVERY)
def test_the_model_given_is_left_alone(name: str) -> None:
    model, batches = setup("WithFrozen")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    result = EVERY[name](model, batches, K)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all((vector(trained) != vector(model)).any() for trained in result.models)


@pytest.mark.parametrize("name", EVERY)
def test_tied_frozen_and_buffers(name: str) -> None:
    model, batches = setup("GPT", steps=4)
    for node in EVERY[name](model, batches, K).models:
        assert node.get_parameter("head.weight") is node.get_parameter("tokens.weight")

    model, batches = setup("WithFrozen", steps=4)
    result = EVERY[name](model, batches, K)
    for node in result.models:
        assert torch.equal(node.get_parameter("first.weight"), model.get_parameter("first.weight"))
        assert node.get_buffer("seen").item() == 4 * 4  # steps * batch
    centers = [node.get_buffer("center") for node in result.models]
    assert not torch.allclose(centers[0], centers[1]), "buffers stay local"


def test_a_parameter_without_gradient_is_refused() -> None:
    model, batches = setup("Quadratic")
    model.register_parameter("unused", nn.Parameter(torch.zeros(2, dtype=torch.float64)))
    with pytest.raises(ValueError, match="took no part"):
        allreduce(model, batches, K)


# ------------------------------------------------------------------------------- DDP, FedAvg, DiLoCo


@pytest.mark.parametrize("inner", [SGD, MOMENTUM, NESTEROV], ids=["sgd", "momentum", "nesterov"])
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_fedavg_with_one_local_step_is_ddp(name: str, inner: OptimizerSpec) -> None:
    model, batches = setup(name)
    expected = allreduce(model, batches, K, inner=inner, schedule=warmup)
    assert_same(fedavg(model, batches, K, H=1, inner=inner, schedule=warmup), expected)


@pytest.mark.parametrize("inner", [SGD, MOMENTUM, ADAMW, RMSPROP], ids=["sgd", "momentum", "adamw", "rmsprop"])
@pytest.mark.parametrize("name", ["MLP", "CNN", "GPT", "LSTM", "WithFrozen"])
def test_diloco_with_outer_sgd_1_is_fedavg(name: str, inner: OptimizerSpec) -> None:
    model, batches = setup(name)
    outer: OptimizerSpec = (torch.optim.SGD, {"lr": 1.0, "momentum": 0.0})
    result = diloco(model, batches, K, H=2, inner=inner, outer=outer, max_norm=0.5, schedule=warmup)
    assert_same(result, fedavg(model, batches, K, H=2, inner=inner, max_norm=0.5, schedule=warmup))


@pytest.mark.parametrize("mu", [0.0, 0.9])
@pytest.mark.parametrize("name", ["MLP", "CNN", "GPT", "WithFrozen"])
def test_diloco_with_one_local_sgd_step_is_ddp_with_the_outer_momentum(name: str, mu: float) -> None:
    model, batches = setup(name)
    gamma, eta, nesterov = 0.2, 0.7, mu > 0
    expected = allreduce(
        model,
        batches,
        K,
        inner=(torch.optim.SGD, {"lr": eta * gamma, "momentum": mu, "nesterov": nesterov}),
    )
    result = diloco(
        model,
        batches,
        K,
        H=1,
        inner=(torch.optim.SGD, {"lr": gamma}),
        outer=(torch.optim.SGD, {"lr": eta, "momentum": mu, "nesterov": nesterov}),
    )
    assert_same(result, expected)


def test_diloco_with_one_local_adamw_step_is_not_ddp_adamw() -> None:
    model, batches = setup("MLP")
    result = diloco(model, batches, K, H=1, inner=ADAMW, outer=(torch.optim.SGD, {"lr": 1.0}))
    expected = allreduce(model, batches, K, inner=ADAMW)
    assert (vectors(result) - vectors(expected)).abs().max() > 1e-3


@pytest.mark.parametrize("inner", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("name", ["MLP", "GPT", "LSTM", "DictBatch"])
def test_ddp_is_one_model_on_the_joined_batch(name: str, inner: OptimizerSpec) -> None:
    model, batches = setup(name)
    result = allreduce(model, batches, K, inner=inner, max_norm=0.3, schedule=warmup)
    losses, expected = plain(model, [join(row) for row in batches], inner, max_norm=0.3, schedule=warmup)
    assert_close(result.losses.mean(1), losses)
    for node in result.models:
        assert_close(vector(node), vector(expected))


def test_ddp_is_gradient_accumulation() -> None:
    model, batches = setup("CNN")
    result = allreduce(model, batches, K, inner=SGD)
    (single,) = common.copy_model(model, 1)
    for row in batches:
        single.zero_grad()
        for batch in row:
            (single(batch) / K).backward()
        with torch.no_grad():
            for param in single.parameters():
                param.sub_(0.1 * common.gradient(param))
    for node in result.models:
        assert_close(vector(node), vector(single))


@pytest.mark.parametrize("inner", [MOMENTUM, ADAMW], ids=["momentum", "adamw"])
@pytest.mark.parametrize("name", ["CNN", "GPT", "WithFrozen"])
def test_one_node_is_plain_training(name: str, inner: OptimizerSpec) -> None:
    model, batches = setup(name, num_nodes=1)
    losses, trained = plain(model, [row[0] for row in batches], inner, max_norm=0.3, schedule=warmup)
    expected = Result(losses=losses[:, None], models=[trained])
    same: dict[str, Any] = {"inner": inner, "max_norm": 0.3, "schedule": warmup}
    assert_same(allreduce(model, batches, 1, **same), expected)
    assert_same(fedavg(model, batches, 1, H=2, **same), expected)
    assert_same(sparta(model, batches, 1, mask=half_of, **same), expected)
    for mix in ("before", "after"):
        assert_same(gossip(model, batches, 1, matrix=lambda s: torch.ones(1, 1), mix=mix, **same), expected)
    outer: OptimizerSpec = (torch.optim.SGD, {"lr": 1.0})
    assert_same(diloco(model, batches, 1, H=2, outer=outer, **same), expected)


def test_diloco_on_one_node_is_lookahead() -> None:
    """Lookahead (1907.08610): phi <- phi + eta (theta - phi) after every H fast steps; theta <- phi."""
    model, batches = setup("GPT", steps=7, num_nodes=1)
    eta, H = 0.5, 3
    result = diloco(model, batches, 1, H=H, inner=ADAMW, outer=(torch.optim.SGD, {"lr": eta}))

    (fast,) = common.copy_model(model, 1)
    slow = [param.detach().clone() for param in fast.parameters()]
    optimizer = torch.optim.AdamW(fast.parameters(), lr=0.01)
    for step, (batch,) in enumerate(batches):
        optimizer.zero_grad()
        fast(batch).backward()
        optimizer.step()
        if step % H == H - 1:
            with torch.no_grad():
                for phi, theta in zip(slow, fast.parameters()):
                    phi += eta * (theta - phi)
                    theta.copy_(phi)
    assert_close(vector(result.models[0]), vector(fast))
    assert_close(torch.cat([x.flatten() for x in result.outer.values()]), torch.cat([x.flatten() for x in slow]))


def test_nodes_meet_exactly_after_every_h_steps() -> None:
    model, _ = setup("MLP")
    for steps in range(1, 8):
        batches = make_batches("MLP", steps, K, dtype=torch.float64)
        for result in (
            fedavg(model, batches, K, H=3, inner=SGD),
            diloco(model, batches, K, H=3, inner=SGD),
        ):
            together = bool((vectors(result) == vectors(result)[0]).all())
            assert together == (steps in (3, 6)), steps


def test_clipping_is_per_node_before_the_step_and_after_the_mean_in_ddp() -> None:
    """theta - theta' = lr * clipped gradient, so a tight bound is met with equality."""
    model, batches = setup("MLP", steps=1)
    inner: OptimizerSpec = (torch.optim.SGD, {"lr": 1.0})
    local = vector(model) - vectors(fedavg(model, batches, K, H=NEVER, inner=inner, max_norm=1e-3))
    assert local.norm(dim=1).tolist() == pytest.approx([1e-3] * K, rel=1e-4)
    shared = vector(model) - vectors(allreduce(model, batches, K, inner=inner, max_norm=1e-3))
    assert shared[0].norm().item() == pytest.approx(1e-3, rel=1e-4)
    assert shared[0].norm() > 1.01 * local.mean(0).norm(), "the mean of clipped gradients is shorter"


# ------------------------------------------------------------------------------- closed forms


def quadratic(a: float, steps: int, num_nodes: int) -> tuple[Quadratic, list[list[Tensor]], Tensor]:
    """f_i = a/2 ||x - c_i||^2 with the same c_i at every step: (model, batches, c [K, 5])."""
    model = Quadratic(a=a).to(torch.float64)
    c = torch.randn(num_nodes, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return model, [[c[i : i + 1] for i in range(num_nodes)]] * steps, c


def test_one_local_round_on_a_quadratic() -> None:
    """x^H - c_i = (1 - gamma a)^H (x - c_i); FedAvg then takes the (weighted) mean."""
    a, gamma, H, weights = 2.0, 0.1, 4, [1.0, 2.0, 5.0]
    model, batches, c = quadratic(a, H, K)
    x = model.x.detach()
    local = c + (1 - gamma * a) ** H * (x - c)  # [K, 5]
    inner: OptimizerSpec = (torch.optim.SGD, {"lr": gamma})

    assert_close(vectors(fedavg(model, batches, K, H=NEVER, inner=inner)), local)
    assert_close(vectors(fedavg(model, batches, K, H=H, inner=inner)), local.mean(0).expand(K, 5))
    result = fedavg(model, batches, K, H=H, inner=inner, weights=weights)
    assert_close(vectors(result), ((local[0] + 2 * local[1] + 5 * local[2]) / 8).expand(K, 5))


@pytest.mark.parametrize("eta", [0.5, 4.0])  # the second one diverges
def test_diloco_nesterov_on_a_quadratic(eta: float) -> None:
    """With d = 1 - (1 - gamma a)^H, (theta, m) evolves by [[1 - eta d (1 + mu), -eta mu^2], [d, mu]]."""
    a, gamma, H, mu, rounds = 2.0, 0.1, 3, 0.9, 6
    model, batches, c = quadratic(a, H * rounds, K)
    result = diloco(
        model,
        batches,
        K,
        H=H,
        inner=(torch.optim.SGD, {"lr": gamma}),
        outer=(torch.optim.SGD, {"lr": eta, "momentum": mu, "nesterov": True}),
    )
    d = 1 - (1 - gamma * a) ** H
    theta, m = model.x.detach() - c.mean(0), torch.zeros(5, dtype=torch.float64)
    for _ in range(rounds):
        theta, m = (1 - eta * d * (1 + mu)) * theta - eta * mu**2 * m, d * theta + mu * m
    assert_close(result.outer["x"], c.mean(0) + theta)
    assert result.outer_optimizer is not None
    assert_close(result.outer_optimizer.state[result.outer["x"]]["momentum_buffer"], m)


# ------------------------------------------------------------------------------- FedAvg's arguments


def test_islands_average_by_themselves() -> None:
    model, batches = setup("MLP", steps=4, num_nodes=4)
    groups = [[0, 3], [1, 2]]
    result = fedavg(model, batches, 4, H=2, inner=ADAMW, islands=lambda step: groups)
    for group in groups:
        alone = fedavg(model, [[row[i] for i in group] for row in batches], 2, H=2, inner=ADAMW)
        assert_close(result.losses[:, group], alone.losses)
        assert_close(vectors(result)[group], vectors(alone))


def test_islands_are_asked_at_the_steps_of_the_averages() -> None:
    model, batches = setup("MLP", steps=7, num_nodes=4)
    asked: list[int] = []

    def islands(step: int) -> list[list[int]]:
        asked.append(step)
        return [[0, 1], [2, 3]]

    fedavg(model, batches, 4, H=3, inner=SGD, islands=islands)
    assert asked == [2, 5]


def test_absent_nodes_keep_everything() -> None:
    model, batches = setup("CNN", steps=4)
    result = fedavg(model, batches, K, H=2, inner=ADAMW, participants=lambda step: [0, 2])
    alone = fedavg(model, [[row[0], row[2]] for row in batches], 2, H=2, inner=ADAMW)
    assert_close(result.losses[:, [0, 2]], alone.losses)
    assert result.losses[:, 1].isnan().all()
    assert_close(vectors(result)[[0, 2]], vectors(alone))
    absent = result.models[1].state_dict()
    assert all(torch.equal(value, absent[key]) for key, value in model.state_dict().items())
    assert not result.optimizers[1].state


def test_a_node_that_returns_goes_on_from_what_it_had() -> None:
    """Node 1 misses the steps 2 and 3: its Adam state and batch-norm statistics see steps 0, 1, 4 only."""
    model, batches = setup("CNN", steps=5, num_nodes=2)
    result = fedavg(
        model, batches, 2, H=NEVER, inner=ADAMW, participants=lambda step: [0] if step in (2, 3) else [0, 1]
    )
    losses, expected = plain(model, [batches[step][1] for step in (0, 1, 4)], ADAMW)
    nan = torch.full((2,), math.nan, dtype=torch.float64)
    assert_close(result.losses[:, 1], torch.cat([losses[:2], nan, losses[2:]]))
    for key, value in expected.state_dict().items():
        assert_close(result.models[1].state_dict()[key], value)


def test_participants_begin_a_round_from_the_servers_parameters() -> None:
    """By hand on a quadratic: each of them moves theta by -gamma a (theta - c_i); weights 1, 2, 3, 4."""
    a, gamma = 1.0, 0.5
    model, batches, c = quadratic(a, 2, 4)
    result = fedavg(
        model,
        batches,
        4,
        H=1,
        inner=(torch.optim.SGD, {"lr": gamma}),
        participants=lambda step: [[0, 1], [1, 3]][step],
        weights=[1.0, 2.0, 3.0, 4.0],
        server=True,
    )
    theta = model.x.detach()
    for first, second, share in ((0, 1, 1 / 3), (1, 3, 2 / 6)):
        local = theta - gamma * a * (theta - c)
        theta = share * local[first] + (1 - share) * local[second]
    assert_close(vectors(result), theta.expand(4, -1))


def test_absent_nodes_and_weights_within_islands() -> None:
    """Two islands of two; node 1 is absent at the average; weights 1, 2, 3, 4."""
    a, gamma = 1.0, 0.5
    model, batches, c = quadratic(a, 1, 4)
    result = fedavg(
        model,
        batches,
        4,
        H=1,
        inner=(torch.optim.SGD, {"lr": gamma}),
        islands=lambda step: [[0, 1], [2, 3]],
        participants=lambda step: [0, 2, 3],
        weights=[1.0, 2.0, 3.0, 4.0],
    )
    x = model.x.detach()
    local = x - gamma * a * (x - c)
    second = (3 * local[2] + 4 * local[3]) / 7
    assert_close(vectors(result), torch.stack([local[0], x, second, second]))


# ------------------------------------------------------------------------------- SPARTA and gossip


@pytest.mark.parametrize("name", ["MLP", "CNN", "GPT", "WithFrozen"])
def test_sparta_of_everything_and_of_nothing(name: str) -> None:
    model, batches = setup(name)
    every_step = fedavg(model, batches, K, H=1, inner=ADAMW, schedule=warmup)
    assert_same(sparta(model, batches, K, mask=all_of, inner=ADAMW, schedule=warmup), every_step)
    independent = fedavg(model, batches, K, H=NEVER, inner=ADAMW, max_norm=0.3)
    assert_same(sparta(model, batches, K, mask=none_of, inner=ADAMW, max_norm=0.3), independent)


def mask_vector(model: nn.Module, step: int) -> Tensor:
    params = common.parameters(model).items()
    return torch.cat([half_of(step, name, param.shape).flatten() for name, param in params])


def test_sparta_averages_the_masked_coordinates_only() -> None:
    model, batches = setup("GPT", steps=1)
    local = vectors(fedavg(model, batches, K, H=NEVER, inner=ADAMW))
    M = mask_vector(model, 0)
    result = vectors(sparta(model, batches, K, mask=half_of, inner=ADAMW))
    assert_close(result, torch.where(M, local.mean(0), local))
    assert 0.4 < M.double().mean() < 0.6


def test_delayed_sparta_writes_the_mean_of_d_steps_ago() -> None:
    model, batches = setup("GPT", steps=3)
    local = [vectors(fedavg(model, batches[: t + 1], K, H=NEVER, inner=SGD)) for t in range(3)]
    for t in range(2):  # nothing has arrived yet
        assert_close(vectors(sparta(model, batches[: t + 1], K, mask=half_of, delay=2, inner=SGD)), local[t])
    arrived = vectors(sparta(model, batches[:3], K, mask=half_of, delay=2, inner=SGD))
    assert_close(arrived, torch.where(mask_vector(model, 0), local[0].mean(0), local[2]))
    # With d = 1, step 2 writes the mean of step 1, which was taken before step 1 wrote that of step 0.
    last = vectors(sparta(model, batches[:3], K, mask=half_of, delay=1, inner=SGD))
    M = mask_vector(model, 1)
    assert_close(last[:, M], local[1].mean(0)[M].expand(K, -1))
    assert (last[0, ~M] != last[1, ~M]).double().mean() > 0.99


def test_gossip_with_the_complete_graph_and_with_none() -> None:
    model, batches = setup("CNN")
    every_step = fedavg(model, batches, K, H=1, inner=ADAMW)
    assert_same(gossip(model, batches, K, matrix=lambda step: complete(K), inner=ADAMW), every_step)
    independent = fedavg(model, batches, K, H=NEVER, inner=ADAMW)
    for mix in ("before", "after"):
        assert_same(gossip(model, batches, K, matrix=lambda step: torch.eye(K), mix=mix, inner=ADAMW), independent)


def test_gossip_of_islands_is_fedavg_with_these_islands() -> None:
    model, batches = setup("MLP", num_nodes=4)
    W = torch.block_diag(complete(2), complete(2))
    expected = fedavg(model, batches, 4, H=2, inner=MOMENTUM, islands=lambda step: [[0, 1], [2, 3]])
    result = gossip(model, batches, 4, matrix=lambda step: W if step % 2 else torch.eye(4), inner=MOMENTUM)
    assert_same(result, expected)


def test_gossip_before_is_the_papers_update() -> None:
    """x_i(t+1) = sum_j W_ij x_j(t) - gamma a (x_i(t) - c_i), on an asymmetric (one-directional ring) W."""
    a, gamma = 2.0, 0.1
    model, batches, c = quadratic(a, STEPS, 4)
    eye = torch.eye(4, dtype=torch.float64)
    W = 0.75 * eye + 0.25 * eye.roll(1, 0)
    inner: OptimizerSpec = (torch.optim.SGD, {"lr": gamma})
    before = gossip(model, batches, 4, matrix=lambda step: W, mix="before", inner=inner)
    after = gossip(model, batches, 4, matrix=lambda step: W, mix="after", inner=inner)
    x = y = model.x.detach().expand(4, 5)
    for _ in range(STEPS):
        x = W @ x - gamma * a * (x - c)
        y = W @ (y - gamma * a * (y - c))
    assert_close(vectors(before), x)
    assert_close(vectors(after), y)


def test_gossip_keeps_the_mean_and_contracts_by_the_eigenvalue() -> None:
    n = 6
    models = [make_model("MLP", seed=i, dtype=torch.float64) for i in range(n)]
    before = torch.stack([vector(model) for model in models])
    mix_parameters(models, ring(n))
    after = torch.stack([vector(model) for model in models])
    assert_close(after.mean(0), before.mean(0))

    wave = torch.tensor([math.cos(2 * math.pi * i / n) for i in range(n)], dtype=torch.float64)
    waves = [Quadratic().to(torch.float64) for _ in range(n)]
    for model, height in zip(waves, wave):
        nn.init.constant_(model.x, height.item())
    mix_parameters(waves, ring(n))
    factor = 1 / 3 + 2 / 3 * math.cos(2 * math.pi / n)
    assert_close(torch.stack([vector(model) for model in waves]), factor * wave[:, None].expand(n, 5))


# ------------------------------------------------------------------------------- DeMo


@pytest.mark.parametrize("N", [1, 2, 3, 5, 8, 17, 64])
def test_dct_is_orthonormal(N: int) -> None:
    C = basis(N)
    assert_close(C @ C.T, torch.eye(N, dtype=torch.float64))
    x = torch.randn(N, N + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(N))
    assert_close(dct(x).norm(), x.norm())
    assert_close(inverse_dct(dct(x)), x)
    assert_close(dct(x), C @ x @ basis(N + 1).T)


def test_dct_by_hand_and_by_fft() -> None:
    ones = torch.ones(4, dtype=torch.float64)
    assert_close(dct(ones), torch.tensor([2.0, 0.0, 0.0, 0.0], dtype=torch.float64))
    # DCT-II of x is half the real FFT of x mirrored, turned by half a sample.
    x = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turn = torch.exp(-1j * math.pi * torch.arange(9, dtype=torch.float64) / 18)
    X = (torch.fft.fft(torch.cat([x, x.flip(0)]))[:9] * turn).real / 2 * math.sqrt(2 / 9)
    X[0] /= math.sqrt(2)
    assert_close(dct(x), X)


def test_chunks() -> None:
    assert [chunk_size(n, 64) for n in (1, 7, 64, 65, 67, 96, 128, 768)] == [1, 7, 64, 13, 1, 48, 64, 64]
    assert fold(torch.Size([])) == [1]
    assert fold(torch.Size([10])) == [10]
    assert fold(torch.Size([8, 4, 3, 3])) == [8, 36]
    covered = torch.zeros(12, 10)
    for piece in make_chunks((12, 10), 4):
        assert covered[piece].shape == (4, 2)
        covered[piece] += 1
    assert (covered == 1).all()


@pytest.mark.parametrize("name", ["GPT", "LSTM", "Quadratic"])
def test_demo_that_sends_everything_is_signsgd_on_one_node(name: str) -> None:
    model, batches = setup(name, num_nodes=1)
    lr, decay = 0.01, 0.1
    result = demo(model, batches, 1, lr=lr, k=64 * 64, weight_decay=decay, schedule=warmup)
    (single,) = common.copy_model(model, 1)
    for step, (batch,) in enumerate(batches):
        loss = common.backward(single, batch)
        assert_close(result.losses[step, 0], loss)
        with torch.no_grad():
            for param in single.parameters():
                rate = lr * warmup(step)
                param.mul_(1 - rate * decay).sub_(rate * common.gradient(param).sign())
    assert_close(vector(result.models[0]), vector(single))


@pytest.mark.parametrize("name", ["CNN", "GPT"])
def test_demo_residual_is_zero_when_k_is_the_chunk_area(name: str) -> None:
    model, batches = setup(name, steps=3)
    for residual in demo(model, batches, K, lr=0.01, k=8 * 8, chunk=8).residuals:
        for delta in residual.values():
            assert_close(delta, torch.zeros_like(delta))
    small = demo(model, batches, K, lr=0.01, k=2, chunk=8).residuals[0]
    assert all(delta.abs().max() > 1e-6 for delta in small.values() if delta.numel() > 16)


@pytest.mark.parametrize("name", ["CNN", "GPT", "LSTM", "WithFrozen"])
def test_demo_moves_every_coordinate_by_lr_and_keeps_nodes_equal(name: str) -> None:
    model, batches = setup(name, steps=1)
    result = demo(model, batches, K, lr=0.01, k=3, chunk=8)
    assert (vectors(result) == vectors(result)[0]).all()
    moved = (vectors(result)[0] - vector(model)).abs()
    assert (torch.isclose(moved, torch.tensor(0.01).double()) | (moved == 0)).all()
    assert (moved > 0).double().mean() > 0.9


def test_demo_sends_the_largest_components_and_keeps_the_rest() -> None:
    """Without decay: delta_t = delta_(t-1) + lr g_t - sent_t, and theta moves by -lr sign(sent_t)."""
    model, batches = setup("GPT", steps=3, num_nodes=1)
    lr, k, chunk = 0.01, 5, 8
    runs = [demo(model, batches[:t], 1, lr=lr, decay=1.0, k=k, chunk=chunk) for t in range(4)]
    for t in range(1, 4):
        common.backward(runs[t - 1].models[0], batches[t - 1][0])
        for name, param in common.parameters(runs[t - 1].models[0]).items():
            shape = fold(param.shape)
            total = (runs[t - 1].residuals[0][name] + lr * common.gradient(param)).view(shape)
            kept = runs[t].residuals[0][name].view(shape)
            moved = common.parameters(runs[t].models[0])[name].detach() - param.detach()
            sent = total - kept
            certain = sent.abs() > 1e-12
            assert_close(moved.view(shape)[certain], -lr * sent.sign()[certain])
            for piece in make_chunks(shape, chunk):
                strength = dct(total[piece]).abs().flatten().sort(descending=True).values
                left = dct(kept[piece]).abs().flatten().sort(descending=True).values
                gone = dct(sent[piece]).abs().flatten().sort(descending=True).values
                assert_close(gone[:k], strength[:k])
                assert_close(left[: max(len(left) - k, 0)], strength[k:])


def test_demo_takes_the_mean_over_the_senders() -> None:
    """Gradients built from DCT basis vectors b_k; with k = 1 each node sends its strongest component."""
    C = basis(5)
    gradients = torch.stack([4 * C[1], 2 * C[1] + 1 * C[2], -5 * C[3]])
    model, _, _ = quadratic(1.0, 1, K)
    x = model.x.detach()
    batches = [[(x - g)[None] for g in gradients]]  # the gradient is x - c
    result = demo(model, batches, K, lr=0.1, k=1)
    by_senders, by_all = (4 + 2) / 2 * C[1] - 5 * C[3], (4 + 2) / 3 * C[1] - 5 / 3 * C[3]
    assert not torch.equal(by_senders.sign(), by_all.sign()), "the example tells the two apart"
    assert_close(vectors(result), (x - 0.1 * by_senders.sign()).expand(K, 5))
    assert_close(result.residuals[1]["x"], 0.1 * C[2])
    assert_close(result.residuals[0]["x"], torch.zeros(5, dtype=torch.float64))


def test_demo_decays_the_residual_and_leaves_zeros_alone() -> None:
    C = basis(5)
    model, _, _ = quadratic(1.0, 1, 1)
    x = model.x.detach()
    first = 3 * C[0] + 1 * C[1]
    once = demo(model, [[(x - first)[None]]], 1, lr=0.1, decay=0.5, k=1)
    x1 = vector(once.models[0])
    result = demo(model, [[(x - first)[None]], [(x1 - 2 * C[0])[None]]], 1, lr=0.1, decay=0.5, k=1)
    assert_close(result.residuals[0]["x"], 0.5 * 0.1 * C[1])
    still = demo(model, [[x[None]]] * 2, 1, lr=0.1)  # no gradient
    assert torch.equal(vector(still.models[0]), x)


# ------------------------------------------------------------------------------- the models


@pytest.mark.parametrize("name", MODELS)
def test_models_and_data_are_reproducible_and_learn(name: str) -> None:
    single, double = make_model(name), make_model(name, dtype=torch.float64)
    for p, q in zip(single.parameters(), double.parameters()):
        assert torch.equal(p, q.float())
    first, again = make_data(name, 6, seed=3), make_data(name, 6, seed=3)
    other = make_data(name, 6, seed=4)
    for a, b, c in zip(leaves(first), leaves(again), leaves(other)):
        assert len(a) == 6
        assert torch.equal(a, b)
        assert not torch.equal(a, c)

    batch = make_data(name, 32)
    losses, _ = plain(make_model(name), [batch] * 30, (torch.optim.AdamW, {"lr": 0.02}))
    assert losses.shape == (30,)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", MODELS)
def test_which_models_vmap_can_run(name: str) -> None:
    """The stacked gradient by hand, against the loop: or an error for those in NO_VMAP."""
    model, (row,) = setup(name, steps=1)
    params = {key: torch.stack([param.detach()] * K) for key, param in model.named_parameters()}
    buffers = {key: torch.stack([buffer] * K) for key, buffer in model.named_buffers()}
    parts = [torch.stack(tensors) for tensors in zip(*[leaves(batch) for batch in row])]
    stacked = dict(zip(row[0], parts)) if isinstance(row[0], dict) else tuple(parts)

    def loss(p: dict[str, Tensor], b: dict[str, Tensor], batch: Any) -> Tensor:
        return functional_call(model, {**p, **b}, (batch,))

    def run() -> Any:
        return vmap(grad(loss), randomness="different")(params, buffers, stacked)

    if name in NO_VMAP:
        with pytest.raises(RuntimeError):
            run()
        return
    gradients = run()
    if name not in RANDOM:
        for node, separate in enumerate(common.copy_model(model, K)):
            common.backward(separate, row[node])
            for key, param in common.parameters(separate).items():
                assert_close(gradients[key][node], common.gradient(param))


# --------------------------------------------------------------------------------------------- EXO Gym's processes

TRACES = json.loads(exogym_traces.FILE.read_text())


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: f"{trace['kind']}-{trace['num_nodes']}")
def test_exo_gyms_loop_computes_what_its_processes_do(trace: dict[str, Any]) -> None:
    """4 nodes to rounding: gloo adds up in another order."""
    of, kind = exogym_traces, trace["kind"]
    result = exogym(
        make_model("MLP", dtype=torch.float64), of.dataset(), trace["num_nodes"], kind, steps=of.STEPS,
        batch_size=of.BATCH_SIZE, inner=of.INNER, H=of.H, p=of.P, max_norm=of.MAX_NORM,
        schedule=lambda_cosine(of.WARMUP_STEPS, of.STEPS), **(of.DEMO if kind == "demo" else {}),
    )  # fmt: skip
    assert result.losses.tolist() == [pytest.approx(row, rel=1e-12) for row in trace["losses"]]
    assert [of.seen(m) for m in result.models] == pytest.approx(trace["seen"], rel=1e-12, abs=1e-12)
