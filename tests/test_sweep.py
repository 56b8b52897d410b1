"""Sweeps: what a configuration records in a stack is what `Trainer.fit` records of it alone."""

from __future__ import annotations

import csv
import functools
import json
import math
import signal
import sys
from collections.abc import Callable, Mapping
from inspect import isfunction, signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import vecgym.strategy
from tests.fitting import Rows, dataset
from tests.fuzz import sweeps as fuzz
from tests.fuzz.common import Case, Failure
from tests.helpers import OneRank, assert_close
from tests.models import make_data, make_model
from vecgym import (
    DivergenceError,
    LogUniform,
    OptimSpec,
    SweepResult,
    Trainer,
    Uniform,
    VecgymWarning,
    sweep,
)  # fmt: skip
from vecgym.availability import Dropout
from vecgym.clock import Compute, Network
from vecgym.compress import TopK
from vecgym.core import tree
from vecgym.core.tree import Tree
from vecgym.data import partition_dirichlet
from vecgym.engine import constancy
from vecgym.engine.constancy import equal_but_weights
from vecgym.models import Classifier
from vecgym.plot import pareto_front, plot_axis, plot_heatmap, plot_pareto
from vecgym.records import runfile
from vecgym.records.columns import MEASURED
from vecgym.records.rows import averaged, labelled, select
from vecgym.simulation import Part, RunFacts
from vecgym.simulation.simulation import without_gradient
from vecgym.simulation.stack import groups_of
from vecgym.strategy import (
    QSR,
    AllReduceStrategy,
    AllToAll,
    Average,
    CHOCOStrategy,
    CommunicateOptimizeStrategy,
    Compressed,
    D2Strategy,
    DeMoStrategy,
    DESLOCStrategy,
    DiLoCoStrategy,
    DSMStrategy,
    EagerDiLoCoStrategy,
    EDiTStrategy,
    ExactDiffusionStrategy,
    Exchange,
    FedAvgStrategy,
    GossipStrategy,
    GPAStrategy,
    GradientTrackingStrategy,
    LocalAdamStrategy,
    MATCHAStrategy,
    Mean,
    MimeStrategy,
    Mix,
    MostMoved,
    MuLoCoStrategy,
    NoLoCoStrategy,
    Outer,
    PALSGDStrategy,
    PartitionedSelector,
    QGMStrategy,
    QuantisedRing,
    RelaySumStrategy,
    Ring,
    SCAFFOLDStrategy,
    ScheduledSelector,
    SGPStrategy,
    ShuffledSequentialSelector,
    Sparse,
    SparseLoCoStrategy,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
    Strategy,
    StreamingDiLoCoStrategy,
    StrongestCosines,
    every,
)
from vecgym.strategy.averages import Weighting
from vecgym.strategy.federated import FedDynStrategy, FedNovaStrategy, ScaffnewStrategy
from vecgym.sweeps import chunk
from vecgym.sweeps.chunk import Chunk, Work, prepared_engine
from vecgym.sweeps.options import points

# The seeds of most sweeps here are those of the data, on purpose, and two are enough.
pytestmark = pytest.mark.filterwarnings("ignore:(the seeds do not vary|2 \\w+ are few|.*the best, is the)")

K = 4
STEPS = 7
F64 = torch.float64


def data(name: str = "MLP", num_examples: int = 90, seed: int = 0) -> Any:
    made = make_data(name, num_examples, seed, F64)
    return Rows(made) if isinstance(made, dict) else TensorDataset(*made)


def run_sweep(strategy: Any, grid: Mapping[str, Any] | None, model: Any = "MLP", **settings: Any) -> SweepResult:
    name = model if isinstance(model, str) else "MLP"
    module = make_model(model, dtype=F64) if isinstance(model, str) else model
    settings = {"num_nodes": K, "max_steps": STEPS, "batch_size": 4, "val_interval": 3, **settings}
    if grid is not None and "num_nodes" in grid:
        del settings["num_nodes"]
    common = {"device": "cpu", "progress": False, "keep_models": True}
    return sweep(module, data(name), data(name, 10, seed=1), strategy=strategy, grid=grid, **{**common, **settings})


def run_alone(result: SweepResult, index: int, model: Any = "MLP", **settings: Any) -> tuple[Trainer, nn.Module]:
    """`Trainer.fit` of one row."""
    name = model if isinstance(model, str) else "MLP"
    config = result._runner.configs[index]
    own = {key: value for key, value in config.settings.items() if key != "num_nodes"}
    trainer = Trainer(config.model, data(name), data(name, 10, seed=1))
    settings = {"val_interval": 3, "device": "cpu", "progress": False, **own, **settings}
    return trainer, trainer.fit(config.strategy, config.num_nodes, **settings)


COLUMNS = ("step", "epoch", "examples", "train_loss", "train_losses", "lr", "bytes_step", "bytes_total", "val_loss",
           "val_loss_local", "val_losses", "consensus_distance")  # fmt: skip


def check_row(result: SweepResult, index: int, model: Any = "MLP", tolerance: float = 1e-10, **settings: Any) -> None:
    """The curve of a row, and the model that it ends with, are those of the run of it alone."""
    trainer, averaged = run_alone(result, index, model, **settings)
    history = result.history(index)
    for column in COLUMNS:
        found, expected = (
            [None if x is None else torch.as_tensor(x, dtype=F64) for x in h[column]]
            for h in (history, trainer.history)
        )
        assert [x is None for x in found] == [x is None for x in expected], column
        here = [torch.stack([x for x in side if x is not None]) for side in (found, expected)]
        assert_close(here[0], here[1], tolerance, f"row {index}, {column}")
    own = result.model(index)
    assert_close(dict(own.state_dict()), dict(averaged.state_dict()), tolerance, f"row {index}")
    assert result.rows[index]["status"] == "finished"


def check_all(result: SweepResult, model: Any = "MLP", stacks: int = 1, **settings: Any) -> None:
    assert sum(len(program.chunks) for program in result._runner.programs) == stacks, result.explain()
    for index in range(len(result)):
        check_row(result, index, model, **settings)


# ---------------------------------------------------------------------------- every strategy, two or three axes

RING = [[0.5, 0.25, 0, 0.25], [0.25, 0.5, 0.25, 0], [0, 0.25, 0.5, 0.25], [0.25, 0, 0.25, 0.5]]
SHARES = [[0.5, 0, 0, 0.3], [0.5, 0.5, 0, 0.3], [0, 0.5, 0.5, 0.4], [0, 0, 0.5, 0]]
PAIRS = [[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5]]


def composed(*exchanges: Exchange, lr: float = 0.1) -> Strategy:
    return CommunicateOptimizeStrategy(exchanges, OptimSpec("sgd", lr=lr, momentum=0.9))


CASES: dict[str, tuple[Callable[..., Strategy], dict[str, Any]]] = {
    "AllReduceStrategy": (
        lambda lr, norm: AllReduceStrategy("adamw", lr=lr, max_norm=norm),
        {"lr": [1e-2, 1e-3], "norm": [0.5, 1.0], "seed": [1, 2]},
    ),
    "FedAvgStrategy": (
        lambda H, lr, optim: FedAvgStrategy(optim, H=H, lr=lr),
        {"H": [1, 3], "lr": [0.1, 0.02], "optim": ["sgd", "adam"], "seed": [0, 1]},
    ),
    "FedAvgStrategy islands": (
        lambda size, mu: FedAvgStrategy("sgd", H=2, island_size=size, proximal_mu=mu, lr=0.1),
        {"size": [2, 3], "mu": [0.0, 0.1, 0.5], "seed": [1, 2]},
    ),
    "FedAvgStrategy participation": (
        lambda part, lr, b2: FedAvgStrategy(OptimSpec("adam", lr=lr, betas=(0.9, b2)), H=2, participation=part),
        {"part": [0.25, 0.5, 1.0], "lr": [1e-2, 1e-3], "b2": [0.9, 0.999]},
    ),
    "SCAFFOLDStrategy": (
        lambda part, lr, server, decay: SCAFFOLDStrategy(
            OptimSpec("sgd", lr=lr, weight_decay=decay), H=2, participation=part, server_lr=server,
        ),
        {"part": [0.5, 1.0], "lr": [0.1, 0.02], "server": [1.0, 0.7], "decay": [0.0, 0.1]},
    ),
    "MimeStrategy": (
        lambda part, lr, server, b1: MimeStrategy(
            OptimSpec("adam", lr=lr, betas=(b1, 0.95)), H=2, participation=part, server_lr=server,
        ),
        {"part": [0.5, 1.0], "lr": [0.1, 0.02], "server": [1.0, 0.7], "b1": [0.5, 0.9]},
    ),
    "MimeStrategy, lite": (
        lambda lr, seed: MimeStrategy(OptimSpec("sgd", momentum=0.8), H=3, lr=lr, lite=True),
        {"lr": [0.1, torch.linspace(0.1, 0.4, K)], "seed": [0, 1]},
    ),
    "SCAFFOLDStrategy, unequal steps": (
        lambda lr, seed: SCAFFOLDStrategy("sgd", local_steps=[1, 3, 2, 1], lr=lr, warmup_steps=2),
        {"lr": [0.1, torch.linspace(0.1, 0.4, K)], "seed": [0, 1]},
    ),
    "FedAvgStrategy server": (
        lambda server, lr: FedAvgStrategy("sgd", H=2, participation=0.75, server_optim=server, server_lr=lr, lr=0.1),
        {"server": ["avgm", "yogi"], "lr": [0.5, 1.0]},
    ),
    "DiLoCoStrategy": (
        lambda H, lr, outer_lr, warmup: DiLoCoStrategy(
            "adamw", H=H, lr=lr, outer_lr=outer_lr, warmup_steps=warmup, cosine_anneal=True
        ),
        {"H": [2, 3], "lr": [1e-2, 1e-3], "outer_lr": [0.4, 1.0], "warmup": [0, 3], "seed": [0, 1]},
    ),
    "DiLoCoStrategy corrected": (
        lambda correction, outer_lr: DiLoCoStrategy("sgd", H=2, lr=0.1, outer_lr=outer_lr, correction=correction),
        {"correction": [None, "heloco", "median_norm"], "outer_lr": [0.4, 1.0]},
    ),
    "DiLoCoStrategy restarts": (
        lambda restart, lr: DiLoCoStrategy("sgd", H=1, lr=lr, restart=restart),
        {"restart": [None, 1, 2, 3], "lr": [0.1, 0.05]},
    ),
    "DiLoCoStrategy in rounds of the rate": (
        lambda alpha, lr: DiLoCoStrategy(
            "sgd", H=QSR(alpha, 2, max_steps=STEPS), lr=lr, lr_scheduler="cosine"
        ),
        {"alpha": [0.05, 0.1], "lr": [0.1, 0.02]},
    ),
    "DSMStrategy": (
        lambda lr, outer_lr, wd, beta: DSMStrategy(
            "sgd", 2, lr=lr, outer_lr=outer_lr, weight_decay=wd, betas=(beta, 0.9), warmup_steps=3
        ),
        {"lr": [0.1, 0.02], "outer_lr": [0.5, 1.0], "wd": [0.0, 0.2], "beta": [0.9, 0.5]},
    ),
    "DiLoCoStrategy decay": (
        lambda H, mu, decay: DiLoCoStrategy(OptimSpec("sgd", lr=0.1, momentum=mu, weight_decay=decay), H=H),
        {"H": [2, 5], "mu": [0.0, 0.9], "decay": [0.0, 0.1]},
    ),
    "DiLoCoStrategy compressed": (
        lambda code, lr: DiLoCoStrategy("sgd", H=2, lr=lr, compression=code),
        {"code": ["topk", "randomk", "int8", "int4", "sign", "powersgd", "stat2", "qsgd", "natural", "ternary",
                  "chunktopk"], "lr": [0.1, 0.02]},
    ),
    "SparseLoCoStrategy": (
        lambda k, outer_lr, average: SparseLoCoStrategy(
            "sgd", 2, k=k, chunk=6, outer_lr=outer_lr, average=average, lr=0.1
        ),
        {"k": [2, 5], "outer_lr": [0.5, 1.0], "average": ["all", "senders"]},
    ),
    "FedNovaStrategy": (
        lambda lr, momentum, beta: FedNovaStrategy(
            OptimSpec("sgd", lr=lr, momentum=momentum), local_steps=[1, 3, 2, 3], server_momentum=beta
        ),
        {"lr": [0.1, 0.02], "momentum": [0.5, 0.9], "beta": [0.3, 0.6], "seed": [0, 1]},
    ),
    "FedNovaStrategy proximal": (
        lambda mu, participation: FedNovaStrategy(
            "sgd", 2, participation, proximal_mu=mu, lr=0.1
        ),
        {"mu": [0.0, 0.5, 2.0], "participation": [0.5, 1.0]},
    ),
    "FedDynStrategy": (
        lambda alpha, H, evaluated: FedDynStrategy("adamw", H, alpha=alpha, evaluated=evaluated, lr=0.01),
        {"alpha": [0.1, 0.5], "H": [2, 3], "evaluated": ["server", "participants"], "seed": [0, 1]},
    ),
    "ScaffnewStrategy": (
        lambda p, lr: ScaffnewStrategy("sgd", p, lr=lr), {"p": [0.3, 1.0], "lr": [0.1, 0.02], "seed": [0, 1]},
    ),
    "LocalAdamStrategy": (
        lambda H, lr: LocalAdamStrategy("adamw", H, lr=lr),
        {"H": [1, 3], "lr": [1e-2, 1e-3], "seed": [0, 1]},
    ),
    "DESLOCStrategy": (
        lambda H, Hu, Hv: DESLOCStrategy("adam", H, Hu, Hv, lr=0.01),
        {"H": [1, 3], "Hu": [2, 5], "Hv": [1, 4]},
    ),
    "MuLoCoStrategy": (
        lambda H, lr, mu: MuLoCoStrategy(H=H, lr=lr, adamw_lr=0.01, momentum=mu),
        {"H": [1, 3], "lr": [0.02, 0.05], "mu": [0.9, 0.5]},
    ),
    "GPAStrategy": (
        lambda mu_x, mu_y, lr: GPAStrategy("adamw", mu_x, mu_y, lr=lr),
        {"mu_x": [0.9, 0.5], "mu_y": [0.7, 0.3], "lr": [1e-2, 1e-3]},
    ),
    "PALSGDStrategy": (
        lambda p, pull, lr: PALSGDStrategy("adamw", p, 2, pull=pull, lr=lr),
        {"p": [0.0, 0.3], "pull": [1.0, 5.0], "lr": [1e-2, 1e-3], "seed": [0, 1]},
    ),
    "NoLoCoStrategy": (
        lambda n, mu, gamma: NoLoCoStrategy("sgd", 2, n, momentum=mu, gamma=gamma, lr=0.1),
        {"n": [2, 3], "mu": [0.5, 0.9], "gamma": [0.6, 1.0], "seed": [0, 1]},
    ),
    "StreamingDiLoCoStrategy": (
        lambda H, fragments, delay, bits: StreamingDiLoCoStrategy(
            "adamw", H=H, num_fragments=fragments, delay=delay, bits=bits, lr=0.01
        ),
        {"H": [2, 3], "fragments": [1, 2], "delay": [0, 1], "bits": [None, 4]},
    ),
    "StreamingDiLoCoStrategy numbers": (
        lambda alpha, outer_lr, pattern: StreamingDiLoCoStrategy(
            "sgd", H=3, num_fragments=2, alpha=alpha, outer_lr=outer_lr, pattern=pattern, lr=0.1
        ),
        {"alpha": [0.0, 0.5, 1.0], "outer_lr": [0.4, 1.0], "pattern": ["strided", "sequential"]},
    ),
    "StreamingDiLoCoStrategy, a delay for each node": (
        lambda lr, outer_lr, momentum: StreamingDiLoCoStrategy(
            "sgd", OptimSpec("sgd", lr=outer_lr, momentum=momentum), H=3, num_fragments=2, delay=[0, 2, 1, 1], lr=lr
        ),
        {"lr": [0.1, 0.02], "outer_lr": [0.4, 1.0], "momentum": [0.5, 0.9]},
    ),
    "EDiTStrategy": (
        lambda clip, threshold, alpha, temperature: EDiTStrategy(
            "sgd", H=1, clip=clip, skip_anomalies=True, warmup=2, threshold=threshold, alpha=alpha,
            temperature=temperature, lr=0.1,
        ),
        {"clip": [0.01, 1.0], "threshold": [0.01, 2.0], "alpha": [0.02, 0.5], "temperature": [0.1, 1.0]},
    ),
    "EDiTStrategy without anomalies": (
        lambda clip, temperature, outer_lr: EDiTStrategy(
            "adamw", H=2, clip=clip, temperature=temperature, outer_lr=outer_lr, lr=0.01
        ),
        {"clip": [None, 0.05], "temperature": [1.0, torch.inf], "outer_lr": [0.4, 1.0], "seed": [0, 1]},
    ),
    "EagerDiLoCoStrategy": (
        lambda H, lr, outer_lr: EagerDiLoCoStrategy("adamw", H=H, lr=lr, outer_lr=outer_lr),
        {"H": [2, 3], "lr": [1e-2, 1e-3], "outer_lr": [0.4, 1.0], "seed": [0, 1]},
    ),
    "SPARTAStrategy": (
        lambda p, lr, delay: SPARTAStrategy(p, "adamw", lr=lr, delay=delay),
        {"p": [0.1, 0.5], "lr": [1e-2, 1e-3], "delay": [0, 2], "seed": [0, 1]},
    ),
    "SPARTAStrategy corrected": (
        lambda p, delay, correct: SPARTAStrategy(p, "sgd", lr=0.1, delay=delay, correct_delay=correct),
        {"p": [0.1, 0.5], "delay": [1, 2], "correct": [True, False]},
    ),
    "SPARTAStrategy selectors": (
        lambda selector: SPARTAStrategy(None, "sgd", lr=0.1, index_selector=selector),
        {"selector": [PartitionedSelector(0.3), ShuffledSequentialSelector(0.5), ScheduledSelector(0.4, 3)]},
    ),
    "SPARTAStrategy topk": (
        lambda p, bits: SPARTAStrategy(p, "sgd", lr=0.1, compression_method="topk", quantization_bits=bits),
        {"p": [0.1, 0.3], "bits": [None, 8, 4]},
    ),
    "SPARTADiLoCoStrategy": (
        lambda p, every, H: SPARTADiLoCoStrategy(p, every, H, "sgd", lr=0.1),
        {"p": [0.1, 0.5], "every": [1, 2], "H": [3, 5]},
    ),
    "GossipStrategy": (
        lambda topology, lr, every: GossipStrategy(topology, every, "sgd", lr=lr),
        {"topology": ["ring", "random_matching", "one_peer_exponential", RING, PAIRS, [RING, PAIRS]],
         "lr": [0.1, 0.02], "every": [1, 2]},
    ),
    "GradientTrackingStrategy": (
        lambda topology, lr, order: GradientTrackingStrategy(topology, "sgd", lr=lr, order=order),
        {"topology": ["ring", RING], "lr": [0.1, 0.02], "order": ["adapt_then_combine", "combine_then_adapt"]},
    ),
    "QGMStrategy": (
        lambda momentum, lr, nesterov: QGMStrategy("ring", momentum=momentum, lr=lr, nesterov=nesterov),
        {"momentum": [0.5, 0.9], "lr": [0.1, 0.02], "nesterov": [False, True], "seed": [0, 1]},
    ),
    "RelaySumStrategy": (
        lambda topology, lr: RelaySumStrategy(topology, "sgd", lr=lr),
        {"topology": ["chain", "double_binary_tree"], "lr": [0.1, 0.02], "seed": [0, 1]},
    ),
    "MATCHAStrategy": (
        lambda budget, lr: MATCHAStrategy("ring", "sgd", budget=budget, lr=lr),
        {"budget": [0.5, 1.0], "lr": [0.1, 0.02], "seed": [0, 1]},
    ),
    "SGPStrategy": (
        lambda topology, lr: SGPStrategy(topology, "sgd", lr=lr),
        {"topology": ["one_peer_exponential", SHARES, [RING, SHARES]], "lr": [0.1, 0.02]},
    ),
    "CHOCOStrategy": (
        lambda codec, lr: CHOCOStrategy("ring", "sgd", codec=codec, consensus=0.3, lr=lr),
        {"codec": ["sign", TopK(0.2)], "lr": [0.1, 0.02]},
    ),
    "D2Strategy": (
        lambda topology, lr: D2Strategy(topology, "sgd", lr=lr), {"topology": ["complete", PAIRS], "lr": [0.1, 0.02]},
    ),
    "ExactDiffusionStrategy": (
        lambda topology, lr, seed: ExactDiffusionStrategy(topology, "adam", lr=lr),
        {"topology": ["ring", PAIRS], "lr": [0.1, 0.02], "seed": [0, 1]},
    ),
    "DeMoStrategy": (
        lambda k, lr, decay: DeMoStrategy(compression_topk=k, compression_chunk=16, lr=lr, weight_decay=decay),
        {"k": [2, 4], "lr": [1e-2, 1e-3], "decay": [0.0, 0.1], "seed": [0, 1]},
    ),
    "CommunicateOptimizeStrategy": (
        lambda first, lr: composed(first, Exchange(Mean(), every=3), lr=lr),
        {"first": [Exchange(Sparse(0.2, Mean())), Exchange(Mean(island_size=2)), Exchange(Mix("ring")),
                   Exchange(MostMoved(0.1)), Exchange(Outer(Mean()), every=2)], "lr": [0.1, 0.02]},
    ),
    "combinators": (
        lambda n, d, lr: composed(every(n, Exchange(Mean(), delay=d, late="change" if d else "value")), lr=lr),
        {"n": [1, 2], "d": [0, 1, 2], "lr": [0.1, 0.02]},
    ),
    "rings": (
        lambda how, lr: AllReduceStrategy("sgd", lr=lr, average=how),
        {"how": [Ring("bfloat16"), QuantisedRing(), AllToAll()], "lr": [0.1, 0.02]},
    ),
    "compressed gradients": (
        lambda codec, n: composed(Exchange(Compressed(Mean(), codec), every=n, of="gradients")),
        {"codec": ["int8", TopK(0.2)], "n": [1, 2]},
    ),
    "StrongestCosines": (
        lambda k, lr: composed(Exchange(StrongestCosines(compression_topk=k, compression_chunk=16), of="gradients"),
                               lr=lr),
        {"k": [2, 4], "lr": [1e-2, 1e-3]},
    ),
    "AllReduce, numbers of each node": (
        lambda b1, norm: AllReduceStrategy(OptimSpec("adamw", lr=0.01, betas=(b1, 0.95)), max_norm=norm),
        {"b1": [torch.linspace(0.5, 0.9, K), 0.8], "norm": [0.5, None, torch.linspace(0.1, 0.4, K)]},
    ),
    "Strategy": (lambda lr, seed: Strategy("adagrad", lr=lr), {"lr": [0.1, 0.02], "seed": [0, 1]}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_configuration_is_what_it_is_alone(name: str) -> None:
    make, grid = CASES[name]
    result = run_sweep(make, grid)
    assert len(result.rows) == torch.tensor([len(values) for values in grid.values()]).prod()
    check_all(result)


def test_every_exported_strategy_is_there() -> None:
    names = {name for name in vecgym.strategy.__all__ if name.endswith("Strategy")}
    others = {"SimpleReduceStrategy", "RankStrategy"}  # another name; a base
    others |= {name for name in names if getattr(vecgym.strategy, name).asynchronous}  # test_async_sweep.py has theirs
    assert names - others <= set(CASES)


@pytest.mark.filterwarnings("ignore:.*never had a gradient")  # models are drawn, too
@pytest.mark.parametrize("case", list(fuzz.cases(0, 5)), ids=range(5))
def test_random_configurations_are_what_they_are_alone(case: Case) -> None:
    """Some of `python -m tests.fuzz --campaign sweeps`."""
    assert not isinstance(fuzz.run(case), Failure)


# --------------------------------------------------------------------------------- what an axis may be


def outer(lr: float, H: int = 2) -> Strategy:
    return DiLoCoStrategy("adamw", H=H, lr=lr)


@pytest.mark.parametrize("model", ["CNN", "GPT", "WithFrozen", "LSTM", "DictBatch", "Dropout"])
def test_models_of_all_kinds(model: str) -> None:
    """Batch norm, tied weights, frozen parameters and integer buffers, another form of batch, and two for the loop.

    There a node's dropout masks are keyed by seed, step and node, so they too are those of the single run.
    """
    settings: dict[str, Any] = {"engine": "loop"} if model in ("LSTM", "Dropout") else {}
    result = run_sweep(outer, {"lr": [1e-2, 1e-3], "seed": [0, 1]}, model, **settings)
    check_all(result, model, **settings)


def test_axes_of_settings_are_programs() -> None:
    grid = {"num_nodes": [2, 3], "batch_size": [4, 8], "lr": [1e-2, 1e-3]}
    result = run_sweep(outer, grid)
    check_all(result, stacks=4)
    text = result.explain()
    assert "8 configurations in 4 programs" in text
    assert "another num_nodes" in text
    assert "another batch_size" in text


class Unsaid(GPAStrategy):
    """GPA whose model is x, as in the paper; it does not say that its method works on several configurations."""

    def result(self, state: Any) -> Any:
        return self.average(state)


class Said(Unsaid, batched=("mu_x", "mu_y"), random=False):
    pass


@pytest.mark.parametrize(("cls", "num_groups"), [(Said, 1), (Unsaid, 4)])
def test_a_class_with_a_result_of_its_own_is_stacked(cls: Any, num_groups: int) -> None:
    """Messages about a configuration go by its own settings."""
    result = run_sweep(lambda lr, mu_y: cls("sgd", mu_y=mu_y, lr=lr), {"lr": [0.1, 0.02], "mu_y": [0.9, 0.5]})
    check_all(result)
    strategies = [config.strategy for config in result._runner.configs]
    assert len(groups_of(strategies, [RunFacts(num_nodes=K)] * 4)[1]) == num_groups
    assert result.history(0)["val_loss"][-1] != result.history(0)["val_loss_local"][-1]


def test_strategy_classes_share_a_program() -> None:
    makes = {"cls": [FedAvgStrategy, GossipStrategy, SPARTAStrategy, AllReduceStrategy], "lr": [0.1, 0.02]}
    result = run_sweep(lambda cls, lr: cls(inner_optim="sgd", lr=lr), makes)
    check_all(result, stacks=2)  # AllReduce: one copy of the parameters
    assert [row["cls"] for row in result.rows[::2]] == makes["cls"]
    assert "place of the parameters" in result.explain()


def test_gradients_are_exchanged_beside_configurations_whose_nodes_sit_out() -> None:
    """No node that sits out has a gradient to exchange; those of DeMo and of compressed gradients all have."""
    resting = FedAvgStrategy("sgd", H=2, participation=0.3, lr=0.05)
    exchanging = [
        DeMoStrategy(lr=0.01),
        CommunicateOptimizeStrategy([Exchange(Compressed(Mean(), "int8"), of="gradients")], "sgd", lr=0.05),
        CommunicateOptimizeStrategy([Exchange(Mean(), every=2, of="gradients")], "sgd", lr=0.05),
    ]
    for strategies in ([resting, *exchanging], [*exchanging, resting]):
        check_all(run_sweep(None, {"strategy": strategies}))
    check_all(run_sweep(None, {"strategy": [FedAvgStrategy("sgd", H=2, lr=0.05), *exchanging]}), stacks=1)


def test_strategies_may_be_an_axis() -> None:
    strategies = [FedAvgStrategy("adam", lr=0.01), SPARTAStrategy(0.1, "sgd", lr=0.1)]
    check_all(run_sweep(None, {"strategy": strategies, "seed": [0, 1]}))


def test_one_strategy_may_serve_all() -> None:
    check_all(run_sweep(AllReduceStrategy("sgd", lr=0.1), {"seed": [0, 1, 2]}))


def seeded_model(seed: int, width: int = 8) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 10))

            def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
                return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        return Net().to(F64)


class Scaled(nn.Module):
    """Its structure has a number that no parameter shows."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.net = make_model("MLP", dtype=F64)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.scale * self.net(batch)


def test_initial_parameters_may_differ() -> None:
    def model(seed: int) -> nn.Module:
        net = make_model("MLP", dtype=F64)
        with torch.no_grad():
            for p in net.parameters():
                p.add_(0.1 * torch.randn(p.shape, dtype=F64, generator=torch.Generator().manual_seed(seed)))
        return net

    result = run_sweep(outer, {"lr": [1e-2, 1e-3], "seed": [1, 2]}, model)
    check_all(result, model)
    first = [result.history(i)["val_loss"][0] for i in range(4)]
    assert first[0] == pytest.approx(first[2]) != pytest.approx(first[1])


def test_axes_of_tensors_are_told_apart_by_their_values() -> None:
    """Not by their text: of 2,000 numbers it shows six, and of each five digits."""
    values = [torch.zeros(2000), torch.zeros(2000).index_fill_(0, torch.tensor([1000]), 1e-3)]
    given: list[float] = []

    def make(x: Tensor) -> nn.Module:
        given.append(float(x.sum()))
        return seeded_model(0)

    sweep(
        make, data(), strategy=DiLoCoStrategy("sgd", H=1, lr=0.1), grid={"x": values}, num_nodes=2, max_steps=1,
        batch_size=4, device="cpu", progress=False,
    )  # fmt: skip
    assert given == [0.0, pytest.approx(1e-3)]


@pytest.mark.parametrize("model", [lambda width: seeded_model(0, width), Scaled])
def test_models_of_other_structure_are_other_programs(model: Any) -> None:
    axis = "scale" if model is Scaled else "width"
    result = run_sweep(outer, {axis: [1, 2], "lr": [1e-2, 1e-3]}, model)
    check_all(result, model, stacks=2)
    assert "another model" in result.explain()


def test_other_frozen_parameters_are_another_program() -> None:
    def model(shift: float) -> nn.Module:
        net = make_model("MLP", dtype=F64)
        with torch.no_grad():
            net.get_parameter("first.weight").requires_grad_(False).add_(shift)
        return net

    check_all(run_sweep(outer, {"shift": [0.0, 0.5], "lr": [1e-2, 1e-3]}, model), model, stacks=2)


def test_other_optimizers_share_a_program() -> None:
    specs = [OptimSpec("sgd", lr=0.1), OptimSpec("sgd", lr=0.1, momentum=0.9), OptimSpec("sgd", lr=0.1, nesterov=True,
             momentum=0.5), OptimSpec("rmsprop", lr=1e-3), OptimSpec("rmsprop", lr=1e-2, centered=True),
             OptimSpec(Signed, lr=0.01), OptimSpec(Signed, lr=0.02)]  # fmt: skip
    specs += [OptimSpec("adamw", lr=lr, param_groups=no_decay) for lr in (1e-2, 1e-3)]
    check_all(run_sweep(lambda spec: FedAvgStrategy(spec, H=2), {"spec": specs}))


def no_decay(name: str, p: Tensor) -> dict[str, Any]:
    return {} if p.dim() > 1 else {"weight_decay": 0.0}


class Signed(torch.optim.SGD):
    """An optimizer that is not known to be elementwise."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p.data -= self.param_groups[0]["lr"] * p.grad.sign()


class Halves(Average):
    """A user's own: the nodes move half-way to their mean."""

    common = False

    def agree(self, x: Tree, part: Part, memory: Any) -> Any:
        return tree.map(lambda p, m: (p + m) / 2, x, part.comm.mean(x))


class OwnRate(DiLoCoStrategy):
    """Its learning rate falls as the steps go on."""

    def train(self, part: Part) -> None:
        part.optimize(part.gradients(), part.lr / (1 + part.tick))
        part.report(part.losses)

    def rates(self, timetable: Any, tick: int, nodes: Any = None) -> tuple[Any, Any]:
        lr, outer_lr = super().rates(timetable, tick, nodes)
        return lr / (1 + tick), outer_lr


def test_a_learning_rate_of_a_strategys_own() -> None:
    check_all(run_sweep(lambda lr: OwnRate("adamw", H=2, lr=lr), {"lr": [1e-2, 1e-3]}))


def test_a_users_own_strategies() -> None:
    check_all(run_sweep(lambda lr: OneRank("sgd", lr=lr), {"lr": [0.1, 0.02], "seed": [0, 1]}))
    check_all(run_sweep(lambda H, lr: composed(Exchange(Halves(), H), lr=lr), {"H": [1, 2, 3], "lr": [0.1, 0.02]}))


class NoisyMean(Mean):
    """A user's own average that draws random numbers, and does not say so."""

    def write(self, y: Tree, x: Tree, part: Part, memory: Any) -> Tree:
        return {n: x + torch.rand(1, generator=part.generator("noise", part.due.step)) for n, x in y.items()}


class NoisyGradients(Strategy, batched=()):
    """A strategy with steps of its own, for stacks, that draws random numbers, and does not say so."""

    def train(self, part: Part) -> None:
        noise = torch.rand(1, generator=part.generator("noise", part.tick))
        part.optimize(tree.map(lambda g: g + noise, part.gradients()))
        part.report(part.losses)


@pytest.mark.parametrize("make", [lambda lr: Strategy("sgd", [Exchange(NoisyMean(), every=2)], lr=lr),
                                  lambda lr: NoisyGradients("sgd", [Exchange(Mean(), every=2)], lr=lr)])  # fmt: skip
def test_what_may_draw_random_numbers_draws_those_of_its_seed(make: Callable[[float], Strategy]) -> None:
    check_all(run_sweep(make, {"lr": [0.1, 0.02], "seed": [0, 1]}))


@pytest.mark.parametrize("settings", [{"minibatch_size": 2}, {"chunk_size": 3}, {"engine": "loop"},
                                      {"max_steps": None, "num_epochs": 2, "batch_size": 5}])  # fmt: skip
def test_settings_of_fit(settings: dict[str, Any]) -> None:
    result = run_sweep(outer, {"lr": [1e-2, 1e-3], "shuffle": [True, False]}, **settings)
    check_all(result, **settings)


def test_data_of_each_nodes_own() -> None:
    def factory(rank: int, num_nodes: int, train: bool) -> Any:
        return TensorDataset(*make_data("MLP", 10 + rank, seed=rank + 10 * train, dtype=F64))

    model = make_model("MLP", dtype=F64)
    common: dict[str, Any] = {"max_steps": 5, "batch_size": 4, "val_interval": 2, "device": "cpu", "progress": False}
    grid: dict[str, Any] = {"weighting": ["equal", "examples"], "seed": [0, 1]}
    result = sweep(model, factory, factory, strategy=weighted, grid=grid, num_nodes=3, keep_models=True, **common)
    for i, row in enumerate(result.rows):
        trainer = Trainer(model, factory, factory)
        averaged = trainer.fit(weighted(row["weighting"]), 3, seed=row["seed"], **common)
        assert_close(dict(result.model(i).state_dict()), dict(averaged.state_dict()), 1e-10)
        for column in ("val_loss", "val_loss_local", "val_loss_each", "val_loss_p10", "examples"):
            assert result.history(i).last(column) == pytest.approx(trainer.history.last(column), rel=1e-10)


def weighted(weighting: Weighting) -> Strategy:
    return FedAvgStrategy("sgd", H=2, lr=0.1, weighting=weighting)


@pytest.mark.parametrize("chunk", [1, 3])
def test_a_split_sweep_is_the_same(chunk: int) -> None:
    grid = {"lr": [1e-2, 1e-3], "H": [2, 3], "seed": [0, 1]}
    result = run_sweep(outer, grid, chunk_configs=chunk)
    check_all(result, stacks=-(-8 // chunk))
    assert f"chunk_configs={chunk}" in result.explain()


def test_a_sweep_that_would_not_fit_is_split() -> None:
    grid = {"lr": [1e-2, 1e-3], "seed": [0, 1]}
    each = run_sweep(outer, grid, dry_run=True)._runner.programs[0].bytes_per_config
    result = run_sweep(outer, grid, max_memory_bytes=int(2.5 * each))
    assert [len(chunk) for chunk in result._runner.programs[0].chunks] == [2, 2]
    assert "each of" in result.explain()
    check_row(result, 3)


def test_what_keeps_one_copy_of_the_parameters_is_not_stacked_where_that_is_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stack of AllReduce runs computes with a copy of the parameters for each node, one of them with one for all."""
    grid: dict[str, Any] = {"lr": [1e-2, 1e-3], "seed": [0, 1]}

    def stacks(make: Callable[..., Strategy], **settings: Any) -> tuple[int, str]:
        result = run_sweep(make, grid, dry_run=True, **settings)
        return len(result._runner.programs[0].chunks), result.explain()

    def allreduce(lr: float) -> Strategy:
        return AllReduceStrategy("sgd", lr=lr)

    assert stacks(allreduce)[0] == 1
    monkeypatch.setattr("vecgym.sweeps.programs.MAX_FLOP_OF_ONE_COPY", 1)
    number, text = stacks(allreduce)
    assert number == 4
    assert "with one copy of the parameters: alone they are faster" in text
    assert stacks(allreduce, chunk_configs=2)[0] == 2
    assert stacks(outer)[0] == 1
    check_all(run_sweep(allreduce, grid), stacks=4)


# ------------------------------------------------------------------------------------- what is recorded


class Measured(nn.Module):
    """It offers metrics of its own: the accuracy, and a function of the mean loss."""

    loss_metrics = {"perplexity": torch.exp}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model("MLP", dtype=F64)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.net(batch)

    def val_metrics(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        loss = self.net(batch)
        return {"loss": loss, "root": loss.sqrt()}


@pytest.mark.parametrize(
    "make",
    [
        lambda: DiLoCoStrategy("adamw", H=2, outer_lr=0.5, lr=0.01),
        lambda: AllReduceStrategy("adamw", lr=0.01, cosine_anneal=True),
        lambda: FedAvgStrategy("sgd", H=2, lr=0.1, participation=0.5, server_optim="adam"),
        lambda: OneRank("sgd", lr=0.1),
    ],
    ids=["DiLoCo", "AllReduce", "server", "per rank"],
)
@pytest.mark.parametrize("chunk", [None, 1])
def test_a_history_has_every_column_of_a_run(make: Callable[[], Strategy], chunk: int | None) -> None:
    """... with the values of the run alone: learning rates, bytes, distances, the model's own metrics."""
    result = run_sweep(make, {"seed": [0, 1, 2]}, lambda: Measured(), chunk_configs=chunk)
    for index in range(3):
        trainer, _ = run_alone(result, index, lambda: Measured())
        found, alone = result.history(index), trainer.history
        assert found.columns == alone.columns
        assert {"val_root", "val_root_local", "val_perplexity", "memory_bytes"} <= set(found.columns)
        assert [set(row) for row in found] == [set(row) for row in alone]
        for column in set(alone.columns) - set(MEASURED):
            for x, y in zip(found[column], alone[column]):
                if y is not None:
                    x, y = (torch.as_tensor(value, dtype=F64) for value in (x, y))
                    torch.testing.assert_close(
                        x, y, rtol=1e-10, atol=1e-12, equal_nan=True, msg=f"row {index}: {column}"
                    )
        assert all(x >= 0 for column in MEASURED for x in found[column] if x is not None)


def test_without_validation_a_history_has_the_columns_of_a_run() -> None:
    settings: dict[str, Any] = {"batch_size": 4, "max_steps": 4, "device": "cpu", "progress": False, "val_interval": 3}
    strategy = GossipStrategy("ring", inner_optim="sgd", lr=0.1)
    result = sweep(
        make_model("MLP", dtype=F64), data(), strategy=strategy, grid={"seed": [0, 1]}, num_nodes=K, **settings
    )
    trainer = Trainer(make_model("MLP", dtype=F64), data())
    trainer.fit(strategy, K, seed=1, **settings)
    assert [set(row) for row in result.history(1)] == [set(row) for row in trainer.history]
    assert result.history(1)["consensus_distance_before"] == pytest.approx(trainer.history["consensus_distance_before"])


class Resting(Strategy):
    """In every other step no node trains, though they exchange."""

    def who_trains(self, run: RunFacts) -> Any:
        return lambda step, rows: [] if step % 2 else rows


def test_the_distance_before_an_exchange_is_after_the_training_of_these_nodes() -> None:
    """Other configurations have no influence: some have exchanged before others train."""
    strategies: dict[str, Strategy] = {
        "resting": Resting("sgd", [Exchange(Mean(), every=2)], lr=0.1), "averaging": FedAvgStrategy("sgd", H=2, lr=0.1),
    }  # fmt: skip
    settings: dict[str, Any] = {"batch_size": 4, "max_steps": 4, "device": "cpu", "progress": False, "val_interval": 1}
    model = make_model("MLP", dtype=F64)
    result = sweep(
        model, data(), strategy=lambda name: strategies[name], grid={"name": list(strategies)}, num_nodes=K, **settings
    )
    for index, row in enumerate(result.rows):
        trainer = Trainer(model, data())
        trainer.fit(strategies[row["name"]], K, **settings)
        for column in ("consensus_distance_before", "consensus_distance"):
            found, wanted = result.history(index)[column][1:], trainer.history[column][1:]
            assert found == pytest.approx(wanted, abs=1e-12)


# ------------------------------------------------------------------------------------------- what is done at once


def test_what_all_configurations_share_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The structure of their one model, never; and which parameters had no gradient, until there is none."""
    monkeypatch.setattr(constancy, "_structure", None)
    asked: list[int] = []

    def of_one(state: Any, table: Any) -> list[str]:
        asked.append(0)
        return without_gradient(state, table)

    monkeypatch.setattr(chunk, "without_gradient", of_one)
    result = run_sweep(lambda lr: DiLoCoStrategy("adamw", H=2, lr=lr), {"lr": [0.01, 0.02, 0.03]})
    assert len(result._runner.programs) == 1
    assert len(asked) == 1


# ----------------------------------------------------------------------- what goes wrong, and going on later


@pytest.mark.parametrize("name", ["DiLoCo", "participation", "DDP"])
def test_a_curve_ends_where_its_configuration_diverges(name: str) -> None:
    """... in the same step as the run alone; the others go on unharmed."""
    make: Callable[..., Strategy] = {
        "DiLoCo": lambda lr: DiLoCoStrategy("sgd", H=2, lr=lr, max_norm=None),
        "participation": lambda lr: FedAvgStrategy(OptimSpec("sgd", lr=lr, momentum=0.5), H=2, participation=0.5),
        "DDP": lambda lr: AllReduceStrategy("sgd", lr=lr),
    }[name]
    result = run_sweep(make, {"lr": [0.1, 1e200, 0.02, 1e305], "seed": [0, 1]})
    status = [row["status"] for row in result.rows]
    assert status == ["finished"] * 2 + ["diverged"] * 2 + ["finished"] * 2 + ["diverged"] * 2
    for index in (0, 1, 4, 5):
        check_row(result, index)
    for index in (2, 3, 6, 7):
        with pytest.raises(DivergenceError) as caught:
            run_alone(result, index)
        row = result.rows[index]
        assert row["steps"] == caught.value.step + 1 < STEPS
        assert not torch.tensor(row["train_loss"]).isfinite()
    assert result.best("val_loss")["lr"] in (0.1, 0.02)
    assert "4 finished, 4 diverged" in repr(result)


@pytest.mark.parametrize("name", [*CASES, "per rank"])
def test_every_strategy_beside_one_that_has_diverged(name: str) -> None:
    """Its rows stay in the stack, as nan, in exchanges with others of the same kind too; and harm nobody."""
    make, grid = {**CASES, "per rank": (lambda lr: OneRank("sgd", lr=lr), {"lr": [0.1]})}[name]

    def model(start: str) -> nn.Module:
        made = make_model("MLP", dtype=F64)
        if start == "nan":
            for p in made.parameters():
                p.data.fill_(torch.nan)
        return made

    result = run_sweep(
        make, {**{axis: list(values)[:1] for axis, values in grid.items()}, "start": ["nan", "usual"]}, model
    )
    assert len(result._runner.programs) == 1
    assert [(row["status"], row["steps"]) for row in result.rows] == [("diverged", 1), ("finished", STEPS)]
    check_row(result, 1)
    assert all(x is None for x in result.history(0)["val_loss"][1:]), "nothing is recorded of it any more"


def test_the_first_of_a_stack_may_diverge() -> None:
    result = run_sweep(lambda outer_lr, H: DiLoCoStrategy("adamw", H=H, lr=0.01, outer_lr=outer_lr),
                       {"outer_lr": [1e250, 0.4, 1e300, 1.0], "H": [2, 3], "seed": [0, 1]})  # fmt: skip
    assert [row["status"] for row in result.rows] == (["diverged"] * 4 + ["finished"] * 4) * 2
    steps = [row["steps"] for row in result.rows]
    assert steps[0] < steps[2], "one after the other"
    for index in [*range(4, 8), *range(12, 16)]:
        check_row(result, index)


@pytest.mark.parametrize(
    ("make", "grid", "sizes"),
    [
        (lambda H, lr: DiLoCoStrategy("adamw", H=H, outer_lr=lr), {"lr": [0.4, 1.0], "H": [2, 3]}, [2, 2]),
        (lambda H, optim: FedAvgStrategy(optim, H=H), {"optim": ["sgd", "adam"], "H": [2], "seed": [0, 1]}, [2, 2]),
        (lambda p: SPARTAStrategy(p), {"p": [0.1], "seed": [0, 1]}, [1, 1]),  # random masks
        (lambda size: FedAvgStrategy(island_size=size), {"size": [2], "seed": [0, 1]}, [1, 1]),
        (lambda outer: DiLoCoStrategy("adamw", outer, H=2), {"outer": ["sgd", "adam"], "seed": [0]}, [1, 1]),
    ],
)  # fmt: skip
def test_exchanges_that_are_alike_are_one(make: Any, grid: dict[str, Any], sizes: list[int]) -> None:
    runner = run_sweep(make, grid, dry_run=True)._runner
    configs = runner.programs[0].configs
    chunk = Chunk(Work(configs), runner.options, prepared_engine(configs, runner.options), {})
    assert [group.size for group in chunk.simulation.groups] == sizes


def test_gradients_are_exchanged_although_nodes_of_other_configurations_sit_out() -> None:
    resting = FedAvgStrategy("sgd", lr=0.1, H=2, participation=0.5)
    powersgd = CommunicateOptimizeStrategy([Exchange(Compressed(Mean(), "powersgd"), of="gradients")], "sgd", lr=0.1)
    for others in ([DeMoStrategy(lr=0.01)], [DeMoStrategy(lr=0.01), FedAvgStrategy("sgd", lr=0.1), powersgd]):
        check_all(run_sweep(None, {"strategy": [resting, *others]}))


def test_all_may_diverge() -> None:
    result = run_sweep(lambda lr: FedAvgStrategy("sgd", lr=lr), {"lr": [1e200, 1e300]})
    assert [row["status"] for row in result.rows] == ["diverged"] * 2
    with pytest.raises(ValueError, match="no configuration that finished"):
        result.best("val_loss")


def test_a_stack_of_which_nothing_is_left_ends() -> None:
    tensors = make_data("MLP", 90, 0, F64)
    assert isinstance(tensors, tuple)
    reads = []
    for max_steps in (6, 60):
        counted = Interrupting(*tensors, after=-1)
        result = sweep(
            make_model("MLP", dtype=F64), counted, strategy=lambda lr: FedAvgStrategy("sgd", lr=lr), num_nodes=K,
            grid={"lr": [1e200, 1e300]}, max_steps=max_steps, batch_size=4, device="cpu", progress=False,
        )  # fmt: skip
        assert max(row["steps"] for row in result.rows) <= 3
        reads.append(counted.left)
    assert reads[0] == reads[1]


class Interrupting(TensorDataset):
    """Ctrl-C comes while some batch is read."""

    def __init__(self, *tensors: Tensor, after: int) -> None:
        super().__init__(*tensors)
        self.left = after

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)
        return [tuple(x[i] for x in self.tensors) for i in indices]


RESUMED: dict[str, Callable[..., Strategy]] = {
    "DiLoCo": lambda H, lr: DiLoCoStrategy("adamw", H=H, lr=lr),
    "DiLoCo in one exchange": lambda H, lr: DiLoCoStrategy("adamw", H=2, lr=0.01, outer_lr=lr * H),
    "SPARTA": lambda H, lr: SPARTAStrategy(None, "sgd", lr=lr, index_selector=PartitionedSelector(1 / H), delay=1),
    "participation": lambda H, lr: FedAvgStrategy("adam", H=H, lr=lr, participation=0.5),
    "per rank": lambda H, lr: OneRank("sgd", lr=lr),
}


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("after", [6, 11, 19])  # before the first step; in the first stack; in the second
def test_interrupted_and_resumed(name: str, after: int, tmp_path: Path) -> None:
    """Ctrl-C keeps what there is; the same call goes on from the file, to the same bits."""
    path = tmp_path / "results" / "sweep.pt"
    tensors = make_data("MLP", 90, 0, F64)
    assert isinstance(tensors, tuple)
    model = make_model("MLP", dtype=F64)

    def call(dataset: Any, resume: Any = path) -> SweepResult:
        return sweep(
            model, dataset, data("MLP", 10, seed=1), strategy=RESUMED[name], resume=resume, num_nodes=K,
            grid={"H": [2, 3], "lr": [0.01, 0.02, 1e200]}, max_steps=STEPS, batch_size=4, val_interval=3,
            chunk_configs=3, device="cpu", progress=False, keep_models=True,
        )  # fmt: skip

    with pytest.warns(VecgymWarning, match="interrupted: SweepResult"):
        first = call(Interrupting(*tensors, after=after))
    assert 0 < first.num_pending <= 6
    assert path.exists()
    assert {row["status"] for row in first.rows} & {"interrupted", "pending"}
    counted = Interrupting(*tensors, after=-1)
    second = call(counted)
    whole = call(Interrupting(*tensors, after=-1), None)
    assert second.num_pending == 0
    assert str(second.rows) == str(whole.rows)  # nan is not equal to nan
    for i, row in enumerate(whole.rows):
        if row["status"] == "finished":
            for column in ("train_loss", "lr", "bytes_step", "bytes_total"):
                assert second.history(i)[column] == whole.history(i)[column]
            assert_close(dict(second.model(i).state_dict()), dict(whole.model(i).state_dict()), 0.0)
    calls = -counted.left  # fewer than from the start: the steps done were not done again
    third = Interrupting(*tensors, after=-1)
    assert call(third).rows[0] == second.rows[0]
    assert third.left > -9, "a finished sweep reads nothing but what it is planned and recognised with"
    assert calls > -third.left


def test_resumed_after_some_have_diverged(tmp_path: Path) -> None:
    """Configurations that diverged stood between exchanges that are alike, whose states stay apart."""

    def strategy(lr: float, H: int) -> Strategy:
        return DiLoCoStrategy("sgd", H=H, lr=lr, outer_lr=1e300 if (lr, H) == (0.01, 3) else 0.7)

    tensors = make_data("MLP", 90, 0, F64)
    assert isinstance(tensors, tuple)

    def call(dataset: Any, resume: Path | None) -> SweepResult:
        return sweep(
            make_model("MLP", dtype=F64), dataset, strategy=strategy, grid={"lr": [0.01, 0.02], "H": [2, 3]},
            num_nodes=K, max_steps=9, batch_size=4, resume=resume, device="cpu", progress=False,
        )  # fmt: skip

    path = tmp_path / "sweep.pt"
    with pytest.warns(VecgymWarning, match="interrupted: SweepResult"):
        first = call(Interrupting(*tensors, after=15), path)
    assert {row["status"] for row in first.rows} == {"interrupted", "diverged"}
    second, whole = (call(Interrupting(*tensors, after=-1), x) for x in (path, None))
    assert str(second.rows) == str(whole.rows)


class Sine(nn.Module):
    """Its parameters have the names and shapes of `Cosine`'s."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Linear(16, 10, dtype=F64)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return torch.nn.functional.cross_entropy(self.net(batch[0]).sin(), batch[1])


class Cosine(Sine):
    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return torch.nn.functional.cross_entropy(self.net(batch[0]).cos(), batch[1])


def other_weights() -> nn.Module:
    model = Sine()
    with torch.no_grad():
        model.net.weight[3] += 0.1
    return model


def other_forward() -> nn.Module:
    """Of a class of the same name."""
    Renamed: Any = type("Sine", (Sine,), {"forward": Cosine.forward})
    return Renamed()


def other_data(name: str = "MLP", num_examples: int = 90) -> Any:
    x, y = data(name, num_examples).tensors
    return TensorDataset(x + 0.1, y)


def decaying(factor: float) -> Callable[[int], float]:
    return lambda step: factor**step


def kept(path: Path, **given: Any) -> SweepResult:
    """Two configurations, in a file; every argument may be another one."""
    settings: dict[str, Any] = {
        "model": Sine(), "train": data(), "val": data(num_examples=10, seed=1), "grid": {"lr": [0.1, 0.01]},
        "schedule": decaying(0.9), "groups": no_decay, "H": 2, "num_nodes": 2, "max_steps": 2,
        "batch_size": 4, "val_interval": 1, "weights": torch.arange(2000.0), **given,
    }  # fmt: skip
    model, train, val, schedule, groups, H, weights = (
        settings.pop(key) for key in ("model", "train", "val", "schedule", "groups", "H", "weights")
    )

    class Weighted(Mean):
        def __init__(self) -> None:
            super().__init__()
            self.table = weights

    def strategy(lr: float) -> Strategy:
        spec = OptimSpec("adamw", lr=lr, param_groups=groups)
        return CommunicateOptimizeStrategy(
            [Exchange(Weighted(), every=H)], spec, lr_scheduler=schedule if lr < 0.1 else None
        )

    return sweep(model, train, val, strategy=strategy, resume=path, device="cpu", progress=False, **settings)


class Scale:
    """A part of a model that says what it is in a private attribute."""

    def __init__(self, scale: float) -> None:
        self._scale = scale


class SineTimes(Sine):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.by = Scale(scale)

    def forward(self, batch: Any) -> Tensor:
        loss: Tensor = super().forward(batch)
        return self.by._scale * loss


def test_models_that_differ_in_something_private_are_trained_as_they_are() -> None:
    settings: dict[str, Any] = {"num_nodes": 2, "max_steps": 2, "batch_size": 4, "device": "cpu", "progress": False}
    made = {scale: seeded_scaled(scale) for scale in (1.0, 3.0)}
    result = sweep(
        lambda scale: made[scale], data(), data(num_examples=10, seed=1), strategy=DiLoCoStrategy("sgd", H=2, lr=0.1),
        grid={"scale": [1.0, 3.0]}, **settings,
    )  # fmt: skip
    assert not equal_but_weights(made[1.0], made[3.0])
    for row in result.rows:
        trainer = Trainer(made[row["scale"]], data(), data(num_examples=10, seed=1))
        trainer.fit(DiLoCoStrategy("sgd", H=2, lr=0.1), **settings)
        assert row["val_loss"] == pytest.approx(trainer.history.last("val_loss"), rel=1e-6)


def seeded_scaled(scale: float) -> SineTimes:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return SineTimes(scale)


class OfItsOwn(DiLoCoStrategy, batched=("clip", "table")):
    """Settings that may differ between configurations, and are no numbers of nodes."""

    def __init__(self, clip: float, table: Any) -> None:
        super().__init__("sgd", H=2, lr=0.1)
        self.clip, self.table = clip, table


def test_settings_of_ones_own_may_be_anything() -> None:
    for clip, table in ((math.inf, [1, 2]), (0.5, torch.ones(2, 3))):
        OfItsOwn(clip, table).check(num_nodes=4, max_steps=4)
    with pytest.raises(TypeError, match="cannot have a setting 'rates', since that is a method"):
        OfItsOwn(1.0, 0).rates = nn.Linear(1, 1)  # type: ignore[method-assign]


def test_what_differs_from_a_saved_sweep_is_said_of_the_row_that_differs(tmp_path: Path) -> None:
    def swept(*lengths: int) -> SweepResult:
        return sweep(
            make_model("MLP"), dataset("MLP"), strategy=lambda H, lr: DiLoCoStrategy("sgd", H=H, lr=lr),
            points=[{"H": H, "lr": 0.1 + i} for i, H in enumerate(lengths)], num_nodes=2, max_steps=4, batch_size=4,
            device="cpu", progress=False, resume=tmp_path / "sweep.pt",
        )  # fmt: skip

    swept(2, 2, 2)
    for lengths, said in (
        ((2, 2, 3), r"grid\['H'\] of row 2"),
        ((3, 2, 2), r"grid\['H'\]"),
        ((2, 3, 3), r"\] of row 1"),
    ):
        with pytest.raises(ValueError, match=rf"{said}: saved 2, given 3") as raised:
            swept(*lengths)
        assert "nothing" not in str(raised.value)
        assert str(raised.value).count("grid['H']") == 1


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "weights": ({"model": other_weights()}, r"loss of the initial model: saved 2\.[0-9]+, given 2\."),
    "class": ({"model": Cosine()}, "model: saved Sine, given Cosine"),
    "forward": ({"model": other_forward()}, r"loss of the initial model: saved 2\.[0-9]+, given 2\."),
    "data": ({"train": other_data()}, "first batch of the training data of 2 nodes: saved checksum"),
    "validated": ({"val": TensorDataset(*data(num_examples=10, seed=2).tensors)}, "first batch of the validation data"),
    "read data": ({"train": Rows(data().tensors)}, "training data: saved TensorDataset of 90, given Rows of 90"),
    "validation": ({"val": data(num_examples=11, seed=1)}, "validation data: saved TensorDataset of 10, given"),
    "no validation": ({"val": None}, "validation data: saved TensorDataset of 10, given None"),
    "schedule": ({"schedule": decaying(0.8)}, r"learning rate of step 1 of row 1: saved 0\.009, given 0\.008"),
    "groups": ({"groups": lambda name, p: {}}, r"strategy\.inner\.spec\.param_groups: saved no_decay, given .*lambda"),
    "tensor": (
        {"weights": torch.arange(2000.0).index_fill(0, torch.tensor([1000]), 0.0)},
        r"strategy\.exchanges\[0\]\.how\.table: saved float32 \[2000\] with checksum",
    ),
    "grid": ({"grid": {"lr": [0.1, 0.02]}}, r"grid\['lr'\] of row 1: saved 0\.01, given 0\.02"),
    "more": ({"grid": {"lr": [0.1, 0.02, 0.03]}}, "number of configurations: saved 2, given 3"),
    "axes": ({"grid": {"lr": [0.1, 0.02], "seed": [0]}}, "axes: saved lr, given lr, seed"),
    "H": ({"H": 1}, r"strategy\.exchanges\[0\]\.every: saved 2, given 1"),
    "batch_size": ({"batch_size": 2}, "batch_size: saved 4, given 2"),
    "max_steps": ({"max_steps": 3}, "number of steps: saved 2, given 3"),
    "num_nodes": ({"num_nodes": 3}, "num_nodes: saved 2, given 3"),
    "val_interval": ({"val_interval": 2}, "val_interval: saved 1, given 2"),
    "collate_fn": (
        {"dataloader_kwargs": {"collate_fn": torch.utils.data.default_collate}}, "collate_fn: saved None, given",
    ),
    "models": ({"keep_models": True}, "keep_models: saved False, given True"),
}  # fmt: skip


@pytest.fixture(scope="module")
def kept_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kept") / "sweep.pt"
    kept(path)
    return path


@pytest.mark.parametrize("name", OTHERS)
def test_another_sweep_is_refused_saying_what_differs(name: str, kept_file: Path) -> None:
    given, message = OTHERS[name]
    before = kept_file.read_bytes()
    with pytest.raises(ValueError, match=rf"(?s)holds another sweep:\n.*{message}.*remove the file"):
        kept(kept_file, **given)
    assert kept_file.read_bytes() == before
    assert [path.name for path in kept_file.parent.iterdir()] == ["sweep.pt"]


def test_the_same_sweep_goes_on(kept_file: Path) -> None:
    """Objects made anew, and what changes rounding only."""
    assert kept(kept_file).num_pending == 0
    assert kept(kept_file, engine="loop", chunk_configs=1, schedule=decaying(0.9)).num_pending == 0


class Noise(Rows):
    """Read at random, from a generator of its own."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + torch.rand(x.shape, generator=GENERATOR), y


GENERATOR = torch.Generator()


def test_data_that_are_no_tensors_are_recognised_by_examples(tmp_path: Path) -> None:
    """Of a class, or made by a function; those that differ at every read by their number."""
    x, y = data().tensors
    for i, make in enumerate([Rows, Noise, lambda held: lambda rank, num_nodes, train: Rows(held)]):
        path = tmp_path / f"{i}.pt"
        kept(path, train=make((x, y)))
        assert kept(path, train=make((x, y))).num_pending == 0
        with pytest.raises(ValueError, match="training data"):
            kept(path, train=make((x[:80], y[:80]) if make is Noise else (x + 1, y)))


def test_files_that_are_no_results_of_a_sweep(kept_file: Path, tmp_path: Path) -> None:
    old, damaged, run = (tmp_path / name for name in ("old.pt", "damaged.pt", "run.pt"))
    runfile.write(old, {"fingerprint": "0a1b", "sweep": {}})
    with pytest.raises(ValueError, match=r"old\.pt was written by another version of vecgym"):
        kept(old)
    damaged.write_bytes(kept_file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"damaged\.pt is damaged"):
        kept(damaged)
    runfile.write(run, {"identity": {}})
    with pytest.raises(ValueError, match=r"run\.pt holds no sweep"):
        kept(run)


def test_results_of_another_form_are_named(kept_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "sweep.pt"
    runfile.write(path, {**runfile.read(kept_file), "sweep": {"chunks": [], "curves": {0: {}}}})
    with pytest.raises(ValueError, match=r"sweep\.pt does not have the contents .*Curve.* missing 4"):
        kept(path)


@pytest.mark.parametrize(
    ("path", "kind", "message"),
    [
        (True, TypeError, "resume=True must be the path of a file"),
        ("FOLDER", ValueError, "is a folder; give a file, such as"),
        ("/proc/none/sweep.pt", ValueError, "cannot be written to"),
    ],
)
def test_where_results_cannot_be_kept(path: Any, kind: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=message):
        kept(tmp_path if path == "FOLDER" else path)


def of_seed(seed: int) -> nn.Module:
    model = Sine()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def enlarged(path: Path | None, grid: Mapping[str, Any], dataset: Any = None, **given: Any) -> SweepResult:
    settings: dict[str, Any] = {"num_nodes": K, "max_steps": STEPS, "batch_size": 4, "val_interval": 3, **given}
    return sweep(
        of_seed, data() if dataset is None else dataset, data(num_examples=10, seed=1), strategy=outer, grid=grid,
        resume=path, device="cpu", progress=False, keep_models=True, **settings,
    )  # fmt: skip


def same_results(result: SweepResult, expected: SweepResult) -> None:
    assert [{n: row[n] for n in result.axes} for row in result.rows] == [
        {n: row[n] for n in expected.axes} for row in expected.rows
    ]
    for i in range(len(expected)):
        assert [row.keys() for row in result.history(i)] == [row.keys() for row in expected.history(i)]
        for column in ("train_loss", "val_loss"):
            assert result.history(i).series(column)[1] == pytest.approx(expected.history(i).series(column)[1], rel=1e-9)
        assert_close(dict(result.model(i).state_dict()), dict(expected.model(i).state_dict()), 1e-10)


def test_more_seeds_and_values_are_added_to_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """... in any place of the grid; what is there already is not trained again."""
    path = tmp_path / "sweep.pt"
    first = enlarged(path, {"lr": [0.01, 0.02], "seed": [0, 1]})
    begin, trained = Chunk.__init__, list[Any]()

    def noted(chunk: Chunk, work: Work, *rest: Any) -> None:
        trained.extend(config.point for config in work.configs)
        begin(chunk, work, *rest)

    monkeypatch.setattr(Chunk, "__init__", noted)
    grid: dict[str, Any] = {"lr": [0.005, 0.01, 0.02], "seed": [2, 0, 1]}
    more = enlarged(path, grid)
    there = [{name: row[name] for name in ("lr", "seed")} for row in first.rows]
    points_of = [{"lr": lr, "seed": seed} for lr in grid["lr"] for seed in grid["seed"]]
    assert sorted(map(str, trained)) == sorted(str(point) for point in points_of if point not in there)
    trained.clear()
    same_results(enlarged(path, grid), more)
    assert trained == []
    same_results(more, enlarged(None, grid))


@pytest.mark.parametrize("after", [9, 21])
def test_more_are_added_to_what_was_interrupted(after: int, tmp_path: Path) -> None:
    path, tensors = tmp_path / "sweep.pt", data().tensors
    small = {"lr": [0.01, 0.02], "seed": [0, 1]}
    with pytest.warns(VecgymWarning, match="interrupted"):
        assert enlarged(path, small, Interrupting(*tensors, after=after), chunk_configs=2).num_pending > 0
    grid = {"lr": [0.02, 0.01, 0.1], "seed": [1, 0, 2]}
    found = enlarged(path, grid, Interrupting(*tensors, after=-1), chunk_configs=2)
    same_results(found, enlarged(None, grid, Interrupting(*tensors, after=-1)))


def test_a_file_keeps_what_is_in_it(tmp_path: Path) -> None:
    """A grid without one of the saved rows, or with other weights, settings or sharing, is refused."""
    path = tmp_path / "sweep.pt"
    grid = {"lr": [0.01, 0.02], "seed": [0, 1]}
    enlarged(path, grid)
    larger: dict[str, Any] = {"lr": [0.01, 0.02], "seed": [0, 1, 2]}
    refused: list[tuple[dict[str, Any], str]] = [
        ({"grid": {"lr": [0.01], "seed": [0, 1, 2]}}, r"saved 4, given 3, without row 2 .*grid\['lr'\]: saved 0.02"),
        (
            {"grid": larger, "batch_size": 8},
            "saved 4, given 6, without row 0 of the file. There:\n  batch_size: saved 4",
        ),
        ({"grid": larger, "dataset": other_data()}, "first batch of the training data of 4 nodes: saved checksum"),
    ]
    for given, message in refused:
        with pytest.raises(ValueError, match=rf"(?s)holds another sweep:.*{message}.*as many more values and seeds"):
            enlarged(path, **given)
    assert enlarged(path, larger).num_pending == 0


def test_sweeps_are_added() -> None:
    whole = enlarged(None, {"lr": [0.01, 0.02], "seed": range(4)})
    parts = [enlarged(None, {"lr": [0.01, 0.02], "seed": seeds}) for seeds in ([0, 1, 2], [3])]
    both = parts[0] + parts[1]
    assert (len(both), both.axes, repr(both)) == (8, whole.axes, "SweepResult(8 configurations: 8 finished)")
    for row, expected in zip(both.compare("lr"), whole.compare("lr"), strict=True):
        assert row["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-9)
        assert str(row["difference"])[:8] == str(expected["difference"])[:8]
        assert (row["lr"], row["seeds"]) == (expected["lr"], 4)
    assert both.rows[6]["seed"] == 3
    assert_close(dict(both.model(6).state_dict()), dict(whole.model(3).state_dict()), 1e-10)
    assert both.history(7)["train_loss"] == parts[1].history(1)["train_loss"]
    assert "another sweep" in both.explain()
    more = both + enlarged(None, {"lr": [0.1], "seed": range(4)})
    assert [row["lr"] for row in more.compare("lr")] == [0.01, 0.02, 0.1]
    priced = both.price(Network(1e6), Compute(0.1))
    assert len({row["sim_seconds"] for row in priced.rows}) == 1
    apart = [part.price(Network(1e6), {"a": Compute(0.1), "b": Compute(0.2)}) for part in parts]  # equal, not the same
    assert len(apart[0] + apart[1]) == 16


def test_sweeps_that_cannot_be_added() -> None:
    grid = {"lr": [0.01], "seed": [0, 1]}
    first = enlarged(None, grid)
    other: dict[str, Any] = {"lr": [0.01], "seed": [2]}
    seeds: dict[str, Any] = {"device": "cpu", "progress": False, "num_nodes": K, "max_steps": STEPS, "batch_size": 4}
    others: dict[str, tuple[SweepResult, str]] = {
        "numpy": (enlarged(None, {**grid, "lr": list(np.array([0.01]))}), "row 0 .* is row 0 of the first"),
        "itself": (first, "row 0 of the second sweep, with lr=0.01, seed=0, is row 0 of the first"),
        "axes": (enlarged(None, {**other, "batch_size": [4]}), "only one has batch_size. Give it to both"),
        "steps": (enlarged(None, other, max_steps=9), r"differ in max_steps \(7 and 9\): only values of common axes"),
        "data": (enlarged(None, other, data(num_examples=80)), "train_dataset .*TensorDataset of 90, .* of 80"),
        "as many other data": (
            enlarged(None, other, data(seed=5)), r"train_dataset \(TensorDataset of 90, the first with checksum"
        ),
        "strategy": (
            sweep(of_seed, data(), data(num_examples=10, seed=1), val_interval=3,
                  strategy=lambda lr: outer(lr, H=3), grid=other, **seeds),
            "differ in the strategy or the model of lr=0.01, seed=2, but for the seed",
        ),
        "model": (
            sweep(lambda seed: seeded_model(seed), data(), data(num_examples=10, seed=1), val_interval=3,
                  strategy=outer, grid=other, **seeds),
            "differ in the strategy or the model of lr=0.01, seed=2",
        ),
        "prices": (enlarged(None, other).price(Network(1e6), Compute(0.1)), "for different networks: add first"),
    }  # fmt: skip
    for second, message in others.values():
        with pytest.raises(ValueError, match=message):
            first + second


# ------------------------------------------------------------------------------- datasets that are functions of axes


def partition(alpha: float, seed: int = 0, held_out: float = 0.0) -> Any:
    x, y = data("MLP", 200).tensors
    shards = partition_dirichlet(y, K, alpha=alpha, min_size=4, seed=seed)
    return shards.datasets(TensorDataset(x, y), held_out=held_out)


def clients(alpha: float, seed: int) -> Any:
    return partition(alpha, seed, held_out=0.3)


def part(n: int) -> Any:
    return TensorDataset(*(x[:n] for x in data("MLP", 200).tensors))


OF_AXES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "partitions": (partition, data(num_examples=10, seed=1), {"alpha": [0.2, 2.0], "seed": [0, 1]}, {}),
    "clients": (clients, clients, {"alpha": [0.2, 2.0], "seed": [0, 1]}, {"batch_size": 64}),
    "epochs": (lambda alpha: partition(alpha), part(30), {"alpha": [0.2, 2.0]}, {"max_steps": None, "num_epochs": 1}),
    "sizes": (part, part, {"n": [13, 30, 200]}, {"batch_size": 8}),
    "absent": (partition, part(30), {"alpha": [0.2, 2.0]}, {"availability": Dropout(0.3, 2)}),
}


@pytest.mark.parametrize("name", OF_AXES)
def test_a_dataset_may_be_a_function_of_axes(name: str) -> None:
    """A partition by alpha and seed, say: each run is that of `fit` with the dataset of its point."""
    train, val, grid, given = OF_AXES[name]
    settings: dict[str, Any] = {"max_steps": STEPS, "batch_size": 4, "val_interval": 3, **given}
    settings |= {"device": "cpu", "progress": False}
    strategies = {"weighting": ["equal", "examples"], **grid}
    result = sweep(
        make_model("MLP", dtype=F64), train, val, num_nodes=K, grid=strategies, **settings,
        strategy=lambda weighting: FedAvgStrategy("sgd", H=2, lr=0.1, weighting=weighting),
    )  # fmt: skip
    for i in range(0, len(result), 3):
        row = result.rows[i]
        sets = [f(**{n: row[n] for n in signature(f).parameters if n in row}) if f in (train, val) and isfunction(f)
                else f for f in (train, val)]  # fmt: skip
        trainer = Trainer(make_model("MLP", dtype=F64), *sets)
        trainer.fit(
            FedAvgStrategy("sgd", H=2, lr=0.1, weighting=row["weighting"]), K, seed=row.get("seed", 42), **settings
        )
        history = result.history(i)
        assert [set(row) for row in history] == [set(row) for row in trainer.history]
        for column in ("train_loss", "val_loss", "val_loss_local"):
            assert history.series(column)[1] == pytest.approx(trainer.history.series(column)[1], rel=1e-10)


def test_what_the_seeds_vary_of_a_partition() -> None:
    settings: dict[str, Any] = {"num_nodes": K, "max_steps": 3, "batch_size": 4, "device": "cpu", "progress": False}
    for train, varied in ((partition, True), (lambda alpha: partition(alpha), False), (partition(0.2), False)):
        of_axis = {"alpha": [0.2]} if isfunction(train) else {"lr": [0.1]}
        result = sweep(
            of_seed, train, grid={**of_axis, "seed": [0, 1]}, **settings,
            strategy=lambda lr=0.1: FedAvgStrategy("sgd", H=2, lr=lr),
        )  # fmt: skip
        note = result.table().splitlines()[-1]
        assert ("do not vary the partition" not in note) == varied
        assert "the partition" in note


def test_datasets_of_axes_that_cannot_be(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"num_nodes": K, "max_steps": 3, "batch_size": 4, "device": "cpu", "progress": False}
    refused: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (
            partition,
            {"lr": [0.1]},
            ValueError,
            r'train_dataset takes alpha, which is not an axis.*grid\["alpha"\]=\.\.\.',
        ),
        (
            data(),
            {"lr": [0.1], "alpha": [1.0]},
            ValueError,
            "is not used: .*model or train_dataset may be a function of it",
        ),
        (lambda alpha: None, {"lr": [0.1], "alpha": [1.0]}, TypeError, "train_dataset is a NoneType, not a dataset"),
        (partition, {"lr": [0.1], "alpha": [-1.0]}, ValueError, r"train_dataset\(alpha=-1\.0\): alpha=-1\.0 must be"),
        (lambda rank: data(), {"lr": [0.1]}, TypeError, "is called as a factory"),
        (lambda: data(), {"lr": [0.1]}, TypeError, "is called as a factory"),
    ]
    for train, grid, kind, message in refused:
        with pytest.raises(kind, match=message):
            sweep(make_model("MLP", dtype=F64), train, strategy=lambda lr: outer(lr), grid=grid, **settings)
    factory = lambda rank, num_nodes, train: part(20)  # noqa: E731 - with an axis of its argument's name
    sweep(make_model("MLP", dtype=F64), factory, strategy=lambda lr: outer(lr), grid={"lr": [0.1], "num_nodes": [2]},
          **{**settings, "num_nodes": None})  # fmt: skip
    path = tmp_path / "sweep.pt"
    given: dict[str, Any] = {"strategy": outer(0.1), "resume": path, **settings}
    sweep(make_model("MLP", dtype=F64), partition, grid={"alpha": [0.2]}, **given)
    found = sweep(make_model("MLP", dtype=F64), partition, grid={"alpha": [2.0, 0.2]}, **given)
    assert found.num_pending == 0
    with pytest.raises(ValueError, match=r"training data.*saved"):
        sweep(make_model("MLP", dtype=F64), lambda alpha: partition(alpha, 3), grid={"alpha": [0.2, 2.0]}, **given)


# ------------------------------------------------------------------------------------------ random search


def test_random_search() -> None:
    grid = {"lr": LogUniform(1e-3, 1e-1), "H": [1, 2, 3], "outer": Uniform(0.4, 1.0)}
    make = lambda lr, H, outer: DiLoCoStrategy("sgd", H=H, lr=lr, outer_lr=outer)  # noqa: E731
    result, again = (run_sweep(make, grid, samples=6, sample_seed=s) for s in (3, 3))
    other = run_sweep(make, grid, samples=6, sample_seed=4, dry_run=True)
    assert result.rows == again.rows
    assert [row["lr"] for row in result.rows] != [row["lr"] for row in other.rows]
    assert all(1e-3 <= row["lr"] <= 1e-1 and 0.4 <= row["outer"] <= 1 and row["H"] in (1, 2, 3) for row in result.rows)
    assert len({row["lr"] for row in result.rows}) == 6
    check_all(result)
    many = [p["lr"] for p in points({"lr": LogUniform(1e-4, 1e-2)}, 400, 0)]
    assert 0.4 < sum(lr < 1e-3 for lr in many) / 400 < 0.6  # as many below the geometric mean as above


# -------------------------------------------------------------------------------------- any list of points

POINTS = [
    {"lr": 0.02, "H": 3, "seed": 1}, {"H": 2, "lr": 0.1, "seed": 0}, {"lr": 1e200, "H": 2, "seed": 0},
    {"lr": 0.07, "H": 2, "seed": 5}, {"lr": 0.02, "H": 3, "seed": 1},
]  # fmt: skip  # one diverges, and one is there twice


def run_points(points: Any, **settings: Any) -> SweepResult:
    make = lambda lr, H: DiLoCoStrategy("sgd", H=H, lr=lr)  # noqa: E731
    return run_sweep(make, None, points=points, **settings)


def test_points_are_one_stack_in_their_order() -> None:
    result = run_points(iter(POINTS))
    assert sum(len(program.chunks) for program in result._runner.programs) == 1
    assert [{name: row[name] for name in ("lr", "H", "seed")} for row in result.rows] == POINTS
    assert [row["status"] for row in result.rows] == ["finished", "finished", "diverged", "finished", "finished"]
    assert result.axes == ["lr", "H", "seed"]
    for index in (0, 1, 3, 4):
        check_row(result, index)
    assert {**result.rows[0]} == {**result.rows[4]}
    assert result.best(over=None)["lr"] == min(result.rows[:2] + result.rows[3:], key=lambda row: row["val_loss"])["lr"]


def test_points_of_a_grid_are_the_grid() -> None:
    grid: dict[str, Any] = {"lr": [0.1, 0.02], "H": [2, 3]}
    result = run_points([{"lr": lr, "H": H} for lr in grid["lr"] for H in grid["H"]])
    assert result.rows == run_sweep(lambda lr, H: DiLoCoStrategy("sgd", H=H, lr=lr), grid).rows


def test_points_of_settings_and_models_are_several_programs() -> None:
    points = [{"num_nodes": n, "batch_size": b, "width": w} for n, b, w in ((2, 4, 4), (3, 4, 4), (2, 2, 8))]
    result = run_sweep(
        DiLoCoStrategy("sgd", H=2, lr=0.1), None, lambda width: seeded_model(0, width), points=points, num_nodes=None,
    )  # fmt: skip
    assert len(result._runner.programs) == 3
    assert [row["num_nodes"] for row in result.rows] == [2, 3, 2]
    assert len({row["val_loss"] for row in result.rows}) == 3


def test_points_are_resumed(tmp_path: Path) -> None:
    path = tmp_path / "sweep.pt"
    first = run_points(POINTS, resume=path)
    again = run_points(POINTS, resume=path, max_memory_bytes=1)  # nothing is trained, so no memory is too little
    assert str(again.rows) == str(first.rows)
    with pytest.raises(ValueError, match="holds another sweep"):
        run_points([{**POINTS[0], "lr": 0.5}, *POINTS[1:]], resume=path)


# --------------------------------------------------------------------------------------------- the result


def test_the_result_reads_as_a_table(tmp_path: Path) -> None:
    result = run_sweep(
        lambda cls, lr: cls("sgd", lr=lr), {"cls": [FedAvgStrategy, AllReduceStrategy], "lr": [0.1, 1e200]}
    )
    rows = result.rows
    assert [(row["cls"].__name__, row["lr"]) for row in rows] == [
        ("FedAvgStrategy", 0.1), ("FedAvgStrategy", 1e200), ("AllReduceStrategy", 0.1), ("AllReduceStrategy", 1e200),
    ]  # fmt: skip
    trainer, _ = run_alone(result, 0)
    for name in ("train_loss", "val_loss", "val_loss_local"):
        assert rows[0][name] == pytest.approx(trainer.history.last(name), rel=1e-10)
    assert rows[0]["bytes_total"] == trainer.ledger.total_bytes > 0
    assert (rows[0]["steps"], rows[0]["status"], rows[1]["status"]) == (STEPS, "finished", "diverged")
    lines = result.table().splitlines()
    assert len(lines) == 6
    assert all(name in lines[0] for name in ("cls", "lr", "val_loss", "bytes_total", "status"))
    assert "FedAvgStrategy" in lines[2]
    result.to_csv(tmp_path / "a.csv")
    with (tmp_path / "a.csv").open() as file:
        read = list(csv.DictReader(file))
    assert float(read[0]["val_loss"]) == rows[0]["val_loss"]
    assert [row["cls"] for row in read[1:3]] == ["FedAvgStrategy", "AllReduceStrategy"]
    assert result.best()["lr"] == 0.1
    assert result.best("bytes_total")["status"] == "finished"
    with pytest.raises(ValueError, match=r"'loss' is not a column.* There are cls, lr, status"):
        result.best("loss")


def test_the_fewest_bytes_are_no_news() -> None:
    """`best` warns of losses at the edge of an axis; a larger H always sends less."""
    result = run_sweep(lambda H: DiLoCoStrategy("sgd", H=H, lr=0.1), {"H": [1, 2, 4]})
    assert result.best("bytes_total")["H"] == 4
    with pytest.warns(VecgymWarning, match="there may be better values beyond it"):
        result.best("val_loss")


def test_the_best_is_that_of_all_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_sweep(lambda lr: FedAvgStrategy("sgd", lr=lr), {"lr": [0.1, 0.2, 1e200], "seed": [0, 1]}, max_steps=1)
    losses = iter([1.0, 3.0, 0.5, 4.0, 0.1, 0.1])
    rows = [{**row, "val_loss": next(losses)} for row in result.rows]
    monkeypatch.setattr(SweepResult, "rows", rows)
    rows[4]["status"], rows[5]["status"] = "finished", "diverged"
    best = result.best()
    assert (best["lr"], best["val_loss"], best["runs"], best["status"]) == (0.1, 2.0, 2, "finished")
    assert "seed" not in best
    assert result.best(over=None) == {**rows[4]}
    assert result.best(over="lr", where={"lr": lambda lr: lr < 1}) == {
        **{name: best[name] for name in ("steps", "bytes_total", "status", "runs")},
        "seed": 0, "val_loss": 0.75,
        **{name: pytest.approx((rows[0][name] + rows[2][name]) / 2) for name in (
            "train_loss", "val_loss_local", "consensus_distance")},
    }  # fmt: skip
    assert result.best(where={"lr": 0.2})["val_loss"] == 2.25
    with pytest.raises(ValueError, match="where='lrr' is not a column; did you mean 'lr'"):
        result.best(where={"lrr": 0.1})
    with pytest.raises(ValueError, match="there is no row where lr is 7"):
        result.plot("lr", where={"lr": 7})


def test_rows_have_a_text_for_every_value() -> None:
    matrices = [RING, PAIRS, torch.ones(4, 4)]
    rows = [{"f": f, "x": x} for f in (FedAvgStrategy, no_decay) for x in matrices]
    shown = [list(row.values()) for row in labelled(rows)]
    texts = ["list of 4 1", "list of 4 2", "Tensor [4, 4]"]
    assert shown == [[name, x] for name in ("FedAvgStrategy", "no_decay") for x in texts]
    assert select(rows, {"f": no_decay, "x": PAIRS}) == [rows[4]]  # a function that is a value is no condition


def test_pandas() -> None:
    pytest.importorskip("pandas", reason="pip install vecgym[test]")
    result = run_sweep(lambda cls: cls("sgd", lr=0.1), {"cls": [FedAvgStrategy, AllReduceStrategy]}, max_steps=2)
    frame = result.to_pandas()
    assert frame["cls"].tolist() == ["FedAvgStrategy", "AllReduceStrategy"]
    assert frame["val_loss"].tolist() == [row["val_loss"] for row in result.rows]
    history = result.history(0).to_pandas()
    assert history["train_losses[3]"].tolist()[1:] == result.history(0).node_array()[:, 3].tolist()
    assert len(history) == 3


def test_without_pandas_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="to_pandas needs pandas, which is not installed: pip install pandas"):
        vecgym.History().to_pandas()


def test_models_are_kept_when_asked_for() -> None:
    result = run_sweep(outer, {"lr": [1e-2]}, keep_models=False, max_steps=2)
    with pytest.raises(ValueError, match="keep_models=True"):
        result.model(0)


def test_a_dry_run_trains_nothing() -> None:
    result = run_sweep(outer, {"lr": [1e-2, 1e-3]}, dry_run=True)
    assert [row["status"] for row in result.rows] == ["pending"] * 2
    assert "2 configurations in 1 program:" in result.explain()
    assert len(result.history(0)) == 0


# ---------------------------------------------------------------------------------------------- bad input

BAD: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ValueError, r"grid\['rl'\] is not used.*did you mean 'lr'", {"grid": {"rl": [0.1], "lr": [0.1]}}),
    (ValueError, r"grid\['lr'\] is empty: give at least one value", {"grid": {"lr": []}}),
    (TypeError, r"grid\['lr'\]=0.1 is of type float; an axis is a list of values: \[0.1\]", {"grid": {"lr": 0.1}}),
    (TypeError, r"an axis is a list of values: \['abc'\]", {"grid": {"lr": "abc"}}),
    (TypeError, "grid is of type list; give a dict of axes", {"grid": [0.1]}),
    (ValueError, "strategy takes lr, which is not an axis: there are seed", {"grid": {"seed": [1]}}),
    (ValueError, r"grid\['H'\] is not used: it is no argument of strategy and no setting", {"grid": {"H": [1]}}),
    (ValueError, "there is no strategy", {"strategy": None, "grid": {"seed": [0]}}),
    (TypeError, "strategy is of type int; give a function of the axes", {"strategy": 3, "grid": {"seed": [0]}}),
    (TypeError, r"strategy\(lr=0.1\) returned 0.1; give a function", {"strategy": lambda lr: lr}),
    (ValueError, r"strategy\(lr=-1\): ", {"grid": {"lr": [0.1, -1]}}),
    (ValueError, "give the number of nodes once", {"num_nodes": None}),
    (ValueError, "num_nodes=0 must be an integer >= 1", {"num_nodes": 0}),
    (ValueError, "minibatch_size=3 must divide batch_size=4", {"minibatch_size": 3}),
    (ValueError, "drop_last leaves no batch", {"batch_size": 4000, "dataloader_kwargs": {"drop_last": True}}),
    (ValueError, "samples=0 must be an integer >= 1", {"samples": 0}),
    (ValueError, "chunk_configs=0 must be an integer >= 1", {"chunk_configs": 0}),
    (ValueError, r"has no end: say how many to draw, samples=50", {"grid": {"lr": LogUniform(1e-4, 1e-2)}}),
    (ValueError, "engine='gpu' is not known", {"engine": "gpu"}),
    (ValueError, "device='nowhere'", {"device": "nowhere"}),
    (ValueError, "no trainable parameter", {"model": lambda: make_model("MLP").requires_grad_(False)}),
    (TypeError, "model is of type str", {"model": "MLP"}),
    (TypeError, r"model\(\) returned None", {"model": lambda: None}),
    (ValueError, r"model\(\): Expecting value: line 1", {"model": lambda: json.loads("a file that is no JSON")}),
    (TypeError, "model is of type NoneType; give an nn.Module", {"model": None}),
    (TypeError, "model and strategy are swapped", {"model": FedAvgStrategy(), "strategy": make_model("MLP")}),
    (TypeError, "model is of type TensorDataset; give", {"model": TensorDataset(torch.ones(2))}),
    (TypeError, r"train_dataset is of type MLP; the order is sweep\(model", {"train": make_model("MLP")}),
    (TypeError, "val_dataset is of type FedAvgStrategy; the order is", {"val": FedAvgStrategy()}),
    (ValueError, "grid is empty: give an axis", {"grid": {}, "strategy": FedAvgStrategy()}),
    (TypeError, "the axis 3 of grid is of type int; give a text", {"grid": {3: [1], "lr": [0.1]}}),
    (ValueError, r"grid\['lr'\] has nan among its values", {"grid": {"lr": [0.1, float("nan")]}}),
    (ValueError, r"grid\['lr'\] has 0.1 twice", {"grid": {"lr": [0.1, 0.2, 0.1]}}),
    (ValueError, r"grid\['lr'\] has 1.0 twice", {"grid": {"lr": [1, 1.0]}}),
    (ValueError, r"grid\['cls'\] has 'MLP' twice", {"grid": {"lr": [0.1], "cls": [type(make_model("MLP"))] * 2}}),
    (ValueError, r"grid\['rl'\] is not used.*did you mean 'lr'", {"grid": {"rl": [0.1]}}),
    (ValueError, r"grid\['sed'\] is not used.*did you mean 'seed'", {"grid": {"lr": [0.1], "sed": [0]}}),
    (
        ValueError,
        r"grid\['widht'\] is not used.*did you mean 'width'",
        {"grid": {"lr": [0.1], "widht": [8]}, "model": lambda width=8: seeded_model(0, width)},
    ),
    (
        ValueError,
        r"'lr'\] is not used: it is no setting \(strategy, model or train_dataset may be a function of it: strategy=",
        {"strategy": FedAvgStrategy()},
    ),
    (ValueError, "give either grid=.*or points=", {"points": [{"lr": 0.1}]}),
    (ValueError, "give either grid=.*or points=", {"grid": None}),
    (ValueError, r"points is empty: give at least one configuration, .*\[{\"lr\"", {"grid": None, "points": []}),
    (ValueError, r"points\[0\] is empty: give", {"grid": None, "points": [{}]}),
    (TypeError, "points is of type dict; give a list of configurations", {"grid": None, "points": {"lr": [0.1]}}),
    (TypeError, "points is of type int; give a list of configurations", {"grid": None, "points": 3}),
    (TypeError, r"points\[1\].*of type float; give a dict such as", {"grid": None, "points": [{"lr": 0.1}, 0.2]}),
    (TypeError, r"the axis 3 of points\[i\] is of type int", {"grid": None, "points": [{3: 0.1}]}),
    (ValueError, r"points\[1\]\['lr'\] is nan", {"grid": None, "points": [{"lr": 0.1}, {"lr": float("nan")}]}),
    (
        ValueError,
        r"points\[2\] and points\[0\] differ in their axes: only one of them has H, seed. Give every point a value",
        {"grid": None, "points": [{"lr": 0.1, "H": 3}, {"lr": 0.2, "H": 3}, {"lr": 0.1, "seed": 1}]},
    ),
    (ValueError, r"points\[i\]\['rl'\] is not used.*did you mean 'lr'", {"grid": None, "points": [{"lr": 1, "rl": 2}]}),
    (
        ValueError,
        r"takes lr, which is not an axis.*Add points\[i\]\[\"lr\"\]=",
        {"grid": None, "points": [{"seed": 0}]},
    ),
    (ValueError, r"an axis points\[i\]\[\"num_nodes\"\]", {"grid": None, "points": [{"lr": 1, "num_nodes": 2}]}),
    (ValueError, "samples=2 draws from a grid; points are", {"grid": None, "points": [{"lr": 0.1}], "samples": 2}),
    (ValueError, "2 configurations, more than max_con", {"grid": None, "points": [{"lr": 0.1}] * 2, "max_configs": 1}),
    (TypeError, "progress='no' must be True or False", {"progress": "no"}),
    (TypeError, "keep_models='no' must be True or False", {"keep_models": "no"}),
    (TypeError, "dry_run=1 must be True or False", {"dry_run": 1}),
    (TypeError, "shuffle='no' must be True or False", {"shuffle": "no"}),
    (TypeError, "shuffle='no' must be True or False", {"grid": {"lr": [0.1], "shuffle": [True, "no"]}}),
    (TypeError, "seed=0.5 must be an integer", {"grid": {"lr": [0.1], "seed": [0.5]}}),
    (TypeError, "sample_seed='a' must be an integer", {"sample_seed": "a"}),
    (ValueError, "samples='5' must be an integer", {"samples": "5"}),
]


@pytest.mark.parametrize(("kind", "message", "settings"), BAD, ids=[message[:30] for _, message, _ in BAD])
def test_bad_input(kind: type[Exception], message: str, settings: dict[str, Any]) -> None:
    given: dict[str, Any] = {
        "model": make_model("MLP", dtype=F64), "strategy": lambda lr: DiLoCoStrategy("sgd", lr=lr, H=2),
        "grid": {"lr": [0.1]}, "num_nodes": K, "max_steps": 2, "batch_size": 4, "progress": False, **settings,
    }  # fmt: skip
    with pytest.raises(kind, match=message):
        sweep(given.pop("model"), given.pop("train", data()), given.pop("val", None), **given)


def test_an_axis_may_be_an_argument_of_both_functions() -> None:
    seen: list[int] = []

    def model(width: int) -> nn.Module:
        seen.append(width)
        return seeded_model(0, width)

    result = run_sweep(lambda width: FedAvgStrategy("sgd", lr=1 / width), {"width": [4, 8]}, model, max_steps=1)
    assert seen == [4, 8]
    assert [c.strategy.inner_optim.lr for c in result._runner.configs] == [0.25, 0.125]


def test_ranges_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="must be smaller than high"):
        Uniform(1.0, 0.5)
    with pytest.raises(ValueError, match="must be > 0 for a logarithm"):
        LogUniform(0.0, 0.5)


def test_a_grid_of_a_million_is_refused() -> None:
    grid = {"lr": [0.9**i for i in range(1, 101)], "H": range(1, 101), "seed": range(100)}
    message = r"1,000,000 configurations, more than max_configs=10,000: give samples=100 .*max_configs=1000000"
    with pytest.raises(ValueError, match=message):
        run_sweep(outer, grid)


# -------------------------------------------------------------------------------------------------- plots

ROWS = [
    {"H": H, "lr": lr, "seed": seed, "kind": kind, "val_loss": H * lr + seed, "bytes_total": 1e6 / H}
    for H in (1, 10, 100) for lr in (0.1, 0.2) for seed in (0, 1) for kind in ("a", "b")
]  # fmt: skip


def test_a_column_against_an_axis(tmp_path: Path) -> None:
    figure: Any = plot_axis(ROWS, "H", hue="lr", path=tmp_path / "new" / "a.png")
    axes = figure.axes[0]
    assert [[float(y) for y in line.get_ydata()] for line in axes.lines] == [
        pytest.approx([0.6, 1.5, 10.5]), pytest.approx([0.7, 2.5, 20.5])]  # fmt: skip
    assert axes.get_xscale() == "log"
    assert len(axes.collections) == 2  # a band for each
    low, high = (f(axes.collections[0].get_paths()[0].vertices[:, 1]) for f in (min, max))
    assert (low, high) == pytest.approx((0.1, 11.0))  # over the seeds
    several: Any = plot_axis(ROWS, "H").axes[0]
    low, high = (f(several.collections[0].get_paths()[0].vertices[:, 1]) for f in (min, max))
    assert (low, high) == pytest.approx((0.15, 16.0))  # of a seed the mean of all lr
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["lr = 0.1", "lr = 0.2"]
    assert (tmp_path / "new" / "a.png").stat().st_size > 5000
    named: Any = plot_axis(ROWS, "kind", best=True).axes[0]
    assert [text.get_text() for text in named.get_xticklabels()] == ["a", "b"]
    assert [float(y) for y in named.lines[0].get_ydata()] == pytest.approx([0.6, 0.6])  # H=1, lr=0.1: both seeds
    low, high = (f(named.collections[0].get_paths()[0].vertices[:, 1]) for f in (min, max))
    assert (low, high) == pytest.approx((0.1, 1.1))
    lucky: Any = plot_axis(ROWS, "kind", best=True, over=None).axes[0]
    assert [float(y) for y in lucky.lines[0].get_ydata()] == pytest.approx([0.1, 0.1])
    assert not lucky.collections
    with pytest.raises(ValueError, match=r"over='sed' is not known; did you mean 'seed'.*'kind', or None"):
        plot_axis(ROWS, "H", over="sed")


def test_a_configuration_one_of_whose_seeds_diverged_is_not_the_best() -> None:
    rows = [{"lr": lr, "seed": seed, "val_loss": lr, "bytes_total": lr} for lr in (0.1, 0.2) for seed in (0, 1)]
    rows[1] = {**rows[1], "val_loss": float("nan")}
    assert averaged(rows, "seed")[1] == {"lr": 0.2, "val_loss": 0.2, "bytes_total": 0.2, "runs": 2}
    assert plot_pareto(rows).axes[0].lines[0].get_ydata().tolist() == [0.2]  # type: ignore[union-attr]
    figure: Any = plot_axis([{**row, "a": 0} for row in rows], "a", best=True)
    assert figure.axes[0].lines[0].get_ydata().tolist() == [0.2]
    assert "1 of 4 runs left out" in figure.get_suptitle()


def test_two_axes_make_a_heat_map() -> None:
    rows = [*ROWS, {**ROWS[0], "H": 1000, "val_loss": float("nan")}]
    figure: Any = plot_heatmap(rows, "lr", "H")
    axes = figure.axes[0]
    cells = axes.images[0].get_array()
    assert cells.shape == (4, 2)
    assert cells[0].tolist() == pytest.approx([0.6, 0.7])
    assert cells.mask[3].all() if hasattr(cells, "mask") else torch.tensor(cells[3]).isnan().all()
    assert len(axes.texts) == 6
    assert axes.patches[0].get_xy() == (-0.5, -0.5)  # the frame of the lowest
    right: Any = plot_heatmap([{**row, "val_accuracy": row["val_loss"]} for row in ROWS], "lr", "H", "val_accuracy")
    assert right.axes[0].patches[0].get_xy() == (0.5, 1.5)  # of the highest
    assert "1 of 25 runs left out" in figure.get_suptitle()


def test_the_pareto_front_is_marked() -> None:
    axes: Any = plot_pareto(ROWS, hue="kind").axes[0]
    front = axes.lines[0]
    assert front.get_xdata().tolist() == [1e4, 1e5, 1e6]
    assert [float(y) for y in front.get_ydata()] == pytest.approx([10.5, 1.5, 0.6])
    lucky: Any = plot_pareto(ROWS, over=None).axes[0].lines[0]
    assert [float(y) for y in lucky.get_ydata()] == pytest.approx([10.0, 1.0, 0.1])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["Pareto front", "kind = a", "kind = b"]
    right: Any = plot_pareto([{**row, "val_accuracy": -float(row["val_loss"])} for row in ROWS], "val_accuracy")
    assert [float(y) for y in right.axes[0].lines[0].get_ydata()] == pytest.approx([-10.5, -1.5, -0.6])
    silent = [{"bytes_total": 0.0, "val_loss": 3.0}, {"bytes_total": 1e5, "val_loss": 1.0}]
    assert plot_pareto(silent).axes[0].get_xscale() == "symlog"
    assert pareto_front([(2.0, 1.0), (1.0, 1.0), (3.0, 0.5)]) == [1, 2]


def test_the_result_draws_itself() -> None:
    result = run_sweep(
        lambda cls, lr: cls("sgd", lr=lr), {"cls": [FedAvgStrategy, AllReduceStrategy], "lr": [0.1, 0.2]}
    )
    lines: Any = result.plot(x="lr", hue="cls").axes[0].lines
    assert [float(y) for line in lines for y in line.get_ydata()] == [row["val_loss"] for row in result.rows]
    image: Any = result.plot_heatmap("lr", "cls").axes[0].images[0]
    assert image.get_array().shape == (2, 2)
    assert result.plot_pareto(hue="cls").axes[0].get_xlabel() == "bytes sent per node"
    with pytest.raises(ValueError, match=r"'loss' is not a column.* There are cls, lr"):
        result.plot("lr", "loss")
    with pytest.raises(ValueError, match="no row has a finite 'val_loss'"):
        plot_axis([{"lr": 0.1, "val_loss": None}], "lr")
    with pytest.raises(ValueError, match="no row to plot"):
        plot_pareto([])


def test_rows_have_the_models_metrics() -> None:
    """... those of each client as well: the largest is found, and compared seed by seed."""
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    labels = x[:, :4].argmax(1)
    shards = partition_dirichlet(labels, 4, alpha=0.5, min_size=10).datasets(TensorDataset(x, labels), held_out=0.3)
    model = Classifier(torch.nn.Linear(8, 4))
    result = sweep(
        model, shards, shards, strategy=lambda H, lr: FedAvgStrategy("sgd", H=H, lr=lr),
        grid={"H": [1, 2], "lr": [1e-4, 0.5], "seed": [0, 1]}, num_nodes=4, max_steps=20, batch_size=8,
        progress=False, device="cpu",
    )  # fmt: skip
    assert result.axes == ["H", "lr", "seed"]
    for i, row in enumerate(result.rows):
        history = result.history(i)
        for name in ("val_accuracy", "val_accuracy_p50", "val_accuracy_lowest_tenth"):
            assert row[name] == history.last(name)
        assert "val_accuracy_each" not in row
    best, worst = (result.best("val_accuracy", largest=largest) for largest in (True, False))
    assert (best["lr"], worst["lr"]) == (0.5, 1e-4)
    found = [result.compare("H", "val_accuracy", largest=largest) for largest in (True, False)]
    assert [[row["lr"] for row in rows] for rows in found] == [[0.5, 0.5], [1e-4, 1e-4]]
    assert max(row["val_accuracy"] for row in found[0]) == best["val_accuracy"]
    assert result.best("val_accuracy") == best  # an accuracy by itself, and a loss
    assert result.compare("H", "val_accuracy") == found[0]
    assert result.best()["lr"] == 0.5
    line = result.plot("H", "val_accuracy", baseline=1).axes[0].lines[0]
    assert line.get_ydata()[1] == pytest.approx(found[0][1]["difference"])  # type: ignore[index]
    with pytest.raises(ValueError, match="did you mean 'val_accuracy'"):
        result.best("val_acuracy")
    bold = [line for line in result.table(column=["val_accuracy"]).splitlines() if "**" in line]
    assert bold
    assert not any("0.0001" in line for line in bold)
    for call in (result.best, functools.partial(result.compare, "H")):
        with pytest.raises(ValueError, match=r"'lr' does not say which value is the best: give largest=True"):
            call("lr")


def test_what_diverged_has_no_validation_loss() -> None:
    """... not that of its last evaluation, before it diverged, which a tuner might take for a good one."""
    result = sweep(
        make_model("MLP"), dataset("MLP"), dataset("MLP"), strategy=lambda lr: DiLoCoStrategy("sgd", H=2, lr=lr),
        grid={"lr": [0.1, 1e30]}, num_nodes=2, max_steps=4, batch_size=4, device="cpu", progress=False,
    )  # fmt: skip
    good, bad = result.rows
    assert (good["status"], bad["status"]) == ("finished", "diverged")
    assert math.isfinite(good["val_loss"])
    assert math.isnan(bad["val_loss"])
    assert result.best() == good


class Clipped(Average):
    """The mean of movements of which each node clips its own, in code for `[K, *]`."""

    def agree(self, x: Tree, part: Part, memory: Any) -> Tree:
        def clip(x: Tensor) -> Tensor:
            return 0.1 * x / x.flatten(1).norm(dim=1).clamp(min=0.1).view(-1, *[1] * (x.dim() - 1))

        return part.comm.mean(tree.map(clip, x))


class Medians(Average):
    """The median of what all have sent, in code for `[1, K, *]`."""

    def agree(self, x: Tree, part: Part, memory: Any) -> Tree:
        return tree.map(lambda x: x.median(dim=1).values, part.comm.all_gather(x))


@pytest.mark.parametrize("average", [Clipped, Medians])
def test_an_average_of_ones_own_need_not_know_of_stacks(average: type[Average]) -> None:
    """As many configurations as nodes: the shapes of a stack would not show that its dimensions were mixed up."""

    def strategy(outer_lr: float) -> Strategy:
        return DiLoCoStrategy("sgd", H=2, lr=0.1, outer_lr=outer_lr, average=average())

    model, data = make_model("MLP").double(), dataset("MLP", dtype=torch.float64)
    common: dict[str, Any] = {"num_nodes": 4, "max_steps": 6, "batch_size": 4, "device": "cpu", "progress": False}
    result = sweep(model, data, data, strategy=strategy, grid={"outer_lr": [0.2, 0.4, 0.7, 0.9]}, **common)
    for row in result.rows:
        trainer = Trainer(model, data, data)
        trainer.fit(strategy(row["outer_lr"]), **common)
        assert row["val_loss"] == pytest.approx(trainer.history.last("val_loss"), rel=1e-10)
