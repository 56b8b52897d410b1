"""DiLoCo: many local steps, then one step of an outer optimizer (Douillard et al., arXiv 2311.08105)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vecgym.compress import Chain, ChunkedTopK, Compressor, StatQuantise
from vecgym.compress.codecs import Averaged
from vecgym.optim import OptimSpec
from vecgym.strategy.averages import Average, Correction, Eager, Mean, NoLoCo, Outer, outer_spec
from vecgym.strategy.base import Strategy
from vecgym.strategy.coded import Compressed
from vecgym.strategy.exchange import DEFAULT_H, Exchange
from vecgym.strategy.settings import InnerOptions, inner_rate, takes_options
from vecgym.strategy.when import SyncWeight, When, as_when, make_sync_weight

if TYPE_CHECKING:
    from typing_extensions import Unpack


class DiLoCoStrategy(Strategy):
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
        average: how the nodes agree on their movements, such as `Robust("median")`; None: `Mean()`.
        compression: how each node sends its movement theta_outer - theta_i: "topk", "int8", "qsgd" and the
            others of `Compressed`, or a codec of `vecgym.compress` such as `TopK(0.05)`; with error feedback.
            None: as it is.
        correction: of the movements, before they are averaged: "heloco", "median_norm", or a function; see
            `Outer`. None: none.
        max_norm, lr_scheduler, warmup_steps, cosine_anneal: of the inner optimizer; see `Strategy`.

    >>> DiLoCoStrategy("adamw", "sgd", H=100, lr=3e-4)
    DiLoCoStrategy(OptimSpec(AdamW, lr=0.0003), \
Exchange(Outer(Mean()), every=100))

    Reference: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv
    2311.08105. No deviation.
    """

    @takes_options(InnerOptions)
    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        outer_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        H: int | Callable[[int], int] = DEFAULT_H,
        *,
        sync_weight: Tensor | Sequence[float] | SyncWeight | None = None,
        inner_lr: float | Tensor | None = None,
        outer_lr: float | Tensor | None = None,
        average: Average | None = None,
        compression: str | Compressor | None = None,
        correction: str | Correction | None = None,
        **inner: Unpack[InnerOptions],
    ) -> None:
        inner["lr"] = inner_rate(inner.get("lr"), inner_lr)
        average = Mean() if average is None else average
        if compression is not None:
            average = Compressed(average, compression, purpose="compress parameters")
        weight = make_sync_weight(sync_weight, H, DEFAULT_H)
        outer = Outer(average, outer_spec(outer_optim, outer_lr), correct=correction)
        super().__init__(inner_optim, [Exchange(outer, every=as_when(H, "H") if weight is None else weight)], **inner)


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


class SparseLoCoStrategy(Strategy):
    """H local steps, then the largest movements of each chunk, in two bits; what is left out is sent later.

    theta_i <- inner(theta_i, g_i), H times; then Delta_i = theta - theta_i;
    e_i <- decay e_i + Delta_i;  D_i = Q(TopK(e_i));  e_i <- e_i - D_i;
    theta <- theta - outer_lr mean_i D_i;  theta_i <- theta.

    TopK takes the k largest of each chunk of 64 x 64 values of a matrix, of 4096 of a vector (`ChunkedTopK`). Q reads
    them as the mean of their bin, of 4 bins that reach 3 standard deviations to either side (`StatQuantise`). There is
    no outer momentum: the residual e_i does its work, and is forgotten by and by, since decay < 1.

    Payload per node and round: k (bits + 12) / 8 bytes per chunk, which for k = 64 of 4096 are 0.21875 bits per
    parameter, 146 times less than float32, and 4 * 2^bits per tensor for the means of its bins. It goes to each of the
    K - 1 others; through a store, as Templar's nodes do it, up once: `Network(all_gather="server")`.

    Memory: e_i is each node's, `[K, *]`; theta is stored once, `[1, *]`; the inner optimizer's state is each node's.

    Args:
        inner_optim: the local optimizer, AdamW when not given.
        H: inner steps per round.
        k: values sent of each chunk.
        chunk: the longest side of a chunk.
        bits: 8, 4 or 2 for each value; None sends them as they are.
        decay: of the residual, in (0, 1].
        outer_lr: a number, or a tensor that takes derivatives.
        average: over what a coordinate is averaged: "all" nodes, a value that was not sent counting as 0, as in the
            paper; or only its "senders", as in the code, where a movement that one node has alone counts in full.
        lr, max_norm, lr_scheduler, warmup_steps, cosine_anneal: of the inner optimizer; see `Strategy`.

    Raises:
        ValueError: for H, k or chunk < 1, other bits, a decay outside (0, 1], another average.

    >>> SparseLoCoStrategy("adamw", H=15, lr=3e-4, average="senders")
    SparseLoCoStrategy(OptimSpec(AdamW, lr=0.0003), Exchange(Outer(Compressed(Mean(), \
Chain(first=ChunkedTopK(k=64, chunk=64, over='senders'), second=StatQuantise(bits=2, sigmas=6.0)), decay=0.95), \
optim=OptimSpec(SGD, lr=1.0)), every=15))

    References: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", arXiv 2508.15706;
    github.com/tplr-ai/templar. Deviations: a place takes as many bits as its chunk needs, fewer than 12 where that is
    small; no share of the nodes is left out of a round, nor weighted by its norm, as on a network of strangers.
    """

    @takes_options(InnerOptions)
    def __init__(
        self,
        inner_optim: str | OptimSpec | type[torch.optim.Optimizer] | None = None,
        H: int | Callable[[int], int] = 30,
        *,
        k: int = 64,
        chunk: int = 64,
        bits: int | None = 2,
        decay: float = 0.95,
        outer_lr: float | Tensor = 1.0,
        average: Averaged = "all",
        **inner: Unpack[InnerOptions],
    ) -> None:
        largest = ChunkedTopK(k, chunk, average)
        codec = largest if bits is None else Chain(largest, StatQuantise(bits))
        outer = Outer(Compressed(Mean(), codec, decay=decay), OptimSpec(torch.optim.SGD, lr=outer_lr))
        super().__init__(inner_optim, [Exchange(outer, every=as_when(H, "H"))], **inner)
