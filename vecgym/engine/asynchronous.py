"""Asynchronous training: events in the order of time, computed late and together.

When nodes begin a round is known before any gradient (`vecgym.engine.events`), so a node that begins only notes the
parameters that it starts from. When an arrival needs a movement that is not computed, *all* rounds that have begun and
are not computed are, in one stacked call. Neither the order of events nor any number depends on that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from vecgym.collectives import Collectives, StackedCollectives
from vecgym.collectives.ledger import Transfer
from vecgym.collectives.topology import Links
from vecgym.collectives.topology import Server as ServerLinks
from vecgym.core import nodes, tree
from vecgym.core.devices import placed
from vecgym.core.tree import Tree
from vecgym.engine.engine import Engine, Local
from vecgym.engine.events import Arrival, Event, Restart, Update
from vecgym.engine.local import LocalState, of_each, weighted
from vecgym.engine.simulation import Metrics, Simulation, State
from vecgym.strategy import Strategy
from vecgym.strategy.asynchronous import EventDriven
from vecgym.strategy.communication import Context

# (nodes, the step of each by its own count) -> (leaves [n, B, ...], how many examples of each are its own)
Read = Callable[[Sequence[int], Sequence[int]], tuple[Any, Sequence[int]]]


class Updated(NamedTuple):
    """The measurements of a server's update.

    Attributes:
        metrics: of the arrivals in it: a node's loss, `[K]`, is the mean over its round, nan for nodes that are not in
            it.
        arrivals: in the order of time.
        computed: how many rounds were computed in each stacked call.
    """

    metrics: Metrics
    arrivals: tuple[Arrival, ...]
    computed: tuple[int, ...]


def updates_of(events: Sequence[Event]) -> list[list[Event]]:
    """Split events into those of each update: all up to it, since the one before.

    >>> from vecgym.engine.events import Rules, Stop, schedule
    >>> [len(part) for part in updates_of(schedule(Rules((1, 1)), lambda node, step: 1.0 + node, Stop(updates=3)))]
    [2, 3, 2]
    """
    parts: list[list[Event]] = [[]]
    for event in events:
        parts[-1].append(event)
        if isinstance(event, Update):
            parts.append([])
    return parts[:-1]


def total_steps(events: Sequence[Event], num_nodes: int) -> list[int]:
    """Return how many steps of each node arrive in a run.

    >>> from vecgym.engine.events import Rules, Stop, schedule
    >>> total_steps(schedule(Rules((2, 2)), lambda node, step: 1.0 + node, Stop(updates=3)), num_nodes=2)
    [4, 2]
    """
    totals = [0] * num_nodes
    for event in events:
        if isinstance(event, Arrival):
            totals[event.node] = event.first_step + event.num_steps
    return totals


def inner_rates(strategy: Strategy, comm: Collectives, arrivals: Sequence[Arrival], max_steps: int) -> Any:
    """Return the inner learning rates of the last steps of some arrivals: a number, or one for each."""
    last = torch.tensor([arrival.first_step + arrival.num_steps - 1 for arrival in arrivals])
    ids = torch.tensor([arrival.node for arrival in arrivals])
    ctx = Context(comm, node_steps=last, max_steps=max_steps, rows=ids, own_time=True)
    return ctx.own(strategy.lr(ctx))


class AsyncSimulation(Simulation):
    """The asynchronous training of one model.

    Its `State` is that of a `Simulation`, with the server's parameters `[1, *]` as `params`, and `step` the number of
    its updates. Of the strategy there are: `server`, the server's state; `starts`, the parameters from which each
    node's present round begins, `[K, *]`; `moved`, what its computed round has moved, `[K, *]`, and `losses`; `done`,
    whether it is computed, `[K]`.

    Args:
        model, strategy, engine, seed, minibatch_size: as for a `Simulation`.
        read: gives the batches.
        events: of the run.
        num_nodes: K.

    Example: two nodes, one of which is twice as fast.

    >>> from vecgym.engine.events import Rules, Stop, schedule
    >>> from vecgym.models import Line
    >>> from vecgym.strategy import AsyncStrategy, OptimSpec, OuterOptimizer
    >>> events = schedule(Rules((1, 1)), lambda node, step: 1.0 + node, Stop(updates=3))
    >>> read = lambda nodes, steps: (torch.ones(len(nodes), 1), [1] * len(nodes))
    >>> strategy = AsyncStrategy("sgd", OuterOptimizer(OptimSpec("sgd", lr=1.0)), H=1, lr=0.25)
    >>> simulation = AsyncSimulation(Line(), strategy, read, events, num_nodes=2)
    >>> state = simulation.init()
    >>> for part in updates_of(events):
    ...     state, updated = simulation.update(state, part)
    ...     print(state.params["w"], [arrival.staleness for arrival in updated.arrivals], updated.computed)
    tensor([0.5000]) [0] (2,)
    tensor([0.7500]) [0] (1,)
    tensor([1.2500]) [2] ()
    """

    asynchronous = True
    strategy: Any

    def __init__(
        self,
        model: nn.Module,
        strategy: EventDriven,
        read: Read,
        events: Sequence[Event],
        num_nodes: int,
        *,
        engine: Engine | None = None,
        seed: int = 42,
        minibatch_size: int | None = None,
        num_examples: tuple[int, ...] | None = None,
    ) -> None:
        self.num_steps = {event.node: event.num_steps for event in events if isinstance(event, Arrival)}
        self.total_steps = total_steps(events, num_nodes)
        super().__init__(
            model, strategy, StackedCollectives(num_nodes), engine=engine,
            max_steps=max(1, *self.total_steps), seed=seed, minibatch_size=minibatch_size, num_examples=num_examples,
            own_time=True,
        )  # fmt: skip
        self.num_nodes = num_nodes  # K
        self.read = read
        self.server = strategy.server_of(num_nodes)
        self.num_updates = sum(isinstance(event, Update) for event in events)
        # A kernel may round a value in another way beside other nodes; the loop promises the same bits.
        self.exact = self.engine.plan.engine == "loop"

    @property
    def length(self) -> int:
        return self.num_updates

    def init(self, params: Tree | None = None) -> State:
        """Return the state before the first event: all nodes begin from the model's own parameters."""
        state = super().init(params)
        self.comm.ledger.asynchronous = True
        K = self.num_local
        like = next(iter(state.params.values()))
        strategy: dict[str, Any] = {
            "server": {} if self.server is None else self.server.init(state.params),
            "starts": of_each(state.params, K),
            "moved": tree.map(torch.zeros_like, nodes.expand(state.params, K)),
            "losses": like.new_zeros(K),
            "done": torch.zeros(K, dtype=torch.bool),
        }
        optimizer, buffers = of_each(state.optimizer, K), of_each(state.buffers, K)
        return replace(state, optimizer=optimizer, buffers=buffers, strategy=strategy)

    def update(self, state: State, events: Sequence[Event], *, differentiable: bool = False) -> tuple[State, Updated]:
        """Handle the events up to the next update.

        Args:
            state: is given up, unless `differentiable`.
            events: one of the parts of `updates_of`.
        """
        run = self.handling(self, state, inplace=not differentiable)
        for event in events:
            run.handle(event)
        return run.state, run.updated()

    @property
    def handling(self) -> type[Handling]:
        """What handles the events of an update."""
        return Handling

    def rounds(self, state: State, rows: Sequence[int], inplace: bool) -> State:
        """Compute the rounds of some nodes, given by their ids, in one stacked call a step.

        Those with the most steps come first, so that those who still train are the first rows of every tensor.
        """
        counts = state.node_steps.tolist()
        order = sorted(rows, key=lambda node: (-self.num_steps[node], counts[node], node))
        chosen = torch.tensor(order)
        start = nodes.take_rows(state.strategy["starts"], chosen, copy=True)
        local = LocalState(
            params=tree.map(torch.clone, start) if inplace else start,
            buffers=nodes.take_rows(state.buffers, chosen),
            optimizer=self.strategy.take_rows(state.optimizer, chosen),
            losses=state.strategy["losses"].new_zeros(len(chosen)),
        )
        ended: list[LocalState] = []
        done = 0
        for until in sorted({self.num_steps[node] for node in order}):
            here = [node for node in order if self.num_steps[node] >= until]
            ended.append(local.nodes(len(here), len(local.losses)))
            local = local.nodes(0, len(here))
            for step in range(done, until):
                local = self.local_step(local, here, [counts[node] + step for node in here], inplace)
            done = until
        local = LocalState.joined([local, *reversed(ended)])
        return self._with_rounds(state, chosen, start, local, inplace)

    def local_step(self, local: LocalState, here: Sequence[int], counts: Sequence[int], inplace: bool) -> LocalState:
        """Take one step of the inner optimizer on the nodes `here`, which have done so many before."""
        ctx = self.context(here, counts, inplace)
        found = self.gradients(local.params, local.buffers, here, counts, inplace)
        params, optimizer = self._optimize(local.params, found.grads, local.optimizer, ctx)
        return LocalState(params, found.buffers, optimizer, local.losses + found.losses)

    def context(self, here: Sequence[int], counts: Sequence[int], inplace: bool) -> Context:
        """Return where the nodes `here` are, which have done so many steps."""
        ctx = Context(
            self.comm, node_steps=torch.tensor(counts), max_steps=self.max_steps, seed=self.seed, inplace=inplace,
            differentiable=not inplace, num_examples=self.num_examples, rows=torch.tensor(here), own_time=True,
            exact=self.exact,
        )  # fmt: skip
        return ctx.replace(lr=self.strategy.lr(ctx))

    def gradients(
        self, params: Tree, buffers: Tree, here: Sequence[int], counts: Sequence[int], inplace: bool
    ) -> Local:
        """Compute the gradients of the nodes `here`, each on its next batch."""
        batch, limits = self.read(here, counts)
        seeds, node_ids = ([values[node] for node in here] for values in self._keys)
        return self.engine.gradients(
            params, buffers, batch, seed=seeds, step=counts, node_ids=node_ids,
            minibatch_size=self.minibatch_size, differentiable=not inplace, limits=limits,
        )  # fmt: skip

    def _with_rounds(self, state: State, chosen: Tensor, start: Tree, local: LocalState, inplace: bool) -> State:
        """Return the state with what rounds have come to."""
        K, was = self.num_local, state.strategy
        steps = torch.tensor([self.num_steps[node] for node in chosen.tolist()])
        losses = local.losses / placed(steps, local.losses.device)
        moved = tree.map(torch.sub, start, local.params)
        strategy = {
            **was,
            "moved": nodes.put_rows(was["moved"], chosen, moved, K, inplace),
            "losses": was["losses"].to(losses.dtype).index_copy(0, placed(chosen, losses.device), losses),
            "done": was["done"].index_fill(0, chosen, True),
        }
        return replace(
            state,
            buffers=nodes.put_rows(state.buffers, chosen, local.buffers, K, inplace),
            optimizer=self.strategy.put_rows(state.optimizer, chosen, local.optimizer, K, inplace),
            strategy=strategy,
            node_steps=state.node_steps.index_add(0, chosen, steps),
        )


class Handling:
    """The events of one update, one after the other."""

    handlers: ClassVar[dict[type, str]] = {Arrival: "arrival", Restart: "restart", Update: "update"}

    def __init__(self, simulation: Any, state: State, inplace: bool) -> None:
        self.simulation, self.state, self.inplace = simulation, state, inplace
        self.arrivals: list[Arrival] = []
        self.taken: list[Tree] = []  # their movements
        self.transfers: list[Transfer] = []
        self.computed: list[int] = []
        self.losses: dict[int, list[Tensor]] = {}
        self.count: int | None = None  # the server's updates before this one, if not those of the run

    def handle(self, event: Event) -> None:
        getattr(self, self.handlers[type(event)])(event)

    def arrival(self, event: Arrival) -> None:
        """Have the movement computed, and take it."""
        self.compute(event.node)
        losses = self.state.strategy["losses"][event.node : event.node + 1]
        self.losses.setdefault(event.node, []).append(losses)
        self.taken.append(self._taken(event))
        self.arrivals.append(event)
        self.send("server_gather", ServerLinks(up=(event.node,), down=()))

    def compute(self, node: int) -> None:
        """Have what the node has begun computed, if it is not, with all else that can be."""
        simulation = self.simulation
        if not self.state.strategy["done"][node]:
            rows = self._begun() if simulation.strategy.together else [node]
            self.state = simulation.rounds(self.state, rows, self.inplace)
            self.computed.append(len(rows))

    def _begun(self) -> list[int]:
        """Return the nodes whose rounds have begun, are not computed, and arrive in this run."""
        done, counts = self.state.strategy["done"].tolist(), self.state.node_steps.tolist()
        totals = self.simulation.total_steps
        return [node for node, total in enumerate(totals) if not done[node] and counts[node] < total]

    def restart(self, event: Restart) -> None:
        """Let nodes begin from what the server sends of its present parameters."""
        self.begin(event.nodes, self.simulation.server.start(self.state.params, self.state.strategy["server"]))
        self.send_to(event.nodes)

    def begin(self, begun: Sequence[int], params: Tree) -> None:
        """Let n nodes begin from parameters `[1 or n, *]`."""
        strategy = self.state.strategy
        rows, K = torch.tensor(begun), self.simulation.num_local
        starts = nodes.put_rows(strategy["starts"], rows, nodes.expand(params, len(rows)), K, self.inplace)
        done = strategy["done"].index_fill(0, rows, False)
        self.state = replace(self.state, strategy={**strategy, "starts": starts, "done": done})

    def send_to(self, receivers: Sequence[int]) -> None:
        for node in receivers:
            self.send("server_send", ServerLinks(up=(), down=(node,)))

    def update(self, event: Update) -> None:
        """Let the server make a version of the movements that it has collected."""
        server, strategy = self.simulation.server, dict(self.state.strategy)
        movement = self._movement()
        params, strategy["server"] = server.update(
            self.state.params, movement, strategy["server"], event.version - 1, inplace=self.inplace
        )
        self.state = replace(self.state, step=event.version, params=params, strategy=strategy)

    def _taken(self, arrival: Arrival) -> Tree:
        """Return the movement that has arrived, `[1, *]`, as the server takes it, and weighted."""
        simulation, node = self.simulation, arrival.node
        row = {name: x[node : node + 1] for name, x in self.state.strategy["moved"].items()}
        if simulation.strategy.buffer > 1 and self.inplace:  # the node's next round may be computed before the update
            row = tree.map(torch.clone, row)
        row = simulation.server.correct(row, self.state.strategy["server"])
        return weighted(row, simulation.strategy.weight(arrival.staleness))

    def _movement(self) -> Tree:
        """Average the movements that were taken, in the order of nodes."""
        if len(self.taken) == 1:
            return self.taken[0]
        by_node = sorted(range(len(self.taken)), key=lambda i: (self.arrivals[i].node, self.arrivals[i].round))
        return tree.map(lambda *each: torch.stack(each, 1).mean(1), *[self.taken[i] for i in by_node])

    def send(self, operation: str, who: ServerLinks | Links) -> None:
        sizes = self.simulation.comm.ledger.sizes
        self.transfers.append(
            Transfer(operation, sum(sizes.values()), self.simulation.num_nodes, who, tensors=tuple(sizes))
        )

    def updated(self) -> Updated:
        """Return what was measured."""
        simulation = self.simulation
        lr = inner_rates(simulation.strategy, simulation.comm, self.arrivals, simulation.max_steps)
        count = self.state.step - 1 if self.count is None else self.count
        outer_lr = None if simulation.server is None else simulation.server.lr(count)
        active = sorted({arrival.node for arrival in self.arrivals})
        metrics = Metrics(self.mean_losses(), lr, active, outer_lr, tuple(self.transfers))
        return Updated(metrics, tuple(self.arrivals), tuple(self.computed))

    def mean_losses(self) -> Tensor:
        """Return each node's mean over its arrivals, `[K]`, nan for those without any."""
        active = sorted(self.losses)
        means = torch.cat([torch.stack(self.losses[node]).mean(0) for node in active])
        losses = means.new_full((self.simulation.num_nodes,), torch.nan)
        return losses.index_copy(0, placed(torch.tensor(active), losses.device), means)
