"""Does a delay of one step cost AdamW far more than Muon?

Setting: one node with the examples of all; the gradient of each step is used one step later, with AdamW, or with Muon
for hidden matrices (its steps scaled to AdamW's size) and AdamW for all else; 5 % of warm-up, then a cosine; the rate
tuned for each arm; equal steps. Two rows have the delay at the rate that is best without it.
Claim: AdamW loses more than 0.2 nats and Muon 0.012 (arXiv 2606.30634, "One-Step Gradient Delay is Not a Barrier for
Large-Scale Asynchronous Pipeline Parallel LLM Pretraining"; the two numbers after a summary of its experiments).
Verdict: AGREES if the delay costs AdamW at least 0.05, clearly (two standard errors from 0), and Muon less than a
quarter of that, clearly less; ORDER ONLY if it costs Muon clearly less than AdamW; DISAGREES if it costs Muon clearly
more, or AdamW clearly less than 0.05; else UNDECIDED.
"""

from functools import partial
from typing import Any

from study import Answer, Difference, Study, difference
from torch import Tensor

from vecgym.core import tree
from vecgym.optim import OptimSpec
from vecgym.strategy import Exchange, Mean, Stage, Strategy


class Late(Stage, batched=(), random=False):  # the first step has no gradient
    def init(self, values: Any, run: Any, memory: Any) -> None:
        memory.own["last"] = tree.map(lambda v: 0 * v, values)

    def send(self, x: Any, part: Any, memory: Any) -> Any:
        last, memory.own["last"] = memory.own["last"], x
        return last


def hidden(name: str, p: Tensor) -> dict[str, Any]:
    return {"optim": "adamw"} if p.dim() != 2 or name.startswith(("tokens", "positions", "net.3")) else {}


def trained(lr: float, muon: bool, late: bool, warmup: int) -> Strategy:
    scale = "match_rms_adamw"
    inner = OptimSpec("muon", lr=lr, param_groups=hidden, adjust_lr_fn=scale) if muon else OptimSpec("adamw", lr=lr)
    how = Late(Mean()) if late else Mean()
    return Strategy(inner, [Exchange(how, of="gradients")], lr_scheduler="cosine", warmup_steps=warmup)


def ask(study: Study) -> Answer:
    rows: dict[str, Difference] = {}
    for muon, name in ((False, "AdamW"), (True, "Muon")):
        grid = {"lr": [3e-3, 1e-2, 3e-2, 1e-1]}
        alone: Any = {"num_nodes": 1, "batch_size": study.scale.num_nodes * study.scale.batch_size}
        make = partial(trained, muon=muon, warmup=study.steps // 20)
        none, late = (study.arm(f"{name}{w}", partial(make, late=bool(w)), grid, **alone) for w in ("", " late"))
        same = study.arm(f"{name} late, same rate", partial(make, late=True, **none.best), **alone)
        rows |= {f"{name}: late - not": difference(late, none), f"{name}, same rate": difference(same, none)}
    adamw, muon_ = rows["AdamW: late - not"], rows["Muon: late - not"]
    less, two = adamw.mean - muon_.mean, 2 * (adamw.error**2 + muon_.error**2) ** 0.5
    why = f"The delay costs AdamW {adamw} and Muon {muon_}, each at its best rate."
    if adamw.mean >= 0.05 and adamw.sign == 1 and muon_.mean < adamw.mean / 4 and less > two:
        return Answer("AGREES", why, rows)
    other = "DISAGREES" if less < -two or adamw.mean + 2 * adamw.error < 0.05 else "UNDECIDED"
    return Answer("ORDER ONLY" if less > two else other, why, rows)
