"""Many configurations as one strategy for the ordinary `Simulation`.

- The nodes of C configurations of K nodes are C K nodes of one simulation: configuration c has the rows from c K on.
- Gradients are one call of the engine for all rows.
- The inner optimizer is one update for all neighbours that share its class (`optimizer_key`), with a number for each
  row where theirs differ; one that cannot be shared makes its own.
- Each configuration exchanges by itself: its strategy is given its rows, and collectives of its own. Neighbours whose
  exchanges are alike (`exchange_key`) make them in one call.
- While the nodes of no configuration differ, as in AllReduce, parameters and optimizer have a row for each, `[C, *]`.

Nothing here keeps state: it is all in the simulation's `State`, and so it can be saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from vecgym.collectives.ledger import Transfer, bytes_of
from vecgym.core import nodes, tree
from vecgym.core.tree import Tree
from vecgym.engine.simulation import exchange_moments
from vecgym.optim.spec import Key, per_row
from vecgym.strategy import Context, Strategy
from vecgym.strategy.base import State
from vecgym.sweeps.parts import Exchange, Member, Optimizer, exchange_key, neighbours, optimizer_key


class Merged(Strategy):
    """C configurations of K nodes each, as a strategy of C * K nodes.

    Args:
        members: of the same number of nodes; those with equal keys next to one another.
        num_elements: of all parameters of a configuration's nodes; small exchanges are made together.

    Two configurations with different learning rates:

    >>> from torch import nn
    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.engine.simulation import Simulation
    >>> from vecgym.strategy import FedAvgStrategy
    >>> class Line(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = nn.Parameter(torch.zeros(()))
    ...     def forward(self, x):
    ...         return (self.w - x).square().mean()
    >>> merged = Merged([Member(FedAvgStrategy("sgd", lr=lr), 0, StackedCollectives(3)) for lr in (0.1, 0.5)])
    >>> simulation = Simulation(Line(), merged, StackedCollectives(2 * 3))
    >>> state, metrics = simulation.step(simulation.init({"w": torch.zeros(2)}), torch.ones(2 * 3, 1))
    >>> state.params["w"], metrics.losses.shape
    (tensor([0.2000, 0.2000, 0.2000, 1.0000, 1.0000, 1.0000]), torch.Size([6]))
    """

    def __init__(self, members: Sequence[Member], num_elements: int = 0) -> None:
        super().__init__()
        self.members = list(members)
        self.num_nodes = members[0].comm.num_nodes  # K
        self.num_rows = len(members) * self.num_nodes
        optimizers = self._parts([optimizer_key(member.strategy) for member in members])
        exchanges = self._parts([exchange_key(member.strategy, num_elements) for member in members])
        self.optimizers = [Optimizer(f"optimizer {i}", *part) for i, part in enumerate(optimizers)]
        self.exchanges = [Exchange(f"exchange {i}", *part) for i, part in enumerate(exchanges)]
        self._adds = any(exchange.adds for exchange in self.exchanges)
        self.exchanges_where_some_rest = any(exchange.exchanges_gradients for exchange in self.exchanges)
        self._last_contexts: tuple[Context | None, Any] = (None, None)
        self._has_numbers: bool | None = None  # whether nodes of a configuration differ in a number; None: not known

    def _parts(self, keys: Sequence[Key | None]) -> Iterator[tuple[int, list[Member]]]:
        sizes = neighbours(keys)
        for start, size in zip(accumulate(sizes, initial=0), sizes):
            yield start, self.members[start : start + size]

    # ------------------------------------------------------------------------------------ as a strategy

    @property
    def mean_gradient(self) -> bool:
        return len(self.members) == 1 and self.members[0].strategy.mean_gradient

    def init(self, params: Tree, ctx: Context) -> tuple[State, State]:
        contexts, ends = self._contexts(ctx), self._ends(params, ctx)
        unshared, modules, optimizers = {}, {}, {}  # unshared: the optimizer's state of each exchange's strategy
        for exchange in self.exchanges:
            part = exchange.part(params, ends)
            part = part if exchange.size == 1 else nodes.widened(part, exchange.num_rows)
            unshared[exchange.start], modules[exchange.name] = exchange.strategy.init(part, exchange.context(contexts))
        for optimizer in self.optimizers:
            part = optimizer.part(params, ends)
            optimizers[optimizer.name] = optimizer.init(part) if optimizer.is_shared else unshared[optimizer.start]
        return optimizers, modules

    def active_nodes(self, ctx: Context) -> list[int] | None:
        if not any(member.rests for member in self.members):
            return None
        contexts, K = self._contexts(ctx), self.num_nodes
        each = [m.strategy.active_nodes(contexts(c)) if m.rests else None for c, m in enumerate(self.members)]
        if all(active is None for active in each):
            return None
        return [c * K + i for c, active in enumerate(each) for i in (range(K) if active is None else active)]

    def local_gradients(self, grads: Tree, params: Tree, state: State, ctx: Context) -> Tree:
        if not self._adds:
            return grads
        contexts, of_grads, of_params = self._contexts(ctx), self._ends(grads, ctx), self._ends(params, ctx)
        each = [exchange.part(grads, of_grads) for exchange in self.exchanges]
        for i, exchange in enumerate(self.exchanges):
            if exchange.adds and exchange.name in state:
                part, before = exchange.part(params, of_params), state[exchange.name]
                each[i] = exchange.strategy.local_gradients(each[i], part, before, exchange.context(contexts))
        return self._joined(each, of_grads)

    def exchange_gradients(self, grads: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        """Exchange the gradients of the configurations in which all nodes train."""
        if not self.exchanges_where_some_rest:
            return grads, state
        contexts, ends, changed = self._contexts(ctx), self._ends(grads, ctx), dict(state)
        each = [exchange.part(grads, ends) for exchange in self.exchanges]
        for i, exchange in enumerate(self.exchanges):
            before, part_ctx = state[exchange.name], exchange.context(contexts)
            if exchange.exchanges_gradients and part_ctx.active is None:
                each[i], after = exchange.strategy.exchange_gradients(each[i], before, part_ctx)
                changed[exchange.name] = _unchanged(before, after)
        if ctx.rows is None:
            once = all(len(x) == exchange.size for exchange, own in zip(self.exchanges, each) for x in own.values())
            ends = self._ends_of(1 if once else self.num_nodes)
        return self._joined(each, ends), changed

    def lr(self, ctx: Context) -> float | Tensor:
        self._contexts(ctx)
        return per_row(self.rates(), [self.num_nodes] * len(self.members))

    def optimize(self, params: Tree, grads: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        contexts, of_grads = self._contexts(ctx), self._ends(grads, ctx)
        if of_grads[-1] > len(next(iter(params.values()))) or self._differs_by_node(params, ctx):
            params = nodes.widened(params, self.num_rows if ctx.rows is None else len(ctx.rows))
        ends, changed = self._ends(params, ctx), dict(state)
        for optimizer in self.optimizers:
            if optimizer.name not in state:  # none of its nodes trains
                continue
            part, before = optimizer.part(params, ends), state[optimizer.name]
            if ctx.rows is None and ends[-1] == self.num_rows:
                before = optimizer.widened(before)
            part_grads = optimizer.part(grads, of_grads)
            if of_grads[-1] < ends[-1]:
                part_grads = nodes.expand(part_grads, ends[optimizer.stop] - ends[optimizer.start])
            new, changed[optimizer.name] = optimizer.update(part, part_grads, before, contexts, ends)
            _write(part, new)
        return params, changed

    def exchange_moments(self, optimizer: State, params: Tree, state: State, ctx: Context) -> tuple[State, State]:
        """Exchange the moments where a configuration does; its optimizer is then by itself."""
        exchanging = [exchange for exchange in self.exchanges if exchange.exchanges_moments]
        if not exchanging:
            return optimizer, state
        contexts, ends, optimizer, state = self._contexts(ctx), self._ends(params, ctx), {**optimizer}, {**state}
        names = {part.start: part.name for part in self.optimizers}
        for exchange in exchanging:
            name, part = names[exchange.start], exchange.part(params, ends)
            optimizer[name], state[exchange.name] = exchange_moments(
                exchange.strategy, optimizer[name], part, state[exchange.name], exchange.context(contexts)
            )
        return optimizer, state

    def exchange_parameters(self, params: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        contexts, changed = self._contexts(ctx), dict(state)
        if any(exchange.size > 1 for exchange in self.exchanges):
            params = nodes.widened(params, self.num_rows)
        ends = self._ends(params, ctx)
        for exchange in self.exchanges:
            if exchange.strategy.idle(contexts(exchange.start)):
                continue
            part, before = exchange.part(params, ends), state[exchange.name]
            new, after = exchange.strategy.exchange_parameters(part, before, exchange.context(contexts))
            changed[exchange.name] = _unchanged(before, after)
            if any(len(new[name]) > len(p) for name, p in part.items()):
                params = nodes.widened(params, self.num_rows)
                ends = self._ends(params, ctx)
                part = exchange.part(params, ends)
            _write(part, new)
        return params, changed

    def result(self, state: Any) -> Tree:
        if len(self.members) > 1:  # those with a rule of their own are trained by themselves
            return super().result(state)
        optimizer, modules = state.optimizer[self.optimizers[0].name], state.strategy[self.exchanges[0].name]
        return self.members[0].strategy.result(replace(state, optimizer=optimizer, strategy=modules))

    def take_rows(self, state: State, rows: Tensor) -> State:
        return {
            part.name: nodes.take_rows(part.widened(state[part.name]), part_rows)
            for part in (*self.optimizers, *self.exchanges)
            if part.name in state and len(part_rows := part.own_rows(rows))
        }

    def put_rows(self, state: State, rows: Tensor, new: State, num_nodes: int, inplace: bool) -> State:
        changed = {
            part.name: nodes.put_rows(
                part.widened(state[part.name]), part.own_rows(rows), new[part.name], part.num_rows, inplace
            )
            for part in (*self.optimizers, *self.exchanges)
            if part.name in new
        }
        return {**state, **changed}

    def close(self) -> None:
        for member in self.members:
            member.strategy.close()

    def __repr__(self) -> str:
        return f"Merged({len(self.members)} configurations of {self.num_nodes} nodes)"

    # -------------------------------------------------------------------------------- each configuration

    @contextmanager
    def recording(self) -> Iterator[list[list[Transfer]]]:
        """Collect what is sent in a block: a list for each exchange; see `num_bytes`."""
        with ExitStack() as recordings:
            yield [recordings.enter_context(exchange.comm.ledger.recording()) for exchange in self.exchanges]

    def num_bytes(self, transfers: Sequence[list[Transfer]]) -> list[tuple[float, float, float]]:
        """Return what a node of each configuration has sent, received and handed over, from `recording`."""
        each = [bytes_of(of_one) for of_one in transfers]
        return [sums for sums, exchange in zip(each, self.exchanges) for _ in range(exchange.size)]

    def rates(self) -> list[float]:
        """Return the inner learning rate of each configuration in the last step; where nodes differ, their mean."""
        return [self._rate(c) if member.rate is None else member.rate for c, member in enumerate(self.members)]

    # ------------------------------------------------------------------------------------------- helpers

    def _rate(self, c: int) -> float:
        ctx = self._last_contexts[1](c)
        return _mean(self.members[c].strategy.lr(ctx) if ctx.lr is None else ctx.lr)

    def _contexts(self, ctx: Context) -> Callable[[int], Context]:
        """Return the context of each configuration; made once for contexts `ctx` of all that say the same to them."""
        if not _alike(self._last_contexts[0], ctx):
            rows: list[Any] = [None] * len(self.members)
            node_steps = ctx.node_steps.split(self.num_nodes)
            if ctx.rows is not None:
                each = self._split_rows(ctx.rows)
                node_steps = ctx.node_steps.split([len(x) for x in each])
                rows = [None if len(x) == self.num_nodes else x for x in each]
            what_differs = list(zip(node_steps, self._active(ctx), rows))
            self._last_contexts = (ctx, cache(lambda c: self.members[c].context(ctx, *what_differs[c])))
        return self._last_contexts[1]

    def _active(self, ctx: Context) -> list[tuple[int, ...] | None]:
        """Return the nodes of each configuration that have trained; None: all of them."""
        if ctx.active is None:
            return [None] * len(self.members)
        each = [tuple(x.tolist()) for x in self._split_rows(torch.tensor(ctx.active, dtype=torch.long))]
        return [None if len(x) == self.num_nodes else x for x in each]

    def _split_rows(self, rows: Tensor) -> list[Tensor]:
        """Split rows by configuration, counting from its first."""
        bounds = torch.arange(len(self.members) + 1) * self.num_nodes
        ends = torch.searchsorted(rows, bounds).tolist()
        return [rows[a:b] - c * self.num_nodes for c, (a, b) in enumerate(pairwise(ends))]

    def _ends(self, values: Tree, ctx: Context) -> list[int]:
        """Return where the rows of each configuration begin, and where the last one's end."""
        if ctx.rows is not None:
            contexts = map(self._contexts(ctx), range(len(self.members)))
            counts = (self.num_nodes if x.rows is None else len(x.rows) for x in contexts)
            return list(accumulate(counts, initial=0))
        return self._ends_of(len(next(iter(values.values()))) // len(self.members))

    def _ends_of(self, num_rows: int) -> list[int]:
        return [c * num_rows for c in range(len(self.members) + 1)]

    def _joined(self, each: list[Tree], ends: list[int]) -> Tree:
        """Join the exchanges' results in one tree, in which configuration c has the rows ends[c] to ends[c + 1]."""
        if len(each) == 1:
            return each[0]
        wide = [nodes.expand(x, ends[part.stop] - ends[part.start]) for part, x in zip(self.exchanges, each)]
        return {name: torch.cat([x[name] for x in wide]) for name in wide[0]}

    def _differs_by_node(self, params: Tree, ctx: Context) -> bool:
        """Whether parameters are stored once that must not be: the nodes differ in a number of their optimizer."""
        once = ctx.rows is None and len(next(iter(params.values()))) < self.num_rows
        if once and self._has_numbers is None:
            self._has_numbers = any(_has_numbers_of_nodes(member.strategy, params) for member in self.members)
        return once and bool(self._has_numbers)


def _write(part: Tree, new: Tree) -> None:
    """Write new values into the rows of a part."""
    for name, p in part.items():
        if new[name] is not p:
            p.copy_(new[name])


def _has_numbers_of_nodes(strategy: Strategy, params: Tree) -> bool:
    specs = [spec for spec, _, _ in strategy.inner_optim.groups(params)]
    numbers = [*tree.leaves([spec.kwargs for spec in specs]), strategy.max_norm]
    return any(isinstance(x, Tensor) and x.dim() > 0 and x.shape[-1] > 1 for x in numbers)


def _alike(a: Context | None, b: Context) -> bool:
    """Whether two contexts of all configurations differ in nothing but a learning rate, of which each has its own."""
    if a is None or (a.step, a.active, a.inplace, a.own_time) != (b.step, b.active, b.inplace, b.own_time):
        return False
    return a.node_steps is b.node_steps and a.rows is b.rows


def _unchanged(before: State, after: State) -> State:
    """Return the very state `before` where nothing has changed, so that it is not examined again."""
    same = before.keys() == after.keys() and all(after[name] is before[name] for name in after)
    return before if same else after


def _mean(lr: float | Tensor) -> float:
    return float(lr.double().mean()) if isinstance(lr, Tensor) else float(lr)
