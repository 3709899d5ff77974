"""How many CPU threads the forward pass takes.

OpenMP threads wait for a few microseconds and then sleep: the commands settle that before torch is loaded, because its
runtime reads the environment once (threads that spin on take the core that gateway and scheduler need, and are slowed
ten times by them in turn). But waking a thread takes as long as a small matrix product, above all on virtual machines.
So a decode step and a prefill chunk have a number of threads each.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
PREFILL_FROM = 64
"""Tokens of an iteration from which on it counts as prefill."""


@dataclass(frozen=True, slots=True)
class ThreadPolicy:
    """Threads for iterations of few tokens (``decode``) and of many (``prefill``)."""

    decode: int
    prefill: int

    def of(self, tokens: int) -> int:
        return self.prefill if tokens >= PREFILL_FROM else self.decode


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


def choose(counts: list[int], measure: Callable[[int], float], gain: float = 1.15) -> tuple[int, dict[int, float]]:
    """The count after which more threads no longer pay: each step up must be faster by ``gain``, because the other
    processes of the server need the cores, too.

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
