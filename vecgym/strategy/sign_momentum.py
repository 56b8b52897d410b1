"""Sign momentum with local steps: the outer optimizer is Lion, in units of the inner learning rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vecgym.core import tree
from vecgym.core.devices import spread
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec
from vecgym.simulation.simulation import Part
from vecgym.simulation.when import When, as_when
from vecgym.strategy.averages import Mean, Outer
from vecgym.strategy.base import InnerOptions, Strategy, Unpack, takes_options
from vecgym.strategy.exchange import Exchange
from vecgym.strategy.stages import Average, Memory


class InInnerSteps(Outer):
    """`Outer` whose optimizer sees the movement divided by the inner rate, and whose rate is multiplied by it.

    theta_outer <- optim(theta_outer, Delta / gamma; eta gamma), with gamma the strategy's inner learning rate, schedule
    included, at the step at which the result is used: the mean of the nodes' rates, if each has its own, whatever steps
    they have missed. With gamma = 0 the optimizer sees 0, at rate 0.

    Args:
        inner, optim: see `Outer`.
    """

    batched, random, steady = Outer.batched, Outer.random, Outer.steady

    def __init__(self, inner: Average, optim: OptimSpec) -> None:
        super().__init__(inner, optim)

    def receive(self, y: Tree, part: Part, memory: Memory, lr: Any = None) -> Tree:
        gamma = torch.as_tensor(part.algorithm.inner.lr(part.tick, part.run.num_steps), dtype=torch.float64)
        gamma = gamma.mean() if part.size == 1 else gamma  # of all nodes; several configurations have one each, `[C]`
        moves = gamma != 0
        inverse = torch.where(moves, 1 / torch.where(moves, gamma, 1.0), 0.0)
        y = tree.map(lambda delta: spread(inverse, delta) * delta, y)
        return super().receive(y, part, memory, self.rate(part.due.number) * gamma)


class DSMStrategy(Strategy, steady=True):
    """H local steps on every node, then a step of their mean movement's sign, with momentum.

    theta_i <- inner(theta_i, g_i), H times; then, with gamma the inner learning rate of the last of these steps,
    D = mean_i(theta_outer - theta_i) / gamma;  u = beta_1 m + (1 - beta_1) D;
    theta_outer <- (1 - lambda eta gamma) theta_outer - eta gamma sign(u);  m <- beta_2 m + (1 - beta_2) D;
    theta_i <- theta_outer.

    The outer step is Lion's: with a constant gamma this is DiLoCo with
    `OptimSpec("lion", lr=eta * gamma, betas=betas, weight_decay=lambda)`. A schedule of the inner rate moves the outer
    one, too, and m is a mean of movements in units of the rate. With gamma = 0, as in the first step of a warm-up,
    theta_outer stays.

    | kept for | bytes |
    |---|---|
    | all nodes, once | 2 b P: theta_outer, m |
    | each node | theta_i and the inner optimizer's |

    Bytes sent per node and step: 2 (K - 1) / K * b * P / H.

    Args:
        inner_optim: the local optimizer, AdamW when not given.
        H: inner steps per round: a number, a function of the step at which a round begins, or a `When`.
        outer_lr: eta; each coordinate moves by eta gamma in a round.
        betas: (beta_1, beta_2).
        weight_decay: lambda, of the outer step.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: of the inner optimizer; see `Strategy`. If nodes have
            rates of their own, gamma is their mean.

    Raises:
        ValueError: for settings that Lion refuses, and H < 1.

    >>> DSMStrategy("adamw", H=12, lr=1e-3, weight_decay=0.1)
    DSMStrategy(OptimSpec(AdamW, lr=0.001), Exchange(InInnerSteps(Mean(), OptimSpec(Lion, lr=1.0, \
betas=(0.95, 0.98), weight_decay=0.1)), every=12))

    Reference: Yu et al., "Distributed Sign Momentum with Local Steps for Training Transformers", arXiv 2411.17866, and
    github.com/shuhuayu/dist-sign-momentum, fastdt.py, with the defaults of its `fastdt_lion` options; H = 12 is that of
    its examples. Deviations: gamma is the inner optimizer's base rate, where the program takes that of each group of
    parameters; it stops with an error if gamma = 0.
    """

    @takes_options(InnerOptions)
    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        H: int | When | Callable[[int], int] = 12,
        *,
        outer_lr: float | Tensor = 1.0,
        betas: tuple[float | Tensor, float | Tensor] = (0.95, 0.98),
        weight_decay: float | Tensor = 0.2,
        **inner: Unpack[InnerOptions],
    ) -> None:
        optim = OptimSpec("lion", lr=outer_lr, betas=betas, weight_decay=weight_decay)
        super().__init__(inner_optim, [Exchange(InInnerSteps(Mean(), optim), every=as_when(H, "H"))], **inner)
