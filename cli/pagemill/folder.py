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
    # Locked before it is called a lock: a server that starts now and tidies up must never find it free.
    lock = os.open(folder / "new", os.O_RDWR | os.O_CLOEXEC | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (folder / "new").rename(folder / _LOCK)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
        os.close(lock)


def remove_stale_folders(parent: Path) -> None:
    """Removes folders of this user below ``parent`` that no living server holds."""
    for folder in parent.glob(_PREFIX + "*"):
        # Not ours, or just being made or removed by another server.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            except BlockingIOError:
                continue  # its server lives
            finally:
                os.close(descriptor)


def _parent() -> Path:
    """The folder for temporary files, or /tmp where its name is too long for a socket below it."""
    preferred = Path(tempfile.gettempdir())
    longest = preferred / (_PREFIX + "12345678") / "frontend"
    return preferred if len(os.fsencode(longest)) <= _LONGEST_SOCKET_PATH else Path("/tmp")
