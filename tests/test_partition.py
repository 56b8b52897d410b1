"""Partitions hold every example once, and are distributed as their papers say."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from vecgym import Trainer
from vecgym.data import (
    Batches,
    Partition,
    partition_dirichlet,
    partition_iid,
    partition_quantity_skew,
    partition_shards,
)
from vecgym.plot import plot_partition
from vecgym.strategy import FedAvgStrategy
from vecgym.strategy.averages import Weighting

Make = Callable[..., Partition]  # (data, num_nodes, seed=...)
KINDS: dict[str, Make] = {
    "iid": partition_iid,
    "dirichlet": lambda data, K, **kwargs: partition_dirichlet(data, K, 0.3, balanced=True, **kwargs),
    "dirichlet, extreme": lambda data, K, **kwargs: partition_dirichlet(data, K, 1e-6, balanced=True, **kwargs),
    "dirichlet, any size": lambda data, K, **kwargs: partition_dirichlet(data, K, 1.0, **kwargs),
    "shards": partition_shards,
    "one shard": lambda data, K, **kwargs: partition_shards(data, K, 1, **kwargs),
    "quantity skew": lambda data, K, **kwargs: partition_quantity_skew(data, K, 0.5, **kwargs),
}
LABELS = {  # n is never a multiple of all the K below
    "even": torch.arange(10).repeat(41),
    "skewed, gaps, negative": torch.tensor([-3] * 200 + [5] * 40 + [70] * 13),
    "one class": torch.zeros(101, dtype=torch.long),
}
C = 10
EVEN = torch.arange(C).repeat(200)


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_every_example_is_on_exactly_one_node(make: Make, labels: Tensor) -> None:
    for K in (1, 3, 16):
        partition = make(labels, K, seed=0)
        found = torch.cat(partition.indices).tolist()
        assert sorted(found) == list(range(len(labels)))
        assert partition.num_nodes == len(partition.sizes) == K
        assert all(own.tolist() == sorted(own.tolist()) for own in partition.indices)
        # counts are what counting says
        expected = [[int((labels[own] == c).sum()) for c in partition.classes] for own in partition.indices]
        assert partition.counts.tolist() == expected
        assert partition.classes == tuple(labels.unique().tolist())


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_the_seed_and_nothing_else_decides(make: Make) -> None:
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    first = make(EVEN, 8, seed=3)
    torch.manual_seed(2)
    np.random.seed(2)  # noqa: NPY002
    again, other = make(EVEN, 8, seed=3), make(EVEN, 8, seed=4)
    assert [own.tolist() for own in first.indices] == [own.tolist() for own in again.indices]
    assert [own.tolist() for own in first.indices] != [own.tolist() for own in other.indices]


@pytest.mark.parametrize(
    ("make", "least"),
    [
        (KINDS["iid"], 29),  # floor(2000 / 67)
        (KINDS["dirichlet"], 29),
        (KINDS["shards"], 28),  # 2 floor(2000 / 134)
        (lambda data, K, seed: partition_quantity_skew(data, K, 0.1, min_size=7, seed=seed), 7),
        (lambda data, K, seed: partition_dirichlet(data, K, 0.5, min_size=4, seed=seed), 4),
    ],
)
def test_no_node_has_fewer_examples_than_promised(make: Make, least: int) -> None:
    sizes = [make(EVEN, 67, seed=seed).sizes for seed in range(10)]
    assert min(map(min, sizes)) == least


# ---------------------------------------------------------------------------------------------- statistics


def test_iid_has_the_chi_square_of_chance() -> None:
    """Classes and nodes are independent: chi-square with (K - 1)(C - 1) degrees of freedom."""
    K, repeats = 8, 100
    found = []
    for seed in range(repeats):
        counts = partition_iid(EVEN, K, seed=seed).counts.double()
        expected = counts.sum(1, keepdim=True) * counts.sum(0) / len(EVEN)
        found.append(float(((counts - expected) ** 2 / expected).sum()))
    freedom = (K - 1) * (C - 1)
    # Mean `freedom`, variance 2 `freedom`; the mean of 100 stays within 4 standard errors.
    assert abs(np.mean(found) - freedom) < 4 * np.sqrt(2 * freedom / repeats)
    assert 0.6 < np.var(found) / (2 * freedom) < 1.5


@pytest.mark.parametrize("alpha", [0.3, 1.0, 3.0])
def test_mixtures_are_as_uneven_as_dirichlet_says(alpha: float) -> None:
    """E sum_c q_c^2 of m draws from Dir(alpha p): sum_c p_c (1/m + (1 - 1/m) (alpha p_c + 1) / (alpha + 1)).

    Without replacement the last nodes' draws are not free: with 20 nodes that moves the mean by some percent.
    """
    K = 20
    found = []
    for seed in range(60):
        partition = partition_dirichlet(EVEN, K, alpha, balanced=True, seed=seed)
        q = partition.counts / partition.counts.sum(1, keepdim=True)
        found.append(float(q.square().sum(1).mean()))
    m = len(EVEN) / K
    expected = 1 / m + (1 - 1 / m) * (alpha / C + 1) / (alpha + 1)
    assert abs(np.mean(found) / expected - 1) < 0.08


def test_mixtures_follow_the_classes_of_the_data() -> None:
    """E q = p, for each node, also where the classes are of different sizes."""
    labels = torch.tensor([0] * 1200 + [1] * 600 + [2] * 200)
    drawn = [partition_dirichlet(labels, 10, 1.0, balanced=True, seed=seed) for seed in range(200)]
    counts = torch.stack([partition.counts for partition in drawn]).double()
    shares = counts.mean(0) / 200  # [K, classes]
    p = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    error = (p * (1 - p) / 2 / 200).sqrt()  # of Dir(p): variance p (1 - p) / (alpha + 1)
    assert bool(((shares - p).abs() < 4 * error).all())


def test_unbalanced_classes_are_shared_out_as_dirichlet_says() -> None:
    """A node's share of a class is Beta(alpha, (K - 1) alpha): mean 1 / K, variance (K - 1) / (K^2 (K alpha + 1))."""
    K, alpha = 5, 2.0
    shares = torch.stack([partition_dirichlet(EVEN, K, alpha, seed=seed).counts / 200 for seed in range(100)])
    variance = (K - 1) / (K**2 * (K * alpha + 1))
    error = (variance / (100 * C)) ** 0.5
    assert bool(((shares.mean((0, 2)) - 1 / K).abs() < 4 * error).all())
    assert abs(float((shares - 1 / K).square().mean()) / variance - 1) < 0.1
    assert len(set(partition_dirichlet(EVEN, K, alpha).sizes)) > 1


def test_quantity_skew_is_in_the_sizes_alone() -> None:
    K, alpha, least, n = 6, 1.5, 20, len(EVEN)
    partitions = [partition_quantity_skew(EVEN, K, alpha, min_size=least, seed=seed) for seed in range(300)]
    sizes = torch.tensor([partition.sizes for partition in partitions]).double()
    variance = (n - K * least) ** 2 * (K - 1) / (K**2 * (K * alpha + 1))
    assert bool(((sizes.mean(0) - n / K).abs() < 4 * (variance / 300) ** 0.5).all())
    assert abs(float((sizes - n / K).square().mean()) / variance - 1) < 0.12
    shares = torch.stack([p.counts / torch.tensor(p.sizes)[:, None] for p in partitions])
    assert bool(((shares.mean((0, 1)) - 1 / C).abs() < 0.01).all())


def test_shards_hold_few_classes() -> None:
    """With shards inside classes a node has s of them at most; two are of one class by chance only."""
    K, s, repeats = 20, 2, 200
    num_classes = torch.stack([(partition_shards(EVEN, K, s, seed=i).counts > 0).sum(1) for i in range(repeats)])
    assert num_classes.min() == 1
    assert num_classes.max() == s
    of_a_class = K * s / C  # shards
    same = (of_a_class - 1) / (K * s - 1)
    assert abs(float((num_classes == 1).double().mean()) - same) < 4 * (same * (1 - same) / (K * repeats)) ** 0.5
    assert set(partition_shards(EVEN, K, s).sizes) == {100}


# ---------------------------------------------------------------------------------------------- training


class Mean(nn.Module):
    """Its gradient is w minus the mean of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, batch: Any) -> Tensor:
        return F.mse_loss(self.w.expand_as(batch[0]), batch[0], reduction="sum") / (2 * len(batch[0]))


def test_training_reads_the_shards_and_weighs_by_their_sizes() -> None:
    x = torch.randn(40, 2, dtype=torch.float64)
    dataset = TensorDataset(x, torch.arange(40) % 4)
    partition = partition_dirichlet(dataset, 3, 1.0, min_size=4)
    shards = partition.datasets(dataset)
    batches = Batches(shards, 3, batch_size=4)
    assert batches.shard_sizes == partition.sizes
    assert batches._source._reader.gathers, "not read in one gather"
    assert len(batches._source._reader.datasets) == 1
    for node, own in enumerate(partition.indices):  # an epoch shows each node its own examples and no others
        seen = torch.cat([batch[0][node] for batch in batches.iterate(0, batches.steps_per_epoch)])
        assert {tuple(row) for row in seen.tolist()} == {tuple(row) for row in x[own].tolist()}

    def one_step(weighting: Weighting) -> Tensor:
        trainer = Trainer(Mean(), shards, shards)
        trainer.fit(FedAvgStrategy("sgd", lr=1.0, weighting=weighting), 3, max_steps=1, batch_size=4, progress=False)
        assert trainer.history["val_losses"][-1].shape == (3,)
        return trainer.nodes.params["w"][0]

    each = batches[0][0].mean(1)  # [K, 2]: from w = 0 with lr = 1 every node goes to the mean of its batch
    sizes = torch.tensor(partition.sizes).double()
    assert len(set(partition.sizes)) > 1
    torch.testing.assert_close(one_step("examples"), (each * sizes[:, None]).sum(0) / sizes.sum())
    torch.testing.assert_close(one_step("equal"), each.mean(0))


def test_shards_go_to_other_processes() -> None:
    shards = partition_shards(EVEN, 4).datasets(TensorDataset(EVEN))
    copy = pickle.loads(pickle.dumps(shards))
    assert copy(2, 4, True).indices == shards(2, 4, True).indices


# ------------------------------------------------------------------------------------------ labels, errors


def test_labels_are_found_in_datasets() -> None:
    labels = torch.arange(12) % 3
    expected = partition_shards(labels, 3).counts.tolist()

    class Images:
        targets = labels.tolist()

        def __len__(self) -> int:
            return 12

    pairs = TensorDataset(torch.randn(12, 2), labels)
    for data in (labels.tolist(), labels.numpy(), labels.int(), pairs, Subset(pairs, list(range(12))), Images()):
        assert partition_shards(data, 3).counts.tolist() == expected
    half = partition_shards(Subset(pairs, [3 * i for i in range(4)]), 2)
    assert half.classes == (0,)
    for data in (torch.zeros(12, 2), TensorDataset(torch.zeros(12)), [torch.zeros(2)] * 12):
        assert partition_iid(data, 3).labels is None
        with pytest.raises(TypeError, match="no labels were found"):
            partition_shards(data, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: partition_iid(EVEN, 0), "num_nodes=0 must be an integer >= 1"),
        (lambda: partition_iid(EVEN[:3], 4), "num_nodes=4 is more than the 3 examples"),
        (lambda: partition_dirichlet(EVEN, 4, 0.0), "alpha=0.0 must be a number > 0"),
        (lambda: partition_dirichlet(EVEN, 4, float("nan")), "alpha=nan must be"),
        (lambda: partition_dirichlet(EVEN, 200, 0.01, min_size=9), "min_size=9 .* balanced=True"),
        (lambda: partition_dirichlet(EVEN, 4, 1.0, min_size=0), "min_size=0 must be"),
        (lambda: partition_shards(EVEN, 4, 0), "shards_per_node=0 must be"),
        (lambda: partition_shards(EVEN[:7], 4, 2), "need 8 examples, .* there are 7: .* shards_per_node <= 1"),
        (lambda: partition_quantity_skew(EVEN, 4, -1), "alpha=-1 must be"),
        (lambda: partition_quantity_skew(EVEN[:7], 4, 1.0, min_size=2), "need 8 examples, .* min_size <= 1"),
        (lambda: Partition((torch.tensor([0, 1]), torch.tensor([1]))), "each of 0 to 2 once"),
        (lambda: Partition((torch.tensor([0]), torch.tensor([]))), r"nodes \[1\] have no example"),
        (lambda: Partition((torch.tensor([0]),), labels=EVEN), "2000 labels for 1 examples"),
        (lambda: partition_iid(torch.zeros(8, 2), 4).counts, "the partition has no labels"),
        (lambda: partition_iid(EVEN, 4).datasets(EVEN[:-1]), "dataset has 1999 examples, but the partition has 2000"),
        (lambda: Batches(partition_iid(EVEN, 4).datasets(EVEN), 5, 2), "num_nodes=5, .* partitioned for 4 nodes"),
    ],
)
def test_mistakes_are_explained(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_partition_itself_is_no_dataset() -> None:
    with pytest.raises(TypeError, match="not a dataset"):
        Batches(partition_iid(EVEN, 4), 4, 2)  # type: ignore[arg-type]


def test_what_is_held_out_is_never_trained_on() -> None:
    partition = partition_dirichlet(EVEN, 8, 0.3, min_size=2)
    shards = partition.datasets(TensorDataset(EVEN), held_out=0.25)
    for node, own in enumerate(partition.indices):
        train, val = (set(shards(node, 8, train).indices) for train in (True, False))
        assert train | val == set(own.tolist())
        assert not train & val
        assert len(val) == max(1, round(0.25 * len(own)))
    again, other = (partition.datasets(TensorDataset(EVEN), 0.25, seed=seed) for seed in (42, 43))
    assert shards(0, 8, False).indices == again(0, 8, False).indices != other(0, 8, False).indices
    two = Partition((torch.tensor([0, 2]), torch.tensor([1, 3])))  # something is left to train on
    assert [len(two.datasets(range(4), 0.9)(0, 2, train)) for train in (True, False)] == [1, 1]
    alone = Partition((torch.tensor([0, 2]), torch.tensor([1])))
    with pytest.raises(ValueError, match=r"node 1 has one example, and held_out=0.5 needs two.*min_size=2"):
        alone.datasets(range(3), 0.5)
    with pytest.raises(ValueError, match=r"held_out=1.0 must be a number in \[0, 1\)"):
        two.datasets(range(4), 1.0)


# ------------------------------------------------------------------------------------------------- figure


def test_the_figure_shows_the_counts() -> None:
    for labels in (EVEN, EVEN % 3):  # a colour scale, and single colours
        partition = partition_dirichlet(labels, 6, 0.5)
        axes = plot_partition(partition).axes[0]
        heights = [[bar.get_height() for bar in bars] for bars in axes.containers]
        assert heights == partition.counts.T.tolist()
        tops = [bar.get_y() + bar.get_height() for bar in axes.containers[-1]]
        assert tops == list(partition.sizes)
        assert [text.get_text() for text in axes.texts] == [str(size) for size in partition.sizes]
    assert not plot_partition(partition_iid(EVEN, 100)).axes[0].texts  # too many
    plain = plot_partition(partition_iid(torch.zeros(9, 2), 2)).axes[0]
    assert [bar.get_height() for bar in plain.patches] == [5, 4]  # type: ignore[attr-defined]
