"""Strategies of communication modules as algorithms: their hooks, called with a `Context`, are the handlers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vecgym.collectives import Collectives, StackedCollectives
from vecgym.core import nodes, tree
from vecgym.core.tree import Path, Tree
from vecgym.engine import Engine
from vecgym.simulation.exchanges import agreed, exchange_moments, exchanges_gradients, replaced, stored_once
from vecgym.simulation.presence import Presence, missed
from vecgym.simulation.returning import Shared, check_presence, sent, through_server
from vecgym.simulation.simulation import Batches, Part, Request, Simulation
from vecgym.simulation.state import HookState, State
from vecgym.simulation.timetable import Lockstep, Mark, RunFacts
from vecgym.strategy import Context, Strategy
from vecgym.strategy.asynchronous import check_synchronous
from vecgym.strategy.base import lets_rest
from vecgym.strategy.inner import row_by_row
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

    >>> from vecgym.strategy import FedAvgStrategy
    >>> from vecgym.models import Line
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
    ids: list[int] = comm.node_ids.tolist()
    run = RunFacts(comm.num_nodes, max_steps, seed, presence, num_examples)
    adapted = Adapted(as_strategy(strategy, model), comm, exact=exact)
    return Simulation(
        Engine(model) if engine is None else engine, adapted, run, comm, read, here=range(ids[0], ids[-1] + 1),
        minibatch_size=minibatch_size,
    )  # fmt: skip


class Adapted:
    """A strategy as an algorithm: nodes compute gradients and take optimizer steps, then exchange.

    The modules' states are in `shared["modules"]`, `[1 or K, *]` as each module likes. Parameters and optimizer are
    shared until the nodes differ; under AllReduce they never do. The timetable counts each node's steps, so the
    optimizer's state holds no count.

    A process none of whose nodes is present makes the same calls as the others, with a row that nobody reads, and keeps
    what is the same for all.

    Args:
        comm: of all nodes; None: all are in this process.
        exact: the bits of a node's own work do not depend on which other nodes are in this process.

    >>> from vecgym.strategy import AllReduceStrategy
    >>> adapted = Adapted(AllReduceStrategy("sgd", lr=0.1))
    >>> [event.what for event in adapted.timetable(RunFacts(num_nodes=2)).events(0)]
    ['train', 'exchange']
    >>> own, shared = adapted.init(RunFacts(num_nodes=2), {"w": torch.zeros(1, 3)})
    >>> sorted(own), sorted(shared)
    ([], ['modules', 'optimizer', 'params'])
    """

    def __init__(self, strategy: Strategy, comm: Collectives | None = None, *, exact: bool = False) -> None:
        self.strategy, self.comm, self.exact = strategy, comm, exact
        self.apart = comm is not None and len(comm.node_ids) < comm.num_nodes
        self.here: list[int] | None = None if comm is None else comm.node_ids.tolist()

    # ------------------------------------------------------------------------------------------------- before the run

    def timetable(self, run: RunFacts) -> Lockstep:
        presence = run.presence
        if hasattr(self, "_run"):
            raise ValueError("this Adapted already belongs to a simulation: make another one.")
        if isinstance(presence, Presence):
            check_presence(presence, self.strategy)
            if presence.server:
                self.strategy = through_server(self.strategy)
        resting = type(self.strategy).active_nodes is not Strategy.active_nodes
        resting |= any(map(lets_rest, self.strategy.communication_modules))
        self._exchanges_gradients = exchanges_gradients(self.strategy)
        self._timetable = Lockstep(run, Mark("exchange"), trains=self._active if resting else None)
        self._run = run
        return self._timetable

    def _active(self, step: int, rows: Sequence[int]) -> list[int] | None:
        """Return which of the present nodes train; None: all of them."""
        run, comm = self._run, StackedCollectives(self._run.num_nodes)
        among = comm if len(rows) == run.num_nodes else comm.among(list(rows))
        places = self.strategy.active_nodes(Context(among, step=step, max_steps=run.num_steps, seed=run.seed, lr=0.0))
        return None if places is None else [rows[i] for i in places]

    def init(self, run: RunFacts, params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
        comm = StackedCollectives(run.num_nodes) if self.comm is None else self.comm
        ctx = Context(
            comm, max_steps=run.num_steps, seed=run.seed, num_examples=run.num_examples, exact=self.exact,
            rows=comm.node_ids if self.apart else None,
        )  # fmt: skip
        ctx = ctx.replace(lr=self.strategy.lr(ctx)) if self.strategy.pure else ctx
        optimizer, modules = self.strategy.init(params, ctx)
        absent = isinstance(run.presence, Presence) and min(run.presence.counts) < run.num_nodes
        parted = absent and run.presence is not None and run.presence.rejoin == "own"
        together, once = self._exchanges_gradients and not parted, None
        if absent or (self.apart and together):
            once = stored_once(self.strategy, params, run.num_nodes, run.num_steps, run.seed, trained=together)
        if absent and once is None and self.apart:
            raise ValueError(
                f"{self.strategy!r} does not support availability in several processes: what it exchanges depends on "
                "values, so it is not known in advance what all nodes store once. Leave availability out, or give "
                'backend="stacked".'
            )
        self._once = None if once is None else once.modules
        self._counts = "step" in optimizer
        trained = {"params": params, "optimizer": {slot: x for slot, x in optimizer.items() if slot != "step"}}
        some_rest = self._timetable.trains is not None or (isinstance(run.presence, Presence) and run.presence.waits)
        shared = bool(once.params) if once else not (self.apart or some_rest or absent)
        if shared and all(len(p) == 1 for p in params.values()):
            return {}, {**trained, "modules": modules}
        return trained, {"modules": modules}

    def of(self, strategy: Strategy) -> Adapted:
        """Return a copy for a strategy with other hyperparameters.

        >>> from vecgym.strategy import FedAvgStrategy
        >>> Adapted(FedAvgStrategy("sgd", lr=0.1)).of(FedAvgStrategy("sgd", lr=0.2)).strategy.inner_optim.lr
        0.2
        """
        twin = copy.copy(self)
        twin.strategy = strategy
        return twin

    def result(self, state: State) -> Tree:
        """Return the parameters whose mean is the run's model; see `Strategy.result`."""
        return self.strategy.result(self.as_hooks_know(state))

    def as_hooks_know(self, state: State) -> HookState:
        """Return the state in the form that `Strategy.result` takes."""
        made = self._timetable.made(state.tick)
        node_steps = torch.tensor(made if self.here is None else [made[node] for node in self.here])
        counts = node_steps[:1] if bool((node_steps == node_steps[0]).all()) else node_steps
        if state.home is state.shared:
            counts = torch.tensor([state.tick])
        optimizer = {"step": counts, **state.home["optimizer"]} if self._counts else state.home["optimizer"]
        return HookState(state.tick, state.params, state.buffers, optimizer, state.shared["modules"], node_steps)

    def hidden_state(self) -> Any:
        """Return what evolves outside the state, to be saved: strategies written for one rank have such."""
        return self.strategy.hidden_state()

    def load_hidden_state(self, state: Any) -> None:
        """Restore what `hidden_state` returned; call it after `init`."""
        self.strategy.load_hidden_state(state)

    def close(self) -> None:
        """End the strategy's threads."""
        self.strategy.close()

    # ------------------------------------------------------------------------------------------------------- handlers

    def rejoin(self, part: Part) -> None:
        """Send parameters to the nodes that return."""
        run, step, presence, strategy = self._run, part.tick, self._run.presence, self.strategy
        assert isinstance(presence, Presence)
        params, shared = part.params, part.home is part.shared
        outer, same = Tree(), set[str]()
        if presence.rejoin == "shared":
            outer = strategy.outer_parameters(part.shared["modules"])
            if presence.server or len(outer) < len(params):
                like = {name: torch.empty_like(p[:1], device="meta") for name, p in params.items()}
                same = agreed(strategy, like, run.num_nodes, step - 1, run.num_steps, run.seed)
        begin = sent(params, presence, Shared(outer, same), part.comm, step, once=list(params) if shared else [])
        back = [i for i, row in enumerate(part.rows) if row in set(part.event.info)]
        if back and not shared:
            part.params = nodes.put_rows(params, torch.tensor(back), begin, len(part.rows), part.inplace)

    def train(self, part: Part) -> None:
        """Let each node that does not rest take a step."""
        strategy, ctx, modules = self.strategy, self._context(part), self._modules(part)
        resting, of_rows = ctx.active is not None, modules
        if resting:
            if not part.rows:
                return
            training = [i for i, row in enumerate(self._present(part)) if row in set(part.rows)]
            ctx = ctx.of_rows(torch.tensor(training))
            of_rows = strategy.take_rows(part.shared["modules"], self._places(part, part.rows))
        grads = self._gradients(part)
        grads = strategy.local_gradients(grads, self._home(part, "params"), of_rows, ctx)
        if not resting or strategy.exchanges_where_some_rest:
            local = grads
            grads, changed = strategy.exchange_gradients(local, modules, ctx)
            if changed is not modules:
                if part.inplace:  # the optimizer may write to the gradients, which a module may keep
                    changed = nodes.unshared(changed, modules, (local, grads))
                self._put_modules(part, changed, modules)
        self._optimize(part, grads, ctx)
        assert part.losses is not None
        part.report(part.losses)

    def exchange(self, part: Part) -> None:
        """Exchange moments, then parameters."""
        strategy, ctx = self.strategy, self._context(part)
        lr = strategy.lr(ctx) if ctx.lr is None else ctx.lr
        part.report(lr=ctx.own(lr), outer_lr=strategy.outer_learning_rate(ctx))
        if strategy.idle(ctx):
            return
        modules, params = self._modules(part), self._home(part, "params")
        optimizer, changed = exchange_moments(strategy, self._counted(part, ctx), params, modules, ctx)
        params, changed = strategy.exchange_parameters(params, changed, ctx)
        self._put(part, params, optimizer)
        self._put_modules(part, changed, modules)

    def _gradients(self, part: Part) -> Tree:
        strategy, shared = self.strategy, part.home is part.shared
        grads = part.gradients(mean=strategy.mean_gradient and shared and not self.exact)
        if not part.rows:
            return {name: torch.zeros_like(p) for name, p in self._home(part, "params").items()}
        if shared and part.simulation.engine.written and self._exchanges_gradients:
            self._store_again(part)
        return grads

    def _optimize(self, part: Part, grads: Tree, ctx: Context) -> None:
        strategy = self.strategy
        if self._looks_on(part):
            return
        params, state = part.params, self._counted(part, ctx)
        if self.exact and strategy.pure:
            ctx_of = lambda i: ctx if i is None else ctx.of_rows(torch.tensor([i]))  # noqa: E731
            new, state = row_by_row(lambda i, p, g, s: strategy.optimize(p, g, s, ctx_of(i)), params, grads, state)
        else:
            new, state = strategy.optimize(params, grads, state, ctx)
        self._put(part, new, state)

    # ----------------------------------------------------------------------------------- what hooks take and return

    def _context(self, part: Part) -> Context:
        """Return what the hooks of this tick are called with: it is about the nodes that are present."""
        if "context" not in part.memo:
            part.memo["context"] = self._new_context(part)
        ctx: Context = part.memo["context"]
        return ctx

    def _new_context(self, part: Part) -> Context:
        run, presence, step = self._run, self._run.presence, part.tick
        there, training = run.there(step), self._timetable.training(step)
        comm = part.simulation.place(there).comm
        comm.step = step
        rows = self._present(part) or [part.simulation.here.start]
        made = self._timetable.made(step)
        nodes_there = range(run.num_nodes) if there is None else there
        ids = comm.ids if len(rows) < run.num_nodes else None
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

    def _present(self, part: Part) -> list[int]:
        """Return the nodes of this process that are present."""
        return part.simulation.place(self._run.there(part.tick)).rows

    def _looks_on(self, part: Part) -> bool:
        """Whether none of the nodes that have parameters of their own is here."""
        return part.home is part.own and not part.rows

    def _home(self, part: Part, name: str) -> Tree:
        """Return the parameters or the optimizer of the event's rows; if none is here, a row that nobody reads."""
        values: Tree = part.own.first(name) if self._looks_on(part) else part.home[name]
        return values

    def _places(self, part: Part, rows: Sequence[int]) -> Tensor:
        return torch.tensor([row - part.simulation.here.start for row in rows], dtype=torch.long)

    def _modules(self, part: Part) -> Any:
        """Return the modules' states of the nodes of this process that are present."""
        modules, rows = part.shared["modules"], self._present(part)
        whole = len(rows) == len(part.simulation.here)
        places = self._places(part, rows or [part.simulation.here.start])
        return modules if whole else self.strategy.take_rows(modules, places)

    def _put_modules(self, part: Part, new: Any, before: Any) -> None:
        """Put the modules' states back, beside those of the absent nodes."""
        old, rows, num_rows = part.shared["modules"], self._present(part), len(part.simulation.here)
        if self._run.there(part.tick) is not None:
            places, once = self._places(part, rows), self._once

            def put(x: Tensor, was: Tensor | None) -> Tensor:
                if not rows:
                    value = torch.zeros_like(x) if was is None else was
                    return value if len(value) == num_rows else value.repeat_interleave(num_rows, 0)
                wide: Tensor = nodes.put_rows({} if was is None else {"": was}, places, {"": x}, num_rows, False)[""]
                return wide

            def together(path: Path, x: Tensor, was: Tensor | None) -> bool:
                if once is not None:
                    return path in once
                return len(x) == 1 and (len(rows) > 1 or was is None or len(was) == 1)

            new = replaced(new, old, together, put, before)
        part.shared["modules"] = new

    def _counted(self, part: Part, ctx: Context) -> dict[str, Any]:
        """Return the optimizer's state with the number of steps that its rows have taken."""
        optimizer = self._home(part, "optimizer")
        if not self._counts:
            return optimizer
        steps = [part.tick] if part.home is part.shared else ctx.node_steps.tolist()
        if steps.count(steps[0]) == len(steps):
            steps = steps[:1]
        return {"step": torch.tensor(steps), **optimizer}

    def _put(self, part: Part, params: Tree, optimizer: dict[str, Any]) -> None:
        if self._looks_on(part):
            return
        optimizer = {slot: x for slot, x in optimizer.items() if slot != "step"}
        if part.home is part.shared and any(len(x) > 1 for x in tree.leaves([params, optimizer])):
            del part.shared["params"], part.shared["optimizer"]  # from now on each node has its own
            part.home = part.own
        part.params = params
        part.home["optimizer"] = optimizer

    def _store_again(self, part: Part) -> None:
        """Store parameters once again after each node's forward pass has written to its own copy."""
        for name, x in part.params.items():
            if len(x) < self._run.num_nodes or not torch.allclose(x, x[:1], 0, 0, equal_nan=True):
                raise ValueError(
                    f"the model's forward writes to its parameter {name!r}, and what it writes depends on the batch. "
                    f"{self.strategy!r} exchanges gradients, which needs the same parameters on all nodes: they would "
                    "drift apart, as they do in DDP. Use a strategy that exchanges parameters (DiLoCo, FedAvg), or "
                    "write nothing that depends on the batch."
                )
        part.params = {name: x[:1] for name, x in part.params.items()}
