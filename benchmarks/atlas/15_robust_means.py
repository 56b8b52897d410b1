"""How much do robust means cost with unlike data and no liar, and how much do they save with one?

Setting: local AdamW, 20 merges of the movements, 2 shards of data a node; one liar of 8 nodes sends -10 times its
movement; the trimmed mean leaves out one value at either end. The rate tuned for each arm; equal steps. Measured are
errors, 1 - accuracy, of images; of a text, the loss.
Expected: trimming costs 0.08 and the median 0.25 of accuracy; a liar then costs 0.12 and 0.10; with the mean and a liar
the accuracy is 0.55.
Verdict: clearly is by two standard errors. The order: trimming is clearly worse than the mean, the median clearly worse
than trimming, and with a liar both are clearly better than the mean. AGREES if all is so, and the two costs are between
half and twice the expected ones (accuracy only); ORDER ONLY if all is so; DISAGREES if one of the four is clearly the
other way round; UNDECIDED if none is, and one is not clear.
"""

from functools import partial

from study import Answer, Study, difference

from vecgym import History
from vecgym.optim import OptimSpec
from vecgym.strategy import Corrupted, DiLoCoStrategy, Mean, Robust

AVERAGES = {"mean": Mean(), "trimmed": Robust("trimmed_mean", f=1), "median": Robust("median")}


def error(history: History) -> list[float]:
    return [1 - history.last("val_accuracy") if "val_accuracy" in history.columns else history.last("val_loss")]


def ask(study: Study) -> Answer:
    arms = {}
    for liars in ([], [0]):
        for name, average in AVERAGES.items():
            label = f"{name}, liar" if liars else name
            arms[label] = study.arm(
                label,
                partial(
                    DiLoCoStrategy, "adamw", OptimSpec("sgd", lr=1.0), max(1, study.steps // 20),
                    average=Corrupted(average, liars, lambda x: -10 * x) if liars else average,
                ),
                {"lr": [1e-3, 3e-3, 1e-2, 3e-2]}, data="shards", measure=error,
            )  # fmt: skip
    pairs = [("trimmed", "mean"), ("median", "trimmed"), *[("mean, liar", f"{x}, liar") for x in ("trimmed", "median")]]
    rows = {f"{a} - {b}": difference(arms[a], arms[b]) for a, b in pairs}
    signs = [row.sign for row in rows.values()]
    rows |= {f"{a} - {b}": difference(arms[a], arms[b])
             for a, b in [("median", "mean"), ("trimmed, liar", "trimmed"), ("median, liar", "median")]}  # fmt: skip
    costs = [rows["trimmed - mean"].mean / 0.08, rows["median - mean"].mean / 0.25]
    why = (
        f"Trimming costs {rows['trimmed - mean']} and the median {rows['median - mean']}, a liar then "
        f"{rows['trimmed, liar - trimmed']} and {rows['median, liar - median']}; with the mean and a liar the "
        f"{'error' if study.scale.name == 'tiny' else 'loss'} is {arms['mean, liar'].mean():.2f}."
    )
    if min(signs) == 1:
        return Answer("AGREES" if study.scale.name == "tiny" and all(0.5 <= x <= 2 for x in costs) else "ORDER ONLY",
                      why, rows)  # fmt: skip
    return Answer("DISAGREES" if min(signs) == -1 else "UNDECIDED", why, rows)
