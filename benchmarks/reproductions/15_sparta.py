"""Does SPARTA let DiLoCo merge much more rarely?

Setting: DiLoCo in 4 rounds of H steps, alone and with SPARTA's p = 5 / H of the coordinates after each step (each
coordinate 5 times a round, as 0.05 % for 10,000 steps); and DiLoCo alone every H / 6 steps, which sends as many bytes
as the two together. AdamW inside; inner and outer rate and momentum (0 or Nesterov 0.9) tuned for each arm; equal
steps.
Claim: SPARTA allows a DiLoCo interval 100 times longer, at a perplexity 14.3 % lower than DiLoCo's alone, which
suffers as H grows from 100 to 10,000 (openreview stFPf3gzq1; the numbers as mwolf.dev's notes of March 2025 have
them).
Verdict: Clear is two standard errors. AGREES if SPARTA clearly lowers the loss at H and the sum is not clearly worse
than DiLoCo at equal bytes; ORDER ONLY if it clearly lowers the loss at H, but DiLoCo at equal bytes is clearly better;
DISAGREES if SPARTA clearly raises the loss at H, or is not clear there while a shorter interval clearly helps; else
UNDECIDED.
"""

from functools import partial

from study import Answer, Study, difference

from vecgym.optim import OptimSpec
from vecgym.strategy import DiLoCoStrategy, SPARTADiLoCoStrategy, Strategy


def strategy(lr: float, outer_lr: float, momentum: float, H: int, p: float) -> Strategy:
    outer = OptimSpec("sgd", lr=outer_lr, momentum=momentum, nesterov=momentum > 0)
    if p:
        return SPARTADiLoCoStrategy(p, H=H, inner_optim="adamw", outer_optim=outer, lr=lr)
    return DiLoCoStrategy("adamw", outer, lr=lr, H=H)


def ask(study: Study) -> Answer:
    H = max(1, study.steps // 4)
    p = min(1.0, 5 / H)
    alone, both, often = [
        study.arm(
            name,
            partial(strategy, H=every, p=part),
            {"lr": [3e-3, 1e-2, 3e-2], "outer_lr": [0.2, 0.4, 0.8], "momentum": (0.0, 0.9)},
        )
        for name, every, part in (("H", H, 0.0), ("H and SPARTA", H, p), ("H / 6", max(1, H // 6), 0.0))
    ]
    rows = {
        "H: with SPARTA - alone": difference(both, alone),
        "H with SPARTA - H/6 alone": difference(both, often),
        "alone: H/6 - H": difference(often, alone),
    }
    helps, equal, shorter = rows.values()
    why = f"SPARTA at H: {helps}; with SPARTA minus DiLoCo alone at equal bytes: {equal}."
    if helps.sign == -1:
        return Answer("ORDER ONLY" if equal.sign == 1 else "AGREES", why, rows)
    return Answer("DISAGREES" if helps.sign == 1 or shorter.sign == -1 else "UNDECIDED", why, rows)
