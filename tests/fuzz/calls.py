"""Every public callable of vecgym, found by introspection, each with a call that works.

A call is built from the signature: a value for each argument that has no default, by `VALUES_OF` (what one callable
takes), else by `VALUES` (what an argument of this name takes anywhere). Methods get an object from `OBJECTS`, or one
that is made as a call of its class is. A new public name is thus found, and mostly called, by itself; `UNCALLED` says
what cannot be, and `broken_calls` what is missing there.
"""

from __future__ import annotations

import copy
import functools
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import vecgym
from tests.fuzz.place import a_new_folder, as_it_was
from tests.helpers import begun
from tests.test_api import MODULES, module_of, public_names
from vecgym import availability, compress, data, logger, meta
from vecgym.availability import Dropout, Facts
from vecgym.clock import Compute, Network, price
from vecgym.collectives import StackedCollectives, topology
from vecgym.collectives.ledger import Transfer
from vecgym.compat import diloco_sim, exogym
from vecgym.compress.codecs import Draw
from vecgym.core import rng
from vecgym.engine import Engine, ModelFacts, Plan
from vecgym.meta.curves import Length
from vecgym.optim import Optimizer
from vecgym.records.history import History
from vecgym.runs import memory
from vecgym.runs.verification import Check, Difference
from vecgym.simulation import Simulation
from vecgym.simulation.simulation import Part
from vecgym.simulation.state import State
from vecgym.simulation.timetable import RunFacts
from vecgym.strategy import (
    MLA,
    QSR,
    AsyncStrategy,
    Average,
    AveragingCommunicator,
    DelayedNesterov,
    DiLoCoStrategy,
    Exchange,
    FedBuff,
    GPAStrategy,
    HeLoCo,
    Mean,
    OuterOptimizer,
    PALSGDStrategy,
    RandomSelector,
    RankStrategy,
    Rounds,
    Selector,
    ServerOptimizer,
    Strategy,
)
from vecgym.strategy.simulated import simulation_of
from vecgym.strategy.stages import ExchangeFacts, Memory, Stages

K, STEPS, DIM = 2, 2, 3

UNCALLED = {
    "vecgym.data.Batch": "a type alias",
    "vecgym.engine.EngineName": "a type alias",
    "vecgym.data.Examples": "a protocol",
    **{f"vecgym.runs.multiprocess.Link{name}": "made by multiprocess.run for each process" for name in
       ("", ".send", ".beat")},
    "vecgym.runs.multiprocess.joined": "within the processes of a group",
    "vecgym.strategy.Strategy.result": "of the state of a run, which is given by the simulation alone",
    "vecgym.strategy.all_gather": "within the step of a strategy written for one rank",
    "vecgym.strategy.all_reduce": "within the step of a strategy written for one rank",
    "vecgym.strategy.broadcast": "within the step of a strategy written for one rank",
    **{f"vecgym.compat.exogym.{name}.step": "within a run of a strategy written for one rank" for name in
       ("CommunicateOptimizeStrategy", "DeMoStrategy", "SimpleReduceStrategy", "Strategy")},
    **{f"vecgym.compat.exogym.{name}.communicate": "within a run of a strategy written for one rank" for name in
       ("AveragingCommunicator", "CommunicationModule", "DiLoCoCommunicator", "SparseCommunicator")},
    "vecgym.compat.exogym.Strategy.zero_grad": "within a run of a strategy written for one rank",
    "vecgym.compat.exogym.all_gather": "within the step of a strategy written for one rank",
    "vecgym.compat.exogym.all_reduce": "within the step of a strategy written for one rank",
    "vecgym.compat.exogym.barrier": "within the step of a strategy written for one rank",
    "vecgym.compat.exogym.broadcast": "within the step of a strategy written for one rank",
    "vecgym.WandbLogger.start": "wandb starts processes and writes to the network or the disk",
    "vecgym.WandbLogger.resume": "wandb starts processes and writes to the network or the disk",
    "vecgym.WandbLogger.log": "wandb starts processes and writes to the network or the disk",
    **{f"vecgym.TensorBoardLogger.{name}": "TensorBoard's thread writes after the folder has gone" for name in
       ("start", "resume", "log", "finish")},
    "vecgym.collectives.topology.Mixing": "made by Mixing.of",
    "vecgym.meta.Learned": "made by learn",
    "vecgym.History.to_pandas": "needs pandas, which is not among the dependencies",
    "vecgym.SweepResult.to_pandas": "needs pandas, which is not among the dependencies",
    "vecgym.optim.Muon": "torch's own, where it has one",
    "vecgym.plot.NotebookFigure": "matplotlib's own arguments",
}  # fmt: skip
INSIDE = (  # they have an __all__, and are not public; of the kernel, as long as no run is made by it
    "vecgym.strategy.per_rank", "vecgym.strategy.federated_averaging", "vecgym.simulation",
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ small objects


class Line(nn.Module):
    """Batch `[B, DIM]` -> scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(1.0, DIM + 1))

    def forward(self, batch: Any) -> Tensor:
        x = batch if isinstance(batch, Tensor) else batch[0]
        return (self.w - x).square().mean()


class Matrix(Line):
    """The same with a parameter of two dimensions, which Muon needs."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(1.0, DIM + 1)[None])


def examples(n: int = 16) -> Tensor:
    return torch.linspace(-1, 1, n * DIM).view(n, DIM)


def strategy() -> Strategy:
    return DiLoCoStrategy("sgd", H=1, lr=0.1)


def tree_of_nodes() -> dict[str, Tensor]:
    return {"w": torch.arange(1.0, K * DIM + 1).view(K, DIM)}


def rank() -> RankStrategy:
    """The strategy of node 0, as a run prepares it."""
    made = RankStrategy("sgd", lr=0.1)
    made.max_steps = STEPS
    made._init_node(Line(), 0, K)
    return made


def lion(
    lr: float | Tensor = 0.1, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float | Tensor = 0.0,
    maximize: bool = False,
) -> vecgym.OptimSpec:  # fmt: skip
    """The keywords of `OptimSpec("lion", ...)`, which `OptimSpec` itself takes as **kwargs."""
    return vecgym.OptimSpec("lion", lr=lr, betas=betas, weight_decay=weight_decay, maximize=maximize)


def of_muon(optim: str, name: str) -> Callable[..., vecgym.OptimSpec]:
    """Make a function with the keywords of `OptimSpec(optim, ...)`."""

    def spec(
        lr: float | Tensor = 0.1, weight_decay: float | Tensor = 0.1, momentum: float | Tensor = 0.95,
        nesterov: bool = True, ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float | Tensor = 1e-7, ns_steps: float | Tensor = 5, adjust_lr_fn: str | None = None,
    ) -> vecgym.OptimSpec:  # fmt: skip
        return vecgym.OptimSpec(
            optim, lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov, eps=eps, ns_steps=ns_steps,
            ns_coefficients=ns_coefficients, adjust_lr_fn=adjust_lr_fn,
        )  # fmt: skip

    spec.__name__ = spec.__qualname__ = name
    return spec


def dion_muon(
    lr: float | Tensor = 0.1, weight_decay: float | Tensor = 0.1, momentum: float | Tensor = 0.95,
    eps: float | Tensor = 1e-8, full_precision: bool = False,
) -> vecgym.OptimSpec:  # fmt: skip
    """The keywords of `OptimSpec("dionmuon", ...)`."""
    return vecgym.OptimSpec(
        "dionmuon", lr=lr, weight_decay=weight_decay, momentum=momentum, eps=eps, full_precision=full_precision
    )


muon, full_precision_muon = of_muon("muon", "muon"), of_muon("fullprecisionmuon", "full_precision_muon")


def steps() -> list[Tensor]:
    return [examples(K * 2).view(K, 2, DIM) + t for t in range(STEPS)]


SETTINGS: dict[str, Any] = {"max_steps": STEPS, "batch_size": 2, "device": "cpu", "progress": False}


@functools.cache
def _trained() -> vecgym.Trainer:
    trainer = vecgym.Trainer(Line(), examples(), examples(4))
    trainer.fit(strategy(), K, **SETTINGS)
    return trainer


@functools.cache
def _asynchronous() -> vecgym.Trainer:
    trainer = vecgym.Trainer(Line(), examples(), examples(4))
    trainer.fit(AsyncStrategy("sgd", H=1, lr=0.1), K, compute=Compute([1.0, 2.0]), **SETTINGS)
    return trainer


def _theta() -> dict[str, Tensor]:
    return {"w": torch.arange(1.0, DIM + 1)[None]}


def _state_of_server(server: Any) -> dict[str, Any]:
    state: dict[str, Any] = server().init(_theta())
    return state


@functools.cache
def _swept() -> vecgym.SweepResult:
    return vecgym.sweep(
        Line(), examples(), examples(4), strategy=lambda H, lr: DiLoCoStrategy("sgd", H=H, lr=lr),
        grid={"H": [1, 2], "lr": [0.1, 0.2]}, num_nodes=K, keep_models=True, **SETTINGS,
    )  # fmt: skip


def _lines(seed: int) -> tuple[nn.Module, Tensor]:
    return Line(), examples(20)


@functools.cache
def _learned() -> meta.Learned:
    return meta.learn(
        lambda n: DiLoCoStrategy("sgd", H=n.when, lr=n.lr), {"lr": meta.Curve(0.1), "when": meta.Exchanges(1)},
        runs=_lines, num_nodes=K, max_steps=STEPS, batch_size=2, runs_per_step=2, steps=1, estimator="gradient",
        device="cpu",
    )  # fmt: skip


def trained() -> vecgym.Trainer:
    return copy.deepcopy(_trained())


def of_seed(seed: int) -> History:
    return History({"seed": seed}, [{"step": step, "val_loss": 2.0 + seed - step} for step in range(2)])


def history() -> History:
    return trained().history


def saved() -> vecgym.Saved:
    return vecgym.Saved(1, K, history(), {}, tree_of_nodes(), {}, {"w": "w"}, {})


def engine() -> Engine:
    made = Engine(Line())
    made.prepare(steps()[0])
    return made


def simulation(of: Strategy | None = None) -> Simulation:
    return simulation_of(Line(), of or strategy(), StackedCollectives(K), engine=engine(), max_steps=STEPS)


def state() -> State:
    return simulation().init()


def facts() -> RunFacts:
    """The facts that a strategy or an exchange is told before a run."""
    return RunFacts(K, STEPS, num_examples=(8, 8), names=("w",))


def of_exchanges() -> ExchangeFacts:
    """The facts that an average is told."""
    return Exchange(Mean()).facts(facts())


def part_alone() -> Part:
    return Part.alone(StackedCollectives(K), num_examples=(8, 8))


def partition() -> data.Partition:
    return data.partition_iid(torch.arange(16) % 4, K)


def check() -> Check:
    return Check("exact", 0.0, (Difference(1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),))


def simulator() -> diloco_sim.DilocoSimulator:
    return diloco_sim.DilocoSimulator(config())


def config() -> diloco_sim.DilocoSimulatorConfig:
    return diloco_sim.DilocoSimulatorConfig(
        nn.Linear, {"in_features": DIM, "out_features": 1}, nn.functional.mse_loss, pairs(), num_nodes=K, batch_size=2,
        max_local_step=1, eval_iters=1, devices=[], progress=False, eval_interval=1,
    )  # fmt: skip


def pairs(n: int = 16) -> TensorDataset:
    return TensorDataset(examples(n), torch.zeros(n, 1))


def started() -> logger.CSVLogger:
    made = logger.CSVLogger("log")
    made.start({"num_nodes": K})
    return made


def drawn() -> Draw:
    return Draw(lambda *ids: rng.generator(0, "fuzz", *ids), torch.arange(K))


def doubly_stochastic() -> Tensor:
    return topology.ring(K)


def transfer() -> Transfer:
    return Transfer("mean", payload_bytes=8, num_nodes=K)


def row() -> dict[str, Any]:
    return {"step": 1, "train_loss": 0.5, "train_losses": np.array([0.5, 0.25])}


def file(name: str) -> str:
    """A file or folder that a call reads, in the current directory."""
    if name == "run.pt":
        trained().save(name)
    elif name == "text.txt":
        Path(name).write_text("some text. " * 200)
    elif name == "script.py":
        Path(name).write_text("pass\n")
    elif name == "log":
        made = started()
        made.log(row())
        made.finish()
    elif name == "state.pt":
        torch.save(nn.Linear(DIM, 1).state_dict(), name)
    return name


def work(link: Any) -> int:
    return int(link.rank)


# --------------------------------------------------------------------------------- values by the argument's name

VALUES: dict[str, Callable[[], Any]] = {
    "overwritten": lambda: [tree_of_nodes()], "exchanged": dict, "before": dict,
    "participants": lambda: [0], "steps": lambda: 1, "transfer": transfer, "transfers": lambda: [transfer()],
    "what": lambda: "a run", "shard_sizes": lambda: [8] * K,
    "H": lambda: 1, "alpha": lambda: 1.0, "agreed": tree_of_nodes, "average": Mean, "inner": Mean, "clip": lambda: 1.0,
    "noise": lambda: 0.1, "batch": lambda: steps()[0], "batch_size": lambda: 2, "batches": steps,
    "buffers": dict, "column": lambda: "train_loss", "comm": lambda: StackedCollectives(K), "context": lambda: 4,
    "communication_modules": lambda: [AveragingCommunicator()], "count": lambda: 1, "d": lambda: 1,
    "data": lambda: torch.arange(16) % 4, "dataset": examples, "device": lambda: torch.device("cpu"),
    "directory": lambda: "log", "engine": lambda: "auto", "eval_batch": lambda: examples(4), "exchange": lambda: 0,
    "how": Mean,
    "extra": dict, "generator": lambda: torch.Generator().manual_seed(0), "grads": tree_of_nodes,
    "grid": lambda: {"lr": [0.1, 0.2]}, "high": lambda: 2.0, "histories": lambda: {"run": history()},
    "history": history, "index": lambda: 0, "island_size": lambda: 2, "keys": lambda: {"w": "w"},
    "loss": lambda: 1.0, "low": lambda: 1.0, "max_steps": lambda: STEPS, "message": lambda: "a warning",
    "method": lambda: "topk", "model": Line, "module": AveragingCommunicator, "modules": lambda: [],
    "n": lambda: 4, "name": lambda: "adam", "net": lambda: nn.Linear(DIM, 4), "node": lambda: 0,
    "num_bytes": lambda: 10.0, "num_nodes": lambda: K, "num_parts": lambda: 2, "num_processes": lambda: 1,
    "num_steps": lambda: 4,
    "num_tokens": lambda: 2, "optim": lambda: "sgd", "p": lambda: 0.5, "params": tree_of_nodes,
    "partition": partition, "path": lambda: "out.csv", "points": lambda: [(1.0, 2.0), (2.0, 1.0)],
    "purpose": lambda: "fuzz", "row": row, "rows": lambda: [row()], "run": facts,
    "names": lambda: ["w"], "runner": lambda: _swept()._runner,
    "seed": lambda: 1, "server": ServerOptimizer, "settings": lambda: {"num_nodes": K},
    "spec": lambda: vecgym.OptimSpec("sgd"), "step": lambda: 1, "strategy": strategy,
    "text": lambda: "abc" * 50, "tokens": lambda: torch.arange(10) % 4,
    "train_dataset": examples, "tree": tree_of_nodes, "u": lambda: 0.5, "values": tree_of_nodes,
    "vocab_size": lambda: 5, "vocabulary": lambda: "abcd", "weights": doubly_stochastic, "window": lambda: 1,
    "x": tree_of_nodes, "z": lambda: torch.rand(4, generator=torch.Generator().manual_seed(0)), "whose": lambda: "lr",
    "shapes": lambda: {"w": torch.Size([DIM])}, "src": lambda: 0, "value": lambda: 0.5, "perplexity": lambda: 1.0,
}  # fmt: skip

_TOKENS = {"tokens": lambda: torch.zeros(1, 4, dtype=torch.long)}
_PAIR = {"batch": lambda: (torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 4, dtype=torch.long))}
_CODE = {"x": lambda: tree_of_nodes()["w"], "like": lambda: tree_of_nodes()["w"]}
_PLOT = {"rows": lambda: _swept().rows, "x": lambda: "H", "y": lambda: "val_loss", "path": lambda: None}
_HEAT = {**_PLOT, "y": lambda: "lr"}
_CHECKED = {"x": lambda: "H", "y": lambda: "val_loss", "path": lambda: None, "column": lambda: "val_loss"}
_GIVEN = {"settings": None}  # of *args and **kwargs: nothing
_LR = {"strategy": lambda: lambda lr: DiLoCoStrategy("sgd", H=1, lr=lr)}


def _code_of(codec: compress.Codec) -> Any:
    return codec.encode(tree_of_nodes()["w"], drawn())


def _coded(codec: Callable[[], compress.Codec]) -> dict[str, Callable[[], Any]]:
    def gathered() -> Any:
        return {part: x[None] for part, x in _code_of(codec()).items()}

    return {**_CODE, "code": lambda: _code_of(codec()), "codes": gathered, "draw": drawn, "n": lambda: 4}


def _chain() -> compress.Chain:
    return compress.Chain(compress.TopK(0.5), compress.Quantise())


def _codes() -> dict[str, Any]:
    """Of each node, as `of_codes` takes them."""
    return {name: compress.Sign().encode(x, drawn()) for name, x in tree_of_nodes().items()}


def _sgd() -> Optimizer:
    return Optimizer(vecgym.OptimSpec("sgd", lr=0.1))


# By the callable's name; a method takes what its class says, and then what it says itself.
VALUES_OF: dict[str, Mapping[str, Callable[[], Any]]] = {
    "vecgym.Trainer": {"path": lambda: "out.png"},
    "vecgym.Trainer.save": {"path": lambda: "run.pt"},
    "vecgym.CSVLogger": {},
    "vecgym.DivergenceError": {"nodes": lambda: [0]},
    "vecgym.ProcessError": {"rank": lambda: 0, "nodes": lambda: "node 0", "what": lambda: "x"},
    "vecgym.MemoryEstimate": {"parts": lambda: {"parameters": memory.MemoryPart(8, 0, K)}, "device": lambda: "cpu"},
    "vecgym.Nodes": {"params": tree_of_nodes},
    "vecgym.Ledger.marking": {"weight": lambda: 0.5, "lag": lambda: 1},
    "vecgym.Ledger.routed": {"routes": lambda: {"all_gather": "server"}},
    "vecgym.Ledger.load": {"state": lambda: vecgym.Ledger().state()},
    "vecgym.Influence": {
        **{name: lambda: torch.ones(2) for name in ("values", "errors", "each")}, "loss": lambda: 1.0,
        "steps": lambda: (2, 4), "num_steps": lambda: 4, "of": lambda: "exchanges", "method": lambda: "exact",
        "agreement": lambda: None},
    "vecgym.Influence.thin": {"n": lambda: 1},
    "vecgym.Influence.plot": {"path": lambda: None},
    "vecgym.influence": {"strategy": lambda: vecgym.strategy.FedAvgStrategy("sgd", H=1, lr=0.1),
                         "dataset": examples, "max_steps": lambda: 1, "batch_size": lambda: 2, "num_nodes": lambda: K},
    "vecgym.OptimSpec.build": {"model_or_params": Line, "node": lambda: None},
    "vecgym.OptimSpec.groups": {},
    "vecgym.SweepResult": _CHECKED,
    "vecgym.SweepResult.to_csv": {"path": lambda: "rows.csv"},
    "vecgym.SweepResult.plot_heatmap": {"y": lambda: "lr"},
    "vecgym.SweepResult.compare": {"axis": lambda: "H", "over": lambda: "lr"},
    "vecgym.compare": {"runs": lambda: {name: [of_seed(seed) for seed in range(3)] for name in ("FedAvg", "DiLoCo")}},
    "vecgym.load": {"path": lambda: file("run.pt")},
    "vecgym.meta.Curve": {"start": lambda: 0.5},
    "vecgym.meta.Exchanges": {"every": lambda: 1},
    "vecgym.meta.Mixing": {"start": lambda: torch.full((K, K), 1 / K)},
    **{f"vecgym.meta.{name}": {
        "z": lambda: torch.zeros(4, 1), "length": lambda: Length(STEPS), "values": lambda: torch.ones(STEPS)}
       for name in ("Curve.values", "Exchanges.argument", "Exchanges.density", "Exchanges.values")},
    "vecgym.meta.Mixing.values": {"z": lambda: torch.zeros(K * K, 1), "length": lambda: Length(STEPS)},
    "vecgym.meta.Mixing.first": {"several": lambda: False},
    "vecgym.meta.Report": {"gains": tuple},
    "vecgym.meta.learn": {
        "strategy_of": lambda: lambda n: DiLoCoStrategy("sgd", H=1, lr=n.lr), "runs": lambda: _lines,
        "numbers": lambda: {"lr": meta.Curve(0.1)}, "max_steps": lambda: STEPS, "batch_size": lambda: 2,
        "runs_per_step": lambda: 2, "steps": lambda: 1, "num_nodes": lambda: K, "device": lambda: "cpu"},
    "vecgym.meta.Learned.report": {
        "num_runs": lambda: 2, "rivals": lambda: ["constants"], "longer": lambda: None, "more": lambda: None},
    "vecgym.rollout_jvp": {**_LR, "primals": lambda: [torch.tensor(0.1)], "tangents": lambda: [torch.tensor(1.0)]},
    "vecgym.verify": {"strategy": strategy, "dataset": lambda: examples().double(), "steps": lambda: 1,
                      "num_nodes": lambda: K, "num_processes": lambda: 1},
    "vecgym.collectives.Collectives.mean": {"groups": lambda: None, "weights": lambda: None},
    "vecgym.collectives.Collectives.server_mean": {"participants": lambda: [0], "weights": lambda: None},
    "vecgym.collectives.Collectives.permute": {"source": lambda: [1, 0]},
    "vecgym.collectives.Collectives.reduce": {"by": lambda: lambda everyone: (everyone, everyone)},
    "vecgym.compat.diloco_sim.EvalStats": {"glob": lambda: True},
    "vecgym.compat.diloco_sim.DilocoSimulatorConfig": {
        "model_cls": lambda: nn.Linear, "model_kwargs": lambda: {"in_features": DIM, "out_features": 1},
        "loss_fn": lambda: nn.functional.mse_loss, "train_dataset": lambda: pairs(64)},
    "vecgym.compat.diloco_sim.DilocoSimulator": {"config": config},
    "vecgym.compat.diloco_sim.DilocoSimulator.load_model": {"path": lambda: file("state.pt")},
    "vecgym.compress.Chain": {**_coded(_chain), "first": lambda: compress.TopK(0.5), "second": compress.Quantise},
    "vecgym.compress.Codec": _coded(lambda: compress.TopK(0.5)),
    "vecgym.compress.E3M0": _coded(compress.E3M0),
    "vecgym.compress.Sign": _coded(compress.Sign),
    **{f"vecgym.compress.{codec.__name__}": _coded(codec) for codec in (
        compress.Quantise, compress.StatQuantise, compress.QSGD, compress.Ternary, compress.Natural,
        compress.ChunkedTopK, compress.Cast, compress.CentralBins)},
    **{f"vecgym.compress.{name}.encode": {"draw": drawn} for name in ("Ternary", "Natural")},
    "vecgym.compress.RandomK": _coded(lambda: compress.RandomK(0.5)),
    "vecgym.compress.RandomK.encode": {"draw": drawn},
    "vecgym.compress.TopK": {**_coded(lambda: compress.TopK(0.5)), "fraction": lambda: 0.5},
    "vecgym.compress.PowerSGD.compresses": {"x": lambda: torch.ones(K, 4, 4)},
    "vecgym.compress.PowerSGD.reduce": {"state": dict, "mean": lambda: lambda x: x,
                                       "draw": lambda: lambda name: drawn()},
    "vecgym.compress.check_bits": {"value": lambda: 8},
    "vecgym.data.text.read_text": {"path": lambda: file("text.txt")},
    "vecgym.data.text.standard_library_text": {"num_chars": lambda: 1000},
    "vecgym.data.text.split_text": {},
    "vecgym.data.text.decode_text": {"tokens": lambda: torch.tensor([0, 1])},
    "vecgym.data.Partition": {"indices": lambda: (torch.tensor([0, 1]), torch.tensor([2])), "labels": lambda: None},
    "vecgym.data.num_steps": {"batches": lambda: data.Batches(examples(), K, 2)},
    "vecgym.data.EvalBatches": {"num_nodes": lambda: K},
    "vecgym.runs.evaluation.evaluated_columns": {
        "engine": engine, "state": lambda: simulation().init(),
        "sets": lambda: [data.EvalBatches(examples(4), 2, None, K)]},
    "vecgym.runs.evaluation.among": {"members": lambda: [0]},
    "vecgym.strategy.Strategy.result": {"state": state},
    **{f"vecgym.collectives.{name}.fetched": {"sources": lambda: [1], "receivers": lambda: [0]}
       for name in ("Collectives", "StackedCollectives")},
    "vecgym.data.Batches.read": {"requests": lambda: [([0, 1], 0)], "shard_sizes": lambda: None},
    "vecgym.runs.rollout.batches_at": {"steps": lambda: steps(), "requests": lambda: [([0, 1], 0)]},
    "vecgym.runs.evaluation.averages": {"num_configs": lambda: 1},
    "vecgym.runs.evaluation.distances_of": {"members": lambda: [None]},
    "vecgym.runs.evaluation.spread_columns": {"values": lambda: np.linspace(0.0, 1.0, 3)},
    "vecgym.runs.evaluation.everyone": {"x": lambda: torch.ones(K)},
    "vecgym.runs.evaluation.recorded_of": {"strategy": AsyncStrategy, "columns": lambda: {"val_loss": 1.0}},
    "vecgym.runs.multiprocess.run": {"function": lambda: work},
    "vecgym.engine.ModelFacts": {
        "unused": frozenset, "mutated": frozenset, "random": lambda: False, "flop": lambda: 1},
    "vecgym.engine.Engine.gradients": {"seed": lambda: 1},
    "vecgym.engine.Engine.use": {"plan": lambda: Plan("vmap")},
    "vecgym.engine.Plan.chunks": {"num_threads": lambda: 1},
    "vecgym.engine.choose_plan": {"facts": lambda: ModelFacts(frozenset(), frozenset(), False, flop=1),
                                 "num_threads": lambda: 1},
    "vecgym.engine.check_settings": {"chunk_size": lambda: None, "node_threads": lambda: None},
    "vecgym.logger.as_loggers": {"logger": lambda: logger.CSVLogger("log")},
    "vecgym.logger.read_csv": {"directory": lambda: file("log")},
    "vecgym.models.GPT": {**_TOKENS, **_PAIR, "context": lambda: 4},
    "vecgym.models.Classifier": {"batch": lambda: (torch.zeros(2, DIM), torch.zeros(2, dtype=torch.long))},
    "vecgym.models.Line.forward": {"x": examples},
    "vecgym.core.tree.places": {"values": lambda: [torch.ones(DIM)]},
    "vecgym.core.nodes.expanded": {"x": lambda: torch.ones(1, DIM)},
    "vecgym.core.nodes.means": {"x": lambda: torch.ones(K, DIM), "number": lambda: 1},
    "vecgym.core.nodes.take_rows": {"rows": lambda: torch.tensor([0])},
    "vecgym.core.nodes.join_rows": {"parts": lambda: [tree_of_nodes(), tree_of_nodes()]},
    "vecgym.clock.AsyncTimeline": {
        "seconds": lambda: 1.0, "utilization": lambda: 1.0, "update_seconds": lambda: torch.ones(1),
        "per_node": lambda: _asynchronous().timeline().per_node, "events": list, "network": lambda: None,
        "compute": lambda: Compute(0.4), "path": lambda: "run.json",
    },
    "vecgym.clock.Network.within": {"members": lambda: [0]},
    "vecgym.core.nodes.put_rows": {"rows": lambda: torch.tensor([0]), "new": lambda: {"w": torch.ones(1, DIM)},
                              "inplace": lambda: False},
    "vecgym.core.nodes.expand": {"values": lambda: {"w": torch.ones(1, DIM)}},
    "vecgym.core.nodes.fill": {"values": lambda: {"w": torch.ones(DIM)}},
    "vecgym.core.nodes.unshared": {"state": tree_of_nodes, "overwritten": tree_of_nodes},
    "vecgym.collectives.ledger.with_prefix": {"unit": lambda: "B"},
    "vecgym.optim.ElementwiseRule.prepared": {"state": lambda: vecgym.OptimSpec("sgd").rule().init(tree_of_nodes())},
    "vecgym.optim.Optimizer.move": {"moved": tree_of_nodes, "lr": lambda: torch.full((K,), 0.1)},
    "vecgym.data.flip_labels": {"nodes": lambda: [0]},
    "vecgym.strategy.MATCHAStrategy.plan": {"num_nodes": lambda: K},
    "vecgym.strategy.Robust.aggregate": {"x": lambda: torch.ones(3, DIM)},
    "vecgym.strategy.robust.median": {"x": lambda: torch.ones(1, 3, DIM)},
    "vecgym.optim.ElementwiseRule.update": {"state": lambda: vecgym.OptimSpec("sgd").rule().init(tree_of_nodes())},
    "vecgym.optim.Lion": {"params": lambda: Line().parameters()},
    "vecgym.optim.FullPrecisionMuon": {"params": lambda: Matrix().parameters()},
    "vecgym.optim.DionMuon": {"params": lambda: Matrix().parameters()},
    "vecgym.optim.PerNodeRule": {"spec": lambda: vecgym.OptimSpec(torch.optim.ASGD)},
    "vecgym.optim.PerNodeRule.update": {
        "state": lambda: vecgym.OptimSpec(torch.optim.ASGD).rule().init(tree_of_nodes())},
    "vecgym.optim.check_max_norm": {"max_norm": lambda: 1.0},
    "vecgym.optim.clip_grad_norm": {"max_norm": lambda: 1.0},
    "vecgym.optim.ensure_optim_spec": {},
    "vecgym.strategy.Exchange.weighted": {"weights": lambda: [1.0, 0.0]},
    "vecgym.plot.plot_numbers": {
        "curves": lambda: {"lr": [0.1, 0.2]}, "start": lambda: None, "exchanges": lambda: None, "path": lambda: None},
    "vecgym.plot.plot_sensitivity": {"gradient": lambda: torch.ones(4), "path": lambda: None},
    "vecgym.plot.plot_influence": {"values": lambda: torch.ones(4), "path": lambda: None},
    "vecgym.plot.plot_partition": {"partition": partition, "path": lambda: None},
    "vecgym.plot.plot_axis": _PLOT,
    "vecgym.plot.plot_heatmap": _HEAT,
    "vecgym.plot.plot_pareto": _PLOT,
    "vecgym.plot.plot_differences": {**_PLOT, "baseline": lambda: 1, "over": lambda: "lr"},
    "vecgym.plot.smooth": {"values": lambda: [1.0, 2.0, 3.0]},
    "vecgym.optim.schedule.lambda_cosine": {},
    "vecgym.optim.schedule.check_schedule": {"name": lambda: "cosine"},
    "vecgym.optim.schedule.make_schedule": {"name": lambda: "cosine"},
    **{f"vecgym.strategy.{name}": {"codec": lambda: "int8"} for name in ("Compressed", "EF21", "Ring")},
    "vecgym.compress.make_codec": {"codec": lambda: "topk"},
    "vecgym.strategy.every": {"exchange": lambda: Exchange(Mean())},
    "vecgym.strategy.Exchange": {"shared": dict, "tick": lambda: 0},
    "vecgym.strategy.Exchange.check_optimizer": {"optimizer": dict},
    "vecgym.strategy.StrongestCosines.residual": {"held": lambda: {"w": torch.ones(K, 1, DIM)}},
    "vecgym.strategy.GPAStrategy.average": {"state": lambda: simulation(GPAStrategy("sgd", lr=0.1)).init()},
    "vecgym.strategy.FedDynStrategy.result": {"state": state},
    "vecgym.strategy.PALSGDStrategy.drawn": {"step": lambda: 0},
    "vecgym.strategy.ScaffnewStrategy.agreed": {"tick": lambda: 0},
    "vecgym.strategy.Strategy": {
        "timetable": lambda: strategy().timetable(facts()), "shared": lambda: state().shared,
        "tick": lambda: 0},
    "vecgym.strategy.PALSGDStrategy.rates": {
        "timetable": lambda: PALSGDStrategy("sgd", lr=0.1).timetable(facts()), "tick": lambda: 0},
    **{f"vecgym.strategy.{name}": {"state": dict} for name in
       ("RankStrategy.load_state_dict", "Strategy.load_hidden_state")},
    "vecgym.optim.Optimizer": {
        "counts": lambda: 0, "max_norm": lambda: 1.0,
        "optimizers": lambda: [_sgd()] * 2, "num_rows": lambda: K, "whose": lambda: "x",
        "state": lambda: _sgd().init(tree_of_nodes()),
        "slots": lambda: _sgd().init(tree_of_nodes()), "spec": lambda: vecgym.OptimSpec("sgd"), "lr": lambda: 0.1},
    "vecgym.strategy.Corrupted": {"nodes": lambda: [0]},
    "vecgym.strategy.Sparse": {"selector": lambda: RandomSelector(0.5)},
    "vecgym.strategy.SyncWeight": {"weights": lambda: torch.ones(STEPS), "number": lambda: 0},
    "vecgym.strategy.When.following": {"inner": lambda: _sgd(), "unit": lambda: 1},
    "vecgym.strategy.When.made": {"number": lambda: 0},
    "vecgym.strategy.ScheduledSelector": {"H": lambda: 2},
    "vecgym.collectives.topology.random_islands": {"nodes": lambda: [0, 1, 2, 3]},
    "vecgym.collectives.topology.torus": {"num_nodes": lambda: 4},
    "vecgym.collectives.topology.one_peer_exponential": {"round": lambda: 0},
    "vecgym.collectives.topology.metropolis_weights": {"adjacency": lambda: [[0, 1], [1, 0]]},
    "vecgym.OptimSpec.mapped": {"function": lambda: torch.neg},
    "vecgym.core.tree.map": {"fn": lambda: torch.neg, "trees": lambda: (tree_of_nodes(),)},
    "vecgym.core.tree.map_leaves": {"fn": lambda: torch.neg},
    "vecgym.core.tree.unflatten": {"leaves": lambda: {((dict, "w"),): torch.ones(1)}},
    "vecgym.core.tree.path_name": {"path": lambda: ((dict, "w"),)},
    "vecgym.core.tree.form": {"x": lambda: torch.ones(2, 3)},
    "vecgym.core.tree.root": {"x": lambda: torch.ones(2)},
    "vecgym.core.tree.wider": {"dtype": lambda: torch.bfloat16},
    "vecgym.runs.verification.Check": {"bound": lambda: 0.0, "rows": lambda: check().rows, "column": lambda: "params"},
    "vecgym.runs.verification.Report": {
        "strategy": lambda: "x", "dtype": lambda: torch.float64, "checks": lambda: (check(),)},
    "vecgym.sweep": {**_LR, "grid": lambda: {"lr": [0.1, 0.2]}, "device": lambda: "cpu", "num_nodes": lambda: K},
    "vecgym.compat.exogym.CommunicateOptimizeStrategy": {
        "communication_modules": lambda: [exogym.AveragingCommunicator()]},
    "vecgym.compat.exogym.Trainer": {"val_dataset": lambda: None},
    "vecgym.compat.exogym.Trainer.fit": {
        "num_nodes": lambda: K, "strategy": lambda: exogym.SimpleReduceStrategy("sgd")},
    **{f"vecgym.compat.exogym.strategies.{name}IndexSelector.get_indices": {
        "param": lambda: torch.ones(4), "iteration": lambda: 0}
       for name in ("", "Partitioned", "Random", "ShuffledSequential")},
    "vecgym.compat.exogym.run_script": {"path": lambda: file("script.py")},
}  # fmt: skip

_FACTS: dict[str, Callable[[], Any]] = {"run": lambda: Facts(K, STEPS, 0, Compute(0.4), (8, 8), 2)}
_AVAILABLE: dict[str, dict[str, Callable[[], Any]]] = {
    "Sampled": {"fraction": lambda: 0.5},
    "Dropout": {"rate": lambda: 0.2},
    "Trace": {"table": lambda: [[True] * K] * STEPS},
    "Deadline": {"seconds": lambda: 1.0},
    "LocalSteps": {"steps": lambda: [1] * K},
    "Function": {"function": lambda: lambda step: [0]},
    "Availability": {},
}
for _name, _given in _AVAILABLE.items():
    VALUES_OF[f"vecgym.availability.{_name}"] = _given
    for _method in ("check", "present", "training"):
        if _method in vars(getattr(availability, _name)):
            VALUES_OF[f"vecgym.availability.{_name}.{_method}"] = _FACTS
VALUES_OF |= {
    "vecgym.availability.as_availability": {"value": lambda: Dropout(0.1)},
    "vecgym.collectives.Collectives.among": {"members": lambda: [0]},
    "vecgym.collectives.StackedCollectives.among": {"members": lambda: [0]},
}  # fmt: skip

_SIZES = {"sizes": lambda: {"w": 4 * DIM}}
_NETWORK: dict[str, Callable[[], Any]] = {"network": lambda: Network(1e9), "compute": lambda: Compute(0.4)}
VALUES_OF |= {
    "vecgym.Ledger.announce": _SIZES,
    "vecgym.Trainer.timeline": _NETWORK,
    "vecgym.SweepResult.price": _NETWORK,
    "vecgym.clock.Compute": {**_SIZES, "seconds": lambda: 0.4},
    "vecgym.clock.Compute.lognormal": {"median": lambda: 0.4, "sigma": lambda: 0.3},
    "vecgym.clock.Compute.from_flop": {"flop": lambda: 1e9, "peak_flops": lambda: 1e12},
    "vecgym.clock.Network": {"bandwidth": lambda: 1e9},
    "vecgym.clock.Network.regions": {
        "sizes": lambda: [1, 1],
        "inside": lambda: (1e9, 0.0),
        "between": lambda: (1e8, 0.1),
    },
    "vecgym.clock.Network.seconds": {"operation": lambda: "mean", "payload_bytes": lambda: 100},
    "vecgym.clock.PerNode": {name: lambda: torch.ones(K) for name in ("computed", "waited", "sent", "received")},
    "vecgym.clock.Timeline": {
        **_NETWORK,
        "path": lambda: "run.json",
        "seconds": lambda: 0.4,
        "utilization": lambda: 1.0,
        "step_seconds": lambda: torch.ones(1),
        "step_utilization": lambda: torch.ones(1),
        "_run": lambda: None,
        "per_node": lambda: price([[transfer()]], Network(1e9), Compute(0.4)).per_node,
    },
    "vecgym.clock.price": {**_NETWORK, "transfers": lambda: [[transfer()]]},
    "vecgym.clock.price_strategies": {**_NETWORK, "model": lambda: 1000, "strategies": lambda: ["allreduce"]},
    "vecgym.clock.required_H": {**_NETWORK, "model": lambda: 1000, "strategy": lambda: "fedavg"},
    "vecgym.clock.required_bandwidth": {**_NETWORK, "transfers": lambda: [[transfer()]]},
    **{f"vecgym.optim.Fed{name}": {"params": lambda: Line().parameters()} for name in ("Adagrad", "Adam", "Yogi")},
    "vecgym.collectives.topology.plain_who": {"who": lambda: ((0, 1),)},
    "vecgym.collectives.topology.who_of": {"plain": lambda: ["groups", [0, 1]]},
}

# Objects whose methods are called, where the call of the class does not make a fit one.
_SERVED: dict[str, Callable[[], Any]] = {
    "num_updates": lambda: 4, "params": _theta, "movement": _theta, "update": lambda: 0,
}  # fmt: skip
for _server in (DelayedNesterov, FedBuff, HeLoCo, MLA, OuterOptimizer):
    VALUES_OF[f"vecgym.strategy.{_server.__name__}"] = {
        **_SERVED,
        "state": functools.partial(_state_of_server, _server),
        "servers": lambda: [OuterOptimizer()] * 2,
    }
VALUES_OF |= {
    "vecgym.strategy.DelayedNesterov": {
        **VALUES_OF["vecgym.strategy.DelayedNesterov"],
        "servers": lambda: [DelayedNesterov(buffer=2)] * 2,
    },
    "vecgym.strategy.HALoSStrategy.check_updates": {"num_updates": lambda: 4},
    "vecgym.strategy.DecoupledDiLoCoStrategy.fragments_of": {"sizes": lambda: {"w": 4 * DIM}},
    "vecgym.strategy.Server": {
        "servers": lambda: [OuterOptimizer()] * 2,
        **_SERVED,
        "state": functools.partial(_state_of_server, OuterOptimizer),
    },
    "vecgym.strategy.RoundsOf": {"H": lambda: lambda step: 1},
    "vecgym.strategy.LateWindow": {"start": lambda: 1},
    "vecgym.strategy.QSR": {
        "alpha": lambda: 0.1,
        "lr": lambda: lambda step: 0.1,
        "max_steps": lambda: STEPS,
        "inner": lambda: _sgd(),
        "unit": lambda: 1,
    },
    "vecgym.strategy.GPAStrategy": {"optimizer": lambda: {"z": tree_of_nodes()}},
    "vecgym.OptimSpec.at_each": {"by_count": lambda: lambda of_step: of_step(0)},
    "vecgym.clock.Compute.drawn": {"node": lambda: 0, "block": lambda: 0},
}

OBJECTS: dict[str, Callable[[], Any]] = {
    "vecgym.clock.AsyncTimeline": lambda: copy.deepcopy(_asynchronous().timeline()),
    "vecgym.strategy.Server": OuterOptimizer,
    "vecgym.strategy.DelayedNesterov": lambda: DelayedNesterov(buffer=2),
    "vecgym.strategy.HeLoCo": lambda: HeLoCo(rho=1.0),
    "vecgym.Trainer": trained,
    "vecgym.History": history,
    "vecgym.clock.Timeline": lambda: price([[transfer()]], Network(1e9), Compute(0.4)),
    "vecgym.Saved": saved,
    "vecgym.availability.Availability": lambda: Dropout(0.1),
    "vecgym.SweepResult": lambda: copy.copy(_swept()),
    "vecgym.meta.Learned": lambda: copy.copy(_learned()),
    "vecgym.CSVLogger": started,
    "vecgym.collectives.Collectives": lambda: StackedCollectives(K),
    "vecgym.compress.Codec": lambda: compress.TopK(0.5),
    "vecgym.compress.TopK": lambda: compress.TopK(0.5),
    "vecgym.compress.RandomK": lambda: compress.RandomK(0.5),
    "vecgym.data.Partition": partition,
    "vecgym.engine.Engine": engine,
    "vecgym.runs.verification.Check": check,
    "vecgym.compat.diloco_sim.DilocoSimulator": simulator,
    "vecgym.compat.diloco_sim.DilocoSimulatorConfig": config,
    "vecgym.strategy.Average": Mean,
    "vecgym.strategy.QSR": lambda: QSR(0.1, 1, lambda step: 0.1, max_steps=STEPS),
    "vecgym.strategy.When": lambda: Rounds(1),
    "vecgym.strategy.Selector": lambda: RandomSelector(0.5),
    "vecgym.strategy.Strategy": strategy,
    "vecgym.strategy.RankStrategy": rank,
    "vecgym.collectives.topology.Mixing": lambda: topology.Mixing.of(doubly_stochastic()),
}


# ------------------------------------------------------------------------------------------------------ discovery


@dataclass(frozen=True)
class Target:
    """A public callable.

    Attributes:
        name: "vecgym.Trainer.fit".
        owner: the name of the class of a method; "" for all else.
        function: as it is found in the module or class.
        bound: it is called without an object: a function, a class, a static or class method.
    """

    name: str
    owner: str
    function: Callable[..., Any]
    bound: bool

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        found = dict(inspect.signature(self.function).parameters)
        if self.owner and not self.bound:
            found.pop(next(iter(found)))
        return found


def public_modules() -> list[str]:
    """The modules that users import from: those of the reference, all others with an `__all__`, and EXO Gym's."""
    everything = [m.name for m in pkgutil.walk_packages(vecgym.__path__, "vecgym.") if not m.name.endswith("__main__")]
    exporting = [name for name in everything if hasattr(module_of(name), "__all__")]
    return [name for name in dict.fromkeys([*MODULES, *exporting, exogym.strategies.__name__]) if name not in INSIDE]


@functools.cache
def targets() -> dict[str, Target]:
    """All public callables by name; what has several names is there once."""
    found: dict[str, Target] = {}
    seen: set[int] = set()
    for module_name in public_modules():
        module = module_of(module_name)
        for name in public_names(module):
            value = getattr(module, name)
            full = f"{module_name}.{'Trainer' if name == 'LocalTrainer' else name}"
            if id(value) in seen or not _takes_arguments(value):
                continue
            seen.add(id(value))
            for target in (Target(full, "", value, True), *_methods(full, value)):
                found.setdefault(target.name, target)
    for spec in (lion, muon, full_precision_muon, dion_muon):
        found[f'vecgym.OptimSpec("{spec.__name__}")'] = Target(f'vecgym.OptimSpec("{spec.__name__}")', "", spec, True)
    return found


def _takes_arguments(value: Any) -> bool:
    """Whether this is something that is called, and looks at what it is given: no type alias, no record."""
    if not callable(value) or (inspect.isclass(value) and issubclass(value, tuple)):
        return False
    try:
        inspect.signature(value)
    except ValueError:
        return False
    return True


def _is_of_the_kernel(method: Any, asynchronous: bool) -> bool:
    """Whether this is a handler of an algorithm, or what the kernel asks it before a run."""
    names = list(inspect.signature(method).parameters)[1:2] if inspect.isfunction(method) else []
    told = ("part", "times", "events", "run") if asynchronous else ("part", "times", "events")
    return bool(names) and (names[0] in told or method.__name__ == "own_parameters")


def _methods(owner: str, cls: Any) -> list[Target]:
    """The public methods that a class defines."""
    if not inspect.isclass(cls):
        return []
    found = []
    for name, value in vars(cls).items():
        inner = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        if not issubclass(cls, Average) and _is_of_the_kernel(inner, getattr(cls, "asynchronous", False)):
            continue
        if not name.startswith("_") and inspect.isfunction(inner) and inner.__module__.startswith("vecgym"):
            bound = inner is not value
            found.append(Target(f"{owner}.{name}", owner, getattr(cls, name), bound))
    return found


# ------------------------------------------------------------------------------------------------------ good calls


class NoValue(LookupError):
    """Nothing is known that an argument could be given."""


def good_value(target: Target, name: str) -> Any:
    """A new value that works for an argument."""
    if target.owner and inspect.isclass(cls := targets()[target.owner].function):
        if issubclass(cls, Average) and name in OF_AVERAGES and name not in VALUES_OF.get(target.name, {}):
            return OF_AVERAGES[name](target)
        if issubclass(cls, Selector) and name == "at":
            return part_alone()
    for table in (VALUES_OF.get(target.name, {}), VALUES_OF.get(target.owner, {}), VALUES):
        if name in table:
            return table[name]()
    if name == "state" and target.owner:
        return _state(target)
    raise NoValue(f"{target.name}: no value for {name!r}; add one to VALUES or VALUES_OF in tests/fuzz/calls.py")


def _state(target: Target) -> Any:
    """The state that `init` of an object of the class gives."""
    cls = targets()[target.owner]
    made = _object(cls)
    if not hasattr(made, "init"):
        raise NoValue(f"{target.name}: no state without init")
    first = {"w": torch.Size([DIM])} if "Selector" in target.owner else tree_of_nodes()
    return made.init(first, part_alone())


def _agreed(target: Target) -> tuple[Any, Memory]:
    """The values that the nodes agreed on, and their memory, as a method finds them that comes after they agreed."""
    average, method = _object(targets()[target.owner]), target.name.rpartition(".")[2]
    memory = begun(average, _theta(), K)
    after = method in ("receive", "read", "write", "within")
    return (Stages(average).agree(tree_of_nodes(), part_alone(), memory) if after else None), memory


OF_AVERAGES: dict[str, Callable[[Target], Any]] = {
    "x": lambda target: tree_of_nodes(),
    "y": lambda target: _agreed(target)[0],
    "part": lambda target: part_alone(),
    "memory": lambda target: _agreed(target)[1],
    "common": lambda target: True,
    "number": lambda target: 0,
    "run": lambda target: of_exchanges(),
    "codes": lambda target: _codes() if target.name.endswith("of_codes") else tree_of_nodes(),
    "codec": lambda target: compress.Sign(),
    "like": lambda target: tree_of_nodes(),
}


def _object(cls: Target) -> Any:
    return OBJECTS[cls.name]() if cls.name in OBJECTS else call(cls, good_arguments(cls))


def good_arguments(target: Target) -> dict[str, Any]:
    """Values for all arguments without a default, and of a long run few steps; by name."""
    given = {}
    for name, parameter in target.parameters.items():
        plain = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if plain and parameter.default is parameter.empty:
            given[name] = good_value(target, name)
        elif name in ALSO.get(target.name, ()):
            given[name] = SETTINGS[name] if name in SETTINGS else good_value(target, name)
    return given


# Arguments with a default that a call needs too, or that make it short.
ALSO: dict[str, tuple[str, ...]] = {
    "vecgym.Trainer.fit": tuple(SETTINGS),
    "vecgym.availability.LocalSteps": ("steps",),
    "vecgym.strategy.MATCHAStrategy.plan": ("num_nodes",),
    "vecgym.sweep": (*SETTINGS, "strategy", "grid", "num_nodes"),
    "vecgym.SweepResult.compare": ("over",),
    "vecgym.plot.plot_differences": ("over",),
    "vecgym.compat.exogym.Trainer.fit": ("max_steps", "batch_size", "strategy", "num_nodes"),
    "vecgym.meta.learn": ("batch_size", "runs_per_step", "steps", "device"),
    "vecgym.meta.Learned.report": ("num_runs", "rivals", "longer", "more"),
    "vecgym.verify": ("num_nodes", "num_processes", "steps"),
    "vecgym.data.text.standard_library_text": ("num_chars",),
    "vecgym.compat.diloco_sim.DilocoSimulatorConfig": ("loss_fn", "model_kwargs", "train_dataset"),
    "vecgym.compat.diloco_sim.DilocoSimulator": ("config",),
    **{f"vecgym.compress.{name}.encode": ("draw",) for name in ("RandomK", "Ternary", "Natural")},
    "vecgym.compress.TopK": ("fraction",),
    "vecgym.clock.Network": ("bandwidth",),
    "vecgym.core.tree.map": ("trees",),
    "vecgym.Trainer.timeline": ("network", "compute"),
}


def receiver(target: Target) -> Callable[..., Any]:
    """The callable itself: of a method that of a new object."""
    if target.bound:
        return target.function
    made = _object(targets()[target.owner])
    return getattr(made, target.name.rpartition(".")[2])


def call(
    target: Target,
    given: Mapping[str, Any],
    unknown: Mapping[str, Any] | None = None,
    function: Callable[..., Any] | None = None,
) -> Any:
    """Call with arguments by name; `unknown` are keywords that may not exist; `function`: see `receiver`."""
    positional, keywords, extra = [], {}, ()
    for name, parameter in target.parameters.items():
        if name not in given:
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            positional.append(given[name])
        elif parameter.kind is parameter.VAR_POSITIONAL:
            extra = given[name]
        elif parameter.kind is parameter.VAR_KEYWORD:
            keywords.update(given[name])
        else:
            keywords[name] = given[name]
    if "trees" in target.parameters or "ids" in target.parameters:  # *args come after what is given by position
        order = [
            name for name, p in target.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD and name in keywords
        ]
        positional += [keywords.pop(name) for name in order]
    result = (function or receiver(target))(*positional, *extra, **keywords, **(unknown or {}))
    if inspect.isgenerator(result) or type(result).__name__ in ("map", "zip", "filter"):
        result = next(iter(result), None)  # what is wrong may show only then
    return result


def broken_calls() -> dict[str, str]:
    """The callables whose good call fails, and how."""
    broken = {}
    for name, target in targets().items():
        if name in UNCALLED or inspect.isabstract(target.function):
            continue
        try:
            with a_new_folder(), as_it_was():
                call(target, good_arguments(target))
        except Exception as error:
            broken[name] = f"{type(error).__name__}: {error}"
    return broken
