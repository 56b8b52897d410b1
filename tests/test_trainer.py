"""`Trainer.fit` as its users see it: what it returns, records, repeats, and leaves alone."""

from __future__ import annotations

import copy
import csv
import json
import math
import random
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from tests.fitting import STRATEGIES, Rows, alone, dataset, fit, params, same, same_run
from tests.models import MLP, make_data, make_model
from vecgym import CSVLogger, History, LocalTrainer, Logger, OptimSpec, Trainer, VecgymWarning
from vecgym.clock import Compute, Network
from vecgym.data import Batches, EvalBatches
from vecgym.records.columns import PER_NODE, SCALARS
from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy, FedAvgStrategy

ALL_MODELS = ["MLP", "CNN", "GPT", "Quadratic", "WithFrozen", "Dropout", "DictBatch"]  # those that vmap runs


def test_one_class_two_names() -> None:
    assert Trainer is LocalTrainer


# ------------------------------------------------------------------------------------------ what fit returns


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", ["CNN", "GPT", "WithFrozen"])
def test_fit_returns_the_average_of_the_nodes(model: str, strategy: str) -> None:
    trainer, result = fit(model, strategy, max_steps=3)
    assert type(result) is type(trainer.model)
    for name, p in result.named_parameters():
        torch.testing.assert_close(p.detach(), trainer.nodes.params[name].mean(0))
    for name, b in result.named_buffers():
        stacked = trainer.nodes.buffers[name][list(trainer.nodes.trained or range(3))]  # not of who was never drawn
        torch.testing.assert_close(b, stacked.mean(0) if b.is_floating_point() else stacked[0])
    fresh = make_model(model, seed=1)
    fresh.load_state_dict(result.state_dict(), strict=True)
    torch.testing.assert_close(trainer.nodes.average().state_dict(), result.state_dict())


def test_the_average_is_of_nodes_that_differ() -> None:
    trainer, result = fit("MLP", alone(), max_steps=3)
    weights = trainer.nodes.params["first.weight"]
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(result.get_parameter("first.weight"), weights[0])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", ["CNN", "GPT", "WithFrozen"])
def test_nodes_are_stacked(model: str, strategy: str) -> None:
    trainer, result = fit(model, strategy, num_nodes=4, max_steps=3)
    assert len(trainer.nodes) == 4
    assert list(trainer.nodes.params) == [name for name, _ in result.named_parameters()]
    assert list(trainer.nodes.buffers) == [name for name, _ in result.named_buffers()]
    for name, x in {**dict(result.named_parameters()), **dict(result.named_buffers())}.items():
        stacked = {**trainer.nodes.params, **trainer.nodes.buffers}[name]
        assert stacked.shape == (4, *x.shape)
        assert stacked.dtype == x.dtype
        torch.testing.assert_close(trainer.nodes.module(2).state_dict()[name], stacked[2])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("model", ALL_MODELS)
def test_the_model_given_is_untouched(model: str, training: bool) -> None:
    module = make_model(model).train(training)
    next(module.children(), nn.Module()).eval()  # one part in another mode than the rest
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    values = copy.deepcopy(module.state_dict())
    modes = [m.training for m in module.modules()]
    identities = [id(p) for p in module.parameters()]
    _, result = fit(module, data=dataset(model), max_steps=2)
    assert same(values, module.state_dict())
    assert [m.training for m in module.modules()] == modes
    assert [id(p) for p in module.parameters()] == identities
    assert all(p.grad is not None and bool((p.grad == 1).all()) for p in module.parameters())
    with torch.no_grad():
        for p in result.parameters():  # the result shares no memory with it either
            p.fill_(7.0)
    assert same(values, module.state_dict())


def test_a_model_given_in_eval_mode_trains_the_same() -> None:
    a, _ = fit(make_model("CNN"), data=dataset("CNN"), max_steps=3)
    b, _ = fit(make_model("CNN").eval(), data=dataset("CNN"), max_steps=3)
    assert same_run(a, b)
    assert int(a.nodes.buffers["norm1.num_batches_tracked"][0]) == 3


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tied_weights_stay_tied(strategy: str) -> None:
    trainer, result = fit("GPT", strategy, max_steps=3)
    assert result.get_parameter("head.weight") is result.get_parameter("tokens.weight")
    assert "tokens.weight" in trainer.nodes.params
    assert "head.weight" not in trainer.nodes.params
    node = trainer.nodes.module(1)
    assert node.get_parameter("head.weight") is node.get_parameter("tokens.weight")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_frozen_parameters_stay_frozen_and_identical(strategy: str) -> None:
    trainer, result = fit("WithFrozen", strategy, max_steps=4)
    for name in ("first.weight", "first.bias"):
        given = trainer.model.get_parameter(name)
        assert torch.equal(result.get_parameter(name), given)
        assert not result.get_parameter(name).requires_grad
        assert torch.equal(trainer.nodes.params[name], given.expand(3, *given.shape))
    assert result.get_parameter("second.weight").requires_grad
    assert not torch.equal(result.get_parameter("second.weight"), trainer.model.get_parameter("second.weight"))


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("strategy", ["AllReduce", "FedAvg", "DiLoCo"])
def test_integer_buffers_count_on_every_node(strategy: str, engine: str) -> None:
    trainer, result = fit("WithFrozen", strategy, max_steps=3, engine=engine)
    assert trainer.nodes.buffers["seen"].tolist() == [12, 12, 12]  # 3 steps of 4 examples
    assert int(result.get_buffer("seen")) == 12
    assert result.get_buffer("seen").dtype == torch.int64
    centers = trainer.nodes.buffers["center"]
    assert not torch.equal(centers[0], centers[1])  # each node saw its own examples


def test_fit_twice_starts_anew() -> None:
    trainer, first = fit("MLP", max_steps=3)
    history, nodes = trainer.history, trainer.nodes
    kept = {name: p.clone() for name, p in nodes.params.items()}
    second = trainer.fit(STRATEGIES["FedAvg"](), 3, max_steps=3, batch_size=4, progress=False, device="cpu")
    assert same(first.state_dict(), second.state_dict())
    assert same(kept, nodes.params)  # what the first run left is not overwritten
    assert trainer.history is not history
    assert len(trainer.history) == 3


def test_every_module_is_a_copy_of_its_own() -> None:
    trainer, result = fit("MLP", alone(), max_steps=2)
    modules = [result, trainer.nodes.average(), trainer.nodes.module(0), trainer.nodes.module(1)]
    kept = [copy.deepcopy(module.state_dict()) for module in modules]
    stacked = {name: p.clone() for name, p in trainer.nodes.params.items()}
    with torch.no_grad():
        for p in modules[1].parameters():
            p.zero_()
    assert all(same(module.state_dict(), kept[i]) for i, module in enumerate(modules) if i != 1)
    assert same(trainer.nodes.params, stacked)
    assert not same(kept[2], kept[3])


def test_nodes_before_fit() -> None:
    with pytest.raises(AttributeError, match="fit"):
        _ = Trainer(make_model("MLP"), dataset("MLP")).nodes


@pytest.mark.parametrize("node", [3, -4])
def test_a_node_that_is_not_there(node: int) -> None:
    trainer, _ = fit("MLP", max_steps=1, strategy="AllReduce")
    with pytest.raises(IndexError, match=f"node {node} of 3"):
        trainer.nodes.module(node)
    assert "3 x MLP" in repr(trainer.nodes)


# ------------------------------------------------------------------------------------------- how long it runs


def test_epochs_or_steps() -> None:
    assert len(fit("MLP", num_epochs=1)[0].history) == 2  # 24 examples, 3 nodes, batch 4
    assert len(fit("MLP", num_epochs=3)[0].history) == 6
    longer, _ = fit("MLP", max_steps=7)
    assert longer.history["step"] == [1, 2, 3, 4, 5, 6, 7]
    assert longer.history["epoch"] == [0.5, 1, 1.5, 2, 2.5, 3, 3.5]
    assert longer.history.settings["max_steps"] == 7
    assert len(fit("MLP", num_epochs=9, max_steps=3)[0].history) == 3  # max_steps decides


def test_the_first_steps_do_not_depend_on_the_length() -> None:
    short, _ = fit("MLP", max_steps=3)
    long, _ = fit("MLP", max_steps=5)
    assert short.history["train_loss"] == long.history["train_loss"][:3]


def test_every_example_once_an_epoch_in_a_new_order_each_epoch() -> None:
    seen: list[list[float]] = []

    class Spy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.tolist())
            return (self.w - x).square().mean()

    fit(Spy(), alone(), data=torch.arange(12.0), num_nodes=2, batch_size=3, num_epochs=2, engine="loop")
    calls = torch.tensor(seen[-8:])  # 4 steps of 2 nodes
    first, second = calls[:4].flatten().tolist(), calls[4:].flatten().tolist()
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second
    seen.clear()
    fit(Spy(), alone(), data=torch.arange(12.0), num_nodes=2, batch_size=3, engine="loop", shuffle=False)
    assert seen[-4:] == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]


def test_the_last_batch_of_an_epoch_is_smaller() -> None:
    trainer, _ = fit("MLP", data=dataset("MLP", 22), num_nodes=2, num_epochs=2)  # 11 for each: 4, 4, 3
    assert trainer.history["examples"] == [8, 16, 22, 30, 38, 44]
    dropped, _ = fit("MLP", data=dataset("MLP", 22), num_nodes=2, num_epochs=2, dataloader_kwargs={"drop_last": True})
    assert dropped.history["examples"] == [8, 16, 24, 32]


def test_examples_of_a_part_of_the_nodes() -> None:
    trainer, _ = fit(
        "MLP", FedAvgStrategy("sgd", participation=0.5), num_nodes=4, num_epochs=2, data=dataset("MLP", 32)
    )
    assert trainer.history["examples"] == [8, 16, 24, 32]  # 2 of 4 nodes with 4 examples each
    losses = trainer.history.node_array()
    assert (np.isfinite(losses).sum(1) == 2).all()
    np.testing.assert_allclose(trainer.history["train_loss"], np.nanmean(losses, 1), rtol=1e-6)


# -------------------------------------------------------------------------------------------------- evaluation


def losses_by_hand(trainer: Trainer, data: Any) -> tuple[float, list[float]]:
    """The loss over all of `data` in one batch, of the average and of each node."""
    with torch.no_grad():
        modules = [trainer.nodes.average(), *[trainer.nodes.module(i) for i in range(len(trainer.nodes))]]
        average, *each = [float(module.eval()(data)) for module in modules]
    return average, each


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", ["Dropout", "CNN"])
def test_evaluation_by_hand(model: str, strategy: str, engine: str) -> None:
    val = dataset(model, 10, seed=1, dtype=torch.float64)  # batches of 4, 4 and 2
    trainer, _ = fit(model, strategy, max_steps=3, val=val, dtype=torch.float64, engine=engine)
    average, each = losses_by_hand(trainer, make_data(model, 10, 1, torch.float64))
    assert trainer.history.last("val_loss") == pytest.approx(average, rel=1e-12)
    np.testing.assert_allclose(trainer.history.last("val_losses"), each, rtol=1e-12)
    trained = [each[node] for node in trainer.nodes.trained or range(3)]  # not who was never drawn, with batch norm
    assert trainer.history.last("val_loss_local") == pytest.approx(np.mean(trained), rel=1e-12)
    if strategy == "Alone":
        assert trainer.history.last("val_loss") != pytest.approx(trainer.history.last("val_loss_local"), rel=1e-6)


def test_the_first_evaluation_is_of_the_model_given() -> None:
    trainer, _ = fit("CNN", max_steps=1, strategy="AllReduce", val=dataset("CNN", 10, seed=1))
    with torch.no_grad():
        expected = float(copy.deepcopy(trainer.model).eval()(make_data("CNN", 10, 1)))
    assert trainer.history.rows[0]["step"] == 0
    assert trainer.history.rows[0]["val_loss"] == pytest.approx(expected, rel=1e-6)
    assert trainer.history.rows[0]["val_loss_local"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, [0, 7]),  # the default of 100 steps is longer than the run
        ({"val_interval": 3}, [0, 3, 6, 7]),
        ({"val_interval": 7}, [0, 7]),
        ({"val_interval": 1}, list(range(8))),
        ({"val_interval": None}, [0, 7]),
        ({"val_size": 0}, []),
        ({"val_size": 0, "val_interval": 2}, []),
    ],
)
def test_when_it_evaluates(settings: dict[str, Any], steps: list[int]) -> None:
    trainer, _ = fit("Quadratic", max_steps=7, val=dataset("Quadratic", 8, seed=1), **settings)
    assert trainer.history.series("val_loss")[0] == steps
    assert trainer.history.series("val_loss_local")[0] == steps
    assert trainer.history.series("val_losses")[0] == steps
    assert trainer.history.series("train_loss")[0] == list(range(1, 8))


def test_without_validation_data() -> None:
    trainer, _ = fit("Quadratic", max_steps=3, val=None, val_interval=1)
    assert trainer.history["val_loss"] == [None, None, None]
    assert "val_loss" not in trainer.history.columns


@pytest.mark.parametrize("val_size", [3, 5, 10, 99, None])
def test_val_size_takes_the_same_examples_every_time(val_size: int | None) -> None:
    val = dataset("Quadratic", 10, seed=1, dtype=torch.float64)
    trainer, _ = fit("Quadratic", max_steps=2, val=val, val_size=val_size, val_interval=1, dtype=torch.float64)
    chosen = torch.cat([batch[0] for batch, _ in EvalBatches(val, 4, val_size, seed=42)])
    assert len(chosen) == min(10, val_size or 10)
    average, each = losses_by_hand(trainer, chosen)
    assert trainer.history.last("val_loss") == pytest.approx(average, rel=1e-12)
    np.testing.assert_allclose(trainer.history.last("val_losses"), each, rtol=1e-12)


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("strategy", ["AllReduce", "Alone"])
def test_validation_data_of_each_node(strategy: str, engine: str) -> None:
    def factory(rank: int, num_nodes: int, train: bool) -> Dataset[Any]:
        return dataset("MLP", 8, seed=rank + (0 if train else 100), dtype=torch.float64)

    trainer, _ = fit(
        make_model("MLP", dtype=torch.float64), strategy, data=factory, val=factory, max_steps=2, engine=engine
    )
    own = [make_data("MLP", 8, 100 + rank, torch.float64) for rank in range(3)]
    of_average = [losses_by_hand(trainer, data)[0] for data in own]
    of_nodes = [losses_by_hand(trainer, data)[1][rank] for rank, data in enumerate(own)]
    assert trainer.history.last("val_loss") == pytest.approx(np.mean(of_average), rel=1e-12)
    np.testing.assert_allclose(trainer.history.last("val_losses"), of_nodes, rtol=1e-12)


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("strategy", ["AllReduce", "FedAvg participation", "Alone"])
def test_each_node_is_evaluated_on_all_that_is_its_own(strategy: str, engine: str) -> None:
    """In batches of 4, of datasets of unequal size: the run's model, and each node's own."""
    sizes = [9, 2, 4, 15, 1]
    own = [make_data("MLP", size, 100 + rank, torch.float64) for rank, size in enumerate(sizes)]

    def val(rank: int, num_nodes: int, train: bool) -> Dataset[Any]:
        return dataset("MLP", sizes[rank], seed=100 + rank, dtype=torch.float64)

    settings: dict[str, Any] = {"num_nodes": 5, "max_steps": 2, "engine": engine, "batch_size": 4}
    data = dataset("MLP", dtype=torch.float64)
    trainer, _ = fit(make_model("MLP", dtype=torch.float64), strategy, data=data, val=val, **settings)
    each = [losses_by_hand(trainer, data)[0] for data in own]
    of_nodes = [losses_by_hand(trainer, data)[1][rank] for rank, data in enumerate(own)]
    last: Any = trainer.history.last
    np.testing.assert_allclose(last("val_loss_each"), each, rtol=1e-12)
    np.testing.assert_allclose(last("val_losses"), of_nodes, rtol=1e-12)
    assert last("val_loss") == pytest.approx(np.average(each, weights=sizes), rel=1e-12)  # over all examples
    assert last("val_loss_local") == pytest.approx(np.mean(of_nodes), rel=1e-12)
    found = [last(f"val_loss_{name}") for name in ("lowest_tenth", "p10", "p50", "p90", "highest_tenth")]
    low, high = min(each), max(each)
    assert found == pytest.approx([low, *np.quantile(each, [0.1, 0.5, 0.9]), high], rel=1e-12)
    few = fit(make_model("MLP", dtype=torch.float64), strategy, data=data, val=val, val_size=4, **settings)[0]
    assert few.history.last("val_loss_each")[[1, 2, 4]] == pytest.approx(np.array(each)[[1, 2, 4]])
    assert few.history.last("val_loss_each")[3] != pytest.approx(each[3])


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("strategy", ["AllReduce", "FedAvg participation", "DiLoCo"])
@pytest.mark.parametrize("model", ["Dropout", "CNN", "WithFrozen"])
def test_evaluation_does_not_change_training(model: str, strategy: str, engine: str) -> None:
    plain, _ = fit(model, strategy, max_steps=4, engine=engine)
    watched, _ = fit(
        model, strategy, max_steps=4, engine=engine,
        val=dataset(model, 6, seed=1), val_interval=1, correlation_interval=1,
    )  # fmt: skip
    assert same_run(plain, watched)
    assert plain.history["train_loss"] == watched.history.series("train_loss")[1]


# -------------------------------------------------------------------------------------------------- randomness


class Noisy(Dataset[Any]):
    """Examples that draw from all three global random states, as augmentations do."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = torch.rand(16) + random.random() + np.random.rand()  # noqa: NPY002
        return index + noise, index % 10


def global_state() -> tuple[bytes, bytes, Any]:
    return torch.get_rng_state().numpy().tobytes(), np.random.get_state()[1].tobytes(), random.getstate()  # type: ignore[index] # noqa: NPY002


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("strategy", ["AllReduce", "FedAvg participation"])
def test_the_global_random_states_are_neither_read_nor_changed(strategy: str, engine: str) -> None:
    settings: dict[str, Any] = {"max_steps": 3, "val_interval": 1, "engine": engine}
    torch.manual_seed(987), np.random.seed(987), random.seed(987)  # noqa: NPY002
    before = global_state()
    a, _ = fit(make_model("Dropout"), strategy, data=Noisy(), val=Noisy(), **settings)
    assert global_state() == before
    torch.rand(3), np.random.rand(3), random.random()  # noqa: NPY002
    b, _ = fit(make_model("Dropout"), strategy, data=Noisy(), val=Noisy(), **settings)
    assert same_run(a, b)
    assert a.history["train_loss"] == b.history["train_loss"]
    assert a.history["val_loss"] == b.history["val_loss"]


def test_other_global_settings_stay() -> None:
    before = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    fit("CNN", max_steps=2, val=dataset("CNN", 8), node_threads=2)
    assert (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()) == before


def test_fit_under_no_grad_still_trains() -> None:
    with torch.no_grad():
        a, _ = fit("MLP", max_steps=2)
    b, _ = fit("MLP", max_steps=2)
    assert same_run(a, b)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("engine", ["auto", "vmap", "loop"])
@pytest.mark.parametrize("model", ["Dropout", "CNN"])
def test_the_same_seed_gives_the_same_bits(model: str, engine: str, strategy: str) -> None:
    a, _ = fit(model, strategy, max_steps=3, engine=engine)
    b, _ = fit(model, strategy, max_steps=3, engine=engine)
    assert same_run(a, b)
    assert a.history["train_loss"] == b.history["train_loss"]


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_another_seed_gives_another_run(engine: str) -> None:
    a, _ = fit("Dropout", max_steps=1, strategy="AllReduce", shuffle=False, engine=engine, seed=1)
    b, _ = fit("Dropout", max_steps=1, strategy="AllReduce", shuffle=False, engine=engine, seed=2)
    assert a.history["train_loss"] != b.history["train_loss"]  # same data: the dropout masks differ
    c, _ = fit("MLP", max_steps=1, strategy="AllReduce", seed=1)
    d, _ = fit("MLP", max_steps=1, strategy="AllReduce", seed=2)
    assert c.history["train_loss"] != d.history["train_loss"]  # no dropout: the order of the data differs


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("strategy", ["AllReduce", "Alone", "FedAvg participation"])
def test_every_node_and_every_step_has_its_own_dropout_mask(strategy: str, engine: str) -> None:
    class MaskedSum(nn.Module):
        """Its loss tells the mask."""

        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(64))

        def forward(self, x: Tensor) -> Tensor:
            weights = 2.0 ** -torch.arange(64.0)
            return (F.dropout(self.w, 0.5, self.training) * weights).sum() + 0 * x.sum()

    chosen = AllReduceStrategy("sgd", lr=0.0) if strategy == "AllReduce" else alone(lr=0.0)
    if strategy == "FedAvg participation":
        chosen = FedAvgStrategy("sgd", lr=0.0, participation=0.6)
    trainer, _ = fit(MaskedSum(), chosen, data=torch.zeros(40), num_nodes=5, max_steps=6, engine=engine)
    losses = trainer.history.node_array()
    there = losses[np.isfinite(losses)]
    assert len(set(there.tolist())) == len(there)  # parameters and data are always the same: all masks differ


# ----------------------------------------------------------------------------------- accumulation and precision


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("minibatch_size", [1, 2, 4])
def test_accumulation_equals_the_whole_batch(minibatch_size: int, strategy: str, engine: str) -> None:
    data = dataset("MLP", 60, dtype=torch.float64)  # 20 for each node: 8, 8 and 4
    settings: dict[str, Any] = {"data": data, "dtype": torch.float64, "batch_size": 8, "num_epochs": 1}
    whole, _ = fit("MLP", strategy, engine=engine, **settings)
    parts, _ = fit("MLP", strategy, engine=engine, minibatch_size=minibatch_size, **settings)
    torch.testing.assert_close(params(whole), params(parts), rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(whole.history["train_loss"], parts.history["train_loss"], rtol=1e-11)
    assert whole.history["examples"] == parts.history["examples"]


def test_accumulation_of_a_last_batch_that_does_not_divide() -> None:
    data = dataset("MLP", 33, dtype=torch.float64)  # 11 for each node: 8, and 3 as 2 + 1
    settings: dict[str, Any] = {"data": data, "dtype": torch.float64, "batch_size": 8, "num_epochs": 1}
    whole, _ = fit("MLP", **settings)
    parts, _ = fit("MLP", minibatch_size=2, **settings)
    torch.testing.assert_close(params(whole), params(parts), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("model", ["MLP", "CNN", "GPT"])
def test_autocast_runs_and_is_close(model: str, engine: str) -> None:
    val = dataset(model, 8, seed=1)
    full, _ = fit(model, max_steps=4, engine=engine, val=val)
    half, result = fit(model, max_steps=4, engine=engine, val=val, autocast=True)
    losses = np.array(half.history.series("train_loss")[1])
    np.testing.assert_allclose(losses, full.history.series("train_loss")[1], rtol=0.05)
    assert (losses != full.history.series("train_loss")[1]).any()  # it did compute in bfloat16
    assert half.history.last("val_loss") == pytest.approx(full.history.last("val_loss"), rel=0.05)
    assert all(p.dtype == torch.float32 for p in result.parameters())
    assert half.history.settings["autocast"] is True


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("strategy", ["AllReduce", "DiLoCo"])
def test_a_loss_in_bfloat16(strategy: str, engine: str) -> None:
    class LinearLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 1)

        def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return self.layer(batch[0]).mean()

    val = dataset("MLP", 8, seed=1)
    trainer, _ = fit(LinearLoss(), strategy, data=dataset("MLP"), max_steps=2, val=val, autocast=True, engine=engine)
    assert all(math.isfinite(x) for x in trainer.history.series("train_loss")[1])
    assert np.isfinite(trainer.history.last("val_losses")).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", ["MLP", "CNN", "GPT", "WithFrozen"])
def test_float64_throughout(model: str, strategy: str) -> None:
    val = dataset(model, 6, seed=1, dtype=torch.float64)
    trainer, result = fit(model, strategy, dtype=torch.float64, max_steps=3, val=val)
    floating = [x for x in result.state_dict().values() if x.is_floating_point()]
    assert all(x.dtype == torch.float64 for x in floating)
    assert trainer.history.node_array().dtype == np.float64
    single, _ = fit(model, strategy, max_steps=3)
    torch.testing.assert_close(params(trainer).float(), params(single), rtol=1e-2, atol=1e-3)
    assert not torch.equal(params(trainer), params(single).double())  # no float32 on the way


# --------------------------------------------------------------------------------------------- data of all kinds

Pair = namedtuple("Pair", ["features", "labels"])


class AnyBatch(MLP):
    """Takes a batch as a tuple, a list, a named tuple or a dict, and knows which one it was promised."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, batch: Any) -> Tensor:
        assert isinstance(batch, self.kind), type(batch)
        if isinstance(batch, dict):
            batch = batch["features"], batch["labels"]
        if self.kind is Pair:
            batch = batch.features, batch.labels
        return super().forward((batch[0], batch[1]))


class Kinds(Dataset[Any]):
    def __init__(self, make: Callable[[Tensor, Tensor], Any]) -> None:
        data: Any = make_data("MLP", 24)
        self.x, self.y = data
        self.make = make

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.make(self.x[index], self.y[index])


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda x, y: (x, y), (tuple, list)),
        (lambda x, y: Pair(x, y), Pair),
        (lambda x, y: {"features": x, "labels": y}, dict),
        (lambda x, y: (x.numpy(), int(y)), (tuple, list)),
    ],
    ids=["tuple", "namedtuple", "dict", "numpy"],
)
def test_batches_of_every_kind(make: Callable[..., Any], kind: type, engine: str) -> None:
    torch.manual_seed(0)
    module = AnyBatch(kind)
    module.load_state_dict(make_model("MLP").state_dict())
    expected, _ = fit("MLP", max_steps=3, engine=engine)
    found, _ = fit(module, data=Kinds(make), val=Kinds(make), max_steps=3, engine=engine)
    assert same(expected.nodes.params, found.nodes.params)
    assert expected.history["train_loss"] == found.history.series("train_loss")[1]


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_a_tensor_is_a_dataset_and_a_batch(engine: str) -> None:
    points = make_data("Quadratic", 24)[0]  # type: ignore[index]
    tensor, _ = fit(make_model("Quadratic"), data=points, val=points[:5], max_steps=3, engine=engine)
    wrapped, _ = fit(
        make_model("Quadratic"), data=TensorDataset(points), val=TensorDataset(points[:5]), max_steps=3, engine=engine
    )
    assert same_run(tensor, wrapped)
    assert tensor.history["val_loss"] == wrapped.history["val_loss"]


def test_a_python_dataset_gives_the_same_as_a_tensor_dataset() -> None:
    a, _ = fit("MLP", max_steps=4)
    b, _ = fit(make_model("MLP"), data=Rows(make_data("MLP", 24)), max_steps=4)
    assert same_run(a, b)


def test_collate_fn_and_workers() -> None:
    words = [("ab" * (i % 3 + 1), i % 10) for i in range(24)]

    def collate(examples: list[tuple[str, int]]) -> dict[str, Tensor]:
        letters = [[ord(c) - 97 for c in text.ljust(16, "c")] for text, _ in examples]
        return {"features": torch.tensor(letters).float(), "labels": torch.tensor([y for _, y in examples])}

    runs = [
        fit(
            make_model("DictBatch"),
            data=words,
            val=words,
            max_steps=3,
            dataloader_kwargs={"collate_fn": collate, "num_workers": workers},
        )[0]
        for workers in (0, 1)
    ]
    assert same_run(*runs)
    assert runs[0].history["val_loss"] == runs[1].history["val_loss"]
    assert runs[0].history.last("train_loss") < runs[0].history.series("train_loss")[1][0] + 1


def test_a_dataset_factory_with_unequal_lengths() -> None:
    lengths, calls = [12, 8, 5], []

    def factory(rank: int, num_nodes: int, train: bool) -> Dataset[Any]:
        calls.append((rank, num_nodes, train))
        return dataset("MLP", lengths[rank], seed=rank)

    trainer, _ = fit(make_model("MLP"), data=factory, val=factory, num_epochs=2)
    assert calls == [(i, 3, True) for i in range(3)] + [(i, 3, False) for i in range(3)]
    assert trainer.history.series("train_loss")[0] == list(range(1, 7))  # the longest has 12: 3 steps an epoch
    assert trainer.history.last("examples") == 2 * 3 * 12
    assert np.isfinite(trainer.history.node_array()).all()


def test_nodes_with_equal_data_stay_equal() -> None:
    trainer, _ = fit(
        make_model("MLP"), alone(), data=lambda rank, num_nodes, train: dataset("MLP", 8), shuffle=False, max_steps=3
    )
    torch.testing.assert_close(params(trainer), params(trainer)[:1].expand(3, -1))


# ------------------------------------------------------------------------------------------------ any number of nodes


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("model", ["MLP", "CNN", "GPT"])
def test_one_node_is_plain_training(model: str, engine: str) -> None:
    data = dataset(model, 12, dtype=torch.float64)
    plain = make_model(model, dtype=torch.float64)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    losses = []
    for batch in Batches(data, 1, 4, seed=42).iterate(0, 4):
        loss = plain([x[0] for x in batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for strategy in (AllReduceStrategy("adamw", lr=1e-2), FedAvgStrategy("adamw", H=2, lr=1e-2), alone("adamw", 1e-2)):
        trainer, result = fit(
            model, strategy, num_nodes=1, data=data, dtype=torch.float64, max_steps=4, engine=engine
        )  # fmt: skip
        torch.testing.assert_close(result.state_dict(), plain.state_dict(), rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(trainer.history["train_loss"], losses, rtol=1e-10)
        assert trainer.history.last("bytes_total") == 0


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if "islands" not in s and s != "Composed"])
@pytest.mark.parametrize("num_nodes", [1, 2, 5])
def test_every_strategy_with_few_nodes(strategy: str, num_nodes: int) -> None:
    trainer, _ = fit(
        "MLP", strategy, num_nodes=num_nodes, max_steps=4, val=dataset("MLP", 6), correlation_interval=2
    )  # fmt: skip
    assert params(trainer).shape[0] == num_nodes
    assert np.isfinite(trainer.history.last("val_loss"))
    assert trainer.history.node_array("val_losses").shape == (2, num_nodes)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_thousand_nodes(strategy: str) -> None:
    points = make_data("Quadratic", 2000)[0]  # type: ignore[index]
    trainer, result = fit(
        make_model("Quadratic"), strategy, num_nodes=1000, data=points, val=points[:20], batch_size=2, max_steps=3,
        correlation_interval=3,
    )  # fmt: skip
    assert trainer.nodes.params["x"].shape == (1000, 5)
    torch.testing.assert_close(result.get_parameter("x").detach(), trainer.nodes.params["x"].mean(0))
    assert trainer.history["examples"][-1] in (6000, 3000)  # all nodes, or half of them


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_learns(strategy: str) -> None:
    trainer, _ = fit("Quadratic", strategy, num_nodes=4, max_steps=40, val=dataset("Quadratic", 24))
    first, *_, last = trainer.history.series("val_loss")[1]
    assert last < first


# ---------------------------------------------------------------------------------------------------- the history


def test_columns_of_the_history() -> None:
    on: dict[str, Any] = {"network": Network(1e9), "compute": Compute(0.4), "availability": lambda step: range(3)}
    trainer, _ = fit("MLP", "DiLoCo", max_steps=4, val=dataset("MLP", 8), val_interval=2, correlation_interval=2, **on)
    history = trainer.history
    assert set(history.columns) == set(SCALARS) - {"epsilon"} | set(PER_NODE)  # that is of private exchanges
    assert history["step"] == [0, 1, 2, 3, 4]
    assert history["train_loss"][0] is None
    np.testing.assert_allclose(
        history.series("train_loss")[1], history.node_array().mean(1, dtype=np.float64), rtol=1e-12
    )
    assert history.node_array("train_losses").shape == (4, 3)
    assert history.node_array("val_losses").shape == (3, 3)
    assert history.series("val_loss")[0] == [0, 2, 4]
    assert history.series("consensus_distance")[0] == [2, 4]
    assert history.series("correlation")[0] == [2, 4]
    assert all(x > 0 for x in history.series("steps_per_s")[1])
    seconds = history["seconds"]
    assert seconds[0] == 0
    assert seconds == sorted(seconds)


def test_settings_of_the_history() -> None:
    trainer, _ = fit("MLP", max_steps=2, batch_size=4, minibatch_size=2, seed=7, shuffle=False)
    settings = trainer.history.settings
    assert settings["strategy"] == repr(STRATEGIES["FedAvg"]())
    chosen = {key: settings[key] for key in ("num_nodes", "max_steps", "batch_size", "minibatch_size", "seed")}
    assert chosen == {"num_nodes": 3, "max_steps": 2, "batch_size": 4, "minibatch_size": 2, "seed": 7}
    assert (settings["device"], settings["shuffle"]) == ("cpu", False)
    assert settings["engine"] in ("recorded", "vmap")  # the first if it is measured to be faster


def test_the_training_loss_is_before_the_update() -> None:
    data = dataset("MLP", 12, dtype=torch.float64)
    trainer, _ = fit("MLP", alone(), data=data, max_steps=1, dtype=torch.float64)
    batch = Batches(data, 3, 4, seed=42).batch(0)
    with torch.no_grad():
        expected = [float(trainer.model(tuple(x[i] for x in batch))) for i in range(3)]
    np.testing.assert_allclose(trainer.history.node_array()[0], expected, rtol=1e-12)


def test_lr_follows_the_schedule() -> None:
    def cosine(t: int) -> float:  # 3 steps of warm-up, 9 in all
        return t / 3 if t < 3 else 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (t - 3) / 6))

    strategy = DiLoCoStrategy("sgd", H=2, lr=0.2, warmup_steps=3, lr_scheduler="cosine")
    trainer, _ = fit("Quadratic", strategy, max_steps=9)
    assert trainer.history["lr"] == pytest.approx([0.2 * cosine(t) for t in range(9)], rel=1e-12)
    trainer, _ = fit("Quadratic", AllReduceStrategy("sgd", lr=0.2, lr_scheduler=lambda t: 0.5**t), max_steps=4)
    assert trainer.history["lr"] == pytest.approx([0.2, 0.1, 0.05, 0.025], rel=1e-12)
    trainer, _ = fit("Quadratic", AllReduceStrategy("sgd", lr=0.2), max_steps=4)
    assert trainer.history["lr"] == [0.2] * 4


def test_the_scheduled_lr_is_the_one_that_is_used() -> None:
    strategy = AllReduceStrategy("sgd", lr=0.5, lr_scheduler=lambda t: float(t == 1))
    first, _ = fit("Quadratic", strategy, max_steps=1)
    assert torch.equal(first.nodes.params["x"][0], first.model.get_parameter("x"))
    second, _ = fit("Quadratic", strategy, max_steps=2)
    assert not torch.equal(second.nodes.params["x"][0], second.model.get_parameter("x"))


def all_reduce(n: int) -> float:
    """Bytes that each of n nodes sends in a ring all-reduce of the MLP's parameters."""
    return 2 * (n - 1) / n * 4 * (16 * 32 + 32 + 32 * 10 + 10)


@pytest.mark.parametrize(
    ("strategy", "num_nodes", "expected"),
    [
        (AllReduceStrategy("sgd"), 4, [all_reduce(4)] * 6),
        (AllReduceStrategy("sgd"), 1, [0.0] * 6),
        (FedAvgStrategy("sgd", H=3), 4, [0, 0, all_reduce(4)] * 2),
        (FedAvgStrategy("sgd", H=2, island_size=2), 4, [0, all_reduce(2)] * 3),
        (FedAvgStrategy("sgd", H=2, island_size=3), 4, [0, 3 / 4 * all_reduce(3)] * 3),  # 3 nodes, and 1 alone
        (FedAvgStrategy("sgd", H=2, participation=0.5), 4, [0, 2 / 4 * all_reduce(2)] * 3),
        (DiLoCoStrategy("sgd", H=2), 4, [0, all_reduce(4)] * 3),
        (alone(), 4, [0.0] * 6),
    ],
    ids=lambda value: repr(value)[:60] if not isinstance(value, list) else "",
)
def test_bytes_are_the_closed_forms(strategy: Any, num_nodes: int, expected: list[float]) -> None:
    trainer, _ = fit("MLP", strategy, num_nodes=num_nodes, max_steps=6, val=dataset("MLP", 4), val_interval=1)
    assert trainer.history["bytes_step"] == pytest.approx([0.0, *expected], rel=1e-12)
    assert trainer.history["bytes_total"] == pytest.approx(np.cumsum([0.0, *expected]), rel=1e-12)
    assert trainer.ledger.total_bytes == pytest.approx(sum(expected), rel=1e-12)
    by_step = np.zeros(6)
    for entry in trainer.ledger:
        by_step[entry.step] += entry.sent_bytes
    assert by_step == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("model", "count"), [("GPT", None), ("WithFrozen", 32 * 10 + 10)])
def test_tied_weights_count_once_and_frozen_ones_are_not_sent(model: str, count: int | None) -> None:
    trainer, result = fit(model, AllReduceStrategy("sgd"), num_nodes=2, max_steps=1)
    trained = sum(p.numel() for p in result.parameters() if p.requires_grad) if count is None else count
    assert trainer.ledger.total_bytes == pytest.approx(4 * trained)  # 2 (2 - 1) / 2 = 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_consensus_distance_and_correlation_by_hand(strategy: str) -> None:
    trainer, _ = fit("MLP", strategy, num_nodes=4, max_steps=3, correlation_interval=3, dtype=torch.float64)
    rows = params(trainer).numpy()
    distance = np.sqrt(((rows - rows.mean(0)) ** 2).sum(1).mean())
    assert trainer.history.last("consensus_distance") == pytest.approx(distance, rel=1e-9, abs=1e-14)
    assert trainer.nodes.consensus_distance() == pytest.approx(distance, rel=1e-9, abs=1e-14)
    correlation = np.corrcoef(rows)[~np.eye(4, dtype=bool)].mean()
    assert trainer.history.last("correlation") == pytest.approx(correlation, rel=1e-9)
    if strategy == "AllReduce":
        assert (trainer.history.last("consensus_distance"), trainer.history.last("correlation")) == (0.0, 1.0)
    if strategy == "Alone":
        assert distance > 1e-3
        assert correlation < 1 - 1e-6


def test_the_correlation_leaves_out_what_is_frozen() -> None:
    trainer, _ = fit("WithFrozen", alone(), max_steps=2, correlation_interval=1, dtype=torch.float64)
    trained = torch.cat([trainer.nodes.params[f"second.{n}"].flatten(1) for n in ("weight", "bias")], 1)
    expected = np.corrcoef(trained.numpy())[~np.eye(3, dtype=bool)].mean()
    assert trainer.history.last("correlation") == pytest.approx(expected, rel=1e-9)
    assert trainer.history.series("correlation")[0] == [1, 2]


def test_history_as_columns() -> None:
    history = History({"engine": "vmap"})
    history.append({"step": 0, "val_loss": 2.0})
    history.append({"step": 1, "train_loss": 1.5, "train_losses": np.array([1.0, 2.0])})
    history.append({"step": 2, "train_loss": 1.0, "val_loss": 1.2, "extra": 3})
    assert history.columns == ["step", "train_loss", "val_loss", "train_losses", "extra"]
    assert len(history) == 3
    assert [row["step"] for row in history] == [0, 1, 2]
    assert history["val_loss"] == [2.0, None, 1.2]
    assert history["extra"] == [None, None, 3]
    assert history["correlation"] == [None, None, None]  # known, though not recorded
    assert history.series("train_loss") == ([1, 2], [1.5, 1.0])
    assert history.series("val_loss", x="train_loss") == ([1.0], [1.2])  # rows that have both
    assert history.last("val_loss") == 1.2
    assert history.last("correlation") is None
    assert history.node_array().tolist() == [[1.0, 2.0]]
    assert "3 rows" in repr(history)
    for read in (history.__getitem__, history.series, history.last):
        with pytest.raises(KeyError, match=r"train_los.*train_loss"):
            read("train_los")


def test_node_array_of_a_column_that_was_not_recorded() -> None:
    with pytest.raises(KeyError, match=r"val_losses.*val_dataset"):
        fit("Quadratic", max_steps=2)[0].history.node_array("val_losses")


# ------------------------------------------------------------------------------------------------------- loggers


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def check_columns(found: list[dict[str, str]], history: History) -> None:
    assert len(found) == len(history)
    for read, row in zip(found, history):
        for name in SCALARS:
            expected = row.get(name)
            assert read.get(name, "") == "" if expected is None else float(read[name]) == expected, name


def test_csv_logger_files_read_back_equal(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "one"
    trainer, _ = fit(
        "MLP", max_steps=5, val=dataset("MLP", 8), val_interval=2, correlation_interval=2, logger=CSVLogger(directory)
    )  # fmt: skip
    history = trainer.history
    check_columns(read_csv(directory / "history.csv"), history)
    for name in PER_NODE:
        rows = read_csv(directory / f"{name}.csv")
        assert [int(row["step"]) for row in rows] == history.series(name)[0]
        found = np.array([[float(row[f"node_{i}"]) for i in range(3)] for row in rows])
        assert np.array_equal(found.astype(history.node_array(name).dtype), history.node_array(name))
    assert json.loads((directory / "config.json").read_text()) == history.settings
    history.to_csv(tmp_path / "whole.csv")
    check_columns(read_csv(tmp_path / "whole.csv"), history)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["runs", "whole.csv"]  # nothing temporary is left


def test_csv_logger_replaces_an_earlier_run(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit("MLP", max_steps=5, val=dataset("MLP", 8), logger=logger)
    trainer, _ = fit("MLP", max_steps=2, logger=logger, num_nodes=2)
    check_columns(read_csv(tmp_path / "history.csv"), trainer.history)
    assert len(read_csv(tmp_path / "train_losses.csv")) == 2
    assert not (tmp_path / "val_losses.csv").exists()  # this run has none


class Listener(Logger):
    """Keeps what it is told; fails where it is asked to."""

    def __init__(self, fails_in: str = "") -> None:
        self.fails_in = fails_in
        self.calls: list[str] = []
        self.rows: list[dict[str, Any]] = []
        self.settings: dict[str, Any] = {}

    def start(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self._note("start")

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self._note("log")

    def finish(self) -> None:
        self._note("finish")

    def _note(self, method: str) -> None:
        self.calls.append(method)
        if method == self.fails_in:
            raise OSError("disk full")


def test_a_logger_hears_of_everything_once() -> None:
    listener = Listener()
    trainer, _ = fit("MLP", max_steps=3, val=dataset("MLP", 8), logger=listener)
    assert listener.calls == ["start", "log", "log", "log", "log", "finish"]
    assert listener.rows == trainer.history.rows
    assert listener.settings == trainer.history.settings


@pytest.mark.parametrize("method", ["start", "log", "finish"])
def test_a_failing_logger_warns_once_and_training_goes_on(method: str) -> None:
    broken, sound = Listener(fails_in=method), Listener()
    with pytest.warns(VecgymWarning, match=r"Listener.*disk full") as caught:
        trainer, _ = fit("MLP", max_steps=3, logger=[broken, sound])
    assert len(caught) == 1
    assert broken.calls.count(method) == 1
    assert sound.calls == ["start", "log", "log", "log", "finish"]
    assert sound.rows == trainer.history.rows
    expected, _ = fit("MLP", max_steps=3)
    assert same_run(trainer, expected)


def test_log_interval_thins_out_the_loggers_not_the_history() -> None:
    listener = Listener()
    trainer, _ = fit("MLP", max_steps=10, logger=listener, log_interval=4, val=dataset("MLP", 4), val_interval=5)
    assert [row["step"] for row in listener.rows] == [0, 4, 5, 8, 10]  # every fourth, and the evaluations
    assert trainer.history["step"] == list(range(11))


def test_rows_arrive_while_training_runs() -> None:
    class Watching(Listener):
        def log(self, row: dict[str, Any]) -> None:
            super().log(row)
            lengths.append(len(trainer.history))

    lengths: list[int] = []
    trainer = Trainer(make_model("MLP"), dataset("MLP"))
    trainer.fit(
        STRATEGIES["FedAvg"](), 3, max_steps=3, batch_size=4, logger=Watching(), progress=False, device="cpu"
    )  # fmt: skip
    assert lengths == [1, 2, 3]


def test_a_progress_bar_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    fit("MLP", max_steps=3)
    assert capsys.readouterr() == ("", "")
    fit("MLP", max_steps=3, progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "3/3" in captured.err


def test_an_optim_spec_is_used_as_it_is() -> None:
    spec = OptimSpec("sgd", lr=0.1, momentum=0.9)
    a, _ = fit("MLP", FedAvgStrategy(spec, H=2), max_steps=4)
    b, _ = fit("MLP", FedAvgStrategy("sgd", H=2, lr=0.1), max_steps=4)
    assert not torch.equal(params(a), params(b))


def test_the_distance_of_the_nodes_is_recorded_before_and_after_an_exchange() -> None:
    """After an averaging it is 0, whatever the nodes did: the one before tells."""
    data = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    for make in (
        lambda: FedAvgStrategy("sgd", H=4, lr=0.1),
        lambda: FedAvgStrategy("sgd", H=4, lr=0.1, participation=0.5),
    ):
        trainer = Trainer(Mean(), data)
        trainer.fit(make(), num_nodes=4, max_steps=8, batch_size=2, val_interval=2, progress=False)
        after, before = (
            dict(zip(*trainer.history.series(name))) for name in ("consensus_distance", "consensus_distance_before")
        )
        assert list(before) == [2, 4, 6, 8]
        assert before[2] == after[2] > 0
        assert before[4] > after[4] == 0
        assert before[8] > after[8] == 0


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w - x).square().mean()


def test_what_is_no_column_is_told_with_what_is_near() -> None:
    trainer, _ = fit("MLP", "DiLoCo", max_steps=4)
    for read in (trainer.history.__getitem__, trainer.history.series, trainer.history.last):
        with pytest.raises(KeyError, match="'bytes_totals' is not a column; did you mean 'bytes_total'"):
            read("bytes_totals")
