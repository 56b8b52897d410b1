"""SPARTA: average a small random part of the parameters at every step (openreview stFPf3gzq1).

    for each step t
        for each node i:   theta_i = optimizer_i(theta_i, clip(gradient of f(theta_i)))
        M = mask_t                                        the same coordinates on every node
        theta_i[M] = mean_j theta_j[M]                    the others stay local

The paper is on OpenReview, not on arXiv. Asynchronous SPARTA (`delay` = d > 0): the mean taken at step t is
written at step t + d, over whatever the nodes hold on the coordinates M_t by then; within one step the new
mean is taken first, then the late one is written. To exchange at some steps only, give a mask that is False
everywhere at the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tests.reference import common
from tests.reference.common import Batch, OptimizerSpec, Result, Schedule


def sparta(
    model: nn.Module,
    batches: Sequence[Sequence[Batch]],
    num_nodes: int,
    *,
    mask: Callable[[int, str, torch.Size], Tensor],
    inner: OptimizerSpec = (torch.optim.AdamW, {"lr": 1e-3}),
    delay: int = 0,
    max_norm: float | None = None,
    schedule: Schedule | None = None,
) -> Result:
    models = common.copy_model(model, num_nodes)
    optimizers = common.make_optimizers(models, inner)
    losses = common.empty_losses(model, len(batches), num_nodes)

    thetas = [common.parameters(model_i) for model_i in models]
    in_flight: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}  # (step when due, name) -> (mask, mean)

    for step in range(len(batches)):
        for node in range(num_nodes):
            losses[step, node] = common.backward(models[node], batches[step][node])
            common.clip(models[node], max_norm)
            common.set_rate(optimizers[node], schedule, step)
            optimizers[node].step()

        with torch.no_grad():
            for name in thetas[0]:
                M = mask(step, name, thetas[0][name].shape)
                average = common.mean([theta[name][M] for theta in thetas])
                in_flight[step + delay, name] = (M, average)

                if (step, name) in in_flight:
                    M, average = in_flight.pop((step, name))
                    for theta in thetas:
                        theta[name][M] = average

    return Result(losses=losses, models=models, optimizers=optimizers)
