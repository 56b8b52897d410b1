"""The inner optimizer of a strategy: the arguments that all strategies share, and its step on the nodes that train."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar, cast

import torch
from torch import Tensor

from vecgym.core import check, nodes
from vecgym.core.tree import Tree, leaves
from vecgym.optim import OptimSpec, Rule
from vecgym.optim.schedule import Schedule
from vecgym.strategy.communication import Context, Slots, State

Constructor = TypeVar("Constructor", bound=Callable[..., None])


class StepOptions(TypedDict, total=False):
    """How the inner optimizer takes its steps; see `Strategy`."""

    max_norm: float | Tensor | None
    lr_scheduler: str | Schedule | None
    warmup_steps: int
    cosine_anneal: bool


class InnerOptions(StepOptions, total=False):
    """What all strategies take for their inner optimizer by keyword; see `Strategy`."""

    lr: float | Tensor | None


def takes_options(options: type) -> Callable[[Constructor], Constructor]:
    """Let a constructor take `**inner: Unpack[options]`, where `help` and editors see each option.

    >>> class Mine:
    ...     @takes_options(InnerOptions)
    ...     def __init__(self, H, **inner):
    ...         print(H, inner)
    >>> list(inspect.signature(Mine).parameters)
    ['H', 'lr', 'max_norm', 'lr_scheduler', 'warmup_steps', 'cosine_anneal']
    >>> Mine(3, warmup_step=5)
    Traceback (most recent call last):
    ...
    TypeError: Mine has no argument 'warmup_step'; did you mean 'warmup_steps'? It has: H, lr, max_norm, \
lr_scheduler, warmup_steps, cosine_anneal.
    """
    defaults = {"lr": None, "max_norm": None, "lr_scheduler": None, "warmup_steps": 0, "cosine_anneal": False}
    kinds = {name: kind.__forward_arg__ for name, kind in options.__annotations__.items()}
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kinds[name])
        for name, default in defaults.items()
        if name in kinds
    ]

    def decorate(init: Constructor) -> Constructor:
        given = inspect.signature(init)
        own = [p for p in given.parameters.values() if p.kind is not p.VAR_KEYWORD]
        names = [p.name for p in (*own[1:], *shared)]

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            check.keywords(type(self).__name__, kwargs, names)
            init(self, *args, **kwargs)

        checked.__signature__ = given.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
        return cast(Constructor, checked)

    return decorate


def inner_rate(lr: float | Tensor | None, inner_lr: float | Tensor | None) -> float | Tensor | None:
    """Return the inner learning rate of a strategy that takes it by two names.

    >>> inner_rate(None, 0.1)
    0.1
    >>> inner_rate(0.1, 0.1)
    Traceback (most recent call last):
    ...
    ValueError: lr and inner_lr are two names for the inner learning rate: give one of them.
    """
    if lr is not None and inner_lr is not None:
        raise ValueError("lr and inner_lr are two names for the inner learning rate: give one of them.")
    return lr if inner_lr is None else inner_lr


def optimizer_step(
    spec: OptimSpec, rule: Rule, step: int, params: Tree, grads: Tree, state: State, ctx: Context, lr: Any = None
) -> tuple[Tree, State]:
    """Take a step of an optimizer, `rule` of `spec`, on the nodes that train here, each with its own `[K]` values."""
    now = spec.at_each(ctx.by_count) if ctx.own_time else spec.at(step)
    everyone = ctx.rows is None and not ctx.exact
    if everyone or all(x.numel() == 1 for x in leaves([[group.kwargs for group, _, _ in now.groups(params)], lr])):
        same = rule if now is spec else now.rule()
        if not ctx.exact:
            return same.update(params, grads, state, lr=lr, inplace=ctx.inplace)
        new, kept = row_by_row(
            lambda i, p, g, s: same.update(p, g, s, lr=lr, inplace=ctx.inplace), params, grads, state
        )
        return new, {**kept, "step": kept["step"][:1]} if len(state["step"]) == 1 else kept
    rows = ctx.comm.ids if ctx.rows is None else ctx.rows
    # Exactly: each node by itself, or where all still share their parameters the bits would depend on who is here.
    parts = rows.split(1) if ctx.exact and len(rows) > 1 else [rows]
    found = []
    for i, part in enumerate(parts):
        here = ctx.replace(rows=part)
        own = now.mapped(here.own).rule()
        if len(parts) == 1:
            return own.update(params, grads, state, lr=here.own(lr), inplace=ctx.inplace)
        p, g, s = (nodes.take_rows(x, torch.tensor([i])) for x in (params, grads, state))
        found.append(own.update(p, g, s, lr=here.own(lr), inplace=ctx.inplace))
    return nodes.join_rows([p for p, _ in found]), nodes.join_rows([s for _, s in found])


def row_by_row(
    step: Callable[[int | None, Tree, Tree, State], tuple[Tree, State]], params: Tree, grads: Tree, state: State
) -> tuple[Tree, State]:
    """Take an optimizer's step on one row after the other: `step` gets its place, parameters, gradients and state.

    What is the same on all nodes is one row, and its place None.

    A kernel rounds the last values of a tensor, which fill no vector register, in another way than the others: which
    values these are must not depend on the other nodes.

    >>> params, grads = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([0.5, 0.5])}
    >>> row_by_row(lambda i, p, g, s: ({"w": p["w"] - g["w"]}, s), params, grads, {})[0]
    {'w': tensor([0.5000, 1.5000])}
    """
    num_rows = max(x.shape[0] for x in leaves([params, grads, state]))
    if num_rows == 1:
        return step(None, params, grads, state)
    found = []
    for i in range(num_rows):
        p, g, s = (nodes.take_rows(x, torch.tensor([i])) for x in (params, grads, state))
        found.append(step(i, p, g, s))
    return nodes.join_rows([p for p, _ in found]), nodes.join_rows([s for _, s in found])


def moments_in(optimizer: State, params: Tree) -> Slots:
    """Return what the state of an inner optimizer holds in the shape of the parameters.

    >>> params = {"w": torch.zeros(1, 3)}
    >>> sorted(moments_in(OptimSpec("adamw").rule().init(params), params))
    ['exp_avg', 'exp_avg_sq']
    """
    slots = {slot: values for slot, values in _slots(optimizer).items() if isinstance(values, dict)}
    found = {
        slot: {name: x for name, x in values.items() if name in params and x.shape[1:] == params[name].shape[1:]}
        for slot, values in slots.items()
    }
    return {slot: values for slot, values in found.items() if values}


def with_moments(optimizer: State, moments: Slots) -> State:
    """Return the state of an inner optimizer with other `moments_in` it."""
    held = _slots(optimizer)
    changed = {**held, **{slot: {**held[slot], **values} for slot, values in moments.items()}}
    return {**optimizer, "tensors": changed} if "tensors" in optimizer else changed


def _slots(optimizer: State) -> dict[str, Any]:
    return optimizer.get("tensors", optimizer)  # a PerNodeRule keeps what is no tensor apart
