"""Eager DiLoCo: what the other nodes did is used a round later (Kale et al., arXiv 2502.12996)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vecgym.compress import Compressor
from vecgym.optim import OptimSpec
from vecgym.strategy.averages import Eager, Mean, outer_spec
from vecgym.strategy.base import Strategy
from vecgym.strategy.coded import Compressed
from vecgym.strategy.exchange import DEFAULT_H, Exchange
from vecgym.strategy.inner import InnerOptions, inner_rate, takes_options
from vecgym.strategy.when import as_when

if TYPE_CHECKING:
    from typing_extensions import Unpack


class EagerDiLoCoStrategy(Strategy):
    """DiLoCo that uses what the other nodes did a round later, and what a node itself did at once.

    After every H steps, with Delta_i(t) = theta_outer,i - theta_i of round t, all nodes are sent Delta_i(t), and do not
    wait for the mean. Each takes the step
    Delta~_i(t) = mean_j Delta_j(t - 1) + (Delta_i(t) - Delta_i(t - 1)) / K;  Delta(-1) = 0;
    theta_outer,i <- outer_i(theta_outer,i, Delta~_i(t));  theta_i <- theta_outer,i.

    So the exchange of a round may last as long as the next one. Nodes have different outer parameters; the mean of the
    Delta~ is Delta(t) / K + (1 - 1 / K) Delta(t - 1). One node is DiLoCo. The exchange of the last round is lost.
    Evaluated is the mean of the nodes' parameters.

    Bytes sent per node and step: 2 (K - 1) / K * b * P / H.

    | kept for | bytes |
    |---|---|
    | all nodes, once | none |
    | each node | 3 b P: outer parameters, momentum (SGD's), what the others did |

    Args:
        inner_optim: the local optimizer, AdamW when not given.
        outer_optim: SGD(lr=0.7, momentum=0.9, nesterov=True) when not given, or given as "sgd".
        H: inner steps per round; the outer step follows every H-th optimizer step. Also a function of the step at which
            a round begins.
        lr, inner_lr: two names for the inner learning rate.
        outer_lr: the outer learning rate.
        compression: how each node sends its movement; see `DiLoCoStrategy`.
        max_norm, lr_scheduler, warmup_steps, cosine_anneal: of the inner optimizer; see `Strategy`.

    Raises:
        ValueError, TypeError: saying what is allowed.

    >>> EagerDiLoCoStrategy("adamw", H=50, lr=3e-4)
    EagerDiLoCoStrategy(OptimSpec(AdamW, lr=0.0003), \
Exchange(Eager(Mean()), every=50))
    >>> from vecgym import Trainer
    >>> from vecgym.models import Line
    >>> trainer, strategy = Trainer(Line(), torch.ones(64)), EagerDiLoCoStrategy("sgd", H=4, lr=0.1)
    >>> averaged = trainer.fit(strategy, num_nodes=2, max_steps=8, batch_size=4, device="cpu", progress=False)
    >>> [(entry.step, entry.transfer.lag) for entry in trainer.ledger]  # what is sent may take as long as a round
    [(3, 4), (7, 4)]

    Reference: Kale et al., "Eager Updates For Overlapped Communication and Computation in DiLoCo", arXiv 2502.12996.
    No deviation.
    """

    @takes_options(InnerOptions)
    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        outer_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        H: int | Callable[[int], int] = DEFAULT_H,
        *,
        inner_lr: float | Tensor | None = None,
        outer_lr: float | Tensor | None = None,
        compression: str | Compressor | None = None,
        **inner: Unpack[InnerOptions],
    ) -> None:
        inner["lr"] = inner_rate(inner.get("lr"), inner_lr)
        average = Mean() if compression is None else Compressed(Mean(), compression, purpose="compress parameters")
        eager = Eager(average, outer_spec(outer_optim, outer_lr))
        super().__init__(inner_optim, [Exchange(eager, every=as_when(H, "H"))], **inner)
