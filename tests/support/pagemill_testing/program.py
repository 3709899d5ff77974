"""A pagemill command as a process of a test: its output kept in files, itself never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

DEADLINE = 180.0
"""Seconds until a condition that must come true counts as failed; a loaded machine takes long to load a model."""

INTERRUPTIBLE = ("env", "--default-signal=INT")
"""Goes before a command that a test interrupts: where the tests run in the background of a shell, SIGINT is ignored,
and what they start would ignore it, too."""


def until(probe: Callable[[], T], what: str, seconds: float = DEADLINE) -> T:
    """Calls ``probe`` now and then until it gives something true."""
    end = time.monotonic() + seconds
    while not (value := probe()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.01)
    return value


class Program:
    """``pagemill COMMAND``, with settings as flags. It dies with the process of the tests (Linux).

    Attributes:
        out, err: the files that it prints to.
        pagemill: arguments of Python that stand for ``pagemill``.
    """

    pagemill: tuple[str, ...] = ("-m", "pagemill")

    def __init__(self, folder: Path, name: str, command: str, **settings: object) -> None:
        self.name = name
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PAGEMILL_")}
        python = (sys.executable, "-P")
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [
                    *python,
                    "-m",
                    "pagemill.tether",
                    str(os.getpid()),
                    *python,
                    *self.pagemill,
                    command,
                    *flags(settings),
                ],
                env={**environment, "TMPDIR": str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ended(self) -> int:
        """Waits for its end; the exit status."""
        return self.process.wait(DEADLINE)

    def kill(self) -> None:
        """SIGKILL, and gone when this returns."""
        self.process.kill()
        self.process.wait(DEADLINE)

    def close(self) -> None:
        """Ends it whatever state it is in."""
        if self.alive:
            self.kill()

    def tail(self, lines: int = 15) -> str:
        """The end of what it has printed."""
        text = self.out.read_text(errors="replace") + self.err.read_text(errors="replace")
        return "\n".join(f"{self.name}: {line}" for line in text.splitlines()[-lines:])


def flags(settings: dict[str, object]) -> list[str]:
    """``max_num_seqs=4`` as ``--max-num-seqs 4``; True and False as ``--check-invariants`` and ``--no-…``."""
    words: list[str] = []
    for name, value in settings.items():
        word = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{word}" if value else f"--no-{word}")
        else:
            words += [f"--{word}", str(value)]
    return words
