"""A node with fewer examples than `batch_size` trains on what it has; its loss is the mean over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from tests.fitting import params, same_run
from tests.models import MLP, make_data, make_model
from vecgym import Trainer, sweep
from vecgym.data import Batches
from vecgym.optim import OptimSpec
from vecgym.strategy import AllReduceStrategy, CommunicateOptimizeStrategy, FedAvgStrategy, Strategy

SIZES = (7, 2, 5, 2)  # of the nodes' shards
K, B, STEPS = len(SIZES), 5, 5
DATA = TensorDataset(*make_data("MLP", sum(SIZES), 0, torch.float64))


def shard(rank: int, num_nodes: int, train: bool) -> Dataset[Any]:
    first = sum(SIZES[:rank])
    x, y = DATA[first : first + SIZES[rank]]
    return TensorDataset(x, y)


STRATEGIES: dict[str, Any] = {
    "alone": lambda: CommunicateOptimizeStrategy([], "sgd", lr=0.1),
    "allreduce": lambda: AllReduceStrategy("sgd", lr=0.1),
    "by examples": lambda: FedAvgStrategy("sgd", H=2, lr=0.1, weighting="examples"),
}


def train(strategy: Strategy, **settings: Any) -> Trainer:
    trainer = Trainer(make_model("MLP", dtype=torch.float64), shard)
    given = {"max_steps": STEPS, "batch_size": B, "progress": False, "device": "cpu", **settings}
    trainer.fit(strategy, K, **given)
    return trainer


def naive(name: str) -> tuple[Tensor, list[list[float]]]:
    """K modules in a loop, each on its own examples: the parameters `[K, P]`, and the losses of each step."""
    models = [make_model("MLP", dtype=torch.float64) for _ in SIZES]
    batches = Batches(shard, K, B)
    losses: list[list[float]] = []
    for step in range(STEPS):
        losses.append([])
        for node, model in enumerate(models):
            x, y = (part[node, : min(SIZES[node], batches.width(step))] for part in batches[step])
            model.zero_grad()
            loss = model((x, y))
            loss.backward()
            losses[-1].append(float(loss.detach()))
        every = [list(model.parameters()) for model in models]
        for same in zip(*every):
            grads = [p.grad for p in same]
            mean = torch.stack(grads).mean(0)
            for p, g in zip(same, grads):
                p.data -= 0.1 * (mean if name == "allreduce" else g)
            if name == "by examples" and step % 2:
                total = sum(p.data * n for p, n in zip(same, SIZES)) / sum(SIZES)
                for p in same:
                    p.data.copy_(total)
    return torch.stack([torch.cat([p.data.flatten() for p in model.parameters()]) for model in models]), losses


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(
    "settings",
    [
        {"engine": "vmap"},
        {"engine": "loop"},
        {"engine": "vmap", "chunk_size": 1},
        {"engine": "vmap", "minibatch_size": 1},
        {"engine": "loop", "node_threads": 2},
        {"exact": True},
    ],
    ids=str,
)
def test_each_node_trains_on_what_it_has(settings: dict[str, Any], name: str) -> None:
    expected, losses = naive(name)
    trainer = train(STRATEGIES[name](), **settings)
    torch.testing.assert_close(params(trainer), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.tensor(trainer.history.node_array()), torch.tensor(losses).double())
    batches = Batches(shard, K, B)
    seen = [sum(min(size, batches.width(step)) for size in SIZES) for step in range(STEPS)]
    assert trainer.history["examples"] == torch.tensor(seen).cumsum(0).tolist()


def test_buffers_and_the_nodes_that_rest() -> None:
    """Batch norm's statistics are of a node's own examples; in turns, some nodes train and others keep theirs."""
    data = TensorDataset(*make_data("CNN", 14, 0, torch.float64))
    sizes = (6, 2, 4, 2)

    def own(rank: int, num_nodes: int, train: bool) -> Dataset[Any]:
        return TensorDataset(*data[sum(sizes[:rank]) : sum(sizes[: rank + 1])])

    runs = []
    for engine in ("vmap", "loop"):
        trainer = Trainer(make_model("CNN", dtype=torch.float64), own)
        strategy = FedAvgStrategy("sgd", H=2, lr=0.1, participation=0.5)
        given: Any = {"batch_size": 4, "max_steps": 4, "progress": False, "device": "cpu", "engine": engine}
        trainer.fit(strategy, 4, **given)
        runs.append(trainer)
    for of in ("params", "buffers"):
        for name, x in getattr(runs[0].nodes, of).items():
            torch.testing.assert_close(x, getattr(runs[1].nodes, of)[name], rtol=1e-9, atol=1e-9)
    assert runs[0].history["examples"] == runs[1].history["examples"]


def test_a_resumed_run_has_the_bits_of_a_whole_one(tmp_path: Path) -> None:
    whole = train(STRATEGIES["by examples"]())
    train(STRATEGIES["by examples"](), save_dir=tmp_path, max_steps=2)
    resumed = train(STRATEGIES["by examples"](), save_dir=tmp_path, resume=True)
    assert same_run(resumed, whole)
    assert resumed.history["examples"] == whole.history["examples"]


def test_in_processes_it_is_the_same() -> None:
    one = train(STRATEGIES["by examples"](), exact=True)
    two = train(STRATEGIES["by examples"](), exact=True, backend="processes", num_processes=2)
    assert same_run(one, two)
    assert one.history["examples"] == two.history["examples"]


def test_in_a_sweep_it_is_the_same() -> None:
    def make(lr: float) -> Strategy:
        return FedAvgStrategy("sgd", H=2, lr=lr, participation=0.5)

    model = make_model("MLP", dtype=torch.float64)
    result = sweep(
        model, shard, strategy=make, grid={"lr": [0.1, 0.05]}, num_nodes=K, max_steps=STEPS, batch_size=B,
        device="cpu", progress=False,
    )  # fmt: skip
    for row, lr in enumerate((0.1, 0.05)):
        alone = train(make(lr))
        found = result.history(row)
        assert found["train_loss"] == pytest.approx(alone.history["train_loss"], rel=1e-10)
        assert found["examples"] == alone.history["examples"]


@pytest.mark.parametrize("settings", [{"participation": 0.5}, {"exact": True}], ids=["some rest", "exact"])
def test_a_group_with_a_value_for_each_node(settings: dict[str, Any]) -> None:
    """The result is that of the same values given to the optimizer itself."""
    settings = dict(settings)
    lr = torch.linspace(0.05, 0.2, K, dtype=torch.float64)
    more = {"participation": settings.pop("participation")} if "participation" in settings else {}
    whole = train(FedAvgStrategy(OptimSpec("sgd", lr=lr), H=2, **more), **settings)
    spec = OptimSpec("sgd", lr=1.0, param_groups=lambda name, p: {"lr": lr})
    grouped = train(FedAvgStrategy(spec, H=2, **more), **settings)
    for name, x in whole.nodes.params.items():
        torch.testing.assert_close(grouped.nodes.params[name], x, rtol=1e-12, atol=1e-12)


class Columns(MLP):
    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        return super().forward((x.T, y))


def columns(examples: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = zip(*examples)
    return torch.stack(x, 1), torch.stack(y)


def test_a_batch_that_cannot_be_cut_is_refused() -> None:
    trainer = Trainer(Columns().double(), shard)
    given: Any = {"device": "cpu", "progress": False, "dataloader_kwargs": {"collate_fn": columns}}
    trainer.fit(STRATEGIES["alone"](), K, batch_size=min(SIZES), max_steps=1, **given)
    with pytest.raises(ValueError, match=r"cannot be cut.*Give batch_size=2, or another collate_fn"):
        trainer.fit(STRATEGIES["alone"](), K, batch_size=B, max_steps=1, **given)


@pytest.mark.filterwarnings("ignore:.*several nodes train on the same")
@pytest.mark.parametrize("num_nodes", [1, 2, 25, 1000])
def test_any_number_of_nodes_on_a_few_examples(num_nodes: int) -> None:
    """More nodes than examples: each has one, as DistributedSampler pads; batches are what there is."""
    trainer = Trainer(make_model("Quadratic"), TensorDataset(*make_data("Quadratic", 7, 0)))
    trainer.fit(STRATEGIES["allreduce"](), num_nodes, max_steps=2, batch_size=16, device="cpu", progress=False)
    assert trainer.history["examples"] == [num_nodes * -(-7 // num_nodes) * step for step in (1, 2)]


def test_one_of_several_nodes_trains_on_less_than_a_batch_and_changes_buffers() -> None:
    """A node by itself in a step: what it changes is in the storage that it was given."""

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(()))
            self.register_buffer("seen", torch.tensor(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.seen += len(x)  # type: ignore[assignment, operator]
            return (self.w - x).square().mean()

    def of_node(rank: int, num_nodes: int, train: bool) -> torch.Tensor:
        return torch.arange(1.0, 2.0 + rank)

    trainer = Trainer(Counting(), of_node)
    strategy = FedAvgStrategy("sgd", H=1, participation=0.34, lr=0.01)
    trainer.fit(strategy, 3, max_steps=12, batch_size=4, device="cpu", progress=False)
    losses = [row["train_losses"] for row in trainer.history.rows if row.get("train_losses") is not None]
    steps = [sum(each[node] >= 0 for each in losses) for node in range(3)]
    assert sum(steps) == 12
    assert trainer.nodes.buffers["seen"].tolist() == [steps[node] * (node + 1) for node in range(3)]
