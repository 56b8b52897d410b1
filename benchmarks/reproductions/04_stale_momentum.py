"""Does outer momentum hurt the more, the staler the movements are, and does delaying it help?

Setting: eight asynchronous nodes with AdamW inside, 10 rounds each. They arrive together, in four pairs or one by one
(speeds differ by a ten-thousandth), each time for one step of the server: movements are 0, 3 or 7 versions old. Outside
no momentum, Nesterov's 0.9, or Delayed Nesterov over the arrivals of a round; inner and outer rate tuned for each arm;
like data; equal steps, bytes and seconds.
Claim: momentum from stale movements is the key challenge of asynchronous training, and Delayed Nesterov meets it
(arXiv 2401.09135, abstract: as good as waiting for all); without momentum asynchrony is no worse than waiting
(github.com/google-deepmind/asyncdiloco, issue 1). So Nesterov is the worst, and the spread grows with staleness.
Verdict: "clearly" is by two standard errors. (a) At age 7 Nesterov is clearly worse than both others; (b) Nesterov
minus none clearly grows from age 0 to 7. AGREES if both hold; ORDER ONLY if b holds; DISAGREES if Nesterov is clearly
better than none at age 7, or Nesterov minus none clearly falls; else UNDECIDED.
"""

from functools import partial

from study import Answer, Arm, Difference, Study, difference

from vecgym.clock import Compute
from vecgym.optim import OptimSpec
from vecgym.strategy import AsyncStrategy, DelayedNesterov, OuterOptimizer


def asynchronous(lr: float, outer_lr: float, kind: str, each: int, nodes: int, H: int) -> AsyncStrategy:
    """`outer_lr` counts for the mean of a round: one of n steps in a round has an n-th of it."""
    if kind == "delayed":
        server = DelayedNesterov(lr=outer_lr, momentum=0.9, buffer=nodes // each)
        return AsyncStrategy("adamw", server, H=H, buffer=each, lr=lr)
    spec = OptimSpec("sgd", momentum=0.9, nesterov=True) if kind == "Nesterov" else OptimSpec("sgd")
    return AsyncStrategy("adamw", OuterOptimizer(spec, lr=outer_lr * each / nodes), H=H, buffer=each, lr=lr)


def ask(study: Study) -> Answer:
    nodes, arms, rows = study.scale.num_nodes, dict[tuple[int, str], Arm](), dict[str, Difference]()
    for each in (nodes, nodes // 4, 1):
        age, speeds = nodes // each - 1, Compute([1 + i // each * 1e-4 for i in range(nodes)])
        for kind, low in {"none": 0.4, "Nesterov": 0.1, **({} if age < 7 else {"delayed": 0.1})}.items():
            arms[age, kind] = study.arm(
                f"age {age}, {kind}",
                partial(asynchronous, kind=kind, each=each, nodes=nodes, H=max(1, study.steps // 10)),
                {"lr": [3e-3, 1e-2, 3e-2], "outer_lr": [low, 2 * low, 4 * low]}, compute=speeds,
            )  # fmt: skip
        rows[f"age {age}: Nesterov - none"] = difference(arms[age, "Nesterov"], arms[age, "none"])
    rows["age 7: Nesterov - delayed"] = difference(arms[7, "Nesterov"], arms[7, "delayed"])
    rows["none: age 7 - 0"] = difference(arms[7, "none"], arms[0, "none"])
    fresh, stale, other = (
        rows[f"age {end}"] for end in ("0: Nesterov - none", "7: Nesterov - none", "7: Nesterov - delayed")
    )
    why = f"Nesterov minus none: {fresh} with fresh movements, {stale} at age 7; there minus Delayed Nesterov: {other}."
    growth, two = stale.mean - fresh.mean, 2 * (stale.error**2 + fresh.error**2) ** 0.5
    if growth > two:
        return Answer("AGREES" if stale.sign == 1 and other.sign == 1 else "ORDER ONLY", why, rows)
    return Answer("DISAGREES" if stale.sign == -1 or growth < -two else "UNDECIDED", why, rows)
