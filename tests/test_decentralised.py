"""Decentralised algorithms against their naive twins, their fixed points on quadratics, and their identities."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from tests.fitting import fit
from tests.helpers import Run, assert_close, assert_same_bits, difference, run, stacked
from tests.models import make_batches, make_model
from tests.reference import common
from tests.reference.decentralised import (
    D2,
    Choco,
    ExactDiffusion,
    Gossip,
    GradientTracking,
    Push,
    RelaySum,
    Rule,
    decentralised,
    quasi_global,
    top_k,
)
from tests.test_availability import Taken
from vecgym.availability import Dropout, Trace
from vecgym.collectives.topology import complete, metropolis_weights, one_peer_exponential, ring
from vecgym.compress import RandomK, TopK
from vecgym.core import rng
from vecgym.strategy import (
    AllReduceStrategy,
    CHOCOStrategy,
    D2Strategy,
    ExactDiffusionStrategy,
    GossipStrategy,
    GradientTrackingStrategy,
    MATCHAStrategy,
    OptimSpec,
    QGMStrategy,
    RelaySumStrategy,
    SGPStrategy,
    Strategy,
)
from vecgym.strategy.decentralised.matcha import cut

F64 = torch.float64
K = 5
STEPS = 40
MOMENTUM = OptimSpec(SGD, lr=0.1, momentum=0.9)
WARMUP = 6


def schedule(step: int) -> float:
    """Linear from 0, then a cosine down to 10 %."""
    if step < WARMUP:
        return step / WARMUP
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


# name -> (for vecgym, for the twin)
INNER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "momentum, clipped": (
        {"inner_optim": MOMENTUM, "max_norm": 0.3},
        {"inner": (SGD, {"lr": 0.1, "momentum": 0.9}), "max_norm": 0.3},
    ),
    "adamw, cosine": (
        {"inner_optim": "adamw", "lr": 0.01, "warmup_steps": WARMUP, "cosine_anneal": True},
        {"inner": (AdamW, {"lr": 0.01}), "schedule": schedule},
    ),
}


def unlike(num_nodes: int) -> Tensor:
    """A symmetric matrix of unequal weights: of a path with a shortcut."""
    links = torch.diag(torch.ones(num_nodes - 1), 1) if num_nodes > 1 else torch.zeros(1, 1)
    if num_nodes > 2:
        links[0, num_nodes // 2] = 1
    return metropolis_weights(links + links.T)


def doubly(num_nodes: int) -> Tensor:
    """A directed ring."""
    eye = torch.eye(num_nodes, dtype=F64)
    return 0.6 * eye + 0.4 * eye.roll(1, 0)


def several(num_nodes: int) -> Tensor:
    eye = torch.eye(num_nodes, dtype=F64)
    return torch.stack([unlike(num_nodes), (eye + eye.roll(1, 0)) / 2, complete(num_nodes)])


def directed(num_nodes: int) -> Tensor:
    """Node 0 sends to all others, node i to i + 1 and, if i is odd, to 0: uniform weights, irregular."""
    links = torch.eye(num_nodes, dtype=F64) + torch.eye(num_nodes, dtype=F64).roll(1, 0)
    links[:, 0] = 1
    links[0, 1::2] = 1
    links = links.clamp(max=1)
    return links / links.sum(0)


def binary(num_nodes: int) -> list[tuple[int, int]]:
    return [(w // 2, w) for w in range(1, num_nodes)]


def mirrored(num_nodes: int) -> list[tuple[int, int]]:
    return [(num_nodes - 1 - i, num_nodes - 1 - j) for i, j in binary(num_nodes)]


OWN = [(3, 1), (1, 0), (1, 4), (2, 4)]  # a tree of five nodes


MATCHINGS = [[(0, 1), (2, 3)], [(1, 2), (3, 0)], [(3, 4)]]


def drawn(num_nodes: int, matchings: Any, plan: Any, step: int) -> Tensor:
    """I - alpha sum of the Laplacians of the matchings drawn."""
    weights = torch.eye(num_nodes, dtype=F64)
    draws = torch.rand(len(matchings), generator=rng.generator(42, "matchings", step), dtype=F64).tolist()
    for matching, draw, p in zip(matchings, draws, plan.probabilities.tolist()):
        for i, j in matching if draw < p else ():
            for a, b in ((i, j), (j, i)):
                weights[a, a] -= plan.alpha
                weights[a, b] += plan.alpha
    return weights


@dataclass(frozen=True)
class Case:
    """A strategy of K nodes, and the rule that its twin follows; it may depend on the inner optimizer."""

    make: Callable[..., Strategy]  # (num_nodes, **inner)
    rule: Callable[[int], Rule]
    sizes: tuple[int, ...] = (1, 2, 5)
    inner: tuple[str, ...] = tuple(INNER)


CASES: dict[str, Case] = {
    "gradient tracking, ring": Case(
        lambda n, **inner: GradientTrackingStrategy("ring", **inner), lambda n: GradientTracking(lambda t: ring(n))
    ),
    "gradient tracking, one peer": Case(
        lambda n, **inner: GradientTrackingStrategy("one_peer_exponential", **inner),
        lambda n: GradientTracking(lambda t: one_peer_exponential(n, t)),
    ),
    "gradient tracking, combine then adapt, matrices": Case(
        lambda n, **inner: GradientTrackingStrategy(several(n), order="combine_then_adapt", **inner),
        lambda n: GradientTracking(lambda t: several(n)[t % 3], "combine_then_adapt"),
    ),
    "D^2, ring": Case(
        lambda n, **inner: D2Strategy("ring", **inner), lambda n: D2(lambda t: ring(n)), sizes=(1, 2, 5)
    ),
    "D^2, matrices": Case(
        lambda n, **inner: D2Strategy(several(n)[[0, 2]], **inner), lambda n: D2(lambda t: several(n)[2 * (t % 2)])
    ),
    "exact diffusion, ring": Case(
        lambda n, **inner: ExactDiffusionStrategy("ring", **inner),
        lambda n: ExactDiffusion(lambda t: ring(n)),
        sizes=(1, 2, 4, 5),
    ),
    "exact diffusion, function": Case(
        lambda n, **inner: ExactDiffusionStrategy(lambda t: several(n)[2 * (t % 2)], **inner),
        lambda n: ExactDiffusion(lambda t: several(n)[2 * (t % 2)]),
    ),
    "SGP, one peer": Case(
        lambda n, **inner: SGPStrategy(**inner), lambda n: Gossip(lambda t: one_peer_exponential(n, t))
    ),
    "SGP, irregular": Case(
        lambda n, **inner: SGPStrategy(directed(n), **inner), lambda n: Push(lambda t: directed(n)), sizes=(1, 4, 5)
    ),
    "SGP, matrices": Case(
        lambda n, **inner: SGPStrategy(torch.stack([directed(n), ring(n)]), **inner),
        lambda n: Push(lambda t: ring(n) if t % 2 else directed(n)),
        sizes=(2, 5),
    ),
    "SGP, function": Case(
        lambda n, **inner: SGPStrategy(lambda t: ring(n) if t % 2 else directed(n), **inner),
        lambda n: Push(lambda t: ring(n) if t % 2 else directed(n)),
        sizes=(5,),
    ),
    "RelaySum, chain": Case(
        lambda n, **inner: RelaySumStrategy(**inner),
        lambda n: RelaySum([(i, i + 1) for i in range(n - 1)]),
        sizes=(1, 2, 5),
    ),
    "RelaySum, star": Case(
        lambda n, **inner: RelaySumStrategy("star", **inner), lambda n: RelaySum([(0, i) for i in range(1, n)])
    ),
    "RelaySum, binary tree": Case(
        lambda n, **inner: RelaySumStrategy("binary_tree", **inner), lambda n: RelaySum(binary(n)), sizes=(5, 7)
    ),
    "RelaySum, double binary tree": Case(
        lambda n, **inner: RelaySumStrategy("double_binary_tree", **inner),
        lambda n: RelaySum(binary(n), mirrored(n)),
        sizes=(1, 2, 7),
    ),
    "RelaySum, a tree": Case(
        lambda n, **inner: RelaySumStrategy(OWN, **inner), lambda n: RelaySum(OWN), sizes=(5,)
    ),
    "MATCHA, matchings": Case(
        lambda n, **inner: MATCHAStrategy(matchings=MATCHINGS, budget=0.4, **inner),
        lambda n: Gossip(lambda t: drawn(5, MATCHINGS, MATCHAStrategy(matchings=MATCHINGS, budget=0.4), t)),
        sizes=(5,),
    ),
    "MATCHA, a path": Case(
        lambda n, **inner: MATCHAStrategy(unlike(n), **inner),
        lambda n: Gossip(lambda t: drawn(n, cut(unlike(n)), MATCHAStrategy(unlike(n)), t)),
    ),
    "CHOCO, ring": Case(
        lambda n, **inner: CHOCOStrategy("ring", codec=TopK(0.2), consensus=0.4, **inner),
        lambda n: Choco(ring(n), top_k(0.2), 0.4, True),
    ),
    "CHOCO, a matrix, consensus first": Case(
        lambda n, **inner: CHOCOStrategy(
            unlike(n), codec=TopK(0.2), consensus=0.4, order="consensus_first", **inner
        ),
        lambda n: Choco(unlike(n), top_k(0.2), 0.4, False),
    ),
}  # fmt: skip


@functools.cache
def data(model: str, num_nodes: int) -> list[list[Any]]:
    return make_batches(model, STEPS, num_nodes, 3, dtype=F64)


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize(
    ("case", "num_nodes", "inner"),
    [(name, n, inner) for name, case in CASES.items() for n in case.sizes for inner in case.inner],
)
def test_each_equals_its_twin(case: str, num_nodes: int, inner: str, engine: str) -> None:
    """Losses, parameters and the inner optimizers of all nodes, 40 steps in float64."""
    ours, theirs = INNER[inner]
    start = make_model("MLP", dtype=F64)
    strategy = CASES[case].make(num_nodes, **ours)
    strategy.check(num_nodes, STEPS)
    result = run(start, strategy, stacked(data("MLP", num_nodes)), engine=engine)
    twin = decentralised(start, data("MLP", num_nodes), num_nodes, rule=CASES[case].rule(num_nodes), **theirs)
    assert_close(result.losses, twin.losses, 1e-10, "losses")
    params = [common.parameters(m) for m in twin.models]
    assert_close(result.params, {name: torch.stack([p[name] for p in params]) for name in params[0]}, 1e-10, "params")
    for i, (p, optimizer) in enumerate(zip(params, twin.optimizers)):
        for slot, values in result.state.home["optimizer"].items():
            expected = {name: optimizer.state[p[name]][slot] for name in p}
            assert_close({name: x[i] for name, x in values.items()}, expected, 1e-10, f"{slot} of node {i}")


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize(("num_nodes", "nesterov"), [(1, False), (2, True), (5, False), (5, True)])
def test_quasi_global_momentum_equals_its_twin(num_nodes: int, nesterov: bool, engine: str) -> None:
    """With a warm-up from 0, a cosine, clipped gradients, weight decay; the optimizer goes on with m."""
    start, mu = make_model("MLP", dtype=F64), 0.8
    strategy = QGMStrategy(
        several(num_nodes), OptimSpec(SGD, weight_decay=0.05), momentum=mu, nesterov=nesterov, lr=0.1, max_norm=0.3,
        warmup_steps=WARMUP, cosine_anneal=True,
    )  # fmt: skip
    result = run(start, strategy, stacked(data("MLP", num_nodes)), engine=engine)
    twin, m = quasi_global(
        start, data("MLP", num_nodes), num_nodes, matrix=lambda t: several(num_nodes)[t % 3], lr=0.1, mu=mu,
        nesterov=nesterov, weight_decay=0.05, max_norm=0.3, schedule=schedule,
    )  # fmt: skip
    assert_close(result.losses, twin.losses, 1e-10, "losses")
    params = [common.parameters(model) for model in twin.models]
    assert_close(result.params, {name: torch.stack([p[name] for p in params]) for name in params[0]}, 1e-10, "params")
    expected = {name: torch.stack([node[name] for node in m]) for name in params[0]}
    assert_close(result.state.own["momentum"], expected, 1e-10, "m")
    assert difference(result.state.home["optimizer"]["momentum_buffer"], result.state.own["momentum"]) == 0


# ------------------------------------------------------------------------------------------ fixed points on quadratics


class Valley(nn.Module):
    """x A x / 2 - b x, of the batch (A, b)."""

    def __init__(self, dim: int = 3) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.linspace(-1, 1, dim, dtype=F64))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        A, b = batch
        return ((A @ self.x) @ self.x / 2 - b @ self.x).mean()


@dataclass
class Valleys:
    """Quadratics of K nodes, no two alike.

    Attributes:
        A, b: `[K, n, n]`, `[K, n]`.
    """

    num_nodes: int = K
    dim: int = 3
    A: Tensor = field(init=False)
    b: Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        roots = torch.randn(self.num_nodes, self.dim, self.dim, generator=generator, dtype=F64)
        self.A = roots @ roots.mT / self.dim + 0.3 * torch.eye(self.dim, dtype=F64)
        self.b = 2 * torch.randn(self.num_nodes, self.dim, generator=generator, dtype=F64)

    @property
    def optimum(self) -> Tensor:
        """Of the mean loss: (mean A)^-1 mean b."""
        return torch.linalg.solve(self.A.mean(0), self.b.mean(0))

    def train(self, strategy: Strategy, steps: int = 3000, **settings: Any) -> Run:
        batch = (self.A[:, None], self.b[:, None])
        strategy.check(self.num_nodes, steps)
        return run(Valley(self.dim), strategy, [batch] * steps, **settings)

    def blocks(self, W: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """W, A and b of all nodes together: `[K n, K n]` twice and `[K n]`."""
        eye = torch.eye(self.dim, dtype=F64)
        return torch.kron(W, eye), torch.block_diag(*self.A), self.b.flatten()


SLOW = OptimSpec(SGD, lr=0.1)
EXACT: dict[str, Callable[[Any], Strategy]] = {
    "gradient tracking": lambda inner: GradientTrackingStrategy("ring", inner),
    "gradient tracking, combine then adapt": lambda inner: GradientTrackingStrategy(
        "ring", inner, order="combine_then_adapt"
    ),
    "gradient tracking, one peer": lambda inner: GradientTrackingStrategy("one_peer_exponential", inner),
    "D^2": lambda inner: D2Strategy("ring", inner),
    "D^2, a path": lambda inner: D2Strategy((unlike(K) + torch.eye(K, dtype=F64)) / 2, inner),
    "exact diffusion": lambda inner: ExactDiffusionStrategy("ring", inner),
    "RelaySum, chain": lambda inner: RelaySumStrategy("chain", inner),
    "RelaySum, double binary tree": lambda inner: RelaySumStrategy("double_binary_tree", inner),
    "RelaySum, a tree": lambda inner: RelaySumStrategy(OWN, inner),
}


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("name", EXACT)
def test_the_unbiased_reach_the_optimum_of_unlike_quadratics(name: str, momentum: float) -> None:
    valleys = Valleys()
    rate = 0.02 if momentum else 0.05
    result = valleys.train(EXACT[name](OptimSpec(SGD, lr=rate, momentum=momentum)))
    assert_close(result.params["x"], valleys.optimum.expand(K, -1), 1e-9)
    gossip = valleys.train(GossipStrategy("ring", inner_optim=OptimSpec(SGD, lr=rate, momentum=momentum)), 500)
    assert difference(gossip.params, {"x": valleys.optimum}) > 1e-2  # the nodes are unlike


@pytest.mark.parametrize("name", ["gradient tracking", "D^2", "exact diffusion"])
def test_a_change_of_the_rate_leaves_nothing_behind(name: str) -> None:
    """At the optimum the steps of all nodes sum to 0; a tenth of the rate later they still do, and the nodes stay."""
    valleys = Valleys()
    inner = {"inner_optim": "sgd", "lr": 0.05, "lr_scheduler": lambda step: 1.0 if step < 2000 else 0.1}
    topology = {"topology": "ring"}
    kind = {"gradient tracking": GradientTrackingStrategy, "D^2": D2Strategy, "exact diffusion": ExactDiffusionStrategy}
    result = valleys.train(kind[name](**topology, **inner), 6000)
    assert_close(result.params["x"], valleys.optimum.expand(K, -1), 1e-9)


def stops(strategy: Strategy, M: Tensor, v: Tensor, steps: int = 3000) -> None:
    """Training on unlike quadratics ends where M theta = v, and not at the optimum."""
    valleys = Valleys()
    result = valleys.train(strategy, steps)
    assert_close(result.params["x"].flatten(), torch.linalg.solve(M, v), 1e-9)
    assert difference(result.params, {"x": valleys.optimum}) > 1e-2


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.8, False), (0.8, True)])
def test_quasi_global_momentum_stops_where_gossip_does(momentum: float, nesterov: bool) -> None:
    """m ends at 0, and theta = W (theta - gamma' (A theta - b)), with gamma' = (1 + mu) gamma in Nesterov's form."""
    W, A, b = Valleys().blocks(ring(K))
    gamma, eye = 0.05, torch.eye(len(W), dtype=F64)
    rate = gamma * (1 + momentum if nesterov else 1)
    strategy = QGMStrategy("ring", "sgd", momentum=momentum, nesterov=nesterov, lr=gamma)
    stops(strategy, eye - W @ (eye - rate * A), rate * W @ b)


def test_stochastic_gradient_push_stops_where_its_weights_say() -> None:
    """w = A w; w z = A (w z - gamma (H z - b)), of z = x / w."""
    valleys, gamma, shares = Valleys(), 0.05, directed(K)
    P, A, b = valleys.blocks(shares)
    values, vectors = torch.linalg.eig(shares)
    w = vectors[:, values.real.argmax()].real
    D = torch.diag((K * w / w.sum()).repeat_interleave(3))
    result = valleys.train(SGPStrategy(shares, "sgd", lr=gamma), 3000)
    assert_close(result.state.own["weight"], torch.diag(D)[::3], 1e-9)
    assert result.state.own["weight"].std() > 0.1
    stops(SGPStrategy(shares, "sgd", lr=gamma), D - P @ (D - gamma * A), gamma * P @ b)


def test_all_matchings_stop_where_gossip_does() -> None:
    """With the whole graph in each step: W = I - alpha L, alpha = 2 / (lambda_2 + lambda_K)."""
    laplacian = torch.diag(torch.full((K,), 2.0, dtype=F64)) - (3 * ring(K) - torch.eye(K, dtype=F64))
    values = torch.linalg.eigvalsh(laplacian)
    strategy = MATCHAStrategy("ring", "sgd", budget=1.0, lr=0.05)
    alpha = strategy.plan(K).alpha
    assert alpha == pytest.approx(float(2 / (values[1] + values[-1])), rel=1e-6)
    assert torch.equal(strategy.plan(K).probabilities, torch.ones(3, dtype=F64))
    W, A, b = Valleys().blocks(torch.eye(K, dtype=F64) - alpha * laplacian)
    stops(strategy, torch.eye(len(W), dtype=F64) - W @ (torch.eye(len(W), dtype=F64) - 0.05 * A), 0.05 * W @ b)


@pytest.mark.parametrize("order", ["estimates_first", "consensus_first"])
def test_choco_stops_where_exact_messages_would(order: Any) -> None:
    """The estimates become exact, though a third of the coordinates is sent: (I + c (W - I)) (theta - gamma g), or
    theta - gamma g + c (W - I) theta."""
    W, A, b = Valleys().blocks(ring(K))
    gamma, c, eye = 0.05, 0.3, torch.eye(len(W), dtype=F64)
    C = eye + c * (W - eye)
    strategy = CHOCOStrategy("ring", "sgd", codec=TopK(1 / 3), consensus=c, order=order, lr=gamma)
    if order == "estimates_first":
        stops(strategy, eye - C @ (eye - gamma * A), gamma * C @ b)
    else:
        stops(strategy, eye - C + gamma * A, gamma * b)


def test_quasi_global_momentum_at_rate_0_has_derivatives() -> None:
    """A momentum that stays, since nothing moved, does not divide by the rate: 0 / 0 would be the derivative."""
    lr = torch.zeros((), dtype=F64, requires_grad=True)
    start, batches = make_model("MLP", dtype=F64), stacked(data("MLP", K))
    losses = run(start, QGMStrategy("ring", "sgd", lr=lr), batches, differentiable=True).losses
    (slope,) = torch.autograd.grad(losses[-1].sum(), lr)
    assert slope.isfinite()
    assert slope < 0


# ---------------------------------------------------------------------------------------------------------- identities


@pytest.mark.parametrize("topology", ["one_peer_exponential", "ring", doubly(K)])
def test_push_in_a_regular_graph_is_gossip_to_the_bit(topology: Any) -> None:
    start, batches = make_model("MLP", dtype=F64), stacked(data("MLP", K))
    push = run(start, SGPStrategy(topology, MOMENTUM), batches)
    gossip = run(start, GossipStrategy(topology, inner_optim=MOMENTUM), batches)
    assert_same_bits(push.params, gossip.params)
    assert push.comm.ledger.total_bytes == gossip.comm.ledger.total_bytes
    assert_same_bits(push.state.own["weight"], torch.ones(K, dtype=F64))


@pytest.mark.parametrize("name", ["chain", "star", "binary_tree", "double_binary_tree"])
def test_relayed_sums_of_two_nodes_are_their_mean(name: str) -> None:
    start, batches = make_model("MLP", dtype=F64), stacked(data("MLP", 2))
    relayed = run(start, RelaySumStrategy(name, MOMENTUM), batches)
    gossip = run(start, GossipStrategy("complete", inner_optim=MOMENTUM), batches)
    assert_close(relayed.params, gossip.params, 1e-12)
    assert relayed.comm.ledger.total_bytes == gossip.comm.ledger.total_bytes


def test_relayed_sums_are_means_as_late_as_nodes_are_apart() -> None:
    """theta_i(t + 1) = mean_k z_k(t + 1 - d_ik), d = 1 between neighbours, and theta(0) for what is not there yet."""
    valleys, gamma = Valleys(), 0.05
    distance = torch.tensor([[0, 1, 3, 2, 2], [1, 0, 2, 1, 1], [3, 2, 0, 3, 1], [2, 1, 3, 0, 2], [2, 1, 1, 2, 0]])
    start = Valley().x.detach()
    theta, history = start.repeat(K, 1), list[Tensor]()
    for t in range(12):
        history.append(theta - gamma * ((valleys.A @ theta[..., None])[..., 0] - valleys.b))
        late = [[t - max(0, int(distance[i, k]) - 1) for k in range(K)] for i in range(K)]
        theta = torch.stack(
            [torch.stack([history[s][k] if s >= 0 else start for k, s in enumerate(row)]).mean(0) for row in late]
        )
    result = valleys.train(RelaySumStrategy(OWN, "sgd", lr=gamma), 12)
    assert_close(result.params["x"], theta, 1e-12)


def test_the_mirrored_tree_halves_the_traffic_of_the_busiest() -> None:
    """Bytes in all are the same: 2 (K - 1) / K b P. Eight coordinates, of two trees of seven nodes."""
    valleys = Valleys(7, 8)
    sent = {}
    for name in ("binary_tree", "double_binary_tree"):
        ledger = valleys.train(RelaySumStrategy(name, "sgd", lr=0.01), 5).comm.ledger
        assert ledger.total_bytes == pytest.approx(5 * 2 * 6 / 7 * 8 * 8, rel=1e-12)
        sent[name] = [0.0] * 7
        for entry in ledger:
            for sender in entry.transfer.who.senders:  # type: ignore[union-attr]
                sent[name][sender] += entry.transfer.payload_bytes
    assert max(sent["binary_tree"]) == 5 * 3 * 64
    assert max(sent["double_binary_tree"]) < max(sent["binary_tree"])


GRAPHS = {
    "a ring and a node": (tuple(map(tuple, MATCHINGS)), 5),
    "seven": ((((0, 1), (2, 3), (4, 5)), ((1, 2), (3, 4), (5, 6)), ((0, 3),), ((2, 6),), ((1, 5), (0, 6))), 7),
    "complete": (cut(complete(5)), 5),
}


@pytest.mark.parametrize("budget", [0.3, 0.6])
@pytest.mark.parametrize("name", GRAPHS)
def test_no_probabilities_near_by_connect_the_graph_better(name: str, budget: float) -> None:
    """The problem is concave, so that none at all do; and no weight near by contracts more."""
    matchings, num_nodes = GRAPHS[name]
    plan = MATCHAStrategy(matchings=matchings, budget=budget).plan()
    L, p, count = plan.laplacians, plan.probabilities, len(matchings)
    assert float(p.sum()) == pytest.approx(budget * count, rel=1e-9)
    assert bool(((p >= 0) & (p <= 1)).all())

    def connection(p: Tensor) -> float:
        return float(torch.linalg.eigvalsh(torch.tensordot(p, L, 1))[1])

    def contraction(alpha: float) -> float:  # the norm of E[W^2] - J, over all draws
        total = torch.full((num_nodes, num_nodes), -1 / num_nodes, dtype=F64)
        for some in itertools.product((0.0, 1.0), repeat=count):
            chance = math.prod(float(q) if x else 1 - float(q) for q, x in zip(p, some))
            W = torch.eye(num_nodes, dtype=F64) - alpha * torch.tensordot(torch.tensor(some, dtype=F64), L, 1)
            total += chance * W @ W
        return float(torch.linalg.matrix_norm(total, 2))

    generator = torch.Generator().manual_seed(0)
    for size in (0.1, 0.01, 0.001) * 100:
        other = (p + size * torch.randn(count, generator=generator, dtype=F64)).clamp(0, 1)
        other = other * min(1.0, budget * count / float(other.sum()))
        assert connection(other) <= connection(p) + 1e-5
    assert contraction(plan.alpha) <= min(contraction(plan.alpha + step) for step in (-0.1, -1e-3, 1e-3, 0.1)) + 1e-9


def test_matchings_are_drawn_with_their_probabilities() -> None:
    valleys, steps = Valleys(), 2000
    strategy = MATCHAStrategy(matchings=MATCHINGS, budget=0.4, inner_optim="sgd", lr=0.01)
    ledger = valleys.train(strategy, steps).comm.ledger
    expected = [float(p) for p in strategy.probabilities]
    links = {link: 0 for matching in MATCHINGS for link in matching}
    for entry in ledger:
        for pair in entry.transfer.who.pairs:  # type: ignore[union-attr]
            links[pair] = links.get(pair, 0) + 1
    for matching, p in zip(MATCHINGS, expected):
        for i, j in matching:
            assert links[i, j] == links[j, i] == pytest.approx(steps * p, abs=4 * (steps * p * (1 - p)) ** 0.5)
    assert len(ledger) < steps  # steps without a matching exchange nothing
    mean = 2 * sum(p * len(m) for p, m in zip(expected, MATCHINGS)) / K * 24
    assert ledger.total_bytes / steps == pytest.approx(mean, rel=0.05)


def test_choco_with_exact_messages_is_gossip() -> None:
    start, batches = make_model("MLP", dtype=F64), stacked(data("MLP", K))
    choco = run(start, CHOCOStrategy("ring", MOMENTUM, codec=TopK(1.0), consensus=1.0), batches)
    gossip = run(start, GossipStrategy("ring", inner_optim=MOMENTUM), batches)
    assert_close(choco.params, gossip.params, 1e-12)
    half = run(start, CHOCOStrategy("ring", MOMENTUM, codec=TopK(1.0), consensus=0.5), batches)
    lazy = run(start, GossipStrategy((ring(K) + torch.eye(K, dtype=F64)) / 2, inner_optim=MOMENTUM), batches)
    assert_close(half.params, lazy.params, 1e-12)


def test_quasi_global_momentum_of_0_is_gossip() -> None:
    start, batches = make_model("MLP", dtype=F64), stacked(data("MLP", K))
    quasi = run(start, QGMStrategy("ring", momentum=0.0, nesterov=True, lr=0.1), batches)
    gossip = run(start, GossipStrategy("ring", inner_optim="sgd", lr=0.1), batches)
    assert_same_bits(quasi.params, gossip.params)


def test_quasi_global_momentum_grows_to_that_of_sgd() -> None:
    """At a constant gradient g: m -> g / (1 - mu)."""
    valleys = Valleys()
    valleys.A = torch.zeros_like(valleys.A)
    result = valleys.train(QGMStrategy("complete", momentum=0.8, lr=0.1), 700)
    assert_close(result.state.own["momentum"]["x"], -5 * valleys.b.mean(0).expand(K, -1), 1e-9)


def test_bytes_of_push_are_those_of_its_links() -> None:
    valleys = Valleys()
    links = int((directed(K) > 0).sum()) - K
    result = valleys.train(SGPStrategy(directed(K), "sgd", lr=0.05), 7)
    assert result.comm.ledger.total_bytes == 7 * links / K * (3 * 8 + 8)  # three numbers, and the weight
    assert float(result.state.own["weight"].sum()) == pytest.approx(K, rel=1e-12)


SYMMETRIC = ring(K)


@pytest.mark.parametrize("topology", [SYMMETRIC, directed(K)])
def test_push_keeps_its_weights_with_absent_nodes(topology: Tensor) -> None:
    """They sum to K, what absent nodes would have got stays with the senders, and equal parameters stay equal."""
    batches = [(torch.zeros(K, 1, 3, 3, dtype=F64), torch.zeros(K, 1, 3, dtype=F64))] * 200
    taken = Taken(SGPStrategy(topology, "sgd", lr=0.05), batches, Dropout(0.3), model=Valley()).run(200)
    weight = taken.state.own["weight"]
    assert float(weight.sum()) == pytest.approx(K, rel=1e-9)
    assert (weight.std() > 0.1) == (topology is not SYMMETRIC)
    assert_close(taken.state.params["x"], Valley().x.expand(K, -1), 1e-9)


def test_d2_at_a_constant_rate_is_the_papers_recursion() -> None:
    """theta(t+1) = W (2 theta(t) - theta(t-1) - gamma (g(t) - g(t-1))), the first step as D-PSGD."""
    valleys, gamma = Valleys(), 0.05
    W, A, b = valleys.blocks(ring(K))
    x = torch.linspace(-1, 1, 3, dtype=F64).repeat(K)
    before, x = x, W @ (x - gamma * (A @ x - b))
    for _ in range(19):
        before, x = x, W @ (2 * x - before - gamma * (A @ x - A @ before))
    result = valleys.train(D2Strategy("ring", "sgd", lr=gamma), 20)
    assert_close(result.params["x"].flatten(), x, 1e-12)


@pytest.mark.parametrize("order", ["adapt_then_combine", "combine_then_adapt"])
def test_gradient_tracking_at_a_constant_rate_tracks_gradients(order: Any) -> None:
    """y <- W y + g(new) - g(old) from y = g; the paper's algorithm is the one that combines first."""
    valleys, gamma = Valleys(), 0.05
    W, A, b = valleys.blocks(ring(K))
    x = torch.linspace(-1, 1, 3, dtype=F64).repeat(K)
    y = A @ x - b
    for _ in range(20):
        new = W @ (x - gamma * y) if order == "adapt_then_combine" else W @ x - gamma * y
        y, x = W @ y + (A @ new - b) - (A @ x - b), new
    result = valleys.train(GradientTrackingStrategy("ring", "sgd", lr=gamma, order=order), 20)
    assert_close(result.params["x"].flatten(), x, 1e-12)


def test_exact_diffusion_is_d2_with_a_lazy_matrix() -> None:
    start, batches = make_model("MLP", dtype=F64), stacked(data("MLP", 4))
    diffusion = run(start, ExactDiffusionStrategy("ring", MOMENTUM), batches)
    d2 = run(start, D2Strategy((ring(4) + torch.eye(4, dtype=F64)) / 2, MOMENTUM), batches)
    assert_close(diffusion.params, d2.params, 1e-12)


@pytest.mark.parametrize("make", [GradientTrackingStrategy, D2Strategy])
def test_with_all_as_neighbours_the_unbiased_are_data_parallel(make: Any) -> None:
    start, batches = make_model("MLP", dtype=F64), stacked(data("MLP", K))
    together = run(start, AllReduceStrategy(MOMENTUM), batches)
    result = run(start, make("complete", MOMENTUM), batches)
    assert_close(result.params, together.params, 1e-12)
    assert_close(result.losses, together.losses, 1e-12)


# ------------------------------------------------------------------------------------------------------ what is refused


def test_d2_refuses_matrices_with_which_it_diverges() -> None:
    with pytest.raises(ValueError, match=r"has the eigenvalue -0.3333.*ExactDiffusionStrategy"):
        D2Strategy("ring").check(4, 10)
    with pytest.raises(ValueError, match=r"eigenvalue -0\.6"):
        D2Strategy(torch.stack([ring(5), swap(5, 0.8)])).check(5, 10)
    for topology in ("exponential", "one_peer_exponential"):
        with pytest.raises(ValueError, match=r"is not symmetric.*GradientTrackingStrategy"):
            D2Strategy(topology).check(4, 10)
    ExactDiffusionStrategy("ring").check(4, 10)


def swap(num_nodes: int, share: float) -> Tensor:
    """Two nodes that give each other most of their values; eigenvalue 1 - 2 share."""
    weights = torch.eye(num_nodes, dtype=F64)
    weights[:2, :2] = torch.tensor([[1 - share, share], [share, 1 - share]], dtype=F64)
    return weights


@pytest.mark.parametrize("name", ["gradient tracking", "gradient tracking, combine then adapt", "exact diffusion"])
def test_the_unbiased_reach_the_optimum_with_absent_nodes(name: str) -> None:
    """The absent keep what corrects their steps, so that the corrections of all nodes still sum to 0."""
    valleys = Valleys()
    batches = [(valleys.A[:, None], valleys.b[:, None])] * 3000
    state = Taken(EXACT[name](OptimSpec(SGD, lr=0.05)), batches, Dropout(0.2), model=Valley()).run(3000).state
    assert_close(state.params["x"], valleys.optimum.expand(K, -1), 1e-9)
    assert_close(state.own["correction"]["x"].sum(0), torch.zeros(3, dtype=F64), 1e-9)


def test_push_refuses_shares_that_do_not_sum_to_1() -> None:
    with pytest.raises(ValueError, match=r"column 1 sums to .*give its transpose"):
        SGPStrategy(directed(K).T)
    with pytest.raises(ValueError, match=r"topology\(0\): column 1 sums to"):
        SGPStrategy(lambda step: directed(K).T).check(K, 10)


def test_choco_refuses_what_its_estimates_do_not_bear() -> None:
    for topology in ("one_peer_exponential", "random_matching", lambda step: ring(K), torch.stack([ring(K)] * 2)):
        with pytest.raises(ValueError, match="changes from step to step"):
            CHOCOStrategy(topology)
    CHOCOStrategy(ring(K)[None])
    with pytest.raises(ValueError, match="unbiased=False"):
        CHOCOStrategy(codec=RandomK(0.1, unbiased=True))
    with pytest.raises(TypeError, match="codec"):
        CHOCOStrategy(codec="powersgd")
    with pytest.raises(ValueError, match=r"an absent one would miss some.*GossipStrategy"):
        fit("MLP", CHOCOStrategy(), num_nodes=4, max_steps=4, availability=Trace(~torch.eye(4, dtype=torch.bool)))


def test_quasi_global_momentum_is_of_plain_sgd() -> None:
    for spec in ("adam", OptimSpec(SGD, momentum=0.9), OptimSpec(SGD, nesterov=False)):
        with pytest.raises(ValueError, match=r"takes the place of SGD's.*momentum and nesterov to the strategy"):
            QGMStrategy("ring", spec)


def test_relayed_sums_refuse_what_is_no_tree() -> None:
    for edges in ([(0, 1), (2, 3)], [(0, 1), (1, 2), (2, 0)], [(0, 1), (1, 2), (1, 2)], [(0, 1), (1, 5)], [(0, 0)]):
        with pytest.raises(ValueError, match="is no tree of"):
            RelaySumStrategy(edges)
    with pytest.raises(ValueError, match="is no tree of 6 nodes"):
        RelaySumStrategy(OWN).check(6, 10)
    with pytest.raises(ValueError, match="topology='ring'"):
        RelaySumStrategy("ring")
    with pytest.raises(ValueError, match="all behind an absent one would be missing"):
        fit("MLP", RelaySumStrategy(), num_nodes=4, max_steps=4, availability=Trace(~torch.eye(4, dtype=torch.bool)))
