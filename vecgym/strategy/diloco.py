"""DiLoCo: many local steps, then a step of an outer optimizer (Douillard et al., arXiv 2311.08105).

Eager DiLoCo has another average, and Streaming DiLoCo another schedule of exchanges. Other relatives are in
`vecgym.strategy.local_steps`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vecgym.compress import E3M0, Compressor
from vecgym.compress.codecs import Codec, Quantise
from vecgym.core import check
from vecgym.optim import OptimSpec
from vecgym.simulation.when import SyncWeight, When, as_when, rounds_or_weights
from vecgym.strategy.averages import Eager, Mean, Outer, outer_spec
from vecgym.strategy.base import InnerOptions, Strategy, Unpack, inner_rate, takes_options
from vecgym.strategy.coded import Compressed
from vecgym.strategy.corrections import Correction
from vecgym.strategy.exchange import DEFAULT_H, Exchange
from vecgym.strategy.fragments import Fragments, Pattern
from vecgym.strategy.stages import Average

STREAMING_OUTER_LR = 0.4


class DiLoCoStrategy(Strategy, steady=True):
    """H local steps on every node, then one step of an outer optimizer on their mean movement.

    theta_i <- inner(theta_i, g_i), H times; then Delta = mean_i(theta_outer - theta_i),
    theta_outer <- outer(theta_outer, Delta), theta_i <- theta_outer.

    With the paper's outer optimizer: m <- mu m + Delta; theta_outer <- theta_outer - eta (Delta + mu m). Inner
    optimizer state stays on its node and is kept across rounds. Bytes sent per node and step:
    2 (K - 1) / K * b * P / H.

    Args:
        inner_optim: the local optimizer, AdamW when not given.
        outer_optim: SGD(lr=0.7, momentum=0.9, nesterov=True) when not given, or given as "sgd".
        H: inner steps per round; the outer step follows every H-th optimizer step. A function of the step gives the
            steps of the round that begins there.
        sync_weight: `[T]`, in place of H: how far the outer step is taken after each inner step; see `SyncWeight`.
        lr, inner_lr: two names for the inner learning rate.
        outer_lr: the outer learning rate.
        average: the average of the movements, such as `Robust("median")`; None: `Mean()`.
        compression: the code of each node's movement, with error feedback: "topk", "int8", "qsgd" and the others of
            `Compressed`, or a codec of `vecgym.compress` such as `TopK(0.05)`; None: no code.
        correction: of the movements before they are averaged: "heloco", "median_norm", or a function; see `Outer`.
        restart: S: the outer momentum is 0 again after every S outer steps (arXiv 2605.28585); see `Outer`.
        private: parameters that stay on their node, such as "head.*"; see `Exchange`.
        max_norm, lr_scheduler, warmup_steps, cosine_anneal: of the inner optimizer; see `Strategy`.

    >>> DiLoCoStrategy("adamw", "sgd", H=100, lr=3e-4)
    DiLoCoStrategy(OptimSpec(AdamW, lr=0.0003), Exchange(Outer(Mean()), every=100))

    Reference: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv
    2311.08105. No deviation.
    """

    @takes_options(InnerOptions)
    def __init__(
        self, inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        outer_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        H: int | When | Callable[[int], int] = DEFAULT_H, *,
        sync_weight: Tensor | Sequence[float] | SyncWeight | None = None, inner_lr: float | Tensor | None = None,
        outer_lr: float | Tensor | None = None, average: Average | None = None,
        compression: str | Compressor | None = None, correction: str | Correction | None = None,
        restart: int | None = None, private: str | Sequence[str] = (), **inner: Unpack[InnerOptions],
    ) -> None:  # fmt: skip
        inner["lr"] = inner_rate(inner.get("lr"), inner_lr)
        average = Mean() if average is None else average
        if compression is not None:
            average = Compressed(average, compression, purpose="compress parameters")
        when = rounds_or_weights(H, sync_weight, usual=DEFAULT_H)
        outer = Outer(average, outer_spec(outer_optim, outer_lr), correct=correction, restart=restart)
        super().__init__(inner_optim, [Exchange(outer, every=when, private=private)], **inner)


class EagerDiLoCoStrategy(Strategy, steady=True):
    """DiLoCo that uses the movements of the other nodes a round late, and a node's own at once.

    After every H steps, with Delta_i(t) = theta_outer,i - theta_i of round t, every node sends Delta_i(t), and does not
    wait for the mean. It takes the step
    Delta~_i(t) = mean_j Delta_j(t - 1) + (Delta_i(t) - Delta_i(t - 1)) / K;  Delta(-1) = 0;
    theta_outer,i <- outer_i(theta_outer,i, Delta~_i(t));  theta_i <- theta_outer,i.

    So the exchange of a round may last as long as the next round. Nodes have different outer parameters; the mean of
    the Delta~ is Delta(t) / K + (1 - 1 / K) Delta(t - 1). With one node this is DiLoCo. The exchange of the last round
    is lost. The mean of the nodes' parameters is evaluated.

    Bytes sent per node and step: 2 (K - 1) / K * b * P / H.

    | kept for | bytes |
    |---|---|
    | all nodes, once | none |
    | each node | 3 b P: outer parameters, momentum (SGD's), the movements of the other nodes |

    Args:
        inner_optim: the local optimizer, AdamW when not given.
        outer_optim: SGD(lr=0.7, momentum=0.9, nesterov=True) when not given, or given as "sgd".
        H: inner steps per round; the outer step follows every H-th optimizer step. Also a function of the step at which
            a round begins.
        lr, inner_lr: two names for the inner learning rate.
        outer_lr: the outer learning rate.
        compression: the code of each node's movement; see `DiLoCoStrategy`.
        max_norm, lr_scheduler, warmup_steps, cosine_anneal: of the inner optimizer; see `Strategy`.

    >>> EagerDiLoCoStrategy("adamw", H=50, lr=3e-4)
    EagerDiLoCoStrategy(OptimSpec(AdamW, lr=0.0003), Exchange(Eager(Mean()), every=50))
    >>> from vecgym import Trainer
    >>> from vecgym.models import Line
    >>> trainer, strategy = Trainer(Line(), torch.ones(64)), EagerDiLoCoStrategy("sgd", H=4, lr=0.1)
    >>> averaged = trainer.fit(strategy, num_nodes=2, max_steps=8, batch_size=4, device="cpu", progress=False)
    >>> [(entry.step, entry.transfer.lag) for entry in trainer.ledger]  # messages may take as long as a round
    [(3, 4), (7, 4)]

    Reference: Kale et al., "Eager Updates For Overlapped Communication and Computation in DiLoCo", arXiv 2502.12996.
    No deviation.
    """

    @takes_options(InnerOptions)
    def __init__(
        self, inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        outer_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        H: int | When | Callable[[int], int] = DEFAULT_H, *,
        inner_lr: float | Tensor | None = None, outer_lr: float | Tensor | None = None,
        compression: str | Compressor | None = None, **inner: Unpack[InnerOptions],
    ) -> None:  # fmt: skip
        inner["lr"] = inner_rate(inner.get("lr"), inner_lr)
        average = Mean() if compression is None else Compressed(Mean(), compression, purpose="compress parameters")
        eager = Eager(average, outer_spec(outer_optim, outer_lr))
        super().__init__(inner_optim, [Exchange(eager, every=as_when(H, "H"))], **inner)


class StreamingDiLoCoStrategy(Strategy, steady=True):
    """DiLoCo on one fragment of the model at a time, exchanged while the nodes keep training.

    The model is cut into fragments p = 0, ... F - 1. At step t with (t - t_p) mod H = 0, t counted from 1:
    Delta_p = mean_i(theta_outer,p - theta_i,p) is sent. tau steps later, and for each fragment separately,
    theta_outer,p <- outer(theta_outer,p, Delta_p);  theta_i,p <- alpha theta_i,p + (1 - alpha) theta_outer,p.

    With alpha = 0 a node loses its progress on the fragment in the tau steps; with alpha = 1 the other nodes have no
    influence. With `bits` each node sends a code of its movement, which is averaged in float32. One fragment, tau = 0
    and alpha = 0 are DiLoCo. Messages under way at the end of the run are lost. The mean of the nodes' parameters is
    evaluated; the outer parameters are in the state.

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
        num_fragments: F, including a fragment for embedding, last norm and head, outside of the transformer blocks.
            Blocks have a number in the names of their parameters, as in `h.3.attn.weight`; a model without numbers is
            cut by its modules. At most one fragment per block; 1: the whole model; None: three blocks per fragment.
        fragments: in its place, lists of names of parameters or modules, or a function from a parameter's name to 0, 1,
            ...: each parameter is in one fragment.
        pattern: "strided": block l is in fragment l mod F, not counting the fragment outside of the blocks;
            "sequential": neighbouring blocks are together.
        offsets: t_p of each fragment, floor((p + 1) H / F) when not given.
        delay: tau < H, one number or one for each node.
        alpha: in [0, 1]; a number, or `[K]`.
        bits: 4 or "e3m0": `vecgym.compress.E3M0`; 8: integers with a scale, as `Quantise(8)`; None: no code.
        lr, inner_lr: two names for the inner learning rate.
        outer_lr: the outer learning rate.
        max_norm, lr_scheduler, warmup_steps, cosine_anneal: of the inner optimizer; see `Strategy`.

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
    Two programs begin at other steps: torchft sends fragment p first after floor((p + 1) H / F) - tau steps; MaxText,
    with s = H / F, fragment 0 after F s and p after p s. `offsets` can express both.
    """

    @takes_options(InnerOptions)
    def __init__(
        self, inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        outer_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        H: int | When | Callable[[int], int] = DEFAULT_H, num_fragments: int | None = None, *,
        fragments: Fragments | None = None, pattern: Pattern = "strided", offsets: Sequence[int] | None = None,
        delay: int | Sequence[int] = 1, alpha: float | Tensor = 0.5, bits: int | str | None = None,
        inner_lr: float | Tensor | None = None, outer_lr: float | Tensor | None = None, **inner: Unpack[InnerOptions],
    ) -> None:  # fmt: skip
        inner["lr"] = inner_rate(inner.get("lr"), inner_lr)
        if num_fragments is not None and fragments is not None:
            raise ValueError(
                f"num_fragments={num_fragments!r} and fragments both say how the model is cut: give one of them."
            )
        self._alpha = check.per_node("alpha", alpha, "[0, 1]", "the fraction of its own values that a node keeps")
        codec = codec_of(bits)
        number = check.optional_integer("num_fragments", num_fragments, what="None is three blocks per fragment")
        average = Mean() if codec is None else Compressed(Mean(), codec, error_feedback=False)
        exchange = Exchange(
            Outer(average, outer_spec(outer_optim, outer_lr, STREAMING_OUTER_LR)),
            every=as_when(H, "H"), delay=delay, keep=alpha, fragments=number if fragments is None else fragments,
            pattern=pattern, offsets=offsets,
        )  # fmt: skip
        if isinstance(exchange.every, int) and (longest := exchange.delivery.longest) >= exchange.every:
            raise ValueError(
                f"delay={longest} must be smaller than H={H}: a fragment arrives before it is sent again. Give "
                "a smaller delay, or a larger H."
            )
        super().__init__(inner_optim, [exchange], **inner)

    def check(self, num_nodes: int, max_steps: int) -> None:
        check.per_node("alpha", self._alpha, num_nodes=num_nodes)
        super().check(num_nodes, max_steps)


def codec_of(bits: int | str | None) -> Codec | None:
    """Return the codec of movements; None: they are sent without a code.

    >>> codec_of(4), codec_of("e3m0"), codec_of(8), codec_of(None)
    (E3M0(), E3M0(), Quantise(bits=8, stochastic=False), None)
    """
    if bits is None:
        return None
    if (isinstance(bits, str) and bits == "e3m0") or (check.is_integer(bits) and bits == 4):
        return E3M0()
    if check.is_integer(bits) and bits == 8:
        return Quantise(8)
    raise ValueError(f'bits={bits!r} must be 4 (also "e3m0") or 8, the bits of a code of movements; None: no code.')
