"""What a strategy is: an optimizer on every node, and what the nodes exchange before and after it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vecgym.collectives import Collectives
from vecgym.core import check, nodes, rng
from vecgym.core.tree import Tree, leaves
from vecgym.optim import OptimSpec, Rule, check_max_norm, clip_grad_norm, ensure_optim_spec
from vecgym.optim.schedule import Schedule, check_schedule, make_schedule
from vecgym.strategy import contract

State = dict[str, Any]  # nested dicts of tensors: all that a module or strategy carries from step to step


@dataclass(frozen=True)
class Context:
    """What a strategy may know at a step.

    Attributes:
        comm: the collectives, the only way to other nodes.
        step: optimizer steps done before this one, so 0 in the first.
        max_steps: the length of the run.
        seed: the run's seed; random numbers come from `generator`.
        num_examples: of each node's shard, [K]; None where not known.
        differentiable: derivatives are taken through the run.
        inplace: the tensors given may be overwritten. False under differentiation, where every operation must
            be pure.
        rows: where only some nodes train, or are in this process, which of all nodes these are; see `own`.
        exact: the bits of a node's own work must not depend on which other nodes are in this process. Elementwise
            operations and reductions of each node by itself never do; a matrix product over all nodes may.
        lr: the inner learning rate of this step, schedule and warm-up included: a number, or a tensor `[]` or `[K]`, of
            which `own` gives the rows of the nodes that train here. A strategy tells its modules; None without one.

    >>> from dataclasses import replace
    >>> from vecgym.collectives import StackedCollectives
    >>> ctx = Context(StackedCollectives(4), step=3, seed=7)
    >>> a, b = (torch.rand(3, generator=ctx.generator("mask", ctx.step)) for _ in range(2))
    >>> torch.equal(a, b)  # the same (seed, purpose, ids), the same numbers
    True
    >>> replace(ctx, rows=torch.tensor([1, 3])).own(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    tensor([0.2000, 0.4000])
    """

    comm: Collectives
    step: int = 0
    max_steps: int = 1
    seed: int = 0
    inplace: bool = False
    differentiable: bool = False
    num_examples: tuple[int, ...] | None = None
    rows: Tensor | None = None
    exact: bool = False
    lr: float | Tensor | None = None

    def own(self, value: Any) -> Any:
        """A hyperparameter of the nodes that train here: of `[K]` their rows; what all nodes share as it is."""
        per_node = isinstance(value, Tensor) and value.dim() > 0 and value.numel() > 1
        return value[self.rows.to(value.device)] if per_node and self.rows is not None else value

    def generator(self, purpose: str, *ids: int) -> torch.Generator:
        """A generator keyed by (seed, purpose, ids): the same on every node and in every process."""
        return rng.generator(self.seed, purpose, *ids)


class CommunicationModule:
    """One thing that nodes exchange. Override what you need; everything is `[L, *]` trees.

    A module holds hyperparameters only. What evolves is its state, nested dicts of tensors `[1, *]` or `[L, *]`, which
    `init` makes and the exchanges take and give back. What a method returns is checked: names and shapes are those that
    it was given. With `ctx.inplace` an exchange may overwrite what it was given. It may keep any tensor in
    its state, also one that it was given or that a collective returned.

    Example: every step, the nodes average a version of their parameters rounded to 8 bits.

    >>> from vecgym.core import tree
    >>> class RoundedAverage(CommunicationModule):
    ...     def exchange_parameters(self, params, state, ctx):
    ...         return ctx.comm.mean(tree.map(lambda x: (x * 128).round() / 128, params)), state
    """

    # True where only the nodes' mean gradient is used: one gradient of the mean loss is then computed.
    mean_gradient = False
    # True where every method only passes on to `self.module`, at other times or in another form.
    passes_on = False

    def check(self, num_nodes: int, max_steps: int) -> None:
        """Raise a ValueError if the module cannot work for this run.

        >>> from vecgym.strategy import AveragingCommunicator
        >>> try:
        ...     AveragingCommunicator(island_size=8).check(num_nodes=4, max_steps=100)
        ... except ValueError as error:
        ...     print(str(error).split(":")[0])
        island_size=8 is larger than the 4 nodes that take part in a round
        """

    def init(self, params: Tree, ctx: Context) -> State:
        """The state before the first step. `params` are a copy that the module may keep.

        >>> from vecgym.collectives import StackedCollectives
        >>> from vecgym.strategy import DiLoCoCommunicator
        >>> sorted(DiLoCoCommunicator().init({"w": torch.zeros(1)}, Context(StackedCollectives(2))))
        ['optimizer', 'params']
        """
        return {}

    def active_nodes(self, ctx: Context) -> list[int] | None:
        """The nodes that train in this step, a list of their ids, which may be empty; None: all.

        The others keep parameters, buffers and optimizer state, and their losses are nan. Gradients are then
        not exchanged: such a module cannot be combined with one that has `exchange_gradients`.

        >>> from vecgym.collectives import StackedCollectives
        >>> from vecgym.strategy import AveragingCommunicator
        >>> len(AveragingCommunicator(participation=0.5).active_nodes(Context(StackedCollectives(8))))
        4
        """
        return None

    def local_gradients(self, grads: Tree, params: Tree, state: State, ctx: Context) -> Tree:
        """What the module adds to each node's own gradient, before anything is exchanged: `[1 or L, *]` trees.

        Where only some nodes train, L counts these, in the order of `ctx.rows`, and nobody may communicate.

        >>> from vecgym.collectives import StackedCollectives
        >>> from vecgym.strategy import ProximalTerm
        >>> grads, params, start = {"w": torch.zeros(2)}, {"w": torch.tensor([1.0, 3.0])}, {"w": torch.tensor([1.0])}
        >>> ProximalTerm(mu=0.5).local_gradients(grads, params, {"start": start}, Context(StackedCollectives(2)))
        {'w': tensor([0., 1.])}
        """
        return grads

    def exchange_gradients(self, grads: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        """Before the optimizer: `[L, *]` gradients -> those that the optimizer takes.

        >>> from vecgym.collectives import StackedCollectives
        >>> from vecgym.strategy import GradientAveraging
        >>> grads, ctx = {"w": torch.tensor([1.0, 3.0])}, Context(StackedCollectives(2))
        >>> GradientAveraging().exchange_gradients(grads, {}, ctx)[0]
        {'w': tensor([2.])}
        """
        return grads, state

    def exchange_parameters(self, params: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        """After the optimizer: `[L, *]` parameters -> those of the next step. `[1, *]`: the same on every node."""
        return params, state

    def outer_learning_rate(self, ctx: Context) -> float | Tensor | None:
        """Of the module's own optimizer at this step, to be recorded; None: it has none.

        >>> from vecgym.collectives import StackedCollectives
        >>> from vecgym.strategy import AveragingCommunicator, DiLoCoCommunicator
        >>> ctx = Context(StackedCollectives(2), max_steps=1000)
        >>> DiLoCoCommunicator(outer_lr=0.5).outer_learning_rate(ctx), AveragingCommunicator().outer_learning_rate(ctx)
        (0.5, None)
        """
        return None

    # Many small configurations in one stack are slow for what Python does for each; these two make them one.

    def stack_key(self) -> Hashable:
        """Modules of equal key, of configurations of one stack, can be one; None: this one cannot.

        It must then do nothing but `exchange_parameters`, draw no random numbers, and not look at `ctx.lr`.

        >>> from vecgym.strategy import AveragingCommunicator
        >>> AveragingCommunicator(H=5).stack_key(), AveragingCommunicator(H=5, island_size=2).stack_key()
        (5, None)
        """
        return None

    def stacked(self, modules: Sequence[Any], num_nodes: int) -> CommunicationModule:
        """One module for the nodes of all configurations, `[C * K, *]`, in which each does what its own would.

        >>> from vecgym.strategy import DiLoCoCommunicator
        >>> slow, fast = DiLoCoCommunicator(outer_lr=0.5), DiLoCoCommunicator(outer_lr=1.0)
        >>> slow.stacked([slow, fast], num_nodes=2).outer_optim.lr
        tensor([0.5000, 0.5000, 1.0000, 1.0000], dtype=torch.float64)
        """
        raise NotImplementedError(f"{type(self).__name__} has a stack_key and no stacked()")

    def __repr__(self) -> str:
        unset = {name for name in ("sync_weight", "resting") if getattr(self, name, None) is None}
        shown = {name: value for name, value in vars(self).items() if not name.startswith("_") and name not in unset}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


class Strategy:
    """How the nodes are trained: communication modules around one inner optimizer.

    A step is: gradients; the modules' `exchange_gradients`, in order; clipping; the inner optimizer; the
    modules' `exchange_parameters`, in order.

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
    >>> params, strategy.exchange_parameters(params, modules, ctx)[0]
    ({'w': tensor([-0.0500, -0.1500])}, {'w': tensor([-0.1000])})
    """

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
        self.inner_optim = ensure_optim_spec(inner_optim, OptimSpec(torch.optim.AdamW), lr=lr)
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
        for module in self.communication_modules:
            module.check(num_nodes, max_steps)

    def init(self, params: Tree, ctx: Context) -> tuple[State, State]:
        """The states of optimizer and modules before the first step; `params` are `[1 or L, *]`."""
        ctx = self._told(ctx)
        modules = {str(i): contract.init(module, params, ctx) for i, module in enumerate(self.communication_modules)}
        return self._rule.init(params), modules

    def active_nodes(self, ctx: Context) -> list[int] | None:
        """The nodes that train in this step, ascending; None: all."""
        ctx = self._told(ctx)
        chosen = [contract.active_nodes(module, ctx) for module in self.communication_modules]
        given = [set(nodes) for nodes in chosen if nodes is not None]
        return sorted(set.intersection(*given)) if given else None

    def local_gradients(self, grads: Tree, params: Tree, state: State, ctx: Context) -> Tree:
        """Each node's gradient of its loss, and what the modules add to it."""
        adding = [(i, m) for i, m in enumerate(self.communication_modules) if overrides(m, "local_gradients")]
        if not adding:
            return grads
        ctx = self._told(ctx)
        silent = self.active_nodes(ctx) is not None
        for i, module in adding:
            grads = contract.local_gradients(module, grads, params, state[str(i)], ctx, silent)
        return grads

    def exchange_gradients(self, grads: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        """What is exchanged of the gradients: each module in turn."""
        ctx = self._told(ctx)
        for i, module in enumerate(self.communication_modules):
            grads, changed = contract.exchange_gradients(module, grads, state[str(i)], ctx)
            state = {**state, str(i): changed}
        return grads, state

    def lr(self, ctx: Context) -> float | Tensor:
        """The inner learning rate of this step."""
        lr = self.inner_optim.lr_at(ctx.step)
        if self.lr_scheduler is None and not self.warmup_steps and not self.cosine_anneal:
            return lr
        schedule = make_schedule(self.lr_scheduler, ctx.max_steps, self.warmup_steps, self.cosine_anneal)
        return lr * schedule(ctx.step)

    def outer_learning_rate(self, ctx: Context) -> float | Tensor | None:
        """That of the first module that has an optimizer of its own; None: none has.

        >>> from vecgym.collectives import StackedCollectives
        >>> from vecgym.strategy import DiLoCoStrategy
        >>> DiLoCoStrategy("sgd", lr=0.1).outer_learning_rate(Context(StackedCollectives(2), max_steps=1000))
        0.7
        """
        found = (module.outer_learning_rate(ctx) for module in self.communication_modules)
        return next((lr for lr in found if lr is not None), None)

    def optimize(self, params: Tree, grads: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        """Clip, then the inner optimizer's step."""
        if self.max_norm is not None:
            grads, _ = clip_grad_norm(grads, ctx.own(self.max_norm), inplace=ctx.inplace)
        return optimizer_step(self.inner_optim, self._rule, ctx.step, params, grads, state, ctx, lr=self.lr(ctx))

    def exchange_parameters(self, params: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        """What is exchanged of the parameters: each module in turn."""
        ctx = self._told(ctx)
        for i, module in enumerate(self.communication_modules):
            if i > 0 and ctx.inplace:
                params = _apart(params, state)
            params, changed = contract.exchange_parameters(module, params, state[str(i)], ctx)
            state = {**state, str(i): changed}
        return params, state

    def _told(self, ctx: Context) -> Context:
        """What the modules may know: the inner learning rate too."""
        return ctx if ctx.lr is not None or not self.communication_modules else replace(ctx, lr=self.lr(ctx))

    def _check_resting(self) -> None:
        """Raise a ValueError where gradients would be exchanged, and some nodes have none."""
        own = type(self).exchange_gradients is not Strategy.exchange_gradients
        exchanging = [m for m in self.communication_modules if overrides(m, "exchange_gradients")]
        resting = [m for m in self.communication_modules if _lets_rest(m)]
        if resting and (exchanging or own):
            who = repr(exchanging[0]) if exchanging else type(self).__name__
            raise ValueError(
                f"{resting[0]!r} lets some nodes sit out, and {who} exchanges the gradients of all at every "
                "step: give participation=1, or a module that exchanges parameters."
            )

    # What a strategy written for one rank builds on; see `vecgym.strategy.per_rank`. Overriding `step` makes one.

    model: nn.Module
    rank: int
    num_nodes: int
    max_steps: int
    local_step: int
    optim: torch.optim.Optimizer

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        """Per rank: called once, with the node's own model. Builds `self.optim`."""
        self.model, self.rank, self.num_nodes, self.local_step = model, rank, num_nodes, 0
        self.optim = self.inner_optim.build([p for p in model.parameters() if p.requires_grad])
        self._set_lr()

    def step(self) -> None:
        """Per rank: what a node does with its gradients, `p.grad`; call it last, it advances the schedule.

        >>> from vecgym.strategy import all_reduce
        >>> class DDP(Strategy):
        ...     def step(self):
        ...         for p in self.model.parameters():
        ...             all_reduce(p.grad, op="mean")
        ...         self.optim.step()
        ...         super().step()
        >>> DDP("sgd", lr=0.1)
        DDP(OptimSpec(SGD, lr=0.1))
        """
        self.local_step += 1
        self._set_lr()

    def _set_lr(self) -> None:
        schedule = make_schedule(self.lr_scheduler, self.max_steps, self.warmup_steps, self.cosine_anneal)
        for group in self.optim.param_groups:
            group.setdefault("initial_lr", group["lr"])
            group["lr"] = group["initial_lr"] * schedule(self.local_step)

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

    def __init__(
        self,
        communication_modules: Sequence[CommunicationModule],
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        *,
        lr: float | Tensor | None = None,
        max_norm: float | Tensor | None = None,
        lr_scheduler: str | Schedule | None = None,
        warmup_steps: int = 0,
        cosine_anneal: bool = False,
    ) -> None:
        super().__init__(
            inner_optim,
            communication_modules=communication_modules,
            lr=lr,
            max_norm=max_norm,
            lr_scheduler=lr_scheduler,
            warmup_steps=warmup_steps,
            cosine_anneal=cosine_anneal,
        )


def optimizer_step(
    spec: OptimSpec, rule: Rule, step: int, params: Tree, grads: Tree, state: State, ctx: Context, lr: Any = None
) -> tuple[Tree, State]:
    """Step `step` of an optimizer, `rule` of `spec`, on the nodes that train here, each with its own `[K]` values."""
    now = spec.at(step)
    everyone = ctx.rows is None and not ctx.exact
    if everyone or all(x.numel() == 1 for x in leaves([[group.kwargs for group, _, _ in now.groups(params)], lr])):
        return (rule if now is spec else now.rule()).update(params, grads, state, lr=lr, inplace=ctx.inplace)
    rows = ctx.comm.node_ids if ctx.rows is None else ctx.rows
    # Exactly: each node by itself, or where all still share their parameters the bits would depend on who is here.
    parts = rows.split(1) if ctx.exact and len(rows) > 1 else [rows]
    found = []
    for i, part in enumerate(parts):
        here = replace(ctx, rows=part)
        own = now.mapped(here.own).rule()
        if len(parts) == 1:
            return own.update(params, grads, state, lr=here.own(lr), inplace=ctx.inplace)
        p, g, s = (nodes.take_rows(x, torch.tensor([i])) for x in (params, grads, state))
        found.append(own.update(p, g, s, lr=here.own(lr), inplace=ctx.inplace))
    return nodes.join_rows([p for p, _ in found]), nodes.join_rows([s for _, s in found])


def check_interval(name: str, value: Any) -> int:
    """Return `value` if it is an integer >= 1, a number of optimizer steps.

    >>> check_interval("H", 0)
    Traceback (most recent call last):
    ...
    ValueError: H=0 must be an integer >= 1: the number of optimizer steps between two exchanges.
    """
    return check.integer(name, value, what="the number of optimizer steps between two exchanges")


def _apart(params: Tree, state: State) -> Tree:
    """The parameters, cloned where a module keeps what it has returned: the next one may write into them."""
    kept = {x.data_ptr() for x in leaves(state)}
    return {name: p.clone() if p.data_ptr() in kept else p for name, p in params.items()}


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
    return tuple(modules)


def overrides(module: CommunicationModule, method: str) -> bool:
    """Whether a module has its own `method`, or that which `every(n, module)` and the like pass it on to.

    >>> from vecgym.strategy import GradientAveraging, every
    >>> overrides(every(2, GradientAveraging()), "exchange_gradients"), overrides(GradientAveraging(), "active_nodes")
    (True, False)
    """
    return getattr(type(_innermost(module)), method) is not getattr(CommunicationModule, method)


def _innermost(module: Any) -> CommunicationModule:
    """What `every(n, module)` and the like are around."""
    while module.passes_on:
        module = module.module
    return module


def _lets_rest(module: CommunicationModule) -> bool:
    """Whether some nodes may sit out: it has `active_nodes`, and does not say participation=1."""
    return overrides(module, "active_nodes") and getattr(_innermost(module), "participation", 0) != 1
