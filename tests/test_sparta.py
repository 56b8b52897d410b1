"""SPARTA, SPARTA + DiLoCo, units and delays: against naive twins, exact identities, statistics of the masks.

Statistical tests have fixed seeds, so they give the same answer every time. Their limits are those that a correct
program would pass with probability 1 - 1e-6: 4.9 standard deviations.
"""

from __future__ import annotations

import functools
import io
import itertools
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.data import TensorDataset

from tests.helpers import (
    Recording,
    Run,
    advance,
    assert_close,
    assert_same_bits,
    begun,
    difference,
    reordered,
    rows,
    run,
    run_stack,
    saved,
    simulation,
    stacked,
)
from tests.models import make_batches, make_model
from tests.reference import common
from tests.reference.common import Result
from tests.reference.sparta import sparta
from tests.reference.sparta_diloco import sparta_diloco
from vecgym import Trainer
from vecgym.availability import Trace
from vecgym.collectives import StackedCollectives
from vecgym.core.errors import VecgymWarning
from vecgym.simulation.simulation import Part
from vecgym.simulation.timetable import RunFacts
from vecgym.simulation.when import as_when
from vecgym.strategy import (
    Average,
    AveragingCommunicator,
    CommunicateOptimizeStrategy,
    DiLoCoStrategy,
    Exchange,
    FedAvgStrategy,
    Mean,
    MostMoved,
    OptimSpec,
    Outer,
    Sparse,
    Strategy,
    every,
)
from vecgym.strategy.sparta import (
    PartitionedSelector,
    RandomSelector,
    ScheduledSelector,
    Selector,
    SparseCommunicator,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
    bernoulli_indices,
)
from vecgym.strategy.sparta import ShuffledSequentialSelector as SequentialSelector
from vecgym.strategy.stages import Memory

TOLERANCE = 1e-10
STEPS = 50
SIGMAS = 4.9
SHAPES = {"w": torch.Size([12, 5]), "b": torch.Size([7]), "scalar": torch.Size([]), "none": torch.Size([0, 3])}

SELECTORS: dict[str, Callable[[], Selector]] = {
    "random": lambda: RandomSelector(0.2),
    "sequential": lambda: SequentialSelector(0.2),
    "partitioned": lambda: PartitionedSelector(0.15),
    "scheduled": lambda: ScheduledSelector(0.2, H=7),
}
DILOCO_CASES = {  # sparta_interval, H, delay
    "every-step": (1, 5, 0),
    "interval-2": (2, 5, 0),
    "interval-3-delay-2": (3, 4, 2),
    "delay-across-outer-steps": (1, 3, 4),
}


def drawing(seed: int = 0, step: int = 0) -> Part:
    return Part.alone(StackedCollectives(1), seed=seed, step=step)


def draws(selector: Selector, steps: int, shapes: dict[str, torch.Size] = SHAPES, seed: int = 0) -> list[dict]:
    """The first exchanges' indices, one exchange per step."""
    state, drawn = selector.init(shapes, drawing(seed)), []
    for step in range(steps):
        index, state = selector.select(shapes, state, step, drawing(seed, step))
        drawn.append(index)
    return drawn


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Recorded(Selector):
    """Another selector, remembering what it drew at which step."""

    def __init__(self, selector: Selector) -> None:
        self.selector = selector
        self.drawn: dict[int, dict[str, Tensor]] = {}

    def init(self, shapes: Any, at: Any) -> Any:
        return self.selector.init(shapes, at)

    def select(self, shapes: Any, state: Any, exchange: int, at: Any) -> Any:
        index, state = self.selector.select(shapes, state, exchange, at)
        self.drawn[at.due.step] = index
        return index, state

    def mask(self, step: int, name: str, shape: torch.Size) -> Tensor:
        chosen = torch.zeros(shape.numel(), dtype=torch.bool)
        if name in self.drawn[step]:
            chosen[self.drawn[step][name]] = True
        return chosen.view(shape)


def late(how: Average, delay: int, **settings: Any) -> Exchange:
    return Exchange(how, delay=delay, late="change", **settings)


def alone(optim: Any, **settings: Any) -> Strategy:
    return CommunicateOptimizeStrategy([], optim, **settings)


@functools.cache
def data(model: str, num_nodes: int, steps: int = STEPS) -> list[list[Any]]:
    return make_batches(model, steps, num_nodes, 3, dtype=torch.float64)


def start(model: str) -> nn.Module:
    return make_model(model, dtype=torch.float64)


# -------------------------------------------------------------------------------------- the naive twins


def compare(ours: Run, theirs: Result) -> None:
    assert_close(ours.losses, theirs.losses, TOLERANCE, "losses")
    params = [common.parameters(m) for m in theirs.models]
    assert_close(ours.params, {name: torch.stack([p[name] for p in params]) for name in params[0]}, TOLERANCE, "params")
    buffers = [dict(m.named_buffers()) for m in theirs.models]
    assert_close(ours.buffers, {name: torch.stack([b[name] for b in buffers]) for name in buffers[0]}, TOLERANCE)
    for i, (p, optimizer) in enumerate(zip(params, theirs.optimizers)):
        held = {s: {n: x[i] for n, x in v.items()} for s, v in ours.state.home["optimizer"].items()}
        expected = {s: {n: optimizer.state[p[n]][s] for n in p} for s in held}
        assert_close(held, expected, TOLERANCE, f"inner optimizer of node {i}")
    if theirs.outer:
        outer = ours.state.shared["1.0/params"]
        assert_close({name: x[0] for name, x in outer.items()}, theirs.outer, TOLERANCE, "outer parameters")


@functools.cache
def masks(selector: str, model: str, interval: int = 1) -> Recorded:
    """The selector's draws over a whole run, the same for any number of nodes and any engine."""
    recorded = Recorded(SELECTORS[selector]())
    shapes = {name: p.shape for name, p in common.parameters(start(model)).items()}
    state = recorded.init(shapes, drawing(42))
    for step in range(interval - 1, STEPS, interval):
        _, state = recorded.select(shapes, state, step // interval, drawing(42, step))
    return recorded


@functools.cache
def twin(selector: str, delay: int, model: str, num_nodes: int) -> Result:
    mask = masks(selector, model).mask
    inner = (AdamW, {"lr": 0.01})
    return sparta(start(model), data(model, num_nodes), num_nodes, mask=mask, inner=inner, delay=delay, max_norm=0.3)


def check_sparta(selector: str, delay: int, model: str, num_nodes: int, engine: str) -> None:
    recorded = Recorded(SELECTORS[selector]())
    strategy = SPARTAStrategy(inner_optim="adamw", index_selector=recorded, delay=delay, lr=0.01, max_norm=0.3)
    ours = run(start(model), strategy, stacked(data(model, num_nodes)), engine=engine)
    compare(ours, twin(selector, delay, model, num_nodes))
    expected = masks(selector, model).drawn
    assert all(same(recorded.drawn[step], expected[step]) for step in range(STEPS))
    late = {name for name in ours.state.shared if "message" in name}
    assert late == {f"0.0/message {step}" for step in range(STEPS - delay, STEPS)}


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize("delay", [0, 1, 2, 3])
@pytest.mark.parametrize("selector", SELECTORS)
def test_sparta_equals_its_twin(selector: str, delay: int, engine: str) -> None:
    check_sparta(selector, delay, "MLP", 5, engine)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize(("selector", "delay"), [("random", 0), ("partitioned", 2)])
@pytest.mark.parametrize(("model", "num_nodes"), [("MLP", 1), ("MLP", 2), ("CNN", 2), ("CNN", 5), ("GPT", 5)])
def test_sparta_on_other_models_equals_its_twin(
    model: str, num_nodes: int, selector: str, delay: int, engine: str
) -> None:
    check_sparta(selector, delay, model, num_nodes, engine)


@functools.cache
def diloco_twin(selector: str, case: str, model: str, num_nodes: int) -> Result:
    interval, H, delay = DILOCO_CASES[case]
    mask = masks(selector, model, interval).mask
    inner = (SGD, {"lr": 0.05, "momentum": 0.9})
    batches = data(model, num_nodes)
    return sparta_diloco(start(model), batches, num_nodes, mask=mask, interval=interval, H=H, inner=inner, delay=delay)


@pytest.mark.parametrize("engine", ["vmap", "loop"])
@pytest.mark.parametrize(
    ("selector", "model", "num_nodes"),
    [("random", "MLP", 1), ("random", "MLP", 2), ("partitioned", "MLP", 5), ("random", "CNN", 5)],
)
@pytest.mark.parametrize("case", DILOCO_CASES)
def test_sparta_diloco_equals_its_twin(case: str, selector: str, model: str, num_nodes: int, engine: str) -> None:
    interval, H, delay = DILOCO_CASES[case]
    strategy = SPARTADiLoCoStrategy(
        sparta_interval=interval,
        H=H,
        inner_optim=OptimSpec(SGD, lr=0.05, momentum=0.9),
        index_selector=SELECTORS[selector](),
        delay=delay,
    )
    ours = run(start(model), strategy, stacked(data(model, num_nodes)), engine=engine)
    compare(ours, diloco_twin(selector, case, model, num_nodes))


def test_sparta_diloco_on_a_transformer_equals_its_twin() -> None:
    strategy = SPARTADiLoCoStrategy(
        sparta_interval=3,
        H=4,
        inner_optim=OptimSpec(SGD, lr=0.05, momentum=0.9),
        index_selector=SELECTORS["sequential"](),
        delay=2,
    )
    ours = run(start("GPT"), strategy, stacked(data("GPT", 2)))
    compare(ours, diloco_twin("sequential", "interval-3-delay-2", "GPT", 2))


# --------------------------------------------------------------------------------------- exact identities


@pytest.mark.parametrize("model", ["MLP", "GPT", "CNN"])
def test_everything_is_averaging_at_every_step_and_nothing_is_independent_nodes(model: str) -> None:
    batches = stacked(data(model, 3, 8))
    for p, expected in ((1, FedAvgStrategy("adamw", H=1, lr=0.01)), (0, alone("adamw", lr=0.01))):
        ours = run(start(model), SPARTAStrategy(p_sparta=p, inner_optim="adamw", lr=0.01), batches)
        theirs = run(start(model), expected, batches)
        assert_same_bits(ours.params, theirs.params)
        assert_same_bits(ours.losses, theirs.losses)
        assert ours.comm.ledger.total_bytes == theirs.comm.ledger.total_bytes
    assert ours.comm.ledger.total_bytes == 0


@pytest.mark.parametrize("selector", [SequentialSelector, PartitionedSelector])
@pytest.mark.parametrize("H", [1, 4, 7])
def test_in_turn_every_coordinate_is_averaged_exactly_once_in_h_steps(selector: Any, H: int) -> None:
    """Nodes that do not train agree after H steps on their mean, and not a step earlier."""
    model, batches = start("MLP"), stacked(data("MLP", 3, 2 * H))
    recorded = Recorded(selector(1 / H))
    sim = simulation(model, SPARTAStrategy(index_selector=recorded, inner_optim="sgd", lr=0.0), batches)
    noise = torch.Generator().manual_seed(0)
    params = {n: torch.randn(3, *p.shape, generator=noise, dtype=p.dtype) for n, p in model.named_parameters()}
    state = sim.init({name: p.clone() for name, p in params.items()})
    if H > 1:
        before = advance(sim, state, batches[: H - 1])
        assert all((x[0] != x[1]).any() for x in (before.params["first.weight"], before.params["second.weight"]))
        state = before.state
    after = advance(sim, state, batches[: H if H == 1 else 1])
    means = {name: p.mean(0, keepdim=True) for name, p in params.items()}
    assert_close(after.params, {n: x.expand(3, *x.shape[1:]) for n, x in means.items()}, 1e-15)
    advance(sim, after.state, batches[H:])
    for cycle in (range(H), range(H, 2 * H)):
        for name, p in model.named_parameters():
            taken = torch.cat([recorded.drawn[step].get(name, torch.empty(0)) for step in cycle])
            assert taken.sort().values.tolist() == list(range(p.numel()))


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("selector", SELECTORS)
def test_one_node_trains_as_if_alone(selector: str, delay: int) -> None:
    """Without delay; a late value of its own does change a node."""
    batches = stacked(data("MLP", 1, 10))
    ours = run(start("MLP"), SPARTAStrategy(index_selector=SELECTORS[selector](), delay=delay, lr=0.01), batches)
    plain = run(start("MLP"), alone("adamw", lr=0.01), batches)
    assert ours.comm.ledger.total_bytes == 0
    if delay == 0:
        assert_same_bits(ours.params, plain.params)
    else:
        assert difference(ours.params, plain.params) > 1e-4


def test_one_node_of_sparta_diloco_is_diloco() -> None:
    batches = stacked(data("MLP", 1, 10))
    ours = run(start("MLP"), SPARTADiLoCoStrategy(0.3, 2, 4, "adamw", lr=0.01), batches)
    theirs = run(start("MLP"), DiLoCoStrategy("adamw", H=4, lr=0.01), batches)
    assert_same_bits(ours.params, theirs.params)


def test_nodes_with_the_same_data_stay_the_same() -> None:
    one = stacked(data("MLP", 1, 10))
    three = reordered(one, [0, 0, 0])
    plain = run(start("MLP"), alone("adamw", lr=0.01), one)
    ours = run(start("MLP"), SPARTAStrategy(0.3, "adamw", lr=0.01), three)
    assert_close(ours.params, {n: x.expand(3, *x.shape[1:]) for n, x in plain.params.items()}, 1e-12)


@pytest.mark.parametrize("delay", [0, 2])
def test_permuting_the_nodes_permutes_the_result(delay: int) -> None:
    batches, order = stacked(data("CNN", 4, 12)), [2, 0, 3, 1]
    make = lambda: SPARTADiLoCoStrategy(0.3, 1, 5, "adamw", delay=delay, lr=0.01)  # noqa: E731
    result = run(start("CNN"), make(), batches)
    permuted = run(start("CNN"), make(), reordered(batches, order))
    assert_close(permuted.params, rows(result.params, order), 1e-12)
    assert_close(permuted.losses, result.losses[:, order], 1e-12)


def test_an_outer_step_every_step_leaves_nothing_to_sparta() -> None:
    """H = 1: the sparse averages change no mean, and the outer step takes only the mean."""
    batches = stacked(data("MLP", 3, 10))
    ours = run(start("MLP"), SPARTADiLoCoStrategy(0.3, 1, 1, "sgd", lr=0.1), batches)
    theirs = run(start("MLP"), DiLoCoStrategy("sgd", H=1, lr=0.1), batches)
    assert_close(ours.params, theirs.params, 1e-12)


# ----------------------------------------------------------------------------------------- the exchange


def exchange(made: Exchange, params: dict[str, Tensor], num_nodes: int, inplace: bool, steps: int = 1) -> Any:
    """The parameters after some exchanges without training, and the ledger."""
    comm = StackedCollectives(num_nodes)
    memory = begun(made.how, params, num_nodes, inplace)
    (when,) = made.times(list(params))
    for step in filter(as_when(when, "every").due, range(steps)):
        comm.ledger.begin_step(step)
        part = Part.alone(comm, number=as_when(when, "every").count(step), step=step, inplace=inplace)
        params = made.how(params, part, memory)
    return params, comm.ledger


def random_params(num_rows: int) -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(1)
    return {n: torch.randn(num_rows, *s, generator=noise, dtype=torch.float64) for n, s in SHAPES.items()}


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("selector", SELECTORS)
def test_the_exchange_writes_the_mean_on_the_mask_and_nothing_else(selector: str, inplace: bool) -> None:
    params = random_params(4)
    before = {n: p.clone() for n, p in params.items()}
    recorded = Recorded(SELECTORS[selector]())
    steps = 4
    after, ledger = exchange(SparseCommunicator(recorded), params, 4, inplace, steps)
    for name, x in before.items():
        M = functools.reduce(torch.logical_or, [recorded.mask(step, name, SHAPES[name]) for step in range(steps)])
        torch.testing.assert_close(after[name], torch.where(M, x.mean(0, keepdim=True), x), rtol=0, atol=1e-15)
        assert torch.equal(params[name], after[name] if inplace else x)
        assert after[name].shape == x.shape
    entries = list(ledger)
    assert [e.payload_bytes for e in entries] == [8 * sum(map(len, recorded.drawn[t].values())) for t in range(steps)]
    assert sum(e.payload_bytes for e in entries) > 0


@pytest.mark.parametrize("inplace", [True, False])
def test_what_is_the_same_on_every_node_stays_so_and_costs_the_same_bytes(inplace: bool) -> None:
    one = random_params(1)
    three = {n: p.expand(3, *p.shape[1:]) for n, p in one.items()}  # no storage of its own: never written into
    module = SparseCommunicator(sparsification_rate=0.5)
    after_one, ledger_one = exchange(module, {n: p.clone() for n, p in one.items()}, 3, inplace, 5)
    after_three, ledger_three = exchange(module, three, 3, inplace, 5)
    assert_same_bits(after_one, one)
    assert_close(after_three, three, 1e-15)
    assert_same_bits(one, random_params(1))
    assert list(ledger_one) == list(ledger_three)
    assert ledger_one.total_bytes > 0


@pytest.mark.parametrize("inplace", [True, False])
def test_transposed_parameters_are_written_too(inplace: bool) -> None:
    params = {"w": torch.arange(12.0).view(3, 2, 2).transpose(1, 2)}
    mean = params["w"].mean(0, keepdim=True).expand(3, 2, 2)
    after, _ = exchange(SparseCommunicator(sparsification_rate=1.0), params, 3, inplace)
    assert torch.equal(after["w"], mean)


def test_in_place_the_storage_stays() -> None:
    params = random_params(4)
    pointers = {n: p.data_ptr() for n, p in params.items()}
    after, _ = exchange(SparseCommunicator(sparsification_rate=0.5), params, 4, inplace=True)
    assert {n: p.data_ptr() for n, p in after.items()} == pointers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_nodes", [1, 2, 5])
def test_the_ledger_has_the_closed_form_to_the_byte(num_nodes: int, dtype: torch.dtype) -> None:
    interval, H, steps = 2, 5, 20
    recorded = Recorded(RandomSelector(0.1))
    strategy = SPARTADiLoCoStrategy(
        sparta_interval=interval, H=H, inner_optim="sgd", lr=0.01, index_selector=recorded, delay=1
    )
    model = make_model("GPT", dtype=dtype)
    ours = run(model, strategy, stacked(make_batches("GPT", steps, num_nodes, 2, dtype=dtype)))
    b, P = dtype.itemsize, sum(p.numel() for p in model.parameters())
    sparse = {t: sum(map(len, index.values())) for t, index in recorded.drawn.items()}
    assert sorted(sparse) == list(range(interval - 1, steps, interval))
    expected = [(t, b * sparse[t]) for t in sparse] + [(t, b * P) for t in range(H - 1, steps, H)]
    entries = list(ours.comm.ledger)
    assert sorted((e.step, e.payload_bytes) for e in entries) == sorted(expected)
    assert [e.sent_bytes for e in entries] == [2 * (num_nodes - 1) * e.payload_bytes / num_nodes for e in entries]
    assert {e.operation for e in entries} == {"mean"}


# ------------------------------------------------------------------------------------------- selectors


@pytest.mark.parametrize("selector", SELECTORS)
def test_selections_depend_on_seed_and_exchange_only(selector: str) -> None:
    first, again = draws(SELECTORS[selector](), 30), draws(SELECTORS[selector](), 30)
    torch.manual_seed(123)
    state = torch.random.get_rng_state()
    shuffled = draws(SELECTORS[selector](), 30, dict(reversed(SHAPES.items())))
    assert torch.equal(state, torch.random.get_rng_state())
    other = draws(SELECTORS[selector](), 30, seed=1)
    assert all(same(a, b) and same(a, c) for a, b, c in zip(first, again, shuffled))
    assert not any(same(a, b) for a, b in zip(first, other) if a)
    assert not any(same(a, b) for a, b in itertools.pairwise(first))
    for name, index in itertools.chain.from_iterable(index.items() for index in first):
        assert index.dtype == torch.int64
        assert len(index.unique()) == len(index)
        assert 0 <= int(index.min()) <= int(index.max()) < SHAPES[name].numel()


@pytest.mark.parametrize("selector", [SequentialSelector(0.3), PartitionedSelector(0.3)])
def test_parts_are_even_and_only_partitions_change(selector: SequentialSelector) -> None:
    assert selector.num_parts == 4
    chunks = [index["w"] for index in draws(selector, 12)]
    assert [len(c) for c in chunks] == [15] * 12
    cycles = [torch.cat(chunks[i : i + 4]).tolist() for i in (0, 4, 8)]
    assert all(sorted(cycle) == list(range(60)) for cycle in cycles)
    assert len({tuple(cycle) for cycle in cycles}) == (3 if isinstance(selector, PartitionedSelector) else 1)


def test_the_number_of_parts_is_exact() -> None:
    assert all(SequentialSelector(1 / n).num_parts == n for n in range(1, 20_000))
    assert [SequentialSelector(p).num_parts for p in (1, 0.9, 0.5, 0.3, 0.005)] == [1, 2, 2, 4, 200]


def test_the_selectors_need_little_state() -> None:
    assert RandomSelector(0.5).init(SHAPES, drawing()) == ScheduledSelector(0.5, 9).init(SHAPES, drawing()) == {}
    assert {n: x.shape for n, x in SequentialSelector(0.5).init(SHAPES, drawing()).items()} == {
        n: (1, s.numel()) for n, s in SHAPES.items()
    }


def z(observed: float, expected: float, variance: float) -> float:
    return abs(observed - expected) / math.sqrt(variance)


@pytest.mark.parametrize(("n", "p"), [(1000, 0.005), (1000, 0.3), (50, 0.9), (20_000, 0.0005)])
def test_how_many_are_selected(n: int, p: float) -> None:
    """The count is binomial: its mean n p and its variance n p (1 - p)."""
    T = 4000
    counts = torch.tensor([len(bernoulli_indices(n, p, drawing().generator("test", t))) for t in range(T)]).double()
    variance = n * p * (1 - p)
    assert z(float(counts.mean()), n * p, variance / T) < SIGMAS
    fourth = variance * (1 + 3 * (n - 2) * p * (1 - p))  # the central moment
    assert z(float((counts - n * p).square().mean()), variance, (fourth - variance**2) / T) < SIGMAS


@pytest.mark.parametrize("p", [0.05, 0.6])
def test_every_coordinate_is_selected_equally_often_and_independently_of_its_neighbours(p: float) -> None:
    n, T = 200, 4000
    chosen = torch.zeros(T, n, dtype=torch.float64)
    for t in range(T):
        chosen[t, bernoulli_indices(n, p, drawing().generator("test", t))] = 1
    chi_square = float(((chosen.sum(0) - T * p) ** 2 / (T * p * (1 - p))).sum())
    assert z(chi_square, n, 2 * n) < SIGMAS
    centred = chosen - p
    for pairs in (centred[:, 1:] * centred[:, :-1], centred[1:] * centred[:-1]):  # neighbours; successive exchanges
        assert z(float(pairs.sum()), 0, pairs.numel() * (p * (1 - p)) ** 2) < SIGMAS


def test_every_subset_has_its_exact_probability() -> None:
    n, p, T = 4, 0.35, 8_000
    counts = torch.zeros(2**n, dtype=torch.float64)
    for t in range(T):
        counts[sum(2**i for i in bernoulli_indices(n, p, drawing().generator("subset", t)).tolist())] += 1
    sizes = torch.tensor([bin(i).count("1") for i in range(2**n)])
    expected = T * p**sizes * (1 - p) ** (n - sizes)
    assert z(float(((counts - expected) ** 2 / expected).sum()), 2**n - 1, 2 * (2**n - 1)) < SIGMAS


@pytest.mark.parametrize("n", [0, 1, 3, 1000])
@pytest.mark.parametrize("p", [0, 0.0, 1e-300, 1e-12, 0.5, 1 - 1e-15, 1, 1.0])
def test_extreme_rates(n: int, p: float) -> None:
    index = bernoulli_indices(n, p, drawing().generator("test"))
    assert index.dtype == torch.int64
    if p < 1e-9 or p > 1 - 1e-9:
        assert index.tolist() == (list(range(n)) if p > 0.5 else [])


def test_a_draw_that_falls_short_goes_on() -> None:
    """The first round of gaps is too short about once in 10^6; with gaps of 1 (a generator of ones) always."""

    real = torch.rand

    def ones(*size: Any, **settings: Any) -> Tensor:
        return real(*size, **settings).fill_(1 - 2**-53)  # log U / log(1 - p) just above 0: the gap is 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "rand", ones)
        assert bernoulli_indices(500, 0.1, torch.Generator()).tolist() == list(range(500))


def test_the_tensors_share_one_draw_evenly() -> None:
    """Over all tensors laid end to end, each coordinate of each one is as likely."""
    T, p = 1500, 0.1
    counts = {name: torch.zeros(shape.numel(), dtype=torch.float64) for name, shape in SHAPES.items()}
    for index in draws(RandomSelector(p), T):
        for name, where in index.items():
            counts[name][where] += 1
    every_count = torch.cat(list(counts.values()))
    assert (
        z(float(((every_count - T * p) ** 2 / (T * p * (1 - p))).sum()), len(every_count), 2 * len(every_count))
        < SIGMAS
    )


def test_the_scheduled_rate_rises_from_zero_to_twice_p() -> None:
    p, H, T, n = 0.2, 10, 2000, sum(s.numel() for s in SHAPES.values())
    selector = ScheduledSelector(p, H)
    counts = torch.tensor([sum(map(len, index.values())) for index in draws(selector, T)]).view(-1, H).double()
    assert int(counts[:, 0].sum()) == 0
    for i in range(1, H):
        rate = 2 * p * i / H
        assert selector.rate(3 * H + i) == pytest.approx(rate, rel=1e-15)
        assert z(float(counts[:, i].mean()), n * rate, n * rate * (1 - rate) / len(counts)) < SIGMAS


def test_the_ramp_counts_steps_whatever_the_interval() -> None:
    recorded = Recorded(ScheduledSelector(0.5, H=4))
    module = SparseCommunicator(recorded, interval=2)
    exchange(module, {"w": torch.randn(2, 10_000)}, 2, True, 8)
    assert sorted(recorded.drawn) == [1, 3, 5, 7]
    for t, index in recorded.drawn.items():
        rate = (t % 4) / 4
        assert z(len(index["w"]), 10_000 * rate, 10_000 * rate * (1 - rate)) < SIGMAS


# ------------------------------------------------------------- state, differentiation, configurations


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    **{
        f"{name}-delay-{delay}": functools.partial(
            lambda make, delay: SPARTAStrategy(inner_optim="adamw", index_selector=make(), delay=delay, lr=0.01),
            make,
            delay,
        )
        for name, make in SELECTORS.items()
        for delay in (0, 3)
    },
    "sparta-diloco": lambda: SPARTADiLoCoStrategy(0.2, 2, 5, "adamw", delay=3, lr=0.01),
    "every": lambda: CommunicateOptimizeStrategy([every(3, SparseCommunicator(PartitionedSelector(0.3), delay=1))]),
    "delayed": lambda: CommunicateOptimizeStrategy([late(Outer(Mean()), 3, every=4)], lr=0.01),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_run_resumed_from_a_file_is_the_uninterrupted_one(name: str) -> None:
    batches, at = stacked(data("CNN", 3, 20)), 9
    whole = run(start("CNN"), STRATEGIES[name](), batches)
    sim = simulation(start("CNN"), STRATEGIES[name](), batches)
    half = advance(sim, sim.init(), batches[:at]).state
    file = io.BytesIO()
    torch.save({field: getattr(half, field) for field in half.__dataclass_fields__}, file)
    file.seek(0)
    again = simulation(start("CNN"), STRATEGIES[name](), batches)
    loaded = replace(again.init(), **torch.load(file, weights_only=True))
    assert_same_bits(advance(again, loaded, batches[at:]).state, whole.state)


def test_what_is_under_way_does_not_keep_whole_orders() -> None:
    """A file with a queue holds the few selected indices, not the permutations that they were cut from."""
    strategy = CommunicateOptimizeStrategy([SparseCommunicator(PartitionedSelector(0.001), delay=2)], "sgd", lr=0.1)
    state = run(Wide(), strategy, [torch.zeros(2, 1, 1)] * 2, max_steps=9).state
    held = {name: x for name, x in (state.own | state.shared).items() if "message" in name or "notes" in name}
    assert len(held) == 4
    file = io.BytesIO()
    torch.save(held, file)
    assert file.tell() < 20_000


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(100_000))

    def forward(self, batch: Tensor) -> Tensor:
        return self.w.square().mean() + batch.sum()


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_pure_step_equals_the_one_in_place_and_changes_nothing(name: str) -> None:
    batches = stacked(data("MLP", 3, 12))
    inplace = run(start("MLP"), STRATEGIES[name](), batches)
    sim = simulation(start("MLP"), STRATEGIES[name](), batches)
    state = sim.init()
    for batch in batches:
        before = saved(state)
        new, _ = sim.step(state, batch, pure=True)
        assert_same_bits(state, before)
        state = new
    assert_close(state.params, inplace.state.params, 1e-12)


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("selector", SELECTORS)
def test_the_derivative_with_respect_to_the_learning_rate(selector: str, delay: int) -> None:
    batches = stacked(data("MLP", 3, 9))

    def loss(lr: Tensor) -> Tensor:
        strategy = SPARTAStrategy(index_selector=SELECTORS[selector](), inner_optim="sgd", delay=delay, lr=lr)
        return run(start("MLP"), strategy, batches, differentiable=True).losses[-1].mean()

    check_derivative(loss, 0.3)


@pytest.mark.parametrize("more", [{"unit": 2}, {"delay": 2, "late": "change"}, {"delay": 1}, {}], ids=str)
def test_the_derivative_through_outer_steps(more: Any) -> None:
    batches = stacked(data("MLP", 3, 12))

    def loss(outer_lr: Tensor) -> Tensor:
        outer = Exchange(Outer(Mean(), OptimSpec(SGD, lr=outer_lr, momentum=0.9)), every=2, **more)
        exchanges = [SparseCommunicator(sparsification_rate=0.2, delay=1), outer]
        strategy = CommunicateOptimizeStrategy(exchanges, "sgd", lr=0.3)
        return run(start("MLP"), strategy, batches, differentiable=True).losses[-1].mean()

    check_derivative(loss, 0.5)


def check_derivative(loss: Callable[[Tensor], Tensor], at: float) -> None:
    x = torch.tensor(at, dtype=torch.float64, requires_grad=True)
    (exact,) = torch.autograd.grad(loss(x), x)
    h = 1e-5
    up, down = (float(loss(torch.tensor(at + s, dtype=torch.float64)).detach()) for s in (h, -h))
    assert abs(float(exact)) > 1e-4
    assert float(exact) == pytest.approx((up - down) / (2 * h), rel=1e-6)


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("name", STRATEGIES)
def test_two_configurations_in_one_program_equal_two_runs(name: str, differentiable: bool) -> None:
    batches = stacked(data("MLP", 6, 12))
    halves = [reordered(batches, order) for order in ([0, 1, 2], [3, 4, 5])]
    apart = [run(start("MLP"), STRATEGIES[name](), half) for half in halves]
    strategies = [STRATEGIES[name]() for _ in range(2)]
    together = run_stack(start("MLP"), strategies, batches, 3, differentiable=differentiable)
    for found, expected in zip(together.params, apart):
        assert_close(found, expected.params, 1e-12)
    assert together.comm.ledger.total_bytes == apart[0].comm.ledger.total_bytes


def test_the_seed_and_every_argument_change_the_run() -> None:
    batches = stacked(data("MLP", 3, 10))
    makes: list[tuple[Callable[[], Strategy], int]] = [
        (lambda: SPARTAStrategy(0.2, "sgd", lr=0.1), 42),
        (lambda: SPARTAStrategy(0.2, "sgd", lr=0.1), 43),
        (lambda: SPARTAStrategy(0.3, "sgd", lr=0.1), 42),
        (lambda: SPARTAStrategy(0.2, "adam", lr=0.1), 42),
        (lambda: SPARTAStrategy(0.2, "sgd", lr=0.2), 42),
        (lambda: SPARTAStrategy(0.2, "sgd", lr=0.1, delay=1), 42),
        (lambda: SPARTAStrategy(0.2, "sgd", lr=0.1, max_norm=0.1), 42),
        (lambda: SPARTAStrategy(0.2, "sgd", lr=0.1, warmup_steps=3), 42),
        (lambda: SPARTAStrategy(0.2, "sgd", lr=0.1, cosine_anneal=True), 42),
        (lambda: SPARTAStrategy(0.2, "sgd", lr=0.1, lr_scheduler=lambda t: 0.5), 42),
        (lambda: SPARTAStrategy(None, "sgd", lr=0.1, index_selector=PartitionedSelector(0.2)), 42),
        (lambda: SPARTADiLoCoStrategy(0.2, 1, 5, "sgd", lr=0.1), 42),
        (lambda: SPARTADiLoCoStrategy(0.3, 1, 5, "sgd", lr=0.1), 42),
        (lambda: SPARTADiLoCoStrategy(0.2, 2, 5, "sgd", lr=0.1), 42),
        (lambda: SPARTADiLoCoStrategy(0.2, 1, 4, "sgd", lr=0.1), 42),
        (lambda: SPARTADiLoCoStrategy(0.2, 1, 5, "adam", lr=0.1), 42),
        (lambda: SPARTADiLoCoStrategy(0.2, 1, 5, "sgd", "adam", lr=0.1, outer_lr=0.01), 42),
        (lambda: SPARTADiLoCoStrategy(0.2, 1, 5, "sgd", lr=0.1, outer_lr=0.5), 42),
        (lambda: SPARTADiLoCoStrategy(0.2, 1, 5, "sgd", lr=0.1, delay=2), 42),
        (lambda: SPARTADiLoCoStrategy(None, 1, 5, "sgd", lr=0.1, index_selector=PartitionedSelector(0.2)), 42),
        (lambda: SPARTADiLoCoStrategy(0.2, 1, 5, "sgd", lr=0.1, max_norm=0.1), 42),
        (lambda: SPARTADiLoCoStrategy(0.2, 1, 5, "sgd", lr=0.1, warmup_steps=3), 42),
        (lambda: SPARTADiLoCoStrategy(0.2, 1, 5, "sgd", lr=0.1, cosine_anneal=True), 42),
        (lambda: SPARTADiLoCoStrategy(0.2, 1, 5, "sgd", lr=0.1, lr_scheduler=lambda t: 0.5), 42),
    ]
    results = [run(start("MLP"), make(), batches, seed=seed).params for make, seed in makes]
    for (i, a), (j, b) in itertools.combinations(enumerate(results), 2):
        assert difference(a, b) > 1e-6, (i, j)


@pytest.mark.parametrize("bits", [None, 8])
def test_topk_is_another_exchange(bits: int | None) -> None:
    batches = stacked(data("MLP", 3, 6))
    ours = run(start("MLP"), SPARTAStrategy(0.2, compression_method="topk", quantization_bits=bits, lr=0.01), batches)
    theirs = composed([Exchange(MostMoved(0.2, bits))], batches)
    assert_same_bits(ours.params, theirs.params)
    random = run(start("MLP"), SPARTAStrategy(0.2, compression_method="random", lr=0.01), batches)
    assert_same_bits(random.params, composed([SparseCommunicator(0.2)], batches).params)


@pytest.mark.parametrize(("bits", "levels"), [(8, 127), (4, 7)])
def test_quantised_sparta_averages_what_can_be_read(bits: int, levels: int) -> None:
    """By hand: a scale for each node and tensor, and integers of so many bits."""
    recorded = Recorded(PartitionedSelector(0.5))
    sparse = SparseCommunicator(recorded, quantization_bits=bits).how
    params = {"w": torch.randn(3, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}
    given, part = {"w": params["w"].clone()}, Part.alone(StackedCollectives(3))
    after = sparse(params, part, begun(sparse, params, 3))
    (drawn,) = recorded.drawn.values()
    values = given["w"].flatten(1)[:, drawn["w"]]
    scale = values.abs().amax(1, keepdim=True).float() / levels
    expected = given["w"].flatten(1).clone()
    expected[:, drawn["w"]] = ((values / scale).round() * scale).mean(0).to(torch.float64)
    torch.testing.assert_close(after["w"].flatten(1), expected, rtol=1e-6, atol=1e-7)
    assert part.comm.ledger.total_payload_bytes == math.ceil(len(drawn["w"]) * bits / 8) + 4


# ------------------------------------------------------------------------------------------ bad input


AnySparta: Any = SPARTAStrategy  # not checked: the calls below are wrong on purpose
AnyMixed: Any = SPARTADiLoCoStrategy
AnySparse: Any = SparseCommunicator
AnyRandom: Any = RandomSelector
any_every: Any = every


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: AnySparta(1.5), ValueError, r"p_sparta=1.5 must be a number in \[0, 1\].*p_sparta=0.005"),
        (lambda: AnySparta(-0.1), ValueError, "p_sparta=-0.1"),
        (lambda: AnySparta(math.nan), ValueError, "p_sparta=nan"),
        (lambda: AnySparta(True), ValueError, "p_sparta=True"),
        (lambda: AnySparta("adamw"), ValueError, "p_sparta='adamw'"),
        (lambda: AnySparta(delay=-1), ValueError, "delay=-1 must be an integer >= 0"),
        (lambda: AnySparta(delay=1.0), ValueError, "delay=1.0"),
        (lambda: AnySparta(delay=True), ValueError, "delay=True"),
        (lambda: AnySparta(0.1, index_selector=RandomSelector(0.2)), ValueError, "say different things"),
        (lambda: AnySparta(0.1, index_selector=Recorded(RandomSelector(0.1))), ValueError, "say different"),
        (lambda: AnySparta(index_selector=0.1), TypeError, "give a Selector"),
        (lambda: AnySparta(index_selector=RandomSelector), TypeError, "give a Selector"),
        (lambda: AnySparta(compression_method="top"), ValueError, "compression_method='top' is not known; .*'topk'"),
        (lambda: AnySparta(compression_method="topk", delay=1), ValueError, "leave out index_selector and delay"),
        (lambda: AnySparta(0, compression_method="topk"), ValueError, "fraction=0"),
        (lambda: AnySparta(quantization_bits=16), ValueError, "quantization_bits=16"),
        (lambda: AnyMixed(2), ValueError, "p_sparta=2"),
        (lambda: AnyMixed(sparta_interval=0), ValueError, "sparta_interval=0 must be an integer >= 1"),
        (lambda: AnyMixed(sparta_interval=1.5), ValueError, "sparta_interval=1.5"),
        (lambda: AnyMixed(H=0), ValueError, "H=0"),
        (lambda: AnyMixed(delay=-2), ValueError, "delay=-2"),
        (lambda: AnyMixed(0.1, index_selector=RandomSelector(0.2)), ValueError, "p_sparta=0.1"),
        (lambda: AnySparse(sparsification_rate=1.01), ValueError, "sparsification_rate=1.01"),
        (lambda: AnySparse(1.5), ValueError, "sparsification_rate=1.5"),
        (lambda: AnySparse(0.01, sparsification_rate=0.02), ValueError, "say different things"),
        (lambda: AnySparse("0.01"), TypeError, "index_selector is of type str; give a Selector"),
        (lambda: AnySparse(RandomSelector(0.1), sparsification_rate=0.2), ValueError, "sparsification_rate"),
        (lambda: AnySparse(interval=0), ValueError, "interval=0"),
        (lambda: AnyRandom(-1), ValueError, "p=-1"),
        (lambda: AnyRandom(None), ValueError, "p=None"),
        (lambda: SequentialSelector(0), ValueError, r"p=0 must be a number in \(0, 1\]"),
        (lambda: PartitionedSelector(0.0), ValueError, r"p=0.0 must be a number in \(0, 1\]"),
        (lambda: PartitionedSelector(1.1), ValueError, "p=1.1"),
        (lambda: ScheduledSelector(0.6, 10), ValueError, r"p=0.6 must be a number in \[0, 0.5\]"),
        (lambda: ScheduledSelector(0.1, 0), ValueError, "H=0"),
        (lambda: ScheduledSelector(0.1, 1), ValueError, "H=1 must be an integer >= 2: the steps of a ramp"),
        (lambda: any_every(0, AveragingCommunicator()), ValueError, "n=0 must be an integer >= 1"),
        (lambda: any_every(2, "averaging"), TypeError, "an Exchange, such as"),
        (lambda: any_every(2, AnySparta()), TypeError, "an Exchange, such as"),
        (lambda: any_every(AveragingCommunicator(), 2), TypeError, "exchange is of type int; give an Exchange"),
        (lambda: late(Mean(), -1), ValueError, "delay=-1 must be an integer >= 0"),
        (lambda: late(Mean(), 0), ValueError, 'late="change" without a delay'),
        (lambda: late(Mean(), 2, of="gradients"), ValueError, "used at once"),
        (lambda: AnySparta(0.1, compression_method="topk", quantization_bits=16), ValueError, "quantization_bits=16"),
    ],
)
def test_bad_input(make: Callable[[], Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


def test_the_same_rate_twice_is_no_conflict() -> None:
    assert repr(SparseCommunicator(RandomSelector(0.1), sparsification_rate=0.1)) == (
        "Exchange(Sparse(RandomSelector(p=0.1), Mean()))"
    )
    assert "p=0.005" in repr(SPARTAStrategy())
    assert "p=0.01" in repr(SparseCommunicator())
    assert "p=0.02" in repr(SPARTAStrategy(0.02, index_selector=PartitionedSelector(0.02)))


@pytest.mark.parametrize(
    ("module", "max_steps", "match"),
    [
        (SparseCommunicator(interval=6), 5, "interval=6 .* never exchanges"),
        (every(6, AveragingCommunicator()), 5, "unit=6 .* never exchanges"),
        (every(3, AveragingCommunicator(H=2)), 5, "H=2 is larger than the run's 1 steps"),
    ],
)
def test_settings_without_effect_warn(module: Exchange, max_steps: int, match: str) -> None:
    strategy = CommunicateOptimizeStrategy([module])
    with pytest.warns(VecgymWarning, match=match):
        strategy.check(2, max_steps)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy.check(2, 100)


@pytest.mark.parametrize(
    ("module", "max_steps", "match"),
    [
        (SparseCommunicator(delay=5), 5, "delay=5 .* no result is used .* Give a smaller delay, or more steps"),
        (late(Mean(), 5), 5, "delay=5 .* no result is used"),
        (every(3, late(Mean(), 2)), 6, "delay=2 .* the run's 2 steps"),  # in units
    ],
)
def test_a_delay_as_long_as_the_run_is_refused(module: Exchange, max_steps: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        CommunicateOptimizeStrategy([module]).check(2, max_steps)
    CommunicateOptimizeStrategy([module]).check(2, max_steps + 3)


@pytest.mark.parametrize(
    ("steps", "allowed"),
    [*((n, r"a number in .0, 1000000.: ") for n in (2**62, 1_000_001)), (10**30, r"an integer >= 0 and < 2\*\*63: ")],
)
def test_a_delay_that_no_machine_can_hold_is_refused(steps: int, allowed: str) -> None:
    for make in (
        lambda: late(Mean(), steps),
        lambda: SparseCommunicator(delay=steps),
        lambda: Exchange(Outer(Mean()), delay=steps),
    ):
        with pytest.raises(ValueError, match=f"must be {allowed}optimizer steps"):
            make()


def test_what_does_not_fit_the_run_is_found_in_units_and_delays() -> None:
    for made in (every(2, Exchange(Mean(4))), late(Mean(4), 2)):
        with pytest.raises(ValueError, match="island_size=4 is larger than the 3 nodes"):
            made.check(RunFacts(3, 100))


# ------------------------------------------------------------------------------------ units and delays


def composed(modules: Any, batches: Any, model: str = "MLP", **settings: Any) -> Run:
    return run(start(model), CommunicateOptimizeStrategy(modules, "adamw", lr=0.01), batches, **settings)


@pytest.mark.parametrize("model", ["MLP", "CNN"])
def test_every_n_of_every_h_is_every_n_h(model: str) -> None:
    batches = stacked(data(model, 3, 25))
    for how in (Outer(Mean()), Mean()):
        ours = composed([every(3, Exchange(how, every=2))], batches, model)
        theirs = composed([Exchange(how, every=6)], batches, model)
        assert_same_bits(ours.params, theirs.params)
        assert list(ours.comm.ledger) == list(theirs.comm.ledger)


def test_every_n_exchanges_is_the_interval_of_sparta() -> None:
    batches = stacked(data("MLP", 3, 25))
    for selector in ("random", "sequential", "partitioned"):
        ours = composed([every(4, SparseCommunicator(SELECTORS[selector]()))], batches)
        theirs = composed([SparseCommunicator(SELECTORS[selector](), interval=4)], batches)
        assert_same_bits(ours.params, theirs.params)
        assert [e.step for e in ours.comm.ledger] == [3, 7, 11, 15, 19, 23]


def test_inside_every_time_counts_in_exchanges() -> None:
    seen: list[tuple[int, int]] = []

    class Watch(Mean):
        def agree(self, x: Any, part: Part, memory: Memory) -> Any:
            seen.append((part.due.number, part.due.step))
            return super().agree(x, part, memory)

    composed([every(3, Exchange(Watch()))], stacked(data("MLP", 2, 11)))
    assert seen == [(0, 0), (1, 1), (2, 2)]
    seen.clear()
    composed([every(2, every(2, Exchange(Watch(), every=2)))], stacked(data("MLP", 2, 19)))
    assert seen == [(0, 1), (1, 3)]


def test_every_n_rounds_keep_their_participants_and_islands() -> None:
    batches = stacked(data("MLP", 5, 12))
    ours = composed([every(3, AveragingCommunicator(island_size=2, H=2, participation=0.6))], batches)
    assert [step for step, islands in enumerate(ours.groups) if islands] == [5, 11]
    assert len(set(ours.active[:6])) == len(set(ours.active[6:])) == 1
    assert len(ours.active[0] or ()) == 3
    assert sorted(sum(ours.groups[5] or (), ())) == list(ours.active[0] or ())


def test_gradients_averaged_every_n_steps_by_hand() -> None:
    """Quadratic: theta_i <- theta_i - gamma g_i, and with the mean gradient at every second step."""
    batches = stacked(data("Quadratic", 3, 6))
    strategy = CommunicateOptimizeStrategy([every(2, Exchange(Mean(), of="gradients"))], "sgd", lr=0.1)
    ours = run(start("Quadratic"), strategy, batches)
    theta = start("Quadratic").get_parameter("x").detach().expand(3, -1)
    for step, (c,) in enumerate(batches):
        grad = theta - c.mean(1)
        theta = theta - 0.1 * (grad.mean(0, keepdim=True) if step % 2 else grad)
    torch.testing.assert_close(ours.params["x"], theta, rtol=1e-12, atol=1e-12)
    assert [e.step for e in ours.comm.ledger] == [1, 3, 5]


def test_units_of_one_step_are_the_exchange_itself() -> None:
    assert every(1, AveragingCommunicator()) == AveragingCommunicator() != every(2, AveragingCommunicator())


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("sparse", [False, True])  # the sparse one can overwrite what it is given
@pytest.mark.parametrize("H", [1, 3])
@pytest.mark.parametrize("d", [1, 2, 5])
def test_delayed_averaging_by_hand(d: int, H: int, sparse: bool, differentiable: bool) -> None:
    """theta_{t+d} += mean(theta_t) - theta_t, with theta_t taken before what is due at t is added."""
    steps = 14
    batches = stacked(data("Quadratic", 3, steps))
    strategy = CommunicateOptimizeStrategy([late(Sparse(1.0, Mean()) if sparse else Mean(), d, every=H)], "sgd", lr=0.1)
    ours = run(start("Quadratic"), strategy, batches, differentiable=differentiable)
    theta = start("Quadratic").get_parameter("x").detach().expand(3, -1)
    due: dict[int, Tensor] = {}
    for step, (c,) in enumerate(batches):
        theta = theta - 0.1 * (theta - c.mean(1))
        if (step + 1) % H == 0:
            due[step + d] = theta.mean(0, keepdim=True) - theta
        theta = theta + due.pop(step, torch.zeros(()))
    torch.testing.assert_close(ours.params["x"], theta, rtol=1e-12, atol=1e-12)
    waiting = {name: x["x"].shape for name, x in ours.state.own.items() if "message" in name}
    assert waiting == {f"0.0/message {t - d}": x.shape for t, x in due.items()}


def test_late_changes_keep_the_mean_of_the_nodes() -> None:
    """Nodes that learn with SGD on quadratics of equal curvature: averaging, late or not, never moves their mean."""
    batches = stacked(data("Quadratic", 4, 20))
    results = [
        run(start("Quadratic"), CommunicateOptimizeStrategy(modules, "sgd", lr=0.1), batches).params["x"].mean(0)
        for modules in ([], [late(Mean(), 2, every=3)], [late(Mean(), 4, every=3)])
    ]
    for mean in results[1:]:
        torch.testing.assert_close(mean, results[0], rtol=1e-12, atol=1e-12)


def test_a_late_diloco_step_reaches_the_parameters_d_steps_later() -> None:
    """The nodes are independent until the first change is due; then they differ from independent ones."""
    batches = stacked(data("MLP", 3, 7))
    for steps, same in ((6, True), (7, False)):
        ours = composed([late(Outer(Mean()), 3, every=4)], batches[:steps])
        free = composed([], batches[:steps])
        assert (difference(ours.params, free.params) == 0) is same


def test_exchanges_show_their_units_and_delays() -> None:
    made = every(3, late(Sparse(0.01, Mean()), 2))
    assert repr(made) == "Exchange(Sparse(RandomSelector(p=0.01), Mean()), delay=2, late='change', unit=3)"


def test_recording_collectives_see_one_mean_per_exchange() -> None:
    ours = composed([SparseCommunicator(sparsification_rate=0.5)], stacked(data("GPT", 2, 3)), "GPT", comm=Recording(2))
    assert [e.operation for e in ours.comm.ledger] == ["mean"] * 3


@pytest.mark.filterwarnings("ignore:.*never present")
@pytest.mark.parametrize("delay", [1, 2, 12])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_late_of_tensors_so_small_that_nothing_is_drawn_is_each_nodes_own(seed: int, delay: int) -> None:
    """Nodes may be absent. What was never drawn of a tensor, or is in a slot not used yet, says nothing of the others.

    Node 3 is never there: the others do what three nodes do.
    """
    table = torch.rand(30, 4, generator=torch.Generator().manual_seed(seed)) > 0.3
    table[:, 0], table[:, 3] = True, False

    def run(table: Tensor) -> Tensor:
        torch.manual_seed(0)
        model = Tiny()
        strategy = SPARTAStrategy(0.1, "sgd", delay=delay, correct_delay=True, lr=0.1)
        data = [TensorDataset(torch.full((4, 1), 1.0 + node)) for node in range(4)]
        trainer = Trainer(model, lambda rank, num_nodes, train: data[rank])
        trainer.fit(strategy, table.shape[1], max_steps=len(table), batch_size=4, availability=Trace(table),
                    device="cpu", progress=False)  # fmt: skip
        return torch.cat([p.flatten(1) for p in trainer.nodes.params.values()], 1)

    torch.testing.assert_close(run(table)[:3], run(table[:, :3]))


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))

    def forward(self, batch: Any) -> Tensor:
        return (self.net(batch[0]) - 1).square().mean()
