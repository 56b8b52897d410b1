"""How fast should the error feedback of the top 1 % be forgotten?

Setting: 4 nodes send the largest 1 % of each tensor of their movement in 50, 10 or 4 rounds (H = 4, 20, 50 at "tiny"),
and continue at the mean of these; a residual is multiplied by d in each round, and none is kept with d = 0. Baseline: a
dense mean. The rate is tuned for each arm; like data, AdamW, equal steps.
Expected: At H = 4, 15 and 60 the best d is 0.9, and the losses are 0.15, 0.25 and 0.45 above those of dense means.
Verdict: AGREES if d = 0.9 has the lowest mean loss at every H, and its loss above dense means clearly (two standard
errors) grows from the shortest H to the longest; ORDER ONLY if it grows so, and no other d is clearly better at any H;
DISAGREES if another d is clearly better at some H, or the loss above dense means clearly falls; else UNDECIDED.
"""

from functools import partial

from study import Answer, Difference, Study, difference

from vecgym.compress import TopK
from vecgym.strategy import Average, Compressed, Exchange, Mean, Strategy

DECAYS = (0.0, 0.5, 0.9, 1.0)
RATES = {"lr": [0.01, 0.02, 0.04]}


def how(d: float) -> Average:
    if d == 0:
        return Compressed(Mean(), TopK(0.01), reference=True, error_feedback=False)
    return Compressed(Mean(), TopK(0.01), reference=True, decay=d)


def averaging(lr: float, average: Average, H: int) -> Strategy:
    return Strategy("adamw", [Exchange(average, every=H)], lr=lr)


def ask(study: Study) -> Answer:
    rows: dict[str, Difference] = {}
    above, best, worse = [], [], False
    for rounds in (50, 10, 4):
        H = max(1, study.steps // rounds)
        dense = study.arm(f"{rounds} rounds, dense", partial(averaging, average=Mean(), H=H), RATES, num_nodes=4)
        arms = {}
        for d in DECAYS:
            strategy = partial(averaging, average=how(d), H=H)
            arms[d] = study.arm(f"{rounds} rounds, d = {d}", strategy, RATES, num_nodes=4)
        best.append(min(arms, key=lambda d: arms[d].mean()))
        above.append([a - b for a, b in zip(arms[0.9].column(), dense.column())])
        rows[f"{rounds} rounds: 0.9 - dense"] = difference(arms[0.9], dense)
        for d in (1.0,) if rounds > 4 else (0.0, 0.5, 1.0):
            rows[f"{rounds} rounds: {d:g} - 0.9"] = difference(arms[d], arms[0.9])
        worse |= any(difference(arm, arms[0.9]).sign == -1 for arm in arms.values())
    grows = difference(above[-1], above[0])
    excess = [str(rows[f"{rounds} rounds: 0.9 - dense"]) for rounds in (50, 10, 4)]
    why = f"Best d at 50, 10 and 4 rounds: {best[0]}, {best[1]}, {best[2]}; 0.9 minus dense: {', '.join(excess)}."
    if worse or grows.sign == -1:
        return Answer("DISAGREES", why, rows)
    if grows.sign == 0:
        return Answer("UNDECIDED", why, rows)
    return Answer("AGREES" if best == [0.9, 0.9, 0.9] else "ORDER ONLY", why, rows)
