"""The moments of an optimizer: all that it keeps in the shape of the parameters, by slot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vecgym.core import check
from vecgym.core.tree import Tree


def moments_in(optimizer: Mapping[str, Any], params: Tree) -> dict[str, Tree]:
    """Return all that an optimizer keeps in the shape of the parameters, by slot.

    >>> import torch
    >>> from vecgym.optim import OptimSpec
    >>> params = {"w": torch.zeros(1, 3)}
    >>> sorted(moments_in(OptimSpec("adamw").rule().init(params), params))
    ['exp_avg', 'exp_avg_sq']
    """
    slots = {
        slot: {
            name: x
            for name, x in values.items()
            if name in params and x.is_floating_point() and x.shape[1:] == params[name].shape[1:]  # and no counts
        }
        for slot, values in optimizer.get("tensors", optimizer).items()  # some rules keep numbers apart
        if isinstance(values, dict)
    }
    return {slot: values for slot, values in slots.items() if values}


def moments_of(slots: Any, optimizer: Mapping[str, Any], params: Tree, who: object) -> dict[str, Tree]:
    """Return the moments by slot, if there are any, and some in each of the given slots.

    Args:
        slots: a tuple of names, or anything else for all.
        optimizer: its state.
        params: parameters, of the same shapes.
        who: the object that needs the moments, for messages.

    Raises:
        ValueError: if the optimizer keeps no moments, or not the given ones.

    >>> moments_of(("exp_avg",), {}, {}, "Exchange(Mean(), of='exp_avg')")
    Traceback (most recent call last):
    ...
    ValueError: "Exchange(Mean(), of='exp_avg')" averages moments of the inner optimizer, which keeps none: give \
one with moments, such as AdamW or SGD with momentum, or leave this exchange out.
    """
    moments = moments_in(optimizer, params)
    if not moments:
        raise ValueError(
            f"{who!r} averages moments of the inner optimizer, which keeps none: give one with moments, such as "
            "AdamW or SGD with momentum, or leave this exchange out."
        )
    for slot in slots if isinstance(slots, tuple) else ():
        check.choice("of", slot, list(moments))
    return moments


def with_moment(optimizer: Mapping[str, Any], slot: str, new: Tree) -> dict[str, Any]:
    """Return an optimizer's state with new values in a slot.

    >>> import torch
    >>> with_moment({"exp_avg": {"w": torch.zeros(1)}}, "exp_avg", {"w": torch.ones(1)})
    {'exp_avg': {'w': tensor([1.])}}
    """
    held = optimizer.get("tensors", optimizer)
    changed = {**held, slot: {**held[slot], **new}}
    return {**optimizer, "tensors": changed} if "tensors" in optimizer else changed
