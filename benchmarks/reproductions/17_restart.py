"""Do restarts of the outer momentum widen the range of outer rates and momenta that work?

Setting: DiLoCo in 20 rounds with AdamW inside, whose rate is tuned once, without restarts, together with the outer
rate at momentum 0.9; then 14 cells, outer rates of 0.025 to 1.6 by factors of 2 with Nesterov 0.9 and 0.99, without and
with a restart every 3 rounds, not tuned. A cell is stable in a seed if its loss is at most 0.1 above the mean of the
best of all 28; a diverged run counts as a loss of 10. Equal steps and bytes.
Claim: "periodic restarts widen the stable range of outer learning rates and momentum values across communication
periods" (arXiv 2605.28585, abstract; the figures restart every 3 rounds).
Verdict: Clear is two standard errors. AGREES if the share of stable cells is clearly larger with restarts, and the
best cell with them is not clearly worse than the best without; ORDER ONLY if it is larger, but the best clearly worse;
DISAGREES if the share is clearly smaller; else UNDECIDED.
"""

from functools import partial

from study import Answer, Study, difference

from vecgym.optim import OptimSpec
from vecgym.strategy import DiLoCoStrategy

RATES, MOMENTA = (0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6), (0.9, 0.99)


def diloco(lr: float, outer_lr: float, momentum: float, restart: int | None, H: int) -> DiLoCoStrategy:
    outer = OptimSpec("sgd", lr=outer_lr, momentum=momentum, nesterov=True)
    return DiLoCoStrategy("adamw", outer, lr=lr, H=H, restart=restart)


def ask(study: Study) -> Answer:
    made = partial(diloco, H=max(1, study.steps // 20))
    grid = {"lr": [3e-3, 1e-2, 3e-2], "outer_lr": [0.1, 0.2, 0.4]}
    lr = study.arm("tuned", partial(made, momentum=0.9, restart=None), grid).best["lr"]
    rates = RATES[::4] if study.quick else RATES  # those of the rows
    cells = [(rate, momentum) for momentum in MOMENTA for rate in rates]
    losses: dict[int | None, dict[tuple[float, float], list[float]]] = {None: {}, 3: {}}
    for restart in (None, 3):
        for rate, momentum in cells:
            cell = partial(made, lr=lr, outer_lr=rate, momentum=momentum, restart=restart)
            arm = study.arm(f"rate {rate}, momentum {momentum}, restart {restart}", cell)
            losses[restart][rate, momentum] = [min(loss, 10.0) for loss in arm.column()]
    best = {S: min((losses[S][cell] for cell in cells), key=sum) for S in (None, 3)}
    bar = min(sum(column) / len(column) for column in best.values()) + 0.1
    share = {
        S: [sum(losses[S][cell][i] <= bar for cell in cells) / len(cells) for i in range(len(best[S]))] for S in best
    }
    rows = {"share of stable cells": difference(share[3], share[None]), "best cell": difference(best[3], best[None])}
    for rate, momentum in ((0.025, 0.9), (0.4, 0.9), (0.025, 0.99), (0.4, 0.99)):
        rows[f"rate {rate}, momentum {momentum}"] = difference(losses[3][rate, momentum], losses[None][rate, momentum])
    wider, loss = rows["share of stable cells"], rows["best cell"]
    why = f"With restarts minus without: {wider} of the 14 cells are stable; the best cell's loss {loss}."
    if wider.sign == 1:
        return Answer("ORDER ONLY" if loss.sign == 1 else "AGREES", why, rows)
    return Answer("DISAGREES" if wider.sign == -1 else "UNDECIDED", why, rows)
