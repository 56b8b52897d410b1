"""Is outer momentum of any use below 20 rounds, if each arm is tuned?

Setting: DiLoCo with AdamW inside, 4 or 16 rounds, like data or unlike data (2 shards of sorted classes a node, or a
stretch of the text); inner and outer rate tuned for each arm; equal steps and bytes, and the last step ends a round.
Claim: with each arm tuned over its rates, outer momentum is null or worse in 25 of 26 cells of fewer than about 20
rounds (reported without an address; the source was not found again, and its models are not known).
Verdict: of the cells, "better" and "worse" are those in which Nesterov's 0.9 minus none is clearly negative or positive
(two standard errors). AGREES if none is better; DISAGREES if half of them or more are; ORDER ONLY if fewer are better
than worse; else UNDECIDED.
"""

from functools import partial

from study import Answer, Difference, Study, difference

from vecgym.optim import OptimSpec
from vecgym.strategy import DiLoCoStrategy


def diloco(lr: float, outer_lr: float, momentum: float, H: int) -> DiLoCoStrategy:
    outer = OptimSpec("sgd", lr=outer_lr, momentum=momentum, nesterov=momentum > 0)
    return DiLoCoStrategy("adamw", outer, lr=lr, H=H)


def ask(study: Study) -> Answer:
    rows: dict[str, Difference] = {}
    for data, label in (("like", "like"), ("shards", "unlike")):
        for rounds in (4, 16):
            none, with_it = (
                study.arm(
                    f"{label}, {rounds} rounds, momentum {momentum}",
                    partial(diloco, momentum=momentum, H=max(1, study.steps // rounds)),
                    {"lr": [3e-3, 1e-2, 3e-2], "outer_lr": [low, 2 * low, 4 * low]}, data=data,
                    max_steps=rounds * max(1, study.steps // rounds),
                )
                for momentum, low in ((0.0, 0.4), (0.9, 0.1))
            )  # fmt: skip
            rows[f"{label}, {rounds} rounds: 0.9 - none"] = difference(with_it, none)
    why = "; ".join(f"{label.split(':')[0]}: {row}" for label, row in rows.items())
    why = f"Nesterov 0.9 minus none: {why}."
    better, worse = (sum(row.sign == sign for row in rows.values()) for sign in (-1, 1))
    if not better:
        return Answer("AGREES", why, rows)
    if 2 * better >= len(rows):
        return Answer("DISAGREES", why, rows)
    return Answer("ORDER ONLY" if better < worse else "UNDECIDED", why, rows)
