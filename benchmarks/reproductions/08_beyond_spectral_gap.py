"""Does the effective number of neighbours predict gossip on quadratics, where the spectral gap does not order graphs?

Setting: 16 nodes, x <- W (x - eta d d'x), random directions d of 32 dimensions (zeta = 34), 64 problems at once, 60
steps at each graph's best eta by the formula; the rate is that of the nodes' mean square from step 30 on.
Claim: The mean square of x falls by 1 - r a step, r = 1 - (1 - eta)^2 - (zeta - 1) eta^2 / n(gamma), gamma =
(1 - eta)^2 / (1 - r), n the variance reduction of a random walk; the gap "is not predictive" of performance (arXiv
2206.03093, abstract, 3.1, and epfml/topology-in-decentralized-learning, random_isotropic_quadratics.py).
Verdict: AGREES if each rate is within 3 % of the formula's, and a ring is clearly (two standard errors) faster than all
to all with weight 0.1, whose gap is larger; ORDER ONLY if the latter; UNDECIDED if the former; else DISAGREES.
"""

import torch
from study import COMPARED, Answer, Study, difference
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from vecgym import Trainer
from vecgym.collectives import topology
from vecgym.strategy import GossipStrategy

SCALES, K, SHAPE, ZETA = ("tiny",), 16, (64, 32), 34.0


def square(model: nn.Linear, batch: list[Tensor]) -> Tensor:
    return ((batch[0] * model.weight).sum(-1).square().sum(-1) / 2 if model.training else model.weight.square()).mean()


def formula(W: Tensor, eta: float) -> float:
    squares, r = torch.linalg.svdvals(W).square(), 0.0  # W is normal, its nodes alike
    for _ in range(60):
        gamma = (1 - eta) ** 2 / (1 - r)
        r = 1 - (1 - eta) ** 2 - (ZETA - 1) * eta**2 * float((1 - gamma) * (squares / (1 - gamma * squares)).mean())
        if not 0 <= r < 1 - (1 - eta) ** 2:
            return -1.0
    return r


def rate(W: Tensor, eta: float, steps: int, seed: int) -> float:
    drawn, model = torch.Generator().manual_seed(seed), nn.utils.skip_init(nn.Linear, SHAPE[1], SHAPE[0], bias=False)
    nn.init.ones_(model.double().weight)
    along = [TensorDataset(torch.randn(steps, *SHAPE, generator=drawn, dtype=torch.float64)) for _ in range(K)]
    trainer = Trainer(model, lambda rank, *_: along[rank], TensorDataset(torch.zeros(1)), loss_fn=square)
    trainer.fit(GossipStrategy(W, inner_optim="sgd", lr=eta), K, max_steps=steps, batch_size=1, device="cpu", seed=seed,
                val_interval=steps // 2, progress=False)  # fmt: skip
    half, end = [row["val_loss_local"] for row in trainer.history.rows if row.get("val_loss_local") is not None][-2:]
    return 1 - (end / half) ** (2 / steps)


def ask(study: Study) -> Answer:
    steps, seeds, found, rows, off = min(study.steps, 60), COMPARED[: 2 if study.quick else None], {}, {}, 0.0
    graphs = {"all": topology.complete(K), "torus": topology.torus(K), "ring": topology.ring(K)}
    for name, W in {**graphs, "weight 0.1": 0.9 * torch.eye(K).double() + 0.1 * graphs["all"]}.items():
        eta = max((i / 200 for i in range(1, 160)), key=lambda eta: formula(W, eta))
        found[name] = [rate(W, eta, steps, seed) for seed in seeds]
        rows[f"{name}: r - formula"] = difference(found[name], [formula(W, eta)] * len(found[name]))
        off = max(off, abs(rows[f"{name}: r - formula"].mean) / formula(W, eta))
    rows["ring - weight 0.1"] = faster = difference(found["ring"], found["weight 0.1"])
    why = f"The rates are within {off:.1%} of the formula's; the ring's minus that of all with weight 0.1: {faster}."
    verdicts = ("DISAGREES", "UNDECIDED", "ORDER ONLY", "AGREES")
    return Answer(verdicts[2 * (faster.sign == 1) + (off <= 0.03)], why, rows)
