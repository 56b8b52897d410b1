"""Many configurations as one strategy, and the step of all of them.

- The nodes of C configurations of K nodes are C K nodes of one simulation: configuration c has the rows from c K on.
- Gradients are one call of the engine for all rows.
- The inner optimizer is one update for all neighbours that share its class (`optimizer_key`), with a number for each
  row where theirs differ; one that cannot be shared makes its own.
- Each configuration exchanges by itself: its strategy is given its rows, and collectives of its own. Neighbours whose
  exchanges are alike (`exchange_key`) make them in one call.
- While the nodes of no configuration differ, as in AllReduce, parameters and optimizer have a row for each, `[C, *]`.

Nothing here keeps state: it is all in the simulation's `HookState`, and so it can be saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from vecgym.collectives import Collectives
from vecgym.collectives.base import payload_bytes
from vecgym.collectives.ledger import Transfer, bytes_of
from vecgym.core import nodes, tree
from vecgym.core.devices import placed
from vecgym.core.tree import Tree
from vecgym.engine import Engine, Local
from vecgym.optim.spec import Key, per_row
from vecgym.simulation.exchanges import exchange_moments, exchanges_gradients, own_storage, per_node_or_once
from vecgym.simulation.state import HookState, Metrics, Result
from vecgym.strategy import Context, Strategy
from vecgym.strategy.asynchronous import check_synchronous
from vecgym.strategy.base import State
from vecgym.strategy.per_rank import as_strategy
from vecgym.sweeps.parts import JointExchange, JointOptimizer, Member, exchange_key, neighbours, optimizer_key


class Merged(Strategy):
    """C configurations of K nodes each, as a strategy of C * K nodes.

    Args:
        members: of the same number of nodes; those with equal keys next to one another.
        num_elements: of all parameters of a configuration's nodes; small exchanges are made together.

    Two configurations with different learning rates:

    >>> from torch import nn
    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.sweeps.merged import StackSimulation
    >>> from vecgym.strategy import FedAvgStrategy
    >>> class Line(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = nn.Parameter(torch.zeros(()))
    ...     def forward(self, x):
    ...         return (self.w - x).square().mean()
    >>> merged = Merged([Member(FedAvgStrategy("sgd", lr=lr), 0, StackedCollectives(3)) for lr in (0.1, 0.5)])
    >>> simulation = StackSimulation(Line(), merged, StackedCollectives(2 * 3))
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
        self.optimizers = [JointOptimizer(f"optimizer {i}", *part) for i, part in enumerate(optimizers)]
        self.exchanges = [JointExchange(f"exchange {i}", *part) for i, part in enumerate(exchanges)]
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


class StackSimulation:
    """The training of stacked configurations, by one strategy for the rows of all of them.

    `step` is a pure function of the state and the batch when `differentiable`. Otherwise it takes the state over
    ("donation"): it may overwrite the tensors in it, and the caller must use only the state that it gives back.

    Example: three steps of four nodes.

    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.strategy import FedAvgStrategy
    >>> from vecgym.models import Line
    >>> strategy = FedAvgStrategy("sgd", H=3, lr=0.1)
    >>> simulation = StackSimulation(Line(), strategy, StackedCollectives(4), max_steps=3)
    >>> state = simulation.init()
    >>> for _ in range(3):
    ...     state, metrics = simulation.step(state, torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
    >>> metrics.losses
    tensor([0.4096, 1.6384, 3.6864, 6.5536])
    >>> state.params["w"]  # the nodes have just averaged: 2.5 (1 - 0.8^3) on each
    tensor([1.2200, 1.2200, 1.2200, 1.2200])
    >>> simulation.result(state).params["w"]  # their mean is the run's model
    tensor([1.2200, 1.2200, 1.2200, 1.2200])
    >>> simulation.close()
    """

    def __init__(
        self,
        model: nn.Module,
        strategy: Strategy,
        comm: Collectives,
        *,
        engine: Engine | None = None,
        max_steps: int = 1,
        seed: int = 42,
        minibatch_size: int | None = None,
        num_examples: tuple[int, ...] | None = None,
        limits: tuple[int, ...] | None = None,
        keys: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Prepare the simulation.

        `keys` are the seed and the node, for each row, by which the model's random numbers are keyed; by default `seed`
        and the ids of `comm`.
        """
        check_synchronous(strategy)
        self.engine = Engine(model) if engine is None else engine
        self.strategy = as_strategy(strategy, model)
        self.comm = comm
        self.max_steps, self.seed, self.num_examples = max_steps, seed, num_examples
        self.minibatch_size = minibatch_size
        self.limits = limits  # of each of the K nodes, the most examples of a batch that are its own; None: all are
        self.num_local = len(comm.node_ids)  # L
        self._node_ids: list[int] = comm.node_ids.tolist()
        self._keys: tuple[tuple[int, ...], ...] = tuple(
            zip(*[(seed, node) for node in self._node_ids] if keys is None else keys)
        )

    def init(self, params: Tree | None = None) -> HookState:
        """Return the state before the first step: the model's own parameters on every node, stored once.

        Args:
            params: other initial parameters, `[1 or L, *]`.
        """
        if params is None:
            params = {name: p.detach()[None].clone() for name, p in self.engine.params.items()}
        buffers = {name: b[None].clone() for name, b in self.engine.buffers.items()}
        node_steps = torch.zeros(self.num_local, dtype=torch.long)
        self.comm.ledger.announce(self.comm.num_nodes, {name: payload_bytes(p) for name, p in params.items()})
        optimizer, strategy = self.strategy.init(params, self._context(0, node_steps, inplace=False))
        return HookState(0, params, buffers, optimizer, strategy, node_steps)

    def result(self, state: HookState) -> Result:
        """Return what the run's model is the mean of: the one rule for all that is evaluated, returned and saved."""
        return Result(self.strategy.result(state))

    def close(self) -> None:
        """End the threads of the engine and of the strategy; a later step starts them again."""
        self.engine.close()
        self.strategy.close()

    def step(
        self, state: HookState, batch: Any, *, differentiable: bool = False,
        observe: Callable[[Tree], None] | None = None,
    ) -> tuple[HookState, Metrics]:  # fmt: skip
        """Take one optimizer step on every node.

        The ledger of `comm` does not change: what was sent is in `Metrics.transfers`.

        Args:
            state: is given up, unless `differentiable`.
            batch: leaves `[L, B, ...]`.
            observe: called with the parameters, `[1 or L, *]`, after the optimizer's step and before their exchange. It
                must not change them.
        """
        observe, inplace = observe or (lambda params: None), not differentiable
        self.comm.step = state.step
        with self.comm.ledger.recording() as transfers:
            ctx = self._context(state.step, state.node_steps, inplace)
            state, metrics = self._step(state, batch, ctx, observe)
        return state, metrics._replace(transfers=tuple(transfers))

    def _step(
        self, state: HookState, batch: Any, ctx: Context, observe: Callable[[Tree], None]
    ) -> tuple[HookState, Metrics]:  # fmt: skip
        """Take the step of all nodes."""
        active = self.strategy.active_nodes(ctx)
        if active is not None:
            return self._partial_step(state, batch, active, ctx.replace(active=tuple(active)), observe)

        trained, losses = self._local_step(state, batch, ctx)
        observe(trained.params)
        # 4. What is exchanged of the optimizer's moments and of the parameters.
        return self._exchanged(trained, state.strategy, ctx), self._metrics(losses, ctx)

    def _local_step(self, state: HookState, batch: Any, ctx: Context) -> tuple[HookState, Tensor]:
        """Do what comes before the exchange of parameters; return the losses, too."""
        # 1. Gradients: each node by itself.
        before = self._to_write(state.params, self.num_local)
        local = self._gradients(before, state.buffers, batch, range(self.num_local), state.strategy, ctx)
        before = self._as_stored(before, state.params)
        # 2. What is exchanged of the gradients.
        grads, exchanged = self.strategy.exchange_gradients(local.grads, state.strategy, ctx)
        if ctx.inplace:
            exchanged = nodes.unshared(exchanged, state.strategy, (local.grads, grads))
        # 3. The inner optimizer: each node by itself.
        params, optimizer = self.strategy.optimize(before, grads, state.optimizer, ctx)
        return HookState(state.step, params, local.buffers, optimizer, exchanged, state.node_steps + 1), local.losses

    def _exchanged(self, state: HookState, before: dict[str, Any], ctx: Context) -> HookState:
        """Exchange what the optimizer has left in `state`; `before`: the modules' states at the start of the step."""
        optimizer, modules = exchange_moments(self.strategy, state.optimizer, state.params, state.strategy, ctx)
        params, modules = self.strategy.exchange_parameters(state.params, modules, ctx)
        if ctx.inplace:
            modules = nodes.unshared(modules, before, (state.params,))
            params = own_storage(params, state.params)
        return HookState(state.step + 1, params, state.buffers, optimizer, modules, state.node_steps)

    def _metrics(self, losses: Tensor, ctx: Context) -> Metrics:
        active = None if ctx.active is None else list(ctx.active)
        lr = self.strategy.lr(ctx) if ctx.lr is None else ctx.lr
        return Metrics(losses, lr, active, self.strategy.outer_learning_rate(ctx))

    def _partial_step(
        self, state: HookState, batch: Any, active: list[int], ctx: Context, observe: Callable[[Tree], None]
    ) -> tuple[HookState, Metrics]:
        """Do the same where only some nodes train: phases 1 to 3 on their rows, the others keep their state."""
        chosen = set(active)
        rows = torch.tensor([i for i, node in enumerate(self._node_ids) if node in chosen], dtype=torch.long)
        trained, losses = state, next(iter(state.params.values())).new_full((self.num_local,), torch.nan)
        if len(rows):  # else: all of them are in other processes
            trained, losses = self._train_rows(state, batch, rows, losses, ctx)
        # Per node in every process, also where none has trained: they meet in the exchange.
        params = nodes.widened(trained.params, self.num_local)
        observe(params)
        trained = HookState(
            state.step, params, trained.buffers, trained.optimizer, trained.strategy, trained.node_steps
        )
        return self._exchanged(trained, state.strategy, ctx), self._metrics(losses, ctx)

    def _train_rows(
        self, state: HookState, batch: Any, rows: Tensor, losses: Tensor, ctx: Context
    ) -> tuple[HookState, Tensor]:
        """Return the state and the losses after the nodes in `rows` have taken a step."""
        everyone = (per_node_or_once(state.params, self.num_local), state.buffers)
        params, buffers = nodes.take_rows(everyone[0], rows), nodes.take_rows(everyone[1], rows, copy=False)
        optimizer, modules = (self.strategy.take_rows(x, rows) for x in (state.optimizer, state.strategy))
        batch = nodes.take_rows(batch, rows) if self.num_local > 1 else batch
        part = ctx.of_rows(rows)
        once, params = params, self._to_write(params, len(rows))
        local = self._gradients(params, buffers, batch, rows.tolist(), modules, part)
        params = self._as_stored(params, once)
        grads, exchanged = local.grads, state.strategy
        if self.strategy.exchanges_where_some_rest:
            grads, exchanged = self.strategy.exchange_gradients(grads, exchanged, part)
            exchanged = nodes.unshared(exchanged, state.strategy, (local.grads, grads)) if ctx.inplace else exchanged
        params, optimizer = self.strategy.optimize(params, grads, optimizer, part)
        params, buffers = (
            nodes.put_rows(old, rows, new, self.num_local, ctx.inplace)
            for old, new in zip(everyone, (params, local.buffers))
        )
        optimizer = self.strategy.put_rows(state.optimizer, rows, optimizer, self.num_local, ctx.inplace)
        losses = losses.to(local.losses.dtype).index_copy(0, placed(rows, losses.device), local.losses)
        node_steps = state.node_steps.index_add(0, rows, torch.ones_like(rows))
        return HookState(state.step, params, buffers, optimizer, exchanged, node_steps), losses

    def _gradients(
        self, params: Tree, buffers: Tree, batch: Any, rows: Sequence[int], modules: dict[str, Any], ctx: Context
    ) -> Local:
        """Compute the gradients of the nodes in `rows`, and what the strategy adds to each."""
        mean = self.strategy.mean_gradient and all(p.shape[0] == 1 for p in params.values())
        mean = mean and self.num_local <= self.comm.num_nodes  # configurations have a mean each
        everyone = len(rows) == self.num_local
        seeds, node_ids = self._keys if everyone else ([values[row] for row in rows] for values in self._keys)
        local = self.engine.gradients(
            per_node_or_once(params, len(rows)), buffers, batch, seed=seeds, step=ctx.step, node_ids=node_ids,
            minibatch_size=self.minibatch_size, mean=mean and ctx.inplace, differentiable=not ctx.inplace,
            limits=None if self.limits is None else [self.limits[self._node_ids[row]] for row in rows],
        )  # fmt: skip
        return local._replace(grads=self.strategy.local_gradients(local.grads, params, modules, ctx))

    def _to_write(self, params: Tree, num_nodes: int) -> Tree:
        """Return the parameters, `[L, *]` where the model's forward writes to them: each node to its own."""
        return nodes.widened(params, num_nodes) if self.engine.written else params

    def _as_stored(self, params: Tree, before: Tree) -> Tree:
        """Return what the forward passes have left of parameters, stored once again by nodes that share gradients.

        Raises:
            ValueError: if the nodes have written different values.
        """
        if not self.engine.written or not exchanges_gradients(self.strategy):
            return params

        def once(name: str, x: Tensor, count: int) -> Tensor:
            rows = x.unflatten(0, (count, -1))  # of each configuration
            if not torch.allclose(rows, rows[:, :1], 0, 0, equal_nan=True):
                raise ValueError(
                    f"the model's forward writes to its parameter {name!r}, on each node what its own batch says. "
                    f"{self.strategy!r} exchanges gradients, for which all nodes must have the same parameters: theirs "
                    "would drift apart, as they do in DDP. Take a strategy that exchanges parameters (DiLoCo, FedAvg), "
                    "or write nothing that depends on the batch."
                )
            return rows[:, 0]

        return {name: once(name, x, len(before[name])) for name, x in params.items()}

    def _context(self, step: int, node_steps: Tensor, inplace: bool) -> Context:
        ctx = Context(
            self.comm, step=step, node_steps=node_steps, max_steps=self.max_steps, seed=self.seed, inplace=inplace,
            differentiable=not inplace, num_examples=self.num_examples,
        )  # fmt: skip
        # A strategy written for one rank has its learning rate from the step itself.
        return ctx.replace(lr=self.strategy.lr(ctx)) if self.strategy.pure else ctx
