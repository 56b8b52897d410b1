"""Does batch norm on unlike data need only new statistics after the average?

Setting: The images alone, since a layer's norm is in question: 8 nodes with 2 shards of sorted classes each, averages
every 10 of 200 steps; AdamW, its rate tuned by the error of the averaged model. A norm, or none, follows the one hidden
layer. New statistics are those of the averaged weights over all the images to train on.
Expected: Accuracy 0.90 without a norm, 0.92 with layer norm, 0.74 with batch norm, 0.80 with new statistics.
Verdict: ORDER ONLY if layer norm is clearly (two standard errors) above none, batch norm clearly below none, and new
statistics clearly above the old; AGREES if the four accuracies are also within 0.05; DISAGREES if one of the three is
clearly opposite, or new statistics gain clearly less than 0.03, half of the expectation; else UNDECIDED.
"""

from functools import partial
from typing import Any

from comparison import seeded
from images import Classifier, digits
from study import Answer, Study, difference
from torch import Tensor, nn
from torch.nn import functional as F

from vecgym.strategy import FedAvgStrategy

SCALES = ("tiny",)
EXPECTED = {"none": 0.90, "layer norm": 0.92, "batch norm": 0.74, "new statistics": 0.80}
NORMS: dict[str, Any] = dict(zip(EXPECTED, (nn.Identity, nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm1d)))
IMAGES = digits().train.tensors[0]


class Normed(Classifier):
    def __init__(self, norm: str) -> None:
        below, above = nn.Sequential(nn.Flatten(), nn.Linear(64, 32)), nn.Sequential(nn.ReLU(), nn.Linear(32, 10))
        super().__init__(nn.Sequential(below, NORMS[norm](32), above))
        self.norm = norm

    def val_metrics(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        if self.norm != "new statistics":
            return super().val_metrics(batch)
        below, norm, above = list[Any](self.net.children())
        train = below(IMAGES)
        x = above((below(batch[0]) - train.mean(0)) * (train.var(0) + norm.eps).rsqrt() * norm.weight + norm.bias)
        return {"loss": F.cross_entropy(x, batch[1]), "accuracy": (x.argmax(1) == batch[1]).float().mean()}


def ask(study: Study) -> Answer:
    strategy = partial(FedAvgStrategy, "adamw", min(10, study.steps))
    measured = lambda history: [history.last("val_accuracy"), 1 - history.last("val_accuracy")]  # noqa: E731
    models = {name: lambda seed, name=name: seeded(seed, lambda: Normed(name)) for name in EXPECTED}
    arms = [study.arm(name, strategy, {"lr": [3e-3, 1e-2, 3e-2]}, measured, model=model, data="shards", num_nodes=8)
            for name, model in models.items()]  # fmt: skip
    none, layer, batch, new = arms
    rows = {"layer norm - none": difference(layer, none, 0), "batch norm - none": difference(batch, none, 0)}
    rows["new - old statistics"] = gain = difference(new, batch, 0)
    signs = {sign * x.sign for sign, x in zip((1, -1, 1), rows.values())}
    why = ", ".join(f"{arm.name} {arm.mean(0):.3f}" for arm in arms)
    why = f"Accuracy: {why}; new statistics minus old {gain}."
    near = all(abs(arm.mean(0) - EXPECTED[arm.name]) <= 0.05 for arm in arms)
    if signs == {1}:
        return Answer("AGREES" if near else "ORDER ONLY", why, rows)
    return Answer("DISAGREES" if -1 in signs or gain.mean + 2 * gain.error < 0.03 else "UNDECIDED", why, rows)
