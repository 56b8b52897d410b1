"""Dry runs: the ledger of a run without its training."""

from __future__ import annotations

import math
import numbers
import types
from typing import Any

import torch
from torch import nn

from vecgym.clock.units import count
from vecgym.collectives.ledger import Ledger
from vecgym.collectives.stacked import DryCollectives
from vecgym.core import check
from vecgym.core.tree import Tree
from vecgym.simulation import RunFacts, Simulation
from vecgym.strategy import Strategy
from vecgym.strategy.asynchronous import check_synchronous
from vecgym.strategy.per_rank import as_strategy
from vecgym.strategy.simulated import nothing_to_read

META: dict[str, Any] = {"bias": False, "device": "meta"}


def dry_run(
    model: nn.Module | int | str, strategy: Strategy, num_nodes: int, max_steps: int, *, seed: int = 42
) -> Ledger:
    """Return the ledger of a run without training: make the exchanges only, on tensors with shapes but no values.

    It equals the ledger of `Trainer.fit` with this `seed`. Nothing is computed or stored, so the model may have any
    size, and may be on the device "meta".

    Args:
        model: nodes exchange its trainable parameters. Or their number, such as "150M": the matrices of a transformer
            of that size, in float32.
        strategy: must not depend on the values that it exchanges; no built-in strategy does. A strategy written for one
            rank is not supported.
        num_nodes: K.
        max_steps: the number of steps.
        seed: of the run; it determines which nodes meet and which coordinates are drawn.

    Raises:
        ValueError, TypeError: for arguments that no run accepts, and for strategies that depend on values.

    >>> from vecgym.strategy import DiLoCoStrategy
    >>> with torch.device("meta"):
    ...     model = torch.nn.Linear(100_000, 100_000, dtype=torch.bfloat16)  # 10 billion parameters
    >>> dry_run(model, DiLoCoStrategy("adamw", H=100), num_nodes=8, max_steps=500)
    Ledger(5 collectives, 175,001,750,000 bytes sent per node)
    """
    model = as_model(model)
    check.instance("strategy", strategy, Strategy, "a Strategy object such as DiLoCoStrategy('adamw', H=100)")
    strategy = as_strategy(strategy, model)
    K, T = check.integer("num_nodes", num_nodes), check.integer("max_steps", max_steps)
    if not strategy.pure:
        raise ValueError(
            f"{type(strategy).__name__} is written for one rank, which a dry run does not support: its step needs "
            "values. Train a few steps, and price trainer.ledger."
        )
    check_synchronous(strategy)
    strategy.check(K, T)
    comm, seed = DryCollectives(K), check.seed("seed", seed)
    params = {
        name: torch.empty_like(p, device="meta", requires_grad=False)
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    run = RunFacts(K, T, seed, num_examples=(1,) * K)  # weights change no bytes
    engine: Any = types.SimpleNamespace(params=params, buffers=Tree(), written=frozenset())
    simulation = Simulation(engine, strategy, run, comm, nothing_to_read)
    simulation.dry = True
    try:
        state = simulation.init()
        for events in simulation.timetable.ticks():
            step = state.tick
            state, row = simulation.tick(state, events, iter(()), pure=True)
            comm.ledger.add(step, row.transfers)
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error):
            raise
        raise ValueError(
            f"{strategy!r} depends on the values that it exchanges, and a dry run has none: train a few steps, and "
            "price trainer.ledger."
        ) from error
    return comm.ledger


def as_model(model: nn.Module | int | str) -> nn.Module:
    """Return the model; for a number of parameters, the matrices of a transformer on the device "meta".

    A block has 12 d^2 parameters, as GPT's, and there are about d / 64 of them; what remains is the embedding.

    >>> [tuple(p.shape) for p in as_model("150k").parameters()]
    [(39, 64), (1, 48), (192, 64), (64, 64), (256, 64), (64, 256), (192, 64), (64, 64), (256, 64), (64, 256), \
(192, 64), (64, 64), (256, 64), (64, 256)]
    """
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, float) and model % 1 == 0:
        model = int(model)  # 150e6
    check.instance("model", model, (str, numbers.Integral), 'an nn.Module, or its number of parameters, "150M"')
    number = count("model", model)
    d = 64 * max(1, round((number / (12 * 64**2)) ** (1 / 3)))
    blocks, rest = divmod(number, 12 * d * d)
    outside = {name: nn.Linear(*shape, **META) for name, shape in
               {"embedding": (d, rest // d), "rest": (rest % d, 1)}.items() if math.prod(shape)}  # fmt: skip
    h = [nn.Sequential(*(nn.Linear(*shape, **META) for shape in ((d, 3 * d), (d, d), (d, 4 * d), (4 * d, d))))
         for _ in range(blocks)]  # fmt: skip
    return nn.ModuleDict({**outside, "h": nn.ModuleList(h)})
