"""DiLoCo: an outer optimizer on the mean change of H local steps (arXiv 2311.08105, algorithm 1).

    theta_outer = a copy of theta
    for each step t
        for each node i:   theta_i = inner_i(theta_i, clip(gradient of f(theta_i)))
        after every H steps:
            Delta = mean_i (theta_outer - theta_i)
            theta_outer = outer(theta_outer, Delta)       Delta in the place of a gradient
            for each node i:   theta_i = theta_outer

The inner optimizers' state stays local and is kept across rounds, as in the paper. The outer optimizer is
SGD with Nesterov momentum as torch defines it: m <- mu m + Delta, theta <- theta - eta (Delta + mu m).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tests.reference import common
from tests.reference.common import Batch, OptimizerSpec, Result, Schedule


def diloco(
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
    theta_outer = {name: theta.detach().clone() for name, theta in thetas[0].items()}  # clone: a copy, no alias
    outer_optimizer = common.make_optimizer(list(theta_outer.values()), outer)

    for step in range(len(batches)):
        for node in range(num_nodes):
            losses[step, node] = common.backward(models[node], batches[step][node])
            common.clip(models[node], max_norm)
            common.set_rate(optimizers[node], schedule, step)
            optimizers[node].step()

        if (step + 1) % H == 0:
            for name, outer_param in theta_outer.items():
                Delta = common.mean([outer_param - theta[name].detach() for theta in thetas])
                outer_param.grad = Delta
            outer_optimizer.step()
            with torch.no_grad():
                for theta in thetas:
                    for name, outer_param in theta_outer.items():
                        theta[name].copy_(outer_param)

    return Result(
        losses=losses,
        models=models,
        optimizers=optimizers,
        outer=theta_outer,
        outer_optimizer=outer_optimizer,
    )
