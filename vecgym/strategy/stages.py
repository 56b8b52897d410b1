"""What an exchange is made of: stages around an average, what they remember, and the walk along them.

How nodes agree is written as `Outer(Private(Mean(), 1.0, 0.1))`: two stages, and an average at the end. On the way out
each stage makes of the values what is sent, the average combines what all nodes send, and on the way back each stage
makes of the result what the nodes go on with. `Stages` walks along them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vecgym.core import check, tree
from vecgym.core.objects import UNSAID, Settings, altered, declare
from vecgym.core.tree import Tree
from vecgym.simulation.simulation import Part
from vecgym.simulation.timetable import RunFacts

# The methods that an exchange calls, and their arguments.
FORMS = {
    "init": "values, run, memory", "send": "x, part, memory", "agree": "x, part, memory", "receive": "y, part, memory",
    "write": "y, x, part, memory", "read": "x, part, memory", "within": "part, memory",
}  # fmt: skip
FORMER = {"told": "send", "settle": "receive"}


@dataclass(frozen=True)
class ExchangeFacts(RunFacts):
    """What an average may know about the exchanges of a run before the first step.

    Attributes:
        counts: the numbers of nodes that may take part; None: all take part.
        num_exchanges: in the whole run.

    >>> ExchangeFacts(num_nodes=6, counts=(2, 3)).fewest, ExchangeFacts(num_nodes=6).fewest
    (2, 6)
    """

    counts: tuple[int, ...] | None = None
    num_exchanges: int = 1

    @property
    def fewest(self) -> int:
        """The smallest number of nodes that may take part."""
        return self.num_nodes if self.counts is None else min(self.counts)

    @property
    def most(self) -> int:
        """The largest number of nodes that may take part.

        >>> ExchangeFacts(num_nodes=6, counts=(2, 3)).most
        3
        """
        return self.num_nodes if self.counts is None else max(self.counts)


@dataclass
class Memory:
    """What the stages of an exchange remember, trees of tensors by name.

    Attributes:
        own: of each node, `[K, *]`.
        shared: of all together, `[1, *]`.
        common: whether the result is the same on all nodes: then what belongs to it is stored once, in `shared`.
        inplace: what is remembered may be overwritten, if it is assigned afterwards; not under differentiation.
        notes: what is kept of this exchange until its result is written, the same on all nodes, `[1, *]`.

    >>> memory = Memory(common=False)
    >>> memory.home["params"] = {}
    >>> memory.own, memory.shared
    ({'params': {}}, {})
    """

    own: Any = field(default_factory=dict)
    shared: Any = field(default_factory=dict)
    common: bool = True
    inplace: bool = False
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def home(self) -> Any:
        """The one of the two that holds what belongs to the result."""
        return self.shared if self.common else self.own


def _check_forms(cls: type) -> None:
    """Raise a TypeError for methods with other arguments, or of another name, than an exchange calls."""
    for name, method in vars(cls).items():
        form = FORMS.get(FORMER.get(name, name))
        if form is None or not inspect.isfunction(method):
            continue
        signature = inspect.signature(method)
        try:
            signature.bind("self", *form.split(", "))
            fits = name not in FORMER
        except TypeError:
            fits = False
        if not fits:
            raise TypeError(
                f"class {cls.__name__}: give {FORMER.get(name, name)}(self, {form}) instead of {name}{signature}. An "
                "average remembers in memory.own and memory.shared; the rest of `at` is in `part`: part.due.number is "
                "at.exchange, and part.due.step is at.step. See vecgym.guide.writing_a_strategy."
            )


class Average(Settings):
    """How nodes agree on values. Override `agree`, and what else you need.

    An average holds settings only, so that several exchanges may share one; averages with equal settings are equal.
    What evolves is in its memory. Values are `[K, *]`, and `[1, *]` where they are the same on all nodes; of a group of
    C configurations of a sweep `[C, K, *]` and `[C, 1, *]`, and code that reduces over named dimensions only works on
    them, too. Such code says so: `class Mine(Average, batched=("lr",), random=False)`.

    Attributes:
        batched: constructor arguments that may differ between the configurations of a group; None: the methods work on
            one configuration. A class with methods of its own that does not say is taken to be of the second kind.
        random: whether random numbers are drawn, so that configurations of different seeds are no group.
        common: whether the result is the same on all nodes.
        partial: whether a part of a result can be used, which a `SyncWeight` asks for.
        overlaps: whether what is sent may take as long as the next round.

    Example: the value of another node in each exchange.

    >>> import torch
    >>> from vecgym.collectives import StackedCollectives
    >>> class Relay(Average):
    ...     def agree(self, x, part, memory):
    ...         return part.comm.broadcast(x, src=part.due.number % part.comm.num_nodes)
    >>> part = Part.alone(StackedCollectives(2), number=3)
    >>> Relay()({"w": torch.tensor([1.0, 3.0])}, part), Relay() == Relay()
    ({'w': tensor([3.])}, True)
    """

    batched: tuple[str, ...] | None = ()
    random: bool = True
    common: bool = True
    partial: bool = True
    overlaps: bool = False

    def __init_subclass__(cls, batched: Any = UNSAID, random: Any = UNSAID) -> None:
        super().__init_subclass__()
        declare(cls, batched, random)
        _check_forms(cls)

    def check(self, run: ExchangeFacts) -> None:
        """Raise a ValueError if it cannot work for this run."""

    def check_common(self, common: bool) -> None:
        """Raise a ValueError if it needs a result that is the same on all nodes, and this one is not."""

    def init(self, values: Tree, run: RunFacts, memory: Memory) -> Tree | None:
        """Remember what it begins with, `[1, *]`; return what the stages after this one begin with, if it is another.

        `values`, `[1, *]`, are those before the first exchange: the initial parameters, or zeros.
        """
        return None

    def agree(self, x: Tree, part: Part, memory: Memory) -> Any:
        """Return what the nodes agree on, nested dicts of tensors `[1 or K, *]`.

        If `part.inplace`, x may be overwritten.
        """
        raise NotImplementedError(f"{type(self).__name__} has no agree(x, part, memory)")

    def receive(self, y: Any, part: Part, memory: Memory) -> Any:
        """Return what becomes of what was agreed on, and change what is remembered: once for each exchange."""
        return y

    def write(self, y: Tree, x: Tree, part: Part, memory: Memory) -> Tree:
        """Return what nodes go on with that hold x; each may do so at another time."""
        return y

    def read(self, x: Tree, part: Part, memory: Memory) -> Tree:
        """Return the part of x that `write` writes to."""
        return x

    def within(self, part: Part, memory: Memory) -> Memory:
        """Return what the stages after this one remember."""
        return memory

    def rate(self, number: int) -> Any:
        """Return the learning rate of its own optimizer in an exchange, to be recorded; None: it has none."""
        return None

    def through_server(self) -> Average:
        """Return the same with a server's mean in place of a mean of all nodes."""
        inner = getattr(self, "inner", None)
        return self if inner is None else altered(self, inner=inner.through_server())

    def __call__(self, x: Tree, part: Part, memory: Memory | None = None) -> Tree:
        """Return what the nodes go on with at once; see `Part.alone`."""
        stages = Stages(self)
        memory = Memory(part.own, part.shared, stages.common, part.inplace) if memory is None else memory
        return stages(x, part, memory)


class Stage(Average):
    """What is done before nodes agree by `inner`, and after it. Override `send`, `receive` or both.

    >>> import torch
    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.core import tree
    >>> from vecgym.strategy import Mean
    >>> class Doubled(Stage, batched=(), random=False):
    ...     def send(self, x, part, memory):
    ...         return tree.map(lambda v: 2 * v, x)
    >>> Doubled(Mean())({"w": torch.tensor([1.0, 3.0])}, Part.alone(StackedCollectives(2)))
    {'w': tensor([4.])}
    """

    random = False

    def __init__(self, inner: Average) -> None:
        self.inner = check_average("inner", inner)

    def send(self, x: Tree, part: Part, memory: Memory) -> Tree:
        """Return what is sent of x. Return other tensors, or x itself."""
        return x


class Stages:
    """The stages of an average in order, and the average that ends them.

    The first of them that has a `receive` of its own does with the result what it does when it is used, perhaps some
    steps later. What comes after that one receives at once, since what it was given is gone by then.

    Args:
        how: the first of them.
        some: only some nodes take part, and the others do not receive the result.

    Attributes:
        each: all of them.
        changes: whether what is remembered changes when a result is used.
        common: whether the result is the same on all nodes.
        same: whether all nodes go on with the same.
        random, partial, overlaps: see `Average`; of any, of all, of any.

    >>> from vecgym.strategy import Corrupted, Mean, Outer, Private
    >>> Stages(Corrupted(Outer(Private(Mean(), 1.0, 0.1)), [0])).each
    [Corrupted(Outer(Private(Mean(), 1.0, 0.1)), [0]), Outer(Private(Mean(), 1.0, 0.1)), Private(Mean(), 1.0, 0.1), \
Mean()]
    """

    def __init__(self, how: Average, some: bool = False) -> None:
        self.how, self.each = how, [how]
        while isinstance(how, Stage) and not _overrides(how, "agree"):
            how = how.inner
            self.each.append(how)
        receiving = [_overrides(stage, "receive") for stage in self.each]
        self._writing = [_overrides(stage, "write") for stage in self.each]  # not all that the nodes hold
        self.changes = any(receiving)
        self._num_late = receiving.index(True) + 1 if self.changes else len(self.each)
        self._writes = any(self._writing[: self._num_late])
        self._of_all = not some or is_served(self.how)
        at_once = any(self._writing[self._num_late :])
        self.common = self._of_all and not at_once and all(stage.common for stage in self.each)
        self.same = self.common and not (some or self._writes)
        self.random = any(stage.random for stage in self.each)
        self.partial = all(stage.partial for stage in self.each)
        self.overlaps = any(stage.overlaps for stage in self.each)

    def check_common(self) -> None:
        """Let each check whether what it receives is the same on all nodes, if it needs that."""
        common = self._of_all and self.each[-1].common
        for stage, writes in zip(reversed(self.each), reversed(self._writing)):
            stage.check_common(common)
            common = common and stage.common and not writes

    def check(self, run: ExchangeFacts) -> None:
        """Let each check the run."""
        for stage in self.each:
            stage.check(run)

    def init(self, values: Tree, run: RunFacts, memory: Memory) -> None:
        """Let each remember what it begins with."""
        for stage in self.each:
            later = stage.init(values, run, memory)
            values = values if later is None else later

    def agree(self, x: Tree, part: Part, memory: Memory) -> Any:
        """Send x; return what was agreed on, for `receive`."""
        given: list[tuple[Any, Tree, Part, Memory]] = []
        for stage in self.each[:-1]:
            given.append((stage, x, part, memory))
            sent = stage.send(x, part, memory)  # type: ignore[attr-defined]
            if part.inplace != memory.inplace and not _share(sent, x):  # what nobody else has may be overwritten
                part = altered(part, inplace=memory.inplace)
            x, memory = sent, stage.within(part, memory)
        given.append((self.each[-1], x, part, memory))
        y = self.each[-1].agree(x, part, memory)
        for stage, x, part, memory in reversed(given[self._num_late :]):
            y = stage.write(stage.receive(y, part, memory), x, part, memory)
        return y

    def receive(self, y: Any, part: Part, memory: Memory) -> Tree:
        """Return what becomes of what was agreed on: once for each exchange."""
        late = self.each[: self._num_late]
        for stage in late[:-1]:
            memory = stage.within(part, memory)
        return late[-1].receive(y, part, memory)

    def read(self, x: Tree, part: Part, memory: Memory) -> Tree:
        """Return the part of x that is written to."""
        for stage in self.each[: self._num_late] if self._writes else ():
            x, memory = stage.read(x, part, memory), stage.within(part, memory)
        return x

    def write(self, y: Tree, x: Tree, part: Part, memory: Memory) -> Tree:
        """Return what nodes go on with that hold x."""
        given = []
        for stage in self.each[: self._num_late] if self._writes else ():
            given.append((stage, x, part, memory))
            x, memory = stage.read(x, part, memory), stage.within(part, memory)
        for stage, x, part, memory in reversed(given):
            y = stage.write(y, x, part, memory)
        return y

    def __call__(self, x: Tree, part: Part, memory: Memory) -> Tree:
        """Return what the nodes go on with at once."""
        return self.write(self.receive(self.agree(x, part, memory), part, memory), x, part, memory)


def within(how: Average) -> Iterator[Average]:
    """Yield an average, what it is around, and so on to the innermost."""
    yield how
    while (inner := getattr(how, "inner", None)) is not None:
        yield inner
        how = inner


def is_served(how: Average) -> bool:
    """Whether a server takes the mean, which it can send to those who take no part."""
    return any(getattr(average, "served", False) for average in within(how))


def _share(a: Tree, b: Tree) -> bool:
    """Whether two trees have storage in common."""
    return not set(tree.places(a.values())).isdisjoint(tree.places(b.values()))


def _overrides(average: Average, method: str) -> bool:
    return getattr(type(average), method) is not getattr(Average, method)


def check_average(name: str, value: Any) -> Average:
    """Return `value` if it is an `Average`.

    >>> from vecgym.strategy import Mean
    >>> check_average("average", Mean)
    Traceback (most recent call last):
    ...
    TypeError: average is the class Mean; give an Average, such as Mean().
    """
    return check.instance(name, value, Average, "an Average, such as Mean()")
