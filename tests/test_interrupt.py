"""Ctrl-C ends `fit` after the step in progress, and what was computed until then is there to use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.fitting import STRATEGIES, dataset, fit, params, same
from tests.models import make_model
from vecgym import CSVLogger, Logger, Trainer, sweep
from vecgym.strategy import DiLoCoStrategy, RankStrategy

STEPS = 6


class Interrupting(Logger):
    """Presses Ctrl-C when it gets the row of a step: that is, while the next step is in progress."""

    def __init__(self, at_step: int = 2, times: int = 1) -> None:
        self.at_step = at_step
        self.times = times
        self.steps: list[int] = []
        self.finished = 0

    def log(self, row: dict[str, Any]) -> None:
        self.steps.append(row["step"])
        if row["step"] == self.at_step:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)

    def finish(self) -> None:
        self.finished += 1


def interrupted(strategy: str = "FedAvg", logger: Logger | None = None, **settings: Any) -> Trainer:
    trainer = Trainer(make_model("Dropout"), dataset("Dropout"), dataset("Dropout", 6, seed=1))
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(
            STRATEGIES[strategy](), 3, max_steps=STEPS, batch_size=4, progress=False, device="cpu",
            logger=logger or Interrupting(), **settings,
        )  # fmt: skip
    return trainer


def stopped_after(steps: int, strategy: str) -> Trainer:
    """The same schedule of `STEPS` steps, stopped from outside: by an error in the data after so many steps."""

    each = 8 if "participation" in strategy else 12  # examples of those who train in a step

    class Stop(Exception):
        pass

    class Ending(torch.utils.data.Dataset[Any]):
        def __init__(self) -> None:
            self.data = dataset("Dropout")
            self.reads = 0

        def __len__(self) -> int:
            return 24

        def __getitem__(self, index: int) -> Any:
            self.reads += 1
            if self.reads > 12 + each * steps:  # one batch to look at the model, and those of who trains in a step
                raise Stop
            return self.data[index]

    trainer = Trainer(make_model("Dropout"), Ending())
    with pytest.raises(Stop):
        trainer.fit(STRATEGIES[strategy](), 3, max_steps=STEPS, batch_size=4, progress=False, device="cpu")
    return trainer


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_state_is_that_of_whole_steps(strategy: str) -> None:
    """Equal to an uninterrupted run: to one stopped after as many steps, and to the first part of a whole one."""
    trainer = interrupted(strategy)
    assert trainer.state is not None
    assert trainer.state.step == 3  # the step that was in progress when row 2 was handed on
    whole, _ = fit("Dropout", strategy, max_steps=STEPS)
    np.testing.assert_array_equal(trainer.history.node_array(), whole.history.node_array()[:3])
    expected = stopped_after(3, strategy)
    assert same(trainer.nodes.params, expected.nodes.params)
    assert not torch.equal(params(trainer), params(whole))


def test_history_nodes_ledger_and_loggers_are_whole(tmp_path: Path) -> None:
    logger = Interrupting()
    trainer = interrupted("DiLoCo", logger=[logger, CSVLogger(tmp_path)])  # type: ignore[arg-type]
    assert trainer.history["step"] == [0, 1, 2, 3]  # row 0 is the evaluation at the start
    assert trainer.history.last("bytes_total") == trainer.ledger.total_bytes > 0
    assert logger.steps == [0, 1, 2, 3]
    assert logger.finished == 1
    assert len((tmp_path / "history.csv").read_text().splitlines()) == 5  # header and rows
    assert len(trainer.nodes) == 3
    with torch.no_grad():
        assert trainer.nodes.average()((torch.zeros(2, 16), torch.zeros(2, dtype=torch.long))).isfinite()


def test_the_message_says_where() -> None:
    trainer = Trainer(make_model("MLP"), dataset("MLP"))
    with pytest.raises(KeyboardInterrupt, match=f"after step 3 of {STEPS}"):
        trainer.fit(
            STRATEGIES["FedAvg"](), 3, max_steps=STEPS, batch_size=4, progress=False, device="cpu",
            logger=Interrupting(),
        )  # fmt: skip


@pytest.mark.parametrize("at_step", [0, STEPS - 1, STEPS])
def test_an_interrupt_at_either_end_is_not_lost(at_step: int) -> None:
    """Before the first step, in the last one, and while the last row is handed on."""
    trainer = interrupted(logger=Interrupting(at_step))
    assert trainer.state is not None
    assert trainer.state.step == min(at_step + 1, STEPS)
    assert trainer.history.last("step") == trainer.state.step


def test_a_second_interrupt_does_not_wait() -> None:
    logger = Interrupting(times=2)
    trainer = interrupted(logger=logger)
    assert trainer.nodes.params["first.weight"].shape == (3, 32, 16)
    assert logger.finished == 1


def test_the_signal_handler_is_put_back() -> None:
    def mine(signum: int, frame: Any) -> None:
        raise AssertionError("not during fit")

    before = signal.signal(signal.SIGINT, mine)
    try:
        interrupted()
        assert signal.getsignal(signal.SIGINT) is mine
        fit("MLP", max_steps=2)
        assert signal.getsignal(signal.SIGINT) is mine
        with pytest.raises(ValueError, match="num_nodes"):
            fit("MLP", num_nodes=0)
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)


def test_fit_again_after_an_interrupt() -> None:
    trainer = interrupted()
    trainer.fit(STRATEGIES["FedAvg"](), 3, max_steps=2, batch_size=4, progress=False, device="cpu")
    expected, _ = fit("Dropout", max_steps=2)
    assert same(trainer.nodes.params, expected.nodes.params)


@pytest.mark.parametrize("node_threads", [1, 2])
def test_fit_in_another_thread(node_threads: int) -> None:
    """No signal handler can be set there."""
    found: list[Trainer] = []
    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(
        target=lambda: found.append(fit("CNN", max_steps=3, node_threads=node_threads, engine="loop")[0])
    )
    thread.start()
    thread.join()
    expected, _ = fit("CNN", max_steps=3, engine="loop")
    assert same(found[0].nodes.params, expected.nodes.params)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("model", ["MLP", "Dropout"])
def test_two_fits_at_the_same_time(model: str) -> None:
    names = ("AllReduce", "FedAvg")
    # Made here: the tests' models draw their initial parameters from torch's global generator.
    trainers = {name: Trainer(make_model(model), dataset(model)) for name in names}

    def train(name: str) -> None:
        trainers[name].fit(STRATEGIES[name](), 3, max_steps=5, batch_size=4, progress=False, device="cpu")

    threads = [threading.Thread(target=train, args=[name]) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, trainer in trainers.items():
        assert same(trainer.nodes.params, fit(model, name, max_steps=5)[0].nodes.params)


def new_threads(before: list[threading.Thread]) -> list[str]:
    """The threads of vecgym that are still there; another test may have left some."""
    return [t.name for t in threading.enumerate() if t not in before and t.name.startswith("vecgym")]


def test_threads_end_with_the_run() -> None:
    before = threading.enumerate()
    kept = [fit("CNN", max_steps=2, node_threads=2)[0]]
    assert new_threads(before) == []
    kept.append(interrupted(engine="loop"))
    assert new_threads(before) == []
    kept.append(fit("MLP", Ranks("sgd", lr=0.1), max_steps=2)[0])
    assert new_threads(before) == []
    table = sweep(make_model("MLP"), dataset("MLP"), strategy=lambda lr: Ranks("sgd", lr=lr), grid={"lr": [0.1, 0.2]},
                  num_nodes=2, max_steps=2, batch_size=4, device="cpu", progress=False)  # fmt: skip
    assert new_threads(before) == []
    assert len(kept) == 3
    assert len(table) == 2


def test_a_run_that_is_refused_has_no_threads(tmp_path: Path) -> None:
    """After its engine has looked at the model: by a checkpoint of another run."""
    fit("MLP", Ranks("sgd", lr=0.1), max_steps=2, save_dir=tmp_path)
    before = threading.enumerate()
    for settings in ({"strategy": Ranks("sgd", lr=0.2)}, {"strategy": "FedAvg", "engine": "loop", "node_threads": 2}):
        with pytest.raises(ValueError, match=r"start anew with resume=False") as refused:
            fit("MLP", max_steps=2, save_dir=tmp_path, resume=True, **settings)
        assert new_threads(before) == [], refused  # which holds the run


class Ranks(RankStrategy):
    """Written for one rank: each node trains by itself, on a thread of its own."""

    def step(self) -> None:
        self.optim.step()
        super().step()


class Wait(nn.Module):
    """A step that takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        import time

        time.sleep(0.01)
        return (self.w - x).square().mean()


SCRIPT = """
import signal, sys, torch
from tests.test_interrupt import Wait
from vecgym import Logger, Trainer
from vecgym.strategy import FedAvgStrategy

class Ready(Logger):
    def log(self, row):
        if row["step"] == 2:
            print("ready", flush=True)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts something in the background ignores it
trainer = Trainer(Wait(), torch.arange(64.0))
try:
    trainer.fit(FedAvgStrategy("sgd", lr=0.1), 2, max_steps=10**6, batch_size=4, engine="loop", device="cpu",
                logger=Ready(), progress=False, dataloader_kwargs={"num_workers": int(sys.argv[1])})
except KeyboardInterrupt as stop:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    steps = trainer.state.step
    assert trainer.history["step"] == list(range(1, steps + 1))
    assert trainer.nodes.params["w"].shape == (2,) and bool(trainer.nodes.params["w"].isfinite().all())
    print(stop, "|", steps, flush=True)
else:
    print("ran to the end", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_ctrl_c_in_a_terminal(num_workers: int) -> None:
    """A terminal sends the signal to every process of the group, the data workers included."""
    root = Path(__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(num_workers)], cwd=root, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate()
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode == 0, err
    steps = int(out.split("|")[1])
    assert out.startswith(f"interrupted after step {steps} of 1000000")
    assert 3 <= steps < 10**6
    assert "Traceback" not in err


def test_an_interrupt_with_diloco_keeps_the_outer_state() -> None:
    trainer = Trainer(make_model("MLP"), dataset("MLP"))
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(
            DiLoCoStrategy("sgd", H=2, lr=0.1), 3, max_steps=STEPS, batch_size=4, progress=False, device="cpu",
            logger=Interrupting(),
        )  # fmt: skip
    state = trainer.state
    assert state is not None
    two, _ = fit("MLP", DiLoCoStrategy("sgd", H=2, lr=0.1), max_steps=2)
    outer = state.shared["0.0/params"]
    for name, p in two.nodes.params.items():  # the outer parameters after the round, which step 3 does not touch
        torch.testing.assert_close(outer[name][0], p[0])
