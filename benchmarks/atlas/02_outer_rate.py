"""How do the best plain outer rate and the best inner rate change from 2 nodes to 32?

Setting: DiLoCo without outer momentum, AdamW inside, 10 rounds in half the scale's steps, half its batch size, like
data, K = 2 and 32, equal steps. The best rates are the minimum of parabolas through the logarithms of the mean losses
at 3 x 3 rates around the tuned ones (factors of 2 inside, 1.5 outside); errors by the jackknife over seeds.
Expected: Outer 1.0 at K = 2 and 1.4 at K = 32, a ratio of 1.4; the best inner rate is 1.5 times as large at K = 32.
Verdict: AGREES if both ratios are clearly above 1 (two standard errors) and within a factor of 1.25 of 1.4 and 1.5;
ORDER ONLY if both are clearly above 1; DISAGREES if one is clearly below 1; else UNDECIDED.
"""

from math import copysign, log2

import torch
from study import Answer, Study, difference
from torch import Tensor

from vecgym.optim import OptimSpec
from vecgym.strategy import DiLoCoStrategy


def lowest(y: list[float]) -> tuple[float, float]:
    """Place, between -1 and 1, and value of the minimum of a parabola through the values at -1, 0 and 1."""
    slope, bend = (y[2] - y[0]) / 2, y[0] - 2 * y[1] + y[2]
    x = min(1.0, max(-1.0, -slope / bend)) if bend > 0 else copysign(1.0, -slope)
    return x, y[1] + slope * x + bend / 2 * x * x


def places(losses: Tensor) -> Tensor:
    """The best inner and the best outer rate in losses [inner, outer, seeds], each at the best rate of the other."""
    table = losses.clamp(max=100).mean(-1).log()
    return torch.tensor([lowest([lowest(row)[1] for row in one.tolist()])[0] for one in (table, table.T)])


def best(study: Study, K: int) -> list[list[float]]:
    """log2 of the best inner rates, and of the best outer rates: the jackknife's values, one a seed."""

    def run(lr: float, outer_lr: float) -> DiLoCoStrategy:
        return DiLoCoStrategy("adamw", OptimSpec("sgd", lr=outer_lr), lr=lr, H=max(1, study.steps // 20))

    grid, batch_size = {"lr": [0.005, 0.01, 0.02], "outer_lr": [0.67, 1.0, 1.5]}, max(1, study.scale.batch_size // 2)
    common = {"num_nodes": K, "max_steps": 10 * max(1, study.steps // 20), "batch_size": batch_size}
    lr, outer = study.arm(f"K = {K}", run, grid, **common).best.values()
    points = [{"lr": lr * 2.0**a, "outer_lr": outer * 1.5**b} for a in (-1, 0, 1) for b in (-1, 0, 1)]
    losses = torch.tensor(study.points(f"K = {K}", run, points, **common))[..., 0].unflatten(0, (3, 3))
    n, whole = losses.shape[-1], places(losses)
    found = torch.stack([n * whole - (n - 1) * places(losses[..., torch.arange(n) != i]) for i in range(n)], 1)
    return [(log2(lr) + found[0]).tolist(), (log2(outer) + log2(1.5) * found[1]).tolist()]


def ask(study: Study) -> Answer:
    (inner_2, outer_2), (inner_32, outer_32) = best(study, 2), best(study, 32)
    inner, outer = difference(inner_32, inner_2), difference(outer_32, outer_2)
    first, last = (difference(one, [0.0] * len(one)) for one in (outer_2, outer_32))
    rows = {"log2 outer, K = 2": first, "K = 32": last, "outer, 32 / 2": outer, "inner, 32 / 2": inner}
    why = f"log2 of the best outer rate: {first} at K = 2, {last} at K = 32, difference {outer}; of the inner: {inner}."
    if outer.sign == inner.sign == 1:
        near = abs(outer.mean - log2(1.4)) < log2(1.25) > abs(inner.mean - log2(1.5))
        return Answer("AGREES" if near else "ORDER ONLY", why, rows)
    return Answer("DISAGREES" if -1 in (outer.sign, inner.sign) else "UNDECIDED", why, rows)
