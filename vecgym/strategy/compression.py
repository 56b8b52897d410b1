"""Compression of any exchange, with error feedback, and exchanges that are compressed by themselves.

`compressed(module, "topk")` makes every average that a communication module takes a compressed one;
`TopKSparseCommunicator` is sparse averaging of what moved most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from vecgym.collectives import Collectives
from vecgym.collectives.topology import Groups
from vecgym.compress import Compressor, Quantise, check_bits, check_fraction, make_codec
from vecgym.compress.codecs import index_dtype, part_of
from vecgym.compress.dct import mean_of_senders, strongest
from vecgym.core import check, tree
from vecgym.core.tree import Tree
from vecgym.strategy import contract
from vecgym.strategy.average import Mean, Rule, ServerMean, decode_all, flat, gathered_codes
from vecgym.strategy.base import CommunicationModule, Context, State, overrides
from vecgym.strategy.codes import (
    NO_ISLANDS,
    Compressed,
    OfPurpose,
    check_feedback,
    constant,
    straight_through,
    unrecorded,
)
from vecgym.strategy.modules import Exchange
from vecgym.strategy.when import SyncWeight

PHASES = {"gradients": contract.exchange_gradients, "parameters": contract.exchange_parameters}


def compressed(
    module: CommunicationModule,
    method: str | Compressor,
    *,
    error_feedback: bool = True,
    reference: bool | None = None,
    **options: Any,
) -> CommunicationModule:
    """`module`, with the average that it takes in an exchange compressed.

    Where the module calls `ctx.comm.mean(x)`, node i sends C(p_i) instead of x_i: p_i = x_i - r + e_i;
    e_i <- p_i - C(p_i); the mean is r + 1/K sum_i C(p_i), over all nodes or over i's island, weighted if the
    module's is.

    e is the *residual* (error feedback): what is not sent now is sent later. So the sum of what a node sent, plus
    its residual, is the sum of what it had to send. Without `error_feedback` e = 0: what is not sent is lost.

    r is the *reference*, for modules that average the parameters themselves: the last average, and the initial
    parameters before the first. The code of parameters would mean little (top-k would set most of them to 0); that
    of their movement since the nodes were last the same is what is wanted. Only what is the same on every node can
    be a reference, so there are no islands with it, nor nodes that sit out. By default there is a reference
    when the module keeps no state with which it could compare the parameters itself: `AveragingCommunicator` gets
    one; `DiLoCoCommunicator`, which averages theta_outer - theta_i, and gradients do not.

    Under differentiation (`not ctx.inplace`) the code passes derivatives straight through: the derivative of C(p)
    with respect to p is taken as 1, so that the mean is r + C with the derivatives of the plain mean of x. The residual
    and the reference are constants.

    State: `module`, the module's; for each phase in which it acts (`gradients`, `parameters`) the `residual`, `[L, *]`
    (`[1, *]` before the first exchange), the `reference`, `[1, *]`, and the `codec`'s own, PowerSGD's Q, `[1, *]`.

    Bytes: those of the tensors that the codec makes, see `vecgym.compress.codecs`, at every exchange. They go through
    one all-gather, in which every node takes part (with islands too: each then reads the codes of its own); with
    `"powersgd"` through two averages.

    Args:
        module: one that averages by `ctx.comm.mean`, once per exchange, a tree of the parameters' names and shapes
            (of any, without error feedback and reference), such as `GradientAveraging()`.
        method: "topk", "randomk", "int8", "int4", "sign" or "powersgd", or a codec of `vecgym.compress.codecs`.
        error_feedback: whether each node keeps a residual.
        reference: whether the difference to the last average is sent; None: see above.
        options: of the method: topk: fraction or k; randomk: fraction, unbiased; int8, int4: stochastic; powersgd:
            rank.

    Raises:
        ValueError, TypeError: for an unknown method or option; for `unbiased` with error feedback; for a reference with
            islands; in a run for a module that uses another collective than `mean`, or that twice in an exchange.

    >>> from vecgym.strategy import DiLoCoCommunicator
    >>> compressed(DiLoCoCommunicator(H=50, outer_lr=1.0), "topk", fraction=0.05)
    compressed(DiLoCoCommunicator(outer_optim=OptimSpec(SGD, lr=1.0, momentum=0.9, nesterov=True), H=50), \
TopK(fraction=0.05, k=None), error_feedback=True)

    References: error feedback: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al.,
    "Error Feedback Fixes SignSGD", arXiv 1901.09847. Deviations: what is fed back is the error of x, not of the
    learning rate times x; the sum of the codes is sent back to nobody compressed again.
    """
    if not isinstance(module, CommunicationModule):
        raise TypeError(
            "compressed(module, method) takes a CommunicationModule, such as GradientAveraging(), not the "
            f"{type(module).__name__} {module!r}."
        )
    codec = make_codec(method, **options)
    check.flag("error_feedback", error_feedback)
    if reference is not None:
        check.flag("reference", reference)
    check_feedback(codec, error_feedback)
    return _Compressed(module, codec, error_feedback, reference)


def with_compression(module: CommunicationModule, compression: str | Compressor | None) -> CommunicationModule:
    """`module` itself for None; else `compressed(module, compression)`: for an argument of a strategy.

    >>> from vecgym.strategy import GradientAveraging
    >>> with_compression(GradientAveraging(), "int8")
    compressed(GradientAveraging(), Quantise(bits=8, stochastic=False), error_feedback=True)
    """
    return module if compression is None else compressed(module, compression)


def quantised(values: Tree, bits: int, ctx: Context, *, stochastic: bool = False) -> Tree:
    """The mean over all nodes of values that each node sends in 8 or 4 bits: `[L, m]` -> `[1, m]`.

    In the place of `ctx.comm.mean(values)`. One scale per tensor and node; no error feedback. Bytes per tensor:
    m + 4 or ceil(m / 2) + 4. Derivatives pass straight through, as in `compressed`.

    >>> from vecgym.collectives import StackedCollectives
    >>> ctx = Context(StackedCollectives(2))
    >>> quantised({"w": torch.tensor([[127.0, 20.4], [127.0, 41.0]])}, 8, ctx), ctx.comm.ledger.total_bytes
    ({'w': tensor([[127.0000,  30.5000]])}, 6.0)
    """
    codec = Quantise(check_bits("bits", bits), stochastic)
    return OfPurpose("quantised", Mean(), codec, error_feedback=False)(values, {}, ctx)[0]


class TopKSparseCommunicator(CommunicationModule):
    """Every step, each node sends those of its parameters that moved most, and these are averaged.

    I_i = the k coordinates of each tensor with the largest |theta_i - last_i|;  for every coordinate c that any
    node sent: theta_j[c] <- the mean of theta_i[c] over the nodes i that sent c, on all nodes j; last_j[c] <- the
    same. Other coordinates stay each node's own, and so do their `last`: a coordinate that moves slowly is sent once
    it has moved far enough.

    State: `last`, the last average of each coordinate, the same on every node, `[1, *]`; at first the initial
    parameters. Bytes per tensor of n values and step: k (b + 4), k = max(1,
    round(fraction n)); with 8 bits k (1 + 4) + 4; with 4 bits ceil(k / 2) + 4 k + 4. For an exchange every n-th step:
    `every(n, TopKSparseCommunicator(...))`.

    Under differentiation the choice of coordinates is a constant, and quantised values pass derivatives straight
    through.

    Args:
        fraction: of each tensor, in (0, 1].
        quantization_bits: send the values in 8 or 4 bits, one scale per tensor and node; None: as they are.

    Raises:
        ValueError: for a fraction outside (0, 1] and for other bits.

    >>> TopKSparseCommunicator(0.005, quantization_bits=8)
    TopKSparseCommunicator(fraction=0.005, quantization_bits=8)

    Reference: no paper defines it. It is vecgym's reading of EXO Gym's documents, which offer
    `SPARTAStrategy(compression_method='topk', quantization_bits=8)`; their code has no such arguments.
    """

    def __init__(self, fraction: float = 0.005, quantization_bits: int | None = None) -> None:
        self.fraction = check_fraction("fraction", fraction)
        if quantization_bits is not None:
            check_bits("quantization_bits", quantization_bits)
        self.quantization_bits = quantization_bits

    def init(self, params: Tree, ctx: Context) -> State:
        return {"last": params}

    def exchange_parameters(self, params: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        last = state["last"]
        indices = {name: self._moved_most(p.detach(), last[name]) for name, p in params.items()}
        values = {name: flat(params[name]).expand(len(at), -1).gather(1, at) for name, at in indices.items()}
        received = self._gather(values, ctx)  # [1, K, k]
        sent = ctx.comm.all_gather({name: at.to(index_dtype(_size(params[name]))) for name, at in indices.items()})
        new, kept = {}, {}
        for name, p in params.items():
            at, n = sent[name].long(), _size(p)
            mean = mean_of_senders(at[:, :, None], received[name][:, :, None], n).view(len(at), *p.shape[1:])
            touched = torch.zeros(len(at), n, dtype=torch.bool, device=p.device).scatter_(1, at.flatten(1), True)
            touched = touched.view(len(at), *p.shape[1:])  # [1, *]
            new[name] = torch.where(touched, mean, p)
            kept[name] = torch.where(touched, mean, last[name]).detach()
        return new, {"last": kept}

    def _moved_most(self, p: Tensor, last: Tensor) -> Tensor:
        """The coordinates that a node sends: `[L, k]`."""
        movement = flat(p - last)
        return strongest(movement, part_of(movement.shape[1], self.fraction))

    def _gather(self, values: Tree, ctx: Context) -> Tree:
        """What every node reads of the values `[L, k]` of all: `[1, K, k]`."""
        if self.quantization_bits is None:
            return ctx.comm.all_gather(values)
        codec = Quantise(self.quantization_bits)
        with torch.no_grad():
            codes = {name: codec.encode(x) for name, x in constant(values).items()}
            received = gathered_codes(codes, codec, ctx.comm.all_gather)
            read = {name: decode_all(code, codec, values[name]) for name, code in received.items()}
        return read if ctx.inplace else straight_through(read, unrecorded(ctx.comm).all_gather(values))


# ------------------------------------------------------------------------------------------ around a whole module


class _Compressed(CommunicationModule):
    """See `compressed`. `mean_gradient` stays False: what is compressed is each node's own gradient."""

    passes_on = True

    def __init__(
        self, module: CommunicationModule, codec: Compressor, error_feedback: bool, reference: bool | None
    ) -> None:
        self.module = module
        self.codec = codec
        self.error_feedback = error_feedback
        self.reference = reference
        if reference and "parameters" not in _phases(module):
            raise ValueError(f"reference=True: {module!r} exchanges no parameters. Leave it out.")
        if isinstance(module, Exchange):  # all others are found out at their first exchange
            self._check_exchange(module)

    def _check_exchange(self, module: Exchange) -> None:
        if isinstance(module.when, SyncWeight) and not module.when.binary:
            raise ValueError(
                f"{module!r} exchanges in part, and what was sent of a code, its residual and its reference have no "
                "part: compress a module whose sync_weight is 0 or 1 and does not require grad, or that has H."
            )
        if isinstance(module.average, ServerMean) and not module.average.everyone:
            raise ValueError(
                f"{module!r} averages at a server, and only an average among nodes can be compressed: give "
                'participation=1, or resting="keep" together with reference=False.'
            )
        if self.reference is not False and isinstance(module.average, Rule) and not module.average.shared:
            raise ValueError(f"{module!r}: {NO_ISLANDS}")

    def check(self, num_nodes: int, max_steps: int) -> None:
        self.module.check(num_nodes, max_steps)

    def init(self, params: Tree, ctx: Context) -> State:
        inner = self.module.init({name: p.clone() for name, p in params.items()}, ctx)
        compares = any(x.numel() for x in tree.leaves(inner))
        state: State = {"module": inner}
        for phase in _phases(self.module):
            reference = phase == "parameters" and (not compares if self.reference is None else self.reference)
            state[phase] = self._average(phase, Mean(), reference).init(params, ctx)
        return state

    def active_nodes(self, ctx: Context) -> list[int] | None:
        return self.module.active_nodes(ctx)

    def local_gradients(self, grads: Tree, params: Tree, state: State, ctx: Context) -> Tree:
        return self.module.local_gradients(grads, params, state["module"], ctx)

    def exchange_gradients(self, grads: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        return self._exchange("gradients", grads, state, ctx)

    def exchange_parameters(self, params: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        return self._exchange("parameters", params, state, ctx)

    def outer_learning_rate(self, ctx: Context) -> float | Tensor | None:
        return self.module.outer_learning_rate(ctx)

    def _average(self, phase: str, rule: Rule, reference: bool) -> Compressed:
        return OfPurpose(f"compress {phase}", rule, self.codec, error_feedback=self.error_feedback, reference=reference)

    def _exchange(self, phase: str, given: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        """The module's exchange, with collectives of which nothing is left but one `mean`, a compressed one."""
        if phase not in state:
            return given, state
        after: State | None = None

        def mean(
            x: Tree, groups: Groups | None = None, weights: Sequence[float] | None = None, inplace: bool = False
        ) -> Tree:
            nonlocal after
            if after is not None:
                raise ValueError(refusal("mean a second time in one exchange"))
            self._check(x, given, state[phase], phase, groups)
            average = self._average(phase, _Asked(groups, weights), "reference" in state[phase])
            result, after = average(x, state[phase], ctx)
            return result

        def refusal(name: str) -> str:
            return (
                f"{self!r}: the module calls ctx.comm.{name}. Only an exchange that consists of one ctx.comm.mean can "
                "be compressed: that of GradientAveraging, AveragingCommunicator or DiLoCoCommunicator, say."
            )

        comm = cast(Collectives, contract.Restricted(ctx.comm, refusal, mean=mean))
        result, changed = PHASES[phase](self.module, given, state["module"], replace(ctx, comm=comm))
        return result, {**state, "module": changed, phase: state[phase] if after is None else after}

    def _check(self, x: Any, given: Tree, state: State, phase: str, groups: Groups | None) -> None:
        """Raise a ValueError for an average that has no compressed form."""
        if not isinstance(x, dict):
            raise ValueError(f"{self!r}: the module averages a tensor; compressed(...) takes trees, {{name: tensor}}.")
        if groups is not None and "reference" in state:
            raise ValueError(f"{self!r} averages within groups of nodes. {NO_ISLANDS}")
        for kind in ("residual", "reference"):
            other = [name for name, y in x.items() if kind in state and y.shape[1:] != _shape(state[kind].get(name))]
            if other:
                option = "error_feedback" if kind == "residual" else "reference"
                raise ValueError(
                    f"{self!r}: the module averages {other[0]} of shape {list(x[other[0]].shape[1:])}, which is no "
                    f"parameter as a whole, and there is a {kind} for those only: give {option}=False."
                )
        itself = phase == "parameters" and any(x.get(name) is y for name, y in given.items())
        if itself and self.reference is None and "reference" not in state:
            raise ValueError(
                f"{self!r}: the module keeps a state, yet it averages the parameters themselves: give reference=True "
                "to send their difference to the last average, or reference=False to send them as they are."
            )

    def __repr__(self) -> str:
        chosen = "" if self.reference is None else f", reference={self.reference}"
        return f"compressed({self.module!r}, {self.codec!r}, error_feedback={self.error_feedback}{chosen})"


class _Asked(Mean):
    """The mean that a module asks for: over these groups, with these weights."""

    def __init__(self, groups: Groups | None, weights: Sequence[float] | None) -> None:
        super().__init__()
        self._groups, self._weights = groups, weights

    @property
    def shared(self) -> bool:  # type: ignore[override]
        return self._groups is None

    def groups(self, ctx: Context) -> Groups | None:
        return self._groups

    def weights(self, ctx: Context) -> Sequence[float] | None:
        return self._weights


# ------------------------------------------------------------------------------------------------------ small parts


def _shape(x: Tensor | None) -> torch.Size | None:
    return None if x is None else x.shape[1:]


def _size(x: Tensor) -> int:
    """Values of one node."""
    return x[0].numel()


def _phases(module: CommunicationModule) -> list[str]:
    """The phases of a step in which the module does something."""
    return [phase for phase in PHASES if overrides(module, f"exchange_{phase}")]
