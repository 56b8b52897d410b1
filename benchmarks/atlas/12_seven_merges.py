"""When are seven merges best made?

Setting: 8 nodes with 2 shards each, or a stretch of a text; AdamW with a cosine, its rate tuned. Seven averages of the
parameters in 200 steps; the loss is that of one more, after the last step. Merges are evenly spaced; ever more often or
ever rarer, with gaps that change by a constant; or all in the first or the last quarter. Equal bytes, equal steps.
Expected: Best ever more often, worst early; late minus early -0.35.
Verdict: ORDER ONLY if merges ever more often have the lowest mean loss, early ones the highest, and late minus early is
clearly negative (two standard errors); AGREES if ever more often is also clearly below even, and late minus early
within -0.7 to -0.175; DISAGREES if late minus early or ever more often minus even is clearly positive, or another
schedule clearly above early; else UNDECIDED.
"""

from functools import partial

from study import Answer, Study, difference

from vecgym.strategy import FedAvgStrategy

FRACTIONS = {  # of the steps, before which a merge is due
    "even": [k / 8 for k in range(1, 8)],
    "ever more often": [1 - (k / 8) ** 2 for k in range(1, 8)],
    "ever rarer": [(k / 8) ** 2 for k in range(1, 8)],
    "early": [k / 28 for k in range(1, 8)],
    "late": [1 - k / 28 for k in range(1, 8)],
}


def merged(lr: float, steps: list[int], of: int) -> FedAvgStrategy:
    weights = [float(step + 1 in steps) for step in range(of)]
    return FedAvgStrategy("adamw", sync_weight=weights, lr=lr, lr_scheduler="cosine")


def ask(study: Study) -> Answer:
    arms = {
        name: study.arm(
            name, partial(merged, steps=[max(1, round(x * study.steps)) for x in fractions], of=study.steps),
            {"lr": [3e-3, 1e-2, 3e-2]}, data="shards", num_nodes=8,
        )
        for name, fractions in FRACTIONS.items()
    }  # fmt: skip
    even, often, _, early, late = arms.values()
    rows = {f"{arm.name} - even": difference(arm, even) for arm in arms.values() if arm is not even}
    rows["late - early"] = between = difference(late, early)
    order = sorted(arms, key=lambda name: arms[name].mean())
    why = f"From best to worst: {', '.join(order)}; ever more often minus even {rows['ever more often - even']}, "
    why += f"late minus early {between}."
    if order[0] == often.name and order[-1] == early.name and between.sign == -1:
        near = rows["ever more often - even"].sign == -1 and -0.7 <= between.mean <= -0.175
        return Answer("AGREES" if near else "ORDER ONLY", why, rows)
    against = between.sign == 1 or rows["ever more often - even"].sign == 1
    against = against or any(difference(arm, early).sign == 1 for arm in arms.values() if arm is not early)
    return Answer("DISAGREES" if against else "UNDECIDED", why, rows)
