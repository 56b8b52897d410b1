"""On a GPU: the results of the CPU, and no step that waits.

Skipped where there is none. `VECGYM_TEST_DEVICE=cpu pytest tests/test_cuda.py` runs what does not need one, so that a
mistake in these tests themselves is found without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import helpers
from tests.fitting import STRATEGIES, dataset, fit, same, same_run
from tests.helpers import NEEDS_LOOP, assert_close
from tests.models import MODELS, RANDOM, make_model
from tests.test_no_waits import MORE
from tests.test_properties import NAMES, H, make, run, setup
from vecgym import Trainer, estimate_memory, rollout, sweep
from vecgym.core import tree
from vecgym.engine import Engine
from vecgym.strategy import DiLoCoStrategy

DEVICE = os.environ.get("VECGYM_TEST_DEVICE", "cuda")
CUDA = DEVICE == "cuda"
K = 4

pytestmark = pytest.mark.skipif(CUDA and not torch.cuda.is_available(), reason="there is no GPU")
on_cuda = pytest.mark.skipif(not CUDA, reason="is of CUDA alone")


def there(values: Any) -> Any:
    return tree.map_leaves(lambda x: x.to(DEVICE), values)


def home(values: Any) -> Any:
    return tree.map_leaves(lambda x: x.cpu(), values)


def state_of(found: helpers.Run) -> Any:
    return home(helpers.flat(found.state))


@pytest.mark.parametrize("name", NAMES)
def test_strategies_train_as_on_the_cpu(name: str) -> None:
    start, batches = setup("MLP", steps=H + 3)
    expected = run(start, make(name), batches, engine="vmap")
    found = run(start.to(DEVICE), make(name), there(batches), engine="vmap")
    assert found.losses.device.type == DEVICE
    assert_close(found.losses.cpu(), expected.losses, 1e-9, "losses")
    assert_close(state_of(found), state_of(expected), 1e-9, "state")


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("model", [name for name in MODELS if name not in RANDOM])
def test_models_train_as_on_the_cpu(model: str, engine: str) -> None:
    if model in NEEDS_LOOP and engine != "loop":
        pytest.skip("vmap cannot run it")
    start, batches = setup(model, steps=H + 1)
    expected = run(start, make("diloco"), batches, engine="loop")
    found = run(start.to(DEVICE), make("diloco"), there(batches), engine=engine)
    assert_close(found.losses.cpu(), expected.losses, 1e-8, "losses")


@on_cuda
@pytest.mark.parametrize("name", ["MLP", "CNN", "GPT"])
def test_compiled_gradients_are_those_of_vmap(name: str) -> None:
    start, batches = setup(name, steps=H + 1)
    start, batches = start.to(DEVICE), there(batches)
    expected, found = (run(start, make("diloco"), batches, compile=compile) for compile in (False, True))
    assert_close(found.losses, expected.losses, 1e-9, "losses")


@pytest.fixture
def _no_waiting() -> Iterator[None]:
    yield
    if CUDA:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("_no_waiting")
@pytest.mark.parametrize("name", [*NAMES, *MORE])
def test_a_step_does_not_wait(name: str) -> None:
    """CUDA itself raises an error where it would."""
    start, batches = setup("MLP", num_nodes=K, steps=2 * H + 1)
    strategy = MORE[name]() if name in MORE else make(name)
    batches = there(batches)
    simulation = helpers.simulation(
        start.to(DEVICE), strategy, batches, engine="vmap", num_examples=tuple(range(1, K + 1))
    )
    state = simulation.init()
    for step, batch in enumerate(batches):
        if CUDA and step == H:  # what is made once has been made
            torch.cuda.set_sync_debug_mode("error")
        state, _ = simulation.step(state, batch)


def once(strategy: str, device: str = DEVICE, **settings: Any) -> Trainer:
    data, val = (dataset("CNN", n, seed, dtype=torch.float64) for n, seed in ((40, 0), (6, 1)))
    settings = {"max_steps": 9, "val_interval": 3, "device": device, **settings}
    return fit(make_model("CNN", dtype=torch.float64), strategy, num_nodes=K, data=data, val=val, **settings)[0]


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_whole_runs(strategy: str) -> None:
    found, expected = once(strategy), once(strategy, device="cpu")
    for column in ("train_loss", "val_loss"):
        np.testing.assert_allclose(
            found.history.series(column)[1], expected.history.series(column)[1], rtol=0, atol=1e-8
        )
    assert found.history.series("bytes_total")[1][-1] == expected.history.series("bytes_total")[1][-1]


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint_interval": 3, "save_dir": tmp_path}
    once("FedAvg", max_steps=6, **options)
    resumed = once("FedAvg", resume=True, **options)
    assert same_run(resumed, once("FedAvg"))


def test_sweeps_are_their_single_runs() -> None:
    data, rates = dataset("MLP", 40, dtype=torch.float64), [0.01, 0.1]
    common: dict[str, Any] = {"max_steps": 5, "batch_size": 4, "device": DEVICE, "progress": False}
    found = sweep(
        make_model("MLP", dtype=torch.float64), data, strategy=lambda lr: DiLoCoStrategy("sgd", lr=lr, H=2),
        grid={"lr": rates}, num_nodes=K, **common,
    )  # fmt: skip
    for index, lr in enumerate(rates):
        strategy = DiLoCoStrategy("sgd", lr=lr, H=2)
        alone = fit("MLP", strategy, num_nodes=K, data=data, dtype=torch.float64, **common)[0]
        ours, theirs = found.history(index).series("train_loss")[1], alone.history.series("train_loss")[1]
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9)


def test_gradients_of_rollouts() -> None:
    def gradient(device: str) -> torch.Tensor:
        start, batches = setup("MLP", num_nodes=K, steps=4)
        lr = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
        batches = tree.map_leaves(lambda x: x.to(device), batches)
        examples = tree.map_leaves(lambda x: x[0], batches[0])
        strategy = DiLoCoStrategy("sgd", lr=lr, H=2)
        found = rollout(start.to(device), strategy, batches, num_nodes=K, eval_batch=examples)
        (slope,) = torch.autograd.grad(found.loss, lr)
        return slope

    assert abs(gradient(DEVICE) - gradient("cpu")) < 1e-9


def test_bfloat16_under_autocast() -> None:
    trainer = once("DiLoCo", autocast=True)
    assert np.isfinite(trainer.history.series("train_loss")[1]).all()


@on_cuda
def test_memory_that_is_measured() -> None:
    trainer = once("DiLoCo", max_memory_usage=0.5)
    assert "measured" in str(trainer.history.settings["memory"])
    data = dataset("CNN", 40)
    estimate = estimate_memory(make_model("CNN"), DiLoCoStrategy("sgd", lr=0.1), 64, batch_size=16, data=data)
    model, batch = make_model("CNN").to(DEVICE), there(tuple(x[None].expand(64, *x.shape) for x in data[:16]))
    engine = Engine(model)
    engine.prepare(batch)
    params = {n: p.detach()[None].repeat(64, *[1] * p.dim()) for n, p in engine.params.items()}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    engine.gradients(params, {n: b[None] for n, b in engine.buffers.items()}, batch, seed=0, step=0)
    used = torch.cuda.max_memory_allocated() - before
    counted = sum(estimate.parts[part].total_bytes for part in ("gradients", "activations", "buffers"))
    assert 0.5 < counted / used < 2, "cuDNN takes memory of its own"


def test_parameters_are_left_on_the_device() -> None:
    trainer = once("FedAvg")
    assert {p.device.type for p in trainer.nodes.params.values()} == {DEVICE}
    assert same(home(trainer.nodes.params), home(once("FedAvg").nodes.params)), "the same bits in every run"
