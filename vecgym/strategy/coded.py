"""Averages of codes of the nodes' values, with error feedback; all-reduces that encode sums, too."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vecgym.collectives.ledger import Ledger
from vecgym.compress import Cast, CentralBins, Codec, Compressor, PowerSGD, make_codec
from vecgym.compress.codecs import Code, Draw
from vecgym.core import check, tree
from vecgym.core.devices import placed
from vecgym.core.objects import altered, is_steady
from vecgym.core.tree import Tree, wider
from vecgym.simulation.simulation import Part
from vecgym.simulation.timetable import RunFacts
from vecgym.strategy.averages import Reduction
from vecgym.strategy.stages import Average, ExchangeFacts, Memory

MAX_PIECE = 2**20  # bytes: gloo cuts longer ones


class Compressed(Average):
    """Send codes of the values to `inner`; with error feedback, the error of a code is sent later.

    With e_i the residual of node i, and r the reference:
    p_i = x_i - r + decay e_i;  node i sends C(p_i);  e_i <- p_i - C(p_i);
    the average is r + inner(C(p_1), ..., C(p_K)).

    The residual is *error feedback*: it holds the part of the values that has not been sent yet. With `decay` < 1 it
    is forgotten in time. Without `error_feedback` e = 0, and this part is lost. A node that takes no part keeps its
    residual.

    With `momentum` = m each node has its own momentum before the residual, in place of the optimizer's, so that late
    values have the momentum that they would have had in time: u_i <- m u_i + x_i - r;  p_i = u_i + decay e_i. Where
    C(p_i) is not 0, u_i <- 0 afterwards (`masking`), so that late values do not continue in an old direction.

    With `reference` r is the last average, and the initial values before the first; else r = 0. It is for parameters:
    a code of the parameters themselves would mean little (top-k would set most of them to 0), unlike a code of their
    movement since the nodes were last equal. The reference must be the same on every node.

    Under differentiation the code passes derivatives straight through: the derivative of C(p) with respect to p is
    taken as 1. The residual and the reference are constants.

    State: `residual` and `momentum`, per node, `[K, *]`; `reference` and `codec`, the state of PowerSGD, `[1, *]`.

    Bytes: those of the codec's tensors, see `vecgym.compress.codecs`. They go through one all-gather: once to each
    other node, to the island, or to the neighbours; with a `ServerMean` up to the server, and the average down; with
    PowerSGD through two averages.

    Args:
        inner: `Mean`, `ServerMean`, `Mix` or `Robust`.
        codec: a codec of `vecgym.compress`, or its name: "topk", "chunktopk", "randomk", "int8", "int4", "int2",
            "stat8", "stat4", "stat2", "bfloat16" and the other types of `Cast`, "qsgd", "natural", "ternary", "sign" or
            "powersgd".
        error_feedback: whether each node keeps a residual.
        decay: the decay of the residual, in (0, 1].
        momentum: m, in [0, 1); 0: none.
        masking: whether to reset a node's momentum where it has sent something.
        reference: whether to send the difference to the last average.
        purpose: the key of the random numbers: averages with the same purpose draw the same numbers.

    Raises:
        ValueError, TypeError: for another `inner`, an unknown codec, a decay or momentum without error feedback,
            RandomK(unbiased=True) and the like with it, a reference or PowerSGD with an average that is not the same
            on all nodes.

    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.compress import TopK
    >>> from vecgym.strategy import Mean
    >>> average, x = Compressed(Mean(), TopK(k=1)), {"w": torch.tensor([[1.0, 4.0], [8.0, 2.0]])}
    >>> part = Part.alone(StackedCollectives(2))
    >>> memory = average.memory({"w": torch.zeros(1, 2)}, part)
    >>> average(x, part, memory)["w"], memory.own["residual"]["w"]
    (tensor([[4., 2.]]), tensor([[1., 0.],
            [0., 2.]]))

    References: error feedback: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al.,
    "Error Feedback Fixes SignSGD", arXiv 1901.09847. Deviations: the error of x is fed back, not the error of the
    learning rate times x; the average of the codes is not compressed again. A residual that decays: Sarfi et al.,
    "Communication Efficient LLM Pre-training with SparseLoCo", arXiv 2508.15706. Momentum and masking: Lin et al.,
    "Deep Gradient Compression", arXiv 1712.01887; deviation: where something was sent, the residual is not set to 0,
    but keeps the error of the code, which for top-k is 0.
    """

    inner: Reduction
    partial = False

    def __init__(
        self, inner: Average, codec: str | Compressor, *, error_feedback: bool = True, decay: float = 1.0,
        momentum: float = 0.0, masking: bool = True, reference: bool = False, purpose: str = "compress",
    ) -> None:  # fmt: skip
        self.inner = check.instance(
            "inner", inner, Reduction, "Mean(), ServerMean(), Mix(), Robust(), or a subclass of Reduction"
        )
        self.codec = make_codec(codec)
        self.error_feedback = check.flag("error_feedback", error_feedback)
        self.decay = check.number("decay", decay, "(0, 1]", "the factor of a residual from one exchange to the next")
        self.momentum = check.number("momentum", momentum, "[0, 1)", "the momentum of each node, such as 0.9; 0: none")
        self.masking = check.flag("masking", masking)
        self.reference = check.flag("reference", reference)
        self.purpose = check.instance("purpose", purpose, str, 'a name, such as "compress"')
        self._check_settings()
        self.check_common(self.inner.common)

    def _check_settings(self) -> None:
        if self.error_feedback and not self.codec.contractive:
            raise ValueError(
                f"{self.codec!r} scales values up, so that its expectation is right, and error feedback then sends the "
                "excess back, ever larger: give error_feedback=False, or unbiased=False."
            )
        if (self.decay != 1 or self.momentum) and not self.error_feedback:
            setting = f"decay={self.decay}" if self.decay != 1 else f"momentum={self.momentum}"
            raise ValueError(f"{setting} without error_feedback has no effect: leave one of them out.")
        if self.inner.remembers:
            raise ValueError(f"{self.inner!r} has a state, which codes do not update: give another rule, or no codec.")
        if not (self.momentum or self.masking):
            raise ValueError("masking=False without a momentum has no effect: give momentum=0.9, say, or leave it out.")

    def check_common(self, common: bool) -> None:
        if self.reference and not common:
            raise ValueError(
                f"{self!r}: codes of parameters are of their difference to the last average, and only an average of "
                "all nodes is the same on all: average over all nodes (island_size=None, participation=1), or send "
                "codes of the parameters themselves (reference=False), which suits methods that keep every value, such "
                "as int8."
            )
        if isinstance(self.codec, PowerSGD) and not (common and self.inner.linear):
            raise ValueError(
                f"{self!r}: PowerSGD starts from the previous average, which groups of nodes do not share, and "
                "which must be a mean: Mean() or ServerMean()."
            )

    @property
    def common(self) -> bool:  # type: ignore[override]
        return self.inner.common

    @property
    def batched(self) -> tuple[str, ...] | None:  # type: ignore[override]
        alone = not self.common or isinstance(self.codec, PowerSGD) or self.inner.batched is None
        return None if alone else ()  # the numbers of `inner` are its own

    @property
    def random(self) -> bool:  # type: ignore[override]
        return True

    @property
    def steady(self) -> bool:  # type: ignore[override]
        return is_steady(self.codec)

    def check(self, run: ExchangeFacts) -> None:
        self.inner.check(run)

    def init(self, values: Tree, run: RunFacts, memory: Memory) -> None:
        if self.error_feedback:
            memory.own["residual"] = tree.map(torch.zeros_like, values)
        if self.momentum:
            memory.own["momentum"] = tree.map(torch.zeros_like, values)
        if self.reference:
            memory.shared["reference"] = values
        if isinstance(self.codec, PowerSGD):
            memory.shared["codec"] = self.codec.init(values)

    def agree(self, x: Tree, part: Part, memory: Memory) -> Tree:
        r, e, m = (
            constant(held[name]) if name in held else None
            for held, name in ((memory.shared, "reference"), (memory.own, "residual"), (memory.own, "momentum"))
        )
        with torch.no_grad():
            values, inplace = constant(x), memory.inplace
            d = values if r is None else tree.map(torch.sub, values, r)
            u = d if m is None else {name: plus(m[name] * self.momentum, y, inplace) for name, y in d.items()}
            p = d if e is None else {name: self._with_residual(e[name], y, inplace) for name, y in u.items()}
            average, sent = self._average(p, part, memory)
            if e is not None:  # then p has new storage, or the residual's
                memory.own["residual"] = {**e, **{name: plus(y, sent[name], True, alpha=-1) for name, y in p.items()}}
            if m is not None:
                memory.own["momentum"] = {**m, **self._masked(u, sent)}
            if r is not None:
                average = {name: plus(r[name], y, inplace) for name, y in average.items()}
                memory.shared["reference"] = {**r, **tree.map(torch.clone, average)}  # the values will be overwritten
        return straight_through(average, x, part, memory, lambda unrecorded: self.inner.agree(x, unrecorded, memory))

    def _with_residual(self, residual: Tensor, x: Tensor, inplace: bool) -> Tensor:
        """Return x + decay * residual, in the storage of the residual if that is allowed."""
        return plus(residual if self.decay == 1 else residual * self.decay, x, inplace)

    def _masked(self, u: Tree, sent: Tree) -> Tree:
        """Return the momenta, 0 where something was sent."""
        return {name: torch.where(sent[name] == 0, y, 0.0) for name, y in u.items()} if self.masking else u

    def _average(self, p: Tree, part: Part, memory: Memory) -> tuple[Tree, Tree]:
        """Return the average of the codes of p, and each node's decoded code, for its residual."""
        codec, draw = self.codec, draws(self.purpose, part)
        if isinstance(codec, PowerSGD):
            pure = altered(part, inplace=False)
            average, sent, memory.shared["codec"] = codec.reduce(
                p, memory.shared["codec"], lambda y: self.inner.agree(y, pure, memory), draw
            )
            return average, sent
        rows = part.flat(p if part.size == 1 else part.wide(p))
        codes = {name: codec.encode(x, draw(name)) for name, x in rows.items()}
        average = part.apart(self.inner.of_codes(codes, codec, rows, part))
        sent = {name: codec.decode(codes[name], x) for name, x in rows.items()} if self.error_feedback else {}
        return average, part.apart(sent)


class EF21(Compressed):
    """Each node sends a code of the difference between its values and an estimate of them that all nodes know.

    With h_i the estimate of node i, at first 0:  node i sends C(x_i - h_i);  h_i <- h_i + C(x_i - h_i);
    the average is inner(h_1, ..., h_K), which all nodes keep as h: h <- h + inner(C(x_1 - h_1), ..., C(x_K - h_K)).

    If the x_i converge, h_i converges to x_i, and the average becomes exact, however coarse the code. Error feedback
    (`Compressed`) sends every value in the end; EF21 approximates the present values ever better.

    For gradients and movements: `Exchange(EF21(Mean(), TopK(0.01)), of="gradients")`,
    `Exchange(Outer(EF21(Mean(), "sign")), every=20)`.

    Under differentiation the code passes derivatives straight through, as in `Compressed`; h_i and h are constants.

    State: `estimate`, h_i, `[K, *]`; `average`, h, `[1, *]`; `codec`, the state of PowerSGD. Bytes: those of the code,
    as in `Compressed`.

    Args:
        inner: `Mean()` or `ServerMean()`, in which all nodes take part, with equal weights.
        codec: a contractive codec, or its name, as in `Compressed`.
        purpose: the key of the random numbers: averages with the same purpose draw the same numbers.

    Raises:
        ValueError, TypeError: for another `inner`, an unknown codec or one that is not contractive; before the first
            step for nodes that may be absent.

    >>> from vecgym.collectives import StackedCollectives
    >>> from vecgym.compress import TopK
    >>> from vecgym.strategy import Mean
    >>> average, x = EF21(Mean(), TopK(k=1)), {"w": torch.tensor([[1.0, 4.0], [8.0, 2.0]])}
    >>> part = Part.alone(StackedCollectives(2))
    >>> memory = average.memory({"w": torch.zeros(1, 2)}, part)
    >>> for _ in range(2):  # the largest of each row, then the other one
    ...     print(average(x, part, memory)["w"])
    tensor([[4., 2.]])
    tensor([[4.5000, 3.0000]])

    Reference: Richtarik, Sokolov and Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and Practically Faster
    Error Feedback", arXiv 2106.05203. Deviation: h_i begins at 0, so that the first code is one of x_i itself.
    """

    batched, random, steady = Compressed.batched, Compressed.random, Compressed.steady

    def __init__(self, inner: Average, codec: str | Compressor, *, purpose: str = "compress") -> None:
        super().__init__(inner, codec, purpose=purpose)

    def check_common(self, common: bool) -> None:
        equal = getattr(self.inner, "weighting", "equal") == "equal"
        if not (common and self.inner.linear and equal):
            raise ValueError(
                f"{self!r}: EF21 keeps the mean of all nodes' estimates: give Mean() or ServerMean(), without "
                "islands, participation and weighting, or Compressed(...), which has no estimates."
            )

    def check(self, run: ExchangeFacts) -> None:
        super().check(run)
        if run.fewest < run.num_nodes:
            raise ValueError(
                f"{self!r}: EF21 keeps the mean of all nodes' estimates, and those of absent nodes would be missing: "
                "give Compressed(...) in its place, or leave out availability and participation."
            )

    def init(self, values: Tree, run: RunFacts, memory: Memory) -> None:
        if isinstance(self.codec, PowerSGD):
            memory.shared["codec"] = self.codec.init(values)
        memory.own["estimate"] = memory.shared["average"] = tree.map(torch.zeros_like, values)

    def agree(self, x: Tree, part: Part, memory: Memory) -> Tree:
        estimate, average = constant(memory.own["estimate"]), constant(memory.shared["average"])
        with torch.no_grad():
            change = {name: y - estimate[name] for name, y in constant(x).items()}
            agreed, sent = self._average(change, part, memory)
            memory.own["estimate"] = {name: plus(y, sent[name], memory.inplace) for name, y in estimate.items()}
            memory.shared["average"] = {name: torch.add(y, agreed[name]) for name, y in average.items()}
            read = tree.map(torch.clone, memory.shared["average"])  # the caller may overwrite it
        return straight_through(read, x, part, memory, lambda unrecorded: self.inner.agree(x, unrecorded, memory))


# -------------------------------------------------------------------- all-reduces whose sums are encoded, too


class Cut(NamedTuple):
    """The segments of a tensor, `size` values each but the last, and their way round.

    Attributes:
        size: the values in a segment.
        first: the number of a segment -> the node that it starts at.
        step: the way round: 1 to the next node, -1 to the one before.
    """

    size: int
    first: Callable[[Tensor], Tensor]
    step: int


class Ring(Average, batched=(), random=True):
    """The mean that a ring all-reduce gives: every hop adds a node's values to a partial sum, and encodes it anew.

    A tensor is cut into K segments, which are under way at once. Segment c starts at node c - 1, and the others add
    their x_k on its way down, through c - 2, c - 3, ... to c:  s <- x_(c-1);  K - 1 times: s <- C(s) + x_k.  Node c
    sends C(s / K) to all, so all nodes end with the same bits.

    With a `Cast` all tensors are of that type: C is taken of each x_k, too, and of the last sum before it is divided.
    So `Ring(Cast("bfloat16"))` has the bits of torch's all-reduce of bfloat16 tensors, `op=ReduceOp.AVG`, with gloo.

    Errors add up from hop to hop. In the mean of unrelated values the relative error is about sqrt(K / 2) times that of
    a code; values that are encoded once, as in `Compressed(Mean(), codec)`, keep the latter, whatever K is.

    Bytes sent per node: 2 (K - 1) / K times those of the codes of the segments. Absent nodes are left out of the ring.
    Under differentiation the codes pass derivatives straight through.

    Args:
        codec: a codec of `vecgym.compress`, or its name: "bfloat16", "int8", "stat8" and others; see `Compressed`.

    Raises:
        TypeError, ValueError: for PowerSGD and RandomK, whose codes are not of a segment by itself.

    >>> from vecgym.collectives import StackedCollectives
    >>> part, x = Part.alone(StackedCollectives(4)), torch.tensor([256.0, 1.0, 1.0, 1.0])[:, None].expand(4, 8)
    >>> 4 * Ring("bfloat16")({"w": x}, part)["w"]  # 256 + 1 is 256 in bfloat16
    tensor([[260., 260., 256., 256., 256., 256., 260., 260.]])

    Reference: github.com/pytorch/gloo, gloo/allreduce.cc, `ring`. Deviations: each tensor has its own ring, where DDP
    joins many, so that other values are in a segment; DDP divides by K first, with the same bits for a power of two.
    """

    def __init__(self, codec: str | Codec) -> None:
        self.codec: Codec = check.instance("codec", make_codec(codec), Codec, 'a codec such as Cast("bfloat16")')
        if self.codec.shared:
            raise ValueError(
                f"{self.codec!r} draws other coordinates for each code, which cannot be added: give a codec that sends "
                'all of them, such as "int8", or Sparse(0.1, Ring(...)).'
            )
        # What is encoded: each node's values, before they are added, and partial sums.
        self._values, self._sums = isinstance(self.codec, Cast), True

    steady = Compressed.steady

    def _cut(self, shape: torch.Size, num_nodes: int) -> Cut:
        """Return the segments of a tensor.

        >>> Ring("bfloat16")._cut(torch.Size([6, 5]), num_nodes=4).size
        8
        """
        n, K = math.prod(shape), num_nodes
        num_bytes = n * self.codec.type.itemsize if isinstance(self.codec, Cast) else n
        pieces = max(2, -(-num_bytes // (MAX_PIECE * K)))  # of a segment, of equal sizes
        return Cut(pieces * -(-n // (pieces * K)), lambda segment: segment - 1, -1)

    def agree(self, x: Tree, part: Part, memory: Memory) -> Tree:
        with torch.no_grad():
            read = part.comm.reduce(constant(x), lambda everyone: self._of_all(everyone, part))
        return straight_through(read, x, part, memory, lambda unrecorded: unrecorded.comm.mean(x))

    def _of_all(self, everyone: Tree, part: Part) -> tuple[Tree, Tree]:
        """Return the means of all nodes' values, and the codes that are sent for them."""
        means, codes, K = Tree(), Tree(), part.comm.num_nodes
        for name, y in everyone.items():
            shape, draw = y.shape[part.lead :], draws(f"ring {name}", part)
            x = y.to(wider(y.dtype)).reshape(part.size, y.shape[part.lead - 1], math.prod(shape)).expand(-1, K, -1)
            cut, done = self._cut(shape, K), []
            whole = x.shape[-1] // max(1, cut.size)
            split = x[..., : whole * cut.size].unflatten(-1, (whole, cut.size)), x[..., None, whole * cut.size :]
            for i, segments in enumerate(split):  # [C, K, S, size]; the last one may be shorter
                if segments.shape[2] and (segments.shape[3] or not whole):
                    ids = i * whole + torch.arange(segments.shape[2])
                    total = self._total(segments, ids, cut, draw)
                    mean, code = self._coded(total / K, ids, draw("mean"))
                    codes |= {f"{name}/{i}{key}": z.unflatten(0, (part.size, len(ids))) for key, z in code.items()}
                    done.append(mean.flatten(1))
            means[name] = torch.cat(done, 1).to(y.dtype).view(part.size, *shape)
        return part.apart(means), part.apart(codes)

    def _total(self, x: Tensor, ids: Tensor, cut: Cut, draw: Callable[[str], Draw]) -> Tensor:
        """Return the sums over the nodes, `[C, K, S, size]` -> `[C, S, size]`, along the segments' ways."""
        K, first, place = x.shape[1], placed(cut.first(ids), x.device), torch.arange(len(ids), device=x.device)

        def given(hop: int) -> Tensor:
            values = x[:, (first + cut.step * hop) % K, place]
            return self._coded(values, ids, draw(f"values {hop}"))[0] if self._values else values

        total = given(0)
        for hop in range(1, K):
            if self._sums and not (self._values and hop == 1):  # a code of a code would have another scale
                total = self._coded(total, ids, draw(f"sum {hop}"))[0]
            total = total + given(hop)
        return self._coded(total, ids, draw(f"sum {K}"))[0] if self._values and self._sums and K > 1 else total

    def _coded(self, x: Tensor, ids: Tensor, draw: Draw) -> tuple[Tensor, Code]:
        """Return the values `[C, S, size]` as they are read, and their code, `[C S, ...]`."""
        rows = x.flatten(0, 1)
        code = self.codec.encode(rows, draw._replace(node_ids=ids.repeat(len(x))))
        return self.codec.decode(code, rows).view_as(x), code


class QuantisedRing(Ring, batched=(), random=True):
    """PRIME's ring all-reduce, in which partial sums go as eight bits.

    A tensor is cut into 2 K segments. Segment c starts at node floor(c / 2) + 1, and goes up to node floor(c / 2), with
    C taken at every hop as in `Ring`; its last node sends C(s / K) to all.

    Bytes sent per node: 2 (K - 1) / K P + 4 (K - 1) KiB for P values: a byte each, and 1 KiB for each segment's table.

    Args:
        codec: the code of a segment; None: `CentralBins(8)`, 256 bins of 6 / 256 standard deviations.

    >>> from vecgym.collectives import StackedCollectives
    >>> part, x = Part.alone(StackedCollectives(2)), torch.tensor([[1.0, 2.0, 3.0, 4.0], [3.0, 2.0, 5.0, 0.0]])
    >>> QuantisedRing()({"w": x}, part), part.comm.ledger.total_payload_bytes
    ({'w': tensor([[2., 2., 4., 2.]])}, 4100.0)

    Reference: github.com/PrimeIntellect-ai/prime, src/zeroband/C/csrc/collectives.cpp. Deviations: the last segment
    may be shorter, where the program needs equal ones; that of `CentralBins`.
    """

    def __init__(self, codec: str | Codec | None = None) -> None:
        super().__init__(CentralBins(8) if codec is None else codec)

    def _cut(self, shape: torch.Size, num_nodes: int) -> Cut:
        return Cut(-(-math.prod(shape) // (2 * num_nodes)), lambda segment: segment // 2 + 1, 1)


class AllToAll(Ring, batched=(), random=True):
    """torchft's quantised all-reduce: two codes, however many nodes there are.

    C(1/K sum_k C(x_k)): every node sends a code of each row of a tensor to one of the nodes, the i-th of which takes
    the i-th ceil(rows / K) rows. It adds up the decoded rows in float32, beginning with its own, and sends a code of
    the mean to all. Of a vector each value is a row.

    Bytes sent per node: 2 (K - 1) / K times those of the codes: with 8 bits a byte for each value, and 4 for each row.

    Args:
        codec: the code of a row.

    >>> from vecgym.collectives import StackedCollectives
    >>> part, x = Part.alone(StackedCollectives(2)), torch.tensor([[[1.0, 448.0]], [[0.0, 400.0]]])
    >>> AllToAll()({"w": x}, part), part.comm.ledger.total_payload_bytes  # the largest of a row is exact
    ({'w': tensor([[[  0.4732, 424.0000]]])}, 6.0)

    Reference: github.com/meta-pytorch/torchft, torchft/collectives.py, `allreduce_quantized`. Deviations: dimensions
    from the third on belong to a row, where the program refuses them; its bytes for alignment are not counted.
    """

    def __init__(self, codec: str | Codec = "float8_e4m3fn") -> None:
        super().__init__(codec)
        self._values, self._sums = True, False

    def _cut(self, shape: torch.Size, num_nodes: int) -> Cut:
        each = -(-(shape[0] if shape else 1) // num_nodes) or 1
        return Cut(math.prod(shape[1:]), lambda row: row // each, 1)


# ------------------------------------------------------------------------------------------------- small parts


def draws(purpose: str, part: Part) -> Callable[[str], Draw]:
    """Return the random numbers of the codes in this exchange, as a function of the tensor's name."""
    ids = part.ids.repeat(part.size)
    return lambda name: Draw(lambda *keys: part.generator(f"{purpose} {name}", part.due.step, *keys), ids)


def constant(values: Tree) -> Tree:
    """Detach the values: `no_grad` alone stops the derivatives of reverse mode only."""
    return tree.map(Tensor.detach, values)


def straight_through(read: Tree, x: Tree, part: Part, memory: Memory, smooth: Callable[[Part], Tree]) -> Tree:
    """Give decoded values the derivatives of `smooth(part)`, an exchange of the exact values, if any are taken.

    Nodes do not send derivatives: the part that `smooth` is called with records nothing in the run's ledger.
    """
    if memory.inplace or not any(map(tree.differentiated, x.values())):
        return read
    exact = smooth(altered(part, comm=altered(part.comm, ledger=Ledger()), inplace=False))
    return {name: y + (exact[name] - exact[name].detach()) for name, y in read.items()}


def plus(a: Tensor, b: Tensor, inplace: bool, alpha: float = 1) -> Tensor:
    """Return a + alpha b, in the storage of a if that is allowed and possible."""
    fits = inplace and a.shape == np.broadcast_shapes(a.shape, b.shape)  # torch's imports sympy
    return a.add_(b, alpha=alpha) if fits else torch.add(a, b, alpha=alpha)
