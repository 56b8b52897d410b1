"""GPA: generalized primal averaging (arXiv 2512.17131).

    x = z = theta
    for each step t
        y = mu_y x + (1 - mu_y) z
        g = mean_i (gradient of f_i at y), clipped
        z = inner(z, g)
        x = mu_x x + (1 - mu_x) z

With decay = "code", as facebookresearch/optimizers, gpa/gpa_adamw.py, whose AdamW keeps y and z, and no x:

    z' = (1 - lr wd) z;  z_new = z' - lr (AdamW's direction)
    y_new = mu_x y + (1 - mu_x) z' + (1 - mu_x mu_y) (z_new - z')

which is the same where wd = 0. x is what it takes for y = mu_y x + (1 - mu_y) z.

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
    decay: str = "paper",
    inner: OptimizerSpec = (torch.optim.AdamW, {"lr": 1e-3}),
    max_norm: float | None = None,
    schedule: Schedule | None = None,
) -> tuple[Result, dict[str, Tensor], dict[str, Tensor]]:
    """The remains of the run, the models at y; and x and z."""
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
        group = optimizer.param_groups[0]
        before = {name: (1 - group["lr"] * group["weight_decay"]) * p.detach() for name, p in z.items()}
        y = {name: p.detach().clone() for name, p in thetas[0].items()}
        optimizer.step()
        for name in x:
            new = z[name].detach()
            x[name] = mu_x * x[name] + (1 - mu_x) * new
            if decay == "code":
                after = mu_x * y[name] + (1 - mu_x) * before[name] + (1 - mu_x * mu_y) * (new - before[name])
                x[name] = (after - (1 - mu_y) * new) / mu_y
        set_y()

    return Result(losses=losses, models=models), x, {name: p.detach() for name, p in z.items()}
