"""Scaffnew: one gradient step after another, and an average where a coin says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vecgym.core import check, rng, tree
from vecgym.core.objects import altered
from vecgym.core.tree import Tree
from vecgym.optim import OptimSpec
from vecgym.simulation.simulation import Part
from vecgym.simulation.timetable import Mark, RunFacts
from vecgym.strategy.averages import Mean
from vecgym.strategy.base import InnerOptions, Strategy, Unpack, takes_options
from vecgym.strategy.exchange import Exchange
from vecgym.strategy.federated.base import plain_sgd, quotient
from vecgym.strategy.stages import Memory


class ScaffnewStrategy(Strategy, batched=(), random=True):
    """Scaffnew: SGD with a correction on every node; after a step, with probability p, all nodes average.

    x_i <- theta_i - gamma (g_i - h_i) at each step. One coin for all is thrown: with probability p,
    theta_i <- mean_k x_k and h_i <- h_i + (p / gamma) (theta_i - x_i); otherwise theta_i <- x_i.

    h_i = 0 at first; the sum of all h_i stays 0. At rest h_i is the gradient of node i: nodes with non-IID data reach
    the optimum of the mean loss. With p = 1 this is gradient descent; p = 1 / sqrt(kappa), kappa the condition number,
    needs as few steps, up to a factor, and averages in a fraction p of them. No node waits: the rounds have random
    lengths, 1 / p steps in the mean.

    Memory per node: h_i, b P. Bytes sent per node and step: p times those of an all-reduce, 2 (K - 1) / K * b * P.

    gamma in the update of h_i is the rate of the run's step, and the mean over the nodes if these have their own, so
    that the sum stays 0. Where it is 0, h_i stays. Absent nodes keep their h_i, and the mean is over the others.

    Args:
        inner_optim: "sgd", or an `OptimSpec` of SGD with a rate and a weight decay, which is a part of the gradient.
        p: the probability of an average after a step, in (0, 1].
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: see `Strategy`; `max_norm` clips g_i - h_i.

    Raises:
        ValueError: for p outside (0, 1], another optimizer, a momentum, or groups of parameters.

    >>> ScaffnewStrategy("sgd", p=0.2, lr=0.1)
    ScaffnewStrategy(OptimSpec(SGD, lr=0.1), Exchange(Mean()), p=0.2)

    Reference: Mishchenko, Malinovsky, Stich and Richtárik, "ProxSkip: Yes! Local Gradient Steps Provably Lead to
    Communication Acceleration! Finally!", arXiv 2202.09357, algorithm 2. No program of the authors was found.
    Deviations: the mean is of the x_k, and not of x_k - (gamma / p) h_k, which is the same since the h_k sum to 0, but
    for absent nodes; schedules; p has a default.
    """

    @takes_options(InnerOptions)
    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        p: float = 0.1,
        **inner: Unpack[InnerOptions],
    ) -> None:
        self.p = check.number("p", p, "(0, 1]", "the probability of an average after a step")
        spec = plain_sgd(inner_optim, None, "Scaffnew")
        super().__init__(spec, [Exchange(Mean())], **inner)

    def averages(self, run: RunFacts, step: int) -> bool:
        """Whether the coin says that the nodes average after a step.

        >>> [ScaffnewStrategy(p=0.5).averages(RunFacts(num_nodes=4, seed=1), step) for step in range(4)]
        [True, False, True, False]
        """
        return float(torch.rand((), generator=rng.generator(run.seed, "coin", step))) < self.p

    def marks(self, run: RunFacts) -> list[Mark]:
        def who(step: int, rows: Sequence[int]) -> Sequence[int]:
            return rows if self.averages(run, step) else ()

        return [mark._replace(who=who) for mark in super().marks(run)]

    def agreed(self, run: RunFacts, names: Sequence[str], tick: int) -> set[str]:
        return super().agreed(run, names, tick) if tick >= 0 and self.averages(run, tick) else set()

    def init(self, run: RunFacts, params: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
        own, shared = super().init(run, params)
        return {**own, "correction": tree.map(torch.zeros_like, params)}, shared

    def train(self, part: Part) -> None:
        grads = tree.map(torch.sub, part.gradients(), part.own["correction"])
        part.missing = {}  # the correction is of every parameter
        part.optimize(grads)
        part.report(part.losses)

    def meet(self, part: Part) -> None:
        lr = self.inner.lr(part.tick, part.run.num_steps)
        gamma = lr.mean() if isinstance(lr, Tensor) and part.size == 1 else lr
        mean = self.exchanges[0].how.agree(part.params, altered(part, inplace=False), Memory())

        def learned(h: Tensor, x: Tensor, theta: Tensor) -> Tensor:
            return h + self.p * quotient(theta - x, gamma)

        part.own["correction"] = tree.map(learned, part.own["correction"], part.params, mean)
        part.params = mean
