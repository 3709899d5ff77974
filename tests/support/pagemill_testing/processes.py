"""Waiting for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def until(condition: Callable[[], bool], what: str, *, deadline: float = 180.0) -> None:
    """Returns once ``condition`` holds; an AssertionError names ``what`` after ``deadline`` seconds."""
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, f"timed out waiting until {what}"
        time.sleep(0.02)


def children(pid: int) -> dict[int, str]:
    """The processes that a supervisor has started, and their commands; those that end just now are left out."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if len(words) > 1:  # a dead one that waits to be reaped has none
            found[int(child)] = words[-2].decode()
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie, which only waits to be reaped, does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
