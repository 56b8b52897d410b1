"""The common parts of the tests of the public interface: strategies by name, data, and a short way to call `fit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from tests.models import make_data, make_model
from vecgym import OptimSpec, Trainer
from vecgym.strategy import (
    AllReduceStrategy,
    AveragingCommunicator,
    CommunicateOptimizeStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    Strategy,
)

# Every strategy in the settings that take another path through the code; H = 2 synchronises within few steps.
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "AllReduce": lambda: AllReduceStrategy("adamw", lr=1e-2, max_norm=1.0),
    "FedAvg": lambda: FedAvgStrategy("sgd", H=2, lr=0.1),
    "FedAvg islands": lambda: FedAvgStrategy("sgd", H=2, island_size=2, lr=0.1),
    "FedAvg participation": lambda: FedAvgStrategy("adam", H=2, participation=0.5, lr=1e-2),
    "DiLoCo": lambda: DiLoCoStrategy("adamw", H=2, lr=1e-2, warmup_steps=2, lr_scheduler="cosine"),
    "Composed": lambda: CommunicateOptimizeStrategy(
        [AveragingCommunicator(island_size=2), AveragingCommunicator(H=3)], OptimSpec("sgd", lr=0.1, momentum=0.9)
    ),
    "Alone": lambda: CommunicateOptimizeStrategy([], "sgd", lr=0.1),
}


def alone(optim: str = "sgd", lr: float = 0.1) -> Strategy:
    """Nodes that never exchange anything."""
    return CommunicateOptimizeStrategy([], optim, lr=lr)


class Rows(Dataset[Any]):
    """A Python dataset over a tree of tensors, without any batched access."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        leaves = self.data.values() if isinstance(self.data, dict) else self.data
        return len(next(iter(leaves)))

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.data, dict):
            return {key: value[index] for key, value in self.data.items()}
        return tuple(value[index] for value in self.data)


def dataset(name: str, num_examples: int = 24, seed: int = 0, dtype: torch.dtype = torch.float32) -> Dataset[Any]:
    """Examples for the model `name`."""
    data = make_data(name, num_examples, seed, dtype)
    return Rows(data) if isinstance(data, dict) else TensorDataset(*data)


def fit(
    model: str | nn.Module = "MLP",
    strategy: str | Strategy = "FedAvg",
    *,
    num_nodes: int = 3,
    data: Any = None,
    val: Any = None,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> tuple[Trainer, nn.Module]:
    """A short run on the CPU: the trainer, and the model that `fit` returned."""
    module = make_model(model, dtype=dtype) if isinstance(model, str) else model
    if data is None:
        assert isinstance(model, str)
        data = dataset(model, dtype=dtype)
    trainer = Trainer(module, data, val)
    known = isinstance(strategy, str) and strategy in STRATEGIES
    chosen: Any = STRATEGIES[str(strategy)]() if known else strategy
    settings = {"batch_size": 4, "progress": False, "device": "cpu", **settings}
    return trainer, trainer.fit(chosen, num_nodes, **settings)


def params(trainer: Trainer) -> Tensor:
    """Every node's parameters in one matrix `[K, P]`."""
    return torch.cat([p.flatten(1) for p in trainer.nodes.params.values()], 1)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two trees hold the same bits."""
    return a.keys() == b.keys() and all(x.dtype == b[n].dtype and torch.equal(x, b[n]) for n, x in a.items())


def same_run(a: Trainer, b: Trainer) -> bool:
    """Whether two runs ended with the same bits."""
    return same(a.nodes.params, b.nodes.params) and same(a.nodes.buffers, b.nodes.buffers)
