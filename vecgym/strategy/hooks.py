"""Communication modules with hooks as exchanges: their hooks are called with a `Context` in every step."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vecgym.collectives import StackedCollectives
from vecgym.core import check, nodes
from vecgym.core.devices import placed
from vecgym.core.tree import Tree
from vecgym.simulation.presence import Presence, missed
from vecgym.simulation.simulation import Part, Place
from vecgym.simulation.timetable import Every, Mark, RunFacts, Who
from vecgym.strategy import contract
from vecgym.strategy.communication import CommunicationModule, Context, State, overrides
from vecgym.strategy.exchange import Of, moments_in, with_moment


class Hooks:
    """A communication module with hooks as an exchange; see `Exchange` for the methods.

    The module's state is in `shared`, `[1 or K, *]` as the module likes: what it returns as `[1, *]` is the same for
    all nodes. With absences it must stay so.

    Args:
        module: whose hooks are called.
        every: steps between two calls of those that exchange; they see a time that counts these.

    >>> from vecgym.strategy import Strategy
    >>> class Halve(CommunicationModule):
    ...     def exchange_parameters(self, params, state, ctx):
    ...         return {name: x / 2 for name, x in params.items()}, state
    >>> Strategy("sgd", [Halve()], lr=0.1).exchanges
    (Halve(),)
    """

    numbers = None
    common = plain = always = False
    draws = True

    def __init__(self, module: CommunicationModule, every: int = 1) -> None:
        self.module, self.every, self.index = module, every, 0
        adds = any(overrides(module, name) for name in ("local_gradients", "exchange_gradients"))
        self.of = "gradients" if adds else "hooks"
        self.of_all = overrides(module, "exchange_gradients")
        self.lets_rest = overrides(module, "active_nodes") and module.lets_rest

    def numbered(self, index: int) -> Hooks:
        """Return the same at this place among a strategy's exchanges."""
        twin = copy.copy(self)
        twin.index = index
        return twin

    def in_units(self, n: int) -> Hooks:
        """Return the same, whose hooks that exchange are called every n steps."""
        twin = copy.copy(self)
        twin.every = self.every * check.integer("n", n, what="the number of optimizer steps between two exchanges")
        return twin

    def through_server(self) -> Hooks:
        """Return itself: what a module with hooks averages is its own affair."""
        return self

    def check(self, run: RunFacts) -> None:
        """Let the module check the run."""
        self.module.check(run.num_nodes, self._steps(run))

    def check_present(self, run: RunFacts) -> None:
        """Let the module check how many nodes are present."""
        if isinstance(run.presence, Presence):
            if run.presence.waits and overrides(self.module, "exchange_gradients"):
                raise ValueError(
                    f"availability={run.presence.availability!r} makes nodes wait for others, but {self.module!r} "
                    "exchanges gradients in every step: use a module that exchanges parameters every H steps."
                )
            self.module.check_present(sorted(run.presence.counts), run.num_nodes)

    def check_optimizer(self, optimizer: Mapping[str, Any], params: Tree) -> None:
        """Take the slots of any optimizer."""

    def marks(self, run: RunFacts) -> Iterator[Mark]:
        """Yield when its hooks after the optimizer's step are called."""
        if overrides(self.module, "exchange_parameters") or overrides(self.module, "exchange_moments"):
            yield Mark("meet", Every(self.every), of=Of(self.index))

    def trains(self, run: RunFacts) -> Who | None:
        """Return who trains."""
        if not overrides(self.module, "active_nodes"):
            return None
        comm = StackedCollectives(run.num_nodes)

        def active(step: int, rows: Sequence[int]) -> list[int] | None:
            among = comm if len(rows) == run.num_nodes else comm.among(list(rows))
            ctx = Context(among, step=step // self.every, max_steps=self._steps(run), seed=run.seed, lr=0.0)
            places = contract.active_nodes(self.module, ctx)
            return None if places is None else [rows[i] for i in places]

        return active

    def init(self, params: Tree, run: RunFacts) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the module's state as what all nodes share."""
        comm = StackedCollectives(run.num_nodes)
        ctx = Context(comm, max_steps=self._steps(run), seed=run.seed, num_examples=run.num_examples, lr=0.0)
        return {}, {self._name: contract.init(self.module, params, ctx)}

    # ------------------------------------------------------------------------------------------------------- handlers

    def now(self, part: Part, grads: Tree) -> Tree:
        """Call the hooks between gradients and the optimizer's step."""
        ctx, state = self._context(part), self._state(part)
        if overrides(self.module, "local_gradients"):
            resting = len(part.rows) < len(_place(part, part.run.there(part.tick)).rows)
            grads = contract.local_gradients(self.module, grads, part.params, state, ctx, silent=resting)
        if overrides(self.module, "exchange_gradients") and (part.tick + 1) % self.every == 0:
            grads, new = contract.exchange_gradients(self.module, grads, state, ctx)
            if new is not state and part.inplace:  # the optimizer may write to the gradients, which a module may keep
                new = nodes.unshared({"": new}, {"": state}, (grads,))[""]
            self._put(part, new)
        return grads

    def meet(self, part: Part) -> None:
        """Call the hooks after the optimizer's step."""
        ctx, state, params = self._context(part), self._state(part), part.params
        with part.comm.ledger.stretched(self.every):
            if overrides(self.module, "exchange_moments"):
                moments = moments_in(part.home["optimizer"], params)
                moments, state = contract.exchange_moments(self.module, moments, state, ctx)
                for slot, values in moments.items():
                    part.home["optimizer"] = with_moment(part.home["optimizer"], slot, values)
            if overrides(self.module, "exchange_parameters"):
                part.params, state = contract.exchange_parameters(self.module, params, state, ctx)
        self._put(part, state)

    # ------------------------------------------------------------------------------------------------- what it tells

    def outer_lr(self, step: int, run: RunFacts) -> Any:
        """Return the learning rate of the module's own optimizer; None: it has none."""
        ctx = Context(StackedCollectives(1), step=step // self.every, max_steps=self._steps(run))
        return self.module.outer_learning_rate(ctx)

    def outer(self, shared: Any, names: Sequence[str]) -> Tree:
        """Return the parameters that the module keeps once for all nodes."""
        return self.module.outer_parameters(shared[self._name])

    def agreed(self, run: RunFacts, names: Sequence[str], tick: int) -> tuple[set[str], set[str]]:
        """Return which parameters are equal on all nodes after a step, none known, and which may have changed."""
        return set(), set(names) if overrides(self.module, "exchange_parameters") else set()

    def __repr__(self) -> str:
        return repr(self.module) if self.every == 1 else f"every({self.every}, {self.module!r})"

    # -------------------------------------------------------------------------------------------------------- helpers

    @property
    def _name(self) -> str:
        return f"{self.index}/state"

    def _steps(self, run: RunFacts) -> int:
        return max(1, run.num_steps // self.every)

    def _context(self, part: Part) -> Context:
        """Return what the hooks are told: about the nodes that are present, or of these about those that train."""
        run, presence, made, step = part.run, part.run.presence, part.made, part.tick
        there, counts = run.there(step), [made] * len(part.nodes) if isinstance(made, int) else made
        nodes_there = range(run.num_nodes) if there is None else there
        ids = None if len(part.nodes) == run.num_nodes else torch.tensor(part.nodes)
        ctx = Context(
            _place(part, there).comm, step=step // self.every, node_steps=torch.tensor(counts),
            max_steps=self._steps(run), seed=run.seed, inplace=part.inplace, differentiable=not part.inplace, rows=ids,
            exact=part.simulation.exact, own_time=presence is not None and part.home is part.own,
            num_examples=None if run.num_examples is None else tuple(run.num_examples[node] for node in nodes_there),
            missed=self._missed(presence, ids), lr=self._lr(part),
        )  # fmt: skip
        training = part.simulation.table_of(part.event.group).training(step)  # type: ignore[attr-defined]  # of Lockstep
        if training is not None and training != there:
            ctx = ctx.replace(active=tuple(i for i, node in enumerate(nodes_there) if node in set(training)))
        return ctx

    def _missed(self, presence: Any, ids: Tensor | None) -> Any:
        if not isinstance(presence, Presence):
            return None
        return lambda step: missed(presence, ids, (step + 1) * self.every - 1)

    def _lr(self, part: Part) -> Any:
        """Return the inner learning rate as hooks are told it: one for all, or `[K]`."""
        lr = part.lr
        if not isinstance(lr, Tensor) or lr.dim() == 0 or len(part.nodes) == part.run.num_nodes:
            return lr
        ids = placed(torch.tensor(part.nodes), lr.device)
        return lr.new_zeros(part.run.num_nodes).index_copy(0, ids, lr.expand(len(ids)))

    def _state(self, part: Part) -> State:
        """Return the module's state, of the event's rows."""
        state: State = part.shared[self._name]
        rows, _ = _rows(part)
        return state if rows is None else nodes.take_rows(state, rows)

    def _put(self, part: Part, new: State) -> None:
        """Put the module's state back, beside that of the other nodes."""
        old, (rows, num_rows) = part.shared[self._name], _rows(part)
        if rows is None:
            part.shared[self._name] = new
            return

        def put(x: Any, was: Any) -> Any:
            if not isinstance(x, Tensor) or (len(x) == 1 and (len(part.rows) > 1 or was is None or len(was) == 1)):
                return x
            return nodes.put_rows({} if was is None else {"": was}, rows, {"": x}, num_rows, inplace=False)[""]

        part.shared[self._name] = _joined(put, new, old)


def _place(part: Part, rows: tuple[int, ...] | None) -> Place:
    """Return the place of some of the nodes of a part's run; None: of all of them."""
    return part.simulation.place(rows, part.event.group)


def _rows(part: Part) -> tuple[Tensor | None, int]:
    """Return where a part's rows are among those of its run in this process, and how many these are; None: all."""
    here = _place(part, None).nodes
    return None if len(part.nodes) == len(here) else torch.tensor([here.index(node) for node in part.nodes]), len(here)


def _joined(put: Any, new: Any, old: Any) -> Any:
    if not isinstance(new, dict):
        return put(new, old)
    return {key: _joined(put, x, old.get(key) if isinstance(old, dict) else None) for key, x in new.items()}
