"""Rules by which n nodes agree if some of them lie: functions of whole vectors, `[R, n, p]` by name -> `[R, p]`."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import torch
from torch import Tensor

from vecgym.core import check, tree
from vecgym.core.devices import placed
from vecgym.core.tree import Tree, wider
from vecgym.strategy.robust.vectors import combined, distances, norms, ordered

MAX_SUBSETS = 100_000  # that "mda" goes through


def median(x: Tensor) -> Tensor:
    """Take each coordinate's median over the nodes, `[R, n, *]` -> `[R, *]`; of an even number the middle two's mean.

    >>> median(torch.tensor([[1.0, 100.0, 2.0]])), median(torch.tensor([[1.0, 2.0, 4.0, 100.0]]))
    (tensor([2.]), tensor([3.]))
    """
    if not isinstance(x, Tensor) or x.dim() < 2:
        raise TypeError(f"x is {check.kind_of(x)}; give a tensor [R, n, *].")
    rows, n = ordered(x.reshape(*x.shape[:2], math.prod(x.shape[2:]))), x.shape[1]
    return ((rows[:, (n - 1) // 2] + rows[:, n // 2]) / 2).reshape(len(x), *x.shape[2:])


def trimmed_mean(x: Tensor, f: int) -> Tensor:
    """Take each coordinate's mean without the f lowest and the f highest values, `[R, n, p]` -> `[R, p]`.

    >>> trimmed_mean(torch.tensor([[[1.0], [2.0], [4.0], [100.0]]]), f=1)
    tensor([[3.]])
    """
    return ordered(x)[:, f : x.shape[1] - f].mean(1)


def sign_majority(x: Tensor) -> Tensor:
    """Take the sign that most nodes have in each coordinate, 0 for a tie: `[R, n, p]` -> `[R, p]`.

    >>> sign_majority(torch.tensor([[[-9.0, 1.0], [1.0, -1.0], [2.0, 0.0]]]))
    tensor([[1., 0.]])
    """
    return x.sign().sum(1, dtype=wider(x.dtype)).sign().to(x.dtype)


def multi_krum(values: Tree, neighbours: int, m: int) -> Tree:
    """Take the mean of the m vectors with the smallest sums of squared distances to so many nearest others.

    >>> multi_krum({"w": torch.tensor([[[0.0], [1.0], [5.0]]])}, neighbours=1, m=2)  # the sums are 1, 1 and 16
    {'w': tensor([[0.5000]])}
    """
    scores = distances(values).sort(-1).values[..., 1 : 1 + neighbours].sum(-1)  # the nearest is the node itself
    return _mean_of(scores.argsort(dim=-1, stable=True)[:, :m], scores, values)


def mda(values: Tree, f: int) -> Tree:
    """Take the mean of the n - f nodes whose largest distance is smallest, of equal sets the first in order.

    >>> mda({"w": torch.tensor([[[0.0], [1.0], [5.0], [7.0]]])}, f=1)
    {'w': tensor([[2.]])}
    """
    d = distances(values)
    sets = placed(_subsets(d.shape[1], d.shape[1] - f), d.device)
    some = sets.split(max(1, (1 << 22) // (len(d) * sets.shape[1] ** 2)))
    diameters = torch.cat([d[:, part[:, :, None], part[:, None]].amax((-1, -2)) for part in some], 1)
    return _mean_of(sets[diameters.argmin(1)], d[:, 0], values)


@functools.lru_cache(8)
def _subsets(n: int, size: int) -> Tensor:
    return torch.tensor(list(itertools.combinations(range(n), size)))


def _mean_of(chosen: Tensor, like: Tensor, values: Tree) -> Tree:
    """Return the mean of the chosen nodes, `[R, m]`, with weights `[R, n]` like a tensor."""
    weights = torch.zeros_like(like).scatter(1, chosen, 1 / chosen.shape[1])
    return _one(combined(weights[:, None], values))


def geometric_median(values: Tree, nu: Any, iterations: int) -> Tree:
    """Take some steps of Weiszfeld from 0: z <- sum_i w_i x_i / sum_i w_i, w_i = 1 / max(nu, |x_i - z|)."""
    z: Tree | None = None
    for _ in range(iterations):
        weights = 1 / norms(values, z).clamp(min=nu)
        z = combined((weights / weights.sum(-1, keepdim=True))[:, None], values)
    assert z is not None
    return _one(z)


def clip_around(values: Tree, centre: Tree | None, tau: Any, iterations: int = 1) -> Tree:
    """Move the centre, `[R, 1, p]`, None is 0, by the mean of the clipped differences, some times."""
    for _ in range(iterations):
        weights = clip_factors(values, tau, centre) / next(iter(values.values())).shape[1]
        stays, moved = 1 - weights.sum(-1)[:, None, None], combined(weights[:, None], values)
        if centre is not None:
            moved = tree.map(lambda v, y: (stays * v + y).to(y.dtype), centre, moved)  # noqa: B023
        centre = moved
    return _one(moved)


def clip_factors(values: Tree, limit: Any, around: Tree | None = None) -> Tensor:
    """Return min(1, limit / |x_i|), `[R, n]`; 0 for a node whose values are not all finite.

    >>> clip_factors({"w": torch.tensor([[[3.0, 4.0], [0.3, 0.4], [0.0, torch.inf]]])}, limit=1.0)
    tensor([[0.2000, 1.0000, 0.0000]])
    """
    return limit / norms(values, around).clamp(min=limit)


def _one(values: Tree) -> Tree:
    return tree.map(lambda x: x[:, 0], values)


# ------------------------------------------------------------------------------------------- before any of the rules


def clipped(values: Tree, clip: Any) -> Tree:
    """Clip each node's vector to a 2-norm: x_i min(1, clip / |x_i|)."""
    factors = clip_factors(values, clip)[..., None]
    return tree.map(lambda x: torch.where(factors == 0, 0, factors * x).to(x.dtype), values)


def in_buckets(values: Tree, order: Tensor, size: int) -> Tree:
    """Take means of `size` consecutive nodes in an order `[R, n]`; the last bucket may be smaller.

    >>> in_buckets({"w": torch.tensor([[[1.0], [2.0], [6.0]]])}, torch.tensor([[2, 0, 1]]), size=2)
    {'w': tensor([[[3.5000],
             [2.0000]]])}
    """

    def means(x: Tensor) -> Tensor:
        rows = x[torch.arange(len(x), device=x.device)[:, None], placed(order, x.device)]
        return torch.stack([bucket.mean(1) for bucket in rows.split(size, 1)], 1)

    return tree.map(means, values)


def nearest_means(values: Tree, f: int) -> Tree:
    """Replace each vector by the mean of its n - f nearest ones, itself included.

    >>> nearest_means({"w": torch.tensor([[[0.0], [2.0], [90.0]]])}, f=1)
    {'w': tensor([[[ 1.],
             [ 1.],
             [46.]]])}
    """
    d = distances(values)
    near = d.argsort(dim=-1, stable=True)[..., : d.shape[1] - f]
    return combined(torch.zeros_like(d).scatter(-1, near, 1 / near.shape[-1]), values)
