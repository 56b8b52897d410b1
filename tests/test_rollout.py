"""The gradient of the outcome: finite differences for every strategy and number, closed forms, both modes, memory."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import vecgym
import vecgym.strategy
from tests.helpers import assert_close, stacked
from tests.models import make_batches, make_model
from vecgym import Trainer
from vecgym.availability import Trace
from vecgym.collectives import StackedCollectives
from vecgym.collectives.ledger import Ledger, Transfer
from vecgym.collectives.topology import ring
from vecgym.compress import TopK
from vecgym.core import nodes, tree
from vecgym.data import Batches
from vecgym.engine import Engine, EngineName
from vecgym.optim import OptimSpec
from vecgym.runs.rollout import Outcome, rollout, rollout_jvp
from vecgym.simulation.simulation import Part
from vecgym.strategy import (
    AllReduceStrategy,
    CommunicateOptimizeStrategy,
    Compressed,
    DiLoCoStrategy,
    DSMStrategy,
    EagerDiLoCoStrategy,
    EDiTStrategy,
    Exchange,
    FedAvgStrategy,
    Mean,
    MostMoved,
    Outer,
    Ring,
    SparseLoCoStrategy,
    Strategy,
    StreamingDiLoCoStrategy,
    StrongestCosines,
    SyncWeight,
    every,
)
from vecgym.strategy.allreduce import GPAStrategy
from vecgym.strategy.decentralised import (
    CHOCOStrategy,
    D2Strategy,
    ExactDiffusionStrategy,
    GradientTrackingStrategy,
    MATCHAStrategy,
    QGMStrategy,
    RelaySumStrategy,
    SGPStrategy,
)
from vecgym.strategy.decentralised.gossip import GossipStrategy
from vecgym.strategy.demo import DeMoStrategy
from vecgym.strategy.federated import FedDynStrategy, FedNovaStrategy, MimeStrategy, ScaffnewStrategy, SCAFFOLDStrategy
from vecgym.strategy.local_steps import (
    DESLOCStrategy,
    LocalAdamStrategy,
    MuLoCoStrategy,
    NoLoCoStrategy,
    PALSGDStrategy,
)
from vecgym.strategy.simulated import simulation_of
from vecgym.strategy.sparta import PartitionedSelector, SPARTADiLoCoStrategy, SPARTAStrategy
from vecgym.strategy.stages import Average, Memory

K, T, B = 3, 6, 4
F64 = torch.float64


class Tiny(nn.Module):
    """4 -> 5 -> 3 with tanh; batch (x [B, 4], y [B])."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.second(self.first(x).tanh()), y)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def labels(x: Tensor) -> Tensor:
    """The task to learn; each node sees its inputs shifted, so that the nodes go apart."""
    return (x @ draw(4, 3, seed=9)).argmax(-1)


@functools.cache
def setting() -> tuple[nn.Module, list[Any], Any, Engine]:
    """Model, batches, evaluation batch, and an engine that has looked at them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Tiny().double()
    x = draw(T, K, B, 4) + draw(1, K, 1, 4, seed=1)
    batches = [(x[t], labels(x[t])) for t in range(T)]
    held_out = draw(16, 4, seed=2)
    engine = Engine(model, engine="vmap")
    engine.prepare(batches[0])
    return model, batches, (held_out, labels(held_out)), engine


def outcome_of(strategy: Strategy, **settings: Any) -> Outcome:
    model, batches, eval_batch, engine = setting()
    options: dict[str, Any] = {"num_examples": (5, 2, 3), "engine": engine, **settings}
    return rollout(model, strategy, batches, num_nodes=K, eval_batch=eval_batch, **options)


def trained_loss(strategy: Strategy, params: Any = None, batches: Any = None) -> float:
    """The same loss by the step that overwrites its state: another code than that of the rollout."""
    model, own, eval_batch, engine = setting()
    comm = StackedCollectives(K)
    sim = simulation_of(model, strategy, comm, engine=engine, max_steps=T, num_examples=(5, 2, 3))
    state = sim.init(params)
    for batch in own if batches is None else batches:
        state, _ = sim.step(state, batch)
    evaluated = copy.deepcopy(model).eval()
    with torch.no_grad():
        for name, value in nodes.mean(state.params).items():
            evaluated.get_parameter(name).copy_(value)
        return float(evaluated(eval_batch))


def test_examples_beyond_a_nodes_limit_do_not_count() -> None:
    """A mean over the first is that over a batch in which these repeat."""
    limits = (B, 2, 1)
    strategy = DiLoCoStrategy("sgd", H=2, lr=0.3)
    _, batches, _, _ = setting()
    places = torch.stack([torch.arange(B) % limit for limit in limits])
    same = [tuple(torch.stack([x[i][at] for i, at in enumerate(places)]) for x in batch) for batch in batches]
    model, _, eval_batch, engine = setting()
    wanted = rollout(model, strategy, same, num_nodes=K, eval_batch=eval_batch, engine=engine)
    whole = outcome_of(strategy)
    lr = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    found = outcome_of(DiLoCoStrategy("sgd", H=2, lr=lr), limits=limits)
    assert_close(found.loss.detach(), wanted.loss, 1e-12)
    assert abs(float(whole.loss - wanted.loss)) > 1e-4
    (by_lr,) = torch.autograd.grad(found.loss, lr)
    segments = outcome_of(DiLoCoStrategy("sgd", H=2, lr=lr), limits=limits, segments=2)
    assert_close(torch.autograd.grad(segments.loss, lr)[0], by_lr, 1e-12)
    assert float(by_lr) == pytest.approx(
        slope(lambda h: float(outcome_of(DiLoCoStrategy("sgd", H=2, lr=0.3 + h), limits=limits).loss)), abs=1e-8
    )
    both = outcome_of(strategy, limits=[None, limits], num_runs=2)
    assert_close(both.loss, torch.stack([whole.loss, wanted.loss]), 1e-12)
    here = torch.ones(T, K, dtype=torch.bool)
    here[1, 2] = here[2, 1] = False  # these nodes read one batch behind the others from then on
    apart = Trace(here, rejoin="own")
    wanted = rollout(
        model, strategy, same, num_nodes=K, eval_batch=eval_batch, engine=engine, num_examples=(5, 2, 3),
        availability=apart,
    )  # fmt: skip
    assert_close(outcome_of(strategy, limits=limits, availability=apart).loss, wanted.loss, 1e-12)


def slope(f: Callable[[float], float], step: float = 1e-4) -> float:
    """f'(0) by the central differences of fourth order."""
    return (8 * (f(step) - f(-step)) - (f(2 * step) - f(-2 * step))) / (12 * step)


def test_a_rollout_that_nobody_differentiates_may_be_under_no_grad() -> None:
    model, batches, eval_batch, _ = setting()
    given = {"num_nodes": K, "eval_batch": eval_batch}
    with torch.no_grad():  # and with an engine that has not looked at the model yet
        found = rollout(model, DiLoCoStrategy("sgd", lr=0.1, H=2), batches, **given)
    assert not found.loss.requires_grad
    assert found.loss == rollout(model, DiLoCoStrategy("sgd", lr=0.1, H=2), batches, **given).loss


# ------------------------------------------------------------------------------ every strategy, every number

Values = dict[str, Any]
Make = Callable[..., Strategy]


def inner(name: str, **fixed: Any) -> Make:
    """AllReduce with this optimizer; `beta1, beta2` and the like make pairs."""
    pairs = {"betas": ("beta1", "beta2"), "etas": ("eta1", "eta2")}

    def make(**numbers: Any) -> Strategy:
        for pair, halves in pairs.items():
            if halves[0] in numbers:
                numbers[pair] = tuple(numbers.pop(half) for half in halves)
        return AllReduceStrategy(OptimSpec(name, **numbers, **fixed))

    return make


def nesterov(**numbers: Any) -> OptimSpec:
    return OptimSpec(SGD, **{"lr": 0.7, "momentum": 0.9, "nesterov": True} | numbers)


def modules(*made: Exchange, lr: Any = 0.1, momentum: Any = 0.9) -> Strategy:
    return CommunicateOptimizeStrategy(list(made), OptimSpec(SGD, lr=lr, momentum=momentum))


def server(name: str) -> Make:
    def make(server_lr: Any, beta_1: Any = 0.5, beta_2: Any = 0.9, tau: Any = 0.1) -> Strategy:
        options = {"server_betas": (beta_1, beta_2), "server_tau": tau} if name != "avg" else {}
        return FedAvgStrategy(OptimSpec(SGD, lr=0.3), H=2, server_optim=name, server_lr=server_lr, **options)

    return make


ADAPTIVE = {"server_lr": 0.1, "beta_1": 0.5, "beta_2": 0.9, "tau": 0.1}
BETAS = {"beta1": 0.8, "beta2": 0.95}
WEIGHTS = torch.tensor([0.2, 0.0, 0.9, 0.5, 1.0, 0.3], dtype=F64)  # 0 and 1 are in it
MATRIX = 0.5 * ring(K) + 0.5 * torch.eye(K, dtype=F64)
EVERY_LR = {"lr": torch.tensor([[0.3], [0.1], [0.2], [0.4], [0.2], [0.1]], dtype=F64)}


def of_biases(**options: Any) -> Any:
    """Settings of vectors that differ from those of matrices."""
    return lambda name, p: {} if p.dim() == 2 else options


# name -> (a strategy of its numbers, where to differentiate)
CASES: dict[str, tuple[Make, Values]] = {
    "sgd": (inner("sgd", dampening=0.0), {"lr": 0.3, "momentum": 0.8, "weight_decay": 0.1}),
    "sgd-dampened": (inner("sgd"), {"lr": 0.3, "momentum": 0.8, "dampening": 0.3}),
    "sgd-nesterov": (inner("sgd", nesterov=True), {"lr": 0.3, "momentum": 0.8, "weight_decay": 0.1}),
    "adam": (inner("adam"), {"lr": 0.02, **BETAS, "eps": 0.01, "weight_decay": 0.1}),
    "adamw": (inner("adamw"), {"lr": 0.02, **BETAS, "eps": 0.01, "weight_decay": 0.5}),
    "amsgrad": (inner("adam", amsgrad=True), {"lr": 0.02, **BETAS}),
    "rmsprop": (inner("rmsprop"), {"lr": 0.02, "alpha": 0.9, "eps": 0.01, "momentum": 0.5, "weight_decay": 0.1}),
    "adagrad": (inner("adagrad"), {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1, "eps": 0.01}),
    "nadam": (inner("nadam"), {"lr": 0.02, **BETAS, "momentum_decay": 0.04, "weight_decay": 0.1}),
    "radam": (inner("radam"), {"lr": 0.1, **BETAS, "weight_decay": 0.1}),
    "adamax": (inner("adamax"), {"lr": 0.02, **BETAS, "weight_decay": 0.1}),
    "adadelta": (inner("adadelta"), {"lr": 1.0, "rho": 0.8, "eps": 0.01, "weight_decay": 0.1}),
    "rprop": (inner("rprop"), {"lr": 0.02, "eta1": 0.5, "eta2": 1.2}),
    "clipping": (lambda lr, max_norm: AllReduceStrategy("sgd", lr=lr, max_norm=max_norm), {"lr": 0.3, "max_norm": 0.2}),
    "fedavg": (lambda lr: FedAvgStrategy("sgd", H=2, lr=lr), {"lr": 0.3}),
    "fedavg-islands": (lambda lr: FedAvgStrategy("sgd", H=2, island_size=2, lr=lr), {"lr": 0.3}),
    "fedavg-participation": (lambda lr: FedAvgStrategy("adam", H=2, participation=0.7, lr=lr), {"lr": 0.02}),
    "fedavg-participation-each-node": (
        lambda lr: FedAvgStrategy("sgd", H=2, participation=0.7, lr=lr),
        {"lr": torch.tensor([0.1, 0.3, 0.2], dtype=F64)},
    ),
    "scaffold": (
        lambda lr, server_lr: SCAFFOLDStrategy("sgd", 2, lr=lr, server_lr=server_lr), {"lr": 0.3, "server_lr": 0.7},
    ),
    "scaffold-sample-each-node": (
        lambda lr, decay: SCAFFOLDStrategy(OptimSpec(SGD, lr=lr, weight_decay=decay), 2, participation=0.7),
        {"lr": torch.tensor([0.3, 0.1, 0.2], dtype=F64), "decay": torch.tensor([0.1, 0.2, 0.3], dtype=F64)},
    ),
    "mime": (
        lambda lr, server_lr, momentum: MimeStrategy(OptimSpec(SGD, lr=lr, momentum=momentum), 2, server_lr=server_lr),
        {"lr": 0.3, "server_lr": 0.7, "momentum": 0.5},
    ),
    "mime-lite-sample": (lambda lr: MimeStrategy("adam", 2, participation=0.7, lite=True, lr=lr), {"lr": 0.02}),
    "fedavg-examples": (lambda lr: FedAvgStrategy("sgd", H=2, weighting="examples", lr=lr), {"lr": 0.3}),
    "fedprox": (
        lambda lr, mu: FedAvgStrategy("sgd", H=3, proximal_mu=mu, lr=lr),
        {"lr": 0.3, "mu": 0.5},
    ),
    "server-avg": (server("avg"), {"server_lr": 0.7}),
    "server-avgm": (server("avgm"), {"server_lr": 0.7, "beta_1": 0.5}),
    "server-adam": (server("adam"), ADAPTIVE),
    "server-yogi": (server("yogi"), ADAPTIVE),
    "server-adagrad": (server("adagrad"), {"server_lr": 0.1, "beta_1": 0.5, "tau": 0.1}),
    "averaging-relaxed": (
        lambda lr, sync_weight: FedAvgStrategy(OptimSpec(SGD, lr=lr, momentum=0.9), sync_weight=sync_weight),
        {"lr": 0.1, "sync_weight": WEIGHTS},
    ),
    "islands-relaxed": (
        lambda sync_weight: FedAvgStrategy("sgd", lr=0.3, island_size=2, sync_weight=sync_weight),
        {"sync_weight": WEIGHTS},
    ),
    "participation-relaxed": (
        lambda sync_weight: FedAvgStrategy("sgd", lr=0.3, participation=0.7, sync_weight=sync_weight),
        {"sync_weight": WEIGHTS},
    ),
    "diloco": (
        lambda lr, outer_lr, momentum: DiLoCoStrategy("sgd", nesterov(lr=outer_lr, momentum=momentum), H=2, lr=lr),
        {"lr": 0.3, "outer_lr": 0.7, "momentum": 0.9},
    ),
    "edit": (
        lambda lr, outer_lr, temperature, clip: EDiTStrategy(
            "sgd", nesterov(lr=outer_lr, momentum=0.8), H=2, clip=clip, temperature=temperature, lr=lr
        ),
        {"lr": 0.3, "outer_lr": 0.7, "temperature": 0.1, "clip": 0.2},
    ),
    "edit-anomalies": (
        lambda lr, temperature: EDiTStrategy(
            "sgd", nesterov(lr=0.7, momentum=0.8), H=1, skip_anomalies=True, warmup=2, threshold=0.01,
            temperature=temperature, lr=lr,
        ),
        {"lr": 0.3, "temperature": 0.1},
    ),
    "diloco-adamw": (
        lambda lr, outer_lr, wd: DiLoCoStrategy(OptimSpec("adamw", lr=lr, weight_decay=wd), H=3, outer_lr=outer_lr),
        {"lr": 0.02, "outer_lr": 0.7, "wd": 0.5},
    ),
    "diloco-outer-adam": (
        lambda outer_lr, beta1, beta2: DiLoCoStrategy(
            "sgd", OptimSpec("adam", lr=outer_lr, betas=(beta1, beta2), eps=0.01), H=2, lr=0.3
        ),
        {"outer_lr": 0.05, **BETAS},
    ),
    "streaming": (
        lambda lr, outer_lr, momentum, alpha: StreamingDiLoCoStrategy(
            "sgd", nesterov(lr=outer_lr, momentum=momentum), H=2, num_fragments=2, delay=1, alpha=alpha, lr=lr
        ),
        {"lr": 0.3, "outer_lr": 0.4, "momentum": 0.9, "alpha": 0.5},
    ),
    "streaming-of-each-node": (
        lambda alpha: StreamingDiLoCoStrategy("sgd", H=3, num_fragments=2, delay=[2, 0, 1], alpha=alpha, lr=0.3),
        {"alpha": torch.tensor([0.2, 0.5, 0.9], dtype=F64)},
    ),
    "sparseloco": (  # what a code leaves behind is a constant to derivatives: exact for one exchange
        lambda outer_lr: SparseLoCoStrategy("sgd", H=4, k=3, chunk=4, bits=None, outer_lr=outer_lr, lr=0.3),
        {"outer_lr": 0.7},
    ),
    "diloco-restarts": (
        lambda lr, outer_lr, momentum: DiLoCoStrategy(
            "sgd", nesterov(lr=outer_lr, momentum=momentum), H=1, lr=lr, restart=2
        ),
        {"lr": 0.3, "outer_lr": 0.7, "momentum": 0.9},
    ),
    "dsm": (
        lambda lr, outer_lr, wd: DSMStrategy("sgd", 2, lr=lr, outer_lr=outer_lr, weight_decay=wd),
        {"lr": 0.2, "outer_lr": 0.7, "wd": 0.3},
    ),
    "eager": (
        lambda lr, outer_lr, momentum: EagerDiLoCoStrategy("sgd", nesterov(lr=outer_lr, momentum=momentum), H=2, lr=lr),
        {"lr": 0.3, "outer_lr": 0.7, "momentum": 0.9},
    ),
    "diloco-relaxed": (
        lambda lr, outer_lr, sync_weight: DiLoCoStrategy("sgd", lr=lr, outer_lr=outer_lr, sync_weight=sync_weight),
        {"lr": 0.3, "outer_lr": 0.7, "sync_weight": WEIGHTS},
    ),
    "diloco-outer-adam-relaxed": (
        lambda outer_lr, beta1, beta2, sync_weight: DiLoCoStrategy(
            "sgd", OptimSpec("adam", lr=outer_lr, betas=(beta1, beta2), eps=0.01), lr=0.3, sync_weight=sync_weight
        ),
        {"outer_lr": 0.05, **BETAS, "sync_weight": WEIGHTS},
    ),
    "participation-fednova": (
        lambda lr, momentum, beta: FedNovaStrategy(
            OptimSpec("sgd", lr=lr, momentum=momentum), local_steps=[1, 3, 2], server_momentum=beta
        ),
        {"lr": 0.2, "momentum": 0.5, "beta": 0.4},
    ),
    "participation-fednova-proximal": (
        lambda lr, mu: FedNovaStrategy("sgd", local_steps=[1, 3, 2], proximal_mu=mu, lr=lr), {"lr": 0.2, "mu": 0.8},
    ),
    "fednova-of-each-node": (
        lambda lr: FedNovaStrategy("sgd", 2, lr=lr), {"lr": torch.tensor([0.3, 0.1, 0.2], dtype=F64)},
    ),
    "feddyn": (lambda lr, alpha: FedDynStrategy("sgd", 2, alpha=alpha, lr=lr), {"lr": 0.2, "alpha": 0.5}),
    "participation-feddyn": (
        lambda lr, alpha: FedDynStrategy("adam", 2, 0.7, alpha=alpha, lr=lr), {"lr": 0.02, "alpha": 0.5},
    ),
    "scaffnew": (lambda lr: ScaffnewStrategy("sgd", 0.5, lr=lr), {"lr": 0.3}),
    "scaffnew-of-each-node": (
        lambda lr: ScaffnewStrategy("sgd", 0.5, lr=lr), {"lr": torch.tensor([0.3, 0.1, 0.2], dtype=F64)},
    ),
    "local-adam": (
        lambda lr, beta1, beta2: LocalAdamStrategy(OptimSpec("adamw", lr=lr, betas=(beta1, beta2), eps=0.01), 2),
        {"lr": 0.02, **BETAS},
    ),
    "des-loc": (
        lambda lr, beta2: DESLOCStrategy(OptimSpec("adam", lr=lr, betas=(0.8, beta2), eps=0.01), 2, 3, 4),
        {"lr": 0.02, "beta2": 0.95},
    ),
    "muloco": (  # one round: what Muon rounds does not depend on these
        lambda outer_lr, momentum: MuLoCoStrategy(nesterov(lr=outer_lr, momentum=momentum), 6, lr=0.05, adamw_lr=0.02),
        {"outer_lr": 0.8, "momentum": 0.9},
    ),
    "gpa": (
        lambda lr, wd, mu_x, mu_y: GPAStrategy(OptimSpec("adamw", lr=lr, weight_decay=wd, eps=0.01), mu_x, mu_y),
        {"lr": 0.05, "wd": 0.5, "mu_x": 0.6, "mu_y": 0.7},
    ),
    "palsgd": (
        lambda lr, pull, outer_lr: PALSGDStrategy("sgd", 0.3, 4, lr=lr, pull=pull, outer_lr=outer_lr),
        {"lr": 0.2, "pull": 0.8, "outer_lr": 0.7},
    ),
    "palsgd-of-each-node": (
        lambda pull: PALSGDStrategy("sgd", 0.5, 6, lr=0.2, pull=pull),
        {"pull": torch.tensor([0.3, 0.7, 0.5], dtype=F64)},
    ),
    "diloco-heloco": (
        lambda lr, outer_lr, momentum: DiLoCoStrategy(
            "sgd", nesterov(lr=outer_lr, momentum=momentum), 1, lr=lr, correction="heloco"
        ),
        {"lr": 0.3, "outer_lr": 0.7, "momentum": 0.9},
    ),
    "diloco-median-norm": (
        lambda lr, outer_lr: DiLoCoStrategy("sgd", H=2, lr=lr, outer_lr=outer_lr, correction="median_norm"),
        {"lr": 0.3, "outer_lr": 0.7},
    ),
    "noloco": (
        lambda lr, outer_lr, momentum, gamma: NoLoCoStrategy(
            "sgd", 2, lr=lr, outer_lr=outer_lr, momentum=momentum, gamma=gamma
        ),
        {"lr": 0.3, "outer_lr": 0.7, "momentum": 0.5, "gamma": 0.8},
    ),
    "noloco-of-each-node": (
        lambda outer_lr: NoLoCoStrategy("sgd", 2, lr=0.3, outer_lr=outer_lr),
        {"outer_lr": torch.tensor([0.3, 0.7, 0.5], dtype=F64)},
    ),
    "gossip": (lambda lr: GossipStrategy("ring", inner_optim="sgd", lr=lr), {"lr": 0.3}),
    "gossip-matching": (lambda lr: GossipStrategy("one_peer_exponential", 2, "sgd", lr=lr), {"lr": 0.3}),
    "gradient-tracking": (lambda lr: GradientTrackingStrategy("ring", inner_optim="sgd", lr=lr), {"lr": 0.3}),
    "qgm": (lambda lr, momentum: QGMStrategy("ring", momentum=momentum, lr=lr), {"lr": 0.3, "momentum": 0.5}),
    "qgm-of-each-node": (
        lambda lr, momentum: QGMStrategy("ring", momentum=momentum, lr=lr, nesterov=True),
        {"lr": torch.tensor([0.3, 0.1, 0.2], dtype=F64), "momentum": torch.tensor([0.5, 0.9, 0.3], dtype=F64)},
    ),
    "relaysum": (lambda lr: RelaySumStrategy("double_binary_tree", "sgd", lr=lr), {"lr": 0.3}),
    "matcha": (lambda lr: MATCHAStrategy("ring", "sgd", lr=lr), {"lr": 0.3}),
    "sgp": (
        lambda lr: SGPStrategy([[0.5, 0.0, 0.5], [0.5, 0.5, 0.2], [0.0, 0.5, 0.3]], inner_optim="sgd", lr=lr),
        {"lr": 0.3},
    ),
    "choco-of-everything": (
        lambda lr: CHOCOStrategy("ring", "sgd", codec=TopK(1.0), consensus=0.5, lr=lr), {"lr": 0.3},
    ),
    "d2": (
        lambda lr, momentum: D2Strategy("ring", OptimSpec(SGD, lr=lr, momentum=momentum)),
        {"lr": 0.3, "momentum": 0.5},
    ),
    "exact-diffusion": (lambda lr: ExactDiffusionStrategy("ring", inner_optim="adam", lr=lr), {"lr": 0.02}),
    "sparta": (lambda lr: SPARTAStrategy(0.3, "sgd", lr=lr), {"lr": 0.3}),
    "sparta-delayed": (
        lambda lr: SPARTAStrategy(None, "adam", index_selector=PartitionedSelector(0.5), delay=1, lr=lr),
        {"lr": 0.02},
    ),
    "sparta-delayed-corrected": (
        lambda lr: SPARTAStrategy(0.5, "adam", delay=2, correct_delay=True, lr=lr),
        {"lr": 0.02},
    ),
    "sparta-diloco": (
        lambda lr, outer_lr: SPARTADiLoCoStrategy(0.3, 2, 3, "sgd", lr=lr, outer_lr=outer_lr),
        {"lr": 0.3, "outer_lr": 0.7},
    ),
    "every": (
        lambda lr, outer_lr: modules(every(2, Exchange(Outer(Mean(), nesterov(lr=outer_lr)))), lr=lr),
        {"lr": 0.1, "outer_lr": 0.7},
    ),
    "delayed": (
        lambda momentum: modules(Exchange(Mean(), every=2, delay=1, late="change"), momentum=momentum),
        {"momentum": 0.5},
    ),
    "topk-of-everything": (  # a code that loses nothing: straight-through is then exact
        lambda lr: modules(Exchange(Compressed(Mean(), TopK(1.0)), of="gradients"), lr=lr),
        {"lr": 0.1},
    ),
    "topk-of-everything-diloco": (
        lambda outer_lr: modules(Exchange(Outer(Compressed(Mean(), TopK(1.0)), nesterov(lr=outer_lr)), every=2)),
        {"outer_lr": 0.7},
    ),
    "ring-of-everything": (
        lambda lr: AllReduceStrategy("sgd", lr=lr, average=Ring(TopK(1.0))), {"lr": 0.1},
    ),
    "topk-sparse": (lambda lr: modules(Exchange(MostMoved(0.3)), lr=lr), {"lr": 0.1}),
    "demo": (lambda lr, wd: DeMoStrategy(compression_topk=4, weight_decay=wd, lr=lr), {"lr": 0.02, "wd": 0.5}),
    "demo-weight-decay-of-each-step": (
        lambda wd: DeMoStrategy(compression_topk=4, weight_decay=wd, lr=0.02),
        {"wd": torch.linspace(0.2, 0.9, T, dtype=F64)[:, None]},
    ),
    "demo-without-sign": (
        lambda lr, decay: modules(Exchange(StrongestCosines(decay, 4), of="gradients"), lr=lr, momentum=0.0),
        {"lr": 0.3, "decay": 0.9},
    ),
    "schedule-as-a-function": (
        lambda factor: AllReduceStrategy("sgd", lr=0.3, lr_scheduler=lambda t: factor**t),
        {"factor": 0.9},
    ),
    "warm-up-and-cosine": (
        lambda lr: AllReduceStrategy("adamw", lr=lr, warmup_steps=2, cosine_anneal=True),
        {"lr": 0.05},
    ),
    "lr-of-each-step": (lambda lr: FedAvgStrategy("sgd", H=2, lr=lr), EVERY_LR),
    "lr-of-each-node": (lambda lr: FedAvgStrategy("adam", H=2, lr=lr), {"lr": torch.tensor([0.01, 0.03, 0.02])}),
    "lr-of-each-step-and-node": (lambda lr: FedAvgStrategy("sgd", H=2, lr=lr), {"lr": 0.3 + 0.05 * draw(T, K, seed=5)}),
    "lr-of-each-step-and-node-participation": (
        lambda lr: FedAvgStrategy("sgd", H=2, participation=0.7, lr=lr), {"lr": 0.3 + 0.05 * draw(T, K, seed=5)},
    ),
    "momentum-of-each-step": (
        lambda momentum: AllReduceStrategy(OptimSpec(SGD, lr=0.3, momentum=momentum)),
        {"momentum": torch.linspace(0.2, 0.9, T, dtype=F64)[:, None]},
    ),
    "outer-lr-of-each-round": (
        lambda outer_lr: DiLoCoStrategy("sgd", H=2, lr=0.3, outer_lr=outer_lr),
        {"outer_lr": torch.tensor([[0.9], [0.5], [0.7]], dtype=F64)},
    ),
    "lr-of-each-step-of-groups": (
        lambda lr, biases: FedAvgStrategy(OptimSpec("sgd", lr=lr, param_groups=of_biases(lr=biases)), H=2),
        {**EVERY_LR, "biases": 0.4 + 0.05 * draw(T, 1, seed=5)},
    ),
    "lr-of-each-step-of-a-group": (  # the rate of the others is one number
        lambda lr, biases: FedAvgStrategy(OptimSpec("sgd", lr=lr, param_groups=of_biases(lr=biases)), H=2),
        {"lr": 0.3, "biases": 0.4 + 0.05 * draw(T, K, seed=5)},
    ),
    "participation-settings-of-each-step-of-another-optimizer": (
        lambda lr, beta, wd: FedAvgStrategy(
            OptimSpec("sgd", lr=0.2, param_groups=of_biases(optim="adamw", lr=lr, betas=(beta, 0.9), weight_decay=wd)),
            H=2, cosine_anneal=True, participation=0.7,
        ),
        {"lr": 0.05 + 0.005 * draw(T, 1, seed=5), "beta": 0.8, "wd": torch.linspace(0.2, 0.9, T, dtype=F64)[:, None]},
    ),
}  # fmt: skip


EVERY_ENTRY = ("streaming-of-each-node", "lr-of-each-step", "lr-of-each-node", "lr-of-each-step-and-node",
               "outer-lr-of-each-round", "demo-weight-decay-of-each-step", "lr-of-each-step-of-groups",
               "lr-of-each-step-of-a-group")  # fmt: skip
# A maximum or signs in the rule: smaller steps, to stay on one side.
KINKED = ("adamax", "rprop", "dsm", "demo", "demo-weight-decay-of-each-step")


def points(values: Values) -> dict[str, Tensor]:
    return {name: torch.as_tensor(v, dtype=F64).clone().requires_grad_() for name, v in values.items()}


def test_every_exported_strategy_has_a_case() -> None:
    names = {name for name in vecgym.strategy.__all__ if name.endswith("Strategy")}
    made = {type(make(**points(values))).__name__ for make, values in CASES.values()}
    other = {"SimpleReduceStrategy", "Strategy", "RankStrategy"}  # AllReduce; independent nodes; not differentiable
    other |= {name for name in names if getattr(vecgym.strategy, name).asynchronous}  # test_asynchronous.py has theirs
    assert names - other <= made


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_equals_finite_differences(case: str) -> None:
    make, values = CASES[case]
    at = points(values)
    found = torch.autograd.grad(outcome_of(make(**at)).loss, list(at.values()))
    for (name, x), gradient in zip(at.items(), found):
        assert gradient.shape == x.shape
        influences = []
        for i in range(x.numel()):
            if name == "sync_weight" and x.flatten()[i].item() in (0.0, 1.0):
                continue  # no step to both sides: see the next test

            def changed(step: float, name: str = name, i: int = i) -> float:
                plain = {n: v.detach().clone() for n, v in at.items()}
                plain[name].view(-1)[i] += step
                # Nodes read at their own steps, or ahead, as `rollout` lets them.
                if case.startswith(("participation", "mime")):
                    return outcome_of(make(**plain)).loss.item()
                return trained_loss(make(**plain))

            expected = slope(changed, 1e-6 if case in KINKED else 1e-4)
            influences.append(abs(expected))
            assert gradient.flatten()[i].item() == pytest.approx(expected, rel=1e-6, abs=1e-11), f"{name}[{i}]"
        assert max(influences) > 1e-6, f"{name} has too little effect to be tested"
        assert case not in EVERY_ENTRY or min(influences) > 1e-7, f"{name} has entries without effect"


RELAXED: dict[str, Callable[[Any], Strategy]] = {
    "averaging": lambda w: FedAvgStrategy(OptimSpec(SGD, lr=0.1, momentum=0.9), sync_weight=w),
    "diloco": lambda w: DiLoCoStrategy("sgd", lr=0.3, sync_weight=w),
    "diloco-outer-adam": lambda w: DiLoCoStrategy("sgd", OptimSpec("adam", lr=0.05, eps=0.01), lr=0.3, sync_weight=w),
}


@pytest.mark.parametrize("name", RELAXED)
def test_the_gradient_at_the_ends_of_a_schedule(name: str) -> None:
    """The derivative at a weight of 0 or 1 is that of the side that is allowed."""
    weights = torch.tensor([0.0, 0.0, 1.0, 0.0, 1.0, 1.0], dtype=F64, requires_grad=True)
    (found,) = torch.autograd.grad(outcome_of(RELAXED[name](weights)).loss, weights)
    for t in range(T):
        inward = 1 if weights[t].item() == 0 else -1

        def loss(step: float, t: int = t, inward: int = inward) -> float:
            changed = weights.detach().clone()
            changed[t] += inward * step
            return trained_loss(RELAXED[name](changed))

        f = [loss(i * 1e-5) for i in range(5)]
        expected = inward * (-25 * f[0] + 48 * f[1] - 36 * f[2] + 16 * f[3] - 3 * f[4]) / (12 * 1e-5)
        assert found[t].item() == pytest.approx(expected, rel=1e-6, abs=1e-9), t
    assert found[:-1].abs().min() > 1e-6  # an average after the last step changes nothing


# -------------------------------------------------------------------------------- a relaxed schedule at 0 and 1

EVERY_TWO = [0, 1] * (T // 2)
EVERY: dict[str, Callable[..., Strategy]] = {
    "averaging": lambda **when: FedAvgStrategy("adamw", lr=0.02, **when),
    "islands": lambda **when: FedAvgStrategy("sgd", lr=0.3, island_size=2, **when),
    "diloco": lambda **when: DiLoCoStrategy("adamw", lr=0.02, **when),
    "diloco-outer-adam": lambda **when: DiLoCoStrategy("sgd", OptimSpec("adam", lr=0.05), lr=0.3, **when),
}


@pytest.mark.parametrize("name", EVERY)
def test_zeros_and_ones_are_exactly_every_H(name: str) -> None:
    """... with derivatives and without, in values, losses and bytes."""
    expected = outcome_of(EVERY[name](H=2))
    for weights in (EVERY_TWO, torch.tensor(EVERY_TWO, dtype=F64, requires_grad=True)):
        found = outcome_of(EVERY[name](sync_weight=weights))
        # With derivatives, an outer Adam raises its betas to a power that is a tensor, which may round otherwise.
        assert_close(found._asdict(), expected._asdict(), 1e-14 if isinstance(weights, Tensor) else 0)
    assert expected.bytes[1] > 0
    assert expected.bytes[0] == 0


@pytest.mark.parametrize("name", EVERY)
def test_a_schedule_of_zeros_and_ones_trains_as_every_H(name: str) -> None:
    def fit(**when: Any) -> Trainer:
        trainer = Trainer(setting()[0], TensorDataset(*toy_data()))
        trainer.fit(EVERY[name](**when), num_nodes=K, max_steps=T, batch_size=B, progress=False)
        return trainer

    found, expected = fit(sync_weight=EVERY_TWO), fit(H=2)
    assert list(found.ledger) == list(expected.ledger)
    assert {entry.step for entry in found.ledger} == {1, 3, 5}
    for path, p in found.nodes.params.items():
        assert torch.equal(p, expected.nodes.params[path])


def test_a_schedule_between_0_and_1_trains_too_and_sends_everything() -> None:
    trainer = Trainer(setting()[0], TensorDataset(*toy_data()))
    strategy = FedAvgStrategy("sgd", lr=0.3, sync_weight=[0.5, 0, 0, 1, 0, 0.5])
    trainer.fit(strategy, num_nodes=K, max_steps=T, batch_size=B, progress=False)
    whole = 2 * (K - 1) / K * 8 * sum(p.numel() for p in setting()[0].parameters())
    assert [entry.step for entry in trainer.ledger] == [0, 3, 5]
    assert all(entry.sent_bytes == pytest.approx(whole) for entry in trainer.ledger)


def test_the_relaxed_average_is_what_it_says() -> None:
    """theta_i <- (1 - a) theta_i + a mean theta, in a single step with learning rate 0."""
    start = {name: draw(K, *p.shape, seed=3) for name, p in setting()[0].named_parameters()}
    weights = [0.25, 0, 0, 0, 0, 0]
    found = outcome_of(FedAvgStrategy("sgd", lr=0.0, sync_weight=weights), params=start).params
    for name, p in start.items():
        assert_close(found[name], 0.75 * p + 0.25 * p.mean(0), 1e-14)


def test_the_relaxed_outer_step_is_what_it_says() -> None:
    """(theta, m, theta_i) <- (1 - a) (theta, m, theta_i) + a (their outer step), by hand, on a / 2 (x - c_i)^2."""
    weights, lr, eta, mu = [0.3, 1.0, 0.0, 0.6], 0.2, 0.7, 0.8
    c = torch.tensor([1.0, 4.0], dtype=F64)

    class Bowl(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.zeros((), dtype=F64))

        def forward(self, c: Tensor) -> Tensor:
            return 0.5 * (self.x - c).square().mean()

    strategy = DiLoCoStrategy("sgd", nesterov(lr=eta, momentum=mu), lr=lr, sync_weight=weights)
    found = rollout(Bowl(), strategy, c.expand(4, 2)[..., None], num_nodes=2, eval_batch=c)
    nodes_x, outer, m = torch.zeros(2, dtype=F64), torch.zeros((), dtype=F64), torch.zeros((), dtype=F64)
    distances = []
    for a in weights:
        nodes_x = nodes_x - lr * (nodes_x - c)
        delta = outer - nodes_x.mean()
        stepped = mu * m + delta
        new = outer - eta * (delta + mu * stepped)
        m, outer, nodes_x = (1 - a) * m + a * stepped, (1 - a) * outer + a * new, (1 - a) * nodes_x + a * new
        distances.append((nodes_x - nodes_x.mean()).square().mean().sqrt())
    assert_close(found.params["x"], nodes_x, 1e-13)
    assert_close(found.consensus_distance, torch.stack(distances), 1e-13)
    assert_close(found.loss, 0.5 * (nodes_x.mean() - c).square().mean(), 1e-13)
    assert_close(found.bytes, 8 * torch.tensor(weights, dtype=F64), 1e-13)  # 2 (K - 1) / K * 8 bytes * 1 parameter


def test_an_outer_adam_counts_steps_in_part() -> None:
    """By hand: t <- t + a, and the bias corrections of a step are those of t + 1."""
    weights, lr, eta, b1, b2, eps = [0.3, 0.0, 0.6, 1.0], 0.2, 0.1, 0.8, 0.9, 0.01
    outer_optim = OptimSpec("adam", lr=eta, betas=(b1, b2), eps=eps)
    strategy = DiLoCoStrategy("sgd", outer_optim, lr=lr, sync_weight=weights)
    found = rollout(Parabola(), strategy, torch.zeros(4, 2, 1), num_nodes=2, eval_batch=torch.zeros(1))
    x = outer = 2.0
    m = v = t = 0.0
    for a in weights:
        x = x - lr * 0.3 * x
        delta = outer - x
        m1, v1 = b1 * m + (1 - b1) * delta, b2 * v + (1 - b2) * delta**2
        new = outer - eta * m1 / (1 - b1 ** (t + 1)) / (math.sqrt(v1 / (1 - b2 ** (t + 1))) + eps)
        m, v, t = (1 - a) * m + a * m1, (1 - a) * v + a * v1, t + a
        outer, x = (1 - a) * outer + a * new, (1 - a) * x + a * new
    assert_close(found.params["x"], torch.full((2,), x, dtype=F64), 1e-13)


# ------------------------------------------------------------------------------------------- numbers per step


@pytest.mark.parametrize("columns", [1, K])
@pytest.mark.parametrize("participation", [1.0, 0.7])
def test_a_learning_rate_per_step_is_a_schedule(columns: int, participation: float) -> None:
    rates = 0.2 + 0.1 * torch.rand(T, columns, dtype=F64, generator=torch.Generator().manual_seed(0))

    def strategy(lr: Any, schedule: Any = None) -> Strategy:
        return FedAvgStrategy("adam", H=2, participation=participation, lr=lr, lr_scheduler=schedule)

    expected = outcome_of(strategy(1.0, lambda t: rates[t] if columns > 1 else rates[t, 0]))
    assert_close(outcome_of(strategy(rates))._asdict(), expected._asdict(), 1e-14)
    assert trained_loss(strategy(rates)) == pytest.approx(expected.loss.item(), rel=1e-13)
    trainer = Trainer(setting()[0], TensorDataset(*toy_data()))
    trainer.fit(strategy(rates), num_nodes=K, max_steps=T, batch_size=B, progress=False)
    assert trainer.history["lr"] == pytest.approx(rates.mean(1).tolist())


def test_equal_rates_for_each_step_of_a_group_are_one_rate() -> None:
    model, data = setting()[0], TensorDataset(*toy_data())
    losses = []
    for rate in (0.02, torch.full((T, 1), 0.02, dtype=F64), torch.full((T, K), 0.02, dtype=F64)):
        strategy = MuLoCoStrategy(H=2, lr=0.05, adamw_lr=rate, full_precision=True, cosine_anneal=True)
        trainer = Trainer(model, data)
        trainer.fit(strategy, num_nodes=K, max_steps=T, batch_size=B, device="cpu", progress=False)
        losses.append(trainer.history["train_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    assert losses[2] == pytest.approx(losses[0], rel=1e-12)


def test_a_group_with_too_few_steps_says_so() -> None:
    spec = OptimSpec("sgd", lr=0.2, param_groups=of_biases(lr=torch.ones(T - 1, 1)))
    with pytest.raises(ValueError, match=r"shape \[5, 1\] has no value for step 5: give one for each"):
        outcome_of(FedAvgStrategy(spec, H=2))


def test_an_outer_rate_per_round() -> None:
    """Parabola, outer SGD without momentum: theta <- (1 - eta_r d) theta."""
    rates = torch.tensor([[0.9], [0.2], [0.5]], dtype=F64)
    strategy = DiLoCoStrategy("sgd", OptimSpec(SGD, lr=rates), H=2, lr=0.4)
    found = rollout(Parabola(), strategy, torch.zeros(6, 2, 1), num_nodes=2, eval_batch=torch.zeros(1))
    d = 1 - (1 - 0.4 * 0.3) ** 2
    assert_close(found.params["x"], 2 * (1 - rates * d).prod().reshape(1), 1e-13)


def test_the_derivative_at_a_momentum_of_0() -> None:
    """There is no momentum buffer at 0, unless a derivative is taken there."""
    zero = torch.tensor(0.0, dtype=F64)
    loss = lambda momentum: outcome_of(modules(Exchange(Mean(), every=2), momentum=momentum)).loss  # noqa: E731
    # Only momenta >= 0 are allowed: one-sided differences of fourth order.
    f = [float(loss(i * 1e-3)) for i in range(5)]
    expected = (-25 * f[0] + 48 * f[1] - 36 * f[2] + 16 * f[3] - 3 * f[4]) / 12e-3
    leaf = zero.clone().requires_grad_()
    for found in (
        torch.autograd.grad(loss(leaf), leaf)[0],
        torch.func.grad(loss)(zero),
        torch.func.jvp(loss, (zero,), (torch.ones_like(zero),))[1],
    ):
        assert found.item() == pytest.approx(expected, rel=1e-6)
    assert abs(expected) > 1e-3


# ---------------------------------------------------------------------------------- the run is the trainer's


def toy_data() -> tuple[Tensor, Tensor]:
    x = draw(60, 4, seed=4)
    return x, labels(x)


TRAINED: dict[str, Callable[[], Strategy]] = {
    "allreduce": lambda: AllReduceStrategy("adamw", lr=0.01, max_norm=0.5),
    "fedavg": lambda: FedAvgStrategy("sgd", H=2, island_size=2, lr=0.1),
    "fedavg-participation": lambda: FedAvgStrategy("adam", H=2, participation=0.7, lr=0.01),
    "diloco": lambda: DiLoCoStrategy("adamw", H=2, lr=0.01, cosine_anneal=True),
    "gossip": lambda: GossipStrategy("ring", inner_optim="sgd", lr=0.1),
    "sparta-diloco": lambda: SPARTADiLoCoStrategy(0.2, 1, 3, "adamw", delay=1, lr=0.01),
    "relaxed": lambda: DiLoCoStrategy("sgd", lr=0.1, sync_weight=WEIGHTS),
    "compressed": lambda: modules(Exchange(Compressed(Mean(), TopK(0.2), reference=True), every=2)),
}
MODELS = [("MLP", name) for name in TRAINED] + [("CNN", "diloco"), ("GPT", "fedavg"), ("Dropout", "fedavg"),
                                                ("LSTM", "fedavg"), ("WithFrozen", "allreduce")]  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), MODELS)
def test_the_trajectory_is_the_trainers(kind: str, name: str) -> None:
    model = make_model(kind, dtype=F64)
    (whole,) = make_batches(kind, 1, 1, batch_size=40, dtype=F64)[0]
    data = TensorDataset(*whole)
    trainer = Trainer(model, data, val_dataset=data)
    engine: EngineName = "loop" if kind == "LSTM" else "vmap"
    trainer.fit(TRAINED[name](), num_nodes=K, max_steps=T, batch_size=B, engine=engine, progress=False)
    batches = list(Batches(data, K, B, seed=42).iterate(0, T))
    found = rollout(model, TRAINED[name](), batches, num_nodes=K, eval_batch=list(whole), engine=engine)
    history = trainer.history
    assert_close(found.losses, torch.as_tensor(history.node_array("train_losses")), 1e-12, "losses")
    assert_close(found.loss, torch.tensor(history.last("val_loss"), dtype=F64), 1e-12, "final loss")
    sent = torch.tensor(history["bytes_step"][-T:], dtype=F64) * (WEIGHTS if name == "relaxed" else 1)
    assert_close(found.bytes, sent, 1e-12, "bytes")
    assert found.consensus_distance[-1].item() == pytest.approx(history.last("consensus_distance"), rel=1e-9, abs=1e-12)
    for path, p in found.params.items():
        assert_close(p, trainer.nodes.params[path], 1e-12, path)


@pytest.mark.parametrize(("kind", "segments"), [("CNN", None), ("CNN", 2), ("GPT", 2), ("LSTM", 2), ("Dropout", 2)])
def test_the_gradient_of_other_models(kind: str, segments: int | None) -> None:
    """Batch norm's running statistics, attention, what vmap cannot run, and dropout, which is drawn again alike."""
    model = make_model(kind, dtype=F64)
    batches = stacked(make_batches(kind, 4, 2, dtype=F64))
    eval_batch = make_batches(kind, 1, 1, batch_size=8, seed=1, dtype=F64)[0][0]
    engine = Engine(model, engine="loop" if kind == "LSTM" else "vmap")
    engine.prepare(batches[0])

    def outcome(lr: Any, outer_lr: Any) -> Outcome:
        strategy = DiLoCoStrategy(OptimSpec(SGD, lr=lr, momentum=0.5), H=2, outer_lr=outer_lr)
        given = segments if isinstance(lr, Tensor) else None
        return rollout(model, strategy, batches, num_nodes=2, eval_batch=eval_batch, segments=given, engine=engine)

    at = [torch.tensor(x, dtype=F64, requires_grad=True) for x in (0.1, 0.7)]
    found = torch.autograd.grad(outcome(*at).loss, at)
    with torch.no_grad():
        expected = [
            slope(lambda h: float(outcome(0.1 + h, 0.7).loss)),
            slope(lambda h: float(outcome(0.1, 0.7 + h).loss)),
        ]
    for gradient, difference in zip(found, expected):
        assert gradient.item() == pytest.approx(difference, rel=1e-6)
        assert abs(difference) > 1e-4


# ------------------------------------------------------------------------------- modes, orders, what is stored

MODES = ["sgd-nesterov", "adamw", "fedavg-participation", "server-adam", "averaging-relaxed", "diloco",
         "diloco-outer-adam-relaxed", "gossip", "sparta-delayed", "topk-of-everything", "topk-sparse",
         "demo", "demo-without-sign", "lr-of-each-step-and-node"]  # fmt: skip


@pytest.mark.parametrize("case", MODES)
def test_forward_mode_equals_reverse_mode(case: str) -> None:
    """For every tensor of the outcome."""
    make, values = CASES[case]
    at = points(values)
    model, batches, eval_batch, engine = setting()
    towards = [draw(*x.shape, seed=i) for i, x in enumerate(at.values())]

    def strategy(*numbers: Tensor) -> Strategy:
        return make(**dict(zip(at, numbers)))

    outcome, along = rollout_jvp(
        model, strategy, batches, [x.detach() for x in at.values()], towards, num_nodes=K, eval_batch=eval_batch,
        engine=engine, num_examples=(5, 2, 3),
    )  # fmt: skip
    expected = outcome_of(make(**at))
    assert_close(outcome._asdict(), expected._asdict(), 1e-14)
    for name in ("loss", "losses", "consensus_distance", "bytes"):
        y = getattr(expected, name)
        there = ~y.isnan()
        weights = draw(*y.shape, seed=7)[there]
        grads = torch.autograd.grad((weights * y[there]).sum(), list(at.values()), retain_graph=True)
        reverse = sum((g * v).sum() for g, v in zip(grads, towards))
        assert_close((weights * getattr(along, name)[there]).sum(), reverse, 1e-10, name)


def of_three(x: Tensor) -> Strategy:
    return DiLoCoStrategy("adamw", nesterov(lr=x[1], momentum=x[2]), H=2, lr=x[0] / 10)


THREE = torch.tensor([0.3, 0.7, 0.9], dtype=F64)


@pytest.mark.parametrize("participation", [0.3, 0.5])
def test_segments_where_nodes_sit_out_rounds(participation: float) -> None:
    """A node that sat out a round reads batches of steps before the segment."""
    found = []
    for segments in (None, 2, 3):
        lr = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
        strategy = FedAvgStrategy("sgd", H=2, lr=lr, participation=participation)
        loss = outcome_of(strategy, segments=segments).loss
        found.append(torch.stack([loss, *torch.autograd.grad(loss, lr)]))
    for other in found[1:]:
        assert_close(other, found[0], 1e-12)


@pytest.mark.parametrize("segments", [None, 1, 2, 4])
def test_second_derivatives(segments: int | None) -> None:
    """torch.func.hessian, the gradient of the gradient, and differences of gradients agree."""
    x = THREE.clone().requires_grad_()
    (first,) = torch.autograd.grad(outcome_of(of_three(x), segments=segments).loss, x, create_graph=True)
    found = torch.stack([torch.autograd.grad(g, x, retain_graph=True)[0] for g in first])
    expected = torch.func.hessian(lambda x: outcome_of(of_three(x)).loss)(THREE)
    assert_close(found, expected, 1e-10)

    def gradient(at: Tensor) -> Tensor:
        return torch.func.grad(lambda x: outcome_of(of_three(x)).loss)(at)

    assert_close(first, gradient(THREE), 1e-12)
    for i in range(3):
        step = 1e-5 * torch.eye(3, dtype=F64)[i]
        assert_close(found[i], (gradient(THREE + step) - gradient(THREE - step)) / 2e-5, 1e-6)


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("inner", ["adam", "adamw"])
def test_second_derivatives_of_one_node(inner: str, num_nodes: int) -> None:
    """The state of one node has its full shape in the first step, in which only the rate is a variable."""
    model = make_model("MLP", dtype=F64)
    batches = stacked(make_batches("MLP", 3, num_nodes, batch_size=4, dtype=F64))

    def loss(rate: Tensor) -> Tensor:
        strategy, at_end = Strategy(inner, lr=rate), make_batches("MLP", 1, 1, batch_size=8, dtype=F64)[0][0]
        return vecgym.rollout(model, strategy, batches, num_nodes=num_nodes, eval_batch=at_end).loss

    rate, h = torch.tensor(0.01, dtype=F64, requires_grad=True), 1e-6
    [slope] = torch.autograd.grad(loss(rate), rate, create_graph=True)
    [found] = torch.autograd.grad(slope, rate)
    by = [torch.autograd.grad(loss(at), at)[0] for at in (rate.detach() + d for d in (h, -h)) if at.requires_grad_()]
    torch.testing.assert_close(found, (by[0] - by[1]) / (2 * h), rtol=1e-5, atol=1e-6)


def test_transforms_look_at_the_model_by_themselves() -> None:
    """Without an engine prepared outside, and by the batches, too."""
    model, batches, eval_batch, _ = setting()

    def loss(lr: Tensor, x: Tensor) -> Tensor:
        own = [(x, batches[0][1]), *batches[1:]]
        return rollout(model, FedAvgStrategy("sgd", H=2, lr=lr), own, num_nodes=K, eval_batch=eval_batch).loss

    at = torch.tensor(0.3, dtype=F64), batches[0][0]
    inputs = tuple(x.clone().requires_grad_() for x in at)
    expected = torch.autograd.grad(loss(*inputs), inputs)
    assert_close(dict(enumerate(torch.func.grad(loss, (0, 1))(*at))), dict(enumerate(expected)), 1e-12)


@pytest.mark.parametrize("case", [*MODES, "sparta-diloco", "schedule-as-a-function", "islands-relaxed", "mime"])
@pytest.mark.parametrize("segments", [1, 4, T])
def test_segments_change_nothing(case: str, segments: int) -> None:
    make, values = CASES[case]
    at = points(values)
    whole, parts = outcome_of(make(**at)), outcome_of(make(**at), segments=segments)
    assert_close(parts._asdict(), whole._asdict(), 1e-14)
    for name in ("loss", "losses", "consensus_distance", "bytes"):
        of_whole, of_parts = (
            torch.autograd.grad(getattr(o, name).nansum(), list(at.values()), retain_graph=True) for o in (whole, parts)
        )
        for x, y in zip(of_parts, of_whole):
            assert_close(x, y, 1e-12, name)


def test_segments_with_numbers_that_depend_on_one_another() -> None:
    """... and with tensors in closures, initial parameters and batches."""
    model, batches, eval_batch, _ = setting()

    def gradient(segments: int | None) -> list[Tensor]:
        lr = torch.tensor(0.3, dtype=F64, requires_grad=True)
        start = {n: p.detach()[None].clone().requires_grad_() for n, p in model.named_parameters()}
        own = [(x.clone().requires_grad_(), y) for x, y in batches]
        outer = nesterov(lr=2 * lr, momentum=0.5 + lr)
        strategy = DiLoCoStrategy("sgd", outer, H=2, lr=lr, lr_scheduler=lambda t: (1 - lr) ** t)
        outcome = rollout(model, strategy, own, num_nodes=K, eval_batch=eval_batch, params=start, segments=segments)
        return list(torch.autograd.grad(outcome.loss, [lr, *start.values(), *[x for x, _ in own]]))

    for found, expected in zip(gradient(3), gradient(None)):
        assert_close(found, expected, 1e-12)
        assert expected.abs().max() > 0


def num_graph_nodes(y: Tensor) -> int:
    seen: set[Any] = set()
    todo = [y.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [after for after, _ in node.next_functions]
    return len(seen)


def test_segments_store_only_what_is_between_them() -> None:
    lr = torch.tensor(0.3, dtype=F64, requires_grad=True)
    sizes = [num_graph_nodes(outcome_of(FedAvgStrategy("sgd", H=2, lr=lr), segments=n).loss) for n in (None, 2, 3)]
    assert 4 * sizes[2] < sizes[0]
    assert sizes[1] < sizes[2] < sizes[1] + 20


GLOBAL = torch.tensor(0.9, dtype=F64, requires_grad=True)
HIDDEN = {"tensor": GLOBAL}


def test_segments_find_out_about_a_tensor_that_nothing_holds() -> None:
    lr = torch.tensor(0.3, dtype=F64, requires_grad=True)
    (expected,) = torch.autograd.grad(outcome_of(AllReduceStrategy("sgd", lr=lr, lr_scheduler=hidden)).loss, GLOBAL)
    assert expected != 0
    strategy = AllReduceStrategy("sgd", lr=lr, lr_scheduler=from_global)  # a global of a notebook is found
    assert_close(torch.autograd.grad(outcome_of(strategy, segments=2).loss, GLOBAL)[0], expected, 1e-12)
    strategy = AllReduceStrategy("sgd", lr=lr, lr_scheduler=hidden)
    with pytest.raises(ValueError, match=r"reads a tensor of shape \[\] that requires grad, but none of its objects"):
        outcome_of(strategy, segments=2).loss.backward()


def from_global(step: int) -> Any:
    return GLOBAL**step


def hidden(step: int) -> Any:
    return HIDDEN["tensor"] ** step


# ------------------------------------------------------------------------------------------------ closed forms


class Parabola(nn.Module):
    """a / 2 x^2, whatever the batch: every node does the same."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor(2.0, dtype=F64))

    def forward(self, batch: Tensor) -> Tensor:
        return 0.5 * 0.3 * self.x**2 + 0 * batch.sum()


def test_nesterov_diloco_on_a_quadratic_and_its_derivatives() -> None:
    """(theta, m) evolves by A = [[1 - eta d (1 + mu), -eta mu^2], [d, mu]], d = 1 - (1 - gamma a)^H, once a round.

    The derivatives of A^R are sums of A^i A' A^(R - 1 - i), written down here without automatic differentiation.
    """
    eta, mu, gamma, a, H, R = 0.7, 0.6, 0.4, 0.3, 3, 4
    d = 1 - (1 - gamma * a) ** H
    A = torch.tensor([[1 - eta * d * (1 + mu), -eta * mu**2], [d, mu]], dtype=F64)
    changes = {
        "eta": torch.tensor([[-d * (1 + mu), -(mu**2)], [0, 0]], dtype=F64),
        "mu": torch.tensor([[-eta * d, -2 * eta * mu], [0, 1]], dtype=F64),
        "gamma": H * a * (1 - gamma * a) ** (H - 1) * torch.tensor([[-eta * (1 + mu), 0], [1, 0]], dtype=F64),
    }
    power = torch.linalg.matrix_power
    start = torch.tensor([2.0, 0.0], dtype=F64)
    theta = (power(A, R) @ start)[0]
    at = {name: torch.tensor(v, dtype=F64, requires_grad=True) for name, v in zip(changes, (eta, mu, gamma))}
    strategy = DiLoCoStrategy("sgd", nesterov(lr=at["eta"], momentum=at["mu"]), H=H, lr=at["gamma"])
    outcome = rollout(Parabola(), strategy, torch.zeros(H * R, 2, 1), num_nodes=2, eval_batch=torch.zeros(1))
    assert_close(outcome.params["x"], theta.expand(1), 1e-13)
    found = torch.autograd.grad(outcome.loss, list(at.values()))
    for (name, change), gradient in zip(changes.items(), found):
        slope_of_theta = sum(power(A, i) @ change @ power(A, R - 1 - i) @ start for i in range(R))[0]
        assert_close(gradient, a * theta * slope_of_theta, 1e-12, name)


def test_the_hessian_of_one_step_of_descent() -> None:
    """K = 1, one step: loss (1 - lr a)^2 a x^2 / 2, whose second derivative by lr is a^3 x^2."""

    def loss(lr: Tensor) -> Tensor:
        strategy = AllReduceStrategy("sgd", lr=lr)
        return rollout(Parabola(), strategy, torch.zeros(1, 1, 1), num_nodes=1, eval_batch=torch.zeros(1)).loss

    assert_close(torch.func.hessian(loss)(torch.tensor(0.4, dtype=F64)), torch.tensor(0.3**3 * 4, dtype=F64), 1e-13)


# ----------------------------------------------------------------------------------- matrices, start, batches


def test_the_gradient_by_mixing_matrices() -> None:
    """Along directions that keep the sums of rows and columns."""
    swap = torch.tensor([[1, -1, 0], [-1, 1, 0], [0, 0, 0]], dtype=F64)
    turn = torch.tensor([[0, 1, -1], [-1, 0, 1], [1, -1, 0]], dtype=F64)
    several = torch.stack([MATRIX, ring(K), MATRIX.T])
    for start in (MATRIX, several):
        weights = start.clone().requires_grad_()
        (found,) = torch.autograd.grad(outcome_of(gossip(weights)).loss, weights)
        for direction in (swap, turn):
            for t in range(3 if start.dim() == 3 else 1):
                towards = torch.zeros_like(start)
                (towards[t] if start.dim() == 3 else towards).copy_(direction)
                expected = slope(lambda h: trained_loss(gossip(start + h * towards)))  # noqa: B023
                assert (found * towards).sum().item() == pytest.approx(expected, rel=1e-6)
                assert abs(expected) > 1e-6
        forward = torch.func.jvp(lambda w: outcome_of(gossip(w)).loss, (start,), (torch.ones_like(start),))[1]
        assert_close(forward, found.sum(), 1e-10)


def gossip(weights: Tensor) -> Strategy:
    return GossipStrategy(weights, inner_optim=OptimSpec(SGD, lr=0.2, momentum=0.5))


@pytest.mark.parametrize("rows", [1, K])
def test_the_gradient_by_the_initial_parameters(rows: int) -> None:
    start = {n: draw(rows, *p.shape, seed=i) for i, (n, p) in enumerate(setting()[0].named_parameters())}
    towards = {n: draw(*p.shape, seed=10 + i) for i, (n, p) in enumerate(start.items())}
    leaves = {n: p.clone().requires_grad_() for n, p in start.items()}
    strategy = DiLoCoStrategy("adamw", H=3, lr=0.02)
    found = torch.autograd.grad(outcome_of(strategy, params=leaves).loss, list(leaves.values()))
    expected = slope(lambda h: trained_loss(strategy, {n: p + h * towards[n] for n, p in start.items()}), 1e-6)
    assert sum(float((g * towards[n]).sum()) for g, n in zip(found, start)) == pytest.approx(expected, rel=1e-6)


def test_the_gradient_by_batches() -> None:
    """Of a tree with a leading T; integers in it are labels."""
    model, batches, eval_batch, engine = setting()
    x, y = torch.stack([b[0] for b in batches]), torch.stack([b[1] for b in batches])
    towards = draw(*x.shape, seed=11)
    leaf = x.clone().requires_grad_()
    strategy = FedAvgStrategy("sgd", H=2, lr=0.3)
    outcome = rollout(model, strategy, (leaf, y), num_nodes=K, eval_batch=eval_batch, engine=engine)
    (found,) = torch.autograd.grad(outcome.loss, leaf)
    expected = slope(lambda h: trained_loss(strategy, batches=[(x[t] + h * towards[t], y[t]) for t in range(T)]))
    assert (found * towards).sum().item() == pytest.approx(expected, rel=1e-6)


# -------------------------------------------------------------------------- no influence, and no derivative


def test_what_has_no_influence_has_gradient_0() -> None:
    one = lambda: torch.tensor(0.5, dtype=F64, requires_grad=True)  # noqa: E731
    late = one()
    start = {n: p.detach()[None].clone().requires_grad_() for n, p in setting()[0].named_parameters()}
    outcome = outcome_of(modules(Exchange(Outer(Mean(), nesterov(lr=late)), every=T)), params=start)
    by_lr = torch.autograd.grad(outcome.losses.sum(), late, retain_graph=True)
    assert by_lr[0].item() == 0  # the outer step comes after the last loss
    assert torch.autograd.grad(outcome.bytes.sum(), late)[0].item() == 0
    unused = one()
    strategy = AllReduceStrategy("sgd", lr=0.1, lr_scheduler=lambda t: 1.0 if t < T else unused)
    for segments in (None, 2):
        loss = outcome_of(strategy, segments=segments).loss
        assert torch.autograd.grad(loss, unused)[0].item() == 0
    last = lambda lr: outcome_of(modules(Exchange(Outer(Mean(), nesterov(lr=lr)), every=T))).losses.sum()  # noqa: E731
    assert torch.func.grad(last)(late.detach()) == 0


def test_the_distance_of_equal_nodes_has_derivative_0_and_not_nan() -> None:
    lr = torch.tensor(0.3, dtype=F64, requires_grad=True)
    weights = torch.tensor(EVERY_TWO, dtype=F64, requires_grad=True)
    for when in ({"H": 2}, {"sync_weight": weights}, {"H": 2, "island_size": K}):
        strategy = FedAvgStrategy("sgd", lr=lr, **when)
        outcome = outcome_of(strategy)
        (found,) = torch.autograd.grad(outcome.consensus_distance.sum(), lr)
        assert found.isfinite()
        assert outcome.consensus_distance[1] == 0


def test_codes_pass_derivatives_straight_through() -> None:
    """The derivative of a compressed average is that of the plain one, at the values that the code gave."""

    class Rounded(Average):
        """Values that `Compressed(Mean(), "int8")` sends without error feedback, by operations with .detach()."""

        def agree(self, x: Any, part: Part, memory: Memory) -> Any:
            coded, plain = part.comm.mean(tree.map(self.code, x)), part.comm.mean(x)
            return tree.map(lambda c, p: p + (c - p).detach(), coded, plain)

        def code(self, x: Tensor) -> Tensor:
            scale = (x.flatten(1).abs().amax(1) / 127).float().double().view(-1, *[1] * (x.dim() - 1))
            return (x / scale).round() * scale

    lr = torch.tensor(0.3, dtype=F64, requires_grad=True)
    found = outcome_of(modules(Exchange(Compressed(Mean(), "int8", error_feedback=False), of="gradients"), lr=lr))
    expected = outcome_of(modules(Exchange(Rounded(), of="gradients"), lr=lr))
    assert_close(found.loss, expected.loss, 1e-12)
    assert_close(torch.autograd.grad(found.loss, lr)[0], torch.autograd.grad(expected.loss, lr)[0], 1e-10)


class OwnSGD(SGD):
    pass


class Branching(Tiny):
    """A Python branch on values, which vmap cannot run."""

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = super().forward(batch)
        return loss if loss > 0.5 else 2 * loss


def test_models_that_vmap_cannot_run_go_node_by_node() -> None:
    own, batches, eval_batch, _ = setting()
    model = Branching().double()
    model.load_state_dict(own.state_dict())
    lr = torch.tensor(0.3, dtype=F64, requires_grad=True)
    strategy = FedAvgStrategy("sgd", H=2, lr=lr)
    outcome = rollout(model, strategy, batches, num_nodes=K, eval_batch=eval_batch, engine="loop")
    plain = outcome_of(strategy)
    assert outcome.losses.min() > 0.5  # so that both models are the same
    assert_close(outcome._asdict(), plain._asdict(), 1e-12)
    assert_close(torch.autograd.grad(outcome.loss, lr)[0], torch.autograd.grad(plain.loss, lr)[0], 1e-12)


def test_what_cannot_be_differentiated_is_refused_with_the_way_out() -> None:
    lr = torch.tensor(0.3, dtype=F64, requires_grad=True)
    with pytest.raises(ValueError, match=r"OwnSGD runs as it is.*use SGD, Adam"):
        outcome_of(AllReduceStrategy(OptimSpec(OwnSGD, lr=lr)))
    assert outcome_of(AllReduceStrategy(OptimSpec(OwnSGD, lr=0.3))).loss.isfinite()
    with pytest.raises(ValueError, match=r"p_sparta=tensor\(0.3.*: .*no derivative.*p_sparta=0.005.*sync_weight"):
        SPARTAStrategy(lr, "sgd", lr=0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give a sync_weight that is 0 or 1"):
        Exchange(Compressed(Mean(), "topk"), every=SyncWeight(WEIGHTS))
    with pytest.raises(ValueError, match=r"inside a transform of torch.func.*segments=None"):
        torch.func.grad(lambda x: outcome_of(of_three(x), segments=2).loss)(THREE)
    with pytest.raises(ValueError, match="requires grad"):
        trained_loss(AllReduceStrategy("sgd", lr=lr))
    model, batches = make_model("Checkpointed", dtype=F64), make_batches("Checkpointed", 1, K, dtype=F64)[0]
    with pytest.raises(RuntimeError, match=r"(?s)gradient of this model cannot be differentiated.*checkpointing"):
        rollout(
            model,
            AllReduceStrategy("sgd", lr=lr),
            stacked([batches]),
            num_nodes=K,
            eval_batch=batches[0],
            engine="loop",
        )


# -------------------------------------------------------------------------------------------------- bad input


def bad(match: str, error: type[Exception] = ValueError, **changes: Any) -> None:
    model, batches, eval_batch, _ = setting()
    given = {"strategy": FedAvgStrategy("sgd", lr=0.1), "batches": batches, "num_nodes": K, "eval_batch": eval_batch}
    with pytest.raises(error, match=match):
        rollout(model, **{**given, **changes})


def test_bad_arguments() -> None:
    model, batches, _, _ = setting()
    weights = torch.full((T,), 0.5)
    bad(r"strategy='diloco' is of type str; .* Give a Strategy", TypeError, strategy="diloco")
    bad(r"sync_weight has 4 weights and the run 6 steps", strategy=FedAvgStrategy(sync_weight=[0, 1, 0, 1]))
    bad(r"lr of the inner optimizer has shape \[5, 1\].*\[6, 1\], .* or \[6, 3\]",
        strategy=FedAvgStrategy("sgd", lr=torch.ones(5, 1)))  # fmt: skip
    bad(r"lr of the outer optimizer has shape \[6, 1\].*its 3 steps",
        strategy=DiLoCoStrategy("sgd", H=2, outer_lr=torch.ones(T, 1)))  # fmt: skip
    bad(r"batch of step 0 has a tensor of shape \[3, 4, 4\]; num_nodes=2 needs \[2, B", num_nodes=2)
    bad(r"leading sizes \[6, 7\]", batches=(torch.zeros(6, K, 2), torch.zeros(7, K)))
    bad("batches holds no batch", batches=[])
    bad("eval_batch holds no tensor", eval_batch=None)
    bad("segments=0 must be an integer >= 1", segments=0)
    bad("segments=7 is more than the 6 steps", segments=7)
    bad(
        r"only one of them has \['first.weight'\]",
        params={n: p[None] for n, p in model.named_parameters() if "t.w" not in n},
    )
    bad(r"params\['first.weight'\] has shape \[5, 4\]; \[3, \*\] or \[1, \*\].*p\[None\]",
        params=dict(model.named_parameters()))  # fmt: skip
    bad(
        r"eval_batch has a tensor of shape \[2, 4\] on meta, but the model is on cpu: move",
        eval_batch=(torch.zeros(2, 4, device="meta"), torch.zeros(2, device="meta")),
    )
    bad(r"batches has a tensor .* on meta", batches=[(x.to("meta"), y) for x, y in batches],
        engine=setting()[3])  # fmt: skip
    with pytest.raises(ValueError, match=r"sync_weight is on the device meta"):
        FedAvgStrategy(sync_weight=weights.to("meta"))
    with pytest.raises(ValueError, match="lr is on the device meta"):
        FedAvgStrategy("sgd", lr=torch.ones((), device="meta"))
    with pytest.raises(TypeError, match="rollout_jvp takes a function of the primals"):
        rollout_jvp(model, AllReduceStrategy(), batches, [weights], [weights], num_nodes=K, eval_batch=batches[0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"rollout_jvp\(\) has no argument 'segment'"):
        rollout_jvp(model, lambda w: AllReduceStrategy(), batches, [weights], [weights], num_nodes=K,
                    eval_batch=batches[0], segment=2)  # type: ignore[call-arg]  # fmt: skip


@pytest.mark.parametrize("make", [FedAvgStrategy, DiLoCoStrategy])
def test_bad_schedules(make: Any) -> None:
    with pytest.raises(ValueError, match=r"sync_weight\[1\] = 1.5; .* numbers in \[0, 1\].*clamp"):
        make(sync_weight=[0, 1.5])
    with pytest.raises(ValueError, match=r"sync_weight\[0\] = nan"):
        make(sync_weight=torch.tensor([math.nan]))
    with pytest.raises(ValueError, match=r"sync_weight has shape \[2, 2\]"):
        make(sync_weight=torch.ones(2, 2))
    with pytest.raises(TypeError, match="sync_weight takes"):
        make(sync_weight="every second")
    with pytest.raises(ValueError, match=r"H=7 and sync_weight both say when"):
        make(H=7, sync_weight=[0, 1])


def test_a_schedule_does_not_go_with_rounds() -> None:
    with pytest.raises(ValueError, match="proximal_mu works in rounds of H steps"):
        FedAvgStrategy(proximal_mu=0.1, sync_weight=[0, 1])
    with pytest.raises(ValueError, match="server_optim works in rounds of H steps"):
        FedAvgStrategy(server_optim="adam", sync_weight=[0, 1])


def test_a_matrix_must_be_doubly_stochastic() -> None:
    with pytest.raises(ValueError, match=r"row 0 sums to 1.1.*Sinkhorn"):
        GossipStrategy(MATRIX + torch.tensor([[0.1, 0, 0], [0, 0, 0], [0, 0, 0]]))


def test_weighted_bytes() -> None:
    ledger, weight = Ledger(), torch.tensor(0.25, requires_grad=True)
    transfer = Transfer("mean", payload_bytes=8, num_nodes=2)
    with ledger.recording() as transfers:
        ledger.record(transfer)
        with ledger.marking(weight=weight), ledger.marking(weight=0.5):
            ledger.record(transfer)
        ledger.record(transfer)
    step_bytes = sum(one.sent_bytes for one in transfers)
    assert isinstance(step_bytes, Tensor)
    assert step_bytes.item() == 17
    assert torch.autograd.grad(step_bytes, weight)[0].item() == 4
    ledger.add(0, transfers)
    assert ledger.total_bytes == ledger.step_bytes == 17.0
