"""A sweep on networks: what each configuration's own run says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vecgym
from vecgym import Trainer
from vecgym.clock import Compute, Network
from vecgym.models import Line
from vecgym.strategy import AsyncStrategy, DecoupledDiLoCoStrategy, DiLoCoStrategy

NETWORKS = {"near": Network("1 kbit/s"), "far": Network("1 kbit/s", "50 ms")}
COMPUTE = Compute.lognormal(0.2, 0.3)


def strategy(H: int) -> DiLoCoStrategy:
    return DiLoCoStrategy("sgd", H=H, lr=0.01)


def swept(**options: Any) -> vecgym.SweepResult:
    return vecgym.sweep(
        Line(), torch.arange(16.0), torch.arange(4.0), strategy=strategy, grid={"H": [1, 3], "seed": [0, 1]},
        num_nodes=4, max_steps=6, batch_size=2, device="cpu", progress=False, **options,
    )  # fmt: skip


def test_rows_have_the_seconds_of_their_own_runs() -> None:
    result = swept(network=NETWORKS["far"], compute=COMPUTE)
    assert [set(row) >= {"sim_seconds", "sim_utilization"} for row in result.rows] == [True] * 4
    for row in result.rows:
        trainer = Trainer(Line(), torch.arange(16.0))
        trainer.fit(strategy(row["H"]), 4, max_steps=6, batch_size=2, device="cpu", progress=False, seed=row["seed"])
        assert row["sim_seconds"] == trainer.timeline(NETWORKS["far"], COMPUTE).seconds


class Idle(nn.Module):
    """Of its four parameters of unlike sizes one has an influence on the loss that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(5))
        self.w = nn.Parameter(torch.zeros(2))
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)
        self.last = nn.Parameter(torch.zeros(30))

    def forward(self, x: Tensor) -> Tensor:
        return (self.frozen.mean() * self.w - x[:, None]).square().mean() + 0 * self.last.detach().sum()


SETTINGS: dict[str, Any] = {"batch_size": 2, "device": "cpu", "progress": False, "network": NETWORKS["far"]}


def test_parameters_of_no_influence_are_not_sent() -> None:
    result = vecgym.sweep(
        Idle(), torch.arange(16.0), strategy=strategy, grid={"H": [1, 3]}, num_nodes=4, max_steps=6, compute=COMPUTE,
        **SETTINGS,
    )  # fmt: skip
    for row in result.rows:
        trainer = Trainer(Idle(), torch.arange(16.0))
        trainer.fit(strategy(row["H"]), 4, max_steps=6, compute=COMPUTE, **SETTINGS)
        assert row["sim_seconds"] == pytest.approx(trainer.history.last("sim_seconds"), rel=1e-12)


@pytest.mark.parametrize(
    "make",
    [lambda H: AsyncStrategy("sgd", H=H, lr=0.01), lambda H: DecoupledDiLoCoStrategy("sgd", H=4, fragments=H, lr=0.01)],
)
def test_nor_do_they_change_the_order_of_asynchronous_runs(make: Any) -> None:
    compute = Compute([0.2, 0.3, 0.5, 0.9])
    result = vecgym.sweep(
        Idle(), torch.arange(16.0), strategy=lambda H: make(H), grid={"H": [1, 2]}, num_nodes=4, max_updates=12,
        compute=compute, **SETTINGS,
    )  # fmt: skip
    for i, row in enumerate(result.rows):
        trainer = Trainer(Idle(), torch.arange(16.0))
        trainer.fit(make(row["H"]), 4, max_updates=12, compute=compute, **SETTINGS)
        for column in ("sim_seconds", "staleness", "local_steps_total", "bytes_total"):
            assert result.history(i)[column] == trainer.history[column]
        assert result.history(i)["train_loss"][1:] == pytest.approx(trainer.history["train_loss"][1:])


def test_networks_and_compute_as_axes() -> None:
    result = swept()
    priced = result.price(NETWORKS, {"steady": Compute(0.2), "drawn": COMPUTE})
    assert priced.axes == ["H", "seed", "network", "compute"]
    assert len(priced) == len(priced.rows) == 16
    assert [row["val_loss"] for row in priced.rows[::4]] == [row["val_loss"] for row in result.rows]
    alone = result.price(NETWORKS["near"], COMPUTE)
    mine = [row for row in priced.rows if (row["network"], row["compute"]) == ("near", "drawn")]
    assert [row["sim_seconds"] for row in mine] == [row["sim_seconds"] for row in alone.rows]
    assert priced.history(5)["train_loss"] == result.history(1)["train_loss"]
    assert priced.best("sim_seconds", over=None)["H"] == 3


def test_the_pareto_front_against_seconds() -> None:
    figure = swept(network=NETWORKS, compute=COMPUTE).plot_pareto(hue="network", x="sim_seconds")
    assert figure.axes[0].get_xlabel() == "seconds on the network"
    assert "sim_seconds" in swept(network=NETWORKS, compute=COMPUTE).table()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"network": NETWORKS}, ValueError, "give both"),
        ({"network": {}, "compute": COMPUTE}, ValueError, "network is an empty dict"),
        ({"network": {"a": 1e9}, "compute": COMPUTE}, TypeError, "give a vecgym.clock.Network"),
        ({"network": NETWORKS, "compute": 0.4}, TypeError, "compute is of type float; give a vecgym.clock.Compute"),
    ],
)
def test_wrong_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        swept(**options)
