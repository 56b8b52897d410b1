"""Strategies of communication modules as algorithms: their hooks, called with a `Context`, are the handlers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vecgym.collectives import StackedCollectives
from vecgym.core import nodes
from vecgym.core.tree import Path, Tree
from vecgym.engine.exchanges import agreed, exchange_moments
from vecgym.engine.once import stored_once
from vecgym.engine.presence import Presence, check_presence, exchanges_gradients, missed
from vecgym.engine.returning import Shared, rejoined, through_server
from vecgym.engine.rows import replaced
from vecgym.engine.state import State as Stepped
from vecgym.simulation.simulation import Part
from vecgym.simulation.timetable import Lockstep, Mark, RunFacts
from vecgym.strategy import Context, Strategy
from vecgym.strategy.base import lets_rest
from vecgym.strategy.inner import row_by_row


class Adapted:
    """A strategy with today's hooks: a gradient and an optimizer step for those who train, then what is exchanged.

    Modules keep their states as they like, `[1 or K, *]`, in `shared["modules"]`. Parameters and optimizer are
    shared where all nodes store them once, as they do under AllReduce. How many steps a node has made is in the
    timetable, so the optimizer's state holds no count.

    Args:
        exact: the bits of a node's own work do not depend on which other nodes are in this process.

    >>> from vecgym.strategy import AllReduceStrategy
    >>> adapted = Adapted(AllReduceStrategy("sgd", lr=0.1))
    >>> [event.what for event in adapted.timetable(RunFacts(num_nodes=2)).events(0)]
    ['train', 'exchange']
    >>> own, shared = adapted.init(RunFacts(num_nodes=2), {"w": torch.zeros(1, 3)})
    >>> sorted(own), sorted(shared)
    ([], ['modules', 'optimizer', 'params'])
    """

    def __init__(self, strategy: Strategy, *, exact: bool = False) -> None:
        self.strategy, self.exact = strategy, exact

    # ------------------------------------------------------------------------------------------------- before the run

    def timetable(self, run: RunFacts) -> Lockstep:
        presence = run.presence
        if hasattr(self, "_run"):
            raise ValueError("an Adapted belongs to the simulation that it was given to first: make another one.")
        if isinstance(presence, Presence):
            check_presence(presence, self.strategy)
            if presence.server:
                self.strategy = through_server(self.strategy)
        resting = type(self.strategy).active_nodes is not Strategy.active_nodes
        resting |= any(map(lets_rest, self.strategy.communication_modules))
        self._timetable = Lockstep(run, Mark("exchange"), trains=self._active if resting else None)
        self._run = run
        return self._timetable

    def _active(self, step: int, rows: Sequence[int]) -> list[int] | None:
        """Return those who train of the nodes that are there; None: all of them."""
        run, comm = self._run, StackedCollectives(self._run.num_nodes)
        among = comm if len(rows) == run.num_nodes else comm.among(list(rows))
        places = self.strategy.active_nodes(Context(among, step=step, max_steps=run.num_steps, seed=run.seed, lr=0.0))
        return None if places is None else [rows[i] for i in places]

    def init(self, run: RunFacts, params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
        ctx = Context(StackedCollectives(run.num_nodes), max_steps=run.num_steps, seed=run.seed, lr=0.0)
        optimizer, modules = self.strategy.init(params, ctx)
        absent = isinstance(run.presence, Presence) and min(run.presence.counts) < run.num_nodes
        apart = absent and run.presence is not None and run.presence.rejoin == "own"
        together, known = exchanges_gradients(self.strategy) and not apart, None
        if together or absent:
            known = stored_once(self.strategy, params, run.num_nodes, run.num_steps, run.seed, trained=together)
        self._once = None if known is None else known.modules
        self._counts = "step" in optimizer
        trained = {"params": params, "optimizer": {slot: x for slot, x in optimizer.items() if slot != "step"}}
        if known is not None and known.params:
            return {}, {**trained, "modules": modules}
        return trained, {"modules": modules}

    # ------------------------------------------------------------------------------------------------------- handlers

    def rejoin(self, part: Part) -> None:
        """Send parameters to those who return."""
        run, step, presence, strategy = self._run, part.tick, self._run.presence, self.strategy
        assert isinstance(presence, Presence)
        modules, params, K = part.shared["modules"], part.params, run.num_nodes
        outer, same = Tree(), set[str]()
        if presence.rejoin == "shared":
            outer = strategy.outer_parameters(modules)
            if presence.server or len(outer) < len(params):
                like = {name: torch.empty_like(p[:1], device="meta") for name, p in params.items()}
                same = agreed(strategy, like, K, step - 1, run.num_steps, run.seed)
        state = Stepped(step, params, {}, {}, modules, node_steps=torch.zeros(K))
        part.params = rejoined(state, presence, Shared(outer, same), part.comm, inplace=False).params

    def train(self, part: Part) -> None:
        """Let each node take a step, those who do not rest."""
        strategy, ctx, modules = self.strategy, self._context(part), self._modules(part)
        resting, shared = ctx.active is not None, part.home is part.shared
        of_rows = modules
        if resting:
            if not part.rows:
                return
            training = [i for i, row in enumerate(self._rows(part)) if row in set(part.rows)]
            ctx = ctx.of_rows(torch.tensor(training))
            of_rows = strategy.take_rows(part.shared["modules"], self._places(part, part.rows))
        grads = part.gradients(mean=strategy.mean_gradient and shared and not self.exact)
        self._store_again(part, shared)
        grads = strategy.local_gradients(grads, part.params, of_rows, ctx)
        if not resting or strategy.exchanges_where_some_rest:
            given = grads
            grads, changed = strategy.exchange_gradients(given, modules, ctx)
            if changed is not modules:
                if part.inplace:  # the optimizer may write to the gradients, which a module may keep
                    changed = nodes.unshared(changed, modules, (given, grads))
                self._keep(part, changed, modules)
        self._optimize(part, grads, ctx)
        assert part.losses is not None
        part.report(part.losses)

    def exchange(self, part: Part) -> None:
        """Exchange moments, then parameters."""
        strategy, ctx = self.strategy, self._context(part)
        if strategy.idle(ctx):
            return
        modules = self._modules(part)
        optimizer, changed = exchange_moments(strategy, self._counted(part, ctx), part.params, modules, ctx)
        self._keep_optimizer(part, optimizer)
        part.params, changed = strategy.exchange_parameters(part.params, changed, ctx)
        self._keep(part, changed, modules)

    def _optimize(self, part: Part, grads: Tree, ctx: Context) -> None:
        strategy, params, held = self.strategy, part.params, self._counted(part, ctx)
        if self.exact and strategy.pure:
            told = lambda i: ctx if i is None else ctx.of_rows(torch.tensor([i]))  # noqa: E731
            new, held = row_by_row(lambda i, p, g, s: strategy.optimize(p, g, s, told(i)), params, grads, held)
        else:
            new, held = strategy.optimize(params, grads, held, ctx)
        part.params = new
        self._keep_optimizer(part, held)

    # ------------------------------------------------------------------------------ what hooks are told, and give back

    def _context(self, part: Part) -> Context:
        """Return what the hooks are told in this tick, of the nodes that are there."""
        if "context" not in part.memo:
            part.memo["context"] = self._new_context(part)
        found: Context = part.memo["context"]
        return found

    def _new_context(self, part: Part) -> Context:
        run, presence, step, simulation = self._run, self._run.presence, part.tick, part.simulation
        there, training = run.there(step), self._timetable.training(step)
        comm = simulation.place(there).comm
        comm.step = step
        rows = self._rows(part)
        ids = torch.tensor(rows) if len(rows) < run.num_nodes else None
        made = self._timetable.made(step) if self._timetable.trains or presence else [step] * run.num_nodes
        nodes_there = range(run.num_nodes) if there is None else there
        ctx = Context(
            comm, step=step, node_steps=torch.tensor([made[row] for row in rows]), max_steps=run.num_steps,
            seed=run.seed, inplace=part.inplace, differentiable=not part.inplace, rows=ids, exact=self.exact,
            own_time=presence is not None and part.home is part.own,
            num_examples=None if run.num_examples is None else tuple(run.num_examples[node] for node in nodes_there),
            missed=functools.partial(missed, presence, ids) if isinstance(presence, Presence) else None,
        )  # fmt: skip
        if training is not None and training != there:
            ctx = ctx.replace(active=tuple(i for i, node in enumerate(nodes_there) if node in set(training)))
        return ctx.replace(lr=self.strategy.lr(ctx)) if self.strategy.pure else ctx

    def _rows(self, part: Part) -> list[int]:
        """Return the nodes here that are there."""
        return part.simulation.place(self._run.there(part.tick)).rows

    def _places(self, part: Part, rows: Sequence[int]) -> Tensor:
        return torch.tensor([row - part.simulation.here.start for row in rows], dtype=torch.long)

    def _modules(self, part: Part) -> Any:
        """Return the modules' states of the nodes here that are there."""
        modules, rows = part.shared["modules"], self._rows(part)
        whole = len(rows) == len(part.simulation.here)
        return modules if whole else self.strategy.take_rows(modules, self._places(part, rows))

    def _keep(self, part: Part, new: Any, before: Any) -> None:
        """Put the modules' states among those of the nodes that are absent."""
        old, rows, num_rows = part.shared["modules"], self._rows(part), len(part.simulation.here)
        if len(rows) < num_rows:
            places, once = self._places(part, rows), self._once

            def put(x: Tensor, was: Tensor | None) -> Tensor:
                found: Tensor = nodes.put_rows({} if was is None else {"": was}, places, {"": x}, num_rows, False)[""]
                return found

            def together(path: Path, x: Tensor, was: Tensor | None) -> bool:
                if once is not None:
                    return path in once
                return len(x) == 1 and (len(rows) > 1 or was is None or len(was) == 1)

            new = replaced(new, old, together, put, before)
        part.shared["modules"] = new

    def _counted(self, part: Part, ctx: Context) -> dict[str, Any]:
        """Return the optimizer's state with the steps that its rows have made."""
        held = part.home["optimizer"]
        if not self._counts:
            return held
        each = [part.tick] if part.home is part.shared else ctx.node_steps.tolist()
        if each.count(each[0]) == len(each):
            each = each[:1]
        return {"step": torch.tensor(each), **held}

    def _keep_optimizer(self, part: Part, new: dict[str, Any]) -> None:
        part.home["optimizer"] = {slot: x for slot, x in new.items() if slot != "step"}

    def _store_again(self, part: Part, shared: bool) -> None:
        """Store once what the forward passes of nodes that share parameters have written, each to its own."""
        if not shared or not part.simulation.engine.written:
            return
        for name, x in part.params.items():
            if not torch.allclose(x, x[:1], 0, 0, equal_nan=True):
                raise ValueError(
                    f"the model's forward writes to its parameter {name!r}, on each node what its own batch says, and "
                    "the nodes exchange gradients: theirs would drift apart. Take a strategy that exchanges parameters."
                )
        part.params = {name: x[:1] for name, x in part.params.items()}
