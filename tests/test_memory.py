"""Memory of a run: the table against the bytes that are counted, and batches cut so that it fits."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import vecgym
import vecgym.runs.memory as fitting
from tests.fitting import alone, dataset, fit, params, same_run
from tests.models import make_model
from vecgym import MemoryEstimate, Trainer, estimate_memory
from vecgym.collectives import StackedCollectives
from vecgym.core import tree
from vecgym.core.nodes import squared_consensus_distance
from vecgym.engine import Engine, Local, Plan
from vecgym.models import GPT, Classifier
from vecgym.runs import memory
from vecgym.runs.memory import Live, MemoryPart, memory_limit, stepping
from vecgym.simulation import Event
from vecgym.simulation.simulation import Draft, Part
from vecgym.strategy import (
    AllReduceStrategy,
    CommunicateOptimizeStrategy,
    DeMoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    GossipStrategy,
    RankStrategy,
    SPARTAStrategy,
)
from vecgym.strategy.catalogue import CATALOGUE
from vecgym.strategy.exchange import Exchange
from vecgym.strategy.simulated import simulation_of
from vecgym.strategy.stages import Average, Memory

STRATEGIES: dict[str, Any] = {
    "allreduce": lambda: AllReduceStrategy("adamw", lr=0.01),
    "fedavg": lambda: FedAvgStrategy("sgd", H=2, lr=0.01),
    "islands": lambda: FedAvgStrategy("adamw", H=2, island_size=4, lr=0.01),
    "server": lambda: FedAvgStrategy("sgd", H=2, server_optim="adam", lr=0.01),
    "diloco": lambda: DiLoCoStrategy("adamw", H=2, lr=0.01),
    "diloco, int8": lambda: DiLoCoStrategy("adamw", H=2, lr=0.01, compression="int8"),
    "sparta": lambda: SPARTAStrategy(0.1, "adamw", lr=0.01),
    "gossip": lambda: GossipStrategy("exponential", 1, "adamw", lr=0.01),
    "demo": lambda: DeMoStrategy(lr=0.01),
}


def within(bytes_: int, expected: int, tolerance: float = 0.05) -> bool:
    return abs(bytes_ - expected) <= tolerance * expected + 256


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_lasts_is_what_a_run_holds(name: str) -> None:
    """Parameters, optimizer and strategy state, against the tensors of a run's last state."""
    model, K = Classifier(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3))), 8
    data = torch.utils.data.TensorDataset(torch.randn(64, 64), torch.zeros(64, dtype=torch.long))
    estimate = estimate_memory(model, STRATEGIES[name](), K, 4, data)
    trainer, _ = fit(model, STRATEGIES[name](), num_nodes=K, data=data, max_steps=4)
    assert trainer.state is not None
    found = {n: part.total_bytes for n, part in estimate.parts.items()}
    assert found["parameters"] == tree.num_bytes(trainer.state.params)
    state = trainer.state
    assert within(found["optimizer"], tree.num_bytes(state.home["optimizer"]))
    trained = ("params", "buffers", "optimizer")
    kept = [{name: x for name, x in held.items() if name not in trained} for held in (state.own, state.shared)]
    assert within(found["strategy"], sum(map(tree.num_bytes, kept)))
    assert found["batch"] == K * 4 * (64 * 4 + 8)


def test_activations_are_what_the_backward_pass_needs() -> None:
    """Of two linear layers: the input is the batch's; kept are the hidden layer and the outputs."""
    model = Classifier(nn.Sequential(nn.Linear(10, 300), nn.ReLU(), nn.Linear(300, 5)))
    batch = torch.randn(20, 10), torch.zeros(20, dtype=torch.long)
    each = [estimate_memory(model, alone(), 4, 20, batch, minibatch_size=m).parts["activations"] for m in (20, 10)]
    hidden, outputs = 4 * 20 * 300, 4 * 20 * 5
    assert hidden + outputs <= each[0].per_node_bytes <= 4 * hidden + 4 * outputs
    assert each[1].per_node_bytes < 0.75 * each[0].per_node_bytes
    assert each[0].nodes == 4
    assert estimate_memory(model, alone(), 4, 20, batch, chunk_size=1).parts["activations"].nodes == 1
    assert estimate_memory(model, alone(), 4, 20, batch, engine="loop").parts["activations"].nodes == 1


def test_a_list_of_examples_is_a_dataset() -> None:
    """Likewise for the Trainer; a list of tensors is a batch."""
    model, strategy = Classifier(nn.Linear(20, 4)), DiLoCoStrategy("adamw", H=5)
    x, y = torch.ones(64, 20), torch.zeros(64, dtype=torch.long)
    of_tensors = estimate_memory(model, strategy, 4, 8, torch.utils.data.TensorDataset(x, y))
    assert estimate_memory(model, strategy, 4, 8, list(zip(x, y))).total_bytes == of_tensors.total_bytes
    assert estimate_memory(model, strategy, 4, 8, [x[:8], y[:8]]).total_bytes == of_tensors.total_bytes


def test_the_table() -> None:
    model = Classifier(nn.Linear(1000, 10))
    text = str(estimate_memory(model, DiLoCoStrategy("adamw", H=10), 16, data=dataset("MLP") and None))
    assert "without data: no batch and no activations" in text
    batch = torch.zeros(16, 1000), torch.zeros(16, dtype=torch.long)
    estimate = estimate_memory(model, DiLoCoStrategy("adamw", H=10), 16, 16, batch)
    lines = str(estimate).splitlines()
    assert [line.split()[0] for line in lines[1:]] == [
        "parameters", "gradients", "optimizer", "strategy", "buffers", "batch", "activations", "exchange", "total"
    ]  # fmt: skip
    assert "40 kB" in lines[1]
    lasting = sum(estimate.parts[n].total_bytes for n in ("parameters", "gradients", "optimizer", "strategy", "batch"))
    assert estimate.total_bytes >= lasting
    more = MemoryEstimate({**estimate.parts, "activations": MemoryPart(10**9, nodes=2)}, 16)
    assert more.total_bytes == pytest.approx(lasting + 2e9)  # in place of the exchange, not beside it


def test_frozen_parameters_are_counted_once() -> None:
    frozen = nn.Linear(1000, 1000).requires_grad_(False)
    model = Classifier(nn.Sequential(frozen, nn.Linear(1000, 2)))
    batch = torch.zeros(4, 1000), torch.zeros(4, dtype=torch.long)
    parameters = estimate_memory(model, DiLoCoStrategy("sgd", H=2), 2, 4, batch).parts["parameters"]
    assert (parameters.per_node_bytes, parameters.shared_bytes) == (4 * 2002, 4 * 1_001_000)


def test_nothing_is_left_behind() -> None:
    """Neither the model nor torch's random state is touched."""
    model = make_model("Dropout")
    before, state = {n: p.clone() for n, p in model.state_dict().items()}, torch.get_rng_state()
    estimate_memory(model, DiLoCoStrategy("adamw", H=2), 3, 4, dataset("Dropout"))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())


def test_a_strategy_for_one_rank_has_a_copy_of_all_for_each() -> None:
    class Mine(RankStrategy):
        def step(self) -> None:
            self.optim.step()
            super().step()

    parts = estimate_memory(make_model("MLP"), Mine("adamw"), 5).parts
    assert (parts["parameters"].nodes, parts["optimizer"].nodes) == (5, 5)


# ------------------------------------------------------------------------------------------ against whole steps

CUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"chunk_size": 3},
    "loop": {"engine": "loop"},
    "minibatches": {"minibatch_size": 4},
    "minibatches of chunks": {"chunk_size": 3, "minibatch_size": 2},
}


def networks() -> dict[str, tuple[nn.Module, Any]]:
    """Models that are wide enough for their scalars not to matter, and one node's batch."""
    torch.manual_seed(0)
    labels = torch.zeros(8, dtype=torch.long)
    conv = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(128, 5),
    )  # fmt: skip
    dense = nn.Sequential(nn.Linear(50, 64), nn.ReLU(), nn.Linear(64, 5))
    tokens = torch.randint(20, (8, 17))
    return {
        "MLP": (Classifier(dense), (torch.randn(8, 50), labels)),
        "CNN": (Classifier(conv), (torch.randn(8, 1, 12, 12), labels)),
        "GPT": (
            GPT(vocab_size=20, context=16, num_layers=1, num_heads=2, width=32),
            (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()),
        ),
    }


def observe(event: Event, draft: Draft) -> None:
    """The measurement that a run makes before an evaluation."""
    if not event.reads:
        squared_consensus_distance(draft.params)


def held_in_steps(model: nn.Module, strategy: Any, num_nodes: int, one: Any, **cut: Any) -> int:
    """The most bytes of tensors in five steps of all nodes, with their batch."""
    minibatch_size = cut.pop("minibatch_size", None)
    batch = tree.map_leaves(lambda x: torch.stack([x] * num_nodes), one)
    engine = Engine(model, node_threads=1, **cut)
    engine.prepare(batch)
    simulation = simulation_of(
        model, strategy, StackedCollectives(num_nodes), engine=engine, max_steps=6, minibatch_size=minibatch_size
    )

    known = [batch, *engine.params.values(), *engine.frozen.values(), *engine.buffers.values()]
    with Live(known) as live:
        state = simulation.init()
        for _ in range(5):
            state, _ = simulation.step(state, batch, before=observe)
    return live.peak + tree.num_bytes(batch)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("strategy", ["allreduce", "diloco", "sparta", "gossip", "demo"])
@pytest.mark.parametrize("network", ["MLP", "CNN", "GPT"])
def test_the_total_is_the_peak_of_a_step(network: str, strategy: str, cut: str) -> None:
    """Within a tenth or so, though two or three nodes are looked at, and a run has 12."""
    model, one = networks()[network]
    found = held_in_steps(model, STRATEGIES[strategy](), 12, one, **CUTS[cut])
    estimate = estimate_memory(model, STRATEGIES[strategy](), 12, 8, one, max_steps=6, **CUTS[cut])
    low, high = (0.8, 1.25) if "minibatches" in cut else (0.9, 1.1)
    assert low * found <= estimate.total_bytes <= high * found, f"{estimate.total_bytes / found:.2f}\n{estimate}"


class Noise:
    """An engine whose gradients are noise; it has trained nothing."""

    written: frozenset[str] = frozenset()
    plan = None  # nothing is prepared

    def __init__(self, params: dict[str, Tensor]) -> None:
        self.params, self.buffers, self.rows = params, dict[str, Tensor](), 1

    def gradients(self, params: Any, buffers: Any, batch: Any, *, mean: bool, **settings: Any) -> Local:
        self.rows = 1 if mean else len(batch)
        grads = {name: p.new_empty(self.rows, *p.shape).normal_() for name, p in self.params.items()}
        return Local(grads, batch.new_zeros(len(batch)), buffers)


# Codes of what is largest: where values are equal by chance, others are looked for among these rows.
BY_VALUES = ("eager", "diloco-topk", "sparseloco", "demo")


@pytest.mark.parametrize("name", CATALOGUE)
def test_steps_without_values_take_what_steps_with_values_take(name: str) -> None:
    """Every strategy's own steps on all nodes, an exchange included: all of it, but where values decide."""
    K, steps, strategy = 8, 4, CATALOGUE[name].make(H=2, inner_optim="adamw", lr=0.01)
    params = {n: torch.randn(shape) for n, shape in {"a": (64, 50), "b": (64,), "c": (300, 64), "d": (5,)}.items()}
    seen = stepping(strategy, params, K, steps)
    engine, batch = cast(Any, Noise(params)), torch.zeros(K, 1)
    simulation = simulation_of(
        nn.Module(), strategy, StackedCollectives(K), engine=engine, max_steps=steps, num_examples=(1,) * K
    )
    with torch.no_grad(), Live([params, batch]) as live:
        state = simulation.init()
        for _ in range(seen.state.step):
            state, _ = simulation.step(state, batch, before=observe)
    taken = max(0, live.peak - live.now - engine.rows * tree.num_bytes(params))
    assert seen.complete
    assert seen.rows == engine.rows
    found, expected = ([x.shape for x in tree.leaves([s.own, s.shared])] for s in (seen.state, state))
    assert found == expected
    assert within(seen.temporary_bytes, taken, 0.5 if name in BY_VALUES else 0.001)


def test_models_larger_than_this_machine_are_estimated_from_their_shapes() -> None:
    with torch.device("meta"):
        model = Classifier(nn.Linear(10**6, 10**6))  # 4 TB
    P, K = 4 * (10**12 + 10**6), 3
    batch = torch.zeros(4, 10**6), torch.zeros(4, dtype=torch.long)
    estimate = estimate_memory(model, DiLoCoStrategy("adamw", H=10), K, 4, batch)
    found = {name: part.total_bytes for name, part in estimate.parts.items()}
    assert (found["parameters"], found["gradients"]) == (K * P, K * P)
    assert within(found["optimizer"], 2 * K * P, 1e-6)
    assert within(found["strategy"], 2 * P, 1e-6)
    assert found["exchange"] >= P
    assert str(estimate).endswith("(a node does not fit here: no batch and no activations)")


def test_of_a_model_that_does_not_fit_no_node_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = Classifier(nn.Linear(10, 3)), (torch.zeros(4, 10), torch.zeros(4, dtype=torch.long))
    whole = estimate_memory(model, DiLoCoStrategy("adamw", H=2), 3, 4, batch)
    assert whole.notes == ()
    monkeypatch.setattr(memory, "available_bytes", lambda device: 4 * 33 * 4 - 1)  # half of eight copies
    found = estimate_memory(model, DiLoCoStrategy("adamw", H=2), 3, 4, batch)
    assert whole.parts.keys() - found.parts.keys() == {"batch", "activations"}
    assert found.parts.items() <= whole.parts.items()
    assert "does not fit" in str(found)


class LooksAtValues(Average):
    common = False

    def agree(self, x: Any, part: Part, memory: Memory) -> Any:
        return {name: p[:, p[0] > 0].sum() * p for name, p in x.items()}


def test_steps_that_depend_on_values_are_left_out_and_said() -> None:
    strategy = CommunicateOptimizeStrategy([Exchange(LooksAtValues())], "adamw", lr=0.01)
    estimate = estimate_memory(nn.Linear(4, 1, bias=False), strategy, 3)
    found = {name: part.total_bytes for name, part in estimate.parts.items()}
    assert (found["parameters"], found["exchange"]) == (3 * 16, 0)
    assert found["optimizer"] >= 2 * 3 * 16
    assert "the strategy depends on values" in str(estimate)


def test_an_exchange_long_after_the_first_steps_is_seen() -> None:
    """Codes of DiLoCo's movements take more than anything before them, in step 500."""
    model, one = networks()["MLP"]
    strategies = [DiLoCoStrategy("sgd", H=H, lr=0.01, compression="int8") for H in (2, 500)]
    often, rarely = (estimate_memory(model, s, 12, 8, one).parts["exchange"].total_bytes for s in strategies)
    assert often == rarely > 12 * sum(p.nbytes for p in model.parameters())


# --------------------------------------------------------------------------------------------------- what fits


def limited(monkeypatch: pytest.MonkeyPatch, limit: float) -> None:
    """Room for an estimate of `limit` bytes."""
    monkeypatch.setattr(fitting, "RESERVED_BYTES", 0)
    monkeypatch.setattr(fitting, "memory_limit", lambda device: int(fitting.MARGIN * limit))


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).unsqueeze(1).expand(-1, 500, -1).tanh().mean(1)


def wide() -> tuple[nn.Module, Any]:
    """Few parameters, large activations."""
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    return Classifier(Wide()), torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))


def total(chunk_size: int | None, minibatch_size: int | None = None) -> int:
    model, data = wide()
    return estimate_memory(
        model, alone(), 4, 16, data, chunk_size=chunk_size, minibatch_size=minibatch_size
    ).total_bytes


@pytest.mark.parametrize(
    ("chunk", "minibatch"), [(None, None), (2, None), (1, None), (1, 8), (1, 2)], ids=["all", "half", "one", "8", "2"]
)
def test_the_largest_cut_that_fits(monkeypatch: pytest.MonkeyPatch, chunk: int | None, minibatch: int | None) -> None:
    model, data = wide()
    limited(monkeypatch, total(chunk, minibatch) + 1)
    given: dict[str, Any] = {"num_nodes": 4, "data": data, "batch_size": 16, "max_steps": 3}
    trainer, _ = fit(model, alone(), **given, max_memory_usage=1.0)
    settings = trainer.history.settings
    assert (settings["chunk_size"], settings["minibatch_size"]) == (chunk, minibatch)
    assert settings["memory"]["needed_bytes"] <= settings["memory"]["limit_bytes"]
    assert settings["memory"]["measured"] is False
    plain, _ = fit(model, alone(), **given)
    torch.testing.assert_close(params(trainer), params(plain), rtol=1e-4, atol=1e-6)
    asked, _ = fit(model, alone(), **given, chunk_size=chunk, minibatch_size=minibatch)
    assert same_run(trainer, asked)


def test_backends_that_take_all_nodes_at_once_are_cut_into_chunks() -> None:
    model, data = wide()
    engine = Engine(model, engine="vmap")
    engine.prepare(tuple(x[None].expand(4, *x.shape) for x in data[:16]))
    cuts = {}
    for name in ("vmap", "compiled", "loop"):
        engine.plan = Plan(name)
        cuts[name] = [(plan.chunk_size, size) for plan, size in fitting._cuts(engine, 4, 16, None)]
    assert cuts["vmap"][:4] == [(None, None), (2, None), (1, None), (1, 8)]
    assert cuts["vmap"] == cuts["compiled"]
    assert cuts["loop"][:2] == [(None, None), (None, 8)]


def test_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = wide()
    limited(monkeypatch, 1000)
    with pytest.raises(MemoryError, match=r"4 nodes with batch_size=16 need .*, estimated, .* allows 1 kB.*smaller"):
        fit(model, alone(), num_nodes=4, data=data, batch_size=16, max_steps=3, max_memory_usage=0.8)


def test_room_is_left_for_torch_and_the_gaps_in_its_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU; so a limit that is just enough for the tensors makes the step smaller."""
    model, data = wide()
    needed = math.ceil(fitting.MARGIN * total(None)) + fitting.RESERVED_BYTES
    for limit, chunk in ((needed, None), (needed - 100, 2)):
        monkeypatch.setattr(fitting, "memory_limit", lambda device, limit=limit: limit)
        given: dict[str, Any] = {"num_nodes": 4, "data": data, "batch_size": 16, "max_steps": 3}
        settings = fit(model, alone(), **given, max_memory_usage=1.0)[0].history.settings
        assert settings["chunk_size"] == chunk
        assert settings["memory"]["limit_bytes"] == limit


def test_a_batch_that_statistics_are_taken_of_is_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"num_nodes": 3, "batch_size": 4, "max_steps": 2, "data": dataset("CNN")}
    one = estimate_memory(make_model("CNN"), alone(), 3, 4, dataset("CNN"), chunk_size=1).total_bytes
    limited(monkeypatch, one + 1)
    assert fit("CNN", alone(), **given, max_memory_usage=1.0)[0].history.settings["minibatch_size"] is None
    limited(monkeypatch, 0.9 * one)
    with pytest.raises(MemoryError, match="The batch is not cut, since the model has batch norm"):
        fit("CNN", alone(), **given, max_memory_usage=1.0)


def test_a_given_minibatch_size_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = wide()
    limited(monkeypatch, total(1, 8) + 1)
    given: dict[str, Any] = {"num_nodes": 4, "data": data, "batch_size": 16, "max_steps": 2, "max_memory_usage": 1.0}
    settings = fit(model, alone(), **given, minibatch_size=8)[0].history.settings
    assert (settings["chunk_size"], settings["minibatch_size"]) == (1, 8)
    with pytest.raises(MemoryError):
        fit(model, alone(), **given, minibatch_size=16)


@pytest.mark.parametrize("wrong", [0, -0.5, 1.5, 80, "0.8", True])
def test_a_fraction_that_is_none(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"max_memory_usage=.* must be a number in \(0, 1\].*such as 0\.8"):
        Trainer(make_model("MLP"), dataset("MLP")).fit(alone(), 2, max_memory_usage=wrong)


class Empty(nn.Module):
    """One of its parameters, and a buffer, has no element."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.empty = nn.Linear(4, 2), nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("nothing", torch.zeros(0))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self.layer(batch[0]) - batch[1]).square().mean() + self.empty.sum()


def test_parameters_without_elements_take_nothing() -> None:
    batch = torch.zeros(4, 4), torch.zeros(4, 2)
    for data in (None, batch):
        found = estimate_memory(Empty(), DiLoCoStrategy("adamw", H=2), 2, 4, data)
        assert found.parts["parameters"].total_bytes == 2 * 4 * (4 * 2 + 2)
    trainer = Trainer(Empty(), torch.utils.data.TensorDataset(torch.zeros(16, 4), torch.zeros(16, 2)))
    for engine in ("vmap", "loop"):
        strategy = DiLoCoStrategy("adamw", H=2, max_norm=1.0)
        trainer.fit(strategy, 2, batch_size=4, device="cpu", progress=False, max_memory_usage=0.9, engine=engine)
        assert trainer.nodes.params["empty"].shape == (2, 0, 3)


def test_nodes_weighted_by_their_examples_fit_and_are_estimated() -> None:
    strategy, batch = FedAvgStrategy("sgd", H=1, weighting="examples"), (torch.zeros(4, 4), torch.zeros(4, 2))
    assert estimate_memory(Empty(), strategy, 2, 4, batch).total_bytes > 0
    trainer = Trainer(Empty(), torch.utils.data.TensorDataset(torch.zeros(16, 4), torch.zeros(16, 2)))
    trainer.fit(strategy, 2, batch_size=4, device="cpu", progress=False, max_memory_usage=0.9)
    assert "memory" in trainer.history.settings


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"engine": "vamp"}, "did you mean 'vmap'"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"max_steps": 0}, "max_steps=0"),
        ({"num_nodes": 2.0}, "num_nodes=2.0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"minibatch_size": 3}, "minibatch_size=3 must divide"),
        ({"autocast": "no"}, "autocast='no'"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"strategy": "diloco"}, "DiLoCoStrategy"),
        ({"model": nn.Linear}, "the class Linear"),
    ],
)
def test_an_estimate_is_refused_as_a_run_is(wrong: dict[str, Any], says: str) -> None:
    given = {"model": Empty(), "strategy": FedAvgStrategy("sgd", H=1), "num_nodes": 4, "batch_size": 4, **wrong}
    with pytest.raises((ValueError, TypeError), match=says):
        estimate_memory(**given)


def test_the_limit_of_this_machine() -> None:
    assert 2**28 < memory_limit(torch.device("cpu")) <= 2**50
    assert vecgym.estimate_memory is estimate_memory
