"""Gossip against its naive twin, its identities, its rates of convergence, its derivatives and its bytes."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW

from tests.helpers import (
    Run,
    advance,
    assert_close,
    assert_same_bits,
    difference,
    reordered,
    rows,
    run,
    run_stack,
    saved,
    simulation,
    stacked,
)
from tests.models import make_batches, make_data, make_model
from tests.reference import common
from tests.reference.common import Result
from tests.reference.gossip import gossip
from vecgym import Trainer
from vecgym.collectives import StackedCollectives, topology
from vecgym.collectives.base import T
from vecgym.collectives.stacked import GroupCollectives
from vecgym.collectives.topology import Mixing
from vecgym.core import rng
from vecgym.core.errors import VecgymWarning
from vecgym.core.tree import Tree
from vecgym.simulation.simulation import Part
from vecgym.strategy import (
    AllReduceStrategy,
    AveragingCommunicator,
    CommunicateOptimizeStrategy,
    Exchange,
    FedAvgStrategy,
    GossipStrategy,
    Mix,
    OptimSpec,
    Strategy,
)
from vecgym.strategy.decentralised.gossip import NAMES
from vecgym.strategy.simulated import simulation_of

STEPS = 50
SEED = 42
MOMENTUM = OptimSpec(SGD, lr=0.1, momentum=0.9)
TWIN_MOMENTUM = (SGD, {"lr": 0.1, "momentum": 0.9})
ENGINES = ["vmap", "loop"]


def log2(n: int) -> int:
    return next(m for m in itertools.count() if 2**m >= n)


def doubly_stochastic(num_nodes: int, seed: int = 0) -> Tensor:
    """A dense, not symmetric one: a mean of random permutations."""
    generator = torch.Generator().manual_seed(seed)
    shares = torch.rand(4, generator=generator, dtype=torch.float64).softmax(0)
    eye = torch.eye(num_nodes, dtype=torch.float64)
    return sum((w * eye[torch.randperm(num_nodes, generator=generator)] for w in shares), torch.zeros_like(eye))


def alternate(num_nodes: int) -> Callable[[int], Tensor]:
    """A function step -> matrix."""
    return lambda step: topology.ring(num_nodes) if step % 3 == 2 else doubly_stochastic(num_nodes, step)


class Recorded(StackedCollectives):
    """Collectives that remember the matrices."""

    def __init__(self, num_nodes: int) -> None:
        super().__init__(num_nodes)
        self.drawn: dict[int, Tensor] = {}

    def mix(self, x: T, weights: Tensor | Mixing, inplace: bool = False) -> T:
        self.drawn[self.ledger._step] = weights.weights if isinstance(weights, Mixing) else weights
        return super().mix(x, weights, inplace)


# ------------------------------------------------------------------------------------------- the twin

# name -> (topology of K nodes, every, the matrix that the twin takes after step t)
Matrix = Callable[[int], Tensor]
CASES: dict[str, tuple[Callable[[int], Any], int, Callable[[int], Matrix]]] = {
    "ring": (lambda n: "ring", 1, lambda n: lambda t: topology.ring(n)),
    "ring every 3": (lambda n: "ring", 3, lambda n: lambda t: topology.ring(n)),
    "torus": (lambda n: "torus", 1, lambda n: lambda t: topology.torus(n)),
    "exponential": (lambda n: "exponential", 1, lambda n: lambda t: topology.exponential(n)),
    "complete": (lambda n: "complete", 2, lambda n: lambda t: topology.complete(n)),
    "one_peer_exponential": (
        lambda n: "one_peer_exponential",
        2,
        lambda n: lambda t: topology.one_peer_exponential(n, t // 2),
    ),
    "random_matching": (
        lambda n: "random_matching",
        2,
        lambda n: lambda t: topology.random_matching(n, rng.generator(SEED, "matching", t // 2)),
    ),
    "matrix": (doubly_stochastic, 1, lambda n: lambda t: doubly_stochastic(n)),
    "matrices": (
        lambda n: torch.stack([doubly_stochastic(n, seed) for seed in range(3)]),
        2,
        lambda n: lambda t: doubly_stochastic(n, t // 2 % 3),
    ),
    "function": (alternate, 1, alternate),
}


@functools.cache
def data(model: str, num_nodes: int, steps: int = STEPS) -> list[list[Any]]:
    return make_batches(model, steps, num_nodes, 3, dtype=torch.float64)


INNER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # for vecgym, for the twin
    "momentum": ({"inner_optim": MOMENTUM, "max_norm": 0.3}, {"inner": TWIN_MOMENTUM, "max_norm": 0.3}),
    "adamw": (
        {"inner_optim": "adamw", "lr": 0.01, "warmup_steps": 8},
        {"inner": (AdamW, {"lr": 0.01}), "schedule": lambda t: min(1.0, t / 8)},
    ),
}


@functools.cache
def twin(case: str, model: str, num_nodes: int, inner: str) -> Result:
    """The naive run, once for all engines."""
    _, every, make_matrix = CASES[case]
    matrix, eye = make_matrix(num_nodes), torch.eye(num_nodes)
    return gossip(
        make_model(model, dtype=torch.float64),
        data(model, num_nodes),
        num_nodes,
        matrix=lambda t: matrix(t) if (t + 1) % every == 0 else eye,
        **INNER[inner][1],
    )


def compare(case: str, model: str, num_nodes: int, engine: str, inner: str = "momentum") -> None:
    """Run vecgym and the twin; compare losses, parameters, buffers and optimizer states of all nodes."""
    make, every, _ = CASES[case]
    strategy = GossipStrategy(make(num_nodes), every, **INNER[inner][0])
    strategy.check(num_nodes, STEPS)
    start = make_model(model, dtype=torch.float64)
    ours = run(start, strategy, stacked(data(model, num_nodes)), engine=engine, seed=SEED)
    assert [entry.step for entry in ours.comm.ledger] == [t for t in range(STEPS) if (t + 1) % every == 0]
    theirs = twin(case, model, num_nodes, inner)
    assert_close(ours.losses, theirs.losses, 1e-10, "losses")
    params = [common.parameters(m) for m in theirs.models]
    buffers = [dict(m.named_buffers()) for m in theirs.models]
    assert_close(ours.params, {name: torch.stack([p[name] for p in params]) for name in params[0]}, 1e-10, "params")
    assert_close(ours.buffers, {name: torch.stack([b[name] for b in buffers]) for name in buffers[0]}, 1e-10)
    for i, (p, optimizer) in enumerate(zip(params, theirs.optimizers)):
        for slot, values in ours.state.home["optimizer"].items():
            expected = {name: optimizer.state[p[name]][slot] for name in p}
            assert_close({n: x[i] for n, x in values.items()}, expected, 1e-10, f"{slot} of node {i}")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("num_nodes", [1, 2, 4, 5, 8])
@pytest.mark.parametrize("case", CASES)
def test_gossip_equals_its_twin(case: str, num_nodes: int, engine: str) -> None:
    impossible = {"torus": (2, 5), "random_matching": (5,)}
    if num_nodes in impossible.get(case, ()):
        with pytest.raises(ValueError, match=f"K={num_nodes} is (prime|odd)"):
            GossipStrategy(case).check(num_nodes, STEPS)
        return
    compare(case, "MLP", num_nodes, engine)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("case", "model", "num_nodes"),
    [
        ("ring", "CNN", 5),
        ("torus", "CNN", 4),
        ("function", "CNN", 2),
        ("ring every 3", "GPT", 5),
        ("one_peer_exponential", "GPT", 5),
        ("random_matching", "GPT", 2),
    ],
)
def test_gossip_on_other_models_equals_its_twin(case: str, model: str, num_nodes: int, engine: str) -> None:
    compare(case, model, num_nodes, engine, inner="adamw")


def test_matchings_are_drawn_anew_for_each_exchange_and_seed() -> None:
    drawn: dict[int, dict[int, Tensor]] = {}
    for seed in (0, 0, 1):
        comm = Recorded(8)
        run(make_model("MLP"), GossipStrategy("random_matching", every=2), stacked(make_batches("MLP", 20, 8)),
            comm=comm, seed=seed)  # fmt: skip
        again = drawn.setdefault(seed, comm.drawn)
        assert all(torch.equal(W, comm.drawn[t]) for t, W in again.items())
        assert len({str(W.tolist()) for W in comm.drawn.values()}) > 7
    assert not all(torch.equal(W, drawn[1][t]) for t, W in drawn[0].items())


# ------------------------------------------------------------------------------------------ identities


def trained(strategy: Strategy, num_nodes: int = 5, model: str = "MLP", steps: int = 20, **settings: Any) -> Run:
    batches = stacked(make_batches(model, steps, num_nodes, dtype=torch.float64))
    return run(make_model(model, dtype=torch.float64), strategy, batches, **settings)


@pytest.mark.parametrize("inner", ["rmsprop", "adamw"])
def test_averaging_with_everyone_is_fedavg(inner: Any) -> None:
    everyone = torch.full((5, 5), 0.2, dtype=torch.float64)
    for given in ("complete", everyone):
        for every in (1, 3):
            ours = trained(GossipStrategy(given, every, inner, lr=0.01))
            theirs = trained(FedAvgStrategy(inner, H=every, lr=0.01))
            assert_close(ours.losses, theirs.losses, 1e-12)
            assert_close(ours.params, theirs.params, 1e-12)


def test_averaging_with_everyone_after_each_sgd_step_is_allreduce() -> None:
    ours = trained(GossipStrategy("complete", inner_optim="sgd", lr=0.1))
    theirs = trained(AllReduceStrategy("sgd", lr=0.1))
    assert_close(ours.losses, theirs.losses, 1e-12)
    assert_close(ours.params, theirs.params, 1e-12)


def test_mixing_with_oneself_is_independent_training() -> None:
    alone = trained(Strategy("adamw"))
    assert_same_bits(trained(GossipStrategy(torch.eye(5), inner_optim="adamw")).params, alone.params)
    assert trained(GossipStrategy(torch.eye(5))).comm.ledger.total_bytes == 0
    assert difference(trained(GossipStrategy("ring", inner_optim="adamw")).params, alone.params) > 1e-3


def test_two_nodes_on_a_ring_average() -> None:
    ours = trained(GossipStrategy("ring", inner_optim=MOMENTUM), num_nodes=2)
    assert_close(ours.params, trained(FedAvgStrategy(MOMENTUM), num_nodes=2).params, 1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_one_node_is_plain_training(name: str) -> None:
    strategy = GossipStrategy(name, inner_optim="adamw")
    strategy.check(1, 20)
    ours = trained(strategy, num_nodes=1)
    assert_same_bits(ours.params, trained(Strategy("adamw"), num_nodes=1).params)
    assert ours.comm.ledger.total_bytes == 0


@pytest.mark.parametrize("name", NAMES)
def test_equal_nodes_do_what_one_does(name: str) -> None:
    batches = stacked(make_batches("MLP", 20, 1, dtype=torch.float64))
    alike = [tuple(x.expand(4, *x.shape[1:]) for x in batch) for batch in batches]
    start = make_model("MLP", dtype=torch.float64)
    four, one = (run(start, GossipStrategy(name, inner_optim="adamw"), b) for b in (alike, batches))
    assert_close(four.params, one.params, 1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_the_mean_of_the_nodes_moves_by_the_mean_of_their_gradients(name: str) -> None:
    """Affine gradients, a (x_i - c_i), have the mean a (mean x - mean c): the mean of the nodes does plain SGD."""
    start = make_model("Quadratic", dtype=torch.float64)
    batches = stacked(make_batches("Quadratic", 30, 4, dtype=torch.float64))
    ours = run(start, GossipStrategy(name, inner_optim="sgd", lr=0.2), batches)
    theirs = run(start, AllReduceStrategy("sgd", lr=0.2), batches)
    assert_close(ours.params["x"].mean(0), theirs.params["x"][0], 1e-13)
    apart = (ours.params["x"] - ours.params["x"].mean(0)).norm()
    assert float(apart) > 1e-3 or name == "complete"


# ------------------------------------------------------------------------------------------- rates


def exchanged(params: Tree, given: Any, num_exchanges: int, inplace: bool = True, seed: int = 42) -> list[Tree]:
    """The results of exchanges alone on these parameters, one after the other."""
    mix = Mix(given)
    comm = StackedCollectives(len(next(iter(params.values()))))
    found = [params]
    for step in range(num_exchanges):
        part = Part.alone(comm, number=step, step=step, seed=seed, inplace=inplace)
        given_up = {name: x.clone() for name, x in found[-1].items()}
        found.append(mix(given_up, part))
    return found


def away(x: Tensor) -> float:
    """Distance to the mean."""
    return float((x - x.mean(0)).norm())


def second_by_closed_form(name: str, n: int) -> float:
    """The second largest |eigenvalue|; a torus is square here, an exponential graph even."""
    if name == "exponential":
        return 1 - 2 / (1 + log2(n))
    if name == "ring":
        return max(abs(1 / 3 + 2 / 3 * math.cos(2 * math.pi * k / n)) for k in range(1, n))
    waves = [0.4 * math.cos(2 * math.pi * k / math.isqrt(n)) for k in range(math.isqrt(n))]
    return max(abs(0.2 + a + b) for a, b in list(itertools.product(waves, waves))[1:])


@pytest.mark.parametrize(
    ("name", "num_nodes"),
    [
        (name, n)
        for name in ("ring", "torus", "exponential")
        for n in (4, 9, 16, 100)
        if (name, n) != ("exponential", 9)
    ],
)
def test_exchanges_contract_by_the_closed_forms(name: str, num_nodes: int) -> None:
    """Exactly by it on its eigenvector, at least by it from elsewhere; at K = 100 by gathering neighbours."""
    rate = second_by_closed_form(name, num_nodes)
    W = {"ring": topology.ring, "torus": topology.torus, "exponential": topology.exponential}[name](num_nodes)
    values, vectors = torch.linalg.eigh(W - topology.complete(num_nodes))
    slowest = vectors[:, values.abs().argmax()]
    if name == "exponential":  # not symmetric: all but the closest neighbour are an even distance away
        slowest = (math.pi * torch.arange(num_nodes)).cos()
    generator = torch.Generator().manual_seed(0)
    anything = torch.randn(num_nodes, 3, generator=generator, dtype=torch.float64)
    x = {"w": slowest.double()[:, None, None].expand(-1, 2, 3).clone(), "b": anything - anything.mean(0)}
    for before, after in itertools.pairwise(exchanged(x, name, 5)):
        assert away(after["w"]) == pytest.approx(rate * away(before["w"]), rel=1e-10)
        assert away(after["b"]) <= rate * away(before["b"]) * (1 + 1e-12)
        assert_close(after["b"].mean(0), torch.zeros(3, dtype=torch.float64), 1e-14)


@pytest.mark.parametrize("num_nodes", [2, 4, 8, 16, 64])
def test_one_peer_at_a_time_averages_exactly_after_log2_exchanges(num_nodes: int) -> None:
    x = torch.randn(num_nodes, 5, dtype=torch.float64)
    trail = exchanged({"w": x}, "one_peer_exponential", log2(num_nodes))
    assert away(trail[-2]["w"]) > 0.01
    assert_close(trail[-1]["w"], x.mean(0), 1e-14)


def test_random_matchings_contract_by_their_factor_on_average() -> None:
    """2000 runs: within 5 standard errors, which chance alone leaves in 6 cases of 10^7."""
    x = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ratios = torch.tensor(
        [
            away(exchanged({"w": x}, "random_matching", 1, seed=seed)[-1]["w"]) ** 2 / away(x) ** 2
            for seed in range(2000)
        ]
    )
    error = float(ratios.std()) / math.sqrt(len(ratios))
    assert error < 0.005
    assert float(ratios.mean()) == pytest.approx(6 / 14, abs=5 * error)


# ---------------------------------------------------------------------------------------- permutation


def test_relabelling_the_nodes_and_the_matrix_relabels_the_result() -> None:
    order = [3, 0, 4, 1, 2]
    W = doubly_stochastic(5)
    batches = stacked(make_batches("MLP", 15, 5, dtype=torch.float64))
    start = make_model("MLP", dtype=torch.float64)
    plain = run(start, GossipStrategy(W, inner_optim="adamw"), batches)
    moved = run(start, GossipStrategy(W[order][:, order], inner_optim="adamw"), reordered(batches, order))
    assert_close(moved.params, rows(plain.params, order), 1e-12)
    assert_close(moved.losses, plain.losses[:, order], 1e-12)


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("ring", [2, 3, 4, 5, 0, 1]),
        ("ring", [5, 4, 3, 2, 1, 0]),
        ("torus", [4, 5, 3, 1, 2, 0]),  # 2 x 3: the rows swapped, the columns turned
        ("exponential", [1, 2, 3, 4, 5, 0]),
        ("one_peer_exponential", [4, 5, 0, 1, 2, 3]),
        ("complete", [3, 0, 5, 1, 2, 4]),
    ],
)
def test_the_symmetries_of_a_topology_permute_the_result(name: str, order: list[int]) -> None:
    batches = stacked(make_batches("MLP", 15, 6, dtype=torch.float64))
    start = make_model("MLP", dtype=torch.float64)
    plain = run(start, GossipStrategy(name, inner_optim="adamw"), batches)
    moved = run(start, GossipStrategy(name, inner_optim="adamw"), reordered(batches, order))
    assert_close(moved.params, rows(plain.params, order), 1e-12)


def test_what_is_no_symmetry_does_not() -> None:
    batches = stacked(make_batches("MLP", 15, 6, dtype=torch.float64))
    start = make_model("MLP", dtype=torch.float64)
    order = [1, 0, 2, 3, 4, 5]
    plain = run(start, GossipStrategy("ring", inner_optim="adamw"), batches)
    moved = run(start, GossipStrategy("ring", inner_optim="adamw"), reordered(batches, order))
    assert difference(moved.params, rows(plain.params, order)) > 1e-4


# ------------------------------------------------------------------------------------- how it is mixed


def naive_mix(x: Tensor, W: Tensor) -> Tensor:
    return torch.einsum("ij,j...->i...", W, x)


GRAPHS: dict[str, Tensor] = {
    "ring 3": topology.ring(3),
    "ring 64, gathered": topology.ring(64),
    "exponential 128, gathered": topology.exponential(128),
    "uneven 80, gathered": topology.metropolis_weights(torch.eye(80).roll(1, 0) + torch.eye(80).roll(-1, 0)
                                                       + torch.eye(80)[0][:, None] + torch.eye(80)[0][None]),
    "matching 66, gathered": topology.random_matching(66, torch.Generator().manual_seed(0)),
    "complete 40": topology.complete(40),
    "dense 7": doubly_stochastic(7),
    "some rows empty, gathered": torch.diag(torch.tensor([0.0, 1.0, 2.0] * 20, dtype=torch.float64)).roll(1, 0),
}  # fmt: skip


@pytest.mark.parametrize("num_configs", [1, 3])
@pytest.mark.parametrize("shape", [(), (1,), (5, 3), (2, 701)])
@pytest.mark.parametrize("graph", GRAPHS)
def test_mixing_in_place_equals_the_definition(graph: str, shape: tuple[int, ...], num_configs: int) -> None:
    """In the storage that it was given, whatever the matrix, the shape and the number of configurations."""
    W = GRAPHS[graph]
    assert Mixing.of(W).sparse == ("gathered" in graph)
    x = torch.randn(num_configs, len(W), *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    comm = StackedCollectives(len(W))
    expected = torch.stack([naive_mix(one, W) for one in x])
    if num_configs > 1:
        comm = GroupCollectives(comm, num_configs)
    else:
        x, expected = x[0], expected[0]
    assert_close(comm.mix({"x": x}, W), {"x": expected}, 1e-13)
    given = x.clone()
    (mixed,) = comm.mix({"x": given}, W, inplace=True).values()
    assert mixed.data_ptr() == given.data_ptr()
    assert_close(mixed, expected, 1e-13)
    assert_same_bits(comm.mix(x.clone(), Mixing.of(W), inplace=True), mixed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("graph", ["ring 3", "ring 64, gathered"])
def test_mixing_keeps_the_dtype(graph: str, dtype: torch.dtype) -> None:
    W = GRAPHS[graph]
    x = torch.randn(len(W), 300, generator=torch.Generator().manual_seed(1)).to(dtype)
    mixed = StackedCollectives(len(W)).mix(x.clone(), W, inplace=True)
    assert mixed.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(mixed.double(), naive_mix(x.double(), W), rtol=4 * eps, atol=4 * eps)


@pytest.mark.parametrize("graph", ["dense 7", "ring 64, gathered"])
def test_mixing_what_cannot_be_overwritten(graph: str) -> None:
    """Values stored once, transposed, expanded or empty, and complex ones, come out right all the same."""
    W = GRAPHS[graph]
    K = len(W)
    comm = StackedCollectives(K)
    generator = torch.Generator().manual_seed(2)
    once = torch.randn(1, 4, generator=generator, dtype=torch.float64)
    transposed = torch.randn(3, K, generator=generator, dtype=torch.float64).T
    assert_close(comm.mix(once, W, inplace=True), once.expand(K, 4), 1e-14)
    assert_close(comm.mix(transposed.clone().T.contiguous().T, W, inplace=True), naive_mix(transposed, W), 1e-14)
    assert_close(comm.mix(once.expand(K, 4), W, inplace=True), once.expand(K, 4), 1e-14)
    assert comm.mix(torch.ones(K, 0), W, inplace=True).shape == (K, 0)
    turned = torch.randn(K, 3, generator=generator, dtype=torch.complex128)
    torch.testing.assert_close(
        comm.mix(turned.clone(), W, inplace=True), naive_mix(turned, W.to(turned.dtype)), rtol=0, atol=1e-14
    )


def test_blocks_of_columns_join_without_a_seam() -> None:
    for K, width in ((2, 200_003), (64, 5_001)):
        x = torch.randn(K, width, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        mixed = StackedCollectives(K).mix(x.clone(), topology.ring(K), inplace=True)
        assert_close(mixed, naive_mix(x, topology.ring(K)), 1e-14)


@pytest.mark.parametrize("num_nodes", [4, 64])
def test_pure_and_in_place_agree(num_nodes: int) -> None:
    for name in NAMES:
        if num_nodes == 64:
            x = {"w": torch.randn(64, 9, dtype=torch.float64)}
            pure, inplace = (exchanged(x, name, 3, inplace=way)[-1] for way in (False, True))
            assert_close(pure, inplace, 1e-13, name)
        else:
            strategy = GossipStrategy(name, inner_optim=MOMENTUM)
            pure, inplace = (trained(strategy, num_nodes, differentiable=way).params for way in (True, False))
            assert_close(pure, inplace, 1e-12, name)


def test_a_pure_exchange_leaves_what_it_was_given() -> None:
    for K in (4, 64):
        x = torch.randn(K, 9, dtype=torch.float64)
        before = x.clone()
        Mix("ring")({"w": x}, Part.alone(StackedCollectives(K), inplace=False))
        assert torch.equal(x, before)


# -------------------------------------------------------------------------------------- configurations


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NAMES)
def test_two_configurations_in_one_program_equal_two_programs(name: str, engine: str) -> None:
    K = 6
    start = make_model("MLP", dtype=torch.float64)
    parts = [stacked(make_batches("MLP", 8, K, seed=seed, dtype=torch.float64)) for seed in (0, 1)]
    both = [tuple(torch.cat(leaves) for leaves in zip(*steps)) for steps in zip(*parts)]
    together = run_stack(start, [GossipStrategy(name, 2, "adamw") for _ in range(2)], both, K, engine)
    for c, batches in enumerate(parts):
        alone = run(start, GossipStrategy(name, 2, "adamw"), batches, engine=engine)
        assert_close(together.losses[:, c], alone.losses, 1e-12)
        assert_close(together.params[c], alone.params, 1e-12)
    assert together.comm.ledger.total_bytes == alone.comm.ledger.total_bytes


# ------------------------------------------------------------------------------------------- bytes

DEGREES: dict[str, Callable[[int], int]] = {
    "ring": lambda n: min(2, n - 1),
    "torus": lambda n: {1: 0, 4: 2, 6: 3, 8: 3, 9: 4, 12: 4}[n],
    "exponential": log2,
    "complete": lambda n: n - 1,
    "one_peer_exponential": lambda n: min(1, n - 1),
    "random_matching": lambda n: min(1, n - 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_bytes_equal_the_closed_form(name: str, dtype: torch.dtype) -> None:
    """degree * b * P per exchange, at the byte."""
    start = make_model("MLP", dtype=dtype)
    payload = sum(p.numel() * p.element_size() for p in start.parameters())
    for K in (1, 2, 3, 4, 6, 8, 9, 12):
        strategy = GossipStrategy(name, every=3)
        try:
            strategy.check(K, 7)
        except ValueError:
            assert (name == "torus" and K in (2, 3)) or (name == "random_matching" and K in (3, 9))
            continue
        ours = run(start, strategy, stacked(make_batches("MLP", 7, K, dtype=dtype)))
        entries = list(ours.comm.ledger)
        assert [(e.step, e.operation, e.payload_bytes, e.participants) for e in entries] == [
            (2, "mix", payload, K),
            (5, "mix", payload, K),
        ]
        assert [e.sent_bytes for e in entries] == [DEGREES[name](K) * payload] * 2


def test_bytes_of_a_matrix_count_its_links() -> None:
    """A star: the hub sends to 4, each of the others to 1; on average 8 / 5."""
    star = torch.zeros(5, 5)
    star[0] = star[:, 0] = 1
    W = topology.metropolis_weights(star)
    ours = run(make_model("MLP"), GossipStrategy(W), stacked(make_batches("MLP", 2, 5)))
    payload = sum(p.numel() * 4 for p in make_model("MLP").parameters())
    assert [e.sent_bytes for e in ours.comm.ledger] == [pytest.approx(payload * 8 / 5)] * 2


# ---------------------------------------------------------------------------------------- derivatives


def mixed_permutations(shares: Tensor, K: int) -> Tensor:
    """sum_s softmax(shares)_s * (shift by s): doubly stochastic whatever `shares`, `[*, S]` -> `[*, K, K]`."""
    shifts = torch.stack([torch.eye(K, dtype=torch.float64).roll(s, 1) for s in range(shares.shape[-1])])
    return torch.einsum("...s,sij->...ij", shares.softmax(-1), shifts)


def final_loss(make: Callable[[Tensor], Any], shares: Tensor, inner: OptimSpec, steps: int = 6) -> Tensor:
    start = make_model("MLP", dtype=torch.float64)
    batches = stacked(make_batches("MLP", steps, 4, dtype=torch.float64))
    sim = simulation(start, GossipStrategy(make(shares), inner_optim=inner), batches)
    return advance(sim, sim.init(), batches, differentiable=True).losses[-1].square().sum()


FORMS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Any]]] = {
    "matrix": ((3,), lambda shares: mixed_permutations(shares, 4)),
    "matrices": ((5, 3), lambda shares: mixed_permutations(shares, 4)),
    "function": ((5, 3), lambda shares: lambda step: mixed_permutations(shares[step % 5], 4)),
}


@pytest.mark.parametrize("inner", [MOMENTUM, OptimSpec(AdamW, lr=0.02)])
@pytest.mark.parametrize("form", FORMS)
def test_derivatives_by_the_matrix_equal_finite_differences(form: str, inner: OptimSpec) -> None:
    """By one matrix, and by those of all exchanges but the last, which no loss sees."""
    shape, make = FORMS[form]
    shares = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(final_loss(make, shares, inner), shares)
    assert float(gradient.abs().min()) > 1e-6
    eps = 1e-5
    for index in itertools.product(*map(range, shape)):
        shift = torch.zeros_like(shares)
        shift[index] = eps
        up, down = (float(final_loss(make, shares.detach() + sign * shift, inner).detach()) for sign in (1, -1))
        assert float(gradient[index]) == pytest.approx((up - down) / (2 * eps), rel=1e-6, abs=1e-6)


def test_a_trained_matrix_is_looked_at_anew() -> None:
    """A matrix that takes derivatives may change between two runs of one strategy; a constant one is a copy."""
    start = make_model("MLP", dtype=torch.float64)
    batches = stacked(make_batches("MLP", 6, 4, dtype=torch.float64))
    for learnable in (True, False):
        W = topology.ring(4).requires_grad_(learnable)
        strategy = GossipStrategy(W, inner_optim=MOMENTUM)
        first = run(start, strategy, batches).params
        with torch.no_grad():
            W.copy_(topology.complete(4))
        second = run(start, strategy, batches).params
        expected = topology.complete(4) if learnable else topology.ring(4)
        assert_close(second, run(start, GossipStrategy(expected, inner_optim=MOMENTUM), batches).params, 1e-12)
        assert (difference(first, second) > 1e-3) == learnable


def test_a_matrix_with_gradient_does_not_leak_into_an_ordinary_run() -> None:
    W = topology.ring(4).requires_grad_()
    ours = trained(GossipStrategy(W, inner_optim=MOMENTUM), 4)
    assert not any(p.requires_grad for p in ours.params.values())
    assert_close(ours.params, trained(GossipStrategy("ring", inner_optim=MOMENTUM), 4).params, 1e-13)


# ------------------------------------------------------------------------------------ resume, trainer


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_has_the_bits_of_one_that_went_through(name: str) -> None:
    batches = stacked(make_batches("MLP", 11, 6))
    start = make_model("MLP")
    whole = run(start, GossipStrategy(name, every=2), batches)
    sim = simulation(start, GossipStrategy(name, every=2), batches)
    middle = saved(advance(sim, sim.init(), batches[:5]).state)
    rest = run(start, GossipStrategy(name, every=2), batches[5:], state=middle, max_steps=len(batches))
    assert_same_bits(rest.state, whole.state)


def test_the_trainer_runs_it() -> None:
    dataset = torch.utils.data.TensorDataset(*make_data("MLP", 200))
    trainer = Trainer(make_model("MLP"), dataset)
    trainer.fit(GossipStrategy("ring", lr=0.01), num_nodes=4, max_steps=5, batch_size=8, device="cpu")
    with pytest.raises(ValueError, match="K=7 is prime"):
        trainer.fit(GossipStrategy("torus"), num_nodes=7, max_steps=5, batch_size=8, device="cpu")


def test_it_composes_with_other_exchanges() -> None:
    """A ring every step and the average of all every fourth: two exchanges, one after the other."""
    exchanges = [Exchange(Mix("ring")), AveragingCommunicator(H=4)]
    ours = trained(CommunicateOptimizeStrategy(exchanges, MOMENTUM), num_nodes=5)
    both = [topology.ring(5), topology.ring(5), topology.ring(5), topology.complete(5)]  # J W = J
    theirs = trained(GossipStrategy(torch.stack(both), inner_optim=MOMENTUM), num_nodes=5)
    assert_close(ours.params, theirs.params, 1e-12)


# --------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"topology": "star"}, "topology='star': topology takes one of 'ring', 'torus'.*or a function step -> matrix"),
        ({"topology": "adamw"}, "An optimizer goes by name: inner_optim='adamw'"),
        ({"topology": SGD}, "An optimizer goes by name: inner_optim="),
        ({"topology": MOMENTUM}, "An optimizer goes by name: inner_optim="),
        ({"topology": None}, "topology=None"),
        ({"topology": 3}, r"topology has shape \[\]"),
        ({"topology": torch.ones(3)}, r"topology has shape \[3\]"),
        ({"topology": torch.ones(0, 2, 2)}, r"topology has shape \[0, 2, 2\]"),
        ({"topology": [[0.5, 0.5], [0.5]]}, "topology takes one of"),
        ({"topology": torch.ones(2, 3)}, r"topology has shape \[2, 3\]; a mixing matrix is square"),
        ({"topology": [[0.5, 0.5], [0.5, 0.6]]}, "topology: row 1 sums to 1.1, not to 1.*metropolis_weights.*Sinkhorn"),
        ({"topology": [[1.0, 0.0], [1.0, 0.0]]}, "topology: column 0 sums to 2, not to 1"),
        ({"topology": [[1.5, -0.5], [-0.5, 1.5]]}, r"topology\[0, 1\] = -0.5 is negative"),
        ({"topology": torch.stack([torch.eye(2), torch.ones(2, 2)])}, r"topology\[1\]: row 0 sums to 2"),
        ({"topology": torch.eye(2, dtype=torch.int)}, r"dtype torch.int32.*topology\.double\(\)"),
        ({"every": 0}, "every=0 must be an integer >= 1"),
        ({"every": 2.0}, "every=2.0 must be an integer >= 1"),
        ({"every": True}, "every=True must be an integer >= 1"),
    ],
)
def test_bad_arguments_are_refused_with_a_way_out(arguments: dict[str, Any], message: str) -> None:
    def bricks(topology: Any = "ring", every: Any = 1) -> Exchange:
        return Exchange(Mix(topology), every)

    makes: list[Callable[..., Any]] = [GossipStrategy, bricks]
    for make in makes:
        with pytest.raises(ValueError, match=message):
            make(**arguments)


def test_unknown_keywords_are_refused() -> None:
    with pytest.raises(TypeError, match="H"):
        GossipStrategy("ring", H=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("given", "num_nodes", "message"),
    [
        (torch.eye(4), 5, r"topology mixes 4 nodes, and the run has num_nodes=5: give num_nodes=4, a matrix \[5, 5\]"),
        (torch.eye(4)[None], 3, "topology mixes 4 nodes"),
        (lambda step: torch.eye(4), 5, "topology mixes 4 nodes"),
        (lambda step: torch.ones(5, 5), 5, r"topology\(0\): row 0 sums to 5"),
        (topology.ring(4).requires_grad_(), 5, "topology mixes 4 nodes"),
        ("torus", 5, "K=5 is prime: give num_nodes=4 or 6"),
        ("random_matching", 5, "K=5 is odd: give num_nodes=4 or 6"),
    ],
)
def test_a_run_that_cannot_work_is_refused(given: Any, num_nodes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GossipStrategy(given).check(num_nodes, 10)


def test_what_has_no_effect_warns() -> None:
    with pytest.warns(VecgymWarning, match="every=11 is larger than the run's 10 steps"):
        GossipStrategy("ring", every=11).check(4, 10)
    with pytest.warns(VecgymWarning, match="3 matrices and the run 2 exchanges: the matrices from 2 on are never used"):
        GossipStrategy(torch.eye(4).expand(3, 4, 4), every=5).check(4, 10)
    GossipStrategy(torch.eye(4).expand(2, 4, 4), every=5).check(4, 10)


def test_a_function_is_checked_at_every_exchange() -> None:
    def broken(step: int) -> Tensor:
        return topology.ring(4) if step < 3 else torch.ones(4, 4)

    strategy = GossipStrategy(broken)
    strategy.check(4, 10)
    with pytest.raises(ValueError, match=r"topology\(3\): row 0 sums to 4"):
        trained(strategy, 4)


def test_lists_and_functions_of_lists_are_matrices() -> None:
    pair = [[0.5, 0.5], [0.5, 0.5]]
    expected = trained(GossipStrategy("ring", inner_optim=MOMENTUM), 2).params
    forms: list[Any] = [pair, [pair], lambda step: pair]
    for given in forms:
        assert_close(trained(GossipStrategy(given, inner_optim=MOMENTUM), 2).params, expected, 1e-13)


def test_numbers_that_float32_rounds_stay_what_they_are() -> None:
    thirds = [[1 / 3] * 3] * 3
    expected = trained(GossipStrategy("complete", inner_optim=MOMENTUM), 3).params
    forms: list[Any] = [thirds, lambda step: thirds]
    for given in forms:
        assert_close(trained(GossipStrategy(given, inner_optim=MOMENTUM), 3).params, expected, 1e-13)


def test_the_state_is_empty() -> None:
    start = make_model("MLP")
    state = simulation_of(start, GossipStrategy(), StackedCollectives(4)).init()
    assert state.own.keys() | state.shared.keys() == {"params", "optimizer", "buffers"}
