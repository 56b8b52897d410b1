"""Does averaging Adam's moments help, and do rarer averages of them suffice?

Setting: AdamW on each node, the parameters averaged every H steps, 40 times in all: with local moments, with both
averaged each time (Local Adam, 3 times the bytes), and at 3 H and 6 H (DES-LOC, 1.5 times). The rate tuned for each
arm; equal steps; like data, which decides, and 2 shards of sorted classes (or a stretch of the text) a node. Adam's
epsilon is 1e-4: with 1e-8 a first moment that arrives before its second meets a 0 where a node's examples have no such
pixel, and DES-LOC's loss becomes 1e4 to 1e8 in 1 of 8 seeds on like data and 6 of 8 on shards at "tiny". (With periods
of 3 H and 3 H, or 6 H and 3 H, it does not.)
Claim: DES-LOC communicates "2x less than the previous state-of-the-art Local Adam" at its perplexity, and local
moments "lack guarantees and can be unstable" (arXiv 2505.22549 and its ICLR 2026 abstract; they oscillate on its toy,
figure 2).
Verdict: Clear is two standard errors. On like data AGREES if DES-LOC is clearly better than local moments and not
clearly worse than Local Adam; ORDER ONLY if Local Adam is clearly better than local moments, and DES-LOC clearly worse
than it or not clearly better than local moments; DISAGREES if local moments are clearly better than Local Adam; else
UNDECIDED.
"""

from collections.abc import Callable
from functools import partial

from study import Answer, Difference, Study, difference

from vecgym.optim import OptimSpec
from vecgym.strategy import DESLOCStrategy, FedAvgStrategy, LocalAdamStrategy, Strategy

KINDS: dict[str, Callable[..., Strategy]] = {
    "local": FedAvgStrategy,
    "Local Adam": LocalAdamStrategy,
    "DES-LOC": DESLOCStrategy,
}


def strategy(lr: float, kind: Callable[..., Strategy], H: int) -> Strategy:
    return kind(OptimSpec("adamw", lr=lr, eps=1e-4), H=H)


def ask(study: Study) -> Answer:
    rows: dict[str, Difference] = {}
    H = max(1, study.steps // 40)
    for data in ("like", "shards"):
        local, both, rarely = [
            study.arm(f"{name}, {data}", partial(strategy, kind=kind, H=H), {"lr": [3e-3, 1e-2, 3e-2]}, data=data)
            for name, kind in KINDS.items()
        ]
        rows[f"{data}: Local Adam - local"] = difference(both, local)
        rows[f"{data}: DES-LOC - local"] = difference(rarely, local)
        rows[f"{data}: DES-LOC - Local Adam"] = difference(rarely, both)
    helps, saved, lost = list(rows.values())[:3]
    unlike = rows["shards: DES-LOC - local"]
    why = f"Minus local moments: Local Adam {helps}, DES-LOC {saved} (unlike data: {unlike}); minus Local Adam {lost}."
    if saved.sign == -1 and lost.sign != 1:
        return Answer("AGREES", why, rows)
    if helps.sign == -1:
        return Answer("ORDER ONLY", why, rows)
    return Answer("DISAGREES" if helps.sign == 1 else "UNDECIDED", why, rows)
