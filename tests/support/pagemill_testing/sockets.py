"""What tests of sockets share: short-lived ipc folders, processes to kill, and waiting for conditions."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import zmq

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds until a condition that must come true counts as failed. Tests never take that long when they pass."""


@contextmanager
def ipc_folder() -> Iterator[Path]:
    """A folder with a short path: ipc addresses hold about a hundred characters."""
    with tempfile.TemporaryDirectory(prefix="pm-") as path:
        yield Path(path)


def wait_until(probe: Callable[[], T], *sockets: zmq.Socket[bytes], what: str = "condition") -> T:
    """Calls ``probe`` after each arrival on ``sockets`` (or now and then) until it gives something true."""
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    deadline = time.monotonic() + PATIENCE
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true within {PATIENCE} s")
        if sockets:
            poller.poll(20)
        else:
            time.sleep(0.005)


@contextmanager
def python(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that runs ``script``; killed at the end if it still lives."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
