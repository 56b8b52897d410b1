"""AllReduce: what torch's DistributedDataParallel does (Li et al., arXiv 2006.15704)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vecgym.optim import OptimSpec
from vecgym.strategy.average import Mean
from vecgym.strategy.base import Strategy
from vecgym.strategy.inner import InnerOptions, takes_options
from vecgym.strategy.modules import Gradients

if TYPE_CHECKING:
    from typing_extensions import Unpack


class GradientAveraging(Gradients):
    """Average the gradients over all nodes: g <- 1/K sum_i g_i, `[L, *] -> [1, *]`.

    Since parameters and optimizer state then stay the same on every node, they are stored once, and one
    gradient of the mean loss is computed instead of K.

    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.strategy import Context
    >>> GradientAveraging().exchange_gradients({"w": torch.tensor([1.0, 3.0])}, {}, Context(StackedCollectives(2)))[0]
    {'w': tensor([2.])}
    """

    def __init__(self) -> None:
        super().__init__(Mean())


class AllReduceStrategy(Strategy):
    """Every step, every node takes the optimizer step of the mean gradient.

    g = 1/K sum_i g_i; clip g to `max_norm`; theta <- optimizer(theta, g).

    Equals training one model on the K batches together (without batch norm, whose statistics are each
    node's own, as with DDP). Bytes sent per node and step: 2 (K - 1) / K * b * P.

    Args:
        inner_optim: the optimizer, AdamW when not given.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: see `Strategy`.

    >>> AllReduceStrategy("sgd", lr=0.1)
    AllReduceStrategy(OptimSpec(SGD, lr=0.1), GradientAveraging())

    Reference: Li et al., "PyTorch Distributed", arXiv 2006.15704. Deviation: buffers are never broadcast, each
    node keeps its own batch-norm statistics; `fit` averages them at the end.
    """

    @takes_options(InnerOptions)
    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        **inner: Unpack[InnerOptions],
    ) -> None:
        super().__init__(inner_optim, communication_modules=[GradientAveraging()], **inner)


SimpleReduceStrategy = AllReduceStrategy  # EXO Gym's other name for it
