"""Does the first merge hurt, do later ones help, and does their gain shrink with the rate?

Setting: DiLoCo, 10 rounds, AdamW inside, SGD(0.7) with Nesterov's momentum 0.5 or 0.9 outside, as in the source; the
inner rate tuned for each, linear to 0 over the last two rounds; like data. The effect of a merge is the loss of the
outer model after it minus the nodes' mean loss before it: two runs of equal seed end just before and just after it.
Claim: for K = 8, H = 500, 162 M parameters and momentum 0.5 the first merge costs 1.21, the second 0.065; the third
gains 0.149, the last before the rate falls 0.248, the very last 0.045. With 0.9 and K = 2 the loss rises from round 3
to round 4, 4.140 to 4.224; with 0.5 it falls, 3.906 to 3.758 (github.com/adamdivak/distrain, docs/writeup_data/
diloco_sync.csv and docs/sessions/2026-08-19-outer-momentum.md; one seed).
Verdict: "clearly" is by two standard errors. (a) Merge 1 clearly costs; (b) merge 8 clearly gains; (c) merge 10 clearly
gains less; (d) merge 1 is clearly worse than merge 8; (e) from round 3 to 4 the loss clearly rises with 0.9 and does
not with 0.5. AGREES if all hold; ORDER ONLY if b, c and d hold; UNDECIDED if merges 1 and 8 are both unclear; else
DISAGREES.
"""

from collections.abc import Iterable
from functools import partial

from study import Answer, Study, difference

from vecgym import History
from vecgym.optim import OptimSpec
from vecgym.strategy import DiLoCoStrategy

ROUNDS, FALLING = 10, 2


def diloco(lr: float, momentum: float, H: int, end: int = 0) -> DiLoCoStrategy:
    """With `end` the merge of that step is left out."""
    outer = OptimSpec("sgd", lr=0.7, momentum=momentum, nesterov=True)
    return DiLoCoStrategy(
        "adamw", outer, lr=lr, H=lambda step: H + 1 if step == end - H else H,
        lr_scheduler=lambda step: min(1.0, (ROUNDS * H - step) / (FALLING * H)),
    )  # fmt: skip


def both(history: History) -> Iterable[float]:
    return [history.last("val_loss_local"), history.last("val_loss")]


def ask(study: Study) -> Answer:
    H, rows = max(1, study.steps // ROUNDS), {}
    for momentum, merges in ((0.5, (1, 2, 8, 10)), (0.9, ())):
        lrs = {"lr": [1e-3, 3e-3, 1e-2, 3e-2]}
        best = study.arm(f"{momentum}", partial(diloco, momentum=momentum, H=H), lrs, max_steps=ROUNDS * H).best
        fixed = partial(diloco, momentum=momentum, H=H, **best)
        after = {i: study.arm(f"{momentum}, after {i}", fixed, max_steps=i * H) for i in sorted({3, 4, *merges})}
        for i in merges:
            before = study.arm(f"before {i}", partial(fixed, end=i * H), measure=both, max_steps=i * H)
            rows[f"merge {i}"] = difference(after[i].column(), before.column(0))
        rows[f"{momentum}: round 4 - 3"] = difference(after[4], after[3])
    first, late, last = (rows[f"merge {i}"] for i in (1, 8, 10))
    rise, other = rows["0.9: round 4 - 3"], rows["0.5: round 4 - 3"]
    why = f"Merge 1: {first}, 8: {late}, 10: {last}; from round 3 to 4 with 0.9: {rise}, with 0.5: {other}."
    less = last.mean - late.mean > 2 * (last.error**2 + late.error**2) ** 0.5
    order = first.mean - late.mean > 2 * (first.error**2 + late.error**2) ** 0.5
    if late.sign == -1 and less and order:
        return Answer("AGREES" if first.sign == 1 and rise.sign == 1 and other.sign < 1 else "ORDER ONLY", why, rows)
    return Answer("DISAGREES" if first.sign or late.sign else "UNDECIDED", why, rows)
