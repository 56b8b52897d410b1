"""Mime and MimeLite (arXiv 2008.03606; google/fedjax, algorithms/mime.py, mime_lite.py), with ordinary optimizers.

for each round: theta and the optimizer's state s go to the clients of a sample S
    c = sum_S w_i (mean of the gradients at theta on the client's batches of the round) / sum_S w_i
    for each client i of S:   y_i = theta;  for each of its batches:  a step of the optimizer, its state that of the
                              server, from y_i with g(y_i) - g(theta) + c, or g(y_i) in lite;  the new state is lost
    s = the state after a step from theta with c;  theta = theta + eta sum_S w_i (y_i - theta) / sum_S w_i
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.reference import common
from tests.reference.common import Batch, OptimizerSpec, Schedule

Vector = dict[str, Tensor]


class Mime(NamedTuple):
    losses: Tensor  # [steps, K]
    models: list[nn.Module]
    c: Vector
    server: Optimizer


def gradient(model: nn.Module, batch: Batch) -> tuple[Vector, Tensor]:
    loss = common.backward(model, batch)
    return {name: common.gradient(p).clone() for name, p in common.parameters(model).items()}, loss


def stepped(model: nn.Module, optimizer: Optimizer, start: Vector, grads: Vector) -> tuple[nn.Module, Optimizer]:
    """Copies of both, after a step from `start`."""
    model, optimizer = copy.deepcopy((model, optimizer))
    load(model, start)
    for name, p in common.parameters(model).items():
        p.grad = grads[name].clone()
    optimizer.step()
    return model, optimizer


@torch.no_grad()
def load(model: nn.Module, values: Vector) -> None:
    for name, p in common.parameters(model).items():
        p.copy_(values[name])


def values(model: nn.Module) -> Vector:
    return {name: p.detach().clone() for name, p in common.parameters(model).items()}


def mime(
    model: nn.Module,
    batches: Sequence[Sequence[Batch]],
    num_nodes: int,
    *,
    H: int,
    inner: OptimizerSpec,
    lite: bool = False,
    eta: float = 1.0,
    participants: Callable[[int], Sequence[int]] | None = None,
    weights: Sequence[float] | None = None,
    schedule: Schedule | None = None,
) -> Mime:
    steps = len(batches)
    models = common.copy_model(model, num_nodes)
    losses = common.empty_losses(model, steps, num_nodes)
    (server,) = common.copy_model(model, 1)
    optimizer = common.make_optimizer(list(common.parameters(server).values()), inner)
    w = [1.0] * num_nodes if weights is None else list(weights)
    c = {name: torch.zeros_like(x) for name, x in values(server).items()}

    for first in range(0, steps, H):
        theta, round_ = values(server), range(first, min(first + H, steps))
        S = range(num_nodes) if participants is None else participants(first)
        total = sum(w[i] for i in S)
        c = {name: torch.zeros_like(x) for name, x in theta.items()}
        for i in S:
            for t in round_:
                for name, g in gradient(server, batches[t][i])[0].items():
                    c[name] += w[i] * g / len(round_) / total
        for i in S:
            for t in round_:
                common.set_rate(optimizer, schedule, t)
                grads, losses[t, i] = gradient(models[i], batches[t][i])
                if not lite:
                    at_theta, _ = gradient(server, batches[t][i])
                    grads = {name: g - at_theta[name] + c[name] for name, g in grads.items()}
                load(models[i], values(stepped(server, optimizer, values(models[i]), grads)[0]))
        if len(round_) < H:
            break
        moved = {name: torch.zeros_like(x) for name, x in theta.items()}
        for i in S:
            for name, y in values(models[i]).items():
                moved[name] += w[i] * (y - theta[name]) / total
        server, optimizer = stepped(server, optimizer, theta, c)
        load(server, {name: theta[name] + eta * moved[name] for name in theta})
        for m in models:  # what each would begin with, were it drawn next
            load(m, values(server))
    return Mime(losses, models, c, optimizer)
