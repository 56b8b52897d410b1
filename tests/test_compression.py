"""Codecs, averages of codes, and what moved most."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW

from tests.helpers import (
    Run,
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
from tests.reference import common, rings
from tests.reference import compression as reference
from tests.reference.common import Result
from vecgym.collectives import StackedCollectives
from vecgym.collectives.stacked import GroupCollectives
from vecgym.compress import (
    QSGD,
    Cast,
    ChunkedTopK,
    Codec,
    Compressor,
    Natural,
    PowerSGD,
    Quantise,
    RandomK,
    Sign,
    StatQuantise,
    Ternary,
    TopK,
    make_codec,
)
from vecgym.compress.codecs import Draw, index_dtype, pack, pack_trits, part_of, unpack, unpack_trits
from vecgym.compress.dct import grid
from vecgym.core import rng, tree
from vecgym.core.tree import Tree
from vecgym.simulation.simulation import Part
from vecgym.strategy import (
    CommunicateOptimizeStrategy,
    Compressed,
    DiLoCoStrategy,
    Exchange,
    FedAvgStrategy,
    Mean,
    Mix,
    MostMoved,
    OptimSpec,
    Outer,
    ServerMean,
    ServerOptimizer,
    Sparse,
    Strategy,
    SyncWeight,
    every,
)
from vecgym.strategy.sparta import PartitionedSelector, RandomSelector
from vecgym.strategy.stages import Average

K = 5
H = 5
STEPS = 50
SEED = 42
FRACTION = 0.1
RANK = 2
LEVELS, BUCKET, CHUNK = 4, 16, 6
TOLERANCE = 1e-10
DOUBLE = torch.float64

CODECS: dict[str, Compressor] = {
    "topk": TopK(FRACTION),
    "randomk": RandomK(FRACTION),
    "int8": Quantise(8),
    "int4": Quantise(4),
    "int4 stochastic": Quantise(4, stochastic=True),
    "sign": Sign(),
    "stat4": StatQuantise(4),
    "qsgd": QSGD(LEVELS, bucket=BUCKET),
    "natural": Natural(),
    "ternary": Ternary(),
    "chunktopk": ChunkedTopK(k=3, chunk=CHUNK),
    "bfloat16": Cast("bfloat16"),
    "eight-bit floats": Cast("float8_e4m3fn"),
    "powersgd": PowerSGD(RANK),
}
RANDOM = ("int4 stochastic", "qsgd", "natural", "ternary")  # each node by itself
GATHERED = [name for name in CODECS if name != "powersgd"]
INT_BITS = {"int8": 8, "int4": 4, "int4 stochastic": 4, "sign": 1}


def generator(*ids: int) -> torch.Generator:
    return rng.generator(0, "test", *ids)


def draw(num_nodes: int = 4) -> Draw:
    return Draw(generator, torch.arange(num_nodes))


def values(*shape: int, dtype: torch.dtype = DOUBLE) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def quantised(x: Tree, bits: int, part: Part) -> Tree:
    return Compressed(Mean(), Quantise(bits), error_feedback=False)(x, part)


def compressed(method: str | Compressor, phase: str = "gradients", **settings: Any) -> Compressed:
    codec = CODECS[method] if isinstance(method, str) else method
    return Compressed(Mean(), codec, purpose=f"compress {phase}", **settings)


def codec_of(name: str) -> Codec:
    codec = CODECS[name]
    assert isinstance(codec, Codec)
    return codec


def sent_bytes(method: str, x: Tensor) -> int:
    """The closed form: bytes that one node hands over for its tensor x `[*]`."""
    n, b = x.numel(), x.element_size()
    if method in INT_BITS:
        return math.ceil(n * INT_BITS[method] / 8) + 4
    if method == "stat4":
        return math.ceil(n / 2) + 4 * 16
    if method == "qsgd":
        return math.ceil(n * 4 / 8) + 4 * math.ceil(n / BUCKET)  # 9 levels
    if method == "natural":
        return math.ceil(n / 8) + math.ceil(n * (11 if x.dtype == DOUBLE else 8) / 8)
    if method == "ternary":
        return math.ceil(n / 5) + 4
    if method == "chunktopk":
        cut = grid(tuple(x.shape), CHUNK if x.dim() > 1 else CHUNK**2)
        m = cut.chunks * min(3, cut.area)
        return m * b + math.ceil(m * max(1, math.ceil(math.log2(cut.area))) / 8)
    if method == "bfloat16":
        return 2 * n
    if method == "eight-bit floats":
        return n + 4
    if method == "powersgd":
        lines, columns = (x.shape[0], n // x.shape[0]) if x.dim() > 1 else (1, n)
        return min(n, RANK * (lines + columns)) * b if x.dim() > 1 else n * b
    return max(1, round(FRACTION * n)) * (b + 4 if method == "topk" else b)


def others(uniform: reference.Uniform) -> dict[str, reference.Codec]:
    """The naive forms of the codecs that draw as the other ones do."""
    return {
        "stat4": reference.statistical(4),
        "qsgd": reference.qsgd(LEVELS, uniform, BUCKET),
        "natural": reference.natural(uniform),
        "ternary": reference.ternary(uniform),
        "chunktopk": reference.chunked_topk(3, CHUNK),
        "bfloat16": lambda step, name, node, p: rings.cast(torch.bfloat16)(p),
        "eight-bit floats": lambda step, name, node, p: rings.scaled_floats(p),
    }


# ---------------------------------------------------------------------------------------------- the codecs


@pytest.mark.parametrize("shape", [(), (1,), (7,), (8,), (3, 5), (4, 3, 2, 2)])
@pytest.mark.parametrize("method", GATHERED)
def test_a_code_has_the_bytes_of_the_closed_form_and_the_tensors_shape(method: str, shape: tuple[int, ...]) -> None:
    codec = codec_of(method)
    for dtype in (torch.float32, DOUBLE, torch.bfloat16):
        x = values(4, *shape).to(dtype)
        code = codec.encode(x, draw())
        parts = [y for part, y in code.items() if part not in codec.shared]
        assert all(len(y) == 4 for y in parts)
        assert sum(y[0].nbytes for y in parts) == sent_bytes(method, x[0])
        decoded = codec.decode(code, x)
        assert (decoded.shape, decoded.dtype) == (x.shape, dtype)


@pytest.mark.parametrize("method", GATHERED)
def test_a_code_decodes_to_what_the_definition_says(method: str) -> None:
    def uniform(step: int, name: str, node: int, n: int) -> Tensor:
        return draw().uniform(n, DOUBLE)[node]

    x, codec = values(4, 6, 5), codec_of(method)
    naive: dict[str, reference.Codec] = {
        "topk": reference.topk(FRACTION),
        "randomk": reference.randomk(FRACTION, lambda step, name, n, m: draw().subset(n, m)),
        "int8": reference.quantise(8),
        "int4": reference.quantise(4),
        "int4 stochastic": reference.quantise(4, uniform),
        "sign": reference.sign(),
        **others(uniform),
    }
    decoded = codec.decode(codec.encode(x, draw()), x)
    assert_close({"x": decoded}, {"x": torch.stack([naive[method](0, "", i, x[i]) for i in range(4)])}, 1e-15)
    assert difference({"x": decoded}, {"x": x}) > 1e-3


@pytest.mark.parametrize("given_rows", [1, 3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("method", GATHERED)
def test_the_average_of_codes_is_that_of_what_they_stand_for(method: str, weighted: bool, given_rows: int) -> None:
    """For one reader of all codes and for several, each with weights of its own."""
    x, codec = values(4, 6, 5), codec_of(method)
    code = codec.encode(x, draw())
    decoded = codec.decode(code, x)
    for readers in (1, 3):
        weights = torch.rand(readers, 4, dtype=DOUBLE, generator=generator(1)) if weighted else None
        received = {
            part: y[:, None] if part in codec.shared else y[None].expand(given_rows, *y.shape)
            for part, y in code.items()
        }
        if given_rows > 1 and readers not in (1, given_rows):
            continue
        average = codec.average(received, x, weights)
        W = torch.full((1, 4), 0.25, dtype=DOUBLE) if weights is None else weights
        expected = torch.tensordot(W, decoded, 1).expand(max(given_rows, len(W)), 6, 5)
        assert_close({"x": average}, {"x": expected}, 1e-14)
        assert len(average) == len(expected)


@pytest.mark.parametrize("bits", range(1, 17))
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 31])
def test_packing_and_back(bits: int, n: int) -> None:
    whole = torch.randint(2**bits, (3, n), generator=torch.Generator().manual_seed(n), dtype=torch.int32)
    whole[:, :1] = 2**bits - 1
    packed = pack(whole.to(torch.uint8) if bits <= 8 else whole, bits)
    assert (packed.dtype, packed.shape) == (torch.uint8, (3, math.ceil(n * bits / 8)))
    assert torch.equal(unpack(packed, bits, n).to(torch.int32), whole)
    # The first in the lowest bits, as one long binary number says.
    for row, packed_row in zip(whole.tolist(), packed.tolist()):
        assert sum(x << (bits * i) for i, x in enumerate(row)) == int.from_bytes(bytes(packed_row), "little")


@pytest.mark.parametrize("n", [0, 1, 4, 5, 6, 31])
def test_five_trits_are_a_byte(n: int) -> None:
    trits = torch.randint(3, (3, n), generator=torch.Generator().manual_seed(n)).to(torch.uint8)
    packed = pack_trits(trits)
    assert (packed.dtype, packed.shape) == (torch.uint8, (3, math.ceil(n / 5)))
    assert torch.equal(unpack_trits(packed, n), trits)


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_come_back_as_they_were(bits: int) -> None:
    limit = 2 ** (bits - 1) - 1
    x = torch.arange(-limit, limit + 1, dtype=torch.float32).expand(2, -1)
    codec = Quantise(bits)
    assert torch.equal(codec.decode(codec.encode(x), x), x)
    assert torch.equal(codec.decode(codec.encode(-0.25 * x), x), -0.25 * x)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantisation_errs_by_half_a_step_at_most(bits: int) -> None:
    x, codec = values(3, 1000), Quantise(bits)
    code = codec.encode(x)
    error = (codec.decode(code, x) - x).abs().amax(1)
    assert bool((error <= 0.5000001 * code["scale"]).all())
    assert bool((error > 0.4 * code["scale"]).all())


@pytest.mark.parametrize("method", GATHERED)
def test_tensors_of_zeros_are_sent_as_zeros(method: str) -> None:
    x = torch.zeros(2, 9)
    decoded = codec_of(method).decode(codec_of(method).encode(x, draw(2)), x)
    assert torch.equal(decoded, x)


@pytest.mark.parametrize("method", [method for method in GATHERED if method != "randomk"])
def test_nan_stays_visible(method: str) -> None:
    x = values(2, 9)
    x[1, 3] = math.nan
    decoded = codec_of(method).decode(codec_of(method).encode(x, draw(2)), x)
    assert bool(decoded[0].isfinite().all())
    assert bool(decoded[1].isnan().any())


def test_topk_sends_the_first_of_equals_and_all_if_asked() -> None:
    x = torch.tensor([[1.0, -1.0, 1.0, 0.5]])
    assert TopK(k=2).decode(TopK(k=2).encode(x), x).tolist() == [[1.0, -1.0, 0.0, 0.0]]
    for codec in (TopK(k=9), TopK(1.0)):
        assert torch.equal(codec.decode(codec.encode(x), x), x)
    assert (index_dtype(2**31), index_dtype(2**31 + 1)) == (torch.int32, torch.int64)
    assert part_of(10, 1.0) == 10


def test_stochastic_rounding_is_unbiased_and_keyed_by_the_node() -> None:
    num_draws = 4000
    x = torch.tensor([[7.0, 0.3, -2.6, 0.0]], dtype=DOUBLE).expand(num_draws, 4)  # scale 1
    codec = Quantise(4, stochastic=True)
    decoded = codec.decode(codec.encode(x, draw(num_draws)), x)
    assert {float(v) for v in decoded[:, 1]} == {0.0, 1.0}
    assert {float(v) for v in decoded[:, 2]} == {-3.0, -2.0}
    assert bool((decoded[:, [0, 3]] == x[:, [0, 3]]).all())
    deviation = torch.tensor([0.3 * 0.7, 0.6 * 0.4], dtype=DOUBLE).div(num_draws).sqrt()
    assert bool(((decoded.mean(0) - x[0])[1:3].abs() < 4 * deviation).all())
    # A node draws the same wherever it is held, and every configuration of a sweep too.
    some = Draw(generator, torch.tensor([7, 3, 7]))
    assert torch.equal(codec.decode(codec.encode(x[:3], some), x[:3]), decoded[[7, 3, 7]])


def test_randomk_chooses_every_coordinate_equally_often_and_can_be_unbiased() -> None:
    n, m, num_draws = 10, 3, 3000
    x = torch.arange(1.0, n + 1, dtype=DOUBLE)[None]
    total, chosen = torch.zeros(n, dtype=DOUBLE), torch.zeros(n)
    for i in range(num_draws):
        own = Draw(functools.partial(generator, i), torch.arange(1))
        codec = RandomK(m / n, unbiased=True)
        decoded = codec.decode(codec.encode(x, own), x)[0]
        total, chosen = total + decoded, chosen + (decoded != 0)
    assert int(chosen.sum()) == m * num_draws
    share = chosen / num_draws
    assert float((share - m / n).abs().max()) < 4 * math.sqrt(m / n * (1 - m / n) / num_draws)
    assert bool(((total / num_draws / x[0] - 1).abs() < 4 * math.sqrt((n / m - 1) / num_draws)).all())
    plain = RandomK(m / n)
    assert difference({"x": plain.decode(plain.encode(x, own), x)}, {"x": decoded * m / n}) < 1e-12


# ------------------------------------------------------------------------------------------------ PowerSGD


def powersgd(x: Tree, rank: int, exchanges: int = 1) -> tuple[Tree, Tree]:
    codec = PowerSGD(rank)
    state = codec.init(x)
    for i in range(exchanges):
        average, own, state = codec.reduce(
            x,
            state,
            StackedCollectives(len(x["w"])).mean,
            lambda name, i=i: Draw(functools.partial(generator, i), torch.arange(3)),  # type: ignore[misc]
        )
    return average, own


def test_powersgd_is_exact_where_the_rank_suffices() -> None:
    """r >= rows or columns, tensors of less than two dimensions, and a mean of rank r."""
    x = {"w": values(3, 6, 4), "v": values(3, 9), "s": values(3), "c": values(3, 8, 3, 2, 2)}
    mean = tree.map(lambda y: y.mean(0, keepdim=True), x)
    for rank in (4, 5, 6, 8, 12):
        average, own = powersgd(x, rank)
        names = [name for name in x if name != "c" or rank >= 8]
        assert_close({n: average[n] for n in names}, {n: mean[n] for n in names}, 1e-13)
        assert_same_bits({n: own[n] for n in names}, {n: x[n] for n in names})
    assert difference({"c": powersgd(x, 4)[0]["c"]}, {"c": mean["c"]}) > 1e-2
    low = {"w": values(3, 20, 2) @ values(1, 2, 15)}  # all of one row space of two dimensions
    assert_close(powersgd(low, 2)[0], tree.map(lambda y: y.mean(0, keepdim=True), low), 1e-12)


def test_powersgd_finds_the_best_approximation_by_and_by() -> None:
    """Power iteration with a warm start: the error comes down to that of the truncated singular value decomposition."""
    x = {"w": values(3, 12, 10)}
    mean = x["w"].mean(0)
    best = torch.linalg.svdvals(mean)[2:].square().sum().sqrt()
    errors = [float((powersgd(x, 2, n)[0]["w"][0] - mean).norm() / best) for n in (1, 3, 200)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] == pytest.approx(1.0, abs=1e-6)


def test_powersgd_recovers_from_a_matrix_of_lower_rank() -> None:
    """A direction that died out is drawn anew, not taken from rounding errors, whatever the order of the nodes."""
    comm = StackedCollectives(3)
    one = {"w": values(3, 12, 1) @ values(1, 1, 10)}
    full = {"w": values(3, 12, 10)}
    averages = []
    for order in ([0, 1, 2], [2, 0, 1]):
        codec = PowerSGD(2)
        state = codec.init(one)
        for i, x in enumerate([tree.map(torch.zeros_like, one), one, one, full]):
            own = Draw(functools.partial(generator, i), torch.arange(3))
            average, _, state = codec.reduce(rows(x, order), state, comm.mean, lambda name, own=own: own)  # type: ignore[misc]
            if x is not full:
                assert_close(average, tree.map(lambda y: y.mean(0, keepdim=True), x), 1e-13)
        averages.append(average)
    assert_close(averages[0], averages[1], 1e-12)


def test_powersgd_leaves_its_input_and_shares_no_storage_with_it() -> None:
    """With one node the mean of what is sent as it is would be the tensor itself."""
    x = {"w": values(1, 12, 10), "v": values(1, 9)}
    before = tree.map(torch.clone, x)
    average, _ = powersgd(x, 2)
    assert_same_bits(x, before)
    assert average["v"].data_ptr() != x["v"].data_ptr()


# ------------------------------------------------------------------------------------------------ the twins


def key(phase: str, name: str, *ids: int) -> torch.Generator:
    return rng.generator(SEED, f"compress {phase} {name}", *ids)


def twin_average(method: str, phase: str, error_feedback: bool) -> reference.Averaging:
    """The naive average, which draws what vecgym draws."""

    def coordinates(step: int, name: str, n: int, m: int) -> Tensor:
        return torch.randperm(n, generator=key(phase, name, step))[:m]

    def uniform(step: int, name: str, node: int, n: int) -> Tensor:
        return torch.rand(n, generator=key(phase, name, step, node), dtype=DOUBLE)

    def start(step: int, name: str, columns: int) -> Tensor:
        return torch.randn(columns, RANK, generator=key(phase, name, step), dtype=DOUBLE)

    if method == "powersgd":
        return reference.PowerSGD(RANK, start, error_feedback)
    codecs: dict[str, reference.Codec] = {
        "topk": reference.topk(FRACTION),
        "randomk": reference.randomk(FRACTION, coordinates),
        "int8": reference.quantise(8),
        "int4": reference.quantise(4),
        "int4 stochastic": reference.quantise(4, uniform),
        "sign": reference.sign(),
        **others(uniform),
    }
    return reference.Compressed(codecs[method], error_feedback)


@dataclass(frozen=True)
class Case:
    exchange: Callable[[Average], Exchange]
    phase: str
    inner: tuple[type[torch.optim.Optimizer], dict[str, Any]]
    twin: Callable[..., Result]


CASES = {
    "allreduce": Case(
        lambda how: Exchange(how, of="gradients"), "gradients", (SGD, {"lr": 0.05, "momentum": 0.5}),
        reference.allreduce,
    ),
    "diloco": Case(
        lambda how: Exchange(Outer(how), every=H), "parameters", (AdamW, {"lr": 0.01}),
        functools.partial(reference.diloco, H=H),
    ),
    "fedavg": Case(
        lambda how: Exchange(how, every=H), "parameters", (SGD, {"lr": 0.1, "momentum": 0.5}),
        functools.partial(reference.fedavg, H=H),
    ),
}  # fmt: skip


def strategy(case: str, method: str | Compressor, **settings: Any) -> Strategy:
    cls, options = CASES[case].inner
    how = compressed(method, CASES[case].phase, reference=case == "fedavg", **settings)
    return CommunicateOptimizeStrategy([CASES[case].exchange(how)], OptimSpec(cls, **options))


@functools.cache
def batches(num_nodes: int = K, steps: int = STEPS, dtype: torch.dtype = DOUBLE) -> list[list[Any]]:
    return make_batches("MLP", steps, num_nodes, 4, dtype=dtype)


def stacks(result: Result) -> Tree:
    params = [common.parameters(model) for model in result.models]
    return {name: torch.stack([p[name].detach() for p in params]) for name in params[0]}


@pytest.mark.parametrize(
    ("num_nodes", "error_feedback"), [(K, True), (K, False), (1, True), (2, True)], ids=["K5", "K5-forget", "K1", "K2"]
)
@pytest.mark.parametrize("method", CODECS)
@pytest.mark.parametrize("case", CASES)
def test_compressed_exchanges_equal_their_twins(case: str, method: str, num_nodes: int, error_feedback: bool) -> None:
    start, phase = make_model("MLP", dtype=DOUBLE), CASES[case].phase
    # Which span the power iteration finds is sensitive: the naive run alone, its initial parameters perturbed by 1e-15,
    # differs from itself by ten times as much every eight exchanges. So 20 exchanges of it are compared, not 50.
    data = batches(num_nodes)[: 20 if (case, method) == ("allreduce", "powersgd") else STEPS]
    ours = run(start, strategy(case, method, error_feedback=error_feedback), stacked(data))
    average = twin_average(method, phase, error_feedback)
    theirs = CASES[case].twin(start, data, num_nodes, average, inner=CASES[case].inner)
    assert_close(ours.losses, theirs.losses, TOLERANCE, "losses")
    assert_close(ours.params, stacks(theirs), TOLERANCE, "params")
    assert ("0.0/residual" in ours.state.own) == error_feedback
    if error_feedback:
        residuals = {name: torch.stack(of_nodes) for name, of_nodes in average.residuals.items()}
        assert_close(ours.state.own["0.0/residual"], residuals, TOLERANCE, "residual")
        assert max(float(x.abs().max()) for x in residuals.values()) > 1e-4
    if case == "diloco":
        outer = ours.state.shared["0.0/params"]
        assert_close(outer, {name: x[None] for name, x in theirs.outer.items()}, TOLERANCE, "outer")


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("num_nodes", [1, 2, K])
def test_topk_sparse_averaging_equals_its_twin(num_nodes: int, bits: int | None) -> None:
    start, data = make_model("MLP", dtype=DOUBLE), batches(num_nodes)
    exchange = Exchange(MostMoved(0.05, bits))
    ours = run(start, CommunicateOptimizeStrategy([exchange], OptimSpec(SGD, lr=0.1, momentum=0.5)), stacked(data))
    codec = None if bits is None else reference.quantise(bits)
    inner = (SGD, {"lr": 0.1, "momentum": 0.5})
    theirs = reference.topk_sparse(start, data, num_nodes, fraction=0.05, inner=inner, codec=codec)
    assert_close(ours.losses, theirs.losses, TOLERANCE, "losses")
    assert_close(ours.params, stacks(theirs), TOLERANCE, "params")
    last = {name: torch.stack([of_node[name] for of_node in theirs.residuals]) for name in ours.params}
    assert_close(ours.state.shared["0.0/last"], last, TOLERANCE, "last")


# -------------------------------------------------------------------------------------- averages of codes


def meeting(num_nodes: int = 4, step: int = 0, inplace: bool = False) -> Part:
    return Part.alone(StackedCollectives(num_nodes), number=step, step=step, seed=SEED, inplace=inplace)


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("method", CODECS)
def test_what_was_sent_and_the_residual_are_what_was_given(method: str, inplace: bool) -> None:
    """The sum over exchanges, of the averages over nodes: PowerSGD's nodes too."""
    shapes: dict[str, tuple[int, ...]] = {"w": (12, 10), "v": (9,), "c": (8, 3, 3, 2), "s": ()}
    params = {name: torch.zeros(1, *shape, dtype=DOUBLE) for name, shape in shapes.items()}
    coded = compressed(method)
    memory = begun(coded, params, 4, inplace)
    given, received = params, params
    for step in range(7):
        grads = {
            name: torch.randn(4, *shape, dtype=DOUBLE, generator=generator(step)) for name, shape in shapes.items()
        }
        before = tree.map(torch.clone, grads)
        average = coded(grads, meeting(step=step, inplace=inplace), memory)
        assert_same_bits(grads, before)
        assert {len(x) for x in average.values()} == {1}
        given = tree.map(lambda total, g: total + g.mean(0, keepdim=True), given, grads)
        received = tree.map(torch.add, received, average)
    residual = tree.map(lambda e: e.mean(0, keepdim=True), memory.own["residual"])
    assert_close(tree.map(torch.add, received, residual), given, 1e-13)
    assert difference(received, given) > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_sending_everything_is_not_compressing(case: str) -> None:
    """Top-k and random-k of everything, PowerSGD of full rank."""
    start, data = make_model("MLP", dtype=DOUBLE), stacked(batches(steps=12))
    cls, options = CASES[case].inner
    plain = run(start, CommunicateOptimizeStrategy([CASES[case].exchange(Mean())], OptimSpec(cls, **options)), data)
    for codec in (TopK(1.0), TopK(k=10**6), RandomK(1.0), PowerSGD(32)):
        for error_feedback in (True, False):
            ours = run(start, strategy(case, codec, error_feedback=error_feedback), data)
            assert_close(ours.params, plain.params, 1e-12, repr(codec))
            if error_feedback:
                assert max(float(x.abs().max()) for x in ours.state.own["0.0/residual"].values()) < 1e-15


@pytest.mark.parametrize("method", CODECS)
def test_compressed_fedavg_is_compressed_diloco_without_an_outer_optimizer(method: str) -> None:
    """The difference to the last average is the negative of an outer gradient."""
    if method in ("sign", "stat4", "int4 stochastic", "qsgd", "ternary"):
        pytest.skip("not symmetric: 0 is sent as positive; of four bins one is in the middle; at random it goes up")
    start, data = make_model("MLP", dtype=DOUBLE), stacked(batches(steps=20))
    inner = OptimSpec(AdamW, lr=0.01)
    averages = [
        compressed(method, "parameters", reference=True),
        Outer(compressed(method, "parameters"), OptimSpec(SGD, lr=1.0)),
    ]
    first, second = (run(start, CommunicateOptimizeStrategy([Exchange(how, H)], inner), data) for how in averages)
    assert_close(first.params, second.params, 1e-12)


Coded = Callable[..., Average]  # (an average, more) -> it, of codes

OTHERS: dict[str, Callable[[Coded], Exchange]] = {
    "a server": lambda coded: Exchange(Outer(coded(ServerMean()), ServerOptimizer("adam", lr=0.1).spec), every=3),
    "a sample at a server": lambda coded: Exchange(coded(ServerMean(), reference=True), every=3, participation=0.6),
    "a sample at an optimizing server": lambda coded: Exchange(
        Outer(coded(ServerMean("examples")), ServerOptimizer("avgm").spec), every=3, participation=0.6
    ),
    "drawn coordinates": lambda coded: Exchange(Sparse(0.3, coded(Mean(), reference=True))),
    "drawn coordinates, late": lambda coded: Exchange(
        Sparse(PartitionedSelector(0.3), coded(Mean(), reference=True)), delay=2
    ),
    "neighbours": lambda coded: Exchange(coded(Mix("random_matching" if K % 2 == 0 else "ring"))),
}


@pytest.mark.parametrize("name", OTHERS)
def test_sending_everything_is_not_compressing_in_other_exchanges(name: str) -> None:
    """Messages of some nodes, of some coordinates, or to some: with error feedback, and with any reference."""
    start, data = make_model("MLP", dtype=DOUBLE), stacked(batches(steps=12))
    examples: dict[str, Any] = {"num_examples": tuple(range(1, K + 1))}
    exact = OTHERS[name](lambda average, **settings: average)
    plain = run(start, CommunicateOptimizeStrategy([exact], "sgd", lr=0.1), data, **examples)
    for differentiable in (False, True):
        exchange = OTHERS[name](lambda average, **settings: Compressed(average, TopK(1.0), **settings))
        coded = CommunicateOptimizeStrategy([exchange], "sgd", lr=0.1)
        ours = run(start, coded, data, differentiable=differentiable, **examples)
        assert_close(ours.params, plain.params, 1e-12)
        assert ours.comm.ledger.total_bytes > 0


def make(case: str, method: str) -> Strategy:
    """One of CASES, or sparse averaging."""
    if case != "sparse":
        return strategy(case, method)
    return CommunicateOptimizeStrategy([Exchange(MostMoved(FRACTION, 8))], OptimSpec(SGD, lr=0.1, momentum=0.5))


EVERYTHING = [(case, method) for case in CASES for method in CODECS] + [("sparse", "int8")]


@pytest.mark.parametrize(("case", "method"), EVERYTHING)
def test_bytes_equal_the_closed_form(case: str, method: str) -> None:
    for dtype in (torch.float32, DOUBLE):
        start = make_model("CNN", dtype=dtype)
        ours = run(start, make(case, method), stacked(make_batches("CNN", 7, K, dtype=dtype)))
        params = common.parameters(start).values()
        if case == "sparse":
            k = [max(1, round(FRACTION * p.numel())) for p in params]
            payload, exchanges = sum(m * 5 + 4 for m in k), 7
        else:
            payload, exchanges = sum(sent_bytes(method, p) for p in params), 7 if case == "allreduce" else 7 // H
        sent = payload * (2 * (K - 1) / K if method == "powersgd" else K - 1)
        assert ours.comm.ledger.total_bytes == pytest.approx(exchanges * sent, rel=1e-12)
        operations = {"mean": 2} if method == "powersgd" else {"all_gather": 2 if case == "sparse" else 1}
        assert {op: count / exchanges for op, (count, _) in ours.comm.ledger.summary().items()} == operations


@pytest.mark.parametrize(("case", "method"), EVERYTHING)
def test_a_saved_state_continues_as_if_nothing_had_happened(case: str, method: str) -> None:
    start, data = make_model("MLP", dtype=DOUBLE), stacked(batches(3, 12))
    whole = run(start, make(case, method), data)
    first = run(start, make(case, method), data[:7], max_steps=12)
    resumed = run(start, make(case, method), data[7:], state=saved(first.state), max_steps=12)
    assert_same_bits(resumed.state, whole.state)


@pytest.mark.parametrize(("case", "method"), EVERYTHING)
def test_the_pure_step_equals_the_donating_one(case: str, method: str) -> None:
    start, data = make_model("MLP", dtype=DOUBLE), stacked(batches(3, 12))
    donating = run(start, make(case, method), data)
    pure = run(start, make(case, method), data, differentiable=True)
    assert_close(pure.state, donating.state, 1e-11)
    assert list(pure.comm.ledger) == list(donating.comm.ledger)


@pytest.mark.parametrize(("case", "method"), EVERYTHING)
def test_permuting_the_nodes_permutes_the_results(case: str, method: str) -> None:
    if method in RANDOM:
        pytest.skip("rounds by the node's id")
    order = [3, 0, 4, 1, 2]
    start, data = make_model("MLP", dtype=DOUBLE), stacked(batches(steps=12))
    first = run(start, make(case, method), data)
    second = run(start, make(case, method), reordered(data, order))
    assert_close(second.losses, first.losses[:, order], 1e-11)
    assert_close(second.params, rows(first.params, order), 1e-11)


@pytest.mark.parametrize(("case", "method"), EVERYTHING)
def test_configurations_of_a_sweep_do_not_mix(case: str, method: str) -> None:
    """Two configurations of three nodes equal two runs; they draw the same random numbers."""
    start, data = make_model("MLP", dtype=DOUBLE), stacked(batches(6, 12))
    both = run_stack(start, [make(case, method) for _ in range(2)], data, 3)
    for i in range(2):
        of_one = list(range(3 * i, 3 * i + 3))
        alone = run(start, make(case, method), reordered(data, of_one))
        assert_close(both.params[i], alone.params, 1e-11)
        calls = 2 if method == "powersgd" else 1  # a group by itself
        assert both.comm.ledger.total_bytes == calls * alone.comm.ledger.total_bytes
    assert difference(rows(both.params[0], [0]), rows(both.params[1], [0])) > 1e-3


@pytest.mark.parametrize("method", [method for method in CODECS if method not in RANDOM])
def test_equal_nodes_do_what_one_node_alone_does(method: str) -> None:
    start, data = make_model("MLP", dtype=DOUBLE), stacked(batches(steps=12))
    for case in CASES:
        together = run(start, strategy(case, method), reordered(data, [0] * K))
        alone = run(start, strategy(case, method), reordered(data, [0]))
        assert_close(together.params, alone.params, 1e-11)


# ----------------------------------------------------------------------------------------------- derivatives


@pytest.mark.parametrize("method", CODECS)
def test_derivatives_pass_straight_through(method: str) -> None:
    """The value is that of the code, the derivative that of the plain average; state is constant."""
    x = {"w": values(4, 12, 10).requires_grad_()}
    for coded in (compressed(method), compressed(method, "parameters", reference=True)):
        memory = begun(coded, {"w": values(1, 12, 10).requires_grad_()}, 4)
        for step in range(2):
            average = coded(x, meeting(step=step), memory)
            weights = values(12, 10)
            (slope,) = torch.autograd.grad((average["w"][0] * weights).sum(), x["w"])
            assert_close({"w": slope}, {"w": (weights / 4).expand(4, 12, 10)}, 1e-15)
            assert not any(leaf.requires_grad for leaf in tree.leaves([memory.own, memory.shared]))
        with torch.no_grad():
            assert difference({"w": average["w"]}, {"w": x["w"].mean(0, keepdim=True)}) > 1e-4


@pytest.mark.parametrize(("case", "method"), EVERYTHING)
def test_a_run_can_be_differentiated(case: str, method: str) -> None:
    """The final loss with respect to the initial parameters, through three exchanges."""
    start, data = make_model("MLP", dtype=DOUBLE), stacked(batches(3, 15))
    sim = simulation(start, make(case, method), data)
    initial = {name: p.detach()[None].clone().requires_grad_() for name, p in start.named_parameters()}
    state = sim.init(initial)
    for batch in data:
        state, metrics = sim.step(state, batch, pure=True)
    slopes = torch.autograd.grad(metrics.losses.mean(), list(initial.values()))
    assert all(bool(slope.isfinite().all()) for slope in slopes)
    assert max(float(slope.abs().max()) for slope in slopes) > 1e-6


@pytest.mark.parametrize("bits", [None, 4])
def test_sparse_averaging_has_the_derivatives_of_its_mean(bits: int | None) -> None:
    x = {"w": values(4, 30).requires_grad_()}
    average = MostMoved(1.0, bits)
    memory = begun(average, {"w": torch.zeros(1, 30, dtype=DOUBLE)}, 4)
    new = average(x, meeting(), memory)
    (slope,) = torch.autograd.grad(new["w"][2].sum(), x["w"])
    assert_close({"w": slope}, {"w": torch.full((4, 30), 0.25, dtype=DOUBLE)}, 1e-15)
    assert not memory.shared["last"]["w"].requires_grad


# ---------------------------------------------------------------------------------- groups, weights, other modules


class InGroups(Mean):
    """The mean in the groups given; None: of all."""

    def __init__(self, given: list[list[int]] | None, weighting: Any) -> None:
        super().__init__(None if given is None else 2, weighting)
        self.given = given

    def groups(self, part: Part) -> Any:
        return self.given


@pytest.mark.parametrize("weights", [None, (1, 2, 3, 1, 2), (1, 2, 3, 0, 2)])
@pytest.mark.parametrize(("groups", "num_configs"), [(None, 1), (None, 2), ([[0, 1], [2, 4], [3]], 1)])
@pytest.mark.parametrize("method", GATHERED)
def test_groups_and_weights(method: str, num_configs: int, groups: Any, weights: Any) -> None:
    """The average is that of the codes of the own group, and of all in each configuration."""
    if groups is not None and weights is not None:
        weights = (1, 2, 3, 1, 2)
    C = num_configs
    coded = Compressed(InGroups(groups, "examples" if weights else "equal"), CODECS[method])
    comm: Any = StackedCollectives(5) if C == 1 else GroupCollectives(StackedCollectives(5), C)
    x = values(C, 5, 4, 5)
    own = {"residual": {"w": torch.zeros(C, 5, 4, 5, dtype=DOUBLE) if C > 1 else torch.zeros(5, 4, 5, dtype=DOUBLE)}}
    for step in range(2):
        part = Part.alone(comm, own, step=step, seed=SEED, num_examples=weights, size=C, inplace=True)
        before = own["residual"]["w"].clone().view(C, 5, 4, 5)
        average = coded({"w": x.clone() if C > 1 else x[0].clone()}, part)["w"].view(C, -1, 4, 5)
        codec, draw = codec_of(method), Draw(functools.partial(unnamed, "w", step), torch.arange(5))
        for c in range(C):
            p = x[c] + before[c]
            sent = codec.decode(codec.encode(p, draw), p)
            expected = StackedCollectives(5).mean(sent, groups, weights)
            assert_close(average[c], expected.expand_as(average[c]), 1e-13)
            assert_close(own["residual"]["w"].view(C, 5, 4, 5)[c], p - sent, 1e-13)


def unnamed(name: str, *ids: int) -> torch.Generator:
    return rng.generator(SEED, f"compress {name}", *ids)


def test_weighted_fedavg() -> None:
    start, data = make_model("MLP", dtype=DOUBLE), stacked(batches(3, 12))
    weighted = Mean(weighting="examples")
    settings: dict[str, Any] = {"num_examples": (10, 20, 30)}
    inner = OptimSpec(SGD, lr=0.1)
    plain = run(start, CommunicateOptimizeStrategy([Exchange(weighted, H)], inner), data, **settings)
    for codec in (TopK(1.0), PowerSGD(32)):
        exchange = Exchange(Compressed(weighted, codec, reference=True), H)
        ours = run(start, CommunicateOptimizeStrategy([exchange], inner), data, **settings)
        assert_close(ours.params, plain.params, 1e-12)


def test_units_and_delays_around_it() -> None:
    start, data = make_model("MLP", dtype=DOUBLE), stacked(batches(3, 12))

    def result(exchange: Exchange) -> Run:
        return run(start, CommunicateOptimizeStrategy([exchange], OptimSpec(SGD, lr=0.1)), data)

    coded = compressed("int8", "parameters", reference=True)
    assert_same_bits(result(every(4, Exchange(coded))).params, result(Exchange(coded, every=4)).params)
    whole = compressed(TopK(1.0), "parameters", reference=True)
    late, plain = (result(Exchange(how, every=4, delay=2, late="change")) for how in (whole, Mean()))
    assert_close(late.params, plain.params, 1e-12)


def test_nodes_that_begin_differently_share_the_reference_of_node_0() -> None:
    params = {"w": values(4, 6)}
    coded = compressed(TopK(1.0), reference=True)
    memory = begun(coded, params, 4, inplace=True)
    assert_same_bits(memory.shared["reference"], {"w": params["w"][:1]})
    new = coded(params, meeting(inplace=True), memory)
    assert_close(new, {"w": params["w"].mean(0, keepdim=True)}, 1e-14)


# ----------------------------------------------------------------------------------------- quantised and sparse


@pytest.mark.parametrize(("bits", "payload"), [(8, 31 + 4), (4, 16 + 4)])
def test_a_quantised_mean(bits: int, payload: int) -> None:
    part = meeting()
    x = values(4, 31)
    codec = Quantise(bits)
    mean = quantised({"w": x}, bits, part)
    assert_close(mean, {"w": codec.decode(codec.encode(x), x).mean(0, keepdim=True)}, 1e-14)
    assert part.comm.ledger.total_payload_bytes == payload
    assert part.comm.ledger.total_bytes == 3 * payload  # to three others
    x.requires_grad_()
    (slope,) = torch.autograd.grad(quantised({"w": x}, bits, meeting())["w"].sum(), x)
    assert_close({"w": slope}, {"w": torch.full((4, 31), 0.25, dtype=DOUBLE)}, 1e-15)


def test_sparta_with_quantised_values_is_sparta_compressed() -> None:
    """`quantised` acts in the place of its mean; the mask is drawn as without compression."""
    params = {"w": values(4, 200)}
    plain, coded = (Sparse(RandomSelector(0.1), how) for how in (Mean(), compressed("int8", error_feedback=False)))
    new, exact = (sparse(params, meeting(), begun(sparse, params, 4)) for sparse in (coded, plain))
    chosen = (exact["w"] != params["w"]).any(0)
    assert 5 < int(chosen.sum()) < 50
    assert_same_bits({"w": new["w"][:, ~chosen]}, {"w": params["w"][:, ~chosen]})
    expected = quantised({"w": params["w"][:, chosen]}, 8, meeting())
    assert_close({"w": new["w"][:, chosen]}, {"w": expected["w"].expand(4, -1)}, 1e-14)


def test_sparse_averaging_of_everything_is_averaging() -> None:
    start, data = make_model("MLP", dtype=DOUBLE), stacked(batches(steps=12))
    ours = run(start, CommunicateOptimizeStrategy([Exchange(MostMoved(1.0))], "sgd", lr=0.1), data)
    assert_close(ours.params, run(start, FedAvgStrategy("sgd", H=1, lr=0.1), data).params, 1e-12)


def test_sparse_averaging_by_hand() -> None:
    """Two nodes; one coordinate each; the first sends 0, the second 2; then both what moved most since."""
    average = MostMoved(0.25)
    part, memory = meeting(2, inplace=True), begun(average, {"w": torch.zeros(1, 4)}, 2, inplace=True)
    x = torch.tensor([[5.0, 1.0, 0.0, 0.0], [1.0, 0.0, 3.0, 0.0]])
    new = average({"w": x}, part, memory)
    assert new["w"].tolist() == [[5.0, 1.0, 3.0, 0.0], [5.0, 0.0, 3.0, 0.0]]
    assert memory.shared["last"]["w"].tolist() == [[5.0, 0.0, 3.0, 0.0]]
    new = average({"w": new["w"] + torch.tensor([0.5, 1, 0, 0])}, part, memory)
    assert new["w"].tolist() == [[5.5, 1.5, 3.0, 0.0]] * 2  # coordinate 1 moved by 2 and by 1: the mean of both
    assert memory.shared["last"]["w"].tolist() == [[5.0, 1.5, 3.0, 0.0]]


# ------------------------------------------------------------------------------------------------- by name, errors


def test_methods_by_name() -> None:
    made = {name: repr(make_codec(name)) for name in ("topk", "randomk", "int8", "int4", "sign", "powersgd")}
    assert made == {
        "topk": "TopK(fraction=0.01, k=None)",
        "randomk": "RandomK(fraction=0.01, unbiased=False)",
        "int8": "Quantise(bits=8, stochastic=False)",
        "int4": "Quantise(bits=4, stochastic=False)",
        "sign": "Sign()",
        "powersgd": "PowerSGD(rank=4)",
    }
    assert repr(make_codec("topk", k=3)) == "TopK(fraction=None, k=3)"
    assert repr(make_codec("int8", stochastic=True)) == "Quantise(bits=8, stochastic=True)"
    assert repr(Compressed(Mean(), "sign", reference=True)) == "Compressed(Mean(), Sign(), reference=True)"
    assert not CommunicateOptimizeStrategy([Exchange(compressed("sign"), of="gradients")]).mean_gradient


def test_int8_diloco_trains_like_diloco() -> None:
    start, data = make_model("MLP", dtype=DOUBLE), stacked(batches(steps=50))
    inner = OptimSpec(SGD, lr=0.1)
    plain = run(start, DiLoCoStrategy(inner, H=10), data)
    ours = run(start, DiLoCoStrategy(inner, H=10, compression="int8"), data)
    moved = max(float((p - p0.detach()).abs().max()) for p, p0 in zip(plain.params.values(), start.parameters()))
    assert 0 < difference(ours.params, plain.params) < 0.01 * moved
    assert ours.comm.ledger.total_payload_bytes < 0.13 * plain.comm.ledger.total_payload_bytes  # 1 byte, and 8
    # To each of K - 1 others, and in a ring: as many bytes from K = 16 on, of float32 from 8 on.
    ratio = (K - 1) / (8 * 2 * (K - 1) / K)
    assert ours.comm.ledger.total_bytes == pytest.approx(ratio * plain.comm.ledger.total_bytes, rel=0.03)


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "k": (lambda: TopK(k=0), ValueError, "k=0 must be an integer >= 1"),
    "k by name": (lambda: make_codec("topk", k=0), ValueError, "k=0"),
    "k and fraction": (lambda: TopK(0.1, k=3), ValueError, "give one of them"),
    "fraction 0": (lambda: TopK(0.0), ValueError, r"fraction=0.0 must be a number in \(0, 1\]"),
    "fraction above 1": (lambda: RandomK(1.5), ValueError, "fraction=1.5"),
    "fraction nan": (lambda: RandomK(math.nan), ValueError, "fraction=nan"),
    "sparse fraction": (lambda: MostMoved(2.0), ValueError, "fraction=2.0"),
    "bits": (lambda: Quantise(5), ValueError, "bits=5"),
    "sparse bits": (lambda: MostMoved(0.1, 16), ValueError, "bits=16"),
    "quantised bits": (lambda: quantised({}, 3, meeting()), ValueError, "bits=3"),
    "rank": (lambda: PowerSGD(0), ValueError, "rank=0"),
    "unknown method": (lambda: Compressed(Mean(), "top-k"), ValueError, "did you mean 'topk'"),
    "codec of a wrong type": (lambda: make_codec(8), TypeError, "codec=8"),  # type: ignore[arg-type]
    "unknown option": (
        lambda: make_codec("topk", fractoin=0.1),
        TypeError,
        "did you mean 'fraction'",
    ),
    "option of sign": (lambda: make_codec("sign", k=1), TypeError, "no argument 'k'. It has: none"),
    "options of a codec": (lambda: make_codec(Sign(), k=1), TypeError, "already has its options"),
    "no average": (lambda: Compressed("diloco", "topk"), TypeError, r"give Mean\(\)"),  # type: ignore[arg-type]
    "unbiased with feedback": (
        lambda: Compressed(Mean(), RandomK(unbiased=True)),
        ValueError,
        "error_feedback=False",
    ),
    "no draw": (lambda: RandomK(0.5).encode(torch.ones(1, 2)), ValueError, "draws random numbers"),
    "islands": (lambda: Compressed(Mean(2), "topk", reference=True), ValueError, "island_size=None"),
    "some who keep what they have": (
        lambda: Exchange(Compressed(Mean(), "int8", reference=True), participation=0.5),
        ValueError,
        "reference=False",
    ),
    "neighbours": (lambda: Compressed(Mix("ring"), "int8", reference=True), ValueError, "reference=False"),
    "in part": (
        lambda: Exchange(Compressed(Mean(), "int8"), SyncWeight([0.5, 1])),
        ValueError,
        "is applied in part",
    ),
    "what is compressed": (
        lambda: Compressed(Compressed(Mean(), "int8"), "topk"),
        TypeError,
        r"give Mean\(\)",
    ),
    "islands of powersgd": (lambda: Compressed(Mean(2), "powersgd"), ValueError, "do not share"),
}


@pytest.mark.parametrize("setting", REFUSED)
def test_what_cannot_work_is_refused(setting: str) -> None:
    call, error, message = REFUSED[setting]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 3)])
@pytest.mark.parametrize("method", [*CODECS, "randomk unbiased"])
def test_tensors_without_elements(method: str, shape: tuple[int, ...]) -> None:
    codec, error_feedback = (CODECS[method], True) if method in CODECS else (RandomK(0.5, unbiased=True), False)
    coded = compressed(codec, error_feedback=error_feedback)
    given = {"w": torch.zeros(4, *shape)}
    memory = begun(coded, given, 4, inplace=True)
    assert coded(given, meeting(inplace=True), memory)["w"].shape == (1, *shape)
    assert all(x.isfinite().all() for x in tree.leaves([memory.own, memory.shared]))


@pytest.mark.parametrize("method", CODECS)
def test_what_is_the_same_on_every_node_may_be_given_once(method: str) -> None:
    """`[1, *]` is `[K, *]` with K equal rows; nodes that round at random still do so by themselves."""
    once = {"w": values(1, 12, 10)}
    results = []
    for x in (once, tree.map(lambda y: y.expand(4, 12, 10), once)):
        coded = compressed(method)
        memory = begun(coded, once, 4, inplace=True)
        for step in range(3):
            average = coded(tree.map(torch.clone, x), meeting(step=step, inplace=True), memory)
        results.append((average, memory.own["residual"]))
    assert_close(results[0][0], results[1][0], 1e-13)
    assert_close(results[0][1], results[1][1], 1e-13)


def test_the_reference_is_not_the_parameters() -> None:
    """A later exchange may overwrite the parameters that an exchange gave back."""
    params = {"w": values(4, 12, 10)}
    coded = compressed("int8", reference=True)
    memory = begun(coded, params, 4, inplace=True)
    assert coded(params, meeting(inplace=True), memory)["w"].data_ptr() != memory.shared["reference"]["w"].data_ptr()


def test_parameters_can_be_sent_as_they_are() -> None:
    """The request is met in islands too, and by some of the nodes."""
    start, data = make_model("MLP", dtype=DOUBLE), stacked(batches(steps=12))
    cases: list[tuple[Mean, dict[str, Any]]] = [(Mean(), {}), (Mean(2), {}), (Mean(), {"participation": 0.6})]
    for mean, settings in cases:
        exact = Exchange(mean, every=4, **settings)
        plain = run(start, CommunicateOptimizeStrategy([exact], "sgd", lr=0.1), data)
        for codec in (TopK(1.0), Quantise(8)):
            exchange = Exchange(Compressed(mean, codec), every=4, **settings)
            ours = run(start, CommunicateOptimizeStrategy([exchange], "sgd", lr=0.1), data)
            assert difference(ours.params, plain.params) < (1e-12 if isinstance(codec, TopK) else 0.02)
