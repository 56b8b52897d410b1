"""A strategy's simulation: the one place where a run's strategy, nodes and presence come together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from vecgym.availability import Presence
from vecgym.collectives import Collectives, StackedCollectives
from vecgym.collectives.ledger import Transfer
from vecgym.engine import Engine
from vecgym.simulation.events import Schedule
from vecgym.simulation.simulation import Batches, Request, Simulation
from vecgym.simulation.state import Metrics
from vecgym.simulation.timetable import RunFacts
from vecgym.strategy.asynchronous import EventDriven, check_synchronous
from vecgym.strategy.base import Strategy
from vecgym.strategy.per_rank import as_strategy


def nothing_to_read(requests: Iterator[Request]) -> Batches:
    """Yield no batch, for single steps by hand, which are given their batches.

    >>> list(nothing_to_read(iter([([0, 1], 0)])))
    []
    """
    return iter(())


def simulation_of(
    model: nn.Module, strategy: Strategy, comm: Collectives, *, engine: Engine | None = None, max_steps: int = 1,
    seed: int = 42, minibatch_size: int | None = None, num_examples: tuple[int, ...] | None = None, exact: bool = False,
    presence: Presence | None = None, read: Callable[[Iterator[Request]], Batches] = nothing_to_read,
) -> Simulation:  # fmt: skip
    """Return the training of a model by a strategy on the nodes of `comm`: all nodes, or those of this process.

    Args:
        engine: of the model, prepared; None: a new one.
        max_steps: of the run.
        minibatch_size: examples at a time.
        num_examples: of each node's shard, `[K]`; None: unknown.
        exact: whether the bits of a node's work must not depend on the other nodes in this process: gradients and
            optimizer steps are computed node by node. The engine must work node by node, too.
        presence: which nodes are present in which steps; None: all, always.
        read: a stream of requests -> a stream of batches; see `Simulation`.

    Example: three steps of four nodes.

    >>> import torch
    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.models import Line
    >>> from vecgym.strategy import FedAvgStrategy
    >>> strategy = FedAvgStrategy("sgd", H=3, lr=0.1)
    >>> simulation = simulation_of(Line(), strategy, StackedCollectives(4), max_steps=3)
    >>> state = simulation.init()
    >>> for _ in range(3):
    ...     state, row = simulation.step(state, torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
    >>> row.losses
    tensor([0.4096, 1.6384, 3.6864, 6.5536])
    >>> state.params["w"]  # the nodes have just averaged: 2.5 (1 - 0.8^3) on each
    tensor([1.2200, 1.2200, 1.2200, 1.2200])
    >>> simulation.result(state).params["w"], simulation.result(state).members  # their mean is the run's model
    (tensor([1.2200, 1.2200, 1.2200, 1.2200]), None)
    >>> simulation.close()
    """
    check_synchronous(strategy)
    strategy = as_strategy(strategy, model)
    if presence is not None and not strategy.pure:
        raise ValueError(
            f"availability={presence.availability!r}: this strategy is written for one rank, so all ranks must take "
            "part in every step. Leave out availability, or write the strategy with exchanges."
        )
    if presence is not None and presence.server:
        strategy = strategy.through_server()
    run = RunFacts(comm.num_nodes, max_steps, seed, presence, num_examples)
    return Simulation(
        Engine(model) if engine is None else engine, strategy, run, comm, read, minibatch_size=minibatch_size,
        exact=exact,
    )  # fmt: skip


def asynchronous_simulation(
    engine: Engine, strategy: EventDriven, schedule: Schedule, read: Any, *, seed: int,
    num_examples: tuple[int, ...] | None = None, minibatch_size: int | None = None,
) -> Simulation:  # fmt: skip
    """Return the asynchronous training of one model.

    Args:
        schedule: all events of the run.
        read, minibatch_size: see `Simulation`.
    """
    K = len(schedule.rules.num_steps)
    run = RunFacts(K, len(schedule.updates), seed, num_examples=num_examples, schedule=schedule)
    simulation = Simulation(engine, strategy, run, StackedCollectives(K), read, minibatch_size=minibatch_size)
    simulation.comm.ledger.asynchronous = True
    strategy.inner_optim.check_steps(K, simulation.timetable.max_steps, "inner optimizer")
    strategy.check_updates(K, simulation.timetable.length)
    return simulation


def metrics_of(
    strategy: EventDriven, schedule: Schedule, update: int, losses: Tensor, transfers: tuple[Transfer, ...] = ()
) -> Metrics:
    """Return the metrics of an update, counted from 1: a node's loss is the mean over its round, nan without one."""
    arrivals = schedule.arrivals(update)
    outer_lr = strategy.server_rate(schedule.updates[update - 1], len(schedule.rules.num_steps))
    last, nodes = [x.first_step + x.num_steps - 1 for x in arrivals], [x.node for x in arrivals]
    lr = strategy.inner.lr(last, schedule.max_steps, nodes)  # a number, or one for each arrival
    return Metrics(losses, lr, sorted(set(nodes)), outer_lr, transfers)
