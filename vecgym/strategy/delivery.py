"""The participants of an exchange, the delivery of its result, and the message under way in between.

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
from vecgym.simulation.state import StateView
from vecgym.simulation.timetable import Mark, RunFacts, Who
from vecgym.simulation.when import When


class Participation(Settings):
    """The participants of an exchange: all nodes or a sample of each round, without those whose message is lost.

    Args:
        fraction: the fraction of the nodes, sampled anew for each round (at least one); the others do not train.
        resting: the other nodes "take" the result, which a server sends them, or "keep" their values. None: "take" if a
            server has a result that is the same on all nodes, else "keep".
        lost: the probability that a node's message in an exchange is lost: its values do not count, and it keeps them.
        sampling: "fixed": so many nodes in each round; "bernoulli": each by itself with this probability, perhaps none.

    Raises:
        ValueError: for a fraction outside (0, 1], another `resting`, or a probability outside [0, 1).

    >>> from vecgym.simulation.when import Rounds
    >>> half, run = Participation(0.5), RunFacts(num_nodes=4)
    >>> trains = half.who_trains(run, Rounds(5))
    >>> trains(0, range(4)) == trains(4, range(4)), len(trains(0, range(4)))  # in a round of 5 steps
    (True, 2)
    """

    def __init__(
        self, fraction: float = 1.0, resting: str | None = None, lost: float = 0.0, sampling: str = "fixed"
    ) -> None:
        what = "the fraction of nodes that trains in a round"
        self.fraction = check.number("participation", fraction, "(0, 1]", what)
        self.resting = resting if resting is None else check.choice("resting", resting, ("take", "keep"), "None")
        self.lost = check.number("lost", lost, "[0, 1)", "the probability that a node's message is lost")
        self.sampling = check.choice("sampling", sampling, ("fixed", "bernoulli"))

    @property
    def sampled(self) -> bool:
        """Whether each round samples nodes."""
        return self.fraction < 1

    def check(self, how: object, takes: bool) -> None:
        """Raise a ValueError if an average does not allow these settings.

        Args:
            how: the average, for messages.
            takes: whether nodes that sit out take its result.
        """
        if self.sampled and self.resting == "take" and not takes:
            raise ValueError(
                f'resting="take" needs a server that sends one result to all nodes, also to those that sit out, and '
                f'{how!r} has none: give ServerMean(), or resting="keep".'
            )
        if self.lost and takes:
            raise ValueError(
                f"lost={self.lost}: a server's result for nodes that sit out is never lost. Give "
                'resting="keep", or leave out lost.'
            )

    def counts(self, run: RunFacts, marks: Sequence[Mark]) -> set[int]:
        """Return the possible numbers of nodes that take part in an exchange, or use its result, at one time."""
        K = run.num_nodes
        counts = {num_drawn(self.fraction, count) for count in (K, *getattr(run.presence, "counts", ()))}
        if self.lost or (self.sampled and (run.presence or self.sampling == "bernoulli")):  # the draws say how many
            for mark in marks:
                due = filter(mark.when.due, range(run.num_steps))  # type: ignore[union-attr]
                counts.update(len(mark.who(step, run.there(step) or range(K))) for step in due if mark.who)  # type: ignore[arg-type]
            counts -= {0}
        return counts

    def who_trains(self, run: RunFacts, rounds: When) -> Who | None:
        """Return a function (step, present nodes) -> the nodes that train; None: all do."""
        if not self.sampled:
            return None

        def who(step: int, rows: Sequence[int]) -> Sequence[int]:
            """Draw from the nodes that are present when a round begins; a node that leaves is not replaced."""
            number, first = rounds.count(step), step
            if run.presence is not None:  # the count never falls
                first = bisect.bisect_left(range(step), number, key=rounds.count)
            began = rows if first == step else run.there(first) or range(run.num_nodes)
            left = set(drawn(self.fraction, began, run.seed, number, self.sampling)).intersection(rows)
            may_be_none = self.sampling == "bernoulli"
            return sorted(left) if left or may_be_none else drawn(self.fraction, rows, run.seed, number)

        return who

    def senders(self, run: RunFacts, rounds: When, unit: int, name: str) -> Who | None:
        """Return a function (step, present nodes) -> the nodes whose messages arrive; None: all do.

        Args:
            unit: steps per random draw.
            name: of the first parameter in the exchange, which the draws depend on.
        """
        trains = self.who_trains(run, rounds)
        if not self.lost:
            return trains

        def who(step: int, rows: Sequence[int]) -> list[int]:
            luck = torch.rand(run.num_nodes, generator=rng.generator(run.seed, f"lost {name}", step // unit))
            sending = trains(step, rows) if trains else None
            return [node for node in (rows if sending is None else sending) if luck[node] >= self.lost]

        return who


class Delivery(Settings):
    """The use of an exchange's result by the nodes: at once or late, and in place of their values or added to them.

    Args:
        delay: steps from the exchange to the use of its result, one number or one for each node.
        late: "value": a node overwrites its values with the result; "change": it adds the change that the result would
            have made without the delay.
        keep: the fraction of its own values that a node keeps, in [0, 1]; one number, or `[K]`.

    Raises:
        ValueError: for values outside these ranges; for "change" without a delay, or with `keep`.

    >>> Delivery([1, 2, 1], keep=0.5).lags(num_nodes=3, unit=10)
    [10, 20, 10]
    """

    batched = ("keep",)

    def __init__(self, delay: int | Sequence[int] = 0, late: str = "value", keep: float | Tensor = 0.0) -> None:
        self.delay = checked_delay(delay)
        self.late = check.choice("late", late, ("value", "change"))
        self.keep = check.per_node("keep", keep, "[0, 1]", "the fraction of its own values that a node keeps")
        self._equal_keep = not isinstance(self.keep, Tensor) or self.keep.numel() == 1  # see `Outer._equal_rates`
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
        """Whether the result replaces a node's values as a whole."""
        return not isinstance(self.keep, Tensor) and self.keep == 0

    @property
    def same(self) -> bool:
        """Whether nodes with equal values continue with equal values."""
        return self._equal_keep and not self.apart

    def lags(self, num_nodes: int, unit: int) -> list[int]:
        """Return the delay of each node, in steps."""
        delays = self.delay if isinstance(self.delay, tuple) else (self.delay,) * num_nodes
        return [delay * unit for delay in delays]

    def check_gap(self, gap: int) -> None:
        """Raise a ValueError if the next exchange comes before all nodes have used the result of this one."""
        if self.apart and self.longest >= gap:
            raise ValueError(
                f"delay={self.longest} must be smaller than every={gap}: a message arrives before the next one is "
                "sent. Give smaller delays, or a larger number."
            )

    def check(self, num_nodes: int, num_steps: int, who: object) -> None:
        """Raise a ValueError if this does not fit the run."""
        if 0 < self.longest >= num_steps:
            raise ValueError(
                f"delay={self.longest} in {who!r} is not smaller than the run's {num_steps} steps: no result is "
                "used before the run ends. Give a smaller delay, or more steps."
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
        rows: the tree that holds it: the shared one if it is the same for all nodes, else the nodes' own.
        memory: the `Memory` of the exchange. Notes that its stages make on sending are stored beside the message.
        step: the step of the exchange.

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
        """Whether the message exists; there is none if no node's message arrived."""
        return self.name in self.rows

    def send(self, values: Any) -> None:
        """Store the values of the message, and the notes of the stages."""
        self.rows[self.name] = values
        if self.memory.notes:
            self.memory.shared[self.notes] = self.memory.notes

    def read(self) -> Any:
        """Return the values, and restore the notes of the stages."""
        self.memory.notes = self.memory.shared.get(self.notes, {})
        return self.rows[self.name]

    def replace(self, values: Any) -> None:
        """Store other values in their place."""
        self.rows[self.name] = values

    def drop(self) -> None:
        """Delete the values and the notes."""
        del self.rows[self.name]
        if self.notes in self.memory.shared:
            del self.memory.shared[self.notes]


def blend(part: Part, weight: Tensor | None, messages: bool = True) -> None:
    """Weight all that an event has changed by a: (1 - a) old + a new, exactly old at 0 and new at 1.

    Args:
        messages: whether a new message is weighted, too: a change is, and a value stays whole until it is written.
    """
    if weight is None:
        return

    def between(new: Tensor, old: Tensor | None) -> Tensor:
        if new is old or not (new.is_floating_point() or old is not None):  # an index of a message
            return new
        share = placed(weight, new.device, tree.wider(new.dtype) if new.is_floating_point() else torch.float64)
        share = share.reshape(*share.shape, *[1] * (new.dim() - 1)) if share.dim() else share  # [C], of a group
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
                    "an exchange that adds to its state cannot be applied in part, as sync_weight requires: give "
                    "weights that are 0 or 1 and do not require grad."
                )
            rows.assigned[name] = tree.map_leaves(between, new, old)


def trees_of(part: Part) -> list[StateView]:
    """Return the rows of an event's trees; in a stack, the rows of all groups and those of this group."""
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
