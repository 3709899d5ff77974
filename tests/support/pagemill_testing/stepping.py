"""Workers with a real model that a test can hold, so that nothing is over before it has been looked at."""

from __future__ import annotations

import array
import fcntl
import os
import termios
from contextlib import suppress
from pathlib import Path

from pagemill_testing.program import Program


class SteppedWorker(Program):
    """A worker process that works freely until it is held."""

    def __init__(self, folder: Path, name: str, **settings: object) -> None:
        pipe = folder / f"{name}.steps"
        os.mkfifo(pipe, 0o600)
        self._steps = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        self.pagemill = (str(Path(__file__).with_name("stepped_worker.py")), str(pipe))
        super().__init__(folder, name, "worker", **settings)
        self.go_on()

    def go_on(self) -> None:
        """Lets it work: as many plans as the pipe holds bytes, some ten thousand."""
        with suppress(BlockingIOError):
            while True:
                os.write(self._steps, bytes(4096))

    def hold(self) -> None:
        """It ends the plan that it is at, if any, and begins no other. Its heartbeats go on."""
        with suppress(BlockingIOError):
            while True:
                os.read(self._steps, 65536)

    def step(self) -> None:
        """Held: lets it carry out one plan, unless the last one that it was let is still to come."""
        waiting = array.array("i", [0])
        fcntl.ioctl(self._steps, termios.FIONREAD, waiting)
        if not waiting[0]:
            os.write(self._steps, b"\0")

    def close(self) -> None:
        super().close()
        if self._steps >= 0:
            os.close(self._steps)
            self._steps = -1
