"""A file descriptor that other threads and signal handlers make readable, to wake a thread out of ``Poller.poll``."""

from __future__ import annotations

import contextlib
import socket


class Wakeup:
    """Poll ``self`` (it has a ``fileno``) for reading; ``drain`` after each wake.

    A poller that is only told a flag would sleep on; one that polls the flag would burn the CPU.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def wake(self) -> None:
        """Makes the descriptor readable. Callable from any thread; after ``close`` nobody is left to wake."""
        with contextlib.suppress(OSError):  # BlockingIOError among them: one of many wake-ups that wait already
            self._writer.send(b"\0")

    def drain(self) -> None:
        """Makes the descriptor unreadable again."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
