"""Nodes at different times: each by its own number of steps, as if it were alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.helpers import stacked
from tests.models import make_batches, make_model
from tests.test_availability import Taken
from vecgym import Trainer
from vecgym.availability import Dropout, Trace
from vecgym.clock import Compute
from vecgym.core import tree
from vecgym.data import Batches
from vecgym.strategy import AsyncStrategy, FedAvgStrategy, Strategy

F64 = torch.float64


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))

    def forward(self, batch: Tensor) -> Tensor:
        return (self.w - batch).square().mean()


class Noisy:
    """Examples that draw from the global generators."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> Tensor:
        return torch.tensor([float(i), torch.rand(()).item(), random.random()])


def dataset(kind: str) -> Any:
    if kind == "noisy":
        return Noisy()
    if kind == "factory":
        return lambda rank, num_nodes, train: torch.arange(10.0 * rank, 10.0 * rank + 10)
    return TensorDataset(torch.arange(10.0), torch.arange(10))


@pytest.mark.parametrize("kind", ["tensors", "noisy", "factory"])
def test_each_node_reads_the_batch_of_its_own_step(kind: str) -> None:
    batches = Batches(dataset(kind), num_nodes=3, batch_size=2, seed=5)
    plain = Batches(dataset(kind), num_nodes=3, batch_size=2, seed=5)
    for rows, steps in [([0, 1, 2], [0, 3, 7]), ([2, 0], [1, 40]), ([1], [12]), ([0, 1, 2], [1, 1, 1])]:
        [(found, limits)] = batches.read([(rows, steps)])
        assert limits is not None
        for i, (row, step) in enumerate(zip(rows, steps)):
            assert limits[i] == plain.width(step)
            expected = tree.map_leaves(lambda x: x[row], plain[step])  # noqa: B023
            if kind == "noisy" and row:  # one call for all nodes draws in their order
                continue
            for a, b in zip(tree.leaves(found), tree.leaves(expected)):
                assert torch.equal(a[i][: len(b)], b)
                assert torch.equal(a[i], b.repeat(2, *[1] * (b.dim() - 1))[: a.shape[1]])


@pytest.mark.parametrize("settings", [
    {"inner_optim": "adamw", "lr": 0.01, "lr_scheduler": "cosine", "warmup_steps": 3},
    {"inner_optim": "sgd", "lr": torch.linspace(0.1, 0.2, 12)[:, None]},
    {"inner_optim": "sgd", "lr": torch.rand(12, 3, generator=torch.Generator().manual_seed(0))},
    {"inner_optim": "sgd", "lr": torch.tensor([0.1, 0.2, 0.3])},
])  # fmt: skip
def test_nodes_at_different_times_do_what_each_does_alone(settings: dict[str, Any]) -> None:
    """Nodes that are absent now and then, against the same nodes as they were after as many steps without absences."""
    model, T = make_model("MLP", dtype=F64), 12
    batches = stacked(make_batches("MLP", T, 3, batch_size=4, dtype=F64))
    table = torch.rand(T, 3, generator=torch.Generator().manual_seed(5)) < 0.6
    table[:, 1] |= ~table.any(1)
    there = Taken(Strategy(**settings), batches, Trace(table), model=model).run(T)
    always = Taken(Strategy(**settings), batches, None, model=model).run(T, keep=True)
    counts = table.sum(0).tolist()
    assert len(set(counts)) == 3
    for node, count in enumerate(counts):
        for name, p in there.state.params.items():
            expected = always.states[count - 1].params[name][node]
            torch.testing.assert_close(p[node], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", ["absent", "asynchronous", "participation"])
def test_workers_read_ahead_in_every_kind_of_run(kind: str) -> None:
    """To the bit what is read without them, also of examples that draw random numbers."""
    given: dict[str, Any] = {"batch_size": 2, "device": "cpu", "progress": False}
    if kind == "asynchronous":
        strategy: Strategy = AsyncStrategy("sgd", H=2, lr=0.1)
        given |= {"compute": Compute([1.0, 2.0, 3.0]), "max_updates": 6}
    else:
        strategy = FedAvgStrategy("sgd", H=2, lr=0.1, participation=0.6 if kind == "participation" else 1.0)
        given |= {"max_steps": 7, "availability": Dropout(0.4, mean_steps=2) if kind == "absent" else None}
    runs = []
    for workers in (0, 2):
        trainer = Trainer(Mean(), Noisy())
        trainer.fit(strategy, 3, dataloader_kwargs={"num_workers": workers}, **given)
        runs.append(trainer)
    for name, x in runs[0].nodes.params.items():
        assert torch.equal(x, runs[1].nodes.params[name])
    np.testing.assert_array_equal(runs[0].history.node_array(), runs[1].history.node_array())
