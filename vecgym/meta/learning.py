"""Numbers of strategies, learned over many runs: `learn`, and the result, `Learned`."""

from __future__ import annotations

import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from vecgym.availability import Deadline
from vecgym.core import check, rng
from vecgym.core.check import Options, function_of
from vecgym.core.errors import warn
from vecgym.meta.curves import Curve, Exchanges, Family, Learnable, Mixing
from vecgym.meta.rivals import RIVALS, Report, gain_over, rivals_of
from vecgym.meta.tasks import Drawn, Tasks
from vecgym.records import runfile
from vecgym.records.rows import counted, listed
from vecgym.runs.options import Count, Device, OptionalCount, Present, Seed, Segments, described, optional_number
from vecgym.strategy import Strategy

Estimator = Literal["auto", "gradient", "es"]
NOMINAL = {"gradient": 1.25, "es": 1.0}  # the time of an estimate where a clock may not decide: measured for AdamW
MEASURED_EVERY = 32  # steps with runs of one length
SAVED_EVERY_S = 5.0
NEARBY = 4  # points at which a single run is differentiated, to find the variance
TAMED = 10.0  # times the median norm: no run's gradient counts for more
BETAS = (0.9, 0.999)
IDENTITY = (
    "numbers", "max_steps", "num_nodes", "batch_size", "runs_per_step", "seeds", "estimator", "lr", "noise", "val_size",
    "availability", "seed",
)  # fmt: skip
OF_STRATEGY = "a function of the numbers, such as lambda n: DiLoCoStrategy(lr=n.lr, H=n.when)"


def _numbers(name: str, value: Any) -> dict[str, Learnable]:
    wanted = f'{name} takes names and what is learned: {{"lr": Curve(0.01), "when": Exchanges(every=12)}}'
    if not isinstance(value, Mapping) or not value:
        raise TypeError(f"{name} is {check.kind_of(value)} or empty; {wanted}.")
    for key, number in value.items():
        if not isinstance(key, str) or not key.isidentifier() or not isinstance(number, Learnable):
            raise TypeError(f"{name}[{key!r}] is {number!r}; {wanted}.")
    return dict(value)


def _seeds(name: str, value: Any) -> list[int] | None:
    if value is not None and (not isinstance(value, (list, tuple, range)) or not value):
        raise TypeError(f"{name} is {check.kind_of(value)} or empty; give a list of integers, or None for fresh runs.")
    return None if value is None else [check.seed(name, x) for x in value]


def _lengths(name: str, value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, (list, tuple)) else [value]
    if not values:
        raise ValueError(f"{name} is empty: give the steps of a run, or a list of several lengths.")
    return tuple(check.integer(name, x, what="the steps of a run, or a list of several lengths") for x in values)


@dataclass(frozen=True)
class LearnOptions(Options):
    """The arguments of `learn`.

    Args:
        strategy_of: the numbers, by name, -> a strategy: `lambda n: DiLoCoStrategy(lr=n.lr, H=n.when)`.
        numbers: name -> `Curve`, `Exchanges` or `Mixing`.
        runs: a seed -> a model and its data: (model, dataset) or (model, dataset, val_dataset), with datasets as
            `Trainer` takes them: one that is dealt to the nodes, or a function (rank, num_nodes, train) -> dataset.
            Without `val_dataset`, every tenth example of a dataset is held out. The models differ in their initial
            parameters only. Global random generators are seeded with the seed.
        loss_fn: see `Trainer`.
        num_nodes: K.
        batch_size: examples per node and step.
        max_steps: T, or a list of several lengths, which take turns: curves then depend on log T, too.
        runs_per_step: M, fresh runs in each step of learning, as one program.
        seeds: of the same runs in each step, in place of fresh ones. A single run, `[0]`, is one given run; what it
            teaches need not hold for another.
        seconds: how long to learn.
        steps: in its place, the number of steps; a seed then gives the same bits.
        estimator: "gradient", through whole runs; "es", antithetic evolution strategies, which need no derivative; or
            "auto": at first and now and then, the one with less variance times seconds (of a single run, over points
            nearby).
        lr: the largest change of a coordinate in a step, of Adam; it falls to a tenth.
        noise: of evolution strategies, the standard deviation of a coordinate.
        val_size: examples for the loss at the end of a run; of each node, if nodes have validation sets of their own.
        segments: see `rollout`.
        checkpoint: a file, written now and then, and at the end. If it exists, learning goes on from it; the options
            must be the same, except for the budget, and so must `runs` and `loss_fn`, which cannot be compared.
        availability: which nodes are present in which steps; see `Trainer.fit`.
        seed: of the runs and of noise.
        device: see `Trainer.fit`.
    """

    strategy_of: Annotated[Callable[[Any], Strategy], partial(check.instance, kind=Callable, give=OF_STRATEGY)]
    numbers: Annotated[Mapping[str, Learnable], _numbers]
    _: KW_ONLY
    runs: Callable[[int], tuple[Any, ...]]
    num_nodes: Count
    max_steps: Annotated[int | Sequence[int], _lengths]
    loss_fn: Callable[[nn.Module, Any], Any] | None = None
    batch_size: Count = 16
    runs_per_step: Count = 16
    seeds: Annotated[Sequence[int] | None, _seeds] = None
    seconds: Annotated[float | None, partial(optional_number, within="(0, inf)", what="of learning")] = None
    steps: OptionalCount = None
    estimator: Annotated[Estimator, partial(check.choice, allowed=get_args(Estimator))] = "auto"
    lr: Annotated[float, partial(check.number, within="(0, inf)")] = 0.08
    noise: Annotated[float, partial(check.number, within="(0, inf)")] = 0.1
    val_size: Count = 256
    segments: Segments = None
    checkpoint: str | os.PathLike[str] | None = None
    availability: Present = None
    seed: Seed = 42
    device: Device = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.seconds is None) == (self.steps is None):
            raise ValueError(
                f"seconds={self.seconds!r} and steps={self.steps!r}: give one of them, the budget, such as seconds=60."
            )
        if not callable(self.runs):
            raise TypeError(f"runs is {check.kind_of(self.runs)}; give lambda seed: (model, dataset).")
        for name, number in self.numbers.items():
            if isinstance(number, Exchanges) and number.every > (steps := min(self.lengths)):
                raise ValueError(f"{name}={number!r} makes no exchange in {steps} steps: give every={steps}, or less.")
            if not all(number.holds(steps, self.num_nodes) for steps in self.lengths):
                raise ValueError(
                    f"{name} has no value in runs of {self.num_nodes} nodes and {listed(self.lengths)} steps: give a "
                    f"matrix [{self.num_nodes}, {self.num_nodes}], or, for runs of one length T, [T, K, K]."
                )
        if isinstance(self.availability, Deadline):
            raise ValueError(
                f"{self.availability!r} needs the nodes' compute times, which these runs do not have: give another "
                "availability, such as LocalSteps([8, 4], H=8)."
            )
        if self.checkpoint is not None:
            self.settle(checkpoint=check.path("checkpoint", self.checkpoint))

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of runs, which take turns."""
        lengths: Any = self.max_steps
        return tuple(lengths)


class Estimate(NamedTuple):
    """An estimate of the gradient of the mean final loss.

    Attributes:
        losses: of the runs, `[M]`.
        slopes: of each run alone, `[n, M]`.
    """

    losses: Tensor
    slopes: Tensor

    @property
    def variance(self) -> float:
        """The variance of the mean slope, summed over coordinates; infinite if a run has none."""
        variance = float(self.slopes.var(1, correction=int(self.slopes.shape[1] > 1)).sum()) / self.slopes.shape[1]
        return variance if math.isfinite(variance) else math.inf

    @property
    def mean(self) -> Tensor:
        """The mean slope, `[n]`; a run without one counts as 0, and a steep one by `TAMED` times the median."""
        slopes = self.slopes.nan_to_num(0, 0, 0)
        norms = slopes.norm(dim=0)
        return (slopes * (TAMED * norms.median() / norms.clamp(min=1e-300)).clamp(max=1)).mean(1)


def by_gradient(tasks: Tasks, z: Tensor, drawn: Drawn, seed: int) -> Estimate:
    """Differentiate through the runs, with the coordinates of all, `[n]`, or of each, `[n, M]`."""
    each = _of_each(z, drawn).clone().requires_grad_()
    with torch.enable_grad():
        losses = tasks.losses(each, drawn)
        if not losses.requires_grad:
            raise ValueError("the loss does not depend on the numbers: strategy_of must use them, " + OF_STRATEGY + ".")
        return Estimate(losses.detach(), torch.autograd.grad(losses.sum(), each)[0])


def by_es(tasks: Tasks, z: Tensor, drawn: Drawn, seed: int) -> Estimate:
    """Compare runs in pairs, with coordinates a little on either side of z: antithetic evolution strategies.

    No pair counts for more than an untrained model's loss, since one of it may diverge; if both do, they are equal.
    """
    z, sigma = _of_each(z, drawn), tasks.options.noise
    noise = sigma * torch.randn(z.shape, generator=rng.generator(seed, "meta noise"), dtype=z.dtype)
    both = torch.cat([z + noise, z - noise], 1)
    with torch.no_grad():
        losses = tasks.losses(both, drawn.times(2)).double()
    plus, minus = losses.nan_to_num(math.inf, math.inf).chunk(2)
    most = tasks.untrained(drawn)
    change = (plus - minus).nan_to_num(0, most, -most)
    return Estimate(losses.view(2, -1).mean(0), change.clamp(-most, most) * noise / (2 * sigma**2))


def _of_each(z: Tensor, drawn: Drawn) -> Tensor:
    """Return the coordinates of each run, `[n, M]`, given these, or those of all, `[n]`."""
    return z if z.dim() == 2 else z[:, None].expand(-1, len(drawn.models))


ESTIMATORS = {"gradient": by_gradient, "es": by_es}


class Progress(NamedTuple):
    """A state of learning, replaced as a whole.

    Attributes:
        z: the coordinates, `[n]`.
        slope, square: averages of the gradient and of its square.
        spent: seconds.
        rows: of each step: the length of its runs, their mean loss, and the estimator.
        chosen: length of runs -> estimator.
    """

    z: Tensor
    slope: Tensor
    square: Tensor
    spent: float
    rows: tuple[dict[str, Any], ...]
    chosen: dict[int, str]


class Learner:
    """Steps of Adam on the mean final loss of fresh runs."""

    def __init__(self, options: LearnOptions) -> None:
        self.options = options
        self.family = Family(options.numbers, options.lengths)
        self.tasks = Tasks(options, self.family)
        zero = torch.zeros_like(self.family.start)
        self.progress = Progress(self.family.start, zero, zero, 0.0, (), {})
        self._saved = time.monotonic()
        if options.checkpoint is not None and os.path.exists(options.checkpoint):
            self._restore(Path(options.checkpoint))

    @property
    def used(self) -> float:
        """The fraction of the budget that is spent."""
        options, done = self.options, self.progress
        return done.spent / options.seconds if options.seconds is not None else len(done.rows) / (options.steps or 1)

    def run(self) -> None:
        """Learn until the budget is spent, or until Ctrl-C."""
        try:
            while self.used < 1:
                self.step()
                self._save(SAVED_EVERY_S)
        except KeyboardInterrupt:
            warn(f"learning was interrupted after {counted(len(self.progress.rows), 'step')}: here is the result.")
        self._save(0.0)

    def step(self) -> None:
        """Take a step with fresh runs."""
        options, done, begin, used = self.options, self.progress, time.monotonic(), self.used
        number = len(done.rows)
        num_steps = options.lengths[number % len(options.lengths)]
        seeds = options.seeds or self.tasks.seeds("runs", number, count=options.runs_per_step)
        drawn = self.tasks.draw(seeds, num_steps, options.num_nodes)
        seed = rng.key(options.seed, "meta step", number)
        name, estimate = self._estimate(drawn, seed, [row["steps"] for row in done.rows].count(num_steps))
        gradient = estimate.mean
        slope, square = (b * old + (1 - b) * new for b, old, new in
                         zip(BETAS, (done.slope, done.square), (gradient, gradient**2)))  # fmt: skip
        hat, squared = (x / (1 - b ** (number + 1)) for b, x in zip(BETAS, (slope, square)))
        z = done.z - options.lr * max(0.1, 1 - used) * hat / (squared.sqrt() + 1e-12)
        row = {"steps": num_steps, "loss": float(estimate.losses.mean()), "estimator": name}
        spent = done.spent + time.monotonic() - begin
        self.progress = Progress(z, slope, square, spent, (*done.rows, row), {**done.chosen, num_steps: name})

    def _estimate(self, drawn: Drawn, seed: int, visits: int) -> tuple[str, Estimate]:
        """Return an estimate and its estimator's name; from time to time, of the one that is better per second."""
        options, z = self.options, self.progress.z
        if options.estimator != "auto":
            return options.estimator, ESTIMATORS[options.estimator](self.tasks, z, drawn, seed)
        if visits % MEASURED_EVERY:
            name = self.progress.chosen[drawn.num_steps]
            return name, ESTIMATORS[name](self.tasks, z, drawn, seed)
        alone, seeing = len(drawn.models) == 1, drawn
        if alone:  # one run has no variance: it is compared with itself at coordinates nearby
            noise = torch.randn(len(z), NEARBY, generator=rng.generator(seed, "meta nearby"), dtype=z.dtype)
            z, seeing = z[:, None] + options.noise * noise, drawn.times(NEARBY)
        made, cost = {}, dict(NOMINAL)
        for name, estimator in ESTIMATORS.items():
            for _ in range(1 + (not self.progress.rows and options.seconds is not None)):  # the first has to load much
                begin = time.monotonic()
                made[name] = estimator(self.tasks, z, seeing, seed)
                if options.seconds is not None:
                    cost[name] = time.monotonic() - begin
        best = min(made, key=lambda name: made[name].variance * cost[name])
        return best, ESTIMATORS[best](self.tasks, self.progress.z, drawn, seed) if alone else made[best]

    # ------------------------------------------------------------------------------------------------- checkpoints

    @property
    def _identity(self) -> dict[str, Any]:
        """The options that a checkpoint must have in common with the learning that goes on from it, as text."""
        start = self.family.arguments(self.family.start[:, None], self.options.lengths[0])[0]
        strategy = check.called("strategy_of", self.options.strategy_of, start)
        same = {**{name: vars(self.options)[name] for name in IDENTITY}, "strategy_of": strategy}
        texts = {name: re.sub(" at 0x[0-9a-f]+", "", repr(value)) for name, value in same.items()}  # of another process
        return {**texts, "settings of the strategy": str(described(strategy))}

    def _save(self, after: float) -> None:
        """Write a checkpoint unless the last one was written less than so many seconds ago."""
        if self.options.checkpoint is None or time.monotonic() - self._saved < after:
            return
        done = self.progress._asdict()
        rows, chosen = list(done.pop("rows")), {str(steps): name for steps, name in done.pop("chosen").items()}
        runfile.write(self.options.checkpoint, {**done, "rows": rows, "chosen": chosen, "of": self._identity})
        self._saved = time.monotonic()

    def _restore(self, path: Path) -> None:
        """Go on from a checkpoint."""
        found = runfile.read(path, {"z": Tensor, "slope": Tensor, "square": Tensor, "spent": float, "of": dict})
        for name, value in self._identity.items():
            if found["of"].get(name) != value:
                raise ValueError(
                    f"{path} is of learning with {name}={found['of'].get(name)}, not {value}: give the same options, "
                    "or another checkpoint."
                )
        with runfile.naming(path):
            chosen = {int(steps): name for steps, name in found["chosen"].items()}
            z, slope, square = (found[name] for name in ("z", "slope", "square"))
            self.progress = Progress(z, slope, square, found["spent"], tuple(found["rows"]), chosen)


class Learned:
    """Numbers of a strategy, learned over many runs: the result of `learn`.

    Attributes:
        rows: of each step of learning: the `steps` of its runs, their mean `loss`, and the `estimator`.
        coordinates: of the numbers, `[n]`.

    >>> from vecgym.meta import Curve, learn
    >>> from vecgym.models import Line
    >>> from vecgym.strategy import FedAvgStrategy
    >>> learned = learn(
    ...     lambda n: FedAvgStrategy("sgd", lr=n.lr, H=2), {"lr": Curve(0.01)},
    ...     runs=lambda seed: (Line(), torch.randn(64) + 1), num_nodes=2, max_steps=4, batch_size=4, runs_per_step=2,
    ...     steps=1, device="cpu",
    ... )
    >>> report = learned.report(num_runs=2, rivals=["constants"])
    >>> [(gain.num_steps, gain.num_nodes) for gain in report.gains if gain.rival == "constants"]
    [(4, 2), (12, 2), (4, 4)]
    """

    def __init__(self, learner: Learner) -> None:
        self.options, self.family, self.tasks = learner.options, learner.family, learner.tasks
        self.coordinates, self.rows = learner.progress.z, list(learner.progress.rows)
        self.seconds = learner.progress.spent

    def __repr__(self) -> str:
        names = listed(list(self.family.numbers))
        used = listed(list(dict.fromkeys(row["estimator"] for row in self.rows))) if self.rows else "nothing"
        num_runs = self.options.runs_per_step if self.options.seeds is None else len(self.options.seeds)
        runs = f"{counted(len(self.rows), 'step')} of {counted(num_runs, 'run')}"
        return f"Learned({names}, from {runs} in {self.seconds:.0f} s, by {used})"

    def numbers(self, max_steps: int) -> Any:
        """Return the numbers by name for a run of so many steps: `[T, 1]`, and schedules of exchanges."""
        steps = check.integer("max_steps", max_steps, what="the steps of the run")
        return self.family.arguments(self.coordinates[:, None], steps)[0]

    def strategy(self, max_steps: int) -> Strategy:
        """Return an ordinary strategy for a run of so many steps: fit, sweep, verify or save it.

        Beyond the lengths that were learned from, the curves of the nearest one are stretched.
        """
        return check.called("strategy_of", self.options.strategy_of, self.numbers(max_steps))

    def plot(self, max_steps: int | None = None, path: str | os.PathLike[str] | None = None) -> Any:
        """Draw the numbers over a run, beside those at the start; of the longest runs when `max_steps` is not given."""
        from vecgym.plot.schedules import plot_numbers  # matplotlib takes a while to import

        steps = max(self.options.lengths) if max_steps is None else check.integer("max_steps", max_steps)
        both = self.family.arguments(torch.stack([self.coordinates, self.family.start], 1), steps)
        kinds = (Curve, Exchanges, Mixing)
        of = [[name for name, x in self.family.numbers.items() if isinstance(x, kind)] for kind in kinds]
        curves, before = ({name: vars(each)[name][:, 0] for name in of[0]} for each in both)
        times = {name: vars(both[0])[name].weights for name in of[1]}
        return plot_numbers(curves, before, times, path, matrices={name: vars(both[0])[name] for name in of[2]})

    def report(
        self, num_runs: int = 64, rivals: Sequence[str] | Mapping[str, Mapping[str, Learnable]] = tuple(RIVALS),
        longer: int | None = 3, more: int | None = 2,
    ) -> Report:  # fmt: skip
        """Compare with tuned rivals, run by run, on runs that none of them has seen.

        A rival is tuned by as many steps, on the same runs, as were taken here. It takes about as long.

        Args:
            num_runs: unseen runs of each kind.
            rivals: some of "constants"; "constants, cosine", of which the first falls to a tenth; "QSR, cosine", with
                the rounds of the quadratic synchronization rule; "late window", exchanges evenly from a tuned step on;
                "random times". All exchange equally often. Or rivals of your own, name -> numbers, as for `learn`.
            longer: also in runs so many times as long as the longest; None: not.
            more: also in runs with so many times the nodes; None: not. (Mixing matrices are for their own nodes.)
        """
        num_runs, options = check.integer("num_runs", num_runs, 2), self.options
        lengths, K = list(dict.fromkeys(options.lengths)), options.num_nodes
        kinds = [(steps, K) for steps in lengths]
        kinds += [] if longer is None else [(max(lengths) * check.integer("longer", longer), K)]
        kinds += [] if more is None else [(sorted(lengths)[len(lengths) // 2], K * check.integer("more", more))]
        kinds = [kind for kind in kinds if all(x.holds(*kind) for x in options.numbers.values())]
        each = {"": (self.tasks, self.coordinates), "start": (self.tasks, self.family.start)}
        each |= {name: self._tuned(numbers) for name, numbers in rivals_of(options.numbers, rivals).items()}
        gains = []
        for kind in kinds:
            losses = {name: self._unseen(tasks, z, kind, num_runs) for name, (tasks, z) in each.items()}
            gains += [gain_over(name, kind, losses[""], x) for name, x in losses.items() if name]
        return Report(tuple(gains))

    def _tuned(self, numbers: Mapping[str, Learnable]) -> tuple[Tasks, Tensor]:
        """Return a rival with the coordinates that as many steps have found on the same runs."""
        used = Counter(row["estimator"] for row in self.rows).most_common(1)
        options = replace(
            self.options, numbers=numbers, seconds=None, steps=max(1, len(self.rows)), checkpoint=None,
            estimator=used[0][0] if used else "gradient",
        )  # fmt: skip
        learner = Learner(options)
        if len(learner.family.start):  # else there is nothing to tune
            learner.run()
        return learner.tasks, learner.progress.z

    def _unseen(self, tasks: Tasks, z: Tensor, kind: tuple[int, int], num_runs: int) -> Tensor:
        """Return the losses of runs that were not learned from, `[num_runs]`."""
        losses, seeds = [], tasks.seeds("unseen", count=num_runs)
        for first in range(0, num_runs, self.options.runs_per_step):
            drawn = tasks.draw(seeds[first : first + self.options.runs_per_step], *kind)
            with torch.no_grad():
                losses.append(tasks.losses(z[:, None], drawn))
        return torch.cat(losses)


@function_of(LearnOptions)
def learn(options: LearnOptions) -> Learned:
    """Learn numbers of a strategy that make the final loss of many runs small in the mean.

    Each step draws fresh runs, M of them, trains them as one program, and follows the gradient of the mean loss of
    their averages at the end. Numbers of a single run do not hold for others; these do, as far as runs
    are like those that `runs` draws: see `Learned.report`.

    Args:
        {arguments}

    Returns:
        The learned numbers; on Ctrl-C those up to now.

    Raises:
        ValueError, TypeError: for invalid options, and what cannot be differentiated; the message has the fix.

    >>> import torch
    >>> from vecgym.meta import Curve, learn
    >>> from vecgym.models import Line
    >>> from vecgym.strategy import FedAvgStrategy
    >>> learned = learn(
    ...     lambda n: FedAvgStrategy("sgd", lr=n.lr, H=2), {"lr": Curve(0.01)},
    ...     runs=lambda seed: (Line(), torch.randn(64) + 1), num_nodes=2, max_steps=4, batch_size=4, runs_per_step=2,
    ...     steps=3, estimator="gradient", device="cpu",
    ... )
    >>> learned.rows[0]["estimator"], bool(learned.numbers(4).lr.min() > 0.01)
    ('gradient', True)
    >>> learned.strategy(max_steps=8).exchanges  # an ordinary strategy
    (Exchange(Mean(), every=2),)
    """
    learner = Learner(options)
    learner.run()
    return Learned(learner)
