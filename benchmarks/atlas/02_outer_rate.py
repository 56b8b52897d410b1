"""How do the best plain outer rate and the best inner rate change from 2 nodes to 32?

Setting: DiLoCo, no outer momentum, AdamW inside, 10 rounds in half the scale's steps, half its batch size, like data,
equal steps. A 3 x 3 table (factors of 2 inside, 1.5 outside) moves until its lowest mean loss, over the compared seeds,
is in the middle. Best: the minimum of parabolas through the logarithms; errors by the jackknife over seeds.
Expected: Outer 1.0 at K = 2 and 1.4 at K = 32, a ratio of 1.4; the best inner rate is 1.5 times as large at K = 32.
Verdict: AGREES if both ratios are clearly above 1 (two standard errors) and within a factor of 1.25 of 1.4 and 1.5;
ORDER ONLY if both are clearly above 1; DISAGREES if one is clearly below 1; else UNDECIDED.
"""

from functools import partial
from math import log2

import torch
from study import MOST_LONGER, Answer, Study, difference
from torch import Tensor

from vecgym.optim import OptimSpec
from vecgym.strategy import DiLoCoStrategy


def lowest(y: Tensor) -> tuple[Tensor, Tensor]:
    """Place, between -1 and 1, and value of the minimum of parabolas through values at -1, 0 and 1, `[3, ...]`."""
    slope, bend = (y[2] - y[0]) / 2, y[0] - 2 * y[1] + y[2]
    x = torch.where(bend > 0, -slope / bend, -slope.sign()).clamp(-1, 1)
    return x, y[1] + slope * x + bend / 2 * x * x


def places(losses: Tensor) -> Tensor:
    """The best inner and the best outer rate in losses [inner, outer, seeds], each at the best rate of the other."""
    table = losses.clamp(max=100).mean(-1).log()
    return torch.stack([lowest(lowest(one)[1])[0] for one in (table.T, table)])


def best_rates(study: Study, K: int) -> list[list[float]]:  # log2 of inner rates, of outer ones: the jackknife's values
    H, size = max(1, study.steps // 20), max(1, study.scale.batch_size // 2)
    name, run = f"K = {K}", partial(DiLoCoStrategy, "adamw", OptimSpec("sgd"), H=H)
    lr, outer, ways = 0.005 if study.scale.walks else 0.02, 1.0, [(a, b) for a in (-1, 0, 1) for b in (-1, 0, 1)]
    for _ in range(2 * MOST_LONGER):  # a table that stays is not trained again
        points = [{"lr": round(lr * 2.0**a, 6), "outer_lr": round(outer * 1.5**b, 6)} for a, b in ways]
        losses = torch.tensor(study.points(name, run, points, num_nodes=K, max_steps=10 * H, batch_size=size))[..., 0]
        lr, outer = points[int(losses.mean(-1).argmin())].values()
    if not (study.quick or [lr, outer] == [*points[4].values()]):
        raise RuntimeError(f"{name}: the lowest mean loss, at {lr} and {outer}, is not in the middle of its table.")
    n, losses = losses.shape[-1], losses.unflatten(0, (3, 3))
    without = torch.stack([places(losses[..., torch.arange(n) != i]) for i in range(n)])
    inner, outers = (n * places(losses) - (n - 1) * without).T
    return [(log2(lr) + inner).tolist(), (log2(outer) + log2(1.5) * outers).tolist()]


def ask(study: Study) -> Answer:
    (inner_2, outer_2), (inner_32, outer_32) = best_rates(study, 2), best_rates(study, 32)
    inner, outer = difference(inner_32, inner_2), difference(outer_32, outer_2)
    first, last = (difference(one, [0.0] * len(one)) for one in (outer_2, outer_32))
    rows = {"log2 outer, K = 2": first, "K = 32": last, "outer, 32 / 2": outer, "inner, 32 / 2": inner}
    why = f"log2 of the best outer rate: {first} at K = 2, {last} at K = 32, difference {outer}; of the inner: {inner}."
    if not outer.sign == inner.sign == 1:
        return Answer("DISAGREES" if -1 in (outer.sign, inner.sign) else "UNDECIDED", why, rows)
    near = abs(outer.mean - log2(1.4)) < log2(1.25) > abs(inner.mean - log2(1.5))
    return Answer("AGREES" if near else "ORDER ONLY", why, rows)
