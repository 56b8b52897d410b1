"""Decentralised algorithms: a local step, then an exchange with neighbours, as the papers write it, node by node.

    for each step t
        for each node i:   x_i = optimizer_i(theta_i, clip(gradient of f(theta_i)))
        theta = rule(t, theta, x)                       a class below, with what each node remembers

Vectors are lists over the nodes of dicts by name; `mix(W, v)` is sum_j W[i, j] v_j for each node i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tests.reference import common
from tests.reference.common import Batch, OptimizerSpec, Result, Schedule

Vector = dict[str, Tensor]
Vectors = list[Vector]  # of all nodes
Matrix = Callable[[int], Tensor]
Rule = Callable[[int, Vectors, Vectors], Vectors]


def plus(a: Vectors, b: Vectors, scale: float = 1.0) -> Vectors:
    """a + scale b"""
    return [{name: x[name] + scale * y[name] for name in x} for x, y in zip(a, b)]


def zeros(a: Vectors) -> Vectors:
    return [{name: torch.zeros_like(x) for name, x in v.items()} for v in a]


def mix(W: Tensor, v: Vectors) -> Vectors:
    mixed = zeros(v)
    for i in range(len(v)):
        for j in range(len(v)):
            for name in v[j]:
                mixed[i][name] = mixed[i][name] + float(W[i, j]) * v[j][name]
    return mixed


class GradientTracking:
    """s = u + c; theta = W (theta + s), or W theta + s; c = W s - u (relaysgd; DIGing for steps)."""

    def __init__(self, matrix: Matrix, order: str = "adapt_then_combine") -> None:
        self.matrix, self.order = matrix, order
        self.c: Vectors | None = None

    def __call__(self, step: int, theta: Vectors, x: Vectors) -> Vectors:
        W, c = self.matrix(step), self.c or zeros(x)
        u = plus(x, theta, -1.0)
        s = plus(u, c)
        self.c = plus(mix(W, s), u, -1.0)
        return mix(W, plus(theta, s)) if self.order == "adapt_then_combine" else plus(mix(W, theta), s)


class D2:
    """theta' = W (theta + u + c); c = theta' - theta - u (relaysgd)."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix
        self.c: Vectors | None = None

    def __call__(self, step: int, theta: Vectors, x: Vectors) -> Vectors:
        u, c = plus(x, theta, -1.0), self.c or zeros(x)
        new = mix(self.matrix(step), plus(plus(theta, u), c))
        self.c = plus(plus(new, theta, -1.0), u, -1.0)
        return new


class ExactDiffusion:
    """psi' = theta + u; phi = psi' + theta - psi; theta = (W + I) / 2 phi (the paper, algorithm 1)."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix
        self.psi: Vectors | None = None

    def __call__(self, step: int, theta: Vectors, x: Vectors) -> Vectors:
        W = self.matrix(step)
        phi = plus(plus(x, theta), self.psi or theta, -1.0)
        self.psi = x
        return mix((W + torch.eye(len(W), dtype=W.dtype)) / 2, phi)


def decentralised(
    model: nn.Module,
    batches: Sequence[Sequence[Batch]],
    num_nodes: int,
    *,
    rule: Rule,
    inner: OptimizerSpec = (torch.optim.SGD, {"lr": 0.1}),
    max_norm: float | None = None,
    schedule: Schedule | None = None,
) -> Result:
    models = common.copy_model(model, num_nodes)
    optimizers = common.make_optimizers(models, inner)
    losses = common.empty_losses(model, len(batches), num_nodes)
    thetas = [common.parameters(node) for node in models]

    def values() -> Vectors:
        return [{name: p.detach().clone() for name, p in theta.items()} for theta in thetas]

    for step in range(len(batches)):
        before = values()
        for node in range(num_nodes):
            losses[step, node] = common.backward(models[node], batches[step][node])
            common.clip(models[node], max_norm)
            common.set_rate(optimizers[node], schedule, step)
            optimizers[node].step()
        with torch.no_grad():
            for theta, new in zip(thetas, rule(step, before, values())):
                for name, p in theta.items():
                    p.copy_(new[name])

    return Result(losses=losses, models=models, optimizers=optimizers)
