"""Gradient descent on when nodes exchange, and with what weights, within a budget of bytes."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vecgym.clock import dry_run, price
from vecgym.collectives.topology import check_doubly_stochastic
from vecgym.core import check
from vecgym.core.check import function_of
from vecgym.records.optimized import OptimizedSchedule
from vecgym.runs.options import ScheduleOptions
from vecgym.runs.rollout import Outcome, as_steps, prepared, rollout

MIN_STEP = 1e-3  # of the largest change of a weight; smaller steps are not tried
OF_LESS = "start with a matrix of fewer links, or mix less often."


@function_of(ScheduleOptions)
@torch.no_grad()
def optimize_schedule(options: ScheduleOptions) -> OptimizedSchedule:
    """Find when to exchange, or with what weights, to minimise the final loss within a budget.

    A schedule a `[T]`: projected gradient descent on {0 <= a_t <= 1, sum a_t <= n} for the n exchanges that the budget
    allows, from a_t = n / T; every point on the way is rounded to its n largest weights. From the best of these, pairs
    of steps are exchanged, one that the gradient says matters least for one that matters most, while that helps.

    A mixing matrix W `[K, K]` or `[T, K, K]`: descent on Z, with W the doubly stochastic matrix to which Sinkhorn's
    alternate division by the sums of rows and columns brings exp(Z); 0 stays 0, so links and bytes are the start's.

    The result is fitted to these batches. `held_out` evaluates it on others.

    Args:
        strategy: the weights -> a strategy, such as `lambda w: DiLoCoStrategy(sync_weight=w)` or, for a matrix,
            `lambda W: GossipStrategy(W)`.
        {arguments}

    Raises:
        ValueError, TypeError: for no budget or two, a budget too small for a single exchange, and matrices that are
            not doubly stochastic.

    >>> import torch
    >>> from vecgym.strategy import FedAvgStrategy
    >>> class Line(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = torch.nn.Parameter(torch.zeros(()))
    ...     def forward(self, x):
    ...         return (self.w - x).square().square().mean()
    >>> batches = torch.linspace(-1, 2, 8).view(4, 2, 1)
    >>> result = optimize_schedule(
    ...     Line(), lambda w: FedAvgStrategy("sgd", lr=0.1, sync_weight=w), batches, num_nodes=2,
    ...     eval_batch=torch.tensor([1.0]), H=4)
    >>> result.uniform.tolist(), result.schedule.sum().item(), result.gain >= 0
    ([0.0, 0.0, 0.0, 1.0], 1.0, True)
    """
    problem = _Problem(options)
    optimized = _optimized_times(problem) if options.mixing is None else _optimized_mixing(problem, options.mixing)
    schedule, weights, uniform, losses = optimized
    outcome = problem.run(schedule)
    data = options.held_out
    held_out = [None if data is None else problem.loss(w, data) for w in (schedule, uniform)]
    return OptimizedSchedule(
        schedule, weights, uniform, float(outcome.loss), losses[-1], problem.loss(uniform),
        float(outcome.bytes.sum()), tuple(losses), *held_out,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------- descent


class _Problem:
    """The loss as a function of the weights alone."""

    def __init__(self, options: ScheduleOptions) -> None:
        self.options = options
        self.steps = as_steps(options.batches, options.num_nodes)
        self.engine = prepared(options.model, options.engine, self.steps[0])

    def run(self, weights: Tensor, data: tuple[Any, Any] | None = None, segments: int | None = None) -> Outcome:
        """Roll out the strategy of these weights, on `data`, other (batches, eval_batch), if there is any."""
        strategy = check.called("strategy", self.options.strategy, weights)
        batches, eval_batch = (self.steps, self.options.eval_batch) if data is None else data
        changed = {"strategy": strategy, "batches": batches, "eval_batch": eval_batch, "engine": self.engine}
        return rollout(**{**self.options.common, **changed}, segments=segments)

    def loss(self, weights: Tensor, data: tuple[Any, Any] | None = None) -> float:
        return float(self.run(weights, data).loss)

    def affords(self, schedule: Tensor) -> bool:
        """Whether the budget of seconds allows a schedule; if nodes differ, it matters when they meet."""
        budget = self.options.budget_seconds
        return budget is None or self.seconds(schedule) <= budget

    def seconds(self, weights: Tensor) -> float:
        """Return the seconds of the run with these weights, on the network of a budget of seconds."""
        options = self.options
        assert options.network is not None
        assert options.compute is not None
        ledger = dry_run(options.model, options.strategy(weights), options.num_nodes, len(self.steps))
        return float(price(ledger, options.network, options.compute).seconds)

    def slope(self, z: Tensor, weights: Callable[[Tensor], Tensor]) -> tuple[float, Tensor]:
        """Return the loss of the weights of z, and its gradient with respect to z."""
        z = z.detach().requires_grad_()
        with torch.enable_grad():
            loss = self.run(weights(z), segments=self.options.segments).loss
            if not loss.requires_grad:
                raise ValueError(
                    "the outcome does not depend on the weights that are passed to strategy: it must use them, as in "
                    "lambda w: DiLoCoStrategy(sync_weight=w)."
                )
            return float(loss.detach()), torch.autograd.grad(loss, z)[0]

    def descend(
        self,
        z: Tensor,
        weights: Callable[[Tensor], Tensor] = lambda z: z,
        project: Callable[[Tensor], Tensor] = lambda z: z,
    ) -> tuple[list[Tensor], list[float]]:
        """Do projected gradient descent, halving steps that do not help; return each accepted point and its loss."""
        loss, gradient = self.slope(z, weights)
        points, losses, step = [z], [loss], 0.25
        for _ in range(self.options.iterations - 1):
            largest = float(gradient.abs().max())
            if not math.isfinite(largest) or largest == 0 or step < MIN_STEP:
                break
            trial = project(points[-1] - step * gradient / largest)
            loss, slope = self.slope(trial, weights)
            if loss < losses[-1]:  # not if it is nan
                points.append(trial)
                losses.append(loss)
                gradient, step = slope, 1.5 * step
            else:
                step /= 2
        return points, losses


# ------------------------------------------------------------------------------------- when to exchange


def _optimized_times(problem: _Problem) -> tuple[Tensor, Tensor, Tensor, list[float]]:
    """Return (0/1 schedule, relaxed weights, uniform schedule, losses of the descent)."""
    num_steps = len(problem.steps)
    count = _affordable(problem, num_steps)
    uniform = evenly(num_steps, count)
    start = torch.full((num_steps,), count / num_steps, dtype=torch.float64)
    points, losses = problem.descend(start, project=lambda z: project_to_budget(z, count))
    candidates = [uniform, *[s for s in (largest(z, count) for z in points) if problem.affords(s)]]
    rounded = {tuple(s.tolist()): s for s in candidates}
    tried = {key: problem.loss(schedule) for key, schedule in rounded.items()}
    best = min(tried, key=lambda key: (not math.isfinite(tried[key]), tried[key]))
    return _swapped(problem, rounded[best], tried[best]), points[-1], uniform, losses


def _swapped(problem: _Problem, schedule: Tensor, loss: float) -> Tensor:
    """Move one exchange at a time to where it helps most according to the gradient, as long as it helps."""
    trials = problem.options.iterations
    while trials > 0:
        _, gradient = problem.slope(schedule, lambda z: z)
        on, off = schedule == 1, schedule == 0
        # To first order, moving an exchange from s to t changes the loss by gradient[t] - gradient[s].
        change = torch.where(off[:, None] & on[None, :], gradient[:, None] - gradient[None, :], math.inf)
        for flat in change.flatten().argsort()[: min(3, trials)].tolist():
            to, origin = divmod(flat, len(schedule))
            if not change[to, origin] < 0:
                return schedule
            trials -= 1
            trial = schedule.clone()
            trial[to], trial[origin] = 1.0, 0.0
            trial_loss = problem.loss(trial) if problem.affords(trial) else math.inf
            if trial_loss < loss:
                schedule, loss = trial, trial_loss
                break
        else:
            return schedule
    return schedule


def _affordable(problem: _Problem, num_steps: int) -> int:
    """Return the number of exchanges that the budget allows."""
    options = problem.options
    H, budget_bytes, budget_seconds = options.H, options.budget_bytes, options.budget_seconds
    if [H, budget_bytes, budget_seconds].count(None) != 2:
        raise ValueError(
            f"H={H!r}, budget_bytes={budget_bytes!r} and budget_seconds={budget_seconds!r}: give one of them, the "
            "budget."
        )
    if budget_seconds is not None:
        return _within_seconds(problem, num_steps, budget_seconds)
    if H is not None:
        if num_steps < H:
            raise ValueError(f"H={H!r} must be an integer from 1 to the number of steps, {num_steps}.")
        return num_steps // H
    none, all_ = (problem.run(torch.full((num_steps,), w, dtype=torch.float64)).bytes for w in (0.0, 1.0))
    cost = all_ - none
    if float(cost.min()) <= 0 or float(cost.max() - cost.min()) > 1e-9 * float(cost.max()):
        raise ValueError(
            "the cost of an exchange is zero or differs from step to step: give H instead of budget_bytes."
        )
    assert budget_bytes is not None
    count = int((budget_bytes - float(none.sum())) / float(cost[0]) * (1 + 1e-12))
    if count < 1:
        raise ValueError(
            f"budget_bytes={budget_bytes!r} does not allow one exchange of {float(cost[0]):,.0f} bytes per node"
            + (f", besides {float(none.sum()):,.0f} that are sent anyway." if float(none.sum()) else ".")
        )
    return min(count, num_steps)


def _within_seconds(problem: _Problem, num_steps: int, budget_seconds: float) -> int:
    """Return how many exchanges, spread evenly over the steps, fit into the time."""

    def seconds(count: int) -> float:
        return problem.seconds(evenly(num_steps, count))

    most = bisect.bisect_right(range(1, num_steps + 1), budget_seconds, key=seconds)
    if most == 0:
        raise ValueError(
            f"budget_seconds={budget_seconds!r} leaves no time for an exchange: a run with one exchange takes "
            f"{seconds(1):.4g} s."
        )
    return most


def evenly(num_steps: int, count: int) -> Tensor:
    """Spread `count` exchanges evenly over the steps, the last at the end: every H steps if H divides their number.

    >>> evenly(6, 3).tolist()
    [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    """
    schedule = torch.zeros(num_steps, dtype=torch.float64)
    schedule[[(i + 1) * num_steps // count - 1 for i in range(count)]] = 1.0
    return schedule


def largest(weights: Tensor, count: int) -> Tensor:
    """Return 1 at the `count` largest weights and 0 elsewhere; of equal ones, the last.

    >>> largest(torch.tensor([0.2, 0.9, 0.2, 0.1]), 2).tolist()
    [0.0, 1.0, 1.0, 0.0]
    """
    schedule = torch.zeros(len(weights), dtype=torch.float64)
    schedule[weights.detach().argsort(stable=True)[-count:]] = 1.0
    return schedule


def project_to_budget(z: Tensor, total: float) -> Tensor:
    """Return the nearest weights in [0, 1] with sum <= `total`: clamp(z - lambda, 0, 1) for the least lambda >= 0.

    >>> project_to_budget(torch.tensor([1.5, 0.75, 0.1]), 1.5)
    tensor([1.0000, 0.5000, 0.0000])
    """
    if float(z.clamp(0, 1).sum()) <= total:
        return z.clamp(0, 1)
    low, high = 0.0, float(z.max())  # the sum is too large at `low`, and 0 at `high`
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if float((z - middle).clamp(0, 1).sum()) > total else (low, middle)
    return (z - high).clamp(0, 1)


# ------------------------------------------------------------------------------------- mixing matrices


def _optimized_mixing(problem: _Problem, start: Tensor) -> tuple[Tensor, Tensor, Tensor, list[float]]:
    """Return (matrices, once more as weights, initial matrices, losses of the descent)."""
    H, budget_bytes, budget_seconds = problem.options.H, problem.options.budget_bytes, problem.options.budget_seconds
    if H is not None:
        raise ValueError(f"H={H!r} with mixing: the strategy says how often nodes mix, GossipStrategy(W, every={H}).")
    if not isinstance(start, Tensor) or start.dim() not in (2, 3):
        raise ValueError("mixing takes a tensor [K, K] or [T, K, K], such as vecgym.collectives.topology.ring(K).")
    start = start.detach().double()
    for i, matrix in enumerate(start if start.dim() == 3 else start[None]):
        check_doubly_stochastic(matrix, f"mixing[{i}]" if start.dim() == 3 else "mixing")
    sent = float(problem.run(start).bytes.sum())
    if budget_bytes is not None and sent > budget_bytes:
        raise ValueError(f"mixing sends {sent:,.0f} bytes per node, more than budget_bytes={budget_bytes!r}: {OF_LESS}")
    if not problem.affords(start):
        seconds = problem.seconds(start)
        raise ValueError(f"mixing takes {seconds:.4g} s, more than budget_seconds={budget_seconds!r}: {OF_LESS}")
    points, losses = problem.descend(start.log(), sinkhorn)
    matrices = sinkhorn(points[-1])
    return matrices, matrices, start, losses


def sinkhorn(z: Tensor, tolerance: float = 1e-12, max_rounds: int = 10_000) -> Tensor:
    """Make exp(z), `[..., K, K]`, doubly stochastic by dividing rows and columns by their sums, in turn.

    Entries exp(-inf) = 0 stay 0.

    Raises:
        ValueError: if this does not converge, since no doubly stochastic matrix has these zeros, say.

    >>> sinkhorn(torch.tensor([[0.0, 0.0], [-math.inf, 0.0]])).round(decimals=2)
    Traceback (most recent call last):
    ...
    ValueError: no doubly stochastic matrix was found with these zeros and ratios: begin with a doubly stochastic one.
    >>> sinkhorn(torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64))
    tensor([[0.7311, 0.2689],
            [0.2689, 0.7311]], dtype=torch.float64)
    """
    linked = z > -math.inf
    w = torch.where(linked, torch.where(linked, z, 0.0).exp(), 0.0)
    for _ in range(max_rounds):
        w = w / w.sum(-1, keepdim=True)
        w = w / w.sum(-2, keepdim=True)
        if float((w.detach().sum(-1) - 1).abs().max()) <= tolerance:
            return w
    raise ValueError(
        "no doubly stochastic matrix was found with these zeros and ratios: begin with a doubly stochastic one."
    )
