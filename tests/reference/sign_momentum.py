"""Distributed sign momentum with local steps (arXiv 2411.17866; shuhuayu/dist-sign-momentum, fastdt.py, "lion").

    x = a copy of theta;  m = 0
    for each step t
        gamma = gamma_t
        for each node i:   theta_i = inner_i(theta_i, clip(gradient of f(theta_i)), gamma)
        after every H steps:
            D = (x - mean_i theta_i) / gamma
            u = beta_1 m + (1 - beta_1) D
            x = x (1 - lambda eta gamma)
            x = x - eta gamma sign(u)
            m = beta_2 m + (1 - beta_2) D
            for each node i:   theta_i = x

gamma is the rate of the step that was just taken: the program sets the rate before the step, and the outer step follows
it. It divides by gamma, and so needs gamma > 0 at these steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tests.reference import common
from tests.reference.common import Batch, OptimizerSpec, Result, Schedule


def sign_momentum(
    model: nn.Module,
    batches: Sequence[Sequence[Batch]],
    num_nodes: int,
    *,
    H: int,
    outer_lr: float = 1.0,
    betas: tuple[float, float] = (0.95, 0.98),
    weight_decay: float = 0.2,
    inner: OptimizerSpec = (torch.optim.AdamW, {"lr": 1e-3}),
    max_norm: float | None = None,
    schedule: Schedule | None = None,
) -> Result:
    models = common.copy_model(model, num_nodes)
    optimizers = common.make_optimizers(models, inner)
    losses = common.empty_losses(model, len(batches), num_nodes)
    thetas = [common.parameters(model_i) for model_i in models]
    x = {name: theta.detach().clone() for name, theta in thetas[0].items()}
    m = {name: torch.zeros_like(theta) for name, theta in x.items()}

    for step in range(len(batches)):
        for node in range(num_nodes):
            losses[step, node] = common.backward(models[node], batches[step][node])
            common.clip(models[node], max_norm)
            common.set_rate(optimizers[node], schedule, step)
            optimizers[node].step()

        if (step + 1) % H == 0:
            gamma = optimizers[0].param_groups[0]["lr"]
            for name in x:
                D = (x[name] - common.mean([theta[name].detach() for theta in thetas])) / gamma
                u = betas[0] * m[name] + (1 - betas[0]) * D
                x[name] = x[name] * (1 - weight_decay * outer_lr * gamma)
                x[name] = x[name] - outer_lr * gamma * torch.sign(u)
                m[name] = betas[1] * m[name] + (1 - betas[1]) * D
                with torch.no_grad():
                    for theta in thetas:
                        theta[name].copy_(x[name])

    return Result(losses=losses, models=models, optimizers=optimizers)
