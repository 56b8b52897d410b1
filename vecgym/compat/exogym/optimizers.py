"""Optimizers, under the several names that EXO Gym's scripts and documents use."""

from __future__ import annotations

from typing import Any

import torch

from vecgym import optim as vecgym_optim

Spec = vecgym_optim.OptimSpec
AnySpec = str | Spec | type[torch.optim.Optimizer] | None


class OptimSpec(Spec):
    """`vecgym.OptimSpec`, with `cls` as the name of its first argument."""

    def __init__(self, cls: str | type[torch.optim.Optimizer] = torch.optim.AdamW, **kwargs: Any) -> None:
        super().__init__(cls, **kwargs)


def ensure_optim_spec(optim: AnySpec, default: Spec | None = None, **kwargs: Any) -> Spec:
    """Make an `OptimSpec` of a name, a spec, a class or None; `kwargs` override what a spec has."""
    if optim is None:
        return Spec(torch.optim.AdamW, **kwargs) if default is None else default
    if isinstance(optim, Spec):
        return optim.replace(**kwargs) if kwargs else optim
    return vecgym_optim.ensure_optim_spec(optim, **kwargs)


def inner_spec(whose: str, optim_spec: AnySpec, options: dict[str, Any]) -> Spec:
    """Return the inner optimizer asked for, under whichever of its names, and take these out of `options`."""
    others = taken(options, "inner_optim", "inner_optim_spec")
    rates = taken(options, "lr", "inner_lr")
    given = [x for x in (optim_spec, *others.values()) if x is not None]
    if len(given) > 1 or len(rates) > 1:
        raise TypeError(f"{whose} got its inner optimizer or learning rate twice: {given}, {rates}.")
    asked, lr = ensure_optim_spec(given[0] if given else None), next(iter(rates.values()), None)
    return asked if lr is None else asked.replace(lr=lr)


def taken(options: dict[str, Any], *names: str) -> dict[str, Any]:
    """Remove the named options, and return them."""
    return {name: options.pop(name) for name in names if name in options}
