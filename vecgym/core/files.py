"""Files that appear complete or not at all, whatever happens while they are written; and locks."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from vecgym.core import check

PARTIAL = ".partial"  # the suffix of a file that is being written


@contextmanager
def write_atomically(path: str | os.PathLike[str], mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a file that replaces `path` when the block ends without an error; otherwise `path` stays as it was.

    The contents go to a temporary file next to it, which is synced to disk and then renamed to `path`. Missing folders
    are created. A program that is killed meanwhile leaves the temporary file behind: the next one that writes `path`
    removes it.

    Args:
        mode: "wb", or "w" for UTF-8 text, with line ends as written.

    Raises:
        TypeError: if `path` is not a path.
        OSError: if the disk is full or not writable.

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
    """Remove the temporary files, of files whose names match `pattern`, that killed programs have left behind.

    A file that is still being written is locked, and stays.
    """
    for path in filter(os.path.isfile, Path(folder).glob(f".{pattern}{PARTIAL}")):  # to open a pipe may take forever
        with contextlib.suppress(OSError), path.open("rb") as file:
            _lock(file.fileno())
            path.unlink()


class Lock:
    """A lock file that one process at a time holds until it releases it or ends. The file names its holder.

    A file system without locks guards nothing: there every process acquires it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     lock, other = Lock(Path(folder, "lock")), Lock(Path(folder, "lock"))
    ...     lock.take(), str(other.take()).endswith("which is this one"), lock.release(), other.take(), other.release()
    (None, True, None, None, None)
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def take(self) -> str | None:
        """Acquire the lock and return None, or return who holds it."""
        while self._descriptor is None:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                _lock(descriptor)
            except BlockingIOError:
                os.close(descriptor)
                return self._holder()
            except OSError:  # a file system without locks
                pass
            if self._is_current(descriptor):  # otherwise its last holder has removed the file meanwhile
                with contextlib.suppress(OSError):  # a full disk: then the lock names nobody
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, f"{os.getpid()} {socket.gethostname()}".encode())
                self._descriptor = descriptor
                _acquired.add(self)
            else:
                os.close(descriptor)
        return None

    def release(self) -> None:
        """Release the lock if it is held."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()
            self.forget()

    def forget(self) -> None:
        """Close the file without removing it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None
        _acquired.discard(self)

    def _is_current(self, descriptor: int) -> bool:
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(descriptor), self.path.stat())
        return False

    def _holder(self) -> str:
        for _ in range(20):  # the holder may not have written its identity yet
            with contextlib.suppress(OSError, ValueError):
                pid, host = self.path.read_text().split()
                return f"process {pid} on {host}" + ", which is this one" * (pid == str(os.getpid()))
            time.sleep(0.02)
        return "another process"


_acquired: set[Lock] = set()


def _forget_inherited() -> None:
    """Close the locks of the parent in a process that was forked: they belong to the parent."""
    for lock in list(_acquired):
        lock.forget()


os.register_at_fork(after_in_child=_forget_inherited)


def _lock(descriptor: int) -> None:
    """Lock a file until it is closed or the program ends; raise an OSError if another program holds the lock."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sync_folder(folder: Path) -> None:
    """Sync a folder, which holds the names of its files, to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
