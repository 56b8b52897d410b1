"""What a strategy is: an optimizer on every node, and what the nodes exchange."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, TypeVar, cast

import torch
from torch import Tensor

from vecgym.availability import Presence
from vecgym.core import check, nodes
from vecgym.core.objects import UNSAID, altered, declare, own_settings, same
from vecgym.core.tree import Tree
from vecgym.optim import Optimizer, OptimSpec, ensure_optim_spec
from vecgym.optim.schedule import Schedule
from vecgym.simulation.returning import sent
from vecgym.simulation.simulation import LocalTraining, Part
from vecgym.simulation.state import State
from vecgym.simulation.timetable import Lockstep, Mark, RunFacts, Timetable, Who
from vecgym.strategy.averages import Mean
from vecgym.strategy.exchange import Exchange

if sys.version_info >= (3, 11):  # of every constructor's `**inner`
    from typing import Unpack as Unpack
else:
    from typing_extensions import Unpack as Unpack  # torch depends on it

AN_EXCHANGE = "an Exchange, such as Exchange(Mean(), every=10)"

Constructor = TypeVar("Constructor", bound=Callable[..., None])


class StepOptions(TypedDict, total=False):
    """How the inner optimizer takes its steps; see `Strategy`."""

    max_norm: float | Tensor | None
    lr_scheduler: str | Schedule | None
    warmup_steps: int
    cosine_anneal: bool


class InnerOptions(StepOptions, total=False):
    """What all strategies take for their inner optimizer by keyword; see `Strategy`."""

    lr: float | Tensor | None


def takes_options(options: type) -> Callable[[Constructor], Constructor]:
    """Let a constructor take `**inner: Unpack[options]`, where `help` and editors see each option.

    >>> class Mine:
    ...     @takes_options(InnerOptions)
    ...     def __init__(self, H, **inner):
    ...         print(H, inner)
    >>> list(inspect.signature(Mine).parameters)
    ['H', 'lr', 'max_norm', 'lr_scheduler', 'warmup_steps', 'cosine_anneal']
    >>> Mine(3, warmup_step=5)
    Traceback (most recent call last):
    ...
    TypeError: Mine has no argument 'warmup_step'; did you mean 'warmup_steps'? It has: H, lr, max_norm, \
lr_scheduler, warmup_steps, cosine_anneal.
    """
    parameters = inspect.signature(Strategy.__init__).parameters
    shared = [parameter for name, parameter in parameters.items() if name in options.__annotations__]

    def decorate(init: Constructor) -> Constructor:
        signature = inspect.signature(init)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        names = [p.name for p in (*own[1:], *shared)]

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            check.keywords(type(self).__name__, kwargs, names)
            init(self, *args, **kwargs)

        checked.__signature__ = signature.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
        return cast(Constructor, checked)

    return decorate


def inner_rate(lr: float | Tensor | None, inner_lr: float | Tensor | None) -> float | Tensor | None:
    """Return the inner learning rate of a strategy that takes it by two names.

    >>> inner_rate(None, 0.1)
    0.1
    >>> inner_rate(0.1, 0.1)
    Traceback (most recent call last):
    ...
    ValueError: lr and inner_lr are two names for the inner learning rate: give one of them.
    """
    if lr is not None and inner_lr is not None:
        raise ValueError("lr and inner_lr are two names for the inner learning rate: give one of them.")
    return lr if inner_lr is None else inner_lr


class Strategy(LocalTraining):
    """How the nodes are trained: an inner optimizer, and exchanges.

    A step is: gradients; the exchanges of gradients, in order; clipping; the inner optimizer; then the exchanges of
    parameters and moments that are due, in order. It is an algorithm of `vecgym.simulation`: its timetable says what
    happens when, and to which nodes, and it has a method for each kind of event. A subclass may override any of them.

    Args:
        inner_optim: a name ("adamw", "sgd", ...), an `OptimSpec`, or a `torch.optim.Optimizer` class; AdamW
            when not given.
        exchanges: `Exchange`s; none: the nodes train independently.
        lr: the learning rate of the inner optimizer, if `inner_optim` does not set it.
        max_norm: clip each node's gradient to this 2-norm (`[K]`: a norm for each), after gradients are exchanged.
        lr_scheduler: "constant", "cosine", "lambda_cosine", or a function step -> factor; see
            `vecgym.optim.schedule`.
        warmup_steps: steps of linear warm-up from 0.
        cosine_anneal: after the warm-up, decay to 10 % along a cosine.

    Raises:
        TypeError, ValueError: at construction, saying what is allowed.

    Example: two nodes with different targets take two steps, and average their parameters.

    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.models import Line
    >>> from vecgym.strategy.simulated import simulation_of
    >>> from vecgym.strategy import Mean
    >>> strategy = Strategy("sgd", [Exchange(Mean(), every=2)], lr=0.25)
    >>> [[event.what for event in tick] for tick in strategy.timetable(RunFacts(num_nodes=2, num_steps=2)).ticks()]
    [['train'], ['train', 'meet']]
    >>> simulation = simulation_of(Line(), strategy, StackedCollectives(2), max_steps=2)
    >>> state = simulation.init()
    >>> for _ in range(2):
    ...     state, row = simulation.step(state, torch.tensor([[1.0], [3.0]]))
    ...     print(state.params["w"])
    tensor([0.5000, 1.5000])
    tensor([1.5000, 1.5000])
    """

    # True where nodes do not wait for one another: there are no steps of all of them; see `AsyncStrategy`.
    asynchronous = False
    # False where something evolves outside of the state; see `RankStrategy`.
    pure = True
    # What `class Mine(Strategy, batched=..., random=...)` says: constructor arguments that may differ between the
    # configurations that are trained together in a sweep, None: the methods work on one configuration; and whether the
    # methods draw random numbers. A class with methods of its own that does not say: None and True.
    batched: tuple[str, ...] | None = ()
    random: bool = False
    # Settings that may have a value for each node: how many is checked.
    of_nodes: tuple[str, ...] = ()

    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        exchanges: Sequence[Any] = (),
        *,
        lr: float | Tensor | None = None,
        max_norm: float | Tensor | None = None,
        lr_scheduler: str | Schedule | None = None,
        warmup_steps: int = 0,
        cosine_anneal: bool = False,
    ) -> None:
        spec = ensure_optim_spec(inner_optim, OptimSpec(torch.optim.AdamW), argument="inner_optim", lr=lr)
        self.inner = Optimizer(
            spec, max_norm=max_norm, lr_scheduler=lr_scheduler, warmup_steps=warmup_steps, cosine_anneal=cosine_anneal
        )
        self.exchanges = _numbered("exchanges", exchanges)
        self._check_resting()

    def __init_subclass__(cls, batched: Any = UNSAID, random: Any = UNSAID) -> None:
        super().__init_subclass__()
        declare(cls, batched, random)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse a setting that would hide a method, which a run calls; a function may take its place."""
        is_method = not name.startswith("_") and callable(getattr(type(self), name, None))
        if is_method and not inspect.isroutine(value):
            raise TypeError(
                f"{type(self).__name__} cannot have a setting {name!r}, since that is a method: give it another name, "
                f"such as 'own_{name}'."
            )
        super().__setattr__(name, value)

    @property
    def depends_on_seed(self) -> bool:
        """Whether random numbers are drawn: if not, configurations of several seeds can be one group of a sweep."""
        return self.random or any(exchange.random for exchange in self.exchanges)

    @property
    def inner_optim(self) -> OptimSpec:
        """The class of the inner optimizer, and its hyperparameters."""
        return self.inner.spec

    @property
    def mean_gradient(self) -> bool:
        """Whether the mean of the nodes' gradients is all that is used of them."""
        return [(exchange.how, exchange.always) for exchange in self._of_gradients] == [(Mean(), True)]

    @property
    def _of_gradients(self) -> list[Any]:
        return [exchange for exchange in self.exchanges if exchange.of == "gradients"]

    # ------------------------------------------------------------------------------------------------- before the run

    def check(self, num_nodes: int, max_steps: int) -> None:
        """Raise a ValueError if the strategy cannot work for this run; warn of what has no effect in it."""
        self.inner.check(num_nodes, max_steps, "inner optimizer")
        for name in self.of_nodes:
            check.per_node(name, getattr(self, name), num_nodes=num_nodes)
        for exchange in self.exchanges:
            exchange.check(RunFacts(num_nodes, max_steps, num_examples=(1,) * num_nodes))

    def check_run(self, run: RunFacts) -> None:
        """Raise a ValueError if the strategy cannot work for the run's model, or with its absences."""
        for exchange in self.exchanges:
            exchange.check_present(run)

    def timetable(self, run: RunFacts) -> Timetable:
        """Return what happens when: all nodes train, then comes what is due."""
        takes = [exchange.takes for exchange in self.exchanges if exchange.who.sampled]
        resting = ("take" if all(takes) else "keep") if takes else None
        return Lockstep(run, *self.marks(run), trains=self.trains(run), train=self.training, resting=resting)

    @property
    def training(self) -> str:
        """The method for a step of the nodes: "train" if each takes it by itself, with its own gradient."""
        jointly = self._of_gradients or type(self).train_jointly is not Strategy.train_jointly
        return "train_jointly" if jointly else "train"

    def marks(self, run: RunFacts) -> list[Mark]:
        """Return what is due in some of the steps."""
        return [mark for exchange in self.exchanges for mark in exchange.marks(run)]

    def trains(self, run: RunFacts) -> Who | None:
        """Return who trains, (step, present nodes) -> some of them; None: all of them, always."""
        each_who = [who for exchange in self.exchanges if (who := exchange.trains(run)) is not None]
        if len(each_who) < 2:
            return each_who[0] if each_who else None

        def of_all(step: int, rows: Sequence[int]) -> list[int]:
            each = [who(step, rows) for who in each_who]
            return sorted(set(rows).intersection(*(some for some in each if some is not None)))

        return of_all

    def init(self, run: RunFacts, params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what each node has of its own, `[1 or K, *]`, and what all nodes share, `[1, *]`."""
        held = {"params": params, "optimizer": self.inner.init(params)}
        own, shared = ({}, held) if self.alike(run) else (held, {})
        for exchange in self.exchanges:
            exchange.check_optimizer(held["optimizer"], params)
            of_each, of_all = exchange.init(params, run)
            own, shared = own | of_each, shared | of_all
        return own, shared

    def alike(self, run: RunFacts) -> bool:
        """Whether all nodes have the same parameters and optimizer at every step, so that these are stored once."""
        if self.inner.per_node or not all(exchange.same for exchange in self.exchanges):
            return False
        presence: Any = run.presence
        absent = presence is not None and min(presence.counts) < run.num_nodes
        late = any(x.delivery.delay for x in self.exchanges)  # not for a node that was absent when it was sent
        parted = absent and (late or presence.rejoin == "own")
        return not parted and any(exchange.always for exchange in self._of_gradients)

    def through_server(self) -> Strategy:
        """Return the same strategy with a server that takes the means over all nodes, of parameters or movements.

        >>> from vecgym.strategy import Mean
        >>> strategy = Strategy("sgd", [Exchange(Mean(), every=2), Exchange(Mean(island_size=2))], lr=0.1)
        >>> strategy.through_server().exchanges
        (Exchange(ServerMean(), every=2), Exchange(Mean(island_size=2)))
        """
        return altered(self, exchanges=tuple(exchange.through_server() for exchange in self.exchanges))

    # ------------------------------------------------------------------------------------------------------- handlers

    def train_jointly(self, part: Part) -> None:
        """Exchange gradients before the optimizer's step."""
        part.optimize(self.joint_gradients(part))
        part.report(part.losses)

    def joint_gradients(self, part: Part) -> Tree:
        """Return the gradients of these nodes after their exchange, `[1 or rows, *]`."""
        mean = self.mean_gradient and part.home is part.shared and not part.simulation.exact
        grads = part.gradients(mean=mean)
        for exchange in self._of_gradients:
            grads = exchange.now(part, grads)
        return grads

    def meet(self, part: Part) -> None:
        """Make an exchange that takes effect at once."""
        self.exchanges[part.due.of.exchange].meet(part)

    def agree(self, part: Part) -> None:
        """Make an exchange whose result takes effect later, or is for others."""
        self.exchanges[part.due.of.exchange].agree(part)

    def write(self, part: Part) -> None:
        """Let nodes go on with what was agreed on."""
        self.exchanges[part.due.of.exchange].write(part)

    def rejoin(self, part: Part) -> None:
        """Send parameters to the nodes that return, unless all nodes share theirs."""
        presence, params, alike = part.run.presence, part.params, part.home is part.shared
        assert isinstance(presence, Presence)
        outer, agreed = Tree(), set[str]()
        if presence.rejoin == "shared":
            names = list(params)
            outer, agreed = self.outer_parameters(part.shared, names), self.agreed(part.run, names, part.tick - 1)
        begin = sent(params, presence, outer, agreed, part.comm, part.tick, once=list(params) if alike else [])
        back = [i for i, node in enumerate(part.nodes) if node in set(part.event.info)]
        if back and not alike:
            part.params = nodes.put_rows(params, torch.tensor(back), begin, len(part.rows), part.inplace)

    # -------------------------------------------------------------------------------------------------- what it tells

    def result(self, state: State) -> Tree:
        """Return the parameters `[1 or L, *]` whose mean over the nodes that are present is the run's model.

        That model is evaluated, returned by `fit`, and saved. Override this where it is not the mean of what the nodes
        train: in `state.own` and `state.shared` is all that evolves.

        >>> Strategy("sgd").result(State(0, {"params": {"w": torch.zeros(1)}}, {}))
        {'w': tensor([0.])}
        """
        return state.params

    def rates(self, timetable: Any, tick: int, nodes: Sequence[int] | None = None) -> tuple[Any, Any]:
        """Return the inner learning rate of a step, and the outer one; None: there is none.

        Args:
            nodes: those that take part, whose own counts may differ; None: all, with the same count.

        >>> from vecgym.strategy import DiLoCoStrategy
        >>> strategy = DiLoCoStrategy("sgd", H=5, lr=0.1, warmup_steps=2)
        >>> strategy.rates(strategy.timetable(RunFacts(num_nodes=4, num_steps=10)), tick=1)
        (0.05, 0.7)
        """
        counts = tick if nodes is None else timetable.counts(tick, tuple(nodes))[0]
        return self.inner.lr(counts, timetable.max_steps, nodes), self.outer_rate(timetable.run, tick)

    def outer_rate(self, run: RunFacts, step: int) -> Any:
        """Return the rate of the first exchange with an optimizer of its own; None: none has."""
        rates = (exchange.outer_lr(step, run) for exchange in self.exchanges)
        return next((lr for lr in rates if lr is not None), None)

    def outer_parameters(self, shared: Any, names: Sequence[str]) -> Tree:
        """Return the parameters `[1, *]` that exchanges hold once for all nodes, from which a returning node begins."""
        params: Tree = {}
        for exchange in self.exchanges:
            params |= exchange.outer(shared, names)
        return params

    def agreed(self, run: RunFacts, names: Sequence[str], tick: int) -> set[str]:
        """Return the parameters that are equal on all nodes after a step's exchanges.

        >>> from vecgym.strategy import FedAvgStrategy
        >>> strategy, run = FedAvgStrategy("sgd", H=2), RunFacts(num_nodes=4, num_steps=2)
        >>> [strategy.agreed(run, ["w"], tick) for tick in range(2)]
        [set(), {'w'}]
        """
        agreed: set[str] = set()
        for exchange in self.exchanges:
            equal, changed = exchange.agreed(run, names, tick)
            agreed = (agreed - changed) | equal
        return agreed

    def hidden_state(self) -> Any:
        """Return what evolves outside of the state, for a file; None where the strategy is `pure`."""
        return None

    def load_hidden_state(self, state: Any) -> None:
        """Restore what `hidden_state` has returned, after `init`."""

    def close(self) -> None:
        """End the strategy's threads; a later step starts them again."""

    def _check_resting(self) -> None:
        """Raise a ValueError where gradients would be exchanged, and some nodes have none; or no node would train."""
        resting = [exchange for exchange in self.exchanges if exchange.who.sampled]
        if resting and self._of_gradients:
            raise ValueError(
                f"{resting[0]!r} lets some nodes sit out, and {self._of_gradients[0]!r} exchanges the gradients of all "
                "at every step: give participation=1, or exchange parameters."
            )
        for exchange in resting[1:]:
            if not same([exchange.every, exchange.unit], [resting[0].every, resting[0].unit]):
                raise ValueError(
                    f"{resting[0]!r} and {exchange!r} draw who trains in different rounds, and in some steps no "
                    "node is in both draws: give both the same every, or one of them participation=1."
                )

    def __repr__(self) -> str:
        parts = [repr(self.inner_optim), *map(repr, self.exchanges), *self.inner.options]
        return f"{type(self).__name__}({', '.join([*parts, *own_settings(self, exchanges=())])})"


class CommunicateOptimizeStrategy(Strategy):
    """Compose exchanges with an inner optimizer; each acts in the order given.

    >>> from vecgym.strategy import Mean
    >>> CommunicateOptimizeStrategy([Exchange(Mean(island_size=4))], inner_optim="adamw", lr=1e-3)
    CommunicateOptimizeStrategy(OptimSpec(AdamW, lr=0.001), Exchange(Mean(island_size=4)))
    """

    @takes_options(InnerOptions)
    def __init__(
        self,
        communication_modules: Sequence[Any],
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        **inner: Unpack[InnerOptions],
    ) -> None:
        super().__init__(inner_optim, _numbered("communication_modules", communication_modules), **inner)


def every(n: int, exchange: Exchange) -> Exchange:
    """Let an exchange count in units of n steps: its interval, delay, offsets, and what it draws at random.

    >>> from vecgym.strategy import Mean
    >>> every(5, Exchange(Mean(), every=10, delay=1))  # every 50 steps, 5 late
    Exchange(Mean(), every=10, delay=1, unit=5)
    """
    return check.instance("exchange", exchange, Exchange, AN_EXCHANGE).in_units(n)


def _numbered(argument: str, exchanges: Sequence[Any]) -> tuple[Any, ...]:
    """Return exchanges that know their places."""
    check.instance(argument, exchanges, (list, tuple), "a list, such as [Exchange(Mean(), every=10)]")
    each = (check.instance(f"{argument}[{i}]", x, Exchange, AN_EXCHANGE) for i, x in enumerate(exchanges))
    return tuple(exchange.numbered(i) for i, exchange in enumerate(each))
