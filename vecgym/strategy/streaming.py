"""Streaming DiLoCo: fragments of the model are exchanged in turn, while the nodes go on (arXiv 2501.18512)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vecgym.compress import E3M0
from vecgym.compress.codecs import Codec, WideQuantise
from vecgym.core import check
from vecgym.optim import OptimSpec
from vecgym.strategy.averages import Mean, Outer, outer_spec
from vecgym.strategy.base import Strategy
from vecgym.strategy.coded import Compressed
from vecgym.strategy.exchange import DEFAULT_H, Exchange
from vecgym.strategy.fragments import Fragments, Pattern
from vecgym.strategy.settings import InnerOptions, inner_rate, takes_options
from vecgym.strategy.when import as_when

if TYPE_CHECKING:
    from typing_extensions import Unpack

OUTER_LR = 0.4
Delay = int | Sequence[int]
Bits = int | str


class StreamingDiLoCoStrategy(Strategy):
    """DiLoCo of one fragment of the model at a time, whose exchange takes place while the nodes go on.

    The model is cut into fragments p = 0, ... F - 1. At step t with (t - t_p) mod H = 0, t counted from 1:
    Delta_p = mean_i(theta_outer,p - theta_i,p) is sent. tau steps later, and for each fragment by itself,
    theta_outer,p <- outer(theta_outer,p, Delta_p);  theta_i,p <- alpha theta_i,p + (1 - alpha) theta_outer,p.

    With alpha = 0 what a node did to a fragment in the tau steps is given up; with alpha = 1 the others have no
    influence. With `bits` each node sends a code of its movement, which is averaged in float32. One fragment, tau = 0
    and alpha = 0 are DiLoCo. What is under way when the run ends is lost. Evaluated is the mean of the nodes'
    parameters; the outer ones are in the state.

    Bytes sent per node and step: 2 (K - 1) / K * b * P / H, at most one fragment's in a step (unless `offsets`
    coincide); with `bits`, to each of the others, (K - 1) P bits / 8 / H, and 4 bytes per tensor.

    | kept for | bytes |
    |---|---|
    | all nodes, once | 2 b P: outer parameters and momentum (SGD's); b P' while P' parameters are under way |
    | each node | none |

    Args:
        inner_optim: the local optimizer, AdamW when not given.
        outer_optim: SGD(lr=0.4, momentum=0.9, nesterov=True) when not given, or given as "sgd".
        H: inner steps between two exchanges of a fragment: a number, or a function of the step at which a round begins,
            in which each fragment has its turn.
        num_fragments: F, with that of what is outside of the transformer blocks: embedding, last norm, head. A block is
            what a number stands for in the names of the parameters, as in `h.3.attn.weight`; a model without numbers
            is cut by its modules. No more than there are. 1 is the whole model; None: three blocks to a fragment.
        fragments: in its place, lists of names of parameters or modules, or a function from a parameter's name to 0, 1,
            ...: each parameter is in one fragment.
        pattern: "strided": block l is in fragment l mod F, with the one outside not counted; "sequential": blocks in a
            row are together.
        offsets: t_p of each fragment, floor((p + 1) H / F) when not given.
        delay: tau < H, one number or one for each node.
        alpha: in [0, 1]; a number, or `[K]`.
        bits: 4 or "e3m0": `vecgym.compress.E3M0`; 8: integers with a scale, as `Quantise(8)`; None: as it is.
        lr, inner_lr: two names for the inner learning rate.
        outer_lr: the outer learning rate.
        max_norm, lr_scheduler, warmup_steps, cosine_anneal: of the inner optimizer; see `Strategy`.

    Raises:
        ValueError, TypeError: saying what is allowed.

    >>> StreamingDiLoCoStrategy("adamw", H=100, num_fragments=4, bits=4, lr=3e-4)
    StreamingDiLoCoStrategy(OptimSpec(AdamW, lr=0.0003), Exchange(Outer(Compressed(Mean(), E3M0(), \
error_feedback=False), optim=OptimSpec(SGD, lr=0.4, momentum=0.9, nesterov=True)), every=100, delay=1, keep=0.5, \
fragments=4))
    >>> from vecgym import Trainer
    >>> from vecgym.models import Classifier
    >>> model = Classifier(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)))
    >>> trainer = Trainer(model, torch.utils.data.TensorDataset(torch.randn(64, 4), torch.arange(64) % 2))
    >>> strategy = StreamingDiLoCoStrategy("sgd", H=6, num_fragments=2, delay=2, lr=0.1)
    >>> averaged = trainer.fit(strategy, num_nodes=2, max_steps=12, batch_size=4, device="cpu", progress=False)
    >>> [(entry.step, entry.transfer.lag, entry.transfer.tensors) for entry in trainer.ledger][:2]
    [(2, 2, ('net.0.weight', 'net.0.bias')), (5, 2, ('net.1.weight', 'net.1.bias'))]

    Reference: Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch",
    arXiv 2501.18512. Deviations: `bits=8` are integers; the paper's fragments are found by its layers, here by names.
    Two programs have other phases: torchft sends fragment p first after floor((p + 1) H / F) - tau steps; MaxText,
    with s = H / F, fragment 0 after F s and p after p s. Both are `offsets`.
    """

    @takes_options(InnerOptions)
    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        outer_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        H: int | Callable[[int], int] = DEFAULT_H,
        num_fragments: int | None = None,
        *,
        fragments: Fragments | None = None,
        pattern: Pattern = "strided",
        offsets: Sequence[int] | None = None,
        delay: Delay = 1,
        alpha: float | Tensor = 0.5,
        bits: Bits | None = None,
        inner_lr: float | Tensor | None = None,
        outer_lr: float | Tensor | None = None,
        **inner: Unpack[InnerOptions],
    ) -> None:
        inner["lr"] = inner_rate(inner.get("lr"), inner_lr)
        if num_fragments is not None and fragments is not None:
            raise ValueError(
                f"num_fragments={num_fragments!r} and fragments both say how the model is cut: give one of them."
            )
        self._alpha = check.per_node("alpha", alpha, "[0, 1]", "what a node keeps of its own")
        codec = codec_of(bits)
        number = check.optional_integer("num_fragments", num_fragments, what="None is three blocks to a fragment")
        average = Mean() if codec is None else Compressed(Mean(), codec, error_feedback=False)
        exchange = Exchange(
            Outer(average, outer_spec(outer_optim, outer_lr, OUTER_LR)),
            every=as_when(H, "H"), delay=delay, keep=alpha, fragments=number if fragments is None else fragments,
            pattern=pattern, offsets=offsets,
        )  # fmt: skip
        if not callable(H):
            check_below(exchange.delay, H)
        super().__init__(inner_optim, [exchange], **inner)

    def check(self, num_nodes: int, max_steps: int) -> None:
        check.per_node("alpha", self._alpha, num_nodes=num_nodes)
        super().check(num_nodes, max_steps)


def codec_of(bits: Bits | None) -> Codec | None:
    """Return the code in which movements are sent; None: they are sent as they are.

    >>> codec_of(4), codec_of("e3m0"), codec_of(8), codec_of(None)
    (E3M0(), E3M0(), WideQuantise(bits=8, stochastic=False), None)
    """
    if bits is None:
        return None
    if (isinstance(bits, str) and bits == "e3m0") or (check.is_integer(bits) and bits == 4):
        return E3M0()
    if check.is_integer(bits) and bits == 8:
        return WideQuantise(8)
    raise ValueError(f'bits={bits!r} is not possible: movements are sent in 4 bits ("e3m0"), 8, or None: as they are.')


def check_below(delay: int | tuple[int, ...], H: int) -> None:
    """Raise a ValueError unless a fragment arrives before it is sent again.

    >>> check_below(3, H=3)
    Traceback (most recent call last):
    ...
    ValueError: delay=3 must be smaller than H=3: a fragment arrives before it is sent again. Give a smaller delay, or \
a larger H.
    """
    largest = delay if isinstance(delay, int) else max(delay)
    if largest >= H:
        raise ValueError(
            f"delay={largest} must be smaller than H={H}: a fragment arrives before it is sent again. Give a smaller "
            "delay, or a larger H."
        )
