"""HALoS: a server in each region updates from its nodes' movements, and a global server from the regions'."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vecgym.collectives.topology import Links as Messages
from vecgym.core import check, tree
from vecgym.core.devices import placed
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec
from vecgym.simulation.events import (
    STEPS,
    Arrival,
    Entry,
    Happening,
    Restart,
    RoundsAgenda,
    Rules,
    StepSeconds,
    Times,
    Traffic,
    Update,
    Wires,
)
from vecgym.simulation.simulation import Part
from vecgym.simulation.timetable import RunFacts
from vecgym.strategy.asynchronous import InRounds, agreed, countable, counts_of, weighted
from vecgym.strategy.base import InnerOptions, Unpack, takes_options
from vecgym.strategy.servers import (
    DelayedNesterov,
    Server,
    Staleness,
    StalenessName,
    check_server,
    check_staleness,
    one_number,
    updated,
    weight_of,
)

Regions = tuple[tuple[int, ...], ...]


class HALoSStrategy(InRounds):
    """Nodes send movements to the server of their region, and regions to a global server, without waiting.

    A node trains in rounds as in `AsyncStrategy`, with its region's server in place of the single server. For each
    arrival the region's server makes an update, x <- local_server(x, w(s) Delta), and adds its movement,
    x before - x after, to A. After every `local_updates` arrivals it sends A to the global server and starts another A;
    it continues while the message is under way. The global server makes an update, z <- global_server(z, A), and sends
    z back; on the reply, x <- (1 - alpha) x + alpha z.

    The length of a run is a number of updates of the global server, whose model is evaluated. A row of the history is
    about the movements in the message of its update; `staleness` counts versions of the region's server; `region` and
    `region_staleness`, versions of the global server, are the message's. Order, learning rates, data, randomness and
    the optimizers' states: as in `AsyncStrategy`.

    Bytes per round: b * P up and as many down; per message of a region b * P, and as many for the reply. In the ledger
    the server of region r has the id K + r, and the global one K + R.

    Args:
        inner_optim: the local optimizer, AdamW when not given.
        regions: the nodes of each region, every node in one, such as [[0, 1], [2, 3]]; or the number of regions, whose
            sizes then differ by at most 1.
        local_server: of each region, DelayedNesterov(lr=0.2 * 16, momentum=0.9, buffer=16) when not given: an arrival
            moves the region by 0.2 times its movement, and the momentum is applied at every 16th. A buffer of None is
            the number of the region's nodes.
        global_server: DelayedNesterov(lr=0.15 * 2, momentum=0.5, buffer=2) when not given, likewise. A buffer of None
            is the number of regions.
        H: local steps per round of the fastest node.
        local_updates: arrivals at a region's server per message to the global server.
        alpha: in [0, 1], the weight of the global model on a reply.
        dylu: H_i = max(1, ceil(H v_i / max v)), with v_i the speed of node i. False: H for all.
        local_steps: H_i of each node, `[K]`, in place of H and dylu.
        staleness: w: "none", 1; "inverse_sqrt", (1 + s)^(-1/2); or a function of s.
        between: the network of the servers, a `vecgym.clock.Network` of R nodes, or a pair (bandwidth, latency); None:
            their messages take no time. `fit(network=)` is the network of the nodes: with a matrix, a node's link to
            its server is the slowest of its links within the region.
        together: as for `AsyncStrategy`.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: of the inner optimizer; see `Strategy`. A schedule is
            as long as the largest number of steps of a node.

    Raises:
        ValueError, TypeError: for invalid arguments.

    >>> from vecgym import Trainer
    >>> from vecgym.clock import Compute
    >>> from vecgym.models import Line
    >>> trainer, strategy = Trainer(Line(), torch.ones(64)), HALoSStrategy("sgd", 2, local_updates=2, H=2, lr=0.1)
    >>> compute = Compute([1.0, 2.0, 2.0, 4.0])
    >>> model = trainer.fit(strategy, 4, max_updates=4, compute=compute, device="cpu", progress=False)
    >>> [(row["sim_seconds"], row["region"], row["local_steps_total"]) for row in trainer.history.rows[1:]]
    [(2.0, 0, 3), (4.0, 0, 6), (4.0, 1, 8), (6.0, 0, 11)]

    Reference: Kim et al., "HALoS: Hierarchical Asynchronous Local SGD over Slow Networks for Geo-Distributed Large
    Language Model Training", arXiv 2506.04531, and github.com/utnslab/halos, whose run_halos.sh has the defaults; its
    rates, too, are multiplied by the buffer. Deviations: A starts anew when it is sent; the paper's code resets it on
    the reply, so that movements in between never leave the region, and counts the arrivals from there. Nodes keep
    their shard of the data and their optimizer's state.
    """

    rounds_up = True

    @takes_options(InnerOptions)
    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        regions: int | Sequence[Sequence[int]] = 2,
        local_server: Server | None = None,
        global_server: Server | None = None,
        *,
        H: int = 8,
        local_updates: int = 32,
        alpha: float | Tensor = 0.25,
        dylu: bool = True,
        local_steps: Sequence[int] | Tensor | None = None,
        staleness: StalenessName | Staleness = "none",
        between: Any = None,
        together: bool = True,
        **inner: Unpack[InnerOptions],
    ) -> None:
        super().__init__(inner_optim, **inner)
        self.regions = _regions(regions)
        usual, why = DelayedNesterov(0.2 * 16, 0.9, 16), "each makes an update"
        self.local_server = check_server("local_server", local_server, usual, why)
        self.global_server = check_server("global_server", global_server, DelayedNesterov(0.15 * 2, 0.5, 2), why)
        self.H = countable("H", check.integer("H", H, what="optimizer steps of a round"))
        local_updates = check.integer("local_updates", local_updates, what="arrivals per message of a region")
        self.local_updates = countable("local_updates", local_updates)
        self.alpha = one_number("alpha", alpha, "[0, 1]", "the weight of the global model on a reply")
        self.dylu = check.flag("dylu", dylu)
        self.local_steps = None if local_steps is None else counts_of(local_steps)
        self.staleness = check_staleness(agreed("staleness", staleness, "none", self.local_server.staleness))
        self._region_staleness = check_staleness(self.global_server.staleness or "none")
        self.between = between
        self.together = check.flag("together", together)

    def check(self, num_nodes: int, max_steps: int) -> None:
        self.regions_of(num_nodes)
        super().check(num_nodes, max_steps)

    def check_updates(self, num_nodes: int, num_updates: int) -> None:
        regions = self.regions_of(num_nodes)
        self.global_server.check(len(regions), num_updates)
        for region in regions:
            self.local_server.check(len(region), num_updates * self.local_updates)

    def server_of(self, num_nodes: int) -> Server:
        return self.global_server.of(len(self.regions_of(num_nodes)))

    def regions_of(self, num_nodes: int) -> Regions:
        """Return the nodes of each region.

        >>> HALoSStrategy(regions=2).regions_of(5)
        ((0, 1, 2), (3, 4))
        """
        if isinstance(self.regions, int):
            if self.regions > num_nodes:
                raise ValueError(f"regions={self.regions} is more than the nodes: give at most {num_nodes}.")
            return tuple(tuple(part.tolist()) for part in torch.arange(num_nodes).tensor_split(self.regions))
        if sorted(node for region in self.regions for node in region) != list(range(num_nodes)):
            raise ValueError(
                f"regions={[list(region) for region in self.regions]} and the run has nodes 0 to {num_nodes - 1}: put "
                "every node into one region."
            )
        return self.regions

    def rules(self, times: Times) -> RegionRules:
        steps, regions = self.steps_of_rounds(times.nominal), self.regions_of(len(times.nominal))
        between = times.wires_between(self.between, len(regions))
        wires = times.wires_within(regions)
        return RegionRules(
            steps, self.local_updates, regions=regions, wires=wires, between=between, absences=times.absences
        )

    def init(self, run: RunFacts, params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state of the global server, and of each region its server's and its `collects`.

        `collects` holds the movement since the region's last message and, for each node, the sum of the losses of its
        rounds in it and their `count`, `[1, K]`. While they are under way, the state also has "sent r.n", the
        collected movement in message n of region r, and "reply r.n".
        """
        own, _ = super().init(run, params)
        regions = {
            str(r): {
                "params": params,
                "server": self.local_server.of(len(members)).init(params),
                "collects": _nothing(params, run.num_nodes),
            }
            for r, members in enumerate(self.regions_of(run.num_nodes))
        }
        server = self.server_of(run.num_nodes).init(params)
        return own, {"params": params, "server": server, "regions": regions}

    def region_of(self, node: int, num_nodes: int) -> tuple[str, Server]:
        """Return the name of a node's region, and its server.

        >>> HALoSStrategy(regions=2).region_of(3, num_nodes=5)[0]
        '1'
        """
        r, members = next((r, x) for r, x in enumerate(self.regions_of(num_nodes)) if node in x)
        return str(r), self.local_server.of(len(members))

    def arrive(self, part: Part) -> None:
        """Let the region's server make an update from a movement."""
        arrival, K = part.event.info, part.simulation.run.num_nodes
        name, server = self.region_of(arrival.node, K)
        region = part.shared["regions"][name]
        movement = server.correct(self.arrived(part), region["server"])
        movement = weighted(movement, weight_of(self.staleness, arrival.staleness))
        before, count = region["params"], arrival.version + arrival.staleness
        params, state = updated(server, before, movement, region["server"], count)
        collects, at = region["collects"], torch.tensor([arrival.node])
        loss = (part.own["loss"] / arrival.num_steps)[None]
        collects = {
            "movement": tree.map(lambda x, old, new: x + (old - new), collects["movement"], before, params),
            "losses": collects["losses"].to(loss.dtype).index_add(1, placed(at, loss.device), loss),
            "count": collects["count"].index_add(1, placed(at, loss.device), torch.ones_like(collects["count"][:, :1])),
        }
        _put(part, name, params=params, server=state, collects=collects)

    def restart(self, part: Part) -> None:
        """Let a node begin a round with the parameters of its region's server."""
        name, server = self.region_of(part.rows[0], part.simulation.run.num_nodes)
        region = part.shared["regions"][name]
        self.begin_from(part, server.start(region["params"], region["server"]))

    def depart(self, part: Part) -> None:
        """Queue a region's collected movement for sending."""
        name = str(part.event.info.region)
        part.shared[f"sent {_label(part)}"] = part.shared["regions"][name]["collects"]
        _put(part, name, collects=_nothing(part.shared["params"], part.simulation.run.num_nodes))
        self._between(part, "region_send")

    def deliver(self, part: Part) -> None:
        """Let the global server make an update from a region's message, and queue the reply."""
        event, sent, shared = part.event.info, part.shared[f"sent {_label(part)}"], part.shared
        server, state = self.server_of(part.simulation.run.num_nodes), shared["server"]
        weight = weight_of(self._region_staleness, event.staleness)
        movement = weighted(server.correct(sent["movement"], state), weight)
        count = event.version + event.staleness
        params, state = updated(server, shared["params"], movement, state, count, part.inplace)
        shared["params"], shared["server"] = params, state
        shared[f"reply {_label(part)}"] = server.start(params, state)
        del shared[f"sent {_label(part)}"]
        part.report((sent["losses"] / sent["count"])[0])  # nan where none has arrived

    def reply(self, part: Part) -> None:
        """Mix the global server's parameters into a region's, with weight `alpha`."""
        name, a = str(part.event.info.region), self.alpha
        params, reply = part.shared["regions"][name]["params"], part.shared[f"reply {_label(part)}"]
        _put(part, name, params=tree.map(lambda x, z: (1 - a) * x + a * z, params, reply))
        del part.shared[f"reply {_label(part)}"]
        self._between(part, "region_reply")

    def _between(self, part: Part, operation: str) -> None:
        """Record a message between a region's server and the global one, which have the ids after the nodes'."""
        K = part.simulation.run.num_nodes
        region, center = torch.tensor([K + part.event.info.region]), torch.tensor([K + len(self.regions_of(K))])
        ends = (region, center) if operation == "region_send" else (center, region)
        self.send(part, operation, Messages.of(*ends))


def _nothing(params: Tree, num_nodes: int) -> dict[str, Any]:
    """Return the empty `collects` of a region that has just sent its message."""
    none = next(iter(params.values())).new_zeros(1, num_nodes)
    return {"movement": tree.map(torch.zeros_like, params), "losses": none, "count": none.clone()}


def _put(part: Part, name: str, **changed: Any) -> None:
    regions = part.shared["regions"]
    part.shared["regions"] = {**regions, name: {**regions[name], **changed}}


def _label(part: Part) -> str:
    return f"{part.event.info.region}.{part.event.info.number}"


def _regions(regions: Any) -> int | Regions:
    if isinstance(regions, int) and not isinstance(regions, bool):
        return check.integer("regions", regions, what="or the list of each region's nodes")
    if not isinstance(regions, (list, tuple)) or not all(isinstance(part, (list, tuple)) and part for part in regions):
        raise TypeError(
            f"regions={regions!r} must be a number of regions, or the nodes of each, such as [[0, 1], [2, 3]]."
        )
    return tuple(tuple(check.integer("regions", node, 0, what="ids of nodes") for node in part) for part in regions)


# ---------------------------------------------------------------------------------------------- what happens when


class RegionMessage(NamedTuple):
    """A region's message to the global server, at one of three points of its way there and back.

    Attributes:
        time: the time at that point.
        what: "depart": the message leaves the region; "deliver": the global server makes an update from it; "reply":
            the answer reaches the region's server.
        region, number: the region, and the index of its message, from 0.
        version: the version of the global server that the region had last; for a reply the version that it brings.
        arrivals: the arrivals of the movements in it.
        staleness: at its delivery, the number of versions by which the global server is ahead.
    """

    time: float
    what: str
    region: int
    number: int
    version: int
    arrivals: tuple[Arrival, ...]
    staleness: int = 0


ENDED, ARRIVES, BEGINS, LEAVES, DELIVERED, REPLIED = range(STEPS + 1, STEPS + 7)  # in their order at one time


@dataclass(frozen=True)
class RegionRules(Rules):
    """The rules by which nodes, the servers of regions and a global server work together.

    A node's movement goes to the server of its region, which makes a version from it. After every `buffer` movements it
    sends a message to the global server, which makes a version from the message, an `Update`, and replies.

    Events at one time are in this order: ends of rounds, arrivals, starts of rounds (by node), messages that leave the
    regions, arrivals at the global server, replies (by region). So a node whose arrival makes its region send begins
    its next round before the reply, as in the paper's code, even if messages between servers take no time.

    Attributes:
        buffer: arrivals at a region's server per message to the global server.
        wires: the links between nodes and their region's server; each region's server has its own link.
        regions: the nodes of each region.
        between: the links between the regions' servers and the global one; None: messages take no time.

    >>> from vecgym.simulation.events import Stop, schedule
    >>> rules = RegionRules(num_steps=(1, 1), buffer=2, regions=((0,), (1,)))
    >>> for event in schedule(rules, lambda node, step: [1.0, 4.0][node], Stop(updates=1)):
    ...     print(event if not isinstance(event, RegionMessage) else event._replace(arrivals=()))
    Arrival(time=1.0, node=0, round=0, version=0, staleness=0, first_step=0, num_steps=1, begin=0.0, end=1.0)
    Restart(time=1.0, nodes=(0,), version=1, begins=(1.0,))
    Arrival(time=2.0, node=0, round=1, version=1, staleness=0, first_step=1, num_steps=1, begin=1.0, end=2.0)
    RegionMessage(time=2.0, what='depart', region=0, number=0, version=0, arrivals=(), staleness=0)
    Restart(time=2.0, nodes=(0,), version=2, begins=(2.0,))
    RegionMessage(time=2.0, what='deliver', region=0, number=0, version=0, arrivals=(), staleness=0)
    Update(time=2.0, version=1, num_arrivals=2)
    """

    regions: tuple[tuple[int, ...], ...] = ()
    between: Wires | None = None

    def events(self, step_seconds: StepSeconds) -> Iterator[Happening]:
        return _Run(self, step_seconds).events()

    def arrivals(self, events: Sequence[Happening]) -> tuple[Arrival, ...]:
        return delivered(events)[0].arrivals

    def columns(self, events: Sequence[Happening]) -> dict[str, Any]:
        (message,) = delivered(events)
        return {"region": message.region, "region_staleness": message.staleness}


def delivered(events: Sequence[Happening]) -> list[RegionMessage]:
    """Return the messages that reach the global server: one in each of its updates."""
    return [event for event in events if isinstance(event, RegionMessage) and event.what == "deliver"]


@dataclass
class _Region:
    links: Traffic
    version: int = 0
    of_global: int = 0  # the version of the global server that it received last
    arrivals: list[Arrival] = field(default_factory=list)  # since the last message
    number: int = 0  # messages so far
    leaving: list[RegionMessage] = field(default_factory=list)  # on their way, oldest first
    returning: list[RegionMessage] = field(default_factory=list)  # replies on their way


class _Run(RoundsAgenda):
    """The agenda of nodes, regions' servers and a global server; `who` is a node or a region."""

    def __init__(self, rules: RegionRules, step_seconds: StepSeconds) -> None:
        super().__init__(rules, step_seconds)
        K, R = len(rules.num_steps), len(rules.regions)
        self.regions = [_Region(Traffic(rules.wires, K)) for _ in range(R)]
        self.region_of = {node: r for r, members in enumerate(rules.regions) for node in members}
        self.between = Traffic(rules.between, R)
        self.version = 0
        for node in range(K):
            self.begin(node, 0.0, 0)

    def ends(self, time: float, node: int) -> Entry:
        return time, ENDED, node, 0

    def handlers(self) -> list[Callable[[float, int, int], Iterable[Happening]]]:
        return [self.step, self._ended, self._arrives, self._begins, self._leaves, self._delivered, self._replied]

    def _ended(self, time: float, node: int, _: int) -> Iterable[Happening]:
        self.push(self.regions[self.region_of[node]].links.up(node, time), ARRIVES, node)
        return []

    def _arrives(self, time: float, node: int, _: int) -> Iterable[Happening]:
        r = self.region_of[node]
        region = self.regions[r]
        arrival = self.arrival(time, node, region.version)
        region.version += 1
        region.arrivals.append(arrival)
        self.push(time, BEGINS, node)
        if len(region.arrivals) < self.rules.buffer:
            return [arrival]
        message = RegionMessage(time, "depart", r, region.number, region.of_global, tuple(region.arrivals))
        region.leaving.append(message)
        region.arrivals, region.number = [], region.number + 1
        self.push(time, LEAVES, r)
        return [arrival, message]

    def _leaves(self, time: float, r: int, _: int) -> Iterable[Happening]:
        self.push(self.between.up(r, time), DELIVERED, r)
        return []

    def _delivered(self, time: float, r: int, _: int) -> Iterable[Happening]:
        message = self.regions[r].leaving.pop(0)
        message = message._replace(time=time, what="deliver", staleness=self.version - message.version)
        self.version += 1
        self.regions[r].returning.append(message._replace(what="reply", version=self.version))
        self.push(self.between.down(r, time), REPLIED, r)
        return [message, Update(time, self.version, len(message.arrivals))]

    def _replied(self, time: float, r: int, _: int) -> Iterable[Happening]:
        reply = self.regions[r].returning.pop(0)
        self.regions[r].of_global = reply.version
        return [reply._replace(time=time)]

    def _begins(self, time: float, node: int, _: int) -> Iterable[Happening]:
        region = self.regions[self.region_of[node]]
        begin = region.links.down(node, time)
        self.begin(node, begin, region.version)
        return [Restart(time, (node,), region.version, (begin,))]
