"""DiLoCo's family: against naive twins, identities with other strategies, and what is kept for each node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW

from tests.fitting import fit, same_run
from tests.helpers import Run, assert_close, assert_same_bits, difference, flat, run, stacked
from tests.models import make_batches, make_model
from tests.reference import common, optimizers
from tests.reference.common import Result
from tests.reference.diloco import diloco, heloco, median_norm
from tests.reference.gpa import gpa
from tests.reference.local_adam import local_adam
from tests.reference.muloco import MUON, muloco
from tests.reference.noloco import noloco
from tests.reference.palsgd import palsgd
from tests.reference.sparta import sparta
from vecgym import rollout
from vecgym.collectives import StackedCollectives
from vecgym.compress import Codec, TopK
from vecgym.core import nodes
from vecgym.core.tree import Tree
from vecgym.guide import strategies
from vecgym.optim import optimizers as steps
from vecgym.simulation.simulation import Part
from vecgym.strategy import (
    AllReduceStrategy,
    CommunicateOptimizeStrategy,
    Compressed,
    DESLOCStrategy,
    DiLoCoStrategy,
    Exchange,
    FedAvgStrategy,
    GPAStrategy,
    LocalAdamStrategy,
    Mean,
    MuLoCoStrategy,
    NoLoCoStrategy,
    OptimSpec,
    Outer,
    PALSGDStrategy,
    RandomSelector,
    Sparse,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
    Strategy,
)
from vecgym.strategy.allreduce import FAST

STEPS, K, WARMUP = 30, 5, 8
TWIN, EXACT = 1e-10, 1e-12
F64 = torch.float64


def warm(step: int) -> float:
    return min(1.0, step / WARMUP)


def data(model: str = "MLP", num_nodes: int = K, steps: int = STEPS) -> list[list[Any]]:
    return make_batches(model, steps, num_nodes, 3, dtype=F64)


def trained(
    strategy: Strategy, model: str = "MLP", num_nodes: int = K, steps: int = STEPS, **settings: Any
) -> Run:  # fmt: skip
    return run(make_model(model, dtype=F64), strategy, stacked(data(model, num_nodes, steps)), **settings)


def same_as_twin(ours: Run, theirs: Result) -> None:
    """Losses, parameters, buffers and the inner optimizers."""
    assert_close(ours.losses, theirs.losses, TWIN, "losses")
    params = [common.parameters(m) for m in theirs.models]
    assert_close(ours.params, each(params), TWIN, "params")
    assert_close(ours.buffers, each([dict(m.named_buffers()) for m in theirs.models]), TWIN, "buffers")
    for slot, values in ours.state.home["optimizer"].items():
        expected = [{n: o.state[x][slot] for n, x in p.items()} for o, p in zip(theirs.optimizers, params)]
        assert_close(nodes.expand(values, len(params)), each(expected), TWIN, slot)


def each(values: list[Any]) -> Tree:
    """The nodes' trees as one stacked tree."""
    return {name: torch.stack([x[name].detach() for x in values]) for name in values[0]}


def kept_bytes(state: Any, num_nodes: int) -> tuple[int, int]:
    """Count the bytes of a state, for each node and once for all."""
    values = [x for x in flat(state).values() if x.numel()]
    own = sum(x[0].numel() * x.element_size() for x in values if len(x) == num_nodes)
    return own, sum(x.nbytes for x in values if len(x) != num_nodes)


def kept(ours: Run, *names: str) -> tuple[int, int]:
    """Count the bytes that exchanges keep, for each node and once for all; of these names, or of all."""
    state = ours.state
    trees = [{n: x for n, x in held.items() if "/" in n} for held in (state.own, state.shared)]
    if names:
        trees = [{n: x for n, x in held.items() if n.split("/")[1].split(" ")[0] in names} for held in trees]
    num_nodes = len(ours.comm.node_ids)
    (own, none), (_, once) = (kept_bytes(held, num_nodes) for held in trees)
    assert none == 0
    return own, once


def model_bytes(model: str = "MLP") -> int:
    return sum(p.numel() * p.element_size() for p in common.parameters(make_model(model, dtype=F64)).values())


def heavy_ball(lr: float, momentum: float) -> OptimSpec:
    return OptimSpec(SGD, lr=lr, momentum=momentum)


# ----------------------------------------------------------------------------------------------------------- NoLoCo


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("group_size", [2, 3])
@pytest.mark.parametrize("model", ["MLP", "CNN"])
def test_noloco_equals_its_twin(model: str, group_size: int, engine: str) -> None:
    strategy = NoLoCoStrategy(
        "adamw", 4, group_size, lr=0.01, outer_lr=0.6, momentum=0.4, gamma=0.8, max_norm=0.3, warmup_steps=WARMUP
    )
    ours = trained(strategy, model, engine=engine)
    drawn = ours.groups
    theirs, phi, delta = noloco(
        make_model(model, dtype=F64), data(model), K, H=4, groups=lambda step: drawn[step] or (), outer_lr=0.6,
        momentum=0.4, gamma=0.8, inner=(AdamW, {"lr": 0.01}), max_norm=0.3, schedule=warm,
    )  # fmt: skip
    same_as_twin(ours, theirs)
    assert_close(ours.state.own["0.0/params"], each(phi), TWIN, "phi")
    assert_close(ours.state.own["0.0/momentum"], each(delta), TWIN, "delta")
    of_exchanges = [groups for step, groups in enumerate(drawn) if (step + 1) % 4 == 0]
    sizes = {2: [1, 2, 2], 3: [2, 3]}[group_size]
    assert all(groups is not None and sorted(map(len, groups)) == sizes for groups in of_exchanges)
    assert len(set(of_exchanges)) > 5


@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_noloco_with_one_group_is_diloco_with_a_heavy_ball(gamma: float) -> None:
    ours = trained(NoLoCoStrategy("adamw", 3, K, lr=0.01, outer_lr=0.6, momentum=0.4, gamma=gamma))
    theirs = trained(DiLoCoStrategy("adamw", heavy_ball(0.6, 0.4), H=3, lr=0.01))
    assert_close(ours.params, theirs.params, EXACT)
    other = trained(NoLoCoStrategy("adamw", 3, 2, lr=0.01, outer_lr=0.6, momentum=0.4, gamma=gamma))
    assert difference(other.params, theirs.params) > 1e-3


def test_the_mean_of_nolocos_nodes_is_a_heavy_ball_on_their_mean_movement() -> None:
    """With groups of equal size, whatever gamma: on a linear loss the movements are those of the gradients alone."""

    class Linear(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(3, dtype=F64))

        def forward(self, batch: Tensor) -> Tensor:
            return (batch * self.w).sum(-1).mean()

    batches = list(torch.randn(12, 4, 2, 3, dtype=F64, generator=torch.Generator().manual_seed(0)))
    start = NoLoCoStrategy("sgd", 3, lr=0.1, outer_lr=0.6, momentum=0.4, gamma=0.9)
    ours = run(Linear(), start, batches)
    theirs = run(Linear(), DiLoCoStrategy("sgd", heavy_ball(0.6, 0.4), H=3, lr=0.1), batches)
    assert_close(nodes.mean(ours.params), nodes.mean(theirs.params), EXACT)
    assert difference(ours.params, theirs.params) > 1e-3


def test_noloco_keeps_two_copies_for_each_node_and_sends_two() -> None:
    ours = trained(NoLoCoStrategy("adamw", 4, lr=0.01), num_nodes=4, steps=8)
    assert kept(ours) == (2 * model_bytes(), 0)
    assert ours.comm.ledger.total_bytes == 2 * 2 * model_bytes()  # two exchanges, in pairs
    together = trained(NoLoCoStrategy("adamw", 4, 4, lr=0.01), num_nodes=4, steps=8)
    assert kept(together) == (2 * model_bytes(), 0)


# -------------------------------------------------------------------------------------------- Local Adam and DES-LOC


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("model", ["MLP", "CNN"])
@pytest.mark.parametrize("name", ["Local Adam", "DES-LOC"])
def test_local_adam_and_des_loc_equal_their_twin(name: str, model: str, engine: str) -> None:
    settings: dict[str, Any] = {"lr": 0.01, "max_norm": 0.3, "warmup_steps": WARMUP}
    desynced = name == "DES-LOC"
    strategy = DESLOCStrategy("adamw", 2, **settings) if desynced else LocalAdamStrategy("adamw", 4, **settings)
    periods = {"exp_avg": 6, "exp_avg_sq": 12} if desynced else {"exp_avg": 4, "exp_avg_sq": 4}
    theirs = local_adam(
        make_model(model, dtype=F64), data(model), K, H=2 if desynced else 4, moments=periods,
        inner=(AdamW, {"lr": 0.01}), max_norm=0.3, schedule=warm,
    )  # fmt: skip
    same_as_twin(trained(strategy, model, engine=engine), theirs)


def test_des_loc_with_equal_periods_is_local_adam() -> None:
    local = trained(LocalAdamStrategy("adamw", 3, lr=0.01))
    assert_close(trained(DESLOCStrategy("adamw", 3, 3, 3, lr=0.01)).state.params, local.state.params, EXACT)
    assert difference(trained(DESLOCStrategy("adamw", 3, lr=0.01)).params, local.params) > 1e-4
    assert difference(trained(FedAvgStrategy("adamw", 3, lr=0.01)).params, local.params) > 1e-4


def test_a_local_optimizer_that_is_linear_and_averaged_at_every_step_is_ddp() -> None:
    momentum = heavy_ball(0.05, 0.9)
    assert_close(trained(LocalAdamStrategy(momentum, 1)).params, trained(AllReduceStrategy(momentum)).params, EXACT)


def test_local_adam_keeps_what_adam_keeps() -> None:
    for strategy, exchanges in ((LocalAdamStrategy("adam", 4), 3 * 2), (DESLOCStrategy("adam", 2, 4), 4 + 2 + 0)):
        ours = trained(strategy, num_nodes=4, steps=8 + 1)  # one step after the last exchange
        assert kept(ours) == (0, 0)
        assert kept_bytes(ours.state.own["optimizer"], 4) == (2 * model_bytes(), 0)
        assert ours.comm.ledger.total_bytes == exchanges * 2 * 3 / 4 * model_bytes()


# ----------------------------------------------------------------------------------------------------------- MuLoCo

MATRICES = {
    "MLP": ["first.weight", "second.weight"],
    "GPT": [f"blocks.{i}.{layer}.weight" for i in range(2) for layer in ("qkv", "out", "up", "down")],
}


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("model", MATRICES)
@pytest.mark.parametrize(("muon", "make"), [("dion", optimizers.DionMuon), ("torch", MUON)])
def test_muloco_equals_its_twin(muon: Any, make: Any, model: str, engine: str) -> None:
    numbers: dict[str, Any] = {"lr": 0.03, "adamw_lr": 0.01, "momentum": 0.8, "weight_decay": 0.1}
    outer = OptimSpec(SGD, lr=0.6, momentum=0.7, nesterov=True)
    ours = trained(
        MuLoCoStrategy(outer, 4, **numbers, muon=muon, max_norm=0.3, warmup_steps=WARMUP), model, engine=engine
    )
    theirs = muloco(
        make_model(model, dtype=F64), data(model), K, H=4, is_matrix=lambda name: name in MATRICES[model], **numbers,
        make_muon=make, outer_lr=0.6, outer_momentum=0.7, max_norm=0.3, factor=warm,
    )  # fmt: skip
    assert_close(ours.losses, theirs.losses, TWIN, "losses")
    assert_close(ours.params, each([common.parameters(m) for m in theirs.models]), TWIN, "params")
    assert_close({n: x[0] for n, x in ours.state.shared["0.0/params"].items()}, theirs.outer, TWIN, "outer")


def test_muloco_is_diloco_with_muon_and_without_matrices_with_adamw() -> None:
    nesterov = OptimSpec(SGD, lr=0.8, momentum=0.9, nesterov=True)
    kinds: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("dionmuon", {}, {}), ("dionmuon", {"full_precision": True}, {"full_precision": True}),
        ("muon", {}, {"muon": "torch"}), ("fullprecisionmuon", {}, {"muon": "torch", "full_precision": True}),
    ]  # fmt: skip
    for kind, more, settings in kinds:
        muon = OptimSpec(
            kind, lr=0.02, momentum=0.9, weight_decay=0.0, **more,
            param_groups=lambda name, p: {} if p.dim() == 2 else {"optim": "adamw", "lr": 3e-4, "weight_decay": 0.0},
        )  # fmt: skip
        expected = trained(DiLoCoStrategy(muon, nesterov, 30)).params
        assert_close(trained(MuLoCoStrategy(**settings)).params, expected, EXACT)
    none = MuLoCoStrategy(H=4, lr=0.5, adamw_lr=0.01, matrices=lambda name, p: False)
    adamw = DiLoCoStrategy(OptimSpec(AdamW, lr=0.01, weight_decay=0.0), nesterov, 4)
    assert_close(trained(none).params, trained(adamw).params, EXACT)


def test_muloco_keeps_one_moment_of_a_matrix_and_two_of_all_else() -> None:
    ours = trained(MuLoCoStrategy(H=4), num_nodes=4, steps=9)
    params = common.parameters(make_model("MLP", dtype=F64))
    matrices = 8 * sum(p.numel() for p in params.values() if p.dim() == 2)
    assert kept(ours, "params") == kept(ours, "outer") == (0, model_bytes())
    assert kept_bytes(ours.state.own["optimizer"], 4) == (matrices + 2 * (model_bytes() - matrices), 0)


def test_derivatives_of_muloco_are_those_of_its_polynomial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rounding to bfloat16, which has none."""
    monkeypatch.setattr(steps, "_newton_schulz", steps._smooth)
    batches = stacked(data(num_nodes=3, steps=6))

    def loss(numbers: Tensor) -> Tensor:
        lr, adamw_lr, momentum, decay, outer_lr = numbers
        strategy = MuLoCoStrategy(
            H=2, lr=lr, adamw_lr=adamw_lr, momentum=momentum, weight_decay=decay, outer_lr=outer_lr
        )  # fmt: skip
        start, held_out = make_model("MLP", dtype=F64), data(num_nodes=1, steps=7)[-1][0]
        return rollout(start, strategy, batches, num_nodes=3, eval_batch=held_out).loss

    at = torch.tensor([0.03, 0.01, 0.8, 0.1, 0.7], dtype=F64, requires_grad=True)
    (found,) = torch.autograd.grad(loss(at), at)
    for i, h in enumerate([1e-6] * 5):
        shift = torch.zeros(5, dtype=F64).index_fill(0, torch.tensor(i), h)
        expected = (loss(at.detach() + shift) - loss(at.detach() - shift)) / (2 * h)
        assert found[i].item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-7)
        assert abs(expected.item()) > 1e-5


# -------------------------------------------------------------------------------------------------------------- GPA


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("model", ["MLP", "CNN"])
@pytest.mark.parametrize(("num_nodes", "decay"), [(1, "paper"), (K, "paper"), (K, "code")])
def test_gpa_equals_its_twin(num_nodes: int, decay: Any, model: str, engine: str) -> None:
    inner = OptimSpec("adamw", lr=0.01, weight_decay=0.3)
    strategy = GPAStrategy(inner, mu_x=0.8, mu_y=0.6, decay=decay, max_norm=0.3, warmup_steps=WARMUP)
    ours = trained(strategy, model, num_nodes, engine=engine)
    theirs, x, z = gpa(
        make_model(model, dtype=F64), data(model, num_nodes), num_nodes, mu_x=0.8, mu_y=0.6, decay=decay,
        inner=(AdamW, {"lr": 0.01, "weight_decay": 0.3}), max_norm=0.3, schedule=warm,
    )  # fmt: skip
    assert_close(ours.losses, theirs.losses, TWIN, "losses")
    assert_close(ours.params, each([common.parameters(m) for m in theirs.models]), TWIN, "y")
    assert_close({name: value[0] for name, value in ours.state.home[FAST].items()}, z, TWIN, "z")
    found = strategy.average(ours.state)
    assert_close({name: value[0] for name, value in found.items()}, x, TWIN, "x")


@pytest.mark.parametrize("mu", [0.5, 0.9])
def test_gpa_of_sgd_is_diloco_of_single_steps(mu: float) -> None:
    """With mu_x = mu_y = mu its y is DiLoCo's theta with outer Nesterov, and its step eta gamma / (1 - mu)."""
    eta, gamma = 0.7, 0.05
    diloco = DiLoCoStrategy("sgd", OptimSpec(SGD, lr=eta, momentum=mu, nesterov=True), H=1, lr=gamma)
    ours = trained(GPAStrategy("sgd", mu, mu, lr=eta * gamma / (1 - mu)))
    assert_close(ours.params, trained(diloco).params, EXACT * 100)
    assert difference(trained(GPAStrategy("sgd", mu, mu, lr=eta * gamma)).params, ours.params) > 1e-3


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_the_decay_of_gpa_is_that_of_each_group_and_nothing_without_any(weight_decay: float) -> None:
    groups: dict[str, Any] = {"param_groups": lambda name, p: {"weight_decay": 0.0} if p.dim() == 1 else {"lr": 0.02}}
    inner = OptimSpec("adamw", lr=0.01, weight_decay=weight_decay, **groups)
    code, paper = (trained(GPAStrategy(inner, 0.8, 0.6, decay=d), steps=1).params for d in ("code", "paper"))
    z = common.parameters(make_model("MLP", dtype=F64))
    for name, x in code.items():  # y gains mu_x (1 - mu_y) lr wd z
        gained = 0.8 * 0.4 * 0.02 * weight_decay * z[name].detach() if z[name].dim() == 2 else torch.zeros_like(x[0])
        torch.testing.assert_close(x[0] - paper[name][0], gained, rtol=0, atol=1e-12)
    coupled = [trained(GPAStrategy(OptimSpec("adam", weight_decay=0.3), 0.8, 0.6, decay=d)) for d in ("code", "paper")]
    assert difference(coupled[0].params, coupled[1].params) == 0


def test_gpa_whose_average_forgets_at_once_is_ddp() -> None:
    ddp = trained(AllReduceStrategy("adamw", lr=0.01))
    assert_close(trained(GPAStrategy("adamw", mu_x=0.0, mu_y=0.7, lr=0.01)).params, ddp.params, EXACT * 100)


def test_gpa_keeps_one_copy_more_than_ddp_and_once_for_all() -> None:
    ours, ddp = (trained(s, num_nodes=4, steps=3) for s in (GPAStrategy("adam"), AllReduceStrategy("adam")))
    assert kept_bytes(ours.state.shared["optimizer"], 4) == kept_bytes(ddp.state.shared["optimizer"], 4)
    assert kept_bytes(ours.state.shared[FAST], 4) == (0, model_bytes())
    assert kept_bytes(ours.state.params, 4) == (0, model_bytes())
    assert ours.comm.ledger.total_bytes == ddp.comm.ledger.total_bytes == 3 * 1.5 * model_bytes()


# ----------------------------------------------------------------------------------------------------------- PALSGD


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("model", ["MLP", "CNN"])
def test_palsgd_equals_its_twin(model: str, engine: str) -> None:
    strategy = PALSGDStrategy(
        "adamw", 0.3, 7, lr=0.01, pull=2.0, outer_lr=0.6, max_norm=0.3, warmup_steps=WARMUP
    )  # fmt: skip
    ours = trained(strategy, model, engine=engine)
    active = ours.active

    def drawn(step: int, node: int) -> bool:
        here = active[step]
        return here is not None and node not in here

    theirs = palsgd(
        make_model(model, dtype=F64), data(model), K, H=7, p=0.3, pull=2.0, drawn=drawn, lr=0.01, outer_lr=0.6,
        max_norm=0.3, factor=warm,
    )  # fmt: skip
    same_as_twin(ours, theirs)
    assert_close({n: x[0] for n, x in ours.state.shared["0.0/params"].items()}, theirs.outer, TWIN, "outer")


def test_palsgd_draws_each_node_by_itself_as_often_as_p_says() -> None:
    ours = trained(PALSGDStrategy("sgd", 0.3, 7, lr=0.01), steps=400)
    drawn = torch.tensor([[x is not None and node not in x for node in range(K)] for x in ours.active]).double()
    assert float((drawn.mean(0) - 0.3).abs().max()) < 4 * (0.3 * 0.7 / 400) ** 0.5
    together = (drawn.T @ drawn / 400)[~torch.eye(K, dtype=torch.bool)]
    assert float((together - 0.09).abs().max()) < 4 * (0.09 * 0.91 / 400) ** 0.5


def test_palsgd_without_pulls_is_diloco() -> None:
    ours = trained(PALSGDStrategy("adamw", 0.0, 4, lr=0.01))
    assert_same_bits(ours.state, trained(DiLoCoStrategy("adamw", H=4, lr=0.01)).state)
    assert difference(trained(PALSGDStrategy("adamw", 0.1, 4, lr=0.01)).params, ours.params) > 1e-3


def test_a_pull_of_0_only_leaves_gradients_out() -> None:
    """In the first round nothing else happens to a node: it is as if its drawn steps were not there."""
    ours = trained(PALSGDStrategy("sgd", 0.5, 100, lr=0.02, pull=0.0), steps=12)
    batches = data(steps=12)
    for node in range(K):
        own = [[batches[t][node]] for t in range(12) if ours.active[t] is None or node in (ours.active[t] or ())]
        assert 0 < len(own) < 12
        alone = run(make_model("MLP", dtype=F64), Strategy("sgd", lr=0.02 / 0.5), stacked(own))
        assert_close({name: x[node] for name, x in ours.params.items()}, nodes.mean(alone.params), EXACT)


def test_palsgd_keeps_and_sends_what_diloco_does() -> None:
    ours = trained(PALSGDStrategy("adamw", 0.3, 4, lr=0.01), num_nodes=4, steps=9)
    assert kept(ours) == (0, 2 * model_bytes())
    assert ours.comm.ledger.total_bytes == 2 * 1.5 * model_bytes()


# ----------------------------------------------------------------------------------------------------------- LOSCAR


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("model", ["MLP", "CNN"])
@pytest.mark.parametrize("delay", [1, 3])
def test_a_corrected_delay_equals_its_twin(delay: int, model: str, engine: str) -> None:
    strategy = SPARTAStrategy(0.3, "adamw", delay=delay, correct_delay=True, lr=0.01, max_norm=0.3, warmup_steps=WARMUP)
    shapes = {name: p.shape for name, p in common.parameters(make_model(model, dtype=F64)).items()}

    def mask(step: int, name: str, shape: torch.Size) -> Tensor:
        index, _ = RandomSelector(0.3).select(shapes, {}, step, Part.alone(StackedCollectives(1), step=step, seed=42))
        chosen = index.get(name, torch.empty(0, dtype=torch.long))
        return torch.zeros(shape.numel(), dtype=torch.bool).index_fill(0, chosen, True).view(shape)

    theirs = sparta(
        make_model(model, dtype=F64), data(model), K, mask=mask, inner=(AdamW, {"lr": 0.01}), delay=delay, correct=True,
        max_norm=0.3, schedule=warm,
    )  # fmt: skip
    same_as_twin(trained(strategy, model, engine=engine), theirs)


def test_a_corrected_delay_is_a_delayed_change() -> None:
    ours = trained(SPARTAStrategy(0.3, "sgd", delay=2, correct_delay=True, lr=0.1))
    late = Exchange(Sparse(0.3, Mean()), delay=2, late="change")
    assert_same_bits(ours.params, trained(CommunicateOptimizeStrategy([late], "sgd", lr=0.1)).params)
    assert difference(ours.params, trained(SPARTAStrategy(0.3, "sgd", delay=2, lr=0.1)).params) > 1e-3


def test_a_corrected_delay_does_nothing_to_equal_nodes() -> None:
    """... where a late mean takes them back to where they were."""
    ours = trained(SPARTAStrategy(0.5, "adamw", delay=2, correct_delay=True, lr=0.01), num_nodes=1)
    assert_close(ours.params, trained(Strategy("adamw", lr=0.01), num_nodes=1).params, EXACT)
    assert difference(ours.params, trained(SPARTAStrategy(0.5, "adamw", delay=2, lr=0.01), num_nodes=1).params) > 1e-3


def test_a_corrected_delay_keeps_a_value_for_each_node_and_an_index_once() -> None:
    ours = trained(SPARTAStrategy(1.0, "sgd", delay=2, correct_delay=True, lr=0.1), num_nodes=4, steps=5)
    assert kept(ours, "message", "notes") == (2 * model_bytes(), 2 * model_bytes())  # 8-byte indices
    late = trained(SPARTAStrategy(1.0, "sgd", delay=2, lr=0.1), num_nodes=4, steps=5)
    assert kept(late, "message", "notes") == (0, 4 * model_bytes())
    assert ours.comm.ledger.total_bytes == late.comm.ledger.total_bytes == 5 * 1.5 * model_bytes()


# ------------------------------------------------------------------------------------ corrections of the movements


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("model", ["MLP", "CNN"])
@pytest.mark.parametrize("name", ["heloco", "median_norm"])
def test_corrected_movements_equal_their_twin(name: str, model: str, engine: str) -> None:
    seen: list[float] = []  # the cosines with the momentum: all three cases of HeLoCo happen

    def correct(moved: list[dict[str, Tensor]], momentum: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        cosines = [torch.cosine_similarity(x.flatten(), momentum[n].flatten(), 0) for m in moved for n, x in m.items()]
        seen.extend(map(float, cosines))
        return heloco(moved, momentum, 0.8) if name == "heloco" else median_norm(moved, momentum)

    outer: dict[str, Any] = {"lr": 0.6, "momentum": 0.8, "nesterov": True}
    strategy = DiLoCoStrategy("adamw", OptimSpec(SGD, **outer), 2, lr=0.01, max_norm=0.3, correction=name)
    theirs = diloco(
        make_model(model, dtype=F64), data(model, steps=50), K, H=2, inner=(AdamW, {"lr": 0.01}), outer=(SGD, outer),
        max_norm=0.3, correct=correct,
    )  # fmt: skip
    ours = trained(strategy, model, engine=engine, steps=50)
    same_as_twin(ours, theirs)
    assert min(seen) < 0 < max(seen)
    assert any(0 < c < 0.2 for c in seen)
    plain = trained(DiLoCoStrategy("adamw", OptimSpec(SGD, **outer), 2, lr=0.01, max_norm=0.3), model, steps=50)
    assert difference(ours.params, plain.params) > 1e-4


def test_the_median_norm_of_equal_nodes_changes_nothing() -> None:
    same = [batch[:1] * K for batch in data()]
    start = make_model("MLP", dtype=F64)
    ours, plain = (
        run(start, DiLoCoStrategy("adamw", H=4, lr=0.01, correction=correction), stacked(same))
        for correction in ("median_norm", None)
    )
    assert_close(ours.params, plain.params, EXACT)


def test_a_movement_of_nothing_stays_nothing() -> None:
    """Nodes that do not move have no direction, and no nan."""
    for correction in ("heloco", "median_norm"):
        ours = trained(DiLoCoStrategy("sgd", H=2, lr=0.0, correction=correction), steps=6)
        assert difference(ours.params, {n: p[None] for n, p in make_model("MLP", dtype=F64).named_parameters()}) == 0


def test_a_correction_keeps_nothing() -> None:
    for correction, more in (("heloco", 0), ("median_norm", 3 * 8 * len(make_model("MLP").state_dict()))):
        ours = trained(DiLoCoStrategy("adamw", H=4, lr=0.01, correction=correction), num_nodes=4, steps=9)
        assert kept(ours) == (0, 2 * model_bytes())
        assert ours.comm.ledger.total_bytes == 2 * (1.5 * model_bytes() + more)


# ------------------------------------------------------------------------------------------ rounds of many lengths


MAKES: dict[str, Callable[[Any], Strategy]] = {
    "fedavg": lambda H: FedAvgStrategy("adamw", H, lr=0.01),
    "fedprox": lambda H: FedAvgStrategy("adamw", H, lr=0.01, proximal_mu=0.5),
    "server": lambda H: FedAvgStrategy("adamw", H, lr=0.01, server_optim="avgm"),
    "participation": lambda H: FedAvgStrategy("adamw", H, participation=0.6, lr=0.01),
    "diloco": lambda H: DiLoCoStrategy("adamw", H=H, lr=0.01),
    "sparta-diloco": lambda H: SPARTADiLoCoStrategy(0.1, 1, H, "adamw", lr=0.01),
    "noloco": lambda H: NoLoCoStrategy("adamw", H, lr=0.01),
    "palsgd": lambda H: PALSGDStrategy("adamw", 0.3, H, lr=0.01),
    "muloco": lambda H: MuLoCoStrategy(H=H),
    "local adam": lambda H: LocalAdamStrategy("adamw", H, lr=0.01),
    "des-loc": lambda H: DESLOCStrategy("adamw", H, 4, 6, lr=0.01),
}


@pytest.mark.parametrize("name", MAKES)
def test_a_constant_function_is_its_number(name: str) -> None:
    ours, theirs = (trained(MAKES[name](H), steps=11) for H in (lambda step: 3, 3))
    assert_same_bits(ours.state, theirs.state)
    assert list(ours.comm.ledger) == list(theirs.comm.ledger)
    assert "every=<lambda>" in repr(MAKES[name](lambda step: 3))


@pytest.mark.parametrize("name", MAKES)
def test_rounds_end_where_the_function_says(name: str) -> None:
    """1 step, then 2 from step 1 on, and 4 from step 3 on: they end after steps 1, 3, 7 and 11."""
    ours = trained(MAKES[name](lambda step: 1 if step < 1 else 2 if step < 3 else 4), steps=11)
    whole = model_bytes() * (0.5 if name == "participation" else 1)  # and more, whatever the exchange
    large = {step for step, sent in sent_at(ours).items() if sent >= whole}
    assert {0, 2, 6, 10} <= large
    assert name == "des-loc" or large == {0, 2, 6, 10}


def sent_at(ours: Run) -> dict[int, float]:
    found: dict[int, float] = {}
    for transfer in ours.comm.ledger:
        found[transfer.step] = found.get(transfer.step, 0.0) + transfer.sent_bytes
    return found


def growing(step: int) -> int:
    return 1 if step < 3 else 2


def test_a_run_of_growing_rounds_goes_on_from_a_checkpoint_to_the_bit(tmp_path: Path) -> None:
    def strategy() -> Strategy:
        return DiLoCoStrategy("adamw", H=growing, lr=0.01)

    whole, _ = fit("MLP", strategy(), max_steps=8)
    fit("MLP", strategy(), max_steps=4, save_dir=tmp_path)
    resumed, _ = fit("MLP", strategy(), max_steps=8, save_dir=tmp_path, resume=True)
    assert same_run(whole, resumed)


# --------------------------------------------------------------------------------------- other names for the same


def in_rounds(
    rule: Callable[[Tensor, list[Tensor], dict[str, Any]], Tensor], H: Any = 4, num_nodes: int = K, gamma: float = 0.05
) -> Tree:
    """Plain SGD on every node; at the end of a round `rule` gives, from the start, the nodes and a memory, the next."""
    models = common.copy_model(make_model("MLP", dtype=F64), num_nodes)
    thetas = [common.parameters(m) for m in models]
    start = {name: p.detach().clone() for name, p in thetas[0].items()}
    memories: dict[str, dict[str, Any]] = {name: {"gamma": gamma} for name in start}
    left = H(0) if callable(H) else H
    for step, batch in enumerate(data(num_nodes=num_nodes)):
        for node, theta in enumerate(thetas):
            common.backward(models[node], batch[node])
            with torch.no_grad():
                for p in theta.values():
                    p.sub_(gamma * common.gradient(p))
        left -= 1
        if left == 0:
            left = H(step + 1) if callable(H) else H
            with torch.no_grad():
                for name in start:
                    start[name] = rule(start[name], [t[name].detach().clone() for t in thetas], memories[name])
                    for theta in thetas:
                        theta[name].copy_(start[name])
    return each(thetas)


def slowmo(start: Tensor, nodes_: list[Tensor], memory: dict[str, Any]) -> Tensor:
    """arXiv 1910.00643: u = beta u + (x_0 - mean x) / gamma; x = x_0 - alpha gamma u."""
    memory["u"] = 0.6 * memory.get("u", 0.0) + (start - common.mean(nodes_)) / memory["gamma"]
    return start - 0.9 * memory["gamma"] * memory["u"]


def bmuf(start: Tensor, nodes_: list[Tensor], memory: dict[str, Any]) -> Tensor:
    """Chen and Huo 2016, classical block momentum: D = eta D + zeta (mean w - w_0); w = w_0 + D."""
    memory["D"] = 0.6 * memory.get("D", 0.0) + 0.9 * (common.mean(nodes_) - start)
    return start + memory["D"]


def nesterov_bmuf(start: Tensor, nodes_: list[Tensor], memory: dict[str, Any]) -> Tensor:
    """... and Nesterov's: the nodes begin from W + eta D, where W = W + D is kept."""
    memory["D"], before = 0.6 * memory.get("D", 0.0) + 0.9 * (common.mean(nodes_) - start), memory.get("W", start)
    memory["W"] = before + memory["D"]
    return memory["W"] + 0.6 * memory["D"]


def lookahead(start: Tensor, nodes_: list[Tensor], memory: dict[str, Any]) -> Tensor:
    """arXiv 1907.08610: phi = phi + alpha (theta - phi), of one node."""
    (theta,) = nodes_
    return start + 0.5 * (theta - start)


def open_diloco(start: Tensor, nodes_: list[Tensor], memory: dict[str, Any]) -> Tensor:
    """arXiv 2407.07852: DiLoCo whose pseudo-gradients are in half precision when they are averaged."""
    delta = common.mean([(start - theta).half().double() for theta in nodes_])
    memory["m"] = 0.9 * memory.get("m", 0.0) + delta
    return start - 0.7 * (delta + 0.9 * memory["m"])


def qsparse(start: Tensor, nodes_: list[Tensor], memory: dict[str, Any]) -> Tensor:
    """arXiv 1906.02367: g_i = top-k of m_i + (x - x_i); m_i = m_i + (x - x_i) - g_i; x = x - mean g_i."""
    held, sent = memory.setdefault("m", [torch.zeros_like(start) for _ in nodes_]), []
    for i, theta in enumerate(nodes_):
        whole = (held[i] + start - theta).flatten()
        top = whole.abs().topk(max(1, round(0.2 * whole.numel()))).indices
        chosen = torch.zeros_like(whole).index_copy(0, top, whole[top]).view_as(start)
        held[i] = held[i] + start - theta - chosen
        sent.append(chosen)
    return start - common.mean(sent)


def post_local(start: Tensor, nodes_: list[Tensor], memory: dict[str, Any]) -> Tensor:
    """arXiv 1808.07217: the mean of the nodes, at every step at first and then more rarely."""
    return common.mean(nodes_)


class Half(Codec):
    """The codec of the page of strategies."""

    def encode(self, x: Tensor, draw: Any = None) -> dict[str, Tensor]:
        return {"values": x.half()}

    def decode(self, code: dict[str, Tensor], like: Tensor) -> Tensor:
        return code["values"].to(like.dtype)


HALF_MEAN = Compressed(Mean(), Half(), error_feedback=False)


def one_then_eight(step: int) -> int:
    return 1 if step < 10 else 8


# name -> (the rule, its rounds, nodes, the same as a strategy)
ALIASES: dict[str, tuple[Any, Any, int, Callable[[], Strategy]]] = {
    "SlowMo": (slowmo, 4, K, lambda: DiLoCoStrategy("sgd", heavy_ball(0.9, 0.6), H=4, lr=0.05)),
    "BMUF": (bmuf, 4, K, lambda: DiLoCoStrategy("sgd", heavy_ball(0.9, 0.6), H=4, lr=0.05)),
    "BMUF, Nesterov": (
        nesterov_bmuf, 4, K,
        lambda: DiLoCoStrategy("sgd", OptimSpec(SGD, lr=0.9, momentum=0.6, nesterov=True), H=4, lr=0.05),
    ),
    "Lookahead": (lookahead, 4, 1, lambda: DiLoCoStrategy("sgd", OptimSpec(SGD, lr=0.5), H=4, lr=0.05)),
    "OpenDiLoCo": (
        open_diloco, 4, K,
        lambda: CommunicateOptimizeStrategy([Exchange(Outer(HALF_MEAN), every=4)], "sgd", lr=0.05),
    ),
    "Qsparse-local-SGD": (
        qsparse, 4, K, lambda: DiLoCoStrategy("sgd", OptimSpec(SGD, lr=1.0), H=4, lr=0.05, compression=TopK(0.2)),
    ),
    "post-local SGD": (post_local, one_then_eight, K, lambda: FedAvgStrategy("sgd", one_then_eight, lr=0.05)),
}  # fmt: skip


@pytest.mark.parametrize("name", ALIASES)
def test_other_names_are_settings(name: str) -> None:
    rule, H, num_nodes, strategy = ALIASES[name]
    ours = trained(strategy(), num_nodes=num_nodes)
    assert_close(ours.params, in_rounds(rule, H, num_nodes), TWIN)


def test_every_other_name_is_documented() -> None:
    for name in ALIASES:
        assert f"| {name} " in (strategies.__doc__ or "")
