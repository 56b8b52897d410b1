"""Text to train on: a file, or the source of Python's standard library, which needs no download."""

from __future__ import annotations

import importlib.util
import os

from vecgym.core import check
from vecgym.core.files import is_regular

# Modules of every Python from 3.10 to 3.13 with much English text: docstrings and comments.
MODULES = (
    "bisect", "codeop", "contextlib", "dataclasses", "difflib", "doctest", "fractions", "graphlib", "hashlib",
    "heapq", "ipaddress", "lzma", "numbers", "optparse", "pickletools", "random", "sched", "secrets", "shelve",
    "smtplib", "socketserver", "statistics", "tempfile", "textwrap", "threading", "timeit", "typing", "uuid",
)  # fmt: skip


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


def read_text(path: str | os.PathLike[str], min_chars: int = 1000) -> str:
    """Read the text of a UTF-8 file.

    Args:
        path: the file.
        min_chars: the minimum number of characters.

    Raises:
        ValueError: if the file is missing, unreadable, empty, not UTF-8 text, or too short.

    >>> read_text("no-such-file.txt")
    Traceback (most recent call last):
    ...
    ValueError: text file no-such-file.txt cannot be read: No such file or directory.
    """
    check.integer("min_chars", min_chars, 0)
    file = check.path("path", path)
    if file.exists() and not is_regular(file):
        raise ValueError(f"text file {path} is not a file, but a folder, a pipe, a socket or a device.")
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"text file {path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"text file {path} is not UTF-8 text: byte {error.start} is not. Give plain text.") from None
    if "\0" in text:
        raise ValueError(f"text file {path} is not text: it contains null characters. Give plain text.")
    if not text.strip():
        raise ValueError(f"text file {path} is empty.")
    if len(text) < min_chars:
        raise ValueError(f"text file {path} has {len(text)} characters; at least {min_chars} are needed.")
    return text


def split_text(text: str, num_parts: int = 100, every: int = 10) -> tuple[str, str]:
    """Split a text for training and validation: every tenth of a hundred equal parts is for validation.

    Parts from all over the text, not just its end, make the two similar: the end may be about something else.

    Args:
        text: at least `num_parts` characters.
        num_parts: the number of parts to cut the text into.
        every: every how many parts one is for validation.

    >>> split_text("abcdefghij", num_parts=5, every=2)
    ('abefij', 'cdgh')
    """
    check.instance("text", text, str, "a str")
    check.integer("num_parts", num_parts)
    check.integer("every", every, 2, "every second, third ... part is for validation")
    size = max(1, -(-len(text) // num_parts))
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    val = parts[every - 1 :: every]
    del parts[every - 1 :: every]
    return "".join(parts), "".join(val)


def _source(name: str) -> str:
    """Return a module's source text without importing it; "" if there is none."""
    try:
        spec = importlib.util.find_spec(name)
        source = spec.loader.get_source(name)  # type: ignore[union-attr]  # a loader without it: AttributeError
    except (ImportError, AttributeError, ValueError, OSError):
        return ""
    return (source or "").encode("ascii", "ignore").decode()
