"""AD-PSGD: a node that ends a step averages with one neighbour, and nobody waits (arXiv 1710.06952, algorithm 1).

    every node begins step 0 at time 0
    a node i that begins a step:   g_i = clip(gradient of f(theta_i)) at its parameters of that moment
    a node i that ends it:         theta_i = optimizer_i(theta_i, g_i)              theta_i may have moved since
                                   theta_i, theta_j = (theta_i + theta_j) / 2      j = neighbour(i, its own count)
                                   and begins the next step

With `swap` (see `Swap`) the two models take their time over the links before a step ends: node i waits for that, and
its optimizer's step and the average happen at the end of it. Node j computes on.

The average is atomic and symmetric: both take it, at once, and it takes no time. Node j goes on with the step that it
is in: the gradient it is computing is that of the parameters with which it began; at its end it is applied to what
theta_j is then. So the sum of all theta changes by optimizers' steps only.

mix = "after" (the default: step, then average, as above) or "before" (the paper's algorithm 1: the node first averages
with j, then applies its gradient to the mean; j keeps the plain mean).

Node i's step number s, counted from 0 by the node itself, is on `batch(i, s)` and takes `step_seconds(i, s)`. Events
are in the order of time, ties by node. All steps that end at one time are ended, one node after the other, before any
of these nodes begins its next one. `neighbour(i, s)` is asked at the end of step s; i itself means: no average. The
optimizers' state and buffers stay local.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from tests.reference import common
from tests.reference.asynchronous import Begins, Params, clone
from tests.reference.common import Batch, OptimizerSpec, Schedule


@dataclass(frozen=True)
class Step:
    """One step of one node, ended and averaged."""

    time: float
    node: int
    own_step: int
    neighbour: int
    loss: float  # at the parameters with which the step began
    params: Params  # node's, after step and average
    total_steps: int  # of all nodes, this one included


class Swap:
    """The links: a node is in one exchange at a time; it takes the `seconds` of the slower one, and then a latency."""

    def __init__(self, seconds: list[float], latency: list[float]) -> None:
        self.seconds, self.latency = seconds, latency
        self.free = [0.0] * len(seconds)

    def __call__(self, i: int, j: int, ready: float) -> float:
        over = max(ready, self.free[i], self.free[j]) + max(self.seconds[i], self.seconds[j])
        self.free[i] = self.free[j] = over
        return over + max(self.latency[i], self.latency[j])


def ad_psgd(
    model: nn.Module,
    batch: Callable[[int, int], Batch],
    num_nodes: int,
    *,
    total_steps: int,
    neighbour: Callable[[int, int], int],
    step_seconds: Callable[[int, int], float],
    mix: Literal["after", "before"] = "after",
    inner: OptimizerSpec = (torch.optim.SGD, {"lr": 0.1}),
    max_norm: float | None = None,
    schedule: Schedule | None = None,
    swap: Swap | None = None,
    begins: Begins | None = None,
) -> tuple[list[Step], list[nn.Module]]:
    """Run until all nodes together have ended `total_steps` steps."""
    models = common.copy_model(model, num_nodes)
    optimizers = common.make_optimizers(models, inner)
    own_step = [0] * num_nodes
    met = list(range(num_nodes))  # with whom each averages
    losses = [0.0] * num_nodes
    computed: list[tuple[float, int]] = []  # gradients that will be there
    ends: list[tuple[float, int]] = []  # steps that will be over
    steps: list[Step] = []

    def begin(i: int, time: float) -> None:
        """The gradient lies in .grad until the step ends: averages change the parameters only."""
        losses[i] = float(common.backward(models[i], batch(i, own_step[i])))
        common.clip(models[i], max_norm)
        begun = time if begins is None else begins(i, time)
        heapq.heappush(computed, (begun + step_seconds(i, own_step[i]), i))

    def first_end(until: float = math.inf) -> float:
        """The next time at which a step is over; of exchanges only those that begin up to a time are made."""
        while computed and computed[0][0] <= until and (not ends or computed[0] <= ends[0]):
            ready, i = heapq.heappop(computed)
            j = met[i] = neighbour(i, own_step[i])
            if begins is not None and begins(j, ready) > ready:  # it is absent
                j = met[i] = i
            heapq.heappush(ends, (ready if swap is None or j == i else swap(i, j, ready), i))
        return ends[0][0] if ends else math.inf

    def end(i: int, time: float) -> None:
        j = met[i]
        common.set_rate(optimizers[i], schedule, own_step[i])
        if mix == "after":
            optimizers[i].step()
        if j != i:
            common.average_parameters([models[i], models[j]])
        if mix == "before":
            optimizers[i].step()
        theta = clone(common.parameters(models[i]))
        steps.append(Step(time, i, own_step[i], j, losses[i], theta, len(steps) + 1))
        own_step[i] += 1

    for i in range(num_nodes):
        begin(i, 0.0)
    while len(steps) < total_steps:
        now = first_end()
        ended = []
        while first_end(now) == now and len(steps) < total_steps:  # who has ended begins again after them
            _, i = heapq.heappop(ends)
            end(i, now)
            ended.append(i)
        for i in ended:
            begin(i, now)

    return steps, models
