"""At a merge, should the nodes average the memory of their inner optimizers, too?

Setting: 4 nodes, 10 rounds, plain averages of the parameters; AdamW and SGD with momentum 0.9, like data and unlike
(2 shards a node; stretches of a text); each node keeps its moments, or the first, the second or both are averaged with
the parameters; the rate tuned for each arm; equal steps. A run that ends above its first loss counts as diverged.
Expected: Averaging everything is best: AdamW on like data, AdamW on 2 shards (-0.05 against keeping), and SGD.
Verdict: AGREES if in all four cases averaging everything is clearly better than keeping (two standard errors), nowhere
clearly worse than one moment alone, and the gain of AdamW on unlike data is within a factor of 2 of 0.05; ORDER ONLY if
all but this size holds; DISAGREES if averaging everything is somewhere clearly worse than another choice; UNDECIDED if
none of these.
"""

import math

from study import Answer, Difference, Study, difference

from vecgym import History
from vecgym.optim import OptimSpec
from vecgym.strategy import Exchange, Mean, Strategy

OPTIM = {"AdamW": OptimSpec("adamw"), "SGD": OptimSpec("sgd", momentum=0.9)}
CHOICES = {
    "AdamW": {"keep": [], "first": ["exp_avg"], "second": ["exp_avg_sq"], "all": ["exp_avg", "exp_avg_sq"]},
    "SGD": {"keep": [], "all": ["momentum_buffer"]},
}
RATES = {"AdamW": [0.005, 0.01, 0.02], "SGD": [0.03, 0.06, 0.12]}


def at_the_end(history: History) -> list[float]:
    loss = history.last("val_loss")
    return [loss if loss < history["val_loss"][0] else math.inf]


def ask(study: Study) -> Answer:
    H, others = max(1, study.steps // 10), []
    rows: dict[str, Difference] = {}
    for data in ("like", "shards"):
        for name, choices in CHOICES.items():
            arms = {}
            for choice, slots in choices.items():

                def averaging(lr: float, name: str = name, slots: list[str] = slots) -> Strategy:
                    moments = [Exchange(Mean(), every=H, of=slots)] if slots else []
                    return Strategy(OPTIM[name], [Exchange(Mean(), every=H), *moments], lr=lr)

                arms[choice] = study.arm(
                    f"{name}, {data}, {choice}", averaging, {"lr": RATES[name]}, at_the_end, data=data, num_nodes=4
                )
            rows |= {f"{name}, {data}: {choice} - keep": difference(arm, arms["keep"])
                     for choice, arm in arms.items() if choice != "keep"}  # fmt: skip
            others += [difference(arms["all"], arm) for choice, arm in arms.items() if choice in ("first", "second")]
    gains = {label.partition(":")[0]: row for label, row in rows.items() if ": all" in label}
    why = f"Averaging everything minus keeping: {', '.join(f'{case} {row}' for case, row in gains.items())}. "
    first, second = (rows[f"AdamW, shards: {moment} - keep"] for moment in ("first", "second"))
    why += f"One moment alone (AdamW, shards): the first {first}, the second {second}."
    if any(one.sign == 1 for one in [*gains.values(), *others]):
        return Answer("DISAGREES", why, rows)
    if all(one.sign == -1 for one in gains.values()):
        return Answer("AGREES" if 0.025 <= -gains["AdamW, shards"].mean <= 0.1 else "ORDER ONLY", why, rows)
    return Answer("UNDECIDED", why, rows)
