"""DP-FedAvg with a fixed denominator: clipped updates of sampled clients, and noise of the server (arXiv 1710.06963,
algorithm 1: equal weights w_k = 1, flat clipping, estimator f_f, whose denominator q W is n = q K here).

    theta, the server's
    for each round
        C = each client by itself with probability q
        for each client k in C:   theta_k = H local steps from theta;  Delta_k = theta_k - theta
                                  Delta_k = Delta_k min(1, S / |Delta_k|)
        theta = theta + sum_k Delta_k / n + N(0, (sigma S / n)^2)

Deviations from the paper: local progress is counted in H steps, not in epochs; a norm is 1e-6 larger, as in torch's
clip_grad_norm_. Noise is drawn by the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from tests.reference import common
from tests.reference.common import Batch, OptimizerSpec, Result


def dp_fedavg(
    model: nn.Module,
    batches: Sequence[Sequence[Batch]],
    num_nodes: int,
    *,
    H: int,
    inner: OptimizerSpec,
    S: float,
    sigma: float,
    n: float,
    clients: Callable[[int], Sequence[int]],
    normal: Callable[[str, int], Tensor],
) -> Result:
    """`clients(step)` of the round that begins there; `normal(name, step)` at a round's last step, N(0, 1)."""
    models = common.copy_model(model, num_nodes)
    optimizers = common.make_optimizers(models, inner)
    losses = common.empty_losses(model, len(batches), num_nodes)
    theta = {name: p.detach().clone() for name, p in common.parameters(model).items()}
    for first in range(0, len(batches), H):
        total = {name: torch.zeros_like(x) for name, x in theta.items()}
        for k in clients(first):
            download(models[k], theta)
            for step in range(first, first + H):
                losses[step, k] = common.backward(models[k], batches[step][k])
                optimizers[k].step()
            delta = {name: p.detach() - theta[name] for name, p in common.parameters(models[k]).items()}
            norm = torch.sqrt(sum(((d * d).sum() for d in delta.values()), torch.zeros(())))
            for name, d in delta.items():
                total[name] += d * min(1.0, S / (float(norm) + 1e-6))
        for name in theta:
            theta[name] = theta[name] + total[name] / n + sigma * S / n * normal(name, first + H - 1)
    for m in models:
        download(m, theta)
    return Result(losses=losses, models=models, optimizers=optimizers)


@torch.no_grad()
def download(model: nn.Module, theta: Mapping[str, Tensor]) -> None:
    for name, p in common.parameters(model).items():
        p.copy_(theta[name])
