"""Sweeps of asynchronous strategies: rows, curves, files and errors are those of single runs."""

from __future__ import annotations

import multiprocessing
import pathlib
import re
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.models import make_data, make_model
from vecgym import DivergenceError, SweepResult, Trainer, VecgymWarning, sweep
from vecgym.availability import Dropout, Sampled
from vecgym.clock import Compute, Network
from vecgym.models import Classifier
from vecgym.records.columns import MEASURED
from vecgym.strategy import (
    MLA,
    ADPSGDStrategy,
    AsyncStrategy,
    DecoupledDiLoCoStrategy,
    DelayedNesterov,
    DiLoCoStrategy,
    FedBuff,
    HALoSStrategy,
    HeLoCo,
    OptimSpec,
    OuterOptimizer,
    Server,
    Strategy,
)

# The seeds of the sweeps here are those of the data, on purpose, and two are enough.
pytestmark = pytest.mark.filterwarnings("ignore:the seeds do not vary", "ignore:2 seeds are few")

F64 = torch.float64
K = 3
COMPUTE = Compute.lognormal([1.0, 2.0, 1.5], sigma=0.3)
NETWORK = Network(1e6, 0.1)


def data(kind: str = "MLP", num_examples: int = 60, seed: int = 0) -> Any:
    made = make_data(kind, num_examples, seed, F64)
    return TensorDataset(*made) if isinstance(made, tuple) else made


def run(strategy: Any = None, grid: Any = None, kind: str = "MLP", **settings: Any) -> SweepResult:
    default: dict[str, Any] = {
        "num_nodes": K, "max_updates": 7, "batch_size": 4, "val_interval": 3, "compute": COMPUTE, "device": "cpu",
        "progress": False, "keep_models": True,
    }  # fmt: skip
    return sweep(
        make_model(kind, dtype=F64), data(kind), data(kind, 10, seed=1),
        strategy=given if strategy is None and "strategy" not in (grid or {}) else strategy,
        grid={"lr": [0.01, 0.02]} if grid is None else grid, **{**default, **settings},
    )  # fmt: skip


def given(lr: float = 0.02, outer_lr: float = 0.3, **settings: Any) -> AsyncStrategy:
    return AsyncStrategy("adamw", OuterOptimizer(lr=outer_lr), H=2, lr=lr, **settings)


def run_alone(result: SweepResult, index: int, kind: str = "MLP", **settings: Any) -> tuple[Trainer[Any], nn.Module]:
    """`Trainer.fit` of one row."""
    config = result._config(index)
    trainer = Trainer(config.model, data(kind), data(kind, 10, seed=1))
    own = {**{"val_interval": 3, "device": "cpu", "progress": False, "network": config.network}, **config.settings}
    averaged = trainer.fit(config.strategy, **{**own, "compute": config.compute, **settings})
    return trainer, averaged


def plain(row: dict[str, Any], skipped: tuple[str, ...] = MEASURED) -> dict[str, Any]:
    """All of a row but the time that it took here, with every digit; nan equal to nan."""
    return {n: repr(x.tolist() if hasattr(x, "tolist") else x) for n, x in row.items() if n not in skipped}


def check_row(result: SweepResult, index: int, kind: str = "MLP", **settings: Any) -> None:
    """The run of it alone; its very bits where it was in no stack with others."""
    trainer, averaged = run_alone(result, index, kind, **settings)
    found, expected = result.history(index).rows, trainer.history.rows
    chunk = next(chunk for program in result._runner.programs for chunk in program.chunks if index in chunk)
    assert [set(row) for row in found] == [set(row) for row in expected]
    if len(chunk) == 1:
        assert [plain(row) for row in found] == [plain(row) for row in expected]
    for ours, theirs in zip(found, expected):
        for name in set(ours) - set(MEASURED):
            wanted = None if theirs[name] is None else pytest.approx(theirs[name], rel=1e-10, nan_ok=True)
            assert ours[name] == wanted, (theirs["step"], name)
    for name, x in averaged.state_dict().items():
        torch.testing.assert_close(result.model(index).state_dict()[name], x, rtol=1e-10, atol=1e-10)
        assert len(chunk) > 1 or torch.equal(result.model(index).state_dict()[name], x), name
    last, row = trainer.history.rows[-1], result.rows[index]
    for name in ("sim_seconds", "version", "staleness", "staleness_max", "num_arrived", "local_steps_total",
                 "train_loss", "val_loss", "bytes_total"):  # fmt: skip
        wanted = last.get(name)
        assert row[name] == (None if wanted is None else pytest.approx(wanted, rel=1e-10)), name
    assert (row["status"], row["steps"]) == ("finished", last["step"])


class Follow(Server):
    """A server of one's own."""

    def update(self, params: Any, movement: Any, state: Any, update: int, inplace: bool = False) -> Any:
        return {name: p - 0.5 * movement[name] for name, p in params.items()}, state


# ----------------------------------------------------------------------------------------------------- single runs


def test_configurations_in_which_nodes_are_absent_are_their_fits() -> None:
    """Each by itself, drawn by its seed and on its nodes."""
    result = run(grid={"seed": [0, 1]}, availability=Dropout(0.4, 3))
    assert result.history(0)["sim_seconds"] != result.history(1)["sim_seconds"]
    for index in range(2):
        check_row(result, index)


SERVERS: dict[str, Callable[[float], Any]] = {
    "outer": lambda lr: AsyncStrategy("adamw", OuterOptimizer(lr=0.3), H=2, lr=lr),
    "fedbuff": lambda lr: AsyncStrategy("sgd", FedBuff(2, lr=0.5), H=2, lr=lr, max_wait=1.0),
    "nesterov": lambda lr: AsyncStrategy("sgd", DelayedNesterov(0.2), dylu=True, H=4, lr=lr, staleness="inverse_sqrt"),
    "mla": lambda lr: AsyncStrategy("sgd", MLA(0.2), H=2, lr=lr, buffer=2),
    "heloco": lambda lr: AsyncStrategy("adamw", HeLoCo(0.1), local_steps=[3, 1, 2], lr=lr, lr_scheduler="cosine"),
}


@pytest.mark.parametrize("name", SERVERS)
def test_a_row_is_the_run_of_it_alone(name: str) -> None:
    result = run(SERVERS[name], network=NETWORK)
    for index in range(2):
        check_row(result, index)


@pytest.mark.parametrize("kind", ["CNN", "Dropout", "WithFrozen"])
@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_models_of_all_kinds(kind: str, engine: str) -> None:
    result = run(grid={"lr": [0.01]}, kind=kind, engine=engine)
    check_row(result, 0, kind, engine=engine)


@pytest.mark.parametrize("settings", [
    {"max_updates": None, "max_steps": 6}, {"max_updates": None, "num_epochs": 2}, {"max_seconds": 9.0},
    {"max_updates": None, "max_seconds": 9.0}, {"max_updates": 5, "max_steps": 4}, {"minibatch_size": 2},
    {"val_size": 0}, {"shuffle": False, "seed": 5},
])  # fmt: skip
def test_settings_of_fit(settings: dict[str, Any]) -> None:
    result = run(grid={"lr": [0.01]}, **settings)
    alone = {name: x for name, x in settings.items() if name in ("val_size",)}
    check_row(result, 0, **alone)


def test_updates_and_seconds_may_be_axes() -> None:
    result = run(given(), {"max_updates": [3, 5], "max_seconds": [4.5, 100.0]})
    assert [row["version"] for row in result.rows] == [3, 3, 3, 5]
    for index in range(4):
        check_row(result, index)
    assert all(row["sim_seconds"] <= row["max_seconds"] for row in result.rows)


def test_networks_and_computes_are_axes_on_which_each_is_trained() -> None:
    computes = {"equal": Compute(1.0), "unequal": COMPUTE}
    networks = {"near": Network(1e9), "far": NETWORK}
    result = run(grid={"lr": [0.01, 0.02]}, compute=computes, network=networks)
    assert result.axes == ["lr", "network", "compute"]
    assert [(row["network"], row["compute"]) for row in result.rows[:4]] == [
        ("near", "equal"), ("near", "unequal"), ("far", "equal"), ("far", "unequal")
    ]  # fmt: skip
    for index in range(8):
        check_row(result, index)
    assert len({row["sim_seconds"] for row in result.rows[:4]}) == 4
    assert result.best("sim_seconds", over=None)["network"] == "near"


def test_a_mixed_sweep() -> None:
    """Synchronous configurations are priced on each network, asynchronous ones trained on it."""
    grid = {"strategy": [DiLoCoStrategy("adamw", H=2, lr=0.02), given(), DiLoCoStrategy("adamw", H=3, lr=0.02)]}
    networks = {"near": Network(1e9), "far": NETWORK}
    result = run(None, grid, network=networks, max_steps=8)
    assert [row["network"] for row in result.rows] == ["near", "far"] * 3
    assert len({tuple(row) for row in result.rows}) == 1, "all rows have the same columns"
    assert [row["version"] for row in result.rows] == [None, None, 7, 7, None, None]
    assert all(row["sim_seconds"] > 0 for row in result.rows)
    for index in (2, 3):
        check_row(result, index)
    assert len(result.history(5)["train_loss"]) == 9
    without = run(None, grid, max_steps=8)
    assert [row["sim_seconds"] is None for row in without.rows] == [True, False, True]
    assert [row["val_loss"] for row in without.rows][::2] == [row["val_loss"] for row in result.rows][::4]


OTHERS: dict[str, Callable[[float], Strategy]] = {
    "halos": lambda lr: HALoSStrategy("adamw", 2, H=2, lr=lr, local_updates=2, between=(1e6, 0.1)),
    "ad-psgd": lambda lr: ADPSGDStrategy("adamw", "ring", lr=lr),
    "decoupled": lambda lr: DecoupledDiLoCoStrategy("adamw", quorum=2, fragments=2, H=4, lr=lr, lr_scheduler="cosine"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_strategies_that_go_by_events_are_trained_one_after_the_other(name: str) -> None:
    result = run(OTHERS[name], network=NETWORK)
    assert f"{type(OTHERS[name](0.1)).__name__}: each by itself" in result.explain()
    for index in range(2):
        check_row(result, index)
    assert result.rows[0]["val_loss"] != result.rows[1]["val_loss"]


def test_all_kinds_in_one_sweep() -> None:
    grid: dict[str, Any] = {
        "strategy": [DiLoCoStrategy("adamw", H=2), given(), *(make(0.02) for make in OTHERS.values())]
    }
    result = run(None, grid, max_steps=8)
    assert [row["status"] for row in result.rows] == ["finished"] * 5
    for index in range(1, 5):
        check_row(result, index)


def test_explained_and_not_trained() -> None:
    grid = {"strategy": [given(), given(0.01), DiLoCoStrategy("adamw", H=2)]}
    result = run(None, grid, max_steps=8, dry_run=True)
    first, asynchronous, synchronous, why = result.explain().splitlines()
    assert first == "3 configurations in 2 programs:"
    assert re.match(r"program 0: 2 configurations, num_nodes=3, batch_size=4, 7 updates, MLP, AsyncStrategy;",
                    asynchronous)  # fmt: skip
    assert "1 stack (all in one stack)" in asynchronous
    assert "8 steps" in synchronous
    assert "another plan (what happens when)" in why
    assert {row["status"] for row in result.rows} == {"pending"}


# ------------------------------------------------------------------------------------------------------------- grids

Make = Callable[..., AsyncStrategy]
GRIDS: dict[str, tuple[Make, dict[str, Any]]] = {
    "rates": (given, {"lr": [0.01, 0.02], "outer_lr": [0.1, 0.3], "seed": [0, 1]}),
    "servers": (
        lambda server, lr: AsyncStrategy("sgd", server, H=2, lr=lr, max_norm=1.0),
        {"server": [OuterOptimizer(lr=0.3), HeLoCo(0.1), DelayedNesterov(0.2), OuterOptimizer("adam", lr=0.01),
                    DelayedNesterov(0.1, 0.5, c=0.2), HeLoCo(0.2, 0.5), Follow(), DelayedNesterov(0.1, buffer=2),
                    MLA(0.1), MLA(0.3, 0.5)],
         "lr": [0.01, 0.05]},
    ),
    "staleness": (
        lambda staleness, server_lr: AsyncStrategy("adamw", FedBuff(2, server_lr), H=2, lr=0.02, staleness=staleness)
        if staleness == "inverse_sqrt"
        else AsyncStrategy("adamw", OuterOptimizer(lr=server_lr), H=2, lr=0.02, staleness=staleness, buffer=2),
        {"staleness": ["none", "inverse_sqrt", lambda s: 0.5**s, lambda s: torch.tensor(0.7) ** s],
         "server_lr": [0.1, 0.3]},
    ),
    "rounds of unequal length, schedules": (
        lambda lr, warmup, optim: AsyncStrategy(optim, OuterOptimizer(lr=0.3), local_steps=[3, 1, 2], lr=lr,
                                                lr_scheduler="cosine", warmup_steps=warmup),
        {"lr": [0.01, 0.02], "warmup": [0, 4], "optim": ["adamw", "sgd"]},
    ),
    "optimizers that cannot be one": (
        lambda optim: AsyncStrategy(optim, OuterOptimizer(lr=0.3), H=2, dylu=True, max_wait=2.0),
        {"optim": ["adamw", OptimSpec(torch.optim.ASGD, lr=0.01), OptimSpec("sgd", lr=torch.tensor([0.1, 0.02, 0.05])),
                   "lion", OptimSpec("sgd", lr=0.01, momentum=0.9)]},
    ),
    "windows": (
        lambda lr, max_wait, grace: given(lr, max_wait=max_wait, grace=grace),
        {"lr": [0.01, 0.02], "max_wait": [0.5, np.inf], "grace": ["full", "until_last"]},
    ),
    "thresholds": (
        lambda lr, R: given(lr, delay_threshold=R), {"lr": [0.01, 0.02], "R": [None, 1, 2]},
    ),
    "one by one": (
        lambda lr, together: given(lr, together=together), {"lr": [0.01, 0.02], "together": [True, False]},
    ),
}  # fmt: skip


SIZES = {"rates": {8}, "servers": {1, 2, 4}, "staleness": {2}, "rounds of unequal length, schedules": {2},
         "optimizers that cannot be one": {1}, "windows": {2}, "thresholds": {2},
         "one by one": {2}}  # fmt: skip


@pytest.mark.parametrize("name", GRIDS)
def test_every_row_is_the_run_of_it_alone(name: str) -> None:
    make, grid = GRIDS[name]
    result = run(make, grid, network=NETWORK, max_updates=9)
    sizes = {len(chunk) for program in result._runner.programs for chunk in program.chunks}
    assert sizes == SIZES[name], result.explain()
    for index in range(len(result)):
        check_row(result, index)


def test_models_that_are_made() -> None:
    def make(width: int, start: int) -> nn.Module:
        torch.manual_seed(start)
        return Classifier(
            nn.Sequential(nn.Linear(16, width, bias=False), nn.BatchNorm1d(width), nn.Linear(width, 10))
        ).to(F64)

    result = sweep(
        make, data(), data("MLP", 10, seed=1), strategy=given(), grid={"width": [4, 8], "start": [0, 1]}, num_nodes=K,
        max_updates=6, batch_size=4, val_interval=3, compute=COMPUTE, device="cpu", progress=False, keep_models=True,
    )  # fmt: skip
    assert len(result._runner.programs) == 2
    for index in range(4):
        check_row(result, index)


@pytest.mark.parametrize("settings", [{"engine": "loop"}, {"chunk_configs": 3}, {"chunk_size": 2}])
def test_settings_of_sweeps(settings: dict[str, Any]) -> None:
    result = run(grid={"lr": [0.01, 0.02], "seed": [0, 1]}, **settings)
    alone = {name: x for name, x in settings.items() if name != "chunk_configs"}
    for index in range(4):
        check_row(result, index, **alone)


def test_figures_and_tables(tmp_path: pathlib.Path) -> None:
    result = run(lambda lr, H: AsyncStrategy("adamw", OuterOptimizer(lr=0.3), H=H, lr=lr),
                 {"lr": [0.01, 0.02], "H": [1, 2], "seed": [0, 1]})  # fmt: skip
    assert "local_steps_total" in result.to_pandas().columns
    result.to_csv(tmp_path / "rows.csv")
    assert "staleness_max" in (tmp_path / "rows.csv").read_text()
    best = result.best("val_loss")
    assert best["runs"] == 2
    assert best["sim_seconds"] == result.rows[0]["sim_seconds"] or best["H"] == 2
    assert result.plot_pareto(hue="H", x="sim_seconds").axes[0].get_xlabel() == "simulated seconds"
    assert result.plot("H", "staleness", hue="lr").axes[0].get_ylabel() == "staleness"
    assert "| local_steps_total |" in result.table().splitlines()[0]


# ------------------------------------------------------------------------------------------ when something goes wrong


def test_a_configuration_that_diverges_ends() -> None:
    result = run(grid={"lr": [0.01, 0.02], "outer_lr": [0.3, 1e200]}, max_updates=9)
    assert [row["status"] for row in result.rows] == ["finished", "diverged"] * 2
    for index in (1, 3):
        with pytest.raises(DivergenceError) as caught:
            run_alone(result, index)
        assert result.rows[index]["steps"] == caught.value.step + 1 < 9
        assert not np.isfinite(result.rows[index]["train_loss"])
    for index in (0, 2):
        check_row(result, index)


class Interrupting(TensorDataset):
    """Ctrl-C comes while some batch is read."""

    left = -1

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)
        return [tuple(x[i] for x in self.tensors) for i in indices]


def buffered(lr: float, outer_lr: float) -> AsyncStrategy:
    return given(lr, outer_lr, buffer=2)


def kept(path: pathlib.Path | None, after: int = -1, **settings: Any) -> SweepResult:
    dataset = Interrupting(*data().tensors)
    dataset.left = after
    default = {
        "strategy": buffered, "grid": {"lr": [0.01, 0.02], "outer_lr": [0.3, 1e200]}, "max_updates": 9,
        "compute": COMPUTE, "network": NETWORK,
    }  # fmt: skip
    return sweep(
        make_model("MLP", dtype=F64), dataset, data("MLP", 10, seed=1), resume=path, num_nodes=K, batch_size=4,
        val_interval=2, device="cpu", progress=False, keep_models=True, **{**default, **settings},
    )  # fmt: skip


@pytest.mark.parametrize("after", [8, 30])
@pytest.mark.parametrize("name", OTHERS)
def test_others_are_resumed(name: str, after: int, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "sweep.pt"
    given: dict[str, Any] = {"strategy": OTHERS[name], "grid": {"lr": [0.01, 0.02]}}
    with pytest.warns(VecgymWarning, match="interrupted: SweepResult"):
        kept(path, after, **given)
    assert_same(kept(path, **given), kept(None, **given))


@pytest.mark.parametrize("after", [8, 12, 20])
def test_interrupted_and_resumed(after: int, tmp_path: pathlib.Path) -> None:
    """Ctrl-C keeps what there is; the same call goes on from the file, to the same bits."""
    path = tmp_path / "sweep.pt"
    with pytest.warns(VecgymWarning, match="interrupted: SweepResult"):
        first = kept(path, after)
    assert {row["status"] for row in first.rows} & {"interrupted", "pending"}
    second, whole = (kept(x) for x in (path, None))
    assert_same(second, whole)
    assert [row["status"] for row in whole.rows] == ["finished", "diverged"] * 2


def assert_same(found: SweepResult, expected: SweepResult) -> None:
    """The same rows in the same order, and the same bits of every curve and model."""
    assert str(found.rows) == str(expected.rows)
    assert found.explain() == expected.explain()
    for i, row in enumerate(expected.rows):
        one, other = ([plain(row) for row in result.history(i).rows] for result in (found, expected))
        assert one == other
        if row["status"] == "finished":
            states = [result.model(i).state_dict() for result in (found, expected)]
            assert all(torch.equal(x, states[1][name]) for name, x in states[0].items())


@pytest.mark.parametrize(("settings", "what"), [
    ({"compute": Compute([1.0, 2.0, 1.0])}, "compute"), ({"network": Network(1e6, 0.2)}, "network"),
    ({"max_updates": 8}, "max_updates"),
])  # fmt: skip
def test_another_sweep_is_refused(settings: dict[str, Any], what: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "sweep.pt"
    kept(path)
    with pytest.raises(ValueError, match=rf"holds another sweep:\n  {what}"):
        kept(path, **settings)


def test_on_an_executor() -> None:
    torch.set_num_threads(1)
    grid = {"lr": [0.01, 0.02], "outer_lr": [0.3, 1e200]}
    here = run(grid=grid, network=NETWORK)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as executor:
        there = run(grid=grid, network=NETWORK, executor=executor)
    assert_same(there, here)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"compute": None}, ValueError, "AsyncStrategy needs compute="),
    ({"compute": Compute([1.0, 2.0])}, ValueError, "Compute has seconds for 2 nodes and the run has 3"),
    ({"network": Network([1e6, 1e6])}, ValueError, "the network has 2 nodes and the run has 3"),
    ({"compute": 0.4}, TypeError, "compute is of type float; give a vecgym.clock.Compute"),
    ({"compute": {}}, ValueError, "compute is an empty dict"),
    ({"max_updates": 0}, ValueError, "max_updates=0 must be an integer >= 1"),
    ({"max_seconds": 0.1}, ValueError, "max_seconds=0.1 ends the run before the first update"),
    ({"max_seconds": -1.0}, ValueError, "max_seconds=-1.0 must be"),
    ({"availability": Sampled(0.5, 2)}, ValueError, "go on with what they have when they return"),
    ({"compile": True}, ValueError, "AsyncStrategy does not support compile=True"),
    ({"strategy": DiLoCoStrategy(), "grid": {"seed": [0]}, "compute": None}, ValueError,
     "max_updates ends asynchronous runs of a sweep only, and DiLoCoStrategy is synchronous"),
    ({"strategy": DiLoCoStrategy(), "grid": {"max_seconds": [1.0]}, "compute": None, "max_updates": None}, ValueError,
     "max_seconds ends asynchronous runs of a sweep only"),
    ({"strategy": DiLoCoStrategy(), "grid": {"seed": [0]}, "max_updates": None}, ValueError, "give both"),
    ({"strategy": given(local_steps=[1, 2]), "grid": {"seed": [0]}}, ValueError, "local_steps is for 2 nodes"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "error", "message"), BAD, ids=[message[:30] for _, _, message in BAD])
def test_bad_input(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        run(**settings)


def test_an_asynchronous_sweep_has_the_seconds_that_it_was_trained_for() -> None:
    with pytest.raises(ValueError, match="sweep again, with network= and compute="):
        run(dry_run=True).price(NETWORK, COMPUTE)
