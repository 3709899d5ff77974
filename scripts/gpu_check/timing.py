"""Time on the device."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def milliseconds(run: Callable[[int], object], repeats: int = 30, warm_up: int = 5) -> float:
    """Median of ``repeats`` runs by device events; ``run`` is told which it is, so that it can change its inputs."""
    for number in range(warm_up):
        run(number)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for number, (begin, end) in enumerate(events):
        begin.record()
        run(number)
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


def copy_bandwidth(device: torch.device, size: int = 4 << 30) -> float:
    """Bytes per second, read and written together, of a large copy within the device's memory."""
    source = torch.randint(0, 2**31 - 1, (size // 4,), dtype=torch.int32, device=device)
    destination = torch.empty_like(source)
    return 2 * size / milliseconds(lambda _: destination.copy_(source), 10) * 1e3
