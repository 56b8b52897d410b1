"""The rows of some nodes of a run's state: taken out for a step, and put back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vecgym.core import nodes, tree
from vecgym.core.devices import on_host
from vecgym.engine.state import State
from vecgym.strategy import Strategy
from vecgym.strategy.when import QUEUE


def taken(strategy: Strategy, state: State, rows: Tensor, alike: bool) -> State:
    """Return a copy of the state of some nodes.

    Args:
        alike: store once what is found to be the same on all of them, parameters and the inner optimizer's state.
    """
    params, buffers = nodes.take_rows(state.params, rows), nodes.take_rows(state.buffers, rows)
    optimizer, modules = (strategy.take_rows(x, rows) for x in (state.optimizer, state.strategy))
    if alike:
        params, optimizer = (tree.map_leaves(_once, x) for x in (params, optimizer))
    return State(state.step, params, buffers, optimizer, modules, state.node_steps[rows])


def put(strategy: Strategy, state: State, rows: Tensor, part: State, once: bool, inplace: bool) -> State:
    """Return the state with that of some nodes replaced by `part`; the others keep theirs.

    What the strategy stores once for all nodes is the nodes' together: that of `part` is it.

    Args:
        once: parameters and the inner optimizer's state that are stored once, before and after, are so too.
    """
    num_nodes = len(state.node_steps)

    def rows_put(x: Tensor, old: Tensor | None) -> Tensor:
        before = {} if old is None else {"": old}
        found: Tensor = nodes.put_rows(before, rows, {"": x}, num_nodes, inplace)[""]
        return found

    def own(x: Tensor, old: Tensor | None) -> Tensor:
        return x if once and old is not None and len(old) == len(x) == 1 else rows_put(x, old)

    def together(new: Any, old: Any, waits: bool = False) -> Any:
        if isinstance(new, dict):
            held = old if isinstance(old, dict) else {}
            return {key: together(x, held.get(key), waits or key == QUEUE) for key, x in new.items()}
        if not isinstance(new, Tensor) or (len(new) == 1 and (len(rows) > 1 or old is None or waits or len(old) == 1)):
            return new
        # In a queue, what was in this place before is no longer due: those absent have nothing in it.
        return rows_put(new, None if waits else old)

    params, optimizer = (
        tree.map_leaves(own, new, old) for new, old in ((part.params, state.params), (part.optimizer, state.optimizer))
    )
    buffers = nodes.put_rows(state.buffers, rows, part.buffers, num_nodes, inplace)
    modules = together(part.strategy, state.strategy)
    node_steps = state.node_steps.index_copy(0, rows, part.node_steps)
    return State(part.step, params, buffers, optimizer, modules, node_steps)


def _once(x: Tensor) -> Any:
    """Return one row where all have the same values; what is on a device is not read."""
    equal = len(x) > 1 and on_host(x) and torch.equal(x[0], x[1]) and torch.equal(x, x[:1].expand_as(x))
    return x[:1].clone() if equal else x
