"""`vecgym.engine.simulation.Simulation`'s interface on the kernel, `vecgym.simulation`: its tests run on both.

`on_the_kernel` makes the library use it. `VECGYM_KERNEL=1 pytest` runs the whole suite so.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import vecgym
from vecgym import simulation as kernel
from vecgym.collectives import Collectives
from vecgym.core import nodes, tree
from vecgym.core.tree import Tree
from vecgym.engine.simulation import Simulation
from vecgym.engine.state import Metrics, State
from vecgym.simulation.adapted import Adapted
from vecgym.simulation.simulation import Draft


def suits(comm: Collectives, options: dict[str, Any]) -> bool:
    """Whether the kernel does it: not (yet) several configurations, nor absences in several processes."""
    configurations = getattr(comm, "num_configs", 1) > 1 or options.get("keys") is not None
    apart = len(comm.node_ids) < comm.num_nodes and options.get("presence") is not None
    return not configurations and not apart and not options.get("own_time")


class OnTheKernel(Simulation):
    """A `Simulation` whose steps are ticks of the kernel."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        if args and not suits(args[2], options):
            return Simulation(*args, **options)
        return super().__new__(cls)

    def __init__(self, model: Any, strategy: Any, comm: Collectives, **options: Any) -> None:
        super().__init__(model, strategy, comm, **options)
        ids = comm.node_ids.tolist()
        self.run = kernel.RunFacts(comm.num_nodes, self.max_steps, self.seed, self.presence, self.num_examples)
        self.adapted = Adapted(self.strategy, exact=self.exact)
        self.kernel = kernel.Simulation(
            self.engine, self.adapted, self.run, comm, lambda requests: iter(()), here=range(ids[0], ids[-1] + 1),
            minibatch_size=self.minibatch_size,
        )  # fmt: skip

    def init(self, params: Tree | None = None) -> State:
        if params is not None and max(len(p) for p in params.values()) > 1:
            first = {name: p[:1] for name, p in params.items()}
            state = self.kernel.init(first)
            own = {**state.own, "params": nodes.widened(params, self.num_local)}
            return self.old(kernel.State(0, own, {n: x for n, x in state.shared.items() if n != "params"}))
        return self.old(self.kernel.init(params))

    def step(
        self, state: State, batch: Any, *, differentiable: bool = False,
        observe: Callable[[Tree], None] | None = None, limits: Sequence[int] | None = None,
    ) -> tuple[State, Metrics]:  # fmt: skip
        timetable, self.adapted.strategy = self.adapted._timetable, self.strategy  # which copies exchange
        events = timetable.events(state.step)
        rows = next((event.rows for event in events if event.what == "train"), ())
        there = self.run.there(state.step)

        def before(event: kernel.Event, draft: Draft) -> None:
            if event.what == "exchange" and observe is not None:
                observe((draft.shared if "params" in draft.shared else draft.own)["params"])

        given = self.of_rows(batch, rows, there, limits)
        new, row = self.kernel.tick(self.new(state), events, iter([given]), pure=differentiable, before=before)
        return self.old(new), self.metrics(state, row, rows)

    def of_rows(self, batch: Any, rows: Any, there: Any, limits: Any) -> tuple[Any, Any]:
        """The batch of those who train."""
        here = self._node_ids
        count = next(tree.leaves(batch)).shape[0]
        given = here if count == len(here) else [node for node in here if there is None or node in there]
        wanted = [node for node in here if rows is None or node in rows]
        limits = limits if limits is not None else None if self.limits is None else [self.limits[i] for i in given]
        if wanted == given:
            return batch, limits
        chosen = [given.index(node) for node in wanted]
        limits = None if limits is None else [limits[i] for i in chosen]
        return nodes.take_rows(batch, torch.tensor(chosen, dtype=torch.long)) if len(given) > 1 else batch, limits

    def metrics(self, state: State, row: kernel.Row, rows: Any) -> Metrics:
        presence, step = self.presence, state.step
        event = next(event for event in row.events if event.what == "exchange")
        part = kernel.Part(
            self.kernel, Draft(step, dict(self.held.own), dict(self.held.shared), iter(()), False), event
        )
        ctx = self.adapted._context(part)
        lr = self.strategy.lr(ctx) if ctx.lr is None else ctx.lr
        there = self.run.there(step)
        if presence is not None and there is not None:
            lr = ctx.own(lr)
        active = None if rows is None else list(rows)
        return Metrics(
            row.losses, lr, active, self.strategy.outer_learning_rate(ctx), row.transfers,
            None if presence is None else self.num_local if there is None else len(there),
            None if presence is None else presence.never_present(step),
        )  # fmt: skip

    def old(self, state: kernel.State) -> State:
        """The same as a `State` of `vecgym.engine`."""
        self.held = state
        values = {**state.own, **state.shared}
        buffers = {**state.own["buffers"], **state.shared["buffers"]}
        made = (
            self.adapted._timetable.made(state.tick)
            if state.tick <= self.max_steps
            else [state.tick] * self.comm.num_nodes
        )
        here = torch.tensor([made[node] if self.counts_differ else state.tick for node in self._node_ids])
        optimizer = values["optimizer"]
        if self.adapted._counts:
            optimizer = {"step": here if len(set(here.tolist())) > 1 else here[:1], **optimizer}
        return State(state.tick, values["params"], buffers, optimizer, values["modules"], here)

    @property
    def counts_differ(self) -> bool:
        return self.adapted._timetable.trains is not None or self.presence is not None

    def new(self, state: State) -> kernel.State:
        """A `State` of `vecgym.engine` as one of the kernel."""
        if not hasattr(self, "held"):
            self.init()
        own, shared = dict(self.held.own), dict(self.held.shared)
        home = shared if "params" in shared else own
        wide = (lambda x: x) if home is shared else (lambda x: nodes.widened({"": x}, self.num_local)[""])
        home["params"] = tree.map_leaves(wide, state.params)
        home["optimizer"] = tree.map_leaves(wide, {k: x for k, x in state.optimizer.items() if k != "step"})
        for buffers in (own, shared):
            buffers["buffers"] = {name: state.buffers[name] for name in buffers["buffers"]}
        own["buffers"] = nodes.widened(own["buffers"], self.num_local)
        return kernel.State(state.step, own, {**shared, "modules": state.strategy})


def on_the_kernel() -> None:
    """Let all of the library take its steps on the kernel."""
    for path in Path(vecgym.__path__[0]).rglob("*.py"):
        parts = path.relative_to(vecgym.__path__[0]).with_suffix("").parts
        if parts[-1] not in ("__init__", "__main__") and parts[0] not in ("compat", "guide"):
            importlib.import_module(".".join(("vecgym", *parts)))
    for name, module in list(sys.modules.items()):
        if name.startswith("vecgym.") and vars(module).get("Simulation") is Simulation:
            vars(module)["Simulation"] = OnTheKernel
