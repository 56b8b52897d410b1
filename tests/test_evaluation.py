"""Batches of an evaluation that are computed in one call, against one after the other."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.fitting import dataset, fit
from tests.models import MLP, make_model
from vecgym import sweep
from vecgym.collectives import StackedCollectives
from vecgym.core import tree
from vecgym.engine import Engine
from vecgym.runs import evaluation
from vecgym.strategy import FedAvgStrategy

Calls = list[bool]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Of each call of the engine, whether it computes several batches at once."""
    found: Calls = []
    measured = Engine._measured

    def noted(engine: Engine, params: Any, buffers: Any, batch: Any, own: bool, several: bool = False) -> Any:
        found.append(several)
        return measured(engine, params, buffers, batch, own, several)

    monkeypatch.setattr(Engine, "_measured", noted)
    return found


def in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "batches_at_once", lambda *_: 1)


def losses(model: str | nn.Module, strategy: str, val: Any, **settings: Any) -> list[Any]:
    name = model if isinstance(model, str) else "MLP"
    settings = {"data": dataset(name, dtype=torch.float64), "dtype": torch.float64, **settings}
    history = fit(model, strategy, val=val, max_steps=3, val_interval=1, **settings)[0].history
    columns = [name for name in history.columns if name.startswith("val_") and name != "val_losses"]
    return [np.stack(history.series("val_losses")[1]), *[history.series(name)[1] for name in columns]]


def same_at_once(
    monkeypatch: pytest.MonkeyPatch, calls: Calls, model: Any, strategy: str, val: Any, **settings: Any
) -> None:
    """Of the batches all but the last, smaller one are computed at once."""
    at_once = losses(model, strategy, val, **settings)
    if isinstance(model, Writing):  # tried once
        assert calls.count(True) == 1
    else:
        assert calls.count(True) >= calls.count(False)
    in_turn(monkeypatch)
    calls.clear()
    alone = losses(model, strategy, val, **settings)
    assert not any(calls)
    for x, y in zip(at_once, alone):
        np.testing.assert_allclose(x, y, rtol=1e-12)


@pytest.mark.parametrize("strategy", ["AllReduce", "FedAvg", "Alone"])
@pytest.mark.parametrize("model", ["MLP", "CNN", "GPT", "Quadratic", "WithFrozen", "DictBatch"])
def test_batches_at_once_are_those_in_turn(
    model: str, strategy: str, monkeypatch: pytest.MonkeyPatch, calls: Calls
) -> None:
    """Batches of 4, 4, 4 and 2; without torch's warning of operations that are run one by one."""
    val = dataset(model, 14, seed=1, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same_at_once(monkeypatch, calls, model, strategy, val, engine="vmap")


@pytest.mark.parametrize("settings", [{"chunk_size": 2}, {"minibatch_size": 2}, {"num_nodes": 1}])
def test_batches_at_once_however_nodes_and_examples_are_cut(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, calls: Calls
) -> None:
    val = dataset("MLP", 14, seed=1, dtype=torch.float64)
    same_at_once(monkeypatch, calls, "MLP", "Alone", val, **settings)


@pytest.mark.parametrize("strategy", ["AllReduce", "Alone"])
def test_batches_of_each_node_at_once(strategy: str, monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    def val(rank: int, num_nodes: int, train: bool) -> Dataset[Any]:
        return dataset("MLP", 11, seed=rank, dtype=torch.float64)

    same_at_once(monkeypatch, calls, "MLP", strategy, val)


@pytest.mark.filterwarnings("ignore:the seeds do not vary")  # they are those of the data
@pytest.mark.parametrize("same", [True, False])
def test_batches_of_a_sweep_at_once(same: bool, monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    """Whether the configurations have one validation set or, of another seed each, several orders of it."""

    def swept() -> list[float]:
        result = sweep(
            make_model("MLP", dtype=torch.float64), dataset("MLP", dtype=torch.float64),
            dataset("MLP", 14, seed=1, dtype=torch.float64), val_size=9, num_nodes=2, max_steps=2, batch_size=4,
            strategy=lambda lr: FedAvgStrategy("sgd", H=2, lr=lr), progress=False, device="cpu",
            grid={"lr": [0.1, 0.2], "seed": [0] if same else [0, 1]},
        )  # fmt: skip
        return [row["val_loss"] for row in result.rows]

    at_once = swept()
    assert any(calls)
    in_turn(monkeypatch)
    np.testing.assert_allclose(at_once, swept(), rtol=1e-12)


@pytest.mark.filterwarnings("ignore:the seeds do not vary")
@pytest.mark.parametrize(("lrs", "seeds"), [([0.1], [0]), ([0.1, 0.2], [0]), ([0.1, 0.2], [0, 1])])
@pytest.mark.parametrize(("name", "H", "alike"), [("MLP", 1, True), ("MLP", 2, False), ("CNN", 1, False)])
def test_nodes_that_are_alike_are_measured_once(
    lrs: list[float], seeds: list[int], name: str, H: int, alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step, with the averaged model, and after a merge; else, as with unequal buffers, all."""
    sizes: list[int] = []
    measured = Engine._measured

    def noted(engine: Engine, params: Any, *others: Any) -> Any:
        sizes.append(len(next(iter(params.values()))))
        return measured(engine, params, *others)

    def swept() -> Any:
        sizes.clear()
        return sweep(
            make_model(name), dataset(name), dataset(name, 4, seed=1), num_nodes=3, max_steps=3, batch_size=4,
            strategy=lambda lr: FedAvgStrategy("sgd", H=H, lr=lr), grid={"lr": lrs, "seed": seeds}, progress=False,
            device="cpu", val_interval=None,
        )  # fmt: skip

    monkeypatch.setattr(Engine, "_measured", noted)
    result = swept()
    num_configs = len(result)
    assert sizes == [num_configs, num_configs, num_configs if alike else 3 * num_configs]
    start = result.history(0).rows[0]
    assert start["val_losses"].tolist() == [start["val_loss"]] * 3
    assert start["val_loss_local"] == pytest.approx(start["val_loss"])
    monkeypatch.setattr(evaluation, "_alike", lambda *_: False)
    for i, (row, other) in enumerate(zip(result.rows, swept().rows, strict=True)):
        assert row["val_loss"] == other["val_loss"]
        assert row["val_loss_local"] == pytest.approx(other["val_loss_local"])
        assert result.history(i).rows[-1]["val_losses"].shape == (3,)
    assert sizes[-1] == 3 * num_configs


class Drawing(MLP):
    """It draws in eval mode, too, and has a constant buffer."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("scale", torch.ones(()))

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        return super().forward((nn.functional.dropout(x * self.scale, self.rate, training=True), y))


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("Hs", [[1, 1], [1, 2], [2, 3]])
def test_a_constant_buffer_and_draws_of_alike_nodes(Hs: list[int], rate: float) -> None:
    """Nodes that draw are all measured, since they differ."""
    result = sweep(
        lambda: Drawing(rate), dataset("MLP"), dataset("MLP", 4, seed=1), num_nodes=3, max_steps=3, batch_size=4,
        points=[{"H": H, "lr": lr} for H, lr in zip(Hs, (0.1, 0.2), strict=True)], progress=False, device="cpu",
        strategy=lambda H, lr: FedAvgStrategy("sgd", H=H, lr=lr), val_interval=1,
    )  # fmt: skip
    for i, H in enumerate(Hs):
        spread = [len(set(np.asarray(row["val_losses"]).tolist())) for row in result.history(i).rows[1:]]
        assert spread == [1 if rate == 0 and step % H == 0 else 3 for step in (1, 2, 3)]


def test_distances_are_those_of_each_configuration_alone(request: pytest.FixtureRequest) -> None:
    """To the last bit, though two threads share the sum of so many values, and round it by their parts."""
    num_threads = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(num_threads))
    torch.set_num_threads(2)
    params = {"w": torch.randn(64, 130, 90), "b": torch.randn(64, 3), "n": torch.ones(64, dtype=torch.long)}
    comm = StackedCollectives(4)
    alone = [float(evaluation.distance_of(tree.map(lambda x: x[a : a + 4], params), comm)) for a in range(0, 64, 4)]  # noqa: B023
    assert [*map(float, evaluation.distances_of(params, comm, [None] * 16))] == alone
    first, *others = map(float, evaluation.distances_of(params, comm, [[1, 2], *[None] * 15]))
    assert first < alone[0]
    assert others == alone[1:]


def test_batches_of_unlike_shapes_are_computed_by_themselves(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    """Texts that are padded to the longest of their batch: of 3, 3, 5, 5 and 5 tokens."""

    class Texts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return (self.w - x).square().mean()

    def padded(texts: list[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(texts, batch_first=True)

    texts = [torch.full((3 + 2 * (i >= 8),), i, dtype=torch.float64) for i in range(20)]
    monkeypatch.setattr(torch, "randperm", lambda n, generator: torch.arange(n))
    same_at_once(
        monkeypatch, calls, Texts(), "Alone", texts, data=texts, dataloader_kwargs={"collate_fn": padded}, shuffle=False
    )


def test_batches_of_unlike_structure_are_computed_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal tensors, but under another name, or with an empty list beside them."""

    class Flagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, batch: Any) -> Tensor:
            x = batch.get("x", batch.get("y"))
            return (self.w * (1 + ("flag" in batch) + 2 * ("y" in batch)) - x).square().mean()

    def collated(examples: list[Tensor]) -> dict[str, Any]:
        x = torch.stack(examples)
        kinds: list[dict[str, Any]] = [{"x": x}, {"x": x, "flag": []}, {"y": x}]
        return kinds[int(x.max()) // 4 % 3]

    examples = list(torch.arange(24, dtype=torch.float64))
    monkeypatch.setattr(torch, "randperm", lambda n, generator: torch.arange(n))
    settings = {"data": examples, "dataloader_kwargs": {"collate_fn": collated}, "shuffle": False}
    at_once = losses(Flagged(), "Alone", examples, **settings)
    in_turn(monkeypatch)
    for x, y in zip(at_once, losses(Flagged(), "Alone", examples, **settings)):
        np.testing.assert_allclose(x, y, rtol=1e-12)


def test_large_batches_are_not_joined(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    """A batch is 4 x (16 x 8 + 8) bytes: two are, and four are not."""
    val = dataset("MLP", 16, seed=1, dtype=torch.float64)
    monkeypatch.setattr(evaluation, "MAX_JOINED_BYTES", 3 * 544 - 1)
    losses("MLP", "AllReduce", val)
    assert calls == [True] * 8  # 4 evaluations of 2 pairs
    calls.clear()
    monkeypatch.setattr(evaluation, "MAX_JOINED_BYTES", 543)
    losses("MLP", "AllReduce", val)
    assert calls == [False] * 16


class Summed(MLP):
    """Its loss is a sum: that of a larger batch would be larger."""

    def forward(self, batch: Any) -> Tensor:
        return super().forward(batch) * len(batch[0])


class Writing(MLP):
    """Writes in evaluation, from the batch: not possible for several batches at once."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, batch: Any) -> Tensor:
        self.seen += batch[0].mean().detach()
        return super().forward(batch) + self.seen


class Counting(MLP):
    """Counts the batches of evaluations; each begins with what training has left."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, batch: Any) -> Tensor:
        if not self.training:
            self.count += 1
        return super().forward(batch) * self.count.clamp(min=1)


class Measuring(MLP):
    """With metrics of its own."""

    def val_metrics(self, batch: Any) -> dict[str, Tensor]:
        loss = self(batch)
        return {"loss": loss, "square": loss.square(), "largest": batch[0].max()}


@pytest.mark.parametrize("model", [Summed, Writing, Counting, Measuring])
def test_odd_models_at_once(model: type[nn.Module], monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    val = dataset("MLP", 14, seed=1, dtype=torch.float64)
    same_at_once(monkeypatch, calls, model().double(), "Alone", val)


@pytest.mark.parametrize(
    ("model", "settings"), [("Dropout", {}), ("MLP", {"exact": True}), ("MLP", {"engine": "loop"})]
)
def test_in_turn_where_the_order_matters(model: str, settings: dict[str, Any], calls: Calls) -> None:
    """Random numbers are drawn in the order of the batches; exact runs and the loop compute node after node."""
    losses(model, "Alone", dataset(model, 14, seed=1, dtype=torch.float64), **settings)
    assert calls
    assert not any(calls)


def test_an_error_in_evaluation_is_the_models_own(calls: Calls) -> None:
    class Wrong(MLP):
        def forward(self, batch: Any) -> Tensor:
            if not self.training:
                raise RuntimeError("not in evaluation")
            return super().forward(batch)

    with pytest.raises(RuntimeError, match="not in evaluation"):
        losses(Wrong().double(), "Alone", dataset("MLP", 14, dtype=torch.float64))
    assert calls == [True, False]


class Read(Dataset):
    """Examples of the MLP, and how often any was read."""

    def __init__(self, num_examples: int) -> None:
        self.examples, self.count = dataset("MLP", num_examples), 0

    def __len__(self) -> int:
        return len(self.examples)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        return self.examples[index]


@pytest.mark.parametrize("per_node", [False, True])
def test_a_run_reads_its_validation_set_once(per_node: bool) -> None:
    sets = [Read(size) for size in ((10, 10, 7) if per_node else (10,))]
    val = (lambda rank, num_nodes, train: sets[rank]) if per_node else sets[0]
    trainer, _ = fit(val=val, data=dataset("MLP"), max_steps=4, val_interval=1)
    assert len(trainer.history.series("val_loss")[1]) == 5
    assert [one.count for one in sets] == [len(one) for one in sets]


@pytest.mark.filterwarnings("ignore:the seeds do not vary")
def test_a_sweep_reads_its_validation_set_once_for_each_seed() -> None:
    val = Read(10)
    sweep(
        make_model("MLP"), dataset("MLP"), val, strategy=FedAvgStrategy, grid={"H": [1, 2], "seed": [0, 1]},
        num_nodes=3, max_steps=4, batch_size=4, val_interval=1, device="cpu", progress=False,
    )  # fmt: skip
    assert val.count == 20
