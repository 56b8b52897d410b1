"""Gossip / D-PSGD: each node averages with its neighbours only (arXiv 1705.09056, algorithm 1).

W_t is a doubly stochastic [K, K] matrix; W_t[i, j] is the weight of node j's parameters at node i.

    for each step t                                       mix="after" (the default: adapt, then combine)
        for each node i:   theta_i = optimizer_i(theta_i, clip(gradient of f(theta_i)))
        for each node i:   theta_i = sum_j W_t[i, j] theta_j

    for each step t                                       mix="before" (the paper's algorithm 1)
        for each node i:   g_i = clip(gradient of f(theta_i))
        for each node i:   theta_i = sum_j W_t[i, j] theta_j
        for each node i:   theta_i = optimizer_i(theta_i, g_i)

The paper updates by SGD; any optimizer is allowed here, its state stays local.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from tests.reference import common
from tests.reference.common import Batch, OptimizerSpec, Result, Schedule


@torch.no_grad()
def mix_parameters(models: Sequence[nn.Module], W: Tensor) -> None:
    """theta_i <- sum_j W[i, j] theta_j, all at once: every node reads what the others held before."""
    thetas = [common.parameters(model) for model in models]
    for name in thetas[0]:
        before = [theta[name].detach().clone() for theta in thetas]
        for i in range(len(models)):
            mixed = torch.zeros_like(before[i])
            for j in range(len(models)):
                mixed = mixed + float(W[i, j]) * before[j]
            thetas[i][name].copy_(mixed)


def gossip(
    model: nn.Module,
    batches: Sequence[Sequence[Batch]],
    num_nodes: int,
    *,
    matrix: Callable[[int], Tensor],
    mix: Literal["after", "before"] = "after",
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
            common.clip(models[node], max_norm)

        if mix == "before":
            mix_parameters(models, matrix(step))

        for node in range(num_nodes):
            common.set_rate(optimizers[node], schedule, step)
            optimizers[node].step()

        if mix == "after":
            mix_parameters(models, matrix(step))

    return Result(losses=losses, models=models, optimizers=optimizers)
