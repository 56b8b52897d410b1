"""At which staleness does outer momentum lose to none?

Setting: 1, 2, 4, 8 and 16 nodes of equal speed that send their movements to a server every H = 5 steps of AdamW: the
staleness is the number of nodes less one. 80 updates of the server, however many nodes there are; inner and outer rate
tuned for each number of nodes and each momentum: none, Nesterov 0.3, 0.6 and 0.9. Outer rates are in units of
1 - momentum.
Expected: Nesterov 0.9 loses to none from 4 nodes on; the best momentum is 0.6, 0.6, 0.3, 0 and 0.
Verdict: AGREES if 0.9 minus none is clearly positive (two standard errors) at 4, 8 and 16 nodes, and neither at 1 nor
at 2; ORDER ONLY if it is clearly positive at 16 and not at 1, and clearly larger at 16 than at 1; DISAGREES if it is
clearly positive at 1, clearly negative at 16, or not clearly larger at 16 than at 1; else UNDECIDED.
"""

from functools import partial

from study import Answer, Study, difference

from vecgym.clock import Compute
from vecgym.optim import OptimSpec
from vecgym.strategy import AsyncStrategy, OuterOptimizer

NODES, MOMENTA = (1, 2, 4, 8, 16), (0.0, 0.3, 0.6, 0.9)


def server(lr: float, outer_lr: float, momentum: float, H: int) -> AsyncStrategy:
    outer = OptimSpec("sgd", lr=outer_lr * (1 - momentum), momentum=momentum, nesterov=momentum > 0)
    return AsyncStrategy("adamw", OuterOptimizer(outer), H=H, lr=lr)


def ask(study: Study) -> Answer:
    H, rows, best = max(1, study.steps // 40), {}, []
    for n in NODES[::2] if study.quick else NODES:
        arms = {
            momentum: study.arm(
                f"{n} nodes, momentum {momentum}", partial(server, momentum=momentum, H=H),
                {"lr": [3e-3, 1e-2, 3e-2], "outer_lr": [0.1, 0.2, 0.4]},
                num_nodes=n, max_steps=None, max_updates=2 * study.steps // H, compute=Compute(1.0),
            )
            for momentum in MOMENTA
        }  # fmt: skip
        rows[n] = difference(arms[0.9], arms[0.0])
        best.append(min(arms, key=lambda momentum: arms[momentum].mean()))
    why = f"0.9 minus none: {', '.join(f'{x} at {n}' for n, x in rows.items())} nodes; best {best}."
    few, many = rows[1], rows[16]
    rises = many.mean - few.mean > 2 * (few.error**2 + many.error**2) ** 0.5
    shown = {f"{n} nodes: 0.9 - none": x for n, x in rows.items()}
    if [x.sign == 1 for x in rows.values()] == [n >= 4 for n in rows]:
        return Answer("AGREES", why, shown)
    if few.sign != 1 and many.sign == 1 and rises:
        return Answer("ORDER ONLY", why, shown)
    return Answer("DISAGREES" if few.sign == 1 or many.sign == -1 or not rises else "UNDECIDED", why, shown)
