"""What a strategy sends, without training: the ledger of the real run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vecgym import Trainer, dry_run
from vecgym.clock import Compute, Network, price
from vecgym.collectives.ledger import Ledger
from vecgym.compress import ChunkedTopK, PowerSGD, RandomK
from vecgym.core.tree import Tree
from vecgym.models import Classifier
from vecgym.simulation.simulation import Part
from vecgym.strategy import (
    EF21,
    CommunicateOptimizeStrategy,
    Compressed,
    Corrupted,
    DeMoStrategy,
    DiLoCoStrategy,
    Exchange,
    FedAvgStrategy,
    GossipStrategy,
    Mean,
    Outer,
    Robust,
    SPARTAStrategy,
    Strategy,
)
from vecgym.strategy.catalogue import CATALOGUE
from vecgym.strategy.stages import Average, Memory


def model() -> nn.Module:
    torch.manual_seed(0)
    return Classifier(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)))


def real(strategy: Strategy, num_nodes: int = 4, max_steps: int = 7, **options: Any) -> Ledger:
    data = torch.utils.data.TensorDataset(torch.randn(32, 6), torch.arange(32) % 3)
    trainer = Trainer(model(), data)
    trainer.fit(strategy, num_nodes, max_steps=max_steps, batch_size=4, device="cpu", progress=False, **options)
    return trainer.ledger


def assert_same(dry: Ledger, ran: Ledger) -> None:
    assert list(dry) == list(ran)
    assert (dry.num_nodes, dry.sizes, dry.num_steps) == (ran.num_nodes, ran.sizes, ran.num_steps)
    assert dry.total_bytes == ran.total_bytes


@pytest.mark.parametrize("name", CATALOGUE)
def test_it_equals_the_ledger_of_the_run(name: str) -> None:
    row = CATALOGUE[name]
    inner: dict[str, Any] = {} if name == "demo" else {"inner_optim": "adamw", "lr": 1e-3}
    ran = real(row.make(H=3, p=0.3, **inner), seed=5)
    assert_same(dry_run(model(), row.make(H=3, p=0.3, **inner), 4, 7, seed=5), ran)
    assert_same(dry_run(model().to("meta"), row.make(H=3, p=0.3, **inner), 4, 7, seed=5), ran)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SPARTAStrategy(0.3, "sgd", lr=0.1, delay=2),
        lambda: SPARTAStrategy(0.3, "sgd", lr=0.1, compression_method="topk", quantization_bits=8),
        lambda: SPARTAStrategy(0.3, "sgd", lr=0.1, quantization_bits=4),
        lambda: DiLoCoStrategy("sgd", lr=0.1, H=2, compression="int8"),
        lambda: DiLoCoStrategy("sgd", lr=0.1, H=2, compression=PowerSGD(2)),
        lambda: DiLoCoStrategy("sgd", lr=0.1, H=2, compression=RandomK(0.3)),
        lambda: DiLoCoStrategy("sgd", lr=0.1, H=2, compression="stat2"),
        lambda: DiLoCoStrategy("sgd", lr=0.1, H=2, compression="natural"),
        lambda: DiLoCoStrategy("sgd", lr=0.1, H=2, compression="ternary"),
        lambda: DiLoCoStrategy("sgd", lr=0.1, H=2, compression=ChunkedTopK(3, 6)),
        lambda: CommunicateOptimizeStrategy([Exchange(Outer(EF21(Mean(), "qsgd")), every=3)], "sgd", lr=0.1),
        lambda: DiLoCoStrategy("sgd", lr=0.1, sync_weight=[0, 0.5, 0, 1, 0, 0, 1]),
        lambda: FedAvgStrategy("sgd", lr=0.1, H=2, participation=0.5, island_size=2),
        lambda: FedAvgStrategy("sgd", lr=0.1, H=2, weighting="examples"),
        lambda: GossipStrategy("one_peer_exponential", every=2, inner_optim="sgd", lr=0.1),
        lambda: DeMoStrategy(lr=0.1, compression_topk=4, compression_chunk=8),
        lambda: CommunicateOptimizeStrategy(
            [Exchange(Outer(Mean()), every=3, fragments=2, delay=1, keep=0.5)], "sgd", lr=0.1
        ),
        lambda: CommunicateOptimizeStrategy([Exchange(Compressed(Mean(), "topk"), every=2)], "sgd", lr=0.1),
        lambda: CommunicateOptimizeStrategy([Exchange(Robust("median"), every=2)], "sgd", lr=0.1),
        lambda: CommunicateOptimizeStrategy([Exchange(Corrupted(Mean(), [1]), every=2)], "sgd", lr=0.1),
    ],
)
def test_compositions(make: Any) -> None:
    assert_same(dry_run(model().to("meta"), make(), 4, 7), real(make()))


class Looks(Average):
    """Sends only what is large enough."""

    common = False

    def agree(self, x: Tree, part: Part, memory: Memory) -> Tree:
        return part.comm.mean(x) if float(x["net.0.bias"].abs().max()) > 0 else x


def test_frozen_parameters_are_not_sent() -> None:
    frozen = model()
    next(frozen.parameters()).requires_grad_(False)
    assert len(dry_run(frozen, DiLoCoStrategy("sgd", H=1), 2, 1).sizes) == 3


def test_a_strategy_for_one_rank_needs_values() -> None:
    class OneRank:
        pass

    with pytest.raises(TypeError, match="strategy is of type OneRank; give a Strategy"):
        dry_run(model(), OneRank(), 2, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="depends on the values that it exchanges"):
        dry_run(model(), CommunicateOptimizeStrategy([Exchange(Looks())], "sgd", lr=0.1), 2, 1)
    with pytest.raises(ValueError, match="num_nodes=0 must be an integer >= 1"):
        dry_run(model(), DiLoCoStrategy(H=1), 0, 1)


class Stored(TorchDispatchMode):
    """Counts the operations, and the bytes of the largest tensor that has values."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.largest = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and not x.is_meta:
                self.largest = max(self.largest, x.nbytes)
        return result


@pytest.mark.parametrize(
    "name",
    ["allreduce", "diloco", *(pytest.param(name, marks=pytest.mark.slow) for name in
     ("fedavg-islands", "gossip", "sparta-diloco", "demo"))],
)  # fmt: skip
def test_a_hundred_billion_parameters(name: str) -> None:
    """No memory: `benchmarks/clock.py` says how much, and how long it takes."""
    width = int((1e11 / 108 / 12) ** 0.5)
    with torch.device("meta"):
        model = nn.ModuleList(nn.Linear(width, 12 * width, bias=False, dtype=torch.bfloat16) for _ in range(108))
    inner: dict[str, Any] = {"inner_optim": "adamw", "lr": 1e-3} if name != "demo" else {}
    with Stored() as stored:
        ledger = dry_run(model, CATALOGUE[name].make(H=50, p=1e-7, **inner), 128, 200)
    assert ledger.total_bytes > 0
    assert ledger.num_steps == 200
    assert stored.operations > 0
    assert stored.largest < 1e6, "a matrix of the model takes 1.9 GB"


def test_a_dry_run_is_priced_as_the_run() -> None:
    strategy = DiLoCoStrategy("sgd", lr=0.1, H=3)
    network, compute = Network("1 Mbit/s", "1 ms"), Compute.lognormal(0.4, 0.3)
    dry, ran = (price(ledger, network, compute) for ledger in (dry_run(model(), strategy, 4, 7), real(strategy)))
    assert dry.seconds == ran.seconds
    assert torch.equal(dry.step_seconds, ran.step_seconds)
