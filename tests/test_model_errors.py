"""Inputs of a model that are wrong, and errors of the model or of vecgym."""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.fitting import alone, dataset, fit
from tests.models import Table
from vecgym import OptimSpec, Trainer, VecgymWarning
from vecgym.availability import Trace
from vecgym.clock import Compute
from vecgym.engine import Engine
from vecgym.runs.rollout import rollout
from vecgym.strategy import (
    ADPSGDStrategy,
    AllReduceStrategy,
    AsyncStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    OuterOptimizer,
)


class Net(nn.Module):
    """A plain network, which returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Loss(Net):
    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(self.layer(batch[0]), batch[1])


class Lightning(Net):
    def training_step(self, batch: Any, index: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


class NoForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 10)

    def training_step(self, batch: Any, index: int) -> Tensor:
        return F.cross_entropy(self.layer(batch[0]), batch[1])


class Two(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(self.layer(x), y)


class Parameterless(nn.Module):
    def forward(self, batch: Any) -> Tensor:
        return batch[0].mean()


BEFORE_A_CALL: dict[str, tuple[Any, list[str]]] = {
    "no forward": (NoForward, ["NoForward", "no forward", "training_step(batch, 0)"]),
    "two arguments": (Two, ["forward(x", "'y'", "F.cross_entropy(module(x), y)"]),
    "no parameters": (Parameterless, ["no trainable parameter", "requires_grad_(True)"]),
    "frozen": (lambda: Loss().requires_grad_(False), ["no trainable parameter"]),
    "scripted": (lambda: torch.jit.script(Net()), ["TorchScript", "give the original nn.Module"]),
    "scripted inside": (lambda: nn.Sequential(torch.jit.script(Net())), ["module '0'", "TorchScript"]),
    "traced": (lambda: torch.jit.trace(Net(), torch.zeros(2, 16)), ["TorchScript"]),
    "parallel": (lambda: nn.DataParallel(Loss()), ["DataParallel", "model.module"]),
    "parallel inside": (lambda: nn.Sequential(nn.DataParallel(Net())), ["module '0'", "model.0.module"]),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("name", BEFORE_A_CALL)
def test_what_is_no_model_is_refused_before_any_call(name: str) -> None:
    make, parts = BEFORE_A_CALL[name]
    for give in (lambda: Trainer(make(), dataset("MLP")), lambda: Engine(make())):
        with pytest.raises((ValueError, TypeError)) as raised:
            give()
        for part in parts:
            assert part in str(raised.value)


@pytest.mark.parametrize("make", [Net, Lightning])
def test_a_network_instead_of_a_model_is_told_of_loss_fn(make: type[nn.Module]) -> None:
    """It fails on the tuple; the message shows what it was given, and a loss_fn, which works."""
    for engine in ("auto", "loop"):
        with pytest.raises(RuntimeError) as raised:
            fit(make(), alone(), data=dataset("MLP"), engine=engine)
        message = str(raised.value)
        for part in (
            "first batch, [float32 [4, 16], int64 [4]]",
            "must be Tensor, not",
            "test_model_errors.py",
            "def loss(module, batch)",
        ):
            assert part in message
        assert ("training_step" in message) == (make is Lightning)
        assert "vmap" not in message
    with pytest.raises(ValueError, match=r"float32 \[4, 10\], not a scalar(?s:.*)def loss"):
        fit(make(), alone(), data=torch.zeros(24, 16))
    found: dict[str, Any] = {"F": F}
    code = message[message.index("    def loss") : message.index("\n\nin place of")]
    exec("\n".join(line[4:] for line in code.splitlines()), found)
    trainer = Trainer(make(), dataset("MLP"), loss_fn=found["loss"])
    trainer.fit(alone(), 3, batch_size=4, device="cpu", progress=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["vmap", "loop"])
def test_compiled_models_train(kind: str) -> None:
    plain, inside, in_place, around = (seeded() for _ in range(4))
    inside.layer = torch.compile(inside.layer, backend="eager")  # type: ignore[assignment]
    in_place.compile(backend="eager")
    expected = fit(plain, alone(), data=dataset("MLP"), engine=kind)[0].history["train_loss"]
    compiled: Any = torch.compile(around, backend="eager")
    for model in (compiled, inside, in_place):
        found = fit(model, alone(), data=dataset("MLP"), engine=kind)[0].history["train_loss"]
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def seeded() -> Loss:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Loss()


# ------------------------------------------------------------------------------------------------ whose error it is


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).square().mean() + self.norm.weight.sum()


class Asserting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        # A check of shapes, which vmap can do.
        assert x.shape[0] == 2, "two examples are needed"
        return (self.weight * x).mean()


TOKENS = torch.cat([torch.zeros(8, dtype=torch.long), torch.tensor([0, 99, 0, 99])])  # node 1 gets the 99
OWN: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "a token out of range": (Table, {"data": TOKENS, "batch_size": 2}, ["node 1, step 2", "IndexError", "self.table("]),
    "one example": (
        Normed, {"data": torch.randn(8, 16), "batch_size": 2, "minibatch_size": 1},
        ["node 0, step 0", "more than 1 value per channel", "self.norm(x)"],
    ),
    "an assertion": (
        Asserting, {"data": torch.ones(8, 1), "batch_size": 2, "minibatch_size": 1},
        ["node 0, step 0", "AssertionError: two examples", "assert x.shape"],
    ),
    "in validation": (
        Table, {"data": torch.zeros(8, dtype=torch.long), "val": TOKENS, "batch_size": 2},
        ["in validation", "IndexError", "self.table("],
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ["vmap", "auto", "loop"])
@pytest.mark.parametrize("strategy", ["AllReduce", "FedAvg"])
@pytest.mark.parametrize("name", OWN)
def test_an_error_of_the_model_is_its_own(name: str, strategy: str, engine: str) -> None:
    make, settings, parts = OWN[name]
    with pytest.raises(RuntimeError) as raised:
        fit(make(), strategy, num_nodes=2, shuffle=False, engine=engine, **settings)
    message = str(raised.value)
    if engine != "loop" and (engine == "vmap" or "one of" in message):  # all nodes at once
        parts = [re.sub(r"node \d", 'one of the nodes 0 to 1 (engine="loop" says which)', part) for part in parts]
    for part in [*parts, "models.py" if make is Table else "test_model_errors.py"]:
        assert part in message, f"{part!r} is not in {message!r}"
    assert message.count(", at ") == message.count("in validation") + message.count("step ") == 1, message
    assert "vmap" not in message


class LateBranch(Asserting):
    def forward(self, x: Tensor) -> Tensor:
        loss = (self.weight * x).mean()
        return loss if len(x) < 3 or loss.item() > 0 else -loss


def test_what_vmap_cannot_run_is_said_when_it_comes() -> None:
    """Also where the first batch, on which the model is tried, did not show it."""
    engine = Engine(LateBranch(), engine="vmap")
    engine.prepare(torch.ones(2, 2))
    run = functools.partial(engine.gradients, {"weight": torch.ones(1)}, {}, seed=0, step=4)
    run(torch.ones(2, 2))
    with pytest.raises(
        RuntimeError, match=r"(?s)vmap cannot run this model: .*\.item\(\).*loss if len.*engine=\"loop\""
    ):
        run(torch.ones(2, 3))


def test_an_error_of_the_model_in_a_rollout_is_its_own() -> None:
    batches = TOKENS.view(3, 2, 2).mT
    with pytest.raises(RuntimeError, match=r"nodes 0 to 1 .*, step 2: IndexError: .*self\.table") as raised:
        rollout(Table(), FedAvgStrategy("sgd"), batches, num_nodes=2, eval_batch=torch.zeros(2, dtype=torch.long))
    assert "differentiated" not in str(raised.value)


def test_rollout_takes_numpys_integers_and_refuses_what_is_none() -> None:
    data, one = torch.zeros(1, 2, 2, dtype=torch.long), torch.zeros(2, dtype=torch.long)

    def run(**settings: Any) -> Tensor:
        strategy = FedAvgStrategy("sgd", H=1, weighting="examples")
        given = {"num_nodes": 2, "num_examples": (1, 2), "eval_batch": one, **settings}
        return rollout(Table().requires_grad_(), strategy, data, **given).loss

    assert run(seed=np.int64(3), num_nodes=np.int64(2), num_examples=(np.int64(1), 2)).isfinite()
    for wrong, says in (
        ({"seed": 1.5}, "seed=1.5"),
        ({"seed": True}, "seed=True"),
        ({"num_nodes": 2.0}, "num_nodes=2.0"),
        ({"num_examples": (1,)}, "tuple of 2 integers"),
        ({"num_examples": 3}, "tuple of 2 integers"),
        ({"num_examples": (1, 0)}, r"num_examples\[1\]=0"),
    ):
        with pytest.raises((ValueError, TypeError), match=says):
            run(**wrong)


def test_a_seed_of_numpy_is_an_integer() -> None:
    batch = torch.ones(2, 3, 1)
    engine = Engine(nn_dropout(), engine="loop")
    engine.prepare(batch)
    params = {n: p.detach()[None] for n, p in engine.params.items()}
    a, b = (engine.gradients(params, {}, batch, seed=s, step=0).losses for s in (3, np.int64(3)))  # type: ignore[arg-type]
    assert torch.equal(a, b)
    Trainer(Table(), TensorDataset(TOKENS[:8]))


def nn_dropout() -> nn.Module:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.weight * x, 0.5).mean()

    return Dropped()


# -------------------------------------------------------------------------------- what a forward pass writes to


SEEN: list[Tensor] = []


class Writing(nn.Module):
    """Changes its weights in every forward pass, in one of several ways; `SEEN` are the batches of training."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.w, self.way = nn.Parameter(torch.full((3,), 0.9)), way

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            SEEN.append(x.clone())
        if self.way == "data":
            self.w.data.clamp_(-0.5, 0.5)
        elif self.way == "assigned":
            self.w.data = self.w.data.clamp(-0.5, 0.5)
        elif self.way == "replaced":
            self.w = nn.Parameter(self.w.detach().clamp(-0.5, 0.5))
        else:
            with torch.no_grad():
                if self.way == "view":
                    self.w.view(-1)[:2].clamp_(-0.5, 0.5)
                elif self.way == "batch":
                    self.w.add_(x.mean())
                else:  # "halved" more often than once is another number, "clamped" is not
                    self.w.mul_(0.5) if self.way == "halved" else self.w.clamp_(-0.5, 0.5)
        return (self.w.sum() - x).square().mean()


WAYS = ["clamped", "data", "assigned", "view", "batch", "halved"]
WRITTEN: dict[str, Any] = {"num_nodes": 3, "max_steps": 6, "data": torch.arange(24.0) / 10, "val": torch.ones(4)}


def by_itself(way: str, batches: list[Tensor], num_nodes: int, H: int | None, lr: float) -> Tensor:
    """DiLoCo with torch's own optimizers, or gradients averaged in every step, on models of their own."""
    models = [Writing(way) for _ in range(num_nodes)]
    own = [torch.optim.SGD(model.parameters(), lr=lr) for model in models]
    outer = nn.Parameter(models[0].w.detach().clone())
    server = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)
    for step in range(len(batches) // num_nodes):
        for model, x in zip(models, batches[step * num_nodes :]):
            model.zero_grad()
            model(x).backward()
        if H is None:
            mean = torch.stack([model.w.grad for model in models if model.w.grad is not None]).mean(0)
            for model in models:
                model.w.grad = mean.clone()
        for optimizer in own:
            optimizer.step()
        if H is not None and (step + 1) % H == 0:
            outer.grad = outer.detach() - torch.stack([model.w.detach() for model in models]).mean(0)
            server.step()
            for model in models:
                model.w.data.copy_(outer.detach())
    return torch.stack([model.w.detach() for model in models]).mean(0)


@pytest.mark.parametrize("num_nodes", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_each_node_writes_to_its_own_parameters(way: str, num_nodes: int) -> None:
    model, settings = Writing(way), {**WRITTEN, "num_nodes": num_nodes}
    with pytest.warns(VecgymWarning, match="vmap cannot run this model.*one after the other"):
        trainer, averaged = fit(model, DiLoCoStrategy("sgd", H=2, lr=0.1, outer_lr=0.7), batch_size=2, **settings)
    assert torch.equal(model.w, torch.full((3,), 0.9))  # the model that was given is not changed
    assert trainer.history.settings["engine"] == "loop"
    expected = by_itself(way, SEEN[-6 * num_nodes :], num_nodes, 2, 0.1)
    torch.testing.assert_close(averaged.get_parameter("w").detach(), expected)


@pytest.mark.filterwarnings("ignore:.*vmap cannot run")
@pytest.mark.parametrize("way", WAYS)
def test_nodes_that_share_parameters_may_write_what_is_the_same_on_each(way: str) -> None:
    strategy = AllReduceStrategy("sgd", lr=0.1)
    for engine in ("auto", "loop"):
        run = lambda: fit(Writing(way), strategy, batch_size=2, engine=engine, **WRITTEN)  # noqa: B023, E731
        if way == "batch":
            with pytest.raises(ValueError, match=r"writes to its parameter 'w'.*AllReduce.*drift apart.*DiLoCo"):
                run()
        else:
            averaged = run()[1]
            torch.testing.assert_close(averaged.get_parameter("w").detach(), by_itself(way, SEEN[-18:], 3, None, 0.1))
    with pytest.raises(RuntimeError, match=r"vmap cannot run this model(.|\n)*engine=\"loop\""):
        fit(Writing(way), strategy, batch_size=2, engine="vmap", **WRITTEN)


@pytest.mark.filterwarnings("ignore:.*vmap cannot run")
@pytest.mark.parametrize("where", ["unequal", "absent", "partial", "asynchronous"])
def test_what_is_written_stays_in_every_kind_of_step(where: str) -> None:
    """At a rate of 0 nothing but the forward pass changes a node: it halves its weights once in a step."""
    nodes: dict[str, Any] = {"num_nodes": 2, "data": torch.ones(24), "max_steps": 3}
    if where == "unequal":
        parts = lambda rank, num_nodes, data: torch.ones(3 if rank else 1)  # noqa: E731
        trainer, _ = fit(Writing("halved"), alone(lr=0.0), batch_size=3, **{**nodes, "data": parts})
    elif where == "absent":
        trace = Trace(torch.tensor([[True, True], [True, False], [True, True]]), rejoin="own")
        trainer, _ = fit(Writing("halved"), alone(lr=0.0), batch_size=2, availability=trace, **nodes)
    elif where == "partial":
        strategy = FedAvgStrategy("sgd", H=2, participation=0.5, lr=0.0)
        trainer, _ = fit(Writing("halved"), strategy, batch_size=2, **nodes)
        assert sorted(trainer.nodes.params["w"][:, 0].tolist()) == pytest.approx([0.9 / 8, 0.9 / 4])
        return
    else:
        server = OuterOptimizer(OptimSpec("sgd", lr=1.0))
        trainer, averaged = fit(Writing("halved"), AsyncStrategy("sgd", server, H=1, lr=0.0), batch_size=2,
                                compute=Compute(1.0), **{**nodes, "num_nodes": 1})  # fmt: skip
        assert averaged.get_parameter("w")[0].item() == pytest.approx(0.9 / 8)
        return
    steps = [3, 2 if where == "absent" else 3]
    assert trainer.nodes.params["w"][:, 0].tolist() == pytest.approx([0.9 * 0.5**n for n in steps])


class Momentum(nn.Module):
    """An average of a weight, kept in a parameter that is not trained."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.kept = nn.ParameterDict({"mean": nn.Parameter(torch.zeros(1, 1), requires_grad=trained)})

    def forward(self, x: Tensor) -> Tensor:
        self.kept["mean"].data.lerp_(self.net.weight.data, 0.5)
        return (self.net(x) - self.kept["mean"].detach()).square().mean()


@pytest.mark.filterwarnings("ignore:.*vmap cannot run")
@pytest.mark.parametrize("trained", [False, True])
def test_what_is_not_trained_is_not_written_to(trained: bool) -> None:
    with pytest.raises(ValueError, match=r"writes to 'kept.mean', a parameter that is not trained.*register_buffer\("):
        fit(Momentum(trained), alone(), data=torch.ones(8, 1), batch_size=2)


@pytest.mark.filterwarnings("ignore:.*vmap cannot run")
def test_what_cannot_be_written_is_said() -> None:
    with pytest.raises(ValueError, match=r"loss depends on none of its trainable parameters, w: does forward replace"):
        fit(Writing("replaced"), alone(), batch_size=2, **WRITTEN)
    with pytest.raises(ValueError, match=r"writes to its parameter 'w', through which no derivatives"):
        rollout(Writing("clamped"), FedAvgStrategy("sgd"), torch.ones(2, 2, 2), num_nodes=2, eval_batch=torch.ones(2))
    with pytest.raises(ValueError, match=r"writes to its parameter 'w'.*AD-PSGD"):
        fit(Writing("clamped"), ADPSGDStrategy("sgd", "ring", lr=0.1), batch_size=2, compute=Compute(1.0), **WRITTEN)


class OfKeywords(nn.Module):
    """Returns what a model of transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, batch: Any) -> Any:
        return {"loss": self.layer(batch["x"]).mean()}


class Labelled(OfKeywords):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        return self.layer(input_ids).mean()


def test_a_batch_of_names_gets_advice_for_one() -> None:
    data = [{"x": torch.ones(3)} for _ in range(24)]
    advice = r"(.|\n)*return module\(\*\*batch\)\.loss"
    with pytest.raises(ValueError, match=r"returned {'loss': float32 \[\]}, not a scalar tensor" + advice):
        fit(OfKeywords(), "FedAvg", data=data)
    with pytest.raises(RuntimeError, match="must be Tensor, not dict" + advice):
        fit(Net(), "FedAvg", data=data)
    with pytest.raises(TypeError, match="missing a required argument: 'labels'" + advice):
        fit(Labelled(), "FedAvg", data=data)
