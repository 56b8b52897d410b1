"""Codecs one after the other."""

from __future__ import annotations

from torch import Tensor

from vecgym.compress.codecs import Code, Codec, Draw
from vecgym.core import check


class Chain(Codec):
    """Two codecs, one after the other: the values that the first sends of a tensor are coded once more by the second.

    Bytes: those of the first without its values, and those of the second for its values.

    Args:
        first: TopK or RandomK.
        second: any other codec.

    Raises:
        TypeError: for a first codec that sends no values of its own, and what is no codec.

    >>> import torch
    >>> from vecgym.compress import Quantise, TopK
    >>> codec, x = Chain(TopK(k=2), Quantise(2)), torch.tensor([[1.0, -3.0, 2.0, 3.0]])
    >>> code = codec.encode(x)
    >>> sum(part.nbytes for part in code.values())  # two indices, two values in one byte, a scale
    13
    >>> codec.decode(code, like=x)
    tensor([[ 0., -3.,  0.,  3.]])

    Reference: top-k, then 2 bits: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", arXiv
    2508.15706. Deviation: the k largest are those of a tensor, not of each of its chunks.
    """

    def __init__(self, first: Codec, second: Codec) -> None:
        for name, codec in {"first": first, "second": second}.items():
            check.instance(name, codec, Codec, "a codec such as TopK(0.01), Quantise(2)")
        first.num_values(1)  # a TypeError where there are none
        self.first, self.second = first, second

    @property
    def shared(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*self.first.shared, *(f"values {part}" for part in self.second.shared))

    @property
    def contractive(self) -> bool:  # type: ignore[override]
        return self.first.contractive and self.second.contractive

    def encode(self, x: Tensor, draw: Draw | None = None) -> Code:
        code = self.first.encode(x, draw)
        values = self.second.encode(code.pop("values"), draw)
        return {**code, **{f"values {part}": y for part, y in values.items()}}

    def decode(self, code: Code, like: Tensor) -> Tensor:
        return self.first.decode(self._read(code, like), like)

    def average(self, codes: Code, like: Tensor, weights: Tensor | None = None) -> Tensor:
        senders = next(y.shape[:2] for part, y in codes.items() if part not in self.shared)
        rows = {part: y.expand(*senders, *y.shape[2:]).flatten(0, 1) for part, y in codes.items()}
        values = self._read(rows, like)["values"].unflatten(0, senders)
        kept = {part: y for part, y in codes.items() if not part.startswith("values ")}
        return self.first.average({**kept, "values": values}, like, weights)

    def _read(self, code: Code, like: Tensor) -> Code:
        """Return the code of the first codec, parts `[R, ...]`."""
        parts = {name.removeprefix("values "): y for name, y in code.items() if name.startswith("values ")}
        rest = {name: y for name, y in code.items() if not name.startswith("values ")}
        return {**rest, "values": self.second.decode(parts, like.new_empty(1, self.first.num_values_of(like)))}
