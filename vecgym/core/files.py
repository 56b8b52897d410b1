"""Files that appear complete or not at all, whatever happens while they are written."""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import socket
import stat
import time
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


class Lock:
    """A file that one process at a time holds: until it lets go, or ends in whatever way. It says who holds it.

    Where the system or the file system has no locks, it counts whether the process that is named in it lives.

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
        """Take it and return None; or return who holds it."""
        while self._descriptor is None:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            taken = self._take(descriptor)
            if taken and self._is_here(descriptor):  # else who held it has removed it meanwhile
                self._descriptor = descriptor
                _held.add(self)
                return None
            os.close(descriptor)
            if not taken:
                return self._holder()
        return None

    def release(self) -> None:
        """Let go, if it is held."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)  # on Windows it cannot be removed, and then names nobody
                self.path.unlink()
            self.forget()

    def forget(self) -> None:
        """Close the file, and leave it where it is."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None
        _held.discard(self)

    def _take(self, descriptor: int) -> bool:
        """Lock the file, write into it who we are, and say whether it is ours."""
        mine = f"{os.getpid()} {began(os.getpid())} {socket.gethostname()} {secrets.token_hex(4)}"
        try:
            locks = fcntl is not None
            _lock(descriptor)
        except BlockingIOError:
            return False
        except OSError:
            locks = False
        if not locks and _lives(self._read()):
            return False
        with contextlib.suppress(OSError):  # a full disk: then it has no name
            os.ftruncate(descriptor, 0)
            os.write(descriptor, mine.encode())
        if locks:
            return True
        time.sleep(ASIDE_S)  # of several that find it free, the last to write has it
        return self._read() == mine.split()

    def _is_here(self, descriptor: int) -> bool:
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(descriptor), self.path.stat())
        return False

    def _read(self) -> list[str]:
        with contextlib.suppress(OSError):
            return self.path.read_text(errors="replace").split()
        return []

    def _holder(self) -> str:
        for _ in range(20):  # it may not have written its name yet
            if len(found := self._read()) > 2:
                return f"process {found[0]} on {found[2]}" + ", which is this one" * (found[0] == str(os.getpid()))
            time.sleep(ASIDE_S / 10)
        return "another process"


ASIDE_S = 0.2  # within which, without the system's locks, two that begin together see one another
_held: set[Lock] = set()


def _forget_all() -> None:
    """Close, in a process that has been forked, the locks of its parent: they end with that."""
    for lock in list(_held):
        lock.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def began(pid: int) -> str | None:
    """Say when a process of this machine began, in whatever unit, "?" where that is not told; None: there is none.

    >>> began(os.getpid()) == began(os.getpid()) != began(1), began(2**30)
    (True, None)
    """
    if os.name == "nt":
        import ctypes

        handle = ctypes.windll.kernel32.OpenProcess(0x1000, False, pid)  # type: ignore[attr-defined]
        code = ctypes.c_ulong()
        ctypes.windll.kernel32.GetExitCodeProcess(handle, ctypes.byref(code))  # type: ignore[attr-defined]
        ctypes.windll.kernel32.CloseHandle(handle)  # type: ignore[attr-defined]
        return "?" if code.value == 259 else None  # it has not ended
    try:
        os.kill(pid, 0)
    except PermissionError:  # somebody else's
        pass
    except (OSError, OverflowError):
        return None
    try:
        told = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # no Linux
        return "?"
    return None if told[0] == "Z" else told[19]


def _lives(named: list[str]) -> bool:
    """Whether a process that is named in a lock lives on this machine."""
    here = len(named) > 2 and named[0].isdecimal() and named[2] == socket.gethostname()
    return here and began(int(named[0])) == named[1]


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
