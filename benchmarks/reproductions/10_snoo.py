"""Does Nesterov's momentum on a single node's own movement save a third of the steps?

Setting: one node, AdamW with a cosine, batches of 16; SNOO is an outer Nesterov step on each 40th of the run. Lookahead
is the same without momentum. The inner rate, the outer rate (0.25, 0.5, 1) and momentum (0.5, 0.8) are tuned; equal
steps, and an AdamW arm that has 1.5 times as many.
Claim: "compute factor gains of 1.5 - 2.5 x in a non-distributed setting", which stem "primarily from applying Nesterov
momentum to the pseudo-gradient" (SNOO, arXiv 2510.15830, abstract).
Verdict: AGREES if SNOO is clearly (two standard errors) better than AdamW and than Lookahead, and not clearly worse
than AdamW with 1.5 times the steps; ORDER ONLY if it is clearly better than AdamW, but the rest does not hold;
DISAGREES if it is clearly worse than AdamW or than Lookahead, or within 1 % of AdamW's loss; UNDECIDED otherwise, and
where 1.5 times the steps are not clearly better than the steps, so that there is nothing to save.
"""

from functools import partial
from typing import Any

from study import Answer, Study, difference

from vecgym.optim import OptimSpec
from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy

RATES = [4e-3, 8e-3, 1.6e-2]


def adamw(lr: float) -> AllReduceStrategy:
    return AllReduceStrategy("adamw", lr=lr, lr_scheduler="cosine")


def snoo(lr: float, outer_lr: float, H: int, momentum: float = 0.0) -> DiLoCoStrategy:
    outer = OptimSpec("sgd", lr=outer_lr, momentum=momentum, nesterov=momentum > 0)
    return DiLoCoStrategy("adamw", outer, lr=lr, H=H, lr_scheduler="cosine")


def ask(study: Study) -> Answer:
    alone: dict[str, Any] = {"num_nodes": 1, "batch_size": 16}
    outer, H = {"lr": RATES, "outer_lr": [0.25, 0.5, 1.0]}, max(1, study.steps // 40)
    plain = study.arm("AdamW", adamw, {"lr": RATES}, **alone)
    longer = study.arm("AdamW, 1.5 x", adamw, {"lr": RATES}, max_steps=study.steps * 3 // 2, **alone)
    ahead = study.arm("Lookahead", partial(snoo, H=H), outer, **alone)
    nesterov = study.arm("SNOO", partial(snoo, H=H), {**outer, "momentum": (0.5, 0.8)}, **alone)
    rows = {
        "SNOO - AdamW": difference(nesterov, plain),
        "SNOO - Lookahead": difference(nesterov, ahead),
        "SNOO - AdamW, 1.5 x": difference(nesterov, longer),
        "AdamW, 1.5 x - AdamW": difference(longer, plain),
    }
    better, than_ahead, than_longer, room = rows.values()
    why = f"SNOO minus AdamW: {better}, minus Lookahead: {than_ahead}, " + (
        f"minus AdamW with 1.5 times the steps: {than_longer}."
    )
    if room.sign != -1:
        return Answer("UNDECIDED", why + f" These gain {room}.", rows)
    if better.sign == -1:
        saved = than_ahead.sign == -1 and than_longer.sign != 1
        return Answer("AGREES" if saved else "ORDER ONLY", why, rows)
    same = abs(better.mean) + 2 * better.error < 0.01 * plain.mean()
    return Answer("DISAGREES" if better.sign == 1 or than_ahead.sign == 1 or same else "UNDECIDED", why, rows)
