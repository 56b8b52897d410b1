"""Schedules of exchanges: every H steps, in rounds of changing length, or by weights that can be differentiated.

A strategy's marks and an exchange's `every` take the same objects, `When`:

>>> [[step for step in range(8) if when.due(step)] for when in (Rounds(3), RoundsOf(lambda step: 1 + step // 2))]
[[2, 5], [0, 1, 3, 6]]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vecgym.core import check
from vecgym.core.devices import readable
from vecgym.core.errors import warn
from vecgym.core.objects import Settings, altered, shown
from vecgym.core.tree import differentiated
from vecgym.optim import Optimizer


class When(ABC):
    """The steps after which an exchange is due. Override `due`, and `count` if its index matters.

    Attributes:
        in_part: whether an exchange may be made in part only; see `SyncWeight`.

    Example: an exchange that is due more and more rarely.

    >>> class PowersOfTwo(When):
    ...     def due(self, step):
    ...         return (step + 1).bit_count() == 1
    ...     def count(self, step):
    ...         return step.bit_length()
    >>> when = PowersOfTwo()
    >>> when.check(max_steps=100)
    >>> [step for step in range(20) if when.due(step)], when.count(7)
    ([0, 1, 3, 7, 15], 3)
    """

    in_part: bool = False

    @abstractmethod
    def due(self, step: int) -> bool:
        """Whether it is due after this step, counted from 0."""

    def count(self, step: int) -> int:
        """Return the number of exchanges before this step: the index of the exchange after it, or of the next one."""
        return step

    def weight(self, step: int) -> Tensor | None:
        """Return the weight of the exchange after this step; None: 1."""
        return None

    def made(self, number: int) -> Any:
        """Return the sum of the weights of the exchanges before this one; None: `number`. See `SyncWeight.made`."""
        return None

    def part(self, index: int, num_parts: int) -> When:
        """Return the steps of one of several fragments: the same for all, unless they take turns in rounds."""
        return self

    def in_units(self, n: int) -> When:
        """Return the same schedule in units of n steps."""
        return self if n == 1 else InUnits(self, n)

    def following(self, inner: Optimizer, unit: int) -> When:
        """Return the schedule for a strategy with this inner optimizer, whose rates it may see; see `QSR`.

        Args:
            unit: the steps in which the schedule counts.
        """
        return self

    def check(self, max_steps: int, who: object = "the exchange") -> None:
        """Raise a ValueError, or warn, if this does not fit a run of `max_steps` steps."""
        return

    @property
    def plain(self) -> Any:
        """The plain argument of `as_when` for this schedule, a number or a function; else the schedule itself.

        >>> Rounds(3, name="H").plain, Rounds(3, offset=1).plain, RoundsOf(int).plain
        (3, Rounds(3, offset=1), <class 'int'>)
        """
        return self


class Rounds(When):
    """Every H steps.

    Args:
        H: optimizer steps between two exchanges.
        offset: the steps before the first exchange; H when not given.
        name: the argument that H was given as, for messages.

    Raises:
        ValueError: for H or offset < 1.

    >>> [step for step in range(10) if Rounds(4).due(step)]
    [3, 7]
    >>> [step for step in range(10) if Rounds(4, offset=2).due(step)]
    [1, 5, 9]
    >>> Rounds(4).gap(3), Rounds(4).part(0, num_parts=2)  # to the next; the first of two fragments
    (4, Rounds(4, offset=2))
    """

    def __init__(self, H: int, offset: int | None = None, name: str = "H") -> None:
        self.H = check_interval(name, H)
        self.offset = self.H if offset is None else check.integer("offset", offset, what="steps to the first exchange")
        self._usual = self.offset == self.H
        self._name = name

    def due(self, step: int) -> bool:
        since = step + 1 - self.offset
        return since % self.H == 0 and (since >= 0 or self._usual)  # usually also before the first step, at step -1

    def count(self, step: int) -> int:
        return step // self.H if self._usual else max(0, (step + self.H - self.offset) // self.H)

    def gap(self, step: int) -> int:
        """Return the optimizer steps from the exchange after `step` to the next one."""
        return self.H

    def part(self, index: int, num_parts: int) -> Rounds:
        """Return the rounds of one fragment; fragments take turns within a round."""
        begin = max(0, self.offset - self.H)  # of the first round
        return Rounds(self.H, begin + max(1, (index + 1) * self.H // num_parts))

    @property
    def plain(self) -> Any:
        return self.H if self._usual else self

    def check(self, max_steps: int, who: object = "the exchange") -> None:
        if max_steps < self.offset:
            named = f"{self._name}={self.H}" if self._usual else f"offset={self.offset}"
            warn(f"{named} is larger than the run's {max_steps} steps: {who!r} never exchanges anything.")

    def __repr__(self) -> str:
        return str(self.H) if self._usual else f"Rounds({self.H}, offset={self.offset})"


class LateWindow(Rounds):
    """Every H steps in the last part of a run: the first round begins at step `start`, and before it nothing is due.

    With `start` = T - H of a run of T steps there is one exchange, at the end.

    Args:
        H: optimizer steps between two exchanges.
        start: the steps before the window, 0 or more; with 0 it is `Rounds(H)`.

    Raises:
        ValueError: for H < 1 or start < 0.

    >>> window = LateWindow(2, start=5)
    >>> [step for step in range(12) if window.due(step)], window.count(8)
    ([6, 8, 10], 1)
    """

    def __init__(self, H: int, start: int) -> None:
        self.start = check.integer("start", start, 0, "the steps before the first round begins")
        super().__init__(H, self.start + check_interval("H", H))

    def __repr__(self) -> str:
        return f"LateWindow({self.H}, start={self.start})"


class RoundsOf(When):
    """Rounds whose length is a function of the step at which they begin.

    Args:
        H: a function of the step, counted from 0; it returns the steps of the round that begins there, an integer >= 1.
        name: the argument that it was given as, for messages.

    Raises:
        TypeError: if H is not a function; ValueError: for its result, at `check` for a whole run.

    Example: post-local SGD, which first exchanges at every step.

    >>> when = RoundsOf(lambda step: 1 if step < 3 else 4)
    >>> [step for step in range(12) if when.due(step)], when.count(7)
    ([0, 1, 2, 6, 10], 4)
    >>> when.gap(6), [step for step in range(12) if when.part(0, num_parts=2).due(step)]
    (4, [0, 1, 2, 4, 8])
    """

    def __init__(self, H: Callable[[int], int], name: str = "H") -> None:
        if not callable(H):
            raise TypeError(
                f"{name}={H!r} must be a function of the step, such as lambda step: 1 if step < 100 else 8."
            )
        self.function, self.share = H, (1, 1)  # due after n of m parts of each round
        self._name = name
        self._ends: list[int] = []  # steps that are done at the end of each round, as far as they are known

    @property
    def plain(self) -> Any:
        return self.function

    def due(self, step: int) -> bool:
        return step + 1 == self._turn(step)[1]

    def count(self, step: int) -> int:
        number, turn = self._turn(max(0, step - 1))  # not at `step`, where a run may end, and no round begin
        return number + (turn <= step)

    def gap(self, step: int) -> int:
        """Return the optimizer steps from the exchange after `step`, where a round ends, to the next one."""
        return self._round(step + 1)[2]

    def part(self, index: int, num_parts: int) -> RoundsOf:
        """Return the rounds of one fragment; fragments take turns within each round."""
        return altered(self, share=(index + 1, num_parts))

    def _turn(self, step: int) -> tuple[int, int]:
        """Return the number of a step's round, and the number of steps done when the round's exchange is due."""
        (number, begin, length), (n, m) = self._round(step), self.share
        return number, begin + max(1, n * length // m)

    def _round(self, step: int) -> tuple[int, int, int]:
        """Return the number of a step's round, the step at which it begins, and its length."""
        ends = self._ends
        while not ends or ends[-1] <= step:
            begin = ends[-1] if ends else 0
            ends.append(begin + self._length(begin))
        number = bisect_right(ends, step)
        begin = ends[number - 1] if number else 0
        return number, begin, ends[number] - begin

    def _length(self, begin: int) -> int:
        """Return the steps of the round that begins at this step."""
        return check_interval(f"{self._name}({begin})", check.called(self._name, self.function, begin))

    def check(self, max_steps: int, who: object = "the exchange") -> None:
        self._round(max_steps - 1)
        if max_steps < (first := self._turn(0)[1]):
            named = f"{self._name}(0)" if self.share == (1, 1) else "offset"
            warn(f"{named}={first} is larger than the run's {max_steps} steps: {who!r} never exchanges anything.")

    def __repr__(self) -> str:
        return f"RoundsOf({getattr(self.function, '__name__', repr(self.function))})"


class QSR(RoundsOf, Settings):
    """The quadratic synchronisation rule: the smaller the learning rate, the longer the rounds.

    A round that begins at step t has max(H, floor((alpha / lr_t)^power)) steps, with lr_t the rate of its first step,
    but at most as many as are left of T, so that the nodes exchange at the end. In the warm-up, and with alpha = 0,
    rounds have H steps.

    Args:
        alpha: >= 0; rounds are longer than H at rates below about alpha / H^(1 / power).
        H: the steps of the shortest rounds.
        lr: the rate: a function of the step, counted from 0, or `[T]`, one for each step. None: that of the inner
            optimizer of the strategy with the exchange, schedule included.
        max_steps: T, the steps of the run; a shorter run ends within the schedule.
        warmup_steps: the steps in which a small rate does not mean a long round; with `lr` = None and 0, those of the
            strategy.
        power: 2; 1 and 3 are the linear and the cubic rule.

    Raises:
        TypeError, ValueError: for numbers outside these ranges; at `check` for a rate that is not one number > 0, and
            for a run of more than T steps.

    >>> when = QSR(alpha=0.2, H=2, lr=lambda step: 0.1 if step < 4 else 0.04, max_steps=40)
    >>> [step for step in range(40) if when.due(step)], when.gap(3)
    ([3, 28, 39], 25)
    >>> from vecgym.optim import OptimSpec
    >>> inner = Optimizer(OptimSpec("sgd", lr=0.1), lr_scheduler="cosine", warmup_steps=4)  # a strategy's
    >>> when = QSR(alpha=0.1, H=4, max_steps=40).following(inner, unit=1)
    >>> [step for step in range(40) if when.due(step)]
    [3, 7, 11, 15, 19, 23, 27, 36, 39]

    Reference: Gu et al., "A Quadratic Synchronization Rule for Distributed Deep Learning", arXiv 2310.14423, and
    github.com/hmgxr128/QSR, localopt.py; the power of its command line is 1 unless given. Deviations: the program may
    give the warm-up rounds of another length than H, `init_h`; a rate of 0, by which it would divide, is refused before
    the run.
    """

    def __init__(
        self, alpha: float, H: int = 1, lr: Callable[[int], Any] | Tensor | Sequence[float] | None = None, *,
        max_steps: int, warmup_steps: int = 0, power: float = 2,
    ) -> None:  # fmt: skip
        self.alpha = check.number("alpha", alpha, "[0, inf)", "rounds grow at rates below alpha / H^(1 / power)")
        self.H, self.max_steps = check_interval("H", H), check.integer("max_steps", max_steps, what="steps of the run")
        self.warmup_steps = check.integer("warmup_steps", warmup_steps, 0, "steps in which rounds have H")
        self.power = check.number("power", power, "(0, inf)", "of alpha / lr, such as 2")
        self.lr: Any = lr if lr is None or callable(lr) else _rates(lr, max_steps)
        self.share, self._name, self._unit, self._ends = (1, 1), "H", 1, []

    @property
    def plain(self) -> Any:
        return self

    def following(self, inner: Optimizer, unit: int) -> When:
        if self.lr is not None:
            return self
        warmup_steps = self.warmup_steps or -(-inner.warmup_steps // unit)
        return altered(self, lr=inner, warmup_steps=warmup_steps, _unit=unit, _ends=[])

    def _length(self, begin: int) -> int:
        left = self.max_steps - begin
        if begin < self.warmup_steps or self.alpha == 0 or left <= 0:
            return self.H if left > 0 else 1
        ratio = self.alpha / self._rate(begin)
        longest = ratio >= (left + 1) ** (1 / self.power)  # the power of a large ratio may be no number
        return left if longest else min(max(self.H, int(ratio**self.power)), left)

    def _rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        if isinstance(self.lr, Optimizer):
            rate = self.lr.lr(step * self._unit, self.max_steps * self._unit)
        elif self.lr is None:
            raise ValueError(f"{self!r} has no learning rate: give it to a strategy's exchange, or give lr.")
        else:
            rate = check.called("lr", self.lr, step) if callable(self.lr) else self.lr[step]
        if isinstance(rate, Tensor) and rate.numel() == 1:
            with readable():
                rate = float(rate.detach())
        return check.number(f"lr({step})", rate, "(0, inf)", "one learning rate for all nodes; or give warmup_steps")

    def check(self, max_steps: int, who: object = "the exchange") -> None:
        if max_steps > self.max_steps:
            raise ValueError(
                f"{self!r} has the rounds of {self.max_steps} steps, and the run has {max_steps}: give "
                f"max_steps={max_steps}."
            )
        super().check(max_steps, who)

    def __repr__(self) -> str:
        return shown(self, lr=None if isinstance(self.lr, Optimizer) else self.lr)


class InUnits(When):
    """Another `When` in units of n steps.

    >>> [step for step in range(12) if InUnits(Rounds(3), 2).due(step)]
    [5, 11]
    """

    def __init__(self, when: When, n: int) -> None:
        self.when, self.n = when, n

    def due(self, step: int) -> bool:
        return (step + 1) % self.n == 0 and self.when.due(step // self.n)

    def count(self, step: int) -> int:
        return self.when.count(step // self.n)


def check_interval(name: str, value: Any) -> int:
    """Return `value` if it is an integer >= 1, a number of optimizer steps.

    >>> check_interval("H", 0)
    Traceback (most recent call last):
    ...
    ValueError: H=0 must be an integer >= 1: the number of optimizer steps between two exchanges.
    """
    return check.integer(name, value, what="the number of optimizer steps between two exchanges")


def as_when(value: Any, name: str) -> When:
    """Return `value` if it is a `When`, `Rounds` for a number of steps, or `RoundsOf` for a function.

    >>> as_when(5, "every"), as_when(SyncWeight([0, 1]), "every"), as_when(abs, "every")
    (5, SyncWeight([0, 1]), RoundsOf(abs))
    """
    if isinstance(value, When):
        return value
    if hasattr(value, "due"):
        raise TypeError(f"{name}={value!r} has a method `due` and is no When: derive its class, class Mine(When).")
    return RoundsOf(value, name) if callable(value) else Rounds(value, name=name)


class SyncWeight(When):
    """A weight for the exchange after each step: a_t in [0, 1], t = 0, 1, ... T - 1.

    (params, state) <- (1 - a_t) (params, state) + a_t exchange(params, state),

    for all of the state, so that 0 is no exchange at all, and 1 the exchange. Weights that are all 0 or 1 and are not
    differentiated are a schedule like any other: where a_t = 0 nothing is sent. With other weights or with derivatives,
    the exchange is made at every step.

    Bytes: those of the exchange where a_t > 0; under differentiation a_t times these.

    Args:
        weights: `[T]`, one for each step of the run.
        every: a schedule whose exchanges the weights are for, in place of each step: `[R]`, one for each of them.

    Raises:
        TypeError, ValueError: unless `weights` are numbers in [0, 1]; at `check` unless there are T (R) of them.

    >>> SyncWeight([0, 0, 1, 0, 0, 1])
    SyncWeight([0, 0, 1, 0, 0, 1])
    >>> when = SyncWeight([1, 0, 1], every=2)  # the second of three exchanges is left out
    >>> [step for step in range(6) if when.due(step)], when.count(5)
    ([1, 5], 2)
    """

    def __init__(self, weights: Tensor | Sequence[float], every: int | When | Callable[[int], int] = 1) -> None:
        self.weights = _checked(weights)  # of C merged configurations, `[C, T]`
        self.every = as_when(every, "every")
        self.differentiated = differentiated(self.weights)
        self.in_part = self.differentiated or not bool(((self.weights == 0) | (self.weights == 1)).all())

    @property
    def batched(self) -> tuple[str, ...]:
        """Settings that may differ between the configurations of a group: exchanges in part are made in every step."""
        return ("weights",) if self.in_part else ()

    def check(self, max_steps: int, who: object = "the exchange") -> None:
        """Raise a ValueError unless there is a weight for each step, or exchange.

        >>> SyncWeight([0, 1]).check(max_steps=3)
        Traceback (most recent call last):
        ...
        ValueError: sync_weight has 2 weights and the run 3 steps: give one for each, or max_steps=2.
        """
        self.every.check(max_steps, who)
        number, each = self.every.count(max_steps), isinstance(self.every, Rounds) and self.every.H == 1
        if len(self.weights) != number and not each:
            raise ValueError(
                f"sync_weight has {len(self.weights)} weights, and {self.every!r} makes {number} exchanges in the "
                f"run's {max_steps} steps: give one for each."
            )
        if len(self.weights) != number:
            raise ValueError(
                f"sync_weight has {len(self.weights)} weights and the run {max_steps} steps: give one for each, "
                f"or max_steps={len(self.weights)}."
            )

    def due(self, step: int) -> bool:
        if not self.every.due(step):
            return False
        return self.differentiated or bool((self.weights[..., self.count(step)] != 0).any())

    def count(self, step: int) -> int:
        return self.every.count(step)

    def weight(self, step: int) -> Tensor | None:
        return self.weights[..., self.count(step)] if self.in_part else None

    def made(self, number: int) -> Any:
        """Return the sum of the weights before a step, float64, with its derivative; None if it equals `number`.

        >>> SyncWeight([0.5, 0.25, 1]).made(2), SyncWeight([1, 1, 0]).made(2), SyncWeight([1, 0, 1]).made(2)
        ([tensor(0.7500, dtype=torch.float64)], None, 1)
        """
        made = self.weights[..., :number].sum(-1, dtype=torch.float64)
        if made.dim() > 0:
            return list(made.unbind())
        with readable():
            whole = float(made.detach())
        if whole != int(whole) or differentiated(made):
            return [made]
        return None if whole == number else int(whole)

    def __repr__(self) -> str:
        values = [round(float(w), 4) for w in self.weights.detach().flatten()]
        whole = [int(v) if v in (0.0, 1.0) else v for v in values]
        shown = ", ".join(map(str, whole if len(whole) <= 20 else whole[:20]))
        every = "" if self.every.plain == 1 else f", every={self.every!r}"
        return f"SyncWeight([{shown}{'' if len(whole) <= 20 else f', ... {len(whole)} in all'}]{every})"


def rounds_or_weights(H: Any, weights: Tensor | Sequence[float] | SyncWeight | None, usual: int) -> When:
    """Return the rounds of H, or the `SyncWeight` of `weights`, with which H must have its usual value.

    >>> rounds_or_weights(5, [0, 1], usual=1)
    Traceback (most recent call last):
    ...
    ValueError: H=5 and sync_weight both say when the nodes exchange: leave H out.
    """
    if weights is None:
        return as_when(H, "H")
    if not (check.is_integer(H) and usual == H):
        raise ValueError(f"H={H} and sync_weight both say when the nodes exchange: leave H out.")
    return weights if isinstance(weights, SyncWeight) else SyncWeight(weights)


def _rates(rates: Any, max_steps: int) -> Tensor:
    """Return learning rates as `[T]`, float64."""
    allowed = "a function of the step, [T] numbers, one for each step of the run, or None"
    check.has_values("lr", rates)
    found = rates.detach().double() if isinstance(rates, Tensor) else torch.from_numpy(check.real("lr", rates, allowed))
    if found.dim() != 1 or len(found) < max_steps:
        raise ValueError(f"lr has shape {list(found.shape)}, and max_steps={max_steps}: give {allowed}.")
    return found


def _checked(weights: Any) -> Tensor:
    allowed = "sync_weight takes [T] numbers in [0, 1], one for each step, such as [0, 0, 0, 1] * 25"
    check.has_values("sync_weight", weights)
    try:
        checked = weights if isinstance(weights, Tensor) else torch.tensor(list(weights), dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{allowed}; not {weights!r}.") from None
    if checked.dim() != 1 or len(checked) == 0:
        raise ValueError(f"sync_weight has shape {list(checked.shape)}; {allowed}.")
    if not checked.is_floating_point():
        checked = checked.double()
    bad = (~((checked.detach() >= 0) & (checked.detach() <= 1))).nonzero()  # nan too
    if len(bad):
        first = int(bad[0])
        raise ValueError(
            f"sync_weight[{first}] = {float(checked[first].detach()):.6g}; {allowed}. "
            "If a gradient step left the range, give sync_weight.clamp(0, 1), or optimise the argument of a sigmoid."
        )
    return checked
