"""The messages of a strategy, without training: the ledger of the real run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vecgym import Trainer, dry_run
from vecgym.clock import Compute, Network, price
from vecgym.clock.dry import DryRuns
from vecgym.collectives.ledger import Ledger
from vecgym.compress import ChunkedTopK, PowerSGD, RandomK, TopK
from vecgym.core.forms import Forms
from vecgym.core.tree import Tree
from vecgym.models import Classifier
from vecgym.simulation.simulation import Part, Simulation
from vecgym.strategy import (
    EF21,
    AllReduceStrategy,
    AllToAll,
    CommunicateOptimizeStrategy,
    Compressed,
    Corrupted,
    DeMoStrategy,
    DiLoCoStrategy,
    Eager,
    Exchange,
    FedAvgStrategy,
    GossipStrategy,
    Mean,
    Outer,
    QuantisedRing,
    Ring,
    Robust,
    SPARTAStrategy,
    Strategy,
)
from vecgym.strategy.catalogue import CATALOGUE
from vecgym.strategy.stages import Average, Memory, Stage

# Those that draw participants or coordinates, whose neighbours or messages change from one exchange to the next, or
# whose step needs another event.
DRAWING = {
    "fedavg-islands", "fedavg-participation", "noloco", "sparta", "loscar", "sparta-diloco", "gossip-matching",
    "matcha", "mime", "sgp", "relaysum", "scaffnew",
}  # fmt: skip


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
        lambda: CommunicateOptimizeStrategy(
            [Exchange(Corrupted(Robust("krum", f=1, nnm=True, server=True), [1], "alie"), every=2)], "sgd", lr=0.1
        ),
        lambda: AllReduceStrategy("sgd", lr=0.1, average=Ring("bfloat16")),
        lambda: CommunicateOptimizeStrategy(
            [Exchange(Outer(QuantisedRing()), every=3), Exchange(AllToAll(), every=2)], "sgd", lr=0.1
        ),
        lambda: CommunicateOptimizeStrategy([Exchange(Robust("centred_clipping", clip=1.0), every=2)], "sgd", lr=0.1),
    ],
)
def test_compositions(make: Any) -> None:
    assert_same(dry_run(model().to("meta"), make(), 4, 7), real(make()))


# ---------------------------------------------------------------------------------------- what always sends the same


@pytest.mark.parametrize("name", CATALOGUE)
def test_one_of_all_equal_events_says_what_they_send(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of several H share it."""
    runs, lengths = DryRuns(model().to("meta"), 6), {3: 8, 5: 21, 8: 32}
    strategies = {H: CATALOGUE[name].make(H=H, p=0.3, delay=2) for H in lengths}
    assert {strategy.repeats_itself for strategy in strategies.values()} == {name not in DRAWING}
    once = {H: runs.ledger(strategies[H], T) for H, T in lengths.items()}
    monkeypatch.setattr(Strategy, "repeats_itself", False)
    for H, T in lengths.items():
        each = dry_run(model().to("meta"), strategies[H], 6, T)
        assert_same(once[H], each)
        assert once[H].by_step() == each.by_step()


def handled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of the events that are handled from now on."""
    kinds, handle = list[str](), Simulation.handle

    def noted(self: Simulation, draft: Any, event: Any, *args: Any) -> None:
        kinds.append(event.what)
        handle(self, draft, event, *args)

    monkeypatch.setattr(Simulation, "handle", noted)
    return kinds


def test_how_many_events_are_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds, runs = handled(monkeypatch), DryRuns(model(), 4)
    assert len(runs.ledger(DiLoCoStrategy(H=5), 100)) == 20
    assert kinds == ["train", "meet"]
    assert len(runs.ledger(DiLoCoStrategy(H=7), 700)) == 100
    assert len(runs.ledger(DiLoCoStrategy(H=7, compression="int8"), 70)) == 10
    assert len(runs.ledger(FedAvgStrategy(H=7, island_size=2), 14)) == 2
    assert kinds == ["train", "meet"] * 2 + (["train"] * 7 + ["meet"]) * 2


def more_each_time(comm: Any, x: Any, times: int) -> None:
    for _ in range(times):
        comm.all_gather(x)


class MoreAndMore(Mean):
    def agree(self, x: Tree, part: Part, memory: Memory) -> Tree:
        more_each_time(part.comm, x, part.due.number)
        return super().agree(x, part, memory)


class MoreAround(Stage, batched=(), random=False):
    def send(self, x: Tree, part: Part, memory: Memory) -> Tree:
        more_each_time(part.comm, x, part.due.number)
        return x


class OfNothingNew(MoreAround):
    pass


class OddCode(TopK):
    """Sends more in odd steps."""

    def encode(self, x: torch.Tensor, draw: Any = None) -> Any:
        return TopK(k=1 + int(draw.generator().initial_seed() % 2)).encode(x)


class MoreMeetings(DiLoCoStrategy):
    def meet(self, part: Part) -> None:
        more_each_time(part.comm, part.params, part.due.number)
        super().meet(part)


class MoreExchanges(Exchange):
    def meet(self, part: Part) -> None:
        more_each_time(part.comm, part.params, part.due.number)
        super().meet(part)


def correcting(moved: Tree, state: Any, part: Part) -> Tree:
    more_each_time(part.comm, moved, part.due.number)
    return moved


def exchanging(how: Average, **options: Any) -> Strategy:
    return Strategy("sgd", [Exchange(how, every=2, **options)], lr=0.1)


def with_a_function(owner: Any, name: str) -> Any:
    """The object, of which a function stands in place of a method."""
    method = getattr(owner, name)

    def more(*args: Any) -> Any:
        part = next(x for x in args if isinstance(x, Part))
        more_each_time(part.comm, part.params, part.due.number)
        return method(*args)

    setattr(owner, name, more)
    return owner


@pytest.mark.parametrize(
    "make",
    [
        lambda: exchanging(MoreAndMore()),
        lambda: exchanging(Outer(MoreAndMore())),
        lambda: exchanging(MoreAround(Mean())),
        lambda: exchanging(OfNothingNew(Mean())),
        lambda: exchanging(Outer(Mean(), correct=correcting)),
        lambda: exchanging(with_a_function(Mean(), "agree")),
        lambda: exchanging(Compressed(Mean(), OddCode(k=1))),
        lambda: MoreMeetings("sgd", lr=0.1, H=2),
        lambda: with_a_function(DiLoCoStrategy("sgd", lr=0.1, H=2), "meet"),
        lambda: Strategy("sgd", [MoreExchanges(Mean(), every=2)], lr=0.1),
        lambda: Strategy("sgd", [Exchange(Eager(Mean()), every=lambda step: 1 + step)], lr=0.1),
        lambda: Strategy("sgd", [Exchange(Mean(), every=3, of="gradients")], lr=0.1),
    ],
)
def test_what_does_not_say_that_it_always_sends_the_same_is_asked_each_time(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not make().repeats_itself
    ran = real(make())
    assert_same(dry_run(model(), make(), 4, 7), ran)
    monkeypatch.setattr(Strategy, "repeats_itself", True)
    assert list(dry_run(model(), make(), 4, 7)) != list(ran)


def test_a_class_may_say_that_it_always_sends_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Twice(Mean, steady=True):
        def agree(self, x: Tree, part: Part, memory: Memory) -> Tree:
            return super().agree(super().agree(x, part, memory), part, memory)

    class Own(Strategy, steady=True):
        def meet(self, part: Part) -> None:
            super().meet(part)

    strategy = Own("sgd", [Exchange(Twice(), every=2)], lr=0.1)
    ran, kinds = real(strategy), handled(monkeypatch)
    assert_same(dry_run(model(), strategy, 4, 7), ran)
    assert kinds == ["train", "meet"]
    with pytest.raises(TypeError, match="class Wrong: steady=1 must be True or False"):

        class Wrong(Mean, steady=1):
            pass


# ------------------------------------------------------------------------------------------------ shapes without values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool])
@pytest.mark.parametrize(
    "operation",
    [
        lambda x, y: x + y, lambda x, y: y * 2.5, lambda x, y: x * torch.tensor(2.0, dtype=torch.float64),
        lambda x, y: (x > y) & (x == x), lambda x, y: torch.where(x > 0, x, y), lambda x, y: x.double().frexp(),
        lambda x, y: x.sum(0), lambda x, y: x.sum((0, -1), keepdim=True, dtype=torch.uint8),
        lambda x, y: (x + 0.5).mean(1), lambda x, y: x.amax(1, keepdim=True), lambda x, y: (x + 0.5).norm(dim=(1, 2)),
        lambda x, y: x.float().abs_().clamp_(0, 1).add_(y).zero_(), lambda x, y: x.clone().zero_().logical_and_(y),
        lambda x, y: x.int() << torch.arange(0, 9, 3, dtype=torch.uint8, device=x.device),
        lambda x, y: torch.arange(2.5, device=x.device), lambda x, y: torch.zeros_like(x, dtype=torch.float16),
        lambda x, y: x[:, :, 0].index_copy(0, torch.tensor([1]).to(x.device), x[:1, :, 0]), lambda x, y: x / y,
        lambda x, y: x.float().lerp(y.float().expand(4, 2, 3), 0.3), lambda x, y: (x != 0).any(1).float().sqrt(),
    ],
)  # fmt: skip
def test_the_forms_of_operations_are_those_of_values(operation: Any, dtype: torch.dtype) -> None:
    values = torch.ones(4, 2, 3, dtype=dtype), torch.ones(2, 1, dtype=dtype)
    expected = tree_leaves(operation(*values))
    with Forms():
        found = tree_leaves(operation(*(x.to("meta") for x in values)))
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]
    assert all(x.is_meta for x in found)


@pytest.mark.parametrize(
    "operation", [lambda x, y: x + y, lambda x, y: x.add_(y), lambda x, y: y[:1].mul_(y), lambda x, y: x.to("cpu") + 1]
)
def test_a_mistake_in_shapes_is_refused(operation: Any) -> None:
    x, y = (torch.empty(n, device="meta") for n in (2, 3))
    with Forms(), pytest.raises((RuntimeError, NotImplementedError, ValueError)):
        operation(x, y)


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


def test_a_number_of_parameters_is_in_float32(request: pytest.FixtureRequest) -> None:
    strategy = DiLoCoStrategy("sgd", lr=0.1, H=3)
    expected = dry_run("1M", strategy, 4, 6).total_bytes
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(torch.float64)
    assert dry_run("1M", strategy, 4, 6).total_bytes == expected
