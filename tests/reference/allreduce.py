"""AllReduce: synchronous data-parallel training, as in PyTorch's DistributedDataParallel (arXiv 2006.15704).

    for each step t
        for each node i:   g_i = gradient of f(theta_i) on node i's batch
        g = mean_i g_i                                    (then clip g by its norm)
        for each node i:   theta_i = optimizer_i(theta_i, g)

Every node starts equal and sees the same gradient, so all nodes stay equal; only buffers differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tests.reference import common
from tests.reference.common import Batch, OptimizerSpec, Result, Schedule


def allreduce(
    model: nn.Module,
    batches: Sequence[Sequence[Batch]],
    num_nodes: int,
    *,
    inner: OptimizerSpec = (torch.optim.AdamW, {"lr": 1e-3}),
    max_norm: float | None = None,
    schedule: Schedule | None = None,
) -> Result:
    models = common.copy_model(model, num_nodes)
    optimizers = common.make_optimizers(models, inner)
    losses = common.empty_losses(model, len(batches), num_nodes)

    for step in range(len(batches)):
        for node in range(num_nodes):
            losses[step, node] = common.backward(models[node], batches[step][node])

        common.average_gradients(models)

        for node in range(num_nodes):
            common.clip(models[node], max_norm)
            common.set_rate(optimizers[node], schedule, step)
            optimizers[node].step()

    return Result(losses=losses, models=models, optimizers=optimizers)
