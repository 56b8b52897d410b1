"""EXO Gym's training loop, one module and one optimizer per node, in the order in which its processes do things.

    a sampler that is never told the epoch: every epoch has the order of the first
    for each step t = 0, 1, ...
        for each node: the gradient (AllReduce: the mean gradient), clipped; the optimizer, with the schedule's t
        then, if t is a positive multiple of H: the average of the parameters, or DiLoCo's outer step
    (its counter is tested before it is advanced: the first exchange follows H + 1 steps)

DiLoCo's outer parameters are a copy (in EXO Gym, on a CPU, they are node 0's own after the first outer step). One node
alone exchanges nothing. For models without dropout and batch norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from tests.reference import common
from tests.reference.common import OptimizerSpec, Result, Schedule

OUTER: OptimizerSpec = (torch.optim.SGD, {"lr": 0.7, "momentum": 0.9, "nesterov": True})


def exogym(
    model: nn.Module,
    dataset: Any,
    num_nodes: int,
    kind: str,  # "allreduce", "fedavg" or "diloco"
    *,
    inner: OptimizerSpec,
    steps: int,
    batch_size: int,
    H: int = 1,
    max_norm: float | None = None,
    schedule: Schedule | None = None,
) -> Result:
    models = common.copy_model(model, num_nodes)
    optimizers = common.make_optimizers(models, inner)
    loaders = [
        DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset, num_nodes, i)) for i in range(num_nodes)
    ]
    batches = [list(loader) for loader in loaders]  # of every epoch
    outer = [p.detach().clone().requires_grad_() for p in model.parameters()]
    outer_optimizer = common.make_optimizer(outer, OUTER)
    losses = common.empty_losses(model, steps, num_nodes)
    for t in range(steps):
        for i, m in enumerate(models):
            losses[t, i] = common.backward(m, batches[i][t % len(batches[i])])
        if kind == "allreduce":
            common.average_gradients(models)
        for m, optimizer in zip(models, optimizers):
            common.clip(m, max_norm)
            common.set_rate(optimizer, schedule, t)
            optimizer.step()
        if kind == "allreduce" or t == 0 or t % H != 0 or num_nodes == 1:
            continue
        common.average_parameters(models)
        if kind == "diloco":
            for theta, p in zip(outer, models[0].parameters()):
                theta.grad = theta.detach() - p.detach()
            outer_optimizer.step()
            for m in models:
                for theta, p in zip(outer, m.parameters()):
                    p.data.copy_(theta.detach())
    return Result(losses, models, optimizers)
