"""Processes of our own: how they are started, what ends them, and that nothing is left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import vecgym
from tests.fitting import STRATEGIES, Rows, dataset, fit, same, same_run
from tests.models import make_data, make_model
from vecgym import CSVLogger, DivergenceError, Logger, Trainer, VecgymWarning
from vecgym.collectives.distributed import DistributedCollectives
from vecgym.collectives.wire import Wire
from vecgym.core.errors import ProcessError
from vecgym.records.columns import MEASURED
from vecgym.runs import multiprocess
from vecgym.runs.run import Run
from vecgym.strategy import DiLoCoStrategy

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def nothing_left(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After every test, however its processes ended: none of them, and none of their files."""
    folder = tmp_path_factory.mktemp("processes")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert until(lambda: not multiprocessing.active_children())
    assert until(lambda: not list(folder.glob("vecgym-*")))


# ----------------------------------------------------------------------------------------------------- ordinary runs


def total(link: multiprocess.Link, value: int) -> tuple[int, int, torch.Tensor]:
    x = torch.tensor([value + link.rank])
    dist.all_reduce(x)
    return link.rank, os.getpid(), x


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_every_process_returns_in_the_order_of_ranks(method: str) -> None:
    found = multiprocess.run(total, 3 if method == "fork" else 2, (10,), start_method=method, timeout_s=60)
    assert [rank for rank, *_ in found] == list(range(len(found)))
    assert len({os.getpid(), *[pid for _, pid, _ in found]}) == len(found) + 1
    assert [int(x) for _, _, x in found] == [sum(10 + r for r in range(len(found)))] * len(found)


def talk(link: multiprocess.Link) -> None:
    link.send({"rank": link.rank, "x": torch.ones(2, dtype=torch.bfloat16), "array": np.arange(2)})
    warnings.warn(f"from {link.rank}", VecgymWarning, stacklevel=1)


def test_messages_arrive_and_warnings_of_the_first_process() -> None:
    found: list[Any] = []
    with pytest.warns(VecgymWarning, match="from 0") as caught:
        multiprocess.run(talk, 2, on_message=found.append)
    assert len(caught) == 1
    assert sorted(m["rank"] for m in found) == [0, 1]
    assert all(m["x"].dtype == torch.bfloat16 and len(m["array"]) == 2 for m in found)


# ------------------------------------------------------------------------------------------------------ what goes wrong


def fail(link: multiprocess.Link, how: str) -> None:
    link.send("began")
    if link.rank == 1:
        if how == "raise":
            raise KeyError("the thing")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(3)
        time.sleep(1000)
    link.beat()
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "what", "where"),
    [
        ("raise", "KeyError: 'the thing'", 'raise KeyError("the thing")'),
        ("kill", "was killed by signal SIGKILL", ""),
        ("exit", "ended with exit code 3", ""),
        ("hang", "hangs: it made no progress for 2 s", ""),
    ],
)
def test_one_error_names_the_process_its_nodes_and_the_place(how: str, what: str, where: str) -> None:
    start = time.monotonic()
    with pytest.raises(ProcessError) as caught:
        multiprocess.run(fail, 3, (how,), num_nodes=6, timeout_s=2)
    assert caught.value.rank == 1
    assert caught.value.nodes == "nodes 2-3"
    assert str(caught.value).startswith("process 1 (nodes 2-3)")
    assert what in str(caught.value)
    assert where in caught.value.traceback
    assert time.monotonic() - start < 30


def refuse(link: multiprocess.Link) -> None:
    raise ValueError("K=3 is wrong")


def test_a_users_mistake_keeps_its_kind() -> None:
    with pytest.raises(ValueError, match="K=3 is wrong"):
        multiprocess.run(refuse, 2)


def refuse_later(link: multiprocess.Link) -> None:
    if link.rank == 0:
        link.send("began")
    dist.barrier()
    if link.rank == 1:
        raise ValueError("example 7 is damaged")
    dist.barrier()


def test_the_same_error_later_says_where() -> None:
    """In whichever process: the first has begun for all."""
    with pytest.raises(ProcessError, match=r"process 1 \(node 1\): ValueError: example 7 is damaged") as caught:
        multiprocess.run(refuse_later, 2, num_nodes=2)
    assert "in refuse_later" in caught.value.traceback


def die_slowly(link: multiprocess.Link) -> None:
    """Its connections are gone before it is."""
    if link.rank == 1:
        dist.destroy_process_group()
        time.sleep(0.7)
        os._exit(3)
    dist.barrier()


def test_who_dies_is_to_blame_and_not_who_notices_it_first() -> None:
    with pytest.raises(ProcessError, match="process 1 ended with exit code 3"):
        multiprocess.run(die_slowly, 2)


def without_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)


def test_what_cannot_be_sent_to_a_new_interpreter_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"cannot be sent to a new process: .*Open files, locks and connections cannot"
    ):
        multiprocess.run(total, 2, (threading.Lock(),), start_method="spawn")
    without_cloudpickle(monkeypatch)
    with pytest.raises(ValueError, match=r"pip install vecgym\[processes\].* at the top of a module"):
        multiprocess.run(lambda link: None, 2, start_method="spawn")


def test_a_lambda_is_sent_to_a_new_interpreter() -> None:
    assert multiprocess.run(lambda link, x: x + link.rank, 1, (5,), start_method="spawn", timeout_s=60) == [5]


def hang_everywhere(link: multiprocess.Link) -> None:
    """Outside of a collective, for which torch.distributed has no limit."""
    link.send("began")
    time.sleep(1000)


def test_all_processes_that_hang_end() -> None:
    with pytest.raises(ProcessError, match="hangs: it made no progress for 1 s"):
        multiprocess.run(hang_everywhere, 2, timeout_s=1)


def beating(link: multiprocess.Link) -> None:
    """Works longer than `timeout_s`, but exchanges something now and then."""
    for _ in range(15):
        time.sleep(0.2)
        link.beat()


def test_whoever_exchanges_something_does_not_hang() -> None:
    assert multiprocess.run(beating, 2, timeout_s=1) == [None, None]


def talk_and_die(link: multiprocess.Link, how: str) -> None:
    if link.rank == 0:
        for i in range(300):
            link.send(i)
        if how == "raise":
            raise KeyError("the end")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_what_a_process_had_sent_before_it_failed_arrives(how: str) -> None:
    """Also where it takes longer to handle than the time for which others may add to an error."""
    found = []

    def slow(message: int) -> None:
        time.sleep(0.01)
        found.append(message)

    with pytest.raises(ProcessError, match="process 0"):
        multiprocess.run(talk_and_die, 2, (how,), on_message=slow)
    assert found == list(range(300))


def die_while_sending(link: multiprocess.Link) -> None:
    if link.rank == 0:
        os.write(link.pipe.fileno(), struct.pack("!i", 1000) + b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)


def test_half_a_message_keeps_nobody_waiting() -> None:
    start = time.monotonic()
    with pytest.raises(ProcessError, match="process 0 was killed by signal SIGKILL"):
        multiprocess.run(die_while_sending, 3)
    assert time.monotonic() - start < 30


def train_apart(link: multiprocess.Link) -> None:
    """One process goes on for long without the other."""
    link.send("began")
    if link.rank == 1:
        raise KeyError("alone")
    while True:
        time.sleep(0.01)
        link.send("a row")


def test_a_failure_ends_those_that_do_not_notice() -> None:
    start = time.monotonic()
    with pytest.raises(ProcessError, match="process 1: KeyError: 'alone'"):
        multiprocess.run(train_apart, 2)
    assert time.monotonic() - start < 30


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_start_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixture looks for those that had been started before."""
    fork, left = os.fork, [None, None]

    def failing() -> int:
        if not left:
            raise OSError("Resource temporarily unavailable")
        left.pop()
        return fork()

    monkeypatch.setattr(os, "fork", failing)
    with pytest.raises(OSError, match="temporarily unavailable"):
        multiprocess.run(hang_everywhere, 3, start_method="fork")


# ---------------------------------------------------------------------------------------------------------------- fit


def run(script: str, *, wait: bool = True, **more: Any) -> Any:
    """A program that stands in no file, as a notebook's cells: `__main__` cannot be imported."""
    command = [sys.executable, "-c", textwrap.dedent(script)]
    if not wait:
        return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, **more)


NOTEBOOK = """
    import os, sys, time, torch
    from vecgym import Trainer
    from vecgym.runs import multiprocess
    from vecgym.strategy import FedAvgStrategy

    class Line(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(()))
        def forward(self, x):
            return (self.w - x).square().mean()

    class Data(torch.utils.data.Dataset):
        pause = 0.0
        def __len__(self): return 64
        def __getitem__(self, i):
            time.sleep(Data.pause)
            return torch.tensor(float(i))

    trainer = Trainer(Line(), Data())
    strategy = FedAvgStrategy("sgd", H=2, lr=0.1, lr_scheduler=lambda step: 1.0)
    settings = dict(num_nodes=4, batch_size=4, progress=False, device="cpu", backend="processes", num_processes=2)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks know a notebook's definitions; elsewhere files are needed")
def test_models_and_datasets_of_a_notebook() -> None:
    done = run(NOTEBOOK + "\n    print(trainer.fit(strategy, max_steps=3, **settings).w.item())")
    assert done.returncode == 0, done.stderr
    assert 0 < float(done.stdout) < 32


SPAWNED = NOTEBOOK + "\n    multiprocess.choose_start_method = lambda d: 'spawn'"


def test_a_notebooks_definitions_are_sent_to_new_interpreters() -> None:
    """Model, dataset and schedule, by cloudpickle; the result is that of forks."""
    shown = "\n    print(trainer.fit(strategy, max_steps=3, exact=True, **settings).w.item())"
    done, forked = run(SPAWNED + shown), run(NOTEBOOK + shown)
    assert done.returncode == 0, done.stderr
    assert done.stdout == forked.stdout


def test_without_cloudpickle_the_error_says_what_to_do() -> None:
    fit = "\n    trainer.fit(FedAvgStrategy('sgd', lr=0.1), **settings)"
    done = run(SPAWNED + "\n    sys.modules['cloudpickle'] = None" + fit)
    assert "ValueError: new processes cannot import what a notebook cell" in done.stderr
    assert "'Line'" in done.stderr
    assert "%%writefile" in done.stderr
    assert "pip install vecgym[processes]" in done.stderr


def test_a_notebooks_strategy_is_named_too() -> None:
    done = run(
        NOTEBOOK
        + """
    from vecgym.runs.options import FitOptions
    class Mine(FedAvgStrategy): pass
    sys.modules["cloudpickle"] = None
    multiprocess.run(print, 1, (FitOptions(Mine(), 2),), start_method="spawn")
"""
    )
    assert "ValueError: new processes cannot import" in done.stderr
    assert "'Mine'" in done.stderr


def same_history(a: Trainer, b: Trainer, tolerance: float = 0.0) -> None:
    assert a.history.columns == b.history.columns
    for column in set(a.history.columns) - set(MEASURED):
        for x, y in zip(a.history[column], b.history[column], strict=True):
            assert (x is None) == (y is None), column
            if x is not None:
                np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance, err_msg=column)


FIT: dict[str, Any] = {"num_nodes": 4, "max_steps": 5, "val_interval": 2, "correlation_interval": 2, "val_size": 10}


@pytest.mark.parametrize("strategy", ["AllReduce", "DiLoCo", "FedAvg participation"])
@pytest.mark.parametrize("model", ["CNN", "Dropout"])
def test_a_run_is_that_of_one_process(model: str, strategy: str) -> None:
    """Exact: every bit of nodes, average, history and evaluation; batch norm's buffers and dropout's masks, too."""
    data = dataset(model, 48)
    given = {**FIT, "data": data, "val": data, "exact": True}
    alone, average = fit(model, strategy, **given)
    for W in (2, 4):
        trainer, other = fit(model, strategy, **given, backend="processes", num_processes=W)
        assert same_run(alone, trainer)
        assert same(dict(average.state_dict()), dict(other.state_dict()))
        same_history(alone, trainer)
        assert list(alone.ledger) == list(trainer.ledger)
        assert trainer.history.settings["num_processes"] == W


def own_data(rank: int, num_nodes: int, train: bool) -> Any:
    """A dataset of another length on each node."""
    return TensorDataset(*make_data("MLP", 12 + rank, seed=rank if train else 9, dtype=torch.float64))


class Kept(Logger):
    def __init__(self) -> None:
        self.rows: list[int] = []
        self.ended = 0

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row["step"])

    def finish(self) -> None:
        self.ended += 1


def test_a_run_as_torch_reduces_with_a_dataset_of_each_node() -> None:
    """Not exact: up to rounding; the user's loggers get their rows in this process."""
    given: dict[str, Any] = {
        **FIT, "data": own_data, "val": own_data, "dtype": torch.float64, "engine": "vmap", "minibatch_size": 2,
    }  # fmt: skip
    logger, other = Kept(), Kept()
    alone, average = fit("MLP", "FedAvg islands", **given, logger=logger, log_interval=3)
    trainer, found = fit(
        "MLP", "FedAvg islands", **given, backend="processes", num_processes=4, logger=other, log_interval=3
    )
    for name, p in alone.nodes.params.items():
        torch.testing.assert_close(trainer.nodes.params[name], p, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.state_dict(), average.state_dict(), rtol=1e-12, atol=1e-12)
    same_history(alone, trainer, 1e-10)
    assert (logger.rows, logger.ended) == (other.rows, other.ended)


class Breaks(Rows):
    """Data that cannot be read in one process after some steps."""

    def __init__(self, data: Any, how: str) -> None:
        super().__init__(data)
        self.how = how
        self.reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if self.reads > 30 and dist.is_initialized() and dist.get_rank() == 1:
            if self.how == "hang":
                time.sleep(1000)
            raise OSError("the disk is gone")
        return super().__getitem__(index)


@pytest.mark.parametrize(("how", "what"), [("raise", "OSError: the disk is gone"), ("hang", "hangs")])
def test_a_run_that_fails_keeps_what_was_saved(tmp_path: Path, how: str, what: str) -> None:
    trainer = Trainer(make_model("MLP"), Breaks(make_data("MLP", 48), how))
    with pytest.raises(ProcessError) as caught:
        trainer.fit(
            STRATEGIES["DiLoCo"](), 4, max_steps=50, batch_size=4, progress=False, device="cpu", backend="processes",
            num_processes=2, logger=CSVLogger(tmp_path), timeout_s=3,
        )  # fmt: skip
    assert str(caught.value).startswith("process 1 (nodes 2-3)")
    assert what in str(caught.value)
    assert ("__getitem__" in caught.value.traceback) == (how == "raise")
    rows = (tmp_path / "history.csv").read_text().splitlines()[1:]
    assert len(rows) == len(trainer.history) > 0


def test_a_run_that_diverges_keeps_history_and_nodes() -> None:
    given: dict[str, Any] = {**FIT, "max_steps": 40, "val_interval": None}
    with pytest.raises(DivergenceError) as alone:
        fit("Quadratic", overflowing(), **given)
    trainer = Trainer(make_model("Quadratic"), dataset("Quadratic"))
    with pytest.raises(DivergenceError) as caught:
        trainer.fit(
            overflowing(), 4, max_steps=40, batch_size=4, progress=False, device="cpu", backend="processes",
            num_processes=2,
        )  # fmt: skip
    assert (caught.value.step, caught.value.nodes) == (alone.value.step, alone.value.nodes)
    assert len(trainer.nodes) == 4
    assert trainer.history["step"][-1] == caught.value.step + 1


def overflowing() -> Any:
    from vecgym.strategy import FedAvgStrategy

    return FedAvgStrategy("sgd", H=2, lr=1e8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "threads"}, "Allowed: 'stacked', 'processes', 'distributed'"),
        ({"backend": "processes"}, "needs num_processes"),
        ({"backend": "processes", "num_processes": 3}, r"one of \[1, 2, 4\]"),
        ({"num_processes": 2}, 'backend="processes"'),
        ({"backend": "distributed"}, "torchrun --nproc-per-node"),
        ({"backend": "processes", "num_processes": 2, "timeout_s": 0}, "timeout_s=0"),
        (
            {"backend": "processes", "num_processes": 2, "batch_size": 99, "dataloader_kwargs": {"drop_last": True}},
            "drop_last leaves no batch",
        ),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit("MLP", "FedAvg", num_nodes=4, **settings)


class WithEmpty(torch.nn.Module):
    """Parameters and a buffer of no elements, beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.vector, self.matrix = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((0,), (3, 0)))
        self.w = torch.nn.Parameter(torch.zeros(()))
        self.register_buffer("nothing", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w - x).square().mean() + self.vector.sum() + self.matrix.sum()


@pytest.mark.parametrize("strategy", ["AllReduce", "FedAvg islands", "DiLoCo"])
@pytest.mark.parametrize("exact", [True, False])
def test_parameters_without_elements(strategy: str, exact: bool, tmp_path: Path) -> None:
    found = []
    each: list[dict[str, Any]] = [{}, {"backend": "processes", "num_processes": 2, "save_dir": tmp_path}]
    for settings in each:
        trainer = Trainer(WithEmpty(), torch.arange(32.0), torch.arange(4.0))
        average = trainer.fit(
            STRATEGIES[strategy](), 4, max_steps=4, batch_size=2, progress=False, device="cpu", exact=exact, **settings
        )
        found.append((trainer.nodes, average))
    (alone, average), (nodes, other) = found
    assert {name: x.shape for name, x in nodes.params.items()} == {"vector": (4, 0), "matrix": (4, 3, 0), "w": (4,)}
    assert same(dict(average.state_dict()), dict(other.state_dict())) or not exact
    torch.testing.assert_close(nodes.params, alone.params)
    assert nodes.buffers["nothing"].shape == (4, 0)


class Choosing(torch.nn.Module):
    """Some batches leave `b` out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a(x) + self.b(x) if x[0, 0] > 0 else self.a(x)).square().mean()


@pytest.mark.parametrize("strategy", ["AllReduce", "FedAvg"])
def test_gradients_of_parameters_that_some_nodes_leave_out(strategy: str) -> None:
    """The last node of one process leaves `b` out, and the first of the other: messages join the same tensors."""
    torch.manual_seed(0)
    shards = [torch.randn(8, 4).abs() * sign for sign in (1, -1, -1, 1)]
    found = []
    each: list[dict[str, Any]] = [{}, {"backend": "processes", "num_processes": 2}]
    for settings in each:
        torch.manual_seed(1)
        trainer = Trainer(Choosing(), lambda rank, num_nodes, train: shards[rank])
        with pytest.warns(VecgymWarning, match="vmap cannot run this model"):
            trainer.fit(
                STRATEGIES[strategy](), 4, max_steps=3, batch_size=4, progress=False, device="cpu", **settings
            )  # fmt: skip
        found.append(trainer.nodes.params)
    torch.testing.assert_close(found[1], found[0])


# ------------------------------------------------------------------------------------------------------------ signals

SLOW = (
    NOTEBOOK
    + """
    Data.pause = 0.01
    import multiprocessing, threading, vecgym
    def report():
        while len(trainer.history) < 3: time.sleep(0.02)
        print(*[p.pid for p in multiprocessing.active_children()], flush=True)
    threading.Thread(target=report, daemon=True).start()
    try:
        trainer.fit(strategy, max_steps=100000, **settings)
    except KeyboardInterrupt as error:
        print("interrupted:", error, len(trainer.history), len(trainer.nodes), flush=True)
"""
)


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return True
    return state == "Z"


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("whom", ["the parent", "all"])
@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGKILL])
def test_the_processes_end_with_the_one_that_started_them(
    which: signal.Signals, whom: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after a whole step, with the nodes as they are then; and nobody outlives a parent that was killed.

    A terminal sends Ctrl-C to all processes; a program that has started this one, to the parent alone.
    """
    monkeypatch.setitem(ENVIRONMENT, "TMPDIR", str(tmp_path))
    program = run(SLOW, wait=False)
    pids = [int(text) for text in program.stdout.readline().split()]
    assert len(pids) == 2, program.stderr.read()
    for pid in pids if whom == "all" and which == signal.SIGINT else []:
        os.kill(pid, which)
    program.send_signal(which)
    output, errors = program.communicate(timeout=30)
    assert until(lambda: all(gone(pid) for pid in pids))
    assert not list(tmp_path.glob("vecgym-*"))
    if which == signal.SIGINT:
        assert "interrupted: interrupted after step" in output, errors
        assert output.split()[-1] == "4"  # nodes
        assert int(output.split()[-2]) >= 3  # rows


# ----------------------------------------------------------------------------------------------------------- torchrun


@pytest.mark.parametrize("backend", ["stacked", "processes"])
def test_under_torchrun_only_distributed_trains(backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else every process of torchrun would train the whole run, and write to the same files."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    settings: dict[str, Any] = {"backend": backend, "num_processes": 2 if backend == "processes" else None}
    with pytest.raises(
        ValueError, match=r'process 1 of 2.*backend="distributed", or start the script without torchrun'
    ):
        fit("MLP", "FedAvg", num_nodes=4, **settings, logger=CSVLogger(tmp_path / "log"))
    with pytest.raises(ValueError, match="process 1 of 2"):
        vecgym.sweep(
            make_model("MLP"), dataset("MLP"), strategy=STRATEGIES["FedAvg"](), grid={"seed": [0]}, num_nodes=2
        )
    with pytest.raises(ValueError, match="process 1 of 2"):
        multiprocess.run(refuse, 2)
    assert not (tmp_path / "log").exists()
    monkeypatch.setenv("WORLD_SIZE", "1")
    fit("MLP", "FedAvg", num_nodes=2, max_steps=2)


def in_a_group(link: multiprocess.Link) -> str:
    """The message of `fit` in a group that no environment variable tells of."""
    try:
        fit("MLP", "FedAvg", num_nodes=2, max_steps=2)
    except ValueError as error:
        return str(error)
    return ""


def test_in_a_process_group_only_distributed_trains() -> None:
    [first, second] = multiprocess.run(in_a_group, 2)
    assert "this is process 0 of 2" in first
    assert "this is process 1 of 2" in second


def gloo_threads() -> int:
    """The number of threads of this process that belong to process groups."""
    return sum("gloo" in task.joinpath("comm").read_text() for task in Path("/proc/self/task").iterdir())


def threads_around_fits(link: multiprocess.Link) -> tuple[int, list[int]]:
    """The threads of process groups before two runs in a group that exists, and after each."""
    dist.barrier()  # the first exchange starts threads
    before, after = gloo_threads(), []
    for _ in range(2):
        trainer, _ = fit("MLP", "FedAvg islands", num_nodes=6, max_steps=8, backend="distributed")
        after.append(gloo_threads())  # a trainer that is kept does not keep them
        assert isinstance(trainer.run, Run)
        with pytest.raises(RuntimeError, match="this run has ended"):
            trainer.run.session.each(0)
    return before, after


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's list of threads")
def test_islands_process_groups_end_with_the_run() -> None:
    for before, after in multiprocess.run(threads_around_fits, 3):
        assert before > 0
        assert after == [before, before]


UNDER_TORCHRUN = """
import sys, torch, torch.distributed as dist
from tests.fitting import STRATEGIES, dataset
from tests.models import make_model
from tests.test_launch import gloo_threads
from vecgym import CSVLogger, Trainer

data = dataset("MLP", 48)
trainer = Trainer(make_model("MLP"), data, data)
if len(sys.argv) > 2:
    dist.init_process_group("gloo")  # a group that exists
average = trainer.fit(
    STRATEGIES["DiLoCo"](), 4, max_steps=5, batch_size=4, progress=False, device="cpu", exact=True,
    backend="distributed", logger=CSVLogger(sys.argv[1]),
)
assert dist.is_initialized() == (len(sys.argv) > 2)
if dist.is_initialized():
    dist.destroy_process_group()
if sys.platform == "linux":
    assert gloo_threads() == 0, "threads that outlive the interpreter abort the process, now and then"
total = float(sum(p.detach().double().sum() for p in average.parameters()))
sys.stdout.write(f"{len(trainer.nodes)} {total}\\n")  # in one piece: the other process writes there, too
"""


@pytest.mark.slow
@pytest.mark.parametrize("group", ["its own", "existing"])
def test_under_torchrun(tmp_path: Path, group: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNDER_TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    command += [str(tmp_path / "log"), *(["group"] if group == "existing" else [])]
    environment = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": multiprocess.loopback()}  # a sandbox may not know its own name
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    data = dataset("MLP", 48)
    alone, average = fit("MLP", "DiLoCo", num_nodes=4, max_steps=5, data=data, val=data, exact=True)
    expected = float(sum(p.detach().double().sum() for p in average.parameters()))
    assert done.stdout.splitlines() == [f"2 {expected}"] * 2  # both ranks, with two nodes each, the same average
    assert len((tmp_path / "log" / "history.csv").read_text().splitlines()) == 1 + len(alone.history)


@pytest.mark.slow
def test_the_guides_script_under_torchrun(tmp_path: Path) -> None:
    """All of its block, as a file: one log, and one checkpoint that has all nodes."""
    page = vecgym.guide.processes.__doc__
    assert page is not None
    (tmp_path / "train.py").write_text(page.split("```python\n# train.py\n")[1].split("```")[0])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": multiprocess.loopback()}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "runs" / "diloco" / "history.csv").read_text().splitlines()) == 1 + 20
    saved = vecgym.load(tmp_path / "run" / "step-000000020.pt")
    assert saved.num_nodes == 16
    assert saved.history.settings["num_processes"] == 2


def ignores(link: multiprocess.Link) -> int:
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGINT)
    dist.barrier()
    return len(link.interrupted)


def test_a_process_ignores_an_interrupt_that_its_parent_does_not_pass_on() -> None:
    """A terminal sends it to all at once, and each would stop after another step."""
    assert multiprocess.run(ignores, 2, timeout_s=60) == [0, 0]


def until_interrupted(link: multiprocess.Link, begin: bool) -> int:
    if begin:
        link.send("began")
    while not link.interrupted:
        time.sleep(0.01)
    time.sleep(1000 if link.rank == 0 and link.num_processes == 3 else 0.3)
    return len(link.interrupted)


def press_ctrl_c(times: int) -> None:
    """A little later, and a little apart."""

    def press() -> None:
        for _ in range(times):
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()


def test_an_interrupt_is_passed_on_once() -> None:
    """The function has begun by then; its result is returned."""
    press_ctrl_c(1)
    assert multiprocess.run(until_interrupted, 2, (True,), timeout_s=60) == [1, 1]


@pytest.mark.parametrize(("begin", "times"), [(False, 1), (True, 2)])
def test_an_interrupt_before_it_has_begun_and_a_second_one_end_all_at_once(begin: bool, times: int) -> None:
    press_ctrl_c(times)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        multiprocess.run(until_interrupted, 3, (begin,), timeout_s=60)
    assert time.monotonic() - start < 30


class PressedTwice(Logger):
    """Presses Ctrl-C twice when it gets the row of step 2, in the process that has started the others."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.ended = 0

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row["step"])
        if row["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    def finish(self) -> None:
        self.ended += 1


def test_a_second_interrupt_ends_a_run_at_once_and_logged_rows_stay() -> None:
    trainer, logger = Trainer(vecgym.models.Line(), torch.ones(16, 1)), PressedTwice()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(
            DiLoCoStrategy("sgd", H=2, lr=0.1), 2, max_steps=10**6, batch_size=2, backend="processes", num_processes=2,
            device="cpu", progress=False, timeout_s=100.0, logger=logger,
        )  # fmt: skip
    assert time.monotonic() - start < 60, "not after timeout_s"
    assert logger.rows == [1, 2] == trainer.history["step"]
    assert logger.ended == 1


def exchanges_alone(link: multiprocess.Link, how: str) -> None:
    comm = DistributedCollectives(4, Wire(watch=link.beat))
    x = {"w": torch.ones(2, 3)}
    comm.mean(x)
    if link.rank == 0:
        comm.mean(x)
    if how == "dies":
        os._exit(3)
    time.sleep(1000)


@pytest.mark.parametrize(("how", "what"), [("hangs", "hangs: it made no progress for 2 s"), ("dies", "exit code 3")])
def test_the_process_that_others_wait_for_is_named(how: str, what: str) -> None:
    with pytest.raises(ProcessError, match=what) as caught:
        multiprocess.run(exchanges_alone, 2, (how,), timeout_s=2)
    assert str(caught.value).startswith("process 1")
