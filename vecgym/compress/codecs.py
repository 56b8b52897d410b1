"""Lossy codes of tensors, for all nodes at once: what a node sends in place of a tensor, and how it is read.

A `Codec` turns `[L, *shape]` into a code, a few tensors `[L, ...]` that every node sends to all others; its bytes
are the bytes of these tensors. `PowerSGD` needs no such gathering: two averages suffice.

Bytes that a node sends for a tensor of n values of b bytes:

| method    | code                                        | bytes                    |
|-----------|---------------------------------------------|--------------------------|
| `topk`    | k values, k indices                         | k (b + 4)                |
| `randomk` | m values, on coordinates drawn from a seed  | m b                      |
| `int8`    | n bytes, one scale                          | n + 4                    |
| `int4`    | two values to a byte, one scale             | ceil(n / 2) + 4          |
| `sign`    | eight values to a byte, one scale           | ceil(n / 8) + 4          |
| `powersgd`| two matrices of r columns                   | r (rows + columns) b     |

Indices take 8 bytes in tensors of more than 2^31 values. The payload of `powersgd` goes through averages (ring
all-reduces), that of the others through an all-gather.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from vecgym.compress.dct import strongest
from vecgym.core import check
from vecgym.core.tree import Tree

Code = dict[str, Tensor]  # the parts of the code of one tensor, `[L, ...]` each

DEFAULT_FRACTION = 0.01


class Draw(NamedTuple):
    """Random numbers for one tensor in one exchange: the same in every process, whichever nodes it holds.

    Attributes:
        generator: ids -> a generator keyed by them.
        node_ids: the global ids of the nodes held here, `[L]`.
    """

    generator: Callable[..., torch.Generator]
    node_ids: Tensor

    def subset(self, n: int, m: int) -> Tensor:
        """m of n coordinates, each set of them equally likely, the same on every node: `[m]`."""
        return torch.randperm(n, generator=self.generator())[:m]

    def uniform(self, n: int, dtype: torch.dtype) -> Tensor:
        """n numbers in [0, 1) for each node, keyed by the node: `[L, n]`."""
        nodes, rows = self.node_ids.unique(return_inverse=True)
        drawn = [torch.rand(n, generator=self.generator(node), dtype=dtype) for node in nodes.tolist()]
        return torch.stack(drawn)[rows]

    def normal(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Standard normal numbers, the same on every node: `[*shape]`."""
        return torch.randn(shape, generator=self.generator(), dtype=dtype)


class Codec(ABC):
    """What a node sends in place of a tensor. Override `encode` and `decode`.

    Attributes:
        shared: parts of the code that every node has without being sent them; they are `[1, ...]`.

    >>> class Half(Codec):
    ...     def encode(self, x, draw=None):
    ...         return {"values": x.bfloat16()}
    ...     def decode(self, code, like):
    ...         return code["values"].to(like.dtype)
    >>> x = torch.tensor([[1.0, 0.1], [3.0, 0.3]])
    >>> code = Half().encode(x)
    >>> Half().decode(code, like=x)
    tensor([[1.0000, 0.1001],
            [3.0000, 0.3008]])
    >>> Half().average({"values": code["values"][None]}, like=x)  # of the K = 2 senders
    tensor([[2.0000, 0.2004]])
    """

    shared: tuple[str, ...] = ()

    @abstractmethod
    def encode(self, x: Tensor, draw: Draw | None = None) -> Code:
        """The code of each node's tensor: `[L, *]` -> parts `[L, ...]`."""

    @abstractmethod
    def decode(self, code: Code, like: Tensor) -> Tensor:
        """What a code stands for: `[R, *shape]` for R rows of code; `like`, `[L, *shape]`, has shape and dtype."""

    def average(self, codes: Code, like: Tensor, weights: Tensor | None = None) -> Tensor:
        """The mean over the K senders, or sum_k w_k decode(code_k): parts `[R, K, ...]` -> `[R, *shape]`.

        Args:
            codes: of every sender; of the shared parts one, `[1, 1, ...]`.
            like: has shape and dtype.
            weights: `[1 or L, K]`; the result has L rows if they have.
        """
        rows, num_senders = next(y.shape[:2] for part, y in codes.items() if part not in self.shared)
        if rows == 1:
            decoded = self.decode({part: y.flatten(0, 1) for part, y in codes.items()}, like)  # [K, *]
            if weights is None:
                return decoded.mean(0, keepdim=True)
            return torch.tensordot(weights.to(decoded), decoded, 1)
        # One sender after the other: all at once, each row its own, would take K times the memory of the result.
        total = torch.zeros((), dtype=like.dtype, device=like.device)
        for k in range(num_senders):
            decoded = self.decode({part: y[:, min(k, y.shape[1] - 1)] for part, y in codes.items()}, like)
            share = 1 / num_senders if weights is None else _column(weights[:, k].to(decoded), like)
            total = total + share * decoded
        return total

    def __repr__(self) -> str:
        return _shown(self)


class TopK(Codec):
    """The k values of largest magnitude of each tensor, with their indices; the others count as 0.

    Of equal magnitudes the first are sent. Bytes: k (b + 4), with 32-bit indices.

    Args:
        fraction: k / n, in (0, 1]; 0.01 when neither is given. At least one value of a tensor is sent.
        k: in its place, values per tensor, at most all.

    >>> code = TopK(k=1).encode(torch.tensor([[1.0, -3.0, 2.0]]))
    >>> code
    {'values': tensor([[-3.]]), 'indices': tensor([[1]], dtype=torch.int32)}
    >>> TopK(k=1).decode(code, like=torch.zeros(1, 3))
    tensor([[ 0., -3.,  0.]])
    """

    def __init__(self, fraction: float | None = None, k: int | None = None) -> None:
        if fraction is not None and k is not None:
            raise ValueError(f"fraction={fraction!r} and k={k!r} both say how many values are sent: give one of them.")
        given = DEFAULT_FRACTION if fraction is None and k is None else fraction
        self.fraction = given if given is None else check_fraction("fraction", given)
        self.k = check.optional_integer("k", k, what="the number of values sent of each tensor")

    def count(self, n: int) -> int:
        """The number of values sent of a tensor of n.

        >>> TopK(0.1).count(50), TopK(0.1).count(3), TopK(k=8).count(50)
        (5, 1, 8)
        """
        return min(n, self.k) if self.k is not None else part_of(n, self.fraction or DEFAULT_FRACTION)

    def encode(self, x: Tensor, draw: Draw | None = None) -> Code:
        flat = x.reshape(len(x), _size(x))
        indices = strongest(flat, self.count(flat.shape[1]))
        return {"values": flat.gather(1, indices), "indices": indices.to(index_dtype(flat.shape[1]))}

    def decode(self, code: Code, like: Tensor) -> Tensor:
        values, indices = code["values"], code["indices"].long()
        return _shaped(values.new_zeros(len(values), _size(like)).scatter(1, indices, values), like)

    def average(self, codes: Code, like: Tensor, weights: Tensor | None = None) -> Tensor:
        """Adds up the few values that were sent, and nothing else."""
        values, indices = codes["values"], codes["indices"].long()  # [R, K, k]
        values = values / values.shape[1] if weights is None else values * weights.to(values)[..., None]
        total = values.new_zeros(len(values), _size(like))
        total.scatter_add_(1, indices.expand_as(values).flatten(1), values.flatten(1))
        return _shaped(total, like)


class RandomK(Codec):
    """The values of each tensor on randomly drawn coordinates, the same on every node; the others count as 0.

    The coordinates come from a seed that all nodes share and are not sent. Bytes: m b, m = max(1, round(fraction n)).

    Args:
        fraction: of the values of each tensor, in (0, 1].
        unbiased: multiply what is sent by n / m, so that its expectation is the tensor. Not with error feedback,
            which sends later what was not sent, and would then diverge.

    >>> RandomK(fraction=0.1).encode(torch.ones(2, 30), Draw(torch.Generator, torch.arange(2)))["values"].shape
    torch.Size([2, 3])
    """

    shared = ("indices",)

    def __init__(self, fraction: float = DEFAULT_FRACTION, unbiased: bool = False) -> None:
        self.fraction = check_fraction("fraction", fraction)
        self.unbiased = check.flag("unbiased", unbiased)

    def encode(self, x: Tensor, draw: Draw | None = None) -> Code:
        flat = x.reshape(len(x), _size(x))
        n, m = flat.shape[1], part_of(flat.shape[1], self.fraction)
        indices = _needed(draw, self).subset(n, m).to(x.device)
        values = flat.index_select(1, indices)
        return {"values": values * (n / max(1, m)) if self.unbiased else values, "indices": indices[None]}

    def decode(self, code: Code, like: Tensor) -> Tensor:
        values = code["values"]
        flat = values.new_zeros(len(values), _size(like)).index_copy_(1, code["indices"][0], values)
        return _shaped(flat, like)

    def average(self, codes: Code, like: Tensor, weights: Tensor | None = None) -> Tensor:
        """The mean of what was sent, decoded once: the coordinates are the same."""
        values = codes["values"]  # [R, K, m]
        mean = values.mean(1) if weights is None else (weights.to(values)[:, None] @ values)[:, 0]
        return self.decode({"values": mean, "indices": codes["indices"][0]}, like)


class Quantise(Codec):
    """Integers of 8 or 4 bits, and one scale for each tensor and node: x ~ scale q, scale = max |x| / (2^(bits-1) - 1).

    The scale is sent in float32 whatever the tensor's type. Bytes: n + 4, or ceil(n / 2) + 4 with two values to a byte.

    Args:
        bits: 8 or 4.
        stochastic: round up with the probability that makes the expectation exact, keyed by the node; else to the
            nearest integer, ties to the even one.

    >>> code = Quantise(8).encode(torch.tensor([[127.0, -20.4, 0.0]]))
    >>> code
    {'values': tensor([[127, -20,   0]], dtype=torch.int8), 'scale': tensor([1.])}
    >>> Quantise(8).decode(code, like=torch.zeros(1, 3))
    tensor([[127., -20.,   0.]])
    """

    def __init__(self, bits: int = 8, stochastic: bool = False) -> None:
        self.bits = check_bits("bits", bits)
        self.stochastic = check.flag("stochastic", stochastic)

    @property
    def limit(self) -> int:
        """The largest integer: 127 or 7.

        >>> Quantise(8).limit, Quantise(4).limit
        (127, 7)
        """
        return 2 ** (self.bits - 1) - 1

    def encode(self, x: Tensor, draw: Draw | None = None) -> Code:
        flat = x.reshape(len(x), _size(x))
        largest = torch.linalg.vector_norm(flat, math.inf, dim=1) if flat.shape[1] else flat.sum(1)  # of nothing: 0
        # Never 0, so that a tensor of zeros has a code; nan stays nan, and what is decoded is nan.
        scale = (largest / self.limit).float().clamp(min=torch.finfo(torch.float32).tiny)
        level = flat / scale[:, None].to(flat.dtype)
        if self.stochastic:
            level = (level + _needed(draw, self).uniform(flat.shape[1], flat.dtype).to(x.device)).floor_()
        else:
            level.round_()
        whole = level.clamp_(-self.limit, self.limit).to(torch.int8)  # the scale was rounded: 127.00001 is 127
        return {"values": whole if self.bits == 8 else pack((whole + 8).to(torch.uint8), 4), "scale": scale}

    def decode(self, code: Code, like: Tensor) -> Tensor:
        values = code["values"] if self.bits == 8 else unpack(code["values"], 4, _size(like)).to(torch.int8) - 8
        flat = values.to(like.dtype) * code["scale"][:, None].to(like.dtype)
        return _shaped(flat, like)


class Sign(Codec):
    """The sign of each value, and for each tensor and node their mean magnitude: x ~ mean|x| sign(x).

    A 0 is sent as positive. The mean is sent in float32 whatever the tensor's type. Bytes: ceil(n / 8) + 4.

    >>> code = Sign().encode(torch.tensor([[1.0, -2.0, 3.0]]))
    >>> code
    {'values': tensor([[5]], dtype=torch.uint8), 'scale': tensor([2.])}
    >>> Sign().decode(code, like=torch.zeros(1, 3))
    tensor([[ 2., -2.,  2.]])
    """

    def encode(self, x: Tensor, draw: Draw | None = None) -> Code:
        flat = x.reshape(len(x), _size(x))
        scale = flat.abs().mean(1) if flat.shape[1] else flat.sum(1)  # of nothing: 0
        return {"values": pack((flat >= 0).to(torch.uint8), 1), "scale": scale.float()}

    def decode(self, code: Code, like: Tensor) -> Tensor:
        sign = unpack(code["values"], 1, _size(like)).to(like.dtype).mul_(2).sub_(1)
        return _shaped(sign.mul_(code["scale"][:, None].to(like.dtype)), like)


class PowerSGD:
    """Two matrices of r columns in place of one: M ~ P Q^T, by one power iteration from the Q of the exchange before.

    P <- orthonormalise(mean_i M_i Q);  Q_i <- M_i^T P;  Q <- mean_i Q_i;  the mean of the M_i is read as P Q^T, and
    node i's own part of it as P Q_i^T.

    A tensor of more than two dimensions is folded into `[shape[0], rest]`. One of less than two, and one for which
    r (rows + columns) is not less than rows * columns, is averaged as it is, exactly: that includes r >= rows or
    columns. Payload: r (rows + columns) b, of the others n b; in two averages.

    Two averages for any number of tensors: P and what is averaged as it is, then Q. A column of Q that died out,
    because the matrix once had a lower rank than r, is drawn anew; so is Q at the beginning.

    Args:
        rank: r.

    >>> M = torch.outer(torch.tensor([1.0, 2.0, 2.0, 0.0]), torch.tensor([3.0, 0.0, 4.0]))[None]
    >>> codec, draw = PowerSGD(rank=1), Draw(lambda: torch.Generator().manual_seed(0), torch.arange(1))
    >>> average, own, state = codec.reduce({"w": M}, codec.init({"w": M}), mean=lambda x: x, draw=lambda name: draw)
    >>> torch.allclose(average["w"], M, atol=1e-5)  # M has rank 1
    True

    Reference: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization", arXiv 1905.13727. Deviations: the residual of a node is taken to its own P Q_i^T, as algorithm 2
    has it (the authors' code and torch's hook take it to the mean; the averages are the same, and only so does the
    residual not grow with the differences between the nodes); Householder QR in place of Gram-Schmidt, for the same
    span; columns that died out are drawn anew.
    """

    def __init__(self, rank: int = 4) -> None:
        self.rank = check.integer("rank", rank, what="the number of columns of the two matrices sent in place of one")

    def init(self, values: Tree) -> Tree:
        """Q of every matrix, `[1, columns, r]`: zeros, that is to be drawn."""
        shapes = {name: _matrix_shape(x) for name, x in values.items() if self.compresses(x)}
        return {name: values[name].new_zeros(1, columns, self.rank) for name, (_, columns) in shapes.items()}

    def compresses(self, x: Tensor) -> bool:
        """Whether two matrices are smaller than the tensor of one node, `x[0]`.

        >>> PowerSGD(rank=2).compresses(torch.zeros(1, 10, 10)), PowerSGD(rank=2).compresses(torch.zeros(1, 10))
        (True, False)
        """
        rows, columns = _matrix_shape(x)
        return x.dim() > 2 and self.rank * (rows + columns) < rows * columns

    def reduce(
        self, values: Tree, state: Tree, mean: Callable[[Tree], Tree], draw: Callable[[str], Draw]
    ) -> tuple[Tree, Tree, Tree]:
        """The average `[1, *]`, each node's own part of it `[L, *]`, and the state after it."""
        M = {name: x.reshape(-1, *_matrix_shape(x)) for name, x in values.items() if self.compresses(x)}
        whole = {name: x for name, x in values.items() if name not in M}
        first = mean({**whole, **{name: _products(m, self._alive(state[name], draw(name))) for name, m in M.items()}})
        # A copy where the mean of equal values is the tensor itself: the caller may overwrite that.
        average = {name: first[name].clone() if first[name] is x else first[name] for name, x in whole.items()}
        own = dict(whole)
        if M:
            P = {name: _orthonormalise(first[name]) for name in M}
            Q_own = {name: _products(m.mT, P[name]) for name, m in M.items()}
            Q = mean(Q_own)
            average |= {name: (P[name] @ Q[name].mT).view(-1, *values[name].shape[1:]) for name in M}
            own |= {name: _products(P[name], Q_own[name].mT).view_as(values[name]) for name in M}
            state = {**state, **Q}
        return {name: average[name] for name in values}, {name: own[name] for name in values}, state

    def _alive(self, Q: Tensor, draw: Draw) -> Tensor:
        """Q with its columns of nothing but rounding errors drawn anew."""
        size = torch.linalg.vector_norm(Q, dim=-2, keepdim=True)  # [1, 1, r]
        dead = size <= torch.finfo(Q.dtype).eps ** 0.75 * size.amax(-1, keepdim=True)
        return torch.where(dead, draw.normal(Q.shape[1:], Q.dtype).to(Q.device), Q) if dead.any() else Q

    def __repr__(self) -> str:
        return _shown(self)


Compressor: TypeAlias = Codec | PowerSGD

METHODS: dict[str, Callable[..., Compressor]] = {
    "topk": TopK,
    "randomk": RandomK,
    "int8": functools.partial(Quantise, 8),
    "int4": functools.partial(Quantise, 4),
    "sign": Sign,
    "powersgd": PowerSGD,
}


def make_codec(method: str | Compressor, **options: Any) -> Compressor:
    """A codec by its name and options, or the one given.

    >>> make_codec("topk", fraction=0.1), make_codec("int4")
    (TopK(fraction=0.1, k=None), Quantise(bits=4, stochastic=False))
    """
    if isinstance(method, (Codec, PowerSGD)):
        if options:
            raise TypeError(f"{method!r} has its options already; {', '.join(options)} go with a name: 'topk', say.")
        return method
    if not isinstance(method, str):
        raise TypeError(f"method={method!r} must be one of {', '.join(METHODS)}, or a codec such as TopK(0.01).")
    check.choice("method", method, METHODS)
    allowed = list(inspect.signature(METHODS[method]).parameters) if method != "sign" else []
    check.keywords(repr(method), options, allowed)
    return METHODS[method](**options)


# ------------------------------------------------------------------------------------------------ bits in bytes


def pack(values: Tensor, bits: int) -> Tensor:
    """Several values of 1, 2 or 4 bits to a byte, the first in the lowest bits: uint8 `[L, n]` -> `[L, bytes]`.

    >>> pack(torch.tensor([[1, 2, 15]], dtype=torch.uint8), 4)  # 1 + 2 * 16, 15
    tensor([[33, 15]], dtype=torch.uint8)
    """
    to_byte = 8 // bits
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % to_byte))
    shifted = padded.view(len(values), padded.shape[1] // to_byte, to_byte) << _shifts(bits, values.device)
    return shifted.sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int, n: int) -> Tensor:
    """The inverse of `pack` for n values: uint8 `[L, bytes]` -> `[L, n]`."""
    values = (packed[..., None] >> _shifts(bits, packed.device)) & (2**bits - 1)
    return values.flatten(1)[:, :n]


def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=device)


# ---------------------------------------------------------------------------------------------------- small parts


def part_of(n: int, fraction: float) -> int:
    """That fraction of n, rounded, and at least one.

    >>> part_of(1000, 0.0105), part_of(10, 0.01)
    (10, 1)
    """
    return min(n, max(1, round(fraction * n)))


def index_dtype(n: int) -> torch.dtype:
    """The integer type in which indices into n values are sent."""
    return torch.int32 if n <= 2**31 else torch.int64


def check_fraction(name: str, value: Any) -> float:
    """Return `value` if it is a number in (0, 1].

    >>> check_fraction("fraction", 2)
    Traceback (most recent call last):
    ...
    ValueError: fraction=2 must be a number in (0, 1]: the part of the values that is sent, such as 0.01.
    """
    return check.number(name, value, "(0, 1]", "the part of the values that is sent, such as 0.01")


def check_bits(name: str, value: Any) -> int:
    """Return `value` if it is 4 or 8.

    >>> check_bits("quantization_bits", 16)
    Traceback (most recent call last):
    ...
    ValueError: quantization_bits=16 is not possible: values are sent in 8 or 4 bits.
    """
    if not isinstance(value, numbers.Integral) or value not in (4, 8):
        raise ValueError(f"{name}={value!r} is not possible: values are sent in 8 or 4 bits.")
    return int(value)


def _size(x: Tensor) -> int:
    """Values of one node."""
    return math.prod(x.shape[1:])


def _shaped(flat: Tensor, like: Tensor) -> Tensor:
    """`[R, n]` -> `[R, *shape]` of `like`, which may have no elements."""
    return flat.view(len(flat), *like.shape[1:])


def _matrix_shape(x: Tensor) -> tuple[int, int]:
    """One node's tensor as a matrix: `[L, rows, *rest]` -> (rows, columns)."""
    return (x.shape[1], math.prod(x.shape[2:])) if x.dim() > 2 else (1, _size(x))


def _products(a: Tensor, b: Tensor) -> Tensor:
    """A matrix product for each node, `[1 or L, n, m]` and `[1 or L, m, r]`, whose bits do not depend on L.

    A batch of one takes another kernel, which rounds in another way, than a batch of several.
    """
    num_nodes = max(len(a), len(b))
    size = max(2, num_nodes)
    return torch.bmm(a.expand(size, -1, -1), b.expand(size, -1, -1))[:num_nodes]


def _orthonormalise(P: Tensor) -> Tensor:
    """An orthonormal basis of the columns, `[..., rows, r]`; half precision goes through float32."""
    return torch.linalg.qr(P.to(torch.promote_types(P.dtype, torch.float32))).Q.to(P.dtype)


def _column(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.dim() - 1))


def _needed(draw: Draw | None, codec: Codec) -> Draw:
    if draw is None:
        raise ValueError(f"{codec!r} draws random numbers: encode(x, draw).")
    return draw


def _shown(codec: object) -> str:
    return f"{type(codec).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(codec).items())})"
