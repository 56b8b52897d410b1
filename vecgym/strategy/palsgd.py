"""PALSGD: DiLoCo with random steps towards the outer parameters (Naganuma et al., arXiv 2504.18454)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vecgym.core import check, rng, tree
from vecgym.optim import OptimSpec
from vecgym.simulation.simulation import Part, spread
from vecgym.simulation.timetable import Mark, RunFacts, Who
from vecgym.strategy.averages import Mean, Outer, outer_spec
from vecgym.strategy.base import Strategy
from vecgym.strategy.exchange import DEFAULT_H, Exchange
from vecgym.strategy.settings import InnerOptions, takes_options
from vecgym.strategy.when import When, as_when

if TYPE_CHECKING:
    from typing_extensions import Unpack


class PALSGDStrategy(Strategy):
    """DiLoCo whose nodes, at random steps, go towards the outer parameters instead of along a gradient.

    At each step of a node, with probability p: theta_i <- theta_i - (gamma / p) c (theta_i - theta_outer); otherwise
    theta_i <- inner(theta_i, g_i) with the learning rate gamma / (1 - p). Every H steps: Delta = mean_i(theta_outer -
    theta_i), theta_outer <- outer(theta_outer, Delta), theta_i <- theta_outer.

    The nodes stay near one another without a byte, so that H may be larger. p = 0 is DiLoCo.

    | kept                            | shape    | bytes                                        |
    |---------------------------------|----------|----------------------------------------------|
    | theta, inner optimizer          | `[K, *]` | per node: b P and the optimizer's            |
    | theta_outer, the outer momentum | `[1, *]` | once for all: 2 b P                          |

    Bytes sent per node and step: 2 (K - 1) / K * b * P / H.

    Args:
        inner_optim: the local optimizer, AdamW when not given. Its learning rate is gamma; the history has
            gamma / (1 - p), the rate of the steps with a gradient.
        p: the probability of a step towards the outer parameters, in [0, 1).
        pull: c, how strong such a step is, one for all or one for each node.
        outer_optim: SGD(lr=0.7, momentum=0.9, nesterov=True) when not given, or given as "sgd".
        H: steps per round, of both kinds.
        outer_lr: the outer learning rate.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: of the inner optimizer; see `Strategy`.

    Raises:
        ValueError: for p outside [0, 1), pull < 0, H < 1.

    >>> PALSGDStrategy("adamw", p=0.2, H=64, lr=1e-3)
    PALSGDStrategy(OptimSpec(AdamW, lr=0.001), Exchange(Outer(Mean()), every=64), p=0.2)

    Reference: Naganuma et al., "Pseudo-Asynchronous Local SGD: Robust and Efficient Data-Parallel Training", arXiv
    2504.18454. Deviation: with `vecgym.availability.LocalSteps`, a node that waits for the exchange is drawn too. The
    defaults of p, pull and H are ours: no program of the authors was found to compare with.
    """

    own_numbers = ("pull",)

    @takes_options(InnerOptions)
    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        p: float = 0.1,
        H: int | When | Callable[[int], int] = DEFAULT_H,
        outer_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        *,
        pull: float | Tensor = 1.0,
        outer_lr: float | Tensor | None = None,
        **inner: Unpack[InnerOptions],
    ) -> None:
        self.p = check.number("p", p, "[0, 1)", "the probability of a step towards the outer parameters")
        self.pull = check.per_node("pull", pull, "[0, inf)", "how strong such a step is")
        exchange = Exchange(Outer(Mean(), outer_spec(outer_optim, outer_lr)), every=as_when(H, "H"))
        super().__init__(inner_optim, [exchange], **inner)

    def check(self, num_nodes: int, max_steps: int) -> None:
        check.per_node("pull", self.pull, num_nodes=num_nodes)
        super().check(num_nodes, max_steps)

    def drawn(self, run: RunFacts, step: int, rows: Sequence[int]) -> list[bool]:
        """Return which of the present nodes go towards the outer parameters in a step.

        >>> PALSGDStrategy(p=0.5).drawn(RunFacts(num_nodes=4, seed=1), 1, range(4))
        [False, True, True, False]
        """
        draws = torch.rand(len(rows), generator=rng.generator(run.seed, "pull", step))
        drawn: list[bool] = (draws < self.p).tolist()
        return drawn

    def trains(self, run: RunFacts) -> Who | None:
        if not self.p:
            return None
        return lambda step, rows: [row for row, pulled in zip(rows, self.drawn(run, step, rows)) if not pulled]

    def marks(self, run: RunFacts) -> list[Mark]:
        who = lambda step, rows: [row for row, pulled in zip(rows, self.drawn(run, step, rows)) if pulled]  # noqa: E731
        return [*([Mark("approach", who=who)] if self.p else []), *super().marks(run)]

    def train(self, part: Part) -> None:
        part.optimize(part.gradients(), part.lr / (1 - self.p))
        part.report(part.losses)

    def approach(self, part: Part) -> None:
        """Move nodes towards the outer parameters."""
        share = part.lr / (1 - self.p) * ((1 - self.p) / self.p)
        outer = self.outer_parameters(part.shared, list(part.params))

        def pulled(x: Tensor, to: Tensor) -> Tensor:
            return x - spread(share, x) * part.each(self.pull, x) * (x - to)

        part.params = tree.map(pulled, part.params, outer)

    def rates(self, timetable: Any, tick: int, nodes: Sequence[int] | None = None) -> tuple[Any, Any]:
        lr, outer_lr = super().rates(timetable, tick, nodes)
        return lr / (1 - self.p), outer_lr
