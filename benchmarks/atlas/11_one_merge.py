"""How much does one merge at the end lose to one every 10 steps, and how much more on unlike data?

Setting: 8 nodes, one average of the parameters after the last of 200 steps or one every 10; AdamW, its rate tuned;
equal steps. Data are alike, or their classes come from a Dirichlet distribution with alpha 1, 0.3 and 0.1; of a text
each node has a stretch.
Expected: One merge costs 0.03 on like data, and 0.7, 0.7 and 0.35 with alpha 1, 0.3 and 0.1.
Verdict: ORDER ONLY if the cost is clearly positive (two standard errors) on all data, and clearly larger on each kind
of unlike data than on like data; AGREES if each is also within a factor of two of the expectation (stretches of a text:
from 0.175 to 1.4); DISAGREES if one is clearly negative or one on unlike data not clearly above that on like data; else
UNDECIDED. Accuracy is told, and decides nothing.
"""

from functools import partial

from study import Answer, Study, difference

from vecgym import History
from vecgym.strategy import FedAvgStrategy

EXPECTED = {"like": (0.03, 0.03), 1.0: (0.7, 0.7), 0.3: (0.7, 0.7), 0.1: (0.35, 0.35), "shards": (0.35, 0.7)}


def ask(study: Study) -> Answer:
    images = study.scale.name == "tiny"
    kinds = ("like", 1.0, 0.3, 0.1) if images else ("like", "shards")

    def measure(history: History) -> list[float]:
        return [history.last("val_accuracy") if images else 0.0, history.last("val_loss")]

    rows, told = {}, []
    for kind in kinds:
        once, often = (
            study.arm(
                f"{kind}, {name}", partial(FedAvgStrategy, "adamw", min(H, study.steps)),
                {"lr": [1e-3, 3e-3, 1e-2, 3e-2]}, measure, data=kind, num_nodes=8,
            )
            for name, H in (("at the end", study.steps), ("every 10", 10))
        )  # fmt: skip
        rows[kind] = difference(once, often)
        told.append(f"{rows[kind]} ({kind}" + (f", accuracy {difference(once, often, 0)})" if images else ")"))
    like, *others = rows.values()
    above = [x.mean - like.mean > 2 * (x.error**2 + like.error**2) ** 0.5 for x in others]
    why = f"One merge minus one every 10 steps: {', '.join(told)}."
    shown = {str(kind) if isinstance(kind, str) else f"alpha {kind}": x for kind, x in rows.items()}
    if all(above) and all(x.sign == 1 for x in rows.values()):
        near = all(EXPECTED[kind][0] / 2 <= x.mean <= 2 * EXPECTED[kind][1] for kind, x in rows.items())
        return Answer("AGREES" if near else "ORDER ONLY", why, shown)
    against = not all(above) or any(x.sign == -1 for x in rows.values())
    return Answer("DISAGREES" if against else "UNDECIDED", why, shown)
