"""DiLoCo: many local steps, then one step of an outer optimizer (Douillard et al., arXiv 2311.08105)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vecgym.compress import Compressor
from vecgym.optim import OptimSpec
from vecgym.strategy.averages import Average, Correction, Mean, Outer, outer_spec
from vecgym.strategy.base import Strategy
from vecgym.strategy.coded import Compressed
from vecgym.strategy.exchange import DEFAULT_H, Exchange
from vecgym.strategy.inner import InnerOptions, inner_rate, takes_options
from vecgym.strategy.when import SyncWeight, as_when, make_sync_weight

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
        average: how the nodes agree on their movements, such as `Robust("median")`; None: `Mean()`.
        compression: how each node sends its movement theta_outer - theta_i: "topk", "int8", "qsgd" and the
            others of `Compressed`, or a codec of `vecgym.compress` such as `TopK(0.05)`; with error feedback.
            None: as it is.
        correction: of the movements, before they are averaged: "heloco", "median_norm", or a function; see
            `Outer`. None: none.
        max_norm, lr_scheduler, warmup_steps, cosine_anneal: of the inner optimizer; see `Strategy`.

    >>> DiLoCoStrategy("adamw", "sgd", H=100, lr=3e-4)
    DiLoCoStrategy(OptimSpec(AdamW, lr=0.0003), \
Exchange(Outer(Mean()), every=100))

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
        average: Average | None = None,
        compression: str | Compressor | None = None,
        correction: str | Correction | None = None,
        **inner: Unpack[InnerOptions],
    ) -> None:
        inner["lr"] = inner_rate(inner.get("lr"), inner_lr)
        average = Mean() if average is None else average
        if compression is not None:
            average = Compressed(average, compression, purpose="compress parameters")
        weight = make_sync_weight(sync_weight, H, DEFAULT_H)
        outer = Outer(average, outer_spec(outer_optim, outer_lr), correct=correction)
        super().__init__(inner_optim, [Exchange(outer, every=as_when(H, "H") if weight is None else weight)], **inner)
