"""What happens when in a run, and to which rows: plain Python, known before the first gradient.

It never depends on a trained number. Which nodes are present, train and exchange, and which batch each reads, is all
known in advance, so a timetable can be tested without tensors, and a run can read its data ahead.

>>> run = RunFacts(num_nodes=3, num_steps=4)
>>> for events in Lockstep(run, Mark("meet", Every(2))).ticks():
...     print([event.what for event in events])
['train']
['train', 'meet']
['train']
['train', 'meet']
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from vecgym.core import check
from vecgym.simulation.events import Schedule
from vecgym.simulation.presence import Presence

# (step, present nodes) -> some of these; None: all of them
Who = Callable[[int, Sequence[int]], "Sequence[int] | None"]
CACHED_COUNTS = 128  # steps whose counts are cached: reading runs ahead


class Event(NamedTuple):
    """Something that happens to some rows of the state.

    Attributes:
        what: the method of the algorithm that handles it.
        rows: ascending; None: all.
        counts: step counts that index data, learning rates and random numbers: one for all rows, or one for each.
        reads: batches that each row reads.
        info: further information for the method, such as a `Due`.
        made: optimizer steps that the rows have taken before; None: as many as `counts`.
        group: of a stack, the group whose nodes are meant, in each of its configurations; None: rows of the whole
            stack, with the groups' own events in `info`.

    >>> Event("train", (0, 2), counts=(5, 4), reads=1).rows
    (0, 2)
    """

    what: str
    rows: tuple[int, ...] | None = None
    counts: int | tuple[int, ...] = 0
    reads: int = 0
    info: Any = None
    made: int | tuple[int, ...] | None = None
    group: int | None = 0


class Recurrence(Protocol):
    """The steps at which something is due; `vecgym.strategy.when.When` is one."""

    def due(self, step: int) -> bool:
        """Whether it is due after this step, counted from 0."""

    def count(self, step: int) -> int:
        """Count how often it was due before."""


@dataclass(frozen=True)
class Every:
    """After every H steps.

    >>> [(step, Every(3).count(step)) for step in range(8) if Every(3).due(step)]
    [(2, 0), (5, 1)]
    """

    H: int = 1

    def __post_init__(self) -> None:
        check.integer("H", self.H, what="steps from one time to the next")

    def due(self, step: int) -> bool:
        return (step + 1) % self.H == 0

    def count(self, step: int) -> int:
        return step // self.H


class Mark(NamedTuple):
    """What is due in some ticks of a `Lockstep`, and for which nodes.

    Attributes:
        what: the method of the algorithm that handles it.
        when: when it is due; a number H: every H steps.
        lag: steps from when it is due to when it happens, for nodes that are present at both.
        who: which of the nodes that are present when it is due; None: all of them.
        of: what it is about, such as a fragment.

    >>> Mark("write", Every(10), lag=2).who is None
    True
    """

    what: str
    when: Recurrence | int = Every()
    lag: int = 0
    who: Who | None = None
    of: Any = None


class Due(NamedTuple):
    """What an event knows about its mark.

    Attributes:
        number: how often it was due before: the count for selectors, topologies and outer optimizers.
        step: when it was due; the event is `lag` steps later.
        of: what the mark is about.

    >>> Due(number=0, step=9).of is None
    True
    """

    number: int
    step: int
    of: Any = None


@dataclass(frozen=True)
class RunFacts:
    """What an algorithm and its timetable may know before the first step.

    Attributes:
        presence: which nodes are present in which steps; None: all, always.
        num_examples: of each node's shard, `[K]`; None: unknown.
        schedule: all that happens, if nodes do not wait for one another.
        names: of the trained parameters, in the model's order; a `Simulation` fills them in.

    >>> RunFacts(num_nodes=4, num_steps=10).presence is None
    True
    """

    num_nodes: int
    num_steps: int = 1
    seed: int = 42
    presence: Presence | None = None
    num_examples: tuple[int, ...] | None = None
    schedule: Schedule | None = None
    names: tuple[str, ...] = ()

    def there(self, step: int) -> tuple[int, ...] | None:
        """Return the nodes that are present in a step; None: all, as before the first step.

        >>> RunFacts(num_nodes=4).there(0) is None
        True
        """
        return None if self.presence is None or step < 0 else self.presence.present(step)


class Timetable(Protocol):
    """The events of a run, tick by tick. A tick ends with a row of the history.

    Attributes:
        length: number of ticks.
        max_steps: most steps of a node: the length of a learning rate schedule.
    """

    length: int
    max_steps: int

    def ticks(self, start: int = 0) -> Iterator[list[Event]]:
        """Return the events of each tick from `start` on."""


class Lockstep:
    """In each tick all present nodes train, or those that `trains` selects; then what is marked happens.

    A node that does not train in every step has a count of its own. With absences, data and learning rates follow it;
    an optimizer's own count always does.

    Args:
        marks: in the order in which they happen within a tick.
        trains: which of the present nodes train; None: all of them.
        train: the method; not "train" if nodes exchange something before the optimizer's step.

    >>> half = Lockstep(RunFacts(num_nodes=4, num_steps=3), trains=lambda step, rows: rows[step % 2 :: 2])
    >>> for (event,) in half.ticks():
    ...     print(event.rows, event.counts, event.made)
    (0, 2) 0 (0, 0)
    (1, 3) 1 (0, 0)
    (0, 2) 2 (1, 1)
    """

    first = 0  # the step after which something is due for the first time; -1 is before the first step

    def __init__(self, run: RunFacts, *marks: Mark, trains: Who | None = None, train: str = "train") -> None:
        self.run, self.trains, self.train = run, trains, train
        self.marks = [mark._replace(when=Every(x) if isinstance(x := mark.when, int) else x) for mark in marks]
        self.length = self.max_steps = run.num_steps
        self._made = {0: [0] * run.num_nodes}  # by step

    def ticks(self, start: int = 0) -> Iterator[list[Event]]:
        return map(self.events, range(start, self.length))

    def events(self, step: int) -> list[Event]:
        """Return the events of one step."""
        present, training = self.run.there(step), self.training(step)
        counts, made = self._counts(step, training)
        presence = self.run.presence
        back = () if presence is None or presence.rejoin == "own" else presence.returning(step)
        events = [Event("rejoin", info=back)] if back else []
        if training != ():
            events.append(Event(self.train, training, counts, 1, made=made))
        for mark in self.marks:
            begun, when = step - mark.lag, mark.when
            assert not isinstance(when, int)
            if begun >= self.first and when.due(begun):
                rows = _both(self._selected(mark.who, begun, self.run.there(begun)), present)
                if rows != ():
                    due = Due(when.count(begun), begun, mark.of)
                    counts, made = self._counts(step, rows)
                    events.append(Event(mark.what, rows, counts, info=due, made=made))
        return events

    def training(self, step: int) -> tuple[int, ...] | None:
        """Return the nodes that train; None: all."""
        presence = self.run.presence
        rows = self._selected(self.trains, step, self.run.there(step))
        return rows if presence is None else _both(rows, presence.training(step))

    def made(self, step: int) -> list[int]:
        """Count the steps in which each node has trained before this one."""
        if self.trains is None and self.run.presence is None:
            return [step] * self.run.num_nodes
        if step not in self._made:
            begin = max((before for before in self._made if before < step), default=0)
            counts = list(self._made.get(begin, [0] * self.run.num_nodes))
            for before in range(begin, step):
                training = self.training(before)
                for node in range(self.run.num_nodes) if training is None else training:
                    counts[node] += 1
                self._made[before + 1] = list(counts)
                if len(self._made) > CACHED_COUNTS:
                    del self._made[next(iter(self._made))]
        return list(self._made[step])

    def _counts(self, step: int, rows: tuple[int, ...] | None) -> tuple[Any, Any]:
        """Return the counts of these rows, and the steps that they have taken where that differs."""
        if self.trains is None and self.run.presence is None:
            return step, None
        steps = self.made(step)
        made = tuple(steps) if rows is None else tuple(steps[row] for row in rows)
        return (step, made) if self.run.presence is None else (made, None)

    def _selected(self, who: Who | None, step: int, rows: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if who is None:
            return rows
        present = range(self.run.num_nodes) if rows is None else rows
        nodes = who(step, present)
        if nodes is None or len(nodes) == self.run.num_nodes:
            return rows
        if strangers := set(nodes).difference(present):
            raise ValueError(f"step {step}: {who!r} names {sorted(strangers)}, which are not among {list(present)}.")
        return tuple(sorted(set(nodes)))


def _both(a: tuple[int, ...] | None, b: Iterable[int] | None) -> tuple[int, ...] | None:
    """Return the rows that are in both; None stands for all."""
    if a is None or b is None:
        return a if b is None else tuple(b)
    second = set(b)
    return tuple(row for row in a if row in second)
