"""A strategy's simulation: the one place where a run's strategy, nodes and presence come together."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from vecgym.collectives import Collectives
from vecgym.engine import Engine
from vecgym.simulation.presence import Presence
from vecgym.simulation.simulation import Batches, Request, Simulation
from vecgym.simulation.timetable import RunFacts
from vecgym.strategy.asynchronous import check_synchronous
from vecgym.strategy.base import Strategy
from vecgym.strategy.hooks import Hooks
from vecgym.strategy.per_rank import as_strategy


def nothing_to_read(requests: Iterator[Request]) -> Batches:
    """Yield no batch: single steps by hand each get their own.

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
        exact: the bits of a node's own work do not depend on which other nodes are in this process: each has its
            own gradient and optimizer step. The engine must compute node by node too.
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
            "part in every step. Leave availability out, or write the strategy with exchanges."
        )
    hooked = [exchange for exchange in strategy.exchanges if isinstance(exchange, Hooks)]
    if presence is not None and hooked and len(comm.node_ids) < comm.num_nodes:
        raise ValueError(
            f"{hooked[0]!r} has hooks, which do not support availability in several processes. Leave availability out, "
            'give backend="stacked", or write it as an Exchange.'
        )
    if presence is not None and presence.server:
        strategy = strategy.through_server()
    ids: list[int] = comm.node_ids.tolist()
    run = RunFacts(comm.num_nodes, max_steps, seed, presence, num_examples)
    return Simulation(
        Engine(model) if engine is None else engine, strategy, run, comm, read, here=range(ids[0], ids[-1] + 1),
        minibatch_size=minibatch_size, exact=exact,
    )  # fmt: skip
