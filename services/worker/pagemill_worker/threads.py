"""How many CPU threads the forward pass takes.

OpenMP threads wait for a few microseconds and then sleep: the commands settle that before torch is loaded, because its
runtime reads the environment once (threads that spin on take the core that gateway and scheduler need, and are slowed
ten times by them in turn). But waking a thread takes as long as a small matrix product, above all on virtual machines.
So a decode step and a prefill chunk have a number of threads each. It is tried anew while the server runs: what is
measured at start may be disturbed by all else that starts then, and tells of one size of iteration only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

CGROUP = Path("/sys/fs/cgroup")
PREFILL_FROM = 64
"""Tokens of an iteration from which on it counts as prefill."""
GAIN = 1.15
"""So many times as fast more threads must be, because the other processes of the server need the cores, too."""
TURNS = 4
"""Iterations that each of two counts gets in a trial, or half as many if it is plain then that the other one is no
better; the fastest of them counts."""
_SIZES = 32
FIRST_TRIAL, NEXT_TRIAL = 16, 1024
"""Iterations of a size before its first trial, or before the next one when the last was won and there is more to be
had in its direction, and before any other: counts that are about as good must not swap all the time."""


class Threads(Protocol):
    """How many threads iterations take, by their tokens."""

    def of(self, tokens: int) -> int:
        """Threads for the next iteration, of so many tokens."""

    def took(self, tokens: int, seconds: float) -> None:
        """That iteration took so long."""


@dataclass(frozen=True, slots=True)
class ThreadPolicy:
    """Fixed: threads for iterations of few tokens (``decode``) and of many (``prefill``)."""

    decode: int
    prefill: int

    def of(self, tokens: int) -> int:
        return self.prefill if tokens >= PREFILL_FROM else self.decode

    def took(self, tokens: int, seconds: float) -> None:
        pass


@dataclass(slots=True)
class _Size:
    """Iterations of about as many tokens.

    Attributes:
        at: the place of their count of threads; rival: of the one that is tried beside it, -1 when none is.
        due: iterations until the next trial; upward: it tries more threads.
        tokens: of the first iteration of the trial; turn: how many iterations it has had.
        least: seconds per token of the fastest iteration, with the count and with its rival.
    """

    at: int
    rival: int = -1
    due: int = FIRST_TRIAL
    upward: bool = True
    tokens: int = 0
    turn: int = 0
    least: list[float] = field(default_factory=list)


class AdaptiveThreads:
    """Counts of threads that are put to the test while they work.

    Iterations fall into sizes by their tokens, by powers of two, each with a count of its own. Now and then the next
    higher or lower count takes turns with it, and whichever is faster goes on; if that was no gain, two to four
    iterations in a thousand were slower.

    Args:
        counts: ascending; those of ``first`` are among them.
        first: what was measured at start.
        report: told when a count changes.
    """

    def __init__(self, counts: list[int], first: ThreadPolicy, report: Callable[[str], None]) -> None:
        self._counts, self._report = counts, report
        self._sizes = [_Size(counts.index(first.of(2**bits - 1))) for bits in range(_SIZES)]

    def of(self, tokens: int) -> int:
        size = self._sizes[tokens.bit_length()]
        return self._counts[size.rival if size.rival >= 0 and size.turn % 2 else size.at]

    def took(self, tokens: int, seconds: float) -> None:
        if len(self._counts) == 1:
            return
        size = self._sizes[tokens.bit_length()]
        if size.rival < 0:
            size.due -= 1
            if size.due <= 0:
                self._begin(size)
            return
        if not size.turn:
            size.tokens = tokens
        elif 8 * abs(tokens - size.tokens) > size.tokens:
            size.rival, size.due = -1, FIRST_TRIAL  # not to be compared
            return
        arm = size.turn % 2
        size.least[arm] = min(size.least[arm], seconds / tokens)
        size.turn += 1
        mine, other = size.least
        if size.turn == 2 * TURNS or (size.turn == TURNS and other >= mine * GAIN):
            self._end(size)

    def _begin(self, size: _Size) -> None:
        size.upward = not size.at or (size.upward and size.at + 1 < len(self._counts))
        size.rival = size.at + 1 if size.upward else size.at - 1
        size.turn, size.least = 0, [math.inf, math.inf]

    def _end(self, size: _Size) -> None:
        mine, other = size.least
        before, rival, size.rival = size.at, size.rival, -1
        if other * GAIN <= mine if size.upward else other < mine * GAIN:
            goes_on = 0 < rival < len(self._counts) - 1
            size.at, size.due = rival, FIRST_TRIAL if goes_on else NEXT_TRIAL
            counts = f"{self._counts[rival]} instead of {self._counts[before]}"
            times = f"{other / mine:.2f} times as long" + ("" if size.upward else ", and a core is left to others")
            self._report(f"threads: {counts} for iterations of about {size.tokens} tokens, which take {times}")
        else:
            size.upward, size.due = not size.upward, NEXT_TRIAL


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Cores that this process may use: its affinity, cut by the CPU quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroup)
    return max(1, min(cores, math.floor(quota))) if quota else cores


def _quota(cgroup: Path) -> float | None:
    try:
        text, period = (cgroup / "cpu.max").read_text().split()
        return None if text == "max" else int(text) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit = int((cgroup / "cpu/cpu.cfs_quota_us").read_text())
        return limit / int((cgroup / "cpu/cpu.cfs_period_us").read_text()) if limit > 0 else None
    except (OSError, ValueError):
        return None


def candidates(cores: int) -> list[int]:
    """Thread counts worth trying, fewest first: powers of two, and all cores; from four cores on one of them is left to
    gateway and scheduler. With fewer these share the cores, which passive waiting makes bearable."""
    most = cores - 1 if cores >= 4 else cores
    return sorted({most} | {1 << power for power in range(most.bit_length())})


def choose(counts: list[int], measure: Callable[[int], float], gain: float = GAIN) -> tuple[int, dict[int, float]]:
    """The count after which more threads no longer pay: each step up must be faster by ``gain``.

    Args:
        measure: seconds of a fixed piece of work with that many threads.

    Returns:
        The choice, and the seconds of every count tried.
    """
    seconds = {counts[0]: measure(counts[0])}
    chosen = counts[0]
    for count in counts[1:]:
        seconds[count] = measure(count)
        if seconds[count] * gain > seconds[chosen]:
            break
        chosen = count
    return chosen, seconds
