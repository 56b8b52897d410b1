"""What all nodes store once, and what each has of its own.

With all nodes here and present, a tensor `[1, *]` is stored once. With only some of them, these may agree on a value
that differs on the others. So it is found in advance which tensors are stored once, from exchanges of tensors that have
no values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vecgym.collectives.stacked import Announced
from vecgym.core import nodes, tree
from vecgym.core.objects import reachable
from vecgym.core.tree import Path, Tree
from vecgym.strategy import Context, Strategy
from vecgym.strategy.base import moments_in, with_moments
from vecgym.strategy.communication import overrides
from vecgym.strategy.when import QUEUE

ENOUGH = 8  # exchanges that show what is stored once


class StoredOnce(NamedTuple):
    """What all nodes store once.

    Attributes:
        names: all parameters.
        params: the parameters that are stored once.
        modules: the paths of those leaves of the modules' states.
    """

    names: frozenset[str]
    params: frozenset[str]
    modules: frozenset[Path]

    def has(self, path: Path) -> bool:
        """Whether a parameter, or the inner optimizer's state of it or of all parameters, is stored once.

        >>> once = StoredOnce(frozenset({"w", "b"}), frozenset({"w"}), frozenset())
        >>> once.has(((dict, "exp_avg"), (dict, "b"))), once.has(((dict, "step"),))
        (False, True)
        """
        named = [key for _, key in path if key in self.names]
        return named[0] in self.params if named else bool(self.params)


def stored_once(
    strategy: Strategy, params: Tree, num_nodes: int, max_steps: int, seed: int, trained: bool
) -> StoredOnce | None:
    """Find what all nodes store once after every step. None: that depends on values.

    Parameters and the inner optimizer's state are all stored once, and learning rates follow the run's steps, or each
    node has its own, and they follow its own count.

    Args:
        trained: whether parameters are ever stored once, by nodes that exchange gradients.

    >>> from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy
    >>> params = {"w": torch.zeros(1, 3)}
    >>> stored_once(AllReduceStrategy("sgd"), params, 4, 10, seed=0, trained=True).params
    frozenset({'w'})
    >>> once = stored_once(DiLoCoStrategy("sgd", H=2), params, 4, 10, seed=0, trained=False)
    >>> once.params, sorted(tree.path_name(path) for path in once.modules)
    (frozenset(), ["['0']['optimizer']['momentum_buffer']['w']", "['0']['optimizer']['step']", "['0']['params']['w']"])
    """
    once = {name: torch.empty_like(p[:1], device="meta") for name, p in params.items()}
    wide = {name: p.expand(num_nodes, *p.shape[1:]) for name, p in once.items()}
    shared = set(once) if trained and not has_own_numbers(strategy, num_nodes) else set[str]()
    single, several = set[Path](), set[Path]()
    try:
        for grads, after, modules in islice(
            exchanges(strategy, once, wide, Announced(num_nodes), max_steps, seed), ENOUGH
        ):
            shared -= {name for name, grad in grads.items() if len(grad) > 1}
            shared -= {name for name, p in after.items() if p is not wide[name] and len(p) > 1}
            for path, x in tree.flatten(modules):
                if isinstance(x, Tensor):
                    (several if len(x) > 1 else single).add(path)
    except Exception:  # whatever a strategy does with tensors that have no values
        return None
    per_node = set(map(_place, several))
    return StoredOnce(
        frozenset(once),
        frozenset(once if shared == set(once) else ()),
        frozenset(path for path in single if _place(path) not in per_node),
    )


def has_own_numbers(strategy: Strategy, num_nodes: int) -> bool:
    """Whether the inner optimizer has a setting for each node, such as a learning rate: nodes then drift apart.

    >>> from vecgym.strategy import AllReduceStrategy
    >>> [has_own_numbers(AllReduceStrategy("sgd", lr=lr), num_nodes=2) for lr in (0.1, torch.tensor([0.1, 0.2]))]
    [False, True]
    """
    settings = {name: value for name, value in vars(strategy).items() if name != "communication_modules"}
    tensors = (x for x in reachable(settings) if isinstance(x, Tensor) and x.dim() > 0)
    return any(x.shape[-1] == num_nodes > 1 for x in tensors)


def _place(path: Path) -> Path:
    """Return the path without its slot of a queue: what one slot holds, any may hold, also one not used yet."""
    at = [key for _, key in path].index(QUEUE) + 1 if (dict, QUEUE) in path else len(path)
    return path[:at] + path[at + 1 :]


def replaced(
    new: Any, old: Any, once: Callable[[Path, Tensor, Tensor | None], bool],
    put: Callable[[Tensor, Tensor | None], Tensor], before: Any = None, path: Path = (), waits: bool = False,
) -> Any:  # fmt: skip
    """Return nested values: the new one of what is stored once, and `put(new, old)` of the rest.

    In a queue, what was in a slot that is used again is no longer due: nodes that did not take part have nothing in it.
    The other slots stay as they are: they hold the values of `before`, those of `new` before the step.

    >>> new, old = {"mean": torch.tensor([9.0]), "own": torch.tensor([1.0])}, {"mean": torch.tensor([5.0])}
    >>> replaced(new, old, lambda path, x, old: path[-1][1] == "mean", lambda x, old: torch.stack([x[0], 0 * x[0]]))
    {'mean': tensor([9.]), 'own': tensor([1., 0.])}
    """
    if isinstance(new, dict):
        olds, olders = (x if isinstance(x, dict) else {} for x in (old, before))
        return {
            key: replaced(x, olds.get(key), once, put, olders.get(key), (*path, (dict, key)), waits or key == QUEUE)
            for key, x in new.items()
        }
    if waits and new is before:
        return old
    old = None if waits else old
    return new if not isinstance(new, Tensor) or once(path, new, old) else put(new, old)


def exchange_moments(
    strategy: Strategy, optimizer: dict[str, Any], params: Tree, modules: dict[str, Any], ctx: Context
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the optimizer's and the modules' states after `strategy.exchange_moments`; moments keep their storage.

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
    old, new = moments_in(optimizer, params), moments_in(exchanged, params)
    changed = nodes.unshared(changed, modules, tuple(old.values()))
    return with_moments(exchanged, {slot: own_storage(new[slot], own) for slot, own in old.items()}), changed


def per_node_or_once(params: Tree, num_nodes: int) -> Tree:
    """Expand `[C, *]` to `[L, *]`: the engine takes parameters `[1 or L, *]`.

    >>> per_node_or_once({"w": torch.tensor([1.0, 2.0])}, 4)
    {'w': tensor([1., 1., 2., 2.])}
    """
    shared = any(1 < p.shape[0] < num_nodes for p in params.values())
    return nodes.expand(params, num_nodes) if shared else params


def own_storage(shared: Tree, params: Tree) -> Tree:
    """Move what an exchange has returned to the storage of the parameters that it exchanged.

    An exchange may return a tensor that it also keeps in its state, such as outer parameters; the next step overwrites
    the parameters, so they must not be that tensor. Writing to memory in use also costs less than new memory.

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
    """Make the exchanges of all steps with tensors that have no values; yield the results of each step that exchanges.

    Args:
        params: `[1, *]`, as they are at the start.
        wide: the same as `[K, *]`, as of nodes that have drifted apart.

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
    """Return the parameters that are equal on all nodes after a step's exchange, as shapes alone show.

    Args:
        params: `[1, *]`, with no values.

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


def exchanges_gradients(strategy: Strategy) -> bool:
    """Whether the nodes exchange gradients.

    >>> from vecgym.strategy import AllReduceStrategy, DiLoCoStrategy
    >>> exchanges_gradients(AllReduceStrategy("sgd", lr=0.1)), exchanges_gradients(DiLoCoStrategy("sgd", lr=0.1))
    (True, False)
    """
    if members := getattr(strategy, "members", None):  # those of a sweep, stacked
        return any(exchanges_gradients(member.strategy) for member in members)
    overridden = type(strategy).exchange_gradients is not Strategy.exchange_gradients
    return overridden or any(overrides(module, "exchange_gradients") for module in strategy.communication_modules)
