"""One training step of all nodes: `(state, batch) -> (state, metrics)`, readable from top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vecgym.collectives import Collectives
from vecgym.collectives.base import payload_bytes
from vecgym.core import nodes
from vecgym.core.devices import placed
from vecgym.core.tree import Tree
from vecgym.engine import Engine, Local
from vecgym.engine.exchanges import exchange_moments, own_storage, per_node_or_once
from vecgym.engine.presence import exchanges_gradients
from vecgym.engine.state import Metrics, Result, State
from vecgym.strategy import Context, Strategy
from vecgym.strategy.asynchronous import check_synchronous
from vecgym.strategy.inner import row_by_row
from vecgym.strategy.per_rank import as_strategy

__all__ = ["Metrics", "Simulation", "State", "exchange_moments"]


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
    >>> simulation.length, simulation.result(state).params["w"]  # their mean is the run's model
    (3, tensor([1.2200, 1.2200, 1.2200, 1.2200]))
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
        self._keys: tuple[tuple[int, ...], ...] = tuple(
            zip(*[(seed, node) for node in self._node_ids] if keys is None else keys)
        )
        self._rows = None if self.num_local >= comm.num_nodes else comm.node_ids

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

    def result(self, state: State) -> Result:
        """Return what the run's model is the mean of: the one rule for all that is evaluated, returned and saved."""
        return Result(self.strategy.result(state))

    def close(self) -> None:
        """End the threads of the engine and of the strategy; a later step starts them again."""
        self.engine.close()
        self.strategy.close()

    def step(
        self, state: State, batch: Any, *, differentiable: bool = False,
        observe: Callable[[Tree], None] | None = None,
    ) -> tuple[State, Metrics]:  # fmt: skip
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
        self, state: State, batch: Any, ctx: Context, observe: Callable[[Tree], None]
    ) -> tuple[State, Metrics]:  # fmt: skip
        """Take the step of all nodes."""
        active = self.strategy.active_nodes(ctx)
        if active is not None:
            return self._partial_step(state, batch, active, ctx.replace(active=tuple(active)), observe)

        trained, losses = self._local_step(state, batch, ctx)
        observe(trained.params)
        # 4. What is exchanged of the optimizer's moments and of the parameters.
        return self._exchanged(trained, state.strategy, ctx), self._metrics(losses, ctx)

    def _local_step(self, state: State, batch: Any, ctx: Context) -> tuple[State, Tensor]:
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
        params, optimizer = self._optimize(before, grads, state.optimizer, ctx)
        return State(state.step, params, local.buffers, optimizer, exchanged, state.node_steps + 1), local.losses

    def _exchanged(self, state: State, before: dict[str, Any], ctx: Context) -> State:
        """Exchange what the optimizer has left in `state`; `before`: the modules' states at the start of the step."""
        optimizer, modules = exchange_moments(self.strategy, state.optimizer, state.params, state.strategy, ctx)
        params, modules = self.strategy.exchange_parameters(state.params, modules, ctx)
        if ctx.inplace:
            modules = nodes.unshared(modules, before, (state.params,))
            params = own_storage(params, state.params)
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

    def _train_rows(self, state: State, batch: Any, rows: Tensor, losses: Tensor, ctx: Context) -> tuple[State, Tensor]:
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
        told = lambda i: ctx if i is None else ctx.of_rows(torch.tensor([i]))  # noqa: E731
        return row_by_row(lambda i, p, g, s: self.strategy.optimize(p, g, s, told(i)), params, grads, state)

    def _gradients(
        self, params: Tree, buffers: Tree, batch: Any, rows: Sequence[int], modules: dict[str, Any], ctx: Context
    ) -> Local:
        """Compute the gradients of the nodes in `rows`, and what the strategy adds to each."""
        mean = self.strategy.mean_gradient and all(p.shape[0] == 1 for p in params.values())
        mean = mean and self.num_local <= self.comm.num_nodes and not self.exact  # configurations have a mean each
        everyone = len(rows) == self.num_local
        seeds, node_ids = self._keys if everyone else ([values[row] for row in rows] for values in self._keys)
        step = ctx.node_steps.tolist() if self.own_time else ctx.step
        local = self.engine.gradients(
            per_node_or_once(params, len(rows)), buffers, batch, seed=seeds, step=step, node_ids=node_ids,
            minibatch_size=self.minibatch_size, mean=mean and ctx.inplace, differentiable=not ctx.inplace,
            limits=None if self.limits is None else [self.limits[self._node_ids[row]] for row in rows],
        )  # fmt: skip
        # The mean of the nodes here is not that of all: as each one's gradient it is averaged with the others'.
        grads = nodes.expand(local.grads, len(rows)) if mean and self.num_local < self.comm.num_nodes else local.grads
        return local._replace(grads=self.strategy.local_gradients(grads, params, modules, ctx))

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
            if self.num_local < self.comm.num_nodes or not torch.allclose(rows, rows[:, :1], 0, 0, equal_nan=True):
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
            differentiable=not inplace, num_examples=self.num_examples, rows=self._rows, exact=self.exact,
            own_time=self.own_time,
        )  # fmt: skip
        # A strategy written for one rank has its learning rate from the step itself.
        return ctx.replace(lr=self.strategy.lr(ctx)) if self.strategy.pure else ctx
