"""EDiT: DiLoCo with a penalty of movements (arXiv 2412.07210; atorch's `local_sgd/DDP`), tensor by tensor.

    theta_outer = a copy of theta
    for each step t
        for each node i:   theta_i = inner_i(theta_i, clip(gradient of f(theta_i)))
        after every H steps, for each tensor:
            for each node i:
                Delta_i = theta_outer - theta_i;   n_i = |Delta_i|
                if its detector says that n_i is an outlier:   Delta_i = 0;   n_i = n_i + 1e6
                else:   the detector is told n_i
            w = softmax(-n / T) over the nodes;   Delta = sum_i w_i Delta_i
            if anomalies are looked for and sum |Delta| < 1e-6:   Delta = None, the outer optimizer leaves it out
        Delta = clip(Delta) by the norm over all tensors
        theta_outer = outer(theta_outer, Delta);   for each node i:   theta_i = theta_outer

The nodes' norms, detectors and batches go by what each of them has done itself.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tests.reference import common
from tests.reference.common import Batch, OptimizerSpec, Result, Schedule


class Detector:
    """Of one tensor of one node: an exponential mean and variance of its norms, and the last scores."""

    def __init__(self, warmup: int, threshold: float, alpha: float) -> None:
        self.warmup, self.threshold, self.alpha = warmup, threshold, alpha
        self.count, self.mean, self.M2 = 0, 0.0, 0.0
        self.scores: deque[float] = deque(maxlen=warmup)

    def score(self, norm: float) -> float:
        if self.count < self.warmup or self.M2 == 0:
            return 0.0
        return (norm - self.mean) / math.sqrt(self.M2)

    def is_outlier(self, norm: float) -> bool:
        if self.count < self.warmup:
            return False
        return self.score(norm) > self.threshold * max(1.0, statistics.stdev(self.scores))

    def told(self, norm: float) -> None:
        self.count += 1
        before = norm - self.mean
        self.mean += self.alpha * before
        self.M2 = (1 - self.alpha) * (self.M2 + self.alpha * before * (norm - self.mean))
        self.scores.append(self.score(norm))


def edit(
    model: nn.Module,
    batches: Sequence[Sequence[Batch]],
    num_nodes: int,
    *,
    H: int,
    inner: OptimizerSpec = (torch.optim.AdamW, {"lr": 1e-3}),
    outer: OptimizerSpec = (torch.optim.SGD, {"lr": 0.7, "momentum": 0.8, "nesterov": True}),
    max_norm: float | None = None,
    schedule: Schedule | None = None,
    clip: float | None = None,
    skip_anomalies: bool = False,
    warmup: int = 120,
    threshold: float = 3.0,
    alpha: float = 0.02,
    temperature: float = 1.0,
    present: Callable[[int], Sequence[int]] | None = None,
    found: list[tuple[int, str, int]] | None = None,
) -> Result:
    """`present`: step -> the nodes that are there, all through a round; (round, tensor, node) of anomalies are `found`.

    A node that returns begins from the outer parameters.
    """
    models = common.copy_model(model, num_nodes)
    optimizers = common.make_optimizers(models, inner)
    losses = common.empty_losses(model, len(batches), num_nodes)
    thetas = [common.parameters(model_i) for model_i in models]
    theta_outer = {name: theta.detach().clone() for name, theta in thetas[0].items()}
    outer_optimizer = common.make_optimizer(list(theta_outer.values()), outer)
    detectors = [{name: Detector(warmup, threshold, alpha) for name in theta_outer} for _ in range(num_nodes)]
    counts = [0] * num_nodes

    for step in range(len(batches)):
        nodes = list(range(num_nodes)) if present is None else list(present(step))
        for node in nodes:
            losses[step, node] = common.backward(models[node], batches[counts[node]][node])
            common.clip(models[node], max_norm)
            common.set_rate(optimizers[node], schedule, counts[node])
            optimizers[node].step()
            counts[node] += 1

        if (step + 1) % H == 0:
            for name, outer_param in theta_outer.items():
                moved, norms = [], []
                for node in nodes:
                    Delta = outer_param - thetas[node][name].detach()
                    norm = float(torch.linalg.vector_norm(Delta))
                    detector = detectors[node][name]
                    if skip_anomalies and detector.is_outlier(norm):
                        Delta, norm = torch.zeros_like(Delta), norm + 1e6
                        if found is not None:
                            found.append(((step + 1) // H - 1, name, node))
                    elif skip_anomalies:
                        detector.told(norm)
                    moved.append(Delta)
                    norms.append(norm)
                weights = torch.softmax(torch.tensor([-n / temperature for n in norms], dtype=torch.float64), 0)
                total: Tensor = torch.zeros_like(outer_param)
                for weight, Delta in zip(weights.tolist(), moved):
                    total = total + weight * Delta
                nothing = skip_anomalies and float(total.abs().sum()) < 1e-6
                outer_param.grad = None if nothing else total
            if clip is not None:
                nn.utils.clip_grad_norm_(list(theta_outer.values()), clip)
            outer_optimizer.step()
            with torch.no_grad():
                for theta in thetas:  # who is absent takes them on return
                    for name, outer_param in theta_outer.items():
                        theta[name].copy_(outer_param)

    return Result(
        losses=losses, models=models, optimizers=optimizers, outer=theta_outer, outer_optimizer=outer_optimizer
    )
