"""PALSGD: DiLoCo with random steps towards the outer parameters (arXiv 2504.18454).

    theta_outer = a copy of theta
    for each step t
        for each node i:
            with probability p:  theta_i = theta_i - gamma_t / p * c * (theta_i - theta_outer)
            else:                theta_i = inner_i(theta_i, clip(gradient of f(theta_i))), its rate gamma_t / (1 - p)
        after every H steps:
            Delta = mean_i (theta_outer - theta_i)
            m = mu m + Delta;  theta_outer = theta_outer - eta (Delta + mu m);  theta_i = theta_outer

`drawn(step, node)` says which of the two a step is. A step without a gradient has no loss: nan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from tests.reference import common
from tests.reference.common import Batch, OptimizerSpec, Result


def palsgd(
    model: nn.Module,
    batches: Sequence[Sequence[Batch]],
    num_nodes: int,
    *,
    H: int,
    p: float,
    pull: float,
    drawn: Callable[[int, int], bool],
    lr: float,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    inner: OptimizerSpec = (torch.optim.AdamW, {"lr": 1e-3}),
    max_norm: float | None = None,
    factor: Callable[[int], float] = lambda step: 1.0,
) -> Result:
    models = common.copy_model(model, num_nodes)
    optimizers = common.make_optimizers(models, inner)
    losses = common.empty_losses(model, len(batches), num_nodes)
    thetas = [common.parameters(model_i) for model_i in models]
    theta_outer = {name: x.detach().clone() for name, x in thetas[0].items()}
    m = {name: torch.zeros_like(x) for name, x in theta_outer.items()}

    for step in range(len(batches)):
        gamma = lr * factor(step)
        for node in range(num_nodes):
            if drawn(step, node):
                with torch.no_grad():
                    for name, own in thetas[node].items():
                        own.sub_(gamma / p * pull * (own - theta_outer[name]))
                continue
            losses[step, node] = common.backward(models[node], batches[step][node])
            common.clip(models[node], max_norm)
            for group in optimizers[node].param_groups:
                group["lr"] = gamma / (1 - p)
            optimizers[node].step()

        if (step + 1) % H == 0:
            for name, outer in theta_outer.items():
                Delta = common.mean([outer - theta[name].detach() for theta in thetas])
                m[name] = outer_momentum * m[name] + Delta
                theta_outer[name] = outer - outer_lr * (Delta + outer_momentum * m[name])
                for theta in thetas:
                    with torch.no_grad():
                        theta[name].copy_(theta_outer[name])

    return Result(losses=losses, models=models, optimizers=optimizers, outer=theta_outer)
