"""Streaming DiLoCo: fragments in turn, whose exchange is used tau steps later (arXiv 2501.18512, algorithm 2).

    for each fragment p:   theta_outer,p = a copy of theta_p
    for each step t = 1, 2, ...
        for each node i:   theta_i = inner_i(theta_i, clip(gradient of f(theta_i)))
        for each fragment p
            if t = t_p, t_p + H, ...:            send Delta_p = mean_i C(theta_outer,p - theta_i,p)
            if it was sent tau steps before:     theta_outer,p = outer_p(theta_outer,p, Delta_p)
                for each node i:                 theta_i,p = alpha theta_i,p + (1 - alpha) theta_outer,p

Where nodes have different tau, each has an outer optimizer of its own, which takes the same steps at other times.

The code E3M0: powers of two, scale = max |x| / 64 in float32; of the levels 0, 1, 2, 4, ... 64 the nearest one, of two
equally near the smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tests.reference import common
from tests.reference.common import Batch, OptimizerSpec, Result, Schedule


def by_module(names: Sequence[str], num_fragments: int) -> list[list[str]]:
    """Every module is a block, and block l is in fragment l mod F, or they are as many as modules."""
    modules: list[str] = []
    for name in names:
        module = name.rpartition(".")[0]
        if module not in modules:
            modules.append(module)
    num_fragments = min(num_fragments, len(modules))
    return [
        [name for name in names if modules.index(name.rpartition(".")[0]) % num_fragments == p]
        for p in range(num_fragments)
    ]


def e3m0(x: Tensor) -> Tensor:
    scale = (x.abs().max() / 64).to(torch.float32).to(x.dtype)
    found = torch.zeros_like(x).flatten()
    for i, value in enumerate((x / scale).flatten().tolist()):
        best = 0.0
        for level in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0):
            if abs(abs(value) - level) < abs(abs(value) - best):
                best = level
        found[i] = best if value > 0 else -best
    return scale * found.view(x.shape)


def streaming(
    model: nn.Module,
    batches: Sequence[Sequence[Batch]],
    num_nodes: int,
    *,
    H: int,
    fragments: Callable[[Sequence[str]], list[list[str]]],
    delays: Sequence[int],
    alphas: Sequence[float],
    offsets: Sequence[int] | None = None,
    code: Callable[[Tensor], Tensor] = lambda x: x,
    inner: OptimizerSpec = (torch.optim.AdamW, {"lr": 1e-3}),
    outer: OptimizerSpec = (torch.optim.SGD, {"lr": 0.4, "momentum": 0.9, "nesterov": True}),
    max_norm: float | None = None,
    schedule: Schedule | None = None,
) -> Result:
    models = common.copy_model(model, num_nodes)
    optimizers = common.make_optimizers(models, inner)
    losses = common.empty_losses(model, len(batches), num_nodes)
    thetas = [common.parameters(model_i) for model_i in models]
    parts = fragments(list(thetas[0]))
    F = len(parts)
    offsets = [math.floor((p + 1) * H / F) for p in range(F)] if offsets is None else offsets

    # theta_outer[i][p] and outer_optimizers[i][p]: as node i has them
    theta_outer = [[{n: theta[n].detach().clone() for n in names} for names in parts] for theta in thetas]
    outer_optimizers = [[common.make_optimizer(list(x.values()), outer) for x in own] for own in theta_outer]
    newest = [{n: thetas[0][n].detach().clone() for n in names} for names in parts]  # of who has taken most steps
    sent: dict[tuple[int, int], dict[str, Tensor]] = {}  # (fragment, step) -> Delta

    for step in range(len(batches)):
        for node in range(num_nodes):
            losses[step, node] = common.backward(models[node], batches[step][node])
            common.clip(models[node], max_norm)
            common.set_rate(optimizers[node], schedule, step)
            optimizers[node].step()

        t = step + 1
        for p, names in enumerate(parts):
            if t >= offsets[p] and (t - offsets[p]) % H == 0:
                sent[p, t] = {
                    n: common.mean([code(newest[p][n] - theta[n].detach()) for theta in thetas]) for n in names
                }
            for node in range(num_nodes):
                delta = sent.get((p, t - delays[node]))
                if delta is None:
                    continue
                for n, outer_param in theta_outer[node][p].items():
                    outer_param.grad = delta[n].clone()
                outer_optimizers[node][p].step()
                with torch.no_grad():
                    for n, outer_param in theta_outer[node][p].items():
                        alpha = alphas[node]
                        thetas[node][n].copy_(alpha * thetas[node][n] + (1 - alpha) * outer_param)
                        newest[p][n] = outer_param.detach().clone()

    return Result(losses=losses, models=models, optimizers=optimizers)
