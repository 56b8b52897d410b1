"""SPARTA: at every step the nodes average a small random part of their parameters (openreview stFPf3gzq1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vecgym.compress import Quantise, check_bits
from vecgym.core import check
from vecgym.optim import OptimSpec
from vecgym.strategy.averages import Average, Mean, Outer, outer_spec
from vecgym.strategy.base import Strategy
from vecgym.strategy.coded import Compressed
from vecgym.strategy.coordinates import MostMoved, Sparse
from vecgym.strategy.exchange import Exchange
from vecgym.strategy.inner import InnerOptions, takes_options
from vecgym.strategy.selectors import RandomSelector, Selector, check_rate
from vecgym.strategy.when import Rounds, as_when, check_interval

if TYPE_CHECKING:
    from typing_extensions import Unpack

METHODS = ("random", "topk")

DEFAULT_RATE = 0.005  # EXO Gym's


def SparseCommunicator(  # the name that EXO Gym's users know
    index_selector: Selector | float | None = None,
    *,
    sparsification_rate: float | None = None,
    delay: int = 0,
    correct_delay: bool = False,
    interval: int = 1,
    quantization_bits: int | None = None,
) -> Exchange:
    """Return the exchange in which, every `interval` steps, theta_i[M] <- mean_j theta_j[M] on drawn coordinates M.

    M is the same on every node and comes from the seed, so it costs no bytes. With `delay` = d the mean taken at step
    t is written at step t + d, over whatever the nodes hold on M_t by then; within a step the late mean is written
    after the new one is taken. What is still under way when the run ends is lost.

    With `correct_delay` what a node has moved since then is kept:
    theta_i(t + d)[M] <- mean_j theta_j(t)[M] + theta_i(t + d)[M] - theta_i(t)[M].

    Bytes sent per node and exchange: 2 (K - 1) / K * b * m for m selected coordinates; with `quantization_bits` the
    values go to each of the K - 1 others instead: m + 4 bytes per tensor with 8 bits, ceil(m / 2) + 4 with 4.

    Args:
        index_selector: a `Selector`, such as `PartitionedSelector(0.01)`; a number is the p of a `RandomSelector`.
        sparsification_rate: another name for this number; 0.01 when neither is given.
        delay: optimizer steps until the mean is written.
        correct_delay: whether what a node has moved in between is added to it.
        interval: optimizer steps between two exchanges.
        quantization_bits: each node sends its values in 8 or 4 bits, with one scale per tensor; None: as they are.

    Raises:
        ValueError, TypeError: for rates outside [0, 1], delay < 0, interval < 1, other bits, a rate that is not the
            selector's, and `correct_delay` without a delay.

    >>> SparseCommunicator(0.02, delay=3)
    Exchange(Sparse(RandomSelector(p=0.02), Mean()), delay=3)
    """
    if isinstance(index_selector, (int, float)):
        index_selector = RandomSelector(check_rate("sparsification_rate", index_selector))
    selector = _selector(index_selector, "sparsification_rate", sparsification_rate, default=0.01)
    inner: Average = Mean()
    if quantization_bits is not None:
        codec = Quantise(check_bits("quantization_bits", quantization_bits))
        inner = Compressed(inner, codec, error_feedback=False)
    if check.flag("correct_delay", correct_delay) and not delay:
        raise ValueError("correct_delay=True without a delay has no effect: give delay=1, or more, or leave it out.")
    when = Rounds(interval, name="interval")
    return Exchange(Sparse(selector, inner), every=when, delay=delay, late="change" if correct_delay else "value")


class SPARTAStrategy(Strategy):
    """After every optimizer step, the nodes average a small random part of their parameters.

    theta_i <- inner(theta_i, g_i); then, for a mask M of about p P coordinates, the same on all nodes,
    theta_i[M] <- 1/K sum_j theta_j[M].

    Inner optimizer state stays on its node. Bytes sent per node and step: 2 (K - 1) / K * b * p * P.

    Args:
        p_sparta: the probability of each coordinate to be exchanged in a step; 0.005 when not given.
        inner_optim: the local optimizer, AdamW when not given.
        index_selector: another choice of the coordinates, instead of `RandomSelector(p_sparta)`.
        delay: asynchronous SPARTA: the mean of a step is written that many steps later; see `SparseCommunicator`.
        correct_delay: LOSCAR: what a node has moved in these steps is added to it.
        compression_method: "topk": each node sends the coordinates that moved most instead of random ones; see
            `MostMoved`. "random", or None: SPARTA itself.
        quantization_bits: send the values in 8 or 4 bits; None: as they are.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: see `Strategy`.

    Raises:
        ValueError, TypeError: for a rate outside [0, 1], delay < 0, other methods or bits, for `correct_delay` without
            a delay, and for an `index_selector` or `delay` with "topk".

    >>> SPARTAStrategy(p_sparta=0.001, inner_optim="adamw", lr=1e-4)
    SPARTAStrategy(OptimSpec(AdamW, lr=0.0001), Exchange(Sparse(RandomSelector(p=0.001), Mean())))
    >>> SPARTAStrategy(p_sparta=0.005, compression_method="topk", quantization_bits=8)
    SPARTAStrategy(OptimSpec(AdamW), Exchange(MostMoved(bits=8)))

    Reference: "Improving the Efficiency of Distributed Training using Sparse Parameter Averaging",
    openreview stFPf3gzq1. Deviation: the mask comes from a seed that the nodes share; nobody sends it. The correction
    of the delay: arXiv 2605.20866.
    """

    @takes_options(InnerOptions)
    def __init__(
        self,
        p_sparta: float | None = None,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        *,
        index_selector: Selector | None = None,
        delay: int = 0,
        correct_delay: bool = False,
        compression_method: str | None = None,
        quantization_bits: int | None = None,
        **inner: Unpack[InnerOptions],
    ) -> None:
        module = _exchange(p_sparta, index_selector, delay, correct_delay, compression_method, quantization_bits)
        super().__init__(inner_optim, [module], **inner)


class SPARTADiLoCoStrategy(Strategy):
    """SPARTA every `sparta_interval` steps, and DiLoCo every H.

    theta_i <- inner(theta_i, g_i); every `sparta_interval` steps theta_i[M] <- mean_j theta_j[M]; every H steps
    Delta = mean_i(theta_outer - theta_i), theta_outer <- outer(theta_outer, Delta), theta_i <- theta_outer.

    At a step with both, SPARTA comes first. With `delay`, what SPARTA has under way at an outer step is still written
    after it. Bytes sent per node and step: 2 (K - 1) / K * b * P * (p / sparta_interval + 1 / H).

    Args:
        p_sparta: the probability of each coordinate to be exchanged; 0.005 when not given.
        sparta_interval: optimizer steps between two sparse exchanges.
        H: optimizer steps between two outer steps.
        inner_optim: the local optimizer, AdamW when not given.
        outer_optim: SGD(lr=0.7, momentum=0.9, nesterov=True) when not given, or given as "sgd".
        index_selector, delay, correct_delay: see `SPARTAStrategy`.
        lr: the inner learning rate.
        outer_lr: the outer learning rate.
        max_norm, lr_scheduler, warmup_steps, cosine_anneal: of the inner optimizer; see `Strategy`.

    >>> SPARTADiLoCoStrategy(p_sparta=0.005, sparta_interval=2, H=50, inner_optim="adamw", lr=3e-4)
    SPARTADiLoCoStrategy(OptimSpec(AdamW, lr=0.0003), Exchange(Sparse(RandomSelector(p=0.005), Mean()), every=2), \
Exchange(Outer(Mean()), every=50))

    References: openreview stFPf3gzq1 and arXiv 2311.08105. Deviation from EXO Gym: there `sparta_interval` has no
    effect, and the outer step comes after H + 1 steps the first time.
    """

    @takes_options(InnerOptions)
    def __init__(
        self,
        p_sparta: float | None = None,
        sparta_interval: int = 1,
        H: int | Callable[[int], int] = 100,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        outer_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        *,
        index_selector: Selector | None = None,
        delay: int = 0,
        correct_delay: bool = False,
        outer_lr: float | Tensor | None = None,
        **inner: Unpack[InnerOptions],
    ) -> None:
        selector = _selector(index_selector, "p_sparta", p_sparta, DEFAULT_RATE)
        check_interval("sparta_interval", sparta_interval)
        sparse = SparseCommunicator(selector, delay=delay, correct_delay=correct_delay, interval=sparta_interval)
        diloco = Exchange(Outer(Mean(), outer_spec(outer_optim, outer_lr)), every=as_when(H, "H"))
        super().__init__(inner_optim, [sparse, diloco], **inner)


def _selector(selector: Selector | None, name: str, rate: float | None, default: float) -> Selector:
    """Return the selector given, or a random one of this rate."""
    if selector is None:
        return RandomSelector(default if rate is None else check_rate(name, rate))
    if not isinstance(selector, Selector):
        raise TypeError(
            f"index_selector={selector!r} is a {type(selector).__name__}; give a Selector, such as "
            "PartitionedSelector(0.01)."
        )
    if rate is not None and rate != selector.p:
        raise ValueError(
            f"{name}={rate!r} and index_selector={selector!r} say different things about what is exchanged: "
            "give one of them."
        )
    return selector


def _exchange(
    p_sparta: float | None,
    index_selector: Selector | None,
    delay: int,
    correct_delay: bool,
    compression_method: str | None,
    quantization_bits: int | None,
) -> Exchange:
    """Return the module that exchanges after every step."""
    if compression_method not in (None, *METHODS):
        allowed = ", ".join(map(repr, METHODS))
        raise ValueError(
            f"compression_method={compression_method!r} is not known; allowed: {allowed}, or None. Any average can "
            "be compressed: Compressed(average, codec)."
        )
    if compression_method == "topk":
        if index_selector is not None or delay != 0 or correct_delay:
            raise ValueError(
                'compression_method="topk" chooses the coordinates by itself and exchanges at once: leave out '
                "index_selector and delay, and so correct_delay."
            )
        bits = None if quantization_bits is None else check_bits("quantization_bits", quantization_bits)
        return Exchange(MostMoved(DEFAULT_RATE if p_sparta is None else p_sparta, bits))
    selector = _selector(index_selector, "p_sparta", p_sparta, DEFAULT_RATE)
    return SparseCommunicator(selector, delay=delay, correct_delay=correct_delay, quantization_bits=quantization_bits)
