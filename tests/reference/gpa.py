"""GPA: generalized primal averaging (arXiv 2512.17131).

    x = z = theta
    for each step t
        y = mu_y x + (1 - mu_y) z
        g = mean_i (gradient of f_i at y), clipped
        z = inner(z, g)
        x = mu_x x + (1 - mu_x) z

All nodes have the same x, y and z, so these are kept once; each node only has gradients of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.reference import common
from tests.reference.common import Batch, OptimizerSpec, Result, Schedule


def gpa(
    model: nn.Module,
    batches: Sequence[Sequence[Batch]],
    num_nodes: int,
    *,
    mu_x: float,
    mu_y: float,
    inner: OptimizerSpec = (torch.optim.AdamW, {"lr": 1e-3}),
    max_norm: float | None = None,
    schedule: Schedule | None = None,
) -> tuple[Result, dict[str, Tensor], dict[str, Tensor]]:
    """What the run leaves behind, the models at y; and x and z."""
    models = common.copy_model(model, num_nodes)
    losses = common.empty_losses(model, len(batches), num_nodes)
    thetas = [common.parameters(model_i) for model_i in models]
    x = {name: p.detach().clone() for name, p in thetas[0].items()}
    z = {name: nn.Parameter(p.detach().clone()) for name, p in thetas[0].items()}
    optimizer = common.make_optimizer(list(z.values()), inner)

    def set_y() -> None:
        with torch.no_grad():
            for theta in thetas:
                for name, p in theta.items():
                    p.copy_(mu_y * x[name] + (1 - mu_y) * z[name])

    for step in range(len(batches)):
        for node in range(num_nodes):
            losses[step, node] = common.backward(models[node], batches[step][node])
        for name, p in z.items():
            p.grad = common.mean([common.gradient(theta[name]) for theta in thetas])
        if max_norm is not None:
            nn.utils.clip_grad_norm_(list(z.values()), max_norm)
        common.set_rate(optimizer, schedule, step)
        optimizer.step()
        for name in x:
            x[name] = mu_x * x[name] + (1 - mu_x) * z[name].detach()
        set_y()

    return Result(losses=losses, models=models), x, {name: p.detach() for name, p in z.items()}
