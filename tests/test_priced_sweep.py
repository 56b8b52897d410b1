"""A sweep on networks: what each configuration's own run says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vecgym
from vecgym import Trainer
from vecgym.clock import Compute, Network
from vecgym.models import Line
from vecgym.strategy import DiLoCoStrategy

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
