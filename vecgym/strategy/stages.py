"""The parts of an exchange: stages around an average, their memory, and the walk along the stages.

`Outer(Private(Mean(), 1.0, 0.1))` is two stages, and an average at the end. On the way out each stage transforms the
values to send, the average combines the values of all nodes, and on the way back each stage transforms the result.
`Stages` walks along them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vecgym.core import check, tree
from vecgym.core.objects import UNSAID, Settings, Steady, altered, declare
from vecgym.core.tree import Tree
from vecgym.simulation.simulation import Part
from vecgym.simulation.state import check_values
from vecgym.simulation.timetable import RunFacts

# The methods that an exchange calls, and their arguments.
FORMS = {
    "init": "values, run, memory", "send": "x, part, memory", "agree": "x, part, memory", "receive": "y, part, memory",
    "write": "y, x, part, memory", "read": "x, part, memory", "within": "part, memory",
}  # fmt: skip


@dataclass(frozen=True)
class ExchangeFacts(RunFacts):
    """Facts about a run's exchanges that an average may know before the first step.

    Attributes:
        counts: the possible numbers of nodes that take part; None: all nodes.
        num_exchanges: the number of exchanges in the whole run.
        first: the step after which the first one is due.
        fraction: the fraction of the nodes that takes part in a round, or the probability of each.
        sampling: "fixed" or "bernoulli"; see `Exchange`.

    >>> some = ExchangeFacts(num_nodes=6, counts=(2, 3))
    >>> some.fewest, some.most, ExchangeFacts(num_nodes=6).fewest
    (2, 3, 6)
    """

    counts: tuple[int, ...] | None = None
    num_exchanges: int = 1
    first: int = 0
    fraction: float = 1.0
    sampling: str = "fixed"

    @property
    def fewest(self) -> int:
        """The smallest number of nodes that may take part."""
        return self.num_nodes if self.counts is None else min(self.counts)

    @property
    def most(self) -> int:
        """The largest number of nodes that may take part."""
        return self.num_nodes if self.counts is None else max(self.counts)


@dataclass
class Memory:
    """The memory of an exchange's stages: trees of tensors by name.

    Attributes:
        own: each node's own trees, `[K, *]`.
        shared: the trees of all nodes together, `[1, *]`.
        common: whether the result is the same on all nodes; then all that belongs to it is stored once, in `shared`.
        inplace: whether remembered tensors may be overwritten, if they are assigned afterwards; see `Part.inplace`.
        notes: trees kept until the result of this exchange is written, the same on all nodes, `[1, *]`.

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
        """`shared` if the result is the same on all nodes, else `own`."""
        return self.shared if self.common else self.own


def _check_forms(cls: type) -> None:
    """Raise a TypeError for methods with other arguments than an exchange gives, or in another order."""
    for name, method in vars(cls).items():
        if not inspect.isfunction(method):
            continue
        signature, form = inspect.signature(method), FORMS.get(name)
        arguments = ", ".join([*signature.parameters][1:])
        for other in () if form else FORMS:
            if FORMS[other] == arguments and sorted(other) == sorted(name):  # letters in another order
                raise TypeError(f"class {cls.__name__}: {name}{signature} is never called; did you mean {other!r}?")
        if form is None:
            continue
        try:
            signature.bind("self", *form.split(", "))
            named = [argument for argument in signature.parameters if argument in form.split(", ")]
            fits = named == sorted(named, key=form.split(", ").index)
        except TypeError:
            fits = False
        if not fits:
            raise TypeError(
                f"class {cls.__name__}: give {name}(self, {form}) instead of {name}{signature}. An average "
                "remembers in memory.own and memory.shared. See vecgym.guide.writing_a_strategy."
            )
    if "send" in vars(cls) and not issubclass(cls, globals().get("Stage", cls)):  # at first there is no Stage
        raise TypeError(f"class {cls.__name__}: only a Stage sends: give class {cls.__name__}(Stage), or use agree.")


class Average(Settings, Steady):
    """A rule by which nodes agree on values. Override `agree`, and other methods as needed.

    An average holds settings only, so that several exchanges may share one; averages with equal settings are equal.
    Its state is in the memory. Values are `[K, *]`, or `[1, *]` if they are the same on all nodes. In a sweep a group
    of C configurations has `[C, K, *]` and `[C, 1, *]`. Code that reduces over named dimensions only works on these,
    too, and a class declares that it does: `class Mine(Average, batched=("lr",), random=False)`.

    Attributes:
        batched: constructor arguments that may differ between the configurations of a group; None: the methods work on
            one configuration, which is the default of subclasses that define methods.
        random: whether it draws random numbers; then configurations with different seeds cannot share a group.
        steady: whether it always sends the same, so that a dry run makes one exchange for all; see `Steady`.
        common: whether the result is the same on all nodes.
        partial: whether a result can be applied in part, which a `SyncWeight` requires.
        overlaps: whether messages may take as long as the next round.
        alone: whether there is a result even if no node sends: noise that a server adds, say.
        delta: of the privacy that it counts; None: it counts none.

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
    alone: bool = False
    delta: float | None = None

    def __init_subclass__(cls, batched: Any = UNSAID, random: Any = UNSAID, steady: Any = False) -> None:
        super().__init_subclass__(steady)
        declare(cls, batched, random)
        _check_forms(cls)

    def check(self, run: ExchangeFacts) -> None:
        """Raise a ValueError if the average cannot work for this run."""

    def check_common(self, common: bool) -> None:
        """Raise a ValueError if it needs a result that is the same on all nodes, and this one is not."""

    def init(self, values: Tree, run: RunFacts, memory: Memory) -> Tree | None:
        """Fill the memory with initial trees `[1, *]`; return the initial values of later stages, None: `values`.

        `values`, `[1, *]`, are the initial parameters, or zeros for gradients and moments.
        """
        return None

    def agree(self, x: Tree, part: Part, memory: Memory) -> Any:
        """Return the agreed values, nested dicts of tensors `[1 or K, *]`.

        If `part.inplace`, x may be overwritten.
        """
        raise NotImplementedError(f"{type(self).__name__} has no agree(x, part, memory)")

    def receive(self, y: Any, part: Part, memory: Memory) -> Any:
        """Return the result, made of the agreed values, and update the memory. Called once per exchange."""
        return y

    def write(self, y: Tree, x: Tree, part: Part, memory: Memory) -> Tree:
        """Return the new values of nodes that hold x, from the result y. Nodes may write at different times."""
        return y

    def read(self, x: Tree, part: Part, memory: Memory) -> Tree:
        """Return the part of x that `write` writes to."""
        return x

    def within(self, part: Part, memory: Memory) -> Memory:
        """Return the memory of the stages after this one."""
        return memory

    def rate(self, number: int) -> Any:
        """Return the learning rate of its optimizer in an exchange, for the history; None without an optimizer."""
        return None

    def epsilon(self, run: ExchangeFacts, number: int) -> float | None:
        """Return the privacy that so many exchanges spend; None: it is not counted."""
        return None

    def through_server(self) -> Average:
        """Return the same average with a server's mean in place of a mean of all nodes."""
        inner = getattr(self, "inner", None)
        return self if inner is None else altered(self, inner=inner.through_server())

    def memory(self, values: Tree, part: Part) -> Memory:
        """Return the memory before the first exchange, to try it by hand; `values`, `[1, *]`, are those of `init`."""
        stages = Stages(self)
        memory = Memory(common=stages.common, inplace=part.inplace)
        stages.init(tree.map(lambda x: x.clone(), values), part.run, memory)
        memory.own = tree.map_leaves(lambda x: part.wide({"": x})[""].clone(), memory.own)
        return memory

    def __call__(self, x: Tree, part: Part, memory: Memory | None = None) -> Tree:
        """Make one exchange by hand, without a delay, and return the nodes' new values; see `Part.alone`."""
        stages = Stages(self)
        if memory is None and not (part.own or part.shared):
            once = tree.map(lambda y: y.new_zeros(*y.shape[: part.lead - 1], 1, *y.shape[part.lead :]), x)
            needed = self.memory(once, part)
            if needed.own or needed.shared:
                raise ValueError(
                    f"{self!r} remembers something: give a memory, made once by how.memory(initial_values, part)."
                )
        memory = Memory(part.own, part.shared, stages.common, part.inplace) if memory is None else memory
        return check_values(stages(x, part, memory), x, len(part.nodes), self, lead=part.lead)


class Stage(Average):
    """A step before and after the nodes agree by `inner`. Override `send`, `receive` or both.

    A stage with an `agree` of its own ends the walk: it calls `self.send` and `inner` itself, as `Eager` does.

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
        """Return the values to send, made of x: new tensors, or x itself."""
        return x


class Stages:
    """The stages of an average in order, and the average that ends them.

    Up to and including the first stage with a `receive` of its own, the way back is taken when the result is used,
    perhaps some steps later; what is inside of that stage goes all the way back at sending.

    Args:
        how: the first stage.
        some: only some nodes take part, and the others do not receive the result.

    Attributes:
        each: all stages, and the average.
        changes: whether using a result changes the memory.
        common: whether the result is the same on all nodes.
        same: `common`, and no stage writes in part and nobody is left out.
        random, partial, overlaps, alone: see `Average`; true if any, all, any, any of them are.

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
        # Those whose result is not all that a node goes on with.
        self._writing = [_overrides(stage, "write") for stage in self.each]
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
        self.alone = any(stage.alone for stage in self.each)

    def check_common(self) -> None:
        """Let each stage check whether the result that it receives is the same on all nodes."""
        common = self._of_all and self.each[-1].common
        for stage, writes in zip(reversed(self.each), reversed(self._writing)):
            stage.check_common(common)
            common = common and stage.common and not writes

    def check(self, run: ExchangeFacts) -> None:
        """Let each stage check the run."""
        for stage in self.each:
            stage.check(run)

    def init(self, values: Tree, run: RunFacts, memory: Memory) -> None:
        """Let each stage fill its memory."""
        for stage in self.each:
            later = stage.init(values, run, memory)
            values = values if later is None else later

    def agree(self, x: Tree, part: Part, memory: Memory) -> Any:
        """Send x; return the agreed values, for `receive`."""
        given: list[tuple[Any, Tree, Part, Memory]] = []
        for stage in self.each[:-1]:
            given.append((stage, x, part, memory))
            sent = stage.send(x, part, memory)  # type: ignore[attr-defined]
            if sent is None:
                raise TypeError(f"{stage!r}.send returned None; return the values that the average gets.")
            if part.inplace != memory.inplace and not _share(sent, x):  # new tensors may be overwritten
                part = altered(part, inplace=memory.inplace)
            x, memory = sent, stage.within(part, memory)
        given.append((self.each[-1], x, part, memory))
        nobody = part.event.rows == ()  # then a stage that is `alone` has made a result, `[1, *]`
        y = x if nobody else self.each[-1].agree(x, part, memory)
        for stage, x, part, memory in reversed(given[self._num_late :]):
            y = stage.write(stage.receive(y, part, memory), x, part, memory)
        return y

    def receive(self, y: Any, part: Part, memory: Memory) -> Tree:
        """Return the result, made of the agreed values: once per exchange."""
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
        """Return the new values of nodes that hold x."""
        given = []
        for stage in self.each[: self._num_late] if self._writes else ():
            given.append((stage, x, part, memory))
            x, memory = stage.read(x, part, memory), stage.within(part, memory)
        for stage, x, part, memory in reversed(given):
            y = stage.write(y, x, part, memory)
        return y

    def __call__(self, x: Tree, part: Part, memory: Memory) -> Tree:
        """Make an exchange at once; return the nodes' new values."""
        return self.write(self.receive(self.agree(x, part, memory), part, memory), x, part, memory)


def chain(how: Average) -> Iterator[Average]:
    """Yield an average, the one that it wraps, and so on to the innermost."""
    yield how
    while (inner := getattr(how, "inner", None)) is not None:
        yield inner
        how = inner


def is_served(how: Average) -> bool:
    """Whether a server takes the mean, and so can send it to nodes that take no part."""
    return any(getattr(average, "served", False) for average in chain(how))


def _share(a: Tree, b: Tree) -> bool:
    """Whether two trees have storage in common."""
    return not set(tree.places(a.values())).isdisjoint(tree.places(b.values()))


def _overrides(average: Average, method: str) -> bool:
    return getattr(type(average), method) is not getattr(Average, method)


def check_average(name: str, value: Any) -> Average:
    """Return `value` if it is an `Average`; a TypeError says what to give."""
    return check.instance(name, value, Average, "an Average, such as Mean()")
