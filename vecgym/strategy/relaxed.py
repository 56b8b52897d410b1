"""When nodes exchange: every H steps, or as much as a schedule of weights says, which can be differentiated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vecgym.core.tree import Tree, differentiated
from vecgym.strategy.base import Context, State

Exchange = Callable[[Tree, State, Context], tuple[Tree, State]]


class SyncWeight:
    """How much the nodes exchange after each step: a_t in [0, 1], t = 0, 1, ... T - 1.

    (params, state) <- (1 - a_t) (params, state) + a_t exchange(params, state),

    with everything that evolves, so that 0 is no exchange at all, and 1 the exchange. Weights that are all 0 or 1 and
    are not differentiated are a schedule like any other: where a_t = 0 nothing is sent. Between 0 and 1, and where
    derivatives are taken, the exchange is made at every step, and a step counter in the state counts a_t.

    Bytes: those of the exchange where a_t > 0; under differentiation a_t times these.

    Args:
        weights: `[T]`, one for each step of the run.

    Raises:
        TypeError, ValueError: for what is not a list of numbers in [0, 1]; at `check` unless there are T of them.

    >>> SyncWeight([0, 0, 1, 0, 0, 1])
    SyncWeight([0, 0, 1, 0, 0, 1])
    """

    def __init__(self, weights: Tensor | Sequence[float]) -> None:
        self.weights = _checked(weights)
        self.differentiated = differentiated(self.weights)
        self.binary = not self.differentiated and bool(((self.weights == 0) | (self.weights == 1)).all())

    def check(self, max_steps: int) -> None:
        """Raise a ValueError unless there is a weight for each step.

        >>> SyncWeight([0, 1]).check(max_steps=3)
        Traceback (most recent call last):
        ...
        ValueError: sync_weight has 2 weights and the run 3 steps: give one for each, or max_steps=2.
        """
        if len(self.weights) != max_steps:
            raise ValueError(
                f"sync_weight has {len(self.weights)} weights and the run {max_steps} steps: give one for each, "
                f"or max_steps={len(self.weights)}."
            )

    def exchange(self, exchange: Exchange, params: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        """The exchange of this step, made as far as the weight says.

        >>> from vecgym.collectives import StackedCollectives
        >>> def average(params, state, ctx):
        ...     return ctx.comm.mean(params), state
        >>> params, ctx = {"w": torch.tensor([0.0, 4.0])}, Context(StackedCollectives(2))
        >>> SyncWeight([0.5]).exchange(average, params, {}, ctx)[0]  # half of the way to the mean, 2
        {'w': tensor([1., 3.])}
        """
        weight = self.weights[ctx.step]
        if not self.differentiated:
            if weight == 0:
                return params, state
            if self.binary:
                return exchange(params, state, ctx)
        # A run that is not differentiated sends all of what it then uses in part.
        weight = weight if ctx.differentiable else weight.detach()
        with ctx.comm.ledger.weighted(weight if ctx.differentiable else 1.0):
            new, changed = exchange(params, state, replace(ctx, inplace=False))
        return _between(params, new, weight), _between(state, changed, weight)

    def __repr__(self) -> str:
        values = [round(float(w), 4) for w in self.weights.detach()]
        whole = [int(v) if v in (0.0, 1.0) else v for v in values]
        shown = ", ".join(map(str, whole if len(whole) <= 20 else whole[:20]))
        return f"SyncWeight([{shown}{'' if len(whole) <= 20 else f', ... {len(whole)} in all'}])"


def make_sync_weight(weights: Tensor | Sequence[float] | SyncWeight | None, H: int, default: int) -> SyncWeight | None:
    """The `SyncWeight` of a module's arguments; H must then be left at its default.

    >>> make_sync_weight([0, 1], H=5, default=1)
    Traceback (most recent call last):
    ...
    ValueError: H=5 and sync_weight both say when the nodes exchange: leave H out.
    """
    if weights is None:
        return None
    if default != H:
        raise ValueError(f"H={H} and sync_weight both say when the nodes exchange: leave H out.")
    return weights if isinstance(weights, SyncWeight) else SyncWeight(weights)


def _checked(weights: Any) -> Tensor:
    allowed = "sync_weight takes [T] numbers in [0, 1], one for each step, such as [0, 0, 0, 1] * 25"
    try:
        found = weights if isinstance(weights, Tensor) else torch.tensor(list(weights), dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{allowed}; not {weights!r}.") from None
    if found.dim() != 1 or len(found) == 0:
        raise ValueError(f"sync_weight has shape {list(found.shape)}; {allowed}.")
    if not found.is_floating_point():
        found = found.double()
    if found.device.type == "meta":
        raise ValueError(f"sync_weight is on the device meta, where tensors have no values; {allowed}.")
    bad = (~((found.detach() >= 0) & (found.detach() <= 1))).nonzero()  # nan too
    if len(bad):
        first = int(bad[0])
        raise ValueError(
            f"sync_weight[{first}] = {float(found[first].detach()):.6g}; {allowed}. "
            "Where a gradient step left the range, take sync_weight.clamp(0, 1), or sigmoid of what is optimised."
        )
    return found


def _between(old: Any, new: Any, weight: Tensor) -> Any:
    """(1 - a) old + a new, in every tensor of nested dicts; exactly old at 0 and new at 1."""
    if isinstance(new, dict):
        if not isinstance(old, dict) or old.keys() != new.keys():
            raise ValueError(
                "an exchange that adds to its state cannot be made in part, which sync_weight asks for: give weights "
                "that are 0 or 1 and do not require grad."
            )
        return {key: _between(old[key], new[key], weight) for key in new}
    if old is new:
        return old
    share = weight.to(new.device, new.dtype if new.is_floating_point() else torch.float64)
    return (1 - share) * old + share * new
