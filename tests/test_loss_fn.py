"""A function of module and batch in place of a model that returns its loss, wherever a model is given."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.fitting import alone, same
from tests.models import make_data
from vecgym import Trainer, estimate_memory, sweep, verify
from vecgym.cli import main
from vecgym.data import Batches
from vecgym.engine import Engine
from vecgym.models import Classifier
from vecgym.runs.rollout import rollout
from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy

DATA = TensorDataset(*make_data("MLP", 24, 0))
VAL = TensorDataset(*make_data("MLP", 8, 1))
SETTINGS: dict[str, Any] = {"max_steps": 4, "batch_size": 4, "device": "cpu", "progress": False}


def network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 8), nn.Dropout(dropout), nn.ReLU(), nn.Linear(8, 10))


def loss_fn(module: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1])


def other_loss(module: nn.Module, batch: Any) -> Tensor:
    return loss_fn(module, batch)


def with_accuracy(module: nn.Module, batch: Any) -> dict[str, Tensor]:
    logits = module(batch[0])
    accuracy = (logits.argmax(1) == batch[1]).float().mean()
    return {"loss": F.cross_entropy(logits, batch[1]), "accuracy": accuracy}


def strategy(H: int = 2, lr: float = 0.1) -> DiLoCoStrategy:
    return DiLoCoStrategy("sgd", H=H, lr=lr)


def given(loss: Any = loss_fn, model: nn.Module | None = None, **settings: Any) -> tuple[Trainer, Any]:
    trainer = Trainer(network() if model is None else model, DATA, VAL, loss_fn=loss)
    return trainer, trainer.fit(settings.pop("strategy", strategy()), 3, **{**SETTINGS, **settings})


def wrapped(**settings: Any) -> tuple[Trainer, Any]:
    trainer = Trainer(Classifier(network()), DATA, VAL)
    return trainer, trainer.fit(settings.pop("strategy", strategy()), 3, **{**SETTINGS, **settings})


@pytest.mark.parametrize("settings", [
    {"engine": "vmap"}, {"engine": "loop"}, {"strategy": AllReduceStrategy("adamw", lr=0.1)}, {"minibatch_size": 2},
    {"autocast": True}, {"backend": "processes", "num_processes": 3, "exact": True},
], ids=str)  # fmt: skip
def test_a_run_is_that_of_a_wrapper(settings: dict[str, Any]) -> None:
    """To the bit, metrics too; and the names are the module's own."""
    trainer, averaged = given(with_accuracy, **settings)
    expected, _ = wrapped(**settings)
    assert type(averaged) is nn.Sequential
    for column in ("train_loss", "val_loss", "val_loss_local", "val_accuracy", "val_accuracy_local"):
        assert trainer.history[column] == expected.history[column]
    assert same({f"net.{name}": x for name, x in trainer.nodes.params.items()}, expected.nodes.params)


@pytest.mark.slow
def test_a_compiled_run() -> None:
    plain, compiled = (given(compile=compile, engine="vmap")[0] for compile in (False, True))
    assert compiled.history.settings["engine"] == "compiled"
    torch.testing.assert_close(compiled.history["train_loss"], plain.history["train_loss"])


def test_the_module_is_left_alone() -> None:
    module, parametrized = network(), nn.utils.parametrizations.weight_norm(nn.Linear(16, 10))
    before = copy.deepcopy(module.state_dict()), set(vars(module))
    trainer, averaged = given(model=module)
    assert same(dict(module.state_dict()), before[0])
    assert set(vars(module)) == set(vars(averaged)) == before[1]
    assert trainer.model is module
    pickle.dumps([averaged, trainer.nodes.module(0)])
    assert type(given(model=parametrized)[1]) is type(parametrized)


def test_it_replaces_forward_and_val_metrics() -> None:
    """Of a model that has a loss of its own, and an attribute of the same name."""

    class Own(Classifier):
        def __init__(self) -> None:
            super().__init__(network())
            self.loss_fn = nn.MSELoss()

    def on_logits(module: Own, batch: Any) -> Tensor:
        assert isinstance(module.loss_fn, nn.MSELoss)
        return 2 * F.cross_entropy(module.net(batch[0]), batch[1])

    trainer, _ = given(on_logits, Own(), strategy=alone(lr=0.05))
    expected, _ = given(strategy=alone(lr=0.1))
    assert trainer.history["train_loss"] == [x and 2 * x for x in expected.history["train_loss"]]
    assert "val_accuracy" not in trainer.history.columns


@pytest.mark.parametrize("workers", [0, 1])
def test_sweeps(workers: int) -> None:
    """Of a module, or of a function of axes; in this process, or another."""
    task: dict[str, Any] = {"strategy": strategy, "num_nodes": 3, **SETTINGS, "keep_models": True}
    grid: dict[str, Any] = {"H": [1, 2], "lr": [0.05, 0.1]}
    with ProcessPoolExecutor(1) as pool:
        result = sweep(
            network(), DATA, VAL, grid=grid, loss_fn=with_accuracy, executor=pool if workers else None, **task
        )
        expected = sweep(Classifier(network()), DATA, VAL, grid=grid, **task)
        for i in range(4):
            for column in ("train_loss", "val_loss", "val_accuracy"):
                assert result.history(i)[column] == expected.history(i)[column]
        pickle.dumps(result.model(0))
    by_axis = sweep(lambda dropout: network(dropout), DATA, VAL, grid={"dropout": [0.0]}, loss_fn=loss_fn,
                    **{**task, "strategy": strategy()})  # fmt: skip
    assert by_axis.history(0)["train_loss"] == expected.history(3)["train_loss"]


def test_rollouts_estimates_and_verification() -> None:
    batches = list(Batches(DATA, num_nodes=3, batch_size=4).iterate(0, 4))
    steps: dict[str, Any] = {"num_nodes": 3, "eval_batch": VAL[:]}
    lr = torch.tensor(0.1, requires_grad=True)
    models: list[tuple[nn.Module, Any]] = [(network(), loss_fn), (Classifier(network()), None)]
    losses = [
        rollout(model, DiLoCoStrategy("sgd", H=2, lr=lr), batches, loss_fn=loss, **steps).loss for model, loss in models
    ]
    assert losses[0] == losses[1]
    assert torch.autograd.grad(losses[0], lr)[0] == torch.autograd.grad(losses[1], lr)[0] != 0
    with pytest.raises(ValueError, match="the engine was made without loss_fn"):
        rollout(network(), strategy(), batches, **steps, engine=Engine(Classifier(network())), loss_fn=loss_fn)
    estimates = [estimate_memory(model, strategy(), 3, 4, DATA, loss_fn=loss) for model, loss in models]
    assert estimates[0].parts == estimates[1].parts
    assert verify(strategy(), network(), DATA, num_nodes=2, steps=3, loss_fn=loss_fn).passed


def test_a_run_resumes_with_its_own_loss_fn_alone(tmp_path: Path) -> None:
    folder: dict[str, Any] = {"save_dir": tmp_path, "resume": True}
    given(max_steps=2, **folder)
    with pytest.raises(ValueError, match="model, loss_fn: saved loss_fn, given other_loss"):
        given(other_loss, **folder)
    with pytest.raises(ValueError, match="belongs to another run"):
        wrapped(**folder)
    resumed, whole = given(**folder)[0], given()[0]
    assert same(resumed.nodes.params, whole.nodes.params)


def test_a_changed_loss_fn_of_the_same_name_is_found_by_its_loss(tmp_path: Path) -> None:
    folder: dict[str, Any] = {"save_dir": tmp_path, "resume": True}
    given(lambda module, batch: loss_fn(module, batch), max_steps=2, **folder)
    with pytest.raises(ValueError, match="loss of node 0's first batch"):
        given(lambda module, batch: 2 * loss_fn(module, batch), **folder)


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vecgym.plot.plot_runs", lambda *args, **kwargs: None)
    (tmp_path / "task.py").write_text(
        "from tests.test_loss_fn import *\n"
        "def config():\n"
        "    return {'model': network(), 'loss_fn': loss_fn, 'train_dataset': DATA, 'strategy': strategy(),\n"
        "            'num_nodes': 2, **SETTINGS}\n"
        "def verified():\n"
        "    return {name: x for name, x in config().items() if name not in ('device', 'progress', 'max_steps')}\n"
    )
    assert main(["run", "task.py", "--output", "out"]) == 0
    assert main(["verify", "task.py:verified"]) == 0


NETWORK = network()
WRONG: list[tuple[Any, type[Exception], str]] = [
    (nn.CrossEntropyLoss(), TypeError, "loss_fn is of type CrossEntropyLoss; give a function of both"),
    ("mse", TypeError, "loss_fn is of type str"),
    (lambda batch: 0, TypeError, r"loss_fn cannot be called as loss_fn\(module, batch\): too many positional"),
    (F.cross_entropy, RuntimeError, "fails on its first batch.*must be Tensor, not Sequential(?s:.*)loss_fn"),
    (lambda module, batch: module(batch[0]), ValueError, r"returned float32 \[4, 10\], not"),
    (lambda module, batch: {"a": 0.0}, ValueError, r"loss_fn\(module, batch\) returned {'a': a float}; a dict with"),
    (lambda module, batch: {"loss": loss_fn(module, batch), "logits": module(batch[0])}, ValueError,
     r"loss_fn\(module, batch\) returned float32 \[4, 10\] as 'logits'"),
    (lambda module, batch: loss_fn(NETWORK, batch), ValueError, "loss_fn is a function that holds the model's"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "error", "message"), WRONG)
def test_mistakes(wrong: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        given(wrong, NETWORK)
    with pytest.raises(error, match=message):
        sweep(NETWORK, DATA, grid={"lr": [0.1]}, strategy=lambda lr: strategy(lr=lr), num_nodes=3, loss_fn=wrong,
              **SETTINGS)  # fmt: skip
