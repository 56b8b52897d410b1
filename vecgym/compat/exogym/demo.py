"""DeMo written for one rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from vecgym.compat.exogym.base import OptimizingStrategy
from vecgym.compat.exogym.optimizers import AnySpec, Spec
from vecgym.compat.exogym.options import Chunk, MaxNorm, NotNegative, Part, TopK, checked
from vecgym.compress.dct import dct, from_chunks, grid, inverse_dct, mean_of_senders, strongest, to_chunks
from vecgym.strategy.per_rank import all_gather


class DeMoStrategy(OptimizingStrategy):
    """The k strongest cosine components of a local momentum, every step; the sign of their mean is the update.

    The learning rate is that of `optim_spec`, and `max_norm` clips each node's gradient; EXO Gym reads neither, and
    takes 0.001.
    """

    @checked
    def __init__(
        self,
        compression_decay: Part = 0.999,
        compression_topk: TopK = 32,
        compression_chunk: Chunk = 64,
        weight_decay: NotNegative = 0.0,
        optim_spec: AnySpec = None,
        max_norm: MaxNorm = None,
        **options: Any,
    ) -> None:
        self.compression_decay = compression_decay
        self.compression_topk = compression_topk
        self.compression_chunk = compression_chunk
        self.weight_decay = weight_decay
        super().__init__(optim_spec, max_norm, **options)

    @property
    def lr(self) -> Any:
        """The learning rate."""
        return self.optim_spec.lr

    def _inner_spec(self) -> Spec:
        return Spec(torch.optim.SGD, lr=self.lr, weight_decay=self.weight_decay)

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        super()._init_node(model, rank, num_nodes)
        self._residuals: dict[str, Tensor] = {}  # cosine components, [1, chunks, area]

    @torch.no_grad()
    def step(self) -> None:
        if self.max_norm:
            clip_grad_norm_(self.model.parameters(), self.max_norm)
        lr = self.optim.param_groups[0]["lr"]
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                gradient = torch.zeros_like(p) if p.grad is None else p.grad
                p.grad = self._exchanged(name, lr * gradient).sign_()
        self.optim.step()
        super().step()

    def _exchanged(self, name: str, x: Tensor) -> Tensor:
        """Accumulate x, send the strongest components and keep the others; return the mean over their senders."""
        cut = grid(tuple(x.shape), self.compression_chunk)
        components = dct(to_chunks(x[None], cut)).flatten(2)
        if name in self._residuals:
            components += self.compression_decay * self._residuals[name]
        index = strongest(components, self.compression_topk)
        value = components.gather(-1, index)
        self._residuals[name] = components.scatter(-1, index, 0.0)
        indices, values = (all_gather(sent[0])[None] for sent in (index, value))  # [1, K, chunks, k]
        mean = mean_of_senders(indices, values, cut.area).unflatten(-1, (cut.height, cut.width))
        return from_chunks(inverse_dct(mean), cut, x.shape)[0]
