"""A sweep on networks: what each configuration's own run says."""

from __future__ import annotations

import math
import multiprocessing
import signal
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vecgym
from vecgym import Trainer
from vecgym.availability import Deadline, Dropout
from vecgym.clock import Compute, Network
from vecgym.models import Line
from vecgym.strategy import AsyncStrategy, DecoupledDiLoCoStrategy, DiLoCoStrategy
from vecgym.sweeps.chunk import Chunk

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


@pytest.mark.filterwarnings("ignore:.*never had a gradient")
def test_parameters_that_never_have_a_gradient_are_sent_as_in_a_run() -> None:
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


COMPUTES = {"alike": Compute(0.2), "one slow": Compute([0.2, 0.2, 0.2, 9.0])}


def swept_with(availability: Any, **options: Any) -> vecgym.SweepResult:
    given: dict[str, Any] = {"num_nodes": 4, "max_steps": 6, "batch_size": 2, "device": "cpu", "progress": False}
    given |= {"model": Line(), "grid": {"H": [3]}, "availability": availability, "strategy": strategy, **options}
    return vecgym.sweep(train_dataset=torch.arange(16.0), val_dataset=torch.arange(4.0), **given)


def is_the_fit(row: Any, history: Any, availability: Any, **clock: Any) -> Any:
    trainer = Trainer(Line(), torch.arange(16.0), torch.arange(4.0))
    given: dict[str, Any] = {"max_steps": 6, "batch_size": 2, "device": "cpu", "progress": False}
    trainer.fit(strategy(row["H"]), 4, availability=availability, **given, **clock)
    for column in ("train_loss", "bytes_total", "num_present"):
        found, expected = ([x for x in h[column] if x is not None] for h in (history, trainer.history))
        assert found == pytest.approx(expected, rel=1e-6)
    return trainer


@pytest.mark.filterwarnings("ignore:.*never present")
def test_who_is_late_by_compute_alone() -> None:
    """No seconds: a deadline needs no network."""
    late = Deadline(1.0, H=3)
    result = swept_with(late, compute=COMPUTES)
    assert [row["compute"] for row in result.rows] == list(COMPUTES)
    assert "sim_seconds" not in result.rows[0]
    for i, row in enumerate(result.rows):
        is_the_fit(row, result.history(i), late, compute=COMPUTES[row["compute"]])
    assert [result.history(i).last("num_present") for i in range(2)] == [4, 3]


@pytest.mark.filterwarnings("ignore:.*never present")
@pytest.mark.parametrize("availability", [Deadline(1.0, H=3), Dropout(0.3, mean_steps=2)], ids=repr)
def test_seconds_where_nodes_may_be_absent(availability: Any) -> None:
    result = swept_with(availability, network=NETWORKS, compute=COMPUTES)
    assert [(row["network"], row["compute"]) for row in result.rows] == [
        ("near", "alike"), ("far", "alike"), ("near", "one slow"), ("far", "one slow")
    ]  # fmt: skip
    for i, row in enumerate(result.rows):
        clock: dict[str, Any] = {"network": NETWORKS[row["network"]], "compute": COMPUTES[row["compute"]]}
        trainer = is_the_fit(row, result.history(i), availability, **clock)
        assert row["sim_seconds"] == pytest.approx(trainer.history.last("sim_seconds"), rel=1e-12)
        assert row["sim_utilization"] == pytest.approx(trainer.history.last("sim_utilization"), rel=1e-12)
    other = result.price(Network(math.inf), Compute(0.2)).rows  # who was there stays as it was
    assert len(other) == 2
    assert other[0]["sim_seconds"] == pytest.approx(1.2)


@pytest.mark.filterwarnings("ignore:.*never present")
def test_some_rows_with_absent_nodes(tmp_path: Path) -> None:
    """Of these alone the compute is an axis; and the seconds are there after resuming, and from other processes."""
    grid = {"availability": [None, Deadline(1.0, H=3)], "H": [3]}
    clock: dict[str, Any] = {"network": NETWORKS["far"], "compute": COMPUTES}
    result = swept_with(None, grid=grid, resume=tmp_path / "sweep.pt", **clock)
    assert [row["compute"] for row in result.rows] == list(COMPUTES) * 2
    seconds = [row["sim_seconds"] for row in result.rows]
    assert seconds[1] > 50 > 2 > seconds[3]
    again = swept_with(None, grid=grid, resume=tmp_path / "sweep.pt", **clock)
    assert [row["sim_seconds"] for row in again.rows] == seconds
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        apart = swept_with(None, grid=grid, executor=executor, **clock)
    assert [row["sim_seconds"] for row in apart.rows] == seconds
    planned = swept_with(None, grid=grid, dry_run=True, **clock)
    assert [row["sim_seconds"] for row in planned.rows] == [*seconds[:2], None, None]
    with pytest.raises(ValueError, match="holds another sweep"):
        swept_with(None, grid=grid, resume=tmp_path / "sweep.pt", network=NETWORKS["far"], compute=Compute(0.3))


def test_a_row_with_absent_nodes_that_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its seconds count the steps before the interrupt too."""
    dropout, options = Dropout(0.3, mean_steps=2), {"network": NETWORKS["far"], "compute": Compute(0.2)}
    whole = swept_with(dropout, **options).rows[0]
    options["resume"] = tmp_path / "sweep.pt"
    step = Chunk.step

    def stopped(self: Chunk, batches: Any, measured: bool) -> list[int]:
        if self.state.step == 3:
            signal.raise_signal(signal.SIGINT)
        return step(self, batches, measured)

    monkeypatch.setattr(Chunk, "step", stopped)
    with pytest.warns(vecgym.VecgymWarning, match="interrupted"):
        part = swept_with(dropout, **options).rows[0]
    monkeypatch.undo()
    assert part["steps"] == 4
    assert part["sim_seconds"] < whole["sim_seconds"]
    assert swept_with(dropout, **options).rows[0]["sim_seconds"] == whole["sim_seconds"]


def test_a_deadline_needs_compute() -> None:
    with pytest.raises(ValueError, match=r"Deadline\(.*\) needs the nodes' compute times: give compute="):
        swept_with(Deadline(1.0, H=3), dry_run=True)
    with pytest.raises(ValueError, match="Compute has seconds for 2 nodes and the run has 4"):
        swept_with(Deadline(1.0, H=3), compute=Compute([0.2, 0.3]))


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
    assert figure.axes[0].get_xlabel() == "simulated seconds"
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
