"""Which robust rules bear one and two liars of eight in DiLoCo, and which costs most without any?

Setting: 15 rounds, AdamW inside, SGD(0.7) with Nesterov's 0.9 outside; the first 0, 1 or 2 nodes send -10 times their
movement. As in the source the trimmed mean leaves out 1 at each end, Krum is set for 2 liars and counts n - f - 2
neighbours, the geometric median has 32 iterations, and centred clipping clips three times at the median distance, but
anew from the mean in each round (there from its last result). The inner rate is tuned for each rule without liars. A
loss above that of the untrained model counts as that. Like data; equal steps and bytes.
Claim: perplexities with 0, 1, 2 liars: mean 3.37, diverged, diverged; trimmed mean 3.37, 3.53, diverged; Krum 3.99,
3.98, 4.08; geometric median 3.35, 3.45, 3.52; centred clipping 3.36, 3.44, 3.39 (github.com/MTahaB/RoDiLoCo, README.md;
1.8 M parameters, H = 50, one seed).
Verdict: a rule is lost if it gives up half of the gain of the mean without liars over the untrained model. (a) The mean
is lost with 1 liar; (b) the trimmed mean is lost with 2 and not with 1; (c) Krum without liars costs clearly more (two
standard errors) than each other rule; (d) Krum, geometric median and clipping are not lost with 2. AGREES if all hold;
ORDER ONLY if a and two of the others; UNDECIDED if a and one of them; else DISAGREES.
"""

from functools import partial

from study import Answer, Study, difference
from torch import Tensor

from vecgym.optim import OptimSpec
from vecgym.strategy import Corrupted, Exchange, Mean, Outer, Robust, Strategy


def clipped(x: Tensor) -> Tensor:
    centre = x.mean(1, keepdim=True)
    for _ in range(3):
        far = (x - centre).norm(dim=-1, keepdim=True).clamp(min=1e-8)
        centre = centre + ((x - centre) * (far.median(1, keepdim=True).values / far).clamp(max=1)).mean(1, keepdim=True)
    return centre[:, 0]


RULES = {"mean": Mean(), "trimmed": Robust("trimmed_mean", f=1), "Krum": Robust("krum", f=2, neighbours="n-f-2")}
RULES |= {"median": Robust("geometric_median", nu=1e-8, iterations=32), "clipping": Robust(clipped, whole=True)}


def lied(lr: float, rule: str, liars: int, H: int) -> Strategy:
    how = Corrupted(RULES[rule], [0, 1][:liars], lambda x: -10 * x) if liars else RULES[rule]
    return Strategy("adamw", [Exchange(Outer(how, OptimSpec("sgd", lr=0.7, momentum=0.9, nesterov=True)), H)], lr=lr)


def ask(study: Study) -> Answer:
    losses: dict[tuple[str, int], list[float]] = {}
    for rule in RULES:
        make, end = partial(lied, rule=rule, H=max(1, study.steps // 15)), 15 * max(1, study.steps // 15)
        rates, both = {"lr": [3e-3, 1e-2, 3e-2]}, lambda history: history.series("val_loss")[1]
        none = study.arm(f"{rule}, 0", partial(make, liars=0), rates, both, max_steps=end)  # ends with a round
        for n in (0, 1, 2):
            arm = study.arm(f"{rule}, {n}", partial(make, liars=n, **none.best), max_steps=end) if n else none
            losses[rule, n] = [min(pair) for pair in zip(arm.column(), none.column(0))]
    costs = {at: difference(loss, losses["mean", 0]) for at, loss in losses.items()}
    lost = {at for at, cost in costs.items() if cost.mean > difference(none.column(0), losses["mean", 0]).mean / 2}
    shown = [("mean", 1), ("trimmed", 1), ("trimmed", 2), ("Krum", 0), ("Krum", 2), ("median", 2), ("clipping", 2)]
    rows = {f"{rule}, {n} lying": costs[rule, n] for rule, n in shown}
    why = f"Cost over the mean without liars: {'; '.join(f'{label} {row}' for label, row in rows.items())}."
    taxed = all(difference(losses["Krum", 0], losses[rule, 0]).sign == 1 for rule in RULES if rule != "Krum")
    parts = [("trimmed", 2) in lost and ("trimmed", 1) not in lost, taxed, not lost & set(shown[-3:])]
    verdicts = ("DISAGREES", "UNDECIDED", "ORDER ONLY", "AGREES") if ("mean", 1) in lost else ("DISAGREES",) * 4
    return Answer(verdicts[sum(parts)], why, rows)
