"""Scaffnew (arXiv 2202.09357, algorithm 2).

for each step
    for each node i:   x_i' = x_i - gamma (g_i - h_i)
    if the coin falls so:   x_i = mean of x_k' - (gamma / p) h_k;   else x_i = x_i'
    for each node i:   h_i = h_i + (p / gamma) (x_i - x_i')
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.reference import common
from tests.reference.common import Batch, Result, Schedule


def scaffnew(
    model: nn.Module,
    batches: Sequence[Sequence[Batch]],
    num_nodes: int,
    *,
    p: float,
    coins: Sequence[bool],
    lr: float,
    schedule: Schedule | None = None,
) -> Result:
    models = common.copy_model(model, num_nodes)
    losses = common.empty_losses(model, len(batches), num_nodes)
    nodes = [common.parameters(node) for node in models]
    h: list[dict[str, Tensor]] = [{name: torch.zeros_like(x) for name, x in node.items()} for node in nodes]

    for step, coin in enumerate(coins):
        gamma = lr * (1.0 if schedule is None else schedule(step))
        for i in range(num_nodes):
            losses[step, i] = common.backward(models[i], batches[step][i])
        with torch.no_grad():
            for name in nodes[0]:
                hat = [x[name] - gamma * (common.gradient(x[name]) - h[i][name]) for i, x in enumerate(nodes)]
                mean = common.mean([x - (gamma / p) * h[i][name] for i, x in enumerate(hat)])
                for i, x in enumerate(nodes):
                    x[name].copy_(mean if coin else hat[i])
                    if gamma > 0:
                        h[i][name] = h[i][name] + (p / gamma) * (x[name] - hat[i])

    return Result(losses=losses, models=models, residuals=h)
