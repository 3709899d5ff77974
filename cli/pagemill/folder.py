"""The private folder that holds the ipc sockets of one server."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "pagemill-"
_LOCK = "lock"
_LONGEST_SOCKET_PATH = 100
"""The kernel takes 107 bytes (103 on macOS) for the path of a Unix socket."""


@contextlib.contextmanager
def private_folder(parent: Path | None = None) -> Iterator[Path]:
    """A new folder, for this user only, that is removed at the end.

    Folders left by servers that were killed are removed first: a living server holds a lock on its own.
    """
    parent = parent or _parent()
    remove_stale_folders(parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    lock = _lock(folder, create=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
        if lock is not None:
            os.close(lock)


def remove_stale_folders(parent: Path) -> None:
    """Removes folders of this user below ``parent`` that no living server holds."""
    for folder in parent.glob(_PREFIX + "*"):
        with contextlib.suppress(FileNotFoundError):  # another server may be removing it, too
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            if (lock := _lock(folder, create=False)) is not None:
                shutil.rmtree(folder)
                os.close(lock)


def _lock(folder: Path, *, create: bool) -> int | None:
    """Descriptor that holds the folder's lock, or None when another process holds it."""
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _parent() -> Path:
    """The folder for temporary files, or /tmp where its name is too long for a socket below it."""
    preferred = Path(tempfile.gettempdir())
    longest = preferred / (_PREFIX + "12345678") / "frontend"
    return preferred if len(os.fsencode(longest)) <= _LONGEST_SOCKET_PATH else Path("/tmp")
