"""Which power of the staleness is the best weight where slow nodes have data of their own?

Setting: 5 asynchronous nodes with AdamW and 2 shards each (of digits, about two classes that no other node has), of
which two take four times as long a step. A movement of staleness s has the weight ((1 + s) / 5)^power: 1 at the mean
staleness of 5 nodes. Both rates tuned for each power; equal simulated seconds.
Expected: +1/2 is best; the usual -1/2 is 0.12 worse.
Verdict: clearly is by two standard errors. If -1/2 is clearly worse than +1/2: AGREES if it is so by 0.06 or more, and
+1/2 is not clearly worse than the best power; else ORDER ONLY. If it is clearly better: DISAGREES. Else UNDECIDED.
"""

from functools import partial

from study import Answer, Study, difference

from vecgym.clock import Compute
from vecgym.optim import OptimSpec
from vecgym.strategy import AsyncStrategy, OuterOptimizer

NODES = 5


def weight(staleness: int, power: float) -> float:
    return float(((1 + staleness) / NODES) ** power)


def asynchronous(lr: float, outer_lr: float, staleness: partial[float], H: int) -> AsyncStrategy:
    return AsyncStrategy("adamw", OuterOptimizer(OptimSpec("sgd", lr=outer_lr)), H, staleness=staleness, lr=lr)


def ask(study: Study) -> Answer:
    arms = {
        power: study.arm(
            f"power {power}",
            partial(asynchronous, staleness=partial(weight, power=power), H=max(1, study.steps // 20)),
            {"lr": [1e-3, 3e-3, 1e-2], "outer_lr": [0.1, 0.2, 0.4, 0.8]},
            data="shards", num_nodes=NODES, compute=Compute([1.0, 1.0, 1.0, 4.0, 4.0]),
        )
        for power in (-0.5, 0.0, 0.5, 1.0, 1.5)
    }  # fmt: skip
    best = min(arms, key=lambda power: arms[power].mean())
    rows = {f"{power:+} - none": difference(arm, arms[0.0]) for power, arm in arms.items() if power}
    rows["-0.5 - +0.5"] = usual = difference(arms[-0.5], arms[0.5])
    rows["+0.5 - best"] = short = difference(arms[0.5], arms[best])
    why = f"The best power is {best:+}; -1/2 minus +1/2: {usual}; +1/2 minus the best: {short}."
    if usual.sign != 1:
        return Answer("DISAGREES" if usual.sign == -1 else "UNDECIDED", why, rows)
    return Answer("AGREES" if usual.mean >= 0.06 and short.sign != 1 else "ORDER ONLY", why, rows)
