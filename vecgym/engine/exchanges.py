"""The exchanges of steps: in memory that is used again; and by themselves, without training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from vecgym.collectives.stacked import Announced
from vecgym.core import nodes, tree
from vecgym.core.tree import Tree
from vecgym.engine.presence import exchanges_gradients
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


def exchanges(
    strategy: Strategy, params: Tree, wide: Tree, comm: Announced, max_steps: int, seed: int
) -> Iterator[tuple[Tree, Tree, dict[str, Any]]]:
    """Make the exchanges of all steps with tensors that have no values; yield what comes of each that has any.

    Args:
        params: `[1, *]`, as they are at the start.
        wide: the same as `[K, *]`, as of nodes that have moved apart.

    Yields:
        Gradients after their exchange, parameters after theirs, and the modules' states.

    >>> from vecgym.strategy import DiLoCoStrategy
    >>> params = {"w": torch.empty(1, 3, device="meta")}
    >>> steps = exchanges(DiLoCoStrategy("sgd", H=2), params, {"w": params["w"].expand(4, 3)}, Announced(4), 2, seed=0)
    >>> [after["w"].shape for _, after, _ in steps]
    [torch.Size([1, 3])]
    """
    optimizer, modules = strategy.init(params, _context(comm, 0, max_steps, seed))
    for step in range(max_steps):
        ctx = _context(comm, step, max_steps, seed)
        comm.ledger.begin_step(step)
        if strategy.idle(ctx) and not exchanges_gradients(strategy):
            continue
        active, grads = strategy.active_nodes(ctx), wide
        if active is None:
            grads, modules = strategy.exchange_gradients(wide, modules, ctx)
        else:
            ctx = _context(comm, step, max_steps, seed, tuple(active))
        _, modules = exchange_moments(strategy, optimizer, wide, modules, ctx)
        after, modules = strategy.exchange_parameters(wide, modules, ctx)
        yield grads, after, modules


def agreed(strategy: Strategy, params: Tree, num_nodes: int, step: int, max_steps: int, seed: int) -> set[str]:
    """Return the parameters of which all nodes have the same after a step's exchange, found from shapes alone.

    Args:
        params: `[1, *]`, without values.

    >>> from vecgym.strategy import FedAvgStrategy
    >>> strategy, params = FedAvgStrategy("sgd", H=2), {"w": torch.empty(1, 3, device="meta")}
    >>> [agreed(strategy, params, num_nodes=4, step=step, max_steps=2, seed=0) for step in range(2)]
    [set(), {'w'}]
    """
    ctx = _context(Announced(num_nodes), step, max_steps, seed)
    if strategy.idle(ctx):
        return set()
    wide = {name: p.expand(num_nodes, *p.shape[1:]) for name, p in params.items()}
    try:
        after, _ = strategy.exchange_parameters(wide, strategy.init(params, ctx)[1], ctx)
    except Exception:  # whatever a strategy does with tensors that have no values
        return set()
    return {name for name, p in after.items() if p is not wide[name] and len(p) == 1}


def _context(comm: Announced, step: int, max_steps: int, seed: int, active: tuple[int, ...] | None = None) -> Context:
    examples = (1,) * comm.num_nodes
    return Context(
        comm, step=step, max_steps=max_steps, seed=seed, active=active, num_examples=examples, missed=lambda step: None
    )
