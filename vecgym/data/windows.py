"""Text as tokens, and all windows of it as a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from vecgym.core import check
from vecgym.data.checks import describe, is_integers


class TokenWindows(Dataset[tuple[Tensor, Tensor]]):
    """All windows of a text: item i is `(tokens[i:i+context], tokens[i+1:i+context+1])`.

    `tokens` is a 1-D integer tensor `[n]`; the length is `n - context`, the windows are int64. A whole batch
    is two gathers from strided views. Errors: `ValueError` if the text is shorter than `context + 1` tokens.

    >>> TokenWindows(torch.arange(10), context=3)[4]
    (tensor([4, 5, 6]), tensor([5, 6, 7]))
    """

    def __init__(self, tokens: Tensor, context: int):
        self.context = check.integer("context", context, 1)
        _check_tokens(tokens)
        if len(tokens) <= self.context:
            raise ValueError(
                f"tokens has {len(tokens)} tokens, too few for one window with context={context}. "
                f"Allowed: at least context + 1 = {context + 1}. Fix: a longer text or a smaller context"
            )
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens) - self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index % len(self)
        window = self.tokens[start : start + self.context + 1].long()
        return window[:-1], window[1:]

    def __getitems__(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Return the windows of many indices at once: two tensors `[len(indices), context]`."""
        index = torch.as_tensor(indices, dtype=torch.long, device=self.tokens.device)
        inputs = self.tokens[:-1].unfold(0, self.context, 1)  # a view [n - context, context], nothing copied
        targets = self.tokens[1:].unfold(0, self.context, 1)
        return inputs.index_select(0, index).long(), targets.index_select(0, index).long()


def encode_text(text: str, vocabulary: str | None = None) -> tuple[Tensor, str]:
    """Encode characters as tokens, int64 `[len(text)]`; also return the vocabulary (default: the sorted characters).

    Errors: `ValueError` for an empty text or a character that the vocabulary lacks.

    >>> encode_text("hello")
    (tensor([1, 0, 2, 2, 3]), 'ehlo')
    """
    check.instance("text", text, str, "a str")
    check.instance("vocabulary", vocabulary, (str, type(None)), "a str of all characters, or None")
    if not text:
        raise ValueError("text is empty. Allowed: at least one character")
    characters = "".join(sorted(set(text))) if vocabulary is None else vocabulary
    number = {character: i for i, character in enumerate(characters)}
    missing = sorted(set(text) - set(characters))
    if missing:
        raise ValueError(
            f"text has characters that the vocabulary lacks: {missing[:10]}. "
            "Fix: encode the whole text first, then split its tokens into training and validation"
        )
    return torch.tensor([number[character] for character in text]), characters


def decode_text(tokens: Tensor, vocabulary: str) -> str:
    """Decode tokens `[n]` to text.

    Errors: `TypeError` unless `tokens` is an integer tensor `[n]`; `ValueError` for tokens the vocabulary lacks.

    >>> decode_text(torch.tensor([1, 0, 2, 2, 3]), "ehlo")
    'hello'
    """
    size = len(check.instance("vocabulary", vocabulary, str, "the vocabulary of encode_text, a str"))
    _check_tokens(tokens)
    missing = sorted({token for token in tokens.tolist() if not 0 <= token < size})
    if missing:
        raise ValueError(f"tokens has {missing[:10]}, but the vocabulary only has 0 to {size - 1}")
    return "".join(vocabulary[token] for token in tokens.tolist())


def _check_tokens(tokens: Any) -> None:
    if not is_integers(check.has_values("tokens", tokens)):
        raise TypeError(f"tokens is {describe(tokens)}. Allowed: a 1-D integer tensor. Fix: torch.tensor(ids)")
