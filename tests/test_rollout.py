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

from tests.helpers import assert_close
from tests.models import make_batches, make_model
from vecgym import Trainer, nodes, tree
from vecgym.collectives import StackedCollectives
from vecgym.data import Batches
from vecgym.ledger import Ledger
from vecgym.local import Engine
from vecgym.optim import OptimSpec
from vecgym.rollout import Outcome, rollout, rollout_jvp
from vecgym.simulate import Simulation
from vecgym.strategy import (
    AllReduceStrategy,
    AveragingCommunicator,
    CommunicateOptimizeStrategy,
    CommunicationModule,
    DiLoCoCommunicator,
    DiLoCoStrategy,
    FedAvgStrategy,
    GradientAveraging,
    Strategy,
    SyncWeight,
)
from vecgym.strategy.compose import delayed, every
from vecgym.strategy.compression import TopKSparseCommunicator, compressed
from vecgym.strategy.gossip import GossipStrategy
from vecgym.strategy.sparta import PartitionedSelector, SPARTADiLoCoStrategy, SPARTAStrategy
from vecgym.topology import ring

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
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def labels(x: Tensor) -> Tensor:
    """What there is to learn; each node sees its inputs shifted, so that the nodes go apart."""
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
    settings = {"num_examples": (5, 2, 3), "engine": engine} | settings
    return rollout(model, strategy, batches, num_nodes=K, eval_batch=eval_batch, **settings)


def trained_loss(strategy: Strategy, params: Any = None, batches: Any = None) -> float:
    """The same loss by the step that overwrites its state: another code than that of the rollout."""
    model, own, eval_batch, engine = setting()
    comm = StackedCollectives(K)
    sim = Simulation(model, strategy, comm, engine=engine, max_steps=T, num_examples=(5, 2, 3))
    state = sim.init(params)
    for batch in own if batches is None else batches:
        state, _ = sim.step(state, batch)
    evaluated = copy.deepcopy(model).eval()
    with torch.no_grad():
        for name, value in nodes.mean(state.params).items():
            evaluated.get_parameter(name).copy_(value)
        return float(evaluated(eval_batch))


def slope(f: Callable[[float], float], step: float = 1e-4) -> float:
    """f'(0) by the central differences of fourth order."""
    return (8 * (f(step) - f(-step)) - (f(2 * step) - f(-2 * step))) / (12 * step)


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


def modules(*made: CommunicationModule, lr: Any = 0.1, momentum: Any = 0.9) -> Strategy:
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
    "gossip": (lambda lr: GossipStrategy("ring", inner_optim="sgd", lr=lr), {"lr": 0.3}),
    "gossip-matching": (lambda lr: GossipStrategy("one_peer_exponential", 2, "sgd", lr=lr), {"lr": 0.3}),
    "sparta": (lambda lr: SPARTAStrategy(0.3, "sgd", lr=lr), {"lr": 0.3}),
    "sparta-delayed": (
        lambda lr: SPARTAStrategy(None, "adam", index_selector=PartitionedSelector(0.5), delay=1, lr=lr),
        {"lr": 0.02},
    ),
    "sparta-diloco": (
        lambda lr, outer_lr: SPARTADiLoCoStrategy(0.3, 2, 3, "sgd", lr=lr, outer_lr=outer_lr),
        {"lr": 0.3, "outer_lr": 0.7},
    ),
    "every": (
        lambda lr, outer_lr: modules(every(2, DiLoCoCommunicator(H=1, outer_lr=outer_lr)) if False else
                                     every(2, DiLoCoCommunicator(nesterov(lr=outer_lr), H=1)), lr=lr),
        {"lr": 0.1, "outer_lr": 0.7},
    ),
    "delayed": (
        lambda momentum: modules(delayed(AveragingCommunicator(H=2), 1), momentum=momentum),
        {"momentum": 0.5},
    ),
    "delayed-relaxed": (
        lambda sync_weight: modules(delayed(AveragingCommunicator(sync_weight=sync_weight), 1)),
        {"sync_weight": WEIGHTS},
    ),
    "topk-of-everything": (  # a code that loses nothing: straight-through is then exact
        lambda lr: modules(compressed(GradientAveraging(), "topk", fraction=1.0), lr=lr),
        {"lr": 0.1},
    ),
    "topk-of-everything-diloco": (
        lambda outer_lr: modules(compressed(DiLoCoCommunicator(nesterov(lr=outer_lr), H=2), "topk", fraction=1.0)),
        {"outer_lr": 0.7},
    ),
    "topk-sparse": (lambda lr: modules(TopKSparseCommunicator(0.3), lr=lr), {"lr": 0.1}),
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
}  # fmt: skip


def points(values: Values) -> dict[str, Tensor]:
    return {name: torch.as_tensor(v, dtype=F64).clone().requires_grad_() for name, v in values.items()}


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_equals_finite_differences(case: str) -> None:
    make, values = CASES[case]
    at = points(values)
    found = torch.autograd.grad(outcome_of(make(**at)).loss, list(at.values()))
    for (name, x), gradient in zip(at.items(), found):
        assert gradient.shape == x.shape
        influence = 0.0
        for i in range(x.numel()):
            if name == "sync_weight" and float(x.flatten()[i]) in (0.0, 1.0):
                continue  # no step to both sides: see the next test

            def changed(step: float, name: str = name, i: int = i) -> float:
                plain = {n: v.detach().clone() for n, v in at.items()}
                plain[name].view(-1)[i] += step
                return trained_loss(make(**plain))

            expected = slope(changed, 1e-4 if float(x.flatten()[i]) > 1e-3 else 1e-5)
            influence = max(influence, abs(expected))
            assert float(gradient.flatten()[i]) == pytest.approx(expected, rel=1e-6, abs=1e-11), f"{name}[{i}]"
        assert influence > 1e-6, f"{name} has too little effect to be tested"
