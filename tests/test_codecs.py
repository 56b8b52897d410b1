"""Properties of the codes: unbiased or contractive by their bounds, over seeds; feedback of their errors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from tests.helpers import assert_close, assert_same_bits, begun, difference, run, saved, stacked
from tests.models import make_batches, make_model
from tests.reference import common
from tests.reference import compression as reference
from vecgym.collectives import StackedCollectives
from vecgym.compress import (
    E3M0,
    QSGD,
    Cast,
    Chain,
    ChunkedTopK,
    Codec,
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
from vecgym.compress.codecs import Draw
from vecgym.core import rng, tree
from vecgym.core.tree import Tree
from vecgym.simulation.simulation import Part
from vecgym.simulation.timetable import RunFacts
from vecgym.strategy import (
    EF21,
    AllReduceStrategy,
    CommunicateOptimizeStrategy,
    Compressed,
    DiLoCoStrategy,
    Exchange,
    Mean,
    Mix,
    OptimSpec,
    Outer,
    Robust,
    ServerMean,
    Sparse,
    Strategy,
)
from vecgym.strategy.stages import ExchangeFacts

DOUBLE = torch.float64
SEEDS = range(4)
N, DRAWS = 60, 3000


def draw(num_nodes: int, seed: int = 0, step: int = 0) -> Draw:
    return Draw(functools.partial(rng.generator, seed, "test", step), torch.arange(num_nodes))


def tensor(kind: str, seed: int) -> Tensor:
    """`[N]`, of one kind."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(N, generator=g, dtype=DOUBLE)
    if kind == "heavy tails":
        return x**3
    if kind == "one of many":
        return torch.where(torch.arange(N) == seed, 1.0, 1e-3 * x)
    return torch.ones(N, dtype=DOUBLE) if kind == "equal" else x


KINDS = ("normal", "heavy tails", "one of many", "equal")


def repeated(codec: Codec, x: Tensor, seed: int) -> Tensor:
    """Values of x as read in DRAWS independent codes, `[DRAWS, N]`: nodes draw by themselves, `RandomK` together."""
    if isinstance(codec, RandomK):
        one = [codec.decode(codec.encode(x[None], draw(1, seed, step)), x[None]) for step in range(DRAWS)]
        return torch.cat(one)
    many = x.expand(DRAWS, N)
    return codec.decode(codec.encode(many, draw(DRAWS, seed)), many)


def levels_bound(n: int, s: int) -> float:
    return min(n / s**2, math.sqrt(n) / s)


UNBIASED: dict[str, tuple[Codec, float]] = {  # and the largest E|x - C(x)|^2 / |x|^2
    "qsgd 1": (QSGD(1, unbiased=True), levels_bound(N, 1)),
    "qsgd 4": (QSGD(4, unbiased=True), levels_bound(N, 4)),
    "qsgd 100": (QSGD(100, unbiased=True), levels_bound(N, 100)),
    "qsgd in buckets": (QSGD(2, bucket=16, unbiased=True), levels_bound(16, 2)),
    "ternary": (Ternary(unbiased=True), (math.sqrt(N) - 1) / 2),
    "natural": (Natural(), 1 / 8),
    "randomk": (RandomK(0.2, unbiased=True), 1 / 0.2 - 1),
    "int4 stochastic": (Quantise(4, stochastic=True), N / (4 * 7**2)),
}
LARGEST_SHARE = {  # of the values, if they are to be of this kind
    "topk": (TopK(0.2), 1 - 0.2),
    "chunktopk": (ChunkedTopK(k=2, chunk=math.isqrt(N)), 1 - 2 / 30),  # of chunks of 30
    "randomk": (RandomK(0.2), 1 - 0.2),
    "sign": (Sign(), 1 - 1 / N),
    "stat2": (StatQuantise(2), 1.0),
    "stat4": (StatQuantise(4), 1.0),
    "stat8": (StatQuantise(8), 1.0),
    "bfloat16": (Cast("bfloat16"), 2.0**-16),
    "eight-bit floats": (Cast("float8_e4m3fn"), 2.0**-8 + N / (2**10 * 448) ** 2),
    "e3m0": (E3M0(), 1 / 9 + N / 128**2),
    "int8": (Quantise(8), N / (4 * 127**2)),
    "int4": (Quantise(4), N / (4 * 7**2)),
}
SHRUNK: dict[str, tuple[Codec, float]] = {
    "qsgd 1": (QSGD(1), 1 - 1 / (1 + levels_bound(N, 1))),
    "qsgd 4": (QSGD(4), 1 - 1 / (1 + levels_bound(N, 4))),
    "qsgd in buckets": (QSGD(2, bucket=16), 1 - 1 / (1 + levels_bound(16, 2))),
    "ternary": (Ternary(), 1 - 1 / (1 + (math.sqrt(N) - 1) / 2)),
    "natural": (Natural(), 1 / 8),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", UNBIASED)
def test_the_mean_of_many_codes_is_the_tensor_and_their_spread_within_its_bound(name: str, kind: str) -> None:
    codec, bound = UNBIASED[name]
    for seed in SEEDS:
        x = tensor(kind, seed)
        read = repeated(codec, x, seed)
        spread = (read - x).square().sum(1)
        bias = (read.mean(0) - x).square().sum()
        rounded = float(x.square().sum()) * 1e-13  # scales have the digits of float32
        assert float(bias) < 16 * float(spread.mean()) / DRAWS + rounded  # four deviations, if one value is most of it
        along = read @ x / x.square().sum()  # 1 on average
        assert (
            abs(float(along.mean()) - 1) < 5 * float(along.std()) / math.sqrt(DRAWS) + 1e-4
        )  # and what is too rare to be seen
        error = float(spread.mean() / x.square().sum())
        assert error <= bound + 4 * float(spread.std() / x.square().sum()) / math.sqrt(DRAWS)
        assert (name, kind) in EXACT or error > 1e-9


EXACT = {("natural", "equal"), ("ternary", "equal"), ("int4 stochastic", "equal")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHRUNK)
def test_what_may_be_fed_back_is_nearer_than_nothing(name: str, kind: str) -> None:
    """On average by its bound, and as near as a multiple of the unbiased code can be."""
    codec, bound = SHRUNK[name]
    for seed in SEEDS:
        x = tensor(kind, seed)
        read = repeated(codec, x, seed)
        spread = (read - x).square().sum(1) / x.square().sum()
        error = float(spread.mean())
        assert error <= bound + 4 * float(spread.std()) / math.sqrt(DRAWS)
        assert error < 0.95
        if name in UNBIASED and name != "natural" and codec.bucket is None:  # type: ignore[attr-defined]
            free = repeated(UNBIASED[name][0], x, seed)
            best = float((free @ x).mean() / free.square().sum(1).mean())
            nearest = float((best * free - x).square().sum(1).mean() / x.square().sum())
            assert error == pytest.approx(nearest, rel=0.03, abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LARGEST_SHARE)
def test_codes_without_chance_err_within_their_bounds(name: str, kind: str) -> None:
    codec, bound = LARGEST_SHARE[name]
    for seed in SEEDS:
        x = tensor(kind, seed)
        if name == "randomk":  # on average
            error = float((repeated(codec, x, seed) - x).square().sum(1).mean() / x.square().sum())
            assert error <= 1.2 * bound
            continue
        read = codec.decode(codec.encode(x[None]), x[None])[0]
        assert float((read - x).square().sum() / x.square().sum()) <= bound + 1e-12


def test_bounds_are_reached() -> None:
    """Equal values are the worst case of the largest; half a step that of rounding; far-off ones that of one level."""
    equal = torch.ones(1, N, dtype=DOUBLE)
    for codec, bound in (LARGEST_SHARE["topk"], (ChunkedTopK(k=2, chunk=math.isqrt(N)), 1 - 2 / 30)):
        read = codec.decode(codec.encode(equal), equal)
        assert float((read - equal).square().sum() / N) == pytest.approx(bound)
    halves = torch.full((1, N), 1 / 2, dtype=DOUBLE)
    halves[0, 0] = 7
    read = Quantise(4).decode(Quantise(4).encode(halves), halves)
    assert float((read - halves).square().sum()) == pytest.approx((N - 1) / 4)
    middle = torch.full((N,), 1.5 / 2, dtype=DOUBLE)  # in the middle between two powers: 1/8 of the square
    read = repeated(Natural(), middle * 0 + 4 / 3, 0)
    assert float((read - 4 / 3).square().mean() / (4 / 3) ** 2) == pytest.approx(1 / 8, rel=0.02)
    assert middle.numel() == N


@pytest.mark.parametrize("codec", [QSGD(4), Natural(), Ternary(), Quantise(4, stochastic=True)], ids=repr)
def test_what_is_drawn_is_keyed_by_seed_node_and_step(codec: Codec) -> None:
    x = tensor("normal", 0).expand(6, N)

    def code(nodes: list[int], seed: int = 0, step: int = 0) -> Tree:
        own = Draw(functools.partial(rng.generator, seed, "test", step), torch.tensor(nodes))
        return codec.encode(x[: len(nodes)], own)

    whole = code([0, 1, 2, 3, 4, 5])
    assert_same_bits(code([4, 1]), {part: y[[4, 1]] for part, y in whole.items()})  # wherever a node is held
    twice = code([0, 1, 2, 0, 1, 2])  # two configurations of a sweep
    assert_same_bits({part: y[:3] for part, y in twice.items()}, {part: y[3:] for part, y in twice.items()})
    assert len({bytes(row.tolist()) for row in next(iter(whole.values()))}) == 6, "each node rounds by itself"
    for other in (code([0, 1, 2, 3, 4, 5], seed=1), code([0, 1, 2, 3, 4, 5], step=1)):
        assert any(not torch.equal(other[part], whole[part]) for part in whole)


# ------------------------------------------------------------------------------------------------------ one by one


def test_ternary_is_two_bits_rounded_at_random_in_a_fifth_less() -> None:
    x = torch.randn(4, 1000, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    ternary, two_bits = Ternary(unbiased=True), Quantise(2, stochastic=True)
    code, other = ternary.encode(x, draw(4)), two_bits.encode(x, draw(4))
    assert_same_bits({"x": ternary.decode(code, x)}, {"x": two_bits.decode(other, x)})
    assert (code["values"][0].nbytes, other["values"][0].nbytes) == (200, 250)


def test_ternary_clips_at_standard_deviations() -> None:
    x = torch.randn(2, 1000, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    x[:, 0] = 100.0
    limit = 2.5 * x.std(1, correction=0)
    clipped, plain = Ternary(unbiased=True, clip=2.5), Ternary(unbiased=True)
    assert_close({"s": clipped.encode(x, draw(2))["scale"][:, 0]}, {"s": limit.float()}, 1e-6)
    expected = plain.encode(x.clamp(-limit[:, None], limit[:, None]), draw(2))
    assert_same_bits(clipped.encode(x, draw(2)), expected)
    assert float(clipped.decode(expected, x).max()) == pytest.approx(float(limit.max()), rel=1e-6)


def test_qsgd_has_one_norm_per_bucket() -> None:
    x = torch.randn(3, 50, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    code = QSGD(7, bucket=16, unbiased=True).encode(x, draw(3))
    norms = torch.stack([part.norm(dim=1) for part in x.split(16, dim=1)], 1)
    assert_close({"s": code["scale"]}, {"s": (norms / 7).float()}, 1e-6)
    whole = QSGD(7, bucket=50).encode(x, draw(3))
    assert_same_bits(whole, QSGD(7).encode(x, draw(3)))
    for levels, bits in ((1, 2), (3, 3), (4, 4), (7, 4), (127, 8), (128, 9), (32767, 16)):
        codec = QSGD(levels, unbiased=True)
        code = codec.encode(x, draw(3))
        assert code["values"].shape == (3, math.ceil(50 * bits / 8))
        assert difference({"x": codec.decode(code, x)}, {"x": x}) < float(x.norm(dim=1).max()) / levels


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 8), (DOUBLE, 11), (torch.bfloat16, 8), (torch.float16, 5)])
def test_natural_keeps_powers_of_two_and_all_that_is_extreme(dtype: torch.dtype, bits: int) -> None:
    info = torch.finfo(dtype)
    powers = [1.0, -2.0, 0.0, 0.5, -info.tiny, math.ldexp(1.0, math.frexp(info.max)[1] - 1)]
    x = torch.tensor([powers], dtype=dtype)
    code = Natural().encode(x, draw(1))
    assert torch.equal(Natural().decode(code, x), x)
    assert (code["exponents"].nbytes, code["negative"].nbytes) == (math.ceil(len(powers) * bits / 8), 1)
    extreme = torch.tensor([[info.tiny / 2] * 400 + [math.inf]], dtype=dtype)
    read = Natural().decode(Natural().encode(extreme, draw(1)), extreme)[0]
    assert set(read[:400].tolist()) == {0.0, info.tiny}
    assert 120 < int((read[:400] > 0).sum()) < 280
    assert bool(read[400].isnan())


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_bin_is_read_as_its_mean(bits: int) -> None:
    x = torch.randn(3, 500, dtype=DOUBLE, generator=torch.Generator().manual_seed(0)) * 3 + 1
    codec = StatQuantise(bits)
    read = codec.decode(codec.encode(x), x)
    assert_close({"m": read.mean(1)}, {"m": x.mean(1)}, 1e-6)  # float32
    errors = (read - x).square().mean(1).sqrt() / x.std(1)
    assert bool((errors < {2: 0.5, 4: 0.13, 8: 0.05}[bits]).all())
    assert all(len(row.unique()) <= 2**bits for row in read)
    naive = torch.stack([reference.statistical(bits)(0, "", 0, row) for row in x])
    assert_close({"x": read}, {"x": naive}, 1e-12)
    constant = torch.full((2, 7), 0.3, dtype=DOUBLE)
    assert_close({"x": codec.decode(codec.encode(constant), constant)}, {"x": constant}, 1e-7)
    two = torch.tensor([[-1.0, 1.0, 1.0, -1.0]])
    assert torch.equal(codec.decode(codec.encode(two), two), two)


def test_bins_that_are_too_wide_take_all_for_one() -> None:
    """Six standard deviations to either side: the two sides of the largest values fall into one bin of four."""
    largest = torch.tensor([[1.0, 1.1, -1.0, -0.9] * 8], dtype=DOUBLE)
    near, far = StatQuantise(2), StatQuantise(2, sigmas=12)
    assert float((near.decode(near.encode(largest), largest) - largest).abs().max()) < 0.06
    assert float(far.decode(far.encode(largest), largest).abs().max()) < 0.06


def test_places_take_twelve_bits_in_a_chunk_of_4096() -> None:
    """k (2 + 12) / 8 bytes of each chunk, and 16 of each tensor: 0.21875 bits per parameter for k = 64."""
    codec = Chain(ChunkedTopK(k=64, chunk=64), StatQuantise(2))
    for shape, chunks in (((128, 192), 6), ((8192,), 2), ((64, 16, 2, 2), 1)):
        x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
        code = codec.encode(x)
        assert sum(part[0].nbytes for part in code.values()) == chunks * 64 * (2 + 12) // 8 + 16
        assert (chunks * 64 * 14) / x[0].numel() == 0.21875
        whole = ChunkedTopK(k=4096, chunk=64)
        assert torch.equal(whole.decode(whole.encode(x), x), x)


def test_one_chunk_is_top_k() -> None:
    x = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    chunked, plain = ChunkedTopK(k=5, chunk=8), TopK(k=5)
    assert torch.equal(chunked.decode(chunked.encode(x), x), plain.decode(plain.encode(x), x))


@pytest.mark.parametrize("weights", [None, torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.5, 0, 0.5], [0, 1.0, 0]])])
def test_a_mean_of_those_who_sent(weights: Tensor | None) -> None:
    x = torch.randn(3, 6, 6, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    all_of, senders = ChunkedTopK(k=3, chunk=3), ChunkedTopK(k=3, chunk=3, over="senders")
    code = {part: y[None] for part, y in senders.encode(x).items()}
    read = senders.decode(senders.encode(x), x)
    W = torch.full((1, 3), 1 / 3, dtype=DOUBLE) if weights is None else weights.double()
    total = torch.tensordot(W, read, 1)
    sent = torch.tensordot(W, (read != 0).double(), 1)
    assert_close({"x": senders.average(code, x, weights)}, {"x": torch.where(sent > 0, total / sent, 0.0)}, 1e-14)
    assert_close({"x": all_of.average(code, x, weights)}, {"x": total}, 1e-14)
    assert float(sent.max()) > 1 / 3
    assert float(sent.min()) == 0
    # Who sends 0 has sent it: two of them, and a 3.
    zeros = torch.tensor([[[0.0]], [[0.0]], [[3.0]]])
    gathered = {part: y[None] for part, y in senders.encode(zeros).items()}
    assert senders.average(gathered, zeros).item() == 1.0


def test_powersgd_with_a_cold_start_stays_as_far_off_as_it_was() -> None:
    x = {"w": torch.randn(3, 12, 10, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))}
    mean = x["w"].mean(0)
    errors: dict[bool, list[float]] = {}
    for warm in (True, False):
        codec = PowerSGD(2, warm_start=warm)
        state = codec.init(x)
        errors[warm] = []
        for step in range(30):
            average, _, state = codec.reduce(x, state, StackedCollectives(3).mean, lambda name, t=step: draw(3, 0, t))  # type: ignore[misc]
            errors[warm].append(float((average["w"][0] - mean).norm()))
    assert errors[True][0] == errors[False][0]
    best = float(torch.linalg.svdvals(mean)[2:].square().sum().sqrt())
    assert errors[True][-1] < 1.01 * best < 1.05 * best < sum(errors[False][10:]) / 20


# ------------------------------------------------------------------------------------------- what feeds errors back

K, STEPS, H = 4, 50, 5
INNER: tuple[Any, dict[str, Any]] = (SGD, {"lr": 0.05})


@functools.cache
def data(num_nodes: int = K) -> list[list[Any]]:
    return make_batches("MLP", STEPS, num_nodes, 4, dtype=DOUBLE)


def of(average: Any) -> Strategy:
    return CommunicateOptimizeStrategy([Exchange(average, of="gradients")], OptimSpec(SGD, lr=0.05))


@pytest.mark.parametrize("num_nodes", [1, K])
@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_momentum_correction_equals_its_twin(decay: float, masking: bool, num_nodes: int) -> None:
    start = make_model("MLP", dtype=DOUBLE)
    average = Compressed(Mean(), TopK(0.05), momentum=0.8, decay=decay, masking=masking)
    ours = run(start, of(average), stacked(data(num_nodes)))
    naive = reference.Compressed(reference.topk(0.05), True, decay, 0.8, masking)
    theirs = reference.allreduce(start, data(num_nodes), num_nodes, naive, inner=INNER)
    assert_close(ours.losses, theirs.losses, 1e-10, "losses")
    for kept, held in (("residual", naive.residuals), ("momentum", naive.momenta)):
        expected = {name: torch.stack(of_nodes) for name, of_nodes in held.items()}
        assert_close(ours.state.own[f"0.0/{kept}"], expected, 1e-10, kept)


def test_momentum_of_all_that_is_sent_is_the_optimizers() -> None:
    start = make_model("MLP", dtype=DOUBLE)
    ours = run(start, of(Compressed(Mean(), TopK(1.0), momentum=0.8, masking=False)), stacked(data()))
    plain = run(start, AllReduceStrategy(OptimSpec(SGD, lr=0.05, momentum=0.8)), stacked(data()))
    assert_close(ours.params, plain.params, 1e-12)
    masked = run(start, of(Compressed(Mean(), TopK(1.0), momentum=0.8)), stacked(data()))
    without = run(start, AllReduceStrategy(OptimSpec(SGD, lr=0.05)), stacked(data()))
    assert_close(masked.params, without.params, 1e-12)  # every momentum ends at once
    assert difference(plain.params, without.params) > 1e-2


def test_momentum_by_hand() -> None:
    """One node, one of two values: what waits grows with its momentum, what was sent begins anew."""
    average = Compressed(Mean(), TopK(k=1), momentum=0.5)
    x = {"w": torch.tensor([[2.0, 1.0]])}
    part, memory = Part.alone(StackedCollectives(1)), begun(average, x, 1)
    told = [average(x, part, memory)["w"][0].tolist() for _ in range(3)]
    assert told == [[2.0, 0.0], [0.0, 2.5], [5.0, 0.0]]
    assert memory.own["momentum"]["w"].tolist() == [[0.0, 1.0]]
    assert memory.own["residual"]["w"].tolist() == [[0.0, 1.0]]


def test_momentum_of_those_who_sit_out_stays() -> None:
    how = Outer(Compressed(ServerMean(), TopK(k=1), momentum=0.5, masking=False))
    strategy = CommunicateOptimizeStrategy([Exchange(how, participation=0.5)], OptimSpec(SGD, lr=0.05))
    ours = run(make_model("MLP", dtype=DOUBLE), strategy, stacked(data())[:1], seed=3)
    took_part = torch.tensor([node in (ours.active[0] or ()) for node in range(K)])
    assert took_part.sum() == 2
    for kept in ("momentum", "residual"):
        moved = torch.stack([x.flatten(1).abs().amax(1) for x in ours.state.own[f"0.0/{kept}"].values()]).amax(0)
        assert torch.equal(moved > 0, took_part)


NAIVE: dict[str, Callable[[], reference.Codec]] = {
    "topk": lambda: reference.topk(0.05),
    "stat4": lambda: reference.statistical(4),
    "sign": reference.sign,
}
EF21_CODECS: dict[str, Codec] = {"topk": TopK(0.05), "stat4": StatQuantise(4), "sign": Sign()}


@pytest.mark.parametrize("num_nodes", [1, K])
@pytest.mark.parametrize("name", NAIVE)
def test_ef21_equals_its_twin(name: str, num_nodes: int) -> None:
    start = make_model("MLP", dtype=DOUBLE)
    ours = run(start, of(EF21(Mean(), EF21_CODECS[name])), stacked(data(num_nodes)))
    naive = reference.EF21(NAIVE[name]())
    theirs = reference.allreduce(start, data(num_nodes), num_nodes, naive, inner=INNER)
    assert_close(ours.losses, theirs.losses, 1e-10, "losses")
    expected = {name: torch.stack(of_nodes) for name, of_nodes in naive.residuals.items()}
    assert_close(ours.state.own["0.0/estimate"], expected, 1e-10, "estimates")


def test_ef21_of_movements_equals_its_twin() -> None:
    start = make_model("MLP", dtype=DOUBLE)
    strategy = CommunicateOptimizeStrategy(
        [Exchange(Outer(EF21(Mean(), TopK(0.05))), every=H)], OptimSpec(SGD, lr=0.05)
    )
    ours = run(start, strategy, stacked(data()))
    theirs = reference.diloco(start, data(), K, reference.EF21(reference.topk(0.05)), H=H, inner=INNER)
    assert_close(ours.losses, theirs.losses, 1e-10, "losses")


@pytest.mark.parametrize("codec", [TopK(0.1), "sign", "stat4", "qsgd", "natural", "powersgd"], ids=str)
def test_what_all_know_is_the_mean_of_the_estimates(codec: Any) -> None:
    start = make_model("MLP", dtype=DOUBLE)
    state = run(start, of(EF21(Mean(), codec)), stacked(data())[:9]).state
    mean = tree.map(lambda h: h.mean(0, keepdim=True), state.own["0.0/estimate"])
    assert_close(state.shared["0.0/average"], mean, 1e-13)
    assert {len(h) for h in state.own["0.0/estimate"].values()} == {K}


def test_ef21_of_values_that_rest_becomes_exact() -> None:
    """Top-k after as many exchanges as there are parts; error feedback never: values come with what has waited."""
    x = {"w": torch.randn(K, 12, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))}
    told = {}
    for average in (EF21(Mean(), TopK(k=3)), Compressed(Mean(), TopK(k=3))):
        part, memory = Part.alone(StackedCollectives(K)), begun(average, x, K)
        for _ in range(4):
            told[type(average)] = average(x, part, memory)
    mean = {"w": x["w"].mean(0, keepdim=True)}
    assert_close(told[EF21], mean, 1e-15)
    assert difference(told[Compressed], mean) > 0.1


def test_ef21_of_everything_is_the_mean() -> None:
    start = make_model("MLP", dtype=DOUBLE)
    for inner in (Mean(), ServerMean()):
        ours = run(start, of(EF21(inner, TopK(1.0))), stacked(data())[:12])
        assert_close(ours.params, run(start, AllReduceStrategy("sgd", lr=0.05), stacked(data())[:12]).params, 1e-12)


@pytest.mark.parametrize("average", [EF21(Mean(), "topk"), EF21(Mean(), "powersgd"),
                                     Compressed(Mean(), TopK(0.05), momentum=0.8)], ids=repr)  # fmt: skip
def test_a_run_is_the_same_pure_and_resumed_and_has_derivatives(average: Any) -> None:
    start, batches = make_model("MLP", dtype=DOUBLE), stacked(data())[:12]
    whole = run(start, of(average), batches)
    pure = run(start, of(average), batches, differentiable=True)
    assert_close(pure.state, whole.state, 1e-11)
    first = run(start, of(average), batches[:7], max_steps=12)
    resumed = run(start, of(average), batches[7:], state=saved(first.state), max_steps=12)
    assert_same_bits(resumed.state, whole.state)
    x = {"w": torch.randn(K, 12, 10, dtype=DOUBLE).requires_grad_()}
    memory = begun(average, x, K)
    told = average(x, Part.alone(StackedCollectives(K)), memory)
    (slope,) = torch.autograd.grad(told["w"].sum(), x["w"])
    assert_close({"w": slope}, {"w": torch.full((K, 12, 10), 1 / K, dtype=DOUBLE)}, 1e-15)
    assert not any(leaf.requires_grad for leaf in tree.leaves([memory.own, memory.shared]))


def test_what_the_caller_overwrites_is_not_what_is_remembered() -> None:
    x = {"w": torch.randn(1, 12, dtype=DOUBLE)}
    average = EF21(Mean(), TopK(k=3))
    memory = begun(average, x, 1, inplace=True)
    told = average(x, Part.alone(StackedCollectives(1), inplace=True), memory)
    before = {kept: tree.map(torch.clone, values) for kept, values in (memory.own | memory.shared).items()}
    told["w"].zero_()
    assert_same_bits(memory.own | memory.shared, before)


def test_drawn_coordinates_of_estimates() -> None:
    """`Sparse` takes what an average keeps for each coordinate."""
    start = make_model("MLP", dtype=DOUBLE)
    for average in (EF21(Mean(), TopK(0.5)), Compressed(Mean(), TopK(0.5), momentum=0.5)):
        assert bool(run(start, of(Sparse(0.5, average)), stacked(data())[:6]).losses.isfinite().all())


def test_error_feedback_of_a_contractive_code_stays_bounded() -> None:
    """The shrunk codes' residuals come to a rest; the unbiased ones' grow without end, and are refused."""
    x = {"w": torch.randn(2, 400, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))}
    for codec in (QSGD(1), Ternary(), Ternary(unbiased=True), Natural(), RandomK(0.1), StatQuantise(2)):
        average = Compressed(Mean(), codec)
        memory, sizes = begun(average, x, 2), []
        for step in range(300):
            average(x, Part.alone(StackedCollectives(2), number=step, step=step), memory)
            sizes.append(float(memory.own["residual"]["w"].norm() / x["w"].norm()))
        assert max(sizes[200:]) < 1.5 * max(sizes[100:200]) < 60, codec
    for wild in (QSGD(1, unbiased=True), RandomK(0.1, unbiased=True)):
        average = Compressed(Mean(), wild, error_feedback=False)
        average.error_feedback = True
        memory = begun(average, x, 2)
        for step in range(60):
            average(x, Part.alone(StackedCollectives(2), number=step, step=step), memory)
        assert float(memory.own["residual"]["w"].norm() / x["w"].norm()) > 1e3, wild


def test_by_name() -> None:
    made = {
        name: repr(make_codec(name)) for name in ("qsgd", "natural", "ternary", "stat8", "stat4", "stat2", "chunktopk")
    }
    assert made == {
        "qsgd": "QSGD(levels=7, bucket=None, unbiased=False)",
        "natural": "Natural()",
        "ternary": "Ternary(unbiased=False, clip=None)",
        "stat8": "StatQuantise(bits=8, sigmas=6.0)",
        "stat4": "StatQuantise(bits=4, sigmas=6.0)",
        "stat2": "StatQuantise(bits=2, sigmas=6.0)",
        "chunktopk": "ChunkedTopK(k=64, chunk=64, over='all')",
    }
    assert repr(make_codec("qsgd", levels=3, unbiased=True)) == "QSGD(levels=3, bucket=None, unbiased=True)"
    assert repr(make_codec("powersgd", warm_start=False)) == "PowerSGD(rank=4, warm_start=False)"
    start = make_model("MLP", dtype=DOUBLE)
    for name in made:
        strategy = DiLoCoStrategy("sgd", lr=0.05, H=2, compression=name)
        assert bool(run(start, strategy, stacked(data())[:6]).losses.isfinite().all())


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "levels": (lambda: QSGD(0), ValueError, "levels=0 must be an integer >= 1"),
    "too many levels": (lambda: QSGD(40000), ValueError, "at most 32767"),
    "bucket": (lambda: QSGD(bucket=0), ValueError, "bucket=0"),
    "flag": (lambda: Ternary(unbiased=1), TypeError, "unbiased=1"),  # type: ignore[arg-type]
    "clip": (lambda: Ternary(clip=0.0), ValueError, "clip=0.0 must be a number > 0"),
    "bits": (lambda: StatQuantise(3), ValueError, "bits=3"),
    "sigmas": (lambda: StatQuantise(2, sigmas=-1), ValueError, "sigmas=-1"),
    "k": (lambda: ChunkedTopK(0), ValueError, "k=0"),
    "chunk": (lambda: ChunkedTopK(chunk=0), ValueError, "chunk=0"),
    "over": (lambda: ChunkedTopK(over="sender"), ValueError, "did you mean 'senders'"),  # type: ignore[arg-type]
    "option of natural": (lambda: make_codec("natural", bits=8), TypeError, "no argument 'bits'. It has: none"),
    "bits of stat2": (lambda: make_codec("stat2", k=8), TypeError, "no argument 'k'"),
    "no draw": (lambda: Natural().encode(torch.ones(1, 2)), ValueError, "draws random numbers"),
    "unbiased qsgd fed back": (lambda: Compressed(Mean(), QSGD(unbiased=True)), ValueError, "unbiased=False"),
    "unbiased in a chain": (
        lambda: Compressed(Mean(), Chain(TopK(), QSGD(unbiased=True))), ValueError, "unbiased=False"),
    "ef21 of an unbiased one": (lambda: EF21(Mean(), RandomK(unbiased=True)), ValueError, "unbiased=False"),
    "ef21 in islands": (lambda: EF21(Mean(2), "topk"), ValueError, "mean of all nodes' estimates"),
    "ef21 of some": (
        lambda: Exchange(EF21(Mean(), "topk"), participation=0.5), ValueError, "mean of all nodes' estimates"),
    "ef21 of some at a server": (
        lambda: Exchange(EF21(ServerMean(), "topk"), participation=0.5).check(RunFacts(4)), ValueError, "absent nodes"),
    "ef21 of weighted nodes": (lambda: EF21(Mean(weighting="examples"), "topk"), ValueError, "weighting"),
    "ef21 of a median": (lambda: EF21(Robust(), "topk"), ValueError, "mean of all nodes' estimates"),
    "ef21 of neighbours": (lambda: EF21(Mix("ring"), "topk"), ValueError, "mean of all nodes' estimates"),
    "ef21 of absent nodes": (
        lambda: EF21(Mean(), "topk").check(ExchangeFacts(4, counts=(3,))), ValueError, "availability"),
    "momentum": (lambda: Compressed(Mean(), "topk", momentum=1.0), ValueError, r"must be a number in \[0, 1\)"),
    "momentum without feedback": (
        lambda: Compressed(Mean(), "topk", momentum=0.5, error_feedback=False), ValueError, "momentum=0.5 without"),
    "masking of none": (lambda: Compressed(Mean(), "topk", masking=False), ValueError, "without a momentum"),
    "warm start": (lambda: PowerSGD(2, warm_start=None), TypeError, "warm_start=None"),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize("setting", REFUSED)
def test_what_cannot_work_is_refused(setting: str) -> None:
    call, error, message = REFUSED[setting]
    with pytest.raises(error, match=message):
        call()


def test_params_of_models_are_looked_at() -> None:
    """The models of these tests have what the codes are for: matrices of more than one chunk, and vectors."""
    shapes = [tuple(p.shape) for p in common.parameters(make_model("MLP")).values()]
    assert {len(shape) for shape in shapes} == {1, 2}
