"""Asynchronous training without a server; see `vecgym.strategy.ADPSGDStrategy`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from vecgym.collectives.topology import Links
from vecgym.core import nodes, tree
from vecgym.core.devices import placed
from vecgym.core.tree import Tree
from vecgym.engine.asynchronous import AsyncSimulation, Handling
from vecgym.engine.events import Arrival, Averaged, Restart, Update
from vecgym.engine.local import of_each
from vecgym.engine.simulation import State


class ADPSGDSimulation(AsyncSimulation):
    """The training of K models that average in pairs.

    Its `State` has the nodes' parameters, `[K, *]`, as `params`, and as `step` the number of updates. Of the strategy
    there are: `starts`, with which each node's present step began; `grads` there, and `losses`; `done`, whether these
    are computed, `[K]`.
    """

    @property
    def handling(self) -> type[Handling]:
        return _Handling

    def init(self, params: Tree | None = None) -> State:
        state = super().init(params)
        kept = {name: state.strategy[name] for name in ("starts", "losses", "done")}
        strategy = {**kept, "grads": state.strategy["moved"]}
        return replace(state, params=of_each(state.params, self.num_local), strategy=strategy)

    def rounds(self, state: State, rows: Sequence[int], inplace: bool) -> State:
        """Compute the gradients of some nodes, given by their ids, in one stacked call."""
        if self.engine.written:
            raise ValueError(
                f"the model's forward writes to its parameter {min(self.engine.written)!r}: in AD-PSGD a node's "
                "parameters change while its gradient is computed, so that it is not known which."
            )
        K, was, order = self.num_local, state.strategy, sorted(rows)
        chosen, counts = torch.tensor(order), state.node_steps.tolist()
        start, buffers = (nodes.take_rows(x, chosen) for x in (was["starts"], state.buffers))
        found = self.gradients(start, buffers, order, [counts[node] for node in order], inplace)
        losses = was["losses"].to(found.losses.dtype)
        strategy = {
            **was,
            "grads": nodes.put_rows(was["grads"], chosen, found.grads, K, inplace),
            "losses": losses.index_copy(0, placed(chosen, losses.device), found.losses),
            "done": was["done"].index_fill(0, chosen, True),
        }
        buffers = nodes.put_rows(state.buffers, chosen, found.buffers, K, inplace)
        node_steps = state.node_steps.index_add(0, chosen, torch.ones_like(chosen))
        return replace(state, buffers=buffers, strategy=strategy, node_steps=node_steps)


class _Handling(Handling):
    handlers: ClassVar[dict[type, str]] = {**Handling.handlers, Averaged: "averaged"}

    def arrival(self, event: Arrival) -> None:
        """Apply the gradient of where the step began to what the node's parameters are by now."""
        self.compute(event.node)
        simulation, state, row = self.simulation, self.state, torch.tensor([event.node])
        ctx = simulation.context([event.node], [event.first_step], self.inplace)
        params, grads = (nodes.take_rows(x, row) for x in (state.params, state.strategy["grads"]))
        own = simulation.strategy.take_rows(state.optimizer, row)
        params, own = simulation._optimize(params, grads, own, ctx)
        optimizer = simulation.strategy.put_rows(state.optimizer, row, own, simulation.num_local, self.inplace)
        self.state = replace(state, params=self._with(row, params), optimizer=optimizer)
        self.losses.setdefault(event.node, []).append(state.strategy["losses"][event.node : event.node + 1])
        self.arrivals.append(event)

    def averaged(self, event: Averaged) -> None:
        """Give both nodes their mean."""
        pair = torch.tensor([event.node, event.neighbour])
        mean = tree.map(lambda x: (x[:1] + x[1:]) / 2, nodes.take_rows(self.state.params, pair))
        self.state = replace(self.state, params=self._with(pair, mean))
        self.send("average", Links.of(pair, pair.flip(0)))

    def restart(self, event: Restart) -> None:
        """Let nodes begin from their own present parameters."""
        self.begin(event.nodes, nodes.take_rows(self.state.params, torch.tensor(event.nodes)))

    def update(self, event: Update) -> None:
        self.state = replace(self.state, step=event.version)

    def _with(self, rows: torch.Tensor, params: Tree) -> Tree:
        found: Tree = nodes.put_rows(self.state.params, rows, params, self.simulation.num_local, self.inplace)
        return found
