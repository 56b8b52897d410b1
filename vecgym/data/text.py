"""Text to train on: a file, or the source of Python's standard library, which needs no download; its tokens."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from vecgym.core import check
from vecgym.data.checks import describe, is_integers

# Modules of every Python from 3.10 to 3.13 with much English text: docstrings and comments.
MODULES = (
    "bisect", "codeop", "contextlib", "dataclasses", "difflib", "doctest", "fractions", "graphlib", "hashlib",
    "heapq", "ipaddress", "lzma", "numbers", "optparse", "pickletools", "random", "sched", "secrets", "shelve",
    "smtplib", "socketserver", "statistics", "tempfile", "textwrap", "threading", "timeit", "typing", "uuid",
)  # fmt: skip

MIN_CHARS = 1000  # of a text to train on


def standard_library_text(num_chars: int | None = 1_000_000) -> str:
    """Return the concatenated source text of `MODULES`: about a million characters of English and Python.

    The text differs slightly between Python versions. Missing modules are skipped, and so are the rare characters
    outside ASCII, which would only enlarge the vocabulary.

    Args:
        num_chars: the maximum number of characters, from the start; None: all.

    Raises:
        ValueError: if no source text is installed.

    >>> print(standard_library_text(27))
    \"""Bisection algorithms.\"""
    """
    check.optional_integer("num_chars", num_chars)
    text = "\n".join(filter(None, map(_source, MODULES)))
    if not text:
        raise ValueError(
            "the source text of Python's standard library is not installed here. Fix: train on your own text, "
            "vecgym compare --text FILE"
        )
    return text[:num_chars]


def read_text(path: str | os.PathLike[str]) -> str:
    """Read the text of a UTF-8 file of at least `MIN_CHARS` characters.

    Raises:
        ValueError: if the file is missing, unreadable, not UTF-8 text, or too short.

    >>> read_text("no-such-file.txt")
    Traceback (most recent call last):
    ...
    ValueError: text file no-such-file.txt cannot be read: No such file or directory.
    """
    file = check.path("path", path)
    if file.exists() and not os.path.isfile(file):
        raise ValueError(f"text file {path} is not a file, but a folder, a pipe, a socket or a device.")
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"text file {path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"text file {path} is not UTF-8 text: byte {error.start} is not. Give plain text.") from None
    if "\0" in text:
        raise ValueError(f"text file {path} is not text: it contains null characters. Give plain text.")
    size = len(text.strip())
    if size < MIN_CHARS:
        raise ValueError(f"text file {path} has {size} characters; at least {MIN_CHARS} are needed.")
    return text


def split_text(text: str) -> tuple[str, str]:
    """Split a text for training and validation: every tenth of a hundred equal parts is for validation.

    Parts from all over the text, not just its end, make the two similar: the end may be about something else.

    >>> split_text("abcdefghij" * 2)
    ('abcdefghiabcdefghi', 'jj')
    """
    size = max(1, -(-len(check.instance("text", text, str, "a str")) // 100))
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    val = parts[9::10]
    del parts[9::10]
    return "".join(parts), "".join(val)


def _source(name: str) -> str:
    """Return a module's source text without importing it; "" if there is none."""
    try:
        spec = importlib.util.find_spec(name)
        source = spec.loader.get_source(name)  # type: ignore[union-attr]  # a loader without it: AttributeError
    except (ImportError, AttributeError, ValueError, OSError):
        return ""
    return (source or "").encode("ascii", "ignore").decode()


# ----------------------------------------------------------------------------------------------------- tokens


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
