"""What a model is told that is not what it must be, and whose error an error is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.fitting import alone, dataset, fit
from vecgym import Trainer
from vecgym.engine import Engine
from vecgym.runs.rollout import rollout
from vecgym.strategy import FedAvgStrategy


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
    "two arguments": (Two, ["forward(x", "'y'", "F.cross_entropy(self.net(x), y)"]),
    "no parameters": (Parameterless, ["no trainable parameter", "requires_grad_(True)"]),
    "frozen": (lambda: Loss().requires_grad_(False), ["no trainable parameter"]),
    "scripted": (lambda: torch.jit.script(Net()), ["TorchScript", "nn.Module that it was made from"]),
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
def test_a_network_instead_of_a_model_is_told_the_wrapper(make: type[nn.Module]) -> None:
    """It fails on the tuple; the message shows what it was given, and the wrapper, which works."""
    for engine in ("auto", "loop"):
        with pytest.raises(RuntimeError) as raised:
            fit(make(), alone(), data=dataset("MLP"), engine=engine)
        message = str(raised.value)
        for part in (
            "first batch, (float32 [4, 16], int64 [4])",
            "must be Tensor, not",
            "test_model_errors.py",
            "class WithLoss",
        ):
            assert part in message
        assert ("training_step" in message) == (make is Lightning)
        assert "vmap" not in message
    with pytest.raises(ValueError, match=r"shape \[4, 10\], not a scalar(?s:.*)class WithLoss"):
        fit(make(), alone(), data=torch.zeros(24, 16))
    found: dict[str, Any] = {"nn": nn, "F": F}
    code = message[message.index("    class") : message.index("\n\nand give")]
    exec("\n".join(line[4:] for line in code.splitlines()), found)
    fit(found["WithLoss"](make()), alone(), data=dataset("MLP"))


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


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 1)

    def forward(self, index: Tensor) -> Tensor:
        return self.table(index).mean()


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
    for part in [*parts, "test_model_errors.py"]:
        assert part in message, f"{part!r} is not in {message!r}"
    assert "vmap" not in message


def test_an_error_of_the_model_in_a_rollout_is_its_own() -> None:
    batches = TOKENS.view(3, 2, 2).mT
    with pytest.raises(RuntimeError, match=r"node 1, step 2: IndexError: .*self\.table") as raised:
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
