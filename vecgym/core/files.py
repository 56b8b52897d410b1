"""Files that appear whole or not at all, whatever happens while they are written."""

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
    """A file to write to that takes the place of `path` when the block ends well; else `path` stays as it was.

    What is written goes to a file beside it, is on disk before it gets the name `path`, and so is the name. Missing
    folders are made. Of a program that is killed meanwhile the other file is left: the next one that writes `path`
    removes it.

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
    """Remove what a program that was killed has left of files whose names match `pattern`.

    What a program is still writing has its lock, and stays; on Windows, where it has none, it cannot be removed.
    """
    for path in Path(folder).glob(f".{pattern}{PARTIAL}"):
        if not is_regular(path):
            continue
        with contextlib.suppress(OSError), path.open("rb") as file:
            _lock(file.fileno())
            path.unlink()


def is_regular(path: str | os.PathLike[str]) -> bool:
    """Whether this is a file with contents, no folder, pipe, socket or device: to open a pipe may wait forever.

    >>> is_regular("/dev/null"), is_regular(__file__), is_regular("no such file")
    (False, True, False)
    """
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def _lock(descriptor: int) -> None:
    """Until the file is closed, also by the end of the program; an OSError if another has it."""
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sync_folder(folder: Path) -> None:
    """The name of a file is kept by its folder, which is on disk only when that is."""
    if os.name == "nt":  # there a folder cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
