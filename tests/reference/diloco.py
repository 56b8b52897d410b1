"""DiLoCo: an outer optimizer on the mean change of H local steps (arXiv 2311.08105, algorithm 1).

    theta_outer = a copy of theta
    for each step t
        for each node i:   theta_i = inner_i(theta_i, clip(gradient of f(theta_i)))
        after every H steps:
            Delta = mean_i (theta_outer - theta_i)
            theta_outer = outer(theta_outer, Delta)       Delta in the place of a gradient
            for each node i:   theta_i = theta_outer

The inner optimizers' state stays local and is kept across rounds, as in the paper. The outer optimizer is
SGD with Nesterov momentum as torch defines it: m <- mu m + Delta, theta <- theta - eta (Delta + mu m).

`restart` = S: after every S outer steps m = 0, and nothing else changes (arXiv 2605.28585).

`correct` gets what each node has moved, Delta_i, and the outer momentum m, and gives what is averaged: `heloco` (arXiv
2606.00271) and `median_norm` (arXiv 2603.08163) below.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tests.reference import common
from tests.reference.common import Batch, OptimizerSpec, Result, Schedule


def diloco(
    model: nn.Module,
    batches: Sequence[Sequence[Batch]],
    num_nodes: int,
    *,
    H: int,
    inner: OptimizerSpec = (torch.optim.AdamW, {"lr": 1e-3}),
    outer: OptimizerSpec = (torch.optim.SGD, {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
    max_norm: float | None = None,
    schedule: Schedule | None = None,
    correct: Callable[[list[dict[str, Tensor]], dict[str, Tensor]], list[dict[str, Tensor]]] | None = None,
    restart: int | None = None,
) -> Result:
    models = common.copy_model(model, num_nodes)
    optimizers = common.make_optimizers(models, inner)
    losses = common.empty_losses(model, len(batches), num_nodes)

    thetas = [common.parameters(model_i) for model_i in models]
    theta_outer = {name: theta.detach().clone() for name, theta in thetas[0].items()}  # clone: a copy, no alias
    outer_optimizer = common.make_optimizer(list(theta_outer.values()), outer)

    for step in range(len(batches)):
        for node in range(num_nodes):
            losses[step, node] = common.backward(models[node], batches[step][node])
            common.clip(models[node], max_norm)
            common.set_rate(optimizers[node], schedule, step)
            optimizers[node].step()

        if (step + 1) % H == 0:
            moved = [{name: p - theta[name].detach() for name, p in theta_outer.items()} for theta in thetas]
            if correct is not None:
                held = {n: outer_optimizer.state[p].get("momentum_buffer") for n, p in theta_outer.items()}
                moved = correct(
                    moved, {n: torch.zeros_like(theta_outer[n]) if m is None else m for n, m in held.items()}
                )
            for name, outer_param in theta_outer.items():
                Delta = common.mean([Delta_i[name] for Delta_i in moved])
                outer_param.grad = Delta
            outer_optimizer.step()
            outer_steps = (step + 1) // H
            if restart is not None and outer_steps % restart == 0:
                for outer_param in theta_outer.values():
                    outer_optimizer.state[outer_param]["momentum_buffer"].zero_()
            with torch.no_grad():
                for theta in thetas:
                    for name, outer_param in theta_outer.items():
                        theta[name].copy_(outer_param)

    return Result(
        losses=losses,
        models=models,
        optimizers=optimizers,
        outer=theta_outer,
        outer_optimizer=outer_optimizer,
    )


def heloco(moved: list[dict[str, Tensor]], momentum: dict[str, Tensor], mu: float) -> list[dict[str, Tensor]]:
    """Each tensor of each node by itself, by m = (1 - mu) momentum: HeLoCo's is a mean of movements, torch's a sum."""
    return [{n: _against(delta, (1 - mu) * momentum[n]) for n, delta in of_node.items()} for of_node in moved]


def _against(delta: Tensor, m: Tensor) -> Tensor:
    size, pull = float(delta.norm()), float(m.norm())
    if pull < 1e-8 or size < 1e-8:
        return delta
    c = float((delta * m).sum()) / (size * pull)
    conf = size / (size + 3 * pull + 1e-8)
    if c >= 0.2:
        return delta
    if c < 0:
        return delta - min(0.5 * -c * conf, 0.5) * c * size * m / pull
    turn = min((1 - c) * conf, 1.0)
    direction = (1 - turn) * delta / size + turn * m / pull
    return size * direction / direction.norm()


def median_norm(moved: list[dict[str, Tensor]], momentum: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """templar's: a tensor larger than the median of all nodes' is shrunk to it; of two middle ones, the lower."""
    limits = {name: statistics.median_low([float(of_node[name].norm()) for of_node in moved]) for name in moved[0]}
    return [{name: x * min(1.0, limits[name] / float(x.norm())) for name, x in of_node.items()} for of_node in moved]
