"""Does the first merge hurt?

Setting: Plain averages of the parameters in 6 rounds of half the scale's steps (100 at "tiny"), AdamW at constant rates
of 0.001, 0.003 and 0.01, the axis of the question, like data. The effect of a merge is the loss of the averaged model
minus the mean of the nodes' losses, all measured one step before the merge.
Expected: It depends on the rate: at 0.001, 0.003 and 0.01 the first merge changes the loss by -0.005, -0.01 and +0.12,
the sixth by -0.01, -0.035 and -0.09.
Verdict: AGREES if at 0.01 the first merge clearly hurts (two standard errors), and the sixth clearly helps at each
rate; ORDER ONLY if the first does not clearly hurt at 0.01, and the sixth helps clearly more than the first at each
rate; UNDECIDED if neither holds and the first merge at 0.01 has no clear sign; else DISAGREES.
"""

from study import Answer, Difference, Study, difference

from vecgym import History
from vecgym.strategy import FedAvgStrategy


def effects(history: History) -> list[float]:
    """Loss of the mean minus mean of the losses, before each of the 6 merges; the first row is the start."""
    (_, averaged), (_, own) = history.series("val_loss"), history.series("val_loss_local")
    return [float(a - b) for a, b in zip(averaged, own)][1:]


def ask(study: Study) -> Answer:
    rows: dict[str, Difference] = {}
    H, later = max(1, study.steps // 2), []
    rates = (1e-3, 3e-3, 1e-2)
    for lr in rates:

        def averaging(lr: float = lr) -> FedAvgStrategy:
            return FedAvgStrategy("adamw", H=lambda begin: H if begin else H + 1, lr=lr)

        arm = study.arm(f"rate {lr}", averaging, measure=effects, max_steps=6 * H, val_interval=H)
        nothing = [0.0] * len(arm.values)
        rows |= {f"{lr}: merge 1": difference(arm, nothing, 0), f"{lr}: merge 6": difference(arm, nothing, 5)}
        later.append(difference(arm.column(5), arm.column(0)))
    first = [rows[f"{lr}: merge 1"] for lr in rates]
    sixth = [rows[f"{lr}: merge 6"] for lr in rates]
    why = f"At 0.001, 0.003 and 0.01 the first merge changes the loss by {', '.join(map(str, first))}, " + (
        f"the sixth by {', '.join(map(str, sixth))}."
    )
    if first[-1].sign == 1:
        return Answer("AGREES" if all(one.sign == -1 for one in sixth) else "DISAGREES", why, rows)
    if all(one.sign == -1 for one in later):
        return Answer("ORDER ONLY", why, rows)
    return Answer("DISAGREES" if first[-1].sign else "UNDECIDED", why, rows)
