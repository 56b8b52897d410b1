"""Is communication worth most late in a run, down to one merge at its end?

Setting: nodes with unlike data (Dirichlet 0.1; of a text its stretches), AdamW, a random matching 10 times a run, and 5
means of all nodes within an eighth of the run, which begins after 0.1 (early) or 0.85 (late) of it; equal bytes and
steps. "Merged" is the average of the nodes at the end. Rates tuned by the loss that is compared: the merged model's, or
the nodes' mean loss.
Claim: "concentrating communication in the later stages [...] remarkably improves global test performance", and "a
single global merging" at the final step "can significantly improve" it under unlike data (arXiv 2507.06542, abstract).
Verdict: AGREES if the merged model is clearly (two standard errors) better than the nodes without a window, and late
minus early clearly negative for the nodes' mean loss and for the merged model; ORDER ONLY if one of the latter two is,
and the former; DISAGREES if neither is and one is clearly positive, or one merge does not help; UNDECIDED otherwise.
"""

from functools import partial
from typing import Any

from study import Answer, Arm, Study, difference

from vecgym.strategy import Exchange, Mean, Mix, RoundsOf, Strategy

MERGES = 5


def within(begin: int, H: int) -> RoundsOf:
    """`MERGES` rounds of H steps from step `begin` on, and none before or after."""
    end = begin + MERGES * H
    return RoundsOf(lambda step: begin + H if step == 0 else H if step < end else 10**6)


def sparse(lr: float, steps: int, begin: float | None = None) -> Strategy:
    exchanges = [Exchange(Mix("random_matching"), every=max(1, steps // 10))]
    if begin is not None:
        exchanges.append(Exchange(Mean(), every=within(int(begin * steps), max(1, steps // 40))))
    return Strategy("adamw", exchanges, lr=lr)


def throughout(lr: float, steps: int) -> Strategy:
    return Strategy("adamw", [Exchange(Mean(), every=max(1, steps // 10))], lr=lr)


def ask(study: Study) -> Answer:
    grid, kind = {"lr": [2e-3, 4e-3, 8e-3, 1.6e-2]}, 0.1 if study.scale.name == "tiny" else "shards"

    def arm(of: str, when: str, strategy: Any) -> Arm:
        column = "val_loss" if of == "merged" else "val_loss_local"
        return study.arm(f"{when}, {of}", partial(strategy, steps=study.steps), grid, data=kind,
                         measure=lambda history: [history.last(column)])  # fmt: skip

    windows = {"no window": sparse, "early": partial(sparse, begin=0.1), "late": partial(sparse, begin=0.85)}
    no, early, late = (arm("merged", when, strategy) for when, strategy in windows.items())
    own, own_early, own_late = (arm("nodes", when, strategy) for when, strategy in windows.items())
    once, nodes, merged = difference(no, own), difference(own_late, own_early), difference(late, early)
    rows = {"merged - nodes": once, "late - early, nodes": nodes, "late - early, merged": merged,
            "one merge - 10 means": difference(no, arm("merged", "means throughout", throughout))}  # fmt: skip
    why = f"One merge: {once}; late minus early: {nodes} for the nodes, {merged} for the merged model."
    won = (nodes.sign == -1) + (merged.sign == -1)
    if once.sign == -1 and won:
        return Answer("AGREES" if won == 2 else "ORDER ONLY", why, rows)
    return Answer("DISAGREES" if once.sign != -1 or 1 in (nodes.sign, merged.sign) else "UNDECIDED", why, rows)
