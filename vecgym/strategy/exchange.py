"""Exchanges: how, when and on which values the nodes agree, and how the result is applied.

A strategy is an inner optimizer and a list of exchanges. Each combines an `Average`, the steps at which it is due, and
values: parameters, gradients, or moments of the optimizer.

>>> from vecgym.compress import TopK
>>> from vecgym.optim import OptimSpec
>>> from vecgym.strategy.averages import Mean, Outer
>>> from vecgym.strategy.coded import Compressed
>>> Exchange(Outer(Compressed(Mean(island_size=4), TopK(0.05)), OptimSpec("sgd", lr=0.7)), every=50)
Exchange(Outer(Compressed(Mean(island_size=4), TopK(fraction=0.05, k=None)), optim=OptimSpec(SGD, lr=0.7)), every=50)

An exchange whose result is used at once is one event, `meet`. A delayed one, or one whose result other nodes than the
senders use, is two: at `agree` the senders compute a message, and at `write`, `delay` steps later, the nodes that were
present at both steps apply it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from vecgym.core import check, nodes, tree
from vecgym.core.objects import Settings, altered, is_steady, shown
from vecgym.core.tree import Tree
from vecgym.optim.moments import moments_of, with_moment
from vecgym.optim.optimizer import Optimizer
from vecgym.simulation.simulation import Part
from vecgym.simulation.state import Labelled, check_values
from vecgym.simulation.timetable import Due, Mark, RunFacts, Who
from vecgym.simulation.when import LateWindow, Rounds, RoundsOf, SyncWeight, When, as_when
from vecgym.strategy.delivery import Delivery, Message, Participation, blend, trees_of
from vecgym.strategy.fragments import Fragments, Pattern, at_home, check_fragments, check_offsets, cut
from vecgym.strategy.stages import Average, ExchangeFacts, Memory, Stages, chain, check_average, is_served

DEFAULT_H = 100  # inner steps per round


class Of(NamedTuple):
    """The subject of a mark: the index of the exchange in its strategy, and the index of the fragment."""

    exchange: int
    fragment: int = 0


class Exchange(Settings):
    """Every so many steps the nodes agree on values, and continue with the result.

    x_i <- keep x_i + (1 - keep) how(x_1, ..., x_K).

    With a `delay` of d steps, the result of step t is used after step t + d. `late="value"` overwrites the nodes'
    current values with it. `late="change"` adds the change that the exchange would have made, how(x_t) - x_t, and so
    keeps each node's progress in between. Within a step, new messages are sent before late results are applied.
    Messages under way at the end of the run are lost.

    A node that was absent at sending or at the due step is not written to: it goes on with its own values, or with
    those of `rejoin`, until it has been there at both steps of a later exchange. The shared state (outer parameters)
    makes its step once, at the first due step, even if no sender is there any more; with late="change", at sending. A
    residual changes at sending only. A node that returns with "shared" takes the outer parameters of the moment: of a
    fragment that is under way, those before its step.

    With `fragments`, each part of the model is exchanged every `every` steps, at different steps of a round.

    State, named "i.p/name" for exchange i and fragment p: the memory of `how`, and the messages under way, stored once
    if they are the same on all nodes, else per node. Bytes: those of `how`, per exchange.

    Args:
        how: the average, with its stages.
        every: steps from one exchange to the next: a number, a function of the step at which a round begins, a
            `SyncWeight`, or another `When`. Weights between 0 and 1 apply a value, or send a change, in part.
        of: "parameters"; "gradients", before the optimizer's step; "moments", every slot of the inner optimizer that
            has the parameters' shapes; or the name of such a slot, or a list of names: "exp_avg".
        delay: steps until the result is used, one number or one per node.
        late: "value" or "change".
        keep: the fraction of its own values that a node keeps, in [0, 1]; one number, or `[K]`.
        fragments: their number, lists of names of parameters or modules, or a function from a parameter's name to 0, 1,
            ...; None: three blocks per fragment; see `vecgym.strategy.exchange.cut`.
        offsets: for each of F fragments, the steps before its first exchange. By default fragment p is exchanged after
            a fraction (p + 1) / F of each round, and a number `every` must be at least F.
        pattern: "strided" deals out the blocks to the fragments in turn; "sequential" keeps neighbours together.
        private: parameters that are never sent nor written: names, or patterns such as "head.*", of parameters or
            modules. Each node keeps and trains its own, with its own gradient. Buffers stay at home in any case.
        participation: the fraction of the nodes, sampled anew for each round (at least one), that trains and takes
            part; see `vecgym.availability` for nodes that are sampled again. All exchanges of a strategy that sample
            nodes need the same `every`.
        resting: the other nodes "take" the result, which a server sends them, or "keep" their values. None: "take"
            with a `ServerMean` whose result is the same on all nodes, else "keep".
        lost: the probability that a node's message in an exchange is lost: its values do not count, and it keeps them.
        sampling: "fixed": as many nodes in each round; "bernoulli": each node by itself with the probability
            `participation`, and so, in some rounds, perhaps none: then nobody trains, and nothing is sent.
        unit: the number of steps in which `every`, `delay`, `offsets` and random draws are counted.

    Attributes:
        roster: the nodes that take part, a `Participation`.
        delivery: when and how the result is used, a `Delivery`.

    Raises:
        TypeError, ValueError: for invalid settings, and for settings that exclude one another; see also `check`; before
            the first step for a pattern in `private` that matches no parameter.

    Example: two nodes that average every second step.

    >>> from vecgym.strategy.averages import Mean
    >>> run = RunFacts(num_nodes=2, num_steps=4)
    >>> (mark,) = Exchange(Mean(), every=2).marks(run)
    >>> mark.what, [step for step in range(4) if mark.when.due(step)]
    ('meet', [1, 3])
    >>> [(mark.what, mark.lag) for mark in Exchange(Mean(), every=2, delay=1).marks(run)]
    [('agree', 0), ('write', 1)]

    Layers that stay at home (FedPer; FedBN with the batch norms). In the run's model, which `val_loss` measures, they
    are the mean of the nodes'; `val_losses`, `val_loss_local` and `val_NAME_local` are of each node's own model.

    >>> Exchange(Mean(), every=5, private="head.*").parts(["body.weight", "head.weight", "head.bias"])
    (('body.weight',),)

    References: fragments and delays: Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a
    Distributed Free Lunch", arXiv 2501.18512; deviation: fragments are found by names. A late change: Zhou et al.,
    "DaSGD: Squeezing SGD Parallelization Performance in Distributed Training Using Delayed Averaging", arXiv
    2006.00441. Moments: Cheng and Glasgow, "Convergence of Distributed Adaptive Optimization with Local Updates", arXiv
    2409.13155; Iacob et al., "DES-LOC", arXiv 2505.22549. Private layers: Arivazhagan et al., "Federated Learning with
    Personalization Layers", arXiv 1912.00818; Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch
    Normalization", arXiv 2102.07623; deviation: none but FedAvg's, progress is counted in steps.
    """

    _index = 0
    _stages: Stages | None = None
    delay, late, keep = (property(attrgetter(f"delivery.{name}")) for name in ("delay", "late", "keep"))
    participation, resting, lost, sampling = (
        property(attrgetter(f"roster.{name}")) for name in ("fraction", "resting", "lost", "sampling")
    )

    def __init__(
        self, how: Average, every: int | When | Callable[[int], int] = 1, of: str | Sequence[str] = "parameters", *,
        delay: int | Sequence[int] = 0, late: str = "value", keep: float | Tensor = 0.0,
        fragments: Fragments | None = 1, offsets: Sequence[int] | None = None, pattern: Pattern = "strided",
        private: str | Sequence[str] = (), participation: float = 1.0, resting: str | None = None, lost: float = 0.0,
        sampling: str = "fixed", unit: int = 1,
    ) -> None:  # fmt: skip
        self.how = check_average("how", how)
        self._when: Any = as_when(every, "every")
        self.every, self.unit = self._when.plain, check.integer("unit", unit, what="steps per unit of time")
        self.of = _checked_of(of)
        self.delivery = Delivery(delay, late, keep)
        self.fragments = check_fragments("fragments", fragments)
        self.offsets = check_offsets(offsets, fragments)
        self.pattern = check.choice("pattern", pattern, get_args(Pattern))
        self.private = _names(private, f"private={private!r} must be a pattern such as 'head.*', or a list of these.")
        self.roster = Participation(participation, resting, lost, sampling)
        self._check_together()

    def numbered(self, index: int) -> Exchange:
        """Return the same exchange with this index in a strategy."""
        return altered(self, _index=index)

    def following(self, inner: Optimizer) -> Exchange:
        """Return the same exchange, with its schedule for a strategy with this inner optimizer."""
        when = self._when.following(inner, self.unit)
        return self if when is self._when else altered(self, _when=when, every=when.plain)

    def in_units(self, n: int) -> Exchange:
        """Return the same exchange with time counted in units of n steps."""
        n = check.integer("n", n, what="the number of optimizer steps between two exchanges")
        return altered(self, unit=self.unit * n)

    def weighted(self, weights: Tensor | Sequence[float]) -> Exchange:
        """Return the same exchange with a weight for each time that it is made, `[R]`; see `SyncWeight`.

        >>> from vecgym.strategy.averages import Mean
        >>> Exchange(Mean(), every=4).weighted([1, 0, 1])
        Exchange(Mean(), every=SyncWeight([1, 0, 1], every=4))
        """
        if self._when.in_part:
            raise ValueError(f"{self!r} has weights already: give an exchange with a schedule, such as every=10.")
        when = SyncWeight(weights, self._when)
        new = altered(self, every=when, _when=when)
        new._check_together()
        return new

    def through_server(self) -> Exchange:
        """Return the same exchange with a server's mean in place of a mean of all nodes, unless it is of gradients.

        >>> from vecgym.strategy.averages import Mean
        >>> Exchange(Mean(), every=5).through_server(), Exchange(Mean(), of="gradients").through_server()
        (Exchange(ServerMean(), every=5), Exchange(Mean(), of='gradients'))
        """
        return self if self.of == "gradients" else altered(self, how=self.how.through_server())

    def __repr__(self) -> str:
        one = isinstance(self.of, tuple) and len(self.of) == 1
        names = ("delay", "late", "keep", "participation", "resting", "lost", "sampling")
        return shown(self, of=self.of[0] if one else self.of, **{name: getattr(self, name) for name in names})

    # ------------------------------------------------------------------------------------------------------- checks

    def _check_together(self) -> None:
        """Raise a ValueError for settings that exclude one another."""
        when, weighted, delivery = self._when, isinstance(self._when, SyncWeight), self.delivery
        of_all = not self.roster.sampled and not self.roster.lost and self.fragments == 1
        if self.of == "gradients" and not (of_all and delivery.delay == 0 and delivery.overwrites and not weighted):
            raise ValueError(
                f"{self!r}: gradients are exchanged by all nodes, as a whole, and used at once: leave out "
                'participation, lost, fragments, delay, keep and a SyncWeight, or give of="parameters".'
            )
        if weighted and (self.fragments != 1 or self.offsets is not None):
            raise ValueError(f"{when!r} says when all exchange: leave out fragments and offsets.")
        if when.in_part and not self.stages.partial:
            raise ValueError(
                f"{self!r} is applied in part, and a restart, a code, its residual and its reference cannot be: give a "
                "sync_weight that is 0 or 1 and does not require grad, or a number."
            )
        if self.offsets is not None and not isinstance(when, Rounds):
            raise ValueError(f"offsets={self.offsets} go with rounds of equal length: give every as a number.")
        if isinstance(when, Rounds):
            delivery.check_gap(when.H)
        elif not isinstance(when, RoundsOf) and (delivery.apart or self.stages.overlaps):
            raise ValueError(
                f"{self!r}: a delay for each node, and messages that take a round to arrive, need rounds: give every "
                "as a number or a function."
            )
        if delivery.late == "change" and self.takes:
            raise ValueError(f'{self!r}: a change is each node\'s own: give resting="keep", or late="value".')
        self.roster.check(self.how, self.takes)
        self.stages.check_common()

    def check(self, run: RunFacts) -> None:
        """Raise a ValueError if the exchange cannot work for this run; warn if it never happens.

        >>> from vecgym.strategy.averages import Mean
        >>> Exchange(Mean(), delay=10).check(RunFacts(num_nodes=2, num_steps=5))
        Traceback (most recent call last):
        ...
        ValueError: delay=10 in Exchange(Mean(), delay=10) is not smaller than the run's 5 steps: no result is used \
before the run ends. Give a smaller delay, or more steps.
        """
        steps = self._steps(run)
        self.delivery.check(run.num_nodes, steps, self)
        if self.unit > 1:
            Rounds(self.unit, name="unit").check(run.num_steps, self)
        if isinstance(self._when, RoundsOf):
            for step in filter(self._when.due, range(steps - 1)):
                self.delivery.check_gap(self._when.gap(step))
        if self.fragments == 1:  # else the steps and the number of exchanges depend on the model's names
            self._check_first(run, 1)
            self.stages.check(self.facts(run))

    def check_present(self, run: RunFacts) -> None:
        """Raise a ValueError if the exchange cannot work with this model, or with the run's absences."""
        presence: Any = run.presence
        if self.of == "gradients" and getattr(presence, "waits", False):
            raise ValueError(
                f"availability={presence.availability!r} makes nodes wait for others, but {self!r} exchanges gradients "
                "in every step: use a strategy that exchanges parameters every H steps."
            )
        if self.roster.sampled and getattr(presence, "server", False):
            raise ValueError(
                f"availability={presence.availability!r} and participation={self.roster.fraction} both sample the "
                "nodes, and few nodes would be in both samples: leave one of them out."
            )
        count, when = len(self.parts(run.names)), self._when
        if self.offsets is not None and len(self.offsets) != count:
            raise ValueError(
                f"offsets={self.offsets} are {len(self.offsets)}, and the model is cut into {count} fragments: give "
                "one for each."
            )
        if self.offsets is None and isinstance(when, Rounds) and count > when.H:
            together = [when.part(p, count).offset for p in range(count)]
            raise ValueError(
                f"a round of {when._name}={when.H} steps is too short for the {count} fragments that the model is cut "
                f"into, each of which needs its own step: give {when._name}={count} or more, at most {when.H} "
                f"fragments, or offsets={together} to send several after one step."
            )
        if self.fragments != 1 and run.num_steps > 1:  # 1: perhaps it was not given
            self._check_first(run, count)
        self.stages.check(self.facts(run))

    def _check_first(self, run: RunFacts, count: int) -> None:
        """Warn if not even the first of so many fragments has its turn in the run."""
        when = self._when if count == 1 else self._when.part(0, count)
        first = when if self.offsets is None else Rounds(self._when.H, min(self.offsets))
        first.check(self._steps(run), self)

    def check_optimizer(self, optimizer: Mapping[str, Any], params: Tree) -> None:
        """Raise a ValueError if the inner optimizer lacks the slots to exchange, as far as its first state shows.

        Args:
            optimizer: its state before the first step, in which a user's own optimizer may add slots.

        >>> from vecgym.strategy.averages import Mean
        >>> Exchange(Mean(), of="moment").check_optimizer({"momentum": {"w": torch.zeros(1)}}, {"w": torch.zeros(1)})
        Traceback (most recent call last):
        ...
        ValueError: of='moment' is not known; did you mean 'momentum'? Allowed: 'momentum'.
        """
        if self.of not in ("parameters", "gradients") and "tensors" not in optimizer:
            moments_of(self.of, optimizer, params, self)

    # ---------------------------------------------------------------------------------------------------- properties

    @property
    def stages(self) -> Stages:
        """The stages of `how`."""
        if self._stages is None or self._stages.how is not self.how:  # `how` of settings may be altered, or merged
            self._stages = Stages(self.how, some=self.roster.sampled and not self.takes)
        return self._stages

    @property
    def same(self) -> bool:
        """Whether nodes that are present and hold equal values continue with equal values."""
        return self.stages.same and self.delivery.same and not self.roster.lost

    @property
    def always(self) -> bool:
        """Whether the nodes exchange after every step."""
        return isinstance(self._when, Rounds) and self._when.plain == 1 and self.unit == 1

    @property
    def random(self) -> bool:
        """Whether the exchange draws random numbers."""
        return self.roster.sampled or self.roster.lost > 0 or self.stages.random

    @property
    def steady(self) -> bool:
        """Whether the exchange sends the same whenever it is due, in rounds of equal length, by all nodes."""
        equal = type(self._when) in (Rounds, LateWindow)
        plain = type(self) is Exchange and equal and not (self.roster.sampled or self.roster.lost)
        return plain and is_steady(*chain(self.how))

    @property
    def batched(self) -> tuple[str, ...] | None:
        """Settings that may differ between the configurations of a group; None: never batch this exchange."""
        return None if any(average.batched is None for average in chain(self.how)) else ()

    @property
    def takes(self) -> bool:
        """Whether nodes that sit out receive the result."""
        return self.roster.sampled and self.roster.resting != "keep" and is_served(self.how) and Stages(self.how).common

    def facts(self, run: RunFacts) -> ExchangeFacts:
        """Return the facts about a run's exchanges that are known before the first step.

        >>> from vecgym.strategy.averages import Mean
        >>> facts = Exchange(Mean(), every=4, participation=0.5).facts(RunFacts(num_nodes=6, num_steps=12))
        >>> facts.num_exchanges, facts.counts
        (3, (3,))
        """
        counts, steps = self.roster.counts(run, self.marks(run)), self._steps(run)
        usual = len(self.times(run.names)) == 1 and self.offsets is None
        number = self._when.count(steps) if usual else self._when.count(steps - 1) + 1
        more: dict[str, Any] = {"fraction": self.participation, "sampling": self.sampling, "num_exchanges": number}
        first = min((next(filter(when.due, range(steps)), 0) for when in self.times(run.names)), default=0)
        return ExchangeFacts(**vars(run), counts=tuple(sorted(counts)), first=first, **more)

    def _steps(self, run: RunFacts) -> int:
        return max(1, run.num_steps // self.unit)

    # ------------------------------------------------------------------------------------------------- when and who

    def parts(self, names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """Return the names of the parameters in each fragment, without private ones.

        >>> from vecgym.strategy.averages import Mean
        >>> Exchange(Mean(), fragments=2).parts(["h.0.w", "h.1.w", "h.2.w"])
        (('h.0.w', 'h.2.w'), ('h.1.w',))
        """
        if self.private:
            home = self.at_home(names)
            names = [name for name in names if name not in home]
        return (tuple(names),) if self.fragments == 1 else cut(list(names), self.fragments, self.pattern)

    def at_home(self, names: Sequence[str]) -> frozenset[str]:
        """Return the names of the parameters that `private` keeps on their node.

        >>> from vecgym.strategy.averages import Mean
        >>> Exchange(Mean(), private=["head"]).at_home(["body.weight", "head.weight"])
        frozenset({'head.weight'})
        """
        return at_home(tuple(names), self.private) if self.private else frozenset()

    def times(self, names: Sequence[str]) -> list[When]:
        """Return when each fragment is exchanged.

        >>> from vecgym.strategy.averages import Mean
        >>> Exchange(Mean(), every=6, fragments=2).times(["h.0.w", "h.1.w"])
        [Rounds(6, offset=3), 6]
        """
        count = len(self.parts(names))
        if self.offsets is not None:
            whens = [Rounds(self._when.H, offset) for offset in self.offsets]
        else:
            whens = [self._when if count == 1 else self._when.part(p, count) for p in range(count)]
        return [when.in_units(self.unit) for when in whens]

    def marks(self, run: RunFacts) -> list[Mark]:
        """Return the exchange's part of the timetable: its events, their steps, and the nodes of each."""
        if self.of == "gradients":
            return []
        marks, takes, rounds = [], self.takes, self._when.in_units(self.unit)
        lags = self.delivery.lags(run.num_nodes, self.unit)
        # Shared values change even if no node is present to write, or all messages of one delay are lost.
        always, alone = run.presence is not None or len(set(lags)) > 1, self.stages.alone
        for p, (names, when) in enumerate(zip(self.parts(run.names), self.times(run.names))):
            senders = self.roster.senders(run, rounds, self.unit, next(iter(names), ""))
            of, takers = Of(self._index, p), None if takes else senders
            if self.delivery.delay == 0 and not takes:
                marks.append(Mark("meet", when, 0, senders, of, alone))
                continue
            marks.append(Mark("agree", when, 0, senders, of, alone))
            for lag in sorted(set(lags)):
                who = _with_lag(takers, lags, lag) if self.delivery.apart else takers
                marks.append(Mark("write", when, lag, who, of, always))
        return marks

    def who_trains(self, run: RunFacts) -> Who | None:
        """Return a function (step, present nodes) -> the nodes that train; None: all do."""
        return self.roster.who_trains(run, self._when.in_units(self.unit))

    # -------------------------------------------------------------------------------------------------------- state

    def _labels(self, fragment: int, slots: Iterable[str] = ("",)) -> list[tuple[str, str]]:
        """Return (label, slot) of each exchanged value; the slot is "" for parameters and gradients.

        Args:
            slots: the optimizer's, unknown before its first step.
        """
        slots = self.of if isinstance(self.of, tuple) else slots
        return [(f"{self._index}.{fragment}{slot and '.'}{slot}/", slot) for slot in slots]

    def init(self, params: Tree, run: RunFacts) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the exchange's initial memory: each node's own trees and the shared ones, both `[1, *]`."""
        own, shared, stages, facts = dict[str, Any](), dict[str, Any](), self.stages, self.facts(run)
        for p, names in enumerate(self.parts(list(params))):
            values = {name: params[name] for name in names}
            if self.of != "parameters":
                values = tree.map(torch.zeros_like, values)
            for label, _ in self._labels(p):
                stages.init(values, facts, Memory(Labelled(own, label), Labelled(shared, label), stages.common))
        if self.of == "moments" and (own or shared):
            raise ValueError(f'{self!r} has state for each slot: name the slots, as in of=["exp_avg", "exp_avg_sq"].')
        return own, shared

    def agreed(self, run: RunFacts, names: Sequence[str], step: int) -> tuple[set[str], set[str]]:
        """Return the names of the parameters that a step's exchange makes equal on all nodes, and of those it changes.

        >>> from vecgym.strategy.averages import Mean
        >>> Exchange(Mean(), every=2).agreed(RunFacts(num_nodes=4), ["w"], step=1)
        ({'w'}, {'w'})
        """
        equal, changed = set[str](), set[str]()
        if self.of != "parameters" or step < 0:
            return equal, changed
        delivery, everyone = self.delivery, range(run.num_nodes)
        alike = self.same and delivery.late == "value" and delivery.overwrites and not self._when.in_part
        for part, when in zip(self.parts(names), self.times(names)):
            for lag in set(delivery.lags(run.num_nodes, self.unit)):
                if step >= lag and when.due(step - lag):
                    changed.update(part)
                    sent = set(run.there(step - lag) or everyone)
                    equal.update(part if alike and sent.issuperset(run.there(step) or everyone) else ())
        return equal, changed

    def outer(self, shared: Mapping[str, Any], names: Sequence[str]) -> Tree:
        """Return the outer parameters, if all nodes share them: a returning node may begin with these.

        Args:
            shared: the shared state, by label and name.
            names: of the parameters.
        """
        params: Tree = {}
        for p in range(len(self.parts(names)) if self.of == "parameters" else 0):
            params |= Labelled(shared, f"{self._index}.{p}/").get("params", {})
        return params

    def outer_lr(self, step: int, run: RunFacts) -> Any:
        """Return the learning rate of the next outer step, for the history; None without a further one.

        >>> from vecgym.strategy.averages import Outer, Mean
        >>> exchange, run = Exchange(Outer(Mean()), every=5), RunFacts(num_nodes=2, num_steps=9)
        >>> exchange.outer_lr(4, run), exchange.outer_lr(5, run)
        (0.7, None)
        """
        number = self._when.count(step // self.unit)
        if number >= self._when.count(self._steps(run)):
            return None
        return next((lr for stage in self.stages.each if (lr := stage.rate(number)) is not None), None)

    def epsilon(self, run: RunFacts, steps: int) -> float | None:
        """Return the privacy spent in the first steps, in all fragments, if a stage counts it; see `Private`."""
        number = sum(when.count(steps) for when in self.times(run.names))
        facts = ExchangeFacts(run.num_nodes, fraction=self.participation, sampling=self.sampling)
        spent = (stage.epsilon(facts, number) for stage in self.stages.each)
        return next((epsilon for epsilon in spent if epsilon is not None), None)

    # ----------------------------------------------------------------------------------------------------- handlers

    def meet(self, part: Part) -> None:
        """Agree, and apply the result at once."""
        stages = self.stages
        with self._sending(part):
            for slot, x, here, memory in self._views(part):
                y = stages.receive(stages.agree(x, here, memory), here, memory)
                self._put(here, slot, stages.write(y, x, here, memory), x)
        blend(part, self._weight(part))

    def agree(self, part: Part) -> None:
        """Agree, and send a message: the result, or the change that it would make."""
        change = self.delivery.late == "change"
        with self._sending(part), part.comm.ledger.marking(lag=self.delivery.delay):
            for _, x, here, memory in self._views(part, overwrite=False):
                y = self.stages.agree(x, here, memory)
                if change:
                    y = self.stages.receive(y, here, memory)
                    y = tree.map(torch.sub, y, self.stages.read(x, here, memory))
                self._message(here, memory).send(y)
        blend(part, self._weight(part), messages=change)  # a value is weighted when it is written

    def write(self, part: Part) -> None:
        """Apply a message; with a delay for each node, the first write keeps what `receive` returns for later ones."""
        change, lag = self.delivery.late == "change", part.tick - part.due.step
        lags = self.delivery.lags(part.run.num_nodes, self.unit)
        for slot, x, here, memory in self._views(part):
            message = self._message(here, memory)
            if not message.under_way:
                continue
            y = message.read()
            if change:
                y = tree.map(torch.add, self.stages.read(x, here, memory), y)
            elif lag == min(lags) or not memory.common:
                y = self.stages.receive(y, here, memory)
            self._put(here, slot, self.stages.write(y, x, here, memory), x)
            if lag == max(lags):
                message.drop()
            elif memory.common and not change:
                message.replace(y)
        if not change:  # a change was weighted when it was sent
            blend(part, self._weight(part))

    def exchange_gradients(self, part: Part, grads: Tree) -> Tree:
        """Return the nodes' gradients after the exchange if it is due in this step, else as they are."""
        (when,), step, home = self.times(part.run.names), part.tick, frozenset[str]()
        if not when.due(step):
            return grads
        if self.private:
            home, every = self.at_home(list(grads)), grads
            grads = {name: g for name, g in every.items() if name not in home}
        with self._sending(part, gradients=True):
            label = self._labels(0)[0][0]
            here, memory = self._view(part, label, Due(when.count(step), step))
            new = check_values(self.stages(grads, here, memory), grads, len(here.nodes), self.how, lead=here.lead)
        of_nodes, params = part.lead - 1, part.params
        if self.same and any(x.shape[of_nodes] > max(1, params[name].shape[of_nodes]) for name, x in new.items()):
            raise ValueError(
                f"{self.how!r} returned gradients [{len(part.nodes)}, *], and its class declares a result that is the "
                "same on all nodes, [1, *]: set common = False in the class."
            )
        part.share_missing(home)
        # The optimizer may overwrite the gradients, and an average may return tensors of its memory.
        held = [rows[name] for rows in trees_of(part) for name in {*rows.whole, *rows.assigned}
                if part.inplace and name.startswith(label) and name in rows]  # fmt: skip
        new = nodes.unshared(new, held) if held else new
        return {name: new.get(name, g) for name, g in every.items()} if home else new

    # ------------------------------------------------------------------------------------------------- small parts

    def _sending(self, part: Part, gradients: bool = False) -> AbstractContextManager[None]:
        """Set the weight, the lag and the unit of the transfers recorded in this block."""
        weight = None if part.inplace or part.simulation.dry else self._weight(part)
        lag = self._when.gap(part.tick // self.unit) if self.stages.overlaps else 0
        return part.comm.ledger.marking(weight=weight, lag=lag, unit=self.unit, gradients=gradients)

    def _views(self, part: Part, overwrite: bool = True) -> Iterator[tuple[str, Tree, Part, Memory]]:
        """Yield (slot, values, the stages' part, their memory) for each exchanged tree; "" stands for parameters.

        Args:
            overwrite: whether the result replaces the values in this event.
        """
        params, fragment = part.params, part.due.of.fragment
        held = {"": params} if self.of == "parameters" else moments_of(self.of, part.home["optimizer"], params, self)
        names = self.parts(list(params))[fragment]
        for label, slot in self._labels(fragment, held):
            here, memory = self._view(part, label, part.due, overwrite)
            yield slot, {name: held[slot][name] for name in names if name in held[slot]}, here, memory

    def _view(self, part: Part, label: str, due: Due, overwrite: bool = True) -> tuple[Part, Memory]:
        """Return the stages' view of an event: a part with time in the exchange's units, and their memory."""
        inplace, made = part.inplace and not self._when.in_part, self._when.made(due.number)
        due = due._replace(step=due.step // self.unit, made=made)
        memory = Memory(Labelled(part.own, label), Labelled(part.shared, label), self.stages.common, inplace)
        overwrite = overwrite and inplace and self.delivery.overwrites
        return altered(part, due=due, inplace=overwrite, _trains=False), memory

    def _message(self, part: Part, memory: Memory) -> Message:
        """Return the message of this exchange: stored once if it is the same for all nodes, else per node."""
        equal_nodes = part.home is part.shared  # then their changes are equal, too
        once = equal_nodes or (self.delivery.late == "value" and memory.common)
        return Message(memory.shared if once else memory.own, memory, part.due.step)

    def _put(self, part: Part, slot: str, new: Any, old: Tree) -> None:
        """Store a result, mixed with the values that nodes keep, as parameters or in their optimizers."""
        mixed = self.delivery.mixed(check_values(new, old, len(part.nodes), self.how, lead=part.lead), old, part)
        if slot:
            part.home["optimizer"] = with_moment(part.home["optimizer"], slot, mixed)
        else:
            part.params = {**part.params, **mixed}

    def _weight(self, part: Part) -> Tensor | None:
        """Return the weight of the exchange in this step; None: 1."""
        weight = self._when.weight(part.due.step // self.unit) if self._when.in_part else None
        return weight.detach() if weight is not None and part.inplace else weight  # in place, without derivatives


def _with_lag(who: Who | None, lags: Sequence[int], lag: int) -> Who:
    """Return a function (step, present nodes) -> the nodes that use a result `lag` steps later."""

    def chosen(step: int, rows: Sequence[int]) -> list[int]:
        taking = rows if who is None else who(step, rows)
        return [row for row in (rows if taking is None else taking) if lags[row] == lag]

    return chosen


def _checked_of(of: Any) -> str | tuple[str, ...]:
    if isinstance(of, str) and of in ("parameters", "gradients", "moments"):
        return of
    wrong = (
        f'of={of!r} must be "parameters", "gradients", "moments", a slot of the inner optimizer such as "exp_avg", or '
        "a list of slots."
    )
    return _names(of or None, wrong)


def _names(given: Any, wrong: str) -> tuple[str, ...]:
    """Return one name or several as a tuple."""
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise TypeError(wrong)
    return tuple(names)
