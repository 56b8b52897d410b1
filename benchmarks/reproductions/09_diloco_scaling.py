"""Do DiLoCo's orderings hold at equal tokens: one node before data parallelism, and fewer nodes before more?

Setting: a batch of 16 is divided among M nodes; AdamW with a cosine, in DiLoCo Nesterov 0.9 and rounds of 5 steps;
inner rate (from 0.004 to 0.064) and outer rate tuned for each arm; equal tokens. "4 B": batches of 64, fewer steps.
Claim: DiLoCo "can outperform data-parallel training even at small model sizes", already with M = 1; the loss grows with
M; the best outer rate grows with M; DiLoCo "tolerates a significantly larger batch size" (arXiv 2503.09799).
Verdict: (1) M = 1 minus data parallel clearly (two standard errors) negative; (2) M = 8 minus M = 1 clearly positive;
(3) the best outer rate of M = 8 above that of M = 1; (4) 4 B costs M = 1 clearly less than data parallelism. AGREES if
all four hold; ORDER ONLY if two or three; else DISAGREES if a clear difference points the other way, or UNDECIDED.
"""

from functools import partial
from typing import Any

from study import Answer, Study, difference

from vecgym.optim import OptimSpec
from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy


def diloco(lr: float, outer_lr: float, H: int) -> DiLoCoStrategy:
    outer = OptimSpec("sgd", lr=outer_lr, momentum=0.9, nesterov=True)
    return DiLoCoStrategy("adamw", outer, lr=lr, H=H, lr_scheduler="cosine")


def parallel(lr: float) -> AllReduceStrategy:
    return AllReduceStrategy("adamw", lr=lr, lr_scheduler="cosine")


def ask(study: Study) -> Answer:
    batch, steps, rates = 16, study.steps, [4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2]
    grid = {"lr": rates, "outer_lr": [0.05, 0.1, 0.2]}
    large: dict[str, Any] = {"num_nodes": 1, "batch_size": 4 * batch, "max_steps": max(2, steps // 4)}
    one, two, eight = (
        study.arm(f"M = {M}", partial(diloco, H=max(1, steps // 40)), grid, num_nodes=M, batch_size=batch // M)
        for M in (1, 2, 8)
    )
    data = study.arm("data parallel", parallel, {"lr": rates}, num_nodes=1, batch_size=batch)
    one_large = study.arm("M = 1, 4 B", partial(diloco, H=max(1, steps // 40)), grid, **large)
    data_large = study.arm("data parallel, 4 B", parallel, {"lr": rates}, **large)
    costs = [difference(a, b) for a, b in ((one_large, one), (data_large, data))]
    extra = [a - b - c + d for a, b, c, d in zip(*(arm.column() for arm in (one_large, one, data_large, data)))]
    rows = {
        "M = 1 - data parallel": difference(one, data),
        "M = 2 - M = 1": difference(two, one),
        "M = 8 - M = 1": difference(eight, one),
        "4 B: cost at M = 1": costs[0],
        "4 B: cost, data parallel": costs[1],
        "4 B: M = 1 - data parallel": difference(extra, [0.0] * len(extra)),
    }
    signs = [-rows["M = 1 - data parallel"].sign, rows["M = 8 - M = 1"].sign, -rows["4 B: M = 1 - data parallel"].sign]
    outer = one.best["outer_lr"], eight.best["outer_lr"]
    held = signs.count(1) + (outer[1] > outer[0])
    why = (
        f"M = 1 minus data parallel: {rows['M = 1 - data parallel']}, M = 8 minus M = 1: {rows['M = 8 - M = 1']}; best "
        f"outer rates {outer[0]} and {outer[1]}; four times the batch costs {costs[0]} and {costs[1]}."
    )
    if held >= 2:
        return Answer("AGREES" if held == 4 else "ORDER ONLY", why, rows)
    return Answer("DISAGREES" if -1 in signs else "UNDECIDED", why, rows)
