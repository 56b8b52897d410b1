"""Runs that end before their last step: a limit of simulated seconds or bytes, a function of the row, StopIteration."""

from __future__ import annotations

import math
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fitting import STRATEGIES, dataset, fit, same_run
from tests.models import make_model
from tests.test_commands import BESIDE, CONFIG
from vecgym import CSVLogger, Logger, Trainer
from vecgym.cli import main
from vecgym.clock import Compute, Network
from vecgym.records.columns import COLUMNS
from vecgym.strategy import AsyncStrategy, DiLoCoStrategy, FedAvgStrategy

STEPS = 12
NETWORK: dict[str, Any] = {"network": Network("1 Mbit/s", "50 ms"), "compute": Compute([0.4, 0.5, 0.4])}
LIMITS: dict[str, dict[str, Any]] = {
    "seconds": {"max_seconds": 3.0, **NETWORK},
    "bytes": {"max_bytes": 8_000.0},
    "function": {"stop": lambda row: row["step"] == 5},
}


def run(strategy: str = "DiLoCo", **settings: Any) -> Trainer:
    given = {"max_steps": STEPS, "val": dataset("Dropout", 6, seed=1), "val_interval": 4, **settings}
    trainer, _ = fit("Dropout", strategy, **given)
    return trainer


def assert_same_row(row: dict[str, Any], expected: dict[str, Any]) -> None:
    assert row.keys() == expected.keys()
    for name, x in row.items():
        if name not in COLUMNS or not COLUMNS[name].measured:
            np.testing.assert_array_equal(x, expected[name], err_msg=name)


@pytest.mark.parametrize("strategy", ["AllReduce", "FedAvg", "FedAvg participation", "DiLoCo", "Composed"])
@pytest.mark.parametrize("limit", LIMITS)
def test_the_last_row_is_that_of_a_step_which_is_evaluated(limit: str, strategy: str) -> None:
    """Of all columns, whether or not the nodes have exchanged something in that step."""
    trainer = run(strategy, **LIMITS[limit])
    whole = run(strategy, val_interval=1, **(NETWORK if limit == "seconds" else {}))
    last = trainer.history.rows[-1]
    assert 1 < last["step"] < STEPS
    assert trainer.state is not None
    assert trainer.state.step == last["step"]
    assert_same_row(last, whole.history.rows[last["step"]])
    np.testing.assert_array_equal(trainer.history.node_array(), whole.history.node_array()[: last["step"]])


@pytest.mark.parametrize(("limit", "column"), [("max_seconds", "sim_seconds"), ("max_bytes", "bytes_total")])
def test_it_ends_with_the_step_that_reaches_the_limit(limit: str, column: str) -> None:
    whole = run("FedAvg", **NETWORK).history[column]
    for exact in (True, False):
        bound = whole[6] if exact else np.nextafter(whole[6], math.inf)
        trainer = run("FedAvg", **NETWORK, **{limit: bound})
        assert trainer.history[column] == whole[: 1 + whole.index(next(x for x in whole if x >= bound))]
    assert trainer.history.settings[limit] == bound


@pytest.mark.parametrize("limit", LIMITS)
def test_a_wider_limit_goes_on_as_if_it_had_never_stopped(limit: str, tmp_path: Path) -> None:
    """With a cosine, whose length is max_steps whatever ends the run."""
    ended = run(save_dir=tmp_path, logger=CSVLogger(tmp_path), **LIMITS[limit])
    steps = len(ended.history)
    again = run(save_dir=tmp_path, resume=True, logger=CSVLogger(tmp_path), **LIMITS[limit])
    assert len(again.history) == steps  # the limit is reached already
    assert same_run(again, ended)
    whole = run()
    further = run(save_dir=tmp_path, resume=True, logger=CSVLogger(tmp_path), **(NETWORK if limit == "seconds" else {}))
    assert same_run(further, whole)
    assert further.history["train_loss"] == whole.history["train_loss"]
    assert len((tmp_path / "history.csv").read_text().splitlines()) == STEPS + 2


class CtrlC(Logger):
    """Presses Ctrl-C when it gets the row of a step: that is, while the next step is in progress."""

    def __init__(self, at_step: int) -> None:
        self.at_step = at_step

    def log(self, row: dict[str, Any]) -> None:
        if row["step"] == self.at_step:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("limit", LIMITS)
def test_the_last_step_is_evaluated_if_it_is_interrupted_too(limit: str, tmp_path: Path) -> None:
    whole = run(val_interval=None, **LIMITS[limit])
    last = whole.history.rows[-1]
    with pytest.raises(KeyboardInterrupt):
        run(val_interval=None, save_dir=tmp_path, logger=CtrlC(last["step"] - 1), **LIMITS[limit])
    again = run(val_interval=None, save_dir=tmp_path, resume=True, **LIMITS[limit])
    assert same_run(again, whole)
    assert_same_row(again.history.rows[-1], last)


@pytest.mark.parametrize("narrower", [{"stop": lambda row: row["step"] >= 3}, {"max_bytes": 1.0}])
def test_a_run_that_is_at_its_end_when_it_is_resumed_is_evaluated(narrower: dict[str, Any], tmp_path: Path) -> None:
    """The nodes' distance before the exchange is not known any more."""
    with pytest.raises(KeyboardInterrupt):
        run(save_dir=tmp_path, logger=[CSVLogger(tmp_path), CtrlC(2)])
    wanted = run(max_steps=STEPS, val_interval=1).history.rows[3]
    again = run(save_dir=tmp_path, resume=True, logger=CSVLogger(tmp_path), **narrower)
    assert again.history["step"] == [0, 1, 2, 3]
    assert_same_row(again.history.rows[-1], {x: y for x, y in wanted.items() if x != "consensus_distance_before"})
    lines = (tmp_path / "history.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["step", "0", "1", "2", "3"]


class Patience:
    """Ends a run when the training loss has not fallen below its minimum for a number of steps."""

    def __init__(self, steps: int) -> None:
        self.losses: list[float] = []
        self.steps = steps

    def __call__(self, row: dict[str, Any]) -> bool:
        self.losses.append(row["train_loss"])
        return len(self.losses) - 1 - int(np.argmin(self.losses)) >= self.steps


def test_a_function_with_a_memory_sees_the_earlier_rows_of_a_resumed_run(tmp_path: Path) -> None:
    whole, first, rest = Patience(3), Patience(3), Patience(3)
    ended = run(stop=whole, max_steps=60)
    assert 4 < len(whole.losses) < 60
    run(stop=lambda row: first(row) or row["step"] == 3, max_steps=60, save_dir=tmp_path)
    resumed = run(stop=rest, max_steps=60, save_dir=tmp_path, resume=True)
    assert rest.losses == whole.losses == resumed.history["train_loss"][1:]
    assert same_run(resumed, ended)


class Stopping(Trainer):
    at_step = 5

    def after_step(self, row: dict[str, Any]) -> None:
        if row["step"] == self.at_step:
            raise StopIteration


def test_what_other_processes_would_not_call_is_refused() -> None:
    trainer = Stopping(make_model("MLP"), dataset("MLP"))
    with pytest.raises(ValueError, match=r'^after_step is not called with backend="processes": give logger= or stop='):
        trainer.fit(STRATEGIES["DiLoCo"](), 3, max_steps=2, device="cpu", backend="processes", num_processes=3)
    assert trainer.fit(STRATEGIES["DiLoCo"](), 3, max_steps=2, batch_size=4, device="cpu") is not None


class StoppingLogger(Logger):
    def __init__(self, at_step: int = 5) -> None:
        self.at_step, self.steps, self.finished = at_step, [], 0  # type: tuple[int, list[int], int]

    def log(self, row: dict[str, Any]) -> None:
        self.steps.append(row["step"])
        if row["step"] == self.at_step:
            raise StopIteration

    def finish(self) -> None:
        self.finished += 1


def ends(row: dict[str, Any]) -> bool:
    if row["step"] == 5:
        raise StopIteration
    return False


def test_whoever_raises_stop_iteration_ends_the_run() -> None:
    of_function = run(stop=ends)
    trainer = Stopping(make_model("Dropout"), dataset("Dropout"), dataset("Dropout", 6, seed=1))
    settings: dict[str, Any] = {"max_steps": STEPS, "batch_size": 4, "val_interval": 4, "device": "cpu"}
    trainer.fit(STRATEGIES["DiLoCo"](), 3, **settings)
    assert trainer.history.last("step") == 5
    assert same_run(trainer, of_function)
    assert_same_row(trainer.history.rows[-1], of_function.history.rows[-1])
    Stopping.at_step = 0
    trainer.fit(STRATEGIES["DiLoCo"](), 3, **settings)
    assert trainer.history["step"] == [0]


def test_a_logger_ends_the_run_after_the_step_that_follows() -> None:
    logger, other = StoppingLogger(), StoppingLogger(at_step=-1)
    trainer = run(logger=[logger, other])
    assert logger.steps == other.steps == trainer.history["step"] == [*range(7)]
    assert logger.finished == other.finished == 1
    assert "val_loss" in trainer.history.rows[-1]


@pytest.mark.parametrize("limit", LIMITS)
def test_processes_stop_at_the_same_step(limit: str) -> None:
    processes: dict[str, Any] = {"backend": "processes", "num_processes": 3}
    alone, together = (run(exact=True, **LIMITS[limit], **backend) for backend in ({}, processes))
    assert same_run(alone, together)
    last, expected = together.history.rows[-1], dict(alone.history.rows[-1])
    if last["step"] % 4:  # it is not known before an exchange that the step is the last one
        del expected["consensus_distance_before"]
    assert_same_row(last, expected)


def test_a_logger_ends_processes_soon() -> None:
    logger = StoppingLogger()
    trainer = run(max_steps=3000, logger=logger, backend="processes", num_processes=3)
    last = trainer.history.rows[-1]
    assert 5 < last["step"] < 3000
    assert "val_loss" in last
    assert logger.steps == [*range(last["step"] + 1)]


@pytest.mark.parametrize("limit", [{"max_bytes": 6_000.0}, {"stop": lambda row: row["version"] == 3}])
def test_asynchronous_runs(limit: dict[str, Any], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"compute": Compute([1.0, 2.0, 3.0]), "max_updates": 10, "save_dir": tmp_path}
    strategy: Any = AsyncStrategy("sgd", H=2)
    ended, whole = run(strategy, **settings, **limit), run(strategy, **{**settings, "save_dir": None})
    last = ended.history.rows[-1]
    assert 1 < last["step"] < 10
    assert "val_loss" in last
    assert last["bytes_total"] == whole.history["bytes_total"][last["step"]]
    assert same_run(run(strategy, resume=True, **settings), whole)


def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("experiment.py").write_text(CONFIG)
    Path("beside.py").write_text(BESIDE)
    monkeypatch.setattr("sys.path", sys.path[:])
    assert main(["run", "experiment.py", "--no-progress", "--output", "out", "--set", "max_bytes=1"]) == 0
    rows = Path("out", "history.csv").read_text().splitlines()
    assert len(rows) == 4  # header, start, and two steps: the second is the first that sends something


@pytest.mark.parametrize(("settings", "error", "message"), [
    ({"max_seconds": 3.0}, ValueError, r"max_seconds=3 are simulated seconds: give network= and compute= too"),
    ({"max_seconds": 3.0, "max_steps": None, **NETWORK}, ValueError, "max_seconds=3 needs max_steps"),
    ({"max_bytes": 1e6, "max_steps": None}, ValueError, "max_bytes=1e\\+06 needs max_steps"),
    ({"max_bytes": 0}, ValueError, "max_bytes=0 must be a number > 0: bytes that a node sends"),
    ({"max_seconds": "1 h", **NETWORK}, ValueError, "max_seconds='1 h' must be a number > 0: simulated seconds"),
    ({"stop": True}, TypeError, "stop is of type bool; give a function of a row"),
    ({"stop": lambda row: row["val_loss"] < 1}, ValueError, "stop asks for 'val_loss', which the row of step 1 lacks"),
    ({"stop": lambda row: row["val_loss"] < 1}, ValueError, r"Ask for row.get\('val_loss', math.inf\)"),
    ({"stop": lambda row: row["val_loss"] < 1, "val_size": 0}, ValueError, "no validation. Give Trainer a val_dataset"),
    ({"stop": lambda row: row["valloss"] < 1}, ValueError, "step 1 lacks; did you mean 'val_loss'"),
])  # fmt: skip
def test_mistakes(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run(**settings)


@pytest.mark.parametrize("strategy", [DiLoCoStrategy("sgd", H=2, lr=0.1), FedAvgStrategy("sgd", H=1, lr=0.1)])
def test_one_node(strategy: Any) -> None:
    """It sends nothing, so that no bytes end it, and its seconds are those that it computes."""
    network: dict[str, Any] = {"network": Network(1e6), "compute": Compute(0.5)}
    assert len(run(strategy, num_nodes=1, max_bytes=1.0).history) == STEPS + 1
    assert len(run(strategy, num_nodes=1, max_seconds=2.0, **network).history) == 5
