"""SCAFFOLD (arXiv 1910.06378, algorithm 1, option II), with a schedule of the local rate.

    for each round: theta goes to the clients of a sample S
        for each client i of S:   y_i = theta;  its H_i steps:  y_i = y_i - gamma_t (g_i(y_i) - c_i + c)
                                  c_i+ = c_i - c + (theta - y_i) / sum of its gamma_t
        theta = theta + eta sum_S w_i (y_i - theta) / sum_S w_i
        c = c + sum_S w_i (c_i+ - c_i) / sum_i w_i;  c_i = c_i+

The paper has w_i = 1 and a constant rate: H_i gamma in place of the sum, and |S| / N times a mean over S for c.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tests.reference import common
from tests.reference.common import Batch, Schedule

Vector = dict[str, Tensor]


class Scaffold(NamedTuple):
    losses: Tensor  # [steps, K]
    models: list[nn.Module]
    c: Vector
    c_i: list[Vector]


def scaffold(
    model: nn.Module,
    batches: Sequence[Sequence[Batch]],
    num_nodes: int,
    *,
    H: int,
    lr: float,
    eta: float = 1.0,
    weight_decay: float = 0.0,
    participants: Callable[[int], Sequence[int]] | None = None,
    weights: Sequence[float] | None = None,
    local_steps: Sequence[int] | None = None,
    schedule: Schedule | None = None,
) -> Scaffold:
    models = common.copy_model(model, num_nodes)
    losses = common.empty_losses(model, len(batches), num_nodes)
    theta = {name: p.detach().clone() for name, p in common.parameters(model).items()}
    w = [1.0] * num_nodes if weights is None else list(weights)
    counts = [H] * num_nodes if local_steps is None else list(local_steps)
    c = {name: torch.zeros_like(x) for name, x in theta.items()}
    c_i = [{name: torch.zeros_like(x) for name, x in theta.items()} for _ in range(num_nodes)]
    rates = [0.0] * num_nodes

    for step in range(len(batches)):
        S = range(num_nodes) if participants is None else participants(step)
        gamma = lr * (schedule(step) if schedule else 1.0)
        for i in S:
            if step % H >= counts[i]:
                continue
            losses[step, i] = common.backward(models[i], batches[step][i])
            rates[i] += gamma
            with torch.no_grad():
                for name, y in common.parameters(models[i]).items():
                    g = common.gradient(y) + weight_decay * y
                    y.sub_(gamma * (g - c_i[i][name] + c[name]))
        if (step + 1) % H == 0:
            change = {name: torch.zeros_like(x) for name, x in theta.items()}
            moved = {name: torch.zeros_like(x) for name, x in theta.items()}
            for i in S:
                for name, y in common.parameters(models[i]).items():
                    new = c_i[i][name]
                    if rates[i] > 0:
                        new = c_i[i][name] - c[name] + (theta[name] - y.detach()) / rates[i]
                    change[name] += w[i] * (new - c_i[i][name])
                    moved[name] += w[i] * (y.detach() - theta[name])
                    c_i[i][name] = new
            for name in theta:
                theta[name] = theta[name] + eta * moved[name] / sum(w[i] for i in S)
                c[name] = c[name] + change[name] / sum(w)
            for m in models:  # what each would begin with, were it drawn next
                for name, y in common.parameters(m).items():
                    with torch.no_grad():
                        y.copy_(theta[name])
            rates = [0.0] * num_nodes
    return Scaffold(losses, models, c, c_i)
