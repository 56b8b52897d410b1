"""How nodes agree on values: a mean of all or of islands, a server's mean, a robust rule, an outer optimizer's step.

An `Average` is told what each node has, `[K, *]`, and who meets, a `Meeting`; it returns what they go on with, `[1, *]`
if that is the same for all. It does not know what the values are, gradients, parameters or moments, nor when it is
asked: that is the exchange's (`vecgym.strategy.exchange`).

It works in three parts, so that what is agreed on now can be used later: `agree` makes a message, `settle` changes what
all share, once for each message, and `write` says what a node goes on with. Of a group of C configurations the values
are `[C, K, *]` and `[C, 1, *]`, and the same code works on them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from vecgym.collectives import StackedCollectives
from vecgym.collectives.topology import Groups, random_islands
from vecgym.compress.codecs import Codec
from vecgym.core import check, tree
from vecgym.core.devices import placed, spread
from vecgym.core.objects import Settings, altered, same, shown
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec, clip_grad_norm, ensure_optim_spec
from vecgym.optim.formulas import FORMULAS
from vecgym.optim.optimizer import Optimizer
from vecgym.optim.spec import check_lr
from vecgym.simulation.timetable import RunFacts
from vecgym.strategy.meeting import Meeting

Weighting = Literal["equal", "examples"] | Sequence[float]  # of the nodes in a mean
State = dict[str, Any]  # what an average remembers, by name: trees of tensors
Codes = dict[str, Tree]  # the codes of each tensor, in parts
Rule = Callable[[Tensor], Tensor]
Correction = Callable[[Tree, State, "Meeting"], Tree]  # (movements, the outer optimizer's state) -> movements

_TINY = 1e-8
OUTER_DEFAULTS: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}  # DiLoCo's


@dataclass(frozen=True)
class ExchangeFacts(RunFacts):
    """What an average may know about the exchanges of a run before the first step.

    Attributes:
        counts: the numbers of nodes that may meet; None: all meet.
        num_exchanges: in the whole run.

    >>> ExchangeFacts(num_nodes=6, counts=(2, 3)).fewest, ExchangeFacts(num_nodes=6).fewest
    (2, 6)
    """

    counts: tuple[int, ...] | None = None
    num_exchanges: int = 1

    @property
    def fewest(self) -> int:
        """The smallest number of nodes that may meet."""
        return self.num_nodes if self.counts is None else min(self.counts)

    @property
    def most(self) -> int:
        """The largest number of nodes that may meet.

        >>> ExchangeFacts(num_nodes=6, counts=(2, 3)).most
        3
        """
        return self.num_nodes if self.counts is None else max(self.counts)


class Average(Settings):
    """How nodes agree on values. Override `agree`, and what else you need.

    An average holds settings only, so that several exchanges may share one; averages with equal settings are equal.
    What evolves is in `at.own`, of each node, and `at.shared`, of all together, under the names that `init` returns.

    Attributes:
        numbers: settings that may have a value for each configuration of a group, `[C]`; None: the average does not
            work on `[C, K, *]`, and each configuration has a group of its own. So it is with a class that has methods
            of its own and does not say.
        draws: whether it draws random numbers, so that configurations of different seeds are no group.
        common: whether all nodes go on with the same.
        plain: whether it is the mean of all nodes and nothing else.
        in_part: whether an exchange may be made in part, as a `SyncWeight` asks for.

    Example: the value of another node in each exchange.

    >>> from vecgym.strategy.meeting import Meeting
    >>> class Relay(Average):
    ...     def agree(self, values, at):
    ...         return at.comm.broadcast(values, src=at.exchange % at.comm.num_nodes)
    >>> relay, values = Relay(), {"w": torch.tensor([1.0, 3.0])}
    >>> relay(values, Meeting(StackedCollectives(2), exchange=3)), relay.init(values, RunFacts(2)), relay == Relay()
    ({'w': tensor([3.])}, ({}, {}), True)

    What is used later is the message of `agree`, or the change that it makes:

    >>> at = Meeting(StackedCollectives(2))
    >>> message, change = relay.agree(values, at), relay.change(values, at)
    >>> now = {"w": torch.tensor([1.5, 3.0])}  # the first node has gone on
    >>> relay.write(message, now, at)["w"], relay.changed(change, now, at)["w"]
    (tensor([1.]), tensor([1.5000, 1.0000]))

    What else an exchange asks:

    >>> relay.check(ExchangeFacts(num_nodes=2))
    >>> relay.settle(message, at)  # nothing that all share changes
    >>> relay.one_message, relay.rate(0), relay.outer({})
    (True, None, {})
    >>> Outer(Mean()).draws, Outer(Mean(island_size=2)).draws
    (False, True)
    """

    numbers: tuple[str, ...] | None = ()
    draws: bool = True
    common: bool = True
    plain: bool = False
    in_part: bool = True

    def __init_subclass__(cls) -> None:
        """Take it that a class draws random numbers, and works on one configuration, unless it says otherwise."""
        super().__init_subclass__()
        methods = {name for name, value in vars(cls).items() if callable(value) and not name.startswith("__")}
        if methods - {"check"} and "numbers" not in vars(cls):
            cls.numbers = None
        if "draws" not in vars(cls):
            cls.draws = True

    @property
    def one_message(self) -> bool:
        """Whether the message is the same for all nodes, so that it is stored once."""
        return self.common

    def lag(self, every: int) -> int:
        """Return how many steps later what is sent is used, beyond the exchange's delay.

        >>> Mean().lag(5), Eager(Mean()).lag(5)
        (0, 5)
        """
        return 0

    def check(self, run: ExchangeFacts) -> None:
        """Raise a ValueError if the average cannot work for this run."""

    def init(self, values: Tree, run: RunFacts) -> tuple[State, State]:
        """Return what it remembers of each node, and of all together, `[1, *]` both.

        `values`, `[1, *]`, are those before the first exchange: the initial parameters, or zeros.
        """
        return {}, {}

    def agree(self, values: Tree, at: Meeting) -> Any:
        """Return what those who meet agree on, nested dicts of tensors `[1 or K, *]`.

        If `at.inplace`, the values may be overwritten.
        """
        raise NotImplementedError(f"{type(self).__name__} has no agree(values, at)")

    def settle(self, message: Any, at: Meeting) -> None:
        """Change what all share: called once for each message, by whoever is present then."""

    def write(self, message: Any, values: Tree, at: Meeting) -> Tree:
        """Return what the nodes go on with, with the names and shapes of `values`."""
        return message

    def change(self, values: Tree, at: Meeting) -> Any:
        """Return by how much the whole average changes the values: a message for `changed`."""
        return tree.map(torch.sub, self(values, at), values)

    def changed(self, change: Any, values: Tree, at: Meeting) -> Tree:
        """Return the values with a change added."""
        return tree.map(torch.add, values, change)

    def of_some(self) -> Average:
        """Return the same among some nodes, while the others keep what they have: it is common to none.

        Raises:
            ValueError: if it cannot work so.

        >>> Outer(Mean()).common, Outer(Mean()).of_some().common, Outer(ServerMean()).of_some().common
        (True, False, True)
        """
        return altered(self, common=False)

    def through_server(self) -> Average:
        """Return the same with a server's mean in place of a mean of all nodes.

        >>> Outer(Mean()).through_server(), Outer(Mean(2)).through_server()
        (Outer(ServerMean()), Outer(Mean(island_size=2)))
        """
        return self

    def rate(self, exchange: int) -> Any:
        """Return the learning rate of its own optimizer in an exchange, to be recorded; None: it has none."""
        return None

    def outer(self, shared: Any) -> Tree:
        """Return the parameters that it remembers once for all, `[1, *]`: a node that returns may begin with them."""
        return {}

    def __call__(self, values: Tree, at: Meeting) -> Tree:
        """Return what the nodes go on with at once."""
        message = self.agree(values, at)
        self.settle(message, at)
        return self.write(message, values, at)


# ---------------------------------------------------------------------------------------- of what the nodes send


class Reduction(Average):
    """An average of what nodes send, which may also be codes in place of their values.

    Attributes:
        linear: whether the result is linear in what the nodes send, so that two matrices may be averaged in place of
            one.
    """

    linear: bool = False
    numbers = ()

    def shares(self, at: Meeting) -> Tensor | None:
        """Return W `[1 or K, K]`, with which a node's average is sum_k W_ik x_k; None: the plain mean."""
        return None

    def gather(self, codes: Tree, at: Meeting) -> Tree:
        """Give the codes `[K, ...]` to those who read them, `[1, K, ...]`."""
        return at.comm.all_gather(codes, inplace=True)

    def of_codes(self, codes: Codes, codec: Codec, like: Tree, at: Meeting) -> Tree:
        """Average what codes stand for, of values like these; all are `[C K, *]`, and so is the result."""
        received = gathered_codes(codes, codec, lambda x: self.gather(at.apart(x), at))
        shares = self.shares(at)
        return {name: codec.average(received[name], x, shares) for name, x in like.items()}


class Mean(Reduction):
    """The mean over all nodes, or over islands of nodes.

    x_i <- sum_k w_k x_k / sum_k w_k over the nodes k of i's island.

    Bytes sent per node: 2 (n - 1) / n times those of the values, in islands of n nodes.

    Args:
        island_size: nodes per island; None: one island of all. The nodes are shuffled (seeded) in each exchange; if
            `island_size` does not divide their number, the last island is smaller.
        weighting: "equal"; "examples": w_k is the number of examples of node k; or w_k itself, one number > 0 for each
            node of the run, such as the tokens of its examples.

    Raises:
        ValueError: for island_size < 1 or another weighting; before the first step for an island larger than the number
            of nodes that meet, and if the numbers of examples are not known.

    >>> from vecgym.strategy.meeting import Meeting
    >>> at, values = Meeting(StackedCollectives(4)), {"w": torch.tensor([1.0, 2.0, 3.0, 6.0])}
    >>> Mean()(values, at)["w"], Mean(island_size=2)(values, at)["w"], Mean(island_size=2).groups(at)
    (tensor([3.]), tensor([1.5000, 1.5000, 4.5000, 4.5000]), [[2, 3], [0, 1]])
    """

    linear = True
    numbers = ()

    def __init__(self, island_size: int | None = None, weighting: Weighting = "equal") -> None:
        self.island_size = check.optional_integer("island_size", island_size, what="None is one island")
        self.weighting = as_weighting(weighting)
        self._common = self.island_size is None

    @property
    def common(self) -> bool:  # type: ignore[override]
        return self._common

    @property
    def plain(self) -> bool:  # type: ignore[override]
        return self.common and self.weighting == "equal"

    def of_some(self) -> Average:
        return altered(self, _common=False)

    def through_server(self) -> Average:
        return ServerMean(self.weighting) if type(self) is Mean and self.common else self  # type: ignore[arg-type]

    def check(self, run: ExchangeFacts) -> None:
        check_weighting(self.weighting, run)
        if self.island_size is not None and self.island_size > run.most:
            raise ValueError(
                f"island_size={self.island_size} is larger than the {run.most} nodes that take part in a round: "
                f"give island_size <= {run.most}, or None for one island of all."
            )

    @property
    def draws(self) -> bool:  # type: ignore[override]
        return self.island_size is not None

    def groups(self, at: Meeting) -> Groups | None:
        """Return the islands of this exchange; None: one of all."""
        if self.island_size is None:
            return None
        return random_islands(range(at.comm.num_nodes), self.island_size, at.generator("islands", at.step))

    def agree(self, values: Tree, at: Meeting) -> Tree:
        return at.comm.mean(values, self.groups(at), at.weights(self.weighting), inplace=at.inplace)

    def shares(self, at: Meeting) -> Tensor | None:
        groups, weights, K = self.groups(at), at.weights(self.weighting), at.comm.num_nodes
        if groups is None and weights is None:
            return None
        # What the average makes of the unit vectors, on paper: no communication.
        W = StackedCollectives(K).mean(torch.eye(K, dtype=torch.float64), groups, weights)
        return W[at.comm.node_ids] if len(W) > 1 else W

    def gather(self, codes: Tree, at: Meeting) -> Tree:
        return at.comm.all_gather(codes, inplace=True, readers=self.groups(at))


class ServerMean(Reduction):
    """The mean of what nodes send to a server, which sends it to all: `[K, *]` -> `[1, *]`.

    Bytes sent per node: those of the values up, and as many down from the server.

    Args:
        weighting: see `Mean`.

    >>> from vecgym.strategy.meeting import Meeting
    >>> ServerMean()({"w": torch.tensor([1.0, 2.0, 3.0, 6.0])}, Meeting(StackedCollectives(4)))
    {'w': tensor([3.])}
    """

    linear = True
    numbers = ()
    draws = False

    def __init__(self, weighting: Weighting = "equal") -> None:
        self.weighting = as_weighting(weighting)

    def of_some(self) -> Average:
        return self  # the server has what all go on with

    def check(self, run: ExchangeFacts) -> None:
        check_weighting(self.weighting, run)

    def agree(self, values: Tree, at: Meeting) -> Tree:
        return at.comm.server_mean(values, range(at.comm.num_nodes), at.weights(self.weighting))

    def shares(self, at: Meeting) -> Tensor | None:
        weights = at.weights(self.weighting)
        if weights is None:
            return None
        row = torch.tensor([weights], dtype=torch.float64)
        return row / row.sum()

    def gather(self, codes: Tree, at: Meeting) -> Tree:
        return at.comm.server_gather(codes)

    def of_codes(self, codes: Codes, codec: Codec, like: Tree, at: Meeting) -> Tree:
        average = super().of_codes(codes, codec, like, at)
        return at.rows(at.comm.server_send(at.apart(average)))


def median(x: Tensor) -> Tensor:
    """Take each coordinate's median over the nodes, `[R, n, *]` -> `[R, *]`; of an even number the middle two's mean.

    >>> median(torch.tensor([[1.0, 100.0, 2.0]])), median(torch.tensor([[1.0, 2.0, 4.0, 100.0]]))
    (tensor([2.]), tensor([3.]))
    """
    ordered = x.sort(1).values
    return (ordered[:, (x.shape[1] - 1) // 2] + ordered[:, x.shape[1] // 2]) / 2


class Robust(Mean):
    """A rule that a few wrong values cannot move far, on what all nodes of an island sent: `[1, n, *]` -> `[1, *]`.

    "median": of each coordinate. "trimmed_mean": of each coordinate the mean without the `trim` lowest and the `trim`
    highest. Every node sends its values to all others of its island.

    Args:
        rule: "median", "trimmed_mean", or a function of a tensor `[1, n, *]`, n nodes, which returns `[1, *]`.
        trim: for "trimmed_mean", the values left out at either end: as many liars can do no harm.
        island_size: see `Mean`.

    Raises:
        ValueError: for another rule, trim < 1, `trim` with another rule; before the first step if it leaves nothing.

    >>> from vecgym.strategy.meeting import Meeting
    >>> at, values = Meeting(StackedCollectives(4)), {"w": torch.tensor([1.0, 2.0, 3.0, -600.0])}
    >>> Robust("median")(values, at), Robust("trimmed_mean", trim=1)(values, at)
    ({'w': tensor([1.5000])}, {'w': tensor([1.5000])})

    Reference: Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", arXiv 1803.01498.
    """

    linear = False
    plain = False
    numbers = ()
    draws = Mean.draws

    def __init__(self, rule: str | Rule = "median", trim: int | None = None, island_size: int | None = None) -> None:
        if not callable(rule):
            check.choice("rule", rule, ("median", "trimmed_mean"), "a function [1, n, *] -> [1, *]")
        super().__init__(island_size)
        if (rule == "trimmed_mean") != (trim is not None):
            raise ValueError(f"rule={rule!r} and trim={trim!r}: trim goes with 'trimmed_mean', which needs it: trim=1.")
        self.rule = rule
        self.trim = check.optional_integer("trim", trim, what="the values left out at either end")

    def check(self, run: ExchangeFacts) -> None:
        super().check(run)
        for count in run.counts or (run.num_nodes,):
            smallest = count if self.island_size is None else (count % self.island_size or self.island_size)
            if self.trim is not None and 2 * self.trim >= smallest:
                raise ValueError(
                    f"trim={self.trim} at either end leaves nothing of {smallest} nodes: give a smaller one."
                )

    def agree(self, values: Tree, at: Meeting) -> Tree:
        everyone = at.comm.all_gather(values, readers=self.groups(at))
        return at.apart(self._combined(everyone, at))

    def of_codes(self, codes: Codes, codec: Codec, like: Tree, at: Meeting) -> Tree:
        received = gathered_codes(codes, codec, lambda x: self.gather(at.apart(x), at))
        everyone = {name: decode_all(received[name], codec, x) for name, x in like.items()}
        return self._combined(everyone, at)

    def _combined(self, everyone: Tree, at: Meeting) -> Tree:
        """Apply the rule to each island: of all nodes `[C, K, *]` -> `[C or C K, *]`."""
        groups = self.groups(at)
        if groups is None:
            return tree.map(self._rule, everyone)
        island_of = {node: i for i, group in enumerate(groups) for node in group}
        islands = torch.tensor([island_of[node] for node in at.comm.node_ids.tolist()], dtype=torch.long)

        def combined(x: Tensor) -> Tensor:
            of_islands = [self._rule(x[:, placed(torch.tensor(group), x.device)]) for group in groups]
            return torch.stack(of_islands, 1)[:, placed(islands, x.device)].flatten(0, 1)

        return tree.map(combined, everyone)

    def _rule(self, x: Tensor) -> Tensor:
        if not isinstance(self.rule, str):
            return torch.cat([self.rule(one) for one in x.split(1)])
        if self.trim is None:
            return median(x)
        return x.sort(1).values[:, self.trim : x.shape[1] - self.trim].mean(1)


# ------------------------------------------------------------------------------------------------ around another one


def _of_inner(name: str) -> Any:
    """Return what an average around another has from that one, attribute or method."""
    return property(lambda self: getattr(self.inner, name))


class Around(Average):
    """Tells another average, `inner`, something else than the values themselves."""

    def __init__(self, inner: Average) -> None:
        self.inner = check_average("inner", inner)

    @property
    def numbers(self) -> tuple[str, ...] | None:  # type: ignore[override]
        return None if self.inner.numbers is None else ()

    common = _of_inner("common")
    in_part = _of_inner("in_part")
    one_message = _of_inner("one_message")
    lag = _of_inner("lag")
    check = _of_inner("check")
    init = _of_inner("init")
    settle = _of_inner("settle")
    write = _of_inner("write")
    rate = _of_inner("rate")
    outer = _of_inner("outer")

    def around(self, inner: Average) -> Average:
        """Return the same around another average.

        >>> Private(Mean(), clip=1.0, noise=0.1).around(ServerMean())
        Private(ServerMean(), 1.0, 0.1)
        """
        twin = altered(self, inner=inner)
        twin._check()
        return twin

    def _check(self) -> None:
        """Raise a ValueError for settings that do not go together."""

    def of_some(self) -> Average:
        return self.around(self.inner.of_some())

    def through_server(self) -> Average:
        return self.around(self.inner.through_server())

    def told(self, values: Tree, at: Meeting) -> Tree:
        """Return what `inner` is told."""
        return values

    def agree(self, values: Tree, at: Meeting) -> Any:
        return self.inner.agree(self.told(values, at), at)


class Corrupted(Around):
    """Some nodes lie: what they tell `inner` is what an attack makes of their values.

    Args:
        inner: how the nodes agree on what they are told.
        nodes: the ids of those that lie.
        attack: of a tensor `[K, *]`, coordinate by coordinate or node by node; the sign is turned if not given.

    Raises:
        ValueError, TypeError: for what is no list of different ids; before the first step for a node that the run does
            not have.

    >>> from vecgym.strategy.meeting import Meeting
    >>> at, values = Meeting(StackedCollectives(3)), {"w": torch.tensor([1.0, 2.0, 3.0])}
    >>> Corrupted(Mean(), [1], lambda x: -20 * x)(values, at)
    {'w': tensor([-12.])}
    >>> Corrupted(Robust("median"), [1], lambda x: -20 * x)(values, at)
    {'w': tensor([1.])}
    """

    numbers = Around.numbers

    def __init__(self, inner: Average, nodes: Sequence[int], attack: Rule = torch.neg) -> None:
        super().__init__(inner)
        several = isinstance(nodes, (list, tuple)) and not any(isinstance(node, Tensor) for node in nodes)
        self.nodes = [check.integer("nodes", x, 0, "the id of a node that lies") for x in (nodes if several else ())]
        if not several or len(set(self.nodes)) != len(nodes):
            raise ValueError(f"nodes={nodes!r} must be a list of different node ids, such as [1].")
        if not callable(attack):
            raise TypeError(f"attack={attack!r} must be a function of a tensor, such as lambda x: -20 * x.")
        self.attack = attack

    def check(self, run: ExchangeFacts) -> None:
        super().check(run)
        if max(self.nodes, default=0) >= run.num_nodes:
            raise ValueError(f"nodes={self.nodes} of a run of {run.num_nodes} nodes: give ids below {run.num_nodes}.")

    def told(self, values: Tree, at: Meeting) -> Tree:
        liars = torch.isin(at.ids, torch.tensor(self.nodes, dtype=torch.long))
        false = at.apart(tree.map(self.attack, at.rows(values)))
        return tree.map(lambda x, y: torch.where(at.each(liars, x), y, x), values, false)


class Private(Around):
    """Each node's values are clipped to a 2-norm and blurred by Gaussian noise before they are sent.

    x_i <- x_i min(1, clip / |x_i|) + noise clip xi_i, xi_i ~ N(0, 1), over all tensors together. The mean over n nodes
    then has noise of standard deviation noise clip / sqrt(n) in each coordinate.

    For movements and gradients: `Outer(Private(Mean(), clip=1.0, noise=0.1))`. The noise comes from the run's seed and
    is keyed by the node, so it is the same in every process. How private that is, is for an accountant to say.

    Args:
        inner: how the nodes agree on what they are told.
        clip: > 0, the largest 2-norm of what a node sends.
        noise: >= 0, in units of `clip`.

    >>> from vecgym.strategy.meeting import Meeting
    >>> at, values = Meeting(StackedCollectives(2)), {"w": torch.tensor([[3.0, 4.0], [0.3, 0.4]])}
    >>> Private(Mean(), clip=1.0, noise=0.0)(values, at)
    {'w': tensor([[0.4500, 0.6000]])}

    Reference: McMahan et al., "Learning Differentially Private Recurrent Language Models", arXiv 1710.06963. Deviation:
    each node adds its own noise, so that nobody need be trusted with the values.
    """

    numbers = Around.numbers

    def __init__(self, inner: Average, clip: float, noise: float) -> None:
        super().__init__(inner)
        self.clip = check.number("clip", clip, "(0, inf)", "the largest 2-norm of what a node sends")
        self.noise = check.number("noise", noise, "[0, inf)", "its standard deviation in units of clip")

    def told(self, values: Tree, at: Meeting) -> Tree:
        clipped, _ = clip_grad_norm(at.rows(values), self.clip, inplace=False)
        return {name: self._blurred(x, name, at) for name, x in at.apart(clipped).items()}

    def _blurred(self, x: Tensor, name: str, at: Meeting) -> Tensor:
        if self.noise == 0:
            return x
        shape = x.shape[at.lead :]
        drawn = [
            torch.randn(shape, generator=at.generator(f"private {name}", at.step, node), dtype=x.dtype)
            for node in at.ids.tolist()
        ]
        noise = torch.stack(drawn) if drawn else torch.zeros(0, *shape, dtype=x.dtype)
        return x + self.noise * self.clip * placed(noise, x.device)


# ---------------------------------------------------------------------------------------------------- outer steps


class Outer(Around):
    """DiLoCo: the average movement of the nodes since the last exchange is the gradient of an outer optimizer.

    Delta = inner_i(theta_outer - theta_i);  theta_outer <- optim(theta_outer, Delta);  theta_i <- theta_outer.

    Of SGD with momentum mu, nesterov and the rate eta: m <- mu m + Delta; theta_outer <- theta_outer - eta (Delta + mu
    m). If the average is not the same for all (islands), each node has outer parameters and a momentum of its own.

    A rate with a value for each exchange, `[T, 1]`, goes by the number of the exchange, `at.exchange`; so does an
    optimizer's own count, such as Adam's. With a `SyncWeight` the number is the step, and that count the sum of the
    weights so far.

    State: `params`, the outer parameters, and `outer`, the optimizer's: once for all, `[1, *]`, or each node's own.
    Bytes: those of `inner`; with "median_norm" a number of each tensor and node more, in an all-gather.

    Args:
        inner: how the nodes agree on the movement.
        optim: None, "sgd" and `torch.optim.SGD` mean DiLoCo's SGD(lr=0.7, momentum=0.9, nesterov=True); an `OptimSpec`
            is taken as it is, and so is any other optimizer.
        correct: of the movements before they are averaged: "heloco", which turns what points against the outer
            momentum; "median_norm", which shrinks each tensor of a node's movement to the median of the nodes' norms; a
            function of the movements, the outer optimizer's state and the `Meeting`; None: none.

    Raises:
        ValueError: for an `inner` with outer parameters of its own; for "heloco" with another optimizer than SGD with
            momentum and without dampening; for "median_norm" with an average that is not the same for all.

    >>> from vecgym.strategy.meeting import Meeting
    >>> outer = Outer(Mean())
    >>> at = Meeting(StackedCollectives(2), *outer.init({"w": torch.zeros(1)}, RunFacts(2)))
    >>> outer({"w": torch.tensor([1.0, 3.0])}, at)["w"]  # 0.7 (2 + 0.9 * 2), on both nodes
    tensor([2.6600])
    >>> Outer(Mean(2), OptimSpec("sgd", lr=1.0)), Outer(Mean(), "sgd", correct="median_norm")
    (Outer(Mean(island_size=2), optim=OptimSpec(SGD, lr=1.0)), Outer(Mean(), correct='median_norm'))

    References: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105.
    HeLoCo, arXiv 2606.00271, where a server that does not wait corrects each movement when it arrives: here all arrive
    together, and are averaged without a weight. The median norm: Covenant-72B, arXiv 2603.08163, and
    github.com/tplr-ai/templar, src/tplr/compress.py, which shrinks what it has decoded: here it is shrunk before.
    """

    def __init__(
        self, inner: Average, optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None, *,
        correct: str | Correction | None = None,
    ) -> None:  # fmt: skip
        super().__init__(inner)
        self.optim = Optimizer(outer_spec(optim))
        self._alike = not self.optim.per_node  # alone; of a merged one a value may be each configuration's
        self.correct = correct
        if correct is not None and not callable(correct):
            check.choice("correct", correct, CORRECTIONS, "a function, or None")
        self._check()

    def _check(self) -> None:
        for inner in layers(self.inner):
            if isinstance(inner, (Outer, NoLoCo)):  # both would have outer parameters of one name
                raise ValueError(
                    f"{type(self).__name__} around {inner!r}: one outer step within another. Give each an exchange of "
                    "its own, or Mean()."
                )
        if self.correct == "heloco":
            _momentum(self.optim.spec)
        if self.correct == "median_norm" and not self.inner.common:
            raise ValueError(
                f'correct="median_norm" is the median of all nodes, and in {self.inner!r} not all agree: leave out '
                "islands and participation."
            )

    @property
    def common(self) -> bool:  # type: ignore[override]
        return self.inner.common and self._alike

    @property
    def numbers(self) -> tuple[str, ...] | None:  # type: ignore[override]
        rule = FORMULAS.get(self.optim.spec.cls)
        elementwise = rule is not None and not rule.of_matrices and self.optim.spec.param_groups is None
        return () if elementwise and self.inner.numbers is not None and self.correct is None else None

    @property
    def one_message(self) -> bool:
        return self.common

    def check(self, run: ExchangeFacts) -> None:
        super().check(run)
        self.optim.check(run.num_nodes, run.num_exchanges, "outer optimizer")

    @property
    def draws(self) -> bool:  # type: ignore[override]
        return self.inner.draws or callable(self.correct)

    def init(self, values: Tree, run: RunFacts) -> tuple[State, State]:
        own, shared = self.inner.init(tree.map(torch.zeros_like, values), run)
        held = {"params": values, "outer": self.optim.init(values)}
        return (own, {**shared, **held}) if self.common else ({**own, **held}, shared)

    def agree(self, values: Tree, at: Meeting) -> Tree:
        held = at.home(self.common)
        moved = tree.map(torch.sub, held["params"], values)
        if self.correct is not None:
            moved = _same_names("correct", self._correction(moved, held["outer"], at), moved)
        return self.inner(moved, at.replace(inplace=at.inplace_state))

    def settle(self, message: Tree, at: Meeting) -> None:
        held, optim = at.home(self.common), self.optim
        count: Any = [at.made] if isinstance(at.made, Tensor) else at.made
        if count != at.exchange:  # what is made in part counts in part, and rates go by the exchange
            spec = optim.spec.at(at.exchange)
            optim = optim if spec is optim.spec else Optimizer(spec)
        message = message if self.common else at.wide(message)
        held["params"], held["outer"] = optim.step(
            held["params"], message, held["outer"], count, inplace=at.inplace_state,
            nodes=None if self.common or at.size > 1 else at.nodes, exact=at.exact,
        )  # fmt: skip

    def write(self, message: Tree, values: Tree, at: Meeting) -> Tree:
        return at.home(self.common)["params"]

    def rate(self, exchange: int) -> Any:
        return self.optim.spec.lr_at(exchange)

    def outer(self, shared: Any) -> Tree:
        return shared["params"] if self.common else {}

    @property
    def _correction(self) -> Correction:
        if self.correct == "heloco":
            return functools.partial(heloco, momentum=_momentum(self.optim.spec))
        return CORRECTIONS[self.correct] if isinstance(self.correct, str) else self.correct  # type: ignore[return-value]

    def __repr__(self) -> str:
        usual = same(self.optim.spec, outer_spec(None))
        return shown(self, optim=None if usual else self.optim.spec)


class Eager(Outer):
    """An outer step with what the other nodes did a round before, and what a node itself did in this one.

    Delta~_i(t) = inner_j(Delta_j(t - 1)) + (Delta_i(t) - Delta_i(t - 1)) / K;  Delta(-1) = 0;
    theta_outer,i <- optim_i(theta_outer,i, Delta~_i(t));  theta_i <- theta_outer,i.

    So the exchange of a round may last as long as the next one: that is its `lag`. Nodes have different outer
    parameters. One node is DiLoCo. The exchange of the last round is lost.

    State, each node's own: `params`, the outer parameters; `outer`, the optimizer's; `others`, what the other nodes add
    to the next step, inner_j(Delta_j) - Delta_i / K. Bytes: those of `inner`.

    Args:
        inner: how the nodes agree on the movement; `Mean()` in the paper.
        optim: see `Outer`.

    >>> from vecgym.strategy.meeting import Meeting
    >>> eager = Eager(Mean(), OptimSpec("sgd", lr=1.0))
    >>> at = Meeting(StackedCollectives(2), *eager.init({"w": torch.zeros(1)}, RunFacts(2)))
    >>> params = eager({"w": torch.tensor([1.0, 3.0])}, at)
    >>> params["w"]  # half of each node's own movement; the other half of the other's comes later
    tensor([0.5000, 1.5000])
    >>> eager(params, at)["w"]  # nothing moved: now all have what all did
    tensor([2., 2.])

    Reference: Kale et al., "Eager Updates For Overlapped Communication and Computation in DiLoCo", arXiv 2502.12996.
    No deviation.
    """

    common = False
    numbers = Outer.numbers

    def __init__(self, inner: Average, optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None) -> None:
        super().__init__(inner, optim)

    def lag(self, every: int) -> int:
        return every

    def init(self, values: Tree, run: RunFacts) -> tuple[State, State]:
        own, shared = super().init(values, run)
        return {**own, "others": tree.map(torch.zeros_like, values)}, shared

    def agree(self, values: Tree, at: Meeting) -> Tree:
        moved, K = tree.map(torch.sub, at.own["params"], values), at.comm.num_nodes
        mean = self.inner(moved, at.replace(inplace=False))
        delta = tree.map(lambda others, own: others + own / K, at.own["others"], moved)
        at.own["others"] = tree.map(lambda of_all, own: of_all - own / K, mean, moved)
        return delta


class NoLoCo(Average):
    """The nodes are matched at random in groups, and each takes an outer step with its group.

    With Delta_j = theta_j - phi_j, in groups of n nodes:
    delta_i <- mu delta_i + (eta / n) sum_group Delta_j - gamma (phi_i - mean_group phi);
    phi_i <- phi_i + delta_i;  theta_i <- phi_i.

    State, each node's own: `params` (phi) and `momentum` (delta).

    Bytes sent per node and exchange: Delta and phi in a ring of n nodes, 4 (n - 1) / n b P: 2 b P in pairs.

    Args:
        group_size: n. If it does not divide the number of nodes, the last group is smaller; from all nodes on there is
            one group.
        lr: eta, one for all or one for each node.
        momentum: mu, likewise.
        gamma: how far a node goes to the mean phi of its group, likewise.

    Raises:
        ValueError: for group_size < 1, lr or gamma < 0, a momentum outside [0, 1); before the first step for a group of
            more nodes than there are.

    >>> from vecgym.strategy.meeting import Meeting
    >>> average = NoLoCo(lr=0.5)
    >>> at = Meeting(StackedCollectives(2), *average.init({"w": torch.tensor([0.0, 4.0])}, RunFacts(2)))
    >>> average({"w": torch.tensor([1.0, 7.0])}, at)["w"]  # 2, the mean phi, + 0.5 (1 + 3) / 2
    tensor([3., 3.])

    Reference: Kolehmainen et al., "NoLoCo: No-all-reduce Low Communication Training Method for Large Models", arXiv
    2506.10911, and github.com/gensyn-ai/noloco, src/noloco/sparse_optimizer_c.py, whose gamma is its outer learning
    rate. Deviations: the movement is counted upwards, Delta = theta - phi, so that its term has a plus; gamma is 1
    unless it is given, in the middle of the paper's bounds (for pairs and mu = 0.5: 0.5 and 1.5); a node that is left
    alone in its group goes on with its own movement.
    """

    common = False
    numbers = ("lr", "momentum", "gamma")

    def __init__(
        self, group_size: int = 2, lr: float | Tensor = 0.7, momentum: float | Tensor = 0.5,
        gamma: float | Tensor = 1.0,
    ) -> None:  # fmt: skip
        self.group_size = check.integer("group_size", group_size, what="the nodes that take an outer step together")
        self.lr = check.per_node("lr", lr, "[0, inf)", "of the outer steps")
        self.momentum = check.per_node("momentum", momentum, "[0, 1)", "of the outer steps")
        self.gamma = check.per_node("gamma", gamma, "[0, inf)", "how far a node goes to the mean of its group")

    def check(self, run: ExchangeFacts) -> None:
        for name in ("lr", "momentum", "gamma"):
            check.per_node(name, getattr(self, name), num_nodes=run.num_nodes)
        if self.group_size > max(2, run.num_nodes):  # pairs are the default, also of a node that is alone
            raise ValueError(
                f"group_size={self.group_size} is larger than the {run.num_nodes} nodes: give group_size <= "
                f"{run.num_nodes}, which is one group of all."
            )

    def init(self, values: Tree, run: RunFacts) -> tuple[State, State]:
        return {"params": values, "momentum": tree.map(torch.zeros_like, values)}, {}

    def agree(self, values: Tree, at: Meeting) -> Any:
        at = at.replace(inplace=False)
        mean = Mean(self.group_size if self.group_size < at.comm.num_nodes else None)
        moved = tree.map(torch.sub, values, at.own["params"])
        # Both are of the same groups, which the step draws.
        return {"moved": mean.agree(moved, at), "middle": mean.agree(at.own["params"], at)}

    def settle(self, message: Any, at: Meeting) -> None:
        mu, eta, gamma = (functools.partial(at.scaled, number) for number in (self.momentum, self.lr, self.gamma))

        def faster(delta: Tensor, movement: Tensor, phi: Tensor, mean: Tensor) -> Tensor:
            return mu(delta) + eta(movement) - gamma(phi - mean)

        phi = at.own["params"]
        at.own["momentum"] = tree.map(faster, at.own["momentum"], message["moved"], phi, message["middle"])
        at.own["params"] = tree.map(torch.add, phi, at.own["momentum"])

    def write(self, message: Any, values: Tree, at: Meeting) -> Tree:
        return at.own["params"]

    def rate(self, exchange: int) -> Any:
        return self.lr


# ------------------------------------------------------------------------------------------------------ corrections


def heloco(moved: Tree, optimizer: State, at: Meeting, momentum: float | Tensor = 0.9) -> Tree:
    """Correct each node's movement, tensor by tensor, by the mean of past ones; see `vecgym.strategy.HeLoCo`.

    That mean is (1 - momentum) times torch's buffer, which is their sum.

    >>> from vecgym.strategy.meeting import Meeting
    >>> moved, held = {"w": torch.tensor([[-1.0, 1.0], [1.0, 1.0]])}, {"w": torch.tensor([[2.0, 0.0]])}
    >>> heloco(moved, {"momentum_buffer": held}, Meeting(StackedCollectives(2)), momentum=0.5)["w"]
    tensor([[-0.8867,  1.0000],
            [ 1.0000,  1.0000]])
    """
    means = tree.map(lambda m: spread(1 - momentum, m) * m, optimizer["momentum_buffer"])
    return tree.map(corrected, moved, means)


def corrected(delta: Tensor, momentum: Tensor) -> Tensor:
    """Correct movements `[L, *]` by the momentum `[1 or L, *]` of the same tensor; see `HeLoCo`. Nothing is read.

    >>> corrected(torch.tensor([[-1.0, 1.0]]), torch.tensor([[1.0, 0.0]]))
    tensor([[-0.8867,  1.0000]])
    """
    size, pull = row_norms(delta), row_norms(momentum)
    toward, along = delta / nonzero(size), momentum / nonzero(pull)
    cosine = _total(toward * along)
    confidence = size / (size + 3 * pull + _TINY)
    away = delta - (-0.5 * cosine * confidence).clamp(max=0.5) * cosine * size * along
    turn = ((1 - cosine) * confidence).clamp(max=1)
    mixed = (1 - turn) * toward + turn * along
    turned = size * mixed / nonzero(row_norms(mixed))
    by_angle = torch.where(cosine < 0, away, torch.where(cosine < 0.2, turned, delta))
    return torch.where((size < _TINY) | (pull < _TINY), delta, by_angle)


def row_norms(x: Tensor) -> Tensor:
    """Return the 2-norm of each row, `[L, *]` -> `[L, 1, ...]`; its derivative at 0 is 0."""
    square = _total(x * x)
    return torch.where(square > 0, nonzero(square).sqrt(), 0.0)


def _total(x: Tensor) -> Tensor:
    """Sum each row, `[L, *]` -> `[L, 1, ...]`."""
    return x[:, None].flatten(1).sum(1).view(-1, *[1] * (x.dim() - 1))


def nonzero(x: Tensor) -> Tensor:
    """Return 1 in place of what is not above 0, to divide by."""
    return torch.where(x > 0, x, 1.0)


def median_norm(moved: Tree, optimizer: State, at: Meeting) -> Tree:
    """Shrink each node's movement, tensor by tensor, to the median of the nodes' norms, if its own is larger.

    Of an even number of nodes the median is the lower of the middle two, as `torch.median` has it. A number of each
    tensor of each node is sent.

    >>> from vecgym.strategy.meeting import Meeting
    >>> moved = {"w": torch.tensor([[3.0, 4.0], [6.0, 8.0], [0.0, 100.0]])}
    >>> median_norm(moved, {}, Meeting(StackedCollectives(3)))["w"]
    tensor([[ 3.,  4.],
            [ 6.,  8.],
            [ 0., 10.]])
    """
    squares = torch.stack([at.flat(x * x).sum(1) for x in moved.values()], 1)
    size = squares.where(squares > 0, 1.0).sqrt()  # if a tensor has not moved, its movement stays 0
    ordered = at.comm.all_gather(size * (squares > 0)).sort(1).values  # [1, K, tensors]
    factors = (ordered[:, (ordered.shape[1] - 1) // 2] / size).clamp(max=1)
    return {name: x * at.each(f.to(x.dtype), x) for (name, x), f in zip(moved.items(), factors.unbind(1))}


CORRECTIONS: dict[str, Correction] = {"heloco": heloco, "median_norm": median_norm}


def _momentum(optim: OptimSpec) -> Any:
    hyper = optim.hyper
    momentum = hyper.get("momentum", 0)
    has_momentum = isinstance(momentum, Tensor) or momentum > 0
    if optim.cls is not torch.optim.SGD or hyper["dampening"] != 0 or not has_momentum:
        raise ValueError(
            f'correct="heloco" goes by the outer momentum, and {optim!r} has none, or dampens it: give SGD with '
            'momentum, such as OptimSpec("sgd", lr=0.7, momentum=0.9, nesterov=True).'
        )
    return momentum


# ------------------------------------------------------------------------------------------------------ small parts


def outer_spec(
    optim: str | OptimSpec | type[torch.optim.Optimizer] | None, outer_lr: Any = None, usual: Any = OUTER_DEFAULTS["lr"]
) -> OptimSpec:
    """Return the outer optimizer: DiLoCo's for None, "sgd" and `torch.optim.SGD`, at the `usual` rate if none is given.

    >>> outer_spec("sgd", outer_lr=0.5), outer_spec(OptimSpec("sgd", lr=0.1))
    (OptimSpec(SGD, lr=0.5, momentum=0.9, nesterov=True), OptimSpec(SGD, lr=0.1))
    """
    if outer_lr is not None:
        check_lr("outer_lr", outer_lr)
    if optim is None or optim is torch.optim.SGD or (isinstance(optim, str) and optim.lower() == "sgd"):
        lr = usual if outer_lr is None else outer_lr
        return OptimSpec(torch.optim.SGD, **{**OUTER_DEFAULTS, "lr": lr})
    return ensure_optim_spec(optim, argument="outer_optim", lr=outer_lr)


def _same_names(name: str, found: Any, given: Tree) -> Tree:
    """Check that a user's function returned a dict with the names that it was given."""
    if not isinstance(found, Mapping) or found.keys() != given.keys():
        raise TypeError(f"{name} returned {found!r:.60}; return a dict of tensors with the names that it was given.")
    return dict(found)


def check_average(name: str, value: Any) -> Average:
    """Return `value` if it is an `Average`.

    >>> check_average("average", Mean)
    Traceback (most recent call last):
    ...
    TypeError: average is the class Mean; give an Average, such as Mean().
    """
    return check.instance(name, value, Average, "an Average, such as Mean()")


def as_weighting(weighting: Weighting) -> str | tuple[float, ...]:
    """Return how the nodes are weighted in a mean: a name, or a number for each.

    >>> as_weighting("examples"), as_weighting([30, 10])
    ('examples', (30.0, 10.0))
    >>> as_weighting("example")
    Traceback (most recent call last):
    ...
    ValueError: weighting='example' is not known; did you mean 'examples'? Allowed: 'equal', 'examples', a list of a \
number > 0 for each node.
    """
    if not isinstance(weighting, (list, tuple, Tensor)):
        return check.choice("weighting", weighting, ("equal", "examples"), "a list of a number > 0 for each node")
    numbers = weighting.tolist() if isinstance(weighting, Tensor) else weighting
    return tuple(float(check.number(f"weighting[{node}]", w, "(0, inf)")) for node, w in enumerate(numbers))


def check_weighting(weighting: str | Sequence[float], run: RunFacts) -> None:
    """Raise a ValueError if the weights of a mean are not known."""
    if weighting == "examples" and run.num_examples is None:
        raise ValueError('weighting="examples" needs the number of examples of each node: RunFacts(num_examples=...).')
    if not isinstance(weighting, str):
        check.fits("weighting has numbers for", len(weighting), run.num_nodes, "one for each")


def gathered_codes(codes: Codes, codec: Codec, gather: Callable[[Tree], Tree]) -> Codes:
    """Gather every node's codes, `[1, K, ...]`, in one collective; shared parts, `[1, 1, ...]`, are not sent."""
    sent = {f"{name}/{part}": y for name, code in codes.items() for part, y in code.items() if part not in codec.shared}
    received = gather(sent)
    return {
        name: {part: received.get(f"{name}/{part}", y[:, None]) for part, y in code.items()}
        for name, code in codes.items()
    }


def decode_all(code: Tree, codec: Codec, like: Tensor) -> Tensor:
    """Decode the codes of K nodes: `[R, K, ...]` -> `[R, K, *]`."""
    sent = next(y for part, y in code.items() if part not in codec.shared)
    wide = {part: y.expand(sent.shape[0], sent.shape[1], *y.shape[2:]) for part, y in code.items()}
    return codec.decode({part: wide[part].flatten(0, 1) for part in wide}, like).unflatten(0, sent.shape[:2])


def layers(average: Average) -> Iterator[Average]:
    """Yield an average, the one that it is around, and so on to the innermost.

    >>> list(layers(Corrupted(Private(Mean(), 1.0, 0.1), [0])))
    [Corrupted(Private(Mean(), 1.0, 0.1), [0]), Private(Mean(), 1.0, 0.1), Mean()]
    """
    yield average
    if isinstance(average, Around):
        yield from layers(average.inner)
