"""The rows of some nodes of a run's state: taken out for a step, and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vecgym.core import nodes, tree
from vecgym.core.devices import on_host
from vecgym.core.tree import Path
from vecgym.engine.once import StoredOnce
from vecgym.engine.state import State
from vecgym.strategy import Strategy
from vecgym.strategy.when import QUEUE


def taken(strategy: Strategy, state: State, rows: Tensor, alike: bool, optimizer: bool = True) -> State:
    """Return a copy of the state of some nodes.

    Args:
        alike: store once what is found to be the same on all of them, parameters and the inner optimizer's state.
        optimizer: take the inner optimizer's state too; else none.
    """
    params, buffers = nodes.take_rows(state.params, rows), nodes.take_rows(state.buffers, rows)
    inner, modules = (strategy.take_rows(x, rows) for x in (state.optimizer if optimizer else {}, state.strategy))
    if alike:
        params, inner = (tree.map_leaves(_once, x) for x in (params, inner))
    return State(state.step, params, buffers, inner, modules, state.node_steps[rows])


def put(
    state: State, rows: Tensor, before: State, part: State, once: bool, inplace: bool,
    known: StoredOnce | None = None,
) -> State:  # fmt: skip
    """Return the state with that of some nodes, which was `before`, replaced by `part`; the others keep theirs.

    What the strategy stores once for all nodes is the nodes' together: that of `part` is it.

    Args:
        once: parameters and the inner optimizer's state that are stored once, before and after, are so too.
        known: what is stored once. Without it, what is stored once in `part`, which these nodes may have of their own.
    """
    num_nodes = len(state.node_steps)

    def rows_put(x: Tensor, old: Tensor | None) -> Tensor:
        before = {} if old is None else {"": old}
        found: Tensor = nodes.put_rows(before, rows, {"": x}, num_nodes, inplace)[""]
        return found

    def shared(path: Path, x: Tensor, old: Tensor | None) -> bool:
        narrow = once and old is not None and len(old) == len(x) == 1
        return narrow and (known is None or known.has(path))

    def together(path: Path, x: Tensor, old: Tensor | None) -> bool:
        if known is not None:
            return path in known.modules
        return len(x) == 1 and (len(rows) > 1 or old is None or len(old) == 1)

    params = replaced(part.params, state.params, shared, rows_put)
    optimizer = replaced(part.optimizer, state.optimizer, shared, rows_put) if part.optimizer else state.optimizer
    buffers = nodes.put_rows(state.buffers, rows, part.buffers, num_nodes, inplace)
    modules = replaced(part.strategy, state.strategy, together, rows_put, before.strategy)
    node_steps = state.node_steps.index_copy(0, rows, part.node_steps)
    return State(part.step, params, buffers, optimizer, modules, node_steps)


def replaced(
    new: Any, old: Any, once: Callable[[Path, Tensor, Tensor | None], bool],
    put: Callable[[Tensor, Tensor | None], Tensor], taken: Any = None, path: Path = (), waits: bool = False,
) -> Any:  # fmt: skip
    """Return nested values in which what is stored once is the new one, and else `put(new, old)`.

    In a queue, what was in a place that is used again is no longer due: those who did not take part have nothing in it.
    The other places are left as they are: they hold what was `taken`, the new values before the step.

    >>> new, old = {"mean": torch.tensor([9.0]), "own": torch.tensor([1.0])}, {"mean": torch.tensor([5.0])}
    >>> replaced(new, old, lambda path, x, old: path[-1][1] == "mean", lambda x, old: torch.stack([x[0], 0 * x[0]]))
    {'mean': tensor([9.]), 'own': tensor([1., 0.])}
    """
    if isinstance(new, dict):
        held, was = (x if isinstance(x, dict) else {} for x in (old, taken))
        return {
            key: replaced(x, held.get(key), once, put, was.get(key), (*path, (dict, key)), waits or key == QUEUE)
            for key, x in new.items()
        }
    if waits and new is taken:
        return old
    before = None if waits else old
    return new if not isinstance(new, Tensor) or once(path, new, before) else put(new, before)


def once_among(x: Tensor, rows: Tensor) -> Tensor:
    """Return one row, `[1, *]`, where these rows have the same values, and else all; a device is not read.

    >>> once_among(torch.tensor([1.0, 7.0, 1.0]), torch.tensor([0, 2]))
    tensor([1.])
    """
    first = int(rows[0])
    if len(x) == 1 or not on_host(x) or not torch.equal(x[first], x[int(rows[-1])]):
        return x
    equal = (x == x[first]).reshape(len(x), x[0].numel()).all(1)
    return x[first : first + 1].clone() if bool(equal[rows].all()) else x


def _once(x: Tensor) -> Any:
    """Return one row where all have the same values; what is on a device is not read."""
    equal = len(x) > 1 and on_host(x) and torch.equal(x[0], x[1]) and torch.equal(x, x[:1].expand_as(x))
    return x[:1].clone() if equal else x
