"""The parts of a stack: configurations that share an optimizer's update, or an exchange, in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor

from vecgym.collectives import StackedCollectives
from vecgym.core import tree
from vecgym.core.tree import Tree
from vecgym.optim import clip_grad_norm
from vecgym.optim.spec import Key, merge_key, merged_spec, per_row
from vecgym.strategy import Context, Strategy
from vecgym.strategy.base import State, lets_rest
from vecgym.strategy.communication import overrides

# An exchange of several configurations holds what would be one row for each, such as outer parameters, once for each
# node. Of small models, whose exchange is Python above all, that is the lesser cost.
MAX_MERGED_ELEMENTS = 1 << 16
MAX_RULES = 64  # of an optimizer, for different numbers of rows, that are kept


@dataclass
class Member:
    """One configuration.

    Attributes:
        strategy: what its nodes do and exchange.
        seed: of its random numbers.
        comm: the collectives among its nodes.
        num_examples: of each node's shard, [K]; None where not known.
    """

    strategy: Strategy
    seed: int
    comm: StackedCollectives
    num_examples: tuple[int, ...] | None = None
    rests: bool = field(init=False)  # whether some of its nodes may sit out
    rate: float | None = field(init=False)  # the inner learning rate, if it is one number for all nodes and steps

    def __post_init__(self) -> None:
        resting = any(map(lets_rest, self.strategy.communication_modules))
        self.rests = resting or _is_overridden(self.strategy, "active_nodes")
        self.rate = _steady_rate(self.strategy)

    def context(self, ctx: Context, node_steps: Tensor, active: tuple[int, ...] | None, rows: Tensor | None) -> Context:
        """Return the strategy's context at a step, from the context `ctx` of all and what its own nodes do."""
        new = ctx.replace(
            comm=self.comm, node_steps=node_steps, active=active, seed=self.seed, num_examples=self.num_examples,
            rows=rows, lr=None,
        )  # fmt: skip
        # A strategy written for one rank has its learning rate from the step itself.
        return new.replace(lr=self.strategy.lr(new)) if self.strategy.pure else new


Contexts = Callable[[int], Context]  # the context of configuration c, made when it is asked for: most never are


class Adjacent:
    """Neighbouring members that do something in one call.

    Attributes:
        name: of their state, whose tensors have the same number of rows for each member, or one row in all.
        start: the first of them; `stop`, the one after the last.
    """

    def __init__(self, name: str, start: int, members: Sequence[Member]) -> None:
        self.name, self.start, self.size = name, start, len(members)
        self.stop = start + self.size
        self.num_nodes = members[0].comm.num_nodes
        self.num_rows = self.size * self.num_nodes

    def part(self, values: Tree, ends: list[int]) -> Tree:
        """Take their rows of the values of all."""
        a, b = ends[self.start], ends[self.stop]
        return {name: x[a:b] for name, x in values.items()}

    def own_rows(self, rows: Tensor) -> Tensor:
        """Return which of these rows of all are theirs, counting from their first."""
        first, last = torch.searchsorted(rows, torch.tensor([self.start, self.stop]) * self.num_nodes).tolist()
        return rows[first:last] - self.start * self.num_nodes

    def widened(self, state: State) -> State:
        """Return their state with a row for each node where it has one for each member."""
        if self.size == 1 or self.num_nodes == 1 or not any(len(x) == self.size for x in tree.leaves(state)):
            return state
        return tree.map_leaves(lambda x: x.repeat_interleave(self.num_nodes, 0) if len(x) == self.size else x, state)


class JointExchange(Adjacent):
    """Members whose nodes exchange in one call: one, or several that are alike and exchange their parameters only."""

    def __init__(self, name: str, start: int, members: Sequence[Member]) -> None:
        super().__init__(name, start, members)
        self.strategy, self.comm = members[0].strategy, members[0].comm
        self.adds = _has_own(self.strategy, "local_gradients")
        self.exchanges_gradients = _has_own(self.strategy, "exchange_gradients")
        self.exchanges_moments = _has_own(self.strategy, "exchange_moments")
        if self.size > 1:
            self.comm = StackedCollectives(self.num_nodes, self.size, self.comm.ledger)
            columns = zip(*[member.strategy.communication_modules for member in members])
            modules = [column[0].stacked(column, self.num_nodes) for column in columns]
            self.strategy = Strategy(self.strategy.inner_optim, communication_modules=modules)

    def context(self, contexts: Contexts) -> Context:
        """Return their context."""
        first = contexts(self.start)
        return first if self.size == 1 else first.replace(comm=self.comm)


class JointOptimizer(Adjacent):
    """Members whose inner optimizers are one update, with a number for each row where theirs differ."""

    def __init__(self, name: str, start: int, members: Sequence[Member]) -> None:
        super().__init__(name, start, members)
        self.strategies = [member.strategy for member in members]
        self.steady_rates = [member.rate for member in members]
        self.is_shared = optimizer_key(self.strategies[0]) is not None
        self._lr: tuple[Any, Any] = (None, None)  # the last rates and counts, and `per_row` of them
        self._rules: dict[tuple[int, ...], Any] = {}

    def init(self, params: Tree) -> State:
        """Return the state before the first step."""
        return self.rule([1] * self.size).init(params)

    def update(
        self, params: Tree, grads: Tree, state: State, contexts: Contexts, ends: list[int]
    ) -> tuple[Tree, State]:
        """Clip, then step every member's optimizer; the members have the rows between `ends`."""
        if not self.is_shared:
            return self.strategies[0].optimize(params, grads, state, contexts(self.start))
        counts = [b - a for a, b in pairwise(ends[self.start : self.stop + 1])]
        rates = [_rate(contexts(c)) if rate is None else rate for c, rate in enumerate(self.steady_rates, self.start)]
        if self._lr[0] != (rates, counts):  # most often they stay
            self._lr = (rates, counts), _of_rows(rates, counts)
        if self.strategies[0].max_norm is not None:
            grads, _ = clip_grad_norm(grads, per_row([strategy.max_norm for strategy in self.strategies], counts))
        return self.rule(counts).update(params, grads, state, lr=self._lr[1])

    def rule(self, counts: list[int]) -> Any:
        """Return the optimizer of members with so many rows each."""
        key = tuple(counts)
        if key not in self._rules:
            if len(self._rules) == MAX_RULES:
                self._rules.clear()
            self._rules[key] = merged_spec([strategy.inner_optim for strategy in self.strategies], counts).rule()
        return self._rules[key]


def _steady_rate(strategy: Strategy) -> float | None:
    scheduled = strategy.lr_scheduler is not None or strategy.warmup_steps or strategy.cosine_anneal
    own = "lr" in vars(strategy) or _is_overridden(strategy, "lr")
    lr = None if scheduled or own else strategy.inner_optim.hyper.get("lr")
    return float(lr) if isinstance(lr, (int, float)) else None


def _rate(ctx: Context) -> float | tuple[float, ...]:
    """Return the learning rate of a configuration's rows: one number, or one for each where their times differ."""
    lr = ctx.own(ctx.lr)
    return tuple(lr.tolist()) if isinstance(lr, Tensor) and lr.numel() > 1 else float(lr)


def _of_rows(rates: list[float | tuple[float, ...]], counts: Sequence[int]) -> float | Tensor:
    """Return a learning rate for each row, or one for all."""
    if all(isinstance(rate, float) for rate in rates):
        found: float | Tensor = per_row(rates, counts)
        return found
    each = [rate if isinstance(rate, tuple) else (rate,) * n for rate, n in zip(rates, counts)]
    return torch.tensor(list(chain.from_iterable(each)), dtype=torch.float64)


def optimizer_key(strategy: Strategy) -> Key | None:
    """Strategies of equal key can share one update of their inner optimizers; None: this one cannot.

    >>> from vecgym.strategy import FedAvgStrategy
    >>> optimizer_key(FedAvgStrategy("adam", lr=0.1)) == optimizer_key(FedAvgStrategy("adam", lr=0.2, H=5))
    True
    >>> optimizer_key(FedAvgStrategy("adam")) == optimizer_key(FedAvgStrategy("adam", max_norm=1.0))
    False
    """
    usual = not (_is_overridden(strategy, "optimize", "init") or _has_own(strategy, "exchange_moments"))
    key = merge_key(strategy.inner_optim)
    if not usual or key is None or (isinstance(strategy.max_norm, Tensor) and strategy.max_norm.dim() > 0):
        return None
    return ("shared", *key, strategy.max_norm is None)


def exchange_key(strategy: Strategy, num_elements: int = 0) -> Key | None:
    """Strategies of equal key can exchange the parameters of their nodes in one call; None: this one cannot.

    Args:
        num_elements: of all nodes of a configuration together.

    >>> from vecgym.strategy import DiLoCoStrategy
    >>> exchange_key(DiLoCoStrategy(H=5, outer_lr=0.5)) == exchange_key(DiLoCoStrategy(H=5, outer_lr=0.7))
    True
    >>> exchange_key(DiLoCoStrategy(H=5)) == exchange_key(DiLoCoStrategy(H=6))
    False
    """
    unusual = _is_overridden(strategy, "active_nodes", "local_gradients", "exchange_gradients", "exchange_parameters")
    key = optimizer_key(strategy)
    keys = [(type(module).__name__, module.stack_key()) for module in strategy.communication_modules]
    if unusual or key is None or num_elements > MAX_MERGED_ELEMENTS or any(key is None for _, key in keys):
        return None
    return key, *keys


def _is_overridden(strategy: Strategy, *methods: str) -> bool:
    return any(getattr(type(strategy), name) is not getattr(Strategy, name) for name in methods)


def _has_own(strategy: Strategy, method: str) -> bool:
    """Whether a strategy, or a module of its, does something at this place of a step."""
    return _is_overridden(strategy, method) or any(overrides(m, method) for m in strategy.communication_modules)


def neighbours(keys: Sequence[Key | None]) -> list[int]:
    """Return the sizes of the groups of neighbours with equal keys; one without a key is by itself."""
    sizes: list[int] = []
    for c, key in enumerate(keys):
        if c > 0 and key is not None and key == keys[c - 1]:
            sizes[-1] += 1
        else:
            sizes.append(1)
    return sizes
