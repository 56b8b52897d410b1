"""The run's model: one rule for all that is evaluated, returned and saved, whoever is there."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vecgym
from tests.fitting import dataset, fit
from tests.models import make_model
from vecgym import sweep
from vecgym.availability import Dropout, Trace
from vecgym.clock import Compute
from vecgym.core.tree import Tree
from vecgym.models import Line
from vecgym.strategy import (
    ADPSGDStrategy,
    AllReduceStrategy,
    AsyncStrategy,
    DecoupledDiLoCoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    GossipStrategy,
    GPAStrategy,
    HALoSStrategy,
    Strategy,
)

K, STEPS, H = 4, 7, 3

MADE: dict[str, Callable[[], Strategy]] = {
    "allreduce": partial(AllReduceStrategy, "sgd", lr=0.1),
    "diloco": partial(DiLoCoStrategy, "sgd", H=H, lr=0.1),
    "fedavg": partial(FedAvgStrategy, "sgd", H=H, lr=0.1),
    "gossip": partial(GossipStrategy, "ring", inner_optim="sgd", lr=0.1),
}


def nobody_else() -> Trace:
    """Node 1 is never there, and node 3 not at the end."""
    table = torch.ones(STEPS, K, dtype=torch.bool)
    table[:, 1] = table[5:, 3] = False
    return Trace(table)


def losses(model: nn.Module, params: Tree) -> float:
    """The loss on all of the validation data."""
    data: Any = dataset("MLP")
    x, y = data.tensors
    with torch.no_grad():
        return float(torch.func.functional_call(model, params, ((x, y),)))


def values(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(x, b[name]) for name, x in a.items())


@pytest.mark.parametrize("name", MADE)
def test_it_is_the_mean_of_those_who_were_there(name: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"num_nodes": K, "max_steps": STEPS, "val": dataset("MLP"), "val_interval": 1,
                                "availability": nobody_else(), "save_dir": tmp_path, "checkpoint_interval": 1,
                                "correlation_interval": 1}  # fmt: skip
    with pytest.warns(UserWarning, match=r"1 of 4 nodes are never present, \[1\]"):
        trainer, averaged = fit("MLP", MADE[name](), **settings)
    assert trainer.run is not None
    assert trainer.run.nodes is not None
    rows = {n: x[[0, 2]] for n, x in trainer.nodes.params.items()}
    mean = {n: (x[0] + (x - x[:1]).mean(0)) for n, x in rows.items()}
    assert_equal(values(averaged), mean)
    assert_equal(values(trainer.nodes.average()), mean)
    assert trainer.history["val_loss"][-1] == pytest.approx(losses(averaged, mean), rel=1e-6)
    squares = sum(((x - x.mean(0)) ** 2).sum() / 2 for x in rows.values())
    assert trainer.history["consensus_distance"][-1] == pytest.approx(float(squares) ** 0.5, rel=1e-5, abs=1e-12)
    assert trainer.nodes.consensus_distance() == trainer.history["consensus_distance"][-1]
    own = trainer.history["val_losses"][-1]
    assert trainer.history["val_loss_local"][-1] == pytest.approx((own[0] + own[2]) / 2)
    assert own[1] == pytest.approx(trainer.history["val_loss"][0])  # the model that it began with
    assert trainer.history["num_never_present"] == [None] + [1] * STEPS
    trainer.save(tmp_path / "run.pt")
    assert_equal(vecgym.load(tmp_path / "run.pt").average, mean)
    assert_equal(vecgym.load(tmp_path / f"step-{STEPS:09d}.pt").average, mean)


@pytest.mark.parametrize("num_processes", [2, 4])
def test_it_is_so_on_processes(num_processes: int) -> None:
    given: dict[str, Any] = {"num_nodes": K, "max_steps": STEPS, "val": dataset("MLP"), "val_interval": 1,
                             "availability": nobody_else(), "correlation_interval": 2}  # fmt: skip
    both: list[dict[str, Any]] = [{}, {"backend": "processes", "num_processes": num_processes}]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (alone, model), (apart, other) = (fit("MLP", MADE["diloco"](), **given, exact=True, **more) for more in both)
        native, _ = fit("MLP", MADE["diloco"](), **given, backend="processes", num_processes=num_processes)
    assert_equal(values(model), values(other))
    assert_equal(values(other), {n: x[0] + (x[2] - x[0]) / 2 for n, x in apart.nodes.params.items()})
    for name in ("val_loss", "val_loss_local", "consensus_distance", "consensus_distance_before", "correlation"):
        assert alone.history[name] == apart.history[name]
        for x, y in zip(alone.history[name], native.history[name], strict=True):
            assert (x is None) == (y is None)
            assert x is None or x == pytest.approx(y, rel=1e-4, abs=1e-6)


def test_rows_of_a_sweep_and_rollouts_have_the_same() -> None:
    model, data, availability = make_model("MLP"), dataset("MLP"), nobody_else()
    given: dict[str, Any] = {"num_nodes": K, "max_steps": STEPS, "batch_size": 4, "device": "cpu", "progress": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = vecgym.Trainer(model, data, data)
        averaged = trainer.fit(MADE["diloco"](), availability=availability, **given)
        result = sweep(
            model, data, data, strategy=lambda lr: DiLoCoStrategy("sgd", H=H, lr=lr), grid={"lr": [0.1, 0.2]},
            availability=availability, keep_models=True, **given,
        )  # fmt: skip
    for name, x in values(result.model(0)).items():
        torch.testing.assert_close(x, values(averaged)[name])
    for name in ("val_loss", "val_loss_local", "consensus_distance", "num_never_present"):
        assert result.history(0)[name] == pytest.approx(trainer.history[name])


def test_a_rollout_ends_with_those_who_were_there() -> None:
    batches = torch.tensor([[[1.0], [5.0], [3.0]]]).expand(4, 3, 1)
    table = Trace([[True, False, True]] * 3 + [[True, False, False]])
    outcome = vecgym.rollout(
        Line(), Strategy("sgd", lr=0.5), batches, num_nodes=3, eval_batch=torch.tensor([1.0]),
        availability=table,
    )  # fmt: skip
    assert outcome.loss == 0  # node 0 alone, which is at 1; node 2 is at 3
    assert outcome.consensus_distance.tolist() == [1.0, 1.0, 1.0, 0.0]


# ------------------------------------------------------------------------------------- a rule of the strategy's

ASYNCHRONOUS: dict[str, Callable[[], Strategy]] = {
    "async": partial(AsyncStrategy, "sgd", H=2, lr=0.1),
    "halos": partial(HALoSStrategy, "sgd", regions=[[0, 1], [2, 3]], H=2, lr=0.1),
    "decoupled": partial(DecoupledDiLoCoStrategy, "sgd", quorum=2, H=4, lr=0.1),
    "ad-psgd": partial(ADPSGDStrategy, "sgd", topology="ring", lr=0.1),
}


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_an_asynchronous_run_saves_what_it_returns(name: str, tmp_path: Path) -> None:
    trainer, returned = fit(
        "MLP", ASYNCHRONOUS[name](), num_nodes=K, max_updates=9, compute=Compute([1.0, 1.3, 1.7, 2.9]),
        val=dataset("MLP"), save_dir=tmp_path,
    )  # fmt: skip
    assert trainer.history["val_loss"][-1] == pytest.approx(losses(returned, values(returned)), rel=1e-6)
    trainer.save(tmp_path / "run.pt")
    assert_equal(vecgym.load(tmp_path / "run.pt").average, values(returned))
    assert_equal(vecgym.load(sorted(tmp_path.glob("step-*"))[-1]).average, values(returned))
    assert_equal(values(trainer.nodes.average()), values(returned))


class OfX(GPAStrategy):
    """GPA whose model is x, as in the paper."""

    def result(self, state: Any) -> Tree:
        return self.average(state)


def test_a_strategy_may_say_otherwise(tmp_path: Path) -> None:
    model, data = make_model("MLP"), dataset("MLP")
    given: dict[str, Any] = {"num_nodes": K, "max_steps": STEPS, "batch_size": 4, "device": "cpu", "progress": False}
    trainer = vecgym.Trainer(model, data, data)
    x = values(trainer.fit(OfX("sgd", mu_x=0.9, lr=0.1), save_dir=tmp_path, **given))
    assert trainer.state is not None
    expected = OfX("sgd", mu_x=0.9, lr=0.1).result(trainer.state)
    assert_equal(x, {name: p[0] for name, p in expected.items()})
    assert not any(torch.equal(p, trainer.state.params[name][0]) for name, p in x.items())
    assert trainer.history["val_loss"][-1] == pytest.approx(losses(model, x), rel=1e-6)
    y = {name: p[0] for name, p in trainer.state.params.items()}
    assert trainer.history["val_loss_local"][-1] == pytest.approx(losses(model, y), rel=1e-6)  # what they train
    assert_equal(values(trainer.nodes.average()), x)
    trainer.save(tmp_path / "run.pt")
    assert_equal(vecgym.load(tmp_path / "run.pt").average, x)
    assert_equal(vecgym.load(tmp_path / f"step-{STEPS:09d}.pt").average, x)
    result = sweep(model, data, data, strategy=lambda lr: OfX("sgd", mu_x=0.9, lr=lr), grid={"lr": [0.1, 0.2]},
                   keep_models=True, **given)  # fmt: skip
    for name, p in values(result.model(0)).items():
        torch.testing.assert_close(p, x[name])
    assert result.history(0)["val_loss"] == pytest.approx(trainer.history["val_loss"])
    apart = vecgym.Trainer(model, data)
    other = apart.fit(OfX("sgd", mu_x=0.9, lr=0.1), backend="processes", num_processes=2, **given)
    for name, p in values(other).items():
        torch.testing.assert_close(p, x[name])


# ------------------------------------------------------------------------------------------ who never took part


def test_those_who_were_never_there_are_counted() -> None:
    table = torch.zeros(4, K, dtype=torch.bool)
    table[:, 0] = table[2:, 2] = True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer, _ = fit("MLP", "FedAvg", num_nodes=K, max_steps=4, availability=Trace(table), val=dataset("MLP"))
    assert trainer.history["num_never_present"][1:] == [3, 3, 2, 2]
    assert len([w for w in caught if "2 of 4 nodes are never present, [1, 3]" in str(w.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit("MLP", "FedAvg", num_nodes=K, max_steps=4, availability=Dropout(0.3, 2))
