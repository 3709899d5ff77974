"""A file descriptor that other threads and signals make readable, to wake a thread out of ``zmq.Poller.poll``."""

from __future__ import annotations

import signal
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
        """Makes the descriptor readable. Callable from any thread, and harmless after ``close``."""
        try:
            self._writer.send(b"\0")
        except BlockingIOError:
            pass  # so many wake-ups are waiting that one more says nothing
        except OSError:
            pass  # closed: nobody is left to wake

    def wake_on_signals(self) -> None:
        """From now on every handled signal wakes, with its number as the byte that ``drain`` returns.

        The byte is written before Python runs the handler, so it comes through even while the main thread is in a long
        native call. Main thread only.
        """
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def drain(self) -> bytes:
        """Makes the descriptor unreadable again; gives the numbers of the signals that arrived."""
        seen = b""
        while True:
            try:
                chunk = self._reader.recv(4096)
            except BlockingIOError:
                return seen.replace(b"\0", b"")
            if not chunk:
                return seen.replace(b"\0", b"")
            seen += chunk

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
