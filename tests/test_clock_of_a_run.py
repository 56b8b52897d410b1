"""`fit(network=, compute=)`: seconds in the history, logs, figures and checkpoints, and the same bits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vecgym import CSVLogger, Trainer
from vecgym.availability import Availability, Deadline, Dropout, Facts, LocalSteps, Presence, Sampled, Trace
from vecgym.clock import Compute, Network, Timeline, price
from vecgym.collectives.ledger import Ledger
from vecgym.logger import read_csv
from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy, SPARTAStrategy, Strategy

NETWORK, COMPUTE = Network("1 kbit/s", "10 ms"), Compute.lognormal(0.4, 0.3)


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
        self.b = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w - x[:, None] + self.b).square().mean()


def trained(strategy: Strategy | None = None, steps: int = 12, **options: Any) -> Trainer[Line]:
    trainer = Trainer(Line(), torch.arange(16, dtype=torch.float64), torch.arange(4, dtype=torch.float64))
    strategy = strategy or DiLoCoStrategy("sgd", lr=0.01, H=4)
    options = {"max_steps": steps, "batch_size": 2, "device": "cpu", "progress": False, "val_interval": 4, **options}
    trainer.fit(strategy, 4, **options)
    return trainer


@pytest.mark.parametrize(
    "strategy", [DiLoCoStrategy("sgd", lr=0.01, H=4), SPARTAStrategy(0.5, "sgd", lr=0.01, delay=2)]
)
def test_the_history_says_what_the_timeline_says(strategy: Strategy) -> None:
    trainer = trained(strategy, network=NETWORK, compute=COMPUTE)
    timeline = trainer.timeline(NETWORK, COMPUTE)
    seconds = [row["sim_seconds"] for row in trainer.history.rows]
    torch.testing.assert_close(torch.tensor(seconds[1:]), timeline.step_seconds.float())
    assert seconds[0] == 0
    used = [row["sim_utilization"] for row in trainer.history.rows[1:]]
    torch.testing.assert_close(torch.tensor(used), timeline.step_utilization.float())
    assert trainer.history.settings["network"] == repr(NETWORK)


ABSENT = [Dropout(0.4, mean_steps=2), Sampled(0.5, H=4), LocalSteps([4, 1, 2, 3], H=4), Deadline(1.8, H=4)]


@pytest.mark.filterwarnings("ignore:.*never present")
@pytest.mark.parametrize("availability", ABSENT, ids=repr)
@pytest.mark.parametrize("drawn", [False, True])
def test_who_is_absent_does_not_compute(availability: Availability, drawn: bool) -> None:
    """In the history, on the timeline and at any other price; neither once the run has been resumed."""
    compute = Compute.lognormal([0.4, 0.3, 5.0, 0.4], 0.3) if drawn else Compute([0.4, 0.3, 5.0, 0.4])
    trainer = trained(network=NETWORK, compute=compute, availability=availability)
    timeline = trainer.timeline(NETWORK, compute)
    assert timeline.step_seconds.tolist() == pytest.approx(trainer.history["sim_seconds"][1:], rel=1e-12)
    assert timeline.step_utilization.tolist() == pytest.approx(trainer.history["sim_utilization"][1:], rel=1e-12)
    took = compute.of_steps(12, 4).where(computing(availability, compute), 0.0)
    assert timeline.per_node.computed.tolist() == pytest.approx(took.sum(0).tolist())
    bars = [bar for bar in timeline.bars() if bar.kind in ("forward", "backward") and bar.node == 2]
    assert sum(bar.end - bar.begin for bar in bars) == pytest.approx(float(took.sum(0)[2]))
    ledger = Ledger()
    ledger.load(trainer.ledger.state())
    assert price(ledger, Network(1e9), COMPUTE).seconds == trainer.timeline(Network(1e9), COMPUTE).seconds


def computing(availability: Availability, compute: Compute) -> Tensor:
    presence = Presence(availability, Facts(4, 12, seed=42, compute=compute))
    return torch.stack([presence.is_training(step) for step in range(12)])


@pytest.mark.filterwarnings("ignore:.*never present")
def test_the_slowest_node_is_never_there() -> None:
    there = Trace([[True, True, True, False]] * 10)
    compute = Compute([1.0, 1.0, 1.0, 10.0])
    trainer = trained(steps=10, network=Network(math.inf), compute=compute, availability=there)
    assert trainer.history.last("sim_seconds") == trainer.timeline(Network(math.inf), compute).seconds == 10.0


@pytest.mark.filterwarnings("ignore:.*never present")
def test_a_node_that_is_never_there_does_not_move_with_the_others() -> None:
    clock: dict[str, Any] = {"network": Network("1 kbit/s"), "compute": Compute(1.0)}
    there = Trace([[True, True, True, False]] * 10)
    trainer = trained(AllReduceStrategy("sgd", lr=0.1), steps=10, availability=there, **clock)
    timeline = trainer.timeline(**clock)
    assert trainer.history.last("sim_utilization") == pytest.approx(timeline.utilization, rel=1e-12)
    assert timeline.per_node.waited[3] == 0


@pytest.mark.filterwarnings("ignore:.*never")
@pytest.mark.parametrize(
    "there", [Trace([[True, True, True, False]] * 10), Deadline(3.0, H=4), LocalSteps([1, 4, 4, 2], H=4)]
)
def test_computing_is_of_all_nodes_and_the_whole_time(there: Availability) -> None:
    """A node that is never there, waits, or has ended before the others, does not compute."""
    clock: dict[str, Any] = {"network": NETWORK, "compute": Compute([0.5, 0.7, 1.0, 4.0])}
    trainer = trained(steps=10, availability=there, **clock)
    timeline, computing = trainer.timeline(**clock), trainer.ledger.computing()
    assert isinstance(timeline, Timeline)
    assert computing is not None
    used = (computing * clock["compute"].seconds).cumsum(0).sum(1) / (4 * timeline.step_seconds)
    assert timeline.step_utilization.tolist() == pytest.approx(used.tolist(), rel=1e-12)
    assert trainer.history["sim_utilization"][1:] == pytest.approx(used.tolist(), rel=1e-12)
    assert timeline.utilization == pytest.approx(float(timeline.per_node.computed.sum()) / (4 * timeline.seconds))
    assert timeline.utilization < 0.8


def test_the_bits_do_not_depend_on_the_clock() -> None:
    plain, clocked = trained(), trained(network=NETWORK, compute=COMPUTE)
    for name, x in plain.nodes.params.items():
        assert torch.equal(x, clocked.nodes.params[name])
    assert plain.history["train_loss"] == clocked.history["train_loss"]
    assert "sim_seconds" not in plain.history.columns


@pytest.mark.parametrize("availability", [None, Dropout(0.4, mean_steps=2)])
def test_a_resumed_run_keeps_its_clock(tmp_path: Path, availability: Availability | None) -> None:
    clock: dict[str, Any] = {"network": NETWORK, "compute": COMPUTE, "availability": availability}
    whole = trained(**clock)
    kept: dict[str, Any] = {"save_dir": tmp_path, **clock}

    class Stops(Trainer[Line]):
        def after_step(self, row: dict[str, Any]) -> None:
            if row["step"] == 7:
                raise KeyboardInterrupt

    stopped = Stops(Line(), torch.arange(16, dtype=torch.float64), torch.arange(4, dtype=torch.float64))
    with pytest.raises(KeyboardInterrupt):
        stopped.fit(
            DiLoCoStrategy("sgd", lr=0.01, H=4), 4, max_steps=12, batch_size=2, device="cpu", progress=False,
            val_interval=4, checkpoint_interval=3, **kept,
        )  # fmt: skip
    resumed = trained(resume=True, **kept)
    assert resumed.history["sim_seconds"] == whole.history["sim_seconds"]
    assert resumed.timeline(NETWORK, COMPUTE).seconds == whole.timeline(NETWORK, COMPUTE).seconds


def test_loggers_and_figures(tmp_path: Path) -> None:
    trainer = trained(network=NETWORK, compute=COMPUTE, logger=CSVLogger(tmp_path / "log"))
    logged = read_csv(tmp_path / "log")
    assert logged["sim_seconds"] == trainer.history["sim_seconds"]
    figure = trainer.plot(x="sim_seconds")
    assert "simulated seconds" in [axes.get_xlabel() for axes in figure.axes]


def test_the_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    trained(network=NETWORK, compute=COMPUTE, progress=True)
    assert "on the network" in capsys.readouterr().err


@pytest.mark.parametrize("availability", [None, Dropout(0.4, mean_steps=2)])
def test_with_real_processes(availability: Availability | None) -> None:
    clock: dict[str, Any] = {"network": NETWORK, "compute": COMPUTE, "availability": availability}
    stacked = trained(**clock)
    processes = trained(backend="processes", num_processes=2, **clock)
    assert processes.history["sim_seconds"] == stacked.history["sim_seconds"]
    assert processes.timeline(NETWORK, COMPUTE).seconds == price(stacked.ledger, NETWORK, COMPUTE).seconds


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"network": NETWORK}, ValueError, "network without compute gives no seconds"),
        ({"compute": COMPUTE}, ValueError, "compute without network gives no seconds"),
        ({"network": 1e9, "compute": COMPUTE}, TypeError, "network is of type float; give a vecgym.clock.Network"),
        ({"network": NETWORK, "compute": 0.4}, TypeError, "compute is of type float; give a vecgym.clock.Compute"),
        ({"network": Network([1e9, 1e9]), "compute": COMPUTE}, ValueError, "the network has 2 nodes and the run has 4"),
        ({"network": NETWORK, "compute": Compute([1.0, 2.0])}, ValueError, "for 2 nodes and the run has 4"),
    ],
)
def test_wrong_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        trained(**options)
