"""The servers of several asynchronous configurations as one, and the strategy that they are part of."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import torch

from vecgym.core import nodes, tree
from vecgym.core.devices import placed
from vecgym.core.tree import Tree
from vecgym.engine.asynchronous import AsyncSimulation
from vecgym.engine.local import of_each
from vecgym.strategy import Context
from vecgym.strategy.base import State
from vecgym.strategy.servers import Server
from vecgym.sweeps.configurations import Configuration
from vecgym.sweeps.merged import Merged
from vecgym.sweeps.parts import Member, rows_of


class Servers(Server):
    """C servers of parameters `[C, *]`, a row each; those of equal `stack_key` make their updates in one call.

    >>> from vecgym.strategy import FedBuff, HeLoCo
    >>> servers = Servers([FedBuff(lr=0.5), HeLoCo(lr=1.0, momentum=0.5), FedBuff(lr=1.0)])
    >>> params = {"w": torch.zeros(3)}
    >>> params, state = servers.update(params, {"w": torch.ones(3)}, servers.init(params), update=0)
    >>> params, servers.start(params, state)
    ({'w': tensor([-0.5000, -1.2500, -1.0000])}, {'w': tensor([-0.5000, -1.5000, -1.0000])})
    >>> list(servers.parts)
    ['0', '1']
    """

    def __init__(self, servers: Sequence[Server]) -> None:
        groups: dict[Hashable, list[int]] = {}
        for c, server in enumerate(servers):
            key = server.stack_key()
            groups.setdefault(("alone", c) if key is None else (key,), []).append(c)
        # By the first of its rows: which rows, and their server.
        self.parts: dict[str, tuple[list[int], Server]] = {}
        for places in groups.values():
            members = [servers[c] for c in places]
            merged = members[0] if len(members) == 1 else members[0].stacked(members)
            self.parts[str(places[0])] = places, merged
        order = [c for places, _ in self.parts.values() for c in places]
        self._back = torch.tensor(sorted(range(len(order)), key=order.__getitem__))

    def init(self, params: Tree) -> State:
        return {name: server.init(self._rows(name, params)) for name, (_, server) in self.parts.items()}

    def start(self, params: Tree, state: State) -> Tree:
        return self._of_each("start", params, state)

    def correct(self, movement: Tree, state: State) -> Tree:
        return self._of_each("correct", movement, state)

    def _of_each(self, method: str, values: Tree, state: State) -> Tree:
        parts = self.parts.items()
        return self._joined(
            [getattr(server, method)(self._rows(name, values), state[name]) for name, (_, server) in parts]
        )

    def update(
        self, params: Tree, movement: Tree, state: State, update: int, inplace: bool = False
    ) -> tuple[Tree, State]:
        found, after = [], {}
        for name, (_, server) in self.parts.items():
            own = self._rows(name, params), self._rows(name, movement)
            new, after[name] = server.update(*own, state[name], update, inplace=inplace)
            found.append(new)
        return self._joined(found), after

    def selected(self, state: State, chosen: Sequence[int]) -> State:
        """Return the state of some of them, ascending."""
        now, found = {c: i for i, c in enumerate(chosen)}, {}
        for name, (places, _) in self.parts.items():
            inside = [i for i, c in enumerate(places) if c in now]
            if inside:
                size = len(places)
                found[str(now[places[inside[0]]])] = tree.map_leaves(
                    lambda x: x if len(x) == 1 else rows_of(x, size, inside),  # noqa: B023
                    state[name],
                )
        return found

    def _rows(self, name: str, values: Tree) -> Tree:
        if len(self.parts) == 1:
            return values
        return nodes.take_rows(values, torch.tensor(self.parts[name][0]))

    def _joined(self, each: list[Tree]) -> Tree:
        if len(each) == 1:
            return each[0]
        return tree.map(lambda x: x[placed(self._back, x.device)], nodes.join_rows(each))


class AsyncMerged(Merged):
    """C asynchronous configurations of K nodes each and the same events, as a strategy of C * K nodes; see `Merged`."""

    asynchronous = True

    def __init__(
        self, members: Sequence[Member], num_elements: int = 0, sizes: tuple[list[int], list[int]] | None = None
    ) -> None:
        super().__init__(members, num_elements, sizes)
        each: list[Any] = [member.strategy for member in members]
        self.together, self.buffer = each[0].together, each[0].buffer
        self.server = Servers([strategy.server.of(self.num_nodes) for strategy in each])

    def server_of(self, num_nodes: int) -> Servers:
        """Return the servers of all configurations as one."""
        return self.server

    def weights(self, staleness: int) -> list[Any]:
        """Return what a movement of each configuration counts."""
        return [member.strategy.weight(staleness) for member in self.members]  # type: ignore[attr-defined]

    def lr(self, ctx: Context) -> Any:
        """Return None: the members have their own."""
        return None

    def _contexts(self, ctx: Context) -> Callable[[int], Context]:
        if ctx.rows is None:
            return super()._contexts(ctx)
        if self._last_contexts[0] is not ctx:  # the same nodes of each, at the same times
            rows, counts = (x.view(len(self.members), -1)[0] for x in (ctx.rows, ctx.node_steps))
            self._last_contexts = (ctx, cache(lambda c: self.members[c].context(ctx, counts, None, rows)))
        return self._last_contexts[1]

    def _selected(self, state: State, kept: Callable[[State], State], chosen: Sequence[int]) -> State:
        of_rows = {name: x for name, x in state.items() if name != "server"}
        rows = tree.map_leaves(lambda x: rows_of(x, len(self.members), chosen), of_rows)
        return {"server": self.server.selected(state["server"], chosen), **rows}


class AsyncStack(AsyncSimulation):
    """The asynchronous training of several configurations with the same events."""

    def __init__(self, configs: Sequence[Configuration], merged: AsyncMerged, read: Any, engine: Any) -> None:
        self.num_configs = len(configs)
        plan, settings = configs[0].plan, configs[0].settings
        assert plan is not None
        super().__init__(
            engine.model, merged, read, plan.events, configs[0].num_nodes, engine=engine,  # type: ignore[arg-type]
            minibatch_size=settings["minibatch_size"],
        )  # fmt: skip
        keys = [(config.settings["seed"], node) for config in configs for node in range(config.num_nodes)]
        self._keys = tuple(zip(*keys))
        self.merged, self.exact = merged, False

    def weighted(self, movement: Tree, staleness: int) -> Tree:
        weights = self.merged.weights(staleness)
        if all(isinstance(x, (int, float)) and x == 1 for x in weights):
            return movement
        each = torch.stack([torch.as_tensor(x, dtype=torch.float64).reshape(()) for x in weights])
        return tree.map(lambda x: tree.per_node(placed(each, x.device), x) * x, movement)

    def _optimizer_of_each(self, optimizer: dict[str, Any]) -> dict[str, Any]:
        return {part.name: of_each(optimizer[part.name], part.num_rows) for part in self.merged.optimizers}
