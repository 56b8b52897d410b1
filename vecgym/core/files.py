"""Files that appear complete or not at all, whatever happens while they are written."""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from vecgym.core import check

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PARTIAL = ".partial"  # the end of the name of a file that is being written


@contextmanager
def write_atomically(path: str | os.PathLike[str], mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a file that replaces `path` when the block ends without an error; otherwise `path` stays as it was.

    The contents go to a file next to it, which is on disk before it gets the name `path`, and so is the name. Missing
    folders are created. A program that is killed meanwhile leaves the other file behind: the next one that writes
    `path` removes it.

    Args:
        mode: "wb", or "w": UTF-8, line ends as they are written.

    Raises:
        TypeError: for what is no path.
        OSError: where the disk is full or cannot be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with write_atomically(Path(folder, "a.txt"), "w") as file:
    ...         _ = file.write("whole")
    ...     Path(folder, "a.txt").read_text(), len(os.listdir(folder))
    ('whole', 1)
    """
    target = check.path("path", path)
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a folder: give the path of a file.")
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_partial(target.parent, f"{glob.escape(target.name)}.*")
    partial = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}{PARTIAL}")
    text: dict[str, Any] = {} if "b" in mode else {"newline": "", "encoding": "utf-8"}
    try:
        with partial.open(mode.replace("w", "x"), **text) as file:
            with contextlib.suppress(OSError):  # a file system without locks
                _lock(file.fileno())
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def remove_partial(folder: str | os.PathLike[str], pattern: str = "*") -> None:
    """Remove what a killed program has left behind of files whose names match `pattern`.

    A file that is still being written is locked, and stays; on Windows, without locks, it cannot be removed.
    """
    for path in Path(folder).glob(f".{pattern}{PARTIAL}"):
        if not is_regular(path):
            continue
        with contextlib.suppress(OSError), path.open("rb") as file:
            _lock(file.fileno())
            path.unlink()


def is_regular(path: str | os.PathLike[str]) -> bool:
    """Whether this is a regular file, and no folder, pipe, socket or device: opening a pipe may block forever.

    >>> is_regular("/dev/null"), is_regular(__file__), is_regular("no such file")
    (False, True, False)
    """
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def _lock(descriptor: int) -> None:
    """Lock a file until it is closed, also by the end of the program; an OSError if another program holds the lock."""
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sync_folder(folder: Path) -> None:
    """Write a folder to disk: it holds the names of its files."""
    if os.name == "nt":  # there a folder cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
