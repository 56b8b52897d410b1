"""SPARTA: average a small random part of the parameters at every step (openreview stFPf3gzq1).

    for each step t
        for each node i:   theta_i = optimizer_i(theta_i, clip(gradient of f(theta_i)))
        M = mask_t                                        the same coordinates on every node
        theta_i[M] = mean_j theta_j[M]                    the others stay local

The paper is on OpenReview, not on arXiv. Asynchronous SPARTA (`delay` = d > 0): the mean taken at step t is
written at step t + d, over whatever the nodes hold on the coordinates M_t by then; within one step the new
mean is taken first, then the late one is written. To exchange at some steps only, give a mask that is False
everywhere at the others.

With `correct` (LOSCAR, arXiv 2605.20866) what node i has moved in between is kept:
theta_i(t + d)[M_t] = mean_j theta_j(t)[M_t] + theta_i(t + d)[M_t] - theta_i(t)[M_t].
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
    correct: bool = False,
    max_norm: float | None = None,
    schedule: Schedule | None = None,
) -> Result:
    models = common.copy_model(model, num_nodes)
    optimizers = common.make_optimizers(models, inner)
    losses = common.empty_losses(model, len(batches), num_nodes)

    thetas = [common.parameters(model_i) for model_i in models]
    in_flight: dict[
        tuple[int, str], tuple[Tensor, Tensor, list[Tensor]]
    ] = {}  # (step when due, name) -> (M, mean, theta)

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
                in_flight[step + delay, name] = (M, average, [theta[name].detach().clone() for theta in thetas])

                if (step, name) in in_flight:
                    M, average, held = in_flight.pop((step, name))
                    for theta, before in zip(thetas, held):
                        moved = theta[name][M] - before[M] if correct else 0.0
                        theta[name][M] = average + moved

    return Result(losses=losses, models=models, optimizers=optimizers)
