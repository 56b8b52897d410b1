"""The public interface before type checkers and editors: mypy, which checks this file, fails otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import vecgym
from vecgym.engine import ENGINES, EngineName
from vecgym.strategy import AveragingCommunicator, DiLoCoStrategy, FedAvgStrategy

if TYPE_CHECKING:
    from typing_extensions import assert_type


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return (self.slope - x).square().mean()


def interface() -> None:
    """Never called. Comments that are not needed are errors of mypy's, too: each wrong name must be noticed."""
    trainer = vecgym.Trainer(Line(), torch.ones(8))
    strategy = DiLoCoStrategy("sgd", H=2, lr=0.1)
    averaged = trainer.fit(strategy, num_nodes=2, engine="vmap", backend="stacked", on_divergence="warn")
    assert_type(averaged, Line)
    assert_type(averaged.slope, nn.Parameter)
    assert_type(trainer, vecgym.Trainer[Line])
    assert_type(trainer.model, Line)
    assert_type(trainer.nodes.module(0), Line)
    assert_type(trainer.nodes.average(), Line)
    assert_type(trainer.history, vecgym.History)
    assert_type(vecgym.load("run.pt"), vecgym.Saved)
    trainer.fit(strategy, 2, engine="vamp")  # type: ignore[arg-type]
    trainer.fit(strategy, 2, backend="threads")  # type: ignore[arg-type]
    trainer.fit(strategy, 2, on_divergence="stop")  # type: ignore[arg-type]
    trainer.fit(strategy, 2, shuffle="no")  # type: ignore[arg-type]
    trainer.fit("diloco", 2)  # type: ignore[arg-type]
    trainer.fit(strategy, 2, batchsize=3)  # type: ignore[call-arg]
    vecgym.Trainer(torch.ones(8), Line())  # type: ignore[type-var]
    vecgym.WandbLogger(mode="on")  # type: ignore[arg-type]
    FedAvgStrategy(weighting="size")  # type: ignore[arg-type]
    AveragingCommunicator(weighting="size")  # type: ignore[arg-type]


def test_the_names_that_are_checked_are_those_of_the_types() -> None:
    names: tuple[EngineName, ...] = ("auto", "vmap", "loop")
    assert names == ENGINES
