"""The inner optimizer's moments, exchanged as parameters are: Local Adam, DES-LOC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vecgym.core import check
from vecgym.strategy.base import CommunicationModule, Context, Slots, State, check_interval


class Moments(CommunicationModule):
    """Average what the nodes' inner optimizers keep: m_k <- (1/K) sum_j m_j after every H-th step.

    Beside `AveragingCommunicator(H=Hx)`, `Moments(H=Hx)` makes Local Adam, and one for each moment with a period of its
    own makes DES-LOC: `Moments("exp_avg", H=Hu)` and `Moments("exp_avg_sq", H=Hv)`. The step count by which
    Adam corrects its bias is not exchanged.

    State: none. Bytes: as an average of a parameter, for each tensor that is averaged.

    Args:
        slots: which ones, by torch's names ("exp_avg", "exp_avg_sq", "momentum_buffer"): one, or a list; None: all.
        H: optimizer steps between two averages.

    Raises:
        ValueError: for H < 1; at the first step, for a slot that the inner optimizer does not have.

    References: Local Adam, Cheng and Glasgow, "Convergence of Distributed Adaptive Optimization with Local Updates",
    arXiv 2409.13155; Iacob et al., "DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation
    Models", arXiv 2505.22549. Theirs average momentum and parameters after the same local step, as here; DES-LOC clips
    the gradients of each coordinate, here `max_norm` clips those of a node.

    >>> from vecgym.strategy import AveragingCommunicator, CommunicateOptimizeStrategy
    >>> CommunicateOptimizeStrategy([AveragingCommunicator(H=8), Moments("exp_avg", H=24)], "adamw", lr=1e-3)
    CommunicateOptimizeStrategy(OptimSpec(AdamW, lr=0.001), AveragingCommunicator(island_size=None, H=8, \
participation=1.0, weighting='equal'), Moments(slots=('exp_avg',), H=24))
    """

    def __init__(self, slots: str | Sequence[str] | None = None, H: int = 1) -> None:
        names = [slots] if isinstance(slots, str) else slots
        if names is not None and not (isinstance(names, (list, tuple)) and names and all(map(_is_text, names))):
            raise TypeError(f'slots={slots!r} must be a name such as "exp_avg", a list of names, or None: all.')
        self.slots = None if names is None else tuple(names)
        self.H = check_interval("H", H)

    def exchange_moments(self, moments: Slots, state: State, ctx: Context) -> tuple[Slots, State]:
        chosen = tuple(moments) if self.slots is None else self.slots
        if not chosen:
            raise ValueError(
                f"{self!r} averages what the inner optimizer keeps, and it keeps nothing: give one with moments, such "
                "as AdamW or SGD with momentum, or leave this module out."
            )
        for slot in chosen:
            check.choice("slots", slot, list(moments))
        if (ctx.step + 1) % self.H != 0:
            return moments, state
        return {**moments, **{slot: ctx.comm.mean(moments[slot]) for slot in chosen}}, state


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
