"""The snippets of the EXO Gym documents (shared/seeds) run with "exogym" read as "vecgym".

Here: AllReduce, FedAvg, DiLoCo, OptimSpec, CommunicateOptimizeStrategy and the trainer. What a document does not
say (model, data, number of steps) is small.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.fitting import dataset, params
from tests.models import MLP, make_data, make_model
from vecgym import CSVLogger, LocalTrainer, OptimSpec, Trainer, VecgymWarning
from vecgym.strategy import (
    AllReduceStrategy,
    AveragingCommunicator,
    CommunicateOptimizeStrategy,
    CommunicationModule,
    DiLoCoStrategy,
    FedAvgStrategy,
    SimpleReduceStrategy,
    Strategy,
)

QUIET: dict[str, Any] = {"progress": False, "device": "cpu"}


@pytest.fixture
def trainer() -> LocalTrainer:
    train_dataset, val_dataset = dataset("MLP", 640), dataset("MLP", 20, seed=1)
    return LocalTrainer(make_model("MLP"), train_dataset, val_dataset)


def sgd_of(strategy: Strategy) -> dict[str, Any]:
    return strategy.inner_optim.hyper


# -------------------------------------------------------------------------------------- 000: README of EXO Gym


def test_readme_example(trainer: LocalTrainer) -> None:
    strategy = DiLoCoStrategy(
      inner_optim='adam',
      H=100
    )  # fmt: skip
    trainer.fit(
      strategy=strategy,
      num_nodes=4,
      **{**QUIET, "max_steps": 100},
    )  # fmt: skip
    assert strategy.inner_optim.cls is torch.optim.Adam
    assert [entry.step for entry in trainer.ledger] == [99]  # the outer step follows the 100th optimizer step


def test_local_trainer_takes_keywords_and_positions() -> None:
    model, train, val = make_model("MLP"), dataset("MLP"), dataset("MLP", 4)
    for made in (LocalTrainer(model, train, val), LocalTrainer(model=model, train_dataset=train, val_dataset=val)):
        assert (made.model, made.train_dataset, made.val_dataset) == (model, train, val)
    assert Trainer(model, train).val_dataset is None


# ------------------------------------------------------------------------------- 001: technical documentation


def test_simple_reduce_is_all_reduce(trainer: LocalTrainer) -> None:
    assert issubclass(SimpleReduceStrategy, AllReduceStrategy)
    optim_spec = OptimSpec(torch.optim.AdamW, lr=0.001)
    trainer.fit(num_epochs=1, strategy=SimpleReduceStrategy(inner_optim=optim_spec), num_nodes=2, **QUIET)
    rows = params(trainer)
    assert torch.equal(rows[0], rows[1])  # "All nodes maintain identical model parameters"


def test_basic_usage(trainer: LocalTrainer) -> None:
    optim_spec = OptimSpec(torch.optim.SGD, lr=0.05)
    strategy = FedAvgStrategy(inner_optim=optim_spec, H=5)
    model = trainer.fit(num_epochs=2, strategy=strategy, num_nodes=3, **QUIET)
    assert trainer.history.last("epoch") == 2
    assert isinstance(model, MLP)
    assert strategy.inner_optim == optim_spec  # EXO Gym ignores it and trains with AdamW


def test_dataset_factory() -> None:
    def dataset_factory(rank, num_nodes, train_dataset):
        """Create per-node dataset with automatic sharding."""
        full_dataset: Any = dataset("MLP", 32)

        # Shard dataset across nodes
        indices = list(range(rank, len(full_dataset), num_nodes))
        return torch.utils.data.Subset(full_dataset, indices)

    trainer = LocalTrainer(
        model=make_model("MLP"),
        train_dataset=dataset_factory,  # Function instead of dataset
        val_dataset=dataset("MLP", 8),
    )
    trainer.fit(FedAvgStrategy("sgd", lr=0.1), 4, batch_size=4, **QUIET)
    assert trainer.history.last("examples") == 32


# ------------------------------------------------------------------------------------------- 002: the long README


def test_simple_diloco_training(trainer: LocalTrainer) -> None:
    strategy = DiLoCoStrategy(
        inner_optim='adamw',  # Local optimizer
        outer_optim='sgd',    # Global optimizer
        H=100,                # Communication interval
        lr=3e-4
    )  # fmt: skip
    final_model = trainer.fit(
        strategy=strategy,
        num_nodes=4,
        num_epochs=20,
        batch_size=32,
        **QUIET,
    )
    assert strategy.inner_optim == OptimSpec("adamw", lr=3e-4)
    assert len(trainer.ledger) == 1  # 20 epochs of 5 steps
    assert set(trainer.history["lr"][1:]) == {3e-4}
    assert isinstance(final_model, MLP)


def test_fedavg_with_islands() -> None:
    strategy = FedAvgStrategy(
        inner_optim='sgd',
        island_size=4,        # Create islands of 4 nodes
        H=5,                  # Local training steps before averaging
        lr=0.01
    )  # fmt: skip
    trainer = LocalTrainer(make_model("MLP"), dataset("MLP", 16 * 16))
    trainer.fit(
        strategy=strategy,
        num_nodes=16,         # 16 total nodes = 4 islands
        num_epochs=20,
        **QUIET,
    )  # fmt: skip
    assert len(params(trainer).unique(dim=0)) == 4
    assert [entry.step for entry in trainer.ledger] == [4, 9, 14, 19]
    parameters = sum(p.numel() for p in make_model("MLP").parameters())
    assert trainer.ledger.total_bytes == pytest.approx(4 * 2 * 3 / 4 * 4 * parameters)


def test_composition(trainer: LocalTrainer) -> None:
    averaging_comm = AveragingCommunicator(island_size=4)
    strategy = CommunicateOptimizeStrategy(
        communication_modules=[averaging_comm],
        inner_optim='adamw'
    )  # fmt: skip
    trainer.fit(strategy=strategy, num_nodes=4, max_steps=3, **QUIET)
    assert [entry.operation for entry in trainer.ledger] == ["mean"] * 3
    assert strategy.inner_optim.cls is torch.optim.AdamW


def test_logger_and_log_interval(trainer: LocalTrainer, tmp_path: Any) -> None:
    logger = CSVLogger(tmp_path / "diloco_vs_sparta_comparison")
    trainer.fit(
        strategy=FedAvgStrategy("sgd", H=5, lr=0.1),
        num_nodes=2,
        max_steps=120,
        val_size=0,
        logger=logger,
        log_interval=50,  # Log every 50 steps
        **QUIET,
    )
    lines = (tmp_path / "diloco_vs_sparta_comparison" / "history.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["step", "50", "100"]


def test_fine_tuned_diloco() -> None:
    strategy = DiLoCoStrategy(
        inner_optim='adamw',
        outer_optim='sgd',
        H=200,                    # Higher H for better bandwidth efficiency
        inner_lr=1e-4,           # Conservative inner learning rate
        outer_lr=0.5,            # Aggressive outer learning rate
        max_norm=1.0,            # Gradient clipping
        lr_scheduler='cosine',   # Learning rate scheduling
        warmup_steps=1000
    )  # fmt: skip
    assert strategy.inner_optim == OptimSpec("adamw", lr=1e-4)
    (outer,) = strategy.communication_modules
    assert "OptimSpec(SGD, lr=0.5, momentum=0.9, nesterov=True)" in repr(outer)
    assert "H=200" in repr(outer)
    assert (strategy.max_norm, strategy.lr_scheduler, strategy.warmup_steps) == (1.0, "cosine", 1000)
    trainer = LocalTrainer(make_model("MLP"), dataset("MLP"))
    with pytest.warns(VecgymWarning, match="H=200"):
        trainer.fit(strategy=strategy, num_nodes=2, max_steps=4, batch_size=4, **QUIET)
    assert trainer.history["lr"] == pytest.approx([0, 1e-7, 2e-7, 3e-7])


def test_h_alone() -> None:
    assert "H=50" in repr(DiLoCoStrategy(H=50))
    assert DiLoCoStrategy(H=50).inner_optim.cls is torch.optim.AdamW


def test_accumulation_under_its_name_here(trainer: LocalTrainer) -> None:
    """`gradient_accumulation=4` and `max_memory_usage=0.8` are promises of that document: refused, not ignored."""
    for keyword in ("gradient_accumulation", "max_memory_usage"):
        unknown: dict[str, Any] = {keyword: 4}
        with pytest.raises(TypeError, match=keyword):
            trainer.fit(AllReduceStrategy(), 2, **unknown)
    trainer.fit(AllReduceStrategy(), 2, batch_size=32, minibatch_size=8, max_steps=1, **QUIET)


def test_a_strategy_of_ones_own(trainer: LocalTrainer) -> None:
    """The document overrides `step`; here one says what is exchanged, and the keywords are checked."""

    class HalfWay(CommunicationModule):
        def exchange_parameters(self, params, state, ctx):
            mean = ctx.comm.mean(params)
            return {name: 0.5 * (p + mean[name]) for name, p in params.items()}, state

    class MyCustomStrategy(Strategy):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(communication_modules=[HalfWay()], **kwargs)

    trainer.fit(MyCustomStrategy(inner_optim="sgd", lr=0.1), 3, max_steps=2, **QUIET)
    assert [entry.operation for entry in trainer.ledger] == ["mean", "mean"]
    with pytest.raises(TypeError, match="learning_rate"):
        MyCustomStrategy(learning_rate=0.1)


def test_model_contract(trainer: LocalTrainer) -> None:
    """003: "The model is expected in a form that takes a `batch` and returns a scalar loss"."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = make_model("MLP")

        def forward(self, batch: Any) -> torch.Tensor:
            return self.mlp(batch)

    model = LocalTrainer(Net(), dataset("MLP")).fit(strategy=AllReduceStrategy(), num_nodes=2, batch_size=4, **QUIET)
    batch: Any = make_data("MLP", 4)
    assert model(batch).shape == ()


# ------------------------------------------------------------------------------------- order of positional arguments


@pytest.mark.parametrize(
    ("by_position", "by_name"),
    [
        (AllReduceStrategy("sgd"), AllReduceStrategy(inner_optim="sgd")),
        (SimpleReduceStrategy(OptimSpec("sgd", lr=0.1)), SimpleReduceStrategy(inner_optim="sgd", lr=0.1)),
        (FedAvgStrategy("sgd", 5), FedAvgStrategy(inner_optim="sgd", H=5)),
        (FedAvgStrategy("sgd", 5, 4), FedAvgStrategy(inner_optim="sgd", H=5, island_size=4)),
        (DiLoCoStrategy("adam", "adamw"), DiLoCoStrategy(inner_optim="adam", outer_optim="adamw")),
        (DiLoCoStrategy("adam", "sgd", 7), DiLoCoStrategy(inner_optim="adam", outer_optim="sgd", H=7)),
        (
            CommunicateOptimizeStrategy([AveragingCommunicator(2)], "sgd"),
            CommunicateOptimizeStrategy(communication_modules=[AveragingCommunicator(2)], inner_optim="sgd"),
        ),
    ],
)  # fmt: skip
def test_positions(by_position: Strategy, by_name: Strategy) -> None:
    assert repr(by_position) == repr(by_name)


def test_defaults() -> None:
    assert "H=100" in repr(DiLoCoStrategy())
    assert "H=1," in repr(FedAvgStrategy())
    assert "SGD, lr=0.7, momentum=0.9, nesterov=True" in repr(DiLoCoStrategy(outer_optim=torch.optim.SGD))
    for strategy in (AllReduceStrategy(), FedAvgStrategy(), DiLoCoStrategy()):
        assert strategy.inner_optim.cls is torch.optim.AdamW


@pytest.mark.parametrize("optim", ["adamw", torch.optim.AdamW, OptimSpec(torch.optim.AdamW), OptimSpec("adamw")])
def test_every_form_of_an_optimizer(optim: Any) -> None:
    assert sgd_of(FedAvgStrategy(optim, lr=0.01))["lr"] == 0.01
    assert OptimSpec.from_string("adamw", lr=3e-4) == OptimSpec(torch.optim.AdamW, lr=3e-4)


def test_the_documented_runs_are_silent(trainer: LocalTrainer, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.fit(strategy=DiLoCoStrategy("adamw", H=5, lr=1e-3), num_nodes=4, max_steps=10, **QUIET)
    assert capfd.readouterr() == ("", "")
