"""All-reduces that encode sums: the bits of torch's, the programs of others, and where they are used."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD

import vecgym
from tests.helpers import assert_close, assert_same_bits, run, stacked
from tests.models import make_batches, make_data, make_model
from tests.reference import compression, rings
from vecgym.availability import Trace
from vecgym.collectives import StackedCollectives
from vecgym.compress import Cast, CentralBins, Codec, PowerSGD, Quantise, RandomK
from vecgym.runs import multiprocess
from vecgym.simulation import Part
from vecgym.strategy import (
    AllReduceStrategy,
    AllToAll,
    Average,
    Compressed,
    DiLoCoStrategy,
    Exchange,
    Mean,
    OptimSpec,
    Outer,
    QuantisedRing,
    Ring,
    Robust,
    Strategy,
)

F64 = torch.float64
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))


def mean(how: Average, x: Tensor, among: list[int] | None = None) -> Tensor:
    """The value `[*]` that the nodes agree on, of their values `[K, *]`."""
    comm = StackedCollectives(len(x)) if among is None else StackedCollectives(8).among(among)
    (found,) = how({"w": x}, Part.alone(comm))["w"]
    return found


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# ------------------------------------------------------------------------------------------- torch with gloo

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CASES = [(K, n, dtype) for K in (2, 3, 4) for n in (1, 2, 3, 5, 8, 9, 31, 100, 1001) for dtype in DTYPES]
CASES.append((2, 2**21 + 77, torch.bfloat16))  # more than two segments to a chunk


def given(K: int, n: int) -> Tensor:
    return normal(n, K, n) * 3


def reduced(link: multiprocess.Link) -> list[tuple[Tensor, Tensor]]:
    """The sums and means of `torch.distributed`, on the first K of these processes."""
    groups, found = {K: dist.new_group(list(range(K))) for K in (2, 3, 4)}, []
    for K, n, dtype in CASES:
        if link.rank < K:
            both = [given(K, n)[link.rank].to(dtype) for _ in range(2)]
            for x, op in zip(both, (dist.ReduceOp.SUM, dist.ReduceOp.AVG)):
                dist.all_reduce(x, op, groups[K])
            found.append((both[0], both[1]))
    x = torch.full((4096,), 256.0 if link.rank == 0 else 1.0, dtype=torch.bfloat16)
    dist.all_reduce(x)
    return [*found, (x, x)]


@pytest.mark.skipif(VERSION < (2, 13), reason="gloo has no average in older versions, such as torch 2.6")
def test_it_has_the_bits_of_torchs_all_reduce_with_gloo() -> None:
    """On 2 to 4 processes, and of tensors shorter than their number; also of values that are not yet of the type."""
    [theirs, *_] = multiprocess.run(reduced, 4, timeout_s=120)
    far = 0
    for (K, n, dtype), (total, average) in zip(CASES, theirs):
        x = given(K, n)
        ours = mean(Ring(Cast(dtype)), x.to(dtype))
        assert torch.equal(ours, average), (K, n, dtype)
        assert torch.equal(mean(Ring(Cast(dtype)), x), average.float()), (K, n, dtype)
        assert K == 3 or torch.equal(K * ours, total), (K, n, dtype)
        far += not torch.equal(mean(Mean(), x.to(dtype)), average)
    assert far > len(CASES) // 2  # the mean of a stack has other bits
    total, _ = theirs[-1]
    x = torch.tensor([256.0, 1.0, 1.0, 1.0])[:, None].expand(4, 4096)
    assert set(total.tolist()) == {256.0, 260.0}
    assert torch.equal(4 * mean(Ring("bfloat16"), x), total.float())
    assert set((4 * mean(Mean(), x.bfloat16())).tolist()) == {260.0}


# ------------------------------------------------------------------------------------------- in plain loops

Twin = Callable[[list[Tensor]], Tensor]
TWINS: dict[str, tuple[Average, Twin]] = {
    "ring, 8 bits": (Ring("int8"), lambda x: rings.gloo(x, rings.eight_bits)),
    "ring, floats of 8 bits": (Ring(AllToAll().codec), lambda x: rings.gloo_of(x, rings.scaled_floats)),
    "ring, bfloat16": (Ring("bfloat16"), lambda x: rings.gloo_of(x, rings.cast(torch.bfloat16))),
    "ring, bins": (Ring(CentralBins(8)), lambda x: rings.gloo(x, rings.bins)),
    "PRIME": (QuantisedRing(), lambda x: rings.prime(x, rings.bins)),
    "PRIME, 8 bits": (QuantisedRing("int8"), lambda x: rings.prime(x, rings.eight_bits)),
    "torchft": (AllToAll(), lambda x: rings.torchft(x, rings.scaled_floats)),
    "torchft, 8 bits": (AllToAll("int8"), lambda x: rings.torchft(x, rings.eight_bits)),
    "torchft, bfloat16": (AllToAll("bfloat16"), lambda x: rings.torchft(x, rings.cast(torch.bfloat16))),
}
SHAPES = [(1,), (3,), (7,), (40,), (5, 8), (9, 4, 3), (), (2, 0)]


@pytest.mark.parametrize("K", [1, 2, 3, 5])
@pytest.mark.parametrize("name", TWINS)
def test_they_equal_their_twins(name: str, K: int) -> None:
    how, twin = TWINS[name]
    for shape in SHAPES:
        x = normal(sum(shape), K, *shape, dtype=F64)
        expected = twin(list(x)) if x.numel() else x[0]
        assert_close(mean(how, x), expected, 1e-12, str(shape))


MLP = make_model("MLP", dtype=F64)
INNER = (SGD, {"lr": 0.1, "momentum": 0.5})


@pytest.mark.parametrize("name", TWINS)
def test_training_with_them_equals_its_twin(name: str) -> None:
    """Fifty steps of AllReduce, and of DiLoCo with an exchange at every fifth."""
    how, twin = TWINS[name]
    data, sgd = make_batches("MLP", 50, 3, 4, dtype=F64), OptimSpec(SGD, lr=0.1, momentum=0.5)
    average = rings.Exact(twin)
    theirs = compression.allreduce(MLP, data, 3, average, inner=INNER)
    assert_close(run(MLP, AllReduceStrategy(sgd, average=how), stacked(data)).losses, theirs.losses, 1e-10)
    theirs = compression.diloco(MLP, data, 3, average, H=5, inner=INNER)
    assert_close(run(MLP, DiLoCoStrategy(sgd, H=5, average=how), stacked(data)).losses, theirs.losses, 1e-10)


# ------------------------------------------------------------------------------------------- identities


def test_exact_codes_make_a_mean() -> None:
    x = normal(0, 5, 6, 7, dtype=F64).float().double()  # which float32 holds, but not their sums
    for how in (Ring("float32"), AllToAll("float32")):
        assert_close(mean(how, x), x.mean(0), 1e-6)
    assert torch.equal(mean(Ring("float32"), x[:1]), x[0])
    integers = normal(1, 4, 33).mul(20).round()  # all sums are integers below 256
    assert torch.equal(4 * mean(Ring("bfloat16"), integers), integers.sum(0))


def test_of_two_nodes_the_order_does_not_matter() -> None:
    x = normal(2, 2, 50)
    for how in (Ring("bfloat16"), AllToAll()):
        assert torch.equal(mean(how, x), mean(how, x.flip(0)))
    assert torch.equal(mean(Ring("bfloat16"), x), x.bfloat16().sum(0).div(2).float())


def test_a_strategy_with_a_mean_is_the_usual_one() -> None:
    data = stacked(make_batches("MLP", 5, 3, 4))
    start = make_model("MLP")
    one, other = (run(start, AllReduceStrategy("sgd", lr=0.1, average=how), data) for how in (None, Mean()))
    assert_same_bits(one.params, other.params)
    assert AllReduceStrategy("sgd", average=Mean()).exchanges == AllReduceStrategy("sgd").exchanges
    low = run(start, AllReduceStrategy("sgd", lr=0.1, average=Ring("bfloat16")), data)
    assert all(len(x) == 1 for x in low.state.shared["params"].values())  # stored once
    assert_close(low.params, one.params, 1e-3)


def test_the_ring_of_those_who_are_present() -> None:
    x = normal(3, 3, 100)
    for how in (Ring("bfloat16"), Ring("int8"), QuantisedRing(), AllToAll()):
        assert torch.equal(mean(how, x, among=[1, 4, 6]), mean(how, x))


def test_codes_that_draw() -> None:
    """Each hop, segment and exchange by itself, and the same again."""
    how, x = Ring(Quantise(2, stochastic=True)), torch.full((3, 2000), 0.5)
    x[:, ::2] = 1.0
    first = mean(how, x)
    assert torch.equal(first, mean(how, x))
    other = how({"w": x}, Part.alone(StackedCollectives(3), step=1))["w"][0]
    assert not torch.equal(first, other)
    segments = first[:1998].view(3, 666)
    assert not torch.equal(segments[0], segments[1])
    assert float(first.mean()) == pytest.approx(0.75, abs=0.03)


# ------------------------------------------------------------------------------------------- errors that grow


def relative_error(how: Average, x: Tensor) -> float:
    exact = x.double().mean(0)
    return float((mean(how, x).double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("codec", ["bfloat16", "float8_e4m3fn"])
def test_errors_grow_with_the_root_of_the_nodes(codec: str) -> None:
    """In a ring, about sqrt((K + 3) / 2) times that of one code; of two codes sqrt(2) times, whatever K is."""
    for K in (8, 64):
        x = normal(K, K, 64, 256)
        once = relative_error(Compressed(Mean(), codec, error_feedback=False), x)
        assert relative_error(Ring(codec), x) / once == pytest.approx(math.sqrt((K + 3) / 2), rel=0.08)
        assert relative_error(AllToAll(codec), x) / once == pytest.approx(math.sqrt(2), rel=0.03)


# ------------------------------------------------------------------------------------------- bytes


def bytes_of(how: Average, K: int) -> tuple[float, float]:
    """Sent and handed over by a node for a matrix of 40 x 30 and a vector of 7."""
    part = Part.alone(StackedCollectives(K))
    how({"w": normal(0, K, 40, 30), "v": normal(1, K, 7)}, part)
    return part.comm.ledger.total_bytes, part.comm.ledger.total_payload_bytes


@pytest.mark.parametrize("K", [2, 5])
def test_bytes(K: int) -> None:
    P, ring = 1207, 2 * (K - 1) / K
    assert bytes_of(Ring("bfloat16"), K) == (ring * 2 * P, 2 * P)
    assert bytes_of(Mean(), K) == (ring * 4 * P, 4 * P)
    vector = {2: 2, 5: 4}[K]  # segments of the vector: of 4 and 3, of 2, 2, 2 and 1
    assert bytes_of(Ring("int8"), K)[1] == P + 4 * (K + vector)
    tables = 2 * K + {2: 4, 5: 7}[K]
    assert bytes_of(QuantisedRing(), K)[0] == pytest.approx(ring * (P + 1024 * tables))
    assert bytes_of(AllToAll(), K)[0] == pytest.approx(ring * (P + 4 * (40 + 7)))


# ------------------------------------------------------------------------------------------- in use


@pytest.mark.parametrize("how", [Ring("bfloat16"), QuantisedRing(), AllToAll()], ids=repr)
def test_on_processes_and_with_absent_nodes(how: Average) -> None:
    data = torch.utils.data.TensorDataset(*make_data("MLP", 64, dtype=F64))
    table = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 1], [1, 1, 1, 1], [0, 1, 1, 1]]).bool()
    late = Strategy("adamw", [Exchange(Outer(how), every=2, delay=1, lost=0.2)], lr=0.01)
    cases = [(AllReduceStrategy("sgd", lr=0.1, average=how), None), (late, Trace(table, rejoin="shared"))]
    for strategy, there in cases:
        report = vecgym.verify(strategy, MLP, data, 4, 2, steps=4, availability=there)
        assert report.passed, report


def test_derivatives_pass_straight_through() -> None:
    """Derivatives are those of the mean, whatever the code."""
    x = normal(4, 3, 10).requires_grad_()
    for how in (Ring("int8"), QuantisedRing(), AllToAll()):
        part = Part.alone(StackedCollectives(3))
        y = how({"w": x}, part)["w"]
        (found,) = torch.autograd.grad(y.square().sum(), x)
        assert_close(found, (2 * y / 3).expand(3, 10), 1e-6)
        assert len(part.comm.ledger) == 1


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "coordinates of each code": (lambda: Ring(RandomK(0.1)), ValueError, "Sparse"),
    "no code": (lambda: Ring(PowerSGD(2)), TypeError, "such as Cast"),  # type: ignore[arg-type]
    "no name": (lambda: AllToAll("fp8"), ValueError, "float8_e4m3fn"),
    "no type": (lambda: Cast("int8"), ValueError, "bfloat16"),
    "weights and an average": (
        lambda: AllReduceStrategy("sgd", weighting="examples", average=Robust()), ValueError, "leave one of them out"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused(name: str) -> None:
    call, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        call()


# ------------------------------------------------------------------------------------------- the codes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"])
def test_casts_are_those_of_torch(dtype: str) -> None:
    codec, x = Cast(dtype), normal(5, 3, 20)
    x[2] = 0
    read = codec.decode(codec.encode(x), x)
    torch_dtype = getattr(torch, dtype)
    if torch_dtype.itemsize > 1:
        assert torch.equal(read, x.to(torch_dtype).float())
    else:
        scale = torch.finfo(torch_dtype).max / x.abs().amax(1, keepdim=True)
        scale[2] = 1
        assert torch.equal(read, (x * scale).to(torch_dtype).float() / scale)
        assert float((read[:2] - x[:2]).abs().amax()) > 1e-3
    assert repr(Cast(torch_dtype)) == repr(codec)


def test_codes_of_doubles_are_read_as_doubles() -> None:
    x = normal(6, 2, 9, dtype=F64)
    codecs: list[Codec] = [Cast("float8_e5m2"), Cast("float16"), CentralBins(8)]
    for codec in codecs:
        read = codec.decode(codec.encode(x), x)
        assert read.dtype == F64
        assert_close(read, x, 0.2)
