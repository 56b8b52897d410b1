"""Combinators: a communication module that acts more rarely, or whose effect comes later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vecgym.core.tree import Tree
from vecgym.strategy import contract
from vecgym.strategy.average import kept
from vecgym.strategy.base import CommunicationModule, Context, Slots, State, check_interval
from vecgym.strategy.communication import Wrapper
from vecgym.strategy.when import QUEUE, Late, Rounds, check_delay, check_in_time, nothing


def every(n: int, module: CommunicationModule) -> CommunicationModule:
    """Let `module` exchange only at every n-th step: at steps n - 1, 2n - 1, ...

    Inside, time counts in exchanges: the module sees `ctx.step` = the exchanges done before this one and
    `ctx.max_steps` = those of the whole run. So its own intervals, delays and random numbers work as they do
    without `every`: `every(5, DiLoCoCommunicator(H=10))` takes an outer step every 50 steps. It also exchanges
    gradients at these steps only; what it adds to each node's own (`local_gradients`) it adds at every step, and the
    nodes that it lets train stay the same for n steps.

    State: the module's. Bytes: the module's, at every n-th step. `every(1, module)` is the module itself.

    Args:
        n: optimizer steps per exchange.
        module: any communication module.

    Raises:
        ValueError: for n < 1.

    >>> from vecgym.strategy import GradientAveraging
    >>> every(5, GradientAveraging())
    every(5, GradientAveraging())
    """
    check_interval("n", n)
    _check_module("every(n, module)", module)
    return module if n == 1 else _Every(n, module)


def delayed(module: CommunicationModule, d: int) -> CommunicationModule:
    """Apply the change that `module` makes to the parameters d steps later.

    At step t the module is given theta_t and returns theta'_t; then theta_{t+d} <- theta_{t+d} + (theta'_t - theta_t).
    It is the *change* that is late, not the values: what the nodes learn in the d steps between is kept, and where
    the module preserves the mean of the nodes, so does its late change. (`SparseCommunicator(delay=d)` is the other
    kind, which writes late values over what the nodes hold, as SPARTA does.) Within a step the module acts first,
    on parameters without the change that is due; then that change is added. What is still under way when the run
    ends is lost.

    The module's own state (outer parameters, momentum) is not late, nor is what it does to gradients.

    State: `module`, the module's; `queue`, d slots of changes `[L, *]`: d copies of the parameters if the module acts
    at every step; where it does not act a slot is empty. Bytes: the module's. `delayed(module, 0)` is the module
    itself.

    Args:
        module: a communication module that exchanges parameters.
        d: optimizer steps; inside `every`, exchanges.

    Raises:
        ValueError: for d < 0, for a module that never changes parameters, and at `check` unless d is smaller than the
            run's steps.

    Reference: the delayed average of Zhou et al., "DaSGD: Squeezing SGD Parallelization Performance in Distributed
    Training Using Delayed Averaging", arXiv 2006.00441, for any module.

    >>> import torch
    >>> from vecgym.collectives import StackedCollectives
    >>> class Halve(CommunicationModule):
    ...     def exchange_parameters(self, params, state, ctx):
    ...         return {name: x / 2 for name, x in params.items()}, state
    >>> module, params, comm = delayed(Halve(), 2), {"w": torch.tensor([8.0])}, StackedCollectives(1)
    >>> state = module.init(params, Context(comm))
    >>> for step in range(3):
    ...     params, state = module.exchange_parameters(params, state, Context(comm, step=step))
    ...     print(params["w"])
    tensor([8.])
    tensor([8.])
    tensor([4.])
    """
    check_delay("d", d)
    _check_module("delayed(module, d)", module)
    if type(module).exchange_parameters is CommunicationModule.exchange_parameters:
        raise ValueError(
            f"delayed({module!r}, {d}): this module never changes parameters, and only that can be delayed. "
            "Delay a module such as AveragingCommunicator(H=10)."
        )
    return module if d == 0 else _Delayed(module, d)


class _Every(Wrapper):
    """See `every`. `mean_gradient` stays False: between exchanges each node uses its own gradient."""

    def __init__(self, n: int, module: CommunicationModule) -> None:
        super().__init__(module)
        self.n = n
        self._when = Rounds(n, name="n")

    def told(self, ctx: Context) -> Context:
        missed = ctx.missed
        of_exchange = None if missed is None else lambda exchange: missed((exchange + 1) * self.n - 1)
        max_steps = max(1, ctx.max_steps // self.n)
        return super().told(ctx.replace(step=ctx.step // self.n, max_steps=max_steps, missed=of_exchange))

    def check(self, num_nodes: int, max_steps: int) -> None:
        self._when.check(max_steps, self)
        self.module.check(num_nodes, max(1, max_steps // self.n))

    def idle(self, ctx: Context) -> bool:
        return not self._when.due(ctx.step) or super().idle(ctx)

    def exchange_gradients(self, grads: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        return self._when_due(contract.exchange_gradients, grads, state, ctx)

    def exchange_parameters(self, params: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        return self._when_due(contract.exchange_parameters, params, state, ctx)

    def exchange_moments(self, moments: Slots, state: State, ctx: Context) -> tuple[Slots, State]:
        return self._when_due(contract.exchange_moments, moments, state, ctx)

    def _when_due(self, exchange: Callable[..., Any], values: Any, state: State, ctx: Context) -> tuple[Any, State]:
        if not self._when.due(ctx.step):
            return values, state
        with ctx.comm.ledger.stretched(self.n):
            return exchange(self.module, values, state, self.told(ctx))

    def __repr__(self) -> str:
        return f"every({self.n}, {self.module!r})"


class _Delayed(Wrapper):
    """See `delayed`."""

    exchange_moments = CommunicationModule.exchange_moments  # not passed on

    def __init__(self, module: CommunicationModule, d: int) -> None:
        super().__init__(module)
        self.d = d
        self._late = Late(d)

    def check(self, num_nodes: int, max_steps: int) -> None:
        check_in_time(self, "d", self.d, max_steps)
        super().check(num_nodes, max_steps)

    def init(self, params: Tree, ctx: Context) -> State:
        return {"module": super().init(params, ctx), QUEUE: self._late.init(nothing(params))}

    def idle(self, ctx: Context) -> bool:
        return False

    def outer_parameters(self, state: State) -> Tree:
        return super().outer_parameters(state["module"])

    def local_gradients(self, grads: Tree, params: Tree, state: State, ctx: Context) -> Tree:
        return super().local_gradients(grads, params, state["module"], ctx)

    def exchange_gradients(self, grads: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        grads, changed = contract.exchange_gradients(self.module, grads, state["module"], ctx)
        return grads, {**state, "module": changed}

    def exchange_parameters(self, params: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        # Not in place: the parameters from before the exchange are needed after it.
        pure = ctx.replace(inplace=False)
        with ctx.comm.ledger.lagging(self.d):
            new, changed = contract.exchange_parameters(self.module, params, state["module"], pure)
        moved = {name: x for name, x in new.items() if x is not params[name]}
        change = nothing(params) | {name: x - params[name] for name, x in moved.items()}
        due, queue = self._late.turn(change, state[QUEUE], ctx.step)
        late = {name: p + due[name] if due[name].numel() else p for name, p in params.items()}
        return kept(ctx.missing(ctx.step - self.d), params, late), {"module": changed, QUEUE: queue}

    def __repr__(self) -> str:
        return f"delayed({self.module!r}, {self.d})"


def _check_module(what: str, module: Any) -> None:
    if not isinstance(module, CommunicationModule):
        raise TypeError(
            f"{what} takes a CommunicationModule, such as AveragingCommunicator(), not the {type(module).__name__} "
            f"{module!r}."
        )
