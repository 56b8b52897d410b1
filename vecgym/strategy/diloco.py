"""DiLoCo: many local steps, then one step of an outer optimizer (Douillard et al., arXiv 2311.08105)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vecgym.compress import Compressor
from vecgym.optim import OptimSpec
from vecgym.strategy.average import Mean
from vecgym.strategy.base import Strategy
from vecgym.strategy.compression import with_compression
from vecgym.strategy.corrections import CorrectedOuterStep, Correction
from vecgym.strategy.inner import InnerOptions, inner_rate, takes_options
from vecgym.strategy.modules import DEFAULT_H, outer_spec
from vecgym.strategy.when import RoundsOf, SyncWeight, make_sync_weight

if TYPE_CHECKING:
    from typing_extensions import Unpack


class DiLoCoCommunicator(CorrectedOuterStep):
    """Every H steps, the mean movement of the nodes is the gradient of an outer optimizer.

    Delta = mean_i(theta_outer - theta_i);  theta_outer <- outer(theta_outer, Delta);  theta_i <- theta_outer.

    State: `params` (theta_outer) and `optimizer` (the outer momentum), both `[1, *]`: stored once for all nodes.

    Args:
        outer_optim: "sgd" or `torch.optim.SGD` mean the paper's SGD(lr=0.7, momentum=0.9, nesterov=True); an
            `OptimSpec` is taken as it is; so is any other optimizer.
        H: inner steps between two outer steps: a number, or a function of the step at which a round begins.
        outer_lr: the outer learning rate.
        sync_weight: `[T]`, in place of H: how far the outer step is taken after each inner step; see `SyncWeight`.
        correction: of the movements, before they are averaged; see `CorrectedOuterStep`.

    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.strategy import Context
    >>> module, ctx = DiLoCoCommunicator(H=2), Context(StackedCollectives(2), step=1)
    >>> state = module.init({"w": torch.zeros(1)}, ctx)
    >>> params, state = module.exchange_parameters({"w": torch.tensor([1.0, 3.0])}, state, ctx)
    >>> params["w"]  # 0.7 (2 + 0.9 * 2), on both nodes
    tensor([2.6600])
    """

    shows_defaults = True

    def __init__(
        self,
        outer_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        H: int | Callable[[int], int] = DEFAULT_H,
        outer_lr: float | Tensor | None = None,
        sync_weight: Tensor | Sequence[float] | SyncWeight | None = None,
        correction: str | Correction | None = None,
    ) -> None:
        weight = make_sync_weight(sync_weight, H, DEFAULT_H)
        super().__init__(Mean(), outer_spec(outer_optim, outer_lr), H if weight is None else weight, correction)
        self.H = self.when if isinstance(self.when, RoundsOf) else self.when.H
        self.sync_weight = weight


class DiLoCoStrategy(Strategy):
    """H local steps on every node, then one step of an outer optimizer on their mean movement.

    theta_i <- inner(theta_i, g_i), H times; then Delta = mean_i(theta_outer - theta_i),
    theta_outer <- outer(theta_outer, Delta), theta_i <- theta_outer.

    With the paper's outer optimizer: m <- mu m + Delta; theta_outer <- theta_outer - eta (Delta + mu m). Inner
    optimizer state stays on its node and is kept across rounds. Bytes sent per node and step:
    2 (K - 1) / K * b * P / H.

    Args:
        inner_optim: the local optimizer, AdamW when not given.
        outer_optim: SGD(lr=0.7, momentum=0.9, nesterov=True) when not given, or given as "sgd".
        H: inner steps per round; the outer step follows every H-th optimizer step. A function of the step gives the
            steps of the round that begins there.
        sync_weight: `[T]`, in place of H: how far the outer step is taken after each inner step; see `SyncWeight`.
        lr, inner_lr: two names for the inner learning rate.
        outer_lr: the outer learning rate.
        compression: how each node sends its movement theta_outer - theta_i: "topk", "int8", "qsgd" and the
            others of `compressed`, or a codec of `vecgym.compress` such as `TopK(0.05)`; with error feedback.
            None: as it is.
        correction: of the movements, before they are averaged: "heloco", "median_norm", or a function; see
            `CorrectedOuterStep`. None: none.
        max_norm, lr_scheduler, warmup_steps, cosine_anneal: of the inner optimizer; see `Strategy`.

    >>> DiLoCoStrategy("adamw", "sgd", H=100, lr=3e-4)
    DiLoCoStrategy(OptimSpec(AdamW, lr=0.0003), \
DiLoCoCommunicator(outer_optim=OptimSpec(SGD, lr=0.7, momentum=0.9, nesterov=True), H=100))

    Reference: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv
    2311.08105. No deviation.
    """

    @takes_options(InnerOptions)
    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        outer_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        H: int | Callable[[int], int] = DEFAULT_H,
        *,
        sync_weight: Tensor | Sequence[float] | SyncWeight | None = None,
        inner_lr: float | Tensor | None = None,
        outer_lr: float | Tensor | None = None,
        compression: str | Compressor | None = None,
        correction: str | Correction | None = None,
        **inner: Unpack[InnerOptions],
    ) -> None:
        inner["lr"] = inner_rate(inner.get("lr"), inner_lr)
        module = DiLoCoCommunicator(outer_optim, H, outer_lr, sync_weight, correction)
        super().__init__(inner_optim, communication_modules=[with_compression(module, compression)], **inner)
