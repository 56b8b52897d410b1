"""The exchange of what a step leaves in memory that is used again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vecgym.core import nodes, tree
from vecgym.core.tree import Tree
from vecgym.strategy import Context, Strategy
from vecgym.strategy.base import moments_in, with_moments


def exchange_moments(
    strategy: Strategy, optimizer: dict[str, Any], params: Tree, modules: dict[str, Any], ctx: Context
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the optimizer's and the modules' states after `strategy.exchange_moments`, moments in the same storage.

    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.strategy import CommunicateOptimizeStrategy, Moments
    >>> strategy = CommunicateOptimizeStrategy([Moments()], "adamw")
    >>> optimizer = {"step": torch.ones(1), "exp_avg": {"w": torch.tensor([1.0, 3.0])}}
    >>> params, ctx = {"w": torch.zeros(2)}, Context(StackedCollectives(2))
    >>> exchange_moments(strategy, optimizer, params, {"0": {}}, ctx)[0]["exp_avg"]
    {'w': tensor([2.])}
    """
    exchanged, changed = strategy.exchange_moments(optimizer, params, modules, ctx)
    if exchanged is optimizer or not ctx.inplace:
        return exchanged, changed
    given, new = moments_in(optimizer, params), moments_in(exchanged, params)
    changed = nodes.unshared(changed, modules, tuple(given.values()))
    return with_moments(exchanged, {slot: own_storage(new[slot], own) for slot, own in given.items()}), changed


def per_node_or_once(params: Tree, num_nodes: int) -> Tree:
    """Expand `[C, *]` to `[L, *]`: the engine takes parameters `[1 or L, *]`.

    >>> per_node_or_once({"w": torch.tensor([1.0, 2.0])}, 4)
    {'w': tensor([1., 1., 2., 2.])}
    """
    shared = any(1 < p.shape[0] < num_nodes for p in params.values())
    return nodes.expand(params, num_nodes) if shared else params


def own_storage(shared: Tree, params: Tree) -> Tree:
    """Move what an exchange has returned to the storage of the parameters that it was given.

    An exchange may return a tensor that it also keeps in its state, such as outer parameters; the next step overwrites
    the parameters, so they must not be that tensor. And memory in use costs less than new memory.

    >>> own = {"w": torch.tensor([1.0, 2.0])}
    >>> own_storage({"w": torch.tensor([3.0, 4.0])}, own)["w"] is own["w"]
    True
    """

    def settle(new: Tensor, own: Tensor) -> Tensor:
        if new is own:
            return own
        if new.shape[0] > own.shape[0]:
            return new.clone()
        return own.copy_(new.clone() if new._is_view() and new._base is own else new)

    with torch.no_grad():
        return tree.map(settle, shared, params)
