"""Models that choose by data which parameters they use: what has no gradient in a step is skipped, as in torch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vecgym
from vecgym import OptimSpec, Trainer, VecgymWarning
from vecgym.availability import Dropout, Trace
from vecgym.clock import Compute
from vecgym.data import Batches
from vecgym.optim import Optimizer
from vecgym.simulation.simulation import Part
from vecgym.strategy import (
    ADPSGDStrategy,
    AllReduceStrategy,
    AsyncStrategy,
    Average,
    DiLoCoStrategy,
    Exchange,
    FedAvgStrategy,
    Mean,
    OuterOptimizer,
    Strategy,
)
from vecgym.strategy.stages import Memory

K, T, B = 3, 12, 4
pytestmark = pytest.mark.filterwarnings("ignore:vmap cannot run this model")


class Experts(nn.Module):
    """A mixture of experts as it is often written: a loop over the experts that an example has chosen."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.gate = nn.Linear(4, 8)
        self.experts = nn.ModuleList(nn.Linear(4, 2) for _ in range(8))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        weight, chosen = self.gate(x).softmax(1).max(1)
        out = x.new_zeros(len(x), 2)
        for i in chosen.unique().tolist():
            hit = (chosen == i).nonzero()[:, 0]
            out = out.index_add(0, hit, weight[hit, None] * self.experts[i](x[hit]))
        return F.cross_entropy(out, y)


class Heads(nn.Module):
    """A head for each task; a batch is of one task. The last layer joins later, by a buffer that counts."""

    calls: Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.late = nn.Linear(4, 4), nn.Linear(4, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        hidden = torch.tanh(self.body(x))
        if self.training:
            self.calls += 1
        if self.calls > 4:
            hidden = hidden + self.late(hidden)
        return F.cross_entropy(self.heads[int(x[0, 0].abs() * 10) % 3](hidden), y)


class Momentum(torch.optim.Optimizer):
    """A rule of a user: its state begins with a parameter's first gradient, and it uses the norm of all of them."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            grads = [p.grad for p in group["params"] if p.grad is not None]
            norm = torch.stack([g.norm() for g in grads]).norm()
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["sum"], state["steps"] = torch.ones_like(p), 0
                state["steps"] += 1
                state["sum"].mul_(0.9).add_(p.grad / (1 + norm))
                p.data.sub_(group["lr"] / state["steps"] * state["sum"])


def data(num: int = 96) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num, 4, generator=generator).double() * 2
    return torch.utils.data.TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())


OPTIMIZERS: dict[str, tuple[Any, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (
        OptimSpec("sgd", lr=0.2, momentum=0.9, dampening=0.5, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, dampening=0.5, weight_decay=0.1),
    ),
    "adamw": (
        OptimSpec("adamw", lr=0.05, weight_decay=0.5),
        lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.5),
    ),
    "nadam": (OptimSpec("nadam", lr=0.05), lambda p: torch.optim.NAdam(p, lr=0.05)),
    "own": (OptimSpec(Momentum, lr=0.3), lambda p: Momentum(p, lr=0.3)),
}


def plain(
    model: nn.Module, make: Callable[[Any], torch.optim.Optimizer], H: int, max_norm: float = float("inf"),
    num_nodes: int = K,
) -> list[nn.Module]:  # fmt: skip
    """K modules, each with its torch optimizer; every H steps their parameters are averaged. H = 0: the gradients."""
    nodes = [copy.deepcopy(model) for _ in range(num_nodes)]
    optimizers = [make(node.parameters()) for node in nodes]
    for step, (x, y) in enumerate(Batches(data(), num_nodes, B, seed=42).iterate(0, T)):
        for k, node in enumerate(nodes):
            optimizers[k].zero_grad()
            node((x[k], y[k])).backward()
        of_each = list(zip(*[node.parameters() for node in nodes]))
        if H == 0:
            for params in of_each:
                grads = [p.grad for p in params if p.grad is not None]
                for p in params:
                    p.grad = torch.stack(grads).sum(0) / K if grads else None
        for node, optimizer in zip(nodes, optimizers):
            if max_norm < float("inf"):
                nn.utils.clip_grad_norm_(node.parameters(), max_norm)
            optimizer.step()
        if H and (step + 1) % H == 0:
            for params in of_each:
                mean = torch.stack([p.data for p in params]).mean(0)
                for p in params:
                    p.data.copy_(mean)
    return nodes


def fit(model: nn.Module, strategy: Strategy, *, filtered: bool = True, **options: Any) -> tuple[Trainer, Any]:
    trainer = Trainer(model, data())
    settings: dict[str, Any] = {
        "max_steps": T,
        "batch_size": B,
        "device": "cpu",
        "progress": False,
        "seed": 42,
        **options,
    }
    with warnings.catch_warnings():
        if filtered:
            warnings.filterwarnings("ignore", ".*never had a gradient")
        return trainer, trainer.fit(strategy, K, **settings)


def assert_nodes(trainer: Trainer, expected: list[nn.Module], tolerance: float = 1e-12) -> None:
    for name, ours in trainer.nodes.params.items():
        theirs = torch.stack([node.get_parameter(name).detach() for node in expected])
        torch.testing.assert_close(ours.expand_as(theirs), theirs, rtol=0, atol=tolerance, msg=lambda m: f"{name}: {m}")  # noqa: B023


@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", [Experts, Heads])
@pytest.mark.parametrize("H", [0, 4])
def test_a_model_that_chooses_is_trained_as_by_torch(model: Any, optimizer: str, H: int, engine: str) -> None:
    """Gradients exchanged: who has none counts as 0. Parameters exchanged: who has none skips the step."""
    spec, make = OPTIMIZERS[optimizer]
    strategy = FedAvgStrategy(spec, H=H, max_norm=0.5) if H else AllReduceStrategy(spec)
    trainer, _ = fit(model().double(), strategy, engine=engine)
    expected = plain(model().double(), make, H, 0.5 if H else float("inf"))
    # torch keeps NAdam's product of momenta in float32.
    assert_nodes(trainer, expected, 1e-7 if optimizer == "nadam" else 1e-12)


def test_a_group_with_a_value_for_each_node_keeps_it_where_gradients_are_exchanged() -> None:
    """The nodes drift apart, so that their parameters are not stored once."""
    decay = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    nodes = iter(decay.tolist())

    def make(params: Any) -> torch.optim.Optimizer:
        *others, weight, bias = params
        return torch.optim.AdamW([{"params": others}, {"params": [weight, bias], "weight_decay": next(nodes)}], lr=0.1)

    spec = OptimSpec("adamw", lr=0.1, param_groups=lambda name, p: {"weight_decay": decay} if "heads.2" in name else {})
    assert_nodes(fit(Heads().double(), AllReduceStrategy(spec))[0], plain(Heads().double(), make, 0))


def test_a_group_with_a_value_for_each_node_may_begin_without_a_gradient() -> None:
    """The first step of some nodes, none of which uses the group's parameter, says nothing about the group."""
    momentum = torch.tensor([0.0, 0.5, 0.9])
    spec = OptimSpec("sgd", lr=0.1, param_groups=lambda name, p: {"momentum": momentum} if name == "v" else {})
    optimizer, params = Optimizer(spec), {name: torch.zeros(2, 1) for name in ("v", "w")}
    state = optimizer.init(params)
    for step in range(3):
        grads = {name: torch.ones(2, 1) for name in params}
        missing = {} if step else {"v": [0, 1]}
        params, state = optimizer.step(params, grads, state, step, 0.1, nodes=[0, 2], missing=missing)
    torch.testing.assert_close(params["v"], torch.tensor([[-0.2], [-0.1 - 0.19]]))


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_a_proximal_term_depends_on_every_parameter(engine: str) -> None:
    """FedProx's loss has a gradient for parameters that the model's loss does not use."""
    mu, H = 0.5, 4
    spec, make = OPTIMIZERS["adamw"]
    trainer, _ = fit(Experts().double(), FedAvgStrategy(spec, H=H, proximal_mu=mu), engine=engine)
    expected: list[nn.Module] = [Experts().double() for _ in range(K)]
    start = [p.detach().clone() for p in expected[0].parameters()]
    optimizers = [make(node.parameters()) for node in expected]
    for step, (x, y) in enumerate(Batches(data(), K, B, seed=42).iterate(0, T)):
        for k, node in enumerate(expected):
            optimizers[k].zero_grad()
            distance = sum((p - p0).square().sum() for p, p0 in zip(node.parameters(), start))
            (node((x[k], y[k])) + mu / 2 * distance).backward()
            optimizers[k].step()
        if (step + 1) % H == 0:
            start = [torch.stack(list(each)).detach().mean(0) for each in zip(*[n.parameters() for n in expected])]
            for node in expected:
                for p, p0 in zip(node.parameters(), start):
                    p.data.copy_(p0)
    assert_nodes(trainer, expected)


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_gradients_that_are_exchanged_twice(engine: str) -> None:
    """A value that nobody has after the first exchange, nobody has after the second one."""
    spec, make = OPTIMIZERS["adamw"]
    exchanges = [Exchange(Mean(), of="gradients"), Exchange(Mean(), of="gradients")]
    trainer, _ = fit(Experts().double(), Strategy(spec, exchanges), engine=engine)
    assert_nodes(trainer, plain(Experts().double(), make, 0))


@pytest.mark.parametrize("model", [Heads, lambda: nn.Sequential(nn.Linear(4, 2))])
def test_processes_whose_node_is_absent_agree(model: Any) -> None:
    """They take the step of the parameters that all hold together."""
    table = torch.tensor([[True] * K, [False, True, True], [True, False, False], [True] * K])
    strategy = AllReduceStrategy(OptimSpec("sgd", lr=0.1, weight_decay=0.5))
    found = []
    for options in ({}, {"backend": "processes", "num_processes": K}):
        torch.manual_seed(0)
        net = model().double()
        net.spare = nn.Linear(1, 1).double()
        loss = None if model is Heads else lambda net, batch: F.cross_entropy(net[0](batch[0]), batch[1])
        trainer = Trainer(net, data(), loss_fn=loss)
        settings: dict[str, Any] = {"max_steps": 4, "batch_size": B, "device": "cpu", "progress": False, **options}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*never had a gradient")
            trainer.fit(strategy, K, availability=Trace(table, rejoin="shared"), **settings)
        found.append(trainer)
        assert torch.equal(trainer.nodes.params["spare.weight"][0], net.spare.weight)
    for name, p in found[0].nodes.params.items():
        torch.testing.assert_close(found[1].nodes.params[name], p, rtol=0, atol=1e-12)


class Ones(Average):
    """As codes do with what they left out before, it gives values where no node has a gradient."""

    def agree(self, x: Any, part: Part, memory: Memory) -> Any:
        return {name: torch.ones_like(p) for name, p in part.comm.mean(x).items()}


@pytest.mark.parametrize("max_norm", [1.0, torch.tensor([1.0, 2.0, 3.0])])
def test_what_nobody_has_is_no_part_of_the_norm(max_norm: Any) -> None:
    """As in torch's clip_grad_norm_, which leaves out a parameter whose grad is None."""
    model = Heads().double()
    model.spare = nn.Linear(50, 50).double()
    used = Heads().double()
    strategies = [Strategy(OptimSpec("sgd", lr=1.0), [Exchange(Ones(), of="gradients")], max_norm=max_norm)] * 2
    trainers = [fit(net, strategy, max_steps=1)[0] for net, strategy in zip((model, used), strategies)]
    for name, p in trainers[1].nodes.params.items():
        torch.testing.assert_close(trainers[0].nodes.params[name], p, rtol=0, atol=1e-12)


@pytest.mark.parametrize("of", ["moments", ["exp_avg", "exp_avg_sq"]])
def test_moments_of_a_scalar_that_nobody_uses_are_exchanged(of: Any) -> None:
    """The count of skips, a number for each node as its moments are, is no moment."""
    model = Heads().double()
    model.scale = nn.Parameter(torch.tensor(2.0).double())
    strategy = Strategy(OptimSpec("adamw", lr=0.05), [Exchange(Mean(), every=2, of=of)])
    trainer, averaged = fit(model, strategy)
    assert averaged.scale == 2.0
    assert trainer.history.settings["without_gradient"] == ["scale"]


def test_bytes_count_every_parameter_that_takes_gradients() -> None:
    trainer, _ = fit(Experts().double(), FedAvgStrategy("sgd", lr=0.1, H=4))
    numbers = sum(p.numel() for p in Experts().parameters())
    assert trainer.ledger.total_bytes == 3 * 2 * (K - 1) / K * 8 * numbers
    assert trainer.ledger.total_bytes == vecgym.dry_run(Experts().double(), FedAvgStrategy(H=4), K, T).total_bytes


@pytest.mark.parametrize("strategy", [AllReduceStrategy, FedAvgStrategy])
def test_parameters_that_never_had_a_gradient_are_named(strategy: Any) -> None:
    model = Experts().double()
    model.experts[3].requires_grad_(False)
    model.spare = nn.Linear(1, 1).double()
    model.gate.bias.data[5] = -1e9  # nobody chooses this one, and nobody the second
    names = [f"{part}.{name}" for part in ("experts.2", "experts.5", "spare") for name in ("weight", "bias")]
    with pytest.warns(VecgymWarning, match="6 of the model.s parameters never had a gradient.*: experts.2.weight"):
        trainer, averaged = fit(model, strategy("adamw", lr=0.01), filtered=False)
    assert trainer.history.settings["without_gradient"] == names
    for name in names:
        assert torch.equal(averaged.get_parameter(name), model.get_parameter(name))
    trainer, _ = fit(Heads().double(), strategy("adamw", lr=0.01))
    assert trainer.history.settings["without_gradient"] == []


def test_who_never_trains_has_no_say_in_that() -> None:
    """Two of three nodes are never drawn; the others' parameters without a gradient are named all the same."""
    model = Heads().double()
    model.spare = nn.Linear(1, 1).double()
    strategy = FedAvgStrategy("sgd", lr=0.1, H=2 * T, participation=1 / K)
    with pytest.warns(VecgymWarning, match="2 of the model.s parameters never had a gradient"):
        trainer, _ = fit(model, strategy, max_steps=2 * T, filtered=False)
    assert trainer.history.settings["without_gradient"] == ["spare.weight", "spare.bias"]


@pytest.mark.parametrize("make", [
    lambda lr: AllReduceStrategy("adamw", lr=lr),
    lambda lr: DiLoCoStrategy("adamw", lr=lr, H=4),
    lambda lr: FedAvgStrategy(OptimSpec("sgd", momentum=0.9), lr=lr, H=4, proximal_mu=0.1),
    lambda lr: FedAvgStrategy(OptimSpec(Momentum), lr=lr, H=4),
])  # fmt: skip
@pytest.mark.parametrize("model", [Experts, Heads])
def test_a_sweep_is_each_run_alone(model: Any, make: Callable[[float], Strategy]) -> None:
    options: dict[str, Any] = {"num_nodes": K, "max_steps": T, "batch_size": B, "device": "cpu", "progress": False}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*never had a gradient")
        result = vecgym.sweep(
            lambda seed: model(seed).double(),
            data(),
            strategy=make,
            grid={"lr": [0.05, 0.02], "seed": [1, 2]},
            keep_models=True,
            **options,
        )
    for i, row in enumerate(result.rows):
        point = row["lr"], row["seed"]
        trainer, averaged = fit(model(point[1]).double(), make(point[0]), seed=point[1])
        assert row["train_loss"] == pytest.approx(trainer.history.last("train_loss"), abs=1e-11)
        for name, p in averaged.named_parameters():
            torch.testing.assert_close(result.model(i).get_parameter(name), p, rtol=0, atol=1e-11)


@pytest.mark.parametrize("availability", [None, Dropout(0.3, mean_steps=2)])
@pytest.mark.parametrize("make", [AllReduceStrategy, lambda spec: FedAvgStrategy(spec, H=4)])
def test_a_resumed_run_is_the_uninterrupted_one(make: Any, availability: Any, tmp_path: Any) -> None:
    spec = OptimSpec("adamw", lr=0.05)
    whole, _ = fit(Heads().double(), make(spec), availability=availability)
    options: dict[str, Any] = {"availability": availability, "save_dir": tmp_path, "checkpoint_interval": 1}
    fit(Heads().double(), make(spec), stop=lambda row: row["step"] == 7, **options)
    resumed, _ = fit(Heads().double(), make(spec), resume=True, **options)
    for name, p in whole.nodes.params.items():
        assert torch.equal(p, resumed.nodes.params[name]), name


@pytest.mark.parametrize("make", [AllReduceStrategy, lambda spec: FedAvgStrategy(spec, H=4)])
@pytest.mark.parametrize("exact", [False, True])
def test_processes_agree(make: Any, exact: bool) -> None:
    """All of them know that one of them has a gradient."""
    spec = OptimSpec("adamw", lr=0.05, weight_decay=0.1)
    several: dict[str, Any] = {"backend": "processes", "num_processes": K, "exact": exact}
    runs = [fit(Experts().double(), make(spec), **options)[0] for options in ({}, several)]
    for name, p in runs[0].nodes.params.items():
        torch.testing.assert_close(p, runs[1].nodes.params[name], rtol=0, atol=1e-12)
    assert runs[0].history.settings["without_gradient"] == runs[1].history.settings["without_gradient"]


@pytest.mark.parametrize("strategy", [AllReduceStrategy, FedAvgStrategy])
def test_parts_of_a_batch_are_one_batch(strategy: Any) -> None:
    """A parameter has a gradient if any part of the batch gives it one, and skips the step otherwise."""
    runs = [
        fit(Experts().double(), strategy(OptimSpec("adamw", lr=0.05, weight_decay=0.5)), minibatch_size=size)[0]
        for size in (None, 1)
    ]
    for name, p in runs[0].nodes.params.items():
        torch.testing.assert_close(p, runs[1].nodes.params[name], rtol=0, atol=1e-10)


def test_nodes_without_threads_and_with_them() -> None:
    one, two = (fit(Experts().double(), FedAvgStrategy("adamw", H=4), engine="loop", node_threads=n)[0] for n in (1, 2))
    for name, p in one.nodes.params.items():
        assert torch.equal(p, two.nodes.params[name])


@pytest.mark.parametrize("make", [
    lambda spec: AsyncStrategy(spec, OuterOptimizer(OptimSpec("sgd", lr=1.0)), H=1),
    lambda spec: ADPSGDStrategy(spec),
])  # fmt: skip
def test_asynchronous_nodes_skip_alone(make: Any) -> None:
    """One node, which meets nobody, or a server that takes its parameters: plain training."""
    spec, of_torch = OPTIMIZERS["adamw"]
    trainer = Trainer(Heads().double(), data())
    options: dict[str, Any] = {"max_updates": T, "compute": Compute(1.0), "batch_size": B, "progress": False}
    averaged = trainer.fit(make(spec), 1, device="cpu", seed=42, **options)
    (expected,) = plain(Heads().double(), of_torch, H=T, num_nodes=1)
    torch.testing.assert_close(dict(averaged.named_parameters()), dict(expected.named_parameters()), rtol=0, atol=1e-12)
    assert trainer.history.settings["without_gradient"] == []


@pytest.mark.parametrize("make", [
    lambda lr: AllReduceStrategy(OptimSpec("adamw", weight_decay=0.1), lr=lr),
    lambda lr: FedAvgStrategy(OptimSpec("sgd", momentum=0.9, weight_decay=0.1), lr=lr, H=2),
])  # fmt: skip
def test_derivatives_through_a_model_that_chooses(make: Any) -> None:
    """Of a run whose choices do not change, by the learning rate; against the run's own values and differences."""
    batches = [tuple(x for x in batch) for batch in Batches(data(), K, B, seed=42).iterate(0, 5)]
    held_out = tuple(x[:B] for x in data().tensors)

    def loss(lr: Tensor | float) -> Tensor:
        return vecgym.rollout(Heads().double(), make(lr), batches, num_nodes=K, eval_batch=held_out, engine="loop").loss

    rate = torch.tensor(0.05, dtype=torch.float64, requires_grad=True)
    outcome = loss(rate)
    (slope,) = torch.autograd.grad(outcome, rate)
    step = 1e-5
    assert slope.item() == pytest.approx((loss(0.05 + step).item() - loss(0.05 - step).item()) / (2 * step), rel=1e-5)
    _, averaged = fit(Heads().double(), make(0.05), max_steps=5, engine="loop")
    averaged.eval()
    assert averaged(held_out).item() == pytest.approx(outcome.item(), abs=1e-12)


@pytest.mark.parametrize("optimizer", ["adamw", "own"])
def test_verify_holds_for_a_model_that_chooses(optimizer: str) -> None:
    """Also where a process has no state yet of a parameter that only others' nodes have used."""
    strategy = FedAvgStrategy(OPTIMIZERS[optimizer][0], H=2)
    report = vecgym.verify(strategy, Experts().double(), data(), num_nodes=2, num_processes=2, steps=4, batch_size=B)
    assert report.passed, report
