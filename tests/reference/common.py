"""The common parts of the naive twins: K separate modules, K ordinary optimizers, and the mean over them.

A twin follows its paper's pseudo-code one line at a time, node after node, with `nn.Module`s and
`torch.optim` as any user knows them. It is slow on purpose and imports nothing from vecgym: what it
computes is what vecgym must compute.

Conventions of every twin:

* `batches[step][node]` is what `models[node].forward` takes at that step; forward returns a scalar loss.
* "The parameters" are those with `requires_grad`, each once (a tied one under its first name). Frozen ones
  and buffers are never exchanged; buffers (batch-norm statistics) stay local to their node.
* Every parameter must take part in the loss of every batch.
* Steps count from 0. "After every H steps" means after the steps H-1, 2H-1, ...
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Batch = Any  # whatever tree the model's forward takes
Schedule = Callable[[int], float]  # step -> factor of the learning rate
OptimizerSpec = tuple[Callable[..., Optimizer], dict[str, Any]]  # (class, keyword arguments)


@dataclass
class Result:
    """The end of a run."""

    losses: Tensor  # [steps, K]: each node's loss before its update; nan where it did not train
    models: list[nn.Module]  # K, after the last step
    optimizers: list[Optimizer] = field(default_factory=list)  # K inner ones (DeMo: none)
    outer: dict[str, Tensor] = field(default_factory=dict)  # DiLoCo: theta_outer
    outer_optimizer: Optimizer | None = None  # DiLoCo
    residuals: list[dict[str, Tensor]] = field(default_factory=list)  # DeMo: delta of each node


def copy_model(model: nn.Module, num_nodes: int) -> list[nn.Module]:
    """K copies of `model` that share nothing with it or with each other, in training mode."""
    return [copy.deepcopy(model).train() for _ in range(num_nodes)]


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters; a tied one appears once, under its first name."""
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def gradient(param: nn.Parameter) -> Tensor:
    if param.grad is None:
        raise ValueError("a trainable parameter took no part in the loss: freeze it with requires_grad_(False)")
    return param.grad


def make_optimizer(params: Sequence[Tensor], spec: OptimizerSpec) -> Optimizer:
    make, kwargs = spec
    optimizer = make(params, **kwargs)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def make_optimizers(models: Sequence[nn.Module], spec: OptimizerSpec) -> list[Optimizer]:
    """One optimizer per node, each with its own state."""
    return [make_optimizer(list(parameters(model).values()), spec) for model in models]


def set_rate(optimizer: Optimizer, schedule: Schedule | None, step: int) -> None:
    """lr_t = lr * schedule(t)."""
    if schedule is not None:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * schedule(step)


def empty_losses(model: nn.Module, num_steps: int, num_nodes: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    return torch.full((num_steps, num_nodes), math.nan, dtype=dtype)  # [steps, K]


def backward(model: nn.Module, batch: Batch) -> Tensor:
    """Set each parameter's `.grad` to the gradient at `batch`; return the loss."""
    model.zero_grad()
    loss: Tensor = model(batch)
    loss.backward()
    for param in parameters(model).values():
        gradient(param)
    return loss.detach()


def clip(model: nn.Module, max_norm: float | None) -> None:
    """Scale the gradient of this one model so that its norm is at most `max_norm`."""
    if max_norm is not None:
        nn.utils.clip_grad_norm_(list(parameters(model).values()), max_norm)


def mean(tensors: Sequence[Tensor], weights: Sequence[float] | None = None) -> Tensor:
    """sum_i w_i x_i / sum_i w_i; equal weights by default."""
    if weights is None:
        weights = [1.0] * len(tensors)
    total = torch.zeros_like(tensors[0])
    for tensor, weight in zip(tensors, weights):
        total = total + weight * tensor
    return total / sum(weights)


@torch.no_grad()
def average_parameters(models: Sequence[nn.Module], weights: Sequence[float] | None = None) -> None:
    """theta_i <- sum_j w_j theta_j / sum_j w_j on each of these models."""
    thetas = [parameters(model) for model in models]
    for name in thetas[0]:
        average = mean([theta[name].detach() for theta in thetas], weights)
        for theta in thetas:
            theta[name].copy_(average)


@torch.no_grad()
def average_gradients(models: Sequence[nn.Module]) -> None:
    """g_i <- mean_j g_j on each of these models."""
    thetas = [parameters(model) for model in models]
    for name in thetas[0]:
        average = mean([gradient(theta[name]) for theta in thetas])
        for theta in thetas:
            gradient(theta[name]).copy_(average)
