"""Eager updates: DiLoCo whose mean arrives one round late, with a node's own movement at once (arXiv 2502.12996).

    for each node i:       theta_outer,i = a copy of theta
    for each step t
        for each node i:   theta_i = inner_i(theta_i, clip(gradient of f(theta_i)))
        after every H steps:
            for each node i:   Delta_i = theta_outer,i - theta_i
            Delta = mean_i Delta_i                                     arrives before the next time
            for each node i:
                Delta~_i = (Delta of the last time) + (Delta_i - (Delta_i of the last time)) / K
                theta_outer,i = outer_i(theta_outer,i, Delta~_i)
                theta_i = theta_outer,i

The first time, what was before is 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.reference import common
from tests.reference.common import Batch, OptimizerSpec, Result, Schedule


def eager(
    model: nn.Module,
    batches: Sequence[Sequence[Batch]],
    num_nodes: int,
    *,
    H: int,
    inner: OptimizerSpec = (torch.optim.AdamW, {"lr": 1e-3}),
    outer: OptimizerSpec = (torch.optim.SGD, {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
    max_norm: float | None = None,
    schedule: Schedule | None = None,
) -> Result:
    models = common.copy_model(model, num_nodes)
    optimizers = common.make_optimizers(models, inner)
    losses = common.empty_losses(model, len(batches), num_nodes)
    thetas = [common.parameters(model_i) for model_i in models]

    theta_outer = [{n: p.detach().clone() for n, p in theta.items()} for theta in thetas]
    outer_optimizers = [common.make_optimizer(list(own.values()), outer) for own in theta_outer]
    before: dict[str, list[Tensor]] = {n: [torch.zeros_like(p)] * num_nodes for n, p in theta_outer[0].items()}

    for step in range(len(batches)):
        for node in range(num_nodes):
            losses[step, node] = common.backward(models[node], batches[step][node])
            common.clip(models[node], max_norm)
            common.set_rate(optimizers[node], schedule, step)
            optimizers[node].step()

        if (step + 1) % H == 0:
            for n in before:
                now = [theta_outer[i][n] - thetas[i][n].detach() for i in range(num_nodes)]
                for i in range(num_nodes):
                    theta_outer[i][n].grad = common.mean(before[n]) + (now[i] - before[n][i]) / num_nodes
                before[n] = now
            for i in range(num_nodes):
                outer_optimizers[i].step()
                with torch.no_grad():
                    for n, outer_param in theta_outer[i].items():
                        thetas[i][n].copy_(outer_param)

    return Result(losses=losses, models=models, optimizers=optimizers)
