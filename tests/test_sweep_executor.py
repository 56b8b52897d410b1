"""Sweeps on executors: the rows, bits, errors and files of a sweep in this process."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import multiprocessing
import os
import pathlib
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import vecgym
import vecgym.guide.sweeps
from tests.models import make_data, make_model
from vecgym import SweepResult, VecgymWarning, sweep
from vecgym.clock import Compute, Network
from vecgym.data import partition_dirichlet
from vecgym.records import runfile
from vecgym.records.columns import MEASURED
from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy, FedAvgStrategy, SPARTAStrategy
from vecgym.sweeps import runner
from vecgym.sweeps.runner import Trained

# The seeds of the sweeps here are those of the data, on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:(the seeds do not vary|.*the best, is the)")

F64 = torch.float64
K = 2
GRID: dict[str, Any] = {"H": [2, 3], "lr": [0.01, 1e200, 0.02], "seed": [0, 1]}  # 1e200 diverges


def data(num_examples: int = 60, seed: int = 0) -> TensorDataset:
    made = make_data("MLP", num_examples, seed, F64)
    assert isinstance(made, tuple)
    return TensorDataset(*made)


def run(executor: Executor | None = None, dataset: Any = None, model: Any = None, **settings: Any) -> SweepResult:
    """A sweep in 4 stacks."""
    default: dict[str, Any] = {
        "strategy": lambda H, lr: DiLoCoStrategy("adamw", H=H, lr=lr), "grid": GRID, "num_nodes": K, "max_steps": 6,
        "batch_size": 4, "val_interval": 3, "chunk_configs": 3, "device": "cpu", "progress": False,
        "keep_models": True,
    }  # fmt: skip
    model = make_model("MLP", dtype=F64) if model is None else model
    dataset = data() if dataset is None else dataset
    return sweep(model, dataset, data(10, seed=1), executor=executor, **{**default, **settings})


def assert_same(found: SweepResult, expected: SweepResult) -> None:
    """The same rows in the same order, and the same bits of every curve and model."""
    assert str(found.rows) == str(expected.rows)  # nan is not equal to nan
    assert found.explain() == expected.explain()
    for i, row in enumerate(expected.rows):
        one, other = ([exact(row) for row in result.history(i).rows] for result in (found, expected))
        assert one == other
        assert len(one) > 1
        if row["status"] == "finished":
            states = [result.model(i).state_dict() for result in (found, expected)]
            assert all(torch.equal(x, states[1][name]) for name, x in states[0].items())


def exact(row: dict[str, Any]) -> str:
    """All of a row but the time that it took here; every digit of each number, and nan equal to nan."""
    plain = {name: x.tolist() if hasattr(x, "tolist") else x for name, x in row.items() if name not in MEASURED}
    return repr(plain)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Workers can be forked then."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as executor:
        yield executor


class Inline(Executor):
    """Each job is done as it is sent, here: what a job does can be watched."""

    def __init__(self) -> None:
        self.submitted = 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.submitted += 1
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


# ------------------------------------------------------------------------------------------------------ the same bits


def test_a_process_pool_gives_the_same_rows_and_bits(pool: ProcessPoolExecutor) -> None:
    expected = run()
    assert len(expected.explain().splitlines()) == 2
    assert "4 stacks of up to 3" in expected.explain()
    found = run(pool)
    assert [row["status"] for row in found.rows] == (["finished"] * 2 + ["diverged"] * 2 + ["finished"] * 2) * 2
    assert_same(found, expected)


def test_points_stay_with_the_process_that_sweeps(pool: ProcessPoolExecutor) -> None:
    """Values that cannot be sent may be in them, such as functions of a step."""
    points = [{"rule": rule, "seed": seed} for seed in (0, 1) for rule in (lambda: 2, lambda: 3)]
    given: dict[str, Any] = {"strategy": lambda rule: DiLoCoStrategy("adamw", H=rule(), lr=0.01), "grid": None}
    given |= {"points": points, "chunk_configs": 2}
    found, expected = run(pool, **given), run(**given)
    assert [row["rule"]() for row in found.rows] == [2, 3, 2, 3]
    assert_same(found, expected)


@pytest.mark.slow  # two interpreters import torch
def test_spawned_workers_have_the_threads_of_this_process() -> None:
    torch.set_num_threads(2)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as executor:
        wide: dict[str, Any] = {"model": Wide(), "dataset": TensorDataset(torch.randn(64, 300), torch.randn(64, 300))}
        wide |= {"strategy": lambda lr: FedAvgStrategy("sgd", H=2, lr=lr), "grid": {"lr": [0.1, 0.2, 0.3]}}
        wide |= {"batch_size": 32, "chunk_configs": 2}
        found, expected = (run_without_validation(x, **wide) for x in (executor, None))
    assert_same(found, expected)


def run_without_validation(executor: Executor | None, model: nn.Module, dataset: Any, **settings: Any) -> SweepResult:
    common: dict[str, Any] = {"num_nodes": K, "max_steps": 4, "device": "cpu", "progress": False, "keep_models": True}
    return sweep(model, dataset, executor=executor, **common, **settings)


class Wide(nn.Module):
    """Sums that are long enough to depend on the number of threads."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(300, 600), nn.Tanh(), nn.Linear(600, 300))

    def forward(self, batch: Any) -> Tensor:
        return (self.net(batch[0]) - batch[1]).square().mean()


class Seen(nn.Module):
    """Notes the settings under which it is trained."""

    notes: list[Any] = []  # noqa: RUF012 - of the class, which a job does not copy

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model("MLP", dtype=F64)

    def forward(self, batch: Any) -> Tensor:
        names = (torch.get_num_threads(), torch.get_default_dtype(), torch.get_float32_matmul_precision())
        Seen.notes.append((*names, torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()))
        return self.net(batch)


def test_a_job_has_the_settings_of_the_process_that_sweeps() -> None:
    """Set between the sweep's call and the job, they are put back for the job, and afterwards as they were."""

    class Elsewhere(Inline):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            mine = torch.get_num_threads(), torch.get_default_dtype(), torch.get_float32_matmul_precision()
            torch.set_num_threads(2)
            torch.set_default_dtype(torch.float64)
            torch.set_float32_matmul_precision("medium")
            torch.use_deterministic_algorithms(True)
            try:
                future = super().submit(fn, *args, **kwargs)
                assert torch.get_num_threads() == 2
                assert torch.get_default_dtype() == torch.float64
                assert torch.get_float32_matmul_precision() == "medium"
                assert torch.are_deterministic_algorithms_enabled()
            finally:
                torch.set_num_threads(mine[0])
                torch.set_default_dtype(mine[1])
                torch.set_float32_matmul_precision(mine[2])
                torch.use_deterministic_algorithms(False)
            return future

    Seen.notes.clear()
    run(Elsewhere(), model=Seen())
    assert set(Seen.notes) >= {(1, torch.float32, "highest", False, True)}
    assert {note[:4] for note in Seen.notes} == {(1, torch.float32, "highest", False)}


def test_other_options_work_as_without(pool: ProcessPoolExecutor) -> None:
    """Axes of settings and models, several programs, prices, random points, few kept models, the engine loop."""
    settings: dict[str, Any] = {
        "strategy": lambda cls, lr: cls(inner_optim="sgd", lr=lr), "num_nodes": None, "engine": "loop",
        "grid": {"cls": [FedAvgStrategy, SPARTAStrategy, AllReduceStrategy], "num_nodes": [2, 3],
                 "lr": vecgym.LogUniform(1e-3, 1e-1), "batch_size": [2, 4]},
        "samples": 6, "network": {"near": Network(1e6), "far": Network(1e6, "50 ms")}, "compute": Compute(0.1),
        "minibatch_size": 2, "dataloader_kwargs": {"drop_last": True}, "chunk_configs": None,
    }  # fmt: skip
    found, expected = (run(x, **settings) for x in (pool, None))
    assert len(found.rows) == 12
    assert "sim_seconds" in found.rows[0]
    assert str(found.rows) == str(expected.rows)
    assert found.explain() == expected.explain()
    priced = found.best("sim_seconds", over=None)
    assert str(priced) == str(expected.best("sim_seconds", over=None))


@pytest.mark.parametrize("workers", [1, 3])
def test_threads_take_turns(workers: int) -> None:
    """A job's settings of torch, and the random numbers of `loop`, are the whole process's."""
    settings: dict[str, Any] = {"model": make_model("Dropout", dtype=F64), "engine": "loop"}
    with ThreadPoolExecutor(workers) as threads:
        assert_same(run(threads, **settings), run(**settings))


class Crowded(nn.Module):
    """Counts who is in its forward pass at the same time."""

    inside: list[int] = [0, 0]  # noqa: RUF012 - now, and at most

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model("MLP", dtype=F64)

    def forward(self, batch: Any) -> Tensor:
        Crowded.inside[0] += 1
        Crowded.inside[1] = max(Crowded.inside)
        time.sleep(0.001)
        Crowded.inside[0] -= 1
        return self.net(batch)


def test_jobs_in_one_process_are_never_under_way_together() -> None:
    with ThreadPoolExecutor(3) as threads:
        run(threads, model=Crowded(), engine="loop")
    assert Crowded.inside == [0, 1]


def test_the_file_is_written_whenever_a_stack_ends(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    write = runfile.write

    def counted(path: Any, contents: Any) -> None:
        written.append(len(contents["sweep"]["curves"]))
        write(path, contents)

    monkeypatch.setattr(runfile, "write", counted)
    run(Inline(), resume=tmp_path / "sweep.pt")
    assert written == [3, 6, 9, 12, 12]


def test_no_option_of_a_dry_run_reaches_the_executor() -> None:
    executor = Inline()
    assert run(executor, dry_run=True).num_pending == 12
    assert executor.submitted == 0


def test_the_bar_counts_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bar:
        shown: dict[str, Any] = {}  # noqa: RUF012

        def __init__(self, total: int, disable: bool, unit: str) -> None:
            self.shown.update(total=total, disable=disable, done=[])

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def update(self, n: int) -> None:
            self.shown["done"].append(n)

    monkeypatch.setattr("vecgym.sweeps.runner.tqdm", Bar)
    run(Inline(), progress=True)
    assert Bar.shown["disable"] is False
    assert [n for n in Bar.shown["done"] if n] == [18] * 4  # one stack of 3 configurations of 6 steps after the other
    assert Bar.shown["total"] == 72


def clients(alpha: float, seed: int) -> Any:
    x, y = data(120).tensors
    return partition_dirichlet(y, K, alpha=alpha, min_size=4, seed=seed).datasets(TensorDataset(x, y), held_out=0.2)


def test_datasets_that_are_functions_of_axes_are_sent(pool: ProcessPoolExecutor) -> None:
    made = lambda alpha, seed: clients(alpha, seed)  # noqa: E731 - which no job can carry
    settings: dict[str, Any] = {
        "strategy": DiLoCoStrategy("adamw", H=2, lr=0.01), "grid": {"alpha": [0.2, 2.0], "seed": [0, 1]},
        "num_nodes": K, "max_steps": 4, "batch_size": 4, "chunk_configs": 2, "device": "cpu", "progress": False,
    }  # fmt: skip
    model = make_model("MLP", dtype=F64)
    found = sweep(model, made, made, executor=pool, **settings)
    assert str(found.rows) == str(sweep(model, made, made, **settings).rows)


def test_warnings_come_once_to_the_process_that_sweeps(pool: ProcessPoolExecutor) -> None:
    with pytest.warns(VecgymWarning, match="vmap cannot run") as caught:
        run(pool, model=Branching())
    assert ["vmap cannot run" in str(warning.message) for warning in caught].count(True) == 1
    assert caught[0].filename == __file__


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_model("MLP", dtype=F64)

    def forward(self, batch: Any) -> Tensor:
        loss = self.net(batch)
        return loss if loss > 0 else -loss


# ------------------------------------------------------------------------------------------------ what cannot be sent


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"executor": 4}, TypeError, r"executor is of type int; give a concurrent.futures.Executor, such as Process"),
        ({"executor": ProcessPoolExecutor}, TypeError, "executor is the class ProcessPoolExecutor; give a"),
    ],
)
def test_what_is_no_executor(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run(**settings)


def scheduled(factor: float) -> DiLoCoStrategy:
    return DiLoCoStrategy("sgd", H=2, lr=0.1, lr_scheduler=lambda step: factor)


def test_what_pickle_cannot_send_is_its_own_error(pool: ProcessPoolExecutor, tmp_path: pathlib.Path) -> None:
    settings: dict[str, Any] = {"grid": {"factor": [0.5, 1.0]}, "strategy": scheduled}
    with pytest.raises((AttributeError, pickle.PicklingError), match=r"(?i)pickle.*lambda") as caught:
        run(pool, Marked(tmp_path, fail), **settings)
    assert str(caught.value.__cause__) == "in the stack of configurations 0 (factor=0.5), 1 (factor=1.0)"
    assert list(tmp_path.iterdir()) == [], "nothing has begun"


def test_axes_need_not_be_sent(pool: ProcessPoolExecutor) -> None:
    """Objects made by the functions of axes are sent: the functions, and the values, may be lambdas."""
    functions = [lambda: 0.01, lambda: 0.02]
    settings: dict[str, Any] = {"grid": {"f": functions}, "strategy": lambda f: DiLoCoStrategy("sgd", H=2, lr=f())}
    assert_same(run(pool, **settings), run(**settings))


def test_hooks_that_pickle_leaves_out_are_refused(pool: ProcessPoolExecutor) -> None:
    model = make_model("MLP", dtype=F64)
    next(iter(model.parameters())).register_hook(torch.neg)
    with pytest.raises(ValueError, match=r"has a hook on its gradient .* sweep without executor"):
        run(pool, model=model)


def test_forked_workers_with_several_threads_are_refused(pool: ProcessPoolExecutor) -> None:
    """They would hang: OpenMP's threads do not survive a fork."""
    torch.set_num_threads(2)
    with pytest.raises(ValueError, match=r"are forked, .* 2 threads, on cpu. Fix: .*get_context\(\"spawn\"\)"):
        run(pool)


# ------------------------------------------------------------------------------------------------ errors of the user


class Marked(TensorDataset):
    """Does something in the worker that is the `on`-th to begin with it, and notes who began, in a folder."""

    def __init__(self, folder: pathlib.Path, do: Callable[[int], None], on: int | None = 1) -> None:
        super().__init__(*data().tensors)
        self.folder, self.do, self.on, self.parent = folder, do, on, os.getpid()

    def __len__(self) -> int:
        return 60

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if vars(self).get("reading") != os.getpid() and self.armed:
            self.reading = os.getpid()
            if self.on in (self.took_place(), None):
                self.do(self.parent)
        return [tuple(x[i] for x in self.tensors) for i in indices]

    @property
    def armed(self) -> bool:
        return vars(self).get("sent", False)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickled: in a worker, once for each job."""
        vars(self).update({**state, "sent": True})

    def took_place(self) -> int:
        """The number of this worker; two that begin at once have different ones, for a file can be made only once."""
        for place in itertools.count(1):
            with contextlib.suppress(FileExistsError):
                with (self.folder / str(place)).open("x") as file:
                    file.write(str(os.getpid()))
                return place
        raise AssertionError

    def begun(self) -> int:
        return len(list(self.folder.iterdir()))


class Refused(Exception):
    """Pickle cannot make it again."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} is not {b}")


def fail(parent: int) -> None:
    raise KeyError("no such example")


def refuse(parent: int) -> None:
    raise Refused(1, 2)


def die(parent: int) -> None:
    time.sleep(1)  # what was done before has arrived: Dask does it again otherwise
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_error_is_that_of_one_process_and_the_others_are_saved(
    pool: ProcessPoolExecutor, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "begun").mkdir()
    file = tmp_path / "sweep.pt"
    with pytest.raises(KeyError, match="no such example") as caught:
        run(pool, dataset=Marked(tmp_path / "begun", fail, on=4), resume=file)
    where = caught.value.__cause__
    assert where is not None
    assert str(where).startswith("in the stack of configurations ")
    assert "in fail" in str(where.__cause__), "where it was, in the worker"
    saved = runfile.read(file)["sweep"]["curves"]
    assert {curve["status"] for curve in saved.values()} >= {"finished"}
    assert len(saved) >= 6
    executor = Inline()
    second = run(executor, dataset=Marked(tmp_path / "begun", fail, on=4), resume=file)
    assert executor.submitted <= 2, "stacks that ended are not sent again"
    assert_same(second, run())


def test_an_error_that_cannot_be_pickled_comes_back_by_name(pool: ProcessPoolExecutor, tmp_path: pathlib.Path) -> None:
    with pytest.raises(RuntimeError, match="Refused: 1 is not 2"):
        run(pool, dataset=Marked(tmp_path, refuse))
    assert pool.submit(os.getpid).result() > 0, "the pool is not broken"


# ------------------------------------------------------------------------------------------------------- dead workers


@pytest.mark.parametrize(("lost", "named"), [(0, "0 (H=2, lr=0.01, seed=0)"), (3, "8 (H=3, lr=1e+200, seed=0)")])
def test_the_error_of_an_executor_comes_with_the_configurations(lost: int, named: str, tmp_path: pathlib.Path) -> None:
    class Losing(Inline):
        """A job is lost with its worker."""

        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            future = super().submit(fn, *args, **kwargs)
            if self.submitted == lost + 1:
                future = Future()
                future.set_exception(OSError("the worker was killed"))
            return future

    file = tmp_path / "sweep.pt"
    with pytest.raises(OSError, match="the worker was killed") as caught:
        run(Losing(), resume=file)
    assert named in str(caught.value.__cause__)
    assert len(runfile.read(file)["sweep"]["curves"]) == 9, "all others are kept"
    assert_same(run(resume=file), run())


def test_a_broken_pool_names_the_configurations_and_another_goes_on(tmp_path: pathlib.Path) -> None:
    (tmp_path / "begun").mkdir()
    file, dataset = tmp_path / "sweep.pt", Marked(tmp_path / "begun", die, on=3)
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        with pytest.raises(BrokenProcessPool) as caught:
            run(executor, dataset, resume=file)
        assert str(caught.value.__cause__).startswith("in the stack of configurations ")
    assert len(runfile.read(file)["sweep"]["curves"]) == 6
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        assert_same(run(executor, dataset, resume=file), run())
    assert dataset.begun() == 5, "2 that ended, 1 that died, and 2"


def test_a_closed_executor() -> None:
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown") as caught:
        run(executor)
    assert "0 (H=2, lr=0.01, seed=0)" in str(caught.value.__cause__)


# ------------------------------------------------------------------------------------------------------------- Ctrl-C


def interrupt(parent: int) -> None:
    """Ctrl-C in a terminal, where a worker gets it too."""
    os.kill(parent, signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.3)


def interrupt_sweep(parent: int) -> None:
    os.kill(parent, signal.SIGINT)


def test_ctrl_c_saves_what_there_is(pool: ProcessPoolExecutor, tmp_path: pathlib.Path) -> None:
    """A job that hears it ends after its step; one that has not begun is not trained; the rest may come to its end."""
    (tmp_path / "begun").mkdir()
    file, steps = tmp_path / "sweep.pt", {"max_steps": 400, "val_interval": None, "chunk_configs": 2}
    dataset = Marked(tmp_path / "begun", interrupt, on=2)
    begin = time.monotonic()
    with pytest.warns(VecgymWarning, match=r"interrupted: SweepResult\(12 configurations"):
        first = run(pool, dataset, resume=file, **steps)
    assert time.monotonic() - begin < 60
    statuses = [row["status"] for row in first.rows]
    assert statuses.count("interrupted") >= 1
    assert statuses.count("pending") >= 4
    done = {i: row["steps"] for i, row in enumerate(first.rows) if row["status"] == "interrupted"}
    assert all(0 < n < 400 for n in done.values())
    partials = runfile.read(file)["sweep"]["partial"]
    assert sorted(i for each in partials for i in each["left"]) == sorted(done)
    for future in [pool.submit(time.sleep, 0) for _ in range(2)]:
        future.result(30)  # the workers are free


class Interrupting(TensorDataset):
    """Ctrl-C comes while some batch is read."""

    left = -1

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)
        return [tuple(x[i] for x in self.tensors) for i in indices]


@pytest.mark.parametrize("executor", [None, "inline"])
def test_a_sweep_that_was_interrupted_in_several_stacks_goes_on(executor: Any, tmp_path: pathlib.Path) -> None:
    file, dataset, expected = tmp_path / "sweep.pt", Interrupting(*data().tensors), run()

    class Interrupted(Inline):
        """Ctrl-C comes to two jobs, each in a process of its own."""

        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            runner._ended.clear()
            dataset.left = 5 if self.submitted < 2 else -1
            return super().submit(fn, *args, **kwargs)

    with pytest.warns(VecgymWarning, match="interrupted"):
        first = run(Interrupted(), dataset, resume=file)
    assert len(runfile.read(file)["sweep"]["partial"]) == 2
    assert first.num_pending > 0
    assert_same(run(Inline() if executor else None, dataset, resume=file), expected)


def test_ctrl_c_does_not_wait_for_workers_that_do_not_hear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "GRACE_S", 0.5)
    release = threading.Event()

    class Deaf(ThreadPoolExecutor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            return super().submit(release.wait, 60)

    def ctrl_c() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with Deaf(2) as executor:
        timer = threading.Timer(0.5, ctrl_c)
        timer.start()
        with pytest.warns(VecgymWarning, match="interrupted: SweepResult"):
            result = run(executor)
        release.set()
    assert result.num_pending == 12


def test_a_job_that_begins_after_the_sweep_has_ended_trains_nothing() -> None:
    """A pool takes jobs out of the queue before a worker is free, and these cannot be cancelled."""

    class Kept(Inline):
        jobs: list[Any] = []  # noqa: RUF012

        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            self.jobs.append((fn, args))
            return super().submit(fn, *args, **kwargs)

    run(Kept(), max_steps=4)
    for train, args in Kept.jobs:
        assert pickle.loads(train(*args)) == Trained(curves={}, partial=None, engine="", messages=[])


SCRIPT = """
    import signal, sys, torch, multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from tests.test_sweep_executor import run

    torch.set_num_threads(1)
    if __name__ == "__main__":
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as executor:
            executor.submit(int).result()
            print("begin", flush=True)
            print(run(executor, max_steps=100_000, val_interval=None, resume=sys.argv[1]), flush=True)
"""


@pytest.mark.slow  # a program that imports torch, and trains for some seconds
def test_ctrl_c_in_a_terminal(tmp_path: pathlib.Path) -> None:
    """There every process of the group gets it, the workers too."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    with subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "sweep.pt")], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True, env={**os.environ, "PYTHONPATH": os.getcwd()},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "begin\n"
        time.sleep(3)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert out.startswith("SweepResult(12 configurations: "), err
    assert "interrupted" in out
    assert process.returncode == 0
    assert (tmp_path / "sweep.pt").exists()


# -------------------------------------------------------------------------------------------------- the guide's own


def test_the_executors_of_the_guide() -> None:
    """Its classes for submitit and Ray, with stand-ins that have the parts of their interfaces that these use."""
    done: dict[str, Any] = {}

    class AutoExecutor:
        def __init__(self, folder: str) -> None:
            done["folder"] = folder

        def update_parameters(self, **parameters: Any) -> None:
            done.update(parameters)

        def submit(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
            return types.SimpleNamespace(result=lambda: fn(*args, **kwargs))

    class Remote:
        def __init__(self, fn: Any) -> None:
            self.fn = fn

        def options(self, **options: Any) -> Remote:
            done.update(options)
            return self

        def remote(self, *args: Any) -> Any:
            return types.SimpleNamespace(future=lambda: Inline().submit(self.fn, *args))

    names: dict[str, Any] = {
        "submitit": types.SimpleNamespace(AutoExecutor=AutoExecutor), "ray": types.SimpleNamespace(remote=Remote),
        "ThreadPoolExecutor": ThreadPoolExecutor, "concurrent": concurrent,
    }  # fmt: skip
    text = vecgym.guide.sweeps.__doc__ or ""
    for name in ("Slurm", "Ray"):
        block = re.search(rf"^    class {name}\(.*?\n\n    (?=with|ray)", text, re.MULTILINE | re.DOTALL)
        assert block is not None
        exec(textwrap.dedent(block[0].rstrip()), names)
    expected = run()
    with names["Slurm"]("logs", slurm_partition="gpu") as executor:
        assert_same(run(executor), expected)
    assert_same(run(names["Ray"](num_cpus=1)), expected)
    assert done == {"folder": "logs", "slurm_partition": "gpu", "num_cpus": 1}


# --------------------------------------------------------------------------------------------------------------- Dask


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs="CRITICAL"
    ) as made:
        made.wait_for_workers(2)
        yield made


@pytest.fixture
def executor_of_dask(cluster: Any) -> Iterator[Executor]:
    with cluster.get_client() as client:
        yield client.get_executor()


@pytest.mark.slow  # a cluster starts
class TestDask:
    def test_the_same_rows_and_bits(self, executor_of_dask: Executor) -> None:
        assert_same(run(executor_of_dask), run())

    def test_lambdas_are_sent(self, executor_of_dask: Executor) -> None:
        settings: dict[str, Any] = {"grid": {"factor": [0.5, 1.0]}, "strategy": scheduled}
        assert_same(run(executor_of_dask, **settings), run(**settings))

    def test_the_stack_of_a_killed_worker_runs_again_elsewhere(
        self, cluster: Any, executor_of_dask: Executor, tmp_path: pathlib.Path
    ) -> None:
        """Dask itself sends it to another worker, `allowed_failures` times."""
        cluster.scheduler.allowed_failures = 3
        dataset = Marked(tmp_path, die, on=2)
        assert_same(run(executor_of_dask, dataset), run())
        begun = {int(path.name): path.read_text() for path in tmp_path.iterdir()}
        assert sorted(begun) == [1, 2, 3, 4, 5], "4 stacks, one of which began twice"
        assert begun[2] not in {process for place, process in begun.items() if place > 2}

    def test_a_worker_that_dies_every_time(
        self, cluster: Any, executor_of_dask: Executor, tmp_path: pathlib.Path
    ) -> None:
        cluster.scheduler.allowed_failures = 0
        with pytest.raises(Exception, match="died") as caught:
            run(executor_of_dask, Marked(tmp_path, die, on=None), chunk_configs=12)
        assert type(caught.value).__name__ == "KilledWorker"
        assert "0 (H=2, lr=0.01, seed=0)" in str(caught.value.__cause__)
        assert len(list(tmp_path.iterdir())) == 1

    def test_an_error_of_the_user(self, executor_of_dask: Executor, tmp_path: pathlib.Path) -> None:
        with pytest.raises(KeyError, match="no such example"):
            run(executor_of_dask, Marked(tmp_path, fail))

    def test_ctrl_c(self, executor_of_dask: Executor, tmp_path: pathlib.Path) -> None:
        """A job under way is left to itself."""
        begin = time.monotonic()
        with pytest.warns(VecgymWarning, match=r"interrupted: SweepResult"):
            result = run(executor_of_dask, Marked(tmp_path, interrupt_sweep), max_steps=500, val_interval=None)
        assert time.monotonic() - begin < 60
        assert "pending" in {row["status"] for row in result.rows}
        assert executor_of_dask.submit(int).result(60) == 0
