"""Islands and mixing matrices: what they are, and how fast they mix, measured and against closed forms."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vecgym.collectives import topology
from vecgym.collectives.topology import (
    Mixing,
    check_doubly_stochastic,
    complete,
    exponential,
    metropolis_weights,
    one_peer_exponential,
    random_islands,
    random_matching,
    ring,
    sample_nodes,
    second_eigenvalue,
    spectral_gap,
    torus,
)
from vecgym.core import rng

SIZES = range(1, 41)
PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def log2(n: int) -> int:
    """The smallest m with 2^m >= n."""
    return next(m for m in itertools.count() if 2**m >= n)


def grid(n: int) -> tuple[int, int]:
    """The a <= b, a * b = n, that are closest to each other."""
    return min(((a, n // a) for a in range(1, n + 1) if n % a == 0 and a * a <= n), key=lambda ab: ab[1] - ab[0])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def matching(n: int, seed: int) -> Tensor:
    return random_matching(n, generator(seed))


# name -> (matrix, sizes, neighbours of each node)
GRAPHS: dict[str, tuple[Callable[[int], Tensor], list[int], Callable[[int], int]]] = {
    "complete": (complete, list(SIZES), lambda n: n - 1),
    "ring": (ring, list(SIZES), lambda n: min(2, n - 1)),
    "torus": (
        torus,
        [n for n in SIZES if n not in PRIMES],
        lambda n: 0 if n == 1 else sum(min(2, side - 1) for side in grid(n)),
    ),
    "exponential": (exponential, list(SIZES), log2),
    **{
        f"one_peer_exponential, round {k}": (
            functools.partial(one_peer_exponential, round=k),
            list(SIZES),
            lambda n: min(1, n - 1),
        )
        for k in (0, 1, 2, 5)
    },
    **{
        f"random_matching, seed {seed}": (
            functools.partial(matching, seed=seed),
            [n for n in SIZES if n == 1 or n % 2 == 0],
            lambda n: min(1, n - 1),
        )
        for seed in (0, 1)
    },
}


# --------------------------------------------------------------------------------------------- islands


@pytest.mark.parametrize("island_size", [1, 2, 3, 7, 10, 12])
def test_islands_partition_the_nodes(island_size: int) -> None:
    nodes = [3, 1, 4, 15, 9, 2, 6, 5, 35, 8]
    islands = random_islands(nodes, island_size, generator())
    assert sorted(itertools.chain(*islands)) == sorted(nodes)
    assert [len(island) for island in islands[:-1]] == [island_size] * (len(islands) - 1)
    assert len(islands[-1]) == (len(nodes) % island_size or island_size) or island_size > len(nodes)
    assert all(island == sorted(island) for island in islands)


def test_islands_and_samples_depend_on_the_generator_alone() -> None:
    drawn = [random_islands(range(12), 4, generator(seed)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    sampled = [sample_nodes(12, 5, generator(seed)) for seed in (0, 0, 1)]
    assert sampled[0] == sampled[1] != sampled[2]
    assert all(sorted(set(nodes)) == nodes and len(nodes) == 5 and set(nodes) <= set(range(12)) for nodes in sampled)


# ------------------------------------------------------------------------------------- every matrix


@pytest.mark.parametrize("name", GRAPHS)
def test_every_matrix_is_doubly_stochastic(name: str) -> None:
    """And commutes with its transpose, so that its second |eigenvalue| bounds how it contracts."""
    make, sizes, _ = GRAPHS[name]
    for n in sizes:
        W = make(n)
        assert W.shape == (n, n)
        assert W.dtype == torch.float64
        assert bool((W >= 0).all())
        for sums in (W.sum(0), W.sum(1)):
            torch.testing.assert_close(sums, torch.ones(n, dtype=torch.float64), rtol=0, atol=1e-15)
        torch.testing.assert_close(W @ W.T, W.T @ W, rtol=0, atol=1e-15)
        check_doubly_stochastic(W)


@pytest.mark.parametrize("name", GRAPHS)
def test_every_node_has_as_many_neighbours_as_the_closed_form_says(name: str) -> None:
    make, sizes, degree = GRAPHS[name]
    for n in sizes:
        links = (make(n) != 0) & ~torch.eye(n, dtype=torch.bool)
        assert links.sum(0).tolist() == links.sum(1).tolist() == [degree(n)] * n, n


@pytest.mark.parametrize("name", GRAPHS)
def test_who_hears_whom(name: str) -> None:
    """Every entry against its definition."""
    make, sizes, _ = GRAPHS[name]
    for n in sizes:
        W, m = make(n).tolist(), log2(n)
        for i, j in itertools.product(range(n), range(n)):
            ahead, behind = (j - i) % n, (i - j) % n
            if name == "complete":
                expected = 1 / n
            elif name == "ring":
                expected = 1 / min(n, 3) if ahead in (0, 1) or behind == 1 else 0
            elif name == "torus":
                expected = 1.0 if n == 1 else entry_of_torus(i, j, *grid(n))
            elif name == "exponential":
                expected = 1 / (1 + m) if ahead in (0, *[2**k for k in range(m)]) else 0
            elif name.startswith("one_peer") and n > 1:
                expected = 0.5 if ahead in (0, 2 ** (int(name.split()[-1]) % m)) else 0
            else:
                continue
            assert W[i][j] == pytest.approx(expected, abs=1e-15), (n, i, j)


def entry_of_torus(i: int, j: int, a: int, b: int) -> float:
    """1/5 for the node itself and for each step up, down, left, right that leads from i to j."""
    r, c = divmod(i, b)
    steps = [(r, c), ((r + 1) % a, c), ((r - 1) % a, c), (r, (c + 1) % b), (r, (c - 1) % b)]
    return steps.count(divmod(j, b)) / 5


@pytest.mark.parametrize("name", GRAPHS)
def test_the_distance_to_the_mean_contracts_by_the_second_eigenvalue(name: str) -> None:
    """At least, for any start; exactly so on its eigenvector. The mean stays."""
    make, sizes, _ = GRAPHS[name]
    for n in sizes:
        W = make(n)
        rate = second_eigenvalue(W)
        x = torch.randn(n, 7, generator=generator(n), dtype=torch.float64)
        y = W @ x
        torch.testing.assert_close(y.mean(0), x.mean(0), rtol=0, atol=1e-14)
        before, after = (x - x.mean(0)).norm(dim=0), (y - y.mean(0)).norm(dim=0)
        assert bool((after <= rate * before + 1e-13).all())
        if rate > 1e-9:  # else everything but the mean is gone at once
            values, vectors = torch.linalg.eig(W - complete(n))  # without the mean
            v = vectors[:, values.abs().argmax()]
            mixed = W.to(v.dtype) @ (v - v.mean())
            assert float(mixed.norm() / (v - v.mean()).norm()) == pytest.approx(rate, abs=1e-12)


# ---------------------------------------------------------------------------------------- eigenvalues


def spectrum(W: Tensor) -> list[float]:
    torch.testing.assert_close(W, W.T, rtol=0, atol=0)
    return torch.linalg.eigvalsh(W).tolist()


@pytest.mark.parametrize("n", range(3, 41))
def test_the_spectrum_of_the_ring(n: int) -> None:
    assert spectrum(ring(n)) == pytest.approx(sorted(1 / 3 + 2 / 3 * math.cos(2 * math.pi * k / n) for k in range(n)))


@pytest.mark.parametrize("n", [n for n in SIZES if n > 1 and n not in PRIMES])
def test_the_spectrum_of_the_torus(n: int) -> None:
    """With a = 2 too, where two neighbours are one node."""
    a, b = grid(n)
    turn = 2 * math.pi
    expected = [
        0.2 + 0.4 * math.cos(turn * k / a) + 0.4 * math.cos(turn * j / b)
        for k, j in itertools.product(range(a), range(b))
    ]
    assert spectrum(torus(n)) == pytest.approx(sorted(expected), abs=1e-13)


@pytest.mark.parametrize("n", SIZES[1:])
def test_the_gap_of_the_exponential_graph(n: int) -> None:
    gap = spectral_gap(exponential(n))
    if n % 2 == 0:
        assert gap == pytest.approx(2 / (1 + log2(n)), abs=1e-13)
    else:
        assert gap > 2 / (1 + log2(n)) - 1e-13


def test_gaps_at_the_extremes() -> None:
    assert spectral_gap(complete(9)) == pytest.approx(1.0)
    assert spectral_gap(torch.eye(9, dtype=torch.float64)) == pytest.approx(0.0)
    assert spectral_gap(complete(1)) == 1.0
    assert second_eigenvalue(ring(2)) == pytest.approx(0.0, abs=1e-15)  # two nodes average at once


@pytest.mark.parametrize(("name", "start"), [("ring", 300), ("torus", 40), ("exponential", 40)])
def test_the_rate_measured_over_many_exchanges(name: str, start: int) -> None:
    """The distance after t exchanges goes as |lambda_2|^t, once faster modes are gone."""
    W = GRAPHS[name][0](36)
    x = torch.randn(36, 1, generator=generator(), dtype=torch.float64)
    x -= x.mean()
    early, late = torch.linalg.matrix_power(W, start) @ x, torch.linalg.matrix_power(W, start + 20) @ x
    assert float((late.norm() / early.norm()) ** (1 / 20)) == pytest.approx(second_eigenvalue(W), rel=1e-4)


# ------------------------------------------------------------------------------- one peer at a time


@pytest.mark.parametrize("n", [2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_one_peer_averages_exactly_after_log2_rounds_and_not_before(n: int, first: int) -> None:
    """From whichever round one starts; in binary arithmetic without any rounding."""
    product = torch.eye(n, dtype=torch.float64)
    for done, round in enumerate(range(first, first + log2(n))):
        assert not torch.equal(product, complete(n)), done
        product = one_peer_exponential(n, round) @ product
    assert torch.equal(product, complete(n))


@pytest.mark.parametrize("n", [3, 5, 6, 7, 12, 24])
def test_one_peer_is_not_exact_for_other_sizes(n: int) -> None:
    product = torch.eye(n, dtype=torch.float64)
    for round in range(3 * log2(n)):
        product = one_peer_exponential(n, round) @ product
        assert float((product - complete(n)).abs().max()) > 1e-6
    assert float((product - complete(n)).abs().max()) < 0.1  # but close


# ------------------------------------------------------------------------------------ random matching


def pairs(W: Tensor) -> frozenset[tuple[int, int]]:
    """The matching in a matrix; a failure if it is none."""
    n = len(W)
    assert W.diagonal().tolist() == [0.5] * n
    partner = (W - torch.eye(n, dtype=W.dtype) / 2).argmax(1).tolist()
    assert all(W[i, j] == 0.5 and partner[j] == i != j for i, j in enumerate(partner))
    assert int((W != 0).sum()) == 2 * n
    return frozenset((min(i, j), max(i, j)) for i, j in enumerate(partner))


def matchings(nodes: list[int]) -> list[list[tuple[int, int]]]:
    """All perfect matchings."""
    if not nodes:
        return [[]]
    first, *others = nodes
    return [[(first, other), *rest] for other in others for rest in matchings([i for i in others if i != other])]


def test_matchings_are_drawn_uniformly() -> None:
    """Chi-squared over the 15 matchings of 6 nodes: 63 is exceeded with a probability of 3e-8 if they are uniform."""
    everyone = [frozenset(chosen) for chosen in matchings(list(range(6)))]
    assert len(everyone) == 15
    counts = dict.fromkeys(everyone, 0)
    draws = 3000
    for i in range(draws):
        counts[pairs(random_matching(6, rng.generator(0, "matching", i)))] += 1
    expected = draws / 15
    assert sum((count - expected) ** 2 / expected for count in counts.values()) < 63


@pytest.mark.parametrize("n", [2, 4, 6, 8])
def test_the_mean_over_all_matchings_shrinks_the_squared_distance_by_the_closed_form(n: int) -> None:
    x = torch.randn(n, generator=generator(n), dtype=torch.float64)
    x -= x.mean()
    ratios = []
    for chosen in matchings(list(range(n))):
        y = x.clone()
        for i, j in chosen:
            y[i] = y[j] = (x[i] + x[j]) / 2
        ratios.append(float(y.square().sum() / x.square().sum()))
    assert sum(ratios) / len(ratios) == pytest.approx((n - 2) / (2 * (n - 1)), abs=1e-14)


@pytest.mark.parametrize("n", [4, 10, 32])
def test_the_measured_factor_of_random_matchings(n: int) -> None:
    """4000 draws with a fixed seed: within 5 standard errors, which chance alone leaves in 6 cases of 10^7."""
    x = torch.randn(n, generator=generator(n), dtype=torch.float64)
    x -= x.mean()
    draws = 4000
    mixed = [random_matching(n, rng.generator(1, "matching", i)) @ x for i in range(draws)]
    ratios = torch.stack(mixed).square().sum(1) / x.square().sum()
    error = float(ratios.std()) / math.sqrt(draws)
    assert error < 0.006  # sharp enough to tell (n - 2) / (2 (n - 1)) from 1/2, at n = 4 and 10
    assert float(ratios.mean()) == pytest.approx((n - 2) / (2 * (n - 1)), abs=5 * error)


# ------------------------------------------------------------------------------------- any graph


@pytest.mark.parametrize("seed", range(5))
def test_metropolis_weights_of_a_random_graph(seed: int) -> None:
    n = 12
    adjacency = torch.rand(n, n, generator=generator(seed)) < 0.3
    adjacency = adjacency | adjacency.T
    W = metropolis_weights(adjacency)
    check_doubly_stochastic(W)
    assert torch.equal(W, W.T)
    neighbours = [[j for j in range(n) if j != i and adjacency[i, j]] for i in range(n)]
    for i, j in itertools.product(range(n), range(n)):
        if i != j:
            degree = max(len(neighbours[i]), len(neighbours[j]))
            assert float(W[i, j]) == pytest.approx(1 / (1 + degree) if j in neighbours[i] else 0)


def test_metropolis_weights_of_known_graphs() -> None:
    everyone = torch.ones(5, 5)
    torch.testing.assert_close(metropolis_weights(everyone), complete(5))
    torch.testing.assert_close(metropolis_weights(ring(7) != 0), ring(7))
    assert torch.equal(metropolis_weights([[0, 0], [0, 0]]), torch.eye(2, dtype=torch.float64))


# ------------------------------------------------------------------------------------- Mixing


@pytest.mark.parametrize("name", GRAPHS)
def test_mixing_finds_every_entry(name: str) -> None:
    make, sizes, degree = GRAPHS[name]
    for n in sizes:
        W = make(n)
        mixing = Mixing.of(W)
        rebuilt = torch.zeros(n, n, dtype=torch.float64)
        ends = [*mixing.starts.tolist()[1:], len(mixing.sources)]
        for i, (start, end) in enumerate(zip(mixing.starts.tolist(), ends)):
            rebuilt[i, mixing.sources[start:end]] = mixing.values[start:end]
        assert torch.equal(rebuilt, W)
        assert len(mixing.links.senders) == n * degree(n)


def test_mixing_handles_empty_rows_and_diagonals() -> None:
    W = torch.tensor([[0.0, 0.0, 0.0], [0.5, 0.0, 0.5], [0.0, 0.0, 1.0]])
    mixing = Mixing.of(W)
    assert mixing.sources.tolist() == [0, 2, 2]
    assert mixing.starts.tolist() == [0, 0, 2]
    assert len(mixing.links.senders) == 2


def test_large_sparse_graphs_are_gathered_and_small_or_dense_ones_multiplied() -> None:
    assert not Mixing.of(ring(32)).sparse
    assert Mixing.of(ring(64)).sparse
    assert Mixing.of(exponential(256)).sparse
    assert not Mixing.of(exponential(64)).sparse
    assert not Mixing.of(complete(256)).sparse


# --------------------------------------------------------------------------------------------- errors


def matrix(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (matrix([1.0, 0.0], [0.5, 0.5]), r"W: column 0 sums to 1\.5, not to 1.*metropolis_weights.*Sinkhorn"),
        (matrix([0.5, 0.5], [0.5, 0.6]), r"W: row 1 sums to 1\.1, not to 1"),
        (matrix([0.5, 0.5], [0.5, 0.5 + 2e-9]), r"W: row 1 sums to 1"),
        (matrix([1.5, -0.5], [-0.5, 1.5]), r"W\[0, 1\] = -0\.5 is negative"),
        (matrix([0.5, math.nan], [0.5, 0.5]), r"W\[0, 1\] = nan is negative or not a number"),
        (matrix([math.inf, 0.5], [0.5, 0.5]), r"W: row 0 sums to inf"),
        (torch.ones(2, 3), r"W has shape \[2, 3\]; a mixing matrix is square"),
        (torch.ones(2), r"W has shape \[2\]"),
        (torch.ones(0, 0), r"W has shape \[0, 0\]"),
        (torch.eye(2, dtype=torch.long), r"W has dtype torch.int64.*W\.double\(\)"),
    ],
)
def test_what_is_not_doubly_stochastic_is_refused(weights: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_doubly_stochastic(weights, "W")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [3, 7, 12, 40])
def test_rounded_matrices_are_accepted_in_their_dtype(n: int, dtype: torch.dtype) -> None:
    check_doubly_stochastic(ring(n).to(dtype))
    check_doubly_stochastic(complete(n).to(dtype))


@pytest.mark.parametrize("n", PRIMES)
def test_a_prime_number_of_nodes_has_no_torus(n: int) -> None:
    with pytest.raises(ValueError, match=f"K={n} is prime: give num_nodes=") as error:
        torus(n)
    advised = str(error.value).split("give num_nodes=")[1].split(",")[0].split(" or ")
    for size in advised:
        assert torus(int(size)).shape == (int(size), int(size))


@pytest.mark.parametrize("n", [3, 5, 41])
def test_an_odd_number_of_nodes_has_no_matching(n: int) -> None:
    with pytest.raises(ValueError, match=f"K={n} is odd: give num_nodes={n - 1} or {n + 1}"):
        random_matching(n, generator())


@pytest.mark.parametrize("adjacency", [torch.ones(2, 3), torch.ones(3), [[0, 1], [0, 0]]])
def test_what_is_not_an_undirected_graph_is_refused(adjacency: Tensor) -> None:
    with pytest.raises(ValueError, match=r"must be \[K, K\] and symmetric"):
        metropolis_weights(adjacency)


def test_no_global_random_state_is_used() -> None:
    before = torch.get_rng_state()
    random_matching(8, generator())
    random_islands(range(8), 2, generator())
    assert torch.equal(before, torch.get_rng_state())
    assert topology.random_matching(8, generator(3)).equal(random_matching(8, generator(3)))
