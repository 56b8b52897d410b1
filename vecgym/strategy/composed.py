"""A strategy that is an expression: an inner optimizer, and what the nodes exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vecgym.core import check
from vecgym.core.tree import Tree, leaves
from vecgym.optim import OptimSpec, ensure_optim_spec
from vecgym.optim.optimizer import Optimizer
from vecgym.simulation.simulation import LocalTraining, Part
from vecgym.simulation.state import State
from vecgym.simulation.timetable import Lockstep, Mark, RunFacts, Who
from vecgym.strategy.exchange import Exchange
from vecgym.strategy.settings import Settings, same
from vecgym.strategy.when import Rounds


class Composed(LocalTraining, Settings):
    """Each node trains with an inner optimizer; exchanges follow in their order.

    A step is: gradients; the exchanges of gradients; clipping; the inner optimizer; the other exchanges that are due.

    Args:
        inner: a name ("adamw", "sgd", ...), an `OptimSpec`, a `torch.optim.Optimizer` class, or an `Optimizer`; AdamW
            if not given.
        exchanges: none: the nodes train independently.
        lr: the learning rate, if `inner` does not set it.
        options: `max_norm`, `lr_scheduler`, `warmup_steps` and `cosine_anneal`; see `vecgym.optim.optimizer.Optimizer`.

    Raises:
        TypeError, ValueError: at construction, saying what is allowed; for exchanges of gradients beside one in which
            some nodes sit out.

    >>> from vecgym.strategy.averages import Mean, Outer
    >>> strategy = Composed("adamw", [Exchange(Outer(Mean()), every=100)], lr=3e-4)
    >>> strategy.check(num_nodes=4, max_steps=1000)
    >>> strategy, strategy == Composed("adamw", [Exchange(Outer(Mean()), every=100)], lr=3e-4)
    (Composed(OptimSpec(AdamW, lr=0.0003), exchanges=[Exchange(Outer(Mean()), every=100)]), True)
    """

    def __init__(
        self, inner: str | OptimSpec | type[torch.optim.Optimizer] | Optimizer | None = None,
        exchanges: Sequence[Exchange] = (), *, lr: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        if isinstance(inner, Optimizer):
            self.inner = inner
        else:
            self.inner = Optimizer(
                ensure_optim_spec(inner, OptimSpec(torch.optim.AdamW), argument="inner", lr=lr), **options
            )
        if not isinstance(exchanges, (list, tuple)):
            raise TypeError(f"exchanges is {check.kind_of(exchanges)}; give a list: [Exchange(Mean(), every=10)].")
        for exchange in exchanges:
            check.instance("exchanges", exchange, Exchange, "a list of Exchanges, such as [Exchange(Mean(), every=10)]")
        self.exchanges = [exchange.numbered(i) for i, exchange in enumerate(exchanges)]
        self._alone = self.exchanges
        settings = [self.inner.spec.kwargs, self.inner.max_norm]
        self._per_node = any(x.dim() > 0 and x.shape[-1] > 1 for x in leaves(settings))  # not if merged with others
        resting = [exchange for exchange in self.exchanges if exchange.participation < 1]
        if resting and self._of_gradients:
            raise ValueError(
                f"{resting[0]!r} lets some nodes sit out, and {self._of_gradients[0]!r} exchanges the gradients of all "
                "at every step: give participation=1, or exchange parameters."
            )

    @property
    def numbers(self) -> tuple[str, ...] | None:
        """Settings that may have a value for each configuration of a group; None: it has a group of its own."""
        return None if any(exchange.numbers is None for exchange in self.exchanges) else ()

    @property
    def _of_gradients(self) -> list[Exchange]:
        return [exchange for exchange in self.exchanges if exchange.of == "gradients"]

    def check(self, num_nodes: int, max_steps: int) -> None:
        """Raise a ValueError if the strategy cannot work for this run, as far as that depends on its size."""
        self.inner.check(num_nodes, max_steps, "inner optimizer")
        run = RunFacts(num_nodes, max_steps, num_examples=(1,) * num_nodes)
        for exchange in self.exchanges:
            if exchange.fragments == 1:  # others depend on the model
                exchange.check(run)

    def check_run(self, run: RunFacts) -> None:
        """Raise a ValueError if the strategy cannot work for this run."""
        self.inner.check(run.num_nodes, run.num_steps, "inner optimizer")
        for exchange in self.exchanges:
            exchange.check(run)

    def timetable(self, run: RunFacts) -> Lockstep:
        """Return what happens when: steps, and what is marked."""
        if self.exchanges is self._alone:  # else numbers are those of several configurations, each of them checked
            self.check_run(run)
        return Lockstep(run, *self.marks(run), trains=self.trains(run), train="step" if self._of_gradients else "train")

    def marks(self, run: RunFacts) -> list[Mark]:
        """Return what is due when, in order."""
        return [mark for exchange in self.exchanges for mark in exchange.marks(run)]

    def trains(self, run: RunFacts) -> Who | None:
        """Return who trains in a step, of those present: the nodes that take part in all rounds; None: all."""
        found = [who for exchange in self.exchanges if (who := exchange.trains(run)) is not None]
        if not found:
            return None
        return lambda step, rows: sorted(set(rows).intersection(*(who(step, rows) or () for who in found)))

    def alike(self, run: RunFacts) -> bool:
        """Whether all nodes have the same parameters after every step, so that they are stored once."""
        agreeing = any(
            exchange.how.common and isinstance(exchange._when, Rounds) and exchange._when.H == exchange.unit == 1
            for exchange in self._of_gradients
        )
        same_for_all = all(e.how.common and not isinstance(e.keep, torch.Tensor) and not isinstance(e.delay, tuple)
                           for e in self.exchanges)  # fmt: skip
        return (
            agreeing and same_for_all and not self._per_node and (run.presence is None or run.presence.rejoin != "own")
        )

    def init(self, run: RunFacts, params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what each node has of its own, and what all nodes share, `[1, *]` both."""
        held = {"params": params, "optimizer": self.inner.init(params)}
        own: dict[str, Any]
        shared: dict[str, Any]
        own, shared = ({}, held) if self.alike(run) else (held, {})
        for exchange in self.exchanges:
            more_own, more_shared = exchange.init(params, run)
            own, shared = {**own, **more_own}, {**shared, **more_shared}
        return own, shared

    def result(self, state: State) -> Tree:
        """Return the parameters `[1 or K, *]` whose mean over the present nodes is the run's model."""
        return state.params

    def __repr__(self) -> str:
        inner, options = self.inner, {"max_norm": None, "lr_scheduler": None, "warmup_steps": 0, "cosine_anneal": False}
        parts = [repr(inner.spec), *([f"exchanges={self.exchanges!r}"] if self.exchanges else [])]
        given = {name: getattr(inner, name) for name, usual in options.items() if not same(getattr(inner, name), usual)}
        parts += [f"{name}={getattr(value, '__name__', repr(value))}" for name, value in given.items()]
        return f"{type(self).__name__}({', '.join(parts)})"

    # ----------------------------------------------------------------------------------------------------- handlers

    def step(self, part: Part) -> None:
        """Take a step whose gradients are exchanged before."""
        exchanges = self._of_gradients
        plain = len(exchanges) == 1 and exchanges[0].average.plain and not part.simulation.exact
        grads = part.gradients(mean=plain and part.home is part.shared)
        for exchange in exchanges:
            grads = exchange.now(part, grads)
        part.optimize(grads)
        part.report(part.losses)

    def meet(self, part: Part) -> None:
        """Let those who meet agree, and go on with it."""
        self.exchanges[part.event.info.of.exchange].meet(part)

    def agree(self, part: Part) -> None:
        """Let those who send make a message."""
        self.exchanges[part.event.info.of.exchange].agree(part)

    def settle(self, part: Part) -> None:
        """Change what all share by a message."""
        self.exchanges[part.event.info.of.exchange].settle(part)

    def write(self, part: Part) -> None:
        """Let nodes go on with what was agreed on."""
        self.exchanges[part.event.info.of.exchange].write(part)
