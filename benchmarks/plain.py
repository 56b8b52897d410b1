"""The baselines: what a careful user would write without vecgym. Nothing here imports it."""

from __future__ import annotations

import math
import os
import sys

import torch
from torch import Tensor
from turns import serve
from workloads import WORKLOADS, Batch, Workload

LR = 1e-3


class Loop:
    """DiLoCo over K plain modules, each with fused AdamW, one after the other.

    Every H steps comes the outer step in the obvious way: the mean over the modules, torch's SGD with Nesterov
    momentum, and a copy back.
    """

    def __init__(self, workload: Workload, num_nodes: int, H: int, device: str = "cpu") -> None:
        self.models = [workload.model().to(device) for _ in range(num_nodes)]
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=LR, fused=True) for model in self.models]
        self.outer = list(workload.model().to(device).parameters())
        self.outer_optimizer = torch.optim.SGD(self.outer, lr=0.7, momentum=0.9, nesterov=True)
        self.H = H
        self.step = 0

    def __call__(self, batch: Batch) -> None:
        for model, optimizer, x, y in zip(self.models, self.optimizers, *batch):
            model((x, y)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        if self.step % self.H == 0:
            self.synchronize()

    @torch.no_grad()
    def synchronize(self) -> None:
        for outer, *inner in zip(self.outer, *[model.parameters() for model in self.models]):
            outer.grad = outer - torch.stack(inner).mean(0)
        self.outer_optimizer.step()
        for outer, *inner in zip(self.outer, *[model.parameters() for model in self.models]):
            for p in inner:
                p.copy_(outer)


class Big:
    """One plain module on the batches of all nodes together: the same as AllReduce, without nodes."""

    def __init__(self, workload: Workload, device: str = "cpu") -> None:
        self.model = workload.model().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=True)

    def __call__(self, batch: Batch) -> None:
        x, y = batch
        self.model((x.flatten(0, 1), y.flatten(0, 1))).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class DeMo:
    """DeMo's exchange, node after node and parameter after parameter: 2-D transforms by matrix products.

    `python benchmarks/plain.py WORKLOAD K` serves exchanges of the same random gradients.
    """

    def __init__(self, workload: Workload, num_nodes: int) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = {name: p.shape for name, p in workload.model().named_parameters()}
        self.cuts = {name: cut(shape) for name, shape in shapes.items()}
        self.residuals = [{name: torch.zeros(shape) for name, shape in shapes.items()} for _ in range(num_nodes)]
        self.gradients = [
            {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for _ in range(num_nodes)
        ]
        self.bases = {n: cosines(n) for _, _, *sides in self.cuts.values() for n in sides}
        self.signs: dict[str, Tensor] = {}  # of what all nodes have sent, the last time

    @torch.no_grad()
    def __call__(self) -> None:
        total = {name: torch.zeros(rows * columns, h * w) for name, (rows, columns, h, w) in self.cuts.items()}
        count = {name: torch.zeros_like(x) for name, x in total.items()}
        for residual, gradient in zip(self.residuals, self.gradients):
            for name, (rows, columns, h, w) in self.cuts.items():
                delta = residual[name].mul_(0.999).add_(gradient[name], alpha=LR)
                chunks = delta.reshape(rows, h, columns, w).transpose(1, 2).reshape(-1, h, w)
                coefficients = (self.bases[h] @ chunks @ self.bases[w].T).flatten(1)
                indices = coefficients.abs().topk(min(32, h * w)).indices
                values = coefficients.gather(1, indices)
                delta.sub_(self._decoded(name, torch.zeros_like(coefficients).scatter_(1, indices, values)))
                total[name].scatter_add_(1, indices, values)
                count[name].scatter_add_(1, indices, torch.ones_like(values))
        self.signs = {name: self._decoded(name, x / count[name].clamp(min=1)).sign_() for name, x in total.items()}

    def _decoded(self, name: str, coefficients: Tensor) -> Tensor:
        rows, columns, h, w = self.cuts[name]
        chunks = self.bases[h].T @ coefficients.view(-1, h, w) @ self.bases[w]
        return chunks.view(rows, columns, h, w).transpose(1, 2).reshape(self.residuals[0][name].shape)


def cut(shape: torch.Size, limit: int = 64) -> tuple[int, int, int, int]:
    """Return rows and columns of chunks, and the height and width of each: the largest divisors up to the limit."""
    sides = (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))
    height, width = (max(d for d in range(1, min(n, limit) + 1) if n % d == 0) for n in sides)
    return sides[0] // height, sides[1] // width, height, width


def cosines(n: int) -> Tensor:
    """Return the orthonormal cosine basis, a vector in each row, `[n, n]`."""
    k = torch.arange(n, dtype=torch.float64)
    basis = torch.cos(math.pi / n * k[:, None] * (k + 0.5)) * math.sqrt(2 / n)
    basis[0] = math.sqrt(1 / n)
    return basis.float()


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    serve(DeMo(WORKLOADS[sys.argv[1]], int(sys.argv[2])))
