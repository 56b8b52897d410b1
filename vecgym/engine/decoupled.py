"""Asynchronous training of learners that never stop; see `vecgym.strategy.DecoupledDiLoCoStrategy`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from vecgym.collectives.ledger import Transfer
from vecgym.collectives.topology import Server as ServerLinks
from vecgym.core import nodes, tree
from vecgym.core.tree import Tree
from vecgym.engine.asynchronous import AsyncSimulation, Handling
from vecgym.engine.events import Arrival, Closed, Forgotten, Merged, Restart, Update, Uploaded
from vecgym.engine.local import LocalState, of_each
from vecgym.engine.simulation import State
from vecgym.strategy.decoupled import merged


class DecoupledSimulation(AsyncSimulation):
    """The training of learners that never stop, and of the server's fragments.

    Its `State` is that of an `AsyncSimulation`. Of the strategy there are: `server`, the state of each fragment;
    `starts`, the nodes' parameters, and `base`, what they have merged last, `[K, *]`; `losses`, summed over each node's
    steps since it merged each fragment, `[K, F]`; `sent`, messages under way, by node, fragment and number; `versions`,
    of fragments that some nodes have yet to merge.
    """

    @property
    def handling(self) -> type[Handling]:
        return _Handling

    def init(self, params: Tree | None = None) -> State:
        state = super().init(params)
        assert self.server is not None
        self.fragments = self.strategy.fragments_of(self.comm.ledger.sizes)
        parts = [{name: state.params[name] for name in names} for names in self.fragments]
        strategy = {
            "server": {str(p): self.server.init(part) for p, part in enumerate(parts)},
            "starts": state.strategy["starts"],
            "base": of_each(state.params, self.num_local),
            "losses": state.strategy["losses"][:, None].repeat(1, len(parts)),
            "sent": {},
            "versions": {},
        }
        return replace(state, strategy=strategy)


class _Handling(Handling):
    """What nodes do is put off until a fragment closes, and then done for all of them, step by step."""

    handlers: ClassVar[dict[type, str]] = {
        Arrival: "later", Uploaded: "later", Merged: "later", Restart: "ignore", Forgotten: "forget",
        Closed: "close", Update: "update",
    }  # fmt: skip

    def __init__(self, simulation: Any, state: State, inplace: bool) -> None:
        super().__init__(simulation, state, inplace)
        self.queues: dict[int, deque[Arrival | Uploaded | Merged]] = {}
        self.unused: list[Forgotten] = []

    def later(self, event: Arrival | Uploaded | Merged) -> None:
        self.queues.setdefault(event.node, deque()).append(event)
        if isinstance(event, Uploaded):
            self._send("server_gather", event.fragment, ServerLinks(up=(event.node,), down=()))

    def ignore(self, event: Restart) -> None:
        """Nodes go on by themselves."""

    def forget(self, event: Forgotten) -> None:
        self.unused.append(event)

    def close(self, event: Closed) -> None:
        """Let the server make a version of a fragment."""
        self._catch_up()
        simulation, strategy, p = self.simulation, dict(self.state.strategy), str(event.fragment)
        strategy["sent"] = dict(strategy["sent"])
        messages = [strategy["sent"].pop(f"{x.node}.{p}.{x.round}") for x in event.arrivals]
        together = nodes.join_rows([message["movement"] for message in messages])
        how, plain = simulation.strategy.merging, simulation.strategy.plain
        movement = {name: merged(x, event.weights, "mean" if name in plain else how) for name, x in together.items()}
        params, state = simulation.server.update(
            {name: self.state.params[name] for name in movement}, movement, strategy["server"][p], event.version,
            inplace=self.inplace,
        )  # fmt: skip
        strategy["server"] = {**strategy["server"], p: state}
        kept = tree.map(torch.clone, params) if self.inplace else params
        strategy["versions"] = {**strategy["versions"], f"{p}.{event.version + 1}": kept}
        self.state = replace(self.state, params={**self.state.params, **params}, strategy=strategy)
        self.arrivals, self.count = list(event.arrivals), event.version
        self.losses = {x.node: [message["loss"][:1]] for x, message in zip(event.arrivals, messages)}
        for node in range(simulation.num_local):
            self._send("server_send", event.fragment, ServerLinks(up=(), down=(node,)))

    def update(self, event: Update) -> None:
        strategy = dict(self.state.strategy)
        for unused in self.unused:
            if unused.message is not None:
                name, key = "sent", f"{unused.message[0]}.{unused.fragment}.{unused.message[1]}"
            else:
                name, key = "versions", f"{unused.fragment}.{unused.version}"
            strategy[name] = {label: x for label, x in strategy[name].items() if label != key}
        self.state = replace(self.state, step=event.version, strategy=strategy)

    def _catch_up(self) -> None:
        """Do what the nodes have done by now."""
        while self.queues:
            for node in sorted(self.queues):
                queue = self.queues[node]
                while queue and not isinstance(queue[0], Arrival):
                    self._do(queue.popleft())
            self.queues = {node: queue for node, queue in self.queues.items() if queue}
            ready = sorted(self.queues)
            for rows in [ready] if self.simulation.strategy.together else [[node] for node in ready]:
                if rows:
                    self._step(rows)
            for queue in self.queues.values():
                queue.popleft()

    def _step(self, rows: Sequence[int]) -> None:
        """Take a step on some nodes, in one stacked call."""
        simulation, state, was, chosen = self.simulation, self.state, self.state.strategy, torch.tensor(rows)
        counts = state.node_steps.tolist()
        local = LocalState(
            nodes.take_rows(was["starts"], chosen), nodes.take_rows(state.buffers, chosen),
            simulation.strategy.take_rows(state.optimizer, chosen), was["losses"].new_zeros(len(rows)),
        )  # fmt: skip
        local = simulation.local_step(local, rows, [counts[node] for node in rows], self.inplace)
        losses = was["losses"].to(local.losses.dtype).index_add(
            0, chosen.to(local.losses.device), local.losses[:, None].expand(-1, was["losses"].shape[1])
        )  # fmt: skip
        K = simulation.num_local
        self.state = replace(
            state,
            buffers=nodes.put_rows(state.buffers, chosen, local.buffers, K, self.inplace),
            optimizer=simulation.strategy.put_rows(state.optimizer, chosen, local.optimizer, K, self.inplace),
            strategy={
                **was,
                "starts": nodes.put_rows(was["starts"], chosen, local.params, K, self.inplace),
                "losses": losses,
            },
            node_steps=state.node_steps.index_add(0, chosen, torch.ones_like(chosen)),
        )
        self.computed.append(len(rows))

    def _do(self, event: Any) -> None:
        strategy, names = self.state.strategy, self.simulation.fragments[event.fragment]
        own = {name: strategy["starts"][name][event.node : event.node + 1] for name in names}
        if isinstance(event, Uploaded):
            movement = {name: strategy["base"][name][event.node : event.node + 1] - x for name, x in own.items()}
            loss = strategy["losses"][event.node, event.fragment : event.fragment + 1] / event.num_steps
            label = f"{event.node}.{event.fragment}.{event.number}"
            changed = {"sent": {**strategy["sent"], label: {"movement": movement, "loss": loss}}}
        else:
            changed = self._merged(event, own)
        self.state = replace(self.state, strategy={**strategy, **changed})

    def _merged(self, event: Merged, own: Tree) -> dict[str, Any]:
        """Return what changes where a node merges a fragment of the server's."""
        strategy, row, a = self.state.strategy, torch.tensor([event.node]), self.simulation.strategy.alpha
        value = strategy["versions"][f"{event.fragment}.{event.version}"]
        new = {"starts": tree.map(lambda x, z: a * x + (1 - a) * z, own, value), "base": value}
        changed: dict[str, Any] = {}
        for name, values in new.items():
            old = {key: strategy[name][key] for key in values}
            put = nodes.put_rows(old, row, values, self.simulation.num_local, self.inplace)
            changed[name] = {**strategy[name], **put}
        since = torch.ones_like(strategy["losses"], dtype=torch.bool)
        since[event.node, event.fragment] = False
        changed["losses"] = torch.where(since, strategy["losses"], 0.0)
        return changed

    def _send(self, operation: str, fragment: int, who: ServerLinks) -> None:
        sizes, names = self.simulation.comm.ledger.sizes, self.simulation.fragments[fragment]
        payload = sum(sizes[name] for name in names)
        self.transfers.append(Transfer(operation, payload, self.simulation.num_local, who, tensors=names))
