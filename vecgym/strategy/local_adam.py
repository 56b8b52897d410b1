"""Local Adam and DES-LOC: local steps, then means of the parameters and of the optimizers' moments."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from vecgym.core import check
from vecgym.optim import OptimSpec
from vecgym.strategy.averages import Mean
from vecgym.strategy.base import Strategy
from vecgym.strategy.exchange import DEFAULT_H, Exchange
from vecgym.strategy.settings import InnerOptions, takes_options
from vecgym.strategy.when import When, as_when, interval

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LocalAdamStrategy(Strategy):
    """H local steps of Adam on every node, then the mean of the parameters and of both moments.

    theta_i, u_i, v_i <- Adam(theta_i, u_i, v_i, g_i), H times; then theta_i <- mean_k theta_k, u_i <- mean_k u_k,
    v_i <- mean_k v_k.

    Every node keeps theta and the moments, `[K, *]`: 3 b P, as without an exchange; nothing is kept once for all. Bytes
    sent per node and step: 3 * 2 (K - 1) / K * b * P / H, and as many times for another optimizer as it keeps values of
    the shape of the parameters, plus one.

    Args:
        inner_optim: the local optimizer, AdamW when not given; one that keeps moments.
        H: local steps per round.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: see `Strategy`.

    Raises:
        ValueError: for H < 1; at the first step, for an optimizer that keeps nothing, such as plain SGD.

    >>> LocalAdamStrategy("adam", H=50, lr=1e-3)
    LocalAdamStrategy(OptimSpec(Adam, lr=0.001), Exchange(Mean(), every=50), Exchange(Mean(), every=50, of='moments'))

    Reference: Cheng and Glasgow, "Convergence of Distributed Adaptive Optimization with Local Updates", arXiv
    2409.13155. Deviation: `max_norm` clips a node's whole gradient, where the paper clips each coordinate.
    """

    @takes_options(InnerOptions)
    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        H: int | Callable[[int], int] = DEFAULT_H,
        **inner: Unpack[InnerOptions],
    ) -> None:
        when = as_when(H, "H")
        exchanges = [Exchange(Mean(), every=when), Exchange(Mean(), every=when, of="moments")]
        super().__init__(inner_optim, exchanges, **inner)


class DESLOCStrategy(Strategy):
    """Local steps of Adam on every node; the parameters and the two moments are averaged at periods of their own.

    theta_i, u_i, v_i <- Adam(theta_i, u_i, v_i, g_i); every H steps theta_i <- mean_k theta_k, every Hu steps
    u_i <- mean_k u_k, every Hv steps v_i <- mean_k v_k. The slower a value changes, the more rarely it is exchanged.

    Every node keeps theta and the moments, `[K, *]`: 3 b P, as without an exchange; nothing is kept once for all. Bytes
    sent per node and step: 2 (K - 1) / K * b * P * (1 / H + 1 / Hu + 1 / Hv), so 1 + 1/3 + 1/6 times DiLoCo's.

    Args:
        inner_optim: the local optimizer, AdamW when not given; one with the moments "exp_avg" and "exp_avg_sq".
        H: local steps between two averages of the parameters.
        Hu: of the first moment; 3 H when not given.
        Hv: of the second moment; 6 H when not given.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: see `Strategy`.

    Raises:
        ValueError: for a period < 1; at the first step, for an optimizer without these moments.

    >>> DESLOCStrategy("adam", H=16, lr=1e-3)
    DESLOCStrategy(OptimSpec(Adam, lr=0.001), Exchange(Mean(), every=16), \
Exchange(Mean(), every=48, of='exp_avg'), Exchange(Mean(), every=96, of='exp_avg_sq'))

    Reference: Iacob et al., "DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation Models",
    arXiv 2505.22549. Deviations: `max_norm` clips a node's whole gradient, where the paper clips each coordinate; all
    exchanges follow the local step, and the count by which Adam corrects its bias is each node's own.
    """

    @takes_options(InnerOptions)
    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        H: int | Callable[[int], int] = DEFAULT_H,
        Hu: int | None = None,
        Hv: int | None = None,
        **inner: Unpack[InnerOptions],
    ) -> None:
        own = interval(H, "H")
        if isinstance(own, When) and (Hu is None or Hv is None):
            raise ValueError(f"H={own!r} is no number of which Hu and Hv could be 3 and 6 times as many: give both.")
        periods = {
            "exp_avg": check.optional_integer("Hu", Hu, what="None is 3 H") or 3 * own,
            "exp_avg_sq": check.optional_integer("Hv", Hv, what="None is 6 H") or 6 * own,
        }
        moments = [Exchange(Mean(), every=period, of=slot) for slot, period in periods.items()]
        super().__init__(inner_optim, [Exchange(Mean(), every=as_when(H, "H")), *moments], **inner)
