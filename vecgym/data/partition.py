"""Partitions of one dataset into a shard per node, identically distributed or heterogeneous.

A partition is a function of the labels (or the number of examples), the number of nodes and the seed alone.
`vecgym.data` exports everything here that is public.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from vecgym.core import check, rng
from vecgym.data.checks import check_examples, is_integers, size_of

ALPHA = "the smaller, the more uneven"
MAX_DRAWS = 1000  # draws of a partition until every node has `min_size` examples


@dataclass(frozen=True, eq=False)
class Partition:
    """Every example of a dataset on exactly one node.

    Args:
        indices: the indices of each node's examples, K integer tensors `[n_k]`, none empty; together they hold each
            of 0 to n - 1 once.
        labels: the class of each example, `[n]` integers, or None.

    Raises:
        ValueError: if the indices do not hold every example once, a node is empty, or labels has another length.

    >>> partition = Partition((torch.tensor([0, 3]), torch.tensor([1, 2, 4])), labels=torch.tensor([7, 8, 8, 7, 8]))
    >>> partition
    Partition(2 nodes, 5 examples, 2 to 3 a node, 1 to 1 of 2 classes a node)
    >>> partition.sizes, partition.classes, partition.counts
    ((2, 3), (7, 8), tensor([[2, 0],
            [0, 3]]))
    """

    indices: tuple[Tensor, ...]
    labels: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "indices", _checked_indices(self.indices))
        empty = [node for node, size in enumerate(self.sizes) if size == 0]
        if not self.indices or empty:
            raise ValueError(f"nodes {empty} have no example: every node of a partition needs at least one.")
        places = torch.cat(self.indices).sort().values
        if not torch.equal(places, torch.arange(len(places))):
            raise ValueError(
                f"indices do not hold each of 0 to {len(places) - 1} once: a partition puts every example on one node."
            )
        if self.labels is not None and not is_integers(self.labels):
            raise TypeError(f"labels is {check.kind_of(self.labels)}; give a tensor of integers, [n], or None.")
        if self.labels is not None and len(self.labels) != len(places):
            raise ValueError(f"there are {len(self.labels)} labels for {len(places)} examples: give one per example.")

    @property
    def num_nodes(self) -> int:
        """The number of nodes, K.

        >>> Partition((torch.tensor([0, 3]), torch.tensor([1, 2, 4]))).num_nodes
        2
        """
        return len(self.indices)

    @property
    def num_examples(self) -> int:
        """The number of examples of all nodes together, n.

        >>> Partition((torch.tensor([0, 3]), torch.tensor([1, 2, 4]))).num_examples
        5
        """
        return sum(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of examples of each node, n_k: the weights of `weighting="examples"`."""
        return tuple(len(rows) for rows in self.indices)

    @cached_property
    def classes(self) -> tuple[int, ...]:
        """The labels that occur, ascending."""
        return tuple(self._labels.unique().tolist())

    @cached_property
    def counts(self) -> Tensor:
        """The number of examples of each class on each node, `[K, classes]`."""
        _, classes = self._labels.unique(return_inverse=True)
        return torch.stack([torch.bincount(classes[rows], minlength=len(self.classes)) for rows in self.indices])

    def datasets(self, dataset: Any, held_out: float = 0.0, *, seed: int = 42) -> Shards:
        """Split `dataset` into the nodes' shards; pass the result to `Trainer`, `sweep` or `Batches` as the dataset.

        With `held_out` pass it as the validation set, too: each node is then evaluated on its own examples.

        Args:
            dataset: the one that was partitioned.
            held_out: the fraction of each node's examples that it does not train on, drawn at random, at least one.
            seed: of the choice of these examples.

        Raises:
            ValueError: if the dataset has another length, or a node with a single example is to hold one out.

        >>> from torch.utils.data import TensorDataset
        >>> x, y = torch.randn(6, 3), torch.tensor([0, 0, 0, 1, 1, 1])
        >>> shards = partition_shards(y, num_nodes=2, shards_per_node=1).datasets(TensorDataset(x, y))
        >>> [sorted({int(label) for _, label in shards(rank, 2)}) for rank in range(2)]
        [[0], [1]]
        >>> shards = partition_shards(y, num_nodes=2, shards_per_node=1).datasets(TensorDataset(x, y), held_out=0.3)
        >>> [[len(shards(rank, 2, train)) for train in (True, False)] for rank in range(2)]
        [[2, 1], [2, 1]]
        """
        check.number("held_out", held_out, "[0, 1)", "the fraction of each node's examples to evaluate it on")
        check.seed("seed", seed)
        if held_out and min(self.sizes) < 2:
            raise ValueError(
                f"node {self.sizes.index(1)} has one example, and held_out={held_out} needs two: one to train on, one "
                "to hold out. Fix: min_size=2 for the partition, or fewer nodes."
            )
        size = size_of("dataset", dataset, "give the one that was partitioned")
        if size != self.num_examples:
            raise ValueError(
                f"the dataset has {size} examples, but the partition has {self.num_examples}: "
                "give the dataset that was partitioned, or partition this one."
            )
        return Shards(dataset, self, held_out, seed)

    @property
    def _labels(self) -> Tensor:
        if self.labels is None:
            raise ValueError("the partition has no labels: create it from labels, such as partition_iid(labels, K).")
        return self.labels

    def __repr__(self) -> str:
        text = f"{self.num_nodes} nodes, {self.num_examples} examples, {min(self.sizes)} to {max(self.sizes)} a node"
        if self.labels is not None:
            present = (self.counts > 0).sum(1)
            text += f", {int(present.min())} to {int(present.max())} of {len(self.classes)} classes a node"
        return f"Partition({text})"


@dataclass(frozen=True, eq=False)
class Shards:
    """A factory `(rank, num_nodes, train) -> Dataset` of the shards of one dataset; see `Partition.datasets`."""

    dataset: Any
    partition: Partition
    held_out: float = 0.0
    seed: int = 42

    def __call__(self, rank: int, num_nodes: int, train: bool = True) -> Subset[Any]:
        if num_nodes != self.partition.num_nodes:
            raise ValueError(
                f"num_nodes={num_nodes}, but the data is partitioned for {self.partition.num_nodes} nodes. "
                f"Fix: num_nodes={self.partition.num_nodes}, or a partition for {num_nodes} nodes."
            )
        rows = self.partition.indices[rank]
        if self.held_out:
            order = torch.from_numpy(_generator(self.seed, f"held out {rank}").permutation(len(rows)))
            count = min(max(1, round(self.held_out * len(rows))), len(rows) - 1)
            rows = rows[order[count:] if train else order[:count]].sort().values
        return Subset(self.dataset, rows.tolist())


@check.strict
def partition_iid(data: Any, num_nodes: int, *, seed: int = 42) -> Partition:
    """Deal the examples at random, equally many to each node (one more to some nodes if K does not divide n).

    Args:
        data: the labels, `[n]` integers, or a dataset. Its labels are `dataset.targets`, a `TensorDataset`'s last
            tensor, or those of the dataset below a `Subset`; here they are optional.
        num_nodes: K.
        seed: the seed of the partition.

    Raises:
        TypeError, ValueError: if `data` has no length, or there are fewer examples than nodes.

    >>> partition_iid(torch.zeros(10, 3), num_nodes=4)
    Partition(4 nodes, 10 examples, 2 to 3 a node)
    """
    labels, n = _read(data, num_nodes)
    order = _generator(seed, "iid").permutation(n)
    return _partition(np.array_split(order, num_nodes), labels)


@check.strict
def partition_dirichlet(
    data: Any, num_nodes: int, alpha: float, *, balanced: bool = False, min_size: int = 1, seed: int = 42
) -> Partition:
    """Give each node its own mixture of the classes; the smaller alpha, the fewer classes a node has.

    Each class c is divided among the nodes in shares s_c ~ Dir(alpha 1_K), so that the sizes differ, too, as with
    Flower's `DirichletPartitioner` (whose `min_partition_size` is 10). The shares are redrawn until every node has
    `min_size` examples.

    Balanced: node k draws q_k ~ Dir(alpha p), with p the classes' shares in the data, and n / K examples from the
    classes with probabilities q_k, without replacement. Exhausted classes leave the mixture, and a node whose classes
    are all exhausted draws a new mixture of the remaining ones: the last nodes get the rest. Nodes draw in a
    random order. Every node has floor(n / K) or ceil(n / K) examples.

    Args:
        data: the labels, or a dataset that has labels; see `partition_iid`.
        num_nodes: K.
        alpha: the concentration, > 0. In Dir(alpha 1_K) alpha is the value of each node, in Dir(alpha p) it is the sum
            over all classes: at the same alpha the balanced form has fewer classes on a node.
        balanced: whether all nodes have the same number of examples.
        min_size: the minimum number of examples per node, unless they are balanced.
        seed: the seed of the partition.

    Raises:
        TypeError, ValueError: if there are no labels, alpha <= 0, there are fewer examples than nodes, or `min_size`
            is not reached in 1000 draws.

    >>> labels = torch.arange(10).repeat(100)
    >>> partition_dirichlet(labels, num_nodes=5, alpha=0.3).sizes
    (226, 197, 217, 132, 228)
    >>> set(partition_dirichlet(labels, num_nodes=20, alpha=0.1, balanced=True).sizes)
    {50}

    References: Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", arXiv 1905.12022;
    `min_size` as in Li et al., "Federated Learning on Non-IID Data Silos", arXiv 2102.02079. Balanced, Hsu et al.,
    "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification", arXiv 1909.06335.
    Deviation: the rule for an exhausted class, which the paper leaves open.
    """
    check.flag("balanced", balanced)
    check.integer("min_size", min_size)
    labels = _read_labels(data, num_nodes)
    check.number("alpha", alpha, "(0, inf)", ALPHA)
    generator = _generator(seed, "dirichlet")
    classes = [generator.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]
    sizes = np.array([len(examples) for examples in classes])
    if balanced:
        counts = _mixtures(generator, sizes, num_nodes, alpha)  # [K, classes]
    else:
        counts = _shares(generator, sizes, num_nodes, alpha, min_size)
    cuts = counts.cumsum(0)[:-1]  # [K - 1, classes]
    parts = [np.split(examples, cuts[:, c]) for c, examples in enumerate(classes)]
    return _partition([np.concatenate(of_node) for of_node in zip(*parts)], labels)


@check.strict
def partition_shards(data: Any, num_nodes: int, shards_per_node: int = 2, *, seed: int = 42) -> Partition:
    """Give each node a few classes: sort the examples by label, cut K s equal shards, and deal s to each node.

    With s = 2 and classes of equal size, a node has one or two classes, and up to four if its shards cross boundaries
    between classes. The sizes of two shards differ by at most one: every node has at least s floor(n / (K s)) examples.

    Args:
        data: the labels, or a dataset that has labels; see `partition_iid`.
        num_nodes: K.
        shards_per_node: s.
        seed: the seed of the partition.

    Raises:
        TypeError, ValueError: if there are no labels, s < 1, or there are fewer examples than shards.

    >>> partition = partition_shards(torch.arange(10).repeat(100), num_nodes=5)
    >>> partition.sizes, int((partition.counts > 0).sum(1).max())
    ((200, 200, 200, 200, 200), 2)

    Reference: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", arXiv
    1602.05629. No deviation.
    """
    labels = _read_labels(data, num_nodes)
    n = len(labels)
    num_shards = num_nodes * check.integer("shards_per_node", shards_per_node)
    if num_shards > n:
        raise ValueError(
            f"{num_nodes} nodes with shards_per_node={shards_per_node} need {num_shards} examples, one per shard, "
            f"but there are {n}: give fewer nodes, or shards_per_node <= {n // num_nodes}."
        )
    generator = _generator(seed, "shards")
    shuffled = generator.permutation(n)
    by_label = shuffled[labels[shuffled].argsort(kind="stable")]
    shards = np.array_split(by_label, num_shards)
    dealt = generator.permutation(num_shards).reshape(num_nodes, -1)
    return _partition([np.concatenate([shards[i] for i in row]) for row in dealt], labels)


@check.strict
def partition_quantity_skew(data: Any, num_nodes: int, alpha: float, *, min_size: int = 1, seed: int = 42) -> Partition:
    """Deal the examples at random in unequal numbers: n_k = m + (n - K m) s_k, rounded, with s ~ Dir(alpha 1_K).

    Every node has at least m = `min_size` examples. The mean of n_k is n / K, its variance
    (n - K m)^2 (K - 1) / (K^2 (K alpha + 1)).

    Args:
        data: the labels, or a dataset with or without labels; see `partition_iid`.
        num_nodes: K.
        alpha: the concentration, > 0; equal sizes are the limit of infinite alpha.
        min_size: m.
        seed: the seed of the partition.

    Raises:
        TypeError, ValueError: if alpha <= 0, or there are fewer than K m examples.

    >>> sizes = partition_quantity_skew(torch.zeros(1000), num_nodes=4, alpha=1.0, min_size=20).sizes
    >>> sum(sizes), min(sizes) >= 20, len(set(sizes)) > 1
    (1000, True, True)

    Reference: Li et al., "Federated Learning on Non-IID Data Silos", arXiv 2102.02079. Deviation: there the shares are
    redrawn until every node has enough examples, which never happens with many nodes.
    """
    labels, n = _read(data, num_nodes)
    check.number("alpha", alpha, "(0, inf)", ALPHA)
    spare = n - num_nodes * check.integer("min_size", min_size)
    if spare < 0:
        raise ValueError(
            f"{num_nodes} nodes with min_size={min_size} need {num_nodes * min_size} examples, but there are {n}: "
            f"give fewer nodes, or min_size <= {n // num_nodes}."
        )
    generator = _generator(seed, "quantity skew")
    sizes = min_size + _rounded(spare, generator.dirichlet(np.full(num_nodes, float(alpha))))
    return _partition(np.split(generator.permutation(n), sizes.cumsum()[:-1]), labels)


def flip_labels(partition: Partition, nodes: Sequence[int], num_classes: int | None = None) -> Tensor:
    """Return the labels of all examples, `[n]`, with false ones for some nodes: label -> num_classes - 1 - label.

    Such nodes train honestly on false data, in place of sending false values as in `vecgym.strategy.Corrupted`.

    Args:
        partition: of the labels; it says whose examples are flipped.
        nodes: the ids of the nodes with false labels.
        num_classes: the number of classes; None: the largest label + 1.

    Raises:
        ValueError: for a partition without labels, a node that it does not have, or labels outside of the classes.

    >>> from torch.utils.data import TensorDataset
    >>> x, y = torch.randn(6, 3), torch.tensor([0, 0, 1, 1, 2, 2])
    >>> partition = partition_shards(y, num_nodes=3, shards_per_node=1)
    >>> false = flip_labels(partition, nodes=[0])
    >>> (false[partition.indices[0]] == 2 - y[partition.indices[0]]).all(), int((false != y).sum()) in (0, 2)
    (tensor(True), True)
    >>> shards = partition.datasets(TensorDataset(x, false))  # for `Trainer`
    """
    check.instance("partition", partition, Partition, "a Partition of labels, such as partition_iid(y, num_nodes=4)")
    check.instance("nodes", nodes, (list, tuple, range), "a list of node ids, such as [0]")
    labels, ids = partition._labels, [check.index("nodes", node, partition.num_nodes) for node in nodes]
    least, most = int(labels.min()), int(labels.max())
    count = most + 1 if num_classes is None else check.integer("num_classes", num_classes)
    if least < 0 or most >= count:
        raise ValueError(f"the labels are from {least} to {most}, and must be from 0 to num_classes - 1 = {count - 1}.")
    flipped = labels.clone()
    for node in ids:
        flipped[partition.indices[node]] = count - 1 - labels[partition.indices[node]]
    return flipped


def _mixtures(generator: np.random.Generator, sizes: np.ndarray, num_nodes: int, alpha: float) -> np.ndarray:
    """Draw the number of examples of each class for each node, `[K, classes]`, out of `sizes`, `[classes]`."""
    n, remaining = int(sizes.sum()), sizes
    prior = sizes / n
    counts = np.zeros((num_nodes, len(sizes)), dtype=np.int64)
    of_nodes = np.diff(np.arange(num_nodes + 1) * n // num_nodes)
    for node in generator.permutation(num_nodes):
        q = generator.dirichlet(alpha * prior)
        while (missing := of_nodes[node] - counts[node].sum()) > 0:
            # Draws of an exhausted class are repeated.
            free = remaining - counts[node]
            weights = np.where(free > 0, q, 0.0)
            if weights.sum() <= 0:  # all classes of the mixture are exhausted
                weights[free > 0] = generator.dirichlet(alpha * prior[free > 0])
            drawn = generator.multinomial(missing, weights / weights.sum())
            counts[node] += np.minimum(drawn, free)
        remaining = remaining - counts[node]
    return counts


def _shares(
    generator: np.random.Generator, sizes: np.ndarray, num_nodes: int, alpha: float, min_size: int
) -> np.ndarray:
    """Draw the number of examples of each class for each node, `[K, classes]`, out of `sizes`, `[classes]`."""
    for _ in range(MAX_DRAWS):
        shares = generator.dirichlet(np.full(num_nodes, float(alpha)), size=len(sizes))
        counts = np.stack([_rounded(size, of_class) for size, of_class in zip(sizes, shares)], axis=1)
        if counts.sum(1).min() >= min_size:
            return counts
    raise ValueError(
        f"alpha={alpha} left a node with fewer than min_size={min_size} examples in each of {MAX_DRAWS} draws: give a "
        "larger alpha, fewer nodes, a smaller min_size, or balanced=True."
    )


def _rounded(n: int, shares: np.ndarray) -> np.ndarray:
    """Split n into integers in these shares, each within 1 of n times its share."""
    cuts = np.rint(n * shares.cumsum()).astype(np.int64)
    cuts[-1] = n
    return np.diff(cuts, prepend=0)


def _checked_indices(indices: Any) -> tuple[Tensor, ...]:
    give = "a tuple of K integer tensors [n_k]"
    check.instance("indices", indices, (tuple, list), give)
    try:
        tensors = tuple(torch.as_tensor(x) for x in indices)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"indices holds something other than integer tensors; give {give}.") from None
    for node, x in enumerate(tensors):
        if x.numel() and not is_integers(x):
            raise TypeError(f"indices[{node}] is a tensor {x.dtype} {list(x.shape)}; give {give}.")
    return tuple(x.long() for x in tensors)


def _partition(indices: Sequence[np.ndarray], labels: np.ndarray | None) -> Partition:
    tensors = tuple(torch.from_numpy(np.sort(x)) for x in indices)
    return Partition(tensors, None if labels is None else torch.from_numpy(labels))


def _generator(seed: int, kind: str) -> np.random.Generator:
    return np.random.default_rng(rng.key(check.seed("seed", seed), f"partition {kind}"))


def _read(data: Any, num_nodes: int) -> tuple[np.ndarray | None, int]:
    """Return (labels `[n]` or None, n)."""
    if not hasattr(data, "targets"):
        check_examples(data, "data")
    n = size_of("data", data, "give the labels, or a map-style dataset")
    if check.integer("num_nodes", num_nodes) > n:
        raise ValueError(f"num_nodes={num_nodes} is more than the {n} examples: every node needs at least one.")
    return _labels_of(data), n


def _read_labels(data: Any, num_nodes: int) -> np.ndarray:
    labels, _ = _read(data, num_nodes)
    if labels is None:
        raise TypeError(
            f"no labels were found in a {type(data).__name__}: give the labels as 1-D integers, such as "
            "torch.tensor([y for x, y in dataset])."
        )
    return labels


def has_sorted_labels(data: Any) -> bool:
    """Whether a dataset of several columns has integer labels of several classes, in order.

    >>> x, y = torch.randn(64, 3), torch.arange(64) // 16
    >>> has_sorted_labels(TensorDataset(x, y)), has_sorted_labels(TensorDataset(x, y % 2)), has_sorted_labels(y)
    (True, False, False)
    """
    below = data
    while isinstance(below, Subset):
        below = below.dataset
    labelled = len(below.tensors) > 1 if isinstance(below, TensorDataset) else hasattr(below, "targets")
    labels = _labels_of(data) if labelled else None
    if labels is None:
        return False
    steps = np.diff(labels)
    return bool((steps >= 0).all() and 0 < np.count_nonzero(steps) < len(labels) // 4)


def _labels_of(data: Any) -> np.ndarray | None:
    """Return the labels `[n]`, int64, if there are any."""
    if isinstance(data, Subset):
        labels = _labels_of(data.dataset)
        return None if labels is None else labels[np.asarray(data.indices)]
    if isinstance(data, TensorDataset):
        return _labels_of(data.tensors[-1])
    if hasattr(data, "targets"):  # torchvision's datasets
        return _labels_of(data.targets)
    if isinstance(data, (Tensor, np.ndarray, list, tuple, range)):
        if isinstance(data, (list, tuple)) and not all(hasattr(value, "__index__") for value in data):
            return None  # a list of examples
        labels = np.asarray(data.cpu() if isinstance(data, Tensor) else data)
        if labels.ndim == 1 and labels.dtype.kind in "iu":
            return labels.astype(np.int64)
    return None
