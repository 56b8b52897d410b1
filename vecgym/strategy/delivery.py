"""Who takes part in an exchange, when and how its result is used, and the message under way in between.

`Exchange` takes the settings of both classes as its own arguments: `participation`, `resting` and `lost` are those of a
`Participation`; `delay`, `late` and `keep` are those of a `Delivery`.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vecgym.availability import drawn, num_drawn
from vecgym.core import check, rng, tree
from vecgym.core.devices import placed, spread
from vecgym.core.objects import Settings
from vecgym.core.tree import Tree
from vecgym.simulation.simulation import Part
from vecgym.simulation.state import Rows
from vecgym.simulation.timetable import Mark, RunFacts, Who
from vecgym.simulation.when import When


class Participation(Settings):
    """Who takes part in an exchange: all nodes, or a sample of them in each round; and whose messages are lost.

    Args:
        fraction: of the nodes, which is drawn anew for each round, at least one node; the others do not train.
        resting: the others then "take" the result, which a server sends them, or "keep" their values. None: "take"
            where a server has a result that is the same for all, else "keep".
        lost: the probability, for each node and exchange, that its message is lost: its values do not count, and it
            goes on with its own.

    Raises:
        ValueError: for a fraction outside (0, 1], another `resting`, or a probability outside [0, 1).

    >>> from vecgym.simulation.when import Rounds
    >>> half, run = Participation(0.5), RunFacts(num_nodes=4)
    >>> trains = half.trains(run, Rounds(5))
    >>> trains(0, range(4)) == trains(4, range(4)), len(trains(0, range(4)))  # in a round of 5 steps
    (True, 2)
    """

    def __init__(self, fraction: float = 1.0, resting: str | None = None, lost: float = 0.0) -> None:
        what = "the fraction of nodes that trains in a round"
        self.fraction = check.number("participation", fraction, "(0, 1]", what)
        self.resting = resting if resting is None else check.choice("resting", resting, ("take", "keep"), "None")
        self.lost = check.number("lost", lost, "[0, 1)", "the probability that a node's message is lost")

    @property
    def sampled(self) -> bool:
        """Whether nodes are drawn for each round."""
        return self.fraction < 1

    def check(self, how: object, takes: bool) -> None:
        """Raise a ValueError if nodes cannot take part in this way in an average.

        Args:
            how: the average, for messages.
            takes: whether the nodes that are not drawn take its result.
        """
        if self.sampled and self.resting == "take" and not takes:
            raise ValueError(
                f'resting="take" needs a server that sends the same to all, those who sit out too, and {how!r} has '
                'none: give ServerMean(), or resting="keep".'
            )
        if self.lost and takes:
            raise ValueError(
                f'lost={self.lost}: what a server sends to those who sit out is not lost. Give resting="keep", or '
                "leave out lost."
            )

    def counts(self, run: RunFacts, marks: Sequence[Mark]) -> set[int]:
        """Return the numbers of nodes that may take part in an exchange, or use its result, at one time."""
        K = run.num_nodes
        counts = {num_drawn(self.fraction, count) for count in (K, *getattr(run.presence, "counts", ()))}
        if self.lost or (self.sampled and run.presence is not None):  # how many are heard in the end
            for mark in marks:
                due = filter(mark.when.due, range(run.num_steps))  # type: ignore[union-attr]
                counts.update(len(mark.who(step, run.there(step) or range(K))) for step in due if mark.who)  # type: ignore[arg-type]
            counts -= {0}
        return counts

    def trains(self, run: RunFacts, rounds: When) -> Who | None:
        """Return a function (step, present nodes) -> those that train; None: all do."""
        if not self.sampled:
            return None

        def who(step: int, rows: Sequence[int]) -> Sequence[int]:
            """Draw from the nodes that are present when a round begins; a node that leaves is not replaced."""
            number, first = rounds.count(step), step
            if run.presence is not None:  # the count never falls
                first = bisect.bisect_left(range(step), number, key=rounds.count)
            began = rows if first == step else run.there(first) or range(run.num_nodes)
            left = set(drawn(self.fraction, began, run.seed, number)).intersection(rows)
            return sorted(left) or drawn(self.fraction, rows, run.seed, number)

        return who

    def senders(self, run: RunFacts, rounds: When, unit: int, name: str) -> Who | None:
        """Return a function (step, present nodes) -> those whose message arrives; None: all do.

        Args:
            unit: steps that count as one, for random numbers.
            name: of the first parameter that is exchanged, likewise.
        """
        trains = self.trains(run, rounds)
        if not self.lost:
            return trains

        def who(step: int, rows: Sequence[int]) -> list[int]:
            luck = torch.rand(run.num_nodes, generator=rng.generator(run.seed, f"lost {name}", step // unit))
            sending = (trains(step, rows) if trains else None) or rows
            return [node for node in sending if luck[node] >= self.lost]

        return who


class Delivery(Settings):
    """When the nodes use the result of an exchange, at once or late, and what they do with it.

    Args:
        delay: steps from the exchange to the use of its result, one number or one for each node.
        late: "value": a node writes the result over its values; "change": it adds the change that the result would have
            made at once.
        keep: the part of its own values that a node keeps, in [0, 1]; one number, or `[K]`.

    Raises:
        ValueError: for values outside these ranges; for a change without a delay, or of which a part is kept.

    >>> Delivery([1, 2, 1], keep=0.5).lags(num_nodes=3, unit=10)
    [10, 20, 10]
    """

    batched = ("keep",)

    def __init__(self, delay: int | Sequence[int] = 0, late: str = "value", keep: float | Tensor = 0.0) -> None:
        self.delay = checked_delay(delay)
        self.late = check.choice("late", late, ("value", "change"))
        self.keep = check.per_node("keep", keep, "[0, 1]", "what a node keeps of its own")
        self._alike = not isinstance(self.keep, Tensor) or self.keep.numel() == 1  # alone; see `Outer._alike`
        if self.late == "change" and self.delay == 0:
            raise ValueError('late="change" without a delay has no effect: give delay=1, or more, or leave it out.')
        if self.late == "change" and not self.overwrites:
            raise ValueError(f'keep={self.keep} and late="change", of which all is added: leave one of them out.')

    @property
    def apart(self) -> bool:
        """Whether nodes have different delays."""
        return isinstance(self.delay, tuple)

    @property
    def longest(self) -> int:
        """The longest delay of a node."""
        return max(self.delay) if isinstance(self.delay, tuple) else self.delay

    @property
    def overwrites(self) -> bool:
        """Whether no node keeps a part of its own."""
        return not isinstance(self.keep, Tensor) and self.keep == 0

    @property
    def same(self) -> bool:
        """Whether nodes with equal values go on with equal values."""
        return self._alike and not self.apart

    def lags(self, num_nodes: int, unit: int) -> list[int]:
        """Return the delay of each node, in steps."""
        delays = self.delay if isinstance(self.delay, tuple) else (self.delay,) * num_nodes
        return [delay * unit for delay in delays]

    def check_gap(self, gap: int) -> None:
        """Raise a ValueError if the next exchange comes before all nodes have used the result of this one."""
        if self.apart and self.longest >= gap:
            raise ValueError(
                f"delay={self.longest} must be smaller than every={gap}: what is sent arrives before it is sent again. "
                "Give smaller delays, or a larger number."
            )

    def check(self, num_nodes: int, num_steps: int, who: object) -> None:
        """Raise a ValueError if this does not fit the run."""
        if 0 < self.longest >= num_steps:
            raise ValueError(
                f"delay={self.longest} in {who!r} is not smaller than the run's {num_steps} steps: nothing that it "
                "exchanges takes effect, and all of it is kept. Give a smaller delay, or more steps."
            )
        if isinstance(self.delay, tuple):
            check.fits("delay is for", len(self.delay), num_nodes, f"a number, or [{num_nodes}]")
        check.per_node("keep", self.keep, num_nodes=num_nodes)

    def mixed(self, new: Tree, old: Tree, part: Part) -> Tree:
        """Return keep old + (1 - keep) new."""
        keep = self.keep
        if not isinstance(keep, Tensor) and keep in (0, 1):
            return old if keep else new
        keep = part.here(keep)

        def between(x: Tensor, y: Tensor) -> Tensor:
            share = placed(spread(keep, y), y.device, y.dtype) if isinstance(keep, Tensor) else keep
            return torch.lerp(y.expand_as(x), x, share)

        return {name: between(old[name], y) for name, y in new.items()}


class Message:
    """A message under way: its place in the state, from the exchange until the last node has used it.

    Args:
        rows: where it is kept: once if it is the same for all nodes, else each node's own.
        memory: the `Memory` of the exchange. The notes that its stages make on sending are kept beside the message.
        step: of the exchange.

    >>> from vecgym.strategy import Memory
    >>> memory = Memory(notes={"index": 3})
    >>> Message(memory.shared, memory, step=9).send({"w": 1.0})
    >>> memory.shared
    {'message 9': {'w': 1.0}, 'notes 9': {'index': 3}}
    >>> message = Message(memory.shared, memory, step=9)
    >>> message.under_way, message.read(), message.drop(), memory.shared
    (True, {'w': 1.0}, None, {})
    """

    def __init__(self, rows: Any, memory: Any, step: int) -> None:
        self.rows, self.memory = rows, memory
        self.name, self.notes = f"message {step}", f"notes {step}"

    @property
    def under_way(self) -> bool:
        """Whether there is one: none is where no node was heard."""
        return self.name in self.rows

    def send(self, values: Any) -> None:
        """Keep values, and the notes about them."""
        self.rows[self.name] = values
        if self.memory.notes:
            self.memory.shared[self.notes] = self.memory.notes

    def read(self) -> Any:
        """Return the values, and give the stages their notes back."""
        self.memory.notes = self.memory.shared.get(self.notes, {})
        return self.rows[self.name]

    def replace(self, values: Any) -> None:
        """Keep other values in their place."""
        self.rows[self.name] = values

    def drop(self) -> None:
        """Forget the values and the notes."""
        del self.rows[self.name]
        if self.notes in self.memory.shared:
            del self.memory.shared[self.notes]


def blend(part: Part, weight: Tensor | None, messages: bool = True) -> None:
    """Make everything that an event has changed only in part: (1 - a) old + a new, exactly old at 0 and new at 1.

    A new message is a change, and only a part of it is made; with `messages=False` it is a value, which stays whole.
    """
    if weight is None:
        return

    def between(new: Tensor, old: Tensor | None) -> Tensor:
        if new is old or not (new.is_floating_point() or old is not None):  # an index of a message
            return new
        share = placed(weight, new.device, tree.wider(new.dtype) if new.is_floating_point() else torch.float64)
        if new.dtype != share.dtype and new.is_floating_point():  # of half precision; equal values would drift
            return between(new.to(share.dtype), None if old is None else old.to(share.dtype)).to(new.dtype)
        return share * new if old is None else (1 - share) * old + share * new

    for rows in trees_of(part):
        for name, new in rows.assigned.items():
            under_way = "/message " in name or "/notes " in name
            if under_way and not messages:
                continue
            old = rows.shown(name)
            if not isinstance(new, Tensor) and new and not old and not under_way:
                raise ValueError(
                    "an exchange that adds to its state cannot be made in part, which sync_weight asks for: give "
                    "weights that are 0 or 1 and do not require grad."
                )
            rows.assigned[name] = tree.map_leaves(between, new, old)


def trees_of(part: Part) -> list[Rows]:
    """Return the rows of an event's trees; in a stack, those common to all groups and those of this group."""
    both: list[Any] = [part.own, part.shared]
    return [x for rows in both for x in ((rows.common, rows.others) if hasattr(rows, "common") else (rows,))]


def checked_delay(delay: Any) -> int | tuple[int, ...]:
    """Return one delay, or one for each node, from a number, a list or a tensor.

    >>> checked_delay(torch.tensor([1, 2])), checked_delay([3, 3])
    ((1, 2), 3)
    """
    check.has_values("delay", delay)
    values = delay.tolist() if hasattr(delay, "tolist") else delay
    several = values if isinstance(values, (list, tuple)) else [values]
    if not several:
        raise ValueError("delay=[] must have one number for each node.")
    what = "optimizer steps between an exchange and its effect; 0: at once"
    delays = tuple(
        int(check.number("delay", check.integer("delay", x, 0, what), "[0, 1000000]", what)) for x in several
    )
    return delays[0] if len(set(delays)) == 1 else delays
