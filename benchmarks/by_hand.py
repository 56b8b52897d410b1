"""The limit of a sweep of tiny models: one loop of stacked tensor operations, with the backward pass written out.

Nothing here is a library. It trains what `sweep.py` sweeps, DiLoCo of a network with one hidden layer, and reads the
same examples in the same order, keeps every loss, looks for losses that are not finite in every step, and evaluates the
mean model and the nodes of each configuration where a sweep does.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from vecgym.data import Batches

ADAMW: dict[str, Any] = {
    "beta1": 0.9,
    "beta2": 0.999,
    "weight_decay": 0.01,
    "eps": 1e-8,
    "amsgrad": False,
    "maximize": False,
}
MOMENTUM = 0.9
VAL_INTERVAL = 100


class Sweep:
    """C configurations of K nodes; the parameters of a node are one row of `params`, `[C K, P]`."""

    def __init__(
        self, configs: Sequence[Mapping[str, Any]], model: nn.Module, train: TensorDataset, val: TensorDataset,
        num_nodes: int, batch_size: int,
    ) -> None:  # fmt: skip
        self.order = sorted(range(len(configs)), key=lambda c: (configs[c]["lr"], configs[c]["H"], configs[c]["seed"]))
        self.configs = [configs[c] for c in self.order]  # neighbours share an optimizer's call
        self.C, self.K, self.B, self.val = len(configs), num_nodes, batch_size, val
        initial = list(model.parameters())
        self.shapes = [p.shape for p in initial]
        self.params = torch.cat([p.detach().flatten() for p in initial]).expand(self.C * self.K, -1).clone()
        self.grads, self.exp_avg, self.exp_avg_sq = (torch.zeros_like(self.params) for _ in range(3))
        self.outer = self.params[:: self.K].clone()
        self.momentum = torch.zeros_like(self.outer)
        self.outer_lr = torch.tensor([config["outer_lr"] for config in self.configs])[:, None]
        self.calls: list[Any] = []  # an optimizer's rate, and its rows of parameters, gradients and moments
        row = 0
        for lr, group in itertools.groupby(config["lr"] for config in self.configs):
            rows = slice(row, row + len(list(group)) * self.K)
            self.calls.append((lr, [[x[rows]] for x in (self.params, self.grads, self.exp_avg, self.exp_avg_sq)]))
            row = rows.stop
        self.seeds = sorted({config["seed"] for config in configs})
        self.place = torch.tensor([self.seeds.index(config["seed"]) for config in self.configs])
        self.batches = [Batches(train, self.K, self.B, seed=seed) for seed in self.seeds]

    def split(self, rows: Tensor) -> list[Tensor]:
        """Show rows of parameters as the tensors of the network, `[rows, *]`."""
        sizes = [shape.numel() for shape in self.shapes]
        return [x.unflatten(1, tuple(shape)) for x, shape in zip(rows.split(sizes, 1), self.shapes)]

    @torch.no_grad()
    def train(self, num_steps: int) -> dict[int, float]:
        """Train; return the last validation loss of each configuration's mean model."""
        evaluated, losses = [self.evaluate()], torch.empty(num_steps, self.C * self.K)
        for step, batches in enumerate(zip(*[each.iterate(0, num_steps) for each in self.batches])):
            x, y = (torch.stack(each)[self.place].flatten(0, 1) for each in zip(*batches))
            losses[step] = self.gradients(x, y)
            count = [torch.tensor(step + 1.0)]
            for lr, tensors in self.calls:
                torch._fused_adamw_(*tensors, [], count, lr=lr, **ADAMW)  # type: ignore[call-overload]
            self.exchange([c for c, config in enumerate(self.configs) if (step + 1) % config["H"] == 0])
            losses[step].isfinite().all().item()
            if (step + 1) % VAL_INTERVAL == 0 or step + 1 == num_steps:
                evaluated.append(self.evaluate())
        return dict(zip(self.order, evaluated[-1]))

    def gradients(self, x: Tensor, y: Tensor) -> Tensor:
        """Write the gradients of all nodes; return their losses, `[C K]`."""
        weight, bias, head, head_bias = self.split(self.params)
        by_weight, by_bias, by_head, by_head_bias = self.split(self.grads)
        hidden = torch.baddbmm(bias[:, None], x, weight.mT).relu_()
        logits = torch.baddbmm(head_bias[:, None], hidden, head.mT)
        logs = logits.flatten(0, 1).T.contiguous().log_softmax(0)  # over a last dimension of 2 it is slow
        labels = y.flatten()[None]
        loss = logs.gather(0, labels).view(-1, self.B).mean(1).neg_()
        by_logits = logs.exp_().scatter_add_(0, labels, torch.full_like(logs[:1], -1.0)).div_(self.B)
        by_logits = by_logits.T.contiguous().view_as(logits)
        by_head.copy_(by_logits.mT @ hidden)
        torch.sum(by_logits, 1, out=by_head_bias)
        by_hidden = torch.ops.aten.threshold_backward(by_logits @ head, hidden, 0)
        by_weight.copy_(by_hidden.mT @ x)
        torch.sum(by_hidden, 1, out=by_bias)
        return loss

    def exchange(self, due: list[int]) -> None:
        """Let the outer optimizers of some configurations make a step: SGD with Nesterov's momentum."""
        if not due:
            return
        outer, nodes = self.outer[due], self.params.unflatten(0, (self.C, self.K))
        movement = outer - nodes[due].mean(1)
        self.momentum[due] = momentum = MOMENTUM * self.momentum[due] + movement
        self.outer[due] = outer = outer - self.outer_lr[due] * (movement + MOMENTUM * momentum)
        nodes[due] = outer[:, None]

    def evaluate(self) -> list[float]:
        """Return the validation losses of the mean models; the nodes' own, and their distances, are computed, too."""
        nodes = self.params.unflatten(0, (self.C, self.K))
        mean = nodes.mean(1)
        (nodes - mean[:, None]).square_().sum(2).mean(1).sqrt_().tolist()
        self.losses_of(self.params).tolist()
        found: list[float] = self.losses_of(mean).tolist()
        return found

    def losses_of(self, rows: Tensor) -> Tensor:
        """Return the validation loss of each row of parameters, `[rows]`."""
        x, y = self.val.tensors
        weight, bias, head, head_bias = self.split(rows)
        hidden = torch.baddbmm(bias[:, None], x.expand(len(rows), *x.shape), weight.mT).relu_()
        logs = torch.baddbmm(head_bias[:, None], hidden, head.mT).flatten(0, 1).T.contiguous().log_softmax(0)
        return -logs.gather(0, y.repeat(len(rows))[None]).view(len(rows), -1).mean(1)
