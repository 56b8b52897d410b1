"""DeMo against its naive twin, 50 steps in float64 to 1e-10, and against its identities.

A sign and the choice of the largest are not continuous, so two programs agree only where neither follows rounding
noise. Where the waves themselves are 0, both have exact zeros. But noise it is after a ReLU that no example of a
node passes: a gradient row of exact zeros, of which the transform makes coefficients of equal magnitude and, once
everything was sent, values of 1e-18 with any sign. Hence the smooth MLP, and for the one with ReLU a setting in which
neither occurs.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fitting import dataset
from tests.helpers import (
    NEEDS_LOOP,
    Run,
    advance,
    assert_close,
    assert_same_bits,
    begun,
    difference,
    flat,
    reordered,
    rows,
    run,
    run_stack,
    saved,
    simulation,
    stacked,
)
from tests.models import MLP, make_batches, make_model
from tests.reference import common
from tests.reference.demo import basis as twin_basis
from tests.reference.demo import dct as twin_dct
from tests.reference.demo import demo, fold, make_chunks
from vecgym import Trainer, sweep
from vecgym.collectives import StackedCollectives
from vecgym.core import tree
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec, clip_grad_norm
from vecgym.simulation.simulation import Part
from vecgym.strategy import (
    AllReduceStrategy,
    CommunicateOptimizeStrategy,
    DeMoStrategy,
    Exchange,
    Strategy,
    StrongestCosines,
)
from vecgym.strategy.demo import _scaled

TOLERANCE = 1e-10
STEPS = 30
WARMUP = 8
EVERYTHING = 64 * 64


class SmoothMLP(MLP):
    """16 -> 32 -> 10 with GELU."""

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.second(F.gelu(self.first(x))), y)


def model_of(name: str) -> nn.Module:
    if name != "SmoothMLP":
        return make_model(name, dtype=torch.float64)
    model = SmoothMLP()
    model.load_state_dict(make_model("MLP").state_dict())
    return model.double()


@functools.cache
def batches_of(name: str, num_nodes: int, steps: int = STEPS) -> list[list[Any]]:
    return make_batches(name.removeprefix("Smooth"), steps, num_nodes, 3, dtype=torch.float64)


def setup(name: str, num_nodes: int, steps: int = STEPS) -> tuple[nn.Module, list[Any]]:
    return model_of(name), stacked(batches_of(name, num_nodes, steps))


def warm(step: int) -> float:
    return min(1.0, step / WARMUP)


def cosines_of(strategy: Strategy) -> StrongestCosines:
    (exchange,) = strategy.exchanges
    assert isinstance(exchange.how, StrongestCosines)
    return exchange.how


def residual_of(strategy: Strategy, result: Run) -> Tree:
    return cosines_of(strategy).residual(result.state.own["0.0/residual"], result.state.params)


# --------------------------------------------------------------------------------------------- the twin

SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # ours, the twin's
    "defaults": ({}, {}),
    "small-chunks": ({"compression_topk": 4, "compression_chunk": 8}, {"k": 4, "chunk": 8}),
    "one-of-each-chunk": (
        {"compression_topk": 1, "compression_chunk": 6, "compression_decay": 0.9, "lr": 0.003},
        {"k": 1, "chunk": 6, "decay": 0.9, "lr": 0.003},
    ),
    "clipped-warm-weight-decay": (
        {"compression_topk": 5, "compression_chunk": 32, "weight_decay": 0.1, "max_norm": 0.3, "warmup_steps": WARMUP},
        {"k": 5, "chunk": 32, "weight_decay": 0.1, "max_norm": 0.3, "schedule": warm},
    ),
}
CASES = [(setting, model) for setting in SETTINGS for model in ("SmoothMLP", "CNN")] + [("small-chunks", "MLP")]
CASES += [(setting, model) for setting in ("defaults", "clipped-warm-weight-decay") for model in ("LSTM", "GPT")]
RUNS = [
    (*case, 5, engine) for case in CASES for engine in ("vmap", "loop") if engine == "loop" or case[1] not in NEEDS_LOOP
]
FEW = [(setting, model, K, "vmap") for setting in SETTINGS for model in ("SmoothMLP", "CNN") for K in (1, 2)]


@functools.cache
def twin(setting: str, model: str, num_nodes: int) -> common.Result:
    return demo(model_of(model), batches_of(model, num_nodes), num_nodes, **{"lr": 0.01, **SETTINGS[setting][1]})


@pytest.mark.parametrize(("setting", "model", "num_nodes", "engine"), [*RUNS, *FEW])
def test_demo_equals_its_twin(setting: str, model: str, num_nodes: int, engine: str) -> None:
    start, batches = setup(model, num_nodes)
    settings: dict[str, Any] = {"lr": 0.01, **SETTINGS[setting][0]}
    strategy = DeMoStrategy(**settings)
    ours, theirs = run(start, strategy, batches, engine=engine), twin(setting, model, num_nodes)
    assert_close(ours.losses, theirs.losses, TOLERANCE, "losses")
    params = [common.parameters(m) for m in theirs.models]
    assert_close(ours.params, {name: torch.stack([p[name] for p in params]) for name in params[0]}, TOLERANCE, "params")
    expected = {name: torch.stack([delta[name] for delta in theirs.residuals]) for name in params[0]}
    assert_close(residual_of(strategy, ours), expected, TOLERANCE, "residual")
    buffers = [dict(m.named_buffers()) for m in theirs.models]
    assert_close(ours.buffers, {name: torch.stack([b[name] for b in buffers]) for name in buffers[0]}, TOLERANCE)


# ------------------------------------------------------------------------------------------ identities


@pytest.mark.parametrize("model", ["GPT", "LSTM", "Quadratic"])
def test_one_node_that_sends_everything_is_signsgd(model: str) -> None:
    start, batches = setup(model, 1, steps=10)
    strategy = DeMoStrategy(compression_topk=EVERYTHING, weight_decay=0.1, lr=0.01, warmup_steps=WARMUP)
    result = run(start, strategy, batches, engine="loop")
    (single,) = common.copy_model(start, 1)
    for step, (batch,) in enumerate(batches_of(model, 1, 10)):
        common.backward(single, batch)
        rate = 0.01 * warm(step)
        with torch.no_grad():
            for p in single.parameters():
                p.mul_(1 - rate * 0.1).sub_(rate * common.gradient(p).sign())
    assert_close(result.params, {n: p[None] for n, p in common.parameters(single).items()}, 1e-12)
    assert all((x == 0).all() for x in result.state.own["0.0/residual"].values())


@pytest.mark.parametrize("num_nodes", [1, 3])
@pytest.mark.parametrize("model", ["MLP", "CNN", "GPT"])
def test_the_residual_is_zero_where_everything_is_sent(model: str, num_nodes: int) -> None:
    start, batches = setup(model, num_nodes, steps=3)
    everything = DeMoStrategy(compression_topk=8 * 8, compression_chunk=8, lr=0.01)
    assert all((x == 0).all() for x in residual_of(everything, run(start, everything, batches)).values())
    some = DeMoStrategy(compression_topk=2, compression_chunk=8, lr=0.01)
    left = residual_of(some, run(start, some, batches))
    assert all(x.abs().max() > 1e-6 for x in left.values() if x[0].numel() > 16)


@pytest.mark.parametrize("inplace", [False, True])
def test_what_was_sent_and_what_is_left_are_the_sum_of_the_inputs(inplace: bool) -> None:
    """With decay 1 (which the constructor refuses), on one node: sum_t sent_t + delta_T = sum_t g_t."""
    cosines = StrongestCosines(compression_topk=3, compression_chunk=8)
    cosines.compression_decay = 1.0
    shapes = {"matrix": (24, 10), "vector": (40,), "conv": (8, 3, 3, 3), "scalar": ()}
    params = {name: torch.zeros(1, *shape, dtype=torch.float64) for name, shape in shapes.items()}
    part, memory = Part.alone(StackedCollectives(1), inplace=inplace), begun(cosines, params, 1, inplace)
    total = tree.map(torch.clone, params)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        g = tree.map(lambda p: torch.randn(p.shape, dtype=p.dtype, generator=generator), params)
        total = tree.map(torch.sub, total, g)
        total = tree.map(torch.add, total, cosines(g, part, memory))
    left = cosines.residual(memory.own["residual"], params)
    assert difference(tree.map(torch.neg, total), left) < 1e-13
    assert left["matrix"].abs().max() > 0.1


def test_each_node_sends_its_strongest_and_keeps_the_rest() -> None:
    """One exchange against chunks transformed one by one, per node."""
    K, k, chunk = 4, 5, 8
    cosines = StrongestCosines(compression_topk=k, compression_chunk=chunk)
    g = torch.randn(K, 24, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    memory = begun(cosines, {"w": g}, K)
    cosines({"w": g}, Part.alone(StackedCollectives(K)), memory)
    left = cosines.residual(memory.own["residual"], {"w": g})["w"]
    for node in range(K):
        for piece in make_chunks(fold(g[node].shape), chunk):
            before, after = twin_dct(g[node][piece]).flatten(), twin_dct(left[node][piece]).flatten()
            order = before.abs().argsort(descending=True)
            assert after[order[:k]].abs().max() < 1e-14
            torch.testing.assert_close(after[order[k:]], before[order[k:]], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("model", ["CNN", "GPT", "LSTM", "WithFrozen"])
def test_every_coordinate_moves_by_lr(model: str) -> None:
    start, batches = setup(model, 3, steps=4)
    sim = simulation(start, DeMoStrategy(compression_topk=3, compression_chunk=8, lr=0.01), batches, engine="loop")
    state = sim.init()
    for batch in batches:
        before = saved(state)
        state, _ = sim.step(state, batch)
        for name, p in state.params.items():
            moved = (p - before.params[name]).abs()
            assert (torch.isclose(moved, torch.tensor(0.01).double(), rtol=1e-12) | (moved == 0)).all()
            assert (moved > 0).double().mean() > 0.9


@pytest.mark.parametrize("inplace", [False, True])
def test_a_chunk_of_zeros_stays_zero(inplace: bool) -> None:
    """... where no node has anything; and what a node without anything sends counts, from the first coefficient on."""
    cosines = StrongestCosines(compression_topk=2, compression_chunk=4)
    g = torch.zeros(2, 4, 8, dtype=torch.float64)
    g[0, :, 4:] = 3.0  # one coefficient, the first: 12
    part, memory = Part.alone(StackedCollectives(2), inplace=inplace), begun(cosines, {"w": g}, 2, inplace)
    sent = cosines({"w": g.clone()}, part, memory)
    assert (sent["w"][:, :, :4] == 0).all()
    torch.testing.assert_close(sent["w"][0, :, 4:], torch.full((4, 4), 1.5, dtype=torch.float64))
    assert (cosines.residual(memory.own["residual"], {"w": g})["w"][1] == 0).all()


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_coordinate_where_every_wave_sent_is_zero_stays(dtype: torch.dtype, inplace: bool) -> None:
    """In the middle of 17 rows all odd waves are 0, whatever their sum is; rounding noise would move it by lr."""
    waves = twin_basis(17)[1:8:2]  # 1, 3, 5, 7
    amplitudes = torch.randn(2, 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    g = torch.einsum("kj,nkc->njc", waves, amplitudes).to(dtype)
    cosines = StrongestCosines(compression_topk=5)
    part, memory = Part.alone(StackedCollectives(2), inplace=inplace), begun(cosines, {"w": g}, 2, inplace)
    moves = cosines({"w": g}, part, memory)["w"][0] != 0
    assert not moves[8].any()
    assert moves[:8].all()
    assert moves[9:].all()


def test_the_learning_rate_weighs_the_gradients_of_a_step() -> None:
    """A constant one is only a scale; a schedule is not: momentum of step 0 counts by lr_0."""
    start, batches = setup("Quadratic", 2, steps=12)

    def moves(**settings: Any) -> Tensor:
        strategy = DeMoStrategy(compression_topk=1, lr=1e-6, **settings)  # so small that the gradients stay the same
        sim = simulation(start, strategy, [batches[0]] * 12)
        state, signs = sim.init(), []
        for _ in range(12):
            before = state.params["x"].clone()
            state, _ = sim.step(state, batches[0])
            signs.append((state.params["x"] - before).sign())
        return torch.cat(signs)

    constant, scheduled = moves(), moves(lr_scheduler=lambda step: 1 / (1 + step) ** 3)
    assert torch.equal(constant[0], scheduled[0])
    assert not torch.equal(constant, scheduled)


# ------------------------------------------------------------------------------ nodes, state, storage


@pytest.mark.parametrize("num_nodes", [2, 5])
@pytest.mark.parametrize("model", ["SmoothMLP", "CNN", "GPT"])
def test_permuting_the_nodes_permutes_the_result(model: str, num_nodes: int) -> None:
    start, batches = setup(model, num_nodes, steps=10)
    order = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(1)).tolist()
    strategy = DeMoStrategy(compression_topk=4, compression_chunk=8, lr=0.01)
    straight, permuted = run(start, strategy, batches), run(start, strategy, reordered(batches, order))
    assert_close(permuted.losses, straight.losses[:, order], TOLERANCE)
    assert_close(permuted.params, straight.params, TOLERANCE)
    assert_close(residual_of(strategy, permuted), rows(residual_of(strategy, straight), order), TOLERANCE)


@pytest.mark.parametrize("model", ["SmoothMLP", "CNN", "GPT"])
def test_identical_shards_equal_one_node_alone(model: str) -> None:
    start, batches = setup(model, 1, steps=10)
    strategy = DeMoStrategy(compression_topk=4, compression_chunk=8, lr=0.01)
    alone, together = run(start, strategy, batches), run(start, strategy, reordered(batches, [0, 0, 0]))
    assert_close(together.losses, alone.losses.expand(-1, 3), TOLERANCE)
    assert_close(together.params, rows(alone.params, [0, 0, 0]), TOLERANCE)


@pytest.mark.parametrize("num_nodes", [1, 2, 5])
def test_parameters_are_stored_once_and_residuals_once_per_node(num_nodes: int) -> None:
    start, batches = setup("CNN", num_nodes, steps=2)
    strategy = DeMoStrategy(lr=0.01)
    sim = simulation(start, strategy, batches, max_steps=4)
    state = advance(sim, sim.init(), batches).state
    assert {x.shape[0] for x in state.params.values()} == {1}
    assert not flat(state.home["optimizer"])
    assert tree.num_bytes(state.own["0.0/residual"]) == num_nodes * tree.num_bytes(state.params)
    held = {name: x.data_ptr() for name, x in state.own["0.0/residual"].items()}
    again = advance(sim, state, batches).state
    assert {name: x.data_ptr() for name, x in again.own["0.0/residual"].items()} == held  # in place


@pytest.mark.parametrize("cut", [1, 7])
@pytest.mark.parametrize("model", ["MLP", "CNN", "GPT"])
def test_a_saved_state_continues_as_if_nothing_had_happened(model: str, cut: int) -> None:
    start, batches = setup(model, 3, steps=12)
    strategy = DeMoStrategy(compression_topk=4, lr=0.01, max_norm=0.5, warmup_steps=3)
    whole = run(start, strategy, batches, max_steps=12)
    first = run(start, strategy, batches[:cut], max_steps=12)
    rest = run(start, strategy, batches[cut:], state=saved(first.state), max_steps=12)
    assert_same_bits(rest.state, whole.state)


@pytest.mark.parametrize("model", ["SmoothMLP", "CNN", "GPT"])
def test_the_pure_step_equals_the_donating_one(model: str) -> None:
    start, batches = setup(model, 3, steps=6)
    settings: dict[str, Any] = {"compression_topk": 4, "lr": 0.01, "max_norm": 0.5, "weight_decay": 0.1}
    donating = run(start, DeMoStrategy(**settings), batches)
    sim = simulation(start, DeMoStrategy(**settings), batches)
    state = sim.init()
    for batch in batches:
        given, before = state, saved(state)
        state, metrics = sim.step(given, batch, pure=True)
        sim.comm.ledger.add(given.step, metrics.transfers)
        assert_same_bits(given, before, "given state")
    assert_close(state, donating.state, 1e-12)
    assert list(sim.comm.ledger) == list(donating.comm.ledger)


def test_many_blocks_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place, strips of the tensors are transformed in blocks of some bytes; any number of strips at a time."""
    start, batches = setup("GPT", 3, steps=6)
    strategy = DeMoStrategy(compression_topk=4, compression_chunk=8, lr=0.01)
    whole = run(start, strategy, batches)
    for block_bytes in (1, 5000):
        monkeypatch.setattr("vecgym.strategy.demo._block_bytes", lambda x, n=block_bytes: n)
        assert_close(run(start, strategy, batches).state, whole.state, 1e-12)


@pytest.mark.parametrize("inplace", [False, True])
def test_gradients_with_any_strides(inplace: bool) -> None:
    cosines = StrongestCosines(compression_topk=4)
    for g in (torch.randn(4, 8, 3).permute(2, 0, 1), torch.randn(1, 4, 8).expand(3, 4, 8)):
        part = Part.alone(StackedCollectives(3), inplace=inplace)
        held = [begun(cosines, {"w": g}, 3, inplace) for _ in range(2)]
        results = [cosines({"w": x}, part, memory) for x, memory in zip((g, g.contiguous()), held)]
        assert_same_bits(results[0], results[1])
        assert_same_bits(held[0].own["residual"], held[1].own["residual"])
        clipped = [clip_grad_norm({"w": x}, 1.0, inplace=inplace)[0] for x in (g.clone(), g.contiguous().clone())]
        for rate in (0.1, torch.tensor([0.1, 0.2, 0.3])):  # as the strategy does it
            scaled = [tree.map(lambda x, rate=rate: _scaled(x.clone(), rate, inplace), x) for x in clipped]
            moves = [cosines(x, part, begun(cosines, {"w": g}, 3, inplace)) for x in scaled]
            pair = [tree.map(torch.sign, x) for x in moves]
            assert_same_bits(pair[0], pair[1])


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 5), (7,), (67, 3), (2, 3, 4, 5), (8, 1, 3, 3)])
def test_tensors_of_every_shape(shape: tuple[int, ...], inplace: bool) -> None:
    """Everything is sent, so the exchange is the mean."""
    g = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cosines = StrongestCosines(compression_topk=EVERYTHING)
    part, memory = Part.alone(StackedCollectives(3), inplace=inplace), begun(cosines, {"w": g}, 3, inplace)
    sent = cosines({"w": g.clone()}, part, memory)
    torch.testing.assert_close(sent["w"], g.mean(0, keepdim=True), rtol=1e-12, atol=1e-12)
    assert memory.own["residual"]["w"].numel() == g.numel()


# ----------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize(("k", "chunk"), [(32, 64), (4, 8), (1, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("model", ["MLP", "CNN", "GPT"])
def test_bytes_equal_the_closed_form(model: str, dtype: torch.dtype, k: int, chunk: int) -> None:
    start = make_model(model, dtype=dtype)
    batches = stacked(make_batches(model, 3, 4, dtype=dtype))
    strategy = DeMoStrategy(compression_topk=k, compression_chunk=chunk)
    result = run(start, strategy, batches)
    expected = 0
    for p in common.parameters(start).values():
        folded = torch.zeros(fold(p.shape))
        areas = [folded[piece].numel() for piece in make_chunks(list(folded.shape), chunk)]
        expected += sum(min(k, area) * (8 + p.element_size()) for area in areas)
    assert result.comm.ledger.total_payload_bytes == 3 * expected
    assert result.comm.ledger.total_bytes == result.comm.ledger.total_received_bytes == 3 * 3 * expected  # to 3 others
    assert cosines_of(strategy).step_bytes(result.state.params) == expected
    assert {entry.operation for entry in result.comm.ledger} == {"all_gather"}
    assert run(start, strategy, reordered(batches, [0])).comm.ledger.total_bytes == 0


def test_bytes_of_a_language_model() -> None:
    """OLMo-1B, 1,176,764,416 parameters, by its shapes alone: 110.32 MB."""
    layer = {"qkv": (6144, 2048), "out": (2048, 2048), "up": (16384, 2048), "down": (2048, 8192)}
    shapes = {f"{i}.{name}": shape for i in range(16) for name, shape in layer.items()} | {"tokens": (50304, 2048)}
    params = {name: torch.empty(1, *shape, device="meta") for name, shape in shapes.items()}
    assert sum(p.numel() for p in params.values()) == 1_176_764_416
    assert cosines_of(DeMoStrategy()).step_bytes(params) == 110_321_664


# ------------------------------------------------------------------------- configurations, derivatives


@pytest.mark.parametrize("model", ["SmoothMLP", "GPT"])
def test_two_configurations_equal_two_runs(model: str) -> None:
    K, rates = 3, [0.01, 0.003]
    start, batches = setup(model, K, steps=10)
    settings: dict[str, Any] = {"compression_topk": 4, "weight_decay": 0.1, "warmup_steps": 3}
    make = functools.partial(DeMoStrategy, **settings)
    both = reordered(batches, [*range(K), *range(K)])
    together = run_stack(start, [make(lr=lr) for lr in rates], both, K)
    for i, lr in enumerate(rates):
        strategy, own = make(lr=lr), range(i * K, (i + 1) * K)
        alone = run(start, strategy, batches)
        assert_close(together.losses[:, i], alone.losses, TOLERANCE, "losses")
        assert_close(together.params[i], alone.params, TOLERANCE, "params")
        held = rows(together.state.own["0"]["0.0/residual"], own)
        mine = cosines_of(strategy).residual(held, together.params[i])
        assert_close(mine, residual_of(strategy, alone), TOLERANCE, "residual")


@pytest.mark.parametrize("name", ["lr", "weight_decay"])
def test_the_direct_path_is_differentiated(name: str) -> None:
    """Through theta - lr sign(.): in lr and weight decay as long as no sign and no choice changes."""
    start, batches = setup("Quadratic", 3, steps=5)
    point: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}

    def loss(value: Tensor) -> Tensor:
        strategy = DeMoStrategy(compression_topk=2, **{**point, name: value})
        return run(start, strategy, batches, differentiable=True).losses.sum()

    value = torch.tensor(point[name], dtype=torch.float64, requires_grad=True)
    (derivative,) = torch.autograd.grad(loss(value), value)
    h = 1e-6
    assert derivative != 0
    measured = (loss(value.detach() + h) - loss(value.detach() - h)) / (2 * h)
    torch.testing.assert_close(derivative, measured, rtol=1e-7, atol=0.0)
    with pytest.raises(ValueError, match="requires grad"):
        run(start, DeMoStrategy(compression_topk=2, **{**point, name: value}), batches)


def test_the_module_alone_is_differentiated() -> None:
    """An optimizer without a sign takes gradients of the values sent, as long as no choice changes."""
    cosines = StrongestCosines(compression_topk=3, compression_chunk=4)
    generator = torch.Generator().manual_seed(0)
    g, h = (torch.randn(2, 4, 8, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(2))

    def twice(g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        part, memory = Part.alone(StackedCollectives(2)), begun(cosines, {"w": g.detach()}, 2)
        cosines({"w": g}, part, memory)
        return cosines({"w": h}, part, memory)["w"], memory.own["residual"]["w"]

    assert torch.autograd.gradcheck(twice, (g, h))


def test_the_module_with_another_optimizer() -> None:
    """Everything is sent: AdamW on the mean gradient, which is what DDP does."""
    start, batches = setup("GPT", 3, steps=8)
    spec = OptimSpec("adamw", lr=0.01)
    exchange = Exchange(StrongestCosines(compression_topk=EVERYTHING), of="gradients")
    result = run(start, CommunicateOptimizeStrategy([exchange], spec), batches)
    expected = run(start, AllReduceStrategy(spec), batches)
    assert_close(result.losses, expected.losses, 1e-8)
    assert {x.shape[0] for x in result.state.params.values()} == {1}


# ------------------------------------------------------------------------------------------- arguments


CHANGES: dict[str, Any] = {
    "compression_decay": 0.1,
    "compression_topk": 2,
    "compression_chunk": 4,
    "weight_decay": 0.5,
    "lr": 0.03,
    "max_norm": 0.05,
    "lr_scheduler": "cosine",
    "warmup_steps": 3,
    "cosine_anneal": True,
}


@pytest.mark.parametrize("argument", CHANGES)
def test_every_argument_changes_something(argument: str) -> None:
    start, batches = setup("GPT", 3, steps=8)
    base: dict[str, Any] = {"compression_topk": 4, "compression_chunk": 8, "lr": 0.01}
    before = run(start, DeMoStrategy(**base), batches)
    after = run(start, DeMoStrategy(**{**base, argument: CHANGES[argument]}), batches)
    assert difference(before.params, after.params) > 1e-6


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: DeMoStrategy(compression_decay=1.0),
            ValueError,
            r"compression_decay=1.0 must be a number in \[0, 1\)",
        ),
        (lambda: DeMoStrategy(compression_decay=-0.1), ValueError, "compression_decay=-0.1"),
        (lambda: DeMoStrategy(compression_decay=float("nan")), ValueError, "compression_decay=nan"),
        (lambda: DeMoStrategy(compression_decay=True), ValueError, "compression_decay=True"),
        (lambda: DeMoStrategy(compression_topk=0), ValueError, "compression_topk=0 must be an integer >= 1"),
        (lambda: DeMoStrategy(compression_topk=2.0), ValueError, "compression_topk=2.0"),  # type: ignore[arg-type]
        (lambda: DeMoStrategy(compression_chunk=0), ValueError, "compression_chunk=0 must be an integer >= 1"),
        (lambda: DeMoStrategy(compression_chunk=True), ValueError, "compression_chunk=True"),
        (lambda: DeMoStrategy(weight_decay=-0.1), ValueError, "weight_decay"),
        (lambda: DeMoStrategy(lr=-1.0), ValueError, "learning rate"),
        (lambda: DeMoStrategy(max_norm=0.0), ValueError, "max_norm=0.0"),
        (lambda: DeMoStrategy(warmup_steps=-1), ValueError, "warmup_steps=-1"),
        (lambda: DeMoStrategy(lr_scheduler="cosin"), ValueError, "did you mean 'cosine'"),
        (lambda: DeMoStrategy("sgd"), ValueError, "compression_decay='sgd'"),  # type: ignore[arg-type]
        (lambda: DeMoStrategy(topk=3), TypeError, "topk"),  # type: ignore[call-arg]
        (lambda: StrongestCosines(compression_topk=-1), ValueError, "compression_topk=-1"),
    ],
)
def test_what_cannot_work_is_refused(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_strategy_can_be_shown_copied_and_pickled() -> None:
    strategy = DeMoStrategy(compression_topk=8, weight_decay=0.1, lr=0.01)
    assert repr(strategy) == (
        "DeMoStrategy(OptimSpec(SGD, lr=0.01, weight_decay=0.1), "
        "Exchange(StrongestCosines(compression_topk=8), of='gradients'))"
    )
    assert repr(copy.deepcopy(strategy)) == repr(pickle.loads(pickle.dumps(strategy))) == repr(strategy)


def test_rates_of_each_node_in_a_sweep_are_those_of_its_runs() -> None:
    data, rates = dataset("MLP"), [torch.linspace(1e-3, 0.02, 3), torch.linspace(0.05, 0.01, 3)]
    given: dict[str, Any] = {"max_steps": 4, "batch_size": 4, "device": "cpu", "progress": False}

    def make(lr: Tensor) -> DeMoStrategy:
        return DeMoStrategy(compression_topk=2, compression_chunk=8, lr=lr, max_norm=torch.tensor([0.1, 0.5, 1.0]))

    result = sweep(make_model("MLP"), data, strategy=make, grid={"lr": rates}, num_nodes=3, **given)
    for i, lr in enumerate(rates):
        trainer = Trainer(make_model("MLP"), data)
        trainer.fit(make(lr), 3, **given)
        assert result.history(i)["train_loss"] == pytest.approx(trainer.history["train_loss"], abs=1e-6)
