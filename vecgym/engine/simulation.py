"""One training step of all nodes: `(state, batch) -> (state, metrics)`, readable from top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vecgym.collectives import Collectives
from vecgym.collectives.base import payload_bytes
from vecgym.collectives.ledger import Transfer
from vecgym.core import nodes, tree
from vecgym.core.devices import placed
from vecgym.core.tree import Tree
from vecgym.engine import Engine, Local
from vecgym.strategy import Context, Strategy
from vecgym.strategy.asynchronous import check_synchronous
from vecgym.strategy.base import moments_in, with_moments
from vecgym.strategy.per_rank import as_strategy


@dataclass(frozen=True)
class State:
    """All that evolves in a run. A node dimension of size 1 means "the same on every node".

    Where the L nodes are those of C configurations, parameters may be `[C, *]`: one row for L / C nodes each.

    Attributes:
        step: optimizer steps done.
        params: trainable parameters, `[1 or L, *]`.
        buffers: `[1 or L, *]`.
        optimizer: the inner optimizer's state.
        strategy: the communication modules' states.
        node_steps: optimizer steps that each node has done, `[L]`.

    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.strategy import DiLoCoStrategy
    >>> state = Simulation(nn.Linear(2, 1), DiLoCoStrategy("sgd", lr=0.1), StackedCollectives(4)).init()
    >>> state.step, state.params["weight"].shape, state.strategy["0"]["params"]["bias"].shape
    (0, torch.Size([1, 1, 2]), torch.Size([1, 1]))
    """

    step: int
    params: Tree
    buffers: Tree
    optimizer: dict[str, Any]
    strategy: dict[str, Any]
    node_steps: Tensor


class Metrics(NamedTuple):
    """The measurements of a step.

    >>> Metrics(losses=torch.tensor([1.0, 3.0]), lr=0.1).losses.mean()
    tensor(2.)
    """

    losses: Tensor  # [L], before the update; nan where a node did not train
    lr: float | Tensor
    active: list[int] | None = None  # the nodes that trained; None: all
    outer_lr: float | Tensor | None = None  # of the strategy's other optimizer, if it has one
    transfers: tuple[Transfer, ...] = ()  # what was sent in the step, in order


class Simulation:
    """The training of one model by `strategy` on the nodes of `comm`: all nodes, or those of this process.

    `step` is a pure function of the state and the batch when `differentiable`. Otherwise it takes the state over
    ("donation"): it may overwrite the tensors in it, and the caller must use only the state that it gives back.

    Example: three steps of four nodes.

    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.strategy import FedAvgStrategy
    >>> from vecgym.models import Line
    >>> strategy = FedAvgStrategy("sgd", H=3, lr=0.1)
    >>> simulation = Simulation(Line(), strategy, StackedCollectives(4), max_steps=3)
    >>> state = simulation.init()
    >>> for _ in range(3):
    ...     state, metrics = simulation.step(state, torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
    >>> metrics.losses
    tensor([0.4096, 1.6384, 3.6864, 6.5536])
    >>> state.params["w"]  # the nodes have just averaged: 2.5 (1 - 0.8^3) on each
    tensor([1.2200, 1.2200, 1.2200, 1.2200])
    >>> simulation.length
    3
    >>> simulation.close()
    """

    asynchronous = False  # see `vecgym.engine.asynchronous`

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
        exact: bool = False,
        keys: Sequence[tuple[int, int]] | None = None,
        own_time: bool = False,
    ) -> None:
        """With `exact`, the bits of a node's own work do not depend on which other nodes are in this process.

        Each node has a gradient and an optimizer step of its own, never one for all of them. The engine must compute
        node by node too: `Engine(engine="loop")` or `chunk_size=1`.

        `keys` are the seed and the node, for each row, by which the model's random numbers are keyed; by default `seed`
        and the ids of `comm`.

        With `own_time`, learning rates and the model's random numbers go by the number of steps that each node has done
        itself.
        """
        if not self.asynchronous:
            check_synchronous(strategy)
        self.engine = Engine(model) if engine is None else engine
        self.strategy = as_strategy(strategy, model)
        self.comm = comm
        self.max_steps, self.seed, self.num_examples, self.exact = max_steps, seed, num_examples, exact
        self.minibatch_size = minibatch_size
        self.own_time = own_time
        self.limits = limits  # of each of the K nodes, the most examples of a batch that are its own; None: all are
        self.num_local = len(comm.node_ids)  # L
        self._node_ids: list[int] = comm.node_ids.tolist()
        # Seeds and nodes, apart: a tuple of a thousand nodes is not made anew in every step.
        self._keys = tuple(zip(*[(seed, node) for node in self._node_ids] if keys is None else keys))

    def init(self, params: Tree | None = None) -> State:
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
        return State(0, params, buffers, optimizer, strategy, node_steps)

    @property
    def length(self) -> int:
        """How many times the state of a whole run advances."""
        return self.max_steps

    def close(self) -> None:
        """End the threads of the engine and of the strategy; a later step starts them again."""
        self.engine.close()
        self.strategy.close()

    def step(
        self, state: State, batch: Any, *, differentiable: bool = False, observe: Callable[[Tree], None] | None = None
    ) -> tuple[State, Metrics]:
        """Take one optimizer step on every node.

        The ledger of `comm` does not change: what was sent is in `Metrics.transfers`.

        Args:
            state: is given up, unless `differentiable`.
            batch: leaves `[L, B, ...]`.
            observe: called with the parameters, `[1 or L, *]`, after the optimizer's step and before their exchange. It
                must not change them.
        """
        ctx = self._context(state.step, state.node_steps, inplace=not differentiable)
        self.comm.step = state.step
        with self.comm.ledger.recording() as transfers:
            state, metrics = self._step(state, batch, ctx, observe or (lambda params: None))
        return state, metrics._replace(transfers=tuple(transfers))

    def _step(self, state: State, batch: Any, ctx: Context, observe: Callable[[Tree], None]) -> tuple[State, Metrics]:
        active = self.strategy.active_nodes(ctx)
        if active is not None:
            return self._partial_step(state, batch, active, replace(ctx, active=tuple(active)), observe)

        # 1. Gradients: each node by itself.
        local = self._gradients(state.params, state.buffers, batch, range(self.num_local), state.strategy, ctx)
        # 2. What is exchanged of the gradients.
        grads, exchanged = self.strategy.exchange_gradients(local.grads, state.strategy, ctx)
        if ctx.inplace:
            exchanged = nodes.unshared(exchanged, state.strategy, (local.grads, grads))
        # 3. The inner optimizer: each node by itself.
        params, optimizer = self._optimize(state.params, grads, state.optimizer, ctx)
        observe(params)
        # 4. What is exchanged of the optimizer's moments and of the parameters.
        trained = State(state.step, params, local.buffers, optimizer, exchanged, state.node_steps + 1)
        return self._exchanged(trained, state.strategy, ctx), self._metrics(local.losses, ctx)

    def _exchanged(self, state: State, before: dict[str, Any], ctx: Context) -> State:
        """Exchange what the optimizer has left in `state`; `before`: the modules' states at the start of the step."""
        optimizer, modules = exchange_moments(self.strategy, state.optimizer, state.params, state.strategy, ctx)
        params, modules = self.strategy.exchange_parameters(state.params, modules, ctx)
        if ctx.inplace:
            modules = nodes.unshared(modules, before, (state.params,))
            params = _own_storage(params, state.params)
        return State(state.step + 1, params, state.buffers, optimizer, modules, state.node_steps)

    def _metrics(self, losses: Tensor, ctx: Context) -> Metrics:
        active = None if ctx.active is None else list(ctx.active)
        lr = self.strategy.lr(ctx) if ctx.lr is None else ctx.lr
        return Metrics(losses, lr, active, self.strategy.outer_learning_rate(ctx))

    def _partial_step(
        self, state: State, batch: Any, active: list[int], ctx: Context, observe: Callable[[Tree], None]
    ) -> tuple[State, Metrics]:
        """Do the same where only some nodes train: phases 1 to 3 on their rows, the others keep their state."""
        chosen = set(active)
        rows = torch.tensor([i for i, node in enumerate(self._node_ids) if node in chosen], dtype=torch.long)
        trained, losses = state, next(iter(state.params.values())).new_full((self.num_local,), torch.nan)
        if len(rows):  # else: all of them are in other processes
            trained, losses = self._train_rows(state, batch, rows, losses, ctx)
        # Per node in every process, also where none has trained: they meet in the exchange.
        params = nodes.widened(trained.params, self.num_local)
        observe(params)
        trained = State(state.step, params, trained.buffers, trained.optimizer, trained.strategy, trained.node_steps)
        return self._exchanged(trained, state.strategy, ctx), self._metrics(losses, ctx)

    def _train_rows(
        self, state: State, batch: Any, rows: Tensor, losses: Tensor, ctx: Context
    ) -> tuple[State, Tensor]:  # fmt: skip
        """Return the state and the losses after the nodes in `rows` have taken a step."""
        everyone = (_per_node_or_once(state.params, self.num_local), state.buffers)
        params, buffers = nodes.take_rows(everyone[0], rows), nodes.take_rows(everyone[1], rows, copy=False)
        optimizer, modules = (self.strategy.take_rows(x, rows) for x in (state.optimizer, state.strategy))
        batch = nodes.take_rows(batch, rows) if self.num_local > 1 else batch
        part = ctx.of_rows(rows)
        local = self._gradients(params, buffers, batch, rows.tolist(), modules, part)
        grads, exchanged = local.grads, state.strategy
        if self.strategy.exchanges_where_some_rest:
            grads, exchanged = self.strategy.exchange_gradients(grads, exchanged, part)
            exchanged = nodes.unshared(exchanged, state.strategy, (local.grads, grads)) if ctx.inplace else exchanged
        params, optimizer = self._optimize(params, grads, optimizer, part)
        params, buffers = (
            nodes.put_rows(old, rows, new, self.num_local, ctx.inplace)
            for old, new in zip(everyone, (params, local.buffers))
        )
        optimizer = self.strategy.put_rows(state.optimizer, rows, optimizer, self.num_local, ctx.inplace)
        losses = losses.to(local.losses.dtype).index_copy(0, placed(rows, losses.device), local.losses)
        node_steps = state.node_steps.index_add(0, rows, torch.ones_like(rows))
        return State(state.step, params, buffers, optimizer, exchanged, node_steps), losses

    def _optimize(self, params: Tree, grads: Tree, state: dict[str, Any], ctx: Context) -> tuple[Tree, dict[str, Any]]:
        """Take the inner optimizer's step on all nodes, with `exact` on one after the other."""
        if not self.exact or not self.strategy.pure:
            return self.strategy.optimize(params, grads, state, ctx)
        num_rows = max(x.shape[0] for x in tree.leaves([params, grads, state]))
        if num_rows == 1:
            return self.strategy.optimize(params, grads, state, ctx)
        # A kernel rounds the last values of a tensor, which fill no vector register, in another way than the others:
        # which values these are must not depend on the other nodes.
        results = []
        for i in range(num_rows):
            row = torch.tensor([i])
            p, g, s = (nodes.take_rows(x, row) for x in (params, grads, state))
            results.append(self.strategy.optimize(p, g, s, ctx.of_rows(row)))
        return nodes.join_rows([p for p, _ in results]), nodes.join_rows([s for _, s in results])

    def _gradients(
        self, params: Tree, buffers: Tree, batch: Any, rows: Sequence[int], modules: dict[str, Any], ctx: Context
    ) -> Local:
        """Compute the gradients of the nodes in `rows`, and what the strategy adds to each."""
        mean = self.strategy.mean_gradient and all(p.shape[0] == 1 for p in params.values())
        mean = mean and self.num_local <= self.comm.num_nodes  # several configurations have a mean each
        mean = mean and not self.exact
        everyone = len(rows) == self.num_local
        seeds, node_ids = self._keys if everyone else ([values[row] for row in rows] for values in self._keys)
        step = ctx.node_steps.tolist() if ctx.own_time else ctx.step
        local = self.engine.gradients(
            _per_node_or_once(params, len(rows)), buffers, batch, seed=seeds, step=step, node_ids=node_ids,
            minibatch_size=self.minibatch_size, mean=mean and ctx.inplace, differentiable=not ctx.inplace,
            limits=None if self.limits is None else [self.limits[self._node_ids[row]] for row in rows],
        )  # fmt: skip
        # The mean of the nodes here is not that of all: as a gradient of each of them it is averaged with the others'.
        grads = nodes.expand(local.grads, len(rows)) if mean and self.num_local < self.comm.num_nodes else local.grads
        return local._replace(grads=self.strategy.local_gradients(grads, params, modules, ctx))

    def _context(self, step: int, node_steps: Tensor, inplace: bool) -> Context:
        rows = None if self.num_local >= self.comm.num_nodes else self.comm.node_ids
        ctx = Context(
            self.comm, step=step, node_steps=node_steps, max_steps=self.max_steps, seed=self.seed, inplace=inplace,
            differentiable=not inplace, num_examples=self.num_examples, rows=rows, exact=self.exact,
            own_time=self.own_time,
        )  # fmt: skip
        # A strategy written for one rank has its learning rate from the step itself.
        return replace(ctx, lr=self.strategy.lr(ctx)) if self.strategy.pure else ctx


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
    return with_moments(exchanged, {slot: _own_storage(new[slot], own) for slot, own in given.items()}), changed


def _per_node_or_once(params: Tree, num_nodes: int) -> Tree:
    """Expand `[C, *]` to `[L, *]`: the engine takes parameters `[1 or L, *]`."""
    shared = any(1 < p.shape[0] < num_nodes for p in params.values())
    return nodes.expand(params, num_nodes) if shared else params


def _own_storage(shared: Tree, params: Tree) -> Tree:
    """Move what an exchange has returned to the storage of the parameters that it was given.

    An exchange may return a tensor that it also keeps in its state, such as outer parameters; the next step overwrites
    the parameters, so they must not be that tensor. And memory in use costs less than new memory.
    """

    def settle(new: Tensor, own: Tensor) -> Tensor:
        if new is own:
            return own
        if new.shape[0] > own.shape[0]:
            return new.clone()
        return own.copy_(new.clone() if new._is_view() and new._base is own else new)

    with torch.no_grad():
        return tree.map(settle, shared, params)
