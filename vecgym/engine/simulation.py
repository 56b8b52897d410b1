"""One training step of all nodes: `(state, batch) -> (state, metrics)`, readable from top to bottom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vecgym.collectives import Collectives
from vecgym.collectives.ledger import Transfer
from vecgym.core import nodes, tree
from vecgym.core.tree import Tree
from vecgym.engine import Engine, Local
from vecgym.strategy import Context, Strategy
from vecgym.strategy.per_rank import PerRankStrategy, is_per_rank


@dataclass(frozen=True)
class State:
    """All that evolves in a run. A node dimension of size 1 means "the same on every node".

    Attributes:
        step: optimizer steps done.
        params: trainable parameters, `[1 or L, *]`.
        buffers: `[1 or L, *]`.
        optimizer: the inner optimizer's state.
        strategy: the communication modules' states.

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


class Metrics(NamedTuple):
    """What a step observed.

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
    >>> class Line(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = nn.Parameter(torch.zeros(()))
    ...     def forward(self, x):
    ...         return (self.w - x).square().mean()
    >>> strategy = FedAvgStrategy("sgd", H=3, lr=0.1)
    >>> simulation = Simulation(Line(), strategy, StackedCollectives(4), max_steps=3)
    >>> state = simulation.init()
    >>> for _ in range(3):
    ...     state, metrics = simulation.step(state, torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
    >>> metrics.losses
    tensor([0.4096, 1.6384, 3.6864, 6.5536])
    >>> state.params["w"]  # the nodes have just averaged: 2.5 (1 - 0.8^3) on each
    tensor([1.2200, 1.2200, 1.2200, 1.2200])
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
    ) -> None:
        """With `exact`, the bits of a node's own work do not depend on which other nodes are in this process.

        Each node has a gradient and an optimizer step of its own, never one for all of them. The engine must compute
        node by node too: `Engine(engine="loop")` or `chunk_size=1`.
        """
        self.engine = Engine(model) if engine is None else engine
        self.strategy = PerRankStrategy(strategy, model) if is_per_rank(strategy) else strategy
        self.comm = comm
        self.max_steps = max_steps
        self.seed = seed
        self.minibatch_size = minibatch_size
        self.num_examples = num_examples
        self.limits = limits  # of each of the K nodes, the most examples of a batch that are its own; None: all are
        self.exact = exact
        self.num_local = len(comm.node_ids)  # L
        self._node_ids = comm.node_ids.tolist()

    def init(self, params: Tree | None = None) -> State:
        """The state before the first step: the model's own parameters on every node, stored once.

        Args:
            params: other initial parameters, `[1 or L, *]`.
        """
        if params is None:
            params = {name: p.detach()[None].clone() for name, p in self.engine.params.items()}
        buffers = {name: b[None].clone() for name, b in self.engine.buffers.items()}
        optimizer, strategy = self.strategy.init(params, self._context(0, inplace=False))
        return State(0, params, buffers, optimizer, strategy)

    def step(
        self,
        state: State,
        batch: Any,
        *,
        differentiable: bool = False,
        observe: Callable[[Tree], None] | None = None,
    ) -> tuple[State, Metrics]:
        """One optimizer step of every node.

        The ledger of `comm` stays as it is: what was sent is in `Metrics.transfers`.

        Args:
            state: is given up, unless `differentiable`.
            batch: leaves `[L, B, ...]`.
            observe: is called with the parameters, `[1 or L, *]`, as the optimizer leaves them and before they are
                exchanged. It must not change them.
        """
        ctx = self._context(state.step, inplace=not differentiable)
        self.comm.step = state.step
        with self.comm.ledger.recording() as transfers:
            state, metrics = self._step(state, batch, ctx, observe or (lambda params: None))
        return state, metrics._replace(transfers=tuple(transfers))

    def _step(self, state: State, batch: Any, ctx: Context, observe: Callable[[Tree], None]) -> tuple[State, Metrics]:
        active = self.strategy.active_nodes(ctx)
        if active is not None:
            return self._partial_step(state, batch, active, ctx, observe)

        # 1. Gradients: each node by itself.
        local = self._gradients(state.params, state.buffers, batch, self._node_ids, state.strategy, ctx)
        # 2. What is exchanged of the gradients.
        grads, exchanged = self.strategy.exchange_gradients(local.grads, state.strategy, ctx)
        if ctx.inplace:
            exchanged = nodes.unshared(exchanged, state.strategy, (local.grads, grads))
        # 3. The inner optimizer: each node by itself.
        params, optimizer = self._optimize(state.params, grads, state.optimizer, ctx)
        observe(params)
        # 4. What is exchanged of the parameters.
        shared, exchanged = self.strategy.exchange_parameters(params, exchanged, ctx)

        if ctx.inplace:
            exchanged = nodes.unshared(exchanged, state.strategy, (params,))
            params = _own_storage(shared, params)
        else:
            params = shared
        return State(state.step + 1, params, local.buffers, optimizer, exchanged), Metrics(
            local.losses, self.strategy.lr(ctx), None, self.strategy.outer_learning_rate(ctx)
        )

    def _partial_step(
        self, state: State, batch: Any, active: list[int], ctx: Context, observe: Callable[[Tree], None]
    ) -> tuple[State, Metrics]:
        """The same step when only some nodes train: phases 1 and 3 on their rows, the others keep their state."""
        chosen = set(active)
        rows = torch.tensor([i for i, node in enumerate(self._node_ids) if node in chosen], dtype=torch.long)
        params, buffers, optimizer = state.params, state.buffers, state.optimizer
        losses = next(iter(params.values())).new_full((self.num_local,), torch.nan)
        if len(rows):  # else: all of them are in other processes
            params, buffers, optimizer, losses = self._train_rows(state, batch, rows, losses, ctx)
        # Per node in every process, also where none has trained: they meet in the exchange.
        params = tree.map(lambda p: _widened(p, self.num_local), params)
        observe(params)
        shared, exchanged = self.strategy.exchange_parameters(params, state.strategy, ctx)
        if ctx.inplace:
            exchanged = nodes.unshared(exchanged, state.strategy, (params,))
            params = _own_storage(shared, params)
        else:
            params = shared
        return State(state.step + 1, params, buffers, optimizer, exchanged), Metrics(
            losses, self.strategy.lr(ctx), active, self.strategy.outer_learning_rate(ctx)
        )

    def _train_rows(
        self, state: State, batch: Any, rows: Tensor, losses: Tensor, ctx: Context
    ) -> tuple[Tree, Tree, dict[str, Any], Tensor]:
        """Parameters, buffers, optimizer state and losses after the nodes in `rows` have taken a step."""
        everyone = (state.params, state.buffers, state.optimizer)
        params, buffers, optimizer = (nodes.take_rows(x, rows) for x in everyone)
        modules = nodes.take_rows(state.strategy, rows)
        batch = tree.map_leaves(lambda x: x[rows.to(x.device)], batch)
        part = replace(ctx, rows=rows if ctx.rows is None else ctx.rows[rows])
        local = self._gradients(params, buffers, batch, [self._node_ids[i] for i in rows.tolist()], modules, part)
        params, optimizer = self._optimize(params, local.grads, optimizer, part)
        params, buffers, optimizer = (
            nodes.put_rows(old, rows, new, self.num_local, ctx.inplace)
            for old, new in zip(everyone, (params, local.buffers, optimizer))
        )
        losses = losses.to(local.losses.dtype).index_copy(0, rows.to(losses.device), local.losses)
        return params, buffers, optimizer, losses

    def _optimize(self, params: Tree, grads: Tree, state: dict[str, Any], ctx: Context) -> tuple[Tree, dict[str, Any]]:
        """The inner optimizer's step of all nodes, or with `exact` of one after the other."""
        num_rows = max(x.shape[0] for x in tree.leaves([params, grads, state]))
        if not self.exact or num_rows == 1 or isinstance(self.strategy, PerRankStrategy):
            return self.strategy.optimize(params, grads, state, ctx)
        # A kernel rounds the last values of a tensor, which fill no vector register, in another way than the others:
        # which values these are must not depend on the other nodes.
        rows = torch.arange(num_rows) if ctx.rows is None else ctx.rows
        found = []
        for i in range(num_rows):
            row = torch.tensor([i])
            p, g, s = (nodes.take_rows(x, row) for x in (params, grads, state))
            found.append(self.strategy.optimize(p, g, s, replace(ctx, rows=rows[i : i + 1])))
        return nodes.join_rows([p for p, _ in found]), nodes.join_rows([s for _, s in found])

    def _gradients(
        self, params: Tree, buffers: Tree, batch: Any, node_ids: list[int], modules: dict[str, Any], ctx: Context
    ) -> Local:
        mean = self.strategy.mean_gradient and all(p.shape[0] == 1 for p in params.values())
        mean = mean and self.num_local <= self.comm.num_nodes  # several configurations have a mean each
        mean = mean and not self.exact
        local = self.engine.gradients(
            params,
            buffers,
            batch,
            seed=self.seed,
            step=ctx.step,
            node_ids=node_ids,
            minibatch_size=self.minibatch_size,
            mean=mean and ctx.inplace,
            differentiable=not ctx.inplace,
            limits=None if self.limits is None else [self.limits[node] for node in node_ids],
        )
        # The mean of the nodes here is not that of all: as a gradient of each of them it is averaged with the others'.
        grads = (
            nodes.expand(local.grads, len(node_ids)) if mean and self.num_local < self.comm.num_nodes else local.grads
        )
        return local._replace(grads=self.strategy.local_gradients(grads, params, modules, ctx))

    def _context(self, step: int, inplace: bool) -> Context:
        everyone = self.num_local >= self.comm.num_nodes
        rows = None if everyone else self.comm.node_ids
        return Context(
            self.comm, step, self.max_steps, self.seed, inplace,
            differentiable=not inplace, num_examples=self.num_examples, rows=rows, exact=self.exact,
        )  # fmt: skip


def _widened(x: Tensor, num_nodes: int) -> Tensor:
    """`[1 or L, *] -> [L, *]`, in storage of its own."""
    return x if x.shape[0] == num_nodes else x.expand(num_nodes, *x.shape[1:]).clone()


def _own_storage(shared: Tree, params: Tree) -> Tree:
    """What an exchange gave back, in the storage of the parameters that it was given.

    An exchange may return a tensor that it also keeps in its state, such as outer parameters; the next step
    overwrites the parameters, so they must not be that tensor. And memory that is in use costs less than new.
    """

    def settle(new: Tensor, own: Tensor) -> Tensor:
        if new is own:
            return own
        if new.shape[0] > own.shape[0]:
            return new.clone()
        return own.copy_(new.clone() if new._is_view() and new._base is own else new)

    with torch.no_grad():
        return tree.map(settle, shared, params)
