"""NoLoCo: an outer step with a random partner, and no all-reduce (Kolehmainen et al., arXiv 2506.10911)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vecgym.optim import OptimSpec
from vecgym.strategy.averages import NoLoCo
from vecgym.strategy.base import Strategy
from vecgym.strategy.exchange import Exchange
from vecgym.strategy.inner import InnerOptions, takes_options
from vecgym.strategy.when import When, as_when

if TYPE_CHECKING:
    from typing_extensions import Unpack


class NoLoCoStrategy(Strategy):
    """H local steps on every node, then an outer step with a random partner: nobody waits for all.

    theta_i <- inner(theta_i, g_i), H times; then, with Delta_j = theta_j - phi_j in random groups of n nodes,
    delta_i <- mu delta_i + (eta / n) sum_group Delta_j - gamma (phi_i - mean_group phi);
    phi_i <- phi_i + delta_i;  theta_i <- phi_i.

    In groups of one size, the mean of phi over the nodes moves as with a heavy ball in DiLoCo, and gamma brings the
    nodes together. With one group of all nodes phi is the same on each: that is DiLoCo with a heavy ball.

    | kept                   | shape    | bytes                                        |
    |------------------------|----------|----------------------------------------------|
    | theta, inner optimizer | `[K, *]` | per node: b P and the optimizer's            |
    | phi, delta             | `[K, *]` | per node: 2 b P; of one group once, `[1, *]` |

    Bytes sent per node and step: 2 b P / H in pairs, 4 (n - 1) / n b P / H in groups of n.

    Args:
        inner_optim: the local optimizer, AdamW when not given.
        H: inner steps per round.
        group_size: n, the nodes that take an outer step together.
        outer_lr, momentum, gamma: eta, mu and gamma; see `NoLoCo`. The authors' code has gamma = eta.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: of the inner optimizer; see `Strategy`.

    Raises:
        ValueError: see `NoLoCo`.

    >>> NoLoCoStrategy("adamw", H=50, lr=3e-4)
    NoLoCoStrategy(OptimSpec(AdamW, lr=0.0003), \
Exchange(NoLoCo(), every=50))

    Reference: Kolehmainen et al., "NoLoCo: No-all-reduce Low Communication Training Method for Large Models", arXiv
    2506.10911, and github.com/gensyn-ai/noloco, src/noloco/sparse_optimizer_c.py, whose gamma is its outer learning
    rate: gamma=0.7 is what its runs have, with outer_lr 0.7, momentum 0.5 and H 50. Deviations: the movement is counted
    upwards, Delta = theta - phi, so that its term has a plus; gamma is 1 unless it is given, in the middle of the
    paper's bounds (for pairs and mu = 0.5: 0.5 and 1.5); pipeline stages and the random routes
    between them are not part of it; a node that is left alone in its group goes on with its own movement.
    """

    @takes_options(InnerOptions)
    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        H: int | When | Callable[[int], int] = 50,
        group_size: int = 2,
        *,
        outer_lr: float | Tensor = 0.7,
        momentum: float | Tensor = 0.5,
        gamma: float | Tensor = 1.0,
        **inner: Unpack[InnerOptions],
    ) -> None:
        average = NoLoCo(group_size, outer_lr, momentum, gamma)
        super().__init__(inner_optim, [Exchange(average, every=as_when(H, "H"))], **inner)
