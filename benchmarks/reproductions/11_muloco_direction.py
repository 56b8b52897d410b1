"""Do pseudo-gradients of Muon keep the direction of one node's as nodes are added, where those of AdamW lose it?

Setting: a batch of 8 nodes' size is divided among K = 1, 2, 4 and 8 nodes. From the model after a 10th of a run on one
node each K does a round of a 10th with new optimizers; the cosine between its mean movement and that of K = 1, in
another order of the data, over hidden matrices, which Muon updates. Rates tuned by the loss of 8 nodes in such rounds.
Claim: "relative to AdamW, Muon yields more directionally correct pseudogradients as the number of workers (K)
increases" (MuLoCo, arXiv 2505.23725, abstract); they are "more aligned with the K=1 [...] pseudogradient at all worker
counts (Fig. 4 in paper)" (bentherien/muloco-1, muloco-1.md).
Verdict: AGREES if Muon's cosine minus AdamW's is clearly (two standard errors) positive at each K, and what Muon's
loses from K = 2 to 8 clearly less; ORDER ONLY if it is clearly positive at K = 8; DISAGREES if it is clearly negative
at K = 8; UNDECIDED otherwise.
"""

from functools import partial
from typing import Any

import torch
from study import COMPARED, Answer, Study, difference
from torch import Tensor, nn

from vecgym import Trainer
from vecgym.optim import OptimSpec
from vecgym.strategy import DiLoCoStrategy, MuLoCoStrategy


def hidden(name: str, p: Tensor) -> bool:
    return p.dim() == 2 and not name.startswith(("tokens", "positions", "net.3"))  # embeddings, and the head


MEAN, RATES = OptimSpec("sgd", lr=1.0), [4e-3, 8e-3, 1.6e-2]
ADAMW: Any = partial(DiLoCoStrategy, "adamw", MEAN), {"lr": RATES}
MUON: Any = partial(MuLoCoStrategy, MEAN, full_precision=True, matrices=hidden), {"lr": [0.01, 0.02], "adamw_lr": RATES}


def cosines(study: Study, strategy: Any, H: int, seed: int) -> list[float]:
    def moved(model: nn.Module, K: int, steps: int, key: int) -> nn.Module:
        trainer = Trainer(model, study.scale.data(K, "like", seed))
        return trainer.fit(strategy(H=steps), K, max_steps=steps, batch_size=8 * study.scale.batch_size // K, seed=key,
                           device="cpu", val_interval=None, progress=False)  # fmt: skip

    start = moved(study.scale.model(seed), 1, H, seed)
    models = [start, *(moved(start, K, H, 1000 + 10 * seed + K) for K in (1, 2, 4, 8))]
    ends = [torch.cat([p.detach().flatten() for n, p in m.named_parameters() if hidden(n, p)]) for m in models]
    return [float(torch.cosine_similarity(ends[1] - ends[0], end - ends[0], dim=0)) for end in ends[2:]]


def ask(study: Study) -> Answer:
    H, seeds, found = max(1, study.steps // 10), COMPARED[: 2 if study.quick else None], []
    for name, (strategy, grid) in {"AdamW": ADAMW, "Muon": MUON}.items():
        best = partial(strategy, **study.arm(f"{name}, 8 nodes", partial(strategy, H=H), grid).best)
        found.append(list(zip(*(cosines(study, best, H, seed) for seed in seeds))))
    rows = {f"K = {K}: Muon - AdamW": difference(muon, adamw) for K, adamw, muon in zip((2, 4, 8), *found)}
    rows |= {f"{name}: K = 2 - 8": difference(one[0], one[-1]) for name, one in zip(("AdamW", "Muon"), found)}
    lost = [[a - b for a, b in zip(one[0], one[-1])] for one in found]
    less = difference(lost[1], lost[0])
    (two, _, eight), signs = list(rows.values())[:3], [row.sign for row in list(rows.values())[:3]]
    why = f"Muon's cosine minus AdamW's: {two} at K = 2, {eight} at 8; so it loses {less} more."
    if signs == [1, 1, 1] and less.sign == -1:
        return Answer("AGREES", why, rows)
    return Answer(("UNDECIDED", "ORDER ONLY", "DISAGREES")[eight.sign], why, rows)
