"""If a merge lasts 20 steps, is it better to go on with old movements than to wait, and does momentum help then?

Setting: DiLoCo with AdamW inside; a merge lasts a tenth of the run, 20 of 200 steps. Eager DiLoCo merges every 20 steps
and never waits. DiLoCo that waits merges after each 24 steps, 5 times, or after 90, twice, the better of both. Momentum
0 or Nesterov 0.9; both rates tuned for each arm; equal simulated seconds, so that fewer steps are taken where nodes
wait. The last merge is free for all, since the loss is that of the nodes' mean.
Expected: eager minus waiting -0.09; the best with momentum 0.9 minus the best without -0.008.
Verdict: clearly is by two standard errors. DISAGREES if one of the two differences is clearly positive; AGREES if both
are clearly negative; ORDER ONLY if the first is; otherwise UNDECIDED.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from study import Answer, Arm, Study, difference

from vecgym.optim import OptimSpec
from vecgym.strategy import DiLoCoStrategy, EagerDiLoCoStrategy


def diloco(lr: float, outer_lr: float, momentum: float, H: int, kind: Any) -> Any:
    outer = OptimSpec("sgd", lr=outer_lr, momentum=momentum, nesterov=momentum > 0)
    return kind("adamw", outer, lr=lr, H=H)


def ask(study: Study) -> Answer:
    lasts = max(1, study.steps // 10)
    ways: dict[str, tuple[Any, int, int]] = {  # the steps of a round, and rounds
        "eager": (EagerDiLoCoStrategy, lasts, study.steps // lasts),
        "waiting, 5 merges": (DiLoCoStrategy, max(1, (study.steps + lasts) // 5 - lasts), 5),
        "waiting, 2 merges": (DiLoCoStrategy, max(1, (study.steps + lasts) // 2 - lasts), 2),
    }
    arms = {
        f"{name}, {momentum}": study.arm(
            f"{name}, momentum {momentum}", partial(diloco, momentum=momentum, H=H, kind=kind),
            {"lr": [3e-3, 1e-2, 3e-2], "outer_lr": rates}, max_steps=H * rounds,
        )
        for momentum, rates in ((0, [0.4, 0.8, 1.6]), (0.9, [0.1, 0.2, 0.4]))
        for name, (kind, H, rounds) in ways.items()
    }  # fmt: skip

    def best(of: Callable[[str], bool]) -> Arm:
        return min((arm for name, arm in arms.items() if of(name)), key=Arm.mean)

    eager, waiting = best(lambda name: name.startswith("eager")), best(lambda name: name.startswith("waiting"))
    moving, still = best(lambda name: name.endswith("0.9")), best(lambda name: not name.endswith("0.9"))
    rows = {"eager - waiting": difference(eager, waiting), "0.9 - none, best": difference(moving, still)}
    rows |= {f"{name}: 0.9 - none": difference(arms[f"{name}, 0.9"], arms[f"{name}, 0"]) for name in ways}
    first, second = list(rows.values())[:2]
    why = f"Eager minus waiting: {first}; the best with momentum 0.9 ({moving.name}) minus without: {second}."
    if 1 in (first.sign, second.sign):
        return Answer("DISAGREES", why, rows)
    return Answer(("UNDECIDED", "ORDER ONLY", "AGREES")[(first.sign == -1) * (1 + (second.sign == -1))], why, rows)
