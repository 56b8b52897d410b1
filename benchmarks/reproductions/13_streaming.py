"""Do late fragments of four bits cost anything in Streaming DiLoCo?

Setting: Two fragments, AdamW inside and Nesterov 0.9 outside, 10 rounds; the base sends float32 and waits for it; tau
of a tenth and a quarter of a round. Nodes keep half of their own parameters at a merge (alpha = 0.5) in all arms, so
that only tau and bits differ. Inner and outer rate tuned for each arm; equal steps, a quarter of a round fewer than in
10 rounds, so that no message is lost at the end. Four bits are an eighth of the payload.
Claim: With 1 billion parameters, tau = 1 and FP4 the loss is 2.66, 2.51 and 2.45, against 2.67, 2.52 and 2.45 of data
parallelism (arXiv 2501.18512, table 1); training is "very robust" to tau below 5 (figure 10).
Verdict: A change is free if its difference to the base plus two standard errors is below 5 % of the base's loss; it
costs if the difference minus two errors is above 1 %. AGREES if tau of a tenth, 4 bits and both are free; DISAGREES if
tau alone and 4 bits alone cost; ORDER ONLY if another of the three costs; else UNDECIDED. Tau of a quarter is only
shown.
"""

from functools import partial

from study import Answer, Arm, Study, difference

from vecgym.optim import OptimSpec
from vecgym.strategy import StreamingDiLoCoStrategy


def streaming(lr: float, outer_lr: float, H: int, tau: int, bits: int | None) -> StreamingDiLoCoStrategy:
    outer = OptimSpec("sgd", lr=outer_lr, momentum=0.9, nesterov=True)
    return StreamingDiLoCoStrategy("adamw", outer, H, 2, delay=tau, alpha=0.5, bits=bits, lr=lr)


def ask(study: Study) -> Answer:
    H = max(4, study.steps // 10)

    def arm(name: str, tau: int, bits: int | None) -> Arm:
        return study.arm(
            name,
            partial(streaming, H=H, tau=tau, bits=bits),
            {"lr": [3e-3, 1e-2, 3e-2], "outer_lr": [0.1, 0.2, 0.4]},
            max_steps=study.steps - H // 4,
        )

    base, near = arm("float32, waits", 0, None), max(1, H // 10)
    rows = {
        "tau H/10": difference(arm("float32, tau H/10", near, None), base),
        "4 bits": difference(arm("4 bits, waits", 0, 4), base),
        "tau H/10, 4 bits": difference(arm("4 bits, tau H/10", near, 4), base),
        "tau H/4": difference(arm("float32, tau H/4", H // 4, None), base),
    }
    late, coded, both = list(rows.values())[:3]
    why = f"At a loss of {base.mean():.3f}, tau of a tenth of a round: {late}; 4 bits: {coded}; both: {both}."
    free = [row.mean + 2 * row.error < 0.05 * base.mean() for row in (late, coded, both)]
    costs = [row.mean - 2 * row.error > 0.01 * base.mean() for row in (late, coded, both)]
    if all(free):
        return Answer("AGREES", why, rows)
    if costs[0] and costs[1]:
        return Answer("DISAGREES", why, rows)
    return Answer("ORDER ONLY" if any(costs) else "UNDECIDED", why, rows)
