"""FedDyn in the variables of its program (arXiv 2111.04263; alpemreacar/FedDyn, utils_methods.py).

    for each round
        for each participant i:   y_i = theta; H steps of the optimizer with g + alpha (y_i - theta + past_i)
            past_i = past_i + y_i - theta
        theta = mean of the participants' y_i + mean of all past_i

past_i is -G_i / alpha, and the mean of all is -h / alpha.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from tests.reference import common
from tests.reference.common import Batch, OptimizerSpec, Result, Schedule
from tests.reference.fedavg import download


def feddyn(
    model: nn.Module,
    batches: Sequence[Sequence[Batch]],
    num_nodes: int,
    *,
    H: int,
    alpha: float,
    inner: OptimizerSpec,
    participants: Callable[[int], list[int]] | None = None,
    max_norm: float | None = None,
    schedule: Schedule | None = None,
) -> Result:
    models = common.copy_model(model, num_nodes)
    optimizers = common.make_optimizers(models, inner)
    losses = common.empty_losses(model, len(batches), num_nodes)
    theta = {name: p.detach().clone() for name, p in common.parameters(model).items()}
    past = [{name: torch.zeros_like(p) for name, p in theta.items()} for _ in range(num_nodes)]

    for step in range(len(batches)):
        S = list(range(num_nodes)) if participants is None else participants(step)
        for i in S:
            losses[step, i] = common.backward(models[i], batches[step][i])
            with torch.no_grad():
                for name, p in common.parameters(models[i]).items():
                    common.gradient(p).add_(alpha * (p - theta[name] + past[i][name]))
            common.clip(models[i], max_norm)
            common.set_rate(optimizers[i], schedule, step)
            optimizers[i].step()
        if (step + 1) % H == 0:
            y = {i: common.parameters(models[i]) for i in S}
            for i in S:
                past[i] = {name: v + y[i][name].detach() - theta[name] for name, v in past[i].items()}
            for name in theta:
                mean = common.mean([y[i][name].detach() for i in S])
                theta[name] = mean + common.mean([v[name] for v in past])
            for node in models:
                download(node, theta)

    return Result(losses=losses, models=models, optimizers=optimizers, residuals=past, outer=theta)
