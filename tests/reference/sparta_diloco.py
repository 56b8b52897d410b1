"""SPARTA every `interval` steps (openreview stFPf3gzq1) and DiLoCo every H (arXiv 2311.08105).

    theta_outer = a copy of theta
    for each step t
        for each node i:   theta_i = inner_i(theta_i, clip(gradient of f(theta_i)))
        after every `interval` steps:
            M = mask_t;   the mean of theta_j[M] over the nodes will be written at step t + delay
        write the mean that is due at step t, if one is
        after every H steps:
            Delta = mean_i (theta_outer - theta_i)
            theta_outer = outer(theta_outer, Delta)
            for each node i:   theta_i = theta_outer

What SPARTA has under way at an outer step is written after it all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tests.reference import common
from tests.reference.common import Batch, OptimizerSpec, Result, Schedule


def sparta_diloco(
    model: nn.Module,
    batches: Sequence[Sequence[Batch]],
    num_nodes: int,
    *,
    mask: Callable[[int, str, torch.Size], Tensor],
    interval: int,
    H: int,
    inner: OptimizerSpec = (torch.optim.AdamW, {"lr": 1e-3}),
    outer: OptimizerSpec = (torch.optim.SGD, {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
    delay: int = 0,
    max_norm: float | None = None,
    schedule: Schedule | None = None,
) -> Result:
    models = common.copy_model(model, num_nodes)
    optimizers = common.make_optimizers(models, inner)
    losses = common.empty_losses(model, len(batches), num_nodes)

    thetas = [common.parameters(model_i) for model_i in models]
    theta_outer = {name: theta.detach().clone() for name, theta in thetas[0].items()}
    outer_optimizer = common.make_optimizer(list(theta_outer.values()), outer)
    in_flight: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}  # (step when due, name) -> (mask, mean)

    for step in range(len(batches)):
        for node in range(num_nodes):
            losses[step, node] = common.backward(models[node], batches[step][node])
            common.clip(models[node], max_norm)
            common.set_rate(optimizers[node], schedule, step)
            optimizers[node].step()

        with torch.no_grad():
            for name in theta_outer:
                if (step + 1) % interval == 0:
                    M = mask(step, name, theta_outer[name].shape)
                    in_flight[step + delay, name] = (M, common.mean([theta[name][M] for theta in thetas]))
                if (step, name) in in_flight:
                    M, average = in_flight.pop((step, name))
                    for theta in thetas:
                        theta[name][M] = average

        if (step + 1) % H == 0:
            for name, outer_param in theta_outer.items():
                outer_param.grad = common.mean([outer_param - theta[name].detach() for theta in thetas])
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
