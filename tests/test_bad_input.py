"""Impossible settings are refused before training starts, by a message with the value given, the allowed ones and the
fix; errors of training name the place, and keep the results so far."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.fitting import STRATEGIES, alone, dataset, fit, params
from tests.models import MLP, make_model
from vecgym import (
    CSVLogger,
    DivergenceError,
    Logger,
    OptimSpec,
    Trainer,
    VecgymWarning,
    WandbLogger,
    load,
    rollout,
    sweep,
)
from vecgym.availability import LocalSteps
from vecgym.clock import Compute, Network
from vecgym.core import check
from vecgym.data import Batches, partition_dirichlet, partition_iid
from vecgym.engine import EngineName, contract
from vecgym.meta import Curve, learn
from vecgym.models import Line
from vecgym.optim import clip_grad_norm
from vecgym.plot.runs import default_window, smooth
from vecgym.plot.sweeps import pareto_front
from vecgym.runs.options import FitOptions
from vecgym.strategy import (
    ADPSGDStrategy,
    AllReduceStrategy,
    AveragingCommunicator,
    CommunicateOptimizeStrategy,
    DiLoCoStrategy,
    Exchange,
    FedAvgStrategy,
    Mean,
    MuLoCoStrategy,
    Outer,
    SPARTAStrategy,
)
from vecgym.strategy.robust import Corrupted


def _id(value: object) -> str:
    """A name of a case that is the same in every process: no addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))[:70]


def refusal(error: type[Exception], call: Callable[[], Any]) -> str:
    """The message of the error that `call` raises."""
    with pytest.raises(error) as raised:
        call()
    message = str(raised.value)
    assert len(message) < 900, "a message is read, not studied"
    return message


class Untrained(Logger):
    """Fails the test when training starts."""

    def log(self, row: dict[str, Any]) -> None:
        pytest.fail("training had started")


# ------------------------------------------------------------------------------------------- arguments of fit

BAD_SETTINGS: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
    # what is given, the error, and what its message must contain
    ({"num_nodes": 0}, ValueError, ["num_nodes=0", "integer >= 1"]),
    ({"num_nodes": -3}, ValueError, ["num_nodes=-3", "integer >= 1"]),
    ({"num_nodes": 2.0}, ValueError, ["num_nodes=2.0", "integer >= 1"]),
    ({"num_nodes": "4"}, ValueError, ["num_nodes='4'", "integer >= 1"]),
    ({"num_nodes": True}, ValueError, ["num_nodes=True", "integer >= 1"]),
    ({"num_nodes": None}, ValueError, ["num_nodes=None", "integer >= 1"]),
    ({"batch_size": 0}, ValueError, ["batch_size=0", "integer >= 1"]),
    ({"batch_size": 2.5}, ValueError, ["batch_size=2.5", "integer >= 1"]),
    (
        {"batch_size": 9, "dataloader_kwargs": {"drop_last": True}},
        ValueError,
        ["drop_last", "batch_size=9", "8 examples", "3 nodes", "batch_size=8"],
    ),
    ({"minibatch_size": 3}, ValueError, ["minibatch_size=3", "divide", "batch_size=4", "[1, 2, 4]"]),
    ({"minibatch_size": 8}, ValueError, ["minibatch_size=8", "divide", "batch_size=4", "[1, 2, 4]"]),
    ({"minibatch_size": 0}, ValueError, ["minibatch_size=0", "integer >= 1", "None"]),
    ({"num_epochs": 0}, ValueError, ["num_epochs=0", "integer >= 1"]),
    ({"num_epochs": None}, ValueError, ["num_epochs=None", "integer >= 1"]),
    ({"max_steps": 0}, ValueError, ["max_steps=0", "integer >= 1", "None"]),
    ({"max_steps": 1e3}, ValueError, ["max_steps=1000.0", "integer >= 1", "None"]),
    ({"val_interval": 0}, ValueError, ["val_interval=0", "integer >= 1", "None"]),
    ({"correlation_interval": -1}, ValueError, ["correlation_interval=-1", "integer >= 1", "None"]),
    ({"log_interval": 0}, ValueError, ["log_interval=0", "integer >= 1"]),
    ({"log_interval": None}, ValueError, ["log_interval=None", "integer >= 1"]),
    ({"val_size": -1}, ValueError, ["val_size=-1", "integer >= 0", "None"]),
    ({"val_size": 0.5}, ValueError, ["val_size=0.5", "integer >= 0", "None"]),
    ({"seed": "abc"}, TypeError, ["seed='abc'", "integer"]),
    ({"seed": 1.5}, TypeError, ["seed=1.5", "integer"]),
    ({"seed": 2**63}, ValueError, [f"seed={2**63}", "2**63 - 1"]),
    ({"seed": -(2**63) - 1}, ValueError, [f"seed={-(2**63) - 1}", "-2**63"]),
    ({"device": "banana"}, ValueError, ["'banana'", "cpu", "None"]),
    ({"device": 3.5}, ValueError, ["3.5", "cpu", "None"]),
    ({"device": 10**30}, ValueError, [str(10**30), "cpu", "None"]),
    ({"device": "cuda:77"}, ValueError, ["cuda:77", "cpu", "None"]),
    ({"device": "meta"}, ValueError, ["'meta'", "cpu", "None"]),
    ({"engine": "vamp"}, ValueError, ["engine='vamp'", "'vmap'", "'loop'", "'auto'"]),
    ({"engine": None}, ValueError, ["engine=None", "'auto'"]),
    ({"chunk_size": 0}, ValueError, ["chunk_size=0", "integer >= 1", "None"]),
    ({"node_threads": -1}, ValueError, ["node_threads=-1", "integer >= 1", "None"]),
    ({"on_divergence": "explode"}, ValueError, ["on_divergence='explode'", "'raise'", "'warn'", "'ignore'"]),
    ({"on_divergence": None}, ValueError, ["on_divergence=None", "'raise'"]),
    ({"logger": "out"}, TypeError, ["str", "CSVLogger"]),
    ({"logger": print}, TypeError, ["builtin_function", "CSVLogger"]),
    ({"logger": CSVLogger}, TypeError, ["the class CSVLogger", "object"]),
    ({"logger": [Logger(), 3]}, TypeError, ["int", "CSVLogger"]),
    ({"dataloader_kwargs": {"batch_size": 4}}, ValueError, ["'batch_size'", "argument batch_size"]),
    ({"dataloader_kwargs": {"shuffle": True}}, ValueError, ["'shuffle'", "argument shuffle"]),
    ({"dataloader_kwargs": {"nun_workers": 4}}, TypeError, ["'nun_workers'", "num_workers"]),
    ({"strategy": None}, TypeError, ["NoneType", "Strategy object", "DiLoCoStrategy("]),
    ({"strategy": "diloco"}, TypeError, ["str", "Strategy object", "DiLoCoStrategy("]),
    ({"strategy": DiLoCoStrategy}, TypeError, ["the class DiLoCoStrategy", "object"]),
    ({"strategy": AveragingCommunicator()}, TypeError, ["Exchange", "Strategy object"]),
    ({"strategy": FedAvgStrategy(island_size=5)}, ValueError, ["island_size=5", "3 nodes", "island_size <= 3", "None"]),
    (
        {"strategy": FedAvgStrategy(island_size=3, participation=0.5)},
        ValueError,
        ["island_size=3", "2 nodes", "island_size <= 2"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "error", "parts"), BAD_SETTINGS, ids=_id)
def test_bad_settings(settings: dict[str, Any], error: type[Exception], parts: list[str]) -> None:
    given: dict[str, Any] = {"strategy": alone(), "num_nodes": 3, "logger": Untrained(), **settings}
    message = refusal(error, lambda: fit("MLP", **given))
    for part in parts:
        assert part in message, f"{part!r} is not in {message!r}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one here")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda")])
def test_a_device_that_is_not_there(device: Any) -> None:
    message = refusal(ValueError, lambda: fit("MLP", alone(), device=device))
    assert "cuda" in message
    assert "cpu" in message
    assert "None" in message


def test_misspelt_keywords_of_fit_and_trainer() -> None:
    trainer = Trainer(make_model("MLP"), dataset("MLP"))
    for keyword in ("batchsize", "epochs", "gradient_acumulation", "max_memory"):
        unknown: dict[str, Any] = {keyword: 1}
        assert keyword in refusal(TypeError, lambda: trainer.fit(alone(), 2, **unknown))  # noqa: B023
    assert "test_dataset" in refusal(
        TypeError, lambda: Trainer(make_model("MLP"), dataset("MLP"), test_dataset=1)  # type: ignore[call-arg]
    )  # fmt: skip


def test_flags_are_true_or_false() -> None:
    trainer = Trainer(make_model("MLP"), dataset("MLP"))
    labels = torch.arange(8) % 2

    def of_fit(name: str, value: Any) -> None:
        given: dict[str, Any] = {name: value}
        trainer.fit(alone(), 2, **given)

    def of_loader(name: str, value: Any) -> None:
        Batches(labels, 2, 1, dataloader_kwargs={name: value})

    def of_sweep(name: str, value: Any) -> None:
        given: dict[str, Any] = {"grid": {"lr": [0.1]}, "num_nodes": 2, name: value}
        sweep(trainer.model, trainer.train_dataset, strategy=lambda lr: alone(lr=lr), **given)

    flags: dict[str, Callable[[Any], Any]] = {
        **{name: partial(of_fit, name) for name in ("shuffle", "autocast", "progress", "exact")},
        **{name: partial(of_loader, name) for name in ("drop_last", "pin_memory", "persistent_workers")},
        **{f"sweep {name}": partial(of_sweep, name) for name in ("keep_models", "dry_run", "progress", "shuffle")},
        "train": lambda value: Batches(labels, 2, 1, train=value),
        "balanced": lambda value: partition_dirichlet(labels, 2, 1.0, balanced=value),
        "cosine_anneal": lambda value: CommunicateOptimizeStrategy([], "sgd", cosine_anneal=value),
    }
    for name, give in flags.items():
        for wrong in ("no", 1, None):
            assert f"{name.split()[-1]}={wrong!r} must be True or False" in refusal(TypeError, lambda: give(wrong))  # noqa: B023


def test_numpys_integers_and_flags_are_integers_and_flags() -> None:
    """Elements of an array of seeds, or of sizes, are such integers."""
    plain, _ = fit("MLP", alone(), num_nodes=2, max_steps=3, batch_size=2, seed=3, shuffle=False)
    numpys: dict[str, Any] = {
        "num_nodes": np.int64(2), "max_steps": np.int8(3), "batch_size": np.uint16(2), "seed": np.int64(3),
        "shuffle": np.bool_(False),
    }  # fmt: skip
    trainer, _ = fit("MLP", alone(), **numpys)
    assert torch.equal(params(plain), params(trainer))
    given = {name: value for name, value in trainer.history.settings.items() if name in numpys}
    assert {name: type(value) for name, value in given.items()} == {
        name: bool if name == "shuffle" else int for name in numpys
    }


def no_runs(seed: int) -> tuple[Any, ...]:
    raise AssertionError("these options are not valid")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), "1", None, torch.tensor(1.0), True])
def test_numbers_are_finite_numbers(value: Any) -> None:
    labels = torch.arange(8) % 2
    calls: dict[str, Callable[[], Any]] = {
        "alpha": lambda: partition_dirichlet(labels, 2, value),
        "max_memory_usage": lambda: fit("MLP", alone(), max_memory_usage=value),
        "seconds": lambda: learn(alone, {"lr": Curve(1.0)}, runs=no_runs, num_nodes=2, max_steps=2, seconds=value),
        "timeout": lambda: Batches(labels, 2, 1, dataloader_kwargs={"timeout": value, "num_workers": 1}),
    }
    for name, call in calls.items():
        if value is None and name in ("max_memory_usage", "seconds"):
            continue
        if name == "max_memory_usage" and value is True:
            continue
        assert name in refusal(ValueError, call)


def test_what_has_changed_places_is_named() -> None:
    model, data = make_model("MLP"), dataset("MLP")
    swapped: Any = (data, model)
    assert "the model comes first, Trainer(model, train_dataset)" in refusal(TypeError, lambda: Trainer(*swapped))
    wrong: Any = (2, alone())
    assert "swap them, fit(strategy, num_nodes)" in refusal(TypeError, lambda: Trainer(model, data).fit(*wrong))
    for other in (model, nn.Sequential(model)):
        for arguments in ((model, other), (model, data, other)):
            assert "a model" in refusal(TypeError, lambda: Trainer(*arguments))  # noqa: B023


@pytest.mark.parametrize(
    ("strategy", "fix"),
    [
        ("diloco", "did you mean DiLoCoStrategy()?"),
        ("FedAvgStrategy", "did you mean FedAvgStrategy()?"),
        ("allreduce", "did you mean AllReduceStrategy()?"),
        (DiLoCoStrategy, "did you mean an object of it, DiLoCoStrategy()?"),
        (lambda: DiLoCoStrategy(), "of type function. Give a Strategy object"),
        ("", "Strategy object"),
    ],
)
def test_a_strategy_that_is_none_says_which_it_may_be(strategy: Any, fix: str) -> None:
    assert fix in refusal(TypeError, lambda: fit("MLP", strategy))


def test_fit_within_its_own_run_is_refused_and_leaves_it_unharmed() -> None:
    others: list[dict[str, Any]] = [{}, {"backend": "processes", "num_processes": 2}]

    class Nested(Trainer):
        refused = 0

        def after_step(self, row: dict[str, Any]) -> None:
            for settings in others:
                message = refusal(RuntimeError, lambda: self.fit(alone(), 2, progress=False, **settings))  # noqa: B023
                assert "another Trainer for the second run" in message
            self.refused += 1

    trainer = Nested(make_model("MLP"), dataset("MLP"))
    settings: dict[str, Any] = {"num_nodes": 3, "max_steps": 3, "batch_size": 4, "progress": False, "device": "cpu"}
    for _ in range(2):  # and it can be used again
        trainer.fit(alone(), **settings)
    assert trainer.refused == 8
    plain, _ = fit("MLP", alone(), num_nodes=3, max_steps=3)
    assert torch.equal(params(plain), params(trainer))


def test_settings_are_keywords() -> None:
    """A number in the wrong place is no silent setting."""
    trainer = Trainer(make_model("MLP"), dataset("MLP"))
    refusal(TypeError, lambda: trainer.fit(alone(), 2, 10))  # type: ignore[call-arg]


# ----------------------------------------------------------------------------------------------------- the data

BAD_DATA: list[tuple[Any, type[Exception], list[str]]] = [
    (None, TypeError, ["train_dataset", "NoneType", "__getitem__", "factory"]),
    ([], ValueError, ["train_dataset", "empty"]),
    (torch.zeros(0, 5), ValueError, ["train_dataset", "empty"]),
    ({"train": [1, 2]}, TypeError, ["train_dataset", "dict", 'splits["train"]']),
    ("mnist", TypeError, ["train_dataset", "str"]),
    (42, TypeError, ["train_dataset", "int", "TensorDataset"]),
    (
        torch.utils.data.DataLoader(TensorDataset(torch.zeros(3))),
        TypeError,
        ["train_dataset", "DataLoader", "loader.dataset"],
    ),
    ((x for x in range(3)), TypeError, ["train_dataset", "generator"]),
    (lambda rank, num_nodes, train: [], ValueError, ["train_dataset", "node 0", "empty"]),
    (lambda rank, num_nodes, train: None, TypeError, ["train_dataset", "node 0", "NoneType"]),
    (lambda rank, num_nodes: [1], TypeError, ["train_dataset", "(rank, num_nodes, train) -> Dataset", "too many"]),
    (torch.tensor(3.0), TypeError, ["train_dataset", "0-D tensor", "without length"]),
    ({1, 2}, TypeError, ["train_dataset", "set", "__getitem__"]),
    ([None] * 8, TypeError, ["train_dataset", "NoneType", "collate_fn"]),
    ([torch.ones(2), torch.ones(3)] * 4, ValueError, ["train_dataset", "(2,)", "(3,)", "pad"]),
    ((torch.ones(64, 3),) * 2, TypeError, ["train_dataset", "2 examples, not 64", "TensorDataset(x, y)"]),
    ([torch.ones(64, 3), torch.ones(64)], TypeError, ["a list of Tensor", "2 examples, not 64", "TensorDataset(x, y)"]),
    ((np.ones((64, 3)), np.ones(64), np.ones(64)), TypeError, ["3 examples, not 64", "TensorDataset(x, y, z)"]),
    (lambda rank, num_nodes, train: (torch.ones(9),) * 2, TypeError, ["node 0", "2 examples, not 9"]),
]


@pytest.mark.parametrize(("data", "error", "parts"), BAD_DATA, ids=_id)
def test_bad_data(data: Any, error: type[Exception], parts: list[str]) -> None:
    def train() -> None:
        Trainer(make_model("Quadratic"), data).fit(alone(), 2, batch_size=2, progress=False, device="cpu")

    message = refusal(error, train)
    for part in parts:
        assert part in message, f"{part!r} is not in {message!r}"


@pytest.mark.parametrize(("val", "error"), [([], ValueError), (42, TypeError)])
def test_bad_validation_data(val: Any, error: type[Exception]) -> None:
    assert "val_dataset" in refusal(error, lambda: fit("MLP", alone(), val=val, logger=Untrained()))


def test_few_examples_are_no_columns() -> None:
    for data in (
        [torch.ones(3)] * 2,
        (torch.ones(2, 5), torch.ones(2, 5)),
        [torch.ones(64)] * 5,
        [(torch.ones(64), 1)] * 2,
    ):
        assert len(Batches(data, 1, 2).batch(0)) == 1 + isinstance(data[0], tuple)


SORTED = TensorDataset(torch.randn(64, 16), torch.arange(64) // 16)


class Pictures:
    """A dataset with `targets`, such as torchvision's."""

    targets = SORTED.tensors[1].tolist()

    def __len__(self) -> int:
        return len(SORTED)

    def __getitem__(self, index: int) -> Any:
        return SORTED[index]


@pytest.mark.parametrize(("given", "said"), [
    ({"batch_size": 100}, "batch_size=100, but train_dataset has 64 examples: each of 4 nodes uses its 16"),
    ({"num_nodes": 65}, "train_dataset has 64 examples for 65 nodes: several nodes train on the same ones"),
    ({"shuffle": False}, "shuffle=False, and the labels of train_dataset are sorted"),
    ({"shuffle": False, "data": torch.utils.data.Subset(SORTED, range(8, 64))}, "the labels of train_dataset"),
    ({"shuffle": False, "data": Pictures()}, "the labels of train_dataset are sorted"),
])  # fmt: skip
def test_data_that_are_dealt_as_nobody_means_warn(given: dict[str, Any], said: str) -> None:
    with pytest.warns(VecgymWarning, match=said):
        fit("MLP", alone(), **{"data": SORTED, "num_nodes": 4, "max_steps": 2, **given})


@pytest.mark.parametrize("data", [
    TensorDataset(torch.randn(64, 16), torch.arange(64) // 16 % 2),
    TensorDataset(torch.randn(64, 16), torch.zeros(64, dtype=torch.long)),
    torch.utils.data.Subset(SORTED, torch.randperm(64).tolist()),
])  # fmt: skip
def test_labels_that_are_not_sorted_do_not_warn(data: Any) -> None:
    fit("MLP", alone(), data=data, num_nodes=4, batch_size=16, max_steps=1, shuffle=False)
    Batches(torch.arange(64), 4, 16, shuffle=False)  # of tokens
    Batches(SORTED, 1, 16, shuffle=False)


class Ignores(nn.Module):
    def __init__(self, of: float = 0.0) -> None:
        super().__init__()
        self.w, self.of = nn.Parameter(torch.zeros(())), of

    def forward(self, x: Tensor) -> Tensor:
        return (self.w - 1 - self.of * x).square().mean()


def test_a_model_that_ignores_its_batch_warns() -> None:
    with pytest.warns(
        VecgymWarning, match="all 3 nodes had the same loss in each of 4 steps, and their examples differ"
    ):
        fit(Ignores(), alone(), data=torch.arange(24.0), num_nodes=3, batch_size=2, max_steps=4)
    for model, data in (
        (Ignores(of=1.0), torch.arange(24.0)),
        (Ignores(of=1.0), torch.ones(24)),
        (Ignores(), torch.ones(24)),
    ):
        fit(model, alone(), data=data, num_nodes=3, batch_size=2, max_steps=4)


def test_settings_that_require_grad_are_refused_before_training() -> None:
    for make in (
        lambda x: AllReduceStrategy("sgd", lr=x), lambda x: DiLoCoStrategy("sgd", H=1, outer_lr=x),
        lambda x: DiLoCoStrategy(OptimSpec("adamw", betas=(x, 0.99)), H=1),
    ):  # fmt: skip
        message = refusal(
            ValueError, lambda: fit("MLP", make(torch.tensor(0.5, requires_grad=True)), logger=Untrained())  # noqa: B023
        )  # fmt: skip
        assert "requires grad, and fit() has no derivatives" in message
        assert "vecgym.rollout" in message
        fit("MLP", make(torch.tensor(0.5)), max_steps=1)
    with pytest.raises(ValueError, match=r"lr of OptimSpec.* requires grad, and fit"):
        sweep(
            Line(), torch.ones(9), strategy=alone(lr=cast(Any, torch.tensor(0.5, requires_grad=True))),
            grid={"seed": [0, 1]}, num_nodes=2,
        )  # fmt: skip


META: Any = torch.ones(4, 4, device="meta")
TEXTS = np.array([b"a", b"b"] * 8)


def differentiable(**given: Any) -> Any:
    """A rollout of a few steps, with some of its arguments changed."""
    settings = {"num_nodes": 2, "eval_batch": torch.ones(3), "batches": torch.ones(4, 2, 3), **given}
    return rollout(Line(), strategy=FedAvgStrategy("sgd", lr=0.1), **settings)


def trained(strategy: Any = None, **given: Any) -> Any:
    settings = {"num_nodes": 3, "max_steps": 1, **given}
    return fit("MLP", CommunicateOptimizeStrategy([strategy], "sgd", lr=0.1) if strategy else alone(), **settings)


RUNS = [list(Batches(SORTED, 2, 4, seed=seed).iterate(0, 3)) for seed in range(4)]
RAW: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: SPARTAStrategy(delay=torch.tensor([1, 2]), compression_method="topk"), ValueError, "leave out .* delay"),  # type: ignore[arg-type]
    (lambda: SPARTAStrategy(delay=np.array([0, 0]), correct_delay=True), ValueError, "correct_delay=True without"),  # type: ignore[arg-type]
    (lambda: LocalSteps(META[0], H=2), ValueError, "steps is on the device meta"),
    (lambda: ADPSGDStrategy("sgd", META), ValueError, "topology is on the device meta"),
    (lambda: ADPSGDStrategy("sgd", torch.zeros(2, 2, dtype=torch.cfloat)), ValueError, "topology .* complex numbers"),
    (lambda: Corrupted(Mean(), [[1, 2]]), ValueError, r"nodes=\[1, 2\] must be an integer >= 0"),  # type: ignore[list-item]
    (lambda: Corrupted(Mean(), [1, 1]), ValueError, "a list of different node ids"),
    (
        lambda: trained(Exchange(Corrupted(Mean(), [3]))),
        ValueError,
        r"nodes=\[3\] of a run of 3 nodes: give ids below 3",
    ),
    (
        lambda: trained(Exchange(cast(Any, Outer)(Mean(), correct=lambda m, s, at: "x"))),
        TypeError,
        "correct returned 'x'; return a",
    ),
    (lambda: clip_grad_norm([1], 1.0), TypeError, "grads is of type list; give a dict of tensors"),  # type: ignore[arg-type]
    (lambda: clip_grad_norm({"w": "x"}, 1.0), TypeError, r"grads\['w'\] is of type str; give a tensor"),  # type: ignore[dict-item]
    (lambda: clip_grad_norm({"w": torch.ones(2, 3).long()}, 1.0), TypeError, r"grads\['w'\] .*of real numbers"),
    (
        lambda: sweep(Line(), torch.ones(9), strategy=cast(Any, np.ones(2)), grid={"lr": [1.0]}, num_nodes=2),
        TypeError,
        "strategy is of",
    ),
    (
        lambda: sweep(Line(), torch.ones(9), strategy=alone, points=torch.tensor(1.0), num_nodes=2),
        TypeError,
        "points is of",
    ),
    (lambda: differentiable(params={1: 2}), ValueError, r"params must have the names .* \['1', 'w'\]"),
    (lambda: differentiable(params={"w": -1}), TypeError, r"params\['w'\] is of type int; give a tensor \[2, \*\]"),
    (lambda: differentiable(eval_batch=torch.ones(0)), ValueError, "eval_batch has no example"),
    (
        lambda: differentiable(eval_batch=torch.ones(3).to(torch.cfloat)),
        ValueError,
        "the loss of eval_batch is torch.complex64",
    ),
    (lambda: differentiable(batches=RUNS, eval_batch=[SORTED[:9]] * 4), ValueError, r"lists of 4 runs.*num_runs=4"),
    (
        lambda: differentiable(batches=[[torch.ones(2, 3)] * 4] * 5, eval_batch=[torch.ones(3)] * 5),
        ValueError,
        "of 5 runs",
    ),
    (lambda: trained(data=TEXTS), TypeError, "train_dataset: batch .*bytes_. Allowed: tensors"),
    (lambda: trained(data=[np.array(["a", "b"])] * 8), TypeError, "train_dataset: batch is an array of <U1"),
    (lambda: partition_iid("5 ms", 4), TypeError, "data is a str, not a dataset"),
    (lambda: smooth("abc", 2), TypeError, "values is of type str; give a list of numbers"),  # type: ignore[arg-type]
    (lambda: smooth([1.0, 2.0], "a"), ValueError, "window='a' must be an integer >= 1"),  # type: ignore[arg-type]
    (lambda: pareto_front([(1.0, 2.0), (1.0,)]), TypeError, r"points is of type list; give pairs of numbers"),  # type: ignore[list-item]
    (lambda: default_window(-3), TypeError, "history is of type int; give trainer.history"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("make", "error", "said"), RAW, ids=[row[2][:40] for row in RAW])
def test_what_was_a_raw_exception_or_taken_without_a_word(
    make: Callable[[], Any], error: type[Exception], said: str
) -> None:  # fmt: skip
    assert re.search(said, refusal(error, make))


def test_numbers_too_large_for_torch_are_numbers() -> None:
    assert OptimSpec("sgd", lr=10**30).lr == 1e30
    assert clip_grad_norm({"w": torch.ones(2, 3)}, 10**30)[0]["w"].tolist() == [[1.0] * 3] * 2
    assert pareto_front([]) == []
    with pytest.raises(ValueError, match="lr=inf must be finite"):
        OptimSpec("sgd", lr=10**400)


def test_examples_of_different_shapes() -> None:
    data = [(torch.zeros(16), 0), (torch.zeros(15), 0)] * 4
    message = refusal(ValueError, lambda: fit(make_model("MLP"), alone(), data=data, num_nodes=1, batch_size=4))
    assert "16" in message
    assert "15" in message


# ---------------------------------------------------------------------------------------------------- the model


class Returns(MLP):
    """An MLP whose forward returns what `make(logits, y)` makes."""

    def __init__(self, make: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, batch: tuple[Tensor, Tensor]) -> Any:
        x, y = batch
        return self.make(self.second(self.first(x).relu()), y)


BAD_FORWARD: dict[str, tuple[Callable[[Tensor, Tensor], Any], list[str]]] = {
    "logits": (lambda logits, y: logits, ["float32 [4, 10]", "not a scalar", "F.cross_entropy"]),
    "loss per example": (lambda logits, y: F.cross_entropy(logits, y, reduction="none"), ["float32 [4]", "mean loss"]),
    "one element": (lambda logits, y: F.cross_entropy(logits, y)[None], ["float32 [1]", "not a scalar"]),
    "logits and loss": (
        lambda logits, y: (logits, F.cross_entropy(logits, y)),
        ["(float32 [4, 10], float32 [])", "scalar", "loss_fn"],
    ),
    "a dict": (lambda logits, y: {"loss": F.cross_entropy(logits, y)}, ["{'loss': float32 []}", "scalar", "loss_fn"]),
    "nothing": (lambda logits, y: None, ["NoneType", "scalar"]),
    "a number": (lambda logits, y: F.cross_entropy(logits, y).item(), ["float", "scalar"]),
    "accuracy": (lambda logits, y: (logits.argmax(1) == y).sum(), ["int64", "floating-point"]),
    "no gradient": (lambda logits, y: F.cross_entropy(logits, y).detach(), ["trainable parameter", ".detach()"]),
    "complex": (lambda logits, y: F.cross_entropy(logits, y) + 0j, ["complex", "floating-point"]),
}


@pytest.mark.parametrize("engine", ["auto", "vmap", "loop"])
@pytest.mark.parametrize("name", BAD_FORWARD)
def test_what_the_model_must_return(name: str, engine: str) -> None:
    make, parts = BAD_FORWARD[name]

    def train() -> None:
        fit(Returns(make), alone(), data=dataset("MLP"), engine=engine, logger=Untrained())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        message = refusal((ValueError, TypeError), train)  # type: ignore[arg-type]
    for part in [*parts, "the model"]:
        assert part in message, f"{part!r} is not in {message!r}"


def test_a_model_without_trainable_parameters() -> None:
    for module in (make_model("MLP").requires_grad_(False), nn.Identity()):
        for engine in ("auto", "loop"):
            message = refusal(ValueError, lambda: fit(module, alone(), data=dataset("MLP"), engine=engine))  # noqa: B023
            assert "trainable" in message
            assert "requires_grad" in message


@pytest.mark.parametrize("model", [MLP, make_model, None, "gpt"])
def test_a_model_that_is_none(model: Any) -> None:
    message = refusal(TypeError, lambda: Trainer(model, dataset("MLP")))
    assert "nn.Module" in message
    if isinstance(model, type):
        assert "the class MLP" in message


def test_a_forward_that_takes_two_arguments() -> None:
    class TwoArguments(MLP):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward((x, y))

    for engine in ("auto", "loop"):
        message = refusal(TypeError, lambda e=engine: fit(TwoArguments(), alone(), data=dataset("MLP"), engine=e))  # type: ignore[misc]
        assert "'y'" in message


# -------------------------------------------------------------------------------------------------- the strategies

STRATEGY_CLASSES = [AllReduceStrategy, FedAvgStrategy, DiLoCoStrategy]


@pytest.mark.parametrize("cls", STRATEGY_CLASSES)
@pytest.mark.parametrize("keyword", ["learning_rate", "optimizer", "max_nrom", "warmup", "h", "island"])
def test_misspelt_keywords_of_strategies(cls: type, keyword: str) -> None:
    assert keyword in refusal(TypeError, lambda: cls(**{keyword: 1}))


@pytest.mark.parametrize(
    "make",
    [
        lambda: CommunicateOptimizeStrategy([], "sgd", learning_rate=0.1),  # type: ignore[call-arg]
        lambda: AveragingCommunicator(islandsize=2),  # type: ignore[call-arg]
        lambda: Exchange(Mean(), h=2),  # type: ignore[call-arg]
        lambda: AllReduceStrategy(H=2),  # type: ignore[call-arg]
        lambda: cast(Any, AllReduceStrategy)("sgd", 0.1),
        lambda: CommunicateOptimizeStrategy(),  # type: ignore[call-arg]
    ],
)
def test_misspelt_keywords_of_the_parts(make: Callable[[], Any]) -> None:
    refusal(TypeError, make)


BAD_STRATEGIES: list[tuple[Callable[[type], Any], type[Exception], list[str]]] = [
    (lambda cls: cls("adamm"), ValueError, ["'adamm'", "adamw", "did you mean"]),
    (lambda cls: cls("sdg"), ValueError, ["'sdg'", "did you mean 'sgd'"]),
    (lambda cls: cls("xyz"), ValueError, ["'xyz'", "adamw", "sgd"]),
    (lambda cls: cls(3), TypeError, ["int", "'adamw'", "OptimSpec"]),
    (lambda cls: cls(nn.Linear), TypeError, ["OptimSpec", "torch.optim.AdamW"]),
    (lambda cls: cls(torch.optim.SGD([torch.zeros(1)])), TypeError, ["SGD", "class"]),
    (lambda cls: cls("sgd", lr=-0.1), ValueError, ["-0.1", "SGD"]),
    (lambda cls: cls("adamw", lr=-1e-3), ValueError, ["-0.001", "AdamW"]),
    (lambda cls: cls("sgd", lr="fast"), (TypeError, ValueError), ["'fast'"]),  # type: ignore[list-item]
    (lambda cls: cls(OptimSpec("sgd", lr=0.1), lr=0.2), ValueError, ["lr", "twice", "0.1", "0.2"]),
    (lambda cls: cls("sgd", max_norm=0.0), ValueError, ["max_norm=0.0"]),
    (lambda cls: cls("sgd", max_norm=-1), ValueError, ["max_norm=-1"]),
    (lambda cls: cls("sgd", warmup_steps=-1), ValueError, ["warmup_steps=-1", "integer >= 0"]),
    (lambda cls: cls("sgd", warmup_steps=0.1), ValueError, ["warmup_steps=0.1", "integer >= 0"]),
    (lambda cls: cls("sgd", lr_scheduler="cosin"), ValueError, ["'cosin'", "did you mean 'cosine'", "'constant'"]),
    (lambda cls: cls("sgd", lr_scheduler="linear"), ValueError, ["'linear'", "'cosine'", "'constant'", "function"]),
    (lambda cls: cls("sgd", lr_scheduler=0.1), TypeError, ["0.1", "cosine", "lambda"]),
    (lambda cls: cls("sgd", lr_scheduler=lambda t: 1.0, warmup_steps=5), ValueError, ["warmup_steps", "function"]),
]


@pytest.mark.parametrize("cls", STRATEGY_CLASSES)
@pytest.mark.parametrize(("make", "error", "parts"), BAD_STRATEGIES, ids=[str(row[2][0]) for row in BAD_STRATEGIES])
def test_bad_strategies(cls: type, make: Callable[[type], Any], error: type[Exception], parts: list[str]) -> None:
    message = refusal(error, lambda: make(cls))
    for part in parts:
        assert part in message, f"{part!r} is not in {message!r}"


@pytest.mark.parametrize(
    ("make", "error", "parts"),
    [
        (lambda: FedAvgStrategy(H=0), ValueError, ["H=0", "integer >= 1", "steps"]),
        (lambda: DiLoCoStrategy(H=0), ValueError, ["H=0", "integer >= 1", "steps"]),
        (lambda: DiLoCoStrategy(H=-5), ValueError, ["H=-5", "integer >= 1"]),
        (lambda: DiLoCoStrategy(H=2.5), ValueError, ["H=2.5", "integer >= 1"]),  # type: ignore[arg-type]
        (lambda: DiLoCoStrategy(H=True), ValueError, ["H=True", "integer >= 1"]),
        (lambda: DiLoCoStrategy(H=None), ValueError, ["H=None", "integer >= 1"]),  # type: ignore[arg-type]
        (lambda: DiLoCoStrategy(lr=0.1, inner_lr=0.2), ValueError, ["lr", "inner_lr", "one of them"]),
        (lambda: DiLoCoStrategy(outer_optim="sdg"), ValueError, ["'sdg'", "did you mean 'sgd'"]),
        (lambda: DiLoCoStrategy(outer_lr=-1.0), ValueError, ["outer_lr=-1.0", "a number >= 0"]),
        (lambda: DiLoCoStrategy("adamw", outer_lr="0.7"), ValueError, ["outer_lr='0.7'", "a number >= 0"]),  # type: ignore[arg-type]
        (lambda: DiLoCoStrategy(outer_lr=torch.tensor([0.1, -1.0])), ValueError, ["outer_lr=-1.0", "a number >= 0"]),
        (lambda: MuLoCoStrategy(adamw_lr=-1.0), ValueError, ["adamw_lr=-1.0", "a number >= 0"]),
        (lambda: OptimSpec("adamw", lr="1e-3"), TypeError, ["AdamW", "lr='1e-3' must be a number, such as 0.001"]),
        (lambda: OptimSpec("adamw", betas={}), TypeError, ["betas={} must be 2 numbers, such as (0.9, 0.999)"]),
        (lambda: OptimSpec("adamw", betas=("0.9", 0.99)), TypeError, ["betas='0.9' must be a number, such as 0.9"]),
        (lambda: OptimSpec("sgd", lr=0.1, weight_decay=None), TypeError, ["weight_decay=None must be a number"]),
        (lambda: FedAvgStrategy(island_size=0), ValueError, ["island_size=0", "integer >= 1", "None"]),
        (lambda: FedAvgStrategy(island_size=2.0), ValueError, ["island_size=2.0", "integer >= 1"]),  # type: ignore[arg-type]
        (lambda: FedAvgStrategy(participation=0), ValueError, ["participation=0", "(0, 1]"]),
        (lambda: FedAvgStrategy(participation=1.5), ValueError, ["participation=1.5", "(0, 1]"]),
        (lambda: FedAvgStrategy(participation=-0.1), ValueError, ["participation=-0.1", "(0, 1]"]),
        (lambda: FedAvgStrategy(participation=float("nan")), ValueError, ["participation=nan", "(0, 1]"]),
        (lambda: FedAvgStrategy(participation=True), ValueError, ["participation=True", "(0, 1]"]),
        (lambda: FedAvgStrategy(participation="half"), (ValueError, TypeError), ["participation='half'", "(0, 1]"]),  # type: ignore[arg-type]
        (
            lambda: CommunicateOptimizeStrategy(AveragingCommunicator()),  # type: ignore[arg-type]
            TypeError,
            ["communication_modules", "list", "[Exchange(Mean()"],
        ),
        (lambda: CommunicateOptimizeStrategy([AveragingCommunicator]), TypeError, ["communication_modules"]),
        (lambda: CommunicateOptimizeStrategy([FedAvgStrategy()]), TypeError, ["FedAvgStrategy", "give an Exchange"]),
        (lambda: CommunicateOptimizeStrategy("sgd"), TypeError, ["communication_modules"]),
        (lambda: OptimSpec("sgd", learning_rate=0.1), TypeError, ["'learning_rate'", "SGD", "lr"]),
        (lambda: OptimSpec("sgd", momentun=0.9), TypeError, ["'momentun'", "did you mean 'momentum'"]),
        (lambda: OptimSpec("adamw", momentum=0.9), TypeError, ["'momentum'", "AdamW", "betas"]),
        (lambda: OptimSpec("sgd", nesterov=True), ValueError, ["SGD", "Nesterov"]),
        (lambda: OptimSpec("adamm"), ValueError, ["'adamm'", "did you mean 'adam"]),
    ],
)  # fmt: skip
def test_bad_arguments(make: Callable[[], Any], error: type[Exception], parts: list[str]) -> None:
    message = refusal(error, make)
    for part in parts:
        assert part in message, f"{part!r} is not in {message!r}"


@pytest.mark.parametrize("strategy", [FedAvgStrategy("sgd", H=9), DiLoCoStrategy("sgd", H=9)])
def test_an_interval_longer_than_the_run_warns(strategy: Any) -> None:
    with pytest.warns(VecgymWarning, match=r"H=9.*8 steps.*never") as caught:
        fit("MLP", strategy, max_steps=8)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit("MLP", strategy, max_steps=9)


@pytest.mark.parametrize(("num_nodes", "sizes"), [(3, [1, 2]), (5, [1, 2, 2]), (7, [1, 2, 2, 2])])
def test_islands_with_a_remainder(num_nodes: int, sizes: list[int]) -> None:
    """The last island is smaller; members of an island are equal, islands differ."""
    trainer, _ = fit("MLP", FedAvgStrategy("sgd", H=1, island_size=2, lr=0.1), num_nodes=num_nodes, max_steps=1,
                     data=dataset("MLP", 28))  # fmt: skip
    _, counts = np.unique(params(trainer).numpy(), axis=0, return_counts=True)
    assert sorted(counts.tolist()) == sizes
    assert list(trainer.ledger)[-1].participants == 2 * (num_nodes // 2)


# ------------------------------------------------------------------------------------------------------ divergence


class Diverging(nn.Module):
    """Its loss is not finite where an example says so; otherwise (w - x)^2."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w - x).square().mean()


def poisoned(bad: float = float("nan")) -> Tensor:
    """12 examples, not shuffled: with 3 nodes and batches of 1, node 1 meets `bad` in the third step."""
    data = torch.arange(12.0)
    data[7] = bad
    return data


def diverge(engine: EngineName = "auto", bad: float = float("nan"), **settings: Any) -> Trainer:
    trainer = Trainer(Diverging(), poisoned(bad))
    trainer.fit(
        alone(), 3, batch_size=1, shuffle=False, max_steps=4, engine=engine, progress=False, device="cpu", **settings
    )  # fmt: skip
    return trainer


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_divergence_names_node_and_step_and_keeps_the_run(engine: EngineName, bad: float) -> None:
    trainer = Trainer(Diverging(), poisoned(bad))
    with pytest.raises(DivergenceError) as raised:
        trainer.fit(
            alone(), 3, batch_size=1, shuffle=False, max_steps=4, engine=engine, progress=False, device="cpu"
        )  # fmt: skip
    assert (raised.value.step, raised.value.nodes) == (2, [1])
    message = str(raised.value)
    for part in ("node 1", str(bad), "step 2", "learning rate", 'on_divergence="warn"', "trainer.history"):
        assert part in message, f"{part!r} is not in {message!r}"
    assert trainer.history["step"] == [1, 2, 3]
    assert np.isfinite(trainer.history.node_array()).sum(1).tolist() == [3, 3, 2]
    assert np.isfinite(trainer.history["train_loss"][:2]).all()
    assert torch.isfinite(trainer.nodes.params["w"]).tolist()[::2] == [True, True]  # the others are fine
    assert trainer.nodes.module(0)(torch.zeros(2)).isfinite()


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_divergence_warns_once_and_goes_on(engine: EngineName) -> None:
    with pytest.warns(VecgymWarning, match="node 1 is nan at step 2") as caught:
        trainer = diverge(engine, on_divergence="warn")
    assert len(caught) == 1
    assert trainer.history["step"] == [1, 2, 3, 4]
    assert np.isfinite(trainer.history.node_array()).sum(1).tolist() == [3, 3, 2, 2]


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_divergence_can_be_ignored(engine: EngineName) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = diverge(engine, on_divergence="ignore")
    assert trainer.history["step"] == [1, 2, 3, 4]


def test_divergence_of_all_nodes_is_short() -> None:
    trainer = Trainer(Diverging(), torch.full((40,), float("nan")))
    with pytest.raises(DivergenceError, match=r"nodes 0, 1, 2, 3, 4, 5, 6, 7 and 12 more") as raised:
        trainer.fit(AllReduceStrategy("sgd", lr=0.1), 20, batch_size=1, progress=False, device="cpu")
    assert raised.value.nodes == list(range(20))


def test_nodes_that_do_not_take_part_are_no_divergence() -> None:
    trainer, _ = fit("MLP", FedAvgStrategy("sgd", lr=0.1, participation=0.3), max_steps=4)
    assert np.isnan(trainer.history.node_array()).any()
    assert np.isfinite(trainer.history["train_loss"]).all()


def test_divergence_of_a_node_among_those_that_take_part() -> None:
    data = torch.full((12,), float("nan"))
    trainer = Trainer(Diverging(), data)
    with pytest.raises(DivergenceError) as raised:
        trainer.fit(
            FedAvgStrategy("sgd", participation=0.5, H=2), 4, batch_size=1, max_steps=2, progress=False, device="cpu"
        )  # fmt: skip
    assert len(raised.value.nodes) == 2


def test_after_a_refusal_the_trainer_still_works() -> None:
    trainer = Trainer(make_model("MLP"), dataset("MLP"))
    with pytest.raises(ValueError, match="num_nodes"):
        trainer.fit(alone(), 0)
    trainer.fit(alone(), 2, batch_size=4, max_steps=2, progress=False, device="cpu")
    assert len(trainer.history) == 2
    history = trainer.history
    with pytest.raises(ValueError, match="batch_size"):
        trainer.fit(alone(), 2, batch_size=400, dataloader_kwargs={"drop_last": True})
    assert trainer.history is history  # the run before is not lost


def test_every_strategy_survives_its_own_repr() -> None:
    for name, make in STRATEGIES.items():
        assert type(make()).__name__ in repr(make()), name


# ------------------------------------------------------------------------------------- numbers beyond all bounds

HUGE = 10**30
BEYOND: dict[str, tuple[Callable[[], Any], str]] = {
    "an integer": (lambda: FedAvgStrategy("sgd", H=HUGE), r"H=1e\+30 must be an integer >= 1 and < 2\*\*63"),
    "nodes": (lambda: FitOptions(strategy=FedAvgStrategy("sgd"), num_nodes=HUGE), "num_nodes=1e.30 must be an integer"),
    "or none": (lambda: check.optional_integer("chunk_size", HUGE), r"chunk_size=1e\+30 must be .* < 2\*\*63, or None"),
    "steps": (lambda: Compute(1.0).of_steps(HUGE, 2), r"num_steps=1e\+30 must be .* < 2\*\*63"),
    "sigma": (lambda: Compute.lognormal(1.0, HUGE), r"sigma=1e\+30 must be a number in \[0, 100\]"),
    "no float": (lambda: Compute.from_flop(10**400, 1e12), "flop=inf must be a number > 0"),
    "ten thousand digits": (lambda: check.integer("n", 10**10_000), "n=inf must be an integer"),
    "negative": (lambda: check.number("x", -(10**400), "[0, inf)"), "x=-inf must be a number >= 0"),
    "ragged": (lambda: Compute.measured([[1.0, 2.0], [1.0]]), r"history\[0\]=\[1.0, 2.0\] must be a number >= 0"),
    "bandwidth on meta": (lambda: Network(torch.ones(3, device="meta")), "bandwidth is on the device meta.*on the CPU"),
    "latency on meta": (lambda: Network(1e6, torch.ones((), device="meta")), "latency is on the device meta"),
    "seconds on meta": (lambda: Compute(torch.ones(3, device="meta")), "seconds is on the device meta"),
}  # fmt: skip


@pytest.mark.parametrize("name", BEYOND)
def test_what_is_beyond_all_bounds_is_refused_in_words(name: str) -> None:
    call, says = BEYOND[name]
    with pytest.raises(ValueError, match=says):
        call()


def test_a_number_is_a_float_where_no_integer_of_torch_can_hold_it() -> None:
    assert check.number("lr", HUGE, "[0, inf)") == 1e30
    assert isinstance(check.number("lr", HUGE, "[0, inf)"), float)
    assert check.number("lr", 3, "[0, inf)") == 3
    assert isinstance(check.number("lr", 3, "[0, inf)"), int)
    with pytest.raises(DivergenceError):
        fit(Line(), FedAvgStrategy("sgd", H=2, lr=HUGE), data=torch.ones(8), max_steps=3, batch_size=2)


# ---------------------------------------------------------------------------------------------------- memory

ASKED = 10**15  # no machine has so much


class Hungry(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(250_000))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight.sum() * torch.empty(ASKED // 4, dtype=torch.float32)).mean()


def test_out_of_memory_says_how_much_and_for_how_many_nodes() -> None:
    with pytest.raises(RuntimeError) as raised:
        fit(Hungry(), "FedAvg", num_nodes=3, data=torch.ones(24), batch_size=2)
    for part in ("1,000,000.000 GB more", "3 nodes", "parameters alone are 0.003 GB", "test_bad_input", "chunk_size"):
        assert part in str(raised.value)
    with pytest.raises(RuntimeError, match=r"out of memory: 800,000\.000 GB more, in a run of 100000000000000 nodes"):
        fit(Line(), "FedAvg", num_nodes=10**14, data=torch.ones(8), batch_size=2)
    for text in ("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0", "Tried to allocate 20.00 GiB."):
        error = torch.OutOfMemoryError(text)
        with pytest.raises(torch.OutOfMemoryError, match=r"out of memory: 20\.00 GiB more, in a run of 4 nodes"):
            contract.check_memory(error, 4, Line())
    with pytest.raises(RuntimeError, match=r"out of memory: 7\.45 GiB more"):
        contract.check_memory(MemoryError("Unable to allocate 7.45 GiB for an array"), 4, Line())
    for other in (ValueError("no"), MemoryError("max_memory_usage allows 1 kB")):
        contract.check_memory(other, 4, Line())


# ------------------------------------------------------------------------------------- what a message must name

NAMED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "inner": (lambda: FedAvgStrategy(cast("Any", 3)), TypeError, "inner_optim is of type int; give a name"),
    "outer": (
        lambda: DiLoCoStrategy("sgd", cast("Any", 3)),
        TypeError,
        "outer_optim is of type int; give a name",
    ),
    "outer name": (
        lambda: DiLoCoStrategy("sgd", "sdg"),
        ValueError,
        "outer_optim='sdg' is not known; did you mean 'sgd'",
    ),
    "server": (
        lambda: FedAvgStrategy("sgd", server_optim=cast("Any", OptimSpec("sgd", lr=0.7))),
        TypeError,
        r"server_optim is of type OptimSpec; give one of 'avg'.*server_lr=.*DiLoCoStrategy\(outer_optim=OptimSpec",
    ),
    "wandb's folder": (lambda: WandbLogger(dir="x"), TypeError, "no argument 'dir'; did you mean 'directory'"),
}


@pytest.mark.parametrize("name", NAMED)
def test_messages_name_the_argument(name: str) -> None:
    call, kind, says = NAMED[name]
    with pytest.raises(kind, match=says):
        call()


def test_load_takes_a_folder_of_checkpoints(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="not a file, but a folder without checkpoints"):
        load(tmp_path)
    fit(Line(), "FedAvg", data=torch.ones(24), max_steps=6, save_dir=tmp_path, checkpoint_interval=2)
    (tmp_path / "step-none.pt").write_text("not one")
    assert load(tmp_path).step == load(tmp_path / "step-000000006.pt").step == 6
