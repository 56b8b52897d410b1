"""How many steps between merges are best, if only steps are counted?

Setting: 4 nodes, DiLoCo with AdamW inside, H = 1, u, 4 u and 16 u in 48 u steps (u = 4 at "tiny"); outside plain SGD at
rate 1, an average, or Nesterov 0.9 with its own rate; constant inner rates, or a cosine to 10 %. Rates tuned for each
arm; like data, equal steps.
Expected: H = 4 is best with Nesterov, H = 1 without momentum; H = 64 costs 0.09 and 0.10 with Nesterov (constant rates,
cosine), and 0.06 and 0.07 without.
Verdict: AGREES if the expected H, u or 1, has the lowest mean loss in all four cases, and the longest clearly (two
standard errors) costs the expected number within a factor of 2; ORDER ONLY if the longest clearly costs, and no other H
is clearly better than the expected one; DISAGREES if another is somewhere; else UNDECIDED.
"""

from functools import partial

from study import Answer, Difference, Study, difference

from vecgym.optim import OptimSpec
from vecgym.strategy import DiLoCoStrategy

NAMES = ("1", "u", "4 u", "16 u")
OUTSIDE = {"plain": OptimSpec("sgd", lr=1.0), "Nesterov": OptimSpec("sgd", momentum=0.9, nesterov=True)}
EXPECTED = {
    ("Nesterov", "constant"): (1, 0.09), ("Nesterov", "cosine"): (1, 0.10),
    ("plain", "constant"): (0, 0.06), ("plain", "cosine"): (0, 0.07),
}  # fmt: skip


def ask(study: Study) -> Answer:
    u = max(1, study.steps // 48)
    rows: dict[str, Difference] = {}
    costs, lowest, better = [], [], False
    for (outside, schedule), (at, _) in EXPECTED.items():
        grid = {"lr": [0.01, 0.02, 0.04]} | ({"outer_lr": [0.03, 0.1, 0.3]} if outside == "Nesterov" else {})
        arms = [
            study.arm(
                f"{outside}, {schedule}, H = {name}",
                partial(DiLoCoStrategy, "adamw", OUTSIDE[outside], H=H, lr_scheduler=schedule),
                grid, num_nodes=4, max_steps=min(study.steps, 48 * u),
            )
            for name, H in zip(NAMES, (1, u, 4 * u, min(16 * u, study.steps)))
        ]  # fmt: skip
        means = [arm.mean() for arm in arms]
        lowest.append(means.index(min(means)))
        better |= any(difference(arm, arms[at]).sign == -1 for arm in arms)
        costs.append(difference(arms[3], arms[at]))
        rows[f"{outside}, {schedule}: longest"] = costs[-1]
        rows[f"{outside}, {schedule}: {'1 - u' if at else 'u - 1'}"] = difference(arms[1 - at], arms[at])
    best = ", ".join(str((1, u, 4 * u, 16 * u)[i]) for i in lowest)
    why = f"Best H: {best}; the longest costs {', '.join(map(str, costs))}."
    if better:
        return Answer("DISAGREES", why, rows)
    if any(cost.sign != 1 for cost in costs):
        return Answer("UNDECIDED", why, rows)
    near = all(0.5 <= cost.mean / e <= 2 for cost, (_, e) in zip(costs, EXPECTED.values()))
    return Answer("AGREES" if near and lowest == [at for at, _ in EXPECTED.values()] else "ORDER ONLY", why, rows)
