"""FedNova, as its paper and its program have it (arXiv 2007.07481; JYWa/FedNova, distoptim/FedNova.py).

    for each round
        for each participant i:   y_i = theta; momentum = 0; H_i steps of SGD on f_i + mu / 2 |y - theta|^2
            a_i = |c_1| + |c_2| + ..., where theta - y_i = c_1 g_1 + c_2 g_2 + ... of the gradients of its steps
        tau = sum p_i a_i; with a proximal term sum p_i (gamma_1 + gamma_2 + ...)
        G = beta G + tau sum p_i (theta - y_i) / a_i;   theta = theta - G

The coefficients are kept one by one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tests.reference import common
from tests.reference.common import Batch, Result, Schedule
from tests.reference.fedavg import download


def fednova(
    model: nn.Module,
    batches: Sequence[Sequence[Batch]],
    num_nodes: int,
    *,
    local_steps: Sequence[int],
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    mu: float | Sequence[float] = 0.0,
    server_momentum: float = 0.0,
    weights: Sequence[float] | None = None,
    participants: Callable[[int], list[int]] | None = None,
    max_norm: float | None = None,
    schedule: Schedule | None = None,
) -> Result:
    models = common.copy_model(model, num_nodes)
    losses = common.empty_losses(model, len(batches), num_nodes)
    theta = {name: p.detach().clone() for name, p in common.parameters(model).items()}
    G = {name: torch.zeros_like(p) for name, p in theta.items()}
    H = max(local_steps)
    pull = [mu] * num_nodes if isinstance(mu, (int, float)) else list(mu)

    for first in range(0, len(batches), H):
        S = list(range(num_nodes)) if participants is None else participants(first)
        work: dict[int, tuple[list[float], float]] = {}
        for i in S:
            download(models[i], theta)
            buffer: dict[str, Tensor] = {name: torch.zeros_like(p) for name, p in theta.items()}
            in_buffer, in_movement, rates = list[float](), list[float](), 0.0
            for step in range(first, min(first + local_steps[i], len(batches))):
                gamma = lr * (1.0 if schedule is None else schedule(step))
                losses[step, i] = common.backward(models[i], batches[step][i])
                common.clip(models[i], max_norm)
                with torch.no_grad():
                    for name, p in common.parameters(models[i]).items():
                        buffer[name] = momentum * buffer[name] + common.gradient(p) + weight_decay * p
                        p.sub_(gamma * (buffer[name] + pull[i] * (p - theta[name])))
                in_buffer = [momentum * c for c in in_buffer] + [1.0]
                in_movement = [(1 - gamma * pull[i]) * c for c in in_movement] + [0.0]
                in_movement = [c + gamma * b for c, b in zip(in_movement, in_buffer)]
                rates += gamma
            work[i] = in_movement, rates
        if first + H > len(batches):
            break
        n = {i: 1.0 if weights is None else weights[i] for i in S}
        share = {i: n[i] / sum(n.values()) for i in S}
        a = {i: sum(map(abs, work[i][0])) for i in S}
        tau = sum(share[i] * (work[i][1] if any(pull) else a[i]) for i in S)
        y = {i: common.parameters(models[i]) for i in S}
        for name in theta:
            moved = [share[i] * (theta[name] - y[i][name].detach()) / a[i] for i in S]
            G[name] = server_momentum * G[name] + tau * torch.stack(moved).sum(0)
            theta[name] = theta[name] - G[name]
        for node in models:
            download(node, theta)

    return Result(losses=losses, models=copy.deepcopy(models), outer=theta)
