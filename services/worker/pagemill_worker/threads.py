"""How many CPU threads the forward pass takes, and how they wait.

OpenMP threads that spin at a barrier take the core that gateway and scheduler need, and are slowed ten times by them in
turn. So they must wait passively, which the OpenMP runtime decides once, when torch is loaded: `wait_passively` has to
run before anything imports torch. This module therefore does not.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, MutableMapping
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
_PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}  # GNU's and LLVM's or Intel's runtime


def wait_passively(environment: MutableMapping[str, str]) -> None:
    """Makes OpenMP threads sleep at barriers, unless the operator chose otherwise. Call with os.environ before torch is
    imported; later it has no effect."""
    for name, value in _PASSIVE.items():
        environment.setdefault(name, value)


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
    """Thread counts worth trying, fewest first: powers of two, and all cores."""
    counts = {cores} | {1 << power for power in range(cores.bit_length()) if 1 << power <= cores}
    return sorted(counts)


def choose(counts: list[int], measure: Callable[[int], float], gain: float = 1.1) -> tuple[int, dict[int, float]]:
    """The count after which more threads no longer pay: each doubling must be faster by ``gain``, because the other
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
