"""Calls of a communication module that check what it returns: an error says what came, from whom, what is expected.

Cheap enough for every step: what a module leaves as it was is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from vecgym.collectives import Collectives
from vecgym.core import check, tree
from vecgym.core.tree import Tree
from vecgym.strategy.communication import CommunicationModule, Context, Slots, State, counted

SILENT = (
    "in a step in which some nodes sit out, so that not all would answer: communicate in exchange_parameters, or let "
    "all nodes train (participation=1)."
)
A_STATE = "a state is a dict of tensors, [1, *] or [L, *], of plain values, or of such dicts"


def init(module: CommunicationModule, params: Tree, ctx: Context) -> State:
    """Call `module.init` with a copy of the parameters."""
    state = module.init({name: p.clone() for name, p in params.items()}, counted(module, ctx))
    _check_state(state, module, "init", ctx)
    return state


def active_nodes(module: CommunicationModule, ctx: Context) -> list[int] | None:
    """Call `module.active_nodes`: None, or distinct node ids."""
    nodes = module.active_nodes(counted(module, ctx))
    if nodes is None:
        return None
    known = isinstance(nodes, Sequence) and all(check.is_integer(node) for node in nodes)
    if not known or len(set(nodes)) != len(nodes) or any(not 0 <= node < ctx.comm.num_nodes for node in nodes):
        raise ValueError(
            f"{_who(module, 'active_nodes')} returned {nodes!r}; expected None (all nodes train) or a list of "
            f"different node ids, 0 to {ctx.comm.num_nodes - 1}."
        )
    return nodes


def local_gradients(
    module: CommunicationModule, grads: Tree, params: Tree, state: State, ctx: Context, silent: bool
) -> Tree:
    """Call `module.local_gradients`; `silent`: some nodes sit out, so that nobody may communicate."""
    if silent:
        who = _who(module, "local_gradients")
        ctx = ctx.replace(comm=Refusing(ctx.comm, lambda name: f"{who} calls ctx.comm.{name} {SILENT}"))
    found = module.local_gradients(grads, params, state, counted(module, ctx))
    num_rows = len(ctx.comm.node_ids) if ctx.rows is None else len(ctx.rows)
    _check_tree(found, grads, module, "local_gradients", "gradients", num_rows)
    return found


def exchange_gradients(module: CommunicationModule, grads: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
    """Call `module.exchange_gradients`."""
    with ctx.comm.ledger.of_gradients():
        found = module.exchange_gradients(grads, state, counted(module, ctx))
    return _exchanged(found, module, "gradients", grads, state, ctx)


def exchange_moments(module: CommunicationModule, moments: Slots, state: State, ctx: Context) -> tuple[Slots, State]:
    """Call `module.exchange_moments`."""
    found = module.exchange_moments(moments, state, counted(module, ctx))
    new, changed = _pair(found, module, "moments")
    if not isinstance(new, dict) or new.keys() != moments.keys():
        raise ValueError(
            f"{_who(module, 'exchange_moments')} returned {list(new) if isinstance(new, dict) else _kind(new)} as "
            f"moments; expected a dict of the slots that it was given: {', '.join(moments) or 'none'}."
        )
    for slot, values in new.items():
        _check_tree(values, moments[slot], module, "exchange_moments", slot, len(ctx.comm.node_ids))
    if changed is not state:
        _check_state(changed, module, "exchange_moments", ctx)
    return new, changed


def exchange_parameters(module: CommunicationModule, params: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
    """Call `module.exchange_parameters`."""
    found = module.exchange_parameters(params, state, counted(module, ctx))
    return _exchanged(found, module, "parameters", params, state, ctx)


class Refusing(Collectives):
    """Collectives that say who is there, and carry out no operation.

    Args:
        comm: those that would.
        refusal: the name of an operation -> why it is refused.

    >>> import torch
    >>> from vecgym.collectives import StackedCollectives
    >>> comm = Refusing(StackedCollectives(2), "{} is not allowed".format)
    >>> comm.num_nodes
    2
    >>> comm.mean(torch.ones(2))
    Traceback (most recent call last):
    ...
    ValueError: mean is not allowed
    """

    def __init__(self, comm: Collectives, refusal: Callable[[str], str]) -> None:
        self.num_nodes, self.node_ids, self.ledger = comm.num_nodes, comm.node_ids, comm.ledger
        self.members, self._run_nodes = comm.members, comm.run_nodes
        self._refusal = refusal

    def _announce(self, operation: str, x: Any, who: Any = None) -> None:
        raise ValueError(self._refusal(operation))

    def everyone(self, x: Tree) -> Tree:
        raise ValueError(self._refusal("everyone"))

    def _never(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError  # every operation is announced first

    _sum = _all_gather = _broadcast = _permute = _mix = _never


def _exchanged(
    found: Any, module: CommunicationModule, what: str, given: Tree, state: State, ctx: Context
) -> tuple[Tree, State]:
    method = f"exchange_{what}"
    new, changed = _pair(found, module, what)
    _check_tree(new, given, module, method, what, len(ctx.comm.node_ids))
    if changed is not state:
        _check_state(changed, module, method, ctx)
    return new, changed


def _pair(found: Any, module: CommunicationModule, what: str) -> tuple[Any, Any]:
    if not isinstance(found, tuple) or len(found) != 2:
        who = _who(module, f"exchange_{what}")
        raise TypeError(f"{who} returned {_kind(found)}; expected a tuple of two: ({what}, state).")
    return found


def _check_tree(new: Any, given: Tree, module: CommunicationModule, method: str, what: str, num_rows: int) -> None:
    if new is given:
        return
    if not isinstance(new, dict):
        raise TypeError(f"{_who(module, method)} returned {_kind(new)} as {what}; expected a dict, name -> tensor.")
    if new.keys() != given.keys():
        odd = "leaves out" if (missing := given.keys() - new.keys()) else "adds"
        names = sorted(map(str, missing or new.keys() - given.keys()))
        raise ValueError(
            f"{_who(module, method)} returned {what} that {odd} {', '.join(names)}; expected the names it was given: "
            f"{', '.join(given)}."
        )
    for name, x in new.items():
        old = given[name]
        if x is old:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{_who(module, method)} returned {_kind(x)} for {name!r} of the {what}; expected tensors.")
        if x.shape[1:] != old.shape[1:] or x.dim() != old.dim() or len(x) not in (1, num_rows):
            shape = [f"1 or {num_rows}" if num_rows > 1 else "1", *map(str, old.shape[1:])]
            raise ValueError(
                f"{_who(module, method)} returned {name!r} of the {what} in shape {list(x.shape)}; expected "
                f"[{', '.join(shape)}]: the nodes first, or 1 for what is the same on all."
            )


def _check_state(state: Any, module: CommunicationModule, method: str, ctx: Context) -> None:
    if not isinstance(state, dict):
        raise TypeError(f"{_who(module, method)} returned {_kind(state)} as state; {A_STATE}.")
    for path, x in tree.flatten(state):  # a number or a text is kept in checkpoints too
        if isinstance(x, Tensor) and (x.dim() == 0 or len(x) not in (1, len(ctx.comm.node_ids))):
            raise ValueError(
                f"{_who(module, method)} returned state{tree.path_name(path)} in shape {list(x.shape)} with "
                f"L = {len(ctx.comm.node_ids)} nodes; {A_STATE}."
            )


def _who(module: CommunicationModule, method: str) -> str:
    return f"{module!r}.{method}"


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
