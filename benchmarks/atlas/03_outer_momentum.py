"""From how many rounds on is outer momentum better than none?

Setting: DiLoCo with AdamW inside, 5, 20 or 100 rounds; inner and outer rate tuned for each arm; equal steps.
Expected: Nesterov 0.9 loses below 20 rounds (+0.02 at 5) and wins beyond (-0.015 at 80); 0.5 lies between.
Verdict: AGREES if 0.9 minus none is clearly positive (two standard errors) at the fewest rounds and clearly negative at
the most; ORDER ONLY if it falls clearly but stays above 0; DISAGREES if it does neither; UNDECIDED if nothing is clear.
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
    for rounds in (5, 20, 100):
        arms = [
            study.arm(
                f"{rounds} rounds, momentum {momentum}",
                partial(diloco, momentum=momentum, H=max(1, study.steps // rounds)),
                {"lr": [3e-3, 1e-2, 3e-2], "outer_lr": [0.2, 0.4, 0.8]},
            )
            for momentum in (0.0, 0.5, 0.9)
        ]
        rows |= {f"{rounds} rounds: {m} - none": difference(arm, arms[0]) for m, arm in zip((0.5, 0.9), arms[1:])}
    few, some, many = (rows[f"{rounds} rounds: 0.9 - none"] for rounds in (5, 20, 100))
    why = f"Nesterov 0.9 minus none: {few} at 5 rounds, {some} at 20, {many} at 100."
    if few.sign == 1 and many.sign == -1:
        return Answer("AGREES", why, rows)
    if few.mean - many.mean > 2 * (few.error**2 + many.error**2) ** 0.5 and many.mean > 0:
        return Answer("ORDER ONLY", why, rows)
    return Answer("DISAGREES" if few.sign or many.sign else "UNDECIDED", why, rows)
