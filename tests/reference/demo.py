"""DeMo: exchange only the strongest DCT components of a local momentum (arXiv 2411.19870, algorithm 1).

    for each step t, each parameter theta
        theta = theta (1 - lr weight_decay)
        for each node i:
            delta_i = decay delta_i + lr g_i
            q_i = the k largest components, by magnitude, of each chunk of DCT(delta_i)
            delta_i = delta_i - inverse DCT(q_i)
        Q = for each component the mean of q_i over the nodes i that sent it (0 if none did)
        theta = theta - lr sign(inverse DCT(Q))

As in the authors' code (github: bloc97/DeMo): lr multiplies the gradient as well as the sign; the DCT is
the orthonormal DCT-II; each dimension is cut into chunks of its largest divisor <= `chunk`; the mean is over
the senders of a component, not over all K nodes. Nothing is said there about tensors of more than two
dimensions, which fail: here they are folded as [shape[0], product of the rest]; a scalar is a vector of one.
Among components of equal magnitude the first ones (in row-major order) are sent.

The transform is computed from the definition, chunk by chunk:
    X_k = s_k sum_n x_n cos(pi (n + 1/2) k / N),   s_0 = sqrt(1/N),   s_k = sqrt(2/N) for k > 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tests.reference import common
from tests.reference.common import Batch, Result, Schedule

Chunk = tuple[slice, ...]  # which rows (and columns) of the folded tensor


@functools.cache
def basis(N: int) -> Tensor:
    """C[k, n] = s_k cos(pi (n + 1/2) k / N): one orthonormal basis vector per row, [N, N].

    The cosine of an odd multiple of pi / 2 is 0; math.cos, given a rounded angle, says 6e-17, and the sign of what
    is decoded there would be that of the rounding.
    """
    C = torch.zeros(N, N, dtype=torch.float64)
    for k in range(N):
        scale = math.sqrt(1 / N) if k == 0 else math.sqrt(2 / N)
        for n in range(N):
            quarters, rest = divmod((2 * n + 1) * k, N)  # of a turn
            zero = rest == 0 and quarters % 2 == 1
            C[k, n] = 0.0 if zero else scale * math.cos(math.pi * (n + 0.5) * k / N)
    return C


def dct(x: Tensor) -> Tensor:
    """X_k = sum_n C[k, n] x_n along every dimension of a vector or matrix x."""
    if x.dim() == 1:
        return basis(len(x)).to(x.dtype) @ x
    rows, columns = x.shape
    return basis(rows).to(x.dtype) @ x @ basis(columns).to(x.dtype).T


def inverse_dct(X: Tensor) -> Tensor:
    """x_n = sum_k C[k, n] X_k along every dimension of a vector or matrix X."""
    if X.dim() == 1:
        return basis(len(X)).to(X.dtype).T @ X
    rows, columns = X.shape
    return basis(rows).to(X.dtype).T @ X @ basis(columns).to(X.dtype)


Transform = Callable[[Tensor], Tensor]
EXACT: tuple[Transform, Transform] = (dct, inverse_dct)


def fold(shape: torch.Size) -> list[int]:
    """The one or two dimensions in which a tensor of this shape is transformed."""
    if len(shape) == 0:
        return [1]
    if len(shape) == 1:
        return [shape[0]]
    return [shape[0], math.prod(shape[1:])]


def chunk_size(n: int, chunk: int) -> int:
    """The largest divisor of n that is at most `chunk`."""
    return max(d for d in range(1, min(n, chunk) + 1) if n % d == 0)


def make_chunks(shape: Sequence[int], chunk: int) -> list[Chunk]:
    """The pieces that a folded tensor is cut into."""
    if len(shape) == 1:
        h = chunk_size(shape[0], chunk)
        return [(slice(row, row + h),) for row in range(0, shape[0], h)]
    h, w = chunk_size(shape[0], chunk), chunk_size(shape[1], chunk)
    return [
        (slice(row, row + h), slice(column, column + w))
        for row in range(0, shape[0], h)
        for column in range(0, shape[1], w)
    ]


def strongest(X: Tensor, k: int) -> Tensor:
    """A mask of the k entries of largest magnitude (all, if there are fewer)."""
    order = torch.argsort(X.abs().flatten(), descending=True, stable=True)
    chosen = torch.zeros(X.numel(), dtype=torch.bool)
    chosen[order[:k]] = True
    return chosen.view(X.shape)


@torch.no_grad()
def demo(
    model: nn.Module,
    batches: Sequence[Sequence[Batch]],
    num_nodes: int,
    *,
    lr: float = 1e-3,
    decay: float = 0.999,
    k: int = 32,
    chunk: int = 64,
    weight_decay: float = 0.0,
    max_norm: float | None = None,
    schedule: Schedule | None = None,
    transforms: tuple[Transform, Transform] = EXACT,
) -> Result:
    forward, backward = transforms
    models = common.copy_model(model, num_nodes)
    losses = common.empty_losses(model, len(batches), num_nodes)
    thetas = [common.parameters(model_i) for model_i in models]
    residuals = [
        {name: torch.zeros(param.shape, dtype=param.dtype) for name, param in theta.items()} for theta in thetas
    ]

    for step in range(len(batches)):
        rate = lr if schedule is None else lr * schedule(step)

        for node in range(num_nodes):
            with torch.enable_grad():
                losses[step, node] = common.backward(models[node], batches[step][node])
            common.clip(models[node], max_norm)

        for name, first in thetas[0].items():
            shape = fold(first.shape)
            params = [theta[name] for theta in thetas]
            deltas = [residual[name] for residual in residuals]

            for param, delta in zip(params, deltas):
                param.mul_(1 - rate * weight_decay)
                delta.mul_(decay).add_(rate * common.gradient(param))

            decoded = torch.zeros(shape, dtype=first.dtype)
            for piece in make_chunks(shape, chunk):
                total = torch.zeros_like(decoded[piece])  # sum of the components sent
                senders = torch.zeros_like(decoded[piece])  # how many nodes sent each
                for delta in deltas:
                    X = forward(delta.view(shape)[piece])
                    sent = strongest(X, k)
                    q = torch.where(sent, X, 0.0)
                    delta.view(shape)[piece] -= backward(q)
                    total += q
                    senders += sent
                Q = total / senders.clamp(min=1)
                decoded[piece] = backward(Q)

            for param in params:
                param.sub_(rate * decoded.sign().view(first.shape))

    return Result(losses=losses, models=models, residuals=residuals)
