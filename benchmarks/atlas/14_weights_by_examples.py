"""By how much are averages better if nodes count by their numbers of examples?

Setting: FedAvg with SGD, ten merges; a Dirichlet distribution, of which alpha = 1, 0.3 and 0.1 leave nodes with ever
more unequal numbers of examples, splits the classes of digits, and gives the lengths of the stretches of a text; as
many steps each; the rate tuned for each arm; equal steps and bytes.
Expected: by 0.005, 0.02 and 0.06 at alpha = 1, 0.3 and 0.1.
Verdict: by the difference at alpha = 0.1, weights by examples minus equal ones. If it is clearly negative (two standard
errors), AGREES if it is -0.03 or lower, half of the expectation, and else ORDER ONLY. Otherwise DISAGREES if it is
clearly above -0.03, UNDECIDED if not.
"""

from functools import partial

from study import Answer, Study, difference

from vecgym.strategy import FedAvgStrategy

ALPHAS = (1.0, 0.3, 0.1)


def ask(study: Study) -> Answer:
    rows = {}
    for alpha in ALPHAS:
        equal, examples = (
            study.arm(
                f"alpha {alpha}, {weighting}",
                partial(FedAvgStrategy, "sgd", H=max(1, study.steps // 10), weighting=weighting),
                {"lr": [0.05, 0.1, 0.2, 0.4]},
                data=alpha,
            )
            for weighting in ("equal", "examples")
        )
        rows[f"alpha {alpha}: examples - equal"] = difference(examples, equal)
    one, some, least = rows.values()
    why = f"Weights by examples minus equal ones: {one}, {some} and {least} at alpha = 1, 0.3 and 0.1."
    if least.sign == -1:
        return Answer("AGREES" if least.mean <= -0.03 else "ORDER ONLY", why, rows)
    return Answer("DISAGREES" if least.mean - 2 * least.error > -0.03 else "UNDECIDED", why, rows)
