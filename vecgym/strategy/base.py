"""What a strategy is: an optimizer on every node, and what the nodes exchange before and after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vecgym.core import check, nodes
from vecgym.core.tree import Tree, leaves
from vecgym.optim import OptimSpec, check_max_norm, clip_grad_norm, ensure_optim_spec
from vecgym.optim.schedule import Schedule, check_schedule, make_schedule
from vecgym.strategy import contract
from vecgym.strategy.communication import CommunicationModule, Context, Slots, State, innermost, overrides
from vecgym.strategy.inner import InnerOptions, moments_in, optimizer_step, takes_options, with_moments

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "CommunicateOptimizeStrategy",
    "CommunicationModule",
    "Context",
    "Slots",
    "State",
    "Strategy",
    "check_interval",
    "moments_in",
    "optimizer_step",
    "overrides",
    "with_moments",
]


class Strategy:
    """How the nodes are trained: communication modules around one inner optimizer.

    A step is: gradients; the modules' `exchange_gradients`, in order; clipping; the inner optimizer; the
    modules' `exchange_moments`, then their `exchange_parameters`, in order.

    Args:
        inner_optim: a name ("adamw", "sgd", ...), an `OptimSpec`, or a `torch.optim.Optimizer` class; AdamW
            when not given.
        communication_modules: `CommunicationModule`s; none: the nodes train independently.
        lr: the learning rate of the inner optimizer, if `inner_optim` does not set it.
        max_norm: clip each node's gradient to this 2-norm (`[K]`: a norm for each), after `exchange_gradients`.
        lr_scheduler: "constant", "cosine", "lambda_cosine", or a function step -> factor; see
            `vecgym.optim.schedule`.
        warmup_steps: steps of linear warm-up from 0.
        cosine_anneal: after the warm-up, decay to 10 % along a cosine.

    Raises:
        TypeError, ValueError: at construction, saying what is allowed.

    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.strategy import AveragingCommunicator
    >>> strategy = Strategy("sgd", communication_modules=[AveragingCommunicator()], lr=0.1, warmup_steps=4)
    >>> strategy.check(num_nodes=2, max_steps=10)
    >>> ctx = Context(StackedCollectives(2), step=2, max_steps=10)  # half-way through the warm-up
    >>> params, grads = {"w": torch.zeros(1)}, {"w": torch.tensor([1.0, 3.0])}
    >>> optimizer, modules = strategy.init(params, ctx)
    >>> strategy.mean_gradient, strategy.active_nodes(ctx), strategy.lr(ctx)
    (False, None, 0.05)
    >>> grads = strategy.local_gradients(grads, params, modules, ctx)
    >>> grads, modules = strategy.exchange_gradients(grads, modules, ctx)
    >>> params, optimizer = strategy.optimize(params, grads, optimizer, ctx)
    >>> optimizer, modules = strategy.exchange_moments(optimizer, params, modules, ctx)
    >>> params, strategy.exchange_parameters(params, modules, ctx)[0]
    ({'w': tensor([-0.0500, -0.1500])}, {'w': tensor([-0.1000])})
    """

    # True where all that evolves is in the states that the methods take and give back.
    pure = True
    # True where nodes do not wait for one another: there are no steps of all of them; see `AsyncStrategy`.
    asynchronous = False
    # True where gradients are exchanged in a step in which some nodes sit out, too.
    exchanges_where_some_rest = False

    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        *,
        communication_modules: Sequence[CommunicationModule] = (),
        lr: float | Tensor | None = None,
        max_norm: float | Tensor | None = None,
        lr_scheduler: str | Schedule | None = None,
        warmup_steps: int = 0,
        cosine_anneal: bool = False,
    ) -> None:
        self.inner_optim = ensure_optim_spec(inner_optim, OptimSpec(torch.optim.AdamW), argument="inner_optim", lr=lr)
        self.communication_modules = _checked_modules(communication_modules)
        self._check_resting()
        if max_norm is not None:
            check_max_norm(max_norm)
        self.max_norm = max_norm
        check_schedule(lr_scheduler, warmup_steps, cosine_anneal)
        self.lr_scheduler = lr_scheduler
        self.warmup_steps = warmup_steps
        self.cosine_anneal = cosine_anneal
        self._rule = self.inner_optim.rule()

    @property
    def mean_gradient(self) -> bool:
        """Whether the mean of the nodes' gradients is all that is used of them."""
        return bool(self.communication_modules) and self.communication_modules[0].mean_gradient

    def check(self, num_nodes: int, max_steps: int) -> None:
        """Raise a ValueError if the strategy cannot work for this run."""
        self.inner_optim.check_steps(num_nodes, max_steps, "inner optimizer")
        if self.max_norm is not None:
            check.per_node("max_norm", self.max_norm, "(0, inf]", num_nodes=num_nodes)
        if callable(self.lr_scheduler):  # what is wrong with the user's function shows here, not within a node's thread
            make_schedule(self.lr_scheduler, max_steps)(0)
        for module in self.communication_modules:
            module.check(num_nodes, max_steps)

    def check_present(self, counts: Sequence[int], num_nodes: int) -> None:
        """Raise a ValueError if it cannot work while only so many of the nodes are present.

        >>> from vecgym.strategy import GossipStrategy
        >>> GossipStrategy("ring").check_present([2, 3], num_nodes=4)
        """
        for module in self.communication_modules:
            module.check_present(counts, num_nodes)

    def idle(self, ctx: Context) -> bool:
        """Return whether neither parameters nor moments are exchanged in this step, and no module's state changes.

        >>> from vecgym.collectives import StackedCollectives
        >>> Strategy("sgd").idle(Context(StackedCollectives(2)))
        True
        """
        own = ("exchange_parameters", "exchange_moments")
        usual = all(getattr(type(self), name) is getattr(Strategy, name) for name in own)
        return usual and all(module.idle(ctx) for module in self.communication_modules)

    def init(self, params: Tree, ctx: Context) -> tuple[State, State]:
        """Return the first states of optimizer and modules; `params` are `[1 or L, *]`."""
        ctx = self._told(ctx)
        modules = {str(i): contract.init(module, params, ctx) for i, module in enumerate(self.communication_modules)}
        return self._rule.init(params), modules

    def active_nodes(self, ctx: Context) -> list[int] | None:
        """Return the nodes that train in this step, ascending; None: all."""
        ctx = self._told(ctx)
        chosen = [contract.active_nodes(module, ctx) for module in self.communication_modules]
        given = [set(nodes) for nodes in chosen if nodes is not None]
        return sorted(set.intersection(*given)) if given else None

    def local_gradients(self, grads: Tree, params: Tree, state: State, ctx: Context) -> Tree:
        """Return each node's own gradient with what the modules add to it."""
        adding = [(i, m) for i, m in enumerate(self.communication_modules) if overrides(m, "local_gradients")]
        if not adding:
            return grads
        ctx = self._told(ctx)
        silent = self.active_nodes(ctx) is not None
        for i, module in adding:
            grads = contract.local_gradients(module, grads, params, state[str(i)], ctx, silent)
        return grads

    def exchange_gradients(self, grads: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        """Let each module in turn exchange gradients."""
        ctx = self._told(ctx)
        for i, module in enumerate(self.communication_modules):
            grads, changed = contract.exchange_gradients(module, grads, state[str(i)], ctx)
            state = {**state, str(i): changed}
        return grads, state

    def lr(self, ctx: Context) -> float | Tensor:
        """Return the inner learning rate of this step."""
        if self.lr_scheduler is None and not self.warmup_steps and not self.cosine_anneal:
            return ctx.by_count(self.inner_optim.lr_at)
        schedule = make_schedule(self.lr_scheduler, ctx.max_steps, self.warmup_steps, self.cosine_anneal)
        return ctx.by_count(lambda step: self.inner_optim.lr_at(step) * schedule(step))

    def outer_learning_rate(self, ctx: Context) -> float | Tensor | None:
        """Return the rate of the first module that has an optimizer of its own; None: none has.

        >>> from vecgym.collectives import StackedCollectives
        >>> from vecgym.strategy import DiLoCoStrategy
        >>> DiLoCoStrategy("sgd", lr=0.1).outer_learning_rate(Context(StackedCollectives(2), max_steps=1000))
        0.7
        """
        found = (module.outer_learning_rate(ctx) for module in self.communication_modules)
        return next((lr for lr in found if lr is not None), None)

    def optimize(self, params: Tree, grads: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        """Clip the gradients, and take the inner optimizer's step."""
        if self.max_norm is not None:
            grads, _ = clip_grad_norm(grads, ctx.own(self.max_norm), inplace=ctx.inplace)
        lr = self.lr(ctx) if ctx.lr is None else ctx.lr
        return optimizer_step(self.inner_optim, self._rule, ctx.step, params, grads, state, ctx, lr=lr)

    def exchange_parameters(self, params: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        """Let each module in turn exchange parameters."""
        ctx = self._told(ctx)
        for i, module in enumerate(self.communication_modules):
            if i > 0 and ctx.inplace:
                params = _apart(params, state)
            params, changed = contract.exchange_parameters(module, params, state[str(i)], ctx)
            state = {**state, str(i): changed}
        return params, state

    def exchange_moments(self, optimizer: State, params: Tree, state: State, ctx: Context) -> tuple[State, State]:
        """Let each module in turn exchange moments of the inner optimizer."""
        exchanging = [(i, m) for i, m in enumerate(self.communication_modules) if overrides(m, "exchange_moments")]
        if not exchanging:
            return optimizer, state
        ctx = self._told(ctx)
        moments = moments_in(optimizer, params)
        for i, module in exchanging:
            moments, changed = contract.exchange_moments(module, moments, state[str(i)], ctx)
            state = {**state, str(i): changed}
        return with_moments(optimizer, moments), state

    def result(self, state: Any) -> Tree:
        """Return the parameters `[1 or L, *]` whose mean over the nodes that are there is the run's model.

        That model is evaluated, returned by `fit`, and saved. Override this where it is not the mean of what the nodes
        train: `state` is a `vecgym.simulation.state.HookState`; in its `strategy` are the modules' states, under "0",
        "1", ... Of an asynchronous strategy `state.params` are the server's.

        >>> from vecgym.simulation.state import HookState
        >>> Strategy("sgd").result(HookState(0, {"w": torch.zeros(1)}, {}, {}, {}, node_steps=torch.zeros(2)))
        {'w': tensor([0.])}
        """
        params: Tree = state.params
        return params

    def outer_parameters(self, state: State) -> Tree:
        """Return the parameters `[1, *]` that the modules hold once for all nodes; see `CommunicationModule`.

        >>> Strategy("sgd").outer_parameters({})
        {}
        """
        found: Tree = {}
        for i, module in enumerate(self.communication_modules):
            found |= module.outer_parameters(state[str(i)])
        return found

    def take_rows(self, state: State, rows: Tensor) -> State:
        """Return the rows of some nodes of the optimizer's state, or the modules'.

        >>> Strategy("sgd").take_rows({"momentum": torch.tensor([1.0, 2.0, 3.0])}, torch.tensor([0, 2]))
        {'momentum': tensor([1., 3.])}
        """
        return nodes.take_rows(state, rows)

    def put_rows(self, state: State, rows: Tensor, new: State, num_nodes: int, inplace: bool) -> State:
        """Return the state with the rows of some nodes replaced; see `vecgym.core.nodes.put_rows`.

        >>> new, rows = {"momentum": torch.tensor([7.0])}, torch.tensor([1])
        >>> Strategy("sgd").put_rows({"momentum": torch.tensor([1.0, 2.0])}, rows, new, num_nodes=2, inplace=False)
        {'momentum': tensor([1., 7.])}
        """
        return nodes.put_rows(state, rows, new, num_nodes, inplace)

    def _told(self, ctx: Context) -> Context:
        """Return the context that modules are told, which has the inner learning rate."""
        return ctx if ctx.lr is not None or not self.communication_modules else ctx.replace(lr=self.lr(ctx))

    def _check_resting(self) -> None:
        """Raise a ValueError where gradients would be exchanged, and some nodes have none."""
        own = type(self).exchange_gradients is not Strategy.exchange_gradients
        exchanging = [m for m in self.communication_modules if overrides(m, "exchange_gradients")]
        resting = [m for m in self.communication_modules if lets_rest(m)]
        if resting and (exchanging or own):
            who = repr(exchanging[0]) if exchanging else type(self).__name__
            raise ValueError(
                f"{resting[0]!r} lets some nodes sit out, and {who} exchanges the gradients of all at every "
                "step: give participation=1, or a module that exchanges parameters."
            )

    def hidden_state(self) -> Any:
        """Return what evolves outside of the states, for a file; None where the strategy is `pure`.

        >>> Strategy("sgd", lr=0.1).hidden_state() is None
        True
        """
        return None

    def load_hidden_state(self, state: Any) -> None:
        """Restore what `hidden_state` has returned, after `init`.

        >>> Strategy("sgd", lr=0.1).load_hidden_state(None)
        """

    def close(self) -> None:
        """End the strategy's threads; a later step starts them again.

        >>> Strategy("sgd", lr=0.1).close()
        """

    def __repr__(self) -> str:
        parts = [repr(self.inner_optim), *map(repr, self.communication_modules)]
        defaults = {"max_norm": None, "lr_scheduler": None, "warmup_steps": 0, "cosine_anneal": False}
        settings = {name: getattr(self, name) for name in defaults}
        parts += [
            f"{name}={getattr(value, '__name__', repr(value))}"
            for name, value in settings.items()
            if repr(value) != repr(defaults[name])
        ]
        return f"{type(self).__name__}({', '.join(parts)})"


class CommunicateOptimizeStrategy(Strategy):
    """Compose communication modules with an inner optimizer; each module acts in the order given.

    >>> from vecgym.strategy import AveragingCommunicator
    >>> CommunicateOptimizeStrategy([AveragingCommunicator(island_size=4)], inner_optim="adamw", lr=1e-3)
    CommunicateOptimizeStrategy(OptimSpec(AdamW, lr=0.001), \
AveragingCommunicator(island_size=4, H=1, participation=1.0, weighting='equal'))
    """

    @takes_options(InnerOptions)
    def __init__(
        self,
        communication_modules: Sequence[CommunicationModule],
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        **inner: Unpack[InnerOptions],
    ) -> None:
        super().__init__(inner_optim, communication_modules=communication_modules, **inner)


def check_interval(name: str, value: Any) -> int:
    """Return `value` if it is an integer >= 1, a number of optimizer steps.

    >>> check_interval("H", 0)
    Traceback (most recent call last):
    ...
    ValueError: H=0 must be an integer >= 1: the number of optimizer steps between two exchanges.
    """
    return check.integer(name, value, what="the number of optimizer steps between two exchanges")


def _apart(params: Tree, state: State) -> Tree:
    """Clone the parameters that a module keeps in its state: the next module may write into them."""
    kept = {(nodes.place(x), x.storage_offset()) for x in leaves(state)}
    return {name: p.clone() if (nodes.place(p), p.storage_offset()) in kept else p for name, p in params.items()}


def _checked_modules(modules: Sequence[CommunicationModule]) -> tuple[CommunicationModule, ...]:
    if isinstance(modules, CommunicationModule):
        raise TypeError(f"communication_modules takes a list: [{modules!r}].")
    if not isinstance(modules, (list, tuple)):
        raise TypeError(
            f"communication_modules is a {type(modules).__name__}; give a list of CommunicationModules, such as "
            "[AveragingCommunicator(H=10)]."
        )
    for module in modules:
        if not isinstance(module, CommunicationModule):
            raise TypeError(
                f"communication_modules has a {type(module).__name__}; each must be a CommunicationModule, "
                "such as AveragingCommunicator(H=10)."
            )
        own = type(module).exchange_moments is not CommunicationModule.exchange_moments
        if overrides(module, "exchange_moments") and not own:
            raise ValueError(
                f"{module!r} does not pass on the moments that the module in it exchanges: give that module by itself, "
                "or in every(n, module)."
            )
    return tuple(modules)


def lets_rest(module: CommunicationModule) -> bool:
    """Whether some nodes may sit out."""
    return overrides(module, "active_nodes") and innermost(module).lets_rest
