"""AllReduce: what torch's DistributedDataParallel does (Li et al., arXiv 2006.15704)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vecgym.optim import OptimSpec
from vecgym.strategy.averages import Mean
from vecgym.strategy.base import Strategy
from vecgym.strategy.exchange import Exchange
from vecgym.strategy.settings import InnerOptions, takes_options

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AllReduceStrategy(Strategy):
    """Every step, every node takes the optimizer step of the mean gradient.

    g = 1/K sum_i g_i; clip g to `max_norm`; theta <- optimizer(theta, g).

    Parameters and optimizer state stay the same on every node: they are stored once, and one gradient of the mean loss
    is computed instead of K. Equals training one model on the K batches together (without batch norm, whose statistics
    are each node's own, as with DDP). Bytes sent per node and step: 2 (K - 1) / K * b * P.

    Args:
        inner_optim: the optimizer, AdamW when not given.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: see `Strategy`.

    >>> AllReduceStrategy("sgd", lr=0.1)
    AllReduceStrategy(OptimSpec(SGD, lr=0.1), Exchange(Mean(), of='gradients'))

    Reference: Li et al., "PyTorch Distributed", arXiv 2006.15704. Deviation: buffers are never broadcast, each
    node keeps its own batch-norm statistics; `fit` averages them at the end.
    """

    @takes_options(InnerOptions)
    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        **inner: Unpack[InnerOptions],
    ) -> None:
        super().__init__(inner_optim, [Exchange(Mean(), of="gradients")], **inner)


SimpleReduceStrategy = AllReduceStrategy  # EXO Gym's other name for it
