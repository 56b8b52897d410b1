"""The base of all strategies: an inner optimizer on every node, and a list of exchanges."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, TypeVar, cast

import torch
from torch import Tensor

from vecgym.availability import LocalSteps, Presence
from vecgym.core import check, nodes
from vecgym.core.objects import UNSAID, Steady, altered, declare, is_steady, own_settings, same
from vecgym.core.tree import Tree
from vecgym.optim import Optimizer, OptimSpec, ensure_optim_spec
from vecgym.optim.schedule import Schedule
from vecgym.simulation.returning import sent
from vecgym.simulation.simulation import LocalTraining, Part
from vecgym.simulation.state import State
from vecgym.simulation.timetable import Lockstep, Mark, RunFacts, Timetable, Who
from vecgym.strategy.averages import Mean
from vecgym.strategy.exchange import Exchange

if sys.version_info >= (3, 11):  # types every constructor's `**inner`
    from typing import Unpack as Unpack
else:
    from typing_extensions import Unpack as Unpack  # torch depends on it

MEAN = Mean()  # made once: `mean_gradient` is asked in every step
AN_EXCHANGE = "an Exchange, such as Exchange(Mean(), every=10)"

Constructor = TypeVar("Constructor", bound=Callable[..., None])


class StepOptions(TypedDict, total=False):
    """Options of the inner optimizer other than its learning rate; see `Strategy`."""

    max_norm: float | Tensor | None
    lr_scheduler: str | Schedule | None
    warmup_steps: int
    cosine_anneal: bool


class InnerOptions(StepOptions, total=False):
    """Keyword arguments of every strategy for its inner optimizer; see `Strategy`."""

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


class Strategy(LocalTraining, Steady, steady=True):
    """A training algorithm: an inner optimizer on every node, and exchanges between the nodes.

    A step computes gradients, exchanges them, clips them and takes the inner optimizer's step. Then it makes the
    exchanges of parameters and moments that are due. Exchanges act in the order of the list. The strategy's timetable
    lists the events of a run, and a method of the strategy handles each kind; a subclass may override any of them.

    Args:
        inner_optim: a name ("adamw", "sgd", ...), an `OptimSpec`, or a `torch.optim.Optimizer` class; AdamW
            when not given.
        exchanges: a list of `Exchange`s; without any, the nodes train independently.
        lr: the learning rate of the inner optimizer, if `inner_optim` does not set it.
        max_norm: clip each node's gradient to this 2-norm (`[K]`: one per node), after exchanges of gradients.
        lr_scheduler: "constant", "cosine", "lambda_cosine", or a function step -> factor; see
            `vecgym.optim.schedule`.
        warmup_steps: steps of linear warm-up from 0.
        cosine_anneal: after the warm-up, decay to 10 % along a cosine.

    Raises:
        TypeError, ValueError: at construction, for invalid arguments.

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

    # True if nodes do not wait for one another, so that there are no common steps; see `AsyncStrategy`.
    asynchronous = False
    # False if some state evolves outside of `State`; see `RankStrategy`.
    pure = True
    # Declared by `class Mine(Strategy, batched=..., random=...)`: the constructor arguments that may differ between
    # configurations trained together in a sweep (None: never batch this class), and whether the methods draw random
    # numbers. A subclass that defines methods and declares nothing has None and True.
    batched: tuple[str, ...] | None = ()
    random: bool = False
    # Settings that may be `[K]` tensors, one value per node; the length is checked.
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
        self.exchanges = tuple(exchange.following(self.inner) for exchange in _numbered("exchanges", exchanges))
        self._check_resting()
        counted = [exchange for exchange in self.exchanges if any(stage.delta for stage in exchange.stages.each)]
        if counted and len(self.exchanges) > 1:
            raise ValueError(
                f"{counted[0]!r} counts the privacy of its own messages, and there are {len(self.exchanges)} exchanges "
                "that send something: leave out delta, or the other exchanges."
            )

    def __init_subclass__(cls, batched: Any = UNSAID, random: Any = UNSAID, steady: Any = False) -> None:
        super().__init_subclass__(steady)
        declare(cls, batched, random)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse a setting that would hide a method of the class; a function may replace a method."""
        is_method = not name.startswith("_") and callable(getattr(type(self), name, None))
        if is_method and not inspect.isroutine(value):
            raise TypeError(
                f"{type(self).__name__} cannot have a setting {name!r}, since that is a method: give it another name, "
                f"such as 'own_{name}'."
            )
        super().__setattr__(name, value)

    @property
    def depends_on_seed(self) -> bool:
        """Whether the strategy draws random numbers; if not, configurations of several seeds can share a group."""
        return self.random or any(exchange.random for exchange in self.exchanges)

    @property
    def repeats_itself(self) -> bool:
        """Whether events of the same mark and nodes send the same, so that a dry run handles one of them.

        >>> from vecgym.strategy import FedAvgStrategy
        >>> FedAvgStrategy(H=5).repeats_itself, FedAvgStrategy(H=5, island_size=2).repeats_itself
        (True, False)
        """
        return is_steady(self, *self.exchanges) and all(exchange.always for exchange in self._of_gradients)

    @property
    def inner_optim(self) -> OptimSpec:
        """The class of the inner optimizer, and its hyperparameters."""
        return self.inner.spec

    @property
    def mean_gradient(self) -> bool:
        """Whether the strategy uses nothing but the mean of the nodes' gradients."""
        return [(x.how, x.always, x.private) for x in self._of_gradients] == [(MEAN, True, ())]

    @property
    def _of_gradients(self) -> list[Any]:
        return [exchange for exchange in self.exchanges if exchange.of == "gradients"]

    # ------------------------------------------------------------------------------------------------- before the run

    def check(self, num_nodes: int, max_steps: int) -> None:
        """Raise a ValueError if the strategy cannot work for this run; warn of settings without effect."""
        self.inner.check(num_nodes, max_steps, "inner optimizer")
        for name in self.of_nodes:
            check.per_node(name, getattr(self, name), num_nodes=num_nodes)
        for exchange in self.exchanges:
            exchange.check(RunFacts(num_nodes, max_steps, num_examples=(1,) * num_nodes))

    def check_run(self, run: RunFacts) -> None:
        """Raise a ValueError if the strategy cannot work with the run's model or its absences."""
        for exchange in self.exchanges:
            exchange.check_present(run)
        availability: Any = getattr(run.presence, "availability", None)
        lengths = [x.every * x.unit for x in self.exchanges if isinstance(x.every, int)]
        known = isinstance(availability, LocalSteps) and len(lengths) == len(self.exchanges) > 0
        if known and availability.H not in lengths:
            raise ValueError(
                f"{availability!r} has rounds of {availability.H} steps, and {self!r} of {lengths}: give one H."
            )

    def timetable(self, run: RunFacts) -> Timetable:
        """Return the events of a run: in each step the nodes train, then the marks that are due follow."""
        takes = [exchange.takes for exchange in self.exchanges if exchange.roster.sampled]
        resting = ("take" if all(takes) else "keep") if takes else None
        trains = self.who_trains(run)
        return Lockstep(run, *self.marks(run), trains=trains, train=self.train_method, resting=resting)

    @property
    def train_method(self) -> str:
        """The name of the method that handles a training step: "train" if each node uses its own gradient alone."""
        jointly = self._of_gradients or type(self).train_jointly is not Strategy.train_jointly
        if jointly and type(self).train is not Strategy.train:
            name = type(self).__name__
            raise TypeError(f"class {name}: train is never called, since nodes train jointly: override train_jointly.")
        return "train_jointly" if jointly else "train"

    def marks(self, run: RunFacts) -> list[Mark]:
        """Return the events besides training, each with the steps in which it is due."""
        return [mark for exchange in self.exchanges for mark in exchange.marks(run)]

    def who_trains(self, run: RunFacts) -> Who | None:
        """Return a function (step, present nodes) -> the nodes that train; None: all do."""
        each_who = [who for exchange in self.exchanges if (who := exchange.who_trains(run)) is not None]
        if len(each_who) < 2:
            return each_who[0] if each_who else None

        def of_all(step: int, rows: Sequence[int]) -> list[int]:
            each = [who(step, rows) for who in each_who]
            return sorted(set(rows).intersection(*(some for some in each if some is not None)))

        return of_all

    def init(self, run: RunFacts, params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the initial state by name: each node's own trees, `[1 or K, *]`, and the shared ones, `[1, *]`."""
        held = {"params": params, "optimizer": self.inner.init(params)}
        own, shared = ({}, held) if self.stored_once(run) else (held, {})
        for exchange in self.exchanges:
            exchange.check_optimizer(held["optimizer"], params)
            of_each, of_all = exchange.init(params, run)
            own, shared = own | of_each, shared | of_all
        return own, shared

    def stored_once(self, run: RunFacts) -> bool:
        """Whether parameters and optimizer state are equal on all nodes at every step, and so stored once."""
        if self.inner.per_node or not all(exchange.same for exchange in self.exchanges):
            return False
        presence: Any = run.presence
        absent = presence is not None and min(presence.counts) < run.num_nodes
        # A late result is not written to a node that was absent when it was sent: nodes then differ.
        late = any(x.delivery.delay for x in self.exchanges)
        parted = absent and (late or presence.rejoin == "own")
        return not parted and any(exchange.always and not exchange.private for exchange in self._of_gradients)

    def through_server(self) -> Strategy:
        """Return the same strategy with a server that takes its means over all nodes, except those of gradients.

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
            grads = exchange.exchange_gradients(part, grads)
        return grads

    def meet(self, part: Part) -> None:
        """Make an exchange whose result is used at once."""
        self.exchanges[part.due.of.exchange].meet(part)

    def agree(self, part: Part) -> None:
        """Send the message of an exchange whose result is used later, or also goes to nodes that sat out."""
        self.exchanges[part.due.of.exchange].agree(part)

    def write(self, part: Part) -> None:
        """Apply the result of an earlier exchange."""
        self.exchanges[part.due.of.exchange].write(part)

    def rejoin(self, part: Part) -> None:
        """Send parameters to returning nodes, unless all nodes share theirs; private ones stay where they are."""
        presence, every, stored_once = part.run.presence, part.params, part.home is part.shared
        home = frozenset.intersection(*(x.at_home(list(every)) for x in self.exchanges)) if self.exchanges else ()
        params, names = {name: x for name, x in every.items() if name not in home}, list(every)
        assert isinstance(presence, Presence)
        outer_params, equal_names = Tree(), set[str]()
        if presence.rejoin == "shared":
            outer_params = self.outer_parameters(part.shared, names)
            equal_names = self.agreed(part.run, names, part.tick - 1)
        once = names if stored_once else []
        begin = sent(params, presence, outer_params, equal_names, part.comm, part.tick, once=once)
        back = [i for i, node in enumerate(part.nodes) if node in set(part.event.info)]
        if back and not stored_once:
            part.params = {**every, **nodes.put_rows(params, torch.tensor(back), begin, len(part.rows), part.inplace)}

    # -------------------------------------------------------------------------------------------- results and records

    def result(self, state: State) -> Tree:
        """Return the parameters `[1 or L, *]` whose mean over the nodes that are present is the run's model.

        That model is evaluated, returned by `fit`, and saved. Override this method if it is another one; `state.own`
        and `state.shared` hold everything that evolves.

        >>> Strategy("sgd").result(State(0, {"params": {"w": torch.zeros(1)}}, {}))
        {'w': tensor([0.])}
        """
        return state.params

    def rates(self, timetable: Any, tick: int, nodes: Sequence[int] | None = None) -> tuple[Any, Any]:
        """Return the inner and the outer learning rate of a step; the latter is None without an outer optimizer.

        Args:
            nodes: the nodes that take part, if their step counts may differ; None: all, with one count.

        >>> from vecgym.strategy import DiLoCoStrategy
        >>> strategy = DiLoCoStrategy("sgd", H=5, lr=0.1, warmup_steps=2)
        >>> strategy.rates(strategy.timetable(RunFacts(num_nodes=4, num_steps=10)), tick=1)
        (0.05, 0.7)
        """
        counts = tick if nodes is None else timetable.counts(tick, tuple(nodes))[0]
        return self.inner.lr(counts, timetable.max_steps, nodes), self.outer_rate(timetable.run, tick)

    def outer_rate(self, run: RunFacts, step: int) -> Any:
        """Return the learning rate of the first exchange with an outer optimizer; None without one."""
        rates = (exchange.outer_lr(step, run) for exchange in self.exchanges)
        return next((lr for lr in rates if lr is not None), None)

    def epsilon(self, run: RunFacts, steps: int) -> float | None:
        """Return the privacy that the exchanges of the first steps spend, if one counts it; see `Private`.

        >>> Strategy("sgd").epsilon(RunFacts(num_nodes=4, num_steps=10), steps=10) is None
        True
        """
        return next((x for exchange in self.exchanges if (x := exchange.epsilon(run, steps)) is not None), None)

    def outer_parameters(self, shared: Any, names: Sequence[str]) -> Tree:
        """Return the outer parameters `[1, *]`, if all nodes share them: returning nodes begin with these."""
        return {name: x for exchange in self.exchanges for name, x in exchange.outer(shared, names).items()}

    def agreed(self, run: RunFacts, names: Sequence[str], tick: int) -> set[str]:
        """Return the names of the parameters that are equal on all nodes after a step's exchanges.

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
        """Return the state outside of `State`, for a checkpoint; None if the strategy is `pure`."""
        return None

    def load_hidden_state(self, state: Any) -> None:
        """Restore the value of `hidden_state`; called after `init`."""

    def close(self) -> None:
        """End the strategy's threads; a later step starts them again."""

    def _check_resting(self) -> None:
        """Raise a ValueError if sampled nodes would exchange gradients, or two samples may have no common node."""
        resting = [exchange for exchange in self.exchanges if exchange.roster.sampled]
        if resting and self._of_gradients:
            raise ValueError(
                f"{resting[0]!r} lets some nodes sit out, and {self._of_gradients[0]!r} exchanges the gradients of all "
                "nodes at every step: give participation=1, or exchange parameters."
            )
        for exchange in resting[1:]:
            if not same([exchange.every, exchange.unit], [resting[0].every, resting[0].unit]):
                raise ValueError(
                    f"{resting[0]!r} and {exchange!r} sample nodes in different rounds, and in some steps no node is "
                    "in both samples: give both the same every, or one of them participation=1."
                )

    def __repr__(self) -> str:
        parts = [repr(self.inner_optim), *map(repr, self.exchanges), *self.inner.options]
        return f"{type(self).__name__}({', '.join([*parts, *own_settings(self, exchanges=())])})"


class CommunicateOptimizeStrategy(Strategy, steady=True):
    """`Strategy` with the exchanges as its first argument, under EXO Gym's names.

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
    """Let an exchange count time in units of n steps: its interval, delay, offsets and random draws.

    >>> from vecgym.strategy import Mean
    >>> every(5, Exchange(Mean(), every=10, delay=1))  # every 50 steps, 5 late
    Exchange(Mean(), every=10, delay=1, unit=5)
    """
    return check.instance("exchange", exchange, Exchange, AN_EXCHANGE).in_units(n)


def _numbered(argument: str, exchanges: Sequence[Any]) -> tuple[Any, ...]:
    """Return the exchanges, each with its index in the list."""
    check.instance(argument, exchanges, (list, tuple), "a list, such as [Exchange(Mean(), every=10)]")
    each = (check.instance(f"{argument}[{i}]", x, Exchange, AN_EXCHANGE) for i, x in enumerate(exchanges))
    return tuple(exchange.numbered(i) for i, exchange in enumerate(each))
