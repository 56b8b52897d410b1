"""Nodes at different times: each by its own number of steps, as if it were alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.models import make_data, make_model
from vecgym.collectives import StackedCollectives
from vecgym.core import nodes, tree
from vecgym.data import Batches
from vecgym.engine import Engine
from vecgym.engine.simulation import Simulation, State
from vecgym.strategy import Strategy

F64 = torch.float64


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
        found, limits = batches.at(steps, rows)
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
    """Three nodes with 0, 5 and 2 steps behind them; the same node by itself, with all others at its own count."""
    model: nn.Module = make_model("MLP", dtype=F64)
    x, y = make_data("MLP", 12, 0, F64)
    assert isinstance(x, Tensor)
    assert isinstance(y, Tensor)
    batch = (x.view(3, 4, -1), y.view(3, 4, *y.shape[1:]))
    counts = torch.tensor([0, 5, 2])

    def step(node_steps: Tensor, own_time: bool) -> State:
        simulation = Simulation(
            model, Strategy(**settings), StackedCollectives(3), engine=Engine(model), max_steps=12, own_time=own_time
        )
        start = simulation.init()
        wide = {name: p.repeat_interleave(3, 0) for name, p in start.params.items()}
        optimizer = {**start.optimizer, "step": node_steps.clone()}
        at = int(node_steps[0])
        return simulation.step(State(at, wide, start.buffers, optimizer, start.strategy, node_steps), batch)[0]

    together = step(counts, own_time=True)
    for node, count in enumerate(counts.tolist()):
        alone = step(torch.full((3,), count), own_time=False)
        for name, p in together.params.items():
            torch.testing.assert_close(p[node], alone.params[name][node], rtol=1e-12, atol=1e-14)
    assert nodes.consensus_distance(together.params) > 0
