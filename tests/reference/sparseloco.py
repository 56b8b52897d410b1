"""SparseLoCo, in plain loops (Sarfi et al., arXiv 2508.15706, algorithm 1).

for round t:
    each node i: H inner steps from theta, to theta_i
        Delta_i = theta - theta_i
        e_i = beta e_i + Delta_i
        D_i = Q(TopK(e_i))                            the k largest of each chunk; their bins' means
        e_i = e_i - D_i
    theta = theta - alpha / K sum_i D_i               or, at each coordinate, over the number of those who sent it
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.reference import common
from tests.reference.common import Batch, OptimizerSpec, Result
from tests.reference.compression import assign, largest_divisor, statistical


def places(p: Tensor, k: int, chunk: int) -> list[int]:
    """The places of the k largest values of each chunk, chunk by chunk, as flat indices of the tensor."""
    matrix = p.reshape(p.shape[0], -1) if p.dim() > 1 else p.reshape(1, -1)
    height = largest_divisor(matrix.shape[0], chunk)
    width = largest_divisor(matrix.shape[1], chunk if p.dim() > 1 else chunk**2)
    found = []
    for top in range(0, matrix.shape[0], height):
        for left in range(0, matrix.shape[1], width):
            part = matrix[top : top + height, left : left + width].abs().flatten()
            for place in torch.argsort(part, descending=True, stable=True)[:k].tolist():
                found.append((top + place // width) * matrix.shape[1] + left + place % width)
    return found


def payload(shape: Sequence[int], k: int, chunk: int, bits: int | None, value_bytes: int) -> int:
    """The bytes of one tensor of one node."""
    rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
    height, width = largest_divisor(rows, chunk), largest_divisor(columns, chunk if len(shape) > 1 else chunk**2)
    area = height * width
    sent = rows * columns // area * min(k, area)
    values = sent * value_bytes if bits is None else math.ceil(sent * bits / 8) + 4 * 2**bits
    return values + math.ceil(sent * max(1, math.ceil(math.log2(area))) / 8)


def sparseloco(
    model: nn.Module,
    batches: Sequence[Sequence[Batch]],
    num_nodes: int,
    *,
    H: int,
    k: int,
    chunk: int,
    inner: OptimizerSpec,
    bits: int | None = 2,
    beta: float = 0.95,
    alpha: float = 1.0,
    senders: bool = False,
) -> Result:
    models = common.copy_model(model, num_nodes)
    optimizers = common.make_optimizers(models, inner)
    losses = common.empty_losses(model, len(batches), num_nodes)
    thetas = [common.parameters(model_i) for model_i in models]
    theta_outer = {name: theta.detach().clone() for name, theta in thetas[0].items()}
    residuals = [{name: torch.zeros_like(p) for name, p in theta_outer.items()} for _ in models]
    for step in range(len(batches)):
        for node in range(num_nodes):
            losses[step, node] = common.backward(models[node], batches[step][node])
            optimizers[node].step()
        if (step + 1) % H:
            continue
        for name, outer in theta_outer.items():
            total, number = torch.zeros_like(outer).flatten(), torch.zeros_like(outer).flatten()
            for node, theta in enumerate(thetas):
                e = beta * residuals[node][name] + (outer - theta[name].detach())
                where = places(e, k, chunk)
                sent = e.flatten()[where]
                if bits is not None:
                    sent = statistical(bits)(step, name, node, sent)
                D = torch.zeros_like(e).flatten()
                D[where] = sent
                residuals[node][name] = e - D.view(e.shape)
                total += D
                number[where] += 1
            mean = total / number.clamp(min=1) if senders else total / num_nodes
            theta_outer[name] = outer - alpha * mean.view(outer.shape)
        assign(thetas, theta_outer)
    return Result(losses=losses, models=models, optimizers=optimizers, outer=theta_outer, residuals=residuals)
