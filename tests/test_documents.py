"""The promises of the five documents (EXO Gym's four, diloco-sim's one), row by row, with "exogym" read as "vecgym".

What a document leaves open (model, data, number of steps) is small here. The table "The documents' features" of
`vecgym.guide.compat` names the test that shows each row, or says why there is none; the last tests compare the two.
"""

from __future__ import annotations

import ast
import copy
import math
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, DistributedSampler, TensorDataset

import vecgym
from tests.fitting import alone, dataset, params
from tests.models import MLP, make_data, make_model
from vecgym import CSVLogger, DivergenceError, LocalTrainer, Logger, OptimSpec, Trainer, VecgymWarning
from vecgym.compat import exogym
from vecgym.compat.diloco_sim import DilocoSimulator, EvalStats, TrainStats
from vecgym.data import Batches
from vecgym.runs.options import resolve_device
from vecgym.strategy import (
    AllReduceStrategy,
    AveragingCommunicator,
    CommunicateOptimizeStrategy,
    DeMoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    PartitionedSelector,
    RandomSelector,
    ShuffledSequentialSelector,
    SimpleReduceStrategy,
    SparseCommunicator,
    SPARTAStrategy,
    Strategy,
    all_reduce,
)
from vecgym.strategy.exchange import Exchange
from vecgym.strategy.stages import Average

ROOT = Path(__file__).parent.parent
QUIET: dict[str, Any] = {"progress": False, "device": "cpu"}
NUM_PARAMETERS = sum(p.numel() for p in make_model("MLP").parameters())


@pytest.fixture
def trainer() -> LocalTrainer:
    train_dataset, val_dataset = dataset("MLP", 640), dataset("MLP", 20, seed=1)
    return LocalTrainer(make_model("MLP"), train_dataset, val_dataset)


def all_reduce_bytes(num_nodes: int, parameters: int = NUM_PARAMETERS) -> float:
    """Bytes that a node sends in one all-reduce of float32 parameters."""
    return 2 * (num_nodes - 1) / num_nodes * 4 * parameters


# ====================================================================================== 000: the README of EXO Gym

# --------------------------------------------------------------------------------------------- Supported Devices


@pytest.mark.parametrize(
    ("cuda", "mps", "best"), [(True, True, "cuda"), (True, False, "cuda"), (False, True, "mps"), (False, False, "cpu")]
)
def test_the_best_device_present_is_taken(monkeypatch: pytest.MonkeyPatch, cuda: bool, mps: bool, best: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(cuda))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert resolve_device(None).type == best
    for name, there in (("cuda", cuda), ("mps", mps), ("cpu", True)):
        if there:
            assert resolve_device(name).type == name
        else:
            with pytest.raises(ValueError, match=f"device='{name}' is not available; present: .*cpu"):
                resolve_device(name)


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_device(device: str, trainer: LocalTrainer) -> None:
    """The error about a missing device comes before anything else, and names the devices that are there."""
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    strategy = DiLoCoStrategy("adam", H=2)
    if not present[device]:
        with pytest.raises(ValueError, match=f"device='{device}' is not available; present: "):
            trainer.fit(strategy=strategy, num_nodes=4, device=device)
        return
    trainer.fit(strategy=strategy, num_nodes=4, device=device, max_steps=4, progress=False)
    assert {x.device.type for x in trainer.nodes.params.values()} == {device}


# --------------------------------------------------------------------------------------------- Supported Methods


@pytest.mark.parametrize("name", ["AllReduce", "FedAvg", "DiLoCo", "SPARTA", "DeMo"])
def test_supported_methods(name: str, trainer: LocalTrainer) -> None:
    strategy = getattr(vecgym.strategy, f"{name}Strategy")()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", VecgymWarning)  # DiLoCo's H = 100
        trainer.fit(strategy, 2, max_steps=3, val_size=0, **QUIET)
    assert trainer.state is not None
    assert trainer.state.step == 3
    assert {entry.step for entry in trainer.ledger} == (set() if name == "DiLoCo" else {0, 1, 2})


def test_all_reduce_is_ddp() -> None:
    """Two nodes with batches of 4 are one model with batches of 8."""
    data = TensorDataset(*make_data("MLP", 24, dtype=torch.float64))
    trainer = Trainer(make_model("MLP", dtype=torch.float64), data)
    spec = OptimSpec(torch.optim.SGD, lr=0.1, momentum=0.9)
    averaged = trainer.fit(AllReduceStrategy(spec), 2, batch_size=4, shuffle=False, **QUIET)
    plain = make_model("MLP", dtype=torch.float64)
    optimizer = spec.build(plain)
    for batch in zip(*[x.split(8) for x in data.tensors]):
        optimizer.zero_grad()
        plain(batch).backward()
        optimizer.step()
    for p, q in zip(averaged.parameters(), plain.parameters()):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------------------- Example Usage


def test_readme_example(trainer: LocalTrainer) -> None:
    strategy = DiLoCoStrategy(
      inner_optim='adam',
      H=100
    )  # fmt: skip
    trainer.fit(
      strategy=strategy,
      num_nodes=4,
      **{**QUIET, "max_steps": 100},
    )  # fmt: skip
    assert strategy.inner_optim.cls is torch.optim.Adam
    assert [entry.step for entry in trainer.ledger] == [99]  # the outer step follows the 100th optimizer step


def test_local_trainer_takes_keywords_and_positions() -> None:
    model, train, val = make_model("MLP"), dataset("MLP"), dataset("MLP", 4)
    for made in (LocalTrainer(model, train, val), LocalTrainer(model=model, train_dataset=train, val_dataset=val)):
        assert (made.model, made.train_dataset, made.val_dataset) == (model, train, val)
    assert Trainer(model, train).val_dataset is None
    assert issubclass(LocalTrainer, Trainer)


def test_a_documented_run_is_silent(trainer: LocalTrainer, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.fit(strategy=DiLoCoStrategy("adamw", H=5, lr=1e-3), num_nodes=4, max_steps=10, **QUIET)
    assert capfd.readouterr() == ("", "")


IMPORTS = """
from exogym import LocalTrainer
from exogym.strategy import DiLoCoStrategy
from exogym.strategy import FedAvgStrategy
from exogym.strategy import SPARTAStrategy
from exogym.strategy import DeMoStrategy
from exogym.strategy import CommunicateOptimizeStrategy
from exogym.strategy.sparta import SparseCommunicator
from exogym.strategy.federated_averaging import AveragingCommunicator
from exogym.logger import WandbLogger, CSVLogger
from exogym.strategy import Strategy
"""


def test_imports_under_exogyms_own_name() -> None:
    """Every import of the documents, as it stands, and with "exogym" read as "vecgym"."""
    exec(IMPORTS.replace("exogym", "vecgym"), {})
    exogym.install()
    try:
        exec(IMPORTS, {})
    finally:
        exogym.uninstall()


# -------------------------------------------------------------------------------------------- Codebase Structure


def test_nodes_take_the_place_of_train_nodes(trainer: LocalTrainer) -> None:
    """A node has its own copy of the model, its own part of the data, and trains by itself between exchanges."""
    trainer.fit(alone(), 3, max_steps=2, **QUIET)
    assert len(trainer.nodes) == 3
    assert len(params(trainer).unique(dim=0)) == 3
    one: Any = trainer.nodes.module(1)
    assert torch.equal(one.first.weight, trainer.nodes.params["first.weight"][1])
    assert one is not trainer.model


def test_every_node_starts_from_the_users_model(trainer: LocalTrainer) -> None:
    trainer.fit(alone(lr=0.0), 3, max_steps=1, **QUIET)
    start = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    assert torch.equal(params(trainer), start.expand(3, -1))


def test_a_strategy_says_what_is_exchanged_and_how_parameters_change(trainer: LocalTrainer) -> None:
    class HalfWay(Average):
        common = False

        def agree(self, x, part, memory):
            mean = part.comm.mean(x)
            return {name: 0.5 * (p + mean[name]) for name, p in x.items()}

    class MyStrategy(Strategy):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(exchanges=[Exchange(HalfWay())], **kwargs)

    trainer.fit(MyStrategy(inner_optim="sgd", lr=0.1), 3, max_steps=2, **QUIET)
    assert [entry.operation for entry in trainer.ledger] == ["mean", "mean"]
    with pytest.raises(TypeError, match="learning_rate"):
        MyStrategy(learning_rate=0.1)


# --------------------------------------------------------------------------------------------- Technical Details


def test_a_process_for_each_node(trainer: LocalTrainer) -> None:
    """EXO Gym's way, on request: the same numbers."""
    if sys.platform != "linux":
        pytest.skip("only Linux forks processes, which takes 0.1 s; elsewhere they are new interpreters")
    strategy = DiLoCoStrategy("sgd", H=2, lr=0.1)
    settings: dict[str, Any] = {"max_steps": 4, "val_size": 0, **QUIET}
    stacked = trainer.fit(strategy, 2, **settings)
    real = trainer.fit(strategy, 2, backend="processes", num_processes=2, **settings)
    for p, q in zip(stacked.parameters(), real.parameters()):
        torch.testing.assert_close(p, q)


def test_a_dataset_is_dealt_as_by_a_distributed_sampler() -> None:
    data = torch.arange(22)
    batches = Batches(data, num_nodes=3, batch_size=4, seed=7)
    for epoch in (0, 1):
        steps = range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch)
        seen = torch.cat([batches[step] for step in steps], 1)  # [K, examples]
        for node in range(3):
            sampler: Any = DistributedSampler(data, 3, node, shuffle=True, seed=7)  # type: ignore[arg-type]
            sampler.set_epoch(epoch)
            assert seen[node].tolist() == list(sampler)


class Lazy(Dataset[Any]):
    """Reads an example when it is asked for, and cannot be copied."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return torch.full((16,), index / 1000), index % 10

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("the dataset was copied")

    __reduce__ = None  # type: ignore[assignment]


def test_a_dataset_is_in_memory_once_and_read_lazily() -> None:
    data = Lazy()
    LocalTrainer(make_model("MLP"), data).fit(alone(), 4, batch_size=2, max_steps=3, **QUIET)
    assert 4 * 2 * 3 <= len(data.read) <= 4 * 2 * 4  # the first batch is also looked at before the run


# ============================================================================ 001: technical documentation (simplified)

# ------------------------------------------------------------------------------- 3.3 Strategies, 4.2 their execution


def test_simple_reduce_is_all_reduce(trainer: LocalTrainer) -> None:
    assert issubclass(SimpleReduceStrategy, AllReduceStrategy)
    optim_spec = OptimSpec(torch.optim.AdamW, lr=0.001)
    trainer.fit(num_epochs=1, strategy=SimpleReduceStrategy(inner_optim=optim_spec), num_nodes=2, **QUIET)
    rows = params(trainer)
    assert torch.equal(rows[0], rows[1])  # "All nodes maintain identical model parameters"
    assert [entry.step for entry in trainer.ledger] == list(range(20))  # gradients, "after every backward pass"


def test_diloco_has_two_levels(trainer: LocalTrainer) -> None:
    """Local steps with one optimizer, then the step of another on the mean movement: here by hand."""
    strategy = DiLoCoStrategy(OptimSpec("sgd", lr=0.1), OptimSpec("sgd", lr=0.5), H=3)
    start = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    trainer.fit(alone(lr=0.1), 2, max_steps=3, val_size=0, **QUIET)
    moved = params(trainer)
    trainer.fit(strategy, 2, max_steps=3, val_size=0, **QUIET)
    torch.testing.assert_close(params(trainer), (start - 0.5 * (start - moved.mean(0))).expand(2, -1))


def test_fedavg_averages_models_and_no_gradients(trainer: LocalTrainer) -> None:
    trainer.fit(alone(), 2, max_steps=5, val_size=0, **QUIET)
    by_themselves = params(trainer)
    trainer.fit(FedAvgStrategy("sgd", H=5, lr=0.1), 2, max_steps=5, val_size=0, **QUIET)
    torch.testing.assert_close(params(trainer), by_themselves.mean(0).expand(2, -1))
    assert [entry.step for entry in trainer.ledger] == [4]


def test_sparta_can_send_what_matters_most(trainer: LocalTrainer) -> None:
    """The document says "only communicates important gradients"; the paper, random parameters. Both are there."""
    for method in ("random", "topk"):
        strategy = SPARTAStrategy(0.01, "sgd", compression_method=method, lr=0.1)
        trainer.fit(strategy, 4, max_steps=10, val_size=0, **QUIET)
        assert 0 < trainer.ledger.total_bytes < 10 * all_reduce_bytes(4) / 20


# ---------------------------------------------------------------------------------------------- 4.1 Training process


def test_fit_returns_the_average_and_leaves_the_model_alone(trainer: LocalTrainer) -> None:
    before = copy.deepcopy(trainer.model.state_dict())
    averaged = trainer.fit(alone(), 3, max_steps=3, **QUIET)
    flat = torch.cat([p.detach().flatten() for p in averaged.parameters()])
    torch.testing.assert_close(flat, params(trainer).mean(0))
    for name, x in trainer.model.state_dict().items():
        assert torch.equal(x, before[name])
    trainer.model.load_state_dict(averaged.state_dict())  # what EXO Gym's main process does at the end
    assert not torch.equal(trainer.model.state_dict()["first.weight"], before["first.weight"])


# -------------------------------------------------------------------------------------------------- 7 Usage examples


def test_basic_usage(trainer: LocalTrainer) -> None:
    optim_spec = OptimSpec(torch.optim.SGD, lr=0.05)
    strategy = FedAvgStrategy(inner_optim=optim_spec, H=5)
    model = trainer.fit(num_epochs=2, strategy=strategy, num_nodes=3, **QUIET)
    assert trainer.history.last("epoch") == 2
    assert isinstance(model, MLP)
    assert strategy.inner_optim == optim_spec  # EXO Gym ignores it and trains with AdamW


# ======================================================================================== 002: the long README

# ------------------------------------------------------------------------ Supported Distributed Training Algorithms


REDUCTIONS: dict[str, tuple[Strategy, float, float]] = {
    "DDP": (AllReduceStrategy(), 1, 1),
    "DiLoCo H=10": (DiLoCoStrategy(H=10), 10, 100),
    "DiLoCo H=100": (DiLoCoStrategy(H=100), 10, 100),
    "SPARTA 0.1 %": (SPARTAStrategy(0.001), 100, 1300),  # 1000 in the mean
    "SPARTA 1 %": (SPARTAStrategy(0.01), 10, 1000),
    "FedAvg": (FedAvgStrategy(H=5), 5, 5),
    "DeMo": (DeMoStrategy(compression_topk=32, compression_chunk=64), 42, 500),  # said: from 50; indices are int64
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_communication_reduction(name: str) -> None:
    """Of one matrix of 64 x 64 in 100 steps of four nodes, by what a node hands over, as papers count."""

    class Matrix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.w - 1).square().mean()

    strategy, least, most = REDUCTIONS[name]
    trainer = Trainer(Matrix(), torch.randn(8, 64, generator=torch.Generator().manual_seed(0)))
    trainer.fit(strategy, 4, batch_size=2, max_steps=100, **QUIET)
    reduction = 100 * 4 * 64 * 64 / trainer.ledger.total_payload_bytes
    assert least * 0.9999 <= reduction <= most * 1.0001
    on_link = 100 * all_reduce_bytes(4, 64 * 64) / trainer.ledger.total_bytes
    assert on_link == pytest.approx(reduction / 2 if name == "DeMo" else reduction)  # 1.5 for 3 times the payload


@pytest.mark.parametrize("selector", [RandomSelector, ShuffledSequentialSelector, PartitionedSelector])
def test_sparsification_strategies(selector: type, trainer: LocalTrainer) -> None:
    """Random, sequential, partitioned."""
    trainer.fit(SPARTAStrategy(index_selector=selector(0.25), inner_optim="sgd"), 2, max_steps=4, **QUIET)
    assert trainer.ledger.total_bytes == pytest.approx(all_reduce_bytes(2), rel=0.1)


def test_heterogeneous_data() -> None:
    """A client each with examples of one class only, of different number."""

    def clients(rank: int, num_nodes: int, train_dataset: bool) -> Any:
        x, _ = make_data("MLP", 4 + 2 * rank)
        return TensorDataset(x, torch.full((len(x),), rank))  # type: ignore[arg-type]

    trainer = Trainer(make_model("MLP"), clients)
    trainer.fit(FedAvgStrategy("sgd", H=2, lr=0.1, participation=0.5), 4, batch_size=2, num_epochs=2, **QUIET)
    losses = torch.tensor(trainer.history.node_array("train_losses"))
    assert (losses.isfinite().sum(1) == 2).all()  # half of the clients in each round


@pytest.mark.filterwarnings("ignore:.*several nodes train on the same")
def test_a_thousand_participants(trainer: LocalTrainer) -> None:
    trainer.fit(FedAvgStrategy("sgd", H=2, lr=0.1), 1000, batch_size=1, max_steps=2, val_size=0, **QUIET)
    assert trainer.nodes.params["first.weight"].shape == (1000, 32, 16)
    assert trainer.ledger.total_bytes == pytest.approx(all_reduce_bytes(1000))


# ------------------------------------------------------------------------------------------------------ Installation

IMPORTED = {"torch", "numpy", "einops", "matplotlib", "tqdm"}  # what `pip install vecgym` brings
EXTRAS = {
    "wandb": {"wandb"},
    "gpt": set(),
    "demo": set(),
    "examples": {"torchvision", "scikit-learn", "notebook"},
    "all": {"vecgym"},
    "dev": {"vecgym", "ruff", "mypy"},
}


def project_table(section: str) -> dict[str, list[str]]:
    """The lists of one table of pyproject.toml, without a reader of TOML, which Python 3.10 lacks."""
    text = (ROOT / "pyproject.toml").read_text().split(f"[{section}]\n")[1].split("\n[")[0]
    return {name: ast.literal_eval(items) for name, items in re.findall(r"^([\w-]+) = (\[.*\])", text, re.M)}


@pytest.mark.parametrize("extra", EXTRAS)
def test_installation_extras(extra: str) -> None:
    extras = project_table("project.optional-dependencies")
    assert {re.split(r"[\[<>=]", item)[0] for item in extras[extra]} >= EXTRAS[extra]
    mentioned = [name for item in extras[extra] for name in re.findall(r"vecgym\[(.*)\]", item)]
    for name in ",".join(mentioned).split(",") if mentioned else []:
        assert name in extras
    if extra == "all":
        named = set(",".join(mentioned).split(","))
        assert named == set(extras) - {"all", "dev", "test"}


def test_the_library_needs_its_dependencies_only() -> None:
    """So `[gpt]` and `[demo]` have nothing to add. Other packages are imported by the function that needs them."""
    dependencies = {re.split(r"[<>=]", item)[0] for item in project_table("project")["dependencies"]}
    assert dependencies == IMPORTED
    found = set()
    for path in (ROOT / "vecgym").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").split(".")[0])
    assert found - set(sys.stdlib_module_names) - {"vecgym"} <= IMPORTED


def test_the_command_that_checks_the_installation() -> None:
    program = "from vecgym import LocalTrainer; print('installed successfully!')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert (done.stdout, done.returncode) == ("installed successfully!\n", 0), done.stderr


# ------------------------------------------------------------------------------------------------ Quick Start Examples


def test_simple_diloco_training(trainer: LocalTrainer) -> None:
    strategy = DiLoCoStrategy(
        inner_optim='adamw',  # Local optimizer
        outer_optim='sgd',    # Global optimizer
        H=100,                # Communication interval
        lr=3e-4
    )  # fmt: skip
    final_model = trainer.fit(
        strategy=strategy,
        num_nodes=4,
        num_epochs=20,
        batch_size=32,
        **QUIET,
    )
    assert strategy.inner_optim == OptimSpec("adamw", lr=3e-4)
    assert len(trainer.ledger) == 1  # 20 epochs of 5 steps
    assert set(trainer.history["lr"][1:]) == {3e-4}
    assert isinstance(final_model, MLP)


def test_fedavg_with_islands() -> None:
    strategy = FedAvgStrategy(
        inner_optim='sgd',
        island_size=4,        # Create islands of 4 nodes
        H=5,                  # Local training steps before averaging
        lr=0.01
    )  # fmt: skip
    trainer = LocalTrainer(make_model("MLP"), dataset("MLP", 16 * 16))
    trainer.fit(
        strategy=strategy,
        num_nodes=16,         # 16 total nodes = 4 islands
        num_epochs=20,
        **QUIET,
    )  # fmt: skip
    assert len(params(trainer).unique(dim=0)) == 4
    assert [entry.step for entry in trainer.ledger] == [4, 9, 14, 19]
    assert trainer.ledger.total_bytes == pytest.approx(4 * all_reduce_bytes(4))


def test_bandwidth_constrained_sparta(trainer: LocalTrainer) -> None:
    strategy = SPARTAStrategy(
        p_sparta=0.001,       # Communicate 0.1% of parameters
        inner_optim='adamw',
        lr=1e-4
    )  # fmt: skip
    trainer.fit(
        strategy=strategy,
        num_nodes=8,
        num_epochs=15,
        **QUIET,
    )
    steps = trainer.history.last("step")
    assert trainer.history.last("epoch") == 15
    assert trainer.ledger.total_bytes == pytest.approx(steps * 0.001 * all_reduce_bytes(8), rel=0.3)
    assert strategy.inner_optim == OptimSpec("adamw", lr=1e-4)


def test_research_with_demo() -> None:
    strategy = DeMoStrategy(
        compression_decay=0.999,    # Residual accumulation rate
        compression_topk=32,        # Frequency components to transmit
        compression_chunk=64,       # DCT chunk size
        weight_decay=1e-4
    )  # fmt: skip
    trainer = LocalTrainer(make_model("GPT"), dataset("GPT", 256))
    trainer.fit(strategy=strategy, num_nodes=4, **{**QUIET, "batch_size": 8, "max_steps": 30})
    _, losses = trainer.history.series("train_loss")
    assert sum(losses[-5:]) < sum(losses[:5]) - 5 * 0.3


# ------------------------------------------------------------------------------------------------ Architecture Overview


def test_a_failure_is_detected_and_leaves_what_there_is() -> None:
    """The run ends with an error that names node and step; history and nodes are kept."""
    x, y = make_data("MLP", 24)
    x[5] = torch.inf  # type: ignore[index]
    trainer = Trainer(make_model("MLP"), TensorDataset(x, y))  # type: ignore[arg-type]
    with pytest.raises(DivergenceError, match=r"node 2\b.*step"):
        trainer.fit(alone(), 3, batch_size=1, shuffle=False, **QUIET)
    assert trainer.history.last("step") == 2
    assert torch.isfinite(trainer.nodes.params["first.weight"][:2]).all()


def test_a_run_recovers_from_its_checkpoints(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "batch_size": 4,
        "max_steps": 6,
        "save_dir": tmp_path,
        "checkpoint_interval": 2,
        **QUIET,
    }
    strategy = DiLoCoStrategy("adamw", H=3, lr=0.01)
    whole = LocalTrainer(make_model("MLP"), dataset("MLP")).fit(strategy, 2, **settings)
    for path in sorted(tmp_path.glob("*.pt"))[1:]:  # as if the run had been killed before it wrote these
        path.unlink()
    again = LocalTrainer(make_model("MLP"), dataset("MLP"))
    resumed = again.fit(strategy, 2, resume=True, **settings)
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), resumed.parameters()))
    again.save(tmp_path / "run.pt")
    saved = vecgym.load(tmp_path / "run.pt")
    resumed.load_state_dict(saved.average)
    assert saved.step == 6


# ---------------------------------------------------------------------------------------------------- Advanced Features


def test_composition(trainer: LocalTrainer) -> None:
    from vecgym.strategy import CommunicateOptimizeStrategy
    from vecgym.strategy.federated_averaging import AveragingCommunicator
    from vecgym.strategy.sparta import SparseCommunicator

    # Compose multiple communication strategies
    sparse_comm = SparseCommunicator(sparsification_rate=0.01)
    averaging_comm = AveragingCommunicator(island_size=4)

    # Create custom hybrid strategy
    strategy = CommunicateOptimizeStrategy(
        communication_modules=[sparse_comm, averaging_comm],
        inner_optim='adamw'
    )  # fmt: skip
    trainer.fit(strategy=strategy, num_nodes=8, max_steps=3, **QUIET)
    payloads = [entry.payload_bytes for entry in trainer.ledger]
    assert payloads[1::2] == [4 * NUM_PARAMETERS] * 3
    assert all(0 < sparse < 0.05 * 4 * NUM_PARAMETERS for sparse in payloads[0::2])
    assert len(params(trainer).unique(dim=0)) == 2  # the islands of the last step
    assert strategy.inner_optim.cls is torch.optim.AdamW


def test_logging(trainer: LocalTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs wandb: pip install vecgym[wandb]")
    monkeypatch.chdir(tmp_path)
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_X_DISABLE_STATS": "true"}.items():
        monkeypatch.setenv(name, value)
    from vecgym.logger import CSVLogger, WandbLogger

    # Multiple logging backends
    logger = WandbLogger(
        project="distributed_training_research",
        experiment_name="diloco_vs_sparta_comparison"
    )  # fmt: skip

    # Automatic metrics tracking
    trainer.fit(
        strategy=FedAvgStrategy("sgd", H=5, lr=0.1),
        logger=[logger, CSVLogger(tmp_path / "csv")],
        log_interval=50,      # Log every 50 steps
        **{**QUIET, "num_nodes": 2, "max_steps": 60, "val_size": 0},
    )  # fmt: skip
    (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 60  # wandb writes it in a process of its own
    while b"diloco_vs_sparta_comparison" not in written.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert b"diloco_vs_sparta_comparison" in written.read_bytes()
    assert (tmp_path / "csv" / "history.csv").read_text().count("\n") == 2


class WithAccuracy(MLP):
    """A model that says more of itself than its loss."""

    loss_metrics = {"perplexity": torch.exp}  # noqa: RUF012

    def val_metrics(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        x, y = batch
        logits = self.second(self.first(x).relu())
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}


TRACKED = {
    "training/validation loss and accuracy": {"train_loss", "train_losses", "val_loss", "val_losses", "val_accuracy"},
    "communication volume and bandwidth usage": {"bytes_step", "bytes_total", "bytes_per_s"},
    "training speed and throughput": {"steps_per_s", "examples_per_s", "seconds"},
    "memory usage": {"memory_bytes"},  # device utilization is not recorded, see the guide
    "hyperparameter evolution and learning rates": {"lr", "outer_lr"},
}


def test_tracked_metrics() -> None:
    trainer = LocalTrainer(WithAccuracy(), dataset("MLP", 64), dataset("MLP", 20, seed=1))
    strategy = DiLoCoStrategy("sgd", H=2, lr=0.1, lr_scheduler="cosine")
    trainer.fit(strategy, 2, batch_size=8, val_interval=2, **QUIET)
    for names in TRACKED.values():
        assert names <= set(trainer.history.columns)
    last = trainer.history.rows[-1]
    assert last["bytes_step"] == all_reduce_bytes(2)
    assert 0 <= last["val_accuracy"] <= 1
    assert last["val_perplexity"] == pytest.approx(math.exp(last["val_loss"]))
    assert last["bytes_per_s"] == pytest.approx(last["bytes_step"] * last["steps_per_s"], rel=0.5)
    assert last["memory_bytes"] > 2**20
    assert trainer.history["lr"][1] > trainer.history["lr"][-1]
    assert "'every': 2" in repr(trainer.history.settings["hyperparameters"])


def test_log_interval(trainer: LocalTrainer, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path / "diloco_vs_sparta_comparison")
    trainer.fit(
        strategy=FedAvgStrategy("sgd", H=5, lr=0.1),
        num_nodes=2,
        max_steps=120,
        val_size=0,
        logger=logger,
        log_interval=50,  # Log every 50 steps
        **QUIET,
    )
    lines = (tmp_path / "diloco_vs_sparta_comparison" / "history.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["step", "50", "100"]


def test_a_logger_of_ones_own_among_several(trainer: LocalTrainer, tmp_path: Path) -> None:
    class Mine(Logger):
        rows: list[dict[str, Any]] = []  # noqa: RUF012

        def log(self, row: dict[str, Any]) -> None:
            self.rows.append(row)

    trainer.fit(alone(), 2, max_steps=3, val_size=0, logger=[CSVLogger(tmp_path), Mine()], **QUIET)
    assert [row["step"] for row in Mine.rows] == [1, 2, 3]
    assert (tmp_path / "history.csv").exists()


# ------------------------------------------------------------------------------------------------------ Example Scripts


def test_a_hundred_clients_in_islands_of_ten() -> None:
    """`federated_mnist.py --num_clients 100 --island_size 10`."""
    trainer = LocalTrainer(make_model("MLP"), dataset("MLP", 400))
    trainer.fit(FedAvgStrategy("sgd", island_size=10, H=2, lr=0.05), num_nodes=100, batch_size=2, **QUIET)
    assert len(params(trainer).unique(dim=0)) == 10
    assert trainer.ledger.total_bytes == pytest.approx(all_reduce_bytes(10))


# The document's commands, and what became of them.
COMMANDS = {
    "run/mnist.py": "benchmarks/mnist.py",
    "run/nanogpt_diloco.py --dataset shakespeare": "benchmarks/shakespeare.py --text",
    "run/cifar10_comparison.py": "benchmarks/cifar10.py",
    "run/federated_mnist.py --num_clients 100 --island_size 10": "benchmarks/federated.py --num-clients --island-size",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_example_scripts(command: str) -> None:
    """They are there and have the options; that they run, tests/test_benchmarks.py shows."""
    script, *options = COMMANDS[command].split()
    text = (ROOT / script).read_text()
    assert "def main()" in text
    for option in options:
        assert f'options.add_argument("{option}"' in text


# -------------------------------------------------------------------------------------- Configuration & Customization


def test_fine_tuned_diloco() -> None:
    strategy = DiLoCoStrategy(
        inner_optim='adamw',
        outer_optim='sgd',
        H=200,                    # Higher H for better bandwidth efficiency
        inner_lr=1e-4,           # Conservative inner learning rate
        outer_lr=0.5,            # Aggressive outer learning rate
        max_norm=1.0,            # Gradient clipping
        lr_scheduler='cosine',   # Learning rate scheduling
        warmup_steps=1000
    )  # fmt: skip
    assert strategy.inner_optim == OptimSpec("adamw", lr=1e-4)
    (outer,) = strategy.exchanges
    assert "OptimSpec(SGD, lr=0.5, momentum=0.9, nesterov=True)" in repr(outer)
    assert outer.every == 200
    inner = strategy.inner
    assert (inner.max_norm, inner.lr_scheduler, inner.warmup_steps) == (1.0, "cosine", 1000)
    trainer = LocalTrainer(make_model("MLP"), dataset("MLP"))
    with pytest.warns(VecgymWarning, match="H=200"):
        trainer.fit(strategy=strategy, num_nodes=2, max_steps=4, batch_size=4, **QUIET)
    assert trainer.history["lr"] == pytest.approx([0, 1e-7, 2e-7, 3e-7])


def test_cosine_schedule(trainer: LocalTrainer) -> None:
    trainer.fit(AllReduceStrategy("sgd", lr=1.0, lr_scheduler="cosine"), 2, max_steps=10, val_size=0, **QUIET)
    assert trainer.history["lr"] == pytest.approx([0.1 + 0.45 * (1 + math.cos(math.pi * t / 10)) for t in range(10)])


class MyCustomStrategy(Strategy):
    """The document's, line by line; the two methods that it calls are its author's."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # Custom initialization

    def step(self) -> None:
        # Custom communication and optimization logic
        self.communicate_gradients()
        self.update_parameters()
        super().step()  # type: ignore[misc]  # Handle LR scheduling

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        super()._init_node(model, rank, num_nodes)  # type: ignore[misc]
        # Node-specific setup

    def communicate_gradients(self) -> None:
        for p in self.model.parameters():  # type: ignore[attr-defined]
            if p.grad is not None:
                all_reduce(p.grad, op="mean")

    def update_parameters(self) -> None:
        self.optim.step()  # type: ignore[attr-defined]


def test_custom_strategy(trainer: LocalTrainer) -> None:
    settings: dict[str, Any] = {"max_steps": 6, "val_size": 0, **QUIET}
    schedule: dict[str, Any] = {"lr": 0.1, "lr_scheduler": "cosine"}
    mine = trainer.fit(MyCustomStrategy(inner_optim="sgd", **schedule), 3, **settings)
    assert len(trainer.ledger) == 6 * 4  # each parameter by itself
    native = trainer.fit(AllReduceStrategy("sgd", **schedule), 3, **settings)
    for p, q in zip(mine.parameters(), native.parameters()):
        torch.testing.assert_close(p, q)
    with pytest.raises(TypeError, match="learning_rate"):
        MyCustomStrategy(learning_rate=0.1)


def test_dataset_factory() -> None:
    def dataset_factory(rank, num_nodes, train_dataset):
        """Create per-node dataset with automatic sharding."""
        full_dataset: Any = dataset("MLP", 32)

        # Shard dataset across nodes
        indices = list(range(rank, len(full_dataset), num_nodes))
        return torch.utils.data.Subset(full_dataset, indices)

    trainer = LocalTrainer(
        model=make_model("MLP"),
        train_dataset=dataset_factory,  # Function instead of dataset
        val_dataset=dataset("MLP", 8),
    )
    trainer.fit(FedAvgStrategy("sgd", lr=0.1), 4, batch_size=4, **QUIET)
    assert trainer.history.last("examples") == 32


# ------------------------------------------------------------------------------------ Performance Optimization


def test_gradient_accumulation(trainer: LocalTrainer) -> None:
    settings: dict[str, Any] = {"batch_size": 32, "max_steps": 2, **QUIET}
    strategy = AllReduceStrategy(lr=0.01)
    whole = trainer.fit(strategy, 2, **settings)
    parts = trainer.fit(strategy, 2, gradient_accumulation=4, **settings)  # Simulate larger batches
    assert trainer.history.settings["minibatch_size"] == 8
    same = trainer.fit(strategy, 2, minibatch_size=8, **settings)
    for p, q, r in zip(whole.parameters(), parts.parameters(), same.parameters()):
        torch.testing.assert_close(p, q)
        assert torch.equal(q, r)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"gradient_accumulation": 5}, r"gradient_accumulation=5 must divide batch_size=32: one of \[1, 2, 4,"),
        ({"gradient_accumulation": 0}, "gradient_accumulation=0 must be an integer >= 1"),
        ({"gradient_accumulation": 4, "minibatch_size": 8}, "gradient_accumulation=4 and minibatch_size=8 both"),
        ({"gradient_accumulation": 4, "batch_size": 0}, "batch_size=0"),
    ],
)
def test_gradient_accumulation_refused(trainer: LocalTrainer, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer.fit(AllReduceStrategy(), 2, **{"batch_size": 32, **how})


def test_memory_limit(trainer: LocalTrainer) -> None:
    """With `gradient_accumulation` beside it, as in the document; tests/test_memory.py says what is chosen."""
    trainer.fit(
        AllReduceStrategy(), 2,
        batch_size=32,           # Optimal batch size per node
        gradient_accumulation=4, # Simulate larger batches
        max_memory_usage=0.8,    # Limit memory usage to 80%
        max_steps=1,
    )  # fmt: skip
    found = trainer.history.settings["memory"]
    assert 0 < found["needed_bytes"] <= found["limit_bytes"]


def test_bandwidth_optimized_sparta(trainer: LocalTrainer) -> None:
    strategy = SPARTAStrategy(
        p_sparta=0.005,          # 0.5% of parameters
        compression_method='topk', # Top-K sparsification
        quantization_bits=8      # 8-bit quantization
    )  # fmt: skip
    trainer.fit(strategy, 4, max_steps=3, val_size=0, **QUIET)
    # of each tensor 0.5 %, rounded up: a byte and an index of 4 for each value, and a scale for the tensor
    kept = [math.ceil(0.005 * p.numel()) for p in trainer.model.parameters()]
    assert trainer.ledger.total_payload_bytes == 3 * sum(k * 5 + 4 for k in kept)
    assert trainer.ledger.total_bytes == 3 * trainer.ledger.total_payload_bytes  # to three others


def test_hardware_specific_tuning() -> None:
    # Apple Silicon optimization
    if torch.backends.mps.is_available():
        strategy = DiLoCoStrategy(H=50)  # Lower H for MPS
    else:
        strategy = DiLoCoStrategy(H=200)  # Higher H for CUDA  # fmt: skip
    assert ("every=50" if torch.backends.mps.is_available() else "every=200") in repr(strategy)
    assert strategy.inner_optim.cls is torch.optim.AdamW


# ------------------------------------------------------------------------ arguments by position, by name, left out


@pytest.mark.parametrize(
    ("by_position", "by_name"),
    [
        (AllReduceStrategy("sgd"), AllReduceStrategy(inner_optim="sgd")),
        (SimpleReduceStrategy(OptimSpec("sgd", lr=0.1)), SimpleReduceStrategy(inner_optim="sgd", lr=0.1)),
        (FedAvgStrategy("sgd", 5), FedAvgStrategy(inner_optim="sgd", H=5)),
        (FedAvgStrategy("sgd", 5, 4), FedAvgStrategy(inner_optim="sgd", H=5, island_size=4)),
        (DiLoCoStrategy("adam", "adamw"), DiLoCoStrategy(inner_optim="adam", outer_optim="adamw")),
        (DiLoCoStrategy("adam", "sgd", 7), DiLoCoStrategy(inner_optim="adam", outer_optim="sgd", H=7)),
        (
            CommunicateOptimizeStrategy([AveragingCommunicator(2), SparseCommunicator(0.1)], "sgd"),
            CommunicateOptimizeStrategy(
                communication_modules=[AveragingCommunicator(2), SparseCommunicator(sparsification_rate=0.1)],
                inner_optim="sgd",
            ),
        ),
    ],
)
def test_positions(by_position: Strategy, by_name: Strategy) -> None:
    assert repr(by_position) == repr(by_name)


def test_defaults() -> None:
    assert DiLoCoStrategy().exchanges[0].every == 100
    assert FedAvgStrategy().exchanges[0].every == 1
    assert "SGD, lr=0.7, momentum=0.9, nesterov=True" in repr(
        DiLoCoStrategy(outer_optim=torch.optim.SGD).exchanges[0].how.optim.spec
    )
    for strategy in (AllReduceStrategy(), FedAvgStrategy(), DiLoCoStrategy()):
        assert strategy.inner_optim.cls is torch.optim.AdamW


@pytest.mark.parametrize("optim", ["adamw", torch.optim.AdamW, OptimSpec(torch.optim.AdamW), OptimSpec("adamw")])
def test_every_form_of_an_optimizer(optim: Any) -> None:
    assert FedAvgStrategy(optim, lr=0.01).inner_optim.hyper["lr"] == 0.01
    assert OptimSpec.from_string("adamw", lr=3e-4) == OptimSpec(torch.optim.AdamW, lr=3e-4)


# ====================================================================================== 003: EXO Gym technical details

# -------------------------------------------------------------------------------------------------------------- Model


def test_model_contract(trainer: LocalTrainer) -> None:
    """ "The model is expected in a form that takes a `batch` ..., and returns a scalar loss"."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = make_model("MLP")

        def forward(self, batch: Any) -> Tensor:
            return self.mlp(batch)

    model = LocalTrainer(Net(), dataset("MLP")).fit(strategy=AllReduceStrategy(), num_nodes=2, batch_size=4, **QUIET)
    batch: Any = make_data("MLP", 4)
    assert model(batch).shape == ()


def test_any_form_of_batch() -> None:
    """ "agnostic to the format of the data": a tensor, a tuple, a dict."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(4))

        def forward(self, batch: Any) -> Tensor:
            x = batch if isinstance(batch, Tensor) else batch["x"] if isinstance(batch, dict) else batch[0]
            return (x - self.w).square().mean()

    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    found = [
        LocalTrainer(Rows(), data).fit(AllReduceStrategy("sgd", lr=0.1), 2, batch_size=2, **QUIET)
        for data in (x, TensorDataset(x), [{"x": row} for row in x])
    ]
    start: Any = found[0]
    for model in found[1:]:
        other: Any = model
        torch.testing.assert_close(other.w, start.w)


# ------------------------------------------------------------------------------------------------------------ Dataset


def test_a_factory_is_called_once_for_each_node_with_its_documented_names() -> None:
    calls = []

    def dataset_factory(rank: int, num_nodes: int, train_dataset: bool) -> Dataset[Any]:
        calls.append((rank, num_nodes, train_dataset))
        return dataset("MLP", 8, seed=rank)

    trainer = LocalTrainer(make_model("MLP"), dataset_factory, dataset_factory)
    trainer.fit(AllReduceStrategy(), 3, batch_size=4, **QUIET)
    assert sorted(calls) == [(rank, 3, train) for rank in range(3) for train in (False, True)]


# ============================================================================================= 004: diloco-sim's README


class CNNModel(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 2, 3, stride=2), nn.Linear(2 * 9, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).relu().flatten(1))


def test_diloco_sim_minimal_arguments() -> None:
    x, y = make_data("CNN", 128)
    train_dataset = TensorDataset(x, y)  # type: ignore[arg-type]
    simulator = DilocoSimulator(
        model_cls=CNNModel,
        model_kwargs={"num_classes": 100},
        optimizer_kwargs={"lr": 0.001},
        train_dataset=train_dataset,
        loss_fn=F.cross_entropy,
        num_nodes=4,
        diloco_interval=500,
        batch_size=16,
        devices=[],
        progress=False,
    )
    with pytest.warns(VecgymWarning, match="diloco_interval=500"):
        simulator.train()
    assert simulator.history.last("step") == 2  # 128 examples, 4 * 16 at a time


LINEAR_DATA = make_data("MLP", 32)


def simulated(**changed: Any) -> DilocoSimulator:
    """Eight local steps of two nodes on 32 examples, an outer step before the fifth."""
    arguments: dict[str, Any] = {
        "model_cls": nn.Linear, "model_kwargs": {"in_features": 16, "out_features": 10}, "num_nodes": 2,
        "optimizer_kwargs": {"lr": 0.01}, "diloco_interval": 4, "batch_size": 2, "loss_fn": F.cross_entropy,
        "train_dataset": TensorDataset(*LINEAR_DATA), "devices": [], "progress": False,
    }  # fmt: skip
    torch.manual_seed(0)
    simulator = DilocoSimulator(**{**arguments, **changed})
    simulator.train()
    return simulator


def model_cls(tmp_path: Path) -> Iterator[bool]:
    yield type(simulated().master_model) is nn.Linear
    yield type(simulated(model_cls=type("Own", (nn.Linear,), {})).master_model).__name__ == "Own"


def model_kwargs(tmp_path: Path) -> Iterator[bool]:
    made: Any = simulated(model_kwargs={"in_features": 16, "out_features": 12, "bias": False}).master_model
    yield made.out_features == 12
    yield made.bias is None


def num_nodes(tmp_path: Path) -> Iterator[bool]:
    simulator = simulated(num_nodes=4, diloco_interval=2)
    assert simulator.trainer is not None
    yield len(simulator.trainer.nodes) == 4
    yield simulator.history.last("step") == 4


def optimizer_kwargs(tmp_path: Path) -> Iterator[bool]:
    yield simulated(optimizer_kwargs={"lr": 0.5}).history.last("lr") == 0.5


def diloco_interval(tmp_path: Path) -> Iterator[bool]:
    yield [entry.step for entry in simulated(diloco_interval=3).ledger] == [2, 5]


def batch_size(tmp_path: Path) -> Iterator[bool]:
    yield simulated(batch_size=4, diloco_interval=2).history["examples"][1:] == [8, 16, 24, 32]


def loss_fn(tmp_path: Path) -> Iterator[bool]:
    def zero_one(output: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(output, F.one_hot(y, 10).to(output.dtype))

    losses = simulated(loss_fn=zero_one, eval_iters=16).history["val_loss"]
    yield losses[0] < 1 < simulated(eval_iters=16).history["val_loss"][0]  # log 10 with cross-entropy


def train_dataset(tmp_path: Path) -> Iterator[bool]:
    yield simulated(train_dataset=TensorDataset(*make_data("MLP", 64))).history.last("examples") == 64


def eval_dataset(tmp_path: Path) -> Iterator[bool]:
    x, y = make_data("MLP", 6, seed=3)
    simulator = simulated(eval_dataset=TensorDataset(x, y))  # type: ignore[arg-type]
    expected = F.cross_entropy(simulator.master_model(x), y).item()  # type: ignore[arg-type]
    yield simulator.history.last("val_loss") == pytest.approx(expected, rel=1e-5)


def optimizer_cls(tmp_path: Path) -> Iterator[bool]:
    yield simulated().config.strategy().inner_optim == OptimSpec(torch.optim.AdamW, lr=0.01)
    yield simulated(optimizer_cls=torch.optim.Adam).config.strategy().inner_optim.cls is torch.optim.Adam


def ckpt_interval(tmp_path: Path) -> Iterator[bool]:
    yield simulated().config.ckpt_interval is None
    simulated(ckpt_interval=2, diloco_interval=2, save_dir=tmp_path)
    yield sorted(path.name for path in tmp_path.iterdir()) == ["4.pt", "8.pt"]


def eval_iters(tmp_path: Path) -> Iterator[bool]:
    yield simulated().config.eval_iters == 50
    data = Lazy()
    simulated(eval_dataset=data, eval_iters=3)
    yield len(set(data.read)) == 3 * 2  # batches of batch_size


def save_dir(tmp_path: Path) -> Iterator[bool]:
    yield simulated().config.save_dir is None
    simulator = simulated(save_dir=tmp_path / "new")
    state = torch.load(tmp_path / "new" / "8.pt", weights_only=True)
    yield all(torch.equal(x, state[name]) for name, x in simulator.master_model.state_dict().items())


def outer_optimizer_cls(tmp_path: Path) -> Iterator[bool]:
    yield simulated().config.outer_optimizer_cls is torch.optim.SGD
    simulator = simulated(outer_optimizer_cls=torch.optim.Adam, outer_optimizer_kwargs={"lr": 0.1}, num_epochs=2)
    assert simulator.trainer is not None
    assert simulator.trainer.state is not None
    yield "exp_avg" in repr(simulator.trainer.state.shared)


def outer_optimizer_kwargs(tmp_path: Path) -> Iterator[bool]:
    yield simulated().config.outer_optimizer_kwargs == {"lr": 0.7, "nesterov": True, "momentum": 0.9}
    # A mean of the nodes is what they have before the fifth step: at a learning rate of 0, what they have after it.
    still, moved = (
        simulated(max_local_step=5, outer_optimizer_kwargs={"lr": lr}, optimizer_cls=torch.optim.SGD).master_model
        for lr in (1e-12, 1.0)
    )
    torch.manual_seed(0)
    start = nn.Linear(16, 10)
    distances = [float((m.weight - start.weight).norm().detach()) for m in (still, moved)]  # type: ignore[operator]
    yield distances[0] < 0.5 * distances[1]


def max_local_step(tmp_path: Path) -> Iterator[bool]:
    yield simulated().history.last("step") == 8
    yield simulated(max_local_step=5).history.last("step") == 5


def num_epochs(tmp_path: Path) -> Iterator[bool]:
    history = simulated(num_epochs=3).history
    yield (history.last("step"), history.last("epoch")) == (24, 3)


def cosine_anneal(tmp_path: Path) -> Iterator[bool]:
    yield set(simulated().history["lr"][1:]) == {0.01}
    rates = simulated(cosine_anneal=True).history["lr"][1:]
    yield rates == pytest.approx([0.01 * (0.1 + 0.45 * (1 + math.cos(math.pi * t / 8))) for t in range(8)])


def train_loss_hook(tmp_path: Path) -> Iterator[bool]:
    seen: list[TrainStats] = []
    simulator = simulated(train_loss_hook=seen.append)
    yield [stats.loss for stats in seen] == simulator.history["train_loss"][1:]
    yield all(stats.perplexity == pytest.approx(math.exp(stats.loss)) for stats in seen)


def eval_loss_hook(tmp_path: Path) -> Iterator[bool]:
    seen: list[EvalStats] = []
    simulated(eval_loss_hook=seen.append, eval_interval=4)
    yield [stats.glob for stats in seen] == [False, True] * 2  # before steps 0 and 4
    yield seen[3].loss < seen[1].loss


ARGUMENTS: list[Callable[[Path], Iterator[bool]]] = [
    model_cls, model_kwargs, num_nodes, optimizer_kwargs, diloco_interval, batch_size, loss_fn, train_dataset,
    eval_dataset, optimizer_cls, ckpt_interval, eval_iters, save_dir, outer_optimizer_cls, outer_optimizer_kwargs,
    max_local_step, num_epochs, cosine_anneal, train_loss_hook, eval_loss_hook,
]  # fmt: skip


@pytest.mark.parametrize("argument", ARGUMENTS, ids=lambda argument: argument.__name__)
def test_diloco_sim_argument(argument: Callable[[Path], Iterator[bool]], tmp_path: Path) -> None:
    """The rows of the document's table, each under its name."""
    assert all(argument(tmp_path))


# =============================================================================== the guide's table of all of these


def table_of_features() -> list[tuple[str, str, str]]:
    """(feature, how here, test or reason) of each row; each row says which of the listed documents it is from."""
    page = vecgym.guide.compat.__doc__
    assert page is not None
    section = page.split("\n## The documents' features\n")[1].split("\n## ")[0]
    documents = re.findall(r'^(\d)\. "', section, re.MULTILINE)
    assert documents == ["1", "2", "3", "4", "5"]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    for numbers, *_ in rows[1:]:
        assert set(numbers.strip().split(", ")) <= set(documents), numbers
    return [(feature.strip(), how.strip(), shown.strip()) for _, feature, how, shown in rows[1:]]


def test_every_row_of_the_guide_names_its_tests_or_says_why_there_is_none() -> None:
    for feature, how, shown in table_of_features():
        names = re.findall(r"`(\w+)`", shown)
        assert how, feature
        assert names or len(shown) > 10, f"{feature}: name a test of tests/test_documents.py, or give the reason"
        for name in names:
            assert callable(globals().get(f"test_{name}")), f"{feature}: there is no test_{name}"


def test_every_test_is_in_the_guide() -> None:
    named = {f"test_{name}" for _, _, shown in table_of_features() for name in re.findall(r"`(\w+)`", shown)}
    mine = {name for name in globals() if name.startswith("test_") and "the_guide" not in name}
    assert mine <= named, f"rows for {sorted(mine - named)} are missing in the guide's table"
