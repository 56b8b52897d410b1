"""Asynchronous training with a server in each region and a global one; see `vecgym.strategy.HALoSStrategy`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from vecgym.collectives.topology import Links
from vecgym.collectives.topology import Server as ServerLinks
from vecgym.core import tree
from vecgym.core.devices import placed
from vecgym.core.tree import Tree
from vecgym.engine.asynchronous import AsyncSimulation, Handling
from vecgym.engine.events import Arrival, Delivered, Replied, Restart, Sent, Update
from vecgym.engine.local import weighted
from vecgym.engine.simulation import State


class HALoSSimulation(AsyncSimulation):
    """The training of one model with a server in each region and a global one.

    Its `State` is that of an `AsyncSimulation`, whose server is the global one. Of the strategy there are besides:
    `regions`, for each its server's `params`, its `server`'s state, and what it `collects` for the next message: the
    `movement` `[1, *]` and, for each node, the sum of the `losses` and the `count` of the rounds in it, `[K]`; `sent`,
    such messages on their way by region and number, "0.3"; and `replies`, parameters on their way.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.regions = self.strategy.regions_of(self.num_local)
        self.region_of = {node: str(r) for r, members in enumerate(self.regions) for node in members}
        self.local_servers = {str(r): self.strategy.local_server.of(len(x)) for r, x in enumerate(self.regions)}

    @property
    def handling(self) -> type[Handling]:
        return _Handling

    def init(self, params: Tree | None = None) -> State:
        state = super().init(params)
        regions = {
            name: {
                "params": tree.map(torch.clone, state.params),
                "server": server.init(state.params),
                "collects": self.nothing(state.params),
            }
            for name, server in self.local_servers.items()
        }
        return replace(state, strategy={**state.strategy, "regions": regions, "sent": {}, "replies": {}})

    def nothing(self, params: Tree) -> dict[str, Any]:
        """Return what a region that has just sent has collected."""
        none = next(iter(params.values())).new_zeros(self.num_local)
        return {"movement": tree.map(torch.zeros_like, params), "losses": none, "count": none.clone()}


class _Handling(Handling):
    handlers: ClassVar[dict[type, str]] = {
        **Handling.handlers, Sent: "sent", Delivered: "delivered", Replied: "replied",
    }  # fmt: skip

    def arrival(self, event: Arrival) -> None:
        """Let the region's server make a version of a movement."""
        self.compute(event.node)
        name = self.simulation.region_of[event.node]
        server, region = self.simulation.local_servers[name], dict(self._of("regions")[name])
        row = {x: value[event.node : event.node + 1] for x, value in self.state.strategy["moved"].items()}
        if self.inplace:  # the server may keep it, and the node's next round is written over it
            row = tree.map(torch.clone, row)
        row = weighted(server.correct(row, region["server"]), self.simulation.strategy.weight(event.staleness))
        before, count = region["params"], event.version + event.staleness
        region["params"], region["server"] = server.update(before, row, region["server"], count)
        moved = tree.map(torch.sub, before, region["params"])
        region["collects"] = self._collected(region["collects"], event.node, moved)
        self._put("regions", name, region)
        self.send("server_gather", ServerLinks(up=(event.node,), down=()))

    def _collected(self, collected: dict[str, Any], node: int, moved: Tree) -> dict[str, Any]:
        loss = self.state.strategy["losses"][node : node + 1]
        at = placed(torch.tensor([node]), loss.device)
        return {
            "movement": tree.map(torch.add, collected["movement"], moved),
            "losses": collected["losses"].to(loss.dtype).index_add(0, at, loss),
            "count": collected["count"].index_add(0, at, torch.ones_like(collected["count"][:1])),
        }

    def restart(self, event: Restart) -> None:
        """Let a node begin from what its region's server sends of its present parameters."""
        name = self.simulation.region_of[event.nodes[0]]
        region = self._of("regions")[name]
        self.begin(event.nodes, self.simulation.local_servers[name].start(region["params"], region["server"]))
        self.send_to(event.nodes)

    def sent(self, event: Sent) -> None:
        """Put what the region has collected on its way."""
        region = self._of("regions")[str(event.region)]
        self._put("sent", _label(event), region["collects"])
        self._put("regions", str(event.region), {**region, "collects": self.simulation.nothing(self.state.params)})
        self._between(event, back=False)

    def delivered(self, event: Delivered) -> None:
        """Take a region's message."""
        self.message, self.label = self._take("sent", _label(event)), _label(event)
        weight = self.simulation.strategy.region_weight(event.staleness)
        movement = self.simulation.server.correct(self.message["movement"], self.state.strategy["server"])
        self.taken, self.arrivals = [weighted(movement, weight)], list(event.arrivals)

    def update(self, event: Update) -> None:
        """Let the global server make a version of the message, and put the reply on its way."""
        super().update(event)
        reply = self.simulation.server.start(self.state.params, self.state.strategy["server"])
        self._put("replies", self.label, tree.map(torch.clone, reply))

    def replied(self, event: Replied) -> None:
        """Let the region go to the global server's parameters, as far as it does."""
        reply, region = self._take("replies", _label(event)), self._of("regions")[str(event.region)]
        a = self.simulation.strategy.alpha
        params = tree.map(lambda x, z: (1 - a) * x + a * z, region["params"], reply)
        self._put("regions", str(event.region), {**region, "params": params})
        self._between(event, back=True)

    def mean_losses(self) -> Tensor:
        found: Tensor = self.message["losses"] / self.message["count"]  # nan where none arrived
        return found

    def _between(self, event: Sent | Replied, back: bool) -> None:
        K, R = self.simulation.num_local, len(self.simulation.regions)
        region, center = torch.tensor([K + event.region]), torch.tensor([K + R])
        who = Links.of(center, region) if back else Links.of(region, center)
        self.send("region_reply" if back else "region_send", who)

    def _of(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.state.strategy[name]
        return found

    def _put(self, name: str, key: str, value: Any) -> None:
        values = {**self._of(name), key: value}
        self.state = replace(self.state, strategy={**self.state.strategy, name: values})

    def _take(self, name: str, key: str) -> Any:
        values = dict(self._of(name))
        taken = values.pop(key)
        self.state = replace(self.state, strategy={**self.state.strategy, name: values})
        return taken


def _label(event: Sent | Delivered | Replied) -> str:
    return f"{event.region}.{event.number}"
