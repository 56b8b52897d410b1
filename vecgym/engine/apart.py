"""Steps in which some nodes are absent, in one of several processes.

What the nodes store once, outer parameters say, stays the same in all processes. A process whose nodes are all absent
makes the same calls as the others, with a row that nobody reads; it hands over nothing, and keeps what all get alike.

With a node in each process, a tensor `[1, *]` may be what all store once or what a node has of its own; see
`vecgym.engine.once`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from vecgym.collectives.distributed import DistributedCollectives
from vecgym.collectives.topology import Links
from vecgym.core import nodes, tree
from vecgym.core.devices import placed
from vecgym.core.tree import Path, Tree
from vecgym.engine import Local
from vecgym.engine.presence import Presence
from vecgym.engine.returning import messages, sources_of
from vecgym.engine.rows import replaced
from vecgym.engine.simulation import MAX_PARTS, Metrics, Simulation, State
from vecgym.strategy import Context


class PartSimulation(Simulation):
    """The training of the nodes of one of several processes, where nodes may be absent; see the module."""

    comm: DistributedCollectives
    beside = False
    looks_on = False  # all nodes here are absent
    here: tuple[int, ...] = ()  # the places of those present among the nodes here

    def __init__(self, *args: Any, presence: Presence, **settings: Any) -> None:
        super().__init__(*args, presence=presence, **settings)
        found = self.stored_once
        if found is None:
            raise ValueError(
                f"availability in several processes: {self.strategy!r} looks at the values of what it exchanges, so "
                "that it is not known beforehand what all nodes store once. Leave availability out, or give "
                'backend="stacked".'
            )
        self.once = found

    def _step_of_present(
        self, presence: Presence, state: State, batch: Any, limits: Sequence[int] | None, inplace: bool,
        observe: Callable[[Tree], None],
    ) -> tuple[State, Metrics]:  # fmt: skip
        state = self._rejoined(state, presence, inplace)
        there, training = presence.present(state.step), presence.training(state.step)
        ids = tuple(range(self.comm.num_nodes)) if there is None else there
        part = copy.copy(self if there is None else self._part(ids))
        part.strategy, part.comm.step = self.strategy, state.step
        rows = torch.arange(self.num_local) if there is None else torch.tensor(part.here or [0])
        if limits is not None:
            own = list(limits) if len(limits) == len(rows) else [limits[row] for row in rows]
            of_node = dict(zip(part._node_ids, own))
            part.limits = tuple(of_node.get(node, 0) for node in range(len(ids)))
        if there is None:
            ctx = part._context(state.step, state.node_steps, inplace)
            after, metrics = part._step(state, batch, ctx, observe, training)
            return after, self._told(metrics, rows, ids, ctx)

        if not part.looks_on and next(tree.leaves(batch)).shape[0] > len(rows):
            batch = nodes.take_rows(batch, rows)
        before = self._taken(state, rows)
        training = None if training is None else tuple(ids.index(node) for node in training)
        ctx = part._context(state.step, before.node_steps, inplace)

        def seen(params: Tree) -> None:
            observe(self._put(part, rows, params, state.params, self.once.has, inplace=False))

        after, metrics = part._step(before, batch, ctx, seen, training)
        told = self._told(metrics, rows[: len(part.here)], ids, ctx)
        return self._merged(part, rows, state, before, after, inplace), told

    def _part(self, ids: tuple[int, ...]) -> PartSimulation:
        if ids not in self._parts:
            while len(self._parts) >= MAX_PARTS:
                self._parts.pop(next(iter(self._parts)))
            there = set(ids)
            part = copy.copy(self)
            part.comm = self.comm.among(ids)
            part.here = tuple(i for i, node in enumerate(self._node_ids) if node in there)
            part.looks_on, part.num_local = not part.here, max(1, len(part.here))
            part._node_ids = part.comm.node_ids.tolist() if part.here else []
            part._keys = tuple(tuple(values[i] for i in part.here) for values in self._keys)
            part._rows = part.comm.ids
            part.num_examples, part.limits = (
                None if values is None else tuple(values[i] for i in ids) for values in (self.num_examples, self.limits)
            )
            self._parts[ids] = part
        found = self._parts[ids]
        assert isinstance(found, PartSimulation)
        return found

    def _gradients(
        self, params: Tree, buffers: Tree, batch: Any, rows: Sequence[int], modules: dict[str, Any], ctx: Context
    ) -> Local:
        if not self.looks_on:
            return super()._gradients(params, buffers, batch, rows, modules, ctx)
        some = next(iter(params.values()))
        return Local(tree.map(torch.zeros_like, params), some.new_full((1,), torch.nan), buffers)

    def _taken(self, state: State, rows: Tensor) -> State:
        """Return a copy of the state of some nodes."""
        params, buffers, optimizer, modules = (
            nodes.take_rows(x, rows) for x in (state.params, state.buffers, state.optimizer, state.strategy)
        )
        return State(state.step, params, buffers, optimizer, modules, state.node_steps[rows])

    def _merged(
        self, part: PartSimulation, rows: Tensor, state: State, before: State, after: State, inplace: bool
    ) -> State:
        """Return the state with that of the nodes present replaced; the others keep theirs."""

        def put(new: Any, old: Any, once: Callable[[Path], bool], taken: Any = None) -> Any:
            return self._put(part, rows, new, old, once, inplace, taken)

        params = put(after.params, state.params, self.once.has)
        optimizer = put(after.optimizer, state.optimizer, self.once.has)
        buffers = put(after.buffers, state.buffers, lambda path: False)
        modules = put(after.strategy, state.strategy, self.once.modules.__contains__, before.strategy)
        counts = state.node_steps if part.looks_on else state.node_steps.index_copy(0, rows, after.node_steps)
        return State(after.step, params, buffers, optimizer, modules, counts)

    def _put(
        self, part: PartSimulation, rows: Tensor, new: Any, old: Any, once: Callable[[Path], bool], inplace: bool,
        taken: Any = None,
    ) -> Any:  # fmt: skip
        """Put the rows of those present among those of the nodes here, `[L, *]`; what is stored once replaces it."""
        L = self.num_local

        def put(x: Tensor, before: Tensor | None) -> Tensor:
            before = torch.zeros_like(x[:1]) if before is None else before
            wide = before if inplace and len(before) == L else before.repeat_interleave(L // len(before), 0)
            if part.looks_on:
                return wide
            return wide.index_copy_(0, placed(rows, wide.device), x.expand(len(rows), *x.shape[1:]))

        return replaced(new, old, lambda path, x, before: once(path), put, taken)

    def _told(self, metrics: Metrics, rows: Tensor, ids: Sequence[int], ctx: Context) -> Metrics:
        """Return what a step has measured, for the nodes here: nan for those absent, rates too."""
        index = placed(rows, metrics.losses.device)
        losses = metrics.losses.new_full((self.num_local,), torch.nan)
        losses = losses.index_copy(0, index, metrics.losses[: len(rows)])
        lr = torch.full((self.num_local,), torch.nan, dtype=torch.float64)
        given = torch.as_tensor(ctx.own(metrics.lr), dtype=torch.float64).detach().cpu()
        lr[rows] = given if given.dim() == 0 else given[: len(rows)]
        everyone = len(ids) == self.comm.num_nodes
        active = (None if everyone else list(ids)) if metrics.active is None else [ids[i] for i in metrics.active]
        return metrics._replace(losses=losses, active=active, lr=lr, num_present=len(ids))

    def _rejoined(self, state: State, presence: Presence, inplace: bool) -> State:
        """Return the state before the step, with the parameters of those that return, which are sent to them."""
        back = presence.returning(state.step)
        if not back or presence.rejoin == "own":
            return state
        sources, shared = sources_of(back, presence, state.step), self._shared(presence, state)
        params = state.params
        if presence.rejoin == "shared":
            before = presence.row(state.step - 1).nonzero().flatten().tolist()
            wide = {name: params[name] for name in shared.apart(params, self.once.params)}
            params = {**params, **shared.outer, **self._with_mean(wide, before, sources[0])}
        sent = dict(params)
        for names, among, counted in messages(list(params), shared, back, presence, state.step):
            receivers, senders = torch.tensor(among), torch.tensor([sources[back.index(node)] for node in among])
            order = torch.arange(self.comm.num_nodes).index_copy(0, receivers, senders)
            with nullcontext() if counted else self.comm.ledger.recording():
                self.comm._announce("permute", {name: sent[name] for name in names}, Links.of(senders, receivers))
            sent |= self.comm._apply(
                {name: sent[name] for name in names}, lambda comm, x: comm._permute(x, order)  # noqa: B023
            )  # fmt: skip
        here = [i for i, node in enumerate(self._node_ids) if node in set(back)]
        if not here:
            return state
        rows = torch.tensor(here)
        moved = {name: nodes.take_rows({"": sent[name]}, rows)[""] for name in params if name not in self.once.params}
        own = nodes.put_rows(state.params, rows, moved, self.num_local, inplace)
        return State(
            state.step, {**state.params, **own}, state.buffers, state.optimizer, state.strategy, state.node_steps
        )  # fmt: skip

    def _with_mean(self, wide: Tree, members: list[int], node: int) -> Tree:
        """Return parameters with the mean of some nodes in place of a node's; of equal ones it is exact."""
        if not wide or len(members) == 1:
            return wide
        some = self.comm.among(members)
        here = [i for i, member in enumerate(self._node_ids) if member in set(members)]
        some.step = self.comm.step
        some._announce("mean", wide)
        given = nodes.take_rows(wide, torch.tensor(here or [0]))
        mean = some._apply(given, lambda comm, x: comm._sum(x, None, True) if comm.native else nodes.means(x, 1))
        if node not in self._node_ids:
            return wide
        row = torch.tensor([self._node_ids.index(node)])
        put = {name: x[:1] for name, x in mean.items()}
        found: Tree = nodes.put_rows(wide, row, put, self.num_local, inplace=False)
        return found
