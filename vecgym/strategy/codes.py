"""What nodes send is a code: an average of codes, with the error fed back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vecgym.collectives.ledger import Ledger
from vecgym.compress import Compressor, PowerSGD, make_codec
from vecgym.compress.codecs import Draw
from vecgym.core import check, tree
from vecgym.core.tree import Tree
from vecgym.strategy.average import Around, Average, Reduction, kept
from vecgym.strategy.base import Context, State

NO_ISLANDS = (
    "What is sent of parameters is their difference to the last average, and only an average of all nodes is the same "
    "on all: average over all nodes (island_size=None, participation=1), or send the parameters as they are "
    "(reference=False), which only methods that keep every value do reasonably: int8, say."
)


class Compressed(Around):
    """What a node sends to `inner` is a code of its values, and what the code leaves out is sent later.

    With e_i the residual of node i, and r the reference:
    p_i = x_i - r + decay e_i;  node i sends C(p_i);  e_i <- p_i - C(p_i);
    the average is r + inner(C(p_1), ..., C(p_K)).

    The residual is *error feedback*: what is not sent now is sent later. With `decay` < 1 it is forgotten in time.
    Without `error_feedback` e = 0: what is not sent is lost.

    With `momentum` = m each node has a momentum of its own before the residual, in place of the optimizer's, so that
    what is sent late has the momentum that it would have had: u_i <- m u_i + x_i - r;  p_i = u_i + decay e_i. Where
    C(p_i) is not 0, u_i <- 0 afterwards (`masking`): what was sent late should not go on in an old direction.

    The reference, if asked for, is the last average, and the initial values before the first. For parameters: their
    code would mean little (top-k would set most of them to 0); that of their movement since the nodes were last the
    same is what is wanted. Only what is the same on every node can be a reference.

    Under differentiation (`not ctx.inplace`) the code passes derivatives straight through: the derivative of C(p) with
    respect to p is taken as 1. The residual and the reference are constants.

    State: `residual` and `momentum`, `[L, *]` (`[1, *]` before the first exchange); `reference`, `[1, *]`; `codec`, its
    own, `[1, *]`.

    Bytes: those of the tensors that the codec makes, see `vecgym.compress.codecs`. They go through one all-gather:
    each node's once to each other node, island by island, or to its neighbours; with a `ServerMean` up to the server,
    and the average down; with PowerSGD through two averages.

    Args:
        inner: `Mean`, `ServerMean`, `Mix` or `Robust`.
        codec: a codec or its name, as in `compressed`.
        error_feedback: whether each node keeps a residual.
        decay: of the residual, in (0, 1].
        momentum: m, in [0, 1); 0 keeps none.
        masking: whether a node's momentum ends where it has sent something.
        reference: whether the difference to the last average is sent.
        purpose: names the random numbers: two averages of the same purpose draw the same.

    Raises:
        ValueError, TypeError: for another `inner`, an unknown codec, a decay or momentum without error feedback,
            RandomK(unbiased=True) and the like with it, a reference or PowerSGD with an average that is not the same
            on all nodes.

    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.compress import TopK
    >>> from vecgym.strategy import Mean
    >>> average, ctx = Compressed(Mean(), TopK(k=1)), Context(StackedCollectives(2))
    >>> x = {"w": torch.tensor([[1.0, 4.0], [8.0, 2.0]])}
    >>> average(x, average.init(x, ctx), ctx)
    ({'w': tensor([[4., 2.]])}, {'residual': {'w': tensor([[1., 0.],
            [0., 2.]])}})

    References: see `compressed`; a residual that decays: Sarfi et al., "Communication Efficient LLM Pre-training with
    SparseLoCo", arXiv 2508.15706; momentum and masking: Lin et al., "Deep Gradient Compression", arXiv 1712.01887.
    Deviation from the latter: the residual is not set to 0 where something was sent, but keeps what the code left out
    there, which for top-k is 0.
    """

    def __init__(
        self,
        inner: Average,
        codec: str | Compressor,
        *,
        error_feedback: bool = True,
        decay: float = 1.0,
        momentum: float = 0.0,
        masking: bool = True,
        reference: bool = False,
        purpose: str = "compress",
    ) -> None:
        self.inner: Reduction = check.instance("inner", inner, Reduction, "Mean(), ServerMean(), Mix() or Robust()")
        self.codec = make_codec(codec)
        self.error_feedback = check.flag("error_feedback", error_feedback)
        self.decay = check.number("decay", decay, "(0, 1]", "what is kept of a residual from one exchange to the next")
        self.reference = check.flag("reference", reference)
        self.purpose = check.instance("purpose", purpose, str, 'a name, such as "compress"')
        check_feedback(self.codec, error_feedback)
        self.momentum = check.number(
            "momentum", momentum, "[0, 1)", "what a node keeps of its own, such as 0.9; 0: none"
        )
        self.masking = check.flag("masking", masking)
        if (decay != 1 or momentum) and not error_feedback:
            given = f"decay={decay}" if decay != 1 else f"momentum={momentum}"
            raise ValueError(f"{given} without error_feedback has no effect: leave one of them out.")
        if not (momentum or masking):
            raise ValueError("masking=False without a momentum has no effect: give momentum=0.9, say, or leave it out.")
        if reference and not self.inner.shared:
            raise ValueError(f"{self!r}: {NO_ISLANDS}")
        if isinstance(self.codec, PowerSGD) and not (self.inner.shared and self.inner.linear):
            raise ValueError(
                f"{self!r}: PowerSGD starts from the average before, which groups of nodes do not share, and "
                "which must be a mean: Mean() or ServerMean()."
            )

    def init(self, values: Tree, ctx: Context) -> State:
        state: State = {}
        if self.error_feedback:
            state["residual"] = tree.map(lambda x: torch.zeros_like(x[:1]), values)
        if self.momentum:
            state["momentum"] = tree.map(lambda x: torch.zeros_like(x[:1]), values)
        if self.reference:
            state["reference"] = _same_on_all(values, ctx)
        if isinstance(self.codec, PowerSGD):
            state["codec"] = self.codec.init(values)
        return state

    def __call__(self, values: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        r, e, m = (constant(state[name]) if name in state else None for name in ("reference", "residual", "momentum"))
        with torch.no_grad():
            x = constant(values)
            d = x if r is None else {name: y - r[name] for name, y in x.items()}
            silent = self.inner.silent(ctx)  # these keep their residual
            inplace = ctx.inplace and silent is None
            u = d if m is None else {name: plus(m[name] * self.momentum, y, inplace) for name, y in d.items()}
            p = d if e is None else {name: self._remembered(e[name], y, inplace) for name, y in u.items()}
            average, sent, codec_state = self._average(p, state.get("codec", {}), ctx)
            new = {**state, "codec": codec_state} if "codec" in state else dict(state)
            if e is not None:  # p is then a tensor of its own, or the residual's
                new["residual"] = {**e, **{name: plus(y, sent[name], True, alpha=-1) for name, y in p.items()}}
                new["residual"] = kept(silent, e, new["residual"])
            if m is not None:
                new["momentum"] = {**m, **kept(silent, m, self._masked(u, sent))}
            average = kept(self.inner.keeping(ctx), d, average)
            if r is not None:
                average = {name: plus(r[name], y, ctx.inplace) for name, y in average.items()}
                new["reference"] = {**r, **tree.map(torch.clone, average)}  # the parameters will be overwritten
        return straight_through(average, values, ctx, lambda told: self.inner(values, {}, told)[0]), new

    def _remembered(self, residual: Tensor, x: Tensor, inplace: bool) -> Tensor:
        """Return x + decay * residual, in the storage of the residual where that is allowed."""
        return plus(residual if self.decay == 1 else residual * self.decay, x, inplace)

    def _masked(self, u: Tree, sent: Tree) -> Tree:
        """Return the momenta, 0 where something was sent."""
        return {name: torch.where(sent[name] == 0, y, 0.0) for name, y in u.items()} if self.masking else u

    def _average(self, p: Tree, state: State, ctx: Context) -> tuple[Tree, Tree, State]:
        """Return the average of what the nodes send of p, what each sends (for its residual), and the codec's state."""
        draws = _draws(self.purpose, ctx)
        if isinstance(self.codec, PowerSGD):
            return self.codec.reduce(p, state, lambda y: self.inner(y, {}, ctx.replace(inplace=False))[0], draws)
        codec = self.codec
        codes = {name: codec.encode(x, draws(name)) for name, x in p.items()}
        average = self.inner.of_codes(codes, codec, p, ctx)
        own = {name: codec.decode(codes[name], x) for name, x in p.items()} if self.error_feedback else {}
        return average, own, state


def coded(average: Average, codec: Compressor, **options: Any) -> Average | None:
    """Put `Compressed` around the innermost average in `average`. None: that one cannot be taken of codes.

    >>> from vecgym.strategy import Mean, Sparse
    >>> coded(Sparse(0.1, Mean()), make_codec("int8"))
    Sparse(RandomSelector(p=0.1), Compressed(Mean(), Quantise(bits=8, stochastic=False)))
    """
    if isinstance(average, Reduction):
        return Compressed(average, codec, **options)
    if isinstance(average, Compressed) or not isinstance(average, Around):
        return None
    inner = coded(average.inner, codec, **options)
    return None if inner is None else average.around(inner)


def check_feedback(codec: Compressor, error_feedback: bool) -> None:
    """Raise a ValueError for a codec that error feedback would make diverge.

    >>> check_feedback(make_codec("randomk", unbiased=True), error_feedback=False)
    """
    if error_feedback and not codec.contractive:
        raise ValueError(
            f"{codec!r} sends more than there is, so that its expectation is right, and error feedback then sends the "
            "excess back, ever larger: give error_feedback=False, or unbiased=False."
        )


def constant(values: Tree) -> Tree:
    """Detach the values: `no_grad` alone stops the derivatives of reverse mode only."""
    return tree.map(Tensor.detach, values)


def straight_through(read: Tree, values: Tree, ctx: Context, smooth: Callable[[Context], Tree]) -> Tree:
    """Give what was read from codes the derivatives of `smooth(ctx)`, an exchange of the values, if any are taken.

    Nobody sends derivatives: the context that `smooth` is told has a ledger of its own.
    """
    if ctx.inplace or not any(map(tree.differentiated, values.values())):
        return read
    comm = copy.copy(ctx.comm)
    comm.ledger = Ledger()
    exact = smooth(ctx.replace(comm=comm))
    return {name: x + (exact[name] - exact[name].detach()) for name, x in read.items()}


def _draws(purpose: str, ctx: Context) -> Callable[[str], Draw]:
    """Return the random numbers of each tensor in this step, by its name."""
    return lambda name: Draw(lambda *ids: ctx.generator(f"{purpose} {name}", ctx.step, *ids), ctx.comm.ids)


def _same_on_all(params: Tree, ctx: Context) -> Tree:
    """Return the parameters as `[1, *]`: those of node 0 where the nodes begin differently."""
    if any(len(p) > 1 for p in params.values()):
        params = ctx.comm.broadcast(params, src=0)
    return tree.map(lambda p: p.detach().clone(), params)


def plus(a: Tensor, b: Tensor, inplace: bool, alpha: float = 1) -> Tensor:
    """Return a + alpha b, in the storage of a where that is allowed and possible."""
    fits = inplace and a.shape == torch.broadcast_shapes(a.shape, b.shape)
    return a.add_(b, alpha=alpha) if fits else torch.add(a, b, alpha=alpha)
