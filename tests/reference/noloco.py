"""NoLoCo: outer steps over groups of nodes, each with an outer state of its own (arXiv 2506.10911).

    phi_i = a copy of theta_i, delta_i = 0
    for each step t
        for each node i:   theta_i = inner_i(theta_i, clip(gradient of f(theta_i)))
        after every H steps, with the groups of this exchange:
            Delta_i = theta_i - phi_i
            for each node i, in its group of n:
                delta_i = mu delta_i + eta / n sum_group Delta_j - gamma (phi_i - mean_group phi_j)
            phi_i = phi_i + delta_i
            theta_i = phi_i

`groups(step)` gives the groups, lists of nodes in which each node is once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tests.reference import common
from tests.reference.common import Batch, OptimizerSpec, Result, Schedule


def noloco(
    model: nn.Module,
    batches: Sequence[Sequence[Batch]],
    num_nodes: int,
    *,
    H: int,
    groups: Callable[[int], Sequence[Sequence[int]]],
    outer_lr: float = 0.7,
    momentum: float = 0.5,
    gamma: float = 1.0,
    inner: OptimizerSpec = (torch.optim.AdamW, {"lr": 1e-3}),
    max_norm: float | None = None,
    schedule: Schedule | None = None,
) -> tuple[Result, list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """The remains of the run, and phi and delta of each node."""
    models = common.copy_model(model, num_nodes)
    optimizers = common.make_optimizers(models, inner)
    losses = common.empty_losses(model, len(batches), num_nodes)

    thetas = [common.parameters(model_i) for model_i in models]
    phi = [{name: p.detach().clone() for name, p in theta.items()} for theta in thetas]
    delta = [{name: torch.zeros_like(p) for name, p in theta.items()} for theta in phi]

    for step in range(len(batches)):
        for node in range(num_nodes):
            losses[step, node] = common.backward(models[node], batches[step][node])
            common.clip(models[node], max_norm)
            common.set_rate(optimizers[node], schedule, step)
            optimizers[node].step()

        if (step + 1) % H == 0:
            for group in groups(step):
                for name in phi[0]:
                    movements = [thetas[j][name].detach() - phi[j][name] for j in group]
                    middle = common.mean([phi[j][name] for j in group])
                    for i in group:
                        pulled = gamma * (phi[i][name] - middle)
                        delta[i][name] = momentum * delta[i][name] + outer_lr * sum(movements) / len(group) - pulled
            with torch.no_grad():
                for i in range(num_nodes):
                    for name in phi[i]:
                        phi[i][name] = phi[i][name] + delta[i][name]
                        thetas[i][name].copy_(phi[i][name])

    return Result(losses=losses, models=models, optimizers=optimizers), phi, delta
