"""What an inner optimizer keeps in the shape of the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vecgym.core.tree import Tree


def moments_in(optimizer: Mapping[str, Any], params: Tree) -> dict[str, Tree]:
    """Return what an inner optimizer keeps in the shape of the parameters, by slot.

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
        for slot, values in optimizer.get("tensors", optimizer).items()  # some rules keep what is no tensor apart
        if isinstance(values, dict)
    }
    return {slot: values for slot, values in slots.items() if values}


def with_moment(optimizer: Mapping[str, Any], slot: str, new: Tree) -> dict[str, Any]:
    """Return an inner optimizer's state with new values in a slot.

    >>> import torch
    >>> with_moment({"exp_avg": {"w": torch.zeros(1)}}, "exp_avg", {"w": torch.ones(1)})
    {'exp_avg': {'w': tensor([1.])}}
    """
    held = optimizer.get("tensors", optimizer)
    changed = {**held, slot: {**held[slot], **new}}
    return {**optimizer, "tensors": changed} if "tensors" in optimizer else changed
