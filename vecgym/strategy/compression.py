"""Compression of any module's exchange, with error feedback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vecgym.collectives import Collectives
from vecgym.collectives.base import T
from vecgym.collectives.topology import Groups
from vecgym.compress import Compressor, make_codec
from vecgym.core import check, tree
from vecgym.core.tree import Tree
from vecgym.strategy import contract
from vecgym.strategy.average import Mean
from vecgym.strategy.base import CommunicationModule, Context, State, overrides
from vecgym.strategy.codes import NO_ISLANDS, Compressed, check_feedback, coded
from vecgym.strategy.communication import Wrapper
from vecgym.strategy.modules import Exchange, Gradients
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
    """Compress what a module averages: return the same module around a `Compressed` average.

    With x_i what node i would send, it sends C(p_i) instead: p_i = x_i - r + e_i; e_i <- p_i - C(p_i); the average is
    r + 1/K sum_i C(p_i), over all nodes or over i's island, weighted if the module's is.

    e is the *residual* (error feedback): what is not sent now is sent later. So the sum of what a node sent, plus
    its residual, is the sum of what it had to send. Without `error_feedback` e = 0: what is not sent is lost.

    r is the *reference*, for modules that average the parameters themselves: the last average, and the initial
    parameters before the first. The code of parameters would mean little (top-k would set most of them to 0); that
    of their movement since the nodes were last the same is what is wanted. Only what is the same on every node can
    be a reference, so there are no islands with it, nor nodes that sit out, unless a server tells them. By default
    there is a reference when the module has nothing with which it could compare the parameters itself:
    `AveragingCommunicator` gets one; `DiLoCoCommunicator`, which averages theta_outer - theta_i, and gradients do not.

    A module of your own calls `ctx.comm.mean` once per exchange, of a tree with the parameters' names and shapes (of
    any, without error feedback and reference), and that mean is then the compressed one.

    Under differentiation (`not ctx.inplace`) the code passes derivatives straight through: the derivative of C(p)
    with respect to p is taken as 1, so that the mean is r + C with the derivatives of the plain mean of x. The residual
    and the reference are constants.

    State: the module's, its average's being that of `Compressed`. Of a module of your own: `module`, the module's, and
    for each phase in which it acts (`gradients`, `parameters`) that of `Compressed`.

    Bytes: those of the tensors that the codec makes, see `vecgym.compress.codecs`, at every exchange; see `Compressed`.

    Args:
        module: one that holds an `Average` of what the nodes send, such as `GradientAveraging()`, or your own.
        method: "topk", "chunktopk", "randomk", "int8", "int4", "int2", "stat8", "stat4", "stat2", "qsgd", "natural",
            "ternary", "sign" or "powersgd", or a codec of `vecgym.compress`.
        error_feedback: whether each node keeps a residual.
        reference: whether the difference to the last average is sent; None: see above.
        options: of the method: topk: fraction or k; chunktopk: k, chunk, over; randomk: fraction, unbiased; int8, int4,
            int2: stochastic; stat8, stat4, stat2: sigmas; qsgd: levels, bucket, unbiased; ternary: unbiased, clip;
            powersgd: rank, warm_start.

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
    if reference and not (overrides(module, "exchange_parameters") or overrides(module, "exchange_moments")):
        raise ValueError(f"reference=True: {module!r} exchanges no parameters. Leave it out.")
    chosen = "" if reference is None else f", reference={reference}"
    shown = f"compressed({module!r}, {codec!r}, error_feedback={error_feedback}{chosen})"
    # A user's subclass may do anything with the average that it holds.
    if isinstance(module, Exchange) and type(module).__module__.startswith("vecgym."):
        around = _around_codes(module, codec, error_feedback, reference)
        if around is not None:
            return _WithCodes(around, codec, shown)
    return _Compressed(module, codec, error_feedback, reference, shown)


def _around_codes(
    module: Exchange, codec: Compressor, error_feedback: bool, reference: bool | None
) -> CommunicationModule | None:
    """Return the same module around an average of codes; None: its own cannot be taken of codes."""
    if isinstance(module.when, SyncWeight) and not module.when.binary:
        raise ValueError(
            f"{module!r} exchanges in part, and what was sent of a code, its residual and its reference have no "
            "part: compress a module whose sync_weight is 0 or 1 and does not require grad, or that has H."
        )
    reference = module.of_values if reference is None else reference
    purpose = f"compress {'gradients' if isinstance(module, Gradients) else 'parameters'}"
    average = coded(module.average, codec, error_feedback=error_feedback, reference=reference, purpose=purpose)
    return None if average is None else module.around(average)


def with_compression(module: CommunicationModule, compression: str | Compressor | None) -> CommunicationModule:
    """Return `module` itself for None, else `compressed(module, compression)`: for an argument of a strategy.

    >>> from vecgym.strategy import GradientAveraging
    >>> with_compression(GradientAveraging(), "int8")
    compressed(GradientAveraging(), Quantise(bits=8, stochastic=False), error_feedback=True)
    """
    return module if compression is None else compressed(module, compression)


class _WithCodes(Wrapper):
    """`compressed` of a module that holds an average: `module` holds the `Compressed` one."""

    def __init__(self, module: CommunicationModule, codec: Compressor, shown: str) -> None:
        super().__init__(module)
        self.codec = codec
        self._shown = shown

    def __repr__(self) -> str:
        return self._shown


class _Compressed(_WithCodes):
    """`compressed` of any other module, which is told collectives whose `mean` is the compressed one."""

    exchange_moments = CommunicationModule.exchange_moments  # not passed on

    def __init__(
        self, module: CommunicationModule, codec: Compressor, error_feedback: bool, reference: bool | None, shown: str
    ) -> None:
        super().__init__(module, codec, shown)
        self.error_feedback = error_feedback
        self.reference = reference

    def init(self, params: Tree, ctx: Context) -> State:
        inner = super().init({name: p.clone() for name, p in params.items()}, ctx)
        compares = any(x.numel() for x in tree.leaves(inner))
        state: State = {"module": inner}
        for phase in PHASES:
            if overrides(self.module, f"exchange_{phase}"):
                reference = phase == "parameters" and (not compares if self.reference is None else self.reference)
                state[phase] = self._average(phase, Mean(), reference).init(params, ctx)
        return state

    def local_gradients(self, grads: Tree, params: Tree, state: State, ctx: Context) -> Tree:
        return super().local_gradients(grads, params, state["module"], ctx)

    def exchange_gradients(self, grads: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        return self._exchange("gradients", grads, state, ctx)

    def exchange_parameters(self, params: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        return self._exchange("parameters", params, state, ctx)

    def _average(self, phase: str, mean: Mean, reference: bool) -> Compressed:
        return Compressed(
            mean, self.codec, error_feedback=self.error_feedback, reference=reference, purpose=f"compress {phase}"
        )

    def _exchange(self, phase: str, given: Tree, state: State, ctx: Context) -> tuple[Tree, State]:
        if phase not in state:
            return given, state

        def mean(x: Any, own: State, groups: Groups | None, weights: Sequence[float] | None) -> tuple[Tree, State]:
            self._check(x, given, own, phase, groups)
            return self._average(phase, _Asked(groups, weights), "reference" in own)(x, own, ctx)

        comm = _OneMean(ctx.comm, repr(self), mean, state[phase])
        result, changed = PHASES[phase](self.module, given, state["module"], ctx.replace(comm=comm))
        return result, {**state, "module": changed, phase: comm.state}

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


class _OneMean(contract.Refusing):
    """Collectives for one exchange, in which one mean is taken, in another way, and nothing else is done.

    Attributes:
        state: of the average; after the mean the new one.
    """

    def __init__(self, comm: Collectives, who: str, take: Callable[..., tuple[Any, State]], state: State) -> None:
        super().__init__(comm, self._refused)
        self.state = state
        self._who, self._take, self._taken = who, take, False

    def _refused(self, operation: str) -> str:
        return (
            f"{self._who}: the module calls ctx.comm.{operation}. Only an exchange that consists of one ctx.comm.mean "
            "can be compressed: that of GradientAveraging, AveragingCommunicator or DiLoCoCommunicator, say."
        )

    def mean(
        self, x: T, groups: Groups | None = None, weights: Sequence[float] | None = None, *, inplace: bool = False
    ) -> T:
        if self._taken:
            raise ValueError(self._refused("mean a second time in one exchange"))
        self._taken = True
        result, self.state = self._take(x, self.state, groups, weights)
        return result


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


def _shape(x: torch.Tensor | None) -> torch.Size | None:
    return None if x is None else x.shape[1:]
