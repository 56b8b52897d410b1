"""Connect the processes of a run with the one that started them: messages, and the progress of each."""

from __future__ import annotations

import ctypes
import threading
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vecgym.collectives.wire import Wire
from vecgym.core import tree


class Progress:
    """The progress of the processes, in memory that they share with the process that started them."""

    LENGTH = 200  # bytes of a text

    def __init__(self, context: Any, num_processes: int) -> None:
        self.counts = context.RawArray("q", 2 * num_processes)  # steps forward of each; whether it waits for others
        self._texts = [context.RawArray(ctypes.c_char, self.LENGTH) for _ in range(num_processes)]

    def say(self, rank: int, text: str) -> None:
        self._texts[rank].value = text.encode()[: self.LENGTH]

    def said(self) -> str:
        """Say what each process was about to do, if that differs between them; else return ""."""
        texts = [text.value.decode(errors="ignore") or "nothing yet" for text in self._texts]
        if len(set(texts)) == 1:
            return ""
        return f". The last exchange of {'; of '.join(f'process {rank}: {text}' for rank, text in enumerate(texts))}"


class Link:
    """The connection of a process to the one that started it.

    Attributes:
        rank, num_processes: of this process, and W.

    >>> def work(link):
    ...     link.announce("nothing")  # the error would say this if the process hung now
    ...     link.watch(inside=False)  # it makes progress
    ...     link.send({"rank": link.rank})
    ...     link.put("message", "the same, in full")
    >>> from vecgym.runs.multiprocess import run
    >>> run(work, 1, start_method="fork", on_message=print)
    0 {'rank': 0}
    0 the same, in full
    [None]
    """

    def __init__(self, rank: int, num_processes: int, pipe: Any, progress: Progress) -> None:
        self.rank = rank
        self.num_processes = num_processes
        self._pipe = pipe
        self._progress = progress
        self._lock = threading.Lock()
        self.began = False
        self.inside = False

    def send(self, message: Any) -> None:
        """Hand nested dicts, lists and tuples of tensors, numpy arrays and plain values to `on_message`."""
        self.began = True
        self.put("message", message)

    def watch(self, inside: bool) -> None:
        """Report that this process makes progress, and whether it now waits for others."""
        self.inside = inside
        self._progress.counts[2 * self.rank] += 1
        self._progress.counts[2 * self.rank + 1] = int(inside)

    def announce(self, text: str) -> None:
        """Report what this process is about to do together with others, for a possible error."""
        self._progress.say(self.rank, text)

    def put(self, kind: str, value: Any) -> None:
        """Send a message of any kind: "message", "warning", "return" or "error"."""
        with self._lock:  # warnings may come from other threads
            self._pipe.send((kind, packed(value)))


_current: Link | None = None  # of this process, if `multiprocess.run` has started it


def current() -> Link | None:
    """Return the link of this process; None if `multiprocess.run` has not started it."""
    return _current


def enter(link: Link | None) -> None:
    """Make `link` the one of this process."""
    global _current
    _current = link


def watch(inside: bool) -> None:
    """Call `Link.watch` of this process, if it has a link."""
    if _current is not None:
        _current.watch(inside)


def announce(text: str) -> None:
    """Call `Link.announce` of this process, if it has a link."""
    if _current is not None:
        _current.announce(text)


def wire() -> Wire:
    """Return a wire among all processes that reports each exchange to the one that started them."""
    return Wire(watch=watch, announce=announce)


# --------------------------------------------------------------------------------------------- what crosses a pipe


class _Packed(NamedTuple):
    """A tensor as bytes: torch's own way through a pipe is shared memory, which is small in containers."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: np.ndarray


def packed(value: Any) -> Any:
    """Return `value` with its tensors as numpy arrays of bytes.

    >>> message = packed({"a": torch.ones(2), "b": 3})
    >>> message["a"].data.nbytes, message["b"]
    (8, 3)
    """

    def pack(x: Tensor) -> Any:
        flat = x.detach().cpu().contiguous().view(-1)
        return _Packed(x.dtype, tuple(x.shape), flat.view(torch.uint8).numpy())

    return tree.map_leaves(pack, value)


def unpacked(value: Any) -> Any:
    """Invert `packed`.

    >>> unpacked(packed({"a": torch.tensor([1.5, 2.0], dtype=torch.bfloat16), "b": (3, "text")}))
    {'a': tensor([1.5000, 2.0000], dtype=torch.bfloat16), 'b': (3, 'text')}
    """

    def unpack(x: _Packed) -> Tensor:
        if not x.data.size:  # no view of another type is taken of nothing
            return torch.empty(x.shape, dtype=x.dtype)
        # A copy: what came through the pipe cannot be written to.
        return torch.from_numpy(x.data.copy()).view(x.dtype).view(x.shape)

    return tree.map_leaves(unpack, value, kind=_Packed)
