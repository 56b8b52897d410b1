"""The inner optimizer's moments, exchanged as parameters are: Local Adam, DES-LOC."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from vecgym.core import check, tree
from vecgym.core.tree import Tree
from vecgym.strategy.average import Average, Mean, check_average
from vecgym.strategy.communication import Context, Slots, State, counted
from vecgym.strategy.modules import Exchange
from vecgym.strategy.when import When, as_when


class Moments(Exchange):
    """Every so many steps: each node's inner optimizer goes on from the average of what the nodes' optimizers keep.

    m_i <- average(m_1, ..., m_K), for each slot m, such as AdamW's "exp_avg" and "exp_avg_sq".

    Beside `Parameters(every=Hx)`, `Moments(every=Hx)` makes Local Adam, and one for each moment with a period of its
    own makes DES-LOC: `Moments(slots="exp_avg", every=Hu)` and `Moments(slots="exp_avg_sq", every=Hv)`. The step count
    by which Adam corrects its bias is not exchanged.

    State: the average's, for each slot. Bytes: the average's, for each slot and exchange.

    Args:
        average: how the nodes agree; `Mean()` if not given.
        slots: which ones, by torch's names ("exp_avg", "exp_avg_sq", "momentum_buffer"): one, or a list; None: all.
        every: optimizer steps between two exchanges, or a `SyncWeight`: how far after each step.

    Raises:
        ValueError: for every < 1; before the first step, where the slots must be named since the average keeps
            something for each; at the first step, for a slot that the inner optimizer does not have.

    References: Local Adam, Cheng and Glasgow, "Convergence of Distributed Adaptive Optimization with Local Updates",
    arXiv 2409.13155; Iacob et al., "DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation
    Models", arXiv 2505.22549. Moments and parameters are averaged after the same local step, as there. DES-LOC clips
    each coordinate of a gradient, here `max_norm` clips a node's whole gradient.

    >>> from vecgym.strategy import CommunicateOptimizeStrategy, Parameters
    >>> modules = [Parameters(Mean(), every=8), Moments(slots="exp_avg", every=24)]
    >>> CommunicateOptimizeStrategy(modules, "adamw", lr=1e-3)
    CommunicateOptimizeStrategy(OptimSpec(AdamW, lr=0.001), Parameters(Mean(), every=8), \
Moments(average=Mean(), slots=('exp_avg',), every=24))
    """

    def __init__(
        self,
        average: Average | None = None,
        slots: str | Sequence[str] | None = None,
        every: int | When | Callable[[int], int] = 1,
    ) -> None:
        self.average = Mean() if average is None else check_average("average", average)
        self.slots = None if slots is None else _names(slots)
        self.when = as_when(every, "every")
        self.every = self.when if callable(every) else every

    def init(self, params: Tree, ctx: Context) -> State:
        zeros = tree.map(torch.zeros_like, params)  # as moments begin
        if self.slots is not None:
            return {slot: self.average.init(zeros, ctx) for slot in self.slots}
        if self.average.init(zeros, ctx):
            raise ValueError(f'{self!r} keeps something for each slot: name them, slots=["exp_avg", "exp_avg_sq"] say.')
        return {}

    def exchange_moments(self, moments: Slots, state: State, ctx: Context) -> tuple[Slots, State]:
        chosen = tuple(moments) if self.slots is None else self.slots
        if not chosen:
            raise ValueError(
                f"{self!r} averages what the inner optimizer keeps, and it keeps nothing: give one with moments, such "
                "as AdamW or SGD with momentum, or leave this module out."
            )
        ctx, new, changed = counted(self, ctx), dict(moments), dict(state)
        for slot in chosen:
            values = moments[check.choice("slots", slot, list(moments))]
            new[slot], kept = self.when.exchange(self.average, values, state.get(slot, {}), ctx)
            if self.slots is not None:
                changed[slot] = kept
        return new, changed


def _names(slots: str | Sequence[str]) -> tuple[str, ...]:
    names = (slots,) if isinstance(slots, str) else slots
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f'slots={slots!r} must be a name such as "exp_avg", a list of names, or None: all.')
    return tuple(names)
