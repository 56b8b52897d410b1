"""Compressed averaging with error feedback (Seide et al. 2014; arXiv 1901.09847), and PowerSGD (arXiv 1905.13727).

    to average x_1 ... x_K, for each tensor
        for each node i:
            p_i = x_i + e_i
            send C(p_i)
            e_i = p_i - C(p_i)                            without error feedback: e_i = 0
        result = mean_i C(p_i)

It takes the place of the mean in
    AllReduce:  g = result of the g_i
    DiLoCo:     Delta = result of the theta_outer - theta_i
    FedAvg:     theta = r + result of the theta_i - r,    r = the theta before: at first the initial one

PowerSGD, for the same p_i as a matrix of r columns at a time:
    P = orthogonalise(mean_i p_i Q);   Q_i = p_i^T P;   Q = mean_i Q_i;   result = P Q^T;   e_i = p_i - P Q_i^T
Tensors of less than two dimensions, and those for which P and Q are not smaller, are averaged as they are.

A codec is a function of (step, name of the tensor, node, p): what C(p) stands for. What is drawn at random is given as
a function, so that both programs draw the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from tests.reference import common
from tests.reference.common import Batch, OptimizerSpec, Result

Codec = Callable[[int, str, int, Tensor], Tensor]


def count(fraction: float, n: int) -> int:
    return min(n, max(1, round(fraction * n)))


def topk(fraction: float) -> Codec:
    """The values of largest magnitude; of equal ones the first."""

    def code(step: int, name: str, node: int, p: Tensor) -> Tensor:
        order = torch.argsort(p.abs().flatten(), descending=True, stable=True)
        sent = torch.zeros_like(p).flatten()
        for index in order[: count(fraction, p.numel())].tolist():
            sent[index] = p.flatten()[index]
        return sent.view(p.shape)

    return code


def randomk(fraction: float, draw: Callable[[int, str, int, int], Tensor]) -> Codec:
    """The values on the coordinates draw(step, name, n, m), the same on every node."""

    def code(step: int, name: str, node: int, p: Tensor) -> Tensor:
        sent = torch.zeros_like(p).flatten()
        for index in draw(step, name, p.numel(), count(fraction, p.numel())).tolist():
            sent[index] = p.flatten()[index]
        return sent.view(p.shape)

    return code


def quantise(bits: int, draw: Callable[[int, str, int, int], Tensor] | None = None) -> Codec:
    """Integers times a scale in float32; rounded to nearest, or at random: floor(x + u), u = draw(...) uniform."""

    def code(step: int, name: str, node: int, p: Tensor) -> Tensor:
        limit = 127 if bits == 8 else 7
        scale = (p.abs().max() / limit).to(torch.float32).to(p.dtype)
        if scale == 0:
            return torch.zeros_like(p)
        if draw is None:
            whole = torch.round(p / scale)
        else:
            u = draw(step, name, node, p.numel()).view(p.shape)
            whole = torch.floor(p / scale + u)
        return scale * whole.clamp(-limit, limit)

    return code


def sign() -> Codec:
    """The mean magnitude, in float32, with each value's sign."""

    def code(step: int, name: str, node: int, p: Tensor) -> Tensor:
        magnitude = p.abs().mean().to(torch.float32).to(p.dtype)
        return torch.where(p >= 0, magnitude, -magnitude)

    return code


Uniform = Callable[[int, str, int, int], Tensor]  # (step, name, node, n) -> [n] in [0, 1)


def qsgd(levels: int, draw: Uniform, bucket: int | None = None, unbiased: bool = False) -> Codec:
    """floor(s x / |x| + u) |x| / s in each bucket; not unbiased: shrunk by |x|^2 / E|that|^2."""
    return rounded(lambda part: part.norm() / levels, levels, draw, bucket, unbiased)


def ternary(draw: Uniform, unbiased: bool = False) -> Codec:
    """floor(x / max|x| + u) max|x|."""
    return rounded(lambda part: part.abs().max(), 1, draw, None, unbiased)


def rounded(
    distance: Callable[[Tensor], Tensor], levels: int, draw: Uniform, bucket: int | None, unbiased: bool
) -> Codec:
    def code(step: int, name: str, node: int, p: Tensor) -> Tensor:
        flat, u = p.flatten(), draw(step, name, node, p.numel())
        size = bucket or max(1, flat.numel())
        parts = []
        for part, drawn in zip(flat.split(size), u.split(size)):
            scale = distance(part).to(torch.float32).to(p.dtype)
            if scale == 0:
                parts.append(torch.zeros_like(part))
                continue
            exact = part / scale
            q = torch.stack([torch.floor(x + v) for x, v in zip(exact, drawn)]).clamp(-levels, levels)
            up = exact - torch.floor(exact)  # the probability of the upper of two levels
            expected = (up * torch.floor(exact + 1) ** 2 + (1 - up) * torch.floor(exact) ** 2).sum()
            shrink = 1.0 if unbiased else float((exact**2).sum() / expected)
            scale = (
                scale if unbiased else (scale.to(torch.float32) * torch.tensor(shrink, dtype=torch.float32)).to(p.dtype)
            )
            parts.append(scale * q)
        return torch.cat(parts).view(p.shape)

    return code


def natural(draw: Uniform) -> Codec:
    """The power of two below or above, with the probability that makes the expectation exact."""

    def code(step: int, name: str, node: int, p: Tensor) -> Tensor:
        sent = []
        for x, u in zip(p.flatten().tolist(), draw(step, name, node, p.numel()).tolist()):
            if x == 0:
                sent.append(0.0)
                continue
            below = 2.0 ** (math.frexp(abs(x))[1] - 1)  # frexp: |x| = m 2^e, 1/2 <= m < 1
            sent.append(math.copysign(2 * below if u < abs(x) / below - 1 else below, x))
        return torch.tensor(sent, dtype=p.dtype).view(p.shape)

    return code


def statistical(bits: int, sigmas: float = 6.0) -> Codec:
    """The mean of the values in the bin, in float32; bins of width sigmas std / 2^bits around the mean."""

    def code(step: int, name: str, node: int, p: Tensor) -> Tensor:
        flat, count = p.flatten(), 2**bits
        centre = flat.sum() / len(flat)
        std = ((flat - centre).square().sum() / max(1, len(flat) - 1)).sqrt()
        if std == 0:
            return flat.mean().float().to(p.dtype).expand(p.shape)
        numbers = torch.round((flat - centre) / (sigmas * std / count) + count // 2).clamp(0, count - 1)
        sent = torch.zeros_like(flat)
        for b in range(count):
            inside = numbers == b
            if inside.any():
                sent[inside] = (flat[inside].sum() / inside.sum()).float().to(p.dtype)
        return sent.view(p.shape)

    return code


def largest_divisor(n: int, limit: int) -> int:
    return next(d for d in range(min(n, limit), 0, -1) if n % d == 0)


def chunked_topk(k: int, chunk: int) -> Codec:
    """The k largest of each chunk x chunk of a matrix, and of each chunk^2 of a vector; of equal ones the first."""

    def code(step: int, name: str, node: int, p: Tensor) -> Tensor:
        matrix = p.reshape(p.shape[0], -1) if p.dim() > 1 else p.reshape(1, -1)
        height = largest_divisor(matrix.shape[0], chunk)
        width = largest_divisor(matrix.shape[1], chunk if p.dim() > 1 else chunk**2)
        sent = torch.zeros_like(matrix)
        for top in range(0, matrix.shape[0], height):
            for left in range(0, matrix.shape[1], width):
                part = matrix[top : top + height, left : left + width]
                order = torch.argsort(part.abs().flatten(), descending=True, stable=True)
                for place in order[:k].tolist():
                    row, column = top + place // width, left + place % width
                    sent[row, column] = matrix[row, column]
        return sent.view(p.shape)

    return code


class Averaging(Protocol):
    residuals: dict[str, list[Tensor]]  # of each node

    def __call__(self, step: int, name: str, tensors: Sequence[Tensor]) -> Tensor: ...


class Compressed:
    """mean_i C(u_i + decay e_i), where u_i is x_i, or a momentum of it that ends where something was sent."""

    def __init__(
        self, codec: Codec, error_feedback: bool, decay: float = 1.0, momentum: float = 0.0, masking: bool = True
    ) -> None:
        self.codec = codec
        self.error_feedback = error_feedback
        self.decay, self.momentum, self.masking = decay, momentum, masking
        self.residuals: dict[str, list[Tensor]] = {}
        self.momenta: dict[str, list[Tensor]] = {}

    def __call__(self, step: int, name: str, tensors: Sequence[Tensor]) -> Tensor:
        residuals = self.residuals.setdefault(name, [torch.zeros_like(x) for x in tensors])
        momenta = self.momenta.setdefault(name, [torch.zeros_like(x) for x in tensors])
        sent = []
        for node, x in enumerate(tensors):
            u = self.momentum * momenta[node] + x
            p = u + self.decay * residuals[node]
            sent.append(self.codec(step, name, node, p))
            momenta[node] = u * (sent[node] == 0) if self.masking else u
            if self.error_feedback:
                residuals[node] = p - sent[node]
        return common.mean(sent)


class EF21:
    """h_i <- h_i + C(x_i - h_i); the result is the mean of the h_i."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.residuals: dict[str, list[Tensor]] = {}  # the h_i

    def __call__(self, step: int, name: str, tensors: Sequence[Tensor]) -> Tensor:
        estimates = self.residuals.setdefault(name, [torch.zeros_like(x) for x in tensors])
        for node, x in enumerate(tensors):
            estimates[node] = estimates[node] + self.codec(step, name, node, x - estimates[node])
        return common.mean(estimates)


class PowerSGD:
    """P Q^T."""

    def __init__(self, rank: int, draw: Callable[[int, str, int], Tensor], error_feedback: bool) -> None:
        self.rank = rank
        self.draw = draw  # (step, name, columns) -> [columns, rank]
        self.error_feedback = error_feedback
        self.residuals: dict[str, list[Tensor]] = {}
        self.Q: dict[str, Tensor] = {}

    def __call__(self, step: int, name: str, tensors: Sequence[Tensor]) -> Tensor:
        residuals = self.residuals.setdefault(name, [torch.zeros_like(x) for x in tensors])
        shape = tensors[0].shape
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) >= 2 else (1, shape.numel())
        if len(shape) < 2 or self.rank * (rows + columns) >= rows * columns:
            return common.mean(tensors)
        if name not in self.Q:
            self.Q[name] = self.draw(step, name, columns)
        matrices = [(x + e).reshape(rows, columns) for x, e in zip(tensors, residuals)]
        P = gram_schmidt(common.mean([M @ self.Q[name] for M in matrices]))
        Qs = [M.T @ P for M in matrices]
        self.Q[name] = common.mean(Qs)
        if self.error_feedback:
            for node, M in enumerate(matrices):
                residuals[node] = (M - P @ Qs[node].T).view(shape)
        return (P @ self.Q[name].T).view(shape)


def gram_schmidt(P: Tensor) -> Tensor:
    """Orthonormal columns of the same span."""
    columns: list[Tensor] = []
    for p in P.T:
        for _ in range(2):  # the second pass takes away the first one's rounding errors
            for q in columns:
                p = p - (q @ p) * q
        columns.append(p / p.norm())
    return torch.stack(columns, dim=1)


# ------------------------------------------------------------------------------------------- the algorithms


def allreduce(
    model: nn.Module, batches: Sequence[Sequence[Batch]], num_nodes: int, average: Averaging, *, inner: OptimizerSpec
) -> Result:
    models = common.copy_model(model, num_nodes)
    optimizers = common.make_optimizers(models, inner)
    losses = common.empty_losses(model, len(batches), num_nodes)
    thetas = [common.parameters(model_i) for model_i in models]
    for step in range(len(batches)):
        for node in range(num_nodes):
            losses[step, node] = common.backward(models[node], batches[step][node])
        for name in thetas[0]:
            g = average(step, name, [common.gradient(theta[name]) for theta in thetas])
            for theta in thetas:
                theta[name].grad = g.clone()
        for optimizer in optimizers:
            optimizer.step()
    return Result(losses=losses, models=models, optimizers=optimizers)


def diloco(
    model: nn.Module,
    batches: Sequence[Sequence[Batch]],
    num_nodes: int,
    average: Averaging,
    *,
    H: int,
    inner: OptimizerSpec,
    outer: OptimizerSpec = (torch.optim.SGD, {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
) -> Result:
    models = common.copy_model(model, num_nodes)
    optimizers = common.make_optimizers(models, inner)
    losses = common.empty_losses(model, len(batches), num_nodes)
    thetas = [common.parameters(model_i) for model_i in models]
    theta_outer = {name: theta.detach().clone() for name, theta in thetas[0].items()}
    outer_optimizer = common.make_optimizer(list(theta_outer.values()), outer)
    for step in range(len(batches)):
        for node in range(num_nodes):
            losses[step, node] = common.backward(models[node], batches[step][node])
            optimizers[node].step()
        if (step + 1) % H == 0:
            for name, outer_param in theta_outer.items():
                outer_param.grad = average(step, name, [outer_param - theta[name].detach() for theta in thetas])
            outer_optimizer.step()
            assign(thetas, theta_outer)
    return Result(losses=losses, models=models, optimizers=optimizers, outer=theta_outer)


def fedavg(
    model: nn.Module,
    batches: Sequence[Sequence[Batch]],
    num_nodes: int,
    average: Averaging,
    *,
    H: int,
    inner: OptimizerSpec,
) -> Result:
    models = common.copy_model(model, num_nodes)
    optimizers = common.make_optimizers(models, inner)
    losses = common.empty_losses(model, len(batches), num_nodes)
    thetas = [common.parameters(model_i) for model_i in models]
    reference = {name: theta.detach().clone() for name, theta in thetas[0].items()}
    for step in range(len(batches)):
        for node in range(num_nodes):
            losses[step, node] = common.backward(models[node], batches[step][node])
            optimizers[node].step()
        if (step + 1) % H == 0:
            for name, r in reference.items():
                reference[name] = r + average(step, name, [theta[name].detach() - r for theta in thetas])
            assign(thetas, reference)
    return Result(losses=losses, models=models, optimizers=optimizers, outer=reference)


@torch.no_grad()
def assign(thetas: Sequence[dict[str, nn.Parameter]], values: dict[str, Tensor]) -> None:
    for theta in thetas:
        for name, value in values.items():
            theta[name].copy_(value)


# ------------------------------------------------------------------------------------------- sparse averaging


def topk_sparse(
    model: nn.Module,
    batches: Sequence[Sequence[Batch]],
    num_nodes: int,
    *,
    fraction: float,
    inner: OptimizerSpec,
    codec: Codec | None = None,
) -> Result:
    """After every step each node sends the values that moved most; a value sent becomes the mean over its senders.

    for each node i:   I_i = the k largest |theta_i - last_i|
    for each coordinate c in any I_i:   theta_j[c] = last_j[c] = mean of theta_i[c] over the i with c in I_i, for all j
    """
    models = common.copy_model(model, num_nodes)
    optimizers = common.make_optimizers(models, inner)
    losses = common.empty_losses(model, len(batches), num_nodes)
    thetas = [common.parameters(model_i) for model_i in models]
    lasts = [{name: p.detach().clone() for name, p in theta.items()} for theta in thetas]
    for step in range(len(batches)):
        for node in range(num_nodes):
            losses[step, node] = common.backward(models[node], batches[step][node])
            optimizers[node].step()
        for name, first in thetas[0].items():
            n = first.numel()
            flats = [theta[name].detach().view(n) for theta in thetas]
            heard: list[list[Tensor]] = [[] for _ in range(n)]
            for node, flat in enumerate(flats):
                moved = (flat - lasts[node][name].view(n)).abs()
                sent = torch.argsort(moved, descending=True, stable=True)[: count(fraction, n)]
                values = flat[sent] if codec is None else codec(step, name, node, flat[sent])
                for c, value in zip(sent.tolist(), values):
                    heard[c].append(value)
            for c, values_of_c in enumerate(heard):
                if values_of_c:
                    for flat, last in zip(flats, lasts):
                        flat[c] = last[name].view(n)[c] = common.mean(values_of_c)
    return Result(losses=losses, models=models, optimizers=optimizers, residuals=lasts)
