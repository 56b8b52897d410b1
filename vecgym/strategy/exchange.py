"""What nodes exchange: how they agree, when, of what, and what becomes of it.

A strategy is an inner optimizer and a list of exchanges. HOW is an `Average`, WHEN are marks in the timetable, and
WHAT are parameters, gradients, or what the optimizers keep:

>>> from vecgym.compress import TopK
>>> from vecgym.optim import OptimSpec
>>> from vecgym.strategy.averages import Mean, Outer
>>> from vecgym.strategy.coded import Compressed
>>> Exchange(Outer(Compressed(Mean(island_size=4), TopK(0.05)), OptimSpec("sgd", lr=0.7)), every=50)
Exchange(Outer(Compressed(Mean(island_size=4), TopK(fraction=0.05, k=None)), optim=OptimSpec(SGD, lr=0.7)), every=50)

An exchange is an event, `meet`. If what is agreed on is used later, or by others than those who send, it is two: at
`agree` those who send make a message, and at `write`, some steps later, those who were present then, too, take it.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from vecgym.availability import drawn, num_drawn
from vecgym.core import check, nodes, rng, tree
from vecgym.core.devices import placed, spread
from vecgym.core.objects import Settings, altered, shown
from vecgym.core.tree import Tree
from vecgym.simulation.simulation import Part
from vecgym.simulation.state import Labelled, Rows, check_values
from vecgym.simulation.timetable import Due, Mark, RunFacts, Who
from vecgym.simulation.when import Rounds, RoundsOf, SyncWeight, When, as_when
from vecgym.strategy.averages import Mean
from vecgym.strategy.fragments import Fragments, Pattern, check_fragments, cut
from vecgym.strategy.moments import moments_in, with_moment
from vecgym.strategy.stages import Average, ExchangeFacts, Memory, Stages, check_average, is_served, within

State = dict[str, Any]

DEFAULT_H = 100  # inner steps of a round: DiLoCo's


class Of(NamedTuple):
    """What a mark of an exchange is about: its place among those of the strategy, and the number of the fragment."""

    exchange: int
    fragment: int = 0


# --------------------------------------------------------------------------------------------------------- exchange


class Exchange(Settings):
    """Every so many steps those who meet agree on values, and go on with them.

    x_i <- keep x_i + (1 - keep) how(x_1, ..., x_K).

    With a `delay` of d steps what was agreed on after step t is used after step t + d, by the nodes that are present in
    both. With `late="value"` it is written over whatever they hold by then. With `late="change"` the change that the
    exchange would have made, how(x_t) - x_t, is added to what they hold: what they learned in between is kept. What all
    share, such as outer parameters, changes with the first write, even if no node is left for it; with "change" at
    once. Within a step the nodes agree first; then what is late is written. What is still under way at the end of the
    run is lost.

    With `fragments`, parts of the model are exchanged at different steps: each every `every` steps, and first after
    `offsets` steps.

    State, under "i.p/name" for exchange i and fragment p: what `how` remembers; with a delay, the messages under way,
    once if they are the same for all, else each node's own. Bytes: those of `how`, in each exchange.

    Args:
        how: how the nodes agree.
        every: steps from one exchange to the next: a number, a function of the step at which a round begins, a
            `SyncWeight`, or another `When`. With a `SyncWeight` that is neither 0 nor 1 a
            value is written in part, and a change sent in part.
        of: "parameters"; "gradients", which the optimizer then takes; "moments", all that the inner optimizer keeps in
            the shape of the parameters; or the names of such slots, one or a list: "exp_avg".
        delay: steps until what was agreed on is used, one number or one for each node.
        late: "value" or "change".
        keep: what a node keeps of its own, in [0, 1]; one number, or `[K]`.
        fragments: their number, lists of names of parameters or modules, or a function from a parameter's name to 0, 1,
            ...; None: three blocks to a fragment; see `vecgym.strategy.exchange.cut`.
        offsets: for each fragment the steps before its first exchange; (p + 1) every / F if not given, which needs
            F <= every. If `every` is a function, each fragment has its turn in each round, after as large a part of it;
            in a round of fewer than F steps some have the same.
        pattern: "strided" deals out the model's blocks to the fragments in turn; "sequential" keeps neighbours
            together.
        participation: the fraction of the nodes, drawn anew for each round (at least one), that trains and takes part;
            see `vecgym.availability` for nodes that are drawn again. Exchanges of one strategy that draw nodes need the
            same `every`.
        resting: what the others do then: "take" what a server sends to them, or "keep" what they have. None: "take"
            with a `ServerMean` whose result is the same for all, else "keep".
        lost: the probability, for each node and exchange, that its message is lost: its values then do not count, and
            it goes on with its own.
        unit: steps that count as one: `every`, `delay` and `offsets` are in units of it, and random numbers go by it.

    Raises:
        TypeError, ValueError: saying what is allowed, and for settings that do not go together; see also `check`.

    Example: two nodes that average every second step.

    >>> from vecgym.strategy.averages import Mean
    >>> run = RunFacts(num_nodes=2, num_steps=4)
    >>> (mark,) = Exchange(Mean(), every=2).marks(run)
    >>> mark.what, [step for step in range(4) if mark.when.due(step)]
    ('meet', [1, 3])
    >>> [(mark.what, mark.lag) for mark in Exchange(Mean(), every=2, delay=1).marks(run)]
    [('agree', 0), ('write', 1)]

    References: fragments and delays: Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a
    Distributed Free Lunch", arXiv 2501.18512; deviation: fragments are found by names. A late change: Zhou et al.,
    "DaSGD: Squeezing SGD Parallelization Performance in Distributed Training Using Delayed Averaging", arXiv
    2006.00441. Moments: Cheng and Glasgow, "Convergence of Distributed Adaptive Optimization with Local Updates", arXiv
    2409.13155; Iacob et al., "DES-LOC", arXiv 2505.22549.
    """

    _index = 0

    def __init__(
        self, how: Average, every: int | When | Callable[[int], int] = 1,
        of: str | Sequence[str] = "parameters", *, delay: int | Sequence[int] = 0, late: str = "value",
        keep: float | Tensor = 0.0, fragments: Fragments | None = 1, offsets: Sequence[int] | None = None,
        pattern: Pattern = "strided", participation: float = 1.0, resting: str | None = None, lost: float = 0.0,
        unit: int = 1,
    ) -> None:  # fmt: skip
        self.how = check_average("how", how)
        self._when: Any = as_when(every, "every")
        self.every = self._when.plain
        self.of = _of(of)
        self.delay = checked_delay(delay)
        self.late = check.choice("late", late, ("value", "change"))
        self.keep = check.per_node("keep", keep, "[0, 1]", "what a node keeps of its own")
        self._keep_alike = not isinstance(self.keep, Tensor) or self.keep.numel() == 1  # alone; see `Outer._alike`
        self.fragments = check_fragments("fragments", fragments)
        self.offsets = _offsets(offsets, fragments)
        self.pattern = check.choice("pattern", pattern, get_args(Pattern))
        self.participation = check_participation(participation)
        self.resting = resting if resting is None else check.choice("resting", resting, ("take", "keep"), "None")
        self.lost = check.number("lost", lost, "[0, 1)", "the probability that a node's message is lost")
        self.unit = check.integer("unit", unit, what="the steps that count as one")
        self._stages = Stages(how, some=self.participation < 1 and not self.takes)
        self._check_together()

    def numbered(self, index: int) -> Exchange:
        """Return the same at this place among a strategy's exchanges."""
        return altered(self, _index=index)

    def in_units(self, n: int) -> Exchange:
        """Return the same, which counts in units of n steps."""
        n = check.integer("n", n, what="the number of optimizer steps between two exchanges")
        return altered(self, unit=self.unit * n)

    # ------------------------------------------------------------------------------------------------------- checks

    def _check_together(self) -> None:
        """Raise a ValueError for settings that do not go together."""
        if self.of == "gradients":
            self._check_gradients()
        if isinstance(self._when, SyncWeight):
            if self.fragments != 1 or self.offsets is not None:
                raise ValueError(f"{self._when!r} says when all exchange: leave out fragments and offsets.")
            if self._in_part and not self.stages.partial:
                raise ValueError(
                    f"{self!r} exchanges in part, and what was sent of a code, its residual and its reference have no "
                    "part: give a sync_weight that is 0 or 1 and does not require grad, or a number."
                )
        if self.offsets is not None and not isinstance(self._when, Rounds):
            raise ValueError(f"offsets={self.offsets} go with rounds of equal length: give every as a number.")
        if isinstance(self._when, Rounds):
            self._check_arrival(self._when.H)
        elif not isinstance(self._when, RoundsOf) and (isinstance(self.delay, tuple) or self.stages.overlaps):
            raise ValueError(
                f"{self!r}: a delay for each node, and what takes a round to arrive, need rounds: give every as a "
                "number or a function."
            )
        self._check_late()
        self._check_participation()

    def _check_arrival(self, gap: int) -> None:
        if isinstance(self.delay, tuple) and self._longest_delay >= gap:
            raise ValueError(
                f"delay={self._longest_delay} must be smaller than every={gap}: what is sent arrives before it is sent "
                "again. Give smaller delays, or a larger number."
            )

    def _check_gradients(self) -> None:
        apart = self.participation < 1 or self.lost or self.fragments != 1
        if apart or self.delay != 0 or not _is_zero(self.keep) or isinstance(self._when, SyncWeight):
            raise ValueError(
                f"{self!r}: gradients are exchanged by all nodes, as a whole, and used at once: leave out "
                'participation, lost, fragments, delay, keep and a SyncWeight, or give of="parameters".'
            )

    def _check_late(self) -> None:
        if self.late == "change" and self.delay == 0:
            raise ValueError('late="change" without a delay has no effect: give delay=1, or more, or leave it out.')
        if self.late == "change" and (not _is_zero(self.keep) or self.takes):
            raise ValueError(
                f"{self!r}: a change is each node's own, and all of it is added: leave out keep, and give "
                'resting="keep".'
            )

    def _check_participation(self) -> None:
        if self.participation < 1 and self.resting == "take" and not self.takes:
            raise ValueError(
                f'resting="take" needs a server that sends the same to all, those who sit out too, and {self.how!r} '
                'has none: give ServerMean(), or resting="keep".'
            )
        if self.lost and self.takes:
            raise ValueError(
                f'lost={self.lost}: what a server sends to those who sit out is not lost. Give resting="keep", or '
                "leave out lost."
            )
        self.stages.check_common()

    def check(self, run: RunFacts) -> None:
        """Raise a ValueError if the exchange cannot work for this run; warn if it never happens.

        >>> from vecgym.strategy.averages import Mean
        >>> try:
        ...     Exchange(Mean(), delay=10).check(RunFacts(num_nodes=2, num_steps=5))
        ... except ValueError as error:
        ...     print(str(error).split(":")[0])
        delay=10 in Exchange(Mean(), delay=10) is not smaller than the run's 5 steps
        """
        K, steps = run.num_nodes, self._steps(run)
        if 0 < self._longest_delay >= steps:
            raise ValueError(
                f"delay={self._longest_delay} in {self!r} is not smaller than the run's {steps} steps: nothing that it "
                "exchanges takes effect, and all of it is kept. Give a smaller delay, or more steps."
            )
        if self.unit > 1:
            Rounds(self.unit, name="unit").check(run.num_steps, self)
        first = self._when if self.offsets is None else Rounds(self._when.H, min(self.offsets))
        first.check(steps, self)
        if isinstance(self._when, RoundsOf):
            for step in filter(self._when.due, range(steps)):
                self._check_arrival(self._when.gap(step))
        if isinstance(self.delay, tuple):
            check.fits("delay is for", len(self.delay), K, f"a number, or [{K}]")
        check.per_node("keep", self.keep, num_nodes=K)
        if self.fragments == 1:  # else how many exchanges there are is known with the model's names
            self.stages.check(self.facts(run))

    def check_present(self, run: RunFacts) -> None:
        """Raise a ValueError if it cannot work for this model, or with so many nodes present."""
        presence: Any = run.presence
        if self.of == "gradients":
            self._check_waits(presence)
        if self.participation < 1 and getattr(presence, "server", False):
            raise ValueError(
                f"availability={presence.availability!r} and participation={self.participation} both draw a sample of "
                "the nodes, of which few would be in both: leave one of them out."
            )
        count = len(self.parts(run.names))
        if self.offsets is not None and len(self.offsets) != count:
            raise ValueError(
                f"offsets={self.offsets} are {len(self.offsets)}, and the model is cut into {count} fragments: give "
                "one for each."
            )
        if self.offsets is None and isinstance(self._when, Rounds) and count > (H := self._when.H):
            together = [self._when.part(p, count).offset for p in range(count)]
            raise ValueError(
                f"a round of {self._when._name}={H} steps is too short for the {count} fragments that the model is cut "
                f"into, each of which has a step of its own: give {self._when._name}={count} or more, at most {H} "
                f"fragments, or offsets={together} to send several after one step."
            )
        self.stages.check(self.facts(run))

    def check_optimizer(self, optimizer: Mapping[str, Any], params: Tree) -> None:
        """Raise a ValueError if the inner optimizer does not keep what is exchanged, as far as that is known.

        Args:
            optimizer: the state that it begins with; what optimizers of a user's own keep shows after a step.

        >>> from vecgym.strategy.averages import Mean
        >>> Exchange(Mean(), of="moment").check_optimizer({"momentum": {"w": torch.zeros(1)}}, {"w": torch.zeros(1)})
        Traceback (most recent call last):
        ...
        ValueError: of='moment' is not known; did you mean 'momentum'? Allowed: 'momentum'.
        """
        if self.of not in ("parameters", "gradients") and "tensors" not in optimizer:
            self._moments(optimizer, params)

    def _moments(self, optimizer: Mapping[str, Any], params: Tree) -> dict[str, Tree]:
        moments = moments_in(optimizer, params)
        if not moments:
            raise ValueError(
                f"{self!r} averages what the inner optimizer keeps, and it keeps nothing: give one with moments, such "
                "as AdamW or SGD with momentum, or leave this exchange out."
            )
        for slot in self.of if isinstance(self.of, tuple) else ():
            check.choice("of", slot, list(moments))
        return moments

    def facts(self, run: RunFacts) -> ExchangeFacts:
        """Return what is known about the exchanges of a run before the first step.

        >>> from vecgym.strategy.averages import Mean
        >>> facts = Exchange(Mean(), every=4, participation=0.5).facts(RunFacts(num_nodes=6, num_steps=12))
        >>> facts.num_exchanges, facts.counts
        (3, (3,))
        """
        K, steps = run.num_nodes, self._steps(run)
        present = (K, *getattr(run.presence, "counts", ()))
        counts = {num_drawn(self.participation, count) for count in present}
        if self.lost or (self.participation < 1 and run.presence is not None):  # how many are heard in the end
            for mark in self.marks(run):
                due = filter(mark.when.due, range(run.num_steps))  # type: ignore[union-attr]
                counts.update(len(mark.who(step, run.there(step) or range(K))) for step in due if mark.who)  # type: ignore[arg-type]
            counts -= {0}
        usual = len(self.times(run.names)) == 1 and self.offsets is None
        number = self._when.count(steps) if usual else self._when.count(steps - 1) + 1
        return ExchangeFacts(**vars(run), counts=tuple(sorted(counts)), num_exchanges=number)

    # ------------------------------------------------------------------------------------------------- when and who

    @property
    def stages(self) -> Stages:
        """How those agree who take part."""
        if self._stages.how is not self.how:  # of settings that are altered, or several merged
            self._stages = Stages(self.how, some=self.participation < 1 and not self.takes)
        return self._stages

    @property
    def same(self) -> bool:
        """Whether all nodes that are present go on with the same if all held the same before."""
        each = self.lost > 0 or isinstance(self.delay, tuple) or (self.participation < 1 and not self.takes)
        return self.stages.same and self._keep_alike and not each

    @property
    def plain(self) -> bool:
        """Whether it is the mean of all nodes at every step, and nothing else."""
        return self.how == Mean() and self.participation == 1 and self.always

    @property
    def always(self) -> bool:
        """Whether the nodes exchange after every step."""
        return isinstance(self._when, Rounds) and self._when.H == 1 and self.unit == 1

    @property
    def random(self) -> bool:
        """Whether random numbers are drawn."""
        return self.participation < 1 or self.lost > 0 or self.stages.random

    @property
    def lets_rest(self) -> bool:
        """Whether some nodes do not train in some rounds."""
        return self.participation < 1

    @property
    def batched(self) -> tuple[str, ...] | None:
        """Settings that may have a value for each configuration of a group; None: it has a group of its own."""
        return None if any(average.batched is None for average in within(self.how)) else ("keep",)

    @property
    def _longest_delay(self) -> int:
        return max(self.delay) if isinstance(self.delay, tuple) else self.delay

    @property
    def _in_part(self) -> bool:
        """Whether it may be made in part."""
        return isinstance(self._when, SyncWeight) and not self._when.binary

    @property
    def takes(self) -> bool:
        """Whether those who sit out take what the others agree on."""
        served = is_served(self.how) and Stages(self.how).common
        return self.participation < 1 and self.resting != "keep" and served

    def _check_waits(self, presence: Any) -> None:
        """Raise a ValueError where nodes wait for others."""
        if getattr(presence, "waits", False):
            raise ValueError(
                f"availability={presence.availability!r} makes nodes wait for others, but {self!r} exchanges gradients "
                "in every step: use a strategy that exchanges parameters every H steps."
            )

    def _steps(self, run: RunFacts) -> int:
        return max(1, run.num_steps // self.unit)

    def through_server(self) -> Exchange:
        """Return the same with a server's mean in place of a mean of all nodes; of gradients, itself.

        >>> from vecgym.strategy.averages import Mean
        >>> Exchange(Mean(), every=5).through_server(), Exchange(Mean(), of="gradients").through_server()
        (Exchange(ServerMean(), every=5), Exchange(Mean(), of='gradients'))
        """
        return self if self.of == "gradients" else altered(self, how=self.how.through_server())

    def parts(self, names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """Return the names of the parameters in each fragment.

        >>> from vecgym.strategy.averages import Mean
        >>> Exchange(Mean(), fragments=2).parts(["h.0.w", "h.1.w", "h.2.w"])
        (('h.0.w', 'h.2.w'), ('h.1.w',))
        """
        return (tuple(names),) if self.fragments == 1 else cut(list(names), self.fragments, self.pattern)

    def times(self, names: Sequence[str]) -> list[Any]:
        """Return when each fragment is exchanged.

        >>> from vecgym.strategy.averages import Mean
        >>> Exchange(Mean(), every=6, fragments=2).times(["h.0.w", "h.1.w"])
        [Rounds(6, offset=3), 6]
        """
        count = 1 if self.fragments == 1 else len(self.parts(names))
        if self.offsets is not None:
            whens = [Rounds(self._when.H, offset) for offset in self.offsets]
        elif count > 1:
            whens = [self._when.part(p, count) for p in range(count)]
        else:
            whens = [self._when] * count
        return [when.in_units(self.unit) for when in whens]

    def marks(self, run: RunFacts) -> list[Mark]:
        """Return what is due when, and for whom: the exchange's part of the timetable."""
        if self.of == "gradients":
            return []
        marks = []
        for p, when in enumerate(self.times(run.names)):
            senders, of = self.senders(run, p), Of(self._index, p)
            if self.delay == 0 and not self.takes:
                marks.append(Mark("meet", when, 0, senders, of))
            else:
                marks += [Mark("agree", when, 0, senders, of), *self._writes(run, when, senders, of)]
        return marks

    def _writes(self, run: RunFacts, when: Any, senders: Who | None, of: Of) -> list[Mark]:
        """Return the marks of those who use what was agreed on, each delay's by itself."""
        delays, takers = self._delays(run.num_nodes), None if self.takes else senders
        lags = sorted(set(delays))
        # Perhaps nobody who could write is present, or was heard: the shared values change all the same.
        always = run.presence is not None or len(lags) > 1
        return [
            Mark("write", when, lag, _with_delay(takers, delays, lag) if len(lags) > 1 else takers, of, always)
            for lag in lags
        ]

    def _delays(self, num_nodes: int) -> list[int]:
        """Return the delay of each node, in steps."""
        delays = self.delay if isinstance(self.delay, tuple) else (self.delay,) * num_nodes
        return [delay * self.unit for delay in delays]

    def trains(self, run: RunFacts) -> Who | None:
        """Return who trains in a step, of those present; None: all.

        >>> from vecgym.strategy.averages import Mean
        >>> half = Exchange(Mean(), every=5, participation=0.5).trains(RunFacts(num_nodes=4))
        >>> half(0, range(4)) == half(4, range(4)), len(half(0, range(4)))  # of a round
        (True, 2)
        """
        if self.participation == 1:
            return None

        def who(step: int, rows: Sequence[int]) -> Sequence[int]:
            """Draw from the nodes that are present when a round begins; a node that leaves is not replaced."""
            number, first = self._when.count(step // self.unit), step
            if run.presence is not None:  # the count never falls
                first = bisect.bisect_left(range(step), number, key=lambda t: self._when.count(t // self.unit))
            began = rows if first == step else run.there(first) or range(run.num_nodes)
            left = set(drawn(self.participation, began, run.seed, number)).intersection(rows)
            return sorted(left) or drawn(self.participation, rows, run.seed, number)

        return who

    def senders(self, run: RunFacts, fragment: int = 0) -> Who | None:
        """Return who takes part in an exchange, of those present; None: all."""
        trains = self.trains(run)
        if not self.lost:
            return trains
        first = next(iter(self.parts(run.names)[fragment]), "")

        def heard(step: int, rows: Sequence[int]) -> list[int]:
            heard_from = torch.rand(
                run.num_nodes, generator=rng.generator(run.seed, f"lost {first}", step // self.unit)
            )
            part = (trains(step, rows) if trains else None) or rows
            return [row for row in part if heard_from[row] >= self.lost]

        return heard

    # -------------------------------------------------------------------------------------------------------- state

    def _labels(self, fragment: int, held: Iterable[str] = ("",)) -> list[tuple[str, str]]:
        """Return (label, slot) of each value that is exchanged; the slot is "" for parameters and gradients.

        Args:
            held: the slots that there are; before the run is under way, these are not known.
        """
        slots = self.of if isinstance(self.of, tuple) else held
        return [(f"{self._index}.{fragment}{slot and '.'}{slot}/", slot) for slot in slots]

    def init(self, params: Tree, run: RunFacts) -> tuple[State, State]:
        """Return what the exchange remembers of each node, and of all together, `[1, *]` both."""
        own, shared, stages, facts = State(), State(), self.stages, self.facts(run)
        for p, names in enumerate(self.parts(list(params))):
            values = {name: params[name] for name in names}
            if self.of != "parameters":
                values = tree.map(torch.zeros_like, values)
            for label, _ in self._labels(p):
                stages.init(values, facts, Memory(Labelled(own, label), Labelled(shared, label), stages.common))
        if self.of == "moments" and (own or shared):
            raise ValueError(f'{self!r} keeps something for each slot: name them, of=["exp_avg", "exp_avg_sq"] say.')
        return own, shared

    def agreed(self, run: RunFacts, names: Sequence[str], step: int) -> tuple[set[str], set[str]]:
        """Return the parameters that are equal on all nodes after a step's exchange, and all that it may change.

        >>> from vecgym.strategy.averages import Mean
        >>> Exchange(Mean(), every=2).agreed(RunFacts(num_nodes=4), ["w"], step=1)
        ({'w'}, {'w'})
        """
        equal, changed = set[str](), set[str]()
        if self.of != "parameters" or step < 0:
            return equal, changed
        alike = self.same and self.late == "value" and _is_zero(self.keep) and not self._in_part
        everyone = range(run.num_nodes)
        for part, when in zip(self.parts(names), self.times(names)):
            for delay in set(self._delays(run.num_nodes)):
                if step >= delay and when.due(step - delay):
                    changed.update(part)
                    sent = set(run.there(step - delay) or everyone)
                    equal.update(part if alike and sent.issuperset(run.there(step) or everyone) else ())
        return equal, changed

    def outer(self, shared: Mapping[str, Any], names: Sequence[str]) -> Tree:
        """Return the parameters that the exchange remembers once for all: a node that returns may begin with them.

        Args:
            shared: what all share, by label and name.
            names: of the parameters.
        """
        params: Tree = {}
        for p in range(len(self.parts(names)) if self.of == "parameters" else 0):
            held = Labelled(shared, f"{self._index}.{p}/")
            params |= held.get("params", {})
        return params

    def outer_lr(self, step: int, run: RunFacts) -> Any:
        """Return the rate of the outer optimizer's next step, to be recorded; None: there is none, or no step any more.

        >>> from vecgym.strategy.averages import Outer, Mean
        >>> exchange, run = Exchange(Outer(Mean()), every=5), RunFacts(num_nodes=2, num_steps=9)
        >>> exchange.outer_lr(4, run), exchange.outer_lr(5, run)
        (0.7, None)
        """
        number = self._when.count(step // self.unit)
        if number >= self._when.count(self._steps(run)):
            return None
        return next((lr for stage in self.stages.each if (lr := stage.rate(number)) is not None), None)

    # ----------------------------------------------------------------------------------------------------- handlers

    def meet(self, part: Part) -> None:
        """Agree, and go on with it."""
        with self._sending(part):
            for label, slot, values in self._values(part):
                here, memory = self._told(part, label, part.due)
                self._put(part, slot, self._kept(self.stages(values, here, memory), values, here))
        blend(part, self._weight(part))

    def agree(self, part: Part) -> None:
        """Make a message: what was agreed on, or the change that it makes."""
        with self._sending(part), part.comm.ledger.marking(lag=self.delay):
            for label, _, values in self._values(part):
                here, memory = self._told(part, label, part.due, overwrite=False)
                message = self.stages.agree(values, here, memory)
                if self.late == "change":
                    message = self.stages.receive(message, here, memory)
                    message = tree.map(torch.sub, message, self.stages.read(values, here, memory))
                self._mail(part, memory)[f"message {here.due.step}"] = message
                if memory.notes:
                    memory.shared[f"notes {here.due.step}"] = memory.notes
        blend(part, self._weight(part), messages=self.late == "change")  # a value is written in part

    def write(self, part: Part) -> None:
        """Go on with what was agreed on. The first who do so replace the message by what becomes of it."""
        lags = self._delays(part.run.num_nodes)
        lag = part.tick + 1 - (part.due.step // self.unit + 1) * self.unit
        for label, slot, values in self._values(part):
            here, memory = self._told(part, label, part.due)
            mail, name, notes = self._mail(part, memory), f"message {here.due.step}", f"notes {here.due.step}"
            if name not in mail:  # all were lost
                continue
            y, memory.notes = mail[name], memory.shared.get(notes, {})
            if self.late == "change":
                y = tree.map(torch.add, self.stages.read(values, here, memory), y)
            elif lag == min(lags) or not memory.common:
                y = self.stages.receive(y, here, memory)
            self._put(part, slot, self._kept(self.stages.write(y, values, here, memory), values, here))
            if lag == max(lags):
                del mail[name]
                if notes in memory.shared:
                    del memory.shared[notes]
            elif self.late == "value" and memory.common:
                mail[name] = y
        if self.late == "value":  # a change was sent in part
            blend(part, self._weight(part))

    def now(self, part: Part, grads: Tree) -> Tree:
        """Exchange gradients, before the optimizer's step; between exchanges each node has its own."""
        (when,), step = self.times(part.run.names), part.tick
        if not when.due(step):
            return grads
        with self._sending(part, gradients=True):
            label = self._labels(0)[0][0]
            here, memory = self._told(part, label, Due(when.count(step), step))
            new = self._kept(self.stages(grads, here, memory), grads, here)
        if self.same and any(x.shape[part.lead - 1] > 1 for x in new.values()):
            raise ValueError(
                f"{self.how!r} returned gradients [{len(part.nodes)}, *], and says that its result is the same on all "
                "nodes, [1, *]: say common = False in its class."
            )
        part.share_missing()
        # The optimizer may overwrite the gradients, and an average may return tensors that it remembers.
        held = [rows[name] for rows in _trees(part) for name in {*rows.whole, *rows.assigned}
                if part.inplace and name.startswith(label) and name in rows]  # fmt: skip
        return nodes.unshared(new, held) if held else new

    # ------------------------------------------------------------------------------------------------- small parts

    def _sending(self, part: Part, gradients: bool = False) -> AbstractContextManager[None]:
        """Tell the ledger how much of what is sent meanwhile counts, and how much later it is used."""
        weight, when = self._weight(part), self._when
        lag = when.gap(part.tick // self.unit) if self.stages.overlaps else 0
        counted = weight is not None and not (part.inplace or part.simulation.dry)
        return part.comm.ledger.marking(
            weight=weight if counted else None, lag=lag, unit=self.unit, gradients=gradients
        )

    def _told(self, part: Part, label: str, due: Due, overwrite: bool = True) -> tuple[Part, Memory]:
        """Return what the stages are told: time counts in the exchange's units, and what may be overwritten."""
        when, inplace, made = self._when, part.inplace and not self._in_part, None
        if isinstance(when, SyncWeight):
            made = when.made(due.number)
        due = due._replace(step=due.step // self.unit, made=made)
        memory = Memory(Labelled(part.own, label), Labelled(part.shared, label), self.stages.common, inplace)
        return altered(part, due=due, inplace=inplace and overwrite and _is_zero(self.keep)), memory

    def _mail(self, part: Part, memory: Memory) -> Any:
        """Return where messages under way are kept: once if they are the same for all, else each node's own."""
        alike = part.home is part.shared  # then the changes are, too
        return memory.shared if alike or (self.late == "value" and memory.common) else memory.own

    def _values(self, part: Part) -> Iterator[tuple[str, str, Tree]]:
        """Yield the label, the slot of the optimizer ("" for parameters) and the values of all that is exchanged."""
        params, fragment = part.params, part.due.of.fragment
        held = {"": params} if self.of == "parameters" else self._moments(part.home["optimizer"], params)
        names = self.parts(list(params))[fragment]
        for label, slot in self._labels(fragment, held):
            yield label, slot, {name: held[slot][name] for name in names if name in held[slot]}

    def _put(self, part: Part, slot: str, new: Tree) -> None:
        """Let nodes go on with parameters, or with what their optimizers keep in a slot."""
        if slot:
            part.home["optimizer"] = with_moment(part.home["optimizer"], slot, new)
        else:
            part.params = {**part.params, **new}

    def _kept(self, new: Any, old: Tree, part: Part) -> Tree:
        """Return what an average made of values, of their names and shapes; each node keeps a part of its own."""
        checked, keep = check_values(new, old, len(part.nodes), self.how, lead=part.lead), self.keep
        if not isinstance(keep, Tensor) and keep in (0, 1):
            return old if keep else checked
        keep = part.here(keep)

        def between(x: Tensor, y: Tensor) -> Tensor:
            share = placed(spread(keep, y), y.device, y.dtype) if isinstance(keep, Tensor) else keep
            return torch.lerp(y.expand_as(x), x, share)

        return {name: between(old[name], y) for name, y in checked.items()}

    def __repr__(self) -> str:
        one = isinstance(self.of, tuple) and len(self.of) == 1
        return shown(self, of=self.of[0] if one else self.of)

    def _weight(self, part: Part) -> Tensor | None:
        """Return how much of the exchange is made in this step; None: all."""
        if not self._in_part:
            return None
        weight: Tensor = self._when.weights[part.due.step // self.unit]
        return weight.detach() if part.inplace else weight  # a run in place sends all of what it uses in part


def blend(part: Part, weight: Tensor | None, messages: bool = True) -> None:
    """Make everything that an event has changed only in part: (1 - a) old + a new, exactly old at 0 and new at 1.

    A message that was not there before is a change, and only a part of it is made; or, with `messages=False`, it is a
    value, which stays whole.
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

    for rows in _trees(part):
        for name, new in rows.assigned.items():
            if not messages and _is_under_way(name):
                continue
            old = rows.shown(name)
            if not isinstance(new, Tensor) and new and not old and not _is_under_way(name):
                raise ValueError(
                    "an exchange that adds to its state cannot be made in part, which sync_weight asks for: give "
                    "weights that are 0 or 1 and do not require grad."
                )
            rows.assigned[name] = tree.map_leaves(between, new, old)


def _trees(part: Part) -> list[Rows]:
    """Return what holds the trees of an event: in a stack, what all groups have and what this one has are apart."""
    both: list[Any] = [part.own, part.shared]
    return [x for rows in both for x in ((rows.common, rows.others) if hasattr(rows, "common") else (rows,))]


def _is_under_way(name: str) -> bool:
    return "/message " in name or "/notes " in name


def check_participation(value: Any) -> float:
    """Return the fraction of the nodes that trains in a round, if it is one.

    >>> check_participation(0.5)
    0.5
    """
    return check.number("participation", value, "(0, 1]", "the fraction of nodes that trains in a round")


def _with_delay(who: Who | None, delays: Sequence[int], lag: int) -> Who:
    def chosen(step: int, rows: Sequence[int]) -> list[int]:
        taking = rows if who is None else who(step, rows)
        return [row for row in (rows if taking is None else taking) if delays[row] == lag]

    return chosen


def _is_zero(keep: float | Tensor) -> bool:
    return not isinstance(keep, Tensor) and keep == 0


def _of(of: Any) -> str | tuple[str, ...]:
    if isinstance(of, str) and of in ("parameters", "gradients", "moments"):
        return of
    names = (of,) if isinstance(of, str) else of
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f'of={of!r} must be "parameters", "gradients", "moments", a slot of the inner optimizer such as "exp_avg", '
            "or a list of slots."
        )
    return tuple(names)


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


def _offsets(offsets: Any, fragments: Any) -> list[int] | None:
    if offsets is None:
        return None
    number = len(fragments) if isinstance(fragments, (list, tuple)) else fragments if check.is_integer(fragments) else 0
    if not isinstance(offsets, (list, tuple)) or not offsets or (number and len(offsets) != number):
        raise ValueError(f"offsets={offsets!r}: give a list of one number for each of the {number or ''} fragments.")
    return [check.integer("offsets", offset, what="steps before a fragment is sent first") for offset in offsets]
