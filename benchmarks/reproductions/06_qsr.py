"""Is the quadratic synchronisation rule better than rounds of constant length, at no more bytes?

Setting: Local AdamW on like data, the rate on a cosine to a tenth; QSR with rounds of at least 4 steps and alpha twice
the rate (there 2.2 times), against constant rounds of 4 steps, which need twice its bytes, and of 8, which need as
many; the rate tuned for each arm; equal steps. Losses are compared, not accuracies.
Claim: QSR raises the accuracy of Local AdamW on ViT-B from 79.32 % with constant H = 4 to 80.98 %, with fewer bytes
(arXiv 2310.14423, figure 5), and is better than other rules throughout (abstract).
Verdict: AGREES if QSR is clearly better (two standard errors) than constant rounds of 4 and of 8 steps; ORDER ONLY if
it is clearly better than those of 8; DISAGREES if it is clearly worse than either; else UNDECIDED.
"""

from functools import partial

from study import Answer, Study, difference

from vecgym.strategy import QSR, FedAvgStrategy


def local(lr: float, H: int | None, steps: int) -> FedAvgStrategy:
    when = QSR(2 * lr, 4, max_steps=steps) if H is None else H
    return FedAvgStrategy("adamw", H=when, lr=lr, lr_scheduler="cosine")


def ask(study: Study) -> Answer:
    qsr, four, eight = (
        study.arm(name, partial(local, H=H, steps=study.steps), {"lr": [3e-3, 1e-2, 3e-2, 1e-1]})
        for name, H in {"QSR": None, "H = 4": 4, "H = 8": 8}.items()
    )
    rows = {f"QSR - {arm.name}": difference(qsr, arm) for arm in (four, eight)}
    more, equal = rows.values()
    why = f"QSR minus H = 8, at equal bytes: {equal}; minus H = 4, at half the bytes: {more}."
    if equal.sign == -1:
        return Answer("AGREES" if more.sign == -1 else "ORDER ONLY", why, rows)
    return Answer("DISAGREES" if 1 in (more.sign, equal.sign) else "UNDECIDED", why, rows)
