"""Layers that stay at home: FedPer and FedBN against their naive twin, in every kind of exchange and of run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW

import vecgym
from tests.fitting import dataset, fit
from tests.helpers import assert_close, assert_same_bits, run, run_stack, stacked
from tests.models import make_batches, make_model
from tests.reference import common
from tests.reference.fedper import fedper
from tests.test_availability import Taken
from tests.test_without_gradient import Heads
from vecgym import OptimSpec, Trainer
from vecgym.availability import Trace
from vecgym.core import nodes
from vecgym.core.tree import Tree
from vecgym.models import Classifier
from vecgym.runs.rollout import rollout
from vecgym.simulation.timetable import RunFacts
from vecgym.strategy import (
    Compressed,
    DiLoCoStrategy,
    Exchange,
    FedAvgStrategy,
    Mean,
    Mix,
    Outer,
    Private,
    Robust,
    Sparse,
    Strategy,
)

K, T, F64 = 5, 48, torch.float64
MOMENTUM = OptimSpec(SGD, lr=0.1, momentum=0.9)
HEAD = ("second.weight", "second.bias")


def alike(x: Tensor) -> bool:
    return bool((x == x[:1]).all())


def data(model: str = "MLP", num_nodes: int = K, steps: int = T) -> list[Any]:
    return make_batches(model, steps, num_nodes, 3, dtype=F64)


# ------------------------------------------------------------------------------------------------------- the twin

CASES: dict[str, tuple[str, Any, dict[str, Any], dict[str, Any]]] = {
    "FedPer": ("MLP", "second.*", {}, {}),
    "FedPer, some clients": ("MLP", ["second"], {"participation": 0.6, "weighting": (3.0, 1.0, 2.0, 5.0, 4.0)},
                             {"weights": (3.0, 1.0, 2.0, 5.0, 4.0)}),
    "FedPer with FedProx": ("MLP", ["second.weight", "second.bias"], {"proximal_mu": 0.3}, {"mu": 0.3}),
    "FedBN": ("CNN", "norm?", {"participation": 0.6}, {}),
}  # fmt: skip


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("inner", [MOMENTUM, OptimSpec(AdamW, lr=0.01)], ids=["momentum", "adamw"])
@pytest.mark.parametrize("case", CASES)
def test_each_equals_its_twin(case: str, inner: OptimSpec, engine: str) -> None:
    """Losses, all parameters and buffers of all nodes, 48 steps in float64."""
    model, private, ours, theirs = CASES[case]
    start, batches = make_model(model, dtype=F64), data(model)
    result = run(start, FedAvgStrategy(inner, H=4, private=private, **ours), stacked(batches), engine=engine)
    drawn: Callable[[int], list[int]] = lambda step: list(result.active[step] or range(K))  # noqa: E731
    first = "second" if model == "MLP" else "norm"
    twin = fedper(
        start, batches, K, H=4, personal=lambda name: name.startswith(first), inner=(inner.cls, inner.kwargs),
        participants=drawn, **theirs,
    )  # fmt: skip
    assert_close(result.losses, twin.losses, 1e-10, "losses")
    for i, client in enumerate(twin.models):
        expected = {name: p.detach() for name, p in common.parameters(client).items()}
        assert_close({name: x[i] for name, x in result.params.items()}, expected, 1e-10, f"params of node {i}")
        assert_close({name: x[i] for name, x in result.buffers.items()}, dict(client.named_buffers()), 1e-10, "buffers")


# ---------------------------------------------------------------------------------------------------- identities


def test_one_local_step_is_an_exchange_of_gradients() -> None:
    start, batches = make_model("MLP", dtype=F64), stacked(data())
    fedavg = run(start, FedAvgStrategy("sgd", H=1, lr=0.1, private="second"), batches)
    exchange = Exchange(Mean(), of="gradients", private="second")
    strategy = Strategy("sgd", [exchange], lr=0.1)
    ddp = run(start, strategy, batches)
    assert_close(ddp.params, fedavg.params, 1e-12)
    assert alike(ddp.params["first.weight"])
    assert not alike(ddp.params["second.weight"])
    assert not strategy.mean_gradient, "it needs each node's own"


def test_an_outer_step_of_1_is_fedavg() -> None:
    start, batches = make_model("MLP", dtype=F64), stacked(data())
    fedavg = run(start, FedAvgStrategy(MOMENTUM, H=4, private="second"), batches)
    diloco = run(start, DiLoCoStrategy(MOMENTUM, OptimSpec(SGD, lr=1.0), H=4, private="second"), batches)
    assert_close(diloco.params, fedavg.params, 1e-12)


def test_nothing_private_is_the_same_to_the_bit() -> None:
    start, batches = make_model("MLP"), stacked(make_batches("MLP", 6, K))
    plain = run(start, FedAvgStrategy("adamw", H=2, lr=0.01), batches)
    given = run(start, FedAvgStrategy("adamw", H=2, lr=0.01, private=[]), batches)
    assert_same_bits(plain.params, given.params)


EXCHANGES: dict[str, Callable[..., Exchange]] = {
    "outer": lambda **kw: Exchange(Outer(Mean()), every=3, **kw),
    "late": lambda **kw: Exchange(Mean(), every=4, delay=2, late="change", **kw),
    "late, each its own": lambda **kw: Exchange(Mean(), every=4, delay=[1, 2, 1, 3, 0], **kw),
    "kept in part": lambda **kw: Exchange(Mean(), every=2, keep=0.3, **kw),
    "lost": lambda **kw: Exchange(Mean(), every=2, lost=0.4, **kw),
    "islands, some": lambda **kw: Exchange(Mean(2), every=2, participation=0.8, **kw),
    "fragments": lambda **kw: Exchange(Mean(), every=2, fragments=[["first.weight"], ["first.bias"]], **kw),
    "ring": lambda **kw: Exchange(Mix("ring"), **kw),
    "sparse": lambda **kw: Exchange(Sparse(0.5, Mean()), **kw),
    "codes": lambda **kw: Exchange(Outer(Compressed(Mean(), "topk")), every=2, **kw),
    "median": lambda **kw: Exchange(Robust("median"), every=2, **kw),
    "noise": lambda **kw: Exchange(Outer(Private(Mean(), 0.5, 0.1)), every=2, **kw),
    "codes of gradients": lambda **kw: Exchange(Compressed(Mean(), "int8"), of="gradients", **kw),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_the_rest_is_exchanged_as_if_it_were_the_model(name: str) -> None:
    """A frozen head is no parameter of the exchange; a private one that does not learn is the same."""

    def groups(name: str, p: Tensor) -> dict[str, Any]:
        return {"lr": 0.0} if name.startswith("second") else {}

    still = OptimSpec(SGD, lr=0.1, param_groups=groups)
    batches = stacked(make_batches("MLP", 12, K, dtype=F64))
    private = run(make_model("MLP", dtype=F64), Strategy(still, [EXCHANGES[name](private="second")]), batches)
    frozen = make_model("MLP", dtype=F64)
    for p in frozen.second.parameters():  # type: ignore[union-attr]
        p.requires_grad_(False)
    expected = run(frozen, Strategy("sgd", [EXCHANGES[name]()], lr=0.1), batches)
    assert_close({n: private.params[n] for n in ("first.weight", "first.bias")}, expected.params, 1e-12)
    assert private.comm.ledger.totals == expected.comm.ledger.totals
    for head in HEAD:
        assert not any(head in key for key in private.state.shared), "nothing private is remembered"
    assert not any(head in (entry.transfer.tensors or HEAD) for entry in private.comm.ledger for head in HEAD)


@pytest.mark.parametrize("name", EXCHANGES)
def test_private_layers_train_and_are_each_nodes_own(name: str) -> None:
    batches = stacked(make_batches("MLP", 12, K, dtype=F64))
    start = make_model("MLP", dtype=F64)
    result = run(start, Strategy("sgd", [EXCHANGES[name](private="second")], lr=0.1), batches)
    head = result.params["second.weight"]
    assert (head - start.second.weight.detach()).abs().amax((1, 2)).gt(0).all()  # type: ignore[union-attr,operator]
    assert all(not torch.equal(head[i], head[j]) for i in range(K) for j in range(i))


def test_moments_of_private_layers_stay_at_home() -> None:
    exchanges = [Exchange(Mean(), every=2, of=of, private="second") for of in ("parameters", "moments")]
    start, batches = make_model("MLP", dtype=F64), stacked(make_batches("MLP", 4, K, dtype=F64))
    result = run(start, Strategy("adam", exchanges, lr=0.01), batches)
    moments = result.state.own["optimizer"]["exp_avg"]
    assert alike(moments["first.weight"])
    assert not alike(moments["second.weight"])


# ------------------------------------------------------------------------------------------------- kinds of runs


@pytest.mark.parametrize(
    "strategy",
    [
        FedAvgStrategy("adamw", H=2, lr=0.01, participation=0.6, private="second", proximal_mu=0.1),
        DiLoCoStrategy("sgd", H=2, lr=0.1, private="second"),
        Strategy("sgd", [Exchange(Mean(), of="gradients", private="second")], lr=0.1, max_norm=0.5),
    ],
    ids=["fedavg", "diloco", "gradients"],
)
def test_real_processes_and_stacks_give_the_same_numbers(strategy: Strategy) -> None:
    train = dataset("MLP", dtype=F64)
    report = vecgym.verify(strategy, make_model("MLP"), train, num_nodes=4, num_processes=2, steps=6, dtype=F64)
    assert report.passed, report


def test_a_sweep_is_one_stack_and_equals_runs_by_themselves() -> None:
    strategies = [DiLoCoStrategy("sgd", H=2, lr=lr, private="second") for lr in (0.1, 0.02)]
    strategies += [DiLoCoStrategy("sgd", H=2, lr=0.1, private=()), DiLoCoStrategy("sgd", H=2, lr=0.1, private="first")]
    start, batches = make_model("MLP", dtype=F64), stacked(make_batches("MLP", 8, 3, dtype=F64))
    together = run_stack(start, strategies, [tuple(x.repeat(4, *[1] * (x.dim() - 1)) for x in b) for b in batches], 3)
    assert len(together.state.shared) == 3  # groups: of two rates, and two others
    for strategy, params in zip(strategies, together.params):
        assert_close(params, run(start, strategy, batches).params, 1e-12)


def test_derivatives_flow_through_private_layers() -> None:
    start, batches = make_model("MLP", dtype=F64), stacked(make_batches("MLP", 4, 2, dtype=F64))

    def loss(lr: Tensor) -> Tensor:
        strategy = FedAvgStrategy("sgd", H=2, lr=lr, private="second")
        return rollout(start, strategy, batches, num_nodes=2, eval_batch=tuple(x[0] for x in batches[0])).loss

    lr = torch.tensor(0.1, dtype=F64, requires_grad=True)
    (found,) = torch.autograd.grad(loss(lr), lr)
    expected = (loss(torch.tensor(0.1 + 1e-5, dtype=F64)) - loss(torch.tensor(0.1 - 1e-5, dtype=F64))) / 2e-5
    assert_close(found, expected, 1e-6)


@pytest.mark.parametrize("rejoin", ["shared", "neighbour"])
@pytest.mark.parametrize("make", [FedAvgStrategy, DiLoCoStrategy])
def test_a_node_returns_with_its_own_layers(make: Any, rejoin: Any) -> None:
    there = torch.ones(8, 3, dtype=torch.bool)
    there[3:5, 1] = False
    batches = stacked(make_batches("MLP", 8, 3, dtype=F64))
    strategy = make("sgd", H=2, lr=0.1, private="second")
    taken = Taken(strategy, batches, Trace(there, rejoin=rejoin), model=make_model("MLP", dtype=F64))
    states = taken.run(8, keep=True).states
    before, after = (nodes.expand(states[step].params, 3) for step in (4, 5))
    still = Taken(strategy, batches, Trace(there, rejoin="own"), model=make_model("MLP", dtype=F64)).run(8, keep=True)
    assert torch.equal(before["second.weight"][1], still.states[4].params["second.weight"][1])
    returning = [x.transfer for x in taken.simulation.comm.ledger if x.step == 5 and x.transfer.operation == "permute"]
    assert [transfer.tensors for transfer in returning] == [("first.weight", "first.bias")]
    assert not torch.equal(before["first.weight"][1], after["first.weight"][1])
    moved = after["second.weight"] - before["second.weight"]
    assert 0 < moved[1].abs().max() < 0.05, "one step of its own, and no more"
    others = nodes.expand(still.states[5].params, 3)["second.weight"]
    assert not torch.equal(others[1], after["second.weight"][1]), "its gradient is at the others' first layer"


def test_a_private_head_without_a_gradient_stands_still() -> None:
    """A node that does not use a head in a step does not move it, whatever the gradients of others."""
    x = torch.full((4, 3, 2, 4), 0.05)
    x[:, 1, :, 0] = 0.15  # node 1 uses the second head, the others the first
    y = torch.zeros(4, 3, 2, dtype=torch.long)
    batches = [(x[step] + step * 1e-3, y[step]) for step in range(4)]
    start: Any = Heads()
    exchange = Exchange(Mean(), of="gradients", private="heads.*")
    spec = OptimSpec(SGD, lr=0.1, weight_decay=0.5)  # which would move a head whose gradient is 0
    result = run(start, Strategy(spec, [exchange]), batches, engine="loop")
    for head, users in ((0, [0, 2]), (1, [1]), (2, [])):
        name = f"heads.{head}.weight"
        moved = (result.params[name] - start.heads[head].weight.detach()).flatten(1).abs().amax(1) > 0
        assert moved.nonzero().flatten().tolist() == users


# ----------------------------------------------------------------------------------------------- what is measured


def test_each_nodes_own_model_is_evaluated_and_the_runs_has_the_mean() -> None:
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0), dtype=F64)

    def turned(rank: int, num_nodes: int, train: bool) -> torch.utils.data.TensorDataset:
        own = x[20 * rank : 20 * rank + 20]
        return torch.utils.data.TensorDataset(own, ((own > 0).sum(1) + rank) % 3)

    torch.manual_seed(0)
    model = Classifier(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))).to(F64)
    trainer = Trainer(model, turned, turned)
    averaged = trainer.fit(
        FedAvgStrategy("adam", H=5, lr=0.03, private="net.2"), 3, max_steps=60, batch_size=20, device="cpu",
        progress=False,
    )  # fmt: skip
    losses = trainer.history.last("val_losses")
    for i in range(3):
        own: Any = nodes.fill(model, {name: p[i] for name, p in nodes.expand(trainer.nodes.params, 3).items()})
        inputs, labels = turned(i, 3, False).tensors
        assert losses[i] == pytest.approx(F.cross_entropy(own.net(inputs), labels).item(), rel=1e-9)
    assert trainer.history.last("val_loss_local") == pytest.approx(losses.mean())
    of_mean: Tree = {name: p.mean(0) for name, p in nodes.expand(trainer.nodes.params, 3).items()}
    assert_close({n: p.detach() for n, p in averaged.named_parameters()}, of_mean, 1e-12)
    assert trainer.history.last("val_accuracy_local") > trainer.history.last("val_accuracy") + 0.1


def test_bytes_are_those_of_what_is_not_private() -> None:
    trainer, model = fit("MLP", FedAvgStrategy("sgd", H=2, lr=0.1, private="second"), num_nodes=4, max_steps=4)
    sent = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("second"))
    assert trainer.history.last("bytes_total") == 2 * 2 * 3 / 4 * 4 * sent


# --------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("private", "error", "says"),
    [
        ("secnod.*", ValueError, r"private='secnod.\*' matches no parameter.*; near it are 'second',.*Buffers"),
        ("xyz", ValueError, r"it has first\.weight, first\.bias, second\.weight"),
        (["first", "second"], ValueError, r"\['first', 'second'\] keeps all parameters at home"),
        (3, TypeError, r"private=3 must be a pattern such as 'head\.\*', or a list"),
        ([None], TypeError, "must be a pattern"),
    ],
)
def test_patterns_that_cannot_be_meant(private: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        fit("MLP", FedAvgStrategy("sgd", H=2, lr=0.1, private=private), max_steps=2)


def test_patterns_are_checked_before_the_first_step() -> None:
    run_facts = RunFacts(2, 4, names=("a.w", "b.w"))
    strategy = DiLoCoStrategy("sgd", H=2, private="c")
    strategy.check(2, 4)  # the model is not known yet
    with pytest.raises(ValueError, match="matches no parameter"):
        strategy.check_run(run_facts)
