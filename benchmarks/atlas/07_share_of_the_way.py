"""How much of the way from one node's batch to eight times that batch do averages every H steps go?

Setting: 8 nodes with like data, averages of the parameters every 5, 20 and 100 of 200 steps, and Nesterov 0.9 outside
every 20; AdamW, every rate tuned. The ends of the way are one node alone, and 8 nodes that average every gradient, at
equal steps; a share is the gain over one node's loss, divided by that of all gradients.
Expected: 85, 70 and 48 % at H = 5, 20 and 100; with Nesterov 78 % at H = 20.
Verdict: UNDECIDED if eight times the batch is not clearly (two standard errors) better than one; else ORDER ONLY if
shares fall clearly from H to H and Nesterov's is clearly above that of plain averages, and AGREES if all four are also
within 10 points; DISAGREES if one of these three differences is clearly opposite; else UNDECIDED.
"""

import statistics
from functools import partial

from study import Answer, Arm, Difference, Study, difference

from vecgym.optim import OptimSpec
from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy, FedAvgStrategy

PLAIN = {"H = 5": 5, "H = 20": 20, "H = 100": 100}
EXPECTED = {"H = 5": 0.85, "H = 20": 0.70, "H = 100": 0.48, "Nesterov": 0.78}
RATES = [3e-3, 1e-2, 3e-2]


def plain(lr: float, H: int) -> FedAvgStrategy:
    return FedAvgStrategy("adamw", H=H, lr=lr)


def nesterov(lr: float, outer_lr: float, H: int) -> DiLoCoStrategy:
    return DiLoCoStrategy("adamw", OptimSpec("sgd", lr=outer_lr, momentum=0.9, nesterov=True), lr=lr, H=H)


def share(better: Arm, worse: Arm, one: Arm, eight: Arm) -> Difference:
    """(worse - better) / (one - eight) of the mean losses; its error is that of a ratio, to the first order."""
    gaps = [x - y for x, y in zip(one.column(), eight.column())]
    gains = [x - y for x, y in zip(worse.column(), better.column())]
    gap = statistics.fmean(gaps)
    ratio = statistics.fmean(gains) / gap
    return Difference(ratio, difference(gains, [ratio * x for x in gaps]).error / abs(gap), len(gaps))


def ask(study: Study) -> Answer:
    one = study.arm("one node", partial(plain, H=1), {"lr": RATES}, num_nodes=1)
    eight = study.arm("every gradient", lambda lr: AllReduceStrategy("adamw", lr=lr), {"lr": RATES}, num_nodes=8)
    rounds = {name: min(H, study.steps) for name, H in PLAIN.items()}
    arms = {name: study.arm(name, partial(plain, H=H), {"lr": RATES}, num_nodes=8) for name, H in rounds.items()}
    grid = {"lr": RATES, "outer_lr": [0.2, 0.4, 0.8]}
    arms["Nesterov"] = study.arm("Nesterov", partial(nesterov, H=rounds["H = 20"]), grid, num_nodes=8)
    shares = {name: share(arm, one, one, eight) for name, arm in arms.items()}
    pairs = [("H = 5", "H = 20"), ("H = 20", "H = 100"), ("Nesterov", "H = 20")]
    signs = {share(arms[first], arms[second], one, eight).sign for first, second in pairs}
    why = "Share of the way: " + ", ".join(
        f"{100 * x.mean:.0f} ± {100 * x.error:.0f} % ({k})" for k, x in shares.items()
    )
    rows = {f"{name}: share": x for name, x in shares.items()}
    if difference(one, eight).sign != 1:
        return Answer("UNDECIDED", f"{why}.", rows)
    near = all(abs(x.mean - EXPECTED[name]) <= 0.1 for name, x in shares.items())
    agrees = ("AGREES" if near else "ORDER ONLY") if signs == {1} else "DISAGREES" if -1 in signs else "UNDECIDED"
    return Answer(agrees, f"{why}.", rows)
