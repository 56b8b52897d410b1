"""A run that was saved goes on as if it had never stopped, from whatever is whole of what was saved."""

from __future__ import annotations

import errno
import io
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import vecgym
from tests.fitting import dataset, fit, same, same_run
from tests.fuzz.common import time_limit
from tests.helpers import assert_same_bits
from tests.models import make_model
from tests.test_properties import NAMES, STEPS, make
from vecgym import CSVLogger, DivergenceError, Logger, TensorBoardLogger, Trainer, VecgymWarning
from vecgym.core import files, tree
from vecgym.core.errors import ProcessError
from vecgym.core.files import PARTIAL, write_atomically
from vecgym.records import runfile
from vecgym.records.columns import MEASURED
from vecgym.records.runfile import checkpoints_in
from vecgym.runs import multiprocess
from vecgym.runs.checkpoint import FORM, Checkpointer, settings_of
from vecgym.runs.recorder import Recorder
from vecgym.simulation import Simulation
from vecgym.simulation.simulation import Part
from vecgym.strategy import (
    CommunicateOptimizeStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    GossipStrategy,
    RankStrategy,
    all_reduce,
)
from vecgym.strategy.averages import Mean
from vecgym.strategy.exchange import Exchange
from vecgym.strategy.stages import Average, Memory

ROOT = Path(__file__).parent.parent
K = 4
TIMES = MEASURED  # differ from run to run


BACKENDS: dict[str, dict[str, Any]] = {
    "stacked": {},
    "2 processes": {"backend": "processes", "num_processes": 2},
    "4 processes": {"backend": "processes", "num_processes": 4},
}


def train(folder: Path | None = None, model: str = "MLP", strategy: Any = "diloco", **settings: Any) -> Trainer:
    """A run of STEPS steps, of a strategy of the table of properties; with a folder, saved after each of them."""
    if folder is not None:
        settings = {"save_dir": folder, "checkpoint_interval": 1, "keep_checkpoints": 99, **settings}
    chosen = make(strategy) if isinstance(strategy, str) else strategy
    given: dict[str, Any] = {"num_nodes": K, "max_steps": STEPS, "val_interval": 2, **settings}
    val = dataset(model, 6, seed=1, dtype=given.get("dtype", torch.float32))
    return fit(model, chosen, val=val, **given)[0]


def at(folder: Path, step: int) -> Path:
    return folder / f"step-{step:09d}.pt"


def timeless(trainer: Trainer) -> list[dict[str, Any]]:
    """The rows of the history, without what a clock says; arrays as lists."""
    rows = [{name: row[name] for name in sorted(row) if name not in TIMES} for row in trainer.history]
    return [{name: x.tolist() if isinstance(x, np.ndarray) else x for name, x in row.items()} for row in rows]


def assert_same(resumed: Trainer, whole: Trainer) -> None:
    """State, nodes, history and ledger, to the last bit."""
    assert resumed.state is not None
    assert whole.state is not None
    assert resumed.state.step == whole.state.step
    assert_same_bits(resumed.state, whole.state)
    assert same_run(resumed, whole)
    assert repr(timeless(resumed)) == repr(timeless(whole))  # as text, nan equals nan
    assert list(resumed.ledger) == list(whole.ledger)
    assert resumed.ledger.total_bytes == whole.ledger.total_bytes


# ------------------------------------------------------------------------------- resumed equals uninterrupted


@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_goes_on_as_if_it_had_never_stopped(name: str, tmp_path: Path) -> None:
    """From between two exchanges (every 3 steps), with something under way in a queue of 2 steps."""
    whole = train(tmp_path, strategy=name, checkpoint_interval=4)
    assert_same(train(strategy=name, resume=at(tmp_path, 4)), whole)


ENGINES: dict[str, dict[str, Any]] = {
    "vmap": {"engine": "vmap"},
    "loop": {"engine": "loop"},
    "chunked": {"engine": "vmap", "chunk_size": 3},
    "threads": {"engine": "vmap", "node_threads": 2},
    "minibatches": {"minibatch_size": 2, "dataloader_kwargs": {"drop_last": True}},
    "workers": {"dataloader_kwargs": {"num_workers": 1}},
    "autocast": {"autocast": True},
    "exact": {"exact": True},
}
HARD = ("demo", "averaging-rare-and-late", "fedavg-participation")  # explicit residual, queue, absent nodes


@pytest.mark.parametrize(
    ("model", "engine"),
    [*(("CNN", engine) for engine in ENGINES), *(("Dropout", engine) for engine in ("loop", "chunked", "minibatches"))],
)
def test_every_engine(model: str, engine: str, tmp_path: Path) -> None:
    """Batch norm and dropout, right after an exchange."""
    given: dict[str, Any] = {"model": model, "strategy": "fedavg-participation", **ENGINES[engine]}
    whole = train(tmp_path, checkpoint_interval=3, **given)
    assert_same(train(resume=at(tmp_path, 3), **given), whole)


class Own(torch.optim.Adagrad):
    """Any class but torch's own is run node by node."""


@pytest.mark.parametrize("model", ["LSTM", "GPT", "WithFrozen", "DataDependent"])
def test_every_kind_of_model(model: str, tmp_path: Path) -> None:
    """Tied weights, frozen parameters, integer buffers; a vectorised optimizer, and one that runs node by node."""

    for optim in (torch.optim.AdamW, Own):
        given: dict[str, Any] = {
            "model": model, "engine": "loop",
            "strategy": FedAvgStrategy(optim, H=3, participation=0.5, lr=0.01),
        }  # fmt: skip
        folder = tmp_path / optim.__name__
        whole = train(folder, checkpoint_interval=5, **given)
        assert_same(train(resume=at(folder, 5), **given), whole)


@pytest.mark.parametrize("name", HARD)
def test_any_step(name: str, tmp_path: Path) -> None:
    """From the start to the end, in the same folder; a run that saves is the one that does not."""
    given: dict[str, Any] = {"strategy": name, "model": "Dropout"}
    whole = train(**given)
    assert_same(train(tmp_path, **given), whole)
    for step in reversed(range(STEPS + 1)):
        for path in checkpoints_in(tmp_path)[step + 1 :]:
            path.unlink()
        assert_same(train(tmp_path, resume=True, **given), whole)
        assert [path.name for path in checkpoints_in(tmp_path)] == [at(tmp_path, t).name for t in range(STEPS + 1)]


def test_resuming_begins_anew_where_nothing_was_saved(tmp_path: Path) -> None:
    whole = train()
    assert_same(train(tmp_path / "new" / "folder", resume=True), whole)
    (tmp_path / "notes.txt").write_text("no checkpoint")
    assert_same(train(tmp_path, resume=True), whole)


def test_a_finished_run_is_not_repeated_and_may_be_prolonged(tmp_path: Path) -> None:
    whole = train(tmp_path, max_steps=4)
    assert_same(train(tmp_path, max_steps=4, resume=True), whole)
    longer = train(tmp_path, resume=True)
    assert same_run(longer, train())
    assert longer.history["step"] == list(range(STEPS + 1))


class Noisy(torch.utils.data.Dataset[Any]):
    """Draws from the global generators with every example."""

    def __init__(self, rank: int, num_nodes: int, train_dataset: bool) -> None:
        self.data = dataset("MLP", 10 + rank, seed=rank)

    def __len__(self) -> int:
        return len(self.data)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return x + torch.rand(16) + random.random() + np.random.rand(), y  # noqa: NPY002


@pytest.mark.parametrize("num_workers", [0, 2])
def test_data_of_each_node_with_random_transforms(num_workers: int, tmp_path: Path) -> None:
    given: dict[str, Any] = {"data": Noisy, "dataloader_kwargs": {"num_workers": num_workers}}
    whole = train(tmp_path, checkpoint_interval=5, **given)
    assert_same(train(resume=at(tmp_path, 5), **given), whole)


class Plain(Average):
    """It remembers whatever a file can hold, except numbers."""

    common = False

    def init(self, values: Any, run: Any, memory: Memory) -> None:
        kept: dict[Any, Any] = {
            "count": torch.zeros(1),
            "none": None,
            "empty": {},
            "list": [torch.zeros(1, 2)],
            "pair": (True, "text"),
            3: [],
        }
        memory.shared["kept"] = kept

    def agree(self, x: Any, part: Part, memory: Memory) -> Any:
        kept, y = memory.shared["kept"], part.comm.mean(x) if part.due.step % 2 else x
        grown = [*kept["list"], torch.full((1, 2), float(kept["count"]))]
        memory.shared["kept"] = {**kept, "count": kept["count"] + 1, "list": grown}
        return {n: p * (1 + 1e-3 * float(kept["count"])) for n, p in y.items()}


def test_what_an_average_remembers_may_be_anything_but_numbers(tmp_path: Path) -> None:
    strategy = CommunicateOptimizeStrategy([Exchange(Plain())], "sgd", lr=0.1)
    whole = train(tmp_path, strategy=strategy, exact=True)
    assert whole.state is not None
    for settings in ({}, BACKENDS["2 processes"]):
        resumed = train(tmp_path / "2", strategy=strategy, resume=at(tmp_path, 4), exact=True, **settings)
        assert same_run(resumed, whole)
        held = runfile.read(at(tmp_path / "2", STEPS))["state"]["shared"]["0.0/kept"]
        for found in (held, resumed.state.shared["0.0/kept"] if resumed.state else held):
            assert repr(found) == repr(whole.state.shared["0.0/kept"])
        shutil.rmtree(tmp_path / "2")


def test_what_no_file_can_keep_is_named_at_the_start(tmp_path: Path) -> None:
    class Odd(Mean):
        def init(self, values: Any, run: Any, memory: Memory) -> None:
            memory.shared["random"] = random.Random(1)

    with pytest.raises(TypeError, match=r"state\['shared'\]\['0\.0/random'\] is of type Random"):
        train(tmp_path, strategy=CommunicateOptimizeStrategy([Exchange(Odd())], "sgd", lr=0.1))


def test_parameters_that_are_not_trained_and_the_start_come_from_the_checkpoint(tmp_path: Path) -> None:
    """The model given again may have been initialised otherwise."""
    whole = train(tmp_path, "WithFrozen")
    for step in (0, 3):
        other = make_model("WithFrozen", seed=7)
        resumed = fit(
            other, make("diloco"), data=dataset("WithFrozen"), val=dataset("WithFrozen", 6, seed=1), num_nodes=K,
            max_steps=STEPS, val_interval=2, resume=at(tmp_path, step),
        )[0]  # fmt: skip
        assert_same(resumed, whole)


class Drawing(Logger):
    """Draws from the global generators when a run begins and with every row."""

    def __init__(self) -> None:
        self.drawn: dict[int, tuple[float, float, float]] = {}

    def start(self, settings: dict[str, Any]) -> None:
        random.random()
        torch.rand(1)

    def log(self, row: dict[str, Any]) -> None:
        legacy = np.random.rand()  # noqa: NPY002
        self.drawn[row["step"]] = (random.random(), float(legacy), float(torch.rand(1)))


def test_the_global_random_generators_go_on(tmp_path: Path) -> None:
    first, second = Drawing(), Drawing()
    train(tmp_path, logger=first)
    random.seed(5)
    torch.manual_seed(5)
    train(logger=second, resume=at(tmp_path, 3))
    assert second.drawn == {step: drawn for step, drawn in first.drawn.items() if step > 3}


def test_what_is_counted_and_logged_goes_on(tmp_path: Path) -> None:
    """Seconds and examples from where they were; no row of the CSV files lost or there twice."""
    log = tmp_path / "log"
    whole = train(tmp_path, logger=CSVLogger(log), log_interval=2)
    expected = {path.name: path.read_text().splitlines() for path in log.glob("*.csv")}
    (log / "history.csv").write_text("cut off in the mid")
    resumed = train(resume=at(tmp_path, 5), logger=CSVLogger(log), log_interval=2)
    found = {path.name: path.read_text().splitlines() for path in log.glob("*.csv")}
    assert found.keys() == expected.keys() == {"history.csv", "train_losses.csv", "val_losses.csv"}
    for name, lines in expected.items():
        assert [line.split(",")[:3] for line in found[name]] == [line.split(",")[:3] for line in lines]
    assert resumed.history["seconds"][:6] == whole.history["seconds"][:6]
    assert resumed.history["seconds"] == sorted(resumed.history["seconds"])
    assert resumed.history["seconds"][6] > whole.history["seconds"][5]


def test_curves_of_tensorboard_go_on(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install vecgym[tensorboard]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tmp_path / "checkpoints", logger=TensorBoardLogger(tmp_path / "log"))
    time.sleep(1.1)  # the files are read in the order of the second in their names
    train(resume=at(tmp_path / "checkpoints", 3), logger=TensorBoardLogger(tmp_path / "log"))
    found = EventAccumulator(str(tmp_path / "log")).Reload()
    assert [event.step for event in found.Scalars("train_loss")] == list(range(1, STEPS + 1))


# ------------------------------------------------------------------------------------- written for one rank


class OnOneRank(RankStrategy):
    """DiLoCo with whatever such a strategy may keep: outer parameters, a second optimizer, shared and new tensors."""

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        super()._init_node(model, rank, num_nodes)
        self.master = [p.detach().clone().requires_grad_() for p in model.parameters()]
        self.outer = torch.optim.SGD(self.master, lr=0.7, momentum=0.9, nesterov=True)
        self.generator = torch.Generator().manual_seed(rank)
        self.last: Any = None
        self.log: list[Any] = []
        self.decay = torch.optim.lr_scheduler.ExponentialLR(self.outer, 0.9)

    def step(self) -> None:
        self.optim.step()
        super().step()
        self.last = self.master[0]  # shared with the optimizer
        self.log.append({"step": self.local_step, "noise": torch.rand(2, generator=self.generator)})
        if self.local_step % 3 == 0:
            for master, p in zip(self.master, self.model.parameters()):
                kept = 0.0 if master.grad is None else 0.1 * master.grad
                master.grad = all_reduce(master.detach() - p.detach(), op="mean") + kept
            self.outer.step()
            self.decay.step()
            for master, p in zip(self.master, self.model.parameters()):
                p.data.copy_(master.detach() + 1e-3 * float(self.log[-1]["noise"][0]))
            self.last.data.mul_(0.99)


@pytest.mark.parametrize("step", [0, 4])
def test_a_strategy_written_for_one_rank(step: int, tmp_path: Path) -> None:
    given: dict[str, Any] = {"lr": 0.01, "lr_scheduler": "cosine", "warmup_steps": 2}
    whole = train(tmp_path, strategy=OnOneRank("adamw", **given), checkpoint_interval=1)
    resumed = train(strategy=OnOneRank("adamw", **given), resume=at(tmp_path, step))
    assert_same(resumed, whole)


class WithALock(OnOneRank):
    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        super()._init_node(model, rank, num_nodes)
        self.batches = iter([1, 2])


def test_what_cannot_be_saved_is_named_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match=r"WithALock of node 0: self\.batches is a list_iterator, which cannot be saved"
    ):
        train(tmp_path, strategy=WithALock("sgd", lr=0.1))


# --------------------------------------------------------------------------------- what else may be in a folder


def flipped(path: Path, where: float = 0.5) -> None:
    """One bit of a tensor's is wrong."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * where)] ^= 1
    path.write_bytes(data)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def foreign(path: Path) -> None:
    torch.save({"weights": torch.ones(2)}, path)


def executable(path: Path) -> None:
    torch.save({"format": "vecgym", "version": runfile.VERSION, "model": make_model("MLP")}, path)


def later(path: Path) -> None:
    torch.save({**torch.load(path, weights_only=True), "version": runfile.VERSION + 1}, path)


@pytest.mark.parametrize("damage", [flipped, truncated, emptied, foreign, executable, later])
def test_a_bad_file_is_named_and_the_newest_good_one_taken(damage: Callable[[Path], None], tmp_path: Path) -> None:
    whole = train(tmp_path)
    for step in (STEPS, STEPS - 1):
        damage(at(tmp_path, step))
    with pytest.raises(ValueError, match=at(tmp_path, STEPS).name):
        train(resume=at(tmp_path, STEPS))
    with pytest.raises(ValueError, match=at(tmp_path, STEPS).name):
        vecgym.load(at(tmp_path, STEPS))
    with pytest.warns(VecgymWarning) as caught:
        resumed = train(tmp_path, resume=True)
    assert [f"{at(tmp_path, step)}" in str(w.message) for step, w in zip((STEPS, STEPS - 1), caught)] == [True, True]
    assert len(caught) == 2
    assert_same(resumed, whole)
    assert vecgym.load(at(tmp_path, STEPS)).step == STEPS  # written anew


def changed(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Files made by hand, or by another program."""
    held = runfile.read(path)
    torch.save(change(held) or held, path)


def without(name: str, held: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in held.items() if key != name}


def replaced(name: str, held: dict[str, Any]) -> dict[str, Any]:
    return {**held, name: torch.ones(3)}


HANDMADE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda held: [1, 2],
    "nothing but its name": lambda held: {"format": "vecgym", "version": runfile.VERSION},
    "no version": lambda held: held.pop("version") and held,
    "a version in words": lambda held: {**held, "version": "1"},
    "version 0": lambda held: {**held, "version": 0},
    "an earlier version": lambda held: {**held, "version": runfile.VERSION - 1},
    "a later version": lambda held: {**held, "version": runfile.VERSION + 1},
    "of others": lambda held: {**held, "format": "pickle"},
    **{f"no {name}": partial(without, name) for name in FORM if name != "ranks"},
    **{f"{name} of another type": partial(replaced, name) for name in FORM if name != "ranks"},
    "a negative step": lambda held: {**held, "step": -1},
    "a step that is True": lambda held: {**held, "step": True},
    "a parameter too few": lambda held: held["models"]["params"].popitem() and held,
    "a parameter of another name": lambda held: held["models"]["params"].update(x=torch.ones(1, 2)),
    "parameters of another shape": lambda held: held["models"].update(
        params={name: torch.ones(1) for name in held["models"]["params"]}
    ),
    "parameters of another dtype": lambda held: held["models"].update(
        params={name: x.double() for name, x in held["models"]["params"].items()}
    ),
    "parameters that are numbers": lambda held: held["models"].update(
        params=dict.fromkeys(held["models"]["params"], 1.0)
    ),
    "nodes of another number": lambda held: held["models"].update(
        params={name: x.expand(K, *x.shape[1:])[:3].clone() for name, x in held["models"]["params"].items()}
    ),
    "no state of the optimizer": lambda held: held["state"]["own"].update(optimizer={}),
    "an optimizer's state of another shape": lambda held: held["state"]["own"].update(
        optimizer=tree.map_leaves(lambda x: torch.ones(1, 7, 7), held["state"]["own"]["optimizer"])
    ),
    "an optimizer's state of another dtype": lambda held: held["state"]["own"].update(
        optimizer=tree.map_leaves(Tensor.double, held["state"]["own"]["optimizer"])
    ),
    "no random states": lambda held: {**held, "random": []},
    "random states of another kind": lambda held: {**held, "random": [{"torch": "x", "numpy": 3, "python": None}]},
    "rows without columns": lambda held: held["rows"].update(columns={"step": 3}),
    "rows of another length": lambda held: held["rows"].update(length=1),
    "a ledger of another kind": lambda held: held["ledger"].update(kinds=[3]),
    "learning rates of words": lambda held: {**held, "learning_rates": {"a": "b"}},
}
OF_RESUMING_ALONE = ("identity", "arithmetic", "learning", "loss", "state", "ledger", "recorder", "random", "parameter")


def short(folder: Path | None = None, **settings: Any) -> Trainer:
    strategy = FedAvgStrategy("adamw", H=2, lr=1e-2)
    return train(folder, strategy=strategy, **{"max_steps": 2, "val_interval": None, **settings})


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trainer]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, short(folder)


@pytest.mark.parametrize("name", HANDMADE)
def test_a_file_made_by_hand_is_named_and_the_next_older_one_taken(
    name: str, saved_run: tuple[Path, Trainer], tmp_path: Path
) -> None:
    folder = shutil.copytree(saved_run[0], tmp_path / "copy")
    changed(at(folder, 2), HANDMADE[name])
    with pytest.raises(ValueError, match=at(folder, 2).name):
        short(resume=at(folder, 2))
    if not any(part in name for part in OF_RESUMING_ALONE):
        with pytest.raises(ValueError, match=at(folder, 2).name):
            vecgym.load(at(folder, 2))
    with pytest.warns(VecgymWarning, match=rf"{at(folder, 2).name}.*Trying the next older checkpoint"):
        resumed = short(folder, resume=True)
    assert_same(resumed, saved_run[1])
    vecgym.load(at(folder, 2))  # written anew


@pytest.mark.parametrize("version", [1, 2, runfile.VERSION + 1])
def test_a_file_of_another_version_is_refused_in_words(
    version: int, saved_run: tuple[Path, Trainer], tmp_path: Path
) -> None:
    torch.save({**runfile.read(at(saved_run[0], 2)), "version": version}, tmp_path / "old.pt")
    with pytest.raises(ValueError, match=rf"old\.pt has version {version}, but this vecgym reads version \d: use"):
        vecgym.load(tmp_path / "old.pt")


def test_what_is_no_file_is_passed_over_and_never_opened(tmp_path: Path) -> None:
    """To open a pipe waits for its other end, for ever."""
    whole = train(tmp_path)
    os.mkfifo(at(tmp_path, 97))
    at(tmp_path, 98).mkdir()
    at(tmp_path, 96).symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(tmp_path)  # the path of a socket must be short
        server.bind(at(Path(), 99).name)
        os.chdir(here)
    with time_limit(30.0):
        assert_same(train(tmp_path, resume=True), whole)
        for step in (96, 97, 98, 99):
            with pytest.raises(ValueError, match=r"not a file, but a (folder without|pipe)|no checkpoint"):
                train(resume=at(tmp_path, step))
            with pytest.raises(
                ValueError, match=r"not a file, but a (folder without checkpoints; fit|pipe, socket or device)"
            ):
                vecgym.load(at(tmp_path, step))


def test_what_a_killed_run_has_left_is_removed_at_the_next_start_but_not_what_is_being_written(tmp_path: Path) -> None:
    short(tmp_path)
    left = [tmp_path / f".step.probe.77-ab{PARTIAL}", tmp_path / f".step-000000007.pt.77-ab{PARTIAL}"]
    for path in left:
        path.write_bytes(b"x")
    os.mkfifo(tmp_path / f".step-pipe{PARTIAL}")
    with write_atomically(at(tmp_path, 0)) as file:  # another run's, which is alive
        file.write(b"whole")
        short(tmp_path, resume=True)
        assert not [path for path in left if path.exists()]
    assert at(tmp_path, 0).read_bytes() == b"whole"


def test_ctrl_c_within_a_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = short(tmp_path)
    whole.save(tmp_path / "run.pt")
    write, names = torch.save, sorted(path.name for path in tmp_path.iterdir())

    def interrupted(held: Any, file: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        short(tmp_path, resume=True, max_steps=3)
    with pytest.raises(KeyboardInterrupt):
        whole.save(tmp_path / "run.pt")
    monkeypatch.setattr(torch, "save", write)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert vecgym.load(tmp_path / "run.pt").step == 2
    assert_same_bits(short(tmp_path, resume=True, max_steps=3).state, short(max_steps=3).state)


def save_on_a_full_disk(link: multiprocess.Link, folder: Path) -> str:
    trainer = short()
    trainer.save(folder / "run.pt")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
    try:
        trainer.save(folder / "run.pt")
    except OSError as error:
        return str(error)
    return ""


def test_a_full_disk_leaves_the_file_that_was_saved_before(tmp_path: Path) -> None:
    assert "[Errno 27]" in multiprocess.run(save_on_a_full_disk, 1, (tmp_path,))[0]
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]
    assert vecgym.load(tmp_path / "run.pt").step == 2


def test_paths_that_nothing_can_be_saved_to(tmp_path: Path) -> None:
    trainer = short()
    (tmp_path / "file").write_text("x")
    for path, error in ((tmp_path, "is a folder"), (tmp_path / "file" / "run.pt", "file")):
        with pytest.raises(OSError, match=error):
            trainer.save(path)
    for wrong in (None, 3, b"run.pt"):
        given: Any = wrong
        for call in (trainer.save, vecgym.load):
            with pytest.raises(TypeError, match=r"(?i)path"):
                call(given)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_nothing_but_bad_files_is_an_error(tmp_path: Path) -> None:
    emptied(at(tmp_path, 3))
    with pytest.raises(ValueError, match=r"step-000000003.pt is .* Give resume=False and another save_dir"):
        train(tmp_path, resume=True)
    emptied(at(tmp_path, 2))
    with (
        pytest.warns(VecgymWarning, match=r"step-000000003.pt is .*older"),
        pytest.raises(ValueError, match=r"step-000000002.pt is .*, and so are the newer checkpoints\. Give"),
    ):
        train(tmp_path, resume=True)


def stall(link: multiprocess.Link, folder: Path, stop_at: int) -> None:
    """A run in a process of its own that stops in the middle of writing a checkpoint."""
    write: Any = torch.save

    def save(held: dict[str, Any], file: Any) -> None:
        if held["step"] < stop_at:
            return write(held, file)
        whole = io.BytesIO()
        write(held, whole)
        file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
        file.flush()
        link.send(os.getpid())
        time.sleep(1000)

    torch.save = save  # type: ignore[assignment]
    train(folder, resume=True)


def test_a_run_that_is_killed_while_it_writes_goes_on_from_the_last_whole_file(tmp_path: Path) -> None:
    """Twice, by SIGKILL."""
    for stop_at in (3, 5):
        with pytest.raises(ProcessError, match="was killed by signal SIGKILL"):
            multiprocess.run(stall, 1, (tmp_path, stop_at), on_message=lambda pid: os.kill(pid, signal.SIGKILL))
        assert [path.name for path in checkpoints_in(tmp_path)] == [at(tmp_path, t).name for t in range(stop_at)]
        assert len(list(tmp_path.iterdir())) == stop_at + 2  # and the half of one, under another name; and the lock
    assert_same(train(tmp_path, resume=True), train())
    assert len(list(tmp_path.iterdir())) == STEPS + 1


# ---------------------------------------------------------------------------------- two runs in one folder

RUNS = """
import os, sys, time, torch
from vecgym import Trainer
from vecgym.models import Line
from vecgym.strategy import FedAvgStrategy

class Slow(Trainer):
    def after_step(self, row):
        if FORKS and row["step"] == 1:
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            print(child, flush=True)
        if row["step"] == 2:
            print("under way", flush=True)
        time.sleep(0.02)

print("ready", flush=True)
for line in sys.stdin:
    try:
        Slow(Line(), torch.arange(16.0)).fit(
            FedAvgStrategy("sgd", lr=0.1), 2, max_steps=10, batch_size=2, device="cpu", progress=False,
            save_dir=line.strip(), checkpoint_interval=1, keep_checkpoints=99, resume=RESUME,
        )
        print("done", flush=True)
    except Exception as error:
        print(type(error).__name__, str(error).replace(chr(10), " "), flush=True)
"""


def started(resume: bool = False, forks: bool = False) -> subprocess.Popen[str]:
    """A process that has imported all, and begins a run in each folder that it is told."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"RESUME, FORKS = {resume}, {forks}\n{RUNS}"], cwd=ROOT,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert heard(process) == "ready"
    return process


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def told(process: subprocess.Popen[str], folder: Path) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{folder}\n")
    process.stdin.flush()


def end_of(process: subprocess.Popen[str]) -> str:
    return next(line for line in iter(partial(heard, process), "") if line != "under way")


@pytest.mark.parametrize("resume", [False, True])
def test_of_two_runs_begun_together_one_trains_and_the_other_says_which(resume: bool, tmp_path: Path) -> None:
    with started(resume) as one, started(resume) as other:
        for trial in range(12):
            folder = tmp_path / str(trial)
            both = (one, other) if trial % 2 else (other, one)
            for process in both:
                told(process, folder)
                time.sleep(0.003 * (trial // 2))
            ends = {process.pid: end_of(process) for process in both}
            winners = [pid for pid, end in ends.items() if end == "done"]
            assert len(winners) == 1, ends
            (loser,) = (end for end in ends.values() if end != "done")
            assert loser.startswith(
                f"ValueError save_dir={str(folder)!r} is in use by another run: process {winners[0]}"
            )
            assert sorted(path.name for path in folder.iterdir()) == [at(folder, step).name for step in range(11)]
        for process in (one, other):
            process.communicate()


@pytest.mark.parametrize("forks", [False, True])
def test_the_lock_of_a_killed_run_never_blocks(forks: bool, tmp_path: Path) -> None:
    """Not even where it has forked a process that goes on."""
    with started(forks=forks) as process:
        told(process, tmp_path)
        child = int(heard(process)) if forks else None
        try:
            assert heard(process) == "under way"
            with pytest.raises(ValueError, match=f"is in use by another run: process {process.pid} on "):
                short(tmp_path)
            process.kill()
            process.wait()
            with pytest.raises(ValueError, match="already has checkpoints"):  # but nobody uses it
                short(tmp_path)
        finally:
            if child is not None:
                os.kill(child, signal.SIGKILL)


class Within(Trainer[nn.Module]):
    """Begins a second run in the same folder while the first is under way."""

    folder: Path
    said = ""

    def after_step(self, row: dict[str, Any]) -> None:
        if row["step"] == 1:
            with pytest.raises(ValueError, match="is in use by another run") as caught:
                short(self.folder)
            self.said = str(caught.value)


def test_two_runs_in_one_process(tmp_path: Path) -> None:
    trainer = Within(make_model("MLP"), dataset("MLP"))
    trainer.folder = tmp_path
    trainer.fit(
        FedAvgStrategy("sgd", lr=0.1), K, max_steps=2, batch_size=4, device="cpu", progress=False, save_dir=tmp_path
    )
    assert f"process {os.getpid()} on {socket.gethostname()}, which is this one" in trainer.said
    assert {path.name for path in tmp_path.iterdir()} == {at(tmp_path, step).name for step in (0, 2)}


PARTS = [(Simulation, "init"), (Checkpointer, "_make_run_id"), (Simulation, "tick"), (Recorder, "start")]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize(("owner", "name"), PARTS)
def test_a_run_that_fails_lets_go(
    owner: Any, name: str, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure comes in the preparation, before the first step or in one; the exception may be kept."""

    def fails(*_: Any, **__: Any) -> Any:
        raise error("on purpose")

    monkeypatch.setattr(owner, name, fails)
    with pytest.raises(error, match="on purpose") as caught:
        short(tmp_path)
    monkeypatch.undo()
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".pt"]
    assert_same(short(tmp_path, resume=True), short())
    assert caught.tb is not None


def test_a_file_system_without_locks_guards_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(descriptor: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files, "_lock", refuses)
    one, two = files.Lock(tmp_path / "lock"), files.Lock(tmp_path / "lock")
    assert one.take() is None
    assert two.take() is None
    one.release()
    two.release()
    assert not (tmp_path / "lock").exists()


def test_a_lock_that_is_let_go_is_not_held_twice(tmp_path: Path) -> None:
    one, two, three = (files.Lock(tmp_path / "lock") for _ in range(3))
    assert one.take() is None
    assert "which is this one" in str(two.take())
    one.release()
    one.release()
    assert two.take() is None
    one.release()  # not its own
    assert three.take() is not None
    two.release()


class FullDisk(Logger):
    """Between steps 2 and 4 the system writes no file of more than so many bytes."""

    def __init__(self, free: int) -> None:
        self.free = free
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def log(self, row: dict[str, Any]) -> None:
        free = {2: self.free, 4: resource.RLIM_INFINITY}.get(row["step"])
        if free is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (free, resource.RLIM_INFINITY))


def train_on_a_full_disk(link: multiprocess.Link, folder: Path, free: int) -> None:
    train(folder, logger=FullDisk(free), keep_checkpoints=1)


@pytest.mark.parametrize("free", [0, 3000, 30000])
def test_a_full_disk_loses_nothing_and_ends_nothing(free: int, tmp_path: Path) -> None:
    """Refused by the system at once, or in the middle of a file: torch's writer then has different ends."""
    with pytest.warns(VecgymWarning) as caught:
        multiprocess.run(train_on_a_full_disk, 1, (tmp_path, free))
    for step, warning in zip((2, 3), caught):
        assert str(warning.message).startswith(f"{at(tmp_path, step)} could not be written: [Errno 27]")
        assert str(warning.message).endswith(f"the newest checkpoint is {at(tmp_path, 1)}.")
    assert len(caught) == 2
    assert [path.name for path in tmp_path.iterdir()] == [at(tmp_path, STEPS).name]


def test_the_last_n_are_kept(tmp_path: Path) -> None:
    train(tmp_path, checkpoint_interval=2, keep_checkpoints=2)
    assert [path.name for path in checkpoints_in(tmp_path)] == [at(tmp_path, t).name for t in (6, 7)]


def test_newer_ones_that_cannot_be_read_do_not_count_among_the_last_n(tmp_path: Path) -> None:
    """Else the one just written would be the one too many."""
    train(tmp_path)
    for step in (STEPS - 1, STEPS):
        truncated(at(tmp_path, step))
    with pytest.warns(VecgymWarning, match="Trying the next older checkpoint"):
        train(tmp_path, resume=True, keep_checkpoints=1, max_steps=STEPS - 2)
    with pytest.warns(VecgymWarning, match="Trying the next older checkpoint"):
        train(tmp_path, resume=True, keep_checkpoints=1, max_steps=STEPS - 1)
    assert [path.name for path in checkpoints_in(tmp_path)] == [at(tmp_path, t).name for t in (STEPS - 1, STEPS)]
    assert vecgym.load(at(tmp_path, STEPS - 1)).step == STEPS - 1


def test_without_an_interval_start_and_end_are_saved(tmp_path: Path) -> None:
    train(tmp_path, checkpoint_interval=None)
    assert [path.name for path in checkpoints_in(tmp_path)] == [at(tmp_path, t).name for t in (0, STEPS)]


class Interrupt(Logger):
    """Ctrl-C while the step after the one that it logs is in progress."""

    def __init__(self, at_step: int) -> None:
        self.at_step = at_step

    def log(self, row: dict[str, Any]) -> None:
        if row["step"] == self.at_step:
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_saves_the_run_and_says_where(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt, match=f"after step 4 of 7; resume=True continues from {at(tmp_path, 4)}"):
        train(tmp_path, checkpoint_interval=None, logger=Interrupt(3))
    assert_same(train(tmp_path, resume=True), train())


def test_divergence_saves_nothing_more(tmp_path: Path) -> None:
    overflowing = FedAvgStrategy("sgd", H=2, lr=1e8)
    with pytest.raises(DivergenceError):
        train(tmp_path, "Quadratic", overflowing, checkpoint_interval=None, max_steps=40, val_interval=None)
    assert [path.name for path in checkpoints_in(tmp_path)] == [at(tmp_path, 0).name]


# ------------------------------------------------------------------------------------------ another run's


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"strategy": "fedavg"}, "strategy: saved DiLoCoStrategy, given FedAvgStrategy"),
        ({"strategy": DiLoCoStrategy("sgd", H=4, lr=0.1)}, r"exchanges\[0\].every: saved 3, given 4"),
        ({"strategy": make("diloco", max_norm=1.0)}, "strategy.inner.max_norm: saved None, given 1.0"),
        ({"strategy": make("diloco", lr_scheduler=lambda step: 0.5**step)}, "strategy.inner.lr_scheduler: saved None"),
        ({"model": "WithFrozen"}, "buffer seen: saved nothing, given int64"),
        ({"dtype": torch.float64}, r"parameter first.weight: saved float32 \[32, 16\], given float64 \[32, 16\]"),
        ({"num_nodes": 3}, "num_nodes: saved 4, given 3"),
        ({"seed": 1}, "seed: saved 42, given 1"),
        ({"batch_size": 2}, "batch_size: saved 4, given 2"),
        ({"shuffle": False}, "shuffle: saved True, given False"),
        ({"data": dataset("MLP", 25)}, r"examples of each node: saved \[6, 6, 6, 6\], given \[7, 6, 6, 6\]"),
        ({"dataloader_kwargs": {"drop_last": True}}, "steps per epoch: saved 2, given 1"),
        ({"max_steps": 3}, "already has 4 steps"),
    ],
)
def test_another_run_is_refused_saying_what_differs(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    train(tmp_path, max_steps=4)
    with pytest.raises(ValueError, match=message) as caught:
        train(tmp_path, resume=True, **given)
    assert at(tmp_path, 4).name in str(caught.value)


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(16, 10)

    def forward(self, batch: Any) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


class Bent(Line):
    def forward(self, batch: Any) -> Any:
        return nn.functional.cross_entropy(3 * self.net(batch[0]).cos(), batch[1])


class TrainedAlone(Line):
    """A model that has no loss in eval mode."""

    def forward(self, batch: Any) -> Any:
        return super().forward(batch) if self.training else self.net(batch[0])


def renamed(cls: type[Line]) -> Line:
    return type("Line", (cls,), {})()


def mixing(shift: float) -> Any:
    def matrix(step: int) -> torch.Tensor:
        return torch.eye(K).roll(int(shift), 0).double()

    return matrix


def short_of(model: nn.Module, folder: Path, strategy: Any = None, **settings: Any) -> Trainer:
    strategy = strategy or GossipStrategy("ring", inner_optim="adamw", lr=0.01)
    given = {"data": dataset("MLP"), "num_nodes": K, "max_steps": 2, "save_dir": folder, **settings}
    return fit(model, strategy, **given)[0]


@pytest.mark.parametrize("backend", ["stacked", "2 processes"])
def test_a_model_that_computes_something_else_is_refused_by_its_loss(backend: str, tmp_path: Path) -> None:
    """Of the same names and shapes. Other weights at the start are not another model."""
    short_of(Line(), tmp_path, exact=True)
    short_of(Line(), tmp_path, resume=True, exact=True, **BACKENDS[backend])
    with pytest.raises(ValueError, match=r"another run:\n  loss of node 0's first batch .*: saved \d\.\d+, given \d"):
        short_of(renamed(Bent), tmp_path, resume=True, exact=True, **BACKENDS[backend])


def test_of_other_data_the_loss_says_nothing(tmp_path: Path) -> None:
    short_of(Line(), tmp_path)
    with pytest.warns(VecgymWarning, match="first batch of the training data") as caught:
        short_of(Line(), tmp_path, resume=True, data=dataset("MLP", seed=9))
    assert len(caught) == 1


def test_a_loss_of_another_device_is_only_said(tmp_path: Path) -> None:
    short_of(Line(), tmp_path)
    path = at(tmp_path, 2)
    held = runfile.read(path)
    runfile.write(path, {**held, "arithmetic": {**held["arithmetic"], "device": "cuda"}, "loss": 5.0})
    with pytest.warns(match="device: saved cuda"), pytest.warns(VecgymWarning, match="may belong to another run"):
        short_of(Line(), tmp_path, resume=True)


def test_a_model_without_a_loss_in_eval_mode_resumes(tmp_path: Path) -> None:
    short_of(TrainedAlone(), tmp_path / "parts", max_steps=2)
    assert np.isnan(runfile.read(at(tmp_path / "parts", 2))["loss"])
    resumed = short_of(TrainedAlone(), tmp_path / "parts", max_steps=4, resume=True)
    assert resumed.history["step"][-1] == 4


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ({"strategy": GossipStrategy("ring", lr_scheduler=lambda step: 0.9**step)},
         {"strategy": GossipStrategy("ring", lr_scheduler=lambda step: 0.8**step)}, "learning rate of step 1: saved 0"),
        ({"strategy": GossipStrategy(mixing(1))}, {"strategy": GossipStrategy("ring")}, r"topology: saved mixing"),
        (
            {"dataloader_kwargs": {"collate_fn": torch.utils.data.default_collate}},
            {"dataloader_kwargs": {"collate_fn": lambda rows: torch.utils.data.default_collate(rows)}},
            "collate_fn: saved default_collate, given",
        ),
    ],
)  # fmt: skip
def test_other_schedules_and_functions_are_another_run(
    one: dict[str, Any], other: dict[str, Any], message: str, tmp_path: Path
) -> None:
    short_of(Line(), tmp_path, **one)
    short_of(Line(), tmp_path, **one, resume=True)
    with pytest.raises(ValueError, match=message):
        short_of(Line(), tmp_path, **other, resume=True)


def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path) -> None:
    train(tmp_path, max_steps=3)
    held = runfile.read(at(tmp_path, 3))
    before = {name: x for name, x in held["identity"].items() if name != "description"}
    runfile.write(at(tmp_path, 3), {**held, "identity": before})
    with pytest.raises(ValueError, match="was written by another version of vecgym"):
        train(tmp_path, max_steps=3, resume=True)
    assert vecgym.load(at(tmp_path, 3)).step == 3


def test_more_steps_are_refused_where_the_learning_rates_depend_on_them(tmp_path: Path) -> None:
    for schedule, allowed in (({"warmup_steps": 3}, True), ({"lr_scheduler": "cosine"}, False)):
        folder = tmp_path / str(allowed)
        train(folder, strategy=make("diloco", **schedule), max_steps=3)
        if allowed:
            resumed = train(folder, strategy=make("diloco", **schedule), resume=True)
            assert same_run(resumed, train(strategy=make("diloco", **schedule)))
        else:
            with pytest.raises(ValueError, match=r"learning rate of step 1: saved 0\.0775, given 0\.0955"):
                train(folder, strategy=make("diloco", **schedule), resume=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"engine": "loop"}, "engine: saved vmap, given loop"),
        ({"minibatch_size": 2, "engine": "vmap"}, "minibatch_size: saved None, given 2"),
        ({"data": dataset("MLP", seed=9), "engine": "vmap"}, "first batch of the training data"),
    ],
)
def test_what_changes_the_last_bits_is_said(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    train(tmp_path, engine="vmap", max_steps=3)
    with pytest.warns(VecgymWarning, match=message) as caught:
        train(tmp_path, resume=True, **given)
    assert len(caught) == 1


def test_what_has_no_part_in_the_training_may_change(tmp_path: Path) -> None:
    train(tmp_path, max_steps=3)
    resumed = train(
        tmp_path, resume=True, val_interval=None, val_size=2, logger=Drawing(), log_interval=3, keep_checkpoints=1,
        correlation_interval=2, on_divergence="warn", checkpoint_interval=None,
    )  # fmt: skip
    assert same_run(resumed, train())


@pytest.mark.parametrize("name", NAMES)
def test_a_strategy_that_has_been_used_is_the_same(name: str) -> None:
    """Settings are compared; nothing that a run leaves in a strategy's objects is."""
    strategy = make(name)
    before = settings_of(strategy, "strategy")
    train(strategy=strategy, max_steps=STEPS, val_interval=None)
    assert settings_of(strategy, "strategy") == before == settings_of(make(name), "strategy")


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"resume": True}, ValueError, "resume=True needs save_dir"),
        ({"checkpoint_interval": 2}, ValueError, "needs save_dir"),
        ({"resume": 3}, TypeError, "resume is of type int"),
        ({"save_dir": 3}, TypeError, "save_dir=3"),
        ({"save_dir": __file__}, ValueError, "is a file; give a folder"),
        ({"save_dir": "x", "checkpoint_interval": 0}, ValueError, "checkpoint_interval=0"),
        ({"save_dir": "x", "keep_checkpoints": 0}, ValueError, "keep_checkpoints=0"),
        ({"resume": "/no/such/file.pt"}, FileNotFoundError, "/no/such/file.pt"),
        ({"resume": str(ROOT / "vecgym")}, ValueError, "this folder has no checkpoint"),
        ({"save_dir": "/proc/none"}, ValueError, "cannot be written to"),
    ],
)
def test_wrong_settings_are_refused(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        train(**given)


def test_the_checkpoints_of_another_run_are_not_mixed_with_those_of_a_new_one(tmp_path: Path) -> None:
    train(tmp_path)
    with pytest.raises(ValueError, match=r"already has checkpoints, up to step-000000007\.pt"):
        train(tmp_path)
    with pytest.raises(ValueError, match="already has checkpoints"):
        train(tmp_path, resume=at(tmp_path, 3))
    other = train(tmp_path / "other", resume=at(tmp_path, 3))
    assert_same(train(tmp_path / "other", resume=True), other)


# -------------------------------------------------------------------------------------------- real processes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["diloco", "demo", "averaging-rare-and-late", "fedavg-participation"])
def test_a_run_goes_on_in_as_many_processes_as_wanted(name: str, tmp_path: Path) -> None:
    """Saved by one, two or four processes, gone on with by others: the same bits, with exact=True."""
    given: dict[str, Any] = {"strategy": name, "exact": True}
    whole = train(**given)
    for saver, resumer in (("stacked", "4 processes"), ("4 processes", "2 processes"), ("2 processes", "stacked")):
        folder = tmp_path / saver
        first = train(folder, checkpoint_interval=4, **given, **BACKENDS[saver])
        assert same_run(first, whole)
        resumed = train(resume=at(folder, 4), **given, **BACKENDS[resumer])
        assert same_run(resumed, whole), f"{saver} -> {resumer}"
        assert repr(timeless(resumed)) == repr(timeless(whole))
        assert list(resumed.ledger) == list(whole.ledger)


@pytest.mark.parametrize("optim", [torch.optim.AdamW, Own])
def test_what_processes_save_is_what_one_process_saves(optim: type[torch.optim.Optimizer], tmp_path: Path) -> None:
    """The state of all nodes, in the same shapes: what is the same on every node once. One node of four trains."""
    found = []
    for backend, settings in BACKENDS.items():
        # resting="keep": the nodes' parameters never become all alike, which a process of one node would save once.
        strategy = FedAvgStrategy(optim, H=3, participation=0.25, lr=0.01, resting="keep")
        train(tmp_path / backend, strategy=strategy, exact=True, max_steps=4, **settings)
        found.append([runfile.read(path) for path in checkpoints_in(tmp_path / backend)])
    for stacked, *others in zip(*found):
        for other in others:
            assert other["state"].pop("home") == stacked["state"]["home"]
            assert_same_bits(other["state"], {name: stacked["state"][name] for name in ("own", "shared")})
            assert_same_bits(other["models"]["params"], stacked["models"]["params"])


def test_native_collectives_agree_up_to_rounding(tmp_path: Path) -> None:
    train(tmp_path, checkpoint_interval=4, dtype=torch.float64)
    whole = train(dtype=torch.float64)
    with pytest.warns(VecgymWarning, match="num_processes: saved 1, given 2"):
        resumed = train(resume=at(tmp_path, 4), dtype=torch.float64, **BACKENDS["2 processes"])
    for name, p in whole.nodes.params.items():
        torch.testing.assert_close(resumed.nodes.params[name], p, rtol=1e-12, atol=1e-12)


class Killing(torch.utils.data.Dataset[Any]):
    """Ends the second process by SIGKILL after so many reads; in the process that made it, never."""

    def __init__(self, reads: int) -> None:
        self.data = dataset("MLP")
        self.reads = reads
        self.home = os.getpid()

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        self.reads -= 1
        if self.reads < 0 and os.getpid() != self.home and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.data[index]


def test_a_killed_process_costs_what_came_after_the_last_checkpoint(tmp_path: Path) -> None:
    processes = {**BACKENDS["2 processes"], "exact": True}
    with pytest.raises(ProcessError, match="was killed by signal SIGKILL"):
        train(tmp_path, data=Killing(46), **processes)
    assert 2 < len(checkpoints_in(tmp_path)) < STEPS
    log = tmp_path / "log"
    resumed = train(tmp_path, data=Killing(10**6), resume=True, logger=CSVLogger(log), log_interval=3, **processes)
    whole = train(exact=True)
    assert same_run(resumed, whole)
    assert resumed.history["step"] == list(range(STEPS + 1))
    steps = [line.split(",")[0] for line in (log / "history.csv").read_text().splitlines()]
    assert steps == ["step", "0", "2", "3", "4", "6", "7"]  # every third, and those with an evaluation


def test_errors_of_processes_keep_their_kind(tmp_path: Path) -> None:
    train(tmp_path, **BACKENDS["2 processes"])
    with pytest.raises(ValueError, match="strategy: saved DiLoCoStrategy, given FedAvgStrategy"):
        train(tmp_path, strategy="fedavg", resume=True, **BACKENDS["2 processes"])
    with pytest.raises(ValueError, match="already has checkpoints"):
        train(tmp_path, **BACKENDS["2 processes"])


def test_errors_of_files_are_the_same_in_processes(tmp_path: Path) -> None:
    """A part of the file that is gone or too short, its checksum right."""
    train(tmp_path, max_steps=3)
    path = at(tmp_path, 3)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in parts if name.endswith("/data/0"))
    for data in (None, parts[name][:-1]):
        with zipfile.ZipFile(path, "w") as archive:
            for part, content in {**parts, name: data}.items():
                if content is not None:
                    archive.writestr(part, content)
        with pytest.raises(runfile.Damaged, match=f"{path} is damaged"):
            train(max_steps=3, resume=path, **BACKENDS["2 processes"])
    with pytest.raises(FileNotFoundError, match=r"there is no file .*gone"):
        train(max_steps=3, resume=tmp_path / "gone", **BACKENDS["2 processes"])


def test_ctrl_c_with_processes_saves_the_run(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt, match="resume=True continues from"):
        train(tmp_path, checkpoint_interval=None, max_steps=2000, val_interval=None, logger=Interrupt(3),
              **BACKENDS["2 processes"])  # fmt: skip
    found = [runfile.read(path)["step"] for path in checkpoints_in(tmp_path)]
    assert found[0] == 0
    assert 3 < found[1] < 2000


# ------------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize("backend", ["stacked", "2 processes"])
@pytest.mark.parametrize("model", ["GPT", "WithFrozen", "CNN"])
def test_save_and_load_give_the_average_and_every_node(model: str, backend: str, tmp_path: Path) -> None:
    """Tied weights, integer buffers, frozen parameters; from trainer.save and from the last checkpoint."""
    trainer = train(tmp_path / "checkpoints", model, checkpoint_interval=None, **BACKENDS[backend])
    trainer.save(tmp_path / "run.pt")
    averaged = trainer.nodes.average()
    for path in (tmp_path / "run.pt", at(tmp_path / "checkpoints", STEPS)):
        found = vecgym.load(path)
        assert (found.step, found.num_nodes, found.settings["batch_size"]) == (STEPS, K, 4)
        assert repr(found) == "Saved(4 nodes after step 7, 8 rows)"
        assert found.history["train_loss"] == trainer.history["train_loss"]
        fresh = make_model(model, seed=3)
        for values, expected in [
            (found.average, averaged),
            *((found.node(i), trainer.nodes.module(i)) for i in (0, -1)),
        ]:
            fresh.load_state_dict(values)
            assert same(dict(fresh.state_dict()), dict(expected.state_dict()))
    with pytest.raises(IndexError, match="node 4 of 4"):
        found.node(4)


def test_there_is_nothing_to_save_before_a_run(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="only after fit"):
        Trainer(make_model("MLP"), dataset("MLP")).save(tmp_path / "run.pt")
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.pt"):
        vecgym.load(tmp_path / "none.pt")
