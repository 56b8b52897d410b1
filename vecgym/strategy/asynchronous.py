"""Asynchronous local SGD: a server that handles each arrival, and nodes that do not wait for the slowest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from vecgym.collectives.ledger import Transfer
from vecgym.collectives.topology import Links, ServerLinks
from vecgym.core import check, tree
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec
from vecgym.simulation.events import Grace, Happening, Rules, Times, Update
from vecgym.simulation.simulation import Part
from vecgym.simulation.state import State
from vecgym.simulation.timetable import RunFacts, Scheduled, Timetable
from vecgym.simulation.when import check_interval
from vecgym.strategy.base import InnerOptions, Strategy, Unpack, takes_options
from vecgym.strategy.exchange import DEFAULT_H
from vecgym.strategy.servers import (
    SERVERS,
    OuterOptimizer,
    Server,
    Staleness,
    StalenessName,
    check_staleness,
    updated,
    weight_of,
)


class EventDriven(Strategy):
    """The base of strategies whose nodes do not wait for one another: the order of events depends on times.

    Its `rules` determine the schedule of events, and a method handles each kind of event. If there is a server, its
    parameters are `shared["params"]`.

    Attributes:
        H: local steps per round.
        together: whether to compute the steps of several nodes in one call.
        nodes_have: the name of the nodes' own parameters in the state.
    """

    asynchronous = True
    H: int
    together: bool
    nodes_have: str
    server: Server | None = None

    def rules(self, times: Times) -> Rules:
        """Return the rules by which nodes and server work together in a run with these times."""
        raise NotImplementedError

    def timetable(self, run: RunFacts) -> Timetable:
        """Return the timetable of a run whose schedule is known."""
        return Scheduled(run.schedule, together=self.together)

    def init(self, run: RunFacts, params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the initial state by name: each node's own trees and the shared ones."""
        return {"optimizer": self.inner.init(params)}, {}

    def own_parameters(self, state: State) -> Tree:
        """Return the nodes' own parameters, `[K, *]`."""
        return state.own[self.nodes_have]

    def server_rate(self, events: Sequence[Happening], num_nodes: int) -> float | Tensor | None:
        """Return the server's learning rate in the update that ends these events; None without one."""
        server, update = self.server_of(num_nodes), events[-1]
        return server.rate(update.version - 1) if server is not None and isinstance(update, Update) else None

    def update(self, part: Part) -> None:
        """Handle the end of an update; no effect here, since some servers make their versions in other events."""

    def optimized(self, part: Part, params: Tree, grads: Tree, counts: int | list[int]) -> Tree:
        """Take the inner optimizer's step of these rows after `counts` steps; return their parameters."""
        simulation, several = part.simulation, part.size > 1
        inner, nodes = (self.inner.wide(len(part.nodes)), None) if several else (self.inner, part.nodes)
        lr = inner.lr(counts, simulation.tables[part.event.group or 0].max_steps, nodes)
        new, slots = inner.step(
            part.flat(params), part.flat(grads), part.own.flat("optimizer"), counts, lr, inplace=part.inplace,
            nodes=nodes, missing=part.missing,
            exact=simulation.engine.plan.engine == "loop",  # promises bits that do not depend on the other nodes
        )  # fmt: skip
        part.own.put_flat("optimizer", slots)
        return part.apart(new)

    def send(self, part: Part, operation: str, who: ServerLinks | Links, names: Sequence[str] | None = None) -> None:
        """Record a message of all parameters, or of some."""
        sizes = part.comm.ledger.sizes
        names = tuple(sizes) if names is None else tuple(names)
        payload = sum(sizes[name] for name in names)
        part.comm.ledger.record(Transfer(operation, payload, part.run.num_nodes, who, tensors=names))

    def server_of(self, num_nodes: int) -> Server | None:
        """Return the server whose parameters are the run's model, if there is one."""
        return None if self.server is None else self.server.of(num_nodes)

    def check_updates(self, num_nodes: int, num_updates: int) -> None:
        """Raise a ValueError if the strategy cannot work for so many updates."""
        if self.server is not None:
            self.server.check(num_nodes, num_updates)

    def check(self, num_nodes: int, max_steps: int) -> None:
        """Raise a ValueError for settings that do not fit the number of nodes."""
        if self.inner.max_norm is not None:
            check.per_node("max_norm", self.inner.max_norm, "(0, inf]", num_nodes=num_nodes)


class InRounds(EventDriven):
    """The base of strategies whose nodes train in rounds: a number of steps from the parameters that a server sends.

    Each node's own state: `start`, the parameters at the start of its round; `local`, its parameters now; `loss`, the
    sum of its losses in the round.

    Attributes:
        local_steps: each node's steps per round; None: see `steps_of_rounds`.
        dylu: whether slower nodes take fewer steps, a fraction of H that is rounded down, or up with `rounds_up`.
    """

    nodes_have = "start"
    local_steps: tuple[int, ...] | None
    dylu: bool
    rounds_up = False

    def init(self, run: RunFacts, params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
        own, shared = super().init(run, params)
        return {**own, "start": params, "local": params}, shared

    def check(self, num_nodes: int, max_steps: int) -> None:
        if self.local_steps is not None:
            check.fits("local_steps is for", len(self.local_steps), num_nodes, f"[{num_nodes}]")
        super().check(num_nodes, max_steps)

    def steps_of_rounds(self, step_seconds: Sequence[float]) -> tuple[int, ...]:
        """Return H_i of each node, given the seconds of its steps.

        >>> AsyncStrategy(H=10, dylu=True).steps_of_rounds([0.1, 0.25, 9.0])
        (10, 4, 1)
        """
        if self.local_steps is not None:
            return self.local_steps
        if not self.dylu:
            return (self.H,) * len(step_seconds)
        fastest = min(step_seconds)
        shares = [self.H * (fastest / s if s > 0 else 1.0) for s in step_seconds]
        # A share that is an integer up to rounding is that integer.
        return tuple(max(1, math.ceil(x - 1e-9) if self.rounds_up else math.floor(x + 1e-9)) for x in shares)

    def train(self, part: Part) -> None:
        """Take the steps of a round, or its remaining steps if other nodes have fewer."""
        params = part.own["local"]
        loss = part.own["loss"] if part.event.info else None
        for _ in range(part.event.reads):
            counts = part.read_at
            params = self.optimized(part, params, part.gradients(at=params), counts)
            loss = part.losses if loss is None else loss + part.losses
        part.own["local"], part.own["loss"] = params, loss

    def arrived(self, part: Part) -> Tree:
        """Return the movement of a round that has arrived, `[1, *]`; `[C, *]` for several configurations."""
        self.send(part, "server_gather", ServerLinks(up=tuple(part.nodes), down=()))
        return part.flat(tree.map(torch.sub, part.own["start"], part.own["local"]))

    def begin_from(self, part: Part, params: Tree) -> None:
        """Let nodes begin rounds with a server's parameters, `[1, *]`; `[C, *]` for several configurations."""
        part.own["start"] = part.own["local"] = part.apart(params)
        for node in part.nodes:
            self.send(part, "server_send", ServerLinks(up=(), down=(node,)))


class AsyncStrategy(InRounds, batched=(), random=False):
    """Every node trains in its own rounds; a server handles each movement when it arrives.

    Node i begins a round with the server's parameters of version v, takes H_i steps of its inner optimizer, and sends
    Delta = start_i - theta_i. The server is s versions further when it arrives. It collects M arrivals for one update:
    theta <- server(theta, 1/M sum_i w(s_i) Delta_i). Then it sends theta to node i, which begins its next round.

    The order of arrivals follows from the nodes' computing times (`fit(compute=)`) and the messages' times
    (`network=`); ties go by the node's id. The length of a run is a number of updates of the server,
    `fit(max_updates=)`, of simulated seconds, `max_seconds=`, or of local steps, `max_steps=`, the mean over the nodes.

    Learning rate, data and randomness of a node go by its own step count. The inner optimizer's state stays on its
    node. Bytes per round: b * P up and as many down.

    With a `delay_threshold` R a movement with s >= R is dropped when it arrives (Ringmaster ASGD): its node begins anew
    from theta, as all do. It counts as computing and in the ledger, and not as an update, a local step of the run or a
    loss. R = 1 takes only the movements of the newest version.

    Args:
        inner_optim: the local optimizer, AdamW when not given.
        server: an `OuterOptimizer`, `DelayedNesterov`, `FedBuff`, `MLA` or `HeLoCo`, or a `Server` of your own; the
            SGD of DiLoCo when not given.
        H: local steps per round.
        buffer: M.
        max_wait: seconds. A node that arrives while no node waits opens a window; nodes that arrive in it wait, and
            begin their next rounds together when it closes. With 0 nodes that arrive at the same instant, such as
            those of equal speed, begin together with the version that has all their movements.
        grace: the end of the window: "full", when its time is over or all nodes wait; "until_last", with the last
            arrival in it, which is known in hindsight, so that no node waits in vain.
        dylu: "dynamic local updates": H_i = max(1, floor(H v_i / max v)), with v_i the speed of node i.
        local_steps: H_i of each node, `[K]`, in place of H.
        delay_threshold: R; None: all movements count.
        staleness: w: "none", 1; "inverse_sqrt", (1 + s)^(-1/2); or a function of s.
        together: compute the rounds of all nodes that have begun in one call, when a result is needed. False: one by
            one, for tests: the same numbers, to the last bit with `engine="loop"`.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: of the inner optimizer; see `Strategy`. A schedule is
            as long as the largest number of steps of a node.

    Raises:
        ValueError, TypeError: for invalid arguments.

    >>> from vecgym import Trainer
    >>> from vecgym.clock import Compute
    >>> from vecgym.models import Line
    >>> trainer, strategy = Trainer(Line(), torch.ones(64)), AsyncStrategy("sgd", OuterOptimizer(lr=0.2), H=2, lr=0.1)
    >>> model = trainer.fit(strategy, 2, max_updates=5, compute=Compute([1.0, 3.0]), device="cpu", progress=False)
    >>> [(row["sim_seconds"], row["staleness"], row["local_steps_total"]) for row in trainer.history.rows[1:]]
    [(2.0, 0.0, 2), (4.0, 0.0, 4), (6.0, 0.0, 6), (6.0, 3.0, 8), (8.0, 0.0, 10)]

    References: Liu et al., "Asynchronous Local-SGD Training for Language Modeling", arXiv 2401.09135, and Nguyen et
    al., "Federated Learning with Buffered Asynchronous Aggregation", arXiv 2106.06639. Deviations: nodes keep their
    shard of the data and their optimizer's state, where the first paper's workers draw the least visited shard and
    start a new optimizer in each round. `delay_threshold`: Maranjyan, Tyurin and Richtarik, "Ringmaster ASGD: The First
    Asynchronous SGD with Optimal Time Complexity", arXiv 2501.16168, without calculation stops. Deviation: any server
    and optimizer, and rounds of more than one step.
    """

    server: Server

    @takes_options(InnerOptions)
    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        server: Server | None = None,
        H: int = DEFAULT_H,
        *,
        buffer: int = 1,
        max_wait: float = 0.0,
        grace: Grace = "full",
        dylu: bool = False,
        local_steps: Sequence[int] | Tensor | None = None,
        delay_threshold: int | None = None,
        staleness: StalenessName | Staleness = "none",
        together: bool = True,
        **inner: Unpack[InnerOptions],
    ) -> None:
        super().__init__(inner_optim, **inner)
        self.server = OuterOptimizer() if server is None else check.instance("server", server, Server, SERVERS)
        self.H = countable("H", check_interval("H", H))
        buffer = check.integer("buffer", buffer, what="arrivals per update of the server")
        self.buffer = countable("buffer", agreed("buffer", buffer, 1, self.server.buffer))
        self.max_wait = check.number("max_wait", max_wait, "[0, inf]", "simulated seconds")
        check.choice("grace", grace, get_args(Grace))
        self.grace: Grace = grace
        self.dylu = check.flag("dylu", dylu)
        self.local_steps = None if local_steps is None else counts_of(local_steps)
        what = "versions by which the server may not be ahead of a movement; None drops none"
        self.delay_threshold = check.optional_integer("delay_threshold", delay_threshold, what=what)
        self.staleness = check_staleness(agreed("staleness", staleness, "none", self.server.staleness))
        self.together = check.flag("together", together)
        if dylu and local_steps is not None:
            raise ValueError("dylu=True and local_steps both set the nodes' numbers of steps: give one of them.")

    def rules(self, times: Times) -> Rules:
        steps = self.steps_of_rounds(times.nominal)
        waits = (self.max_wait, self.grace)
        return Rules(steps, self.buffer, *waits, times.wires(), times.absences, self.delay_threshold)

    def init(self, run: RunFacts, params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
        own, _ = super().init(run, params)
        return own, {"params": params, "server": self.server.of(run.num_nodes).init(params)}

    def arrive(self, part: Part) -> None:
        """Correct and weight a movement that arrives, unless it is too old."""
        arrival, moved, schedule = part.event.info, self.arrived(part), part.run.schedule
        assert schedule is not None
        if schedule.rules.drops(arrival):
            return
        part.report(part.own["loss"] / arrival.num_steps)
        moved = self.server.of(part.run.num_nodes).correct(moved, part.shared.flat("server"))
        moved = weighted(moved, weight_of(self.staleness, arrival.staleness))
        part.memo.setdefault("moved", {})[arrival.node, arrival.round] = moved

    def update(self, part: Part) -> None:
        """Let the server make an update with the mean of the movements since the last one."""
        moved = [part.memo["moved"][key] for key in sorted(part.memo["moved"])]
        mean = moved[0] if len(moved) == 1 else tree.map(lambda *each: torch.stack(each, 1).mean(1), *moved)
        server, count = self.server.of(part.run.num_nodes), part.event.info.version - 1
        params, held = updated(
            server, part.shared.flat("params"), mean, part.shared.flat("server"), count, part.inplace
        )
        part.shared.put_flat("params", params)
        part.shared.put_flat("server", held)

    def restart(self, part: Part) -> None:
        """Send nodes the parameters with which they begin."""
        server = self.server.of(part.run.num_nodes)
        self.begin_from(part, server.start(part.shared.flat("params"), part.shared.flat("server")))


def check_synchronous(strategy: Strategy) -> None:
    """Raise a ValueError for a strategy without steps of all nodes.

    >>> check_synchronous(AsyncStrategy())
    Traceback (most recent call last):
    ...
    ValueError: AsyncStrategy has no steps that all nodes take together, which is needed here: Trainer.fit and rollout \
run it.
    """
    if strategy.asynchronous:
        raise ValueError(
            f"{type(strategy).__name__} has no steps that all nodes take together, which is needed here: Trainer.fit "
            "and rollout run it."
        )


MOST = 10**6


def weighted(movement: Tree, weight: Any) -> Tree:
    """Return a movement times its weight; the movement itself for weight 1.

    >>> weighted({"w": torch.tensor([3.0])}, 2.0)
    {'w': tensor([6.])}
    """
    is_one = isinstance(weight, (int, float)) and weight == 1
    return movement if is_one else tree.map(lambda x: weight * x, movement)


def agreed(name: str, setting: Any, default: Any, of_server: Any) -> Any:
    """Return the server's setting if it has one, else the given one."""
    if of_server is None or setting == of_server:
        return setting
    if setting != default:
        raise ValueError(f"{name}={setting!r}, and the server has {name}={of_server!r}: leave out {name}.")
    return of_server


def counts_of(values: Any) -> tuple[int, ...]:
    check.has_values("local_steps", values)
    plain = values.tolist() if isinstance(values, Tensor) else values
    if not isinstance(plain, (list, tuple)) or not plain:
        raise TypeError(f"local_steps={values!r} must be a list of each node's steps in a round, such as [10, 5].")
    counts = (check.integer("local_steps", x, what="optimizer steps of a round") for x in plain)
    return tuple(countable("local_steps", count) for count in counts)


def countable(name: str, value: int) -> int:
    """Return a number of steps or arrivals, if it is small enough to schedule one by one."""
    if value > MOST:
        raise ValueError(f"{name}={value} must be at most {MOST}: the run would never come to its first update.")
    return value
