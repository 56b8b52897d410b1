"""The baselines: what a careful user would write without vecgym. Nothing here imports it."""

from __future__ import annotations

import torch
from workloads import Batch, Workload

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
