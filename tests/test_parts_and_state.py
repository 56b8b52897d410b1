"""What a model keeps besides its tensors: the mode of each part, attributes, outer variables, random numbers."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fitting import alone
from vecgym import Trainer, VecgymWarning
from vecgym.data import Batches
from vecgym.models import Classifier

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def fit(model: nn.Module, loss_fn: Any = None, steps: int = 6, **settings: Any) -> tuple[Trainer, Any]:
    trainer = Trainer(model, X, X[:8], loss_fn=loss_fn)
    options = {"batch_size": 4, "device": "cpu", "progress": False, "max_steps": steps, **settings}
    return trainer, trainer.fit(alone("sgd", lr=0.1), options.pop("num_nodes", 2), **options)


def off(trainer: Trainer, model: nn.Module, loss_fn: Any, steps: int = 6) -> float:
    """Train a copy of the model for each node, in torch's own way; return the largest difference of the tensors."""
    num_nodes, largest = trainer.nodes.num_nodes, 0.0
    batches = Batches(X, num_nodes, 4, seed=42)
    for node in range(num_nodes):
        module = copy.deepcopy(model)
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
        for step in range(steps):
            optimizer.zero_grad()
            loss_fn(module, batches.batch(step)[node]).backward()
            optimizer.step()
        for name, x in module.state_dict().items():
            ours = (trainer.nodes.params | trainer.nodes.buffers)[name]
            largest = max(largest, float((ours[node] - x).abs().max()))
    return largest


def square(module: nn.Module, batch: Tensor) -> Tensor:
    return (module(batch)[:, 0] - batch[:, 0]).square().mean()


# -------------------------------------------------------------------------------------------------- parts in eval mode


def frozen_batch_norm() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.9), nn.ReLU(), nn.Linear(8, 1)).double()
    net.get_buffer("1.running_mean").fill_(0.3)
    net[1].eval()
    net[2].eval()
    return net


class Distilled(nn.Module):
    """A student, and a teacher that an override of `train` keeps in eval mode, as people write it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student = nn.Linear(4, 3).double()
        self.teacher = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double().requires_grad_(False)
        self.train()

    def train(self, mode: bool = True) -> Distilled:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x) - self.teacher(x)


@pytest.mark.parametrize("engine", ["vmap", "loop", "auto"])
@pytest.mark.parametrize("make", [frozen_batch_norm, Distilled])
def test_a_part_in_eval_mode_stays_so_while_the_model_trains(make: Any, engine: str) -> None:
    model, steps = make(), 60 if engine == "auto" else 6
    modes = [part.training for part in model.modules()]
    trainer, averaged = fit(model, square, steps, engine=engine)
    assert off(trainer, model, square, steps) < 1e-12
    assert [part.training for part in averaged.modules()] == modes == [part.training for part in model.modules()]


def test_a_model_in_eval_mode_trains_in_training_mode_and_is_returned_as_given() -> None:
    model = frozen_batch_norm()
    trainer, averaged = fit(model.eval(), square)
    assert not averaged[1].training
    assert trainer.nodes.buffers["1.num_batches_tracked"].tolist() == [6, 6]
    vars(model.get_submodule("2"))["p"] = 0.0
    trainer, _ = fit(model, square)
    assert off(trainer, copy.deepcopy(model).train(), square) < 1e-12


def test_validation_is_in_eval_mode_whatever_the_parts_are_in() -> None:
    model = frozen_batch_norm()
    trainer, averaged = fit(model, square, num_nodes=1, max_steps=3)
    assert trainer.history.series("val_loss")[1][-1] == pytest.approx(square(averaged.eval(), X[:8]).item(), abs=1e-14)


def test_a_trained_part_in_eval_mode_within_a_fresh_module_is_told() -> None:
    net = nn.Sequential(nn.Linear(4, 1), nn.Dropout()).double().eval()
    with pytest.warns(VecgymWarning, match="all parts of the model are in eval mode"):
        fit(nn.Sequential(net), square)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(nn.Sequential(net, nn.Linear(1, 1).double()), square)
        assert not Classifier(net).training  # so that all of it trains
        assert Classifier(net.train()).training
