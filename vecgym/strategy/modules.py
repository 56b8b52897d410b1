"""What nodes agree on, and when: an `Average` of gradients, of parameters, or of movements for an outer optimizer.

HOW (`vecgym.strategy.average`), WHEN (`vecgym.strategy.when`) and WHAT are chosen independently of one another:

>>> from vecgym.compress import TopK
>>> from vecgym.strategy import Compressed, Mean
>>> OuterStep(Compressed(Mean(island_size=4, participation=0.5), TopK(0.05)), OptimSpec("sgd", lr=0.7), H=50)
OuterStep(Compressed(Mean(island_size=4, participation=0.5), TopK(fraction=0.05, k=None)), \
outer_optim=OptimSpec(SGD, lr=0.7), H=50)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from vecgym.core import check, tree
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec, Rule, ensure_optim_spec
from vecgym.optim.spec import merge_key, merged_spec
from vecgym.strategy.average import Average, check_average, kept, per_row, shown
from vecgym.strategy.base import CommunicationModule, Context, State, optimizer_step
from vecgym.strategy.communication import counted
from vecgym.strategy.lost import arrived, average_among, is_everyones, is_shared
from vecgym.strategy.when import QUEUE, Late, Rounds, SyncWeight, When, as_when, blended, check_in_time, nothing

OUTER_DEFAULTS: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}  # DiLoCo's
DEFAULT_H = 100


class Exchange(CommunicationModule):
    """A module that holds how the nodes agree, and when."""

    average: Average
    when: When
    of_values = True  # as the nodes hold them, and no differences
    shows_defaults = False  # in its representation

    def check(self, num_nodes: int, max_steps: int) -> None:
        self.when.check(max_steps, self)
        self.average.check(num_nodes, max_steps)

    def check_present(self, counts: Sequence[int], num_nodes: int) -> None:
        self.average.check_present(counts, num_nodes)

    def active_nodes(self, ctx: Context) -> list[int] | None:
        return self.average.active_nodes(counted(self, ctx))

    @property
    def lets_rest(self) -> bool:  # type: ignore[override]
        return not self.average.everyone

    def around(self, average: Average) -> CommunicationModule:
        """Return the same module with another average."""
        twin = copy.copy(self)
        twin.average = average
        return twin

    def __repr__(self) -> str:
        return shown(self, self.shows_defaults)


class Gradients(Exchange):
    """Every step: the optimizer takes the average of the nodes' gradients.

    g_i <- average(g_1, ..., g_K). With `Mean()` over all nodes, parameters and optimizer state are stored once.

    State: the average's. Bytes: the average's.

    Args:
        average: how the nodes agree; not one in which some of them take no part.

    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.strategy import Robust
    >>> grads, ctx = {"w": torch.tensor([1.0, 2.0, -60.0])}, Context(StackedCollectives(3))
    >>> Gradients(Robust("median")).exchange_gradients(grads, {}, ctx)[0]
    {'w': tensor([1.])}
    """

    when = Rounds(1)
    of_values = False
    active_nodes = CommunicationModule.active_nodes  # all: a node that sits out has no gradient

    def __init__(self, average: Average) -> None:
        self.average = check_average("average", average)
        if not average.everyone:
            raise ValueError(
                f"{average!r} lets some nodes sit out, and gradients are exchanged by all at every step: give "
                "participation=1, or Parameters(average)."
            )

    @property
    def mean_gradient(self) -> bool:  # type: ignore[override]
        return self.average.plain

    def init(self, params: Tree, ctx: Context) -> State:
        return self.average.init(tree.map(torch.zeros_like, params), ctx)

    def exchange_gradients(self, grads: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        return self.average(grads, state, counted(self, ctx))


class Parameters(Exchange):
    """Every so many steps: each node goes on from the average of the nodes' parameters.

    theta_i <- average(theta_1, ..., theta_K).

    With `delay` = d what was agreed on at step t is written at step t + d, over
    whatever the nodes hold by then; within a step the new average is taken first, then the late one is written. What is
    still under way when the run ends is lost.

    State: the average's; with a delay `average`, the average's, and `queue`, d slots for what is under way. Bytes: the
    average's, per exchange.

    Args:
        average: how the nodes agree.
        every: optimizer steps between two exchanges, as a number or a function of the step, or a `SyncWeight`.
        delay: optimizer steps until what was agreed on is written.

    Raises:
        ValueError, TypeError: for every < 1, delay < 0, a delay together with a `SyncWeight`; at `check` unless the
            delay is smaller than the run's steps.

    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.strategy import Mean
    >>> module, params = Parameters(Mean(), every=2), {"w": torch.tensor([1.0, 3.0])}
    >>> for step in range(2):
    ...     print(module.exchange_parameters(params, {}, Context(StackedCollectives(2), step=step))[0]["w"])
    tensor([1., 3.])
    tensor([2.])
    """

    def __init__(self, average: Average, every: int | When | Callable[[int], int] = 1, delay: int = 0) -> None:
        self.average = check_average("average", average)
        self.when = as_when(every, "every")
        self.every = self.when if callable(every) else every
        self._late = Late(delay)
        self.delay = self._late.delay
        if self.delay and isinstance(self.when, SyncWeight):
            raise ValueError(f"delay={delay} and {self.when!r}: what is exchanged in part cannot be late as well.")

    def check(self, num_nodes: int, max_steps: int) -> None:
        super().check(num_nodes, max_steps)
        check_in_time(self, "delay", self.delay, max_steps)

    def init(self, params: Tree, ctx: Context) -> State:
        state = self.average.init(params, ctx)
        return {"average": state, QUEUE: self._late.init(self.average.empty(params))} if self.delay else state

    def exchange_parameters(self, params: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        if self.delay == 0:
            return self.when.exchange(self.average, params, state, counted(self, ctx))
        new, average = self.average.empty(params), state["average"]
        if self.when.due(ctx.step):
            with ctx.comm.ledger.lagging(self.delay):
                new, average = self.average.agree(params, average, counted(self, ctx).replace(inplace=False))
        due, queue = self._late.turn(new, state[QUEUE], ctx.step)
        before = ctx.step - self.delay  # when what is due was agreed on
        keeping = self.average.keeping(ctx.replace(exchange=self.when.count(before))) if before >= 0 else None
        missing = ctx.missing(before)
        keeping = missing if keeping is None else keeping if missing is None else keeping | missing
        written = self.average.write(due, params, ctx if keeping is None else ctx.replace(inplace=False))
        return kept(keeping, params, written), {"average": average, QUEUE: queue}

    def idle(self, ctx: Context) -> bool:
        return self.delay == 0 and not self.when.due(ctx.step)

    def stack_key(self) -> Hashable:
        """Return the interval; None for late ones, `SyncWeight`s, and any average but the mean of all nodes.

        >>> from vecgym.strategy import Mean
        >>> Parameters(Mean(), every=5).stack_key(), Parameters(Mean(2)).stack_key()
        (5, None)
        """
        together = self.average.plain and self.delay == 0 and isinstance(self.when, Rounds) and self.when.usual
        return self.when.H if together else None

    def stacked(self, modules: Sequence[Any], num_nodes: int) -> CommunicationModule:
        return self


class OuterStep(Exchange):
    """DiLoCo and Streaming DiLoCo: every H steps the average movement of the nodes is an outer optimizer's gradient.

    Delta = average_i(outer - theta_i);  outer <- optimizer(outer, Delta);
    theta_i <- alpha theta_i + (1 - alpha) outer.

    With P `fragments` the tensors are dealt out in turn, and each fragment has its own steps: fragment p exchanges
    first after `offsets[p]` steps, and then every H. With `delay` = d the last two of the three come d steps after the
    first. Where the average is not the same on all nodes (islands), outer parameters and optimizer state are each
    node's own; a node that takes no part in an exchange keeps all it has.

    State, of each fragment: `params`, the outer parameters, and `optimizer`, `[1 or L, *]`; `average`, the average's;
    `queue`, the movements under way. With several fragments these are under `"0"`, `"1"`, ...

    Args:
        average: how the nodes agree on the movement.
        outer_optim: "sgd" and `torch.optim.SGD` mean DiLoCo's SGD(lr=0.7, momentum=0.9, nesterov=True); an `OptimSpec`
            is taken as it is, so is any other optimizer.
        H: inner steps between two outer steps, as a number or a function of the step (`RoundsOf`), or a `SyncWeight`.
        fragments: P, the parts into which the parameters are cut.
        offsets: for each fragment the steps before its first exchange; H + p H / P when not given.
        delay: optimizer steps from the exchange to its effect.
        alpha: what a node keeps of its own parameters, in [0, 1).
        lost: the probability, for each node and exchange, that its message is lost, in [0, 1): its movement then does
            not count, and it goes on from its own parameters, as in DiLoCo's paper. All nodes must be in one process.

    Raises:
        ValueError, TypeError: for H, fragments or offsets < 1, other numbers of offsets than fragments, delay < 0,
            alpha or lost outside [0, 1), for a `SyncWeight` with fragments or a delay, and for lost messages with a
            delay or an average that differs by node; at `check` unless the delay is smaller than the run's steps.

    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.strategy import Mean
    >>> module, ctx = OuterStep(Mean(), H=2), Context(StackedCollectives(2), step=1)
    >>> state = module.init({"w": torch.zeros(1)}, ctx)
    >>> params, state = module.exchange_parameters({"w": torch.tensor([1.0, 3.0])}, state, ctx)
    >>> params["w"]  # 0.7 (2 + 0.9 * 2), on both nodes
    tensor([2.6600])
    >>> OuterStep(Mean(), OptimSpec("sgd", lr=1.0), fragments=4, delay=5, alpha=0.5)
    OuterStep(Mean(), outer_optim=OptimSpec(SGD, lr=1.0), fragments=4, delay=5, alpha=0.5)

    References: Douillard et al., "DiLoCo", arXiv 2311.08105, and "Streaming DiLoCo with overlapping communication",
    arXiv 2501.18512. Deviation: a fragment is every P-th tensor, not a group of layers as in `StreamingCommunicator`.
    """

    of_values = False

    def __init__(
        self,
        average: Average,
        outer_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        H: int | When | Callable[[int], int] = DEFAULT_H,
        *,
        fragments: int = 1,
        offsets: Sequence[int] | None = None,
        delay: int = 0,
        alpha: float = 0.0,
        lost: float = 0.0,
    ) -> None:
        self.average = check_average("average", average)
        self.outer_optim = outer_spec(outer_optim)
        self.when = as_when(H, "H")
        self.H = self.when if callable(H) else H
        self.fragments = check.integer("fragments", fragments, what="the parts into which the parameters are cut")
        self._late = Late(delay)
        self.delay = self._late.delay
        self.alpha = check.number("alpha", alpha, "[0, 1)", "what a node keeps of its own parameters")
        self.lost = check.number("lost", lost, "[0, 1)", "the probability that a node's message is lost")
        if self.lost and (self.delay or not is_shared(average)):
            raise ValueError(
                f"lost={lost} with delay={delay} and {average!r}: messages are lost on their way to one average of all "
                "nodes, which is used at once. Leave out the delay, islands and participation."
            )
        if offsets is not None and (not isinstance(offsets, (list, tuple)) or len(offsets) != fragments):
            given = f"offsets={offsets!r} and fragments={fragments}"
            raise ValueError(f"{given}: give a list of one number for each fragment.")
        self.offsets = None if offsets is None else [check.integer("offsets", offset) for offset in offsets]
        if isinstance(self.when, SyncWeight) and (fragments > 1 or delay or offsets is not None):
            raise ValueError(f"{self.when!r} says when all exchange: leave out fragments, offsets and delay.")
        self._rule = self.outer_optim.rule()

    def _time_of(self, p: int) -> When:
        """When a fragment exchanges."""
        if not isinstance(self.when, Rounds) or (self.fragments == 1 and self.offsets is None):
            return self.when
        H, first = self.when.H, self.when.offset
        return Rounds(H, first + p * H // self.fragments if self.offsets is None else self.offsets[p])

    def check(self, num_nodes: int, max_steps: int) -> None:
        usual = self._time_of(0) is self.when  # else fragments that begin early are a step ahead
        num_steps = self.when.count(max_steps) if usual else self.when.count(max_steps - 1) + 1
        self.outer_optim.check_steps(num_nodes, num_steps, "outer optimizer")
        super().check(num_nodes, max_steps)
        check_in_time(self, "delay", self.delay, max_steps)

    def init(self, params: Tree, ctx: Context) -> State:
        states = [self._init(part, ctx) for part in self._parts(params)]
        return states[0] if self.fragments == 1 else {str(p): state for p, state in enumerate(states)}

    def exchange_parameters(self, params: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        if self.fragments == 1:
            return self._exchange(self._time_of(0), params, state, ctx)
        for p, part in enumerate(self._parts(params)):
            new, changed = self._exchange(self._time_of(p), part, state[str(p)], ctx)
            params, state = {**params, **new}, {**state, str(p): changed}
        return params, state

    def idle(self, ctx: Context) -> bool:
        many = isinstance(self.when, Rounds) and self.fragments > self.when.H  # some fragment exchanges in any step
        num_times = self.fragments if isinstance(self.when, Rounds) else 1
        return not self.delay and not many and not any(self._time_of(p).due(ctx.step) for p in range(num_times))

    def outer_parameters(self, state: State) -> Tree:
        parts = [state] if "params" in state else state.values()
        found = {name: x for part in parts for name, x in part["params"].items()}
        return found if is_everyones(self.average) else {}

    def outer_learning_rate(self, ctx: Context) -> float | Tensor | None:
        exchange = self.when.count(ctx.step)
        if exchange >= self.when.count(ctx.max_steps):  # no outer step comes any more
            return None
        return self.outer_optim.at(exchange).hyper.get("lr")

    def stack_key(self) -> Hashable:
        """Return what configurations must share to take their outer steps together; None: they cannot.

        >>> from vecgym.strategy import Mean
        >>> OuterStep(Mean(), H=5).stack_key() == OuterStep(Mean(), H=10).stack_key(), OuterStep(Mean(2)).stack_key()
        (False, None)
        """
        key = merge_key(self.outer_optim)
        usual = self.average.plain and self.fragments == 1 and self.offsets is None
        usual = usual and self.delay == self.alpha == self.lost == 0
        return (self.when.H, key) if key is not None and usual and isinstance(self.when, Rounds) else None

    def stacked(self, modules: Sequence[Any], num_nodes: int) -> CommunicationModule:
        outer = merged_spec([module.outer_optim for module in modules], [num_nodes] * len(modules))
        return OuterStep(self.average, outer, self.when)

    def _parts(self, params: Tree) -> list[Tree]:
        """Split parameters into fragments; those beyond the last tensor have none, and are left out."""
        names = list(params)
        number = max(1, min(self.fragments, len(names)))
        return [{name: params[name] for name in names[p :: self.fragments]} for p in range(number)]

    def _init(self, params: Tree, ctx: Context) -> State:
        state = {"params": params, "optimizer": begun(self._rule, params, is_everyones(self.average), ctx)}
        if average := self.average.init(tree.map(torch.zeros_like, params), ctx):
            state["average"] = average
        if self.delay:
            state[QUEUE] = self._late.init(nothing(params))
        return state

    def _exchange(self, when: When, params: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        """Take the step of one fragment."""
        if self.delay == 0:
            return when.exchange(self._outer_step, params, state, counted(self, ctx))
        delta = nothing(params)
        if when.due(ctx.step):
            with ctx.comm.ledger.lagging(self.delay):
                delta, state = self._movement(params, state, counted(self, ctx))
        due, queue = self._late.turn(delta, state[QUEUE], ctx.step)
        state = {**state, QUEUE: queue}
        before = ctx.step - self.delay  # when what is due was sent
        if before < 0 or not when.due(before):
            return params, state
        new, state = self._moved(params, due, state, ctx.replace(exchange=self.when.count(before)))
        return kept(ctx.missing(before), params, new), state

    def _outer_step(self, params: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        heard = arrived(self.lost, params, ctx) if self.lost else None
        if heard is not None and not bool(heard.any()):
            return params, state
        delta, state = self._movement(params, state, ctx, heard)
        new, state = self._moved(params, delta, state, ctx)
        return kept(None if heard is None else ~heard, params, new), state

    def _movement(
        self, params: Tree, state: State, ctx: Context, heard: Tensor | None = None
    ) -> tuple[Tree, State]:  # fmt: skip
        """Average the nodes' movements, `[1 or L, *]`, or those that are `heard`."""
        moved, held = tree.map(torch.sub, state["params"], params), state.get("average", {})
        delta, average = average_among(self.average, moved, held, heard, ctx)
        return delta, {**state, "average": average} if average else state

    def _moved(self, params: Tree, delta: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        """Take an outer step; return the parameters and the state after it."""
        keeping = self.average.keeping(ctx)
        pure = ctx.replace(own_time=False, inplace=ctx.inplace and keeping is None)  # its rates go by the exchange
        outer, optimizer = optimizer_step(
            self.outer_optim, self._rule, ctx.exchange, state["params"], delta, state["optimizer"], pure
        )
        new = self._merged(params, outer, ctx)
        changed = {**state, "params": outer, "optimizer": optimizer}
        if keeping is None:
            return new, changed
        keep = lambda old, new: old if old is new else torch.where(per_row(keeping, new), old, new)  # noqa: E731
        return kept(keeping, params, new), blended(state, changed, keep)

    def _merged(self, params: Tree, outer: Tree, ctx: Context) -> Tree:
        """Return what the nodes go on from."""
        return outer if self.alpha == 0 else tree.map(lambda x, o: o + self.alpha * (x - o), params, outer)


def begun(rule: Rule, params: Tree, shared: bool, ctx: Context) -> State:
    """Return the first state of an outer optimizer.

    Where its steps are not the same on every node, and nodes may be absent, it counts each one's own.

    >>> from vecgym.collectives import StackedCollectives
    >>> ctx = Context(StackedCollectives(2), missed=lambda step: None)
    >>> begun(OptimSpec("adam").rule(), {"w": torch.zeros(1)}, False, ctx)["step"]
    tensor([0, 0])
    """
    state = rule.init(params)
    own = not shared and ctx.missed is not None
    return {**state, "step": state["step"].repeat(len(ctx.node_steps))} if own else state


def outer_spec(
    optim: str | OptimSpec | type[torch.optim.Optimizer] | None, outer_lr: Any = None, usual: Any = OUTER_DEFAULTS["lr"]
) -> OptimSpec:
    """Return the outer optimizer: DiLoCo's for None, "sgd" and `torch.optim.SGD`, at the `usual` rate if none is given.

    >>> outer_spec("sgd", outer_lr=0.5), outer_spec(OptimSpec("sgd", lr=0.1))
    (OptimSpec(SGD, lr=0.5, momentum=0.9, nesterov=True), OptimSpec(SGD, lr=0.1))
    """
    by_name = optim is None or optim is torch.optim.SGD or (isinstance(optim, str) and optim.lower() == "sgd")
    if by_name:
        lr = usual if outer_lr is None else outer_lr
        return OptimSpec(torch.optim.SGD, **{**OUTER_DEFAULTS, "lr": lr})
    return ensure_optim_spec(optim, argument="outer_optim", lr=outer_lr)
