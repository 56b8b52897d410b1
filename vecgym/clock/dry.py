"""Dry runs: the ledger of a run without its training."""

from __future__ import annotations

import math
import numbers
import types
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vecgym.clock.units import count
from vecgym.collectives.base import payload_bytes
from vecgym.collectives.ledger import Ledger, Transfer
from vecgym.collectives.stacked import DryCollectives
from vecgym.core import check
from vecgym.core.forms import Forms
from vecgym.core.objects import altered, same
from vecgym.core.tree import Tree
from vecgym.simulation import RunFacts, Simulation
from vecgym.simulation.timetable import Event
from vecgym.strategy import Strategy
from vecgym.strategy.asynchronous import check_synchronous
from vecgym.strategy.per_rank import as_strategy
from vecgym.strategy.simulated import nothing_to_read

META: dict[str, Any] = {"bias": False, "device": "meta", "dtype": torch.float32}
Sent = dict[Any, tuple[Transfer, ...]]  # by the key of events
# Of a tick: a key, and events that are handled together; equal keys send the same.
Parts = list[tuple[Any, list[Event]]]


@check.strict
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
    return DryRuns(model, num_nodes, seed).ledger(strategy, max_steps)


class DryRuns:
    """Dry runs of one model: messages of a strategy that repeats itself are computed once for runs of any length and H.

    Args:
        model, num_nodes, seed: see `dry_run`.

    >>> from vecgym.strategy import DiLoCoStrategy
    >>> runs = DryRuns("1M", num_nodes=2)
    >>> [len(runs.ledger(DiLoCoStrategy(H=H), max_steps=100)) for H in (5, 10)]
    [20, 10]
    """

    def __init__(self, model: nn.Module | int | str, num_nodes: int, seed: int = 42) -> None:
        self.model = as_model(model)
        self.num_nodes, self.seed = check.integer("num_nodes", num_nodes), check.seed("seed", seed)
        self.params = {
            name: torch.empty(p.shape, dtype=p.dtype, device="meta")
            for name, p in self.model.named_parameters()
            if p.requires_grad
        }
        self.sent: list[tuple[Any, Sent]] = []  # settings of strategies, and their messages

    def ledger(self, strategy: Strategy, max_steps: int) -> Ledger:
        """Return the ledger of a run; see `dry_run`."""
        check.instance("strategy", strategy, Strategy, "a Strategy object such as DiLoCoStrategy('adamw', H=100)")
        strategy, K, T = as_strategy(strategy, self.model), self.num_nodes, check.integer("max_steps", max_steps)
        if not strategy.pure:
            raise ValueError(
                f"{type(strategy).__name__} is written for one rank, which a dry run does not support: its step needs "
                "values. Train a few steps, and price trainer.ledger."
            )
        check_synchronous(strategy)
        strategy.check(K, T)
        run = RunFacts(K, T, self.seed, num_examples=(1,) * K)  # weights change no bytes
        engine: Any = types.SimpleNamespace(params=self.params, buffers=Tree(), written=frozenset())
        simulation = Simulation(engine, strategy, run, DryCollectives(K), nothing_to_read)
        simulation.dry = True
        try:
            return self._ledger(simulation)
        except (NotImplementedError, RuntimeError) as error:
            if "meta" not in str(error):
                raise
            raise ValueError(
                f"{strategy!r} depends on the values that it exchanges, and a dry run has none: train a few steps, and "
                "price trainer.ledger."
            ) from error

    def _ledger(self, simulation: Simulation) -> Ledger:
        strategy, ledger = simulation.algorithm, simulation.comm.ledger
        repeats, ticks = strategy.repeats_itself, enumerate(simulation.timetable.ticks())
        parts = [_parts(events) if repeats else [(step, events)] for step, events in ticks]
        sent = self._known(strategy) if repeats else {}
        if not all(key in sent for tick in parts for key, _ in tick):
            sent.update(_handled(simulation, parts))  # of all: a handler may need what an earlier event has stored
        ledger.announce(self.num_nodes, {name: payload_bytes(p[None]) for name, p in self.params.items()})
        for step, tick in enumerate(parts):
            ledger.add(step, [transfer for key, _ in tick for transfer in sent[key]])
        return ledger

    def _known(self, strategy: Strategy) -> Sent:
        """Return the known messages of strategies that differ from this one in H alone."""
        # The next round's length is the lag of a message that overlaps with it.
        exchanges = [x if x.stages.overlaps else altered(x, every=None, offsets=None) for x in strategy.exchanges]
        settings = [strategy.__class__, {**vars(strategy), "exchanges": exchanges}]
        known = [sent for others, sent in self.sent if same(others, settings)] or [{}]
        self.sent.append((settings, known[0]))
        return known[0]


def _parts(events: list[Event]) -> Parts:
    """Return each event of a tick by itself."""
    return [((event.what, event.rows, getattr(event.info, "of", None)), [event]) for event in events]


def _handled(simulation: Simulation, ticks: list[Parts]) -> Sent:
    """Handle events of each key once; return what they send."""
    sent: Sent = {}
    with Forms():
        state = simulation.init()
        for step, parts in enumerate(ticks):
            for key, events in parts:
                if key not in sent:
                    state, record = simulation.tick(replace(state, tick=step), events, iter(()), pure=True)
                    sent[key] = record.transfers
    return sent


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
