"""Local Adam and DES-LOC: local steps, then means of the parameters and of the optimizers' moments.

    for each step t
        for each node i:   theta_i, u_i, v_i = Adam(theta_i, u_i, v_i, clip(gradient of f(theta_i)))
        after every Hx steps:   theta_i = mean_k theta_k
        after every Hu steps:   u_i = mean_k u_k
        after every Hv steps:   v_i = mean_k v_k

Local Adam (arXiv 2409.13155) has Hx = Hu = Hv; DES-LOC (arXiv 2505.22549) one period for each. `moments` names the
periods of what an optimizer keeps, "exp_avg" and "exp_avg_sq" of Adam.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from tests.reference import common
from tests.reference.common import Batch, OptimizerSpec, Result, Schedule


def local_adam(
    model: nn.Module,
    batches: Sequence[Sequence[Batch]],
    num_nodes: int,
    *,
    H: int,
    moments: Mapping[str, int],
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
            common.set_rate(optimizers[node], schedule, step)
            optimizers[node].step()
        for slot, period in moments.items():
            if (step + 1) % period == 0:
                average_moment(models, optimizers, slot)
        if (step + 1) % H == 0:
            common.average_parameters(models)

    return Result(losses=losses, models=models, optimizers=optimizers)


@torch.no_grad()
def average_moment(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], slot: str) -> None:
    thetas = [common.parameters(model) for model in models]
    for name in thetas[0]:
        held = [optimizer.state[theta[name]] for optimizer, theta in zip(optimizers, thetas)]
        average = common.mean([state[slot] for state in held])
        for state in held:
            state[slot] = average.clone()
