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


class Gossip:
    """theta = W x: D-PSGD."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix

    def __call__(self, step: int, theta: Vectors, x: Vectors) -> Vectors:
        return mix(self.matrix(step), x)


class Push:
    """x = A (x + u), w = A w, z = x / w; theta is z (SGP, algorithm 1)."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix
        self.x: Vectors | None = None
        self.w: list[float] | None = None

    def __call__(self, step: int, theta: Vectors, z: Vectors) -> Vectors:
        A, n = self.matrix(step), len(theta)
        w, x = self.w or [1.0] * n, self.x or theta
        self.x = mix(A, plus(x, plus(z, theta, -1.0)))
        self.w = [sum(float(A[i, j]) * w[j] for j in range(n)) for i in range(n)]
        return [{name: v / weight for name, v in node.items()} for node, weight in zip(self.x, self.w)]


class Choco:
    """q = Q(x - hat), hat += q, and x + c sum_j W_ij (hat_j - hat_i), before or after that."""

    def __init__(self, matrix: Tensor, code: Callable[[Tensor], Tensor], c: float, estimates_first: bool) -> None:
        self.W, self.code, self.c, self.estimates_first = matrix, code, c, estimates_first
        self.hat: Vectors | None = None

    def send(self, x: Vectors) -> None:
        hat = self.hat or zeros(x)
        q = [{name: self.code(v) for name, v in node.items()} for node in plus(x, hat, -1.0)]
        self.hat = plus(hat, q)

    def towards(self, x: Vectors) -> Vectors:
        hat = self.hat or zeros(x)
        moved = x
        for i in range(len(x)):
            for j in range(len(x)):
                for name in x[i]:
                    step = self.c * float(self.W[i, j]) * (hat[j][name] - hat[i][name])
                    moved = [{**node, name: node[name] + step} if k == i else node for k, node in enumerate(moved)]
        return moved

    def __call__(self, step: int, theta: Vectors, x: Vectors) -> Vectors:
        if self.estimates_first:
            self.send(x)
            return self.towards(x)
        new = self.towards(x)
        self.send(new)
        return new


class RelaySum:
    """M_ij = z_i + sum_{k != j} M_ki(before), n_ij alike; theta_i = (z_i + sum M_ji + theta_0 (K - 1 - sum n_ji)) / K.

    With two trees each has every second coordinate of all parameters in a row.
    """

    def __init__(self, *trees: Sequence[tuple[int, int]]) -> None:
        self.trees = trees
        self.sent: list[dict[tuple[int, int], tuple[Tensor, int]]] = [{} for _ in trees]
        self.start: list[Tensor] | None = None

    def __call__(self, step: int, theta: Vectors, x: Vectors) -> Vectors:
        z = [torch.cat([v.flatten() for v in node.values()]) for node in x]
        if self.start is None:
            self.start = [torch.cat([v.flatten() for v in node.values()]) for node in theta]
        new, count = [torch.empty_like(v) for v in z], len(self.trees)
        for t, edges in enumerate(self.trees):
            halves, start = [v[t::count] for v in z], [v[t::count] for v in self.start]
            for i, value in enumerate(self.average(t, edges, halves, start)):
                new[i][t::count] = value
        return [self.unpacked(v, x[0]) for v in new]

    def average(self, t: int, edges: Sequence[tuple[int, int]], z: list[Tensor], start: list[Tensor]) -> list[Tensor]:
        K, before, sent = len(z), self.sent[t], dict[tuple[int, int], tuple[Tensor, int]]()
        links = [*edges, *((j, i) for i, j in edges)]
        for i, j in links:
            message, number = z[i], 1
            for k, to in links:
                if to == i and k != j and (k, i) in before:
                    message, number = message + before[k, i][0], number + before[k, i][1]
            sent[i, j] = (message, number)
        self.sent[t] = sent
        averages = []
        for i in range(K):
            arrived = [message for (_, to), message in sent.items() if to == i]
            total = z[i] + sum((message for message, _ in arrived), torch.zeros_like(z[i]))
            averages.append((total + start[i] * (K - 1 - sum(number for _, number in arrived))) / K)
        return averages

    @staticmethod
    def unpacked(v: Tensor, like: Vector) -> Vector:
        sizes = [x.numel() for x in like.values()]
        return {name: piece.reshape(x.shape) for (name, x), piece in zip(like.items(), v.split(sizes))}


def top_k(fraction: float) -> Callable[[Tensor], Tensor]:
    """Keep the largest values of a tensor, at least one."""

    def code(x: Tensor) -> Tensor:
        kept = torch.zeros_like(x).flatten()
        places = x.abs().flatten().topk(max(1, round(fraction * x.numel()))).indices
        kept[places] = x.flatten()[places]
        return kept.reshape(x.shape)

    return code


def quasi_global(
    model: nn.Module,
    batches: Sequence[Sequence[Batch]],
    num_nodes: int,
    *,
    matrix: Matrix,
    lr: float,
    mu: float = 0.9,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    max_norm: float | None = None,
    schedule: Schedule = lambda step: 1.0,
) -> tuple[Result, Vectors]:
    """QGM, algorithm 1; returns m, too. A step with gamma = 0 leaves m."""
    models = common.copy_model(model, num_nodes)
    thetas = [common.parameters(node) for node in models]
    losses = common.empty_losses(model, len(batches), num_nodes)
    m = zeros([{name: p.detach() for name, p in theta.items()} for theta in thetas])
    for step in range(len(batches)):
        gamma, before, half = lr * schedule(step), list[Vector](), list[Vector]()
        for node, theta in enumerate(thetas):
            losses[step, node] = common.backward(models[node], batches[step][node])
            common.clip(models[node], max_norm)
            before.append({name: p.detach().clone() for name, p in theta.items()})
            half.append({})
            for name, p in theta.items():
                g = common.gradient(p) + weight_decay * p.detach()
                b = mu * m[node][name] + g
                half[node][name] = p.detach() - gamma * (g + mu * b if nesterov else b)
        after = mix(matrix(step), half)
        for node, theta in enumerate(thetas):
            for name, p in theta.items():
                p.data.copy_(after[node][name])
                if gamma > 0:
                    moved = (before[node][name] - after[node][name]) / gamma
                    m[node][name] = mu * m[node][name] + (1 - mu) * moved
    return Result(losses=losses, models=models), m


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
