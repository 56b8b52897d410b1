"""The chunked cosine transform and the choice of its strongest coefficients, against definitions, in float64."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.reference import demo as twin
from vecgym.compress.dct import (
    Grid,
    accumulate_dct_,
    basis,
    chunk_size,
    dct,
    from_chunks,
    grid,
    inverse_dct,
    mean_of_senders,
    strongest,
    to_chunks,
    topk_bytes,
)

SIZES = [1, 2, 3, 5, 8, 17, 64]
SHAPES: list[tuple[int, ...]] = [(), (1,), (10,), (128,), (67,), (12, 10), (96, 67), (8, 4, 3, 3), (1, 1, 1), (2, 3, 4)]


def draw(*shape: int, seed: int = 0, **kw: Any) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), **kw)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# ----------------------------------------------------------------------------------------- the transform


def defined(x: list[list[float]]) -> list[list[float]]:
    """X_kl = s_k s_l sum_mn x_mn cos(pi (m + 1/2) k / M) cos(pi (n + 1/2) l / N), as it is written."""
    M, N = len(x), len(x[0])

    def scale(k: int, size: int) -> float:
        return math.sqrt((1 if k == 0 else 2) / size)

    def wave(n: int, k: int, size: int) -> float:
        return math.cos(math.pi * (n + 0.5) * k / size)

    return [
        [
            scale(k, M) * scale(j, N) * sum(x[m][n] * wave(m, k, M) * wave(n, j, N) for m in range(M) for n in range(N))
            for j in range(N)
        ]
        for k in range(M)
    ]


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 7), (6, 1), (2, 2), (5, 8), (9, 4)])
def test_the_dct_is_its_definition(height: int, width: int) -> None:
    x = draw(3, 2, height, width)
    expected = torch.tensor([[defined(chunk.tolist()) for chunk in node] for node in x], dtype=torch.float64)
    close(dct(x), expected)


@pytest.mark.parametrize("n", [3, 5, 6, 10, 17, 45, 48, 64])
def test_where_a_wave_is_zero_it_is_exactly_zero(n: int) -> None:
    """(j + 1/2) k / n = 1/2, 3/2, ...; elsewhere no cosine is smaller than that of the nearest angle."""
    for transform_basis in (basis(n), basis(n, torch.float32), basis(n, torch.bfloat16), twin.basis(n)):
        for k in range(n):
            for j in range(n):
                zero = (2 * j + 1) * k % (2 * n) == n
                assert (transform_basis[k, j] == 0) == zero
    assert (n & (n - 1) == 0) == bool((basis(n) != 0).all())  # a power of two has none


@pytest.mark.parametrize("n", SIZES)
def test_the_dct_is_the_twins(n: int) -> None:
    close(basis(n), twin.basis(n))
    x = draw(n, n + 1)
    close(dct(x), twin.dct(x))
    close(inverse_dct(x), twin.inverse_dct(x))


def test_the_dct_is_scipys() -> None:
    fft = pytest.importorskip("scipy.fft")
    for n in SIZES:
        x = draw(2, n, n + 3)
        close(dct(x), torch.from_numpy(fft.dctn(x.numpy(), axes=(-2, -1), norm="ortho")))


@pytest.mark.parametrize("n", SIZES)
def test_the_dct_is_orthonormal_and_linear(n: int) -> None:
    close(basis(n) @ basis(n).T, torch.eye(n, dtype=torch.float64))
    x, y = draw(4, 3, n, 6), draw(4, 3, n, 6, seed=1)
    close(dct(x).flatten(2).norm(dim=-1), x.flatten(2).norm(dim=-1))  # of each chunk of each node
    close(inverse_dct(dct(x)), x)
    close(dct(inverse_dct(x)), x)
    close(dct(2 * x - 3 * y), 2 * dct(x) - 3 * dct(y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_dtype_keeps_its_own(dtype: torch.dtype) -> None:
    x = draw(2, 1, 8, 8)
    assert dct(x.to(dtype)).dtype == inverse_dct(x.to(dtype)).dtype == dtype
    torch.testing.assert_close(inverse_dct(dct(x.to(dtype))), x.to(dtype), rtol=4 * torch.finfo(dtype).eps, atol=0.1)


@pytest.mark.parametrize("transform", [dct, inverse_dct])
def test_derivatives_of_the_transform(transform: Any) -> None:
    x = draw(2, 3, 4, 5, requires_grad=True)
    assert torch.autograd.gradcheck(transform, x)
    assert torch.autograd.gradgradcheck(transform, x)


def test_a_basis_made_in_inference_mode_can_be_differentiated_with() -> None:
    code = """
import torch
from vecgym.compress.dct import dct
with torch.inference_mode():
    dct(torch.ones(1, 23, 29))
x = torch.ones(1, 23, 29, requires_grad=True)
dct(x).sum().backward()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# --------------------------------------------------------------------------------------------- chunks


@pytest.mark.parametrize("limit", [1, 4, 6, 64])
@pytest.mark.parametrize("n", range(1, 200, 13))
def test_a_chunk_is_the_largest_divisor(n: int, limit: int) -> None:
    assert chunk_size(n, limit) == twin.chunk_size(n, limit)


@pytest.mark.parametrize("limit", [1, 4, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_are_the_twins_and_go_back(shape: tuple[int, ...], limit: int) -> None:
    x, cut = draw(3, *shape), grid(shape, limit)
    chunks = to_chunks(x, cut)
    assert chunks.shape == (3, cut.chunks, cut.height, cut.width)
    folded = twin.fold(torch.Size(shape))
    pieces = twin.make_chunks(folded, limit)
    for node in range(3):
        expected = [x[node].reshape(folded)[piece] for piece in pieces]
        assert torch.equal(chunks[node].flatten(1), torch.stack([piece.flatten() for piece in expected]))
    assert torch.equal(from_chunks(chunks, cut, shape), x)


def test_strides_do_not_matter() -> None:
    x = draw(10, 12, 3).permute(2, 1, 0)  # [3, 12, 10]
    cut = grid((12, 10), 4)
    assert torch.equal(to_chunks(x, cut), to_chunks(x.contiguous(), cut))
    one = draw(1, 12, 10).expand(3, 12, 10)
    assert torch.equal(to_chunks(one, cut), to_chunks(one.contiguous(), cut))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0)])
def test_a_tensor_without_elements_has_no_chunks(shape: tuple[int, ...]) -> None:
    cut = grid(shape, 64)
    assert cut.chunks * cut.area == 0
    assert from_chunks(dct(to_chunks(torch.zeros(2, *shape), cut)), cut, shape).shape == (2, *shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_accumulating_is_the_sum(shape: tuple[int, ...]) -> None:
    x, cut = draw(3, *shape), grid(shape, 8)
    X = draw(3, cut.chunks, cut.area, seed=1)
    expected = 0.9 * X + dct(to_chunks(x, cut)).flatten(2)
    given = X
    assert accumulate_dct_(X, x, cut, decay=0.9) is given
    close(given, expected)


# ------------------------------------------------------------------------------- the strongest coefficients


def sorted_choice(x: Tensor, k: int) -> Tensor:
    """By a stable sort: the indices of the k largest magnitudes, ascending."""
    return x.abs().argsort(dim=-1, descending=True, stable=True)[..., :k].sort(-1).values


@pytest.mark.parametrize("n", [1, 2, 7, 61, 64, 256, 1024, 3584, 4096])
@pytest.mark.parametrize("k", [1, 3, 32])
def test_the_strongest_are_those_of_a_sort(n: int, k: int) -> None:
    """Also where many are equal: the first of them."""
    shape = (2, 3, n)
    for x in (draw(*shape), draw(*shape).mul(2).round(), draw(*shape).mul(0.4).round(), torch.zeros(*shape)):
        chosen = strongest(x, k)
        assert chosen.shape == (2, 3, min(k, n))
        assert torch.equal(chosen.sort(-1).values, sorted_choice(x, k))
        assert torch.equal(strongest(x.float(), k).sort(-1).values, sorted_choice(x.float(), k))


def test_a_tie_in_one_row_leaves_the_others() -> None:
    x = draw(4, 4096)
    x[1] = 0
    x[2, 17:90] = x[2].abs().max() + 1
    assert torch.equal(strongest(x, 32).sort(-1).values, sorted_choice(x, 32))
    assert torch.equal(strongest(x, 32)[1].sort().values, torch.arange(32))
    assert torch.equal(strongest(x, 32)[2].sort().values, torch.arange(17, 17 + 32))


@pytest.mark.parametrize("n", [64, 4096])
def test_what_is_not_a_number_is_sent_first(n: int) -> None:
    x = torch.zeros(2, n)
    x[0, 40] = x[0, 50] = math.nan
    x[0, 60] = math.inf
    assert set(strongest(x, 3)[0].tolist()) == {40, 50, 60}
    assert set(strongest(x, 4)[0].tolist()) == {0, 40, 50, 60}


def test_the_choice_is_not_differentiated_but_the_values_are() -> None:
    x = draw(2, 50, requires_grad=True)
    assert not strongest(x, 5).requires_grad
    chosen = strongest(x, 5)
    (gradient,) = torch.autograd.grad(x.gather(-1, chosen).sum(), x)
    assert torch.equal(gradient, torch.zeros_like(x).scatter(-1, chosen, 1.0))


def test_the_mean_is_over_the_senders() -> None:
    K, chunks, k, n = 5, 3, 4, 10
    x = draw(1, K, chunks, n)
    x[:, 0] = 0  # zeros count
    indices = strongest(x, k)
    values = x.gather(-1, indices)
    expected = torch.zeros(1, chunks, n, dtype=torch.float64)
    for chunk in range(chunks):
        for coefficient in range(n):
            sent = [x[0, i, chunk, coefficient] for i in range(K) if coefficient in indices[0, i, chunk].tolist()]
            expected[0, chunk, coefficient] = sum(sent, torch.tensor(0.0)) / max(len(sent), 1)
    close(mean_of_senders(indices, values, n), expected)
    assert torch.autograd.gradcheck(lambda v: mean_of_senders(indices, v, n), values.requires_grad_())


def test_the_mean_of_many_senders_in_half_precision() -> None:
    """bfloat16 has no number between 256 and 258, so counting in it stops."""
    K = 300
    indices, values = torch.zeros(1, K, 1, 1, dtype=torch.int64), torch.zeros(1, K, 1, 1, dtype=torch.bfloat16)
    values[0, 0] = 300.0
    assert mean_of_senders(indices, values, 2).flatten().tolist() == [1.0, 0.0]


@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_of_one_tensor(shape: tuple[int, ...]) -> None:
    pieces = twin.make_chunks(twin.fold(torch.Size(shape)), 8)
    sizes = [torch.zeros(twin.fold(torch.Size(shape)))[piece].numel() for piece in pieces]
    for k in (1, 5, 64):
        assert topk_bytes(shape, k, limit=8, value_bytes=4) == sum(min(k, size) * 12 for size in sizes)


def test_bytes_of_a_language_model() -> None:
    """1,176,764,416 parameters in full chunks of 64 x 64, 32 coefficients each: 110.32 MB."""
    parameters, area = 1_176_764_416, 64 * 64
    sent = topk_bytes((parameters // 64, 64), k=32, limit=64, value_bytes=4)
    assert sent == parameters // area * 32 * 12
    assert round(sent / 1e6, 2) == 110.32


def test_the_grid_of_a_model() -> None:
    assert grid((128, 784), 64) == Grid(2, 14, 64, 56)
    assert grid((), 64) == Grid(1, 1, 1, 1)
    assert grid((67,), 64) == Grid(1, 67, 1, 1)
    assert grid((32, 16, 3, 3), 64) == Grid(1, 3, 32, 48)
