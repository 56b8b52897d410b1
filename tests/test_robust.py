"""Rules that see the whole vector, and liars who know who is honest, against plain loops written from the papers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from tests.helpers import assert_close, run
from tests.test_average import Two, batches
from vecgym import Trainer, sweep, verify
from vecgym.availability import Trace
from vecgym.collectives import StackedCollectives
from vecgym.collectives.stacked import GroupCollectives
from vecgym.compress import TopK
from vecgym.core import tree
from vecgym.core.tree import Tree
from vecgym.data import flip_labels, partition_iid, partition_shards
from vecgym.runs.memory import stepping
from vecgym.simulation import Part
from vecgym.strategy import (
    Average,
    Compressed,
    Corrupted,
    DiLoCoStrategy,
    Exchange,
    Outer,
    Robust,
    Sparse,
    Strategy,
)
from vecgym.strategy.robust.vectors import LARGE, distances, ordered

Rows = Sequence[Sequence[float]]

# ------------------------------------------------------------------------------------------------- the naive rules


def gap(a: Sequence[float], b: Sequence[float]) -> float:
    return math.sqrt(sum((u - v) ** 2 for u, v in zip(a, b)))


def mean_of(rows: Rows) -> list[float]:
    return [sum(column) / len(column) for column in zip(*rows)]


def naive_median(rows: Rows, f: int) -> list[float]:
    found = []
    for column in zip(*rows):
        values, n = sorted(column), len(column)
        found.append(values[n // 2] if n % 2 else (values[n // 2 - 1] + values[n // 2]) / 2)
    return found


def naive_trimmed(rows: Rows, f: int) -> list[float]:
    return mean_of(list(zip(*[sorted(column)[f : len(column) - f] for column in zip(*rows)])))


def scores(rows: Rows, near: int) -> list[float]:
    found = []
    for i, x in enumerate(rows):
        to_others = sorted(gap(x, y) ** 2 for j, y in enumerate(rows) if j != i)
        found.append(sum(to_others[:near]))
    return found


def naive_krum(rows: Rows, f: int, less: int = 1) -> list[float]:
    of = scores(rows, len(rows) - f - less)
    return list(rows[of.index(min(of))])


def naive_multi_krum(rows: Rows, f: int, m: int | None = None, less: int = 1) -> list[float]:
    of = scores(rows, len(rows) - f - less)
    best = sorted(range(len(rows)), key=lambda i: (of[i], i))[: len(rows) - f if m is None else m]
    return mean_of([rows[i] for i in best])


def naive_mda(rows: Rows, f: int) -> list[float]:
    best: tuple[int, ...] = ()
    least = math.inf
    for chosen in itertools.combinations(range(len(rows)), len(rows) - f):
        width = max((gap(rows[i], rows[j]) for i in chosen for j in chosen), default=0.0)
        if width < least:
            best, least = chosen, width
    return mean_of([rows[i] for i in best])


def naive_geometric_median(rows: Rows, f: int, nu: float = 0.1, iterations: int = 3) -> list[float]:
    z = [0.0] * len(rows[0])
    for _ in range(iterations):
        w = [1 / max(nu, gap(x, z)) for x in rows]
        z = [sum(a * x[c] for a, x in zip(w, rows)) / sum(w) for c in range(len(z))]
    return z


def naive_clipping_around(rows: Rows, v: Sequence[float], tau: float = 100.0, iterations: int = 1) -> list[float]:
    v = list(v)
    for _ in range(iterations):
        steps = []
        for x in rows:
            length = gap(x, v)
            steps.append([(a - b) * (1.0 if length <= tau else tau / length) for a, b in zip(x, v)])
        v = [b + s for b, s in zip(v, mean_of(steps))]
    return v


def naive_clip(rows: Rows, clip: float) -> list[list[float]]:
    lengths = [math.sqrt(sum(a * a for a in x)) for x in rows]
    return [[a * (1.0 if length <= clip else clip / length) for a in x] for x, length in zip(rows, lengths)]


def naive_nnm(rows: Rows, f: int) -> list[list[float]]:
    found = []
    for x in rows:
        near = sorted(range(len(rows)), key=lambda j: (gap(x, rows[j]), j))[: len(rows) - f]
        found.append(mean_of([rows[j] for j in near]))
    return found


def naive_sign_majority(rows: Rows, f: int) -> list[float]:
    votes = [sum((a > 0) - (a < 0) for a in column) for column in zip(*rows)]
    return [float((v > 0) - (v < 0)) for v in votes]


NAIVE: dict[str, tuple[Callable[[int], Robust], Callable[[Rows, int], list[float]]]] = {
    "mean": (lambda f: Robust("mean"), lambda rows, f: mean_of(rows)),
    "median": (lambda f: Robust("median"), naive_median),
    "trimmed": (lambda f: Robust("trimmed_mean", f=f), naive_trimmed),
    "krum": (lambda f: Robust("krum", f=f), naive_krum),
    "krum, paper": (lambda f: Robust("krum", f=f, neighbours="n-f-2"), lambda x, f: naive_krum(x, f, less=2)),
    "multi-krum": (lambda f: Robust("multi_krum", f=f), naive_multi_krum),
    "multi-krum of 2, paper": (
        lambda f: Robust("multi_krum", f=f, m=2, neighbours="n-f-2"),
        lambda rows, f: naive_multi_krum(rows, f, 2, less=2),
    ),
    "mda": (lambda f: Robust("mda", f=f), naive_mda),
    "geometric median": (lambda f: Robust("geometric_median"), naive_geometric_median),
    "geometric median, near": (
        lambda f: Robust("geometric_median", nu=3.0, iterations=8),
        lambda rows, f: naive_geometric_median(rows, f, 3.0, 8),
    ),
    "centred clipping": (
        lambda f: Robust("centred_clipping", tau=1.5, iterations=3),
        lambda rows, f: naive_clipping_around(rows, [0.0] * len(rows[0]), 1.5, 3),
    ),
    "clipping": (lambda f: Robust("norm_clipping"), lambda rows, f: mean_of(naive_clip(rows, 2.0))),
    "majority": (lambda f: Robust("sign_majority"), naive_sign_majority),
    "clipped krum": (lambda f: Robust("krum", f=f, clip=1.5), lambda x, f: naive_krum(naive_clip(x, 1.5), f)),
    "mixed mean": (lambda f: Robust("mean", f=f, nnm=True), lambda rows, f: mean_of(naive_nnm(rows, f))),
    "clipped, mixed, clipping": (
        lambda f: Robust("norm_clipping", f=f, clip=0.7, nnm=True),
        lambda rows, f: mean_of(naive_nnm(naive_clip(rows, 0.7), f)),
    ),
    "mixed trimmed mean": (
        lambda f: Robust("trimmed_mean", f=f, nnm=True),
        lambda rows, f: naive_trimmed(naive_nnm(rows, f), f),
    ),
    "mixed geometric median": (
        lambda f: Robust("geometric_median", f=f, nnm=True),
        lambda rows, f: naive_geometric_median(naive_nnm(rows, f), f),
    ),
}
SETS = [(5, 1, 3), (6, 2, 4), (7, 3, 40), (8, 2, 1), (9, 0, 5), (11, 3, 17)]  # n, f and d


def drawn(n: int, f: int, d: int, seed: int = 0) -> Tensor:
    """n vectors around one, f of them far away."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g, dtype=torch.float64) + torch.randn(d, generator=g, dtype=torch.float64)
    x[torch.randperm(n, generator=g)[:f]] *= -9
    return x


@pytest.mark.parametrize("sizes", SETS)
@pytest.mark.parametrize("rule", NAIVE)
def test_a_rule_is_its_naive_twin(rule: str, sizes: tuple[int, int, int]) -> None:
    n, f, d = sizes
    f = min(f, (n - 3) // 2) if "paper" in rule else f
    make, naive = NAIVE[rule]
    for seed in range(3):
        x = drawn(n, f, d, seed)
        expected = torch.tensor(naive(x.tolist(), f), dtype=torch.float64)
        assert_close({"": make(f).aggregate(x)}, {"": expected}, 1e-12)


@pytest.mark.parametrize("rule", NAIVE)
def test_a_rule_sees_all_tensors_as_one(rule: str) -> None:
    """A tensor of one number, and one of many, in two configurations."""
    how, comm = NAIVE[rule][0](2), GroupCollectives(StackedCollectives(7), 2)
    x = torch.stack([drawn(7, 2, 13), drawn(7, 2, 13, seed=5)])
    values = {"a": x[..., :1].squeeze(-1), "b": x[..., 1:].unflatten(-1, (3, 4))}
    part = Part.alone(comm, size=2)
    once = {"a": torch.zeros(2, 1, dtype=torch.float64), "b": torch.zeros(2, 1, 3, 4, dtype=torch.float64)}
    part.shared = {"centre": once}  # type: ignore[assignment]
    found = how(values, part)
    for c in range(2):
        alone = how.aggregate(x[c])
        assert_close({"": found["a"][c]}, {"": alone[:1]}, 1e-13)
        assert_close({"": found["b"][c].flatten()}, {"": alone[1:]}, 1e-13)


def test_a_rule_of_each_tensor_is_another_one() -> None:
    """The same two liars, each in one tensor only: by tensors another node would be chosen for each of them."""
    x = {"a": torch.tensor([0.0, 0.1, 9.0, 0.3, 0.2]), "b": torch.tensor([0.3, 9.0, 0.0, 0.1, 0.1])}
    part = Part.alone(StackedCollectives(5))
    found = Robust("krum", f=2)(x, part)
    (of_both,) = [i for i in range(5) if x["a"][i] == found["a"][0] and x["b"][i] == found["b"][0]]
    assert of_both == 4
    each = {name: Robust("krum", f=2).aggregate(y[:, None]) for name, y in x.items()}
    assert not torch.equal(each["a"], found["a"])


def test_of_equal_scores_the_first() -> None:
    x = torch.tensor([[8.0], [1.0], [2.0], [3.0], [4.0], [-8.0]], dtype=torch.float64)
    assert Robust("krum", f=2).aggregate(x) == 2  # 2 and 3 have the scores 1 + 1 + 4
    assert Robust("multi_krum", f=2, m=1).aggregate(x) == 2
    assert Robust("krum", f=1).aggregate(torch.tensor([[5.0], [7.0], [20.0]])) == 5
    assert Robust("mda", f=1).aggregate(torch.tensor([[0.0], [1.0], [2.0]])) == 0.5


def test_the_paper_may_choose_another_node_than_byzfl() -> None:
    x = torch.tensor([[0.0], [0.3], [1.0], [1.45], [1.9]])
    assert Robust("krum", f=1).aggregate(x) != Robust("krum", f=1, neighbours="n-f-2").aggregate(x)


@pytest.mark.parametrize("n", [5, 8])
def test_rules_that_are_a_mean(n: int) -> None:
    """Without liars, for limits that nobody reaches, and for buckets of all."""
    x = drawn(n, 0, 6)
    for how in (
        Robust("trimmed_mean", f=0), Robust("multi_krum", f=0), Robust("mda", f=0), Robust("norm_clipping", clip=1e9),
        Robust("centred_clipping", tau=1e9), Robust("geometric_median", nu=1e9), Robust("median", bucketing=n),
        Robust("median", f=0, nnm=True), Robust("krum", f=0, nnm=True), Robust("multi_krum", f=1, m=n),
    ):  # fmt: skip
        assert_close({"": how.aggregate(x)}, {"": x.mean(0)}, 1e-13, repr(how))


@pytest.mark.parametrize("rule", [name for name in NAIVE if "major" not in name])
def test_one_outlier_does_no_harm(rule: str) -> None:
    """However far it is; but for the mean, which follows, and clipping, which follows as far as its limit."""
    x = drawn(9, 0, 5)
    x[4] = 1e6
    far = (NAIVE[rule][0](1).aggregate(x) - x[[0, 1, 2, 3, 5, 6, 7, 8]].mean(0)).norm()
    assert (far > 1e4) == (rule in ("mean", "mixed mean"))
    assert rule in ("mean", "mixed mean") or far < 4


def test_nodes_in_another_order_and_moved_together() -> None:
    x, shift = drawn(8, 2, 6), torch.full((6,), 3.0, dtype=torch.float64)
    for name in ("median", "trimmed", "krum", "multi-krum", "mda", "mixed trimmed mean"):
        how = NAIVE[name][0](2)
        assert_close({"": how.aggregate(x[torch.randperm(8)])}, {"": how.aggregate(x)}, 1e-13, name)
        assert_close({"": how.aggregate(x + shift)}, {"": how.aggregate(x) + shift}, 1e-12, name)


def test_many_iterations_reach_the_geometric_median() -> None:
    x = drawn(7, 2, 4)
    z = Robust("geometric_median", nu=1e-9, iterations=2000).aggregate(x)
    pull = ((x - z) / (x - z).norm(dim=1, keepdim=True)).sum(0)
    assert pull.norm() < 1e-9


# --------------------------------------------------------------------------------------------------- numerical traps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("n", [2, 3, 5, 16, 31])
def test_many_values_are_sorted_as_torch_does(n: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, n, 6001, generator=torch.Generator().manual_seed(n)).to(dtype)
    x[0, 0, ::7], x[1, n - 1, ::5], x[0, n - 1, ::3] = torch.inf, -torch.inf, x[0, 0, ::3]
    x[0, 1, :9] = torch.nan  # which counts as the largest
    before = x.clone()
    assert torch.equal(ordered(x).nan_to_num(7e7), x.sort(1).values.nan_to_num(7e7))
    assert torch.equal(x.nan_to_num(7e7), before.nan_to_num(7e7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rule", NAIVE)
def test_many_values_are_those_of_few_at_a_time(rule: str, dtype: torch.dtype) -> None:
    """Large tensors take other functions of torch and numpy; those that are differentiated take the usual ones."""
    x = drawn(7, 2, 3000).to(dtype)
    if rule not in ("mean", "clipped, mixed, clipping"):  # where it becomes 0, as far from all others of norm 0.7
        x[3, 5] = torch.nan
    assert x.numel() > LARGE
    how = NAIVE[rule][0](2)
    found = how.aggregate(x.clone())
    if dtype == torch.bfloat16:  # of which a sum is rounded once, or at each number
        assert_close({"": found.float()}, {"": how.aggregate(x.float())}, 2e-2)
    else:
        wanted = how.aggregate(x.clone().requires_grad_())
        assert_close({"": found}, {"": wanted}, 1e-13 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e30])
@pytest.mark.parametrize("rule", [name for name in NAIVE if name != "mean"])
def test_a_liar_that_sends_no_numbers_does_no_harm(rule: str, value: float) -> None:
    """float32, in which the square of 1e30 is infinite. What chooses does as for a node that is merely far away."""
    x = drawn(9, 0, 5).float()
    rest = x[[0, 1, 2, 3, 5, 6, 7, 8]]
    x[4] = 1e9
    far = NAIVE[rule][0](1).aggregate(x.clone())
    x[4, 2:] = value
    found = NAIVE[rule][0](1).aggregate(x)
    assert found.isfinite().all()
    if rule in ("krum", "krum, paper", "multi-krum", "multi-krum of 2, paper", "mda"):
        assert_close({"": found}, {"": far}, 1e-6)
    elif rule in ("geometric median", "geometric median, near"):
        assert_close({"": found}, {"": NAIVE[rule][0](1).aggregate(rest)}, 1e-6)
    elif rule in ("median", "trimmed") and value > 0:
        assert_close({"": found}, {"": far}, 1e-6)


def test_distances_of_honest_nodes_do_not_depend_on_liars() -> None:
    """float32 vectors of norm 1e3 that are 1e-2 apart, beside a node at 1e18."""
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(1, 70, generator=g) * 100 + torch.randn(70, 70, generator=g) * 1e-3)[None]
    x[0, 69] = 1e18
    exact = torch.cdist(x[0, :69].double(), x[0, :69].double(), compute_mode="donot_use_mm_for_euclid_dist") ** 2
    found = distances({"a": x[..., :30], "b": x[..., 30:]})[0]
    assert torch.allclose(found[:69, :69], exact, rtol=1e-5, atol=1e-12)
    assert torch.equal(found, found.T)


# --------------------------------------------------------------------------------------------- in islands, in buckets


@pytest.mark.parametrize("rule", ["krum", "multi-krum", "geometric median", "mixed trimmed mean"])
def test_islands_apply_the_rule_apart(rule: str) -> None:
    """11 nodes in islands of 4, 4 and 3."""
    how, x, part = NAIVE[rule][0](1), drawn(11, 2, 6), Part.alone(StackedCollectives(11), seed=3)
    how.island_size = 4
    groups = how.groups(part)
    assert groups is not None
    assert sorted(map(len, groups)) == [3, 4, 4]
    found = how({"a": x[:, 0], "b": x[:, 1:]}, part)
    for island in map(list, groups):
        expected = torch.tensor(NAIVE[rule][1](x[island].tolist(), 1), dtype=torch.float64)
        for node in island:
            assert_close({"": torch.cat([found["a"][node][None], found["b"][node]])}, {"": expected}, 1e-12)


def test_buckets_are_drawn_anew() -> None:
    """Of 7 nodes three buckets of 2, and one of 1 with the same weight; every other exchange another order."""
    x, how = drawn(7, 1, 3), Robust("geometric_median", bucketing=2)
    seen = set()
    for step in range(6):
        part = Part.alone(StackedCollectives(7), step=step, seed=1)
        order = torch.randperm(7, generator=part.generator("buckets", step)).tolist()
        rows = [mean_of(x[order[i : i + 2]].tolist()) for i in range(0, 7, 2)]
        found = how({"w": x}, part)["w"][0]
        assert_close({"": found}, {"": torch.tensor(naive_geometric_median(rows, 0), dtype=torch.float64)}, 1e-12)
        seen.add(tuple(order))
    assert len(seen) == 6


def test_a_users_rule_by_tensors_and_as_a_whole() -> None:
    def longest(x: Tensor) -> Tensor:  # the node with the largest norm
        return x[:, x.flatten(2).norm(dim=-1)[0].argmax()]

    a, b = torch.tensor([[3.0], [4.0], [0.0]]), torch.tensor([[[2.0, 2.0]], [[0.0, 0.0]], [[1.0, 9.0]]])
    part = Part.alone(StackedCollectives(3))
    apart, whole = (Robust(longest, whole=whole)({"a": a, "b": b}, part) for whole in (False, True))
    assert_close(apart, {"a": a[1:2], "b": b[2:]}, 0)
    assert_close(whole, {"a": a[2:], "b": b[2:]}, 0)
    with pytest.raises(ValueError, match=r"rule returned float32 \[1, 3, 1\] of float32 \[1, 3, 3\]: return \[1, \*\]"):
        Robust(lambda x: x[..., :1], whole=True)({"a": a, "b": b}, part)


# ------------------------------------------------------------------------------------------------------ in whole runs

K, LR = 5, 0.1


def start() -> Tensor:
    return torch.cat([p.detach() for p in Two().parameters()])


def joint(params: Tree) -> Tensor:
    return torch.cat([params["a"], params["b"]], -1)


def of(*exchanges: Exchange, lr: Any = LR) -> Strategy:
    return Strategy("sgd", list(exchanges), lr=lr)


@pytest.mark.parametrize("rule", NAIVE)
def test_training_with_a_rule(rule: str) -> None:
    """Data-parallel SGD whose gradient is the rule's, of all coordinates of the model, while node 1 lies."""
    how, naive = NAIVE[rule]
    theta, v = start(), [0.0] * 7
    for c in batches(6):
        g = theta - c.mean(1)
        g[1] = -20 * g[1]
        if rule == "centred clipping":
            v = naive_clipping_around(g.tolist(), v, 1.5, 3)  # from where the last step ended
            agreed = v
        else:
            agreed = naive(g.tolist(), 1)
        theta = theta - LR * torch.tensor(agreed, dtype=torch.float64)
    lie = Corrupted(how(1), [1], lambda x: -20 * x)
    ours = run(Two(), of(Exchange(lie, of="gradients")), batches(6))
    assert_close({"": joint(ours.params)}, {"": theta.expand(K, -1)}, 1e-12)


@pytest.mark.parametrize("delay", [0, 2])
def test_the_centre_of_parameters_is_what_was_agreed(delay: int) -> None:
    """It begins at the initial parameters, and a late result is that of its own time."""
    theta, v, under_way = start().repeat(K, 1), start().tolist(), {}
    for t, c in enumerate(batches(9)):
        theta = theta - LR * (theta - c.mean(1))
        if (t + 1) % 3 == 0:
            v = naive_clipping_around(theta.tolist(), v, 0.2, 2)
            under_way[t + delay] = torch.tensor(v, dtype=torch.float64).expand(K, -1)
        theta = under_way.pop(t, theta)
    exchange = Exchange(Robust("centred_clipping", tau=0.2, iterations=2), every=3, delay=delay)
    ours = run(Two(), of(exchange), batches(9))
    assert_close({"": joint(ours.params)}, {"": theta}, 1e-12)
    assert_close({"": joint(ours.state.shared["0.0/centre"])}, {"": torch.tensor([v], dtype=torch.float64)}, 1e-12)


def test_the_centre_stays_with_those_who_are_present() -> None:
    """Some sample of the nodes meets each time; the centre is one for all, also for nodes that were not there."""
    theta, v = start().repeat(K, 1), start().tolist()
    exchange = Exchange(Robust("centred_clipping", tau=0.2), every=2, participation=0.6)
    ours = run(Two(), of(exchange), batches(8), seed=3)
    for t, c in enumerate(batches(8)):
        there = list(ours.active[t] or ())
        assert len(there) == 3
        theta[there] -= LR * (theta[there] - c.mean(1)[there])
        if t % 2:
            v = naive_clipping_around(theta[there].tolist(), v, 0.2)
            theta[there] = torch.tensor(v, dtype=torch.float64)
    assert len({node for some in ours.active for node in some or ()}) == K
    assert_close({"": joint(ours.params)}, {"": theta}, 1e-12)


def test_a_centre_in_fragments_and_of_drawn_coordinates() -> None:
    """Each fragment has its own norm and centre; of drawn coordinates the norm is theirs."""
    exchange = Exchange(Robust("centred_clipping", tau=0.2), every=2, fragments=2, offsets=[1, 2])
    ours = run(Two(), of(exchange), batches(1))
    after = {"a": start()[:4], "b": start()[4:]}
    v = naive_clipping_around(
        (after["a"] - LR * (after["a"] - batches(1)[0].mean(1)[:, :4])).tolist(), start()[:4].tolist(), 0.2
    )
    assert_close({"": ours.params["a"][0]}, {"": torch.tensor(v, dtype=torch.float64)}, 1e-12)
    x, part = drawn(K, 1, 6), Part.alone(StackedCollectives(K), step=3)
    how = Sparse(0.5, Robust("krum", f=1))
    found = how({"w": x.clone()}, part)["w"]
    changed = (found != x).any(0)
    assert 0 < changed.sum() < 6
    assert_close({"": found[0, changed]}, {"": Robust("krum", f=1).aggregate(x[:, changed])}, 0)


def test_absent_nodes_do_not_count() -> None:
    present = torch.ones(6, 6, dtype=torch.bool)
    present[2:, 0] = present[4:, 3] = present[4:, 1] = False
    exchange = Exchange(Robust("krum", f=1), every=1)
    data = TensorDataset(torch.randn(64, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    report = verify(of(exchange), Two(), data, num_nodes=6, num_processes=3, steps=6, availability=Trace(present))
    assert report.passed, report
    trainer = Trainer(Two(), data)
    with pytest.raises(ValueError, match="f=2 liars of 3 nodes are too many"):
        trainer.fit(
            of(Exchange(Robust("krum", f=2))), 6, max_steps=6, batch_size=2, device="cpu", progress=False,
            availability=Trace(present),
        )  # fmt: skip


def test_what_a_rule_decodes() -> None:
    """Of codes the same as of the values that they decode to; some go to a server and back."""
    x, strongest = drawn(7, 2, 9), torch.zeros(7, 9, dtype=torch.float64)
    kept = x.abs().topk(4, dim=1).indices
    strongest.scatter_(1, kept, x.gather(1, kept))
    for server in (False, True):
        comm = StackedCollectives(7)
        how = Compressed(Robust("krum", f=2, server=server), TopK(k=4), error_feedback=False)
        found = how({"w": x}, Part.alone(comm))["w"][0]
        assert_close({"": found}, {"": Robust("krum", f=2).aggregate(strongest)}, 0)
        sent = {entry.operation: entry.sent_bytes for entry in comm.ledger}
        assert sent == ({"server_gather": 4 * 12, "server_send": 0} if server else {"all_gather": 6 * 4 * 12})


@pytest.mark.parametrize("how", [Robust("krum", f=1), Robust("centred_clipping"), Robust("median", bucketing=2)])
def test_bytes_of_an_all_gather_and_of_a_server(how: Robust) -> None:
    size, b = 7, 8
    ours = run(Two(), of(Exchange(how, every=2)), batches(4))
    assert [entry.sent_bytes for entry in ours.comm.ledger] == [(K - 1) * size * b] * 2
    how = Robust("median", server=True)
    ours = run(Two(), of(Exchange(how, every=4, participation=0.4)), batches(4))
    up, down = ours.comm.ledger
    assert up.sent_bytes == pytest.approx(0.4 * size * b)
    assert down.received_bytes == pytest.approx(0.4 * size * b)
    assert (joint(ours.params) == joint(ours.params)[0]).all()  # those who rest take the result


PROCESSES: dict[str, Callable[[], Average]] = {
    **{name: lambda rule=rule: NAIVE[rule][0](1) for name, rule in zip(NAIVE, NAIVE)},  # type: ignore[misc]
    "islands": lambda: Robust("multi_krum", f=0, m=2, island_size=3),
    "server": lambda: Robust("mda", f=1, server=True),
    **{attack: lambda attack=attack: Corrupted(Robust("krum", f=1), [1, 3], attack)  # type: ignore[misc]
       for attack in ("sign_flip", "ipm", "alie", "alie_minus", "gaussian", "mimic")},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSES)
def test_processes_and_stacks_compute_the_same(name: str) -> None:
    data = TensorDataset(torch.randn(64, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    report = verify(of(Exchange(PROCESSES[name](), every=2)), Two(), data, num_nodes=6, num_processes=2, steps=6)
    assert report.passed, report


def test_rules_and_limits_as_a_sweep() -> None:
    """Configurations that differ in tau share a stack, and are each what they are alone."""
    data = TensorDataset(torch.randn(64, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    settings: dict[str, Any] = {"num_nodes": K, "max_steps": 5, "batch_size": 4, "device": "cpu", "progress": False}

    def strategy(tau: float) -> Strategy:
        liars = Corrupted(Robust("centred_clipping", tau=tau), [0], "ipm", strength=10 * tau)
        return of(Exchange(Outer(liars), every=2))

    taus = [0.1, 0.3, 5.0]
    assert Exchange(Corrupted(Robust("centred_clipping"), [0], "ipm")).batched == ()
    found = sweep(Two(), data, strategy=strategy, grid={"tau": taus}, **settings)
    ends = set()
    for i, tau in enumerate(taus):
        trainer = Trainer(Two(), data)
        trainer.fit(strategy(tau), **settings)
        alone = torch.tensor(trainer.history.series("train_loss")[1])
        assert_close({"": torch.tensor(found.history(i).series("train_loss")[1])}, {"": alone}, 1e-12)
        ends.add(float(alone[-1]))
    assert len(ends) == 3


DERIVED: dict[str, Callable[[Any], Average]] = {
    "tau": lambda x: Robust("centred_clipping", tau=x, iterations=2),
    "nu": lambda x: Robust("geometric_median", nu=x / 2),
    "clip": lambda x: Robust("trimmed_mean", f=1, clip=x),
    "limit": lambda x: Robust("norm_clipping", clip=x),
    "strength": lambda x: Corrupted(Robust("geometric_median"), [1], "alie", strength=x),
}


@pytest.mark.parametrize("name", DERIVED)
def test_derivatives_with_respect_to_limits(name: str) -> None:
    def loss(x: Any) -> Tensor:
        exchange = Exchange(Outer(DERIVED[name](x)), every=2)
        return run(Two(), of(exchange), batches(5), differentiable=True).losses[-1].sum()

    x = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(loss(x), x)
    by_differences = (loss(0.4 + 1e-6) - loss(0.4 - 1e-6)) / 2e-6
    assert abs(by_differences) > 1e-4
    assert slope.item() == pytest.approx(by_differences.item(), rel=1e-5)


@pytest.mark.parametrize("rule", NAIVE)
def test_derivatives_through_a_rule(rule: str) -> None:
    """Of the run's last loss with respect to the inner rate, against differences; choices are constants."""

    def loss(lr: Any) -> Tensor:
        exchange = Exchange(NAIVE[rule][0](1), every=2)
        return run(Two(), of(exchange, lr=lr), batches(5), differentiable=True).losses[-1].sum()

    lr = torch.tensor(LR, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(loss(lr), lr)
    by_differences = (loss(LR + 1e-6) - loss(LR - 1e-6)) / 2e-6
    assert slope.item() == pytest.approx(by_differences.item(), rel=1e-5)


def test_a_checkpoint_holds_the_centre() -> None:
    """A run that goes on from a saved state, as if it had not stopped."""
    strategy = of(Exchange(Robust("centred_clipping", tau=0.2), of="gradients"))
    whole = run(Two(), strategy, batches(8), max_steps=8)
    first = run(Two(), strategy, batches(5), max_steps=8)
    assert "0.0/centre" in first.state.shared
    second = run(Two(), strategy, batches(8)[5:], max_steps=8, state=first.state)
    assert_close(second.params, whole.params, 0)


@pytest.mark.parametrize("rule", NAIVE)
def test_its_memory_is_known_before_a_run(rule: str) -> None:
    """Its steps work on tensors without values, too."""
    shapes = {"w": torch.empty(100_000, device="meta"), "b": torch.empty((), device="meta")}
    found = stepping(of(Exchange(NAIVE[rule][0](1), every=1)), shapes, 6, max_steps=4)
    assert found.complete
    assert found.temporary_bytes > 0


def test_diloco_with_a_rule() -> None:
    strategy = DiLoCoStrategy("sgd", H=2, lr=LR, average=Corrupted(Robust("multi_krum", f=1), [0], "ipm"))
    ours = run(Two(), strategy, batches(6))
    brick = of(Exchange(Outer(Corrupted(Robust("multi_krum", f=1), [0], "ipm")), every=2))
    assert_close(ours.params, run(Two(), brick, batches(6)).params, 0)


# ------------------------------------------------------------------------------------------------------------- attacks


class Sent(Average, batched=(), random=False):
    """Every node keeps what it has sent."""

    common = False

    def agree(self, x: Tree, part: Part, memory: Any) -> Tree:
        return tree.map(torch.clone, x)


def sent(
    x: Tensor, liars: Sequence[int], attack: Any, strength: Any = None, members: list[int] | None = None
) -> Tensor:
    comm = StackedCollectives(len(x)) if members is None else StackedCollectives(9).among(members)
    return Corrupted(Sent(), liars, attack, strength)({"w": x}, Part.alone(comm))["w"]


def deviation(rows: Rows) -> list[float]:
    m = mean_of(rows)
    return [math.sqrt(sum((x[c] - m[c]) ** 2 for x in rows) / (len(rows) - 1)) for c in range(len(m))]


ATTACKS: dict[str, Callable[[Rows, int], list[float]]] = {
    "sign_flip": lambda rows, n: [-a for a in mean_of(rows)],
    "ipm": lambda rows, n: [-2 * a for a in mean_of(rows)],
    "alie": lambda rows, n: [a + 1.5 * s for a, s in zip(mean_of(rows), deviation(rows))],
    "alie_minus": lambda rows, n: [
        a - NormalDist().inv_cdf((n - math.floor(n / 2 + 1)) / len(rows)) * s
        for a, s in zip(mean_of(rows), deviation(rows))
    ],
    "mimic": lambda rows, n: list(rows[0]),
}


@pytest.mark.parametrize("liars", [[0], [1, 4], [6, 2, 0]])
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_its_naive_twin(attack: str, liars: list[int]) -> None:
    x = drawn(7, 0, 4)
    honest = [i for i in range(7) if i not in liars]
    found = sent(x, liars, attack)
    expected = torch.tensor(ATTACKS[attack](x[honest].tolist(), 7), dtype=torch.float64)
    for i in range(7):
        assert_close({"": found[i]}, {"": expected if i in liars else x[i]}, 1e-13)


def test_strengths() -> None:
    x = drawn(5, 0, 3)
    m, s = x[1:].mean(0), x[1:].std(0)
    for attack, strength, expected in (
        ("ipm", 0.1, -0.1 * m),
        ("alie", 0.5, m + s / 2),
        ("alie_minus", 2.0, m - 2 * s),
    ):
        assert_close({"": sent(x, [0], attack, strength)[0]}, {"": expected}, 1e-13)


def test_noise_is_of_each_liar_and_not_around_the_honest() -> None:
    x = torch.full((4, 40_000), 30.0)
    found = sent(x, [1, 3], "gaussian", 2.0)
    assert torch.equal(found[[0, 2]], x[[0, 2]])
    assert found[[1, 3]].std().item() == pytest.approx(2.0, rel=0.02)
    assert found[[1, 3]].mean(1).abs().max() < 0.05
    assert abs(float((found[1] * found[3]).mean())) < 0.1


def test_only_those_who_take_part_are_known() -> None:
    """Nodes 2, 5, 7 of a run of nine; node 8 would lie, too."""
    x = torch.tensor([[1.0], [2.0], [5.0]])
    assert sent(x, [5, 8], "sign_flip", members=[2, 5, 7]).tolist() == [[1.0], [-3.0], [5.0]]
    assert sent(x, [8], "sign_flip", members=[2, 5, 7]).tolist() == x.tolist()
    assert sent(x, [2, 5, 7], "ipm", members=[2, 5, 7]).tolist() == x.tolist()  # nobody to know of
    assert sent(x[:2], [5], "alie", members=[2, 5]).tolist() == [[1.0], [1.0]]  # one has no deviation


def test_an_attack_of_ones_own() -> None:
    x, told = drawn(5, 0, 3), list[Any]()

    def attack(x: Tensor, honest: Tensor) -> Tensor:
        told.append((x.shape, honest.tolist()))
        return 7 * x[honest].sum(0)

    found = sent(x, [1, 2], attack)
    assert told == [((5, 3), [True, False, False, True, True])]
    for i in range(5):
        assert_close({"": found[i]}, {"": 7 * (x[0] + x[3] + x[4]) if i in (1, 2) else x[i]}, 1e-13)
    assert torch.equal(sent(x, [1], lambda x, scale=-3: scale * x)[1], -3 * x[1])  # an argument with a default
    assert torch.equal(sent(x, [1], torch.neg)[1], -x[1])
    assert torch.equal(sent(x, range(1, 3), torch.neg), sent(x, [1, 2], torch.neg))


def test_a_little_is_enough_against_the_mean_of_the_nearest() -> None:
    """The attack stays where a trimmed mean lets it, and moves it further than a far lie does."""
    x = drawn(10, 0, 400)
    rule = Robust("trimmed_mean", f=3)
    moved = [
        float((rule.aggregate(sent(x, [7, 8, 9], attack, strength)) - x[:7].mean(0)).norm())
        for attack, strength in (("alie", 1.0), ("ipm", 1000.0))
    ]
    assert moved[0] > 0.2 * float(x[:7].std(0).norm())
    assert all(math.isfinite(x) for x in moved)


def test_flipped_labels() -> None:
    y = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 3])
    partition = partition_iid(y, 3, seed=1)
    found = flip_labels(partition, [2, 0], num_classes=5)
    for node in range(3):
        for i in partition.indices[node].tolist():
            assert found[i] == (y[i] if node == 1 else 4 - y[i])
    assert torch.equal(flip_labels(partition, [1])[partition.indices[1]], 3 - y[partition.indices[1]])
    assert torch.equal(y, torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 3]))
    assert flip_labels(partition_shards(y, 3), []).tolist() == y.tolist()
    with pytest.raises(ValueError, match="the labels are from 0 to 3, and must be from 0 to num_classes - 1 = 2"):
        flip_labels(partition, [1], num_classes=3)
    with pytest.raises(ValueError, match="the partition has no labels"):
        flip_labels(partition_iid(torch.zeros(9, 2), 3), [1])
    with pytest.raises(IndexError, match="nodes 3 of 3: give 0 to 2"):
        flip_labels(partition, [3])
