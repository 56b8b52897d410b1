"""SparseLoCo: DiLoCo whose movements are the largest of each chunk, in two bits (Sarfi et al., arXiv 2508.15706)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vecgym.compress import Chain, ChunkedTopK, StatQuantise
from vecgym.compress.codecs import Averaged
from vecgym.optim import OptimSpec
from vecgym.strategy.averages import Mean, Outer
from vecgym.strategy.base import Strategy
from vecgym.strategy.coded import Compressed
from vecgym.strategy.exchange import Exchange
from vecgym.strategy.inner import InnerOptions, takes_options
from vecgym.strategy.when import as_when

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
